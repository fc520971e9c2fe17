"""The FashionMNIST recipe: its reading of the files, and a small run on other images in the same format."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from recipe_helpers import recipe_modules, smoke, write_fashion_mnist
from sklearn.datasets import load_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """scikit-learn's digits in the four files of FashionMNIST, as Debian ships them."""
    return write_fashion_mnist(tmp_path_factory.mktemp("idx"))


@pytest.fixture(scope="module")
def recipe():
    return recipe_modules("fashion_mnist", ["data", "drawn", "methods", "network", "run"])


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


def test_swag_has_the_moments_of_the_path(recipe):
    generator = torch.Generator().manual_seed(0)
    data = recipe.data.Labelled(torch.randn(8, 4, generator=generator), torch.arange(8) % 3)
    model = torch.nn.Linear(4, 3)
    begun, kept = model.weight.detach().clone(), recipe.drawn.DEVIATIONS
    epochs = kept + 2  # of one step, so that the first two deviations are gone
    found = recipe.drawn.collected(model, data, seed=0, epochs=epochs, rate=0.5, times=1)
    assert torch.equal(model.weight, begun)
    optimiser, path = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), []
    for _ in range(epochs):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(data.images), data.labels).backward()
        optimiser.step()
        path.append(torch.cat([model.weight.flatten(), model.bias]).detach())
    weights = torch.stack(path)
    means = weights.cumsum(0) / torch.arange(1, epochs + 1).unsqueeze(1)
    torch.testing.assert_close(found.mean, weights.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.variance, weights.var(0, correction=0), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.deviations, (weights - means)[2:], rtol=1e-3, atol=1e-4)


def test_swag_draws_from_its_gaussian(recipe):
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    found = recipe.drawn.SWAG(torch.tensor([1.0, -2.0]), torch.tensor([0.3, 2.0]), rows)
    draws = torch.stack(list(found.draws(20_000, seed=0)))
    expected = (torch.diag(found.variance) + rows.T @ rows / 2) / 2
    torch.testing.assert_close(draws.mean(0), found.mean, atol=0.04, rtol=0)
    torch.testing.assert_close(draws.T.cov(), expected, atol=0.04, rtol=0.04)
    assert torch.equal(draws[:3], torch.stack(list(found.draws(3, seed=0))))


def test_dropout_draws_are_of_the_trained_layers(recipe):
    model = recipe.network.cnn(2).eval()
    layers = list(recipe.drawn.with_dropout(model, 0.3))
    assert [type(after).__name__ for one, after in itertools.pairwise(layers) if one not in model] == [
        "Conv2d",
        "Linear",
        "Linear",
    ]
    images = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    method = recipe.methods.dropout_draws(model, 0.3, draws=400)
    found, again = method.predict(images), method.predict(images)
    assert torch.equal(found.probs, again.probs) and (found.mutual_information() > 1e-6).all()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        drawn = torch.nn.Sequential(*layers).train()
        mean = torch.stack([drawn(images).softmax(1) for _ in range(400)]).mean(0)
    torch.testing.assert_close(found.probs, mean, atol=0.01, rtol=0)


def test_held_out_images_choose_and_entropy_is_a_share(recipe):
    images, labels = torch.zeros(20, 1, 28, 28), torch.zeros(20).long()
    part = recipe.data.Labelled(images, labels)
    methods = {
        rate: recipe.methods.Method(
            lambda x, value=value: recipe.methods.from_logits(
                torch.tensor([value] + [0.0] * 9).expand(1, len(x), 10)
            ),
            0,
            {"rate": rate},
        )
        for rate, value in ((0.1, 0.0), (0.2, 1000.0), (0.3, -1.0))
    }
    best = recipe.methods.best(methods, part)
    assert best.settings["rate"] == 0.2 and len(best.settings["held-out NLL by rate"]) == 3
    data = recipe.data.Data(part, part, part, images)
    for rate, share in ((0.1, 1.0), (0.2, 0.0)):
        found = recipe.run.measured(methods[rate], data, part, methods[0.1])["entropy"]
        assert found["digits"]["mean"] == pytest.approx(share, abs=1e-6) == found["test"]["mean"]


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
        "dropout*",
        "SWA*",
        "deep*",
    ]
    options = ("--data", folder, "--output", tmp_path, "--rows", *patterns)
    printed = smoke("fashion_mnist.run", *options)
    results = json.loads((tmp_path / "140-1-0.01-16" / "results-40-seed0.json").read_text())
    rows = [
        f"{posterior}, {row}"
        for posterior in ("INF, last layer",)
        for row in ("defaults", "tuned", "sampling, tuned", "moments, tuned")
    ]
    rows += ["function space, defaults", "function space, independent prior, defaults"]
    rows += ["latent binary, median model", "UTVI, defaults"]
    rows += ["trained on", "trained on, temperature scaling", "dropout draws", "SWA-Gaussian"]
    rows += ["deep ensemble of 2"]
    assert list(results) == ["plain", "temperature scaling", *rows]
    assert set(results["plain"]["auroc"]) == {"entropy", "max_probability"}
    scores = {"entropy", "mutual_information", "epistemic_variance", "novelty", "both"}
    assert scores <= set(results["INF, last layer, defaults"]["auroc"]) & set(
        results["INF, last layer, tuned"]["auroc"]
    )
    assert results["INF, last layer, sampling, tuned"]["settings"]["prior_precision or scale"] > 0
    assert len(results["dropout draws"]["settings"]["held-out NLL by rate"]) == 2
    kept = {path.name for path in (tmp_path / "140-1-0.01-16").iterdir()}
    assert {"cnn-dropout-0.1-seed0.pt", "cnn-dropout-0.5-seed0.pt", "swag-1-0.01-seed0.pt"} <= kept
    assert all(0 < found["entropy"]["digits"]["mean"] <= 1 for found in results.values())
    assert results["deep ensemble of 2"]["bytes"] == 2 * results["plain"]["bytes"]
    table = (tmp_path / "140-1-0.01-16" / "table.md").read_text()
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
