"""Attacks by weights that change under a predictor.

    python benchmarks/attacks/changed_weights.py            every method
    python benchmarks/attacks/changed_weights.py --smoke    seconds

After ``uq.wrap`` the model's weights or statistics change, in every way that there is. The next prediction must refuse;
with the old weights in place it must answer as before.

It prints what was tried and how often the outcome was bad, and ends with 1 if any was.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq

HEADS = ("sampling", "moments", "linearized")
METHODS: dict[str, Callable[[], Any]] = {
    "diag": uq.Diagonal,
    "kfac with Grams": lambda: uq.KFAC(keep_grams=True),
    "full": uq.Dense,
    "inf": uq.INF,
    "message_passing": uq.MessagePassing,
}
SAMPLES, INPUTS, CLASSES = 48, 6, 3


class Net(nn.Module):
    """Two layers with batch normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def network() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(64, INPUTS))  # statistics that are not those of the start
    return net.eval()


def data(seed: int, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, INPUTS, generator=generator)
    return list(
        zip(x.split(16), torch.randint(CLASSES, (samples,), generator=generator).split(16), strict=True)
    )


def fitted(net: nn.Module, method: Callable[[], Any]) -> uq.Posterior:
    return uq.fit(net, data(1), method(), progress=False)


def ways(net: Net, saved: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """How weights and statistics change, by name."""
    other = {name: value + 1 if value.is_floating_point() else value for name, value in saved.items()}

    def steps() -> None:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(8, INPUTS)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    def passes() -> None:
        net.train()
        net(torch.randn(8, INPUTS))
        net.eval()

    return {
        "add_": lambda: net.last.weight.detach().add_(1),
        "data": lambda: net.first.weight.data.mul_(2),
        "one number by data": lambda: net.last.bias.data[1].add_(1),
        "data replaced": lambda: setattr(net.first.weight, "data", saved["first.weight"] + 1),
        "parameter replaced": lambda: setattr(net.last, "weight", nn.Parameter(saved["last.weight"] + 1)),
        "load_state_dict": lambda: net.load_state_dict(other),
        "load_state_dict, assign": lambda: net.load_state_dict(other, assign=True),
        "NaN": lambda: net.first.weight.data[0, 0].fill_(float("nan")),
        "an optimiser's step": steps,
        "statistics": lambda: net.norm.running_var.mul_(2),
        "statistics by data": lambda: net.norm.running_mean.data.add_(1),
        "statistics replaced": lambda: setattr(net.norm, "running_mean", saved["norm.running_mean"] + 1),
        "a pass in train mode": passes,
    }


def weights_afterwards(method: Callable[[], Any], head: str) -> tuple[int, int]:
    """Changes that were not noticed, raw errors, and weights given back that do not predict as before."""
    net, x = network(), data(2)[0][0]
    posterior = fitted(net, method)
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    predictor = uq.wrap(net, posterior, head)
    expected, bad = predictor(x).probs, 0
    changes = ways(net, saved)
    for change in changes.values():
        change()
        try:
            predictor(x)
            bad += 1
        except uq.PosteriorMismatchError:
            pass
        except Exception:
            bad += 1
        net.load_state_dict(saved)
        try:
            bad += not torch.equal(predictor(x).probs, expected)
        except uq.PosthocUQError:
            bad += 1
    return 2 * len(changes), bad


def main() -> None:
    """Attack, and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="seconds")
    arguments = parser.parse_args()
    methods = (
        {"diag": METHODS["diag"], "message_passing": METHODS["message_passing"]}
        if arguments.smoke
        else METHODS
    )
    warnings.simplefilter("ignore")
    rows: list[tuple[str, int, int]] = []
    for name, method in methods.items():
        rows += [(f"{name}, {head}", *weights_afterwards(method, head)) for head in HEADS]
    print(f"{'attack':<55} {'tries':>8} {'bad outcomes':>13}")
    for name, count, bad in rows:
        print(f"{name:<55} {count:>8} {bad:>13}")
    sys.exit(1 if any(bad for _, _, bad in rows) else 0)


if __name__ == "__main__":
    main()
