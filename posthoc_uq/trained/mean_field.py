"""Independent Gaussians over a network's parameters as tensors to train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import exp, log
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.laplace import MeanFieldBlock
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.trained.training import Group, Training, check_trainable


class MeanField:
    """``N(mean, diag exp(log_variance))`` over parameters by name.

    Args:
        means: leaf tensors, trained in place if `train_mean` is set.
        log_variances: likewise, always trained; a parameter without one is certain.
        train_mean: whether the means are trained.
    """

    def __init__(self, means: dict[str, Tensor], log_variances: dict[str, Tensor], train_mean: bool) -> None:
        self.means = {name: mean.requires_grad_(train_mean) for name, mean in means.items()}
        self.log_variances = {name: value.requires_grad_() for name, value in log_variances.items()}
        self.train_mean = train_mean

    def groups(self, lr: float, log_variance_lr: float) -> list[Group]:
        """The means, if they are trained, and the log variances, as an objective's groups; certain means apart."""
        logs = {f"log variance {name}": value for name, value in self.log_variances.items()}
        variances = {"params": logs, "lr": log_variance_lr, "name": "log variances"}
        if not self.train_mean:
            return [variances]
        uncertain = {f"mean {n}": mean for n, mean in self.means.items() if n in self.log_variances}
        certain = {f"mean {n}": mean for n, mean in self.means.items() if n not in self.log_variances}
        groups = [{"params": uncertain, "lr": lr, "name": "means"}, variances]
        return groups + ([{"params": certain, "lr": lr, "name": "certain"}] if certain else [])

    @torch.no_grad()
    def deviations(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of ``sigma e`` for all parameters, with a standard normal ``e`` for every number; without gradients,
        see `add_gradients`.
        """
        drawn: dict[str, Tensor] = {}
        for name, value in self.log_variances.items():
            normal = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
            drawn[name] = normal.mul_((0.5 * value).exp_())
        return drawn

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of all parameters."""
        deviations = self.deviations(generator)
        means = {name: mean.detach() for name, mean in self.means.items()}
        return {name: mean + deviations[name] if name in deviations else mean for name, mean in means.items()}

    @torch.no_grad()
    def add_gradients(self, name: str, gradient: Tensor, deviation: Tensor | None, *, mean: bool) -> None:
        """Carry a gradient by ``mean + sigma e`` over to the mean (if asked) and the log variance: reparameterisation
        (Kingma, Welling 2014), with ``d (sigma e) / d log sigma^2 = sigma e / 2``.

        By hand, since autograd would keep sigma, e and their product in memory. Without a deviation the parameter is
        certain, and the mean alone has a gradient.
        """
        if deviation is None:
            _add(self.means[name], gradient)
            return
        if mean and self.train_mean:
            _add(self.means[name], gradient)
            by_variance = gradient * deviation
        else:
            by_variance = gradient.mul_(deviation)
        _add(self.log_variances[name], by_variance.mul_(0.5))

    def on_backward(
        self, leaves: dict[str, Tensor], deviations: Mapping[str, Tensor] | None = None, *, mean: bool
    ) -> None:
        """Let a backward pass carry every leaf's gradient over as soon as it is complete, and drop the leaf from
        `leaves`: to keep them all to the end would take another copy of the model.

        Args:
            leaves: weights, or deviations, by name of their parameter.
            deviations: by which the weights differ from their means; None where the leaves are deviations.
            mean: see `add_gradients`.
        """

        def carry(leaf: Tensor, name: str) -> None:
            gradient, leaf.grad = leaf.grad, None
            del leaves[name]
            if gradient is not None:
                deviation = leaf.detach() if deviations is None else deviations.get(name)
                self.add_gradients(name, gradient, deviation, mean=mean)
            leaf.data = leaf.new_empty(0)  # the graph still refers to the leaf, but needs it no more

        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(carry, name=name))

    def trained_mean(self) -> dict[str, Tensor] | None:
        """The means by parameter, if they are trained."""
        return {name: mean.detach() for name, mean in self.means.items()} if self.train_mean else None

    def blocks(self, layers: Mapping[str, Layer], samples: int) -> dict[str, Block]:
        """The variances as blocks of a posterior."""
        blocks: dict[str, Block] = {}
        for name, layer in layers.items():
            variances = [
                self.log_variances[p].detach().exp()
                if p in self.log_variances
                else torch.zeros_like(self.means[p])
                for p in layer.parameter_names
            ]
            matrix = layer.to_matrix(variances[0], variances[1] if len(variances) > 1 else None)
            blocks[name] = MeanFieldBlock(matrix.contiguous(), samples)
        return blocks


def begun_field(
    method: Training[Any],
    parameters: Mapping[str, Tensor],
    layers: Iterable[Layer],
    log_variance: Mapping[str, float] | Posterior,
    *,
    train_mean: bool,
    certain: Collection[str] = (),
    start: Mapping[str, Tensor] | None = None,
) -> MeanField:
    """The means and variances that a training begins with.

    Args:
        method: that trains.
        parameters: of the model.
        layers: whose weights are trained.
        log_variance: of every parameter of the layers; or a posterior whose variances, and means, are those of the
            start.
        train_mean: whether the means are trained.
        certain: names of parameters without a variance; those of no layer are trained with the means.
        start: where the means begin, where that is not at the model's parameters.

    Raises:
        PosteriorMismatchError: the posterior belongs to another model, or to other layers.
        PosthocUQError: a parameter cannot be trained, or the posterior has means that are not to be trained.
    """
    names = [name for layer in layers for name in layer.parameter_names]
    check_trainable(method.name, parameters, names)
    trained = {name: parameters[name].detach() for name in dict.fromkeys([*names, *certain])}
    initial = log_variance if isinstance(log_variance, Posterior) else None
    if initial is not None:
        for name in names:
            original = initial.original.get(name)
            same = original is not None and original.shape == trained[name].shape
            if original is None or not same or not torch.equal(original.to(trained[name]), trained[name]):
                raise PosteriorMismatchError(
                    f"initial= is no posterior of this model's '{name}': fit it on the same model, with the same "
                    f"layers."
                )
        if initial.trained_mean and not train_mean:
            raise PosthocUQError(
                "A posterior with a mean of its own cannot begin a training with train_mean=False."
            )
        start = initial.mean
    means = {name: (start or {}).get(name, value).to(value) for name, value in trained.items()}
    if train_mean:
        means = {name: mean.clone() for name, mean in means.items()}
    uncertain = [name for name in names if name not in certain]
    if isinstance(log_variance, Posterior):
        variances = log_variance.variance()
        smallest = exp(-80.0)
        logs = {name: variances[name].to(means[name]).clamp(min=smallest).log() for name in uncertain}
    else:
        logs = {name: torch.full_like(means[name], log_variance[name]) for name in uncertain}
    return MeanField(means, logs, train_mean)


def gaussian_divergence(
    means: Mapping[str, Tensor],
    log_variances: Mapping[str, Tensor],
    variances: Mapping[str, Tensor],
    prior_means: Mapping[str, Tensor],
    precision: float,
) -> Tensor:
    """``KL(N(mu, diag sigma^2) || N(mu_p, I / tau))`` in nats, a scalar.

    ``1/2 sum(tau (sigma^2 + (mu - mu_p)^2) - 1 - log(tau sigma^2))``.

    Args:
        means: mu, by parameter; those without a variance are certain, and have no prior.
        log_variances: of the weights.
        variances: their exponentials.
        prior_means: those of ``mu_p`` that are not zero.
        precision: tau.
    """
    parts: list[Tensor] = []
    for name, variance in variances.items():
        mean = means[name]
        distance = mean - prior_means[name] if name in prior_means else mean
        spread = variance.sum() + distance.square().sum()
        parts.append(precision * spread - log_variances[name].sum() - mean.numel() * (1 + log(precision)))
    return 0.5 * torch.stack(parts).sum()


def _add(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
