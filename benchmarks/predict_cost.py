"""Cost of a prediction with uncertainty, in multiples of a plain forward pass of the same model in the same run.

    OMP_NUM_THREADS=1 python benchmarks/predict_cost.py
    OMP_NUM_THREADS=1 python benchmarks/predict_cost.py --cases lenet resnet18 --heads sampling linearized

Plain passes are made before and after every prediction, half each, and the multiple is the median over the repeats;
"per draw" divides it by the number of draws. "CPU" is the same in processor time, which a busy machine disturbs less.
Weights are random, the posterior is INF on 8 random images with a large prior precision: neither has an influence on
the time of a prediction.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _cases import lenet, seconds, settle_batchnorm
from _common import Row, geometric_mean, machine, single_threaded, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq

BATCH = 8
LIMIT = 1.05
"""Plain passes that a draw may cost."""


class Network(NamedTuple):
    """How to build a network, and the shape of one input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


PHOTO = (3, 224, 224)
NETWORKS: dict[str, Network] = {
    "lenet": Network(lenet, (1, 28, 28)),
    "resnet18": Network(lambda: _torchvision("resnet18"), PHOTO),
    "densenet121": Network(lambda: _torchvision("densenet121"), PHOTO),
    "vit_tiny": Network(lambda: _timm("vit_tiny_patch16_224"), PHOTO),
    "convnext_atto": Network(lambda: _timm("convnext_atto"), PHOTO),
    "mobilenet_v3_small": Network(lambda: _torchvision("mobilenet_v3_small"), PHOTO),
    "efficientnet_lite0": Network(lambda: _timm("efficientnet_lite0"), PHOTO),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("sampling", {}),
    "sampling, loop": ("sampling", {"batched": False}),
    "sampling, batched": ("sampling", {"batched": True}),
    "moments": ("moments", {}),
    "moments, marginal": ("moments", {"weights": "marginal"}),
    "linearized": ("linearized", {}),
}
"""Name in the table to head and options."""


def prepared(name: str, batch: int) -> tuple[nn.Module, Tensor, uq.Posterior]:
    """A network in eval mode, a batch for it, and a posterior."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name].build()
        images = torch.rand(max(batch, BATCH), *NETWORKS[name].shape)
    settle_batchnorm(model, images)
    posterior = uq.fit(
        model, [images[:BATCH]], method="inf", layers="all", fisher="mc", prior_precision=1e4, progress=False
    )
    return model, images[:batch], posterior


def measure(name: str, heads: Sequence[str], draws: int, repeats: int, batch: int = BATCH) -> list[Row]:
    """One line per head: its time in multiples of a plain forward pass."""
    model, images, posterior = prepared(name, batch)
    rows: list[Row] = []
    for entry in heads:
        head, options = HEADS[entry]
        options = options | ({"n_samples": draws} if head == "sampling" else {})
        line = {"case": name, "batch": batch, "head": entry, "draws": draws if head == "sampling" else None}
        try:
            setup, predictor = seconds(lambda h=head, o=options: uq.wrap(model, posterior, head=h, **o))
            rows.append(line | _multiples(model, images, predictor, repeats, draws) | {"set-up, s": setup})
        except Exception as error:  # a head that does not take this model is a line of the table too
            rows.append(line | {"note": f"{type(error).__name__}: {error}"[:60]})
        if line["draws"] is not None and "multiple" in rows[-1]:
            rows[-1] = {
                **rows[-1],
                "per draw": rows[-1]["multiple"] / draws,
                "CPU per draw": rows[-1]["CPU"] / draws,
            }
        shown = ("multiple", "CPU", "per draw", "CPU per draw", "note")
        said = {key: value for key, value in rows[-1].items() if key in shown}
        print(f"{name}: {entry}: {said}", flush=True)
    return rows


def _multiples(
    model: nn.Module, images: Tensor, predictor: nn.Module, repeats: int, draws: int
) -> dict[str, Any]:
    """A prediction's time in plain passes, by the clock and by the processor; medians over the repeats."""
    half = max(1, draws // 2)
    found: list[tuple[float, float, float]] = []

    def plain() -> None:
        for _ in range(half):
            model(images)

    with torch.no_grad():
        predictor(images), plain()  # the first calls pay for allocations and for settling the route
        for _ in range(repeats):
            before, taken, after = timed(plain), timed(lambda: predictor(images)), timed(plain)
            units = [(before[i] + after[i]) / (2 * half) for i in range(2)]
            found.append((units[0], taken[0] / units[0], taken[1] / units[1]))
    multiples = sorted(multiple for _, multiple, _ in found)
    return {
        "plain, ms": 1e3 * median(plain for plain, _, _ in found),
        "multiple": median(multiples),
        "least": multiples[0],
        "most": multiples[-1],
        "CPU": median(multiple for _, _, multiple in found),
    }


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time."""
    start = time.process_time()
    clock, _ = seconds(work)
    return clock, time.process_time() - start


def printed(rows: Sequence[Row]) -> str:
    """The table, and for the sampling head the geometric mean and whether every case keeps to the limit."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [table([{key: row.get(key) for key in columns} for row in rows])]
    for entry in dict.fromkeys(row["head"] for row in rows if row.get("per draw")):
        costs = {row["case"]: row["per draw"] for row in rows if row["head"] == entry and "per draw" in row}
        over = ", ".join(f"{case} {cost:.3f}" for case, cost in costs.items() if cost > LIMIT)
        mean = geometric_mean(list(costs.values()))
        lines.append(f"{entry}: geometric mean {mean:.3f} per draw; over {LIMIT}: {over or 'none'}")
    return "\n".join(lines)


def smoke() -> list[Row]:
    """LeNet with few draws by all routes; seconds."""
    return measure("lenet", [name for name in HEADS if name.startswith("sampling")], draws=4, repeats=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=["sampling"])
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="LeNet with four draws")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    with single_threaded():
        if given.smoke:
            rows = smoke()
        else:
            for name in given.cases:
                rows += measure(name, given.heads, given.draws, given.repeats, given.batch)
        about = machine()
    print(printed(rows))
    print(about)
    if given.json:
        write_json(given.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
