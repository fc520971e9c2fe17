"""`UTVI`: variational inference by moments that the unscented transform carries through the network.

After Schodt 2024, "Few-sample variational inference of Bayesian neural networks with arbitrary nonlinearities":

    sum_n log-likelihood(m_n, s_n^2) - phi KL(q || p),    q = N(mu, diag sigma^2),    p = N(mu_p, I / tau)

``m_n, s_n^2`` are the mean and the variance of the outputs, carried through the network in one pass, so that a step
draws nothing. The first term is ``E[log p(y | f)]``, ``f ~ N(m, s^2)``, or ``log E[p(y | f)]``, times a sample's weight
where it has one. A step takes a sample's share: the mean over the batch, and the divergence over N.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import expm1, log
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Kappa, LogVariance, NotNegative, Positive, Unit
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.layers import RULES
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.rules import AffineCall
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods.task import Task
from posthoc_uq.moments.propagation import independent_weights, propagate, running_module
from posthoc_uq.moments.tensor import MaxPool, Relu, Rules, Unknown
from posthoc_uq.moments.unscented import KAPPA
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ONE_PRIOR
from posthoc_uq.trained.mean_field import MeanField, begun_field, gaussian_divergence
from posthoc_uq.trained.training import (
    EPOCHS,
    Group,
    Objective,
    Step,
    Training,
    fused,
    initialised,
)

_DRAWS = (
    64  # of the outputs in a step, where the likelihood has no closed form; always the same, quasi-random
)
_MAX_RESIDUAL = 10.0  # that gradients see where noise="none", in deviations of the prediction
_SOFTENED = log(expm1(KAPPA))  # of which the softplus is the kappa that is meant
_NO_NOISE = 1e-10  # the noise of noise="none", as a share of the noise of the fit


@dataclass(frozen=True, kw_only=True)
class UTVI(Training["MomentObjective"]):
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
        kappa: of the points of the unscented transform, see `MomentsPredictor`; or ``"learned"``, one a layer for the
            functions after it, trained from 2 by the objective at `log_variance_lr`. It has no prior. The posterior
            keeps it, and its head takes it from there.
        prior_precision: tau, of every weight; 1 by default.

    Example:
        ```python
        method = uq.UTVI(epochs=1)
        posterior = uq.fit(model, train_loader, method)
        prediction = uq.wrap(model, posterior)(images)
        ```
    """

    name: ClassVar[str] = "utvi"
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field",)

    lr: Positive = 1e-3
    log_variance_lr: Positive = 3e-2
    start: Literal["trained", "random"] = "trained"
    initial: Posterior | None = None
    initial_log_variance: LogVariance = -10.0
    train_mean: bool = True
    train_rest: bool = True
    objective: Literal["expected", "predictive"] = "expected"
    noise: Literal["fixed", "learned", "none"] = "fixed"
    kl_weight: NotNegative | None = None
    kl_floor: Unit = 0.0
    prior_mean: Literal["zero", "trained"] = "zero"
    weight_decay: NotNegative = 0.01
    relu: Relu = "unscented"
    max_pool: MaxPool = "clark"
    pool_rho: Unit = 0.0
    unknown: Unknown = "error"
    kappa: Kappa | Literal["learned"] = KAPPA

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

    @property
    def head(self) -> str:
        return "moments"

    @property
    def calibrates_prior(self) -> bool:
        return self.objective == "expected"  # else the propagated variance is what was trained to predict

    def optimiser_over(self, groups: list[Group]) -> Optimizer:
        """By default AdamW with betas (0.9, 0.999), fused where the device has that."""
        if self.optimizer is not None:
            return self.optimizer(groups)
        return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, fused=fused(groups))

    @property
    def first_kl_weight(self) -> float:
        """The factor on the divergence in the first epoch."""
        by_start = 0.1 if self.start == "trained" else 1.0
        return by_start if self.kl_weight is None else self.kl_weight

    def begin(self, task: Task) -> MomentObjective:
        likelihood = task.likelihood
        noise = likelihood.noise_variance
        if self.noise != "fixed" and noise is None:
            raise PosthocUQError(
                f"noise={self.noise!r} is for likelihood='regression'; {likelihood.name!r} has no noise. Leave it at "
                f"'fixed'."
            )
        if self.noise == "none" and noise is not None:
            likelihood = likelihood.with_noise(noise * _NO_NOISE)
        with isolated_random_state(task.plan.seed):
            network = replicate(task.model)
        parameters = dict(task.model.named_parameters())
        trained = {name: parameter.detach() for name, parameter in parameters.items()}
        names = [name for layer in task.layers.values() for name in layer.parameter_names]
        rest: list[str] = []
        if self.train_mean and self.train_rest:
            rest = certain_parameters(network, names, task.batch)
        start = None
        if self.start == "random":
            start = initialised(task.model, trained, task.plan.seed, "start='random'")
        field = begun_field(
            self,
            parameters,
            task.layers.values(),
            dict.fromkeys(names, self.initial_log_variance) if self.initial is None else self.initial,
            train_mean=self.train_mean,
            certain=rest,
            start=start,
        )
        samples = task.count()
        epochs = self.epochs_over(samples, task.batches_of(samples))
        # many short epochs halve the divergence's weight as often as the usual number of epochs does
        halved = 1.0 if self.epochs is not None else EPOCHS / epochs
        prior_means = trained if self.prior_mean == "trained" else {}
        return MomentObjective(
            self, network, task.layers, field, likelihood, samples, prior_means=prior_means, halved=halved
        )

    def blocks(self, task: Task, trained: MomentObjective) -> Mapping[str, Block]:
        return trained.field.blocks(task.layers, trained.samples)

    def describe_fit(self, trained: MomentObjective, blocks: Mapping[str, Any]) -> dict[str, Any]:
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
            "kappa": self.kappa if self.kappa != "learned" else trained.learned_kappas(),
            "trained without uncertainty": [
                name for name in trained.field.means if name not in trained.field.log_variances
            ],
        }

    def fit(self, task: Task) -> Posterior:
        posterior = super().fit(task)
        if self.noise == "none":
            posterior = posterior.noted(tuning={"noise variance": "none: the propagated variance is all"})
        return posterior


class MomentObjective(Objective):
    """The loss of a step, ``-log-likelihood + phi KL / N`` a sample.

    Args:
        method: with its options.
        network: a replica in eval mode, for this objective alone.
        layers: those whose weights are uncertain.
        field: what is trained.
        likelihood: of the targets.
        samples: N.
        prior_means: of the weights, by parameter; zero where there is none.
        halved: how often the divergence's weight is halved in an epoch.
    """

    def __init__(
        self,
        method: UTVI,
        network: nn.Module,
        layers: Mapping[str, Layer],
        field: MeanField,
        likelihood: Likelihood,
        samples: int,
        *,
        prior_means: Mapping[str, Tensor],
        halved: float = 1.0,
    ) -> None:
        super().__init__(network.requires_grad_(False), likelihood, samples, method.noise == "learned")
        self._method, self._layers, self.field = method, layers, field
        self._prior_means, self._halved = prior_means, halved
        self._softened: dict[str, Tensor] = {}  # softplus of these are the kappas that are learned
        if method.kappa == "learned":
            like = next(iter(field.log_variances.values()))
            self._softened = {name: like.new_tensor(_SOFTENED).requires_grad_() for name in layers}
        self._checked = False  # that moments reach the outputs

    def groups(self) -> list[Group]:
        groups = self.field.groups(self._method.lr, self._method.log_variance_lr)
        for group in groups:
            group["weight_decay"] = self._method.weight_decay if group["name"] == "means" else 0.0
        if self._softened:
            params = {f"kappa after {name}": value for name, value in self._softened.items()}
            rate = self._method.log_variance_lr
            groups.append({"params": params, "lr": rate, "name": "kappas", "weight_decay": 0.0})
        return groups

    def learned_kappas(self) -> dict[str, float]:
        """The kappas by layer, where they are learned; a layer that no function follows keeps that of the start."""
        return {name: float(nn.functional.softplus(value.detach())) for name, value in self._softened.items()}

    def _rules(self) -> Rules:
        """Those of a pass, which gradients reach the learned kappas through."""
        method = self._method
        kappa = {name: nn.functional.softplus(value) for name, value in self._softened.items()}
        given = KAPPA if method.kappa == "learned" else method.kappa
        return Rules(method.relu, method.max_pool, method.pool_rho, "diag", method.unknown, kappa or given)

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
            lambda: functional_call(self.network, means, copied.args, copied.kwargs),
            independent_weights(self._layers, means, variances),
            self._rules(),
            lambda: running_module(self.network),
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

    def loss(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        method, field = self._method, self.field
        variances = {name: value.exp() for name, value in field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        targets, weights = self.targets(batch, mean, checks)
        if method.noise == "none":
            self._bound_gradients(mean, variance, None if weights is None else weights.samples)
        likelihood = self.likelihood_in_training()
        if method.objective == "expected":
            scores = likelihood.expected_log_prob(mean, variance, targets, _DRAWS)
        else:
            scores = likelihood.predictive_log_prob(mean, variance, targets, _DRAWS)
        fit = (scores if weights is None else weights.of_samples(scores)).mean()
        divergence = gaussian_divergence(
            field.means, field.log_variances, variances, self._prior_means, method.precision
        )
        # after l epochs max(2^-l, floor): the paper's 2^(M - l) / 2^(M - 1), l = 1 ... M, without its large numbers
        share = max(2.0 ** -int(step.epoch * self._halved + 1e-9), method.kl_floor)
        loss = divergence * (method.first_kl_weight * share / self.samples) - fit
        return {"loss": loss, "log likelihood": fit, "KL": divergence}

    def _bound_gradients(self, mean: Tensor, variance: Tensor, weights: Tensor | None) -> None:
        """Have gradients see no residual above `_MAX_RESIDUAL` deviations.

        Without a noise nothing else bounds them: by a log density of variance V and residual r they are ``r / V`` and
        ``(r^2 / V - 1) / (2 V)``, which at a V of nearly zero leave an optimiser with second moments by which the entry
        moves no more. With ``|r| <= k sqrt(V)`` they are at most ``k / sqrt(V)`` and ``(k^2 + 1) / (2 V)``.
        """
        total = variance.detach() + self._likelihood.variance(mean.detach()).to(variance)
        share = torch.full_like(total, 1 / mean.shape[0])  # of a sample in the mean over the batch
        if weights is not None:
            share = share * weights.to(share).reshape(-1, *[1] * (share.ndim - 1))
        for tensor, most in (
            (mean, _MAX_RESIDUAL * share * total.rsqrt()),
            (variance, (_MAX_RESIDUAL**2 + 1) / 2 * share / total),
        ):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, most=most: gradient.clamp(-most, most))

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        variances: dict[str, Any] = {name: value.exp() for name, value in self.field.log_variances.items()}
        mean, variance = self.moments(batch, variances)
        self._likelihood.check(mean, batch.targets)
        return self.likelihood().predictive_log_prob(mean, variance, cast(Tensor, batch.targets), draws)


def certain_parameters(network: nn.Module, chosen: Collection[str], batch: Batch) -> list[str]:
    """What a network uses after the first of some weights and that no affine map owns: scales and shifts of
    normalisations, scales of activations. Other affine layers were left out by choice, and what comes before the first
    chosen one would cost a longer backward pass.

    Args:
        network: a replica in eval mode, which is run once.
        chosen: names of the parameters that are uncertain.
        batch: a few inputs.

    Returns:
        Names of parameters in float32 or float64.
    """
    held = dict(network.named_parameters())
    first, later, affine = {id(held[name]) for name in chosen}, set[int](), set[int]()
    began = False

    def note(call: AffineCall, output: Tensor) -> None:
        nonlocal began
        if RULES[call.kind].matrices:
            affine.update(id(tensor) for tensor in (call.parameter, call.bias) if tensor is not None)
        began = began or id(call.parameter) in first

    def every(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if began:
            later.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    copied = batch.copied()
    with torch.no_grad(), isolated_random_state(), CallWatcher(None, note, every=every, anchored=False):
        network(*copied.args, **copied.kwargs)
    return [
        name
        for name, parameter in held.items()
        if id(parameter) in later - affine
        and name not in chosen
        and parameter.dtype in (torch.float32, torch.float64)
    ]
