"""Whether a model gives probabilities where a likelihood takes logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.attempts import out_of_memory
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.replica import replicate

PROBABILITIES_MEANT = (
    "The model's outputs are probabilities, and are taken as the logits of a softmax or sigmoid that comes after them, "
    "because the likelihood is given as an object. If the model was not trained like that, predictions will be wrong."
)
_SAMPLES = 16  # of the first batch
_TOLERANCE = 1e-4  # of a probability
_TRIALS = 2  # sets of other weights


def gives_probabilities(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether a model's outputs are probabilities, although the likelihood takes logits.

    The outputs for some samples of a batch must look like probabilities (`Likelihood.seems_applied`), and still do with
    other weights. Logits may lie in [0, 1] and sum to 1 by how they were trained, but with other weights they do not;
    the outputs of a softmax or a sigmoid do with any.

    Args:
        model: copies of it are run.
        batch: the inputs.
        likelihood: of the fit.

    Raises:
        PosthocUQError: the model cannot be run on the batch.
    """
    if not likelihood.logits:
        return False
    samples = count_samples(batch)
    some = batch.narrow(0, min(samples, _SAMPLES), samples)
    try:
        outputs = _outputs(replicate(model), some)
    except Exception as error:  # a model that takes whole batches only; an error of its own comes again
        if out_of_memory(error):
            raise
        some = batch
        with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
            outputs = _outputs(replicate(model), some)
    return _look_applied(outputs, likelihood) and _stay_applied(model, some, likelihood)


def _stay_applied(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether the outputs still look like probabilities with other weights: the model's own, each times a random
    positive number, whose mean square is 1 so that activations keep their size.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIALS):
        weights = {
            name: parameter.detach()
            * (torch.randn(parameter.shape, generator=generator, device="cpu") - 1).exp().to(parameter)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        try:
            outputs = _outputs(replicate(model, weights), batch)
        except Exception as error:  # a model that checks its weights; nothing is known of it then
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
    values = outputs.detach().float()
    return bool(((values >= 0) & (values <= 1 + _TOLERANCE)).all()) and likelihood.seems_applied(outputs)


def refusal(likelihood: Likelihood) -> str:
    """The error of a model whose outputs are probabilities, for a likelihood that was given by its name."""
    return (
        f"The model's outputs are probabilities: it ends in a softmax or a sigmoid, and likelihood={likelihood.name!r} "
        f"takes logits, to which it applies one itself, so that predictions would be wrong. Pass the model without its "
        f"last softmax or sigmoid, for example model[:-1] of an nn.Sequential (log_softmax may stay); if it was "
        f"trained with these outputs as logits, say so with likelihood=uq.{type(likelihood).__name__}()."
    )
