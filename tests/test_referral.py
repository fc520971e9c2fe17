"""`Referral`: the share that is referred, why, how extreme, in files, and what makes thresholds hold no more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq

NAMES = ("entropy", "mutual_information", "functional_variance")


@pytest.fixture
def fitted() -> tuple[nn.Module, uq.Posterior, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(230, 3, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, uq.fit(model, [(x, x.argmax(1))], prior_precision=2.0, progress=False), x


def test_several_scores_share_the_rate_and_stay_in_the_file(fitted, tmp_path: Path) -> None:
    model, posterior, x = fitted
    predictor = uq.wrap(model, posterior, "sampling", n_samples=12)
    assert not predictor.referral.applies and predictor.referral.thresholds == {}
    prediction = predictor(x)
    referral = uq.Referral(0.1, NAMES).fit(predictor, prediction)
    scores, thresholds = prediction.scores(), referral.thresholds
    reasons, flags, tail = referral.reasons(prediction), referral(prediction), referral.tail(prediction)
    assert tuple(thresholds) == tuple(reasons) == NAMES and 20 < int(flags.sum()) <= 23
    for name in NAMES:
        assert torch.equal(reasons[name], scores[name] > thresholds[name]) and bool(reasons[name].any())
    assert torch.equal(flags, torch.stack(list(reasons.values())).any(0))
    shares = torch.stack([(scores[s][:, None] <= scores[s]).double().mean(1) for s in NAMES]).amin(0)
    assert torch.allclose(tail, shares, atol=0.01) and tail[flags].max() < tail[~flags].min() + 0.005
    assert bool((referral.tail(predictor(100 * x)) == 0).any())

    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert {len(score["quantiles"]) for score in loaded.history.referral["scores"].values()} == {200}
    again = uq.wrap(model, loaded, "sampling", n_samples=12)
    assert again.referral.applies and again.referral.thresholds == thresholds
    assert torch.equal(again.referral(again(x)), flags) and torch.equal(again.referral.tail(again(x)), tail)
    assert f"entropy above {thresholds['entropy']:.4g} or mutual_information above" in str(loaded.report())
    assert "entropy above" in repr(again.referral)


def test_by_default_hard_and_foreign_inputs() -> None:
    """White pictures and noise are referred beside digits, at the rate that was set for digits."""
    generator, digits = torch.Generator().manual_seed(0), load_digits()
    order = torch.randperm(len(digits.target), generator=generator)
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    x, y, held_out, fresh = inputs[:900], labels[:900], inputs[900:1400], inputs[1400:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), 0.003)
    for _ in range(20):
        for chosen in torch.randperm(900, generator=generator).split(60):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimiser.step()
    noise = torch.rand(200, 64, generator=generator)
    foreign = {"noise": noise, "white": 1 - 0.05 * noise}
    posterior = uq.fit(model, [(x, y)], method="diag", layers="last", progress=False)
    for head in ("linearized", "sampling", "moments"):
        predictor = uq.wrap(model, posterior, head)

        def share(referral: uq.Referral, data: Tensor, predictor: uq.Predictor = predictor) -> float:
            return referral(predictor.predict([data], progress=False)).double().mean().item()

        alone = uq.Referral(0.05, "entropy").fit(predictor, [held_out])
        both = uq.Referral().fit(predictor, [held_out])  # a loader, predicted
        assert list(both.thresholds) == ["entropy", "novelty"]
        assert 0.04 < share(both, held_out) <= 0.05 and share(both, fresh) < 0.08
        assert min(share(both, data) for data in foreign.values()) > 0.75
        assert min(share(alone, data) for data in foreign.values()) < 0.5

        without = uq.wrap(model, posterior, head, novelty=False)
        assert list(uq.Referral(0.05).fit(without, [held_out]).thresholds) == ["entropy"]
        assert int(without.referral(without.predict([held_out], progress=False)).sum()) == 25

    evaluation = uq.evaluate(
        predictor, [(held_out, labels[900:1400])], score="max_probability", progress=False
    )
    assert list(evaluation.set_referral(0.05).thresholds) == ["max_probability", "novelty"]


def test_values_by_several_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    y = x + 0.1 * torch.randn(80, 2, generator=generator)
    posterior = uq.fit(model, [(x, y)], likelihood="regression", prior_precision=2.0, progress=False)
    predictor = uq.wrap(model, posterior, "linearized")
    referral = uq.Referral(0.2, ("standard_deviation", "epistemic_variance")).fit(predictor, [x])
    assert 15 <= int(referral(predictor(x)).sum()) <= 16
    assert bool(referral(predictor(100 + x)).all())


def test_an_input_whose_score_is_nan_is_always_referred(fitted) -> None:
    model, posterior, x = fitted
    predictor = uq.wrap(model, posterior, "sampling", n_samples=3)
    prediction = predictor(x)
    referral = uq.Referral(0.0, ["entropy", "functional_variance"]).fit(predictor, prediction)
    assert not bool(referral(prediction).any())
    variance = prediction.logits_variance.clone()
    variance[1] = float("nan")
    broken = replace(prediction, logits_variance=variance)  # which somebody made elsewhere
    assert referral(broken).nonzero().tolist() == [[1]]
    assert referral.reasons(broken)["functional_variance"].nonzero().tolist() == [[1]]
    assert not bool(referral.reasons(broken)["entropy"].any())
    assert referral.tail(broken).isnan().nonzero().tolist() == [[1]]
    with pytest.raises(uq.NonFiniteError, match="1 of 230"):
        uq.Referral(0.1, "functional_variance").fit(predictor, broken)


def test_another_head_or_setting_is_refused(fitted) -> None:
    model, posterior, x = fitted
    predictor = uq.wrap(model, posterior, "sampling", n_samples=12)
    referral = uq.Referral(0.1).fit(predictor, [x])
    for other, words in (
        (uq.wrap(model, posterior, "linearized"), "head='sampling'.*head='linearized'"),
        (uq.wrap(model, posterior, "sampling", n_samples=3), r"n_samples=12.*n_samples=3"),
    ):
        assert not other.referral.applies
        with pytest.raises(uq.PosthocUQError, match=words):
            other.referral(other(x))
    with pytest.warns(UserWarning, match="no longer applies"):
        posterior.prior_precision = 2 * posterior.prior_precision
    referral(predictor(x))  # its draws are the ones that the threshold was set for
    anew = uq.wrap(model, posterior, "sampling", n_samples=12)
    with pytest.raises(uq.PosthocUQError, match="hyperparameters changed"):
        anew.referral(anew(x))


def test_after_calibrating(fitted) -> None:
    model, posterior, x = fitted
    predictor = uq.wrap(model, posterior, "moments")
    uq.Referral(0.1).fit(predictor, [x])
    with pytest.warns(UserWarning, match=r"referral threshold \(entropy above .*no longer applies"):
        predictor.calibrate([x], progress=False)
    with pytest.raises(uq.PosthocUQError, match="set it again"):
        predictor.referral(predictor(x))


def test_thresholds_that_hold_no_more_are_reported_once(fitted) -> None:
    model, posterior, x = fitted

    def said(change: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            change()
        lines = [w for w in found if "referral" in str(w.message)]
        assert all(w.category is UserWarning and w.filename == __file__ for w in lines)
        return [str(w.message) for w in lines]

    def set_to(**values: float) -> None:
        for name, value in values.items():
            setattr(posterior, name, value)

    def anew() -> None:
        uq.Referral(0.1, ("entropy", "novelty")).fit(uq.wrap(model, posterior), [x])

    def tune(**options: Any) -> None:
        uq.tune(posterior, progress=False, **options)

    held_out = {"loader": [(x, x.argmax(1))], "prior_precisions": [1.0, 4.0]}
    assert said(lambda: set_to(prior_precision=1.0)) == [], "there are none yet"
    assert said(anew) == []
    (line,) = said(lambda: set_to(prior_precision=3.0, temperature=2.0))
    assert "(entropy above " in line and " or novelty above " in line and "set it again" in line
    assert said(lambda: set_to(prior_precision=4.0)) == [], "said before"
    assert said(lambda: set_to(prior_precision=1.0, temperature=1.0)) == [], "they apply again"
    for options in ({}, held_out, {"loader": [x], "criterion": "faithful"}):
        posterior.prior_precision = 11.0
        anew()
        assert len(said(lambda options=options: tune(**options))) == 1, (options, posterior.settings)
        assert said(lambda options=options: tune(**options)) == []
    anew()
    with warnings.catch_warnings(), pytest.raises(uq.PosthocUQError):
        warnings.filterwarnings("error", ".*referral")
        tune(loader=[x])
    assert said(lambda: posterior.snapshot(replace(posterior.settings, scale=2.0))) == []
    assert said(lambda: set_to(scale=7.0)) != [], "an error leaves them as they were"


def test_what_cannot_be(fitted) -> None:
    model, posterior, x = fitted
    predictor: Any = uq.wrap(model, posterior, "linearized", link="probit")
    prediction = predictor(x)
    for call, word in (
        (lambda: uq.Referral(0.1, ()), "several different ones"),
        (lambda: uq.Referral(0.1, ("entropy", "entropy")), "several different ones"),
        (lambda: uq.Referral(0.1, "novel").fit(predictor, prediction), "A score is one of"),
        (lambda: uq.Referral(0.1, "mutual_information").fit(predictor, prediction), "does not know"),
        (lambda: uq.Referral(2.5), "rate must be"),
        (lambda: uq.Referral("often"), "rate must be"),  # pyright: ignore[reportArgumentType]
        (lambda: uq.Referral()(prediction), "No referral threshold"),
    ):
        with pytest.raises(uq.PosthocUQError, match=word):
            call()
    assert not posterior.history.referral
