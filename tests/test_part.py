"""A posterior of the last layer that was fitted on stored features, loaded into the whole network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq


class Net(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = head
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


X = torch.randn(40, 1, 5, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


def head(kind: str) -> nn.Module:
    torch.manual_seed(1)
    one = nn.Linear(36, 3)
    return one if kind == "linear" else nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", ["linear", "perceptron"])
@pytest.mark.parametrize("method", ["inf", "kfac", "full", "utvi"])
@pytest.mark.covering(1)
def test_it_predicts_what_the_part_does(method: str, kind: str, tmp_path: Path) -> None:
    model = Net(head(kind))
    with torch.no_grad():
        features = model.body(X)
    options: dict[str, Any] = (
        {"epochs": 1, "kappa": "learned"} if method == "utvi" else {"prior_precision": 1.5}
    )
    posterior = uq.fit(model.head, [(features, Y)], method, progress=False, **options)
    if method == "kfac":
        names = [*posterior.layers]
        posterior = posterior.with_settings(prior_precision=dict.fromkeys(names, 2.0))
    posterior = uq.calibrate(posterior, [(features, Y)], progress=False)
    uq.save(posterior, tmp_path / "head.h5")
    with pytest.raises(uq.PosteriorMismatchError, match=r"a part of this model, 'head'.*prefix='head'"):
        uq.load(tmp_path / "head.h5", model)
    whole = uq.load(tmp_path / "head.h5", model, prefix="head")
    assert all(name.startswith("head") for name in (*whole.layers, *whole.mean))
    if method == "utvi":
        assert whole.history.fit["kappa"].keys() == whole.layers.keys()
    expected = uq.wrap(model.head, posterior)(features)
    found = uq.wrap(model, whole)(X)
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.novelty(), expected.novelty(), rtol=1e-3, atol=1e-4)
    assert torch.equal(found.set(0.8), expected.set(0.8))
    for other in ("sampling", "moments"):
        two = (
            uq.wrap(*pair, other)(x).probs
            for *pair, x in ((model, whole, X), (model.head, posterior, features))
        )
        torch.testing.assert_close(*two, rtol=1e-4, atol=1e-5)
    uq.save(whole, tmp_path / "whole.h5")
    again = uq.wrap(model, uq.load(tmp_path / "whole.h5", model))(X)
    torch.testing.assert_close(again.probs, found.probs, rtol=1e-5, atol=1e-6)


def test_another_part_or_other_weights_are_refused(tmp_path: Path) -> None:
    model = Net(head("linear"))
    with torch.no_grad():
        features = model.body(X)
    posterior = uq.fit(model.head, [(features, Y)], "diag", prior_precision=1.0, progress=False)
    uq.save(posterior, tmp_path / "head.h5")
    for given, error, said in (
        ({"prefix": "heat"}, uq.PosthocUQError, "'heat' is none; .* Did you mean 'head'"),
        ({"prefix": "body"}, uq.PosteriorMismatchError, "does not belong to this model"),
    ):
        with pytest.raises(error, match=said):
            uq.load(tmp_path / "head.h5", model, **given)
    with torch.no_grad():
        model.head.bias.add_(1.0)  # type: ignore[union-attr, operator]
    for given in ({"prefix": "head"}, {}):
        with pytest.raises(uq.PosteriorMismatchError):
            uq.load(tmp_path / "head.h5", model, **given)
