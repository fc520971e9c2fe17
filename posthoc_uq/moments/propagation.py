"""A model run once on tensors with moments, and independent weights as its layers' rules need them.

The moments head and the training by moments both run this; autograd records it where means or variances of the weights
need gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.layers.layer import Layer
from posthoc_uq.moments.tensor import MomentTensor, Pass, Rules, WeightPosterior, variance_dtype


class OutputMoments(NamedTuple):
    """What a pass says of the outputs, before temperature and noise.

    Attributes:
        mean: ``(batch, ...)``.
        variance: of the same shape; zero where no uncertain weight reached the outputs.
        covariance: ``(batch, outputs, outputs)`` where it was carried to the end, or None.
        used: the names of the layers whose weights' variances entered.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    used: set[str]


def propagate(
    run: Callable[[], Any],
    posteriors: Iterable[tuple[Tensor, WeightPosterior]],
    rules: Rules,
    where: Callable[[], str] = lambda: "",
    unproved: Iterable[tuple[Tensor, WeightPosterior]] = (),
) -> OutputMoments:
    """Mean and variance of a model's outputs in one pass of its own code.

    Args:
        run: calls the model.
        posteriors: every uncertain weight, as the very tensor that the model's code uses, with its variances.
        rules: choices between forms of rules.
        where: names the module that is running, for messages.
        unproved: weights of which it is not known that linear layers are their only use; of one that is used otherwise
            the variance is left out.

    Raises:
        PosthocUQError: a function has no rule, or writes into an activation.
    """
    known = {id(weight): posterior for weight, posterior in posteriors}
    others = {id(weight): posterior for weight, posterior in unproved}
    while True:
        with Pass(rules, known | others, where, others) as state:
            outputs: Any = output_tensor(run())
        if not state.elsewhere:
            break
        others = {key: posterior for key, posterior in others.items() if key not in state.elsewhere}
    if not isinstance(outputs, MomentTensor):
        return OutputMoments(outputs, torch.zeros_like(outputs), None, state.used)
    return OutputMoments(outputs.moment_mean, outputs.moment_variance, outputs.moment_covariance, state.used)


def running_module(network: nn.Module) -> str:
    """The name of the innermost module of a network that is running, read off the stack."""
    names = {id(module): name for name, module in network.named_modules()}
    frame = inspect.currentframe()
    while frame is not None:
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return ""


def products_of(layer: Layer, weight: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's variances in the two forms that `WeightPosterior` has, differentiable in both arguments."""
    kind = variance_dtype(weight.dtype)
    square, own = weight.to(kind).square(), variances.to(device=weight.device, dtype=kind)
    if layer.rule.matrices and not layer.convolutional:
        own, square = (layer.rule.to_matrix(each, 1).squeeze(-3) for each in (own, square))
    if layer.convolutional and layer.groups == 1:
        axis = layer.rule.input_axis
        summed = torch.cat([square + own, own], dim=axis)
        return summed.narrow(axis, own.shape[axis], own.shape[axis]), summed
    return own, square + own


@dataclass
class IndependentWeights:
    """A layer of independent weights, as a `WeightPosterior`; gradients flow into its means and variances.

    Attributes:
        layer: its name.
        variances: in the weight's shape, outputs first.
        bias_variances: of the bias, or None.
        summed: see `WeightPosterior`.
        row: False: there are no correlations inside a row.
    """

    layer: str
    variances: Tensor
    bias_variances: Tensor | None
    summed: Tensor
    row: bool = False

    def row_variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """See `WeightPosterior`."""
        second = mean.square() if variance is None else mean.square() + variance
        return nn.functional.linear(second, self.variances, self.bias_variances)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """See `WeightPosterior`."""
        variance = None if covariance is None else covariance.diagonal(dim1=1, dim2=2)
        return torch.diag_embed(self.row_variance(mean, variance))


def independent_weights(
    layers: Mapping[str, Layer], means: Mapping[str, Tensor], variances: Mapping[str, Tensor]
) -> list[tuple[Tensor, IndependentWeights]]:
    """Every layer's weight with its variances, for `propagate`; means, which the model runs with, and variances are by
    the parameters' names.
    """
    weights: list[tuple[Tensor, IndependentWeights]] = []
    for name, layer in layers.items():
        mean = means[layer.weight]
        own, summed = products_of(layer, mean, variances[layer.weight])
        bias = None if layer.bias is None else variances[layer.bias].to(own)
        weights.append((mean, IndependentWeights(name, own, bias, summed)))
    return weights
