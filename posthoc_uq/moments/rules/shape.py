"""Functions that move entries without mixing them: they are applied to the mean and to the variance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.tensor import (
    COMPARISONS,
    DETACHED,
    QUERIES,
    RULES,
    MomentTensor,
    Pass,
    as_view,
    full_precision,
    mean_of,
    moments_of,
    named,
    rewrapped,
    rule,
    variance_of,
)

_VIEWS = (
    "flatten reshape view permute transpose t movedim moveaxis swapaxes swapdims unflatten squeeze "
    "unsqueeze expand broadcast_to narrow select chunk split unbind tensor_split hsplit vsplit dsplit "
    "diagonal detach ravel unfold adjoint split_with_sizes"
).split()
_COPIES = (
    "contiguous clone repeat tile roll flip fliplr flipud rot90 index_select gather take_along_dim "
    "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle repeat_interleave tril triu "
    "alias_copy"
).split()
_LIKE = ["expand_as", "view_as", "reshape_as"]
_QUERIES = (
    "dim size numel nelement ndimension is_floating_point is_complex is_contiguous stride storage_offset "
    "element_size __len__ get_device is_signed is_same_size argmax argmin eq ne lt le gt ge isnan isinf "
    "isfinite zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty "
    "new_full new_tensor is_nonzero __eq__ __ne__ __lt__ __le__ __gt__ __ge__ is_tensor is_inference "
    "sym_size is_set_to has_names logical_not is_conj is_neg is_shared result_type"
).split()


def _moved(function: Any, view: bool, state: Pass, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else kwargs.get("input")
    others = [value for value in (*args[1:], *kwargs.values()) if value is not first]
    if not isinstance(first, MomentTensor) or any(isinstance(other, MomentTensor) for other in others):
        return state.unknown(function, args, kwargs)
    # An index that is a plain tensor or a list stays as it is.
    result = rewrapped(
        function(*mean_of(args), **mean_of(kwargs)), function(*variance_of(args), **variance_of(kwargs))
    )
    keeps = first.moment_covariance is not None and function in _KEEP_COVARIANCE
    if keeps and result.moment_mean.shape == first.moment_mean.shape:
        result.moment_covariance = first.moment_covariance
    return as_view(first, result) if view else result


def _detached(function: Any, state: Pass, *args: Any, **kwargs: Any) -> Any:
    result = _moved(function, True, state, *args, **kwargs)
    result.moment_note = DETACHED
    return result


for _function in named(*_VIEWS):
    RULES[_function] = partial(_moved, _function, True)
for _function in named("detach"):
    RULES[_function] = partial(_detached, _function)
for _function in named(*_COPIES):
    RULES[_function] = partial(_moved, _function, False)
for _function in (F.unfold, F.pixel_shuffle, F.pixel_unshuffle):
    RULES[_function] = partial(_moved, _function, False)
for _attribute in ("T", "mT", "H", "mH"):
    _getter = getattr(Tensor, _attribute).__get__
    RULES[_getter] = partial(_moved, _getter, True)
RULES[Tensor.data.__get__] = partial(_moved, Tensor.detach, True)  # type: ignore[attr-defined]
_KEEP_COVARIANCE = set(named("flatten", "reshape", "view", "contiguous", "clone", "detach"))
QUERIES.update(named(*_QUERIES))
COMPARISONS.update(named(*"eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ is_same_size".split()))
QUERIES.add(Tensor.__hash__)


@rule(Tensor.__hash__)
def identity(state: Pass, input: MomentTensor) -> int:
    return id(input)


@rule(Tensor.__iter__)
def iterate(state: Pass, input: MomentTensor) -> Any:
    return iter(as_view(input, rewrapped(input.moment_mean.unbind(0), input.moment_variance.unbind(0))))


@rule(*named(*_LIKE, places=(Tensor,)))
def like(state: Pass, input: Any, other: Any) -> Any:
    like, (m, v) = mean_of(other), moments_of(input)
    form = Tensor.reshape if m.numel() == like.numel() else Tensor.expand
    if not isinstance(input, MomentTensor):
        return form(input, like.shape)
    return as_view(input, MomentTensor(form(m, like.shape), form(v, like.shape)))


@rule(Tensor.__getitem__)
def getitem(state: Pass, input: Any, index: Any) -> Any:
    if not isinstance(input, MomentTensor) or _uncertain(index):
        raise state.refusal("a tensor is indexed by an activation", "index by something that is certain")
    m, v = moments_of(input)
    return as_view(input, MomentTensor(m[index], v[index]))


def _uncertain(index: Any) -> bool:
    if isinstance(index, (tuple, list)):
        return any(_uncertain(part) for part in cast(Sequence[Any], index))
    return isinstance(index, MomentTensor)


@rule(Tensor.__setitem__)
def setitem(state: Pass, input: Any, index: Any, value: Any) -> Any:
    raise state.refusal(
        "an activation is written into, or into a plain tensor", "build it with torch.cat or torch.where"
    )


def _join(function: Any, state: Pass, tensors: Any, *args: Any, **kwargs: Any) -> MomentTensor:
    pairs = [moments_of(tensor) for tensor in tensors]
    kind = next(v.dtype for (_, v), t in zip(pairs, tensors, strict=True) if isinstance(t, MomentTensor))
    return MomentTensor(
        function([m for m, _ in pairs], *args, **kwargs),
        function([v.to(kind) for _, v in pairs], *args, **kwargs),
    )


for _function in named(*"cat concat concatenate stack hstack vstack dstack row_stack column_stack".split()):
    RULES[_function] = partial(_join, _function)


@rule(torch.constant_pad_nd)
def constant_pad(state: Pass, input: Any, pad: Any, value: float = 0.0) -> Any:
    return MomentTensor(F.pad(input.moment_mean, pad, value=value), F.pad(input.moment_variance, pad))


@rule(F.pad)
def pad(state: Pass, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if mode == "constant":
        return MomentTensor(F.pad(input.moment_mean, pad, value=value), F.pad(input.moment_variance, pad))
    return MomentTensor(F.pad(input.moment_mean, pad, mode), F.pad(input.moment_variance, pad, mode))


@rule(*named("masked_fill"))
def masked_fill(state: Pass, input: Any, mask: Any, value: Any) -> Any:
    if not isinstance(input, MomentTensor) or isinstance(value, MomentTensor):
        return state.unknown(torch.masked_fill, (input, mask, value), {})
    m, v = moments_of(input)
    return MomentTensor(m.masked_fill(mask, value), v.masked_fill(mask, 0.0))


@rule(Tensor.masked_fill_)
def masked_fill_in_place(state: Pass, input: Any, mask: Any, value: Any) -> Any:
    if not isinstance(input, MomentTensor):
        raise state.refusal("a plain tensor is filled with an activation", "use torch.where")
    return state.replace(input, masked_fill(state, input, mask, value))


@rule(torch.where, Tensor.where)
def where(state: Pass, *args: Any, **kwargs: Any) -> Any:
    # torch.where(condition, input, other), tensor.where(condition, other)
    condition, first, second = args if len(args) == 3 else (args[0], kwargs["input"], kwargs["other"])
    if isinstance(condition, MomentTensor) or (
        isinstance(condition, Tensor) and condition.dtype != torch.bool
    ):
        condition, first = first, condition
    (m1, v1), (m2, v2) = moments_of(first), moments_of(second)
    kind = v1.dtype if isinstance(first, MomentTensor) else v2.dtype
    return MomentTensor(torch.where(condition, m1, m2), torch.where(condition, v1.to(kind), v2.to(kind)))


@rule(F.interpolate, *named("upsample", "upsample_nearest", "upsample_bilinear", places=(F,)))
def interpolate(
    state: Pass,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Any:
    m, v = moments_of(input)

    def run(x: Tensor) -> Tensor:
        return F.interpolate(
            x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias=antialias
        )

    if mode in ("nearest", "nearest-exact"):
        return MomentTensor(run(m), run(v))
    if mode == "area":
        raise state.refusal("interpolation by area is an adaptive average", "call adaptive_avg_pool")
    mean = run(m)
    with full_precision(m):
        for axis in range(2, m.ndim):
            v = (v.movedim(axis, -1) @ _weights(run, v, axis).square()).movedim(-1, axis)
    return MomentTensor(mean, v)


def _weights(run: Any, like: Tensor, axis: int) -> Tensor:
    """The matrix ``(inputs, outputs)`` of a separable interpolation along one axis: its results on the unit vectors
    along that axis, which are constant along the others.
    """
    size = like.shape[axis]
    shape = [size, 1, *[1] * (like.ndim - 2)]
    shape[axis] = size
    unit = torch.eye(size, dtype=like.dtype, device=like.device).reshape(shape)
    columns = run(unit.expand(size, 1, *like.shape[2:]).contiguous())
    return columns.movedim(axis, -1).reshape(size, -1, columns.shape[axis])[:, 0]
