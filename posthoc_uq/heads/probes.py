"""The linearisation of one batch by draws of its function: the engine ``"jvp"``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posthoc_uq.heads.chosen_outputs import ChosenOutputs, check_shape
from posthoc_uq.heads.fixed_part import FixedPart
from posthoc_uq.heads.function_draws import function_draws
from posthoc_uq.heads.interception import ReplayError, intercept
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.replay import FeatureBatch, check_refused_replay
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.predictions.spread import of_product


class Probes:
    """The outputs of one batch, and draws of their deviations ``J (theta_r - theta)``.

    Attributes:
        mean: outputs ``(samples, ...)``.
    """

    def __init__(self, mean: Tensor, deviations: Tensor, chosen: ChosenOutputs) -> None:
        """
        Args:
            mean: outputs.
            deviations: ``(draws, samples, outputs)``.
            chosen: the outputs that are used.
        """
        check_shape(mean, deviations.shape[1])
        self.mean, self._deviations, self._chosen = mean, deviations, chosen
        self.watched: list[Call] = []  # no layer is watched in these passes

    def variance(self) -> Tensor:
        """Variance of every output, ``(samples, outputs)``."""
        return self._deviations.square().mean(0)

    def trace(self, probes: int) -> Tensor:
        """The sum of all outputs' variances, ``(samples,)``; from all draws, whatever `probes` says."""
        return self.variance().sum(1)

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        deviations, indices = self._deviations, self._chosen.indices(self.mean)
        if indices is not None:
            deviations = deviations.gather(2, indices.expand(len(deviations), -1, -1))
        if joint:
            flat = deviations.flatten(1)
            return flat.T @ flat / len(flat)
        return _products(deviations)

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the covariance as the link can use."""
        deviations, variance = self._deviations, self.variance()
        if self._chosen.wants_covariance(self.mean):
            return GaussianOutputs(self.mean, variance, _products(deviations))
        if not self._chosen.wants_spread():
            return GaussianOutputs(self.mean, variance)
        root = deviations.permute(1, 2, 0) / len(deviations) ** 0.5
        spread = of_product(self.mean, variance, lambda x: root @ (root.transpose(1, 2) @ x))
        return GaussianOutputs(self.mean, variance, spread)


def _products(deviations: Tensor) -> Tensor:
    """Mean over the draws of all products of two outputs, ``(samples, outputs, outputs)``."""
    return torch.einsum("rsc,rsd->scd", deviations, deviations) / len(deviations)


def drawn_outputs(
    model: nn.Module,
    fixed_part: FixedPart,
    batch: Batch,
    samples: int,
    deviations: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs ``(samples, ...)``, and their derivatives along deviations of the weights, ``(draws, samples, outputs)``.

    Args:
        model: nothing else may run it meanwhile.
        fixed_part: of the model; it runs once, and the draws run what follows.
        batch: the model's inputs, or features in their place.
        samples: in the batch.
        deviations: parameter name to ``(draws, *shape)``.
        dtype: of the derivatives.
    """
    features = None if isinstance(batch, FeatureBatch) else fixed_part.features(batch.args, batch.kwargs)
    if features is not None:
        intercept(model)

        def replayed() -> tuple[Tensor, Tensor]:
            return drawn_outputs(model, fixed_part, FeatureBatch(features), samples, deviations, dtype)

        try:
            return replayed()
        except ReplayError as error:
            check_refused_replay(error, replayed)
            fixed_part.refuse(str(error))
    outputs, derivatives = function_draws(model, batch, deviations)
    return outputs, derivatives.to(dtype).flatten(2) if outputs.ndim > 1 else derivatives.unsqueeze(2)
