"""Priors over functions, and how far a variational last layer is from each at some inputs.

One prior is what a prior over the weights says of functions, linearised at some parameters: function values at inputs
with alike features go together. The other takes every function value as independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from posthoc_uq.curvature.plain_attention import PlainAttention
from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.forward import jvp
from posthoc_uq.inference.function_kl import (
    FunctionKL,
    gaussian_kl,
    last_layer_covariance,
    last_layer_variances,
    marginal_kl,
    relative_function_noise,
)
from posthoc_uq.inference.mean_field import FeatureNetwork
from posthoc_uq.loaders import Batch

Moments = tuple[Tensor, Tensor]
"""Means ``(inputs, outputs)`` and features ``(inputs, H)``."""


class FunctionPrior:
    """The Gaussian over functions that a prior over the weights gives, linearised at its own parameters.

    Args:
        network: runs with any parameters.
        parameters: at which it is linearised.
        mean: ``"zero"``; anything else takes the outputs at these parameters.
        precision: of the last layer's weights.
        body_variance: of all other weights; 0 leaves them certain.
        function_noise: a variance that is added to every function value of either side, as a share of the prior's.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        parameters: Mapping[str, Tensor],
        mean: str,
        precision: float,
        body_variance: float = 0.0,
        function_noise: float = 1e-6,
    ) -> None:
        self._network, self._parameters = network, dict(parameters)
        self._mean, self._variance, self._body_variance = mean, 1.0 / precision, body_variance
        self._function_noise = function_noise

    @torch.no_grad()
    def moments(
        self,
        batch: Batch,
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> Moments:
        """Means ``(inputs, outputs)`` and features ``(inputs, H)``.

        Args:
            normals: standard normals for the body's parameters, where the body has a variance.
            at_hand: outputs and features at the prior's parameters, where they are known already.
        """
        if self._body_variance and normals:
            scaled = {name: value * self._body_variance**0.5 for name, value in normals.items()}
            outputs, features, moved = linearised_draw(self._network, self._parameters, scaled, batch)
        else:
            outputs, features = at_hand or self._network(self._parameters, batch)
            moved = torch.zeros_like(outputs)
        return (moved if self._mean == "zero" else outputs + moved), features

    def covariance(self, features: Tensor) -> Tensor:
        """``(*sets, 1, inputs, inputs)``: the same for every output."""
        layer, wide = self._network.last, as_double(features)
        variances = wide.new_full((1, wide.shape[-1]), self._variance)
        return last_layer_covariance(wide, variances, None if layer.bias is None else variances[:, 0])

    def divergence(
        self,
        batch: Batch,
        mean: Tensor,
        features: Tensor,
        variances: tuple[Tensor, Tensor | None],
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> FunctionKL:
        """``KL(q(f(X)) || p(f(X)))`` of every set of inputs, differentiable in all that is q's.

        Args:
            batch: the inputs, set by set.
            mean: of the function values by q, ``(sets, inputs, outputs)``.
            features: that q's last layer sees, ``(sets, inputs, H)``.
            variances: of that layer's weights ``(outputs, H)``, and of its biases if it has any.
            normals: see `moments`.
            at_hand: see `moments`.
        """
        prior_mean, prior_features = self.moments(batch, normals, at_hand)
        prior_covariance = self.covariance(_by_set(prior_features, mean))
        return gaussian_kl(
            mean.transpose(1, 2),
            last_layer_covariance(features, *variances),
            _by_set(prior_mean, mean).transpose(1, 2),
            prior_covariance,
            relative_function_noise(prior_covariance, self._function_noise),
        )


class IndependentPrior(FunctionPrior):
    """Every function value is Gaussian with one variance, independent of all others (the objective of the published
    FashionMNIST figures). Only the marginal variances of q enter, so no Cholesky factor is needed, and any number of
    inputs may be taken.

    Args:
        network: runs with any parameters.
        parameters: at which the outputs are taken, for a mean that is not zero.
        mean: ``"zero"``; anything else takes the outputs at these parameters.
        variance: of a function value.
    """

    def __init__(
        self, network: FeatureNetwork, parameters: Mapping[str, Tensor], mean: str, variance: float
    ) -> None:
        super().__init__(network, parameters, mean, 1.0)
        self._value_variance = variance

    def divergence(
        self,
        batch: Batch,
        mean: Tensor,
        features: Tensor,
        variances: tuple[Tensor, Tensor | None],
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> FunctionKL:
        if self._mean == "zero":  # the features are not asked for, so the network need not run
            prior_mean = torch.zeros_like(mean)
        else:
            prior_mean = _by_set(self.moments(batch, None, at_hand)[0], mean)
        return marginal_kl(mean, last_layer_variances(features, *variances), prior_mean, self._value_variance)


def _by_set(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(len(like), -1, values.shape[1])


def linearised_draw(
    network: FeatureNetwork,
    parameters: Mapping[str, Tensor],
    deviations: Mapping[str, Tensor],
    batch: Batch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and features at these parameters, and the derivative of the outputs along the deviations, by one
    forward-mode pass; differentiable in parameters and deviations.

    Raises:
        PosthocUQError: some operation of the model has no forward derivative.
    """
    moved = {name: parameters[name] for name in deviations}
    fixed = {name: value for name, value in parameters.items() if name not in deviations}

    def run(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return network({**fixed, **weights}, batch)

    try:
        with PlainAttention():
            values, tangents = cast(
                tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], jvp(run, (moved,), (dict(deviations),))
            )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not any(word in reason for word in ("forward AD", "forward mode", "autograd.Function")):
            raise
        raise PosthocUQError(
            f"body='linearized' needs forward derivatives, and the model has an operation without one ({reason}); use "
            f"body='sample'."
        ) from error
    return values[0], values[1], tangents[0]
