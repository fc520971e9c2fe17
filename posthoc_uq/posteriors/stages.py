"""How surprising stages are: the novelty of a stage's input as the novelty that surprises as much at the last layer.

A stage's ratios have a scale of their own. The ratios of a few hundred training rows, each left out of its own Gram,
make them comparable: quantiles of their log-odds, and beyond the 90 % quantile an exponential tail with their mean
excess. Where a stage is more surprised by an input than the last layer, its ratio counts as the one of the last layer
at the same quantile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.distributed import gather

MAX_ROWS = 512  # training rows that are left out
_LEAST_ROWS = 32  # also where they need more than their budget
_LEVELS = torch.linspace(0, 0.9, 19, dtype=torch.float64, device="cpu")
SCALE_NUMBERS = len(_LEVELS) + 1
_LEAST_TAIL = 0.05  # of log-odds: a stage that is constant in training is no oracle
_LEAST_STEP = 1e-6
_LEFT_OUT = torch.iinfo(torch.int64).max


def log_odds(ratios: Tensor) -> Tensor:
    """``log(r / (1 - r))`` of ratios in (0, 1], finite."""
    rest = (1 - ratios).clamp(min=torch.finfo(ratios.dtype).eps)
    return ratios.log() - rest.log()


def scale_of(ratios: Tensor) -> Tensor:
    """Quantiles of the log-odds of left-out training rows, and the mean excess over the last: ``(20,)``, float64."""
    values = log_odds(ratios.detach().cpu().double())
    quantiles = torch.quantile(values, _LEVELS)
    above = values[values > quantiles[-1]] - quantiles[-1]
    excess = above.mean() if len(above) else values.new_zeros(())
    return torch.cat([quantiles, excess.clamp(min=_LEAST_TAIL).reshape(1)])


def most_surprising(ratios: Tensor, scales: Tensor) -> Tensor:
    """The ratio of the last layer, or the one that is as surprising there as that of the most surprising stage. What
    surprises as much on two scales is found by straight lines between the quantiles, and beyond them.

    Args:
        ratios: of the last layer and of each stage, ``(layers, samples)``.
        scales: of each, from `scale_of`, ``(layers, 20)``.
    """
    values = log_odds(ratios)
    last, own = scales[0], scales[1:].unsqueeze(1)
    at_last, others = values[0], values[1:].unsqueeze(2)
    starts, ends = own[..., :-2], own[..., 1:-1]
    passed = ((others - starts) / (ends - starts).clamp(min=_LEAST_STEP)).clamp(0, 1)
    within = passed @ (last[1:-1] - last[:-2])
    beyond = (others - own[..., -2:-1]).clamp(min=0) * (last[-1] / own[..., -1:])
    before = (others - own[..., :1]).clamp(max=0)
    largest = (last[0] + within + (beyond + before).squeeze(2)).amax(0)
    # comparisons with NaN are false
    return torch.where(largest <= at_last, ratios[0], torch.maximum(largest, at_last).sigmoid())


class KeptRows:
    """The rows with the smallest hashes of their inputs: the same for every batch size, order and number of processes.
    An input that occurs several times is kept once, one that does not count never.

    Args:
        numbers: of one row.
        budget: bytes that the rows may take.
    """

    def __init__(self, numbers: int, budget: int) -> None:
        self._most = max(_LEAST_ROWS, min(MAX_ROWS, budget // (8 * numbers)))
        self._keys = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._rows: list[Tensor] = []

    def add(
        self, keys: Tensor, rows: Sequence[Tensor], weights: Tensor | None, checks: DeferredChecks
    ) -> None:
        """Look at the rows of a batch when the checks run.

        Args:
            keys: hashes of the inputs, ``(samples,)``.
            rows: tensors with a row for each.
            weights: how much each counts.
            checks: of the batch.
        """
        if weights is not None:
            keys = keys.masked_fill((weights <= 0).to(keys.device), _LEFT_OUT)
        checks.add(keys, lambda on_host: self._take(on_host, rows))

    def _take(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        able = keys < (self._keys[-1] if len(self._keys) == self._most else _LEFT_OUT)
        if bool(able.any()):  # in a long sweep hardly any is
            places = able.nonzero().squeeze(1)
            self._merge(keys[places], [part[places.to(part.device)] for part in rows])

    def _merge(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        keys, order = torch.cat([self._keys, keys]).sort(stable=True)
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        self._keys, order = keys[first][: self._most], order[first][: self._most]
        held = self._rows or [part[:0] for part in rows]
        self._rows = [
            torch.cat([old, new])[order.to(new.device)] for old, new in zip(held, rows, strict=True)
        ]

    def result(self) -> list[Tensor]:
        """The rows of all processes, in the order of their hashes; every process must call this."""
        own = self._keys, [part.cpu() for part in self._rows]
        others = gather(own, "gathering rows for the novelty")
        if len(others) > 1:
            device = self._rows[0].device if self._rows else torch.device("cpu")
            self._keys, self._rows = self._keys[:0], []
            for keys, rows in others:
                if len(keys):
                    self._merge(keys, [part.to(device) for part in rows])
        return self._rows
