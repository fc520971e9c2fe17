"""What a head returns: the prediction that fits the likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from posthoc_uq.devices import has_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.classification import ClassPrediction, TopK
from posthoc_uq.heads.regression import RegressionPrediction
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posthoc_uq.posteriors.base import Posterior

__all__ = [
    "ClassPrediction",
    "Prediction",
    "RegressionPrediction",
    "TopK",
    "cat",
    "predict",
    "predict_as",
    "with_novelty",
]

Prediction = ClassPrediction | RegressionPrediction


def predict(outputs: Tensor, posterior: Posterior) -> Prediction:
    """The prediction from outputs of several draws at once, ``(draws, batch, ...)``.

    Raises:
        PosthocUQError: the likelihood is one that no prediction is defined for, or the outputs do not fit it.
    """
    regression = isinstance(posterior.likelihood, Gaussian)
    return predict_as(
        posterior.likelihood, outputs, noise_of(posterior, outputs.device) if regression else None
    )


def predict_as(likelihood: Likelihood, outputs: Tensor, noise: Tensor | None = None) -> Prediction:
    """The prediction of a likelihood from outputs of several draws at once, ``(draws, batch, ...)``.

    Args:
        likelihood: of the targets.
        outputs: logits or means.
        noise: a regression's noise variance, that of the likelihood if None.

    Raises:
        PosthocUQError: the likelihood is one that no prediction is defined for, or the outputs do not fit it.
    """
    if isinstance(likelihood, Categorical):
        return ClassPrediction.from_logits(outputs)
    if isinstance(likelihood, Bernoulli):
        return ClassPrediction.from_logits(outputs, binary=True)
    if isinstance(likelihood, Gaussian):
        given = likelihood.noise_variance if noise is None else noise
        return RegressionPrediction.from_samples(outputs, _fitting(given, outputs.device))
    raise no_prediction(likelihood)


def cat(predictions: Sequence[Prediction]) -> Prediction:
    """Predictions of several batches as one, in order.

    Raises:
        PosthocUQError: nothing to join, or predictions that do not belong together.
    """
    classes = [p for p in predictions if isinstance(p, ClassPrediction)]
    values = [p for p in predictions if isinstance(p, RegressionPrediction)]
    if classes and values:
        raise PosthocUQError("cat got predictions of classes and of values; they cannot be one prediction.")
    return RegressionPrediction.cat(values) if values else ClassPrediction.cat(classes)


def with_novelty(prediction: Prediction, ratio: Tensor | None) -> Prediction:
    """The same prediction that knows its novelty ``(batch,)``, if there is one."""
    return prediction if ratio is None else replace(prediction, novelty_ratio=ratio)


def noise_of(posterior: Posterior, device: torch.device) -> Tensor:
    """The noise variance of a regression in a shape that fits its outputs: ``(outputs,)``, or a scalar for one."""
    return _fitting(cast(Tensor, posterior.noise_variance), device)


def _fitting(noise: Tensor, device: torch.device) -> Tensor:
    noise = noise.to(device, noise.dtype if has_double(device) else torch.float32)
    return noise.squeeze(0) if noise.numel() == 1 else noise


def can_be_faithful(likelihood: Likelihood) -> bool:
    """Whether heads make predictions of a likelihood, and it says how far they are from the network's."""
    return isinstance(likelihood, (Categorical, Bernoulli, Gaussian)) and likelihood.has_divergence


def no_prediction(likelihood: Likelihood) -> PosthocUQError:
    """The error for a likelihood that no prediction is defined for."""
    return PosthocUQError(
        f"There is no prediction for likelihood {likelihood.name!r}; take the draws' outputs with "
        f"wrap(..., head='sampling').outputs(...) and summarise them yourself."
    )
