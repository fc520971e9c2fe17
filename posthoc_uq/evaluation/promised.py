"""How far sets and intervals keep their promise on data with targets, for which inputs they do not, and how large they
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.evaluation.groups import MIN_INPUTS, GroupedCoverage, excess_risk, groups_of
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.conformal import INTERVAL_WIDTH, ConformalScores, Coverage
from posthoc_uq.likelihoods.gaussian import RegressionPrediction
from posthoc_uq.likelihoods.metrics import CoverageCurve
from posthoc_uq.likelihoods.prediction import Prediction, with_percent

LEVELS = (0.8, 0.9, 0.95)
"""That are reported."""
_GROUPED_LEVEL = 0.9  # or the highest below it, of coverage by groups
_DRAWN_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
OBSERVED, ERT, ERT_ERROR = "observed_coverage", "ert", "ert_error"


def _possible(prediction: Prediction, levels: Sequence[float]) -> list[float]:
    """Those of the levels that the held-out scores can promise."""
    promises = prediction.promises
    if not isinstance(promises, ConformalScores) or promises.targets is None:
        return []
    highest = min(scores.highest_level for scores in promises.targets.scores)
    return [level for level in levels if level <= highest + 1e-12]


def possible_level(prediction: Prediction, level: float) -> float:
    """The level of an interval, or the highest one that the held-out scores can promise."""
    promises = prediction.promises
    if not isinstance(promises, ConformalScores) or promises.targets is None:
        return level
    return min(level, *(scores.highest_level for scores in promises.targets.scores))


def coverages(prediction: Prediction, targets: Tensor) -> dict[float, Coverage]:
    """What is kept of each level that is reported; empty without promises of targets."""
    return {level: prediction.coverage(targets, level) for level in _possible(prediction, LEVELS)}


def promised(found: Mapping[float, Coverage], grouped: GroupedCoverage | None) -> dict[str, float]:
    """Coverage and mean size by level, each under its name, and how much coverage some inputs miss."""
    measures = _named(found, slice(None))
    if grouped is not None and grouped.missing is not None:
        names = (with_percent(name, grouped.level) for name in (ERT, ERT_ERROR))
        measures |= dict(zip(names, grouped.missing, strict=True))
    return measures


def promised_by_class(found: Mapping[float, Coverage]) -> dict[int, dict[str, float]]:
    """`promised` of the inputs of each class, or of those to which each label applies; empty of values."""
    classes = next(iter(found.values())).classes if found else None
    return (
        {} if classes is None else {own: _named(found, classes == own) for own in classes.unique().tolist()}
    )


def _named(found: Mapping[float, Coverage], counted: Tensor | slice) -> dict[str, float]:
    measures: dict[str, float] = {}
    for level, kept in found.items():
        measures[with_percent(OBSERVED, level)] = float(kept.covered[counted].mean())
        measures[with_percent(kept.unit, level)] = float(kept.sizes[counted].mean())
    return measures


def coverage_by_group(
    prediction: Prediction, found: Mapping[float, Coverage], class_names: Sequence[str] | None
) -> GroupedCoverage | None:
    """Coverage by novelty, entropy or standard deviation, size, class and predicted value; None without promises.

    Args:
        prediction: of the test inputs.
        found: its `coverages`.
        class_names: by index; None for their numbers.
    """
    levels = [level for level in found if level <= _GROUPED_LEVEL]
    promises = prediction.promises
    if not levels or not isinstance(promises, ConformalScores) or promises.targets is None:
        return None
    level = levels[-1]
    kept = found[level]
    known = _known_before(prediction, kept)
    groups = [group for by, values in known.items() for group in groups_of(by, values, kept.covered, None)]
    if kept.classes is not None:
        own = class_names or ()
        names = {i: str(own[i]) if i < len(own) else str(i) for i in kept.classes.unique().tolist()}
        groups += groups_of("class", kept.classes, kept.covered, names)
    if len(kept.inputs.unique()) < MIN_INPUTS or not known:
        return GroupedCoverage(level, None, groups)
    features = list(known.values())
    if isinstance(prediction, ClassPrediction):
        features.append(prediction.predicted()[kept.inputs])
    elif kept.classes is not None:  # each label has a promise of its own
        features.append(kept.classes)
    thresholds = [scores.samples for scores in promises.targets.scores]
    members = (
        [(as_double(kept.classes == place), count) for place, count in enumerate(thresholds)]
        if len(thresholds) > 1 and kept.classes is not None
        else [(torch.ones_like(kept.covered), min(thresholds))]
    )
    return GroupedCoverage(level, excess_risk(kept.covered, level, features, kept.inputs, members), groups)


def _known_before(prediction: Prediction, kept: Coverage) -> dict[str, Tensor]:
    """What is known of each entry without its target, by name: scores, the size, and of single values the value."""
    scores, sized = prediction.scores(), len(kept.sizes) == len(kept.covered)
    # the width of an interval tells what the standard deviation does
    named = [] if sized and kept.unit == INTERVAL_WIDTH else [prediction.default_score]
    known = {
        name: as_double(scores[name]).cpu()[kept.inputs] for name in (*named, "novelty") if name in scores
    }
    if sized:
        known[kept.unit] = kept.sizes
    if isinstance(prediction, RegressionPrediction) and prediction.mean[0].numel() == 1:
        known["predicted_value"] = as_double(prediction.mean).cpu().flatten()[kept.inputs]
    return {name: values for name, values in known.items() if bool((values != values[0]).any())}


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
