"""The options of a latent binary training, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.posteriors.flows import Form
from posthoc_uq.posteriors.random_scale import MOST_STEPS, MOST_UNITS
from posthoc_uq.values import COUNT, NOT_NEGATIVE, POSITIVE, UNIT, Number, flag, one_of, put_numbers

Start = Literal["trained", "random"]

PRESETS = {
    "polarised": (-10.0, 10.0),
    "mild": (-3.0, 3.0),
    "sparse": (-2.5, -1.5),
    "dense": (1.5, 2.5),
    "balanced": (-1.0, 1.0),
}
"""Bounds between which the logits of the inclusion probabilities are drawn."""

HIGH, BY_SIZE = "high", "snr"

_INSIDE = Number("above 0 and below 1", above=0, most=1 - 1e-9)
_UNITS = Number(f"a whole number from 1 to {MOST_UNITS}", least=1, most=MOST_UNITS, whole=True)
_STEPS = Number(f"a whole number from 1 to {MOST_STEPS}", least=1, most=MOST_STEPS, whole=True)


@dataclass(frozen=True, kw_only=True)
class LatentBinaryOptions(TrainingOptions):
    """What a latent binary training can be told; `posthoc_uq.LatentBinary` is the method.

    Attributes:
        flow: whether the means have a random factor in common, made by a flow (LBBNN-FLOW); without it all weights are
            independent (LBBNN-LRT).
        start: at the ``"trained"`` weights, or at ``"random"`` ones.
        prior_inclusion: prior probability of a weight to be on; the smaller, the sparser.
        initial_inclusion: where the inclusion probabilities begin: ``"high"`` (0.993), ``"snr"`` (the larger the
            weight, the higher; from trained weights alone), or drawn with logits between the bounds of
            ``"polarised"``, ``"mild"``, ``"sparse"``, ``"dense"`` or ``"balanced"``. By default high from trained
            weights and balanced from random ones.
        initial_deviation: of the weights, as a share of the deviation of their layer's trained ones.
        lr: rate of the means.
        inclusion_lr: rate of the logits of the inclusion probabilities.
        flow_lr: rate of what belongs to the flow.
        kl_weight: factor on the divergence from the prior: the larger, the sparser. 1 is the evidence lower bound, and
            the default from random weights. From trained ones it is 0.07, which keeps the network's accuracy: of a
            dense network on FashionMNIST the bound itself left one weight in a hundred and cost five points
            (`recipes/latent_binary`).
        warm_up: share of the training over which that factor rises from 0.
        flow_steps: of the flow, and of the auxiliary flow of the bound.
        flow_units: in each of the two hidden layers of a step.
        flow_form: ``"autoregressive"``, or ``"coupling"``.
        learn_noise: train the noise variance of a regression, from its value at the start.
    """

    flow: bool = False
    start: Start = "trained"
    prior_inclusion: float = 0.1
    initial_inclusion: str | None = None
    initial_deviation: float = 0.05
    lr: float = 1e-3
    inclusion_lr: float = 2e-2
    flow_lr: float = 1e-3
    kl_weight: float | None = None
    warm_up: float = 0.2
    flow_steps: int = 2
    flow_units: int = 100
    flow_form: Form = "autoregressive"
    learn_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {
            "epochs": COUNT,
            "prior_inclusion": _INSIDE,
            "initial_deviation": POSITIVE,
            "inclusion_lr": NOT_NEGATIVE,
        }
        kinds |= {"flow_lr": NOT_NEGATIVE, "kl_weight": NOT_NEGATIVE, "warm_up": UNIT}
        put_numbers(self, kinds | {"flow_steps": _STEPS, "flow_units": _UNITS})
        for name in ("flow", "learn_noise"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        one_of("start", self.start, get_args(Start))
        one_of("flow_form", self.flow_form, get_args(Form))
        if self.initial_inclusion is not None:
            one_of("initial_inclusion", self.initial_inclusion, (HIGH, BY_SIZE, *PRESETS))
        if self.start == "random" and self.initial_inclusion in (HIGH, BY_SIZE):
            raise PosthocUQError(
                f"initial_inclusion={self.initial_inclusion!r} goes by trained weights, and start='random' has none; "
                f"take one of {tuple(PRESETS)}."
            )

    @property
    def divergence_weight(self) -> float:
        """The factor on the divergence once the training is warm."""
        by_start = 0.07 if self.start == "trained" else 1.0
        return by_start if self.kl_weight is None else self.kl_weight
