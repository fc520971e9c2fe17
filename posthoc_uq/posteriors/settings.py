"""The numbers that turn what a fit found into a posterior: one value that never changes, replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Number
from posthoc_uq.posteriors.specs import LARGEST


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
