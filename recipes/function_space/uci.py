"""Table 4 of Rudner et al. (2022): RMSE and log-likelihood of UCI regressions.

python -m recipes.function_space.uci            what sets can be found, 20 splits: 8 minutes for three
python -m recipes.function_space.uci --smoke    Boston, one split; seconds

Splits, the network of 50 hidden units and the held-out ninth of the training rows are those of
`recipes.uci.predictions`. Held-out rows give the network's noise and end a training; nothing is fitted
again with them. The prior is the default, where the paper searched for the best one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.trained.contexts import UniformBox
from recipes.common import by_row, markdown, parsed, parser, report, spread
from recipes.fashion_mnist.variational import shuffled
from recipes.uci.data import SOURCES, Split, Table, add_options, split, tables
from recipes.uci.network import network, trained_on_each
from recipes.uci.predictions import scores

ROUNDED = {"RMSE": ".3f", "log-likelihood": ".3f"}
BATCH = 128
AROUND: dict[str, Any] = {"lr": 3e-3, "log_variance_lr": 3e-2}
SCRATCH: dict[str, Any] = {"lr": 1e-2, "log_variance_lr": 3e-2, "initial_body_log_variance": -8.0}
"""Options around a trained network, and from random weights."""


def in_columns(part: Table) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of the shape of a network's outputs."""
    return part.inputs, part.targets.unsqueeze(1)


def fitted(
    model: nn.Module, train: Table, held_out: Table, noise: float, steps: int, **given: Any
) -> uq.Posterior:
    """With trained noise, and context points anywhere within the training inputs (appendix D.8). It ends
    when held-out rows have gained nothing for a fifth of the steps.
    """
    epochs = math.ceil(steps / math.ceil(len(train.targets) / BATCH))
    return uq.fit(
        model,
        shuffled(*in_columns(train), seed=0, batch_size=BATCH),
        "function_space",
        likelihood="regression",
        noise_variance=noise,
        learn_noise=True,
        context=UniformBox(train.inputs.amin(0), train.inputs.amax(0)),
        epochs=epochs,
        val_loader=[in_columns(held_out)],
        patience=max(1, epochs // 5),
        divergence=None,  # the variances as they are trained
        progress=False,
        **given,
    )


def measure(
    trained: nn.Sequential, train: Table, held_out: Table, part: Split, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Scores by row, of one split."""
    with torch.no_grad():
        residuals = trained(held_out.inputs).squeeze(1) - held_out.targets
        mean = trained(part.test.inputs)
    noise = float(residuals.square().mean())
    rows = {"network": scores(uq.RegressionPrediction(mean, torch.zeros_like(mean), noise), part)}
    torch.manual_seed(0)
    fresh = network(train.inputs.shape[1], trained[0].out_features).eval()
    around = fitted(trained, train, held_out, noise, options.fit_steps, **AROUND)
    alone = fitted(fresh, train, held_out, noise, options.scratch_steps, **SCRATCH)
    for name, model, posterior in (
        ("around the network", trained, around),
        ("from random weights", fresh, alone),
    ):
        predictor = uq.wrap(model, posterior, "sampling", n_samples=options.draws)
        prediction = predictor(part.test.inputs)
        rows[name] = scores(prediction, part) | {
            "noise variance": float(posterior.noise_variance),
            "epistemic share": float((prediction.epistemic_variance / prediction.variance).mean()),
        }
    return rows


def run(name: str, table: Table, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """`measure` on every split of one set."""
    parts = [split(table, seed) for seed in range(options.splits)]
    held = len(parts[0].train.targets) // 9
    fits = [Table(part.train.inputs[held:], part.train.targets[held:]) for part in parts]
    others = [Table(part.train.inputs[:held], part.train.targets[:held]) for part in parts]
    models = trained_on_each(fits, SOURCES[name].hidden, steps=options.steps)
    found: list[dict[str, dict[str, float]]] = []
    for one in zip(models, fits, others, parts, strict=True):
        found.append(measure(*one, options))
        print(f"{name}, split {len(found) - 1}: {found[-1]}", flush=True)
    return found


def lines(name: str, found: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    """One line a row: means and standard errors over splits."""
    return [
        {"set": name, "row": row}
        | {
            score: spread([one[score] for one in several], form, error=True)
            for score, form in ROUNDED.items()
        }
        for row, several in by_row(found).items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "Boston, one split, few steps: seconds")
    add_options(command)
    add = command.add_argument
    add("--fit-steps", type=int, default=400, help="at most, around the network")
    add("--scratch-steps", type=int, default=1000, help="at most, from random weights")
    add("--draws", type=int, default=100, help="of the weights, for every prediction")
    smoke = {"sets": ["boston"], "splits": 1, "steps": 50, "fit_steps": 4, "scratch_steps": 4}
    options = parsed(command, arguments, **smoke, draws=5)
    torch.set_num_threads(1)
    everything: dict[str, Any] = {}
    scored: list[dict[str, str]] = []
    for name, table in tables(options).items():
        begun = time.perf_counter()
        everything[name] = run(name, table, options)
        scored += lines(name, everything[name])
        print(f"{name}: {options.splits} splits in {time.perf_counter() - begun:.0f} s", flush=True)
    report(options, "uci", markdown(scored), everything)


if __name__ == "__main__":
    main()
