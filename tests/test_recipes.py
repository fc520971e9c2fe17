"""Every recipe: its options, and the table and the training loop that all share."""

from __future__ import annotations

from importlib import import_module
from statistics import stdev
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from recipe_helpers import RECIPES
from torch import nn

from recipes import common

SCRIPTS = sorted(
    ".".join(path.relative_to(RECIPES).with_suffix("").parts)
    for path in RECIPES.glob("*/*.py")
    if ("common.parser(" in (text := path.read_text()) or "= parser(" in text) and "def main(" in text
)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "fastbnns" not in name])
def test_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        import_module(f"recipes.{script}").main(["--help"])
    assert not left.value.code and "--smoke" in capsys.readouterr().out


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
