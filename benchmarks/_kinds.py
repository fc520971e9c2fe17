"""Network kinds of the defaults' benchmark, all small enough to be trained in seconds on one core."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from _cases import lenet
from _sets import LENGTH, WORDS
from torch import Tensor, nn


def mlp(
    inputs: int, outputs: int, activation: str = "relu", norm: str = "", widths: str = "64 64"
) -> nn.Sequential:
    """A perceptron.

    Args:
        inputs: columns; pictures are flattened.
        outputs: classes or values.
        activation: ``"relu"``, ``"gelu"`` or ``"tanh"``.
        norm: ``"layer"``, ``"batch"`` or none, before each activation.
        widths: units of the hidden layers.
    """
    units = [inputs, *map(int, widths.split())]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(units):
        layers.append(nn.Linear(before, after))
        if norm:
            layers.append({"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[norm](after))
        layers.append({"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}[activation]())
    return nn.Sequential(*layers, nn.Linear(units[-1], outputs))


def cnn() -> nn.Sequential:
    """Two convolutions of 16 and 32 filters with ReLU and max-pooling, 64 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def strided() -> nn.Sequential:
    """Three convolutions with strides in place of pooling, GELU."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def recipe_cnn() -> nn.Sequential:
    """The CNN of `recipes/fashion_mnist`."""
    from recipes.fashion_mnist.network import cnn

    return cnn()


class Block(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(samples, inputs, height, width) to (samples, outputs, ...)."""
        hidden = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def resnet() -> nn.Sequential:
    """A residual network of 16 and 32 filters with BatchNorm and global pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def vit() -> nn.Module:
    """timm's vision transformer with patches of 7 pixels, width 48, three blocks of three heads."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=28,
        patch_size=7,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        depth=3,
        num_heads=3,
        mlp_ratio=2.0,
    )


class RowLSTM(nn.Module):
    """An LSTM that reads a picture row by row, and a linear head on its last state."""

    def __init__(self, columns: int, hidden: int, classes: int = 10) -> None:
        super().__init__()
        self.columns = columns
        self.lstm = nn.LSTM(columns, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, rows * columns) or pictures to (samples, classes)."""
        states, _ = self.lstm(x.reshape(len(x), -1, self.columns))
        return self.head(states[:, -1])


class TokenEncoder(nn.Module):
    """Embedded tokens, two encoder layers, the mean over the positions, a linear head."""

    def __init__(self, width: int = 48, classes: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 3, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, tokens) to (samples, classes)."""
        return self.head(self.encoder(self.tokens(tokens) + self.places).mean(dim=1))


class Bert(nn.Module):
    """A BERT of `transformers`, built from its configuration: two layers of width 48."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=96,
            max_position_embeddings=LENGTH,
            num_labels=2,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, tokens) to (samples, classes)."""
        return self.bert(input_ids=tokens, attention_mask=(tokens > 0).long()).logits


KINDS: dict[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "cnn": cnn,
    "strided": strided,
    "recipe cnn": recipe_cnn,
    "resnet": resnet,
    "vit": vit,
    "lstm 8": lambda: RowLSTM(8, 32),
    "lstm 28": lambda: RowLSTM(28, 48),
    "encoder": TokenEncoder,
    "bert": Bert,
}


def built(kind: str, inputs: int, outputs: int) -> nn.Module:
    """A network with fresh weights.

    Args:
        kind: one of `KINDS`, or a perceptron: ``mlp``, its activation, a norm, its widths (``"mlp gelu layer 32 32"``).
        inputs: columns of a perceptron.
        outputs: of a perceptron.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    if kind in KINDS:
        return KINDS[kind]()
    _, activation, *rest = kind.split()
    norm = rest.pop(0) if rest and not rest[0].isdigit() else ""
    return mlp(inputs, outputs, activation, norm, " ".join(rest) or "64 64")


def last_linear(model: nn.Module) -> nn.Linear:
    """The last linear layer of a network of this file."""
    return cast(nn.Linear, [module for module in model.modules() if isinstance(module, nn.Linear)][-1])


@torch.no_grad()
def features(model: nn.Module, inputs: Tensor) -> Tensor:
    """What enters the last linear layer: (samples, features)."""
    caught: list[Tensor] = []
    handle = last_linear(model).register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    try:
        for batch in inputs.split(500):
            model(batch)
    finally:
        handle.remove()
    return torch.cat(caught)
