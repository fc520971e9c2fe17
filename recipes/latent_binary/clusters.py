"""Section 5.3 of the latent binary paper: how sure networks are between and around five clusters in the plane.

    python -m recipes.latent_binary.clusters            three sizes, two data sets each; about ten minutes
    python -m recipes.latent_binary.clusters --smoke    seconds

Five Gaussians, 10, 50 or 200 samples of each, scaled into the unit square; a network 2-1000-5 with ReLU. Of the five
covariances that the paper prints four are none: they are not symmetric, or not positive. Here each printed matrix M
stands for the root of M M^T, which leaves the valid one as it is. "truth" are the class probabilities of the Gaussians
themselves, equally likely a priori.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import log
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import (
    by_row,
    in_order,
    in_random_order,
    parsed,
    parser,
    report,
    save_figure,
    table,
    train,
)
from recipes.latent_binary.entropy_maps import Probabilities, entropy

MEANS = torch.tensor([[-8.0, -8], [6, 6], [-7, 8], [8, -8], [0, 0]], dtype=torch.float64)
PRINTED = torch.tensor(
    [[[6, -1], [-1, 3.5]], [[0, 3], [3, 0]], [[-3, 4], [-5, 1]], [[0, 5], [4, 2]], [[0, 9], [9, 0]]],
    dtype=torch.float64,
)
SIZES, CLASSES, UNITS, DRAWS, BATCH = (10, 50, 200), 5, 1000, 100, 50
COLUMNS = (
    "accuracy",
    "NLL",
    "ECE",
    "entropy, plane",
    "from the truth's",
    "p at rank half",
    "accuracy, last fifth",
)


def covariances() -> Tensor:
    """``(M M^T)^(1/2)`` of every printed matrix, ``(5, 2, 2)``."""
    values, vectors = torch.linalg.eigh(PRINTED @ PRINTED.mT)
    return vectors @ values.sqrt().diag_embed() @ vectors.mT


class Clusters:
    """Five Gaussians, and the map that takes a training set into the unit square.

    Args:
        per_class: training samples of each.
        seed: of all samples.
        tested: test samples of each.
    """

    def __init__(self, per_class: int, seed: int, tested: int = 2000) -> None:
        self._laws = torch.distributions.MultivariateNormal(MEANS, covariances())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn, others = (self._laws.sample(torch.Size([count])) for count in (per_class, tested))
        self._low, self._high = drawn.flatten(0, 1).min(0).values, drawn.flatten(0, 1).max(0).values
        self.inputs, self.labels = self._scaled(drawn)
        self.test_inputs, self.test_labels = self._scaled(others)

    def _scaled(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.arange(CLASSES).expand(len(drawn), -1).flatten()
        return ((drawn.flatten(0, 1) - self._low) / (self._high - self._low)).float(), labels

    def truth(self, inputs: Tensor) -> Tensor:
        """Class probabilities ``(inputs, 5)`` at places of the unit square."""
        places = inputs.double() * (self._high - self._low) + self._low
        return self._laws.log_prob(places.unsqueeze(1)).softmax(1)


def network(seed: int, dropout: float = 0.0) -> nn.Sequential:
    """One hidden layer, as the paper's."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, UNITS), nn.ReLU(), nn.Dropout(dropout), nn.Linear(UNITS, CLASSES))


def trained(clusters: Clusters, seed: int, epochs: int, dropout: float = 0.0) -> nn.Sequential:
    """By Adam."""
    model = network(seed, dropout)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        batches = in_random_order(clusters.inputs, clusters.labels, BATCH, None)
        train(model, batches, nn.functional.cross_entropy, optimiser)
    return model


def by_dropout(model: nn.Sequential) -> Probabilities:
    """The mean over drawn masks."""

    def probabilities(inputs: Tensor) -> Tensor:
        model.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.stack([model(inputs).softmax(1) for _ in range(DRAWS)]).mean(0)

    return probabilities


def by_posterior(model: nn.Module, posterior: Any) -> Probabilities:
    """By the posterior's own head."""
    options = {"n_samples": DRAWS} if posterior.method == "latent_binary" else {}
    predictor = uq.wrap(model, posterior, **options)
    return lambda inputs: predictor(inputs).probs


def predictors(clusters: Clusters, seed: int, epochs: int) -> dict[str, Probabilities]:
    """All rows, by name."""
    order = torch.randperm(len(clusters.labels), generator=torch.Generator().manual_seed(seed))
    batches = in_order(clusters.inputs[order], clusters.labels[order], BATCH)
    plain, masked = trained(clusters, seed, epochs), trained(clusters, seed, epochs, dropout=0.5)
    found: dict[str, Probabilities] = {
        "truth": lambda inputs: clusters.truth(inputs).float(),
        "network": lambda inputs: plain(inputs).detach().softmax(1),
        "dropout": by_dropout(masked),
    }
    plain.eval()
    for name, flow in (("LRT", False), ("flow", True)):
        method = uq.LatentBinary(
            start="random", flow=flow, epochs=epochs, prior_inclusion=0.5, lr=5e-3, inclusion_lr=2e-2,
            kl_weight=1.0, flow_units=50,
        )  # fmt: skip
        posterior = uq.fit(network(seed).eval(), batches, method, seed=seed, progress=False, divergence=None)
        found[name] = by_posterior(posterior.model, posterior)  # type: ignore[arg-type]
    for name, prior in (("Laplace, default", "faithful"), ("Laplace, evidence", "evidence")):
        posterior = uq.fit(plain, batches, prior_precision=prior, progress=False)
        found[name] = by_posterior(plain, posterior)
    return found


def plane(resolution: int) -> Tensor:
    """Places of the unit square, from below to above, ``(resolution^2, 2)``."""
    steps = torch.linspace(0, 1, resolution)
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2)


def scored(predict: Probabilities, clusters: Clusters, resolution: int) -> dict[str, float]:
    """Quality on test samples; entropy over the plane and its mean distance from the truth's; and, of the test samples
    in the order of their largest probability, that of the one in the middle, and the accuracy of the last fifth.
    """
    logs = predict(clusters.test_inputs).clamp(min=1e-12).log()
    prediction = uq.ClassPrediction.from_logits(logs.unsqueeze(0))
    quality = prediction.quality(clusters.test_labels)
    places = plane(resolution)
    entropies, true = entropy(predict(places)), entropy(clusters.truth(places).float())
    largest, order = prediction.probs.max(1).values.sort(descending=True)
    right = (prediction.probs.argmax(1) == clusters.test_labels)[order].double()
    values = (
        quality["accuracy"], quality["nll"], quality["ece"], float(entropies.mean()),
        float((entropies - true).abs().mean()), float(largest[len(largest) // 2]),
        float(right[-len(right) // 5 :].mean()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def maps(
    found: dict[int, dict[str, Probabilities]], clusters: dict[int, Clusters], resolution: int
) -> Figure:
    """Entropy over the plane: a row for each size, a column for each predictor."""
    names = list(next(iter(found.values())))
    page = Figure(figsize=(2.4 * len(names), 2.5 * len(found)), layout="constrained", facecolor="white")
    panels = page.subplots(len(found), len(names), squeeze=False)
    drawn = None
    for line, (size, by_name) in zip(panels, found.items(), strict=True):
        for panel, name in zip(line, names, strict=True):
            values = entropy(by_name[name](plane(resolution))).reshape(resolution, resolution)
            drawn = panel.imshow(
                values.numpy(), origin="lower", extent=(0, 1, 0, 1), cmap="magma", vmin=0, vmax=log(CLASSES)
            )
            panel.scatter(*clusters[size].inputs.T, c=clusters[size].labels, s=2, cmap="tab10")
            panel.set(xticks=[], yticks=[], title=f"{name}, {size}")
    page.colorbar(drawn, ax=panels, label="predictive entropy in nats", shrink=0.8)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser(__doc__, "latent_binary", "one small data set, few epochs")
    command.add_argument("--seeds", type=int, default=2, help="data sets of each size")
    command.add_argument("--epochs", type=int, default=1000, help="of 50 samples; fewer with more samples")
    command.add_argument("--resolution", type=int, default=60)
    command.add_argument("--tested", type=int, default=2000, help="test samples of each class")
    options = parsed(command, arguments, seeds=1, epochs=6, resolution=8, tested=40)
    pages, content = [], {}
    kept: dict[int, dict[str, Probabilities]] = {}
    sets: dict[int, Clusters] = {}
    for size in SIZES[:1] if options.smoke else SIZES:
        results = []
        for seed in range(options.seeds):
            clusters = Clusters(size, seed, options.tested)
            epochs = max(5, options.epochs * 10 // size)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = predictors(clusters, seed, epochs)
            results.append(
                {name: scored(predict, clusters, options.resolution) for name, predict in found.items()}
            )
            if seed == 0:
                kept[size], sets[size] = found, clusters
            print(size, seed, results[-1], flush=True)
        rows = by_row(results)
        pages.append(f"{size} samples a class\n\n{table(rows, columns=COLUMNS)}")
        content[str(size)] = rows
    report(options, "clusters", "\n\n".join(pages), content)
    save_figure(maps(kept, sets, options.resolution), options.output / "clusters.png", options.smoke)


if __name__ == "__main__":
    main()
