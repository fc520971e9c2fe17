"""Regressions of maps and sequences, against dense computations in float64 written from the definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation import plots
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
    assert measured["observed_coverage_90"] == pytest.approx(float(within.mean()), abs=1e-9)
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


# Other likelihoods at positions


OTHERS = {
    "heteroscedastic": (uq.Heteroscedastic, 2),
    "poisson": (uq.Poisson, 2),
    "negative_binomial": (uq.NegativeBinomial, 2),
    "gamma": (uq.Gamma, 2),
    "binary": (uq.Bernoulli, 1),
    "multilabel": (uq.Multilabel, 2),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dim", [1, -1])
def test_maps_are_rows(name: str, dim: int, tmp_path: Path) -> None:
    """Fisher, log-likelihood and predictions of maps are those of their positions as samples of the same likelihood."""
    torch.manual_seed(1)
    kind, outputs = OTHERS[name]
    plain, likelihood = kind(missing="ignore"), kind(channel_dim=dim, missing="ignore")
    layer = nn.Linear(3, outputs).double()
    conv = nn.Conv2d(3, outputs, 1).double()
    conv.weight.data, conv.bias.data = layer.weight.data[:, :, None, None], layer.bias.data
    model = (conv if dim == 1 else layer).eval()
    x = torch.randn(5, 2, 2, 3, dtype=torch.float64)
    rows = x.reshape(-1, 3)
    keys = torch.arange(20)
    with torch.no_grad():
        y = plain.draw(layer(rows), keys, 0).double().reshape(20, -1)
    y[2] = y[17, 0] = math.nan
    whole = y.reshape(5, 2, 2, -1)
    x, whole = (each.movedim(-1, dim) for each in (x, whole))
    options = {"fisher": "exact", "prior_precision": TAU, "progress": False, "dtype": torch.float64}
    of_rows = uq.fit(layer, [(rows, y)], "full", likelihood=plain, **options)
    found = uq.fit(model, [(x, whole)], "full", likelihood=likelihood, **options)
    fishers = [next(iter(each.blocks.values())).fisher * each.evidence.total for each in (found, of_rows)]
    torch.testing.assert_close(fishers[0], fishers[1], rtol=1e-9, atol=1e-12)
    assert found.evidence.log_likelihood == pytest.approx(of_rows.evidence.log_likelihood, rel=1e-10)
    assert found.features is not None and found.features.samples == int((~y.isnan().all(1)).sum())
    uq.save(found, tmp_path / "map.h5")
    loaded = uq.load(tmp_path / "map.h5", model)
    assert loaded.likelihood.attributes() == likelihood.attributes()
    prediction, alone = uq.wrap(model, loaded)(x), uq.wrap(layer, of_rows)(rows)
    assert prediction.positions == (2, 2) and prediction.novelty().shape == (5, 2, 2)
    for field, value in alone.to_dict().items():
        if field not in ("novelty", "outputs") and value.ndim == 2:
            own = prediction.to_dict()[field].movedim(dim, -1).reshape(20, -1)
            torch.testing.assert_close(own, value.to(own), rtol=1e-8, atol=1e-10)
    for score, values in prediction.scores_by_position().items():
        if score != "novelty":
            torch.testing.assert_close(values.flatten(), alone.scores()[score], rtol=1e-8, atol=1e-10)
    there = ~y.isnan().all(1)
    known = alone.picked(there)
    if kind.joint:  # of rows alone the draws of the outputs have their covariance
        return
    logs = torch.zeros(20, dtype=torch.float64).masked_scatter(there, known.log_prob(y[there]))
    torch.testing.assert_close(prediction.log_prob(whole), logs.reshape(5, 4).sum(1), rtol=1e-8, atol=1e-10)
    measured, truth = prediction.quality(whole), known.quality(known.fitting(y[there]))
    assert measured.keys() == truth.keys()
    assert all(measured[n] == pytest.approx(truth[n], rel=1e-8, nan_ok=True) for n in truth)


def test_missing_values_of_a_map() -> None:
    """Noise, Fisher and evidence leave out what is NaN, value by value and position by position; so do promises."""
    own = case("map")
    y = own.y.clone()
    y[0, :, 0, 1] = y[2] = y[4, 1] = math.nan
    loader = list(zip(own.x.split(2), y.split(2), strict=True))
    found = fit(own, likelihood=uq.Gaussian(missing="ignore"), loader=loader, fisher="exact")
    residuals = own.rows(y - own.model(own.x)).detach()
    noise = residuals.square().nanmean((0, 1))
    torch.testing.assert_close(found.noise_variance, noise)
    there = (~residuals.isnan()).double()
    jacobian = own.jacobian()[[0, 1, 3, 4, 5]]  # a sample without any is left out
    truth = torch.einsum("ntcw,ntc,c,ntcv->wv", jacobian, there[[0, 1, 3, 4, 5]], 1 / noise, jacobian)
    block = next(iter(found.blocks.values()))
    torch.testing.assert_close(block.fisher * found.evidence.total, truth, rtol=1e-9, atol=1e-12)
    logs = -0.5 * (residuals.square() / noise + (2 * math.pi * noise).log())
    assert found.evidence.log_likelihood == pytest.approx(float(logs.nansum()), rel=1e-10)
    assert found.evidence.present == float(there.sum())
    prediction = uq.wrap(own.model, found)(own.x)
    total = own.rows(prediction.variance)
    truth = -0.5 * (residuals.square() / total + (2 * math.pi * total).log())
    torch.testing.assert_close(prediction.log_prob(y), truth.nansum((1, 2)))
    squares = residuals.square().nanmean((1, 2)).nan_to_num(0.0)
    assert float(prediction.losses(y)[2]) == 0 and prediction.quality(y)["rmse"] == pytest.approx(
        float(residuals.square().nanmean().sqrt())
    )
    torch.testing.assert_close(prediction.losses(y)[[1, 3, 5]], squares[[1, 3, 5]])
    with pytest.raises(uq.PosthocUQError, match="missing='ignore'"):
        fit(own, likelihood="regression", loader=loader)


@pytest.mark.parametrize("said_by", ["NaN", "weights"])
def test_promises_leave_out_positions(said_by: str) -> None:
    """Held-out positions that do not count change nothing, whatever they hold."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 1).double().eval()
    x = torch.randn(60, 1, 4, 4, dtype=torch.float64)
    y = model(x).detach() + torch.randn(60, 1, 4, 4, dtype=torch.float64)
    likelihood = uq.Gaussian(1.0, missing="ignore" if said_by == "NaN" else "error")
    posterior = uq.fit(model, [(x[:20], y[:20])], "full", likelihood=likelihood, progress=False)
    left, options = x[20:], {"share": None, "progress": False}
    half = uq.calibrate(posterior, [(left[..., :2], y[20:, ..., :2])], **options)
    marked, weights = y[20:].clone(), torch.ones(40, 4, 4)
    marked[..., 2:], weights[..., 2:] = math.nan if said_by == "NaN" else 1e6, 0
    if said_by == "weights":
        options["batch_to_weights"] = lambda batch: batch[2]
    found = uq.calibrate(posterior, [(left, marked, weights)[: 3 if said_by == "weights" else 2]], **options)
    one, other = half.history.promises, found.history.promises
    assert one is not None and other is not None and one.targets is not None and other.targets is not None
    for mine, truth in zip(other.targets.scores, one.targets.scores, strict=True):
        # noise scales differ by rounding alone
        torch.testing.assert_close(mine.values, truth.values, rtol=1e-6, atol=1e-9)


def test_labels_at_positions() -> None:
    """Sets of labels keep their promise for each label; of one logit a position they are those of two classes."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 1).double().eval()
    model.weight.data = torch.tensor([2.0, -1.5], dtype=torch.float64).reshape(2, 1, 1, 1)
    x = torch.randn(500, 1, 3, 3, dtype=torch.float64)
    y = (torch.rand(500, 2, 3, 3).double() < model(x).sigmoid().detach()).double()
    posterior = uq.fit(model, [(x[:50], y[:50])], "kfac", likelihood="multilabel", progress=False)
    posterior = uq.calibrate(posterior, [(x[50:250], y[50:250])], progress=False)
    prediction = uq.wrap(model, posterior)(x[250:])
    chosen, has = prediction.set(0.8), y[250:] == 1
    shares = (chosen & has).sum((2, 3)) / has.sum((2, 3))
    assert float((shares.nanmean(0) - 0.8).abs().max()) < 0.06
    assert bool((prediction.set(0.8, by="image") >= chosen).all())
    assert prediction.probs.shape == (250, 2, 3, 3) and prediction.entropy().shape == (250, 3, 3)
    first = nn.Conv2d(1, 1, 1).double().eval()
    posterior = uq.fit(first, [(x[:50], y[:50, :1])], "kfac", likelihood="binary", progress=False)
    posterior = uq.calibrate(posterior, [(x[50:250], y[50:250, :1])], progress=False)
    prediction = uq.wrap(first, posterior)(x[250:])
    assert prediction.probs.shape == (250, 2, 3, 3) and prediction.logits_mean.shape == (250, 1, 3, 3)
    found = uq.evaluate(uq.wrap(first, posterior), [(x[250:], y[250:, :1])], progress=False)
    assert next(iter(found.promised.values()))["observed_coverage_90"] > 0.8


# What is drawn, exported and answered


@pytest.mark.parametrize("kind", ["map", "series"])
def test_figures_programs_and_answers(kind: str) -> None:
    own = case(kind)
    posterior = fit(own, "kfac", layers="last", fisher="exact")
    posterior = uq.calibrate(posterior, own.loader(), share=None, progress=False)
    predictor = uq.wrap(own.model, posterior)
    prediction = predictor(own.x)
    figure = plots.prediction_maps(prediction, own.y, channel=1, level=0.5)
    pictures = [axes for axes in figure.axes if axes.images]
    if kind == "map":  # targets, means, deviations and novelty
        drawn = [axes.images[0].get_array() for axes in pictures]
        shown = (own.y, prediction.mean, prediction.standard_deviation, prediction.novelty().unsqueeze(1))
        for row in range(SAMPLES):
            for place, values in enumerate(shown):
                assert torch.equal(torch.as_tensor(drawn[4 * row + place]), values[row, -1].detach())
    else:
        lines = figure.axes[0].lines
        assert torch.equal(torch.as_tensor(lines[0].get_ydata()), prediction.mean[0, :, 1])
    found = uq.evaluate(predictor, own.loader(), progress=False)
    assert "Maps of the largest errors" in found.figures()
    program = uq.export(predictor, own.x, level=0.5)
    of_program = program.module()(own.x)
    for name, values in zip(("lower", "upper"), prediction.interval(0.5), strict=True):
        torch.testing.assert_close(getattr(of_program, name), values, rtol=1e-8, atol=1e-10)
    answer = prediction.answers(level=0.5)[1]
    torch.testing.assert_close(torch.tensor(answer["maps"]["mean"]).double(), prediction.mean[1])
    torch.testing.assert_close(
        torch.tensor(answer["mean"]).double(), own.rows(prediction.mean)[1].mean(0), rtol=1e-6, atol=1e-9
    )
    with pytest.raises(uq.PosthocUQError, match="channel must be below 2"):
        plots.prediction_maps(prediction, channel=2)


def test_a_single_position_has_no_share_of_an_image() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (4, 1))).double().eval()
    x = torch.randn(30, 3, dtype=torch.float64)
    y = model(x).detach() + torch.randn(30, 4, 1, dtype=torch.float64)
    posterior = uq.fit(model, [(x, y)], "diag", likelihood="regression", prior_precision=1.0, progress=False)
    prediction = uq.wrap(model, uq.calibrate(posterior, [(x, y)], share=None, progress=False))(x)
    assert prediction.interval(0.8)[0].shape == (30, 4, 1)
    with pytest.raises(uq.PosthocUQError, match=r"\(30, 4, 1\) have one: .*channel_dim=-1"):
        prediction.interval(0.8, by="image")
