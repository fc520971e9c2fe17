"""Which of a model's outputs the linearised head uses, and how much of their covariance its link gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posthoc_uq.errors import PosthocUQError

ALL_OUTPUTS = 20  # up to which `outputs="auto"` takes all of them
TOP = 10  # classes that "topk" takes
_COVARIANCE_CLASSES = 50  # up to which the link gets a covariance of all


@dataclass(frozen=True)
class ChosenOutputs:
    """The outputs that are used.

    Attributes:
        top: ``"all"``, ``"auto"``, or a number of classes.
        classes: whether outputs are logits of several classes.
        joint: whether the prediction needs the covariance of a sample's outputs.
        link: the name of the link from Gaussian logits to probabilities.
    """

    top: int | str
    classes: bool
    joint: bool
    link: str

    def number(self, outputs: Tensor) -> int | None:
        """How many of a sample's outputs are used, or None for all."""
        size = outputs[0].numel()
        if self.top == "all":
            return None
        if isinstance(self.top, int):
            return None if self.top >= size else self.top
        return TOP if size > ALL_OUTPUTS and self.classes else None

    def indices(self, outputs: Tensor) -> Tensor | None:
        """The outputs used, ``(samples, k)``, the largest first; or None for all."""
        used = self.number(outputs)
        return None if used is None else outputs.flatten(1).topk(used).indices

    def wants_covariance(self, mean: Tensor) -> bool:
        """Whether the link gets the full covariance of the outputs."""
        return self.joint and mean[0].numel() <= _COVARIANCE_CLASSES and self.number(mean) is None

    def wants_spread(self) -> bool:
        """Whether the link can use a `Spread`: an approximate covariance of many classes."""
        return self.classes and self.link != "bridge"


def checked_outputs(outputs: str | int) -> int | str:
    """``"all"``, ``"auto"``, or a number of classes.

    Raises:
        PosthocUQError: `outputs` is none of these.
    """
    if outputs in ("all", "auto"):
        return str(outputs)
    number: Any = outputs
    if outputs == "topk":
        number = TOP
    elif isinstance(outputs, str) and outputs.startswith("topk:") and outputs[5:].isdecimal():
        number = int(outputs[5:])
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PosthocUQError(
            f"outputs must be 'auto', 'all', 'topk', 'topk:K' or a positive number of classes, not {outputs!r}."
        )
    return number


def check_shape(outputs: Tensor, samples: int) -> None:
    """Refuse outputs of more dimensions than the linearised head can serve.

    Raises:
        PosthocUQError: they are not ``(batch,)`` or ``(batch, outputs)``.
    """
    if outputs.ndim not in (1, 2) or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"The linearised head needs outputs of shape (batch,) or (batch, outputs), and {samples} inputs gave "
            f"{tuple(outputs.shape)}."
        )
