"""What a prediction is scored by, and the rule that a default must keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite
from statistics import NormalDist, mean
from typing import Any

import torch
from _sets import Labelled
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from posthoc_uq.likelihoods.prediction import cat

BINS, FOLDS = 15, 10
ACCURACY, NLL, ECE, RMSE = 0.005, 0.04, 0.02, 0.01
"""What a prediction may lose against the network's own: accuracy (or one test input), nats, calibration error, and
the share of a root mean squared error."""


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The network's outputs, in float64."""
    return torch.cat([model(batch) for batch in inputs.split(500)]).double()


def class_scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL in nats and calibration error of log probabilities (samples, classes)."""
    probs = log_probs.exp()
    return {
        "accuracy": float((probs.argmax(1) == labels).double().mean()),
        "NLL": -float(log_probs.gather(1, labels.unsqueeze(1)).double().mean()),
        "ECE": metrics.expected_calibration_error(probs, labels, BINS),
    }


def value_scores(mean_: Tensor, variance: Tensor, targets: Tensor) -> dict[str, float]:
    """Root mean squared error and NLL of a Gaussian, in units of the training targets' deviation, and the coverage of
    its intervals of 90 %.
    """
    mean_, variance, targets = mean_.double(), variance.double(), targets.double()
    inside = (targets - mean_).abs() <= NormalDist().inv_cdf(0.95) * variance.sqrt()
    return {
        "RMSE": metrics.rmse(mean_, targets),
        "NLL": -metrics.gaussian_log_density(mean_, variance, targets),
        "coverage": float(inside.double().mean()),
    }


def plain_scores(model: nn.Module, train: Labelled, test: Labelled) -> dict[str, float]:
    """The network alone; for values with the training residuals' mean square as its noise."""
    found = outputs(model, test.inputs)
    if not test.targets.is_floating_point():
        return class_scores(found.log_softmax(1), test.targets)
    noise = (outputs(model, train.inputs) - train.targets).square().mean()
    return value_scores(found, noise.expand_as(found), test.targets)


def tempered_scores(model: nn.Module, test: Labelled) -> dict[str, float]:
    """Temperature scaling (Guo et al. 2017): each tenth of the test inputs at the temperature best for the others."""
    logits, labels = outputs(model, test.inputs), test.targets
    fold = torch.arange(len(labels)) % FOLDS
    scaled = torch.empty_like(logits)
    for number in range(FOLDS):
        own, others = fold == number, fold != number
        scaled[own] = logits[own] / best_temperature(logits[others], labels[others])
    return class_scores(scaled.log_softmax(1), labels)


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The divisor of the logits at which labels are most likely."""

    def loss(x: float) -> float:
        return float(nn.functional.cross_entropy(logits / exp(x), labels))

    return exp(minimize_scalar(loss, bounds=(-3.0, 4.0), method="bounded", options={"xatol": 0.01}).x)


@torch.no_grad()
def predicted(predictor: uq.Predictor, inputs: Tensor, batch: int = 100) -> Any:
    """The prediction of many inputs, in batches."""
    return cat([predictor(part) for part in inputs.split(batch)])


def prediction_scores(prediction: Any, test: Labelled) -> dict[str, float]:
    """Scores of a prediction of this library."""
    if isinstance(prediction, uq.RegressionPrediction):
        return value_scores(prediction.mean, prediction.variance, test.targets)
    log_probs = prediction.log_probs if prediction.log_probs is not None else prediction.probs.log()
    return class_scores(log_probs.double(), test.targets)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and the result."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def averaged(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over seeds of every number that all rows have; one that is not finite makes the mean so."""
    names = [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]
    return {name: mean(row[name] for row in rows) for name in names}


def harm(plain: Mapping[str, float], other: Mapping[str, float], inputs: int) -> list[str]:
    """By which measures a prediction is worse than the rule allows: empty where it does no harm.

    Args:
        plain: means of the network alone.
        other: means of the prediction.
        inputs: number of test inputs.
    """
    rounding = 1e-9
    worse: list[str] = []
    for name, allowed in _limits(plain, inputs).items():
        loss = plain[name] - other[name] if name == "accuracy" else other[name] - plain[name]
        if not loss <= allowed + rounding or not isfinite(other[name]):
            worse.append(name)
    return worse


def _limits(plain: Mapping[str, float], inputs: int) -> dict[str, float]:
    if "RMSE" in plain:
        return {"RMSE": RMSE * plain["RMSE"], "NLL": NLL}
    return {"accuracy": max(ACCURACY, 1 / inputs), "NLL": NLL, "ECE": ECE}
