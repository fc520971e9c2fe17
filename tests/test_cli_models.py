"""Models from the command line: names, weights, the transform of each, and what a posterior's file names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from cli_helpers import CODE, failure, make_images, net, run, run_json
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights

import posthoc_uq as uq
from posthoc_uq.app import ModelSource, Preprocessing, read_state, trained_model, transform_of
from posthoc_uq.app.cli import posterior_file
from posthoc_uq.app.cli.models import function_at, imported, is_import_path, load_weights
from posthoc_uq.app.cli.transforms import input_channels

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def source(model: str, **given: Any) -> Any:
    """A model as the commands get it, on the CPU."""
    return trained_model(ModelSource(**{"model": model, "device": "cpu"} | given))


def complaint(work: Any) -> str:
    """What an error says."""
    with pytest.raises(uq.PosthocUQError) as caught:
        work()
    return str(caught.value)


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with models, in a current folder of its own; nothing of it stays imported."""
    (tmp_path / "own_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    yield tmp_path / "own_nets.py"
    sys.modules.pop("own_nets", None)


@pytest.fixture
def photo() -> Image.Image:
    """An image with structure, no square."""
    y, x = np.mgrid[0:300, 0:400]
    pixels = np.stack([x % 256, y % 256, (x + y) // 3 % 256], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels)


def test_places_of_code(nets: Path) -> None:
    assert imported(f"{nets}:number")() == 3 == imported("own_nets.py:number")()
    assert imported("own_nets:number")() == 3 and imported("torch:nn.Linear") is nn.Linear
    assert is_import_path("a.b:c") and is_import_path("/x/y.py:c.d")
    assert not any(map(is_import_path, ("a.b", "a:", ":b", "a:b/c", "a:1")))
    (nets.parent / "broken.py").write_text("import os\n1 / 0\n")
    for place, words in (
        ("gone.py:net", "'gone.py' could not be imported: FileNotFoundError"),
        ("gone.away:net", "No module named 'gone"),
        (f"{nets}:nett", "has no 'nett'. Did you mean 'net'"),
        (f"{nets}:pi", "is a int; it must be a function"),
        ("broken.py:x", "could not be imported: ZeroDivisionError"),
    ):
        assert words in complaint(lambda place=place: function_at(place))


class TestWeights:
    def test_all_forms_of_a_state_dict(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        state = model.state_dict()
        forms: dict[str, Any] = {
            "bare": state,
            "lightning": {"state_dict": {f"model.{k}": v for k, v in state.items()}, "epoch": 3},
            "torchvision": {"model": state, "optimizer": {"lr": 0.1}},
            "parallel": {"model_state_dict": {f"module.{k}": v for k, v in state.items()}},
            "compiled": {f"module._orig_mod.{k}": v for k, v in state.items()},
            "old": {k: v for k, v in state.items() if "num_batches" not in k},
        }
        for name, content in forms.items():
            torch.save(content, tmp_path / f"{name}.pt")
        save_file(state, tmp_path / "file.safetensors")
        for path in tmp_path.iterdir():
            fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            load_weights(fresh, str(path))
            assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items()), path

    def test_checkpoints_with_more_than_the_model(self, tmp_path: Path) -> None:
        path, state = str(tmp_path / "last.ckpt"), nn.Linear(3, 2).state_dict()

        def loaded(content: Any, prefix: str | None = None) -> dict[str, Tensor]:
            torch.save(content, path)
            fresh = nn.Linear(3, 2)
            load_weights(fresh, path, prefix)
            return fresh.state_dict()

        net = {f"net.{name}": value for name, value in state.items()}
        ema = {f"ema.model.{name}": value + 1 for name, value in state.items()}
        more = {"epoch": 3, "hyper_parameters": {"lr": 0.1}, "optimizer_states": [{"state": {}}]}
        assert torch.equal(loaded({"state_dict": net, **more})["weight"], state["weight"])
        with pytest.warns(
            UserWarning, match=r"behind 'net.' are taken, and 1 others are left out: loss.weight"
        ):
            found = loaded({"state_dict": net | {"loss.weight": torch.ones(2)}, **more})
        assert torch.equal(found["weight"], state["weight"])
        said = complaint(lambda: loaded({"state_dict": net | ema, **more}))
        assert "2 times, behind 'net.', 'ema.model.'; say which with --weights-prefix" in said
        for prefix in ("ema.model", "ema.model."):
            found = loaded({"state_dict": net | ema, **more}, prefix)
            assert torch.equal(found["weight"], state["weight"] + 1)
        said = complaint(lambda: loaded({"state_dict": net, **more}, "nett"))
        assert "begins with 'nett.'; they begin with net." in said
        said = complaint(lambda: loaded({"state_dict": net, "hyper_parameters": {"path": Path("x")}}))
        assert "holds Python objects (pathlib.PosixPath, say), which are not loaded" in said
        assert "torch.load(FILE, weights_only=False)['state_dict']" in said

    def test_a_prefix_that_the_model_has_stays(self, tmp_path: Path) -> None:
        model = nn.ModuleDict({"model": nn.Linear(2, 2)})
        torch.save(model.state_dict(), tmp_path / "w.pt")
        fresh = nn.ModuleDict({"model": nn.Linear(2, 2)})
        load_weights(fresh, str(tmp_path / "w.pt"))
        assert torch.equal(fresh["model"].weight, model["model"].weight)

    def test_names_and_shapes_that_differ(self, tmp_path: Path) -> None:
        path = str(tmp_path / "w.pt")
        torch.save({f"layer{i}.weight": torch.ones(1) for i in range(5)}, path)
        said = complaint(lambda: load_weights(nn.Linear(2, 2), path))
        assert (
            "of 2 tensors the file lacks 2 (weight, bias), and the model does not have 5 (layer0.weight, "
            in said
        )
        torch.save(nn.Linear(2, 7).state_dict(), path)
        said = complaint(lambda: load_weights(nn.Linear(2, 3), path))
        assert "torch.Size([7, 2])" in said and "--num-classes" in said and "\n" not in said

    def test_files_that_hold_no_weights(self, tmp_path: Path) -> None:
        assert "There is no weights file" in complaint(lambda: read_state(str(tmp_path / "gone.pt")))
        assert "cannot be read" in complaint(lambda: read_state(str(tmp_path)))
        torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
        assert "holds Python objects" in complaint(lambda: read_state(str(tmp_path / "module.pt")))
        torch.save({"epoch": 3}, tmp_path / "empty.pt")
        assert "holds no state dict" in complaint(lambda: read_state(str(tmp_path / "empty.pt")))
        whole = (tmp_path / "module.pt").read_bytes()
        for name, content in {
            "text.pt": b"hello",
            "cut.pt": whole[:300],
            "none.pt": b"",
            "x.safetensors": b"1",
        }.items():
            (tmp_path / name).write_bytes(content)
            said = complaint(lambda name=name: read_state(str(tmp_path / name)))
            assert "file" in said and "\n" not in said and name in said


class TestModels:
    def test_names_that_do_not_exist(self) -> None:
        weights = {"weights": "w.pt"}
        assert "timm has no model 'vit_tiny'. Did you mean " in complaint(
            lambda: source("timm:vit_tiny", **weights)
        )
        assert "Did you mean 'resnet18'" in complaint(lambda: source("torchvision:resnet1", **weights))
        assert "no classification or segmentation model 'fcn_resnet5'" in complaint(
            lambda: source("torchvision:fcn_resnet5", **weights)
        )
        assert "names no model" in complaint(lambda: source("resnet18"))
        assert "random weights" in complaint(lambda: source("torchvision:resnet18"))

    def test_own_functions(self, nets: Path) -> None:
        found = source(f"{nets}:net")
        assert not found.model.training and found.outputs(torch.zeros(3, 9, 9)).shape == (1, 3)
        assert "returned a int" in complaint(lambda: source(f"{nets}:number"))
        assert "are for models of timm and torchvision" in complaint(
            lambda: source(f"{nets}:net", num_classes=3)
        )
        said = complaint(lambda: found.outputs(torch.zeros(1, 9, 9)))
        assert "does not take an image of shape (1, 9, 9)" in said and "\n" not in said

    def test_a_device_that_is_not_there(self, nets: Path) -> None:
        said = complaint(lambda: source(f"{nets}:net", device="xpu:90"))
        assert "--device xpu:90 is not there" in said and "leave --device out, or use cpu" in said

    def test_timm_by_its_own_config(self, tmp_path: Path, photo: Image.Image) -> None:
        path = tmp_path / "w.safetensors"
        model = timm.create_model("test_resnet", num_classes=4)
        save_file(model.state_dict(), path)
        found = source("timm:test_resnet", weights=str(path), num_classes=4)
        expected = create_transform(**resolve_model_data_config(model), is_training=False)(photo)
        assert torch.equal(found.transform(photo), expected) and expected.shape == (3, 160, 160)
        assert torch.equal(
            found.transform(photo.convert("L")), found.transform(photo.convert("L").convert("RGB"))
        )
        image = expected.unsqueeze(0)
        assert torch.equal(found.model(image), model.eval()(image))
        assert found.transform.text.startswith("3 x 160 x 160 of 168, bilinear, mean 0.5")
        assert "--num-classes" in complaint(lambda: source("timm:test_resnet", weights=str(path)))

    def test_torchvision_by_its_weights(self, tmp_path: Path, photo: Image.Image) -> None:
        from torchvision.models import resnet18

        path = tmp_path / "w.pt"
        torch.save(resnet18(num_classes=5).state_dict(), path)
        found = source("torchvision:resnet18", weights=str(path), num_classes=5)
        expected = ResNet18_Weights.DEFAULT.transforms()(photo)
        assert torch.equal(found.transform(photo), expected)
        assert found.outputs(expected).shape[-1] == 5 and found.categories is None
        shown = found.transform.display(expected)
        assert 0 <= float(shown.min()) < float(shown.max()) <= 1
        said = complaint(lambda: source("torchvision:resnet18", pretrained=True, num_classes=5))
        assert "have 1000 outputs, not 5" in said

    def test_segmentation_by_torchvision(self, tmp_path: Path) -> None:
        from torchvision.models import get_model

        given: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 2}
        model = get_model("deeplabv3_mobilenet_v3_large", **given, aux_loss=True)
        torch.save(model.state_dict(), tmp_path / "w.pt")
        name = "torchvision:deeplabv3_mobilenet_v3_large"
        found = source(name, weights=str(tmp_path / "w.pt"), num_classes=2)
        assert found.model.aux_classifier is None, "of the training alone"
        assert torch.equal(found.model.classifier[0].project[0].weight, model.classifier[0].project[0].weight)
        assert found.transform.text.startswith("3 x own size of 520, bilinear, mean")


class TestTransforms:
    def test_without_options_images_keep_their_size(self, nets: Path, photo: Image.Image) -> None:
        found = source(f"{nets}:net").transform(photo)
        assert torch.equal(found, torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255)

    def test_size_mean_and_deviation(self, nets: Path, photo: Image.Image) -> None:
        transform = source(f"{nets}:net", image_size=30, mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.5]).transform
        small = photo.resize((40, 30), Image.Resampling.BILINEAR)
        pixels = np.asarray(small)[:, 5:35].astype(np.float32) / 255
        expected = (pixels - np.float32([0.5, 0.4, 0.3])) / np.float32([0.2, 0.25, 0.5])
        found = transform(photo)
        torch.testing.assert_close(found, torch.from_numpy(expected).permute(2, 0, 1), atol=1e-5, rtol=0)
        torch.testing.assert_close(transform.display(found), torch.from_numpy(pixels).permute(2, 0, 1))
        assert transform.text == "3 x 30 x 30 of 30, bilinear, mean 0.5/0.4/0.3, std 0.2/0.25/0.5"

    def test_another_size_keeps_the_share_of_the_crop(self, tmp_path: Path, photo: Image.Image) -> None:
        path = tmp_path / "w.pt"
        torch.save(timm.create_model("test_resnet").state_dict(), path)
        found = source("timm:test_resnet", weights=str(path), image_size=80).transform
        by_timm = create_transform(
            (3, 80, 80), interpolation="bilinear", crop_pct=0.95, mean=[0.5] * 3, std=[0.5] * 3
        )
        assert found.text.startswith("3 x 80 x 80 of 84")
        torch.testing.assert_close(found(photo), by_timm(photo), atol=1e-6, rtol=0)

    def test_one_channel_gets_grey_images(self, photo: Image.Image) -> None:
        model = timm.create_model("test_resnet", in_chans=1)
        assert input_channels(model) == 1
        transform = transform_of(model, ModelSource(model="x:y"))
        found = transform(photo)
        assert found.shape == (1, 160, 160)
        assert torch.equal(found, transform(photo.convert("L")))
        assert transform.mean == (0.5,) and model.eval()(found.unsqueeze(0)).shape == (1, 1000)
        grey = Preprocessing(1, mean=(0.25,), std=(0.5,)).transform()
        expected = (np.asarray(photo.convert("L")).astype(np.float32) / 255 - 0.25) / 0.5
        torch.testing.assert_close(grey(photo)[0], torch.from_numpy(expected))

    def test_of_ones_own(self, nets: Path, photo: Image.Image) -> None:
        for name in ("half", "make_half"):
            transform = source(f"{nets}:net", transform=f"{nets}:{name}").transform
            expected = torch.from_numpy(np.asarray(photo)[:8, :8].copy()).permute(2, 0, 1).float() / 510
            assert torch.equal(transform(photo), expected)
        nets.write_text(
            CODE + "\n\ndef bearing():\n    model = net()\n    model.transform = half\n    return model\n"
        )
        sys.modules.pop("own_nets", None)
        assert source(f"{nets}:bearing").transform(photo).shape == (3, 8, 8)
        assert source(f"{nets}:bearing", image_size=20).transform(photo).shape == (3, 20, 20)

    def test_options_that_do_not_fit(self, nets: Path) -> None:
        place = f"{nets}:net"
        assert "give both or neither" in complaint(lambda: source(place, mean=[0.5]))
        assert "leave --image-size" in complaint(
            lambda: source(place, transform=f"{nets}:half", image_size=3)
        )
        assert "--mean has 2 numbers" in complaint(lambda: source(place, mean=[0.5, 0.5], std=[1.0]))
        assert "gives no transform: a int" in complaint(lambda: source(place, transform=f"{nets}:number"))


# The model and the weights that a posterior's file names, and what a stranger's file may name.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_images(tmp_path / "few", ("a", "b", "c"), 2, 0)
    (tmp_path / "nets.py").write_text(CODE)
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pt")
    torch.save(net().state_dict(), tmp_path / "net.pt")
    common = ["fit", tmp_path / "few", "--method diag --layers last --prior-precision 5"]
    common += ["--image-size 32 --workers 0"]
    named = ["--model timm:test_resnet --num-classes 3 --weights", tmp_path / "w.pt"]
    run(*common, *named, "-o", tmp_path / "p.h5")
    named = ["--model", f"{tmp_path / 'nets.py'}:net", "--weights", tmp_path / "net.pt"]
    run(*common, *named, "-o", tmp_path / "n.h5")
    return tmp_path


def test_other_commands_take_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = run_json("inspect", place / "p.h5")["fit"]
    assert (facts["model"], facts["model weights"], facts["model classes"]) == ("timm:test_resnet", "w.pt", 3)
    assert "fit, model weights" in run("inspect", place / "p.h5").stdout
    data = [place / "few", "--workers 0 --n-samples 2"]
    explicit = ["--model timm:test_resnet --num-classes 3 --weights", place / "w.pt"]
    run("predict", place / "p.h5", *data, *explicit, "-o", place / "a.csv")
    said = run("predict", place / "p.h5", *data, "-o", place / "b.csv").stderr
    assert said.startswith(f"From '{place / 'p.h5'}': the model timm:test_resnet with the weights '")
    assert said.endswith("w.pt'.\n") and said.count("\n") == 1
    assert (place / "a.csv").read_text() == (place / "b.csv").read_text()
    assert run("predict", place / "p.h5", *data, "-o", place / "b.csv", "--force --quiet").stderr == ""
    monkeypatch.chdir(place)
    few = ["few", "--workers 0"]
    run("update", "p.h5", *few, "-o", "u.h5")
    run("tune", "p.h5", "--data", *few)


def test_they_move_with_the_file(place: Path) -> None:
    (place / "away").mkdir()
    update = ["update", place / "p.h5", place / "few", "--workers 0"]
    run(*update, "-o", place / "away" / "p.h5")  # where its weights are not
    assert "model weights" not in run_json("inspect", place / "away" / "p.h5")["fit"]
    (place / "away" / "w.pt").write_bytes((place / "w.pt").read_bytes())
    run(*update, "--weights", place / "away" / "w.pt", "-o", place / "away" / "q.h5")
    (place / "w.pt").unlink()
    assert "names the weights 'w.pt', and its folder has no such file; give --weights" in failure(*update)
    (place / "away").rename(place / "further")
    run("update", place / "further" / "q.h5", place / "few", "--workers 0")


def test_options_win(place: Path) -> None:
    update = ["update", place / "p.h5", place / "few", "--workers 0"]
    assert "There is no weights file 'no.pt'" in failure(*update, "--weights no.pt")
    said = failure(*update, "--model timm:test_vit")
    assert "'timm:test_vit' alone has random weights" in said
    torch.save({k: v + 1 for k, v in torch.load(place / "w.pt").items()}, place / "other.pt")
    assert "not those that the posterior in" in failure(*update, "--weights", place / "other.pt")
    assert "do not fit the model" in failure(*update, "--num-classes 4")


def test_named_weights_are_an_input(place: Path) -> None:
    before = (place / "w.pt").read_bytes()
    said = failure("update", place / "p.h5", place / "few", "-o", place / "w.pt", "--force")
    assert "is an input of this command" in said and (place / "w.pt").read_bytes() == before


def test_code_is_run_only_if_the_user_names_it(place: Path) -> None:
    assert run_json("inspect", place / "n.h5")["fit"]["model"] == "nets.py:net"
    (place / "nets.py").write_text(CODE + f"\nopen({str(place / 'run')!r}, 'w')\n")
    update = ["update", place / "n.h5", place / "few", "--workers 0"]
    said = failure(*update)
    assert "names the model 'nets.py:net', which is code, and code is run only if you name it" in said
    assert not (place / "run").exists()
    told = run(*update, "--model", f"{place / 'nets.py'}:net").stderr
    assert "the weights '" in told and "net.pt'." in told and (place / "run").exists()


def test_a_strangers_file_does_no_harm(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path_factory.mktemp("strange")
    (strange / "link.pt").symlink_to(place / "w.pt")
    (strange / "up").symlink_to(place)
    os.mkfifo(strange / "pipe.pt")
    path, facts = strange / "p.h5", uq.inspect(place / "p.h5")["fit"]
    path.write_bytes((place / "p.h5").read_bytes())
    told: dict[str, Any] = {}
    monkeypatch.setattr(posterior_file, "inspect", lambda _: {"fit": told})

    def said(**changed: Any) -> str:
        told.clear()
        told.update(facts | {name.replace("_", " "): value for name, value in changed.items()})
        return complaint(lambda: posterior_file.taken_from(str(path), ModelSource()))

    for weights in (str(place / "w.pt"), "../w.pt", "a/../../w.pt", "link.pt", "up/w.pt", "http://x/w.pt"):
        assert "names weights that are not in its own folder" in said(model_weights=weights)
    for weights in ("C:\\w.pt", "..\\w.pt", "w\n.pt", "w\x00.pt", "", "x" * 3000, "/dev/zero"):
        assert "names weights that are not in its own folder" in said(model_weights=weights)
    for weights in ("pipe.pt", ".", "w.pt", "x" * 400):
        assert "and its folder has no such file" in said(model_weights=weights)
    for name in ("timm:hf-hub:a/b", "timm:../x", "timm:" + "x" * 900, "torchvision:", "timm:local-dir:/x"):
        assert "has not; give --model" in said(model=name)
    for name in ("evil.py:f", "os:getcwd", "http://x/evil.py:f", "/evil.py:f"):
        assert "is code, and code is run only if" in said(model=name)
    assert "names no model" in said(model="")
    (strange / "w.pt").write_bytes((place / "w.pt").read_bytes())
    told.update(facts | {"model": "timm:evil"})
    assert "timm has no model 'evil'" in failure("update", path, place / "few", "--workers 0")
