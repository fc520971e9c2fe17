"""What `uq.calibrate` gains and loses with 20 to 200 held-out labels, beside temperature scaling.

The classifiers of the defaults (`_zoo.py`), those that choose settings apart from those that are only reported. Of
every network and seed many draws of held-out labels are taken from its test inputs; the rest are predicted, as they
are and with noise of 0.7 deviations. Numbers are NLLs less the network's own, in nats: means, and the worst draw.

    python benchmarks/few_labels.py                  by the logits alone: 40 draws, every rule; some minutes of one core
    python benchmarks/few_labels.py --library        `uq.calibrate` itself, 3 draws; an hour
    python benchmarks/few_labels.py --smoke          one small network, for the tests
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _harness import output_folder, write_csv
from _scored import best_temperature, outputs, predicted, prediction_scores
from _sets import Labelled
from _zoo import CLASSIFIERS, OUTPUT, SEEDS, Pair, Shelf, loader, pairs_named, trained
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import markdown

LABELS = (20, 40, 100, 200)
LEAST_REST = 50
"""Inputs that must be left to be predicted."""
NOISE = 0.7
DECADES = torch.linspace(-1.0, 1.5, 101, dtype=torch.float64)
RULES: dict[str, tuple[float, float, float]] = {
    "half of the labels, spread 0.1": (0.5, 0.1, 0.1),
    "half of the labels, spread 0.3": (0.5, 0.3, 0.1),
    "all labels, spread 0.1": (1.0, 0.1, 0.1),
    "all labels, spread 0.3": (1.0, 0.3, 0.1),
    "all labels, spread 0.5": (1.0, 0.5, 0.1),
    "all labels, spread 0.3 to both sides": (1.0, 0.3, 0.3),
    "all labels, spread 0.3, below 1 0.03": (1.0, 0.3, 0.03),
}
"""The share of the labels that choose a temperature, and the spread of its prior above and below 1."""

Change = tuple[float, float]
"""NLL less the network's own, on inputs as they are and with noise."""


def penalty(above: float, below: float) -> Tensor:
    """Minus the logarithm of the prior at every temperature: Cauchy above 1, normal with exponential tails below."""
    logs = DECADES * np.log(10)
    high, low = logs.clamp(min=0) / above, logs.clamp(max=0) / below
    return torch.log1p(high**2) + torch.where(low > -1, low**2 / 2, -low - 0.5)


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """NLL of every input at every temperature, ``(inputs, temperatures)``."""
    at = [nn.functional.cross_entropy(logits / 10**d, labels, reduction="none") for d in DECADES.tolist()]
    return torch.stack(at, 1)


def draws_of(test: Labelled, count: int, draws: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Held-out and remaining rows."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws if len(test.targets) >= count + LEAST_REST else 0):
        order = torch.randperm(len(test.targets), generator=generator)
        yield order[:count], order[count:]


def noisy_inputs(pair: Pair, seed: int) -> Tensor:
    """The test inputs with noise."""
    split, generator = pair.split(seed), torch.Generator().manual_seed(seed)
    x = split.test.inputs
    return x + NOISE * split.train.inputs.std() * torch.randn(x.shape, generator=generator)


def by_logits(pair: Pair, seed: int, draws: int) -> Iterator[tuple[int, str, Change]]:
    """Every rule on the network's logits alone."""
    model, test = trained(pair, seed), pair.split(seed).test
    with torch.no_grad():
        clean, noisy = (
            losses_of(outputs(model, x), test.targets) for x in (test.inputs, noisy_inputs(pair, seed))
        )
    one = int(DECADES.abs().argmin())
    rules = {"temperature scaling": (1.0, torch.zeros_like(DECADES))}
    rules |= {name: (share, penalty(above, below)) for name, (share, above, below) in RULES.items()}
    for count in LABELS:
        for held_out, rest in draws_of(test, count, draws, seed):
            for name, (share, prior) in rules.items():
                at = int((clean[held_out[: round(share * count)]].sum(0) + prior).argmin())
                changes = [float((each[rest, at] - each[rest, one]).mean()) for each in (clean, noisy)]
                yield count, name, (changes[0], changes[1])


def by_library(pair: Pair, seed: int, draws: int) -> Iterator[tuple[int, str, Change]]:
    """`uq.calibrate`, temperature scaling and the fit as it is."""
    model, split = trained(pair, seed), pair.split(seed)
    test, shifted = split.test, noisy_inputs(pair, seed)
    posterior = uq.fit(model, loader(split.train), progress=False, **pair.options)
    for count in LABELS:
        for held_out, rest in draws_of(test, count, draws, seed):
            parts = [Labelled(x[rest], test.targets[rest]) for x in (test.inputs, shifted)]
            with torch.no_grad():
                plain = [outputs(model, part.inputs) for part in parts]
                chosen = best_temperature(outputs(model, test.inputs[held_out]), test.targets[held_out])
            own = [_nll(logits, part.targets) for logits, part in zip(plain, parts, strict=True)]
            scaled = [_nll(logits / chosen, part.targets) for logits, part in zip(plain, parts, strict=True)]
            yield count, "temperature scaling", (scaled[0] - own[0], scaled[1] - own[1])
            held = [(test.inputs[held_out], test.targets[held_out])]
            for name, found in (
                ("fit", posterior),
                ("calibrate", uq.calibrate(posterior, held, progress=False)),
            ):
                predictor = uq.wrap(model, found)
                nll = [prediction_scores(predicted(predictor, part.inputs), part)["NLL"] for part in parts]
                yield count, name, (nll[0] - own[0], nll[1] - own[1])


def _nll(logits: Tensor, labels: Tensor) -> float:
    return float(nn.functional.cross_entropy(logits, labels))


def summary(
    pairs: Sequence[Pair],
    seeds: Sequence[int],
    draws: int,
    measured: Callable[[Pair, int, int], Iterator[tuple[int, str, Change]]],
) -> list[dict[str, str]]:
    """By group of networks, number of labels and rule."""
    found: dict[tuple[str, int, str], list[tuple[str, Change]]] = defaultdict(list)
    for pair in pairs:
        for seed in seeds:
            for count, rule, change in measured(pair, seed, draws):
                found["choosing" if pair.chooses else "reported", count, rule].append((pair.name, change))
    rows: list[dict[str, str]] = []
    for (group, count, rule), cases in sorted(found.items(), key=lambda item: item[0][:2]):
        clean, noisy = (np.array([change[each] for _, change in cases]) for each in (0, 1))
        rows.append(
            {
                "networks": group,
                "pairs": str(len({name for name, _ in cases})),
                "labels": str(count),
                "rule": rule,
                "NLL": f"{clean.mean():+.4f}",
                "worst": f"{clean.max():+.3f}",
                "NLL, noise": f"{noisy.mean():+.4f}",
                "worst, noise": f"{noisy.max():+.3f}",
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", action="store_true", help="`uq.calibrate` itself")
    parser.add_argument("--draws", type=int, help="of held-out labels; by default 40, with --library 3")
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the networks")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="one small network, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    kinds = [("logits", by_logits, 40), ("library", by_library, 3)]
    if options.smoke:
        options.pairs, options.seeds, options.draws = ["cancer, mlp relu"], [0], 2
    else:
        kinds = [kinds[options.library]]
    pairs = [pair for pair in pairs_named(options.pairs, CLASSIFIERS) if pair.data != "reviews"]
    for kind, measured, usual in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = summary(pairs, options.seeds, options.draws or usual, measured)
        path: Path = options.output / f"few_labels_{kind}.csv"
        write_csv(path, rows)
        print(markdown(rows), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
