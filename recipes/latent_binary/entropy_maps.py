"""Maps of predictive entropy: over a plane of images through one of each of three classes, between them and beyond.

The paper's maps (section 5.3) are of two-dimensional clusters, whose printed covariances are none; here the plane lies
in the space of images. At the corners of a triangle are three test images; between them lie mixtures, outside of it
what no class has. In the titles: mean entropy of test images, and of digits, which are of no class at all.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import torch
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from torch import Tensor

from recipes.fashion_mnist.data import CLASSES, Data, Labelled

Probabilities = Callable[[Tensor], Tensor]

CORNERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, sqrt(0.75)]], device="cpu")
"""Where the three images lie in the plane."""

MARGIN = 1.0
"""How far the map goes beyond them, in sides of the triangle."""

CHOSEN = ("trouser", "bag", "boot")


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, ``(samples,)``, of probabilities ``(samples, classes)``."""
    return -(probabilities * probabilities.clamp(min=1e-12).log()).sum(-1)


def plane(images: Tensor, resolution: int) -> Tensor:
    """Images over the plane, ``(resolution^2, ...)``, from below to above: those combinations of three images
    ``(3, ...)`` whose coefficients add up to one.
    """
    low, high = CORNERS.min(0).values - MARGIN, CORNERS.max(0).values + MARGIN
    across, up = (torch.linspace(float(low[i]), float(high[i]), resolution, device="cpu") for i in (0, 1))
    y, x = torch.meshgrid(up, across, indexing="ij")
    third = y / CORNERS[2, 1]
    second = x - third * CORNERS[2, 0]
    weights = torch.stack([1 - second - third, second, third], -1).reshape(-1, 3)
    return (weights @ images.flatten(1)).reshape(-1, *images.shape[1:])


def corners(part: Labelled, network: Probabilities) -> Tensor:
    """One image of each chosen class, ``(3, ...)``: that of which a network is surest."""
    chosen: list[Tensor] = []
    for name in CHOSEN:
        images = part.images[part.labels == CLASSES.index(name)]
        chosen.append(images[network(images)[:, CLASSES.index(name)].argmax()])
    return torch.stack(chosen)


def figure(predictors: dict[str, Probabilities], data: Data, resolution: int = 61, few: int = 500) -> Figure:
    """One map for each predictor; the first one chooses the images.

    Args:
        predictors: by title; from images to probabilities ``(samples, classes)``.
        data: its test images and digits.
        resolution: points along either side.
        few: images for each mean entropy.
    """
    images = corners(data.test, next(iter(predictors.values())))
    points = plane(images, resolution)
    low, high = CORNERS.min(0).values - MARGIN, CORNERS.max(0).values + MARGIN
    extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    page = Figure(figsize=(4.2 * len(predictors), 4.6), layout="constrained", facecolor="white")
    panels = page.subplots(1, len(predictors), squeeze=False)[0]
    drawn = None
    for panel, (title, predict) in zip(panels, predictors.items(), strict=True):
        values = torch.cat([entropy(predict(some)) for some in points.split(1000)]).reshape(resolution, -1)
        drawn = panel.imshow(
            values.numpy(), origin="lower", extent=extent, cmap="magma", vmin=0, vmax=log(len(CLASSES))
        )
        means = [float(entropy(predict(some[:few])).mean()) for some in (data.test.images, data.digits)]
        panel.set_title(f"{title}\nmean of clothes {means[0]:.2f}, of digits {means[1]:.2f}", fontsize=9)
        for place, image in zip(CORNERS.tolist(), images, strict=True):
            box = OffsetImage(image.squeeze(0).numpy(), zoom=0.8, cmap="gray")
            panel.add_artist(AnnotationBbox(box, place, pad=0.1))
        panel.set(xticks=[], yticks=[])
    page.colorbar(drawn, ax=list(panels), label="predictive entropy in nats", shrink=0.8)
    return page
