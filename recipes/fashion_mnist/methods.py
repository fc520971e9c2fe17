"""The rows of the table: each turns a trained network into predictions of images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from recipes.common import predicted
from recipes.fashion_mnist.data import Data, Labelled
from recipes.fashion_mnist.drawn import SWAG, with_dropout
from recipes.fashion_mnist.variational import function_space, posterior_of

POSTERIORS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "KFAC": {"method": "kfac"},
    "EFB": {"method": "efb"},
    "INF": {"method": "inf"},
    "message passing, last layer": {"method": "message_passing"},
    "INF, last layer": {"layers": "last"},
}
"""Options of `uq.fit` by name; all else is its default."""

HEADS: dict[str, dict[str, Any]] = {"linearized": {}, "sampling": {"n_samples": 10}, "moments": {}}
"""Options of heads that a posterior is tuned through beside its own."""

DRAWS = 30
"""Of masks and of weights in the references that draw."""
FUNCTION_SPACE = "function space"
CONTROL = "trained on"


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        predict: images to a prediction.
        size: bytes that it keeps beside, or in place of, the network's weights.
        settings: what was tuned.
    """

    predict: Callable[[Tensor], uq.ClassPrediction]
    size: int
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())


Rows = dict[str, Callable[[], Method]]
"""By name, what makes a row's method: nothing is fitted or tuned for a row that is there already."""


def loader(data: Labelled, batch_size: int = 100) -> DataLoader[tuple[Tensor, ...]]:
    """Batches in order."""
    return DataLoader(TensorDataset(data.images, data.labels), batch_size=batch_size)


def from_logits(samples: Tensor) -> uq.ClassPrediction:
    """The mean over models of (models, inputs, classes); one model alone has no mutual information."""
    prediction = uq.ClassPrediction.from_logits(samples)
    return prediction if len(samples) > 1 else replace(prediction, sample_entropy=None, votes=None)


def plain(model: nn.Module) -> Method:
    """The network alone."""
    return Method(lambda images: from_logits(predicted(model, images, 500).unsqueeze(0)), _bytes([model]))


def temperature_scaling(model: nn.Module, held_out: Labelled) -> Method:
    """Logits over the temperature that has the best likelihood on the held-out images (Guo et al., 2017)."""
    outputs = predicted(model, held_out.images, 500).double()
    found = minimize_scalar(
        lambda x: float(nn.functional.cross_entropy(outputs / exp(x), held_out.labels)),
        bounds=(-3.0, 2.0),
        method="bounded",
        options={"xatol": 0.01},
    )
    temperature = exp(found.x)
    return Method(
        lambda images: from_logits((predicted(model, images, 500) / temperature).unsqueeze(0)),
        _bytes([model]),
        {"temperature": temperature},
    )


def deep_ensemble(models: list[nn.Module]) -> Method:
    """Networks from different initial weights (Lakshminarayanan et al., 2017)."""
    predictor = uq.wrap(models, None)
    return Method(lambda images: predictor.predict(images.split(500), progress=False), _bytes(models))


def dropout_draws(model: nn.Sequential, rate: float, draws: int = DRAWS) -> Method:
    """The mean over masks of a network that was trained with dropout (Gal and Ghahramani, 2016)."""
    network = with_dropout(model, rate).train()

    def predict(images: Tensor) -> uq.ClassPrediction:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return from_logits(torch.stack([predicted(network, images, 500) for _ in range(draws)]))

    return Method(predict, _bytes([model]), {"rate": rate})


def swag_draws(model: nn.Module, found: SWAG, path: Path, rate: float, draws: int = DRAWS) -> Method:
    """The mean over weights that SWAG draws (Maddox et al., 2019)."""
    network = copy.deepcopy(model)

    def predict(images: Tensor) -> uq.ClassPrediction:
        samples: list[Tensor] = []
        for weights in found.draws(draws, seed=0):
            vector_to_parameters(weights, network.parameters())
            samples.append(predicted(network, images, 500))
        return from_logits(torch.stack(samples))

    return Method(predict, path.stat().st_size, {"rate": rate})


def best(candidates: Mapping[float, Method], held_out: Labelled) -> Method:
    """That with the least NLL on the held-out images."""
    values = {
        rate: method.predict(held_out.images).quality(held_out.labels, bins=15)["nll"]
        for rate, method in candidates.items()
    }
    chosen = candidates[min(values, key=lambda rate: values[rate])]
    return replace(chosen, settings=chosen.settings | {"held-out NLL by rate": values})


def posterior_rows(
    model: nn.Module, data: Data, folder: Path, name: str, held_out: Labelled, seed: int
) -> Rows:
    """A posterior of `POSTERIORS` as a newcomer has it, and tuned on held-out images through every head."""
    path = folder / f"faithful-{name.replace(', ', '-').replace(' ', '-').lower()}-seed{seed}.h5"

    def fitted() -> uq.Posterior:
        if not path.exists():
            posterior = uq.fit(model, loader(data.train, 500), seed=seed, **POSTERIORS[name])
            uq.save(posterior, path)
        return uq.load(path, model)

    return _rows(model, name, fitted, path, held_out, [head for head in HEADS if head != "linearized"])


def function_space_rows(
    model: nn.Module, data: Data, folder: Path, held_out: Labelled, seed: int, epochs: int
) -> Rows:
    """The same for the function-space posterior with monochrome context."""
    path = folder / f"faithful-function-space-{epochs}-seed{seed}.h5"

    def fitted() -> uq.Posterior:
        function_space(model, data.train, path, seed=seed, epochs=epochs)
        return uq.load(path, model)

    return _rows(
        model, FUNCTION_SPACE, fitted, path, held_out, [head for head in HEADS if head != "sampling"]
    )


def trained_rows(
    model: nn.Module, data: Data, folder: Path, name: str, held_out: Labelled, seed: int, epochs: int
) -> Rows:
    """A posterior of `TRAINED`, with its own head; of a latent binary one its median probability model too."""
    path = folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}-{epochs}-seed{seed}.h5"

    def fitted() -> uq.Posterior:
        return posterior_of(name, model, data.train, path, seed=seed, epochs=epochs)

    def median() -> Method:
        small = path.with_suffix(".median.h5")
        posterior = uq.sparse.median(fitted())
        uq.save(posterior, small)
        predictor = uq.wrap(model, posterior)
        density = uq.sparse.summary(posterior).density
        return Method(partial(predicted, predictor, size=100), small.stat().st_size, {"density": density})

    rows = _rows(model, name, fitted, path, held_out, [])
    return rows | ({f"{name}, median model": median} if name == "latent binary" else {})


def _rows(
    model: nn.Module,
    name: str,
    fitted: Callable[[], uq.Posterior],
    path: Path,
    held_out: Labelled,
    others: list[str],
) -> Rows:
    """One call of `uq.tune` for its own head and the others; each begins with the posterior as it was fitted."""

    def method(head: str | None, tuned: bool) -> Method:
        posterior = fitted()
        options = {} if head is None else HEADS[head]
        if tuned:
            posterior = uq.tune(posterior, loader(held_out), head=head, progress=False, **options)
        found = posterior.prior_precision if posterior.has_free_prior_precision else posterior.scale
        settings = {"prior_precision or scale": found, "temperature": posterior.temperature}
        # asked for, since drawn weights do not give it unasked
        shown = {"novelty": True} if head is None else {}
        predictor = uq.wrap(model, posterior, head, **options, **shown)
        return Method(partial(predicted, predictor, size=100), path.stat().st_size, settings)

    rows: Rows = {
        f"{name}, defaults": partial(method, None, False),
        f"{name}, tuned": partial(method, None, True),
    }
    return rows | {f"{name}, {head}, tuned": partial(method, head, True) for head in others}


def quality(prediction: uq.ClassPrediction, labels: Tensor) -> dict[str, float]:
    """Accuracy in percent, NLL in nats, calibration error."""
    found = prediction.quality(labels, bins=15)
    return {"accuracy": 100 * found["accuracy"], "NLL": found["nll"], "ECE": found["ece"]}


def _bytes(models: list[nn.Module]) -> int:
    return sum(p.numel() * p.element_size() for model in models for p in model.parameters())
