"""Noisy sines: how deep a network message passing can train, and how often its intervals cover the truth.

    python -m recipes.message_passing.sine                     # both studies; up to two hours of one core
    python -m recipes.message_passing.sine --studies depth     # one of them
    python -m recipes.message_passing.sine --smoke             # seconds

The paper's section 5.1 and appendix C: 200 points of ``0.5 x + 0.2 sin(2 pi x) + 0.3 sin(4 pi x)`` with noise 0.05,
leaky ReLUs of slope 0.1, all points in one batch, one example at a time, 500 iterations. Networks differ in the means
of their priors alone, and are trained side by side. Writes tables, a picture and JSON to the output folder.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from posthoc_uq.layers import Geometry, describe
from posthoc_uq.trained.message_passing.messages import Message, Regression, from_moments
from posthoc_uq.trained.message_passing.network import Activation, Stages, Weighted, outputs_of
from posthoc_uq.trained.message_passing.train import (
    BIAS_VARIANCE,
    Trainer,
    drawn_means,
    weight_variance,
)
from recipes.common import parsed, parser, report, save_figure, table

NOISE = 0.05
BOUNDS = {"1 sigma": (0.16, 0.84), "2 sigma": (0.025, 0.975), "3 sigma": (0.0015, 0.9985)}
"""Of the predictive distribution function at the truth."""


def truth(x: Tensor) -> Tensor:
    """The curve."""
    return 0.5 * x + 0.2 * (2 * math.pi * x).sin() + 0.3 * (4 * math.pi * x).sin()


def sampled(low: float, high: float, seed: int, count: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``(count, 1)``, float64."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = low + (high - low) * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return x, truth(x) + NOISE * torch.randn(count, 1, generator=generator, dtype=torch.float64)


class Networks(NamedTuple):
    """Networks of one shape, with the posterior of their weights."""

    stages: Stages
    posterior: dict[int, Message]

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a new observation, ``(networks, points)``."""
        mean, variance = outputs_of(self.stages, self.posterior, x)
        return mean[..., 0], (variance[..., 0] + NOISE**2).sqrt()


def trained(
    widths: list[int],
    networks: int,
    data: tuple[Tensor, Tensor],
    iterations: int,
    seed: int,
    spread: float = 1.0,
) -> Networks:
    """Networks of these widths after so many iterations over one batch, in the paper's schedule; the means of their
    priors are `spread` times as wide as the paper's.
    """
    generator = torch.Generator().manual_seed(seed)
    stages: list[Activation | Weighted] = []
    prior: dict[int, Message] = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        if stages:
            stages.append(Activation(0.1))
        weight, device = torch.empty(outputs, inputs), torch.device("cpu")
        layer = describe("", "linear", ("weight", weight), ("bias", weight[:, 0]), 1)
        means = spread * drawn_means(networks, outputs, inputs, outputs, generator, device)
        variance = torch.full_like(means, weight_variance(inputs, outputs, first=number == 0))
        means, variance = F.pad(means, (0, 1)), F.pad(variance, (0, 1), value=BIAS_VARIANCE)
        prior[len(stages)] = from_moments(means.unsqueeze(1), variance.unsqueeze(1))
        stages.append(Weighted(layer, Geometry(), (inputs,), (outputs,), device))
    trainer = Trainer(stages, prior, [data], Regression(NOISE**2), iterations=iterations, seed=seed)
    return Networks(stages, trainer.run())


def depth_study(options: argparse.Namespace) -> dict[str, Any]:
    """By number of linear layers: errors inside of the data and what is predicted beyond them."""
    data = sampled(0.0, 2.0, 0)
    grid = torch.linspace(-1.0, 3.0, 401, dtype=torch.float64).unsqueeze(1)
    inside = ((grid >= 0) & (grid <= 2))[:, 0]
    rows: dict[str, Any] = {}
    curves: dict[str, tuple[Tensor, Tensor]] = {}
    for layers in options.depths:
        begun = time.perf_counter()
        widths = [1, *[16] * (layers - 1), 1]
        networks = trained(widths, options.networks_of_a_depth, data, options.iterations, seed=layers)
        mean, deviation = networks.predict(grid)
        error = (mean - truth(grid)[:, 0])[:, inside].square().mean(1).sqrt()
        rows[f"{layers} linear layers"] = {
            "RMSE to the curve, median": float(error.median()),
            "RMSE, least": float(error.min()),
            "RMSE, greatest": float(error.max()),
            "deviation inside, median": float(deviation[:, inside].median()),
            "deviation at 3": float(deviation[:, -1].median()),
            "seconds": time.perf_counter() - begun,
        }
        curves[f"{layers} linear layers"] = (mean[0], deviation[0])
        print(f"depth, {layers} linear layers: {rows[f'{layers} linear layers']}", flush=True)
    save_figure(picture(grid[:, 0], curves, data), options.output / "depth.png", options.smoke)
    return rows


def picture(grid: Tensor, curves: dict[str, tuple[Tensor, Tensor]], data: tuple[Tensor, Tensor]) -> Figure:
    """Figure 3: the first network of every depth, with one and three standard deviations of a new observation."""
    figure = Figure(figsize=(3.2 * len(curves), 3), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (name, (mean, deviation)) in zip(panels, curves.items(), strict=True):
        for times, shade in ((3, 0.2), (1, 0.35)):
            panel.fill_between(grid, mean - times * deviation, mean + times * deviation, alpha=shade, lw=0)
        panel.plot(grid, mean, lw=1.2)
        panel.plot(grid, truth(grid), "k--", lw=0.8)
        panel.plot(data[0][:, 0], data[1][:, 0], ".", ms=2, color="#CC3311")
        panel.set(title=name, ylim=(-1.5, 3.0))
    return figure


def coverage_study(options: argparse.Namespace) -> dict[str, Any]:
    """By data seed: the share of networks whose intervals cover the truth, medians over each side, far off."""
    rows: dict[str, Any] = {}
    for seed in options.data_seeds:
        begun = time.perf_counter()
        data = sampled(-0.5, 0.5, seed)
        networks = trained([1, 32, 32, 1], options.networks, data, options.iterations, seed, options.spread)
        low, high = float(data[0].min()) - 20, float(data[0].max()) + 20
        grid = torch.arange(low, high + 1e-9, 0.05, dtype=torch.float64).unsqueeze(1)
        mean, deviation = networks.predict(grid)
        chance = torch.special.ndtr((truth(grid)[:, 0] - mean) / deviation)
        sides = {"x < -10": grid[:, 0] < -10, "x > 10": grid[:, 0] > 10}
        row: dict[str, float] = {}
        for side, where in sides.items():
            for name, (least, most) in BOUNDS.items():
                covered = ((chance > least) & (chance < most)).double().mean(0)
                row[f"{name}, {side}"] = float(covered[where].median())
        row |= correlations(chance, sides)
        seen = (networks.predict(data[0])[0] - truth(data[0])[:, 0]).square().mean(1).sqrt()
        row |= {"RMSE to the curve": float(seen.median()), "seconds": time.perf_counter() - begun}
        rows[f"data {seed}"] = row
        print(f"coverage, data {seed}: {row}", flush=True)
    return rows


def correlations(chance: Tensor, sides: dict[str, Tensor]) -> dict[str, float]:
    """Of the mass of central intervals, 0.01 to 1, with the medians of their coverage; of both sides, all pairs."""
    masses = torch.arange(1, 101, dtype=torch.float64) / 100
    medians = {
        side: torch.stack(
            [((chance - 0.5).abs() <= mass / 2).double().mean(0)[where].median() for mass in masses]
        )
        for side, where in sides.items()
    }
    row = {
        f"correlation, {side}": float(torch.corrcoef(torch.stack([masses, found]))[0, 1])
        for side, found in medians.items()
    }
    pairs = torch.stack([masses.repeat(len(medians)), torch.cat(list(medians.values()))])
    return row | {"correlation, both": float(torch.corrcoef(pairs)[0, 1])}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "message_passing", "few iterations: seconds")
    add = command.add_argument
    add("--studies", nargs="+", choices=["depth", "coverage"], default=["depth", "coverage"])
    add("--iterations", type=int, default=500)
    add("--depths", type=int, nargs="+", default=[2, 3, 4, 5, 6], help="linear layers")
    add("--networks-of-a-depth", type=int, default=8)
    add("--networks", type=int, default=24, help="of the study of coverage")
    add("--spread", type=float, default=1.0, help="likewise; of the priors' means, times the paper's")
    add("--data-seeds", type=int, nargs="+", default=[0, 1, 2])
    smoke = {"iterations": 2, "depths": [2, 3], "data_seeds": [0], "networks": 2, "networks_of_a_depth": 2}
    options = parsed(command, arguments, **smoke)
    studies = {"depth": depth_study, "coverage": coverage_study}
    results = {name: studies[name](options) for name in options.studies}
    page = "\n\n".join(table(rows, ".3g") for rows in results.values())
    report(options, f"sine-{'-'.join(options.studies)}", page, results)


if __name__ == "__main__":
    main()
