"""Figures 1 and 6 of Rudner et al. (2022): a regression in one dimension whose data leave a gap.

python -m recipes.function_space.regression            five data sets and a picture; minutes
python -m recipes.function_space.regression --smoke    seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.trained.contexts import UniformBox
from recipes.common import by_row, parsed, parser, report, save_figure, table, train

CURVATURE = {"method": "inf", "fisher": "exact", "correction": "rescale", "prior_precision": "evidence"}
"""INF of the figures: options of `uq.fit`."""
NOISE, GAP, EDGE, REACH = 0.1, 0.8, 3.0, 6.0
HEADS: dict[str, dict[str, Any]] = {"linearized": {}, "sampling": {"n_samples": 200}}
COLUMNS = (
    "sd, data",
    "sd, gap",
    "gap / data",
    "gap / data with noise",
    "sd, far",
    "RMSE, data",
)


def network(seed: int) -> nn.Sequential:
    """Two hidden layers of 100 ReLU, as the paper's."""
    torch.manual_seed(seed)
    layers = [nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)]
    return nn.Sequential(*layers).eval()


def data(seed: int, points: int = 120) -> tuple[Tensor, Tensor]:
    """``y ~ N(sin 2x, NOISE^2)`` at inputs (points, 1) between GAP and EDGE on either side of 0."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.linspace(GAP, EDGE, points // 2)
    x = torch.cat([-side, side]).unsqueeze(1)
    return x, truth(x) + NOISE * torch.randn(x.shape, generator=generator)


def truth(x: Tensor) -> Tensor:
    """The function behind the data."""
    return (2 * x).sin()


def posteriors(seed: int, options: argparse.Namespace) -> dict[str, tuple[nn.Module, uq.Posterior]]:
    """INF and function space around one trained network, and function space from random weights."""
    x, y = data(seed)
    batch = [(x, y)]
    model = network(seed)
    train(model, repeat((x, y), options.steps), nn.MSELoss(), torch.optim.Adam(model.parameters(), 1e-3))
    common: dict[str, Any] = {"likelihood": "regression", "noise_variance": NOISE**2, "progress": False}
    trains: dict[str, Any] = {
        "method": "function_space",
        "context": UniformBox(-options.box, options.box),
        "n_context": 20,
        "lr": options.lr,
        "log_variance_lr": 10 * options.lr,
        "seed": seed,
        "divergence": None,  # the variances as they are trained
    }
    fresh = network(seed + 1000)
    return {
        "INF": (
            model,
            uq.fit(model, batch, **CURVATURE, **common),
        ),
        "function space, post hoc": (model, uq.fit(model, batch, epochs=options.epochs, **trains, **common)),
        "function space, from scratch": (
            fresh,
            uq.fit(fresh, batch, epochs=2 * options.epochs, prior_mean="random_init", **trains, **common),
        ),
    }


@torch.no_grad()
def measures(predict: uq.Predictor, seed: int) -> dict[str, float]:
    """Mean standard deviations of the function on the data, in the middle half of the gap and far outside; and the
    error of its mean against the true function at the data's inputs.
    """
    x, _ = data(seed)
    side = torch.linspace(4.0, REACH, 20)
    places = {
        "data": x,
        "gap": torch.linspace(-GAP / 2, GAP / 2, 41).unsqueeze(1),
        "far": torch.cat([-side, side]).unsqueeze(1),
    }
    variances = {name: predict(at).epistemic_variance for name, at in places.items()}
    found = {f"sd, {name}": float(value.sqrt().mean()) for name, value in variances.items()}
    noisy = {name: float((value + NOISE**2).sqrt().mean()) for name, value in variances.items()}
    found["gap / data"] = found["sd, gap"] / found["sd, data"]
    found["gap / data with noise"] = noisy["gap"] / noisy["data"]
    found["RMSE, data"] = float((predict(x).mean - truth(x)).square().mean().sqrt())
    return found


@torch.no_grad()
def picture(seed: int, found: dict[str, tuple[nn.Module, uq.Posterior]]) -> Figure:
    """A column a posterior, a row a head: data, truth, mean, one to three standard deviations of the function."""
    figure = Figure(figsize=(4.2 * len(found), 2.9 * len(HEADS)), layout="constrained")
    panels = figure.subplots(len(HEADS), len(found), sharex=True, sharey=True)
    x, y = data(seed)
    grid = torch.linspace(-REACH, REACH, 401).unsqueeze(1)
    for column, (name, (model, posterior)) in enumerate(found.items()):
        for row, (head, options) in enumerate(HEADS.items()):
            panel = panels[row, column]
            prediction = uq.wrap(model, posterior, head, **options)(grid)
            centre, deviation = prediction.mean.squeeze(1), prediction.epistemic_variance.sqrt().squeeze(1)
            for level in (3, 2, 1):
                low, high = centre - level * deviation, centre + level * deviation
                panel.fill_between(grid.squeeze(1), low, high, color="#0072B2", alpha=0.2, linewidth=0)
            panel.plot(grid, centre, color="#0072B2", linewidth=1.4, label="mean, 1 to 3 sd")
            panel.plot(grid, truth(grid), color="#404040", linewidth=0.9, linestyle="--", label="truth")
            panel.scatter(x, y, s=6, color="black", linewidths=0, label="data", zorder=3)
            panel.set(xlim=(-REACH, REACH), ylim=(-4, 4))
            panel.set_title(f"{name}, {head}", fontsize=10)
            if row == len(HEADS) - 1:
                panel.set_xlabel("x")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "one data set, few steps: seconds")
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of data and network; one table")
    add("--steps", type=int, default=2000, help="of the plain training")
    add("--epochs", type=int, default=3000, help="of variational training, a step each")
    add("--lr", type=float, default=3e-3, help="of the means; log variances have ten times that")
    add("--box", type=float, default=4.0, help="context points are between -BOX and BOX")
    options = parsed(command, arguments, seeds=[0], steps=100, epochs=30)
    torch.set_num_threads(1)
    results: list[dict[str, dict[str, float]]] = []
    for seed in options.seeds:
        found = posteriors(seed, options)
        if seed == options.seeds[0]:
            save_figure(picture(seed, found), options.output / "regression.png", options.smoke)
        results.append(
            {
                f"{name}, {head}": measures(uq.wrap(model, posterior, head, **own), seed)
                for name, (model, posterior) in found.items()
                for head, own in HEADS.items()
            }
        )
        print(f"seed {seed} is done", flush=True)
    report(options, "regression", table(by_row(results), ".3g", columns=COLUMNS), results)


if __name__ == "__main__":
    main()
