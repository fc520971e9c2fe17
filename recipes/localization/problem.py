"""The localisation of section 4.3 of Schodt (2024): a fluorescent molecule in an image of 8 x 8 pixels, the network
that finds its place and its light, and the bounds on how well that can be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import pi, sqrt

import torch
from torch import Tensor, nn

from posthoc_uq.moments import ConditionalInverseCDF, InverseCDF

SIDE = 8
"""Pixels along a side, each of size 1; the image is centred at the origin."""
BLOB = 1.05
"""Standard deviation of the blob, in pixels."""
PHOTONS = 100.0
"""Of the whole blob, on average."""
SPREAD = 2.0
"""Standard deviation of the molecule's position about the centre, in pixels, along either axis."""
LEAST = 1e-3
"""Photons below which a molecule counts as outside: no deviation of their number may be zero."""


def share(position: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """How much of the blob lies between two edges, along one axis."""
    return torch.special.ndtr((high - position) / BLOB) - torch.special.ndtr((low - position) / BLOB)


def expected_image(positions: Tensor) -> Tensor:
    """Photons expected in every pixel, ``(samples, SIDE, SIDE)`` with rows by y, for positions ``(samples, 2)``."""
    edges = torch.arange(SIDE + 1, dtype=positions.dtype) - SIDE / 2
    along = [share(positions[:, axis, None], edges[:-1], edges[1:]) for axis in (0, 1)]
    return PHOTONS * along[1].unsqueeze(2) * along[0].unsqueeze(1)


def expected_photons(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the photons that reach the sensor, shaped like the coordinates."""
    mean = PHOTONS * share(x, -SIDE / 2, SIDE / 2) * share(y, -SIDE / 2, SIDE / 2)
    mean = mean.clamp(min=LEAST)
    return mean, mean.sqrt()


def sample(positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Images ``(samples, 1, SIDE, SIDE)`` with Poisson noise and no background, and targets ``(samples, 3)``: the
    position and the expected number of photons.
    """
    images = torch.poisson(expected_image(positions), generator=generator)
    photons, _ = expected_photons(positions[:, 0], positions[:, 1])
    return images.unsqueeze(1), torch.cat([positions, photons.unsqueeze(1)], dim=1)


def emitters(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Positions ``(count, 2)`` from the prior."""
    return SPREAD * torch.randn(count, 2, generator=generator)


class FreshImages:
    """A loader of images made on the fly, from torch's global random numbers."""

    def __init__(self, batches: int, size: int) -> None:
        self.batches, self.size = batches, size

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.batches):
            yield sample(emitters(self.size))


class Localizer(nn.Module):
    """A convolution, a hidden layer, and outputs with the prior's knowledge: a normal one of the position, and the
    number of photons that reach the sensor from there.

    Images are divided by ten photons, so that inputs are of about unit size.
    """

    def __init__(self, seed: int = 0, activation: type[nn.Module] = nn.LeakyReLU, **options: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                activation(**options),
                nn.Flatten(),
                nn.Linear(8 * SIDE**2, 128),
                activation(**options),
                nn.Linear(128, 3),
            )
        self.place = InverseCDF(0.0, SPREAD)
        self.light = ConditionalInverseCDF(expected_photons)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """``(samples, 3)``: x, y, photons."""
        outputs = self.body(images / 10)
        position = self.place(outputs[:, :2])
        return torch.cat([position, self.light(outputs[:, 2], position).unsqueeze(1)], dim=1)


def simple_bound(positions: Tensor) -> Tensor:
    """The paper's equation 6, ``BLOB^2 / N``: of either coordinate, ``(samples,)``, in squared pixels."""
    return BLOB**2 / expected_photons(positions[:, 0], positions[:, 1])[0]


def exact_bound(positions: Tensor) -> Tensor:
    """The Cramer-Rao bound of x and y in the pixelated Poisson model, ``(samples, 2)``, in squared pixels.

    The inverse of ``I_ab = sum_pixels d_a mu d_b mu / mu``.
    """
    edges = torch.arange(SIDE + 1, dtype=positions.dtype) - SIDE / 2
    along: list[Tensor] = []
    slopes: list[Tensor] = []
    for axis in (0, 1):
        place = positions[:, axis, None]
        density = torch.exp(-0.5 * ((edges - place) / BLOB).square()) / (BLOB * sqrt(2 * pi))
        along.append(share(place, edges[:-1], edges[1:]))
        slopes.append(density[:, :-1] - density[:, 1:])
    mean = PHOTONS * along[1].unsqueeze(2) * along[0].unsqueeze(1)
    by_x = PHOTONS * along[1].unsqueeze(2) * slopes[0].unsqueeze(1)
    by_y = PHOTONS * slopes[1].unsqueeze(2) * along[0].unsqueeze(1)
    gradients = torch.stack([by_x, by_y], dim=-1).flatten(1, 2)
    mean = mean.flatten(1).clamp(min=torch.finfo(mean.dtype).tiny)
    information = torch.einsum("sp,spa,spb->sab", 1 / mean, gradients, gradients)
    return torch.linalg.inv(information).diagonal(dim1=1, dim2=2)


def van_trees(bound: Tensor) -> Tensor:
    """The bound where the position also has its prior: ``1 / (1 / CRB + 1 / SPREAD^2)``."""
    return 1 / (1 / bound + 1 / SPREAD**2)
