"""The hyperparameters of a posterior, the prior of single weights, and what the fit saw of the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import log
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from annotated_types import Ge, Le
from pydantic import Discriminator, Field, Tag
from torch import Tensor

from posthoc_uq.core.devices import as_double, host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Magnitude, Temperature, Unit
from posthoc_uq.core.records import Name, Record
from posthoc_uq.core.registry import Later, Registry
from posthoc_uq.layers.layer import Layer

Entry = TypeVar("Entry")

HEADS: Registry[Any] = Registry(
    {
        "sampling": Later("posthoc_uq.heads.sampling", "SamplingPredictor"),
        "moments": Later("posthoc_uq.heads.moments", "MomentsPredictor"),
        "linearized": Later("posthoc_uq.heads.linearized", "LinearizedPredictor"),
    },
    hidden={"outputs": Later("posthoc_uq.heads.outputs", "OutputsPredictor")},
)
"""The classes of heads by name: a file that names one is read before any head is imported."""
NOVELTIES = ("", "posterior")
ONE_PRIOR = "one prior for all weights"
"""True in the record of a training whose prior is one and the same for every weight."""


@dataclass(frozen=True)
class Evidence:
    """What the fit saw of the data, for the log marginal likelihood.

    Attributes:
        samples: training samples.
        log_likelihood: weighted sum of ``log p(y | x)`` at the trained weights, at the noise variance of the fit, in
            nats; None without labels.
        squared_residuals: weighted sum of squared residuals over their noise variance (regression), else 0.
        targets: number of target values (regression), else 0; with those that are missing.
        noise_power: the Fisher is proportional to this power of the noise precision: 1, but 2 for the empirical Fisher,
            whose residuals are data and do not shrink with the noise variance.
        weight: the sum of the samples' weights; None where each counts once.
        present: the weighted number of target values that are there; None where none is missing.
    """

    samples: int
    log_likelihood: float | None = None
    squared_residuals: float = 0.0
    targets: int = 0
    noise_power: int = 1
    weight: float | None = None
    present: float | None = None

    @property
    def total_targets(self) -> float:
        """The weighted number of target values that are there."""
        return self.targets * (self.total / self.samples) if self.present is None else self.present

    @property
    def total(self) -> float:
        """How many samples the data are worth: the sum of their weights, or their number."""
        return float(self.samples) if self.weight is None else self.weight

    def at_noise(self, noise_scale: float | Tensor) -> float | Tensor:
        """The log likelihood with every noise variance multiplied by `noise_scale`."""
        if self.log_likelihood is None:
            raise PosthocUQError(
                "The log marginal likelihood needs the log likelihood of the training data, and the fit saw no labels, "
                "or an update moved the mean; fit with a loader of (inputs, targets)."
            )
        if self.targets == 0:
            return self.log_likelihood
        logarithm = noise_scale.log() if isinstance(noise_scale, Tensor) else log(noise_scale)
        return (
            self.log_likelihood
            + 0.5 * self.squared_residuals * (1 - 1 / noise_scale)
            - 0.5 * self.total_targets * logarithm
        )


class ReadOnly(dict[str, Entry]):
    """A dict of a posterior, which nothing writes into."""

    _refusal: ClassVar[str] = "A posterior's history cannot be changed: it says what was done."

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PosthocUQError(self._refusal)

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


class LayerPriors(ReadOnly[float]):
    """Prior precisions by layer name, read-only: to change one, take `Posterior.with_settings`."""

    _refusal = (
        "The prior precisions by layer cannot be changed in place; give all of them: "
        "posterior.with_settings(prior_precision={**posterior.prior_precision, name: value})."
    )


@dataclass(frozen=True)
class HyperparameterInfo:
    """The facts about a hyperparameter.

    Attributes:
        label: its name in reports and histories.
        kind: type of the number, in Python and in files.
        lacking: why a posterior may be without it, in words.
        by_layer: whether it may have a number for each layer.
        by_class: whether it is a number for each class, or label; none where all have the usual one.
        of_weights: whether the covariance of the weights depends on it.
        of_outputs: whether it enters the prediction that is made of the model's outputs.
        reported: whether reports show it where the posterior has it.
    """

    label: str
    kind: Any
    lacking: str
    by_layer: bool = False
    by_class: bool = False
    of_weights: bool = True
    of_outputs: bool = False
    reported: bool = True


@dataclass(frozen=True)
class Hyperparameters:
    """What a posterior and its predictions depend on besides the blocks; see `posterior.Posterior`.

    `HYPERPARAMETERS` has the facts about each, by its name.
    """

    scale: float
    prior_precision: float | LayerPriors = 1.0
    residual_weight: float = 1.0
    noise_scale: float = 1.0
    temperature: float = 1.0
    class_shift: tuple[float, ...] = ()
    class_scale: tuple[float, ...] = ()

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        prior = self.prior_precision
        return prior[layer] if isinstance(prior, LayerPriors) else prior

    def of_weights(self) -> Hyperparameters:
        """The settings on which the covariance of the weights depends; all others are the usual ones."""
        usual = {each.name: each.default for each in fields(self)}
        return replace(
            self, **{name: usual[name] for name, about in HYPERPARAMETERS.items() if not about.of_weights}
        )

    def plain(self) -> dict[str, Any]:
        """Plain values by name, without numbers by class where there are none."""
        return {
            name: dict(value)
            if isinstance(value, dict)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in vars(self).items()
            if value != ()
        }


NumberOrByLayer = Annotated[
    Annotated[Magnitude, Tag("<number>")] | Annotated[dict[Name, Magnitude], Tag("<by layer>")],
    Discriminator(lambda value: "<by layer>" if isinstance(value, dict) else "<number>"),
]


Shift = Annotated[float, Ge(-1e6), Le(1e6)]
ByClass = Annotated[list[Shift], Field(max_length=2**20)]
ScaleByClass = Annotated[list[Magnitude], Field(max_length=2**20)]


class SettingsRecord(Record):
    """Hyperparameters; a posterior has all of them, what was found at some settings those that it depends on.

    Attributes:
        scale: of the Fisher; the number of samples after a fit.
        prior_precision: a number, or one by layer.
        residual_weight: of the diagonal of INF.
        noise_scale: the factor on the noise variance of the likelihood.
        temperature: that divides logits.
        class_shift: added to logits, a number a class.
        class_scale: that multiplies logits, a number a class.
    """

    scale: Magnitude = 1.0
    prior_precision: NumberOrByLayer = 1.0
    residual_weight: Unit = 1.0
    noise_scale: Magnitude = 1.0
    temperature: Temperature = 1.0
    class_shift: ByClass = Field(default_factory=list)
    class_scale: ScaleByClass = Field(default_factory=list)

    @classmethod
    def of(cls, settings: Hyperparameters, names: Collection[str]) -> SettingsRecord:
        """These of the hyperparameters."""
        values = settings.plain()
        return cls(**{name: values[name] for name in names})

    @property
    def given(self) -> set[str]:
        """The names of those that it has."""
        return self.model_fields_set

    def hyperparameters(self) -> Hyperparameters:
        """The value of a posterior."""
        values = self.model_dump()
        if isinstance(self.prior_precision, dict):
            values["prior_precision"] = LayerPriors(self.prior_precision)
        values |= {name: tuple(values[name]) for name in BY_CLASS}
        return Hyperparameters(**values)


HYPERPARAMETERS = {
    "scale": HyperparameterInfo("scale", Magnitude, "its draws follow no scale"),
    "prior_precision": HyperparameterInfo(
        "prior precision", Magnitude, "no prior enters its weights", by_layer=True
    ),
    "residual_weight": HyperparameterInfo(
        "residual weight", Unit, "only the low rank of method='inf' leaves a residual"
    ),
    # reported by the noise variance
    "noise_scale": HyperparameterInfo(
        "noise scale", Magnitude, "its likelihood has no noise", of_outputs=True, reported=False
    ),
    "temperature": HyperparameterInfo(
        "temperature",
        Temperature,
        "it divides logits, and this likelihood's outputs are none",
        of_weights=False,
        of_outputs=True,
    ),
    "class_shift": HyperparameterInfo(
        "class shift",
        ByClass,
        "it is added to the logits of classes or labels, and this likelihood's outputs are none",
        by_class=True,
        of_weights=False,
        of_outputs=True,
    ),
    "class_scale": HyperparameterInfo(
        "class scale",
        ScaleByClass,
        "it multiplies the logits of classes or labels, and this likelihood's outputs are none",
        by_class=True,
        of_weights=False,
        of_outputs=True,
    ),
}
"""The facts about every hyperparameter, by its name."""
BY_CLASS = tuple(name for name, about in HYPERPARAMETERS.items() if about.by_class)
"""The names of those with a number for each class."""


def same_settings(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether plain values that were kept are those of others. Numbers by class are left out where there are none, also
    in what was written before there were any.
    """
    kept = {name: value for name, value in some.items() if name not in BY_CLASS}
    return all(others.get(name) == value for name, value in kept.items()) and all(
        list(some.get(name, ())) == list(others.get(name, ())) for name in BY_CLASS
    )


def get_width(settings: Hyperparameters, name: str) -> float:
    """The value of a width parameter; of prior precisions by layer their geometric mean."""
    value: Any = getattr(settings, name)
    values = host_double(list(value.values()) if isinstance(value, dict) else [value])
    return float(values.log().mean().exp())


@dataclass(frozen=True, eq=False)
class WeightPrior:
    """The prior of single weights, ``N(mu_i, 1 / (tau r_i))`` with the posterior's prior precision tau.

    ``r`` is 1 and ``mu`` is 0 unless a fit was given others. The covariance of a Laplace posterior depends on ``tau r``
    alone, and its log marginal likelihood on ``mu``, too (MacKay 1992).

    Attributes:
        precision: ``r`` of every parameter of the layers by name, positive; empty where all are 1.
        mean: ``mu``: one number, or a tensor of every parameter of the layers by name.
    """

    precision: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    mean: float | Mapping[str, Tensor] = 0.0

    def sums(
        self, layer: Layer, weights: Mapping[str, Tensor], chosen: Tensor | None
    ) -> tuple[int, float, float]:
        """How many weights a layer has, ``sum log r_i``, and ``sum r_i (theta_i - mu_i)^2``.

        Args:
            layer: whose weights.
            weights: theta, parameters by name.
            chosen: which are uncertain, ``(groups, outputs, inputs)``; None for all.
        """
        moved: dict[str, Tensor] = {}
        for name in layer.parameter_names:
            wide = as_double(weights[name].detach())
            mean = self.mean[name].to(wide) if isinstance(self.mean, Mapping) else self.mean
            moved[name] = wide - mean
        matrix = layer_matrix(layer, moved)
        matrix = matrix if chosen is None else matrix[chosen.to(matrix.device)]
        if not self.precision:
            return matrix.numel(), 0.0, float(matrix.square().sum())
        ratios = layer_matrix(layer, self.precision).to(matrix)
        ratios = ratios if chosen is None else ratios[chosen.to(ratios.device)]
        return matrix.numel(), float(ratios.log().sum()), float((ratios * matrix.square()).sum())


def layer_matrix(layer: Layer, parameters: Mapping[str, Tensor]) -> Tensor:
    """A layer's parameters by name as its matrix ``(groups, outputs, inputs)``, detached."""
    bias = None if layer.bias is None else parameters[layer.bias].detach()
    return layer.to_matrix(parameters[layer.weight].detach(), bias)
