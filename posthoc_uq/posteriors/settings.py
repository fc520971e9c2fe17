"""The hyperparameters of a posterior, the prior of single weights, and how a posterior was fitted and tuned."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import log
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.options import LARGEST, Magnitude, Temperature, Unit, check_option, did_you_mean
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.referral import rule_of

# What a posterior remembers besides its blocks: what the fit saw of the data, and the posterior's history.

HEADS = ("sampling", "moments", "linearized")  # by name, as `wrap` has them
NOVELTIES = ("", "posterior")


@dataclass
class Evidence:
    """What the fit saw of the data, for the log marginal likelihood.

    Attributes:
        samples: training samples.
        log_likelihood: weighted sum of ``log p(y | x)`` at the trained weights, at the noise variance of the fit, in
            nats; None without labels.
        squared_residuals: weighted sum of squared residuals over their noise variance (regression), else 0.
        targets: number of target values (regression), else 0.
        noise_power: the Fisher is proportional to this power of the noise precision: 1, but 2 for the empirical Fisher,
            whose residuals are data and do not shrink with the noise variance.
        weight: the sum of the samples' weights; None where each counts once.
    """

    samples: int
    log_likelihood: float | None = None
    squared_residuals: float = 0.0
    targets: int = 0
    noise_power: int = 1
    weight: float | None = None

    @property
    def total(self) -> float:
        """How many samples the data are worth: the sum of their weights, or their number."""
        return float(self.samples) if self.weight is None else self.weight

    def at_noise(self, noise_scale: float | Tensor) -> float | Tensor:
        """The log likelihood with every noise variance multiplied by `noise_scale`."""
        if self.log_likelihood is None:
            raise PosthocUQError(
                "The log marginal likelihood needs the log likelihood of the training data, and the fit saw no labels; "
                "fit with a loader that yields (inputs, targets)."
            )
        if self.targets == 0:
            return self.log_likelihood
        logarithm = noise_scale.log() if isinstance(noise_scale, Tensor) else log(noise_scale)
        return (
            self.log_likelihood
            + 0.5 * self.squared_residuals * (1 - 1 / noise_scale)
            - 0.5 * self.targets * (self.total / self.samples) * logarithm
        )


@dataclass
class History:
    """How a posterior was fitted, tuned, calibrated and given thresholds; `report` prints it.

    Attributes:
        fit: plain values: method options, seed, timings in seconds.
        deterministic: parameters without a posterior, each with the reason.
        tuning: how each hyperparameter was chosen, in words.
        head: ``name`` and ``options`` of the head that predicts, and the ``criterion`` by which the hyperparameters
            were found (`posthoc_uq.posteriors.search.CRITERIA`, or ``"given"``); or empty.
        faithful: the faithful prior precision (or scale) as ``value``, its ``temperature`` and the
            ``network_temperature`` it was compared with, ``divergence``, ``budget``, ``head``, and the other
            ``settings``; or empty.
        calibration: the moments head's correction as plain values, with the settings it was made for; or empty.
        referral: the thresholds above which inputs are handed to a person, with the settings they were set for
            (`posthoc_uq.posteriors.referral`); or empty.
        novelty: ``"posterior"`` where the fit found no layer to measure novelty by, so that the posterior itself is
            used; or empty.
        changes: of the data since the fit: how many ``updates`` and ``removals`` there were, and how many samples were
            ``added`` and ``removed``; a ``digest`` of all of them in their order; the ``balance``, a sum of hashes of
            the samples that came in less that of those that went out; the hash of the ``last`` ones; and for the last
            update of a posterior with fixed bases the share of the new data's Fisher ``outside`` of them, and
            ``outside before``, that of the Fisher of the data before; or empty.
        output: which part of what the model returns its outputs are: ``name``, ``index`` or (the name of) a
            ``function``, and whether it was ``guessed``; empty where it returns a tensor.
    """

    fit: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    deterministic: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    tuning: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    head: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    faithful: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    calibration: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    referral: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    novelty: str = ""
    changes: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    output: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())


# A posterior's hyperparameters: one immutable value, replaced as a whole.

Value = TypeVar("Value")
Self = TypeVar("Self", bound="Adjustable")

_SETTING = threading.Lock()  # one for all posteriors: a lock in a posterior could not be copied or pickled
_SEARCHED = ("tuning", "head", "faithful", "calibration")
"""The records of a history that a search for hyperparameters writes."""
_WAY_OUT = "set it again on held-out data, with uq.Referral(rate).fit(predictor, loader)"


class LayerPriors(dict[str, float]):
    """Prior precisions by layer name, read-only: to change one, set the posterior's `prior_precision` anew."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PosthocUQError(
            "The prior precisions by layer cannot be changed in place; set all of them: posterior.prior_precision = "
            "{**posterior.prior_precision, name: value}."
        )

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return LayerPriors, (dict(self),)


@dataclass(frozen=True)
class About:
    """The facts about a hyperparameter.

    Attributes:
        label: its name in reports and histories.
        kind: type of the number, in Python and in files.
        lacking: why a posterior may be without it, in words.
        by_layer: whether it may have a number for each layer.
        of_weights: whether the covariance of the weights depends on it.
        of_outputs: whether it enters the prediction that is made of the model's outputs.
        reported: whether reports show it: ``"always"``, ``"own"`` where the posterior has it, or ``"never"``.
    """

    label: str
    kind: Any
    lacking: str
    by_layer: bool = False
    of_weights: bool = True
    of_outputs: bool = False
    reported: Literal["always", "own", "never"] = "own"


def _about(*args: Any, **kwargs: Any) -> dict[str, About]:
    return {"about": About(*args, **kwargs)}


@dataclass(frozen=True)
class Hyperparameters:
    """What a posterior and its predictions depend on besides the blocks; see `posterior.Posterior`.

    `ABOUT` has the facts about each, by its name.
    """

    scale: float = field(metadata=_about("scale", Magnitude, "its draws follow no scale"))
    prior_precision: float | LayerPriors = field(
        default=1.0,
        metadata=_about("prior precision", Magnitude, "no prior enters its weights", by_layer=True),
    )
    residual_weight: float = field(
        default=1.0,
        metadata=_about("residual weight", Unit, "only the low rank of method='inf' leaves a residual"),
    )
    noise_scale: float = field(
        default=1.0,
        metadata=_about(
            "noise scale", Magnitude, "its likelihood has no noise", of_outputs=True, reported="never"
        ),  # the noise variance is reported in its place
    )
    temperature: float = field(
        default=1.0,
        metadata=_about(
            "temperature",
            Temperature,
            "it divides logits, and this likelihood's outputs are none",
            of_weights=False,
            of_outputs=True,
            reported="always",
        ),
    )

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        prior = self.prior_precision
        return prior[layer] if isinstance(prior, LayerPriors) else prior

    def of_weights(self) -> Hyperparameters:
        """The settings on which the covariance of the weights depends; all others are 1."""
        return replace(self, **{name: 1.0 for name, about in ABOUT.items() if not about.of_weights})

    def plain(self) -> dict[str, Any]:
        """Plain values by name."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def labelled(self) -> dict[str, Any]:
        """Plain values by label."""
        return {ABOUT[name].label: value for name, value in self.plain().items()}


ABOUT: dict[str, About] = {each.name: each.metadata["about"] for each in fields(Hyperparameters)}
"""The facts about every hyperparameter, by its name."""


class _Hyperparameter(Generic[Value]):
    """One hyperparameter as an attribute of a posterior."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, posterior: Adjustable, owner: type | None = None) -> Value:
        return getattr(posterior.settings, self._name)

    def __set__(self, posterior: Adjustable, value: Any) -> None:
        posterior.adjust(**{self._name: value})


class Adjustable:
    """Hyperparameters as plain attributes of a posterior. Setting one replaces the value that holds all of them, so
    that reading `settings` once gives those of one moment.

    Attributes:
        tunable: names of the hyperparameters that have a meaning here and may be set.
        settled: names of those that were a part of what the method optimised: they are known, and cannot be set.
    """

    method: str
    layers: dict[str, Layer]
    tunable: frozenset[str]
    settled: frozenset[str]
    history: History
    _settings: Hyperparameters
    _searching = (
        False  # whether many settings are being tried, so that thresholds are checked only at the end
    )

    @property
    def settings(self) -> Hyperparameters:
        """All hyperparameters as one value."""
        return self._settings

    @settings.setter
    def settings(self, value: Hyperparameters) -> None:
        self.adjust(**vars(value))

    scale = _Hyperparameter[float]()
    """What the mean Fisher is multiplied with; starts at the number of samples."""
    prior_precision = _Hyperparameter[float | dict[str, float]]()
    """A number, or one number per layer name."""
    residual_weight = _Hyperparameter[float]()
    """Omega in [0, 1], the weight of INF's diagonal residual."""
    noise_scale = _Hyperparameter[float]()
    """Factor on the noise variance, or the dispersion, of the likelihood (regression)."""
    temperature = _Hyperparameter[float]()
    """Divides the logits in prediction (classification)."""

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        return self._settings.layer_prior(layer)

    @contextmanager
    def searching(self, way_out: str | None = None) -> Generator[None]:
        """For trying many settings: one warning at its end if referral thresholds that applied before no longer do. In
        nested contexts the outermost one warns.

        Args:
            way_out: how to set them again, in words; by default from Python.
        """
        if self._searching:
            yield
            return
        referral, basis = self.history.referral, self._basis_of_thresholds(self._settings)
        self._searching = True
        try:
            yield
        finally:
            self._searching = False
        if self.history.referral is referral:  # no new ones were set meanwhile
            self._warn_of_thresholds(basis, way_out)

    def trial(self: Self) -> Self:
        """A copy on which settings can be tried and recorded while others predict from this one and save it; see
        `adopt`. The blocks are shared.
        """
        copied = copy.copy(self)
        copied._searching = True  # no warnings: nobody chose the settings that are tried
        records = {name: dict(getattr(self.history, name)) for name in _SEARCHED}
        copied.history = replace(self.history, **records)
        return copied

    def adopt(self, found: Adjustable) -> None:
        """Take the settings of a `trial`, and the records of how they were found, all at one moment."""
        with self.searching():
            records = {name: getattr(found.history, name) for name in _SEARCHED}
            with (
                _SETTING
            ):  # one update of both, so that a copy made meanwhile has the old ones or the new ones
                self.__dict__.update(_settings=found.settings, history=replace(self.history, **records))

    def _basis_of_thresholds(self, settings: Hyperparameters) -> dict[str, Any]:
        """What the thresholds of a referral depend on: these settings and, with the moments head, its calibration."""
        referral = self.history.referral
        calibrated = bool(referral) and referral["head"].get("head") == "moments"
        return settings.plain() | ({"calibration": dict(self.history.calibration)} if calibrated else {})

    def _warn_of_thresholds(self, old_basis: dict[str, Any], way_out: str | None = None) -> None:
        """Warn if the thresholds of a referral applied before and no longer do.

        Args:
            old_basis: from `_basis_of_thresholds`, before the change.
            way_out: see `searching`.
        """
        referral = self.history.referral
        if (
            self._searching
            or not referral
            or any(old_basis[name] != value for name, value in referral["posterior"].items())
        ):
            return
        if self._basis_of_thresholds(self._settings) != old_basis:
            warn_user(
                f"The referral threshold ({rule_of(referral, 4)}) was set for other hyperparameters and no longer "
                f"applies; {way_out or _WAY_OUT}."
            )

    @property
    def has_free_prior_precision(self) -> bool:
        """Whether a prior precision can be set."""
        return "prior_precision" in self.tunable

    @property
    def width_parameter(self) -> str | None:
        """The hyperparameter by which the posterior is made wider or narrower: ``"prior_precision"``, ``"scale"`` where
        the prior is settled, or None.
        """
        return next((name for name in ("prior_precision", "scale") if name in self.tunable), None)

    def reported(self) -> dict[str, Any]:
        """Label to value of the hyperparameters that reports show; ``"per layer"`` for prior precisions by layer."""
        known, shown = self.tunable | self.settled, dict[str, Any]()
        for name, value in self._settings.plain().items():
            about = ABOUT[name]
            if about.reported == "always" or (about.reported == "own" and name in known):
                shown[about.label] = "per layer" if isinstance(value, dict) else value
        return shown

    def _begin(self, settings: Hyperparameters) -> None:
        """Take the first settings, including those that cannot be set later."""
        self._settings = replace(
            settings, **{n: self._valid(n, value) for n, value in vars(settings).items()}
        )

    def adjust(self, **values: Any) -> None:
        """Set some hyperparameters by name, all at one moment.

        Raises:
            PosthocUQError: a value is out of range, or differs from the present one and cannot be set here.
        """
        checked = {name: self._checked(name, value) for name, value in values.items()}
        with _SETTING:
            old_settings = self._settings
            self._settings = replace(self._settings, **checked)
        if self.history.referral:
            self._warn_of_thresholds(self._basis_of_thresholds(old_settings))

    def _checked(self, name: str, value: Any) -> Any:
        """A value that may be set; where the hyperparameter cannot be set, only its present value."""
        present, valid = getattr(self._settings, name), self._valid(name, value)
        if name in self.tunable:
            return valid
        if name in self.settled and present != valid:
            instead = ", or set scale to widen or narrow the posterior" if "scale" in self.tunable else ""
            raise PosthocUQError(
                f"The {ABOUT[name].label} was a part of what method={self.method!r} optimised, and is {present}; fit "
                f"again with {name}={value}{instead}."
            )
        if present != valid:
            about = ABOUT[name]
            raise PosthocUQError(
                f"This posterior by method={self.method!r} has no {about.label}: {about.lacking}. Leave {name} at "
                f"{present}."
            )
        return present

    def _valid(self, name: str, value: Any) -> Any:
        about = ABOUT[name]
        if about.by_layer and isinstance(value, Mapping):
            return self._by_layer(name, cast(Mapping[str, Any], value))
        return check_option(name, value, about.kind)

    def _by_layer(self, name: str, value: Mapping[str, Any]) -> LayerPriors:
        priors = {
            str(layer): check_option(f"{name} of layer '{layer}'", number, Magnitude)
            for layer, number in value.items()
        }
        if priors.keys() != self.layers.keys():
            stray = [layer for layer in priors if layer not in self.layers]
            missing = sorted(self.layers.keys() ^ priors.keys())
            raise PosthocUQError(
                f"{name} per layer must name every layer once; these do not match: {missing[:5]}."
                f"{did_you_mean(stray, self.layers)}"
            )
        return LayerPriors(priors)


# The prior of single weights: ``N(mu_i, 1 / (tau r_i))``, with the posterior's prior precision tau.
#
# ``r`` is 1 and ``mu`` is 0 unless a fit was given others. The covariance of a Laplace posterior depends on
# ``tau r`` alone, and its log marginal likelihood on ``mu``, too (MacKay 1992).


@dataclass(frozen=True, eq=False)
class WeightPrior:
    """What a posterior's prior says of single weights.

    Attributes:
        precision: ``r`` of every parameter of the layers by name, positive; empty where all are 1.
        mean: ``mu``: one number, or a tensor of every parameter of the layers by name.
    """

    precision: Mapping[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())
    mean: float | Mapping[str, Tensor] = 0.0

    def occam(
        self, layer: Layer, weights: Mapping[str, Tensor], chosen: Tensor | None
    ) -> tuple[int, float, float]:
        """How many weights a layer has, ``sum log r_i``, and ``sum r_i (theta_i - mu_i)^2``.

        Args:
            layer: whose weights.
            weights: parameters by name.
            chosen: which are uncertain, ``(groups, outputs, inputs)``; None for all.
        """
        parts = {name: self._of(name, weights[name]) for name in layer.parameter_names}
        pairs = list(parts.values())
        if chosen is not None:
            moved = layer_matrix(layer, {name: part[0] for name, part in parts.items()})
            precision = layer_matrix(layer, {name: part[1] for name, part in parts.items()})
            mask = chosen.to(moved.device)
            pairs = [(moved[mask], precision[mask])]
        count, logs, squares = 0, 0.0, 0.0
        for moved, precision in pairs:
            count += moved.numel()
            squares += float((precision * moved.square()).sum())
            logs += float(precision.log().sum()) if self.precision else 0.0
        return count, logs, squares

    def _of(self, name: str, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``theta - mu`` and ``r`` of one parameter, in float64."""
        own = as_double(weights.detach())
        mean = self.mean[name].to(own) if isinstance(self.mean, Mapping) else self.mean
        precision = self.precision[name].to(own) if self.precision else own.new_ones(()).expand_as(own)
        return own - mean, precision


def layer_matrix(layer: Layer, parameters: Mapping[str, Tensor]) -> Tensor:
    """A layer's parameters by name as its matrix ``(groups, outputs, inputs)``, detached."""
    bias = None if layer.bias is None else parameters[layer.bias].detach()
    return layer.to_matrix(parameters[layer.weight].detach(), bias)


def checked_prior(
    layers: Mapping[str, Layer], parameters: Mapping[str, Tensor], precision: Any, mean: Any
) -> WeightPrior:
    """The prior that a user asked for.

    Args:
        layers: of the posterior.
        parameters: of the model, by name.
        precision: a tensor or a number by the name of every parameter of the layers; None for 1.
        mean: a number, or tensors or numbers by name, 0 for parameters without one; None for 0.

    Raises:
        PosthocUQError: a name, a shape or a number is not valid.
    """
    shapes = {name: parameters[name] for layer in layers.values() for name in layer.parameter_names}
    precisions: dict[str, Tensor] = {}
    if precision is not None:
        given = cast(Mapping[str, Any], precision)
        if given and set(given) <= set(layers) - set(shapes):
            raise PosthocUQError(
                "prior_precision of a fit is one number for all layers, or tensors by the names of parameters. For one "
                "number a layer, fit with prior_precision=1.0 and then set posterior.prior_precision = {layer: number, "
                "...}, which takes no new fit."
            )
        missing = [name for name in shapes if name not in given]
        if missing:
            raise PosthocUQError(
                f"A prior precision of single weights must be given for every parameter of the layers; there is none "
                f"for {missing[:5]}."
            )
        precisions = _tensors("prior_precision", given, shapes)
        for name, tensor in precisions.items():
            if not bool((tensor > 1 / LARGEST).all()):
                raise PosthocUQError(f"prior_precision of '{name}' must be positive everywhere.")
    means: float | dict[str, Tensor] = 0.0
    if isinstance(mean, Mapping):
        named = _tensors("prior_mean", cast(Mapping[str, Any], mean), shapes)
        means = {
            name: named[name] if name in named else torch.zeros_like(own, dtype=_wide(own))
            for name, own in shapes.items()
        }
    elif mean is not None:
        means = check_option("prior_mean", mean, Annotated[float, Ge(-LARGEST), Le(LARGEST)])
    return WeightPrior(precisions, means)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _tensors(what: str, given: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors or numbers by name as tensors of the parameters' shapes, on their devices."""
    _check_names(what, given, like)
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        own = like[name]
        try:
            tensor = torch.as_tensor(value, dtype=_wide(own), device=own.device).detach()
        except (TypeError, ValueError, RuntimeError):
            raise PosthocUQError(
                f"{what} of '{name}' must be a tensor or a number, not a {type(value).__name__}."
            ) from None
        if tensor.ndim and tensor.shape != own.shape:
            raise PosthocUQError(
                f"{what} of '{name}' must have the shape {tuple(own.shape)}, not {tuple(tensor.shape)}."
            )
        if not bool((tensor.abs() <= LARGEST).all()):
            raise PosthocUQError(f"{what} of '{name}' must be finite and at most {LARGEST:g} in size.")
        tensors[name] = tensor.expand(own.shape).clone()
    return tensors


def _check_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    odd = [name for name in given if name not in known]
    if odd:
        raise PosthocUQError(
            f"{what} names {odd[:5]}, no parameters of the posterior's layers; those are {list(known)[:6]}."
            f"{did_you_mean(odd, known)}"
        )
