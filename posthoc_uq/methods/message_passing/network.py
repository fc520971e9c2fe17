"""A sequential network as a chain of stages, and how the tensors of images become the rows of linear layers.

Messages between stages are ``(K, N, ...)``: K networks, N examples, and features or channels, height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.methods.message_passing.gaussian import FLOOR, Message, clamped, divided, multiplied
from posthoc_uq.methods.message_passing.windows import Windows


@dataclass(frozen=True, eq=False)
class Weighted:
    """A linear layer or a convolution.

    Attributes:
        name: for errors.
        inputs: of a group, those of a patch for a convolution; without the bias.
        outputs: of a group.
        windows: of a convolution; None for a linear layer.
        bias: whether it has a random bias.
        offset: constants that are added to the outputs, ``(groups * outputs,)``, or None.
    """

    name: str
    inputs: int
    outputs: int
    windows: Windows | None = None
    bias: bool = True
    offset: Tensor | None = None

    @property
    def groups(self) -> int:
        """Of channels that do not mix."""
        return 1 if self.windows is None else self.windows.groups

    def rows(self, x: Tensor) -> Tensor:
        """Inputs ``(K, N, ...)`` as rows ``(K G, N, P, I)``."""
        if self.windows is None:
            return x.unsqueeze(2)
        rows = self.windows.unfolded(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return rows.transpose(1, 2).flatten(0, 1)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The same back, ``(K, N, ...)`` of the shape of the inputs; what overlaps is added up."""
        if self.windows is None:
            return rows.squeeze(2)
        blocks = rows.unflatten(0, (shape[0], self.groups)).transpose(1, 2).flatten(0, 1)
        return self.windows.folded(blocks, *shape[-2:]).reshape(shape)

    def outputs_of(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Rows of outputs ``(K G, N, P, J)`` as ``(K, N, ...)``, for inputs of this shape."""
        if self.windows is None:
            return rows.squeeze(2)
        sides = self.windows.size(*shape[-2:])
        channels = rows.unflatten(0, (shape[0], self.groups)).permute(0, 2, 1, 4, 3).flatten(2, 3)
        return channels.unflatten(3, sides)

    def output_rows(self, outputs: Tensor) -> Tensor:
        """Outputs ``(K, N, ...)`` as rows ``(K G, N, P, J)``."""
        if self.windows is None:
            return outputs.unsqueeze(2)
        channels = outputs.flatten(3).unflatten(2, (self.groups, self.outputs))
        return channels.permute(0, 2, 1, 4, 3).flatten(0, 1)

    def offset_rows(self, networks: int) -> Tensor | float:
        """The constants, to be added to rows of outputs."""
        if self.offset is None:
            return 0.0
        return self.offset.reshape(1, self.groups, 1, 1, -1).expand(networks, -1, -1, -1, -1).flatten(0, 1)


@dataclass(frozen=True)
class Activation:
    """A LeakyReLU.

    Attributes:
        slope: of the negative side; 0 for a ReLU.
    """

    slope: float


@dataclass(frozen=True)
class Pool:
    """Average or maximum over windows.

    Attributes:
        kind: ``"average"`` or ``"max"``.
        windows: None for one over the whole image.
    """

    kind: str
    windows: Windows | None = None

    def over(self, shape: Sequence[int]) -> Windows:
        """The windows in images of this shape."""
        side = (shape[-2], shape[-1])
        return Windows(side, side) if self.windows is None else self.windows


@dataclass(frozen=True)
class Flat:
    """All numbers of an example in one row."""


Stage = Weighted | Activation | Pool | Flat
"""A stage of a network."""


def weighted(stages: Sequence[Stage]) -> list[Weighted]:
    """The stages that have weights."""
    return [stage for stage in stages if isinstance(stage, Weighted)]


class Belief(NamedTuple):
    """Messages to the weights of a layer.

    Attributes:
        weights: ``(K G, I, J)``.
        bias: ``(K G, J)``; of a layer without a bias the tensors have no element.
    """

    weights: Message
    bias: Message

    def detailed(self) -> tuple[Message, Message]:
        """Weights and bias with a dimension for examples and, for the bias, one for positions."""
        return spread(self.weights), spread(self.bias)


def spread(message: Message) -> Message:
    """With a dimension for examples after the first."""
    return Message(message.tau.unsqueeze(1), message.rho.unsqueeze(1))


def product(a: Belief, b: Belief) -> Belief:
    """Of densities."""
    return Belief(multiplied(a.weights, b.weights), multiplied(a.bias, b.bias))


def quotient(a: Belief, b: Belief) -> Belief:
    """Of densities."""
    return Belief(divided(a.weights, b.weights), divided(a.bias, b.bias))


def silent(like: Belief) -> Belief:
    """A belief that says nothing."""
    return Belief(*(Message(*(torch.zeros_like(part) for part in message)) for message in like))


def combined(a: Belief, b: Belief, share: float) -> Belief:
    """``(1 - share) a + share b`` in natural parameters."""
    return Belief(
        *(
            Message(*(x.lerp(y, share) for x, y in zip(old, new, strict=True)))
            for old, new in zip(a, b, strict=True)
        )
    )


def input_marginal(message: Message, back: Message | None) -> Message:
    """Of a layer's inputs: what comes from before times the layer's own last message."""
    return clamped(message if back is None else multiplied(message, back), FLOOR)


def count(shape: Sequence[int]) -> int:
    """Numbers of an example of a tensor ``(K, N, ...)``."""
    return prod(shape[2:])
