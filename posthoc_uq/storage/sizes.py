"""How large a file of a model can be, before any of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn

from posthoc_uq.posteriors.blocks import BLOCKS, Block, Shape
from posthoc_uq.posteriors.dense import LARGEST_BYTES
from posthoc_uq.posteriors.families import FAMILIES
from posthoc_uq.storage.schema import CHECKPOINT

_NUMBER = 8  # bytes of the widest format
_SPARE = 64 * 2**20  # for the description, HDF5's own records, and what is kept of the last layer's inputs
_STATES = (
    16  # copies of the parameters that a training keeps: means, variances, the best, what an optimiser needs
)


def size_limit(kind: str | None, model: nn.Module) -> int:
    """Bytes that no file of these parameters exceeds.

    Args:
        kind: the method of a posterior, `CHECKPOINT`, or None where the file does not say: the most of all methods.
        model: whose parameters they are.
    """
    weights = list(_weights(model))
    whole = sum(parameter.numel() for parameter in model.parameters())
    if kind == CHECKPOINT:
        parameters = sum(groups * outputs * inputs for groups, outputs, inputs in weights)
        bases = sum(groups * (outputs**2 + inputs**2) for groups, outputs, inputs in weights)
        dense = min(whole**2, LARGEST_BYTES // _NUMBER)
        most = max(dense, 2 * bases + 4 * parameters + _STATES * whole)
    else:
        kinds = set(chain(*FAMILIES.values())) if kind is None else FAMILIES[kind]
        most = max(_numbers(BLOCKS[name], weights, whole) for name in kinds)
    # gzip makes random numbers a little larger, and every chunk has a record
    return int(1.1 * _NUMBER * most) + _SPARE


def _numbers(kind: type[Block], weights: Iterable[Shape], whole: int) -> int:
    """The most that a posterior of such blocks holds, its mean included where it has one of its own."""
    blocks = [(1, 1, whole)] if kind.joint else weights
    return sum(kind.most_numbers(shape) for shape in blocks) + (whole if kind.trained else 0)


def _weights(model: nn.Module) -> Iterator[Shape]:
    """``(groups, outputs, inputs)`` of every parameter that may be a weight, with a column for a bias."""
    for module in model.modules():
        groups = getattr(module, "groups", 1)
        for weight in module.parameters(recurse=False):
            if weight.ndim >= 2 and weight.numel():
                own = groups if isinstance(groups, int) and 0 < groups <= weight.shape[0] else 1
                yield own, -(-weight.shape[0] // own), weight[0].numel() + 1
