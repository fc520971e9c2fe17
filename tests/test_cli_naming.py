"""The model and the weights that a posterior's file names, and what a stranger's file may name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from cli_helpers import CODE, failure, make_images, net, run, run_json

import posthoc_uq as uq

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_images(tmp_path / "few", ("a", "b", "c"), 2, 0)
    (tmp_path / "nets.py").write_text(CODE)
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pt")
    torch.save(net().state_dict(), tmp_path / "net.pt")
    common = ["fit", tmp_path / "few", "--method", "diag", "--layers", "last", "--prior-precision", 5]
    common += ["--image-size", 32, "--workers", 0]
    named = ["--model", "timm:test_resnet", "--num-classes", 3, "--weights", tmp_path / "w.pt"]
    run(*common, *named, "-o", tmp_path / "p.h5")
    named = ["--model", f"{tmp_path / 'nets.py'}:net", "--weights", tmp_path / "net.pt"]
    run(*common, *named, "-o", tmp_path / "n.h5")
    return tmp_path


def test_other_commands_take_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = run_json("inspect", place / "p.h5")["fit"]
    assert (facts["model"], facts["model weights"], facts["model classes"]) == ("timm:test_resnet", "w.pt", 3)
    assert "fit, model weights" in run("inspect", place / "p.h5").stdout
    data = [place / "few", "--workers", 0, "--n-samples", 2]
    explicit = ["--model", "timm:test_resnet", "--num-classes", 3, "--weights", place / "w.pt"]
    run("predict", place / "p.h5", *data, *explicit, "-o", place / "a.csv")
    said = run("predict", place / "p.h5", *data, "-o", place / "b.csv").stderr
    assert said.startswith(f"From '{place / 'p.h5'}': the model timm:test_resnet with the weights '")
    assert said.endswith("w.pt'.\n") and said.count("\n") == 1
    assert (place / "a.csv").read_text() == (place / "b.csv").read_text()
    assert run("predict", place / "p.h5", *data, "-o", place / "b.csv", "--force", "--quiet").stderr == ""
    monkeypatch.chdir(place)
    few = ["few", "--workers", 0]
    run("evaluate", "p.h5", *few, "--csv", "e.csv")
    run("update", "p.h5", *few, "-o", "u.h5")
    run("update", "--remove", "u.h5", *few, "-o", "f.h5")
    run("tune", "p.h5", "--data", *few, "--no-search", "--referral-rate", 0.2)


def test_they_move_with_the_file(place: Path) -> None:
    (place / "away").mkdir()
    update = ["update", place / "p.h5", place / "few", "--workers", 0]
    run(*update, "-o", place / "away" / "p.h5")  # where its weights are not
    assert "model weights" not in run_json("inspect", place / "away" / "p.h5")["fit"]
    (place / "away" / "w.pt").write_bytes((place / "w.pt").read_bytes())
    run(*update, "--weights", place / "away" / "w.pt", "-o", place / "away" / "q.h5")
    (place / "w.pt").unlink()
    assert "names the weights 'w.pt', and its folder has no such file; give --weights" in failure(*update)
    (place / "away").rename(place / "further")
    run("update", place / "further" / "q.h5", place / "few", "--workers", 0)


def test_options_win(place: Path) -> None:
    update = ["update", place / "p.h5", place / "few", "--workers", 0]
    assert "There is no weights file 'no.pt'" in failure(*update, "--weights", "no.pt")
    said = failure(*update, "--model", "timm:test_vit")
    assert "'timm:test_vit' alone has random weights" in said
    torch.save({k: v + 1 for k, v in torch.load(place / "w.pt").items()}, place / "other.pt")
    assert "not those that the posterior in" in failure(*update, "--weights", place / "other.pt")
    assert "have another shape" in failure(*update, "--num-classes", 4)


def test_named_weights_are_an_input(place: Path) -> None:
    before = (place / "w.pt").read_bytes()
    said = failure("update", place / "p.h5", place / "few", "-o", place / "w.pt", "--force")
    assert "is an input of this command" in said and (place / "w.pt").read_bytes() == before


def test_code_is_run_only_if_the_user_names_it(place: Path) -> None:
    assert run_json("inspect", place / "n.h5")["fit"]["model"] == "nets.py:net"
    (place / "nets.py").write_text(CODE + f"\nopen({str(place / 'run')!r}, 'w')\n")
    update = ["update", place / "n.h5", place / "few", "--workers", 0]
    said = failure(*update)
    assert "names the model 'nets.py:net', which is code, and code is run only if you name it" in said
    assert not (place / "run").exists()
    told = run(*update, "--model", f"{place / 'nets.py'}:net").stderr
    assert "the weights '" in told and "net.pt'." in told and (place / "run").exists()


def test_a_strangers_file_does_no_harm(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    strange = tmp_path_factory.mktemp("strange")
    (strange / "link.pt").symlink_to(place / "w.pt")
    (strange / "up").symlink_to(place)
    os.mkfifo(strange / "pipe.pt")
    model = timm.create_model("test_resnet", num_classes=3)
    model.load_state_dict(torch.load(place / "w.pt"))
    posterior, path = uq.load(place / "p.h5", model.eval()), strange / "p.h5"
    facts = dict(posterior.history.fit)

    def said(**changed: Any) -> str:
        posterior.history.fit = facts | {name.replace("_", " "): value for name, value in changed.items()}
        uq.save(posterior, path)
        return failure("update", path, place / "few", "--workers", 0)

    for weights in (str(place / "w.pt"), "../w.pt", "a/../../w.pt", "link.pt", "up/w.pt", "http://x/w.pt"):
        assert "names weights that are not in its own folder" in said(model_weights=weights)
    for weights in ("C:\\w.pt", "..\\w.pt", "w\n.pt", "w\x00.pt", "", "x" * 3000, 3, ["w.pt"], "/dev/zero"):
        assert "names weights that are not in its own folder" in said(model_weights=weights)
    for weights in ("pipe.pt", ".", "w.pt", "x" * 400):
        assert "and its folder has no such file" in said(model_weights=weights)
    for name in ("timm:hf-hub:a/b", "timm:../x", "timm:" + "x" * 900, "torchvision:", "timm:local-dir:/x"):
        assert "has not; give --model" in said(model=name)
    for name in ("evil.py:f", "os:getcwd", "http://x/evil.py:f", "/evil.py:f"):
        assert "is code, and code is run only if" in said(model=name)
    for name in (3, "", ["timm:resnet18"]):
        assert "names no model" in said(model=name)
    (strange / "w.pt").write_bytes((place / "w.pt").read_bytes())
    assert "timm has no model 'evil'" in said(model="timm:evil")
    for classes in (10**12, -1, "3", True, 2.5):
        assert "no possible number of classes" in said(model_classes=classes)
