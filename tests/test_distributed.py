"""A fit shared by several processes equals that of one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import BATCH, CASES, SAMPLES, UNEVEN, changed, data, fit, model, more
from torch.utils.data import DataLoader, DistributedSampler

import posthoc_uq as uq
from posthoc_uq.core import own_samples

pytestmark = pytest.mark.slow  # its fixture starts processes


WORLDS = (3,)  # whose parts differ in size


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for every number of processes, with what they left and showed."""
    whole = tmp_path_factory.mktemp("worlds")
    folders = [whole / str(world) for world in WORLDS]
    for folder in folders:
        folder.mkdir()
    script = Path(__file__).with_name("distributed_worker.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, folders)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    shown = "".join(path.read_text() for path in sorted(whole.glob("*/shown*.txt")))
    assert done.returncode == 0, (done.stderr + shown)[-3000:]
    return whole


@pytest.fixture(params=WORLDS)
def run(request: pytest.FixtureRequest, left: Path) -> tuple[int, Path, str]:
    """How many processes, what they left, and what they showed."""
    folder = left / str(request.param)
    return request.param, folder, "".join(path.read_text() for path in sorted(folder.glob("shown*.txt")))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def _assert_same(path: Path, expected: uq.Posterior) -> None:
    found = uq.load(path, model())
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)
    assert expected.evidence.samples == found.evidence.samples == SAMPLES
    assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-3)
    for name, block in expected.blocks.items():
        assert _relative(found.blocks[name].dense().double(), block.dense().double()) < 1e-5
    assert found.features is not None and expected.features is not None
    assert found.features.samples == expected.features.samples == round(expected.scale)
    rows = torch.randn(5, 55, generator=torch.Generator().manual_seed(0))
    novelty = expected.features.novelty(rows)
    torch.testing.assert_close(found.features.novelty(rows), novelty, rtol=1e-4, atol=1e-8)
    likelihood = expected.evidence.log_likelihood
    assert found.evidence.log_likelihood == pytest.approx(likelihood, rel=1e-6)
    if expected.noise_variance is not None:
        torch.testing.assert_close(found.noise_variance, expected.noise_variance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_posterior_is_that_of_one_process(case: str, run: tuple[int, Path, str]) -> None:
    _, folder, _ = run
    dataset = data(CASES[case].get("likelihood") == "regression")
    loader = DataLoader(dataset, batch_size=BATCH)
    _assert_same(folder / f"{case}.h5", fit(loader, case))
    if case in UNEVEN:
        _assert_same(folder / f"{case}, uneven.h5", fit(loader, case, prior_precision=1.0))


def test_shuffled_parts_and_an_interruption_change_nothing(run: tuple[int, Path, str]) -> None:
    _, folder, _ = run
    loader = DataLoader(data(False), batch_size=BATCH)
    _assert_same(folder / "shuffled.h5", fit(loader, "inf", prior_precision=1.0))
    _assert_same(folder / "resumed.h5", fit(loader, "inf"))


@pytest.mark.parametrize("case", ["diag", "inf"])
def test_data_come_in_and_go_out_of_several_processes(case: str, run: tuple[int, Path, str]) -> None:
    world, folder, _ = run
    went = [batch for rank in range(world) for batch in more(4 * rank, 4 * rank + 2 + rank)]
    expected = changed(DataLoader(data(False), batch_size=BATCH), case, more(0, SAMPLES), went)
    found = uq.load(folder / f"{case}, changed.h5", model())
    assert found.scale == expected.scale == 2 * SAMPLES - sum(2 + rank for rank in range(world))
    for name, block in expected.blocks.items():
        assert _relative(found.blocks[name].dense().double(), block.dense().double()) < 1e-5
    for rank in range(world):
        said = json.loads((folder / f"rank{rank}.json").read_text())[f"{case}, changed"]
        for key, value in expected.history.changes.plain().items():
            assert said[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_every_process_knows_the_same(run: tuple[int, Path, str]) -> None:
    world, folder, shown = run
    said: list[dict[str, Any]] = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world)]
    for case in CASES:
        assert all(own[case] == said[0][case] for own in said)
    for rank, own in enumerate(said):
        assert own["samples"] == [SAMPLES, SAMPLES, None]
        assert "Several processes were given the same data" in own["same data"]
        for message, doing in zip(own["wide"], ("the dry run", "the sweep for bases"), strict=True):
            assert message.startswith("PosthocUQError: " + ("" if rank == 1 else f"Rank 1 failed in {doing}"))
            assert "float64" in message and "float32" in message and "Connection" not in message
        assert own["narrow"].startswith(
            "PosthocUQError: " + ("" if rank == 1 else "Rank 1 failed in checking")
        )
        assert "dtype must be" in own["narrow"]
        assert own["kept"] == [10]  # what fits into the least room
        assert "all processes must hold the same model" in own["other layers"]
        assert "has another seed than rank 0" in own["other seed"]
        assert "the whole val_loader" in own["divided validation"]
        for message in own["bad options"]:  # of rank 0 alone
            assert message.startswith(
                "PosthocUQError: " + ("" if rank == 0 else "Rank 0 failed in checking the")
            )
            assert "Connection" not in message
        for name, message in zip(
            ("prior of the weights", "head", "checkpoint"), own["other options"], strict=True
        ):
            assert f"has another {name} than rank 0" in message
        for name in ("broken", "interrupted"):
            expected = "RuntimeError: the disk is gone" if rank == 1 else "Rank 1 failed in the sweep for"
            assert expected in own[name]
    bars = ["%|" in (folder / f"shown{rank}.txt").read_text() for rank in range(world)]
    assert bars == [True, *[False] * (world - 1)]  # on rank 0 alone
    begun = re.findall(r"Kronecker factors, 3 layers: +(0%|0 samples)", shown)
    assert len(begun) == 4  # of the fits that take this sweep, one on parts without a length


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 10, 11])
def test_padding_belongs_to_nobody(replicas: int, size: int) -> None:
    dataset = list(range(size))
    for drop_last in (False, True):
        seen: list[int] = []
        for rank in range(replicas):
            sampler = DistributedSampler(dataset, replicas, rank, shuffle=True, seed=3, drop_last=drop_last)
            loader = DataLoader(dataset, batch_size=2, sampler=sampler)
            own = own_samples(loader)
            indices = list(sampler)
            assert (own is None) == (drop_last or size % replicas == 0)
            seen += indices[:own]
        assert len(seen) == len(set(seen)) == (size // replicas * replicas if drop_last else size)
    assert own_samples(DataLoader(dataset)) is None and own_samples([dataset]) is None
