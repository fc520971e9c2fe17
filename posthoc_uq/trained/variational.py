"""Blocks of trained posteriors: independent Gaussians, spike and slab with flows, the median model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log, pi, prod
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.core.numerics import constant
from posthoc_uq.core.options import Count
from posthoc_uq.core.records import Record
from posthoc_uq.posteriors.block import (
    BITS,
    GROUPS,
    INPUTS,
    OUTPUTS,
    WEIGHTS,
    AnyBlock,
    Block,
    MatrixShape,
    PrecisionSettings,
    Size,
    TensorField,
    TensorSpec,
    check_bounds,
    largest_of,
    packed,
    unpacked,
)
from posthoc_uq.posteriors.covariance import Covariance, Independent

FlowForm = Literal["autoregressive", "coupling"]

_START_BIAS = 2.0  # of ``s``: a step begins by keeping 0.88 of its input


@dataclass(frozen=True)
class Flow:
    """A normalising flow of gated steps over a vector; its tensors are given to `forward`.

    A step takes ``z`` to ``k * z + (1 - k) * m`` with ``k = sigmoid(s)`` and ``(m, s) = g(z)`` (Kingma et al. 2016,
    "Improving variational inference with inverse autoregressive flow", eq. 13 and 14). Where a coordinate's ``m`` and
    ``s`` depend on none of its own and later coordinates, the Jacobian is triangular, and its log-determinant is ``sum
    log k``. ``g`` is a network of two hidden layers whose weights are masked so (Germain et al. 2015, "MADE"). The
    order of the coordinates turns round from step to step.

    Attributes:
        size: of the vector, I.
        hidden: units in each of the two hidden layers of a step, H.
        steps: K.
        form: ``"autoregressive"``, or ``"coupling"``: every step moves one half of the coordinates by the other half
            (Dinh, Sohl-Dickstein, Bengio 2017, "Density estimation using Real NVP").
    """

    size: int
    hidden: int
    steps: int = 2
    form: FlowForm = "autoregressive"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors by name."""
        sizes = [self.size, self.hidden, self.hidden, 2 * self.size]
        shapes: dict[str, tuple[int, ...]] = {}
        for step in range(self.steps):
            for layer in range(3):
                shapes[f"step{step}_weight{layer}"] = (sizes[layer + 1], sizes[layer])
                shapes[f"step{step}_bias{layer}"] = (sizes[layer + 1],)
        return shapes

    def initial(
        self, generator: torch.Generator, like: Tensor, *, shift: float | None = None
    ) -> dict[str, Tensor]:
        """Tensors to begin a training with: uniform as those of `torch.nn.Linear`.

        Args:
            generator: of the CPU.
            like: has their number format and device.
            shift: what every ``m`` is at the start, whatever ``z`` is: the output weights are zero then.
        """
        tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            inputs = shape[-1] if len(shape) == 2 else tensors[name.replace("bias", "weight")].shape[-1]
            tensors[name] = (torch.rand(shape, generator=generator, device="cpu") * 2 - 1) / inputs**0.5
        for step in range(self.steps):
            weight, bias = tensors[f"step{step}_weight2"], tensors[f"step{step}_bias2"]
            bias[self.size :] = _START_BIAS
            if shift is not None:
                bias[: self.size] = shift
                weight.zero_()
        return {name: tensor.to(like) for name, tensor in tensors.items()}

    def forward(self, z: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``z_K``, ``(..., I)``, and ``log |det dz_K / dz|``, ``(...)``.

        Args:
            z: ``(..., I)``.
            tensors: of the flow, by name.
        """
        total = z.new_zeros(z.shape[:-1])
        for step in range(self.steps):
            *masks, moved = _masks(self, step, z.device)
            kept = z if self.form == "autoregressive" else z * (1 - moved).to(z)
            for layer, mask in enumerate(masks):
                weight = tensors[f"step{step}_weight{layer}"]
                weight = weight if self.form == "coupling" else weight * mask
                kept = F.linear(kept, weight, tensors[f"step{step}_bias{layer}"])
                kept = F.leaky_relu(kept, 0.2) if layer < 2 else kept
            m, s = kept.split(self.size, dim=-1)
            z, determinant = gated_step(z, m, s, None if self.form == "autoregressive" else moved.to(z))
            total = total + determinant
        return z, total


def gated_step(z: Tensor, m: Tensor, s: Tensor, moved: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``k z + (1 - k) m`` with ``k = sigmoid(s)``, and ``sum log k``: the log-determinant where ``m`` and ``s`` of a
    coordinate depend on none of its own and later ones.

    Args:
        z: ``(..., I)``.
        m: likewise.
        s: likewise.
        moved: 1 for the coordinates that move, ``(I,)``; None for all.
    """
    gate = torch.sigmoid(s)
    moving, logs = m + gate * (z - m), F.logsigmoid(s)
    if moved is None:
        return moving, logs.sum(-1)
    return torch.where(moved > 0, moving, z), (logs * moved).sum(-1)


@lru_cache(maxsize=64)
def _masks(flow: Flow, step: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the three weights of a step, true where an entry may differ from zero; and 1 for the coordinates that the
    step moves, ``(I,)``.
    """
    size, hidden = flow.size, flow.hidden
    degrees = torch.arange(1, size + 1, device=device)
    if flow.form == "coupling":
        moved = (degrees <= size // 2) == bool(step % 2) if size > 1 else degrees > 0
        every = torch.ones(1, 1, device=device)
        return every, every, every, moved.float()
    if step % 2:
        degrees = degrees.flip(0)
    units = torch.arange(hidden, device=device)
    if hidden < size - 1:  # spread, so that the first coordinates are not the only ones that others depend on
        units = units * (size - 1) // hidden + 1
    else:
        units = units % max(size - 1, 1) + 1
    first = units.unsqueeze(1) >= degrees
    second = units.unsqueeze(1) >= units
    last = degrees.unsqueeze(1) > units
    # as truth values, since the masks of the last flows are kept
    return first, second, torch.cat([last, last]), torch.ones(size, device=device)


def log_normal(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """``log N(x; mean, diag exp(log_variance))``, summed over the last dimension."""
    squares = (x - mean).square() * (-log_variance).exp()
    return -0.5 * (_LOG_2PI + log_variance + squares).sum(-1)


_LOG_2PI = log(2 * pi)


Along = Literal["inputs", "outputs"]

MAX_UNITS, MAX_STEPS = 2000, 16
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

    def draws(self, generator: torch.Generator, count: int) -> Tensor:
        """``(count, I)``, from a generator of the CPU."""
        mean = self.tensors["start_mean"]
        normal = torch.randn(count, len(mean), generator=generator, dtype=mean.dtype, device="cpu").to(mean)
        start = mean + (0.5 * self.tensors["start_log_variance"]).exp() * normal
        flow_tensors = {
            name.removeprefix("flow_"): t for name, t in self.tensors.items() if name.startswith("flow_")
        }
        return self.flow.forward(start, flow_tensors)[0]

    def matrix(self, values: Tensor, shape: MatrixShape, rest: float) -> Tensor:
        """One number for each ``z``, ``(I,)``, over a layer's matrix ``(G, m, n)``, with `rest` for its bias."""
        groups, outputs, inputs = shape
        if self.along == "outputs":
            spread = values.reshape(groups, outputs, 1).expand(-1, -1, inputs - self.bias)
        else:
            spread = values.reshape(1, 1, -1).expand(groups, outputs, -1)
        if not self.bias:
            return spread
        return torch.cat([spread, spread.new_full((groups, outputs, 1), rest)], dim=-1)


class ScaleFields(Record):
    """What a file says of it."""

    along: Literal["", "inputs", "outputs"]
    form: FlowForm
    units: Annotated[int, Field(ge=0, le=MAX_UNITS)]
    steps: Annotated[int, Field(ge=0, le=MAX_STEPS)]


def _flow_of(shape: MatrixShape, attributes: Mapping[str, Any]) -> Flow | None:
    """The flow that attributes describe for a layer of this shape; None where they describe none.

    Raises:
        CorruptPosteriorError: it does not fit the layer.
    """
    along = attributes.get("along", "")
    if along not in ("inputs", "outputs"):
        return None
    groups, outputs, inputs = shape
    size = groups * outputs if along == "outputs" else inputs - bool(attributes.get("bias"))
    steps, units = (
        check_bounds(attributes, "steps", 1, MAX_STEPS),
        check_bounds(attributes, "units", 1, MAX_UNITS),
    )
    if size < 1 or (along == "inputs" and groups != 1):
        raise CorruptPosteriorError(f"A flow along the {along} does not fit a layer of shape {shape}.")
    return Flow(size, units, steps, cast(FlowForm, attributes.get("form")))


def _scale_specs(flow: Flow) -> dict[str, TensorSpec]:
    one = (flow.size,)
    specs = {"start_mean": TensorSpec(one), "start_log_variance": TensorSpec(one, largest=60.0)}
    specs |= {"z_mean": TensorSpec(one), "z_variance": TensorSpec(one, non_negative=True)}
    return specs | {f"flow_{name}": TensorSpec(sides) for name, sides in flow.shapes().items()}


class SpikeAndSlab(Independent):
    """Weights that are off with some probability, and else Gaussian: ``w = g (mu z + sd e)`` with ``g ~
    Bernoulli(inclusion)``. The factor ``z`` is 1, or a random vector from a flow that all weights of an input (linear
    layers), or of an output channel (convolutions), have in common.
    """

    centred = False

    def __init__(self, mean: Tensor, variances: Tensor, inclusion: Tensor, scale: RandomScale | None) -> None:
        self._mean, self._variances, self._inclusion, self._scale = mean, variances, inclusion, scale
        self.shared = scale is not None

    def _slab(self, generator: torch.Generator) -> Tensor:
        """The means where the weights are on, for a draw of ``z``."""
        if self._scale is None:
            return self._mean
        z = self._scale.draws(generator, 1)[0]
        return self._mean * self._scale.matrix(z, cast(MatrixShape, tuple(self._mean.shape)), 1.0)

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        options: dict[str, Any] = {"generator": generator, "dtype": like.dtype}
        slab = self._slab(generator)
        slab = slab + self._variances.sqrt() * torch.randn(like.shape, device="cpu", **options).to(
            like.device
        )
        chosen = torch.rand(like.shape, device="cpu", **options).to(like.device) < self._inclusion
        return torch.where(chosen, slab, torch.zeros_like(slab))

    def independent(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``a c`` and ``a (v + (1 - a) c^2)`` with ``c = mu z``."""
        slab = self._slab(generator)
        spread = self._variances + (1 - self._inclusion) * slab.square()
        return self._inclusion * slab, self._inclusion * spread

    def mean(self) -> Tensor:
        """``E w``, ``(G, m, n)``."""
        mean = self._inclusion * self._mean
        return mean if self._scale is None else mean * self._over("z_mean", 1.0)

    log_determinant = Covariance.log_determinant  # there is none

    @constant
    def weights(self) -> Tensor:
        """Their variances, ``a (v + (1 - a) mu^2 E[z]^2 + mu^2 Var z)``."""
        slab = self._mean if self._scale is None else self._mean * self._over("z_mean", 1.0)
        inside = self._variances + (1 - self._inclusion) * slab.square()
        if self._scale is not None:
            inside = inside + self._mean.square() * self._over("z_variance", 0.0)
        return self._inclusion * inside

    def _over(self, name: str, rest: float) -> Tensor:
        assert self._scale is not None
        return self._scale.matrix(self._scale.tensors[name], cast(MatrixShape, tuple(self._mean.shape)), rest)


@dataclass(eq=False, repr=False)
class LatentBlock(Block):
    """What both kinds have in common: a mean of their own, no hyperparameter that could be set, perhaps a flow.

    Attributes:
        bias: whether the last column holds biases, which are always on.
        scale: the factor ``z`` of the means, or None.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "density, mean inclusion": "share of the weights that are more likely on than off; mean probability of being on"
    }
    heads_note: ClassVar[str] = (
        "drawn weights are exact; the moments and the linearised head match the mean and the variance of every weight"
    )

    makes = SpikeAndSlab
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset()
    fixed_by_training: ClassVar[frozenset[str]] = frozenset({"prior_precision"})

    bias: bool = field(kw_only=True)
    scale: RandomScale | None = field(default=None, kw_only=True, metadata={"in_file": False})

    @abstractmethod
    def slabs(self) -> tuple[Tensor, Tensor]:
        """Means, without ``z``, and variances of the weights where they are on, ``(G, m, n)``."""

    @abstractmethod
    def inclusions(self) -> Tensor:
        """Probabilities of being on, ``(G, m, n)``; those of biases are 1."""

    def probabilities(self) -> Tensor:
        """Of being on, ``(G, m, n)``; without the column of biases."""
        inclusion = self.inclusions()
        return inclusion[..., : inclusion.shape[-1] - self.bias]

    def covariance(self, settings: PrecisionSettings) -> SpikeAndSlab:
        return SpikeAndSlab(*self.slabs(), self.inclusions(), self.scale)

    def stored_mean(self) -> Tensor:
        return self.covariance(PrecisionSettings(1.0, 1.0)).mean()

    def summary(self) -> dict[str, Any]:
        chances = self.probabilities()
        return {"density": float((chances > 0.5).float().mean()), "mean inclusion": float(chances.mean())}

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | ({} if self.scale is None else dict(self.scale.tensors))

    def attributes(self) -> dict[str, Any]:
        of_scale: dict[str, Any] = {"along": "", "form": "autoregressive", "units": 0, "steps": 0}
        if self.scale is not None:
            flow = self.scale.flow
            of_scale = {
                "along": self.scale.along,
                "form": flow.form,
                "units": flow.hidden,
                "steps": flow.steps,
            }
        return super().attributes() | of_scale

    @classmethod
    def specs(cls, shape: MatrixShape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        flow = _flow_of(shape, attributes)
        return super().specs(shape, attributes) | ({} if flow is None else _scale_specs(flow))

    @classmethod
    def most_numbers(cls, shape: MatrixShape) -> int:
        groups, outputs, inputs = shape
        size = max(groups * outputs, inputs)
        of_flow = MAX_STEPS * (3 * size * MAX_UNITS + MAX_UNITS**2 + 2 * MAX_UNITS + 2 * size)
        return super().most_numbers(shape) + 4 * size + of_flow

    @classmethod
    def restore(
        cls: type[AnyBlock], attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> AnyBlock:
        shape = tuple(attributes["shape"] if "shape" in attributes else tensors["means"].shape)
        flow, block = _flow_of(cast(MatrixShape, shape), attributes), super().restore(attributes, tensors)
        if flow is not None:
            kept = {name: tensors[name] for name in _scale_specs(flow)}
            cast(LatentBlock, block).scale = RandomScale(attributes["along"], block.bias, flow, kept)
        return block

    def largest_value(self, settings: PrecisionSettings) -> float:
        means, variances = self.slabs()
        return max(largest_of(variances), largest_of(means) ** 2)


@dataclass(eq=False, repr=False)
class LatentBinaryBlock(LatentBlock):
    """Means, variances and inclusion probabilities of all weights, ``(G, m, n)``; those of biases are 1.

    Attributes:
        means: ``mu``.
        variances: of the slabs.
        inclusion: in [0, 1].
    """

    kind = "latent_binary"
    fields: ClassVar[type[Record]] = ScaleFields

    means: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS)]
    variances: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    inclusion: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True, largest=1.0)]

    def slabs(self) -> tuple[Tensor, Tensor]:
        return self.means, self.variances

    def inclusions(self) -> Tensor:
        return self.inclusion


class MedianFields(ScaleFields):
    """Also the shape of the layer's matrix, and whether the weights that are kept are certain."""

    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    certain: bool


_KEPT = Size("kept", 0, WEIGHTS)


@dataclass(eq=False, repr=False)
class MedianBlock(LatentBlock):
    """The median probability model: the weights of a spike-and-slab posterior whose inclusion is above one half, and
    no others (Barbieri, Berger 2004, "Optimal predictive model selection").

    Attributes:
        means: ``(kept,)``, in row-major order.
        variances: ``(kept,)``, or ``(0,)`` where the weights are certain.
        kept: one bit for each weight of the matrix ``(G, m, n)``, packed eight to a byte, the first the highest.
        shape: ``(G, m, n)``.
    """

    kind = "median_model"
    fields: ClassVar[type[Record]] = MedianFields

    means: Annotated[Tensor, TensorField(_KEPT)]
    variances: Annotated[Tensor, TensorField(_KEPT, non_negative=True)]
    kept: Annotated[Tensor, TensorField(BITS, bits=True, largest=255.0)]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)

    def mask(self) -> Tensor:
        """Which weights are kept, ``(G, m, n)``."""
        return unpacked(self.kept, prod(self.shape)).reshape(self.shape)

    def _spread(self, values: Tensor) -> Tensor:
        """Numbers of the kept weights, and zeros for the others."""
        return values.new_zeros(self.shape).masked_scatter_(self.mask(), values)

    def slabs(self) -> tuple[Tensor, Tensor]:
        means = self._spread(self.means)
        return means, self._spread(self.variances) if len(self.variances) else torch.zeros_like(means)

    def inclusions(self) -> Tensor:
        return self.mask().to(self.means)

    def attributes(self) -> dict[str, Any]:
        own = {"shape": list(self.shape), "kept": len(self.means), "certain": not len(self.variances)}
        return super().attributes() | own

    @classmethod
    def specs(cls, shape: MatrixShape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        if tuple(attributes.get("shape", ())) != tuple(shape):
            raise CorruptPosteriorError(f"A median model of shape {shape} is described by another shape.")
        specs = super().specs(shape, attributes)
        return specs | ({"variances": TensorSpec((0,))} if attributes.get("certain") else {})

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MedianBlock:
        block = super().restore(attributes, tensors)
        fault = block.fault()
        if fault is not None:  # before anything spreads its numbers over the matrix
            raise CorruptPosteriorError(f"A median model {fault}.")
        return block

    def fault(self) -> str | None:
        counted, mask = int(unpacked(self.kept, 8 * len(self.kept)).sum()), self.mask()
        if not counted == int(mask.sum()) == len(self.means):
            return "keeps another number of weights than it says"
        return "leaves out biases, which are always on" if self.bias and not mask[..., -1].all() else None


def median_of(block: LatentBlock, *, certain: bool = False) -> MedianBlock:
    """The weights of inclusion above one half, which are on for certain.

    Args:
        block: of either kind; the median model of a median model is itself.
        certain: leave the variances out and fold the mean of ``z`` in: one network, at its means.
    """
    (means, variances), kept = block.slabs(), block.inclusions() > 0.5
    if certain and block.scale is not None:
        shape = cast(MatrixShape, tuple(means.shape))
        means = means * block.scale.matrix(block.scale.tensors["z_mean"], shape, 1.0)
    return MedianBlock(
        means[kept],
        variances.new_zeros(0) if certain else variances[kept],
        packed(kept),
        tuple(means.shape),
        bias=block.bias,
        scale=None if certain else block.scale,
    )
