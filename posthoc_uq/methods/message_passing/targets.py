"""Training signals as objects: the message that a batch of targets sends to the outputs, and how wrong the outputs are.

Outputs are ``(K, N, J)``, targets ``(N, J)`` for a regression and labels ``(N,)`` otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.methods.message_passing import signals
from posthoc_uq.methods.message_passing.gaussian import Message


class Signal(Protocol):
    """What the targets say of the outputs."""

    def message(self, before: Message, targets: Tensor) -> Message:
        """To the outputs, ``(K, N, J)``."""
        ...

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """A sum over the examples that tells how wrong the means of the outputs are, ``(K,)``."""
        ...

    def usual(self, targets: Tensor) -> float:
        """The error of an example, on average, where the outputs say nothing."""
        ...


@dataclass(frozen=True)
class Regression:
    """``N(target, noise_variance)``.

    Attributes:
        noise_variance: a number, or a tensor ``(J,)``.
    """

    noise_variance: float | Tensor

    def message(self, before: Message, targets: Tensor) -> Message:
        """To the outputs."""
        return signals.regression(targets.expand(before.tau.shape), self.noise_variance)

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """Absolute errors."""
        return (before.mean - targets).abs().mean(-1).sum(-1)

    def usual(self, targets: Tensor) -> float:
        """The mean size of the targets and of the noise."""
        noise = torch.as_tensor(self.noise_variance, device=targets.device)
        return float(targets.abs().mean()) + float(noise.sqrt().mean())


@dataclass(frozen=True)
class Softargmax:
    """A label drawn by the softmax of the outputs; by the sigmoid of a single one."""

    def message(self, before: Message, targets: Tensor) -> Message:
        """To the outputs."""
        rule = signals.logistic if before.tau.shape[-1] == 1 else signals.softargmax
        return rule(before, targets)

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """Negative log likelihoods of the means."""
        return _negative_log(before.mean, targets)

    def usual(self, targets: Tensor) -> float:
        """That of one of many classes."""
        return log(10)


@dataclass(frozen=True)
class Argmax:
    """The label's output is, with noise, the largest; a single one is above or below zero.

    Attributes:
        noise_variance: of the noise.
        scale_losers: see `posthoc_uq.methods.message_passing.signals.argmax`.
        regularize: likewise.
    """

    noise_variance: float = signals.NOISE_VARIANCE
    scale_losers: bool = True
    regularize: bool = False

    def message(self, before: Message, targets: Tensor) -> Message:
        """To the outputs."""
        if before.tau.shape[-1] == 1:
            return signals.threshold(before, targets, noise_variance=self.noise_variance)
        return signals.argmax(
            before,
            targets,
            noise_variance=self.noise_variance,
            scale_losers=self.scale_losers,
            regularize=self.regularize,
        )

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """Negative log likelihoods of the means, as if by the softmax."""
        return _negative_log(before.mean, targets)

    def usual(self, targets: Tensor) -> float:
        """That of one of many classes."""
        return log(10)


def _negative_log(means: Tensor, labels: Tensor) -> Tensor:
    if means.shape[-1] == 1:
        sign = 2.0 * labels.to(means) - 1
        return F.softplus(-sign * means[..., 0]).sum(-1)
    index = labels.expand(means.shape[:-1]).unsqueeze(-1)
    return -means.log_softmax(-1).gather(-1, index)[..., 0].sum(-1)
