"""Every block of the documents runs alone, and so does every example of a public docstring.

What the blocks of a page need stands in one block of the page whose fence says ``python fixture``. It runs once; each
other block runs after it in a process of its own, forked from the fixture's, in a copy of its folder. A word after
``python`` says why a block is not run: it needs a GPU, a server, several processes (``torchrun``) or a package that is
not here (``foreign``). Blocks with the word ``study`` take long and run with the studies.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import socket
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import PAGES, Block, blocks

import posthoc_uq as uq
from posthoc_uq.app import plots
from posthoc_uq.evaluation import metrics

NOT_RUN = ("gpu", "server", "torchrun", "foreign")


def in_a_process(work: Callable[[], Any]) -> str:
    """What went wrong in a forked process that did ``work``, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover (the forked process)
        os.close(reading)
        problem = ""
        try:
            work()
        except SystemExit as end:
            problem = f"it ended with {end.code}" if end.code else ""
        except BaseException:
            problem = traceback.format_exc(limit=-8)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(problem)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        problem = pipe.read()
    status = os.waitpid(child, 0)[1]
    return problem or (f"the process ended with status {status}" if status else "")


def run(block: Block, names: dict[str, Any]) -> None:
    exec(compile(block.content, str(block.place), "exec", dont_inherit=True), names)


def names_of(block: Block | None) -> dict[str, Any]:
    """What a block finds: the names that the page's fixture leaves."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    if block is not None:
        run(block, names)
    return names


def alone(block: Block, names: dict[str, Any], folder: Path, place: Path) -> None:
    """Run a block in a copy of the fixture's folder."""
    shutil.copytree(folder, place)
    os.chdir(place)
    sys.path.insert(0, str(place))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(block, names)


def cases() -> Iterator[Any]:
    """Pages with blocks that run, and once more those of them that have blocks for the studies."""
    for page in PAGES:
        words = [set(block.words) for block in blocks(page) if not set(block.words) & {"fixture", *NOT_RUN}]
        if any("study" not in own for own in words):
            yield pytest.param(page, False, id=page)
        if any("study" in own for own in words):
            yield pytest.param(page, True, id=f"{page}-study", marks=pytest.mark.study)


@pytest.mark.parametrize(("page", "study"), list(cases()))
def test_every_block_of_a_page_runs_alone(
    page: str, study: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixtures = [block for block in blocks(page) if "fixture" in block.words]
    assert len(fixtures) <= 1, "a page has one fixture"
    assert all(set(block.words) <= {"fixture", "study", *NOT_RUN} for block in blocks(page))
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def whole_page() -> None:
        warnings.simplefilter("ignore")
        names = names_of(fixtures[0] if fixtures else None)
        problems: list[str] = []
        for number, block in enumerate(blocks(page)):
            if set(block.words) & {"fixture", *NOT_RUN} or ("study" in block.words) != study:
                continue
            work = functools.partial(alone, block, names, folder, tmp_path / f"block{number}")
            if problem := in_a_process(work):
                problems.append(f"{page}, line {block.line}:\n{problem}")
        if problems:
            raise AssertionError("\n\n".join(problems))

    assert not (problem := in_a_process(whole_page)), problem


@pytest.mark.study
def test_getting_started_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def whole_page() -> None:
        warnings.simplefilter("ignore")
        names = names_of(None)
        for block in blocks("docs/getting_started.md"):
            run(block, names)

    assert not (problem := in_a_process(whole_page)), problem


FIXTURE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
inputs = torch.randn(120, 1, 6, 6)
targets = model(inputs).argmax(1)
train_loader = DataLoader(TensorDataset(inputs[:40], targets[:40]), batch_size=20)
val_loader = DataLoader(TensorDataset(inputs[40:], targets[40:]), batch_size=20)
images, labels = inputs[40:48], targets[40:48]
posterior = uq.fit(model, train_loader, progress=False)
predictor = uq.wrap(model, posterior)
prediction = predictor(images)

regressor = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).eval()
x = torch.linspace(-1, 1, 40).unsqueeze(1)
y = regressor(x).detach() + 0.1 * torch.randn(40, 1)
regression_loader = DataLoader(TensorDataset(x, y), batch_size=20)
regression_posterior = uq.fit(regressor, regression_loader, likelihood="regression", progress=False)
"""
"""What the examples of docstrings find."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import here what blocks use first, so that each forked process need not do it again."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = names_of(Block(Path("fixture"), "python", (), FIXTURE))
        posterior = uq.calibrate(names["posterior"], names["val_loader"], progress=False)
        str(uq.evaluate(uq.wrap(names["model"], posterior), names["val_loader"], progress=False))
        torch.optim.Adam(names["model"].parameters()).zero_grad()


def public() -> dict[str, Any]:
    """The functions and classes of `uq`, of its metrics and of its figures, by name."""
    found = {f"uq.{name}": getattr(uq, name) for name in uq.__all__}
    for module in (metrics, plots):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return {
        name: own
        for name, own in found.items()
        if inspect.isfunction(own) or (inspect.isclass(own) and not issubclass(own, BaseException))
    }


def examples(own: Any) -> list[str]:
    """The blocks of a docstring."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", inspect.getdoc(own) or "", re.M | re.S)
    return [textwrap.dedent(content) for _, content in found]


def test_all_that_is_public_has_an_example() -> None:
    assert [name for name, own in public().items() if not examples(own)] == []


def test_every_example_of_a_docstring_runs(tmp_path: Path) -> None:
    """With names of its own, in a folder of its own; in one process, since many modules load on first use."""

    def all_of_them() -> None:
        warnings.simplefilter("ignore")
        names = names_of(Block(Path("fixture"), "python", (), FIXTURE))
        problems: list[str] = []
        for name, own in public().items():
            for number, content in enumerate(examples(own)):
                place = tmp_path / f"{name}{number}"
                place.mkdir()
                os.chdir(place)
                try:
                    run(Block(Path(name), "python", (), content), dict(names))
                except Exception:
                    problems.append(f"{name}:\n{traceback.format_exc(limit=-8)}")
        if problems:
            raise AssertionError("\n\n".join(problems))

    assert not (problem := in_a_process(all_of_them)), problem
