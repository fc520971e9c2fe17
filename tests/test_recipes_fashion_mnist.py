"""The FashionMNIST recipe: its reading of the files, and a small run on other images in the same format."""

from __future__ import annotations

import json

import pytest
from recipe_helpers import recipe_modules, smoke, write_fashion_mnist
from sklearn.datasets import load_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """scikit-learn's digits in the four files of FashionMNIST, as Debian ships them."""
    return write_fashion_mnist(tmp_path_factory.mktemp("idx"))


@pytest.fixture(scope="module")
def recipe():
    return recipe_modules("fashion_mnist", ["data"])


def test_files_are_read_as_they_were_written(recipe, folder):
    found = recipe.data.load(folder)
    parts = (found.train, found.validation, found.test)
    assert [len(part.images) for part in parts] == [1250, 250, 297] and len(found.digits) == 5000
    assert {tuple(images.shape[1:]) for images in (*(part.images for part in parts), found.digits)} == {
        (1, 28, 28)
    }
    expected = load_digits(return_X_y=True)[1][1500:1505].tolist()
    assert found.test.labels[:5].tolist() == expected
    low, high = -0.2860 / 0.3530, (1 - 0.2860) / 0.3530
    assert float(found.train.images.min()) == pytest.approx(low, abs=1e-5)
    assert float(found.train.images.max()) == pytest.approx(high, abs=1e-5)


@pytest.mark.study
def test_smoke(folder, tmp_path):
    patterns = [
        "plain",
        "temp*",
        "INF*",
        "function space, *s",
        "*sampling*",
        "latent*an model",
        "UTVI, de*",
        "tr*",
        "deep*",
    ]
    options = ("--data", folder, "--output", tmp_path, "--rows", *patterns)
    printed = smoke("fashion_mnist.run", *options)
    results = json.loads((tmp_path / "140-1-0.01" / "results-40-seed0.json").read_text())
    rows = [
        f"{posterior}, {row}"
        for posterior in ("INF, last layer",)
        for row in ("defaults", "tuned", "sampling, tuned", "moments, tuned")
    ]
    rows += ["function space, defaults", "function space, independent prior, defaults"]
    rows += ["latent binary, median model", "UTVI, defaults"]
    rows += ["trained on", "trained on, temperature scaling", "deep ensemble of 2"]
    assert list(results) == ["plain", "temperature scaling", *rows]
    assert set(results["plain"]["auroc"]) == {"entropy", "max_probability"}
    scores = {"entropy", "mutual_information", "epistemic_variance", "novelty", "both"}
    assert scores <= set(results["INF, last layer, defaults"]["auroc"]) & set(
        results["INF, last layer, tuned"]["auroc"]
    )
    assert results["INF, last layer, sampling, tuned"]["settings"]["prior_precision or scale"] > 0
    assert results["deep ensemble of 2"]["bytes"] == 2 * results["plain"]["bytes"]
    table = (tmp_path / "140-1-0.01" / "table.md").read_text()
    assert all(f"| {name} |" in table for name in results) and table in printed


@pytest.mark.study
def test_referral(folder, tmp_path):
    printed = smoke("fashion_mnist.referral", "--data", folder, "--output", tmp_path)
    (found,) = json.loads((tmp_path / "140-1-0.01" / "referral.json").read_text())
    assert list(found) == ["largest probability", "joint", "entropy", "novelty"]
    kinds = ["digits", "letters", "photos", "noise", "one grey", "negatives", "on its side"]
    assert list(found["joint"]) == ["accuracy", "of the rest", "mistakes referred", "familiar", *kinds]
    assert all(0 <= share <= 100 for row in found.values() for share in row.values())
    assert (
        found["novelty"]["negatives"] > found["largest probability"]["negatives"] and "| joint |" in printed
    )
