"""The objective of function-space variational inference (Rudner, Chen, Teh, Gal 2022, "Tractable function-space
variational inference in Bayesian neural networks").

    E_q[log p(y | f(x; theta))] - max_s KL(q(f(X_s)) || p(f(X_s)))

The first term runs the network itself with weights drawn from q. In the second, both distributions are Gaussians of
the network linearised in its weights, at context points ``X_s``. The last layer's weights ``W phi + b`` are integrated
exactly, which gives one covariance an output; all others (the body) are drawn once, which moves the mean by
``J_body (sigma o e)``. The divergence counts ``w`` times for the whole data set, so with ``w / N`` per
sample; the bound has ``w = 1``. Samples with weights of their own count as often in the first term.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.contexts import Context
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.devices import Checks, host_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.function_kl import FunctionKL
from posthoc_uq.inference.function_options import FunctionSpaceOptions
from posthoc_uq.inference.function_prior import FunctionPrior, linearised_draw
from posthoc_uq.inference.mean_field import FeatureNetwork, MeanField
from posthoc_uq.inference.training import Group, Objective, Step
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, weighed_targets
from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import mixed_seed
from posthoc_uq.warned import warn_user

_WEIGHTS, _CONTEXT, _VALIDATION = 1, 2, 3  # streams of random numbers from a step's seed


class FunctionSpaceObjective(Objective):
    """The loss of a step, ``-log p(y | x) + w KL / N`` a sample, and its gradients.

    Args:
        network: of the model.
        field: the means and variances that are trained.
        prior: over functions.
        likelihood: of the targets.
        context: gives the points at which the divergence is taken.
        samples: N.
        options: of the method, with a number for `n_context`, and a number or None for `divergence_weight`.
        frozen: whether the prior's outputs and features are those at the field's means, which then do not move.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        field: MeanField,
        prior: FunctionPrior,
        likelihood: Likelihood,
        context: Context,
        samples: int,
        options: FunctionSpaceOptions,
        frozen: bool,
    ) -> None:
        self._network, self._field, self._prior, self._likelihood = network, field, prior, likelihood
        self._context, self._options, self._frozen = context, options, frozen
        self._weight = (
            cast(float, options.divergence_weight or 1.0) / samples
        )  # the default was put in before
        self._last = network.last.parameter_names
        self._warned = False  # that a step needed more function noise
        self._body = [name for name in field.log_variances if name not in self._last]
        self._log_noise_variance: Tensor | None = None
        if options.learn_noise:
            like, variance = next(iter(field.means.values())), cast(Tensor, likelihood.noise_variance)
            self._log_noise_variance = variance.log().to(like).requires_grad_()

    @property
    def network(self) -> nn.Module:
        return self._network.twin

    def groups(self) -> list[Group]:
        groups = self._field.groups(self._options.lr, self._options.log_variance_lr)
        if self._log_noise_variance is not None:
            groups.append(
                {
                    "params": [self._log_noise_variance],
                    "lr": self._options.log_variance_lr,
                    "name": "log noise",
                }
            )
        return groups

    def tensors(self) -> dict[str, Tensor]:
        noise_variance = {} if self._log_noise_variance is None else {"log noise": self._log_noise_variance}
        return self._field.tensors() | noise_variance

    def likelihood(self) -> Likelihood:
        """The likelihood at the present noise variance."""
        if self._log_noise_variance is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise_variance.detach().exp()))

    def _log_prob(self, outputs: Tensor, targets: Tensor, weights: SampleWeights | None = None) -> Tensor:
        likelihood = self._likelihood
        if self._log_noise_variance is not None:
            likelihood = likelihood.with_noise(self._log_noise_variance.exp())
        if weights is None:
            return likelihood.log_prob(outputs, targets)
        return weights.log_prob(likelihood, outputs, targets)

    def _generator(self, *words: int) -> torch.Generator:
        device = next(iter(self._field.means.values())).device
        return torch.Generator(device).manual_seed(mixed_seed(*words))

    def backward(self, batch: Batch, step: Step, checks: Checks) -> dict[str, Tensor]:
        seed = step.seed
        generator, shares = self._generator(seed, _WEIGHTS), list[Tensor]()
        deviations: dict[str, Tensor] = {}
        for _ in range(self._options.n_draws):  # one graph at a time: each is freed before the next
            deviations = self._field.deviations(generator)
            shares.append(self._fit(batch, deviations, checks if not shares else None))
        log_likelihood = torch.stack(shares).sum()
        # The last draw of the body serves both terms: each stays unbiased, and nothing is drawn twice.
        body = {name: deviations[name].requires_grad_() for name in self._body}
        del deviations
        self._field.on_backward(body, mean=False)
        contexts = self._contexts(batch, seed)
        try:
            divergences, largest = self.divergence(contexts, body)
        except RuntimeError as error:
            _raise_of_shapes(contexts, batch, error)
            raise
        # by index_select, which reads the index on the device; plain indexing would bring it to the host
        total, mean_part, covariance_part = (
            part.index_select(0, largest).squeeze(0)
            for part in (divergences.total, divergences.mean_part, divergences.covariance_part)
        )
        (total * self._weight).backward()
        body.clear()
        divergence = total.detach() * self._weight
        return {
            "loss": divergence - log_likelihood.to(divergence),
            "log likelihood": log_likelihood,
            "KL mean part": mean_part.detach(),
            "KL covariance part": covariance_part.detach(),
        }

    def _fit(self, batch: Batch, deviations: Mapping[str, Tensor], checks: Checks | None) -> Tensor:
        """One draw's share of the mean log likelihood; adds its gradients."""
        targets = cast(Tensor, batch.targets)
        weights = {
            n: (mean.detach() + deviations[n] if n in deviations else mean.detach()).requires_grad_()
            for n, mean in self._field.means.items()
        }
        self._field.on_backward(weights, deviations, mean=True)
        outputs = self._network.outputs(weights, batch)
        found = weighed_targets(self._likelihood, outputs.detach(), targets, batch.weights)
        if checks is not None:
            self._check(outputs.detach(), found[0], checks)
        share = self._log_prob(outputs, *found).mean() / self._options.n_draws
        (-share).backward()
        weights.clear()
        return share.detach()

    def _check(self, outputs: Tensor, targets: Tensor, checks: Checks) -> None:
        fault = self._likelihood.fault(outputs, targets)
        if fault is not None:
            checks.later(
                fault, lambda faulty: self._likelihood.check(outputs, targets) if bool(faulty) else None
            )

    def _contexts(self, batch: Batch, seed: int) -> Batch:
        """All context sets as one batch, set by set."""
        options, generator = self._options, torch.Generator().manual_seed(mixed_seed(seed, _CONTEXT))
        like = batch.tensors()[0]
        points = cast(int, options.n_context)  # the default was put in before
        parts = [self._context.draw(points, batch, generator) for _ in range(options.n_sets)]
        contexts = _joined([_as_batch(part, like.device) for part in parts])
        wanted = points * options.n_sets
        if count_samples(contexts) != wanted:
            raise PosthocUQError(
                f"The context gave {count_samples(contexts)} inputs in place of {wanted}; a callable is asked for n "
                f"inputs, and gives a tensor (n, ...)."
            )
        return contexts

    def divergence(self, contexts: Batch, deviations: Mapping[str, Tensor]) -> tuple[FunctionKL, Tensor]:
        """The divergences of all context sets, one differentiable number a set, and the index of the largest, ``(1,)``.

        Args:
            contexts: all sets, one after the other.
            deviations: ``sigma e`` of the body's parameters; empty where they are certain.
        """
        outputs, features, moved = self._draw(contexts, deviations)
        at_means = (outputs.detach(), features.detach()) if self._frozen else None
        sets = self._options.n_sets

        def by_set(values: Tensor) -> Tensor:
            return values.reshape(sets, -1, values.shape[1])

        weight, *bias = (self._field.log_variances[name].exp() for name in self._last)
        divergences = self._prior.divergence(
            contexts,
            by_set(outputs + moved),
            by_set(features),
            (weight.flatten(1), bias[0] if bias else None),
            self._normals(deviations),
            at_means,
        )
        self._warn_of_more_function_noise(divergences.raised)
        return divergences, divergences.total.detach().argmax().reshape(1)

    def _warn_of_more_function_noise(self, factor: int) -> None:
        """Once in a training: a step needed more function noise than was set."""
        if factor > 1 and not self._warned:
            self._warned = True
            warn_user(
                f"A covariance at the context points had no Cholesky factor at "
                f"function_noise={self._options.noise_share:g}, and was given {factor} times as much; such a "
                f"step weighs the means less. A larger function_noise, or fewer or less alike context points, makes "
                f"all steps alike."
            )

    @torch.no_grad()
    def _normals(self, deviations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The standard normals behind the deviations, for a prior whose body has a variance; else empty."""
        if not self._options.prior_body_variance:
            return {}
        logs = self._field.log_variances
        return {name: deviation / (0.5 * logs[name]).exp() for name, deviation in deviations.items()}

    def _draw(self, contexts: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and features at the means, and how a draw of the body moves the outputs. With ``body="sample"``
        outputs and features are those of the drawn body, and nothing is left to move.
        """
        means = self._field.means
        if not deviations or self._options.body == "sample":
            drawn = {name: means[name] + deviation for name, deviation in deviations.items()}
            outputs, features = self._network({**means, **drawn}, contexts)
            return outputs, features, torch.zeros_like(outputs)
        return linearised_draw(self._network, means, deviations, contexts)

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        log_probabilities: list[Tensor] = []
        for draw in range(draws):
            weights = self._field.sample(self._generator(0, _VALIDATION, draw))
            outputs = self._network.outputs(weights, batch)
            if draw == 0:
                self._likelihood.check(outputs, batch.targets)
            log_probabilities.append(self._log_prob(outputs, cast(Tensor, batch.targets)))
        return torch.logsumexp(torch.stack(log_probabilities), dim=0) - log(draws)


def _raise_of_shapes(contexts: Batch, batch: Batch, error: RuntimeError) -> None:
    """Raise an error that says so where the context points do not have the shapes of the data."""
    shapes = [[tuple(tensor.shape[1:]) for tensor in each.tensors()] for each in (contexts, batch)]
    if shapes[0] != shapes[1]:
        raise PosthocUQError(
            f"The model does not run on the context's inputs, of shapes {shapes[0]} a sample, where the data have "
            f"{shapes[1]} ({str(error).partition(chr(10))[0]}); give context inputs like the data's."
        ) from error


def _as_batch(inputs: Any, device: torch.device) -> Batch:
    """The inputs that a context gave, as a batch on the device."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(inputs, Tensor):
        return Batch((move(inputs),))
    if isinstance(inputs, Mapping):
        return Batch((), None, {str(k): move(v) for k, v in cast(Mapping[str, Any], inputs).items()})
    if isinstance(inputs, tuple):
        return Batch(tuple(move(v) for v in cast(tuple[Any, ...], inputs)))
    raise PosthocUQError(
        f"A context must give a tensor of inputs, a tuple of the model's arguments or a mapping of named ones, not a "
        f"{type(inputs).__name__}."
    )


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]

    def joined(values: list[Any]) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    args = tuple(joined(list(values)) for values in zip(*(batch.args for batch in batches), strict=True))
    named = {name: joined([batch.kwargs[name] for batch in batches]) for name in batches[0].kwargs}
    return Batch(args, None, named)
