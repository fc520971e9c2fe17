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
        """Look at one batch of the training inputs, ``(samples, ...)``; called if the context needs the data."""
        raise NotImplementedError

    def fresh(self) -> Context:
        """A context of the same settings that has seen no data. Each fit uses its own, so one may serve many fits."""
        return self

    def identity(self) -> dict[str, Any]:
        """The settings that its draws depend on: its attributes before it has seen data."""
        return dict(vars(self.fresh()))

    @abstractmethod
    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        """`n` inputs on the device of the batch: a tensor ``(n, ...)``, or any form of inputs that a loader may yield.

        Args:
            n: number of inputs.
            batch: the present minibatch of training data.
            generator: on the CPU, the source of all randomness.
        """


def single_input(batch: Batch) -> Tensor:
    """The input of a batch, where it is a single floating-point tensor.

    Raises:
        PosthocUQError: the model takes several arguments, named ones, or integers.
    """
    argument = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        raise PosthocUQError(
            "This context is for models of one floating-point input; give context=... a callable (n, generator) that "
            "returns the model's inputs."
        )
    return argument
