"""Where a network's class rates are not those of new data: what a shift of each class mends, and whether it harms.

* `differ`: tables and pictures of which one class was made rare, and perceptrons that were trained on them with class
  weights, on rows drawn by class (over- and undersampling), or plainly. Half of the data sets chose the rule.
* `agree`: the classifiers of the defaults (`_zoo.py`), those that choose settings apart from those that are reported;
  predicted as they are and with noise of 0.7 deviations.
* `some`: those of them with at least three classes, by held-out rows of half of the classes; all classes are predicted.

Many draws of held-out labels are taken from rows that the network has not seen; the rest are predicted. NLL is less
that of the temperature alone, in nats: the mean, and the worst draw. `ratio` is the mean probability of the rare class
over its frequency, a geometric mean over networks of their medians over draws.

    python benchmarks/class_rates.py                  by the logits alone, 10 draws; some minutes of one core
    python benchmarks/class_rates.py --library        `uq.calibrate` itself, 2 draws; half an hour
    python benchmarks/class_rates.py --smoke          one small network of each kind, for the tests
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import output_folder, write_csv
from _scored import outputs
from _sets import Labelled, split_of
from _zoo import CLASSIFIERS, OUTPUT, SEEDS, Pair, Shelf, loader, pairs_named, trained
from few_labels import draws_of, noisy_inputs
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.fitting.class_scaling import ClassTable, Scaling, class_scaled
from posthoc_uq.fitting.held_out import hyperprior_penalty
from posthoc_uq.posteriors.settings import Hyperparameters
from recipes.common import markdown

LABELS = (40, 100, 200, 400)
SCALINGS: tuple[Scaling, ...] = ("temperature", "auto", "bias", "vector")
TRAININGS = ("class weights", "oversampling", "undersampling", "plain")
IMBALANCED: dict[str, tuple[int | None, float, bool]] = {
    "churn": (1, 0.3, True),
    "two classes": (None, 0.2, True),
    "digits": (8, 0.15, True),
    "cancer": (0, 0.2, True),
    "attrition": (None, 0.5, False),
    "cells": (None, 0.2, False),
    "fashion": (6, 0.1, False),
    "credit": (None, 0.3, False),
}
"""By data set the class that is made rare (None: the rarest), the share of it that stays, whether it chose the rule."""
STEPS = (150, 800)


@dataclass
class Case:
    """A network and rows that it has not seen.

    Attributes:
        name: of data and network.
        group: how it was trained, with whether it chose or is reported.
        model: the network.
        train: the rows of its training.
        test: the rows it has not seen.
        shifted: the inputs of these with noise; None where they are not predicted.
        rare: the class that was made rare.
        options: of the fit.
        of_some: whether held-out rows are of half of the classes.
    """

    name: str
    group: tuple[str, str]
    model: nn.Module
    train: Labelled
    test: Labelled
    shifted: Tensor | None
    rare: int | None
    options: dict[str, Any]
    of_some: bool = False

    def draws(self, count: int, draws: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Held-out and remaining rows."""
        labels, generator = self.test.targets, torch.Generator().manual_seed(1)
        for held_out, rest in draws_of(self.test, count if not self.of_some else len(labels) // 2, draws, 0):
            if not self.of_some:
                yield held_out, rest
                continue
            classes = labels.unique()
            chosen = classes[torch.randperm(len(classes), generator=generator)[: (len(classes) + 1) // 2]]
            own = held_out[torch.isin(labels[held_out], chosen)]
            if len(own) >= count:
                yield own[:count], rest


@cache
def imbalanced(data: str) -> tuple[Labelled, Labelled, int, int]:
    """Rows to train and to test, the number of classes, and the rare one."""
    rare, share, _ = IMBALANCED[data]
    split, generator = (
        split_of(data, 0, 3000 if data == "fashion" else None),
        torch.Generator().manual_seed(0),
    )
    x = torch.cat([split.train.inputs, split.test.inputs]).flatten(1)
    y = torch.cat([split.train.targets, split.test.targets])
    rare = int(torch.bincount(y).argmin()) if rare is None else rare
    kept = ((y != rare) | (torch.rand(len(y), generator=generator) < share)).nonzero().flatten()
    kept = kept[torch.randperm(len(kept), generator=generator)]
    first, second = kept.tensor_split(2)
    assert split.classes is not None
    return Labelled(x[first], y[first]), Labelled(x[second], y[second]), split.classes, rare


def perceptron(train: Labelled, classes: int, how: str, steps: int) -> nn.Module:
    """A network that was trained in this way."""
    torch.manual_seed(0)
    x, y = train
    model = nn.Sequential(
        nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    )
    counts = torch.bincount(y, minlength=classes).float().clamp(min=1)
    weights = (1 / counts) / (1 / counts).sum() * classes
    loss = nn.CrossEntropyLoss(weight=weights if how == "class weights" else None)
    rows = torch.arange(len(y))
    if how == "undersampling":
        fewest = max(int(counts.min()), 20)
        rows = torch.cat([(y == each).nonzero().flatten()[:fewest] for each in range(classes)])
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-3)
    for _ in range(steps):
        oversampled = how == "oversampling"
        drawn = (
            torch.multinomial(weights[y], 64, True) if oversampled else rows[torch.randint(len(rows), (64,))]
        )
        optimiser.zero_grad()
        loss(model(x[drawn]), y[drawn]).backward()
        optimiser.step()
    return model.eval()


def of_other_rates(names: Sequence[str], steps: Sequence[int], trainings: Sequence[str]) -> Iterator[Case]:
    """Perceptrons on imbalanced data."""
    for data in names:
        train, test, classes, rare = imbalanced(data)
        group = "choosing" if IMBALANCED[data][2] else "reported"
        for how in trainings:
            kind = "plain" if how == "plain" else "balanced"
            for count in steps:
                model = perceptron(train, classes, how, count)
                yield Case(f"{data}, {how}, {count}", (kind, group), model, train, test, None, rare, {})


def of_equal_rates(pairs: Sequence[Pair], seeds: Sequence[int]) -> Iterator[Case]:
    """The classifiers of the defaults."""
    for pair in pairs:
        for seed in seeds:
            split = pair.split(seed)
            group = "choosing" if pair.chooses else "reported"
            shifted = noisy_inputs(pair, seed)
            yield Case(
                pair.name,
                ("agree", group),
                trained(pair, seed),
                split.train,
                split.test,
                shifted,
                None,
                pair.options,
            )


def of_some_classes(cases: Iterator[Case]) -> Iterator[Case]:
    """Those with at least three classes, for held-out rows of half of the classes."""
    for case in cases:
        if len(case.test.targets.unique()) > 2:
            yield replace(case, group=("some", case.group[1]), shifted=None, of_some=True)


LogProbs = tuple[Tensor, Tensor | None]
"""Of all rows as they are, and with noise."""


def by_logits(case: Case, held_out: Tensor) -> Iterator[tuple[str, LogProbs]]:
    """Every scaling on the logits alone."""
    with torch.no_grad():
        logits = [outputs(case.model, x).double() for x in (case.test.inputs, case.shifted) if x is not None]
    labels = case.test.targets[held_out]
    own = nn.functional.one_hot(labels, logits[0].shape[1]).double().numpy()
    table = ClassTable(logits[0][held_out].numpy(), own, True)
    decades = torch.linspace(-1.0, 1.5, 251, dtype=torch.float64)
    sums = [
        float(nn.functional.cross_entropy(logits[0][held_out] / 10**d, labels, reduction="sum"))
        for d in decades
    ]
    penalties = [_penalty(10 ** float(d)) for d in decades]
    best = 10 ** float(decades[int(np.add(sums, penalties).argmin())])
    start = Hyperparameters(1.0, temperature=best)
    at_best = table._replace(logits=table.logits / best)
    for scaling in SCALINGS:
        found = start if scaling == "temperature" else class_scaled(at_best, start, scaling, _penalty)
        scale = torch.tensor(found.class_scale or (1.0,)).double()
        shift = torch.tensor(found.class_shift or (0.0,)).double()
        made = [(z * scale / found.temperature + shift).log_softmax(1) for z in logits]
        yield scaling, (made[0], made[1] if len(made) > 1 else None)


def _penalty(temperature: float) -> float:
    return hyperprior_penalty(temperature, 1.0, 0.3)


def by_library(case: Case, held_out: Tensor) -> Iterator[tuple[str, LogProbs]]:
    """`uq.calibrate` with every scaling."""
    if "posterior" not in case.options:
        fitted = uq.fit(case.model, loader(case.train), progress=False, **case.options)
        case.options = {"posterior": fitted}
    data = [(case.test.inputs[held_out], case.test.targets[held_out])]
    for scaling in SCALINGS:
        posterior = uq.calibrate(case.options["posterior"], data, scaling=scaling, progress=False)
        predictor = uq.wrap(case.model, posterior)
        made = [
            torch.cat([predictor(part).log_probs for part in x.split(500)]).double()
            for x in (case.test.inputs, case.shifted)
            if x is not None
        ]
        yield scaling, (made[0], made[1] if len(made) > 1 else None)


def by_platt(case: Case, held_out: Tensor) -> Tensor | None:
    """Platt scaling of two classes: logistic regression on the difference of the logits, without a prior."""
    with torch.no_grad():
        logits = outputs(case.model, case.test.inputs).double()
    labels = case.test.targets[held_out]
    if logits.shape[1] != 2 or len(labels.unique()) < 2:
        return None
    from sklearn.linear_model import LogisticRegression

    margins = (logits[:, 1] - logits[:, 0])[:, None].numpy()
    fitted = LogisticRegression(C=1e6, max_iter=2000).fit(margins[held_out], labels)
    return torch.tensor(fitted.predict_log_proba(margins)).clamp(min=-50)


Row = dict[str, float]


def measured(case: Case, draws: int, library: bool) -> Iterator[tuple[int, str, Row]]:
    """By number of labels and scaling: NLLs, and the mean probability of the rare class over its frequency."""
    for count in LABELS:
        for held_out, rest in case.draws(count, draws):
            labels = case.test.targets[rest]

            def nll(logs: Tensor, rest: Tensor = rest, labels: Tensor = labels) -> float:
                return float(nn.functional.nll_loss(logs[rest], labels))

            platt, base = by_platt(case, held_out), list[float]()
            for scaling, (clean, noisy) in (by_library if library else by_logits)(case, held_out):
                found = [nll(clean), *([] if noisy is None else [nll(noisy)])]
                base = base or found
                right = float((clean[rest].argmax(1) == labels).double().mean())
                row = {"NLL": found[0] - base[0], "accuracy": right}
                if noisy is not None:
                    row["noise"] = found[1] - base[1]
                if platt is not None:
                    row["platt"] = found[0] - nll(platt)
                if case.rare is not None and bool((labels == case.rare).any()):
                    mean = float(clean[rest].exp()[:, case.rare].mean())
                    row["ratio"] = mean / float((labels == case.rare).double().mean())
                yield count, scaling, row


def summary(cases: Iterator[Case], draws: int, library: bool) -> list[dict[str, str]]:
    """By group of networks, number of labels and scaling."""
    found: dict[tuple[tuple[str, str], int, str], dict[str, list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case in cases:
        for count, scaling, row in measured(case, draws, library):
            found[case.group, count, scaling][case.name].append(row)
    rows: list[dict[str, str]] = []
    for (group, count, scaling), by_case in sorted(found.items(), key=lambda item: item[0][:2]):
        own = [row for part in by_case.values() for row in part]
        line = {"rates": group[0], "networks": group[1], "cases": str(len(by_case)), "labels": str(count)}
        line |= {"scaling": scaling, "NLL": f"{np.mean([row['NLL'] for row in own]):+.4f}"}
        line["worst"] = f"{max(row['NLL'] for row in own):+.3f}"
        noise, platt = ([row[key] for row in own if key in row] for key in ("noise", "platt"))
        line["NLL, noise"] = f"{np.mean(noise):+.4f}" if noise else ""
        line["worst, noise"] = f"{max(noise):+.3f}" if noise else ""
        line["accuracy"] = f"{np.mean([row['accuracy'] for row in own]):.3f}"
        line["less Platt"] = f"{np.mean(platt):+.4f}" if platt else ""
        medians = [
            np.median([row["ratio"] for row in part if "ratio" in row] or [1]) for part in by_case.values()
        ]
        of_rates = any("ratio" in row for row in own)
        line["ratio"] = f"{np.exp(np.log(medians).mean()):.2f}" if of_rates else ""
        line["within .8 to 1.25"] = f"{np.mean([0.8 <= m <= 1.25 for m in medians]):.2f}" if of_rates else ""
        rows.append(line)
    return rows


def kinds_of(
    differ: Iterator[Case], pairs: Sequence[Pair], seeds: Sequence[int]
) -> dict[str, Iterator[Case]]:
    """The networks of every kind."""
    agree, some = (of_equal_rates(pairs, seeds) for _ in range(2))
    return {"differ": differ, "agree": agree, "some": of_some_classes(some)}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", action="store_true", help="`uq.calibrate` itself")
    parser.add_argument("--draws", type=int, help="of held-out labels; by default 10, with --library 2")
    parser.add_argument("--only", choices=["differ", "agree", "some"], help="one of the kinds")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS[:2]))
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="one small network of each kind, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    draws = options.draws or (2 if options.library else 10)
    differ = of_other_rates(list(IMBALANCED), STEPS, TRAININGS)
    pairs, seeds = [pair for pair in CLASSIFIERS if pair.data != "reviews"], options.seeds
    kinds = [options.library]
    if options.smoke:
        draws, kinds = 1, [False, True]
    for library in kinds:
        if options.smoke:
            differ = of_other_rates(["cancer"], STEPS[:1], TRAININGS[:1])
            pairs, seeds = pairs_named(["mixture, mlp gelu layer"], CLASSIFIERS), [0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [
                row
                for kind, cases in kinds_of(differ, pairs, seeds).items()
                if options.only in (None, kind)
                for row in summary(cases, draws, library)
            ]
        path: Path = options.output / f"class_rates_{'library' if library else 'logits'}.csv"
        write_csv(path, rows)
        print(markdown(rows), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
