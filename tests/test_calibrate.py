"""`calibrate`: promises end to end, in files, and what makes them void."""

from __future__ import annotations

import math
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posthoc_uq as uq
from posthoc_uq import CorruptPosteriorError
from posthoc_uq.core import validate_record
from posthoc_uq.files.records import HistoryRecord
from posthoc_uq.likelihoods import HeldOutScores

FAST: dict[str, Any] = {"head": "linearized", "link": "probit", "progress": False}


def _batches(x: Tensor, y: Tensor, size: int = 100) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def _trained(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def classes() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3400, 4, generator=generator)
    y = (x[:, :3] + 0.7 * torch.randn(3400, 3, generator=generator)).argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    return _trained(model, nn.CrossEntropyLoss(), x[:100], y[:100]), x, y


@pytest.fixture
def fitted(classes) -> uq.Posterior:
    model, x, y = classes
    return uq.fit(model, [(x[:100], y[:100])], "diag", layers="last", progress=False)


def _band(rate: float, held_out: int, new: int) -> float:
    """3.5 standard deviations of the share of new samples by one calibration."""
    return 3.5 * (rate * (1 - rate) * (1 / (held_out + 2) + 1 / new)) ** 0.5


@pytest.mark.parametrize("sets", ["lac", "aps", "raps"])
def test_classes(classes, fitted, sets: str) -> None:
    model, x, y = classes
    posterior = uq.calibrate(fitted, _batches(x[100:900], y[100:900]), sets=sets, **FAST)
    promises, trials = posterior.history.promises, posterior.history.trials
    assert promises.samples == 400 and promises.share == 0.5  # and 400 that tuned
    assert trials is not None and "temperature" in str(trials).splitlines()[0]
    assert "up to a level of 0.9975" in str(posterior.report())
    prediction, labels = uq.wrap(model, posterior)(x[900:]), y[900:]
    for level in (0.8, 0.9, 0.95):
        chosen = prediction.set(level, allow_empty=sets != "lac")
        covered = float(chosen[torch.arange(len(labels)), labels].double().mean())
        assert abs(covered - level) < _band(level, 400, len(labels)) + 0.0025
    for score in ("novelty", "entropy", "joint"):
        p = prediction.familiarity(score)
        assert bool((p > 0).all()) and bool((p <= 1).all())
        assert abs(float((p <= 0.1).double().mean()) - 0.1) < _band(0.1, 400, len(labels)) + 0.0025
    assert float(uq.wrap(model, posterior)(50 + x[:50]).familiarity().max()) < 0.05
    part = prediction.picked(slice(3, 9))
    assert torch.equal(part.set(0.9), prediction.set(0.9)[3:9]) and "sample_keys" not in part.to_dict()
    with pytest.raises(uq.PosthocUQError, match="needs 999 held-out samples"):
        prediction.set(0.999)


def test_batches_and_order_do_not_matter_and_files_keep_all(classes, fitted, tmp_path: Path) -> None:
    model, x, y = classes
    x_held, y_held = x[100:400].repeat(2, 1), y[100:400].repeat(2)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    records = []
    for held_out in (_batches(x_held, y_held), _batches(x_held[order], y_held[order], 37)):
        posterior = uq.calibrate(fitted, held_out, sets="aps", **FAST)
        records.append(posterior.history.promises)
    first, second = records
    assert first.samples == second.samples == 300
    for a, b in zip(first.targets.scores, second.targets.scores, strict=True):
        assert torch.allclose(a.values, b.values, atol=2e-3)

    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.history.promises == second
    mine, again = uq.wrap(model, posterior), uq.wrap(model, loaded)
    assert torch.equal(mine(x).set(0.9), again(x).set(0.9))
    assert torch.equal(mine(x).familiarity("joint"), again(x).familiarity("joint"))
    whole = again.predict([x[:50], x[50:90]], progress=False)
    assert torch.equal(whole.set(0.9), again(x[:90]).set(0.9))
    assert "sets by 'aps'" in str(loaded.report()) and "sets by 'aps'" in str(uq.inspect(tmp_path / "p.h5"))


def test_few_distinct_inputs(classes, fitted) -> None:
    """Copies of an input are in both parts, so that few distinct ones are as likely before the border as behind it."""
    model, x, _ = classes
    generator, small = torch.Generator().manual_seed(1), list[float]()
    for seed in range(20):
        rows = x[100 * seed + 100 : 100 * seed + 104]
        drawn = torch.randint(4, (400,), generator=generator)
        labels = torch.randint(3, (400,), generator=generator)
        posterior = uq.calibrate(fitted, [(rows[drawn], labels)], seed=seed, **FAST)
        p = uq.wrap(model, posterior)(rows).familiarity()
        small.append(float((p <= 0.05).double().mean()))
    assert sum(small) / len(small) <= 0.05


def test_what_makes_promises_void(classes, fitted) -> None:
    model, x, y = classes
    predictor = uq.wrap(model, fitted)
    with pytest.raises(uq.PosthocUQError, match="held-out scores"):
        predictor(x).set(0.9)
    posterior = uq.calibrate(fitted, _batches(x[100:300], y[100:300]), **FAST)
    with pytest.raises(uq.PosthocUQError, match="held-out scores"):  # as it was
        predictor(x).set(0.9)
    predictor = uq.wrap(model, posterior)
    expected = predictor(x).set(0.9)
    with pytest.raises(uq.PosthocUQError, match="calibrate for this one"):
        uq.wrap(model, posterior, "linearized", link="mc")(x).set(0.9)
    with pytest.warns(UserWarning, match="no longer hold"):
        changed = posterior.with_settings(temperature=3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.with_settings(temperature=posterior.temperature)  # the same: they hold
        changed.with_settings(temperature=4.0)  # they did not hold before
    for other in (predictor.with_posterior(changed), uq.wrap(model, changed)):
        for call in (lambda p: p.set(0.9), lambda p: p.familiarity()):
            with pytest.raises(uq.PosthocUQError, match="hyperparameters changed"):
                call(other(x))
    assert torch.equal(predictor(x).set(0.9), expected)
    with pytest.warns(UserWarning, match="no longer hold"):  # also by a search
        found = uq.tune(posterior, [(x[:100], y[:100])], criterion="faithful", divergence=0.1, progress=False)
    with pytest.raises(uq.PosthocUQError, match="hyperparameters changed"):
        uq.wrap(model, found)(x).set(0.9)
    with pytest.warns(UserWarning, match="cleared"):
        assert not uq.update(posterior, [(x[:20], y[:20])], progress=False).history.promises
    assert posterior.history.promises


def test_classes_that_are_covered_too_little_or_have_few_samples_are_named(classes, fitted) -> None:
    _, x, y = classes
    few = torch.cat([(y != 2).nonzero()[:, 0][:600], (y == 2).nonzero()[:, 0][:4]])
    wrong = torch.where(
        (y == 1) & (torch.arange(len(y)) % 2 == 0), 0, y
    )  # half of class 1 looks like none of it
    held_out = [(x[few], wrong[few])]
    with pytest.warns(UserWarning, match=r"[Cc]lass 2 has \d of the 302 that promise.*by_class=True"):
        posterior = uq.calibrate(fitted, held_out, **FAST)
    assert "rare classes: " in str(posterior.report()) and "lass 2 has" in str(posterior.report())
    of_all = [(x[:600], y[:600])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = uq.calibrate(posterior, of_all, **FAST)
    assert "rare classes" not in str(again.report())
    # class 1 is one in twenty, and mostly called class 0
    rare = torch.cat([(y == 0).nonzero()[:, 0][:570], (y == 1).nonzero()[:, 0][:30]])
    moved = torch.where((y == 1).unsqueeze(1), torch.tensor([3.0, -1.0, -1.0, 0.0]) + 0.1 * x, x)
    with pytest.warns(
        UserWarning, match=r"Sets of 90 % hold class 1 in \d+% of \d+ held-out samples, and class 2"
    ):
        posterior = uq.calibrate(fitted, [(moved[rare], y[rare])], share=None, **FAST)
    sets = uq.wrap(classes[0], posterior)(moved[rare]).set(0.9)[torch.arange(600), y[rare]].double()
    share = float(sets[y[rare] == 1].mean())
    assert f"class 1 in {share:.0%} of 30" in posterior.history.tuning["rare classes"] and share < 0.7


def test_each_class_and_all_samples_in_both_parts(classes, fitted) -> None:
    model, x, y = classes
    held_out = _batches(x[100:1900], y[100:1900], 600)
    posterior = uq.calibrate(fitted, held_out, by_class=True, **FAST)
    prediction, labels = uq.wrap(model, posterior)(x[1900:]), y[1900:]
    promises = posterior.history.promises
    assert len(promises.targets.scores) == 3 and promises.share == 0.5
    assert "approximately" not in str(posterior.report())
    chosen = prediction.set(0.9)[torch.arange(len(labels)), labels].double()
    for each in range(3):
        assert float(chosen[labels == each].mean()) > 0.9 - _band(0.9, 300, 500)
    kept = torch.cat([torch.arange(len(labels))[labels != 1][:40], (labels == 1).nonzero()[:3, 0]])
    few = [(x[1900:][kept], labels[kept])]
    posterior = uq.calibrate(fitted, few, by_class=True, share=None, **FAST)
    promised = "up to a level of 0.75 for each of 3 (class 1 has 3 samples, the fewest)"
    assert promised in str(posterior.report())
    for level in (0.76, 0.9, 0.99):  # of the scarcest class, whatever others lack
        with pytest.raises(
            uq.PosthocUQError, match=r"every class, and 3 of class 1 .*at most 0\.75, .*by_class"
        ):
            uq.wrap(model, posterior)(x[:5]).set(level)
    assert uq.wrap(model, posterior)(x[:5]).set(0.75).shape == (5, 3)
    with pytest.raises(uq.PosthocUQError, match=r"none of class 1; .* or leave by_class out"):
        uq.calibrate(fitted, [tuple(part[:-3] for part in few[0])], by_class=True, share=None, **FAST)
    posterior = uq.calibrate(fitted, held_out, share=None, **FAST)
    promises = posterior.history.promises
    assert promises.samples == 1800 and promises.share is None
    assert "approximately" in str(posterior.report())


@pytest.mark.parametrize("outputs", [1, 2])
def test_values(outputs: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2500, 3, generator=generator)
    y = x[:, :outputs] + (0.2 + x[:, 2:].abs()) * torch.randn(2500, outputs, generator=generator)
    torch.manual_seed(0)
    model = _trained(
        nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, outputs)), nn.MSELoss(), x[:60], y[:60]
    )
    posterior = uq.fit(model, [(x[:60], y[:60])], "diag", likelihood="regression", progress=False)
    before = uq.wrap(model, posterior)(x[1000:]).interval(0.9)
    posterior = uq.calibrate(posterior, _batches(x[60:660], y[60:660]), progress=False)
    prediction, targets = uq.wrap(model, posterior)(x[1000:]), y[1000:].reshape(before[0].shape)
    for level in (0.5, 0.9, 0.99):
        low, high = prediction.interval(level)
        covered = ((low <= targets) & (targets <= high)).double().reshape(1500, -1).mean(0)
        assert float((covered - level).abs().max()) < _band(level, 600, 1500) + 0.0017
    scores = posterior.history.promises.targets.scores
    assert [each.count for each in scores] == [600] * outputs  # all that were held out
    with pytest.raises(uq.PosthocUQError, match="held-out samples"):
        prediction.interval(0.9999)
    half = torch.full((4, 2), 0.5)
    with pytest.raises(uq.PosthocUQError, match="no scores of such"):
        uq.ClassPrediction(half, half, half, promises=prediction.promises).set(0.9)


@pytest.mark.parametrize("method", ["inf", "kfac", "efb", "diag", "full"])
def test_one_factor_on_all_variances_leaves_intervals_as_they_are(method: str) -> None:
    """All 30 rows tune it and promise: the intervals are those by the deviations before any label was seen."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(330, 2, generator=generator)
    y = x.sin() + 0.4 * torch.randn(330, 2, generator=generator)
    torch.manual_seed(0)
    model = _trained(nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 2)), nn.MSELoss(), x[:40], y[:40])
    y[40:] += torch.randn(290, 2, generator=generator)  # noisier than the training
    posterior = uq.fit(model, [(x[:40], y[:40])], method, likelihood="regression", progress=False)
    assert posterior.history.leave_one_out is not None
    held_out = (x[40:70], y[40:70])
    calibrated = uq.calibrate(posterior, [held_out], progress=False)
    before, after = (uq.wrap(model, each)(x) for each in (posterior, calibrated))
    ratio = (after.variance / before.variance).double()
    assert float(ratio.min()) > 2 and float(ratio.std()) < 1e-4 * float(ratio.mean())
    assert torch.allclose(
        after.epistemic_variance, ratio.mean().float() * before.epistemic_variance, rtol=1e-3
    )
    scores = (held_out[1] - before.mean[40:70]).abs() / before.standard_deviation[40:70]
    rank = math.ceil(31 * 0.9) - 1
    width = scores.sort(0).values[rank] * before.standard_deviation
    assert torch.allclose(after.interval(0.9)[1] - after.mean, width, rtol=1e-3)
    again = uq.calibrate(calibrated, [held_out], progress=False)  # the prior of the noise is where it was
    assert again.noise_scale == pytest.approx(calibrated.noise_scale, rel=1e-2)
    factor, unmoved = calibrated.history.trials.chosen, calibrated.history.trials.trials[0]
    assert factor.objective == pytest.approx(-float(after.log_prob(y)[40:70].mean()), abs=1e-3)
    assert factor.objective < unmoved.objective


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_held_out_rows_that_the_network_has_seen_are_named(likelihood: str) -> None:
    """Training rows of a network that memorised them; of new rows nothing is said."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=generator)
    y = x[:, :1].sin() + torch.randn(240, 1, generator=generator)
    y = y if likelihood == "regression" else (y[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 - y.is_floating_point())
    )
    loss = nn.MSELoss() if likelihood == "regression" else nn.CrossEntropyLoss()
    model = _trained(model, loss, x[:120], y[:120])
    seen, new = [(x[:120], y[:120])], [(x[120:], y[120:])]
    posterior = uq.fit(model, seen, likelihood=likelihood, progress=False)
    for rows, warned in ((seen, True), (new, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            uq.calibrate(posterior, rows, progress=False)
            if likelihood == "regression":
                uq.tune(posterior, rows, progress=False)
        said = [
            str(each.message) for each in caught if "was the network trained on them" in str(each.message)
        ]
        assert len(said) == (0 if not warned else 2 if likelihood == "regression" else 1), caught


@pytest.mark.parametrize("likelihood", ["regression", pytest.param("poisson", marks=pytest.mark.study)])
def test_several_values_are_promised_jointly(likelihood: str) -> None:
    size = 1300 if likelihood == "poisson" else 2000  # intervals of counts are those of many draws
    generator = torch.Generator().manual_seed(6)
    x = 0.5 * torch.randn(size, 2, generator=generator)
    model = nn.Linear(2, 3)
    with torch.no_grad():
        means = model(x)
    y = means + torch.randn(size, 3, generator=generator)
    y = torch.poisson(means.exp(), generator=generator) if likelihood == "poisson" else y
    options: dict[str, Any] = {"likelihood": likelihood, "prior_precision": 10.0, "progress": False}
    posterior = uq.fit(model, [(x[:300], y[:300])], "diag", **options)
    posterior = uq.calibrate(posterior, _batches(x[300:900], y[300:900]), jointly=True, progress=False)
    predictor = uq.wrap(model, posterior)
    low, high = predictor(x[900:]).interval(0.9)
    together = ((low <= y[900:]) & (y[900:] <= high)).all(1).double().mean()
    band = _band(0.9, 300, size - 900)
    assert float(together) > 0.9 - band
    if likelihood == "regression":  # counts are whole, so that their intervals hold more
        assert float(together) < 0.9 + band + 0.0034
        found = uq.evaluate(predictor, _batches(x[900:], y[900:]), progress=False).promised["linearized"]
        assert found["observed_coverage_90"] == pytest.approx(float(together))
    with pytest.raises(uq.PosthocUQError, match="no sets of classes"):
        predictor(x[:2]).set(0.9)


@pytest.mark.parametrize("likelihood", ["poisson", "gamma", "heteroscedastic", "ordinal", "multilabel"])
def test_other_likelihoods(likelihood: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x = 0.5 * torch.randn(1300, 2, generator=generator)
    outputs = {"heteroscedastic": 2, "ordinal": 4, "multilabel": 3}.get(likelihood, 1)
    torch.manual_seed(0)
    model = nn.Linear(2, outputs)
    if likelihood == "heteroscedastic":
        y = x[:, :1] + 0.3 * torch.randn(1300, 1, generator=generator)
    elif likelihood == "ordinal":
        y = (x[:, 0] + 0.5 * torch.randn(1300, generator=generator)).mul(2).round().clamp(-2, 1).long() + 2
        y = y.clamp(0, 3)
    elif likelihood == "multilabel":
        y = (x[:, [0, 1, 0]] + 0.5 * torch.randn(1300, 3, generator=generator) > 0).float()
    else:
        rate = (1 + x[:, :1]).exp()
        y = (
            torch.poisson(rate, generator=generator)
            if likelihood == "poisson"
            else rate * torch.rand(1300, 1, generator=generator).add(0.05)
        )
    spec = uq.Ordinal(cumulative=False) if likelihood == "ordinal" else likelihood
    posterior = uq.fit(
        model, [(x[:100], y[:100])], "diag", likelihood=spec, prior_precision=10.0, progress=False
    )
    posterior = uq.calibrate(
        posterior, _batches(x[100:700], y[100:700], 300), progress=False, n_samples=8, head="sampling"
    )
    assert uq.wrap(model, posterior).identity()["n_samples"] == 8
    prediction = uq.wrap(model, posterior)(x[700:])
    if likelihood == "multilabel":
        kept = prediction.set(0.9)[y[700:] > 0]
        assert abs(float(kept.double().mean()) - 0.9) < _band(0.9, 140, 900)
        return
    low, high = prediction.interval(0.9)
    targets = y[700:].reshape(low.shape)
    covered = float(((low <= targets) & (targets <= high)).double().mean())
    assert covered > 0.9 - _band(0.9, 300, 600)
    if likelihood in ("gamma", "heteroscedastic"):
        assert covered < 0.9 + _band(0.9, 300, 600) + 0.0034
    if likelihood == "poisson":
        assert torch.equal(low, low.round()) and bool(low.isfinite().all())
        promises = prediction.known_promises()
        (scores,) = promises.targets.scores
        saturated = scores.values.clone()
        saturated[-20:] = 0.5  # targets where the distribution function rounds to 1
        targets_of = promises.targets.changed(scores=[scores.changed(values=saturated)])
        promises = promises.changed(targets=targets_of)
        assert bool(replace(prediction, promises=promises).interval(0.99)[1].isinf().all())


def test_scores_of_inputs_with_positions() -> None:
    """Means over all positions, as predictions without labels have them; images are exchangeable, pixels are not."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(90, 3, 4, 4, generator=generator)
    y = x[:, :3].argmax(1)
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 1)
    posterior = uq.fit(model, [(x[:20], y[:20])], "diag", prior_precision=1.0, progress=False)
    y[:, 0] = -100
    posterior = uq.calibrate(posterior, [(x[20:], y[20:])], share=None, **FAST)
    prediction = uq.wrap(model, posterior)(x[20:])
    assert posterior.history.promises.samples == 70
    assert "that share of an input's labels" in str(posterior.report())
    kept = posterior.history.promises.inputs["entropy"].values
    assert torch.allclose(kept, prediction.scores()["entropy"].double().sort().values, atol=1e-6)
    assert int(uq.Referral(0.1, score="entropy")(prediction).sum()) == 6
    assert bool((uq.wrap(model, posterior)(9 + x[:5]).familiarity() < 0.1).all())
    with pytest.raises(uq.PosthocUQError, match="counted right or wrong"):
        uq.Referral(accuracy=0.5)(prediction)


class _Tagger(nn.Linear):
    """A tagger of single tokens that takes an attention mask, as those of transformers do."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class _Padded:
    """Sequences of random lengths, or pictures of random sizes, at the beginning of a longer one of zeros; and a model
    of single positions, which is as undecided about padding as can be.
    """

    def __init__(self, kind: str, said_by: str) -> None:
        self.kind, self.said_by = kind, said_by
        self.model = nn.Conv2d(3, 3, 1) if kind == "pixels" else _Tagger(3, 3)
        eye = 2 * torch.eye(3).reshape(self.model.weight.shape)
        self.model.load_state_dict({"weight": eye, "bias": torch.zeros(3)})
        ignored = 255 if kind == "pixels" else -100
        likelihood = uq.Categorical(class_dim=1 if kind == "pixels" else -1, ignore_index=ignored)
        x, y, _ = self.drawn(20, 0)
        options = {"likelihood": likelihood, "prior_precision": 1.0, "progress": False}
        self.fitted = uq.fit(self.model, [(x, y)], "diag", **options)

    def drawn(self, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and which positions are real."""
        generator = torch.Generator().manual_seed(seed)
        sizes = (6, 5) if self.kind == "pixels" else (12,)
        x = torch.randn(samples, 3, *sizes, generator=generator)
        x = x * (0.3 + torch.rand(samples, 1, *[1] * len(sizes), generator=generator))  # of one input alike
        y = (x + 0.5 * torch.randn(x.shape, generator=generator)).argmax(1)
        real = torch.ones(samples, *sizes, dtype=torch.bool)
        for dim, size in enumerate(sizes, 1):
            lengths = torch.randint(1, size + 1, (samples, *[1] * len(sizes)), generator=generator)
            real = real & (torch.arange(size).reshape(-1, *[1] * (len(sizes) - dim)) < lengths)
        x, y = x * real.unsqueeze(1), y.masked_fill(~real, 255 if self.kind == "pixels" else -100)
        if self.said_by == "mask":
            y = y.masked_fill(~real, 0)
        return x if self.kind == "pixels" else x.movedim(1, -1), y, real

    def calibrated(self, samples: int, seed: int) -> uq.Predictor:
        x, y, real = self.drawn(samples, seed)
        options = dict(FAST)
        if self.said_by == "attention mask":
            data: list[Any] = [{"x": x, "attention_mask": real.long(), "labels": y}]
        else:
            data = [(x, y, real)]
            options["batch_to_inputs"] = lambda batch: batch[0]
            options["batch_to_targets"] = lambda batch: batch[1]
        if self.said_by == "mask":
            options["batch_to_weights"] = lambda batch: batch[2]
        return uq.wrap(self.model, uq.calibrate(self.fitted, data, **options))


@pytest.mark.parametrize("draws", [1, pytest.param(40, marks=pytest.mark.study)])
@pytest.mark.parametrize(
    ("kind", "said_by"),
    [("tokens", "labels"), ("tokens", "attention mask"), ("pixels", "labels"), ("pixels", "mask")],
)
def test_a_rate_is_a_rate_whatever_the_padding(kind: str, said_by: str, draws: int) -> None:
    """Held-out and new scores are those of the same positions: with a mask of those that count, without one of all."""
    padded = _Padded(kind, said_by)
    held_out, count = (200, 800) if draws == 1 else (100, 400)
    rates, shares = {"masked": [], "whole": []}, {"masked": [], "whole": []}
    for draw in range(draws):
        predictor = padded.calibrated(2 * held_out, 2 * draw + 1)
        x, _, real = padded.drawn(count, 2 * draw + 2)
        if said_by == "attention mask":
            whole = predictor(x, attention_mask=real.long())
            assert whole.masked(real).mask is None  # nothing new
            found = {"masked": whole, "whole": predictor(x)}
            torch.testing.assert_close(whole.scores(), found["whole"].masked(real).scores())
            del found["whole"]  # what is called without its attention mask is no input like the held-out ones
        else:
            found = {"masked": predictor(x).masked(real), "whole": predictor(x)}
        for name, prediction in found.items():
            rates[name].append(float(uq.Referral(0.2)(prediction).double().mean()))
            shares[name].append(prediction.familiarity("entropy"))
    if said_by == "labels" and draws == 1:  # labels are a mask in an evaluation
        x, y, _ = padded.drawn(count, 2)
        data = [(x[:300], y[:300]), (x[300:], y[300:])]
        evaluation = uq.evaluate(predictor, data, referral=uq.Referral(0.2), progress=False)
        assert evaluation.referred[0]["referred"] == pytest.approx(rates["masked"][0], abs=2 / count)
    for name in found:
        expected = math.floor(0.2 * (held_out + 1)) / (held_out + 1)
        mean = sum(rates[name]) / draws
        assert abs(mean - expected) < _band(0.2, held_out, count) / draws**0.5, (name, mean)
        p = torch.cat(shares[name]).sort().values
        distance = (p - torch.arange(1, len(p) + 1) / len(p)).abs().max()
        assert float(distance) < 1.63 * ((1 / held_out + 1 / count) / draws) ** 0.5 + 1 / held_out, name


@pytest.mark.parametrize("said_by", ["labels", "attention mask", "mask"])
def test_masked_scores_by_definition(said_by: str, tmp_path: Path) -> None:
    """Means over the positions that count, of both sides, by loops over inputs; padding changes no p-value, nor does a
    file.
    """
    padded = _Padded("tokens", said_by)
    predictor = padded.calibrated(60, 1)
    uq.save(predictor.posterior, tmp_path / "p.h5")
    again = uq.wrap(padded.model, uq.load(tmp_path / "p.h5", padded.model))
    x, _, real = padded.drawn(60, 1)

    def alone(*sizes: int) -> list[uq.Prediction]:
        """Each input without its padding, or with some more."""
        found = []
        for own, counts in zip(x[:12], real[:12], strict=True):
            length = int(counts.sum())
            longer = torch.cat([own[:length], torch.zeros(*sizes, 3)])
            mask = (torch.arange(len(longer)) < length).unsqueeze(0)
            if said_by == "attention mask":
                found.append(predictor(longer.unsqueeze(0), attention_mask=mask.long()))
            else:
                found.append(predictor(longer.unsqueeze(0)).masked(mask))
        return found

    whole = predictor(x) if said_by != "attention mask" else predictor(x, attention_mask=real.long())
    pairs = zip(whole.entropy().double(), real, strict=True)
    entropies = torch.stack([own[counts].mean() for own, counts in pairs])
    kept = predictor.posterior.history.promises.counted.inputs["entropy"].values
    assert len(kept) == 30
    assert all(float((entropies - value).abs().min()) < 1e-6 for value in kept)  # the half that did not tune
    truth = torch.tensor([(1 + int((kept >= value - 1e-6).sum())) / 31 for value in entropies]).double()
    masked = whole.masked(real)
    shown = [
        masked.familiarity("entropy"),
        *(torch.cat([o.familiarity("entropy") for o in alone(n)]) for n in (0, 4)),
    ]
    for p in shown:
        assert float((p - truth[: len(p)]).abs().max()) < 0.033  # one rank by rounding
        assert float((p - truth[: len(p)]).abs().mean()) < 0.004
    other = again(x, attention_mask=real.long()) if said_by == "attention mask" else again(x).masked(real)
    for score in ("entropy", "novelty", "joint"):
        assert torch.equal(masked.familiarity(score), other.familiarity(score))
    assert torch.equal(masked.set(0.9), whole.set(0.9))
    with pytest.raises(uq.PosthocUQError, match="of all positions of an input"):
        predictor.at([1, 2])(x).familiarity()
    joined = whole.cat([masked.picked(slice(0, 9)), whole.picked(slice(9, 60))])
    assert torch.equal(joined.familiarity()[:9], masked.familiarity()[:9])


def test_what_counts_when_held_out_data_are_read(classes, fitted) -> None:
    _, x, y = classes
    held_out = (x[100:300], y[100:300], torch.arange(200) % 4 > 0)
    masked = uq.calibrate(fitted, [held_out], batch_to_weights=lambda batch: batch[2], **FAST)
    other = uq.calibrate(fitted, [tuple(part[held_out[2]] for part in held_out[:2])], **FAST)
    assert masked.history.promises == other.history.promises and masked.settings == other.settings
    for weights, words in (
        (torch.full((200,), 0.5), "must be 0 or 1.*> 0"),
        (torch.ones(200, 3), r"shape \(200,\), not \(200, 3\)"),
        (torch.zeros(200), "No sample or position counts"),
    ):
        for share in (0.5, None):
            options = FAST | {"share": share, "batch_to_weights": lambda batch, w=weights: w}
            with pytest.raises(uq.PosthocUQError, match=words):
                uq.calibrate(other, [held_out[:2]], **options)
    assert other.history.promises == masked.history.promises
    padded = _Padded("tokens", "labels")
    predictor = padded.calibrated(60, 1)
    inputs, labels, real = padded.drawn(40, 2)
    with pytest.raises(uq.PosthocUQError, match=r"shape \(40,\), or \(40, 12\), one a position"):
        uq.calibrate(
            predictor.posterior,
            [(inputs, labels, real[:, :5])],
            batch_to_weights=lambda batch: batch[2],
            **FAST,
        )
    # as files of earlier versions have it
    earlier = uq.wrap(padded.model, predictor.posterior.noted(promises={"counted": None}))
    assert earlier(inputs).familiarity().shape == (40,)
    for prediction in (earlier(inputs).masked(real), earlier(inputs, attention_mask=real.long())):
        assert prediction.set(0.9).shape == prediction.probs.shape
        with pytest.raises(uq.PosthocUQError, match="some do not count; calibrate again"):
            prediction.familiarity()
    evaluation = uq.evaluate(earlier, [(inputs, labels)], progress=False)
    assert not evaluation.referred


@pytest.mark.parametrize("class_dim", [1, -1])
def test_sets_of_positions_by_image(class_dim: int, tmp_path: Path) -> None:
    """Against loops over images; new ones have the promised share of labels in their sets as often as is promised, and
    the file and the evaluation say the same.
    """
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1220, 3, 3, 5, generator=generator)
    strength = 3 * torch.rand(1220, 1, 1, 1, generator=generator)  # pixels of one image are alike
    y = (x + strength * torch.randn(1220, 3, 3, 5, generator=generator)).argmax(1)
    y[torch.rand(1220, 3, 5, generator=generator) < 0.3] = -100
    y[50] = -100  # an image without labels
    inputs = x if class_dim == 1 else x.movedim(1, -1)
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 1) if class_dim == 1 else nn.Linear(3, 3)
    model.load_state_dict({"weight": 2 * torch.eye(3).reshape(model.weight.shape), "bias": torch.zeros(3)})
    data = (inputs[:20], y[:20])
    likelihood = uq.Categorical(class_dim=class_dim)
    posterior = uq.fit(model, [data], "diag", likelihood=likelihood, prior_precision=1.0, progress=False)
    posterior = uq.calibrate(posterior, [(inputs[20:320], y[20:320])], share=None, **FAST)
    predictor = uq.wrap(model, posterior)
    held_out, new = predictor(inputs[20:320]), predictor(inputs[320:])
    for level in (0.5, 0.9, 0.93):
        share = 0.95 if level == 0.93 else level
        of_images = []
        for image, labels in zip(held_out.rows.probs.reshape(300, 15, 3), y[20:320].flatten(1), strict=True):
            own = sorted(1 - float(p[label]) for p, label in zip(image, labels, strict=True) if label >= 0)
            of_images += [own[math.ceil(share * len(own)) - 1]] if own else []
        assert len(of_images) == 299
        threshold = sorted(of_images)[math.ceil(300 * level) - 1]
        chosen = new.set(level, allow_empty=True)
        assert torch.equal(chosen, 1 - new.probs.double() <= threshold)
        last = chosen.movedim(class_dim, -1)
        right, counted = last.gather(-1, y[320:].clamp(min=0).unsqueeze(-1)).squeeze(-1), y[320:] >= 0
        shares = (right & counted).flatten(1).sum(1) / counted.flatten(1).sum(1)
        kept = float((shares >= level).double().mean())
        assert kept > level - _band(level, 299, 900)
        if level != 0.93:
            assert kept < level + _band(level, 299, 900) + 1 / 300
    sizes = new.set(0.9).movedim(class_dim, -1).sum(-1)
    assert int(sizes.min()) == 1 and new.set(0.9).shape == new.probs.shape
    uq.save(posterior, tmp_path / "p.h5")
    again = uq.wrap(model, uq.load(tmp_path / "p.h5", model))(inputs[320:])
    assert torch.equal(again.set(0.9), new.set(0.9))
    found = uq.evaluate(predictor, _batches(inputs[320:], y[320:]), progress=False)
    (measured,) = found.promised.values()
    assert abs(measured["observed_coverage_90"] - 0.9) < _band(0.9, 299, 900) + 1 / 300
    of_image = (sizes * (y[320:] >= 0)).flatten(1).sum(1) / (y[320:] >= 0).flatten(1).sum(1)
    assert measured["set_size_90"] == pytest.approx(float(of_image.double().mean()), rel=1e-6)
    assert not any(found.promised_by_class.values()) and "Coverage of promises" in found.figures()
    with pytest.raises(uq.PosthocUQError, match="Sets of positions are by 'lac'"):
        uq.calibrate(posterior, [(inputs[20:320], y[20:320])], sets="aps", **FAST)
    with pytest.raises(uq.PosthocUQError, match="calibrate with more"):
        new.set(0.999)


def test_records_that_contradict_themselves() -> None:
    scores = {"values": [0.0, 1.0], "count": 2}
    tail = {"values": [1.0, 0.0], "shares": [0.5, 1.0]}
    record = {
        "samples": 2,
        "seed": 0,
        "head": {"head": "linearized"},
        "posterior": {"temperature": 1.0},
        "inputs": {"entropy": scores, "joint": scores},
        "tails": {"entropy": tail},
    }

    def check(**promises: Any) -> None:
        history = {"fit": {}, "deterministic": {}, "tuning": {}, "promises": record | promises}
        validate_record(HistoryRecord, history, "it")

    check()
    check(wrong={"entropy": [0, 2], "joint": [1, 1]})
    of_positions = {"kind": "positions", "scores": [scores, scores], "shares": [0.5, 1.0]}
    check(targets=of_positions)
    of_inputs = {name: record[name] for name in ("inputs", "tails")}
    check(counted=of_inputs)
    for broken in (
        {"values": [1.0, 0.0], "count": 2},
        {"values": [0.0], "count": 2},
        {"values": [], "count": 0},
    ):
        with pytest.raises(CorruptPosteriorError):
            validate_record(HeldOutScores, broken, "it")
    for name, value in (
        ("tails", {}),
        ("tails", {"entropy": tail | {"shares": [0.5, 0.5]}}),
        ("tails", {"entropy": tail | {"values": [0.0, 1.0]}}),
        ("share", 1.0),
        ("head", {"head": "linearized", "n_samples": 10**9}),
        ("targets", {"kind": "entropy", "scores": [scores]}),
        ("targets", {"kind": "positions", "scores": [scores]}),
        ("targets", {"kind": "positions", "scores": [scores], "shares": [0.9]}),
        ("targets", {"kind": "positions", "scores": [scores], "shares": [0.9, 1.0]}),
        ("targets", {"kind": "lac", "scores": [scores], "shares": [1.0]}),
        ("counted", of_inputs | {"tails": {}}),
        ("counted", {"inputs": {"novelty": scores, "joint": scores}, "tails": {"novelty": tail}}),
        ("wrong", {"entropy": [0, 1]}),
        ("wrong", {"entropy": [0, 1], "joint": [0]}),
        ("wrong", {"entropy": [0, 1], "joint": [1, 0]}),
        ("wrong", {"entropy": [0, 1], "joint": [0, 3]}),
    ):
        with pytest.raises(CorruptPosteriorError):
            check(**{name: value})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_number_that_is_missing_is_named_by_its_row_in_the_loader() -> None:
    """And not by its place among those that tune."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(60, 3), torch.arange(60) % 2
    posterior = uq.fit(model, [(x, y)], "diag", prior_precision=1.0, progress=False)
    for row in (31, 40, 59):
        held = x.clone()
        held[row, 1] = float("nan")
        data = list(zip(held.split(30), y.split(30), strict=True))
        with pytest.raises(
            uq.NonFiniteError, match=rf"Batch 1: .* 1 of 30 inputs \(number {row - 30} first\)"
        ):
            uq.calibrate(posterior, data, progress=False)


def test_a_model_that_takes_missing_numbers() -> None:
    """What the model fills in is no fault of the data."""

    class Filled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.nan_to_num(input))

    torch.manual_seed(0)
    model, x, y = Filled(3, 2), torch.randn(60, 3), torch.arange(60) % 2
    filled = x.clone()
    x[::7, 1], filled[::7, 1] = torch.nan, 0.0
    posterior = uq.fit(model, [(x, y)], "diag", prior_precision=1.0, progress=False)
    posterior = uq.calibrate(posterior, [(x, y)], progress=False)
    wrapped = uq.wrap(model, posterior)
    assert torch.equal(wrapped(x).familiarity(), wrapped(filled).familiarity())


def test_no_held_out_novelty_is_said() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(60, 3), torch.arange(60) % 2
    posterior = uq.fit(model, [(x, y)], "diag", prior_precision=1.0, progress=False)
    posterior = uq.calibrate(posterior, [(x, y)], progress=False, head="linearized", novelty=False)
    prediction = uq.wrap(model, posterior)(x)
    with pytest.raises(uq.PosthocUQError, match="no held-out scores of novelty"):
        prediction.familiarity()
    assert bool((prediction.familiarity("entropy") > 0).all())


def test_the_scale_of_the_moments_head_is_fitted_anew() -> None:
    torch.manual_seed(0)
    x, held_out = torch.randn(60, 4), torch.randn(60, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    posterior = uq.fit(model, [(x, (x[:, 0] > 0).long())], "diag", head="moments", progress=False)
    scaled = uq.wrap(model, posterior).fit_scale([x], n_mc=20, progress=False).posterior
    labelled = [(held_out, (held_out[:, 0] > 0).long())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = uq.calibrate(scaled, labelled, progress=False)
        predictor = uq.wrap(model, found)
    assert found.history.calibration is not None and found.history.calibration.n_mc == 20
    assert predictor.scale_correction is not None and not isinstance(predictor.promises, str)
    assert 0 < float(predictor(x).set(0.8).sum(1).double().mean()) <= 2


def test_all_labels_choose_the_temperature_and_promises_keep_that_of_the_first_part(
    classes, fitted, tmp_path: Path
) -> None:
    model, x, y = classes
    posterior = uq.calibrate(fitted, _batches(x[100:160], y[100:160]), **FAST)
    promises, predictor = posterior.history.promises, uq.wrap(model, posterior)
    assert promises.retuned == {"temperature": posterior.temperature}
    assert promises.posterior["temperature"] != posterior.temperature and posterior.keeps_promises
    # independently: the head of the promises' temperature, and its scores
    judged = fitted.with_settings(
        temperature=promises.posterior["temperature"], prior_precision=promises.posterior["prior_precision"]
    )
    options: dict[str, Any] = {"head": "linearized", "link": "probit"}
    prediction, probs = predictor(x[160:]), uq.wrap(model, judged, **options)(x[160:]).probs
    threshold = promises.targets.scores[0].values[math.ceil(31 * 0.9) - 1]
    expected = (1 - probs.double() <= threshold) | F.one_hot(probs.argmax(1), 3).bool()
    assert torch.equal(prediction.set(0.9), expected)
    assert not torch.allclose(prediction.probs, probs, atol=1e-4)
    # through everything that is done with predictions
    rows = torch.arange(len(expected)) % 2 == 0
    for other in (prediction.picked(rows), pickle.loads(pickle.dumps(prediction)).picked(rows)):
        assert torch.equal(other.set(0.9), expected[rows])
    parts = uq.Prediction.cat([predictor(x[160:200]), predictor(x[200:])])
    assert torch.equal(parts.set(0.9), expected)
    mixed = uq.Prediction.cat([predictor(x[160:200]), uq.wrap(model, judged, **options)(x[200:])])
    assert mixed.at_promises() is mixed  # not the first part alone
    assert torch.equal(predictor.predict([x[160:]], progress=False).set(0.9), expected)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    assert torch.equal(loaded(x[160:]).set(0.9), expected)
    program = uq.export(predictor, x[:4]).module()
    assert torch.equal(program(x[160:]).set, expected)
    for head in ("sampling", "moments"):
        found = uq.calibrate(fitted, _batches(x[100:160], y[100:160]), head=head, progress=False)
        mine, at = uq.wrap(model, found), found.history.promises.posterior
        plain = uq.wrap(model, found.with_settings(temperature=at["temperature"]), head)(x[160:]).probs
        assert torch.allclose(mine(x[160:]).at_promises().probs, plain, atol=1e-6)


def test_no_promising_label_chooses_what_scores_are_made_with(classes, fitted) -> None:
    """Where a changed label is one of those that promise, scores keep their temperature and probabilities do not."""
    _, x, y = classes
    held_out = (x[100:160], y[100:160])
    found = uq.calibrate(fitted, [held_out], **FAST).history.promises
    tried = []
    for row in range(0, 60, 3):
        labels = held_out[1].clone()
        labels[row] = (labels[row] + 1) % 3
        other = uq.calibrate(fitted, [(held_out[0], labels)], **FAST).history.promises
        tried.append((other.posterior == found.posterior, other.retuned == found.retuned))
    # a row's part depends on its label too, so that a changed label of the other part may move it
    kept = [same for same, _ in tried]
    assert 0.2 < sum(kept) / len(kept) < 0.8
    assert not any(retuned for same, retuned in tried if same)
