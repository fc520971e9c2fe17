"""The options of a training over functions, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.posteriors.base import Posterior

PriorMean = Literal["zero", "pretrained", "random_init"]
Body = Literal["linearized", "sample"]


@dataclass(frozen=True, kw_only=True)
class FunctionSpaceOptions(TrainingOptions):
    """What a training over functions can be told; `posthoc_uq.FunctionSpace` is the method.

    Attributes:
        context: where the network is to be uncertain: ``"monochrome"`` images, a ``"uniform"`` box, the training
            ``"batch"``, a loader or a tensor of unlabelled inputs, a callable ``(n, generator)``, a list of pairs
            ``(share, context)``, or one of `posthoc_uq.contexts`. By default half batch, half monochrome for images,
            the box for vectors.
        n_context: context points a step; by default 32, or the last layer's dimensions where these are fewer.
        n_sets: sets of context points a step; the one that differs most counts.
        n_draws: draws of the weights a step.
        train_mean: False moves the variances only, and predictions at the mean stay what they were to the bit.
        initial: starting variances: ``"constant"``, those of ``"diag"``, ``"kfac"``, ``"efb"`` or ``"inf"`` at the
            prior precision of the evidence, or those of a fitted posterior. By default constant, and ``"inf"`` without
            epochs.
        learn_noise: train the noise variance of a regression, from its value at the start.
        initial_log_variance: where the variances of the last layer begin.
        initial_body_log_variance: where all others begin.
        prior_mean: of the functions: ``"zero"``, ``"pretrained"`` or ``"random_init"``.
        prior_body_variance: prior variance of all weights but the last layer's.
        function_noise: a variance of function values, as a share of the prior's.
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
        for name in ("n_sets", "n_draws", *(["n_context"] if self.n_context is not None else [])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PosthocUQError(f"{name} must be a whole number, at least 1; not {value!r}.")
        for name, allowed in (("prior_mean", get_args(PriorMean)), ("body", get_args(Body))):
            if getattr(self, name) not in allowed:
                raise PosthocUQError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}.")
        for name in ("initial_log_variance", "initial_body_log_variance"):
            if not -80 <= getattr(self, name) <= 20:
                raise PosthocUQError(
                    f"{name} is the logarithm of a variance in [-80, 20], not {getattr(self, name)}."
                )
        for name in ("prior_body_variance", "function_noise"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PosthocUQError(f"{name} must be finite and not negative, not {getattr(self, name)}.")
        if not self.function_noise:
            raise PosthocUQError(
                "function_noise must be positive: context points that coincide have no density."
            )
