"""Random numbers that belong to a sample, and the guard of the global generators."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from posthoc_uq.core import isolated_random_state, mix, mixed_seed, mixed_seeds, sample_keys, uniforms
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian


def _inputs(samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))


def _all_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _seed_all() -> tuple[float, float, float]:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    return _all_numbers()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_global_generators_are_given_back(error: type[BaseException] | None) -> None:
    expected, found = _seed_all(), list[tuple[float, ...]]()
    for seed in (None, 3, 3, 2**40):
        _seed_all(), random.seed(0), np.random.seed(0), torch.manual_seed(0)
        with suppress(*([error] if error else [])), isolated_random_state(seed):
            found.append(_all_numbers())
            if error is not None:
                raise error
        assert _all_numbers() == expected
    assert found[0] == expected and found[1] == found[2]
    assert all(a != b for a, b in zip(found[1], found[3], strict=True))


def _reference_mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_mix_is_splitmix64() -> None:
    words = [0, 1, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF]
    expected = [_reference_mix(w % 2**64) for w in words]
    assert [int(v) % 2**64 for v in mix(torch.tensor(words))] == expected
    assert (
        int(mix(torch.tensor(-7046029254386353131))) % 2**64 == 0xE220A8397B1DCDAF
    )  # published: seed 0, first output


def test_mixed_seeds() -> None:
    seeds = {
        mixed_seed(*words)
        for words in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,), (2**64 - 2,)]
    }
    assert len(seeds) == 9 and all(0 <= seed < 2**63 for seed in seeds)
    assert mixed_seed(3, 4) == mixed_seed(3, 4)
    many = {mixed_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(many) == 10_000
    assert mixed_seeds([7, 2**63, -1], 4) == [mixed_seed(first, 4) for first in (7, 2**63, -1)]


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_belongs_to_its_sample(dtype: torch.dtype) -> None:
    x = (20 + 5 * _inputs(33, 3, 4)).to(dtype)
    whole = sample_keys([x], 33, 7)
    assert len(set(whole.tolist())) == 33
    for size in (1, 7, 32):
        parts = torch.cat([sample_keys([part], len(part), 7) for part in x.split(size)])
        assert torch.equal(parts, whole)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_keys([x[order]], 33, 7), whole[order])
    strided = torch.stack([x, x], dim=1)[:, 1]  # not contiguous
    assert torch.equal(sample_keys([strided], 33, 7), whole)
    column = torch.as_strided(x[:, 0, 0].contiguous(), (33, 1), (1, 0))  # as numpy's array[:, None]
    assert torch.equal(sample_keys([column], 33, 7), sample_keys([x[:, 0, :1]], 33, 7))
    assert not bool((sample_keys([x], 33, 8) == whole).any())


def test_a_key_sees_every_tensor_and_every_place() -> None:
    x, other = _inputs(5, 3), torch.zeros(5, 2)
    assert not bool((sample_keys([x, other], 5, 0) == sample_keys([x, other + 1], 5, 0)).any())
    assert not bool((sample_keys([x.flip(1)], 5, 0) == sample_keys([x], 5, 0)).any())
    shared = torch.ones(3, 3)  # counts no samples: the same for all of them
    assert torch.equal(sample_keys([shared, x], 5, 0), sample_keys([x], 5, 0))
    assert len(set(sample_keys([shared], 5, 0).tolist())) == 5


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64, torch.int64]
)
def test_black_and_white_images_have_different_keys(dtype: torch.dtype) -> None:
    """Words whose low bits are all zero must not lose themselves in a product modulo 2^64."""
    x = (_inputs(20_000, 36) > 0).unique(dim=0).to(dtype)
    assert len(sample_keys([x], len(x), 0).unique()) == len(x)


def test_uniforms_are_uniform_and_independent() -> None:
    keys = sample_keys([torch.arange(50_000.0)[:, None]], 50_000, 3)
    u = uniforms(keys, 3)
    assert u.dtype == torch.float64 and u.shape == (50_000, 3) and float(u.min()) > 0 and float(u.max()) < 1
    for stream in u.T:
        assert stats.kstest(stream.numpy(), "uniform").pvalue > 0.01
    # Correlations of 50,000 pairs have a standard error of 0.0045, between streams and between neighbouring samples.
    assert float((torch.corrcoef(u.T) - torch.eye(3)).abs().max()) < 0.018
    assert abs(float(torch.corrcoef(torch.stack([u[1:, 0], u[:-1, 0]]))[0, 1])) < 0.018
    assert torch.equal(uniforms(keys, 5)[:, :3], u)
    assert torch.equal(uniforms(keys[10:12], 3), u[10:12])


def test_drawn_labels_follow_the_predictive() -> None:
    samples = 30_000
    keys = sample_keys([torch.arange(float(samples))[:, None]], samples, 1)
    probs = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    for draw in (0, 4):
        labels = Categorical().draw(probs.log().expand(samples, 3) + 5, keys, draw)
        assert stats.chisquare(torch.bincount(labels).numpy(), (probs * samples).numpy()).pvalue > 0.01
        binary = Bernoulli().draw(torch.full((samples, 1), -1.0), keys, draw).double()
        p = 1 / (1 + np.exp(1.0))
        assert abs(float(binary.mean()) - p) < 4 * (p * (1 - p) / samples) ** 0.5
        means = torch.tensor([1.0, -2.0], dtype=torch.float64).expand(samples, 2)
        values = Gaussian(torch.tensor([4.0, 0.25])).draw(means, keys, draw).double()
        for k, noise in enumerate([4.0, 0.25]):
            assert stats.kstest((values[:, k] - means[:, k]).numpy() / noise**0.5, "norm").pvalue > 0.01
        assert abs(float(torch.corrcoef(values.T)[0, 1])) < 0.025
    certain = Categorical().draw(torch.tensor([[0.0, 1000.0, 0.0]]).expand(100, 3), keys[:100], 0)
    assert set(certain.tolist()) == {1}
