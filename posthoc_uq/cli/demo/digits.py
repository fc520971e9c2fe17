"""Digits: train a stand-in for the user's model; fit, tune, save; load in a fresh process; measure."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.cli.demo.console import one_thread, say, step, table
from posthoc_uq.cli.demo.digits_data import (
    DigitsData,
    Labelled,
    augmented,
    load_digits,
    rendered_letters,
    rotated_digits,
)
from posthoc_uq.cli.demo.figures import Example, digits_figure
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    ood_auroc,
)
from posthoc_uq.posteriors.posterior import Posterior

COPIES = 40
"""Distorted copies of each training digit; the posterior counts each copy as an observation."""

PLAIN, FITTED, TUNED = "network alone", "INF as fitted", "INF tuned"
TRAINED = {
    "UTVI": uq.UTVI(epochs=2),
    "latent binary": uq.LatentBinary(epochs=3, inclusion_lr=0.1),
}
"""Methods that train on from the network, with as few epochs as these data need."""
SCORES = {"entropy": "entropy", "mutual_information": "mutual inf.", "novelty": "novelty"}
"""Scores that are shown, with what they are called."""


class DigitsResult(NamedTuple):
    """What the tables hold: by model the scores on test digits, by (model, score, foreign set) the AUROC."""

    quality: dict[str, dict[str, float]]
    auroc: dict[tuple[str, str, str], float]
    identical: bool


def network() -> nn.Sequential:
    """A small convolutional network for 8 x 8 images: the stand-in for the user's model."""
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


@one_thread()
def run(output: Path, seed: int = 0, epochs: int = 15) -> DigitsResult:
    """The digits part; leaves the picture, the posterior and the network's weights in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    data = load_digits(seed)
    sizes = [len(part.labels) for part in data]
    say(f"scikit-learn's digits: {sizes[0]} to train on, {sizes[1]} to tune on, {sizes[2]} to test on")
    training = augmented(data.train, COPIES, seed)
    torch.manual_seed(seed)
    model = network()
    with step(f"Training a small CNN for {epochs} epochs on {COPIES} distorted copies of each"):
        train(model, training, epochs, seed)

    foreign = {"rotated digits": rotated_digits(data.test), "letters": rendered_letters()}
    inputs = {"test digits": data.test.images, **foreign}
    predictions = {PLAIN: {name: _plain(model, images) for name, images in inputs.items()}}

    with step("uq.fit(model, train_loader)"):
        posterior = uq.fit(model, _loader(training), seed=seed, progress=False)
    with step("uq.wrap(model, posterior)(images)"):
        predictor = uq.wrap(model, posterior)
        predictions[FITTED] = {name: predictor(images) for name, images in inputs.items()}

    with step("uq.tune(posterior, val_loader)"):
        uq.tune(posterior, _loader(data.validation), progress=False)
    predictor = uq.wrap(model, posterior)
    predictions[TUNED] = {name: predictor(images) for name, images in inputs.items()}

    for name, method in TRAINED.items():
        with step(f"uq.fit(model, train_loader, {_written(method)})"):
            trained = uq.fit(model, _loader(training, shuffle=True), method, seed=seed, progress=False)
            predictor = uq.wrap(model, trained)
            predictions[name] = {name: predictor(images) for name, images in inputs.items()}

    identical = _fresh_process_agrees(
        output, model, posterior, data.test.images, predictions[TUNED]["test digits"].probs
    )
    result = DigitsResult(
        {name: _quality(by_set["test digits"], data.test.labels) for name, by_set in predictions.items()},
        _auroc(predictions, list(foreign)),
        identical,
    )
    _print_tables(result, list(foreign))
    path = output / "digits.png"
    _figure(predictions, inputs, data).savefig(path)
    say(f"Picture: {path}")
    return result


def _loader(data: Labelled, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(data.images, data.labels), batch_size=100, shuffle=shuffle)


def _written(method: uq.Method) -> str:
    """A method as one types it: its name and the options that are not the defaults."""
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    given = [f"{k}={v!r}" for k, v in fields.items() if v != getattr(type(method)(), k)]
    return f"uq.{type(method).__name__}({', '.join(given)})"


def _plain(model: nn.Module, images: Tensor) -> ClassPrediction:
    """The network's own prediction, in the form of a single weight sample."""
    with torch.no_grad():
        return ClassPrediction.from_logits(model(images).unsqueeze(0))


def _fresh_process_agrees(
    output: Path,
    model: nn.Module,
    posterior: Posterior,
    images: Tensor,
    probs: Tensor,
) -> bool:
    """Save, load and predict in a new Python, and compare every bit of the probabilities."""
    paths = {name: output / f"digits.{name}" for name in ("inf.h5", "cnn.pt", "images.pt", "probs.pt")}
    uq.save(posterior, paths["inf.h5"])
    torch.save(model.state_dict(), paths["cnn.pt"])
    torch.save(images, paths["images.pt"])
    with step(f"uq.save, then uq.load and predict in a fresh process ({paths['inf.h5']})"):
        command = [sys.executable, "-m", "posthoc_uq.cli.demo.fresh_process", *map(str, paths.values())]
        subprocess.run(command, check=True)
    same = torch.equal(torch.load(paths["probs.pt"], weights_only=True), probs)
    for name in ("images.pt", "probs.pt"):
        paths[name].unlink()
    say(f"  its probabilities are {'bit for bit the same' if same else 'NOT THE SAME'}")
    return same


def _quality(prediction: ClassPrediction, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(prediction.probs, labels),
        "NLL": negative_log_likelihood(prediction.probs, labels),
        "ECE": expected_calibration_error(prediction.probs, labels),
        "Brier": brier_score(prediction.probs, labels),
    }


def _scores(prediction: ClassPrediction, model: str) -> dict[str, Tensor]:
    """Scores that may tell foreign inputs; a network without a posterior has only its entropy."""
    scores = prediction.scores()
    names = ("entropy",) if model == PLAIN else SCORES
    return {SCORES[name]: scores[name] for name in names if name in scores}


def _auroc(
    predictions: dict[str, dict[str, ClassPrediction]], foreign: list[str]
) -> dict[tuple[str, str, str], float]:
    result: dict[tuple[str, str, str], float] = {}
    for model, by_set in predictions.items():
        familiar = _scores(by_set["test digits"], model)
        for name in foreign:
            for score, values in _scores(by_set[name], model).items():
                result[model, score, name] = ood_auroc(familiar[score], values)
    return result


def _print_tables(result: DigitsResult, foreign: list[str]) -> None:
    columns = list(next(iter(result.quality.values())))
    say("\nTest digits (NLL, ECE, Brier: lower is better)\n")
    say(table(["model", *columns], [[name, *scores.values()] for name, scores in result.quality.items()]))
    pairs = list(dict.fromkeys((model, score) for model, score, _ in result.auroc))
    rows = [[model, score, *(result.auroc[model, score, name] for name in foreign)] for model, score in pairs]
    say("\nTelling test digits from foreign images (AUROC: 1 is perfect, 0.5 is chance)\n")
    say(table(["model", "score", *foreign], rows))
    say("  (rotated: by 90 degrees, without 0, 1 and 8; letters: those that no digit resembles, 12 fonts)\n")


def _figure(predictions: dict[str, dict[str, ClassPrediction]], inputs: dict[str, Tensor], data: DigitsData):
    labels = data.test.labels
    calibration = {name: (predictions[name]["test digits"].probs, labels) for name in (PLAIN, FITTED, TUNED)}
    fitted = predictions[FITTED]
    scores = {f"entropy, {PLAIN}": {name: p.entropy() for name, p in predictions[PLAIN].items()}}
    for score in ("mutual inf.", "novelty"):
        scores[f"{score}, {FITTED}"] = {name: _scores(p, FITTED)[score] for name, p in fitted.items()}
    return digits_figure(calibration, scores, _examples(fitted, inputs, labels))


def _examples(
    predictions: dict[str, ClassPrediction], inputs: dict[str, Tensor], labels: Tensor
) -> list[Example]:
    """Three ordinary digits, the three least certain ones, and three of each foreign set."""
    examples: list[Example] = []

    def add(name: str, group: str, indices: list[int]) -> None:
        prediction = predictions[name]
        probabilities, classes, _ = prediction.top_k(1)
        for index in indices:
            truth = f"{int(labels[index])} → " if name == "test digits" else "→ "
            caption = f"{truth}{int(classes[index, 0])} ({float(probabilities[index, 0]):.0%})"
            scores = {score: float(values[index]) for score, values in _scores(prediction, FITTED).items()}
            examples.append(Example(inputs[name][index], caption, scores, group))

    digits = predictions["test digits"]
    add("test digits", "test digits", [int((labels == digit).nonzero()[0]) for digit in (2, 4, 6)])
    add("test digits", "least certain", digits.entropy().topk(3).indices.tolist())
    for name in inputs:
        if name != "test digits":
            add(name, name, [len(inputs[name]) * part // 7 for part in (1, 3, 5)])
    return examples
