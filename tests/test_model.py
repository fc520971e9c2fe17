"""The user's model: wrapped, made in inference mode, without numbers, or not to be copied; forward derivatives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_fits import HEADS, fit, inputs, labels, refused
from small_fits import net as make_net
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core import model as model_file


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    return make_net()


@pytest.fixture(scope="module")
def posterior(net: nn.Sequential) -> uq.Posterior:
    return fit(net, [(inputs(), labels())])


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DataParallel": lambda model: nn.DataParallel(model, device_ids=[]),
    "torch.compile": torch.compile,
    "both": lambda model: torch.compile(nn.DataParallel(model, device_ids=[])),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapped_model_has_the_names_of_the_bare_one(case: str, tmp_path: Path) -> None:
    wrapper = WRAPPERS[case]
    fitted = fit(wrapper(make_net()), [(inputs(), labels())])
    assert list(fitted.layers) == ["0", "2"]
    uq.save(fitted, tmp_path / "wrapped.h5")
    bare = make_net()
    uq.save(fit(bare, [(inputs(), labels())]), tmp_path / "bare.h5")
    expected = cast(Any, uq.wrap(bare, uq.load(tmp_path / "wrapped.h5", bare))(inputs())).probs
    for head in HEADS:
        model = wrapper(make_net())
        found = cast(Any, uq.wrap(model, uq.load(tmp_path / "bare.h5", model), head)(inputs())).probs
        assert head != "linearized" or torch.equal(found, expected)


def test_a_part_that_is_wrapped_is_named(tmp_path: Path) -> None:
    def parts(model: nn.Module) -> nn.Module:
        return nn.Sequential(torch.compile(model), nn.Identity())  # pyright: ignore[reportArgumentType]

    bare = nn.Sequential(make_net(), nn.Identity())
    fitted = fit(bare, [(inputs(), labels())])
    uq.save(fitted, tmp_path / "bare.h5")
    names = r"'0\.0\.weight'.* calls '0\._orig_mod\.0\.weight'"
    refused(names, lambda: uq.load(tmp_path / "bare.h5", parts(make_net())))
    refused(names, lambda: uq.wrap(parts(make_net()), fitted))


def test_a_fit_in_inference_mode() -> None:
    with torch.inference_mode():
        refused("call fit outside", lambda: fit(make_net(), [(inputs(), labels())]))
    with torch.inference_mode():
        x = inputs()
    with torch.no_grad():
        found = fit(make_net(), [(x, labels())])
    expected = fit(make_net(), [(inputs(), labels())])
    assert all(torch.equal(value, found.variance()[name]) for name, value in expected.variance().items())


def test_a_model_made_in_inference_mode(net: nn.Sequential, posterior: uq.Posterior, tmp_path: Path) -> None:
    with torch.inference_mode():
        made = make_net()
    message = r"'0\.weight' was made under torch\.inference_mode\(\).*fresh\.load_state_dict"
    refused(message, lambda: fit(made, [(inputs(), labels())]))
    refused(message, lambda: uq.wrap(made, posterior, "linearized"))
    with torch.inference_mode():
        running = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        numbers = running.get_submodule("1").running_mean
    part = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    part.get_submodule("1").running_mean = numbers
    refused(r"'1\.running_mean' was made", lambda: fit(part, [(inputs(), labels())]))
    fresh = make_net()
    fresh.load_state_dict(made.state_dict())
    expected = cast(Any, uq.wrap(net, posterior)(inputs())).probs
    assert torch.equal(cast(Any, uq.wrap(fresh, posterior)(inputs())).probs, expected)


@pytest.mark.study
def test_forward_derivatives_leave_no_warning_of_torchs_own() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        f"import runpy; jvp = runpy.run_path({model_file.__file__!r})['jvp']; import torch\n"
        "words = {'needed_by': 'a test needs', 'way_out': 'take another function'}\n"
        "outputs, derivative = jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),), **words)\n"
        "assert derivative.tolist() == [1.0, 1.0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_without_numbers(tmp_path: Path) -> None:
    net = make_net()
    posterior = fit(net)
    uq.save(posterior, tmp_path / "p.h5")
    empty, partly = make_net().to("meta"), make_net()
    partly[2].to("meta")
    for model in (empty, partly):
        for call in (
            lambda model=model: fit(model),
            lambda model=model: uq.wrap(model, posterior),
            lambda model=model: uq.load(tmp_path / "p.h5", model),
        ):
            refused(r"weight' is on the meta device.*CPU or a GPU", call)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_models_that_cannot_be_copied() -> None:
    refused("TorchScript", lambda: fit(torch.jit.trace(make_net(), inputs())))
    lazy = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))
    refused("'0.weight' is not initialised", lambda: fit(lazy))
    locked = make_net()
    locked.generator = (i for i in range(3))
    refused("cannot be copied.*generator", lambda: fit(locked))
