"""Mixtures of contexts, and contexts from the forms that a user may give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.contexts.base import Context, single_input
from posthoc_uq.contexts.corrupted import Corrupted
from posthoc_uq.contexts.from_data import Monochrome, Pool, TrainingBatch
from posthoc_uq.contexts.generated import Callback, Draw, UniformBox
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch
from posthoc_uq.values import meant


class Mixture(Context):
    """Fixed shares of several contexts; Rudner et al. take half training inputs, half monochrome images.

    Args:
        parts: pairs of a share and any form of context that `resolve_context` takes; shares need not add up to 1.
            Where all are whole numbers they are counts, whose sum is the number of context points unless another is
            asked for.
    """

    def __init__(self, parts: Sequence[tuple[float, Any]]) -> None:
        if not parts or any(not 0 < float(share) < float("inf") for share, _ in parts):
            raise PosthocUQError(
                "A mixture of contexts is a list of pairs (share, context) with positive shares."
            )
        if all(isinstance(share, Integral) for share, _ in parts):
            self.points = sum(int(share) for share, _ in parts)
        total = sum(float(share) for share, _ in parts)
        self._shares = [float(share) / total for share, _ in parts]
        self._contexts = [resolve_context(context) for _, context in parts]
        self.needs_data = any(context.needs_data for context in self._contexts)

    def fresh(self) -> Context:
        fresh = Mixture(
            [(share, part.fresh()) for share, part in zip(self._shares, self._contexts, strict=True)]
        )
        fresh.points = self.points
        return fresh

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        for context in self._contexts:
            if context.needs_data:
                context.observe(inputs, generator)

    def counts(self, n: int) -> list[int]:
        """How many of `n` inputs each part gives, by the method of largest remainders."""
        exact = [share * n for share in self._shares]
        counts = [int(number) for number in exact]
        order = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
        for index in order[: n - sum(counts)]:
            counts[index] += 1
        return counts

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        parts = [
            context.draw(count, batch, generator)
            for context, count in zip(self._contexts, self.counts(n), strict=True)
            if count
        ]
        like = next((part for part in parts if isinstance(part, Tensor)), None)
        if like is None or not all(
            isinstance(part, Tensor) and part.shape[1:] == like.shape[1:] for part in parts
        ):
            raise PosthocUQError(
                "The parts of a mixture of contexts must all give one tensor of equal input shapes."
            )
        device = single_input(batch).device
        return torch.cat([part.to(device) for part in parts])


def default_context(batch: Batch, corrupted: bool = False) -> Context:
    """The context of Rudner et al.: half training inputs and half monochrome images, or a uniform box for vectors. With
    `corrupted` two training images beside fourteen corrupted ones.
    """
    if single_input(batch).ndim != 4:
        return UniformBox()
    if corrupted:
        return Mixture([(2, TrainingBatch()), (14, Corrupted())])
    return Mixture([(0.5, TrainingBatch()), (0.5, Monochrome())])


def resolve_context(context: Any) -> Context:
    """A `Context` from any form that a user may give: a `Context`, ``"monochrome"``, ``"uniform"``, ``"batch"``,
    ``"corrupted"``, a list of pairs ``(share, context)`` or ``(count, context)``, a callable ``(n, generator)``, a
    tensor of inputs, or a loader.

    Raises:
        PosthocUQError: it is none of these.
    """
    named: dict[str, type[Context]] = {
        "monochrome": Monochrome,
        "uniform": UniformBox,
        "batch": TrainingBatch,
        "corrupted": Corrupted,
    }
    if isinstance(context, Context):
        return context.fresh()
    if isinstance(context, str):
        if context not in named:
            raise PosthocUQError(
                f"context must be one of {sorted(named)}, a loader or tensor of inputs, a callable (n, generator), a "
                f"list of pairs (share, context), or a Context, not {context!r}."
                f"{meant(context, named)}"
            )
        return named[context]()
    if isinstance(context, (list, tuple)) and context and all(_is_share(part) for part in cast(Any, context)):
        return Mixture(cast(Any, context))
    if callable(context):
        if not _takes_two(context):
            raise PosthocUQError(
                "A callable context takes two arguments, (n, generator): how many inputs to give, and a "
                "torch.Generator."
            )
        return Callback(cast(Draw, context))
    if isinstance(context, Tensor):
        if context.ndim == 0 or not len(context):
            raise PosthocUQError(
                f"A tensor as context holds inputs (inputs, ...), not {tuple(context.shape)}."
            )
        return Pool([context], kept=len(context))
    if isinstance(context, (list, tuple)) and any(isinstance(part, str) for part in cast(Any, context)):
        raise PosthocUQError(
            f"A mixture of contexts is a list of pairs (share, context), for instance [(0.5, 'batch'), (0.5, "
            f"'monochrome')], not {context!r}."
        )
    return Pool(context)


def _is_share(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and len(cast(Any, part)) == 2 and isinstance(part[0], (int, float))


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments; True where its signature is unknown."""
    try:
        inspect.signature(function).bind(1, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
