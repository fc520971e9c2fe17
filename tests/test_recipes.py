"""Every recipe: its options, and the table and the training loop that all share."""

from __future__ import annotations

import argparse
import errno
from importlib import import_module
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from recipe_helpers import RECIPES, write_fashion_mnist
from torch import nn

import posthoc_uq as uq
from recipes import common
from recipes.fashion_mnist.data import Labelled

SCRIPTS = sorted(
    ".".join(path.relative_to(RECIPES).with_suffix("").parts)
    for path in RECIPES.glob("*/*.py")
    if ("common.parser(" in (text := path.read_text()) or "= parser(" in text) and "def main(" in text
)


BESIDE = ("message_passing.beside_ivon", "unscented_regression.beside_fastbnns")
"""They need an environment of their own."""


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in BESIDE])
def test_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        import_module(f"recipes.{script}").main(["--help"])
    assert not left.value.code and "--smoke" in capsys.readouterr().out


class _Given(Exception):
    """A command line that is about to be read."""


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a training nor a fit may begin."""
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", lambda *_, **__: pytest.fail("a training began"))
    monkeypatch.setattr(uq, "fit", lambda *_, **__: pytest.fail("a fit began"))


def _options_with_paths(script: str) -> list[str]:
    def parse(command: argparse.ArgumentParser, *_: Any) -> None:
        raise _Given(command)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Given) as given:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        import_module(f"recipes.{script}").main([])
    actions = given.value.args[0]._actions
    return [action.option_strings[0] for action in actions if action.type in (Path, common.existing)]


def _refused(script: str, words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence in which a run ends at once."""
    with pytest.raises(SystemExit) as left:
        import_module(f"recipes.{script}").main([str(word) for word in words])
    said = left.value.code if isinstance(left.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert "error: " in said and "\n" not in said
    return said


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ("imagenet.run", *BESIDE)])
def test_a_path_that_does_not_exist_ends_a_run_at_once(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _options_with_paths(script)
    assert "--output" in options and (script not in READING or set(options) >= set(READING[script]))
    for option in options:
        if option != "--output":
            said = _refused(script, [option, tmp_path / "none", "--output", tmp_path / "out"], capsys)
            assert str(tmp_path / "none") in said
    assert not list((tmp_path / "out").glob("*"))
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in _refused(script, ["--output", tmp_path / "file"], capsys)


READING = {
    "fashion_mnist.run": ["--data"],
    "function_space.images": ["--data", "--networks"],
    "latent_binary.variables": ["--covariates", "--responses"],
    "tabular.run": ["--data"],
    "uci.predictions": ["--data", "--modeldata"],
}


@pytest.mark.usefixtures("no_work")
def test_what_a_recipe_reads_is_looked_at_before_its_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what only a later row, set, seed or backbone needs."""

    def missing(*_: Any) -> None:
        raise FileNotFoundError("no such picture")

    digits = Labelled(torch.zeros(50, 1, 28, 28), torch.zeros(50).long())
    monkeypatch.setattr("recipes.fashion_mnist.data.mnist_digits", lambda: digits)  # takes seconds
    (tmp_path / "clothes").mkdir()
    clothes = ["--data", write_fashion_mnist(tmp_path / "clothes"), "--output", tmp_path / "out", "--smoke"]
    networks = [*clothes, "--networks", tmp_path]
    kept = tmp_path / "out" / "140-1-0.01-16" / "cnn-seed1.pt"
    kept.parent.mkdir(parents=True)
    torch.save({}, kept)
    assert str(kept) in _refused("fashion_mnist.run", clothes, capsys)
    kept.unlink()
    assert "Nothing fits 'imf*'" in _refused(
        "fashion_mnist.run", [*clothes, "--rows", "INF*", "imf*"], capsys
    )
    results = kept.with_name("results-40-seed0.json")
    results.write_text("{")
    assert str(results) in _refused("fashion_mnist.run", clothes, capsys)
    assert "Nothing fits 'x'" in _refused("function_space.objectives", [*networks, "--trials", "x"], capsys)
    monkeypatch.setattr("recipes.message_passing.last_layer.efficientnet_lite0", missing)
    assert "no such picture" in _refused("message_passing.last_layer", networks[:4] + networks[5:], capsys)
    monkeypatch.setattr("recipes.function_space.foreign.photos", missing)
    monkeypatch.setattr("recipes.fashion_mnist.referral.photos", missing)
    assert "no such picture" in _refused("function_space.images", networks, capsys)
    assert "no such picture" in _refused("fashion_mnist.referral", clothes, capsys)

    (tmp_path / "yacht_hydrodynamics.data").write_text("1 2 3\n" * 308)
    sets = ["--sets", "boston", "yacht", "--data", tmp_path, "--output", tmp_path / "out"]
    for script in ("uci.predictions", "uci.information_errors"):
        assert "has 3 columns, and 7 are needed" in _refused(script, sets, capsys)
    many = ["--sets", "boston", "--test", "500", "--output", tmp_path / "out"]
    assert "boston has 506 rows, and 540" in _refused("active_learning.compare", many, capsys)
    assert "There is no data base" in _refused("tabular.run", ["--data", tmp_path], capsys)
    monkeypatch.setattr("recipes.tabular.run.load", lambda kind, _: missing() if kind == "values" else None)
    assert "no such picture" in _refused("tabular.run", ["--data", tmp_path], capsys)

    covariates, responses = tmp_path / "x.txt", tmp_path / "y.txt"
    covariates.write_text("0 " * 19 + "\n")
    words = ["--covariates", covariates, "--output", tmp_path / "out"]
    assert "must have 20 finite numbers a row, and has 19" in _refused(
        "latent_binary.variables", words, capsys
    )
    for text in ("1\n0\n", "2\n" * 2000):
        responses.write_text(text)
        words = ["--responses", responses, "--output", tmp_path / "out"]
        assert "0 or 1 for each of 2000 rows" in _refused("latent_binary.variables", words, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_names_the_script(script: str) -> None:
    page = RECIPES / script.partition(".")[0] / "README.md"
    assert f"recipes.{script}" in page.read_text(encoding="utf-8")


def test_a_table_has_means_and_deviations() -> None:
    results = [{"a": {"x": 1.0}, "b": {"y": 4.0}}, {"a": {"x": 2.0}}]
    rows = common.by_row(results)
    assert common.table(rows, ".3g").splitlines() == [
        "|  | x | y |",
        "| --- | --- | --- |",
        "| a | 1.5 ± 0.71 | - |",
        "| b | - | 4 |",
    ]
    assert common.spread([1.0, 2.0, 4.0], ".2f", error=True) == f"2.33 ± {stdev([1, 2, 4]) / 3**0.5:.2f}"


def test_a_figure_of_a_smoke_run_says_so(tmp_path: Any) -> None:
    for smoke, texts in ((True, ["smoke run, not results"]), (False, [])):
        figure = Figure()
        common.save_figure(figure, tmp_path / "figure.png", smoke)
        assert [text.get_text() for text in figure.texts] == texts


def test_a_full_disk_leaves_what_was_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    options = argparse.Namespace(output=tmp_path, smoke=False)
    names = ("a.json", "a.md", "a.png")
    for name in names:
        (tmp_path / name).write_text("old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(uq.PosthocUQError, match=r"No space left on device\. The file that was there"):
        common.report(options, "a", "page", {})
    with pytest.raises(uq.PosthocUQError, match=r"No space left on device\. The file that was there"):
        common.save_figure(Figure(), tmp_path / "a.png", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert {(tmp_path / name).read_text() for name in names} == {"old"}


def test_a_training_makes_the_steps_of_torch() -> None:
    x, y = torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), torch.arange(7.0).unsqueeze(1)
    model, twin = (nn.Linear(2, 1) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
    batches = common.in_random_order(x, y, 3, torch.Generator().manual_seed(1))
    loss = common.train(model, batches, nn.functional.mse_loss, optimiser, schedule)
    order, losses = torch.randperm(7, generator=torch.Generator().manual_seed(1)), []
    for step, rows in enumerate(order.split(3)):
        value = (twin(x[rows]) - y[rows]).square().mean()
        for weights, gradient in zip(
            twin.parameters(), torch.autograd.grad(value, [*twin.parameters()]), strict=True
        ):
            weights.data -= 0.1 * 0.5**step * gradient
        losses.append(value.item())
    assert loss == pytest.approx(sum(losses) / 3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
