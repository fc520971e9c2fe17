"""Data from the command line: folders, class maps, torchvision's sets, the user's own functions."""

from __future__ import annotations

import json
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
from cli_helpers import CODE, make_images, net
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler

import posthoc_uq as uq
from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.images import FolderImages, ImageLoader, Trouble, image_files
from posthoc_uq.cli.labels import folder_labels, read_map, read_names
from posthoc_uq.cli.meaning import meaning_of_likelihood
from posthoc_uq.cli.models import Source
from posthoc_uq.cli.transforms import Preprocessing
from posthoc_uq.cli.weights import read_state
from posthoc_uq.core.distributed import own_samples, sampler_of
from posthoc_uq.core.paths import IMAGE_ENDINGS
from posthoc_uq.deployment import read_scores

GIVEN: dict[str, Any] = {
    **dict.fromkeys("split class_map limit ignore_index".split()),
    "target": (),
    "columns": (),
    "data_root": "data",
    "download": False,
    "batch_size": 4,
    "workers": 0,
}


def read(
    spec: Any,
    channels: int = 3,
    labels: bool = True,
    split: str = "train",
    part: str | None = None,
    **given: Any,
) -> Any:
    """Data as the commands get them."""
    model = net() if channels == 3 else torch.nn.Conv2d(1, 3, 3)
    source = Source(model, "x:y", Preprocessing(channels).transform(), None)
    own = {name: given.pop(name) for name in ("numbered", "skip") if name in given}
    options = GIVEN | {"split": part} | given
    meaning = meaning_of_likelihood("classification")
    return data_of(str(spec), source, options, meaning, labels=labels, split=split, **own)


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
        assert data.files[0] == "cat/0.png" and len(data.files) == 12 and data.labelled
        assert data.class_names == ["cat", "dog", "emu"]
        images = torch.cat([inputs for inputs, _ in data.loader])
        for path, image in zip(data.files, images, strict=True):
            pixels = np.array(Image.open(folder / path)).astype(np.float32) / 255
            assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))

    def test_without_classes_there_are_inputs_alone(self, tmp_path: Path) -> None:
        make_images(tmp_path, ("",), 5, 0)
        data = read(tmp_path)
        assert not data.labelled and data.files == [f"{i}.png" for i in range(5)]
        assert [tuple(batch.shape) for batch in data.loader] == [(4, 3, 14, 12), (1, 3, 14, 12)]
        assert read(tmp_path / "3.png").files == ["3.png"]

    def test_labels_are_left_aside_where_none_are_wanted(self, folder: Path) -> None:
        make_images(folder / "deep" / "deeper", ("",), 1, 3)
        data = read(folder, labels=False, numbered=True)
        assert len(data.files) == 13 and not data.labelled and data.class_names is None
        numbers = torch.cat([numbers for _, numbers in data.loader])
        assert numbers.tolist() == list(range(13))

    def test_images_beside_class_folders(self, folder: Path) -> None:
        Image.new("RGB", (12, 14)).save(folder / "stray.png")
        assert "belong to none, such as 'stray.png'" in complaint(lambda: read(folder))
        assert len(read(folder, labels=False).files) == 13

    def test_a_folder_one_level_too_high(self, folder: Path, tmp_path: Path) -> None:
        for part in ("test", "train", "val"):
            make_images(tmp_path / "photos" / part, ("cat", "dog", "emu"), 1, 0)
        for split in ("train", "val"):
            with pytest.warns(UserWarning) as caught:
                assert labels_of(read(tmp_path / "photos", split=split)) == [0] * 3 + [1] * 3 + [2] * 3
            (said,) = [str(warning.message) for warning in caught]
            assert "(test, train, val) hold no images themselves" in said
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

    def test_a_split_is_for_named_data(self, folder: Path) -> None:
        assert f"give the folder '{folder}/val' itself" in complaint(lambda: read(folder, part="val"))

    def test_sizes_that_differ(self, folder: Path) -> None:
        Image.new("RGB", (20, 30)).save(folder / "dog" / "large.png")
        said = complaint(lambda: list(read(folder).loader))
        assert (
            "images differ in size, (3, 14, 12) and (3, 30, 20) in one batch; give --image-size, or --batch-size 1."
            in said
        )


class TestTroubles:
    def test_the_unreadable_is_named_or_left_out(self, folder: Path) -> None:
        for workers in (0, 2):
            bad = folder / "dog" / "1.png"
            bad.write_bytes(b"no image")
            said = complaint(lambda n=workers: list(read(folder, workers=n).loader))
            assert (
                said
                == f"Unreadable image '{bad}': not in an image format that is read: BMP, JPEG, PNG, PPM, TIFF, WEBP."
            )
            data = read(folder, labels=False, numbered=True, skip=True, workers=workers)
            numbers = torch.cat([numbers for _, numbers in data.loader])
            assert numbers.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
            assert [trouble.name for trouble in data.skipped] == [str(bad)]
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

    def test_batches_of_nothing_are_left_out(self, folder: Path) -> None:
        for number in range(4):
            (folder / "dog" / f"{number}.png").write_bytes(b"")
        data = read(folder, labels=False, skip=True)
        assert [len(batch) for batch in data.loader] == [4, 4]
        assert len(data.skipped) == 4 and all(isinstance(trouble, Trouble) for trouble in data.skipped)

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
            assert "must map names of folders" in complaint(lambda wrong=wrong: mapped(wrong))
        path.with_suffix(".json").write_text("{")
        assert "is not valid JSON" in complaint(lambda: read_map(str(path.with_suffix(".json"))))
        assert "there is no file" in complaint(lambda: read_map(str(tmp_path / "gone")))

    def test_a_name_of_two_outputs(self, tmp_path: Path) -> None:
        path = tmp_path / "names.txt"
        path.write_text("crane\ntench\ncrane\n")
        assert "gives the name 'crane' to the outputs 0 and 2" in complaint(lambda: read_map(str(path)))
        path.write_text("n01 crane\nn02 tench\nn03 crane\n")
        assert [read_map(str(path))[name] for name in ("n01", "n02", "n03")] == [0, 1, 2]

    def test_forms_of_class_names(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("tench, a fish\ngold fish\n")
        assert read_names(str(tmp_path / "a.txt")) == ["tench, a fish", "gold fish"]
        for content in (["x", "y"], {"1": "y", "0": "x"}, {"0": ["n01", "x"], "1": ["n02", "y"]}):
            (tmp_path / "a.json").write_text(json.dumps(content))
            assert read_names(str(tmp_path / "a.json")) == ["x", "y"]
        (tmp_path / "a.json").write_text('{"0": "x", "2": "y"}')
        assert "'1' is missing" in complaint(lambda: read_names(str(tmp_path / "a.json")))
        for name in ("wolf", "ant", ".git"):
            (tmp_path / "photos" / name).mkdir(parents=True)
        assert read_names(str(tmp_path / "photos")) == ["ant", "wolf"]
        assert "has no class folders" in complaint(lambda: read_names(str(tmp_path / "photos" / "ant")))
        (tmp_path / "a.json").write_text("[1]")
        assert "one name for each output" in complaint(lambda: read_names(str(tmp_path / "a.json")))

    def test_a_subset_by_its_names(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "map.txt").write_text("ape\nemu\nbee\ndog\ncat\n")
        chosen = folder_labels(["cat", "dog", "emu"], 5, str(tmp_path / "map.txt"), "x")
        assert chosen == {"cat": 4, "dog": 3, "emu": 1}
        (tmp_path / "three.json").write_text('{"cat": 2, "dog": 0, "emu": 1}')
        data = read(folder, class_map=str(tmp_path / "three.json"))
        assert labels_of(data) == [2] * 4 + [0] * 4 + [1] * 4
        assert data.class_names == ["dog", "emu", "cat"]
        (folder / "emu").rename(tmp_path / "emu")
        assert read(folder, class_map=str(tmp_path / "three.json")).class_names is None
        (tmp_path / "emu").rename(folder / "emu")
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
        assert sum(len(x) for x, _ in read("own_data.py:points", limit=7).loader) == 7

    def test_a_part_keeps_its_numbers(self) -> None:
        data = read("own_data:points", part="train[2:]", limit=2)
        inputs = torch.cat([batch[0] for batch in data.loader])
        whole = torch.cat([batch[0] for batch in read("own_data:points", split="train").loader])
        assert data.rows is not None and torch.equal(inputs, whole[data.rows])

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
