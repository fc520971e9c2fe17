"""What `uq.tune` on held-out labels gains and loses, against the untuned fit, the network and temperature scaling.

Classifiers on scikit-learn's tables, one regular and one overfitted network each, with 30, 100 and all held-out labels:
NLL and calibration error on other inputs, and the network on which tuning is worst against the untuned fit.
Regressions in the same way: the coverage of intervals of 90 %, and the NLL, untuned and tuned. Networks that chose a
default are kept apart from those that are only reported.

    python benchmarks/tuning.py                  every network, one seed: a few minutes of one core
    python benchmarks/tuning.py --seeds 0 1 2    several seeds, for each a network and a division of the data
    python benchmarks/tuning.py --only values    regressions alone; "classes" for classifiers
    python benchmarks/tuning.py --smoke          two small networks, for the tests
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _harness import machine, write_json
from _scored import best_temperature, class_scores, outputs, plain_scores, predicted, prediction_scores, timed
from _sets import Labelled
from _zoo import OUTPUT, Pair, Shelf, loader, trained
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import markdown

LABELS = (30, 100, None)
"""Held-out labels to tune on; None for all, which are half of a table's test rows."""
LEVEL = 0.9
BOUND = 0.01
"""Nats by which tuning may be worse than the untuned fit, on a network that chooses."""
OVERFITTED = "mlp relu 128 128"


def _overfitted(data: str, chooses: bool, train: int, steps: int = 1500) -> Pair:
    return Pair(OVERFITTED, data, chooses, steps, train=train)


CLASSIFIERS = (
    Pair("mlp relu", "digits", True, 1000),
    Pair("mlp relu 32 32", "wine", True, 400),
    Pair("mlp relu 32 32", "cancer", True, 600),
    Pair("mlp relu 32 32", "iris", True, 600),
    _overfitted("digits", True, 60),
    _overfitted("wine", True, 20),
    _overfitted("cancer", True, 40),
    _overfitted("iris", True, 20),
    Pair("mlp tanh 64 64", "digits", False, 1000),
    Pair("mlp relu 32 32", "moons", False, 800),
    Pair("mlp gelu layer 64 64", "mixture", False, 600),
    replace(_overfitted("digits", False, 100), kind="mlp tanh 128 128"),
    _overfitted("moons", False, 60),
    _overfitted("mixture", False, 300),
    Pair("mlp relu 64 64", "regions", True, 800),
    _overfitted("regions", True, 400),
    Pair("cnn", "digits 28", True, 250, train=1000),
    Pair("cnn", "digits 28", True, 200, train=200),
    Pair("mlp tanh 64 64", "shells", False, 800),
    replace(_overfitted("shells", False, 300), kind="mlp gelu layer 64 64"),
    Pair("strided", "digits 28", False, 400, train=1000),
    Pair("strided", "digits 28", False, 400, train=200),
)
REGRESSORS = (
    Pair("mlp relu 32", "diabetes", True, 150, decay=1.0),
    Pair("mlp relu 64 64", "friedman", True, 400, decay=0.1),
    _overfitted("diabetes", True, 100, 300),
    _overfitted("friedman", True, 100, 300),
    Pair("mlp tanh 32", "linear", False, 300, decay=0.1),
    Pair("mlp tanh 64 64", "impedance", False, 400, decay=0.1),
    _overfitted("linear", False, 100, 300),
    _overfitted("impedance", False, 100, 300),
)


def halves(pair: Pair, seed: int) -> tuple[Labelled, Labelled]:
    """Held-out rows to tune on, and the rows to be scored on."""
    test = pair.split(seed).test
    order = torch.randperm(len(test.targets), generator=torch.Generator().manual_seed(seed))
    middle = len(order) // 2
    return tuple(Labelled(test.inputs[rows], test.targets[rows]) for rows in (order[:middle], order[middle:]))


def measured(pair: Pair, seed: int, labels: Sequence[int | None] = LABELS) -> list[dict[str, Any]]:
    """The rows of one network: the network, the fit, and what each number of labels makes of it."""
    model, split = trained(pair, seed), pair.split(seed)
    held_out, test = halves(pair, seed)
    values = split.classes == 1
    options = {"likelihood": "regression"} if values else {}
    known = {"pair": pair.name, "chooses": pair.chooses, "seed": seed, "overfitted": pair.train is not None}
    posterior = uq.fit(model, loader(split.train), progress=False, **options)

    def scores() -> dict[str, float]:
        prediction = predicted(uq.wrap(model, posterior), test.inputs)
        return prediction_scores(prediction, test) | (coverage(prediction, test.targets) if values else {})

    rows = [
        known | {"row": "network", "labels": 0} | plain_scores(model, split.train, test),
        known | {"row": "untuned", "labels": 0} | scores(),
    ]
    for number in labels:
        some = held_out if number is None else held_out.first(number)
        if number is not None and number > len(held_out.targets):
            continue
        shown = known | {"labels": number or "all"}
        if not values:
            rows.append(shown | {"row": "temperature scaling"} | tempered(model, some, test))
        posterior = uq.fit(model, loader(split.train), progress=False, **options)
        seconds, _ = timed(partial(uq.tune, posterior, loader(some), progress=False))
        found = {"seconds": seconds, "prior precision": posterior.prior_precision}
        found |= {"noise scale": posterior.noise_scale} if values else {"temperature": posterior.temperature}
        rows.append(shown | {"row": "tuned"} | scores() | found)
    return rows


def coverage(prediction: Any, targets: Tensor) -> dict[str, float]:
    """The share of targets inside of intervals of 90 %."""
    low, high = prediction.interval(LEVEL)
    return {"coverage": float(((targets >= low) & (targets <= high)).double().mean())}


def tempered(model: nn.Module, held_out: Labelled, test: Labelled) -> dict[str, float]:
    """Temperature scaling of the network (Guo et al. 2017) on the same labels."""
    factor = best_temperature(outputs(model, held_out.inputs), held_out.targets)
    found = class_scores((outputs(model, test.inputs) / factor).log_softmax(1), test.targets)
    return found | {"temperature": factor}


def classifier_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over networks, and the worst network for tuning against the untuned fit."""
    header = [
        "networks",
        "labels",
        "row",
        "NLL",
        "ECE",
        "temperature",
        "worst NLL against untuned",
        "seconds",
    ]
    lines: list[list[str]] = []
    for chooses in (True, False):
        for overfitted in (False, True):
            some = [r for r in rows if (r["chooses"], r["overfitted"]) == (chooses, overfitted)]
            name = f"{'overfitted' if overfitted else 'regular'}, {'choosing' if chooses else 'reported'}"
            for labels in (0, 30, 100, "all"):
                for row in ("network", "untuned", "temperature scaling", "tuned"):
                    own = [r for r in some if (r["labels"], r["row"]) == (labels, row)]
                    if own:
                        lines.append([name, str(labels), row, *_cells(own, some)])
    return markdown([header, *lines])


def _cells(own: Sequence[Mapping[str, Any]], some: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [f"{mean(r['NLL'] for r in own):.3f}", f"{mean(r['ECE'] for r in own):.3f}"]
    found = [r["temperature"] for r in own if "temperature" in r]
    cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else "-")
    worst = max(own, key=lambda r: loss_against_untuned(r, some))
    cells.append(f"{loss_against_untuned(worst, some):+.3f} ({worst['pair']})")
    seconds = [r["seconds"] for r in own if "seconds" in r]
    return [*cells, f"{mean(seconds):.1f}" if seconds else "-"]


def loss_against_untuned(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Nats above the untuned fit of the same network."""
    return row["NLL"] - next(
        r["NLL"]
        for r in rows
        if r["row"] == "untuned" and (r["pair"], r["seed"]) == (row["pair"], row["seed"])
    )


def regressor_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: coverage of the intervals and NLL, network by network, the mean over seeds."""
    header = ["network", "labels", "row", f"coverage of {LEVEL:.0%}", "NLL", "noise scale"]
    lines: list[list[str]] = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        for labels, row in ((0, "untuned"), (30, "tuned"), (100, "tuned"), ("all", "tuned")):
            own = [r for r in rows if (r["pair"], r["labels"], r["row"]) == (pair, labels, row)]
            if own:
                scale = mean(r["noise scale"] for r in own) if row == "tuned" else 1.0
                cells = [f"{mean(r['coverage'] for r in own):.1%}", f"{mean(r['NLL'] for r in own):.3f}"]
                kind = "reported" if not own[0]["chooses"] else "choosing"
                lines.append([f"{pair} ({kind})", str(labels), row, *cells, f"{scale:.3g}"])
    return markdown([header, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", choices=["classes", "values"], help="one of the two tables")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT.parent / "tuning", help="folder for all results"
    )
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    classifiers, regressors = CLASSIFIERS, REGRESSORS
    labels: Sequence[int | None] = LABELS
    if options.smoke:
        classifiers, regressors, labels = (CLASSIFIERS[3],), (REGRESSORS[2],), (30,)
    found: dict[str, list[dict[str, Any]]] = {"classes": [], "values": []}
    for kind, pairs in (("classes", classifiers), ("values", regressors)):
        if options.only not in (None, kind):
            continue
        for pair in pairs:
            for seed in options.seeds:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found[kind] += measured(pair, seed, labels)
    text = "\n\n".join(
        table(rows)
        for rows, table in ((found["classes"], classifier_table), (found["values"], regressor_table))
        if rows
    )
    bad = [
        f"{r['pair']}, seed {r['seed']}, {r['labels']} labels: {loss_against_untuned(r, rows):+.3f} nats"
        for rows in found.values()
        for r in rows
        if r["row"] == "tuned" and r["chooses"] and loss_against_untuned(r, rows) > BOUND
    ]
    text += f"\n\nChoosing networks on which tuning is worse than the untuned fit by more than {BOUND} nats: "
    text += "; ".join(bad) if bad else "none"
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tuning.md").write_text(text)
    write_json(options.output / "tuning.json", {"machine": machine(), "bad": bad, **found})


if __name__ == "__main__":
    main()
