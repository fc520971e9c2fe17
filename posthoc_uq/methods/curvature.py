"""The base of the methods whose Gaussian has the Fisher information of the data as its precision.

This is Laplace's approximation: ``N(theta, (scale I + prior_precision)^-1)`` around the trained weights (MacKay 1992,
"A practical Bayesian framework for backpropagation networks"). The methods differ in the form of ``I`` that they keep.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from posthoc_uq.curvature.statistics import GradientGram, InputGram, SquaredGradients
from posthoc_uq.distributed import world
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.labels import FisherChoice
from posthoc_uq.inference.other_data import combined_posterior, weight_of
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Fisher
from posthoc_uq.methods.base import Change, Method
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.values import COUNT, put_numbers


@dataclass(frozen=True, kw_only=True)
class Curvature(Method):
    """A Laplace posterior from sweeps over the data; `blocks` of a subclass gives the form of the Fisher that is kept.

    Attributes:
        fisher: labels ``"mc"`` drawn from the model's predictive, ``"exact"`` expectation over them, ``"empirical"``
            targets, or ``"auto"``: exact where outputs and samples are few, else drawn, up to three a sample;
            targets for a likelihood of your own that has neither. The report says what was used.
        n_samples: labels drawn per sample with ``fisher="mc"``; more than 1 with ``"auto"`` draws as many.
    """

    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "prior_precision", "noise_scale", "temperature"})

    weighs_samples: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    """Whether the Fisher is that of all layers together."""

    fisher: FisherChoice = "auto"
    n_samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        put_numbers(self, {"n_samples": COUNT})
        if self.n_samples > 1 and self.fisher not in ("auto", "mc"):
            raise PosthocUQError(
                f"n_samples is the number of labels drawn with fisher='mc', and with fisher={self.fisher!r} none are; "
                f"leave it out."
            )

    @abstractmethod
    def blocks(self, task: Task) -> dict[str, Block]:
        """The form of the Fisher's mean over the samples that is kept, by sweeps of the task: one block a layer, by the
        layer's name, or blocks of several layers, by any name (see `members`).
        """

    def members(self, task: Task) -> dict[str, list[str]]:
        """The layers of every block, by the block's name."""
        return {name: [name] for name in task.layers}

    def described(self) -> dict[str, Any]:
        """Lines of the report on how the posterior was fitted, as plain values."""
        return {}

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        """Means over the samples of a task, by block and name of the tensor, in the form and in the bases of the
        posterior's blocks, as `Block.combined` takes them. A method that defines it can update, and forget.

        Args:
            posterior: whose blocks they are to be added to.
            task: of the data that come in or go out, with the labels of the fit.
        """
        raise self._fixed("update")

    def check_change(self, posterior: Posterior, change: Change) -> None:
        if type(self).added is Curvature.added:
            raise self._fixed(change)
        if posterior.history.fit.get("fisher") not in get_args(Fisher):
            raise PosthocUQError(
                "This posterior does not say which labels its Fisher was taken with (history.fit['fisher']), so that "
                "data cannot come in or go out; fit again."
            )

    def update(self, posterior: Posterior, task: Task) -> Posterior:
        return self._changed(posterior, task, 1)

    def forget(self, posterior: Posterior, task: Task) -> Posterior:
        return self._changed(posterior, task, -1)

    def _changed(self, posterior: Posterior, task: Task, sign: int) -> Posterior:
        facts = posterior.history.fit
        labels = int(facts.get("labels drawn per sample", 1))
        task.settings = replace(task.settings, fisher=facts["fisher"], n_samples=labels)
        return combined_posterior(posterior, self.added(posterior, task), task.summary, sign)

    def fit(self, task: Task) -> Posterior:
        task.take_labels(self.fisher, self.n_samples, self.joint)
        blocks, settings = self.blocks(task), task.settings
        tracked = task.prepared.capture.tracked.values()
        served = sum(t.engine == "backpack" for t in tracked)
        facts: dict[str, Any] = {
            "fisher": settings.fisher,
            "seed": settings.seed,
            "samples": task.summary.samples,
            **({} if weight_of(task.summary) is None else {"sum of the weights": task.summary.weight}),
            "layers caught by BackPACK": served,
            "layers caught by call interception": len(tracked) - served,
            **{f"seconds, {what}": value for what, value in task.seconds.items()},
        }
        facts |= {"labels drawn per sample": settings.n_samples} if settings.fisher == "mc" else {}
        facts |= self.described()
        facts |= {"processes": world()} if world() > 1 else {}
        facts |= {"fisher chosen": "auto"} if self.fisher == "auto" else {}
        posterior = Posterior(
            self.name,
            task.layers,
            blocks,
            self.members(task),
            {name: parameter.detach() for name, parameter in task.model.named_parameters()},
            settings.likelihood,
            _evidence(task),
            History(fit=facts, deterministic=dict(task.prepared.deterministic)),
        )
        posterior.model = task.model
        return posterior


def _evidence(task: Task) -> Evidence:
    summary, likelihood = task.summary, task.settings.likelihood
    evidence = Evidence(summary.samples, summary.log_likelihood, weight=weight_of(summary))
    evidence.noise_power = 2 if task.settings.fisher == "empirical" else 1
    if summary.log_likelihood is not None:
        evidence.squared_residuals, targets = likelihood.residual_sums(
            summary.log_likelihood, summary.weight, summary.outputs
        )
        evidence.targets = summary.samples * summary.outputs if targets else 0
    return evidence


def squares_of(
    layer: Layer, task: Task, bases: tuple[Any, Any] | None = None, *, diagonal: bool = True
) -> SquaredGradients:
    """An accumulator of a layer's squared gradients, in the two bases if given."""
    return SquaredGradients(
        layer.matrix_shape,
        task.settings.dtype,
        task.device,
        task.memory_budget,
        diagonal=diagonal,
        bases=bases,
    )


def grams_of(layer: Layer, task: Task) -> tuple[InputGram, GradientGram]:
    """Accumulators of the Grams of a layer's inputs and of its output gradients."""
    groups, outputs, inputs = layer.matrix_shape
    dtype, device, budget = task.settings.dtype, task.device, task.memory_budget
    return (
        InputGram(groups, inputs, dtype, device, budget),
        GradientGram(groups, outputs, dtype, device, budget),
    )
