"""The prior of a regression whose noise is that of new data, by leave-one-out.

A regression's mean does not move with the prior, so that a wide posterior can harm only the intervals where data are,
and there the error of new data is known. So the width is that of the marginal likelihood at this noise; where that
changes predictions of training inputs little, as of a dense covariance of few weights, it is wider. All variances are
then made smaller by one factor, so that on training inputs the total stays about the known error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import inf, isfinite, log10
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double, full_precision
from posthoc_uq.fitting.faithful import (
    Divergence,
    other_settings,
    scaled_variances,
    set_faithful,
    smallest_prior_within_budget,
    widest_decade,
)
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.posteriors.history import FaithfulRecord, Trial, Trials
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import find_evidence
from posthoc_uq.posteriors.settings import Hyperparameters

WIDEST = 0.03
"""Nats: the mean divergence of predictions of left-out rows, from which the evidence alone sets the width."""

_MAX_SHARE = 0.9  # of the noise that a variance of the weights counts for, where its row is taken out
_LOOKED_AT = 3.0  # decades below the prior of the evidence that are looked at
_LEAST_FACTOR = 0.3  # on all variances


class _Width(NamedTuple):
    """How wide a posterior is on training inputs.

    Attributes:
        left_out: mean divergence from the network, in nats, with the variance that every row would have if it were left
            out: ``v / (1 - v / s^2)`` at the noise s^2.
        divergence: the same with the variance v that it has.
        factor: on all variances, with which their total is s^2 on the mean: ``1 / (1 + mean v / s^2)``, the mean of
            those of the outputs, which is where the likelihood is largest if the error of each is its s^2.
    """

    left_out: float
    divergence: float
    factor: float


class _Widths(Divergence):
    """`_Width` by decade of the prior precision.

    Attributes:
        last: of the last evaluation.
    """

    last = _Width(inf, inf, 1.0)

    def _mean(self, predictor: Predictor, pairs: Iterable[tuple[Any, Any]]) -> float:
        shares = list[Tensor]()
        for distribution, _ in pairs:
            prediction: Any = predictor.prediction_of(distribution)
            shares.append(as_double(prediction.epistemic_variance / prediction.noise_variance).flatten(1))
        share = torch.cat(shares)
        kept, factors = share.clamp(max=_MAX_SHARE), 1 / (1 + share.mean(0))
        self.last = _Width(
            *(float(each.mean()) for each in (_nats(kept / (1 - kept)), _nats(share), factors))
        )
        return self.last.left_out


def _nats(share: Tensor) -> Tensor:
    """The divergence of a Gaussian from one whose variance is larger by this share."""
    return 0.5 * (share.log1p() + 1 / (1 + share) - 1)


@full_precision()
def set_by_known_noise(
    inputs: Sequence[Batch], predictor: Predictor, budget: float, *, seed: int, progress: bool
) -> Posterior:
    """The predictor's posterior with the width that follows from its noise, which is that of new data.

    With the prior precision e of the largest evidence, and k, the smallest down to a thousandth of e for which
    predictions of left-out rows stay within `WIDEST` nats of the network's, it is e where e is already beyond that, and
    ``sqrt(e k)`` elsewhere; never narrower than the faithful prior. Then all variances are multiplied by
    ``1 / (1 + mean v / s^2)``, and by 0.3 at the least. Where nothing bounds the evidence, the prior is the faithful
    one.

    Args:
        inputs: training inputs.
        predictor: predicts them; its posterior's record names its head.
        budget: of the faithful prior, in nats.
        seed: of the draws.
        progress: whether to show bars.
    """
    posterior = predictor.posterior
    evidence = find_evidence(posterior, progress=progress)
    trials = evidence.history.trials
    assert trials is not None and isinstance(evidence.prior_precision, float)
    if trials.at_edge:  # nothing bounds it
        return set_faithful(inputs, predictor, budget, seed=seed, progress=progress)
    widths = _Widths(inputs, predictor, seed=seed, matched=False, advance=lambda _: None)
    tried = list[Trial]()

    @cache
    def width(decade: float) -> _Width:
        settings = replace(posterior.settings, prior_precision=10.0**decade)
        trial = widths.evaluate(settings)
        found = widths.last if isfinite(trial.objective) else _Width(inf, inf, 1.0)
        tried.append(Trial(settings, found.divergence))
        return found

    decade = log10(evidence.prior_precision)
    if width(decade).left_out <= WIDEST:
        low = decade - _LOOKED_AT
        bound, _ = smallest_prior_within_budget(
            lambda each: width(each).left_out, WIDEST, decade, low, decade
        )
        decade = (decade + bound) / 2
    if (
        width(decade).divergence < budget
    ):  # else the faithful prior, above which nothing is outside, is narrower
        low = min(decade, widest_decade(posterior))
        decade, _ = smallest_prior_within_budget(
            lambda each: width(each).divergence, budget, decade, low, decade
        )
    widths.require(width(decade).left_out)
    settings = replace(posterior.settings, prior_precision=10.0**decade)
    return _recorded(posterior, settings, width(decade), predictor.head, tried, widths.samples)


def _recorded(
    posterior: Posterior, found: Hyperparameters, width: _Width, head: str, tried: list[Trial], samples: int
) -> Posterior:
    """The posterior at the settings that were found, its variances made smaller by one factor, with the records."""
    factor = max(_LEAST_FACTOR, width.factor)
    chosen = posterior.at(scaled_variances(found, factor))
    history, left_out = chosen.history, chosen.history.left_out
    how = dict(history.tuning)
    how["prior precision"] = (
        f"by the log marginal likelihood at leave-one-out's noise, and wider where left-out rows allow it: "
        f"{width.divergence:.3g} nats from the network on {samples} training inputs"
    )
    how["noise variance"] += (
        f"; {factor:.3g} times that, as are the weights' variances, so that their total is that error"
    )
    trials = Trials("faithful", ("prior_precision",), tried)
    trials.chosen = next(trial for trial in tried if trial.settings == found)
    record = FaithfulRecord(
        head=head,
        value=chosen.settings.plain()["prior_precision"],
        temperature=chosen.temperature,
        network_temperature=chosen.temperature,
        divergence=width.divergence,
        budget=max(WIDEST, width.divergence),
        settings=other_settings(chosen),
    )
    assert left_out is not None
    left_out = left_out.changed(noise_scale=chosen.noise_scale)
    new = replace(history, tuning=how, faithful=record, trials=trials, left_out=left_out)
    return chosen.replaced(history=new)
