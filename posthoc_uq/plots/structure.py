"""Which weights and inputs a network needs, by their inclusion probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.plots.style import COLOURS, GREY, REFERENCE, clean, new_figure, percent
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.sparsity.inclusion import LayerInclusion, any_of
from posthoc_uq.sparsity.inclusion import inclusion as inclusion_of

_COLUMNS = 3


def inclusion(
    posterior: Posterior,
    *,
    shape: Sequence[int] | None = None,
    layers: Collection[str] | None = None,
    bins: int = 20,
) -> Figure:
    """How the inclusion probabilities of each layer are distributed; and where the first layer's inputs are an image, a
    map of them.

    Shares are on a logarithmic scale. The dashed line is at 0.5; weights right of it are in the median model, and their
    share stands above the panel. Of the two maps, one has the probability that at least one weight of the pixel is on,
    which is near 1 everywhere if the layer has many outputs; the other the mean inclusion of the pixel's weights.
    Several channels are taken together. Of a convolution the map has the positions of the kernel.

    Args:
        posterior: by ``method="latent_binary"``.
        shape: ``(height, width)`` or ``(channels, height, width)`` of the first layer's inputs, where that is linear.
        layers: names of those to draw; all without.
        bins: number of bins between 0 and 1.

    Raises:
        PosthocUQError: the posterior is of another method, a layer is unknown, or the shape is not that of the inputs.
    """
    known = inclusion_of(posterior)
    chosen = list(known.layers) if layers is None else list(layers)
    unknown = [name for name in chosen if name not in known.layers]
    if unknown or not chosen:
        raise PosthocUQError(f"layers must name layers of the posterior; there is none called {unknown[:5]}.")
    maps = _maps(known.first, posterior.layers[known.first.layer].kind, shape)
    columns = min(_COLUMNS, max(len(chosen), 2 if maps else 1))
    rows = -(-len(chosen) // columns)
    figure = new_figure(0.6 + 3.7 * max(columns, 2), max(2.9, 2.5 * rows) + (3.6 if maps else 0.0))
    heights = [2.5 * rows, 3.6] if maps else None
    parts = figure.subfigures(2 if maps else 1, 1, squeeze=False, height_ratios=heights)
    upper, lower = parts[0, 0], parts[-1, 0]
    panels = upper.subplots(rows, columns, squeeze=False)
    for axes, name in zip(panels.flat, chosen, strict=False):
        _histogram(axes, known.layers[name], bins)
    for axes in list(panels.flat)[len(chosen) :]:
        axes.remove()
    for row in panels:
        row[0].set_ylabel("share of weights")
    upper.supxlabel("inclusion probability", fontsize="medium")
    if maps:
        # means are small where few weights are on, so their colours end at the largest
        for axes, (title, values), most in zip(lower.subplots(1, 2), maps.items(), (1, None), strict=True):
            image = axes.imshow(
                values.cpu().numpy(), cmap="viridis", vmin=0, vmax=most, interpolation="nearest"
            )
            axes.set_title(title, loc="left", fontsize="medium")
            axes.set(xticks=[], yticks=[])
            lower.colorbar(image, ax=axes)
    return figure


def _histogram(axes: Axes, layer: LayerInclusion, bins: int) -> None:
    chances = layer.weights.detach().cpu().double().flatten().numpy()
    edges = np.linspace(0, 1, bins + 1)
    share = np.histogram(chances, edges)[0] / chances.size
    axes.stairs(share, edges, fill=True, color=COLOURS[0], alpha=0.35)
    axes.stairs(share, edges, color=COLOURS[0], linewidth=1.2)
    axes.axvline(0.5, color=GREY, linewidth=1, linestyle=REFERENCE)
    kept = percent((chances > 0.5).mean(), None)
    axes.set_title(f"{layer.layer}: {kept} kept", loc="left", fontsize="medium")
    axes.set(xlim=(0, 1), yscale="log", ylim=(0.5 / chances.size, 1.5))
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    axes.yaxis.set_minor_formatter(NullFormatter())
    clean(axes)


def _maps(first: LayerInclusion, kind: str, shape: Sequence[int] | None) -> dict[str, Tensor]:
    """By title, over rows and columns; nothing where the inputs are no image."""
    if kind == "conv2d":
        if shape is not None:
            raise PosthocUQError(
                f"shape= is for a linear first layer; the kernel of '{first.layer}' says its own."
            )
        sides, what = tuple(first.positions.shape), "position of the kernel"
        mean = as_double(first.weights).mean((0, 1))
    elif shape is None:
        return {}
    else:
        sides, what = tuple(shape), "input"
        if len(sides) not in (2, 3) or prod(sides) != len(first.inputs):
            raise PosthocUQError(
                f"shape must be (height, width) or (channels, height, width) of the {len(first.inputs)} inputs of "
                f"'{first.layer}', not {sides}."
            )
        by_input = as_double(first.weights).mean(1 if kind == "matmul" else 0)
        mean = by_input.reshape(-1, *sides[-2:]).mean(0)
    chances = first.positions.reshape(-1, *sides[-2:])
    return {f"{what}: some weight on": any_of(chances, (0,)), f"{what}: mean inclusion": mean}
