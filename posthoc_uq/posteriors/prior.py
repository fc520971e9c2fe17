"""The prior over a posterior's weights, as a posterior that saw nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence, layer_matrix
from posthoc_uq.posteriors.variational import MeanFieldBlock

ONE_PRIOR = "one prior for all weights"
"""True in the record of a training whose prior is one and the same for every weight."""


def weight_prior(posterior: Posterior, precision: float | Mapping[str, float]) -> Posterior:
    """``N(., 1 / precision)`` over the weights of a posterior's layers; with the factors that its prior has on the
    precisions of single weights.

    Args:
        posterior: whose layers.
        precision: one number, or one by layer; layers that it does not name are left out.

    Raises:
        PosthocUQError: a precision is not positive and finite.
    """
    blocks: dict[str, Block] = {}
    for name, layer in posterior.layers.items():
        if isinstance(precision, Mapping) and name not in precision:
            continue
        layer_precision = precision[name] if isinstance(precision, Mapping) else precision
        if not 0 < layer_precision < float("inf"):
            raise PosthocUQError(f"prior_precision must be positive and finite, not {layer_precision}.")
        like = posterior.original[layer.weight]
        kind = torch.float64 if like.dtype == torch.float64 else torch.float32
        variance = torch.full(layer.matrix_shape, 1.0 / layer_precision, dtype=kind, device=like.device)
        if posterior.weight_prior.precision:
            variance = variance / layer_matrix(layer, posterior.weight_prior.precision).to(variance)
        blocks[name] = MeanFieldBlock(variance, 1)
    return Posterior(
        posterior.method,
        {name: posterior.layers[name] for name in blocks},
        blocks,
        {name: [name] for name in blocks},
        posterior.original,
        posterior.likelihood,
        Evidence(1, noise_power=0),
    )


def training_precisions(posterior: Posterior) -> dict[str, float]:
    """The prior precisions by layer that a training used: of all weights alike, or for the last layer's weights the
    posterior's prior precision, and for the others the one of the training's body variance, if it had any. A weight
    that may be off has the variance of one that is on times the probability of that.

    Raises:
        PosthocUQError: the posterior does not say which layer that was.
    """
    fitted = posterior.history.fit
    if fitted.get(ONE_PRIOR):
        share = float(fitted.get("prior inclusion", 1.0))  # of the weights are on
        return {name: posterior.layer_prior(name) / share for name in posterior.layers}
    last, body = fitted.get("last layer"), fitted.get("prior body variance", 0.0)
    if last not in posterior.layers:
        raise PosthocUQError(
            "This trained posterior does not say what its prior was; fit again, or ask "
            "for predictor.novelty(..., of='class')."
        )
    precisions = {name: 1 / body for name in posterior.layers if name != last and body > 0}
    return precisions | {last: posterior.layer_prior(last)}
