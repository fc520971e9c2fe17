"""What a model is called with: arrays, other types and shapes, outputs that are probabilities, wrong arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.heads.linearized import LinearizedPredictor

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
        r"pixels=float32 \(12, 4\).*batch_to_inputs=", lambda: _fit(_net(), [{"pixels": _x(), "y": _y()}])
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
    _refused(r"ndarray \(12, 4\).*torch\.as_tensor\(x", lambda: predictor(_x().numpy()))


def test_an_error_of_another_origin_is_passed_on(
    net: nn.Sequential, posterior: uq.Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("not the model's")

    monkeypatch.setattr(LinearizedPredictor, "_at", broken)
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


def test_arrays_that_torch_has_no_type_for() -> None:
    frame = pd.DataFrame({"size": [1.0] * 12, "colour": ["red"] * 12})
    _refused(r"DataFrame of object \(12, 2\).*astype\('float32'\)", lambda: _fit(_net(), [(frame, _y())]))
    _refused("targets are a list .*batch_to_targets", lambda: _fit(_net(), [(_x(), ["red"] * 12)]))
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


# model, likelihood, whether its outputs are probabilities
ENDS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "softmax": (lambda: _net(nn.Softmax(1)), "classification", True),
    "softmax of constant logits": (lambda: _constant(nn.Softmax(1)), "classification", True),
    "sigmoid": (lambda: _Binary(torch.sigmoid), "binary", True),
    "log_softmax": (lambda: _net(nn.LogSoftmax(1)), "classification", False),
    "logits": (_net, "classification", False),
    "positive logits": (lambda: _net(nn.Softplus()), "classification", False),
    "sigmoids of several classes": (lambda: _net(nn.Sigmoid()), "classification", False),
    "logit": (lambda: _Binary(lambda z: z), "binary", False),
    "logits within 0 and 1": (lambda: _Binary(lambda z: 0.5 + 0.1 * torch.tanh(z)), "binary", False),
    "softmax of a regression": (lambda: _net(nn.Softmax(1)), "regression", False),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_model_that_ends_in_probabilities(case: str) -> None:
    build, likelihood, probabilities = ENDS[case]
    targets = {"classification": _y(), "binary": _y() % 2, "regression": _x()[:, :3]}[likelihood]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _fit(build(), [(_x(), targets)], likelihood=likelihood)
    told = [w for w in seen if "look like probabilities" in str(w.message)]
    assert len(told) == probabilities
    assert all(w.category is UserWarning and "model[:-1]" in str(w.message) for w in told)
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize("samples", [1, 2])
def test_probabilities_of_few_samples(samples: int) -> None:
    with pytest.warns(UserWarning, match="look like probabilities"):
        _fit(_net(nn.Softmax(1)), [(_x(samples), _y()[:samples])])


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
    _refused("was given a ndarray; torch.as_tensor", lambda: uq.export(predictor, x.numpy()))
    _refused("was given nothing", lambda: uq.export(predictor))
    _refused("not a Sequential", lambda: uq.export(cast(Any, net), x))
    for head in ("moments", "sampling"):
        other = uq.wrap(net, posterior, head)
        _refused(r"float32 \(12, 3\)", lambda other=other: uq.export(other, x[:, :3]), RuntimeError)


def test_tuning_of_something_else(net: nn.Sequential, posterior: uq.Posterior) -> None:
    _refused("tune takes a posterior .*not a Sequential", lambda: uq.tune(cast(Any, net), [(_x(), _y())]))
    _refused(r"loader \(val_loader of a fit\) yields inputs alone", lambda: uq.tune(posterior, [_x()]))
