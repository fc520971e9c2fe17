"""Whether labels of a causal language model are its inputs, which `next_token` was forgotten for."""

from __future__ import annotations

from typing import Any

from torch import nn

from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.counted import layout_of
from posthoc_uq.loaders import Batch

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of such classes of transformers end


def unshifted_labels(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where the labels of a causal language model of transformers are its inputs, and the likelihood
    does not shift them; else None.

    Args:
        model: the user's, which is not run.
        batch: the first one.
        likelihood: of the fit.
    """
    targets = batch.targets
    layout = None if targets is None else layout_of(likelihood, targets)
    if targets is None or layout is None or layout.next_token or not _is_causal(model):
        return None
    counted = targets.long() != layout.ignore_index
    same = any(
        tensor.shape == targets.shape
        and not tensor.is_floating_point()
        and bool((tensor == targets.to(tensor.device))[counted.to(tensor.device)].all())
        for tensor in batch.tensors()
    )
    if not same or not bool(counted.any()):
        return None
    return (
        f"The labels are the inputs themselves, and {type(model).__name__} is a causal language model, whose outputs "
        f"predict the next token: pass likelihood=uq.Categorical(class_dim=-1, next_token=True), which shifts the "
        f"labels as the model's own loss does, or shift them yourself."
    )


def _is_causal(model: nn.Module) -> bool:
    """Whether a model is, or extends, a causal language model of transformers."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = [kind.__name__ for kind in type(model).__mro__]
    return any(name.endswith(_CAUSAL) for name in names) or getattr(config, "is_decoder", False) is True
