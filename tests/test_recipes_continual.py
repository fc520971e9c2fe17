"""The recipe continual_learning: its smoke mode as a script, and its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke
from torch import nn

run = recipe_modules("continual_learning", ["run"]).run


def test_images_are_turned() -> None:
    images = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run.rotated(images, 0), images.flatten(1))
    quarter = run.rotated(images, 90).reshape(3, 8, 8)
    turns = [torch.rot90(images, times, (1, 2)) for times in (1, 3)]
    assert any(torch.allclose(quarter, turned, atol=1e-5) for turned in turns)


def test_penalties_belong_to_the_weights_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))
    task = run.tasks(0, [0.0])[0]["held out"]
    distance, posterior = run.of_distance(model), run.of_posterior(model, task, run.METHODS["diagonal"])
    before = float(posterior(model))
    with torch.no_grad():
        model[2].bias.add_(0.5)
    assert float(distance(model)) == pytest.approx(10 * 0.25, rel=1e-5)
    assert float(posterior(model)) > before


@pytest.mark.study
def test_the_recipe(tmp_path: Path) -> None:
    smoke("continual_learning.run", "--output", tmp_path)
    (rows,) = json.loads((tmp_path / "continual_learning.json").read_text())
    assert rows.keys() == {"fine-tuning", "squared distance", *run.METHODS}
    assert all(0 < value <= 1 for row in rows.values() for name, value in row.items() if name != "strength")
