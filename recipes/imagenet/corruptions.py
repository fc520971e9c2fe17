"""What corrupted pictures do to the network and to the four posteriors: figures 6 and 7 in the small.

    python -m recipes.imagenet.corruptions            EfficientNet-Lite0, all layers; a quarter of an hour of a core
    python -m recipes.imagenet.corruptions --smoke    last layer, few crops

Crops of the eight photographs of `recipes.imagenet.example`, as they are and with five corruptions in five severities:
the kinds and strengths of Hendrycks and Dietterich (ICLR 2019), "Benchmarking neural network robustness to common
corruptions and perturbations". N and tau are searched on other crops, none of them corrupted.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.signal import oaconvolve
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.app import ModelSource, TrainedModel, trained_model
from posthoc_uq.evaluation.metrics import ood_auroc
from recipes.common import in_order, looked_at, parsed, parser, put, report, table
from recipes.imagenet.evaluating import NETWORK
from recipes.imagenet.example import PHOTOS, random_crop, read
from recipes.imagenet.fitting import METHODS, fit_all, loaded
from recipes.imagenet.search import best, search_all
from recipes.photos.efficientnet import efficientnet_lite0
from recipes.photos.pictures import centre_crop

Pixels = np.ndarray[Any, Any]
Probabilities = Callable[[Tensor], Tensor]
CLEAN, ALL = "none", "all five"
SEVERITIES = range(1, 6)
BATCH = 16


def gaussian_noise(pixels: Pixels, severity: int, generator: np.random.Generator) -> Pixels:
    """Independent noise on every number."""
    deviation = (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1]
    return pixels + deviation * generator.standard_normal(pixels.shape)


def defocus_blur(pixels: Pixels, severity: int, generator: np.random.Generator) -> Pixels:
    """The mean over a disk whose edge is softened; the picture goes on as its mirror image."""
    radius, softened = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]
    reach = radius + 3
    steps = np.arange(-reach, reach + 1)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(float)
    disk = gaussian_filter(disk, softened)
    wide = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), "symmetric")
    return oaconvolve(wide, (disk / disk.sum())[:, :, None], "valid", axes=(0, 1))


def brightness(pixels: Pixels, severity: int, generator: np.random.Generator) -> Pixels:
    """A larger value, with hue and saturation as they are."""
    from skimage.color import hsv2rgb, rgb2hsv

    hue = rgb2hsv(pixels)
    hue[..., 2] = np.clip(hue[..., 2] + (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1], 0, 1)
    return hsv2rgb(hue)


def contrast(pixels: Pixels, severity: int, generator: np.random.Generator) -> Pixels:
    """Nearer to the mean of each channel."""
    mean = pixels.mean(axis=(0, 1))
    return mean + (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1] * (pixels - mean)


def jpeg(pixels: Pixels, severity: int, generator: np.random.Generator) -> Pixels:
    """Compressed and read again."""
    kept = BytesIO()
    picture(pixels).save(kept, "JPEG", quality=(25, 18, 15, 10, 7)[severity - 1])
    with Image.open(kept, formats=["JPEG"]) as read_again:
        return np.asarray(read_again.convert("RGB")) / 255


CORRUPTIONS: dict[str, Callable[[Pixels, int, np.random.Generator], Pixels]] = {
    "Gaussian noise": gaussian_noise,
    "defocus blur": defocus_blur,
    "brightness": brightness,
    "contrast": contrast,
    "JPEG": jpeg,
}
"""Each from pixels between 0 and 1, (height, width, 3), and a severity from 1 to 5."""


def picture(pixels: Pixels) -> Image.Image:
    """Pixels between 0 and 1, or clipped to that, as 8 bits."""
    return Image.fromarray(np.uint8(np.rint(255 * pixels.clip(0, 1))))


def corrupted(
    image: Image.Image, corruption: str, severity: int, generator: np.random.Generator
) -> Image.Image:
    """A picture with one corruption."""
    return picture(CORRUPTIONS[corruption](np.asarray(image) / 255, severity, generator))


def crops(count: int, seed: int) -> tuple[list[Image.Image], Tensor]:
    """So many crops of 224 x 224 pixels of each photograph, with their labels."""
    from timm.data.imagenet_info import ImageNetInfo

    generator, wnids = np.random.default_rng(seed), ImageNetInfo().label_names()
    images = [centre_crop(random_crop(read(photo), generator)) for photo in PHOTOS for _ in range(count)]
    return images, torch.tensor([wnids.index(photo.wnid) for photo in PHOTOS]).repeat_interleave(count)


def scored(probs: Tensor, clean: Tensor, labels: Tensor, bins: int) -> dict[str, float]:
    """Quality of probabilities (pictures, classes) of the pictures in `clean`, corrupted once or several times.

    Returns: shares of right answers and of answers that are as on the clean picture, ECE, NLL, mean entropy, and how
        well entropy tells these pictures from the clean ones.
    """
    times = len(probs) // len(clean)
    prediction, before = (
        uq.ClassPrediction.from_logits(each.clamp(min=1e-12).log().unsqueeze(0)) for each in (probs, clean)
    )
    quality = prediction.quality(labels.repeat(times), bins=bins)
    same = probs.argmax(1) == clean.argmax(1).repeat(times)
    return {
        "accuracy": quality["accuracy"],
        "agreement": float(same.double().mean()),
        "ECE": quality["ece"],
        "NLL": quality["nll"],
        "mean entropy": quality["mean_entropy"],
        "AUROC of entropy": ood_auroc(before.entropy(), prediction.entropy()),
    }


def rows_of(
    predict: Probabilities, inputs: dict[str, Tensor], labels: Tensor, bins: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Quality by corruption and severity, and of all corruptions of a severity together.

    Args:
        predict: gives probabilities.
        inputs: clean pictures, and by corruption those of every severity, one severity after the other.
        labels: of the clean pictures.
        bins: of the ECE.
    """
    found = {name: predict(images).split(len(labels)) for name, images in inputs.items()}
    (clean,) = found.pop(CLEAN)
    found[ALL] = tuple(torch.cat(parts) for parts in zip(*found.values(), strict=True))
    rows = {(CLEAN, 0): scored(clean, clean, labels, bins)}
    del rows[CLEAN, 0]["AUROC of entropy"], rows[CLEAN, 0]["agreement"]
    for name, parts in found.items():
        for severity, probs in zip(SEVERITIES, parts, strict=True):
            rows[name, severity] = scored(probs, clean, labels, bins)
    return rows


def predictors(source: TrainedModel, folder: Path, options: argparse.Namespace) -> dict[str, Probabilities]:
    """The network and the posteriors, each fitted and with the best of the search's trials."""
    options.posteriors, options.trials = folder / "posteriors", folder / "trials"
    fitted, searched = crops(options.fit_crops, 1), crops(options.search_crops, 2)
    fit_all(source, inputs_of(source, fitted[0]).split(BATCH), options)
    images = inputs_of(source, searched[0])
    search_all(source, in_order(images, searched[1], len(images)), searched[1], options)

    def network(images: Tensor) -> Tensor:
        with torch.no_grad():
            return source.model(images).softmax(1)

    found: dict[str, Probabilities] = {NETWORK: network}
    for method in options.methods:
        chosen = best(options.trials, method, options)
        posterior = loaded(source, options.posteriors, method).with_settings(
            scale=chosen.scale, prior_precision=chosen.prior_precision
        )
        found[METHODS[method]] = by_draws(source, posterior, options)
    return found


def by_draws(source: TrainedModel, posterior: uq.Posterior, options: argparse.Namespace) -> Probabilities:
    """The mean over drawn networks, the same ones for all pictures."""
    predictor: Any = uq.wrap(
        source.model, posterior, "sampling", n_samples=options.samples, seed=options.seed
    )
    return lambda images: predictor(images).probs


def inputs_of(source: TrainedModel, images: Sequence[Image.Image]) -> Tensor:
    """What the network sees of them."""
    return torch.stack([source.transform(image) for image in images])


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text, numbers with three digits."""
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[-1]), lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, search, evaluate; a table by severity, and all numbers as CSV."""
    command = parser(__doc__, "imagenet", "last layer, few crops, two trials")
    add = command.add_argument
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    add("--crops", type=int, default=3, help="of each photograph to be evaluated")
    add("--image-size", type=int, default=128)
    add("--samples", type=int, default=8, help="drawn models")
    add("--budget", type=int, default=8, help="trials of N and tau for each method")
    add("--seed", type=int, default=0, help="of what is drawn")
    command.set_defaults(fit_crops=8, search_crops=3, search_samples=4, layers="all", rank=100, bins=15)
    command.set_defaults(select="NLL", scales=(1e3, 1e8), priors=(1e3, 1e6))
    command.set_defaults(checkpoint_every=10**6, progress=False)
    smoke = {"crops": 1, "image_size": 64, "samples": 2, "budget": 2, "fit_crops": 1, "search_crops": 1}
    options = parsed(command, arguments, layers="last", **smoke)
    with TemporaryDirectory() as folder:
        with looked_at():
            torch.save(efficientnet_lite0().state_dict(), Path(folder) / "weights.pt")
            named = {"model": "timm:tf_efficientnet_lite0", "weights": f"{folder}/weights.pt"}
            source = trained_model(ModelSource(**named, image_size=options.image_size, device="cpu"))
            images, labels = crops(options.crops, 3)
        generator = np.random.default_rng(options.seed)
        inputs = {CLEAN: inputs_of(source, images)}
        for name in CORRUPTIONS:
            spoilt = [corrupted(image, name, s, generator) for s in SEVERITIES for image in images]
            inputs[name] = inputs_of(source, spoilt)
        found: dict[str, Any] = {}
        for name, predict in predictors(source, Path(folder), options).items():
            found[name] = rows_of(predict, inputs, labels, options.bins)
            print(name, found[name][CLEAN, 0], found[name][ALL, 5], flush=True)
    lines = [
        {"posterior": name, "corruption": corruption, "severity": severity} | row
        for name, rows in found.items()
        for (corruption, severity), row in rows.items()
    ]
    put(options.output / "corruptions.csv", as_csv(lines))
    shown = {
        f"{name}, {severity}": rows[ALL if severity else CLEAN, severity]
        for name, rows in found.items()
        for severity in (0, *SEVERITIES)
    }
    page = f"{len(images)} clean pictures, severity 0; five times as many of each other severity:"
    report(options, "corruptions", f"{page}\n\n{table(shown, corner='posterior, severity')}", lines)


if __name__ == "__main__":
    main()
