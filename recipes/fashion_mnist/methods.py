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

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Prior precisions that are tried on held-out images: multiples of the evidence's."""


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
    """Every posterior with every head; the prior precision is tuned on held-out images, for each link of the linearised
    head and for the sampling head (and with that for the moments head, which is then calibrated).
    """
    held_out = Labelled(data.validation.images[:tuned_on], data.validation.labels[:tuned_on])
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}-seed{seed}.h5"
        if path.exists():
            posterior = uq.load(path, model)
        else:
            posterior = uq.fit(model, loader(data.train), seed=seed, **POSTERIORS[name])
            uq.save(posterior, path)
        size, evidence = path.stat().st_size, posterior.prior_precision
        grid = [evidence * factor for factor in FACTORS]
        gaussian = GaussianLogits(model, uq.wrap(model, posterior, "linearized"))
        for head, tau in tuned_links(gaussian, held_out, grid).items():
            settings = {"prior_precision": tau, "evidence": evidence}
            yield Method(
                f"{name}, {head}", partial(gaussian.predict, tau=tau, link=LINKS[head]), size, settings
            )
        posterior.prior_precision = evidence
        uq.tune(
            posterior,
            loader(held_out),
            parameters=("prior_precision",),
            prior_precisions=grid[1:],
            n_samples=10,
        )
        settings = {"prior_precision": posterior.prior_precision, "evidence": evidence}
        sampling = uq.wrap(model, posterior, "sampling", n_samples=10)
        yield Method(f"{name}, sampling", partial(_in_batches, sampling), size, settings)
        moments = uq.wrap(model, posterior, "moments")
        moments.calibrate(loader(held_out), progress=False)
        yield Method(f"{name}, moments", partial(_in_batches, moments), size, settings)


def tuned_links(gaussian: GaussianLogits, held_out: Labelled, grid: list[float]) -> dict[str, float]:
    """By link, the prior precision with the best likelihood of held-out images; one pass serves all links."""
    losses: dict[str, dict[float, float]] = {name: {} for name in LINKS}
    for tau in grid:
        for name, link in LINKS.items():
            prediction = gaussian.predict(held_out.images, tau, link)
            losses[name][tau] = -float(prediction.log_prob(held_out.labels).double().mean())
    return {name: min(by_tau, key=lambda tau, by_tau=by_tau: by_tau[tau]) for name, by_tau in losses.items()}


class GaussianLogits:
    """The linearised head with several links from one pass over the images: Jacobians cost far more than a link."""

    def __init__(self, model: nn.Module, predictor: uq.LinearizedPredictor) -> None:
        self.model, self.predictor = model, predictor
        self._kept: list[tuple[Tensor, float, list[tuple[Tensor, Tensor]]]] = []

    @torch.no_grad()
    def predict(self, images: Tensor, tau: float, link: dict[str, Any]) -> uq.ClassPrediction:
        """The prediction at a prior precision with a link; the last Gaussians are kept, as long as the images stay the
        same tensor.
        """
        found = next((last for kept, at, last in self._kept if kept is images and at == tau), None)
        if found is None:
            self.predictor.posterior.prior_precision = tau
            found = [
                (self.model(batch), self.predictor.functional_covariance(batch))
                for batch in images.split(64)  # larger ones leave the processor's cache
            ]
            self._kept = [*self._kept[-4:], (images, tau, found)]
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
