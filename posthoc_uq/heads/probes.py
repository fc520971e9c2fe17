"""A linearised batch by draws of its function: the engine ``"jvp"``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posthoc_uq.heads.chosen import ChosenOutputs, check_shape
from posthoc_uq.heads.cut import Cut
from posthoc_uq.heads.function_draws import function_draws
from posthoc_uq.heads.interception import ReplayError, intercept
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.replay import Rest
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.predictions.spread import of_product


class Probes:
    """The outputs of one batch, and draws of their deviation ``J (theta_r - theta)``.

    Attributes:
        mean: outputs ``(samples, ...)``.
    """

    def __init__(self, mean: Tensor, deviations: Tensor, chosen: ChosenOutputs) -> None:
        """
        Args:
            mean: outputs.
            deviations: ``(draws, samples, outputs)``.
            chosen: the outputs looked at.
        """
        self.mean, self._deviations, self._chosen = mean, deviations, chosen
        self.watched: list[Call] = []  # no layer is watched in these passes

    def variance(self) -> Tensor:
        """Of every output, ``(samples, outputs)``."""
        return self._deviations.square().mean(0)

    def trace(self, probes: int) -> Tensor:
        """The sum of all outputs' variances, ``(samples,)``; these draws are the probes."""
        return self.variance().sum(1)

    def covariance(self, joint: bool) -> Tensor:
        """Of the outputs looked at; see `LinearizedPredictor.functional_covariance`."""
        deviations, indices = self._deviations, self._chosen.indices(self.mean)
        if indices is not None:
            deviations = deviations.gather(2, indices.expand(len(deviations), -1, -1))
        if joint:
            flat = deviations.flatten(1)
            return flat.T @ flat / len(flat)
        return _products(deviations)

    def gaussian(self) -> GaussianOutputs:
        """With what the link is told of the covariance."""
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
    cut: Cut,
    batch: Batch,
    samples: int,
    deviations: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs ``(samples, ...)``, and their derivatives along deviations of the weights, ``(draws, samples, outputs)``.

    Args:
        model: nothing else may run it meanwhile.
        cut: of the model, so that what comes before the weights runs once.
        batch: its inputs, or features in their place.
        samples: in the batch.
        deviations: parameter name to ``(draws, *shape)``.
        dtype: of the derivatives.
    """
    features = None if isinstance(batch, Rest) else cut.features(batch.args, batch.kwargs)
    if features is not None:
        try:
            intercept(model)
            return drawn_outputs(model, cut, Rest(features), samples, deviations, dtype)
        except ReplayError as error:
            cut.refuse(str(error))
    outputs, found = function_draws(model, batch, deviations)
    check_shape(outputs, samples)
    return outputs, found.to(dtype).flatten(2) if outputs.ndim > 1 else found.unsqueeze(2)
