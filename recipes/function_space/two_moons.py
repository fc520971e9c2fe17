"""Figures 1 and 5 of Rudner et al. (2022): two moons, and what is far away from them.

python -m recipes.function_space.two_moons            five data sets and pictures; minutes
python -m recipes.function_space.two_moons --smoke    seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads import LinearizedPredictor, SamplingPredictor
from posthoc_uq.trained.contexts import UniformBox
from recipes.common import by_row, parsed, parser, report, save_figure, table, train
from recipes.function_space.regression import CURVATURE

NOISE, REACH = 0.2, 10.0
COLUMNS = ("accuracy", "NLL", "entropy, test", "entropy, far", "sd of p, test", "sd of p, far")
Draws = Callable[[Tensor], Tensor]
"""Inputs (inputs, 2) to drawn class probabilities (draws, inputs, 2)."""


def network(seed: int) -> nn.Sequential:
    """Two hidden layers of 30 tanh, as the paper's."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)).eval()


def moons(seed: int, points: int) -> tuple[Tensor, Tensor]:
    """Inputs (points, 2) and labels."""
    inputs, labels = make_moons(points, noise=NOISE, random_state=seed)
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels).long()


def far() -> Tensor:
    """(64, 2): a circle of radius 8 about the moons."""
    angle = torch.arange(64) * (2 * torch.pi / 64)
    return torch.tensor([0.5, 0.25]) + 8 * torch.stack([angle.cos(), angle.sin()], dim=1)


def by_weights(model: nn.Module, posterior: uq.Posterior, draws: int) -> Draws:
    """The network with drawn weights."""
    head = uq.wrap(model, posterior, "sampling", n_samples=draws)
    assert isinstance(head, SamplingPredictor)
    return lambda x: head.outputs(x).softmax(-1)


def by_linearising(model: nn.Module, posterior: uq.Posterior, draws: int) -> Draws:
    """Draws of the linearised network's Gaussian logits, an input at a time."""
    head = uq.wrap(model, posterior, "linearized")
    assert isinstance(head, LinearizedPredictor)

    def draw(x: Tensor) -> Tensor:
        centre, covariance = model(x).double(), head.functional_covariance(x).double()
        normals = torch.randn(
            draws, *centre.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        return (centre + (root @ normals.unsqueeze(-1)).squeeze(-1)).softmax(-1).float()

    return draw


def plain(model: nn.Module) -> Draws:
    """The network alone: one draw."""
    return lambda x: model(x).softmax(-1).unsqueeze(0)


def fitted(seed: int, options: argparse.Namespace) -> dict[str, Draws]:
    """By row: a trained network, INF around it, function space around it, and function space from random weights."""
    x, y = moons(seed, 200)
    batch = [(x, y)]
    model = network(seed)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, repeat((x, y), options.steps), nn.CrossEntropyLoss(), optimiser)
    trains: dict[str, Any] = {
        "method": "function_space",
        "context": UniformBox(-REACH, REACH),
        "n_context": 20,
        "lr": options.lr,
        "log_variance_lr": options.lr,
        "seed": seed,
        "divergence": None,  # the variances as they are trained
        "progress": False,
    }
    inf = uq.fit(model, batch, **CURVATURE, progress=False)
    found = {
        "network": plain(model),
        "INF, linearized": by_linearising(model, inf, options.draws),
        "INF, sampling": by_weights(model, inf, options.draws),
    }
    for precision in options.prior_precisions:
        posterior = uq.fit(model, batch, epochs=options.epochs, prior_precision=precision, **trains)
        name = f"function space, post hoc, prior precision {precision:g}"
        found[name] = by_weights(model, posterior, options.draws)
    fresh = network(seed + 1000)
    posterior = uq.fit(
        fresh, batch, epochs=2 * options.epochs, prior_precision=1.0, prior_mean="random_init", **trains
    )
    return found | {"function space, from scratch": by_weights(fresh, posterior, options.draws)}


@torch.no_grad()
def measures(draw: Draws, seed: int) -> dict[str, float]:
    """On 1,000 new points of the moons, and on the circle far away; entropies in nats."""
    x, y = moons(seed + 500, 1000)
    found: dict[str, float] = {}
    for name, at in (("test", x), ("far", far())):
        probs = draw(at)
        average = probs.mean(0)
        found[f"entropy, {name}"] = float(torch.special.entr(average).sum(-1).mean())
        found[f"sd of p, {name}"] = float(probs[..., 1].std(0, correction=0).mean())
        if name == "test":
            found["accuracy"] = float((average.argmax(-1) == y).double().mean())
            found["NLL"] = -float(average[torch.arange(len(y)), y].log().mean())
    return found


@torch.no_grad()
def picture(seed: int, found: dict[str, Draws], points: int = 121) -> Figure:
    """A column a posterior: above the mean probability of the second class, below its standard deviation."""
    figure = Figure(figsize=(3.0 * len(found), 5.6), layout="constrained")
    panels = figure.subplots(2, len(found), sharex=True, sharey=True)
    x, y = moons(seed, 200)
    side = torch.linspace(-REACH, REACH, points)
    grid = torch.cartesian_prod(side, side)
    for column, (name, draw) in enumerate(found.items()):
        probs = torch.cat([draw(part)[..., 1].T for part in grid.split(2000)])
        for row, (values, colours, top) in enumerate(
            ((probs.mean(1), "RdBu_r", 1.0), (probs.std(1, correction=0), "viridis", 0.5))
        ):
            panel = panels[row, column]
            plane = values.reshape(points, points).T  # rows are the second input
            shown = panel.imshow(
                plane, origin="lower", extent=(-REACH, REACH) * 2, cmap=colours, vmin=0, vmax=top
            )
            for label, colour in ((0, "#08306B"), (1, "#67000D")):
                panel.scatter(*x[y == label].T, s=2, color=colour, linewidths=0)
            if row == 0:
                panel.set_title(name.replace(", ", "\n", 1), fontsize=9)
            if column == len(found) - 1:
                label = "mean of p" if row == 0 else "standard deviation of p"
                figure.colorbar(shown, ax=panels[row, :], label=label, shrink=0.9)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "one data set, few steps: seconds")
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of data and network")
    add("--steps", type=int, default=1000, help="of the plain training")
    add("--epochs", type=int, default=2000, help="of variational training, a step each")
    add("--lr", type=float, default=1e-2, help="of means and log variances")
    add("--prior-precisions", type=float, nargs="+", default=[1.0, 0.1, 0.01], help="post hoc, one row each")
    add("--draws", type=int, default=200, help="for every prediction")
    options = parsed(command, arguments, seeds=[0], steps=100, epochs=30, draws=20)
    torch.set_num_threads(1)
    results: list[dict[str, dict[str, float]]] = []
    for seed in options.seeds:
        found = fitted(seed, options)
        if seed == options.seeds[0]:
            figure = picture(seed, found, 31 if options.smoke else 121)
            save_figure(figure, options.output / "two_moons.png", options.smoke)
        results.append({name: measures(draw, seed) for name, draw in found.items()})
        print(f"seed {seed} is done", flush=True)
    report(options, "two_moons", table(by_row(results), ".3g", columns=COLUMNS), results)


if __name__ == "__main__":
    main()
