"""Photos: an ImageNet classifier as it is, and what it does not know about pictures of all kinds.

The posterior is over the last layer, the usual choice for a network of fifty layers and a handful of images: a
few crops leave most weights to the prior, and noise in all layers at once would drown every prediction. For the
same reason the evidence of the crops alone would put the prior precision far too low, so it is taken from the
trained weights, whose spread is what they were drawn with if the prior is right. One crop stands for many of
the images that the network was trained on, which is what `scale` says.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.demo.console import one_thread, say, step, table
from posthoc_uq.demo.figures import Tile, photos_figure
from posthoc_uq.demo.imagenet import class_names, efficientnet_lite0
from posthoc_uq.demo.pictures import (
    FIT_PHOTOS,
    Picture,
    centre_crop,
    photo,
    pictures,
    preprocess,
    random_crops,
)
from posthoc_uq.heads.prediction import ClassPrediction

TRAINING_IMAGES = 1_281_167
"""Images that the network was trained on: the training set of ImageNet."""


class PhotosResult(NamedTuple):
    """Predictions for the pictures shown, and the network's own probability of espresso for the coffee."""

    shown: list[Picture]
    prediction: ClassPrediction
    espresso: float


@one_thread()
def run(output: Path, seed: int = 0, crops: int = 96, n_samples: int = 20) -> PhotosResult:
    """The photos part; leaves the picture and the posterior in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    with step("Loading EfficientNet-Lite0, trained on ImageNet by others"):
        model, names = efficientnet_lite0(), class_names()
    espresso = espresso_probability(model, names)
    say(f"  scikit-image's coffee photo: espresso {espresso:.3f}")

    with step(f"uq.fit(model, crops, layers='last'): {crops} crops of {len(FIT_PHOTOS)} photos, no labels"):
        images = random_crops([photo(name) for name in FIT_PHOTOS], crops, seed)
        prior = 1 / float(model.get_parameter("classifier.weight").detach().square().mean())
        posterior = uq.fit(
            model, images.split(16), layers="last", prior_precision=prior, seed=seed, progress=False
        )
    posterior.scale = TRAINING_IMAGES
    say(f"  prior precision {prior:.0f} (as wide as the trained weights), scale {TRAINING_IMAGES:,} images")
    path = output / "photos.inf.h5"
    uq.save(posterior, path)
    say(f"  {path}: {path.stat().st_size / 1e6:.1f} MB")

    shown = pictures(seed)
    with step(f"Predicting {len(shown)} pictures with {n_samples} samples of the weights"):
        predictor = uq.wrap(model, posterior, head="sampling", n_samples=n_samples, seed=seed)
        prediction = predictor(preprocess([picture.image for picture in shown]))
    _report(shown, prediction, names)
    path = output / "photos.png"
    photos_figure(_tiles(shown, prediction, names)).savefig(path)
    say(f"Picture: {path}")
    return PhotosResult(shown, prediction, espresso)


def espresso_probability(model: nn.Module, names: list[str]) -> float:
    """What the network alone gives to espresso for the coffee photo: about 0.95 where all is well."""
    with torch.no_grad():
        probs = model(preprocess([photo("coffee.png")])).softmax(dim=-1)
    return float(probs[0, names.index("espresso")])


def _report(shown: list[Picture], prediction: ClassPrediction, names: list[str]) -> None:
    scores = (prediction.entropy(), prediction.mutual_information(), prediction.epistemic())
    say("\nWhat the network says, and how unsure it is (nats; epistemic() in squared logits)\n")
    rows = [
        [
            picture.name,
            picture.kind,
            *(float(score[index]) for score in scores),
            ", ".join(f"{name} {probability:.2f}" for name, probability in _top(prediction, index, names)),
        ]
        for index, picture in enumerate(shown)
    ]
    header = ["picture", "kind", "entropy", "mutual inf.", "epistemic", "most probable"]
    say(table(header, rows, digits=2))
    say("\nMeans by kind (new photos: from scikit-learn, no crop of them was used in the fit)\n")
    kinds = list(dict.fromkeys(picture.kind for picture in shown))
    members = {kind: torch.tensor([picture.kind == kind for picture in shown]) for kind in kinds}
    rows = [[kind, *(float(score[members[kind]].mean()) for score in scores)] for kind in kinds]
    say(table(["kind", "entropy", "mutual inf.", "epistemic"], rows, digits=2))
    say(
        "  Mutual information is low for what the fit has seen and high for all else, new photos included:\n"
        f"  {len(FIT_PHOTOS)} photos are few. A real use fits on images from where the model will work.\n"
    )


def _top(prediction: ClassPrediction, index: int, names: list[str]) -> list[tuple[str, float]]:
    top = prediction.top_k(3)
    pairs = zip(top.labels[index].tolist(), top.probabilities[index].tolist(), strict=True)
    return [(names[label], probability) for label, probability in pairs]


def _tiles(shown: list[Picture], prediction: ClassPrediction, names: list[str]) -> list[Tile]:
    scores: tuple[Tensor, ...] = (
        prediction.entropy(),
        prediction.mutual_information(),
        prediction.epistemic(),
    )
    return [
        Tile(
            centre_crop(picture.image),
            picture.name,
            picture.kind,
            _top(prediction, index, names),
            *(float(score[index]) for score in scores),
        )
        for index, picture in enumerate(shown)
    ]
