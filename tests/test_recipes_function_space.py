"""The function-space recipes: their smoke modes as scripts, and their parts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke, write_fashion_mnist
from torch import nn

import posthoc_uq as uq


@pytest.fixture(scope="module")
def recipe() -> Namespace:
    return Namespace(
        **vars(recipe_modules("function_space", ["foreign", "two_moons"])),
        **vars(recipe_modules("fashion_mnist", ["variational"])),
    )


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        ("regression", 6),
        *(pytest.param(*case, marks=pytest.mark.study) for case in (("two_moons", 7), ("rotated_digits", 5))),
    ],
)
def test_smoke(script: str, rows: int, tmp_path: Path) -> None:
    printed = smoke(f"function_space.{script}", "--output", tmp_path)
    (results,) = json.loads((tmp_path / f"{script}.json").read_text())
    assert len(results) == rows and all(f"| {name} |" in printed for name in results)
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in results.values())
    assert (tmp_path / f"{script}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.study
def test_smoke_on_images(tmp_path: Path) -> None:
    for name in ("data", "networks"):
        (tmp_path / name).mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    options = ("--data", data, "--output", tmp_path / "out", "--networks", tmp_path / "networks")
    smoke("function_space.images", *options)
    (results,) = json.loads((tmp_path / "out" / "images.json").read_text())
    contexts = ("monochrome", "distorted clothes", "photographs", "digits")
    rows = ["network", *(f"post hoc, {name}" for name in contexts)]
    assert list(results) == [*rows, "from scratch, monochrome"]
    kept = sorted(path.name for path in (tmp_path / "networks" / "140-1-0.01").glob("function-space-*.h5"))
    assert kept == [
        f"function-space-{name}-1-seed0.h5"
        for name in ("digits", "distorted-clothes", "monochrome", "photographs", "scratch")
    ]
    assert (tmp_path / "out" / "selective_prediction.png").stat().st_size > 10_000


@pytest.mark.study
def test_smoke_on_uci(tmp_path: Path) -> None:
    smoke("function_space.uci", "--output", tmp_path)
    (split,) = json.loads((tmp_path / "uci.json").read_text())["boston"]
    assert list(split) == ["network", "around the network", "from random weights"]
    assert all(2 < row["RMSE"] < 10 and -5 < row["log-likelihood"] < -2 for row in split.values())


@pytest.mark.study
def test_smoke_of_ensembles(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    smoke("function_space.ensembles", "--data", data, "--output", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "ensembles.json").read_text())
    assert list(results) == ["clothes", "digits"]
    for (rows,) in results.values():
        kinds = ["bound, monochrome context", "independent prior"]
        several = [f"{kind}, ensemble of 2" for kind in kinds]
        assert set(rows) == {"network", "ensemble of 2", *kinds, *several}
        assert all(0 <= row["AUROC, letters"] <= 1 and row["NLL"] < 5 for row in rows.values())


@pytest.mark.study
def test_smoke_of_objectives(tmp_path: Path) -> None:
    for name in ("data", "networks"):
        (tmp_path / name).mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    options = ("--data", data, "--output", tmp_path / "out", "--networks", tmp_path / "networks")
    trials = ("--trials", "independent, corrupted", "--digits")
    smoke("function_space.objectives", *trials, *options)
    (results,) = json.loads((tmp_path / "out" / "objectives.json").read_text())
    assert list(results) == ["network", "independent, corrupted"]
    assert {"digits, mutual information", "letters, entropy", "digits, novelty"} <= results[
        "independent, corrupted"
    ].keys()


def test_foreign_images_are_what_they_are_said_to_be(recipe: Namespace) -> None:
    photos, letters = recipe.foreign.photos(50), recipe.foreign.letters(50)
    assert photos.shape == letters.shape == (50, 28, 28) and photos.dtype == letters.dtype == torch.uint8
    assert torch.equal(letters, recipe.foreign.letters(50))
    assert not torch.equal(letters, recipe.foreign.letters(50, seed=1))
    border = torch.cat([letters[:, 0], letters[:, -1], letters[:, :, 0], letters[:, :, -1]])
    assert border.float().mean() < 8  # white letters inside of a black field ...
    assert ((letters > 200).flatten(1).sum(1) >= 15).all()  # ... and none without ink
    assert letters.flatten(1).unique(dim=0).shape[0] > 45
    assert photos.flatten(1).float().std(1).gt(0).double().mean() > 0.95


def test_distorted_images_are_made_of_others(recipe: Namespace) -> None:
    given = recipe.foreign.letters(40)
    state = torch.get_rng_state()
    found = recipe.foreign.augmented(given, 30)
    assert found.shape == (30, 28, 28) and found.dtype == torch.uint8
    assert torch.equal(found, recipe.foreign.augmented(given, 30)) and torch.equal(
        torch.get_rng_state(), state
    )
    assert not (found.unsqueeze(1) == given).flatten(2).all(2).any()


def test_draws_of_the_linearised_network_have_its_moments(recipe: Namespace) -> None:
    torch.manual_seed(0)
    x, y = recipe.two_moons.moons(0, 60)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    posterior = uq.fit(model, [(x, y)], method="full", fisher="exact", prior_precision=200.0, progress=False)
    draws = recipe.two_moons.by_linearising(model, posterior, 40_000)(x[:3])
    with torch.no_grad():
        covariance = uq.wrap(model, posterior, "linearized").functional_covariance(x[:3])
        spread = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
        difference = model(x[:3]).diff(dim=1).squeeze(1)
    found = draws[..., 1].logit()
    assert torch.allclose(found.mean(0), difference, atol=4 * float(spread.max() / 40_000) ** 0.5)
    assert torch.allclose(found.var(0), spread, rtol=0.03)


def test_shuffled_batches_hold_every_sample_once_in_a_new_order(recipe: Namespace) -> None:
    loader = recipe.variational.shuffled(torch.arange(10), torch.arange(10) * 2, seed=0, batch_size=4)
    epochs = [list(loader) for _ in range(2)]
    for batches in epochs:
        assert [len(first) for first, _ in batches] == [4, 4, 2]
        assert all(torch.equal(first * 2, second) for first, second in batches)
        assert torch.cat([first for first, _ in batches]).sort().values.tolist() == list(range(10))
    first, second = (torch.cat([x for x, _ in batches]).tolist() for batches in epochs)
    assert first != second
