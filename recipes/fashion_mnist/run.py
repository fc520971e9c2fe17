"""FashionMNIST against MNIST digits: one trained CNN, every posterior, every head, in one table.

    python -m recipes.fashion_mnist.run --seeds 0 1 2       # as the README shows it; some hours on two cores
    python -m recipes.fashion_mnist.run --smoke             # a minute, for checking that it runs

Writes ``results-*.json`` and ``table.md`` into a folder of these settings in the output folder; networks and posteriors
are kept there too, and a second run goes on from them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from posthoc_uq import ClassPrediction
from posthoc_uq.evaluation.measurements import foreignness
from posthoc_uq.evaluation.metrics import joint_tail, ood_auroc, risk_coverage
from recipes.common import (
    Row,
    by_row,
    looked_at,
    markdown,
    matching,
    parsed,
    parser,
    put,
    report,
    spread,
)
from recipes.fashion_mnist import methods
from recipes.fashion_mnist.data import Data, Labelled, add_options, load
from recipes.fashion_mnist.drawn import swag
from recipes.fashion_mnist.network import check_kept, cnn, trained, trained_on
from recipes.fashion_mnist.variational import TRAINED

BOTH = {"entropy", "novelty"}
"""Scores that are also judged together: an input counts by the smaller of its tail probabilities on held-out images."""


ORDER = (
    *(
        "plain",
        "temperature",
        "diag",
        "KFAC",
        "EFB",
        "INF",
        "trained on",
        "function space",
        "message passing",
    ),
    *("latent binary", "UTVI", "dropout draws", "SWA-Gaussian", "deep ensemble"),
)
"""Beginnings of the rows' names, as they stand in the table."""
SCORES = ("entropy", "mutual_information", "epistemic_variance", "novelty", "both")


def main(arguments: Sequence[str] | None = None) -> None:
    """Every seed, then the table of all results in the output folder."""
    command = parser(__doc__, "fashion_mnist", "few images, a smaller network, one epoch, one posterior")
    add_options(command)
    add, names = command.add_argument, list(methods.POSTERIORS)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one network each")
    add(
        "--members", type=int, default=5, help="of the deep ensemble: seeds from this one on; 0 leaves it out"
    )
    add("--rows", nargs="+", help="patterns of the rows to measure, such as 'INF*'; default: all")
    add("--posteriors", nargs="+", default=names, choices=names)
    add("--variational-epochs", type=int, default=5, help="of trained posteriors and the control; 0: none")
    add("--epochs", type=int, default=15, help="of the networks")
    add("--filters", type=int, default=32, help="of their first convolution; the second has twice as many")
    add("--learning-rate", type=float, default=0.01)
    add("--tuned-on", type=int, default=2000, help="held-out images for every `uq.tune` and the tails")
    add("--dropout-rates", type=float, nargs="+", default=[0.1], help="held-out images choose one")
    add("--swag-rates", type=float, nargs="+", default=[0.01], help="of SGD, likewise")
    add("--swag-epochs", type=int, default=3, help="of SGD at a constant rate")
    smoke = {"seeds": [0], "members": 2, "epochs": 1, "tuned_on": 40, "posteriors": names[-1:]}
    smoke |= {"filters": 16, "dropout_rates": [0.1, 0.5], "swag_epochs": 1}
    options = parsed(command, arguments, **smoke, variational_epochs=1)
    with looked_at():
        data = load(options.data, download=options.download)
    if options.smoke:
        data = data.first(140, 40, 40, 40)
    # what belongs to other settings is never mixed in
    settings = [len(data.train.labels), options.epochs, f"{options.learning_rate:g}"]
    settings += [] if options.filters == 32 else [options.filters]
    folder = options.output / "-".join(map(str, settings))
    paths = {seed: folder / f"results-{options.tuned_on}-seed{seed}.json" for seed in options.seeds}
    with looked_at():
        matching(
            rows_of(cnn(options.filters), data, 0, folder, data.validation, options), options.rows or ["*"]
        )
        ahead = {seed + member for seed in options.seeds for member in range(max(1, options.members))}
        check_kept(folder, ahead, options.filters)
        for path in paths.values():
            found_in(path)
    for seed, path in paths.items():
        one_seed(data, seed, folder, path, options)
        print(f"seed {seed} is done", flush=True)
    results = [json.loads(path.read_text()) for path in paths.values()]
    options.output = folder
    report(options, "table", page_of(results), results)


def page_of(results: Sequence[Mapping[str, Row]]) -> str:
    """Mean ± standard deviation over seeds, one row a method; those of one posterior stay as they were measured."""

    def place(name: str) -> int:
        return next((i for i, start in enumerate(ORDER) if name.startswith(start)), len(ORDER))

    rows = by_row(results)
    header = ["method", "accuracy", "NLL", "ECE", *(f"AUROC, {s.replace('_', ' ')}" for s in SCORES)]
    lines = [[*header, "entropy of digits", "time", "MB", "seeds"]]
    for name in sorted(rows, key=place):
        found = rows[name]
        cells = [spread([100 * one["accuracy"] for one in found], ".2f")]
        cells += [spread([one[column] for one in found], ".4f") for column in ("nll", "ece")]
        cells += [spread([one["auroc"][s] for one in found if s in one["auroc"]], ".4f") for s in SCORES]
        cells.append(spread([one["entropy"]["digits"]["mean"] for one in found if "entropy" in one]))
        means = [mean(one["time"] for one in found), mean(one["bytes"] for one in found) / 1e6]
        lines.append([name, *cells, *(f"{value:.1f}" for value in means), str(len(found))])
    return markdown(lines)


def one_seed(data: Data, seed: int, folder: Path, path: Path, options: argparse.Namespace) -> None:
    """Measure what is not yet in the file of results, which has every row as soon as it is there."""
    results = found_in(path)
    held_out = data.validation.first(options.tuned_on)
    model = network_of(data, seed, folder, options)
    plain, rows = methods.plain(model), rows_of(model, data, seed, folder, held_out, options)
    for name in matching(rows, options.rows or ["*"]):
        if name not in results:
            results[name] = measured(rows[name](), data, held_out, plain)
            put(path, json.dumps(results, indent=1) + "\n")
            print(f"seed {seed}, {name}: {shown(results[name])}", flush=True)


def found_in(path: Path) -> dict[str, dict[str, Any]]:
    """The rows that an earlier run has left in a file of results.

    Raises:
        ValueError: it is no such file.
    """
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"'{path}' is no file of results ({error}); delete it to begin anew.") from None


def network_of(
    data: Data, seed: int, folder: Path, options: argparse.Namespace, dropout: float = 0.0
) -> torch.nn.Sequential:
    """The network of a seed, trained or kept."""
    return trained(data.train, seed, folder, options.epochs, options.learning_rate, options.filters, dropout)


def rows_of(
    model: torch.nn.Sequential,
    data: Data,
    seed: int,
    folder: Path,
    held_out: Labelled,
    options: argparse.Namespace,
) -> methods.Rows:
    """All rows by name, in the order in which they are measured."""

    def control() -> torch.nn.Module:
        path = folder / f"trained-on-{epochs}-seed{seed}.pt"
        return trained_on(model, data.train, path, seed, epochs)

    def dropout(rate: float) -> methods.Method:
        return methods.dropout_draws(network_of(data, seed, folder, options, rate), rate)

    def swag_of(rate: float) -> methods.Method:
        path = folder / f"swag-{options.swag_epochs}-{rate:g}-seed{seed}.pt"
        found = swag(model, data.train, path, seed, options.swag_epochs, rate)
        return methods.swag_draws(model, found, path, rate)

    epochs = options.variational_epochs
    rows: methods.Rows = {
        "plain": lambda: methods.plain(model),
        "temperature scaling": lambda: methods.temperature_scaling(model, held_out),
    }
    for name in options.posteriors:
        rows |= methods.posterior_rows(model, data, folder, name, held_out, seed)
    if epochs:
        rows |= methods.function_space_rows(model, data, folder, held_out, seed, epochs)
        for name in TRAINED:
            rows |= methods.trained_rows(model, data, folder, name, held_out, seed, epochs)
        rows |= {
            methods.CONTROL: lambda: methods.plain(control()),
            f"{methods.CONTROL}, temperature scaling": lambda: methods.temperature_scaling(
                control(), held_out
            ),
        }
    rows |= {
        "dropout draws": lambda: methods.best(
            {rate: dropout(rate) for rate in options.dropout_rates}, held_out
        ),
        "SWA-Gaussian": lambda: methods.best({rate: swag_of(rate) for rate in options.swag_rates}, held_out),
    }
    if options.members:
        numbers = range(seed, seed + options.members)
        rows[f"deep ensemble of {options.members}"] = lambda: methods.deep_ensemble(
            [network_of(data, i, folder, options) for i in numbers]
        )
    return rows


@torch.no_grad()
def measured(method: methods.Method, data: Data, held_out: Labelled, plain: methods.Method) -> dict[str, Any]:
    """Quality on the test images, AUROC against the digits by every score and by entropy and novelty together, cost and
    size.
    """
    test, digits = method.predict(data.test.images), method.predict(data.digits)
    found: dict[str, Any] = test.quality(data.test.labels, bins=15)
    found["auroc"] = {score: values["auroc"] for score, values in foreignness(test, digits).items()}
    inside, outside = test.scores(), digits.scores()
    if inside.keys() >= BOTH:
        known = method.predict(held_out.images).scores()
        familiar = {name: known[name] for name in BOTH}
        tails = [joint_tail(familiar, {name: scores[name] for name in BOTH}) for scores in (inside, outside)]
        found["auroc"]["both"] = ood_auroc(*tails)
    found["entropy"] = {
        "test": normalised(inside["entropy"], test),
        "digits": normalised(outside["entropy"], digits),
    }
    wrong = (test.predicted() != data.test.labels).double()
    found["aurc"] = risk_coverage(inside["entropy"], wrong).area
    found["time"] = relative_time(method, plain, data.test.images[:200])
    return found | {"bytes": method.size, "settings": method.settings}


def normalised(entropy: torch.Tensor, prediction: ClassPrediction) -> dict[str, float]:
    """Mean and standard deviation over images of the entropy's share of the largest possible one, as in table 2 of Lee
    et al. (2020).
    """
    share = entropy.double() / math.log(prediction.classes)
    return {"mean": float(share.mean()), "deviation": float(share.std())}


def relative_time(
    method: methods.Method, plain: methods.Method, images: torch.Tensor, repeats: int = 3
) -> float:
    """Time per image over that of the plain network: the median of interleaved runs."""
    ratios: list[float] = []
    for _ in range(repeats):
        images = images.clone()  # what was predicted before is not kept for it
        start = time.perf_counter()
        plain.predict(images)
        middle = time.perf_counter()
        method.predict(images)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return sorted(ratios)[repeats // 2]


def shown(result: dict[str, Any]) -> str:
    """A line for the terminal."""
    scores = ", ".join(f"{name} {value:.3f}" for name, value in result["auroc"].items())
    return (
        f"accuracy {result['accuracy']:.4f}, NLL {result['nll']:.4f}, ECE {result['ece']:.4f}, AUROC: {scores}, "
        f"time {result['time']:.1f}"
    )


if __name__ == "__main__":
    main()
