"""The command line as a whole: options, help, errors in one line, exit codes; what the commands do, beside the same
work done by hand; and files that are whole or absent, and never written over by mistake.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass
from hashlib import sha256
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, Literal, Optional

import numpy as np
import pytest
import torch
import yaml
from cli_helpers import (
    CLASSES,
    NETS,
    failure,
    make_images,
    make_place,
    misuse,
    net,
    run,
    run_json,
    tensors,
    words_of,
)
from PIL import Image
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.app import main
from posthoc_uq.app.cli import commands
from posthoc_uq.app.cli.main import COMMANDS, plain, sentence
from posthoc_uq.app.cli.options import Choice, Console, Read
from posthoc_uq.app.cli.outputs import role_of
from posthoc_uq.app.cli.parser import Command, kinds_of, options_of
from posthoc_uq.files import atomic, save_load
from posthoc_uq.files.hdf5 import ImageReader
from posthoc_uq.heads import HEADS
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import FAMILIES, Block, DiagonalBlock

RANK = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a trained model and, in ``m.h5``, its posterior."""
    folder = make_place(tmp_path_factory.mktemp("cli"))
    fit(folder, "m.h5")
    return folder


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Path:
    """The posterior's file, to be changed."""
    (tmp_path / "m.h5").write_bytes((place / "m.h5").read_bytes())
    return tmp_path / "m.h5"


def model_options(place: Path, weights: str = "w.pt") -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:net", "--weights", place / weights, "--workers 0"]


def fit(place: Path, name: str, *options: Any, data: str = "train") -> dict[str, Any]:
    common = ["--method inf --rank", RANK, "--prior-precision 5.0 -o", place / name]
    return run_json("fit", place / data, *model_options(place), *common, *options)


def trained(place: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(place / "w.pt"))
    return model.eval()


def loader(place: Path, name: str, size: int = 32) -> list[Any]:
    x, y = tensors(place / name)
    return list(zip(x.split(size), y.split(size), strict=True))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def flat(place: Path) -> torch.Tensor:
    """The images without classes, as the model gets them."""
    arrays = [
        np.asarray(Image.open(path)).astype(np.float32) / 255 for path in sorted((place / "flat").iterdir())
    ]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def assert_same_posterior(found: uq.Posterior, expected: uq.Posterior, tolerance: float = 0.0) -> None:
    assert found.blocks.keys() == expected.blocks.keys()
    for name, block in expected.blocks.items():
        difference = (found.blocks[name].dense() - block.dense()).norm() / block.dense().norm()
        assert float(difference) <= tolerance


def said(*arguments: Any) -> str:
    """A help text in one line."""
    return " ".join(run(*arguments, "--help").stdout.split())


# Options: what is typed, and what a command gets.


def parsed(name: str, *words: Any) -> dict[str, Any]:
    """What a command's function would be called with."""
    texts = words_of(words)
    return Command(getattr(commands, name), texts).parse(texts)


@dataclass(frozen=True, kw_only=True)
class Stretched(uq.Diagonal):
    """A diagonal of another size.

    Attributes:
        stretch: by which the diagonal is multiplied.
        weights: a number whose name is that of an option of the model.
        size: ``"small"`` or ``"large"``.
        listeners: told of nothing; no text can be given for them.
    """

    name: ClassVar[str] = "stretched"

    stretch: float = 1.0
    weights: int | None = None
    size: Literal["small", "large"] = "small"
    even: bool = False
    listeners: dict[str, Any] | None = None

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


def test_a_method_that_is_registered_later_is_known_with_its_options(
    place: Path, tmp_path: Path, stretched: None
) -> None:
    text = said("fit", "--method stretched")
    assert "stretched: A diagonal of another size" in text and "listeners" not in text
    assert "--method.stretch STRETCH by which the diagonal is multiplied (1.0 by default)" in text
    assert "--method.size {small,large} small or large" in text
    data = ["fit", place / "val", *model_options(place), "--prior-precision 5 --force -o"]
    run(*data, tmp_path / "plain.h5", "--method diag")
    options = ["--stretch 1.5 --method.weights 2 --size large --even"]
    run(*data, tmp_path / "wide.h5", "--method Stretched", *options)
    wide, thin = (uq.load(tmp_path / name, trained(place)) for name in ("wide.h5", "plain.h5"))
    assert wide.method == "stretched"

    def diagonal(posterior: uq.Posterior) -> Tensor:
        return torch.cat([block.diagonal.flatten() for block in posterior.blocks.values()])  # type: ignore[attr-defined]

    torch.testing.assert_close(diagonal(wide), 60 * diagonal(thin))
    refused = misuse(*data, tmp_path / "x.h5", "--method diag --stretch 2")
    assert "--stretch is for the method stretched (--method stretched), and this is diag" in refused
    assert "'huge' is not small or large" in misuse(*data, "x.h5", "--method stretched --size huge")


@pytest.mark.parametrize("word", ["method", "likelihood", "head"])
def test_the_help_has_every_kind_with_every_option_and_its_words(word: str) -> None:
    command = "predict" if word == "head" else "fit"
    objects = {"optimizer", "schedule", "mask", "bases"}  # what only Python can make
    for name, kind in kinds_of(word).items():
        text = said(command, f"--{word}", name)
        first_words = " ".join(str(kind.__doc__).replace("`", "").split()[:3])
        assert first_words and f"{word} {name}: {first_words}" in text
        options = {option.name: option for option in options_of(kind)}
        assert not objects & options.keys() and "generator" not in options and "model" not in options
        for option in options.values():
            assert option.text, (name, option.name)
            assert option.name == "seed" or f"--{word}.{option.name}".replace("_", "-") in text
    assert commands.HeadName.__args__ == tuple(HEADS)


def test_a_type_that_is_not_there_is_said() -> None:
    @dataclass
    class Example:
        known: int = 3
        unknown: Missing = None  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(uq.PosthocUQError, match="Missing"):
        options_of(Example)


def test_words_become_values() -> None:
    call = parsed("fit", "x", "-o", "y", "--mean 0.5,0.4 --std=[0.1,0.2] --download --target a --target=b,c")
    assert call["data"] == "x" and call["output"] == "y" and call["method"] == Choice("method", "inf", {})
    assert (call["source"].mean, call["source"].std) == ([0.5, 0.4], [0.1, 0.2])
    assert call["reading"].target == ["a", "b,c"] and call["reading"].download and not call["force"]
    assert parsed("fit", "x", "-o", "y", "--target", '["a,b", "3"]')["reading"].target == ["a,b", "3"]
    for text, names in (
        ("[02]", ["[02]"]),
        ("[2]", ["[2]"]),
        ("[a]*,b", ["[a]*", "b"]),
        ('["a,b", "c"]', ["a,b", "c"]),
    ):
        assert parsed("fit", "x", "-o", "y", "--layers", text)["layers"] == names

    def method(*words: Any) -> Any:
        choice = parsed("fit", "x", "-o", "y", *words)["method"]
        return choice.make(METHODS[choice.name])

    assert method("--rank 0.5 --basis exact") == uq.INF(rank=0.5, basis="exact")
    assert method("--method INF --method.rank 7") == method("--method.name=inf --rank=7") == uq.INF(rank=7)
    expected = uq.KFAC(fisher="mc", n_samples=2, dtype=torch.float64)
    assert method("--method kfac --fisher mc --n-samples 2 --dtype torch.float64") == expected
    trained_ = method("--method function_space --no-train-mean --clip none --function-noise 1e-3")
    assert trained_ == uq.FunctionSpace(train_mean=False, clip=None, function_noise=1e-3)
    call = parsed("fit", "x", "-o", "y", "--likelihood ordinal --thresholds -1,0.5,2")
    assert call["likelihood"].options == {"thresholds": [-1.0, 0.5, 2.0]}
    call = parsed("tune", "f", "--no-temperature --noise true --parameters none")
    assert (call["temperature"], call["noise"], call["parameters"]) == (False, True, ["none"])
    call = parsed("predict", "f", "x", "-o", "y", "--outputs 2 --batched false --head.n-samples 9")
    assert call["head"] == Choice("head", None, {"outputs": 2, "batched": False, "n_samples": 9})


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("fitt", "Did you mean 'fit'"),
        ("--colour", "--colour"),
        ("fit x", "--output must be given"),
        ("fit -o y", "data must be given"),
        ("fit x z -o y", "z"),
        ("fit x -o y --model", "--model needs a value"),
        ("fit x -o y --rnak 3", "Did you mean '--rank'"),
        ("fit x -o y --method imf", "Did you mean 'inf'"),
        ("fit x -o y --likelihood poison", "Did you mean 'poisson'"),
        ("fit x -o y --likelihood gamma --dispersion 2", "likelihood negative_binomial"),
        (
            "fit x -o y --method diag --rank 3",
            "--rank is for the method inf (--method inf), and this is diag",
        ),
        ("fit x -o y --rank z", "--method.rank: 'z' is not a number"),
        ("fit x -o y --rank -1", "--method.rank must be"),
        ("fit x -o y --basis-fraction 7 --rank 3", "basis-fraction"),
        ("fit x -o y --prior-precision z", "--prior-precision: 'z' is not faithful, evidence or a number"),
        (
            "fit x -o y --prior-precision -1",
            "--prior-precision must be a finite number > 0 or one of 'faithful', 'evidence' or None, not -1",
        ),
        ("fit x -o y --dtype number3", "'number3' is not a number format"),
        ("fit x -o y --batch-size 0", "--batch-size must be a whole number >= 1, not 0"),
        ("fit x -o y --image-size 20000", "<= 16384"),
        ("fit x -o y --mean a,b", "--mean: "),
        ("fit x -o y --val-split train", "--val-split is a part of --val-data"),
        ("fit x -o y", "--model must be given"),
        ("tune m --temperature", "needs held-out data"),
        (
            "predict m x -o y --referral-rate 1",
            "--referral-rate must be a finite number > 0 and < 1 or None, not 1",
        ),
        ("predict m x -o y --referral-rate 0.1 --referral-accuracy 0.9", "a rate or by an accuracy"),
        ("evaluate m x --referral-confidence 0.9", "A confidence is that of an accuracy"),
        ("serve m --referral-exactly", "a server answers inputs one by one"),
        ("tune m --criterion faithful", "needs training inputs"),
        ("tune m --divergence 0.1", "--divergence is of the criteria"),
        ("evaluate m x --ood textures", "not of the form NAME=DATA"),
        ("evaluate m x --ood a=x --ood a=y", "a name of its own"),
        ("predict m x -o y --head sampling --link mc", "--link is for the heads moments and linearized"),
        ("predict m x -o y --batched maybe", "--head.batched"),
        ("inspect m --colour", "--colour"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(
    words: str, key: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    line = misuse(*words.split())
    name = words.split()[0]
    assert key in line and line.endswith(
        f"(see posthoc-uq{f' {name}' if name in COMMANDS else ''} --help).\n"
    )


class TestConfiguration:
    def test_a_file_of_options(self, tmp_path: Path) -> None:
        path = tmp_path / "fit.yaml"
        path.write_text("data: x\noutput: y\ntarget: [a, b]\nmethod: {name: INF, rank: 7}\nbatch_size: 5\n")
        call = parsed("fit", "--config", path, "--batch-size 6")
        assert call["data"] == "x" and call["method"] == Choice("method", "inf", {"rank": 7})
        assert call["reading"].target == ["a", "b"] and call["reading"].batch_size == 6
        assert parsed("fit", "--batch-size 6", f"--config={path} --rank 3")["method"].options == {"rank": 3}
        path.write_text(
            "method: kfac\nlikelihood: binary\ntarget: 'y, EUR'\nmean: 0.5\nstd: [0.5, 0.2]\nlayers: a,b\n"
        )
        call = parsed("fit", "x", "-o", "y", "--config", path, "--keep-grams")
        assert call["method"] == Choice("method", "kfac", {"keep_grams": True})
        assert call["likelihood"].name == "binary" and call["layers"] == ["a,b"]
        assert (call["reading"].target, call["source"].mean, call["source"].std) == (
            ["y, EUR"],
            [0.5],
            [0.5, 0.2],
        )

    @pytest.mark.parametrize("command", ["fit", "tune", "predict", "evaluate", "serve"])
    def test_what_is_printed_is_read_again(self, command: str, tmp_path: Path) -> None:
        words = {
            "fit": ["x", "-o", "y", "--likelihood regression --rank 5"],
            "predict": ["f", "x", "-o", "y"],
        }
        arguments = [*words.get(command, ["f"] if command != "evaluate" else ["f", "x"]), "--seed 4"]
        printed = run(command, *arguments, "--print_config").stdout
        assert yaml.safe_load(printed)["seed"] == 4
        (tmp_path / "c.yaml").write_text(printed)
        again, given = parsed(command, "--config", tmp_path / "c.yaml"), parsed(command, *arguments)
        if command == "fit":
            assert yaml.safe_load(printed)["method"]["rank"] == 5
            short = run(command, *arguments, "--print_config=skip_default").stdout
            assert yaml.safe_load(short)["method"] == {"rank": 5} and "batch_size" not in short
            again["method"], given["method"] = (uq.INF(**call["method"].options) for call in (again, given))
        assert again == given

    def test_what_is_wrong_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        for text, key in (
            ("splti: train", "There is no option --splti in"),
            ("batch_size: many", "--batch-size: 'many' is not a whole number (in"),
            ("batch-size: 0", "--batch-size must be a whole number >= 1, not 0 (in"),
            ("method: imf", "Did you mean 'inf'"),
            ("method: {name: diag, rank: 3}", "--method.rank is for the method inf"),
            ("split: [", "is no YAML"),
            ("- split", "has no options by their names"),
        ):
            path.write_text(text)
            line = misuse("fit", "x", "-o", "y", "--config", path)
            assert key in line and ("c.yaml" in line or "method" in text), text
        assert "no.yaml' cannot be read" in misuse("fit", "x", "-o", "y", "--config", tmp_path / "no.yaml")
        os.mkfifo(tmp_path / "pipe")
        assert "not a file" in failure("fit", "x", "-o", "y", "--config", tmp_path / "pipe")


def test_completion_knows_every_option() -> None:
    text = run("--print_completion=shtab-bash").stdout
    assert all(f"posthoc_uq_{name}_option_strings" in text for name in COMMANDS)
    assert "--method.rank" in text and "--data_root" in text


def test_messages_name_options_of_the_command() -> None:
    from posthoc_uq.app.cli.main import _in_options

    text = "pass likelihood=uq.Categorical(..., class_dim=-1), or fisher='mc', batch_to_targets=lambda batch: ..."
    running = [Command(commands.fit, [])]
    assert _in_options(text, running) == (
        "pass --likelihood classification --likelihood.class-dim -1, or --fisher mc, batch_to_targets=lambda batch: ..."
    )
    text = "likelihood=uq.Mine(), layers='last' (colour=3)."
    assert _in_options(text, running) == "likelihood=uq.Mine(), --layers last (colour=3)."
    assert _in_options(text, [Command(commands.inspect, [])]) == _in_options(text, []) == text
    advice = "uq.tune(posterior, loader, criterion='faithful', head='moments')"
    assert (
        _in_options(advice, running) == "posthoc-uq tune FILE --data DATA --criterion faithful --head moments"
    )


# The program as a whole.


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    text = run(name, "--help").stdout
    assert "examples:" in text and f"posthoc-uq {name}" in text
    assert all(option in text for option in ("--json", "--quiet", "--debug"))
    assert not re.search(r"--[a-z.]+_", text), "options are written with dashes"
    assert name not in ("fit", "tune") or "0.002" in text
    if name == "fit":
        assert len(text.splitlines()) < 130


def test_help_imports_nothing_heavy() -> None:
    text = run("--help").stdout
    places = [text.index(f"\n    {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert run("--version").stdout.strip() == f"posthoc-uq {uq.__version__}"
    code = (
        "import runpy, sys; sys.argv = ['posthoc-uq', '--version']\n"
        "try: runpy.run_module('posthoc_uq', run_name='__main__')\nexcept SystemExit as end: print(end.code)\n"
        "import posthoc_uq; from posthoc_uq.app.cli import main; main(['--help']); main(['fti']);"
        "print([name for name in ('torch', 'numpy') if name in sys.modules]);"
        "from posthoc_uq.evaluation import metrics; from posthoc_uq import *;"
        "fit, posthoc_uq.methods;"
        "[main([*name, '--help']) for name in (['fit'], ['predict'], ['serve'])];"
        "from posthoc_uq.app import ModelSource, transform_of; from torch import nn;"
        "transform_of(nn.Conv2d(3, 4, 3), ModelSource(model='nets:net'));"
        "heavy = 'backpack timm torchvision torchmetrics pandas matplotlib starlette scipy'.split();"
        "print([name for name in heavy if name in sys.modules]);"
        "from posthoc_uq.app import plots; plots.coverage_plot; print('torchmetrics' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[:2] == [f"posthoc-uq {uq.__version__}", "0"], done.stderr
    assert [line for line in lines if line == "[]"] == ["[]", "[]"] and lines[-1] == "False", lines[-2:]


def test_a_mistake_has_no_traceback_unless_asked_for(place: Path) -> None:
    assert failure("inspect", place / "nothing.h5") == f"Error: There is no file '{place / 'nothing.h5'}'.\n"
    with pytest.raises(uq.PosthocUQError):
        main(["inspect", str(place / "nothing.h5"), "--debug"])


def _commands(place: Path, data: Any, model: list[str], file: str = "m.h5") -> dict[str, list[Any]]:
    return {
        "fit": ["fit", data, *model, "-o", place / "new.h5"],
        "tune": ["tune", place / file, "--data", data, *model, "-o", place / "new.h5"],
        "calibrate": ["calibrate", place / file, data, *model, "-o", place / "new.h5"],
        "predict": ["predict", place / file, data, *model, "-o", place / "new.csv"],
        "evaluate": ["evaluate", place / file, data, *model, "--csv", place / "new.csv"],
    }


def test_every_command_says_what_is_wrong_with_its_inputs(place: Path, tmp_path: Path) -> None:
    torch.save({k: v + 1 for k, v in torch.load(place / "w.pt").items()}, place / "other.pt")
    make_images(tmp_path / "bad", CLASSES, 2, 0)
    bad = tmp_path / "bad" / "dog" / "0.png"
    bad.write_bytes(bad.read_bytes()[:90])
    (tmp_path / "bad" / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    good, other = model_options(place), model_options(place, "other.pt")
    for name, command in _commands(place, tmp_path / "gone", good).items():
        assert f"There is no folder '{tmp_path / 'gone'}'" in failure(*command)
        assert "There are no images" in failure(*_commands(place, tmp_path / "empty", good)[name])
        assert f"Unreadable image '{bad}'" in failure(*_commands(place, tmp_path / "bad", good)[name])
        if name == "fit":
            continue
        for file, words in (
            ("gone.h5", "There is no file"),
            ("w.pt", "not a posterior"),
            ("val", "is a folder"),
        ):
            assert words in failure(*_commands(place, place / "val", good, file)[name])
        said = failure(*_commands(place, place / "val", other)[name])
        assert "not those that the posterior in" in said and "are the --weights the right ones?" in said
        if name == "predict":  # by a model that the file does not know, as of a posterior from Python
            (tmp_path / "mine.py").write_text((place / "nets.py").read_text())
            alone = ["--model", f"{tmp_path / 'mine.py'}:net"]
            assert "give --weights FILE" in failure(*_commands(place, place / "val", alone)[name])
        line = ["--model", f"{place / 'nets.py'}:line"]
        assert "does not belong to this model" in failure(*_commands(place, place / "val", line)[name])
    assert not list(place.glob("*new*")), "no half-written file"
    (tmp_path / "names.txt").write_text("a\nb\n")
    predict = [*_commands(place, place / "val", good)["predict"], "--class-names", tmp_path / "names.txt"]
    assert "There are 2 class names, and the model has 3 outputs." in failure(*predict)


def test_an_output_that_cannot_be_written_is_found_before_the_work(place: Path) -> None:
    for arguments in _commands(place, place / "val", model_options(place)).values():
        at = next(i for i, value in enumerate(arguments) if value in ("-o", "--csv")) + 1
        changed = [*arguments[:at], place / "no" / "such" / "file", *arguments[at + 1 :]]
        assert "does not exist; make it first" in failure(*changed)
    said = failure("predict", place / "m.h5", place / "val", *model_options(place), "-o", place / "val")
    assert "is a folder; give the name of a file in it" in said


def test_errors_of_any_kind_are_one_line() -> None:
    assert sentence(uq.PosthocUQError("one\n  two")) == "one two"
    assert sentence(FileNotFoundError(2, "No such file", "x.txt")) == "'x.txt': No such file."
    assert sentence(ValueError("a\nb")) == "ValueError: a b (--debug shows where.)"
    wrapped = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (...):\nKeyError: 7"
    assert sentence(RuntimeError(wrapped)) == "KeyError: 7" and len(sentence(ValueError("x" * 5000))) < 700
    assert plain({"a": (1.0, float("nan")), 1: Path("c")}) == {"a": [1.0, None], "1": "c"}


def test_warnings_are_single_lines_and_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warnings.showwarning

    def warn(path: Any) -> None:
        warnings.warn("one\ntwo", UserWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(uq, "inspect", warn)
    assert run("inspect", "x", code=130).stderr == "Warning: one two\nInterrupted.\n"
    assert warnings.showwarning is before


def test_an_interrupted_prediction_leaves_no_file(place: Path, tmp_path: Path) -> None:
    code, out = place / "slow.py", tmp_path / "out.csv"
    code.write_text(
        "import signal, time\nfrom pathlib import Path\nfrom nets import net as fast\nseen = []\n\n\n"
        "def net():\n    return fast()\n\n\n"
        f"def slow(image):\n    seen.extend(Path({str(tmp_path)!r}).iterdir())\n"
        "    signal.raise_signal(signal.SIGINT)\n    time.sleep(20)\n"
    )
    model = [
        "--model",
        f"{code}:net",
        "--weights",
        place / "w.pt",
        "--transform",
        f"{code}:slow",
        "--workers 0",
    ]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's, of what runs in the foreground
    try:
        said = run("predict", place / "m.h5", place / "train", *model, "-o", out, "--batch-size=1", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said.stderr.splitlines()[-1] == "Interrupted."
    assert len(sys.modules["slow"].seen) == 1, "the temporary file is there while it runs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_names_that_stdout_cannot_hold_are_escaped(encoding: str, copied: Path, place: Path) -> None:
    """Of every command, since `main` prepares stdout; and it is given back as it was."""
    names = ["größe", "Ж", "狗"]
    model = net()
    model.load_state_dict(torch.load(place / "w.pt"))
    posterior = uq.load(copied, model)
    posterior = posterior.noted(fit={"class names": names})
    uq.save(posterior, copied)
    held = TextIOWrapper(BytesIO(), encoding=encoding)
    with redirect_stdout(held):
        assert main(["inspect", str(copied)]) == 0
        assert main(["inspect", str(copied), "--json"]) == 0
    held.flush()
    text = held.buffer.getvalue().decode(encoding)
    assert "\\u0416" in text and "\\u72d7" in text and held.errors == "strict"
    assert json.loads(text[text.index("\n{") :])["fit"]["class names"] == names


class _Refusing(StringIO):
    """A stream on a full disk, or whose reader is gone."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise OSError(self.error, os.strerror(self.error))  # a BrokenPipeError for EPIPE


def test_streams_that_cannot_be_written(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["inspect", str(copied)]
    with redirect_stdout(_Refusing(errno.EPIPE)), redirect_stderr(StringIO()) as stderr:
        assert main(words) == 0 and not stderr.getvalue()
    with redirect_stdout(_Refusing(errno.ENOSPC)), redirect_stderr(StringIO()) as stderr:
        assert main(words) == 1
    assert stderr.getvalue() == (
        "Error: The command is done, but stdout could not be written: No space left on device.\n"
    )
    monkeypatch.setattr(commands, "inspect", _warning)
    for broken in (_Refusing(errno.EPIPE), _Refusing(errno.ENOSPC), None):  # a warning must not end the work
        with redirect_stdout(StringIO()) as stdout:
            monkeypatch.setattr(sys, "stderr", broken)
            assert main(words) == 0 and sys.stderr is broken
        assert stdout.getvalue() == "done\n"
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(words) == 0 and sys.stdout is None


def _warning(file: Read, /, *, console: Console) -> commands.Done:
    """Warn."""
    warnings.warn("careful", stacklevel=1)
    return commands.Done("done", {})


@pytest.mark.skipif(os.name != "posix", reason="descriptors of POSIX")
def test_a_command_without_any_standard_stream(place: Path, tmp_path: Path) -> None:
    """As of a daemon. Its files do not get the descriptors of these streams."""
    code, file, table = place / "nets.py", tmp_path / "line.h5", tmp_path / "t.csv"
    line = [f"{code}:points", "--model", f"{code}:line", "--weights", place / "line.pt"]
    run("fit", *line, "-o", file, "--likelihood regression --method diag --prior-precision 5.0")
    words = ["predict", file, *line, "-o", table, "--n-samples 5 --head sampling"]
    program = shlex.join([sys.executable, "-m", "posthoc_uq", *map(str, words_of(words))])
    command = f"exec 0<&- 1>&- 2>&-; exec {program}"
    assert subprocess.run(["bash", "-c", command]).returncode == 0
    assert table.read_text().startswith("file,mean") and len(table.read_text().splitlines()) == 41


def test_inspect_shows_a_file_without_its_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("inspect", place / "m.h5").stdout
    found = run_json("inspect", place / "m.h5")
    assert found == json.loads(json.dumps(uq.inspect(place / "m.h5")))
    for words in ("method", "inf", "prior precision", "conv2d", "4x3x3x3", "3x16", found["fingerprint"]):
        assert words in text
    children = []
    monkeypatch.setattr(save_load, "ChildReader", lambda data: children.append(data) or ImageReader(data))
    assert main(["inspect", str(place / "m.h5")]) == 0 and len(children) == 1


def test_the_demo_is_run_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from posthoc_uq.app.cli import demo

    def fake(output: Path, seed: int) -> Any:
        print(f"a table of seed {seed}")
        (output / "picture.png").write_bytes(b"")
        return demo.DigitsResult(None, True)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "run", fake)
    options = ["--output", tmp_path, "--seed 3"]
    assert run("demo", *options).stdout == "a table of seed 3\n"
    assert "is not empty" in failure("demo", *options)
    result = run("demo", *options, "--force --json")
    assert json.loads(result.stdout)["files"] == [str(tmp_path / "picture.png")]
    assert result.stderr == "a table of seed 3\n"
    monkeypatch.setattr("posthoc_uq.app.cli.options.find_spec", lambda _: None)
    assert "needs the extra demo: pip install 'posthoc-uq[demo]'" in failure("demo", *options)


# What the commands do.


class TestFit:
    def test_it_is_the_fit_of_the_library(self, place: Path) -> None:
        data = loader(place, "train")
        expected = uq.fit(trained(place), data, "inf", rank=RANK, prior_precision=5.0, progress=False)
        found = uq.load(place / "m.h5", trained(place))
        assert_same_posterior(found, expected, 1e-6)
        assert found.prior_precision == 5.0 and found.scale == 36
        assert found.evidence.log_likelihood == pytest.approx(expected.evidence.log_likelihood)
        fitted = found.history.fit
        assert fitted["model"] == "nets.py:net" and fitted["images"] == "3 x own size"
        assert fitted["fisher"] == "exact" and fitted["fisher chosen"] == "auto"

    def test_no_method_is_that_of_the_library(self, place: Path) -> None:
        file = place / "chosen.h5"
        run("fit", place / "train", *model_options(place), "--prior-precision 5.0 --rank", RANK, "-o", file)
        found, data = uq.load(file, trained(place)), loader(place, "train")
        expected = uq.fit(trained(place), data, rank=RANK, prior_precision=5.0, progress=False)
        assert_same_posterior(found, expected, 1e-6)
        assert [*found.layers] == ["4"] and "the last of 2 layers" in found.history.fit["layers chosen"]

    def test_options_reach_the_library(self, place: Path) -> None:
        options: dict[str, Any] = {"method": "kfac", "layers": ["4"], "fisher": "exact", "seed": 3}
        expected = uq.fit(
            trained(place), loader(place, "train"), dtype=torch.float64, progress=False, **options
        )
        said = run_json(
            *[
                "fit",
                place / "train",
                *model_options(place),
                "-o",
                place / "k.h5",
                "--method kfac --layers 4",
            ],
            *["--fisher exact --seed 3 --dtype float64 --save-dtype float32 --compress"],
        )
        found = uq.load(place / "k.h5", trained(place))
        assert found.method == "kfac" and list(found.layers) == ["4"]
        assert_same_posterior(found, expected, 1e-5)
        assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-6)
        assert said["bytes"] == (place / "k.h5").stat().st_size

    def test_a_flat_folder_has_labels_of_the_model(self, place: Path) -> None:
        said = fit(place, "flat.h5", data="flat")
        assert said["report"]["summary"]["samples"] == 5
        assert uq.load(place / "flat.h5", trained(place)).evidence.log_likelihood is None
        fit(place, "unlabelled.h5", "--unlabelled")
        found = uq.load(place / "unlabelled.h5", trained(place))
        assert found.evidence.log_likelihood is None and found.scale == 36
        assert "needs targets" in failure(
            *["fit", place / "flat", *model_options(place), "-o", place / "x.h5", "--likelihood regression"]
        )

    def test_held_out_data_tune_it(self, place: Path) -> None:
        fit(place, "tuned.h5", "--val-data", place / "val")
        found = uq.load(place / "tuned.h5", trained(place))
        assert found.history.tuning["prior precision"].startswith("the widest")
        assert found.history.promises
        assert found.history.head.plain() == {"name": "linearized", "options": {}, "criterion": "likelihood"}
        options = [*model_options(place), "-o", place / "x.h5", "--val-data", place / "flat"]
        assert "For calibration data need labels" in failure("fit", place / "train", *options)
        assert not (place / "x.h5").exists()

    def test_a_summary_for_people(self, place: Path) -> None:
        text = run("fit", place / "val", *model_options(place), "-o", place / "t.h5", "--method diag").stdout
        assert "method: diag" in text and "samples: 18" in text
        assert f"Written to {place / 't.h5'} (" in text and len(text.splitlines()) <= 10

    @pytest.mark.study  # test_distributed.py has the fit itself
    def test_several_processes_fit_the_same(self, place: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2", "-m", "posthoc_uq", "fit", place / "train"]
        command += [
            *model_options(place),
            "--batch-size",
            5,
            "--method inf --rank",
            RANK,
            "--prior-precision",
            5.0,
        ]
        command += ["--limit", 35, "-o", place / "two.h5", "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        words = words_of(command)
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        said = json.loads(done.stdout)
        assert "text" not in said
        assert said["processes"] == 2 and said["bytes"] == (place / "two.h5").stat().st_size
        fit(place, "one.h5", "--limit", 35)
        one, two = (uq.load(place / name, trained(place)) for name in ("one.h5", "two.h5"))
        assert two.scale == one.scale == 35
        assert_same_posterior(two, one, 1e-5)


class TestCalibrate:
    def test_by_held_out_data(self, place: Path, copied: Path) -> None:
        options = ["--head linearized --share 0.4 --sets aps --seed 1"]
        said = run_json("calibrate", copied, place / "val", *model_options(place), *options)
        fitted = uq.load(place / "m.h5", trained(place))
        found = uq.calibrate(
            fitted, loader(place, "val"), share=0.4, sets="aps", head="linearized", seed=1, progress=False
        )
        kept, wanted = (p.history.promises for p in (uq.load(copied, trained(place)), found))
        assert said["samples"] == kept.samples == wanted.samples and kept.kind == "aps"
        assert said["promises"] in str(found.report())
        for one, other in zip(kept.targets.scores, wanted.targets.scores, strict=True):
            assert one.values.tolist() == pytest.approx(other.values.tolist(), rel=1e-4)
        assert "promised" in run("calibrate", copied, place / "val", *model_options(place)).stdout

    def test_by_the_training_data(self, place: Path, copied: Path) -> None:
        line = [copied, "--data", place / "train", *model_options(place), "--criterion leave_one_out"]
        said = run_json("tune", *line, "--initialisations 2")
        expected = uq.load(place / "m.h5", trained(place))
        found = uq.tune(
            expected, loader(place, "train"), criterion="leave_one_out", initialisations=2, progress=False
        )
        assert said["criterion"] == "leave_one_out"
        assert said["hyperparameters"]["temperature"] == pytest.approx(found.temperature, rel=1e-4)
        start = copied.with_name("start.pt")
        torch.manual_seed(5)
        fresh = trained(place)
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        torch.save(fresh.state_dict(), start)
        said = run_json("tune", *line, "--initial", start)
        found = uq.tune(
            expected, loader(place, "train"), criterion="leave_one_out", initial=fresh, progress=False
        )
        assert said["hyperparameters"]["temperature"] == pytest.approx(found.temperature, rel=1e-4)
        other = copied.with_name("other.pt")
        torch.save(nn.Linear(2, 1).state_dict(), other)
        assert "not this model's" in failure("tune", *line, "--initial", other)
        assert "no head" in misuse("tune", *line, "--head sampling")
        evidence = [copied, *model_options(place), "--initialisations 2"]
        assert "of --criterion leave_one_out" in misuse("tune", *evidence)


class TestTune:
    def test_by_evidence(self, place: Path, copied: Path) -> None:
        said = run_json("tune", copied, *model_options(place), "--per-layer")
        expected = uq.load(place / "m.h5", trained(place))
        expected = uq.tune(expected, per_layer=True)
        found = uq.load(copied, trained(place))
        assert found.prior_precision == pytest.approx(expected.prior_precision)
        assert said["hyperparameters"]["prior precision"] == "per layer"
        assert said["prior_precision_by_layer"] == pytest.approx(expected.prior_precision)
        assert_same_posterior(found, expected)

    def test_by_held_out_data(self, place: Path, copied: Path) -> None:
        options = ["--search-draws 4 --max-evaluations 3 --parameters prior_precision --seed 1"]
        options += ["--head sampling --n-samples 6 --data", place / "val"]
        output = copied.with_name("other.h5")
        said = run_json("tune", copied, *model_options(place), *options, "--output", output)
        expected = uq.load(place / "m.h5", trained(place))
        expected = uq.tune(
            expected,
            loader(place, "val"),
            n_samples=4,
            max_evaluations=3,
            parameters=("prior_precision",),
            head="sampling",
            seed=1,
            progress=False,
        )
        trials = expected.history.trials
        assert trials is not None and trials.chosen is not None
        found = uq.load(output, trained(place))
        assert found.prior_precision == pytest.approx(expected.prior_precision)
        assert said["validation_nll"] == pytest.approx(trials.chosen.objective)
        assert said["given_up"] == pytest.approx(trials.nll_given_up_for_width, abs=1e-9)
        head = {"name": "sampling", "options": {"n_samples": 6}, "criterion": "likelihood"}
        assert found.history.head.plain() == head == said["searched_through"]
        assert said["model_alone"] == pytest.approx(trials.model_alone)
        assert copied.read_bytes() == (place / "m.h5").read_bytes()
        for option in ("n-samples", "n-probes"):  # checked before the search
            line = misuse("tune", copied, *model_options(place), "--data", place / "val", f"--{option} 0")
            assert f"--head.{option.replace('-', '_')} must be a whole number >= 1, not 0" in line

    def test_a_temperature(self, place: Path, copied: Path) -> None:
        common = ["tune", copied, *model_options(place), "--data", place / "val"]
        said = run_json(*common, "--parameters none")
        found = uq.load(copied, trained(place))
        assert found.temperature == said["hyperparameters"]["temperature"] != 1.0
        assert found.prior_precision == 5.0
        run(*common, "--no-temperature")
        assert uq.load(copied, trained(place)).temperature == found.temperature

    def test_closeness_to_the_model_needs_no_labels(self, place: Path, copied: Path) -> None:
        options = ["--data", place / "flat", "--criterion faithful --divergence 0.02 --no-temperature"]
        said = run_json("tune", copied, *model_options(place), *options, "--head moments --relu exact")
        expected = uq.load(place / "m.h5", trained(place))
        given: dict[str, Any] = {"criterion": "faithful", "divergence": 0.02, "temperature": False}
        expected = uq.tune(expected, [flat(place)], **given, head="moments", relu="exact", progress=False)
        assert said["hyperparameters"]["prior precision"] == pytest.approx(expected.prior_precision)
        assert 0 < said["divergence"] <= said["budget"] == 0.02 and said["validation_nll"] is None
        assert said["searched_through"]["options"] == {"relu": "exact"}
        out = copied.with_suffix(".csv")
        found = run_json("predict", copied, place / "flat", *model_options(place), "-o", out)
        assert (found["head"]["head"], found["head"]["relu"]) == ("moments", "exact")

    def test_labels_are_needed_to_search(self, place: Path, copied: Path) -> None:
        common = ["tune", copied, *model_options(place), "--data", place / "flat"]
        before = copied.read_bytes()
        for said in (failure(*common), failure("calibrate", copied, place / "flat", *model_options(place))):
            assert "data need labels" in said and said.count("\n") == 1
        assert copied.read_bytes() == before

    def test_promises_that_a_search_makes_void_are_said(self, place: Path) -> None:
        fit(place, "half.h5", "--save-dtype bfloat16")
        file = place / "half.h5"
        data = [place / "val", "--head sampling --n-samples 4"]
        run("calibrate", file, *data, *model_options(place))
        size = file.stat().st_size
        said = run("tune", file, *model_options(place)).stderr
        assert said.count("no longer hold; calibrate again") == 1
        assert abs(file.stat().st_size - size) < 1000, "in the same number format"
        assert run("calibrate", file, *data, *model_options(place)).stderr == ""
        run("tune", file, *model_options(place), "--per-layer")
        out = file.with_suffix(".csv")
        result = run("predict", file, place / "val", *model_options(place), "-o", out)
        assert "The column flag stays empty. The posterior's hyperparameters changed" in result.stderr
        assert {row["flag"] for row in table(out)} == {""}


class TestPredict:
    def test_every_row_is_the_librarys(self, place: Path, copied: Path) -> None:
        rate, out = 0.25, copied.with_suffix(".csv")
        options = [*model_options(place), "--n-samples 7 --seed 2"]
        run("calibrate", copied, place / "val", *options)
        shown = [
            "--batch-size 5 --top-k 2 --class-names",
            place / "train",
            "-o",
            out,
            "--referral-rate",
            rate,
            "--level 0.8",
        ]
        said = run_json("predict", copied, place / "train", *options, *shown)
        rows = table(out)
        assert said["rows"] == len(rows) == 36 and said["skipped"] == []
        columns = (
            "file label_1 probability_1 label_2 probability_2 entropy mutual_information novelty familiarity"
        )
        assert list(rows[0]) == [*columns.split(), "set", "flag", "reason", "tail"]
        files = [row["file"] for row in rows]
        assert files == sorted(f"{name}/{i}.png" for name in CLASSES for i in range(12))

        # The draws' outputs by the library, all that follows from them by numpy.
        x, _ = tensors(place / "train")
        predictor = uq.wrap(trained(place), uq.load(copied, trained(place)), n_samples=7, seed=2)
        with torch.no_grad():
            logits = predictor.outputs(x).double().numpy()
            prediction = predictor(x)
        draws = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        probs = draws.mean(0)
        entropy = -(probs * np.log(probs)).sum(-1)
        information = entropy + (draws * np.log(draws)).sum(-1).mean(0)
        order = np.argsort(-probs, axis=1)
        assert [row["label_1"] for row in rows] == [CLASSES[i] for i in order[:, 0]]
        assert [row["label_2"] for row in rows] == [CLASSES[i] for i in order[:, 1]]
        assert column(rows, "probability_1") == pytest.approx(probs.max(1), rel=2e-5)
        assert column(rows, "entropy") == pytest.approx(entropy, rel=1e-4, abs=1e-6)
        assert column(rows, "mutual_information") == pytest.approx(information, rel=1e-2, abs=1e-5)
        assert column(rows, "novelty") == pytest.approx(predictor.novelty(x).numpy(), rel=1e-3)
        assert column(rows, "familiarity") == pytest.approx(prediction.familiarity().numpy(), abs=1e-5)
        referral = uq.Referral(rate)
        tail, reasons = referral.tail(prediction), referral.reasons(prediction)
        named = ["+".join(name for name in reasons if reasons[name][i]) for i in range(36)]
        assert column(rows, "tail") == pytest.approx(tail.numpy(), abs=1e-5)
        sets = [";".join(CLASSES[i] for i in row.nonzero().flatten()) for row in prediction.set(0.8)]
        assert [row["set"] for row in rows] == sets
        assert [row["reason"] for row in rows] == named and len(set(named)) > 1
        assert [row["flag"] for row in rows] == ["1" if name else "0" for name in named]
        assert said["flagged"] == column(rows, "flag").sum() == int(referral(prediction).sum())

        # by the ranks of all rows, whatever the batches
        again = ["--force -o", out, "--batch-size 5 --referral-rate 0.2 --referral-exactly --top-k 2"]
        said = run_json("predict", copied, place / "train", *options, *again)
        flags, rows = uq.Referral(0.2, exactly=True)(prediction), table(out)
        assert said["flagged"] == 7 and [row["flag"] for row in rows] == [str(int(flag)) for flag in flags]
        assert all(bool(row["reason"]) == (row["flag"] == "1") for row in rows)
        assert column(rows, "tail") == pytest.approx(tail.numpy(), abs=1e-5)

        # without a number of draws, that of the held-out scores
        again = [*model_options(place), "--seed 2 --force -o", out]
        result = run("predict", copied, place / "val", *again)
        assert "The column flag stays empty. A rate of 0.05 needs more held-out samples" in result.stderr
        assert "The column set stays empty. A level of 0.95 needs 19 held-out samples" in result.stderr
        assert {row["set"] for row in table(out)} == {""}
        assert run_json("predict", copied, place / "val", *again)["head"]["n_samples"] == 7
        result = run("predict", copied, place / "val", *again, "--head moments")
        assert "The column flag stays empty. The held-out scores are of" in result.stderr
        assert {(row["flag"], row["reason"], row["tail"]) for row in table(out)} == {("", "", "")}

    @pytest.mark.parametrize(
        ("head", "options"),
        [
            ("linearized", {"link": "mc", "n_draws": 50}),
            ("moments", {"link": "bridge", "relu": "exact", "weights": "marginal"}),
            ("sampling", {"n_samples": 3, "batched": False, "antithetic": True}),
        ],
    )
    def test_heads_and_their_options(
        self, place: Path, tmp_path: Path, head: str, options: dict[str, Any]
    ) -> None:
        out = tmp_path / "x.csv"
        common = ["predict", place / "m.h5", place / "flat", *model_options(place), "-o", out]
        given = [part for name, value in options.items() for part in (f"--head.{name}", str(value).lower())]
        # an option of one head alone names it
        found = run_json(*common, *given, *(["--head linearized"] if head == "linearized" else []))["head"]
        assert (
            found["head"] == head
            and found.items() >= {k: v for k, v in options.items() if k in found}.items()
        )
        expected = uq.wrap(trained(place), uq.load(place / "m.h5", trained(place)), head=head, **options)(
            flat(place)
        )
        rows = table(out)
        assert column(rows, "probability_1") == pytest.approx(expected.probs.max(1).values.numpy(), rel=1e-4)
        if head == "moments":
            assert {row["mutual_information"] for row in rows} == {""}
        else:
            information = expected.mutual_information().numpy()
            assert column(rows, "mutual_information") == pytest.approx(information, rel=1e-2, abs=1e-5)
        assert {row["flag"] for row in rows} == {""} and {row["label_1"] for row in rows} <= set(CLASSES)

    def test_options_of_no_one_head(self, place: Path, tmp_path: Path) -> None:
        common = ["predict", place / "m.h5", place / "flat", *model_options(place), "-o", tmp_path / "x.csv"]
        found = run_json(*common, "--link mc --n-draws 40")["head"]  # of two heads, and one is the file's
        assert (found["head"], found["n_draws"]) == ("linearized", 40)
        line = misuse(*common, "--force --n-samples 4 --engine exact")  # of no head both
        assert "--n-samples is for sampling (--head sampling), and this is linearized" in line

    def test_names_of_the_classes(self, place: Path, copied: Path) -> None:
        names, out = copied.with_name("names.json"), copied.with_suffix(".csv")
        names.write_text('["felis, catus", "canis", "dromaius"]')
        options = ["--n-samples 2 --top-k 9 --class-names", names, "-o", out]
        run("predict", copied, place / "flat", *model_options(place), *options)
        for row in table(out):
            found = {row[f"label_{i}"] for i in (1, 2, 3)}
            assert found == {"felis, catus", "canis", "dromaius"} and "label_4" not in row

    def test_unreadable_images_are_left_out_on_request(self, place: Path, copied: Path) -> None:
        folder, out = copied.with_name("images"), copied.with_suffix(".csv")
        make_images(folder, ("",), 3, 0)
        (folder / "1.png").write_bytes(b"x")
        common = ["predict", copied, folder, *model_options(place), "-o", out, "--force --n-samples 2"]
        out.write_text("an older file")
        assert f"Unreadable image '{folder / '1.png'}'" in failure(*common)
        assert out.read_text() == "an older file"
        result = run(*common, "--skip-unreadable", code=3)
        assert result.stderr == f"Left out, unreadable: {folder / '1.png'}\n"
        assert [row["file"] for row in table(out)] == ["0.png", "2.png"]
        assert run_json(*common, "--skip-unreadable", code=3)["skipped"] == [str(folder / "1.png")]
        assert sorted(path.name for path in copied.parent.iterdir()) == ["images", "m.csv", "m.h5"]
        (folder / "0.png").write_bytes(b"x")
        (folder / "2.png").unlink()
        said = failure(*common, "--skip-unreadable")
        assert f"None of the 2 images can be read. Unreadable image '{folder / '0.png'}'" in said

    def test_workers_change_nothing(self, place: Path, copied: Path) -> None:
        texts: list[str] = []
        for workers in (0, 2):
            out = copied.with_name(f"{workers}.csv")
            options = ["--n-samples 2 --workers", workers, "--batch-size 4"]
            run("predict", copied, place / "val", *model_options(place)[:4], *options, "-o", out)
            texts.append(out.read_text())
        assert texts[0] == texts[1]


def test_a_regression_from_fit_to_intervals(place: Path, tmp_path: Path) -> None:
    code, file, out = place / "nets.py", tmp_path / "line.h5", tmp_path / "out.csv"
    line = ["--model", f"{code}:line", "--weights", place / "line.pt"]
    run("fit", f"{code}:points", *line, "-o", file, "--likelihood regression --method full")
    run("tune", file, *line, "--data", f"{code}:points", "--no-noise")
    assert uq.inspect(file)["tuning"]["noise variance"].startswith("mean squared residual")
    said = run_json("tune", file, *line, "--data", f"{code}:points")
    assert len(said["hyperparameters"]["noise variance"]) == 1
    assert uq.inspect(file)["tuning"]["noise variance"] == "validation NLL"
    options = ["--head sampling --n-samples 5 --level 0.5"]
    run("predict", file, f"{code}:points", *line, "-o", out, *options)
    rows = table(out)
    columns = (
        "file mean standard_deviation epistemic_variance lower upper novelty familiarity flag reason tail"
    )
    assert list(rows[0]) == columns.split() and {row["familiarity"] for row in rows} == {""}
    assert [row["file"] for row in rows] == [str(i) for i in range(40)]
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(2))
    model = nn.Linear(2, 1)
    model.load_state_dict(torch.load(place / "line.pt"))
    posterior = uq.load(file, model)
    with torch.no_grad():
        draws = uq.wrap(model, posterior, "sampling", n_samples=5).outputs(x).double().numpy()[..., 0]
    variance = draws.var(0, ddof=1)
    deviation = np.sqrt(variance + float(posterior.noise_variance))
    assert column(rows, "mean") == pytest.approx(draws.mean(0), rel=1e-3, abs=1e-4)
    assert column(rows, "epistemic_variance") == pytest.approx(variance, rel=1e-3)
    assert column(rows, "standard_deviation") == pytest.approx(deviation, rel=1e-4)
    half = 0.6744897501960817 * deviation  # the upper quartile of a standard normal
    assert column(rows, "upper") - column(rows, "mean") == pytest.approx(half, rel=1e-3, abs=1e-4)
    assert column(rows, "mean") - column(rows, "lower") == pytest.approx(half, rel=1e-3, abs=1e-4)

    run("calibrate", file, *[f"{code}:points"], *line, "--head sampling --n-samples 5")
    said = run(
        "predict", file, f"{code}:points", *line, "--force -o", out, "--head moments --level 0.5"
    ).stderr
    assert "column flag stays empty" in said and "column set" not in said  # values have none


class TestEvaluate:
    def test_numbers_and_files(self, place: Path, copied: Path) -> None:
        files = {name: copied.with_name(name) for name in ("report.html", "rows.csv", "all.json")}
        said = run_json(
            *["evaluate", copied, place / "val", *model_options(place), "--n-samples 6 --batch-size 4"],
            *["--ood", f"noise={place / 'flat'}", "--ood", f"more={place / 'train'}"],
            *["--report", files["report.html"], "--csv", files["rows.csv"], "--json-file", files["all.json"]],
        )
        x, y = tensors(place / "val")
        with torch.no_grad():
            plain = trained(place)(x).double()
        alone = said["quality"]["model alone"]
        assert alone["accuracy"] == pytest.approx(float((plain.argmax(1) == y).double().mean()))
        assert alone["nll"] == pytest.approx(float(nn.functional.cross_entropy(plain, y)), rel=1e-5)
        predictor = uq.wrap(trained(place), uq.load(copied, trained(place)), n_samples=6)
        with torch.no_grad():
            probs = predictor.outputs(x).double().softmax(-1).mean(0)
        expected = float(nn.functional.nll_loss(probs.log(), y))
        assert said["quality"]["inf, sampling"]["nll"] == pytest.approx(expected, rel=1e-5)
        assert said["foreign"]["inf, sampling"].keys() == {"noise", "more"}
        assert said["inputs"] == {"test": 18, "noise": 5, "more": 36}
        assert said["referred"] == [] and said["written"] == [str(path) for path in files.values()]
        written = json.loads(files["all.json"].read_text())
        assert written["quality"] == said["quality"]
        assert {row["model"] for row in table(files["rows.csv"])} == {"model alone", "inf, sampling"}
        page = files["report.html"].read_text()
        assert page.lstrip().lower().startswith("<!doctype html") and "data:image/" in page
        assert copied.read_bytes() == (place / "m.h5").read_bytes()

    def test_what_is_referred(self, place: Path, copied: Path) -> None:
        options = [*model_options(place), "--n-samples 6"]
        run("calibrate", copied, place / "val", *options)
        page = copied.with_suffix(".html")
        common = ["evaluate", copied, place / "train", *options, "--ood", f"noise={place / 'flat'}"]
        result = run(*common, "--referral-rate 0.3 --report", page)
        assert "Referred by the held-out scores" in result.stdout and "model alone" in result.stdout
        assert "Referred by the held-out scores" in page.read_text()
        said = run_json(*common, "--referral-rate 0.3")["referred"]
        assert [row["data"] for row in said] == ["test", "noise"]
        posterior = uq.load(copied, trained(place))
        flags = uq.Referral(0.3)(uq.wrap(trained(place), posterior)(tensors(place / "train")[0]))
        assert said[0]["referred"] == pytest.approx(float(flags.double().mean()))
        assert "Referral is left out. A rate of 0.05 needs more" in run(*common).stderr
        aim = "--referral-accuracy 0.1 --referral-confidence 0.3 --referral-score entropy"
        said = run_json(*common, aim)["referred"]
        sure = uq.Referral(accuracy=0.1, confidence=0.3, score="entropy")
        flags = sure(uq.wrap(trained(place), posterior)(tensors(place / "train")[0]))
        assert said[0]["referred"] == pytest.approx(float(flags.double().mean()))

    def test_labels_are_needed(self, place: Path, copied: Path) -> None:
        said = failure("evaluate", copied, place / "flat", *model_options(place))
        assert "For an evaluation data need labels" in said
        said = failure(
            "evaluate", copied, place / "val", *model_options(place), "--ood", f"x={place / 'gone'}"
        )
        assert f"There is no folder '{place / 'gone'}'" in said


def test_an_update_is_that_of_the_library(place: Path, tmp_path: Path) -> None:
    file, out, options = tmp_path / "m.h5", tmp_path / "less.h5", model_options(place)
    common = ["--method diag --prior-precision 5.0 --fisher exact --save-dtype bfloat16"]
    run("fit", place / "train", *options, *common, "-o", file)
    model = trained(place)
    told = run("update", file, place / "val", *options).stdout
    assert "Added 18 samples; the posterior has 54 now." in told and f"Written to {file}." in told
    updated = uq.load(file, model)
    assert updated.prior_precision == 5.0 and updated.scale == 54
    # a few samples among many are less than bfloat16 resolves
    formats = {t["dtype"] for b in uq.inspect(file)["blocks"].values() for t in b["tensors"].values()}
    assert formats == {"float32"}
    run("fit", place / "train", *options, "--method diag --prior-precision 5 --fisher exact --force -o", file)
    run("update", file, place / "val", *options)
    both = [*loader(place, "train"), *loader(place, "val")]
    kwargs: dict[str, Any] = {"fisher": "exact", "prior_precision": 5.0, "progress": False}
    assert_same_posterior(uq.load(file, model), uq.fit(model, both, "diag", **kwargs), 1e-5)
    summary = run_json("update", file, place / "train", *options, "--remove -o", out)
    assert (summary["changed"], summary["samples"], summary["output"]) == (36, 18, str(out))
    assert uq.load(file, model).evidence.samples == 54
    assert_same_posterior(uq.load(out, model), uq.fit(model, both[-1:], "diag", **kwargs), 1e-4)
    assert "1 update added 18 samples, 1 removal took out 36 samples" in run("inspect", out).stdout


def test_an_update_that_is_refused_leaves_the_file(place: Path, copied: Path) -> None:
    before, options = copied.read_bytes(), model_options(place)
    assert "leaves none" in failure("update", "--remove", copied, place / "train", *options)
    run("fit", place / "train", *options, "--method kfac -o", copied.with_name("k.h5"))
    assert "keep_grams=True" in failure("update", copied.with_name("k.h5"), place / "val", *options)
    assert copied.read_bytes() == before


def test_a_second_command_waits_and_changes_what_the_first_wrote(
    place: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written meanwhile by code that asks for no lock is not written over."""
    options, before = model_options(place), copied.read_bytes()
    inside, waiting = threading.Event(), threading.Event()
    loader = [(x[None], y[None]) for x, y in zip(*tensors(place / "val"), strict=True)]

    def first() -> None:
        with atomic.changing(copied, lambda: None) as check:
            inside.set()
            model = net()
            model.load_state_dict(torch.load(place / "w.pt"))
            added = uq.update(uq.load(copied, model), loader, progress=False)
            assert waiting.wait(60)
            check()
            uq.save(added, copied)

    def told(message: Any, *_: Any, **__: Any) -> None:
        if "waiting for its end" in str(message):
            waiting.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    monkeypatch.setattr(warnings, "warn", told)
    facts = run_json("update", copied, place / "val", *options)
    thread.join()
    samples = uq.inspect(place / "m.h5")["evidence"]["samples"]
    assert facts["samples"] == samples + 2 * 18 and waiting.is_set()

    other = copied.with_name("other.h5")
    other.write_bytes(before)
    update = uq.update

    def slow(*args: Any, **kwargs: Any) -> Any:
        os.replace(other, copied)
        return update(*args, **kwargs)

    monkeypatch.setattr(uq, "update", slow)
    assert "by somebody else since it was read" in failure("update", copied, place / "val", *options)
    assert copied.read_bytes() == before
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for command in (
        ["update", copied, place / "val"],
        ["tune", copied],
        ["calibrate", copied, place / "val"],
    ):
        assert "without torchrun" in main_error(command + options)


def main_error(words: list[Any]) -> str:
    """What a command in one of several processes says, which names its number."""
    with redirect_stderr(StringIO()) as stderr:
        assert main(words_of(words)) == 1
    return stderr.getvalue()


def test_what_would_fail_at_the_end_fails_before_the_work(
    place: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out and foreign data that do not fit."""
    code = copied.with_name("held.py")
    code.write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def labels():\n    return TensorDataset(torch.rand(9, 3, 12, 12), torch.full((9,), 7))\n"
        "def shapes():\n    return TensorDataset(torch.rand(9, 5, 12, 12), torch.zeros(9).long())\n"
        "def bare():\n    return TensorDataset(torch.rand(9, 3, 12, 12))\n"
    )
    monkeypatch.setattr(uq, "fit", lambda *_, **__: pytest.fail("a fit began"))
    monkeypatch.setattr(uq, "tune", lambda *_, **__: pytest.fail("a search began"))
    options = [*model_options(place), "-o", copied.with_name("new.h5")]
    for name, said in {
        "labels": "must lie in 0..2",
        "shapes": "does not fit the model",
        "bare": "no labels",
    }.items():
        assert said in failure("fit", place / "train", *options, "--val-data", f"{code}:{name}")
    monkeypatch.setattr(uq, "evaluate", lambda *_, **__: pytest.fail("the test data were run"))
    evaluate = ["evaluate", copied, place / "val", *model_options(place), "--ood", f"far={code}:shapes"]
    assert f"--ood far: '{code}:shapes' does not fit the model" in failure(*evaluate)


def test_a_fit_that_cannot_be_written_goes_on_from_its_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise uq.PosthocUQError("No space left on device.")

    kept, command = tmp_path / "kept", ["fit", place / "train", *model_options(place), "--prior-precision 5"]
    command += ["--checkpoint", kept, "-o", tmp_path / "p.h5"]
    with monkeypatch.context() as patch:
        patch.setattr(uq, "save", full)
        assert "No space left on device" in failure(*command)
    assert kept.exists() and not (tmp_path / "p.h5").exists()
    with monkeypatch.context() as patch:  # all sweeps are in it
        patch.setattr("posthoc_uq.methods.task.own_batches", lambda *_, **__: pytest.fail("a sweep began"))
        run(*command)
    assert not kept.exists() and (tmp_path / "p.h5").exists()


def test_a_fit_is_not_lost_to_a_narrow_format(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = uq.save

    def refusing(*args: Any, dtype: Any = None, **kwargs: Any) -> None:
        if dtype is not None:
            raise uq.PosthocUQError("Tensor 'diagonal' reaches 1e+09, more than torch.float16 holds.")
        save(*args, **kwargs)

    monkeypatch.setattr(uq, "save", refusing)
    common = [
        *model_options(place),
        "--method diag --prior-precision 1 --save-dtype float16 -o",
        tmp_path / "p.h5",
    ]
    said = run("fit", place / "train", *common).stderr
    assert "Warning: Written in full precision, since: Tensor 'diagonal'" in said
    assert uq.inspect(tmp_path / "p.h5")["method"] == "diag"


def test_images_are_prepared_and_named_as_for_the_fit(place: Path, tmp_path: Path) -> None:
    path, asked = tmp_path / "sized.h5", ["--image-size 12 --mean 0.4 --std 0.5"]
    run_json("fit", place / "train", *model_options(place), *asked, "--prior-precision 5 -o", path)
    facts = uq.load(path, trained(place)).history.fit
    assert (facts["image size"], facts["image mean"], facts["image std"]) == (12, [0.4], [0.5])
    assert facts["class names"] == sorted(item.name for item in (place / "train").iterdir())
    tables = []
    for options in ([], asked, ["--image-size 16"]):
        output = tmp_path / "out.csv"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = run(
                "predict", path, place / "flat", *model_options(place), *options, "-o", output, "--force"
            )
        warned = "was fitted on images prepared as [3 x 12 x 12" in said.stderr or bool(caught)
        assert warned == (options == ["--image-size 16"])
        tables.append(output.read_text())
    assert tables[0] == tables[1] != tables[2]
    assert {row["label_1"] for row in table(tmp_path / "out.csv")} <= set(facts["class names"])


# What is written: never over an input, over another file only with ``--force``.


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("outputs"))
    make_images(folder / "few", CLASSES, 2, 3)
    (folder / "lines.py").write_text(NETS)
    random = np.random.default_rng(0)
    for name in ("data", "held", "new"):
        rows = random.normal(size=(30, 4))
        lines = ["a,b,c,y", *(",".join(f"{value:.4f}" for value in row) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "names.txt").write_text("cat\ndog\nemu\n")
    fit = ["--likelihood regression --target y --method diag --prior-precision 5"]
    run("fit", folder / "data.csv", *_line(folder), *fit, "-o", folder / "p.h5")
    run("fit", folder / "few", *_net(folder), "--method diag --prior-precision 5 -o", folder / "i.h5")
    for name in ("data", "held"):
        run(
            "predict",
            folder / "p.h5",
            folder / f"{name}.csv",
            *_line(folder),
            "-o",
            folder / f"of_{name}.csv",
        )
    return folder


def test_what_a_fit_names_next_runs(desk: Path, tmp_path: Path) -> None:
    """With the data's name put in; no temperature is printed where there are no logits."""
    fit = ["--likelihood regression --target y --method diag --prior-precision 5 -o", tmp_path / "my p.h5"]
    said = run("fit", desk / "data.csv", *_line(desk), *fit).stdout
    named = said[said.index("Next, with held-out data as HELD_OUT.csv: posthoc-uq ") :].split("posthoc-uq ")[
        1
    ]
    words = [str(desk / "held.csv") if word == "HELD_OUT.csv" else word for word in shlex.split(named)]
    assert "promised: intervals" in run(*words).stdout
    said += run("tune", tmp_path / "my p.h5", *_line(desk), "--data", desk / "new.csv").stdout
    said += run("inspect", tmp_path / "my p.h5").stdout
    assert "noise variance" in said and "temperature" not in said
    net = [*_net(desk), "--val-data", desk / "val", "--method diag --prior-precision 5"]
    said = run("fit", desk / "few", *net, "-o", tmp_path / "i.h5").stdout
    assert f"posthoc-uq evaluate {tmp_path / 'i.h5'} TEST --model" in said
    assert "temperature" in run("inspect", tmp_path / "i.h5").stdout


def _line(desk: Path) -> list[Any]:
    return ["--model", f"{desk / 'lines.py'}:one"]


def _net(desk: Path) -> list[Any]:
    return ["--model", f"{desk / 'nets.py'}:net", "--weights", desk / "w.pt", "--workers 0"]


def _digests(desk: Path) -> dict[Path, str]:
    files = (path for path in desk.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: sha256(path.read_bytes()).hexdigest() for path in files}


def _calls(desk: Path) -> list[tuple[list[Any], str, list[str]]]:
    """Commands, the option that names what they write, and their inputs."""
    line, net, posterior = _line(desk), _net(desk), desk / "p.h5"
    names = ["--class-names", desk / "names.txt"]
    fit = ["fit", desk / "few", *net, "--val-data", desk / "val"]
    images = ["predict", desk / "i.h5", desk / "few", *net, *names]
    evaluate = ["evaluate", posterior, desk / "held.csv", *line, "--ood", f"other={desk / 'new.csv'}"]
    measured = ["p.h5", "held.csv", "new.csv", "lines.py"]
    return [
        (fit, "-o", ["few/cat/0.png", "val/dog/1.png", "w.pt", "nets.py"]),
        ([*fit, "-o", desk / "other.h5"], "--checkpoint", ["few/cat/0.png", "w.pt", "nets.py"]),
        (["tune", posterior, *line, "--data", desk / "held.csv"], "-o", ["p.h5", "held.csv", "lines.py"]),
        (["predict", posterior, desk / "new.csv", *line], "-o", ["p.h5", "new.csv", "lines.py"]),
        (images, "-o", ["i.h5", "few/emu/1.png", "w.pt", "nets.py", "names.txt"]),
        (evaluate, "--report", measured),
        (evaluate, "--csv", measured),
        (evaluate, "--json-file", measured),
        (["update", posterior, desk / "new.csv", *line], "-o", ["p.h5", "new.csv", "lines.py"]),
        (["update", posterior, desk / "data.csv", *line, "--remove"], "-o", ["p.h5", "data.csv", "lines.py"]),
        (
            ["monitor", desk / "of_data.csv", "--reference", desk / "of_held.csv"],
            "-o",
            ["of_data.csv", "of_held.csv"],
        ),
        (["serve", posterior, *line], "--log", ["p.h5", "lines.py"]),
    ]


def test_no_command_writes_over_an_input(desk: Path) -> None:
    before, refused = _digests(desk), 0
    for command, option, inputs in _calls(desk):
        force = [] if option == "--log" else ["--force"]
        for name in inputs:
            said = failure(*command, option, desk / name, *force)
            assert "is an input of this command" in said and name in said, (command, name)
            refused += 1
    assert _digests(desk) == before and refused == 40
    assert not (desk / "other.h5").exists()


def test_the_configuration_is_an_input(desk: Path, tmp_path: Path) -> None:
    path = tmp_path / "fit.yaml"
    for text, output in (("force: true\n", ["-o", path]), (f"force: true\noutput: {path}\n", [])):
        path.write_text(text)
        said = failure("fit", desk / "few", *_net(desk), "--config", path, *output)
        assert "is an input of this command" in said and path.read_text() == text


def test_an_input_is_known_by_any_name(desk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = _digests(desk)
    (tmp_path / "link.csv").symlink_to(desk / "new.csv")
    os.link(desk / "new.csv", tmp_path / "hard.csv")
    (tmp_path / "folder").symlink_to(desk)
    monkeypatch.chdir(desk)
    command = ["predict", "p.h5", "new.csv", "--model lines:one --force -o"]
    others = [desk / "few" / ".." / "new.csv", tmp_path / "folder" / "new.csv", "lines.py", "./p.h5"]
    for name in (tmp_path / "link.csv", tmp_path / "hard.csv", *others):
        assert "is an input of this command" in failure(*command, name)
    assert _digests(desk) == before


def test_another_file_is_written_over_with_force_alone(desk: Path, tmp_path: Path) -> None:
    for command, option, _ in _calls(desk):
        other = tmp_path / "other.txt"
        other.write_text("of somebody else")
        said = failure(*command, option, other)
        if option in ("--checkpoint", "--log"):  # refused where they are opened
            assert str(other) in said
        else:
            assert (
                said
                == f"Error: {'--output' if option == '-o' else option}: '{other}' is there already; give another "
                "name, or --force to write over it.\n"
            )
        assert other.read_text() == "of somebody else"
    run("predict", desk / "p.h5", desk / "new.csv", *_line(desk), "-o", other, "--force")
    assert other.read_text().startswith("file,mean,")


def test_a_figure_has_the_ending_of_one(desk: Path, tmp_path: Path) -> None:
    command = ["monitor", desk / "of_data.csv", "--reference", desk / "of_held.csv", "-o"]
    line = misuse(*command, tmp_path / "d.txt")
    assert "a figure is .png, .svg or .pdf" in line and not list(tmp_path.iterdir())
    for name, start in (("d", b"\x89PNG"), ("d.PDF", b"%PDF")):
        run(*command, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_a_monitor_goes_on_from_its_state(desk: Path, tmp_path: Path) -> None:
    lines = (desk / "of_data.csv").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (tmp_path / "first.csv").write_text("".join(lines[:half]))
    (tmp_path / "second.csv").write_text(lines[0] + "".join(lines[half:]))
    state, reference = ["--state", tmp_path / "state.json"], ["--reference", desk / "of_held.csv"]
    assert "is needed to begin" in misuse("monitor", tmp_path / "first.csv", *state)
    run("monitor", tmp_path / "first.csv", *reference, *state)
    found = json.loads(run("monitor", tmp_path / "second.csv", *state, "--json").stdout)
    whole = json.loads(run("monitor", desk / "of_data.csv", *reference, "--json").stdout)
    assert found["inputs"] == whole["inputs"] == len(lines) - 1
    assert found["evidence"] == pytest.approx(whole["evidence"])
    said = misuse("monitor", tmp_path / "second.csv", *state, "--false-alarm-every", "7")
    assert "was begun with 100000" in said
    (tmp_path / "state.json").write_text("{")
    assert "is no JSON file of a monitor's state" in failure("monitor", tmp_path / "second.csv", *state)


def test_two_outputs_are_two_files(desk: Path, tmp_path: Path) -> None:
    command = ["evaluate", desk / "p.h5", desk / "held.csv", *_line(desk), "--report"]
    said = failure(*command, tmp_path / "Page.html", "--csv", tmp_path / "page.html")
    assert said.startswith("Error: --csv and --report name the same file")
    (tmp_path / "a.html").write_text("")
    os.link(tmp_path / "a.html", tmp_path / "b.html")
    said = failure(*command, tmp_path / "a.html", "--json-file", tmp_path / "b.html", "--force")
    assert said.startswith("Error: --json-file and --report name the same file")
    fit = ["fit", desk / "few", *_net(desk), "--checkpoint", tmp_path / "x.h5", "-o", tmp_path / "x.h5"]
    assert "--checkpoint and --output name the same file" in failure(*fit)
    assert not (tmp_path / "x.h5").exists()


def _several(option: Any) -> list[Any]:
    parts = is_dataclass(option.kind) and option.kind is not Choice
    return list(options_of(option.kind)) if parts else [option]


def test_every_option_that_names_a_file_is_known() -> None:
    no_files = {
        "device",
        "data_root",
        "split",
        "val_split",
        "host",
        "maps",
        "weights_prefix",
        "referral_score",
    }
    for name in COMMANDS:
        for option in options_of(getattr(commands, name)):
            for own in _several(option):
                if own.kind in (str, Optional[str]):  # noqa: UP045
                    known = role_of(own.hint) is not None or own.name in no_files
                    known = known or (name, own.name) == ("demo", "output")
                    assert known, f"{name}: is {own.name} the name of a file?"


def test_maps_are_written_over_nothing(desk: Path, tmp_path: Path) -> None:
    code = "from torch import nn\n\n\ndef pixels():\n    return nn.Conv2d(3, 3, 1)\n"
    (tmp_path / "pixels.py").write_text(code)
    streets = tmp_path / "streets"
    for kind, mode in (("images", "RGB"), ("masks", "L")):
        (streets / kind / "class").mkdir(parents=True)
        for name in ("a.png", "class/a.png"):
            Image.new(mode, (6, 6)).save(streets / kind / name)
    model = [
        "--model",
        f"{tmp_path / 'pixels.py'}:pixels",
        "--weights",
        tmp_path / "pixels.pt",
        "--workers 0",
    ]
    torch.save(torch.nn.Conv2d(3, 3, 1).state_dict(), tmp_path / "pixels.pt")
    run("fit", streets, *model, "--method diag --prior-precision 5 -o", tmp_path / "s.h5")
    images, before = streets / "images", _digests(streets)
    common = ["predict", tmp_path / "s.h5", images, *model, "-o", tmp_path / "s.csv", "--n-samples 2 --maps"]
    said = failure(*common, images, "--force")  # its map of a.png is class/a.png, an image
    assert "--maps: " in said and "is an input of this command" in said
    assert _digests(streets) == before
    run(*common, tmp_path / "maps")
    assert "--maps: " in failure(*common, tmp_path / "maps", "--output", tmp_path / "t.csv")
    run(*common, tmp_path / "maps", "--force")
