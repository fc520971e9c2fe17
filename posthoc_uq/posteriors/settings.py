"""The numbers that turn what a fit found into a posterior: one value that never changes, replaced as a whole."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.record import Record
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.values import POSITIVE, UNIT

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
class Hyperparameters:
    """What a posterior and its predictions depend on beside the blocks; see `posthoc_uq.posteriors.base.Posterior`."""

    scale: float
    prior_precision: float | LayerPriors = 1.0
    residual_weight: float = 1.0
    noise_scale: float = 1.0
    temperature: float = 1.0

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        prior = self.prior_precision
        return prior[layer] if isinstance(prior, LayerPriors) else prior

    def of_weights(self) -> Hyperparameters:
        """What the covariance of the weights depends on: all but the temperature, which divides the outputs."""
        return replace(self, temperature=1.0)

    def plain(self) -> dict[str, Any]:
        """Plain values by name."""
        prior = self.prior_precision
        return dict(vars(self)) | {"prior_precision": dict(prior) if isinstance(prior, dict) else prior}


class Adjustable:
    """Hyperparameters as plain attributes of a posterior. Setting one replaces the value that holds all of them, so
    that whoever reads `settings` once has those of one moment.
    """

    method: str
    layers: dict[str, Layer]
    takes_prior: bool
    record: Record
    _settings: Hyperparameters
    _searching = False  # whether many settings are being tried, so that only the last of them counts
    _prior_settled = False  # whether the prior is that of a training, which cannot be set again

    @property
    def settings(self) -> Hyperparameters:
        """All hyperparameters as one value."""
        return self._settings

    @settings.setter
    def settings(self, value: Hyperparameters) -> None:
        self._set(**vars(value))

    @property
    def scale(self) -> float:
        """What the mean Fisher is multiplied with; starts at the number of samples."""
        return self._settings.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._set(scale=value)

    @property
    def prior_precision(self) -> float | dict[str, float]:
        """A number, or one number per layer name."""
        return self._settings.prior_precision

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._set(prior_precision=value)

    @property
    def residual_weight(self) -> float:
        """Omega in [0, 1], the weight of INF's diagonal residual."""
        return self._settings.residual_weight

    @residual_weight.setter
    def residual_weight(self, value: float) -> None:
        self._set(residual_weight=value)

    @property
    def noise_scale(self) -> float:
        """Factor on the noise variance of the likelihood (regression)."""
        return self._settings.noise_scale

    @noise_scale.setter
    def noise_scale(self, value: float) -> None:
        self._set(noise_scale=value)

    @property
    def temperature(self) -> float:
        """Divides the logits in prediction (classification)."""
        return self._settings.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._set(temperature=value)

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
        kept, before = self.record.referral, self._thresholds_rest_on(self._settings)
        self._searching = True
        try:
            yield
        finally:
            self._searching = False
        if self.record.referral is kept:  # none were set within
            self._warn_of_thresholds(before, stacklevel=5, way_out=way_out)

    def _thresholds_rest_on(self, settings: Hyperparameters) -> dict[str, Any]:
        """What the thresholds of a referral belong to: these settings, and of the moments head its calibration."""
        kept = self.record.referral
        calibrated = bool(kept) and kept["head"].get("head") == "moments"
        return settings.plain() | ({"calibration": dict(self.record.calibration)} if calibrated else {})

    def _warn_of_thresholds(
        self, before: dict[str, Any], stacklevel: int, way_out: str | None = None
    ) -> None:
        """Say that the thresholds of a referral, which applied before, do so no more.

        Args:
            before: what they would have rested on then.
            stacklevel: of the warning.
            way_out: see `searching`.
        """
        kept = self.record.referral
        if self._searching or not kept or any(before[name] != own for name, own in kept["posterior"].items()):
            return
        if self._thresholds_rest_on(self._settings) != before:
            warnings.warn(
                f"The referral threshold ({rule_of(kept, 4)}) was set for other hyperparameters and no longer applies; "
                f"{way_out or _WAY_OUT}.",
                UserWarning,
                stacklevel=stacklevel,
            )

    def _set(self, **values: Any) -> None:
        checked = {name: self._checked(name, value) for name, value in values.items()}
        with _SETTING:
            before = self._settings
            self._settings = replace(self._settings, **checked)
            self._prior_settled = self._prior_settled or (
                "prior_precision" in values and not self.takes_prior
            )
        if self.record.referral:
            self._warn_of_thresholds(self._thresholds_rest_on(before), stacklevel=4)

    def _checked(self, name: str, value: Any) -> Any:
        if name == "prior_precision":
            return self._checked_prior(value)
        return (UNIT if name == "residual_weight" else POSITIVE)(name, value)

    def _checked_prior(self, value: Any) -> float | LayerPriors:
        kept = self._settings.prior_precision
        if self._prior_settled and kept != value:
            raise PosthocUQError(
                f"The prior precision was a part of what method={self.method!r} optimised, and is {kept}; fit again "
                f"with prior_precision={value}, or set scale to widen or narrow the posterior."
            )
        if not isinstance(value, Mapping):
            return cast(float, POSITIVE("prior_precision", value))
        given = {
            str(name): POSITIVE(f"prior_precision of layer '{name}'", number)
            for name, number in cast(Mapping[str, Any], value).items()
        }
        if given.keys() != self.layers.keys():
            missing = sorted(self.layers.keys() ^ given.keys())
            raise PosthocUQError(
                f"prior_precision per layer must name every layer once; these do not match: {missing[:5]}."
            )
        return LayerPriors(given)
