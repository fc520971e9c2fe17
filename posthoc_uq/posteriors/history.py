"""How a posterior was fitted, tuned and calibrated, and what searches for its hyperparameters tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import exp, inf, isfinite, isnan
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from posthoc_uq.core.batches import InputRecord
from posthoc_uq.core.errors import warn_user
from posthoc_uq.core.options import LARGEST, Count, Natural, Temperature, Unit
from posthoc_uq.core.outputs import OutputChoice
from posthoc_uq.core.records import Digest, Listed, Name, Plain, Record, Simple, SumOfSquares, among
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.posteriors.settings import (
    HEADS,
    HYPERPARAMETERS,
    Hyperparameters,
    NumberOrByLayer,
    ReadOnly,
    SettingsRecord,
)

Criterion = Literal["faithful", "likelihood", "leave_one_out", "evidence"]
"""By what `posthoc_uq.tune` may choose hyperparameters; `CRITERIA` has the facts about each."""


@dataclass(frozen=True)
class CriterionFacts:
    """The facts about a criterion that trials, files, `wrap` and the command line need; `posthoc_uq.fitting.tune` has
    its search.

    Attributes:
        objective: what the trials are compared by.
        best: which trial is the best: ``min`` or ``max`` of the objective; None where the goal is another one.
        data: what it needs, in words; empty for nothing.
        labels: whether these data need their targets.
        by_predictions: whether it chooses by the predictions of a head, to which the hyperparameters then belong.
    """

    objective: str
    best: Callable[..., Any] | None
    data: str
    labels: bool
    by_predictions: bool


CRITERIA: dict[Criterion, CriterionFacts] = {
    "faithful": CriterionFacts(
        "divergence", None, "training inputs", False, True
    ),  # the widest within a budget
    "likelihood": CriterionFacts("validation NLL", min, "held-out data with targets", True, True),
    "leave_one_out": CriterionFacts("", None, "the training data with targets", True, False),
    "evidence": CriterionFacts("log marginal likelihood", max, "", False, False),
}


@dataclass(frozen=True)
class Trial:
    """One evaluation of a search.

    Attributes:
        settings: the hyperparameters that were tried; in a search for one layer's prior precision, that value alone.
        objective: ``"faithful"``: the divergence from the network in nats. ``"likelihood"``: the validation NLL, a mean
            over all labels that count, as in `posthoc_uq.evaluate`. ``"evidence"``: the log marginal likelihood; for a
            prior precision less the log likelihood, which does not depend on it.
    """

    settings: Hyperparameters
    objective: float


@dataclass(repr=False)
class Trials:
    """All trials of a search; prints itself, the chosen trial first.

    Attributes:
        criterion: of the search.
        searched: the names of the hyperparameters that it set.
        trials: one for each evaluation.
        chosen: the trial whose values the posterior has. With held-out data that is the widest posterior that costs
            little, not always the best one. None where the trials belong to several searches.
        several: whether they do: one search a layer, or prior precision and noise in turn.
        at_edge: the values at the edge of their search intervals.
        model_alone: validation NLL of the model without a posterior, where held-out data were given.
        nll_given_up_for_width: validation NLL above the best that was tried, for a wider posterior.
        temperature: that all held-out labels chose afterwards, the posterior's; it is shown in place of the trials'.
    """

    criterion: Criterion
    searched: tuple[str, ...]
    trials: list[Trial] = field(default_factory=lambda: list[Trial]())
    chosen: Trial | None = None
    several: bool = False
    at_edge: list[str] = field(default_factory=lambda: list[str]())
    model_alone: float | None = None
    nll_given_up_for_width: float | None = None
    temperature: float | None = None

    @property
    def best(self) -> Trial | None:
        """The trial with the least validation NLL, or with the largest marginal likelihood. None by ``"faithful"``,
        whose goal is the widest posterior within a budget, and where the trials belong to several searches.
        """
        best = CRITERIA[self.criterion].best
        if not self.trials or self.several or best is None:
            return None
        return best(self.trials, key=lambda trial: trial.objective)

    def __repr__(self) -> str:
        chosen = self._line(self.chosen) if self.chosen else "one a search"
        given_up = (
            ""
            if not self.nll_given_up_for_width
            else f"; {self.nll_given_up_for_width:.2g} nats given up against the best"
        )
        return f"Trials({len(self.trials)} evaluations; chosen: {chosen}{given_up})"

    def __str__(self) -> str:
        lines: list[str] = []
        if self.chosen is not None:
            lines.append(f"chosen: {self._line(self.chosen)}")
        if self.nll_given_up_for_width is not None:
            lines.append(
                f"given up against the best, for a wider posterior: {self.nll_given_up_for_width:.2g} nats"
            )
        best = self.best
        if best is not None and best is not self.chosen:
            lines.append(f"best: {self._line(best)}")
        if self.model_alone is not None:
            lines.append(f"the model alone: validation NLL={self.model_alone:.5g}")
        lines += [f"at the edge of the search: {name}" for name in self.at_edge]
        return "\n".join([*lines, f"all {len(self.trials)} evaluations:", *map(self._line, self.trials)])

    def _line(self, trial: Trial) -> str:
        tried = {HYPERPARAMETERS[name].label: getattr(trial.settings, name) for name in self.searched}
        if self.temperature is not None:
            del tried["temperature"]
            tried |= {"temperature": self.temperature} if trial is self.chosen else {}
        numbers = tried | {CRITERIA[self.criterion].objective: trial.objective}
        return "  ".join(
            f"{label}={value:.5g}" if isinstance(value, float) else f"{label}={value}"
            for label, value in numbers.items()
        )

    def warn_of_edges(self) -> None:
        if self.at_edge:
            warn_user(
                f"The search ended at the edge of its interval for {', '.join(self.at_edge)}, which is a bound and not "
                f"an optimum. Set the value yourself, or look at what was tried."
            )


class LeaveOneOut(Record):
    """What leave-one-out found and set; prints itself.

    Attributes:
        accuracy: the estimated accuracy on new inputs, of classes; None of a regression.
        noise_variance: the estimated squared error of each output on new inputs, ``(outputs,)`` float64; None of
            classes.
        temperature: that was set; None of a regression.
        noise_scale: that was set: the factor on the noise variance of the fit; None of classes.
        samples: of the training data.
        rows: how many of the samples were left out one after the other.
        initialisations: how many untrained networks were averaged.
        ridge: of the kernel regression, in units of the kernel's mean diagonal.
        initial: whether the untrained networks were given.
    """

    accuracy: Unit | None = None
    noise_variance: (
        Annotated[Tensor, Listed(Annotated[list[SumOfSquares], Field(min_length=1)], torch.float64)] | None
    ) = None
    temperature: Temperature | None = None
    noise_scale: Annotated[float, Field(gt=0, le=1e300)] | None = None
    samples: Count
    rows: Count
    initialisations: Count
    ridge: Annotated[float, Field(gt=0, le=LARGEST)]
    initial: bool = False

    def __str__(self) -> str:
        if self.temperature is not None:
            kept = "kept at 1" if self.temperature == 1.0 else f"{self.temperature:.4g}"
            found = f"temperature {kept} from an estimated accuracy of {self.accuracy:.4g} and the left-out margins"
        else:
            assert self.noise_variance is not None
            values = ", ".join(f"{value:.4g}" for value in self.noise_variance[:3].tolist())
            more = ", ..." if len(self.noise_variance) > 3 else ""
            found = f"noise variance from an estimated squared error of {values}{more}"
        networks = "the given network" if self.initial else f"{self.initialisations} untrained networks"
        rows = f"{self.rows:,} of {self.samples:,}" if self.rows < self.samples else f"{self.samples:,}"
        assumed = "training from there" if self.initial else "training from scratch"
        return (
            f"leave-one-out: {found}, by the tangent kernel of {networks} on {rows} samples; it assumes "
            f"{assumed} on these data"
        )


class HeadRecord(Record):
    """Through which head the posterior predicts.

    Attributes:
        name: of the head.
        options: of the head.
        criterion: by which its hyperparameters were found.
    """

    name: Annotated[str, among(HEADS)]
    options: dict[Name, Simple]
    criterion: Literal[Criterion, "given"]


def recordable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a head's options that a record holds: numbers and texts."""
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    }


def _is_number(value: float) -> float:
    if isnan(value):
        raise ValueError("must be a number, not NaN")
    return value


class FaithfulRecord(Record):
    """The prior whose predictions are the model's own within a budget.

    Attributes:
        head: through which it was found.
        value: the prior precision, or the scale, or one by layer.
        temperature: of the posterior.
        network_temperature: of the network that it was compared with.
        divergence: of the predictions, in nats; absent if infinite.
        budget: that was allowed.
        settings: that it depends on.
    """

    head: Annotated[str, among(HEADS)]
    value: NumberOrByLayer
    temperature: Temperature
    network_temperature: Temperature
    divergence: Annotated[float, Field(allow_inf_nan=True), AfterValidator(_is_number)] = inf
    budget: Annotated[float, Field(gt=0, le=1e300)]
    settings: SettingsRecord

    @model_validator(mode="after")
    def _check_settings(self) -> FaithfulRecord:
        others = {name for name, about in HYPERPARAMETERS.items() if about.of_weights and not about.by_layer}
        if not self.settings.given <= others:
            raise ValueError(f"has settings that are none of {sorted(others)}")
        return self

    @model_serializer(mode="wrap")
    def _finite(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without an infinite divergence, for which JSON has no number."""
        return {
            name: value for name, value in values_of(self).items() if name != "divergence" or isfinite(value)
        }


class LeftOutRecord(Record):
    """Where held-out labels begin to search: what leave-one-out finds most probable before.

    Attributes:
        temperature: 1 if it did not look for it.
        noise_scale: the same.
    """

    temperature: Temperature
    noise_scale: Annotated[float, Field(gt=0, le=1e300)]


class ScaleCorrection(Record):
    """The correction of the moments head, ``sd -> exp(alpha) sd^beta``, with the settings that it was made for.

    Attributes:
        alpha: log of the factor on standard deviations.
        beta: their power; 1 unless a slope was fitted.
        residual: mean ``|sd / sd_MC - 1|`` with the correction, on inputs that it was not fitted on.
        before: the same without the correction.
        n_mc: draws of the weights; sd_MC alone has a relative error of ``1 / sqrt(2 n_mc)``.
        head: the choices of the head.
        posterior: the settings of the posterior.
    """

    alpha: Annotated[float, Field(ge=-40, le=40)]
    beta: Annotated[float, Field(ge=-10, le=10)]
    residual: SumOfSquares
    before: SumOfSquares
    n_mc: Annotated[int, Field(ge=2)]
    head: dict[Name, Plain]
    posterior: SettingsRecord

    def __str__(self) -> str:
        power = "" if self.beta == 1.0 else f" sd^{self.beta:.2f}"
        return (
            f"calibrated: factor {exp(self.alpha):.3g}{power} on standard deviations, error left "
            f"{self.residual:.0%} (was {self.before:.0%}, Monte Carlo's own {(2 * self.n_mc) ** -0.5:.0%})"
        )

    def apply(self, variance: Tensor) -> Tensor:
        """The corrected variance."""
        scaled = variance if self.beta == 1.0 else variance.clamp(min=0) ** self.beta
        return scaled * exp(2 * self.alpha)


Hash = Annotated[int, Field(ge=-(2**63), le=2**64)]


class ChangesRecord(Record):
    """The data that came in and went out since the fit.

    Attributes:
        updates: how many there were.
        added: samples of them.
        removals: how many there were.
        removed: samples of them.
        digest: of all changes in their order.
        balance: the sum of the hashes of the samples that came in less that of those that went out.
        last: the sum of the hashes of the samples of the last update.
        moved: how many of all changes moved the mean, too.
        outside: of a posterior with fixed bases the share of the Fisher of the last update's data that is outside of
            them.
        outside_before: the same of the Fisher of the data before.
    """

    updates: Natural
    added: Natural
    removals: Natural
    removed: Natural
    digest: Digest
    balance: Hash
    last: Hash
    moved: Natural = 0
    outside: Unit | None = None
    outside_before: Annotated[Unit | None, Field(alias="outside before")] = None


NO_CHANGES = ChangesRecord.model_construct(
    updates=0, added=0, removals=0, removed=0, digest="", balance=0, last=0
)


@dataclass(frozen=True)
class History:
    """How a posterior was fitted, tuned and calibrated; `report` prints it. Nothing writes into one.

    Attributes:
        fit: plain values: method options, seed, timings in seconds.
        deterministic: parameters without a posterior, each with the reason.
        tuning: how each hyperparameter was chosen, in words.
        head: that predicts, and by what the hyperparameters were found.
        faithful: the faithful prior precision, or scale.
        left_out: the values around which held-out labels search theirs.
        leave_one_out: what leave-one-out estimated and set.
        calibration: the moments head's correction.
        promises: the held-out scores by which predictions promise.
        novelty: ``"posterior"`` where the fit found no layer to measure novelty by, so that the posterior itself is
            used; or empty.
        changes: of the data since the fit.
        output: which part of what the model returns its outputs are; None where it returns a tensor.
        inputs: of the fit's first batch, by name.
        trials: all that the last search tried, for people to read; no part of a file.
    """

    fit: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    deterministic: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    tuning: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    head: HeadRecord | None = None
    faithful: FaithfulRecord | None = None
    left_out: LeftOutRecord | None = None
    leave_one_out: LeaveOneOut | None = None
    calibration: ScaleCorrection | None = None
    promises: ConformalScores | None = None
    novelty: str = ""
    changes: ChangesRecord | None = None
    output: OutputChoice | None = None
    inputs: Mapping[str, InputRecord] = field(default_factory=lambda: dict[str, InputRecord]())
    trials: Trials | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("fit", "deterministic", "tuning"):
            object.__setattr__(self, name, ReadOnly(getattr(self, name)))

    def __str__(self) -> str:
        records = ((each.name, getattr(self, each.name)) for each in fields(self))
        return "\n".join(f"{name}: {record}" for name, record in records if record)

    def noted(self, **records: Mapping[str, Any] | Record | None) -> History:
        """With other records, or with more in those of these names; what a record has already is replaced."""
        return replace(self, **{name: self._with(name, more) for name, more in records.items()})

    def _with(self, name: str, more: Mapping[str, Any] | Record | None) -> Any:
        known: Any = getattr(self, name)
        if not isinstance(more, Mapping):
            return more
        return known.changed(**more) if isinstance(known, Record) else {**known, **more}
