"""Tables 1 to 3 of Rudner et al. (2022) in small: networks, posteriors, and ensembles of both.

python -m recipes.function_space.ensembles            clothes and digits, three seeds; 20 minutes
python -m recipes.function_space.ensembles --smoke    a few images, one epoch; seconds

5,000 images of FashionMNIST (table 1) and 3,500 digits of MNIST in place of CIFAR-10 (table 2); test
images turned by 30 degrees stand for corrupted ones, and for the other country's scans of table 3,
whose accuracies after referral are taken on both. Foreign are the other set's images, and letters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torchvision.transforms.functional import InterpolationMode, rotate

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc, selective_accuracy
from recipes.common import by_row, looked_at, parsed, parser, predicted, report, table
from recipes.fashion_mnist.data import Labelled, add_options, load, mnist_digits, normalised
from recipes.fashion_mnist.methods import plain, quality
from recipes.fashion_mnist.network import trained
from recipes.fashion_mnist.variational import INDEPENDENT, OPTIONS, context, shuffled
from recipes.function_space import foreign
from recipes.function_space.rotated_digits import BLACK

SETS = ("clothes", "digits")
RATE = 0.05
POSTERIORS: dict[str, dict[str, Any]] = {
    "bound, monochrome context": OPTIONS | {"log_variance_lr": 1e-2},
    "independent prior": INDEPENDENT,
}
"""Options of the method: the paper's bound, and the objective that its figures seem to have."""

Predict = Callable[[Tensor], uq.ClassPrediction]


class Study(NamedTuple):
    """One set: its images in three parts, and foreign ones by name."""

    train: Labelled
    test: Labelled
    turned: Labelled
    others: dict[str, Tensor]


def studies(options: argparse.Namespace) -> dict[str, Study]:
    """Those that are asked for."""
    with looked_at():
        data = load(options.data, download=options.download)
    digits, count = mnist_digits(), options.tested
    letters = normalised(foreign.letters(count, seed=1))
    share = round(0.7 * options.images)
    later = Labelled(digits.images[share:], digits.labels[share:])
    clothes_test, digits_test = data.test.first(count), later.first(count)
    parts = {
        "clothes": (data.train.first(options.images), clothes_test, {"digits": digits_test.images}),
        "digits": (digits.first(share), digits_test, {"clothes": clothes_test.images}),
    }
    found: dict[str, Study] = {}
    for name in options.sets:
        train, test, others = parts[name]
        turned = rotate(test.images, 30, InterpolationMode.BILINEAR, fill=[BLACK])
        others["letters"] = letters
        found[name] = Study(train, test, Labelled(turned, test.labels), others)
    return found


def predictors(name: str, train: Labelled, seed: int, options: argparse.Namespace) -> dict[str, Predict]:
    """By row; every ensemble has seeds of its own, and the first network stands for one alone."""
    folder = options.output / f"{name}-{len(train.labels)}-{options.network_epochs}-{options.filters}"
    seeds = range(seed * options.members, (seed + 1) * options.members)
    networks = [trained(train, one, folder, options.network_epochs, RATE, options.filters) for one in seeds]
    size = f"ensemble of {len(networks)}"
    wrapped: dict[str, Any] = {size: uq.wrap(networks, None)}
    draws: dict[str, Any] = {"head": "sampling", "n_samples": options.draws}
    for kind, given in POSTERIORS.items():
        posteriors = [
            uq.fit(
                model,
                shuffled(*train, seed=one),
                "function_space",
                epochs=options.epochs,
                seed=one,
                divergence=None,  # the variances as they are trained
                progress=False,
                **{"context": context(None, one), **given},
            )
            for one, model in zip(seeds, networks, strict=True)
        ]
        wrapped[kind] = uq.wrap(networks[0], posteriors[0], **draws)
        wrapped[f"{kind}, {size}"] = uq.wrap(networks, posteriors, **draws)
    rows = {row: partial(predicted, predictor, size=500) for row, predictor in wrapped.items()}
    return {"network": plain(networks[0]).predict, **rows}


def measures(predict: Predict, study: Study) -> dict[str, float]:
    """Quality on test images, foreign images told by entropy, and accuracy of what is not referred."""
    inside, turned = predict(study.test.images), predict(study.turned.images)
    found = quality(inside, study.test.labels)
    entropy = inside.entropy()
    for name, images in study.others.items():
        found[f"AUROC, {name}"] = ood_auroc(entropy, predict(images).entropy())
    found["accuracy, turned"] = quality(turned, study.turned.labels)["accuracy"]
    for place, prediction in (("", inside), (", turned", turned)):
        kept = selective_accuracy(prediction.entropy(), prediction.probs, study.test.labels, [0.5, 0.7])
        found |= {
            f"{part:.0%} referred{place}": 100 * float(one)
            for part, one in zip((0.5, 0.7), kept, strict=True)
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "a few images, one epoch")
    add_options(command)
    add = command.add_argument
    add("--sets", nargs="+", choices=SETS, default=SETS)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--members", type=int, default=3, help="of every ensemble")
    add("--images", type=int, default=5000, help="of clothes, to train on; of digits 0.7 of that")
    add("--tested", type=int, default=1500, help="test images, and images of every foreign kind")
    add("--filters", type=int, default=8, help="of the first convolution; the paper's 32")
    add("--network-epochs", type=int, default=15)
    add("--epochs", type=int, default=15, help="of the posteriors, around the networks")
    add("--draws", type=int, default=10, help="of every posterior's weights")
    smoke = {"seeds": [0], "members": 2, "images": 140, "tested": 40, "filters": 2, "draws": 2}
    options = parsed(command, arguments, **smoke, network_epochs=1, epochs=1)
    everything: dict[str, Any] = {}
    pages: list[str] = []
    for name, study in studies(options).items():
        begun = time.perf_counter()
        results = []
        for seed in options.seeds:
            rows = predictors(name, study.train, seed, options)
            results.append({row: measures(predict, study) for row, predict in rows.items()})
            print(f"{name}, seed {seed}: {time.perf_counter() - begun:.0f} s", flush=True)
        everything[name] = results
        pages.append(table(by_row(results), ".4g", corner=name, error=True))
    report(options, "ensembles", "\n\n".join(pages), everything)


if __name__ == "__main__":
    main()
