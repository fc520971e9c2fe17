"""`Referral`: p-values and thresholds from the definition, the rate and the accuracy on new data, why, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binom
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.likelihoods import JOINT, ConformalScores, held_out_scores, tail_of, wrong_up_to
from posthoc_uq.likelihoods.selective import joint_surprise

FAST: dict[str, Any] = {"head": "linearized", "link": "probit", "progress": False}


def _batches(x: Tensor, y: Tensor, size: int = 250) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, uq.Posterior, Tensor, Tensor]:
    """A network trained on 500 digits, its posterior, and 1,297 others."""
    generator, data = torch.Generator().manual_seed(0), load_digits()
    order = torch.randperm(len(data.target), generator=generator)
    x = torch.tensor(data.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(data.target)[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:500]), y[:500]).backward()
        optimiser.step()
    posterior = uq.fit(model, [(x[:500], y[:500])], "diag", layers="last", progress=False)
    posterior = uq.calibrate(posterior, _batches(x[500:1100], y[500:1100]), **FAST)
    return model, posterior, x[500:], y[500:]


def _surprise(scores: Mapping[str, Tensor], promises: ConformalScores) -> Tensor:
    return joint_surprise(promises.tails, scores)


@pytest.mark.parametrize("score", ["joint", "entropy", "novelty"])
def test_p_values_and_reasons_are_those_of_the_definition(digits, score: str) -> None:
    model, posterior, x, _ = digits
    prediction = uq.wrap(model, posterior)(torch.cat((x[600:], torch.rand(40, 64), 3 + x[:5])))
    promises, scores = prediction.known_promises(), prediction.at_promises().scores()
    own = _surprise(scores, promises) if score == JOINT else scores[score].double()
    held_out = promises.inputs[score].values.tolist()
    expected = torch.tensor([(1 + sum(h >= s for h in held_out)) / (1 + len(held_out)) for s in own.tolist()])
    for rate in (0.01, 0.05, 0.3):
        referral = uq.Referral(rate, score=score)
        assert torch.allclose(referral.tail(prediction), expected.double(), atol=1e-7)
        flags, reasons = referral(prediction), referral.reasons(prediction)
        assert torch.equal(flags, referral.tail(prediction) <= rate) and 0 < int(flags.sum()) < len(flags)
        assert torch.equal(flags, torch.stack(list(reasons.values())).any(0))
        assert list(reasons) == (["entropy", "novelty"] if score == JOINT else [score])
        for name, its_own in reasons.items() if score == JOINT else ():
            alone = _surprise({name: scores[name]}, promises.changed(tails={name: promises.tails[name]}))
            border = alone[its_own].min()
            assert bool((alone[~its_own] < border).all()) and bool(its_own.any())
    assert bool(uq.Referral(0.05)(uq.wrap(model, posterior)(3 + x[:5])).all())


def test_the_share_of_new_inputs_is_the_rate() -> None:
    """Over many held-out parts: at most the rate on average, and no less than a rank below it."""
    generator, n, rate = torch.Generator().manual_seed(1), 60, 0.1
    shares: list[float] = []
    for _ in range(400):
        entropy, novelty = torch.randn(2, n + 60 + 200, generator=generator).double()
        known = {"entropy": entropy, "novelty": novelty + 0.5 * entropy}
        tails = {name: tail_of(values[:60]) for name, values in known.items()}
        joint = joint_surprise(tails, known)
        promises = _promises(known | {JOINT: joint}, slice(60, 60 + n), tails)
        new = {name: values[60 + n :] for name, values in known.items()}
        flags = promises.p_values(new, JOINT) <= uq.Referral(rate).border(promises)
        shares.append(float(flags.double().mean()))
    mean = sum(shares) / len(shares)
    error = 3.5 * (rate * (1 - rate) * (1 / n + 1 / 200) / 400) ** 0.5
    assert rate - 1 / (n + 1) - error < mean < rate + error


def _promises(
    scores: Mapping[str, Tensor], held_out: slice, tails: Mapping[str, Any], wrong: Tensor | None = None
) -> ConformalScores:
    kept = {name: held_out_scores(values[held_out]) for name, values in scores.items()}
    counts = {
        name: wrong_up_to(kept[name], scores[name][held_out], wrong) for name in kept if wrong is not None
    }
    return ConformalScores.model_construct(inputs=kept, tails=tails, seed=0, wrong=counts or None)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [50, 6000])
def test_an_accuracy_keeps_the_most_that_have_it(ties: bool, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    score = torch.rand(count, generator=generator, dtype=torch.float64)
    score = (10 * score).round() if ties else score
    wrong = torch.rand(count, generator=generator) < 0.4 * (score / score.max()) ** 2
    tails = {"entropy": tail_of(score)}
    promises = _promises({"entropy": score}, slice(None), tails, wrong)
    new = torch.cat((score, score + 1e-9, score.max() + torch.ones(1)))
    for accuracy in (0.8, 0.9, 0.95):
        borders = score.unique()
        kept = score <= borders[:, None]
        errors = (kept & wrong).sum(1)
        borders = borders[(errors + 1) / (kept.sum(1) + 1) <= 1 - accuracy + 1e-7].tolist()
        flags = promises.p_values({"entropy": new}, "entropy") <= promises.rate_for(accuracy, "entropy")
        if count <= 4096:
            assert torch.equal(flags, new > max(borders))
        else:  # of thinned scores the next one below that was kept
            largest = float(new[~flags].max())
            between = (score > largest) & (score <= max(borders))
            assert largest <= max(borders) and int(between.sum()) <= 20
        assert bool(flags[-1]), "what is beyond all held-out inputs is always referred"


def test_what_an_error_proposes_is_not_refused() -> None:
    for count in (1, 7, 120, 150, 5000):
        score, wrong = torch.arange(count), torch.arange(count) % 7 == 5
        promises = _promises({"entropy": score}, slice(None), {}, wrong)
        for asked, words in ({"rate": 1e-6}, "at least "), ({"accuracy": 1 - 1e-6}, "reached is "):
            with pytest.raises(uq.PosthocUQError) as refused:
                uq.Referral(**asked, score="entropy").border(promises)
            proposed = float(str(refused.value).split(words)[1].split(",")[0].rstrip("."))
            uq.Referral(**dict.fromkeys(asked, proposed), score="entropy").border(promises)


def test_the_rest_of_new_inputs_has_the_accuracy() -> None:
    generator, n, accuracy = torch.Generator().manual_seed(2), 300, 0.95
    found: list[float] = []
    for _ in range(200):
        score = torch.rand(n + 400, generator=generator, dtype=torch.float64)
        wrong = torch.rand(n + 400, generator=generator) < 0.4 * score**2
        held_out = slice(0, n)
        promises = _promises({"entropy": score}, held_out, {"entropy": tail_of(score[:n])}, wrong[:n])
        border = promises.rate_for(accuracy, "entropy")
        rest = promises.p_values({"entropy": score[n:]}, "entropy") > border
        found.append(float((~wrong[n:][rest]).double().mean()))
        assert 0.2 < float(rest.double().mean()) < 0.9
    assert abs(sum(found) / len(found) - accuracy) < 0.006


def test_an_accuracy_end_to_end(digits) -> None:
    model, posterior, x, y = digits
    prediction, labels = uq.wrap(model, posterior)(x[600:]), y[600:]
    right = prediction.predicted() == labels
    accuracy = float(right.double().mean())
    aim = accuracy + 0.6 * (1 - accuracy)
    referral = uq.Referral(accuracy=aim)
    rest = ~referral(prediction)
    assert 0.5 < float(rest.double().mean()) < 1
    assert float(right[rest].double().mean()) > aim - 3 * ((1 - aim) / 300) ** 0.5
    counts = posterior.history.promises.wrong["joint"].tolist()
    assert counts == sorted(counts) and 0 < counts[-1] < 60
    posterior = posterior.noted(promises={"wrong": None})
    with pytest.raises(uq.PosthocUQError, match="calibrate again"):
        referral(uq.wrap(model, posterior)(x[600:]))


def test_an_input_whose_score_is_nan_is_always_referred(digits) -> None:
    model, posterior, x, _ = digits
    prediction = uq.wrap(model, posterior)(x[:40])
    novelty = prediction.novelty().clone()
    novelty[7] = float("nan")
    broken = replace(prediction, novelty_ratio=novelty)  # which somebody made elsewhere
    for referral in (uq.Referral(0.01), uq.Referral(accuracy=0.9)):
        assert bool(referral(broken)[7]) and bool(referral.reasons(broken)["novelty"][7])
        assert referral.tail(broken).isnan().nonzero().tolist() == [[7]]
        assert torch.equal(referral.reasons(broken)["entropy"], referral.reasons(prediction)["entropy"])


def test_values_have_a_rate_and_no_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    y = x + 0.1 * torch.randn(300, 2, generator=generator)
    posterior = uq.fit(
        model, [(x[:100], y[:100])], likelihood="regression", prior_precision=2.0, progress=False
    )
    posterior = uq.calibrate(posterior, [(x[100:], y[100:])], progress=False)
    prediction = uq.wrap(model, posterior)(torch.cat((x[:50], 100 + x[:50])))
    referral = uq.Referral(rate=0.05)
    assert list(referral.reasons(prediction)) == ["standard_deviation", "novelty"]
    assert int(referral(prediction)[:50].sum()) < 15 and bool(referral(prediction)[50:].all())
    with pytest.raises(uq.PosthocUQError, match="predictions of classes"):
        uq.Referral(accuracy=0.9)(prediction)


def test_a_posterior_that_changed_must_be_calibrated_again(digits) -> None:
    model, posterior, x, _ = digits
    with pytest.warns(UserWarning, match="no longer hold"):
        warmer = posterior.with_settings(temperature=2 * posterior.temperature)
    with pytest.raises(uq.PosthocUQError, match=r"hyperparameters changed.*calibrate again"):
        uq.Referral()(uq.wrap(model, warmer)(x[:5]))
    assert repr(uq.Referral(accuracy=0.98, score="entropy")) == "Referral(accuracy=0.98, score='entropy')"


@pytest.mark.parametrize("accuracy", [0.8, 0.9])
def test_a_confidence_keeps_what_a_dense_binomial_test_allows(accuracy: float) -> None:
    """Each of the four sequences walked by itself, by the distribution function of scipy."""
    generator, count, risk = torch.Generator().manual_seed(5), 100, 0.1 / 4
    for _ in range(20):
        score = torch.rand(count, generator=generator, dtype=torch.float64).sort().values
        wrong = torch.rand(count, generator=generator) < 0.3 * score
        errors = wrong.cumsum(0).tolist()
        least = next(k for k in range(1, count) if accuracy**k <= risk)
        kept = 0
        for each in range(4):
            k = least + 1 + (count - least - 1) * each // 4
            while k <= count and binom.cdf(errors[k - 1], k - 1, 1 - accuracy) <= risk:
                kept, k = max(kept, k), k + 1
        promises = _promises({"entropy": score}, slice(None), {"entropy": tail_of(score)}, wrong)
        referral = uq.Referral(accuracy=accuracy, confidence=0.9, score="entropy")
        if kept == 0:
            with pytest.raises(uq.PosthocUQError, match="calibrate with more"):
                referral.border(promises)
        else:
            flags = promises.p_values({"entropy": score}, "entropy") <= referral.border(promises)
            assert int((~flags).sum()) == kept


@pytest.mark.parametrize("score", ["joint", "entropy"])
def test_a_confidence_is_kept_over_draws_of_the_held_out_inputs(score: str) -> None:
    """The true accuracy of the rest misses the aim in at most a tenth of the draws, where without a confidence it does
    in about half of them."""
    generator, n, accuracy, draws = torch.Generator().manual_seed(3), 800, 0.95, 120
    missed, plainly, kept, failed = 0, 0, 0.0, 0
    for _ in range(draws):
        hard = torch.rand(2 * n + 4000, generator=generator, dtype=torch.float64)
        wrong = torch.rand(len(hard), generator=generator) < 0.4 * hard**2
        known = {"entropy": hard, "novelty": hard + 0.5 * torch.rand(len(hard), generator=generator)}
        tails = {name: tail_of(values[:n]) for name, values in known.items()}
        scores = known | {JOINT: joint_surprise(tails, known)}
        promises = _promises(scores, slice(n, 2 * n), tails, wrong[n : 2 * n])
        new, errs = {name: values[2 * n :] for name, values in known.items()}, 0.4 * hard[2 * n :] ** 2
        p = promises.p_values(new, score)
        plain = uq.Referral(accuracy=accuracy, score=score).border(promises)
        plainly += float(1 - errs[p > plain].mean()) < accuracy
        try:
            sure = uq.Referral(accuracy=accuracy, confidence=0.9, score=score).border(promises)
        except uq.PosthocUQError:
            failed += 1  # nothing is kept, so that nothing is missed
            continue
        missed += float(1 - errs[p > sure].mean()) < accuracy
        kept += float((p > sure).double().mean()) / draws
    assert missed <= 0.1 * draws and plainly > 0.3 * draws and failed <= 0.15 * draws and kept > 0.2


@pytest.mark.parametrize("score", ["joint", "entropy", "novelty"])
def test_exactly_the_share_is_referred_by_rank(digits, score: str) -> None:
    model, posterior, x, _ = digits
    prediction = uq.wrap(model, posterior)(torch.cat((x[600:], 3 + x[:5])))
    promises = prediction.known_promises()
    known = prediction.at_promises().scores()
    own = joint_surprise(promises.tails, known) if score == JOINT else known[score].double()
    for rate in (0.01, 0.1, 0.5):
        referral = uq.Referral(rate, exactly=True, score=score)
        flags, count = referral(prediction), round(rate * len(prediction))
        assert int(flags.sum()) == count and bool((own[flags].min() >= own[~flags]).all())
        assert torch.equal(flags, torch.stack(list(referral.reasons(prediction).values())).any(0))
    same = uq.wrap(model, posterior)(x[:1].expand(10, -1))
    referral = uq.Referral(0.3, exactly=True, score=score)
    assert referral(same).nonzero().flatten().tolist() == [0, 1, 2], "of equal inputs the earlier ones"
    novelty = prediction.novelty().clone()
    novelty[7] = float("nan")
    broken = uq.Referral(1 / len(prediction), exactly=True)(replace(prediction, novelty_ratio=novelty))
    assert broken.nonzero().flatten().tolist() == [7]
    assert not bool(uq.Referral(0.1, exactly=True)(uq.wrap(model, posterior)(x[:3])).any())


def test_a_confidence_end_to_end(digits) -> None:
    model, posterior, x, _ = digits
    prediction = uq.wrap(model, posterior)(x[600:])
    plain, sure = uq.Referral(accuracy=0.95), uq.Referral(accuracy=0.95, confidence=0.9)
    assert int(plain(prediction).sum()) <= int(sure(prediction).sum()) < len(prediction)
    assert repr(sure) == "Referral(accuracy=0.95, confidence=0.9, score='joint')"
    assert repr(uq.Referral(0.1, exactly=True)) == "Referral(rate=0.1, exactly=True, score='joint')"


def test_what_does_not_fit_is_refused(digits) -> None:
    model, posterior, x, _ = digits
    one = uq.wrap(model, posterior)(x[:1])
    refused: list[tuple[Any, str]] = [
        (lambda: uq.Referral(accuracy=0.9, exactly=True), "give a rate, no accuracy"),
        (lambda: uq.Referral(0.1, confidence=0.9), "accuracy=0.98"),
        (lambda: uq.Referral(0.1, exactly=True)(one), "a single one"),
        (lambda: uq.Referral(0.1, exactly=True).border(one.promises), "leave exactly out"),
        (lambda: uq.Referral(accuracy=0.999, confidence=0.99)(one), "calibrate with more"),
    ]
    for call, words in refused:
        with pytest.raises(uq.PosthocUQError, match=words):
            call()
