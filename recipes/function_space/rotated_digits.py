"""Figure 2 of Rudner et al. (2022): Brier score and entropy of a digit classifier as the digits are rotated.

python -m recipes.function_space.rotated_digits            three splits and a picture; 50 minutes on one core
python -m recipes.function_space.rotated_digits --smoke    seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.functional import InterpolationMode, rotate

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from recipes.common import by_row, parsed, parser, predicted, report, save_figure, table
from recipes.fashion_mnist.data import DEVIATION, MEAN, Labelled, mnist_digits
from recipes.fashion_mnist.methods import deep_ensemble, loader, plain
from recipes.fashion_mnist.network import trained, trained_on
from recipes.fashion_mnist.variational import function_space
from recipes.function_space.regression import CURVATURE

SHOWN = (0, 45, 90, 180)
"""Angles of the table."""
BLACK = -MEAN / DEVIATION
Predict = Callable[[Tensor], uq.ClassPrediction]


def predictors(
    train: Labelled, held_out: Labelled, seed: int, options: argparse.Namespace
) -> dict[str, Predict]:
    """By row: the network, one trained plainly for as long as the variational training lasts, an ensemble, INF with its
    prior precision tuned on held-out digits, function space.
    """
    folder = options.output / f"digits-{len(train.labels)}-{options.network_epochs}-split{seed}"
    networks = [
        trained(train, number, folder, options.network_epochs, 0.01) for number in range(options.members)
    ]
    model = networks[0]
    further = trained_on(model, train, folder / f"trained-on-{options.epochs}.pt", seed, options.epochs)
    inf = uq.fit(model, loader(train), **{**CURVATURE, "fisher": "mc"}, seed=seed, progress=False)
    link = {"head": "linearized", "link": "probit"}
    inf = uq.tune(
        inf,
        loader(held_out),
        parameters=("prior_precision",),
        temperature=False,
        progress=False,
        **link,
    )
    path = folder / f"function-space-{options.epochs}.h5"
    trained_variances = function_space(model, train, path, seed=seed, epochs=options.epochs, divergence=None)
    linearized = uq.wrap(model, inf, **link)
    sampling = uq.wrap(model, trained_variances, "sampling", n_samples=options.draws)
    return {
        "network": plain(model).predict,
        "trained on": plain(further).predict,
        f"deep ensemble of {options.members}": deep_ensemble(networks).predict,
        "INF, linearized": partial(predicted, linearized, size=100),
        "function space": partial(predicted, sampling, size=100),
    }


@torch.no_grad()
def measures(predict: Predict, test: Labelled, angles: list[int]) -> dict[str, float]:
    """``Brier at A`` and ``entropy at A`` (nats) of the test digits turned by every angle, in degrees."""
    found: dict[str, float] = {}
    for angle in angles:
        turned = rotate(test.images, angle, InterpolationMode.BILINEAR, fill=[BLACK])
        prediction = predict(turned)
        found[f"Brier at {angle}"] = metrics.brier_score(prediction.probs, test.labels)
        found[f"entropy at {angle}"] = float(prediction.entropy().double().mean())
    return found


def picture(results: list[dict[str, dict[str, float]]], angles: list[int]) -> Figure:
    """Means over splits with a band of one standard deviation, Brier score at the left, entropy at the right."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, measure in zip(panels, ("Brier", "entropy"), strict=True):
        for index, name in enumerate(results[0]):
            values = torch.tensor([[one[name][f"{measure} at {a}"] for a in angles] for one in results])
            centre, deviation = values.mean(0), values.std(0, correction=int(len(results) > 1))
            panel.plot(angles, centre, color=f"C{index}", marker="o", markersize=3, label=name)
            panel.fill_between(
                angles, centre - deviation, centre + deviation, color=f"C{index}", alpha=0.15, linewidth=0
            )
        panel.set(
            xlabel="angle in degrees", ylabel="Brier score" if measure == "Brier" else "entropy in nats"
        )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def split(seed: int, size: int, train: int, held_out: int) -> tuple[Labelled, Labelled, Labelled]:
    """Training, held-out and test digits."""
    digits = mnist_digits()
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(seed))[:size]
    parts = order.split([train, held_out, size - train - held_out])
    first, second, third = (Labelled(digits.images[part], digits.labels[part]) for part in parts)
    return first, second, third


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "few digits, one epoch: seconds")
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a split each")
    add("--network-epochs", type=int, default=30)
    add("--epochs", type=int, default=100, help="of variational training")
    add("--members", type=int, default=5, help="of the deep ensemble")
    add("--draws", type=int, default=30, help="of weights, for every prediction")
    add("--step", type=int, default=15, help="between angles, in degrees")
    smoke = {"seeds": [0], "network_epochs": 1, "epochs": 1, "step": 45, "members": 2, "draws": 3}
    options = parsed(command, arguments, **smoke)
    sizes = (400, 300, 50) if options.smoke else (5000, 3500, 500)
    angles = list(range(0, 181, options.step))
    results: list[dict[str, dict[str, float]]] = []
    for seed in options.seeds:
        train, held_out, test = split(seed, *sizes)
        rows = predictors(train, held_out, seed, options)
        results.append({name: measures(predict, test, angles) for name, predict in rows.items()})
        print(f"split {seed} is done", flush=True)
    save_figure(picture(results, angles), options.output / "rotated_digits.png", options.smoke)
    shown = [
        f"{measure} at {angle}" for measure in ("Brier", "entropy") for angle in SHOWN if angle in angles
    ]
    report(options, "rotated_digits", table(by_row(results), ".3g", columns=shown), results)


if __name__ == "__main__":
    main()
