"""What a prediction with uncertainty costs, in multiples of a plain forward pass of the same model in the same run.

    OMP_NUM_THREADS=1 python benchmarks/predict_cost.py
    OMP_NUM_THREADS=1 python benchmarks/predict_cost.py --cases lenet resnet18 --layers last --heads sampling
    OMP_NUM_THREADS=1 python benchmarks/predict_cost.py --smoke               LeNet; seconds

Plain passes are made before and after every prediction, and the multiple is the median over the repeats. "first call"
is the first prediction, which prepares the posterior and the model, in plain passes; "passes" says how often an image
went through the network's first layer. "novelty" is `predictor.novelty` alone. Weights are random, and the posterior is
fitted on 8 images with a large prior precision: neither has an influence on the time of a prediction.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from _cases import lenet, of_timm, of_torchvision, settle_batchnorm
from _harness import Row, interleaved, machine, output_file, seconds, single_threaded, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq

FITTED = 8
"""Images that a posterior is fitted on."""


class Network(NamedTuple):
    """How to build a network, and the shape of one input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


def table_network(classes: int) -> nn.Module:
    """A small perceptron for ten columns."""
    layers = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes)
    return nn.Sequential(*layers)


PHOTO = (3, 224, 224)
NETWORKS: dict[str, Network] = {
    "lenet": Network(lenet, (1, 28, 28)),
    "resnet18-32": Network(lambda: of_torchvision("resnet18", num_classes=10), (3, 32, 32)),
    "resnet18": Network(lambda: of_torchvision("resnet18"), PHOTO),
    "densenet121": Network(lambda: of_torchvision("densenet121"), PHOTO),
    "vit_tiny": Network(lambda: of_timm("vit_tiny_patch16_224"), PHOTO),
    "convnext_atto": Network(lambda: of_timm("convnext_atto"), PHOTO),
    "mobilenet_v3_small": Network(lambda: of_torchvision("mobilenet_v3_small"), PHOTO),
    "efficientnet_lite0": Network(lambda: of_timm("efficientnet_lite0"), PHOTO),
    **{
        f"table, {classes} classes": Network(partial(table_network, classes), (10,)) for classes in (2, 3, 10)
    },
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("sampling", {}),
    "sampling, loop": ("sampling", {"batched": False}),
    "sampling, batched": ("sampling", {"batched": True}),
    "moments": ("moments", {}),
    "linearized": ("linearized", {}),
    "linearized, jvp": ("linearized", {"engine": "jvp"}),
    "linearized, probit": ("linearized", {"link": "probit"}),
}
"""Name in the table to head and options."""


def network(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    """A network in eval mode, and images for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name].build()
        images = torch.rand(max(batch, FITTED), *NETWORKS[name].shape)
    settle_batchnorm(model, images)
    return model, images


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Inputs that go through the network's first layer, in whatever copy of it."""
    layer = next(module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear)))
    name, first = "conv2d" if isinstance(layer, nn.Conv2d) else "linear", layer.weight.shape
    seen, forward = [0], getattr(torch.nn.functional, name)

    def counting(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen[0] += len(input) if weight.shape == first else 0
        return forward(input, weight, *args, **kwargs)

    setattr(torch.nn.functional, name, counting)
    try:
        yield seen
    finally:
        setattr(torch.nn.functional, name, forward)


def measure(
    name: str, heads: Sequence[str], layers: str, method: str, draws: int, repeats: int, batch: int
) -> list[Row]:
    """One line per head, and one for novelty."""
    model, images = network(name, batch)
    loader, images = [(images[:FITTED], torch.arange(FITTED) % 2)], images[:batch]
    options = {} if method == "diag" else {"fisher": "mc"}
    posterior = uq.fit(
        model, loader, method=method, layers=layers, prior_precision=1e4, progress=False, **options
    )
    common = {"case": name, "batch": batch, "method": method, "layers": layers}
    rows: list[Row] = []

    def plain() -> None:
        with torch.no_grad():
            model(images)

    plain()
    for entry in heads:
        head, options = HEADS[entry]
        options = options | ({"n_samples": draws} if head == "sampling" else {})
        try:
            predictor = uq.wrap(model, posterior, head, **options)
            unit, _ = seconds(plain)
            first, _ = seconds(lambda p=predictor: p(images))
            with counted(model) as seen:
                predictor(images)
            found = interleaved(plain, lambda p=predictor: p(images), repeats, least=0.02)
            rows.append(
                common
                | {"what": entry, **found, "first call": first / unit, "passes": seen[0] / batch}
                | {"per draw": found["multiple"] / draws if head == "sampling" else None}
            )
        except (uq.PosthocUQError, RuntimeError) as error:  # a head that does not take this model
            rows.append(common | {"what": entry, "note": f"{type(error).__name__}: {error}"[:60]})
        print(rows[-1], flush=True)
    predictor = uq.wrap(model, posterior, "linearized")
    found = interleaved(plain, lambda: predictor.novelty(images), repeats, least=0.02)
    rows.append(common | {"what": "novelty", **found})
    print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument(
        "--heads", nargs="+", choices=list(HEADS), default=["sampling", "moments", "linearized"]
    )
    parser.add_argument("--layers", nargs="+", choices=["all", "last"], default=["all", "last"])
    parser.add_argument("--method", default="inf")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=output_file, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="LeNet with four draws")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.cases, given.heads, given.draws, given.repeats = ["lenet"], list(HEADS), 4, 1
    rows: list[Row] = []
    with single_threaded():
        for name in given.cases:
            for layers in given.layers:
                rows += measure(
                    name, given.heads, layers, given.method, given.draws, given.repeats, given.batch
                )
        about = machine()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("\nMultiples of one plain forward pass over the same batch")
    print(table([{key: row.get(key) for key in columns} for row in rows]))
    print(about)
    if given.json:
        write_json(given.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
