"""What a sweep over the data refuses: numbers and matrices that are too large, labels that are not there."""

from __future__ import annotations

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import nn

from posthoc_uq import NonFiniteError

X, Y = inputs(), labels()
WIDE = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3))
RELU = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
INFINITE = torch.where(torch.arange(48).reshape(12, 4) == 46, float("inf"), X)

ROWS = {
    "too large": Row(lambda: fit(WIDE, method="full"), r"\(12 GiB\).*method='inf'"),
    "half precision": Row(lambda: fit(dtype=torch.float16), "torch.float64"),
    "infinite inputs": Row(lambda: fit(RELU, [(X, Y), (X, Y), (INFINITE, Y)]), "Batch 2: ", NonFiniteError),
    "in inference mode": Row(torch.inference_mode()(lambda: fit(net())), "call fit outside"),
    # labels of the Fisher
    "n_samples without draws": Row(lambda: fit(n_samples=3, fisher="exact"), "n_samples"),
    "no labels": Row(lambda: fit(loader=[X], fisher="empirical"), "needs labels"),
    "no labels for the evidence": Row(lambda: fit(loader=[X]).log_marginal_likelihood(), "no labels"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
