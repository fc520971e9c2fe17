"""Running statistics of batch normalisation, estimated anew for a network whose weights were pruned."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.devices import widest
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.loaders import Bar, BatchFunction, BatchReader, batches, check_loader
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate
from posthoc_uq.sparsity.median import median_means
from posthoc_uq.wrapping import check_match


class _Statistics:
    """Mean and variance by channel of all that entered a layer, joined batch by batch (Chan, Golub, LeVeque 1979,
    "Updating formulae and a pairwise algorithm for computing sample variances").
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None  # sum of squared deviations

    def add(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Add inputs ``(samples, channels, ...)``; their own mean and biased variance, ``(channels,)``."""
        rows = inputs.detach().transpose(0, 1).flatten(1).to(widest(inputs.device))
        count, mean = rows.shape[1], rows.mean(1)
        squares = (rows - mean.unsqueeze(1)).square().sum(1)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
        else:
            total, moved = self.count + count, mean - self.mean
            self.squares = self.squares + squares + moved.square() * (self.count * count / total)
            self.mean = self.mean + moved * (count / total)
            self.count = total
        return mean, squares / count


def recalibrated(
    model: nn.Module,
    loader: Iterable[Any],
    posterior: Posterior | None = None,
    *,
    batch_to_inputs: BatchFunction | None = None,
    progress: bool = True,
) -> nn.Module:
    """A copy of `model` whose batch normalisations have their running statistics estimated anew, by one pass over data.

    Weights that are dropped change the variance of activations, and the statistics of the trained network no longer fit
    them. In the pass every layer normalises by its batch's own statistics, as in a training; its running mean and its
    running variance (unbiased, as torch's) become those of all that entered it, whatever the batches. The rest is in
    eval mode. Batches should be shuffled and of some dozens of samples, as those of the training were.

    Of a model by `sparse_model`, give the model and the loader alone. With a posterior by ``method="latent_binary"``
    the pass is by its median model's means, and the copy has the model's own weights, on the same memory::

        pruned = uq.median_model(posterior)
        predictor = uq.wrap(uq.recalibrated(model, loader, pruned), pruned)

    Args:
        model: with batch normalisations that keep running statistics; it stays as it is.
        loader: of inputs like those of the training; targets are ignored.
        posterior: of this model, for the weights of the pass.
        batch_to_inputs: takes the model's inputs out of a batch of any other form than `fit` knows.
        progress: whether to show a bar.

    Returns:
        The copy, in eval mode.

    Raises:
        PosthocUQError: the model has no such layer, or the loader no data, or the posterior is of another method.
        PosteriorMismatchError: the posterior is of another model.
        NonFiniteError: what enters a layer is not finite.
    """
    check_loader(loader)
    weights: dict[str, Tensor] | None = None
    if posterior is not None:
        weights = median_means(posterior, "recalibrated")
        check_match(model, posterior)
    with isolated_random_state():  # copying a module may run its code
        running, result = replicate(model, weights), replicate(model)
    layers = _normalisations(running)
    statistics = {name: _Statistics() for name in layers}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(partial(_observe, statistics[name]))
    reader = BatchReader.of(running, batch_to_inputs)
    with torch.no_grad(), isolated_random_state(), Bar(loader, "recalibrate", progress) as bar:
        for batch in batches(loader, reader):
            samples = count_samples(batch)
            batch.copied().call_any(running)
            bar.advance(samples)
    for name, layer in _normalisations(result).items():
        _put(name, layer, statistics[name])
    return result


def _normalisations(model: nn.Module) -> dict[str, _BatchNorm]:
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not layers:
        raise PosthocUQError(
            "The model has no batch normalisation with running statistics, so there is nothing to estimate anew."
        )
    return layers


def _observe(statistics: _Statistics, layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Before a layer runs: it shall normalise by the batch's own statistics."""
    assert isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None
    mean, variance = statistics.add(args[0])
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)


def _put(name: str, layer: _BatchNorm, statistics: _Statistics) -> None:
    mean, squares = statistics.mean, statistics.squares
    if mean is None or squares is None:
        return  # not used in these passes
    if not bool((torch.isfinite(mean) & torch.isfinite(squares)).all()):
        raise NonFiniteError(f"What enters the batch normalisation '{name}' is not finite; check the inputs.")
    if statistics.count < 2:
        raise PosthocUQError(
            f"The batch normalisation '{name}' saw one number a channel in the whole pass, which has no variance; give "
            f"more data."
        )
    assert layer.running_mean is not None and layer.running_var is not None
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(squares / (statistics.count - 1))
