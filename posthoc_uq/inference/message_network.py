"""A sequential model as a chain of stages for message passing; BatchNorm is folded into the layer before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing.network import Activation, Flat, Pool, Stage, Weighted
from posthoc_uq.message_passing.windows import Pair, Windows
from posthoc_uq.outputs import chosen_in

_SUPPORTED = (
    "Linear, Conv2d, ReLU, LeakyReLU, MaxPool2d (stride = kernel, no padding), AvgPool2d (no padding), "
    "AdaptiveAvgPool2d(1), Flatten, Dropout, Identity, BatchNorm after a Linear or Conv2d"
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)


@dataclass(frozen=True)
class Fold:
    """How a layer's weights become those with the BatchNorm after it: ``W' = factor W``, ``b' = factor b + offset``.

    Attributes:
        factor: ``(outputs,)`` in float64.
        offset: likewise; of a layer without a bias it is a constant of the network.
    """

    factor: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Chain:
    """A model as stages.

    Attributes:
        stages: in their order.
        layers: by stage, the layer of the model.
        folds: by stage, where a BatchNorm follows.
    """

    stages: list[Stage]
    layers: dict[int, Layer]
    folds: dict[int, Fold]


def chain_of(model: nn.Module, layers: Mapping[str, Layer]) -> Chain:
    """The stages of a model.

    Args:
        model: `torch.nn.Sequential`, which may hold others.
        layers: those with a posterior, which must be all.

    Raises:
        UnsupportedLayerError: the model is no chain, or has modules that messages cannot pass; names all of them.
        PosthocUQError: a weighted layer is to have no posterior.
    """
    if type(model) is not nn.Sequential:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' needs a torch.nn.Sequential, not a {type(model).__name__}; "
            f"write the model as one, or take layers='last'."
        )
    if chosen_in(model) is not None:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' cannot pass output={chosen_in(model)}, which is applied to what "
            f"the model returns; take layers='last'."
        )
    chain, faults = Chain([], {}, {}), list[str]()
    for path, module in _flattened(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fault = _add_layer(chain, path, module, layers)
        elif isinstance(module, _NORMS):
            fault = _fold(chain, module)
        else:
            fault = _add(chain, module)
        faults += [f"'{path}' ({type(module).__name__}{fault})"] if fault is not None else []
    if faults:
        raise UnsupportedLayerError(
            f"Messages cannot pass {', '.join(faults)}; they pass {_SUPPORTED}. Take layers='last' for a posterior of "
            f"the last layer alone."
        )
    left = sorted(set(layers) - {layer.name for layer in chain.layers.values()})
    if left or not chain.layers:
        raise PosthocUQError(
            f"layers='all' of method='message_passing' treats every weighted layer once, which leaves out {left}; use "
            f"each module once, and select none of them."
        )
    return chain


def _flattened(model: nn.Sequential, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():  # pyright: ignore[reportPrivateUsage]  # also one that is used twice
        here = f"{path}.{name}" if path else name
        if type(module) is nn.Sequential:
            yield from _flattened(module, here)
        elif module is not None:
            yield here, module


def _add_layer(
    chain: Chain, path: str, module: nn.Linear | nn.Conv2d, layers: Mapping[str, Layer]
) -> str | None:
    """Add a weighted layer; returns what is wrong with it, as a part of a sentence."""
    layer = layers.get(path)
    if type(module) not in (nn.Linear, nn.Conv2d):
        return ", a subclass of a known layer"
    if layer is None:
        return ", which gets no posterior; select all layers"
    if any(own.name == layer.name for own in chain.layers.values()):
        return ", which is used twice"
    windows = None
    if isinstance(module, nn.Conv2d):
        padding: Any = module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            return f" with padding={padding!r}, padding_mode={module.padding_mode!r}"
        windows = Windows(
            _pair(module.kernel_size),
            _pair(module.stride),
            _pair(padding),
            _pair(module.dilation),
            module.groups,
        )
    place = len(chain.stages)
    inputs = layer.inputs - (layer.bias is not None)
    chain.stages.append(Weighted(path, inputs, layer.outputs, windows, bias=layer.bias is not None))
    chain.layers[place] = layer
    return None


def _fold(chain: Chain, module: nn.BatchNorm1d | nn.BatchNorm2d) -> str | None:
    place = len(chain.stages) - 1
    stage = chain.stages[place] if chain.stages else None
    if not isinstance(stage, Weighted) or place in chain.folds:
        return ", not directly after a Linear or Conv2d"
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None:
        return " without running statistics"
    factor = (as_double(variance) + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * as_double(module.weight.detach())
    offset = -as_double(mean) * factor
    if module.bias is not None:
        offset = offset + as_double(module.bias.detach())
    if not bool((factor.abs() > 1e-12).all()):
        return " with a weight of 0"
    chain.folds[place] = Fold(factor, offset)
    if not stage.bias:
        chain.stages[place] = Weighted(
            stage.name, stage.inputs, stage.outputs, stage.windows, bias=False, offset=offset
        )
    return None


def _add(chain: Chain, module: nn.Module) -> str | None:
    """Add a stage without weights; returns what is wrong with it, as a part of a sentence."""
    stage: Stage
    if isinstance(module, (nn.Identity, *_DROPOUTS)):
        return None
    if isinstance(module, nn.Flatten):
        if (module.start_dim, module.end_dim) != (1, -1):
            return f" from {module.start_dim} to {module.end_dim}"
        chain.stages.append(Flat())
        return None
    if type(module) is nn.ReLU:
        stage = Activation(0.0)
    elif type(module) is nn.LeakyReLU:
        if not 0 <= module.negative_slope <= 1:
            return f" with the slope {module.negative_slope}"
        stage = Activation(float(module.negative_slope))
    else:
        pool = _pool(module)
        if isinstance(pool, str):
            return pool
        stage = pool
    if not chain.layers:
        return ", before the first weighted layer"
    chain.stages.append(stage)
    return None


def _pool(module: nn.Module) -> Pool | str:
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Pool("average") if _pair(module.output_size) == (1, 1) else f" of size {module.output_size}"
    if not isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
        return ""
    kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
    if padding != (0, 0) or module.ceil_mode:
        return " with padding or ceil_mode"
    if isinstance(module, nn.AvgPool2d):
        if module.divisor_override is not None:
            return " with divisor_override"
        return Pool("average", Windows(kernel, stride))
    if stride != kernel or _pair(module.dilation) != (1, 1):
        return " whose windows overlap or are dilated"
    return Pool("max", Windows(kernel, stride))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def output_counts(stages: list[Stage], shape: tuple[int, ...]) -> dict[int, int]:
    """Outputs of every weighted stage with all their positions, for inputs ``(...)`` of this shape.

    Raises:
        PosthocUQError: a layer gets inputs that it cannot take.
    """
    counts: dict[int, int] = {}
    for index, stage in enumerate(stages):
        if isinstance(stage, Weighted):
            spatial = stage.windows is not None
            if len(shape) != (3 if spatial else 1):
                raise PosthocUQError(
                    f"Layer '{stage.name}' gets inputs of shape {shape} in message passing; a Linear takes one row a "
                    f"sample (put a Flatten before it), a Conv2d images of channels, height and width."
                )
            sides = () if stage.windows is None else stage.windows.size(shape[1], shape[2])
            shape = (stage.groups * stage.outputs, *sides)
            counts[index] = prod(shape) // stage.groups
        elif isinstance(stage, Pool):
            shape = (shape[0], *stage.over(shape).size(shape[1], shape[2]))
        elif isinstance(stage, Flat):
            shape = tuple([prod(shape)])
    if len(shape) != 1:
        raise PosthocUQError(
            f"The model gives outputs of shape {shape} for a sample; message passing needs one row, so end it with a "
            f"Flatten or a Linear."
        )
    return counts


def folded_parameters(
    layer: Layer, fold: Fold | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """A layer's trained weights ``(G, I, J)`` and biases ``(G, J)`` with what is folded into them, in float64."""
    weight = as_double(parameters[layer.weight].detach())
    bias = None if layer.bias is None else as_double(parameters[layer.bias].detach())
    matrix = layer.to_matrix(weight, None).transpose(1, 2)
    own = None if bias is None else bias.reshape(layer.groups, layer.outputs)
    if fold is not None:
        factor, offset = (part.reshape(layer.groups, layer.outputs) for part in (fold.factor, fold.offset))
        matrix = matrix * factor.unsqueeze(1)
        own = None if own is None else own * factor + offset
    return matrix, own


def unfolding(layer: Layer, fold: Fold | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """By what folded weights are multiplied to become the layer's, and what is added to them then, ``(G, J, 1)`` and
    ``(G, J)`` (the latter to biases alone).
    """
    shape = layer.groups, layer.outputs
    if fold is None:
        one = as_double(torch.ones(shape, device=device))
        return one.unsqueeze(2), torch.zeros_like(one)
    factor = fold.factor.reciprocal()
    return factor.reshape(*shape, 1), (-fold.offset * factor).reshape(shape)
