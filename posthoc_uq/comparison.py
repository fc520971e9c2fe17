"""How far the predictions of a posterior are from the network's own, on given inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import PROBE_SAMPLES, count_samples
from posthoc_uq.devices import as_double
from posthoc_uq.errors import NonFiniteError
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.prediction import divisor_of
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.counted import counted_positions
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.predictions.samples import at_least_float32, by_input
from posthoc_uq.progress import counted
from posthoc_uq.replica import replicate

TEMPERATURES = (0.3, 3.0)  # the interval in which a matched temperature is searched
_HALVINGS = 12  # of that interval
_FLAT = 0.05  # standard deviation of logits over inputs: predictions then differ by a thousandth of a nat
_POSITIONS, _OUTPUTS = 4096, 2**22  # in all, of inputs whose outputs have positions ...
_LEAST = 16  # ... but so many inputs in any case


class Comparison:
    """The network's outputs on some inputs, to be compared with predictions under many settings of its posterior.

    Args:
        posterior: its present temperature is the network's.
        inputs: batches, on the model's device.
        predictor: predicts them.
        seed: of the draws of a head that draws weights.
        matched: whether predictions have the temperature at which their mean entropy is the network's.
        predicted: is told how many inputs were predicted, as the work on them goes on.

    Attributes:
        samples: how many inputs there are.
        rows: how many predictions count: one for each input, or for each of its positions that counts.
        inputs: as given, or the first of them where outputs have many positions.
    """

    def __init__(
        self,
        posterior: Posterior,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int,
        matched: bool,
        predicted: Callable[[int], None],
    ) -> None:
        self._posterior, self._predictor, self._seed = posterior, predictor, seed
        self._predicted = predicted
        self._temperature, self._matched = posterior.temperature, matched
        with torch.no_grad():
            model = replicate(cast(Any, posterior.model), posterior.centre)
            self.inputs = inputs = _enough(inputs, model, predictor)
            self._cache = FeatureCache(predictor, lambda: ((b, b) for b in inputs))
            pairs = self._cache.outputs(lambda batch: batch.copied().call(model))
            self._compared = [_compared(outputs, batch, posterior) for outputs, batch in pairs]
        self._rows = [own.rows for own in self._compared]
        self.rows = sum(self._rows)
        self.samples = sum(len(own.outputs) for own in self._compared)

    @property
    def runs_the_model(self) -> bool:
        """Whether a prediction of the inputs runs all of the model, and not only the part that has a posterior."""
        return self._cache.nbytes == 0

    @property
    def flat(self) -> bool:
        """Whether the network's logits hardly differ from input to input, so that its predictions say nothing."""
        if not self._posterior.likelihood.logits or self.samples < 2:
            return False
        spreads = [own.outputs for own in self._compared if own.layout is None]
        if not spreads or len({outputs.shape[1:] for outputs in spreads}) > 1:
            return False
        return float(as_double(torch.cat(spreads)).std(0).max()) < _FLAT

    def at_present(self) -> tuple[float, float]:
        """The mean divergence in nats at the posterior's present settings but the temperature, infinite where there is
        none; and the temperature, which the posterior has from then on.
        """
        self._posterior.temperature = temperature = self._temperature
        value = inf
        try:
            self._predictor.refresh(self._seed)
            with torch.no_grad():
                distributions, of_batches = list[Any](), self._cache.distributions()
                for own in self._compared:
                    with counted(len(own.outputs), self._predicted):
                        distributions.append(next(of_batches)[0])
                temperature = self._match(distributions) if self._matched else temperature
                self._posterior.temperature = temperature
                value = self._mean(distributions, self._posterior.observation.divergence)
        except NonFiniteError:  # draws of extreme weights, or a precision that cannot be factorised
            self._posterior.temperature = temperature
        return (value if isfinite(value) else inf), temperature

    def _mean(self, distributions: Sequence[Any], score: Callable[[Tensor, Any], Tensor]) -> float:
        """Mean of a score of outputs and predictions over all inputs, or positions that count."""
        total = 0.0
        for own, rows, distribution in zip(self._compared, self._rows, distributions, strict=True):
            if rows:
                total += rows * float(own.mean(score, self._predictor.prediction_of(distribution)))
        return total / self.rows

    def _match(self, distributions: Sequence[Any]) -> float:
        """The temperature at which the mean entropy is the network's, or the present one if there is none."""
        network_entropy = self._network_entropy()

        def excess(factor: float) -> float:
            self._posterior.temperature = self._temperature * factor
            return self._mean(distributions, lambda _, p: by_input(p.entropy())) - network_entropy

        low, high = (log10(bound) for bound in TEMPERATURES)
        if not (excess(10**low) <= 0.0 <= excess(10**high)):  # NaN included
            return self._temperature
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if excess(10**middle) > 0.0:
                high = middle
            else:
                low = middle
        return self._temperature * 10.0 ** ((low + high) / 2)

    def _network_entropy(self) -> float:
        entropy = self._posterior.likelihood.entropy
        pairs = [pair for pair in zip(self._compared, self._rows, strict=True) if pair[1]]
        total = sum(rows * float(own.mean(lambda outputs, _: entropy(outputs), None)) for own, rows in pairs)
        return total / self.rows


def _enough(inputs: Sequence[Batch], model: nn.Module, predictor: Predictor) -> Sequence[Batch]:
    """The first of the inputs, with some thousand positions in all that count: each position's prediction counts by
    itself, and all outputs are kept in memory and predicted many times. Without positions all inputs.
    """
    chosen: list[Batch] = []
    taken = positions = numbers = 0
    for batch in inputs:
        samples = count_samples(batch)
        probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
        with predictor.explaining(batch):
            outputs = probe.copied().call(model)
        layout = predictor.posterior.likelihood.positions_of(outputs)
        if layout is None:
            return inputs
        whole = outputs[:1].expand(samples, *outputs.shape[1:])
        sums = counted_positions(layout, whole, batch).sum(1).cumsum(0).cpu() + positions
        places = torch.arange(1, samples + 1, device="cpu")
        enough = (sums <= _POSITIONS) & (places * outputs[0].numel() + numbers <= _OUTPUTS)
        fitting = int((enough | (places + taken <= _LEAST)).sum())
        if fitting:
            chosen.append(batch if fitting == samples else batch.narrow(0, fitting, samples))
        if fitting < samples:
            break
        taken, positions, numbers = taken + samples, int(sums[-1]), numbers + samples * outputs[0].numel()
    return chosen


@dataclass(frozen=True)
class _Compared:
    """The network's outputs for one batch.

    Attributes:
        outputs: at least in float32, divided by the temperature.
        layout: where they have positions.
        counted: which of their rows count; None for all.
    """

    outputs: Tensor
    layout: Layout | None
    counted: Tensor | None

    @property
    def rows(self) -> int:
        """How many predictions count: the positions, or the samples."""
        if self.counted is not None:
            return int(self.counted.sum())
        return len(self.outputs if self.layout is None else self.layout.rows(self.outputs))

    def mean(self, score: Callable[[Tensor, Any], Tensor], prediction: Any) -> Tensor:
        """The mean of a score of outputs and predictions, over what counts."""
        outputs = self.outputs
        if self.counted is not None and self.layout is not None:
            outputs = self.layout.rows(outputs)[self.counted]
            prediction = None if prediction is None else prediction.rows.picked(self.counted)
        return as_double(score(outputs, prediction)).mean()


def _compared(outputs: Tensor, batch: Batch, posterior: Posterior) -> _Compared:
    outputs = at_least_float32(outputs.detach()) / divisor_of(posterior)
    layout = posterior.likelihood.positions_of(outputs)
    counted = None if layout is None else counted_positions(layout, outputs, batch).flatten()
    return _Compared(outputs, layout, None if counted is None or bool(counted.all()) else counted)
