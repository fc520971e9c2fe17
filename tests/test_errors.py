"""A user's mistakes: each is one exception of ours, whose message names what is wrong and the way out.

Warnings point at the user's line, and an error of the model reaches its caller.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from networks import batches, inputs_of, targets_of
from small_fits import fit, inputs, labels, net, refused
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, PosteriorMismatchError, PosthocUQError
from posthoc_uq.core import check_refused, out_of_memory


def split(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(5), y.split(5), strict=True))


def with_numbers(value: float) -> Tensor:
    x = inputs()
    x[11, 2] = value
    return x


def changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    return model


class Shrinks:
    """A loader that gives fewer samples from the second time on."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return iter(split(inputs(), labels())[: 3 if self.reads < 2 else 2])


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum(0)


X, Y = inputs(), labels()
REGRESSION: dict[str, Any] = {"likelihood": "regression", "model": net(outputs=2)}
BINARY: dict[str, Any] = {"likelihood": "binary", "model": net(outputs=1)}
WIDE = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3))
RELU = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
POSTERIOR = fit()
PREDICTOR = cast(Any, uq.wrap(net(), POSTERIOR))
LAYERS = {"0": 1.0, "2": 1.0}


def set_prior(value: Any) -> None:
    fit().with_settings(prior_precision=value)


# what is called, the error, and a key word of it; what every method refuses is in test_conformance_faults.py, values of
# wrong kinds are in test_options.py
MISTAKES: dict[str, tuple[Callable[[], Any], type[PosthocUQError], str]] = {
    # of a fit
    "data once": (lambda: fit(loader=iter(split(X, Y)), method="inf"), PosthocUQError, "read only once.*DataLoader"),
    "fewer samples": (lambda: fit(loader=Shrinks(), method="efb"), PosthocUQError, "12 samples .* and 10 when"),
    "no layer": (lambda: fit(nn.BatchNorm1d(4)), PosthocUQError, "no Linear or convolution layer"),
    "no parameters": (lambda: fit(nn.Flatten()), PosthocUQError, "no parameters"),
    "too large": (lambda: fit(WIDE, method="full"), PosthocUQError, r"\(12 GiB\).*method='inf'"),
    "n_samples without draws": (lambda: fit(n_samples=3, fisher="exact"), PosthocUQError, "n_samples"),
    "a prior by layer": (lambda: fit(prior_precision=LAYERS), PosthocUQError, "one number for all layers"),
    "half precision": (lambda: fit(dtype=torch.float16), PosthocUQError, "torch.float64"),
    "noise twice": (lambda: fit(likelihood=uq.Gaussian(0.3), noise_variance=0.1), PosthocUQError, "its own noise"),
    "noise that depends on inputs": (
        lambda: fit(noise_variance=lambda x: x, **REGRESSION),  # type: ignore[arg-type]
        PosthocUQError,
        "noise_variance must be a number",
    ),
    # of labels and outputs
    "labels of another type": (lambda: fit(loader=[(X, Y.float())]), PosthocUQError, "integers of shape"),
    "labels in a column": (lambda: fit(loader=[(X, Y[:, None])]), PosthocUQError, r"pass y\.squeeze\(1\)"),
    "labels as zeros": (lambda: fit(loader=[(X, 0.0 * Y)]), PosthocUQError, r"batch\[1\]\.long\(\)"),
    "too few labels": (lambda: fit(loader=[(X, Y[1:])]), PosthocUQError, r"of shape \(11,\)"),
    "three binary labels": (lambda: fit(loader=[(X, Y)], **BINARY), PosthocUQError, "must be 0 or 1"),
    "the batch of a label": (lambda: fit(loader=[(X, Y), (X, Y + 5)]), PosthocUQError, "Batch 1: .*from 5"),
    "one output of classes": (lambda: fit(net(outputs=1)), PosthocUQError, "likelihood='binary'"),
    "three outputs of one label": (lambda: fit(likelihood="binary"), PosthocUQError, "'binary' needs outputs"),
    "targets of another shape": (lambda: fit(loader=[(X, X)], **REGRESSION), PosthocUQError, "do not fit outputs"),
    "targets without numbers": (
        lambda: fit(loader=[(X, torch.full((12, 2), float("nan")))], **REGRESSION),
        PosthocUQError,
        "targets are not finite",
    ),
    "no error at all": (
        lambda: fit(loader=[(X, REGRESSION["model"](X).detach())], **REGRESSION),
        PosthocUQError,
        "without error.*noise_variance",
    ),
    "infinite inputs": (lambda: fit(RELU, split(with_numbers(float("inf")), Y)), NonFiniteError, "Batch 2: "),
    "no labels": (lambda: fit(loader=[X], fisher="empirical"), PosthocUQError, "needs labels"),
    "no labels for the evidence": (lambda: fit(loader=[X]).log_marginal_likelihood(), PosthocUQError, "no labels"),
    # of batches and of what the model returns
    "images in a list": (lambda: fit(loader=[([X, X], Y)]), PosthocUQError, "list of 2 tensors.*torch.stack"),
    "boxes": (lambda: fit(loader=[([X, X], [{"b": X}] * 2)]), PosthocUQError, "list of dict.*detector"),
    "a sum returned": (lambda: fit(Summed()), PosthocUQError, r"shape \(3,\) for 2 samples"),
    # of a posterior, a head and a prediction
    "no draws": (lambda: POSTERIOR.sample(0), PosthocUQError, "number of draws must be"),
    "an unknown layer": (lambda: POSTERIOR.quadratic({"5": X}), PosthocUQError, "unknown: .'5'"),
    "a prior for some layers": (lambda: set_prior({"0": 1.0}), PosthocUQError, "every layer once.*'2'"),
    "a prior for more layers": (lambda: set_prior(LAYERS | {"9": 1.0}), PosthocUQError, "every layer once.*'9'"),
    "a prior of a layer": (lambda: set_prior(LAYERS | {"0": -1.0}), PosthocUQError, "of layer '0' must be"),
    "several numbers": (lambda: set_prior(torch.ones(2)), PosthocUQError, r"Tensor of shape \(2,\)"),
    "another shape": (lambda: uq.wrap(nn.Sequential(nn.Linear(4, 6)), POSTERIOR), PosteriorMismatchError, "shape"),
    "a missing layer": (lambda: uq.wrap(nn.Sequential(net()[0]), POSTERIOR), PosteriorMismatchError, "'2.weight'"),
    "other values": (lambda: uq.wrap(changed(net()), POSTERIOR), PosteriorMismatchError, "values .*'2.weight'"),
    "other precision": (lambda: uq.wrap(net().half(), POSTERIOR), PosteriorMismatchError, "wrap the model as it was"),
    "referral of inputs": (lambda: uq.Referral()(X), PosthocUQError, "what a predictor returned"),  # type: ignore[arg-type]
    "export of an array": (lambda: uq.export(PREDICTOR, X.numpy()), PosthocUQError, "example of the model"),  # type: ignore[arg-type]
    "export of nothing": (lambda: uq.export(PREDICTOR), PosthocUQError, "example of the model"),
    "export of a model": (lambda: uq.export(net(), X), PosthocUQError, "not a Sequential"),  # type: ignore[arg-type]
    "tuning of a model": (lambda: uq.tune(net(), [(X, Y)]), PosthocUQError, "takes a posterior"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake(case: str) -> None:
    call, kind, message = MISTAKES[case]
    refused(message, call, kind)


def test_numbers_of_a_posterior() -> None:
    posterior = fit(prior_precision=torch.tensor([3.0]))
    assert posterior.prior_precision == 3.0
    posterior = posterior.with_settings(prior_precision={"0": torch.tensor(1.0), "2": 3.0})
    assert posterior.prior_precision == {"0": 1.0, "2": 3.0} and posterior.layer_prior("2") == 3.0


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    model = net()
    uq.save(fit(model), tmp_path / "p.h5")
    for device, message in {
        "xpu:90": r"device='xpu:90' is not there: .*leave device out",
        "graphics": "device='graphics' is not there: torch knows none of this name",
        "meta": "device='meta' is no place for numbers",
    }.items():
        refused(message, lambda device=device: uq.load(tmp_path / "p.h5", model, device=device))
    if not torch.cuda.is_available():
        said = "device='cuda' is not there: torch finds no cuda device that it can use"
        refused(said, lambda: uq.load(tmp_path / "p.h5", model, device="cuda"))


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
    loader = batches(x, targets_of(model, x, "regression"))

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
