"""Last layers with more classes than a Gram of them is formed for."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import posthoc_uq as uq

CLASSES = 1100
VOCABULARY = 4200
"""Classes, of which even a layer with positions has too many for a Gram of them."""
Fitted = tuple[torch.nn.Sequential, uq.Posterior, uq.Posterior]


def fitted(samples: int) -> Fitted:
    """A network and its posteriors: with few directions of the classes, and whole, since its Grams are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES)).eval()
        x, y = torch.randn(samples, 5), torch.randint(0, CLASSES, (samples,))

    def fit(keep_grams: bool) -> uq.Posterior:
        method = uq.KFAC(fisher="mc", keep_grams=keep_grams)
        found = uq.fit(net, [(x, y)], method, layers="last", prior_precision=2.0, progress=False)
        assert isinstance(found, uq.Posterior)
        return found

    return net, fit(False), fit(True)


@pytest.fixture(scope="module")
def few() -> Fitted:
    return fitted(60)


def test_few_samples_lose_nothing(few: Fitted) -> None:
    net, wide, whole = few
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for name, variance in whole.variance().items():
        torch.testing.assert_close(wide.variance()[name], variance, rtol=1e-4, atol=0)
    assert float(wide.log_determinant()) == pytest.approx(float(whole.log_determinant()), rel=1e-6)
    for head, options in (
        ("linearized", {}),
        ("linearized", {"engine": "exact", "outputs": 7}),
        ("moments", {}),
    ):
        found, expected = (uq.wrap(net, own, head, **options)(x) for own in (wide, whole))
        torch.testing.assert_close(found.probs, expected.probs, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.logits_variance, expected.logits_variance, rtol=1e-3, atol=0)
    predictors = [uq.wrap(net, own) for own in (wide, whole)]
    found, expected = (p.functional_covariance(x[:2], joint=True) for p in predictors)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    draws = wide.sample(400, torch.Generator().manual_seed(0))
    for name, variance in wide.variance().items():
        assert float((draws[name].var(0) / variance).mean()) == pytest.approx(1, abs=0.01)


def test_a_file_is_not_quadratic_in_classes(few: Fitted, tmp_path: Path) -> None:
    net, wide, whole = few
    for name, own in (("wide", wide), ("whole", whole)):
        uq.save(own, tmp_path / name)
    assert 3 * (tmp_path / "wide").stat().st_size < (tmp_path / "whole").stat().st_size
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    loaded = uq.load(tmp_path / "wide", net)
    assert torch.equal(uq.wrap(net, loaded)(x).probs, uq.wrap(net, wide)(x).probs)
    with pytest.raises(uq.PosthocUQError, match="keep_grams=True"):
        uq.update(wide, [(x, torch.zeros(3, dtype=torch.long))], progress=False)


@pytest.mark.parametrize("method", ["kfac", "efb"])
def test_a_wide_layer_beside_others_is_saved(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1100)).eval()
    x, y = torch.randn(32, 4), torch.randint(0, 1100, (32,))
    posterior = uq.fit(model, [(x, y)], method, layers="all", prior_precision=1.0, progress=False)
    assert {block.kind for block in posterior.blocks.values()} == {method, f"{method}_wide"}
    uq.save(posterior, tmp_path / "p.uq")
    loaded = uq.load(tmp_path / "p.uq", model)
    assert torch.equal(uq.wrap(model, loaded)(x[:3]).probs, uq.wrap(model, posterior)(x[:3]).probs)


def test_more_samples_keep_the_trace() -> None:
    _, wide, whole = fitted(900)
    (block,), (other,) = (tuple(own.blocks.values()) for own in (wide, whole))
    rest, kept = block.tensors()["output_rest"], block.tensors()["output_eigenvalues"]
    trace = kept.sum() + rest[0] * (CLASSES - kept.shape[1])
    assert float(rest) > 0
    assert float(trace) == pytest.approx(float(other.tensors()["output_eigenvalues"].sum()), rel=1e-5)


def second_moments(
    net: torch.nn.Sequential, x: Tensor, y: Tensor, tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of the last layer's gradients ``G_s = sum_t (p - y)_t a_t^T`` in the bases of a posterior, and their squared
    length along each input direction.
    """
    classes = tensors["output_basis"].shape[1]
    with torch.no_grad():
        hidden = net[:-1](x)
        errors = net[-1](hidden).softmax(-1) - torch.nn.functional.one_hot(y, classes)
    ones = torch.ones_like(hidden[..., :1])
    rows = torch.cat([hidden, ones], -1).reshape(len(x), -1, hidden.shape[-1] + 1)
    turned = errors.reshape(len(x), -1, classes).mT @ rows @ tensors["input_basis"][0]
    inside = tensors["output_basis"][0].T @ turned
    return inside.square().mean(0), turned.square().sum(1).mean(0)


@pytest.mark.parametrize(("kind", "samples"), [("rows", 60), ("rows", 300), ("tokens", 40), ("tokens", 150)])
def test_efb_of_many_classes_has_exact_second_moments(kind: str, samples: int) -> None:
    torch.manual_seed(0)
    positions, classes = ((3,), VOCABULARY) if kind == "tokens" else ((), CLASSES)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, classes)).eval()
    x, y = torch.randn(samples, *positions, 5), torch.randint(0, classes, (samples, *positions))
    likelihood = uq.Categorical(class_dim=-1) if positions else "classification"

    def fit(x: Tensor, y: Tensor, method: str) -> uq.Posterior:
        own = (uq.EFB if method == "efb" else uq.KFAC)(fisher="empirical")
        return uq.fit(
            net, [(x, y)], own, layers="last", likelihood=likelihood, prior_precision=2.0, progress=False
        )

    posterior = fit(x, y, "efb")
    (block,) = posterior.blocks.values()
    assert block.kind == "efb_wide"
    tensors = block.tensors()
    inside, whole = second_moments(net, x, y, tensors)
    torch.testing.assert_close(tensors["eigenvalues"][0], inside, rtol=1e-3, atol=1e-7 * float(inside.max()))
    kept = tensors["output_basis"].shape[-1]
    found = tensors["eigenvalues"][0].sum(0) + tensors["rest"][0] * (classes - kept)
    torch.testing.assert_close(found, whole, rtol=2e-4, atol=0)
    # of few samples the basis has all there is
    assert bool((tensors["rest"] == 0).all()) == (samples * len(y[0].flatten()) < kept)
    (of_kfac,) = fit(x, y, "kfac").blocks.values()
    assert float(_trace(of_kfac.tensors())) == pytest.approx(
        float(whole.sum()), rel=0.2 if kind == "rows" else 1e-4
    )
    grown = uq.update(posterior, [(x[:7] + 1, y[:7])], progress=False)
    (more,) = (own.tensors() for own in grown.blocks.values())
    inside, whole = second_moments(net, torch.cat([x, x[:7] + 1]), torch.cat([y, y[:7]]), tensors)
    torch.testing.assert_close(more["eigenvalues"][0], inside, rtol=1e-3, atol=1e-6 * float(inside.max()))
    found = more["eigenvalues"][0].sum(0) + more["rest"][0] * (classes - kept)
    torch.testing.assert_close(found, whole, rtol=2e-4, atol=0)


def _trace(tensors: dict[str, Tensor]) -> Tensor:
    """Of a block by KFAC with few directions of the outputs."""
    _, classes, kept = tensors["output_basis"].shape
    outputs = tensors["output_eigenvalues"].sum() + tensors["output_rest"].sum() * (classes - kept)
    return tensors["input_eigenvalues"].sum() * outputs


def test_a_search_begins_with_the_variances_of_the_weights() -> None:
    """So that covariances of many outputs are made for the last trials alone."""
    torch.manual_seed(0)
    last = torch.nn.Linear(6, CLASSES)
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 6, 8), torch.nn.Flatten(), last).eval()
    x, y = torch.randn(40, 1, 8), torch.randint(0, CLASSES, (40,))
    last.weight.data.mul_(3)
    decades, trials = list[float](), list[int]()
    for method in ("diag", "inf"):
        posterior = uq.fit(net, [(x, y)], method, layers="last", progress=False)
        assert isinstance(posterior.prior_precision, float) and posterior.history.trials is not None
        decades.append(log10(posterior.prior_precision))
        trials.append(len(posterior.history.trials.trials))
    assert abs(decades[0] - decades[1]) < 0.1 and trials[1] < trials[0], (decades, trials)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numbers, where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                numbers = each.untyped_storage().nbytes() // each.element_size()
                if numbers > self.numbers:
                    self.numbers, self.where = numbers, f"{func} {tuple(each.shape)}"
        return found


@pytest.mark.parametrize("kind", ["rows", "tokens"])
@pytest.mark.parametrize("method", ["inf", "kfac", "efb", "diag"])
def test_nothing_is_quadratic_in_classes(method: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    positions = (2,) if kind == "tokens" else ()
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, VOCABULARY)).eval()
    x, y = torch.randn(24, *positions, 5), torch.randint(0, VOCABULARY, (24, *positions))
    likelihood = uq.Categorical(class_dim=-1) if positions else "classification"
    with Largest() as largest:
        posterior = uq.fit(net, [(x, y)], method, layers="last", likelihood=likelihood, progress=False)
        if kind == "rows":
            posterior = uq.calibrate(posterior, [(x, y)], progress=False)
        uq.save(posterior, tmp_path / "p")
        posterior = uq.load(tmp_path / "p", net)
        for head, options in (("linearized", {}), ("sampling", {"n_samples": 3}), ("moments", {})):
            prediction = uq.wrap(net, posterior, head, **options)(x[:4])
            assert bool(prediction.mutual_information().isfinite().all())
    assert largest.numbers < VOCABULARY**2 / 3, largest.where
    assert (tmp_path / "p").stat().st_size < VOCABULARY**2 / 3
