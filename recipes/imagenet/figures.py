"""The last stage: figures 6 and 7 of the paper, table 3, and what the search tried, from the results that are there."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from posthoc_uq import PosthocUQError
from posthoc_uq.app.plots import (
    COLOURS,
    GREY,
    MARKERS,
    REFERENCE,
    clean,
    histogram_panels,
    legend_above,
    line_style,
    new_figure,
    wilson,
)
from posthoc_uq.core import rank
from posthoc_uq.evaluation.measurements import FAMILIAR, title_of
from recipes.common import markdown, report, save_figure
from recipes.imagenet.evaluating import NETWORK, numbers_and_bytes, result
from recipes.imagenet.fitting import METHODS, posterior_file
from recipes.imagenet.search import best, described, trials

MEASURES = ("accuracy", "top5_accuracy", "nll", "brier", "ece", "ece_equal_mass")


def plot_all(options: argparse.Namespace) -> None:
    """``figure6.png``, ``figure7.png``, ``search.png``, ``results.md`` and ``results.json`` in the output folder."""
    if rank() > 0:
        return
    rows = {
        row: found
        for row in (NETWORK, *options.methods)
        if (found := result(options.evaluations / f"{row}.pt")) is not None
    }
    if not rows:
        raise PosthocUQError("There is nothing to plot yet; run the stage evaluate first.")
    names = {row: METHODS.get(row, row) for row in rows}
    named = {names[row]: found for row, found in rows.items()}
    pages = {"figure6": calibration_figure(named), "figure7": entropy_figure(named)}
    searched = [m for m in options.methods if trials(options.trials, m, options.budget)]
    if searched:
        pages["search"] = search_figure(searched, options)
    for name, figure in pages.items():
        save_figure(figure, options.output / f"{name}.png", options.smoke)
    fitted = [m for m in options.methods if posterior_file(options.posteriors, m).exists()]
    parts = [quality_table(rows), *foreign_tables(rows)]
    sizes = {m: numbers_and_bytes(options.posteriors, m) for m in fitted}
    if sizes:
        parts.append(size_table(sizes))
    if searched:
        lines = [f"* {METHODS[m]}: {described(best(options.trials, m, options), options)}" for m in searched]
        parts.append(
            f"Best of {options.budget} trials by validation {options.select}:\n\n" + "\n".join(lines)
        )
    content = {
        "rows": {row: found["measures"] for row, found in rows.items()},
        "settings": {row: json.loads(found["key"]) for row, found in rows.items()},
        "posteriors": {m: {"numbers": n, "bytes": b} for m, (n, b) in sizes.items()},
    }
    report(options, "results", "\n\n".join(parts), content)


def quality_table(rows: Mapping[str, dict[str, Any]]) -> str:
    """Quality on the validation images that the search has not seen."""
    quality = {row: found["measures"]["quality"][row] for row, found in rows.items()}
    columns = [measure for measure in MEASURES if measure in quality[next(iter(quality))]]
    cells = [[METHODS.get(row, row), *(f"{found[c]:.4f}" for c in columns)] for row, found in quality.items()]
    images = next(iter(rows.values()))["measures"]["inputs"][FAMILIAR]
    return f"{images} validation images:\n\n" + markdown([["", *map(title_of, columns)], *cells])


def foreign_tables(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """For each foreign folder the mean entropies and how well they tell it apart."""
    first = next(iter(rows.values()))
    tables: list[str] = []
    for name in first["entropy"]:
        if name == FAMILIAR:
            continue
        cells: list[list[str]] = []
        for row, found in rows.items():
            scores = found["measures"]["foreign"][row].get(name, {})
            means = [f"{float(found['entropy'][data].mean()):.3f}" for data in (FAMILIAR, name)]
            auroc = [
                f"{scores[s]['auroc']:.4f}" if s in scores else "-"
                for s in ("entropy", "mutual_information", "epistemic_variance")
            ]
            cells.append([METHODS.get(row, row), *means, *auroc])
        header = [
            "",
            "mean entropy, in-domain",
            f"mean entropy, {name}",
            "AUROC, entropy",
            "AUROC, mutual information",
            "AUROC, epistemic variance",
        ]
        count = first["measures"]["inputs"][name]
        tables.append(f"{count} foreign images, {name}:\n\n" + markdown([header, *cells]))
    return tables


def size_table(sizes: Mapping[str, tuple[int, int]]) -> str:
    """The paper's table 3 for this network."""
    cells = [
        [METHODS[method], f"{count:,}", f"{4 * count / 2**20:.1f}", f"{size / 2**20:.1f}"]
        for method, (count, size) in sizes.items()
    ]
    header = ["", "numbers beside the weights", "MiB, four bytes each", "MiB of the file"]
    return "Size (table 3):\n\n" + markdown([header, *cells])


def calibration_figure(rows: Mapping[str, dict[str, Any]]) -> Figure:
    """Confidence minus accuracy over confidence in bins of equal mass: figure 6, as Maddox et al. (2019) draw it.

    Above 0 a model is over-confident. Confidences lie on a scale that spreads those near 1; bars are 95 % Wilson
    intervals of the accuracy.
    """
    figure = new_figure(6.4, 4.6 + 0.22 * len(rows))
    axes = figure.subplots()
    axes.axhline(0, color=GREY, linewidth=1, linestyle=REFERENCE, label="perfectly calibrated")
    for index, (name, found) in enumerate(rows.items()):
        confidence, accuracy, counts = (
            found["bins"][k].numpy() for k in ("confidence", "accuracy", "counts")
        )
        filled = counts > 0
        confidence, accuracy = confidence[filled], accuracy[filled]
        low, high = wilson(accuracy, counts[filled])
        position = _spread(confidence)
        axes.vlines(
            position,
            confidence - high,
            confidence - low,
            color=COLOURS[index % len(COLOURS)],
            alpha=0.3,
            linewidth=2,
        )
        error = next(iter(found["measures"]["quality"].values()))["ece"]
        axes.plot(
            position,
            confidence - accuracy,
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            label=f"{name} (ECE {error:.3f})",
            **line_style(index),
        )
    ticks = np.array([0.0, 0.5, 0.8, 0.95, 0.99, 0.999])
    axes.set_xticks(_spread(ticks), [f"{tick:g}" for tick in ticks])
    axes.set(xlabel="confidence (largest probability)", ylabel="confidence minus accuracy")
    clean(axes)
    legend_above(axes)
    return figure


def _spread(confidence: Any) -> Any:
    """The axis of figure 6: minus the logarithm of what confidence lacks to 1."""
    return -np.log(np.clip(1 - confidence, 1e-4, None))


def entropy_figure(rows: Mapping[str, dict[str, Any]]) -> Figure:
    """Entropies in-domain and of foreign images, a panel for each row: figure 7."""
    panels: dict[str, Any] = {}
    for name, found in rows.items():
        quality = next(iter(found["measures"]["quality"].values()))
        title = f"entropy, {name} (accuracy {quality['accuracy']:.3f}, ECE {quality['ece']:.3f})"
        panels[title] = {"in-domain" if data == FAMILIAR else data: e for data, e in found["entropy"].items()}
    return histogram_panels(panels, bins=25)


def search_figure(methods: Sequence[str], options: argparse.Namespace) -> Figure:
    """Every trial at its N and tau, coloured by its validation NLL; a ring around the chosen one."""
    figure = new_figure(1.2 + 3.6 * len(methods), 3.9)
    panels = figure.subplots(1, len(methods), squeeze=False, sharey=True)[0]
    found = {method: trials(options.trials, method, options.budget) for method in methods}
    finite = [t.NLL for own in found.values() for t in own if math.isfinite(t.NLL)]
    scale = Normalize(min(finite), np.quantile(finite, 0.75)) if finite else None
    drawn = None
    for axes, method in zip(panels, methods, strict=True):
        own = [t for t in found[method] if math.isfinite(t.NLL)]
        wild = [t for t in found[method] if not math.isfinite(t.NLL)]
        axes.plot([t.scale for t in wild], [t.prior_precision for t in wild], "x", color=GREY)
        drawn = axes.scatter(
            [t.scale for t in own],
            [t.prior_precision for t in own],
            c=[t.NLL for t in own],
            norm=scale,
            cmap="viridis_r",
            clip_on=False,
        )
        chosen = best(options.trials, method, options)
        axes.plot(
            chosen.scale,
            chosen.prior_precision,
            "o",
            markersize=13,
            markerfacecolor="none",
            color=COLOURS[1],
            markeredgewidth=2,
        )
        axes.set(xscale="log", yscale="log", xlabel="scale N", title=METHODS[method])
        axes.set(xlim=options.scales, ylim=options.priors)
        clean(axes)
    panels[0].set_ylabel("prior precision tau")
    if drawn is not None:
        figure.colorbar(
            drawn, ax=list(panels), label="validation NLL", extend="max", format=FuncFormatter(_short)
        )
    return figure


def _short(value: float, _: int | None) -> str:
    return f"{value:.3g}"
