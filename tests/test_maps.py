"""Regressions of maps and sequences, against dense computations in float64 written from the definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.likelihoods import MapPrediction

SAMPLES, CHANNELS, TAU = 6, 2, 2.0
NOISE = torch.tensor([0.5, 0.2], dtype=torch.float64)


@dataclass
class Case:
    """A network with outputs at four positions of two channels each, its data, and the same outputs as rows."""

    model: nn.Sequential
    likelihood: uq.Gaussian
    x: Tensor
    y: Tensor

    def rows(self, outputs: Tensor) -> Tensor:
        """``(samples, positions, channels)``."""
        last = outputs if self.likelihood.channel_dim == -1 else outputs.permute(0, 2, 3, 1)
        return last.reshape(len(outputs), -1, last.shape[-1])

    def loader(self, size: int = 2) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    def jacobian(self, last: bool = False, x: Tensor | None = None) -> Tensor:
        """``(samples, positions, channels, weights)``, each layer's bias as its last column."""
        outputs = self.model(self.x if x is None else x)
        layers = [self.model[2]] if last else [self.model[0], self.model[2]]
        own = []
        for value in self.rows(outputs).flatten():
            parts = []
            for layer in layers:
                weight, bias = torch.autograd.grad(value, [layer.weight, layer.bias], retain_graph=True)
                parts.append(torch.cat([weight.flatten(1), bias[:, None]], 1).flatten())
            own.append(torch.cat(parts))
        return torch.stack(own).reshape(len(outputs), -1, self.rows(outputs).shape[-1], len(own[0]))

    def fisher(self, last: bool = False) -> Tensor:
        """``1/N sum_n sum_t J_nt^T diag(1 / noise) J_nt``."""
        own = self.jacobian(last)
        return torch.einsum("ntcw,c,ntcv->wv", own, 1 / NOISE, own) / SAMPLES

    def variances(self, last: bool = False) -> Tensor:
        """``diag(J Sigma J^T)`` at the inputs, ``(samples, positions, channels)``."""
        own = self.jacobian(last)
        covariance = torch.linalg.inv(SAMPLES * self.fisher(last) + TAU * torch.eye(own.shape[-1]).double())
        return torch.einsum("ntcw,wv,ntcv->ntc", own, covariance, own)


def case(kind: str) -> Case:
    torch.manual_seed(3)
    if kind == "map":
        model, shape = nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Conv2d(2, CHANNELS, 1)), (2, 3, 3)
    else:
        model, shape = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CHANNELS)), (4, 3)
    model = model.double().eval()
    x = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    with torch.no_grad():
        y = model(x) + 0.3 * torch.randn(model(x).shape, dtype=torch.float64)
    return Case(model, uq.Gaussian(NOISE, **({} if kind == "map" else {"channel_dim": -1})), x, y)


EVERY = pytest.mark.parametrize("kind", ["map", "series"])


def fit(of: Case, method: str = "full", size: int = 2, **options) -> uq.Posterior:
    options = {"prior_precision": TAU, "progress": False, "dtype": torch.float64} | options
    return uq.fit(
        of.model, options.pop("loader", of.loader(size)), method, **{"likelihood": of.likelihood} | options
    )


# The Fisher, the predictive variance, the noise and the evidence


@EVERY
def test_fisher_and_predictive_variance(kind: str) -> None:
    own = case(kind)
    posterior = fit(own, fisher="exact")
    torch.testing.assert_close(
        next(iter(posterior.blocks.values())).fisher, own.fisher(), rtol=1e-9, atol=1e-12
    )
    blocks = fit(own, "diag", fisher="exact").blocks
    diagonal = torch.cat([blocks[name].diagonal.flatten() for name in ("0", "2")])
    torch.testing.assert_close(diagonal, own.fisher().diagonal(), rtol=1e-9, atol=1e-12)
    prediction = uq.wrap(own.model, posterior)(own.x)
    assert isinstance(prediction, MapPrediction) and prediction.mean.shape == own.y.shape
    torch.testing.assert_close(prediction.mean, own.model(own.x))
    truth = own.variances()
    torch.testing.assert_close(own.rows(prediction.epistemic_variance), truth, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(own.rows(prediction.variance), truth + NOISE, rtol=1e-8, atol=1e-12)
    z = 1.6448536269514722
    low, high = prediction.interval(0.9)
    torch.testing.assert_close(own.rows(high - low), 2 * z * (truth + NOISE).sqrt(), rtol=1e-8, atol=1e-12)
    deviations = prediction.scores_by_position()["standard_deviation"]
    torch.testing.assert_close(deviations.flatten(1), (truth + NOISE).sqrt().mean(-1))
    torch.testing.assert_close(prediction.scores()["standard_deviation"], (truth + NOISE).sqrt().mean((1, 2)))


@EVERY
@pytest.mark.parametrize("method", ["kfac", "efb", "inf", "full"])
def test_last_layer(kind: str, method: str) -> None:
    """Its Fisher is one Kronecker product, so that every method is exact."""
    own = case(kind)
    prediction = uq.wrap(own.model, fit(own, method, layers="last", fisher="exact"))(own.x)
    truth = own.variances(last=True)
    torch.testing.assert_close(own.rows(prediction.epistemic_variance), truth, rtol=1e-7, atol=1e-10)
    assert prediction.novelty().shape == (SAMPLES, *prediction.positions)


@EVERY
def test_moments(kind: str) -> None:
    """Of independent weights of the last layer both closed forms are exact."""
    own = case(kind)
    posterior = fit(own, "diag", layers="last")
    first, second = (uq.wrap(own.model, posterior, head=head)(own.x) for head in ("linearized", "moments"))
    assert isinstance(second, MapPrediction)
    torch.testing.assert_close(second.variance, first.variance, rtol=1e-10, atol=0.0)


@EVERY
def test_drawn_targets_and_draws_of_weights(kind: str) -> None:
    own = case(kind)
    truth = own.fisher()
    posterior = fit(own, fisher="mc", n_samples=100)
    drawn = next(iter(posterior.blocks.values())).fisher
    assert float((drawn - truth).norm() / truth.norm()) < 0.2
    sampled = uq.wrap(own.model, fit(own, fisher="exact", layers="last"), head="sampling", n_samples=500)(
        own.x
    )
    torch.testing.assert_close(
        own.rows(sampled.epistemic_variance), own.variances(last=True), rtol=0.4, atol=1e-3
    )


def test_noise_of_each_channel_and_evidence() -> None:
    own = case("map")
    found = fit(own, likelihood="regression", fisher="exact", prior_precision="evidence")
    residuals = own.rows(own.y - own.model(own.x)).detach()
    torch.testing.assert_close(found.noise_variance, residuals.square().mean((0, 1)))
    truth = -0.5 * (residuals.square() / NOISE + (2 * math.pi * NOISE).log()).sum()
    known = fit(own, fisher="exact")
    assert known.evidence.log_likelihood == pytest.approx(float(truth), rel=1e-10)
    assert known.evidence.squared_residuals == pytest.approx(
        float((residuals.square() / NOISE).sum()), rel=1e-9
    )
    assert known.evidence.targets == own.y.numel()
    prediction = uq.wrap(own.model, known)(own.x)
    total = own.variances() + NOISE
    logs = -0.5 * (residuals.square() / total + (2 * math.pi * total).log())
    torch.testing.assert_close(prediction.log_prob(own.y), logs.sum((1, 2)))
    torch.testing.assert_close(prediction.log_prob_by_position(own.y).flatten(1), logs.sum(2))


@EVERY
def test_a_position_of_weight_zero_counts_for_nothing(kind: str) -> None:
    own = case(kind)
    weights = torch.ones(SAMPLES, *((2, 2) if kind == "map" else (4,)), dtype=torch.float64)
    weights.view(SAMPLES, 4)[0, 1:3] = 0
    weights.view(SAMPLES, 4)[3] = 0
    loader = [(own.x, own.y, weights)]
    found = fit(own, fisher="exact", loader=loader, batch_to_weights=lambda batch: batch[2])
    jacobian, counted = own.jacobian(), weights.reshape(SAMPLES, 4)
    truth = torch.einsum("ntcw,nt,c,ntcv->wv", jacobian, counted, 1 / NOISE, jacobian)
    block = next(iter(found.blocks.values()))
    torch.testing.assert_close(block.fisher * found.evidence.total, truth, rtol=1e-9, atol=1e-12)
    residuals = own.rows(own.y - own.model(own.x)).detach()
    logs = -0.5 * (residuals.square() / NOISE + (2 * math.pi * NOISE).log()).sum(2)
    assert found.evidence.log_likelihood == pytest.approx(float((logs * counted).sum()), rel=1e-10)
    features = found.features
    assert features is not None and features.samples == int(counted.sum())


# Promises


def test_promises_by_position_and_by_image(tmp_path: Path) -> None:
    """Noise that differs between images, and a posterior with a far too small noise: what is promised is kept."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 1).double().eval()
    x = torch.randn(420, 1, 4, 5, dtype=torch.float64)
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64).reshape(2, 1, 1)
    y = (
        model(x).detach()
        + (0.5 + torch.rand(420, 1, 1, 1)).double() * scale * torch.randn(420, 2, 4, 5).double()
    )
    posterior = uq.fit(model, [(x[:20], y[:20])], "full", likelihood=uq.Gaussian(0.1), progress=False)
    held_out, test = [(x[20:220], y[20:220])], slice(220, 420)
    posterior = uq.calibrate(posterior, held_out, share=0.05, progress=False)
    uq.save(posterior, tmp_path / "map.h5")
    prediction = uq.wrap(model, uq.load(tmp_path / "map.h5", model))(x[test])
    low, high = prediction.interval(0.9)
    within = ((low <= y[test]) & (y[test] <= high)).double()
    assert float((within.mean((0, 2, 3)) - 0.9).abs().max()) < 0.03
    low, high = prediction.interval(0.9, by="image")
    of_images = ((low <= y[test]) & (y[test] <= high)).double().mean((2, 3)) >= 0.9
    assert float((of_images.double().mean(0) - 0.9).abs().max()) < 0.07
    found = uq.evaluate(uq.wrap(model, posterior), [(x[test], y[test])], progress=False)
    measured = next(iter(found.promised.values()))
    assert measured["observed coverage of 90 %"] == pytest.approx(float(within.mean()), abs=1e-9)
    assert prediction.familiarity().shape == (200,)
    # by hand: the smallest q that a mean share of (n + 1) 0.9 / n of an image's values does not exceed
    posterior = uq.calibrate(posterior, held_out, share=None, progress=False)
    prediction = uq.wrap(model, posterior)(x[20:220])
    scores = ((y[20:220] - prediction.mean) / prediction.standard_deviation).abs().transpose(0, 1).flatten(1)
    ordered, rank = scores.sort(1).values, math.ceil(201 * 0.9 * 20)
    found = (prediction.interval(0.9)[1] - prediction.mean) / prediction.standard_deviation
    assert bool((found[0, :, 0, 0] >= ordered[:, rank - 1] - 1e-9).all())
    assert bool(
        (found[0, :, 0, 0] <= ordered[:, rank + 1] + 1e-9).all()
    )  # of 4,000 scores 4,096 would be kept
    with pytest.raises(uq.PosthocUQError, match="by must be"):
        prediction.interval(0.9, by="pixel")
    with pytest.raises(uq.PosthocUQError, match="jointly=True is for values without positions"):
        uq.calibrate(posterior, held_out, jointly=True, progress=False)
