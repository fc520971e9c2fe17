"""The posterior of each layer as the rules of the moments head need it: marginal variances in the weight's shape, and
the covariance of rows where that is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posthoc_uq.layers import Layer
from posthoc_uq.moments.propagation import products_of
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import ROWS
from posthoc_uq.posteriors.row_covariance import RowCovariance

WEIGHTS = ("auto", "row", "marginal")


class LayerNoise(nn.Module):
    """One layer; a module, so that it moves with its predictor.

    Attributes:
        variances: in the weight's shape, outputs first.
        bias_variances: of the bias, or None.
        summed: ``W o W + S`` for layers where that meets the input's variance alone, or None.
        joined: ``[W o W + S, S]`` along the input channels of a convolution without groups, or None.
        rows: the covariance of rows, or None.
        row: whether `rows` gives the variance.
    """

    variances: Tensor
    bias_variances: Tensor | None
    summed: Tensor | None
    joined: Tensor | None

    def __init__(
        self,
        layer: Layer,
        weight: Tensor,
        variances: Mapping[str, Tensor],
        rows: RowCovariance | None,
        row: bool,
    ) -> None:
        super().__init__()
        self.layer = layer.name
        self.row = row
        self.rows = None if rows is None else rows.to(weight.device)
        self._has_bias = layer.bias is not None
        own, summed, joined = products_of(layer, weight.detach(), variances[layer.weight])
        bias = variances[layer.bias].to(own) if layer.bias is not None else None
        for name, tensor in (
            ("variances", own),
            ("bias_variances", bias),
            ("summed", summed),
            ("joined", joined),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def _padded(self, mean: Tensor) -> Tensor:
        return torch.nn.functional.pad(mean, (0, 1), value=1.0) if self._has_bias else mean

    def row_variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Variance by the weights alone, ``(rows, outputs)``; see `RowCovariance.variance`."""
        assert self.rows is not None
        spread = variance
        if variance is not None and self._has_bias:
            spread = torch.nn.functional.pad(variance, (0, 1))
        found = self.rows.variance(
            self._padded(mean).unsqueeze(1), None if spread is None else spread.unsqueeze(1)
        )
        return found.squeeze(1)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """Covariance by the weights alone, ``(rows, outputs, outputs)``; see `RowCovariance.covariance`."""
        assert self.rows is not None
        if covariance is not None and self._has_bias:
            covariance = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
        return self.rows.covariance(self._padded(mean), covariance)


def layer_noises(model: nn.Module, posterior: Posterior, weights: str, cov: str) -> dict[str, LayerNoise]:
    """The noise of every layer of the posterior, by layer name.

    Args:
        weights: ``"row"`` keeps the covariance inside a row of linear layers, ``"marginal"`` no covariance at all,
            ``"auto"`` as `"row"` where the posterior knows it; linear layers use it for inputs ``(samples, inputs)``
            and marginal variances for inputs of several positions, where a row's covariance costs a product for each of
            its directions.
        cov: ``"full"`` needs the covariance across outputs, whatever `weights` says.
    """
    parameters = dict(model.named_parameters())
    variances = posterior.variance()
    found: dict[str, LayerNoise] = {}
    wanted = ROWS in posterior.capabilities if weights == "auto" else weights == "row"
    for name, layer in posterior.layers.items():
        linear = not layer.convolutional
        row = linear and wanted
        rows = posterior.rows(name) if linear and (row or cov == "full") else None
        found[name] = LayerNoise(layer, parameters[layer.weight], variances, rows, row)
    return found
