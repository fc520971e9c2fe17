"""The options of a training by propagated moments, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.moments.tensor import Rules
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import NOT_NEGATIVE, UNIT, Number, flag, one_of, put_numbers

Start = Literal["trained", "random"]
Objective = Literal["expected", "predictive"]
Noise = Literal["fixed", "learned", "none"]
PriorMean = Literal["zero", "trained"]
Relu = Literal["unscented", "exact"]
MaxPool = Literal["clark", "argmax"]
Unknown = Literal["error", "mc", "delta"]

_NUMBERS = {
    "initial_log_variance": Number("the logarithm of a variance, in [-80, 20]", least=-80, most=20),
    "weight_decay": NOT_NEGATIVE,
    "kl_weight": NOT_NEGATIVE,
    "kl_floor": UNIT,
    "pool_rho": UNIT,
}
_CHOICES = {
    "start": Start,
    "objective": Objective,
    "noise": Noise,
    "prior_mean": PriorMean,
    "relu": Relu,
    "max_pool": MaxPool,
    "unknown": Unknown,
}


@dataclass(frozen=True, kw_only=True)
class MomentOptions(TrainingOptions):
    """What a training by propagated moments can be told; `posthoc_uq.UTVI` is the method.

    Attributes:
        lr: learning rate of the means.
        log_variance_lr: learning rate of the log variances.
        optimizer: a callable from parameter groups to a torch optimiser; AdamW by default.
        val_draws: draws of the outputs for the validation NLL, where the likelihood has no closed form.
        start: ``"trained"``, or ``"random"`` for a new initialisation of the covered layers by their
            ``reset_parameters``.
        initial: a fitted posterior whose variances, and mean if it has one of its own, are those of the start, in place
            of a constant variance.
        initial_log_variance: the constant that the log variances start at.
        train_mean: False trains the variances and nothing else, and predictions at the mean stay what they were.
        train_rest: whether to train with the means, as numbers without uncertainty, what else the network uses after
            the first of the layers: scales and shifts of normalisations, scales of activations such as
            `posthoc_uq.InverseCDF`. They have no prior. Affine layers that were left out stay as they are.
        objective: ``"expected"`` is ``E_q[log p(y | f)]``, the term of the evidence lower bound; ``"predictive"`` is
            ``log E_q[p(y | f)]``, which rates the prediction itself, as the paper does.
        noise: of a regression: ``"fixed"`` at the noise of the fit, ``"learned"`` from there, or ``"none"``: the
            propagated variance is all of the predictive one, so that the noise may depend on the input; gradients then
            see no residual above 10 deviations.
        kl_weight: factor on the divergence from the prior in the first epoch. 1 is the evidence lower bound, and the
            default from random weights. From trained ones it is 0.1: with 1 the first epoch alone widens the variances
            to the prior's, and the means then move away from a network that was right (``docs/methods/utvi.md``).
        kl_floor: the factor is halved from epoch to epoch (without given epochs from tenth to tenth of the training),
            but to no less than this share of its first value. With 1 it stays what it is.
        prior_mean: of the weights: ``"zero"``, or ``"trained"`` for the trained ones.
        weight_decay: of the means, by the default optimiser.
        relu: ``"unscented"``, or ``"exact"`` for the closed form of ReLU and LeakyReLU.
        max_pool: ``"clark"`` or ``"argmax"``; see `MomentsPredictor`.
        pool_rho: correlation assumed between the cells of an average, in [0, 1].
        unknown: what to do with a function that has no rule: ``"error"``, ``"mc"`` or ``"delta"``; see
            `MomentsPredictor`.
    """

    lr: float = 1e-3
    log_variance_lr: float = 3e-2
    start: Start = "trained"
    initial: Posterior | None = None
    initial_log_variance: float = -10.0
    train_mean: bool = True
    train_rest: bool = True
    objective: Objective = "expected"
    noise: Noise = "fixed"
    kl_weight: float | None = None
    kl_floor: float = 0.0
    prior_mean: PriorMean = "zero"
    weight_decay: float = 0.01
    relu: Relu = "unscented"
    max_pool: MaxPool = "clark"
    pool_rho: float = 0.0
    unknown: Unknown = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        put_numbers(self, _NUMBERS)
        for name in ("train_mean", "train_rest"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name, choices in _CHOICES.items():
            one_of(name, getattr(self, name), get_args(choices))
        if self.noise == "none" and self.objective != "predictive":
            raise PosthocUQError(
                "noise='none' leaves the expected log-likelihood without a bound; it goes with objective='predictive'."
            )
        if self.start == "random" and not (self.train_mean and self.initial is None):
            raise PosthocUQError(
                "start='random' trains the means from a new initialisation, so that train_mean=False and initial= do "
                "not go with it."
            )

    @property
    def first_kl_weight(self) -> float:
        """The factor on the divergence in the first epoch."""
        by_start = 0.1 if self.start == "trained" else 1.0
        return by_start if self.kl_weight is None else self.kl_weight

    def rules(self) -> Rules:
        """The choices between forms of the rules by which moments pass through the network."""
        return Rules(self.relu, self.max_pool, self.pool_rho, "diag", self.unknown)
