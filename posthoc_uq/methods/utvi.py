"""Unscented-transform variational inference, begun at the trained network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posthoc_uq.inference.moment_options import MomentOptions
from posthoc_uq.inference.task import Task
from posthoc_uq.inference.unscented import UTVI as NAME
from posthoc_uq.inference.unscented import train_by_moments
from posthoc_uq.methods.base import Method
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import POSITIVE, Number, put_numbers

_EPOCHS = Number("a whole number, at least 1", least=1, most=2**63 - 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class UTVI(MomentOptions, Method):
    """Mean-field variational inference without draws: moments pass through the network in training too.

    ``q = N(mu, diag sigma^2)`` over the weights, trained by ``sum_n E[log p(y_n | f)] - phi KL(q || N(mu_p, I / tau))``
    with ``f ~ N(m_n, s_n^2)``, the moments of the outputs, which one pass carries through the network by the unscented
    transform; ``phi`` is halved from epoch to epoch (Schodt 2024, "Few-sample variational inference of Bayesian neural
    networks with arbitrary nonlinearities"). Its head is ``"moments"``, whose rules are those of the training.

    Every step is a pass of moments and its gradients, about four to six plain steps, and draws nothing. It is the one
    to take where the moments head is to predict: the variances are found for that head's own approximation. With
    ``noise="none"`` and ``objective="predictive"`` they also learn a noise that depends on the input. For other heads,
    take a Laplace method or `FunctionSpace`.

    Attributes:
        prior_precision: tau, of every weight; 1 by default.
    """

    name: ClassVar[str] = NAME
    block_kinds: ClassVar[tuple[str, ...]] = ("mean_field",)
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    weighs_samples: ClassVar[bool] = True

    prior_precision: float | None = None

    def __post_init__(self) -> None:
        Method.__post_init__(self)  # first, so that what follows compares values of the right types
        MomentOptions.__post_init__(self)
        put_numbers(self, {"prior_precision": POSITIVE, "epochs": _EPOCHS})

    @property
    def trains(self) -> bool:
        return True

    @property
    def head(self) -> str:
        return "moments"

    @property
    def narrowed(self) -> bool:
        return self.objective == "expected"  # else the propagated variance is what was trained to predict

    def passes(self) -> int:
        return self.least_epochs + 2  # once to count the samples, once for what enters the last layer

    def fit(self, task: Task) -> Posterior:
        return train_by_moments(task, self, self.prior_precision)
