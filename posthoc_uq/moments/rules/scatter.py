"""Functions that add, average or move entries to places given by an index, as the nodes of a graph do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.moments.tensor import (
    DETACHED,
    RULES,
    MomentTensor,
    Pass,
    SumOf,
    mean_of,
    moments_of,
    named,
    rule,
)


def _certain_index(state: Pass, index: Any) -> None:
    if isinstance(index, MomentTensor):
        raise state.refusal("a tensor is indexed by an activation", "index by something that is certain")


def _kind(*values: Any) -> torch.dtype:
    return next(x.moment_variance.dtype for x in values if isinstance(x, MomentTensor))


@rule(*named("scatter_add"))
def scatter_add(state: Pass, input: Any, dim: int, index: Any, src: Any) -> MomentTensor:
    return scatter_reduce(state, input, dim, index, src, "sum")


@rule(*named("index_add"))
def index_add(
    state: Pass, input: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> MomentTensor:
    _certain_index(state, index)
    (m, v), (added, spread), kind = moments_of(input), moments_of(source), _kind(input, source)
    variance = v.to(kind).index_add(dim, index, spread.to(kind), alpha=alpha**2)
    result = MomentTensor(m.index_add(dim, index, added, alpha=alpha), variance)
    if alpha == 1 and isinstance(source, MomentTensor) and not isinstance(input, MomentTensor):
        shape = input.shape
        result.moment_note = SumOf(source, lambda y: y.new_zeros(shape).index_add(dim, index, y))
    return result


def _put(function: Any, state: Pass, input: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Any:
    """Entries in place of others."""
    _certain_index(state, index)
    value = args[0] if args else next((v for k, v in kwargs.items() if k in ("src", "value", "source")), None)
    if len(args) > 1 or kwargs.get("reduce") is not None or value is None:
        return state.unknown(function, (input, dim, index, *args), kwargs)
    (m, v), kind = moments_of(input), _kind(input, value)
    mean, spread = (value, 0.0) if not isinstance(value, Tensor) else moments_of(value)
    spread = spread.to(kind) if isinstance(spread, Tensor) else spread
    return MomentTensor(function(m, dim, index, mean), function(v.to(kind), dim, index, spread))


for _function in named("scatter", "index_copy", "index_fill"):
    RULES[_function] = partial(_put, _function)


@rule(*named("scatter_reduce"))
def scatter_reduce(
    state: Pass, input: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Sums and averages of independent entries; of the largest or smallest, the variance of the mean that wins."""
    if reduce not in ("sum", "mean", "amax", "amin"):
        again = (input, dim, index, src, reduce), {"include_self": include_self}
        return state.unknown(torch.scatter_reduce, *again)
    _certain_index(state, index)
    if reduce in ("amax", "amin") and isinstance(src, MomentTensor) and src.moment_note == DETACHED:
        m, added = mean_of(input), src.moment_mean
        return m.scatter_reduce(dim, index, added, reduce, include_self=include_self)
    (m, v), (added, spread), kind = moments_of(input), moments_of(src), _kind(input, src)
    v, spread = v.to(kind), spread.to(kind).expand(added.shape)

    def reduced(own: Tensor, others: Tensor, how: str) -> Tensor:
        return own.scatter_reduce(dim, index, others, how, include_self=include_self)

    mean = reduced(m, added, reduce)
    if reduce == "sum":
        result = MomentTensor(mean, reduced(v, spread, "sum"))
        if isinstance(src, MomentTensor) and not isinstance(input, MomentTensor):
            shape = input.shape
            result.moment_note = SumOf(src, lambda y: y.new_zeros(shape).scatter_add(dim, index, y))
        return result
    if reduce == "mean":
        ones = torch.ones_like(v), torch.ones_like(spread)
        return MomentTensor(mean, reduced(v, spread, "sum") / reduced(*ones, "sum").square())
    taken = index if index.shape == added.shape else index.expand(added.shape)
    wins = added == mean.gather(dim, taken)
    variance = reduced(torch.where(m == mean, v, 0.0), torch.where(wins, spread, 0.0), "amax")
    return MomentTensor(mean, variance)


def _into(operation: Any, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    result = operation(state, input, *args, **kwargs)
    return state.replace(input, result) if isinstance(result, MomentTensor) else input.copy_(result)


for _name in ("scatter_add", "scatter_reduce", "scatter", "index_add", "index_copy", "index_fill"):
    RULES[getattr(Tensor, f"{_name}_")] = partial(_into, RULES[getattr(Tensor, _name)])
