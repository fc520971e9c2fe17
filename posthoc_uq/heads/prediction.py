"""From a model's outputs under a posterior to the likelihood's prediction, at the posterior's temperature and noise
variance.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.links import DRAWS
from posthoc_uq.predictions.samples import at_least_float32
from posthoc_uq.predictions.spread import Spread


def divisor_of(posterior: Posterior) -> float:
    """What outputs are divided by: the temperature where they are logits, 1 elsewhere."""
    return posterior.temperature if posterior.likelihood.logits else 1.0


def predict(outputs: Tensor, posterior: Posterior) -> Prediction:
    """The prediction from outputs of several draws at once, ``(draws, batch, ...)``, logits divided by the temperature.

    Raises:
        PosthocUQError: the outputs do not fit the likelihood.
    """
    return posterior.observation.from_draws(outputs)


def summarise(blocks: Iterable[Tensor], posterior: Posterior) -> Prediction:
    """The prediction from blocks ``(draws, batch, ...)`` of outputs, logits divided by the temperature.

    Raises:
        PosthocUQError: the outputs do not fit the likelihood.
    """
    return posterior.observation.from_blocks(blocks)


def from_gaussian(
    mean: Tensor,
    variance: Tensor,
    posterior: Posterior,
    *,
    covariance: Tensor | Spread | None = None,
    link: str = "mc",
    n_draws: int = DRAWS,
) -> Prediction:
    """The prediction of Gaussian outputs ``N(mean, variance)``; see `Likelihood.from_gaussian`.

    The posterior's temperature divides logits; its noise variance is added to a regression's.

    Args:
        mean: outputs ``(batch, outputs)``, or ``(batch,)`` for one.
        variance: of the same shape, in squared units.
        posterior: gives likelihood, temperature and noise variance.
        covariance: ``(batch, outputs, outputs)`` where the head knows it, or the `Spread` of many classes. Without it
            outputs count as independent.
        link: one of `posthoc_uq.predictions.links.LINKS`; see `classes_of_gaussian` there.
        n_draws: of the outputs, for ``"mc"``.

    Raises:
        PosthocUQError: the likelihood has no such link.
    """
    mean, variance = at_least_float32(mean), at_least_float32(variance).clamp(min=0)
    temperature = divisor_of(posterior)
    if temperature != 1.0:
        mean, variance = mean / temperature, variance / temperature**2
        if isinstance(covariance, Spread):
            covariance = covariance.over(temperature)
        elif covariance is not None:
            covariance = covariance / temperature**2
    return posterior.observation.from_gaussian(
        mean, variance, covariance=covariance, link=link, n_draws=n_draws
    )
