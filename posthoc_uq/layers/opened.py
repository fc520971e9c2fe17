"""Calls with a weight that is no matrix, or is hidden in a larger call, as calls that can be watched and replaced.

Scales and offsets of features become `scale_features` and `add_offset`: those of torch's normalisation layers, products
with a vector, sums with a parameter such as the embedding of positions, and copies of one such as a class token.
Bilinear layers become `bilinear_products`, bags of embeddings sums of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

_LAST = tuple(getattr(F, name) for name in ("layer_norm", "rms_norm") if hasattr(F, name))
_FIRST = (F.batch_norm, F.group_norm, F.instance_norm)  # whose channels come after the samples
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_COPIES = (Tensor.expand, Tensor.expand_as, Tensor.repeat)
_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
WITH_WEIGHTS = frozenset({*_LAST, *_FIRST, *_SUMS, *_COPIES, *_PRODUCTS, F.bilinear, F.embedding_bag})
"""The functions that `decomposed_calls` opens up."""


def scale_features(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x w + b`` with a scale and an offset for each feature, the last dimension."""
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(scale_features, (input, weight, bias), input, weight, bias)
    found = input * weight
    return found if bias is None else found + bias


def add_offset(input: Tensor, weight: Tensor) -> Tensor:
    """``x + b`` with an offset in the shape of the last dimensions."""
    if has_torch_function_variadic(input, weight):
        return handle_torch_function(add_offset, (input, weight), input, weight)
    return input + weight


def bilinear_products(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``sum_ij W_oij z_ij + b_o`` of products of two inputs' features, ``(..., i * j)``."""
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(bilinear_products, (input, weight, bias), input, weight, bias)
    return F.linear(input, weight.flatten(-2), bias)


@cache
def _signature(function: Any) -> Signature:
    return signature(function)


def decomposed_calls(
    func: Any, args: Any, kwargs: dict[str, Any], follows: Callable[[Tensor], bool]
) -> Callable[[], Tensor] | None:
    """The same as a call of a normalisation, a product, a sum, a bilinear layer or a bag of embeddings, from calls of
    this file's functions and `F.embedding`; None for other functions, and where nobody follows the weight.
    """
    if func in _COPIES:
        return _of_copies(func, args, kwargs, follows)
    if func in _PRODUCTS or func in _SUMS:
        return _of_two(func in _SUMS, args, follows) if len(args) == 2 and not kwargs else None
    if func is F.bilinear or func is F.embedding_bag:
        given = _signature(_bilinear if func is F.bilinear else func).bind(*args, **kwargs).arguments
        if not isinstance(given["weight"], Tensor) or not follows(given["weight"]):
            return None
        return partial(_bilinear, **given) if func is F.bilinear else _of_bags(**given)
    if func not in _LAST and func not in _FIRST:
        return None
    given = _signature(func).bind(*args, **kwargs).arguments
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not follows(weight):
        return None

    def run() -> Tensor:
        found = func(**given)
        if func in _LAST:
            return scale_features(found, weight, bias)
        return scale_features(found.movedim(1, -1), weight, bias).movedim(-1, 1)

    return run


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return bilinear_products((input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), weight, bias)


def _of_bags(
    input: Tensor,
    weight: Tensor,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **others: Any,
) -> Callable[[], Tensor] | None:
    """The sums or means of the embeddings of bags of one size, ``(samples, size)``; None for bags of other kinds, and
    where a call changes the weight or its gradient.
    """
    other = others.get("max_norm") is not None or others.get("scale_grad_by_freq")
    if other or others.get("offsets") is not None or input.ndim != 2 or mode not in ("sum", "mean"):
        return None

    def run() -> Tensor:
        rows = F.embedding(input, weight, padding_idx)
        shares = (
            torch.ones_like(input, dtype=weight.dtype) if per_sample_weights is None else per_sample_weights
        )
        if padding_idx is not None:
            shares = shares.masked_fill(input == padding_idx % len(weight), 0)
        if mode == "mean":
            shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
        return (rows * shares.unsqueeze(-1)).sum(1)

    return run


def _of_copies(
    func: Any, args: Any, kwargs: dict[str, Any], follows: Callable[[Tensor], bool]
) -> Callable[[], Tensor] | None:
    """Copies of a parameter for every sample, as of a class token: a sum with zeros."""
    weight = args[0]
    if not isinstance(weight, Tensor) or not follows(weight):
        return None
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        shape = func(weight, *args[1:], **kwargs).shape
        zeros = weight.new_zeros(shape)
    return _of_two(True, (zeros, weight), follows)


def _of_two(sums: bool, args: Any, follows: Callable[[Tensor], bool]) -> Callable[[], Tensor] | None:
    """A product of a tensor and a vector with one number for each of its last dimension; or a sum with numbers for its
    last dimensions, which all samples share.
    """
    for weight, x in (args, args[::-1]):
        if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or not follows(weight):
            continue
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            own = tuple(weight.shape)
            while len(own) > 1 and own[0] == 1:
                own = own[1:]
            fits = weight.ndim <= x.ndim > len(own) > 0 and tuple(x.shape[-len(own) :]) == own
            fits = fits and weight.ndim <= (3 if sums else 1)
        if fits:
            return partial(add_offset if sums else scale_features, x, weight)
    return None
