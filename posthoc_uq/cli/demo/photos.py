"""Photos: an ImageNet classifier as it is, and what it does not know about pictures of all kinds.

The posterior is over the last layer. One over all fifty layers needs a backward pass for each leading class of every
picture, at every prior precision that the fit tries: more than the few minutes of a demo. All else is the library's
default.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.cli.demo.console import one_thread, say, step, table
from posthoc_uq.cli.demo.figures import Tile, photos_figure
from posthoc_uq.cli.demo.imagenet import class_names, efficientnet_lite0
from posthoc_uq.cli.demo.pictures import (
    FIT_PHOTOS,
    Picture,
    centre_crop,
    photo,
    pictures,
    preprocess,
    random_crops,
)
from posthoc_uq.likelihoods.class_prediction import ClassPrediction

SCORES = {"entropy": "entropy", "mutual_information": "mutual inf.", "novelty": "novelty"}
"""Scores that are shown, with what they are called."""


class PhotosResult(NamedTuple):
    """Predictions for the pictures shown, and the network's own probability of espresso for the coffee."""

    shown: list[Picture]
    prediction: ClassPrediction
    espresso: float


@one_thread()
def run(output: Path, seed: int = 0, crops: int = 96) -> PhotosResult:
    """The photos part; leaves the picture and the posterior in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    with step("Loading EfficientNet-Lite0, trained on ImageNet by others"):
        model, names = efficientnet_lite0(), class_names()
    espresso = espresso_probability(model, names)
    say(f"  scikit-image's coffee photo: espresso {espresso:.3f}")

    with step(f"uq.fit(model, crops, layers='last'): {crops} crops of {len(FIT_PHOTOS)} photos, no labels"):
        images = random_crops([photo(name) for name in FIT_PHOTOS], crops, seed)
        posterior = uq.fit(model, images.split(16), layers="last", seed=seed, progress=False)
    say(f"  prior precision {posterior.prior_precision:.3g}, temperature {posterior.temperature:.2f}")
    path = output / "photos.inf.h5"
    uq.save(posterior, path)
    say(f"  {path}: {path.stat().st_size / 1e6:.1f} MB")

    shown = pictures(seed)
    with step(f"uq.wrap(model, posterior)(images): {len(shown)} pictures"):
        prediction = uq.wrap(model, posterior)(preprocess([picture.image for picture in shown]))
    _report(shown, prediction, names)
    path = output / "photos.png"
    photos_figure(_tiles(shown, prediction, names)).savefig(path)
    say(f"Picture: {path}")
    return PhotosResult(shown, prediction, espresso)


def espresso_probability(model: nn.Module, names: list[str]) -> float:
    """The probability of espresso that the network alone gives to the coffee photo: about 0.95 if all is well."""
    with torch.no_grad():
        probs = model(preprocess([photo("coffee.png")])).softmax(dim=-1)
    return float(probs[0, names.index("espresso")])


def _report(shown: list[Picture], prediction: ClassPrediction, names: list[str]) -> None:
    scores = _scores(prediction)
    say("\nWhat the network says, and how unsure it is (entropy and mutual information in nats)\n")
    rows = [
        [
            picture.name,
            picture.kind,
            *(float(score[index]) for score in scores.values()),
            ", ".join(f"{name} {probability:.2f}" for name, probability in _top(prediction, index, names)),
        ]
        for index, picture in enumerate(shown)
    ]
    say(table(["picture", "kind", *scores, "most probable"], rows, digits=3))
    say("\nMeans by kind (new photos: from scikit-learn, no crop of them was used in the fit)\n")
    kinds = list(dict.fromkeys(picture.kind for picture in shown))
    members = {
        kind: torch.tensor([picture.kind == kind for picture in shown], device="cpu") for kind in kinds
    }
    rows = [[kind, *(float(score[members[kind]].mean()) for score in scores.values())] for kind in kinds]
    say(table(["kind", *scores], rows, digits=3))
    say(f"  {len(FIT_PHOTOS)} photos are few. A real use fits on images from where the model will work.\n")


def _scores(prediction: ClassPrediction) -> dict[str, Tensor]:
    scores = prediction.scores()
    return {shown: scores[name] for name, shown in SCORES.items() if name in scores}


def _top(prediction: ClassPrediction, index: int, names: list[str]) -> list[tuple[str, float]]:
    top = prediction.top_k(3)
    pairs = zip(top.labels[index].tolist(), top.probabilities[index].tolist(), strict=True)
    return [(names[label], probability) for label, probability in pairs]


def _tiles(shown: list[Picture], prediction: ClassPrediction, names: list[str]) -> list[Tile]:
    scores = _scores(prediction)
    return [
        Tile(
            centre_crop(picture.image),
            picture.name,
            picture.kind,
            _top(prediction, index, names),
            {name: float(values[index]) for name, values in scores.items()},
        )
        for index, picture in enumerate(shown)
    ]
