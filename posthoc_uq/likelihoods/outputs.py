"""Helpers of likelihoods: precision of outputs, divergences, plain values, the last node of an autograd graph."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError

# Autograd nodes that do not change values, by the start of their names.
_PASSING = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Clone", "ToCopy")


def wide(outputs: Tensor) -> Tensor:
    """Half precision outputs as float32: in half precision a softmax loses its tail."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def divergence_of_classes(log_probs: Tensor, prediction: Any) -> Tensor:
    """``sum_c p_c (log p_c - log q_c)``; a class that the network gives probability zero adds nothing."""
    predicted = prediction.probs.log() if prediction.log_probs is None else prediction.log_probs
    probs = log_probs.exp()
    terms = torch.where(probs > 0, probs * (log_probs - predicted), torch.zeros_like(probs))
    return terms.sum(1)


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax of logits ``(samples, classes)`` in float64, ``(samples,)``."""
    logs = logits.log_softmax(1)
    return -torch.where(logs.isneginf(), 0.0, logs.exp() * logs).sum(1)


def last_function(outputs: Tensor) -> str:
    """The name of the autograd node that made the outputs, before any changes of shape or type."""
    node: Any = outputs.grad_fn
    while node is not None and node.name().startswith(_PASSING):
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


def plain_value(likelihood: str, name: str, value: Any) -> Any:
    """A likelihood's attribute as a file keeps it: a number, a text, a list of them, a dictionary of them by text.

    Raises:
        PosthocUQError: it is none of these.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_value(likelihood, name, item) for item in cast(list[Any], value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], value)):
        items = cast(dict[str, Any], value).items()
        return {key: plain_value(likelihood, name, item) for key, item in items}
    raise PosthocUQError(
        f"Likelihood {likelihood!r} has an attribute {name!r} of the type {type(value).__name__}, which no file can "
        f"keep; give it plain numbers and texts, a name that begins with an underscore, or a method attributes()."
    )
