"""The recipe message_passing: its smoke modes as scripts, and how coverage is measured against a known distribution."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke, write_fashion_mnist


@pytest.fixture(scope="module")
def recipe() -> Namespace:
    return recipe_modules("message_passing", ["sine"])


@pytest.mark.study
def test_smoke_of_the_sines(tmp_path: Path) -> None:
    smoke("message_passing.sine", "--output", tmp_path)
    assert (tmp_path / "depth.png").exists()
    kept = json.loads((tmp_path / "sine-depth-coverage.json").read_text())
    assert set(kept["depth"]) == {"2 linear layers", "3 linear layers"}
    assert 0 <= kept["coverage"]["data 0"]["2 sigma, x > 10"] <= 1


@pytest.mark.study
def test_smoke_of_the_last_layer(tmp_path: Path) -> None:
    for name in ("data", "networks"):
        (tmp_path / name).mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    folders = ("--data", data, "--output", tmp_path / "out", "--networks", tmp_path / "networks")
    smoke("message_passing.last_layer", *folders, "--rows", "message passing, diagonal", "INF")
    rows = json.loads((tmp_path / "out" / "last_layer.json").read_text())["cnn"]
    assert set(rows) == {"network", "message passing, diagonal", "INF"} and rows["INF"]["fit / forward"] > 0


@pytest.mark.study
def test_data_that_went_out_again_leave_the_predictions(tmp_path: Path) -> None:
    smoke("message_passing.changes", "--output", tmp_path)
    ((row,),) = json.loads((tmp_path / "changes.json").read_text()).values()
    assert abs(row["in, then out"]) < 1e-6 and row["after an update"] < row["nothing added"]
    assert row["after taking out"] < row["nothing taken out"]


@pytest.mark.study
@pytest.mark.parametrize(("network", "name"), [("convolutional", "images"), ("perceptron", "perceptron")])
def test_smoke_of_a_network_without_gradients(tmp_path: Path, network: str, name: str) -> None:
    (tmp_path / "data").mkdir()
    folders = ("--data", write_fashion_mnist(tmp_path / "data"), "--output", tmp_path / "out")
    smoke("message_passing.images", *folders, "--network", network)
    rows = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    drawn = {"message passing, drawn weights"} if network == "convolutional" else set()
    assert set(rows) == {"AdamW", "message passing, moments"} | drawn
    assert all(0 <= row["accuracy"] <= 1 and row["NLL"] < 10 for row in rows.values())


@pytest.mark.skipif(importlib.util.find_spec("ivon") is None, reason="ivon-opt is not installed")
def test_beside_ivon(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folders = ("--data", write_fashion_mnist(tmp_path / "data"), "--output", tmp_path / "out")
    assert "at the mean |" in smoke("message_passing.beside_ivon", *folders)


def test_intervals_of_a_true_distribution_cover_as_often_as_they_say(recipe: Namespace) -> None:
    """Distribution functions at draws are uniform, so that coverage is the mass and the correlation is one."""
    grid = torch.arange(200)
    chance = torch.rand(4000, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sides = {"low": grid < 90, "high": grid > 110}
    found = recipe.sine.correlations(chance, sides)
    assert set(found) == {"correlation, low", "correlation, high", "correlation, both"}
    assert all(value > 0.9999 for value in found.values())
    narrow = recipe.sine.correlations(
        0.5 + 0.1 * (chance - 0.5), sides
    )  # far too wide: all covers from 0.1 on
    assert all(value < 0.8 for value in narrow.values())
