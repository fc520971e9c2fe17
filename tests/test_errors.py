"""Warnings point at the user's line, and an error of the model reaches its caller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp, targets_of
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import check_refused, out_of_memory

X, Y = inputs(), labels()


def test_numbers_of_a_posterior() -> None:
    posterior = fit(prior_precision=torch.tensor([3.0]))
    assert posterior.prior_precision == 3.0
    posterior = posterior.with_settings(prior_precision={"0": torch.tensor(1.0), "2": 3.0})
    assert posterior.prior_precision == {"0": 1.0, "2": 3.0} and posterior.layer_prior("2") == 3.0


def _few_steps() -> Any:
    return uq.fit(net(), [(X, Y)], uq.FunctionSpace(epochs=1), progress=False)


def _no_targets() -> Any:
    return uq.fit(net(), [X], likelihood="regression", prior_precision=1.0, progress=False)


def _probabilities() -> Any:
    model = nn.Sequential(net(), nn.Softmax(1))
    return uq.fit(model, [(X, Y)], likelihood=uq.Categorical(), prior_precision=1.0, progress=False)


def _another_head() -> Any:
    model = net()
    return uq.wrap(model, uq.fit(model, [(X, Y)], progress=False), "moments")


def _exported() -> Any:
    model = net()
    posterior = uq.fit(model, [(X, Y)], prior_precision=1.0, progress=False)
    return uq.export(uq.wrap(model, posterior, "linearized"), X)


@pytest.mark.parametrize("call", [_few_steps, _no_targets, _probabilities, _another_head, _exported])
@pytest.mark.only("_few_steps", "_no_targets", "_probabilities", "_another_head")
def test_a_warning_names_the_line_that_called_the_library(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    own = [w for w in caught if w.category is UserWarning]
    assert own and {w.filename for w in own} == {__file__}


class OwnError(Exception):
    """Of the model."""


class Failing(nn.Module):
    """Fails in the middle of one of its passes, which leaves that copy half written; all copies count together."""

    passes, fatal = 0, 0
    error: Exception = OwnError()

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Sequential(nn.Linear(4, 32), nn.Tanh()), nn.Linear(32, 2)
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        hidden = self.body(x)
        Failing.passes += 1
        if Failing.passes == Failing.fatal:
            raise Failing.error
        outputs = self.head(hidden) * self.depth
        self.depth -= 1
        return outputs


ERRORS = [
    OwnError("of its own"),
    torch.OutOfMemoryError("out of memory"),
    RuntimeError("can't allocate memory"),
]


def passes_of(call: Callable[[], Any]) -> int:
    """How often a call runs the model."""
    Failing.passes, Failing.fatal = 0, 0
    call()
    return Failing.passes


def reaches(call: Callable[[], Any], fatal: int, error: Exception) -> bool:
    """Whether the error of a pass comes out of the call."""
    Failing.passes, Failing.fatal, Failing.error = 0, fatal, error
    found: BaseException | None = None
    try:
        call()
    except Exception as raised:
        found = raised
    finally:
        Failing.fatal = 0
    while found is not None and found is not error:
        found = found.__cause__
    return found is error


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_fit_swallows_no_error_of_the_model(error: Exception) -> None:
    x, model = inputs_of(4), Failing()
    loader = batches(x, targets_of(model, x, "regression"), 12)

    def fitted() -> None:
        uq.fit(model, loader, likelihood="regression", layers="last", progress=False)

    passes = passes_of(fitted)
    assert passes > 5
    assert [fatal for fatal in range(1, passes + 1) if not reaches(fitted, fatal, error)] == []
    assert model.depth == 0


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("options", [{"batched": True}, {"batched": False}], ids=str)
@pytest.mark.covering(2)
def test_a_prediction_swallows_no_error_and_is_right_after_one(
    error: Exception, layers: str, options: dict[str, Any]
) -> None:
    x, model = inputs_of(4), Failing()
    posterior = uq.fit(model, [x], layers=layers, prior_precision=1.0, progress=False)
    without = uq.wrap(model, posterior, "sampling", n_samples=4, **options)
    expected = without.outputs(x)
    passes = passes_of(lambda: uq.wrap(model, posterior, "sampling", n_samples=4, **options).outputs(x))
    for fatal in range(1, passes + 1):
        predictor = uq.wrap(model, posterior, "sampling", n_samples=4, **options)
        assert reaches(lambda own=predictor: own.outputs(x), fatal, error), fatal
        for _ in range(2):
            torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-5, rtol=1e-5)
        assert predictor.ensemble.refused is None  # no shorter way is given up for an error
        assert predictor.ensemble.frozen.refused == without.ensemble.frozen.refused


def test_what_a_model_refuses_is_said() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 64), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            return self.head(hidden + 0 * torch.rand(1) * float(hidden.sum() != 3))

    with torch.random.fork_rng():
        model = Noisy()
        posterior = uq.fit(model, [inputs_of(4)], layers="last", prior_precision=1.0, progress=False)
        predictor = uq.wrap(model, posterior, "sampling", n_samples=30, batched=False)
        predictor(inputs_of(4))
    assert "whole passes (the model draws random numbers)" in repr(predictor)


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


def test_every_error_is_a_value_error_and_keeps_its_kind(tmp_path: Path) -> None:
    """Where the package catches a `ValueError` of others, its own ones go through as they are."""
    model, x = mlp(), inputs_of(4)
    with pytest.raises(ValueError, match="prior_precision must be"):
        uq.fit(model, [x], "diag", prior_precision=-1.0, progress=False)
    posterior = uq.fit(model, [x], "diag", prior_precision=1.0, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    with pytest.raises(uq.PosteriorMismatchError, match="numbers or their dtype do not"):
        uq.load(tmp_path / "p.h5", mlp().double())
    with pytest.raises(uq.PosthocUQError, match="is a folder"):
        uq.save(posterior, tmp_path)
