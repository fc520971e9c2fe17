"""A method that trains, with posteriors that can be drawn from and nothing else, as somebody who uses the package would
write it: options, loss and blocks; see `test_new_method` and `test_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

import posthoc_uq as uq
from posthoc_uq.core import Batch, DeferredChecks, Share, mixed_seed, output_tensor, replicate
from posthoc_uq.methods import Task
from posthoc_uq.posteriors import GROUPS, INPUTS, OUTPUTS, Block, Covariance, PrecisionSettings, TensorField
from posthoc_uq.trained import Group, Objective, Step, Training, check_trainable


@uq.register_method
@dataclass(frozen=True, kw_only=True)
class SpikeAndSlab(Training["Spikes"]):
    """Every weight is zero with the same probability, and else a Gaussian around the trained one with a variance that
    is trained: ``E[-log p(y | x)] + KL(N(w, v) || N(w, 1 / prior_precision)) / N``.

    Attributes:
        kept: the probability of not being zero, above 0 and at most 1.
    """

    name: ClassVar[str] = "spike_slab"
    block_kinds: ClassVar[tuple[str, ...]] = ("spike_slab",)
    tunable: ClassVar[frozenset[str]] = frozenset({"noise_scale", "temperature"})

    kept: Share = 0.9

    def begin(self, task: Task) -> Spikes:
        return Spikes(self, task)

    def blocks(self, task: Task, trained: Spikes) -> dict[str, Block]:
        made: dict[str, Block] = {}
        for name, layer in task.layers.items():
            mean, log = (
                layer.to_matrix(held[layer.weight], None if layer.bias is None else held[layer.bias])
                for held in (trained.means, trained.logs)
            )
            made[name] = SpikeBlock(mean, log.detach().exp(), torch.full_like(mean, self.kept))
        return made


class Spikes(Objective):
    """The variances of the slabs; the means stay where they are."""

    def __init__(self, method: SpikeAndSlab, task: Task) -> None:
        super().__init__(replicate(task.model), task.likelihood, task.count())
        held = dict(task.model.named_parameters())
        names = [name for layer in task.layers.values() for name in layer.parameter_names]
        check_trainable(method.name, held, names)
        self.method, self.means = method, {name: held[name].detach() for name in names}
        self.logs = {n: torch.full_like(mean, -6.0).requires_grad_() for n, mean in self.means.items()}

    def groups(self) -> list[Group]:
        return [{"params": self.logs, "lr": self.method.log_variance_lr, "name": "log variances"}]

    def drawn(self, batch: Batch, *seed: int) -> Tensor:
        generator, weights = torch.Generator().manual_seed(mixed_seed(*seed)), dict[str, Tensor]()
        for name, mean in self.means.items():
            normals = torch.randn(mean.shape, generator=generator).to(mean)
            kept = torch.rand(mean.shape, generator=generator).to(mean) < self.method.kept
            weights[name] = (mean + (0.5 * self.logs[name]).exp() * normals) * kept
        copied = batch.copied()
        return output_tensor(functional_call(self.network, weights, copied.args, copied.kwargs))

    def loss(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        outputs = self.drawn(batch, step.seed)
        fit = self.log_prob(outputs, *self.targets(batch, outputs, checks)).mean()
        tau = self.method.precision
        parts = [0.5 * (tau * log.exp() - 1 - log - math.log(tau)).sum() for log in self.logs.values()]
        divergence = torch.stack(parts).sum()
        return {"loss": divergence / self.samples - fit, "log likelihood": fit, "KL": divergence}

    def outputs(self, batch: Batch, draw: int) -> Tensor:
        return self.drawn(batch, 0, draw)


class SpikeAndSlabWeights(Covariance):
    """Weights that are zero with some probability, and else Gaussian: no Gaussian, and not symmetric."""

    centred = False

    def __init__(self, mean: Tensor, variances: Tensor, inclusion: Tensor) -> None:
        self.mean, self.variances, self.inclusion = mean, variances, inclusion

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        kept = torch.rand(like.shape, generator=generator).to(like) < self.inclusion
        slab = self.mean + self.variances.sqrt() * torch.randn(like.shape, generator=generator).to(like)
        return torch.where(kept, slab, torch.zeros_like(slab))


@dataclass(eq=False, repr=False)
class SpikeBlock(Block):
    """Means and variances of the slabs, and the probabilities of not being zero, ``(G, m, n)`` each."""

    kind = "spike_slab"
    makes = SpikeAndSlabWeights
    tunable: ClassVar[frozenset[str]] = frozenset()

    mean: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS)]
    variances: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    inclusion: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True, largest=1.0)]

    def covariance(self, settings: PrecisionSettings) -> SpikeAndSlabWeights:
        return SpikeAndSlabWeights(self.mean, self.variances, self.inclusion)

    def summary(self) -> dict[str, Any]:
        return {"included": float(self.inclusion.mean())}
