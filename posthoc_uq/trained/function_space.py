"""`FunctionSpace`: variational inference over functions, begun at a trained network.

After Rudner, Chen, Teh, Gal 2022, "Tractable function-space variational inference in Bayesian neural networks":

    E_q[log p(y | f(x; theta))] - max_s KL(q(f(X_s)) || p(f(X_s)))

The first term runs the network itself with weights drawn from q. In the second, both distributions are Gaussians of the
network linearised in its weights, at context points ``X_s``. The last layer's weights ``W phi + b`` are integrated
exactly, which gives one covariance an output; all others (the body) are drawn, which moves the mean by ``J_body
(sigma o e)``. Several draws make q a mixture of Gaussians with equal weights and one covariance (equation 14). The
divergence counts ``w`` times for the whole data set, so with ``w / N`` per sample; the bound has ``w = 1``. Samples
with weights of their own count as often in the first term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_map

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import DeferredChecks, as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import jvp, replicate
from posthoc_uq.core.options import Count, LogVariance, Positive
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.trained.contexts import Context, Mixture, default_context, resolve_context, shows
from posthoc_uq.trained.mean_field import MeanField, begun_field
from posthoc_uq.trained.training import Group, Objective, Step, Training, initialised

BODY_LOG_VARIANCE = -20.0  # where none is given

_OF_THE_OTHER_PRIOR = {
    "features": ("independent", {"prior_variance"}),
    "independent": ("features", {"prior_precision", "function_noise"}),
}
"""By prior: the other one, and the options that only that has."""

_WARNED_RATIO = 10  # of a weight of the divergence to the one that belongs to a prior
_NOISE_FOR_LARGE_WEIGHTS = 1e-2  # function noise with which a prior by features takes a larger weight
_WEIGHTS, _CONTEXT, _VALIDATION, _VALUES = 1, 2, 3, 4  # streams of random numbers from a step's seed


@dataclass(frozen=True, kw_only=True)
class FunctionSpace(Training["FunctionSpaceObjective"]):
    """Variational inference over functions, begun at the trained network.

    A Gaussian over the weights, trained by its distribution over functions: it maximises ``E_q[log p(y | f)] -
    KL(q(f(X)) || p(f(X)))`` at context points ``X``, with q and p linearised in the weights (Rudner, Chen, Teh, Gal
    2022, "Tractable function-space variational inference in Bayesian neural networks"). The formulas are in
    ``docs/methods/function_space.md``.

    An epoch costs about two to four epochs of plain training. Take it where foreign inputs resemble inputs that can be
    shown to it as context.

    Attributes:
        context: where the network is to be uncertain: ``"monochrome"`` images, a ``"uniform"`` box, the training
            ``"batch"`` as it is or ``"corrupted"``; from Python also a loader or a tensor of unlabelled inputs, a
            callable ``(n, generator)``, one of `methods.contexts`, or a list of several: pairs ``(share, context)``,
            or ``(count, context)`` where all numbers are whole, ``[(2, "batch"), (14, "corrupted")]``. By default half
            batch, half monochrome for images (with an independent prior the counts above), the box for vectors.
        n_context: context points a step; by default as many as a list of counts has; or 32, or the last layer's
            dimensions where these are fewer; or 16 with an independent prior.
        n_sets: sets of context points a step; the one with the largest divergence counts.
        n_draws: draws of the weights a step.
        train_mean: False moves the variances only, and predictions at the mean stay what they were to the bit.
        initial: a fitted posterior whose variances, and mean if it has one of its own, are those of the start, in place
            of constant variances.
        learn_noise: train the noise variance of a regression, from its value at the start.
        initial_log_variance: where the variances of the last layer begin.
        initial_body_log_variance: where all others begin.
        prior: over functions: ``"features"``, what a prior over the last layer's weights says, or ``"independent"``,
            every function value by itself.
        prior_variance: of a function value in the independent prior.
        divergence_weight: by which the divergence is multiplied, where 1 is the evidence lower bound; ``"minibatch"``
            divides it by the size of a batch (of the loader's first one) in place of the number of samples. By default
            1 with a prior by features, and ``"minibatch"`` with an independent one.
        prior_mean: of the functions: ``"zero"``, ``"pretrained"`` or ``"random_init"``.
        function_noise: a variance added to all function values, as a share of their mean variance in the prior by
            features.
        body: how a draw of all layers but the last enters the divergence: ``"linearized"``, or ``"sample"`` to run the
            network with it; or ``"certain"``: these layers are trained and have no variances.
        n_body_draws: such draws a step with ``body="linearized"``. Of several the divergence is that of their mixture:
            at most the mean of theirs, and less than that by no more than ``log(n_body_draws)`` nats (of every function
            value, with an independent prior).
        prior_precision: of the last layer's weights in the prior by features; 1 by default.

    Example:
        ```python
        method = uq.FunctionSpace(epochs=1, context="corrupted")
        posterior = uq.fit(model, train_loader, method)
        prediction = uq.wrap(model, posterior)(images)
        ```
    """

    name: ClassVar[str] = "function_space"
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field",)

    context: Any = None
    n_context: Count | None = None
    n_sets: Count = 1
    n_draws: Count = 1
    train_mean: bool = True
    initial: Posterior | None = None
    learn_noise: bool = False
    initial_log_variance: LogVariance = -5.0
    initial_body_log_variance: LogVariance = BODY_LOG_VARIANCE
    prior: Literal["features", "independent"] = "features"
    prior_variance: Positive = 10.0
    divergence_weight: Positive | Literal["minibatch"] | None = None
    prior_mean: Literal["zero", "pretrained", "random_init"] = "zero"
    function_noise: Positive = 1e-6
    body: Literal["linearized", "sample", "certain"] = "linearized"
    n_body_draws: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        other, of_other = _OF_THE_OTHER_PRIOR[self.prior]
        for field in fields(self):
            if field.name in of_other and getattr(self, field.name) != field.default:
                raise PosthocUQError(
                    f"{field.name} is of prior={other!r}, and prior={self.prior!r} does without; leave it out."
                )
        if self.n_body_draws > 1 and self.body != "linearized":
            raise PosthocUQError(
                f"n_body_draws={self.n_body_draws} goes with body='linearized', and body={self.body!r} takes 1."
            )
        if self.body == "certain" and self.initial_body_log_variance != BODY_LOG_VARIANCE:
            raise PosthocUQError(
                "body='certain' leaves all layers but the last without variances, so that initial_body_log_variance "
                "has no effect; leave it out."
            )
        if self.body == "certain" and not self.train_mean:
            raise PosthocUQError(
                "body='certain' with train_mean=False trains nothing but the last layer's variances; choose "
                "layers='last'."
            )

    def begin(self, task: Task) -> FunctionSpaceObjective:
        with isolated_random_state(task.plan.seed):
            network = FeatureNetwork(replicate(task.model), task.layers, task.batch)
        if self.context is None:
            context = default_context(task.batch, corrupted=self.prior == "independent")
        else:
            context = resolve_context(self.context)
        names = [name for layer in task.layers.values() for name in layer.parameter_names]
        body = [name for name in names if name not in network.last.parameter_names]
        constant = dict.fromkeys(names, self.initial_log_variance)
        constant |= dict.fromkeys(body, self.initial_body_log_variance)
        field = begun_field(
            self,
            dict(network.twin.named_parameters()),
            task.layers.values(),
            constant if self.initial is None else self.initial,
            train_mean=self.train_mean,
            certain=body if self.body == "certain" else (),
        )
        samples = task.count(shows(context, task.plan.seed))
        method = replace(
            self,
            n_context=self._points(context, network.last),
            divergence_weight=self._weight(samples, count_samples(task.batch)),
        )
        pretrained = {name: p.detach() for name, p in network.twin.named_parameters()}
        if self.prior_mean == "random_init":
            seed = task.plan.seed
            pretrained = initialised(task.model, pretrained, seed, "prior_mean='random_init'")
        return FunctionSpaceObjective(method, network, field, task.likelihood, samples, context, pretrained)

    def _points(self, context: Context, last: Layer) -> int:
        """The number of context points. By default that of the context itself; or 32, but no more than the functions of
        a prior by features have dimensions, and more than these are warned of; or 16 for an independent prior.
        """
        rank = last.inputs  # the features, and the bias if there is one
        usual = 16 if self.prior == "independent" else min(32, rank)
        points = self.n_context or context.points or usual
        if points > rank and self.prior == "features":
            warn_user(
                f"n_context={points} is more than the {rank} dimensions of functions of the last layer '{last.name}': "
                f"what the mean has outside of them costs by function_noise={self.function_noise:g} alone. Take at "
                f"most {rank} context points, or a larger function_noise."
            )
        return points

    def _weight(self, samples: int, batch: int) -> float:
        """The divergence's weight; one that the prior does not go with is warned of."""
        independent, minibatch = self.prior == "independent", max(1.0, samples / max(1, batch))
        given = self.divergence_weight or ("minibatch" if independent else 1.0)
        weight = minibatch if isinstance(given, str) else given
        if independent and weight * _WARNED_RATIO < minibatch:
            warn_user(
                f"An independent prior at divergence_weight={weight:g} says next to nothing beside {samples} samples; "
                f"leave divergence_weight out, which is 'minibatch' (here {minibatch:g}) with this prior."
            )
        if not independent and weight > _WARNED_RATIO and self.function_noise < _NOISE_FOR_LARGE_WEIGHTS:
            warn_user(
                f"A prior by features at divergence_weight={weight:g} and function_noise={self.function_noise:g} costs "
                f"accuracy and calibration; take divergence_weight=1, a function_noise of "
                f"{_NOISE_FOR_LARGE_WEIGHTS:g} or more, or prior='independent'."
            )
        return weight

    def blocks(self, task: Task, trained: FunctionSpaceObjective) -> Mapping[str, Block]:
        return trained.field.blocks(task.layers, trained.samples)

    def check_steps(self, steps: int) -> None:
        """Adam moves a number by its rate a step, so few steps hardly move the variances."""
        moved = self.moved_by(steps, self.log_variance_lr)
        if self.optimizer is None and moved < 0.25:
            warn_user(
                f"{steps} steps at log_variance_lr={self.log_variance_lr:g} move a log variance by {moved:.2g} at "
                f"most, so the variances are nearly those of the start; raise log_variance_lr and lr={self.lr:g}, or "
                f"epochs."
            )

    def describe_fit(self, trained: FunctionSpaceObjective, blocks: Mapping[str, Any]) -> dict[str, Any]:
        method, independent = trained.method, self.prior == "independent"
        context = self.context if isinstance(self.context, str) else type(trained.context).__name__
        if self.context is None:
            foreign = "corrupted" if independent else "monochrome"
            context = f"batch and {foreign}" if isinstance(trained.context, Mixture) else "uniform"
        option = "prior_variance" if independent else "function_noise"
        return {
            "mean": "trained" if self.train_mean else "frozen",
            "context": context,
            "n_context": method.n_context,
            "n_sets": self.n_sets,
            "n_draws": self.n_draws,
            "n_body_draws": self.n_body_draws,
            "prior": self.prior,
            "prior mean": self.prior_mean,
            "divergence weight": method.divergence_weight,
            option.replace("_", " "): getattr(self, option),
            "last layer": trained.feature_network.last.name,
            "initial": "constant" if self.initial is None else "a posterior",
        }


class FunctionSpaceObjective(Objective):
    """The loss of a step, ``-log p(y | x) + w KL / N`` a sample, and its gradients.

    Args:
        method: with its options, and numbers for `n_context` and `divergence_weight`.
        network: of the model.
        field: the means and variances that are trained.
        likelihood: of the targets.
        samples: N.
        context: gives the points at which the divergence is taken.
        prior_parameters: at which the network is linearised for the prior.
    """

    def __init__(
        self,
        method: FunctionSpace,
        network: FeatureNetwork,
        field: MeanField,
        likelihood: Likelihood,
        samples: int,
        context: Context,
        prior_parameters: Mapping[str, Tensor],
    ) -> None:
        super().__init__(network.twin, likelihood, samples, method.learn_noise)
        self.method, self.feature_network, self.field = method, network, field
        self.context, self._prior_parameters = context, prior_parameters
        # whether the prior's outputs and features are those at the means of q, so that no pass of their own is needed
        self._prior_at_means = (
            method.prior == "features"
            and method.prior_mean != "random_init"
            and not method.train_mean
            and method.body == "linearized"
        )
        self._weight = cast(float, method.divergence_weight or 1.0) / samples
        self._last = network.last.parameter_names
        self._body = [name for name in field.log_variances if name not in self._last]
        self._warned = False  # that a step needed more function noise

    def groups(self) -> list[Group]:
        return self.field.groups(self.method.lr, self.method.log_variance_lr)

    def trained_mean(self) -> dict[str, Tensor] | None:
        return self.field.trained_mean()

    def backward(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        seed = step.seed
        generator, shares = self.generator(seed, _WEIGHTS), list[Tensor]()
        deviations: dict[str, Tensor] = {}
        for _ in range(self.method.n_draws):  # one graph at a time: each is freed before the next
            deviations = self.field.deviations(generator)
            shares.append(self._fit(batch, deviations, checks if not shares else None))
        log_likelihood = torch.stack(shares).sum()
        # The last draw of the body serves both terms: each stays unbiased, and nothing is drawn twice.
        bodies = [{name: deviations[name].requires_grad_() for name in self._body}]
        for _ in range(self.method.n_body_draws - 1 if self._body else 0):
            deviations = self.field.deviations(generator)
            bodies.append({name: deviations[name].requires_grad_() for name in self._body})
        del deviations
        for body in bodies:
            self.field.on_backward(body, mean=False)
        contexts = self._contexts(batch, seed)
        try:
            divergences, largest = self.divergence(contexts, *bodies, generator=self.generator(seed, _VALUES))
        except RuntimeError as error:
            _raise_of_shapes(contexts, batch, error)
            raise
        # by index_select, which reads the index on the device; plain indexing would bring it to the host
        total, mean_part, covariance_part = (
            part.index_select(0, largest).squeeze(0)
            for part in (divergences.total, divergences.mean_part, divergences.covariance_part)
        )
        (total * self._weight).backward()
        for body in bodies:
            body.clear()
        divergence = total.detach() * self._weight
        return {
            "loss": divergence - log_likelihood.to(divergence),
            "log likelihood": log_likelihood,
            "KL mean part": mean_part.detach(),
            "KL covariance part": covariance_part.detach(),
        }

    def _fit(self, batch: Batch, deviations: Mapping[str, Tensor], checks: DeferredChecks | None) -> Tensor:
        """One draw's share of the mean log likelihood; adds its gradients."""
        weights = {
            n: (mean.detach() + deviations[n] if n in deviations else mean.detach()).requires_grad_()
            for n, mean in self.field.means.items()
        }
        self.field.on_backward(weights, deviations, mean=True)
        outputs = self.feature_network.run(weights, batch)[0]
        share = self.log_prob(outputs, *self.targets(batch, outputs, checks)).mean() / self.method.n_draws
        (-share).backward()
        weights.clear()
        return share.detach()

    def _contexts(self, batch: Batch, seed: int) -> Batch:
        """All context sets as one batch, set by set."""
        generator = torch.Generator().manual_seed(mixed_seed(seed, _CONTEXT))
        points, sets = cast(int, self.method.n_context), self.method.n_sets
        drawn = [_as_batch(self.context.draw(points, batch, generator)) for _ in range(sets)]
        args, kwargs = tree_map(_joined, *((one.args, one.kwargs) for one in drawn))
        contexts = Batch(args, None, kwargs).to(batch.tensors[0].device)
        if count_samples(contexts) != points * sets:
            raise PosthocUQError(
                f"The context gave {count_samples(contexts)} inputs in place of {points * sets}; a callable is asked "
                f"for n inputs, and gives a tensor (n, ...)."
            )
        return contexts

    def divergence(
        self, contexts: Batch, *draws: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> tuple[FunctionKL, Tensor]:
        """``KL(q(f(X)) || p(f(X)))`` of all context sets, one differentiable number a set, and the index of the
        largest, ``(1,)``.

        Args:
            contexts: all sets, one after the other.
            *draws: ``sigma e`` of the body's parameters; empty where they are certain.
            generator: of the function values by which the divergence of several draws' mixture is estimated.
        """
        method, means, deviations = self.method, self.field.means, draws[0]
        if not deviations or method.body == "sample":
            drawn = {name: means[name] + deviation for name, deviation in deviations.items()}
            outputs, features = self.feature_network({**means, **drawn}, contexts)
            mean = outputs
        else:
            outputs, features, change = linearised_draw(self.feature_network, means, deviations, contexts)
            others = [linearised_draw(self.feature_network, means, each, contexts)[2] for each in draws[1:]]
            mean = outputs + (torch.stack([change, *others]) if others else change)
        independent, zero = method.prior == "independent", method.prior_mean == "zero"
        prior_outputs, prior_features = outputs.detach(), features.detach()
        if not (self._prior_at_means or (independent and zero)):
            with torch.no_grad():
                prior_outputs, prior_features = self.feature_network(self._prior_parameters, contexts)
        if zero:
            prior_outputs = torch.zeros_like(prior_outputs)

        def by_set(values: Tensor) -> Tensor:
            return values.reshape(*values.shape[:-2], method.n_sets, -1, values.shape[-1])

        mean, features, prior_mean = by_set(mean), by_set(features), by_set(prior_outputs)
        normals = None
        if len(draws) > 1:
            shape, kind, device = mean.shape, torch.float64, mean.device
            normals = torch.randn(shape, generator=generator, dtype=kind, device=device)
        weight, *bias = (self.field.log_variances[name].exp() for name in self._last)
        variances = weight.flatten(1), bias[0] if bias else None
        if independent:
            values = last_layer_variances(features, *variances)
            found = marginal_kl(mean, values, prior_mean, method.prior_variance, normals)
        else:
            wide = as_double(by_set(prior_features))
            prior_variances = wide.new_full((1, wide.shape[-1]), 1 / method.precision)
            prior = last_layer_covariance(wide, prior_variances, prior_variances[:, 0] if bias else None)
            found = gaussian_kl(
                mean.transpose(-1, -2),
                last_layer_covariance(features, *variances),
                prior_mean.transpose(1, 2),
                prior,
                relative_function_noise(prior, method.function_noise),
                None if normals is None else normals.transpose(-1, -2),
            )
        if found.raised > 1 and not self._warned:
            self._warned = True
            warn_user(
                f"A covariance at the context points had no Cholesky factor at "
                f"function_noise={method.function_noise:g}, and was given {found.raised} times as much; such a step "
                f"weighs the means less. Take a larger function_noise, or fewer or less alike context points."
            )
        return found, found.total.detach().argmax().reshape(1)

    def outputs(self, batch: Batch, draw: int) -> Tensor:
        weights = self.field.sample(self.generator(0, _VALIDATION, draw))
        return self.feature_network.run(weights, batch)[0]


def _raise_of_shapes(contexts: Batch, batch: Batch, error: RuntimeError) -> None:
    """Raise an error that says so where the context points do not have the shapes of the data."""
    shapes = [[tuple(tensor.shape[1:]) for tensor in each.tensors] for each in (contexts, batch)]
    if shapes[0] != shapes[1]:
        raise PosthocUQError(
            f"The model does not run on the context's inputs, of shapes {shapes[0]} a sample, where the data have "
            f"{shapes[1]} ({str(error).partition(chr(10))[0]}); give context inputs like the data's."
        ) from error


def _as_batch(inputs: Any) -> Batch:
    """The inputs that a context gave: a tensor, a tuple of the model's arguments or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        batch = Batch((), None, {str(k): v for k, v in cast(Mapping[Any, Any], inputs).items()})
    else:
        batch = Batch(cast(tuple[Any, ...], inputs) if isinstance(inputs, tuple) else (inputs,))
    if not batch.tensors:
        raise PosthocUQError(
            f"A context must give a tensor of inputs, a tuple of the model's arguments or a mapping of named ones, not "
            f"a {type(inputs).__name__}."
        )
    return batch


def _joined(first: Any, *others: Any) -> Any:
    return torch.cat([first, *others]) if isinstance(first, Tensor) else first


class FeatureNetwork:
    """A replica of a model that runs with given weights, and also gives the inputs of its last layer.

    Args:
        twin: a replica for this network alone, in eval mode.
        layers: the candidates for its last layer.
        batch: a few samples by which the last layer is found.

    Attributes:
        last: the layer ``W phi + b`` whose outputs are the model's.

    Raises:
        PosthocUQError: no layer's outputs are the model's.
    """

    def __init__(self, twin: nn.Module, layers: Mapping[str, Layer], batch: Batch) -> None:
        self.twin = twin
        self._features: Tensor | None = None
        self.last = self._last_layer(layers, batch)
        self._owner_of(self.last).register_forward_pre_hook(self._catch, with_kwargs=True)

    def _owner_of(self, layer: Layer) -> nn.Module:
        """The module that holds a layer's weight."""
        return self.twin.get_submodule(layer.weight.rpartition(".")[0])

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._features = next(iter((*args, *kwargs.values())))

    def _last_layer(self, layers: Mapping[str, Layer], batch: Batch) -> Layer:
        inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
        handles: list[Any] = []
        for name, layer in layers.items():

            def catch(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
            ) -> None:
                given = next(iter((*args, *kwargs.values())), None)
                if isinstance(given, Tensor):  # packed sequences are none
                    inputs[name].append(given.detach().clone())

            handles.append(self._owner_of(layer).register_forward_pre_hook(catch, with_kwargs=True))
        with torch.no_grad():
            outputs = batch.copied().call(self.twin)
        for handle in handles:
            handle.remove()
        expected = outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(1)
        parameters = dict(self.twin.named_parameters())
        for name, layer in reversed(list(layers.items())):
            if len(inputs[name]) != 1 or layer.groups != 1 or layer.outputs != expected.shape[1]:
                continue
            rows = inputs[name][0].flatten(1)
            weight = parameters[layer.weight].detach().flatten(1)
            if rows.shape != (len(expected), weight.shape[1]):
                continue
            affine = rows @ weight.T
            affine = affine if layer.bias is None else affine + parameters[layer.bias].detach()
            rounding = {torch.float64: 1e-8, torch.float32: 1e-4}.get(affine.dtype, 1e-2)
            if bool((affine - expected).abs().max() <= rounding * affine.abs().max().clamp(min=1e-6)):
                return layer
        raise PosthocUQError(
            f"method='function_space' treats the last layer exactly, and none of {list(layers)[-3:]} gives the model's "
            f"outputs as W phi + b. Let the model return what its last Linear layer gives, and have that layer among "
            f"the chosen ones."
        )

    def run(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs with these weights, in the model's own shape, and features ``(samples, H)``."""
        copy = batch.copied()
        outputs = copy.outputs_of(functional_call(self.twin, dict(weights), copy.args, copy.kwargs))
        features, self._features = self._features, None
        assert features is not None
        return outputs, features.flatten(1)

    def __call__(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs ``(samples, outputs)`` and features ``(samples, H)``."""
        outputs, features = self.run(weights, batch)
        return outputs.reshape(len(features), -1), features


def linearised_draw(
    network: FeatureNetwork,
    parameters: Mapping[str, Tensor],
    deviations: Mapping[str, Tensor],
    batch: Batch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and features at these parameters, and the derivative of the outputs along the deviations, by one
    forward-mode pass; differentiable in parameters and deviations.

    Raises:
        PosthocUQError: some operation of the model has no forward derivative.
    """
    varied = {name: parameters[name] for name in deviations}
    fixed = {name: value for name, value in parameters.items() if name not in deviations}

    def run(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return network({**fixed, **weights}, batch)

    with PlainAttention():
        values, tangents = jvp(
            run,
            (varied,),
            (dict(deviations),),
            needed_by="body='linearized' needs",
            way_out="use body='sample'",
        )
    return values[0], values[1], tangents[0]


# Divergences between Gaussians over function values, and their covariance by a network's last layer: in float64, since
# a covariance of K function values has rank H + 1 at most, and the result depends on its smallest eigenvalues.

_MAX_TRIES = 5  # of the Cholesky factors; the function noise grows tenfold with each


@dataclass(frozen=True)
class FunctionKL:
    """``KL(q || p)`` over the function values at some inputs, in nats.

    Attributes:
        mean_part: ``(m_q - m_p)^T C_p^-1 (m_q - m_p) / 2``, a scalar or one number a set.
        covariance_part: ``(tr C_p^-1 C_q - K + log det C_p - log det C_q) / 2``, likewise. Where q is a mixture, the
            mean part is the mean of its components', and `mixture_information` is taken off here.
        function_noise: the variance that was added to every function value, likewise.
        raised: that variance as a multiple of the one that was asked for.
    """

    mean_part: Tensor
    covariance_part: Tensor
    function_noise: Tensor
    raised: int = 1

    @property
    def total(self) -> Tensor:
        """Both parts."""
        return self.mean_part + self.covariance_part

    def __str__(self) -> str:
        total, mean, covariance, noise = (
            float(part.detach())
            for part in (self.total, self.mean_part, self.covariance_part, self.function_noise)
        )
        return (
            f"KL {total:.4g} nats: mean part {mean:.4g}, covariance part {covariance:.4g}, at a function noise of "
            f"{noise:.2g}"
        )


def last_layer_covariance(
    features: Tensor, weight_variances: Tensor, bias_variances: Tensor | None = None
) -> Tensor:
    """Covariance of the function values by an independent Gaussian over the weights of a last layer ``W phi + b``.

    Values of different outputs are independent, so there is one matrix an output: ``C_q = Phi diag(s_q) Phi^T + b_q 1
    1^T`` (Rudner et al. 2022, eq. 13; one bias is shared by all inputs, so its variance enters every entry).

    Args:
        features: ``(*sets, inputs, H)``.
        weight_variances: ``(outputs, H)``.
        bias_variances: ``(outputs,)``, or None for a layer without bias.

    Returns:
        ``(*sets, outputs, inputs, inputs)`` in float64, differentiable in all of them.
    """
    wide, weights = as_double(features), as_double(weight_variances)
    inputs = wide.shape[-2]
    if len(weights) <= inputs:
        wide = wide.unsqueeze(-3)
        covariance = (wide * weights.unsqueeze(-2)) @ wide.transpose(-1, -2)
    else:  # many outputs: (pairs of inputs, H) is smaller than (outputs, inputs, H), and one product does all outputs
        first, second = torch.tril_indices(inputs, inputs, device=wide.device)
        products = wide.index_select(-2, first) * wide.index_select(-2, second)
        place = torch.empty(inputs, inputs, dtype=torch.long, device=wide.device)
        place[first, second] = place[second, first] = torch.arange(len(first), device=wide.device)
        pairs = weights @ products.transpose(-1, -2)
        covariance = pairs.index_select(-1, place.flatten()).unflatten(-1, (inputs, inputs))
    return covariance if bias_variances is None else covariance + as_double(bias_variances)[:, None, None]


def last_layer_variances(
    features: Tensor, weight_variances: Tensor, bias_variances: Tensor | None = None
) -> Tensor:
    """The diagonals of `last_layer_covariance`: ``(*sets, inputs, outputs)`` in float64, differentiable likewise."""
    variances = as_double(features).square() @ as_double(weight_variances).T
    return variances if bias_variances is None else variances + as_double(bias_variances)


_MIN_RATIO = 1e-12
"""Function values that no weight moves, as those of a black image without biases, are as good as certain: their
divergence is this one's, and has no gradient."""


def mixture_information(whitened: Tensor, normals: Tensor) -> Tensor:
    """What a value of a mixture of R Gaussians with one covariance ``C = L L^T`` says of its component, in nats.

    By this much ``KL(sum_j N(m_j, C) / R || p)`` is less than the mean of the components' divergences. Of the value
    ``m_j + L e_j`` it is ``log R - log sum_i exp(-|u_ij|^2 / 2 - u_ij^T e_j)`` with ``u_ij = L^-1 (m_j - m_i)``; the
    mean over one value of each component has no bias.

    Args:
        whitened: ``L^-1 m_j``, ``(*sets, R, values)``.
        normals: standard normals ``e_j``, of the same shape.

    Returns:
        One number a set, 0 for one component.
    """
    apart = whitened.unsqueeze(-2) - whitened.unsqueeze(-3)  # (*sets, j, i, values)
    exponents = -0.5 * apart.square().sum(-1) - (apart * normals.unsqueeze(-2)).sum(-1)
    return (log(whitened.shape[-2]) - torch.logsumexp(exponents, dim=-1)).mean(-1)


def marginal_kl(
    mean: Tensor,
    variances: Tensor,
    prior_mean: Tensor,
    prior_variance: float,
    normals: Tensor | None = None,
) -> FunctionKL:
    """``sum_kq KL(N(m_kq, v_kq) || N(p_kq, s))`` over inputs and outputs, from the marginals alone.

    Args:
        mean: ``(sets, inputs, outputs)``; of a mixture with its components before.
        variances: ``(sets, inputs, outputs)``, positive.
        prior_mean: likewise.
        prior_variance: s.
        normals: of the shape of a mixture's means; see `mixture_information`.

    Returns:
        One divergence a set, without a function noise.
    """
    difference = as_double(mean) - as_double(prior_mean)
    zero = torch.zeros_like(variances)
    deviations = variances.clamp(min=_MIN_RATIO * prior_variance).sqrt()
    q, p = (Normal(zero, d, validate_args=False) for d in (deviations, prior_variance**0.5))
    covariance_part = kl_divergence(q, p)
    mean_part = 0.5 * (difference.square() / prior_variance).sum(dim=(-2, -1))
    if normals is not None:
        whitened = ((difference - difference[:1]) / deviations).movedim(0, -1).unsqueeze(-1)
        information = mixture_information(whitened, normals.movedim(0, -1).unsqueeze(-1))
        mean_part, covariance_part = mean_part.mean(0), covariance_part - information
    return FunctionKL(
        mean_part,
        covariance_part.sum(dim=(-2, -1)),
        zero[:, 0, 0],
    )


def relative_function_noise(prior_covariance: Tensor, share: float) -> Tensor:
    """A share of the mean prior variance of the function values, one number a set: ``(*sets, 1, 1, 1)``."""
    diagonal = prior_covariance.detach().diagonal(dim1=-2, dim2=-1)
    return share * diagonal.mean(dim=(-2, -1))[..., None, None, None]


def gaussian_kl(
    mean: Tensor,
    covariance: Tensor,
    prior_mean: Tensor,
    prior_covariance: Tensor,
    noise: Tensor | float,
    normals: Tensor | None = None,
) -> FunctionKL:
    """``KL(N(m_q, C_q + e I) || N(m_p, C_p + e I))``, summed over independent outputs.

    Where a matrix has no Cholesky factor at the function noise ``e``, ten times as much is tried, four times at most.
    ``e`` is a variance of the function values: a difference of means that no function of the prior can have costs its
    square times ``1 / (2 e)``.

    Args:
        mean: ``(*sets, outputs, inputs)``; of a mixture with its components before.
        covariance: ``(*sets, outputs, inputs, inputs)``.
        prior_mean: broadcasts to `mean`.
        prior_covariance: broadcasts to `covariance`; one output stands for all.
        noise: ``e``, broadcasts to ``(*sets, 1, 1, 1)``.
        normals: of the shape of a mixture's means; see `mixture_information`.

    Returns:
        One divergence a set.

    Raises:
        NonFiniteError: the matrices have no Cholesky factor after all.
    """
    mean, covariance = as_double(mean), as_double(covariance)
    prior_mean, prior_covariance = as_double(prior_mean), as_double(prior_covariance)
    inputs = covariance.shape[-1]
    eye = torch.eye(inputs, dtype=torch.float64, device=covariance.device)
    noise = torch.as_tensor(noise, dtype=torch.float64, device=covariance.device)
    raised = 1
    for _ in range(_MAX_TRIES):
        root, failed = torch.linalg.cholesky_ex(covariance + noise * eye)
        prior_root, prior_failed = torch.linalg.cholesky_ex(prior_covariance + noise * eye)
        if not bool(failed.any() | prior_failed.any()):
            break
        noise, raised = noise * 10, raised * 10
    else:
        finite = bool(torch.isfinite(covariance).all() & torch.isfinite(prior_covariance).all())
        raise NonFiniteError(
            "The covariance of the function values at the context points "
            + (
                "has no Cholesky factor; give a larger function_noise, fewer or less alike context points or, if the "
                "loss has grown before, smaller learning rates."
                if finite
                else "is not finite; look at the context points and the learning rates."
            )
        )
    whitened = torch.linalg.solve_triangular(prior_root, root, upper=False)
    difference = (prior_mean - mean).unsqueeze(-1)
    shifted = torch.linalg.solve_triangular(
        prior_root.expand(*difference.shape[:-2], inputs, inputs), difference, upper=False
    )
    log_determinants = _log_diagonal(prior_root).expand(covariance.shape[:-2]) - _log_diagonal(root)
    covariance_part = 0.5 * (whitened.square().sum(dim=(-2, -1)) - inputs) + log_determinants
    mean_part = 0.5 * shifted.square().sum(dim=(-2, -1))
    sets = covariance_part.shape[:-1]
    mean_part, covariance_part = mean_part.sum(-1), covariance_part.sum(-1)
    if normals is not None:
        apart = (mean - mean[:1]).unsqueeze(-1)
        whitened = torch.linalg.solve_triangular(root.expand(*mean.shape, inputs), apart, upper=False)
        of_component = whitened.squeeze(-1).movedim(0, -3).flatten(-2)
        information = mixture_information(of_component, normals.movedim(0, -3).flatten(-2))
        mean_part, covariance_part = mean_part.mean(0), covariance_part - information
    return FunctionKL(
        mean_part,
        covariance_part,
        noise.detach().reshape(-1).expand(max(1, sets.numel())).reshape(sets),
        raised,
    )


def _log_diagonal(root: Tensor) -> Tensor:
    return root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
