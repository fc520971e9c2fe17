"""The models that an evaluation compares: predictors, plain models, functions; each is a row of the tables."""

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
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import Choice, output_tensor
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.replica import model_device, replicate


@dataclass(frozen=True)
class ComparedModel:
    """One row of the tables.

    Attributes:
        name: in the tables.
        call: from a batch to its prediction.
        device: where it takes its inputs.
        predictor: the predictor, or None for a model without a posterior.
    """

    name: str
    call: Callable[[Batch], Prediction]
    device: torch.device
    predictor: Predictor | None


def compared_models(compared: Any, likelihood: str | Likelihood | None) -> list[ComparedModel]:
    """The rows for a predictor, a plain model, a function, or a mapping from names to those.

    Args:
        compared: see `evaluate`.
        likelihood: of plain models; None takes that of the first predictor, or classification.

    Raises:
        PosthocUQError: nothing to compare, or something that does not predict.
    """
    named = dict(cast(Mapping[str, Any], compared)) if isinstance(compared, Mapping) else {"": compared}
    if not named:
        raise PosthocUQError("evaluate needs at least one predictor.")
    predictors = [model for model in named.values() if isinstance(model, Predictor)]
    plain_likelihood = (
        predictors[0].posterior.likelihood
        if likelihood is None and predictors
        else resolve_likelihood("classification" if likelihood is None else likelihood)
    )
    noise_variance: Tensor | None = None
    if plain_likelihood.noise_variance is not None and (likelihood is None or isinstance(likelihood, str)):
        # of the first predictor that has one; else 0, and no density is measured
        noise_variances = [p.posterior.noise_variance for p in predictors]
        noise_variance = next(
            (variance for variance in noise_variances if variance is not None), torch.zeros((), device="cpu")
        )
    choice = next((found for p in predictors if (found := p.output_choice) is not None), None)
    return [_row(str(name), model, plain_likelihood, noise_variance, choice) for name, model in named.items()]


def _row(
    name: str, model: Any, likelihood: Likelihood, noise_variance: Tensor | None, choice: Choice | None
) -> ComparedModel:
    """One row; of a plain model that returns no tensor, or of one like the predictors', the outputs are the choice."""
    if isinstance(model, Predictor):
        return ComparedModel(
            name or model.head, lambda batch: model(*batch.args, **batch.kwargs), model.device, model
        )
    if isinstance(model, nn.Module):
        twin = replicate(model)
        device = model_device(twin)

        def predict(batch: Batch) -> Prediction:
            with explained(lambda: twin, batch, "a batch of the loader", LOADER):
                output = batch.copied().call_any(twin)
            if choice is not None and (callable(choice.part) or not isinstance(output, (Tensor, Prediction))):
                output = choice.of(output)
            return _as_prediction(output, likelihood, noise_variance)

        return ComparedModel(name or "model", predict, device, None)
    if callable(model):
        return ComparedModel(
            name or "function",
            lambda batch: _as_prediction(model(*batch.args, **batch.kwargs), likelihood, noise_variance),
            torch.device("cpu"),
            None,
        )
    raise PosthocUQError(
        f"evaluate takes a predictor from uq.wrap, a model, or a mapping of names to those; not a "
        f"{type(model).__name__}."
    )


def _as_prediction(output: Any, likelihood: Likelihood, noise_variance: Tensor | None) -> Prediction:
    """A model's output as the prediction of one weight sample; a prediction as it is."""
    if isinstance(output, Prediction):
        return output
    return likelihood.from_draws(output_tensor(output).unsqueeze(0), noise_variance).of_one_network()
