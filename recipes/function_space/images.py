"""FashionMNIST with four contexts, post hoc and from scratch (table 1 of Rudner et al., 2022).

python -m recipes.function_space.images --data FOLDER      about an hour a seed on one core
python -m recipes.function_space.images --smoke            a minute

Takes networks of `recipes/fashion_mnist` where that recipe has left them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.app.plots import referral_plot
from posthoc_uq.evaluation import metrics
from recipes.common import (
    OUTPUT,
    by_row,
    existing,
    looked_at,
    parsed,
    parser,
    predicted,
    report,
    save_figure,
    table,
)
from recipes.fashion_mnist.data import Data, add_options, load, normalised, pixels
from recipes.fashion_mnist.methods import plain, quality
from recipes.fashion_mnist.network import check_kept, cnn, trained
from recipes.fashion_mnist.variational import function_space
from recipes.function_space import foreign

COLUMNS = ("accuracy", "NLL", "ECE", "AUROC, digits", "AUROC, letters", "accuracy, 20 % referred", "AURC")
EPOCHS, RATE = 15, 0.01  # of the networks, as in recipes/fashion_mnist


def contexts_of(data: Data, number: int) -> dict[str, Tensor | None]:
    """Images by the name of the context; None for monochrome ones."""
    return {
        "monochrome": None,
        "distorted clothes": normalised(foreign.augmented(pixels(data.train.images), number)),
        "photographs": normalised(foreign.photos(number)),
        "digits": data.digits[: len(data.digits) // 2],  # the other half is never seen
    }


def posteriors(
    data: Data,
    contexts: Mapping[str, Tensor | None],
    seed: int,
    folder: Path,
    options: argparse.Namespace,
) -> Iterator[tuple[str, nn.Module, uq.Posterior]]:
    """Name, network and posterior of every row but the first."""
    model = trained(data.train, seed, folder, options.network_epochs, RATE)
    for name, images in contexts.items():
        path = folder / f"function-space-{name.replace(' ', '-')}-{options.epochs}-seed{seed}.h5"
        yield (
            f"post hoc, {name}",
            model,
            function_space(
                model, data.train, path, seed=seed, epochs=options.epochs, foreign=images, divergence=None
            ),
        )
    torch.manual_seed(seed)
    fresh = cnn().eval()
    path = folder / f"function-space-scratch-{options.scratch_epochs}-seed{seed}.h5"
    yield (
        "from scratch, monochrome",
        fresh,
        function_space(fresh, data.train, path, seed=seed, epochs=options.scratch_epochs, divergence=None),
    )


def measures(prediction: uq.ClassPrediction, labels: Tensor, others: dict[str, Tensor]) -> dict[str, float]:
    """Of the test images; `others` holds the entropies of foreign images."""
    entropy = prediction.entropy()
    wrong = (prediction.predicted() != labels).double()
    found = quality(prediction, labels) | {
        "accuracy, 20 % referred": float(
            metrics.selective_accuracy(entropy, prediction.probs, labels, [0.2])[0] * 100
        ),
        "AURC": metrics.risk_coverage(entropy, wrong).area,
    }
    return found | {f"AUROC, {name}": metrics.ood_auroc(entropy, values) for name, values in others.items()}


def one_seed(
    data: Data,
    contexts: Mapping[str, Tensor | None],
    letters: Tensor,
    seed: int,
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """By row: what was measured; the first seed's selective prediction is drawn."""
    unseen = data.digits[len(data.digits) // 2 :]
    model = trained(data.train, seed, folder, options.network_epochs, RATE)
    rows = {"network": plain(model).predict}
    for name, network, posterior in posteriors(data, contexts, seed, folder, options):
        head = uq.wrap(network, posterior, "sampling", n_samples=options.draws)
        rows[name] = partial(predicted, head, size=100)
    results: dict[str, dict[str, float]] = {}
    curves: dict[str, tuple[uq.Prediction, Tensor]] = {}
    for name, predict in rows.items():
        prediction = predict(data.test.images)
        others = {"digits": predict(unseen).entropy(), "letters": predict(letters).entropy()}
        results[name] = measures(prediction, data.test.labels, others)
        curves[name] = prediction, data.test.labels
        print(f"seed {seed}, {name}: {results[name]}", flush=True)
    if seed == options.seeds[0]:
        save_figure(referral_plot(curves), options.output / "selective_prediction.png", options.smoke)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "a few images, one epoch")
    add_options(command)
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--epochs", type=int, default=10, help="of the posteriors around a trained network")
    add("--scratch-epochs", type=int, default=15, help="of those from random weights")
    add("--draws", type=int, default=10, help="of weights, for every prediction")
    add("--networks", type=existing, default=OUTPUT / "fashion_mnist", help="output of recipes/fashion_mnist")
    command.set_defaults(network_epochs=EPOCHS, context_images=10_000, foreign_images=5000)
    smoke = {"seeds": [0], "epochs": 1, "scratch_epochs": 1, "draws": 3, "network_epochs": 1}
    options = parsed(command, arguments, **smoke, context_images=200, foreign_images=100)
    with looked_at():
        data = load(options.data, download=options.download)
        if options.smoke:
            data = data.first(140, 40, 40, 40)
        folder = options.networks / f"{len(data.train.labels)}-{options.network_epochs}-{RATE:g}"
        check_kept(folder, options.seeds)
        contexts = contexts_of(data, options.context_images)
        letters = normalised(foreign.letters(options.foreign_images, seed=1))
    results = [one_seed(data, contexts, letters, seed, folder, options) for seed in options.seeds]
    report(options, "images", table(by_row(results), ".4g", columns=COLUMNS), results)


if __name__ == "__main__":
    main()
