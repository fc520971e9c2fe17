"""One of two processes fails, is killed or comes too late: the other ends, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_worker
import pytest
import torch.distributed as dist

import posthoc_uq as uq
from posthoc_uq.app import process_group

Said = dict[str, list[dict[str, Any] | None]]


@pytest.fixture(scope="module")
def said() -> Said:
    done = subprocess.run(
        [sys.executable, str(Path(faulty_worker.__file__))],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("stage", faulty_worker.STAGES)
def test_one_of_two_processes_raises_and_lives_on(stage: str, said: Said) -> None:
    faulty, other = said[f"{stage}: raises"]
    rank = faulty_worker.STAGES[stage][1]
    assert faulty is not None and faulty["error"] == "OSError"
    assert other is not None, "it hangs"
    assert other["known"] and other["text"].startswith(f"Rank {rank} failed in ")
    assert other["text"].endswith("OSError: the disk is gone")


@pytest.mark.slow
@pytest.mark.parametrize("stage", faulty_worker.KILLED)
def test_one_of_two_processes_is_killed(stage: str, said: Said) -> None:
    faulty, other = said[f"{stage}: killed"]
    rank = faulty_worker.STAGES[stage][1]
    assert faulty is None and other is not None, "it hangs"
    assert other["known"] and "timed out" not in other["text"].lower(), other
    assert f"rank {rank}" in other["text"] or "rank 0 or torchrun" in other["text"], other


@pytest.mark.slow
@pytest.mark.parametrize("stage", faulty_worker.LATE)
def test_one_of_two_processes_is_late(stage: str, said: Said) -> None:
    faulty, other = said[f"{stage}: late"]
    rank = faulty_worker.STAGES[stage][1]
    assert other is not None and faulty is not None, "one hangs"
    assert other["known"] and "imed out" in other["text"] and f"missing: rank {rank} (" in other["text"]
    assert faulty["known"] and "broke off" in faulty["text"], faulty


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (given | {"MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(
                uq.PosthocUQError, match=r"could not meet at 127\.0\.0\.1:\d+ .*another address or port"
            ),
            process_group("cpu"),
        ):
            pass
    assert not dist.is_initialized()
