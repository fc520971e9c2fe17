"""What people use in this library's place: laplace-torch's defaults, and scores of foreignness from `pytorch-ood`.

Both come from an environment of their own (`peers.py --install`), and every function raises `ImportError` elsewhere.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from _kinds import features, last_linear
from _scored import class_scores, outputs, value_scores
from _sets import Labelled, Split
from _zoo import loader
from torch import Tensor, nn

LAPLACE = {"laplace, last layer": "last_layer", "laplace, all weights": "all"}
"""laplace-torch's defaults by the weights that they cover; the last layer is what it takes where nothing is said."""

WEIGHTED = (nn.Linear, nn.Conv2d)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, and with torch's random state given back."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def laplace_scores(model: nn.Module, split: Split, subset: str) -> dict[str, Any]:
    """Of `laplace_of` on the test inputs."""
    return laplace_of(model, split, subset)(split.test)


def laplace_of(model: nn.Module, split: Split, subset: str) -> Callable[[Labelled], dict[str, Any]]:
    """What scores data by laplace-torch as its first example has it: Kronecker factors, prior precision by marginal
    likelihood, the linearised predictive with probit.

    A network with BatchNorm or LayerNorm gets a second chance for all weights with everything frozen but its linear
    layers and convolutions.
    """
    from laplace import Laplace

    values = split.train.targets.is_floating_point()
    options: dict[str, Any] = {"likelihood": "regression" if values else "classification"}
    if values:
        residuals = outputs(model, split.train.inputs) - split.train.targets
        options["sigma_noise"] = float(residuals.square().mean().sqrt())

    def fitted(network: nn.Module) -> Callable[[Labelled], dict[str, Any]]:
        found = Laplace(network, subset_of_weights=subset, hessian_structure="kron", **options)
        found.fit(loader(split.train, 100))
        found.optimize_prior_precision(method="marglik")
        return partial(scores, found)

    def scores(found: Any, data: Labelled) -> dict[str, Any]:
        if values:
            pairs = [found(batch) for batch in data.inputs.split(50)]
            mean, variance = (torch.cat([pair[i].detach() for pair in pairs]) for i in (0, 1))
            noise = options["sigma_noise"] ** 2
            return value_scores(mean, variance.reshape(mean.shape) + noise, data.targets)
        probs = [found(batch, link_approx="probit").detach() for batch in data.inputs.split(50)]
        return class_scores(torch.cat(probs).double().log(), data.targets)

    with quiet():
        try:
            return fitted(copy.deepcopy(model))
        except ImportError:
            raise
        except Exception:
            if subset != "all":
                raise
            network = copy.deepcopy(model)
            for module in network.modules():
                if not isinstance(module, WEIGHTED):
                    for parameter in module.parameters(recurse=False):
                        parameter.requires_grad_(False)
            only = fitted(network)
            return lambda data: only(data) | {"note": "linear layers and convolutions alone"}


Score = Callable[[Tensor], Tensor]


def distances(model: nn.Module, train: Labelled) -> dict[str, Score]:
    """Scores of inputs by what enters and leaves the last layer, larger for foreign ones: Mahalanobis (Lee et al. 2018)
    and relative Mahalanobis distance (Ren et al. 2021), the tenth neighbour (Sun et al. 2022), the virtual logit (ViM,
    Wang et al. 2022; half of the features' dimensions are principal, at most 512), energy (Liu et al. 2020) and the
    largest logit (Hendrycks et al. 2022), all but the last two in double precision.
    """
    from pytorch_ood import detector

    known, labels = features(model, train.inputs).double(), train.targets
    neighbours, last = min(10, len(labels)), last_linear(model)
    principal = max(1, min(512, known.shape[1] // 2))
    fitted = {
        "Mahalanobis": detector.Mahalanobis(None),
        "relative Mahalanobis": detector.RMD(None),
        "tenth neighbour": detector.KNN(None, k=neighbours, normalize=False),
        "tenth neighbour, cosine": detector.KNN(None, k=neighbours),
        "virtual logit": detector.ViM(
            None, principal, last.weight.detach().double(), last.bias.detach().double()
        ),
    }
    with double():
        for one in fitted.values():
            one.fit_features(known, labels)
    by_logits = {"energy": detector.EnergyBased(None), "largest logit": detector.MaxLogit(None)}

    def of_features(one: Any) -> Score:
        def score(inputs: Tensor) -> Tensor:
            with double():
                return one.predict_features(features(model, inputs).double())

        return score

    def of_logits(one: Any) -> Score:
        return lambda inputs: one.predict_logits(outputs(model, inputs))

    return {name: of_features(one) for name, one in fitted.items()} | {
        name: of_logits(one) for name, one in by_logits.items()
    }


@contextmanager
def double() -> Iterator[None]:
    """Tensors that are made are float64: covariances of features that hardly vary need it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
