"""Exported programs beside Python: how far their numbers are from it, and what the export and a run cost.

    OMP_NUM_THREADS=1 python benchmarks/export_cost.py           three networks and a regression; two minutes
    OMP_NUM_THREADS=1 python benchmarks/export_cost.py --smoke   two small networks, no ONNX; seconds

Each network gets a posterior of its last layer and held-out scores, and is exported in closed form to a `.pt2` and an
ONNX file. `off` is the largest difference of an output from Python's over its largest number, over batches of 1, 5 and
33 inputs; sets must be equal. Times are processor times, medians of interleaved repeats: of the export, over
`torch.export.export` of the network alone; of a batch of 33, over the network's own. docs/tables/export_cost.csv
holds these numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _harness import machine, output_file, single_threaded, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq

SIZES = 1, 5, 33
LEVEL, HELD_OUT, CLASSES = 0.8, 60, 10
Make = Callable[[], tuple[nn.Module, tuple[int, ...]]]


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def _resnet() -> tuple[nn.Module, tuple[int, ...]]:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES), (3, 64, 64)


def _vit() -> tuple[nn.Module, tuple[int, ...]]:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES), (3, 64, 64)


NETWORKS: dict[str, tuple[str, Make]] = {
    "ResNet-18, 64 px": ("classification", _resnet),
    "ViT-tiny, 64 px": ("classification", _vit),
    "MLP, 20 columns": ("classification", lambda: (_mlp(20, CLASSES), (20,))),
    "MLP, 20 columns, 2 targets": ("regression", lambda: (_mlp(20, 2), (20,))),
}
SMOKE: dict[str, tuple[str, Make]] = {
    "classes": ("classification", lambda: (_mlp(4, 3), (4,))),
    "regression": ("regression", lambda: (_mlp(4, 2), (4,))),
}


def measured(name: str, likelihood: str, make: Make, repeats: int, onnx: bool) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    network, shape = make()
    network.eval()
    x, held_out = torch.randn(HELD_OUT, *shape), torch.randn(HELD_OUT, *shape)
    y = torch.arange(HELD_OUT) % 3 if likelihood == "classification" else torch.randn(HELD_OUT, 2)
    options: dict[str, Any] = {"layers": "last", "prior_precision": 20.0, "likelihood": likelihood}
    posterior = uq.fit(network, [(x, y)], progress=False, **options)
    posterior = uq.calibrate(posterior, [(held_out, y)], progress=False)
    predictor = uq.wrap(network, posterior)
    batches = [torch.randn(size, *shape) for size in SIZES]
    row: dict[str, Any] = {"network": name}
    with tempfile.TemporaryDirectory() as folder:
        program = uq.export(predictor, x[:4], path=Path(folder, "p.pt2"), level=LEVEL)
        loaded = torch.export.load(Path(folder, "p.pt2")).module()
        with torch.no_grad():
            row["off, .pt2"] = max(_off(loaded(batch)._asdict(), predictor(batch)) for batch in batches)
        if onnx:
            uq.export(predictor, x[:4], path=Path(folder, "p.onnx"), level=LEVEL)
            run = _session(Path(folder, "p.onnx"))
            row["off, ONNX"] = max(_off(run(batch), predictor(batch)) for batch in batches)
    row["operations"] = sum(node.op == "call_function" for node in program.graph.nodes)
    batch, own = torch.export.Dim("batch", min=1), program.module()

    def plain() -> Any:
        with torch.no_grad():
            return torch.export.export(network, (x[:4],), dynamic_shapes=({0: batch},), strict=False)

    row["export of the network, s"], row["export"] = _over(
        plain, lambda: uq.export(predictor, x[:4], level=LEVEL), repeats
    )
    with torch.no_grad():
        row["run"] = _over(lambda: network(batches[-1]), lambda: own(batches[-1]), 10 * repeats)[1]
    return row


def _session(path: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    names = [value.name for value in session.get_outputs()]

    def run(x: Tensor) -> dict[str, Tensor]:
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

    return run


def _off(found: Mapping[str, Tensor], prediction: Any) -> float:
    """The largest difference of an output, over its largest number; of mutual information, which is a difference of
    entropies, over that of the entropy. Infinite where a set is another.
    """
    expected = dict(prediction.tensors()._asdict())
    score = prediction.default_score
    expected |= {f"p_{score}": prediction.familiarity(score), "p_novelty": prediction.familiarity()}
    expected["p_joint"] = prediction.familiarity("joint")
    if "set" in found:
        expected["set"] = prediction.set(LEVEL)
    else:
        expected["lower"], expected["upper"] = prediction.interval(LEVEL)
    largest = 0.0
    for name, wanted in expected.items():
        if wanted.dtype == torch.bool:
            largest = max(largest, 0.0 if torch.equal(found[name], wanted) else float("inf"))
            continue
        scale = expected["entropy"] if name == "mutual_information" else wanted
        difference = (found[name] - wanted).abs().max() / scale.abs().max()
        largest = max(largest, float(difference))
    return largest


def _over(plain: Callable[[], Any], work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Processor seconds of `plain`, and how many times as many `work` takes; medians."""
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        start = time.process_time()
        plain()
        middle = time.process_time()
        work()
        times.append((middle - start, time.process_time() - middle))
    first, second = (median(column) for column in zip(*times[1:], strict=True))  # the first pays for imports
    return first, second / first


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two small networks, no ONNX")
    parser.add_argument("--repeats", type=int, default=5, help="of the exports")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args(arguments)
    networks, repeats = (SMOKE, 1) if options.smoke else (NETWORKS, options.repeats)
    warnings.filterwarnings("ignore", module="torch|onnx|timm")
    with single_threaded():
        rows = [
            measured(name, likelihood, make, repeats, not options.smoke)
            for name, (likelihood, make) in networks.items()
        ]
        print(table(rows))
        print(machine())
        if options.json is not None:
            write_json(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
