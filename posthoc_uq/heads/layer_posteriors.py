"""The posterior of each layer as the rules of the moments head need it: marginal variances in the weight's shape, and
the covariance of each row of weights where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posthoc_uq.layers import Layer
from posthoc_uq.moments.propagation import products_of
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import ROWS
from posthoc_uq.posteriors.row_covariance import IndependentRows, RowCovariance

WEIGHTS = ("auto", "row", "marginal")


class LayerPosterior(nn.Module):
    """The posterior of one layer's weights; a module, so that it moves with its predictor.

    Attributes:
        variances: in the weight's shape, outputs first.
        bias_variances: of the bias, or None.
        summed: ``W o W + S`` (W the means, S the variances), by which the input's variance is multiplied, or None.
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
        marginals, summed, joined = products_of(layer, weight.detach(), variances[layer.weight])
        bias = variances[layer.bias].to(marginals) if layer.bias is not None else None
        for name, tensor in (
            ("variances", marginals),
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
        input_variance = variance
        if variance is not None and self._has_bias:
            input_variance = torch.nn.functional.pad(variance, (0, 1))
        row_variance = self.rows.variance(
            self._padded(mean).unsqueeze(1), None if input_variance is None else input_variance.unsqueeze(1)
        )
        return row_variance.squeeze(1)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """Covariance by the weights alone, ``(rows, outputs, outputs)``; see `RowCovariance.covariance`."""
        assert self.rows is not None
        if covariance is not None and self._has_bias:
            covariance = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
        return self.rows.covariance(self._padded(mean), covariance)


def layer_posteriors(
    model: nn.Module, posterior: Posterior, weights: str, cov: str
) -> dict[str, LayerPosterior]:
    """The `LayerPosterior` of every layer, by layer name.

    Args:
        weights: ``"row"`` keeps the covariance inside a row of linear layers, ``"marginal"`` no covariance at all,
            ``"auto"`` as `"row"` where the posterior knows it; linear layers use it for inputs ``(samples, inputs)``
            and marginal variances for inputs of several positions, where a row's covariance costs a product for each of
            its directions.
        cov: ``"full"`` needs the covariance across outputs, whatever `weights` says.
    """
    parameters = dict(model.named_parameters())
    by_name: dict[str, LayerPosterior] = {}
    rows_wanted = ROWS in posterior.capabilities if weights == "auto" else weights == "row"
    if cov == "full":
        posterior.require([ROWS], "cov='full'", "take cov='diag'")
    linear = [name for name, layer in posterior.layers.items() if not layer.convolutional]
    wanted = linear if rows_wanted or cov == "full" else []
    # first the rows, which know the variances too
    by_layer = {name: posterior.rows(name, across=cov == "full") for name in wanted}
    variances = posterior.variance()
    for name, layer in posterior.layers.items():
        rows = by_layer.get(name)
        # independent rows have the marginal variances alone
        row = rows_wanted and rows is not None and not isinstance(rows, IndependentRows)
        by_name[name] = LayerPosterior(layer, parameters[layer.weight], variances, rows, row)
    return by_name
