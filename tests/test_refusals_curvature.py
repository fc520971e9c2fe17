"""What a sweep over the data refuses: data that cannot be read again, labels that are not there, too large matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

from posthoc_uq import NonFiniteError

X, Y = inputs(), labels()
WIDE = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3))
RELU = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
INFINITE = torch.where(torch.arange(48).reshape(12, 4) == 46, float("inf"), X)


def split(x: Tensor = X) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(5), Y.split(5), strict=True))


class Shrinks:
    """A loader that gives fewer samples from the second time on."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return iter(split()[: 3 if self.reads < 2 else 2])


ROWS = {
    "data once": Row(lambda: fit(loader=iter(split()), method="inf"), "read only once.*DataLoader"),
    "fewer samples": Row(lambda: fit(loader=Shrinks(), method="efb"), "12 samples .* and 10 when"),
    "too large": Row(lambda: fit(WIDE, method="full"), r"\(12 GiB\).*method='inf'"),
    "half precision": Row(lambda: fit(dtype=torch.float16), "torch.float64"),
    "infinite inputs": Row(lambda: fit(RELU, split(INFINITE)), "Batch 2: ", NonFiniteError),
    "in inference mode": Row(torch.inference_mode()(lambda: fit(net())), "call fit outside"),
    # labels of the Fisher
    "n_samples without draws": Row(lambda: fit(n_samples=3, fisher="exact"), "n_samples"),
    "no labels": Row(lambda: fit(loader=[X], fisher="empirical"), "needs labels"),
    "no labels for the evidence": Row(lambda: fit(loader=[X]).log_marginal_likelihood(), "no labels"),
}


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
