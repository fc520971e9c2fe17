"""What a distribution of context points is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch


class Context(ABC):
    """A distribution over inputs.

    Attributes:
        needs_data: whether `observe` must see the training inputs once before the first draw.
        points: how many inputs a step it is made for; None for any number.
    """

    needs_data: bool = False
    points: int | None = None

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        """Look at one batch of the training inputs, ``(samples, ...)``; asked of those that need the data."""
        raise NotImplementedError

    def fresh(self) -> Context:
        """A context of the same settings that has seen no data: what a fit uses, so that one context may serve many."""
        return self

    def identity(self) -> dict[str, Any]:
        """What its draws depend on beside the data: its attributes before it has seen any."""
        return dict(vars(self.fresh()))

    @abstractmethod
    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        """`n` inputs, on the device of the batch: a tensor ``(n, ...)``, or whatever a loader may yield as inputs.

        Args:
            n: how many.
            batch: the present minibatch of training data.
            generator: on the CPU; all randomness comes from it.
        """


def single_input(batch: Batch) -> Tensor:
    """The one floating-point tensor that is a batch's input.

    Raises:
        PosthocUQError: the model takes several arguments, named ones, or integers.
    """
    only = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    if not isinstance(only, Tensor) or not only.is_floating_point():
        raise PosthocUQError(
            "This context is for models of one floating-point input; give context=... a callable (n, generator) that "
            "returns the model's inputs."
        )
    return only
