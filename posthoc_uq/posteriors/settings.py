"""The numbers that turn what a fit found into a posterior: one value that never changes, replaced as a whole."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Number
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.posteriors.specs import LARGEST
from posthoc_uq.values import POSITIVE, UNIT
from posthoc_uq.warned import warn_user

Value = TypeVar("Value")

_SETTING = threading.Lock()  # a lock of the posterior's own could not be copied or pickled
_WAY_OUT = "set it again on held-out data, with uq.evaluate(...).set_referral(rate) or uq.set_referral"


class LayerPriors(dict[str, float]):
    """Prior precisions by layer name, read alone: to change one, set the posterior's `prior_precision` anew."""

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
    """What is to be known of a hyperparameter.

    Attributes:
        label: its name in reports and records.
        bounds: of its value in a file; a larger one may be set, but not kept.
        lacking: why a posterior may be without it, in words.
        by_layer: whether it may have a number for each layer.
        of_weights: whether the covariance of the weights depends on it.
        of_outputs: whether it enters what a prediction makes of the outputs.
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
    """What a posterior and its predictions depend on beside the blocks; see `posthoc_uq.posteriors.base.Posterior`.

    What is to be known of each is in `ABOUT`, by its name.
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
            "it divides logits, and a regression has none",
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
        """What the covariance of the weights depends on: all else is 1."""
        return replace(self, **{name: 1.0 for name, about in ABOUT.items() if not about.of_weights})

    def plain(self) -> dict[str, Any]:
        """Plain values by name."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def labelled(self) -> dict[str, Any]:
        """Plain values by label."""
        return {ABOUT[name].label: value for name, value in self.plain().items()}


ABOUT: dict[str, About] = {own.name: own.metadata["about"] for own in fields(Hyperparameters)}
"""What is to be known of every hyperparameter, by its name."""


class _Own(Generic[Value]):
    """One hyperparameter as an attribute of a posterior."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, posterior: Adjustable, owner: type | None = None) -> Value:
        return getattr(posterior.settings, self._name)

    def __set__(self, posterior: Adjustable, value: Any) -> None:
        posterior.adjust(**{self._name: value})


class Adjustable:
    """Hyperparameters as plain attributes of a posterior. Setting one replaces the value that holds all of them, so
    that whoever reads `settings` once has those of one moment.

    Attributes:
        tunable: names of the hyperparameters that mean something here and may be set.
        settled: names of those that were a part of what the method optimised: known, and never set again.
    """

    method: str
    layers: dict[str, Layer]
    tunable: frozenset[str]
    settled: frozenset[str]
    history: History
    _settings: Hyperparameters
    _searching = False  # whether many settings are being tried, so that only the last of them counts

    @property
    def settings(self) -> Hyperparameters:
        """All hyperparameters as one value."""
        return self._settings

    @settings.setter
    def settings(self, value: Hyperparameters) -> None:
        self.adjust(**vars(value))

    scale = _Own[float]()
    """What the mean Fisher is multiplied with; starts at the number of samples."""
    prior_precision = _Own[float | dict[str, float]]()
    """A number, or one number per layer name."""
    residual_weight = _Own[float]()
    """Omega in [0, 1], the weight of INF's diagonal residual."""
    noise_scale = _Own[float]()
    """Factor on the noise variance of the likelihood (regression)."""
    temperature = _Own[float]()
    """Divides the logits in prediction (classification)."""

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        return self._settings.layer_prior(layer)

    @contextmanager
    def searching(self, way_out: str | None = None) -> Generator[None]:
        """Within it many settings may be tried. At its end one warning says where referral thresholds that applied
        before do so no more; within another such context, that one says it.

        Args:
            way_out: how to set them again, in words; by default from Python.
        """
        if self._searching:
            yield
            return
        kept, before = self.history.referral, self._thresholds_rest_on(self._settings)
        self._searching = True
        try:
            yield
        finally:
            self._searching = False
        if self.history.referral is kept:  # none were set within
            self._warn_of_thresholds(before, way_out)

    def _thresholds_rest_on(self, settings: Hyperparameters) -> dict[str, Any]:
        """What the thresholds of a referral belong to: these settings, and of the moments head its calibration."""
        kept = self.history.referral
        calibrated = bool(kept) and kept["head"].get("head") == "moments"
        return settings.plain() | ({"calibration": dict(self.history.calibration)} if calibrated else {})

    def _warn_of_thresholds(self, before: dict[str, Any], way_out: str | None = None) -> None:
        """Say that the thresholds of a referral, which applied before, do so no more.

        Args:
            before: what they would have rested on then.
            way_out: see `searching`.
        """
        kept = self.history.referral
        if self._searching or not kept or any(before[name] != own for name, own in kept["posterior"].items()):
            return
        if self._thresholds_rest_on(self._settings) != before:
            warn_user(
                f"The referral threshold ({rule_of(kept, 4)}) was set for other hyperparameters and no longer applies; "
                f"{way_out or _WAY_OUT}."
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
        """Label to value of the hyperparameters that reports show; of prior precisions by layer, that they are."""
        own, shown = self.tunable | self.settled, dict[str, Any]()
        for name, value in self._settings.plain().items():
            about = ABOUT[name]
            if about.reported == "always" or (about.reported == "own" and name in own):
                shown[about.label] = "per layer" if isinstance(value, dict) else value
        return shown

    def _begin(self, settings: Hyperparameters) -> None:
        """Take the first settings, whatever may be set later."""
        self._settings = replace(
            settings, **{n: self._valid(n, value) for n, value in vars(settings).items()}
        )

    def adjust(self, **values: Any) -> None:
        """Set some hyperparameters by name, all at one moment.

        Raises:
            PosthocUQError: a value is out of range, or other than the present one where the posterior lacks it.
        """
        checked = {name: self._checked(name, value) for name, value in values.items()}
        with _SETTING:
            before = self._settings
            self._settings = replace(self._settings, **checked)
        if self.history.referral:
            self._warn_of_thresholds(self._thresholds_rest_on(before))

    def _checked(self, name: str, value: Any) -> Any:
        """A value that may be set: of what the posterior lacks, the present one alone."""
        kept, valid = getattr(self._settings, name), self._valid(name, value)
        if name in self.tunable:
            return valid
        if name in self.settled and kept != valid:
            raise PosthocUQError(
                f"The {ABOUT[name].label} was a part of what method={self.method!r} optimised, and is {kept}; fit "
                f"again with {name}={value}, or set scale to widen or narrow the posterior."
            )
        if kept != valid:
            about = ABOUT[name]
            raise PosthocUQError(
                f"This posterior by method={self.method!r} has no {about.label}: {about.lacking}. Leave {name} at "
                f"{kept}."
            )
        return kept

    def _valid(self, name: str, value: Any) -> Any:
        about = ABOUT[name]
        if about.by_layer and isinstance(value, Mapping):
            return self._by_layer(name, cast(Mapping[str, Any], value))
        return (POSITIVE if about.bounds.low > 0 else UNIT)(name, value)

    def _by_layer(self, name: str, value: Mapping[str, Any]) -> LayerPriors:
        given = {
            str(layer): POSITIVE(f"{name} of layer '{layer}'", number) for layer, number in value.items()
        }
        if given.keys() != self.layers.keys():
            missing = sorted(self.layers.keys() ^ given.keys())
            raise PosthocUQError(
                f"{name} per layer must name every layer once; these do not match: {missing[:5]}."
            )
        return LayerPriors(given)
