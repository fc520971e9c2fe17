"""The rows of the table: each turns a trained network into predictions of the test images and of the digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from data import Data, Labelled
from network import logits
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.heads.links import from_gaussian

POSTERIORS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "KFAC": {"method": "kfac"},
    "EFB": {"method": "efb"},
    "INF": {"method": "inf"},
    "last layer, EFB": {"method": "efb", "layers": "last"},
}
"""Options of `uq.fit` by row; all else is its default."""

LINKS: dict[str, dict[str, Any]] = {
    "linearized, probit": {"link": "probit"},
    "linearized, mc": {"link": "mc", "n_draws": 300},
}
"""Links from the linearised head's Gaussian logits to probabilities, by row."""

FACTORS = (2.0, 4.0, 8.0, 16.0, 64.0)
"""Prior precisions that are tried on held-out images, beside the evidence's: multiples of that."""


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        name: of the row.
        predict: images to a prediction.
        size: bytes that it keeps beside, or in place of, the network's weights.
        settings: what was tuned.
    """

    name: str
    predict: Callable[[Tensor], uq.ClassPrediction]
    size: int
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())


def loader(data: Labelled, batch_size: int = 500) -> DataLoader[tuple[Tensor, ...]]:
    """Batches in order."""
    return DataLoader(TensorDataset(data.images, data.labels), batch_size=batch_size)


def from_logits(samples: Tensor) -> uq.ClassPrediction:
    """The mean over models of (models, inputs, classes); one model alone has no mutual information."""
    prediction = uq.ClassPrediction.from_logits(samples)
    return prediction if len(samples) > 1 else replace(prediction, sample_entropy=None, votes=None)


def plain(model: nn.Module) -> Method:
    """The network alone."""
    return Method("plain", lambda images: from_logits(logits(model, images).unsqueeze(0)), _bytes([model]))


def temperature_scaling(model: nn.Module, validation: Labelled, tuned_on: int) -> Method:
    """Logits over the temperature that has the best likelihood on the held-out images (Guo et al., 2017)."""
    held_out = logits(model, validation.images[:tuned_on])

    def loss(log_temperature: float) -> float:
        scaled = held_out.double() / torch.tensor(log_temperature).exp()
        return float(nn.functional.cross_entropy(scaled, validation.labels[:tuned_on]))

    found = float(torch.tensor(minimize_scalar(loss, bounds=(-2.0, 3.0), method="bounded").x).exp())
    return Method(
        "temperature scaling",
        lambda images: from_logits((logits(model, images) / found).unsqueeze(0)),
        _bytes([model]),
        {"temperature": found},
    )


def deep_ensemble(models: list[nn.Module]) -> Method:
    """Networks from different initial weights (Lakshminarayanan et al., 2017)."""
    return Method(
        f"deep ensemble of {len(models)}",
        lambda images: from_logits(torch.stack([logits(model, images) for model in models])),
        _bytes(models),
    )


def posterior_methods(
    model: nn.Module, data: Data, folder: Path, names: Iterable[str], tuned_on: int, seed: int
) -> Iterator[Method]:
    """Every posterior with every head; the prior precision is tuned on held-out images, once through the linearised
    head (with the Monte Carlo link, for both links) and once through the sampling head (for the moments head too).
    """
    held_out = loader(Labelled(data.validation.images[:tuned_on], data.validation.labels[:tuned_on]), 64)
    folder.mkdir(parents=True, exist_ok=True)

    def tune(**options: Any) -> dict[str, Any]:
        posterior.prior_precision = evidence
        grid = [evidence * factor for factor in FACTORS]
        uq.tune(posterior, held_out, parameters=("prior_precision",), prior_precisions=grid, **options)
        return {"prior_precision": posterior.prior_precision, "evidence": evidence}

    for name in names:
        path = folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}-seed{seed}.h5"
        if path.exists():
            posterior = uq.load(path, model)
        else:
            posterior = uq.fit(model, loader(data.train), seed=seed, **POSTERIORS[name])
            uq.save(posterior, path)
        size, evidence = path.stat().st_size, posterior.prior_precision
        settings = tune(head="linearized", **LINKS["linearized, mc"])
        logits_of = GaussianLogits(model, uq.wrap(model, posterior, "linearized"))
        for head, link in LINKS.items():
            yield Method(f"{name}, {head}", partial(logits_of.predict, link=link), size, settings)
        settings = tune(head="sampling", n_samples=10)
        sampling = uq.wrap(model, posterior, "sampling", n_samples=10)
        yield Method(f"{name}, sampling", partial(_in_batches, sampling), size, settings)
        moments = uq.wrap(model, posterior, "moments")
        moments.calibrate(held_out, progress=False)
        yield Method(f"{name}, moments", partial(_in_batches, moments), size, settings)


class GaussianLogits:
    """The linearised head with several links from one pass over the images: Jacobians cost far more than a link."""

    def __init__(self, model: nn.Module, predictor: uq.LinearizedPredictor) -> None:
        self.model, self.predictor = model, predictor
        self._kept: list[tuple[Tensor, list[tuple[Tensor, Tensor]]]] = []

    @torch.no_grad()
    def predict(self, images: Tensor, link: dict[str, Any]) -> uq.ClassPrediction:
        """The prediction with a link; the Gaussians of the last images asked for are kept, as long as they stay the
        same tensor.
        """
        found = next((gaussians for kept, gaussians in self._kept if kept is images), None)
        if found is None:
            found = [
                (self.model(batch), self.predictor.functional_covariance(batch))
                for batch in images.split(64)  # larger ones leave the processor's cache
            ]
            self._kept = [*self._kept[-4:], (images, found)]
        predictions = [
            from_gaussian(
                mean,
                covariance.diagonal(dim1=1, dim2=2),
                self.predictor.posterior,
                covariance=covariance if link["link"] == "mc" else None,
                **link,
            )
            for mean, covariance in found
        ]
        return uq.ClassPrediction.cat([p for p in predictions if isinstance(p, uq.ClassPrediction)])


@torch.no_grad()
def _in_batches(predictor: uq.Predictor, images: Tensor) -> uq.ClassPrediction:
    return uq.ClassPrediction.cat([predictor(batch) for batch in images.split(500)])


def _bytes(models: list[nn.Module]) -> int:
    return sum(p.numel() * p.element_size() for model in models for p in model.parameters())
