"""Novelty: the share of the prior's uncertainty that the data left, by the last layer's inputs or by the posterior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.features import feature_rows, watching
from posthoc_uq.curvature.operands import temporary_limit
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.jacobians import Gradient, WeightCovariance, pull
from posthoc_uq.heads.tracking import TrackedLayers, track_layers
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.prior import training_precisions
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import statistics_dtype

Of = Literal["class", "top", "all"]

NOT_KEPT = (
    "This posterior keeps nothing of the last layer's inputs, so it cannot tell how novel an input is: it is from a "
    "file of an older release, or was not made by uq.fit. Fit again, or ask for predictor.novelty(..., of='top')."
)


def checked_of(of: str, posterior: Posterior) -> Of:
    """The form of novelty: where a fit found no layer with one row a sample, ``"class"`` is ``"top"``.

    Raises:
        PosthocUQError: there is no such form, or the posterior keeps nothing for it.
    """
    if of not in get_args(Of):
        raise PosthocUQError(f"of must be one of {get_args(Of)}, not {of!r}.")
    if of == "class" and posterior.features is None:
        if posterior.history.novelty != "posterior":
            raise PosthocUQError(NOT_KEPT)
        return "top"
    return of  # type: ignore[return-value]


def class_novelty(
    network: nn.Module, posterior: Posterior, batch: Batch, smoothing: float | None = None
) -> Tensor:
    """By the last layer's inputs, in one forward pass of `network`, ``(samples,)``; see `FeatureGrams.novelty`."""
    features = posterior.features
    if features is None:
        raise PosthocUQError(NOT_KEPT)
    with torch.inference_mode(False), torch.no_grad():
        with watching(network, features.layer) as calls:
            batch.copied().call(network)
        return novelty_of_calls(features, calls, count_samples(batch), smoothing)


def novelty_of_calls(
    features: FeatureGrams, calls: list[Call], samples: int, smoothing: float | None = None
) -> Tensor:
    """The same, by calls of the layer that were caught in a pass."""
    rows = feature_rows(calls, features.layer, samples)
    with torch.inference_mode(False), torch.no_grad():
        return features.novelty(rows, smoothing).to(rows)


@dataclass(frozen=True)
class RatioSettings:
    """The smoothing of the ratio through the posterior, which has nothing to do with its hyperparameters.

    Attributes:
        of: ``"top"`` or ``"all"``.
        prior_precision: tau.
        residual_weight: omega of the information form.
    """

    of: Of
    prior_precision: float
    residual_weight: float


class PosteriorRatio:
    """``nu(x) = sum_v v^T J Sigma J^T v / sum_v v^T J Sigma_0 J^T v`` through a posterior, J of a network linearised in
    its weights, with ``Sigma^-1 = N I + tau 1`` and ``Sigma_0 = 1 / tau``, N the number of training samples.

    The directions v are centred, because softmax ignores what all logits have in common: ``"top"`` has one,
    ``e_top - 1 / C``, and ``"all"`` the C rows of ``1 - 1 1^T / C``. Of outputs that are no classes, ``"top"`` takes
    their sum and ``"all"`` each. For a posterior that was trained, ``Sigma`` is what was found, and ``Sigma_0`` the
    prior of the training; the ratio is at most 1.

    Args:
        network: the network at the posterior's mean.
        posterior: of any method.
        settings: the smoothing.
        batch: settles which layers are used.
        device: of the model.

    Raises:
        PosthocUQError: a setting is out of range, or a layer is used otherwise than in the fit.
    """

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        settings: RatioSettings,
        batch: Batch,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._centred = posterior.likelihood.softmax
        if posterior.takes_prior:
            precisions = dict.fromkeys(posterior.layers, settings.prior_precision)
        else:
            precisions = training_precisions(posterior)
        smooth = {
            "scale": float(posterior.evidence.samples),
            "prior_precision": settings.prior_precision,
            "residual_weight": settings.residual_weight,
        }
        smooth = {name: value for name, value in smooth.items() if name in posterior.tunable}
        own = posterior.snapshot(replace(posterior.settings, **smooth))
        self._prior = {name: 1 / precision for name, precision in precisions.items()}
        self._dtype = statistics_dtype(network, None)
        self._budget = default_budget(device)
        self._posterior = WeightCovariance(own, self._dtype, device, temporary_limit(self._budget, device))
        with isolated_random_state():
            self._tracked: TrackedLayers = track_layers(network, posterior, batch.copied(), self._dtype)

    def __call__(self, batch: Batch) -> Tensor:
        """``(samples,)`` in (0, 1].

        Raises:
            PosthocUQError: outputs of more dimensions, or a prior without variance where the posterior has some.
        """
        samples = count_samples(batch)
        with torch.inference_mode(False), torch.no_grad():
            recording = self._tracked.capture.run(batch, samples)
            outputs = recording.outputs.detach()
            if outputs.ndim not in (1, 2) or outputs.shape[0] != samples:
                raise PosthocUQError(
                    f"Novelty through the posterior needs outputs of shape (batch,) or (batch, outputs), and {samples} "
                    f"inputs gave {tuple(outputs.shape)}."
                )
            number = outputs[0].numel() if self._settings.of == "all" else 1
            gradient = self._directions(outputs)
            item = torch.finfo(self._dtype).bits // 8
            step = max(1, 4 * self._budget // max(1, recording.numbers * item))
            left = given = torch.zeros(samples, dtype=torch.float64, device="cpu")
            with torch.autocast(outputs.device.type, enabled=False):
                for start in range(0, number, step):
                    numbers = range(start, min(number, start + step))
                    pulled = pull(recording, gradient, numbers, self._dtype, last=numbers.stop == number)
                    own, prior = self._posterior.with_prior(pulled, samples, len(numbers), self._prior)
                    left, given = left.to(own.device) + own, given.to(prior.device) + prior
        return _ratio(left, given).to(outputs.device, torch.promote_types(outputs.dtype, torch.float32))

    def _directions(self, outputs: Tensor) -> Gradient:
        flat = outputs.reshape(outputs.shape[0], -1)

        def gradient(number: int) -> Tensor:
            found = torch.zeros_like(flat)
            if self._settings.of == "all":
                found[:, number] = 1
            elif self._centred:
                found.scatter_(1, flat.argmax(1, keepdim=True), 1)
            else:
                found.fill_(1)
            if self._centred:
                found -= 1 / flat.shape[1]
            return found.reshape(outputs.shape)

        return gradient


def _ratio(left: Tensor, given: Tensor) -> Tensor:
    left = left.clamp(min=0)
    if bool(((given <= 0) & (left > 0)).any()):
        raise PosthocUQError(
            "The prior has no variance at some of these inputs, where the posterior has some, so that there is no "
            "share of it; ask for predictor.novelty(..., of='class')."
        )
    share = torch.where(given > 0, left / given, torch.ones_like(left))
    return share.clamp(torch.finfo(torch.float32).tiny, 1.0)
