"""What a plain fit makes of classifiers that are not sure enough: trained with wrong labels or with label smoothing.

Half of the networks chose the rule by which a fit keeps the mean entropy, the others are only reported. Beside the fit
as it is: with the network's temperature in any case, and with the mean entropy kept in any case. The networks of the
defaults (`_zoo.py`), which are sure enough or too sure, show what the rule costs there.

    python benchmarks/underconfident.py             16 networks, three seeds: some ten minutes of one core
    python benchmarks/underconfident.py --defaults  the classifiers of the defaults, one seed: half an hour
    python benchmarks/underconfident.py --smoke     one small network, for the tests
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _harness import output_folder, write_csv
from _kinds import built
from _scored import averaged, harm, plain_scores, predicted, prediction_scores
from _sets import Labelled
from _zoo import CLASSIFIERS, OUTPUT, SEEDS, Pair, Shelf, loader, pairs_named, trained
from torch import nn

import posthoc_uq as uq
from recipes.common import markdown

NETWORK, FIT = "network", "fit"
RULES = (NETWORK, FIT, "network's temperature", "mean entropy kept")
NO_TEXT = ("reviews",)


@dataclass(frozen=True)
class Unsure:
    """A network that is not sure enough.

    Attributes:
        pair: its kind, data and steps.
        wrong: share of the training labels that are drawn anew among the other classes.
        smoothing: of the labels, in training.
    """

    pair: Pair
    wrong: float = 0.0
    smoothing: float = 0.0

    @property
    def name(self) -> str:
        """In tables."""
        how = f"{100 * self.wrong:g} % wrong" if self.wrong else f"smoothing {self.smoothing:g}"
        return f"{self.pair.name}, {how}"

    def trained(self, seed: int) -> tuple[nn.Module, Labelled, Labelled]:
        """The network, with the training data that it saw and the test data, whose labels are right."""
        split, generator = self.pair.split(seed), torch.Generator().manual_seed(seed)
        labels = split.train.targets.clone()
        bad = torch.rand(len(labels), generator=generator) < self.wrong
        other = torch.randint(1, split.classes, (int(bad.sum()),), generator=generator)
        labels[bad] = (labels[bad] + other) % split.classes
        data = Labelled(split.train.inputs, labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = built(self.pair.kind, math.prod(data.inputs.shape[1:]), split.classes)
            optimiser = torch.optim.AdamW(model.parameters(), self.pair.rate, weight_decay=self.pair.decay)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.pair.steps, 1e-4)
            model.train()
            for _ in range(self.pair.steps):
                batch = torch.randint(0, len(labels), (self.pair.batch,))
                optimiser.zero_grad()
                outputs = model(data.inputs[batch])
                nn.functional.cross_entropy(outputs, labels[batch], label_smoothing=self.smoothing).backward()
                optimiser.step()
                schedule.step()
        model.zero_grad()
        return model.eval(), data, split.test


UNSURE = (
    Unsure(Pair("cnn", "fashion", True, 120, train=3000), 0.2),
    Unsure(Pair("mlp relu 128 128", "fashion", True, 120, train=3000), 0.2),
    Unsure(Pair("mlp relu 64 64", "digits", True, 60), 0.2),
    Unsure(Pair("resnet", "fashion", True, 150, train=3000), 0.2),
    Unsure(Pair("cnn", "fashion", True, 300, train=1000), smoothing=0.1),
    Unsure(Pair("mlp gelu layer 64 64", "digits", True, 400), smoothing=0.1),
    Unsure(Pair("mlp relu 128 128", "fashion", True, 200, train=1000, decay=1.0), 0.2),
    Unsure(Pair("mlp relu 64 64", "cancer", True, 100), 0.2),
    Unsure(Pair("lenet", "digits 28", False, 120, train=3000), 0.2),
    Unsure(Pair("mlp tanh 64 64", "digits 28", False, 80, train=1500), 0.2),
    Unsure(Pair("strided", "digits 28", False, 150, train=3000), 0.2),
    Unsure(Pair("mlp relu 64 64", "cells", False, 150), 0.2),
    Unsure(Pair("strided", "fashion", False, 300, train=1000), smoothing=0.1),
    Unsure(Pair("mlp relu 64 64", "shells", False, 300), 0.2),
    Unsure(Pair("lenet", "digits 28", False, 250, train=2000), smoothing=0.1),
    Unsure(Pair("mlp tanh 64 64", "two classes", False, 150), 0.2),
)


def rows_of(model: nn.Module, train: Labelled, test: Labelled, options: Mapping[str, Any]) -> dict[str, Any]:
    """By rule, the scores on test inputs; the fit with its temperature."""
    posterior = uq.fit(model, loader(train), progress=False, **options)
    found: dict[str, Any] = {NETWORK: plain_scores(model, train, test)}
    for rule, temperature in zip(RULES[1:], (None, False, True), strict=True):
        other = posterior
        if temperature is not None:
            other = uq.tune(
                posterior, loader(train), criterion="faithful", temperature=temperature, progress=False
            )
        scores = prediction_scores(predicted(uq.wrap(model, other), test.inputs), test)
        found[rule] = scores | {"temperature": other.temperature}
    # one that leave-one-out found is none of the rule
    found[FIT]["kept"] = float("mean entropy is kept" in posterior.history.tuning.get("temperature", ""))
    return found


def measured(
    names: Sequence[str] | None, seeds: Sequence[int], defaults: bool
) -> Iterator[tuple[str, bool, int, dict[str, Any]]]:
    """By network: its name, whether it chose, its number of test inputs, and means over the seeds by rule."""
    pairs = [pair for pair in pairs_named(names, CLASSIFIERS) if pair.data not in NO_TEXT]
    unsure = [each for each in UNSURE if names is None or any(name in each.name for name in names)]
    for each in pairs if defaults else unsure:
        by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
        tests = 0
        for seed in seeds:
            if isinstance(each, Pair):
                split = each.split(seed)
                model, train, test = trained(each, seed), split.train, split.test
            else:
                model, train, test = each.trained(seed)
            options = each.options if isinstance(each, Pair) else {}
            tests = len(test.targets)
            for rule, scores in rows_of(model, train, test, options).items():
                by_rule[rule].append(scores)
        chose = each.chooses if isinstance(each, Pair) else each.pair.chooses
        yield each.name, chose, tests, {rule: averaged(rows) for rule, rows in by_rule.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--defaults", action="store_true", help="the classifiers of the defaults")
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the networks")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="one small network, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    if options.smoke:
        options.pairs, options.seeds = ["two classes, mlp tanh 64"], [0]
    seeds = options.seeds or (SEEDS[:1] if options.defaults else SEEDS)
    which = "defaults" if options.defaults else "unsure"
    singles: list[dict[str, str]] = []
    groups: dict[tuple[bool, str], list[tuple[dict[str, Any], bool]]] = defaultdict(list)
    path: Path = options.output / f"underconfident_{which}.csv"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, chose, tests, by_rule in measured(options.pairs, seeds, options.defaults):
            for rule, scores in by_rule.items():
                worse = harm(by_rule[NETWORK], scores, tests)
                groups[chose, rule].append((scores, bool(worse)))
                kept = f"{scores['kept']:.2g}" if "kept" in scores else ""
                single = {"network": name, "group": "choosing" if chose else "reported", "rule": rule}
                single |= {key: f"{scores[key]:.3f}" for key in ("accuracy", "NLL", "ECE")}
                single |= {"temperature": f"{scores['temperature']:.2f}" if rule != NETWORK else "1.00"}
                singles.append(single | {"entropy kept": kept, "worse": ", ".join(worse)})
            print(*singles[-len(by_rule) :], sep="\n", flush=True)
    write_csv(path, singles)
    table = [["networks", "number", "rule", "NLL", "ECE", "harmed"]]
    for (chose, rule), found in groups.items():
        means = [f"{mean(scores[key] for scores, _ in found):.3f}" for key in ("NLL", "ECE")]
        harmed = "" if rule == NETWORK else str(sum(worse for _, worse in found))
        table.append(["choosing" if chose else "reported", str(len(found)), rule, *means, harmed])
    print(markdown(table), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
