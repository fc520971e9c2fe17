"""Images with masks on the command line: the layout, its faults, every command, and maps as PNG files."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import failure, run, run_json
from PIL import Image
from torch import nn

import posthoc_uq as uq
from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.meaning import meaning_of_likelihood
from posthoc_uq.cli.models import Source, source_of
from posthoc_uq.cli.transforms import Preprocessing

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CLASSES, SIZE, IGNORED = 3, 8, 255
CODE = """
import torch
from torch import nn


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))


def coarse():
    return nn.Sequential(nn.Conv2d(3, 3, 2, stride=2))


def half(image):
    return torch.zeros(3, 4, 4)
"""


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1)).eval()


def make_scenes(folder: Path, count: int, seed: int, ignored: int = IGNORED) -> None:
    """Noise whose brightness is the class of a pixel; a corner is ignored."""
    random = np.random.default_rng(seed)
    (folder / "images" / "deep").mkdir(parents=True)
    (folder / "masks" / "deep").mkdir(parents=True)
    for number in range(count):
        name = f"deep/{number}" if number == 0 else f"{number}"
        mask = random.integers(0, CLASSES, (SIZE, SIZE)).astype(np.uint8)
        pixels = (mask[..., None] * 80 + random.integers(0, 60, (SIZE, SIZE, 3))).astype(np.uint8)
        mask[:2, :2] = ignored
        Image.fromarray(pixels).save(folder / "images" / f"{name}.bmp")
        Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


def scenes(folder: Path, ignored: int = IGNORED) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """All names, images and masks, as the model without a transform of its own gets them."""
    images, masks = folder / "images", folder / "masks"
    names = sorted(str(path.relative_to(images)) for path in images.rglob("*.bmp"))
    x = np.stack([np.asarray(Image.open(images / name)).astype(np.float32) / 255 for name in names])
    y = np.stack([np.asarray(Image.open(masks / name.replace(".bmp", ".png"))) for name in names])
    labels = torch.from_numpy(y.astype(np.int64))
    labels[labels == ignored] = -100
    return names, torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), labels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    (folder / "nets.py").write_text(CODE)
    make_scenes(folder / "train", 6, 0)
    make_scenes(folder / "val", 4, 1)
    return folder


def own(place: Path, name: str = "net") -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:{name}", "--workers", 0]


def fitted(place: Path, target: Path, *options: Any) -> Path:
    given = ["--method", "kfac", "--keep-grams", "--prior-precision", 2, *options]
    run("fit", place / "train", *own(place), "-o", target / "p.h5", *given)
    return target / "p.h5"


def test_the_fit_is_that_of_the_library(place: Path, tmp_path: Path) -> None:
    path, model = fitted(place, tmp_path), net()
    _, x, y = scenes(place / "train")
    expected = uq.fit(model, [(x, y)], "kfac", prior_precision=2, keep_grams=True, progress=False)
    found = uq.load(path, model)
    for name, block in expected.blocks.items():
        torch.testing.assert_close(found.blocks[name].dense(), block.dense())
    assert found.scale == 6 and found.history.fit["mask value ignored"] == IGNORED
    # with another value, the corner is of a class that there is not
    said = failure("fit", place / "train", *own(place), "-o", path, "--force", "--ignore-index", 7)
    assert "has the class 255, and the model the classes 0 to 2; --ignore-index" in said


def test_every_command_and_the_maps(place: Path, tmp_path: Path) -> None:
    path = fitted(place, tmp_path)
    run("tune", path, *own(place), "--data", place / "val", "--head", "linearized", "--referral-rate", 0.25)
    more = tmp_path / "more.h5"  # without novelty by class
    assert run_json("update", path, place / "val", *own(place), "-o", more)["samples"] == 10
    assert run_json("update", "--remove", more, place / "val", *own(place))["samples"] == 6
    run("tune", path, *own(place), "--data", place / "val", "--no-search", "--referral-rate", 0.25)
    said = run_json("evaluate", path, place / "val", *own(place), "--report", tmp_path / "r.html")
    names, x, y = scenes(place / "val")
    model = net()
    predictor = uq.wrap(model, uq.load(path, model))
    prediction = predictor(x)
    quality = said["quality"]["kfac, linearized"]
    assert quality["NLL"] == pytest.approx(prediction.quality(y)["NLL"], rel=1e-5)
    out, maps = tmp_path / "out.csv", tmp_path / "deep" / "maps"
    run("predict", path, place / "val", *own(place), "-o", out, "--maps", maps, "--batch-size", 3)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == names
    assert " ".join(rows[0]).startswith(
        "file label_1 share_1 label_2 share_2 label_3 share_3 entropy mutual_inf"
    )
    for i, row in enumerate(rows):
        predicted = prediction.predicted()[i]
        counts = predicted.flatten().bincount(minlength=CLASSES)
        assert float(row["share_1"]) == pytest.approx(int(counts.max()) / SIZE**2)
        assert int(row["label_1"]) == int(counts.argmax())
        assert float(row["largest_entropy"]) == pytest.approx(float(prediction.entropy()[i].max()), rel=1e-4)
        assert float(row["novelty"]) == pytest.approx(float(prediction.novelty()[i].mean()), rel=1e-4)
        name = names[i].replace(".bmp", ".png")
        assert np.array_equal(np.asarray(Image.open(maps / "class" / name)), predicted.numpy())
        for score, largest in (("entropy", math.log(CLASSES)), ("mutual_information", math.log(CLASSES))):
            read = np.asarray(Image.open(maps / score / name)).astype(float) / 65535 * largest
            exact = prediction.scores_by_position()[score][i].double().numpy()
            assert np.abs(read - exact).max() < 2e-5 * largest + 1e-6
        novelty = np.asarray(Image.open(maps / "novelty" / name)).astype(float) / 65535
        assert np.abs(novelty - prediction.novelty()[i].double().numpy()).max() < 1e-4
    assert {row["flag"] for row in rows} <= {"0", "1"}


def test_a_plain_folder_is_predicted(place: Path, tmp_path: Path) -> None:
    path = fitted(place, tmp_path)
    run("predict", path, place / "val" / "images", *own(place), "-o", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 5
    for name in ("a.png", "a.bmp"):
        Image.new("RGB", (SIZE, SIZE)).save(tmp_path / name)
    arguments = [*own(place), "-o", tmp_path / "out.csv", "--force", "--maps", tmp_path / "maps"]
    assert "would have the same name" in failure("predict", path, tmp_path, *arguments)
    (tmp_path / "flat").write_text("")
    arguments[-1] = tmp_path / "flat"
    assert "cannot be made" in failure("predict", path, place / "val" / "images", *arguments)


def test_maps_are_of_pixels(place: Path, tmp_path: Path) -> None:
    code = tmp_path / "flat_net.py"
    code.write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))\n"
    )
    (tmp_path / "w.pt").write_bytes(b"")
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).state_dict(), tmp_path / "w.pt")
    flat = ["--model", f"{code}:net", "--weights", tmp_path / "w.pt"]
    run("fit", place / "val" / "images", *flat, "-o", tmp_path / "p.h5", "--unlabelled", "--method", "diag")
    arguments = ["-o", tmp_path / "out.csv", "--maps", tmp_path / "maps"]
    said = failure("predict", tmp_path / "p.h5", place / "val" / "images", *flat, *arguments)
    assert "--maps is for models that predict the class of every pixel" in said
    # and a model of one class an image has no use for masks
    assert "classes of pixels are" in failure("fit", place / "val", *flat, "-o", tmp_path / "q.h5")


def test_faults_of_the_layout(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scenes"
    make_scenes(folder, 3, 0)
    arguments = ["fit", folder, *own(place), "-o", tmp_path / "p.h5", "--method", "diag"]
    mask = folder / "masks" / "2.png"
    pixels = mask.read_bytes()
    for content, words in (
        (np.zeros((SIZE, SIZE, 3), np.uint8), "has colours (mode RGB)"),
        (np.zeros((SIZE, SIZE + 1), np.uint8), "size is 8 x 9, and that of its image 8 x 8"),
        (np.full((SIZE, SIZE), 3, np.uint8), "has the class 3"),
    ):
        Image.fromarray(content).save(mask)
        assert words in failure(*arguments)
    mask.write_bytes(b"no image")
    assert "Unreadable image" in failure(*arguments)
    mask.write_bytes(pixels)
    assert "classes of pixels are" in failure(*arguments[:2], *own(place, "coarse"), *arguments[6:])
    said = failure(*arguments, "--transform", f"{place / 'nets.py'}:half")
    assert "a mask cannot follow one of your own" in said
    assert "needs targets that are numbers" in failure(*arguments, "--likelihood", "poisson")
    assert "classes of pixels, and the likelihood is 'ordinal'" in failure(
        *arguments, "--likelihood", "ordinal"
    )
    mask.rename(folder / "masks" / "2.jpg")
    assert "is no PNG file" in failure(*arguments)
    (folder / "masks" / "2.jpg").rename(folder / "masks" / "3.png")
    assert "has no counterpart in" in failure(*arguments)


def test_masks_go_through_the_same_crop(tmp_path: Path) -> None:
    # the image shows the mask itself, so both must be cut and resized alike
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
    pattern = np.zeros((24, 40), np.uint8)
    pattern[:12, 10:20] = 1
    pattern[12:, 20:] = 2
    Image.fromarray(np.repeat((pattern * 100)[..., None], 3, 2)).save(tmp_path / "images" / "a.png")
    palette = Image.fromarray(pattern, mode="P")
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    palette.save(tmp_path / "masks" / "a.png")
    options: dict[str, Any] = dict.fromkeys("split limit class_map".split())
    options |= {"batch_size": 1, "workers": 0, "target": (), "columns": (), "ignore_index": 9}
    transform = Preprocessing(3, (12, 12), 12, "nearest").transform()
    source = Source(net(), "x:y", transform, None)
    meaning = meaning_of_likelihood("classification")
    data = data_of(str(tmp_path), source, options, meaning, labels=True, split="train")
    ((x, y),) = list(data.loader)
    assert torch.equal((x[:, 0] * 255 / 100).round().long(), y) and y.unique().tolist() == [0, 1, 2]
    meaning = meaning_of_likelihood(
        uq.Categorical(ignore_index=200)
    )  # what is ignored has the likelihood's label
    ((_, y),) = list(
        data_of(
            str(tmp_path), source, options | {"ignore_index": 2}, meaning, labels=True, split="train"
        ).loader
    )
    assert y.unique().tolist() == [0, 1, 200]


def test_models_of_torchvision_by_name(tmp_path: Path) -> None:
    from torchvision.models import get_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    (tmp_path / "scenes").mkdir()
    make_scenes(tmp_path / "scenes" / "a", 2, 0)
    given = ["--model", "torchvision:lraspp_mobilenet_v3_large", "--weights", tmp_path / "w.pt"]
    given += ["--num-classes", 3, "--image-size", 32]
    path, maps = tmp_path / "p.h5", tmp_path / "maps"
    last = ["--method", "diag", "--layers", "last", "--prior-precision", 2]
    run("fit", tmp_path / "scenes" / "a", *given, "-o", path, *last)
    run("predict", path, tmp_path / "scenes" / "a", *given, "-o", tmp_path / "o.csv", "--maps", maps)
    assert Image.open(maps / "class" / "1.png").size == (32, 32)
    options: dict[str, Any] = dict.fromkeys("device transform image_size mean std num_classes".split())
    options |= {"pretrained": False, "weights": str(tmp_path / "w.pt"), "num_classes": 3}
    found = source_of(options | {"model": "torchvision:lraspp_mobilenet_v3_large"})
    assert found.transform.text.startswith("3 x own size of 520, bilinear, mean")


def test_a_second_classifier_is_left_out(tmp_path: Path) -> None:
    from torchvision.models import get_model

    model = get_model(
        "deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=2, aux_loss=True
    )
    torch.save(model.state_dict(), tmp_path / "w.pt")
    options: dict[str, Any] = dict.fromkeys("device transform image_size mean std".split())
    options |= {"pretrained": False, "weights": str(tmp_path / "w.pt"), "num_classes": 2}
    found = source_of(options | {"model": "torchvision:deeplabv3_mobilenet_v3_large"})
    assert found.model.aux_classifier is None
