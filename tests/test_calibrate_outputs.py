"""Calibration of outputs without a model: the same as that of a network with certain weights, and by hand in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
from networks import inputs_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads import OutputsPredictor
from posthoc_uq.likelihoods import HeteroscedasticPrediction, QuantilePrediction, RegressionPrediction

NEW = 2.5 * inputs_of(3, samples=50, seed=9, dtype=torch.float64)


def classes(samples: int = 160) -> tuple[Tensor, Tensor]:
    """Logits that are twice as large as they should be, and labels."""
    logits = 2.5 * inputs_of(3, samples=samples, seed=1, dtype=torch.float64)
    u = torch.rand(samples, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return logits, ((logits / 2).softmax(1).cumsum(1) < u).sum(1).clamp(max=2)


def values(outputs: int = 1, samples: int = 120) -> tuple[Tensor, Tensor]:
    means = inputs_of(outputs, samples=samples, seed=3, dtype=torch.float64)
    scale = torch.linspace(0.2, 0.9, outputs, dtype=torch.float64)
    return means, means + scale * inputs_of(outputs, samples=samples, seed=4, dtype=torch.float64)


def rank(scores: np.ndarray, level: float) -> float:
    """The ``ceil((n + 1) level)``-th smallest."""
    return float(np.sort(scores)[math.ceil((len(scores) + 1) * level) - 1])


# Against a network, and by hand


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sets": "aps", "scaling": "bias"},
        {"sets": "raps", "share": 0.4, "seed": 3},
        {"by_class": True, "scaling": "temperature"},
        {"class_rates": [0.5, 0.3, 0.2]},
    ],
    ids=str,
)
def test_it_is_the_calibration_of_a_network_with_certain_weights(options: dict[str, Any]) -> None:
    logits, labels = classes()
    network = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(torch.eye(3))
    posterior = uq.fit(network, [(logits, labels)], "kfac", prior_precision=1.0, progress=False)
    certain = posterior.with_settings(scale=1e16)
    expected = uq.calibrate(certain, [(logits, labels)], progress=False, **options)
    calibrated = uq.calibrate_outputs(logits, labels, **options)
    assert isinstance(calibrated, OutputsPredictor)
    for name in ("temperature", "class_shift"):
        found, wanted = getattr(calibrated.posterior, name), getattr(expected, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)
    ours, theirs = calibrated(NEW), uq.wrap(network, expected)(NEW)
    torch.testing.assert_close(ours.probs, theirs.probs, rtol=1e-6, atol=1e-9)
    for level in (0.6, 0.8):
        assert torch.equal(ours.set(level), theirs.set(level))
    torch.testing.assert_close(ours.familiarity("entropy"), theirs.familiarity("entropy"))
    said = [line for line in str(expected.report()).splitlines() if line.startswith("promises: ")]
    alone = said[0].replace("entropy, novelty, joint", "entropy, joint").replace("'linearized'", "'outputs'")
    assert alone in str(calibrated.report())


def test_temperature_and_sets_by_hand() -> None:
    logits, labels = classes()
    calibrated = uq.calibrate_outputs(logits.numpy(), labels.numpy(), share=None, scaling="temperature")

    def loss(log_temperature: float) -> float:
        logs = scipy.special.log_softmax(logits.numpy() / math.exp(log_temperature), 1)
        prior = math.log1p((max(log_temperature, 0.0) / 0.3) ** 2)
        return -float(np.take_along_axis(logs, labels.numpy()[:, None], 1).sum()) + prior

    best: Any = scipy.optimize.minimize_scalar(
        loss, bounds=(0.0, 2.0), method="bounded", options={"xatol": 1e-9}
    )
    assert calibrated.posterior.temperature == pytest.approx(math.exp(best.x), rel=5e-3)
    temperature = calibrated.posterior.temperature
    probs = scipy.special.softmax(logits.numpy() / temperature, 1)
    threshold = rank(1 - np.take_along_axis(probs, labels.numpy()[:, None], 1)[:, 0], 0.8)
    prediction = calibrated(NEW.numpy())
    of_new = scipy.special.softmax(NEW.numpy() / temperature, 1)
    np.testing.assert_allclose(prediction.probs, of_new, rtol=1e-12)
    np.testing.assert_array_equal(prediction.set(0.8, allow_empty=True), 1 - of_new <= threshold)
    entropies, new = (-(p * np.log(p)).sum(1) for p in (probs, of_new))
    p_values = (1 + (entropies[None] >= new[:, None] - 1e-12).sum(1)) / (len(labels) + 1)
    np.testing.assert_allclose(prediction.familiarity("entropy"), p_values)


def test_means_are_promised_by_all_samples() -> None:
    means, targets = values(2)
    calibrated = uq.calibrate_outputs(means, targets, likelihood="regression")
    new = means[:7] + 1
    prediction = calibrated(new)
    assert isinstance(prediction, RegressionPrediction)
    assert torch.equal(prediction.epistemic_variance, torch.zeros_like(new))
    low, high = prediction.interval(0.9)
    reach = np.array([rank(errors, 0.9) for errors in (targets - means).abs().numpy().T])
    np.testing.assert_allclose(low, new.numpy() - reach, rtol=1e-9)
    np.testing.assert_allclose(high, new.numpy() + reach, rtol=1e-9)
    noise = (targets - means).square().mean(0)
    torch.testing.assert_close(prediction.noise_variance[0], noise, rtol=1e-2, atol=0)
    # one number a sample, as it is
    one = uq.calibrate_outputs(means[:, 0], targets[:, 0], likelihood="regression")
    assert one(new[:, 0]).mean.shape == (7,)
    np.testing.assert_allclose(one(new[:, 0]).interval(0.9)[1], new[:, 0].numpy() + reach[0], rtol=1e-9)


@pytest.mark.parametrize("jointly", [False, True])
def test_means_with_their_deviations(jointly: bool) -> None:
    means, targets = values(2)
    deviations = inputs_of(2, samples=120, seed=6, dtype=torch.float64).exp()
    calibrated = uq.calibrate_outputs((means, deviations), targets, likelihood="regression", jointly=jointly)
    scores = ((targets - means).abs() / deviations).numpy()
    reach = rank(scores.max(1), 0.9) if jointly else np.array([rank(each, 0.9) for each in scores.T])
    prediction = calibrated(means[:5], deviations[:5])
    assert isinstance(prediction, HeteroscedasticPrediction)
    low, high = prediction.interval(0.9)
    np.testing.assert_allclose(low, means[:5].numpy() - reach * deviations[:5].numpy(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(high, means[:5].numpy() + reach * deviations[:5].numpy(), rtol=1e-9, atol=1e-9)
    # the factor on all variances that the labels find most probable, nearly the mean squared score
    ratio = prediction.noise_variance / deviations[:5].square()
    torch.testing.assert_close(ratio, torch.full_like(ratio, float((scores**2).mean())), rtol=0.05, atol=0)


def test_quantiles_are_corrected_by_all_samples() -> None:
    means, targets = values()
    outputs = torch.cat([means - 0.2, means, means + 0.4], 1)
    calibrated = uq.calibrate_outputs(outputs, targets[:, 0], likelihood=uq.Quantiles([0.1, 0.5, 0.9]))
    scores = torch.maximum(outputs[:, :1] - targets, targets - outputs[:, 2:])[:, 0].numpy()
    prediction = calibrated(outputs[:5])
    assert isinstance(prediction, QuantilePrediction)
    low, high = prediction.interval(0.8)
    reach = rank(scores, 0.8)
    np.testing.assert_allclose(low, outputs[:5, :1] - reach, rtol=1e-9)
    np.testing.assert_allclose(high, outputs[:5, 2:] + reach, rtol=1e-9)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(1)


PROBABILITIES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "classification": (softmax, lambda logits: classes()[1]),
    "binary": (torch.sigmoid, lambda logits: (logits[:, 0] > 0.3).long()),
    "multilabel": (torch.sigmoid, lambda logits: (logits > 0.3 * inputs_of(3, samples=160, seed=5)).long()),
}


@pytest.mark.parametrize("likelihood", PROBABILITIES)
def test_probabilities_are_as_good_as_logits(likelihood: str) -> None:
    link, labels_of = PROBABILITIES[likelihood]
    logits = classes()[0][:, :1] if likelihood == "binary" else classes()[0]
    new, labels = NEW[:, : logits.shape[1]], labels_of(logits)
    by_logits = uq.calibrate_outputs(logits, labels, likelihood=likelihood, share=None)
    calibrated = uq.calibrate_outputs(
        link(logits), labels, likelihood=likelihood, share=None, probabilities=True
    )
    torch.testing.assert_close(calibrated(link(new)).probs, by_logits(new).probs, rtol=1e-5, atol=1e-7)
    assert torch.equal(calibrated(link(new)).set(0.9), by_logits(new).set(0.9))
    certain = calibrated(torch.eye(3, dtype=torch.float64)[:, : logits.shape[1]].round())  # of 0 and of 1
    assert bool(certain.probs.isfinite().all())


def test_outputs_with_positions() -> None:
    logits = 2 * inputs_of(3, 4, 4, samples=40, dtype=torch.float64)
    labels = logits.argmax(1) * (inputs_of(4, 4, samples=40, seed=2) > -1)
    labels[0, :2] = -100
    network = nn.Conv2d(3, 3, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(torch.eye(3)[:, :, None, None])
    options: dict[str, Any] = {"prior_precision": 1.0, "progress": False}
    posterior = uq.fit(network, [(logits, labels)], "kfac", **options).with_settings(scale=1e16)
    expected = uq.wrap(network, uq.calibrate(posterior, [(logits, labels)], progress=False))(logits[:3])
    found = uq.calibrate_outputs(logits, labels)(logits[:3])
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-5, atol=1e-7)
    assert torch.equal(found.set(0.7), expected.set(0.7))


def test_maps_of_means_and_targets_that_are_not_there() -> None:
    means = inputs_of(2, 3, 3, samples=60, dtype=torch.float64)
    targets = means + torch.tensor([[[0.3]], [[1.5]]]) * inputs_of(
        2, 3, 3, samples=60, seed=2, dtype=torch.float64
    )
    targets[::3, 0, 0] = math.nan
    noise = torch.stack([(targets - means).square()[:, c].nanmean() for c in (0, 1)])
    calibrated = uq.calibrate_outputs(means, targets, likelihood=uq.Gaussian(missing="ignore"))
    found = calibrated(means[:4]).noise_variance[0, :, 0, 0]
    torch.testing.assert_close(found, noise, rtol=1e-2, atol=0)
    deviations = noise.sqrt().reshape(2, 1, 1).expand(means.shape)
    pair = uq.calibrate_outputs((means, deviations), targets, likelihood=uq.Gaussian(missing="ignore"))
    bounds = [pair(means[:4], deviations[:4]).interval(0.9), calibrated(means[:4]).interval(0.9)]
    for own, other in zip(*bounds, strict=True):
        torch.testing.assert_close(own, other)


# What it returns


@pytest.mark.parametrize("case", ["classes", "deviations", "quantiles"])
def test_it_is_saved_loaded_and_evaluated(case: str, tmp_path: Path) -> None:
    means, targets = values()
    if case == "classes":
        arrays, targets = (classes()[0],), classes()[1]
        calibrated = uq.calibrate_outputs(arrays[0], targets)
    elif case == "deviations":
        arrays = (means, means.exp())
        calibrated = uq.calibrate_outputs(arrays, targets, likelihood="regression")
    else:
        arrays = (torch.cat([means - 1, means + 1], 1),)
        calibrated = uq.calibrate_outputs(arrays[0], targets, likelihood=uq.Quantiles([0.05, 0.95]))
    path = tmp_path / "c.h5"
    uq.save(calibrated, path)
    for untrusted in (False, True) if case == "classes" else (False,):
        loaded = uq.load(path, untrusted=untrusted)
        assert repr(loaded) == repr(calibrated) and str(loaded.report()) == str(calibrated.report())
        for name, tensor in calibrated(*arrays).to_dict().items():
            assert torch.equal(loaded(*arrays).to_dict()[name], tensor), name
    again = tmp_path / "again.h5"
    uq.save(uq.load(path), again)
    assert again.read_bytes() == path.read_bytes() and uq.inspect(path)["method"] == "outputs"
    inputs = arrays[0] if len(arrays) == 1 else arrays
    found = uq.evaluate(calibrated, [(inputs, targets)], progress=False)
    prediction = calibrated(*arrays)
    covered = prediction.coverage(prediction.fitting(targets), 0.9).covered.mean()
    assert found.promised["outputs"]["observed_coverage_90"] == pytest.approx(float(covered))
    assert float(covered) == pytest.approx(0.9, abs=0.06)
    assert bool(uq.Referral(rate=0.1)(prediction).any())
    joined = calibrated.predict([(inputs, targets)], progress=False)
    assert len(joined) == len(targets)
    with pytest.raises(uq.PosthocUQError, match=r"need no model: uq\.load\(path\)"):
        uq.load(path, nn.Linear(2, 2))
    with pytest.raises(uq.PosthocUQError, match="has no novelty"):
        prediction.novelty()


@pytest.mark.study
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_program() -> None:
    logits, _ = classes()
    calibrated = uq.calibrate_outputs(logits, logits[:, 0], likelihood=uq.Quantiles([0.1, 0.4, 0.8]))
    found, expected = uq.export(calibrated, NEW[:4]).module()(NEW), calibrated(NEW)
    for bound, own in zip((found.lower, found.upper), expected.interval(0.9), strict=True):
        torch.testing.assert_close(bound, own)
    torch.testing.assert_close(found.p_joint, expected.familiarity("joint"))


def test_a_posterior_needs_its_model(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), inputs_of(2)
    posterior = uq.fit(model, [(x, (x[:, 0] > 0).long())], "diag", prior_precision=1.0, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    with pytest.raises(uq.PosthocUQError, match=r"give the model .*uq\.load\(path, model\)"):
        uq.load(tmp_path / "p.h5")
    with pytest.raises(uq.PosthocUQError, match="head='outputs' needs outputs without a model"):
        uq.wrap(model, posterior, "outputs")


def test_a_stranger_s_file(tmp_path: Path) -> None:
    """Outputs of an unknown form, a head of another kind, settings that outputs do not have."""
    posterior = uq.calibrate_outputs(*classes()).posterior
    head = posterior.history.head
    assert head is not None
    for changes in (
        {"options": {"form": "code"}},
        {"options": {"columns": -1}},
        {"options": {"memory": 5}},
        {"name": "sampling"},
    ):
        path = tmp_path / "c.h5"
        uq.save(posterior.noted(head=head.changed(**changes)), path)
        with pytest.raises(uq.CorruptPosteriorError, match="cannot be loaded"):
            uq.load(path)


LOGITS, LABELS = classes(40)
OTHER: dict[str, Any] = {"set": "aps"}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fewer targets": (lambda: uq.calibrate_outputs(LOGITS, LABELS[:5]), "the same samples"),
    "a text": (lambda: uq.calibrate_outputs("logits", LABELS), "outputs must be a tensor or NumPy array"),
    "three arrays": (lambda: uq.calibrate_outputs((LOGITS,) * 3, LABELS), "one array .*or a pair of means"),
    "deviations of classes": (
        lambda: uq.calibrate_outputs((LOGITS, LOGITS.exp()), LABELS),
        "is of likelihood='regression'",
    ),
    "probabilities as logits": (
        lambda: uq.calibrate_outputs(LOGITS.softmax(1), LABELS),
        "look like probabilities; pass probabilities=True",
    ),
    "logits as probabilities": (
        lambda: uq.calibrate_outputs(LOGITS, LABELS, probabilities=True),
        "are they logits",
    ),
    "probabilities of values": (
        lambda: uq.calibrate_outputs(LOGITS, LOGITS, likelihood="regression", probabilities=True),
        "classification, binary, multilabel",
    ),
    "a deviation of 0": (
        lambda: uq.calibrate_outputs((LOGITS, 0 * LOGITS), LOGITS, likelihood="regression"),
        "must be above 0",
    ),
    "jointly without deviations": (
        lambda: uq.calibrate_outputs(LOGITS, LOGITS + 1, likelihood="regression", jointly=True),
        r"outputs=\(means, deviations\)",
    ),
    "a scale of the data": (
        lambda: uq.calibrate_outputs(LOGITS, LOGITS, likelihood=uq.Gaussian(mean="data")),
        "found by a fit",
    ),
    "no label": (lambda: uq.calibrate_outputs(LOGITS, LABELS + 3), "must lie in 0"),
    "an option": (lambda: uq.calibrate_outputs(LOGITS, LABELS, **OTHER), "Did you mean 'sets'"),
    "another number of classes": (
        lambda: uq.calibrate_outputs(LOGITS, LABELS)(LOGITS[:, :2]),
        "Outputs with 3 columns were calibrated",
    ),
    "deviations that were none": (
        lambda: uq.calibrate_outputs(LOGITS, LABELS)(LOGITS, LOGITS.exp()),
        "calibrated without standard deviations",
    ),
    "no deviations": (
        lambda: uq.calibrate_outputs((LOGITS, LOGITS.exp()), LOGITS + 1, likelihood="regression")(LOGITS),
        r"give both: calibrated\(means, deviations\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(uq.PosthocUQError, match=said):
        call()
