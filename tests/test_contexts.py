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
from torchvision.transforms.v2 import functional as transforms

from posthoc_uq import PosthocUQError
from posthoc_uq.core import Batch
from posthoc_uq.trained import contexts
from posthoc_uq.trained.contexts import (
    Callback,
    Context,
    Corrupted,
    Mixture,
    Monochrome,
    Pool,
    TrainingBatch,
    UniformBox,
    default_context,
    resolve_context,
)

IMAGES = 0.5 * torch.rand(16, 2, 9, 8, generator=torch.Generator().manual_seed(1)).round(decimals=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(samples: int = 40, channels: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    """Values that differ between channels: channel c has integers plus 1000 c."""
    found = torch.randint(0, 50, (samples, channels, size, size), generator=generator(seed)).float()
    return found + 1000 * torch.arange(channels).reshape(1, channels, 1, 1)


def shown(context: Context, inputs: Tensor, batch: int = 8, seed: int = 0) -> Context:
    draws = generator(seed)
    for part in inputs.split(batch):
        context.observe(part, draws)
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
def test_what_is_kept_is_a_uniform_choice(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row seen is as likely to be kept: over many seeds, counts of what is kept are uniform."""
    monkeypatch.setattr(contexts, "_MAX_KEPT", kept)
    counts = np.zeros(60)
    for seed in range(300):
        reservoir, draws = contexts._Reservoir(), generator(seed)
        for part in torch.arange(120.0).reshape(60, 2).split(13):
            reservoir.add(part, draws)
        values = (reservoir.rows[:, 0] / 2).long()
        assert len(values) == min(kept, 60) and len(set(values.tolist())) == len(values)
        assert torch.equal(reservoir.rows[:, 1], 2.0 * values + 1)
        counts[values.numpy()] += 1
    if kept < 60:
        assert chisquare(counts).pvalue > 1e-3
    else:
        assert (counts == 300).all()


def test_large_images_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_MAX_PIXELS", 3)
    x = torch.randn(1, 2, 8, 8, generator=generator())
    found = shown(Monochrome(), x).draw(200, Batch((x,)), generator())
    for channel in range(2):
        colours = set(found[:, channel].flatten().tolist())
        assert len(colours) == 3 and colours <= set(x[:, channel].flatten().tolist())


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
    assert not context.needs_data
    found = context.draw(2000, Batch((torch.zeros(4, 2, dtype=torch.float64),)), generator())
    assert float(found.min()) < -9.9 and float(found[:, 0].max()) < 10 < float(found[:, 1].max()) < 20


def test_batch_gives_each_input_once_before_any_twice() -> None:
    x = torch.arange(6.0).reshape(6, 1)
    context = TrainingBatch()
    assert len(set(context.draw(5, Batch((x,)), generator()).flatten().tolist())) == 5
    found = context.draw(15, Batch((x,)), generator()).flatten().tolist()
    assert sorted(found.count(value) for value in range(6)) == [2, 2, 2, 3, 3, 3]


def test_a_pool_is_read_once() -> None:
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


def test_mixture_has_fixed_shares() -> None:
    x = torch.zeros(8, 1)
    parts = [(0.5, lambda n, g: torch.ones(n, 1)), (0.25, "batch"), (0.25, lambda n, g: -torch.ones(n, 1))]
    context = Mixture(parts)
    found = context.draw(16, Batch((x,)), generator()).flatten().tolist()
    assert (found.count(1.0), found.count(0.0), found.count(-1.0)) == (8, 4, 4)
    assert [sum(context.counts(n)) for n in range(1, 40)] == list(range(1, 40))
    assert all(abs(c - s * 33) < 1 for c, s in zip(context.counts(33), (0.5, 0.25, 0.25), strict=True))
    counted = Mixture([(2, "batch"), (5, torch.ones(3, 1))])  # whole numbers are counts
    assert counted.points == 7 and counted.fresh().points == 7 and counted.counts(7) == [2, 5]
    assert counted.counts(14) == [4, 10]  # proportions, where another number is asked for
    assert Mixture([(1, "batch"), (0.5, "uniform")]).points is None


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
    assert isinstance(default_context(Batch((torch.zeros(2, 1, 4, 4),))), Mixture)
    assert isinstance(default_context(Batch((torch.zeros(2, 3),))), UniformBox)


@pytest.mark.parametrize("name", ["monochrome", "uniform", "batch", "corrupted", "pool", "mixture"])
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
    given = Mixture([(1.0, Monochrome()), (1.0, UniformBox())])
    first = resolve_context(given)
    shown(first, images(10, 1, 4))
    second = resolve_context(given)
    assert second is not first
    with pytest.raises(PosthocUQError, match="has seen none"):
        second.draw(4, Batch((images(2, 1, 4),)), generator())


# Corrupted images


def changed(**given: Any) -> Context:
    """A `Corrupted` with other settings."""
    return type("Changed", (Corrupted,), given)()


def corrupted(images: Tensor = IMAGES, n: int = 16, seed: int = 0, **given: Any) -> Tensor:
    context = changed(**given)
    context.observe(images, generator())
    return context.draw(n, Batch((images,)), generator(seed))


def test_corrupted_images_are_in_range() -> None:
    found = corrupted(n=40)
    assert found.shape == (40, 2, 9, 8) and found.dtype == IMAGES.dtype
    for channel in range(2):
        assert float(found[:, channel].min()) >= float(IMAGES[:, channel].min())
        assert float(found[:, channel].max()) <= float(IMAGES[:, channel].max())


def test_the_range_is_that_of_all_batches_and_of_each_channel() -> None:
    """Another scale and offset of each channel are those of what is drawn, too."""
    scale, offset = torch.tensor([2.0, 5.0])[:, None, None], torch.tensor([-1.0, 3.0])[:, None, None]
    split, whole = changed(contrast=0.0), changed(contrast=0.0)
    for part in IMAGES.split(3):
        split.observe(part, generator())
    whole.observe(scale * IMAGES + offset, generator())
    first = split.draw(16, Batch((IMAGES,)), generator(3))
    second = whole.draw(16, Batch((scale * IMAGES + offset,)), generator(3))
    torch.testing.assert_close(scale * first + offset, second, rtol=1e-5, atol=1e-5)


def test_without_any_change_the_images_are_the_batchs_or_mirrored() -> None:
    found = corrupted(padding=0, solarised=0.0, brightness=0.0, contrast=0.0, n=16)
    both = torch.cat([IMAGES, IMAGES.flip(3)])
    same = (found.unsqueeze(1) - both).abs().flatten(2).amax(2) < 1e-6
    assert same.any(1).all() and 2 <= int(same[:, :16].any(1).sum()) <= 14
    assert same[:, :16].logical_or(same[:, 16:]).any(0).all()  # each of the batch once


def test_crops_are_shifts_with_darkness_around() -> None:
    image = torch.rand(1, 1, 6, 6, generator=generator()) + 1
    found = corrupted(image, n=60, padding=2, solarised=0.0, brightness=0.0, contrast=0.0)
    padded = torch.nn.functional.pad(image, [2] * 4, value=float(image.min()))
    shifts = [padded[0, :, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
    shifts = torch.stack([*shifts, *(shift.flip(2) for shift in shifts)])
    same = (found.unsqueeze(1) - shifts).abs().flatten(2).amax(2) < 1e-6
    assert same.any(1).all() and int(same.any(0).sum()) > 20


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_solarised_images_are_torchvisions_and_as_many_as_asked_for(share: float) -> None:
    image = torch.rand(1, 3, 8, 8, generator=generator())
    image[0, :, 0, 0], image[0, :, 0, 7] = 0, 1
    found = corrupted(image, n=400, padding=0, solarised=share, brightness=0.0, contrast=0.0)
    inverted = transforms.solarize(image, 0.5)
    both = torch.cat([inverted, inverted.flip(3)])
    same = ((found.unsqueeze(1) - both).abs().flatten(2).amax(2) < 1e-6).any(1).double().mean()
    assert float(same) == pytest.approx(share, abs=0.1 if share == 0.5 else 0.0)


def test_tones_are_torchvisions_at_some_factor() -> None:
    image = torch.rand(1, 1, 8, 8, generator=generator()) * 0.9 + 0.05
    image[0, 0, 0, 0], image[0, 0, 0, 1] = 0, 1  # the range is [0, 1]
    plain = {"padding": 0, "solarised": 0.0}
    for option, adjust in (
        ("brightness", transforms.adjust_brightness),
        ("contrast", transforms.adjust_contrast),
    ):
        rest = {"brightness": 0.0, "contrast": 0.0} | {option: 0.5}
        found = corrupted(image, n=30, **plain, **rest)
        factors = torch.linspace(0.5, 1.5, 1001)
        table = torch.cat([adjust(image, float(f)) for f in factors])
        table = torch.stack([table, table.flip(3)]).flatten(0, 1)
        nearest, index = (found.unsqueeze(1) - table).abs().flatten(2).amax(2).min(1)
        assert float(nearest.max()) < 2e-3
        assert float(factors[index % 1001].std()) > 0.15


def test_a_channel_of_one_value_stays() -> None:
    images = torch.cat([torch.rand(4, 1, 5, 5, generator=generator()), torch.full((4, 1, 5, 5), 3.0)], 1)
    found = corrupted(images, n=8)
    assert torch.equal(found[:, 1], torch.full((8, 5, 5), 3.0)) and bool(torch.isfinite(found).all())
