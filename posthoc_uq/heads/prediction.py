"""What a head returns: the prediction that fits the likelihood."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.classification import ClassPrediction, TopK
from posthoc_uq.heads.regression import RegressionPrediction
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posthoc_uq.posteriors.base import Posterior

__all__ = ["ClassPrediction", "Prediction", "RegressionPrediction", "TopK", "predict"]

Prediction = ClassPrediction | RegressionPrediction


def predict(outputs: Tensor, posterior: Posterior) -> Prediction:
    """The prediction from outputs of several draws, ``(draws, batch, ...)``."""
    likelihood = posterior.likelihood
    if isinstance(likelihood, Categorical):
        return ClassPrediction.from_logits(outputs)
    if isinstance(likelihood, Bernoulli):
        return ClassPrediction.from_logits(outputs, binary=True)
    if isinstance(likelihood, Gaussian):
        noise = cast(Tensor, posterior.noise_variance).to(outputs.device)
        return RegressionPrediction.from_samples(outputs, noise.squeeze(0) if noise.numel() == 1 else noise)
    raise PosthocUQError(_no_prediction(likelihood))


def _no_prediction(likelihood: Likelihood) -> str:
    return (
        f"There is no prediction for likelihood {likelihood.name!r}; take the draws' outputs with "
        f"predictor.outputs(...) "
        f"and summarise them yourself."
    )
