"""The user's model: wrapped, made in inference mode, without numbers, or not to be copied; forward derivatives."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_fits import HEADS, fit, inputs, labels, refused
from small_fits import net as make_net
from torch import Tensor, nn

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
    refused(names, lambda: uq.load(tmp_path / "bare.h5", parts(make_net())), uq.PosteriorMismatchError)
    refused(names, lambda: uq.wrap(parts(make_net()), fitted), uq.PosteriorMismatchError)


def test_a_fit_of_data_made_in_inference_mode() -> None:
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


LABELS = torch.arange(16) % 3
DATA = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """Two layers, in which subclasses run otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.body(x)))


class WithoutGrad(Plain):
    forward = torch.no_grad()(Plain.forward)


class InInference(Plain):
    forward = torch.inference_mode()(Plain.forward)


class PartlyInInference(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = torch.relu(self.body(x))
        return self.last(h)


class PartlyWithoutGrad(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(self.body(x))
        return self.last(h)


class Mapped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


class SparseWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Parameter(torch.eye(5).to_sparse())


class SparseBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(5).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.graph, x.T).T)


class OfWidthZero(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.utils.skip_init(nn.Linear, 5, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty(x).sum(1, keepdim=True)


class OfBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _fit_plainly(model: nn.Module, x: Tensor = DATA, **options: Any) -> uq.Posterior:
    return uq.fit(model, [(x, LABELS)], progress=False, **{"prior_precision": 1.0, **options})


def _scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.jit.script(model)


def _quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # likewise
        return torch.ao.quantization.quantize_dynamic(Plain(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (WithoutGrad, r"No gradient leads from the model's outputs .* torch\.no_grad\(\)"),
        (InInference, r"No gradient leads .* torch\.inference_mode\(\)"),
        (PartlyInInference, r"A part .* under torch\.inference_mode\(\).* torch\.no_grad"),
        (SparseWeight, r"'sparse' is sparse .*to_dense"),
        (OfBuffers, r"no parameters.* buffers, as 'weight'"),
        (_quantised, r"no parameters.* 'body' \(Linear\) is quantised"),
        (lambda: _scripted(Plain()), "TorchScript module .*original nn.Module"),
        (lambda: torch.jit.freeze(_scripted(Plain())), "TorchScript module .*original nn.Module"),
    ],
)
def test_what_no_posterior_can_be_over_is_named(build: Any, reason: str, tmp_path: Path) -> None:
    model = build()
    with pytest.raises(uq.PosthocUQError, match=reason):
        _fit_plainly(model)
    if isinstance(model, Plain):
        return
    posterior = _fit_plainly(Plain())
    uq.save(posterior, tmp_path / "p.h5")
    for call in (lambda: uq.wrap(model, posterior), lambda: uq.load(tmp_path / "p.h5", model)):
        with pytest.raises(uq.PosthocUQError, match=reason):
            call()


@pytest.mark.parametrize("build", [Mapped, SparseBuffer, OfWidthZero])
def test_forms_that_change_nothing_give_the_posterior_of_the_plain_model(build: Any, tmp_path: Path) -> None:
    model, plain = build(), Plain()
    found, expected = (_fit_plainly(each, method="full", fisher="exact") for each in (model, plain))
    assert set(found.mean) == set(expected.mean)
    truth = uq.wrap(plain, expected).functional_variance(DATA)
    uq.save(found, tmp_path / "p.h5")
    for each in (found, uq.load(tmp_path / "p.h5", model)):
        torch.testing.assert_close(
            uq.wrap(model, each).functional_variance(DATA), truth, rtol=1e-4, atol=1e-6
        )


def test_a_part_without_gradients_and_a_scripted_part_stay_certain() -> None:
    plain, options = Plain(), {"method": "full", "fisher": "exact"}
    truth = uq.wrap(plain, _fit_plainly(plain, layers="last", **options)).functional_variance(DATA)
    scripted = Plain()
    scripted.body = _scripted(scripted.body)
    assert set(
        _fit_plainly(nn.Sequential(scripted.body, nn.ReLU(), scripted.last), prior_precision=None).mean
    ) == {
        "2.weight",
        "2.bias",
    }
    for model in (PartlyWithoutGrad(), scripted):
        posterior = _fit_plainly(model, **options)
        assert set(posterior.mean) == {"last.weight", "last.bias"}
        predictor = uq.wrap(model, posterior)
        torch.testing.assert_close(predictor.functional_variance(DATA), truth)
        with torch.no_grad():
            model.body.weight.mul_(2)
        with pytest.raises(uq.PosteriorMismatchError, match=r"body\.weight"):
            predictor(DATA)


def test_sparse_and_nested_inputs_are_refused_with_the_way_out() -> None:
    predictor = uq.wrap(Plain(), _fit_plainly(Plain()))
    nested = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)])
    for given, reason in (
        (DATA.to_sparse(), r"sparse tensor .*to_dense"),
        (nested, r"nested tensor .*padded"),
    ):
        with pytest.raises(uq.PosthocUQError, match=reason):
            uq.fit(Plain(), [given], progress=False)
        with pytest.raises(uq.PosthocUQError, match=reason):
            predictor(given)


@pytest.mark.parametrize("method", ["inf", "function_space", "utvi", "latent_binary", "message_passing"])
def test_a_fit_within_no_grad_is_the_same(method: str) -> None:
    options: dict[str, Any] = (
        {} if method in ("inf", "message_passing") else {"epochs": 1, "prior_precision": None}
    )

    def drawn() -> list[Tensor]:
        posterior = _fit_plainly(Plain(), method=method, **options)
        return list(posterior.sample(1, torch.Generator().manual_seed(0)).values())

    expected = drawn()
    with torch.no_grad():
        found = drawn()
    assert all(map(torch.equal, found, expected))
    with (
        torch.inference_mode(),
        pytest.raises(uq.PosthocUQError, match=r"gradients, which torch\.inference_mode"),
    ):
        drawn()


def test_leave_one_out_within_inference_mode_is_refused() -> None:
    posterior = _fit_plainly(Plain())
    with (
        torch.inference_mode(),
        pytest.raises(uq.PosthocUQError, match=r"gradients, which torch\.inference_mode"),
    ):
        uq.tune(posterior, [(DATA, LABELS)], criterion="leave_one_out", progress=False)
