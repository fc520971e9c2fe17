"""The command line as a whole: help, errors in one line, exit codes, files that are whole or absent."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import click
import h5py
import pytest
import torch
from cli_helpers import failure, invoke, make_images, make_place, run, run_json
from PIL import Image

import posthoc_uq as uq
from posthoc_uq.cli.console import Command, plain, sentence
from posthoc_uq.cli.entry import commands
from posthoc_uq.fitting.prior import DIVERGENCE

COMMANDS = ("fit", "tune", "predict", "evaluate", "inspect", "demo")
PACKAGE = Path(uq.__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a model and its posterior in a file."""
    folder = make_place(tmp_path_factory.mktemp("cli"))
    run(
        "fit",
        folder / "train",
        *_model(folder),
        "-o",
        folder / "m.h5",
        "--prior-precision",
        5,
        "--workers",
        0,
    )
    return folder


def _model(place: Path, weights: str = "w.pt") -> list[str]:
    return ["--model", f"{place / 'nets.py'}:net", "--weights", str(place / weights)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    text = run(name, "--help").stdout
    assert "Examples:" in text and f"posthoc-uq {name}" in text
    assert all(option in text for option in ("--json", "--quiet", "--debug"))


def test_the_budget_in_the_help_is_the_librarys() -> None:
    for name, words in (("fit", f"[{DIVERGENCE:g}]"), ("tune", f"by default {DIVERGENCE:g} for faithful")):
        assert words in " ".join(run(name, "--help").stdout.split())


def test_the_group_lists_the_commands_in_order() -> None:
    text = run("--help").stdout
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert run("--version").stdout.strip() == f"posthoc-uq {uq.__version__}"


def test_help_imports_nothing_heavy() -> None:
    # The package's own __init__ is left out: what counts here is what the commands add to it.
    code = (
        "import sys, types; package = types.ModuleType('posthoc_uq'); package.__path__ = [sys.argv[1]];"
        "sys.modules['posthoc_uq'] = package; from posthoc_uq.cli.entry import commands;"
        "[commands.main([*name, '--help'], standalone_mode=False) for name in ([], ['inspect'], ['demo'])];"
        "print([name for name in ('torch', 'numpy', 'timm', 'h5py', 'PIL') if name in sys.modules]);"
        # These ask the library for what it has; packages for images and models are still left alone.
        "[commands.main([name, '--help'], standalone_mode=False) for name in ('fit', 'predict', 'tune')];"
        "print([name for name in ('timm', 'torchvision', 'PIL', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PACKAGE)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == ["[]", "[]"]


def test_python_m_runs_it_without_a_traceback(place: Path) -> None:
    def call(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "posthoc_uq", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=180)

    done = call("inspect", place / "m.h5", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["method"] == "inf"
    done = call("inspect", place / "nothing.h5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: There is no file '{place / 'nothing.h5'}'.\n"


def test_wrong_usage_is_one_line_that_names_the_help() -> None:
    said = run("fit", "x", "--model", "timm:resnet18", code=2).stderr
    assert said == "Error: Missing option '--output' / '-o' (see posthoc-uq fit --help).\n"
    said = run("tune", "m.h5", "--model", "timm:resnet18", "--no-search", code=2).stderr  # not of click's own
    assert said.startswith("Error: --no-search leaves nothing") and "(see posthoc-uq tune --help).\n" in said
    said = run("tune", "m.h5", "--model", code=2).stderr  # of the parser, before there is a context
    assert said == "Error: Option '--model' requires an argument (see posthoc-uq tune --help).\n"
    assert run("--colour", code=2).stderr.endswith("(see posthoc-uq --help).\n")
    wrong = invoke(commands)  # which shows the help, in whole
    said = wrong.stdout + wrong.stderr
    assert wrong.exit_code in (0, 2)  # before click 8.2, and since
    assert "Commands:" in said and "Error" not in said


def test_wrong_usage_ends_with_2(place: Path) -> None:
    assert "No such command" in run("fitt", code=2).stderr
    assert "Missing option '--output'" in run("fit", "x", "--model", "timm:resnet18", code=2).stderr
    assert "No such option" in run("inspect", "x", "--colour", code=2).stderr
    file = place / "m.h5"
    for options, words in (
        (["--referral-rate", "0.1"], "need held-out data"),
        (["--no-search"], "leaves nothing to do"),
        (["--referral-score", "entropy"], "belongs to --referral-rate"),
        (["--referral-score", "entropy,entropy"], "is not a score, nor different scores"),
        (["--referral-score", "entropy,"], "is not a score, nor different scores"),
        (["--mean", "a,b"], "is not numbers"),
        (["--head-option", "keep"], "NAME=VALUE"),
    ):
        assert words in run("tune", file, *_model(place), *options, code=2).stderr
    nameless = run("evaluate", file, "x", *_model(place), "--ood", "textures", code=2).stderr
    assert "'textures' is not of the form NAME=DATA" in nameless
    same = ["--ood", "a=x", "--ood", "a=y"]
    assert "a name of its own" in run("evaluate", file, "x", *_model(place), *same, code=2).stderr
    assert (
        "nor 'evidence'"
        in run("fit", "x", *_model(place), "-o", "y", "--prior-precision", "z", code=2).stderr
    )


# What every command on data says where something is wrong.


def _commands(place: Path, data: Any, model: list[str], file: str = "m.h5") -> dict[str, list[Any]]:
    return {
        "fit": ["fit", data, *model, "-o", place / "new.h5", "--workers", 0],
        "tune": ["tune", place / file, "--data", data, *model, "-o", place / "new.h5", "--workers", 0],
        "predict": ["predict", place / file, data, *model, "-o", place / "new.csv", "--workers", 0],
        "evaluate": ["evaluate", place / file, data, *model, "--csv", place / "new.csv", "--workers", 0],
    }


@pytest.mark.parametrize("name", ["fit", "tune", "predict", "evaluate"])
class TestEveryCommandOnData:
    def test_a_wrong_path(self, place: Path, name: str) -> None:
        said = failure(*_commands(place, place / "nowhere", _model(place))[name])
        assert f"There is no folder '{place / 'nowhere'}'" in said

    def test_an_empty_folder(self, place: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / "notes.txt").write_text("no image")
        said = failure(*_commands(place, tmp_path, _model(place))[name])
        assert f"There are no images in the folder '{tmp_path}'" in said

    def test_an_unreadable_image(self, place: Path, tmp_path: Path, name: str) -> None:
        make_images(tmp_path, ("cat", "dog", "emu"), 2, 0)
        bad = tmp_path / "dog" / "0.png"
        bad.write_bytes(bad.read_bytes()[:90])
        said = failure(*_commands(place, tmp_path, _model(place))[name])
        assert f"Unreadable image '{bad}'" in said
        bad.write_bytes(b"this is no image")
        said = failure(*_commands(place, tmp_path, _model(place))[name])
        assert (
            f"Unreadable image '{bad}': not in an image format that is read: BMP, JPEG, PNG, PPM, TIFF, WEBP."
            in said
        )
        assert not list(place.glob("*new*")), "no half-written file"

    def test_a_model_name_with_a_typo(self, place: Path, name: str) -> None:
        for model, close in (("timm:resnt18", "resnet18"), ("torchvision:resnet81", "resnet18")):
            options = ["--model", model, "--weights", str(place / "w.pt")]
            said = failure(*_commands(place, place / "val", options)[name])
            assert f"'{model.split(':')[1]}'. Did you mean " in said and close in said

    def test_a_model_without_weights(self, place: Path, name: str) -> None:
        said = failure(*_commands(place, place / "val", ["--model", "timm:test_resnet"])[name])
        assert "random weights; give --weights FILE" in said

    def test_a_wrong_number_of_classes(self, place: Path, tmp_path: Path, name: str) -> None:
        make_images(tmp_path, ("a", "b", "c", "d"), 1, 0)
        if name == "predict":  # which asks for no labels, but must name its outputs
            (tmp_path / "names.txt").write_text("a\nb\n")
            arguments = [
                *_commands(place, tmp_path, _model(place))[name],
                "--class-names",
                tmp_path / "names.txt",
            ]
            assert "There are 2 class names, and the model has 3 outputs." in failure(*arguments)
            assert not (place / "new.csv").exists()
            return
        said = failure(*_commands(place, tmp_path, _model(place))[name])
        assert "has 4 class folders, more than the model's 3 outputs" in said
        (tmp_path / "few").mkdir()
        make_images(tmp_path / "few", ("a", "b"), 1, 0)
        said = failure(*_commands(place, tmp_path / "few", _model(place))[name])
        assert (
            "has 2 class folders and the model 3 outputs; say which is which with --class-map FILE." in said
        )


@pytest.mark.parametrize("name", ["tune", "predict", "evaluate"])
class TestEveryCommandOnAPosterior:
    def test_another_model(self, place: Path, name: str) -> None:
        torch.save({k: v + 1 for k, v in torch.load(place / "w.pt").items()}, place / "other.pt")
        said = failure(*_commands(place, place / "val", _model(place, "other.pt"))[name])
        assert "not those that the posterior in" in said
        said = failure(*_commands(place, place / "val", ["--model", f"{place / 'nets.py'}:line"])[name])
        assert "does not belong to this model" in said

    def test_no_posterior_file(self, place: Path, name: str) -> None:
        assert "does not exist" in failure(*_commands(place, place / "val", _model(place), "gone.h5")[name])
        said = failure(*_commands(place, place / "val", _model(place), "w.pt")[name])
        assert "not a posterior file" in said
        said = failure(*_commands(place, place / "val", _model(place), "val")[name])
        assert "is a folder, not a posterior file" in said


def test_an_output_that_cannot_be_written_is_found_before_the_work(place: Path) -> None:
    for arguments in _commands(place, place / "val", _model(place)).values():
        at = next(i for i, value in enumerate(arguments) if value in ("-o", "--csv")) + 1
        changed = [*arguments[:at], place / "no" / "such" / "file", *arguments[at + 1 :]]
        assert "does not exist; make it first" in failure(*changed)
    said = failure("predict", place / "m.h5", place / "val", *_model(place), "-o", place / "val")
    assert "is a folder; give the name of a file in it" in said


def test_debug_shows_the_traceback(place: Path) -> None:
    result = invoke(commands, "inspect", place / "gone.h5", "--debug")
    assert result.exit_code == 1 and isinstance(result.exception, uq.PosthocUQError)
    command = [sys.executable, "-m", "posthoc_uq", "inspect", str(place / "gone.h5"), "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "Traceback" in done.stderr and "There is no file" in done.stderr


def test_errors_of_any_kind_are_one_line() -> None:
    assert sentence(uq.PosthocUQError("one\n  two")) == "one two"
    assert sentence(FileNotFoundError(2, "No such file", "x.txt")) == "'x.txt': No such file."
    assert sentence(ValueError("a\nb")) == "ValueError: a b (--debug shows where.)"
    wrapped = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (...):\nKeyError: 7"
    assert sentence(RuntimeError(wrapped)) == "KeyError: 7"
    assert len(sentence(ValueError("x" * 5000))) < 700
    assert plain({"a": (1.0, float("nan")), "b": Path("c"), 1: None}) == {
        "a": [1.0, None],
        "b": "c",
        "1": None,
    }


def _invoke(work: Any) -> Any:
    return invoke(Command("work", callback=lambda as_json: work()))


def test_warnings_are_single_lines() -> None:
    before = warnings.showwarning
    result = _invoke(lambda: warnings.warn("one\ntwo", UserWarning, stacklevel=1))
    assert (result.exit_code, result.stderr) == (0, "Warning: one two\n")
    assert warnings.showwarning is before


def test_an_interruption_ends_with_130() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    result = _invoke(interrupt)
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")

    def wrong() -> None:
        raise click.UsageError("so not")

    assert _invoke(wrong).exit_code == 2


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_an_interrupted_prediction_leaves_no_file(place: Path, tmp_path: Path) -> None:
    code = place / "slow.py"
    code.write_text(
        "import time, torch\nfrom nets import net as fast\n\n\ndef net():\n    return fast()\n\n\n"
        "def slow(image):\n    time.sleep(20)\n    return torch.zeros(3, 12, 12)\n"
    )
    model = ["--model", f"{code}:net", "--weights", str(place / "w.pt"), "--transform", f"{code}:slow"]
    arguments = [place / "m.h5", place / "train", *model, "-o", tmp_path / "out.csv", "--batch-size", 1]
    command = [sys.executable, "-m", "posthoc_uq", "predict", *map(str, arguments), "--workers", "0"]

    def heed_interrupts() -> None:  # which a shell takes from what it runs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    deadline = time.monotonic() + 120
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()), "the temporary file is there while it runs"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 130 and said.splitlines()[-1] == "Interrupted."
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_a_file_without_its_model(place: Path) -> None:
    text = run("inspect", place / "m.h5").stdout
    for words in (
        "method",
        "inf",
        "prior precision",
        "fingerprint",
        "0  ",
        "conv2d",
        "4x3x3x3",
        "linear",
        "3x16",
    ):
        assert words in text
    found = run_json("inspect", place / "m.h5")
    posterior = uq.inspect(place / "m.h5")
    assert found == json.loads(json.dumps(posterior))
    # printed in Python it reads the same, and is a dictionary still, in copies too
    assert str(posterior) == text.rstrip("\n") and f"{place / 'm.h5'}, " in str(posterior)
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert isinstance(other, dict) and other == posterior and str(other) == str(posterior)
    assert repr(posterior) == repr(dict(posterior))
    for block in posterior["blocks"].values():
        assert f"{block['bytes']}" in text
    assert found["fingerprint"] in text


def test_inspect_names_the_settings_of_the_referrals_head(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.h5"
    options = ["--data", place / "val", "--no-search", "--referral-rate", 0.2, "-o", file, "--workers", 0]
    run("tune", place / "m.h5", *_model(place), *options, "--head", "sampling", "--n-samples", 6)
    text = run("inspect", file).stdout
    assert "18 inputs), head sampling (n_samples 6, antithetic no, dtype own)" in text
    run("tune", place / "m.h5", *_model(place), *options, "--head", "moments", "--force")
    text = run("inspect", file).stdout
    assert "head moments (link mc, " in text and "relu unscented, " in text and "calibrated no)" in text


def test_inspect_refuses_what_is_no_posterior(place: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1, 2]
    assert "an HDF5 file that posthoc_uq did not write" in failure("inspect", tmp_path / "a.h5")
    Image.new("L", (40, 40)).save(tmp_path / "a.png")
    assert "not a posterior file" in failure("inspect", tmp_path / "a.png")
    damaged = bytearray((place / "m.h5").read_bytes())
    damaged[2000] ^= 1
    (tmp_path / "b.h5").write_bytes(damaged)
    assert "is damaged" in failure("inspect", tmp_path / "b.h5")


def test_the_demo_names_the_packages_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from posthoc_uq.cli import demo

    monkeypatch.setattr(demo, "NEEDED", {"no_such_module_at_all": "some-package"})
    assert "The demo needs some-package: pip install 'posthoc-uq[demo]'." in failure("demo")


def test_the_demo_is_run_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from posthoc_uq.cli import demo

    called: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        called.append(arguments)
        print("a table", flush=True)  # click's runner before 8.2 does not flush standard error
        (tmp_path / "picture.png").write_bytes(b"")
        return 0

    monkeypatch.setattr(demo, "main", main)
    monkeypatch.setattr(demo, "NEEDED", {})
    options = ["--output", tmp_path, "--seed", 3]
    assert run("demo", *options).stdout == "a table\n"
    assert "is not empty" in failure("demo", *options)
    result = run("demo", *options, "--force", "--json")
    assert json.loads(result.stdout)["files"] == [str(tmp_path / "picture.png")]
    assert result.stderr == "a table\n"
    assert called == [["--output", str(tmp_path), "--seed", "3"]] * 2
