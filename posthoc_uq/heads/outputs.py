"""Predictions of outputs that are already there: logits, probabilities, means or quantiles of a network that is not."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, is_array
from posthoc_uq.core.devices import at_least_float32
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Natural, check_option, one_of
from posthoc_uq.heads.predictor import Predictor, scaled_logits
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors import GIVEN, Posterior
from posthoc_uq.posteriors.report import Report

GivenForm = Literal["outputs", "probabilities", "deviations"]
"""What is given: outputs as the likelihood takes them, probabilities in place of logits, or means and their standard
deviations."""


class GivenOutputs(nn.Module):
    """Stands in for the network: gives what it is given in the form that the likelihood takes.

    Args:
        form: of what is given.
        likelihood: of them.
    """

    def __init__(self, form: GivenForm, likelihood: Likelihood) -> None:
        super().__init__()
        self.form: GivenForm = form
        self.softmax, self.channel_dim = likelihood.softmax, int(getattr(likelihood, "channel_dim", 1))
        # says on which device it is, and in which precision arrays become tensors
        self.place = nn.Parameter(torch.zeros((), dtype=torch.float64, device="cpu"), requires_grad=False)

    def forward(self, outputs: Tensor, deviations: Tensor | None = None) -> Tensor:
        """The outputs.

        Args:
            outputs: ``(samples, ...)``, or means.
            deviations: standard deviations of the targets from the means, in the same shape, where they are given.

        Raises:
            PosthocUQError: they are of another form.
        """
        if (deviations is not None) != (self.form == "deviations"):
            raise PosthocUQError(
                "These outputs were calibrated with standard deviations; give both: calibrated(means, deviations)."
                if deviations is None
                else "These outputs were calibrated without standard deviations; give them alone."
            )
        outputs = at_least_float32(outputs)
        if deviations is not None:
            wrong = deviations.shape != outputs.shape
            if wrong or not (torch.compiler.is_compiling() or bool((deviations > 0).all())):
                raise PosthocUQError(
                    f"Standard deviations must be above 0 and of the shape of the means, {tuple(outputs.shape)}; these "
                    f"are of {tuple(deviations.shape)}."
                )
            halves = [outputs, 2 * deviations.to(outputs).log()]
            if outputs.ndim == 1:
                return torch.stack(halves, 1)
            return torch.cat(halves, self.channel_dim if outputs.ndim > 2 else 1)
        if self.form != "probabilities":
            return outputs
        if not (torch.compiler.is_compiling() or bool(((outputs >= 0) & (outputs <= 1)).all())):
            raise PosthocUQError("Probabilities must be between 0 and 1, and some are not; are they logits?")
        info = torch.finfo(outputs.dtype)
        return outputs.clamp(min=info.tiny).log() if self.softmax else torch.logit(outputs, info.eps)


class OutputsPredictor(Predictor):
    """Predictions of outputs that are already there, which `posthoc_uq.calibrate_outputs` calibrated: its call takes
    arrays as those were, and returns a `Prediction`.

    It is the predictor of a network that passes on what it is given, with a posterior that has no weight: nothing is
    known of how sure a network is of its weights, and so no novelty.

    Args:
        model: a `GivenOutputs`.
        posterior: over no weights.
        form: of what is given.
        columns: how many outputs a sample has; 0 where they have positions.
    """

    head = "outputs"
    needs = frozenset({GIVEN})

    def __init__(
        self, model: nn.Module, posterior: Posterior, form: GivenForm = "outputs", columns: int = 0
    ) -> None:
        super().__init__(model, posterior)
        self._form = one_of("form", form, get_args(GivenForm))
        self._columns = check_option("columns", columns, Natural)
        self._twin = copy.deepcopy(model).eval()

    def __repr__(self) -> str:
        posterior = self._posterior
        tempered = f", temperature {posterior.temperature:.4g}" if posterior.likelihood.logits else ""
        promises = posterior.history.promises
        promised = "" if promises is None else f"; promises from {promises.samples:,} held-out samples"
        return f"OutputsPredictor: likelihood {posterior.likelihood.name!r}{tempered}{promised}"

    def report(self) -> Report:
        """What calibration found, and what is promised."""
        return self._posterior.report()

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        return {**super().identity(), "form": self._form, "columns": self._columns}

    @property
    def _network(self) -> nn.Module:
        return self._twin

    def _apply(self, fn: Any, recurse: bool = True) -> OutputsPredictor:
        super()._apply(fn, recurse)
        self._twin = self._twin._apply(fn)
        return self

    def _batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Batch]:
        # as they were calibrated: sets may depend on a hash of them
        tensors = (
            torch.as_tensor(np.asarray(value), device="cpu") if is_array(value) else value for value in args
        )
        return super()._batches(tuple(tensors), kwargs)

    def _distribution(self, batch: Batch) -> Tensor:
        """The outputs themselves, ``(batch, ...)``.

        Raises:
            PosthocUQError: they are not of the shape of those that were calibrated.
        """
        if torch.compiler.is_compiling():  # a program checks nothing
            return batch.call(self._twin)
        with torch.no_grad():
            outputs = batch.copied().call(self._twin)
        given = batch.tensors[0]
        if self._columns and given[0].numel() != self._columns:
            raise PosthocUQError(
                f"Outputs with {self._columns} columns were calibrated, and these are of shape {tuple(given.shape)}."
            )
        self._posterior.likelihood.check(outputs, None)
        return outputs

    def prediction_of(self, distribution: Any) -> Prediction:
        """See `Predictor`."""
        outputs = scaled_logits(distribution, self._posterior)
        return self._posterior.observation.from_draws(outputs.unsqueeze(0)).of_one_network()

    def _predict(self, batch: Batch) -> Prediction:
        outputs = self._distribution(batch)
        return self.promising(self.prediction_of(outputs), outputs)

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        outputs = self._distribution(batch)
        return outputs.expand(n, *outputs.shape)
