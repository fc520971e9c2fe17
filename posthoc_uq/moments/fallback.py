"""Fallbacks for functions without a rule: draws of their inputs, or a linearisation by random probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import jvp
from posthoc_uq.moments.tensor import (
    FALLBACKS,
    MomentTensor,
    function_name,
    mean_of,
    rewrapped,
    variance_dtype,
)

DRAWS = 32


def draws(func: Any, args: Any, kwargs: Any) -> Any:
    """Mean and variance of the function's outputs over `DRAWS` Gaussian draws of its inputs, by a fixed seed, in
    antithetic pairs.
    """
    _refuse_in_place(func)
    inputs, build = _inputs(args, kwargs)
    generator = torch.Generator().manual_seed(0)
    outputs: list[Any] = []
    for _ in range(DRAWS // 2):
        normals = [torch.randn(_sample_shape(x), generator=generator, device="cpu") for x in inputs]
        for sign in (1.0, -1.0):
            values = [
                x.moment_mean
                + (sign * normal.to(x.moment_variance) * x.moment_variance.sqrt()).to(x.moment_mean)
                for x, normal in zip(inputs, normals, strict=True)
            ]
            outputs.append(_call(func, build(values)))
    return _summary(func, outputs, lambda stack: (stack.mean(0), stack.var(0, correction=0)))


def delta(func: Any, args: Any, kwargs: Any) -> Any:
    """``f(mean)`` and ``1 / R sum_r (J (sqrt(v) e_r))^2`` for random signs ``e_r``, by forward-mode differentiation."""
    _refuse_in_place(func)
    inputs, build = _inputs(args, kwargs)
    generator = torch.Generator().manual_seed(0)
    means = tuple(x.moment_mean for x in inputs)
    primal: Any = None
    tangents: list[Any] = []
    for _ in range(DRAWS):
        signs = [
            torch.randint(0, 2, _sample_shape(x), generator=generator, device="cpu") * 2.0 - 1.0
            for x in inputs
        ]
        steps = tuple(
            (sign.to(x.moment_variance) * x.moment_variance.sqrt()).to(x.moment_mean)
            for x, sign in zip(inputs, signs, strict=True)
        )

        def run(*values: Tensor) -> Any:
            return _call(func, build(list(values)))

        _summary(
            func, [_call(func, build(list(means)))], lambda stack: (stack[0], stack[0])
        )  # refuses numbers
        primal, tangent = jvp(run, means, steps)
        tangents.append(tangent)
    centre = _summary(func, [primal], lambda stack: (stack[0], stack[0]))
    spread = _summary(func, tangents, lambda stack: (stack[0], stack.square().mean(0)))
    return _joined(centre, spread)


def _sample_shape(x: MomentTensor) -> tuple[int, ...]:
    """The shape of one sample. All samples get the same draws, so none depends on its place in the batch."""
    return tuple(x.moment_mean.shape[1:])


def _refuse_in_place(func: Any) -> None:
    name = getattr(func, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__"):
        raise PosthocUQError(
            f"{function_name(func)} works in place and has no rule, so that its variance would be lost; use the form "
            f"that returns a new tensor, or predict with head='sampling'."
        )


def _inputs(args: Any, kwargs: Any) -> tuple[list[MomentTensor], Callable[[list[Tensor]], tuple[Any, Any]]]:
    """The moment tensors among the arguments, and a function that puts plain tensors in their places."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, MomentTensor)]

    def build(values: list[Tensor]) -> tuple[Any, Any]:
        filled = list(leaves)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        return cast(tuple[Any, Any], pytree.tree_unflatten(filled, spec))

    return [leaves[position] for position in positions], build


def _call(func: Any, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
    return func(*arguments[0], **arguments[1])


def _summary(func: Any, outputs: list[Any], summarise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            raise PosthocUQError(
                f"{function_name(func)} gives {first.dtype} from uncertain inputs, which has no variance; keep it out "
                f"of the model's forward pass, or predict with head='sampling'."
            )
        mean, variance = summarise(torch.stack(outputs))
        return MomentTensor(mean, variance.to(variance_dtype(mean.dtype)))
    if isinstance(first, (tuple, list)):
        return tuple(_summary(func, list(parts), summarise) for parts in zip(*outputs, strict=True))
    raise PosthocUQError(
        f"{function_name(func)} makes a {type(first).__name__} of an uncertain activation, which has no variance; keep "
        f"it out of the model's forward pass, or predict with head='sampling'."
    )


def _joined(centre: Any, spread: Any) -> Any:
    if isinstance(centre, MomentTensor):
        return rewrapped(mean_of(centre), spread.moment_variance)
    if isinstance(centre, tuple):
        return tuple(_joined(a, b) for a, b in zip(cast(Sequence[Any], centre), spread, strict=True))
    return centre


FALLBACKS["mc"] = draws
FALLBACKS["delta"] = delta
