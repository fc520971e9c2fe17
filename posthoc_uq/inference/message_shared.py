"""What message passing over a last layer and over a whole network have in common."""

from __future__ import annotations

from typing import Any

import torch

from posthoc_uq.devices import placed
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.message_data import Batches, Units, noise_of
from posthoc_uq.inference.message_options import MessagePassingOptions
from posthoc_uq.inference.task import Task
from posthoc_uq.message_passing.network import Stage
from posthoc_uq.message_passing.passes import Forms
from posthoc_uq.message_passing.targets import Argmax, Regression, Signal, Softargmax
from posthoc_uq.message_passing.trainer import Beliefs, Trainer
from posthoc_uq.posteriors.dense import LARGEST_BYTES
from posthoc_uq.randomness import mixed_seed

PRIOR, _ORDER, _VISITS, TEMPERATURE = 401, 402, 403, 404  # streams of the seed


def signal_of(task: Task, options: MessagePassingOptions, units: Units | None) -> Signal:
    """What the targets of a fit say of the outputs."""
    if task.settings.likelihood.noise_variance is not None:
        noise = noise_of(task.settings.likelihood, units)
        noise = placed(noise, task.device) if units is None else noise
        return Regression(noise if noise.numel() > 1 else float(noise))
    if options.signal == "argmax":
        return Argmax(regularize=options.regularize)
    return Softargmax()


def order_seed(task: Task) -> int:
    return mixed_seed(task.settings.seed, _ORDER)


def trained(
    task: Task,
    options: MessagePassingOptions,
    stages: list[Stage],
    prior: Beliefs,
    data: Batches,
    signal: Signal,
) -> Trainer:
    numbers = sum(part.rho.numel() for belief in prior.values() for part in belief)
    schedule = options.schedule(data.samples)
    size = 16 * numbers * len(data)
    if schedule.epochs > 1 and size > LARGEST_BYTES:
        raise PosthocUQError(
            f"The messages of {len(data)} batches to {numbers:,} weights take {size / 2**30:.1f} GiB, more than "
            f"{LARGEST_BYTES / 2**30:.0f}; raise {'group_size' if options.grouped else 'batch_size'}, or take epochs=1."
        )
    forms = Forms(
        grouped=options.grouped, matmul=options.matmul, numbers=max(2**14, task.memory_budget // 64)
    )
    seed = mixed_seed(task.settings.seed, _VISITS) % 2**63
    trainer = Trainer(stages, prior, data, signal, schedule, forms, seed)
    with torch.no_grad():
        trainer.run()
    return trainer


def visits(trainer: Trainer) -> dict[str, Any]:
    return {
        "epochs": trainer.schedule.epochs,
        "batches": len(trainer.data),
        "share of a new message": trainer.share,
        "visits begun anew": trainer.restarts,
    }
