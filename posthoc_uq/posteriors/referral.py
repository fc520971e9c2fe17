"""The record of a referral as plain values, stored with the posterior: see `posthoc_uq.Referral`.

``scores`` (name to ``threshold`` and ``quantiles`` of familiar inputs, descending), ``shares`` (for each quantile, the
share of those inputs that are at least as large), ``rate``, and what the thresholds were set for: the number of
``inputs``, the ``head`` and the hyperparameters of the ``posterior``. It is empty where no threshold was set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.likelihoods.selective import QUANTILES


def thresholds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The threshold of each score; an input with any score above its own is referred."""
    return {name: score["threshold"] for name, score in record.get("scores", {}).items()}


def rule_of(record: Mapping[str, Any], digits: int = 6) -> str:
    """The rule in words: ``entropy above 0.3 or mutual_information above 0.02``."""
    return " or ".join(f"{name} above {value:.{digits}g}" for name, value in thresholds_of(record).items())


def checked_referral(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, complete, of the right types and in range, or an empty one.

    Raises:
        CorruptPosteriorError: a value out of range.
        KeyError, TypeError, ValueError, AttributeError: one that is missing or of another kind.
    """
    if not record:
        return {}
    rate, inputs = _number(record["rate"], "rate"), int(record["inputs"])
    if not 0 <= rate < 1 or inputs < 1:
        raise CorruptPosteriorError(f"The referral's rate is {rate}, of {inputs} inputs.")
    points = min(inputs, QUANTILES)
    shares = _numbers(record["shares"], points, "shares")
    if any(a >= b for a, b in pairwise([0.0, *shares])) or shares[-1] != 1:
        raise CorruptPosteriorError("The referral's shares do not ascend from above 0 to 1.")
    scores = {str(name): _score(str(name), score, points) for name, score in record["scores"].items()}
    if not scores:
        raise CorruptPosteriorError("The referral goes by no score.")
    settings = {name: dict(record[name]) for name in ("head", "posterior")}
    return {"scores": scores, "shares": shares, "rate": rate, "inputs": inputs, **settings}


def _score(name: str, settings: Mapping[str, Any], points: int) -> dict[str, Any]:
    quantiles = _numbers(settings["quantiles"], points, f"quantiles of {name}")
    if any(a < b for a, b in pairwise(quantiles)):
        raise CorruptPosteriorError(f"The referral's quantiles of {name} do not descend.")
    if not math.isfinite(quantiles[0] - quantiles[-1]):
        raise CorruptPosteriorError(f"The referral's quantiles of {name} are too far apart.")
    threshold = _number(settings["threshold"], f"threshold of {name}")
    if not quantiles[-1] <= threshold <= quantiles[0]:
        raise CorruptPosteriorError(f"The referral's threshold of {name} lies outside of its quantiles.")
    return {"threshold": threshold, "quantiles": quantiles}


def _numbers(values: Any, count: int, what: str) -> list[float]:
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or len(cast(Sequence[Any], values)) != count
    ):
        raise CorruptPosteriorError(f"The referral's {what} are not a list of {count} numbers.")
    return [_number(value, what) for value in cast(Sequence[Any], values)]


def _number(value: Any, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise CorruptPosteriorError(f"The referral's {what} must be finite, not {number}.")
    return number
