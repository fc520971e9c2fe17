"""`FunctionSpace`: variational inference over functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Count, Magnitude, one_of
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.labels import FisherChoice
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.methods.contexts import Context, Mixture, default_context, resolve_context
from posthoc_uq.methods.function_objective import (
    FunctionPrior,
    FunctionSpaceObjective,
    FunctionSpaceOptions,
    IndependentPrior,
)
from posthoc_uq.methods.inf import INF
from posthoc_uq.methods.laplace import EFB, KFAC, Diagonal, Laplace
from posthoc_uq.methods.mean_field import FeatureNetwork, MeanField
from posthoc_uq.methods.task import Task
from posthoc_uq.methods.trained import check_trainable, initialised, show_to_context
from posthoc_uq.methods.training import TRAINING, Training
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.evidence import maximise_evidence
from posthoc_uq.posteriors.posterior import Posterior

# ``method="function_space"``: variational inference over functions, begun at a trained network (Rudner, Chen,
# Teh, Gal 2022).

FUNCTION_SPACE = "function_space"  # the method's name
PRIOR_PRECISION = 1.0  # the default
N_CONTEXT = 32
N_INDEPENDENT = 16  # context points of an independent prior
_FAR_WEIGHT = 10  # a weight that far from the one that belongs to a prior is warned of
_LARGE_NOISE = 1e-2  # the function noise from which on a prior by features goes with a large weight


def _look_at_data(task: Task, context: Context) -> int:
    """Show the data to the context; the number of samples."""
    samples, settings = task.summary.seen, task.settings
    if context.needs_data or not samples:
        samples = show_to_context(task.loader, settings.reader, context, settings.seed, settings.progress)
    return samples


def _with_points(
    network: FeatureNetwork, options: FunctionSpaceOptions, context: Context
) -> FunctionSpaceOptions:
    """The options with a number of context points. By default that of the context itself; or 32, but no more than the
    functions of a prior by features have dimensions, and more than these are warned of; or 16 for an independent prior.
    """
    rank = network.last.inputs  # the features, and the bias if there is one
    if options.n_context is None:
        usual = N_INDEPENDENT if options.prior == "independent" else min(N_CONTEXT, rank)
        options = replace(options, n_context=context.points or usual)
    points = cast(int, options.n_context)
    if points > rank and options.prior == "features":
        warn_user(
            f"n_context={points} is more than the {rank} dimensions of functions of the last layer "
            f"'{network.last.name}': what the mean has outside of them costs by function_noise="
            f"{options.noise_share:g} alone. Take at most {rank} context points, or a larger function_noise."
        )
    return options


def _with_weight(options: FunctionSpaceOptions, samples: int, batch: int) -> FunctionSpaceOptions:
    """The options with a number as the divergence's weight; weights that the prior does not go with are warned of."""
    independent, minibatch = options.prior == "independent", max(1.0, samples / max(1, batch))
    given = options.divergence_weight
    if given is None:
        given = "minibatch" if independent else 1.0
    weight = minibatch if isinstance(given, str) else given
    if independent and weight * _FAR_WEIGHT < minibatch:
        warn_user(
            f"An independent prior at divergence_weight={weight:g} says next to nothing beside {samples} samples; "
            f"leave divergence_weight out, which is 'minibatch' (here {minibatch:g}) with this prior."
        )
    if not independent and weight > _FAR_WEIGHT and options.noise_share < _LARGE_NOISE:
        warn_user(
            f"A prior by features at divergence_weight={weight:g} and function_noise={options.noise_share:g} costs "
            f"accuracy and calibration; take divergence_weight=1, a function_noise of {_LARGE_NOISE:g} or more, or "
            f"prior='independent'."
        )
    return replace(options, divergence_weight=weight)


def _field(
    network: FeatureNetwork,
    options: FunctionSpaceOptions,
    task: Task,
    start: Callable[[], Posterior | None],
) -> MeanField:
    """The means and variances that the training begins with."""
    parameters = dict(network.twin.named_parameters())
    names = [name for layer in task.layers.values() for name in layer.parameter_names]
    check_trainable(FUNCTION_SPACE, parameters, names)
    means = {name: parameters[name].detach() for name in names}
    if options.train_mean:
        means = {name: mean.clone() for name, mean in means.items()}
    last = network.last.parameter_names
    uncertain = list(last) if options.body == "certain" else names
    resumed = task.checkpoint is not None and task.checkpoint.is_running(TRAINING)
    initial = None if resumed else start()  # else the checkpoint's tensors are put in place later
    if initial is None:
        first = {
            n: options.initial_log_variance if n in last else options.initial_body_log_variance for n in names
        }
        logs = {name: torch.full_like(means[name], first[name]) for name in uncertain}
        return MeanField(means, logs, options.train_mean)
    _check_initial(initial, means)
    if initial.trained_mean:
        if not options.train_mean:
            raise PosthocUQError(
                "A posterior with a mean of its own cannot begin a training with train_mean=False."
            )
        means = {name: initial.mean[name].to(mean).clone() for name, mean in means.items()}
    variances = initial.variance()
    floor = exp(-80.0)
    logs = {name: variances[name].to(means[name]).clamp(min=floor).log() for name in uncertain}
    return MeanField(means, logs, options.train_mean)


def _check_initial(initial: Posterior, means: Mapping[str, Tensor]) -> None:
    for name, mean in means.items():
        trained = initial.original.get(name)
        if trained is None:
            raise PosteriorMismatchError(
                f"initial= is a posterior without parameter '{name}', which is to have a variance; fit it with the "
                f"same layers."
            )
        if trained.shape != mean.shape or not torch.equal(trained.to(mean), mean):
            raise PosteriorMismatchError(
                f"initial= was fitted on another model: '{name}' is not the same there."
            )


def _prior(
    network: FeatureNetwork,
    options: FunctionSpaceOptions,
    task: Task,
    field: MeanField,
    precision: float,
) -> tuple[FunctionPrior, bool]:
    """The prior, and whether its outputs and features are those at the field's own means."""
    pretrained = {name: p.detach() for name, p in network.twin.named_parameters()}
    if options.prior_mean == "random_init":
        seed = task.settings.seed
        parameters = initialised(task.model, pretrained, seed, "prior_mean='random_init'")
    else:
        parameters = pretrained
    if options.prior == "independent":
        return IndependentPrior(network, parameters, options.prior_mean, options.value_variance), False
    frozen = (
        not field.train_mean
        and options.prior_mean != "random_init"
        and not options.prior_body_variance
        and options.body == "linearized"
    )
    return FunctionPrior(
        network, parameters, options.prior_mean, precision, options.prior_body_variance, options.noise_share
    ), frozen


def _prior_notes(options: FunctionSpaceOptions) -> dict[str, Any]:
    """Of the prior over functions, and the weight of the divergence from it."""
    shared = {
        "prior": options.prior,
        "prior mean": options.prior_mean,
        "divergence weight": options.divergence_weight,
    }
    if options.prior == "independent":
        return shared | {"prior variance": options.value_variance}
    return shared | {
        "prior body variance": float(options.prior_body_variance),
        "function noise": options.noise_share,
    }


# Variational inference over functions, begun at the trained network.

_CONSTANT = "constant"
_STARTS: dict[str, type[Laplace]] = {kind.name: kind for kind in (Diagonal, KFAC, EFB, INF)}


@dataclass(frozen=True, kw_only=True)
class FunctionSpace(FunctionSpaceOptions, Training[FunctionSpaceObjective]):
    """Variational inference over functions, begun at the trained network.

    A Gaussian over the weights, trained by its distribution over functions: it maximises ``E_q[log p(y | f)] -
    KL(q(f(X)) || p(f(X)))`` at context points ``X``, with q and p linearised in the weights (Rudner, Chen, Teh, Gal
    2022, "Tractable function-space variational inference in Bayesian neural networks"). The formulas are in
    ``docs/methods/function_space.md``.

    An epoch costs about two to four epochs of plain training. Take it where foreign inputs resemble inputs that can be
    shown to it as context. With ``epochs=0`` there is no training: the posterior is that of the curvature named by
    `initial`, for the linearised head.

    Attributes:
        prior_precision: of the last layer's weights in the prior by features; 1 by default.
        fisher: labels of the curvature that the training begins with; see `Laplace`.
        n_samples: see `Laplace`.
    """

    name: ClassVar[str] = FUNCTION_SPACE
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field", "diagonal", "kfac", "efb", "inf")
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})

    prior_precision: Magnitude | None = None
    fisher: FisherChoice = "auto"
    n_samples: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior == "independent" and self.prior_precision is not None:
            raise PosthocUQError(
                "prior_precision is of prior='features'; with prior='independent' give prior_variance, that of a "
                "function value."
            )
        if isinstance(self.initial, str):
            one_of("initial", self.initial, (_CONSTANT, *_STARTS) if self.trains else tuple(_STARTS))
        elif self.initial is not None and not (isinstance(self.initial, Posterior) and self.trains):
            raise PosthocUQError(
                f"initial must be one of {(_CONSTANT, *_STARTS)} or a fitted posterior to train on from; without "
                f"epochs the posterior comes from the curvature itself: initial='inf'."
            )
        if self.curvature is None and (self.fisher, self.n_samples) != ("auto", 1):
            raise PosthocUQError(
                "fisher and n_samples are about the curvature of the data, which this training has none of; leave them "
                "out, or begin with a curvature's variances: initial='inf'."
            )

    @property
    def trains(self) -> bool:
        return self.least_epochs > 0

    @property
    def curvature(self) -> Laplace | None:
        """The method whose variances the training begins with, or whose posterior it is without a training."""
        initial = self.initial or ("inf" if not self.trains else _CONSTANT)
        if not isinstance(initial, str) or initial == _CONSTANT:
            return None
        shared: dict[str, Any] = {"dtype": self.dtype, "unsupported": self.unsupported}
        return _STARTS[initial](fisher=self.fisher, n_samples=self.n_samples, **shared)

    def passes(self) -> int:
        first = 0 if self.curvature is None else self.curvature.passes()
        # once for the context, once for the features of the last layer
        return first + self.least_epochs + 2 * self.trains

    def fit(self, task: Task) -> Posterior:
        curvature = self.curvature
        if self.trains:
            return super().fit(task)
        assert curvature is not None
        posterior = curvature.fit(task)
        posterior.method = self.name
        posterior.history.fit["curvature"] = curvature.name
        return posterior

    def _start(self, task: Task) -> Posterior | None:
        """The posterior whose variances the training begins with; None for constant ones."""
        if isinstance(self.initial, Posterior) or self.curvature is None:
            return self.initial if isinstance(self.initial, Posterior) else None
        posterior = self.curvature.fit(task)
        maximise_evidence(posterior)
        task.forget_sweeps()
        return posterior

    def begin(self, task: Task) -> FunctionSpaceObjective:
        with isolated_random_state(task.settings.seed):
            network = FeatureNetwork(replicate(task.model), task.layers, task.batch)
        if self.context is None:
            context = default_context(task.batch, corrupted=self.prior == "independent")
        else:
            context = resolve_context(self.context)
        options = _with_points(network, self, context)
        field = _field(network, options, task, lambda: self._start(task))
        samples = _look_at_data(task, context)
        options = _with_weight(options, samples, count_samples(task.batch))
        prior, frozen = _prior(network, options, task, field, self._precision)
        likelihood = task.settings.likelihood
        return FunctionSpaceObjective(network, field, prior, likelihood, context, samples, options, frozen)

    def blocks(self, task: Task, trained: FunctionSpaceObjective) -> Mapping[str, Block]:
        return trained.field.blocks(task.layers, trained.samples)

    @property
    def _precision(self) -> float:
        return PRIOR_PRECISION if self.prior_precision is None else self.prior_precision

    def prior_of(self, trained: FunctionSpaceObjective) -> float:
        return self._precision

    def check_steps(self, steps: int) -> None:
        """Adam moves a number by its rate a step, so few steps hardly move the variances."""
        reach = self.reach(steps, self.log_variance_lr)
        if self.optimizer is None and reach < 0.25:
            warn_user(
                f"{steps} steps at log_variance_lr={self.log_variance_lr:g} move a log variance by {reach:.2g} at "
                f"most, so the variances are nearly those of the start; raise log_variance_lr and lr={self.lr:g}, or "
                f"epochs."
            )

    def described(self, trained: FunctionSpaceObjective, blocks: Mapping[str, Any]) -> dict[str, Any]:
        options, context = trained.options, trained.context
        context_name = options.context if isinstance(options.context, str) else type(context).__name__
        if options.context is None:
            foreign = "corrupted" if options.prior == "independent" else "monochrome"
            context_name = f"batch and {foreign}" if isinstance(context, Mixture) else "uniform"
        return {
            "mean": "trained" if options.train_mean else "frozen",
            "context": context_name,
            "n_context": options.n_context,
            "n_sets": options.n_sets,
            "n_draws": options.n_draws,
            **_prior_notes(options),
            "last layer": trained.feature_network.last.name,
            "initial": "a posterior"
            if isinstance(options.initial, Posterior)
            else options.initial or "constant",
        }
