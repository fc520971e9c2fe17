"""Posteriors in files: what comes back, what is written or not, which files and models belong together."""

from __future__ import annotations

import importlib
import json
import os
import stat
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from networks import cnn, inputs_of
from storage_helpers import (
    CALIBRATION,
    FAITHFUL,
    KINDS,
    LEFT_OUT,
    PROMISES,
    draw,
    edit_state,
    make,
    make_model,
    mutations,
    plain,
    same_bits,
    sealed,
    tensors_of,
)
from torch import nn

import posthoc_uq as uq
from posthoc_uq import (
    CorruptPosteriorError,
    Posterior,
    PosteriorMismatchError,
    PosthocUQError,
)
from posthoc_uq.core import OutputChoice, Record
from posthoc_uq.files import fingerprint, header, inspect, load, save, tensors
from posthoc_uq.likelihoods import LIKELIHOODS, ConformalScores
from posthoc_uq.methods import Checkpoint
from posthoc_uq.posteriors import (
    BLOCKS,
    ChangesRecord,
    DiagonalBlock,
    FaithfulRecord,
    HeadRecord,
    History,
    InformationBlock,
    LeaveOneOut,
    LeftOutRecord,
    ScaleCorrection,
)
from posthoc_uq.posteriors.posterior import BlockLayout

Saved = tuple[Path, nn.Module, Posterior]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    model = make_model()
    posterior = make("inf", model)
    save(posterior, tmp_path / "p.h5")
    return tmp_path / "p.h5", model, posterior


def readers(model: nn.Module) -> list[Callable[[Any], Any]]:
    """Every way to read a file."""
    return [lambda path: load(path, model), lambda path: load(path, model, untrusted=True), inspect]


# Round trips


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    """In float64; what a fit gives in float32 is in the conformance suite."""
    model = make_model(torch.float64)
    posterior = make(kind, model, torch.float64)
    save(posterior, tmp_path / "p.h5")
    loaded = load(tmp_path / "p.h5", model)
    assert same_bits(tensors_of(posterior), tensors_of(loaded))
    assert plain(posterior) == plain(loaded)
    assert same_bits(draw(posterior), draw(loaded))
    assert all(loaded.mean[n].data_ptr() == p.data_ptr() for n, p in model.named_parameters())
    save(loaded, tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "p.h5").read_bytes()


def test_samples_agree_in_another_process(saved: Saved, tmp_path: Path) -> None:
    path, _, posterior = saved
    script = (
        "import sys, torch; torch.set_num_threads(int(sys.argv[4])); sys.path.insert(0, sys.argv[1])\n"
        "from storage_helpers import draw, make_model\nfrom posthoc_uq.files import load\n"
        "torch.save(draw(load(sys.argv[2], make_model())), sys.argv[3])"
    )
    out = tmp_path / "draws.pt"
    arguments = [str(Path(__file__).parent), str(path), str(out), str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, cwd=Path(__file__).parents[1])
    assert same_bits(torch.load(out, weights_only=True), draw(posterior))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_formats_round_once(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model()
    posterior = make("inf", model, torch.float64)
    save(posterior, tmp_path / "p.h5", dtype=dtype)
    expected = {name: tensor.to(dtype).float() for name, tensor in tensors_of(posterior).items()}
    assert same_bits(expected, tensors_of(load(tmp_path / "p.h5", model)))
    blocks = inspect(tmp_path / "p.h5")["blocks"].values()
    kept = {tensor["dtype"] for block in blocks for tensor in block["tensors"].values()}
    assert kept == {str(dtype).removeprefix("torch.")}


def test_gzip_is_smaller_and_exact(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    posterior = make("diag", model)
    posterior.blocks[""] = DiagonalBlock(torch.arange(10100.0).reshape(1, 100, 101).floor() % 7)
    save(posterior, tmp_path / "p.h5")
    save(posterior, tmp_path / "z.h5", compression="gzip")
    numbers = sum(prod(tensor.shape) * 4 for tensor in tensors_of(posterior).values())
    assert (tmp_path / "p.h5").stat().st_size < numbers + 20_000
    assert (tmp_path / "z.h5").stat().st_size < 0.5 * (tmp_path / "p.h5").stat().st_size
    for untrusted in (False, True):
        loaded = load(tmp_path / "z.h5", model, untrusted=untrusted)
        assert same_bits(tensors_of(loaded), tensors_of(posterior))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a%2Fb", "%", "\n", "state", "größe"])
def test_any_name_is_safe(name: str, tmp_path: Path) -> None:
    model = make_model()
    posterior = make("full", model)
    members = {name: posterior.members["all"]}
    layout = BlockLayout(posterior.layers, members)
    posterior = posterior.replaced(blocks={name: posterior.blocks["all"]}, members=members, layout=layout)
    save(posterior, tmp_path / "p.h5")
    assert same_bits(tensors_of(load(tmp_path / "p.h5", model)), tensors_of(posterior))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_layer_without_directions(compression: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    posterior = make("inf", model)
    empty = torch.zeros(1, 4, 0), torch.zeros(1, 2, 0), torch.zeros(1, 0, 0), torch.rand(1, 2, 4)
    posterior.blocks[""] = InformationBlock(*empty, "clamp")
    save(posterior, tmp_path / "p.h5", compression=compression)
    for untrusted in (False, True):
        loaded = load(tmp_path / "p.h5", model, untrusted=untrusted)
        assert same_bits(tensors_of(loaded), tensors_of(posterior))


def test_a_long_record_is_kept_whole(tmp_path: Path) -> None:
    model = make_model()
    fit = {"text": "x" * 200_000, "list": [0.1] * 20_000, "big": 2**80, "nul": "a\0b", "nan": float("inf")}
    posterior = make("diag", model, fit=fit)
    posterior = posterior.noted(deterministic={f"layer{i}.weight": "BatchNorm" for i in range(5000)})
    save(posterior, tmp_path / "p.h5")
    assert plain(load(tmp_path / "p.h5", model)) == plain(posterior)


RECORDS = {
    "head": HeadRecord,
    "faithful": FaithfulRecord,
    "left_out": LeftOutRecord,
    "leave_one_out": LeaveOneOut,
    "calibration": ScaleCorrection,
    "changes": ChangesRecord,
    "output": OutputChoice,
    "promises": ConformalScores,
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_history_comes_back_and_is_shown(name: str, tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "p.h5"
    posterior = make("inf", model)
    by_layer = FAITHFUL | {"value": dict(posterior.prior_precision), "divergence": float("inf")}
    kept = PROMISES | {"posterior": {"scale": posterior.scale}}
    counts = {"updates": 1, "added": 5, "removals": 0, "removed": 0, "balance": 2**64 - 1, "last": 3}
    values: list[tuple[dict[str, Any], str]] = {
        "head": [
            ({"name": "moments", "options": {"n_draws": 50}, "criterion": "evidence"}, "moments (n_draws 50)")
        ],
        "faithful": [(FAITHFUL, "of at most 0.01 nats"), (by_layer, "infinitely many")],
        "left_out": [({"temperature": 3.0, "noise_scale": 1.0}, "")],
        "leave_one_out": [(LEFT_OUT["classification"], "")],
        "promises": [
            (kept, "p-values of entropy, joint; by 3 held-out samples"),
            (PROMISES, "void: those of 3 held-out samples are of other hyperparameters"),
        ],
        "changes": [({**counts, "digest": "0" * 64, "outside": 0.1, "outside before": 0.2}, "5 samples")],
        "output": [({"name": "logits", "guessed": True}, "'logits'")],
        "calibration": [(CALIBRATION, "error left")],
    }[name]
    for value, words in values:
        record = RECORDS[name](**value)
        posterior = posterior.replaced(history=replace(posterior.history, **{name: record}))
        save(posterior, path)
        loaded, found = load(path, model), inspect(path)
        assert getattr(loaded.history, name) == record
        assert words in str(found)
        assert found[name] == {key: v for key, v in value.items() if v != float("inf")}
        save(loaded, tmp_path / "again.h5")
        assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()


def test_every_record_of_the_history_is_one_of_the_file() -> None:
    plain_values, for_people = {"fit", "deterministic", "tuning", "novelty", "inputs"}, {"trials"}
    assert {each.name for each in fields(History)} == plain_values | for_people | RECORDS.keys()


NEXT_CALLS: dict[str, Callable[[Posterior, Any], Posterior]] = {
    "calibrate": lambda posterior, rows: uq.calibrate(posterior, rows, progress=False),
    "tune": lambda posterior, rows: uq.tune(posterior, rows, progress=False),
    "tune, faithful": lambda posterior, rows: uq.tune(posterior, rows, criterion="faithful", progress=False),
    "update": lambda posterior, rows: uq.update(posterior, rows, progress=False),
}


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_a_loaded_posterior_goes_on_as_the_one_that_was_saved(likelihood: str, tmp_path: Path) -> None:
    """What follows is the same, bit for bit; a file without what leave-one-out found is as it was."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(180, 2, generator=generator)
    y = x.sin() + 0.4 * torch.randn(180, 2, generator=generator)
    y = y if likelihood == "regression" else (y[:, 0] > 0).long() + (y[:, 1] > 0.5).long()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2 if likelihood == "regression" else 3))
    posterior = uq.fit(model, [(x[:80], y[:80])], likelihood=likelihood, progress=False)
    found, path, rows = posterior.history.leave_one_out, tmp_path / "p.h5", [(x[80:], y[80:])]
    assert found is not None and (found.accuracy is None) is (likelihood == "regression")
    save(posterior, path)
    loaded = load(path, model)
    assert loaded.history.leave_one_out == found
    for call in NEXT_CALLS.values():
        one, other = call(posterior, rows), call(loaded, rows)
        assert same_bits(tensors_of(one), tensors_of(other)) and plain(one) == plain(other)
        assert repr(one.history.trials) == repr(other.history.trials)
    report = [str(uq.evaluate(uq.wrap(model, each), rows, progress=False)) for each in (posterior, loaded)]
    assert report[0] == report[1]
    promising = uq.calibrate(loaded, rows, progress=False).history.promises.samples
    assert (promising == 100) is (likelihood == "regression")
    edit_state(path, lambda state: state["history"].pop("leave_one_out"))
    earlier = uq.calibrate(load(path, model), rows, progress=False)
    assert 30 < earlier.history.promises.samples < 70


def test_thresholds_that_an_earlier_version_set_are_left_out(saved: Saved) -> None:
    path, model, posterior = saved
    edit_state(path, lambda state: state["history"].update(referral={"rate": 0.05, "scores": {}}))
    assert plain(load(path, model)) == plain(posterior)
    assert "referral" not in inspect(path) and not hasattr(load(path, model).history, "referral")


def test_inspect_and_h5py_show_what_is_in_it(saved: Saved) -> None:
    path, model, posterior = saved
    found = inspect(path)
    json.dumps(found, allow_nan=False)
    assert found["method"] == "inf" and found["format_version"] == 1 and found["head"] == {}
    assert found["bytes"] == path.stat().st_size and found["library_version"] == uq.__version__
    assert found["scale"] == posterior.scale and found["prior_precision"] == posterior.prior_precision
    assert found["likelihood"] == {"name": "classification"} and found["fit"] == posterior.history.fit
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["layers"]["body.a/b"]["weight_shape"] == [4, 1, 2, 2]
    block = found["blocks"]["body.a/b"]
    assert block["kind"] == "inf" and block["attributes"]["output_directions"] == 2
    assert block["tensors"]["input_basis"] == {"shape": [2, 5, 2], "dtype": "float32"}
    assert block["bytes"] == posterior.blocks["body.a/b"].bytes()
    with h5py.File(path) as file:
        assert file.attrs["method"] == "inf" and file.attrs["library_version"] == uq.__version__


# The format's document

DOCS = Path(__file__).parents[1] / "docs"


def test_the_generated_document_names_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    text = "\n".join(importlib.import_module("generated").file_format())
    # those of the wing `app` are of files of its own
    kinds = [kind for kind in all_records(Record) if not kind.__module__.startswith("posthoc_uq.app")]
    named = {field.alias or name for kind in kinds for name, field in kind.model_fields.items()}
    assert not [name for name in named | BLOCKS.keys() | LIKELIHOODS.keys() if f"`{name}`" not in text]


def test_the_example_reads_every_tensor(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.h5").write_bytes(saved[0].read_bytes())
    found: dict[str, Any] = {}
    exec((DOCS / "format.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], found)
    expected = tensors_of(saved[2])
    assert found["tensors"].keys() == {tuple(name.split("|")) for name in expected}
    assert all(np.array_equal(x, expected["|".join(n)].numpy()) for n, x in found["tensors"].items())


def all_records(kind: type[Record]) -> set[type[Record]]:
    """Every record of a posterior's file."""
    own = {each for each in kind.__subclasses__() if "snapshot" not in each.__module__}
    return own.union(*map(all_records, own))


# Saving


@pytest.mark.parametrize(
    ("broken", "error", "seen"),
    [
        ("fsync", OSError(28, "No space left on device"), PosthocUQError),
        ("replace", OSError(28, "No space left on device"), PosthocUQError),
        ("replace", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_write_leaves_the_old_file(
    broken: str,
    error: BaseException,
    seen: type[BaseException],
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, model, _ = saved
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(seen):
        save(make("diag", model), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_over_a_file_and_through_a_link(saved: Saved) -> None:
    path, model, _ = saved
    link = path.with_name("link.h5")
    link.symlink_to(path)
    save(make("diag", model), link)
    assert link.is_symlink() and load(path, model).method == "diag"


def with_value(model: nn.Module, value: float) -> Posterior:
    posterior = make("diag", model)
    posterior.blocks["body.50%2F"].tensors()["diagonal"].fill_(value)
    return posterior


def test_bfloat16_takes_what_float16_does_not(tmp_path: Path) -> None:
    model = make_model()
    for value in (2.0**40, 2.0**-40):
        save(with_value(model, value), tmp_path / "p.h5", dtype=torch.bfloat16)
        kept = load(tmp_path / "p.h5", model).blocks["body.50%2F"].tensors()["diagonal"]
        assert float(kept[0, 0, 0]) == value


# Paths


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_paths_that_are_no_files(saved: Saved, tmp_path: Path) -> None:
    """Each is one error at once; opening a pipe would wait for ever."""
    _, model, posterior = saved
    os.mkfifo(tmp_path / "pipe.h5")
    writers: list[Callable[[Any], Any]] = [
        lambda path: save(posterior, path),
        lambda path: Checkpoint(path, 1, {}),
    ]
    names: list[tuple[Any, str]] = [
        (tmp_path / "pipe.h5", "is not a file"),
        (tmp_path, "folder"),
        ("/dev/null", "is not a file"),
        ("a\0b.h5", "path"),
        (7, "7"),
    ]
    for path, word in names:
        for call in readers(model) + writers:
            with pytest.raises(PosthocUQError, match=word):
                call(path)
    for call in [*readers(model), *writers]:
        with pytest.raises(PosthocUQError):
            call(tmp_path / "none" / ("x" * 300))
    assert stat.S_ISFIFO((tmp_path / "pipe.h5").stat().st_mode)
    longest = tmp_path / ("x" * 251 + ".h5")  # 254 bytes are allowed
    save(posterior, longest)
    assert load(longest, model).method == "inf"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe.h5", "p.h5", longest.name}


# Models


def test_buffers_belong_to_the_model(tmp_path: Path) -> None:
    model, path = cnn(), tmp_path / "p.h5"
    save(uq.fit(model, [(inputs_of(1, 4, 4), torch.arange(24) % 3)], "inf", progress=False), path)
    statistics = {f"body.1.running_{k}": getattr(model.body[1], f"running_{k}") for k in ("mean", "var")}
    assert inspect(path)["buffers_fingerprint"] == fingerprint(statistics)
    model.body[1].running_mean += 1
    with pytest.raises(PosteriorMismatchError, match="running statistics"):
        load(path, model)


def test_weights_without_a_posterior_belong_to_the_model(tmp_path: Path) -> None:
    model, path = cnn(), tmp_path / "p.h5"
    data = [(inputs_of(1, 4, 4), torch.arange(24) % 3)]
    posterior = uq.fit(model, data, "inf", layers="last", progress=False)
    save(posterior, path)
    covered = posterior.mean
    others = {name: p for name, p in model.named_parameters() if name not in covered}
    assert others and inspect(path)["others_fingerprint"] == fingerprint(others)
    loaded = load(path, model)
    save(loaded, tmp_path / "again.h5")
    assert inspect(tmp_path / "again.h5")["others_fingerprint"] == fingerprint(others)
    with torch.no_grad():
        next(iter(others.values())).flatten()[0] += 1
    with pytest.raises(PosteriorMismatchError, match="without a posterior are not those"):
        load(path, model)


# The header


def test_every_damage_is_one_error(saved: Saved) -> None:
    path, model, _ = saved
    data, generator = path.read_bytes(), np.random.default_rng(0)
    start = [d + data[512:] for d in mutations(data[:512], 200, 0, generator) if len(d) == 512]
    for changed in mutations(data, 1500, 0, generator) + start + [data + b"\0", b"", data[:100], data[:512]]:
        path.write_bytes(changed)
        with pytest.raises(CorruptPosteriorError):
            load(path, model)


def old_header(number: int, body: bytes) -> bytes:
    """As releases up to 0.2 wrote it."""
    return struct.pack("<16sIQ32s16s", header.MAGIC, number, len(body), bytes(32), b"inf").ljust(512, b"\0")


def test_other_files_are_named_for_what_they_are(saved: Saved, tmp_path: Path) -> None:
    path, model, _ = saved
    data, hdf5, image = path.read_bytes(), BytesIO(), BytesIO()
    with h5py.File(hdf5, "w") as file:
        file["weights"] = np.ones(1000)
    with h5py.File(image, "w", userblock_size=512) as file:
        file["weights"] = np.ones(1000)
    pickled = BytesIO()
    torch.save({"a": torch.ones(1000)}, pickled)
    cases = {
        "HDF5 file that posthoc_uq did not write": hdf5.getvalue(),
        "not a posterior file": pickled.getvalue(),
        "libhdf5": sealed(bytes(512) + header.HDF5_SIGNATURE + bytes(4000)),
        "no dataset 'state'": sealed(image.getvalue()),
        "format 8, written by posthoc_uq 0.2 or earlier.*fit and save again": old_header(8, data)
        + data[512:],
        "format 1, written by posthoc_uq 0.2 or earlier": old_header(1, data) + data[512:],
        f"format 9, written by posthoc_uq {uq.__version__}.*load it with": sealed(data, number=9),
        "format 0": sealed(data, number=0),
        "header says method='kfac'": sealed(data, "kfac"),
        "'evil'": sealed(data, "evil"),
    }
    for words, content in cases.items():
        path.write_bytes(content)
        for read in readers(model):
            with pytest.raises(CorruptPosteriorError, match=words):
                read(path)
    with pytest.raises(ValueError, match="at most 64 bytes"):  # a longer name would be cut
        sealed(data, "é" * 33)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of files were asked for, read by read."""
    found: list[int] = []
    real = header.open_regular

    class Counted:
        def __init__(self, path: Path) -> None:
            self.file = real(path)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            return self.file.fileno()

        def read(self, size: int) -> bytes:
            found.append(size)
            return self.file.read(size)

    monkeypatch.setattr(header, "open_regular", Counted)
    return found


def announced(path: Path, kind: str, length: int, size: int) -> None:
    """A sparse file of `size` bytes whose header announces `length`."""
    block = header._FIELDS.pack(header.MAGIC, header.FORMAT, length, bytes(32), kind.encode(), b"0.3.0")
    with path.open("wb") as file:
        file.write(block.ljust(header.SIZE, b"\0"))
        file.truncate(size)


def test_nothing_is_read_before_the_length_is_checked(tmp_path: Path, reads: list[int]) -> None:
    path, model = tmp_path / "p.h5", nn.Linear(3, 2)
    announced(path, "diag", 5, 2**33)
    for read in readers(model):
        with pytest.raises(CorruptPosteriorError, match="announces 5"):
            read(path)
    announced(path, "diag", 2**40, 2**40 + 512)  # as it says, but no posterior of this model is as large
    for read in readers(model)[:2]:
        with pytest.raises(PosteriorMismatchError, match=r"diag.*another model"):
            read(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptPosteriorError, match="not a posterior file"):
        load(path, model)
    assert set(reads) == {512}


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("diag", 180_870), ("kfac", 396_000), ("efb", 290_000), ("inf", 410_000), ("function_space", 410_000)],
)
def test_a_file_may_be_as_large_as_its_method_needs(kind: str, numbers: int, tmp_path: Path) -> None:
    """60,000 parameters: a diagonal is small, KFAC may keep its Grams too; a prior may have a mean and, where it can, a
    precision of each weight.
    """
    model = nn.Sequential(nn.Linear(200, 250), nn.Linear(250, 40))
    most = tensors.size_limit(kind, model)
    assert 8 * numbers < most < 1.2 * 8 * numbers + 2**26
    announced(tmp_path / "p.h5", kind, most, most + 512)
    with pytest.raises(PosteriorMismatchError, match="takes at most"):
        load(tmp_path / "p.h5", model)
    for small in (make_model(torch.float64), nn.Sequential(nn.Conv2d(8, 24, 3, groups=4))):
        if kind in KINDS:
            save(make(kind, small, torch.float64), tmp_path / "p.h5", compression="gzip")
            limit = tensors.size_limit(kind, small) - tensors._SPARE
            assert (tmp_path / "p.h5").stat().st_size < limit + 100_000


def test_a_large_file_is_in_memory_once(tmp_path: Path) -> None:
    body, path = header.HDF5_SIGNATURE + bytes(2**24), tmp_path / "large.h5"
    path.write_bytes(sealed(bytes(512) + body, "diag"))
    tracemalloc.start()
    try:
        data, head = header.read(path, lambda _: sys.maxsize)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert head == ("diag", uq.__version__) and data[header.SIZE :] == body
    assert most < 1.1 * len(body)
