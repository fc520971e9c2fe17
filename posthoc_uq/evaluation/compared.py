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
from posthoc_uq.loaders import Batch, argument_names
from posthoc_uq.outputs import Choice, output_tensor
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.replica import model_device, model_dtype, replicate


@dataclass(frozen=True)
class ComparedModel:
    """One row of the tables.

    Attributes:
        name: in the tables.
        call: from a batch to its prediction.
        device: where it takes its inputs.
        dtype: of its weights, which arrays of floating-point numbers become.
        predictor: the predictor, or None for a model without a posterior.
        argument_names: of what it takes; None where that is anything, or not known.
    """

    name: str
    call: Callable[[Batch], Prediction]
    device: torch.device
    dtype: torch.dtype
    predictor: Predictor | None
    argument_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Plain:
    """How the outputs of models without a posterior are read.

    Attributes:
        likelihood: of their outputs.
        noise_variance: of regression.
        choice: which part of what they return the outputs are.
        assumed: whether nobody named the likelihood, and no predictor has one.
    """

    likelihood: Likelihood
    noise_variance: Tensor | None
    choice: Choice | None
    assumed: bool


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
        predictors[0].posterior.observation
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
    plain = _Plain(plain_likelihood, noise_variance, choice, likelihood is None and not predictors)
    return [_row(str(name), model, plain) for name, model in named.items()]


def _row(name: str, model: Any, plain: _Plain) -> ComparedModel:
    """One row; of a plain model that returns no tensor, or of one like the predictors', the outputs are the choice."""
    if isinstance(model, Predictor):
        return ComparedModel(
            name or model.head,
            lambda batch: model(*batch.args, **batch.kwargs),
            model.device,
            model_dtype(model.model),
            model,
            argument_names(model.model),
        )
    if isinstance(model, nn.Module):
        twin = replicate(model)

        def predict(batch: Batch) -> Prediction:
            with explained(lambda: twin, batch, "a batch of the loader", LOADER):
                output = batch.copied().call_any(twin)
            choice = plain.choice
            if choice is not None and (callable(choice.part) or not isinstance(output, (Tensor, Prediction))):
                output = choice.of(output)
            return _as_prediction(output, plain)

        names = argument_names(twin)
        return ComparedModel(name or "model", predict, model_device(twin), model_dtype(twin), None, names)
    if callable(model):
        return ComparedModel(
            name or "function",
            lambda batch: _as_prediction(model(*batch.args, **batch.kwargs), plain),
            torch.device("cpu"),
            torch.float32,
            None,
        )
    raise PosthocUQError(
        f"evaluate takes a predictor from uq.wrap, a model, or a mapping of names to those; not a "
        f"{type(model).__name__}."
    )


def _as_prediction(output: Any, plain: _Plain) -> Prediction:
    """A model's output as the prediction of one weight sample; a prediction as it is.

    Raises:
        PosthocUQError: one output an input, which cannot be the classification that is assumed.
    """
    if isinstance(output, Prediction):
        return output
    outputs = output_tensor(output)
    if plain.assumed and outputs.shape[1:].numel() == 1:
        raise PosthocUQError(
            f"The model has one output an input, {tuple(outputs.shape)}, and without a predictor evaluate takes "
            f"outputs for the logits of classes; pass likelihood='regression', or 'binary' for one logit."
        )
    return plain.likelihood.from_draws(outputs.unsqueeze(0), plain.noise_variance).of_one_network()
