"""The recipes tabular and segmentation: their smoke modes, and their parts against independent computations."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_helpers import recipe_modules, smoke
from scipy.stats import nbinom

import posthoc_uq as uq


@pytest.fixture(scope="module")
def tabular() -> Namespace:
    return recipe_modules("tabular", ["tables", "run"])


@pytest.fixture(scope="module")
def segmentation() -> Namespace:
    return recipe_modules("segmentation", ["scenes"])


def test_the_loss_of_counts_is_the_density(tabular: Namespace) -> None:
    loss = tabular.run.NegativeBinomialLoss()
    loss.log_dispersion.data.fill_(math.log(0.4))
    outputs, counts = torch.tensor([[0.3], [1.7], [-1.0]]), torch.tensor([[0.0], [9.0], [2.0]])
    mean = outputs.exp().double().numpy()
    expected = -nbinom.logpmf(counts.numpy(), 1 / 0.4, 1 / (1 + 0.4 * mean)).mean()
    assert float(loss(outputs, counts).detach()) == pytest.approx(expected, rel=1e-5)
    own = uq.NegativeBinomial(0.4).log_prob(outputs, counts)
    assert float(loss(outputs, counts).detach()) == pytest.approx(-float(own.mean()), rel=1e-5)


def test_the_loss_of_values_is_the_density(tabular: Namespace) -> None:
    outputs, targets = (
        torch.randn(7, 2, generator=torch.Generator().manual_seed(0)),
        torch.arange(7.0)[:, None],
    )
    own = uq.Heteroscedastic().log_prob(outputs, targets)
    expected = -float(own.mean()) - 0.5 * math.log(2 * math.pi)
    assert float(tabular.run.own_noise_loss(outputs, targets)) == pytest.approx(expected, rel=1e-5)


def test_splits_are_standardised_by_their_training_rows(tabular: Namespace) -> None:
    table = tabular.tables.made("values", 100)
    table.inputs[:, 4] = np.where(np.arange(100) < 3, 1e5, 1.0)  # as a count with a long tail
    part = tabular.tables.split(table, 0)
    assert [len(rows.inputs) for rows in (part.train, part.held_out, part.test)] == [70, 10, 20]
    assert part.train.inputs.mean(0).abs().max() < 1e-5
    assert float(part.train.inputs[:, 4].max()) < 10  # by its logarithm
    shuffled = part.foreign["columns shuffled"]
    assert not torch.equal(shuffled, part.test.inputs)
    assert torch.equal(shuffled.sort(0).values, part.test.inputs.sort(0).values)


def test_coverage_counts_targets_between_the_bounds(tabular: Namespace) -> None:
    class Values:
        mean = torch.arange(10.0)[:, None]

        def interval(self, level: float) -> tuple[torch.Tensor, torch.Tensor]:
            assert level == 0.9
            return self.mean - 1, self.mean + 1

    targets = torch.arange(10.0)[:, None] + torch.tensor([0, 2] * 5)[:, None]
    found = tabular.run.coverage(Values(), targets)
    assert found["coverage"] == 0.5 and found["width"] == 2.0 and found["coverage, fifth 1"] == 0.5


def test_without_the_package_it_is_named(tabular: Namespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="r-cran-modeldata"):
        tabular.tables.load("counts", tmp_path)


@pytest.mark.study
def test_tabular(tmp_path: Path) -> None:
    printed = smoke("tabular.run", "--output", tmp_path, "--rows", 60)
    assert "| Poisson, INF tuned |" in printed and "| heteroscedastic, INF |" in printed
    found = json.loads((tmp_path / "tabular.json").read_text())
    for rows in found.values():
        for splits in rows.values():
            assert all(math.isfinite(value) for numbers in splits for value in numbers.values())
    # the linearised mean is the network's, and far rows are novel
    values = found["values"]
    assert values["constant noise, INF"][0]["RMSE"] == pytest.approx(
        values["constant noise, network alone"][0]["RMSE"], rel=1e-4
    )
    assert values["constant noise, INF"][0]["AUROC, far away"] > 0.7
    assert (tmp_path / "tabular.png").read_bytes()[:4] == b"\x89PNG"


def test_scenes(segmentation: Namespace) -> None:
    scenes = segmentation.scenes.scenes(4, 0, "star", 32)
    assert scenes.images.shape == (4, 3, 32, 32) and scenes.images.min() >= 0 and scenes.images.max() <= 1
    assert scenes.foreign.flatten(1).any(1).all() and not scenes.classes[scenes.foreign].any()
    plain = segmentation.scenes.scenes(4, 0, None, 32)
    assert not plain.foreign.any() and plain.classes.unique().tolist() == [0, 1, 2, 3]
    again = segmentation.scenes.scenes(4, 0, None, 32)
    assert torch.equal(plain.images, again.images) and torch.equal(plain.classes, again.classes)


@pytest.mark.study
def test_segmentation(tmp_path: Path) -> None:
    printed = smoke("segmentation.run", "--output", tmp_path)
    assert "| INF all layers, linearized |" in printed
    found = json.loads((tmp_path / "segmentation.json").read_text())
    assert len(found) == 7
    for name, numbers in found.items():
        assert all(math.isfinite(value) for value in numbers.values())
        assert (
            ("star: novelty" in numbers)
            == ("star: mutual_information" in numbers)
            == (name != "network alone")
        )
    # novelty is measured at the last layer's inputs, whatever the head
    assert len({round(n["star: novelty"], 6) for n in found.values() if "star: novelty" in n}) == 1
    assert (tmp_path / "segmentation.png").read_bytes()[:4] == b"\x89PNG"
