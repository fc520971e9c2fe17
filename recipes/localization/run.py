"""Figure 3 of Schodt (2024): the predicted variance of a molecule's position over the image, beside the bound on it.

python -m recipes.localization.run            six seeds of each training; half an hour of a core
python -m recipes.localization.run --smoke    few steps; seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

import posthoc_uq as uq
from recipes import common
from recipes.localization.problem import (
    SIDE,
    FreshImages,
    Localizer,
    emitters,
    exact_bound,
    sample,
    simple_bound,
    van_trees,
)
from recipes.unscented_regression.compare import steady
from recipes.unscented_regression.problem import Drawn

DRAWS = 10
"""At every activation of MCVI."""


def train_plain(seed: int, steps: int) -> Localizer:
    """The network alone, by squared errors in units of the targets' scatter: where a training after the fact begins."""
    model = Localizer(seed).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    scales = torch.tensor([2.0, 2.0, 20.0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        common.train(
            model,
            FreshImages(steps, 128),
            lambda a, b: ((a - b) / scales).square().mean(),
            optimiser,
            schedule,
        )
    return model.eval()


def by_draws(model: Localizer, seed: int) -> Localizer:
    """The same network with activations whose moments come from random draws."""
    twin = Localizer(seed, Drawn, draws=DRAWS)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def train(model: nn.Module, seed: int, epochs: int, batches: int, start: str) -> uq.Posterior:
    """Section 4.1's training, the propagated variance as the predictive one."""
    after = start == "trained"
    method = uq.UTVI(
        epochs=epochs,
        start=start,  # type: ignore[arg-type]
        objective="predictive",
        noise="none",
        lr=1e-3 if after else 0.01,
        log_variance_lr=0.02,
        schedule=None if after else steady,
    )
    held_out = sample(emitters(1024, torch.Generator().manual_seed(5)), torch.Generator().manual_seed(6))
    return uq.fit(
        model,
        FreshImages(batches, 128),
        method,
        val_loader=[held_out],
        likelihood="regression",
        noise_variance=1.0,
        seed=seed,
        progress=False,
    )


def pixels(count: int) -> Tensor:
    """Positions spread evenly at random over every pixel, ``(SIDE, SIDE, count, 2)``, rows by y, float64."""
    generator = torch.Generator().manual_seed(11)
    corners = torch.arange(SIDE, dtype=torch.float64) - SIDE / 2
    inside = torch.rand(SIDE, SIDE, count, 2, generator=generator, dtype=torch.float64)
    inside[..., 0] += corners[None, :, None]
    inside[..., 1] += corners[:, None, None]
    return inside


def variance_map(model: nn.Module, posterior: uq.Posterior, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over a pixel's molecules, and over x and y, of the predicted variance and of the squared error,
    ``(SIDE, SIDE)`` each.
    """
    predictor = uq.wrap(model, posterior, "moments", weights="marginal")
    flat = positions.reshape(-1, 2).float()
    variances: list[Tensor] = []
    errors: list[Tensor] = []
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for part in flat.split(2048):
            images, _ = sample(part, generator)
            mean, variance, _ = predictor.propagate(images)
            variances.append(variance[:, :2].mean(1))
            errors.append((mean[:, :2] - part).square().mean(1))
    shape = positions.shape[:3]
    return tuple(torch.cat(part).double().reshape(shape).mean(2) for part in (variances, errors))  # type: ignore[return-value]


def bounds(positions: Tensor) -> dict[str, Tensor]:
    """Means over the pixels of the bounds, ``(SIDE, SIDE)``: the paper's, the exact one, and with the prior."""
    flat, shape = positions.reshape(-1, 2), positions.shape[:3]
    exact = exact_bound(flat).mean(1)
    found = {"equation 6": simple_bound(flat), "exact": exact, "with the prior": van_trees(exact)}
    return {name: bound.reshape(shape).mean(2) for name, bound in found.items()}


def compared(predicted: Tensor, error: Tensor, reference: dict[str, Tensor]) -> dict[str, float]:
    """How a map of predicted variances follows the bounds and the errors that were made."""
    found: dict[str, float] = {}
    for name, bound in reference.items():
        pair = torch.stack([predicted.flatten(), bound.flatten()])
        found[f"correlation, {name}"] = float(torch.corrcoef(pair)[0, 1])
        found[f"rank correlation, {name}"] = float(spearmanr(*pair.numpy()).statistic)
    found["share of pixels at or above the bound with the prior"] = float(
        (predicted >= reference["with the prior"]).double().mean()
    )
    found["mean log distance, with the prior"] = float(
        (predicted / reference["with the prior"]).log().abs().mean()
    )
    found["variance over squared error"] = float(predicted.mean() / error.mean())
    return found


def run(options: argparse.Namespace) -> None:
    """All trainings, the table with its spread over the seeds, the figure of averaged maps."""
    positions = pixels(options.molecules)
    reference = bounds(positions)
    names = ["UTVI", f"MCVI, {DRAWS} draws", "UTVI, after the fact", f"MCVI, {DRAWS} draws, after the fact"]
    maps: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(options.seeds):
        plain = train_plain(seed, options.plain)
        drawn = by_draws(plain, seed)
        for name in names:
            model = drawn if name.startswith("MCVI") else plain
            start = "trained" if name.endswith("fact") else "random"
            begun = time.perf_counter()
            posterior = train(model, seed, options.epochs, options.batches, start)
            seconds = time.perf_counter() - begun
            maps[name].append(variance_map(model, posterior, positions))
            measured = compared(*maps[name][-1], reference)
            nll = min(posterior.history.fit["validation NLL"])
            rows[name].append({"NLL": nll, **measured, "seconds": seconds})
            print(f"seed {seed}, {name}: {rows[name][-1]}", flush=True)
    means = {name: torch.stack([variances for variances, _ in own]).mean(0) for name, own in maps.items()}
    figure = picture({**reference, **means})
    common.save_figure(figure, options.output / "figure3.png", options.smoke)
    common.report(options, "localization", common.table(rows, corner="training"), rows)


def picture(maps: dict[str, Tensor]) -> Figure:
    """Figure 3: every map on a scale of its own, in squared pixels."""
    figure = Figure(figsize=(3.1 * 4, 6), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    for panel in panels[len(maps) :]:
        panel.axis("off")
    edge = SIDE / 2
    for panel, (name, values) in zip(panels, maps.items(), strict=False):
        image = panel.imshow(values, extent=(-edge, edge, edge, -edge), cmap="viridis")
        panel.set_title(name, fontsize=9)
        figure.colorbar(image, ax=panel, shrink=0.8)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = common.parser(__doc__, "localization", "few steps: seconds")
    add = command.add_argument
    add("--seeds", type=int, default=6)
    add("--epochs", type=int, default=25)
    add("--batches", type=int, default=60, help="steps of an epoch")
    add("--plain", type=int, default=1500, help="steps of the network alone")
    add("--molecules", type=int, default=1024, help="in every pixel")
    options = common.parsed(command, arguments, seeds=1, epochs=1, batches=3, plain=5, molecules=4)
    torch.set_num_threads(1)
    run(options)


if __name__ == "__main__":
    main()
