"""What files refuse: other models and likelihoods, numbers and records that no file keeps; nothing is written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hostile_files import Image
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import CorruptPosteriorError, NonFiniteError, PosteriorMismatchError

X, Y = inputs(), labels()
COUNTS: dict[str, Any] = {"loader": [(X, X.square().round()[:, :3])], "fisher": "empirical"}


class Own(uq.Likelihood):
    """A likelihood of the user's, with an attribute."""

    def __init__(self, exposure: float = 1.0) -> None:
        self.exposure = exposure

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self.exposure * (outputs - targets).abs().sum(1)


class Other(Own):
    """Another one."""


class Two(nn.Module):
    """A network that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), -self.net(x)


def first(returned: Any) -> Tensor:
    return returned[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    uq.save(fit(), folder / "plain.h5")
    uq.save(fit(likelihood=Own(2.0), **COUNTS), folder / "own.h5")
    uq.save(fit(likelihood="regression", noise_variance=0.5, loader=COUNTS["loader"]), folder / "values.h5")
    uq.save(fit(Two(), output=0), folder / "part.h5")
    uq.save(fit(Two(), output=first), folder / "function.h5")
    for case, change in STRANGERS.items():
        image = Image(folder / "own.h5")
        image.state["likelihood"] |= change
        image.write(folder / f"{case}.h5")
    return folder


def load(folder: Path, name: str, model: nn.Module | None = None, **options: Any) -> None:
    uq.load(folder / f"{name}.h5", net() if model is None else model, **options)


def with_value(folder: Path, value: float, **options: Any) -> None:
    posterior = fit()
    cast(Any, posterior.blocks["0"]).diagonal.fill_(value)
    uq.save(posterior, folder / "new.h5", **options)


def noted(folder: Path, **records: Any) -> None:
    uq.save(fit().noted(**records), folder / "new.h5")


def with_function(folder: Path) -> None:
    likelihood: Any = Own()
    likelihood.function = torch.exp
    uq.save(fit(likelihood=likelihood, **COUNTS), folder / "new.h5")


def changed() -> nn.Module:
    model = net()
    next(model.parameters()).data.view(-1)[0] += 1e-6
    return model


def other() -> nn.Module:
    model = net()
    return nn.Sequential(
        *[nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model]
    )


ABSENT = "xpu" if torch.cuda.is_available() else "cuda"
NOT_THOSE = "are not those that the posterior"
STRANGERS: dict[str, dict[str, Any]] = {
    "a function": {"class": "os:system"},
    "code as a class": {"class": "import os; os"},
    "a number as a class": {"class": 5},
    "a long class": {"class": "a:" + "b" * 2000},
    "code": {"code": "print(1)"},
    "nested": {"attributes": {"exposure": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}}},
}
ROWS = {
    # models
    "other widths": Row(
        lambda f: load(f, "plain", net(outputs=2)), r"2\.weight.*\(3, 5\).*\(2, 5\)", PosteriorMismatchError),
    "a layer less": Row(lambda f: load(f, "plain", nn.Linear(4, 5)), "0.weight.*lacks", PosteriorMismatchError),
    "other numbers": Row(lambda f: load(f, "plain", other()), NOT_THOSE, PosteriorMismatchError),
    "a number of another": Row(lambda f: load(f, "plain", changed()), NOT_THOSE, PosteriorMismatchError),
    "float64": Row(lambda f: load(f, "plain", net().double()), NOT_THOSE, PosteriorMismatchError),
    "a number of another, of a stranger": Row(
        lambda f: load(f, "plain", changed(), untrusted=True), NOT_THOSE, PosteriorMismatchError),
    # numbers and records
    "too large for float16": Row(lambda f: with_value(f, 1e6, dtype=torch.float16), "bfloat16"),
    "too small for float16": Row(lambda f: with_value(f, 1e-9, dtype=torch.float16), "lose 100%"),
    "no number": Row(lambda f: with_value(f, float("nan")), "'0'", NonFiniteError),
    "a negative variance": Row(lambda f: with_value(f, -1.0), "negative"),
    "whole numbers": Row(lambda f: with_value(f, 1.0, dtype=torch.int8), "dtype"),
    "another compression": Row(lambda f: with_value(f, 1.0, compression="lzf"), "compression"),
    "a function as a record": Row(lambda f: noted(f, fit={"callback": print}), "no file can keep: .*JSON"),
    "a long record": Row(lambda f: noted(f, tuning={"long": "x" * 5000}), "no file can keep: .*long"),
    "many records": Row(
        lambda f: noted(f, tuning={f"key{i}": "" for i in range(300_000)}), "no file can keep: .*values"),
    # likelihoods
    "a likelihood of the user's": Row(lambda f: load(f, "own"), r"'Own' of the class '.*:Own'.*likelihood=Own"),
    "other attributes": Row(
        lambda f: load(f, "own", likelihood=Own()), r"exposure was 2\.0; of likelihood= exposure is 1\.0"),
    "another class": Row(lambda f: load(f, "own", likelihood=Other(2.0)), "pass an object of the same class"),
    "a class of the package": Row(lambda f: load(f, "own", likelihood=uq.Gaussian()), "object of the same class"),
    "another noise": Row(lambda f: load(f, "values", likelihood=uq.Gaussian(2.0)), "noise_variance was"),
    "a class of the user's": Row(lambda f: load(f, "values", likelihood=Own()), "same class"),
    "an attribute that no file keeps": Row(with_function, "attribute 'function' of the type builtin"),
    "a function": Row(lambda f: load(f, "a function"), "class 'os:system'"),
    "code as a class": Row(lambda f: load(f, "code as a class"), "must be a text of the form", CorruptPosteriorError),
    "a number as a class": Row(lambda f: load(f, "a number as a class"), "must be a text", CorruptPosteriorError),
    "a long class": Row(lambda f: load(f, "a long class"), "must be a text of at most", CorruptPosteriorError),
    "code": Row(lambda f: load(f, "code"), "does not belong there", CorruptPosteriorError),
    "nested": Row(lambda f: load(f, "nested"), "nested at most", CorruptPosteriorError),
    # parts of what a model returns
    "a function is asked for": Row(
        lambda f: load(f, "function", Two()), r"output=first.*pass the same one, uq.load\(path, model, output="),
    "another part": Row(
        lambda f: load(f, "part", Two(), output=1), "fitted with output=0, and this is another one"),
    "a function as a part": Row(
        lambda f: load(f, "part", Two(), output=first), "fitted with output=0, and this is another one"),
    # devices
    "a device too many": Row(
        lambda f: load(f, "plain", device="xpu:90"), "device='xpu:90' is not there: .*leave device out"),
    "no device": Row(
        lambda f: load(f, "plain", device="graphics"), "device='graphics' is not there: torch knows none of this name"),
    "a device without numbers": Row(
        lambda f: load(f, "plain", device="meta"), "device='meta' is no place for numbers"),
    "a device that is not in": Row(
        lambda f: load(f, "plain", device=ABSENT),
        f"device='{ABSENT}' is not there: torch finds no {ABSENT} device that it can use"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    hold(ROWS[name]._replace(call=partial(ROWS[name].call, folder)))
    assert sorted(folder.iterdir()) == before
