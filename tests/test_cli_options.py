"""Options of the command line that are made from the library: fields of methods, arguments of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import click
import pytest
import torch
from cli_helpers import failure, make_place, net, run, run_json, tensors
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.cli import fitting
from posthoc_uq.cli.docstrings import described, summary
from posthoc_uq.cli.fields import NONE, arguments_of, fields_of, parameter_type
from posthoc_uq.fitting.wrap import HEADS, head_class
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors.block import FAMILIES, Block
from posthoc_uq.posteriors.laplace import DiagonalBlock


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a model, and in ``m.h5`` a posterior for the linearised head."""
    folder = make_place(tmp_path_factory.mktemp("options"))
    run("fit", folder / "val", *model(folder), "-o", folder / "m.h5", "--prior-precision", 5)
    return folder


def model(place: Path) -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:net", "--weights", place / "w.pt", "--workers", 0]


def loaded(place: Path, file: Path) -> uq.Posterior:
    network = net()
    network.load_state_dict(torch.load(place / "w.pt"))
    return uq.load(file, network.eval())


def said(command: str) -> str:
    """A help text in one line."""
    return " ".join(run(command, "--help").stdout.split())


@dataclass(frozen=True, kw_only=True)
class Stretched(uq.Diagonal):
    """A diagonal of another size.

    Attributes:
        stretch: by which the diagonal is multiplied.
        weights: a number whose name is taken by ``--weights``.
        size: ``"small"`` or ``"large"``.
        listeners: told of nothing; no text can be given for them.
    """

    name: ClassVar[str] = "stretched"

    stretch: float = 1.0
    weights: int | None = None
    size: Literal["small", "large"] = "small"
    even: bool = False
    listeners: list[Any] | None = None

    def blocks(self, task: Any) -> dict[str, Block]:
        factor = (
            self.stretch * (self.weights or 1) * (10 if self.size == "large" else 1) * (2 if self.even else 1)
        )
        found = super().blocks(task)
        return {name: DiagonalBlock(factor * own.diagonal) for name, own in found.items()}  # type: ignore[attr-defined]


@pytest.fixture
def stretched() -> Iterator[None]:
    """A method of somebody else's, known for the time of a test."""
    uq.register_method(Stretched)
    yield
    del METHODS["stretched"], FAMILIES["stretched"]


def diagonal(posterior: uq.Posterior) -> Tensor:
    return torch.cat([block.diagonal.flatten() for block in posterior.blocks.values()])  # type: ignore[attr-defined]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[uq.Method, uq.Posterior]]:
    """What the command ``fit`` asks the library for, and what it gets."""
    calls: list[tuple[uq.Method, uq.Posterior]] = []

    def fit(*args: Any, method: uq.Method, **kwargs: Any) -> uq.Posterior:
        calls.append((method, uq.fit(*args, method=method, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(fitting, "fit", fit)
    return calls


def test_a_method_that_is_registered_later_is_known_with_its_options(
    place: Path, tmp_path: Path, stretched: None, fitted: list[tuple[uq.Method, uq.Posterior]]
) -> None:
    text = said("fit")
    assert "stretched A diagonal of another size" in text
    own = text[text.index("Options of --method stretched:") :]
    assert "--stretch FLOAT By which the diagonal is multiplied. [default: 1.0]" in own
    assert "--method-weights INTEGER A number whose name is taken by --weights." in own
    assert "--size [small|large] small or large. [default: small]" in own
    assert "--even / --no-even" in own and "listeners" not in own

    data = ["fit", place / "val", *model(place), "--prior-precision", 5, "-o", tmp_path / "x.h5", "--force"]
    run(*data, "--method", "diag")
    options = ["--stretch", 1.5, "--method-weights", 2, "--size", "large", "--even"]
    run(*data, "--method", "stretched", *options)
    assert run_json("inspect", tmp_path / "x.h5")["method"] == "stretched"
    (_, plain), (method, wide) = fitted
    assert method == Stretched(stretch=1.5, weights=2, size="large", even=True)
    torch.testing.assert_close(diagonal(wide), 60 * diagonal(plain))
    refused = run(*data, "--method", "diag", "--stretch", 2, code=2).stderr
    assert "--stretch is for the method stretched (--method stretched), and this is diag" in refused
    run(*data, "--method", "stretched", "--size", "huge", code=2)


def test_a_method_is_gone_from_the_help_with_its_registration() -> None:
    assert "stretched" not in said("fit")


@pytest.mark.parametrize("name", list(METHODS))
def test_the_help_has_every_method_with_every_field_and_its_words(name: str) -> None:
    kind, text = METHODS[name], said("fit")
    assert f"{name} {summary(kind)}" in text and summary(kind)
    types = get_type_hints(kind)
    left_out = {"optimizer", "schedule", "mask"}  # and what only an object can be
    left_out |= {name for name, declared in types.items() if declared == uq.Posterior | None}
    assert {field.name for field in fields(kind)} - {field.name for field in fields_of(kind)} <= left_out
    for field in fields_of(kind):
        assert f"--{field.name.replace('_', '-')}" in text and field.text, field.name


def test_no_option_of_a_method_or_a_head_is_without_words() -> None:
    for kind in METHODS.values():
        assert described(kind, "Attributes").keys() >= {field.name for field in fields(kind)}
    for head in HEADS:
        assert all(argument.text for argument in arguments_of(head_class(head)))


def test_the_help_has_every_head_with_every_argument() -> None:
    for command in ("predict", "evaluate", "tune"):
        text = said(command)
        for head in HEADS:
            assert f"{head} {summary(head_class(head))}" in text
            for argument in arguments_of(head_class(head)):
                prefix = "head-" if argument.name == "weights" else ""
                assert f"--{prefix}{argument.name.replace('_', '-')}" in text
        assert "output-map" not in text and "generator" not in text


def test_shared_options_come_first_and_each_method_has_its_own_section() -> None:
    text = said("fit")
    titles = ["Options:", "Methods:", "Options of every method:", "Options of --method inf:"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert text.count("--rank ") - text.count("--rank 100 -o") == 1, "said once, but for an example"
    own = text[text.index("Options of --method inf:") : text.index("Options of --method function_space:")]
    assert all(option in own for option in ("--rank", "--basis", "--correction", "--residual-weight"))
    assert "--fisher" not in own and "--epochs" not in own


OPTIONS: dict[str, list[Any]] = {
    "inf": ["--rank", 0.5, "--basis", "exact", "--correction", "clamp", "--residual-weight", 0.5],
    "efb": ["--fisher", "mc", "--mc-labels", 2],
    "kfac": ["--fisher", "mc", "--n-samples", 2, "--dtype", "float64"],
    "diag": ["--memory-budget", 8, "--unsupported", "skip"],
    "full": ["--layers", "last", "--fisher", "empirical"],
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_reach_the_method(
    place: Path, tmp_path: Path, name: str, fitted: list[tuple[uq.Method, uq.Posterior]]
) -> None:
    data = ["fit", place / "val", *model(place), "--prior-precision", 5, "-o", tmp_path / "x.h5"]
    run(*data, "--method", name, *OPTIONS[name])
    expected = {
        "inf": uq.INF(rank=0.5, basis="exact", correction="clamp", residual_weight=0.5),
        "efb": uq.EFB(fisher="mc", n_samples=2),
        "kfac": uq.KFAC(fisher="mc", n_samples=2, dtype=torch.float64),
        "diag": uq.Diagonal(memory_budget=8 * 2**20, unsupported="skip"),
        "full": uq.Dense(fisher="empirical"),
    }[name]
    assert [method for method, _ in fitted] == [expected]


def test_layers_by_name_reach_a_method_that_has_them(place: Path, tmp_path: Path) -> None:
    """The network of these tests pools in a way that messages do not pass, which the method says of a whole network."""
    fit = ["fit", place / "val", *model(place), "--method", "message_passing", "-o", tmp_path / "x.h5"]
    assert "AdaptiveAvgPool2d" in failure(*fit, "--layers", "all")
    assert run_json(*fit, "--layers", "last")["report"]["summary"]["layers"] == 1


def test_a_training_over_functions(place: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "f.h5", tmp_path / "f.csv"
    options = ["--method", "function_space", "--epochs", 1, "--context", "batch", "--n-context", 4]
    options += ["--lr", 1e-2, "--no-train-mean", "--clip", "none", "--initial-log-variance", -3]
    options += ["--log-variance-lr", 0.5, "--seed", 2]
    summary = run_json("fit", place / "val", *model(place), *options, "--batch-size", 9, "-o", file)
    assert summary["report"]["summary"]["method"] == "function_space"
    found = loaded(place, file)
    x, y = tensors(place / "val")
    network = net()
    network.load_state_dict(torch.load(place / "w.pt"))
    method = uq.FunctionSpace(
        epochs=1,
        context="batch",
        n_context=4,
        lr=1e-2,
        train_mean=False,
        clip=None,
        initial_log_variance=-3.0,
        log_variance_lr=0.5,
    )
    batches = list(zip(x.split(9), y.split(9), strict=True))
    expected = uq.fit(network.eval(), batches, method, seed=2, progress=False)
    variances = found.variance()
    for name, variance in expected.variance().items():
        torch.testing.assert_close(variances[name], variance, rtol=1e-5, atol=1e-12)
    assert found.scale == pytest.approx(expected.scale)
    assert run_json("predict", file, place / "flat", *model(place), "-o", out)["head"]["head"] == "sampling"
    data = ["fit", place / "val", *model(place), "-o", file, "--force", "--method", "function_space"]
    assert "context must be" in failure(*data, "--context", "colours", "--epochs", 1)
    assert "--rank is for the method inf" in run(*data, "--rank", 5, code=2).stderr


class TestHeads:
    def test_an_option_of_one_head_alone_names_the_head(self, place: Path, tmp_path: Path) -> None:
        common = [
            "predict",
            place / "m.h5",
            place / "flat",
            *model(place),
            "-o",
            tmp_path / "x.csv",
            "--force",
        ]
        found = run_json(*common, "--n-samples", 3, "--antithetic")["head"]
        assert (found["head"], found["n_samples"], found["antithetic"]) == ("sampling", 3, True)
        found = run_json(*common, "--relu", "exact", "--head-weights", "marginal", "--link", "bridge")["head"]
        assert (found["head"], found["relu"], found["weights"]) == ("moments", "exact", "marginal")
        found = run_json(*common, "--link", "mc", "--n-draws", 40)[
            "head"
        ]  # of two heads, and one is the file's
        assert (found["head"], found["n_draws"]) == ("linearized", 40)

    def test_types(self, place: Path, tmp_path: Path) -> None:
        common = [
            "predict",
            place / "m.h5",
            place / "flat",
            *model(place),
            "-o",
            tmp_path / "x.csv",
            "--force",
        ]
        found = run_json(*common, "--outputs", 2, "--engine", "exact", "--memory-budget", 1)["head"]
        assert (found["head"], found["outputs"], found["engine"]) == ("linearized", "2", "exact")
        found = run_json(*common, "--batched", "false", "--n-samples", 3)["head"]
        assert (found["head"], found["n_samples"]) == ("sampling", 3)
        assert "'no' is not one of auto, true, false" in run(*common, "--batched", "no", code=2).stderr

    def test_options_of_other_heads(self, place: Path, tmp_path: Path) -> None:
        common = [
            "predict",
            place / "m.h5",
            place / "flat",
            *model(place),
            "-o",
            tmp_path / "x.csv",
            "--force",
        ]
        said = run(*common, "--head", "sampling", "--n-draws", 4, code=2).stderr
        assert (
            "--n-draws is for the heads moments and linearized (--head linearized), and this is sampling"
            in said
        )
        said = run(*common, "--head", "sampling", "--head-weights", "row", code=2).stderr
        assert "--head-weights is for the head moments (--head moments), and this is sampling" in said
        assert "--link is for" in run(*common, "--head", "sampling", "--link", "mc", code=2).stderr
        said = failure(*common, "--n-samples", 4, "--engine", "exact")  # of no head both
        assert "--n-samples is for the head sampling (--head sampling), and this is linearized." in said


@dataclass
class Example:
    """One of the kinds. More of it.

    Attributes:
        number: of the sort ``kind="x"``, or `y`;
            it goes on here: and here.
        either: a share or a count.
        unknown: whose type has a name that is not there.

    Raises:
        ValueError: never.
    """

    number: int = 3
    either: int | float | None = 0.5
    unknown: Missing = None  # type: ignore[name-defined]  # noqa: F821
    words: Literal["a", "b"] = "a"
    both: Literal["auto"] | bool = "auto"


def test_fields_with_their_words() -> None:
    assert described(Example, "Attributes") == {
        "number": "Of the sort --kind x, or y; it goes on here: and here.",
        "either": "A share or a count.",
        "unknown": "Whose type has a name that is not there.",
    }
    found = {field.name: field for field in fields_of(Example)}
    assert list(found) == ["number", "either", "words", "both"]
    assert (found["either"].default, found["either"].text) == (0.5, "A share or a count.")


def test_text_becomes_values() -> None:
    def value(text: str, *annotations: Any, default: Any = None) -> Any:
        kind = parameter_type(annotations, default)
        assert kind is not None
        return kind.convert(text, None, None)

    assert [value(text, int | float) for text in ("3", "0.25")] == [3, 0.25]
    assert isinstance(value("3", int | float), int) and isinstance(value("3", float), float)
    assert [value(text, Literal["auto"] | bool) for text in ("auto", "true", "False")] == [
        "auto",
        True,
        False,
    ]
    assert [value(text, str | int) for text in ("topk", "7")] == ["topk", 7]
    assert value("float16", torch.dtype | None) is torch.float16 is value("torch.float16", torch.dtype | None)
    assert value("3", int, float) == 3 and value("anything", Any) == "anything"
    assert value("none", float | None, default=1.0) is NONE and value("2", float | None, default=1.0) == 2.0
    assert parameter_type([bool]) is None is parameter_type([bool | None])
    for text, annotation in (
        ("x", int | float),
        ("c", Literal["a", "b"]),
        ("no", torch.dtype),
        ("none", int | None),
    ):
        with pytest.raises(click.BadParameter):
            value(text, annotation)
