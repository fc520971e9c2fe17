"""How far sets and intervals keep their promise on data with targets, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from posthoc_uq.likelihoods.conformal import ConformalScores, Coverage
from posthoc_uq.likelihoods.metrics import CoverageCurve
from posthoc_uq.likelihoods.prediction import Prediction

LEVELS = (0.8, 0.9, 0.95)
"""That are reported."""
_DRAWN_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def _possible(prediction: Prediction, levels: Sequence[float]) -> list[float]:
    """Those of the levels that the held-out scores can promise."""
    promises = prediction.promises
    if not isinstance(promises, ConformalScores) or promises.targets is None:
        return []
    highest = min(scores.highest_level for scores in promises.targets.scores)
    return [level for level in levels if level <= highest + 1e-12]


def promised(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Coverage and mean size by level, each under its name; empty without promises of targets."""
    found = {level: prediction.coverage(targets, level) for level in _possible(prediction, LEVELS)}
    return _named(found, slice(None))


def promised_by_class(prediction: Prediction, targets: Tensor) -> dict[int, dict[str, float]]:
    """`promised` of the inputs of each class, or of those to which each label applies; empty of values."""
    levels = _possible(prediction, LEVELS)
    found = {level: prediction.coverage(targets, level, widths=False) for level in levels}
    classes = next(iter(found.values())).classes if found else None
    return (
        {} if classes is None else {own: _named(found, classes == own) for own in classes.unique().tolist()}
    )


def _named(found: dict[float, Coverage], counted: Tensor | slice) -> dict[str, float]:
    measures: dict[str, float] = {}
    for level, kept in found.items():
        percent = f"of {100 * level:g} %"
        measures[f"promised coverage {percent}"] = float(kept.covered[counted].mean())
        measures[f"{kept.unit} {percent}"] = float(kept.sizes[counted].mean())
    return measures


def promised_curve(prediction: Prediction, targets: Tensor) -> CoverageCurve | None:
    """The coverage that is observed at each level, of sets that may be empty; None without promises of targets."""
    levels = _possible(prediction, _DRAWN_LEVELS)
    if not levels:
        return None
    kept = partial(prediction.coverage, targets, allow_empty=True, widths=False)
    observed = [float(kept(level).covered.mean()) for level in levels]
    return CoverageCurve(
        *(torch.tensor(each, dtype=torch.float64, device="cpu") for each in (levels, observed))
    )
