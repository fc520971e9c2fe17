"""The options of a training over functions, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import COUNT, NOT_NEGATIVE, POSITIVE, Number, flag, one_of, put_numbers

PriorMean = Literal["zero", "pretrained", "random_init"]
Body = Literal["linearized", "sample"]

_LOG_VARIANCE = Number("the logarithm of a variance, in [-80, 20]", least=-80, most=20)
_NUMBERS = {
    "n_context": COUNT,
    "n_sets": COUNT,
    "n_draws": COUNT,
    "initial_log_variance": _LOG_VARIANCE,
    "initial_body_log_variance": _LOG_VARIANCE,
    "prior_body_variance": NOT_NEGATIVE,
    "function_noise": POSITIVE,  # without it, equal context points have no density
}


@dataclass(frozen=True, kw_only=True)
class FunctionSpaceOptions(TrainingOptions):
    """The options of a training over functions; `posthoc_uq.FunctionSpace` is the method.

    Attributes:
        context: where the network is to be uncertain: ``"monochrome"`` images, a ``"uniform"`` box, the training
            ``"batch"``, a loader or a tensor of unlabelled inputs, a callable ``(n, generator)``, a list of pairs
            ``(share, context)``, or one of `posthoc_uq.contexts`. By default half batch, half monochrome for images,
            the box for vectors.
        n_context: context points a step; by default 32, or the last layer's dimensions where these are fewer.
        n_sets: sets of context points a step; the one with the largest divergence counts.
        n_draws: draws of the weights a step.
        train_mean: False moves the variances only, and predictions at the mean stay what they were to the bit.
        initial: starting variances: ``"constant"``, those of ``"diag"``, ``"kfac"``, ``"efb"`` or ``"inf"`` at the
            prior precision of the evidence, or those of a fitted posterior. By default ``"constant"``, and ``"inf"``
            with ``epochs=0``.
        learn_noise: train the noise variance of a regression, from its value at the start.
        initial_log_variance: where the variances of the last layer begin.
        initial_body_log_variance: where all others begin.
        prior_mean: of the functions: ``"zero"``, ``"pretrained"`` or ``"random_init"``.
        prior_body_variance: prior variance of all weights but the last layer's.
        function_noise: a variance added to all function values, as a share of their mean prior variance.
        body: how a draw of all layers but the last enters the divergence: ``"linearized"``, or ``"sample"`` to run the
            network with it.
    """

    context: Any = None
    n_context: int | None = None
    n_sets: int = 1
    n_draws: int = 1
    train_mean: bool = True
    initial: str | Posterior | None = None
    learn_noise: bool = False
    initial_log_variance: float = -5.0
    initial_body_log_variance: float = -20.0
    prior_mean: PriorMean = "zero"
    prior_body_variance: float = 0.0
    function_noise: float = 1e-6
    body: Body = "linearized"

    def __post_init__(self) -> None:
        super().__post_init__()
        put_numbers(self, _NUMBERS)
        for name in ("train_mean", "learn_noise"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        one_of("prior_mean", self.prior_mean, get_args(PriorMean))
        one_of("body", self.body, get_args(Body))
