"""Cost of drawing models from a fitted posterior, against forward passes of the network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _cases import prepare, seconds, write_data
from _fits import fitted

RANK = 100
DRAWS = 30
BATCHES = 2


def measure_draws(
    name: str, repeats: int, batches: int | None = None, budget: int = 2**28, draws: int = DRAWS
) -> dict[str, Any]:
    """One line: making the posterior ready and drawing from it, in multiples of as many forward passes.

    INF is fitted once, on few images. A new prior precision makes every layer's small system be set up and
    factorised anew, so each repeat begins with a changed one. Half of the forward passes are made before the
    draws, half after. "again" is a second call, for which the factors that memory allows are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(name, data, batches or BATCHES)
        model, loaded = prepare(name, data)
    print(
        f"{name}: fitting INF at rank {RANK} on {sum(len(labels) for _, labels in loaded)} images", flush=True
    )
    posterior = fitted(model, loaded, {"method": "inf", "rank": RANK, "memory_budget": budget})
    images = loaded[0][0]
    generator = torch.Generator().manual_seed(0)

    def forwards(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                model(images)

    def draw() -> None:
        posterior.sample(draws, generator)

    forwards(1)
    found: list[dict[str, float]] = []
    for repeat in range(repeats):
        posterior.prior_precision = 1.0 + 1e-6 * (repeat + 1)
        before, _ = seconds(lambda: forwards(draws - draws // 2))
        first, _ = seconds(draw)
        again, _ = seconds(draw)
        after, _ = seconds(lambda: forwards(draws // 2))
        found.append({"forward passes": before + after, "factorise & draw": first, "draw again": again})
        said = ", ".join(f"{part} {time:.2f} s" for part, time in found[-1].items())
        print(f"{name}: repeat {repeat + 1} of {repeats}: {said}", flush=True)
    systems = [block.tensors()["eigenvalues"].shape for block in posterior.blocks.values()]
    sizes = [shape[-1] * shape[-2] for shape in systems]
    return {
        "case": name,
        "rank": RANK,
        "draws": draws,
        "forward batch": len(images),
        "largest system": max(sizes),
        "mean system": sum(sizes) / len(sizes),
        "forward passes, s": median(f["forward passes"] for f in found),
        "factorise & draw, s": median(f["factorise & draw"] for f in found),
        "factorise & draw": median(f["factorise & draw"] / f["forward passes"] for f in found),
        "draw again": median(f["draw again"] / f["forward passes"] for f in found),
    }
