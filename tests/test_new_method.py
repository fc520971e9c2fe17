"""A method is one file and one row (here the decorator `register_method`): those of ``isotropic_method.py`` and
``drawn_method.py`` pass all that every method must, with no change anywhere.

| a new | the plan | takes |
| --- | --- | --- |
| Laplace method, `Isotropic` | 40 lines | 40 lines, 18 of them imports |
| trained method, `SpikeAndSlab` | one file with options, loss, blocks | 64 lines without imports |
| block of its own, `SpikeBlock` | perhaps 60 | 47 lines; it can be drawn from, and nothing else |

They are registered in processes of their own, or for the time of a test.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run
from networks import batches, inputs_of, mlp, registries_restored, targets_of

import posthoc_uq as uq
from posthoc_uq.app import main
from posthoc_uq.heads import HEADS
from posthoc_uq.methods import METHODS, Laplace, squares_of
from posthoc_uq.posteriors import FAMILIES

TESTS = Path(__file__).parent
PLUGINS = "isotropic_method", "drawn_method", "plain_draws_head"


@pytest.fixture
def isotropic() -> Iterator[type[Laplace]]:
    """The method, registered for a test."""
    with registries_restored():
        sys.modules.pop("isotropic_method", None)
        yield importlib.import_module("isotropic_method").Isotropic
    assert "isotropic" not in METHODS and "isotropic" not in FAMILIES


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the tests' folder on its path."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_they_pass_the_conformance_suite() -> None:
    files = sorted(str(path) for path in TESTS.glob("test_conformance*.py"))
    options = [
        "-p",
        "isotropic_method",
        "-p",
        "drawn_method",
        "-p",
        "plain_draws_head",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    options += ["-q", "-m", "not study", "-k", "isotropic or spike_slab or plain_draws"]
    done = in_a_process("-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-5000:]
    last = done.stdout.strip().splitlines()[-1]
    assert int(last.split(" passed")[0].split()[-1]) >= 50, last
    assert "failed" not in last and "error" not in last


@pytest.fixture
def plain_draws() -> Iterator[type[uq.Predictor]]:
    """The head, registered for a test."""
    with registries_restored():
        sys.modules.pop("plain_draws_head", None)
        yield importlib.import_module("plain_draws_head").PlainDraws
    assert "plain_draws" not in HEADS


def test_a_head_is_known_by_its_name(
    plain_draws: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To `wrap`, to searches, which keep it in the file, and to the command line."""
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    posterior = uq.fit(model, data, "diag", prior_precision=4.0, progress=False)
    mean = torch.stack([plain_draws(model, posterior, n_draws=400, seed=s)(x).probs for s in range(2)]).mean(
        0
    )
    exact = uq.wrap(model, posterior, "sampling", n_samples=800)(x).probs
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.03)
    posterior = uq.tune(posterior, data, head="plain_draws", n_draws=5, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    found = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    assert type(found) is plain_draws and found.n_draws == 5
    assert torch.equal(found(x).probs, uq.wrap(model, posterior)(x).probs)
    main(["predict", "--help"])
    assert "plain_draws" in capsys.readouterr().out
    with pytest.raises(uq.PosthocUQError, match="There is a head 'sampling' already"):
        uq.register_head(type("Other", (plain_draws,), {"head": "sampling"}))
    HEADS.pop("plain_draws")
    with pytest.raises(uq.CorruptPosteriorError, match="head"):
        uq.load(tmp_path / "p.h5", model)


def test_it_is_the_mean_of_the_diagonal(isotropic: Any) -> None:
    """And predicts through every head, is saved and loaded, and says in its file what it is."""
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    options: dict[str, Any] = {"prior_precision": 4.0, "fisher": "exact", "progress": False}
    diagonal = uq.fit(model, data, "diag", **options)
    posterior = uq.fit(model, data, "isotropic", share=0.5, **options)
    for name, block in diagonal.blocks.items():
        found, exact = posterior.blocks[name].tensors()["diagonal"], block.tensors()["diagonal"]
        torch.testing.assert_close(found, torch.full_like(exact, 0.5 * float(exact.mean())))
    for head in HEADS:
        probs = uq.wrap(model, posterior, head)(x).probs
        assert probs.shape == (24, 3) and bool(torch.isfinite(probs).all())


def test_its_file_needs_the_method(isotropic: Any, tmp_path: Path) -> None:
    model, x = mlp(), inputs_of(4)
    posterior = uq.fit(model, [(x, torch.arange(24) % 3)], isotropic(), prior_precision=4.0, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.method == "isotropic" == uq.inspect(tmp_path / "p.h5")["method"]
    assert torch.equal(loaded.variance()["0.weight"], posterior.variance()["0.weight"])
    with registries_restored():
        del METHODS["isotropic"], FAMILIES["isotropic"]
        with pytest.raises(uq.CorruptPosteriorError):
            uq.load(tmp_path / "p.h5", model)


def test_the_command_line_shows_it(isotropic: Any) -> None:
    shown = run("fit", "--method", "isotropic", "--help").stdout
    assert "isotropic" in shown and "--method.share" in shown


@pytest.mark.parametrize("name", METHODS)
def test_the_documents_name_it(name: str) -> None:
    """The README names every method of the package; the documents have a row, and a page or a part of one, for each."""
    kind, root = METHODS[name], TESTS.parent
    if not kind.__module__.startswith("posthoc_uq."):
        return
    readme = (root / "README.md").read_text(encoding="utf-8").partition("\n## Methods\n")[2]
    assert f"`uq.{kind.__name__}()`" in readme.partition("\n## ")[0]
    folder = root / "docs" / "methods"
    family = (folder / "index.md").read_text(encoding="utf-8").partition("\n## The family\n")[2]
    row = re.search(rf'\n\| \[`"{name}"`\]\((\w+\.md)', family.partition("\n## ")[0])
    assert row
    page = (folder / row[1]).read_text(encoding="utf-8")
    assert f"uq.{kind.__name__}(" in page and f'"{name}"' in page and "\n## Formula" in page


def test_two_methods_cannot_have_one_name(isotropic: Any) -> None:
    for name, words in (("diag", "There is a method 'diag' already"), ("No name", "1 to 16 small letters")):
        with pytest.raises(uq.PosthocUQError, match=words):
            uq.register_method(type("Other", (isotropic,), {"name": name}))
    assert METHODS["diag"] is uq.Diagonal


@pytest.mark.filterwarnings("error")
def test_held_out_data_that_tune_nothing_are_kept_for_promises() -> None:
    """A posterior that can only be drawn from, of counts: no width, no temperature, no noise."""
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "poisson"))
    with registries_restored():
        sys.modules.pop("drawn_method", None)
        block = importlib.import_module("drawn_method").SpikeBlock

        @dataclass(frozen=True, kw_only=True)
        class Still(Laplace):
            name = "still"
            block_kinds = ("spike_slab",)
            tunable = frozenset({"noise_scale", "temperature"})

            def blocks(self, task: Any) -> Any:
                sums, samples = self.sweep(task, {})
                return {n: block(s[0].diagonal(samples) * 0, *[torch.ones(task.layers[n].matrix_shape)] * 2)
                        for n, s in sums.items()}  # fmt: skip

            def accumulators(self, layer: Any, task: Any, basis: Any) -> Any:
                return [squares_of(layer, task)]

            @property
            def head(self) -> str:
                return "sampling"

        uq.register_method(Still)
        posterior = uq.fit(model, data, "still", likelihood="poisson", val_loader=data, progress=False)
        prediction = uq.wrap(model, posterior)(x)
        assert prediction.mean.shape == (24, 3) and not posterior.history.tuning
        assert prediction.interval(0.5)[0].shape == (24, 3)  # by the scores of the other half of the data


def test_a_training_of_ones_own_narrows_what_it_can() -> None:
    """Held-out data choose its epoch, and its loss falls below that of the start."""
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    with registries_restored():
        sys.modules.pop("drawn_method", None)
        method = importlib.import_module("drawn_method").SpikeAndSlab(
            epochs=40, log_variance_lr=0.1, kept=1.0
        )
        posterior = uq.fit(model, data, method, val_loader=data, progress=False)
    history = posterior.history.fit
    assert history["loss"][-1] < history["loss"][0] - 1 and 1 <= history["epoch taken"] <= 40
    assert len(history["validation NLL"]) == 40
