"""Several networks as one predictor, against mixtures by their definition in NumPy and SciPy, float64."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from networks import HEADS, LIKELIHOODS, batches, inputs_of, outputs_for, targets_of
from storage_helpers import edit, edit_state
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads import EnsemblePredictor
from posthoc_uq.likelihoods import GaussianMixturePrediction, Likelihood, resolve_likelihood

X = inputs_of(4, samples=24, dtype=torch.float64)
NEW = inputs_of(4, samples=7, seed=5, dtype=torch.float64)


def network(seed: int, outputs: int = 3, width: int = 5) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).double().eval()


@functools.cache
def fitted(
    likelihood: str = "classification", method: str = "diag", **options: Any
) -> tuple[list[Any], list[Any]]:
    """Three networks of two widths, and their posteriors."""
    outputs = outputs_for(resolve_likelihood(likelihood))
    models = [network(seed, outputs, 5 + seed) for seed in range(3)]
    y = targets_of(models[0], X, likelihood)
    if likelihood == "regression":
        options = {"noise_variance": 0.3} | options
    posteriors = [
        uq.fit(
            model,
            batches(X, y),
            method,
            likelihood=likelihood,
            prior_precision=2.0,
            progress=False,
            **options,
        )
        for model in models
    ]
    return models, posteriors


def entropy(probs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return -(probs * np.log(probs)).sum(-1)


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


# Classes


def test_plain_networks_are_averaged() -> None:
    models, _ = fitted()
    found = uq.wrap(models, [None, None, None])(NEW)
    logits = np.stack([model(NEW).detach().numpy() for model in models])
    each = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    close(found.probs, each.mean(0))
    close(found.log_probs, np.log(each.mean(0)))
    close(found.mutual_information(), entropy(each.mean(0)) - entropy(each).mean(0))
    close(found.logits_mean, logits.mean(0))
    close(found.logits_variance, logits.var(0))
    close(found.probs_variance, each.var(0))
    winners = each.argmax(-1)
    close(found.votes, [[(winners[:, row] == own).sum() for own in range(3)] for row in range(len(NEW))])
    with pytest.raises(uq.PosthocUQError, match="no novelty"):
        found.novelty()


@pytest.mark.parametrize("head", HEADS)
def test_networks_with_and_without_posterior(head: str) -> None:
    models, posteriors = fitted()
    given = [posteriors[0], posteriors[1], None]
    options: dict[str, Any] = {"seed": 0, "n_samples": 12} if head == "sampling" else {}
    predictor = uq.wrap(models, given, head, **options)
    found: Any = predictor(NEW)
    parts: list[Any] = [
        uq.wrap(m, p, head, **options)(NEW) for m, p in zip(models[:2], posteriors, strict=False)
    ]
    plain = uq.ClassPrediction.from_logits(models[2](NEW).detach().unsqueeze(0))
    probs = np.stack([p.probs.numpy() for p in (*parts, plain)])
    close(found.probs, probs.mean(0))
    within = np.stack([p.expected_entropy().numpy() for p in (*parts, plain)]).mean(0)
    close(found.mutual_information(), np.clip(entropy(probs.mean(0)) - within, 0, None))
    variances = np.stack([np.asarray(p.probs_variance) for p in (*parts, plain)])
    close(found.probs_variance, variances.mean(0) + probs.var(0))
    close(found.novelty(), (parts[0].novelty() + parts[1].novelty()) / 2)
    close(predictor.novelty(NEW), found.novelty())
    assert int(found.votes[0].sum()) == 3 * int(parts[0].votes[0].sum())


def test_by_monte_carlo() -> None:
    """Probabilities and mutual information of the mixture over networks and weights, within five standard errors."""
    models, posteriors = fitted()
    predictor = uq.wrap(models, posteriors, "linearized")
    found, draws = predictor(NEW), 40_000
    generator = torch.Generator().manual_seed(0)
    probs = list[Tensor]()
    for model, posterior in zip(models, posteriors, strict=True):
        gaussian: Any = uq.wrap(model, posterior, "linearized").distribution(NEW)
        root = torch.linalg.cholesky(gaussian.covariance)
        normals = torch.randn(draws, *gaussian.mean.shape, generator=generator, dtype=torch.float64)
        probs.append((gaussian.mean + torch.einsum("ncd,snd->snc", root, normals)).softmax(-1))
    each = torch.cat(probs)
    error = each.std(0) / len(each) ** 0.5
    assert bool(((found.probs - each.mean(0)).abs() < 5 * error + 2e-5).all())
    own = -(each * each.log()).sum(-1)
    information = -(each.mean(0) * each.mean(0).log()).sum(-1) - own.mean(0)
    assert bool(((found.mutual_information() - information).abs() < 5 * own.std(0) / len(each) ** 0.5).all())


def test_a_head_without_expected_entropy_counts_as_certain() -> None:
    models, posteriors = fitted()
    found = uq.wrap(models, posteriors, "linearized", link="probit")(NEW)
    parts = [
        uq.wrap(m, p, "linearized", link="probit")(NEW).probs.numpy()
        for m, p in zip(models, posteriors, strict=True)
    ]
    each = np.stack(parts)
    close(found.mutual_information(), entropy(each.mean(0)) - entropy(each).mean(0))


# Values


@pytest.mark.parametrize("row", range(3))
def test_values_are_a_mixture_of_gaussians(row: int) -> None:
    models, posteriors = fitted("regression")
    predictor = uq.wrap(models, posteriors)
    found: Any = predictor(NEW[row : row + 1])
    each: list[Any] = [uq.wrap(m, p)(NEW) for m, p in zip(models, posteriors, strict=True)]
    means, variances = (np.array([getattr(p, n)[row, 0] for p in each]) for n in ("mean", "variance"))

    def cdf(x: float) -> float:
        return float(scipy.stats.norm.cdf(x, means, np.sqrt(variances)).mean())

    def integral(function: Any, *points: float) -> float:
        low, high = means.min() - 12, means.max() + 12
        return scipy.integrate.quad(function, low, high, epsabs=1e-12, points=[*points])[0]

    first, second = (
        integral(lambda x, k=k: x**k * scipy.stats.norm.pdf(x, means, np.sqrt(variances)).mean())
        for k in (1, 2)
    )
    close(found.mean[0, 0], first)
    close(found.variance[0, 0], second - first**2, 1e-8)
    for q in (1e-9, 0.05, 0.3, 0.5, 0.9, 1 - 1e-6):
        expected = scipy.optimize.brentq(lambda x, q=q: cdf(x) - q, -40, 40, xtol=1e-13)
        close(found.quantile(q)[0, 0], expected, 1e-8)
    close([cdf(float(bound[0, 0])) for bound in found.interval(0.9)], [0.05, 0.95])
    close(found.cdf(0.4)[0, 0], cdf(0.4))
    one = GaussianMixturePrediction.of(
        [p.picked(slice(row, row + 1)).changed(**first_output(p, row)) for p in each]
    )
    crps = integral(lambda x: (cdf(x) - (x >= 0.7)) ** 2, 0.7)
    close(one.quality(torch.full((1, 1), 0.7))["crps"], crps, 1e-7)


def first_output(prediction: Any, row: int) -> dict[str, Tensor]:
    names = ("mean", "epistemic_variance", "noise_variance")
    return {name: getattr(prediction, name)[row : row + 1, :1] for name in names}


def test_several_outputs_share_the_network() -> None:
    """The joint density is the mean of the networks' products, and draws follow it."""
    models, posteriors = fitted("regression")
    found: Any = uq.wrap(models, posteriors)(NEW)
    means, deviations = (part.numpy() for part in (found.means, found.deviations))
    targets = targets_of(models[1], NEW, "regression")
    logs = scipy.stats.norm.logpdf(targets.numpy()[:, None], means, deviations).sum(2)
    close(found.log_prob(targets), scipy.special.logsumexp(logs, axis=1) - math.log(3))
    drawn = found.sample(20_000, torch.Generator().manual_seed(0))
    error = drawn.std(0) / 20_000**0.5
    assert bool(((drawn.mean(0) - found.mean).abs() < 5 * error).all())
    centred = drawn - drawn.mean(0)
    between = means - means.mean(1, keepdims=True)
    covariance = (between[:, :, 0] * between[:, :, 1]).mean(1)
    product = centred[..., 0] * centred[..., 1]
    assert bool(
        ((product.mean(0) - torch.from_numpy(covariance)).abs() < 5 * product.std(0) / 20_000**0.5).all()
    )


def test_plain_networks_of_values_have_no_width_of_their_own() -> None:
    models, _ = fitted("regression")
    found: Any = uq.wrap(models, None, likelihood=uq.Gaussian(0.3))(NEW)
    outputs = np.stack([model(NEW).detach().numpy() for model in models])
    close(found.mean, outputs.mean(0))
    close(found.epistemic_variance, outputs.var(0))
    close(found.noise_variance, np.full_like(outputs[0], 0.3))


# Every likelihood


@pytest.mark.filterwarnings("ignore:likelihood=")
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_likelihood(likelihood: str) -> None:
    """Density and variance of the mixture are those by the definition; joined batches and picked inputs keep them."""
    models, posteriors = fitted(likelihood)
    predictor = uq.wrap(models, [posteriors[0], posteriors[1], None])
    found = predictor(NEW)
    plain: Likelihood = posteriors[0].observation
    parts: list[Any] = [p(NEW) for p in predictor.predictors if isinstance(p, uq.Predictor)]
    parts.append(plain.from_draws(models[2](NEW).detach().unsqueeze(0)))
    targets = targets_of(models[0], NEW, likelihood)
    if likelihood == "multilabel":  # labels count as independent, of each network and of the mixture
        probs = torch.stack([part.probs for part in parts]).mean(0)
        expected = torch.where(targets == 1, probs, 1 - probs).log().sum(1)
    else:
        expected = torch.stack([part.log_prob(targets) for part in parts]).logsumexp(0) - math.log(3)
    close(found.log_prob(targets), expected)
    close(found.outputs_mean, sum(part.outputs_mean for part in parts) / 3)
    of_logits = hasattr(parts[0], "logits_mean")
    means = np.stack([(part.logits_mean if of_logits else part.mean).numpy() for part in parts])
    within = np.stack([part.epistemic_variance.numpy() for part in parts])
    close(found.epistemic_variance, within.mean(0) + means.var(0))
    apart = type(found).cat([predictor(NEW[:3]), predictor(NEW[3:])])
    scores = found.scores()
    assert scores.keys() == apart.scores().keys() and "novelty" in scores
    for name, score in scores.items():
        close(apart.scores()[name], score)
        close(found.picked(slice(2, 5)).scores()[name], score[2:5])
        close(copy.deepcopy(found).scores()[name], score)
    assert found.quality(found.fitting(targets))
    assert len(predictor.predict(batches(NEW, targets, 3), progress=False)) == 7


def test_positions() -> None:
    models = [
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double() for _ in "ab"
    ]
    x = inputs_of(2, 4, 4, samples=6, dtype=torch.float64)
    y = torch.randint(3, (6, 4, 4), generator=torch.Generator().manual_seed(0))
    posteriors = [
        uq.fit(m, [(x, y)], "diag", layers="last", prior_precision=1.0, progress=False) for m in models
    ]
    found: Any = uq.wrap(models, posteriors)(x)
    parts: list[Any] = [uq.wrap(m, p)(x) for m, p in zip(models, posteriors, strict=True)]
    close(found.probs, (parts[0].probs + parts[1].probs) / 2)
    close(found.novelty(), (parts[0].novelty() + parts[1].novelty()) / 2)
    assert found.mutual_information().shape == (6, 4, 4)


def test_evaluated_beside_a_network() -> None:
    models, posteriors = fitted()
    y = targets_of(models[0], NEW, "classification")
    ensemble = uq.wrap(models, posteriors)
    found = uq.evaluate({"ensemble": ensemble, "plain": models[0]}, batches(NEW, y, 4), progress=False)
    close(found.metrics["ensemble"]["nll"], -float(ensemble(NEW).log_prob(y).mean()))
    assert "mutual_information" in found.selective["ensemble"]


def test_it_is_a_module_and_a_value() -> None:
    models, _ = fitted()
    models = [copy.deepcopy(model) for model in models]
    predictor = uq.wrap(models, [None, None, None])
    before = predictor(NEW).probs
    assert list(predictor.parameters()) == [] and not predictor.train().training
    assert len(predictor) == 3 and "3 networks" in repr(predictor)
    narrow = copy.deepcopy(predictor).to(torch.float32)
    assert narrow(NEW.float()).probs.dtype == torch.float32
    assert models[0][0].weight.dtype == torch.float64
    close(predictor(NEW).probs, before)
    with torch.no_grad():
        models[1][0].weight.mul_(2)
    with pytest.raises(uq.PosteriorMismatchError, match="changed"):
        predictor(NEW)


# Promises and files


HELD_OUT = inputs_of(4, samples=160, seed=9, dtype=torch.float64)


@functools.cache
def calibrated(likelihood: str = "classification") -> EnsemblePredictor:
    """Two networks with a posterior and one without, once calibrated."""
    models, posteriors = fitted(likelihood)
    y = targets_of(models[0], HELD_OUT, likelihood)
    predictor = uq.wrap(models, [*posteriors[:2], None])
    return uq.calibrate(predictor, batches(HELD_OUT, y, 40), progress=False)


@pytest.mark.filterwarnings("ignore:.* that promise")
def test_one_temperature_is_sought_for_the_mixture() -> None:
    """Where it is right throughout, it is small; each network's own stays in its posterior."""
    models, posteriors = fitted()
    before = uq.wrap(models, posteriors)
    y = before(HELD_OUT).predicted()
    found = uq.calibrate(before, batches(HELD_OUT, y, 40), progress=False)
    assert found.temperature < 0.97 and found.posteriors == before.posteriors and before.temperature == 1.0
    parts = [
        uq.wrap(model, posterior.with_settings(temperature=found.temperature * posterior.temperature))(
            NEW
        ).probs
        for model, posterior in zip(models, posteriors, strict=True)
    ]
    close(found(NEW).probs, torch.stack(parts).mean(0))
    loss = [-float(p(HELD_OUT).log_prob(y).mean()) for p in (found, before)]
    assert loss[0] < loss[1]


def test_a_temperature_beyond_the_search_is_told() -> None:
    models = [network(seed) for seed in range(2)]
    y = models[0](X).argmax(1).roll(1)  # of other inputs
    for model in models:
        model[2].weight.data *= 1e4
    with pytest.warns(UserWarning, match="temperature of the mixture, 31.6, is at the edge"):
        uq.calibrate(uq.wrap(models, None), [(X, y)], share=None, progress=False)


def test_promised_intervals_are_those_of_the_scores() -> None:
    """All samples promise here, so that the bound is the quantile of their distances in deviations of the mixture."""
    models, posteriors = fitted("regression")
    y = targets_of(models[0], HELD_OUT, "regression")
    predictor = uq.wrap(models, posteriors)
    found = uq.calibrate(predictor, [(HELD_OUT, y)], share=None, progress=False)
    prediction: Any = predictor(HELD_OUT)
    distances = ((y - prediction.mean).abs() / prediction.variance.sqrt()).sort(0).values
    bound = distances[math.ceil(0.9 * (len(y) + 1)) - 1]
    new: Any = found(NEW)
    low, high = new.interval(0.9)
    close(high - new.mean, bound * new.standard_deviation)
    close(new.mean - low, bound * new.standard_deviation)


def test_promised_sets_hold_the_labels() -> None:
    """Of 12 splits of drawn data the mean coverage is the promised one, within three standard errors."""
    models, _ = fitted()
    predictor = uq.wrap(models, None)
    kept = list[float]()
    for seed in range(12):
        x = inputs_of(4, samples=140, seed=100 + seed, dtype=torch.float64)
        y = targets_of(models[0], x, "classification")
        promised = uq.calibrate(predictor, [(x[:40], y[:40])], progress=False, sets="aps")
        chosen = promised(x[40:]).set(0.8, allow_empty=True)
        kept.append(float(chosen.gather(1, y[40:, None]).double().mean()))
    error = np.std(kept) / 12**0.5
    assert 0.8 - 3 * error < np.mean(kept) < 0.8 + 1 / 21 + 3 * error


@pytest.mark.parametrize("untrusted", [False, True])
def test_one_file_holds_all(tmp_path: Path, untrusted: bool) -> None:
    predictor = calibrated()
    uq.save(predictor, tmp_path / "all.h5")
    uq.save(predictor, tmp_path / "again.h5")
    assert (tmp_path / "all.h5").read_bytes() == (tmp_path / "again.h5").read_bytes()
    loaded = uq.load(tmp_path / "all.h5", predictor.models, untrusted=untrusted)
    assert loaded.temperature == predictor.temperature and loaded.promises == predictor.promises
    first, second = predictor(NEW), loaded(NEW)
    for name, tensor in first.to_dict().items():
        assert torch.equal(tensor, second.to_dict()[name]), name
    assert torch.equal(first.set(0.9), second.set(0.9))
    assert torch.equal(first.familiarity("joint"), second.familiarity("joint"))
    contents: Any = uq.inspect(tmp_path / "all.h5")
    assert contents["method"] == "ensemble" and contents["networks"][1]["method"] == "diag"
    assert "network 2\nwithout a posterior" in str(contents) and "80 held-out samples" in str(contents)


@pytest.mark.parametrize("likelihood", ["regression", "poisson"])
def test_files_of_values(tmp_path: Path, likelihood: str) -> None:
    predictor = calibrated(likelihood)
    uq.save(predictor, tmp_path / "all.h5", compression="gzip")
    first, second = predictor(NEW), uq.load(tmp_path / "all.h5", list(predictor.models))(NEW)
    for name, tensor in first.to_dict().items():
        assert torch.equal(tensor, second.to_dict()[name]), name


def swapped(state: dict[str, Any]) -> None:
    state["networks"][0], state["networks"][2] = state["networks"][2], state["networks"][0]


STATES: list[tuple[Any, str]] = [
    (lambda state: state["promises"]["head"].update(head="linearized"), "is not of an ensemble"),
    (lambda state: state.update(temperature=0.0), "temperature must be at least"),
    (lambda state: state.update(options={"n_samples": 10**9}), "no whole number from 1 to"),
    (lambda state: state.update(head="novel"), "head must be one of"),
    (lambda state: state["networks"].pop(), "holds 2 networks"),
    (lambda state: state["networks"][2].pop("fingerprint"), "fingerprint where it has no posterior"),
    (swapped, "are not the posteriors of its networks"),
]


@pytest.mark.parametrize("place", range(len(STATES)))
def test_a_changed_record_is_refused(tmp_path: Path, place: int) -> None:
    change, words = STATES[place]
    uq.save(calibrated(), tmp_path / "all.h5")
    edit_state(tmp_path / "all.h5", change)
    with pytest.raises(uq.PosthocUQError, match=words):
        uq.load(tmp_path / "all.h5", calibrated().models)


def test_a_changed_posterior_is_refused(tmp_path: Path) -> None:
    """The digests of the file fit, and the posterior in it is damaged, is another file, or an ensemble again."""
    path = tmp_path / "all.h5"
    uq.save(calibrated(), path)
    whole = path.read_bytes()

    def put(data: bytes) -> None:
        path.write_bytes(whole)

        def change(file: Any) -> None:
            del file["posteriors/1"]
            file.create_dataset("posteriors/1", data=np.frombuffer(data, np.uint8))

        edit(path, change)

    with h5py.File(path) as file:
        own = np.asarray(file["posteriors/1"]).tobytes()
    for data, words in (
        (own[:-1] + b"x", "damaged"),
        (own[:700], "damaged"),
        (b"", "cut short"),
        (whole, "within an"),
    ):
        put(data)
        with pytest.raises(uq.CorruptPosteriorError, match=words):
            uq.load(path, calibrated().models)
    put(own)
    assert len(uq.load(path, calibrated().models)) == 3

    def bomb(file: Any) -> None:
        del file["posteriors/1"]
        file.create_dataset(
            "posteriors/1",
            data=np.zeros(2**24, np.uint8),
            compression="gzip",
            shuffle=True,
            track_times=False,
        )

    edit(path, bomb)
    for call in (lambda: uq.load(path, calibrated().models), lambda: uq.inspect(path)):
        with pytest.raises(uq.CorruptPosteriorError, match="more bytes than it has itself"):
            call()


def saved(predictor: Any, models: Any, likelihood: str = "") -> Any:
    """Write what is given, and load it for models."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.h5"
        uq.save(predictor, path)
        return uq.load(path, models)


def test_served_like_one_network() -> None:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from posthoc_uq.app import Service, application

    predictor = calibrated()
    with TestClient(application(Service(predictor, level=0.9)), base_url="http://localhost") as client:
        health = client.get("/health").json()
        answer = client.post("/predict", json={"input": NEW[0].tolist()}).json()
    expected = predictor(NEW[:1])
    assert health["head"] == "ensemble" and health["likelihood"] == "classification"
    close(answer["top"][0]["probability"], float(expected.probs.amax()))
    close(answer["novelty"], float(expected.novelty()))


def test_one_output_without_a_dimension() -> None:
    """Outputs (batch,), with targets that are missing."""
    models = [nn.Sequential(network(seed, 1), nn.Flatten(0)) for seed in range(2)]
    y = X[:, 0].clone()
    posteriors = [
        uq.fit(
            m,
            [(X, y)],
            "diag",
            likelihood="regression",
            noise_variance=0.2,
            prior_precision=1.0,
            progress=False,
        )
        for m in models
    ]
    found: Any = uq.wrap(models, posteriors)(X)
    parts: list[Any] = [uq.wrap(m, p)(X) for m, p in zip(models, posteriors, strict=True)]
    logs = torch.stack([part.log_prob(y) for part in parts])
    close(found.log_prob(y), logs.logsumexp(0) - math.log(2))
    assert found.quality(y)["rmse"] > 0 and found.sample(3).shape == (3, 24)
    y[::3] = math.nan
    ignoring = found.changed(missing="ignore")
    there = ~y.isnan()
    close(ignoring.log_prob(y)[there], found.log_prob(X[:, 0])[there])
    close(ignoring.quality(y)["rmse"], float((found.mean - X[:, 0])[there].square().mean().sqrt()))


def other(outputs: int) -> Sequence[nn.Module]:
    return [network(0), network(1, outputs)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: uq.wrap(fitted()[0], fitted()[1][:2]), "list of 3 models needs a list of as many"),
        (lambda: uq.wrap([], []), "list of 0 models"),
        (lambda: uq.wrap(fitted()[0], cast(Any, [3, None, None])), "or None, not a int"),
        (lambda: uq.wrap(fitted()[0], fitted()[1][0]), "list of 3 models needs a list"),
        (lambda: uq.wrap(fitted()[0][:2], [fitted()[1][1], None]), "does not belong to this model"),
        (
            lambda: uq.wrap(fitted()[0][:2], [fitted()[1][0], fitted("regression")[1][1]]),
            "belong to this model|same likelihood|not those the posterior",
        ),
        (lambda: uq.wrap(other(4), None)(NEW), r"the outputs \[\(3,\), \(4,\)\] for an input"),
        (
            lambda: uq.wrap(fitted()[0], fitted()[1], likelihood="regression"),
            "leave it out",
        ),
        (lambda: uq.wrap(fitted()[0], fitted()[1], n_draw=3), "n_draws"),
        (lambda: uq.wrap(fitted()[0], None).novelty(NEW), "no network of this ensemble has one"),
        (lambda: uq.wrap(fitted()[0], None).state_dict(), "no state dict"),
        (lambda: saved(fitted()[1][0], fitted()[0]), "holds the posterior of one network"),
        (lambda: saved(calibrated(), fitted()[0][0]), "give all of them, in their order"),
        (lambda: saved(calibrated(), fitted()[0][:2]), "holds 3 networks, and 2 models were given"),
        (lambda: saved(calibrated(), [*fitted()[0][:2], network(7)]), "Network 2 has no posterior"),
        (lambda: saved(calibrated(), fitted()[0][::-1]), "does not belong to this model"),
        (
            lambda: uq.calibrate(calibrated(), [(X, X[:, 0].long())], head="sampling"),
            "head belongs to one network",
        ),
        (lambda: uq.tune(cast(Any, calibrated()), [(X, X[:, 0].long())]), "posterior"),
    ],
)
def test_refusals(call: Any, words: str) -> None:
    with pytest.raises(uq.PosthocUQError, match=words):
        call()
