"""Exported programs: a CNN and a ViT, both heads, from the file, in equal numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
from torch import nn

import posthoc_uq as uq
from posthoc_uq import export
from posthoc_uq.app import exportable
from posthoc_uq.likelihoods import (
    ClassTensors,
    PromisedClassTensors,
    PromisedValueTensors,
    RankedClassTensors,
    ValueTensors,
)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    ).eval()


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=48, num_heads=2, num_classes=5
    ).eval()


def fitted(net: nn.Module, **options: Any) -> uq.Posterior:
    x = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return uq.fit(
        net,
        [(x, torch.arange(12) % 5)],
        layers="all",
        prior_precision=200.0,
        rank=10,
        progress=False,
        **options,
    )


HEADS: dict[str, dict[str, Any]] = {
    "sampling": {"head": "sampling", "n_samples": 4},
    "moments": {"head": "moments"},
    "moments, probit": {"head": "moments", "link": "probit"},
}


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (cnn, "sampling"),
        *(
            pytest.param(*case, marks=pytest.mark.study)
            for case in ((cnn, "moments, probit"), (vit, "moments"))
        ),
    ],
)
def test_exported_programs_give_equal_results_from_their_file(build: Any, head: str, tmp_path: Path) -> None:
    net = build()
    check_program_in_a_file(uq.wrap(net, fitted(net), **HEADS[head]), tmp_path)


def check_program_in_a_file(predictor: uq.Predictor, tmp_path: Path) -> None:
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = predictor(x).tensors()
        export(predictor, x, path=tmp_path / "p.pt2")
        loaded = torch.export.load(tmp_path / "p.pt2").module()
        found = loaded(x)
        assert isinstance(found, ClassTensors)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        more = torch.randn(7, 3, 32, 32)  # another batch size
        torch.testing.assert_close(loaded(more).probs, predictor(more).probs, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


class Two(nn.Module):
    """Of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(one) + self.second(other)))


def small(kind: str) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """A network, inputs, targets and options of a posterior of its last layer."""
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    if kind == "regression":
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        return net, x, x[:, :2] + 0.3 * torch.randn(60, 2), {"likelihood": "regression"}
    if kind == "positions":
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        return net, torch.randn(60, 1, 4, 5), torch.arange(60 * 20).reshape(60, 4, 5) % 3, {}
    if kind == "vit":
        return vit(), torch.randn(60, 3, 32, 32), torch.arange(60) % 5, {}
    if kind == "two":
        return Two().double(), x.double(), torch.arange(60) % 4, {}
    classes = {"many": 13}.get(kind, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes))
    return net, x, torch.arange(60) % classes, {}


def agrees(found: Any, prediction: Any, level: float = 0.8) -> None:
    """Every tensor of a program is that of Python."""
    expected = prediction.tensors()._asdict() | {
        "p_novelty": lambda: prediction.familiarity(),
        "p_joint": lambda: prediction.familiarity("joint"),
        f"p_{prediction.default_score}": lambda: prediction.familiarity(prediction.default_score),
        "set": lambda: prediction.set(level),
        "lower": lambda: prediction.interval(level)[0],
        "upper": lambda: prediction.interval(level)[1],
    }
    fields = found if isinstance(found, dict) else found._asdict()
    for name, value in fields.items():
        wanted = expected[name]() if callable(expected[name]) else expected[name]
        if wanted.dtype == torch.bool:
            assert torch.equal(value, wanted), name
        else:
            near = {"rtol": 1e-5, "atol": 1e-5 * float(wanted.abs().nan_to_num().max())}
            torch.testing.assert_close(
                value, wanted, **near, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("kind", "method", "link"),
    [
        ("classes", "inf", "mc"),
        ("many", "kfac", "mc"),
        ("regression", "efb", "mc"),
        ("positions", "diag", "mc"),
        ("two", "subnetwork", "probit"),
        pytest.param("vit", "inf", "mc", marks=pytest.mark.study),
    ],
)
def test_a_last_layer_is_exported_in_closed_form(kind: str, method: str, link: str) -> None:
    net, x, y, options = small(kind)
    inputs = (x, x.flip(0)) if kind == "two" else (x,)
    data = [(inputs if kind == "two" else x, y)]
    posterior = uq.fit(
        net.eval(), data, method, layers="last", prior_precision=20.0, progress=False, **options
    )
    if kind != "regression":
        posterior = posterior.with_settings(temperature=1.3)
    posterior = uq.calibrate(posterior, data, link=link, progress=False)
    predictor = uq.wrap(net, posterior, link=link)
    assert predictor.head == "linearized"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The exported program")
        program = export(predictor, *(value[:4] for value in inputs), level=0.8).module()
    promised = PromisedValueTensors if kind == "regression" else PromisedClassTensors
    for rows in (1, 7):
        new = [2 * value[:rows] for value in inputs]
        found = program(*new)
        assert isinstance(found, promised)
        agrees(found, predictor(*new))
    if kind == "classes":  # numbers that are not finite stay in their row
        bad = x[:3].clone()
        bad[1, 0] = torch.nan
        found, good = program(bad), predictor(x[:3])
        assert found.probs[1].isnan().all() and found.set[1].all() and found.p_joint[1].isnan()
        torch.testing.assert_close(found.probs[::2], good.probs[::2], rtol=1e-5, atol=1e-6)


@pytest.mark.study
def test_a_compiled_program_is_the_predictor() -> None:
    """`torch.compile` of a program, here without its code generator."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(40, 4)
    posterior = uq.fit(
        net, [(x, torch.arange(40) % 3)], "kfac", layers="last", prior_precision=1.0, progress=False
    )
    predictor = uq.wrap(net, posterior)
    compiled: Any = torch.compile(export(predictor, x[:5]).module(), backend="eager")
    found, expected = compiled(x[:7]), predictor(x[:7])
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.entropy, expected.entropy(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.novelty, expected.novelty(), rtol=1e-4, atol=1e-6)


def test_a_program_of_many_classes_holds_nothing_quadratic_in_them() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1100)).eval()
    x = torch.randn(60, 4)
    posterior = uq.fit(
        net, [(x, torch.arange(60))], "kfac", layers="last", prior_precision=2.0, progress=False
    )
    predictor = uq.wrap(net, posterior)
    program = export(predictor, x[:4])  # nothing was predicted before
    for held in (*program.constants.values(), *program.state_dict.values()):
        assert not isinstance(held, torch.Tensor) or held.numel() < 1100**2 / 2
    for rows in (1, 7):
        # all classes take the points, and not the likely ones alone
        gap = program.module()(x[:rows]).probs - predictor(x[:rows]).probs
        assert float(gap.abs().sum(1).max()) / 2 < 1e-3


@pytest.mark.parametrize("kind", ["regression", pytest.param("many", marks=pytest.mark.study)])
def test_an_onnx_file_of_a_last_layer_is_the_predictor(kind: str, tmp_path: Path) -> None:
    net, x, y, options = small(kind)
    if kind == "regression":  # in float64, of which runtimes lack error functions
        net, x, y = nn.Sequential(net[0], nn.GELU(), net[2]).double(), x.double(), y.double()  # type: ignore[index]
    posterior = uq.fit(net, [(x, y)], layers="last", prior_precision=20.0, progress=False, **options)
    posterior = uq.calibrate(posterior, [(x, y)], progress=False)
    predictor = uq.wrap(net, posterior)
    export(predictor, x[:4], path=tmp_path / "p.onnx", level=0.8)
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"))
    names = [value.name for value in session.get_outputs()]
    for rows in (1, 7):
        outputs = session.run(None, {"input": (2 * x[:rows]).numpy()})
        found = {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}
        agrees(found, predictor(2 * x[:rows]))


def test_a_posterior_of_all_layers_is_exported_by_drawn_weights_and_says_so() -> None:
    net, x, y, _ = small("classes")
    posterior = uq.fit(net, [(x, y)], layers="all", prior_precision=200.0, rank=10, progress=False)
    posterior = uq.calibrate(posterior, [(x, y)], progress=False)
    predictor = uq.wrap(net, posterior)
    with pytest.warns(UserWarning, match="draws of the weights in its place") as said:
        program = export(predictor, x)
    text = str(said[0].message)
    assert len(said) == 1 and "\n" not in text and "head='moments' or head='sampling'" in text
    assert "the sets or intervals and p-values" in text and said[0].filename == __file__
    with torch.no_grad():
        found = program.module()(x)
        expected = uq.wrap(net, posterior, head="sampling")(x)
    assert isinstance(found, ClassTensors) and isinstance(expected, uq.ClassPrediction)
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.novelty, predictor(x).novelty(), rtol=1e-4, atol=1e-6)
    with pytest.raises(uq.PosthocUQError, match="needs an example of the inputs"):
        exportable(predictor)


def test_sets_of_random_numbers_are_said_to_be_missing() -> None:
    net, x, y, _ = small("classes")
    posterior = uq.fit(net, [(x, y)], "diag", layers="last", prior_precision=20.0, progress=False)
    posterior = uq.calibrate(posterior, [(x, y)], sets="aps", link="probit", progress=False)
    predictor = uq.wrap(net, posterior)
    with pytest.warns(UserWarning, match="lacks sets or intervals of kind 'aps'"):
        module = exportable(predictor, x[:2])
    found = module(x[:5])
    assert isinstance(found, RankedClassTensors)
    agrees(found, predictor(x[:5]))


@pytest.mark.study
def test_both_kinds_of_files_of_the_moments_head_give_equal_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, whole = cnn(), torch.export.export
    predictor, programs = uq.wrap(net, fitted(net), head="moments"), list[Any]()

    def once(
        *args: Any, **kwargs: Any
    ) -> Any:  # which takes as long as all else: both files are of one program
        programs.append(programs[0] if programs else whole(*args, **kwargs))
        return programs[0]

    monkeypatch.setattr(torch.export, "export", once)
    check_program_in_a_file(predictor, tmp_path)
    uq.export(predictor, torch.randn(3, 3, 32, 32), path=tmp_path / "p.onnx")
    assert len(programs) == 2
    x = torch.randn(5, 3, 32, 32)  # another batch size
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"))
    assert [value.name for value in session.get_inputs()] == ["input"]  # as in `nn.Sequential.forward`
    names = [value.name for value in session.get_outputs()]
    assert names == list(ClassTensors._fields)
    outputs = dict(zip(names, session.run(None, {"input": x.numpy()}), strict=True))
    expected = predictor(x).tensors()
    for name in names:
        torch.testing.assert_close(
            torch.from_numpy(outputs[name]), getattr(expected, name), rtol=1e-3, atol=1e-5
        )


@pytest.mark.study
def test_an_onnx_file_of_a_regression_carries_its_promises(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(40, 3)
    data = [(x, x[:, :2] + 0.1)]
    options: dict[str, Any] = {"likelihood": "regression", "prior_precision": 1.0, "head": "moments"}
    posterior = uq.fit(net, data, progress=False, **options)
    posterior = uq.calibrate(posterior, data, share=None, progress=False)
    predictor = uq.wrap(net, posterior)
    uq.export(predictor, x[:8], path=tmp_path / "p.onnx", level=0.8)
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"))
    names = [value.name for value in session.get_outputs()]
    assert names == list(PromisedValueTensors._fields)
    # not held-out inputs: they tie with their own scores, and rounding decides
    new = torch.randn(7, 3)
    outputs = dict(zip(names, session.run(None, {"input": new.numpy()}), strict=True))
    prediction: Any = predictor(new)
    expected = prediction.familiarity("standard_deviation")
    torch.testing.assert_close(torch.from_numpy(outputs["p_standard_deviation"]), expected)
    for name, bound in zip(("lower", "upper"), prediction.interval(0.8), strict=True):
        torch.testing.assert_close(torch.from_numpy(outputs[name]), bound, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("likelihood", "head"), [("classification", "sampling"), ("regression", "moments")])
def test_promises_go_along(likelihood: str, head: str) -> None:
    """Sets or intervals, and p-values, as the predictor's own; none by another head than the calibrated one."""
    torch.manual_seed(0)
    classes = likelihood == "classification"
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(90, 4)
    y = x[:, :3].argmax(1) if classes else x[:, :3] + 0.3 * torch.randn(90, 3)
    options: dict[str, Any] = {
        "likelihood": likelihood,
        "prior_precision": 5.0,
        "head": head,
        "progress": False,
    }
    posterior = uq.fit(net, [(x[:40], y[:40])], "diag", **options)
    own: dict[str, Any] = {"n_samples": 4} if classes else {"cov": "full"}
    posterior = uq.calibrate(posterior, [(x[40:], y[40:])], progress=False, **own)
    predictor = uq.wrap(net, posterior)
    found: Any = uq.export(predictor, x[:5], level=0.8).module()(x[:7])
    prediction: Any = predictor(x[:7])
    own_p = found.p_entropy if classes else found.p_standard_deviation
    torch.testing.assert_close(own_p, prediction.familiarity(prediction.default_score))
    torch.testing.assert_close(found.p_joint, prediction.familiarity("joint"))
    torch.testing.assert_close(found.novelty, prediction.novelty())
    if classes:
        assert isinstance(found, PromisedClassTensors) and torch.equal(found.set, prediction.set(0.8))
    else:
        assert isinstance(found, PromisedValueTensors)
        for bound, expected in zip((found.lower, found.upper), prediction.interval(0.8), strict=True):
            torch.testing.assert_close(bound, expected)
        torch.testing.assert_close(found.variance, prediction.variance, rtol=1e-4, atol=1e-7)
    other = (
        uq.wrap(net, posterior, "moments") if classes else uq.wrap(net, posterior, "sampling", n_samples=3)
    )
    found, prediction = exportable(other, x[:1])(x[:7]), other(x[:7])
    assert isinstance(found, ClassTensors if classes else ValueTensors) and not hasattr(found, "p_joint")
    for one, expected in zip(found, prediction.tensors(), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=pytest.mark.study)])
def test_a_failed_export_leaves_the_old_files(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 5)), torch.randn(2, 3, 32, 32)
    predictor, path = (
        uq.wrap(net, fitted(net), head="sampling", n_samples=2),
        tmp_path / f"p.{ending}",
    )
    uq.export(predictor, x, path=path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(uq.PosthocUQError, match="could not be written: No space"):
        uq.export(predictor, x, path=path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_draws_of_a_link_are_there_after_other_numbers_of_draws() -> None:
    """The points of a link are constants of the program, however many other predictors were called before."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(20, 4)
    posterior = uq.fit(model, [(x, torch.arange(20) % 3)], "diag", prior_precision=5.0, progress=False)
    first = uq.wrap(model, posterior, "moments")
    for n_draws in range(10, 20):
        uq.wrap(model, posterior, "moments", n_draws=n_draws)(x)
        first(x)
    program = uq.export(first, x)
    torch.testing.assert_close(program.module()(x)[0], first(x).tensors()[0])
