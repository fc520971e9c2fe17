"""How large a file of a model can be, before any of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.posteriors.block import BLOCKS, FAMILIES, Block, Shape

_NUMBER = 8  # bytes of the widest format
_SPARE = 64 * 2**20  # for the description, HDF5's own records, and what is kept of the last layer's inputs


def size_limit(kind: str | None, model: nn.Module) -> int:
    """The most bytes that a file of a model can have.

    Args:
        kind: the method of a posterior, or None where the file does not say: the most over all methods.
        model: whose parameters they are.

    Raises:
        CorruptPosteriorError: no class is known for the blocks of that method.
    """
    weights = list(_weights(model))
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    kinds = set(chain(*FAMILIES.values())) if kind is None else FAMILIES[kind]
    known = [BLOCKS[name] for name in kinds if name in BLOCKS]
    if not known:
        named = " or ".join(map(repr, kinds))
        raise CorruptPosteriorError(
            f"A posterior by method={kind!r} has blocks of the kind {named}, for which no class is defined; import "
            f"the module that defines it."
        )
    most = max(_numbers(block, weights, parameter_count) for block in known)
    # gzip makes random numbers a little larger, and every chunk has an entry in an index
    return int(1.1 * _NUMBER * most) + _SPARE


def _numbers(kind: type[Block], weights: Iterable[Shape], parameter_count: int) -> int:
    """The most numbers that a posterior of such blocks holds, with its mean where that is trained, or with a prior of
    single weights.
    """
    blocks = [(1, 1, parameter_count)] if kind.joint else weights
    # the mean of a training, or the prior's, and its precisions of single weights
    own = int(kind.trained or "prior_precision" in kind.tunable) + int(kind.own_priors)
    return sum(kind.most_numbers(shape) for shape in blocks) + own * parameter_count


def _weights(model: nn.Module) -> Iterator[Shape]:
    """``(groups, outputs, inputs)`` of every parameter that may be a weight, with a column for a bias."""
    for module in model.modules():
        groups = getattr(module, "groups", 1)
        for weight in module.parameters(recurse=False):
            if weight.ndim >= 2 and weight.numel():
                weight_groups = groups if isinstance(groups, int) and 0 < groups <= weight.shape[0] else 1
                yield weight_groups, -(-weight.shape[0] // weight_groups), weight[0].numel() + 1
