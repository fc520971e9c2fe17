"""A posterior's hyperparameters: one immutable value, replaced as a whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Number
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.posteriors.specs import LARGEST
from posthoc_uq.values import POSITIVE, UNIT
from posthoc_uq.warned import warn_user

Value = TypeVar("Value")
Self = TypeVar("Self", bound="Adjustable")

_SETTING = threading.Lock()  # one for all posteriors: a lock in a posterior could not be copied or pickled
_CHANGES = WeakKeyDictionary["Adjustable", str]()
"""The posteriors that a call is changing now, and the name of that call."""
_OF_THE_OBJECT = ("model", "warned_heads", "_searching")  # of a posterior, whatever its data
_SEARCHED = ("tuning", "head", "faithful", "calibration")
"""The records of a history that a search for hyperparameters writes."""
_WAY_OUT = "set it again on held-out data, with uq.evaluate(...).set_referral(rate) or uq.set_referral"


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
        bounds: of its value in a file; a larger value may be set, but not saved.
        lacking: why a posterior may be without it, in words.
        by_layer: whether it may have a number for each layer.
        of_weights: whether the covariance of the weights depends on it.
        of_outputs: whether it enters the prediction that is made of the model's outputs.
        reported: whether reports show it: ``"always"``, ``"own"`` where the posterior has it, or ``"never"``.
    """

    label: str
    bounds: Number
    lacking: str
    by_layer: bool = False
    of_weights: bool = True
    of_outputs: bool = False
    reported: Literal["always", "own", "never"] = "own"


_POSITIVE = Number(1 / LARGEST, LARGEST)


def _about(*args: Any, **kwargs: Any) -> dict[str, About]:
    return {"about": About(*args, **kwargs)}


@dataclass(frozen=True)
class Hyperparameters:
    """What a posterior and its predictions depend on besides the blocks; see `posthoc_uq.posteriors.base.Posterior`.

    `ABOUT` has the facts about each, by its name.
    """

    scale: float = field(metadata=_about("scale", _POSITIVE, "its draws follow no scale"))
    prior_precision: float | LayerPriors = field(
        default=1.0,
        metadata=_about("prior precision", _POSITIVE, "no prior enters its weights", by_layer=True),
    )
    residual_weight: float = field(
        default=1.0,
        metadata=_about(
            "residual weight", Number(0.0, 1.0), "only the low rank of method='inf' leaves a residual"
        ),
    )
    noise_scale: float = field(
        default=1.0,
        metadata=_about(
            "noise scale", _POSITIVE, "its likelihood has no noise", of_outputs=True, reported="never"
        ),  # the noise variance is reported in its place
    )
    temperature: float = field(
        default=1.0,
        metadata=_about(
            "temperature",
            Number(1e-12, 1e12),
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

    @property
    def moment(self) -> tuple[Hyperparameters, int]:
        """What the covariance of the weights depends on: hyperparameters, and how often the data changed; it tells
        whether something that was computed from the posterior still holds.
        """
        return self._settings.of_weights(), self.history.revision

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

    @contextmanager
    def changing(self, call: str) -> Generator[None]:
        """For a call that reads this posterior, computes for a while and then changes it: no other such call meanwhile.

        Args:
            call: its name, for the message of the other.

        Raises:
            PosthocUQError: another thread is in such a call on this posterior.
        """
        with _SETTING:
            if self in _CHANGES:
                raise PosthocUQError(
                    f"{call} needs this posterior for itself, and {_CHANGES[self]} in another thread is changing it; "
                    f"wait until that returns, or work on a copy.deepcopy(posterior)."
                )
            _CHANGES[self] = call
        try:
            yield
        finally:
            with _SETTING:
                del _CHANGES[self]

    def replace_contents(self, new: Adjustable) -> None:
        """Take the data and the history of another posterior of the same layers, at one moment: whoever reads this
        posterior by a copy, as all of its methods do, has the old ones or the new ones. Of the settings the scale alone
        is the other's.
        """
        with _SETTING:
            contents = {name: value for name, value in vars(new).items() if name not in _OF_THE_OBJECT}
            contents["_settings"] = replace(self._settings, scale=new.scale)
            self.__dict__ = vars(self) | contents

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
    def takes_prior(self) -> bool:
        """Whether a prior precision can be set."""
        return "prior_precision" in self.tunable

    @property
    def widening(self) -> str | None:
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
        return (POSITIVE if about.bounds.low > 0 else UNIT)(name, value)

    def _by_layer(self, name: str, value: Mapping[str, Any]) -> LayerPriors:
        priors = {
            str(layer): POSITIVE(f"{name} of layer '{layer}'", number) for layer, number in value.items()
        }
        if priors.keys() != self.layers.keys():
            missing = sorted(self.layers.keys() ^ priors.keys())
            raise PosthocUQError(
                f"{name} per layer must name every layer once; these do not match: {missing[:5]}."
            )
        return LayerPriors(priors)
