"""Posteriors in files: round trips, atomic writes, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
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
    KINDS,
    draw,
    edit,
    edit_state,
    make,
    make_model,
    of_version,
    plain,
    same_bits,
    sealed,
    tensors_of,
)
from torch import nn

import posthoc_uq as uq
import posthoc_uq.files.sizes as sizes
import posthoc_uq.files.untrusted as sandbox
from posthoc_uq.core.errors import (
    CorruptPosteriorError,
    NonFiniteError,
    PosteriorMismatchError,
    PosthocUQError,
)
from posthoc_uq.files import inspect, load, save, userblock
from posthoc_uq.files.schema import fingerprint
from posthoc_uq.fitting.wrap import HEADS as WRAPPED
from posthoc_uq.likelihoods import Bernoulli, Gaussian, Likelihood
from posthoc_uq.methods.resume import Checkpoint
from posthoc_uq.posteriors.information import InformationBlock
from posthoc_uq.posteriors.laplace import DiagonalBlock
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import HEADS


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Posterior]:
    model = make_model()
    posterior = make("inf", model)
    save(posterior, tmp_path / "p.h5")
    return tmp_path / "p.h5", model, posterior


# Round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_keeps_every_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(dtype)
    posterior = make(kind, model, dtype)
    save(posterior, tmp_path / "p.h5")
    loaded = load(tmp_path / "p.h5", model)
    assert same_bits(tensors_of(posterior), tensors_of(loaded))
    assert plain(posterior) == plain(loaded)
    assert same_bits(draw(posterior), draw(loaded))
    assert all(loaded.mean[n].data_ptr() == p.data_ptr() for n, p in model.named_parameters())
    save(loaded, tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "p.h5").read_bytes()


def test_untrusted_and_trusted_load_the_same(tmp_path: Path) -> None:
    model = make_model()
    posterior = make("inf", model)
    save(posterior, tmp_path / "p.h5", compression="gzip")
    loaded = load(tmp_path / "p.h5", model, untrusted=True)
    assert same_bits(tensors_of(posterior), tensors_of(loaded))
    assert plain(posterior) == plain(loaded)


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Gaussian(torch.tensor([0.1, 1 / 3], dtype=torch.float64))]
)
def test_likelihoods_come_back(likelihood: Likelihood, tmp_path: Path) -> None:
    model = make_model()
    save(make("diag", model, likelihood=likelihood), tmp_path / "p.h5")
    loaded = load(tmp_path / "p.h5", model).likelihood
    assert type(loaded) is type(likelihood)
    assert loaded.attributes() == likelihood.attributes()


def test_samples_agree_in_another_process(saved: tuple[Path, nn.Module, Posterior], tmp_path: Path) -> None:
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
    save(posterior, tmp_path / "wide.h5")
    save(posterior, tmp_path / "narrow.h5", dtype=dtype)
    expected = {name: tensor.to(dtype).float() for name, tensor in tensors_of(posterior).items()}
    loaded = load(tmp_path / "narrow.h5", model)
    assert same_bits(expected, tensors_of(loaded))
    kept = {
        t["dtype"] for b in inspect(tmp_path / "narrow.h5")["blocks"].values() for t in b["tensors"].values()
    }
    assert kept == {str(dtype).removeprefix("torch.")}


def test_gzip_is_smaller_and_exact(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    posterior = make("diag", model)
    posterior.blocks[""] = DiagonalBlock(torch.arange(10100.0).reshape(1, 100, 101).floor() % 7)
    save(posterior, tmp_path / "p.h5")
    save(posterior, tmp_path / "z.h5", compression="gzip")
    assert (tmp_path / "z.h5").stat().st_size < 0.5 * (tmp_path / "p.h5").stat().st_size
    assert same_bits(tensors_of(load(tmp_path / "z.h5", model)), tensors_of(posterior))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a%2Fb", "%", "\n", "\udc80", "state", "größe"])
def test_any_name_is_safe(name: str, tmp_path: Path) -> None:
    model = make_model()
    posterior = make("full", model)
    posterior.blocks, posterior.members = {name: posterior.blocks["all"]}, {name: posterior.members["all"]}
    save(posterior, tmp_path / "p.h5")
    assert same_bits(tensors_of(load(tmp_path / "p.h5", model)), tensors_of(posterior))


def test_a_layer_without_directions(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    posterior = make("inf", model)
    empty = torch.zeros(1, 4, 0), torch.zeros(1, 2, 0), torch.zeros(1, 0, 0), torch.rand(1, 2, 4)
    posterior.blocks[""] = InformationBlock(*empty, "clamp")
    for compression in (None, "gzip"):
        save(posterior, tmp_path / "p.h5", compression=compression)
        for untrusted in (False, True):
            loaded = load(tmp_path / "p.h5", model, untrusted=untrusted)
            assert same_bits(tensors_of(loaded), tensors_of(posterior))


def test_a_compiled_model_and_a_named_device(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    compiled = nn.Module()  # as torch.compile makes it
    compiled._orig_mod = model
    assert next(compiled.named_parameters())[0].startswith("_orig_mod.")
    loaded = load(path, compiled, device="cpu")
    assert same_bits(tensors_of(loaded), tensors_of(posterior))


def test_plain_h5py_reads_it(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, _, posterior = saved
    with h5py.File(path) as file:
        assert file.attrs["method"] == "inf" and file.attrs["likelihood"] == "classification"
        assert file.attrs["scale"] == posterior.scale and file.attrs["fit.seed"] == 7
        assert file.attrs["fit.seconds.sweep"] == 0.25
        assert list(file["layers/body.a%2Fb"].attrs["weight_shape"]) == [4, 1, 2, 2]
        assert file["layers/body.50%252F"].attrs["prior_precision"] == posterior.prior_precision["body.50%2F"]
        group = file["blocks/body.a%2Fb"]
        assert group.attrs["correction"] == "rescale" and group.attrs["input_directions"] == 2
        assert np.array_equal(
            group["diagonal"][()], posterior.blocks["body.a/b"].tensors()["diagonal"].numpy()
        )


def test_the_example_of_the_format_document_runs(saved: tuple[Path, nn.Module, Posterior]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    found: dict[str, object] = {"path": str(saved[0])}
    exec(example, found)
    expected = tensors_of(saved[2])
    assert found["tensors"].keys() == {tuple(name.split("|")) for name in expected}
    assert all(np.array_equal(x, expected["|".join(n)].numpy()) for n, x in found["tensors"].items())


def test_inspect_tells_all(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    found = inspect(path)
    json.dumps(found)
    assert (
        found["method"] == "inf"
        and found["format_version"] == userblock.FORMAT_VERSION
        and found["bytes"] == path.stat().st_size
    )
    assert found["scale"] == posterior.scale and found["prior_precision"] == posterior.prior_precision
    assert found["likelihood"] == {"name": "classification"} and found["fit"] == posterior.history.fit
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["layers"]["body.a/b"]["weight_shape"] == [4, 1, 2, 2]
    block = found["blocks"]["body.a/b"]
    assert block["kind"] == "inf" and block["attributes"]["output_directions"] == 2
    assert block["tensors"]["input_basis"] == {"shape": [2, 5, 2], "dtype": "float32"}
    assert block["bytes"] == posterior.blocks["body.a/b"].bytes()


def test_a_long_record_is_kept_whole(tmp_path: Path) -> None:
    model = make_model()
    posterior = make(
        "diag", model, fit={"text": "x" * 200_000, "list": [0.1] * 20_000, "big": 2**80, "nul": "a\0b"}
    )
    posterior.history.deterministic = {f"layer{i}.weight": "BatchNorm" for i in range(5000)}
    save(posterior, tmp_path / "p.h5")
    assert plain(load(tmp_path / "p.h5", model)) == plain(posterior)


# Saving


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    broken: str, saved: tuple[Path, nn.Module, Posterior], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, _ = saved
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(PosthocUQError, match="No space left"):
        save(make("diag", model), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_interrupt_leaves_the_old_file(
    saved: tuple[Path, nn.Module, Posterior], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, _ = saved
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(make("diag", model), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_over_a_file_and_through_a_link(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    link = path.with_name("link.h5")
    link.symlink_to(path)
    save(make("diag", model), link)
    assert link.is_symlink() and load(path, model).method == "diag"


def with_value(model: nn.Module, value: float) -> Posterior:
    posterior = make("diag", model)
    posterior.blocks["body.50%2F"].tensors()["diagonal"].fill_(value)
    return posterior


@pytest.mark.parametrize(
    ("value", "options", "error", "words"),
    [
        (1e6, {"dtype": torch.float16}, PosthocUQError, "body.50%2F.*6.55e.*bfloat16"),
        (1e-9, {"dtype": torch.float16}, PosthocUQError, "body.50%2F.*lose 100%.*bfloat16"),
        (float("nan"), {}, NonFiniteError, "body.50%2F.*NaN"),
        (-1.0, {}, PosthocUQError, "body.50%2F.*negative"),
        (1.0, {"dtype": torch.int8}, PosthocUQError, "dtype must be"),
        (1.0, {"compression": "lzf"}, PosthocUQError, "compression must be"),
    ],
)
def test_what_does_not_fit_is_said_before_writing(
    value: float, options: dict, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        save(with_value(make_model(), value), tmp_path / "p.h5", **options)
    assert not list(tmp_path.iterdir())


def test_bfloat16_takes_what_float16_does_not(tmp_path: Path) -> None:
    model = make_model()
    for value in (2.0**40, 2.0**-40):
        save(with_value(model, value), tmp_path / "p.h5", dtype=torch.bfloat16)
        assert (
            float(load(tmp_path / "p.h5", model).blocks["body.50%2F"].tensors()["diagonal"][0, 0, 0]) == value
        )


def test_values_that_no_file_can_keep(tmp_path: Path) -> None:
    with pytest.raises(PosthocUQError, match="no file can keep"):
        save(make("diag", make_model(), fit={"callback": print}), tmp_path / "p.h5")
    assert not list(tmp_path.iterdir())


def test_missing_paths_are_one_sentence(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    with pytest.raises(PosthocUQError, match="does not exist"):
        save(posterior, path.parent / "none" / "p.h5")
    with pytest.raises(PosthocUQError, match="is a folder"):
        save(posterior, path.parent)
    for read in (lambda p: load(p, model), inspect):
        with pytest.raises(PosthocUQError, match="There is no file"):
            read(path.parent / "none.h5")
        with pytest.raises(PosthocUQError, match="is a folder"):
            read(path.parent)
        with pytest.raises(PosthocUQError, match="not a file"):
            read("/dev/null")


# Damage


def mutations(data: bytes, count: int, first: int, generator: np.random.Generator) -> list[bytes]:
    """Files with 1 to 32 bytes changed from `first` on, or the tail cut."""
    found: list[bytes] = []
    while len(found) < count:
        changed = bytearray(data)
        if generator.random() < 0.2:
            changed = changed[: int(generator.integers(first, len(data)))]
        else:
            for place in generator.integers(first, len(data), int(generator.integers(1, 33))):
                changed[place] = int(generator.integers(256))
        if bytes(changed) != data:
            found.append(bytes(changed))
    return found


def test_every_damage_is_one_error(saved: tuple[Path, nn.Module, Posterior], tmp_path: Path) -> None:
    path, model, _ = saved
    generator = np.random.default_rng(0)
    data = path.read_bytes()
    header_only = [
        bytes(d[:512]) + data[512:] for d in mutations(data[:512], 200, 0, generator) if len(d) == 512
    ]
    files = mutations(data, 2000, 0, generator) + header_only
    for changed in files:
        path.write_bytes(changed)
        with pytest.raises(CorruptPosteriorError):
            load(path, model)


def test_appended_bytes_and_an_empty_file(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    data = path.read_bytes()
    for changed in (data + b"\0", b"", data[:100], data[:512], b"x" * 2000):
        path.write_bytes(changed)
        for read in (lambda p: load(p, model), inspect):
            with pytest.raises(CorruptPosteriorError):
                read(path)


@pytest.mark.slow
def test_a_stranger_cannot_hang_or_crash_us(
    saved: tuple[Path, nn.Module, Posterior], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations whose digest fits: through libhdf5, in the child."""
    path, model, posterior = saved
    monkeypatch.setattr(sandbox, "SECONDS", 5.0)
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    outcomes: list[bool] = []
    shapes = {name: tensor.shape for name, tensor in tensors_of(posterior).items()}
    # Anywhere; in the records that HDF5 begins with, where it stumbles most; in the last digits of numbers.
    files = mutations(data, 20, 512, generator)
    files += [d + data[2560:] for d in mutations(data[:2560], 40, 512, generator) if len(d) == 2560]
    numbers = data.index(posterior.blocks["body.50%2F"].tensors()["diagonal"].numpy().tobytes())
    files += [data[: numbers + 4 * i] + bytes([i]) + data[numbers + 4 * i + 1 :] for i in range(5)]
    for changed in files:
        path.write_bytes(sealed(changed))
        start = time.monotonic()
        try:
            loaded = load(path, model, untrusted=True)
            assert {name: tensor.shape for name, tensor in tensors_of(loaded).items()} == shapes
            outcomes.append(True)
        except PosthocUQError:
            outcomes.append(False)
        assert time.monotonic() - start < 15
    assert outcomes.count(False) > 20 and outcomes.count(True) >= 5


@pytest.mark.parametrize(
    ("body", "words"),
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
    body: str,
    words: str,
    saved: tuple[Path, nn.Module, Posterior],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    script = tmp_path / "child.py"
    script.write_text("import sys\nsys.stdin.buffer.read(64)\n" + body)
    monkeypatch.setattr(sandbox, "SECONDS", 2.0)
    monkeypatch.setattr(sandbox, "_SCRIPT", str(script))
    with pytest.raises(CorruptPosteriorError, match=words):
        load(saved[0], saved[1], untrusted=True)


def test_the_child_has_little_memory_and_no_files() -> None:
    """The limits themselves, in a process that tries to pass them."""
    script = (
        "import runpy, sys\n"
        "import numpy as np\n"
        "runpy.run_path(sys.argv[1])['confine'](60, 2**30)\n"
        "try:\n    np.ones(2**28)\n    raise SystemExit('memory')\n"
        "except MemoryError:\n    pass\n"
        "try:\n    open('/etc/hostname')\n    raise SystemExit('file')\n"
        "except OSError:\n    pass\n"
        "print('held')"
    )
    command = [sys.executable, "-c", script, sandbox._SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.stdout == "held\n"


# Files of others


def test_foreign_files(saved: tuple[Path, nn.Module, Posterior], tmp_path: Path) -> None:
    _, model, _ = saved
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file["weights"] = np.ones(1000)
    for read in (lambda p: load(p, model), inspect):
        with pytest.raises(CorruptPosteriorError, match="HDF5 file that posthoc_uq did not write"):
            read(foreign)
    torch.save({"a": torch.ones(1000)}, foreign)
    with pytest.raises(CorruptPosteriorError, match="not a posterior file"):
        load(foreign, model)
    foreign.write_bytes(sealed(bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(4000)))
    with pytest.raises(CorruptPosteriorError, match="libhdf5"):
        load(foreign, model)
    buffer = BytesIO()
    with h5py.File(buffer, "w", userblock_size=512) as file:
        file["weights"] = np.ones(1000)
    foreign.write_bytes(sealed(buffer.getvalue()))
    with pytest.raises(CorruptPosteriorError, match="no dataset 'state'"):
        load(foreign, model)


@pytest.mark.parametrize(("version", "words"), [(0, "version 0.*save again"), (9, "version 9.*upgrade")])
def test_other_format_versions(version: int, words: str, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    of_version(path, version)
    for read in (lambda p: load(p, model), inspect):
        with pytest.raises(CorruptPosteriorError, match=words):
            read(path)


def test_the_head_and_the_faithful_prior_come_back_and_are_shown(tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "p.h5"
    posterior = make("inf", model)
    assert set(HEADS) == set(WRAPPED)
    posterior.history.head = {
        "name": "moments",
        "options": {"link": "mc", "n_draws": 50},
        "criterion": "evidence",
    }
    for value, divergence in ((3.5, 0.009), (dict(posterior.prior_precision), float("inf"))):
        posterior.history.faithful = faithful(value=value, divergence=divergence)
        save(posterior, path)
        loaded = load(path, model).history
        assert loaded.head == posterior.history.head and loaded.faithful == posterior.history.faithful
        found = inspect(path)
        json.dumps(found, allow_nan=False)
        assert found["head"] == posterior.history.head and found["faithful"]["value"] == value
        text = str(found)
        assert (
            "moments (link mc, n_draws 50)" in text and "evidence" in text and "of at most 0.01 nats" in text
        )


def test_files_without_head_and_faithful_prior_load(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    for entry in ("head", "faithful"):
        edit_state(path, lambda state, entry=entry: state["attributes"]["record"].pop(entry))
    history = load(path, model).history
    assert history.head == {} == history.faithful and inspect(path)["head"] == {}


def test_a_faithful_prior_without_settings_loads(saved: tuple[Path, nn.Module, Posterior]) -> None:
    """As files of this format were written first: it is known, and belongs to no settings."""
    path, model, _ = saved

    def forget(state: dict) -> None:
        kept = faithful()
        del kept["settings"]
        state["attributes"]["record"]["faithful"] = kept

    edit_state(path, forget)
    assert load(path, model).history.faithful == faithful(settings={})
    assert inspect(path)["faithful"]["value"] == 3.5


def faithful(**other: object) -> dict[str, object]:
    whole = {"head": "linearized", "value": 3.5, "temperature": 0.8, "network_temperature": 1.1}
    settings = {"residual_weight": 1.0, "noise_scale": 1.0, "scale": 40.0}
    return {**whole, "divergence": 0.009, "budget": 0.01, "settings": settings, **other}


def test_version_1_still_loads(saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    edit_state(
        path, lambda state: (state.pop("centre"), state.pop("features"))
    )  # which that version did not have
    of_version(path, 1)
    loaded = load(path, model)
    assert same_bits(tensors_of(posterior), tensors_of(loaded)) and plain(posterior) == plain(loaded)
    assert inspect(path)["format_version"] == 1 and inspect(path)["centre"] == []


def test_files_without_a_fingerprint_of_the_buffers_load(tmp_path: Path) -> None:
    model, x, path = cnn(), inputs_of(1, 4, 4), tmp_path / "p.h5"
    save(uq.fit(model, [(x, torch.arange(24) % 3)], "inf", progress=False), path)
    digest = inspect(path)["buffers_fingerprint"]
    assert digest == fingerprint(
        {f"body.1.running_{k}": getattr(model.body[1], f"running_{k}") for k in ("mean", "var")}
    )
    with h5py.File(path) as file:
        assert file.attrs["buffers_fingerprint"] == digest
    model.body[1].running_mean += 1
    with pytest.raises(PosteriorMismatchError, match="running statistics"):
        load(path, model)
    edit_state(path, lambda state: state.pop("buffers_fingerprint"))
    edit(path, lambda file: file.attrs.__delitem__("buffers_fingerprint"))
    of_version(path, 7)
    assert load(path, model).buffers_fingerprint is None and inspect(path)["buffers_fingerprint"] is None


@pytest.mark.parametrize("untrusted", [False, True])
def test_another_model(untrusted: bool, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    cases = [
        (make_model(width=5), r"body.50%2F.*\(3, 4\).*\(5, 4\)"),
        (nn.Linear(3, 2), "body.a/b.*lacks"),
        (make_model(seed=1), "are not those that the posterior"),
        (make_model(torch.float64), "are not those that the posterior"),
    ]
    for other, words in cases:
        with pytest.raises(PosteriorMismatchError, match=words):
            load(path, other, untrusted=untrusted)
    next(model.parameters()).data.view(-1)[0] += 1e-6
    with pytest.raises(PosteriorMismatchError, match="are not those that the posterior"):
        load(path, model, untrusted=untrusted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of files were asked for, read by read."""
    found: list[int] = []
    real = userblock.open_regular

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

    monkeypatch.setattr(userblock, "open_regular", Counted)
    return found


def announced(path: Path, kind: str | None, length: int, size: int, version: int = 4) -> None:
    """A sparse file of `size` bytes whose header announces `length`."""
    block = struct.pack("<16sIQ32s16s", userblock.MAGIC, version, length, bytes(32), (kind or "").encode())
    with path.open("wb") as file:
        file.write(block.ljust(userblock.SIZE, b"\0"))
        file.truncate(size)


def test_nothing_is_read_before_the_length_is_checked(tmp_path: Path, reads: list[int]) -> None:
    path, model = tmp_path / "p.h5", nn.Linear(3, 2)
    announced(path, "diag", 5, 2**33)
    for read in (lambda: load(path, model), lambda: load(path, model, untrusted=True), lambda: inspect(path)):
        with pytest.raises(CorruptPosteriorError, match="announces 5"):
            read()
    announced(path, "diag", 2**40, 2**40 + 512)  # as it says, but no posterior of this model is as large
    for untrusted in (False, True):
        with pytest.raises(PosteriorMismatchError, match=r"method='diag'.*another model"):
            load(path, model, untrusted=untrusted)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptPosteriorError, match="not a posterior file"):
        load(path, model)
    assert set(reads) == {512}


@pytest.mark.parametrize("kind", [*KINDS, "function_space", None])
def test_a_file_may_be_as_large_as_its_method_needs(kind: str | None, tmp_path: Path) -> None:
    """60,000 parameters: a dense Fisher of 28 GiB is never fitted, a diagonal is small, KFAC may keep its Grams too; a
    prior may have a mean and, where it can, a precision of each weight.
    """
    model = nn.Sequential(nn.Linear(200, 250), nn.Linear(250, 40))
    numbers = {"diag": 180_870, "kfac": 396_000, "efb": 290_000, "inf": 410_000, "function_space": 410_000}
    most = sizes.size_limit(kind, model)
    assert 8 * numbers.get(kind or "", 2**29) < most < 1.2 * 8 * numbers.get(kind or "", 2**29) + 2**26
    announced(tmp_path / "p.h5", kind, most, most + 512, 3 if kind is None else 4)
    with pytest.raises(PosteriorMismatchError, match="takes at most"):
        load(tmp_path / "p.h5", model)


@pytest.mark.parametrize("case", KINDS)
def test_no_posterior_is_larger_than_its_limit(case: str, tmp_path: Path) -> None:
    for model in (make_model(torch.float64), nn.Sequential(nn.Conv2d(8, 24, 3, groups=4))):
        save(make(case, model, torch.float64), tmp_path / "p.h5", compression="gzip")
        assert (tmp_path / "p.h5").stat().st_size < sizes.size_limit(case, model) - sizes._SPARE + 100_000


def test_the_method_in_the_user_block_is_that_of_the_description(
    saved: tuple[Path, nn.Module, Posterior],
) -> None:
    path, model, _ = saved
    body = path.read_bytes()[512:]
    for kind, words in (("kfac", "says method='kfac'"), ("checkpoint", "unfinished fit"), ("evil", "header")):
        path.write_bytes(userblock.header(body, kind) + body)
        for read in (lambda: load(path, model), lambda: inspect(path)):
            with pytest.raises(CorruptPosteriorError, match=words):
                read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_only_regular_files_are_opened(saved: tuple[Path, nn.Module, Posterior], tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    _, model, posterior = saved
    pipe = tmp_path / "pipe.h5"
    os.mkfifo(pipe)
    calls = [
        lambda: load(pipe, model),
        lambda: load(pipe, model, untrusted=True),
        lambda: inspect(pipe),
        lambda: save(posterior, pipe),
        lambda: Checkpoint(pipe, 1, {}, 2**20, model, {}, {}, torch.float32),
    ]
    for call in calls:
        with pytest.raises(PosthocUQError, match="is not a file"):
            call()
    with pytest.raises(PosthocUQError, match="is not a file"):
        save(posterior, "/dev/null")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["a\0b.h5", "x" * 300, "x" * 251 + ".h5", 7])
def test_paths_that_no_file_can_have(name: Any, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    target = name if isinstance(name, int) else str(path.parent / name)
    calls = [lambda: load(target, model), lambda: inspect(target)]
    if name != "x" * 251 + ".h5":  # a name of 254 bytes is allowed
        calls += [
            lambda: save(posterior, target),
            lambda: Checkpoint(target, 1, {}, 2**20, model, {}, {}, torch.float32),
        ]
    else:
        save(posterior, target)
        assert load(target, model).method == "inf"
        Path(target).unlink()
    for call in calls:
        with pytest.raises(PosthocUQError):
            call()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# Files by a stranger: the header fits, the contents do not

BLOCK = "blocks/body.a%2Fb"


def replace(file: h5py.File, name: str = "diagonal", **options: object) -> None:
    del file[f"{BLOCK}/{name}"]
    file[BLOCK].create_dataset(name, **options)


def external_storage(file: h5py.File) -> None:
    replace(file, shape=(2, 2, 5), dtype="<f4", external=[("/etc/hostname", 0, 80)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((2, 2, 5), "<f4")
    layout[:] = h5py.VirtualSource("/elsewhere.h5", "x", (2, 2, 5))
    del file[f"{BLOCK}/diagonal"]
    file.create_virtual_dataset(f"{BLOCK}/diagonal", layout)


def soft(file: h5py.File) -> None:
    file.move(f"{BLOCK}/diagonal", "blocks/elsewhere")
    file[f"{BLOCK}/diagonal"] = h5py.SoftLink("/blocks/elsewhere")


def external(file: h5py.File) -> None:
    del file[f"{BLOCK}/diagonal"]
    file[f"{BLOCK}/diagonal"] = h5py.ExternalLink("elsewhere.h5", "x")


def linked_state(file: h5py.File) -> None:
    del file["state"]
    file["state"] = h5py.ExternalLink("elsewhere.h5", "x")


def cycle(file: h5py.File) -> None:
    file["blocks/again"] = file["/"]


def variable_state(file: h5py.File) -> None:
    text = file["state"][()].decode()
    del file["state"]
    file["state"] = text


def unallocated(file: h5py.File) -> None:
    replace(file, shape=(2, 2, 5), dtype="<f4")


def values(value: float, name: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[f"{BLOCK}/{name}"][0] = value

    return change


STRANGERS: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "soft link": (soft, "link to elsewhere"),
    "external link": (external, "link to elsewhere"),
    "linked description": (linked_state, "link to elsewhere"),
    "virtual dataset": (virtual, "virtual"),
    "external storage": (external_storage, "another file"),
    "hard link to the root": (cycle, "nested too deeply"),
    "bomb": (
        lambda f: replace(f, shape=(10**6, 10**6), dtype="<f4", compression="gzip", shuffle=True),
        "incomplete",
    ),
    "small bomb": (
        lambda f: replace(f, data=np.zeros((2, 2, 10**6), "<f4"), compression="gzip", shuffle=True),
        "shape",
    ),
    "huge chunks": (
        lambda f: replace(
            f, data=np.zeros((2, 10**6), "<f4"), compression="gzip", shuffle=True, chunks=(2, 10**6)
        ),
        "chunks",
    ),
    "unlimited": (
        lambda f: replace(f, data=np.zeros((2, 2, 5), "<f4"), maxshape=(None, 2, 5)),
        "no fixed shape",
    ),
    "gzip alone": (
        lambda f: replace(f, data=np.zeros((2, 2, 5), "<f4"), compression="gzip"),
        "shuffle and gzip",
    ),
    "lzf": (lambda f: replace(f, data=np.zeros((2, 2, 5), "<f4"), compression="lzf"), "shuffle and gzip"),
    "checksum filter": (
        lambda f: replace(f, data=np.zeros((2, 2, 5), "<f4"), fletcher32=True),
        "shuffle and gzip",
    ),
    "wrong dtype": (lambda f: replace(f, data=np.zeros((2, 2, 5), "<f8")), "type <f8"),
    "big endian": (lambda f: replace(f, data=np.zeros((2, 2, 5), ">f4")), "of a type"),
    "strings": (lambda f: replace(f, data=["a"] * 20), "of a type"),
    "compound": (lambda f: replace(f, data=np.zeros((2, 2, 5), "f4,f4")), "of a type"),
    "enumeration": (
        lambda f: replace(f, shape=(2, 2, 5), dtype=h5py.enum_dtype({"a": 1}, basetype="<u2")),
        "of a type",
    ),
    "references": (lambda f: replace(f, shape=(2, 2, 5), dtype=h5py.ref_dtype), "of a type"),
    "empty": (lambda f: replace(f, data=h5py.Empty("<f4")), "no fixed shape"),
    "unallocated": (unallocated, "incomplete"),
    "wrong shape": (lambda f: replace(f, data=np.zeros((2, 2, 4), "<f4")), "shape"),
    "missing dataset": (lambda f: f[BLOCK].__delitem__("diagonal"), "lacks the dataset"),
    "missing block": (lambda f: f.__delitem__(BLOCK), "groups are not those"),
    "extra dataset": (lambda f: f[BLOCK].create_dataset("more", data=np.ones(3, "<f4")), "no block has"),
    "extra group": (lambda f: f.create_group("blocks/more"), "groups are not those"),
    "named type": (lambda f: f.__setitem__("blocks/type", np.dtype("<f4")), "neither"),
    "variable string": (variable_state, "one string"),
    "NaN": (values(float("nan"), "input_basis"), "NaN"),
    "infinity": (values(float("inf"), "eigenvalues"), "NaN or infinity"),
    "negative": (values(-1.0, "diagonal"), "negative"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_a_stranger_may_write(case: str, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    change, words = STRANGERS[case]
    edit(path, change)
    with pytest.raises(CorruptPosteriorError, match=words):
        load(path, model)


@pytest.mark.parametrize("case", ["bomb", "external link", "virtual dataset", "NaN", "external storage"])
def test_the_child_refuses_the_same(case: str, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    change, words = STRANGERS[case]
    edit(path, change)
    with pytest.raises(CorruptPosteriorError, match=words):
        load(path, model, untrusted=True)


def test_a_deflate_bomb_is_stopped_by_the_memory_limit(
    saved: tuple[Path, nn.Module, Posterior], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk that claims 80 bytes and inflates to 384 MiB of zeros; libhdf5 itself would not mind. Versions
    before 2.0 keep no length above 64 KiB for such a chunk, so that they can make no such file.
    """
    path, model, _ = saved
    blocks, packer = 24, zlib.compressobj(9)
    begin = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">HH", blocks * 2**24 % 65521, 1)
    packed = begin + (blocks - 1) * again + b"\x01\x00\x00\xff\xff" + checksum

    def change(file: h5py.File) -> None:
        replace(file, shape=(2, 2, 5), dtype="<f4", compression="gzip", shuffle=True, chunks=(2, 2, 5))
        file[f"{BLOCK}/diagonal"].id.write_direct_chunk((0, 0, 0), packed)

    try:
        edit(path, change)
    except OSError as error:
        if "can't be encoded" not in str(error):
            raise
        pytest.skip(f"libhdf5 {h5py.version.hdf5_version} cannot write a chunk that inflates that far")
    monkeypatch.setattr(sandbox, "_MEMORY", 2**32)
    assert not bool(load(path, model, untrusted=True).blocks["body.a/b"].tensors()["diagonal"].any())
    monkeypatch.setattr(sandbox, "_MEMORY", 2**29)
    with pytest.raises(CorruptPosteriorError, match="diagonal"):
        load(path, model, untrusted=True)


def put(*keys: object, value: object) -> Callable[[dict], None]:
    def change(state: dict) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


REFERRAL = {
    "scores": {
        "entropy": {"threshold": 0.5, "quantiles": [2.0, 0.5, 0.1]},
        "mutual_information": {"threshold": 0.25, "quantiles": [0.25, 0.25, 0.0]},
    },
    "shares": [1 / 3, 2 / 3, 1.0],
    "rate": 0.4,
    "inputs": 3,
    "head": {"head": "sampling"},
    "posterior": {"scale": 1.0},
}


@pytest.mark.parametrize(
    "kept",
    [REFERRAL, {}],
    ids=["scores", "none"],
)
def test_a_referral_in_a_file_is_read_as_it_was(
    kept: dict[str, Any], saved: tuple[Path, nn.Module, Posterior]
) -> None:
    path, model, _ = saved
    edit_state(path, put("attributes", "record", "referral", value=kept))
    assert load(path, model).history.referral == kept == inspect(path)["referral"]
    save(load(path, model), path)
    assert load(path, model).history.referral == kept


def referral(*keys: str, value: object, base: dict[str, Any] = REFERRAL) -> Callable[[dict], None]:
    """A file's description whose referral has one value changed, or without it where that is None."""

    def change(state: dict) -> None:
        kept = json.loads(json.dumps(base))
        place = kept
        for key in keys[:-1]:
            place = place[key]
        if value is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value
        state["attributes"]["record"]["referral"] = kept

    return change


REFERRALS: dict[str, Callable[[dict], None]] = {
    "rate 2.5": referral("rate", value=2.5),
    "rate NaN": referral("rate", value=float("nan")),
    "rate below 0": referral("rate", value=-0.1),
    "rate a text": referral("rate", value="often"),
    "no rate": referral("rate", value=None),
    "threshold NaN": referral("scores", "entropy", "threshold", value=float("nan")),
    "threshold infinite": referral("scores", "entropy", "threshold", value=float("inf")),
    "threshold of no input": referral("scores", "entropy", "threshold", value=2.5),
    "no threshold": referral("scores", "entropy", "threshold", value=None),
    "quantiles unsorted": referral("scores", "entropy", "quantiles", value=[2.0, 0.1, 0.5]),
    "quantiles ascending": referral("scores", "entropy", "quantiles", value=[0.1, 0.5, 2.0]),
    "quantile NaN": referral("scores", "entropy", "quantiles", value=[2.0, float("nan"), 0.1]),
    "quantile infinite": referral("scores", "entropy", "quantiles", value=[float("inf"), 0.5, 0.1]),
    "quantiles too far apart": referral("scores", "entropy", "quantiles", value=[1.7e308, 0.5, -1.7e308]),
    "quantile a list": referral("scores", "entropy", "quantiles", value=[2.0, [0.5], 0.1]),
    "quantile huge": referral("scores", "entropy", "quantiles", value=[10**400, 0.5, 0.1]),
    "too few quantiles": referral("scores", "entropy", "quantiles", value=[2.0, 0.1]),
    "too many quantiles": referral("scores", "entropy", "quantiles", value=[2.0, 0.5, 0.5, 0.1]),
    "quantiles a text": referral("scores", "entropy", "quantiles", value="210"),
    "no quantiles": referral("scores", "entropy", "quantiles", value=None),
    "shares unsorted": referral("shares", value=[2 / 3, 1 / 3, 1.0]),
    "shares equal": referral("shares", value=[1 / 3, 1 / 3, 1.0]),
    "shares from 0": referral("shares", value=[0.0, 0.5, 1.0]),
    "shares beyond 1": referral("shares", value=[0.5, 1.0, 1.5]),
    "shares below 1": referral("shares", value=[0.3, 0.5, 0.9]),
    "share NaN": referral("shares", value=[1 / 3, float("nan"), 1.0]),
    "too few shares": referral("shares", value=[0.5, 1.0]),
    "no shares": referral("shares", value=None),
    "no scores": referral("scores", value={}),
    "scores a list": referral("scores", value=["entropy"]),
    "score a number": referral("scores", "entropy", value=3),
    "unknown score": referral("scores", "magic", value=REFERRAL["scores"]["entropy"]),
    "no inputs": referral("inputs", value=0),
    "other inputs": referral("inputs", value=5),
    "infinite inputs": referral("inputs", value=float("inf")),
    "head a text": referral("head", value="sampling"),
}


@pytest.mark.parametrize("case", REFERRALS)
def test_referrals_that_cannot_be(case: str, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved
    edit_state(path, REFERRALS[case])
    with pytest.raises(CorruptPosteriorError, match="cannot be loaded"):
        load(path, model)
    if case in ("rate 2.5", "quantiles unsorted", "unknown score", "single: threshold NaN"):
        with pytest.raises(CorruptPosteriorError, match="cannot be loaded"):
            inspect(path)


DESCRIPTIONS: dict[str, Callable[[dict], None]] = {
    "no attributes": put("attributes", value=None),
    "no layers": put("layers", value={}),
    "layers a list": put("layers", value=[1]),
    "blocks a list": put("blocks", value=[1]),
    "block a number": put("blocks", "body.a/b", value=3),
    "unknown kind": put("blocks", "body.a/b", "kind", value="magic"),
    "kind a list": put("blocks", "body.a/b", "kind", value=[]),
    "members a dict": put("blocks", "body.a/b", "members", value={"x": 1}),
    "members of members": put("blocks", "body.a/b", "members", value=[["body.a/b"]]),
    "too many directions": put("blocks", "body.a/b", "attributes", "input_directions", value=10**9),
    "unknown correction": put("blocks", "body.a/b", "attributes", "correction", value="magic"),
    "unknown dtype": put("blocks", "body.a/b", "dtypes", "diagonal", value="int8"),
    "no dtypes": put("blocks", "body.a/b", "dtypes", value={}),
    "negative groups": put("layers", "body.a/b", "groups", value=-2),
    "other groups": put("layers", "body.a/b", "groups", value=4),
    "other inputs": put("layers", "body.a/b", "inputs", value=6),
    "weight shape a text": put("layers", "body.a/b", "weight_shape", value="abcd"),
    "infinite groups": put("layers", "body.a/b", "groups", value=float("inf")),
    "scale negative": put("attributes", "scale", value=-1),
    "scale a text": put("attributes", "scale", value="x"),
    "prior of other layers": put("attributes", "prior_precision", value={"x": 1.0}),
    "residual weight": put("attributes", "residual_weight", value=2),
    "likelihood": put("attributes", "likelihood", value={"name": "magic"}),
    "noise": put("attributes", "likelihood", value={"name": "regression", "noise_variance": [[1.0], 2.0]}),
    "evidence": put("attributes", "evidence", value={}),
    "infinite evidence": put("attributes", "evidence", "samples", value=float("inf")),
    "record": put("attributes", "record", value=[]),
    "head unknown": put("attributes", "record", "head", "name", value="magic"),
    "head a list": put("attributes", "record", "head", "name", value=["linearized"]),
    "head without options": put("attributes", "record", "head", value={"name": "linearized"}),
    "head's option a list": put("attributes", "record", "head", "options", value={"n_draws": [1]}),
    "head's option infinite": put("attributes", "record", "head", "options", value={"n_draws": float("inf")}),
    "criterion unknown": put("attributes", "record", "head", "criterion", value="magic"),
    "faithful negative": put("attributes", "record", "faithful", "value", value=-1.0),
    "faithful of other layers": put("attributes", "record", "faithful", "value", value={"x": 1.0}),
    "faithful without budget": put(
        "attributes", "record", "faithful", value={"head": "sampling", "value": 1.0}
    ),
    "faithful temperature": put("attributes", "record", "faithful", "temperature", value=0),
    "faithful divergence": put("attributes", "record", "faithful", "divergence", value=float("nan")),
    "faithful head": put("attributes", "record", "faithful", "head", value="magic"),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_descriptions_that_do_not_hold(case: str, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, posterior = saved
    posterior.history.head = {"name": "linearized", "options": {}, "criterion": "faithful"}
    posterior.history.faithful = faithful()
    save(posterior, path)
    edit_state(path, DESCRIPTIONS[case])
    with pytest.raises(CorruptPosteriorError):
        load(path, model)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"[]", b"\xff\xfe", b"{}", b"9" * 10_000])
def test_descriptions_that_are_none(text: bytes, saved: tuple[Path, nn.Module, Posterior]) -> None:
    path, model, _ = saved

    def change(file: h5py.File) -> None:
        del file["state"]
        file.create_dataset("state", data=np.bytes_(text))

    edit(path, change)
    with pytest.raises(CorruptPosteriorError, match="description"):
        load(path, model)


def test_a_posterior_is_not_larger_than_its_numbers(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    posterior = make("diag", model)
    save(posterior, tmp_path / "p.h5")
    numbers = sum(prod(tensor.shape) * 4 for tensor in tensors_of(posterior).values())
    assert (tmp_path / "p.h5").stat().st_size < numbers + 20_000


def test_a_large_file_is_in_memory_once(tmp_path: Path) -> None:
    body, path = b"\x89HDF\r\n\x1a\n" + bytes(2**24), tmp_path / "large.h5"
    path.write_bytes(userblock.header(body, "diag") + body)
    tracemalloc.start()
    try:
        data, header = userblock.read(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert header.length == len(body) and data[userblock.SIZE :] == body
    assert most < 1.1 * len(body)
