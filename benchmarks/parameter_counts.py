"""Numbers that each posterior stores, and the size of its file, beside table 3 of Lee et al. 2020.

Diagonal, KFAC and EFB follow from the layers' shapes alone, so they are counted, and the counts are checked
against fits of a small network. INF keeps the directions that the data select, so it is fitted, at 224 px on
crops of the photographs that ship with scikit-image. ImageNet weights of these networks cannot be had as a
package: they are initialised at random, with the statistics of their BatchNorm layers taken from the crops.
One trained network, EfficientNet-Lite0, is fitted beside them.

    python benchmarks/parameter_counts.py                       all of them; minutes
    python benchmarks/parameter_counts.py --models resnet18
    python benchmarks/parameter_counts.py --counts-only         no fits; seconds
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from _cases import settle_batchnorm
from _harness import machine, table, write_csv, write_json
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.block import BLOCKS
from posthoc_uq.posteriors.posterior import Posterior
from recipes.photos import pictures
from recipes.photos.efficientnet import efficientnet_lite0

PAPER: dict[str, dict[str, int]] = {
    "resnet18": {"diag": 11_679_912, "kfac": 95_013_546, "efb": 106_693_458, "inf": 12_317_373},
    "resnet50": {"diag": 25_503_912, "kfac": 153_851_562, "efb": 179_355_474, "inf": 27_614_896},
    "resnet152": {"diag": 60_041_384, "kfac": 389_519_018, "efb": 449_560_402, "inf": 65_558_402},
    "densenet121": {"diag": 7_895_208, "kfac": 103_094_954, "efb": 110_990_162, "inf": 9_711_081},
    "densenet161": {"diag": 28_461_064, "kfac": 379_105_514, "efb": 407_566_578, "inf": 32_329_191},
}
"""Table 3 of the paper; "inf" at rank 100. Its file sizes are four bytes a number."""
TRAINED = "tf_efficientnet_lite0"
DEFAULT_MODELS = ("resnet18", "resnet50", "densenet121", TRAINED)
KINDS = {"diag": "diagonal", "kfac": "kfac", "efb": "efb"}
RANK = 100
MIB = 2**20


def network(name: str) -> nn.Module:
    """A torchvision network with random weights, or EfficientNet-Lite0 with its trained ones."""
    if name == TRAINED:
        return efficientnet_lite0()
    import torchvision

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torchvision.models.get_model(name, weights=None).eval()


def crops(count: int, seed: int = 0) -> Tensor:
    """Random crops of photographs, ``(count, 3, 224, 224)``."""
    return pictures.random_crops([pictures.photo(name) for name in pictures.FIT_PHOTOS], count, seed)


def noise(count: int, seed: int = 0) -> Tensor:
    """White noise of the same shape, to show how INF's count depends on the data."""
    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


def matrix_shapes(model: nn.Module) -> list[tuple[int, int, int]]:
    """``(groups, outputs, inputs)`` of every convolution and linear layer, from the modules themselves."""
    shapes: list[tuple[int, int, int]] = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            groups = getattr(module, "groups", 1)
            inputs = prod(module.weight.shape[1:]) + (module.bias is not None)
            shapes.append((groups, module.weight.shape[0] // groups, inputs))
    return shapes


def factor_count(shapes: Sequence[tuple[int, int, int]], method: str) -> int:
    """The numbers of a posterior as the paper counts them: ``mn``, ``n^2 + m^2``, or both together."""
    diagonal = sum(g * m * n for g, m, n in shapes)
    factors = sum(g * (m * m + n * n) for g, m, n in shapes)
    return {"diag": diagonal, "kfac": factors, "efb": factors + diagonal}[method]


def stored_count(shapes: Sequence[tuple[int, int, int]], method: str) -> int:
    """The numbers that the library's blocks hold for these layers, by the shapes that they must have."""
    kind = BLOCKS[KINDS[method]]
    return sum(spec.numbers for shape in shapes for spec in kind.specs(shape, {}).values())


def check_counts() -> dict[str, tuple[int, int]]:
    """Fit a small network by each method; the numbers stored, and `stored_count` of its shapes.

    Raises:
        AssertionError: they differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(8 * 16, 5)
        )
        images = torch.randn(16, 3, 8, 8)
    shapes = matrix_shapes(model)
    found: dict[str, tuple[int, int]] = {}
    for method in KINDS:
        posterior = uq.fit(model, [images], method=method, fisher="mc", prior_precision=1.0, progress=False)
        fitted = sum(block.numbers() for block in posterior.blocks.values())
        found[method] = (fitted, stored_count(shapes, method))
        assert fitted == found[method][1], f"{method}: {fitted} numbers fitted, {found[method][1]} counted"
    return found


def file_size(posterior: Posterior) -> int:
    """Bytes of the posterior's file, by writing it."""
    from posthoc_uq.files import save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.h5"
        save(posterior, path)
        return path.stat().st_size


def hollow(posterior: Posterior, method: str) -> Posterior:
    """A posterior of another method over the same layers, all zeros: as large in a file as a fitted one."""
    kind = BLOCKS[KINDS[method]]

    def block(layer: Layer) -> Any:
        specs = kind.specs(layer.matrix_shape, {})
        return kind.restore({}, {name: torch.zeros(spec.sizes) for name, spec in specs.items()})

    blocks = {name: block(layer) for name, layer in posterior.layers.items()}
    members = {name: [name] for name in blocks}
    other = Posterior(
        method, posterior.layers, blocks, members, posterior.mean, posterior.likelihood, posterior.evidence
    )
    other.model = posterior.model
    return other


def row(
    name: str, method: str, count: int, size: int | None = None, paper: bool = True, **columns: Any
) -> dict[str, Any]:
    """One line of the table."""
    published = PAPER.get(name, {}).get(method) if paper else None
    return {
        "model": name,
        "method": method,
        **columns,
        "numbers": count,
        "paper": published,
        "ours <= paper's": None if published is None else count <= published,
        "file, MiB": None if size is None else round(size / MIB, 1),
        "paper, MiB": None if published is None else round(4 * published / MIB, 1),
    }


def count_rows(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """Diagonal, KFAC and EFB by shape."""
    shapes = matrix_shapes(model)
    return [row(name, method, stored_count(shapes, method), data="-") for method in KINDS]


def fitted_rows(name: str, images: int, batch: int, files: bool) -> list[dict[str, Any]]:
    """INF by a fit on crops (and on noise, for comparison), the others by shape."""
    model = network(name)
    rows = count_rows(name, model)
    for data, shown in (("photos", crops(images)), ("noise", noise(images))):
        if name != TRAINED:
            settle_batchnorm(model, shown)
        start = time.perf_counter()
        posterior = uq.fit(
            model, shown.split(batch), fisher="mc", rank=RANK, prior_precision=1.0, progress=False
        )
        seconds = time.perf_counter() - start
        count = sum(block.numbers() for block in posterior.blocks.values())
        size = file_size(posterior) if files else None
        label = f"{images} {data}"
        rows.append(row(name, "inf", count, size, data=label))
        print(f"{name}: INF on {label} in {seconds:.0f} s; {directions(posterior)}", flush=True)
        if files and data == "photos":
            for line in rows[:3]:
                line["file, MiB"] = round(file_size(hollow(posterior, line["method"])) / MIB, 1)
        del posterior
    return rows


def directions(posterior: Posterior) -> str:
    """How many directions INF kept, in words."""
    widths = [block.tensors()["eigenvalues"].shape[-2:] for block in posterior.blocks.values()]
    outputs = sum(width[0] for width in widths) / len(widths)
    inputs = sum(width[1] for width in widths) / len(widths)
    return f"{len(widths)} layers keep {outputs:.1f} output and {inputs:.1f} input directions on average"


def smoke() -> list[dict[str, Any]]:
    """Counts of every network of the paper by shape, the check on a small one, and no fit of a large one."""
    check_counts()
    return [line for name in PAPER for line in count_rows(name, _empty(name))]


def _empty(name: str) -> nn.Module:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return network(name)


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """What the table says, in words computed from the numbers."""
    compared = [line for line in rows if line["paper"] is not None]
    larger = [line for line in compared if not line["ours <= paper's"]]
    lines = [f"{len(compared) - len(larger)} of {len(compared)} counts are at most the paper's."]
    for line in larger:
        excess = line["numbers"] / line["paper"] - 1
        lines.append(f"Larger: {line['model']} {line['method']} ({line['data']}) by {100 * excess:.2f} %.")
    if any(line["method"] == "kfac" for line in larger):
        lines.append(
            "KFAC is kept as eigenvectors and eigenvalues, n + m numbers a layer more than the two factors."
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*PAPER, TRAINED], default=list(DEFAULT_MODELS))
    parser.add_argument(
        "--counts-only", "--smoke", action="store_true", help="no fits: what follows from shapes"
    )
    parser.add_argument("--images", type=int, default=16, help="images that INF is fitted on")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.counts_only:
        rows = smoke()
    else:
        check_counts()
        rows = [
            line
            for name in options.models
            for line in fitted_rows(name, options.images, options.batch, files=True)
        ]
    print(f"\nNumbers stored at rank {RANK}\n")
    print(table(rows))
    text = conclusion(rows)
    print(f"\n{text}")
    if not options.counts_only:
        print(
            "INF's count depends on the data: it keeps the directions of the 100 largest eigenvalues of each "
            "layer, and the more directions those spread over, the more it stores; see photos against noise. "
            f"All but {TRAINED} have random weights; the paper's were trained and fitted on ImageNet."
        )
    if options.csv:
        write_csv(options.csv, rows)
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows, "conclusion": text})


if __name__ == "__main__":
    main()
