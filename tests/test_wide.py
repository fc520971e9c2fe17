"""KFAC of a last layer with more classes than a Gram of them is formed for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import posthoc_uq as uq

CLASSES = 1100
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


def test_more_samples_keep_the_trace() -> None:
    _, wide, whole = fitted(900)
    (block,), (other,) = (tuple(own.blocks.values()) for own in (wide, whole))
    rest, kept = block.tensors()["output_rest"], block.tensors()["output_eigenvalues"]
    trace = kept.sum() + rest[0] * (CLASSES - kept.shape[1])
    assert float(rest) > 0
    assert float(trace) == pytest.approx(float(other.tensors()["output_eigenvalues"].sum()), rel=1e-5)
