"""Files with a digest that fits and contents that do not: refused with the project's own error, or sound."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import hostile_files
import numpy as np
import pytest
import torch
from hostile_files import Image, batches, fit, model
from networks import Stops
from torch import nn

import posthoc_uq as uq
from posthoc_uq.cli.main import sentence
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError, printable
from posthoc_uq.files import atomic, numbers
from posthoc_uq.methods.resume import Checkpoint
from posthoc_uq.posteriors.block import TensorSpec

EVIL = "\x1b]0;pwned\x07\u202e"


@pytest.mark.slow
def test_resealed_files_are_refused_or_sound(tmp_path: Path) -> None:
    """Some of what the script tries by the thousand; raises where a file is neither."""
    found = hostile_files.run(60, 3, tmp_path)
    assert sum(found.values()) == 60
    assert sum(count for (_, what), count in found.items() if what == "refused") > 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posteriors of some methods, and checkpoints."""
    folder = tmp_path_factory.mktemp("files")
    for method in ("diag", "kfac", "inf", "efb", "function_space"):
        uq.save(fit(method), folder / f"{method}.h5")
        with pytest.raises(RuntimeError, match="stopped"):
            after = {"diag": 3, "kfac": 3, "function_space": 13}.get(method, 7)
            loader = Stops(batches(hostile_files.METHODS[method].get("likelihood", "classification")), after)
            fit(method, loader, checkpoint=folder / f"{method}.checkpoint", checkpoint_every=1)
    uq.save(fit("full"), folder / "full.h5")
    return folder


def own_model(method: str) -> nn.Module:
    return model(hostile_files.METHODS[method].get("likelihood", "classification"))


def put(*keys: Any, value: Any) -> Callable[[Image], None]:
    """Replace one value of the description."""

    def change(image: Image) -> None:
        place = image.state
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


def numbers_of(name: str, make: Callable[[np.ndarray], Any]) -> Callable[[Image], None]:
    """Replace the numbers of the datasets whose path ends so."""

    def change(image: Image) -> None:
        for path, array in image.arrays.items():
            if path.endswith(name) and (path.startswith("blocks/") or "/" in name):
                image.arrays[path] = np.asarray(make(array), array.dtype).reshape(array.shape)

    return change


def noise(array: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(array.shape)


def attribute(image: Image) -> None:
    image.attributes["blocks/0"]["evil"] = 1


ATTRIBUTES = "attributes"
CASES: dict[str, tuple[str, Callable[[Image], None], str]] = {
    "zero basis": ("kfac", numbers_of("input_basis", lambda a: 0 * a), "orthonormal"),
    "random basis": ("kfac", numbers_of("output_basis", noise), "orthonormal"),
    "huge basis": ("efb", numbers_of("input_basis", lambda a: 1e10 * a), "orthonormal"),
    "basis beyond 1e30": ("efb", numbers_of("input_basis", lambda a: 1e35 * a), "beyond 1e\\+30"),
    "random directions": ("inf", numbers_of("input_basis", noise), "orthonormal"),
    "zero directions": (
        "inf",
        numbers_of("output_basis", lambda a: 0 * a),
        "a direction of 'output_basis' that is zero",
    ),
    "features' basis": ("inf", numbers_of("features/basis", noise), "orthonormal"),
    "features' factors": ("inf", numbers_of("features/factors", lambda a: 1e10 + a), "mean eigenvalue"),
    "variances": ("function_space", numbers_of("variances", lambda a: 3e38 + 0 * a), "beyond 1e\\+30"),
    "precision": ("diag", numbers_of("diagonal", lambda a: 1e29 + a), None),
    "precision at a scale": (
        "diag",
        put(ATTRIBUTES, "prior_precision", value=1e31),
        "prior_precision must be",
    ),
    "tiny prior": ("diag", put(ATTRIBUTES, "prior_precision", value=1e-300), "prior_precision must be"),
    "tiny temperature": ("diag", put(ATTRIBUTES, "temperature", value=1e-300), "temperature must be"),
    "log likelihood": (
        "inf",
        put(ATTRIBUTES, "evidence", "log_likelihood", value=float("nan")),
        "log_likelihood",
    ),
    "noise power": ("inf", put(ATTRIBUTES, "evidence", "noise_power", value=10**6), "noise_power must be"),
    "targets": ("inf", put(ATTRIBUTES, "evidence", "targets", value=-1), "targets must be"),
    "no weight": ("inf", put(ATTRIBUTES, "evidence", "weight", value=0.0), "weight must be"),
    "negative weight": ("inf", put(ATTRIBUTES, "evidence", "weight", value=-2.5), "weight must be"),
    "weight that is no number": ("inf", put(ATTRIBUTES, "evidence", "weight", value="7"), "weight must be"),
    "targets of no regression": ("inf", put(ATTRIBUTES, "evidence", "targets", value=20), "a regression's"),
    "odd targets": ("efb", put(ATTRIBUTES, "evidence", "targets", value=61), "61 targets of 20 samples"),
    "prior of a weight": ("full", numbers_of("prior_precision/3.bias", lambda a: -a), "must be positive"),
    "prior of nearly nothing": (
        "full",
        numbers_of("prior_precision/3.bias", lambda a: 1e-37 * a),
        "must be positive, and not so small",
    ),
    "huge prior of a weight": (
        "full",
        numbers_of("prior_precision/3.bias", lambda a: 3e38 + 0 * a),
        "beyond 1e\\+30",
    ),
    "prior mean": ("full", numbers_of("prior_mean/3.bias", lambda a: np.nan + a), "NaN or infinity"),
    "prior of some weights": (
        "full",
        lambda image: image.state["prior"]["prior_precision"].pop("3.bias"),
        "does not name every parameter",
    ),
    "prior without tensors": ("inf", put("prior", value={"prior_mean": {}}), "does not name every parameter"),
    "prior in a Kronecker basis": (
        "kfac",
        put("prior", value={"prior_precision": {}}),
        "which its blocks cannot have",
    ),
    "prior of a training": ("function_space", put("prior", value={"mean": 1.0}), "its blocks have no prior"),
    "prior's mean": ("inf", put("prior", value={"mean": "x"}), "mean must be"),
    "evil layer": ("inf", put("layers", "3", "kind", value="evil"), "kind must be one of"),
    "other layer": ("inf", put("layers", "3", "kind", value="conv2d"), "of kind 'conv2d'"),
    "same weight": ("diag", put("layers", "3", "weight", value="0.weight"), "weight"),
    "other method": ("kfac", put(ATTRIBUTES, "method", value="efb"), "method='kfac'"),
    "binary": ("inf", put(ATTRIBUTES, "likelihood", "name", value="binary"), "contradicts its 3 outputs"),
    "classification": (
        "diag",
        put(ATTRIBUTES, "likelihood", "name", value="classification"),
        "contradicts its 1",
    ),
    "nested noise": (
        "efb",
        put(ATTRIBUTES, "likelihood", "noise_variance", value=[[1.0]] * 3),
        "noise_variance",
    ),
    "long noise": (
        "efb",
        put(ATTRIBUTES, "likelihood", "noise_variance", value=[1.0] * 2),
        "contradicts its 3",
    ),
    "tiny noise": ("efb", put(ATTRIBUTES, "likelihood", "noise_variance", 0, value=1e-300), "noise_variance"),
    "groups": ("inf", put("layers", "0", "groups", value=1.9), "groups must be a whole number"),
    "samples of variances": (
        "function_space",
        put("blocks", "3", ATTRIBUTES, "samples", value=19),
        "another number of samples",
    ),
    "centre": ("inf", put("centre", "3.weight", value="float32"), "a trained mean"),
    "body's variance": (
        "function_space",
        put(ATTRIBUTES, "record", "fit", "prior body variance", value="x"),
        "prior body variance",
    ),
    "head's option": (
        "inf",
        put(ATTRIBUTES, "record", "head", "options", value={"n_draws": float("inf")}),
        "n_draws",
    ),
    "more keys": ("inf", put("layers", "0", "evil", value=1), "'evil', which does not belong"),
    "attribute": ("inf", attribute, "attributes that no posterior has"),
    "deep record": (
        "inf",
        put(ATTRIBUTES, "record", "fit", "seed", value=[[[[[[[[1]]]]]]]]),
        "nested at most",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_posteriors_that_cannot_be(case: str, files: Path, tmp_path: Path) -> None:
    method, change, words = CASES[case]
    image = Image(files / f"{method}.h5")
    change(image)
    path = tmp_path / "p.h5"
    image.write(path)
    own = own_model(method)
    if words is None:
        hostile_files.check_finite(uq.load(path, own), batches("binary")[0][0])
        image.state["attributes"]["scale"] = 1e8
        image.write(path)
        words = "at this scale and prior precision"
    with pytest.raises(CorruptPosteriorError, match=words):
        uq.load(path, own)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_shift_whose_variances_overflow(kind: str, tmp_path: Path) -> None:
    own, path = model(), tmp_path / "p.h5"
    uq.save(uq.fit(own, batches("classification"), "message_passing", posterior=kind, progress=False), path)
    image = Image(path)
    for shift, sound in ((1e15, True), (2.5e27, False)):
        numbers_of("shift", lambda array, shift=shift: np.where(array == 0, 0, shift))(image)
        image.write(path)
        if sound:
            assert all(bool(torch.isfinite(own).all()) for own in uq.load(path, own).variance().values())
        else:
            with pytest.raises(CorruptPosteriorError, match="at this scale and prior precision"):
                uq.load(path, own)


def test_a_key_twice(files: Path, tmp_path: Path) -> None:
    image = Image(files / "inf.h5")
    text = json.dumps(image.state).replace('"scale":', '"scale": 1.0, "scale":', 1)
    image.write(tmp_path / "p.h5", text)
    for read in (lambda: uq.load(tmp_path / "p.h5", model()), lambda: uq.inspect(tmp_path / "p.h5")):
        with pytest.raises(CorruptPosteriorError, match="a key twice"):
            read()


def test_a_long_description_is_refused_at_once(files: Path, tmp_path: Path) -> None:
    image = Image(files / "inf.h5")
    image.state["attributes"]["record"]["tuning"] = {f"key{i}": "x" for i in range(900_000)}
    image.write(tmp_path / "p.h5")
    for read in (lambda: uq.load(tmp_path / "p.h5", model()), lambda: uq.inspect(tmp_path / "p.h5")):
        start = time.process_time()
        with pytest.raises(CorruptPosteriorError, match="more than 500000 values"):
            read()
        assert time.process_time() - start < 3


def test_what_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    posterior = fit("inf")
    for name, value, back in (
        ("temperature", 1e-300, 1.0),
        ("prior_precision", 1e-300, 1.0),
        ("scale", 1e40, 20.0),
    ):
        setattr(posterior, name, value)
        with pytest.raises(PosthocUQError, match=f"no file can keep: .*{name} must be"):
            uq.save(posterior, tmp_path / "p.h5")
        setattr(posterior, name, back)
    posterior.history.tuning["long"] = "x" * 5000
    with pytest.raises(PosthocUQError, match=r"no file can keep: .*'long'"):
        uq.save(posterior, tmp_path / "p.h5")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 400, 700])
def test_bases_are_orthonormal_to_the_tolerance(dtype: torch.dtype, width: int) -> None:
    """By all products or by random combinations; one column of many that is wrong is found either way."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, width, width, generator=generator)).Q.to(dtype).float()
    spec = TensorSpec((2, width, width), orthonormal=True)
    padded = replace(spec, padded=True)
    assert numbers.complaint(spec, basis) is None
    for factor in (0.0, 0.9, 1.1):
        wrong = basis.clone()
        wrong[1, :, 3] *= factor
        assert numbers.complaint(spec, wrong) is not None
    zero = basis.clone()
    zero[1, :, 3] = 0
    assert numbers.complaint(padded, zero) is None
    zero[1, :, 3] = zero[1, :, 2]
    assert numbers.complaint(padded, zero) is not None


# Checkpoints


def sums(image: Image, value: float) -> None:
    image.arrays = {path: array + np.asarray(value, array.dtype) for path, array in image.arrays.items()}


DESCRIPTION = "description"
CHECKPOINTS: dict[str, tuple[str, Callable[[Image], None], str]] = {
    "NaN sums": ("diag", lambda image: sums(image, float("nan")), "NaN or infinity"),
    "no identity": ("diag", lambda image: image.state[DESCRIPTION].pop("identity"), "has no 'identity'"),
    "budget": ("diag", put(DESCRIPTION, "memory_budget", value="x"), "memory_budget must be"),
    "stages": ("inf", put(DESCRIPTION, "stages", value=[1]), "stages must be"),
    "other stage": ("diag", put(DESCRIPTION, "stages", "evil", value={}), "has no 'batches'"),
    "sweep alone": (
        "diag",
        put(DESCRIPTION, "summary", value=None),
        "no checkpoint of a fit|a sweep without",
    ),
    "other sweep": ("diag", put(DESCRIPTION, "sweep", value=["x"]), "sweep must be"),
    "samples": ("diag", put(DESCRIPTION, "summary", "samples", value=10**9), "contradicts itself"),
    "seen": ("diag", put(DESCRIPTION, "summary", "seen", value=10**9), "does not begin with"),
    "index": ("diag", put("index", value=[["/0/0", "diagonal"]] * 2), "other groups"),
    "index of none": ("diag", put("index", 0, value=["/0/0", "evil"]), "not those of its index"),
    "shape": ("inf", lambda image: _flatten(image), "another kind|shape"),
    "training": ("function_space", put(DESCRIPTION, "training", value={}), "has no 'state'"),
    "epoch": (
        "function_space",
        put(DESCRIPTION, "training", "state", "epoch", value=99),
        "epochs contradict",
    ),
    "history": (
        "function_space",
        put(DESCRIPTION, "training", "state", "history", value=[{"evil": 1.0}] * 1),
        "other losses|epochs contradict",
    ),
    "losses": (
        "function_space",
        put(DESCRIPTION, "training", "state", "sums", value={"evil": 1.0}),
        "other losses",
    ),
    "optimiser": (
        "function_space",
        put(DESCRIPTION, "training", "optimiser", "state", "0", "exp_avg", value={"value": 3}),
        "exp_avg|described|index",
    ),
    "rate": (
        "function_space",
        put(DESCRIPTION, "training", "optimiser", "groups", 0, "initial_lr", value=1e9),
        "'initial_lr' is",
    ),
    "deep": (
        "diag",
        put(DESCRIPTION, "identity", "evil", value=json.loads("[" * 60 + "]" * 60)),
        "nested at most",
    ),
}


def _flatten(image: Image) -> None:
    name = next(path for path, array in image.arrays.items() if array.ndim > 1)
    image.arrays[name] = image.arrays[name].reshape(-1)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_cannot_be(case: str, files: Path, tmp_path: Path) -> None:
    method, change, words = CHECKPOINTS[case]
    image = Image(files / f"{method}.checkpoint")
    change(image)
    path = tmp_path / "c.checkpoint"
    image.write(path)
    before = path.read_bytes()
    with pytest.raises(PosthocUQError, match=words):
        fit(method, checkpoint=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("method", ["diag", "inf", "function_space"])
def test_a_checkpoint_that_was_only_written_again_is_taken_up(
    method: str, files: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c.checkpoint"
    Image(files / f"{method}.checkpoint").write(path)
    resumed, whole = fit(method, checkpoint=path), uq.load(files / f"{method}.h5", own_model(method))
    for name, block in whole.blocks.items():
        for tensor, value in block.tensors().items():
            assert torch.equal(resumed.blocks[name].tensors()[tensor], value)


# Temporary files and permissions


def temporary(target: Path) -> Path:
    return target.with_name(f".{atomic._stem(target)}.{'0' * 16}.tmp")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))


def test_a_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from io import BytesIO\n"
        "from pathlib import Path\n"
        "from posthoc_uq.files import atomic\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "atomic.write(Path(sys.argv[1]), BytesIO(b'x'))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "p.h5")])
    assert done.returncode == -signal.SIGKILL and len(leftovers(tmp_path)) == 1
    uq.save(fit("diag"), tmp_path / "p.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["p.h5"]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("c.h5", "c.h5.bak"),
        ("c.h5", "c.h5.0000000000000000.tmp"),
        ("x" * 210 + "a", "x" * 210 + "b"),
        ("c.h5", "c.h5"),
    ],
)
def test_nobody_deletes_a_file_that_another_is_writing(own: str, other: str, tmp_path: Path) -> None:
    """Of another checkpoint, or of the same name by another fit."""
    target = tmp_path / other
    opened, written = atomic._temporary(target, 0o600)
    atomic.remove_leftovers(tmp_path / own)
    assert written.exists()
    os.close(opened)
    atomic.remove_leftovers(tmp_path / own)
    assert written.exists() == (own != other)
    atomic.remove_leftovers(target)
    assert not written.exists()


def test_many_fits_begin_and_write_side_by_side(tmp_path: Path) -> None:
    names = ["c.h5", "c.h5.bak", "c.h5", "c"]
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(40):
                atomic.remove_leftovers(tmp_path / name)
                atomic.write(tmp_path / name, BytesIO(b"x" * 10_000))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not leftovers(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_file_that_is_saved_over_keeps_its_permissions(tmp_path: Path) -> None:
    path, posterior = tmp_path / "p.h5", fit("diag")
    before = os.umask(0o022)
    try:
        uq.save(posterior, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        for mode in (0o600, 0o664):
            path.chmod(mode)
            uq.save(posterior, path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


# Terminals


def test_names_cannot_act_on_a_terminal(files: Path, tmp_path: Path) -> None:
    image = Image(files / "inf.h5")
    image.state["library_version"] = f"1\n{EVIL}"
    del image.attributes["/"]["library_version"]  # HDF5 holds no such text
    record = image.state["attributes"]["record"]
    record["deterministic"] = {EVIL: EVIL}
    record["tuning"][EVIL] = EVIL
    record["fit"][EVIL] = [EVIL]
    image.write(tmp_path / "p.h5")
    posterior = uq.load(tmp_path / "p.h5", model())
    shown = [str(posterior.report()), str(uq.inspect(tmp_path / "p.h5"))]
    image.state["layers"] = {EVIL: image.state["layers"]["0"]}
    image.write(tmp_path / "p.h5")
    with pytest.raises(PosthocUQError) as caught:
        uq.load(tmp_path / "p.h5", model())
    shown += [str(caught.value), sentence(caught.value)]
    for text in shown:
        assert (printable(text, keep="\n") == text and "\\x1b" in text) or text in shown[2:]
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\n\\x1b" not in shown[1]  # no line of its own


def test_a_layer_s_name_is_escaped_in_the_report(tmp_path: Path) -> None:
    net = nn.Sequential(OrderedDict([(EVIL, nn.Linear(3, 2))]))
    x = torch.randn(8, 3)
    posterior = uq.fit(net, [(x, torch.arange(8) % 2)], method="diag", prior_precision=1.0, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    for text in (str(posterior.report()), str(uq.inspect(tmp_path / "p.h5"))):
        assert "\\x1b]0;pwned" in text and "\x1b" not in text
    with h5py.File(tmp_path / "p.h5") as file:
        assert len(file["layers"]) == 1


def test_a_checkpoint_of_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PosthocUQError, match="is not a file"):
        fit("diag", checkpoint=tmp_path / "pipe")
    assert Checkpoint(tmp_path / "c", 1, {}, 2**20, model(), {}, {}, torch.float32).training is None
