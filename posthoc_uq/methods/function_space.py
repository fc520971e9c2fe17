"""Variational inference over functions, begun at the trained network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.evidence import maximise_evidence
from posthoc_uq.inference.function_options import FunctionSpaceOptions
from posthoc_uq.inference.function_space import FUNCTION_SPACE, train_over_functions
from posthoc_uq.inference.labels import FisherChoice
from posthoc_uq.inference.stages import Stages
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.base import Method
from posthoc_uq.methods.curvature import Curvature
from posthoc_uq.methods.diagonal import Diagonal
from posthoc_uq.methods.efb import EFB
from posthoc_uq.methods.inf import INF
from posthoc_uq.methods.kfac import KFAC
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import COUNT, POSITIVE, one_of, put_numbers

_CONSTANT = "constant"
_STARTS: dict[str, type[Curvature]] = {kind.name: kind for kind in (Diagonal, KFAC, EFB, INF)}


@dataclass(frozen=True, kw_only=True)
class FunctionSpace(FunctionSpaceOptions, Method):
    """Variational inference over functions, begun at the trained network.

    A Gaussian over the weights, trained by its distribution over functions: it maximises ``E_q[log p(y | f)] -
    KL(q(f(X)) || p(f(X)))`` at context points ``X``, with q and p linearised in the weights (Rudner, Chen, Teh, Gal
    2022, "Tractable function-space variational inference in Bayesian neural networks"). The formulas are in
    ``docs/methods/function_space.md``.

    An epoch costs about two to four epochs of plain training. Take it where foreign inputs resemble inputs that can be
    shown to it as context. With ``epochs=0`` there is no training: the posterior is that of the curvature named by
    `initial`, for the linearised head.

    Attributes:
        prior_precision: of the last layer's weights in the prior by features; 1 by default.
        fisher: labels of the curvature that the training begins with; see `Curvature`.
        n_samples: see `Curvature`.
    """

    name: ClassVar[str] = FUNCTION_SPACE
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field", "diagonal", "kfac", "efb", "inf")
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    weighs_samples: ClassVar[bool] = True
    stages: ClassVar[Stages] = {
        name: stage for kind in _STARTS.values() for name, stage in kind.stages.items()
    }  # of the curvature that the training begins with

    prior_precision: float | None = None
    fisher: FisherChoice = "auto"
    n_samples: int = 1

    def __post_init__(self) -> None:
        Method.__post_init__(self)  # first: the other checks compare values of the right types
        FunctionSpaceOptions.__post_init__(self)
        put_numbers(self, {"prior_precision": POSITIVE, "n_samples": COUNT})
        if self.prior == "independent" and self.prior_precision is not None:
            raise PosthocUQError(
                "prior_precision is of prior='features'; with prior='independent' give prior_variance, that of a "
                "function value."
            )
        if isinstance(self.initial, str):
            one_of("initial", self.initial, (_CONSTANT, *_STARTS) if self.trains else tuple(_STARTS))
        elif self.initial is not None and not (isinstance(self.initial, Posterior) and self.trains):
            raise PosthocUQError(
                f"initial must be one of {(_CONSTANT, *_STARTS)} or a fitted posterior to train on from; without "
                f"epochs the posterior comes from the curvature itself: initial='inf'."
            )
        if self.curvature is None and (self.fisher, self.n_samples) != ("auto", 1):
            raise PosthocUQError(
                "fisher and n_samples are about the curvature of the data, which this training has none of; leave them "
                "out, or begin with a curvature's variances: initial='inf'."
            )

    @property
    def trains(self) -> bool:
        return self.least_epochs > 0

    @property
    def curvature(self) -> Curvature | None:
        """The method whose variances the training begins with, or whose posterior it is without a training."""
        initial = self.initial or ("inf" if not self.trains else _CONSTANT)
        if not isinstance(initial, str) or initial == _CONSTANT:
            return None
        shared: dict[str, Any] = {"dtype": self.dtype, "unsupported": self.unsupported}
        return _STARTS[initial](fisher=self.fisher, n_samples=self.n_samples, **shared)

    def passes(self) -> int:
        first = 0 if self.curvature is None else self.curvature.passes()
        # once for the context, once for the features of the last layer
        return first + self.least_epochs + 2 * self.trains

    def fit(self, task: Task) -> Posterior:
        curvature = self.curvature
        if self.trains:
            return train_over_functions(task, self, self.prior_precision, lambda: self._start(task))
        assert curvature is not None
        posterior = curvature.fit(task)
        posterior.method = self.name
        posterior.history.fit["curvature"] = curvature.name
        return posterior

    def _start(self, task: Task) -> Posterior | None:
        """The posterior whose variances the training begins with; None for constant ones."""
        if isinstance(self.initial, Posterior) or self.curvature is None:
            return self.initial if isinstance(self.initial, Posterior) else None
        posterior = self.curvature.fit(task)
        maximise_evidence(posterior)
        return posterior
