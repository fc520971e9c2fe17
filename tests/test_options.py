"""Options: one declaration by types, one short sentence for what is wrong, and what may have been meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_type_hints

import jsonargparse
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import (
    Count,
    Natural,
    Options,
    Positive,
    Seed,
    Share,
    Unit,
    check_option,
    did_you_mean,
    shown,
)
from posthoc_uq.heads import HEADS


def refused(call: Callable[[], Any], *words: str) -> None:
    """One or two short sentences of ours, with these words in them."""
    with pytest.raises(uq.PosthocUQError) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is uq.PosthocUQError and 20 < len(text) < 500 and text.count(". ") <= 1, text
    assert all(word in text for word in words), text


NO_NUMBER: list[Any] = ["x", "1", True, None, [1.0, 2.0], object(), torch.ones(2), float("nan"), float("inf")]
KINDS: dict[Any, tuple[list[Any], list[Any]]] = {  # what is taken, and what is refused
    Positive: ([1, 0.5, np.float32(2), torch.tensor(3.0), torch.tensor([4]), Fraction(1, 2)], [*NO_NUMBER, 0, -1.0]),
    Unit: ([0, 1.0, np.float64(0.5)], [*NO_NUMBER, -0.1, 1.1]),
    Share: ([1e-300, 1], [*NO_NUMBER, 0.0, 1.5]),
    Count: ([1, 3.0, np.int64(2), torch.tensor(5), 2**62], [*NO_NUMBER, 0, 1.5, -1, 2**70]),
    Natural: ([0, np.uint8(3)], [*NO_NUMBER, -1, 0.5, 2**70]),
    Seed: ([-1, 0, 2**64 - 1], [*NO_NUMBER, 1.5, 2**70]),
    get_type_hints(uq.INF, include_extras=True)["rank"]: ([3, 0.5, 4.0, np.int32(2), 1e9], [*NO_NUMBER, 1.5, -1, 0]),
    Share | Literal["auto"]: ([0.5, "auto"], ["x", "1", 2.0, ["auto"], np.array(["auto"] * 2), True]),
    bool: ([True, np.bool_(False)], ["x", 1, 1.5, None, [True]]),
    Literal["raise", "skip"]: (["raise"], ["x", 5, ["raise"], None]),
    Callable[..., Any] | None: ([len, None], ["x", 5]),
    torch.dtype | None: ([torch.float32, None], ["x", 5, np.ones(2)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_type_says_what_is_taken(kind: Any) -> None:
    taken, wrong = KINDS[kind]
    for value in taken:
        found = check_option("option", value, kind)
        assert found == (value.item() if hasattr(value, "item") else value)
        assert not isinstance(found, (np.generic, Tensor, Fraction))
    for value in wrong:
        refused(lambda value=value: check_option("option", value, kind), "option must be", shown(value))


class Untouchable:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the loader was read")


@pytest.fixture(scope="module")
def fitted() -> tuple[nn.Module, uq.Posterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    return model, uq.fit(model, [(x, y)], "diag", prior_precision=1.0, progress=False)


@pytest.mark.parametrize("head", HEADS)
def test_every_option_of_a_head_is_checked(head: str, fitted: tuple[nn.Module, uq.Posterior]) -> None:
    for option in list(inspect.signature(HEADS[head]).parameters)[2:]:
        if option != "positions":
            refused(lambda o=option: uq.wrap(*fitted, head, **{o: object()}), option)
    unknown = f"head='{head}' does not take ['nvelty']", "Did you mean 'novelty'?"
    refused(lambda: uq.wrap(*fitted, head, nvelty=True), *unknown)


_CALLS: dict[str, dict[str, list[Any]]] = {
    "fit": {
        "seed": ["x", None, 1.5],
        "prior_precision": ["x", [1.0, 2.0], -1.0, 0.0, 1e-35, 1e35],
        "divergence": ["x", 0.0],
        "layers": [5, True, [1]],
        "likelihood": ["x", 5, [], uq.Gaussian],
        "head": ["x", 5],
        "method": ["x", 5, uq.INF],
        "batch_to_inputs": ["x"],
        "noise_variance": [1.0],  # of a classifier
        "progress": ["no", 1],
    },
    "tune": {
        "criterion": ["x", 5, ["faithful"]],
        "divergence": ["x", 0.0, True],
        "temperature": ["x", 1.5],
        "per_layer": ["x", True],
        "noise": ["x"],
        "parameters": ["x", 5, [5], torch.ones(())],
        "initialisations": ["x", 0],
        "head": ["x", 5],
        "n_samples": [None, 0],
        "max_evaluations": [None, "x"],
        "seed": [None, 2**70],
        "batch_to_targets": ["x"],
        "progress": ["no"],
    },
    "evaluate": {
        "likelihood": ["x", 5],
        "score": ["x", 5, ["entropy"]],
        "joint": ["x", None, [1], [["x"]]],
        "referral_rates": ["x", None, ["x"], [1.0], [True], {"a": 1}],
        "bins": [None, 0, 1.5],
        "n_examples": [None, -1],
        "class_names": ["x", {0: "a"}],
        "display": ["x"],
        "batch_to_targets": ["x"],
    },
}


@pytest.mark.parametrize("call", _CALLS)
def test_arguments_are_checked_before_any_data_are_read(
    call: str, fitted: tuple[nn.Module, uq.Posterior]
) -> None:
    model, posterior = fitted
    first = {"fit": model, "tune": posterior, "evaluate": model}[call]
    run: Any = getattr(uq, call)
    read_before = {"layers"}  # by the pass that finds the layers
    for option, values in _CALLS[call].items():
        for value in values:
            loader: Any = (
                [(torch.ones(2, 4), torch.ones(2).long())] if option in read_before else Untouchable()
            )
            refused(
                lambda o=option, v=value, d=loader: run(first, d, **{"progress": False, o: v}),
                option.strip("s"),
            )


@pytest.mark.parametrize(
    "setting", ["scale", "prior_precision", "residual_weight", "noise_scale", "temperature"]
)
def test_hyperparameters_are_checked(setting: str, fitted: tuple[nn.Module, uq.Posterior]) -> None:
    posterior = fitted[1]
    before = posterior.settings
    vectors = [[1.0, 2.0, 3.0], torch.ones(3)]  # a prior precision may be one of each of two layers
    for value in (
        *(each for each in NO_NUMBER if each is not None and not isinstance(each, (list, torch.Tensor))),
        *vectors,
        -1.0,
        1e31,
        *([0.0, 1e-31] if setting != "residual_weight" else [1.5]),
    ):
        refused(lambda v=value: posterior.with_settings(**{setting: v}), setting)
    assert posterior.settings == before


def test_what_python_takes_a_file_keeps(fitted: tuple[nn.Module, uq.Posterior], tmp_path: Path) -> None:
    model, posterior = fitted
    for setting, bounds in {"prior_precision": (1e-30, 1e30), "temperature": (1e-12, 1e12)}.items():
        for value in bounds:
            uq.save(posterior.with_settings(**{setting: value}), tmp_path / "p.h5")
            assert getattr(uq.load(tmp_path / "p.h5", model), setting) == value
        for value in (bounds[0] / 2, bounds[1] * 2):
            refused(lambda s=setting, v=value: posterior.with_settings(**{s: v}), setting)
    for value in (1e-32, 1e32):
        refused(lambda v=value: uq.Gaussian(v), "noise_variance must be >= 1e-30 and <= 1e+30")


def test_what_was_meant() -> None:
    assert did_you_mean("zzz", ["rank"]) == "" and did_you_mean(5, ["rank"]) == ""
    assert did_you_mean("Rank", ["rank"]) == " Did you mean 'rank'?"


def test_arguments_of_laplace_torch_are_named_as_they_are_here(
    fitted: tuple[nn.Module, uq.Posterior],
) -> None:
    network, posterior = fitted
    with pytest.raises(
        uq.PosthocUQError, match=r"subset_of_weights is layers='last' or layers='all' in uq\.fit"
    ):
        uq.fit(network, [torch.randn(4, 4)], subset_of_weights="last_layer")
    with pytest.raises(uq.PosthocUQError, match=r"go to uq\.wrap\. link_approx is link='probit'"):
        uq.wrap(network, posterior)(torch.randn(4, 4), link_approx="probit")


def test_what_is_listed_and_printed_can_be_used(fitted: tuple[nn.Module, uq.Posterior]) -> None:
    network, posterior = fitted
    classes = {"interval", "set"} & set(dir(uq.wrap(network, posterior)(torch.randn(4, 4))))
    assert classes == {"set"}
    lines = str(posterior.history).splitlines()
    assert (
        len(lines) > 2 and lines[0].startswith("fit: ") and not any(line.endswith(": None") for line in lines)
    )


def test_the_command_line_reads_the_same_declaration() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(uq.INF, "method")
    given = parser.instantiate(parser.parse_args(["--method.rank=0.5", "--method.basis_fraction=auto"]))
    assert given.method == uq.INF(rank=0.5)
    refused(lambda: parser.instantiate(parser.parse_args(["--method.rank=-3"])), "rank must be", "-3")


def test_a_file_says_which_options_are_not_the_defaults(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hasty(uq.KFAC):
        most_batches: Count = 7

    model, loader = nn.Linear(4, 3), [(torch.randn(12, 4), torch.arange(12) % 3)]
    for method, kept in ((Hasty(), None), (Hasty(most_batches=9), 9)):
        posterior = uq.fit(model, loader, method, prior_precision=1.0, progress=False)
        uq.save(posterior, tmp_path / "posterior.h5")
        assert uq.load(tmp_path / "posterior.h5", model).history.fit.get("most batches") == kept
        assert ("most batches: 9" in str(posterior.report())) == (kept is not None)


def test_a_class_of_options_of_ones_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Options):  # inside of a function, where its types cannot be looked up
        number: Unknowable = 3  # type: ignore[name-defined]  # noqa: F821

    assert Local(number="anything").number == "anything"
