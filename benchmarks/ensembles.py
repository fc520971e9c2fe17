"""What several networks give beside one: by themselves, and with a posterior each.

Three networks of each pair of the defaults (`_zoo.py`), trained on the same data from other seeds. One network by
itself, one with its posterior (`uq.fit` with nothing chosen), three as a deep ensemble without posteriors, three with
theirs; rows of one network are means over the three. Of pictures also how well the scores tell pictures of the other
data set from familiar ones: digits from FashionMNIST, and the other way round.

    python benchmarks/ensembles.py            tables, FashionMNIST, digits, values: an hour of one core
    python benchmarks/ensembles.py --pairs fashion "wine, mlp"     these alone
    python benchmarks/ensembles.py --smoke    two small networks, for the tests
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from _cache import Rows
from _harness import output_folder, write_csv
from _kinds import built
from _novelty import FOREIGN_KINDS, foreign_pictures
from _scored import averaged, predicted, prediction_scores
from _zoo import CLASSIFIERS, OUTPUT, REGRESSORS, SEEDS, Pair, Shelf, loader, pairs_named, train, trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc
from recipes.common import markdown

NETWORK, POSTERIOR, ENSEMBLE, POSTERIORS = "network", "posterior", "ensemble", "ensemble of posteriors"
ROWS = (NETWORK, POSTERIOR, ENSEMBLE, POSTERIORS)
PICTURES = ("fashion", "digits 28")
FAMILIAR = FOREIGN = 500
SMOKE = ("iris, mlp relu", "diabetes, mlp relu")
SCORES = ("entropy", "mutual_information", "novelty")


def networks(pair: Pair) -> list[nn.Module]:
    """Three networks trained on one split, from other seeds; those of pictures are the ones of the defaults."""
    if pair.data in PICTURES:
        return [trained(pair, seed) for seed in SEEDS]
    split, found = pair.split(0), list[nn.Module]()
    for seed in SEEDS:
        path = Shelf.folder / f"one split, {pair.name}-seed{seed}.pt"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = built(pair.kind, math.prod(split.train.inputs.shape[1:]), split.classes)
            if path.exists():
                model.load_state_dict(torch.load(path, weights_only=True))
            else:
                train(model, split.train, pair)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(model.state_dict(), path)
        found.append(model.eval())
    return found


def measured(pair: Pair) -> dict[str, dict[str, float]]:
    """By row, its scores."""
    models, split, options = networks(pair), pair.split(0), dict(pair.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if split.classes == 1:
            options["likelihood"] = "regression"
        posteriors = [uq.fit(m, loader(split.train), progress=False, **options) for m in models]
        likelihood: Any = "classification"
        if (
            split.classes == 1
        ):  # the training residuals' mean square, as of the networks alone in the defaults
            with torch.no_grad():
                residuals = [(m(split.train.inputs) - split.train.targets).square().mean() for m in models]
            likelihood = uq.Gaussian(float(torch.stack(residuals).mean()))
        plain = [uq.wrap([model], [None], likelihood=likelihood) for model in models]
        single = [uq.wrap(m, p) for m, p in zip(models, posteriors, strict=True)]
        rows = {
            NETWORK: plain,
            POSTERIOR: single,
            ENSEMBLE: [uq.wrap(models, None, likelihood=likelihood)],
            POSTERIORS: [uq.wrap(models, posteriors)],
        }
        return {name: averaged([scores(each, pair) for each in row]) for name, row in rows.items()}


def scores(predictor: Any, pair: Pair) -> dict[str, float]:
    """Of test inputs, and of pictures the AUROC of those of the other data set."""
    test = pair.split(0).test
    prediction = predicted(predictor, test.inputs)
    found = prediction_scores(prediction, test)
    if test.targets.is_floating_point():  # by the mixture, not by the Gaussian of its mean and variance
        targets = prediction.fitting(test.targets)
        found["NLL"] = -float(prediction.log_prob(targets).double().mean())
        low, high = prediction.interval(0.9)
        found["coverage"] = float(((low <= targets) & (targets <= high)).double().mean())
    if pair.data not in PICTURES:
        return found
    familiar = of_inputs(predictor, test.inputs[:FAMILIAR])
    for kind, inputs in foreign_pictures(pair.data, FOREIGN).items():
        for name, values in of_inputs(predictor, inputs).items():
            found[f"{name}, {kind}"] = ood_auroc(familiar[name], values)
    return found


def of_inputs(predictor: Any, inputs: Tensor) -> dict[str, Tensor]:
    """The scores of inputs that tell foreign ones."""
    known = predicted(predictor, inputs).scores()
    return {name: known[name].float() for name in SCORES if name in known}


def line_of(pair: str, row: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """A line of the table: AUROCs of the other data set, and their means over all kinds of foreign pictures."""
    line: dict[str, Any] = {"pair": pair, "row": row} | {k: v for k, v in numbers.items() if ", " not in k}
    for score in SCORES if f"entropy, {FOREIGN_KINDS[0]}" in numbers else ():
        of_kinds = [numbers[f"{score}, {kind}"] for kind in FOREIGN_KINDS if f"{score}, {kind}" in numbers]
        if of_kinds and (row != NETWORK or score == "entropy"):
            line |= {f"{score}, other": of_kinds[0], f"{score}, all": mean(of_kinds)}
    return line


def table(found: dict[str, dict[str, dict[str, float]]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A line for each pair and row, and the means over pairs, of AUROCs over those of FashionMNIST."""
    lines = [line_of(p, r, numbers) for p, rows in found.items() for r, numbers in rows.items()]
    for row in ROWS:
        own = [line for line in lines if line["row"] == row]
        clothes = [line for line in own if line["pair"].startswith("fashion")]
        means = {name: mean(line[name] for line in own) for name in names}
        rest = [name for name in (clothes[0] if clothes else {}) if ", " in name]
        means |= {name: mean(line[name] for line in clothes) for name in rest}
        lines.append({"pair": "mean", "row": row, **means})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the pairs to be run")
    parser.add_argument("--keep", action="store_true", help="take rows of earlier versions of the library")
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for rows and CSV")
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    rows = Rows(options.output / "rows", options.keep)
    for kind, pairs in (("classifiers", CLASSIFIERS), ("regressors", REGRESSORS)):
        found: dict[str, dict[str, dict[str, float]]] = {}
        for pair in pairs_named(SMOKE if options.smoke else options.pairs, pairs):
            if pair.data == "reviews":
                continue
            row = rows.row({"ensembles": pair.name}, lambda pair=pair: measured(pair))
            if row is None or "error" in row:
                print(f"{pair.name}: {row}")
                continue
            found[pair.name] = row
            print(pair.name, {k: {n: round(v, 4) for n, v in r.items()} for k, r in row.items()}, flush=True)
        if found:
            names = ("accuracy", "NLL", "ECE") if kind == "classifiers" else ("RMSE", "NLL", "coverage")
            lines = table(found, names)
            write_csv(options.output / f"ensembles_{kind}.csv", lines, ".4f")
            shown = [[line["row"], *(f"{line[name]:.4f}" for name in names)] for line in lines[-len(ROWS) :]]
            print(markdown([["mean over pairs", *names], *shown]))


if __name__ == "__main__":
    main()
