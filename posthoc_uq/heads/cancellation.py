"""Contractions in float32 whose samples are computed again in float64 where two large numbers cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.devices import on_host

LEAST_SHARE = 1e-2
"""Share of the diagonal's part that must be left: below it float32 has lost too many digits."""

_MANY = 1000  # of more samples, all are repeated where a quarter is imprecise


class Contracted(NamedTuple):
    """One layer's contraction, in the shapes of `gram` and in float64.

    Attributes:
        value: ``J Sigma J^T``.
        diagonal: what the diagonal part of Sigma gives alone.
        norms: ``|J_c|^2``, ``(samples, functions)``, or None.
    """

    value: Tensor
    diagonal: Tensor
    norms: Tensor | None = None


class Checked(NamedTuple):
    """One layer's contraction, of which some samples may have to be computed again in float64.

    Attributes:
        value: in the shapes of `gram`, in float64.
        imprecise: which samples these are, booleans ``(samples,)``; None where no sample is.
        repeat: computes a slice of the samples again, in float64.
    """

    value: Tensor
    imprecise: Tensor | None
    repeat: Callable[[slice], Tensor]


def precise_values(layers: Sequence[Checked]) -> list[Tensor]:
    """The values of several layers, with imprecise samples computed again; the device is waited for once."""
    flags = iter(on_host(*(layer.imprecise for layer in layers if layer.imprecise is not None)))
    values: list[Tensor] = []
    for value, imprecise, repeat in layers:
        which: list[int] = [] if imprecise is None else next(flags).nonzero().flatten().tolist()
        if imprecise is not None and (
            len(which) == len(imprecise) or 4 * len(which) > len(imprecise) > _MANY
        ):
            value = repeat(slice(0, len(imprecise)))
        else:
            for part in _runs(which):
                value[part] = repeat(part)
        values.append(value)
    return values


def _runs(numbers: Sequence[int]) -> Iterator[slice]:
    """Increasing whole numbers as slices of those that follow each other."""
    start: int | None = None
    for place, number in enumerate(numbers):
        start = number if start is None else start
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield slice(start, number + 1)
            start = None


def precise(value: Tensor) -> Checked:
    """A value of which no sample is imprecise."""
    return Checked(value, None, lambda part: value[part])


def joined(parts: list[Contracted]) -> Contracted:
    """Contractions of successive parts of the samples as one."""
    if len(parts) == 1:
        return parts[0]
    norms = [part.norms for part in parts if part.norms is not None]
    return Contracted(
        torch.cat([part.value for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(norms) if norms else None,
    )
