"""The prior of a regression whose noise leave-one-out found, and the method that a fit then takes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq

Options = dict[str, Any]
OPTIONS: Options = {"likelihood": "regression", "progress": False}


@functools.cache
def sine(outputs: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that fits 150 points of a sine with a noise of .1 on [0, 8], and these points."""
    generator = torch.Generator().manual_seed(0)
    x = 8 * torch.rand(150, 1, generator=generator)
    y = torch.cat([x.sin(), x.cos()], 1)[:, :outputs]
    y = y + 0.1 * torch.randn(150, outputs, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(Shifted(), nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, outputs))
    train(model, x, y)
    return model, x, y


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = nn.functional.mse_loss(model(x), y)
        value.backward()
        return value

    optimiser.step(loss)


class Shifted(nn.Module):
    """Inputs on [0, 8] to about unit size."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 4) / 2.3


def covered(model: nn.Module, posterior: uq.Posterior, x: Tensor) -> float:
    low, high = uq.wrap(model, posterior)(x).interval(0.9)
    return float(((low <= x.sin()) & (x.sin() <= high)).double().mean())


def test_few_weights_get_a_dense_covariance_that_widens_outside_of_the_data() -> None:
    model, x, y = sine()
    posterior = uq.fit(model, [(x, y)], **OPTIONS)
    assert posterior.method == "full" and "for 91 weights and 150 samples" in str(posterior.report())
    outside = torch.cat([torch.linspace(-3, 0, 50), torch.linspace(8, 11, 50)])[:, None]
    narrow = uq.fit(model, [(x, y)], "inf", divergence=0.0021, **OPTIONS)
    assert covered(model, narrow, outside) < 0.5 and covered(model, posterior, outside) > 0.6
    inside = uq.wrap(model, posterior)(x)
    assert float(inside.variance.mean()) == pytest.approx(float(noise_of(model, x, y)), rel=1e-4)
    # a method that is named, layers that are named, and few rows
    assert uq.fit(model, [(x, y)], "inf", **OPTIONS).method == "inf"
    assert uq.fit(model, [(x, y)], layers="last", **OPTIONS).method == "inf"
    assert uq.fit(model, [(x[:59], y[:59])], **OPTIONS).method == "inf"


def test_few_held_out_labels_begin_at_what_leave_one_out_found() -> None:
    """Begun at the noise of ten labels and a faithful prior, a search would lose the width."""
    model, x, y = sine()
    posterior = uq.fit(model, [(x, y)], "inf", **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    held_out = 8 * torch.rand(10, 1, generator=generator)
    labels = held_out.sin() + 0.1 * torch.randn(10, 1, generator=generator)
    tuned = uq.tune(posterior, [(held_out, labels)], progress=False)
    assert tuned.history.trials and tuned.history.trials.trials[0].settings == posterior.settings
    assert float(tuned.prior_precision) <= float(posterior.prior_precision) * (1 + 1e-9)
    again = uq.tune(tuned, [(held_out, labels)], progress=False)  # it begins there, too
    assert again.settings == tuned.settings


def noise_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """That leave-one-out finds."""
    posterior = uq.fit(model, [(x, y)], prior_precision=1.0, **OPTIONS)
    posterior = uq.tune(posterior, [(x, y)], criterion="leave_one_out", progress=False)
    return posterior.noise_variance


@pytest.mark.parametrize(("method", "outputs"), [("inf", 1), ("full", 1), ("full", 2), ("kfac", 2)])
def test_the_rule_against_evidence_and_divergences_of_its_own(method: str, outputs: int) -> None:
    """By a grid of prior precisions, all others by definition."""
    model, x, y = sine(outputs)
    posterior = uq.fit(model, [(x, y)], method, **OPTIONS)
    fixed = uq.fit(model, [(x, y)], method, prior_precision=1.0, **OPTIONS)
    fixed = uq.tune(fixed, [(x, y)], criterion="leave_one_out", progress=False)
    evidence = math.log10(uq.tune(fixed, progress=False).prior_precision)

    def shares(decade: float) -> Tensor:
        at = fixed.with_settings(prior_precision=10.0**decade)
        return uq.wrap(model, at)(x).epistemic_variance.double() / at.noise_variance

    def nats(decade: float, left_out: bool) -> float:
        share = shares(decade).clamp(max=0.9) if left_out else shares(decade)
        ratio = share / (1 - share) if left_out else share
        return float(0.5 * (ratio.log1p() + 1 / (1 + ratio) - 1).mean())

    decade = evidence
    if nats(evidence, True) <= 0.03:
        grid = [evidence - step * 0.05 for step in range(61)]
        decade = (evidence + min(each for each in grid if nats(each, True) <= 0.03)) / 2
    factor = max(0.3, float((1 / (1 + shares(decade).mean(0))).mean()))
    assert math.log10(posterior.prior_precision * factor) == pytest.approx(decade, abs=0.06)
    assert posterior.noise_scale == pytest.approx(fixed.noise_scale * factor, rel=0.02)
    again = uq.tune(posterior, [(x, y)], criterion="leave_one_out", progress=False)
    assert again.settings.plain() == pytest.approx(posterior.settings.plain(), rel=1e-6)


def test_it_is_never_narrower_than_the_faithful_prior() -> None:
    """Ten rows a weight and all of them settled: the evidence asks for weights of about the trained size."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(300, 1, generator=generator) - 2
    y = (2 * x + 1).tanh() - (x - 0.5).tanh() + 0.05 * torch.randn(300, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    train(model, x, y)
    fixed = uq.fit(model, [(x, y)], "full", prior_precision=1.0, **OPTIONS)
    fixed = uq.tune(fixed, [(x, y)], criterion="leave_one_out", progress=False)
    faithful = uq.tune(fixed, [(x, y)], criterion="faithful", progress=False)
    evidence = uq.tune(fixed, progress=False)
    assert evidence.prior_precision / 1000**0.5 > faithful.prior_precision
    posterior = uq.fit(model, [(x, y)], **OPTIONS)
    width = posterior.prior_precision * posterior.noise_scale / fixed.noise_scale
    assert width == pytest.approx(faithful.prior_precision, rel=1e-6)


def test_held_out_rows_keep_the_width_of_the_fit() -> None:
    model, x, y = sine()
    held_out = [(x[:40] + 0.01, y[:40])]
    posterior = uq.fit(model, [(x, y)], **OPTIONS)
    calibrated = uq.fit(model, [(x, y)], val_loader=held_out, **OPTIONS)
    later = uq.calibrate(posterior, held_out, progress=False)
    assert calibrated.settings.plain() == pytest.approx(later.settings.plain(), rel=1e-6)
    width = [each.prior_precision * each.noise_scale for each in (posterior, calibrated)]
    assert width[0] == pytest.approx(width[1], rel=1e-6)
    assert calibrated.history.promises.targets.scores[0].count == 40


def test_a_noise_that_is_not_to_be_tuned_stays() -> None:
    model, x, y = sine()
    posterior = uq.fit(model, [(x, y)], "inf", **OPTIONS)
    held_out = [(x, y + torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))]
    tuned = uq.tune(posterior, held_out, progress=False)
    assert tuned.noise_scale > 2 * posterior.noise_scale
    assert uq.tune(tuned, held_out, noise=False, progress=False).noise_scale == tuned.noise_scale
