"""Functions without a rule of their own: the unscented rule along random directions of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.moments.tensor import FALLBACKS, MomentTensor, function_name, variance_dtype

DIRECTIONS = 32


def along_directions(func: Any, args: Any, kwargs: Any) -> Any:
    """Mean and variance of the function's outputs by the three points of the unscented rule along each of `DIRECTIONS`
    random directions, the same in every call, in which every input moves up or down in units of its deviation.

    Of an element-wise function that is the unscented rule itself. Of several inputs, a variance has a relative error of
    about ``sqrt(2 / DIRECTIONS)``.
    """
    _refuse_in_place(func)
    inputs, build = _inputs(args, kwargs)

    def at(steps: list[Tensor] | None, sign: float) -> tuple[list[Tensor], Any]:
        means = [x.moment_mean for x in inputs]
        moved = (
            means if steps is None else [mean + sign * step for mean, step in zip(means, steps, strict=True)]
        )
        moved_args, moved_kwargs = build(moved)
        leaves, spec = pytree.tree_flatten(func(*moved_args, **moved_kwargs))
        return [_checked(func, leaf) for leaf in leaves], spec

    centres, spec = at(None, 0.0)
    bends, squares = [0.0 * centre for centre in centres], [0.0 * centre for centre in centres]
    generator = torch.Generator().manual_seed(0)
    for _ in range(DIRECTIONS):
        steps: list[Tensor] = []
        for x in inputs:
            # all samples get the same signs, so that none depends on its place in the batch
            signs = (
                torch.randint(0, 2, x.moment_mean.shape[1:], generator=generator, device="cpu") * 2.0 - 1.0
            )
            deviation = x.moment_variance.sqrt()
            steps.append((sqrt(3.0) * signs.to(deviation) * deviation).to(x.moment_mean))
        (ups, _), (downs, _) = at(steps, 1.0), at(steps, -1.0)
        for place, (centre, up, down) in enumerate(zip(centres, ups, downs, strict=True)):
            bend = up + down - 2.0 * centre
            bends[place] = bends[place] + bend / DIRECTIONS
            squares[place] = squares[place] + ((up - down).square() / 12 + bend.square() / 18) / DIRECTIONS
    parts = [
        MomentTensor(centre + bend / 6, square.to(variance_dtype(centre.dtype)))
        for centre, bend, square in zip(centres, bends, squares, strict=True)
    ]
    return pytree.tree_unflatten(parts, spec)


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


def _checked(func: Any, output: Any) -> Tensor:
    """An output, if it can have a variance."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = str(output.dtype) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise PosthocUQError(
            f"{function_name(func)} makes {kind} of an uncertain activation, which has no variance; keep it out of the "
            f"model's forward pass, or predict with head='sampling'."
        )
    return output


FALLBACKS["unscented"] = along_directions
