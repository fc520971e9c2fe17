"""Small networks, data and loaders that several test files share. Everything is made on the CPU from seeds of its own.

Registries are read here too, so that a test that means every method, likelihood or head does not list them by hand.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import sample_keys
from posthoc_uq.heads import HEADS
from posthoc_uq.likelihoods import LIKELIHOODS as REGISTERED
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.methods import METHODS, Method
from posthoc_uq.posteriors import BLOCKS, FAMILIES

# Methods, likelihoods, heads


def steady(progress: float) -> float:
    """A schedule of rates that does not depend on how long a training is."""
    return 1.0


SHORT: dict[str, Any] = {
    "epochs": 1,
    "n_context": 3,
    "val_draws": 2,
    "rank": 6,
    "schedule": steady,
    "warm_up": 0.0,
}
"""Values of options that make a fit short, for every method that has an option of the name."""


def short(name: str, **options: Any) -> Method:
    """A method with settings that are quick, and these options."""
    kind = METHODS[name]
    own = {field.name for field in fields(kind)}
    return kind(**{option: value for option, value in SHORT.items() if option in own} | options)


def short_options(name: str) -> dict[str, Any]:
    """The settings of `short`, to be passed with the method's name."""
    own = {field.name for field in fields(METHODS[name])}
    return {option: value for option, value in SHORT.items() if option in own}


def without_training() -> list[str]:
    """The names of the methods that sum up the data in any order, whose posteriors have a prior precision."""
    return [name for name in METHODS if not short(name).trains]


def fitted_layers(name: str, *names: str) -> list[str]:
    """Which of a model's layers the method treats by itself: all, or the last."""
    return list(names[-1:] if short(name).selection(None) == "last" else names)


def can(posterior: uq.Posterior, *needs: str) -> bool:
    """Whether the posterior's blocks have all these capabilities."""
    return posterior.capabilities.issuperset(needs)


def heads_of(posterior: uq.Posterior) -> list[str]:
    """The heads that can serve it."""
    return [head for head in HEADS if can(posterior, *HEADS[head].needs)]


@contextmanager
def registries_restored() -> Generator[None]:
    """Within it, methods, heads and classes of blocks may be registered that are not to stay."""
    tables = [(table, dict(table)) for table in (METHODS, FAMILIES, BLOCKS, HEADS)]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


LIKELIHOODS: list[str] = [*REGISTERED]
"""The names of the package's likelihoods."""


def takes_likelihood(name: str, likelihood: str) -> bool:
    """Whether the method can fit this likelihood."""
    known = METHODS[name].likelihoods
    return known is None or likelihood in known


def outputs_for(likelihood: Likelihood) -> int:
    """A number of outputs that the likelihood takes: 3 if it can be, else 2."""
    for outputs in (3, 2, 1):
        try:
            likelihood.check(torch.zeros(2, outputs, device="cpu"), None)
        except uq.PosthocUQError:
            continue
        return outputs
    raise AssertionError(f"{likelihood.name} takes neither 3 outputs nor 2 nor 1")


# Networks


def mlp(outputs: int = 3, *, inputs: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two linear layers; 43 weights with three outputs."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype).eval()


class ConvNet(nn.Module):
    """For images ``(1, 4, 4)``: BatchNorm with statistics of its own, an activation in place, dropout."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.body(x).flatten(1)))


def cnn(outputs: int = 3, *, dtype: torch.dtype = torch.float32) -> ConvNet:
    """A `ConvNet` with fixed weights."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = ConvNet(outputs)
        model(torch.randn(16, 1, 4, 4))  # running statistics that are not those of the start
    return model.to(dtype).eval()


# Data


def inputs_of(*shape: int, samples: int = 24, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal inputs ``(samples, *shape)``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64).to(dtype)


def targets_of(model: nn.Module, x: Tensor, likelihood: str) -> Tensor:
    """Targets drawn from what the model predicts for inputs."""
    with torch.no_grad():
        outputs = model(x)
    return resolve_likelihood(likelihood).draw(outputs, sample_keys([x], len(x), 0), 0)


def batches(x: Tensor, y: Tensor, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Pairs of so many samples."""
    return list(zip(x.split(size), y.split(size), strict=True))


class Counted:
    """A loader that counts the passes that came to its end."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.passes = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        yield from self.data
        self.passes += 1


class Stops:
    """A loader that fails after some batches of all passes together."""

    def __init__(self, data: Iterable[Any], after: int, error: BaseException | None = None) -> None:
        self.data, self.left = list(data), after
        self.error = RuntimeError("stopped") if error is None else error

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            if self.left == 0:
                raise self.error
            self.left -= 1
            yield batch
