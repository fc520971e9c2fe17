"""How many samples the bases of INF need: predictions with bases of some of the data, against those of all.

Networks are trained on FashionMNIST, and INF is fitted on the same images with one drawn label each, its bases from
500 of them to all. Eigenvalues and diagonal come from all images in every row. Two precisions of the prior: that of
the defaults, and that of the evidence, which leaves more uncertainty. Measured on test images: the mean divergence of
the predictions from those with bases of all images, in nats, NLL, and the AUROC of mutual information on handwritten
digits as foreign images. The row "other labels" has bases of all images and other drawn labels: what any fit is
uncertain by.

    python benchmarks/basis_samples.py                 the networks that chose the number; half an hour on one core
    python benchmarks/basis_samples.py --reported      networks that did not
    python benchmarks/basis_samples.py --smoke         small digits, a few counts; seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import machine, table, write_json
from _foreign import foreign_pictures
from _scored import predicted, prediction_scores
from _zoo import Pair, loader, trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc

CHOOSING = (
    Pair("lenet", "fashion", True, 1200, train=20_000),
    Pair("mlp relu 128 128", "fashion", True, 1200, train=20_000),
)
REPORTED = (
    Pair("recipe cnn", "fashion", False, 1200, train=20_000),
    Pair("resnet", "fashion", False, 800, train=20_000),
)
SMOKE = (Pair("mlp relu", "digits", True, 200),)
COUNTS = (500, 1_000, 2_000, 5_000, 10_000)
PRIORS = ("faithful", "evidence")


def rows_of(pair: Pair, counts: Sequence[int], priors: Sequence[str], tested: int) -> list[dict[str, Any]]:
    """One line for each prior and number of samples."""
    model, split = trained(pair, 0), pair.split(0)
    test = split.test.first(tested)
    foreign = None if test.inputs.ndim < 4 else foreign_pictures(pair.data, tested)["other"]
    samples = len(split.train.targets)
    rows: list[dict[str, Any]] = []
    for prior in priors:
        whole: Tensor | None = None
        ways = [("all", {}), ("other labels", {"seed": 1})]
        ways += [(str(count), {"basis_fraction": count / samples}) for count in counts if count < samples]
        for name, options in ways:
            posterior = fitted(model, loader(split.train), prior, {"basis_fraction": 1.0, **options})
            predictor = uq.wrap(model, posterior)
            prediction = predicted(predictor, test.inputs)
            log_probs = prediction.probs.double().log()
            whole = log_probs if whole is None else whole
            line: dict[str, Any] = {"network": pair.name, "prior": prior, "bases from": name}
            line["divergence from all"] = float((whole.exp() * (whole - log_probs)).sum(-1).mean())
            line["NLL"] = prediction_scores(prediction, test)["NLL"]
            if foreign is not None:
                outside = predicted(predictor, foreign)
                line["AUROC"] = ood_auroc(prediction.mutual_information(), outside.mutual_information())
            rows.append(line)
            print(line, flush=True)
    return rows


def fitted(model: nn.Module, data: Any, prior: str, options: dict[str, Any]) -> uq.Posterior:
    """INF with one drawn label an image."""
    return uq.fit(model, data, method="inf", fisher="mc", prior_precision=prior, progress=False, **options)


def smoke() -> list[dict[str, Any]]:
    """A perceptron on small digits."""
    return [line for pair in SMOKE for line in rows_of(pair, (200, 500), ("evidence",), 200)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reported", action="store_true", help="the networks that did not choose")
    parser.add_argument("--smoke", action="store_true", help="a perceptron on small digits")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    if options.smoke:
        rows = smoke()
    else:
        pairs = REPORTED if options.reported else CHOOSING
        rows = [line for pair in pairs for line in rows_of(pair, COUNTS, PRIORS, 1000)]
    print(table(rows, 6))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
