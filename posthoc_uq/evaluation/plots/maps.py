"""Class probabilities and their uncertainty over a plane of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import one_of
from posthoc_uq.evaluation.plots.style import COLOURS, MARKERS, new_figure
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.prediction import CLASS_SCORES, score_of

_LABELS = {
    "entropy": "entropy in nats",
    "mutual_information": "mutual information in nats",
    "max_probability": "1 − largest probability",
    "functional_variance": "variance of the logits",
    "variation_ratio": "variation ratio",
}
_BATCH = 4096
# paler than the points, so that they stand out
_STRENGTH = 0.6


def _pale(colour: str) -> tuple[float, ...]:
    return tuple(1 - _STRENGTH * (1 - part) for part in to_rgb(colour))


_TWO_CLASSES = LinearSegmentedColormap.from_list(
    "two classes", [_pale(COLOURS[0]), "white", _pale(COLOURS[1])]
)
_SHADES = LinearSegmentedColormap.from_list("shades", ["white", "#C4C4C4", "#5A5A5A"])


class _Plane(NamedTuple):
    """Coordinates (resolution,) along either axis, probs (rows, columns, classes), score (rows, columns)."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    probs: NDArray[np.float64]
    score: NDArray[np.float64]

    @property
    def extent(self) -> tuple[float, float, float, float]:
        half_x, half_y = (self.x[1] - self.x[0]) / 2, (self.y[1] - self.y[0]) / 2
        return self.x[0] - half_x, self.x[-1] + half_x, self.y[0] - half_y, self.y[-1] + half_y


def class_uncertainty_map(
    predict: Callable[[Tensor], ClassPrediction],
    x_train: Tensor,
    y_train: Tensor,
    *,
    score: str | Callable[[ClassPrediction], Tensor] = "entropy",
    resolution: int = 150,
    margin: float = 0.5,
    log: bool = False,
) -> Figure:
    """A classifier of two inputs: left what it predicts, right how uncertain it is, with the training points.

    With two classes the left panel is the probability of class 1; with more it is the colour of the most probable
    class, paler where it is less probable. Lines are the decision boundaries. More than seven classes share
    colours, and their numbers stand at their training points.

    Args:
        predict: from inputs (batch, 2), in the dtype and on the device of `x_train`, to their prediction; a
            wrapped model is one. It is called on at most 4096 points at a time, without gradients.
        x_train: (points, 2).
        y_train: (points,), integer labels.
        score: the name of a score of classes in `predictions.scores` ("entropy", "mutual_information",
            "max_probability", "functional_variance", "variation_ratio"), or a function from a prediction to
            (batch,), higher meaning more uncertain, such as `ClassPrediction.expected_entropy`.
        resolution: points along either axis.
        margin: how far the map goes beyond the points, as a share of their range on either side.
        log: a logarithmic colour scale, for scores over orders of magnitude; scores that are not positive are drawn at
            the smallest positive one.

    Raises:
        PosthocUQError: points that are not two-dimensional, labels that do not fit, an unknown score, a
            resolution below 2, a negative margin, a prediction that is not of classes, or with `log` no
            positive score.
        NonFiniteError: a probability or a score on the map is not finite.
    """
    points, labels = _training("class_uncertainty_map", x_train, y_train)
    _check_choices(score, resolution, margin)
    plane = _evaluate(predict, x_train, points, score, resolution, margin)
    classes = plane.probs.shape[-1]
    if labels.max() >= classes:
        raise PosthocUQError(f"y_train holds class {labels.max()}, but predict knows {classes} classes only.")
    name = _LABELS.get(score, score) if isinstance(score, str) else getattr(score, "__name__", "score")
    figure = new_figure(11.2, 4.7)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _draw_classes(figure, left, plane)
    _draw_score(figure, right, plane, name, log)
    for axes in (left, right):
        _boundaries(axes, plane)
        _points(axes, points, labels, classes)
        axes.set(xlabel="first input", xlim=plane.extent[:2], ylim=plane.extent[2:])
    left.set_ylabel("second input")
    left.set_title("prediction", loc="left", fontsize="medium")
    right.set_title("uncertainty", loc="left", fontsize="medium")
    if classes <= len(COLOURS):
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def _check_choices(score: str | Callable[[ClassPrediction], Tensor], resolution: int, margin: float) -> None:
    if isinstance(score, str):
        one_of("score", score, CLASS_SCORES)
    if resolution < 2 or margin < 0:
        raise PosthocUQError(
            f"class_uncertainty_map needs a resolution of at least 2 and a margin that is not negative, "
            f"not {resolution} and {margin}."
        )


def _draw_classes(figure: Figure, axes: Axes, plane: _Plane) -> None:
    """The probability of class 1 of two, or the most probable of several classes."""
    if plane.probs.shape[-1] == 2:
        image = axes.imshow(
            plane.probs[..., 1],
            extent=plane.extent,
            origin="lower",
            aspect="auto",
            interpolation="bilinear",
            cmap=_TWO_CLASSES,
            vmin=0,
            vmax=1,
        )
        figure.colorbar(image, ax=axes, label="probability of class 1")
    else:
        colours = _blend(plane.probs)
        axes.imshow(colours, extent=plane.extent, origin="lower", aspect="auto", interpolation="bilinear")


def _draw_score(figure: Figure, axes: Axes, plane: _Plane, name: str, log: bool) -> None:
    shown, norm = plane.score, None
    if log:
        if not (shown > 0).any():
            raise PosthocUQError("The map has no positive score, so its scale cannot be logarithmic.")
        shown = np.maximum(shown, shown[shown > 0].min())
        norm = LogNorm(shown.min(), shown.max() if shown.max() > shown.min() else 2 * shown.min())
    shading = axes.imshow(
        shown,
        extent=plane.extent,
        origin="lower",
        aspect="auto",
        cmap=_SHADES,
        interpolation="bilinear",
        norm=norm,
    )
    figure.colorbar(shading, ax=axes, label=name)


def _training(name: str, x_train: Tensor, y_train: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if x_train.ndim != 2 or x_train.shape[1] != 2 or len(x_train) == 0:
        raise PosthocUQError(
            f"{name} draws two inputs: x_train must be (points, 2), not {tuple(x_train.shape)}."
        )
    if y_train.shape != x_train.shape[:1] or y_train.is_floating_point() or y_train.is_complex():
        raise PosthocUQError(
            f"y_train must be {len(x_train)} integers of shape ({len(x_train)},), "
            f"not {y_train.dtype} of shape {tuple(y_train.shape)}."
        )
    points, labels = x_train.detach().cpu().double().numpy(), y_train.detach().cpu().long().numpy()
    if not np.isfinite(points).all():
        raise NonFiniteError("x_train holds numbers that are not finite.")
    if labels.min() < 0:
        raise PosthocUQError(f"y_train must hold classes from 0 on, not {labels.min()}.")
    return points, labels


def _evaluate(
    predict: Callable[[Tensor], ClassPrediction],
    x_train: Tensor,
    points: NDArray[np.float64],
    score: str | Callable[[ClassPrediction], Tensor],
    resolution: int,
    margin: float,
) -> _Plane:
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    # a range of no width still needs some to be drawn
    pad = np.where(high > low, margin * span, max(margin, 0.5))
    x, y = (np.linspace(low[i] - pad[i], high[i] + pad[i], resolution) for i in range(2))
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)).to(x_train)
    probs: list[Tensor] = []
    scores: list[Tensor] = []
    with torch.no_grad():
        for batch in grid.split(_BATCH):
            prediction = predict(batch)
            if not isinstance(prediction, ClassPrediction):
                raise PosthocUQError(
                    f"predict must return a ClassPrediction, not {type(prediction).__name__}."
                )
            values = score_of(prediction, score) if isinstance(score, str) else score(prediction)
            if values.shape != (len(batch),) or len(prediction) != len(batch):
                raise PosthocUQError(
                    f"For {len(batch)} inputs there are {len(prediction)} predictions and scores of shape "
                    f"{tuple(values.shape)}; there must be one of each per input."
                )
            probs.append(prediction.probs.detach().cpu().double())
            scores.append(values.detach().cpu().double())
    every_prob, every_score = torch.cat(probs), torch.cat(scores)
    if not bool(every_prob.isfinite().all()) or not bool(every_score.isfinite().all()):
        raise NonFiniteError(
            "The map holds probabilities or scores that are not finite; try a smaller margin."
        )
    shape = (resolution, resolution)
    return _Plane(x, y, every_prob.reshape(*shape, -1).numpy(), every_score.reshape(shape).numpy())


def _blend(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB (rows, columns, 3): the colour of the most probable class, white where all are equally probable."""
    classes = probs.shape[-1]
    palette = np.array([to_rgb(COLOURS[c % len(COLOURS)]) for c in range(classes)])
    strength = 0.08 + (_STRENGTH - 0.08) * (probs.max(axis=-1, keepdims=True) - 1 / classes) / (
        1 - 1 / classes
    )
    return 1 - strength * (1 - palette[probs.argmax(axis=-1)])


def _boundaries(axes: Axes, plane: _Plane) -> None:
    classes = plane.probs.shape[-1]
    for c in range(1 if classes == 2 else classes):
        ahead = plane.probs[..., c] - np.delete(plane.probs, c, axis=-1).max(axis=-1)
        if ahead.min() < 0 < ahead.max():
            axes.contour(plane.x, plane.y, ahead, levels=[0.0], colors="black", linewidths=1)


def _points(axes: Axes, points: NDArray[np.float64], labels: NDArray[np.int64], classes: int) -> None:
    numbered = classes > len(COLOURS)
    for c in np.unique(labels).tolist():
        of_class = points[labels == c]
        axes.plot(
            *of_class.T,
            linestyle="none",
            marker=MARKERS[(c + c // len(COLOURS)) % len(MARKERS)],
            markersize=5 if len(points) <= 500 else 3,
            color=COLOURS[c % len(COLOURS)],
            markeredgecolor="white",
            markeredgewidth=0.7,
            label=f"class {c}",
        )
        if numbered:
            text = axes.annotate(
                str(c),
                (float(np.median(of_class[:, 0])), float(np.median(of_class[:, 1]))),
                ha="center",
                va="center",
                fontweight="bold",
                zorder=5,
            )
            text.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
