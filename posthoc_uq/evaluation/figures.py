"""The figures of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from torch import Tensor

from posthoc_uq import plots
from posthoc_uq.evaluation.measurements import FAMILIAR, Measurements
from posthoc_uq.glossary import words
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.positions import PositionPrediction
from posthoc_uq.predictions.regression import RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = ("functional_variance", "epistemic_variance", "mutual_information")  # spread over orders of magnitude


CALIBRATION, COVERAGE = "Reliability", "Coverage of intervals"
FOREIGN, RISK = "Familiar and foreign inputs", "Risk over coverage"


def figures(evaluation: Measurements) -> dict[str, Figure]:
    """Figures by title: those that the data allow."""
    panels = _panels(evaluation)
    foreign = {FOREIGN: plots.score_histograms(panels, log=_logarithmic(panels))} if panels else {}
    return _quality(evaluation) | foreign | _risk(evaluation)


def single_figures(evaluation: Measurements) -> dict[str, dict[str, Figure]]:
    """The same by title and name, with a figure for each panel, for a page that is as wide as its reader's screen."""
    by_title = {
        title: {title: figure} for title, figure in (_quality(evaluation) | _risk(evaluation)).items()
    }
    panels = {title: {title: sets} for title, sets in _panels(evaluation).items()}
    histograms = {
        title: plots.score_histograms(panel, log=_logarithmic(panel)) for title, panel in panels.items()
    }
    return by_title | ({FOREIGN: histograms} if histograms else {})


def _quality(evaluation: Measurements) -> dict[str, Figure]:
    """Reliability of classes, coverage of values."""
    test = {name: by_set[FAMILIAR] for name, by_set in evaluation.predictions.items()}
    if evaluation.classification:
        calibration = {name: _calibration(p, evaluation.targets) for name, p in test.items()}
        return {CALIBRATION: plots.reliability_diagram(calibration, bins=evaluation.bins)}
    values = {name: p for name, p in test.items() if p.kind == "values"}
    with_noise = {
        name: (p.mean, p.variance, evaluation.targets)
        for name, p in cast(Mapping[str, RegressionPrediction], values).items()
        if bool((p.variance > 0).all())
    }
    return {COVERAGE: plots.coverage_plot(with_noise)} if with_noise else {}


def _risk(evaluation: Measurements) -> dict[str, Figure]:
    referred = {
        f"{name}, {words(score)}": (
            evaluation.predictions[name][FAMILIAR].scores()[score],
            evaluation.losses(name),
        )
        for name, score in _selected(evaluation)
    }
    return {RISK: plots.risk_coverage_plot(referred)} if referred else {}


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
    for name, by_set in evaluation.predictions.items() if evaluation.foreign_names else ():
        for score in evaluation.shown_scores(name):
            if score in ("max_probability", "variation_ratio", "standard_deviation"):
                continue  # nearly the same picture as the entropy's
            panels[f"{words(score)}, {name}"] = {
                data: prediction.scores()[score] for data, prediction in by_set.items()
            }
    return panels


def _logarithmic(panels: Iterable[str]) -> list[str]:
    return [title for title in panels if any(title.startswith(words(score)) for score in _WIDE)]


def _selected(evaluation: Measurements) -> list[tuple[str, str]]:
    """Each row with the default score, where that varies."""
    return [
        (name, evaluation.default_score)
        for name in evaluation.names
        if evaluation.default_score in evaluation.selective[name]
    ]
