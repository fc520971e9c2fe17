"""The random factor of the means of one layer's weights, made by a flow; how files describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.fields import Field, Flag, Text, Whole
from posthoc_uq.posteriors.blocks import Shape, bounded
from posthoc_uq.posteriors.flows import Flow, Form
from posthoc_uq.posteriors.specs import TensorSpec

Along = Literal["inputs", "outputs"]

MOST_UNITS, MOST_STEPS = 2000, 16
"""The largest flow: hidden units, and steps."""

_MOMENT_DRAWS = 4096  # of z, for its mean and variance


@dataclass(frozen=True)
class RandomScale:
    """The factor ``z`` of the means of one layer.

    Attributes:
        along: ``"inputs"``, or ``"outputs"`` of all groups.
        bias: whether the layer's last column is a bias, which it does not scale.
        flow: that makes ``z`` of normals.
        tensors: ``start_mean`` and ``start_log_variance``, ``(I,)``, and those of the flow with ``flow_`` before their
            names; ``z_mean`` and ``z_variance``, ``(I,)``, over many draws.
    """

    along: Along
    bias: bool
    flow: Flow
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, along: Along, bias: bool, flow: Flow, tensors: Mapping[str, Tensor], seed: int
    ) -> RandomScale:
        """With mean and variance of ``z`` over 4,096 draws: their errors are 1.6 % of its deviation, and 2.2 %."""
        scale = cls(along, bias, flow, tensors)
        draws = scale.draws(torch.Generator().manual_seed(seed), _MOMENT_DRAWS)
        moments = {"z_mean": draws.mean(0), "z_variance": draws.var(0)}
        return cls(along, bias, flow, {**tensors, **moments})

    def attributes(self) -> dict[str, Any]:
        """Plain values that describe it beside its tensors."""
        flow = {"form": self.flow.form, "units": self.flow.hidden, "steps": self.flow.steps}
        return {"along": self.along} | flow

    def draws(self, generator: torch.Generator, count: int) -> Tensor:
        """``(count, I)``, from a generator of the CPU."""
        mean = self.tensors["start_mean"]
        normal = torch.randn(count, len(mean), generator=generator, dtype=mean.dtype, device="cpu").to(mean)
        start = mean + (0.5 * self.tensors["start_log_variance"]).exp() * normal
        flow_tensors = {
            name.removeprefix("flow_"): t for name, t in self.tensors.items() if name.startswith("flow_")
        }
        return self.flow.forward(start, flow_tensors)[0]

    def matrix(self, values: Tensor, shape: Shape, rest: float) -> Tensor:
        """One number for each ``z``, ``(I,)``, over a layer's matrix ``(G, m, n)``, with `rest` for its bias."""
        groups, outputs, inputs = shape
        if self.along == "outputs":
            spread = values.reshape(groups, outputs, 1).expand(-1, -1, inputs - self.bias)
        else:
            spread = values.reshape(1, 1, -1).expand(groups, outputs, -1)
        if not self.bias:
            return spread
        return torch.cat([spread, spread.new_full((groups, outputs, 1), rest)], dim=-1)


SCALE_FIELDS: dict[str, Field] = {
    "along": Text(("", "inputs", "outputs")),
    "bias": Flag(),
    "form": Text(("autoregressive", "coupling")),
    "units": Whole(0, MOST_UNITS),
    "steps": Whole(0, MOST_STEPS),
}
"""What a file says of it; and whether the layer has biases, which it needs."""


WITHOUT: dict[str, Any] = {"along": "", "form": "autoregressive", "units": 0, "steps": 0}
"""What a file says where there is none."""


def _flow_of(shape: Shape, attributes: Mapping[str, Any]) -> Flow | None:
    along = attributes.get("along", "")
    if along not in ("inputs", "outputs"):
        return None
    groups, outputs, inputs = shape
    size = groups * outputs if along == "outputs" else inputs - bool(attributes.get("bias"))
    steps, units = (
        bounded(attributes, "steps", 1, MOST_STEPS),
        bounded(attributes, "units", 1, MOST_UNITS),
    )
    if size < 1 or (along == "inputs" and groups != 1):
        raise CorruptPosteriorError(f"A flow along the {along} does not fit a layer of shape {shape}.")
    return Flow(size, units, steps, cast(Form, attributes.get("form")))


def scale_specs(shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """What its tensors must be for a layer of this shape; none where the attributes describe none.

    Raises:
        CorruptPosteriorError: they do not fit the layer.
    """
    flow = _flow_of(shape, attributes)
    if flow is None:
        return {}
    one = (flow.size,)
    specs = {"start_mean": TensorSpec(one), "start_log_variance": TensorSpec(one, largest=60.0)}
    specs |= {"z_mean": TensorSpec(one), "z_variance": TensorSpec(one, non_negative=True)}
    return specs | {f"flow_{name}": TensorSpec(sides) for name, sides in flow.shapes().items()}


def restored_scale(
    shape: Shape, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> RandomScale | None:
    """The factor that attributes and tensors described, or None."""
    flow = _flow_of(shape, attributes)
    if flow is None:
        return None
    kept = {name: tensors[name] for name in scale_specs(shape, attributes)}
    return RandomScale(cast(Along, attributes["along"]), bool(attributes["bias"]), flow, kept)


def most_of_scale(shape: Shape) -> int:
    """The numbers of the largest one for a layer of this shape."""
    groups, outputs, inputs = shape
    size = max(groups * outputs, inputs)
    return 4 * size + MOST_STEPS * (3 * size * MOST_UNITS + MOST_UNITS**2 + 2 * MOST_UNITS + 2 * size)
