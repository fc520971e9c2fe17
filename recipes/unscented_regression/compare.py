"""Figures 1 and 2 of Schodt (2024): moments in closed form (SMP), by three points (UTVI) and by random draws (MCVI).

The draws are of the weights (section 2.1.1), or of the activations' inputs (section 4.2).

python -m recipes.unscented_regression.compare            five seeds, up to 512 draws; half an hour of a core
python -m recipes.unscented_regression.compare --smoke    one seed, few steps; seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads import MomentsPredictor
from recipes.common import markdown, parsed, parser, report, save_figure
from recipes.unscented_regression.drawn_weights import DrawnWeights, density, train_drawn
from recipes.unscented_regression.problem import EDGE, FreshData, deviation, least_nll, network, sample

SMP, UTVI = "SMP", "UTVI"
DRAWS = (3, 8, 32, 128, 512)
"""Of the weights."""
LOCAL = (3, 32, 128)
"""Draws at every activation, with gradients and without."""
WITHOUT = ", without gradients"
TIMED = 1024
"""Inputs of a batch whose time is taken."""


class Settings(NamedTuple):
    """How a network is trained.

    Attributes:
        epochs: passes, each over new data.
        batches: steps of an epoch.
        size: samples of a step.
        validation: held-out samples that choose the epoch.
    """

    epochs: int = 25
    batches: int = 20
    size: int = 64
    validation: int = 512


Predictor = MomentsPredictor | DrawnWeights


class Trained(NamedTuple):
    """A network with its posterior.

    Attributes:
        predictor: gives the moments of its outputs.
        curve: validation NLL of every epoch.
        seconds: of the training.
    """

    predictor: Predictor
    curve: list[float]
    seconds: float


def by_weights(draws: int) -> str:
    """The name of a method by drawn weights."""
    return f"MCVI, {draws} draws of the weights"


def at_activations(draws: int) -> str:
    """The name of a method by draws at every activation."""
    return f"MCVI, {draws} draws at each activation"


def draws_of(name: str) -> int | None:
    """The number of draws in a method's name."""
    return int(name.split()[1]) if name.startswith("MCVI") else None


def steady(progress: float) -> float:
    """The paper's rates do not fall."""
    return 1.0


def method(name: str, settings: Settings) -> uq.UTVI:
    """The training of section 4.1: from random weights, AdamW at 0.01, the divergence halved every epoch, and the
    propagated variance as the predictive one. A rate of 0.02 for log variances is one of 0.01 for ``rho``, where
    ``sigma = softplus(rho)`` is small; ``rho`` starts at -5.
    """
    return uq.UTVI(
        epochs=settings.epochs,
        start="random",
        objective="predictive",
        noise="none",
        lr=0.01,
        log_variance_lr=0.02,
        schedule=steady,
        clip=None,
        relu="exact" if name == SMP else "unscented",
    )


def train(name: str, seed: int, settings: Settings) -> Trained:
    """One training of a method."""
    draws = draws_of(name)
    if draws is not None and name == by_weights(draws):
        drawn = train_drawn(draws, seed, *settings)
        return Trained(drawn.model, drawn.curve, drawn.seconds)
    model = network(seed, draws, not name.endswith(WITHOUT))
    held_out = sample(settings.validation, torch.Generator().manual_seed(1_000_000))
    begun = time.perf_counter()
    posterior = uq.fit(
        model,
        FreshData(settings.batches, settings.size),
        method(name, settings),
        val_loader=[held_out],
        likelihood="regression",
        noise_variance=1.0,
        seed=seed,
        progress=False,
    )
    seconds = time.perf_counter() - begun
    relu = "exact" if name == SMP else "unscented"
    predictor = uq.wrap(model, posterior, "moments", relu=relu, weights="marginal")
    return Trained(predictor, posterior.history.fit["validation NLL"], seconds)


def moments(predictor: Predictor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the prediction, ``(samples, 1)`` each."""
    with torch.no_grad():
        if isinstance(predictor, DrawnWeights):
            return predictor.moments(x)
        mean, variance, _ = predictor.propagate(x)
    return mean, variance


def nll(predictor: Predictor, data: tuple[Tensor, Tensor]) -> float:
    """Mean negative log density of held-out targets, in nats."""
    if isinstance(predictor, DrawnWeights):
        return density(predictor, data)
    mean, variance = moments(predictor, data[0])
    return -float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(data[1]).mean())


def seconds_of(predictors: dict[str, Predictor], plain: nn.Module, rounds: int) -> dict[str, float]:
    """Least CPU seconds of a batch of 1024 for every method and for the plain network, taken in turns."""
    x, _ = sample(TIMED, torch.Generator().manual_seed(7))
    taken: dict[str, list[float]] = {name: [] for name in ("network", *predictors)}
    for turn in range(rounds + 1):
        for name, times in taken.items():
            begun = time.process_time()
            with torch.no_grad():
                _ = plain(x) if name == "network" else moments(predictors[name], x)
            if turn:  # the first is for warming up
                times.append(time.process_time() - begun)
    return {name: min(times) for name, times in taken.items()}


def run(options: argparse.Namespace) -> None:
    """All trainings, the table, the figures."""
    settings = Settings(options.epochs, options.batches)
    local = [at_activations(count) for count in options.local]
    names = [SMP, UTVI, *local, *(name + WITHOUT for name in local), *map(by_weights, options.draws)]
    test = sample(8192, torch.Generator().manual_seed(2_000_000))
    scores: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    lasting: dict[str, list[float]] = {name: [] for name in names}
    drawn: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    predictors: dict[str, Predictor] = {}
    grid = torch.linspace(-EDGE, EDGE, 401).unsqueeze(1)
    for seed in range(options.seeds):
        for name in names:
            trained = train(name, seed, settings)
            predictors[name] = trained.predictor
            scores[name].append(nll(trained.predictor, test))
            curves[name].append(trained.curve)
            lasting[name].append(trained.seconds)
            drawn[name].append(moments(trained.predictor, grid))
            print(f"seed {seed}, {name}: NLL {scores[name][-1]:.4f}, {trained.seconds:.0f} s", flush=True)
    times = seconds_of(predictors, network(0), options.rounds)
    few = options.draws[0]
    for figure, name in (
        (predictions(grid, drawn, curves, few), "figure1"),
        (costs(scores, times, options.draws, options.local), "figure2"),
    ):
        save_figure(figure, options.output / f"{name}.png", options.smoke)
    lines = [["method", "NLL", "spread over seeds", "time / UTVI", "time / network"]]
    for name, own in scores.items():
        mean, spread = spread_of(own)
        multiples = [f"{times[name] / times[UTVI]:.2f}", f"{times[name] / times['network']:.1f}"]
        lines.append([name, f"{mean:.4f}", f"{spread:.4f}", *multiples])
    lines.append(["the truth", f"{least_nll():.4f}", "", "", ""])
    content = {
        "least NLL": least_nll(),
        "NLL": scores,
        "seconds a batch": times,
        "seconds of training": lasting,
        "validation NLL": curves,
    }
    report(options, "compare", markdown(lines), content)


def predictions(
    grid: Tensor,
    drawn: dict[str, list[tuple[Tensor, Tensor]]],
    curves: dict[str, list[list[float]]],
    few: int,
) -> Figure:
    """Figure 1: predictions of one seed for SMP, MCVI with few draws and UTVI, and the validation NLL."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    panels = figure.subplots(1, 4)
    x = grid.squeeze(1)
    for panel, name in zip(panels, (SMP, by_weights(few), UTVI), strict=False):
        mean, variance = (part.squeeze(1) for part in drawn[name][0])
        spread = variance.sqrt()
        panel.fill_between(x, mean - spread, mean + spread, color="#0072B2", alpha=0.3, linewidth=0)
        panel.plot(x, mean, color="#0072B2", linewidth=1.2, label="mean and 1 sd")
        for sign in (-1, 1):
            edge = x + sign * deviation(x)
            panel.plot(
                x, edge, color="#404040", linestyle="--", linewidth=0.8, label="truth" if sign > 0 else None
            )
        panel.set(title=name, xlabel="x", ylim=(-1.6, 1.6))
    panels[0].set_ylabel("y")
    panels[0].legend(frameon=False, fontsize=8)
    for name, color in ((SMP, "#009E73"), (by_weights(few), "#D55E00"), (UTVI, "#0072B2")):
        mean = torch.tensor(curves[name]).mean(0)
        panels[3].plot(range(1, len(mean) + 1), mean, label=name, color=color)
    panels[3].set(title="validation NLL, mean over seeds", xlabel="epoch", ylabel="nats")
    panels[3].legend(frameon=False, fontsize=8)
    return figure


def costs(
    scores: dict[str, list[float]], times: dict[str, float], draws: list[int], local: list[int]
) -> Figure:
    """Figure 2: NLL and time of a batch by the number of draws."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, color in ((UTVI, "#0072B2"), (SMP, "#009E73")):
        mean, spread = spread_of(scores[name])
        left.axhline(mean, color=color, label=name)
        left.axhspan(mean - spread, mean + spread, color=color, alpha=0.15)
        right.axhline(times[name] / times[UTVI], color=color, label=name)
    kinds = (
        ("draws of the weights", by_weights, draws, "#D55E00"),
        ("at each activation", at_activations, local, "#CC79A7"),
        ("the same" + WITHOUT, lambda count: at_activations(count) + WITHOUT, local, "#56B4E9"),
    )
    for label, named, counts, color in kinds:
        places, names = [log2(count) for count in counts], [named(count) for count in counts]
        pairs = [spread_of(scores[name]) for name in names]
        left.errorbar(
            places,
            [m for m, _ in pairs],
            [s for _, s in pairs],
            color=color,
            label=f"MCVI, {label}",
            capsize=3,
        )
        right.plot(places, [times[name] / times[UTVI] for name in names], "o-", color=color)
    left.set(xlabel="log2 draws", ylabel="NLL, nats", title="held-out NLL")
    right.set(xlabel="log2 draws", ylabel="multiple of UTVI's", yscale="log", title="time of a batch of 1024")
    left.legend(frameon=False, fontsize=8)
    return figure


def spread_of(scores: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    values = torch.tensor(scores, dtype=torch.float64)
    return float(values.mean()), float(values.std()) if len(scores) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "unscented_regression", "one seed, few steps: seconds")
    add_options(command)
    command.add_argument("--draws", type=int, nargs="+", default=list(DRAWS), help="of MCVI")
    command.add_argument("--local", type=int, nargs="+", default=list(LOCAL), help="draws at each activation")
    command.add_argument("--rounds", type=int, default=10, help="batches that are timed")
    options = parsed(command, arguments, **SMOKE, draws=[3, 8], local=[3])
    torch.set_num_threads(1)
    run(options)


def add_options(command: argparse.ArgumentParser) -> None:
    """Of a training."""
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--epochs", type=int, default=Settings().epochs)
    command.add_argument("--batches", type=int, default=Settings().batches, help="steps of an epoch")


SMOKE = {"seeds": 1, "epochs": 2, "batches": 3, "rounds": 2}

if __name__ == "__main__":
    main()
