"""What a method of fitting is.

A method is a frozen dataclass: its fields are its options, and `Method.fit` makes a posterior from a `Task`. One file
holds all of it, and one row of the table in ``methods/__init__.py`` makes it known to `posthoc_uq.fit`, to the command
line, to files and to the tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, Options
from posthoc_uq.layers.proof import Selection
from posthoc_uq.methods.checkpoint import WITHOUT_EFFECT
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.posterior import Posterior

Unsupported = Literal["raise", "skip"]

Bytes = Annotated[int, Ge(2**20), Lt(2**63)]


@dataclass(frozen=True, kw_only=True)
class Method(Options, ABC):
    """A way to fit a posterior, with the fields that all methods have.

    Attributes:
        unsupported: ``"skip"`` layers whose gradients cannot be caught, with a warning: their weights count as certain;
            or ``"raise"`` an error, as for layers that were asked for by name.
        dtype: of the statistics: `torch.float32` or `torch.float64`; by default float32, or wider where the model is.
        memory_budget: bytes that one temporary of the statistics may take; by default 256 MiB.
        checkpoint_every: batches between two writes of the checkpoint, where the fit has one.

    Example:
        ```python
        method = uq.KFAC(fisher="exact")  # a method is its options
        print(method)
        posterior = uq.fit(model, train_loader, method)
        print(posterior.method)
        ```
    """

    name: ClassVar[str]
    """The name by which users, files and reports call it."""
    block_kinds: ClassVar[tuple[str, ...]]
    """The kinds of blocks that its posteriors may have; a file with others is refused."""
    tunable: ClassVar[frozenset[str]]
    """The hyperparameters that its posteriors have, as far as the likelihood has them too."""
    likelihoods: ClassVar[tuple[str, ...] | None] = None
    """The names of the likelihoods that it can fit; None for any, the user's own among them."""
    weighs_samples: ClassVar[bool] = False
    """Whether samples may have weights (`posthoc_uq.fit`, ``batch_to_weights``)."""

    trains: ClassVar[bool] = False
    """Whether it optimises the variances themselves. Then the fit fixes the prior, and held-out data choose the
    epoch."""

    takes_gradients: ClassVar[bool] = False
    """Whether gradients of each sample are all that it needs of a layer, so that weights that a model's own code
    computes can have a posterior."""

    unsupported: Unsupported = "skip"
    dtype: torch.dtype | None = None
    memory_budget: Bytes | None = None
    checkpoint_every: Count = field(default=100, metadata=WITHOUT_EFFECT)

    @property
    def calibrates_prior(self) -> bool:
        """Whether a fit by default sets the width of its posteriors by the faithful prior."""
        return True

    @property
    def head(self) -> str:
        """The default head of its posteriors."""
        return "sampling" if self.trains else "linearized"

    def selection(self, layers: Selection | None) -> Selection:
        """The layers that it treats, where a fit was asked for `layers`; None where it was not asked for any."""
        return "all" if layers is None else layers

    @abstractmethod
    def passes(self) -> int:
        """How often it reads the data."""

    @abstractmethod
    def fit(self, task: Task) -> Posterior:
        """The posterior, with hyperparameters at their starting values.

        Raises:
            NonFiniteError: outputs, gradients or a loss are not finite.
            PosthocUQError: data or model do not suit the method; the message says how to go on.
        """

    def check_weights(self) -> None:
        """Refuse weights of samples where the method has none.

        Raises:
            PosthocUQError: says what to do instead.
        """
        if not self.weighs_samples:
            raise PosthocUQError(
                f"method={self.name!r} has no weights of samples; leave batch_to_weights out and repeat samples in the "
                f"loader instead, or take a method by curvature such as 'inf'."
            )

    def check_update(self, posterior: Posterior) -> None:
        """Refuse, before any work is done, a posterior whose data cannot change. A method that overrides `update` is
        taken to serve all of its posteriors.

        Raises:
            PosthocUQError: data cannot be added to such posteriors, or taken out.
        """
        if type(self).update is Method.update:
            raise self.not_a_sum()

    def update(self, posterior: Posterior, task: Task, remove: bool) -> Posterior:
        """A new posterior with the data of the task added to those of `posterior`, or taken out of them. See
        `posthoc_uq.update`, which calls this on a method with default options: what depends on those of the fit is read
        from the posterior.

        Raises:
            NotContainedError: data are to go out that cannot all have been in.
            PosthocUQError: data cannot be added to such posteriors, or taken out.
        """
        raise self.not_a_sum()

    def not_a_sum(self) -> PosthocUQError:
        """The error of a method whose posteriors belong to the data of their fit."""
        return PosthocUQError(
            f"Data cannot be added to a posterior of method={self.name!r}, or taken out of it, since it is no sum over "
            f"its data; fit again on the data that it is to hold."
        )
