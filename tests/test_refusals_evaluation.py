"""What metrics, `evaluate` and `Referral` refuse; a row each."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq import NonFiniteError
from posthoc_uq.evaluation import metrics
from posthoc_uq.likelihoods import held_out_scores, quantile

NAN, INF = math.nan, math.inf
PROBS, LABELS, X, ONE = torch.full((3, 2), 0.5), torch.zeros(3).long(), torch.zeros(3), torch.ones(1)

METRICS = {
    "one row": Row(lambda: metrics.accuracy(PROBS[0], LABELS), "probs must be"),
    "no rows": Row(lambda: metrics.accuracy(PROBS[:0], LABELS[:0]), "at least one input"),
    "fewer labels": Row(lambda: metrics.brier_score(PROBS, LABELS[:2]), "3 integers"),
    "labels of another type": Row(lambda: metrics.brier_score(PROBS, LABELS.float()), "3 integers"),
    "negative labels": Row(lambda: metrics.brier_score(PROBS, LABELS - 1), "between 0 and 1"),
    "large probabilities": Row(lambda: metrics.calibration_bins(4 * PROBS, LABELS), "softmax"),
    "all of the classes": Row(lambda: metrics.top_k_accuracy(PROBS, LABELS), "k between"),
    "no bins": Row(lambda: metrics.expected_calibration_error(PROBS, LABELS, 0), "at least one bin"),
    "bins by mass": Row(lambda: metrics.classwise_calibration_error(PROBS, LABELS, binning="mass"), "binning"),  # pyright: ignore[reportArgumentType]
    "no scores": Row(lambda: metrics.ood_auroc(ONE, ONE[:0]), "at least one score"),
    "a rate of no number": Row(lambda: metrics.ood_fpr(ONE, ONE, NAN), "tpr"),
    "a column": Row(lambda: metrics.rmse(torch.zeros(3, 1), X), r"mean \(3, 1\), targets \(3,\)"),
    "no targets": Row(lambda: metrics.rmse(X[:0], X[:0]), "at least one target"),
    "no variance": Row(lambda: metrics.gaussian_log_density(X, X, X), "positive variance"),
    "a negative deviation": Row(lambda: metrics.crps_gaussian(X, X - 1, X), "nowhere negative"),
    "an interval turned around": Row(lambda: metrics.interval_sharpness(X, X - 1), "lower end"),
    "a level in per cent": Row(lambda: metrics.coverage_curve(X, X, X, [95]), "between 0 and 1"),
    "a kind of coverage": Row(lambda: metrics.coverage_curve(X, X, X, kind="central"), "kind"),  # pyright: ignore[reportArgumentType]
    "fewer losses": Row(lambda: metrics.risk_coverage(X, X[:2]), "each of 3 inputs"),
    "all referred": Row(lambda: metrics.selective_accuracy(X, PROBS, LABELS, [1.0]), "nothing is retained"),
    "a threshold of no number": Row(lambda: metrics.referral_threshold(X, NAN), "rate"),
    "scores of one side": Row(lambda: metrics.joint_tail({"a": X}, {"b": X}), "both sides"),
    "probabilities of no number": Row(
        lambda: metrics.accuracy(PROBS * NAN, LABELS), "probs holds 6 NaN", NonFiniteError,
    ),
    "scores of no number": Row(lambda: metrics.ood_aupr(ONE, X * NAN), "scores that are NaN", NonFiniteError),
    "targets of no number": Row(
        lambda: metrics.interval_coverage(X, X, X * NAN), "targets holds 3 NaN", NonFiniteError,
    ),
    "losses of no number": Row(lambda: metrics.risk_coverage(X, X * NAN), "losses holds 3 NaN", NonFiniteError),
    "a joint score of no number": Row(
        lambda: metrics.joint_tail({"a": X}, {"a": X * NAN}), "a holds 3 NaN", NonFiniteError,
    ),
    "an infinite tail": Row(lambda: metrics.tail_of(ONE * INF), "finite", NonFiniteError),
    "a level of one": Row(lambda: quantile(held_out_scores(X), 1.0), "between 0 and 1"),
    "an infinite score": Row(lambda: held_out_scores(torch.tensor([1.0, INF])), "finite", NonFiniteError),
    "a feature of other inputs": Row(
        lambda: metrics.coverage_excess_risk(torch.ones(60), 0.9, {"a": X}), r"like covered, \(60,\)",
    ),
    "no features": Row(lambda: metrics.coverage_excess_risk(torch.ones(60), 0.9, {}), "one number an entry"),
    "too few inputs for a group": Row(lambda: metrics.coverage_excess_risk(X, 0.9, {"a": X}), "at least 50"),
    "a promised level of one": Row(lambda: metrics.coverage_excess_risk(X, 1.0, {"a": X}), "between 0 and 1"),
    "coverage of no number": Row(
        lambda: metrics.coverage_excess_risk(X * NAN, 0.9, {"a": X}), "not finite", NonFiniteError,
    ),
    "no held-out scores": Row(lambda: held_out_scores(X[:0]), "there are none"),
}  # fmt: skip


# Evaluation

INPUTS, TARGETS = inputs(), labels()
DATA = [(INPUTS, TARGETS)]


@functools.cache
def posterior(calibrated: bool = True) -> uq.Posterior:
    own = fit(net())
    given: dict[str, Any] = {"head": "linearized", "link": "probit", "progress": False}
    return uq.calibrate(own, [(inputs(200), torch.arange(200) % 3)], **given) if calibrated else own


def evaluated(models: Any = None, loader: Any = DATA, **options: Any) -> str:
    return str(uq.evaluate(net() if models is None else models, loader, progress=False, **options))


@functools.cache
def evaluation() -> uq.Evaluation:
    models = {"network": net(), "INF": uq.wrap(net(), posterior())}
    return uq.evaluate(models, DATA, progress=False)


def spoilt() -> Tensor:
    x = inputs()
    x[4] = NAN
    return x


EVALUATIONS = {
    "a rate above one": Row(lambda: evaluated(referral_rates=(1.5,)), "referral_rates must be"),
    "a referral by a number": Row(lambda: evaluated(referral=0.05), "referral must be"),
    "an unknown score of inputs": Row(lambda: evaluated(score="surprise"), "score must be one of"),
    "foreign data named as the test data": Row(lambda: evaluated(ood_loaders={"test": []}), "may not be named"),
    "no groups": Row(lambda: evaluated(joint=["entropy"]), "joint holds groups"),
    "a group of no score": Row(lambda: evaluated(joint=[("entropy", "novel")]), "score of joint must be one of"),
    "inputs alone": Row(lambda: evaluated(loader=[INPUTS]), "needs targets"),
    "a batch of inputs alone": Row(
        lambda: evaluated(loader=[*DATA, (INPUTS, None)]), "batch 1 of the loader has inputs alone",
    ),
    "labels between classes": Row(
        lambda: evaluated(loader=[(INPUTS, TARGETS.float() + 0.5)]), "Labels must be whole numbers.*torch.float32",
    ),
    "labels of the next batch": Row(  # as many in all as there are inputs
        lambda: evaluated(loader=[(INPUTS[:6], TARGETS[:5]), (INPUTS[6:], TARGETS[5:])]),
        r"Batch 0: there are 6 inputs, .* shape \(5,\)",
    ),
    "labels of no class": Row(lambda: evaluated(loader=[(INPUTS, TARGETS + 3)]), "between 0 and 2"),
    "nothing": Row(lambda: evaluated({}), "at least one predictor"),
    "a name": Row(lambda: evaluated("model"), "not a str"),
    "predictions of no number": Row(
        lambda: evaluated(loader=[(spoilt(), TARGETS)]),
        "1 of 12 predictions of 'model' on 'test' are NaN", NonFiniteError,
    ),
    "values as classes": Row(lambda: evaluated(net(outputs=1)), "pass likelihood='regression'"),
    "a score that was not found": Row(
        lambda: evaluation().threshold(0.1, "mutual_information"), "does not know the score",
    ),
    "a score that there is none of": Row(lambda: evaluation().threshold(0.1, "surprise"), "A score is one of"),
    "almost a model": Row(lambda: evaluation().threshold(0.1, name="INFO"), "Did you mean 'INF'"),
}  # fmt: skip


def referred(
    referral: uq.Referral, own: uq.Posterior | None = None, head: str | None = None, **options: Any
) -> Any:
    return referral(uq.wrap(net(), posterior() if own is None else own, head, **options)(INPUTS))


REFERRALS = {
    "a rate above all": Row(lambda: uq.Referral(2.5), "rate must be"),
    "a rate of zero": Row(lambda: uq.Referral(0.0), "rate must be"),
    "a rate in words": Row(lambda: uq.Referral("often"), "rate must be"),  # pyright: ignore[reportArgumentType]
    "an accuracy of one": Row(lambda: uq.Referral(accuracy=1.0), "accuracy must be"),
    "a rate and an accuracy": Row(lambda: uq.Referral(0.1, accuracy=0.9), "one of the two"),
    "a score that is none": Row(lambda: uq.Referral(score="novel"), "score must be one of"),
    "a score without held-out values": Row(
        lambda: referred(uq.Referral(score="mutual_information")), "score must be one of",
    ),
    "too low a rate": Row(lambda: referred(uq.Referral(0.001)), r"at least 0\.0\d+, or calibrate with more"),
    "too high an accuracy": Row(lambda: referred(uq.Referral(accuracy=0.9999)), r"the best that is reached is 0\.\d+"),
    "inputs": Row(lambda: uq.Referral()(INPUTS), "what a predictor returned"),  # pyright: ignore[reportArgumentType]
    "no promises": Row(lambda: referred(uq.Referral(), posterior(False)), "uq.calibrate"),
    "promises of another head": Row(lambda: referred(uq.Referral(), head="sampling"), "head='sampling'.*uq.calibrate"),
    "no novelty": Row(lambda: referred(uq.Referral(), novelty=False), "novelty"),
}  # fmt: skip

TABLES = {"metric": METRICS, "evaluation": EVALUATIONS, "referral": REFERRALS}
ROWS = {f"{kind}: {name}": row for kind, table in TABLES.items() for name, row in table.items()}


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
