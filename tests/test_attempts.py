"""A shorter way that a model cannot take is left; an error of the model, or want of memory, reaches the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, targets_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.errors import check_refused, out_of_memory


class OwnError(Exception):
    """Of the model."""


class FailingLayer(nn.Linear):
    """Fails in the middle of one of its passes, which leaves that copy half written; all copies count together."""

    passes, fatal = 0, 0
    error: Exception = OwnError()
    depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        FailingLayer.passes += 1
        if FailingLayer.passes == FailingLayer.fatal:
            raise FailingLayer.error
        outputs = super().forward(x * self.depth)
        self.depth -= 1
        return outputs


def failing() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), FailingLayer(32, 2))


ERRORS = [
    OwnError("of its own"),
    torch.OutOfMemoryError("out of memory"),
    RuntimeError("can't allocate memory"),
]


def passes_of(call: Callable[[], Any]) -> int:
    """How often a call runs the model."""
    FailingLayer.passes, FailingLayer.fatal = 0, 0
    call()
    return FailingLayer.passes


def reaches(call: Callable[[], Any], fatal: int, error: Exception) -> bool:
    """Whether the error of a pass comes out of the call."""
    FailingLayer.passes, FailingLayer.fatal, FailingLayer.error = 0, fatal, error
    found: BaseException | None = None
    try:
        call()
    except Exception as raised:
        found = raised
    finally:
        FailingLayer.fatal = 0
    while found is not None and found is not error:
        found = found.__cause__
    return found is error


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_fit_swallows_no_error_of_the_model(error: Exception) -> None:
    x, model = inputs_of(4), failing()
    loader = batches(x, targets_of(model, x, "regression"))

    def fit() -> None:
        uq.fit(model, loader, likelihood="regression", layers="last", progress=False)

    passes = passes_of(fit)
    assert passes > 5
    assert [fatal for fatal in range(1, passes + 1) if not reaches(fit, fatal, error)] == []
    assert model[2].depth == 0


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("options", [{"batched": True}, {"batched": False}], ids=str)
def test_a_prediction_swallows_no_error_and_is_right_after_one(
    error: Exception, layers: str, options: dict[str, Any]
) -> None:
    x, model = inputs_of(4), failing()
    posterior = uq.fit(model, [x], layers=layers, prior_precision=1.0, progress=False)
    expected = uq.wrap(model, posterior, "sampling", n_samples=4, **options).outputs(x)
    passes = passes_of(lambda: uq.wrap(model, posterior, "sampling", n_samples=4, **options).outputs(x))
    for fatal in range(1, passes + 1):
        predictor = uq.wrap(model, posterior, "sampling", n_samples=4, **options)
        assert reaches(lambda own=predictor: own.outputs(x), fatal, error), fatal
        for _ in range(2):
            torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-5, rtol=1e-5)
        assert predictor.ensemble.refused is None and predictor.ensemble.frozen.refused is None


def test_a_refusal_fails_twice_where_the_plain_way_works() -> None:
    done: list[str] = []

    def fails() -> None:
        done.append("again")
        raise ValueError

    error = ValueError("the first")
    check_refused(error, fails, lambda: done.append("plainly"))
    assert done == ["plainly", "again"]
    with pytest.raises(ValueError, match="the first"):
        check_refused(error, lambda: None, lambda: None)
    with pytest.raises(ZeroDivisionError):
        check_refused(error, fails, lambda: 1 / 0)
    for none_left in (*ERRORS[1:], MemoryError()):
        assert out_of_memory(none_left)
        with pytest.raises(type(none_left)):
            check_refused(none_left, fails, lambda: None)
    assert done == ["plainly", "again"] and not out_of_memory(error)
