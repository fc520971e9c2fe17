"""Where a latent binary training begins: at the trained weights, or at random ones."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.latent_layers import LatentLayer
from posthoc_uq.inference.latent_moments import SlabPrior
from posthoc_uq.inference.latent_options import BY_SIZE, HIGH, PRESETS, LatentBinaryOptions
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.flows import Flow
from posthoc_uq.randomness import mixed_seed

HIGH_LOGIT = 5.0
"""Where logits begin with ``"high"``: a probability of 0.9933."""

_SIZE = 0.5  # of a weight, in root mean squares of its layer, at which its inclusion begins at one half
_LARGEST = 1e12  # root mean square of a layer's weights, and its inverse: float32 holds their fourth powers
_MOST = 6.0  # the largest logit that a weight's size gives
_SMALL_LOG = -9.0  # of the deviations of weights and of the variances of z_0
_START = 301  # stream of the seed


def begin(
    layer: Layer,
    index: int,
    weight: Tensor,
    bias: Tensor | None,
    options: LatentBinaryOptions,
    deviation: float | None,
    seed: int,
) -> LatentLayer:
    """The layer with the tensors that its training begins with.

    Args:
        layer: its names and shapes.
        index: its number, for random numbers of its own.
        weight: trained, as the model holds it.
        bias: likewise.
        options: of the method.
        deviation: of the prior of weights that are on; None for the root mean square of the trained ones, or 1 where
            the start is random.
        seed: of the fit.

    Raises:
        PosthocUQError: the layer's weights are all zero, and say no scale, or theirs is out of range.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, _START, index))
    trained = options.start == "trained"
    size = float(as_double(weight.detach()).square().mean().sqrt())
    if trained and not size > 0:
        raise PosthocUQError(
            f"Layer '{layer.name}' has only zero weights, so there is no scale to begin with; leave it out with "
            f"layers=, or take start='random'."
        )
    if trained and not 1 / _LARGEST <= size <= _LARGEST:
        raise PosthocUQError(
            f"The weights of layer '{layer.name}' have a root mean square of {size:.3g}, by which no training in "
            f"float32 can compute; leave it out with layers=, or take start='random'."
        )
    if trained:
        tensors = _from_trained(weight, bias, options, size, generator)
    else:
        tensors = _from_random(layer, weight, bias, options, generator)
    flow = _flow(layer, options)
    if flow is not None:
        tensors |= _of_flow(flow, weight, trained, generator)
    slab = SlabPrior(options.prior_inclusion, 0.0, deviation or (size if trained else 1.0))
    return LatentLayer(layer, tensors, slab, max(slab.deviation, 1.0), flow)


def _from_trained(
    weight: Tensor, bias: Tensor | None, options: LatentBinaryOptions, size: float, generator: torch.Generator
) -> dict[str, Tensor]:
    chosen = options.initial_inclusion or HIGH
    if chosen == HIGH:
        logit = torch.full_like(weight, HIGH_LOGIT)
    elif chosen == BY_SIZE:
        ratio = (weight.detach().abs() / (_SIZE * size)).clamp(min=1e-12)
        logit = (2 * ratio.log()).clamp(-_MOST, _MOST)
    else:
        logit = _between(PRESETS[chosen], weight, generator)
    # the mean weight a mu is the trained one, or the signal would shrink from layer to layer
    mean = weight.detach() / logit.sigmoid() if chosen == HIGH else weight.detach().clone()
    spread = options.initial_deviation * max(float(weight.detach().std(correction=0)), 1e-3 * size)
    tensors = {"mean": mean, "log variance": torch.full_like(weight, 2 * log(spread)), "logit": logit}
    if bias is not None:
        tensors |= {
            "bias mean": bias.detach().clone(),
            "bias log variance": torch.full_like(bias, 2 * log(spread)),
        }
    return tensors


def _from_random(
    layer: Layer,
    weight: Tensor,
    bias: Tensor | None,
    options: LatentBinaryOptions,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    wide, spread = (0.2, 0.1) if layer.convolutional else (0.01, 1.0)
    tensors = {
        "mean": _between((-wide, wide), weight, generator),
        "log variance": 2 * (_SMALL_LOG + spread * _normal(weight, generator)),
        "logit": _between(PRESETS[options.initial_inclusion or "balanced"], weight, generator),
    }
    if bias is not None:
        tensors["bias mean"] = _between((-0.2, 0.2), bias, generator)
        tensors["bias log variance"] = 2 * (_SMALL_LOG + _normal(bias, generator))
    return tensors


def _flow(layer: Layer, options: LatentBinaryOptions) -> Flow | None:
    """Over the inputs of a linear layer, or the output channels of a convolution."""
    if not options.flow:
        return None
    inputs = layer.inputs - (layer.bias is not None)
    size = layer.groups * layer.outputs if layer.convolutional else inputs
    return Flow(size, options.flow_units, options.flow_steps, options.flow_form)


def _of_flow(flow: Flow, like: Tensor, trained: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """From trained weights ``z`` is nearly 1."""
    one = like.new_zeros(flow.size)
    shift = 1.0 if trained else None
    mean = torch.ones_like(one) if trained else _normal(one, generator)
    spread = 0.0 if trained else 1.0
    tensors = {"start_mean": mean, "start_log_variance": _SMALL_LOG + spread * _normal(one, generator)}
    tensors |= {f"flow_{name}": t for name, t in flow.initial(generator, like, shift=shift).items()}
    tensors |= {f"reverse_{name}": t for name, t in flow.initial(generator, like).items()}
    tensors["along"] = _normal(one, generator) / flow.size**0.5
    for name in ("reverse mean", "reverse log variance"):
        tensors[name] = 0.01 * _normal(one, generator)
    return tensors


def _between(bounds: tuple[float, float], like: Tensor, generator: torch.Generator) -> Tensor:
    low, high = bounds
    return (torch.rand(like.shape, generator=generator, device="cpu") * (high - low) + low).to(like)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)
