"""Attacks on the command line: inputs named as outputs, hostile folders, pipes, cells and files of strangers.

    OMP_NUM_THREADS=1 python benchmarks/attacks/command_line.py
    OMP_NUM_THREADS=1 python benchmarks/attacks/command_line.py --smoke

Every try is one call of `posthoc_uq.cli.main` in a forked process with a time limit, in a temporary folder that the
script fills itself. A bad outcome is an input whose bytes changed, a foreign file that was written over without
``--force``, a call that did not end in time, an error that is not one sentence, a wrong count, a cell that a
spreadsheet would compute, or code, programs and files that were used though nobody named them. Needs fork, symbolic
links and pipes (Linux, macOS).
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import posthoc_uq as uq
import posthoc_uq.cli
from posthoc_uq.cli import main as command_line
from posthoc_uq.core.tables import text_table

LIMIT = 60.0  # seconds that one call may take
NETS = """
import pathlib
import torch
from torch import nn

pathlib.Path(__file__).with_name("imported").touch()


def line():
    return nn.Linear(2, 1)


def three():
    return nn.Linear(2, 3)


def net():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
"""
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
FORMULAS = ("=", "+", "@", "\t", "\r", "-")


@dataclass
class Result:
    """What a call did: its exit code (None if it did not end) and what it printed."""

    code: int | None
    text: str

    @property
    def raw(self) -> bool:
        """Whether it ended in an error that is no sentence of the library."""
        return (
            "Traceback" in self.text
            or "(--debug shows where.)" in self.text
            or self.code not in (0, 1, 2, 3, None)
        )


@dataclass
class Count:
    """Tries of one attack, and what went wrong."""

    tries: int = 0
    bad: list[str] = field(default_factory=list)


COUNTS: dict[str, Count] = {}
SMOKE = "--smoke" in sys.argv


def count(attack: str, what: str, complaint: str | None) -> None:
    """Add a try; a complaint makes it a bad outcome."""
    entry = COUNTS.setdefault(attack, Count())
    entry.tries += 1
    if complaint:
        entry.bad.append(f"{what}: {complaint}")


def _child(arguments: Sequence[str], folder: str, log: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    code: object = 1
    try:
        code = command_line(list(arguments))
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        print("Traceback", repr(error), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def call(folder: Path, *arguments: object, limit: float = LIMIT, **environment: str) -> Result:
    """One call of the command line in `folder`."""
    log = folder.parent / "said.txt"
    context = multiprocessing.get_context("fork")
    process = context.Process(
        target=_child, args=([str(a) for a in arguments], str(folder), str(log), environment)
    )
    process.start()
    process.join(limit)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)  # with its own child processes
        process.join()
        return Result(None, log.read_text(errors="replace"))
    return Result(process.exitcode, log.read_text(errors="replace"))


def done(folder: Path, *arguments: object) -> None:
    """A call that must succeed."""
    result = call(folder, *arguments)
    if result.code != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{result.text}")


def write_table(path: Path, rows: int, seed: int, label: Sequence[str] = ()) -> None:
    """Columns a, b and y; y is a sum, or one of the labels in turn."""
    x = np.random.default_rng(seed).normal(size=(rows, 2))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "y"])
        writer.writerows(
            [f"{a:.4f}", f"{b:.4f}", label[i % len(label)] if label else f"{a + b:.4f}"]
            for i, (a, b) in enumerate(x)
        )


def write_images(folder: Path, count: int, seed: int = 0) -> None:
    """Noise, as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (count, 8, 8, 3)).astype(np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")


def make_place(folder: Path) -> None:
    """Code, weights, tables, images and posteriors of the script's own."""
    folder.mkdir()
    (folder / "nets.py").write_text(NETS)
    (folder / "notes.txt").write_text("of somebody else\n")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, model in (("w", nn.Linear(2, 1)), ("w3", nn.Linear(2, 3)), ("wi", nn.Linear(3, 3))):
            state = model.state_dict()
            torch.save(
                {f"2.{key}": value for key, value in state.items()} if name == "wi" else state,
                folder / f"{name}.pt",
            )
    write_table(folder / "data.csv", 60, 0)
    write_table(folder / "held.csv", 40, 1)
    (folder / "names.txt").write_text("one\n")
    for number, name in enumerate(("ant", "bee", "cat")):
        write_images(folder / "photos" / name, 5, number)
    line = ["--model", "nets.py:line", "--weights", "w.pt"]
    done(
        folder,
        "fit",
        "data.csv",
        "--target",
        "y",
        "--likelihood",
        "regression",
        "--method",
        "diag",
        *line,
        "-o",
        "p.h5",
    )
    done(folder, "predict", "p.h5", "data.csv", *line, "-o", "a.csv")
    done(folder, "predict", "p.h5", "held.csv", *line, "-o", "b.csv")
    net = ["--model", "nets.py:net", "--weights", "wi.pt"]
    done(folder, "fit", "photos", "--method", "diag", *net, "-o", "i.h5")


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file in a folder; links and pipes aside."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


LINE = ("--model", "nets.py:line", "--weights", "w.pt")
FIT = (
    "fit",
    "data.csv",
    "--val-data",
    "held.csv",
    "--target",
    "y",
    "--likelihood",
    "regression",
    "--method",
    "diag",
)
LOOK = ("--data", "held.csv", "--no-search", "--referral-rate", "0.1")
NET = ("--model", "nets.py:net", "--weights", "wi.pt")
COMMANDS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "fit -o": ((*FIT, *LINE), "-o", ("data.csv", "held.csv", "w.pt", "nets.py")),
    "fit --checkpoint": (
        (*FIT, *LINE, "-o", "new.h5"),
        "--checkpoint",
        ("data.csv", "held.csv", "w.pt", "nets.py"),
    ),
    "fit of images -o": (("fit", "photos", "--method", "diag", *NET), "-o", ("photos/ant/0.png", "wi.pt")),
    "tune -o": (("tune", "p.h5", *LOOK, *LINE), "-o", ("p.h5", "held.csv", "w.pt", "nets.py")),
    "predict -o": (
        ("predict", "p.h5", "data.csv", *LINE, "--class-names", "names.txt"),
        "-o",
        ("p.h5", "data.csv", "w.pt", "nets.py", "names.txt"),
    ),
    "predict of images -o": (
        ("predict", "i.h5", "photos", *NET),
        "-o",
        ("i.h5", "photos/bee/1.png", "wi.pt"),
    ),
    "evaluate --report": (
        ("evaluate", "p.h5", "held.csv", "--ood", "other=data.csv", *LINE),
        "--report",
        ("p.h5", "held.csv", "data.csv", "w.pt", "nets.py"),
    ),
    "evaluate --csv": (
        ("evaluate", "p.h5", "held.csv", "--ood", "other=data.csv", *LINE),
        "--csv",
        ("p.h5", "held.csv", "data.csv", "w.pt", "nets.py"),
    ),
    "evaluate --json-file": (
        ("evaluate", "p.h5", "held.csv", "--ood", "other=data.csv", *LINE),
        "--json-file",
        ("p.h5", "held.csv", "data.csv", "w.pt", "nets.py"),
    ),
    "update -o": (("update", "p.h5", "held.csv", *LINE), "-o", ("p.h5", "held.csv", "w.pt", "nets.py")),
    "update --remove -o": (
        ("update", "--remove", "p.h5", "data.csv", "--limit", "5", *LINE),
        "-o",
        ("p.h5", "data.csv", "w.pt", "nets.py"),
    ),
    "monitor -o": (("monitor", "a.csv", "--reference", "b.csv"), "-o", ("a.csv", "b.csv")),
    "serve --log": (
        ("serve", "p.h5", *LINE),
        "--log",
        ("p.h5", "w.pt", "nets.py"),
    ),
}


def spellings(place: Path, name: str) -> Iterator[tuple[str, str]]:
    """Ways to name a file: how, and the path."""
    path = place / name
    yield "plain", name
    link = place / f"link{path.suffix}"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    yield "link", link.name
    if not SMOKE:
        yield "other spelling", f"./photos/../{name}"
        hard = place / f"hard{path.suffix}"
        hard.unlink(missing_ok=True)
        os.link(path, hard)
        yield "hard link", hard.name
        capital = path.with_name(path.name.upper())
        if capital.exists():  # a file system that does not tell capital letters
            yield "capitals", str(capital.relative_to(place))


def some(tries: Sequence[Any]) -> Sequence[Any]:
    """All tries, or a few of them."""
    return tries[::4] if SMOKE else tries


def attack_inputs(place: Path, original: Path) -> None:
    """Every command with every input as its output, with and without ``--force``."""
    before = digests(original)
    for command, (arguments, option, inputs) in some(list(COMMANDS.items())):
        for name in some(inputs):
            for force in ((), ("--force",)):
                if force and command == "serve --log":
                    continue
                for how, spelled in spellings(place, name):
                    result = call(place, *arguments, option, spelled, *force)
                    after = digests(place)
                    destroyed = [path for path in before if after.get(path) != before[path]]
                    what = f"{command} {spelled} ({how}{' --force' if force else ''})"
                    count("an input as the output", what, f"destroyed {destroyed}" if destroyed else None)
                    count("... ends in a sentence", what, complaint_of(result))
                    if destroyed:
                        renew(place, original)


def attack_foreign(place: Path, original: Path) -> None:
    """A file of somebody else as the output, without ``--force``."""
    before = digests(original)
    for command, (arguments, option, _) in some(list(COMMANDS.items())):
        result = call(place, *arguments, option, "notes.txt")
        changed = digests(place).get("notes.txt") != before["notes.txt"]
        count("a foreign file as the output", command, "written over" if changed else None)
        count("... ends in a sentence", command, complaint_of(result))
        if changed:
            renew(place, original)


def complaint_of(result: Result) -> str | None:
    """What is wrong with how a call ended, or None."""
    if result.code is None:
        return "did not end"
    return f"raw error: {result.text.strip().splitlines()[-1][:200]}" if result.raw else None


def renew(place: Path, original: Path) -> None:
    """Put back what was there."""
    shutil.rmtree(place)
    shutil.copytree(original, place, symlinks=True)


def predicted_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table of predictions."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def attack_links(place: Path) -> None:
    """Links to folders above, to themselves, and around through other folders."""

    def up(folder: Path) -> None:
        (folder / "up").symlink_to("..")

    def two(folder: Path) -> None:
        (folder / "ant" / "up").symlink_to("../..")
        (folder / "bee" / "up").symlink_to("../..")

    def myself(folder: Path) -> None:
        (folder / "again").symlink_to(".")
        (folder / "inner").symlink_to("ant")

    def around(folder: Path) -> None:
        away = folder.parent / f"{folder.name}_away"
        away.mkdir()
        (away / "back").symlink_to(folder)
        (away / "above").symlink_to("..")
        (folder / "away").symlink_to(away)

    def root(folder: Path) -> None:
        (folder / "root").symlink_to("/")

    spoilers = {
        "up": up,
        "two up": two,
        "itself": myself,
        "around": around,
        "the root": root,
    }
    for name, spoil in some(list(spoilers.items())):
        folder = place / "spoilt" / name.replace(" ", "_")
        shutil.copytree(place / "photos", folder)
        spoil(folder)
        output = place / "spoilt" / f"{folder.name}.csv"
        result = call(place, "predict", "i.h5", folder, *NET, "-o", output, "--workers", 0)
        rows = len(predicted_rows(output))
        wrong = complaint_of(result) or (f"{rows} rows of 15 images" if rows != 15 else None)
        silent = None if "left out" in result.text else "nothing was said of what was left out"
        count("links to folders", name, wrong or silent)


def attack_pipes(place: Path) -> None:
    """Pipes where files are expected."""
    os.mkfifo(place / "pipe.png")
    os.mkfifo(place / "pipe.csv")
    os.mkfifo(place / "pipe.pt")
    os.mkfifo(place / "pipe.h5")
    folder = place / "piped"
    write_images(folder, 3)
    os.mkfifo(folder / "x.png")
    out = place / "out.csv"
    calls = {
        "in a folder": ("predict", "i.h5", folder, *NET, "-o", out),
        "as the image": ("predict", "i.h5", "pipe.png", *NET, "-o", out),
        "as the table": ("predict", "p.h5", "pipe.csv", *LINE, "-o", out),
        "as weights": (
            "predict",
            "p.h5",
            "data.csv",
            "--model",
            "nets.py:line",
            "--weights",
            "pipe.pt",
            "-o",
            out,
        ),
        "as the posterior": ("predict", "pipe.h5", "data.csv", *LINE, "-o", out),
        "to inspect": ("inspect", "pipe.h5"),
        "as names": ("predict", "p.h5", "data.csv", *LINE, "--class-names", "pipe.csv", "-o", out),
        "as the log": ("monitor", "pipe.csv", "--reference", "b.csv", "-o", place / "drift.png"),
        "as the reference": ("monitor", "a.csv", "--reference", "pipe.csv", "-o", place / "drift.png"),
    }
    for name, arguments in some(list(calls.items())):
        result = call(place, *arguments, limit=20)
        count("pipes", name, complaint_of(result) or ("was taken" if result.code == 0 else None))
        out.unlink(missing_ok=True)
    skipped = call(place, "predict", "i.h5", folder, *NET, "-o", out, "--skip-unreadable", limit=20)
    rows = len(predicted_rows(out))
    count("pipes", "left out", complaint_of(skipped) or (f"{rows} rows of 3" if rows != 3 else None))


def attack_postscript(place: Path) -> None:
    """PostScript under an image's name, with a program `gs` that leaves a mark if it is called."""
    programs = place / "programs"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {place / 'gs_was_called'}\nexit 0\n")
    (programs / "gs").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for ending in some((".png", ".jpg", ".tif", ".webp")):
        folder = place / f"postscript{ending}"
        write_images(folder, 2)
        (folder / f"x{ending}").write_bytes(POSTSCRIPT)
        result = call(place, "predict", "i.h5", folder, *NET, "-o", place / "ps.csv", PATH=path)
        called = (place / "gs_was_called").exists()
        (place / "gs_was_called").unlink(missing_ok=True)
        (place / "ps.csv").unlink(missing_ok=True)
        count(
            "PostScript named as an image",
            ending,
            "Ghostscript was called" if called else complaint_of(result),
        )
    data = place / "root" / "ant"
    write_images(data, 2)
    (data / "x.png").write_bytes(POSTSCRIPT)
    named = ("torchvision:ImageFolder", "--data-root", place / "root")
    result = call(place, "predict", "i.h5", *named, *NET, "-o", place / "ps.csv", PATH=path)
    called = (place / "gs_was_called").exists()
    count(
        "PostScript named as an image",
        "torchvision",
        "Ghostscript was called" if called else complaint_of(result),
    )


def attack_labels(place: Path) -> None:
    """Labels and indices that no class has."""
    fit = ("fit", "--target", "y", "--model", "nets.py:three", "--weights", "w3.pt", "--method", "diag")
    for label in some(("1e30", "-1e30", "9" * 40, "1e308", "-1", "7", "nan", "")):
        write_table(place / "labels.csv", 12, 0, [label, "0", "1"])
        output = place / "labels.h5"
        result = call(place, *fit, "labels.csv", "-o", output)
        count(
            "labels of no class", label, complaint_of(result) or ("was taken" if result.code == 0 else None)
        )
        output.unlink(missing_ok=True)
    write_table(place / "labels.csv", 12, 0, ["x", "y", "z"])
    for index in some((10**30, -1, 2**63, 5, 1e30)):
        (place / "map.json").write_text(json.dumps({"x": 0, "y": 1, "z": index}))
        result = call(place, *fit, "labels.csv", "-o", place / "labels.h5", "--class-map", "map.json")
        count(
            "labels of no class",
            f"map {index}",
            complaint_of(result) or ("was taken" if result.code == 0 else None),
        )
    for label in some(("1e30", "1e39", "1e999")):
        write_table(place / "labels.csv", 12, 0, [label, "0", "1"])
        result = call(place, *FIT[:1], "labels.csv", *FIT[4:], *LINE, "-o", place / "labels.h5", "--force")
        count("labels of no class", f"number {label}", complaint_of(result))


def attack_cells(place: Path) -> None:
    """File names, class names and names of data that a spreadsheet would compute."""
    bad = ["=1+1", "+1+1", "@SUM(A1)", "-1+1", "\t=1+1", "=cmd|' !'A0"]
    folder = place / "cells"
    write_images(folder, 1)
    for name in bad:
        shutil.copy(folder / "0.png", folder / f"{name}.png")
    (place / "cells.json").write_text(json.dumps(["=HYPERLINK(1)", "-x", "-3.5"]))
    output = place / "cells.csv"
    result = call(place, "predict", "i.h5", folder, *NET, "-o", output, "--class-names", "cells.json")
    rows = predicted_rows(output)
    for row in rows:
        for column, cell in row.items():
            count("cells that are formulas", f"{column} {cell!r}", formula(cell))
    count(
        "cells that are formulas",
        "predict",
        complaint_of(result) or (None if len(rows) == 7 else f"{len(rows)} rows"),
    )
    output = place / "measures.csv"
    arguments = ("evaluate", "p.h5", "held.csv", *LINE, "--ood", "=1+1=data.csv", "--ood", "@x=data.csv")
    result = call(place, *arguments, "--csv", output)
    for row in predicted_rows(output):
        for column, cell in row.items():
            count("cells that are formulas", f"{column} {cell!r}", formula(cell))
    count("cells that are formulas", "evaluate", complaint_of(result))


def formula(cell: str) -> str | None:
    """Whether a spreadsheet would compute a cell."""
    if not cell.startswith(FORMULAS):
        return None
    try:
        float(cell)
    except ValueError:
        return "is a formula"
    return None if cell.startswith("-") else "is a formula"


def attack_names(place: Path) -> None:
    """A stranger's file that names code, files elsewhere, addresses and very long texts."""
    secret = place.parent / "secret.pt"
    shutil.copy(place / "w.pt", secret)
    strange = place / "strange"
    strange.mkdir()
    (strange / "link.pt").symlink_to(secret)
    os.mkfifo(strange / "pipe.pt")
    (strange / "evil.py").write_text(NETS)
    posterior = uq.load(place / "p.h5", _line(place))
    models: tuple[object, ...] = (
        "evil.py:line",
        "strange.evil:line",
        str(strange / "evil.py") + ":line",
        "timm:hf-hub:nobody/nothing",
        "timm:../../x",
        "torchvision:http://127.0.0.1:9/x",
        "torchvision:resnet18\x1b[2J",
        "https://127.0.0.1:9/evil.py:line",
        "timm:" + "x" * 4000,
        7,
        ["timm:resnet18"],
    )
    weights: tuple[object, ...] = (
        str(secret),
        "../../secret.pt",
        "../w.pt",
        "link.pt",
        "pipe.pt",
        "/dev/zero",
        "http://127.0.0.1:9/w.pt",
        "file:///etc/passwd",
        "C:\\w.pt",
        "..\\w.pt",
        "w\x00.pt",
        "x" * 4000,
        "",
        ".",
        3,
        {"a": 1},
    )
    cases = [(model, "w.pt", False) for model in models] + [
        ("nets.py:line", weight, True) for weight in weights
    ]
    for model, weight, explicit in some(cases):
        posterior.history.fit |= {"model": model, "model weights": weight, "model classes": 10**9}
        try:
            uq.save(posterior, strange / "p.h5")
        except uq.PosthocUQError:
            continue  # such a file is not written, nor read
        (strange / "imported").unlink(missing_ok=True)
        given = ("--model", "strange/nets.py:line") if explicit else ()
        output = place / "strange.csv"
        result = call(place, "predict", strange / "p.h5", "data.csv", *given, "-o", output, limit=30)
        taken = "was taken" if result.code == 0 else None
        imported = "imported code" if not explicit and (strange / "imported").exists() else None
        count(
            "names in a stranger's file",
            f"{str(model)[:60]!r} {str(weight)[:60]!r}",
            complaint_of(result) or imported or taken,
        )
        output.unlink(missing_ok=True)


def _line(place: Path) -> nn.Module:
    model = nn.Linear(2, 1)
    model.load_state_dict(torch.load(place / "w.pt", weights_only=True))
    return model


def run() -> None:
    """All attacks."""
    for module in pkgutil.iter_modules(posthoc_uq.cli.__path__, "posthoc_uq.cli."):
        importlib.import_module(module.name)  # once, and not in every forked process
    with tempfile.TemporaryDirectory() as name:
        original, place = Path(name, "original"), Path(name, "place")
        make_place(original)
        attacks: list[Callable[[Path], None]] = [
            lambda folder: attack_inputs(folder, original),
            lambda folder: attack_foreign(folder, original),
            attack_links,
            attack_pipes,
            attack_postscript,
            attack_labels,
            attack_cells,
            attack_names,
        ]
        for attack in attacks:
            shutil.copytree(original, place, symlinks=True)
            attack(place)
            shutil.rmtree(place)


def main() -> int:
    """Run what was asked for, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a quarter of the tries, in seconds")
    parser.add_argument("--verbose", action="store_true", help="name every bad outcome")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run()
    rows = [[attack, entry.tries, len(entry.bad)] for attack, entry in COUNTS.items()]
    print(text_table(["attack", "tries", "bad outcomes"], rows))
    for attack, entry in COUNTS.items():
        for what in entry.bad if options.verbose else entry.bad[:2]:
            print(f"{attack}: {what}")
    return int(any(entry.bad for entry in COUNTS.values()))


if __name__ == "__main__":
    sys.exit(main())
