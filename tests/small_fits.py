"""A small network, its data, and what a refusal looks like, for tests of what users may pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from refusals import Row, hold
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import PosthocUQError

HEADS = ("linearized", "sampling", "moments")


def net(*last: nn.Module, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs), *last)


def inputs(samples: int = 12) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    return torch.arange(12) % 3


def fit(model: nn.Module | None = None, loader: Any = None, **options: Any) -> uq.Posterior:
    data = [(inputs(), labels())] if loader is None else loader
    settings: dict[str, Any] = {"prior_precision": 1.0, "progress": False, "method": "diag"} | options
    return uq.fit(net() if model is None else model, data, **settings)


def refused(
    message: str,
    call: Callable[[], Any],
    kind: type[PosthocUQError] = PosthocUQError,
    cause: type[BaseException] | None = None,
) -> None:
    """An error of this kind that says this, in one readable piece."""
    hold(Row(call, message, kind, cause))
