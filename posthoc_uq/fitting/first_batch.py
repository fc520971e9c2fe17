"""A look at the first batch of a fit: whether model, data and likelihood are what the user thinks they are.

What would silently fit another model or another likelihood than was meant is an error or a warning here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import (
    DECODER_INPUTS,
    LOADER,
    Batch,
    count_samples,
    explained,
    lacks_decoder_inputs,
)
from posthoc_uq.core.devices import at_least_float32
from posthoc_uq.core.errors import PosthocUQError, check_refused, out_of_memory
from posthoc_uq.core.model import replicate
from posthoc_uq.layers.proof import Prepared, in_unit_interval
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.labels import LabelLayout
from posthoc_uq.likelihoods.prediction import check_rows

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of such classes of transformers end
_SEQUENCES = "ForConditionalGeneration"  # and of those that turn one sequence into another
_DISPERSION_TARGETS = 20  # from which a dispersion can be estimated
_DISPERSION_FACTOR = 1.5  # by which it must be off
_MAX_PROBED = 16  # samples whose outputs are looked at
_OTHER_WEIGHTS = 2  # sets of other weights that are tried

Result = TypeVar("Result")


def check_first_batch(
    users_model: nn.Module, prepared: Prepared, batch: Batch, likelihood: Likelihood, by_name: bool
) -> list[str]:
    """What to warn of.

    Args:
        users_model: which is not run.
        prepared: by the dry run, with the same model, whose outputs are chosen; copies of it are run.
        batch: the first one.
        likelihood: of the fit.
        by_name: whether it was given by its name, so that its parameters are its defaults.

    Raises:
        PosthocUQError: outputs, targets and likelihood do not fit together.
    """
    model = prepared.model
    check_log_prob(model, batch, likelihood)
    warnings = [unshifted_labels(users_model, batch, likelihood), missing_decoder_inputs(users_model, batch)]
    if by_name:
        warnings.append(other_dispersion(model, batch, likelihood))
    if prepared.in_unit and gives_probabilities(model, batch, likelihood):
        if by_name:
            last = makes_probabilities(model, batch, likelihood)
            example = (
                "for example model[:-1] of an nn.Sequential"
                if last is None
                else f"model.set_submodule({last!r}, torch.nn.Identity())"
            )
            raise PosthocUQError(
                f"The model's outputs are probabilities, and likelihood={likelihood.name!r} takes logits: pass the "
                f"model without its last softmax or sigmoid, {example} (log_softmax may stay). If it was trained with "
                f"these outputs as logits, pass likelihood=uq.{type(likelihood).__name__}()."
            )
        warnings.append(
            "The model's outputs are probabilities, and are taken as the logits of a softmax or sigmoid that comes "
            "after them, because the likelihood is given as an object. If the model was not trained like that, "
            "predictions will be wrong."
        )
    return [warning for warning in warnings if warning is not None]


def on_few_samples(run: Callable[[Batch], Result], batch: Batch, few: int) -> tuple[Batch, Result]:
    """The first few samples of a batch and the result of running them; or all samples and their result, where the
    model takes whole batches only.
    """
    samples = count_samples(batch)
    part = batch.narrow(0, min(samples, few), samples)
    try:
        return part, run(part)
    except Exception as error:  # a model may fail in any way; its error comes again with the whole batch
        check_refused(error, lambda: run(part), lambda: run(batch))
    return batch, run(batch)


def check_log_prob(model: nn.Module, batch: Batch, likelihood: Likelihood) -> None:
    """Check the `log_prob` of a user's likelihood where there are targets; those of this package are not checked.

    Raises:
        PosthocUQError: outputs and targets do not fit, or a sample's log probability depends on other samples.
    """
    if batch.targets is None or type(likelihood).log_prob.__module__.startswith("posthoc_uq."):
        return
    with torch.no_grad():
        outputs = at_least_float32(batch.copied().call(replicate(model)))
    if not bool(torch.isfinite(outputs).all()):
        return  # the fit raises an error that names the batch
    try:
        likelihood.check(outputs, batch.targets)
        check_rows(likelihood.log_prob, outputs, batch.targets, likelihood.name)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch 0: {error}") from None


def unshifted_labels(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where the labels of a causal language model of transformers are its inputs, and the likelihood
    does not shift them.
    """
    targets = batch.targets
    layout = None if targets is None else likelihood.layout_of_targets(targets)
    if targets is None or not isinstance(layout, LabelLayout) or layout.next_token or not _is_causal(model):
        return None
    counted = targets.long() != layout.ignore_index
    same = any(
        tensor.shape == targets.shape
        and not tensor.is_floating_point()
        and bool((tensor == targets.to(tensor.device))[counted.to(tensor.device)].all())
        for tensor in batch.tensors
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
    decoder. Some, such as BART, then take the encoder's inputs in their place without an error.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if not lacks_decoder_inputs(model, batch) or not any(name.endswith(_SEQUENCES) for name in names):
        return None
    return (
        f"{type(model).__name__} is called without decoder_input_ids, so its decoder reads the encoder's inputs, and "
        f"not the labels: {DECODER_INPUTS}"
    )


def other_dispersion(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where the targets vary by another dispersion, or shape, than the likelihood's default."""
    if (
        type(likelihood).by_moments is Likelihood.by_moments
        or batch.targets is None
        or batch.targets.numel() < _DISPERSION_TARGETS
    ):
        return None
    with torch.no_grad():
        outputs = batch.copied().call(model)
        likelihood.check(outputs, batch.targets)
        found = likelihood.by_moments(outputs, batch.targets)
    if found is None:
        return None
    name, assumed, estimate = found
    if max(assumed, estimate) <= _DISPERSION_FACTOR * min(assumed, estimate):
        return None
    kind = f"uq.{type(likelihood).__name__}"
    return (
        f"likelihood={likelihood.name!r} stands for {kind}({name}={assumed:g}), and the residuals of the first batch "
        f"suggest {name}={estimate:.2g}; pass likelihood={kind}({name}=...)."
    )


def gives_probabilities(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether a model's outputs are probabilities, although the likelihood takes logits.

    The outputs for some samples of a batch must look like probabilities (`Likelihood.looks_like_probabilities`), and
    still do with other weights. Logits may lie in [0, 1] and sum to 1 by how they were trained, but with other weights
    they do not; the outputs of a softmax or a sigmoid do with any.

    Raises:
        PosthocUQError: the model cannot be run on the batch.
    """
    if not likelihood.logits:
        return False
    with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
        some, outputs = on_few_samples(lambda part: _outputs(replicate(model), part), batch, _MAX_PROBED)
    return _look_applied(outputs, likelihood) and _stay_applied(model, some, likelihood)


def makes_probabilities(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """Name of the softmax or sigmoid without which the model's outputs are no probabilities any more; None where
    that is no module of the model.
    """
    some, _ = on_few_samples(lambda part: _outputs(replicate(model), part), batch, _MAX_PROBED)
    for name, module in model.named_modules():
        if name and isinstance(module, (nn.Softmax, nn.Softmax2d, nn.Sigmoid)):
            without = replicate(model)
            without.set_submodule(name, nn.Identity())
            try:
                if not _look_applied(_outputs(without, some), likelihood):
                    return name
            except Exception as error:  # a model may need what the module gives
                if out_of_memory(error):
                    raise
    return None


def _stay_applied(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether the outputs still look like probabilities with other weights: those of the model, each times a random
    positive number, whose mean square is 1 so that activations keep their size.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_OTHER_WEIGHTS):
        weights = {
            name: parameter.detach()
            * (torch.randn(parameter.shape, generator=generator, device="cpu") - 1).exp().to(parameter)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        try:
            outputs = _outputs(replicate(model, weights), batch)
        except Exception as error:  # a model that checks its weights; with the trained ones it has run
            if out_of_memory(error):
                raise
            return False
        if not _look_applied(outputs, likelihood):
            return False
    return True


def _outputs(network: nn.Module, batch: Batch) -> Tensor:
    """The outputs of a copy of the model, with their graph."""
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.enable_grad():
        return batch.copied().call(network)


def _look_applied(outputs: Tensor, likelihood: Likelihood) -> bool:
    return in_unit_interval(outputs) and likelihood.looks_like_probabilities(outputs)
