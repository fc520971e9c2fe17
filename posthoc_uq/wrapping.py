"""`wrap`: a model and its posterior as one module whose predictions carry their uncertainty."""

from __future__ import annotations

import torch
from torch import nn

from posthoc_uq.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.memory import return_freed_memory
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.replica import unwrap

HEADS = ("sampling",)


def wrap(
    model: nn.Module,
    posterior: Posterior,
    head: str = "sampling",
    *,
    n_samples: int = 30,
    seed: int | None = 0,
    generator: torch.Generator | None = None,
) -> SamplingPredictor:
    """Give `model` the uncertainty of `posterior`.

    Args:
        model: the model the posterior was fitted on, or a copy with the same parameters on any device.
        posterior: from `fit` or `load`.
        head: how to predict; ``"sampling"`` runs the model once per drawn set of weights.
        n_samples: draws of the weights.
        seed: of the draws; None draws differently every time.
        generator: in place of a seed.

    Returns:
        A module whose call takes what the model takes and returns a `ClassPrediction` or
        `RegressionPrediction`.

    Raises:
        PosteriorMismatchError: the model's parameters are not those the posterior is centred on.
        PosthocUQError: the head is unknown, or `n_samples` is not positive.
    """
    if head not in HEADS:
        raise PosthocUQError(f"head must be one of {HEADS}, not {head!r}.")
    check_match(model, posterior)
    predictor = SamplingPredictor(model, posterior, n_samples, seed, generator)
    return_freed_memory()
    return predictor


def check_match(model: nn.Module, posterior: Posterior) -> None:
    """Refuse a model whose parameters are not those the posterior is centred on.

    Raises:
        PosteriorMismatchError: a parameter is missing, or has another shape or other values.
    """
    parameters = dict(unwrap(model).named_parameters())
    for name, mean in posterior.mean.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise PosteriorMismatchError(
                f"The posterior covers parameter '{name}', which the model does not have; pass the model it "
                f"was fitted on."
            )
        if parameter.shape != mean.shape:
            raise PosteriorMismatchError(
                f"Parameter '{name}' has shape {tuple(parameter.shape)}, and the posterior was fitted on "
                f"{tuple(mean.shape)}; "
                f"pass the model it was fitted on."
            )
        same = parameter.data_ptr() == mean.data_ptr() and parameter.device == mean.device
        if not same and not torch.equal(parameter.detach().to(mean), mean):
            raise PosteriorMismatchError(
                f"The values of parameter '{name}' are not those the posterior was fitted on; fit again "
                f"after training."
            )
