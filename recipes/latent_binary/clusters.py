"""Section 5.3 of the latent binary paper: how sure networks are between and around five clusters in the plane.

    python -m recipes.latent_binary.clusters           three sizes, two data sets each; half an hour
    python -m recipes.latent_binary.clusters --sizes 10 200 --seeds 1    figures 9 and 10; ten minutes
    python -m recipes.latent_binary.clusters --smoke   seconds

Five Gaussians, 10, 50 or 200 samples of each, scaled into the unit square; a network 2-1000-5 with ReLU. Of the five
covariances that the paper prints four are none: they are not symmetric, or not positive. Here each printed matrix M
stands for the root of M M^T, which leaves the valid one as it is. "truth" are the class probabilities of the Gaussians
themselves, equally likely a priori. From random weights the bound keeps the prior where data are few, so there are also
rows of latent binary networks around the trained network, with their defaults.

Figure 9 ranks the test samples of the smallest set by how sure a prediction is. Figure 10 takes the largest set, and
places of a plane three times as wide: outside is where the largest mean output (before the softmax) is above 95 % of
those of the training samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
from recipes.latent_binary.entropy_maps import entropy

Predict = Callable[[Tensor], uq.ClassPrediction]

MEANS = torch.tensor([[-8.0, -8], [6, 6], [-7, 8], [8, -8], [0, 0]], dtype=torch.float64)
PRINTED = torch.tensor(
    [[[6, -1], [-1, 3.5]], [[0, 3], [3, 0]], [[-3, 4], [-5, 1]], [[0, 5], [4, 2]], [[0, 9], [9, 0]]],
    dtype=torch.float64,
)
SIZES, CLASSES, UNITS, DRAWS, BATCH = (10, 50, 200), 5, 1000, 100, 50
NEAR, FAR, SURE = 0.05, 0.25, 0.1  # distances from the nearest training sample; nats of entropy
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


def of_one(outputs: Callable[[Tensor], Tensor]) -> Predict:
    """By one network's outputs, or by log probabilities."""

    def predict(inputs: Tensor) -> uq.ClassPrediction:
        with torch.no_grad():
            return uq.ClassPrediction.from_logits(outputs(inputs).float().unsqueeze(0))

    return predict


def by_dropout(model: nn.Sequential) -> Predict:
    """Over drawn masks."""

    def predict(inputs: Tensor) -> uq.ClassPrediction:
        model.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return uq.ClassPrediction.from_logits(torch.stack([model(inputs) for _ in range(DRAWS)]))

    return predict


def by_posterior(model: nn.Module, posterior: Any) -> Predict:
    """By the posterior's own head."""
    options: dict[str, Any] = {"n_samples": DRAWS} if posterior.method == "latent_binary" else {}
    return uq.wrap(model, posterior, **options)


def predictors(clusters: Clusters, seed: int, epochs: int, trained_epochs: int | None) -> dict[str, Predict]:
    """All rows, by name."""
    order = torch.randperm(len(clusters.labels), generator=torch.Generator().manual_seed(seed))
    batches = in_order(clusters.inputs[order], clusters.labels[order], BATCH)
    plain, masked = trained(clusters, seed, epochs), trained(clusters, seed, epochs, dropout=0.5)
    found: dict[str, Predict] = {
        "truth": of_one(lambda inputs: clusters.truth(inputs).clamp(min=1e-12).log()),
        "network": of_one(plain),
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
    for name, flow in (("LRT, trained", False), ("flow, trained", True)):
        posterior = uq.fit(
            plain, batches, uq.LatentBinary(flow=flow, epochs=trained_epochs), seed=seed, progress=False
        )
        found[name] = by_posterior(plain, posterior)
    for name, prior in (("Laplace, default", "faithful"), ("Laplace, evidence", "evidence")):
        posterior = uq.fit(plain, batches, prior_precision=prior, progress=False)
        found[name] = by_posterior(plain, posterior)
    return found


def plane(resolution: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Places of the unit square, or of another, from below to above, ``(resolution^2, 2)``."""
    steps = torch.linspace(low, high, resolution)
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2)


def scored(
    predict: Predict, prediction: uq.ClassPrediction, clusters: Clusters, resolution: int
) -> dict[str, float]:
    """Quality on test samples; entropy over the plane and its mean distance from the truth's; and, of the test samples
    in the order of their largest probability, that of the one in the middle, and the accuracy of the last fifth.
    """
    quality = prediction.quality(clusters.test_labels)
    places = plane(resolution)
    entropies, true = predict(places).entropy(), entropy(clusters.truth(places).float())
    largest, order = prediction.probs.max(1).values.sort(descending=True)
    right = (prediction.probs.argmax(1) == clusters.test_labels)[order].double()
    values = (
        quality["accuracy"], quality["nll"], quality["ece"], float(entropies.mean()),
        float((entropies - true).abs().mean()), float(largest[len(largest) // 2]),
        float(right[-len(right) // 5 :].mean()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def ranked(prediction: uq.ClassPrediction, labels: Tensor) -> dict[str, Tensor]:
    """The curves of figure 9: accuracy by hundreds, the surest first; entropies, and largest probabilities."""
    largest, order = prediction.probs.max(1).values.sort(descending=True)
    right = (prediction.probs.argmax(1) == labels)[order].double()
    return {
        "accuracy by hundreds": torch.stack([part.mean() for part in right.split(100)]),
        "entropy": prediction.entropy().sort().values,
        "largest probability": largest,
    }


def at_ranks(series: dict[str, Tensor]) -> dict[str, float]:
    """The curves of figure 9 at some places."""
    values = {}
    for name in ("largest probability", "entropy"):
        for quarter in (1, 2, 3):
            values[f"{name}, rank {quarter}/4"] = float(series[name][len(series[name]) * quarter // 4])
    hundreds = series["accuracy by hundreds"]
    parts = (hundreds[: len(hundreds) // 2], *hundreds[len(hundreds) // 2 :].tensor_split(5))
    titles = ("surest half", *(f"tenth {tenth}" for tenth in range(6, 11)))
    if float(series["largest probability"][0] - series["largest probability"][-1]) < 1e-3:
        return values  # equal for all: they have no order
    return values | {
        f"accuracy, {name}": float(part.mean()) for name, part in zip(titles, parts, strict=True)
    }


def outside(prediction: uq.ClassPrediction, of_samples: uq.ClassPrediction) -> Tensor:
    """Which places figure 10 detects, given what is predicted for the training samples."""
    return prediction.logits_mean.amax(1) > of_samples.logits_mean.amax(1).quantile(0.95)


def detected(
    predict: Predict, tested: uq.ClassPrediction, clusters: Clusters, resolution: int
) -> dict[str, float]:
    """Shares that figure 10 detects: of the plane, of places near to training samples and of those far from all, and of
    far ones with an entropy below `SURE`; with the share of far ones that is so sure, and that of test samples.
    """
    places = plane(resolution, -1, 2)
    prediction, samples = predict(places), predict(clusters.inputs)
    found, sure = outside(prediction, samples), prediction.entropy() < SURE
    distance = torch.cdist(places, clusters.inputs).amin(1)
    far = distance > FAR
    shares = {
        "detected": found,
        "of places within 0.05 of a sample": found[distance < NEAR],
        "of far places": found[far],
        "far places that are sure": sure[far],
        "of far and sure places": found[far & sure],
        "of test samples": outside(tested, samples),
    }
    return {name: float(each.double().mean()) for name, each in shares.items() if len(each)}


def figure_9(series: dict[str, dict[str, Tensor]]) -> Figure:
    """A panel for each curve, a line for each predictor."""
    page = Figure(figsize=(13, 4), layout="constrained", facecolor="white")
    panels = page.subplots(1, 3)
    for panel, name in zip(panels, next(iter(series.values())), strict=True):
        for row, curves in series.items():
            values = curves[name]
            steps = torch.arange(1, len(values) + 1) * (len(curves["entropy"]) / len(values))
            panel.plot(steps, values, label=row, linewidth=1)
        panel.set(xlabel="test samples, the surest first", title=name)
    panels[0].legend(fontsize=7)
    return page


def figure_10(found: dict[str, Predict], clusters: Clusters, resolution: int) -> Figure:
    """What is detected, in dark; lines bound where the entropy is below `SURE`."""
    page = Figure(figsize=(2.4 * len(found), 2.7), layout="constrained", facecolor="white")
    for panel, (name, predict) in zip(page.subplots(1, len(found)), found.items(), strict=True):
        prediction = predict(plane(resolution, -1, 2))
        dark, entropies = outside(prediction, predict(clusters.inputs)), prediction.entropy()
        panel.imshow(
            dark.reshape(resolution, -1), origin="lower", extent=(-1, 2, -1, 2), cmap="Blues", vmax=1, vmin=0
        )
        if bool((entropies < SURE).any()):
            steps = torch.linspace(-1, 2, resolution)
            panel.contour(steps, steps, entropies.reshape(resolution, -1), [SURE], colors="k", linewidths=0.6)
        panel.scatter(*clusters.inputs.T, c=clusters.labels, s=1, cmap="tab10")
        panel.set(xticks=[], yticks=[], title=name)
    return page


def maps(found: dict[int, dict[str, Predict]], clusters: dict[int, Clusters], resolution: int) -> Figure:
    """Entropy over the plane: a row for each size, a column for each predictor."""
    names = list(next(iter(found.values())))
    page = Figure(figsize=(2.4 * len(names), 2.5 * len(found)), layout="constrained", facecolor="white")
    panels = page.subplots(len(found), len(names), squeeze=False)
    drawn = None
    for line, (size, by_name) in zip(panels, found.items(), strict=True):
        for panel, name in zip(line, names, strict=True):
            values = by_name[name](plane(resolution)).entropy().reshape(resolution, resolution)
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
    command.add_argument("--trained-epochs", type=int, help="around the network; by default the method's")
    command.add_argument("--resolution", type=int, default=60)
    command.add_argument("--tested", type=int, default=2000, help="test samples of each class")
    command.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="training samples of each class")
    options = parsed(
        command, arguments, seeds=1, epochs=6, trained_epochs=1, resolution=8, tested=400, sizes=SIZES[:1]
    )
    pages, content = [], {}
    kept: dict[int, dict[str, Predict]] = {}
    sets: dict[int, Clusters] = {}
    series_of: dict[int, dict[str, dict[str, Tensor]]] = {}
    for size in options.sizes:
        results, ranks, detections = [], [], []
        for seed in range(options.seeds):
            clusters = Clusters(size, seed, options.tested)
            epochs = max(5, options.epochs * 10 // size)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = predictors(clusters, seed, epochs, options.trained_epochs)
            tested = {name: predict(clusters.test_inputs) for name, predict in found.items()}
            curves = {name: ranked(each, clusters.test_labels) for name, each in tested.items()}
            ranks.append({name: at_ranks(series) for name, series in curves.items()})
            results.append({})
            detections.append({})
            for name, predict in found.items():
                results[-1][name] = scored(predict, tested[name], clusters, options.resolution)
                if name != "truth":  # it has no outputs but the logarithms of probabilities
                    detections[-1][name] = detected(predict, tested[name], clusters, 2 * options.resolution)
            if seed == 0:
                kept[size], sets[size], series_of[size] = found, clusters, curves
            print(size, seed, results[-1], ranks[-1], detections[-1], flush=True)
        rows = by_row(results)
        pages.append(f"{size} samples a class\n\n{table(rows, columns=COLUMNS)}")
        content[str(size)] = rows
        for title, measured in (("figure 9", ranks), ("figure 10", detections)):
            content[f"{size}, {title}"] = by_row(measured)
            pages.append(f"{size} samples a class, {title}\n\n{table(content[f'{size}, {title}'])}")
    report(options, "clusters", "\n\n".join(pages), content)
    smallest, largest = min(kept), max(kept)
    pages_of = {
        "clusters": maps(kept, sets, options.resolution),
        "clusters_ranked": figure_9(series_of[smallest]),
        "clusters_outside": figure_10(kept[largest], sets[largest], 2 * options.resolution),
    }
    for name, page in pages_of.items():
        save_figure(page, options.output / f"{name}.png", options.smoke)


if __name__ == "__main__":
    main()
