"""What is compared: predictors, plain models and anything else that predicts, each a row of the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.loaders import Batch, output_tensor
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.replica import model_device, replicate


@dataclass(frozen=True)
class ComparedModel:
    """One of the compared.

    Attributes:
        name: as it stands in the tables.
        call: a batch to its prediction.
        device: where it wants its inputs.
        predictor: it, if it has a posterior.
    """

    name: str
    call: Callable[[Batch], Prediction]
    device: torch.device
    predictor: Predictor | None


def compared_models(compared: Any, likelihood: str | Likelihood | None) -> list[ComparedModel]:
    """The rows of a predictor, a plain model, a function, or a mapping from names to those.

    Args:
        compared: see `evaluate`.
        likelihood: of plain models; None takes that of the first predictor, or classification.

    Raises:
        PosthocUQError: nothing to compare, or something that does not predict.
    """
    named = dict(cast(Mapping[str, Any], compared)) if isinstance(compared, Mapping) else {"": compared}
    if not named:
        raise PosthocUQError("evaluate needs at least one predictor.")
    predictors = [one for one in named.values() if isinstance(one, Predictor)]
    plain = (
        predictors[0].posterior.likelihood
        if likelihood is None and predictors
        else resolve_likelihood("classification" if likelihood is None else likelihood)
    )
    noise: Tensor | None = None
    if plain.noise_variance is not None and (likelihood is None or isinstance(likelihood, str)):
        # of the first predictor, which knows it; without one there is none, and so no density
        known = [p.posterior.noise_variance for p in predictors]
        noise = next((own for own in known if own is not None), torch.zeros((), device="cpu"))
    return [_row(str(name), one, plain, noise) for name, one in named.items()]


def _row(name: str, one: Any, likelihood: Likelihood, noise: Tensor | None) -> ComparedModel:
    if isinstance(one, Predictor):
        return ComparedModel(
            name or one.head, lambda batch: one(*batch.args, **batch.kwargs), one.device, one
        )
    if isinstance(one, nn.Module):
        twin = replicate(one)
        device = model_device(twin)

        def predict(batch: Batch) -> Prediction:
            with explained(lambda: twin, batch, "a batch of the loader", LOADER):
                output = batch.copied().call_any(twin)
            return _shaped(output, likelihood, noise)

        return ComparedModel(name or "model", predict, device, None)
    if callable(one):
        return ComparedModel(
            name or "function",
            lambda batch: _shaped(one(*batch.args, **batch.kwargs), likelihood, noise),
            torch.device("cpu"),
            None,
        )
    raise PosthocUQError(
        f"evaluate takes a predictor from uq.wrap, a model, or a mapping of names to those; not a "
        f"{type(one).__name__}."
    )


def _shaped(output: Any, likelihood: Likelihood, noise: Tensor | None) -> Prediction:
    """A model's output as the prediction of one weight sample; a prediction as it is."""
    if isinstance(output, Prediction):
        return output
    return likelihood.from_draws(output_tensor(output).unsqueeze(0), noise).of_one_network()
