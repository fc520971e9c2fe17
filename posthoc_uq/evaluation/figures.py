"""The figures of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from torch import Tensor

from posthoc_uq import plots
from posthoc_uq.evaluation.measurements import FAMILIAR, Measurements
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.positions import PositionPrediction
from posthoc_uq.predictions.regression import RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = ("functional_variance", "epistemic_variance", "mutual_information")  # spread over orders of magnitude


def figures(evaluation: Measurements) -> dict[str, Figure]:
    """Figures by title: those that the data allow."""
    test = {name: by_set[FAMILIAR] for name, by_set in evaluation.predictions.items()}
    by_title: dict[str, Figure] = {}
    if evaluation.classification:
        calibration = {name: _calibration(p, evaluation.targets) for name, p in test.items()}
        by_title["Reliability"] = plots.reliability_diagram(calibration, bins=evaluation.bins)
    else:
        values = {name: p for name, p in test.items() if p.kind == "values"}
        with_noise = {
            name: (p.mean, p.variance, evaluation.targets)
            for name, p in cast(Mapping[str, RegressionPrediction], values).items()
            if bool((p.variance > 0).all())
        }
        if with_noise:
            by_title["Coverage of intervals"] = plots.coverage_plot(with_noise)
    if evaluation.foreign_names:
        panels = _panels(evaluation)
        log = [title for title in panels if any(title.startswith(_words(score)) for score in _WIDE)]
        by_title["Familiar and foreign inputs"] = plots.score_histograms(panels, log=log)
    referred = {
        f"{name}, {_words(score)}": (test[name].scores()[score], evaluation.losses(name))
        for name, score in _selected(evaluation)
    }
    if referred:
        by_title["Risk over coverage"] = plots.risk_coverage_plot(referred)
    return by_title


def _calibration(prediction: Prediction, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and labels, of inputs or of all their positions."""
    if isinstance(prediction, PositionPrediction):
        rows, labels = prediction.counted(targets)
        return rows.probs, labels
    classes = cast(ClassPrediction, prediction)
    return classes.probs, classes.labels(targets)


def _panels(evaluation: Measurements) -> dict[str, dict[str, Tensor]]:
    """One panel for each row and score: that score on each data set."""
    panels: dict[str, dict[str, Tensor]] = {}
    for name, by_set in evaluation.predictions.items():
        for score in evaluation.shown_scores(name):
            if score in ("max_probability", "variation_ratio", "standard_deviation"):
                continue  # nearly the same picture as the entropy's
            panels[f"{_words(score)}, {name}"] = {
                data: prediction.scores()[score] for data, prediction in by_set.items()
            }
    return panels


def _selected(evaluation: Measurements) -> list[tuple[str, str]]:
    """Each row with the default score, where that varies."""
    return [
        (name, evaluation.default_score)
        for name in evaluation.names
        if evaluation.default_score in evaluation.selective[name]
    ]


def _words(score: str) -> str:
    return score.replace("_", " ")
