"""What a head returns: a prediction together with its uncertainty.

Both classes keep a few tensors per input and never the weight samples they came from, so predictions of
many batches can be collected with `cat`. Numbers are kept in float32 at least, whatever the model ran in.
A NaN that the model produced stays a NaN in the rows it belongs to and does not disturb the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError

__all__ = ["ClassPrediction", "RegressionPrediction", "TopK"]


class TopK(NamedTuple):
    """The `k` most probable classes per input, most probable first; both tensors are (batch, k)."""

    probabilities: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction:
    """Class probabilities of a batch and how far the weights disagree about them.

    Attributes:
        probs: (batch, classes), the predictive probabilities: the mean over the weights of softmax(logits).
        logits_mean: (batch, classes), mean of the logits over the weights; (batch, 1) for a binary model,
            which has a single logit.
        logits_variance: same shape, the functional variance of the logits.
        sample_entropy: (batch,), mean over the weights of the entropy in nats, or None from a head that has
            no access to it.
        log_probs: (batch, classes), log of `probs` where a head knows it better than float32 probabilities
            can say (they underflow below 1e-45); None means log(probs).

    Raises:
        PosthocUQError: the shapes do not fit each other.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    sample_entropy: Tensor | None = None
    log_probs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.probs.ndim != 2 or self.probs.shape[1] < 2:
            raise PosthocUQError(
                f"probs must be (batch, classes) with at least 2 classes, not {_shape(self.probs)}; "
                "a binary model has the columns 1 - p and p."
            )
        inputs, classes = self.probs.shape
        binary = classes == 2 and self.logits_mean.shape == (inputs, 1)
        logits_shape = (inputs, 1) if binary else (inputs, classes)
        for name, tensor, expected in (
            ("logits_mean", self.logits_mean, logits_shape),
            ("logits_variance", self.logits_variance, logits_shape),
            ("sample_entropy", self.sample_entropy, (inputs,)),
            ("log_probs", self.log_probs, (inputs, classes)),
        ):
            if tensor is not None and tensor.shape != expected:
                raise PosthocUQError(
                    f"{name} has shape {_shape(tensor)} where {expected} is needed, "
                    f"because probs has {_shape(self.probs)}."
                )
        for name in ("probs", "logits_mean", "logits_variance", "sample_entropy", "log_probs"):
            value: Tensor | None = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _at_least_float32(value))

    @classmethod
    def from_logits(cls, logits: Tensor, *, binary: bool = False) -> ClassPrediction:
        """Average over weight samples (Monte Carlo estimate of the predictive distribution).

        `probs = 1/S sum_s softmax(logits_s)`. The variance of the logits is the unbiased estimate (divided
        by S - 1); with a single sample it is 0, for one point says nothing about spread.

        Args:
            logits: (samples, batch, classes); with `binary` (samples, batch) or (samples, batch, 1), the
                log odds of class 1. A logit of minus infinity (a masked class) has probability 0 and counts
                as certain: variance 0.
            binary: the model has one Bernoulli logit; the prediction then has the two classes 0 and 1.

        Raises:
            PosthocUQError: wrong number of dimensions, no sample, fewer than two classes, integer logits.
        """
        logits = _at_least_float32(logits)
        if binary:
            if logits.ndim == 2:
                logits = logits.unsqueeze(-1)
            if logits.ndim != 3 or logits.shape[-1] != 1:
                raise PosthocUQError(
                    f"binary logits must be (samples, batch) or (samples, batch, 1), not {_shape(logits)}."
                )
            log_probs = torch.cat(
                [torch.nn.functional.logsigmoid(-logits), torch.nn.functional.logsigmoid(logits)], dim=-1
            )
        else:
            if logits.ndim != 3 or logits.shape[-1] < 2:
                raise PosthocUQError(
                    "logits must be (samples, batch, classes) with at least 2 classes, not "
                    f"{_shape(logits)}; for one Bernoulli logit pass binary=True."
                )
            log_probs = torch.log_softmax(logits, dim=-1)
        mean, variance = _moments(logits)
        probs = log_probs.exp()
        return cls(
            probs=probs.mean(dim=0),
            logits_mean=mean,
            # minus infinity in every sample gives the NaN of inf - inf
            logits_variance=torch.where(torch.isneginf(mean), torch.zeros_like(variance), variance),
            sample_entropy=_entropy(probs).mean(dim=0),
            log_probs=torch.logsumexp(log_probs, dim=0) - math.log(logits.shape[0]),
        )

    def __len__(self) -> int:
        """Number of inputs."""
        return self.probs.shape[0]

    def __repr__(self) -> str:
        return f"ClassPrediction(inputs={len(self)}, classes={self.probs.shape[1]})"

    def entropy(self) -> Tensor:
        """(batch,), in nats: total uncertainty, the entropy of the mean probabilities, -sum_c p_c log p_c."""
        return _entropy(self.probs)

    def expected_entropy(self) -> Tensor:
        """(batch,), in nats: the part that noise in the labels explains, E_w[H(p(y | x, w))].

        Raises:
            PosthocUQError: the head that made this prediction does not give it.
        """
        if self.sample_entropy is None:
            raise PosthocUQError(
                "This prediction holds no expected entropy, because its head does not look at single weight "
                'samples; use head="sampling" for expected entropy and mutual information.'
            )
        return self.sample_entropy

    def mutual_information(self) -> Tensor:
        """(batch,), in nats: what knowing the weights would tell about the label, I[y; w | x].

        The difference of `entropy` and `expected_entropy`, never below 0 (Houlsby et al., "Bayesian Active
        Learning for Classification and Preference Learning", 2011; there called BALD).

        Raises:
            PosthocUQError: the head that made this prediction gives no expected entropy.
        """
        return (self.entropy() - self.expected_entropy()).clamp(min=0)

    def epistemic(self) -> Tensor:
        """(batch,): what the weights do not know, the mean over classes of the variance of the logits."""
        return self.logits_variance.mean(dim=-1)

    def max_probability(self) -> Tensor:
        """(batch,): the probability of the predicted class, the usual confidence."""
        return self.probs.amax(dim=-1)

    def predicted(self) -> Tensor:
        """(batch,), int64: the most probable class."""
        return self.probs.argmax(dim=-1)

    def top_k(self, k: int) -> TopK:
        """The `k` most probable classes, most probable first.

        Raises:
            PosthocUQError: `k` is below 1 or above the number of classes.
        """
        classes = self.probs.shape[1]
        if not 1 <= k <= classes:
            raise PosthocUQError(f"top_k needs k between 1 and the {classes} classes, not {k}.")
        probabilities, labels = self.probs.topk(k, dim=-1)
        return TopK(probabilities, labels)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the mean probability of the given classes.

        Args:
            targets: (batch,), integer labels.

        Raises:
            PosthocUQError: wrong shape, labels that are not integers or out of range.
        """
        inputs, classes = self.probs.shape
        if targets.shape != (inputs,) or targets.is_floating_point() or targets.is_complex():
            raise PosthocUQError(
                f"log_prob needs {inputs} integer labels of shape ({inputs},), not {targets.dtype} of shape "
                f"{_shape(targets)}."
            )
        # checked here because an index out of range on a GPU ends the process's use of it
        if inputs and not bool(((targets >= 0) & (targets < classes)).all()):
            raise PosthocUQError(f"log_prob needs labels between 0 and {classes - 1}.")
        log_probs = self.probs.log() if self.log_probs is None else self.log_probs
        index = targets.to(device=log_probs.device, dtype=torch.int64).unsqueeze(-1)
        return log_probs.gather(-1, index).squeeze(-1)

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, with the scores that follow from them; what is unknown is left out."""
        values = {
            "probs": self.probs,
            "logits_mean": self.logits_mean,
            "logits_variance": self.logits_variance,
            "predicted": self.predicted(),
            "entropy": self.entropy(),
            "epistemic": self.epistemic(),
        }
        if self.sample_entropy is not None:
            values["expected_entropy"] = self.sample_entropy
            values["mutual_information"] = self.mutual_information()
        return values

    def to(self, device: torch.device | str) -> ClassPrediction:
        """The same prediction with its tensors on `device`."""
        return ClassPrediction(
            self.probs.to(device),
            self.logits_mean.to(device),
            self.logits_variance.to(device),
            None if self.sample_entropy is None else self.sample_entropy.to(device),
            None if self.log_probs is None else self.log_probs.to(device),
        )

    @staticmethod
    def cat(predictions: Sequence[ClassPrediction]) -> ClassPrediction:
        """Predictions of several batches as one, in order; what one of them lacks, the whole lacks.

        Raises:
            PosthocUQError: nothing to join, or numbers of classes or of logits that differ.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        widths = {(p.probs.shape[1], p.logits_mean.shape[1]) for p in predictions}
        if len(widths) > 1:
            raise PosthocUQError(f"cat got predictions of different (classes, logits): {sorted(widths)}.")
        entropies = [p.sample_entropy for p in predictions if p.sample_entropy is not None]
        exact = any(p.log_probs is not None for p in predictions)
        log_probs = [p.probs.log() if p.log_probs is None else p.log_probs for p in predictions]
        return ClassPrediction(
            torch.cat([p.probs for p in predictions]),
            torch.cat([p.logits_mean for p in predictions]),
            torch.cat([p.logits_variance for p in predictions]),
            torch.cat(entropies) if len(entropies) == len(predictions) else None,
            torch.cat(log_probs) if exact else None,
        )


@dataclass(frozen=True, eq=False, repr=False, init=False)
class RegressionPrediction:
    """A Gaussian over each output, its variance split into what the weights and what the noise contribute.

    Attributes:
        mean: (batch,) or (batch, outputs), as the model gave it.
        epistemic_variance: same shape, in squared units of the output: variance over the weights.
        noise_variance: same shape once stored; a number, a tensor of shape (outputs,) or anything else that
            broadcasts to `mean` is accepted. Variance of the observation noise.

    Raises:
        PosthocUQError: the shapes do not fit, or the noise variance is a negative number.
    """

    mean: Tensor
    epistemic_variance: Tensor
    noise_variance: Tensor

    def __init__(self, mean: Tensor, epistemic_variance: Tensor, noise_variance: Tensor | float) -> None:
        if mean.ndim not in (1, 2):
            raise PosthocUQError(f"mean must be (batch,) or (batch, outputs), not {_shape(mean)}.")
        if epistemic_variance.shape != mean.shape:
            raise PosthocUQError(
                f"epistemic_variance has shape {_shape(epistemic_variance)} but mean has {_shape(mean)}."
            )
        mean, epistemic_variance = _at_least_float32(mean), _at_least_float32(epistemic_variance)
        if not isinstance(noise_variance, Tensor) and not noise_variance >= 0:
            raise PosthocUQError(f"noise_variance must be at least 0, not {noise_variance}.")
        noise = torch.as_tensor(noise_variance, dtype=mean.dtype, device=mean.device)
        try:
            noise = noise.expand(mean.shape)
        except RuntimeError:
            raise PosthocUQError(
                f"noise_variance of shape {_shape(noise)} does not broadcast to the mean's {_shape(mean)}."
            ) from None
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "epistemic_variance", epistemic_variance)
        object.__setattr__(self, "noise_variance", noise)

    @classmethod
    def from_samples(cls, outputs: Tensor, noise_variance: Tensor | float) -> RegressionPrediction:
        """Mean and unbiased variance over weight samples; with a single sample the variance is 0.

        Args:
            outputs: (samples, batch) or (samples, batch, outputs), of the model under each weight sample.
            noise_variance: see the class.

        Raises:
            PosthocUQError: wrong number of dimensions, no sample, or noise that does not fit.
        """
        if outputs.ndim not in (2, 3):
            raise PosthocUQError(
                f"outputs must be (samples, batch) or (samples, batch, outputs), not {_shape(outputs)}."
            )
        mean, variance = _moments(_at_least_float32(outputs))
        return cls(mean, variance, noise_variance)

    def __len__(self) -> int:
        """Number of inputs."""
        return self.mean.shape[0]

    def __repr__(self) -> str:
        outputs = "" if self.mean.ndim == 1 else f", outputs={self.mean.shape[1]}"
        return f"RegressionPrediction(inputs={len(self)}{outputs})"

    @property
    def variance(self) -> Tensor:
        """Shape of `mean`: total predictive variance, epistemic plus noise."""
        return self.epistemic_variance + self.noise_variance

    @property
    def standard_deviation(self) -> Tensor:
        """Shape of `mean`, in units of the output: square root of the total variance."""
        return self.variance.sqrt()

    def epistemic(self) -> Tensor:
        """(batch,): what the weights do not know, the mean over outputs of the epistemic variance."""
        return self.epistemic_variance if self.mean.ndim == 1 else self.epistemic_variance.mean(dim=-1)

    def quantile(self, q: float) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        if not 0 < q < 1:
            raise PosthocUQError(f"quantile needs a probability strictly between 0 and 1, not {q}.")
        return self.mean + NormalDist().inv_cdf(q) * self.standard_deviation

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like `mean`, between which an observation falls with probability `level`.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1.
        """
        if not 0 < level < 1:
            raise PosthocUQError(f"interval needs a level strictly between 0 and 1, not {level}.")
        # the lower tail keeps its digits for levels so close to 1 that (1 + level) / 2 rounds to 1
        half_width = -NormalDist().inv_cdf((1 - level) / 2) * self.standard_deviation
        return self.mean - half_width, self.mean + half_width

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log density of the Gaussian with the total variance, summed over outputs.

        Args:
            targets: exactly the shape of `mean`, so that nothing broadcasts by accident.

        Raises:
            PosthocUQError: the shape differs, or the total variance is not positive somewhere.
        """
        if targets.shape != self.mean.shape:
            raise PosthocUQError(
                f"log_prob needs targets of shape {_shape(self.mean)}, not {_shape(targets)}."
            )
        variance = self.variance
        if bool((variance <= 0).any()):
            raise PosthocUQError("log_prob needs a positive variance; give a noise_variance above 0.")
        residual = targets.to(device=self.mean.device, dtype=self.mean.dtype) - self.mean
        density = -0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
        return density if density.ndim == 1 else density.sum(dim=-1)

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, with the total variance."""
        return {
            "mean": self.mean,
            "epistemic_variance": self.epistemic_variance,
            "noise_variance": self.noise_variance,
            "variance": self.variance,
        }

    def to(self, device: torch.device | str) -> RegressionPrediction:
        """The same prediction with its tensors on `device`."""
        return RegressionPrediction(
            self.mean.to(device), self.epistemic_variance.to(device), self.noise_variance.to(device)
        )

    @staticmethod
    def cat(predictions: Sequence[RegressionPrediction]) -> RegressionPrediction:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or output shapes that differ.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        shapes = {tuple(p.mean.shape[1:]) for p in predictions}
        if len(shapes) > 1:
            raise PosthocUQError(f"cat got predictions of different output shapes: {sorted(shapes)}.")
        return RegressionPrediction(
            torch.cat([p.mean for p in predictions]),
            torch.cat([p.epistemic_variance for p in predictions]),
            torch.cat([p.noise_variance for p in predictions]),
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise PosthocUQError(f"Expected floating-point numbers, got {tensor.dtype}.")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over the leading dimension; variance 0 for a single sample."""
    if samples.shape[0] == 0:
        raise PosthocUQError("A prediction needs at least one weight sample.")
    if samples.shape[0] == 1:
        return samples[0], torch.zeros_like(samples[0])
    return samples.mean(dim=0), samples.var(dim=0, correction=1)


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, with 0 log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(dim=-1)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
