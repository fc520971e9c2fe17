"""`LatentBinary`: a sparse network whose weights are on or off, with normalising flows.

After "Sparsifying Bayesian neural networks with latent binary variables and normalizing flows". A weight is on or off,
``g ~ Bernoulli(a)``, and Gaussian where it is on, ``s ~ N(mu z, v)``. Without a flow ``z = 1``. With one ``z`` is
random, with an entry for every input of a linear layer and for every output channel of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn
from torch.func import functional_call

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double, widest_dtype
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import NotNegative, Positive, Unit
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.layers.calls import (
    MIN_VARIANCE,
    AffineCall,
    CallReplacer,
    WeightMoments,
    drawn_outputs,
    normal,
)
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.settings import ONE_PRIOR, LayerPriors
from posthoc_uq.trained.mean_field import gaussian_divergence
from posthoc_uq.trained.training import Group, Objective, Step, Training, check_trainable
from posthoc_uq.trained.variational import (
    MAX_STEPS,
    MAX_UNITS,
    Flow,
    FlowForm,
    LatentBinaryBlock,
    RandomScale,
    log_normal,
)

_HIGH_LOGIT = 5.0  # where the logits of inclusions begin with "high": a probability of 0.9933
_BALANCED_LOGITS = -1.0, 1.0  # the bounds between which they begin with "balanced"
_DEVIATION = 0.05  # at the start, as a share of that of the layer's trained weights
_NOISE, _VALIDATION = 1, 2  # streams of a step's seed
_START, _MOMENTS = 301, 302  # streams of the fit's seed
_MAX_ROOT_MEAN_SQUARE = 1e12  # of a layer's weights, and of its inverse: float32 holds their fourth powers
_SMALL_LOG = -9.0  # of the deviations of weights and of the variances of z_0
_PIECE = 2**16  # numbers that are computed with together, of which a core's cache holds some


@dataclass(frozen=True, kw_only=True)
class LatentBinary(Training["LatentObjective"]):
    """A sparse network with uncertainty about its structure: every weight is on or off, and Gaussian where it is on.

    ``w = g (mu z + sd e)`` with ``g ~ Bernoulli(a)``, trained by the evidence lower bound with the outputs of every
    layer drawn by local reparametrisation; with ``flow=True`` the means of a layer have a random factor ``z`` in
    common, made by an inverse autoregressive flow ("Sparsifying Bayesian neural networks with latent binary variables
    and normalizing flows"). The formulas are in ``docs/methods/latent_binary.md``.

    A step costs 2.7 to 4.8 plain ones, with a flow 4 to 6.6 (most in dense networks with small batches), and memory for
    three numbers a weight, their gradients and the optimiser's. It is the one to take for a smaller network, or to ask
    which inputs and weights are needed: the posterior's median probability model (`sparse.median`) keeps the
    weights that are more likely on than off. Predictions are by drawn weights. The other heads take the mean and the
    variance of every weight, as if weights were independent. Layers that normalise stay as they are.

    Attributes:
        flow: whether the means have a random factor in common, made by a flow (LBBNN-FLOW); without it all weights are
            independent (LBBNN-LRT).
        start: at the ``"trained"`` weights, or at ``"random"`` ones.
        prior_inclusion: prior probability of a weight to be on; the smaller, the sparser.
        initial_inclusion: where the inclusion probabilities begin: ``"high"`` (0.993), from trained weights alone; or
            ``"balanced"``, with logits drawn between -1 and 1. By default high from trained weights and balanced from
            random ones.
        lr: rate of the means.
        inclusion_lr: rate of the logits of the inclusion probabilities.
        flow_lr: rate of what belongs to the flow.
        kl_weight: factor on the divergence from the prior: the larger, the sparser. 1 is the evidence lower bound, and
            the default from random weights. From trained ones it is 0.07, which keeps the network's accuracy: of a
            dense network on FashionMNIST the bound itself left one weight in a hundred and cost five points
            (`recipes/latent_binary`).
        warm_up: share of the training over which that factor rises from 0.
        flow_steps: of the flow, and of the auxiliary flow of the bound.
        flow_units: in each of the two hidden layers of a step.
        flow_form: ``"autoregressive"``, or ``"coupling"``.
        learn_noise: train the noise variance of a regression, from its value at the start.
        prior_precision: of a weight that is on; by default that of its layer's mean square, or 1 where the start is
            random. That of the biases is the same, but at most 1.

    Example:
        ```python
        method = uq.LatentBinary(epochs=1)
        posterior = uq.fit(model, train_loader, method)
        prediction = uq.wrap(model, posterior)(images)
        ```
    """

    name: ClassVar[str] = "latent_binary"
    block_kinds: ClassVar[tuple[str, ...]] = ("latent_binary", "median_model")
    tunable: ClassVar[frozenset[str]] = frozenset({"noise_scale", "temperature"})
    default_prior: ClassVar[str] = "by the size of each layer's weights"

    flow: bool = False
    start: Literal["trained", "random"] = "trained"
    prior_inclusion: Annotated[float, Gt(0), Lt(1)] = 0.1
    initial_inclusion: Literal["high", "balanced"] | None = None
    lr: Positive = 1e-3
    inclusion_lr: NotNegative = 2e-2
    flow_lr: NotNegative = 1e-3
    kl_weight: NotNegative | None = None
    warm_up: Unit = 0.2
    flow_steps: Annotated[int, Ge(1), Le(MAX_STEPS)] = 2
    flow_units: Annotated[int, Ge(1), Le(MAX_UNITS)] = 100
    flow_form: FlowForm = "autoregressive"
    learn_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "random" and self.initial_inclusion == "high":
            raise PosthocUQError(
                "initial_inclusion='high' goes by trained weights, and start='random' has none; take 'balanced'."
            )

    @property
    def divergence_weight(self) -> float:
        """The factor on the divergence once the training is warm."""
        by_start = 0.07 if self.start == "trained" else 1.0
        return by_start if self.kl_weight is None else self.kl_weight

    def begin(self, task: Task) -> LatentObjective:
        for name, tracked in task.prepared.capture.tracked.items():
            if not tracked.layer.rule.matrices:
                raise PosthocUQError(
                    f"Layer '{name}' is of kind {tracked.layer.kind!r}, and method='latent_binary' switches weights of "
                    f"linear layers and convolutions alone; leave it out with layers=."
                )
            if tracked.uses > 1:
                raise PosthocUQError(
                    f"Layer '{name}' is used {tracked.uses} times in one pass, and method='latent_binary' draws the "
                    f"outputs of every use anew, as if its weights were others each time. Give each use a layer of its "
                    f"own with uq.untied(model, '{name}'), or leave the layer out with layers=."
                )
        with isolated_random_state(task.plan.seed):
            twin = replicate(task.model)
        parameters = {name: p.detach() for name, p in task.model.named_parameters()}
        names = [name for layer in task.layers.values() for name in layer.parameter_names]
        check_trainable(self.name, parameters, names)
        layers = {
            name: begun_layer(
                self,
                layer,
                parameters[layer.weight],
                None if layer.bias is None else parameters[layer.bias],
                mixed_seed(task.plan.seed, _START, index),
            )
            for index, (name, layer) in enumerate(task.layers.items())
        }
        return LatentObjective(self, twin, layers, task.likelihood, task.count())

    def blocks(self, task: Task, trained: LatentObjective) -> Mapping[str, LatentBinaryBlock]:
        return {
            name: layer.block(mixed_seed(task.plan.seed, _MOMENTS, index))
            for index, (name, layer) in enumerate(trained.layers.items())
        }

    def prior_of(self, trained: LatentObjective) -> float | LayerPriors:
        if self.prior_precision is not None:
            return self.prior_precision
        return LayerPriors({name: layer.prior.deviation**-2 for name, layer in trained.layers.items()})

    def check_steps(self, steps: int) -> None:
        """Adam moves a number by its rate a step, so that few steps cannot take a weight from on to off."""
        moved = self.moved_by(steps, self.inclusion_lr)
        high = self.start == "trained" and self.initial_inclusion in (None, "high")
        if self.optimizer is None and high and moved < 1.5 * _HIGH_LOGIT:
            end = (
                "hardly a weight is found to be off" if moved < _HIGH_LOGIT else "many weights stay undecided"
            )
            warn_user(
                f"{steps} steps at inclusion_lr={self.inclusion_lr:g} move the logit of an inclusion probability by "
                f"{moved:.2g} at most, and all begin at {_HIGH_LOGIT:g}, so {end}; raise inclusion_lr or epochs."
            )

    def describe_fit(self, trained: LatentObjective, blocks: Mapping[str, Any]) -> dict[str, Any]:
        chances = torch.cat([block.probabilities().flatten() for block in blocks.values()])
        undecided = ((chances > 0.1) & (chances < 0.9)).float().mean()
        return {
            "start": self.start,
            "flow": f"{self.flow_form}, {self.flow_steps} steps" if self.flow else "none",
            ONE_PRIOR: True,
            "prior inclusion": self.prior_inclusion,
            "weight of the divergence": self.divergence_weight,
            "density of the median model": float((chances > 0.5).float().mean()),
            "inclusions between 0.1 and 0.9": float(undecided),
        }


class LatentObjective(Objective):
    """``-mean w log p(y | h) + weight KL / N``, with the outputs of every layer drawn by local reparametrisation, for
    samples of the weights w, or 1.

    For the inputs ``o`` of a layer and a given ``z``, ``h = E h + sqrt(Var h) e`` with

    ``E h = (a mu z) o + mu_b`` and ``Var h = (a (sd^2 + (1 - a) mu^2 z^2)) o^2 + sd_b^2``.

    The moments are exact; the normal distribution is an approximation by many inputs. In a convolution the noise of
    each position is independent. With a flow ``log q(z) = log q(z_0) - sum log k`` for the gates ``k`` of its steps,
    the marginal over ``z`` has no closed form, and an auxiliary distribution ``r`` gives a bound:

    ``KL <= E [KL(z) + log q(z) - log r(z | W, G)]`` (see `SpikeMoments` and `LatentLayer.log_reverse`).

    Args:
        method: with its options.
        network: a replica of the model, in eval mode.
        layers: what is trained, by name.
        likelihood: of the targets.
        samples: N.
    """

    def __init__(
        self,
        method: LatentBinary,
        network: nn.Module,
        layers: Mapping[str, LatentLayer],
        likelihood: Likelihood,
        samples: int,
    ) -> None:
        super().__init__(network, likelihood, samples, method.learn_noise)
        self._method, self.layers = method, layers
        held = dict(network.named_parameters())
        self._by_weight = {id(held[one.layer.weight]): one for one in layers.values()}

    def groups(self) -> list[Group]:
        rates = {
            "mean": self._method.lr,
            "log variance": self._method.log_variance_lr,
            "logit": self._method.inclusion_lr,
        }
        groups: dict[str, dict[str, Tensor]] = {}
        for layer in self.layers.values():
            for role, tensor in layer.tensors.items():
                owner = layer.layer.bias if role.startswith("bias ") else layer.layer.weight
                name = role.removeprefix("bias ")
                groups.setdefault(name if name in rates else "flow", {})[f"{name} {owner}"] = tensor
        return [
            {"params": params, "lr": rates.get(name, self._method.flow_lr), "name": name}
            for name, params in groups.items()
        ]

    def weight_of(self, step: Step) -> float:
        """The factor on the divergence at a step: it rises from 0 while the training warms up."""
        warm_up = self._method.warm_up
        return self._method.divergence_weight * (min(1.0, step.progress / warm_up) if warm_up else 1.0)

    def loss(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        generator = self.generator(step.seed, _NOISE)
        draws = {key: layer.draw(generator) for key, layer in self._by_weight.items()}
        copied = batch.copied()
        outputs_of = {
            key: partial(layer.outputs, draw=draws[key], generator=generator)
            for key, layer in self._by_weight.items()
        }
        with CallReplacer(outputs_of):
            outputs = copied.call(self.network)
        targets, weights = self.targets(batch, outputs, checks)
        fit = self.log_prob(outputs, targets, weights).mean()
        divergence = torch.stack([draw.divergence for draw in draws.values()]).sum() / self.samples
        loss = self.weight_of(step) * divergence.to(fit) - fit
        count = sum(layer.tensors["logit"].numel() for layer in self.layers.values())
        included = torch.stack([draw.included for draw in draws.values()]).sum() / count
        return {"loss": loss, "log likelihood": fit, "KL": divergence, "mean inclusion": included}

    def outputs(self, batch: Batch, draw: int) -> Tensor:
        generator, copied = self.generator(0, _VALIDATION, draw), batch.copied()
        weights = {n: t for layer in self.layers.values() for n, t in layer.sample(generator).items()}
        return copied.outputs_of(functional_call(self.network, weights, copied.args, copied.kwargs))


@dataclass(frozen=True)
class LayerDraw:
    """What one step knows of a layer.

    Attributes:
        mean: of the weights, in their shape.
        variance: likewise.
        divergence: of weights and biases, for this step's ``z``; with a flow an upper bound, by one draw.
        included: the sum of the weights' inclusion probabilities.
    """

    mean: Tensor
    variance: Tensor
    divergence: Tensor
    included: Tensor


class LatentLayer:
    """The tensors of one layer, leaves to be trained, and what a step computes of them.

    Args:
        layer: its names and shapes.
        tensors: by role: ``"mean"``, ``"log variance"``, ``"logit"`` in the weight's shape; ``"bias mean"``, ``"bias
            log variance"`` where it has a bias; with a flow ``"start_mean"``, ``"start_log_variance"`` (of ``z_0``),
            those of the flow with ``"flow_"`` before their names, those of the auxiliary flow with ``"reverse_"``, and
            ``"along"``, ``"reverse mean"``, ``"reverse log variance"`` (e, d1 and d2), ``(I,)`` each.
        prior: of the weights.
        bias_deviation: of the prior of the biases.
        flow: of ``z``; None for ``z = 1``.
    """

    def __init__(
        self,
        layer: Layer,
        tensors: dict[str, Tensor],
        prior: SlabPrior,
        bias_deviation: float,
        flow: Flow | None = None,
    ) -> None:
        self.layer, self.prior, self.bias_deviation, self.flow = layer, prior, bias_deviation, flow
        self.tensors = {role: tensor.requires_grad_() for role, tensor in tensors.items()}

    def draw_z(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        """``z``, ``(I,)``, and ``log q(z)``; None for both without a flow."""
        if self.flow is None:
            return None, None
        mean, log_variance = self.tensors["start_mean"], self.tensors["start_log_variance"]
        start = mean + (0.5 * log_variance).exp() * normal(mean, generator)
        z, determinant = self.flow.forward(start, self._of_flow("flow_"))
        return z, log_normal(start, mean, log_variance) - determinant

    def draw(self, generator: torch.Generator) -> LayerDraw:
        """One step's ``z``, and the moments and the divergence of the weights for it."""
        tensors, (z, log_q) = self.tensors, self.draw_z(generator)
        mean, variance, divergence, included = SpikeMoments.apply(
            tensors["mean"],
            tensors["log variance"],
            tensors["logit"],
            None if z is None else self.along_weights(z),
            self.prior,
        )  # type: ignore[misc]
        if self.layer.bias is not None:
            logs = tensors["bias log variance"]
            divergence = divergence + gaussian_divergence(
                {"": tensors["bias mean"]}, {"": logs}, {"": logs.exp()}, {}, self.bias_deviation**-2
            )
        if z is not None and log_q is not None:
            divergence = divergence + log_q - self.log_reverse(z, mean, variance, generator)
        return LayerDraw(mean, variance, divergence, included)

    def along_weights(self, z: Tensor) -> Tensor:
        """``z`` in a shape that broadcasts to the weight's."""
        layer, (first, *_) = self.layer, self.layer.weight_shape
        ones = [1] * len(layer.kernel)
        if not layer.convolutional:
            return z.unsqueeze(1 - layer.rule.input_axis)
        if layer.rule.input_axis == 1:
            return z.reshape(-1, 1, *ones)
        by_group = z.reshape(layer.groups, 1, -1).expand(-1, first // layer.groups, -1)
        return by_group.reshape(first, -1, *ones)

    def _sharing(self, weight: Tensor) -> Tensor:
        """A tensor in the weight's shape as ``(..., I)``, with the numbers that have a ``z`` of their own last."""
        if self.layer.convolutional:
            return self.layer.to_matrix(weight, None).flatten(0, 1).T
        return weight.movedim(self.layer.rule.input_axis, -1)

    def log_reverse(self, z: Tensor, mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
        """``log r(z | W, G)`` of the auxiliary distribution, a scalar, for weights drawn by local reparametrisation.

        With ``u = W e`` for every row of weights that share a ``z`` and ``s`` the mean of ``hardtanh(u)`` over the rows
        (of a convolution: of ``u``), a flow of its own takes ``z`` to ``z_B ~ N(d1 s, exp(d2 s))``.

        Args:
            z: that the weights were drawn for, ``(I,)``.
            mean: of the weights, in their shape.
            variance: likewise.
            generator: of the weights.
        """
        assert self.flow is not None
        along = self.tensors["along"]
        drawn = (self._sharing(mean) @ along).flatten()
        spread = (self._sharing(variance) @ along.square()).flatten()
        drawn = drawn + spread.clamp(min=MIN_VARIANCE).sqrt() * normal(drawn, generator)
        return self.log_reverse_of(z, drawn)

    def log_reverse_of(self, z: Tensor, drawn: Tensor) -> Tensor:
        """`log_reverse` for given ``u``, ``(rows,)``."""
        assert self.flow is not None
        shared = (drawn if self.layer.convolutional else F.hardtanh(drawn)).mean()
        back, determinant = self.flow.forward(z, self._of_flow("reverse_"))
        means = self.tensors["reverse mean"] * shared
        return log_normal(back, means, self.tensors["reverse log variance"] * shared) + determinant

    def outputs(self, call: AffineCall, draw: LayerDraw, generator: torch.Generator) -> Tensor:
        """The layer's outputs, drawn by local reparametrisation."""
        biases: tuple[Tensor, ...] = ()
        if self.layer.bias is not None:
            biases = self.tensors["bias mean"], self.tensors["bias log variance"].exp()
        return drawn_outputs(call, WeightMoments(draw.mean, draw.variance, *biases), generator)

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of weights and biases by name: ``g (mu z + sd e)``, exact."""
        tensors, (z, _) = self.tensors, self.draw_z(generator)
        slab = tensors["mean"] if z is None else tensors["mean"] * self.along_weights(z)
        slab = slab + (0.5 * tensors["log variance"]).exp() * normal(slab, generator)
        chance = torch.rand(slab.shape, generator=generator, dtype=slab.dtype, device=slab.device)
        drawn = {self.layer.weight: slab * (chance < torch.sigmoid(tensors["logit"]))}
        if self.layer.bias is not None:
            mean = tensors["bias mean"]
            drawn[self.layer.bias] = mean + (0.5 * tensors["bias log variance"]).exp() * normal(
                mean, generator
            )
        return drawn

    def block(self, seed: int) -> LatentBinaryBlock:
        """The layer's block; `seed` is for the moments of ``z``."""
        layer, tensors = self.layer, {role: t.detach() for role, t in self.tensors.items()}
        bias = layer.bias is not None
        means = layer.to_matrix(tensors["mean"], tensors.get("bias mean"))
        logs = layer.to_matrix(tensors["log variance"], tensors.get("bias log variance"))
        always_on = torch.ones_like(tensors["bias mean"]) if bias else None
        inclusion = layer.to_matrix(tensors["logit"].sigmoid(), always_on)
        scale = None
        if self.flow is not None:
            flow = {role: tensors[role] for role in ("start_mean", "start_log_variance")}
            flow |= {f"flow_{name}": tensor.detach() for name, tensor in self._of_flow("flow_").items()}
            scale = RandomScale.of(
                "outputs" if layer.convolutional else "inputs", bias, self.flow, flow, seed
            )
        return LatentBinaryBlock(
            means.contiguous(), logs.exp().contiguous(), inclusion.contiguous(), bias=bias, scale=scale
        )

    def _of_flow(self, prefix: str) -> Mapping[str, Tensor]:
        return {role.removeprefix(prefix): t for role, t in self.tensors.items() if role.startswith(prefix)}


def begun_layer(
    method: LatentBinary, layer: Layer, weight: Tensor, bias: Tensor | None, seed: int
) -> LatentLayer:
    """The layer with the tensors that its training begins with.

    Args:
        method: with its options.
        layer: its names and shapes.
        weight: trained, as the model holds it.
        bias: likewise.
        seed: of all random numbers.

    Raises:
        PosthocUQError: the layer's weights are all zero, so that they have no scale, or theirs is out of range.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = method.start == "trained"
    size = float(as_double(weight.detach()).square().mean().sqrt())
    if trained and not size > 0:
        raise PosthocUQError(
            f"Layer '{layer.name}' has only zero weights, so there is no scale to begin with; leave it out with "
            f"layers=, or take start='random'."
        )
    if trained and not 1 / _MAX_ROOT_MEAN_SQUARE <= size <= _MAX_ROOT_MEAN_SQUARE:
        raise PosthocUQError(
            f"The weights of layer '{layer.name}' have a root mean square of {size:.3g}, by which no training in "
            f"float32 can compute; leave it out with layers=, or take start='random'."
        )
    tensors: dict[str, Tensor] = {}
    if not trained:
        wide, spread = (0.2, 0.1) if layer.convolutional else (0.01, 1.0)
        tensors["mean"] = _between((-wide, wide), weight, generator)
        tensors["log variance"] = 2 * (_SMALL_LOG + spread * _normal(weight, generator))
        tensors["logit"] = _between(_BALANCED_LOGITS, weight, generator)
        if bias is not None:
            tensors["bias mean"] = _between((-0.2, 0.2), bias, generator)
            tensors["bias log variance"] = 2 * (_SMALL_LOG + _normal(bias, generator))
    else:
        if method.initial_inclusion == "balanced":
            tensors["mean"] = weight.detach().clone()
            tensors["logit"] = _between(_BALANCED_LOGITS, weight, generator)
        else:  # the mean weight a mu is the trained one, or the signal would shrink from layer to layer
            tensors["logit"] = torch.full_like(weight, _HIGH_LOGIT)
            tensors["mean"] = weight.detach() / tensors["logit"].sigmoid()
        spread = _DEVIATION * max(float(weight.detach().std(correction=0)), 1e-3 * size)
        tensors["log variance"] = torch.full_like(weight, 2 * log(spread))
        if bias is not None:
            tensors["bias mean"] = bias.detach().clone()
            tensors["bias log variance"] = torch.full_like(bias, 2 * log(spread))
    flow = None
    if method.flow:
        units = layer.groups * layer.outputs if layer.convolutional else layer.inputs - (bias is not None)
        flow = Flow(units, method.flow_units, method.flow_steps, method.flow_form)
        tensors |= _of_flow(flow, weight, trained, generator)
    by_size = size if trained else 1.0
    deviation = by_size if method.prior_precision is None else method.prior_precision**-0.5
    slab = SlabPrior(method.prior_inclusion, deviation)
    return LatentLayer(layer, tensors, slab, max(slab.deviation, 1.0), flow)


def _of_flow(flow: Flow, like: Tensor, trained: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """From trained weights ``z`` is nearly 1."""
    one = like.new_zeros(flow.size)
    shift = 1.0 if trained else None
    mean = torch.ones_like(one) if trained else _normal(one, generator)
    spread = 0.0 if trained else 1.0
    tensors = {"start_mean": mean, "start_log_variance": _SMALL_LOG + spread * _normal(one, generator)}
    tensors |= {f"flow_{name}": t for name, t in flow.initial(generator, like, shift=shift).items()}
    tensors |= {f"reverse_{name}": t for name, t in flow.initial(generator, like).items()}
    tensors["along"] = _normal(one, generator) / flow.size**0.5
    for name in ("reverse mean", "reverse log variance"):
        tensors[name] = 0.01 * _normal(one, generator)
    return tensors


def _between(bounds: tuple[float, float], like: Tensor, generator: torch.Generator) -> Tensor:
    low, high = bounds
    return (torch.rand(like.shape, generator=generator, device="cpu") * (high - low) + low).to(like)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)


@dataclass(frozen=True)
class SlabPrior:
    """``p(g = 1) = inclusion``, ``s ~ N(0, deviation^2)``."""

    inclusion: float
    deviation: float = 1.0

    @property
    def logit(self) -> float:
        """Of the inclusion."""
        return log(self.inclusion / (1 - self.inclusion))


class SpikeMoments(torch.autograd.Function):
    """Mean and variance of every weight, and the sum of their divergences from the prior, for a given ``z``; with
    ``c = mu z``,

    ``E w = a c``, ``Var w = a (v + (1 - a) c^2)``, and
    ``KL = a (log(s0 / sd) - 1/2 + (v + c^2) / (2 s0^2) + log(a / p)) + (1 - a) log((1 - a) / (1 - p))``.

    The gradients are written by hand: autograd would keep some twenty tensors of the layer's size, and make as many
    passes over memory. Both passes go over the weights piece by piece, so that what they compute on the way stays in
    the processor's cache, and nothing is kept for the gradients but the arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_variance: Tensor, logit: Tensor, z: Tensor | None, prior: SlabPrior
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            mean: ``mu``.
            log_variance: ``log v``, in its shape.
            logit: of the inclusion probability ``a``, in its shape.
            z: a factor on the means that broadcasts to them; None for 1.
            prior: of all weights.

        Returns:
            Mean and variance in the shape of `mean`, the divergence and the sum of the inclusion probabilities.
        """
        ctx.prior = prior
        ctx.save_for_backward(mean, log_variance, logit, z)
        means, spreads = torch.empty_like(mean), torch.empty_like(mean)
        totals: list[Tensor] = []
        for piece in _pieces(mean):
            parts = mean[piece], log_variance[piece], logit[piece], _part(z, piece)
            totals.append(_moments(*parts, prior, means[piece], spreads[piece]))
        divergence, included = torch.stack(totals).sum(0, dtype=widest_dtype(mean.device))
        divergence = divergence - logit.numel() * log(1 - prior.inclusion) - included * prior.logit
        included = included.to(mean)
        ctx.mark_non_differentiable(included)
        return means, spreads, divergence.to(mean), included

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, log_variance, logit, z = ctx.saved_tensors
        by_mean, by_log, by_logit = (torch.empty_like(mean) for _ in range(3))
        by_z: Tensor | None = None if z is None else torch.zeros_like(z)
        for piece in _pieces(mean):
            parts = mean[piece], log_variance[piece], logit[piece], _part(z, piece)
            incoming = gradients[0][piece], gradients[1][piece], gradients[2]
            by_slab = by_mean[piece]
            _gradients(*parts, incoming, ctx.prior, (by_slab, by_log[piece], by_logit[piece]))
            scale = _part(z, piece)
            if by_z is not None and scale is not None:
                of_piece = _part(by_z, piece)
                assert of_piece is not None
                of_piece.add_((by_slab * mean[piece]).sum_to_size(scale.shape))
                by_slab.mul_(scale)
        return by_mean, by_log, by_logit, by_z, None


def _pieces(tensor: Tensor) -> list[slice]:
    """Slices along the first side; all of it on devices that compute in parallel."""
    rows = tensor.shape[0]
    step = max(1, _PIECE // max(1, tensor[0].numel())) if tensor.device.type == "cpu" else rows
    return [slice(start, start + step) for start in range(0, rows, step)]


def _part(z: Tensor | None, piece: slice) -> Tensor | None:
    """What of ``z`` belongs to a piece of the weights."""
    return z if z is None or z.shape[0] == 1 else z[piece]


def _moments(
    mean: Tensor,
    log_variance: Tensor,
    logit: Tensor,
    z: Tensor | None,
    prior: SlabPrior,
    means: Tensor,
    spreads: Tensor,
) -> Tensor:
    """Writes mean and variance of some weights; gives two sums: of the divergences, but for the part by which they
    depend on the prior inclusion, and of the inclusion probabilities.
    """
    slab = mean if z is None else mean * z
    inclusion, variance = torch.sigmoid(logit), log_variance.exp()
    excluded = torch.sigmoid(-logit)  # 1 - inclusion has no digits left where the inclusion is near 1
    torch.mul(inclusion, slab, out=means)
    torch.mul(slab, slab, out=spreads).mul_(excluded).add_(variance).mul_(inclusion)
    squares = torch.addcmul(variance, slab, slab).mul_(0.5 / prior.deviation**2)
    gaussian = squares.add_(log_variance, alpha=-0.5).add_(log(prior.deviation) - 0.5).mul_(inclusion)
    # log a and log(1 - a) = log a - logit, which keep their digits at both ends
    gaussian.add_(F.logsigmoid(logit)).addcmul_(excluded, logit, value=-1)
    return torch.stack([gaussian.sum(), inclusion.sum()])


def _gradients(
    mean: Tensor,
    log_variance: Tensor,
    logit: Tensor,
    z: Tensor | None,
    incoming: tuple[Tensor, Tensor, Tensor],
    prior: SlabPrior,
    outgoing: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes the gradients by the slab's mean, the logarithm of its variance and the logit of the inclusion, of some
    weights, from those by the mean, the variance and the divergence.
    """
    by_mean, by_spread, by_total = incoming
    by_slab, by_log, by_logit = outgoing
    slab = mean if z is None else mean * z
    inclusion, variance = torch.sigmoid(logit), log_variance.exp()
    excluded, precision = torch.sigmoid(-logit), 1 / prior.deviation**2
    # by the inclusion probability, and through it by its logit
    torch.add(logit, log_variance, alpha=-0.5, out=by_logit)
    by_logit.add_(torch.addcmul(variance, slab, slab), alpha=0.5 * precision)
    by_logit.add_(log(prior.deviation) - 0.5 - prior.logit).mul_(by_total).addcmul_(by_mean, slab)
    spread = torch.addcmul(variance, slab * slab, excluded - inclusion)
    by_logit.addcmul_(by_spread, spread).mul_(inclusion).mul_(excluded)
    # by the logarithm of the slab's variance
    torch.add(by_spread, 0.5 * precision * by_total, out=by_log)
    by_log.mul_(variance).sub_(0.5 * by_total).mul_(inclusion)
    # by the slab's mean
    torch.mul(slab, precision * by_total, out=by_slab).add_(by_mean)
    by_slab.addcmul_(by_spread, excluded.mul_(slab), value=2).mul_(inclusion)
