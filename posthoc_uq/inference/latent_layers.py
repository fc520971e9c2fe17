"""One latent binary layer: what is trained of it, its forward pass by local reparametrisation, its divergence.

After "Sparsifying Bayesian neural networks with latent binary variables and normalizing flows". A weight is on or
off, ``g ~ Bernoulli(a)``, and Gaussian where it is on, ``s ~ N(mu z, v)``. Without a flow ``z = 1``. With one ``z`` is
random, with an entry for every input of a linear layer and for every output channel of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.affine import AffineCall
from posthoc_uq.inference.latent_moments import SlabPrior, SpikeMoments, gaussian_divergence
from posthoc_uq.inference.mean_field import LOG_VARIANCE
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.flows import Flow, log_normal
from posthoc_uq.reparametrised import LEAST_VARIANCE, WeightMoments, drawn_outputs, normal


@dataclass(frozen=True)
class LayerDraw:
    """What one step knows of a layer.

    Attributes:
        mean: of the weights, in their shape.
        variance: likewise.
        divergence: of weights and biases, for this step's ``z``; with a flow an upper bound, by one draw.
        included: the sum of the weights' inclusion probabilities.
    """

    mean: Tensor
    variance: Tensor
    divergence: Tensor
    included: Tensor


class LatentLayer:
    """The tensors of one layer, leaves to be trained, and what a step computes of them.

    Args:
        layer: its names and shapes.
        tensors: by role: ``"mean"``, ``"log variance"``, ``"logit"`` in the weight's shape; ``"bias mean"``, ``"bias
            log variance"`` where it has a bias; with a flow ``"start_mean"``, ``"start_log_variance"`` (of ``z_0``),
            those of the flow with ``"flow_"`` before their names, those of the auxiliary flow with ``"reverse_"``, and
            ``"along"``, ``"reverse mean"``, ``"reverse log variance"`` (e, d1 and d2), ``(I,)`` each.
        prior: of the weights.
        bias_deviation: of the prior of the biases.
        flow: of ``z``; None for ``z = 1``.
    """

    def __init__(
        self,
        layer: Layer,
        tensors: dict[str, Tensor],
        prior: SlabPrior,
        bias_deviation: float,
        flow: Flow | None = None,
    ) -> None:
        self.layer, self.prior, self.bias_deviation, self.flow = layer, prior, bias_deviation, flow
        self.tensors = {role: tensor.requires_grad_() for role, tensor in tensors.items()}

    def named(self) -> dict[str, Tensor]:
        """Its tensors by names that no other layer has."""
        names: dict[str, Tensor] = {}
        for role, tensor in self.tensors.items():
            owner = self.layer.bias if role.startswith("bias ") else self.layer.weight
            role = LOG_VARIANCE.strip() if role == "bias log variance" else role.removeprefix("bias ")
            names[f"{role} {owner}"] = tensor
        return names

    def draw_z(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        """``z``, ``(I,)``, and ``log q(z)``; None for both without a flow."""
        if self.flow is None:
            return None, None
        mean, log_variance = self.tensors["start_mean"], self.tensors["start_log_variance"]
        start = mean + (0.5 * log_variance).exp() * normal(mean, generator)
        z, determinant = self.flow.forward(start, self._of_flow("flow_"))
        return z, log_normal(start, mean, log_variance) - determinant

    def draw(self, generator: torch.Generator) -> LayerDraw:
        """One step's ``z``, and the moments and the divergence of the weights for it."""
        tensors, (z, log_q) = self.tensors, self.draw_z(generator)
        mean, variance, divergence, included = SpikeMoments.apply(
            tensors["mean"],
            tensors["log variance"],
            tensors["logit"],
            None if z is None else self.along_weights(z),
            self.prior,
        )  # type: ignore[misc]
        if self.layer.bias is not None:
            biases = tensors["bias mean"], tensors["bias log variance"]
            divergence = divergence + gaussian_divergence(*biases, self.bias_deviation)
        if z is not None and log_q is not None:
            divergence = divergence + log_q - self.log_reverse(z, mean, variance, generator)
        return LayerDraw(mean, variance, divergence, included)

    def along_weights(self, z: Tensor) -> Tensor:
        """``z`` in a shape that broadcasts to the weight's."""
        sides = [1] * len(self.layer.weight_shape)
        sides[self._axis] = -1
        return z.reshape(sides)

    @property
    def _axis(self) -> int:
        """The side of the weight that ``z`` goes along."""
        return 1 if self.layer.kind == "linear" else 0

    def log_reverse(self, z: Tensor, mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
        """``log r(z | W, G)`` of the auxiliary distribution, a scalar, for weights drawn by local reparametrisation.

        With ``u = W e`` for every row of weights that share a ``z`` and ``s`` the mean of ``hardtanh(u)`` over the rows
        (of a convolution: of ``u``), a flow of its own takes ``z`` to ``z_B ~ N(d1 s, exp(d2 s))``.

        Args:
            z: that the weights were drawn for, ``(I,)``.
            mean: of the weights, in their shape.
            variance: likewise.
            generator: of the weights.
        """
        assert self.flow is not None
        along, axis = self.tensors["along"], self._axis
        drawn = (mean.movedim(axis, -1) @ along).flatten()
        spread = (variance.movedim(axis, -1) @ along.square()).flatten()
        drawn = drawn + spread.clamp(min=LEAST_VARIANCE).sqrt() * normal(drawn, generator)
        return self.log_reverse_of(z, drawn)

    def log_reverse_of(self, z: Tensor, drawn: Tensor) -> Tensor:
        """`log_reverse` for given ``u``, ``(rows,)``."""
        assert self.flow is not None
        shared = (drawn if self.layer.convolutional else F.hardtanh(drawn)).mean()
        back, determinant = self.flow.forward(z, self._of_flow("reverse_"))
        means = self.tensors["reverse mean"] * shared
        return log_normal(back, means, self.tensors["reverse log variance"] * shared) + determinant

    def outputs(self, call: AffineCall, draw: LayerDraw, generator: torch.Generator) -> Tensor:
        """The layer's outputs, drawn by local reparametrisation."""
        biases: tuple[Tensor, ...] = ()
        if self.layer.bias is not None:
            biases = self.tensors["bias mean"], self.tensors["bias log variance"].exp()
        return drawn_outputs(call, WeightMoments(draw.mean, draw.variance, *biases), generator)

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of weights and biases by name: ``g (mu z + sd e)``, exact."""
        tensors, (z, _) = self.tensors, self.draw_z(generator)
        slab = tensors["mean"] if z is None else tensors["mean"] * self.along_weights(z)
        slab = slab + (0.5 * tensors["log variance"]).exp() * normal(slab, generator)
        chance = torch.rand(slab.shape, generator=generator, dtype=slab.dtype, device=slab.device)
        drawn = {self.layer.weight: slab * (chance < torch.sigmoid(tensors["logit"]))}
        if self.layer.bias is not None:
            mean = tensors["bias mean"]
            drawn[self.layer.bias] = mean + (0.5 * tensors["bias log variance"]).exp() * normal(
                mean, generator
            )
        return drawn

    def flow_tensors(self) -> dict[str, Tensor]:
        """What the flow of ``z`` is, by name, without the auxiliary flow; nothing without a flow."""
        if self.flow is None:
            return {}
        starts = {role: self.tensors[role] for role in ("start_mean", "start_log_variance")}
        return starts | {f"flow_{name}": tensor for name, tensor in self._of_flow("flow_").items()}

    def _of_flow(self, prefix: str) -> Mapping[str, Tensor]:
        return {role.removeprefix(prefix): t for role, t in self.tensors.items() if role.startswith(prefix)}
