"""What the commands on a posterior's file have in common: the model, the posterior, and how it predicts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from posthoc_uq.cli.data import Data
from posthoc_uq.cli.labels import read_names
from posthoc_uq.cli.models import Source
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.storage import inspect, load, save
from posthoc_uq.storage.atomic import checked_target
from posthoc_uq.wrapping import head_class, options_of, recorded_head, wrap

_NO_OPTIONS = ("head", "calibrated")  # of what a threshold was set for
_OBJECTS = ("generator", "output_map")  # options of heads that no text can be the value of
_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def posterior_of(path: str, source: Source) -> Posterior:
    """The posterior in a file, for this model; warns where images are prepared in another way than for the fit."""
    posterior = load(path, source.model)
    used = posterior.record.fit.get("images")
    if used is not None and used != source.transform.text:
        warnings.warn(
            f"'{path}' was fitted on images prepared as [{used}], and these are prepared as [{source.transform.text}].",
            stacklevel=2,
        )
    return posterior


def check_posterior_file(path: str) -> None:
    """Say at once, before a model is made, that there is no such file."""
    if not Path(path).is_file():
        what = "is a folder, not a posterior file" if Path(path).is_dir() else "does not exist"
        raise PosthocUQError(f"The posterior file '{path}' {what}.")


def rewrite(posterior: Posterior, path: str, output: str | None) -> None:
    """Save a posterior in the place of its file, or elsewhere, in the number format that the file has."""
    save(posterior, output or path, dtype=_stored_dtype(path))


def _stored_dtype(path: str) -> torch.dtype | None:
    formats = {
        tensor["dtype"] for block in inspect(path)["blocks"].values() for tensor in block["tensors"].values()
    }
    return _HALF.get(next(iter(formats))) if len(formats) == 1 else None


def check_output(path: str | None) -> None:
    """Refuse a file that cannot be written before hours of work are put into it."""
    if path is not None:
        checked_target(path)


def predictor_of(
    source: Source, posterior: Posterior, given: Mapping[str, Any], *, of_threshold: bool = True
) -> Predictor:
    """The model with its posterior, by the head that `head_of` finds."""
    head, options = head_of(posterior, given, of_threshold=of_threshold)
    return wrap(source.model, posterior, head=head, **options)


def head_of(
    posterior: Posterior, given: Mapping[str, Any], *, of_threshold: bool = True
) -> tuple[str, dict[str, Any]]:
    """The head to predict through, and its options, as far as they are not given: those that the file's threshold was
    set for, if it still holds and `of_threshold`; else those that the hyperparameters were found for. A number of draws
    means sampling.
    """
    kept, options = recorded_head(posterior)
    if of_threshold and _holds(posterior):
        own: Mapping[str, Any] = posterior.record.referral["head"]
        kept = str(own["head"])
        options = {name: value for name, value in own.items() if name not in _NO_OPTIONS and value != "own"}
    head: str = given["head"] or ("sampling" if given["n_samples"] is not None else kept)
    options = {name: _option(name, value) for name, value in options.items()} if head == kept else {}
    _check_names(head, [name for name, _ in given["head_settings"]])
    options |= {name: _option(name, value) for name, value in given["head_settings"]}
    if head == "sampling":
        options = {"seed": given["seed"], "novelty": posterior.features is not None} | options
        options |= {} if given["n_samples"] is None else {"n_samples": given["n_samples"]}
        if given["link"] is not None:
            raise PosthocUQError(
                "--link is for the heads linearized and moments (--head linearized); sampling needs none."
            )
    else:
        if given["n_samples"] is not None:
            raise PosthocUQError(
                f"--n-samples is for the head sampling (--head sampling), and this is {head}, whose --link mc takes "
                f"--head-option n_draws=N."
            )
        options |= {} if given["link"] is None else {"link": given["link"]}
    return head, options


def _holds(posterior: Posterior) -> bool:
    """Whether the file has a threshold, and still the hyperparameters that it was set for."""
    referral = posterior.record.referral
    return bool(referral) and referral["posterior"] == posterior.settings.plain()


def _check_names(head: str, names: Sequence[str]) -> None:
    """Refuse settings that the head does not have, or that can be given in Python alone."""
    allowed = [name for name in options_of(head_class(head)) if name not in _OBJECTS]
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None:
        raise PosthocUQError(
            f"--head-option {unknown}: the head {head} takes no such option; it takes {', '.join(allowed)}."
        )


def _option(name: str, value: Any) -> Any:
    if name != "dtype" or value == "own":
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PosthocUQError(
            f"--head-option dtype={value} is no number format; use bfloat16, float16 or float32."
        )
    return dtype


def output_names(source: Source, data: Data, path: str | None) -> Sequence[str] | None:
    """Names of the outputs: from a file, from the class folders, or from pretrained weights."""
    if path is not None:
        return read_names(path)
    return data.class_names or source.categories


def likelihood_name(posterior: Posterior) -> Literal["classes", "values"]:
    """What kind of prediction a posterior gives."""
    return "values" if posterior.noise_variance is not None else "classes"
