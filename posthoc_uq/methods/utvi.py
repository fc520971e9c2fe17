"""`UTVI`: variational inference by moments that the unscented transform carries through the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Count, LogVariance, Magnitude, NotNegative, Positive, Unit
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import weighed_targets
from posthoc_uq.methods.mean_field import MeanField, gaussian_divergence
from posthoc_uq.methods.task import Task
from posthoc_uq.methods.trained import (
    batches_of,
    certain_parameters,
    check_trainable,
    count_data,
    initialised,
)
from posthoc_uq.methods.training import EPOCHS, Group, Objective, Step, Training, TrainingOptions
from posthoc_uq.moments.propagation import independent_weights, propagate, running_module
from posthoc_uq.moments.tensor import MaxPool, Relu, Rules, Unknown
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.prior import ONE_PRIOR

# The options of a training by propagated moments, checked before any work is done.

Start = Literal["trained", "random"]
ObjectiveName = Literal["expected", "predictive"]
Noise = Literal["fixed", "learned", "none"]
PriorMean = Literal["zero", "trained"]


@dataclass(frozen=True, kw_only=True)
class MomentOptions(TrainingOptions):
    """What a training by propagated moments can be told; `posthoc_uq.UTVI` is the method.

    Attributes:
        lr: learning rate of the means.
        log_variance_lr: learning rate of the log variances.
        optimizer: a callable from parameter groups to a torch optimiser; AdamW by default.
        val_draws: draws of the outputs for the validation NLL, where the likelihood has no closed form.
        start: ``"trained"``, or ``"random"`` for a new initialisation of the covered layers by their
            ``reset_parameters``.
        initial: a fitted posterior whose variances, and mean if it has one of its own, are those of the start, in place
            of a constant variance.
        initial_log_variance: the constant that the log variances start at.
        train_mean: False trains the variances and nothing else, and predictions at the mean stay what they were.
        train_rest: whether to train with the means, as numbers without uncertainty, what else the network uses after
            the first of the layers: scales and shifts of normalisations, scales of activations such as
            `posthoc_uq.moments.InverseCDF`. They have no prior. Affine layers that were left out stay as they are.
        objective: ``"expected"`` is ``E_q[log p(y | f)]``, the term of the evidence lower bound; ``"predictive"`` is
            ``log E_q[p(y | f)]``, which rates the prediction itself, as the paper does.
        noise: of a regression: ``"fixed"`` at the noise of the fit, ``"learned"`` from there, or ``"none"``: the
            propagated variance is all of the predictive one, so that the noise may depend on the input; gradients then
            see no residual above 10 deviations.
        kl_weight: factor on the divergence from the prior in the first epoch. 1 is the evidence lower bound, and the
            default from random weights. From trained ones it is 0.1: with 1 the first epoch alone widens the variances
            to the prior's, and the means then move away from a network that was right (``docs/methods/utvi.md``).
        kl_floor: the factor is halved from epoch to epoch (without given epochs from tenth to tenth of the training),
            but to no less than this share of its first value. With 1 it stays what it is.
        prior_mean: of the weights: ``"zero"``, or ``"trained"`` for the trained ones.
        weight_decay: of the means, by the default optimiser.
        relu: ``"unscented"``, or ``"exact"`` for the closed form of ReLU and LeakyReLU.
        max_pool: ``"clark"`` or ``"argmax"``; see `MomentsPredictor`.
        pool_rho: correlation assumed between the cells of an average, in [0, 1].
        unknown: what to do with a function that has no rule: ``"error"`` or ``"unscented"``; see
            `MomentsPredictor`.
    """

    epochs: Count | None = None
    lr: Positive = 1e-3
    log_variance_lr: Positive = 3e-2
    start: Start = "trained"
    initial: Posterior | None = None
    initial_log_variance: LogVariance = -10.0
    train_mean: bool = True
    train_rest: bool = True
    objective: ObjectiveName = "expected"
    noise: Noise = "fixed"
    kl_weight: NotNegative | None = None
    kl_floor: Unit = 0.0
    prior_mean: PriorMean = "zero"
    weight_decay: NotNegative = 0.01
    relu: Relu = "unscented"
    max_pool: MaxPool = "clark"
    pool_rho: Unit = 0.0
    unknown: Unknown = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise == "none" and self.objective != "predictive":
            raise PosthocUQError(
                "noise='none' leaves the expected log-likelihood without a bound; it goes with objective='predictive'."
            )
        if self.start == "random" and not (self.train_mean and self.initial is None):
            raise PosthocUQError(
                "start='random' trains the means from a new initialisation, so that train_mean=False and initial= do "
                "not go with it."
            )

    def optimiser_over(self, groups: list[Group]) -> Optimizer:
        return (self.optimizer or adamw)(groups)

    @property
    def first_kl_weight(self) -> float:
        """The factor on the divergence in the first epoch."""
        by_start = 0.1 if self.start == "trained" else 1.0
        return by_start if self.kl_weight is None else self.kl_weight

    def rules(self) -> Rules:
        """The choices between forms of the rules by which moments pass through the network."""
        return Rules(self.relu, self.max_pool, self.pool_rho, "diag", self.unknown)


# The objective of unscented-transform variational inference (Schodt 2024, "Few-sample variational inference
# of Bayesian neural networks with arbitrary nonlinearities").
#
#     sum_n log-likelihood(m_n, s_n^2) - phi KL(q || p),    q = N(mu, diag sigma^2),    p = N(mu_p, I / tau)
#
# ``m_n, s_n^2`` are the mean and the variance of the outputs, carried through the network in one pass, so
# that a step draws nothing. The first term is ``E[log p(y | f)]``, ``f ~ N(m, s^2)``, or ``log E[p(y | f)]``,
# times a sample's weight where it has one. A step takes a sample's share: the mean over the batch, and the
# divergence over N.

MOST_RESIDUAL = (
    10.0  # in deviations of the prediction, where noise="none": what gradients see of a larger one
)
DRAWS = 64  # of the outputs in a step, where the likelihood has no closed form; always the same, quasi-random


def kl_weight(halvings: int, floor: float = 0.0) -> float:
    """``max(2^-halvings, floor)``, the share of the divergence's weight after so many epochs: the paper's
    ``2^(M - l) / 2^(M - 1)`` for ``l = halvings + 1``, without its large numbers.
    """
    return max(2.0**-halvings, floor)


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
        learned = options.noise == "learned"
        super().__init__(likelihood, samples, next(iter(field.means.values())) if learned else None)
        self._halved = halved
        self._network, self._layers, self.field = network.requires_grad_(False), layers, field
        self._prior_means, self.precision = prior_means, precision
        self._options = options
        self._rules = options.rules()
        self._checked = False

    @property
    def network(self) -> nn.Module:
        return self._network

    def groups(self) -> list[Group]:
        groups = self.field.groups(self._options.lr, self._options.log_variance_lr)
        for group in groups:
            group["weight_decay"] = self._options.weight_decay if group["name"] == "means" else 0.0
        rate = self._options.log_variance_lr
        noise = [{"params": [t], "lr": rate, "name": n, "weight_decay": 0.0} for n, t in self.noise().items()]
        return groups + noise

    def tensors(self) -> dict[str, Tensor]:
        return self.field.tensors() | self.noise()

    def trained_mean(self) -> dict[str, Tensor] | None:
        return self.field.trained_mean()

    def moments(self, batch: Batch, variances: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs, differentiable in the weights' means and variances.

        Args:
            batch: of inputs.
            variances: of all weights, by parameter.

        Raises:
            PosthocUQError: a function has no rule, or no uncertain weight reaches the outputs.
        """
        means, copied = self.field.means, batch.copied()
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
        likelihood = self.likelihood_in_training()
        if self._options.objective == "expected":
            return likelihood.expected_log_prob(mean, variance, targets, DRAWS)
        return likelihood.predictive_log_prob(mean, variance, targets, DRAWS)

    def backward(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        targets, field = cast(Tensor, batch.targets), self.field
        variances = {name: value.exp() for name, value in field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        targets, weights = weighed_targets(self._likelihood, mean.detach(), targets, batch.weights)
        self.check_targets(mean.detach(), targets, checks)
        if self._options.noise == "none":
            self._bound_gradients(mean, variance, None if weights is None else weights.samples)
        scores = self._score(mean, variance, targets)
        fit = (scores if weights is None else weights.of_samples(scores)).mean()
        divergence = gaussian_divergence(
            field.means, field.log_variances, variances, self._prior_means, self.precision
        )
        halvings = int(step.epoch * self._halved + 1e-9)
        weight = self._options.first_kl_weight * kl_weight(halvings, self._options.kl_floor)
        loss = divergence * (weight / self.samples) - fit
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

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        variances: dict[str, Any] = {name: value.exp() for name, value in self.field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        self._likelihood.check(mean, batch.targets)
        return self.likelihood().predictive_log_prob(mean, variance, cast(Tensor, batch.targets), draws)


# ``method="utvi"``: mean-field variational inference by propagated moments (Schodt 2024).

_METHOD_NAME = "utvi"  # the method's name
PRIOR_PRECISION = 1.0  # the default
_NO_NOISE = 1e-10  # the noise of noise="none", as a share of the noise of the fit


def adamw(groups: list[Group]) -> Optimizer:
    """The default optimiser: AdamW with betas (0.9, 0.999), fused where the device has that."""
    device = groups[0]["params"][0].device.type
    return torch.optim.AdamW(
        groups, betas=(0.9, 0.999), eps=1e-8, fused=True if device in ("cpu", "cuda") else None
    )


def _likelihood(likelihood: Likelihood, options: MomentOptions) -> Likelihood:
    """The likelihood that the training begins with."""
    noise = likelihood.noise_variance
    if options.noise == "fixed":
        return likelihood
    if noise is None:
        raise PosthocUQError(
            f"noise={options.noise!r} is for likelihood='regression'; {likelihood.name!r} has no noise. Leave it at "
            f"'fixed'."
        )
    return likelihood.with_noise(noise * _NO_NOISE) if options.noise == "none" else likelihood


def _field(task: Task, options: MomentOptions, rest: list[str]) -> MeanField:
    """The means and variances that the training begins with; the parameters of `rest` have means alone."""
    parameters = dict(task.model.named_parameters())
    names = [name for layer in task.layers.values() for name in layer.parameter_names]
    check_trainable(_METHOD_NAME, parameters, names)
    trained = {name: parameters[name].detach() for name in names}
    begin: Mapping[str, Tensor] = trained
    if options.start == "random":
        every = {name: parameter.detach() for name, parameter in parameters.items()}
        begin = initialised(task.model, every, task.settings.seed, "start='random'")
    elif options.initial is not None:
        _check_initial(options.initial, trained, options.train_mean)
        begin = options.initial.mean
    trained |= {name: parameters[name].detach() for name in rest}
    means = {name: begin.get(name, own).to(own) for name, own in trained.items()}
    if options.train_mean:
        means = {name: mean.clone() for name, mean in means.items()}
    if options.initial is None:
        logs = {name: torch.full_like(means[name], options.initial_log_variance) for name in names}
    else:
        variances = options.initial.variance()
        logs = {name: variances[name].to(means[name]).clamp(min=exp(-80.0)).log() for name in names}
    return MeanField(means, logs, options.train_mean)


def _check_initial(initial: Posterior, trained: Mapping[str, Tensor], train_mean: bool) -> None:
    if initial.trained_mean and not train_mean:
        raise PosthocUQError(
            "A posterior with a mean of its own cannot begin a training with train_mean=False."
        )
    for name, own in trained.items():
        original = initial.original.get(name)
        if original is None or original.shape != own.shape or not torch.equal(original.to(own), own):
            raise PosteriorMismatchError(
                f"initial= is no posterior of this model's '{name}': fit it on the same model, with the same layers."
            )


# Unscented-transform variational inference, begun at the trained network.


@dataclass(frozen=True, kw_only=True)
class UTVI(MomentOptions, Training[MomentObjective]):
    """Mean-field variational inference without draws: moments pass through the network in training too.

    ``q = N(mu, diag sigma^2)`` over the weights, trained by ``sum_n E[log p(y_n | f)] - phi KL(q || N(mu_p, I / tau))``
    with ``f ~ N(m_n, s_n^2)``, the moments of the outputs, which one pass carries through the network by the unscented
    transform; ``phi`` is halved from epoch to epoch (Schodt 2024, "Few-sample variational inference of Bayesian neural
    networks with arbitrary nonlinearities"). Its head is ``"moments"``, whose rules are those of the training.

    Every step is a pass of moments and its gradients, about four to six plain steps, and draws nothing. It is the one
    to take where the moments head is to predict: the variances are found for that head's own approximation. With
    ``noise="none"`` and ``objective="predictive"`` they also learn a noise that depends on the input. For other heads,
    take a Laplace method or `FunctionSpace`.

    Attributes:
        prior_precision: tau, of every weight; 1 by default.
    """

    name: ClassVar[str] = _METHOD_NAME
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field",)
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    prior_precision: Magnitude | None = None

    @property
    def head(self) -> str:
        return "moments"

    @property
    def calibrates_prior(self) -> bool:
        return self.objective == "expected"  # else the propagated variance is what was trained to predict

    def passes(self) -> int:
        return self.least_epochs + 2  # once to count the samples, once for what enters the last layer

    def begin(self, task: Task) -> MomentObjective:
        likelihood = _likelihood(task.settings.likelihood, self)
        with isolated_random_state(task.settings.seed):
            network = replicate(task.model)
        rest: list[str] = []
        if self.train_mean and self.train_rest:
            chosen = [name for layer in task.layers.values() for name in layer.parameter_names]
            rest = certain_parameters(network, chosen, task.batch)
        field = _field(task, self, rest)
        samples = count_data(task)
        trained = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
        epochs = self.epochs_over(samples, batches_of(task, samples))
        return MomentObjective(
            network,
            task.layers,
            field,
            trained if self.prior_mean == "trained" else {},
            PRIOR_PRECISION if self.prior_precision is None else self.prior_precision,
            likelihood,
            samples,
            self,
            # many short epochs halve the divergence's weight as often as the usual number of epochs does
            1.0 if self.epochs is not None else EPOCHS / epochs,
        )

    def blocks(self, task: Task, trained: MomentObjective) -> Mapping[str, Block]:
        return trained.field.blocks(task.layers, trained.samples)

    def prior_of(self, trained: MomentObjective) -> float:
        return trained.precision

    def described(self, trained: MomentObjective, blocks: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "start": "a posterior" if self.initial is not None else self.start,
            "mean": "trained" if self.train_mean else "frozen",
            "objective": self.objective,
            "noise": self.noise,
            ONE_PRIOR: True,
            "prior mean": self.prior_mean,
            "first KL weight": self.first_kl_weight,
            "least KL weight": self.first_kl_weight * self.kl_floor,
            "relu": self.relu,
            "trained without uncertainty": [
                name for name in trained.field.means if name not in trained.field.log_variances
            ],
        }

    def fit(self, task: Task) -> Posterior:
        posterior = super().fit(task)
        if self.noise == "none":
            posterior.history.tuning["noise variance"] = "none: the propagated variance is all"
        return posterior
