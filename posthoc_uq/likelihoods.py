"""What a model's outputs mean: the loss of a sample, the gradients whose squares are the Fisher, the noise.

The Fisher information is an expectation over labels drawn from the model's own predictive. It is delivered
here as one or more tensors ``v``, shaped like the outputs, to pull back through the network: the Fisher of a
sample is the sum over the tensors of the outer products of the pulled-back gradients (losses are summed over
the batch, never averaged).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import log, pi
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import host_double, widest
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.randomness import uniforms

Fisher = Literal["mc", "exact", "empirical"]


class Likelihood(ABC):
    """``p(y | outputs)`` for one sample; subclass it to add one."""

    name: str = ""

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Raise `PosthocUQError` where outputs or targets have the wrong shape, type or range."""

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        """`check` for a loop that must not wait for the device at every batch: shapes and types are checked at once,
        and of the range there is a flag on the device, set where `check` would raise; None where all is checked.
        """
        self.check(outputs, targets)
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "check" in cls.__dict__ and "fault" not in cls.__dict__:
            cls.fault = Likelihood.fault  # a check of its own is not left out

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y | outputs)`` of every sample, ``(samples,)``, in nats."""

    @abstractmethod
    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of ``-log p(y | outputs)`` by the outputs, shaped like them."""

    @abstractmethod
    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """Targets drawn from ``p(y | outputs)``, a function of the keys ``(samples,)`` and the number of the
        draw.
        """

    @abstractmethod
    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        """Tensors ``v`` like the outputs with ``sum v v^T`` = the Fisher of a sample by its outputs; as few as there
        are, since each is a backward pass.
        """

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """``KL(p(y | outputs) || prediction)`` of every sample, ``(samples,)``, in nats; of several outputs of a
        regression, their mean.

        Args:
            outputs: of the network, divided by the posterior's temperature where they are logits.
            prediction: what a head returns for the same samples.

        Raises:
            PosthocUQError: this likelihood has none.
        """
        raise PosthocUQError(
            f"Likelihood {self.name!r} does not say how far a prediction is from the network's own; give it a method "
            f"divergence(outputs, prediction), or choose prior_precision='evidence' or a number."
        )

    @property
    def has_divergence(self) -> bool:
        """Whether `divergence` is defined."""
        return type(self).divergence is not Likelihood.divergence

    def attributes(self) -> dict[str, Any]:
        """Plain values that `likelihood_from_attributes` takes."""
        return {"name": self.name}

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


class Categorical(Likelihood):
    """Softmax classification: outputs ``(samples, classes)`` are logits, targets ``(samples,)`` are class
    indices.
    """

    name = "classification"

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Categorical.fault(self, outputs, targets)
        if targets is not None and fault is not None and bool(fault):
            raise PosthocUQError(
                f"Labels run from {int(targets.min())} to {int(targets.max())}, but the model has {outputs.shape[1]} "
                f"outputs; labels must lie in 0..{outputs.shape[1] - 1}."
            )

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise PosthocUQError(
                f"likelihood='classification' needs outputs of shape (samples, classes), and the model gives "
                f"{tuple(outputs.shape)}; use likelihood='binary' for one logit, 'regression' for means."
            )
        if targets is None:
            return None
        if targets.shape != outputs.shape[:1] or targets.is_floating_point():
            raise PosthocUQError(
                f"Labels must be integers of shape ({outputs.shape[0]},), not {targets.dtype} of shape "
                f"{tuple(targets.shape)}."
            )
        return ((targets < 0) | (targets >= outputs.shape[1])).any()

    @staticmethod
    def _indices(outputs: Tensor, targets: Tensor) -> Tensor:
        """The labels as indices that are safe where nobody has looked at a `fault` yet: one out of range would end a
        process that uses CUDA.
        """
        return targets.long().clamp(0, outputs.shape[1] - 1)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -F.cross_entropy(_wide(outputs), self._indices(outputs, targets), reduction="none")

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        return _divergence_of_classes(_wide(outputs).log_softmax(1), prediction)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _wide(outputs).softmax(1) - F.one_hot(self._indices(outputs, targets), outputs.shape[1])

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = _exact(uniforms(keys, draw + 1)[:, draw:], outputs)
        cumulative = _wide(outputs).softmax(1).to(u.dtype).cumsum(1)
        return (
            torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1).clamp_(max=outputs.shape[1] - 1)
        )

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # diag(p) - p p^T has a rank less than classes. Its Cholesky factor (Tanabe & Sagae 1992) has a column for each
        # choice between a class and all after it, where none before it was taken.
        logits = _wide(outputs)
        whole = left = logits.logsumexp(1, keepdim=True)
        for label in range(outputs.shape[1] - 1):
            after = logits[:, label + 1 :]
            rest = after.logsumexp(1, keepdim=True)
            # The root of P(none before) P(this | none before) P(after | none before).
            weight = (0.5 * (logits[:, label : label + 1] + rest - left - whole)).exp()
            earlier = logits.new_zeros(logits.shape[0], label)
            yield torch.cat([earlier, weight, -weight * (after - rest).exp()], 1)
            left = rest


class Bernoulli(Likelihood):
    """One logit a sample: outputs ``(samples,)`` or ``(samples, 1)``, targets 0 or 1 of either shape."""

    name = "binary"

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Bernoulli.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Labels for likelihood='binary' must be 0 or 1.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.numel() != outputs.shape[0]:
            raise PosthocUQError(
                f"likelihood='binary' needs outputs of shape (samples,) or (samples, 1), and the model gives "
                f"{tuple(outputs.shape)}."
            )
        if targets is None:
            return None
        if targets.numel() != outputs.shape[0]:
            raise PosthocUQError(
                f"{outputs.shape[0]} samples need as many labels, not {tuple(targets.shape)}."
            )
        return ((targets != 0) & (targets != 1)).any()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = _wide(outputs).flatten()
        return -F.binary_cross_entropy_with_logits(logits, targets.to(logits).flatten(), reduction="none")

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        logits = _wide(outputs).reshape(-1, 1)
        return _divergence_of_classes(torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], 1), prediction)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _wide(outputs).sigmoid() - targets.to(outputs.device).reshape(outputs.shape)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = _exact(uniforms(keys, draw + 1)[:, draw], outputs)
        return (u < _wide(outputs).sigmoid().flatten()).long()

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # E_y (p - y)^2 = p (1 - p)
        logits = _wide(outputs)
        yield (logits.sigmoid() * (-logits).sigmoid()).sqrt()


class Gaussian(Likelihood):
    """Regression: outputs ``(samples,)`` or ``(samples, outputs)`` are means, the noise variance is one
    number an output.

    Attributes:
        noise_variance: ``(outputs,)``, in squared units of the targets, or one number for all.
    """

    name = "regression"

    def __init__(self, noise_variance: Tensor | float = 1.0) -> None:
        try:
            if isinstance(noise_variance, bool):
                raise TypeError
            noise = host_double(noise_variance).detach().flatten()
        except (TypeError, ValueError, RuntimeError):
            raise PosthocUQError(
                f"noise_variance must be a number, or one number an output, not a {type(noise_variance).__name__}; it "
                f"is the same for every input."
            ) from None
        if noise.numel() == 0 or not bool((torch.isfinite(noise) & (noise > 0)).all()):
            raise PosthocUQError(f"noise_variance must be positive and finite, not {noise.tolist()}.")
        self.noise_variance = noise

    def attributes(self) -> dict[str, Any]:
        return {"name": self.name, "noise_variance": self.noise_variance.tolist()}

    def noise(self, outputs: Tensor) -> Tensor:
        """The noise variance, shaped to broadcast against outputs ``(..., outputs)``."""
        noise = self.noise_variance.to(device=outputs.device, dtype=_wide(outputs).dtype)
        return noise.squeeze(0) if noise.numel() == 1 else noise

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Gaussian.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Some targets are not finite.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim not in (1, 2):
            raise PosthocUQError(
                f"likelihood='regression' needs outputs of shape (samples,) or (samples, outputs), and the "
                f"model gives "
                f"{tuple(outputs.shape)}."
            )
        if self.noise_variance.numel() not in (1, outputs[0].numel()):
            raise PosthocUQError(
                f"noise_variance has {self.noise_variance.numel()} entries, but the model has "
                f"{outputs[0].numel()} outputs."
            )
        if targets is None:
            return None
        if targets.numel() != outputs.numel():
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}."
            )
        return ~torch.isfinite(targets).all()

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``outputs - targets``, shaped like the outputs."""
        return _wide(outputs) - targets.to(device=outputs.device, dtype=_wide(outputs).dtype).reshape(
            outputs.shape
        )

    def log_prob(self, outputs: Tensor, targets: Tensor, noise: Tensor | None = None) -> Tensor:
        """As in `Likelihood`; a `noise` variance in place of its own may need gradients."""
        noise = self.noise(outputs) if noise is None else noise
        terms = -0.5 * (self.residuals(outputs, targets) ** 2 / noise + noise.log() + log(2 * pi))
        return terms.reshape(outputs.shape[0], -1).sum(1)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        # KL(N(f, s) || N(m, s + v)) of every output, whose noise s is the prediction's
        noise, total = prediction.noise_variance, prediction.variance
        squares = (prediction.mean - _wide(outputs)).square()
        terms = 0.5 * ((noise + squares) / total - 1 + (total / noise).log())
        return terms.reshape(outputs.shape[0], -1).mean(1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.residuals(outputs, targets) / self.noise(outputs)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        size = outputs[0].numel()
        u = uniforms(keys, (draw + 1) * size)[:, draw * size :]
        normals = (
            torch.special.ndtri(u)
            .reshape(outputs.shape)
            .to(device=outputs.device, dtype=_wide(outputs).dtype)
        )
        return _wide(outputs) + normals * self.noise(outputs).sqrt()

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        scale = self.noise(outputs).rsqrt().expand(outputs.shape)
        for index in range(outputs[0].numel()):
            factor = torch.zeros_like(scale.reshape(outputs.shape[0], -1))
            factor[:, index] = scale.reshape(outputs.shape[0], -1)[:, index]
            yield factor.reshape(outputs.shape)


def _divergence_of_classes(log_probs: Tensor, prediction: Any) -> Tensor:
    """``sum_c p_c (log p_c - log q_c)``; a class that the network rules out counts for nothing."""
    predicted = prediction.probs.log() if prediction.log_probs is None else prediction.log_probs
    probs = log_probs.exp()
    terms = torch.where(probs > 0, probs * (log_probs - predicted), torch.zeros_like(probs))
    return terms.sum(1)


def _exact(numbers: Tensor, outputs: Tensor) -> Tensor:
    """Float64 numbers on the outputs' device, in float32 where it has nothing wider."""
    return numbers.to(device=outputs.device, dtype=widest(outputs.device))


def _wide(outputs: Tensor) -> Tensor:
    """Half precision outputs as float32: a softmax's tail is lost below that."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Categorical, Bernoulli, Gaussian)}


def resolve_likelihood(
    likelihood: str | Likelihood, noise_variance: Tensor | float | None = None
) -> Likelihood:
    """The `Likelihood` of that name, or the object itself.

    Raises:
        PosthocUQError: the name is unknown, or a noise is given for something that has none.
    """
    if isinstance(likelihood, Likelihood):
        if noise_variance is not None:
            raise PosthocUQError("A Likelihood object brings its own noise; leave noise_variance out.")
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        raise PosthocUQError(
            f"likelihood must be one of {sorted(LIKELIHOODS)} or a Likelihood object, not {likelihood!r}."
        )
    if likelihood == Gaussian.name:
        return Gaussian(1.0 if noise_variance is None else noise_variance)
    if noise_variance is not None:
        raise PosthocUQError(f"noise_variance belongs to likelihood='regression', not to {likelihood!r}.")
    return LIKELIHOODS[likelihood]()


def likelihood_from_attributes(attributes: dict[str, Any]) -> Likelihood:
    """The likelihood that `attributes` described."""
    name = str(attributes["name"])
    return resolve_likelihood(
        name, host_double(attributes["noise_variance"]) if name == Gaussian.name else None
    )
