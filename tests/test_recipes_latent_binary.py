"""The latent binary recipes: their smoke modes as scripts, and their parts."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_helpers import recipe_modules, smoke, write_fashion_mnist
from torch import nn


@pytest.fixture(scope="module")
def recipe() -> Namespace:
    return recipe_modules(
        "latent_binary",
        ["networks", "images", "entropy_maps", "variables", "ascent", "exact", "clusters", "tabular"],
    )


def test_smoke_of_the_variables(tmp_path: Path) -> None:
    printed = smoke("latent_binary.variables", "--output", tmp_path)
    assert "| flow |" in printed and "| coordinate ascent |" in printed
    kept = json.loads((tmp_path / "variables.json").read_text())
    assert all(0 <= number <= 1 for row in kept["results"].values() for number in row.values())
    assert np.shape(kept["probabilities"]["flow"]) == (2, 20)


@pytest.mark.study
def test_smoke_of_the_clusters(recipe: Namespace, tmp_path: Path) -> None:
    printed = smoke("latent_binary.clusters", "--output", tmp_path)
    assert "| Laplace, default |" in printed
    kept = json.loads((tmp_path / "clusters.json").read_text())
    rows = kept["10"]
    assert rows["truth"][0]["accuracy"] > rows["network"][0]["accuracy"]
    (ranks,) = kept["10, figure 9"]["truth"]
    assert ranks["largest probability, rank 1/4"] > ranks["largest probability, rank 3/4"]
    assert ranks["accuracy, surest half"] > ranks["accuracy, tenth 10"]
    assert {row[0]["detected"] <= 1 for row in kept["10, figure 10"].values()} == {True}
    valid, *others = recipe.clusters.covariances()
    torch.testing.assert_close(
        valid, recipe.clusters.PRINTED[0]
    )  # the one that the paper prints as it should be
    for matrix, printed in zip(others, recipe.clusters.PRINTED[1:], strict=True):
        torch.testing.assert_close(matrix @ matrix, printed @ printed.T)
        assert float(torch.linalg.eigvalsh(matrix).min()) > 0
    clusters = recipe.clusters.Clusters(50, 0)
    assert float(clusters.inputs.min()) == 0 and float(clusters.inputs.max()) == 1
    found = (clusters.truth(clusters.test_inputs).argmax(1) == clusters.test_labels).double().mean()
    assert float(found) > 0.95


def test_places_beyond_the_outputs_of_training_samples_are_detected(recipe: Namespace) -> None:
    """Outputs that grow with the distance from the square's middle: all far places are, and 5 % of the samples."""
    clusters = recipe.clusters.Clusters(200, 0, 400)
    grow = recipe.clusters.of_one(
        lambda x: torch.eye(5)[torch.zeros(len(x)).long()] * 50 * (x - 0.5).norm(dim=1)[:, None]
    )
    found = recipe.clusters.detected(grow, grow(clusters.test_inputs), clusters, 30)
    assert found["of far places"] == found["far places that are sure"] == found["of far and sure places"] == 1
    assert 0.02 < found["of test samples"] < 0.09 and found["detected"] > 0.7
    shrink = recipe.clusters.of_one(lambda x: -torch.ones(len(x), 5) * (x - 0.5).norm(dim=1)[:, None])
    found = recipe.clusters.detected(shrink, shrink(clusters.test_inputs), clusters, 30)
    assert found["of far places"] == found["far places that are sure"] == 0
    assert "of far and sure places" not in found


@pytest.mark.study
def test_smoke_on_images(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    options = ("--data", data, "--output", tmp_path / "out", "--networks", "lenet")
    printed = smoke("latent_binary.images", *options)
    assert "| pruned as flow, post hoc |" in printed
    with Image.open(tmp_path / "out" / "entropy_lenet.png") as picture:
        assert picture.size[0] > 1500 and len(picture.convert("L").getcolors()) > 50
    (rows,) = json.loads((tmp_path / "out" / "images.json").read_text())["lenet"]
    assert rows["LRT, post hoc: median model"]["density"] == rows["pruned as LRT, post hoc"]["density"]


@pytest.mark.study
def test_smoke_of_the_flow(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = write_fashion_mnist(tmp_path / "data")
    smoke("latent_binary.flow", "--data", data, "--output", tmp_path / "out")
    (row,) = json.loads((tmp_path / "out" / "flow.json").read_text())["flow"]
    assert 0 < row["z"] < 0.1 and row["density"] == 1 and row["left out"] == 0
    assert row["full average, less LRT"] <= row["full average"]


@pytest.mark.study
def test_smoke_on_tables(tmp_path: Path) -> None:
    assert "| flow: median model |" in smoke("latent_binary.tabular", "--output", tmp_path)
    rows = json.loads((tmp_path / "tabular.json").read_text())["wine"]
    assert all(0 <= row["min"] <= row["mean"] <= row["max"] <= 100 for row in rows.values())
    assert rows["flow: full average"]["density"] == 1 > rows["flow: median model"]["density"]


def test_words_become_numbers_and_folds_are_standardised(recipe: Namespace) -> None:
    rows = [["b", "3", "no"], ["a", "0", "yes"], ["b", "8", "no"], ["a", "1", "yes"]]
    plain, _ = recipe.tabular.encoded(rows, (0,), logarithms=False)
    assert plain.tolist() == [[0, 1, 3], [1, 0, 0], [0, 1, 8], [1, 0, 1]]
    inputs, classes = recipe.tabular.encoded(rows, (0,), logarithms=True)
    expected = [[0, 1, np.log(4)], [1, 0, 0], [0, 1, np.log(9)], [1, 0, np.log(2)]]
    np.testing.assert_allclose(inputs, expected)
    assert classes.tolist() == [0, 1, 0, 1]
    for split in recipe.tabular.folds(inputs, classes, 2):
        assert sorted(split.train.labels.tolist()) == sorted(split.test.labels.tolist()) == [0, 1]
        centre = split.train.images.double().mean(0)
        torch.testing.assert_close(centre, torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
        kept = torch.cat([split.train.images, split.test.images])[:, 2].double()
        raw = np.array(sorted(row[2] for row in expected))
        slope = np.diff(np.sort(kept.numpy())) / np.diff(raw)  # one scale for both parts
        np.testing.assert_allclose(slope, slope[0], rtol=1e-5)


def test_the_covariates_are_those_of_the_public_file(recipe: Namespace) -> None:
    """By what is known of it: counts of the factors' levels, exact columns, moments of the others."""
    x = recipe.variables.simulated(np.random.default_rng(0))
    assert x.shape == (2000, 20)
    assert x[:, :3].sum(0).tolist() == [241, 905, 854]
    assert (x[:, :3].T @ x[:, 3:6]).tolist() == [[129, 107, 5], [106, 550, 249], [7, 199, 648]]
    assert np.allclose(x[:, 17], x[:, 1] * x[:, 9]) and np.allclose(x[:, 16], np.arange(1, 2001) ** 2)
    factor = x[:, :3] @ np.array([1, -4, 2])
    assert np.allclose(x[:, 18], x[:, 14] * factor) and np.allclose(x[:, 19], x[:, 10] * factor)
    covariance = np.cov(x[:, 8:11].T)
    assert np.abs(covariance - recipe.variables.FIRST).max() < 0.15 * recipe.variables.FIRST.max()
    corrected = recipe.variables.study(x, None, "corrected", True, np.random.default_rng(1))
    assert 0.4 < float(corrected.y.mean()) < 0.8
    assert torch.allclose(corrected.x.mean(0), torch.zeros(20), atol=1e-4)
    printed = recipe.variables.study(x, None, "printed", True, np.random.default_rng(1))
    assert not torch.equal(printed.y, corrected.y)
    chosen = torch.tensor(recipe.variables.BETA != 0)
    assert recipe.variables.rates(chosen) == (1.0, 0.0) and int(chosen.sum()) == 9


def test_covariates_are_read_with_commas_and_with_blanks(recipe: Namespace, tmp_path: Path) -> None:
    for between in (",", " ", ", "):
        (tmp_path / "x.txt").write_text(f"1{between}-2.5{between}3e2\n4{between}5{between}6\n")
        assert recipe.variables.read(tmp_path / "x.txt", 3).tolist() == [[1, -2.5, 300], [4, 5, 6]]


def test_the_exact_probabilities_are_those_of_a_sum_over_all_models(recipe: Namespace) -> None:
    """Three inputs, two of them much alike: the evidence of each of the eight models by quadrature."""
    pytest.importorskip("polyagamma")
    generator = np.random.default_rng(3)
    x = generator.standard_normal((30, 3))
    x[:, 1] = x[:, 0] + 0.5 * x[:, 1]
    y = (generator.random(30) < 1 / (1 + np.exp(-1.5 * x[:, 0]))).astype(float)
    points, weights = np.polynomial.hermite_e.hermegauss(16)
    weights = weights / weights.sum()  # of N(0, 1)
    grids: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(1), np.ones(1)), (points, weights)]
    total, on = 0.0, np.zeros(3)
    for model in itertools.product((0, 1), repeat=3):
        each = [grids[included] for included in (*model, 1)]
        values = np.stack(np.meshgrid(*(one[0] for one in each), indexing="ij"), -1).reshape(-1, 4)
        share = np.prod(np.meshgrid(*(one[1] for one in each), indexing="ij"), axis=0).flatten()
        logits = values @ np.column_stack([x, np.ones(30)]).T
        likelihood = np.exp((y * logits - np.logaddexp(0, logits)).sum(1))
        evidence = float(share @ likelihood) * 0.25 ** sum(model) * 0.75 ** (3 - sum(model))
        total, on = total + evidence, on + evidence * np.array(model)
    found = recipe.exact.inclusions(x, y, 0.25, 400)
    assert 0.3 < (on / total)[0] < 0.9  # neither of the two that are alike is certain
    assert found.error.max() < 0.02
    np.testing.assert_allclose(found.mean, on / total, atol=0.03)


def test_coordinate_ascent_ends_where_the_bound_is_flat(recipe: Namespace) -> None:
    """The bound by its definition, a sum over all eight models: no gradient is left where the updates end."""
    generator = np.random.default_rng(4)
    x = generator.standard_normal((20, 3))
    y = (generator.random(20) < 1 / (1 + np.exp(-1.5 * x[:, 0]))).astype(float)
    fits = recipe.ascent.ascended(x, y, 0.25, runs=2, close=1e-12)
    design, signed = torch.from_numpy(x), torch.from_numpy(y) - 0.5
    for run in range(2):
        found = [torch.from_numpy(np.asarray(part[run])).requires_grad_() for part in fits]
        chance, mean, variance, bias, bias_variance, spread = found
        bound = -(bias_variance + bias**2 - 1 - bias_variance.log()) / 2
        for model in itertools.product((0.0, 1.0), repeat=3):
            on = torch.tensor(model, dtype=torch.float64)
            share = torch.where(on > 0, chance, 1 - chance)
            logits = bias + design @ (on * mean)
            square = logits**2 + design**2 @ (on * variance) + bias_variance
            curvature = (spread.sigmoid() - 0.5) / (2 * spread)
            fit = spread.sigmoid().log() - spread / 2 + signed * logits - curvature * (square - spread**2)
            weights = on * (variance + mean**2 - 1 - variance.log()) / 2
            models = torch.log(share / torch.where(on > 0, 0.25, 0.75))
            bound = bound + share.prod() * (fit.sum() - weights.sum() - models.sum())
        for gradient in torch.autograd.grad(bound, found):
            assert float(gradient.abs().max()) < 1e-6
        assert 0.5 < fits.chance[run, 0] < 1 and fits.chance[run, 1:].max() < 0.5


def test_pruning_keeps_the_share_that_was_asked_for(recipe: Namespace) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    before = model[0].weight.detach().clone()
    part = recipe.networks.Labelled(torch.randn(40, 20), torch.arange(40) % 4)
    twin = recipe.networks.pruned(model, 0.1, part, 1, 1e-3, 0)
    weights = torch.cat([module.weight.flatten() for module in (twin[0], twin[2])])
    assert int((weights != 0).sum()) == 72  # of 720
    assert torch.equal(model[0].weight, before)


def test_entropy_maps_lie_in_the_plane_of_three_images(recipe: Namespace) -> None:
    """Corners and the middle of the triangle are the images and their mean; entropies are those of the definition."""
    maps = recipe.entropy_maps
    images = torch.eye(3).reshape(3, 1, 1, 3)
    points = maps.plane(images, 601).reshape(601, 601, 3)
    low, high = maps.CORNERS.min(0).values - maps.MARGIN, maps.CORNERS.max(0).values + maps.MARGIN
    middle = maps.CORNERS.mean(0)
    for place, weights in [*zip(maps.CORNERS, torch.eye(3), strict=True), (middle, torch.full((3,), 1 / 3))]:
        column, row = ((place - low) / (high - low) * 600).round().long().tolist()
        assert float((points[row, column] - weights).abs().max()) < 0.005
    torch.testing.assert_close(points.sum(-1), torch.ones(601, 601))
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    expected = torch.distributions.Categorical(probabilities).entropy()
    torch.testing.assert_close(maps.entropy(probabilities), expected, atol=1e-6, rtol=0)
