"""A float last layer behind a body that torch cannot differentiate: int8, TorchScript, stored features."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import posthoc_uq as uq
from posthoc_uq.files import fingerprint

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def quantised(body: nn.Module) -> Any:
    return torch.ao.quantization.quantize_dynamic(body, {nn.Linear}, dtype=torch.qint8)


BODIES: dict[str, Any] = {
    "int8": quantised,
    "scripted": torch.jit.script,
    "frozen": lambda body: torch.jit.freeze(torch.jit.script(body.eval())),
    "traced": lambda body: torch.jit.trace(body, X),
}


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU()), nn.Linear(12, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls both deprecated
        return nn.Sequential(BODIES[kind](body), head).eval()


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model[0](x)


@pytest.mark.parametrize("kind", BODIES)
def test_it_is_the_posterior_of_the_last_layer_on_its_features(kind: str, tmp_path: Path) -> None:
    """Also where nobody names the layers; whole numbers are rounded by the largest of a batch."""
    model = network(kind)
    options: dict[str, Any] = {"fisher": "exact", "prior_precision": 1.0, "progress": False}
    of_head = uq.fit(model[1], [(features(model, X), Y)], "inf", **options)
    expected = uq.wrap(model[1], of_head)(features(model, X))
    for layers in ({"layers": "last"}, {}):
        posterior = uq.fit(model, [(X, Y)], **options | layers)
        assert [*posterior.mean] == ["1.weight", "1.bias"]
    uq.save(posterior, tmp_path / "p.h5")
    found = uq.wrap(model, uq.load(tmp_path / "p.h5", model))(X)
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.novelty(), expected.novelty(), rtol=1e-3, atol=1e-4)
    uq.save(of_head, tmp_path / "head.h5")
    whole = uq.load(tmp_path / "head.h5", model, prefix="1")
    for head in ("sampling", "moments"):
        torch.testing.assert_close(
            uq.wrap(model, whole, head)(X).probs,
            uq.wrap(model, posterior, head)(X).probs,
            rtol=1e-3,
            atol=1e-4,
        )


def test_the_fingerprint_of_a_tensor_made_of_others() -> None:
    one, two = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    both = [fingerprint({"w": TwoTensor(a, b)}) for a, b in ((one, two), (one, one), (two, one), (one, two))]
    assert both[0] == both[3] and len({*both}) == 3
