"""FashionMNIST with four contexts, post hoc and from scratch (table 1 of Rudner et al., 2022).

python recipes/function_space/images.py --data FOLDER      about an hour a seed on one core
python recipes/function_space/images.py --smoke            a minute

Takes networks of `recipes/fashion_mnist` where that recipe has left them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import foreign
import torch
from common import OUTPUT, spread
from data import DEBIAN, Data, load, normalised, pixels
from methods import in_batches, plain
from network import cnn, trained
from run import OUTPUT as NETWORKS
from run import smaller
from torch import Tensor, nn
from variational import function_space

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from posthoc_uq.evaluation.plots import referral_plot

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked, stamped

COLUMNS = ("accuracy", "NLL", "ECE", "AUROC, digits", "AUROC, letters", "accuracy, 20 % referred", "AURC")
EPOCHS, RATE = 15, 0.01  # of the networks, as in recipes/fashion_mnist


def posteriors(
    data: Data, seed: int, folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, nn.Module, uq.Posterior]]:
    """Name, network and posterior of every row but the first."""
    model = trained(data.train, seed, folder, options.network_epochs, RATE)
    contexts = {
        "monochrome": None,
        "distorted clothes": normalised(foreign.augmented(pixels(data.train.images), options.context_images)),
        "photographs": normalised(foreign.photos(options.context_images)),
        "digits": data.digits[: len(data.digits) // 2],  # the other half is never seen
    }
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
    found = {
        "accuracy": metrics.accuracy(prediction.probs, labels) * 100,
        "NLL": -float(prediction.log_prob(labels).double().mean()),
        "ECE": metrics.expected_calibration_error(prediction.probs, labels, 15),
        "accuracy, 20 % referred": float(
            metrics.selective_accuracy(entropy, prediction.probs, labels, [0.2])[0] * 100
        ),
        "AURC": metrics.risk_coverage(entropy, wrong).area,
    }
    return found | {f"AUROC, {name}": metrics.ood_auroc(entropy, values) for name, values in others.items()}


def one_seed(data: Data, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By row: what was measured; the first seed's selective prediction is drawn."""
    folder = options.networks / f"{len(data.train.labels)}-{options.network_epochs}-{RATE:g}"
    letters = normalised(foreign.letters(options.foreign_images, seed=1))
    unseen = data.digits[len(data.digits) // 2 :]
    model = trained(data.train, seed, folder, options.network_epochs, RATE)
    rows = {"network": plain(model).predict}
    for name, network, posterior in posteriors(data, seed, folder, options):
        head = uq.wrap(network, posterior, "sampling", n_samples=options.draws)
        rows[name] = lambda images, head=head: in_batches(head, images)
    results: dict[str, dict[str, float]] = {}
    curves: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, predict in rows.items():
        prediction = predict(data.test.images)
        others = {"digits": predict(unseen).entropy(), "letters": predict(letters).entropy()}
        results[name] = measures(prediction, data.test.labels, others)
        curves[name] = prediction.entropy(), prediction.probs, data.test.labels
        print(f"seed {seed}, {name}: {results[name]}", flush=True)
    if seed == options.seeds[0]:
        figure = stamped(referral_plot(curves), options.smoke)
        figure.savefig(options.output / "selective_prediction.png", dpi=110)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few images, one epoch")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument(
        "--download", action="store_true", help="let torchvision fetch FashionMNIST to --data"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10, help="of the posteriors around a trained network")
    parser.add_argument("--scratch-epochs", type=int, default=15, help="of those from random weights")
    parser.add_argument("--draws", type=int, default=10, help="of weights, for every prediction")
    parser.add_argument("--networks", type=Path, default=NETWORKS, help="output of recipes/fashion_mnist")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.network_epochs, options.context_images, options.foreign_images = EPOCHS, 10_000, 5000
    data = load(options.data, options.networks, download=options.download)
    if options.smoke:
        data = smaller(data)
        options.seeds, options.epochs, options.scratch_epochs, options.draws = [0], 1, 1, 3
        options.network_epochs, options.context_images, options.foreign_images = 1, 200, 100
    options.output.mkdir(parents=True, exist_ok=True)
    results = [one_seed(data, seed, options) for seed in options.seeds]
    (options.output / "images.json").write_text(json.dumps(results, indent=1) + "\n")
    table = marked(spread(results, COLUMNS, ".4g"), options.smoke)
    print(f"\n{table}\n\nPicture: {options.output / 'selective_prediction.png'}")


if __name__ == "__main__":
    main()
