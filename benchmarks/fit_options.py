"""What an option of a fit does to predictions.

    OMP_NUM_THREADS=1 python benchmarks/fit_options.py everything            half an hour; docs/tables/everything.csv
    OMP_NUM_THREADS=1 python benchmarks/fit_options.py bases                 an hour; docs/tables/bases.csv
    OMP_NUM_THREADS=1 python benchmarks/fit_options.py bases-evidence        the same at the prior of the evidence
    OMP_NUM_THREADS=1 python benchmarks/fit_options.py everything --smoke    one small network, for the tests

Networks of ``benchmarks/_zoo.py``, fitted by default and with the option: ``everything`` is a posterior over the scales
of normalisations and over embeddings, too, of the networks that have such weights; ``bases`` takes INF's bases from a
share of the samples. NLL and calibration error on test inputs, on the same with noise of 0.7 standard deviations (of
numbers, not of words), how well the predictive entropy tells the two apart, the share of the weights that is covered,
the prior precision's logarithm to the base 10, and the fit's processor seconds.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from math import log10
from statistics import mean
from typing import Any

import torch
from _harness import output_file, single_threaded, write_csv
from _sets import Split
from _zoo import CLASSIFIERS, Pair, loader, trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc

SCALED = ("layer", "batch", "resnet", "vit", "encoder", "bert")
"""Kinds of networks with normalisations or embeddings."""

STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "everything": {"default": {}, "everything": {"layers": "everything"}},
    "bases": {"all": {"basis_fraction": 1.0}, **{str(s): {"basis_fraction": s} for s in (0.5, 0.25, 0.1)}},
    "bases-evidence": {
        name: {"basis_fraction": share, "prior_precision": "evidence"}
        for name, share in (("all", 1.0), ("0.1", 0.1))
    },
}
"""Options of `uq.fit` by the name of their row."""

TESTED = 500
COLUMNS = (
    *("covered", "NLL", "ECE", "NLL, noise", "ECE, noise", "AUROC of noise"),
    *("log10 prior precision", "seconds"),
)


def measured(model: nn.Module, split: Split, options: dict[str, Any]) -> dict[str, float]:
    """One row of one network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        posterior = uq.fit(model, loader(split.train), "inf", progress=False, **options)
        seconds = time.process_time() - began
    x, y = split.test.inputs[:TESTED], split.test.targets[:TESTED]
    predictor = uq.wrap(model, posterior)

    def predicted(inputs: Tensor) -> Any:
        batches = inputs.split(100)
        with torch.no_grad():
            return predictor.predict([(part,) for part in batches], progress=False)

    def quality(prediction: Any, ending: str) -> dict[str, float]:
        found = prediction.quality(y)
        return {f"NLL{ending}": found["nll"], f"ECE{ending}": found["ece"]}

    covered = sum(value.numel() for value in posterior.mean.values())
    familiar = predicted(x)
    row = {"covered": covered / sum(p.numel() for p in model.parameters()), "seconds": seconds}
    row |= {"log10 prior precision": log10(posterior.prior_precision)} | quality(familiar, "")
    if x.is_floating_point():
        deviation = split.train.inputs.std(0)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        shifted = predicted(x + 0.7 * deviation * noise)
        row |= quality(shifted, ", noise")
        row["AUROC of noise"] = ood_auroc(familiar.entropy(), shifted.entropy())
    return row


def rows(
    pairs: Sequence[Pair], seeds: Sequence[int], study: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All rows of every network."""
    for pair in pairs:
        for seed in seeds:
            try:
                model, split = trained(pair, seed), pair.split(seed)
            except ImportError as error:
                print(f"{pair.name} is left out because {error.name} is not installed")
                break
            for name, options in study.items():
                row = measured(model, split, pair.options | options)
                print(pair.name, seed, name, {key: round(value, 4) for key, value in row.items()}, flush=True)
                yield {"network": pair.name, "chooses": pair.chooses, "seed": seed, "option": name} | row


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the pairs to be run")
    parser.add_argument("--csv", type=output_file)
    parser.add_argument("--smoke", action="store_true", help="one small network")
    options = parser.parse_args(arguments)
    study, pairs = STUDIES[options.study], list(CLASSIFIERS)
    if options.study == "everything":
        pairs = [pair for pair in pairs if any(kind in pair.kind.split() for kind in SCALED)]
    if options.smoke:
        pairs, options.seeds = [pair for pair in pairs if pair.name.startswith("iris")], [0]
    if options.pairs:
        pairs = [pair for pair in pairs if any(text in pair.name for text in options.pairs)]
    with single_threaded():
        found = list(rows(pairs, options.seeds, study))
    print(f"\n| networks | option | {' | '.join(COLUMNS)} |\n{'| --- ' * (len(COLUMNS) + 2)}|")
    for title, choose in (("choosing", True), ("reported", False)):
        for name in study:
            own = [row for row in found if row["chooses"] is choose and row["option"] == name]
            cells = [[row[column] for row in own if column in row] for column in COLUMNS]
            print(f"| {title} | {name} | {' | '.join(f'{mean(c):.3f}' if c else '-' for c in cells)} |")
    if options.csv is not None:
        write_csv(options.csv, found, ".4g")


if __name__ == "__main__":
    main()
