"""Contractions of which some samples are done again in float64, where two large numbers cancelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.devices import on_host

LEFT = 1e-2
"""Share of the diagonal's part below which float32 has lost too much."""


class Contracted(NamedTuple):
    """What one layer gives, in the shapes of `gram` and in float64.

    Attributes:
        value: ``J Sigma J^T``.
        diagonal: of it, what the diagonal part gives alone.
        norms: ``|J_c|^2``, ``(samples, functions)``, where they were asked for.
    """

    value: Tensor
    diagonal: Tensor
    norms: Tensor | None = None


class Checked(NamedTuple):
    """What one layer gives, of which some samples may have to be done again in float64.

    Attributes:
        value: in the shapes of `gram`, in float64.
        imprecise: which samples these are, ``(samples,)``; None where there is none.
        repeat: does some samples again.
    """

    value: Tensor
    imprecise: Tensor | None
    repeat: Callable[[slice], Tensor]


def settled(layers: Sequence[Checked]) -> list[Tensor]:
    """What several layers give, after one look at the samples that are to be done again."""
    flags = iter(on_host(*(layer.imprecise for layer in layers if layer.imprecise is not None)))
    values: list[Tensor] = []
    for value, imprecise, repeat in layers:
        which: list[int] = [] if imprecise is None else next(flags).nonzero().flatten().tolist()
        if imprecise is not None and len(which) == len(imprecise):
            value = repeat(slice(0, len(imprecise)))
        else:
            for sample in which:
                value[sample : sample + 1] = repeat(slice(sample, sample + 1))
        values.append(value)
    return values


def certain(value: Tensor) -> Checked:
    """A value of which nothing is to be done again."""
    return Checked(value, None, lambda part: value[part])


def joined(parts: list[Contracted]) -> Contracted:
    """The contractions of parts of the samples as one."""
    if len(parts) == 1:
        return parts[0]
    norms = [part.norms for part in parts if part.norms is not None]
    return Contracted(
        torch.cat([part.value for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(norms) if norms else None,
    )
