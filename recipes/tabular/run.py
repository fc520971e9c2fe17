"""Counts, several labels and values of a table: which likelihood, and what the posterior adds to it.

python -m recipes.tabular.run                      three tables of the R package modeldata, three splits; minutes
python -m recipes.tabular.run --data x/modeldata/data   where that package's data base is
python -m recipes.tabular.run --smoke              made tables, one split; seconds
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation import title_of
from posthoc_uq.evaluation.metrics import ood_auroc, rmse
from recipes.common import (
    existing,
    in_order,
    in_random_order,
    looked_at,
    parsed,
    parser,
    report,
    save_figure,
    table,
    train,
)
from recipes.tabular.tables import KINDS, MODELDATA, Rows, Split, load, made, split

HIDDEN = 64
LEVEL = 0.9
FIFTHS = 5
Numbers = dict[str, float]


def network(columns: int, outputs: int, seed: int) -> nn.Sequential:
    """Two hidden layers of 64 units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(columns, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, outputs),
        )


Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean negative log-likelihood of targets (rows, outputs) given outputs."""


def poisson_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of counts by the logarithms of rates."""
    return F.poisson_nll_loss(outputs, targets, log_input=True, full=False)


class NegativeBinomialLoss(nn.Module):
    """Of counts by the logarithms of means, with a dispersion that is trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.log_dispersion = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        law = torch.distributions.NegativeBinomial(
            (-self.log_dispersion).exp(), logits=outputs + self.log_dispersion, validate_args=False
        )
        return -law.log_prob(targets).mean()


def own_noise_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of values by their means and the logarithms of their noise variances."""
    mean, log_variance = outputs.chunk(2, dim=1)
    return 0.5 * (log_variance + (targets - mean).square() * (-log_variance).exp()).mean()


def trained(
    model: nn.Sequential, loss: Loss, part: Rows, held_out: Rows, epochs: int, seed: int, batch: int = 128
) -> nn.Sequential:
    """Train by AdamW; the weights of the epoch with the best loss on the held-out rows stay, and of a loss with
    parameters those, too.
    """
    extra = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    optimiser = torch.optim.AdamW(
        [{"params": list(model.parameters()), "weight_decay": 1e-2}, {"params": extra, "weight_decay": 0.0}],
        lr=2e-3,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    best, kept = float("inf"), [copy.deepcopy(part.state_dict()) for part in parts]
    for _ in range(epochs):
        epoch = in_random_order(part.inputs, shaped(part.targets), batch, generator)
        train(model, epoch, loss, optimiser)
        schedule.step()
        with torch.no_grad():
            value = float(loss(model(held_out.inputs), shaped(held_out.targets)))
        if value < best:
            best, kept = value, [copy.deepcopy(part.state_dict()) for part in parts]
    for part, state in zip(parts, kept, strict=True):
        part.load_state_dict(state)
    return model.eval()


def shaped(targets: Tensor) -> Tensor:
    """Targets as (rows, outputs)."""
    return targets.reshape(len(targets), -1)


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


def loader(rows: Rows) -> list[tuple[Tensor, Tensor]]:
    """Batches of a table."""
    return in_order(rows.inputs, shaped(rows.targets), 512)


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
    tuned = uq.tune(posterior, loader(part.held_out), progress=False)
    found[f"{name}, INF tuned"] = measured(part, uq.wrap(fitted.model, tuned))
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
        numbers |= {title_of(name): quality[name] for name in ("ece", "mean_average_precision")}
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
    with looked_at():
        tables = {
            kind: made(kind, options.rows) if options.smoke else load(kind, options.data) for kind in KINDS
        }
    for kind, data in tables.items():
        rows: dict[str, list[Numbers]] = found.setdefault(kind, {})
        for seed in range(options.splits):
            part = split(data, seed)
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
        columns = dict.fromkeys(name for numbers in rows.values() for name in numbers[0])
        columns = [name for name in columns if ", fifth" not in name and name != "seconds"]
        pages.append(table(rows, columns=columns, corner=kind, error=True))
    return "\n\n".join(pages)


def figure(found: Mapping[str, Mapping[str, list[Numbers]]]) -> Figure:
    """Coverage of the 90 % intervals by fifths of the predicted mean, of counts and of values."""
    page = Figure(figsize=(10, 4), layout="constrained")
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
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print the tables, write them with the figure."""
    command = parser(__doc__, "tabular", "made tables, one split, few epochs")
    command.add_argument("--data", type=existing, default=MODELDATA, help="modeldata's folder data")
    command.add_argument("--splits", type=int, default=3)
    command.add_argument("--epochs", type=int, default=30)
    command.add_argument("--rows", type=int, default=250, help="of the made tables of --smoke")
    options = parsed(command, arguments, splits=1, epochs=5)
    warnings.filterwarnings("ignore", category=UserWarning)  # of the prior, which is tuned here anyway
    torch.set_num_threads(1)
    found = run(options)
    save_figure(figure(found), options.output / "tabular.png", options.smoke)
    report(options, "tabular", shown(found), found)


if __name__ == "__main__":
    main()
