"""What the commands on a posterior's file have in common: reading, rewriting, names of the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posthoc_uq.cli.data import Data
from posthoc_uq.cli.labels import read_names
from posthoc_uq.cli.meaning import CLASSES, MEAN, NAMES, SIZE, STD
from posthoc_uq.cli.models import Source, source_of
from posthoc_uq.cli.naming import rename
from posthoc_uq.cli.transforms import resolve_transform
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import check_regular
from posthoc_uq.files import inspect, load, save
from posthoc_uq.posteriors.posterior import Posterior

_PREPARED = {SIZE: "image_size", MEAN: "mean", STD: "std"}  # facts of the fit, and the options that they are
_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def model_and_posterior(path: str, options: Mapping[str, Any]) -> tuple[Source, Posterior]:
    """The model that the options name and the posterior in a file. Images are prepared as for the fit, but for what the
    options say; warns if that differs.
    """
    source = source_of(options)
    posterior = load(path, source.model)
    facts = posterior.history.fit
    kept = {option: facts[fact] for fact, option in _PREPARED.items() if fact in facts}
    if kept and options["transform"] is None:
        chosen = [kept.get(name) if options[name] is None else options[name] for name in _PREPARED.values()]
        source = replace(source, transform=resolve_transform(source.model, source.spec, None, *chosen))
    preparation = facts.get("images")
    if preparation is not None and preparation != source.transform.text:
        warnings.warn(
            f"'{path}' was fitted on images prepared as [{preparation}], and these are prepared as "
            f"[{source.transform.text}].",
            stacklevel=2,
        )
    return source, posterior


def image_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a fit keeps of its options for images, so that other commands prepare images in the same way."""
    given = {fact: options[option] for fact, option in _PREPARED.items()}
    return {fact: value for fact, value in given.items() if value is not None}


def check_posterior_file(path: str) -> None:
    """Refuse a missing file at once, before a model is made."""
    check_regular(path, "The posterior file")
    if not Path(path).is_file():
        what = "is a folder, not a posterior file" if Path(path).is_dir() else "does not exist"
        raise PosthocUQError(f"The posterior file '{path}' {what}.")


def rewrite(
    posterior: Posterior, path: str, options: Mapping[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Save a posterior over its file, or as ``options["output"]``, which then names the model of this command."""
    output = options.get("output")
    if output is not None:
        posterior.history.fit = rename(posterior.history.fit, options, output)
    save(posterior, output or path, dtype=dtype)


def stored_dtype(path: str) -> torch.dtype | None:
    """The half format of a file's numbers, or None."""
    formats = {
        tensor["dtype"] for block in inspect(path)["blocks"].values() for tensor in block["tensors"].values()
    }
    half = formats & _HALF.keys()  # some tensors keep their own format
    return _HALF[half.pop()] if len(half) == 1 else None


def output_names(
    source: Source, posterior: Posterior, path: str | None, data: Data | None = None
) -> Sequence[str] | None:
    """Names of the outputs: from a file, from the class folders or the table, from those of the fit, or from pretrained
    weights.
    """
    if path is not None:
        return read_names(path)
    facts = posterior.history.fit
    kept = facts.get(NAMES, facts.get(CLASSES))
    return (None if data is None else data.class_names) or kept or source.categories
