"""Data from the command line: folders, masks, class maps, tables, torchvision's sets, the user's own functions."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import CODE, NETS, failure, make_images, net, run, run_json
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import posthoc_uq as uq
from posthoc_uq.app import (
    FolderImages,
    ImageLoader,
    Preprocessing,
    ScoreLog,
    TrainedModel,
    folder_labels,
    image_files,
    read_scores,
    read_state,
)
from posthoc_uq.app.cli.data import load_data
from posthoc_uq.app.cli.images import WrappedImages, opened_image
from posthoc_uq.app.cli.labels import read_map, read_names
from posthoc_uq.app.cli.models import imported
from posthoc_uq.app.cli.options import Data
from posthoc_uq.app.cli.posterior_file import DatasetInfo
from posthoc_uq.app.paths import IMAGE_ENDINGS
from posthoc_uq.core import csv_text, own_samples, sampler_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def read(
    spec: Any,
    channels: int = 3,
    labels: bool = True,
    split: str = "train",
    part: str | None = None,
    *,
    likelihood: uq.Likelihood | None = None,
    model: TrainedModel | None = None,
    numbered: bool = False,
    skip: bool = False,
    **given: Any,
) -> Any:
    """Data as the commands get them."""
    network = net() if channels == 3 else nn.Conv2d(1, 3, 3)
    model = model or TrainedModel(network, "x:y", Preprocessing(channels).transform())
    reading = Data(**({"split": part, "batch_size": 4, "workers": 0} | given))
    info = DatasetInfo(likelihood or uq.Categorical())
    settings: dict[str, Any] = {"labels": labels, "split": split, "numbered": numbered, "skip": skip}
    return load_data(str(spec), model, reading, info, **settings)


def complaint(work: Any) -> str:
    """What an error says."""
    with pytest.raises(uq.PosthocUQError) as caught:
        work()
    return str(caught.value)


def labels_of(data: Any) -> list[int]:
    """All targets in order."""
    return [int(label) for _, targets in data.loader for label in targets]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of four images, with files that are none of them."""
    make_images(tmp_path / "set", ("cat", "dog", "emu"), 4, 0)
    (tmp_path / "set" / "cat" / "._0.png").write_bytes(b"junk of a Mac")
    (tmp_path / "set" / ".cache").mkdir()
    (tmp_path / "set" / ".cache" / "x.png").write_bytes(b"junk")
    (tmp_path / "set" / "dog" / "notes.txt").write_text("no image")
    return tmp_path / "set"


class TestFolders:
    def test_classes_are_the_sorted_folders(self, folder: Path) -> None:
        data = read(folder)
        assert labels_of(data) == [0] * 4 + [1] * 4 + [2] * 4
        assert data.files[0] == "cat/0.png" and len(data.files) == 12
        assert data.names == ["cat", "dog", "emu"]
        images = torch.cat([inputs for inputs, _ in data.loader])
        for path, image in zip(data.files, images, strict=True):
            pixels = np.array(Image.open(folder / path)).astype(np.float32) / 255
            assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))

    def test_without_classes_there_are_inputs_alone(self, tmp_path: Path) -> None:
        make_images(tmp_path, ("",), 5, 0)
        data = read(tmp_path)
        assert data.files == [f"{i}.png" for i in range(5)]
        assert [tuple(batch.shape) for batch in data.loader] == [(4, 3, 14, 12), (1, 3, 14, 12)]
        assert read(tmp_path / "3.png").files == ["3.png"]

    def test_images_beside_class_folders(self, folder: Path) -> None:
        Image.new("RGB", (12, 14)).save(folder / "stray.png")
        assert "belong to none, such as 'stray.png'" in complaint(lambda: read(folder))
        assert f"give the folder '{folder}/val' itself" in complaint(lambda: read(folder, part="val"))

    def test_labels_are_left_aside_where_none_are_wanted(self, folder: Path) -> None:
        make_images(folder / "deep" / "deeper", ("",), 1, 3)
        data = read(folder, labels=False, numbered=True)
        assert len(data.files) == 13 and data.names is None
        numbers = torch.cat([numbers for _, numbers in data.loader])
        assert numbers.tolist() == list(range(13))

    def test_a_folder_one_level_too_high(self, folder: Path, tmp_path: Path) -> None:
        for part in ("test", "train", "val"):
            make_images(tmp_path / "photos" / part, ("cat", "dog", "emu"), 1, 0)
        for split in ("train", "val"):
            with pytest.warns(UserWarning) as caught:
                assert labels_of(read(tmp_path / "photos", split=split)) == [0] * 3 + [1] * 3 + [2] * 3
            (said,) = [str(warning.message) for warning in caught]
            assert "hold no images themselves" in said
            assert f"Perhaps '{tmp_path / 'photos' / split}' is meant?" in said
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(tmp_path / "photos", labels=False)
            (tmp_path / "map.txt").write_text("test\ntrain\nval\n")
            read(tmp_path / "photos", class_map=str(tmp_path / "map.txt"))  # they are said to be classes
            make_images(folder / "cat" / "persian", ("",), 1, 0)
            read(folder)
            Image.new("RGB", (12, 14)).save(tmp_path / "photos" / "val" / "own.png")
            read(tmp_path / "photos")

    def test_a_limit_is_evenly_spaced(self, folder: Path) -> None:
        assert labels_of(read(folder, limit=3)) == [0, 1, 2]
        assert labels_of(read(folder, limit=100)) == labels_of(read(folder))
        numbers = [n for _, batch in read(folder, labels=False, numbered=True, limit=4).loader for n in batch]
        assert [int(n) for n in numbers] == [0, 3, 6, 9]

    def test_sizes_that_differ(self, folder: Path) -> None:
        Image.new("RGB", (20, 30)).save(folder / "dog" / "large.png")
        said = complaint(lambda: list(read(folder).loader))
        assert (
            "images differ in size, (3, 14, 12) and (3, 30, 20) in one batch; give --image-size, or --batch-size 1."
            in said
        )


class TestTroubles:
    def test_the_unreadable_is_named_or_left_out(self, folder: Path) -> None:
        bad = folder / "dog" / "1.png"
        bad.write_bytes(b"no image")
        for workers in (0, 2):
            said = complaint(lambda n=workers: list(read(folder, workers=n).loader))
            assert said.startswith(
                f"Unreadable image '{bad}': not in an image format that is read: BMP, JPEG"
            )
            data = read(folder, labels=False, numbered=True, skip=True, workers=workers)
            numbers = torch.cat([numbers for _, numbers in data.loader])
            assert numbers.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
            assert [trouble.name for trouble in data.skipped] == [str(bad)]
        for number in range(4):
            (folder / "dog" / f"{number}.png").write_bytes(b"")
        data = read(folder, labels=False, skip=True)
        assert [len(batch) for batch in data.loader] == [4, 4], "batches of nothing are left out"
        for path in folder.glob("*/*.png"):
            path.write_bytes(b"")
        assert "None of the 12 images can be read." in complaint(lambda: read(folder))

    def test_a_failing_transform_is_not_skipped(self, folder: Path) -> None:
        def broken(image: Any) -> Any:
            raise ValueError("a bug\nin two lines")

        def wrong(image: Any) -> Any:
            return image

        for transform, words in (
            (broken, "the transform fails on it: a bug in two lines."),
            (wrong, "not a tensor."),
        ):
            own = Preprocessing(3).transform().__class__(transform, "RGB", "own")
            images = FolderImages(str(folder), image_files(str(folder)), None, own)
            loader = ImageLoader(images, 4, 0, skip=True)
            assert words in complaint(lambda loader=loader: list(loader))

    def test_memory_that_runs_out_is_no_fault_of_a_file(self, folder: Path, tmp_path: Path) -> None:
        def full(*_: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        class Full(nn.Module):
            forward = full

        class Items(list[Any]):
            __getitem__ = full

        path, module = str(folder / "cat" / "0.png"), tmp_path / "full.py"
        module.write_text("raise MemoryError\n")
        own = Preprocessing(3).transform().__class__(full, "RGB", "own")
        images = FolderImages(str(folder), image_files(str(folder)), None, own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("PIL.ImageFile.ImageFile.load", full)
            for work in (
                lambda: opened_image(path, 1),
                lambda: images[0],
                lambda: WrappedImages(Items([1]), False, own)[0],
                lambda: TrainedModel(Full(), "x:y", own).run(torch.ones(1)),
                lambda: imported(f"{module}:net"),
            ):
                with pytest.raises((MemoryError, torch.OutOfMemoryError)):
                    work()

    def test_all_modes_become_the_models(self, tmp_path: Path) -> None:
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK"):
            Image.new(mode, (12, 14)).save(
                tmp_path / f"{mode}.tiff" if mode == "CMYK" else tmp_path / f"{mode}.png"
            )
        assert [tuple(batch.shape) for batch in read(tmp_path).loader] == [(4, 3, 14, 12), (3, 3, 14, 12)]
        assert next(iter(read(tmp_path, channels=1).loader)).shape == (4, 1, 14, 12)


def test_the_loader_tells_what_is_padding(folder: Path) -> None:
    images = FolderImages(str(folder), image_files(str(folder))[:11], None, Preprocessing(3).transform())
    loaders = [
        ImageLoader(images, 4, 0, DistributedSampler(images, 2, rank, shuffle=False)) for rank in (0, 1)
    ]
    assert [own_samples(loader) for loader in loaders] == [6, 5]
    assert [len(loader) for loader in loaders] == [2, 2] and loaders[0].batch_size == 4
    assert isinstance(sampler_of(loaders[0]), DistributedSampler)


class TestLabels:
    def test_forms_of_a_class_map(self, tmp_path: Path) -> None:
        path = tmp_path / "map"

        def mapped(content: Any) -> dict[str, int]:
            file = path.with_suffix(".txt" if isinstance(content, str) else ".json")
            file.write_text(content if isinstance(content, str) else json.dumps(content))
            return read_map(str(file))

        assert mapped("cat\ndog\n\n") == {"cat": 0, "dog": 1}
        imagenet = mapped("n01 tench, Tinca\nn02 goldfish\n")
        assert (imagenet["n01"], imagenet["n02"], imagenet["n02 goldfish"]) == (0, 1, 1)
        assert mapped("red fox\nred cat\n") == {"red fox": 0, "red cat": 1}
        assert mapped(["a", "b"]) == {"a": 0, "b": 1}
        assert mapped({"a": 7, "b": 2}) == {"a": 7, "b": 2}
        assert mapped({"0": ["n01", "tench"], "1": ["n02", "goldfish"]})["n02"] == 1
        assert mapped({"0": "cat", "5": "emu"}) == {"cat": 0, "emu": 5}
        for wrong in ({"a": -1}, {"a": "b"}, [1, 2]):
            assert "must give a name for each output" in complaint(lambda wrong=wrong: mapped(wrong))
        path.with_suffix(".json").write_text("{")
        assert "is not valid JSON" in complaint(lambda: read_map(str(path.with_suffix(".json"))))
        assert "No such file" in complaint(lambda: read_map(str(tmp_path / "gone")))
        assert "gives the name 'crane' to the outputs 0 and 2" in complaint(
            lambda: mapped("crane\ntench\ncrane")
        )
        assert mapped("n01 crane\nn02 tench\nn03 crane\n")["n03"] == 2

    def test_forms_of_class_names(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("tench, a fish\ngold fish\n")
        assert read_names(str(tmp_path / "a.txt")) == ["tench, a fish", "gold fish"]
        for content in (["x", "y"], {"1": "y", "0": "x"}, {"0": ["n01", "x"], "1": ["n02", "y"]}):
            (tmp_path / "a.json").write_text(json.dumps(content))
            assert read_names(str(tmp_path / "a.json")) == ["x", "y"]
        (tmp_path / "a.json").write_text('{"0": "x", "2": "y"}')
        assert "1 is missing" in complaint(lambda: read_names(str(tmp_path / "a.json")))
        for name in ("wolf", "ant", ".git"):
            (tmp_path / "photos" / name).mkdir(parents=True)
        assert read_names(str(tmp_path / "photos")) == ["ant", "wolf"]
        assert "or no class folders" in complaint(lambda: read_names(str(tmp_path / "photos" / "ant")))
        (tmp_path / "a.json").write_text("[1]")
        assert "a name for each output" in complaint(lambda: read_names(str(tmp_path / "a.json")))

    def test_a_subset_by_its_names(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "map.txt").write_text("ape\nemu\nbee\ndog\ncat\n")
        chosen = folder_labels(["cat", "dog", "emu"], 5, str(tmp_path / "map.txt"), "x")
        assert chosen == {"cat": 4, "dog": 3, "emu": 1}
        (tmp_path / "three.json").write_text('{"cat": 2, "dog": 0, "emu": 1}')
        data = read(folder, class_map=str(tmp_path / "three.json"))
        assert labels_of(data) == [2] * 4 + [0] * 4 + [1] * 4
        assert data.names == ["dog", "emu", "cat"]
        (folder / "emu").rename(tmp_path / "emu")
        assert read(folder, class_map=str(tmp_path / "three.json")).names is None
        (tmp_path / "emu").rename(folder / "emu")
        for names, words in (
            ("abcd", "has 4 class folders, more than the model's 3"),
            ("ab", "--class-map FILE"),
        ):
            make_images(tmp_path / names, list(names), 1, 0)
            assert words in complaint(lambda names=names: read(tmp_path / names))
        (tmp_path / "less.txt").write_text("cat\n")
        said = complaint(lambda: read(folder, class_map=str(tmp_path / "less.txt")))
        assert "lacks 2 of the class folders" in said and "dog, emu." in said
        said = complaint(lambda: read(folder, class_map=str(tmp_path / "map.txt")))
        assert "gives 'cat' the index 4, and the model has 3 outputs" in said


def write_fashion(root: Path, train: int = 20, test: int = 6) -> None:
    """Files as torchvision's FashionMNIST reads them."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes()
        )
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


class TestTorchvision:
    def test_fashion_mnist_and_its_parts(self, tmp_path: Path) -> None:
        write_fashion(tmp_path)
        given = {"data_root": str(tmp_path)}
        data = read("torchvision:FashionMNIST", channels=1, **given)
        inputs, targets = next(iter(data.loader))
        assert inputs.shape == (4, 1, 28, 28) and targets.tolist() == [0, 1, 2, 3] and data.files is None
        raw = (tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()[16 : 16 + 28 * 28]
        assert torch.equal(inputs[0, 0].flatten() * 255, torch.tensor(list(raw), dtype=torch.float32))
        assert next(iter(read("torchvision:FashionMNIST", channels=3, **given).loader))[0].shape == (
            4,
            3,
            28,
            28,
        )
        for split, expected in (("test", list(range(6))), ("train[:3]", [0, 1, 2]), ("train[-2:]", [8, 9])):
            found = read("torchvision:FashionMNIST", channels=1, part=split, **given)
            assert labels_of(found) == expected

    def test_what_is_wrong_is_said(self, tmp_path: Path) -> None:
        root = {"data_root": str(tmp_path)}
        assert "Did you mean 'FashionMNIST'" in complaint(lambda: read("torchvision:FashonMNIST", **root))
        said = complaint(lambda: read("torchvision:FashionMNIST", **root))
        assert f"cannot be read from '{tmp_path}' (Dataset not found)" in said and "--data-root" in said
        assert "has the splits train and test" in complaint(
            lambda: read("torchvision:FashionMNIST", split="val", **root)
        )
        assert "is not of the form" in complaint(
            lambda: read("torchvision:FashionMNIST", split="train[1]", **root)
        )


class TestOwnFunctions:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        (tmp_path / "own_data.py").write_text(
            CODE + "\n\ndef stream():\n    from torch.utils.data import IterableDataset\n\n    class Stream("
            "IterableDataset):\n        def __iter__(self):\n            return iter(points())\n\n    return Stream()\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield
        sys.modules.pop("own_data", None)

    def test_a_data_set_with_its_splits(self) -> None:
        for split, seed in (("train", 0), ("val", 1)):
            data = read("own_data:points", split=split)
            expected = torch.randn(40, 2, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(torch.cat([x for x, _ in data.loader]), expected)
        data = read("own_data.py:points", split="val", part="val[2:]", limit=7)
        assert torch.equal(torch.cat([x for x, _ in data.loader]), expected[data.rows])

    def test_a_loader_is_taken_as_it_is(self) -> None:
        data = read("own_data:batches")
        assert isinstance(data.loader, DataLoader) and data.loader.batch_size == 10
        assert "need a Dataset" in complaint(lambda: read("own_data:batches", limit=3))
        assert sum(len(x) for x, _ in read("own_data:stream").loader) == 40
        assert "returns a stream" in complaint(lambda: read("own_data:stream", limit=3))

    def test_what_is_no_data(self) -> None:
        assert "returned a int" in complaint(lambda: read("own_data:number"))
        assert "is a int; it must be a function" in complaint(lambda: read("own_data:pi"))
        assert "returned a Sequential" in complaint(lambda: read("own_data:net"))
        assert "There is no folder 'photos'" in complaint(lambda: read("photos"))


def test_links_upward_add_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "all" / "photos"
    make_images(folder, ("cat", "dog", "emu"), 5, 0)
    make_images(tmp_path / "all" / "others", ("",), 60, 1)
    make_images(tmp_path / "elsewhere", ("",), 4, 2)
    own = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert image_files(str(folder)) == own and len(own) == 15
    (folder / "up").symlink_to("..")
    with pytest.warns(UserWarning, match="the link 'up' to a folder that holds it"):
        assert image_files(str(folder)) == own
    (folder / "cat" / "up").symlink_to("../..")
    (folder / "root").symlink_to("/")
    (folder / "self").symlink_to(".")
    (folder / "twin").symlink_to("cat")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    (tmp_path / "elsewhere" / "above").symlink_to(tmp_path)
    (folder / "away").symlink_to(tmp_path / "elsewhere")
    (folder / "away2").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="8 links, such as 'away/above'") as caught:
        found = image_files(str(folder))
    assert found == sorted([*own, *(f"away/{number}.png" for number in range(4))]) and len(caught) == 1
    monthly = tmp_path / "all"  # seen from above, the folders are one way down
    with pytest.warns(UserWarning, match="links, such as"):
        assert len(image_files(str(monthly))) == 15 + 60 + 4


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    make_images(tmp_path / "few", ("",), 3, 0)
    os.mkfifo(tmp_path / "few" / "x.png")
    os.mkfifo(tmp_path / "t.csv")
    said = complaint(lambda: list(read(tmp_path / "few", labels=False).loader))
    assert said == f"Unreadable image '{tmp_path / 'few' / 'x.png'}': it is a pipe, not a file."
    loader = read(tmp_path / "few", labels=False, skip=True).loader
    assert sum(len(batch) for batch in loader) == 3 and len(loader.skipped) == 1
    assert "The table" in complaint(lambda: read(tmp_path / "t.csv")) and (tmp_path / "t.csv").is_fifo()
    for work in (
        lambda: read(tmp_path / "few" / "x.png"),
        lambda: read_map(str(tmp_path / "t.csv")),
        lambda: read_names(str(tmp_path / "t.csv")),
        lambda: read_state(str(tmp_path / "t.csv")),
        lambda: read_scores(str(tmp_path / "t.csv")),
        lambda: read("/dev/zero"),
    ):
        assert (
            "not a file (<(...) of a shell makes a pipe too); write what it gives into a file"
            in complaint(work)
        )


def test_no_other_formats_than_the_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript under another name would be handed to Ghostscript, which runs it."""
    programs, mark = tmp_path / "programs", tmp_path / "called"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "x.png").write_bytes(script)
    with suppress(Exception), Image.open(tmp_path / "x.png") as image:
        image.load()
    assert mark.exists()  # so it would be without the restriction
    mark.unlink()
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    assert "not in an image format" in complaint(lambda: list(read(tmp_path / "x.png", labels=False).loader))
    make_images(tmp_path / "root" / "root", ("a",), 1, 0)
    (tmp_path / "root" / "root" / "a" / "x.png").write_bytes(script)
    known = list(Image.ID)
    data = read("torchvision:ImageFolder", data_root=str(tmp_path / "root" / "root"))
    assert "Unreadable image" in complaint(lambda: list(data.loader))
    assert known == Image.ID
    assert not mark.exists()
    gif = tmp_path / "y.png"
    Image.new("RGB", (4, 4)).save(gif, format="GIF")
    assert "not in an image format" in complaint(lambda: list(read(gif, labels=False).loader))
    for ending in IMAGE_ENDINGS:
        Image.new("RGB", (4, 4)).save(tmp_path / f"z{ending}")
        assert len(list(read(tmp_path / f"z{ending}", labels=False).loader)) == 1


# Images with masks.

PIXEL_CLASSES, SIZE, IGNORED = 3, 8, 255
SCENES = """
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


def pixel_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, PIXEL_CLASSES, 1)).eval()


def make_scenes(folder: Path, count: int, seed: int, ignored: int = IGNORED) -> None:
    """Noise whose brightness is the class of a pixel; a corner is ignored."""
    random = np.random.default_rng(seed)
    (folder / "images" / "deep").mkdir(parents=True)
    (folder / "masks" / "deep").mkdir(parents=True)
    for number in range(count):
        name = f"deep/{number}" if number == 0 else f"{number}"
        mask = random.integers(0, PIXEL_CLASSES, (SIZE, SIZE)).astype(np.uint8)
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
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    (folder / "nets.py").write_text(SCENES)
    make_scenes(folder / "train", 6, 0)
    make_scenes(folder / "val", 4, 1)
    return folder


def own(city: Path, name: str = "net") -> list[Any]:
    return ["--model", f"{city / 'nets.py'}:{name}", "--workers 0"]


def fitted_scenes(city: Path, target: Path, *options: Any) -> Path:
    given = ["--method kfac --keep-grams --prior-precision 2", *options]
    run("fit", city / "train", *own(city), "-o", target / "p.h5", *given)
    return target / "p.h5"


def test_the_fit_is_that_of_the_library(city: Path, tmp_path: Path) -> None:
    path, model = fitted_scenes(city, tmp_path), pixel_net()
    _, x, y = scenes(city / "train")
    expected = uq.fit(model, [(x, y)], "kfac", prior_precision=2, keep_grams=True, progress=False)
    found = uq.load(path, model)
    for name, block in expected.blocks.items():
        torch.testing.assert_close(found.blocks[name].dense(), block.dense())
    assert found.scale == 6 and found.history.fit["mask value ignored"] == IGNORED
    # with another value, the corner is of a class that there is not
    said = failure("fit", city / "train", *own(city), "-o", path, "--force --ignore-index 7")
    assert "has the class 255, and the model the classes 0 to 2; --ignore-index" in said


def test_every_command_and_the_maps(city: Path, tmp_path: Path) -> None:
    path = fitted_scenes(city, tmp_path)
    run("calibrate", path, city / "val", *own(city), "--head linearized")
    said = run_json("evaluate", path, city / "val", *own(city), "--report", tmp_path / "r.html")
    names, x, y = scenes(city / "val")
    model = pixel_net()
    predictor = uq.wrap(model, uq.load(path, model))
    prediction = predictor(x)
    quality = said["quality"]["kfac, linearized"]
    assert quality["nll"] == pytest.approx(prediction.quality(y)["nll"], rel=1e-5)
    out, maps = tmp_path / "out.csv", tmp_path / "deep" / "maps"
    run(
        "predict",
        path,
        city / "val",
        *own(city),
        "-o",
        out,
        "--maps",
        maps,
        "--batch-size 3 --referral-rate 0.4",
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == names
    assert " ".join(rows[0]).startswith(
        "file label_1 share_1 label_2 share_2 label_3 share_3 entropy mutual_inf"
    )
    for i, row in enumerate(rows):
        predicted = prediction.predicted()[i]
        counts = predicted.flatten().bincount(minlength=PIXEL_CLASSES)
        assert float(row["share_1"]) == pytest.approx(int(counts.max()) / SIZE**2)
        assert int(row["label_1"]) == int(counts.argmax())
        assert float(row["largest_entropy"]) == pytest.approx(float(prediction.entropy()[i].max()), rel=1e-4)
        assert float(row["novelty"]) == pytest.approx(float(prediction.novelty()[i].mean()), rel=1e-4)
        name = names[i].replace(".bmp", ".png")
        assert np.array_equal(np.asarray(Image.open(maps / "class" / name)), predicted.numpy())
        for score, largest in (
            ("entropy", math.log(PIXEL_CLASSES)),
            ("mutual_information", math.log(PIXEL_CLASSES)),
        ):
            read = np.asarray(Image.open(maps / score / name)).astype(float) / 65535 * largest
            exact = prediction.scores_by_position()[score][i].double().numpy()
            assert np.abs(read - exact).max() < 2e-5 * largest + 1e-6
        novelty = np.asarray(Image.open(maps / "novelty" / name)).astype(float) / 65535
        assert np.abs(novelty - prediction.novelty()[i].double().numpy()).max() < 1e-4
    assert {row["flag"] for row in rows} <= {"0", "1"}
    assert run_json("update", path, city / "val", *own(city))["samples"] == 10
    assert run_json("update", path, city / "val", *own(city), "--remove")["samples"] == 6
    run("evaluate", path, city / "val", *own(city))
    run("predict", path, city / "val", *own(city), "-o", out, "--force")
    with out.open(newline="") as file:
        assert "novelty" not in next(csv.reader(file))  # whose classes an update does not count


def test_two_maps_of_one_name(city: Path, tmp_path: Path) -> None:
    path = fitted_scenes(city, tmp_path)
    for name in ("a.png", "a.bmp"):
        Image.new("RGB", (SIZE, SIZE)).save(tmp_path / name)
    arguments = [*own(city), "-o", tmp_path / "out.csv", "--maps", tmp_path / "maps"]
    assert "would have the same name" in failure("predict", path, tmp_path, *arguments)


def test_maps_are_of_pixels(city: Path, tmp_path: Path) -> None:
    code = tmp_path / "flat_net.py"
    code.write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))\n"
    )
    (tmp_path / "w.pt").write_bytes(b"")
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).state_dict(), tmp_path / "w.pt")
    flat = ["--model", f"{code}:net", "--weights", tmp_path / "w.pt"]
    run("fit", city / "val" / "images", *flat, "-o", tmp_path / "p.h5", "--unlabelled --method diag")
    arguments = ["-o", tmp_path / "out.csv", "--maps", tmp_path / "maps"]
    said = failure("predict", tmp_path / "p.h5", city / "val" / "images", *flat, *arguments)
    assert "--maps is for models that predict a class or a value at every pixel" in said
    # and a model of one class an image has no use for masks
    assert "classes of pixels are" in failure("fit", city / "val", *flat, "-o", tmp_path / "q.h5")


def test_maps_of_values(city: Path, tmp_path: Path) -> None:
    """An image to an image: means in the CSV, NumPy files of the maps."""
    code = tmp_path / "denoise_net.py"
    code.write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 1, 1)\n\n\ndef data():\n"
        "    x = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))\n"
        "    return [(x, x.mean(1, keepdim=True))]\n"
    )
    torch.manual_seed(0)
    model = nn.Conv2d(3, 1, 1).eval()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    net = ["--model", f"{code}:net", "--weights", tmp_path / "w.pt"]
    run("fit", f"{code}:data", *net, "-o", tmp_path / "p.h5", "--likelihood regression --method kfac")
    images, out, maps = city / "val" / "images", tmp_path / "out.csv", tmp_path / "maps"
    run(
        "predict", tmp_path / "p.h5", images, *net, "-o", out, "--maps", maps, "--head linearized --level 0.8"
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = "file mean standard_deviation epistemic_variance lower upper novelty familiarity"
    assert " ".join(rows[0]).startswith(f"{columns} largest_standard_deviation")
    name = rows[0]["file"].rpartition(".")[0] + ".npy"
    found = {kind: np.load(maps / kind / name) for kind in ("mean", "lower", "upper", "novelty")}
    assert found["mean"].shape == (1, SIZE, SIZE) and found["novelty"].shape == (SIZE, SIZE)
    for kind, values in found.items():
        assert float(rows[0][kind]) == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-6)


def test_faults_of_the_layout(city: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scenes"
    make_scenes(folder, 3, 0)
    arguments = ["fit", folder, *own(city), "-o", tmp_path / "p.h5", "--method diag"]
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
    assert "classes of pixels are" in failure(*arguments[:2], *own(city, "coarse"), *arguments[5:])
    said = failure(*arguments, "--transform", f"{city / 'nets.py'}:half")
    assert "a mask cannot follow one of your own" in said
    assert "needs targets that are numbers" in failure(*arguments, "--likelihood poisson")
    assert "classes of pixels, and the likelihood is 'ordinal'" in failure(*arguments, "--likelihood ordinal")
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
    model = TrainedModel(pixel_net(), "x:y", Preprocessing(3, (12, 12), 12, "nearest").transform())
    given: dict[str, Any] = {"model": model, "batch_size": 1}
    ((x, y),) = list(read(tmp_path, ignore_index=9, **given).loader)
    assert torch.equal((x[:, 0] * 255 / 100).round().long(), y) and y.unique().tolist() == [0, 1, 2]
    # what is ignored has the likelihood's label
    likelihood = uq.Categorical(ignore_index=200)
    ((_, y),) = list(read(tmp_path, ignore_index=2, likelihood=likelihood, **given).loader)
    assert y.unique().tolist() == [0, 1, 200]


# Tables.

NAMES = ("age", "height", "income")
ROWS = 40


def mlp(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def targets() -> dict[str, list[Any]]:
    """Columns of targets, by what they are."""
    x = features()
    group = (x[:, 0] > -0.5).astype(int) + (x[:, 0] > 0.5)
    return {
        "price": [f"{value:.6g}" for value in x[:, 0] - x[:, 1]],
        "rent": [f"{value:.6g}" for value in 2 * x[:, 2]],
        "visits": np.random.default_rng(1).poisson(np.exp(x[:, 0])).tolist(),
        "kind": [("cat", "dog", "emu")[i] for i in group],
        "number": group.tolist(),
        "tall": (x[:, 1] > 0).astype(int).tolist(),
        "rich": (x[:, 2] > 0).astype(int).tolist(),
    }


def write_columns(path: Path, columns: dict[str, Any], separator: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def table_at(path: Path, *names: str, **options: Any) -> Path:
    """The inputs, with some columns of targets between them."""
    values = {name: column.tolist() for name, column in zip(NAMES, features().T, strict=True)}
    own = {name: targets()[name] for name in names}
    return write_columns(path, {"age": values["age"]} | own | values, **options)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def named(desk: Path, name: str) -> list[Any]:
    return ["--model", f"{desk / 'nets.py'}:{name}"]


def fitted_table(desk: Path, data: Path, name: str, *options: Any) -> Path:
    own = ["--method kfac --keep-grams --prior-precision 2"]
    run("fit", data, *named(desk, name), "-o", desk / "p.h5", *own, *options)
    return desk / "p.h5"


def batch_of(y: torch.Tensor) -> list[Any]:
    return [(torch.from_numpy(features()), y)]


@pytest.mark.parametrize(
    ("likelihood", "name", "columns", "measure"),
    [
        ("regression", "two", ["price", "rent"], "rmse"),
        ("poisson", "one", ["visits"], "mean_deviance"),
        ("multilabel", "two", ["tall", "rich"], "mean_average_precision"),
        ("heteroscedastic", "two", ["price"], "log_density"),
        ("classification", "three", ["kind"], "accuracy"),
        ("ordinal", "one", ["number"], "rps"),
        ("binary", "one", ["tall"], "accuracy"),
    ],
)
@pytest.mark.only(
    "regression-two-columns0-rmse",
    "classification-three-columns4-accuracy",
    "multilabel-two-columns2-mean_average_precision",
)
def test_a_table_is_what_python_gives(
    desk: Path, likelihood: str, name: str, columns: list[str], measure: str
) -> None:
    data = table_at(desk / "t.csv", *columns)
    targeted = [part for column in columns for part in ("--target", column)]
    labels, ordered = likelihood in ("classification", "ordinal", "binary"), likelihood == "ordinal"
    own = ["--likelihood", likelihood, *targeted]
    path = fitted_table(desk, data, name, *own, *(["--thresholds -0.5,0.5"] if ordered else []))
    network = mlp({"one": 1, "two": 2, "three": 3}[name])
    found = targets()
    if columns == ["kind"]:
        y = torch.tensor(found["number"])  # cat, dog, emu in sorted order
    elif labels:
        y = torch.tensor(found[columns[0]])
    else:
        y = torch.tensor([[float(value) for value in found[column]] for column in columns]).T
    expected = uq.fit(
        network,
        batch_of(y),
        "kfac",
        likelihood=uq.Ordinal([-0.5, 0.5]) if ordered else likelihood,
        prior_precision=2,
        progress=False,
        keep_grams=True,
    )
    read = uq.load(path, network)
    for block in expected.blocks:
        torch.testing.assert_close(read.blocks[block].dense(), expected.blocks[block].dense())
    said = run_json("evaluate", path, data, *named(desk, name))
    assert measure in said["quality"]["kfac, linearized"]
    # a table without the targets, in another order and with a column more, is predicted by the names
    values = dict(zip(NAMES, features().T.tolist(), strict=True))
    other = write_columns(
        desk / "new.csv",
        {"income": values["income"], "id": range(ROWS), "height": values["height"], "age": values["age"]},
    )
    run("predict", path, other, *named(desk, name), "-o", desk / "out.csv")
    out = rows_of(desk / "out.csv")
    prediction = uq.wrap(network, read)(torch.from_numpy(features()))
    assert [row["file"] for row in out] == [str(i) for i in range(ROWS)]
    if "label_1" in out[0]:
        top = prediction.top_k(1)
        own_names = {"classification": ["cat", "dog", "emu"], "multilabel": columns}
        shown = own_names.get(likelihood, ["0", "1", "2"])
        assert [row["label_1"] for row in out] == [shown[i] for i in top.labels[:, 0].tolist()]
        given = [float(row["probability_1"]) for row in out]
        assert given == pytest.approx(top.probabilities[:, 0].tolist(), rel=1e-4)
    else:
        first = "mean" if prediction.mean.flatten().numel() == ROWS else "mean_1"
        given = [float(row[first]) for row in out]
        assert given == pytest.approx(prediction.mean.reshape(ROWS, -1)[:, 0].tolist(), rel=1e-4)


def test_every_command_on_a_table(desk: Path) -> None:
    data = table_at(desk / "t.tsv", "price", separator="\t")
    own = named(desk, "one")
    path = fitted_table(desk, data, "one", "--target price --likelihood regression --split [:30]")
    assert "table columns" in run("inspect", path).stdout
    before = run_json("inspect", path)["fit"]
    assert before["table columns"] == list(NAMES) and before["table targets"] == ["price"]
    run("tune", path, *own, "--data", data, "--split [30:]")
    assert run_json("update", path, data, *own, "--split [30:]")["samples"] == ROWS
    assert run_json("update", path, data, *own, "--remove --split [30:]")["samples"] == 30
    assert run_json("inspect", path)["fit"]["table targets"] == ["price"]
    run("evaluate", path, data, *own, "--split [30:] --ood", f"same={data}")
    run("predict", path, data, *own, "--split [30:] --limit 5 -o", desk / "out.csv")
    assert [row["file"] for row in rows_of(desk / "out.csv")] == ["30", "32", "34", "36", "38"]


def test_columns_are_chosen(desk: Path) -> None:
    data = table_at(desk / "t.csv", "price", "kind", separator=";")
    own = ["--likelihood regression --target price"]
    fitted_table(desk, data, "one", *own, "--columns age,height --columns income")
    arguments = ["fit", data, *named(desk, "one"), "-o", desk / "q.h5", "--likelihood regression"]
    said = failure(*arguments, "--target price")
    assert "line 2: the column 'kind' has the text '" in said and "--columns" in said
    said = failure(*arguments, "--target price --columns age,height")
    assert "the row has 2 columns: age, height, and its first linear layer takes 3; --columns chooses" in said
    assert "no column 'weight'; it has age, price, kind" in failure(*arguments, "--target weight")
    assert "Which column" in failure(*arguments)
    assert "'age' is named twice" in failure(*arguments, "--target price --columns age,age")
    assert "is a range of its rows" in failure(*arguments, "--target price --split train")
    assert "--target is of tables" in failure(
        "fit", f"{desk / 'nets.py'}:one", *arguments[2:], "--target price"
    )


def test_names_with_commas(desk: Path) -> None:
    values = dict(zip(("age", "x, cm", "income"), features().T.tolist(), strict=True))
    data = write_columns(desk / "t.csv", values | {"y, EUR": targets()["price"]})
    (desk / "fit.yaml").write_text('target: "y, EUR"\ncolumns: ["x, cm", income, age]\n')
    names = ["--target", "y, EUR", "--columns", "x, cm", "--columns income,age"]
    for given in (names, ["--config", str(desk / "fit.yaml")]):
        path = fitted_table(desk, data, "one", "--likelihood regression --force", *given)
        fit = run_json("inspect", path)["fit"]
        assert fit["table columns"] == ["x, cm", "income", "age"] and fit["table targets"] == ["y, EUR"]


def test_a_posterior_takes_the_columns_of_its_fit(desk: Path) -> None:
    data = table_at(desk / "t.csv", "price")
    path = fitted_table(desk, data, "one", "--likelihood regression --target price")
    own = named(desk, "one")
    predict = ("predict", path, data, "-o", desk / "out.csv")
    for command in (predict, ("evaluate", path, data), ("tune", path, "--data", data)):
        said = failure(*command, *own, "--columns age")
        assert "fitted on 3 columns (age, height, income)" in said and "leave out --columns" in said
    assert "leave out --columns" in failure("update", path, data, *own, "--columns height,age,income")
    run("update", path, data, *own, "--columns", ",".join(NAMES))
    (desk / "text.csv").write_text("age,height,income\n1,2,3\n1,Rome,3\n")
    said = failure("predict", path, desk / "text.csv", *own, "-o", desk / "out.csv")
    assert "the column 'height' has the text 'Rome'" in said and "--columns" not in said
    make_images(desk / "photos", ("",), 1, 0)
    said = failure("predict", path, desk / "photos", *own, "-o", desk / "out.csv")
    assert "fitted on a table, and" in said
    lines = 'age,height,income,"in\nwords"\r\n\r\n1,2,3,"a\nb"\n  \n4,5,6,\n\n'
    (desk / "new.csv").write_text(lines)
    run("predict", path, desk / "new.csv", *own, "-o", desk / "out.csv")
    assert [row["file"] for row in rows_of(desk / "out.csv")] == ["0", "1"], "blank lines alone are left out"
    (desk / "new.csv").write_text(lines + "1,Rome,3,c\n")
    said = failure("predict", path, desk / "new.csv", *own, "-o", desk / "out.csv", "--force")
    assert "line 9: the column 'height'" in said
    (desk / "new.csv").write_text(
        lines + "1,3,c\n"
    )  # a cell is left out, and the last column is none of the model's
    said = failure("predict", path, desk / "new.csv", *own, "-o", desk / "out.csv", "--force")
    assert "line 9 has 3 cells, and the header 4" in said


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("1,2,,4", "line 3: the column 'income' has no value"),
        ("1,2,NA,4", "line 3: the column 'income' has no value"),
        ("1,2,inf,4", "line 3: the column 'income' has no value, or none that is finite"),
        ("1,2,1e60,4", "line 3: the column 'income' has no value, or none that is finite"),
        ("1,Rome,3,4", "line 3: the column 'height' has the text 'Rome'"),
        ("1,1_000,3,4", "line 3: the column 'height' has the text '1_000'"),
        ("1,True,3,4", "line 3: the column 'height' has the text 'True'"),
        ("1,2,3", "line 3 has 3 cells, and the header 4"),
        ("1,2,3,4,5", "Expected 4 fields in line 3, saw 5"),
        ("1,2,3,4,", "Expected 4 fields in line 3, saw 5"),
        (",,,", "line 3: the column 'age' has no value"),
        ("?,NA,none,nan", "line 3: the column 'age' has no value"),
        ("\n  \n1,2,,4", "line 5: the column 'income' has no value"),
        ('"1,2,3,4', "EOF inside string"),
        ('1,2,3,"4', "EOF inside string"),
        ('"a\nb",2,3,4', "line 3: the column 'age' has the text"),
        ("True,2,3,4", "line 3: the column 'age' has the text 'True'"),
    ],
)
def test_faults_name_row_and_column(desk: Path, cells: str, words: str) -> None:
    path = desk / "t.csv"
    path.write_text(f"age,height,income,price\n1,2,3,4\n{cells}\n")
    own = [*named(desk, "one"), "-o", desk / "p.h5", "--target price --likelihood regression"]
    assert words in failure("fit", path, *own)


def test_files_that_are_no_tables(desk: Path) -> None:
    own = [*named(desk, "one"), "-o", desk / "p.h5", "--target price --likelihood regression"]
    path = desk / "t.csv"
    assert "No such file" in failure("fit", path, *own)
    for content, words in (
        (b"", "is empty"),
        (b"age,price\n", "no rows below its header"),
        (b"age,age,price\n1,2,3\n", "two columns 'age'"),
        (b",age,price\n0,2,3\n", "Column 1 of"),
        (b"\xff\xfe\x00age", "not text in UTF-8"),
        (b"price\n1\n", "no column is left"),
    ):
        path.write_bytes(content)
        assert words in failure("fit", path, *own)


def test_labels(desk: Path) -> None:
    own = [*named(desk, "three"), "-o", desk / "p.h5", "--force --target kind"]
    few = write_columns(
        desk / "few.csv", dict(zip(NAMES, [[1, 2]] * 3, strict=True)) | {"kind": ["dog", "cat"]}
    )
    assert "2 different labels (cat, dog) and the model 3 classes" in failure("fit", few, *own)
    (desk / "map.txt").write_text("dog\nemu\ncat\n")
    run("fit", few, *own, "--class-map", desk / "map.txt", "--method diag")
    assert run_json("inspect", desk / "p.h5")["fit"]["table classes"] == ["dog", "emu", "cat"]
    many = write_columns(
        desk / "many.csv", dict(zip(NAMES, [[1, 2, 3, 4]] * 3, strict=True)) | {"kind": list("abcd")}
    )
    assert "4 different labels" in failure("fit", many, *own)
    said = failure("evaluate", desk / "p.h5", many, *named(desk, "three"))
    assert "line 2: the label 'a' is none of the classes dog, emu, cat" in said
    assert "order is not known" in failure("fit", few, *own, "--likelihood ordinal")
    blank = write_columns(
        desk / "blank.csv", dict(zip(NAMES, [[1, 2]] * 3, strict=True)) | {"kind": ["dog", ""]}
    )
    assert "line 3: the label is missing." in failure("fit", blank, *own)
    words = write_columns(
        desk / "words.csv", dict(zip(NAMES, [[1, 2, 3]] * 3, strict=True)) | {"kind": ["mild", "none", "NA"]}
    )
    assert "line 3: the label is missing ('none'); if that is a class" in failure("fit", words, *own)
    (desk / "map.txt").write_text("none\nmild\nNA\n")
    run("fit", words, *own, "--class-map", desk / "map.txt", "--method diag")
    run("evaluate", desk / "p.h5", words, *named(desk, "three"))


def test_soft_labels_in_several_columns(desk: Path) -> None:
    values = dict(zip(NAMES, features().T.tolist(), strict=True))
    shares = {"a": [0.5] * ROWS, "b": [0.25] * ROWS, "c": [0.25] * ROWS}
    data = write_columns(desk / "t.csv", values | shares)
    path = fitted_table(desk, data, "three", *(part for name in "abc" for part in ("--target", name)))
    run("predict", path, data, *named(desk, "three"), "-o", desk / "out.csv")
    assert {row["label_1"] for row in rows_of(desk / "out.csv")} <= {"a", "b", "c"}


def test_labels_that_no_class_has(desk: Path) -> None:
    own = [*named(desk, "three"), "-o", desk / "p.h5", "--target kind --method diag"]
    features = dict(zip(NAMES, [[1, 2, 3]] * 3, strict=True))
    for label in ("1e30", "-1", "3", "9" * 40):
        said = failure("fit", write_columns(desk / "t.csv", features | {"kind": ["0", label, "1"]}), *own)
        assert "line 3: the label has the index" in said and "the model the classes 0 to 2" in said
    names = write_columns(desk / "t.csv", features | {"kind": ["x", "y", "z"]})
    for index in (10**30, 3):
        (desk / "map.json").write_text(json.dumps({"x": 0, "y": 1, "z": index}))
        assert "line 4: the label has the index" in failure(
            "fit", names, *own, "--class-map", desk / "map.json"
        )


def test_texts_are_no_formulas() -> None:
    for text in (
        "=1+1",
        "+x",
        "@SUM(A1)",
        "-x",
        "-1+1",
        "\tx",
        "\r=1",
        "\n=1",
        "'=1",
        "''-x",
        "\uff1dx",
        "-",
        "--1",
    ):
        assert csv_text(text) == f"'{text}"
    for text in ("", "a=1", "-3", "-3.5", "-1e-05", "3", "'", "'a", "cat", " =1", "a\t="):
        assert csv_text(text) == text


def test_a_table_for_spreadsheets_has_no_formulas(desk: Path, tmp_path: Path) -> None:
    data = table_at(desk / "t.csv", "number")
    path, own = fitted_table(desk, data, "three", "--target number"), named(desk, "three")
    (tmp_path / "names.json").write_text(json.dumps(["=HYPERLINK(1)", "-3", "@x"]))
    out, measures = tmp_path / "out.csv", tmp_path / "measures.csv"
    run("predict", path, data, *own, "-o", out, "--class-names", tmp_path / "names.json")
    assert {row[f"label_{i}"] for row in rows_of(out) for i in (1, 2, 3)} == {"'=HYPERLINK(1)", "-3", "'@x"}
    run("evaluate", path, data, *own, "--ood", f"@x={data}", "--csv", measures)
    assert "'@x" in {row["data"] for row in rows_of(measures)}
    log = ScoreLog(str(tmp_path / "log.csv"))
    log.add([{"label_1": "=1+1", "entropy": -0.5, "reason": "+a.png"}])
    log.close()
    text = (tmp_path / "log.csv").read_text()
    assert ",'=1+1," in text and ",-0.5," in text and ",'+a.png," in text
