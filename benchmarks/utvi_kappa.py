"""The kappa of the unscented transform in `uq.UTVI`: test NLL, and moments beside draws of the weights.

Networks with one hidden layer, in which the transform is the only approximation of the moments, on handwritten digits
(classes) and Boston's houses (values). For each kappa a training with it; and, apart from any training, the moments of
one wide posterior by points of that kappa: of `uq.Diagonal` at prior precision 1. Both beside draws of the weights of
100 test inputs: the error of means is in deviations by draws (root mean square), that of deviations relative (mean).

    python benchmarks/utvi_kappa.py            three seeds; about 5 minutes of one core
    python benchmarks/utvi_kappa.py --smoke    two small networks, for the tests
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from _harness import output_folder, write_csv
from _scored import predicted, prediction_scores
from _sets import Labelled
from _zoo import OUTPUT, SEEDS, Pair, Shelf, loader, trained
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.heads import MomentsPredictor
from recipes.common import markdown, spread

PAIRS = (
    Pair("mlp relu 50", "digits", False, 500),
    Pair("mlp tanh 50", "digits", False, 500),
    Pair("mlp relu 50", "boston", False, 400),
    Pair("mlp tanh 50", "boston", False, 400),
)
KAPPAS = (0.0, 0.5, 1.0, 2.0, 3.0, "learned")
STEPS, RATES = 200, {"lr": 3e-3, "log_variance_lr": 0.1}
DRAWS = 10_000
"""Of the weights: means have an error of 0.01 by them, deviations of 0.007."""
INPUTS = 100

Numbers = dict[str, float]


def by_draws(
    model: torch.nn.Module, posterior: uq.Posterior, inputs: Tensor, draws: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs over draws of the weights."""
    drawn = uq.wrap(model, posterior, "sampling", n_samples=1).functional_samples(
        inputs, n_samples=draws, generator=torch.Generator().manual_seed(0)
    )
    return drawn.double().mean(0), drawn.double().var(0)


def errors(head: MomentsPredictor, inputs: Tensor, reference: tuple[Tensor, Tensor]) -> Numbers:
    """Of the head's means and deviations, as the docstring of this file says."""
    with torch.no_grad():
        mean, variance, _ = head.propagate(inputs)
    deviation = reference[1].sqrt()
    return {
        "error of means": float(((mean - reference[0]) / deviation).square().mean().sqrt()),
        "error of deviations": float((variance.double().sqrt() / deviation - 1).abs().mean()),
    }


def measured(pair: Pair, seed: int, steps: int, draws: int) -> Iterator[tuple[str, Numbers]]:
    """Each kappa with its numbers."""
    model, split = trained(pair, seed), pair.split(seed)
    test, inputs = split.test, split.test.inputs[:INPUTS]
    batches = loader(split.train)
    kind = "classification" if split.classes > 1 else "regression"
    options: dict[str, Any] = {"likelihood": kind, "seed": seed, "progress": False, "divergence": None}
    wide = uq.fit(model, batches, "diag", prior_precision=1.0, **options)
    of_wide = by_draws(model, wide, inputs, draws)
    for kappa in KAPPAS:
        method = uq.UTVI(epochs=ceil(steps / len(batches)), kappa=kappa, **RATES)
        posterior = uq.fit(model, batches, method, **options)
        head = uq.wrap(model, posterior)
        found = {"NLL": nll_of(head, test)}
        found |= errors(head, inputs, by_draws(model, posterior, inputs, draws))
        if kappa == "learned":
            found["learned"] = posterior.history.fit["kappa"]["1"]
        else:
            head = uq.wrap(model, wide, "moments", kappa=kappa, weights="marginal")
            others = {"NLL": nll_of(head, test)} | errors(head, inputs, of_wide)
            found |= {f"wide: {name}": value for name, value in others.items()}
        yield str(kappa), found


def nll_of(head: MomentsPredictor, test: Labelled) -> float:
    """Of the test targets, in nats."""
    return prediction_scores(predicted(head, test.inputs), test)["NLL"]


def rows_of(pairs: Sequence[Pair], seeds: Sequence[int], steps: int, draws: int) -> list[dict[str, str]]:
    """Means and standard deviations over the seeds."""
    rows: list[dict[str, str]] = []
    for pair in pairs:
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for seed in seeds:
            for kappa, numbers in measured(pair, seed, steps, draws):
                print(
                    pair.name,
                    seed,
                    kappa,
                    {name: round(value, 4) for name, value in numbers.items()},
                    flush=True,
                )
                for name, value in numbers.items():
                    found[kappa][name].append(value)
        names = dict.fromkeys(name for numbers in found.values() for name in numbers if name != "learned")
        for kappa, numbers in found.items():
            shown = (
                f"learned: {spread(numbers['learned'], '.2f')}" if kappa == "learned" else f"{float(kappa):g}"
            )
            rows.append(
                {"network": pair.name, "kappa": shown}
                | {name: spread(numbers[name], ".4f") if numbers[name] else "" for name in names}
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of the weights")
    parser.add_argument(
        "--output", type=output_folder, default=OUTPUT, help="folder for networks and the table"
    )
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    pairs = PAIRS
    if options.smoke:
        options.seeds, options.steps, options.draws = [0], 5, 20
        pairs = (Pair("mlp relu 8", "iris", False, 20), Pair("mlp tanh 8", "boston", False, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = rows_of(pairs, options.seeds, options.steps, options.draws)
    path: Path = options.output / "utvi_kappa.csv"
    write_csv(path, rows)
    print(markdown(rows), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
