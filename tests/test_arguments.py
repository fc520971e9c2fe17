"""What a model is called with: arrays, other types and shapes, outputs that are probabilities, wrong arguments."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import posthoc_uq as uq
from posthoc_uq.core import model
from posthoc_uq.core.batches import BatchReader, batch_of_call
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.fitting.fit import gives_probabilities
from posthoc_uq.heads.linearized import LinearizedPredictor
from posthoc_uq.likelihoods import resolve_likelihood

HEADS = ("linearized", "sampling", "moments")


def _net(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), *last)


def _x(samples: int = 12) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))


def _y() -> Tensor:
    return torch.arange(12) % 3


def _fit(model: nn.Module, loader: Any, **options: Any) -> uq.Posterior:
    return uq.fit(model, loader, **{"prior_precision": 1.0, "progress": False, "method": "diag"} | options)


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    return _net()


@pytest.fixture(scope="module")
def posterior(net: nn.Sequential) -> uq.Posterior:
    return _fit(net, [(_x(), _y())])


def _refused(message: str, call: Callable[[], Any], cause: type[BaseException] | None = None) -> None:
    with pytest.raises(PosthocUQError, match=message) as caught:
        call()
    assert len(str(caught.value)) < 500
    if cause is not None:
        assert type(caught.value.__cause__) is cause


WRONG: dict[str, tuple[Tensor, str]] = {
    "too few columns": (_x()[:, :3], r"float32 \(12, 3\).*cannot be multiplied"),
    "float64": (_x().double(), r"float64 \(12, 4\)\. Its weights are float32: pass x\.to\(torch\.float32\)"),
    "integers": (
        _x().long(),
        r"int64 \(12, 4\)\. Its weights are float32: .*unless the model takes integers",
    ),
    "half": (_x().half(), r"float16 \(12, 4\)\. Its weights are float32: pass x\.to\(torch\.float32\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_first_batch_that_the_model_does_not_take(case: str) -> None:
    x, message = WRONG[case]
    _refused(
        f"cannot be run on the first batch of the loader, {message}",
        lambda: _fit(_net(), [(x, _y())]),
        RuntimeError,
    )


def test_a_refused_fit_leaves_the_random_state() -> None:
    model = _net()
    before = torch.get_rng_state()
    _refused("float64", lambda: _fit(model, [(_x().double(), _y())]))
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.requires_grad and p.grad is None for p in model.parameters()) and model.training


def test_names_that_the_model_does_not_have() -> None:
    _refused(
        r"pixels=float32 \(12, 4\), index=.*batch_to_inputs=",
        lambda: _fit(_net(), [{"pixels": _x(), "index": _y(), "y": _y()}]),
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_the_model_does_not_take(
    net: nn.Sequential, posterior: uq.Posterior, head: str, case: str
) -> None:
    x, message = WRONG[case]
    predictor = cast(Any, uq.wrap(net, posterior, head))
    calls = [predictor, predictor.novelty, lambda x: predictor.predict([x], progress=False)]
    calls += [predictor.outputs] if head == "sampling" else [predictor.functional_variance]
    for call in calls:
        _refused(f"cannot be run on these inputs, {message}", lambda call=call: call(x), RuntimeError)
    assert len(predictor(_x())) == 12


@pytest.mark.parametrize("head", ["linearized", "moments"])
def test_one_sample_without_its_dimension(net: nn.Sequential, posterior: uq.Posterior, head: str) -> None:
    predictor = uq.wrap(net, posterior, head)
    _refused(r"shape \(3,\) for these inputs, float32 \(4,\).*x\.unsqueeze\(0\)", lambda: predictor(_x()[0]))


@pytest.mark.parametrize("head", HEADS)
def test_an_array_in_place_of_a_tensor(net: nn.Sequential, posterior: uq.Posterior, head: str) -> None:
    predictor = uq.wrap(net, posterior, head)
    _refused(
        r"ndarray \(12, 4\).*torch\.as_tensor\(x",
        lambda: predictor.predict([_x().numpy()], batch_to_inputs=lambda x: x, progress=False),
    )


def test_an_error_of_another_origin_is_passed_on(
    net: nn.Sequential, posterior: uq.Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("not the model's")

    monkeypatch.setattr(LinearizedPredictor, "_linearized", broken)
    with pytest.raises(RuntimeError, match="not the model's"):
        uq.wrap(net, posterior, "linearized")(_x())


def test_held_out_and_compared_batches_are_named_too(net: nn.Sequential) -> None:
    fitted = _fit(net, [(_x(), _y())])
    _refused(r"float64 \(12, 4\)", lambda: uq.tune(fitted, [(_x().double(), _y())], progress=False))
    _refused(
        r"a batch of the loader, float64 \(12, 4\)",
        lambda: uq.evaluate(net, [(_x().double(), _y())], progress=False),
    )


def test_arrays_are_batches() -> None:
    x, y = _x(), _y()
    expected = _fit(_net(), [(x, y)])
    forms: dict[str, Any] = {
        "NumPy": (x.numpy(), y.numpy()),
        "pandas": (pd.DataFrame(x.numpy()), pd.Series(y.numpy(), index=range(100, 112))),
        "float64": (x.double().numpy(), y.numpy()),
        "codes of a category": (
            pd.DataFrame(x.double().numpy()),
            pd.Series(y.numpy()).astype("category").cat.codes,
        ),
        "read only": (np.broadcast_to(x.numpy(), x.shape), y.tolist()),
    }
    for name, batch in forms.items():
        found = _fit(_net(), [batch])
        for layer, variance in expected.variance().items():
            assert torch.equal(variance, found.variance()[layer]), name
    model = _net()
    predictor = uq.wrap(model, _fit(model, [(x, y)]))
    found = cast(Any, predictor.predict([x.numpy()[:5], x.numpy()[5:]], progress=False))
    assert torch.allclose(found.probs, cast(Any, predictor(x)).probs, atol=1e-6)
    frame = pd.DataFrame(x.double().numpy())
    assert torch.equal(cast(Any, predictor(frame)).probs, cast(Any, predictor(x)).probs)
    assert torch.equal(predictor.novelty(frame.to_numpy()), predictor.novelty(x))
    assert "accuracy" in str(uq.evaluate(predictor, [(frame, y)], progress=False))
    ids = batch_of_call((np.arange(3),), {}, model, torch.device("cpu")).args[0]
    assert ids.dtype == torch.int64  # whole numbers stay what they are
    wide = _net().double()
    _fit(wide, [(x.numpy(), y)])


def test_arrays_that_torch_has_no_type_for() -> None:
    frame = pd.DataFrame({"size": [1.0] * 12, "colour": ["red"] * 12})
    _refused(r"DataFrame of object \(12, 2\).*astype\('float32'\)", lambda: _fit(_net(), [(frame, _y())]))
    _refused("targets are a list .*batch_to_targets", lambda: _fit(_net(), [(_x(), ["red"] * 12)]))
    labels = pd.Series(["red", "blue"] * 6)
    for text in (labels, labels.to_numpy(), labels.astype("category")):
        _refused(
            r"targets are text.*astype\('category'\)\.cat\.codes", lambda y=text: _fit(_net(), [(_x(), y)])
        )
    boxes = [{"boxes": torch.zeros(1, 4)}] * 2
    _refused("targets are a list .*batch_to_targets", lambda: _fit(_net(), [([_x(), _x()], boxes)]))


def test_a_pair_of_arrays_is_no_loader() -> None:
    for pair in (
        (_x().numpy(), _y().numpy()),
        [_x(), _y()],
        (pd.DataFrame(_x().numpy()), pd.Series(_y().numpy())),
    ):
        _refused("^The loader is one pair of inputs and targets", lambda pair=pair: _fit(_net(), pair))
    _refused("^The val_loader is a Tensor", lambda: _fit(_net(), [(_x(), _y())], val_loader=_x()))


def test_a_model_in_another_precision(net: nn.Sequential, posterior: uq.Posterior) -> None:
    with pytest.raises(PosteriorMismatchError, match=r"'0\.weight' is torch\.float16.* dtype=torch\.float16"):
        uq.wrap(_net().half(), posterior)


class _Binary(nn.Module):
    """One output, through a function at the end."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x)).squeeze(1)


def _constant(last: nn.Module) -> nn.Sequential:
    """A network whose outputs are the same for all inputs."""
    model = _net(last)
    with torch.no_grad():
        model[2].weight.zero_()
    return model


class _Softmax(nn.Module):
    """A softmax without the function of that name."""

    def forward(self, x: Tensor) -> Tensor:
        powers = (x - x.amax(1, keepdim=True)).exp()
        return powers / powers.sum(1, keepdim=True)


def _least_squares() -> nn.Sequential:
    """A linear model of one-hot labels by least squares: its outputs sum to 1 at every input, and lie in [0, 1]."""
    design = torch.cat([_x().double(), torch.ones(len(_x()), 1)], 1)
    solution = torch.linalg.lstsq(design, 0.5 / 3 + 0.5 * nn.functional.one_hot(_y(), 3).double()).solution
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.copy_(solution[:-1].T)
        model[0].bias.copy_(solution[-1])
        outputs = model(_x())
    assert bool(((outputs >= 0) & (outputs <= 1)).all()) and torch.allclose(
        outputs.sum(1), torch.ones(len(_x()))
    )
    return model


def _thirds() -> nn.Sequential:
    """A new last layer without weights yet, whose bias gives all classes a third."""
    model = _net()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.fill_(1 / 3)
    return model


# model, likelihood, whether its outputs are probabilities
ENDS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "softmax": (lambda: _net(nn.Softmax(1)), "classification", True),
    "softmax of constant logits": (lambda: _constant(nn.Softmax(1)), "classification", True),
    "sigmoid": (lambda: _Binary(torch.sigmoid), "binary", True),
    "sigmoids of several labels": (lambda: _net(nn.Sigmoid()), "multilabel", True),
    "softmax by hand": (lambda: _net(_Softmax()), "classification", True),
    "softmax within a model": (lambda: nn.Sequential(_net(nn.Softmax(1))), "classification", True),
    "log_softmax": (lambda: _net(nn.LogSoftmax(1)), "classification", False),
    "log-sigmoids": (lambda: _net(nn.LogSigmoid()), "multilabel", False),
    "least squares": (_least_squares, "classification", False),
    "logits that are all a third": (_thirds, "classification", False),
    "logits": (_net, "classification", False),
    "positive logits": (lambda: _net(nn.Softplus()), "classification", False),
    "sigmoids of several classes": (lambda: _net(nn.Sigmoid()), "classification", False),
    "logit": (lambda: _Binary(lambda z: z), "binary", False),
    "logits within 0 and 1": (lambda: _Binary(lambda z: 0.5 + 0.1 * torch.tanh(z)), "binary", False),
    "softmax of a regression": (lambda: _net(nn.Softmax(1)), "regression", False),
}


def _targets_of(likelihood: str) -> Tensor:
    return {
        "classification": _y(),
        "binary": _y() % 2,
        "multilabel": torch.stack([_y() % 2, _y() // 2, _y() % 2], 1),
        "regression": _x()[:, :3],
    }[likelihood]


@pytest.mark.parametrize("case", ENDS)
def test_a_model_that_ends_in_probabilities(case: str) -> None:
    build, likelihood, probabilities = ENDS[case]
    model, loader = build(), [(_x(), _targets_of(likelihood))]
    if not probabilities:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _fit(model, loader, likelihood=likelihood)
        return
    kind = type(resolve_likelihood(likelihood))
    _refused(
        rf"outputs are probabilities.*likelihood='{likelihood}' takes logits.*model\[:-1\].*uq\.{kind.__name__}\(\)",
        lambda: _fit(model, loader, likelihood=likelihood),
    )
    with pytest.warns(UserWarning, match="given as an object") as told:
        posterior = _fit(model, loader, likelihood=kind())
    assert {w.filename for w in told} == {__file__}
    assert bool(uq.wrap(model, posterior)(_x()).probs.isfinite().all())


@pytest.mark.parametrize("samples", [1, 2])
def test_probabilities_of_few_samples(samples: int) -> None:
    _refused("outputs are probabilities", lambda: _fit(_net(nn.Softmax(1)), [(_x(samples), _y()[:samples])]))


class _Troubled(nn.Module):
    """A network for whole batches of 40 samples, which may run out of memory, or have a fault of its own."""

    def __init__(self, trouble: Callable[[int], Exception | None]) -> None:
        super().__init__()
        self.net, self.trouble = _net(nn.Softmax(1)), trouble

    def forward(self, x: Tensor) -> Tensor:
        error = self.trouble(len(x))
        if error is not None:
            raise error
        return self.net(x)


def test_a_look_at_outputs_that_fails() -> None:
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(3)), torch.arange(40) % 3

    def outcome(trouble: Callable[[int], Exception | None]) -> bool:
        model = _Troubled(trouble)
        batch = BatchReader.of(model).read((x, y))
        return gives_probabilities(model, batch, uq.Categorical())

    assert outcome(lambda n: None)
    assert outcome(lambda n: None if n == 40 else ValueError("40 samples")), "then all of them are looked at"
    with pytest.raises(torch.cuda.OutOfMemoryError):
        outcome(lambda n: torch.cuda.OutOfMemoryError("full") if n == 16 else None)
    _refused("own error is KeyError: 'mine'", lambda: outcome(lambda n: KeyError("mine")))


def test_referral_of_something_else(net: nn.Sequential, posterior: uq.Posterior) -> None:
    predictor = cast(Any, uq.wrap(net, posterior))
    x: Any = _x()
    for ask in (uq.refer, uq.referral_reasons):
        _refused(
            r"second argument is what the predictor returned.*not a Tensor", lambda ask=ask: ask(predictor, x)
        )
        _refused("first argument is a predictor", lambda ask=ask: ask(predictor(x), predictor))


def test_export_of_something_else(net: nn.Sequential, posterior: uq.Posterior) -> None:
    predictor, x = uq.wrap(net, posterior, "moments"), cast(Any, _x())
    _refused("was given a ndarray", lambda: uq.export(predictor, x.numpy()))
    _refused("was given nothing", lambda: uq.export(predictor))
    _refused("not a Sequential", lambda: uq.export(cast(Any, net), x))
    for head in ("moments", "sampling"):
        other = uq.wrap(net, posterior, head)
        _refused(r"float32 \(12, 3\)", lambda other=other: uq.export(other, x[:, :3]), RuntimeError)


def test_tuning_of_something_else(net: nn.Sequential, posterior: uq.Posterior) -> None:
    _refused("tune takes a posterior .*not a Sequential", lambda: uq.tune(cast(Any, net), [(_x(), _y())]))
    _refused(r"loader \(val_loader of a fit\) yields inputs alone", lambda: uq.tune(posterior, [_x()]))


def test_prior_precisions_of_other_types() -> None:
    loader, layers = [(_x(), _y())], {"0": 1.0, "2": 2.0}
    for value in (torch.tensor(3.0), torch.tensor([3.0]), np.float32(3)):
        assert _fit(_net(), loader, prior_precision=value).prior_precision == 3.0
    _refused(
        r"one number.*Tensor of shape \(2,\)", lambda: _fit(_net(), loader, prior_precision=torch.ones(2))
    )
    _refused("one number for all layers", lambda: _fit(_net(), loader, prior_precision=layers))
    fitted = _fit(_net(), loader)
    fitted.prior_precision = {name: torch.tensor(value) for name, value in layers.items()}
    assert fitted.prior_precision == layers
    wrong: dict[str, Any] = {
        r"one number.*Tensor of shape \(2,\)": torch.ones(2),
        r"one number.*\[1, 2\]": [1, 2],
        r"one number.*'evidence'": "evidence",
        r"of layer '0' must be one number": {"0": torch.ones(2), "2": 1.0},
        r"do not match: \['2'\]": {"0": 1.0},
    }
    for message, value in wrong.items():
        _refused(message, lambda value=value: setattr(fitted, "prior_precision", value))
    assert fitted.prior_precision == layers


def test_a_fit_in_inference_mode() -> None:
    with torch.inference_mode():
        _refused("call fit outside", lambda: _fit(_net(), [(_x(), _y())]))
    with torch.inference_mode():
        x = _x()
    with torch.no_grad():
        found = _fit(_net(), [(x, _y())])
    expected = _fit(_net(), [(_x(), _y())])
    assert all(torch.equal(value, found.variance()[name]) for name, value in expected.variance().items())


@pytest.mark.parametrize("noise", [lambda x: x, "large", [1.0, None]])
def test_noise_that_is_no_number(noise: Any) -> None:
    _refused(
        "noise_variance must be a number.*the same for every input",
        lambda: _fit(_net(), [(_x(), _x()[:, :3])], likelihood="regression", noise_variance=noise),
    )


_TRAINING: dict[str, Any] = {"method": "function_space", "epochs": 1}


# The length of a loader, which counts all its batches, enters a training by the schedule of its rates alone.
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "inf", "prior_precision": None},
        _TRAINING | {"schedule": lambda _: 1.0, "log_variance_lr": 0.5},
    ],
)
def test_batches_without_samples_are_left_out(options: dict[str, Any]) -> None:
    x, y = _x(), _y()
    empty = (x[:0], y[:0])
    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    expected = _fit(_net(), data, **options)
    model = _net()
    found = _fit(model, [empty, data[0], empty, data[1], empty], **options)
    assert found.scale == expected.scale == 12
    assert all(torch.equal(value, found.variance()[name]) for name, value in expected.variance().items())
    predictor = uq.wrap(model, found)
    assert len(predictor.predict([x[:0], x], progress=False)) == 12
    _refused("yields no batch of samples", lambda: _fit(_net(), [empty], **options))


LATER: dict[str, tuple[dict[str, Any], Tensor]] = {
    "curvature": ({}, _y()),
    "noise of a regression": ({"likelihood": "regression"}, _x()[:, :3]),
    "training": (_TRAINING | {"context": lambda n, _: torch.zeros(n, 4)}, _y()),
    "training at its own inputs": (_TRAINING | {"context": "batch"}, _y()),
}


@pytest.mark.parametrize("case", LATER)
def test_a_later_batch_that_the_model_does_not_take(case: str) -> None:
    options, y = LATER[case]
    _refused(
        r"cannot be run on batch 1 of the loader, float32 \(12, 3\).*cannot be multiplied",
        lambda: _fit(_net(), [(_x(), y), (_x()[:, :3], y)], **options),
        RuntimeError,
    )


def test_a_later_batch_of_another_shape_than_a_box() -> None:
    loader = [(_x(), _y()), (_x()[:, :3], _y())]
    _refused(r"shape \(4,\).*one of \(3,\)", lambda: _fit(_net(), loader, **_TRAINING))


def test_images_in_a_list() -> None:
    images, boxes = [_x(), _x()], [{"boxes": torch.zeros(1, 4)}] * 2
    loader = [(images, boxes)]
    _refused(
        "holds a list of 2 tensors.*torch.stack", lambda: uq.fit(_net(), [(images, _y())], progress=False)
    )
    _refused("targets are a list of dict.*Boxes of a detector", lambda: _fit(_net(), loader))


def test_binary_labels_in_a_column(net: nn.Sequential, posterior: uq.Posterior) -> None:
    model = _Binary(lambda z: z)
    y = (_y() % 2).reshape(-1, 1)
    prediction = cast(Any, uq.wrap(model, _fit(model, [(_x(), y)], likelihood="binary")))(_x())
    expected = prediction.log_prob(y.flatten())
    for labels in (y, y.float(), y.flatten().double(), y.bool()):
        assert torch.equal(prediction.log_prob(labels), expected)
    _refused("integer labels", lambda: prediction.log_prob(y + 0.5))
    _refused("between 0 and 1", lambda: prediction.log_prob(y + 1.0))
    several = cast(Any, uq.wrap(net, posterior)(_x()))
    _refused("integer labels", lambda: several.log_prob(_y().reshape(-1, 1)))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "both": lambda model: torch.compile(nn.DataParallel(model)),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapped_model_has_the_names_of_the_bare_one(case: str, tmp_path: Path) -> None:
    wrapper = WRAPPERS[case]
    fitted = _fit(wrapper(_net()), [(_x(), _y())])
    assert list(fitted.layers) == ["0", "2"]
    uq.save(fitted, tmp_path / "wrapped.h5")
    bare = _net()
    uq.save(_fit(bare, [(_x(), _y())]), tmp_path / "bare.h5")
    expected = cast(Any, uq.wrap(bare, uq.load(tmp_path / "wrapped.h5", bare))(_x())).probs
    for head in HEADS:
        model = wrapper(_net())
        found = cast(Any, uq.wrap(model, uq.load(tmp_path / "bare.h5", model), head)(_x())).probs
        assert head != "linearized" or torch.equal(found, expected)


def test_a_part_that_is_wrapped_is_named(tmp_path: Path) -> None:
    def parts(model: nn.Module) -> nn.Module:
        return nn.Sequential(torch.compile(model), nn.Identity())  # pyright: ignore[reportArgumentType]

    bare = nn.Sequential(_net(), nn.Identity())
    fitted = _fit(bare, [(_x(), _y())])
    uq.save(fitted, tmp_path / "bare.h5")
    names = r"'0\.0\.weight'.* calls '0\._orig_mod\.0\.weight'"
    _refused(names, lambda: uq.load(tmp_path / "bare.h5", parts(_net())))
    _refused(names, lambda: uq.wrap(parts(_net()), fitted))


def test_what_the_module_of_contexts_shows() -> None:
    shown = dir(uq.contexts)
    assert shown == [
        "Callback",
        "Context",
        "Corrupted",
        "Mixture",
        "Monochrome",
        "Pool",
        "TrainingBatch",
        "UniformBox",
    ]
    assert all(issubclass(getattr(uq.contexts, name), uq.contexts.Context) for name in shown)


def test_what_a_report_says_of_hyperparameters() -> None:
    loader = [(_x(), _y())]
    assert "residual weight" in str(_fit(_net(), loader, method="inf").report())
    fitted = _fit(_net(), loader)
    uq.tune(fitted, per_layer=True, progress=False)
    text = str(fitted.report())
    assert "residual weight" not in text
    assert "prior precision: per layer, by the log marginal likelihood\n" in text


class Counted:
    """A loader that counts the batches it gave."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        for start in (0, 4, 8):
            self.given += 1
            yield _x()[start : start + 4], _y()[start : start + 4]


# what no number may be, and what no whole one may be
_NO_NUMBER: list[Any] = ["x", "1", True, [1.0, 2.0], object(), torch.ones(2), float("nan")]
_NO_COUNT: list[Any] = [*_NO_NUMBER, 1.5, -1, 2**70]
_FIT: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "residual_weight": ({"method": "inf"}, [*_NO_NUMBER, 7.0, -1]),
    "seed": ({}, ["x", True, None, [1], 1.5, 2**70, torch.ones(2)]),
    "n_samples": ({}, [*_NO_COUNT, 0]),
    "memory_budget": ({}, [*_NO_NUMBER, 5]),
    "divergence": ({}, [*_NO_NUMBER, 0.0]),
    "checkpoint_every": ({}, [*_NO_COUNT, 0]),
    "prior_precision": ({}, ["x", True, [1.0, 2.0], object(), -1.0]),
    "rank": ({"method": "inf"}, [*_NO_NUMBER, 1.5, -1, float("inf")]),
    "basis": ({"method": "inf"}, ["x", 5, ["auto"], np.array(["auto"] * 2)]),
    "basis_fraction": ({"method": "inf"}, [*_NO_NUMBER, 0.0, 2.0]),
    "bases": ({"method": "inf"}, ["x", 5, torch.ones(())]),
    "correction": ({"method": "inf"}, ["x", 5, ["clamp"]]),
    "layers": ({}, [5, True, [1], torch.ones(())]),
    "likelihood": ({}, ["x", 5, ["classification"], {}]),
    "head": ({}, ["x", 5, ["sampling"]]),
    "fisher": ({}, ["x", 5, ["mc"]]),
    "method": ({}, ["x", 5, None, ["inf"]]),
    "unsupported": ({}, ["x", 5]),
    "dtype": ({}, ["x", 5, torch.int64]),
    "batch_to_inputs": ({}, ["x", 5]),
    "batch_to_targets": ({}, ["x", 5]),
    "noise_variance": ({"likelihood": "regression"}, ["x", [], -1.0, True]),
}
_FIT_TRAINING: dict[str, list[Any]] = {
    "epochs": _NO_COUNT,
    "lr": [*_NO_NUMBER, 0.0],
    "log_variance_lr": [*_NO_NUMBER, 0.0],
    "clip": [*_NO_NUMBER, 0.0],
    "patience": _NO_COUNT,
    "val_draws": _NO_COUNT,
    "n_context": _NO_COUNT,
    "n_sets": _NO_COUNT,
    "n_draws": _NO_COUNT,
    "optimizer": ["x", 5],
    "schedule": ["x", 5],
    "train_mean": ["x", 1.5, [True]],
    "learn_noise": ["x", 1.5, [True]],
    "initial": ["x", 5, ["inf"]],
    "initial_log_variance": [*_NO_NUMBER, 100.0],
    "initial_body_log_variance": [*_NO_NUMBER, 100.0],
    "prior_mean": ["x", 5, ["zero"]],
    "prior_body_variance": [*_NO_NUMBER, -1.0],
    "function_noise": [*_NO_NUMBER, 0.0],
    "body": ["x", 5, ["sample"]],
    "prior": ["x", 5, ["independent"]],
    "prior_variance": [*_NO_NUMBER, 0.0],
    "divergence_weight": ["x", [1.0], float("nan"), float("inf"), 0.0, -1.0],
}


@pytest.mark.parametrize("option", [*_FIT, *_FIT_TRAINING])
def test_an_option_of_a_wrong_kind_is_refused_before_the_first_sweep(option: str) -> None:
    own, values = _FIT[option] if option in _FIT else ({"method": "function_space"}, _FIT_TRAINING[option])
    for value in values:
        loader = Counted()
        _refused(option, lambda value=value, loader=loader: _fit(_net(), loader, **own, **{option: value}))
        assert loader.given <= 1, value


def test_numbers_of_other_libraries_are_numbers() -> None:
    loader = [(_x(), _y())]
    expected = _fit(_net(), loader, method="inf", seed=3, rank=4, fisher="mc")
    for three, four in ((np.int64(3), np.int32(4)), (torch.tensor(3), torch.tensor([4])), (3.0, 4.0)):
        found = _fit(
            _net(), loader, method="inf", seed=three, rank=four, fisher="mc", residual_weight=three / 3
        )
        assert all(torch.equal(value, found.variance()[name]) for name, value in expected.variance().items())
        assert found.history.fit["rank"] == 4 and type(found.history.fit["rank"]) is int


@pytest.mark.parametrize(
    "setting", ["scale", "prior_precision", "residual_weight", "noise_scale", "temperature"]
)
def test_a_setting_of_a_wrong_kind(setting: str) -> None:
    fitted = _fit(_net(), [(_x(), _y())], method="inf")
    before = fitted.settings
    for value in (*_NO_NUMBER, None, -1.0, float("inf")):
        _refused(setting, lambda value=value: setattr(fitted, setting, value))
    assert fitted.settings == before


_TUNE: dict[str, list[Any]] = {
    "criterion": ["x", 5, ["faithful"]],
    "divergence": [*_NO_NUMBER, 0.0],
    "temperature": ["x", 1.5],
    "per_layer": ["x", 1.5, True],
    "noise": ["x", 1.5],
    "parameters": ["x", 5, [5], torch.ones(())],
    "prior_precisions": ["x", 5, [], ["x"], [True], torch.ones(()), {"a": 1}],
    "head": ["x", 5, ["sampling"]],
    "n_samples": [*_NO_COUNT, None],
    "max_evaluations": [*_NO_COUNT, None],
    "seed": ["x", True, None, 1.5, 2**70],
    "batch_to_inputs": ["x", 5],
    "batch_to_targets": ["x", 5],
}


@pytest.mark.parametrize("option", _TUNE)
def test_an_option_of_tune_of_a_wrong_kind(posterior: uq.Posterior, option: str) -> None:
    for value in _TUNE[option]:
        loader = Counted()
        _refused(
            option,
            lambda value=value, loader=loader: uq.tune(
                posterior.snapshot(), loader, progress=False, **{option: value}
            ),
        )
        assert loader.given == 0, value


_WRAP: dict[str, dict[str, list[Any]]] = {
    "sampling": {
        "n_samples": [*_NO_COUNT, None],
        "seed": ["x", True, 1.5, 2**70, [1]],
        "antithetic": ["x", 1.5],
        "batched": ["x", 5, [True]],
        "novelty": ["x", 1.5],
    },
    "moments": {
        "weights": ["x", 5, ["row"]],
        "cov": ["block"],
        "relu": ["softplus"],
        "max_pool": ["max"],
        "unknown": ["skip"],
        "pool_rho": [*_NO_NUMBER, None, 2.0],
        "link": ["x", 5, ["mc"]],
        "n_draws": [*_NO_COUNT, None],
        "output_map": ["x", 5],
        "novelty": ["x", 1.5],
    },
    "linearized": {
        "link": ["x", 5, ["mc"]],
        "n_draws": [*_NO_COUNT, None],
        "outputs": ["x", "topk:0", 0, True, 1.5, None, [1]],
        "engine": ["x", 5, ["jvp"]],
        "n_probes": [*_NO_COUNT, None],
        "memory_budget": [*_NO_NUMBER, 0],
        "novelty": ["x", 1.5],
    },
}


@pytest.mark.parametrize("head", _WRAP)
def test_an_option_of_wrap_of_a_wrong_kind(net: nn.Sequential, posterior: uq.Posterior, head: str) -> None:
    for option, values in _WRAP[head].items():
        for value in values:
            _refused(
                option,
                lambda option=option, value=value: uq.wrap(net, posterior, head, **{option: value}),
            )


_EVALUATE: dict[str, list[Any]] = {
    "likelihood": ["x", 5, ["binary"]],
    "score": ["x", 5, ["entropy"]],
    "joint": ["x", 5, None, [1], [["x"]], torch.ones(())],
    "referral_rates": ["x", 5, None, ["x"], [1.0], [True], {"a": 1}],
    "bins": [*_NO_COUNT, None, 0],
    "n_examples": [*_NO_COUNT, None],
    "class_names": ["x", 5, {0: "a"}, torch.ones(())],
    "display": ["x", 5],
    "batch_to_inputs": ["x", 5],
    "batch_to_targets": ["x", 5],
}


@pytest.mark.parametrize("option", _EVALUATE)
def test_an_option_of_evaluate_of_a_wrong_kind(net: nn.Sequential, option: str) -> None:
    for value in _EVALUATE[option]:
        loader = Counted()
        _refused(
            option,
            lambda value=value, loader=loader: uq.evaluate(net, loader, progress=False, **{option: value}),
        )
        assert loader.given == 0, value


def test_a_model_made_in_inference_mode(net: nn.Sequential, posterior: uq.Posterior, tmp_path: Path) -> None:
    with torch.inference_mode():
        made = _net()
    message = r"'0\.weight' was made under torch\.inference_mode\(\).*fresh\.load_state_dict"
    _refused(message, lambda: _fit(made, [(_x(), _y())]))
    _refused(message, lambda: uq.wrap(made, posterior, "linearized"))
    with torch.inference_mode():
        running = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        numbers = running.get_submodule("1").running_mean
    part = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    part.get_submodule("1").running_mean = numbers
    _refused(r"'1\.running_mean' was made", lambda: _fit(part, [(_x(), _y())]))
    fresh = _net()
    fresh.load_state_dict(made.state_dict())
    expected = cast(Any, uq.wrap(net, posterior)(_x())).probs
    assert torch.equal(cast(Any, uq.wrap(fresh, posterior)(_x())).probs, expected)


def test_what_another_prediction_has(net: nn.Sequential, posterior: uq.Posterior) -> None:
    classes = cast(Any, uq.wrap(net, posterior)(_x()))
    values = uq.RegressionPrediction(torch.zeros(2), torch.ones(2), 1.0)
    for name in ("interval", "quantile", "mean", "variance"):
        assert not hasattr(classes, name)
        _refused(
            rf"ClassPrediction has no '{name}'; a RegressionPrediction has.*likelihood='regression'",
            lambda name=name: getattr(classes, name),
        )
    _refused("RegressionPrediction has no 'probs'; a ClassPrediction has", lambda: values.probs)
    for one in (classes, values):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'") as caught:
            one.nonsense  # noqa: B018
        assert not isinstance(caught.value, PosthocUQError)
        assert len(copy.deepcopy(one)) == len(pickle.loads(pickle.dumps(one))) == len(one)


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.readout = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.words(tokens).mean(1))


@pytest.mark.filterwarnings("ignore:Weights without a posterior")
def test_token_ids_that_an_embedding_does_not_have() -> None:
    tokens = torch.arange(12).reshape(6, 2) % 5
    model = _Tokens()
    fitted = _fit(model, [tokens], layers="last", fisher="exact")
    for wrong, given in ((tokens + 95, "95 to 99"), (tokens - 1, "-1 to 3")):
        message = rf"Embedding 'words' has rows 0 to 4, and was given ids from {given}.*index out of range"
        _refused(message, lambda wrong=wrong: _fit(model, [wrong]), IndexError)
        _refused(message, lambda wrong=wrong: _fit(model, [tokens, wrong], layers="last"), IndexError)
        for head in HEADS:
            _refused(message, lambda wrong=wrong, head=head: uq.wrap(model, fitted, head)(wrong), IndexError)
    _refused(r"'words' takes whole numbers.*x\.long\(\)", lambda: _fit(model, [tokens.float()]))


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readout = nn.Linear(4, 3)

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.readout(pixels)


class _Whole(_Named):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.readout(batch["pixels"])


def test_mappings_as_arguments_and_in_their_place() -> None:
    loader = [({"pixels": _x()}, _y())]
    model, whole = _Named(), _Whole()
    fitted = _fit(model, loader)
    message = r"entries of a mapping are named arguments here: predictor\(\*\*mapping\)"
    positional: dict[str, Any] = {"batch_to_inputs": lambda batch: (batch[0],)}
    for one in (model, whole):
        _refused(message, lambda one=one: _fit(one, loader, **positional))
    for head in HEADS:
        predictor = cast(Any, uq.wrap(model, fitted, head))
        _refused(message, lambda predictor=predictor: predictor.predict(loader, progress=False, **positional))
        assert len(predictor(pixels=_x())) == len(predictor({"pixels": _x()})) == 12
    _refused(
        r"takes one argument, 'batch'.*forward\(self, \*\*inputs\)", lambda: _fit(whole, loader), TypeError
    )
    _refused(
        r"takes \['pixels', 'mask'\], and the batch names \['x'\]",
        lambda: _fit(model, [({"x": _x()}, _y())]),
        TypeError,
    )


class _Pairs(nn.Module):
    """Takes two tensors, the second of which it can do without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readout = nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        return self.readout(left if right is None else left + right)


@pytest.mark.parametrize("head", HEADS)
def test_a_predictor_takes_a_batch_as_the_loader_gave_it(head: str) -> None:
    x, y, path = _x(), _y(), [f"{i}.png" for i in range(12)]
    model = _net()
    for loader in (
        [(x, y)],
        [[x, y]],
        [{"image": x, "label": y}],
        [{"input": x, "targets": y, "path": path}],
        [{"image": x.numpy(), "y": y.numpy()}],
        DataLoader([{"image": x[i], "label": y[i], "path": path[i]} for i in range(12)], 12),
    ):
        posterior = _fit(model, loader)
        assert posterior.evidence.total == 12
        predictor = cast(Any, uq.wrap(model, posterior, head))
        whole = predictor(x).probs
        for batch in loader:
            kept = copy.deepcopy(batch)
            assert torch.equal(predictor(batch).probs, whole)
            assert torch.equal(predictor.novelty(batch), predictor.novelty(x))
            drawn = [
                predictor.functional_samples(inputs, n_samples=2, generator=torch.Generator().manual_seed(1))
                for inputs in (batch, x)
            ]
            assert torch.equal(*drawn)
            assert str(batch) == str(kept)
        assert torch.equal(predictor.predict(loader, progress=False).probs, whole)
        assert torch.equal(predictor([x]).probs, whole)
        evaluated = uq.evaluate({"network": model, "posterior": predictor}, loader, progress=False)
        assert evaluated.metrics["posterior"]["accuracy"] > 0

    pairs = _Pairs()
    fitted = _fit(pairs, [{"left": x, "right": x, "label": y}], layers=["readout"])
    own = cast(Any, uq.wrap(pairs, fitted, head))
    assert torch.equal(own({"left": x, "right": x, "label": y}).probs, own(x, x).probs)
    assert torch.equal(own({"left": x, "label": y, "path": path}).probs, own(x).probs)
    assert torch.equal(own(((x, x), y)).probs, own(x, x).probs)
    _refused(r"takes \['left', 'right'\], and the batch names", lambda: own({"first": x, "second": x}))
    for samples in ([x[0], x[1]], [x, x, x]):
        _refused("The model cannot be run|holds a list", lambda samples=samples: own(samples))


def test_forward_derivatives_leave_no_warning_of_torchs_own() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        f"import runpy; jvp = runpy.run_path({model.__file__!r})['jvp']; import torch\n"
        "outputs, derivative = jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))\n"
        "assert derivative.tolist() == [1.0, 1.0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
