"""The objective of function-space variational inference (Rudner, Chen, Teh, Gal 2022, "Tractable function-space
variational inference in Bayesian neural networks").

    E_q[log p(y | f(x; theta))] - max_s KL(q(f(X_s)) || p(f(X_s)))

The first term takes weights drawn from q through the network as it is. In the second both are Gaussians of the network
linearised in its weights, at context points ``X_s``: with the last layer's weights ``W phi + b`` integrated exactly,
which gives one covariance an output, and one draw of all others, which moves the mean by ``J_body (sigma o e)``. The
divergence enters ``w`` times a data set, so ``w / N`` times per sample; the bound is at ``w = 1``.
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
from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import mixed_seed
from posthoc_uq.warned import warn_user

_WEIGHTS, _CONTEXT, _VALIDATION = 1, 2, 3  # streams of a step's seed


class FunctionSpaceObjective(Objective):
    """The loss of a step, ``-log p(y | x) + w KL / N`` a sample, and its gradients.

    Args:
        network: of the model.
        field: what is trained.
        prior: over functions.
        likelihood: of the targets.
        context: where the divergence is taken.
        samples: N.
        options: of the method, with a number for `n_context`, and none or a number for `divergence_weight`.
        frozen: whether the prior's outputs and features are those of the field's own means, which do not move.
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
        self._weight = cast(float, options.divergence_weight or 1.0) / samples  # a number by now
        self._last = network.last.parameter_names
        self._raised = False  # whether more noise was needed already
        self._body = [name for name in field.log_variances if name not in self._last]
        self._log_noise: Tensor | None = None
        if options.learn_noise:
            like, noise = next(iter(field.means.values())), cast(Tensor, likelihood.noise_variance)
            self._log_noise = noise.log().to(like).requires_grad_()

    @property
    def network(self) -> nn.Module:
        return self._network.twin

    def groups(self) -> list[Group]:
        found = self._field.groups(self._options.lr, self._options.log_variance_lr)
        if self._log_noise is not None:
            found.append(
                {"params": [self._log_noise], "lr": self._options.log_variance_lr, "name": "log noise"}
            )
        return found

    def tensors(self) -> dict[str, Tensor]:
        noise = {} if self._log_noise is None else {"log noise": self._log_noise}
        return self._field.tensors() | noise

    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise.detach().exp()))

    def _log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._log_noise is None:
            return self._likelihood.log_prob(outputs, targets)
        return self._likelihood.with_noise(self._log_noise.exp()).log_prob(outputs, targets)

    def _generator(self, *words: int) -> torch.Generator:
        device = next(iter(self._field.means.values())).device
        return torch.Generator(device).manual_seed(mixed_seed(*words))

    def backward(self, batch: Batch, step: Step, checks: Checks) -> dict[str, Tensor]:
        seed = step.seed
        generator, fits = self._generator(seed, _WEIGHTS), list[Tensor]()
        deviations: dict[str, Tensor] = {}
        for _ in range(self._options.n_draws):  # each with a graph of its own, which is freed before the next
            deviations = self._field.deviations(generator)
            fits.append(self._fit(batch, deviations, checks if not fits else None))
        fit = torch.stack(fits).sum()
        # The body's deviation serves again: either term is right on average, and nothing is drawn twice.
        body = {name: deviations[name].requires_grad_() for name in self._body}
        del deviations
        self._field.on_backward(body, mean=False)
        contexts = self._contexts(batch, seed)
        try:
            found, chosen = self.divergence(contexts, body)
        except RuntimeError as error:
            _raise_of_shapes(contexts, batch, error)
            raise
        # by index_select, which takes the place from the device: an index would have to come to the host
        total, mean_part, covariance_part = (
            part.index_select(0, chosen).squeeze(0)
            for part in (found.total, found.mean_part, found.covariance_part)
        )
        (total * self._weight).backward()
        body.clear()
        divergence = total.detach() * self._weight
        return {
            "loss": divergence - fit.to(divergence),
            "log likelihood": fit,
            "KL mean part": mean_part.detach(),
            "KL covariance part": covariance_part.detach(),
        }

    def _fit(self, batch: Batch, deviations: Mapping[str, Tensor], checks: Checks | None) -> Tensor:
        """One draw's share of the mean log likelihood, whose gradients are added."""
        targets = cast(Tensor, batch.targets)
        weights = {
            n: (mean.detach() + deviations[n] if n in deviations else mean.detach()).requires_grad_()
            for n, mean in self._field.means.items()
        }
        self._field.on_backward(weights, deviations, mean=True)
        outputs = self._network.outputs(weights, batch)
        if checks is not None:
            self._check(outputs.detach(), targets, checks)
        own = self._log_prob(outputs, targets).mean() / self._options.n_draws
        (-own).backward()
        weights.clear()
        return own.detach()

    def _check(self, outputs: Tensor, targets: Tensor, checks: Checks) -> None:
        fault = self._likelihood.fault(outputs, targets)
        if fault is not None:
            checks.later(
                fault, lambda found: self._likelihood.check(outputs, targets) if bool(found) else None
            )

    def _contexts(self, batch: Batch, seed: int) -> Batch:
        """All context sets as one batch, set by set."""
        options, generator = self._options, torch.Generator().manual_seed(mixed_seed(seed, _CONTEXT))
        like = batch.tensors()[0]
        points = cast(int, options.n_context)  # a number by now
        parts = [self._context.draw(points, batch, generator) for _ in range(options.n_sets)]
        found = _joined([_as_batch(part, like.device) for part in parts])
        wanted = points * options.n_sets
        if count_samples(found) != wanted:
            raise PosthocUQError(
                f"The context gave {count_samples(found)} inputs in place of {wanted}; a callable is asked for n "
                f"inputs, and gives a tensor (n, ...)."
            )
        return found

    def divergence(self, contexts: Batch, deviations: Mapping[str, Tensor]) -> tuple[FunctionKL, Tensor]:
        """The divergences of all context sets, one number a set and differentiable, and the place of the largest,
        ``(1,)``.

        Args:
            contexts: all sets, one after the other.
            deviations: ``sigma e`` of the body's parameters; empty where they are certain.
        """
        outputs, features, moved = self._draw(contexts, deviations)
        known = (outputs.detach(), features.detach()) if self._frozen else None
        sets = self._options.n_sets

        def by_set(values: Tensor) -> Tensor:
            return values.reshape(sets, -1, values.shape[1])

        weight, *bias = (self._field.log_variances[name].exp() for name in self._last)
        found = self._prior.divergence(
            contexts,
            by_set(outputs + moved),
            by_set(features),
            (weight.flatten(1), bias[0] if bias else None),
            self._normals(deviations),
            known,
        )
        self._warn_of_noise(found.raised)
        return found, found.total.detach().argmax().reshape(1)

    def _warn_of_noise(self, factor: int) -> None:
        """Once in a training."""
        if factor > 1 and not self._raised:
            self._raised = True
            warn_user(
                f"A covariance at the context points had no Cholesky factor at "
                f"function_noise={self._options.noise_share:g}, and was given {factor} times as much; such a "
                f"step weighs the means less. A larger function_noise, or fewer or less alike context points, makes "
                f"all steps alike."
            )

    @torch.no_grad()
    def _normals(self, deviations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The standard normals behind the deviations, for a prior whose body is not certain."""
        if not self._options.prior_body_variance:
            return {}
        logs = self._field.log_variances
        return {name: deviation / (0.5 * logs[name]).exp() for name, deviation in deviations.items()}

    def _draw(self, contexts: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and features at the means (of a body drawn, for ``body="sample"``), and how a draw of the body moves
        the outputs.
        """
        means = self._field.means
        if not deviations or self._options.body == "sample":
            drawn = {name: means[name] + deviation for name, deviation in deviations.items()}
            outputs, features = self._network({**means, **drawn}, contexts)
            return outputs, features, torch.zeros_like(outputs)
        return linearised_draw(self._network, means, deviations, contexts)

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        found: list[Tensor] = []
        for draw in range(draws):
            weights = self._field.sample(self._generator(0, _VALIDATION, draw))
            outputs = self._network.outputs(weights, batch)
            if draw == 0:
                self._likelihood.check(outputs, batch.targets)
            found.append(self._log_prob(outputs, cast(Tensor, batch.targets)))
        return torch.logsumexp(torch.stack(found), dim=0) - log(draws)


def _raise_of_shapes(contexts: Batch, batch: Batch, error: RuntimeError) -> None:
    """An error in words, where the model failed on context points that are not shaped like the data."""
    shapes = [[tuple(tensor.shape[1:]) for tensor in each.tensors()] for each in (contexts, batch)]
    if shapes[0] != shapes[1]:
        raise PosthocUQError(
            f"The model does not run on the context's inputs, of shapes {shapes[0]} a sample, where the data have "
            f"{shapes[1]} ({str(error).partition(chr(10))[0]}); give context inputs like the data's."
        ) from error


def _as_batch(inputs: Any, device: torch.device) -> Batch:
    """What a context gave, as a batch on the device."""

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

    def together(values: list[Any]) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    args = tuple(together(list(values)) for values in zip(*(batch.args for batch in batches), strict=True))
    named = {name: together([batch.kwargs[name] for batch in batches]) for name in batches[0].kwargs}
    return Batch(args, None, named)
