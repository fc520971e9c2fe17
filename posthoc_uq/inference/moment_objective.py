"""The objective of unscented-transform variational inference (Schodt 2024, "Few-sample variational inference of
Bayesian neural networks with arbitrary nonlinearities").

    sum_n log-likelihood(m_n, s_n^2) - phi KL(q || p),    q = N(mu, diag sigma^2),    p = N(mu_p, I / tau)

``m_n, s_n^2`` are the mean and the variance of the outputs, carried through the network in one pass, so that a step
draws nothing. The first term is ``E[log p(y | f)]``, ``f ~ N(m, s^2)``, or ``log E[p(y | f)]``, times a sample's weight
where it has one. A step takes a sample's share: the mean over the batch, and the divergence over N.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from posthoc_uq.devices import Checks, host_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.mean_field import MeanField
from posthoc_uq.inference.moment_options import MomentOptions
from posthoc_uq.inference.training import Group, Objective, Step
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import weighed_targets
from posthoc_uq.loaders import Batch
from posthoc_uq.moments.propagation import independent_weights, propagate, running_module
from posthoc_uq.warned import warn_user

MOST_RESIDUAL = (
    10.0  # in deviations of the prediction, where noise="none": what gradients see of a larger one
)
DRAWS = 64  # of the outputs in a step, where the likelihood has no closed form; always the same, quasi-random


def kl_weight(halvings: int, floor: float = 0.0) -> float:
    """``max(2^-halvings, floor)``, the share of the divergence's weight after so many epochs: the paper's
    ``2^(M - l) / 2^(M - 1)`` for ``l = halvings + 1``, without its large numbers.
    """
    return max(2.0**-halvings, floor)


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
        moved = mean - prior_means[name] if name in prior_means else mean
        spread = variance.sum() + moved.square().sum()
        parts.append(precision * spread - log_variances[name].sum() - mean.numel() * (1 + log(precision)))
    return 0.5 * torch.stack(parts).sum()


class MomentObjective(Objective):
    """The loss of a step, ``-log-likelihood + phi KL / N`` a sample, and its gradients.

    Args:
        network: a replica in eval mode, for this objective alone.
        layers: those whose weights are uncertain.
        field: what is trained.
        prior_means: of the weights, by parameter; zero where there is none.
        precision: of the prior.
        likelihood: of the targets.
        samples: N.
        options: of the method.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Mapping[str, Layer],
        field: MeanField,
        prior_means: Mapping[str, Tensor],
        precision: float,
        likelihood: Likelihood,
        samples: int,
        options: MomentOptions,
        halved: float = 1.0,
    ) -> None:
        """
        Args:
            halved: how often the divergence's weight is halved in an epoch.
        """
        self._halved = halved
        self._network, self._layers, self._field = network.requires_grad_(False), layers, field
        self._prior_means, self._precision = prior_means, precision
        self._likelihood, self._samples, self._options = likelihood, samples, options
        self._rules = options.rules()
        self._checked = False
        self._log_noise: Tensor | None = None
        if options.noise == "learned":
            like, noise = next(iter(field.means.values())), cast(Tensor, likelihood.noise_variance)
            self._log_noise = noise.log().to(like).requires_grad_()

    @property
    def network(self) -> nn.Module:
        return self._network

    def groups(self) -> list[Group]:
        groups = self._field.groups(self._options.lr, self._options.log_variance_lr)
        for group in groups:
            group["weight_decay"] = self._options.weight_decay if group["name"] == "means" else 0.0
        if self._log_noise is not None:
            rate = self._options.log_variance_lr
            groups.append({"params": [self._log_noise], "lr": rate, "name": "log noise", "weight_decay": 0.0})
        return groups

    def tensors(self) -> dict[str, Tensor]:
        noise = {} if self._log_noise is None else {"log noise": self._log_noise}
        return self._field.tensors() | noise

    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise.detach().exp()))

    def moments(self, batch: Batch, variances: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs, differentiable in the weights' means and variances.

        Args:
            batch: of inputs.
            variances: of all weights, by parameter.

        Raises:
            PosthocUQError: a function has no rule, or no uncertain weight reaches the outputs.
        """
        means, copied = self._field.means, batch.copied()
        outputs = propagate(
            lambda: functional_call(self._network, means, copied.args, copied.kwargs),
            independent_weights(self._layers, means, variances),
            self._rules,
            lambda: running_module(self._network),
        )
        self._check_used(outputs.used)
        return outputs.mean, outputs.variance

    def _check_used(self, used: set[str]) -> None:
        if self._checked:
            return
        unused = [name for name in self._layers if name not in used]
        if len(unused) == len(self._layers):
            raise PosthocUQError(
                f"Moments of none of the layers {unused[:5]} reach the outputs, so there is nothing to train: their "
                f"weights are computed anew at every call, or other code than torch's functions uses them."
            )
        if unused:
            warn_user(
                f"The pass of moments did not use the weights of {unused[:8]}, which the divergence alone will move; "
                f"leave them out with layers=..."
            )
        self._checked = True

    def _score(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """The log-likelihood of every sample, ``(samples,)``, in nats."""
        likelihood = self._likelihood
        if self._log_noise is not None:
            likelihood = likelihood.with_noise(self._log_noise.exp())
        if self._options.objective == "expected":
            return likelihood.expected_log_prob(mean, variance, targets, DRAWS)
        return likelihood.predictive_log_prob(mean, variance, targets, DRAWS)

    def backward(self, batch: Batch, step: Step, checks: Checks) -> dict[str, Tensor]:
        targets, field = cast(Tensor, batch.targets), self._field
        variances = {name: value.exp() for name, value in field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        targets, weights = weighed_targets(self._likelihood, mean.detach(), targets, batch.weights)
        self._check(mean.detach(), targets, checks)
        if self._options.noise == "none":
            self._bound_gradients(mean, variance, None if weights is None else weights.samples)
        scores = self._score(mean, variance, targets)
        fit = (scores if weights is None else weights.of_samples(scores)).mean()
        divergence = gaussian_divergence(
            field.means, field.log_variances, variances, self._prior_means, self._precision
        )
        halvings = int(step.epoch * self._halved + 1e-9)
        weight = self._options.first_kl_weight * kl_weight(halvings, self._options.kl_floor)
        loss = divergence * (weight / self._samples) - fit
        loss.backward()
        return {"loss": loss.detach(), "log likelihood": fit.detach(), "KL": divergence.detach()}

    def _bound_gradients(self, mean: Tensor, variance: Tensor, weights: Tensor | None) -> None:
        """Have gradients see no residual above `MOST_RESIDUAL` deviations.

        Without a noise nothing else bounds them: by a log density of variance V and residual r they are ``r / V`` and
        ``(r^2 / V - 1) / (2 V)``, which at a V of nearly zero leave an optimiser with second moments by which the entry
        moves no more. With ``|r| <= k sqrt(V)`` they are at most ``k / sqrt(V)`` and ``(k^2 + 1) / (2 V)``.
        """
        total = variance.detach() + self._likelihood.variance(mean.detach()).to(variance)
        share = torch.full_like(total, 1 / mean.shape[0])  # of a sample in the mean over the batch
        if weights is not None:
            share = share * weights.to(share).reshape(-1, *[1] * (share.ndim - 1))
        for tensor, most in (
            (mean, MOST_RESIDUAL * share * total.rsqrt()),
            (variance, (MOST_RESIDUAL**2 + 1) / 2 * share / total),
        ):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, most=most: gradient.clamp(-most, most))

    def _check(self, outputs: Tensor, targets: Tensor, checks: Checks) -> None:
        fault = self._likelihood.fault(outputs, targets)
        if fault is not None:
            checks.later(
                fault, lambda broken: self._likelihood.check(outputs, targets) if bool(broken) else None
            )

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        variances: dict[str, Any] = {name: value.exp() for name, value in self._field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        self._likelihood.check(mean, batch.targets)
        return self.likelihood().predictive_log_prob(mean, variance, cast(Tensor, batch.targets), draws)
