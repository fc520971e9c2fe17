"""Answers that are no finite numbers are refused: nobody is to rank or refer inputs by a NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.errors import NonFiniteError
from posthoc_uq.predictions.base import Prediction

_MASKED = ("logits_mean", "log_probs")  # minus infinity is a class that cannot be


def checked(prediction: Prediction) -> Prediction:
    """The prediction itself.

    Raises:
        NonFiniteError: something in it is not finite, but for classes that a model masks.
    """
    if torch.compiler.is_compiling():  # numbers of samples are symbols, and numbers are not there
        return prediction
    given = {field.name: getattr(prediction, field.name) for field in fields(cast(Any, prediction))}
    samples = len(prediction)
    check_finite(
        {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim
            and len(value) == samples
        },
        "prediction",
    )
    return prediction


def check_finite(answers: Mapping[str, Tensor], what: str) -> None:
    """Look at tensors ``(samples, ...)`` once, all together.

    Raises:
        NonFiniteError: one of them is not finite; counts the samples.
    """
    if torch.compiler.is_compiling() or not answers:
        return
    good = torch.stack([_finite(name, tensor).all() for name, tensor in answers.items()])
    if bool(good.all()):
        return
    rows = torch.stack([_finite(name, tensor).flatten(1).all(1) for name, tensor in answers.items()]).all(0)
    bad = (~rows).nonzero().flatten().tolist()
    raise NonFiniteError(
        f"The {what} of {len(bad)} of {len(rows)} inputs is not finite (the first is number {bad[0]}): these inputs, "
        f"or the model's outputs under the posterior's weights, are not finite or too large for {_dtype(answers)}. "
        f"Check the inputs; a narrower posterior (a larger prior_precision or scale), layers='last' or "
        f"head='linearized' keeps the weights nearer to the trained ones."
    )


def _finite(name: str, tensor: Tensor) -> Tensor:
    """Elementwise, ``(samples, 1 or more)``."""
    tensor = tensor.reshape(len(tensor), -1)
    return ~(tensor.isnan() | tensor.isposinf()) if name in _MASKED else torch.isfinite(tensor)


def _dtype(answers: Mapping[str, Tensor]) -> str:
    return str(next(iter(answers.values())).dtype).removeprefix("torch.")
