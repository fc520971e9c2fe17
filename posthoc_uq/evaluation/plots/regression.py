"""Regressions drawn over their input."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation.plots.style import COLOURS, clean, new_figure
from posthoc_uq.likelihoods.value_prediction import RegressionPrediction


def regression_band(
    x: Tensor, prediction: RegressionPrediction, x_train: Tensor, y_train: Tensor, *, level: float = 0.95
) -> Figure:
    """A one-dimensional regression: mean, the band by the weights, the band with observation noise, training data.

    Args:
        x: (inputs,) or (inputs, 1), in any order.
        prediction: at `x`, with one output.
        x_train: inputs of the training data, (points,) or (points, 1).
        y_train: their targets.
        level: probability that either band covers.

    Raises:
        PosthocUQError: more than one input or output dimension, sizes that differ, level outside (0, 1).
    """
    positions = _column("x", x)
    mean = _column("prediction.mean", prediction.mean)
    if len(mean) != len(positions):
        raise PosthocUQError(f"x has {len(positions)} inputs but the prediction has {len(mean)}.")
    points_x, points_y = _column("x_train", x_train), _column("y_train", y_train)
    if len(points_x) != len(points_y):
        raise PosthocUQError(f"x_train has {len(points_x)} points but y_train has {len(points_y)}.")
    order = np.argsort(positions, kind="stable")
    weights_only = RegressionPrediction(prediction.mean, prediction.epistemic_variance, 0.0)
    total_low, total_high = (_column("interval", t)[order] for t in prediction.interval(level))
    low, high = (_column("interval", t)[order] for t in weights_only.interval(level))
    positions, mean = positions[order], mean[order]

    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    _band(axes, positions, total_low, total_high, 0.15, f"{level * 100:g} % with noise")
    _band(axes, positions, low, high, 0.35, f"{level * 100:g} % from the weights")
    axes.plot(positions, mean, color=COLOURS[0], linewidth=1.8, label="mean")
    axes.plot(
        points_x,
        points_y,
        linestyle="none",
        marker="o",
        markersize=4,
        color=COLOURS[1],
        markeredgecolor="white",
        markeredgewidth=0.5,
        label="training data",
    )
    axes.set(xlabel="input", ylabel="output")
    axes.margins(x=0.01)
    # outside, because a wide band can reach any corner
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    clean(axes)
    return figure


def _band(
    axes: Axes,
    positions: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    opacity: float,
    label: str,
) -> None:
    axes.fill_between(positions, low, high, color=COLOURS[0], alpha=opacity, linewidth=0, label=label)


def _column(name: str, tensor: Tensor) -> NDArray[np.float64]:
    if tensor.ndim not in (1, 2) or tensor.shape[1:].numel() != 1:
        raise PosthocUQError(
            f"regression_band draws one dimension: {name} must be (n,) or (n, 1), not {tuple(tensor.shape)}."
        )
    return tensor.detach().cpu().double().flatten().numpy()
