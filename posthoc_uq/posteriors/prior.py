"""The prior over a posterior's weights, as a posterior that saw nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.mean_field import MeanFieldBlock
from posthoc_uq.posteriors.record import Evidence

ALL_WEIGHTS = "of all weights"
"""What a training's record says of its prior where that is one and the same for every weight."""


def weight_prior(posterior: Posterior, precision: float | Mapping[str, float]) -> Posterior:
    """``N(., 1 / precision)`` over the weights of a posterior's layers.

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
        own = precision[name] if isinstance(precision, Mapping) else precision
        if not 0 < own < float("inf"):
            raise PosthocUQError(f"prior_precision must be positive and finite, not {own}.")
        like = posterior.original[layer.weight]
        kind = torch.float64 if like.dtype == torch.float64 else torch.float32
        blocks[name] = MeanFieldBlock(
            torch.full(layer.matrix_shape, 1.0 / own, dtype=kind, device=like.device), 1
        )
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
    """The precisions by layer of the prior that a training measured its posterior against: of the last layer's weights
    the posterior's prior precision, and of all others where the training gave them a variance; or of all weights alike.

    Raises:
        PosthocUQError: the posterior does not say which layer that was.
    """
    if posterior.record.fit.get("prior") == ALL_WEIGHTS:
        return {name: posterior.layer_prior(name) for name in posterior.layers}
    last, body = posterior.record.fit.get("last layer"), posterior.record.fit.get("prior body variance", 0.0)
    if last not in posterior.layers:
        raise PosthocUQError(
            "This trained posterior does not say what its prior was (it is from an older release); fit again, or ask "
            "for predictor.novelty(..., of='class')."
        )
    precisions = {name: 1 / body for name in posterior.layers if name != last and body > 0}
    return precisions | {last: posterior.layer_prior(last)}
