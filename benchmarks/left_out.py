"""Leave-one-out of perceptrons: the temperature by each rule, and by some of many rows.

    OMP_NUM_THREADS=1 python benchmarks/left_out.py rules        an hour of one core; docs/tables/leave_one_out.csv
    OMP_NUM_THREADS=1 python benchmarks/left_out.py many_rows    half an hour; docs/tables/leave_one_out_rows.csv
    OMP_NUM_THREADS=1 python benchmarks/left_out.py rules --smoke     small networks, for the tests

``rules``: what a fit predicts at the temperature of each rule, for the zoo's perceptrons with at most 2,048 rows and
for networks that memorised few rows. ``many_rows``: the estimates by 500, 1,000 and 2,048 rows of larger data, and the
fit by the last. Networks that choose are apart from those that are only reported.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from _cache import Rows
from _harness import output_folder, write_csv
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
from _sets import Labelled
from _zoo import CLASSIFIERS, OUTPUT, SEEDS, Pair, Shelf, loader, trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.tangent_kernel import tangent_kernel, untrained
from posthoc_uq.fitting import leave_one_out as left_out
from posthoc_uq.layers.proof import prepare
from recipes.common import markdown


def few(kind: str, data: str, chooses: bool, steps: int, rows: int | None) -> Pair:
    """A network that memorises some rows."""
    return Pair(kind, data, chooses, steps, train=rows)


MEMORISED = (
    few("mlp relu 64 64", "digits", True, 500, 60),
    few("mlp gelu layer 64 64", "digits", True, 600, 200),
    few("mlp relu 32 32", "wine", True, 400, 30),
    few("mlp relu 64 64", "cancer", True, 400, 60),
    few("mlp gelu layer 32 32", "cancer", True, 600, 150),
    few("mlp relu 64 64", "iris", True, 600, 40),
    few("mlp relu 128 128", "fashion", True, 400, 300),
    few("mlp relu 64 64", "regions", True, 600, 300),
    few("mlp relu batch 64 64", "fashion", True, 400, 1000),
    few("mlp relu 64 64", "cells", False, 600, 200),
    few("mlp gelu layer 64 64", "jobs", False, 600, 300),
    few("mlp relu 64 64", "churn", False, 600, 300),
    few("mlp relu 64 64", "moons", False, 800, 100),
    few("mlp relu 64 64", "mixture", False, 600, 200),
    few("mlp tanh 64 64", "two classes", False, 800, 150),
    few("mlp relu 64 64", "shells", False, 600, 400),
    few("mlp relu 64 64", "attrition", False, 600, 300),
    few("mlp gelu layer 64 64", "credit", False, 600, 400),
    few("mlp tanh batch 128 64", "digits 28", False, 400, 300),
    few("mlp relu batch 64 64", "cells", False, 800, None),
)
MANY = (
    *(pair for pair in CLASSIFIERS if pair.data in ("churn", "credit", "jobs")),
    *(pair for pair in CLASSIFIERS if pair.name == "digits 28, mlp tanh batch 128 64"),
    few("mlp relu 64 64", "regions", True, 1200, None),
    few("mlp relu 64 64", "shells", False, 1200, None),
    few("mlp relu 128 128", "fashion", True, 1200, 3000),
    few("mlp relu 128 128", "fashion", True, 3000, 10_000),
)
PERCEPTRONS = tuple(pair for pair in CLASSIFIERS if pair.kind.startswith("mlp"))
NETWORK, BEST, NOW = (
    "network",
    "best temperature by test labels, logits alone",
    "mean of likeliest and 2 standard errors",
)
GAP = 0.1
SIZES = (500, 1000, left_out.MAX_ROWS)

Scores = dict[str, dict[str, float]]


# Temperatures by rule


def kernel_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The tangent kernel of untrained networks like this one, as `uq.fit` makes it."""
    data = [Batch((part,)) for part in inputs.split(256)]
    layers = prepare(model, data[0], unsupported="skip", independent=True).proof.tracked.values()
    total = torch.zeros(len(inputs), len(inputs), dtype=torch.float64)
    for number in range(left_out.INITIALISATIONS):
        start = untrained(model, data, mixed_seed(0, number, 1))
        part = tangent_kernel(start, data, mixed_seed(0, number), layers, None)
        total.add_(part, alpha=1 / float(part.diagonal().mean()))
    return total


def temperatures(model: nn.Module, train: Labelled, classes: int) -> dict[str, float]:
    """By rule."""
    logits = outputs(model, train.inputs)
    labels = nn.functional.one_hot(train.targets, classes).double()
    found = left_out.leave_one_out(kernel_of(model, train.inputs), labels)
    accuracy, error = found.accuracy, (found.accuracy * (1 - found.accuracy) / found.units) ** 0.5

    def at(wanted: float) -> float:
        return left_out.temperature_for(logits, wanted) if wanted < 1 else 1.0

    errors, half = at(accuracy + 2 * error), at((1 + accuracy) / 2)
    likeliest = left_out.likeliest_temperature(logits, found)
    gap = left_out.confidence(logits) - min(1.0, accuracy + 2 * error) > GAP
    return {
        "nothing left out": 1.0,
        "2 standard errors, gap of 0.1 (before)": errors if gap else 1.0,
        "2 standard errors, no gap": errors,
        "half way to 1": half,
        "likeliest": likeliest,
        "the smaller of likeliest and 2 standard errors": min(likeliest, errors),
        "mean of likeliest and half way to 1": (likeliest * half) ** 0.5,
        NOW: (likeliest * errors) ** 0.5,
    }


def by_rules(pair: Pair, seed: int) -> dict[str, Any]:
    """Scores of the network, of fits at the temperature of every rule, and at the best one of its logits."""
    model, split = trained(pair, seed), pair.split(seed)
    found: Scores = {NETWORK: plain_scores(model, split.train, split.test)}
    start = uq.fit(model, loader(split.train), prior_precision=1.0, progress=False)
    known: Scores = {}
    for rule, temperature in temperatures(model, split.train, split.classes).items():
        key = f"{temperature:.3f}"
        if key not in known:
            posterior = start.with_settings(temperature=temperature)
            posterior = uq.tune(posterior, loader(split.train), criterion="faithful", progress=False)
            known[key] = scores_of(model, posterior, split.test) | {"temperature": temperature}
        found[rule] = known[key]
    logits = outputs(model, split.test.inputs)
    at = logits / best_temperature(logits, split.test.targets)
    return {"scores": found | {BEST: class_scores(at.log_softmax(1), split.test.targets)}}


def scores_of(model: nn.Module, posterior: uq.Posterior, test: Labelled) -> dict[str, float]:
    """Accuracy, NLL and calibration error of a posterior."""
    return prediction_scores(predicted(uq.wrap(model, posterior), test.inputs), test)


class Named(NamedTuple):
    """What was measured of one network: scores by rule, means over the seeds."""

    name: str
    chooses: bool
    tests: int
    scores: Scores


def rules_table(networks: Mapping[str, Sequence[Named]]) -> list[dict[str, str]]:
    """A line a group of networks and rule."""
    lines: list[dict[str, str]] = []
    for group, every in networks.items():
        for title, chooses in (("choose", True), ("reported", False)):
            own = [each for each in every if each.chooses is chooses]
            for rule in own[0].scores if own else ():
                nll, ece = ([each.scores[rule][m] for each in own] for m in ("NLL", "ECE"))
                plain, best = (mean(each.scores[r]["NLL"] for each in own) for r in (NETWORK, BEST))
                changes = [
                    [each.scores[rule][m] - each.scores[NETWORK][m] for each in own] for m in ("NLL", "ECE")
                ]
                lines.append(
                    {
                        "pairs": f"{group}, {title}",
                        "number": str(len(own)),
                        "rule": f"{rule} (now)" if rule == NOW else rule,
                        "NLL": f"{mean(nll):.3f}",
                        "ECE": f"{mean(ece):.3f}",
                        "share of the best temperature's gain": f"{(plain - mean(nll)) / (plain - best):.2f}",
                        "most NLL": f"{max(changes[0]):+.3f}",
                        "most ECE": f"{max(changes[1]):+.3f}",
                        "harmed": harmed(own, rule),
                    }
                )
    return lines


def harmed(networks: Sequence[Named], rule: str) -> str:
    """The names of those that a rule harms."""
    found = [each.name for each in networks if harm(each.scores[NETWORK], each.scores[rule], each.tests)]
    return "; ".join(found) or "none"


def study_rules(rows: Rows, seeds: Sequence[int], smoke: bool) -> list[dict[str, str]]:
    """``rules``."""
    groups = {"defaults": PERCEPTRONS, "memorised": MEMORISED}
    if smoke:
        groups = {"memorised": [pair for pair in MEMORISED if pair.data in ("iris", "moons")]}
    networks: dict[str, list[Named]] = {}
    for group, pairs in groups.items():
        for pair in pairs:
            if len(pair.split(0).train.targets) <= left_out.MAX_ROWS:
                found = [row["scores"] for row in measured(rows, "rules", pair, seeds, by_rules)]
                networks.setdefault(group, []).extend(named(pair, found))
    return rules_table(networks)


def named(pair: Pair, found: Sequence[Scores]) -> list[Named]:
    """The means over seeds of one network; none where nothing was measured."""
    if not found:
        return []
    scores = {rule: averaged([each[rule] for each in found]) for rule in found[0]}
    return [Named(pair.name, pair.chooses, len(pair.split(0).test.targets), scores)]


def measured(
    rows: Rows, study: str, pair: Pair, seeds: Sequence[int], measure: Callable[[Pair, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A network's rows of a study, from their files or measured."""
    for seed in seeds:
        key = {"study": f"left out, {study}", "pair": pair.name, "seed": seed}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = rows.row(key, partial(measure, pair, seed))
        if found is not None and "error" not in found:
            print(pair.name, seed, flush=True)
            yield found


# Estimates by some of many rows


def by_some_rows(pair: Pair, seed: int) -> dict[str, Any]:
    """The network's scores, those of a fit by `SIZES[-1]` rows, and what each number of rows estimates."""
    model, split = trained(pair, seed), pair.split(seed)
    logits, found = outputs(model, split.test.inputs), dict[str, Any]()
    estimates: dict[str, dict[str, float]] = {}
    most = left_out.MAX_ROWS
    try:
        for size in (*SIZES, *((len(split.train.targets),) if len(split.train.targets) <= 4000 else ())):
            left_out.MAX_ROWS = size
            posterior = uq.fit(model, loader(split.train), progress=False)
            record = posterior.history.leave_one_out
            assert record is not None and record.accuracy is not None and record.temperature is not None
            estimates[str(size)] = {"accuracy": record.accuracy, "temperature": record.temperature}
            if size == SIZES[-1]:
                found = scores_of(model, posterior, split.test) | {"temperature": record.temperature}
    finally:
        left_out.MAX_ROWS = most
    return {
        "network": plain_scores(model, split.train, split.test),
        "fit": found | {"best": best_temperature(logits, split.test.targets)},
        "estimates": estimates,
    }


def study_many_rows(rows: Rows, seeds: Sequence[int], smoke: bool) -> list[dict[str, str]]:
    """``many_rows``."""
    lines: list[dict[str, str]] = []
    for pair in MANY if not smoke else [pair for pair in MANY if pair.data == "shells"]:
        found = list(measured(rows, "many rows", pair, seeds, by_some_rows))
        if not found:
            continue
        network, fit = (averaged([each[part] for each in found]) for part in ("network", "fit"))
        line = {
            "network": pair.name,
            "": "chooses" if pair.chooses else "reported",
            "rows": str(len(pair.split(0).train.targets)),
            **{f"{m}, network": f"{network[m]:.3f}" for m in ("NLL", "ECE")},
            **{m: f"{fit[m]:.3f}" for m in ("NLL", "ECE")},
            "temperature": f"{fit['temperature']:.2f}",
            "best": f"{fit['best']:.2f}",
            "harmed": ", ".join(harm(network, fit, len(pair.split(0).test.targets))) or "no",
        }
        for size in SIZES[:-1]:
            own = [each["estimates"] for each in found]
            largest = [each[max(each, key=int)] for each in own]
            for measure in ("accuracy", "temperature"):
                off = [
                    abs(each[str(size)][measure] - whole[measure])
                    for each, whole in zip(own, largest, strict=True)
                ]
                line[f"{measure} by {size} rows, off"] = f"{max(off):.3f}"
        lines.append(line)
    return lines


STUDIES = {
    "rules": (study_rules, "leave_one_out"),
    "many_rows": (study_many_rows, "leave_one_out_rows"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--keep", action="store_true", help="take rows of earlier versions of the library")
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    study, name = STUDIES[options.study]
    rows = Rows(options.output / "rows", options.keep)
    lines = study(rows, [0] if options.smoke else options.seeds, options.smoke)
    path: Path = options.output / f"{name}.csv"
    write_csv(path, lines)
    print(markdown(lines), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
