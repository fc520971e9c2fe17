"""Which head `wrap` takes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import posthoc_uq as uq


def network() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(40, 4)
    return model, [(x, torch.arange(40) % 3)]


def test_the_head_is_recorded_and_another_one_is_met_with_a_warning(tmp_path: Path) -> None:
    model, loader = network()
    x = loader[0][0]
    posterior = uq.fit(model, loader, head="moments", progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.history.head.plain() == {"name": "moments", "options": {}, "criterion": "faithful"}
    assert loaded.history.faithful == posterior.history.faithful and loaded.settings == posterior.settings
    assert torch.equal(uq.wrap(model, loaded)(x).probs, uq.wrap(model, posterior)(x).probs)
    with pytest.warns(UserWarning, match="found for head='moments'"):
        uq.wrap(model, loaded, "sampling")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.wrap(model, loaded)
    loaded = uq.tune(loaded, [x], criterion="faithful", head="sampling", antithetic=True, progress=False)
    predictor = uq.wrap(model, loaded)
    assert predictor.head == "sampling" and predictor.identity()["antithetic"]


def test_options_choose_the_head_that_takes_them() -> None:
    model, loader = network()
    posterior = uq.fit(model, loader, prior_precision=10.0, progress=False)
    assert uq.wrap(model, posterior).head == "linearized"
    assert uq.wrap(model, posterior, n_samples=3).head == "sampling"
    assert uq.wrap(model, posterior, cov="full").head == "moments"
