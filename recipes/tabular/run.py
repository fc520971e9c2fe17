"""Counts, several labels and values of a table: which likelihood, and what the posterior adds to it.

python recipes/tabular/run.py                      three tables of the R package modeldata, three splits; minutes
python recipes/tabular/run.py --data x/modeldata/data   where that package's data base is
python recipes/tabular/run.py --smoke              made tables, one split; seconds
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from networks import NegativeBinomialLoss, network, own_noise_loss, poisson_loss, shaped, trained
from tables import KINDS, MODELDATA, Rows, Split, load, made, split
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc, rmse

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked, stamped

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "tabular"
LEVEL = 0.9
FIFTHS = 5
Numbers = dict[str, float]


class Fitted(NamedTuple):
    """A trained network with the likelihood that it was trained with."""

    model: nn.Sequential
    likelihood: uq.Likelihood


def poisson(part: Split, epochs: int, seed: int) -> Fitted:
    """Counts whose variance is their mean."""
    model = network(part.train.inputs.shape[1], 1, seed)
    return Fitted(trained(model, poisson_loss, part.train, part.held_out, epochs, seed), uq.Poisson())


def negative_binomial(part: Split, epochs: int, seed: int) -> Fitted:
    """Counts whose variance is larger; the dispersion is trained."""
    model, loss = network(part.train.inputs.shape[1], 1, seed), NegativeBinomialLoss()
    trained(model, loss, part.train, part.held_out, epochs, seed)
    return Fitted(model, uq.NegativeBinomial(float(loss.log_dispersion.exp())))


def multilabel(part: Split, epochs: int, seed: int) -> Fitted:
    """A logit for each label."""
    model = network(part.train.inputs.shape[1], part.train.targets.shape[1], seed)
    loss = nn.functional.binary_cross_entropy_with_logits
    return Fitted(trained(model, loss, part.train, part.held_out, epochs, seed), uq.Multilabel())


def constant_noise(part: Split, epochs: int, seed: int) -> Fitted:
    """Values with one noise variance, that of the held-out residuals."""
    model = network(part.train.inputs.shape[1], 1, seed)
    trained(model, nn.functional.mse_loss, part.train, part.held_out, epochs, seed)
    with torch.no_grad():
        residuals = model(part.held_out.inputs) - shaped(part.held_out.targets)
    return Fitted(model, uq.Gaussian(float(residuals.square().mean())))


def own_noise(part: Split, epochs: int, seed: int) -> Fitted:
    """Values with a noise of each row."""
    model = network(part.train.inputs.shape[1], 2, seed)
    return Fitted(
        trained(model, own_noise_loss, part.train, part.held_out, epochs, seed), uq.Heteroscedastic()
    )


TRAININGS: dict[str, dict[str, Callable[[Split, int, int], Fitted]]] = {
    "counts": {"Poisson": poisson, "negative binomial": negative_binomial},
    "labels": {"multilabel": multilabel},
    "values": {"constant noise": constant_noise, "heteroscedastic": own_noise},
}


def loader(rows: Rows, size: int = 512) -> list[tuple[Tensor, Tensor]]:
    """Batches of a table."""
    targets = shaped(rows.targets)
    return list(zip(rows.inputs.split(size), targets.split(size), strict=True))


def alone(fitted: Fitted, inputs: Tensor) -> uq.Prediction:
    """What the network says without a posterior."""
    with torch.no_grad():
        outputs = fitted.model(inputs).unsqueeze(0)
    return fitted.likelihood.from_draws(outputs).of_one_network()


def compared(part: Split, name: str, fitted: Fitted) -> dict[str, Numbers]:
    """The network alone and INF on all layers, as it is fitted and as held-out rows tune it."""
    found = {f"{name}, network alone": measured(part, lambda x: alone(fitted, x))}
    start = time.perf_counter()
    posterior = uq.fit(fitted.model, loader(part.train), likelihood=fitted.likelihood, progress=False)
    seconds = time.perf_counter() - start
    found[f"{name}, INF"] = measured(part, uq.wrap(fitted.model, posterior)) | {"seconds": seconds}
    uq.tune(posterior, loader(part.held_out), progress=False)
    found[f"{name}, INF tuned"] = measured(part, uq.wrap(fitted.model, posterior))
    if isinstance(fitted.likelihood, uq.NegativeBinomial):
        for numbers in found.values():
            numbers["dispersion"] = fitted.likelihood.dispersion
    return found


def measured(part: Split, predict: Callable[[Tensor], uq.Prediction]) -> Numbers:
    """How good predictions of the test rows are, and how well they tell foreign rows."""
    prediction, targets = predict(part.test.inputs), shaped(part.test.targets)
    numbers = {"NLL": -float(prediction.log_prob(targets).double().mean())}
    if part.names:
        quality = prediction.quality(targets)
        numbers |= {name: quality[name] for name in ("ECE", "mAP")}
    else:
        values: Any = prediction
        numbers |= {"RMSE": rmse(values.mean.reshape(targets.shape), targets), **coverage(values, targets)}
    if prediction.novelty_ratio is not None:
        for name, inputs in part.foreign.items():
            other = predict(inputs)
            numbers[f"AUROC, {name}"] = ood_auroc(prediction.novelty(), other.novelty())
    return numbers


def coverage(values: Any, targets: Tensor) -> Numbers:
    """The share of targets in their 90 % intervals, of all rows and by fifths of the predicted mean; the mean width of
    the intervals.
    """
    lower, upper = (bound.reshape(len(targets)) for bound in values.interval(LEVEL))
    inside = ((targets.flatten() >= lower) & (targets.flatten() <= upper)).double()
    order = values.mean.reshape(len(targets)).argsort(stable=True)
    fifths = [float(inside[rows].mean()) for rows in order.tensor_split(FIFTHS)]
    numbers = {"coverage": float(inside.mean()), "width": float((upper - lower).double().mean())}
    return numbers | {f"coverage, fifth {i + 1}": share for i, share in enumerate(fifths)}


def run(options: argparse.Namespace) -> dict[str, dict[str, list[Numbers]]]:
    """Every table, likelihood and split: kind, row, and the numbers of each split."""
    found: dict[str, dict[str, list[Numbers]]] = {}
    for kind in KINDS:
        table = made(kind, options.rows) if options.smoke else load(kind, options.data)
        rows: dict[str, list[Numbers]] = found.setdefault(kind, {})
        for seed in range(options.splits):
            part = split(table, seed)
            for name, training in TRAININGS[kind].items():
                fitted = training(part, options.epochs, seed)
                for row, numbers in compared(part, name, fitted).items():
                    rows.setdefault(row, []).append(numbers)
            print(f"{kind}, split {seed + 1} of {options.splits}", file=sys.stderr, flush=True)
    return found


def shown(found: Mapping[str, Mapping[str, list[Numbers]]]) -> str:
    """A table for each kind of target, mean ± standard error over the splits."""
    pages: list[str] = []
    for kind, rows in found.items():
        columns = list(dict.fromkeys(name for numbers in rows.values() for name in numbers[0]))
        columns = [name for name in columns if ", fifth" not in name and name != "seconds"]
        lines = [f"| {kind} | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
        for row, splits in rows.items():
            cells = [_cell([numbers[name] for numbers in splits if name in numbers]) for name in columns]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
        pages.append("\n".join(lines))
    return "\n\n".join(pages)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    tensor = torch.tensor(values, dtype=torch.float64)
    error = f" ± {float(tensor.std() / len(values) ** 0.5):.3f}" if len(values) > 1 else ""
    return f"{float(tensor.mean()):.3f}{error}"


def figure(found: Mapping[str, Mapping[str, list[Numbers]]], smoke: bool) -> Figure:
    """Coverage of the 90 % intervals by fifths of the predicted mean, of counts and of values."""
    page = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(page)
    for axes, kind in zip(page.subplots(1, 2, sharey=True), ("counts", "values"), strict=True):
        for row, splits in found[kind].items():
            if not row.endswith("INF"):
                continue
            shares = [
                sum(numbers[f"coverage, fifth {i + 1}"] for numbers in splits) / len(splits)
                for i in range(FIFTHS)
            ]
            axes.plot(range(1, FIFTHS + 1), shares, marker="o", label=row)
        axes.axhline(LEVEL, color="grey", linestyle=":")
        axes.set(title=kind, xlabel="fifth of the rows by predicted mean", xticks=range(1, FIFTHS + 1))
        axes.legend()
    page.axes[0].set_ylabel("share of targets in their 90 % interval")
    return stamped(page, smoke)


def main() -> None:
    """Run it, print the tables, write them with the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=MODELDATA, help="modeldata's folder data")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rows", type=int, default=250, help="of the made tables of --smoke")
    parser.add_argument("--smoke", action="store_true", help="made tables, one split, few epochs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if options.smoke:
        options.splits, options.epochs = 1, 5
    warnings.filterwarnings("ignore", category=UserWarning)  # of the prior, which is tuned here anyway
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    found = run(options)
    text = marked(shown(found), options.smoke)
    print(text)
    (options.output / "tabular.md").write_text(text + "\n")
    (options.output / "tabular.json").write_text(json.dumps(found, indent=1))
    figure(found, options.smoke).savefig(options.output / "tabular.png", dpi=110)


if __name__ == "__main__":
    main()
