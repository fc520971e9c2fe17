"""The tensors of a posterior's file: where each stands, its shape, what its numbers may be, how large a file can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.core.numerics import all_finite
from posthoc_uq.curvature.statistics import MAX_ASYMMETRY
from posthoc_uq.files.hdf5 import link_name
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.block import (
    BLOCKS,
    FAMILIES,
    OUTPUTS_ALONE,
    Block,
    MatrixShape,
    TensorSpec,
)
from posthoc_uq.posteriors.posterior import Posterior

# Number formats: how torch holds them, and how the file does (bfloat16 as its bits).
STORED = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.uint8: "|u1",  # packed bits
}
FORMATS = {stored: dtype for dtype, stored in STORED.items()}


def as_array(tensor: Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """A tensor's numbers as the file holds them."""
    tensor = tensor.detach().to(dtype).cpu().contiguous()
    if dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("<u2")
    return tensor.numpy().astype(STORED[dtype], copy=False)


# The HDF5 groups
BLOCKS_GROUP, MEAN, FEATURES = "blocks", "trained_mean", "features"
PRIOR_MEAN, PRIOR_PRECISION = "prior_mean", "prior_precision"  # of single weights


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of a posterior.

    Attributes:
        group: the HDF5 group that it is in.
        owner: whose it is, in words.
        name: its name there.
        spec: what it must be.
    """

    group: str
    owner: str
    name: str
    spec: TensorSpec

    @property
    def path(self) -> str:
        """Of the dataset."""
        return f"{self.group}/{link_name(self.name)}"

    @property
    def keeps_format(self) -> bool:
        """Whether it keeps its number format in a file that is saved in a narrower one."""
        return self.spec.bits or self.spec.exact or self.group in (MEAN, PRIOR_MEAN, PRIOR_PRECISION)


def block_group(block: str) -> str:
    """The HDF5 group of a block."""
    return f"{BLOCKS_GROUP}/{link_name(block)}"


def slots(group: str, owner: str, specs: Mapping[str, TensorSpec]) -> list[TensorSlot]:
    """The slots of one group."""
    return [TensorSlot(group, owner, name, spec) for name, spec in specs.items()]


def tensors_of(posterior: Posterior) -> list[tuple[TensorSlot, Tensor]]:
    """Every tensor that a file keeps."""
    found: list[tuple[TensorSlot, Tensor]] = []
    for name, block in posterior.blocks.items():
        specs, tensors = block.specs(posterior.layout.shape(name), block.attributes()), block.tensors()
        for slot in slots(block_group(name), f"block '{name}'", specs):
            found.append((slot, tensors[slot.name]))
    prior = posterior.weight_prior
    for group, owner, tensors in (
        (MEAN, "the trained mean", stored_mean(posterior)),
        (PRIOR_MEAN, "the prior", prior.mean if isinstance(prior.mean, Mapping) else {}),
        (PRIOR_PRECISION, "the prior", prior.precision),
    ):
        for name, tensor in tensors.items():
            found.append((TensorSlot(group, owner, name, TensorSpec(tuple(tensor.shape))), tensor))
    if posterior.features is not None:
        specs, tensors = (
            posterior.features.specs(posterior.features.attributes()),
            posterior.features.tensors(),
        )
        for slot in slots(FEATURES, "the features", specs):
            found.append((slot, tensors[slot.name]))
    return found


def stored_mean(posterior: Posterior) -> dict[str, Tensor]:
    """The part of a trained mean that no block stores itself."""
    if not posterior.trained_mean:
        return {}
    in_blocks = {
        parameter
        for name, block in posterior.blocks.items()
        if block.stored_mean() is not None
        for layer in posterior.members[name]
        for parameter in posterior.layers[layer].parameter_names
    }
    return {name: tensor for name, tensor in posterior.trained_mean.items() if name not in in_blocks}


def parameter_shapes(layers: Iterable[Layer]) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shapes[layer.weight] = layer.weight_shape
        if layer.bias is not None:
            shapes[layer.bias] = (layer.groups * layer.outputs,)
    return shapes


MAX_SKEW = 0.05
"""How far the rows of ``U^T U`` may lie from those of the identity, in the Euclidean norm. Rounding a basis to bfloat16
moves them by less than 0.01."""
_MAX_EXACT_COLUMNS = 512  # of a basis whose products are all formed; of more, some random combinations
_PROBES = 32


def find_fault(spec: TensorSpec, tensor: Tensor) -> str | None:
    """What is wrong with the numbers of a tensor, in words, or None."""
    if spec.bits != (tensor.dtype == torch.uint8):
        return "does not hold packed bits" if spec.bits else "holds packed bits in place of numbers"
    if not all_finite(tensor):
        return "holds NaN or infinity"
    if not tensor.numel():
        return None
    if float(tensor.abs().max()) > spec.largest:
        return f"holds numbers beyond {spec.largest:g}"
    checked = tensor.diagonal(dim1=-2, dim2=-1) if spec.symmetric else tensor
    if (spec.non_negative or spec.symmetric) and bool((checked < 0).any()):
        return "holds negative numbers where a variance must stand"
    if spec.symmetric and _asymmetry(tensor) > MAX_ASYMMETRY:
        return "is not symmetric"
    if spec.orthonormal and _skew(tensor, spec.padded) > MAX_SKEW:
        return f"does not have orthonormal columns, to {MAX_SKEW:g}"
    return None


def _asymmetry(matrices: Tensor) -> float:
    difference = (matrices - matrices.transpose(-1, -2)).abs().max()
    return float(difference / matrices.abs().max().clamp(min=torch.finfo(matrices.dtype).tiny))


def _skew(basis: Tensor, padded: bool) -> float:
    """The largest norm of a row of ``U^T U - 1``; with many columns, its estimate from random combinations."""
    width = basis.shape[-1]
    if width > basis.shape[-2]:
        return float("inf")
    wide = basis if basis.dtype == torch.float64 else basis.float()
    if width <= _MAX_EXACT_COLUMNS:
        probes = torch.eye(width, dtype=wide.dtype, device=wide.device)
    else:
        # Drawn by a hash of the basis: the same file always passes or never, and none can be made to pass.
        numbers = basis.detach().cpu().contiguous().view(torch.uint8).numpy()
        source = torch.Generator().manual_seed(int.from_bytes(sha256(numbers.data).digest()[:7], "big"))
        probes = torch.randn(width, _PROBES, generator=source, dtype=wide.dtype, device="cpu").to(wide.device)
        probes = probes / _PROBES**0.5
    identity = probes * (wide != 0).any(-2).unsqueeze(-1) if padded else probes
    rows = wide.transpose(-1, -2) @ (wide @ probes) - identity
    return float(rows.square().sum(-1).max().sqrt())


_MAX_NUMBER_BYTES = 8  # of the widest format
_SPARE = 64 * 2**20  # for the description, HDF5's records, and what is kept of the last layer's inputs


def size_limit(kind: str, model: nn.Module) -> int:
    """The most bytes that a file of this method and model can have, found before any of it is read.

    Raises:
        CorruptPosteriorError: no class is known for the blocks of that method.
    """
    weights = list(_weights(model))
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    if kind == OUTPUTS_ALONE:
        return _SPARE
    known = [BLOCKS[name] for name in FAMILIES[kind] if name in BLOCKS]
    if not known:
        named = " or ".join(map(repr, FAMILIES[kind]))
        raise CorruptPosteriorError(
            f"A posterior by method={kind!r} has blocks of the kind {named}, for which no class is defined; import "
            f"the module that defines it."
        )
    numbers = max(_max_numbers(block, weights, parameter_count) for block in known)
    # gzip makes random numbers a little larger, and every chunk has an entry in an index
    return int(1.1 * _MAX_NUMBER_BYTES * numbers) + _SPARE


def _max_numbers(kind: type[Block], weights: Iterable[MatrixShape], parameter_count: int) -> int:
    """The most numbers that a posterior of such blocks holds, with its mean where that is trained, or with a prior of
    single weights.
    """
    blocks = [(1, 1, parameter_count)] if kind.joint else weights
    # the mean of a training, or the prior's, and its precisions of single weights
    per_parameter = int(kind.trained or "prior_precision" in kind.tunable) + int(kind.per_weight_prior)
    return sum(kind.most_numbers(shape) for shape in blocks) + per_parameter * parameter_count


def _weights(model: nn.Module) -> Iterator[MatrixShape]:
    """``(groups, outputs, inputs)`` of every parameter that may be a weight, with a column for a bias."""
    for module in model.modules():
        groups = getattr(module, "groups", 1)
        for weight in module.parameters(recurse=False):
            if weight.ndim >= 2 and weight.numel():
                weight_groups = groups if isinstance(groups, int) and 0 < groups <= weight.shape[0] else 1
                yield weight_groups, -(-weight.shape[0] // weight_groups), weight[0].numel() + 1
