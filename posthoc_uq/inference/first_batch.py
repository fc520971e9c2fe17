"""What a fit warns of after a look at the first batch: what would otherwise be another model, or another likelihood,
than was meant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from posthoc_uq.arguments import DECODER_INPUTS, lacks_decoder_inputs
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.counted import layout_of
from posthoc_uq.likelihoods.log_mean import LogMean
from posthoc_uq.loaders import Batch

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of such classes of transformers end
_SEQUENCES = "ForConditionalGeneration"  # and of those that turn one sequence into another
_ENOUGH = 20  # targets from which a dispersion can be told
_FACTOR = 1.5  # by which it must be off


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


def missing_decoder_inputs(model: nn.Module, batch: Batch) -> str | None:
    """What to warn of where a model of transformers with an encoder and a decoder is called without inputs of the
    decoder; else None. Some, such as BART, then take the encoder's inputs in their place without an error.

    Args:
        model: the user's, which is not run.
        batch: the first one.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if not lacks_decoder_inputs(model, batch) or not any(name.endswith(_SEQUENCES) for name in names):
        return None
    return (
        f"{type(model).__name__} is called without decoder_input_ids, so its decoder reads the encoder's inputs, and "
        f"not the labels: {DECODER_INPUTS}"
    )


def other_dispersion(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where a likelihood was given by its name, and the targets vary by another dispersion, or shape,
    than the one that it then has; else None.

    Args:
        model: gives the outputs; it is run once.
        batch: the first one.
        likelihood: of the fit, with its default dispersion.
    """
    if not isinstance(likelihood, LogMean) or batch.targets is None or batch.targets.numel() < _ENOUGH:
        return None
    with torch.no_grad():
        outputs = batch.copied().call(model)
        likelihood.check(outputs, batch.targets)
        found = likelihood.by_moments(outputs, batch.targets)
    if found is None:
        return None
    name, assumed, estimate = found
    if max(assumed, estimate) <= _FACTOR * min(assumed, estimate):
        return None
    kind = f"uq.{type(likelihood).__name__}"
    return (
        f"likelihood={likelihood.name!r} stands for {kind}({name}={assumed:g}), and the residuals of the first batch "
        f"suggest {name}={estimate:.2g}; pass likelihood={kind}({name}=...)."
    )
