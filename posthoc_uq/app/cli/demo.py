"""The library on scikit-learn's handwritten digits: ``posthoc-uq demo``.

It trains a small network, fits a posterior, calibrates it on held-out digits, saves it, loads it in a fresh process,
and measures what it buys: two tables, a page and its figures, and a picture of digits with the classes that they may be
and of foreign images with their familiarity. Needs the extra ``demo``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.core.tables import text_table
from posthoc_uq.evaluation.measurements import title_of

# The data. scikit-learn's digits are 32 x 32 bitmaps of handwriting whose inked pixels were counted in blocks of
# 4 x 4, which gives 8 x 8 counts from 0 to 16. Letters are made the same way from the fonts that matplotlib carries, so
# that nothing but their shape tells them from digits. All images come divided by 16, as (samples, 1, 8, 8).

COPIES = 40
"""Distorted copies of each training digit; the posterior counts each copy as an observation."""
ROTATION_KEEPS = (0, 1, 8)
"""Digits left out of the rotated ones: 0 and 8 may still pass for digits, 1 is a bare stroke."""
LETTERS = "ACEFGHJKLMNPRTUVWXYadefhkmnprtuwxy"
"""Letters that cannot be read as a digit: without B, D, I, O, Q, S, Z, b, c, g, i, j, l, o, q, s, v and z."""


class Labelled(NamedTuple):
    """Images (samples, 1, 8, 8) and their labels (samples,)."""

    images: Tensor
    labels: Tensor


class DigitsData(NamedTuple):
    """The digits in three disjoint parts."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_digits(seed: int, train: int = 200, validation: int = 250) -> DigitsData:
    """Split scikit-learn's 1,797 digits at random; what training and validation leave is for the test."""
    from sklearn.datasets import load_digits as load

    pixels, targets = load(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(targets))
    images = torch.tensor(pixels[order], dtype=torch.float32, device="cpu").reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets[order], dtype=torch.int64, device="cpu")
    bounds = (0, train, train + validation, len(labels))
    return DigitsData(*(Labelled(images[a:b], labels[a:b]) for a, b in pairwise(bounds)))


def augmented(data: Labelled, copies: int, seed: int) -> Labelled:
    """Every image ``copies`` times, each shifted, scaled, sheared and turned a little, with some noise.

    Turns stay below 15 degrees, shifts below 0.8 pixels, scales within 15 %; the noise's deviation is 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    images = data.images.repeat(copies, 1, 1, 1)

    def uniform(bound: float, *shape: int) -> Tensor:
        return bound * (2 * torch.rand(len(images), *shape, generator=generator, device="cpu") - 1)

    angle, scale, shear = uniform(0.26), 1 + uniform(0.15, 2), uniform(0.2)
    first = torch.stack([angle.cos() * scale[:, 0], shear - angle.sin()], dim=-1)
    second = torch.stack([angle.sin(), angle.cos() * scale[:, 1]], dim=-1)
    maps = torch.cat([torch.stack([first, second], dim=1), uniform(0.2, 2, 1)], dim=2)
    grid = nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
    moved = nn.functional.grid_sample(images, grid, align_corners=False)
    pixel_noise = 0.1 * torch.randn(moved.shape, generator=generator, device="cpu")
    return Labelled((moved + pixel_noise).clamp(0, 1), data.labels.repeat(copies))


def rotated_digits(data: Labelled) -> Tensor:
    """Digits turned by 90 degrees to the left, without those of `ROTATION_KEEPS`."""
    foreign = ~torch.isin(data.labels, torch.tensor(ROTATION_KEEPS, device="cpu"))
    return torch.rot90(data.images[foreign], 1, dims=(2, 3))


def rendered_letters() -> Tensor:
    """Every letter of `LETTERS` in twelve cuts of the DejaVu font family that ships with matplotlib."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [
        path
        for family in ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
        for path in sorted(folder.glob(f"{family}.ttf")) + sorted(folder.glob(f"{family}-*.ttf"))
    ]
    images = [_letter(letter, path) for path in fonts for letter in LETTERS]
    return torch.from_numpy(np.stack(images)).unsqueeze(1) / 16


def _letter(letter: str, font_path: Path) -> np.ndarray:
    """One letter as the digits were made: fit into 32 x 32, ink counted in blocks of 4 x 4."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(font_path), 96)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(letter))
    glyph = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(glyph).text((-left, -top), letter, font=font, fill=255)
    shrink = 32 / max(glyph.size)
    width, height = (max(4, round(side * shrink)) for side in glyph.size)
    bitmap = np.zeros((32, 32), dtype=bool)
    x, y = (32 - width) // 2, (32 - height) // 2
    bitmap[y : y + height, x : x + width] = np.asarray(glyph.resize((width, height))) > 127
    return bitmap.reshape(8, 4, 8, 4).sum(axis=(1, 3)).astype(np.float32)


# The stand-in for the user's model.


def network() -> nn.Sequential:
    """A small convolutional network for 8 x 8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def train(model: nn.Module, data: Labelled, epochs: int, seed: int) -> None:
    """Plain training without regularisation, long enough to make the network over-confident."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=6e-3)
    steps = epochs * -(-len(data.labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=6e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels), generator=generator, device="cpu").split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
            optimiser.step()
            schedule.step()
    model.eval()


# What the library does with it.

PLAIN, FITTED, CALIBRATED = "network alone", "INF as fitted", "INF calibrated"
SCORES = ("entropy", "mutual_information", "novelty")
"""Scores that are shown; a network without a posterior has only its entropy."""
_DEPLOYMENT = """
import sys, torch
import posthoc_uq as uq
from posthoc_uq.app.cli.demo import network

torch.set_num_threads(1)  # as in the demo's process: with more threads, sums are taken in another order
posterior_path, weights_path, images_path, probs_path = sys.argv[1:]
model = network()
model.load_state_dict(torch.load(weights_path, weights_only=True))
predictor = uq.wrap(model.eval(), uq.load(posterior_path, model))
torch.save(predictor(torch.load(images_path, weights_only=True)).probs, probs_path)
"""
"""What a deployment does, in a new Python process: load weights and posterior, predict. No data, no fit."""


class DigitsResult(NamedTuple):
    """What was measured, and whether a fresh process predicted the same."""

    evaluation: uq.Evaluation
    identical: bool


TRAINED = {"UTVI": uq.UTVI(epochs=2), "latent binary": uq.LatentBinary(epochs=3, inclusion_lr=0.1)}
"""Methods that train on from the network."""


def run(output: Path, seed: int = 0, epochs: int = 15) -> DigitsResult:
    """Run the demo; leaves the page, its figures, the posterior and the network's weights in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    data = load_digits(seed)
    sizes = [len(part.labels) for part in data]
    _print(f"scikit-learn's digits: {sizes[0]} to train on, {sizes[1]} to tune on, {sizes[2]} to test on")
    training = augmented(data.train, COPIES, seed)
    torch.manual_seed(seed)
    model = network()
    with _one_thread():
        with _step(f"Training a small CNN for {epochs} epochs on {COPIES} distorted copies of each"):
            train(model, training, epochs, seed)
        with _step("uq.fit(model, train_loader)"):
            posterior = uq.fit(model, _loader(training), seed=seed, progress=False)
        compared = {PLAIN: model, FITTED: uq.wrap(model, posterior)}
        with _step("posterior = uq.calibrate(posterior, val_loader)"):
            posterior = uq.calibrate(posterior, _loader(data.validation), seed=seed, progress=False)
        calibrated = uq.wrap(model, posterior)
        compared[CALIBRATED] = calibrated
        for name, method in TRAINED.items():
            with _step(f"uq.fit(model, train_loader, uq.{type(method).__name__}(...))"):
                trained = uq.fit(model, _loader(training, shuffle=True), method, seed=seed, progress=False)
            compared[name] = uq.wrap(model, trained)
        with _step("uq.evaluate(models, test_loader, ood_loaders=...)"):
            evaluation = uq.evaluate(
                compared,
                _loader(data.test),
                ood_loaders={
                    "rotated digits": rotated_digits(data.test).split(100),
                    "letters": rendered_letters().split(100),
                },
                class_names=list("0123456789"),
                display=lambda image: 1 - image,
                progress=False,
            )
        draw_promises(calibrated, data.test, output / "digits.promises.png")
        identical = _fresh_process_agrees(output, model, posterior, data.test.images)
    _print(f"\n{_tables(evaluation)}\n")
    page = evaluation.report(output / "digits.html", title="What a posterior buys on digits")
    for title, figure in evaluation.figures().items():
        figure.savefig(output / f"digits.{title.split()[0].lower()}.png")
    _print(f"Tables, figures and images worth a look: {page}")
    _print(f"Sets and familiarity at a glance: {output / 'digits.promises.png'}")
    return DigitsResult(evaluation, identical)


PICTURES = 6
"""In a row of `draw_promises`."""


def draw_promises(predictor: uq.Predictor, test: Labelled, path: Path, level: float = 0.95) -> None:
    """A picture of what predictions promise: the first test digits with their sets, those of the largest sets, letters,
    and digits on their side, each with its familiarity.
    """
    from matplotlib.figure import Figure

    seen = predictor(test.images)
    sizes = seen.set(level).sum(1)
    letters = rendered_letters()
    rows = {
        f"test digits, with sets that hold the right class with probability {level:g}": test.images,
        "the test digits of the largest sets": test.images[sizes.argsort(descending=True, stable=True)],
        "letters": letters[:: len(LETTERS) // PICTURES],
        "digits on their side": rotated_digits(test),
    }
    figure = Figure(figsize=(1.35 * PICTURES, 7.6), layout="constrained")
    parts: Any = figure.subfigures(len(rows))
    for part, (title, images) in zip(parts, rows.items(), strict=True):
        part.suptitle(title, fontsize=10, x=0.01, ha="left")
        prediction = predictor(images[:PICTURES])
        shown = zip(
            part.subplots(1, PICTURES), images, prediction.set(level), prediction.familiarity(), strict=False
        )
        for axes, image, chosen, familiarity in shown:
            axes.imshow(image[0], cmap="gray_r")
            axes.set_axis_off()
            classes = [str(each) for each in chosen.nonzero().flatten().tolist()]
            named = f"{{{', '.join(classes)}}}" if len(classes) < 6 else f"{len(classes)} classes"
            axes.set_title(f"{named}\nfamiliarity {float(familiarity):.2f}", fontsize=9)
    figure.savefig(path, dpi=100)


def _loader(data: Labelled, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(data.images, data.labels), batch_size=100, shuffle=shuffle)


def _fresh_process_agrees(output: Path, model: nn.Module, posterior: uq.Posterior, images: Tensor) -> bool:
    """Save, load and predict in a new Python, and compare every bit of the probabilities."""
    paths = {name: output / f"digits.{name}" for name in ("inf.h5", "cnn.pt", "images.pt", "probs.pt")}
    uq.save(posterior, paths["inf.h5"])
    torch.save(model.state_dict(), paths["cnn.pt"])
    torch.save(images, paths["images.pt"])
    with _step(f"uq.save, then uq.load and predict in a fresh process ({paths['inf.h5']})"):
        subprocess.run([sys.executable, "-c", _DEPLOYMENT, *map(str, paths.values())], check=True)
    same = torch.equal(
        torch.load(paths["probs.pt"], weights_only=True), uq.wrap(model, posterior)(images).probs
    )
    for name in ("images.pt", "probs.pt"):
        paths[name].unlink()
    _print(f"  its probabilities are {'bit for bit the same' if same else 'NOT THE SAME'}")
    return same


def _tables(evaluation: uq.Evaluation) -> str:
    """The main numbers of the evaluation; its page has all."""
    columns = ["accuracy", "nll", "ece", "brier"]
    quality = [[name, *(values[c] for c in columns)] for name, values in evaluation.metrics.items()]
    foreign = evaluation.foreign_names
    detection = [
        [name, title_of(score), *(by_data[data][score]["auroc"] for data in foreign)]
        for name, by_data in evaluation.foreign.items()
        for score in SCORES
        if score in by_data[foreign[0]]
    ]
    return "\n".join(
        [
            "Test digits (NLL, ECE, Brier: lower is better)\n",
            text_table(["model", *map(title_of, columns)], quality, digits=3, indent="  "),
            "\nTelling test digits from foreign images (AUROC: 1 is perfect, 0.5 is chance)\n",
            text_table(["model", "score", *foreign], detection, digits=3, indent="  "),
            "  (rotated: by 90 degrees, without 0, 1 and 8; letters: those that no digit resembles, 12 fonts)",
        ]
    )


def _print(text: str) -> None:
    print(text, flush=True)  # at once, also into a pipe


@contextmanager
def _step(text: str) -> Generator[None]:
    """Print ``text`` before the block, and the seconds it took after."""
    print(f"{text} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    _print(f"{time.perf_counter() - start:.1f} s")


@contextmanager
def _one_thread() -> Generator[None]:
    """Compute on one core: small networks lose time by sharing work between threads, far more so on a busy machine.
    It also makes the demo print the same numbers on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
