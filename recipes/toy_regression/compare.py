"""Figure 4 of Lee et al. (2020): predictive uncertainty on a toy problem, INF, KFAC and diagonal beside HMC.

python -m recipes.toy_regression.compare            four chains of 1,000 draws; minutes
python -m recipes.toy_regression.compare --smoke    one short chain; seconds
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import parsed, parser, report, save_figure, table
from recipes.toy_regression.problem import (
    EDGE,
    NOISE,
    Problem,
    as_network,
    held_out,
    maxima,
    problem,
    standardised,
)
from recipes.toy_regression.truth import Truth, nuts

METHODS: dict[str, dict[str, Any]] = {
    "INF": {"method": "inf", "correction": "rescale"},
    "KFAC": {"method": "kfac"},
    "Diagonal": {"method": "diag"},
    "Dense": {"method": "full"},
}
HEADS = {"linearized": "linearised", "sampling": "sampled", "tuned": "sampled, prior tuned"}
REACH = 6.0
"""How far the comparison goes, in the data's units."""


class Curve(NamedTuple):
    """Mean and standard deviation of the function at every point of the grid, in the data's units."""

    mean: Tensor
    deviation: Tensor


def grid(points: int = 241) -> Tensor:
    """(points,), from -REACH to REACH."""
    return torch.linspace(-REACH, REACH, points, dtype=torch.float64)


def laplace(model: nn.Sequential, task: Problem, draws: int) -> dict[str, Curve]:
    """Every method under every head, ``name, head`` to its curve: exact Fisher, the problem's own noise and prior.

    ``tuned`` is the sampling head with the prior precision that held-out points choose.
    """
    found: dict[str, Curve] = {}
    batch = [(task.inputs, task.targets)]
    other = held_out(task)
    for name, method in METHODS.items():
        posterior = uq.fit(
            model,
            batch,
            **method,
            likelihood="regression",
            fisher="exact",
            noise_variance=task.noise,
            prior_precision=task.prior_precision,
            dtype=torch.float64,
            progress=False,
        )
        for head in HEADS:
            if head == "tuned":
                posterior = uq.tune(
                    posterior,
                    [(other.inputs, other.targets)],
                    parameters=("prior_precision",),
                    head="sampling",
                    n_samples=10,
                    progress=False,
                )
                print(f"{name}: tuned prior precision {posterior.prior_precision:.3g}")
            options = {} if head == "linearized" else {"n_samples": draws}
            with torch.no_grad():
                kind = "linearized" if head == "linearized" else "sampling"
                prediction = uq.wrap(model, posterior, head=kind, **options)(standardised(grid()))
            deviation = prediction.epistemic_variance.sqrt()
            found[f"{name}, {HEADS[head]}"] = Curve(
                prediction.mean.squeeze(1) * task.scale, deviation.squeeze(1) * task.scale
            )
    return found


def compare(reference: Curve, curve: Curve) -> dict[str, float]:
    """How far a curve is from HMC's, inside and outside the data's interval.

    Returns:
        ``sd ratio``, the geometric mean over points of the ratio of the functions' standard deviations, ``KL`` from
        HMC's predictive to the curve's (both as Gaussians, the noise included; nats), and ``log density``, the expected
        one of new observations of the true function (nats).
    """
    x = grid()
    variance, own = reference.deviation**2 + NOISE**2, curve.deviation**2 + NOISE**2
    divergence = 0.5 * ((variance + (reference.mean - curve.mean) ** 2) / own - 1 + (own / variance).log())
    density = -0.5 * ((NOISE**2 + (x**3 - curve.mean) ** 2) / own + (2 * math.pi * own).log())
    ratio = (curve.deviation / reference.deviation).log()
    found: dict[str, float] = {}
    for part, where in (("inside", x.abs() <= EDGE), ("outside", x.abs() > EDGE)):
        found[f"sd ratio {part}"] = float(ratio[where].mean().exp())
        found[f"KL {part}"] = float(divergence[where].mean())
        found[f"log density {part}"] = float(density[where].mean())
    return found


def picture(task: Problem, trained: Tensor, reference: Curve, curves: Mapping[str, Curve]) -> Figure:
    """A column a method, a row a head; HMC's at the left."""
    figure = Figure(figsize=(3.1 * (len(METHODS) + 1), 2.8 * len(HEADS)), layout="constrained")
    panels = figure.subplots(len(HEADS), len(METHODS) + 1, sharex=True, sharey=True)
    x, inputs, targets = grid(), task.inputs * EDGE / math.sqrt(3), task.targets * task.scale
    for row, title in enumerate(HEADS.values()):
        for column, name in enumerate(["HMC", *METHODS]):
            panel = panels[row, column]
            if name == "HMC" and row > 0:
                panel.axis("off")
                continue
            curve = reference if name == "HMC" else curves[f"{name}, {title}"]
            for level in (3, 2, 1):
                low, high = curve.mean - level * curve.deviation, curve.mean + level * curve.deviation
                panel.fill_between(x, low, high, color="#0072B2", alpha=0.22, linewidth=0)
            panel.plot(x, trained, color="#D55E00", linewidth=1.2, label="trained network")
            panel.plot(x, curve.mean, color="#0072B2", linewidth=1.2, label="mean, 1 to 3 sd")
            if name != "HMC":
                for sign in (-3, 3):
                    edge = reference.mean + sign * reference.deviation
                    label = "HMC's 3 sd" if sign == 3 else None
                    panel.plot(x, edge, color="#404040", linewidth=0.8, linestyle="--", label=label)
            panel.scatter(inputs, targets, s=5, color="black", linewidths=0, label="data")
            panel.set_title("HMC (NUTS)" if name == "HMC" else f"{name}, {title}", fontsize=10)
            panel.set(xlim=(-REACH, REACH), ylim=(-160, 160))
            if row == len(HEADS) - 1:
                panel.set_xlabel("x")
            panel.tick_params(labelbottom=row == len(HEADS) - 1 or row == 0)
    panels[0, 0].set_ylabel("y")
    handles, labels = panels[0, 1].get_legend_handles_labels()
    panels[1, 0].legend(handles, labels, loc="center", frameon=False)
    return figure


def run(options: argparse.Namespace) -> None:
    """Everything, with the picture and the figures written to the output folder."""
    begun = time.perf_counter()
    task = problem(options.seed, prior_precision=options.prior_precision)
    found = maxima(task, options.starts, options.seed)
    model = as_network(found[0][1])
    curves = laplace(model, task, options.network_draws)
    fits = time.perf_counter()
    starts = [weights for _, weights in found[: options.chains]]
    truth = nuts(
        task, starts, standardised(grid()), options.draws, options.warmup, options.seed, options.depth
    )
    sampled = time.perf_counter()
    functions = truth.functions * task.scale
    reference = Curve(functions.mean(0), functions.std(0))
    with torch.no_grad():
        trained = model(standardised(grid())).squeeze(1) * task.scale
    figure = picture(task, trained, reference, curves)
    save_figure(figure, options.output / "toy_regression.png", options.smoke)
    print(
        f"Best maximum {found[0][0]:.2f}, worst {found[-1][0]:.2f} of {len(found)} starts, and all posteriors: "
        f"{fits - begun:.0f} s. NUTS: {len(starts)} chains of {options.draws} draws in {sampled - fits:.0f} s, "
        f"{describe(truth)}."
    )
    measures = {name: compare(reference, curve) for name, curve in {"HMC": reference, **curves}.items()}
    page = table(measures, ".3g", corner="method")
    content = {"measures": measures, "NUTS": {"r_hat": truth.r_hat, "effective": truth.effective}}
    report(options, "toy_regression", page, content)


def describe(truth: Truth) -> str:
    """The sampler's diagnostics in words."""
    return (
        f"R-hat of the function at most {truth.r_hat:.3f}, effective draws at least {truth.effective:.0f}, "
        f"{truth.divergences} divergent transitions"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "toy_regression", "one short chain: seconds")
    add = command.add_argument
    add("--seed", type=int, default=0, help="of data, starts and sampler")
    add("--prior-precision", type=float, default=1.0, help="of every weight, for all methods")
    add("--starts", type=int, default=20, help="of the search for the best trained network")
    add("--chains", type=int, default=4)
    add("--draws", type=int, default=1000, help="of each chain")
    add("--warmup", type=int, default=500, help="of each chain")
    add("--depth", type=int, default=10, help="a transition takes at most 2^depth - 1 steps")
    add("--network-draws", type=int, default=1000, help="of the sampling head")
    smoke = {"starts": 2, "chains": 1, "draws": 20, "warmup": 20, "network_draws": 50, "depth": 4}
    options = parsed(command, arguments, **smoke)
    torch.set_num_threads(1)
    run(options)


if __name__ == "__main__":
    main()
