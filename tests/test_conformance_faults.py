"""What every method refuses, in one sentence that names the thing, and without a trace in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast, get_type_hints

import pytest
import torch
from networks import Stops, batches, inputs_of, mlp, short, targets_of
from torch import Tensor, nn
from watching import Watch

import posthoc_uq as uq
from posthoc_uq.methods import METHODS, Method

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

METHOD = pytest.mark.parametrize("name", METHODS)
NAN, INF = float("nan"), float("inf")
ODD: list[Any] = [object(), b"x", "no such choice", None, True, -1, 2.5, NAN, INF, -INF, [], torch.ones(2)]


def data(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    x = inputs_of(4)
    return batches(x, targets_of(model, x, "classification"))


def fit(name: str | Method, model: nn.Module, loader: Any, **options: Any) -> uq.Posterior:
    method = short(name) if isinstance(name, str) else name
    return uq.fit(model, loader, method, prior_precision=1.0, progress=False, **options)


def option_names() -> Iterator[tuple[str, str]]:
    for name, kind in METHODS.items():
        yield from ((name, field.name) for field in fields(kind))


@pytest.mark.parametrize(("name", "option"), list(option_names()))
def test_options_of_wrong_types_and_out_of_range(name: str, option: str) -> None:
    """By the type of the field. A value is right, or is refused by the option's name."""
    kind, declared = METHODS[name], get_type_hints(METHODS[name])[option]
    refused = list[Any]()
    for value in ODD:
        try:
            kind(**{option: value})
        except uq.PosthocUQError as error:
            text = str(error)
            assert option in text and text.endswith((".", "?")) and 20 < len(text) < 500
            assert text.count(". ") <= 1 and (
                declared is Any or value not in ODD[:2] or f"{option} must be" in text
            )
            refused.append(value)
    if declared is Any:
        return
    assert all(any(value is odd for value in refused) for odd in ODD[:2]), "objects of no kind"
    if declared is not bool:
        assert "no such choice" in [value for value in refused if isinstance(value, str)]
    assert all(any(value is odd for value in refused) for odd in (NAN, INF)), "no finite number"


@METHOD
def test_options_that_there_are_none_of(name: str) -> None:
    model = mlp()
    with Watch(model):
        with pytest.raises(
            uq.PosthocUQError, match=rf"does not take \['colour'\].*{fields(METHODS[name])[0].name}"
        ):
            uq.fit(model, data(model), name, colour="red", progress=False)
        with pytest.raises(uq.PosthocUQError, match="'checkpoint_every'"):
            uq.fit(model, data(model), name, checkpont_every=3, progress=False)
        with pytest.raises(uq.PosthocUQError, match="its options belong there"):
            uq.fit(model, data(model), short(name), dtype=torch.float64, progress=False)
        with pytest.raises(uq.PosthocUQError, match="make an object"):
            uq.fit(model, data(model), cast(Any, METHODS[name]), progress=False)


@METHOD
def test_data_that_cannot_be_fitted(name: str) -> None:
    model = mlp()
    good = data(model)
    x, y = good[-1]
    poisoned = x.clone()
    poisoned[2, 0] = NAN
    with Watch(model):
        with pytest.raises(uq.NonFiniteError, match=r"[Bb]atch 2"):
            fit(name, model, [*good[:2], (poisoned, y)])
        for empty in ([], [(x[:0], y[:0])]):
            with pytest.raises(uq.PosthocUQError, match="yields no batch of samples"):
                fit(name, model, empty)
        with pytest.raises(uq.PosthocUQError, match=r"[Ll]abels .*3 outputs"):
            fit(name, model, [good[0], (x, y + 3)])
        with pytest.raises(uq.PosthocUQError, match=r"'attic'.*'0'"):
            fit(name, model, good, layers=["attic"])
        with pytest.raises(uq.PosthocUQError, match="float64"):
            fit(name, model, [(x.double(), y)])


@pytest.mark.parametrize("error", [ValueError("disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
@METHOD
@pytest.mark.covering(1)
def test_a_loader_that_raises_leaves_no_trace(name: str, error: BaseException) -> None:
    model, method = mlp(), short(name)
    model.train()
    good = data(model)
    for after in {0, 1, 2, method.passes() * len(good) - 1}:
        with Watch(model), pytest.raises(type(error)):
            fit(method, model, Stops(good, after, error))


class Fragile(nn.Sequential):
    """Raises from a call on; the calls of its copies count as well."""

    calls = 0
    last = 10**9

    def forward(self, x: Tensor) -> Tensor:
        Fragile.calls += 1
        if Fragile.calls > Fragile.last:
            raise ArithmeticError("odd input")
        return super().forward(x)


@METHOD
def test_a_model_that_raises_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Fragile(*mlp())
    good = data(model)
    monkeypatch.setattr(Fragile, "calls", 0)
    fit(name, model, good)
    calls = Fragile.calls
    for last in {0, 1, calls // 2, calls - 1}:
        Fragile.calls, Fragile.last = 0, last
        with Watch(model), pytest.raises((ArithmeticError, uq.PosthocUQError)):
            fit(name, model, good)
        assert Fragile.calls > last
    Fragile.last = 10**9


@METHOD
def test_more_data_after_the_fit(name: str) -> None:
    """A method whose posteriors are no sums over the data says so, with what to do."""
    if METHODS[name].update is Method.update:
        model = mlp()
        posterior = fit(name, model, data(model))
        with pytest.raises(uq.PosthocUQError, match="fit again"):
            uq.update(posterior, Stops([], 0), progress=False)
