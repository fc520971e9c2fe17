"""Novelty: the share of the prior's uncertainty that the data left, by the last layer's inputs or by the posterior."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import TEMPORARY_BYTES, without_autocast
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import model_device, statistics_dtype
from posthoc_uq.curvature.features import (
    calls_of,
    feature_rows,
    grid_of,
    rows_of_stage,
    watched_for,
    watching,
)
from posthoc_uq.heads.jacobians import (
    Gradient,
    WeightCovariance,
    check_shape,
    pull_back,
    track_layers,
)
from posthoc_uq.layers.capture import WatchedLayer
from posthoc_uq.layers.layer import Call
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.likelihoods.prediction import Unread
from posthoc_uq.posteriors import FeatureGrams, Posterior, WeightPrior
from posthoc_uq.posteriors.features import SMOOTHING

Of = Literal["layers", "class", "top", "all"]

_MAX_ROWS = 2**14  # samples or positions whose novelty is computed at once
_MAX_HELD = 2**20  # bytes that a prediction holds for a novelty that nobody has read

NOT_KEPT = (
    "This posterior has no statistics of the last layer's inputs: its data changed after the fit (uq.update), or it "
    "was not made by uq.fit. Fit again on the data that it is to hold, or ask for predictor.novelty(..., of='top')."
)


def checked_of(of: str, posterior: Posterior) -> Of:
    """The form of novelty: where a fit found no layer with one row a sample, ``"layers"`` and ``"class"`` are
    ``"top"``.

    Raises:
        PosthocUQError: there is no such form, or the posterior lacks what it needs.
    """
    if of not in get_args(Of):
        raise PosthocUQError(f"of must be one of {get_args(Of)}, not {of!r}.")
    if of in ("layers", "class") and posterior.features is None:
        if posterior.history.novelty != "posterior":
            raise PosthocUQError(NOT_KEPT)
        return "top"
    return of  # type: ignore[return-value]


def class_novelty(
    network: nn.Module, posterior: Posterior, batch: Batch, smoothing: float | None = None
) -> Tensor:
    """``(samples,)`` by the last layer's inputs alone, in one forward pass of `network`; see `FeatureGrams.novelty`."""
    features = known_features(posterior)
    rows, grid = _rows_of_last(features, caught_calls(network, watched_for(features.layer), batch), batch)
    return _computed(partial(features.novelty, smoothing=features.ridge_for(rows, smoothing)), rows, grid)


def novelty(network: nn.Module, posterior: Posterior, batch: Batch) -> Tensor:
    """``(samples,)`` by the last layer and the stages, in one forward pass of `network`; see
    `FeatureGrams.over_layers`.
    """
    features = known_features(posterior)
    return novelty_of_calls(features, caught_calls(network, features.watched, batch), batch)


def known_features(posterior: Posterior) -> FeatureGrams:
    """The statistics that novelty goes by.

    Raises:
        PosthocUQError: the posterior has none.
    """
    if posterior.features is None:
        raise PosthocUQError(NOT_KEPT)
    return posterior.features


def caught_calls(network: nn.Module, watched: Sequence[WatchedLayer], batch: Batch) -> list[Call]:
    """The calls of these layers in one forward pass of `network`."""
    with _without_gradients(), watching(network, watched, batch.attention_mask) as calls:
        (batch if torch.compiler.is_compiling() else batch.copied()).call(network)
    return calls


def novelty_of_calls(features: FeatureGrams, calls: Sequence[Call], batch: Batch) -> Tensor:
    """By the last layer and the stages, from their calls in a pass; ``(samples, *positions)`` where every position has
    features of its own.
    """
    if features.source != "positions":
        rows = rows_of(features, calls, batch)
        return _computed(_by_rows(features, rows), rows)
    rows, grid = _rows_of_last(features, calls, batch)
    assert grid is not None
    if not features.stages:
        return _computed(partial(features.novelty, smoothing=features.ridge_for(rows)), rows, grid)
    samples = count_samples(batch)
    ratios = [_in_parts(partial(features.novelty, smoothing=SMOOTHING), rows)]
    with _without_gradients():
        for stage in features.stages:
            pixels = rows_of_stage(calls, stage.layer, samples)
            own = _in_parts(stage.novelty, pixels.flatten(0, -2)).reshape(pixels.shape[:-1])
            ratios.append(F.interpolate(own.unsqueeze(1), size=grid, mode="nearest").flatten())
        return features.joined(ratios).to(rows).reshape(-1, *grid)


def novelty_when_read(features: FeatureGrams, rows: Tensor) -> Tensor | Unread:
    """The novelty of samples with these rows of features, from `rows_of`, computed when it is first read, where no more
    than 1 MiB has to be held for that; else at once.

    Raises:
        PosthocUQError: the features have another length than in the fit.
    """
    compute = partial(_computed, _by_rows(features, rows))
    return Unread(compute, rows) if rows.nbytes <= _MAX_HELD else compute(rows)


def rows_of(
    features: FeatureGrams, calls: Sequence[Call], batch: Batch, last: Tensor | None = None
) -> Tensor:
    """The features of a batch by the last layer and the stages, side by side, from their calls in a pass.

    Args:
        features: of the posterior.
        calls: of the layers.
        batch: the model's arguments.
        last: the features of the last layer, where they are known.
    """
    samples = count_samples(batch)
    with _without_gradients():
        if last is None:
            last = feature_rows(calls, features.layer, samples, attention_mask=batch.attention_mask)
        features.ridge_for(last)
        parts = [rows_of_stage(calls, stage.layer, samples) for stage in features.stages]
        return torch.cat([last, *(part.to(last) for part in parts)], 1) if parts else last


def _rows_of_last(
    features: FeatureGrams, calls: Sequence[Call], batch: Batch
) -> tuple[Tensor, tuple[int, ...] | None]:
    """The features of a batch by the last layer alone, and the positions that have one row each."""
    by_position = features.source == "positions"
    with _without_gradients():
        samples, mask = count_samples(batch), batch.attention_mask
        rows = feature_rows(calls, features.layer, samples, by_position, mask)
    return rows, grid_of(calls_of(calls, features.layer)[0]) if by_position else None


def _by_rows(features: FeatureGrams, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives the novelty of rows by all layers, at this moment's smoothing."""
    if features.stages:
        return features.over_layers
    return partial(features.novelty, smoothing=features.ridge_for(rows))


def _computed(
    novelty: Callable[[Tensor], Tensor], rows: Tensor, grid: tuple[int, ...] | None = None
) -> Tensor:
    found = _in_parts(novelty, rows).to(rows)
    return found if grid is None else found.reshape(-1, *grid)


def _in_parts(novelty: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the number of rows is a symbol
        return novelty(rows)
    with _without_gradients(), without_autocast(rows.device.type):
        return torch.cat([novelty(part) for part in rows.split(_MAX_ROWS)])


@contextmanager
def _without_gradients() -> Generator[None]:
    """Neither gradients nor inference mode, whatever the caller's mode."""
    if torch.compiler.is_compiling():  # modes make graphs of their own
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class PosteriorRatio:
    """``nu(x) = sum_v v^T J Sigma J^T v / sum_v v^T J Sigma_0 J^T v`` through a posterior, J of a network linearised in
    its weights, with ``Sigma^-1 = N I + tau 1`` and ``Sigma_0 = 1 / tau``, N the number of training samples.

    The directions v are centred, because softmax ignores what all logits have in common: ``"top"`` has one,
    ``e_top - 1 / C``, and ``"all"`` the C rows of ``1 - 1 1^T / C``. Of outputs that are no classes, ``"top"`` takes
    their sum and ``"all"`` each. For a trained posterior, ``Sigma`` is the trained covariance, and ``Sigma_0`` that
    of the training's prior. The ratio is cut at 1.

    Args:
        network: the network at the posterior's mean.
        posterior: of any method.
        of: ``"top"`` or ``"all"``.
        prior_precision: tau, which is not the posterior's own.
        residual_weight: omega of the information form.
        batch: by which the layers in use are found.

    Raises:
        PosthocUQError: a layer is used otherwise than in the fit.
    """

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        of: Of,
        prior_precision: float,
        residual_weight: float,
        batch: Batch,
    ) -> None:
        self._of = of
        self._centred = posterior.likelihood.softmax
        if posterior.has_free_prior_precision:
            precisions = dict.fromkeys(posterior.layers, prior_precision)
        else:
            precisions = posterior.training_precisions()
        smooth = {
            "scale": posterior.evidence.total,
            "prior_precision": prior_precision,
            "residual_weight": residual_weight,
        }
        smooth = {name: value for name, value in smooth.items() if name in posterior.tunable}
        smoothed = posterior.at(replace(posterior.settings, **smooth))
        # the novelty's own prior is the same for all weights
        smoothed = smoothed.replaced(weight_prior=WeightPrior())
        self._prior = {name: 1 / precision for name, precision in precisions.items()}
        self._dtype, device = statistics_dtype(network, None), model_device(network)
        limit = temporary_limit(TEMPORARY_BYTES, device)
        self._posterior = WeightCovariance(smoothed, self._dtype, device, limit)
        self._capture = track_layers(network, posterior, batch.copied())

    def __call__(self, batch: Batch) -> Tensor:
        """``(samples,)`` in (0, 1].

        Raises:
            PosthocUQError: outputs of more dimensions, or a prior without variance where the posterior has some.
        """
        samples = count_samples(batch)
        with torch.inference_mode(False), torch.no_grad():
            recording = self._capture.run(batch, samples)
            outputs = recording.outputs.detach()
            check_shape(outputs, samples)
            number = outputs[0].numel() if self._of == "all" else 1
            gradient = self._directions(outputs)
            item = torch.finfo(self._dtype).bits // 8
            step = max(1, 4 * TEMPORARY_BYTES // max(1, recording.numbers * item))
            total = prior_total = torch.zeros(samples, dtype=torch.float64, device="cpu")
            with torch.autocast(outputs.device.type, enabled=False):
                for start in range(0, number, step):
                    numbers = range(start, min(number, start + step))
                    pulled = pull_back(recording, gradient, numbers, self._dtype, last=numbers.stop == number)
                    part, prior_part = self._posterior.with_prior(pulled, samples, len(numbers), self._prior)
                    total, prior_total = (
                        total.to(part.device) + part,
                        prior_total.to(prior_part.device) + prior_part,
                    )
        return _ratio(total, prior_total).to(
            outputs.device, torch.promote_types(outputs.dtype, torch.float32)
        )

    def _directions(self, outputs: Tensor) -> Gradient:
        flat = outputs.reshape(outputs.shape[0], -1)

        def gradient(number: int) -> Tensor:
            direction = torch.zeros_like(flat)
            if self._of == "all":
                direction[:, number] = 1
            elif self._centred:
                direction.scatter_(1, flat.argmax(1, keepdim=True), 1)
            else:
                direction.fill_(1)
            if self._centred:
                direction -= 1 / flat.shape[1]
            return direction.reshape(outputs.shape)

        return gradient


def _ratio(posterior_variance: Tensor, prior_variance: Tensor) -> Tensor:
    posterior_variance = posterior_variance.clamp(min=0)
    if bool(((prior_variance <= 0) & (posterior_variance > 0)).any()):
        raise PosthocUQError(
            "The prior has no variance at some of these inputs, where the posterior has some, so that there is no "
            "share of it; ask for predictor.novelty(..., of='class')."
        )
    share = torch.where(
        prior_variance > 0, posterior_variance / prior_variance, torch.ones_like(posterior_variance)
    )
    return share.clamp(torch.finfo(torch.float32).tiny, 1.0)
