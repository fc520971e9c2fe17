"""The options of a training over functions, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import COUNT, NOT_NEGATIVE, POSITIVE, Number, flag, one_of, put_numbers

PriorMean = Literal["zero", "pretrained", "random_init"]
Prior = Literal["features", "independent"]
Body = Literal["linearized", "sample", "certain"]

FUNCTION_NOISE = 1e-6  # where none is given
VALUE_VARIANCE = 10.0  # of a function value in an independent prior, where none is given
BODY_LOG_VARIANCE = -20.0

_LOG_VARIANCE = Number("the logarithm of a variance, in [-80, 20]", least=-80, most=20)
_NUMBERS = {
    "n_context": COUNT,
    "n_sets": COUNT,
    "n_draws": COUNT,
    "initial_log_variance": _LOG_VARIANCE,
    "initial_body_log_variance": _LOG_VARIANCE,
    "prior_variance": POSITIVE,
    "prior_body_variance": NOT_NEGATIVE,
    "function_noise": POSITIVE,  # without it, equal context points have no density
}


@dataclass(frozen=True, kw_only=True)
class FunctionSpaceOptions(TrainingOptions):
    """The options of a training over functions; `posthoc_uq.FunctionSpace` is the method.

    Attributes:
        context: where the network is to be uncertain: ``"monochrome"`` images, a ``"uniform"`` box, the training
            ``"batch"`` as it is or ``"corrupted"``; from Python also a loader or a tensor of unlabelled inputs, a
            callable ``(n, generator)``, one of `posthoc_uq.contexts`, or a list of several: pairs ``(share, context)``,
            or ``(count, context)`` where all numbers are whole, ``[(2, "batch"), (14, "corrupted")]``. By default half
            batch, half monochrome for images (with an independent prior the counts above), the box for vectors.
        n_context: context points a step; by default as many as a list of counts has; or 32, or the last layer's
            dimensions where these are fewer; or 16 with an independent prior.
        n_sets: sets of context points a step; the one with the largest divergence counts.
        n_draws: draws of the weights a step.
        train_mean: False moves the variances only, and predictions at the mean stay what they were to the bit.
        initial: starting variances: ``"constant"``, those of ``"diag"``, ``"kfac"``, ``"efb"`` or ``"inf"`` at the
            prior precision of the evidence, or those of a fitted posterior. By default ``"constant"``, and ``"inf"``
            with ``epochs=0``.
        learn_noise: train the noise variance of a regression, from its value at the start.
        initial_log_variance: where the variances of the last layer begin.
        initial_body_log_variance: where all others begin.
        prior: over functions: ``"features"``, what a prior over the last layer's weights says, or ``"independent"``,
            every function value by itself.
        prior_variance: of a function value in the independent prior; 10 by default.
        divergence_weight: by which the divergence is multiplied, where 1 is the evidence lower bound; ``"minibatch"``
            divides it by the size of a batch (of the loader's first one) in place of the number of samples. By default
            1 with a prior by features, and ``"minibatch"`` with an independent one.
        prior_mean: of the functions: ``"zero"``, ``"pretrained"`` or ``"random_init"``.
        prior_body_variance: prior variance of all weights but the last layer's.
        function_noise: a variance added to all function values, as a share of their mean variance in the prior by
            features; 1e-6 by default.
        body: how a draw of all layers but the last enters the divergence: ``"linearized"``, or ``"sample"`` to run the
            network with it; or ``"certain"``: these layers are trained and have no variances.
    """

    context: Any = None
    n_context: int | None = None
    n_sets: int = 1
    n_draws: int = 1
    train_mean: bool = True
    initial: str | Posterior | None = None
    learn_noise: bool = False
    initial_log_variance: float = -5.0
    initial_body_log_variance: float = BODY_LOG_VARIANCE
    prior: Prior = "features"
    prior_variance: float | None = None
    divergence_weight: float | Literal["minibatch"] | None = None
    prior_mean: PriorMean = "zero"
    prior_body_variance: float = 0.0
    function_noise: float | None = None
    body: Body = "linearized"

    def __post_init__(self) -> None:
        super().__post_init__()
        put_numbers(self, _NUMBERS)
        for name in ("train_mean", "learn_noise"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        one_of("prior", self.prior, get_args(Prior))
        one_of("prior_mean", self.prior_mean, get_args(PriorMean))
        one_of("body", self.body, get_args(Body))
        if isinstance(self.divergence_weight, str):
            one_of("divergence_weight", self.divergence_weight, ("minibatch",))
        elif self.divergence_weight is not None:
            put_numbers(self, {"divergence_weight": POSITIVE})
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """An error for options that do nothing beside others."""
        if self.prior == "features" and self.prior_variance is not None:
            raise PosthocUQError(
                "prior_variance is of prior='independent'; a prior by features has prior_precision."
            )
        if self.prior == "independent" and self.function_noise is not None:
            raise PosthocUQError(
                "function_noise is of prior='features': with prior='independent' there is no covariance to add it to."
            )
        if self.prior == "independent" and self.prior_body_variance:
            raise PosthocUQError(
                "prior_body_variance is of prior='features': prior='independent' has prior_variance alone."
            )
        if self.body != "certain":
            return
        if self.prior_body_variance or self.initial_body_log_variance != BODY_LOG_VARIANCE:
            raise PosthocUQError(
                "body='certain' leaves all layers but the last without variances, so that prior_body_variance and "
                "initial_body_log_variance have no effect; leave them out."
            )
        if not self.train_mean:
            raise PosthocUQError(
                "body='certain' with train_mean=False trains nothing but the last layer's variances; choose "
                "layers='last'."
            )

    @property
    def noise_share(self) -> float:
        """The function noise that is meant."""
        return FUNCTION_NOISE if self.function_noise is None else self.function_noise

    @property
    def value_variance(self) -> float:
        """The variance of a function value in an independent prior that is meant."""
        return VALUE_VARIANCE if self.prior_variance is None else self.prior_variance
