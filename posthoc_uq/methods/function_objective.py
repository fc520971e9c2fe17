"""The objective of variational inference over functions: its options, priors, divergence and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import jvp
from posthoc_uq.core.options import Count, LogVariance, NotNegative, Positive
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, weighed_targets
from posthoc_uq.methods.contexts import Context
from posthoc_uq.methods.mean_field import FeatureNetwork, MeanField
from posthoc_uq.methods.training import Group, Objective, Step, TrainingOptions
from posthoc_uq.posteriors.posterior import Posterior

# The options of a training over functions, checked before any work is done.

PriorMean = Literal["zero", "pretrained", "random_init"]
Prior = Literal["features", "independent"]
Body = Literal["linearized", "sample", "certain"]

FUNCTION_NOISE = 1e-6  # where none is given
VALUE_VARIANCE = 10.0  # of a function value in an independent prior, where none is given
BODY_LOG_VARIANCE = -20.0


@dataclass(frozen=True, kw_only=True)
class FunctionSpaceOptions(TrainingOptions):
    """The options of a training over functions; `posthoc_uq.FunctionSpace` is the method.

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
        initial: starting variances: ``"constant"``, those of ``"diag"``, ``"kfac"``, ``"efb"`` or ``"inf"`` at the
            prior precision of the evidence, or those of a fitted posterior. By default ``"constant"``, and ``"inf"``
            with ``epochs=0``.
        learn_noise: train the noise variance of a regression, from its value at the start.
        initial_log_variance: where the variances of the last layer begin.
        initial_body_log_variance: where all others begin.
        prior: over functions: ``"features"``, what a prior over the last layer's weights says, or ``"independent"``,
            every function value by itself.
        prior_variance: of a function value in the independent prior; 10 by default.
        divergence_weight: by which the divergence is multiplied, where 1 is the evidence lower bound; ``"minibatch"``
            divides it by the size of a batch (of the loader's first one) in place of the number of samples. By default
            1 with a prior by features, and ``"minibatch"`` with an independent one.
        prior_mean: of the functions: ``"zero"``, ``"pretrained"`` or ``"random_init"``.
        prior_body_variance: prior variance of all weights but the last layer's.
        function_noise: a variance added to all function values, as a share of their mean variance in the prior by
            features; 1e-6 by default.
        body: how a draw of all layers but the last enters the divergence: ``"linearized"``, or ``"sample"`` to run the
            network with it; or ``"certain"``: these layers are trained and have no variances.
    """

    context: Any = None
    n_context: Count | None = None
    n_sets: Count = 1
    n_draws: Count = 1
    train_mean: bool = True
    initial: str | Posterior | None = None
    learn_noise: bool = False
    initial_log_variance: LogVariance = -5.0
    initial_body_log_variance: LogVariance = BODY_LOG_VARIANCE
    prior: Prior = "features"
    prior_variance: Positive | None = None
    divergence_weight: Positive | Literal["minibatch"] | None = None
    prior_mean: PriorMean = "zero"
    prior_body_variance: NotNegative = 0.0
    function_noise: Positive | None = None
    body: Body = "linearized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior == "features" and self.prior_variance is not None:
            raise PosthocUQError(
                "prior_variance is of prior='independent'; a prior by features has prior_precision."
            )
        if self.prior == "independent" and self.function_noise is not None:
            raise PosthocUQError(
                "function_noise is of prior='features': with prior='independent' there is no covariance to add it to."
            )
        if self.prior == "independent" and self.prior_body_variance:
            raise PosthocUQError(
                "prior_body_variance is of prior='features': prior='independent' has prior_variance alone."
            )
        if self.body != "certain":
            return
        if self.prior_body_variance or self.initial_body_log_variance != BODY_LOG_VARIANCE:
            raise PosthocUQError(
                "body='certain' leaves all layers but the last without variances, so that prior_body_variance and "
                "initial_body_log_variance have no effect; leave them out."
            )
        if not self.train_mean:
            raise PosthocUQError(
                "body='certain' with train_mean=False trains nothing but the last layer's variances; choose "
                "layers='last'."
            )

    @property
    def noise_share(self) -> float:
        """The function noise that is meant."""
        return FUNCTION_NOISE if self.function_noise is None else self.function_noise

    @property
    def value_variance(self) -> float:
        """The variance of a function value in an independent prior that is meant."""
        return VALUE_VARIANCE if self.prior_variance is None else self.prior_variance


# The divergence between Gaussians over function values, and their covariance by a network's last layer.
#
# All in float64: a covariance of K function values has rank H + 1 at most, and the result depends on its
# smallest eigenvalues.

_TRIES = 5  # of the Cholesky factors; the function noise grows tenfold with each


@dataclass(frozen=True)
class FunctionKL:
    """``KL(q || p)`` over the function values at some inputs, in nats.

    Attributes:
        mean_part: ``(m_q - m_p)^T C_p^-1 (m_q - m_p) / 2``, a scalar or one number a set.
        covariance_part: ``(tr C_p^-1 C_q - K + log det C_p - log det C_q) / 2``, likewise.
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


_LEAST_RATIO = 1e-12
"""Function values that no weight moves, as those of a black image without biases, are as good as certain: their
divergence is this one's, and has no gradient."""


def marginal_kl(mean: Tensor, variances: Tensor, prior_mean: Tensor, prior_variance: float) -> FunctionKL:
    """``sum_kq KL(N(m_kq, v_kq) || N(p_kq, s))`` over inputs and outputs, from the marginals alone:

        KL = ((m - p)^2 / s + v / s - 1 - log(v / s)) / 2

    Args:
        mean: ``(sets, inputs, outputs)``.
        variances: likewise, positive.
        prior_mean: likewise.
        prior_variance: s.

    Returns:
        One divergence a set, without a function noise.
    """
    difference = as_double(mean) - as_double(prior_mean)
    ratio = (variances / prior_variance).clamp(min=_LEAST_RATIO)
    mean_part = 0.5 * (difference.square() / prior_variance).sum(dim=(-2, -1))
    covariance_part = 0.5 * (ratio - 1 - ratio.log()).sum(dim=(-2, -1))
    return FunctionKL(mean_part, covariance_part, torch.zeros_like(mean_part.detach()))


def relative_function_noise(prior_covariance: Tensor, share: float) -> Tensor:
    """A share of the mean prior variance of the function values, one number a set: ``(*sets, 1, 1, 1)``."""
    diagonal = prior_covariance.detach().diagonal(dim1=-2, dim2=-1)
    return share * diagonal.mean(dim=(-2, -1))[..., None, None, None]


def gaussian_kl(
    mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, noise: Tensor | float
) -> FunctionKL:
    """``KL(N(m_q, C_q + e I) || N(m_p, C_p + e I))``, summed over independent outputs.

    Where a matrix has no Cholesky factor at the function noise ``e``, ten times as much is tried, four times at most.
    ``e`` is a variance of the function values: a difference of means that no function of the prior can have costs its
    square times ``1 / (2 e)``.

    Args:
        mean: ``(*sets, outputs, inputs)``.
        covariance: ``(*sets, outputs, inputs, inputs)``.
        prior_mean: broadcasts to `mean`.
        prior_covariance: broadcasts to `covariance`; one output stands for all.
        noise: ``e``, broadcasts to ``(*sets, 1, 1, 1)``.

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
    for _ in range(_TRIES):
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
    return FunctionKL(
        mean_part.sum(-1),
        covariance_part.sum(-1),
        noise.detach().reshape(-1).expand(max(1, sets.numel())).reshape(sets),
        raised,
    )


def _log_diagonal(root: Tensor) -> Tensor:
    return root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


# Priors over functions, and how far a variational last layer is from each at some inputs.
#
# One prior is what a prior over the weights says of functions, linearised at some parameters: function values
# at inputs with alike features go together. The other takes every function value as independent.

Moments = tuple[Tensor, Tensor]
"""Means ``(inputs, outputs)`` and features ``(inputs, H)``."""


class FunctionPrior:
    """The Gaussian over functions that a prior over the weights gives, linearised at its own parameters.

    Args:
        network: runs with any parameters.
        parameters: at which it is linearised.
        mean: ``"zero"``; anything else takes the outputs at these parameters.
        precision: of the last layer's weights.
        body_variance: of all other weights; 0 leaves them certain.
        function_noise: a variance that is added to every function value of either side, as a share of the prior's.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        parameters: Mapping[str, Tensor],
        mean: str,
        precision: float,
        body_variance: float = 0.0,
        function_noise: float = 1e-6,
    ) -> None:
        self._network, self._parameters = network, dict(parameters)
        self._mean, self._variance, self._body_variance = mean, 1.0 / precision, body_variance
        self._function_noise = function_noise

    @torch.no_grad()
    def moments(
        self,
        batch: Batch,
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> Moments:
        """Means ``(inputs, outputs)`` and features ``(inputs, H)``.

        Args:
            normals: standard normals for the body's parameters, where the body has a variance.
            at_hand: outputs and features at the prior's parameters, where they are known already.
        """
        if self._body_variance and normals:
            scaled = {name: value * self._body_variance**0.5 for name, value in normals.items()}
            outputs, features, moved = linearised_draw(self._network, self._parameters, scaled, batch)
        else:
            outputs, features = at_hand or self._network(self._parameters, batch)
            moved = torch.zeros_like(outputs)
        return (moved if self._mean == "zero" else outputs + moved), features

    def covariance(self, features: Tensor) -> Tensor:
        """``(*sets, 1, inputs, inputs)``: the same for every output."""
        layer, wide = self._network.last, as_double(features)
        variances = wide.new_full((1, wide.shape[-1]), self._variance)
        return last_layer_covariance(wide, variances, None if layer.bias is None else variances[:, 0])

    def divergence(
        self,
        batch: Batch,
        mean: Tensor,
        features: Tensor,
        variances: tuple[Tensor, Tensor | None],
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> FunctionKL:
        """``KL(q(f(X)) || p(f(X)))`` of every set of inputs, differentiable in all that is q's.

        Args:
            batch: the inputs, set by set.
            mean: of the function values by q, ``(sets, inputs, outputs)``.
            features: that q's last layer sees, ``(sets, inputs, H)``.
            variances: of that layer's weights ``(outputs, H)``, and of its biases if it has any.
            normals: see `moments`.
            at_hand: see `moments`.
        """
        prior_mean, prior_features = self.moments(batch, normals, at_hand)
        prior_covariance = self.covariance(_by_set(prior_features, mean))
        return gaussian_kl(
            mean.transpose(1, 2),
            last_layer_covariance(features, *variances),
            _by_set(prior_mean, mean).transpose(1, 2),
            prior_covariance,
            relative_function_noise(prior_covariance, self._function_noise),
        )


class IndependentPrior(FunctionPrior):
    """Every function value is Gaussian with one variance, independent of all others (the objective of the published
    FashionMNIST figures). Only the marginal variances of q enter, so no Cholesky factor is needed, and any number of
    inputs may be taken.

    Args:
        network: runs with any parameters.
        parameters: at which the outputs are taken, for a mean that is not zero.
        mean: ``"zero"``; anything else takes the outputs at these parameters.
        variance: of a function value.
    """

    def __init__(
        self, network: FeatureNetwork, parameters: Mapping[str, Tensor], mean: str, variance: float
    ) -> None:
        super().__init__(network, parameters, mean, 1.0)
        self._value_variance = variance

    def divergence(
        self,
        batch: Batch,
        mean: Tensor,
        features: Tensor,
        variances: tuple[Tensor, Tensor | None],
        normals: Mapping[str, Tensor] | None = None,
        at_hand: Moments | None = None,
    ) -> FunctionKL:
        if self._mean == "zero":  # the features are not asked for, so the network need not run
            prior_mean = torch.zeros_like(mean)
        else:
            prior_mean = _by_set(self.moments(batch, None, at_hand)[0], mean)
        return marginal_kl(mean, last_layer_variances(features, *variances), prior_mean, self._value_variance)


def _by_set(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(len(like), -1, values.shape[1])


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
    moved = {name: parameters[name] for name in deviations}
    fixed = {name: value for name, value in parameters.items() if name not in deviations}

    def run(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return network({**fixed, **weights}, batch)

    try:
        with PlainAttention():
            values, tangents = cast(
                tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], jvp(run, (moved,), (dict(deviations),))
            )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not any(word in reason for word in ("forward AD", "forward mode", "autograd.Function")):
            raise
        raise PosthocUQError(
            f"body='linearized' needs forward derivatives, and the model has an operation without one ({reason}); use "
            f"body='sample'."
        ) from error
    return values[0], values[1], tangents[0]


# The objective of function-space variational inference (Rudner, Chen, Teh, Gal 2022, "Tractable
# function-space variational inference in Bayesian neural networks").
#
#     E_q[log p(y | f(x; theta))] - max_s KL(q(f(X_s)) || p(f(X_s)))
#
# The first term runs the network itself with weights drawn from q. In the second, both distributions are
# Gaussians of the network linearised in its weights, at context points ``X_s``. The last layer's weights ``W
# phi + b`` are integrated exactly, which gives one covariance an output; all others (the body) are drawn
# once, which moves the mean by ``J_body (sigma o e)``. The divergence counts ``w`` times for the whole data
# set, so with ``w / N`` per sample; the bound has ``w = 1``. Samples with weights of their own count as often
# in the first term.

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
        noise_like = next(iter(field.means.values())) if options.learn_noise else None
        super().__init__(likelihood, samples, noise_like)
        self.feature_network, self.field, self._prior = network, field, prior
        self.context, self.options, self._frozen = context, options, frozen
        self._weight = (
            cast(float, options.divergence_weight or 1.0) / samples
        )  # the default was put in before
        self._last = network.last.parameter_names
        self._warned = False  # that a step needed more function noise
        self._body = [name for name in field.log_variances if name not in self._last]

    @property
    def network(self) -> nn.Module:
        return self.feature_network.twin

    def groups(self) -> list[Group]:
        groups = self.field.groups(self.options.lr, self.options.log_variance_lr)
        rate = self.options.log_variance_lr
        return groups + [{"params": [t], "lr": rate, "name": name} for name, t in self.noise().items()]

    def tensors(self) -> dict[str, Tensor]:
        return self.field.tensors() | self.noise()

    def trained_mean(self) -> dict[str, Tensor] | None:
        return self.field.trained_mean()

    def _log_prob(self, outputs: Tensor, targets: Tensor, weights: SampleWeights | None = None) -> Tensor:
        likelihood = self.likelihood_in_training()
        if weights is None:
            return likelihood.log_prob(outputs, targets)
        return weights.log_prob(likelihood, outputs, targets)

    def _generator(self, *words: int) -> torch.Generator:
        device = next(iter(self.field.means.values())).device
        return torch.Generator(device).manual_seed(mixed_seed(*words))

    def backward(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        seed = step.seed
        generator, shares = self._generator(seed, _WEIGHTS), list[Tensor]()
        deviations: dict[str, Tensor] = {}
        for _ in range(self.options.n_draws):  # one graph at a time: each is freed before the next
            deviations = self.field.deviations(generator)
            shares.append(self._fit(batch, deviations, checks if not shares else None))
        log_likelihood = torch.stack(shares).sum()
        # The last draw of the body serves both terms: each stays unbiased, and nothing is drawn twice.
        body = {name: deviations[name].requires_grad_() for name in self._body}
        del deviations
        self.field.on_backward(body, mean=False)
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

    def _fit(self, batch: Batch, deviations: Mapping[str, Tensor], checks: DeferredChecks | None) -> Tensor:
        """One draw's share of the mean log likelihood; adds its gradients."""
        targets = cast(Tensor, batch.targets)
        weights = {
            n: (mean.detach() + deviations[n] if n in deviations else mean.detach()).requires_grad_()
            for n, mean in self.field.means.items()
        }
        self.field.on_backward(weights, deviations, mean=True)
        outputs = self.feature_network.outputs(weights, batch)
        found = weighed_targets(self._likelihood, outputs.detach(), targets, batch.weights)
        if checks is not None:
            self.check_targets(outputs.detach(), found[0], checks)
        share = self._log_prob(outputs, *found).mean() / self.options.n_draws
        (-share).backward()
        weights.clear()
        return share.detach()

    def _contexts(self, batch: Batch, seed: int) -> Batch:
        """All context sets as one batch, set by set."""
        options, generator = self.options, torch.Generator().manual_seed(mixed_seed(seed, _CONTEXT))
        like = batch.tensors()[0]
        points = cast(int, options.n_context)  # the default was put in before
        parts = [self.context.draw(points, batch, generator) for _ in range(options.n_sets)]
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
        sets = self.options.n_sets

        def by_set(values: Tensor) -> Tensor:
            return values.reshape(sets, -1, values.shape[1])

        weight, *bias = (self.field.log_variances[name].exp() for name in self._last)
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
                f"function_noise={self.options.noise_share:g}, and was given {factor} times as much; such a "
                f"step weighs the means less. A larger function_noise, or fewer or less alike context points, makes "
                f"all steps alike."
            )

    @torch.no_grad()
    def _normals(self, deviations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The standard normals behind the deviations, for a prior whose body has a variance; else empty."""
        if not self.options.prior_body_variance:
            return {}
        logs = self.field.log_variances
        return {name: deviation / (0.5 * logs[name]).exp() for name, deviation in deviations.items()}

    def _draw(self, contexts: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and features at the means, and how a draw of the body moves the outputs. With ``body="sample"``
        outputs and features are those of the drawn body, and nothing is left to move.
        """
        means = self.field.means
        if not deviations or self.options.body == "sample":
            drawn = {name: means[name] + deviation for name, deviation in deviations.items()}
            outputs, features = self.feature_network({**means, **drawn}, contexts)
            return outputs, features, torch.zeros_like(outputs)
        return linearised_draw(self.feature_network, means, deviations, contexts)

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        log_probabilities: list[Tensor] = []
        for draw in range(draws):
            weights = self.field.sample(self._generator(0, _VALIDATION, draw))
            outputs = self.feature_network.outputs(weights, batch)
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
