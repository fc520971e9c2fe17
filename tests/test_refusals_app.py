"""What figures, exported programs and the log of a server refuse; a row each. Commands say what is wrong in
``test_cli.py``.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, net
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, RegressionPrediction
from posthoc_uq.app import Scores, monitor_for
from posthoc_uq.evaluation import plots

NAN, INF = math.nan, math.inf
PROBS, LABELS, X, ONE = torch.full((3, 2), 0.5), torch.zeros(3).long(), torch.zeros(3), torch.ones(1)

# Figures

PREDICTION = RegressionPrediction(X, X, 0.1)
OF_CLASSES = uq.ClassPrediction.from_logits(torch.zeros(1, 3, 2))
POINTS = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(40) % 2


def drawn(points: Tensor = POINTS, classes: Tensor = CLASSES, **options: Any) -> Any:
    def two(x: Tensor) -> uq.ClassPrediction:
        return uq.ClassPrediction.from_logits(torch.stack((x[None, :, 0], x[None, :, 1]), -1))

    return plots.class_uncertainty_map(
        options.pop("predict", two), points, classes, **{"resolution": 5} | options
    )


FIGURES = {
    "no model": Row(lambda: plots.reliability_diagram({}), "at least one model"),
    "no targets": Row(lambda: plots.coverage_plot(PREDICTION), "a prediction and its targets"),
    "tensors": Row(lambda: plots.reliability_diagram({"a": (PROBS, LABELS)}), "mapping from names"),  # pyright: ignore[reportArgumentType]
    "calibration of values": Row(lambda: plots.reliability_diagram(PREDICTION, X), "predictions of classes"),
    "coverage of classes": Row(lambda: plots.coverage_plot(OF_CLASSES, LABELS), "predictions of values"),
    "promises without scores": Row(lambda: plots.group_coverage_plot(PREDICTION, X), "held-out scores"),
    "infinite losses": Row(lambda: plots.risk_coverage_plot(PREDICTION, X + INF), "finite", NonFiniteError),
    "a metric of referral": Row(lambda: plots.referral_plot(OF_CLASSES, LABELS, metric="nll"), "metric"),  # pyright: ignore[reportArgumentType]
    "no panel": Row(lambda: plots.histogram_panels({"a": {}}), "at least one panel"),
    "scores of no number": Row(lambda: plots.histogram_panels({"a": {"in": ONE * NAN}}), "finite and not empty"),
    "logarithms of zero": Row(lambda: plots.histogram_panels({"a": {"in": X}}, log=["a"]), "no positive score"),
    "inputs of two dimensions": Row(
        lambda: plots.regression_band(torch.zeros(3, 2), PREDICTION, X, X), "one dimension",
    ),
    "fewer inputs": Row(lambda: plots.regression_band(X[:2], PREDICTION, X, X), "2 inputs"),
    "fewer targets": Row(lambda: plots.regression_band(X, PREDICTION, X, X[:2]), "3 points"),
    "points on a line": Row(lambda: drawn(POINTS[:, :1]), "x_train must be"),
    "infinite points": Row(lambda: drawn(POINTS * INF), "finite", NonFiniteError),
    "labels of another type": Row(lambda: drawn(classes=CLASSES.float()), "40 integers"),
    "labels below 0": Row(lambda: drawn(classes=CLASSES - 1), "from 0 on"),
    "labels of more classes": Row(lambda: drawn(classes=CLASSES + 1), "2 classes only"),
    "an unknown score": Row(lambda: drawn(score="confidence"), "score"),
    "a score for each class": Row(lambda: drawn(score=lambda prediction: prediction.probs), "one of each per input"),
    "a score of no number": Row(
        lambda: drawn(score=lambda prediction: prediction.entropy() * NAN), "smaller margin", NonFiniteError,
    ),
    "no prediction": Row(lambda: drawn(predict=lambda x: x), "ClassPrediction"),
    "one pixel": Row(lambda: drawn(resolution=1), "at least 2"),
}  # fmt: skip


# Programs and logs


@functools.cache
def predictor() -> Any:
    return uq.wrap(net(), fit(net()), "moments")


def with_scores(name: str) -> Scores:
    return Scores({name: np.ones(30)}, np.ones(30))


OTHERS = {
    "a program of an array": Row(lambda: uq.export(predictor(), inputs().numpy()), "example of the model"),
    "a program of nothing": Row(lambda: uq.export(predictor()), "example of the model"),
    "a program of a model": Row(lambda: uq.export(net(), inputs()), "not a Sequential"),
    "a program of another kind": Row(lambda: uq.export(predictor(), inputs(), path=Path("p.tf")), r"\.onnx or \.pt2"),
    "a folder that is not there": Row(
        lambda: uq.export(predictor(), inputs(), path=Path("nowhere/p.pt2")), "does not exist; make it first",
    ),
    "logs of other scores": Row(lambda: monitor_for(with_scores("entropy"), with_scores("novelty")), "in common"),
}  # fmt: skip

ROWS = FIGURES | OTHERS


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
