"""The demo from beginning to end in a reduced form, and the images whose mistakes would not show in its tables."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")

from posthoc_uq.app.cli import demo


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the digits."""
    load = demo.load_digits

    def load_few(seed: int) -> Any:
        data = load(seed, validation=400)  # of which 20 promise, as a level of .95 needs
        return data._make(type(part)(*(tensor[::10] for tensor in part)) for part in data)

    monkeypatch.setattr(demo, "load_digits", load_few)


LEFT = {"digits.cnn.pt", "digits.inf.h5", "digits.html"} | {
    f"digits.{name}.png" for name in ("coverage", "familiar", "promises", "reliability", "risk")
}


@pytest.mark.slow
def test_what_it_leaves(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAINED", {})
    evaluation, identical = demo.run(tmp_path, seed=0, epochs=2)
    assert identical, "a fresh process must predict bit for bit the same"
    assert list(evaluation.metrics) == ["network alone", "INF as fitted", "INF calibrated"]
    assert {path.name for path in tmp_path.iterdir()} == LEFT


@pytest.mark.study
@pytest.mark.parametrize("trained", [(), tuple(demo.TRAINED)])
def test_end_to_end(
    trained: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "TRAINED", {name: demo.TRAINED[name] for name in trained})
    evaluation, identical = demo.run(tmp_path, seed=0, epochs=5)
    assert identical, "a fresh process must predict bit for bit the same"
    plain = evaluation.metrics["network alone"]
    assert plain["accuracy"] > 0.9
    for name in ("INF as fitted", "INF calibrated", *trained):
        found = evaluation.metrics[name]
        assert found["accuracy"] > plain["accuracy"] - 0.005
        assert found["nll"] < plain["nll"] + 0.02 and found["ece"] < plain["ece"] + 0.02
        for foreign in evaluation.foreign_names:
            scores = evaluation.foreign[name][foreign]
            certain = ["entropy", "mutual_information", "novelty"] if "INF" in name else ["novelty"]
            assert min(scores[score]["auroc"] for score in certain) > 0.7
    printed = capsys.readouterr().out
    assert "Test digits" in printed and "mutual information" in printed
    assert {path.name for path in tmp_path.iterdir()} == LEFT


def test_digits_are_split_without_overlap() -> None:
    data = demo.load_digits(seed=3)
    assert sum(len(part.labels) for part in data) == 1797
    assert torch.equal(data.test.images, demo.load_digits(seed=3).test.images)
    assert not torch.equal(data.test.labels, demo.load_digits(seed=4).test.labels)
    for part in data:
        assert part.images.shape == (len(part.labels), 1, 8, 8)
        assert (float(part.images.min()), float(part.images.max())) == (0, 1)


def test_foreign_images_look_like_digits_in_scale() -> None:
    data = demo.load_digits(seed=0)
    rotated, letters = demo.rotated_digits(data.test), demo.rendered_letters()
    kept = ~torch.isin(data.test.labels, torch.tensor([0, 1, 8]))
    torch.testing.assert_close(torch.rot90(rotated, -1, dims=(2, 3)), data.test.images[kept])
    assert len(letters) == 12 * 34  # letters that cannot be read as a digit
    torch.testing.assert_close(letters * 16, (letters * 16).round())  # counts, as the digits are
    assert float(letters.mean()) == pytest.approx(float(data.test.images.mean()), rel=0.25)
    assert len(letters.flatten(1).unique(dim=0)) > 0.8 * len(letters)
