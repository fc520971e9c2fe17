"""The library's fits, and their times in multiples of the plain pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from _cases import Batches, plain_pass
from _harness import seconds
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core.batches import BatchReader
from posthoc_uq.layers import proof
from posthoc_uq.posteriors.posterior import Posterior

Options = Mapping[str, Any]
METHODS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "kfac": {"method": "kfac"},
    "efb": {"method": "efb"},
    "inf": {"method": "inf"},
    "inf, bases of a tenth": {"method": "inf", "basis_fraction": 0.1},
    "inf, exact basis": {"method": "inf", "basis": "exact"},
    "inf, labels auto": {"method": "inf", "fisher": "auto"},
    "inf, sketch": {"method": "inf", "basis": "sketch"},
    "inf, last layer": {"method": "inf", "layers": "last"},
    "full": {"method": "full"},
    "full, last layer": {"method": "full", "layers": "last"},
}
DENSE_LIMIT = 5_000
"""Parameters up to which the dense posterior is measured; it takes the square of their number."""
SWEEPS = ("bases", "eigenvalues and diagonal", "Kronecker factors", "eigenvalues", "diagonal", "Fisher")
FIXED = ("eigenbases", "blocks")
"""Names under which a fit's history keeps its times."""


def methods_for(model: nn.Module, batches: Batches) -> list[str]:
    """The methods that make sense for a network: the dense posterior only where it is small."""
    with torch.no_grad():
        classes = model(batches[0][0][:1]).shape[1]
    weights = sum(p.numel() for p in model.parameters())
    last = next(p for p in reversed(list(model.parameters())) if p.ndim == 2).numel() + classes
    too_large = {"full"} if weights > DENSE_LIMIT else set[str]()
    too_large |= {"full, last layer"} if last > DENSE_LIMIT else set[str]()
    return [name for name in METHODS if name not in too_large]


def fitted(model: nn.Module, batches: Batches, options: Options) -> Posterior:
    """A fit without the evidence, and with one drawn label a sample unless the options say otherwise."""
    return uq.fit(model, batches, prior_precision=1.0, progress=False, **{"fisher": "mc"} | dict(options))


def dry(model: nn.Module, batches: Batches) -> None:
    """What every fit does once, on the first samples, to prove that no layer's gradient is missed."""
    proof.prepare(model, BatchReader(torch.device("cpu")).read(batches[0]))


def saved_bytes(posterior: Posterior) -> int:
    """What the posterior's numbers take in a float32 file, its header aside."""
    return 4 * sum(block.numbers() for block in posterior.blocks.values())


class Trial(NamedTuple):
    """One repeat of one method, in seconds."""

    plain: float
    fit: float
    sweeps: float
    fixed: float

    def __str__(self) -> str:
        return (
            f"plain {self.plain:.2f} s, fit {self.fit:.2f} s (sweeps {self.sweeps:.2f} s, "
            f"eigenbases and blocks {self.fixed:.2f} s)"
        )


def trial(model: nn.Module, batches: Batches, options: Options) -> Trial:
    """Time one fit between two plain passes."""
    before, _ = seconds(lambda: plain_pass(model, batches))
    fit, posterior = seconds(lambda: fitted(model, batches, options))
    after, _ = seconds(lambda: plain_pass(model, batches))
    times = posterior.history.fit
    return Trial(
        (before + after) / 2,
        fit,
        sum(times.get(f"seconds, {name}", 0.0) for name in SWEEPS),
        sum(times.get(f"seconds, {name}", 0.0) for name in FIXED),
    )
