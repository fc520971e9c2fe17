"""Promises by held-out data: ranks against their definition, coverage, the file, what makes them void."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.fitting.calibrate import Calibration
from posthoc_uq.likelihoods.conformal import (
    MAX_KEPT,
    class_scores,
    held_out_scores,
    kept_scores,
    p_values,
    quantile,
    set_of,
)

# Ranks


@pytest.mark.parametrize("samples", [1, 7, 19, 500])
def test_a_quantile_is_the_score_of_the_rank_that_the_level_asks_for(samples: int) -> None:
    scores = torch.randn(samples, generator=torch.Generator().manual_seed(samples))
    kept = held_out_scores(scores)
    assert torch.equal(kept_scores(kept.values.tolist(), samples).values, kept.values)
    for rank in range(1, samples + 1):
        level = rank / (samples + 1)
        assert quantile(kept, level) == float(scores.double().sort().values[rank - 1])
        below = level - 0.5 / (samples + 1)  # between two ranks the larger one counts
        assert below <= 0 or quantile(kept, below) == quantile(kept, level)
    with pytest.raises(uq.PosthocUQError, match="held-out samples"):
        quantile(kept, (samples + 0.5) / (samples + 1))
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(uq.PosthocUQError, match="between 0 and 1"):
            quantile(kept, level)


def test_as_many_samples_are_asked_for_as_are_needed() -> None:
    for level, needed in ((0.9, 9), (0.95, 19), (0.99, 99)):
        with pytest.raises(uq.PosthocUQError, match=f" {needed} held-out"):
            quantile(held_out_scores(torch.arange(needed - 1.0)), level)
        assert quantile(held_out_scores(torch.arange(float(needed))), level) == needed - 1


def test_p_values_count_the_scores_that_are_as_large() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 5.0])
    new = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, math.nan])
    expected = torch.tensor([5, 5, 4, 2, 2, 1, math.nan], dtype=torch.float64) / 5
    torch.testing.assert_close(p_values(held_out_scores(scores), new), expected, equal_nan=True)


def test_thinned_scores_err_on_the_safe_side_and_by_little() -> None:
    scores = torch.randn(20_001, generator=torch.Generator().manual_seed(0))
    kept = held_out_scores(scores)
    assert len(kept.values) == MAX_KEPT and kept.samples == 20_001
    assert float(kept.values[-1]) == float(scores.double().max())
    ordered = scores.double().sort().values
    for level in (0.001, 0.1, 0.5, 0.9, 0.999):
        rank = math.ceil(20_002 * level)
        found = int((ordered <= quantile(kept, level)).sum())
        assert rank <= found <= rank + 20_001 / MAX_KEPT + 1
    new = torch.linspace(-5, 5, 200)
    exact = (1 + (scores.double() >= new.double().unsqueeze(1)).sum(1)).double() / 20_002
    p = p_values(kept, new)
    assert bool((p >= exact).all()) and float((p - exact).max()) <= 1 / MAX_KEPT


@pytest.mark.parametrize("samples", [19, 100, 1000])
def test_scores_that_are_exchangeable_are_covered(samples: int) -> None:
    """The mean coverage of 400 divisions is in [level, level + 1 / (n + 1)], within four standard errors."""
    generator = torch.Generator().manual_seed(samples)
    for alpha in (0.01, 0.05, 0.1, 0.2):
        if 1 - alpha > samples / (samples + 1):
            continue
        covered = []
        for _ in range(400):
            scores = torch.randn(samples + 200, generator=generator)
            kept = held_out_scores(scores[:samples])
            covered.append(float((scores[samples:] <= quantile(kept, 1 - alpha)).double().mean()))
            if alpha == 0.05:
                assert float((p_values(kept, scores[samples:]) <= 0.05).double().mean()) <= 0.3
        found = torch.tensor(covered)
        error = 4 * float(found.std()) / 20
        assert 1 - alpha - error <= float(found.mean()) <= 1 - alpha + 1 / (samples + 1) + error


def test_scores_of_classes_are_those_of_their_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(20, 6, generator=generator, dtype=torch.float64).softmax(1)
    uniform = torch.rand(20, generator=generator, dtype=torch.float64)
    for kind in ("lac", "aps", "raps"):
        found = class_scores(probs, kind, uniform, penalty=0.1, free_classes=2)
        for row, p in enumerate(probs.tolist()):
            for label in range(6):
                larger = sum(q for q in p if q > p[label])
                rank = 1 + sum(q > p[label] for q in p)
                expected = 1 - p[label] if kind == "lac" else larger + (1 - float(uniform[row])) * p[label]
                expected += 0.1 * max(0, rank - 2) if kind == "raps" else 0.0
                assert float(found[row, label]) == pytest.approx(expected, abs=1e-12)
    chosen = set_of(probs, 1 - probs, -1.0)
    assert torch.equal(chosen.int().argmax(1), probs.argmax(1)) and bool((chosen.sum(1) == 1).all())
    assert not set_of(probs, 1 - probs, -1.0, allow_empty=True).any()


# From data to promises

Data = list[tuple[Tensor, Tensor]]


@functools.cache
def classes() -> tuple[nn.Module, Data, Data, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (2500,), generator=generator)
    x = torch.randn(2500, 5, generator=generator) + 1.3 * nn.functional.one_hot(y, 5)
    return trained(3, x, y, nn.functional.cross_entropy)


@functools.cache
def values() -> tuple[nn.Module, Data, Data, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2500, 3, generator=generator)
    y = torch.stack((x[:, 0].sin(), x[:, 1]), 1) + torch.tensor([0.3, 1.0]) * torch.randn(
        2500, 2, generator=generator
    )
    return trained(2, x, y, nn.functional.mse_loss)


def trained(
    outputs: int, x: Tensor, y: Tensor, loss: Any
) -> tuple[nn.Module, Data, Data, tuple[Tensor, Tensor]]:
    """A network that has memorised 100 samples, these, 400 held-out ones, and 2,000 new ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 40), nn.ReLU(), nn.Linear(40, outputs))
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(300):
        optimiser.zero_grad()
        loss(model(x[:100]), y[:100]).backward()
        optimiser.step()
    held_out = list(zip(x[100:500].split(64), y[100:500].split(64), strict=True))
    return model.eval(), [(x[:100], y[:100])], held_out, (x[500:], y[500:])


def fitted(case: Any, **options: Any) -> tuple[uq.Posterior, Data, tuple[Tensor, Tensor]]:
    model, data, held_out, new = case()
    likelihood = "regression" if data[0][1].is_floating_point() else "classification"
    arguments: dict[str, Any] = {"layers": "last", "likelihood": likelihood, "noise_variance": 0.5}
    if likelihood == "classification":
        del arguments["noise_variance"]
    return uq.fit(model, data, "diag", progress=False, **arguments, **options), held_out, new


def test_sets_of_classes_keep_their_promise(tmp_path: Path) -> None:
    posterior, held_out, (x, y) = fitted(classes)
    with pytest.raises(uq.PosthocUQError, match="calibrate"):
        uq.wrap(posterior.model, posterior)(x).set(0.9)
    found = uq.calibrate(posterior, held_out, progress=False)
    assert isinstance(found, Calibration) and (found.tuned, found.promised) == (200, 200)
    assert "promises up to a level of 0.995" in str(found)
    prediction = uq.wrap(posterior.model, posterior)(x)
    for level in (0.8, 0.9, 0.99):
        sets = prediction.set(level)
        covered = float(sets.gather(1, y.unsqueeze(1)).double().mean())
        assert abs(covered - level) < 4 * (level * (1 - level) / 200) ** 0.5 + 1 / 201
    assert 1 <= float(prediction.set(0.9).sum(1).double().mean()) < 2.5
    p = prediction.familiarity()
    assert abs(float((p <= 0.1).double().mean()) - 0.1) < 0.09
    foreign = 6 * torch.randn(2000, 5, generator=torch.Generator().manual_seed(3))
    unfamiliar = uq.wrap(posterior.model, posterior)(foreign).familiarity()
    assert float((unfamiliar <= 0.1).double().mean()) > 2 * float((p <= 0.1).double().mean())
    # the file, parts and other devices' copies keep it
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.wrap(posterior.model, uq.load(tmp_path / "p.h5", posterior.model))
    assert torch.equal(loaded(x).set(0.9), prediction.set(0.9))
    assert torch.equal(loaded(x).familiarity(), p)
    assert "promises" in str(uq.inspect(tmp_path / "p.h5")) and "promises" in str(posterior.report())
    whole = loaded.predict([(x[:900],), (x[900:],)], progress=False)
    assert torch.equal(whole.set(0.9), prediction.set(0.9))
    assert torch.equal(whole.picked(slice(3, 9)).set(0.9), prediction.set(0.9)[3:9])


def test_intervals_of_every_output_keep_their_promise() -> None:
    posterior, held_out, (x, y) = fitted(values)
    before = uq.wrap(posterior.model, posterior)(x).interval(0.9)
    uq.calibrate(posterior, held_out, progress=False)
    prediction = uq.wrap(posterior.model, posterior)(x)
    for level in (0.8, 0.9, 0.99):
        low, high = prediction.interval(level)
        covered = ((y >= low) & (y <= high)).double().mean(0)
        assert float((covered - level).abs().max()) < 4 * (level * (1 - level) / 200) ** 0.5 + 1 / 201
    assert not torch.equal(prediction.interval(0.9)[0], before[0])
    low, high = prediction.interval(0.9, promised=False)
    torch.testing.assert_close((high - low) / 2, 1.6448536 * prediction.standard_deviation)
    with pytest.raises(uq.PosthocUQError, match="999 held-out"):
        prediction.interval(0.999)
    assert prediction.quality(y)["coverage of 90 %"] == pytest.approx(0.9, abs=0.1)


def test_neither_the_batches_nor_the_order_matter_and_seeds_divide() -> None:
    posterior, held_out, _ = fitted(classes)
    uq.calibrate(posterior, held_out, progress=False)
    first = posterior.history.promises["scores"]["class"]
    inputs, labels = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    again, _, _ = fitted(classes)
    uq.calibrate(again, [(inputs[order], labels[order])], progress=False)
    torch.testing.assert_close(again.history.promises["scores"]["class"], first, rtol=1e-4, atol=1e-6)
    uq.calibrate(again, held_out, seed=1, progress=False)
    assert again.history.promises["scores"]["class"] != first


def test_all_data_for_both_is_an_approximate_promise() -> None:
    posterior, held_out, _ = fitted(classes)
    found = uq.calibrate(posterior, held_out, share=None, progress=False)
    assert isinstance(found, Calibration) and (found.tuned, found.promised, found.shared) == (400, 400, True)
    assert "approximate" in str(found) and "approximately" in str(posterior.report())


def test_another_posterior_or_head_promises_nothing() -> None:
    posterior, held_out, (x, _) = fitted(classes)
    uq.calibrate(posterior, held_out, progress=False)
    with pytest.raises(uq.PosthocUQError, match="calibrate"):
        uq.wrap(posterior.model, posterior, "sampling")(x).set(0.9)
    temperature = posterior.temperature
    posterior.temperature = 3.0
    with pytest.raises(uq.PosthocUQError, match="calibrate"):
        uq.wrap(posterior.model, posterior)(x).familiarity()
    posterior.temperature = temperature
    assert uq.wrap(posterior.model, posterior)(x).set(0.9).any()
    updated = uq.update(posterior, held_out[:1], progress=False)
    assert not updated.history.promises


def test_what_cannot_be_calibrated_is_refused_and_changes_nothing() -> None:
    posterior, held_out, _ = fitted(classes)
    settings, history = posterior.settings, dict(posterior.history.promises)
    x, y = held_out[0]
    for arguments, options, words in (
        ([x], {}, "targets"),
        ([(x[:1], y[:1])], {}, "share=None"),
        (held_out, {"share": 1.0}, "share"),
        (held_out, {"criterion": "evidence"}, "criterion"),
        (held_out, {"groups": [0]}, "leave_one_out"),
        (held_out, {"criterion": "leave_one_out", "head": "sampling"}, "head"),
        (held_out, {"n_draw": 3}, "n_draw"),
    ):
        with pytest.raises(uq.PosthocUQError, match=words):
            uq.calibrate(posterior, arguments, progress=False, **options)
    assert posterior.settings == settings and posterior.history.promises == history
    with pytest.raises(uq.PosthocUQError, match="posterior"):
        uq.calibrate(posterior.model, held_out)  # type: ignore[arg-type]
