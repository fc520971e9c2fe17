"""How far sets and intervals keep their promise on data with targets, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.fitting.calibrate import value_scores
from posthoc_uq.likelihoods.bernoulli import MultilabelPrediction
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.metrics import CoverageCurve
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction

SET_SIZE, INTERVAL_WIDTH = "set size", "interval width"
LEVELS = (0.8, 0.9, 0.95)
"""That are reported."""
_MAX_WIDTHS = 200  # of intervals that take long
_DRAWN_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class Kept(NamedTuple):
    """The promises of one level.

    Attributes:
        covered: (entries,), float64: whether the target, or a label that applies, is in its set; of positions whether
            at least the share `level` of an input's labels are in theirs; of values whether the target has a score that
            belongs to the interval (bounds of counts, which are whole, may hold more), mean over outputs, or whether
            all have where they are promised jointly.
        sizes: float64: (entries,), the number of classes in the set; or the widths of intervals, of some inputs where
            they take long.
        classes: (entries,), int64: the class or label; None of values and of positions.
        unit: of the sizes: `SET_SIZE` or `INTERVAL_WIDTH`.
    """

    covered: Tensor
    sizes: Tensor
    classes: Tensor | None
    unit: str


def kept_at(
    prediction: Prediction, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
) -> Kept:
    """What a prediction with promises of targets keeps of them at a level.

    Args:
        prediction: on the CPU.
        targets: as its `fitting` gives them.
        level: that can be promised.
        allow_empty: whether sets of classes may be empty.
        widths: whether the widths of intervals are wanted.
    """
    if isinstance(prediction, ClassPrediction):
        chosen, labels = prediction.set(level, allow_empty=allow_empty), prediction.labels(targets)
        return Kept(
            chosen.gather(1, labels[:, None])[:, 0].double(), chosen.sum(1).double(), labels, SET_SIZE
        )
    if isinstance(prediction, MultilabelPrediction):
        chosen = prediction.set(level)
        inputs, labels = (targets > 0).nonzero(as_tuple=True)
        return Kept(chosen[inputs, labels].double(), chosen.sum(1).double()[inputs], labels, SET_SIZE)
    if isinstance(prediction, PositionPrediction):
        chosen = prediction.layout.rows(prediction.set(level, allow_empty=allow_empty))
        labels, counted = prediction.labels_of_rows(targets)
        held = (chosen.gather(1, labels[:, None])[:, 0] & counted).reshape(len(prediction), -1)
        sizes = (chosen.sum(1) * counted).reshape(held.shape)
        counts = counted.reshape(held.shape).sum(1)
        some = counts > 0
        shares, sizes = (part.sum(1)[some].double() / counts[some] for part in (held, sizes))
        return Kept((shares >= level - 1e-9).double(), sizes, None, SET_SIZE)
    found = value_scores(prediction, targets)
    assert found is not None  # there are promises of targets
    promises = prediction.known_promises()
    within = (found.scores <= promises.bounds(found.kind, level, found.scores.shape[1])).double()
    covered = within.amin(1) if len(promises.targets) == 1 else within.mean(1)
    if not widths:
        return Kept(covered, covered.new_empty(0), None, INTERVAL_WIDTH)
    # bounds by a distribution function are found by bisection
    step = 1 if found.kind == "deviation" else -(-len(prediction) // _MAX_WIDTHS)
    some: Any = prediction.picked(slice(None, None, step))
    low, high = map(as_double, some.interval(level))
    return Kept(covered, (high - low).reshape(len(some), -1).mean(1), None, INTERVAL_WIDTH)


def _possible(prediction: Prediction, levels: Sequence[float]) -> list[float]:
    """Those of the levels that the held-out scores can promise."""
    promises = prediction.promises
    if not isinstance(promises, ConformalScores) or not promises.targets:
        return []
    highest = min(scores.highest_level for scores in promises.targets)
    return [level for level in levels if level <= highest + 1e-12]


def promised(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Coverage and mean size by level, each under its name; empty without promises of targets."""
    found = {level: kept_at(prediction, targets, level) for level in _possible(prediction, LEVELS)}
    return _named(found, slice(None))


def promised_by_class(prediction: Prediction, targets: Tensor) -> dict[int, dict[str, float]]:
    """`promised` of the inputs of each class, or of those to which each label applies; empty of values."""
    kept = partial(kept_at, prediction, targets, widths=False)
    found = {level: kept(level) for level in _possible(prediction, LEVELS)}
    classes = next(iter(found.values())).classes if found else None
    return (
        {} if classes is None else {own: _named(found, classes == own) for own in classes.unique().tolist()}
    )


def _named(found: dict[float, Kept], counted: Tensor | slice) -> dict[str, float]:
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
    kept = partial(kept_at, prediction, targets, allow_empty=True, widths=False)
    observed = [float(kept(level).covered.mean()) for level in levels]
    return CoverageCurve(
        *(torch.tensor(each, dtype=torch.float64, device="cpu") for each in (levels, observed))
    )
