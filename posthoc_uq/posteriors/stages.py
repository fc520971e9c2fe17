"""How surprising an input is to several layers, as one novelty.

A stage's ratios have a scale of their own. The ratios of a few hundred training rows, each left out of its own Gram,
make them comparable: a surprise is the negative logarithm of the share of these rows that are at least as novel, by
quantiles of their log-odds, and beyond the 90 % quantile by an exponential tail with their mean excess. The surprises
of all layers join as the sides of a box do to its diagonal.

A few hundred rows do not tell how rare larger surprises are, and inputs that differ from the training rows in one
respect, such as those of a network that is fitted on noisy copies, all surprise a stage. So beyond `_TRUSTED` nats a
stage's surprise grows like a logarithm: what it says of all alike hides little of what other layers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.distributed import gather

MAX_ROWS = 512  # training rows that are left out
_LEAST_ROWS = 32  # also where they need more than their budget
_LEVELS = torch.linspace(0, 0.9, 19, dtype=torch.float64, device="cpu")
_STEP = 0.05  # from one level to the next
_TAIL = log(10)  # the surprise at the 90 % quantile
_TRUSTED = 4.0  # nats, at which 2 % of the training rows are
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


def joined(ratios: Tensor, scales: Tensor) -> Tensor:
    """The ratio that is as surprising at the last layer as the input is to all layers together: never below the last
    layer's own, and equal to it where no stage is surprised.

    Args:
        ratios: of the last layer and of each stage, ``(layers, samples)``.
        scales: of each, from `scale_of`, ``(layers, 20)``.
    """
    values = log_odds(ratios)
    surprises = _surprises(values, scales)
    last, stages = surprises[0], surprises[1:]
    tamed = stages.clamp(max=_TRUSTED) + (stages - _TRUSTED).clamp(min=0).log1p()
    total = torch.linalg.vector_norm(torch.cat([last.unsqueeze(0), tamed]), dim=0)
    found = torch.maximum(_at(total, scales[0]).sigmoid(), ratios[0])
    # comparisons with NaN are false
    return torch.where(tamed.amax(0) <= 0, ratios[0], found)


def _surprises(values: Tensor, scales: Tensor) -> Tensor:
    """Of log-odds ``(layers, samples)``, the level by straight lines between the quantiles."""
    quantiles, excess = scales[:, None, :-1], scales[:, -1:]
    steps = (quantiles[..., 1:] - quantiles[..., :-1]).clamp(min=_LEAST_STEP)
    passed = ((values.unsqueeze(2) - quantiles[..., :-1]) / steps).clamp(0, 1)
    return (values - quantiles[..., -1]).clamp(min=0) / excess - (-_STEP * passed.sum(2)).log1p()


def _at(surprises: Tensor, scale: Tensor) -> Tensor:
    """The log-odds that are as surprising as this on a layer's scale, ``(samples,)``: the inverse of `_surprises`."""
    quantiles, excess = scale[:-1], scale[-1]
    shares = -(-surprises).expm1()  # of training rows that are less novel
    starts = torch.arange(len(quantiles) - 1, device="cpu").to(scale)
    passed = (shares.unsqueeze(1) / _STEP - starts).clamp(0, 1)
    return quantiles[0] + passed @ quantiles.diff() + (surprises - _TAIL).clamp(min=0) * excess


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
