"""Predictions with numbers that are not finite are refused: nobody is to rank or refer inputs by a NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from posthoc_uq.errors import NonFiniteError
from posthoc_uq.predictions.base import Prediction

_MASKED = ("logits_mean", "log_probs")  # minus infinity marks a class that is masked out


def checked(prediction: Prediction, head: str, own: Callable[[], Tensor | None] = lambda: None) -> Prediction:
    """The prediction of a head itself, once its numbers are checked.

    Args:
        prediction: of the head.
        head: its name.
        own: gives the network's own outputs for the inputs, from which an error tells what is the matter.

    Raises:
        NonFiniteError: a number in it is not finite, except for classes that the model masks.
    """
    if torch.compiler.is_compiling():  # sizes are symbols there, and tensors have no numbers
        return prediction
    numbers = {name: value for name, value in prediction.numbers().items() if value.is_floating_point()}
    check_finite(numbers, "prediction", head, own)
    return prediction


def check_finite(
    answers: Mapping[str, Tensor], what: str, head: str, own: Callable[[], Tensor | None] = lambda: None
) -> None:
    """Check tensors ``(samples, ...)`` of a head, all with one wait for the device; `own` as in `checked`.

    Raises:
        NonFiniteError: a number in them is not finite; the message counts the samples.
    """
    if torch.compiler.is_compiling() or not answers:
        return
    good = torch.stack([_finite(name, tensor).all() for name, tensor in answers.items()])
    if bool(good.all()):
        return
    rows = torch.stack([_finite(name, tensor).flatten(1).all(1) for name, tensor in answers.items()]).all(0)
    bad = (~rows).nonzero().flatten().tolist()
    outputs, linearized = own(), head == "linearized"
    way_out = "layers='last'" if linearized else "the linearized head or layers='last'"
    if outputs is not None and len(outputs) == len(rows):
        sound = ~(outputs.isnan() | outputs.isposinf()).reshape(len(rows), -1).any(1)
        if bool(sound.to(rows.device)[~rows].all()):
            raise NonFiniteError(
                f"The {what} of {len(bad)} of {len(rows)} inputs is not finite (the first is number {bad[0]}), and the "
                f"network's own outputs for them are: the posterior is too wide for head={head!r}. Take a "
                f"narrower posterior, by uq.tune(posterior, loader, criterion='faithful', head={head!r}) or by a "
                f"larger prior_precision or scale; or take {way_out}."
            )
    others = " or layers='last'" if linearized else ", layers='last' or head='linearized'"
    raise NonFiniteError(
        f"The {what} of {len(bad)} of {len(rows)} inputs is not finite (the first is number {bad[0]}): these inputs, "
        f"or the model's outputs under the posterior's weights, are not finite or too large for {_dtype(answers)}. "
        f"Check the inputs, or predict without them; a narrower posterior (a larger prior_precision or "
        f"scale){others} keeps the weights nearer to the trained ones."
    )


def _finite(name: str, tensor: Tensor) -> Tensor:
    """Elementwise, ``(samples, 1 or more)``."""
    tensor = tensor.reshape(len(tensor), -1)
    return ~(tensor.isnan() | tensor.isposinf()) if name in _MASKED else torch.isfinite(tensor)


def _dtype(answers: Mapping[str, Tensor]) -> str:
    return str(next(iter(answers.values())).dtype).removeprefix("torch.")
