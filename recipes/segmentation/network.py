"""A small U-Net (Ronneberger, Fischer, Brox 2015) and its training."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.common import in_random_order, train
from recipes.segmentation.scenes import CLASSES, Scenes


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Three scales; images (samples, 3, height, width) with sides that 4 divides, logits (samples, classes, height,
    width).

    Args:
        width: channels of the finest scale.
        classes: of every pixel.
    """

    def __init__(self, width: int = 16, classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = (
            _block(inputs, outputs)
            for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        # enlarged and convolved: the weights of transposed convolutions get no posterior
        self.up_middle = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4 * width, 2 * width, 1))
        self.up_fine = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 1))
        self.merge_middle, self.merge_fine = _block(4 * width, 2 * width), _block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.merge_middle(torch.cat([middle, self.up_middle(coarse)], 1))
        return self.head(self.merge_fine(torch.cat([fine, self.up_fine(middle)], 1)))


def trained(part: Scenes, epochs: int, seed: int, width: int = 16, batch: int = 16) -> UNet:
    """Train by AdamW with one cycle of the learning rate."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(width)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = epochs * -(-len(part.images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        batches = in_random_order(part.images, part.classes, batch, generator)
        loss = train(model, batches, F.cross_entropy, optimiser, schedule)
        print(f"epoch {epoch + 1}: loss {loss:.4f}", file=sys.stderr, flush=True)
    return model.eval()
