"""Data that come into a posterior after its fit, and go out again: against fits on all data, and on those left.

What is computed in kept bases is checked against the dense Fisher of all data.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import HEADS, batches, inputs_of, mlp, short
from torch import Tensor, nn
from watching import Watch

import posthoc_uq as uq
from posthoc_uq.curvature.features import FeatureSource
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.methods import METHODS, Method
from posthoc_uq.posteriors.block import NotContainedError, Weights, combined, combined_matrices
from posthoc_uq.posteriors.features import ClassGrams, changed

METHODS_THAT_CAN: dict[str, Any] = {
    "diag": uq.Diagonal,
    "full": uq.Dense,
    "kfac": lambda **options: uq.KFAC(keep_grams=True, **options),
    "efb": uq.EFB,
    "inf": uq.INF,
}
EXACT = {"diag": 1e-6, "full": 1e-6, "kfac": 1e-5}
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A convolution over images of any size, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.hidden, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(self.body(x))))


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().eval()


def data(samples: int, seed: int, size: int = 6, batch: int = 16) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, size, size, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return list(zip(x.split(batch), y.split(batch), strict=True))


OLD, NEW = data(60, 1), data(30, 2)
OTHERS = [(x * 3, y) for x, y in data(500, 7)]


def fit(model: nn.Module, loader: Batches, method: Any = "diag", **options: Any) -> uq.Posterior:
    method = METHODS_THAT_CAN[method](dtype=torch.float64) if isinstance(method, str) else method
    return uq.fit(model, loader, method, prior_precision=1.0, progress=False, **options)


def update(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
    return uq.update(posterior, loader, progress=False)


def forget(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
    return uq.forget(posterior, loader, progress=False)


def difference(found: uq.Posterior, wanted: uq.Posterior) -> float:
    """The largest relative difference of two posteriors' precisions, in the Frobenius norm, over the blocks."""
    assert found.blocks.keys() == wanted.blocks.keys()
    pairs = [(found.blocks[n].dense(found.scale), b.dense(wanted.scale)) for n, b in wanted.blocks.items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def distance(found: uq.Posterior, wanted: uq.Posterior) -> float:
    """The same of two posteriors of as many samples."""
    assert found.scale == wanted.scale and found.evidence.samples == wanted.evidence.samples
    return difference(found, wanted)


def numbers(posterior: uq.Posterior) -> dict[str, Tensor]:
    tensors = {f"{n}/{k}": t for n, block in posterior.blocks.items() for k, t in block.tensors().items()}
    assert posterior.features is not None
    return tensors | posterior.features.tensors()


def assert_same(found: uq.Posterior, wanted: uq.Posterior) -> None:
    """Bit for bit."""
    tensors = numbers(found)
    assert tensors.keys() == numbers(wanted).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in numbers(wanted).items())
    assert found.settings == wanted.settings and found.history == wanted.history
    assert found.evidence == wanted.evidence


# Against a fit on all data


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("method", EXACT)
def test_an_update_is_a_fit_on_all_data(method: str, fisher: str) -> None:
    model, kind = make_net(), METHODS_THAT_CAN[method](dtype=torch.float64, fisher=fisher)
    posterior, wanted = fit(model, OLD, kind), fit(model, [*OLD, *NEW], kind)
    assert difference(posterior, wanted) > 0.05
    assert update(posterior, NEW) is posterior
    assert distance(posterior, wanted) < EXACT[method]
    assert posterior.scale == 90 and posterior.prior_precision == 1.0
    torch.testing.assert_close(posterior.log_marginal_likelihood(), wanted.log_marginal_likelihood())
    inputs = OTHERS[0][0]
    for head in ("linearized", "moments"):
        found, expected = (uq.wrap(model, p, head=head)(inputs) for p in (posterior, wanted))
        torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.novelty(), expected.novelty(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS_THAT_CAN)
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_forgetting_gives_the_posterior_before(method: str, fisher: str) -> None:
    model, kind = make_net(), METHODS_THAT_CAN[method](dtype=torch.float64, fisher=fisher)
    posterior, before = fit(model, OLD, kind), fit(model, OLD, kind)
    update(posterior, NEW)
    assert difference(posterior, before) > 0.05
    in_other_batches = [(x.flip(0), y.flip(0)) for x, y in data(30, 2, batch=7)]
    forget(posterior, in_other_batches)
    assert distance(posterior, before) < 1e-6
    inputs = OTHERS[0][0]
    found, expected = (uq.wrap(model, p).novelty(inputs) for p in (posterior, before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    changes = posterior.history.changes
    assert changes["balance"] == 0 and (changes["added"], changes["removed"]) == (30, 30)


@pytest.mark.parametrize("method", EXACT)
def test_data_of_the_fit_can_go_out(method: str) -> None:
    model = make_net()
    posterior, wanted = fit(model, [*OLD, *NEW], method), fit(model, NEW, method)
    forget(posterior, OLD)
    assert distance(posterior, wanted) < 1e-5 and posterior.evidence.samples == 30


def test_samples_with_other_numbers_of_positions() -> None:
    model, larger = make_net(), data(30, 3, size=9)
    posterior, wanted = fit(model, OLD, "kfac"), fit(model, [*OLD, *larger], "kfac")
    assert distance(update(posterior, larger), wanted) < 1e-5
    assert distance(forget(posterior, larger), fit(model, OLD, "kfac")) < 1e-5


def test_in_float32() -> None:
    model = make_net()
    for method in EXACT:
        kind = METHODS_THAT_CAN[method]()
        posterior = update(fit(model, OLD, kind), NEW)
        # a dense Fisher is kept in float64, whose evidence is right at small prior precisions
        assert posterior.dtype == (torch.float64 if method in ("full", "subnetwork") else torch.float32)
        assert distance(posterior, fit(model, [*OLD, *NEW], kind)) < 1e-4
        assert distance(forget(posterior, NEW), fit(model, OLD, kind)) < 1e-4


@pytest.mark.parametrize("layers", ["last", ["hidden", "last"]])
def test_some_layers(layers: Any) -> None:
    model = make_net()
    posterior = update(fit(model, OLD, "full", layers=layers), NEW)
    assert distance(posterior, fit(model, [*OLD, *NEW], "full", layers=layers)) < 1e-6


def test_a_regression_keeps_its_noise() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).eval()

    def points(samples: int, seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 2, generator=generator)
        return list(zip(x.split(8), torch.randn(samples, 2, generator=generator).split(8), strict=True))

    old, new = points(40, 0), points(24, 1)
    posterior = fit(model, old, "full", likelihood="regression")
    noise = posterior.likelihood.noise_variance
    assert noise is not None
    wanted = fit(model, [*old, *new], "full", likelihood="regression", noise_variance=noise.tolist())
    update(posterior, new)
    assert torch.equal(posterior.likelihood.noise_variance, noise)  # type: ignore[arg-type]
    assert distance(posterior, wanted) < 1e-6
    assert posterior.evidence.targets == wanted.evidence.targets == 128
    assert posterior.evidence.squared_residuals == pytest.approx(wanted.evidence.squared_residuals)
    inputs = torch.linspace(-4, 4, 12).reshape(6, 2)
    torch.testing.assert_close(
        uq.wrap(model, posterior).novelty(inputs),
        uq.wrap(model, wanted).novelty(inputs),
        rtol=1e-5,
        atol=1e-7,
    )


def test_without_labels() -> None:
    model = make_net()
    posterior = update(fit(model, OLD, "diag"), [x for x, _ in NEW])
    assert posterior.evidence.log_likelihood is None
    assert distance(posterior, fit(model, [*OLD, *NEW], "diag")) < 1e-6
    with pytest.raises(uq.PosthocUQError, match="saw no labels"):
        posterior.log_marginal_likelihood()


# Kept bases


def dense_of(model: nn.Module, loader: Batches, name: str) -> Tensor:
    """The layer's Fisher, every entry of it."""
    return fit(model, loader, "full", layers=[name]).blocks["joint"].dense()[0]


@pytest.mark.parametrize("method", ["efb", "inf"])
def test_what_kept_bases_hold_is_exact(method: str) -> None:
    model = make_net()
    kind = uq.INF(rank=9, dtype=torch.float64) if method == "inf" else uq.EFB(dtype=torch.float64)
    posterior = fit(model, OLD, kind)
    bases = {name: (b.input_basis[0], b.output_basis[0]) for name, b in posterior.blocks.items()}  # type: ignore[attr-defined]
    update(posterior, NEW)
    inside, whole, before, whole_before = 0.0, 0.0, 0.0, 0.0
    for name, block in posterior.blocks.items():
        tensors = block.tensors()
        assert torch.equal(tensors["input_basis"][0], bases[name][0])
        fisher = dense_of(model, [*OLD, *NEW], name)
        vectors = torch.kron(bases[name][1], bases[name][0])
        wanted = (vectors.T @ fisher @ vectors).diagonal().reshape(tensors["eigenvalues"][0].shape)
        torch.testing.assert_close(tensors["eigenvalues"][0], wanted, rtol=1e-6, atol=1e-9)
        if method == "inf":
            flat = tensors["diagonal"].flatten()
            torch.testing.assert_close(flat, fisher.diagonal(), rtol=1e-6, atol=1e-9)
            new, old = dense_of(model, NEW, name), dense_of(model, OLD, name)
            inside, whole = inside + float((vectors.T @ new @ vectors).trace()), whole + float(new.trace())
            before += float((vectors.T @ old @ vectors).trace())
            whole_before += float(old.trace())
    changes = posterior.history.changes
    if method == "inf":
        assert changes["outside"] == pytest.approx(1 - inside / whole, rel=1e-5)
        assert changes["outside before"] == pytest.approx(1 - before / whole_before, rel=1e-5)
        assert changes["outside"] > changes["outside before"]
    assert "of the last update's Fisher is outside of the kept bases" in str(posterior.report())


def test_what_efb_says_of_other_bases() -> None:
    """Of a linear layer: 1 - |diag|^2 / |.|^2 of the Kronecker product of the new data's Grams, in the kept bases."""
    model = nn.Linear(3, 3).double().eval()
    posterior = fit(model, [(x.flatten(1)[:, :3].double(), y) for x, y in OLD], "efb")
    new = [(x.flatten(1)[:, :3].double() * torch.tensor([1.0, 3.0, 0.2]), y) for x, y in NEW]
    block = next(iter(posterior.blocks.values()))
    bases = block.tensors()
    update(posterior, new)
    x = torch.cat([x for x, _ in new])
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    probs = model(x[:, :3]).softmax(1).detach()
    a_gram = x.T @ x / len(x)
    g_gram = (torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)).mean(0)
    turned = torch.kron(bases["output_basis"][0], bases["input_basis"][0])
    turned = turned.T @ torch.kron(g_gram, a_gram) @ turned
    share = 1 - float(turned.diagonal().square().sum() / turned.square().sum())
    assert posterior.history.changes["outside"] == pytest.approx(share, rel=1e-6) and share > 0.05
    update(posterior, [(x.flatten(1)[:, :3].double(), y) for x, y in OLD])
    assert posterior.history.changes["outside"] < 1e-9  # the bases are those of these data


def test_what_the_bases_miss() -> None:
    """The precision's error after an update is larger than after a fit on all data, and smaller than without it."""
    model = make_net()
    exact = {name: dense_of(model, [*OLD, *NEW], name) * 90 for name in ("body.0", "hidden", "last")}
    for method in ("efb", "inf"):
        old, updated, fitted = (
            fit(model, OLD, method),
            update(fit(model, OLD, method), NEW),
            fit(model, [*OLD, *NEW], method),
        )
        errors = [
            sum(
                float((p.blocks[n].dense(p.scale)[0] - fisher).norm() / fisher.norm())
                for n, fisher in exact.items()
            )
            for p in (fitted, updated, old)
        ]
        assert errors[0] <= errors[1] * 1.01 < errors[2], (method, errors)


# Novelty


def clusters(samples: int, classes: int, size: int, seed: int, spread: float = 0.4) -> tuple[Tensor, Tensor]:
    """Features in some directions of their own for each class."""
    directions = torch.randn(classes, size, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    noise = torch.randn(samples, size, generator=generator, dtype=torch.float64)
    return directions[labels] + spread * noise, labels


def grams_of(phi: Tensor, labels: Tensor, classes: int, budget: int = 2**28) -> ClassGrams:
    size = phi.shape[1]
    layer = Layer("fc", "linear", "fc.weight", None, 1, classes, size, (classes, size))
    grams = ClassGrams(FeatureSource(layer, "outputs", classes), Categorical(), torch.device("cpu"), budget)
    grams.add(phi, nn.functional.one_hot(labels, classes).double())
    return grams


@pytest.mark.parametrize(
    ("size", "budget", "tolerance"), [(20, 2**28, 1e-9), (60, 2**28, 0.25), (60, 2**19, 0.25)]
)
def test_class_grams_add_up(size: int, budget: int, tolerance: float) -> None:
    """Exactly where every direction of a class is kept; else to the kept directions. The third is sketched."""
    phi, labels = clusters(3000, 20, size, 1)
    new, of_new = clusters(600, 20, size, 2, spread=0.8)
    test, _ = clusters(200, 20, size, 3, spread=0.6)
    kept = grams_of(phi, labels, 20, budget).result(torch.float64)
    wanted = grams_of(torch.cat([phi, new]), torch.cat([labels, of_new]), 20, budget).result(torch.float64)
    fresh = grams_of(new, of_new, 20, budget)
    assert ("sketches" in fresh.sums) == (budget == 2**19)
    found = changed(kept, fresh, 1)
    assert found.samples == 3600 and torch.equal(found.totals[:, :2], wanted.totals[:, :2])  # type: ignore[index]
    ratio = (found.novelty(test) / wanted.novelty(test)).log().abs()
    assert float(ratio.mean()) < tolerance
    order = torch.stack([found.novelty(test), wanted.novelty(test)]).argsort(1).argsort(1).double()
    assert float(torch.corrcoef(order)[0, 1]) > 0.9
    back = changed(found, grams_of(new, of_new, 20, budget), -1)
    ratio = (back.novelty(test) / kept.novelty(test)).log().abs()
    assert float(ratio.mean()) < tolerance and back.samples == 3000


def test_rare_classes() -> None:
    phi, _ = clusters(40, 5, 8, 1)

    def labelled(*counts: int) -> Tensor:
        return torch.arange(5).repeat_interleave(torch.tensor(counts))

    def totals(features: Any) -> list[tuple[float, ...]]:
        return [tuple(row[:2]) for row in features.totals.tolist()]

    kept = grams_of(phi[:35], labelled(20, 12, 3, 0, 0), 5).result(torch.float64)
    assert totals(kept) == [(0, 20), (1, 12), (-1, 3)]
    labels = labelled(4, 0, 2, 11, 3)
    found = changed(kept, grams_of(phi[:20], labels, 5), 1)
    assert totals(found) == [(0, 24), (1, 12), (3, 11), (-1, 8)]
    back = changed(found, grams_of(phi[:20], labels, 5), -1)
    assert totals(back) == totals(kept)
    assert torch.equal(back.novelty(phi), back.novelty(phi))
    torch.testing.assert_close(back.novelty(phi), kept.novelty(phi), rtol=1e-6, atol=1e-9)
    with pytest.raises(NotContainedError, match="samples of a class"):
        changed(kept, grams_of(phi[:20], labels, 5), -1)


def test_novelty_falls_for_what_was_novel() -> None:
    model = make_net()
    x = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(8)) + 4
    posterior = fit(model, OLD, "diag")
    predictor = uq.wrap(model, posterior)
    of_old, before = predictor.novelty(OLD[0][0]), predictor.novelty(x[32:])
    update(posterior, [x[:32]])
    after = predictor.novelty(x[32:])
    assert float(before.median()) > 2 * float(of_old.median())
    assert float(after.median()) < 0.3 * float(before.median())


def test_files_of_earlier_releases_keep_their_novelty(tmp_path: Path) -> None:
    model = make_net()
    posterior = fit(model, OLD, "diag")
    assert posterior.features is not None
    posterior.features.totals = None  # which those files do not have
    uq.save(posterior, tmp_path / "old.h5")
    loaded = uq.load(tmp_path / "old.h5", model)
    old_features = loaded.features
    assert old_features is not None and old_features.totals is None
    with pytest.warns(UserWarning, match="novelty stays as it was"):
        update(loaded, NEW)
    assert loaded.features is old_features
    assert distance(loaded, fit(model, [*OLD, *NEW], "diag")) < 1e-6


# What belongs to the posterior as it was


def test_thresholds_are_cleared_and_predictors_follow() -> None:
    model = make_net()
    posterior = fit(model, OLD, "full")
    predictors = {head: uq.wrap(model, posterior, head=head) for head in ("linearized", "moments")}
    sampling = uq.wrap(model, posterior, head="sampling", n_samples=3)
    x = OTHERS[0][0]
    uq.Referral(0.2).fit(predictors["linearized"], predictors["linearized"](x))
    predictors["moments"].calibrate(OLD, n_mc=20, progress=False)
    old = {head: predictor(x).probs for head, predictor in predictors.items()}
    top, drawn = predictors["linearized"].novelty(x, of="top"), sampling(x).probs
    with pytest.warns(UserWarning) as caught:
        update(posterior, OTHERS)
    texts = [str(warning.message) for warning in caught]
    assert sum("referral threshold (entropy above" in text and "is cleared" in text for text in texts) == 1
    assert sum("calibration is cleared" in text for text in texts) == 1
    assert not posterior.history.referral and not posterior.history.calibration
    with pytest.raises(uq.PosthocUQError, match="threshold"):
        predictors["linearized"].referral(predictors["linearized"](x))
    for head, predictor in predictors.items():
        assert (predictor(x).probs - old[head]).abs().max() > 1e-4, head
        fresh = uq.wrap(model, posterior, head=head)(x).probs
        torch.testing.assert_close(predictor(x).probs, fresh, rtol=0, atol=0)
    assert not torch.allclose(predictors["linearized"].novelty(x, of="top"), top)
    assert torch.equal(sampling(x).probs, drawn)  # drawn weights stay until they are drawn anew
    sampling.redraw(0)
    assert not torch.equal(sampling(x).probs, drawn)


def test_a_window_that_slides() -> None:
    """After as many samples came in as went out, every hyperparameter is as before, and predictors still follow."""
    model = make_net()
    posterior = fit(model, OLD, "full")
    predictor, x = uq.wrap(model, posterior, head="linearized"), OTHERS[0][0]
    old, settings = predictor(x).probs, posterior.settings
    newer = [(3 * x, y) for x, y in data(60, 4)]
    update(posterior, newer)
    predictor(x)
    forget(posterior, OLD)
    assert posterior.settings == settings
    assert (predictor(x).probs - old).abs().max() > 1e-4
    torch.testing.assert_close(
        predictor(x).probs, uq.wrap(model, fit(model, newer, "full"))(x).probs, rtol=1e-4, atol=1e-6
    )


def test_hyperparameters_stay() -> None:
    model = make_net()
    posterior = uq.fit(model, OLD, uq.INF(dtype=torch.float64), progress=False)
    prior, told = posterior.prior_precision, posterior.history.tuning["prior precision"]
    posterior.scale, posterior.temperature = 30.0, 1.5  # half of the samples
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="These are the data of the last update")
            update(posterior, NEW)
        assert posterior.history.tuning["prior precision"] == told + ", before the data changed"
    assert (posterior.prior_precision, posterior.temperature) == (prior, 1.5)
    assert posterior.scale == pytest.approx(60.0) and posterior.evidence.samples == 120
    assert not posterior.history.faithful


def test_the_same_data_twice() -> None:
    model = make_net()
    posterior = update(fit(model, OLD, "diag"), NEW)
    with pytest.warns(UserWarning, match="count twice"):
        update(posterior, data(30, 2, batch=5))
    forget(posterior, NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(posterior, NEW)


# Refusals


def test_too_much_cannot_go_out() -> None:
    model = make_net()
    for method in METHODS_THAT_CAN:
        posterior, before = fit(model, OLD, method), fit(model, OLD, method)
        before.history = copy.deepcopy(posterior.history)
        with pytest.raises(uq.PosthocUQError, match="leaves none; the posterior stays as it is"):
            forget(posterior, OLD)
        with pytest.raises(uq.PosthocUQError, match="cannot all be among those of the posterior"):
            forget(posterior, OTHERS[:3])
        assert_same(posterior, before)


def test_statistics_that_would_be_negative() -> None:
    weights = Weights.of(10, -5, 1e-7)
    kept, part = torch.tensor([2.0, 1.0]), torch.tensor([4.0, 2.0 + 1e-6])
    assert combined(kept, part, weights, "diagonal").tolist() == [0.0, 0.0]
    with pytest.raises(NotContainedError, match="diagonal"):
        combined(kept, torch.tensor([4.0, 2.1]), weights, "diagonal")
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    torch.testing.assert_close(combined_matrices(matrix, matrix, weights, ""), matrix)
    other = torch.tensor([[2.0, -1.5], [-1.5, 2.0]])  # both diagonals fit, the matrices do not
    with pytest.raises(NotContainedError, match="Gram"):
        combined_matrices(matrix, other, weights, "Gram")


class Unread:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in METHODS_THAT_CAN])
def test_methods_that_cannot(method: str) -> None:
    model = make_net()
    posterior = uq.fit(model, OLD[:1], short(method), progress=False)
    kind = METHODS[method]
    if kind.update is Method.update:
        with pytest.raises(
            uq.PosthocUQError, match=rf"method='{method}' cannot take in more data.*fit again on all"
        ):
            update(posterior, Unread())
    if kind.forget is Method.forget:
        with pytest.raises(
            uq.PosthocUQError, match=rf"method='{method}' cannot forget data.*fit again on those"
        ):
            forget(posterior, Unread())


def test_what_else_is_refused() -> None:
    model = make_net()
    with pytest.raises(uq.PosthocUQError, match=r"keep_grams=True"):
        update(fit(model, OLD, uq.KFAC()), Unread())
    posterior = fit(model, OLD, "diag")
    with pytest.raises(uq.PosthocUQError, match="update takes a posterior"):
        update("posterior.h5", NEW)  # type: ignore[arg-type]
    with pytest.raises(uq.PosthocUQError, match="no batch of samples"):
        update(posterior, [])
    with pytest.raises(uq.PosthocUQError, match="abel"):
        update(posterior, [(NEW[0][0], NEW[0][1] + 5)])
    with torch.inference_mode(), pytest.raises(uq.PosthocUQError, match="inference_mode"):
        update(posterior, Unread())
    with pytest.raises(uq.NonFiniteError):
        update(posterior, [(NEW[0][0] * float("nan"), NEW[0][1])])
    del posterior.history.fit["fisher"]
    with pytest.raises(uq.PosthocUQError, match="which labels its Fisher was taken with"):
        update(posterior, Unread())
    posterior = fit(model, OLD, "diag")
    with torch.no_grad():
        model.last.bias += 1
    with pytest.raises(uq.PosteriorMismatchError, match="changed after the posterior was fitted"):
        update(posterior, Unread())


# Whatever happens


class Broken:
    """Batches, and then an error."""

    def __init__(self, batches: Batches, error: BaseException) -> None:
        self.batches, self.error = batches, error

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches
        raise self.error


@pytest.mark.parametrize("method", METHODS_THAT_CAN)
def test_a_change_that_fails_changes_nothing(method: str) -> None:
    model = make_net()
    posterior, before = fit(model, OLD, method), fit(model, OLD, method)
    before.history = copy.deepcopy(posterior.history)
    with Watch(model):
        for change in (update, forget):
            for error in (KeyboardInterrupt(), OSError("unplugged")):
                with pytest.raises(type(error)):
                    change(posterior, Broken(NEW, error))
                assert_same(posterior, before)
        update(posterior, NEW)
        forget(posterior, NEW)


def test_copies_and_files(tmp_path: Path) -> None:
    model = make_net()
    for method in METHODS_THAT_CAN:
        posterior = fit(model, OLD, method)
        shallow, twin = copy.copy(posterior), copy.deepcopy(posterior)
        update(posterior, NEW)
        assert shallow.evidence.samples == twin.evidence.samples == 60 and not shallow.history.changes
        assert distance(shallow, twin) == 0 and difference(shallow, posterior) > 0.05
        uq.save(posterior, tmp_path / "p.h5")
        loaded = uq.load(tmp_path / "p.h5", model)
        assert_same(loaded, posterior)
        found = uq.inspect(tmp_path / "p.h5")
        assert found["changes"] == posterior.history.changes and "1 update added 30 samples" in str(found)
        copies = [loaded, copy.deepcopy(posterior), pickle.load(io.BytesIO(pickle.dumps(posterior)))]
        for one in copies:
            one.model = model
            forget(one, NEW)
            assert distance(one, shallow) < 1e-6
        assert {one.history.changes["digest"] for one in copies} == {loaded.history.changes["digest"]}


def test_grams_stay_exact_in_a_half_file(tmp_path: Path) -> None:
    model = make_net()
    posterior = fit(model, OLD, "kfac")
    uq.save(posterior, tmp_path / "half.h5", dtype=torch.bfloat16)
    loaded = update(uq.load(tmp_path / "half.h5", model), NEW)
    assert distance(loaded, fit(model, [*OLD, *NEW], "kfac")) < 1e-5


def test_the_digest_tells_what_came_and_went() -> None:
    model = make_net()

    def digest(*steps: tuple[Any, Batches]) -> str:
        posterior = fit(model, OLD, "diag")
        for change, loader in steps:
            change(posterior, loader)
        return posterior.history.changes["digest"]

    once = digest((update, NEW))
    assert once == digest((update, data(30, 2, batch=4)))  # whatever the batches
    others = [
        digest((update, NEW[:-1])),
        digest((update, [(x, 2 - y) for x, y in NEW])),
        digest((forget, OLD[:1])),
        digest((update, NEW), (forget, NEW)),
    ]
    assert len({once, *others}) == 5


def test_a_hundred_updates(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    parts = x.split(5)
    kind = uq.KFAC(keep_grams=True, dtype=torch.float64)
    posterior = fit(model, [x[:100]], kind)  # type: ignore[list-item]
    sizes, objects, block = dict[int, int](), dict[int, int](), weakref.ref(posterior.blocks["0"])
    for number, part in enumerate(parts, 1):
        update(posterior, [part])
        if number in (10, 100):
            uq.save(posterior, tmp_path / "p.h5")
            sizes[number] = (tmp_path / "p.h5").stat().st_size
            gc.collect()
            objects[number] = len(gc.get_objects())
    assert block() is None and abs(sizes[100] - sizes[10]) <= 64
    assert objects[100] - objects[10] < 200
    wanted = fit(model, [x[:100], x], kind)  # type: ignore[list-item]
    assert distance(posterior, wanted) < 1e-5
    changes = posterior.history.changes
    assert (changes["updates"], changes["added"]) == (100, 500) and len(json.dumps(changes)) < 400


KILLED = """
import os, signal, sys
import torch
import posthoc_uq as uq
sys.path.insert(0, {tests!r})
from test_updating import NEW, make_net

posterior = uq.update(uq.load(sys.argv[1], make_net()), NEW, progress=False)
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
uq.save(posterior, sys.argv[1])
"""


def test_a_killed_update_leaves_the_old_file_whole(tmp_path: Path) -> None:
    model = make_net()
    posterior, path = fit(model, OLD, "inf"), tmp_path / "p.h5"
    uq.save(posterior, path)
    before = path.read_bytes()
    code = KILLED.format(tests=str(Path(__file__).parent))
    killed = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == -signal.SIGKILL and path.read_bytes() == before
    uq.save(update(uq.load(path, model), NEW), path)
    assert uq.load(path, model).evidence.samples == 90
    assert [each.name for each in tmp_path.iterdir()] == ["p.h5"]


class _Waiting:
    """A loader that says when it is read, and then waits."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.read, self.go = data, threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        self.read.set()
        assert self.go.wait(60)
        yield from self.data


@pytest.mark.parametrize("change", [uq.update, uq.forget])
def test_one_change_at_a_time(change: Any) -> None:
    net, x = mlp(), inputs_of(4)
    data = batches(x, torch.arange(24) % 3)
    posterior = uq.fit(net, data, "diag", progress=False)
    loader = _Waiting(data[:1])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(uq.update, posterior, loader, progress=False)
        assert loader.read.wait(60)
        with pytest.raises(
            uq.PosthocUQError, match=r"needs this posterior for itself, and uq\.update in another thread"
        ):
            change(posterior, data[1:2], progress=False)
        posterior.prior_precision = 7.0  # which an update does not undo
        loader.go.set()
        first.result(60)
    assert posterior.evidence.samples == 32 and posterior.history.changes["added"] == 8
    assert posterior.prior_precision == 7.0 and posterior.scale == 32
    change(posterior, data[:1], progress=False)  # the other one is done


_GATES: list[tuple[threading.Event, threading.Event]] = []


class _Gate(nn.Module):
    """Says that a pass is here, and holds it up."""

    def forward(self, x: Tensor) -> Tensor:
        if _GATES:
            reached, go = _GATES.pop()
            reached.set()
            assert go.wait(60)
        return x


@pytest.mark.parametrize("method", ["message_passing", "diag"])
@pytest.mark.parametrize("head", HEADS)
def test_a_prediction_under_way_is_of_the_posterior_before(method: str, head: str) -> None:
    own, x = mlp(), inputs_of(4)
    net = nn.Sequential(_Gate(), *own)
    data = batches(x, torch.arange(24) % 3)
    posterior = uq.fit(net, data, method, layers="last", head=head, progress=False)
    predictor = uq.wrap(net, posterior)
    before, reached, go = predictor(x), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        _GATES.append((reached, go))
        under_way = pool.submit(predictor, x)
        assert reached.wait(60)
        uq.update(posterior, [(3 * inputs, labels) for inputs, labels in data], progress=False)
        after = predictor(x)
        go.set()
        found = under_way.result(60)
    torch.testing.assert_close(found.probs, before.probs)
    fresh = uq.wrap(net, posterior)(x)
    if head == "sampling":  # whose weights are drawn until `redraw`
        torch.testing.assert_close(after.probs, before.probs)
    else:
        torch.testing.assert_close(after.probs, fresh.probs)
        assert not torch.allclose(after.probs, before.probs, atol=1e-4)


def test_data_come_in_beside_a_network_that_was_certain_of_all_before() -> None:
    """Its output Gram is about zero; what is compared with the new data's is the precision, which has the prior's."""
    model, x = mlp(dtype=torch.float64), inputs_of(4, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.mul_(200.0)  # type: ignore[union-attr]
        best = model(x).topk(2).values
        x = x[best[:, 0] - best[:, 1] > 30]
        y = model(x).argmax(1)
    method = uq.KFAC(keep_grams=True, fisher="empirical")
    posterior = uq.fit(model, batches(x, y), method, prior_precision=1.0, progress=False)
    before = posterior.variance()
    other = batches(x + 0.5, (y + 1) % 3)
    uq.forget(uq.update(posterior, other, progress=False), other, progress=False)
    torch.testing.assert_close(posterior.variance(), before, rtol=1e-5, atol=0)
