"""Files with a digest that fits and contents that do not: refused with the project's own error, or sound."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from dataclasses import replace as with_other
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import hostile_files
import numpy as np
import PIL.Image
import pytest
import torch
from hostile_files import Image, batches, fit, model
from storage_helpers import FAITHFUL, LEFT_OUT, PROMISES, edit, mutations, sealed
from torch import nn

import posthoc_uq as uq
from posthoc_uq import CorruptPosteriorError, PosthocUQError
from posthoc_uq.app.cli.main import sentence
from posthoc_uq.app.cli.outputs import text_file
from posthoc_uq.core import printable
from posthoc_uq.files import atomic, checked_target, remove_leftovers, replacing, tensors, untrusted
from posthoc_uq.likelihoods import ConformalScores
from posthoc_uq.methods import write_snapshot
from posthoc_uq.posteriors import FaithfulRecord, HeadRecord, TensorSpec

EVIL = "\x1b]0;pwned\x07\u202e"


@pytest.mark.slow
def test_resealed_files_are_refused_or_sound(tmp_path: Path) -> None:
    """Some of what the script tries by the thousand; raises where a file is neither."""
    found = hostile_files.run(60, 3, tmp_path)
    assert sum(found.values()) == 60
    assert sum(count for (_, what), count in found.items() if what == "refused") > 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posteriors of some methods."""
    folder = tmp_path_factory.mktemp("files")
    for method in ("diag", "kfac", "inf", "efb", "function_space"):
        posterior = fit(method)
        if method == "inf":
            head = HeadRecord(name="linearized", options={"n_draws": 50}, criterion="faithful")
            history = replace(
                posterior.history,
                head=head,
                faithful=FaithfulRecord(**FAITHFUL),
                promises=ConformalScores(**PROMISES),
            )
            posterior = posterior.replaced(history=history)
        uq.save(posterior, folder / f"{method}.h5")
    uq.save(fit("full"), folder / "full.h5")
    return folder


def own_model(method: str) -> nn.Module:
    return model(hostile_files.METHODS[method].get("likelihood", "classification"))


def refused(path: Path, method: str, word: str, *, inspected: bool = False) -> None:
    """By `load`, and by the child that `inspect` starts, where the description alone is at fault."""
    with pytest.raises(CorruptPosteriorError, match=word) as caught:
        uq.load(path, own_model(method))
    message = str(caught.value)
    assert "pydantic" not in message and "Input should" not in message and len(message) < 600
    if inspected:
        with pytest.raises(CorruptPosteriorError, match=word):
            uq.inspect(path)


# HDF5 that no posterior has

BLOCK = "blocks/3"
SHAPE = (1, 3, 17)


def put(file: h5py.File, name: str = "diagonal", **options: Any) -> None:
    del file[f"{BLOCK}/{name}"]
    file[BLOCK].create_dataset(name, **options)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(SHAPE, "<f4")
    layout[:] = h5py.VirtualSource("/elsewhere.h5", "x", SHAPE)
    del file[f"{BLOCK}/diagonal"]
    file.create_virtual_dataset(f"{BLOCK}/diagonal", layout)


def linked(name: str, link: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


def text_state(text: Any) -> Callable[[h5py.File], None]:
    return linked("state", text)


def moved(file: h5py.File) -> None:
    file.move(f"{BLOCK}/diagonal", "blocks/elsewhere")
    file[f"{BLOCK}/diagonal"] = h5py.SoftLink("/blocks/elsewhere")


ZEROS = np.zeros(SHAPE, "<f4")
PACKED: dict[str, Any] = {"compression": "gzip", "shuffle": True}
EXTERNAL = h5py.ExternalLink("elsewhere.h5", "x")
CONTENTS: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "soft link": (moved, "link to elsewhere"),
    "external link": (linked(f"{BLOCK}/diagonal", EXTERNAL), "link to elsewhere"),
    "linked description": (linked("state", EXTERNAL), "link to elsewhere"),
    "virtual dataset": (virtual, "virtual"),
    "external storage": (
        lambda f: put(f, shape=SHAPE, dtype="<f4", external=[("/etc/hostname", 0, 204)]),
        "another file",
    ),
    "hard link above": (lambda f: f.__setitem__(f"{BLOCK}/again", f["blocks"]), "nested too deeply"),
    "hard link to the root": (lambda f: f.__setitem__("blocks/again", f["/"]), "has attributes"),
    "bomb": (lambda f: put(f, shape=(10**6, 10**6), dtype="<f4", **PACKED), "incomplete"),
    "small bomb": (lambda f: put(f, data=np.zeros((1, 3, 10**6), "<f4"), **PACKED), "shape"),
    "huge chunks": (
        lambda f: put(f, data=np.zeros((2, 10**6), "<f4"), chunks=(2, 10**6), **PACKED),
        "chunks",
    ),
    "unlimited": (lambda f: put(f, data=ZEROS, maxshape=(None, 3, 17)), "no fixed shape"),
    "gzip alone": (lambda f: put(f, data=ZEROS, compression="gzip"), "shuffle and gzip"),
    "lzf": (lambda f: put(f, data=ZEROS, compression="lzf"), "shuffle and gzip"),
    "checksum filter": (lambda f: put(f, data=ZEROS, fletcher32=True), "shuffle and gzip"),
    "packed bits": (lambda f: put(f, data=ZEROS.astype("|u1")), "type"),
    "big endian": (lambda f: put(f, data=ZEROS.astype(">f4")), "of a type"),
    "strings": (lambda f: put(f, data=["a"] * 20), "of a type"),
    "compound": (lambda f: put(f, data=np.zeros(SHAPE, "f4,f4")), "of a type"),
    "enumeration": (
        lambda f: put(f, shape=SHAPE, dtype=h5py.enum_dtype({"a": 1}, basetype="<u2")),
        "of a type",
    ),
    "references": (lambda f: put(f, shape=SHAPE, dtype=h5py.ref_dtype), "of a type"),
    "empty": (lambda f: put(f, data=h5py.Empty("<f4")), "no fixed shape"),
    "unallocated": (lambda f: put(f, shape=SHAPE, dtype="<f4"), "incomplete"),
    "wrong shape": (lambda f: put(f, data=np.zeros((1, 3, 16), "<f4")), "shape"),
    "missing dataset": (lambda f: f[BLOCK].__delitem__("diagonal"), "lacks the dataset"),
    "missing block": (lambda f: f.__delitem__(BLOCK), "groups are not those"),
    "extra dataset": (lambda f: f[BLOCK].create_dataset("more", data=ZEROS), "no posterior has"),
    "extra group": (lambda f: f.create_group("blocks/more"), "groups are not those"),
    "extra attribute": (lambda f: f[BLOCK].attrs.__setitem__("evil", 1), "has attributes"),
    "attribute of the root": (lambda f: f.attrs.__setitem__("evil", 1), "attributes that no posterior has"),
    "many attributes": (
        lambda f: f.attrs.update({str(i): 1 for i in range(200)}),
        "more than 100 attributes",
    ),
    "named type": (lambda f: f.__setitem__("blocks/type", np.dtype("<f4")), "neither"),
    "variable string": (lambda f: text_state(f["state"][()].decode())(f), "one string"),
    "brackets": (text_state(np.bytes_(b"[" * 100_000)), "JSON"),
    "half": (text_state(np.bytes_(b"{")), "JSON"),
    "list": (text_state(np.bytes_(b"[]")), "no JSON object"),
    "bytes": (text_state(np.bytes_(b"\xff\xfe")), "JSON"),
    "nothing": (text_state(np.bytes_(b"{}")), "description has no"),
    "digits": (text_state(np.bytes_(b"9" * 10_000)), "JSON"),
    "key twice": (text_state(np.bytes_(b'{"method": "inf", "method": "inf"}')), "a key twice"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_no_posterior_has(case: str, files: Path, tmp_path: Path) -> None:
    path, (change, word) = tmp_path / "p.h5", CONTENTS[case]
    path.write_bytes((files / "inf.h5").read_bytes())
    edit(path, change)
    refused(path, "inf", word, inspected=case in ("bomb", "external link", "virtual dataset", "references"))


def test_a_long_description_is_refused_at_once(files: Path, tmp_path: Path) -> None:
    image = Image(files / "inf.h5")
    image.state["history"]["tuning"] = {f"key{i}": "x" for i in range(600_000)}
    image.write(tmp_path / "p.h5")
    start = time.process_time()
    refused(tmp_path / "p.h5", "inf", "more than 500000 values", inspected=True)
    assert time.process_time() - start < 6


# Numbers that no tensor may have


def noise(array: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(array.shape)


NUMBERS: list[tuple[str, str, Callable[[np.ndarray], Any], str]] = [
    ("inf", "blocks/3/input_basis", lambda a: a + np.nan, "'input_basis' of block '3' holds NaN"),
    ("inf", "blocks/3/eigenvalues", lambda a: a + np.inf, "NaN or infinity"),
    ("inf", "blocks/3/diagonal", lambda a: a - 1, "negative"),
    ("kfac", "input_basis", lambda a: 0 * a, "orthonormal"),
    ("kfac", "output_basis", noise, "orthonormal"),
    ("efb", "input_basis", lambda a: 1e10 * a, "orthonormal"),
    ("efb", "input_basis", lambda a: 1e35 * a, "beyond 1e\\+30"),
    ("inf", "blocks/3/input_basis", noise, "orthonormal"),
    ("inf", "output_basis", lambda a: 0 * a, "a direction of 'output_basis' that is zero"),
    ("inf", "features/basis", noise, "orthonormal"),
    ("inf", "features/factors", lambda a: 1e10 + a, "mean eigenvalue"),
    ("inf", "features/stage0_factors", lambda a: 1e10 + a, "mean eigenvalue"),
    ("inf", "features/stage0_scale", lambda a: -a, "quantiles that do not ascend"),
    ("inf", "features/scale", lambda a: 1e10 + a, "beyond 1000"),
    ("function_space", "variances", lambda a: 3e38 + 0 * a, "beyond 1e\\+30"),
    ("function_space", "variances", lambda a: a - 1e9, "negative"),
    ("function_space", "trained_mean/3.bias", lambda a: a + np.nan, "'3.bias' of the trained mean holds NaN"),
    ("full", "prior_precision/3.bias", lambda a: -a, "must be positive"),
    ("full", "prior_precision/3.bias", lambda a: 1e-37 * a, "not so small"),
    ("full", "prior_precision/3.bias", lambda a: 3e38 + 0 * a, "beyond 1e\\+30"),
    ("full", "prior_mean/3.bias", lambda a: np.nan + a, "NaN or infinity"),
]


def changed_numbers(image: Image, name: str, make: Callable[[np.ndarray], Any]) -> None:
    """Replace the numbers of the datasets whose path ends so."""
    for path, array in image.arrays.items():
        if path.endswith(name):
            with np.errstate(all="ignore"):
                image.arrays[path] = np.asarray(make(array), array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    ("method", "name", "make", "word"), NUMBERS, ids=[f"{row[0]} {row[1]} {row[3]}" for row in NUMBERS]
)
def test_numbers_that_no_tensor_has(
    method: str, name: str, make: Any, word: str, files: Path, tmp_path: Path
) -> None:
    image = Image(files / f"{method}.h5")
    changed_numbers(image, name, make)
    image.write(tmp_path / "p.h5")
    refused(tmp_path / "p.h5", method, word)


def test_precisions_that_float32_does_not_hold(files: Path, tmp_path: Path) -> None:
    image, path = Image(files / "diag.h5"), tmp_path / "p.h5"
    changed_numbers(image, "blocks/3/diagonal", lambda a: 1e29 + a)
    image.write(path)
    hostile_files.check_finite(uq.load(path, own_model("diag")), batches("binary")[0][0])
    image.state["settings"]["scale"] = 1e8
    image.write(path)
    refused(path, "diag", "at this scale and prior precision")


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_shift_whose_variances_overflow(kind: str, tmp_path: Path) -> None:
    own, path = model(), tmp_path / "p.h5"
    uq.save(uq.fit(own, batches("classification"), "message_passing", posterior=kind, progress=False), path)
    image = Image(path)
    for shift, sound in ((1e15, True), (2.5e27, False)):
        changed_numbers(image, "shift", lambda array, shift=shift: np.where(array == 0, 0, shift))
        image.write(path)
        if sound:
            assert all(bool(torch.isfinite(v).all()) for v in uq.load(path, own).variance().values())
        else:
            refused(path, "message_passing", "at this scale and prior precision")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 400, 700])
def test_bases_are_orthonormal_to_the_tolerance(dtype: torch.dtype, width: int) -> None:
    """By all products or by random combinations; one column of many that is wrong is found either way."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, width, width, generator=generator)).Q.to(dtype).float()
    spec = TensorSpec((2, width, width), orthonormal=True)
    padded = with_other(spec, padded=True)
    assert tensors.find_fault(spec, basis) is None
    for factor in (0.0, 0.9, 1.1):
        wrong = basis.clone()
        wrong[1, :, 3] *= factor
        assert tensors.find_fault(spec, wrong) is not None
    zero = basis.clone()
    zero[1, :, 3] = 0
    assert tensors.find_fault(padded, zero) is None
    zero[1, :, 3] = zero[1, :, 2]
    assert tensors.find_fault(padded, zero) is not None


def test_a_basis_at_the_tolerance_always_loads_or_never() -> None:
    basis = torch.eye(600)
    basis[0, 1] = tensors.MAX_SKEW
    assert len({tensors._skew(basis, padded=False) for _ in range(5)}) == 1


# Records that contradict their declaration, each other, or the tensors

GONE = object()  # the key is deleted
ENTROPY = ("history", "promises", "inputs", "entropy")
TAIL = ("history", "promises", "tails", "entropy")
FOUND = ("history", "leave_one_out")
OF_CLASSES, OF_REGRESSION = LEFT_OUT["classification"], LEFT_OUT["regression"]
RECORDS: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("inf", ("method",), GONE, "has no 'method'"),
    ("inf", ("method",), "magic", "method must be one of"),
    ("kfac", ("method",), "efb", "has the method 'efb'"),
    ("inf", ("evil",), 1, "'evil', which does not belong"),
    ("inf", ("fingerprint",), "x", "fingerprint must be a text of the form"),
    ("inf", ("settings",), None, "settings must be an object"),
    ("inf", ("settings", "scale"), GONE, "has no 'scale'"),
    ("inf", ("settings", "scale"), "x", "scale must be a finite number, not 'x'"),
    ("inf", ("settings", "scale"), True, "scale must be a finite number"),
    ("diag", ("settings", "prior_precision"), 1e31, "prior_precision must be at most"),
    ("diag", ("settings", "prior_precision"), float("nan"), "prior_precision must be a finite number"),
    ("diag", ("settings", "prior_precision"), {"x": 1.0}, "name every layer once"),
    ("diag", ("settings", "prior_precision"), {"0": 1.0, "3": -1.0}, "prior_precision, 3 must be at least"),
    ("diag", ("settings", "temperature"), 1e-300, "temperature must be at least"),
    ("inf", ("settings", "residual_weight"), 2, "residual_weight must be at most 1"),
    ("inf", ("settings", "class_shift"), 1.0, "class_shift must be a list"),
    (
        "inf",
        ("settings", "class_shift"),
        [1.0, 2.0],
        "class_shift of 2 numbers, which its outputs contradict",
    ),
    ("efb", ("settings", "class_shift"), [1.0] * 3, "class_shift of 3 numbers, which its outputs contradict"),
    ("inf", ("settings", "class_scale"), [1.0, 1.0, 0.0], "class_scale.2. must be at least"),
    ("inf", ("likelihood",), {"name": "magic"}, "likelihood has the name 'magic'"),
    ("inf", ("likelihood", "name"), [], "likelihood has the name \\[\\]"),
    ("inf", ("likelihood", "name"), "heteroscedastic", "contradicts its 3 outputs"),
    ("diag", ("likelihood", "name"), "classification", "contradicts its 1"),
    ("efb", ("likelihood", "noise_variance"), [[1.0]] * 3, "noise_variance"),
    ("efb", ("likelihood", "noise_variance"), [1.0] * 2, "contradicts its 3"),
    ("efb", ("likelihood", "noise_variance", 0), 1e-300, "noise_variance"),
    ("inf", ("likelihood",), {"name": "x", "class": "no colon", "attributes": {}}, "class must be a text"),
    ("inf", ("likelihood",), {"name": "ordinal", "thresholds": [2.0, 1.0], "cumulative": False}, "cannot be"),
    ("inf", ("evidence",), {}, "evidence has no 'samples'"),
    ("inf", ("evidence", "log_likelihood"), float("nan"), "log_likelihood"),
    ("inf", ("evidence", "noise_power"), 10**6, "noise_power must be"),
    ("inf", ("evidence", "targets"), 20, "evidence of a regression"),
    ("efb", ("evidence", "targets"), 61, "61 targets of 20 samples"),
    ("inf", ("evidence", "weight"), 0.0, "weight must be above 0"),
    ("inf", ("layers",), {}, "layers"),
    ("inf", ("layers", "3", "kind"), "evil", "kind must be one of"),
    ("inf", ("layers", "3", "kind"), "conv2d", "of kind 'conv2d'"),
    ("inf", ("layers", "0", "groups"), 1.9, "groups must be a whole number"),
    ("inf", ("layers", "0", "groups"), 4, "not 4 matrices"),
    ("inf", ("layers", "3", "inputs"), 18, "matrices of"),
    ("diag", ("layers", "3", "weight"), "0.weight", "weight"),
    ("inf", ("blocks", "3"), GONE, "every layer once"),
    ("inf", ("blocks", "3", "kind"), "magic", "kind must be one of"),
    ("inf", ("blocks", "3", "members"), [["3"]], "members\\[0\\] must be a text"),
    ("inf", ("blocks", "3", "members"), ["x"], "not described"),
    ("inf", ("blocks", "3", "attributes", "input_directions"), 10**9, "input_directions"),
    ("inf", ("blocks", "3", "attributes", "correction"), "magic", "correction must be one of"),
    ("function_space", ("blocks", "3", "attributes", "samples"), 19, "another number of samples"),
    ("inf", ("trained_mean",), ["3.weight"], "a trained mean"),
    ("function_space", ("trained_mean",), ["x"], "parameters that no layer has"),
    ("function_space", ("certain",), {"3.bias": [3]}, "certain parameters"),
    ("full", ("prior", "precisions"), False, "groups are not those"),
    ("full", ("prior", "mean"), 1.0, "two means"),
    ("inf", ("prior", "means"), True, "groups are not those"),
    ("kfac", ("prior", "precisions"), True, "which its blocks cannot have"),
    ("function_space", ("prior", "mean"), 1.0, "its blocks have no prior"),
    ("inf", ("features", "classes"), 4, "more classes"),
    ("inf", ("features", "layer", "outputs"), 4, "features"),
    ("inf", ("features", "source"), "magic", "source must be one of"),
    ("inf", ("features", "rank"), 10**9, "the features: the attribute 'rank' is 1000000000, outside"),
    ("inf", ("features", "width"), 99, "'width' is 99"),
    ("inf", ("features", "smoothing"), -1.0, "smoothing must be at least"),
    ("inf", ("features", "stages", 0, "source"), "outputs", "source must be one of"),
    ("inf", ("features", "stages", 0, "classes"), 4, "more classes"),
    ("inf", ("features", "stages", 0, "rank"), 10**9, "'rank' is 1000000000, outside"),
    ("inf", ("features", "stages"), GONE, "groups are not those|datasets"),
    ("inf", ("history", "fit", "seed"), [[[[[[[[1]]]]]]]], "nested at most"),
    ("inf", ("history", "fit", "image size"), 10**9, "image size"),
    ("inf", ("history", "fit", "model classes"), 10**12, "model classes"),
    ("inf", ("history", "fit", "model classes"), True, "model classes"),
    ("inf", ("history", "fit", "model"), ["timm:resnet18"], "model"),
    ("inf", ("history", "fit", "model weights"), 3, "model weights"),
    ("function_space", ("history", "fit", "prior body variance"), "x", "prior body variance"),
    ("inf", ("history", "fit", "kappa"), -1.0, "kappa"),
    ("inf", ("history", "fit", "kappa"), {"x": float("inf")}, "kappa"),
    ("inf", ("history", "tuning", "x"), 3, "tuning, x must be a text"),
    ("inf", ("history", "novelty"), "magic", "novelty must be one of"),
    ("inf", ("history", "head", "name"), "magic", "name must be one of"),
    ("inf", ("history", "head", "options", "n"), [1], "n must be a finite number, a text"),
    ("inf", ("history", "head", "options", "n"), float("inf"), "n must be a finite number"),
    ("inf", ("history", "head", "options", "n_draws"), 50_000_000, "no whole number from 1 to 100000"),
    ("inf", ("history", "head", "options", "n_samples"), 1.5, "no whole number from 1 to 10000"),
    ("inf", ("history", "head", "criterion"), "magic", "criterion must be one of"),
    ("inf", ("history", "faithful", "value"), {"x": 1.0}, "name every layer once"),
    ("inf", ("history", "faithful", "divergence"), float("nan"), "divergence must be a number"),
    ("inf", ("history", "faithful", "settings"), {"temperature": 1.0}, "settings"),
    ("inf", FOUND, {**OF_CLASSES, "accuracy": 1.5}, "accuracy must be at most 1"),
    ("inf", FOUND, {**OF_CLASSES, "rows": 2**63}, "rows must be"),
    ("inf", FOUND, {**OF_CLASSES, "rows": 21}, "has left out 21 of 20"),
    ("inf", FOUND, {**OF_CLASSES, "noise_scale": 1.0}, "accuracy and temperature, or noise_variance"),
    ("inf", FOUND, OF_REGRESSION, "of other outputs"),
    ("efb", FOUND, {**OF_REGRESSION, "noise_variance": [1.0] * 2}, "of other outputs"),
    ("efb", FOUND, {**OF_REGRESSION, "noise_variance": [1.0, 1.0, -1.0]}, "noise_variance.2."),
    ("efb", FOUND, OF_CLASSES, "an accuracy by leave-one-out"),
    ("inf", ("history", "calibration"), {"alpha": "x"}, "alpha must be"),
    ("inf", ("history", "output"), {"guessed": True}, "one of name, index and function"),
    ("inf", ("history", "output"), {"guessed": True, "name": "a", "index": 1}, "one of name, index"),
    ("inf", ("history", "changes"), {"updates": -1}, "updates must be at least 0"),
    ("inf", ("history", "promises", "share"), 2.5, "share must be below 1"),
    ("inf", ("history", "promises", "head"), {"head": "magic"}, "a head that is none"),
    ("inf", ("history", "promises", "head", "n_samples"), 50_000_000, "no whole number from 1 to 10000"),
    ("inf", ("history", "promises", "inputs", "magic"), {"values": [0.5], "count": 1}, "must be one of"),
    ("inf", (*ENTROPY, "count"), 5, "must have 5 values"),
    ("inf", (*ENTROPY, "values"), [0.1, 2.0, 0.5], "do not ascend"),
    ("inf", (*ENTROPY, "values"), [0.1, 0.5, float("nan")], "values"),
    ("inf", (*ENTROPY, "values"), [-1.7e308, 0.5, 1.7e308], "values"),
    ("inf", (*TAIL, "shares"), [2 / 3, 1 / 3, 1.0], "do not ascend"),
    ("inf", (*TAIL, "shares"), [0.5, 1.0, 1.5], "shares"),
    ("inf", (*TAIL, "shares"), [0.3, 0.5, 0.9], "do not ascend"),
    ("inf", (*TAIL, "shares"), [0.5, 1.0], "as many"),
    ("inf", (*TAIL, "values"), [2.0, 0.1, 0.5], "descending"),
    ("inf", ("history", "promises", "wrong", "joint"), GONE, "every score of inputs"),
    ("inf", ("history", "promises", "wrong", "joint"), [0, 2, 1], "do not ascend"),
    ("inf", ("history", "promises", "wrong", "joint"), [0, 1, 4], "do not ascend"),
    ("inf", ("history", "promises", "wrong", "joint"), [-1, 1, 1], "at least 0"),
]


def change_record(state: Any, keys: tuple[Any, ...], value: Any) -> None:
    *path, last = keys
    for key in path:
        state = state[key]
    if value is GONE:
        del state[last]
    else:
        state[last] = value


@pytest.mark.parametrize(
    ("method", "keys", "value", "word"),
    RECORDS,
    ids=[f"{row[0]} {'.'.join(map(str, row[1]))} {i}" for i, row in enumerate(RECORDS)],
)
def test_records_that_cannot_be(
    method: str, keys: tuple[Any, ...], value: Any, word: str, files: Path, tmp_path: Path
) -> None:
    image = Image(files / f"{method}.h5")
    change_record(image.state, keys, value)
    image.write(tmp_path / "p.h5")
    refused(tmp_path / "p.h5", method, word, inspected=keys in (("settings", "scale"), ("method",)))


# The child process


@pytest.mark.slow
def test_a_stranger_cannot_hang_or_crash_us(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations whose digest fits: through libhdf5, in the child."""
    path, data, own = tmp_path / "p.h5", (files / "inf.h5").read_bytes(), own_model("inf")
    monkeypatch.setattr(untrusted, "SECONDS", 20.0)  # of two busy processors
    generator, outcomes = np.random.default_rng(1), list[bool]()
    # anywhere; in the records that HDF5 begins with, where it stumbles most; in the last digits of numbers
    damaged = mutations(data, 10, 512, generator)
    damaged += [d + data[2560:] for d in mutations(data[:2560], 20, 512, generator) if len(d) == 2560]
    with h5py.File(files / "inf.h5") as file:
        numbers = data.index(file["blocks/3/diagonal"][()].tobytes())
    damaged += [data[: numbers + 4 * i] + bytes([i]) + data[numbers + 4 * i + 1 :] for i in range(5)]
    for changed in damaged:
        path.write_bytes(sealed(changed))
        start = time.monotonic()
        try:
            hostile_files.check_finite(uq.load(path, own, untrusted=True), batches()[0][0])
            outcomes.append(True)
        except PosthocUQError:
            outcomes.append(False)
        assert time.monotonic() - start < 30
    assert outcomes.count(False) > 10 and outcomes.count(True) >= 5


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "crashed"),
        ("import time\ntime.sleep(60)", "longer than"),
        (
            "import sys\nsys.stdout.buffer.write(b'S' + b'\\xff' * 8)\nsys.stdout.buffer.flush()",
            "no valid answer",
        ),
        ("import sys\nsys.stdout.buffer.write(b'S' + bytes([2]) + bytes(7) + b'xx')", "cannot be loaded"),
    ],
)
def test_a_child_that_goes_wrong(
    body: str, word: str, files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    ready = (
        "import sys\nsys.stdin.buffer.read(9)\nsys.stdout.buffer.write(b'R' + bytes(8))\nsys.stdout.flush()\n"
    )
    script.write_text(ready + body)
    monkeypatch.setattr(untrusted, "SECONDS", 2.0)
    monkeypatch.setattr(untrusted, "_SCRIPT", str(script))
    with pytest.raises(CorruptPosteriorError, match=word):
        uq.load(files / "inf.h5", own_model("inf"), untrusted=True)


@pytest.mark.parametrize(
    ("executable", "body", "word"),
    [
        ("", "", "frozen or embedded"),
        ("frozen", "", "frozen or embedded"),
        ("/nonexistent/python", "", "'/nonexistent/python': No such file"),
        ("/bin/false", "", "'/bin/false' ended with code 1 before"),
        ("/bin/echo", "", "'/bin/echo' does not answer as Python does"),
        (None, "import os\nos.kill(os.getpid(), 31)", "was ended by SIGSYS before"),  # as seccomp ends it
        (None, "raise ImportError('h5py')", "ended with code 1 before"),
        (None, "import time\ntime.sleep(60)", "did nothing for 2 seconds before"),
        ("no threads", "", "its time cannot be watched: can't start new thread"),
        ("no processes", "", "Resource temporarily unavailable"),
    ],
)
def test_a_child_that_cannot_be_had_is_not_the_file_s_fault(
    executable: str | None, body: str, word: str, files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        if executable == "no threads":
            raise RuntimeError("can't start new thread")
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    if body:
        (tmp_path / "child.py").write_text(body)
        monkeypatch.setattr(untrusted, "_SCRIPT", str(tmp_path / "child.py"))
        monkeypatch.setattr(untrusted, "SECONDS", 2.0)
    elif executable == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif executable == "no threads":
        monkeypatch.setattr(threading.Timer, "start", refused)
    elif executable == "no processes":
        monkeypatch.setattr(subprocess, "Popen", refused)
    else:
        monkeypatch.setattr(sys, "executable", executable)
    for read in (lambda path: uq.load(path, own_model("inf"), untrusted=True), uq.inspect):
        with pytest.raises(PosthocUQError, match=f"none could be started here: .*{word}") as caught:
            read(files / "inf.h5")
        assert not isinstance(caught.value, CorruptPosteriorError) and "inf.h5" not in str(caught.value)


def test_the_child_has_little_memory_and_no_files() -> None:
    """The limits themselves, in a process that tries to pass them."""
    script = (
        "import runpy, sys\n"
        "import numpy as np\n"
        "runpy.run_path(sys.argv[1])['limit_resources'](60, 2**30)\n"
        "try:\n    np.ones(2**28)\n    raise SystemExit('memory')\n"
        "except MemoryError:\n    pass\n"
        "try:\n    open('/etc/hostname')\n    raise SystemExit('file')\n"
        "except OSError:\n    pass\n"
        "print('held')"
    )
    command = [sys.executable, "-c", script, untrusted._SCRIPT]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    assert subprocess.run(command, capture_output=True, text=True, env=environment).stdout == "held\n"


def test_a_deflate_bomb_is_stopped_by_the_memory_limit(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk that claims 204 bytes and inflates to 384 MiB of zeros; libhdf5 itself would not mind. Versions
    before 2.0 keep no length above 64 KiB for such a chunk, so that they can make no such file.
    """
    path, own = tmp_path / "p.h5", own_model("inf")
    path.write_bytes((files / "inf.h5").read_bytes())
    blocks, packer = 24, zlib.compressobj(9)
    begin = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">HH", blocks * 2**24 % 65521, 1)
    packed = begin + (blocks - 1) * again + b"\x01\x00\x00\xff\xff" + checksum

    def change(file: h5py.File) -> None:
        put(file, shape=SHAPE, dtype="<f4", chunks=SHAPE, **PACKED)
        file[f"{BLOCK}/diagonal"].id.write_direct_chunk((0, 0, 0), packed)

    try:
        edit(path, change)
    except OSError as error:
        if "can't be encoded" not in str(error):
            raise
        pytest.skip(f"libhdf5 {h5py.version.hdf5_version} cannot write a chunk that inflates that far")
    monkeypatch.setattr(untrusted, "_MEMORY", 2**32)
    assert not bool(uq.load(path, own, untrusted=True).blocks["3"].tensors()["diagonal"].any())
    monkeypatch.setattr(untrusted, "_MEMORY", 2**29)
    with pytest.raises(CorruptPosteriorError, match="diagonal"):
        uq.load(path, own, untrusted=True)


# Temporary files and permissions


def temporary(target: Path) -> Path:
    return target.with_name(f".{atomic._stem(target)}.{'0' * 16}.tmp")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))


def test_a_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            atomic.write(tmp_path / "p.h5", BytesIO(b"x"))
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and len(leftovers(tmp_path)) == 1
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
    remove_leftovers(tmp_path / own)
    assert written.exists()
    os.close(opened)
    remove_leftovers(tmp_path / own)
    assert written.exists() == (own != other)
    remove_leftovers(target)
    assert not written.exists()


def test_many_fits_begin_and_write_side_by_side(tmp_path: Path) -> None:
    names = ["c.h5", "c.h5.bak", "c.h5", "c"]
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(40):
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


# Disks that are full, and file systems that cannot do all


def sizes_that_fill_the_disk(path: Path, write: Callable[[], None]) -> None:
    """Under limits below a file's size each write must be refused by name, and keep what is there."""
    resource = pytest.importorskip("resource")
    write()
    whole, size = path.read_bytes(), path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in {0, 40, 4096, size // 2, size - 1}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(PosthocUQError, match=r"could not be written: File too large.*is unchanged"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_bytes() == whole and not leftovers(path.parent)


def test_a_full_disk_is_named_whatever_writes(tmp_path: Path) -> None:
    """torch, Pillow and others raise errors of their own in place of the operating system's."""
    state = {"x": torch.randn(30_000), "y": {"z": torch.ones(100)}}
    sizes_that_fill_the_disk(tmp_path / "c", lambda: write_snapshot(tmp_path / "c", state))
    posterior = fit("kfac")
    sizes_that_fill_the_disk(tmp_path / "p.h5", lambda: uq.save(posterior, tmp_path / "p.h5"))

    def table() -> None:
        with text_file(str(tmp_path / "t.csv")) as file:
            file.writelines(f"{number},größe\n" for number in range(20_000))

    def picture() -> None:
        with replacing(tmp_path / "p.png") as file:
            pixels = np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(file, format="PNG")

    sizes_that_fill_the_disk(tmp_path / "t.csv", table)
    sizes_that_fill_the_disk(tmp_path / "p.png", picture)


@pytest.mark.skipif(os.name != "posix", reason="folders are flushed on POSIX alone")
@pytest.mark.parametrize("what", ["fsync of a folder", "folder that cannot be read", "fsync", "permissions"])
def test_a_file_is_in_place_where_its_file_system_cannot_do_all(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, posterior = tmp_path / "p.h5", fit("diag")
    uq.save(posterior, path)
    path.chmod(0o640)
    fsync, opened = os.fsync, os.open

    def refused_fsync(descriptor: int) -> None:
        if what == "fsync" or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    def refused_open(place: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(place) == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return opened(place, flags, *rest, **more)

    def refused_mode(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if what == "permissions":
        monkeypatch.setattr(os, "fchmod", refused_mode)
    elif what == "folder that cannot be read":
        monkeypatch.setattr(os, "open", refused_open)
    else:
        monkeypatch.setattr(os, "fsync", refused_fsync)
    word = "600 in place of 640" if what == "permissions" else "does not say when it is on the disk"
    other = fit("kfac")
    with pytest.warns(UserWarning, match=f"is written, but .*{word}"):
        uq.save(other, path)
    assert uq.load(path, own_model("kfac")).method == "kfac" and not leftovers(tmp_path)
    if what != "permissions":
        with pytest.warns(UserWarning, match=word):
            fit_with_warnings(tmp_path / "c")
        assert not (tmp_path / "c").exists()


def fit_with_warnings(path: Path) -> uq.Posterior:
    options = {"prior_precision": 1.0, "checkpoint_every": 1, "progress": False}
    return uq.fit(model(), batches(), method="diag", checkpoint=path, **options)


def test_a_file_whose_numbers_are_lost_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    atomic.write(tmp_path / "p", BytesIO(b"old"))
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(PosthocUQError, match=r"could not be written: Input/output error.*unchanged"):
        atomic.write(tmp_path / "p", BytesIO(b"new"))
    assert (tmp_path / "p").read_bytes() == b"old" and not leftovers(tmp_path)


def test_a_folder_that_may_not_be_written_to_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    for path in (tmp_path / "p.h5", tmp_path / "c"):
        with pytest.raises(PosthocUQError, match="no files may be made in"):
            checked_target(path)
    with pytest.raises(PosthocUQError, match="no files may be made in"):
        fit_with_warnings(tmp_path / "c")


# Files that several change


def add_one(path: Path, waited: Callable[[], Any] = lambda: None) -> None:
    with atomic.changing(path, waited) as check:
        number = int(path.read_bytes())
        time.sleep(0.001)
        check()
        atomic.write(path, BytesIO(b"%d" % (number + 1)))


@pytest.mark.skipif(atomic.fcntl is None, reason="without locks the second of two is refused")
def test_no_change_is_lost_among_threads_and_processes(tmp_path: Path) -> None:
    path, waits = tmp_path / "n", list[int]()
    path.write_bytes(b"0")
    children = list[int]()
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            try:
                for _ in range(15):
                    add_one(path)
            finally:
                os._exit(0)
    threads = [
        threading.Thread(target=lambda: [add_one(path, lambda: waits.append(1)) for _ in range(15)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        os.waitpid(child, 0)
    assert path.read_bytes() == b"75" and waits


@pytest.mark.skipif(atomic.fcntl is None, reason="locks of POSIX")
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_bytes(b"0")
    child = os.fork()
    if child == 0:
        with atomic.changing(path, lambda: None):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    add_one(path, lambda: pytest.fail("the lock is not free"))
    assert path.read_bytes() == b"1" and [each.name for each in tmp_path.iterdir()] == ["n"]


@pytest.mark.parametrize("locks", [True, False])
def test_a_change_by_one_who_asks_for_no_lock_is_noticed(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n"

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(atomic.fcntl, "flock", refused)
    changes: list[Callable[[], Any]] = [
        lambda: atomic.write(path, BytesIO(b"7")),
        lambda: path.write_bytes(b"77"),
        lambda: path.rename(tmp_path / "other"),
    ]
    for change in changes:
        path.write_bytes(b"0")
        expected = (
            nullcontext() if locks else pytest.warns(UserWarning, match="cannot be locked here .No locks")
        )
        with expected, atomic.changing(path, lambda: None) as check:
            check()
            change()
            with pytest.raises(PosthocUQError, match="written, moved or deleted by somebody else"):
                check()


# Terminals


def test_names_cannot_act_on_a_terminal(files: Path, tmp_path: Path) -> None:
    image = Image(files / "inf.h5")
    record = image.state["history"]
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
