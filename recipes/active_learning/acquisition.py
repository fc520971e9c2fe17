"""Which point to ask for next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import posthoc_uq as uq

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "uci")
)  # the sets and the network are that recipe's

from data import Split, Table, split

RANKS: dict[str, float | int] = {"INF 20%": 0.2, "INF 50%": 0.5, "INF 100%": 10**9}
STRATEGIES = ("random", *RANKS)


class Pool(NamedTuple):
    """One split: rows that may be asked for, and rows to test on; targets standardised by the first rows alone.

    Attributes:
        rows: the first of them are known at the start.
        test: held out throughout.
        scale: of the targets, in the data's units.
    """

    rows: Table
    test: Table
    scale: float


def pool(table: Table, seed: int, start: int, test: int = 100) -> Pool:
    """A random split whose targets are standardised by the `start` rows that are known at the beginning.

    Inputs are standardised by all rows that may be asked for: their inputs are known.
    """
    part: Split = split(table, seed, test)
    known = part.train.targets[:start]
    centre, spread = known.mean(), known.std()
    rows, held = (t._replace(targets=(t.targets - centre) / spread) for t in (part.train, part.test))
    return Pool(rows, held, part.scale * float(spread))


def information_gain(
    model: nn.Module,
    known: Table,
    candidates: Tensor,
    rank: float | int,
    noise: float,
    prior_precision: float,
) -> Tensor:
    """``1/2 log(1 + J P^-1 J^T / noise)`` of every candidate, (candidates,), in nats: the total information gain of
    MacKay (1992), "Information-based objective functions for active data selection".

    ``P`` is INF's precision of the weights at this rank, and ``J`` the gradient of the network's output.

    Args:
        model: trained on `known` with this noise and prior precision.
        known: inputs and targets of the posterior.
        candidates: (candidates, columns).
        rank: of INF.
        noise: variance of the targets given the network.
        prior_precision: of every weight.
    """
    posterior = uq.fit(
        model,
        [(known.inputs, known.targets.unsqueeze(1))],
        method="inf",
        rank=rank,
        correction="rescale",
        likelihood="regression",
        fisher="exact",
        noise_variance=noise,
        prior_precision=prior_precision,
        progress=False,
    )
    with torch.no_grad():
        variance = uq.wrap(model, posterior, head="linearized").functional_variance(candidates)
    return 0.5 * torch.log1p(variance.flatten() / noise)
