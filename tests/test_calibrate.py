"""`calibrate`: promises end to end, in files, and what makes them void."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.core.records import validate_record
from posthoc_uq.files.records import HeldOutRecord, PromisesRecord

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
    result = uq.calibrate(fitted, _batches(x[100:900], y[100:900]), sets=sets, **FAST)
    assert result.samples == result.tuned == 400 and "99.75 %" in str(result) and "temperature" in str(result)
    prediction, labels = uq.wrap(model, fitted)(x[900:]), y[900:]
    for level in (0.8, 0.9, 0.95):
        chosen = prediction.set(level, allow_empty=sets != "lac")
        covered = float(chosen[torch.arange(len(labels)), labels].double().mean())
        assert abs(covered - level) < _band(level, 400, len(labels)) + 0.0025
    for score in ("novelty", "entropy", "joint"):
        p = prediction.familiarity(score)
        assert bool((p > 0).all()) and bool((p <= 1).all())
        assert abs(float((p <= 0.1).double().mean()) - 0.1) < _band(0.1, 400, len(labels)) + 0.0025
    assert float(uq.wrap(model, fitted)(50 + x[:50]).familiarity().max()) < 0.05
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
        uq.calibrate(fitted, held_out, sets="aps", **FAST)
        records.append(fitted.history.promises)
    first, second = records
    assert first["samples"] == second["samples"] == 300
    for a, b in zip(first["targets"]["scores"], second["targets"]["scores"], strict=True):
        assert torch.allclose(torch.tensor(a["values"]), torch.tensor(b["values"]), atol=2e-3)

    uq.save(fitted, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.history.promises == second
    mine, again = uq.wrap(model, fitted), uq.wrap(model, loaded)
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
        uq.calibrate(fitted, [(rows[drawn], labels)], seed=seed, **FAST)
        p = uq.wrap(model, fitted)(rows).familiarity()
        small.append(float((p <= 0.05).double().mean()))
    assert sum(small) / len(small) <= 0.05


def test_what_makes_promises_void(classes, fitted) -> None:
    model, x, y = classes
    predictor = uq.wrap(model, fitted)
    with pytest.raises(uq.PosthocUQError, match="held-out scores"):
        predictor(x).set(0.9)
    uq.calibrate(fitted, _batches(x[100:300], y[100:300]), **FAST)
    predictor = uq.wrap(model, fitted)
    predictor(x).set(0.9)
    with pytest.raises(uq.PosthocUQError, match="calibrate for this one"):
        uq.wrap(model, fitted, "linearized", link="mc")(x).set(0.9)
    with pytest.warns(UserWarning, match="no longer hold"):
        fitted.temperature = 3.0
    for call in (lambda p: p.set(0.9), lambda p: p.familiarity()):
        with pytest.raises(uq.PosthocUQError, match="hyperparameters changed"):
            call(predictor(x))
    with pytest.warns(UserWarning, match="cleared"):
        assert not uq.update(fitted, [(x[:20], y[:20])], progress=False).history.promises


def test_an_error_leaves_the_posterior_as_it_was(classes, fitted) -> None:
    _, x, y = classes
    before, held_out = fitted.settings, _batches(x[100:300], y[100:300])
    for loader, options, words in (
        ([x[100:300]], {}, "targets"),
        ([(x[100:101], y[100:101])], {}, "empty"),
        (held_out, {"sets": "ips"}, "sets"),
        (held_out, {"share": 1.0}, "share"),
        (iter(held_out), {}, "only once"),
        (_batches(x[100:300], y[100:300].clamp(max=1)), {"by_class": True}, "none of"),
        (held_out, {"n_sample": 3}, "n_sample"),
    ):
        with pytest.raises(uq.PosthocUQError, match=words):
            uq.calibrate(fitted, loader, **FAST | options)
    changing = _Changing(x[100:300], y[100:300])
    with pytest.raises(uq.PosthocUQError, match="other inputs"):
        uq.calibrate(fitted, changing, **FAST)
    assert fitted.settings == before and not fitted.history.promises


class _Changing:
    """A loader that changes its inputs at random."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.generator = x, y, torch.Generator().manual_seed(0)

    def __iter__(self):
        yield self.x + torch.randn(self.x.shape, generator=self.generator), self.y


def test_each_class_and_all_samples_in_both_parts(classes, fitted) -> None:
    model, x, y = classes
    held_out = _batches(x[100:1900], y[100:1900], 600)
    result = uq.calibrate(fitted, held_out, by_class=True, **FAST)
    prediction, labels = uq.wrap(model, fitted)(x[1900:]), y[1900:]
    assert len(fitted.history.promises["targets"]["scores"]) == 3 and not result.approximate
    chosen = prediction.set(0.9)[torch.arange(len(labels)), labels].double()
    for each in range(3):
        assert float(chosen[labels == each].mean()) > 0.9 - _band(0.9, 300, 500)
    result = uq.calibrate(fitted, held_out, share=None, **FAST)
    assert result.approximate and result.samples == result.tuned == 1800 and "approximately" in str(result)


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
    uq.calibrate(posterior, _batches(x[60:660], y[60:660]), progress=False)
    prediction, targets = uq.wrap(model, posterior)(x[1000:]), y[1000:].reshape(before[0].shape)
    for level in (0.5, 0.9, 0.99):
        low, high = prediction.interval(level)
        covered = ((low <= targets) & (targets <= high)).double().reshape(1500, -1).mean(0)
        assert float((covered - level).abs().max()) < _band(level, 300, 1500) + 0.0034
    assert len(posterior.history.promises["targets"]["scores"]) == outputs
    with pytest.raises(uq.PosthocUQError, match="held-out samples"):
        prediction.interval(0.9999)
    half = torch.full((4, 2), 0.5)
    with pytest.raises(uq.PosthocUQError, match="no scores of such"):
        uq.ClassPrediction(half, half, half, promises=prediction.promises).set(0.9)


@pytest.mark.parametrize("likelihood", ["regression", "poisson"])
def test_several_values_are_promised_jointly(likelihood: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = 0.5 * torch.randn(2000, 2, generator=generator)
    model = nn.Linear(2, 3)
    with torch.no_grad():
        means = model(x)
    y = means + torch.randn(2000, 3, generator=generator)
    y = torch.poisson(means.exp(), generator=generator) if likelihood == "poisson" else y
    options: dict[str, Any] = {"likelihood": likelihood, "prior_precision": 10.0, "progress": False}
    posterior = uq.fit(model, [(x[:300], y[:300])], "diag", **options)
    uq.calibrate(posterior, _batches(x[300:900], y[300:900]), jointly=True, progress=False)
    predictor = uq.wrap(model, posterior)
    low, high = predictor(x[900:]).interval(0.9)
    together = ((low <= y[900:]) & (y[900:] <= high)).all(1).double().mean()
    assert float(together) > 0.9 - _band(0.9, 300, 1100)
    if likelihood == "regression":  # counts are whole, so that their intervals hold more
        assert float(together) < 0.9 + _band(0.9, 300, 1100) + 0.0034
        found = uq.evaluate(predictor, _batches(x[900:], y[900:]), progress=False).promised["linearized"]
        assert found["promised coverage of 90 %"] == pytest.approx(float(together))
    with pytest.raises(uq.PosthocUQError, match="no sets of classes"):
        predictor(x[:2]).set(0.9)
    with pytest.raises(uq.PosthocUQError, match="no values are predicted"):
        classes = uq.fit(nn.Linear(2, 3), [(x[:300], y[:300].argmax(1))], prior_precision=1.0, progress=False)
        uq.calibrate(classes, _batches(x[300:900], y[300:900].argmax(1)), jointly=True, progress=False)


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
    uq.calibrate(
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
        saturated = prediction.known_promises().targets[0].values.clone()
        saturated[-20:] = 0.5  # targets where the distribution function rounds to 1
        scores = replace(prediction.known_promises().targets[0], values=saturated)
        promises = replace(prediction.known_promises(), targets=(scores,))
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
    result = uq.calibrate(posterior, [(x[20:], y[20:])], share=None, **FAST)
    prediction = uq.wrap(model, posterior)(x[20:])
    assert result.samples == 70 and "that share of an input's labels" in str(result)
    kept = torch.tensor(posterior.history.promises["inputs"]["entropy"]["values"]).double()
    assert torch.allclose(kept, prediction.scores()["entropy"].double().sort().values, atol=1e-6)
    assert int(uq.Referral(0.1, score="entropy")(prediction).sum()) == 6
    assert bool((uq.wrap(model, posterior)(9 + x[:5]).familiarity() < 0.1).all())
    with pytest.raises(uq.PosthocUQError, match="counted right or wrong"):
        uq.Referral(accuracy=0.5)(prediction)


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
    uq.calibrate(posterior, [(inputs[20:320], y[20:320])], share=None, **FAST)
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
    assert abs(measured["promised coverage of 90 %"] - 0.9) < _band(0.9, 299, 900) + 1 / 300
    of_image = (sizes * (y[320:] >= 0)).flatten(1).sum(1) / (y[320:] >= 0).flatten(1).sum(1)
    assert measured["set size of 90 %"] == pytest.approx(float(of_image.double().mean()), rel=1e-6)
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
    validate_record(PromisesRecord, record, "it")
    validate_record(PromisesRecord, record | {"wrong": {"entropy": [0, 2], "joint": [1, 1]}}, "it")
    of_positions = {"kind": "positions", "scores": [scores, scores], "shares": [0.5, 1.0]}
    validate_record(PromisesRecord, record | {"targets": of_positions}, "it")
    for broken in (
        {"values": [1.0, 0.0], "count": 2},
        {"values": [0.0], "count": 2},
        {"values": [], "count": 0},
    ):
        with pytest.raises(CorruptPosteriorError):
            validate_record(HeldOutRecord, broken, "it")
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
        ("wrong", {"entropy": [0, 1]}),
        ("wrong", {"entropy": [0, 1], "joint": [0]}),
        ("wrong", {"entropy": [0, 1], "joint": [1, 0]}),
        ("wrong", {"entropy": [0, 1], "joint": [0, 3]}),
    ):
        with pytest.raises(CorruptPosteriorError):
            validate_record(PromisesRecord, record | {name: value}, "it")
