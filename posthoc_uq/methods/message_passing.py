"""Message passing over the last layer, or over a whole sequential network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posthoc_uq.curvature.selection import Selection
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.message_changes import changed, check_last
from posthoc_uq.inference.message_options import ALL, LAST, MessagePassingOptions
from posthoc_uq.inference.message_passing import LIKELIHOODS, MESSAGE_PASSING, fit_by_messages
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.base import Method
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import POSITIVE, put_numbers


@dataclass(frozen=True, kw_only=True)
class MessagePassing(MessagePassingOptions, Method):
    """Gaussian weight posteriors by message passing on the network's factor graph, without gradients.

    Every factor of the network (a product, a sum, an activation, a target) sends its neighbours Gaussian messages that
    match moments; the posterior of a weight is its prior times one message a batch, so that no example is counted twice
    ("Scalable approximate message passing for Bayesian neural networks"). The formulas are in
    ``docs/methods/message_passing.md``.

    With ``layers="last"`` the model runs once over the data and only its last linear layer gets a posterior, with means
    of its own; ``posterior="full"`` has all correlations of an output's weights, costs ``N n^2`` a sweep and output for
    n inputs, and is exact for a regression. With ``layers="all"`` a `torch.nn.Sequential` is trained anew by messages;
    that costs hundreds of plain epochs, and is for small networks.

    Attributes:
        prior_precision: of every weight and bias; by default that of the method's prior, which goes by the size of the
            inputs.
    """

    name: ClassVar[str] = MESSAGE_PASSING
    block_kinds: ClassVar[tuple[str, ...]] = ("messages", "joint_messages")
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    likelihoods: ClassVar[tuple[str, ...] | None] = LIKELIHOODS

    prior_precision: float | None = None

    def __post_init__(self) -> None:
        Method.__post_init__(self)  # first, so that what follows compares values of the right types
        MessagePassingOptions.__post_init__(self)
        put_numbers(self, {"prior_precision": POSITIVE})

    @property
    def trains(self) -> bool:
        return True

    @property
    def narrowed(self) -> bool:
        return False  # the variances are those of a prior and the data, around a mean of their own

    @property
    def head(self) -> str:
        return "moments" if self.layers == ALL else "linearized"

    def selection(self, layers: Selection | None) -> Selection:
        if layers is None:
            return self.layers
        if isinstance(layers, str) and layers in (LAST, ALL) and layers != self.layers:
            raise PosthocUQError(
                f"The fit was asked for layers={layers!r} and the method for layers={self.layers!r}; leave layers= out "
                f"of the fit, or pass uq.MessagePassing(layers={layers!r})."
            )
        return layers

    def passes(self) -> int:
        return (
            1 if self.layers == LAST else 2
        )  # of a whole network, once more for the statistics of the novelty

    def fit(self, task: Task) -> Posterior:
        return fit_by_messages(task, self, self.prior_precision)

    def check_change(self, posterior: Posterior, change: str) -> None:
        """Refuse a posterior of a whole network, whose data cannot change.

        Raises:
            PosthocUQError: it is one.
        """
        check_last(posterior)

    def update(self, posterior: Posterior, task: Task) -> Posterior:
        """The last layer's posterior with new data: it is the prior of their messages.

        For a regression with ``posterior="full"`` that is the fit on all data. Else the result is near that fit: what
        the old data said stays as it was, and independent weights know by the Gram of the layer's inputs how they
        correlate.

        Raises:
            PosthocUQError: the posterior is of a whole network.
        """
        return changed(posterior, task, 1)

    def forget(self, posterior: Posterior, task: Task) -> Posterior:
        """The last layer's posterior without these data: their messages, as they are under the posterior, are divided
        out.

        Raises:
            PosthocUQError: the posterior is of a whole network, or the data cannot all have been in it.
        """
        return changed(posterior, task, -1)
