"""How a command predicts: the head that the user names, or the one in the posterior's file, with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posthoc_uq.cli.fields import arguments_of, dtype_named
from posthoc_uq.cli.models import Source
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.fitting.wrap import HEADS, head_class, options_of, recorded_head, wrap
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.posteriors.posterior import Posterior

_NO_OPTIONS = ("head", "calibrated")  # entries of a threshold's head that are no options of it


def predictor_of(
    source: Source, posterior: Posterior, options: Mapping[str, Any], *, of_threshold: bool = True
) -> Predictor:
    """The model with its posterior, by the head that `head_of` finds."""
    head, head_options = head_of(posterior, options, of_threshold=of_threshold)
    return wrap(source.model, posterior, head=head, **head_options)


def head_of(
    posterior: Posterior, options: Mapping[str, Any], *, of_threshold: bool = True
) -> tuple[str, dict[str, Any]]:
    """The head to predict through, and its options. What the user does not choose is taken from the head that the
    file's threshold was set for, if the threshold still holds and `of_threshold` is set; else from the head that the
    hyperparameters were found for. If the user names no head, but options that only one head has, it is that head.
    """
    file_head, head_options = recorded_head(posterior)
    if of_threshold and _holds(posterior):
        threshold_head: Mapping[str, Any] = posterior.history.referral["head"]
        file_head = str(threshold_head["head"])
        head_options = {
            name: value
            for name, value in threshold_head.items()
            if name not in _NO_OPTIONS and value != "own"
        }
    flags, settings = dict(options["head_options"]), dict(options["head_settings"])
    head = options["arguments"]["head"] or _head_that_takes([*flags, *settings], file_head)
    _check_settings(head, list(settings))
    # Where the command has an option of the name itself, the head's has a prefix: see `registry`.
    _check_flags(
        head, {name: f"--{f'head_{name}' if name in options else name}".replace("_", "-") for name in flags}
    )
    head_options = (
        {name: _option(name, value) for name, value in head_options.items()} if head == file_head else {}
    )
    if head == "sampling":
        head_options = {"seed": options["seed"]} | head_options
    return head, head_options | {name: _option(name, value) for name, value in settings.items()} | flags


def _holds(posterior: Posterior) -> bool:
    """Whether the file has a threshold, and still the hyperparameters that it was set for."""
    referral = posterior.history.referral
    return bool(referral) and referral["posterior"] == posterior.settings.plain()


def _head_that_takes(names: Sequence[str], file_head: str) -> str:
    """The head to predict through where none is named: the file's, or the only one that takes these options."""
    takers = [head for head in HEADS if set(names) <= set(options_of(head_class(head)))]
    return takers[0] if len(takers) == 1 else file_head


def _check_settings(head: str, names: Sequence[str]) -> None:
    """Refuse settings that the head does not have, or that can be given in Python alone."""
    allowed = [field.name for field in arguments_of(head_class(head))]
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None:
        raise PosthocUQError(
            f"--head-option {unknown}: the head {head} takes no such option; it takes {', '.join(allowed)}."
            f"{did_you_mean(unknown, allowed)}"
        )


def _check_flags(head: str, flags: Mapping[str, str]) -> None:
    """Refuse options of other heads; `flags` are what they are called on the command line."""
    for name, flag in flags.items():
        takers = [other for other in HEADS if name in options_of(head_class(other))]
        if head not in takers:
            heads = f"head {takers[0]}" if len(takers) == 1 else f"heads {' and '.join(takers)}"
            raise PosthocUQError(f"{flag} is for the {heads} (--head {takers[-1]}), and this is {head}.")


def _option(name: str, value: Any) -> Any:
    """The value of a head's option from text or from a file, where a number format is its name."""
    if name != "dtype" or value in (None, "own"):
        return value
    try:
        return dtype_named(str(value))
    except ValueError:
        raise PosthocUQError(
            f"--head-option dtype={value} is no number format; use bfloat16, float16 or float32."
        ) from None
