"""What users of torch do to modules, done to a predictor: it does what they expect, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import mlp, short
from torch import nn

import posthoc_uq as uq
from posthoc_uq import Predictor

HEADS = ("linearized", "sampling", "moments")
pytestmark = pytest.mark.filterwarnings("ignore:The posterior's prior precision was found")


def _fitted(method: str = "diag") -> tuple[nn.Module, uq.Posterior, torch.Tensor]:
    model, generator = mlp(), torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    options: dict[str, Any] = {} if method == "utvi" else {"prior_precision": 1.0}
    loader = [(x, torch.arange(24) % 3)]
    return model, uq.fit(model, loader, short(method), progress=False, **options), x


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


@pytest.mark.parametrize("method", ["diag", "utvi"])
@pytest.mark.parametrize("head", HEADS)
def test_what_walks_over_modules_reaches_neither_model_nor_posterior(head: str, method: str) -> None:
    model, posterior, x = _fitted(method)
    predictor = uq.wrap(model, posterior, head)
    before, mean = predictor(x).probs, {name: m.clone() for name, m in posterior.mean.items()}
    around = nn.Sequential(predictor, nn.Linear(2, 2))
    predictor.apply(_zero)
    around.apply(_zero).requires_grad_(False).train()
    assert list(around.state_dict()) == ["1.weight", "1.bias"]
    around.load_state_dict(around.state_dict())
    assert not list(predictor.parameters()) and not list(predictor.buffers())
    assert all(torch.equal(posterior.mean[name], kept) for name, kept in mean.items())
    assert torch.equal(predictor(x).probs, before) and all(p.requires_grad for p in model.parameters())


REFUSED: dict[str, Callable[[Predictor], Any]] = {
    "computes in float32": lambda p: p.half(),
    "cannot be moved to torch.bfloat16": lambda p: nn.Sequential(p).bfloat16(),
    "the meta device": lambda p: p.to("meta"),
    "cannot be emptied": lambda p: p.to_empty(device="cpu"),
    "has no state dict": lambda p: p.state_dict(),
    "no state to load": lambda p: p.load_state_dict({}),
    "torch.jit.script cannot take": lambda p: torch.jit.script(p),
    "cannot be traced": lambda p: torch.jit.trace(p, (torch.zeros(2, 4),)),
    "cannot be traced: uq.export": lambda p: torch.fx.symbolic_trace(p),
    "be traced: uq.export": lambda p: torch.export.export(p, (torch.zeros(2, 4),), strict=False),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_no_predictor_can_do_is_refused_and_changes_nothing(head: str) -> None:
    model, posterior, x = _fitted()
    predictor = uq.wrap(model, posterior, head)
    before = predictor(x).probs
    for message, act in REFUSED.items():
        with pytest.raises(uq.PosthocUQError, match=message):
            act(predictor)
    assert torch.equal(predictor(x).probs, before)
    doubled = predictor.double()(x.double()).probs
    torch.testing.assert_close(doubled.float(), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_compiled_predictor_is_the_plain_one(head: str) -> None:
    model, posterior, x = _fitted()
    predictor = uq.wrap(model, posterior, head)
    compiled: Any = torch.compile(predictor, backend="eager")
    around: Any = torch.compile(lambda x: 2 * predictor(x).probs, backend="eager")
    for count in (4, 7):
        plain = predictor(x[:count]).probs
        assert torch.equal(compiled(x[:count]).probs, plain) and torch.equal(around(x[:count]), 2 * plain)
    with torch.no_grad():
        next(model.parameters()).add_(0.3)
    for call in (compiled, around):
        with pytest.raises(uq.PosteriorMismatchError, match=r"changed after uq\.wrap"):
            call(x)
