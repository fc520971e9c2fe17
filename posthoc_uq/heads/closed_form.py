"""Predictions of the linearised head by the closed form of the last layer, for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.curvature.features import calls_of, watched_for, watching
from posthoc_uq.heads.jacobians import WeightCovariance
from posthoc_uq.heads.linearized_outputs import ChosenOutputs, LastLayerOutputs
from posthoc_uq.heads.novelty import novelty_of_calls
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.rules import LayerGradients
from posthoc_uq.likelihoods.draws import OutputGaussian
from posthoc_uq.likelihoods.positions import novelty_at
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors import Posterior


class ClosedForm:
    """Predictions by the closed form of the last layer, in functions that a tracer follows.

    Attributes:
        network: at the posterior's mean, in eval mode; nothing else may run it meanwhile.
    """

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        layer: Layer,
        chosen: ChosenOutputs,
        weights: WeightCovariance,
        prediction_of: Callable[[OutputGaussian], Prediction],
        novelty: bool,
    ) -> None:
        """
        Args:
            network: see above.
            posterior: its posterior.
            layer: whose outputs are the model's.
            chosen: the outputs that are used.
            weights: their covariance.
            prediction_of: what the head makes of Gaussian outputs.
            novelty: whether predictions know theirs.
        """
        self.network, self._posterior, self._layer, self._chosen = network, posterior, layer, chosen
        self._prediction_of, self._novelty, self._weights = prediction_of, novelty, weights
        self._covariance = weights.of_layer(layer.name).traceable(
            layer.matrix_shape, chosen.wants_covariance(layer.outputs, False)
        )

    def __call__(self, *args: Any) -> Prediction:
        """The prediction of a batch."""
        posterior, layer, batch = self._posterior, self._layer, Batch(args)
        features = posterior.features if self._novelty else None
        watched = watched_for(layer)
        if features is not None:
            watched = (*features.watched, *(w for w in watched if w.layer.weight != features.layer.weight))
        with watching(self.network, watched, batch.attention_mask) as calls:
            outputs = batch.call(self.network)
        samples = outputs.shape[0]
        operand = LayerGradients(layer, calls_of(calls, layer), samples, 0).activations(self._weights.dtype)
        found = LastLayerOutputs(
            self._chosen,
            self._chosen.layout(outputs, samples),
            outputs,
            samples,
            layer,
            operand.rows().flatten(0, 2),
            self._weights,
            covariance=self._covariance,
        )
        prediction = self._prediction_of(found.gaussian())
        if features is None:
            return prediction
        ratio = novelty_of_calls(features, calls, batch)
        if found.picked is not None:
            ratio = novelty_at(ratio, found.sizes, found.picked)
        return prediction.with_novelty(ratio)
