"""The numbers that turn what a fit found into a posterior: one value that never changes, replaced as a whole."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.values import POSITIVE, UNIT

_SETTING = threading.Lock()  # a lock of the posterior's own could not be copied or pickled


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
    _settings: Hyperparameters
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

    def _set(self, **values: Any) -> None:
        checked = {name: self._checked(name, value) for name, value in values.items()}
        with _SETTING:
            self._settings = replace(self._settings, **checked)
            self._prior_settled = self._prior_settled or (
                "prior_precision" in values and not self.takes_prior
            )

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
