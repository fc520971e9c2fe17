"""Bases of INF from a share of the samples, and from an earlier posterior."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.randomness import sample_keys, share_of
from posthoc_uq.curvature.sweep import Picked
from posthoc_uq.methods import inf

OPTIONS: dict[str, Any] = {"prior_precision": 1.0, "rank": 12, "dtype": torch.float64, "progress": False}


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return torch.randn(90, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()


class Counting:
    """A loader that counts how often it is read."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.reads = batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_picked_samples_come_in_batches_no_larger_than_the_loaders(inputs: Tensor) -> None:
    mask = torch.ones(4)

    def handed_out(size: int, share: float) -> list[tuple[Batch, Tensor, str]]:
        picked, parts = Picked(share), []
        for index, part in enumerate(inputs.split(size)):
            batch = Batch((part,), part[:, 0], {"mask": mask}, part[:, 1].abs())
            parts += picked.add(batch, sample_keys([part], len(part), 0), index)
        waiting = picked.waiting
        rest = list(picked.rest())
        assert waiting == bool(rest) and not picked.waiting
        return parts + rest

    wanted = inputs[share_of(sample_keys([inputs], 90, 0), 0.3)]
    for size in (1, 7, 30, 90):
        parts = handed_out(size, 0.3)
        assert torch.equal(torch.cat([batch.args[0] for batch, _, _ in parts]), wanted)
        assert max(len(keys) for _, keys, _ in parts) <= size
        for batch, keys, _ in parts:
            assert torch.equal(keys, sample_keys([batch.args[0]], len(keys), 0))
            assert batch.targets is not None and batch.weights is not None
            assert torch.equal(batch.targets, batch.args[0][:, 0])
            assert torch.equal(batch.weights, batch.args[0][:, 1].abs())
            assert torch.equal(batch.kwargs["mask"], mask)
    assert len(handed_out(7, 0.3)) < 10 and "to" in handed_out(7, 0.3)[0][2]
    assert [place for _, _, place in handed_out(30, 1.0)] == ["0", "1", "2"]


def test_batches_that_differ_beside_their_samples_are_not_joined() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(4) * 2**40

    def parts(*batches: Batch) -> int:
        picked = Picked(0.9)
        found = [part for n, batch in enumerate(batches) for part in picked.add(batch, keys[:2], n)]
        return len(found + list(picked.rest()))

    assert bool(share_of(keys[:2], 0.9).all())
    first = Batch((x[:2],), kwargs={"mask": torch.ones(4), "scale": 2})
    assert parts(first) == 1
    for other in (
        Batch((x[:2, :3],), kwargs=first.kwargs),
        Batch((x[:2],), kwargs={"mask": torch.zeros(4), "scale": 2}),
        Batch((x[:2],), kwargs={"mask": torch.ones(4), "scale": 3}),
        Batch((x[:2].double(),), kwargs=first.kwargs),
    ):
        assert parts(first, other) == 2


def test_the_size_of_batches_does_not_change_bases_from_a_share(
    inputs: Tensor, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inf, "BASIS_SAMPLES", 36)
    small, large = (
        uq.fit(model, list(inputs.split(size)), basis_fraction=fraction, **OPTIONS)
        for size, fraction in ((7, 0.4), (45, "auto"))
    )
    assert small.history.fit["basis fraction"] == large.history.fit["basis fraction"] == 0.4
    for name, block in small.blocks.items():
        torch.testing.assert_close(block.dense(), large.blocks[name].dense(), rtol=1e-9, atol=1e-12)


def test_auto_takes_all_samples_of_small_data_and_of_loaders_that_do_not_say_how_many(
    inputs: Tensor, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = list(inputs.split(30))
    whole = uq.fit(model, batches, basis_fraction=1.0, **OPTIONS)
    few = uq.fit(model, batches, **OPTIONS)
    monkeypatch.setattr(inf, "BASIS_SAMPLES", 10)

    class Unsized:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(batches)

    unsized = uq.fit(model, Unsized(), **OPTIONS, fisher="exact")
    for found in (few, unsized):
        assert "basis fraction" not in found.history.fit
        for name, block in found.blocks.items():
            assert torch.equal(block.dense(), whole.blocks[name].dense())


def test_an_error_in_joined_batches_names_them(inputs: Tensor, model: nn.Module) -> None:
    spoilt = inputs.clone()
    spoilt[share_of(sample_keys([inputs], 90, 0), 0.4)] *= float("inf")
    with pytest.raises(PosthocUQError, match=r"Batch \d+ to \d+: the model's outputs are not finite"):
        uq.fit(model, list(_nan_after(spoilt, inputs)), basis_fraction=0.4, seed=0, **OPTIONS)


def _nan_after(spoilt: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """The first batch as it was, since the dry run looks at it."""
    yield inputs[:7]
    yield from spoilt[7:].split(7)


def test_bases_of_an_earlier_posterior_make_a_fit_of_one_sweep(inputs: Tensor, model: nn.Module) -> None:
    batches = list(inputs.split(30))
    first = uq.fit(model, batches, **OPTIONS)
    loader = Counting(batches)
    again = uq.fit(model, loader, bases=first, **OPTIONS)
    two = Counting(batches)
    uq.fit(model, two, **OPTIONS)
    assert two.reads == loader.reads + 1
    for name, block in again.blocks.items():  # the same data in the same directions
        torch.testing.assert_close(block.dense(), first.blocks[name].dense(), rtol=1e-9, atol=1e-12)
    by_efb = uq.fit(model, batches, method="efb", **{k: v for k, v in OPTIONS.items() if k != "rank"})
    full = uq.fit(model, batches, bases=by_efb, **OPTIONS | {"rank": 48})
    for name, block in full.blocks.items():  # the diagonal is that of the data, in any bases
        diagonals = (b.dense().diagonal(dim1=-2, dim2=-1) for b in (block, first.blocks[name]))
        torch.testing.assert_close(*diagonals, rtol=1e-9, atol=1e-12)


def test_bases_that_do_not_fit_are_refused(inputs: Tensor, model: nn.Module) -> None:
    batches = list(inputs.split(30))
    wider = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model, {"method": "diag"}, "no eigenbases"),
        (model, {"layers": "last", "rank": 12}, "no layer '0'"),
        (wider, {"rank": 12}, "Layer '0'"),
    ]
    for network, options, word in refused:
        other = uq.fit(model, batches, prior_precision=1.0, progress=False, **options)
        with pytest.raises(PosthocUQError, match=word):
            uq.fit(network, batches, bases=other, **OPTIONS)
