"""Fits in processes that are killed; run as a script by ``test_resume.py``.

For every scenario a child process fits with a checkpoint and is killed with SIGKILL by itself, at the point that the
scenario names; further children start again until one comes to its end and saves its posterior.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq

# what a child would load with its first gradient, step, posterior or file: here once for all of them
LOADED = (
    "backpack.extensions h5py numpy.random scipy.optimize sympy torch._decomp.decompositions_for_jvp torch._dynamo "
    "posthoc_uq.curvature posthoc_uq.files.save_load posthoc_uq.fitting.fit posthoc_uq.heads.linearized "
    "posthoc_uq.heads.sampling posthoc_uq.methods.inf posthoc_uq.posteriors.report "
    "posthoc_uq.trained.function_space posthoc_uq.trained.message_passing.fit"
)

SAMPLES, SIZE, BATCH = 90, 9, 8


def model() -> nn.Module:
    """A small convolutional net with fixed weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 3)).eval()


def data() -> TensorDataset:
    """Images and labels, or targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, SIZE, SIZE, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


class Deadly:
    """A shuffling loader that kills its process with the batch of a given number, counted over all sweeps."""

    def __init__(self, after: int | None, regression: bool) -> None:
        self._loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
        self._after = after
        self._regression = regression
        self._count = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._loader:
            if self._after is not None and self._count == self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1
            time.sleep(0.002)
            yield x, (nn.functional.one_hot(y, 3).float() if self._regression else y)


def fit(scenario: dict[str, Any], checkpoint: Path | None, after: int | None) -> uq.Posterior:
    """One attempt."""
    loader = Deadly(after, scenario["options"].get("likelihood") == "regression")
    return uq.fit(
        model(),
        loader,
        progress=False,
        checkpoint=checkpoint,
        checkpoint_every=scenario.get("every", 1),
        prior_precision=1.0,
        **scenario["options"],
    )


def die_while_writing(number: int) -> None:
    """Kill the process in the middle of its checkpoint's write of that number, before the file is in place."""
    replace, count = os.replace, 0

    def deadly(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = deadly


def attempt(scenario: dict[str, Any], kill: Any, checkpoint: Path, target: Path) -> bool:
    """A child process's try; whether it came to its end."""
    child = os.fork()
    if child == 0:
        if isinstance(kill, str):
            die_while_writing(int(kill.removeprefix("write ")))
        posterior = fit(scenario, checkpoint, kill if isinstance(kill, int) else None)
        uq.save(posterior, target)
        os._exit(0)
    if isinstance(kill, float):  # from outside, at any moment
        time.sleep(kill)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"an attempt failed: {scenario}, {kill}")
    return not os.WIFSIGNALED(status)


def main() -> None:
    """Every scenario in turn; a line of JSON for each."""
    torch.set_num_threads(1)
    for name in LOADED.split():
        import_module(name)
    folder = Path(sys.argv[1])
    for scenario in json.loads(sys.argv[2]):
        name = scenario["name"]
        checkpoint, target = folder / f"{name}.checkpoint", folder / f"{name}.h5"
        if scenario.get("random"):
            source = random.Random(scenario["random"])
            kills = [source.uniform(0.02, 0.2) for _ in range(3)]
        else:
            kills = scenario["kills"]
        finished = [attempt(scenario, kill, checkpoint, target) for kill in kills]
        left = sorted(path.name for path in folder.iterdir() if path.name.startswith((f".{name}", name)))
        finished.append(attempt(scenario, None, checkpoint, target))
        after = sorted(path.name for path in folder.iterdir() if path.name.startswith((f".{name}", name)))
        print(json.dumps({"name": name, "finished": finished, "left": left, "after": after}), flush=True)


if __name__ == "__main__":
    main()
