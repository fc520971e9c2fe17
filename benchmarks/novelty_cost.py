"""What novelty costs, in multiples of a plain forward pass over the same batch.

    python benchmarks/novelty_cost.py                       three networks, batches of 100; minutes on one core
    python benchmarks/novelty_cost.py --json cost.json
    python benchmarks/novelty_cost.py --smoke               LeNet, ten inputs; seconds

* By the last layer's inputs (``class``), and through an INF posterior of all layers (``top``, ``all``), for LeNet, a
  small CNN and a small ResNet with 10 classes; beside them one forward and backward pass with the weights' gradients.
  For torchvision's ResNet-18 at 224 px with 1,000 classes, ``class`` alone, on batches of 8.
* By the last layer's inputs alone, without the network, for one sample of 512 features and growing numbers of classes,
  in milliseconds.

Plain passes are made before and after everything that is timed, and the multiple, of processor time, is the median over
the repeats. Weights are random, and labels are the network's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _cases import settle_batchnorm
from _common import Row, machine, single_threaded, table, write_json
from _kinds import cnn, lenet, resnet
from last_layer_cost import multiples, processor
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.features import FeatureGrams, room

NETWORKS = {"lenet": lenet, "cnn": cnn, "resnet": resnet}
LARGE = "resnet18"
PASSES = 5
"""Plain passes at a time, so that one is long enough to be timed."""


def costs(name: str, batch: int, forms: Sequence[str], repeats: int) -> list[Row]:
    """One line per form of novelty, and one for a forward and backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, shape = (_resnet18(), (3, 224, 224)) if name == LARGE else (NETWORKS[name](), (1, 28, 28))
        images = torch.rand(3 * batch, *shape)
    model.eval()
    settle_batchnorm(model, images[:batch])
    with torch.no_grad():
        labels = model(images).argmax(1)
    loader = list(zip(images.split(batch), labels.split(batch), strict=True))
    layers, method = ("last", "diag") if name == LARGE else ("all", "inf")
    posterior = uq.fit(
        model, loader, method=method, layers=layers, fisher="mc", prior_precision=1.0, progress=False
    )
    predictor, own = uq.wrap(model, posterior, "linearized"), images[:batch]

    def plain() -> None:
        with torch.no_grad():
            for _ in range(PASSES):
                model(own)

    works: dict[str, Any] = {form: lambda form=form: predictor.novelty(own, of=form) for form in forms}
    works = {"forward and backward": lambda: _backward(model, own), **works}
    rows: list[Row] = []
    for what, work in works.items():
        work()  # the first call prepares the covariance
        found = multiples(plain, work, repeats)
        row = {"case": name, "what": what, **{key: value * PASSES for key, value in found.items()}}
        row["plain, ms"] = found["plain, ms"] / PASSES
        rows.append(row)
        print(row, flush=True)
    return rows


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None)


def _backward(model: nn.Module, images: Tensor) -> None:
    torch.autograd.grad(model(images).max(1).values.sum(), list(model.parameters()))


def growth(classes: Sequence[int], size: int, repeats: int) -> list[Row]:
    """The class-wise ratio of one sample by the number of classes, as many directions kept as 4 MiB have room for."""
    rows: list[Row] = []
    for count in classes:
        generator = torch.Generator().manual_seed(0)
        width, rank = room(count, size + 1)
        layer = Layer("last", "linear", "last.weight", "last.bias", 1, count, size + 1, (count, size))
        tensors = {
            "basis": torch.linalg.qr(torch.randn(size + 1, width, generator=generator)).Q,
            "diagonal": torch.rand(count, width, generator=generator),
            "factors": torch.randn(count, width, rank, generator=generator) / size,
            "residual": torch.rand(count, generator=generator),
        }
        grams = FeatureGrams(layer, "outputs", 1, tensors)
        features = torch.randn(1, size + 1, generator=generator)
        grams.novelty(features)
        times = [processor(lambda g=grams, f=features: g.novelty(f)) for _ in range(repeats)]
        rows.append({"classes": count, "rank": rank, "ms": 1e3 * median(times)})
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=[*NETWORKS, LARGE], default=[*NETWORKS, LARGE])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--forms", nargs="+", default=["class", "top", "all"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="LeNet on ten inputs")
    given = parser.parse_args(arguments)
    with single_threaded():
        if given.smoke:
            rows, grown = costs("lenet", 10, ["class", "top"], 2), growth([10, 20], 32, 3)
        else:
            small = [name for name in given.nets if name != LARGE]
            rows = [r for name in small for r in costs(name, given.batch, given.forms, given.repeats)]
            rows += costs(LARGE, 8, ["class"], given.repeats) if LARGE in given.nets else []
            grown = growth([10, 100, 1000], 512, 5 * given.repeats)
        about = machine()
    print(table(rows), table(grown), about, sep="\n\n")
    if given.json:
        write_json(given.json, {"machine": about, "rows": rows, "growth": grown})


if __name__ == "__main__":
    main()
