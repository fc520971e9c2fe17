"""What layers refuse: models and selections of no use to a posterior, and outputs that a sample does not settle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import UnsupportedLayerError

X = inputs()
SAMPLES = len(X)


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(*functions: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
    """A linear layer, these functions, and another one; of its own random numbers."""
    first, *others, last = net()
    modules = [f if isinstance(f, nn.Module) else Of(f) for f in functions]
    return nn.Sequential(first, *others, *modules, last)


def around(before: Callable[[Tensor], Tensor] = lambda x: x, after: Any = lambda x: x) -> nn.Module:
    return nn.Sequential(Of(before), net(), Of(after))


class Counting(nn.Module):
    """Adds how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.runs


class Tied(nn.Module):
    """A language model in small: its last layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens).mean(1))))


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum(0)


OTHERS = "depend on the other samples of its batch: .*{}"
BY_OTHERS: dict[str, nn.Module] = {
    "mean": around(lambda x: x - x.mean(0)),
    "largest": around(lambda x: x / x.abs().max()),
    "attention": between(lambda h: torch.softmax(h @ h.T, 1) @ h),  # along the samples
    "number": around(after=lambda outputs: outputs / len(outputs)),
    "capacity": around(
        after=lambda outputs: outputs * (torch.arange(len(outputs)) + 2 >= len(outputs))[:, None]
    ),
}
RANDOM: dict[str, nn.Module] = {
    "dropout": between(lambda h: nn.functional.dropout(h, 0.5, training=True)),
    "noise": between(lambda h: h + torch.randn_like(h)),
    "a counter": between(Counting()),
}
STATISTICS = between(nn.BatchNorm1d(5, track_running_stats=False)).eval()
SAME = X.clone()
SAME[1] = SAME[0]

ROWS = {
    # models
    "no layer": Row(lambda: fit(nn.BatchNorm1d(4)), "no Linear or convolution layer"),
    "no parameters": Row(lambda: fit(nn.Flatten()), "no parameters"),
    "none requires gradients": Row(
        lambda: fit(net().requires_grad_(False), layers="trainable"), "No parameter of the model requires gradients"),
    "a sum returned": Row(lambda: fit(Summed()), r"shape \(3,\) for 2 samples"),
    # selections
    "another letter": Row(
        lambda: fit(nn.Sequential(net(), nn.Linear(3, 3)), layers=["0.O"]), r"'0\.O'.*'0\.0'"),
    "a pattern of nothing": Row(lambda: fit(layers="*lora_*"), r"no weighted layer '\*lora_\*'"),
    "a parameter's name, misspelt": Row(lambda: fit(layers=["0.weigth"]), r"no weighted layer '0\.weigth'"),
    "a parameter's name, of a training": Row(
        lambda: fit(method="utvi", layers=["0.weight"], epochs=1), r"no weighted layer '0\.weight'.*\]\.$"),
    "an embedding": Row(
        lambda: fit(Tied(), [torch.arange(6).reshape(2, 3) % 5], layers="embedding", fisher="exact"),
        r"'embedding' is an embedding.*layers=\['head'\]",
        UnsupportedLayerError),
    "untied twice": Row(lambda: uq.untied(Tied(), "body"), "'body' shares no parameter"),
    "untied, misspelt": Row(lambda: uq.untied(Tied(), "haed"), "no module 'haed'"),
    # outputs that a sample does not settle
    **{
        f"by others: {name}, {layers}": Row(
            lambda model=model, layers=layers: fit(model, layers=layers),
            OTHERS.format("statistics of the batch"),
            UnsupportedLayerError)
        for name, model in BY_OTHERS.items()
        for layers in ("all", "last")
    },
    **{
        f"by others: statistics, {layers}": Row(
            lambda layers=layers: fit(STATISTICS, layers=layers),
            OTHERS.format(r"'2' \(BatchNorm1d\)"),
            UnsupportedLayerError)
        for layers in ("all", "last")
    },
    "by others: the first two are the same": Row(
        lambda: fit(BY_OTHERS["mean"], [(SAME, torch.arange(SAMPLES) % 3)]), OTHERS.format(""), UnsupportedLayerError),
    **{
        f"random: {name}, {layers}": Row(
            lambda model=model, layers=layers: fit(model, layers=layers),
            "differ from run to run, also in eval mode",
            UnsupportedLayerError)
        for name, model in RANDOM.items()
        for layers in ("all", "last")
    },
    "a fixed batch": Row(
        lambda: fit(between(lambda h: h.view(SAMPLES, 5))),
        rf"batch size is fixed, as by x.view\({SAMPLES}, ...\)",
        UnsupportedLayerError),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
