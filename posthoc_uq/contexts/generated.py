"""Context points that are in no data: uniform in a box, or given by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.contexts.base import Context, single_input
from posthoc_uq.devices import host_double, sent
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch
from posthoc_uq.values import POSITIVE

Draw = Callable[[int, torch.Generator], Any]

_EXPAND = 2.0


class UniformBox(Context):
    """Uniform in a box, one interval a dimension of the input.

    Args:
        low: lower bounds, a number or a tensor that broadcasts to one input; by default those of the training inputs,
            moved out by `expand`.
        high: upper bounds, likewise.
        expand: factor by which the box of the training inputs grows about its middle; bounds that are given stay.
    """

    def __init__(
        self,
        low: float | Tensor | None = None,
        high: float | Tensor | None = None,
        expand: float = _EXPAND,
    ) -> None:
        if (low is None) != (high is None):
            raise PosthocUQError("A uniform context needs both bounds, or none: low=... and high=....")
        self.needs_data = low is None
        self._expand: float = POSITIVE("expand", expand)
        self._bounds: tuple[Tensor, Tensor] | None = None
        if low is not None and high is not None:
            self._bounds = host_double(low), host_double(high)
            smallest, largest = self._bounds
            if not bool((torch.isfinite(largest - smallest) & (smallest < largest)).all()):
                raise PosthocUQError(
                    f"A uniform context needs finite bounds low < high, not {low} and {high}."
                )

    def fresh(self) -> Context:
        return UniformBox(expand=self._expand) if self.needs_data else self

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        if not self.needs_data:
            return
        inputs = host_double(inputs.detach())
        low, high = inputs.amin(0), inputs.amax(0)
        if self._bounds is not None and self._bounds[0].shape != low.shape:
            raise PosthocUQError(
                f"context='uniform' takes its box from training inputs of one shape, and after inputs of shape "
                f"{tuple(self._bounds[0].shape)} the loader gave one of {tuple(low.shape)}; give the bounds, "
                f"UniformBox(low, high), or another context."
            )
        if self._bounds is not None:
            low, high = torch.minimum(low, self._bounds[0]), torch.maximum(high, self._bounds[1])
        self._bounds = low, high

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The lower and upper bounds of the box, in float64."""
        if self._bounds is None:
            raise PosthocUQError(
                "A uniform context without bounds takes those of the training inputs, and saw none."
            )
        low, high = self._bounds
        if not self.needs_data:
            return low, high
        middle, half = (low + high) / 2, (high - low) / 2 * self._expand
        return middle - half, middle + half

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        low, high = self.bounds()
        numbers = torch.rand(n, *like.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
        return sent((low + (high - low) * numbers).to(like.dtype), like.device)


class Callback(Context):
    """The inputs that a function ``(n, generator)`` gives: a tensor ``(n, ...)``, a tuple of the model's arguments, or
    a mapping of named ones.
    """

    def __init__(self, function: Draw) -> None:
        self._function = function

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        return self._function(n, generator)
