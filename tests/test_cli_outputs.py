"""What commands write: never over an input, over another file only with ``--force``."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from cli_helpers import CLASSES, NETS, failure, make_images, make_place, run
from PIL import Image

from posthoc_uq.cli.entry import commands
from posthoc_uq.cli.overwriting import CODE, INPUTS, KEPT, OUTPUTS

NOTHING_TO_READ_OR_WRITE = {"device", "data_root", "split", "val_split", "host", "title", "maps", "folder"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("outputs"))
    make_images(folder / "few", CLASSES, 2, 3)
    (folder / "lines.py").write_text(NETS)
    random = np.random.default_rng(0)
    for name in ("data", "held", "new"):
        rows = random.normal(size=(30, 4))
        lines = ["a,b,c,y", *(",".join(f"{value:.4f}" for value in row) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "names.txt").write_text("cat\ndog\nemu\n")
    fit = ["--likelihood", "regression", "--target", "y", "--method", "diag", "--prior-precision", 5]
    run("fit", folder / "data.csv", *_line(folder), *fit, "-o", folder / "p.h5")
    run(
        "fit",
        folder / "few",
        *_net(folder),
        "--method",
        "diag",
        "--prior-precision",
        5,
        "-o",
        folder / "i.h5",
    )
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


def _line(place: Path) -> list[Any]:
    return ["--model", f"{place / 'lines.py'}:one"]


def _net(place: Path) -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:net", "--weights", place / "w.pt", "--workers", 0]


def _digests(place: Path) -> dict[Path, str]:
    files = (path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: sha256(path.read_bytes()).hexdigest() for path in files}


def _calls(place: Path) -> list[tuple[list[Any], str, list[str]]]:
    """Commands, the option that names what they write, and their inputs."""
    line, net, posterior = _line(place), _net(place), place / "p.h5"
    names = ["--class-names", place / "names.txt"]
    fit = ["fit", place / "few", *net, "--val-data", place / "val"]
    images = ["predict", place / "i.h5", place / "few", *net, *names]
    evaluate = ["evaluate", posterior, place / "held.csv", *line, "--ood", f"other={place / 'new.csv'}"]
    measured = ["p.h5", "held.csv", "new.csv", "lines.py"]
    return [
        (fit, "-o", ["few/cat/0.png", "val/dog/1.png", "w.pt", "nets.py"]),
        ([*fit, "-o", place / "other.h5"], "--checkpoint", ["few/cat/0.png", "w.pt", "nets.py"]),
        (["tune", posterior, *line, "--data", place / "held.csv"], "-o", ["p.h5", "held.csv", "lines.py"]),
        (["predict", posterior, place / "new.csv", *line], "-o", ["p.h5", "new.csv", "lines.py"]),
        (images, "-o", ["i.h5", "few/emu/1.png", "w.pt", "nets.py", "names.txt"]),
        (evaluate, "--report", measured),
        (evaluate, "--csv", measured),
        (evaluate, "--json-file", measured),
        (["update", posterior, place / "new.csv", *line], "-o", ["p.h5", "new.csv", "lines.py"]),
        (
            ["update", "--remove", posterior, place / "data.csv", *line],
            "-o",
            ["p.h5", "data.csv", "lines.py"],
        ),
        (
            ["monitor", place / "of_data.csv", "--reference", place / "of_held.csv"],
            "-o",
            ["of_data.csv", "of_held.csv"],
        ),
        (
            ["serve", posterior, *line],
            "--log",
            ["p.h5", "lines.py"],
        ),
    ]


def test_no_command_writes_over_an_input(place: Path) -> None:
    before, refused = _digests(place), 0
    for command, option, inputs in _calls(place):
        force = [] if option == "--log" else ["--force"]
        for name in inputs:
            said = failure(*command, option, place / name, *force)
            assert "is an input of this command" in said and name in said, (command, name)
            refused += 1
    assert _digests(place) == before and refused == 40
    assert not (place / "other.h5").exists()


def test_an_input_is_known_by_any_name(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = _digests(place)
    (tmp_path / "link.csv").symlink_to(place / "new.csv")
    os.link(place / "new.csv", tmp_path / "hard.csv")
    (tmp_path / "folder").symlink_to(place)
    monkeypatch.chdir(place)
    command = ["predict", "p.h5", "new.csv", "--model", "lines:one", "--force", "-o"]
    others = [place / "few" / ".." / "new.csv", tmp_path / "folder" / "new.csv", "lines.py", "./p.h5"]
    for name in (tmp_path / "link.csv", tmp_path / "hard.csv", *others):
        assert "is an input of this command" in failure(*command, name)
    assert _digests(place) == before


def test_another_file_is_written_over_with_force_alone(place: Path, tmp_path: Path) -> None:
    for command, option, _ in _calls(place):
        other = tmp_path / "other.txt"
        other.write_text("of somebody else")
        said = failure(*command, option, other)
        if option in KEPT.values():  # refused where they are opened
            assert str(other) in said
        else:
            assert (
                said
                == f"Error: {'--output' if option == '-o' else option}: '{other}' is there already; "
                + ("give another name, or --force to write over it.\n")
            )
        assert other.read_text() == "of somebody else"
    run("predict", place / "p.h5", place / "new.csv", *_line(place), "-o", other, "--force")
    assert other.read_text().startswith("file,mean,")


def test_two_outputs_are_two_files(place: Path, tmp_path: Path) -> None:
    command = ["evaluate", place / "p.h5", place / "held.csv", *_line(place), "--report"]
    said = failure(*command, tmp_path / "Page.html", "--csv", tmp_path / "page.html")
    assert said.startswith("Error: --csv and --report name the same file")
    (tmp_path / "a.html").write_text("")
    os.link(tmp_path / "a.html", tmp_path / "b.html")
    said = failure(*command, tmp_path / "a.html", "--json-file", tmp_path / "b.html", "--force")
    assert said.startswith("Error: --json-file and --report name the same file")
    fit = ["fit", place / "few", *_net(place), "--checkpoint", tmp_path / "x.h5", "-o", tmp_path / "x.h5"]
    assert "--checkpoint and --output name the same file" in failure(*fit)
    assert not (tmp_path / "x.h5").exists()


def test_a_posterior_that_is_changed_is_written_again(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.h5"
    file.write_bytes((place / "p.h5").read_bytes())
    before = file.read_bytes()
    run("update", file, place / "new.csv", *_line(place))
    assert file.read_bytes() != before


def test_every_option_that_names_a_file_is_known() -> None:
    known = {*OUTPUTS, *KEPT, *INPUTS, *CODE, *NOTHING_TO_READ_OR_WRITE}
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            text = isinstance(parameter.type, (click.types.StringParamType, click.Path))
            if text and not parameter.multiple:
                assert parameter.name in known, f"{name}: is {parameter.name} the name of a file?"


def test_maps_are_written_over_nothing(place: Path, tmp_path: Path) -> None:
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
        "--workers",
        0,
    ]
    torch.save(torch.nn.Conv2d(3, 3, 1).state_dict(), tmp_path / "pixels.pt")
    run("fit", streets, *model, "--method", "diag", "--prior-precision", 5, "-o", tmp_path / "s.h5")
    images, before = streets / "images", _digests(streets)
    common = [
        "predict",
        tmp_path / "s.h5",
        images,
        *model,
        "-o",
        tmp_path / "s.csv",
        "--n-samples",
        2,
        "--maps",
    ]
    said = failure(*common, images, "--force")  # its map of a.png is class/a.png, an image
    assert "--maps: " in said and "is an input of this command" in said
    assert _digests(streets) == before
    run(*common, tmp_path / "maps")
    assert "--maps: " in failure(*common, tmp_path / "maps", "--output", tmp_path / "t.csv")
    run(*common, tmp_path / "maps", "--force")
