"""`Likelihood`, the base class: what targets are, and what a prediction is."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import log
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.devices import host_double, widest
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.randomness import sample_keys, uniforms
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods.drawn_prediction import DrawnPrediction
from posthoc_uq.likelihoods.draws import LINK_DRAWS, Spread, output_draws
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.prediction import Prediction

# Helpers of likelihoods: precision of outputs, divergences, plain values, the last node of an autograd graph.

# Autograd nodes that do not change values, by the start of their names.
_PASSING = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Clone", "ToCopy")


def wide(outputs: Tensor) -> Tensor:
    """Half precision outputs as float32: in half precision a softmax loses its tail."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def divergence_of_classes(log_probs: Tensor, prediction: Any) -> Tensor:
    """``sum_c p_c (log p_c - log q_c)``; a class that the network gives probability zero adds nothing."""
    predicted = prediction.probs.log() if prediction.log_probs is None else prediction.log_probs
    probs = log_probs.exp()
    terms = torch.where(probs > 0, probs * (log_probs - predicted), torch.zeros_like(probs))
    return terms.sum(1)


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax of logits ``(samples, classes)`` in float64, ``(samples,)``."""
    logs = logits.log_softmax(1)
    return -torch.where(logs.isneginf(), 0.0, logs.exp() * logs).sum(1)


def last_function(outputs: Tensor) -> str:
    """The name of the autograd node that made the outputs, before any changes of shape or type."""
    node: Any = outputs.grad_fn
    while node is not None and node.name().startswith(_PASSING):
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


def plain_value(likelihood: str, name: str, value: Any) -> Any:
    """A likelihood's attribute as a file keeps it: a number, a text, a list of them, a dictionary of them by text.

    Raises:
        PosthocUQError: it is none of these.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_value(likelihood, name, item) for item in cast(list[Any], value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], value)):
        items = cast(dict[str, Any], value).items()
        return {key: plain_value(likelihood, name, item) for key, item in items}
    raise PosthocUQError(
        f"Likelihood {likelihood!r} has an attribute {name!r} of the type {type(value).__name__}, which no file can "
        f"keep; give it plain numbers and texts, a name that begins with an underscore, or a method attributes()."
    )


# The base class of likelihoods: the loss of a sample, the gradients whose squares are the Fisher, the
# prediction.
#
# The Fisher information is an expectation over labels drawn from the model's own predictive. It is delivered
# here as one or more tensors ``v``, shaped like the outputs, to pull back through the network: the Fisher of
# a sample is the sum over the tensors of the outer products of the pulled-back gradients (losses are summed
# over the batch, never averaged).

Fisher = Literal["mc", "exact", "empirical"]
Self = TypeVar("Self", bound="Likelihood")

_CERTAIN = 50.0  # log ratios of densities are clamped here: larger ones add nothing


class Likelihood(ABC):
    """``p(y | outputs)`` for one sample; subclass it to add one.

    Only `log_prob` must be written. Every other method has a default, or raises an error that names the missing method;
    `docs/guides/new_likelihood.md` says which method is for what. Outputs are
    ``(samples, ...)``, the first dimension counts the samples, and a sample's outputs and targets depend on no other's.

    Attributes:
        name: in reports, messages and files; by default that of the class.
        logits: outputs are logits, which a posterior's temperature divides.
        softmax: outputs are logits of several classes. Adding a number to all of them changes nothing, and heads may
            use those of the most probable classes alone.
        joint: whether a prediction from Gaussian outputs needs the covariance of a sample's outputs.
        fields: what a file may hold of the `attributes` besides the name; for the likelihoods of this package.
        noise_variance: of Gaussian observation noise, ``(outputs,)`` or ``(1,)`` float64, in squared units of the
            targets; None where there is no such noise. Tuning scales it.
        has_noise: whether there is a noise, or dispersion, that `at_noise_scale` scales.
    """

    name: str = ""
    logits: ClassVar[bool] = False
    softmax: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    fields: ClassVar[type[Record]] = Record
    noise_variance: Tensor | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name:
            cls.name = cls.__name__
        if "check" in cls.__dict__ and "fault" not in cls.__dict__:
            cls.fault = Likelihood.fault  # its own check must run

    def defines(self, *methods: str) -> bool:
        """Whether these methods are the subclass's own, rather than the defaults here."""
        return all(getattr(type(self), name) is not getattr(Likelihood, name) for name in methods)

    def _missing(self, method: str, purpose: str) -> PosthocUQError:
        return PosthocUQError(f"Likelihood {self.name!r} {purpose}; give it a method {method}.")

    # Checks of outputs and targets

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Raise `PosthocUQError` where outputs or targets have the wrong shape, type or range. By default there must be
        a target for every sample, and all of them finite.
        """
        if targets is None:
            return
        if targets.shape[:1] != outputs.shape[:1]:
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}."
            )
        if not bool(torch.isfinite(targets).all()):
            raise PosthocUQError("Some targets are not finite.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        """`check` for a loop that must not wait for the device at every batch. Shapes and types are checked at once.
        The result is a flag on the device, true where `check` would raise for the range, or None where all is checked.
        """
        self.check(outputs, targets)
        return None

    def takes(self, outputs: int) -> bool:
        """Whether a model may have so many outputs a sample."""
        return True

    def seems_applied(self, outputs: Tensor) -> bool:
        """Whether the outputs look as if the model had applied the link already, as a softmax at its end does.

        Args:
            outputs: ``(samples, ...)``, in [0, 1], with their autograd graph. Asked only where outputs are `logits`.
        """
        return False

    def positions_of(self, outputs: Tensor) -> Layout | None:
        """Where outputs have positions, each with a prediction of its own: how they are laid out. Else None."""
        return None

    # The density and its gradients

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y | outputs)`` of every sample, ``(samples,)``, in nats; differentiable in the outputs."""

    def weighted_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """``sum_t w_t log p(y_t | f_t)`` of every sample, ``(samples,)``, in nats, for weights of positions
        ``(samples, positions)``; for likelihoods whose outputs have positions (`positions_of`). Differentiable.
        """
        raise self._missing(
            "weighted_log_prob(outputs, targets, weights)", "has no log-probability of single positions"
        )

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y_k | f_k)`` of every single output, shaped like them, where targets are independent given the
        outputs; for the probabilities of counts.
        """
        raise self._missing("log_terms(outputs, targets)", "has no density of single outputs")

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``P(Y_k <= y_k | f_k)`` of every single output, shaped like them."""
        raise self._missing("cdf(outputs, targets)", "has no distribution function")

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of ``-log p(y | outputs)`` by the outputs, shaped like them; by default by autograd."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = wide(outputs.detach()).clone().requires_grad_()
            (gradient,) = torch.autograd.grad(-self.log_prob(inputs, targets).sum(), inputs)
        return gradient

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """Targets drawn from ``p(y | outputs)``, ``(samples, ...)``: a function of the outputs, the keys ``(samples,)``
        and the number of the draw; all random numbers come from `uniforms`.
        """
        raise self._missing("draw(outputs, keys, draw)", "draws no targets")

    @staticmethod
    def uniforms(outputs: Tensor, keys: Tensor, draw: int, numbers: int = 1) -> Tensor:
        """Random numbers in (0, 1) for `draw`, ``(samples, numbers)``: on the outputs' device, in float64, or in
        float32 where the device has no float64.
        """
        numbers_of_draw = uniforms(keys, (draw + 1) * numbers)[:, draw * numbers :]
        return numbers_of_draw.to(device=outputs.device, dtype=widest(outputs.device))

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        """Tensors ``v`` like the outputs with ``sum v v^T`` = the Fisher of a sample by its outputs; as few as
        possible, since each costs a backward pass. Without this method the Fisher is by drawn labels.
        """
        raise self._missing(
            "exact_factors(outputs)", "has no exact expectation over labels, take fisher='mc'"
        )

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """The tensors to pull back for one batch; see the module's docstring."""
        outputs = outputs.detach()
        if fisher == "exact":
            yield from self.exact_factors(outputs)
        elif fisher == "mc":
            for draw in range(n_samples):
                yield self.score(outputs, self.draw(outputs, keys, draw)) * n_samples**-0.5
        else:
            if targets is None:
                raise PosthocUQError(
                    "fisher='empirical' needs labels, and the loader yields inputs alone; use fisher='mc'."
                )
            yield self.score(outputs, targets)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """``E[log p(y | f)]`` of every sample for outputs ``f ~ N(mean, variance)``, ``(samples,)``, in nats; by
        default over quasi-random draws of independent outputs.

        Args:
            mean: ``(samples, ...)``.
            variance: of the same shape.
            targets: as in `log_prob`.
            n_draws: of the outputs, where there is no closed form.
        """
        draws = output_draws(mean, variance, None, n_draws)
        return torch.stack([self.log_prob(outputs, targets) for outputs in draws]).mean(0)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """``log E[p(y | f)]`` of every sample for outputs ``f ~ N(mean, variance)``, ``(samples,)``, in nats: how the
        prediction rates the targets. By default over quasi-random draws of independent outputs; differentiable.

        Args:
            mean: ``(samples, ...)``.
            variance: of the same shape.
            targets: as in `log_prob`.
            n_draws: of the outputs, where there is no closed form.
        """
        draws = output_draws(mean, variance, None, n_draws)
        logs = torch.stack([self.log_prob(outputs, targets) for outputs in draws])
        return torch.logsumexp(logs, 0) - log(n_draws)

    # The target

    def mean(self, outputs: Tensor) -> Tensor:
        """``E[y | outputs]``, ``(samples, ...)``, in units of the targets."""
        raise self._missing("mean(outputs)", "does not say what mean the target has")

    def variance(self, outputs: Tensor) -> Tensor:
        """``Var[y | outputs]``, shaped like `mean`, in squared units of the targets."""
        raise self._missing("variance(outputs)", "does not say what variance the target has")

    def entropy(self, outputs: Tensor) -> Tensor:
        """``H[y | outputs]`` of every sample, ``(samples,)``, in nats; by which a temperature is matched."""
        raise self._missing("entropy(outputs)", "does not say how undecided the network is")

    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]:
        """Measures of how good predicted means are, by name, which `posthoc_uq.evaluate` shows beside its own."""
        return {}

    # Predictions

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> Prediction:
        """The prediction from outputs of several draws of the weights; by default a `DrawnPrediction`.

        Args:
            outputs: ``(draws, samples, ...)``.
            noise: a `noise_variance` in place of the likelihood's own.

        Raises:
            PosthocUQError: the outputs do not fit.
        """
        return DrawnPrediction.from_draws(outputs, self if noise is None else self.with_noise(noise))

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> Prediction:
        """`from_draws` for outputs that come block by block, ``(draws, samples, ...)`` each; a likelihood whose
        prediction needs each draw only once sums them up instead of keeping them.
        """
        return self.from_draws(torch.cat(list(blocks)), noise)

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = LINK_DRAWS,
        noise: Tensor | None = None,
    ) -> Prediction:
        """The prediction of Gaussian outputs ``N(mean, variance)``; by default from quasi-random draws of them.

        Args:
            mean: ``(samples, ...)``, in float32 at least.
            variance: of the same shape.
            covariance: ``(samples, outputs, outputs)`` where the head knows it, or the `Spread` of many classes;
                without it outputs count as independent.
            link: ``"mc"``, or another one that this likelihood has.
            n_draws: of the outputs, for ``"mc"``.
            noise: a `noise_variance` in place of the likelihood's own.

        Raises:
            PosthocUQError: the likelihood has no such link.
        """
        if link != "mc":
            raise PosthocUQError(
                f"link={link!r} makes probabilities of Gaussian logits; likelihood {self.name!r} predicts by draws of "
                f"the outputs: link='mc'."
            )
        likelihood = self if noise is None else self.with_noise(noise)
        return DrawnPrediction.from_gaussian(mean, variance, likelihood, covariance, n_draws)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """``KL(p(y | outputs) || prediction)`` of every sample, ``(samples,)``, in nats; for a
        regression of several outputs, their mean. Without this method there is no faithful prior, and a fit uses the
        evidence;
        `drawn_divergence` estimates it.

        Args:
            outputs: of the network, divided by the posterior's temperature where they are logits.
            prediction: what a head returns for the same samples.

        Raises:
            PosthocUQError: this likelihood has none.
        """
        raise PosthocUQError(
            f"Likelihood {self.name!r} does not say how far a prediction is from the network's own, which a faithful "
            f"prior needs; give it a method divergence(outputs, prediction), or find the prior precision by the "
            f"evidence or by the likelihood of held-out data."
        )

    @property
    def has_divergence(self) -> bool:
        """Whether `divergence` is defined."""
        return self.defines("divergence")

    def drawn_divergence(self, outputs: Tensor, prediction: DrawnPrediction, n_draws: int = 64) -> Tensor:
        """`divergence` by drawn targets, for a `divergence` without a closed form.

        With ``r = prediction(y) / p(y | outputs)`` it is the mean of ``2 (r - 1 - log r) / (1 + r)`` over targets, half
        from the likelihood and half from the prediction. It is never negative, and its variance is small where the two
        are close.
        """
        keys = sample_keys([outputs], len(outputs), 0)  # the same in every batch
        half = max(1, n_draws // 2)
        drawn = [self.draw(outputs, keys, draw) for draw in range(half)]
        drawn += prediction.sample(half, torch.Generator().manual_seed(0)).unbind()
        total = outputs.new_zeros(len(outputs))
        for targets in drawn:
            ratio = (prediction.log_prob(targets) - self.log_prob(outputs, targets)).clamp(max=_CERTAIN)
            total = total + 2 * (ratio.exp() - 1 - ratio) / (1 + ratio.exp())
        return total / len(drawn)

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """Whether models with drawn weights decide as the trained one does; a fit by the evidence warns if not.

        Args:
            outputs: of the trained network, ``(samples, ...)``.
            draws: outputs of models with drawn weights, ``(draws, samples, ...)``.
        """
        return True

    # Classes, for the novelty of inputs

    def classes(self, outputs: int) -> int:
        """The number of classes of a model with so many outputs; 1 where outputs are no classes."""
        return 1

    def predicted_class(self, outputs: Tensor) -> Tensor:
        """The class of every sample, ``(samples,)`` int64, below `classes`."""
        return torch.zeros(outputs.shape[0], dtype=torch.int64, device=outputs.device)

    def of_targets(self: Self) -> Self:
        """The likelihood of the targets as they are, where `log_prob` is a training loss that is not; by default
        itself.
        """
        return self

    # Observation noise

    def with_noise(self: Self, noise_variance: Tensor) -> Self:
        """A copy with another `noise_variance`, positive; the tensor itself is kept, with its gradients."""
        likelihood = copy.copy(self)
        likelihood.noise_variance = noise_variance
        return likelihood

    @property
    def has_noise(self) -> bool:
        return self.noise_variance is not None

    def at_noise_scale(self: Self, factor: float) -> Self:
        """This likelihood with an observation noise `factor` times as large: its noise variance, or a dispersion that
        stands for one; itself where there is none.
        """
        if self.noise_variance is None or factor == 1.0:
            return self
        return self.with_noise(self.noise_variance * factor)

    def residual_sums(self, log_likelihood: float, samples: float, outputs: int) -> tuple[float, float]:
        """The sum of squared residuals over their noise variance, and the number of residuals, by a sum of `log_prob`
        over so many samples, or over weights of that sum. The log marginal likelihood needs them when the noise
        variance changes. Zeros where there is no noise variance.
        """
        return 0.0, 0.0

    # Files

    def attributes(self) -> dict[str, Any]:
        """The plain values that a file keeps of this object, its name among them. By default its attributes whose names
        do not begin with an underscore.

        Raises:
            PosthocUQError: an attribute is not a plain value.
        """
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            "name": self.name,
            **{name: plain_value(self.name, name, value) for name, value in values.items()},
        }

    @classmethod
    def restore(cls: type[Self], attributes: Mapping[str, Any]) -> Self:
        """The likelihood with these `attributes`; only called for the likelihoods of this package."""
        noise_variance = attributes.get("noise_variance")
        return cls() if noise_variance is None else cls().with_noise(host_double(noise_variance))

    def identity(self) -> dict[str, Any]:
        """What must be the same for a fit to go on where another one stopped."""
        return {"name": self.name, **vars(self)}


# Expectations over one Gaussian output by Gauss-Hermite quadrature.

NODES = 64  # exact for polynomials of degree 127 in the output


@lru_cache(maxsize=1)
def _rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(NODES,)`` for the standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    with torch.inference_mode(False):  # cached tensors must work with autograd too
        return host_double(nodes.tolist()), host_double((weights / weights.sum()).tolist())


def _at_nodes(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The function's values ``(NODES, ...)``, and the weights in a shape that fits."""
    nodes, weights = (numbers.to(mean.device, mean.dtype) for numbers in _rule())
    # the root of a variance of 0 has an infinite derivative
    deviation = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    values = function(mean + deviation * nodes.reshape(-1, *[1] * mean.ndim))
    return values, weights.reshape(-1, *[1] * (values.ndim - 1))


def gaussian_mean(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """``E[function(f)]`` for every single output ``f ~ N(mean, variance)``.

    Args:
        function: from ``(NODES, ...)`` to the same shape, number by number.
        mean: of any shape, in float32 at least.
        variance: of the same shape.
    """
    values, weights = _at_nodes(function, mean, variance)
    return (values * weights).sum(0)


def gaussian_log_mean_exp(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """``log E[exp function(f)]``; see `gaussian_mean`."""
    values, weights = _at_nodes(function, mean, variance)
    return torch.logsumexp(values + weights.log(), 0)


# What likelihoods have in common whose targets are independent given the outputs, each of one output.


class SeparateOutputs(Likelihood):
    """``log p(y | f) = sum_k log p(y_k | f_k)``: `log_terms` has the terms, and expectations are taken one by one."""

    @abstractmethod
    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Likelihood`; outputs may have dimensions before those of the targets."""

    def like(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The targets in the shape of the outputs and in their precision."""
        return targets.to(device=outputs.device, dtype=wide(outputs).dtype).reshape(outputs.shape)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        terms = self.log_terms(wide(outputs), self.like(outputs, targets))
        return terms.reshape(outputs.shape[0], -1).sum(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """By Gauss-Hermite quadrature for each output."""
        return self._expected(gaussian_mean, mean, variance, targets)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """By Gauss-Hermite quadrature for each output; outputs count as independent."""
        return self._expected(gaussian_log_mean_exp, mean, variance, targets)

    def _expected(
        self,
        expectation: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
        mean: Tensor,
        variance: Tensor,
        targets: Tensor,
    ) -> Tensor:
        values = self.like(mean, targets)
        terms = expectation(lambda outputs: self.log_terms(outputs, values), wide(mean), wide(variance))
        return terms.reshape(mean.shape[0], -1).sum(1)
