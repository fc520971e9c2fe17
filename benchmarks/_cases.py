"""The networks that costs are measured on, their images, and the plain pass that is the unit of cost.

Imports nothing of the library but, where images are made, its photographs: the peers' processes, in whose
environment the library is not installed, build the same networks from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
SETTLING = 32
"""Images that a network's BatchNorm statistics are taken from."""


class Case(NamedTuple):
    """A network with random weights, and batches of structured images for it."""

    build: Callable[[], nn.Module]
    images: Callable[[int], Tensor]
    classes: int
    batch: int
    batches: int


def lenet() -> nn.Module:
    """LeNet-5 with ReLU for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


WORDS = 6000
"""Token ids of `Texts`."""


class Texts(nn.Module):
    """A DistilBERT of 5.7 million weights from its configuration, which takes a tensor of token ids."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        sizes = {"dim": 256, "n_heads": 8, "hidden_dim": 768, "n_layers": 6, "vocab_size": WORDS}
        self.bert = DistilBertForSequenceClassification(DistilBertConfig(num_labels=classes, **sizes))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(input_ids=ids).logits


def of_torchvision(name: str, **options: Any) -> nn.Module:
    """With random weights."""
    import torchvision

    return torchvision.models.get_model(name, weights=None, **options)


def of_timm(name: str, **options: Any) -> nn.Module:
    """With random weights."""
    import timm

    return timm.create_model(name, pretrained=False, **options)


def digits(count: int) -> Tensor:
    """Handwritten digits at 28 px; when all have been used once, they come again under a little noise."""
    from sklearn.datasets import load_digits

    pixels = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    chosen = torch.arange(count) % len(pixels)
    images = nn.functional.interpolate(pixels[chosen], size=(28, 28), mode="bilinear")
    again = images[len(pixels) :]
    again += 0.05 * torch.randn(again.shape, generator=torch.Generator().manual_seed(0))
    return images


def photos(size: int) -> Callable[[int], Tensor]:
    """Random crops of photographs, of a size in pixels."""

    def crops(count: int) -> Tensor:
        from recipes.photos.pictures import FIT_PHOTOS, photo, random_crops

        pictures = [photo(name) for name in FIT_PHOTOS]
        parts: list[Tensor] = []
        for start in range(0, count, 16):  # few at a time: making the data must not be the peak of memory
            images = random_crops(pictures, min(16, count - start), seed=start)
            if size != images.shape[-1]:
                images = nn.functional.interpolate(images, size=(size, size), mode="area")
            parts.append(images)
        return torch.cat(parts)

    return crops


CASES: dict[str, Case] = {
    "lenet": Case(lenet, digits, 10, 64, 32),
    "resnet18-32": Case(partial(of_torchvision, "resnet18"), photos(32), 1000, 64, 8),
    "resnet18-224": Case(partial(of_torchvision, "resnet18"), photos(224), 1000, 8, 8),
    "resnet50-224": Case(partial(of_torchvision, "resnet50"), photos(224), 1000, 8, 4),
    "vit-tiny": Case(partial(of_timm, "vit_tiny_patch16_224"), photos(224), 1000, 16, 4),
}


def settle_batchnorm(model: nn.Module, images: Tensor) -> None:
    """Give a network with random weights the BatchNorm statistics of its data, or activations may grow."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if norms:
        for module in norms:
            module.reset_running_stats()
            module.momentum = None  # a plain mean over the batches
        model.train()
        with torch.no_grad():
            for part in images.split(8):
                model(part)
    model.eval()


def network(name: str, images: Tensor) -> nn.Module:
    """A case's network in eval mode, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CASES[name].build()
    settle_batchnorm(model, images[:SETTLING])
    return model


def write_data(name: str, path: Path, batches: int | None = None) -> None:
    """Make a case's images and labels, and write them where every process of the run finds them."""
    case = CASES[name]
    count = case.batch * (batches or case.batches)
    labels = torch.randint(case.classes, (count,), generator=torch.Generator().manual_seed(0))
    np.savez(path, images=case.images(count).numpy(), labels=labels.numpy())


def prepare(name: str, data: Path) -> tuple[nn.Module, Batches]:
    """A case's network and its batches, from a file that `write_data` wrote."""
    with np.load(data) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    batch = CASES[name].batch
    return network(name, images), list(zip(images.split(batch), labels.split(batch), strict=True))


def plain_pass(model: nn.Module, batches: Batches) -> None:
    """Forward and backward over the data, with gradients of all parameters."""
    for images, labels in batches:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels, reduction="sum").backward()
    model.zero_grad(set_to_none=True)
