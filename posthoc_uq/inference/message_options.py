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
MANY = 20_000  # samples from which on a last layer's batches are visited once
_GROUP_ITERATIONS = 2


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
        epochs: visits of every batch; by default 18 for all layers; for a last layer 4, or 1 from 20,000 samples
            on.
        iterations: in a visit; by default 2 for groups, and else ``ceil(epoch / 2)``.
        group_size: examples whose messages to a last layer with the diagonal posterior are made together, with the
            correlations of their logits (`posthoc_uq.message_passing.groups`), which needs no damping; 1 for messages
            one by one, as the paper has them.
        batch_size: examples of a batch where messages are made one by one; these are kept during a visit, and after it
            only their sum.
        chunk_size: examples that pass at the same time; 1 is the paper's schedule.
        message_damping: share of a new message to a weight; by default ``min(1, 2 / chunk_size)``.
        regularize: pull the label's logit towards 1 and the others towards -1 as well, for the signal ``"argmax"``.
        matmul: in layers of 128 inputs and more, messages by matrix products alone, which is faster and leaves out
            terms of about one over the number of inputs.
        matched_temperature: give a last layer's posterior over classes the temperature, and where that is not enough
            the scale, at which it predicts the data of the fit as the network does, where its own are far less sure
            (`posthoc_uq.inference.message_temperature`).
    """

    layers: Literal["last", "all"] = "last"
    posterior: Literal["diagonal", "full"] = "diagonal"
    signal: Literal["auto", "softargmax", "argmax"] = "auto"
    prior: Literal["zero", "spectral", "pretrained"] | None = None
    prior_factor: float = 0.1
    consistent_prior: bool = False
    epochs: int | None = None
    iterations: int | None = None
    group_size: int = 64
    batch_size: int = 320
    chunk_size: int = 1
    message_damping: float | None = None
    regularize: bool = False
    matmul: bool = False
    matched_temperature: bool = True

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("epochs", "iterations", "group_size", "batch_size", "chunk_size"), COUNT)
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

    @property
    def grouped(self) -> bool:
        """Whether messages are made in groups."""
        return self.layers == LAST and self.group_size > 1

    def schedule(self, samples: int) -> Schedule:
        """Of the training on so many samples."""
        usual = 1 if self.layers == LAST and samples >= MANY else _EPOCHS[self.layers]
        iterations = _GROUP_ITERATIONS if self.grouped and self.iterations is None else self.iterations
        return Schedule(
            epochs=usual if self.epochs is None else self.epochs,
            iterations=iterations,
            chunk_size=self.chunk_size,
            message_damping=self.message_damping,
            shuffle=True,
        )
