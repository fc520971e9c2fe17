"""Distributions of context points: what they draw, that a seed settles it, and that nothing else is touched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from posthoc_uq.core.batches import Batch, BatchReader
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.methods.contexts import (
    Callback,
    Context,
    Mixture,
    Monochrome,
    Pool,
    TrainingBatch,
    UniformBox,
    default_context,
    resolve_context,
)
from posthoc_uq.methods.trained import show_to_context

READER = BatchReader(torch.device("cpu"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(samples: int = 40, channels: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    """Values that differ between channels: channel c has integers plus 1000 c."""
    found = torch.randint(0, 50, (samples, channels, size, size), generator=generator(seed)).float()
    return found + 1000 * torch.arange(channels).reshape(1, channels, 1, 1)


def shown(context: Context, inputs: Tensor, batch: int = 8, seed: int = 0) -> Context:
    loader = DataLoader(TensorDataset(inputs, torch.zeros(len(inputs))), batch_size=batch)
    assert show_to_context(loader, READER, context, seed, False) == len(inputs)
    return context


def test_monochrome_images_are_constant_and_of_values_in_the_data() -> None:
    x = images()
    context = shown(Monochrome(), x)
    found = context.draw(64, Batch((x[:8],)), generator(1))
    assert found.shape == (64, 3, 5, 5) and found.dtype == x.dtype and found.is_contiguous()
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))
    for channel in range(3):
        assert set(found[:, channel, 0, 0].tolist()) <= set(x[:, channel].flatten().tolist())
    # Channels are drawn independently: their ranks do not go together.
    colours = context.draw(3000, Batch((x[:8],)), generator(2))[:, :, 0, 0]
    correlations = torch.corrcoef(colours.T) - torch.eye(3)
    assert float(correlations.abs().max()) < 0.1


@pytest.mark.parametrize("kept", [7, 50, 100_000])
def test_reservoir_is_a_uniform_choice(kept: int) -> None:
    """Every pixel seen is as likely to be kept: over many seeds, counts of what is kept are uniform."""
    x = torch.arange(60.0).reshape(15, 1, 2, 2)
    counts = np.zeros(60)
    for seed in range(300):
        context = Monochrome(kept)
        shown(context, x, batch=4, seed=seed)
        values = context.values.flatten().long()
        assert len(values) == min(kept, 60) and len(set(values.tolist())) == len(values)
        counts[values.numpy()] += 1
    if kept < 60:
        assert chisquare(counts).pvalue > 1e-3
    else:
        assert (counts == 300).all()


def test_large_images_are_looked_at_in_part() -> None:
    x = torch.randn(4, 2, 64, 64, generator=generator())
    context = shown(Monochrome(), x)
    assert context.values.shape == (2, 4 * 1024)
    assert set(context.values[1].tolist()) <= set(x[:, 1].flatten().tolist())


def test_monochrome_is_for_images() -> None:
    with pytest.raises(PosthocUQError, match=r"is for images.*\(8, 2\).*uniform"):
        shown(Monochrome(), torch.zeros(8, 2))
    with pytest.raises(PosthocUQError, match="has seen none"):
        Monochrome().draw(3, Batch((images(),)), generator())
    with pytest.raises(PosthocUQError, match="kept must be a whole number"):
        Monochrome(0)


def test_uniform_box_of_the_data_is_widened() -> None:
    x = torch.tensor([[0.0, 10.0], [2.0, 14.0], [1.0, 11.0]])
    context = shown(UniformBox(), x, batch=2)
    low, high = context.bounds()
    assert low.tolist() == [-1.0, 8.0] and high.tolist() == [3.0, 16.0]
    found = context.draw(5000, Batch((x,)), generator())
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double().mean(0), torch.tensor([1.0, 12.0], dtype=torch.float64), atol=0.1, rtol=0
    )
    torch.testing.assert_close(found.double().amin(0), low, atol=0.02, rtol=0)
    torch.testing.assert_close(found.double().amax(0), high, atol=0.02, rtol=0)


def test_uniform_box_of_given_bounds_stays() -> None:
    context = UniformBox(-10.0, torch.tensor([10.0, 20.0]))
    assert not context.needs_data and context.fresh() is context
    found = context.draw(2000, Batch((torch.zeros(4, 2, dtype=torch.float64),)), generator())
    assert float(found.min()) < -9.9 and float(found[:, 0].max()) < 10 < float(found[:, 1].max()) < 20
    for wrong in ((1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)):
        with pytest.raises(PosthocUQError, match="finite bounds low < high"):
            UniformBox(*wrong)
    with pytest.raises(PosthocUQError, match="both bounds, or none"):
        UniformBox(low=0.0)
    with pytest.raises(PosthocUQError, match="expand must be"):
        UniformBox(expand=0.0)
    with pytest.raises(PosthocUQError, match="saw none"):
        UniformBox().draw(1, Batch((torch.zeros(4, 2),)), generator())


def test_batch_gives_each_input_once_before_any_twice() -> None:
    x = torch.arange(6.0).reshape(6, 1)
    context = TrainingBatch()
    assert len(set(context.draw(5, Batch((x,)), generator()).flatten().tolist())) == 5
    found = context.draw(15, Batch((x,)), generator()).flatten().tolist()
    assert sorted(found.count(value) for value in range(6)) == [2, 2, 2, 3, 3, 3]


def test_pool_keeps_a_uniform_choice_and_reads_once() -> None:
    x = torch.arange(50.0).reshape(50, 1)

    class Loader:
        reads = 0

        def __iter__(self) -> Any:
            type(self).reads += 1
            yield from ((part, torch.zeros(len(part))) for part in x.split(7))

    loader = Loader()
    context, like = Pool(loader), Batch((torch.zeros(3, 1, dtype=torch.float64),))
    found = context.draw(400, like, generator())
    context.draw(10, like, generator(1))
    assert loader.reads == 1 and found.dtype == torch.float64
    assert set(found.flatten().tolist()) == set(x.flatten().tolist())
    counts = np.zeros(50)
    for seed in range(300):
        kept = Pool(x.split(7), kept=5, seed=seed)._read()
        assert kept.shape == (5, 1) and len(set(kept.flatten().tolist())) == 5
        counts[kept.flatten().long().numpy()] += 1
    assert chisquare(counts).pvalue > 1e-3
    with pytest.raises(PosthocUQError, match="kept must be a whole number"):
        Pool(loader, kept=0)
    with pytest.raises(PosthocUQError, match=r"wrap the data in torch\.utils\.data\.DataLoader"):
        resolve_context(TensorDataset(x))


def test_mixture_has_fixed_shares() -> None:
    x = torch.zeros(8, 1)
    parts = [(0.5, lambda n, g: torch.ones(n, 1)), (0.25, "batch"), (0.25, lambda n, g: -torch.ones(n, 1))]
    context = Mixture(parts)
    found = context.draw(16, Batch((x,)), generator()).flatten().tolist()
    assert (found.count(1.0), found.count(0.0), found.count(-1.0)) == (8, 4, 4)
    assert [sum(context.counts(n)) for n in range(1, 40)] == list(range(1, 40))
    assert all(abs(c - s * 33) < 1 for c, s in zip(context.counts(33), (0.5, 0.25, 0.25), strict=True))
    for wrong in ([], [(0.0, "batch")], [(float("inf"), "batch")]):
        with pytest.raises(PosthocUQError, match="pairs"):
            Mixture(wrong)
    with pytest.raises(PosthocUQError, match="equal input shapes"):
        Mixture([(1, "batch"), (1, lambda n, g: torch.zeros(n, 2))]).draw(4, Batch((x,)), generator())


def test_what_a_user_may_give() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    kinds = {
        "monochrome": Monochrome,
        "uniform": UniformBox,
        "batch": TrainingBatch,
    }
    for name, kind in kinds.items():
        assert type(resolve_context(name)) is kind
    assert isinstance(resolve_context(loader), Pool)
    assert isinstance(resolve_context([torch.zeros(3, 2)]), Pool)
    assert isinstance(resolve_context(lambda n, g: torch.zeros(n, 2)), Callback)
    mixture = resolve_context([(0.5, "monochrome"), (0.5, loader)])
    assert isinstance(mixture, Mixture) and mixture.needs_data
    with pytest.raises(PosthocUQError, match=r"context must be one of.*'grey'"):
        resolve_context("grey")
    with pytest.raises(PosthocUQError):
        resolve_context(3)
    assert isinstance(default_context(Batch((torch.zeros(2, 1, 4, 4),))), Mixture)
    assert isinstance(default_context(Batch((torch.zeros(2, 3),))), UniformBox)
    with pytest.raises(PosthocUQError, match="one floating-point input"):
        default_context(Batch((torch.zeros(2, 3, dtype=torch.long),)))


@pytest.mark.parametrize("name", ["monochrome", "uniform", "batch", "pool", "mixture"])
def test_seed_settles_a_draw_and_global_state_stays(name: str) -> None:
    x = images(24, 1, 4)
    batch = Batch((x[:8],))

    def make() -> Context:
        given: Any = {
            "pool": DataLoader(TensorDataset(x), batch_size=4, shuffle=True),
            "mixture": [(0.5, "batch"), (0.5, "monochrome")],
        }.get(name, name)
        context = resolve_context(given)
        return shown(context, x) if context.needs_data else context

    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, second = make(), make()
    assert torch.equal(first.draw(9, batch, generator(5)), second.draw(9, batch, generator(5)))
    assert not torch.equal(first.draw(9, batch, generator(5)), first.draw(9, batch, generator(6)))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


def test_a_context_serves_several_fits() -> None:
    """What one fit showed it does not reach the next."""
    given = Mixture([(1.0, Monochrome(30)), (1.0, UniformBox())])
    first = resolve_context(given)
    shown(first, images(10, 1, 4))
    second = resolve_context(given)
    assert second is not first
    with pytest.raises(PosthocUQError, match="has seen none"):
        second.draw(4, Batch((images(2, 1, 4),)), generator())


def test_classes_are_known_by_the_name_that_users_import_them_by() -> None:
    # checkpoints hold it
    kinds = (Callback, Context, Mixture, Monochrome, Pool, TrainingBatch, UniformBox)
    assert {kind.__module__ for kind in kinds} == {"posthoc_uq.methods.contexts"}
