"""The rows of the table: each turns a trained network into predictions of the test images and of the digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import torch
from data import Data, Labelled
from network import logits
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from variational import function_space

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

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Prior precisions that are tried on held-out images: multiples of the evidence's."""

WIDENINGS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
"""Factors on the function-space posterior's variances: its prior precision is a part of the training."""

FUNCTION_SPACE = "function space"
CONTROL = "trained on"


@dataclass(frozen=True)
class Setting:
    """How Gaussian logits become a prediction.

    Attributes:
        prior_precision: None leaves the posterior's own.
        widening: a factor on the covariance of the logits, which is one on the covariance of the weights.
        temperature: divides the logits, their deviations included.
    """

    prior_precision: float | None = None
    widening: float = 1.0
    temperature: float = 1.0


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


def temperature_scaling(model: nn.Module, held_out: Labelled) -> Method:
    """Logits over the temperature that has the best likelihood on the held-out images (Guo et al., 2017)."""
    outputs = logits(model, held_out.images).double()
    found = best_temperature(
        lambda temperature: nn.functional.cross_entropy(outputs / temperature, held_out.labels)
    )
    return Method(
        "temperature scaling",
        lambda images: from_logits((logits(model, images) / found).unsqueeze(0)),
        _bytes([model]),
        {"temperature": found},
    )


def control_methods(model: nn.Module, held_out: Labelled) -> list[Method]:
    """The network after as many further epochs as the function-space posterior had, alone and tempered."""
    tempered_network = replace(temperature_scaling(model, held_out), name=f"{CONTROL}, temperature scaling")
    return [replace(plain(model), name=CONTROL), tempered_network]


def best_temperature(loss: Callable[[float], Tensor]) -> float:
    """The temperature between e^-3 and e^2 with the least loss, to a hundredth."""
    found = minimize_scalar(
        lambda x: float(loss(exp(x))), bounds=(-3.0, 2.0), method="bounded", options={"xatol": 0.01}
    )
    return exp(found.x)


def deep_ensemble(models: list[nn.Module]) -> Method:
    """Networks from different initial weights (Lakshminarayanan et al., 2017)."""
    return Method(
        f"deep ensemble of {len(models)}",
        lambda images: from_logits(torch.stack([logits(model, images) for model in models])),
        _bytes(models),
    )


def last_row(posterior: str) -> str:
    """The last of the rows that `posterior_methods` and `function_space_methods` give."""
    return f"{posterior}, moments"


def posterior_methods(
    model: nn.Module, data: Data, folder: Path, name: str, held_out: Labelled, seed: int
) -> Iterator[Method]:
    """A posterior with every head, tuned on held-out images: prior precision and temperature for each link of the
    linearised head, the prior precision for the sampling head (and with that for the moments head, which is then
    calibrated).
    """
    path = folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}-seed{seed}.h5"
    if path.exists():
        posterior = uq.load(path, model)
    else:
        posterior = uq.fit(model, loader(data.train), seed=seed, **POSTERIORS[name])
        uq.save(posterior, path)
    size, evidence = path.stat().st_size, posterior.prior_precision
    grid = [Setting(prior_precision=evidence * factor) for factor in FACTORS]
    gaussian = GaussianLogits(model, uq.wrap(model, posterior, "linearized"))
    yield from linearized_methods(gaussian, name, grid, held_out, size)
    posterior.prior_precision, posterior.temperature = evidence, 1.0
    uq.tune(
        posterior,
        loader(held_out),
        parameters=("prior_precision",),
        prior_precisions=[evidence * factor for factor in FACTORS[1:]],
        n_samples=10,
    )
    settings = {"prior_precision": posterior.prior_precision, "evidence": evidence}
    sampling = uq.wrap(model, posterior, "sampling", n_samples=10)
    yield Method(f"{name}, sampling", partial(in_batches, sampling), size, settings)
    moments = uq.wrap(model, posterior, "moments")
    moments.calibrate(loader(held_out), progress=False)
    yield Method(last_row(name), partial(in_batches, moments), size, settings)


def function_space_methods(
    model: nn.Module, data: Data, folder: Path, held_out: Labelled, seed: int, epochs: int
) -> Iterator[Method]:
    """The function-space posterior with monochrome context and every head; the variances are widened and the logits
    tempered by held-out images for the linearised head, tempered for the sampling head.
    """
    path = folder / f"function-space-monochrome-{epochs}-seed{seed}.h5"
    posterior = function_space(model, data.train, path, seed=seed, epochs=epochs)
    size, name = path.stat().st_size, FUNCTION_SPACE
    grid = [Setting(widening=factor) for factor in WIDENINGS]
    gaussian = GaussianLogits(model, uq.wrap(model, posterior, "linearized"))
    yield from linearized_methods(gaussian, name, grid, held_out, size)
    posterior.temperature = 1.0
    sampling = uq.wrap(model, posterior, "sampling", n_samples=10)
    outputs = torch.cat([sampling.outputs(batch) for batch in held_out.images.split(500)], dim=1)

    def loss(temperature: float) -> Tensor:
        return -from_logits(outputs / temperature).log_prob(held_out.labels).double().mean()

    with torch.no_grad():
        posterior.temperature = best_temperature(loss)
    settings = {"temperature": posterior.temperature}
    yield Method(f"{name}, sampling", partial(in_batches, sampling), size, settings)
    posterior.temperature = 1.0
    moments = uq.wrap(model, posterior, "moments")
    moments.calibrate(loader(held_out), progress=False)
    yield Method(last_row(name), partial(in_batches, moments), size)


def linearized_methods(
    gaussian: GaussianLogits, name: str, grid: list[Setting], held_out: Labelled, size: int
) -> Iterator[Method]:
    """The linearised head with each link at the setting with the best likelihood of held-out images."""
    for head, setting in tuned_links(gaussian, held_out, grid).items():
        predict = partial(gaussian.predict, setting=setting, link=LINKS[head])
        yield Method(f"{name}, {head}", predict, size, asdict(setting))


def tuned_links(gaussian: GaussianLogits, held_out: Labelled, grid: list[Setting]) -> dict[str, Setting]:
    """By link, the setting of `grid` with its temperature that has the best likelihood of held-out images.

    From the middle of the grid on, as long as a neighbour of a link's best one has not been tried: along the grid
    there is one minimum. A pass over the images serves all links.
    """
    found: dict[str, dict[int, tuple[float, Setting]]] = {name: {} for name in LINKS}
    ahead = {len(grid) // 2}
    while ahead:
        for index in ahead:
            for name, link in LINKS.items():
                found[name][index] = tempered(gaussian, held_out, grid[index], link)
        tried = found[next(iter(LINKS))]
        leaders = [min(losses, key=lambda i, losses=losses: losses[i][0]) for losses in found.values()]
        neighbours = {leader + step for leader in leaders for step in (-1, 1)}
        ahead = {i for i in neighbours if 0 <= i < len(grid) and i not in tried}
    return {name: min(losses.values(), key=lambda pair: pair[0])[1] for name, losses in found.items()}


def tempered(
    gaussian: GaussianLogits, held_out: Labelled, setting: Setting, link: dict[str, Any]
) -> tuple[float, Setting]:
    """The setting with the temperature that suits it best, and its mean loss on held-out images."""

    def loss(temperature: float) -> Tensor:
        prediction = gaussian.predict(held_out.images, replace(setting, temperature=temperature), link)
        return -prediction.log_prob(held_out.labels).double().mean()

    best = best_temperature(loss)
    return float(loss(best)), replace(setting, temperature=best)


class GaussianLogits:
    """The linearised head with several links from one pass over the images: Jacobians cost far more than a link."""

    def __init__(self, model: nn.Module, predictor: uq.LinearizedPredictor) -> None:
        self.model, self.predictor = model, predictor
        self._kept: list[tuple[Tensor, float | None, tuple[Tensor, Tensor]]] = []

    @torch.no_grad()
    def predict(self, images: Tensor, setting: Setting, link: dict[str, Any]) -> uq.ClassPrediction:
        """The prediction at a setting with a link; the last Gaussians are kept, as long as the images stay the same
        tensor.
        """
        posterior, tau = self.predictor.posterior, setting.prior_precision
        posterior.temperature = setting.temperature
        found = next((last for kept, at, last in self._kept if kept is images and at == tau), None)
        if found is None:
            if tau is not None:
                posterior.prior_precision = tau
            weights = {**dict(self.model.named_parameters()), **posterior.mean}
            parts = [
                (functional_call(self.model, weights, batch), self.predictor.functional_covariance(batch))
                for batch in images.split(64)  # larger ones leave the processor's cache
            ]
            found = torch.cat([mean for mean, _ in parts]), torch.cat([covariance for _, covariance in parts])
            self._kept = [*self._kept[-4:], (images, tau, found)]
        mean, covariance = found[0], found[1] * setting.widening
        prediction = from_gaussian(
            mean,
            covariance.diagonal(dim1=1, dim2=2),
            posterior,
            covariance=covariance if link["link"] == "mc" else None,
            **link,
        )
        assert isinstance(prediction, uq.ClassPrediction)
        return prediction


@torch.no_grad()
def in_batches(predictor: uq.Predictor, images: Tensor) -> uq.ClassPrediction:
    """The prediction of many images."""
    return uq.ClassPrediction.cat([predictor(batch) for batch in images.split(500)])


def _bytes(models: list[nn.Module]) -> int:
    return sum(p.numel() * p.element_size() for model in models for p in model.parameters())
