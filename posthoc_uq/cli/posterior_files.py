"""What the commands on a posterior's file have in common: reading, rewriting, names of the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from posthoc_uq.cli.data import Data
from posthoc_uq.cli.labels import read_names
from posthoc_uq.cli.models import Source
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.storage import inspect, load, save
from posthoc_uq.storage.atomic import checked_target

_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def posterior_of(path: str, source: Source) -> Posterior:
    """The posterior in a file, for this model; warns if images are now prepared in another way than for the fit."""
    posterior = load(path, source.model)
    preparation = posterior.history.fit.get("images")
    if preparation is not None and preparation != source.transform.text:
        warnings.warn(
            f"'{path}' was fitted on images prepared as [{preparation}], and these are prepared as "
            f"[{source.transform.text}].",
            stacklevel=2,
        )
    return posterior


def check_posterior_file(path: str) -> None:
    """Refuse a missing file at once, before a model is made."""
    if not Path(path).is_file():
        what = "is a folder, not a posterior file" if Path(path).is_dir() else "does not exist"
        raise PosthocUQError(f"The posterior file '{path}' {what}.")


def rewrite(posterior: Posterior, path: str, output: str | None) -> None:
    """Save a posterior over its file, or elsewhere, in the number format of that file."""
    save(posterior, output or path, dtype=_stored_dtype(path))


def _stored_dtype(path: str) -> torch.dtype | None:
    formats = {
        tensor["dtype"] for block in inspect(path)["blocks"].values() for tensor in block["tensors"].values()
    }
    half = formats & _HALF.keys()  # some tensors keep their own format
    return _HALF[half.pop()] if len(half) == 1 else None


def check_output(path: str | None) -> None:
    """Refuse a file that cannot be written before hours of work are put into it."""
    if path is not None:
        checked_target(path)


def output_names(source: Source, data: Data, path: str | None) -> Sequence[str] | None:
    """Names of the outputs: from a file, from the class folders, or from pretrained weights."""
    if path is not None:
        return read_names(path)
    return data.class_names or source.categories


def prediction_kind(posterior: Posterior) -> Literal["classes", "values"]:
    """What kind of prediction a posterior gives."""
    return "values" if posterior.noise_variance is not None else "classes"
