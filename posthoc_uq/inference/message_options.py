"""The options of message passing, checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.message_passing.trainer import Schedule
from posthoc_uq.values import COUNT, POSITIVE, SHARE, put_numbers

LAST, ALL = "last", "all"
FULL = "full"
PRETRAINED = "pretrained"

_EPOCHS = {LAST: 4, ALL: 18}  # visits of every batch where none are given


@dataclass(frozen=True, kw_only=True)
class MessagePassingOptions:
    """What message passing can be told; `posthoc_uq.MessagePassing` is the method.

    Attributes:
        layers: the ``"last"`` linear layer, over the inputs that the trained network gives it, or ``"all"`` layers of a
            sequential network.
        posterior: ``"diagonal"``, with independent weights; or ``"full"``, for a last layer: one Gaussian with all
            correlations for every output, which is exact for a regression.
        signal: what a label says of the logits: ``"softargmax"``, drawn by their softmax; ``"argmax"``, it is with
            noise the largest; ``"auto"`` is the first. A regression has the noise of its likelihood.
        prior: of the weights' means: ``"zero"`` (the default for a last layer), ``"spectral"`` (drawn once; the default
            for all layers), or ``"pretrained"``, the trained weights, for data that were not used to train them.
        prior_factor: on the prior variances where the means are pretrained.
        consistent_prior: the prior variances of hidden layers by the corrected constant.
        epochs: visits of every batch; by default 4 for a last layer and 18 for all.
        iterations: in a visit; by default ``ceil(epoch / 2)``.
        batch_size: examples of a batch, whose messages are kept one by one during a visit and as one sum after it.
        chunk_size: examples that pass at the same time; 1 is the paper's schedule.
        message_damping: share of a new message to a weight; by default ``min(1, 2 / chunk_size)``.
        regularize: pull the label's logit towards 1 and the others towards -1 as well, for the signal ``"argmax"``.
        matmul: in layers of 128 inputs and more, messages by matrix products alone, which is faster and leaves out
            terms of about one over the number of inputs.
    """

    layers: Literal["last", "all"] = "last"
    posterior: Literal["diagonal", "full"] = "diagonal"
    signal: Literal["auto", "softargmax", "argmax"] = "auto"
    prior: Literal["zero", "spectral", "pretrained"] | None = None
    prior_factor: float = 0.1
    consistent_prior: bool = False
    epochs: int | None = None
    iterations: int | None = None
    batch_size: int = 320
    chunk_size: int = 1
    message_damping: float | None = None
    regularize: bool = False
    matmul: bool = False

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("epochs", "iterations", "batch_size", "chunk_size"), COUNT)
        put_numbers(self, {**counts, "message_damping": SHARE, "prior_factor": POSITIVE})
        if self.layers == ALL and self.posterior == FULL:
            raise PosthocUQError("posterior='full' is for the last layer; take layers='last'.")
        if self.layers == ALL and self.prior == "zero":
            raise PosthocUQError(
                "With prior='zero' the units of a hidden layer would stay alike for ever; take 'spectral' or "
                "'pretrained' with layers='all'."
            )
        if self.regularize and self.signal != "argmax":
            raise PosthocUQError("regularize=True is a part of signal='argmax'; give that too.")

    @property
    def means(self) -> str:
        """Of the prior, by name."""
        return self.prior or ("zero" if self.layers == LAST else "spectral")

    def schedule(self) -> Schedule:
        """Of the training."""
        epochs = _EPOCHS[self.layers] if self.epochs is None else self.epochs
        return Schedule(
            epochs=epochs,
            iterations=self.iterations,
            chunk_size=self.chunk_size,
            message_damping=self.message_damping,
            shuffle=True,
        )
