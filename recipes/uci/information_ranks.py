"""Figure 3 of Lee et al. (2020): errors of the information matrix, diagonal, KFAC, EFB and INF at several ranks.

python -m recipes.uci.information_ranks            the toy problem and every set that can be found, ten networks each
python -m recipes.uci.information_ranks --smoke    the toy problem and Boston, two networks each; seconds
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from recipes.common import markdown, parsed, parser, put, report, save_figure, spread
from recipes.toy_regression.problem import as_network, maxima, problem
from recipes.uci.data import SOURCES, Table, add_options, split, tables
from recipes.uci.information_errors import CORRECTIONS, METHODS, Errors, measure
from recipes.uci.network import trained_on_each

RANKS = (0.05, 0.10, 0.25, 0.50, 1.00)
"""Shares of the eigenvalues that INF keeps."""
OTHERS = {"diag": "Diag", "kfac": "KFAC", "efb": "EFB"}
TOY = "toy"

Found = Mapping[str, Errors]


def methods() -> dict[str, dict[str, Any]]:
    """Options of `uq.fit` by name: the three others, and INF at every rank."""
    inf = {f"inf {share:.0%}": METHODS["inf"] | ({"rank": share} if share < 1 else {}) for share in RANKS}
    return {name: METHODS[name] for name in OTHERS} | inf


def on_the_toy_problem(seed: int, starts: int) -> Found:
    """Errors on one draw of the paper's 100 points, at the best of the maxima that so many starts find."""
    task = problem(seed)
    model = as_network(maxima(task, starts, seed)[0][1])
    return measure(model, Table(task.inputs, task.targets.squeeze(1)), methods=methods())


def on_a_table(name: str, table: Table, splits: int, steps: int) -> list[Found]:
    """Errors on every split of a set, with the networks of table 1."""
    parts = [split(table, seed).train for seed in range(splits)]
    models = trained_on_each(parts, SOURCES[name].hidden, steps=steps)
    return [measure(model, part, methods=methods()) for model, part in zip(models, parts, strict=True)]


def columns() -> dict[str, dict[str, str]]:
    """Places along the figure, by title: the label in the results of every correction that there is."""
    found = {title: {"": name} for name, title in OTHERS.items()}
    for share in RANKS:
        name = f"inf {share:.0%}"
        found[f"INF {share:.0%}"] = {correction: f"{name}, {correction}" for correction in CORRECTIONS}
    return found


def lines(results: Mapping[str, Sequence[Found]]) -> list[dict[str, str]]:
    """One for each set, method and correction: mean ± standard deviation over networks."""
    return [
        {
            "set": name,
            "method": title,
            "INF's correction": correction,
            **{
                part.replace("_", "-"): spread([getattr(one[label], part) for one in found])
                for part in Errors._fields
            },
            "networks": str(len(found)),
        }
        for name, found in results.items()
        for title, labels in columns().items()
        for correction, label in labels.items()
    ]


def picture(results: Mapping[str, Sequence[Found]]) -> Figure:
    """A column a set; the diagonals' errors above the others'."""
    figure = Figure(figsize=(3.0 * len(results), 4.6), layout="constrained")
    panels = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False)
    places = columns()
    colours = {"": "#404040", "clamp": "#D55E00", "rescale": "#0072B2"}
    for column, (name, found) in enumerate(results.items()):
        for row, part in enumerate(Errors._fields):
            panel = panels[row, column]
            for kind, colour in colours.items():
                at = [i for i, labels in enumerate(places.values()) if kind in labels]
                values = [
                    [getattr(one[labels[kind]], part) for one in found]
                    for labels in places.values()
                    if kind in labels
                ]
                panel.errorbar(
                    at,
                    [mean(numbers) for numbers in values],
                    [stdev(numbers) if len(numbers) > 1 else 0.0 for numbers in values],
                    fmt="o" if kind != "clamp" else "s",
                    markersize=4,
                    capsize=2,
                    linestyle="-" if kind else "none",
                    linewidth=1,
                    color=colour,
                    label=f"INF, {kind}" if kind else "others",
                )
            panel.set_xticks(range(len(places)), list(places), rotation=60, fontsize=8)
            panel.set_ylim(bottom=-0.03)
            panel.grid(axis="y", alpha=0.3)
            if row == 0:
                panel.set_title(name, fontsize=10)
            if column == 0:
                panel.set_ylabel(f"error, {part.replace('_', '-')}", fontsize=9)
    panels[0, 0].legend(fontsize=8, frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "uci", "the toy problem and Boston, two networks, few steps: seconds")
    add_options(command)
    command.add_argument("--starts", type=int, default=3, help="of the search for the toy problem's network")
    command.set_defaults(splits=10)
    options = parsed(command, arguments, sets=["boston"], splits=2, steps=100, starts=2)
    torch.set_num_threads(1)
    found = tables(options)
    begun = time.perf_counter()
    results = {TOY: [on_the_toy_problem(seed, options.starts) for seed in range(options.splits)]}
    print(f"{TOY}: {time.perf_counter() - begun:.0f} s", flush=True)
    for name, table in found.items():
        begun = time.perf_counter()
        results[name] = on_a_table(name, table, options.splits, options.steps)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    rows = lines(results)
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    put(options.output / "information_ranks.csv", text.getvalue())
    save_figure(picture(results), options.output / "information_ranks.png", options.smoke)
    content = {
        name: [
            {label: value._asdict() for label, value in one.items() if isinstance(value, Errors)}
            for one in found
        ]
        for name, found in results.items()
    }
    report(options, "information_ranks", markdown(rows), content)


if __name__ == "__main__":
    main()
