"""Training by messages: the trainer that counts every example once, and the messages of many examples to one layer.

The posterior is ``Q = prior * prod_b G_b`` with one aggregated message a batch. To work on a batch, its old ``G_b`` is
divided out; the messages of its examples begin without information, so that inside of the batch all evidence is new;
and ``Q`` takes the new ``G_b`` in the place of the old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, sqrt
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from posthoc_uq.core import interrupts
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import all_finite, cholesky
from posthoc_uq.core.options import Natural, Share, check_option
from posthoc_uq.methods.checkpoint import State
from posthoc_uq.posteriors.laplace import LARGEST_BYTES
from posthoc_uq.trained.message_passing.messages import (
    MIN_PRECISION,
    Argmax,
    Message,
    Regression,
    Signal,
    clamp,
    damp,
    divide,
    from_moments,
    multiply,
    uniform_like,
)
from posthoc_uq.trained.message_passing.network import ByStage, StageMemory, Stages, pass_messages

# Priors over the weights of a layer: the size of the drawn means, and variances that keep the size of activations. The
# constants are moments of a LeakyReLU with the slope 0.1 of ``z ~ N(mu, 2)``, ``mu ~ N(0, 1)``: the mean variance of
# its output, and what the paper takes for its mean square, ``s^2 (1 + m^2)``.

OUTPUT_VARIANCE = 0.8040586726631379
OUTPUT_SQUARE = 0.44958619556324186
SUM_VARIANCE = 1.5  # of the sums in a layer
BIAS_VARIANCE = 0.5


def mean_deviation(inputs: int, outputs: int) -> float:
    """``l``, the standard deviation of the drawn means (a spectral parametrisation)."""
    return min(1.0, sqrt(outputs / inputs)) / sqrt(inputs)


def weight_variance(inputs: int, outputs: int, *, first: bool = False) -> float:
    """The prior variance of a weight.

    Args:
        inputs: of the layer; of a convolution, those of a patch.
        outputs: of the layer; of a convolution, with all its positions.
        first: whether the inputs are constants.
    """
    if first:
        return SUM_VARIANCE / inputs
    above = SUM_VARIANCE - OUTPUT_VARIANCE * min(1.0, outputs / inputs)
    return above / (OUTPUT_VARIANCE + OUTPUT_SQUARE * inputs)


def drawn_means(
    matrices: int, units: int, inputs: int, outputs: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Prior means of so many matrices, ``(matrices, units, inputs)`` in float64, drawn once. With all means 0 hidden
    units would stay alike for ever.

    Args:
        matrices: one a network and group.
        units: outputs of a matrix.
        inputs: of a matrix, the bias not counted.
        outputs: as in `weight_variance`.
        generator: on the CPU.
        device: of the means.
    """
    normals = torch.randn(matrices, inputs, units, generator=generator, dtype=torch.float64, device="cpu")
    return (normals.mT * mean_deviation(inputs, outputs)).to(device)


# The trainer

TrainingPairs = Sequence[tuple[Tensor, Tensor]]
"""Batches: inputs ``(N, ...)`` of the first layer in float64, and targets."""

_MAX_GROWTH = 10.0  # times the error at the start, from which on messages diverge
_MAX_RETRIES = 4  # of a visit whose messages diverge, each with half of the share of a new message


class Diverged(Exception):
    """The messages of a visit diverge; the text says how."""


def batch_damping(epoch: int) -> float:
    """The share of a batch's new message in epoch 1, 2, ...: from 1 down to 0.9."""
    return 0.9 + 0.1 * exp(-0.3 * (epoch - 1))


@dataclass
class Trainer:
    """Trains K networks that share the data.

    Attributes:
        stages: of the network, whose examples pass one after the other; None for one linear layer whose batches send
            their messages together (`group_message`).
        prior: of its weights, by stage: ``(K, G, J, I)``, or ``(J, I)`` for one linear layer.
        data: the batches.
        signal: of the targets.
        epochs: visits of every batch.
        iterations: in a visit; None for ``ceil(epoch / 2)``.
        seed: of all orders.
        evidence: the aggregated message of every batch, ``G_b``; in a single epoch nothing divides it out again, and
            it is not kept.
        posterior: ``Q``.
        share: of a new message to a weight at present.
        restarts: visits that began anew.
        epoch: epochs that are finished.
        left: batches that are still to be visited in the present epoch, in their order; None before it begins.
    """

    stages: Stages | None
    prior: ByStage
    data: TrainingPairs
    signal: Signal
    epochs: int = 1
    iterations: int | None = None
    seed: int = 0
    evidence: list[ByStage] = field(init=False)
    posterior: ByStage = field(init=False)
    share: float = field(init=False, default=1.0)
    restarts: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)
    left: list[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        empty = {index: uniform_like(like.rho) for index, like in self.prior.items()}
        self.evidence = [empty for _ in self.data]
        self.posterior = self.prior
        self._generator = torch.Generator().manual_seed(self.seed)
        self._start: Tensor | None = None  # the error of an example under the prior, (K,)

    def run(self, after_visit: Callable[[], None] | None = None) -> ByStage:
        """The posterior after all epochs.

        Args:
            after_visit: called after every batch.

        Raises:
            PosthocUQError: messages diverge, with any damping.
        """
        while self.epoch < self.epochs:
            if self.left is None:
                order = torch.randperm(len(self.data), generator=self._generator, device="cpu")
                self.left = cast("list[int]", order.tolist())
            while self.left:
                self.visit(self.left[0], self.epoch + 1)
                self.left = self.left[1:]
                if after_visit is not None:
                    after_visit()
            if self.epochs > 1:
                self.posterior = self.assembled()
            self.epoch, self.left = self.epoch + 1, None
        return self.posterior

    def state_dict(self) -> State:
        """All that the training goes on from after a visit."""
        return {
            "epoch": self.epoch,
            "left": self.left,
            "share": self.share,
            "restarts": self.restarts,
            "start": self._start,
            "generator": self._generator.get_state(),
            "posterior": tree_leaves(self.posterior),
            "evidence": tree_leaves(self.evidence) if self.epochs > 1 else [],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there.

        Raises:
            ValueError: the state is that of another network or other batches.
        """
        self.epoch = check_option("epoch", state["epoch"], Natural)
        self.left = check_option("left", state["left"], list[Natural] | None)
        self.share = check_option("share", state["share"], Share)
        self.restarts = check_option("restarts", state["restarts"], Natural)
        left = self.left or []
        if (
            self.epoch > self.epochs
            or len(set(left)) < len(left)
            or not set(left) <= set(range(len(self.data)))
        ):
            raise ValueError(f"{len(left)} batches left in epoch {self.epoch} cannot be")
        rho = self.prior[0].rho
        if state["start"] is not None:
            self._start = _restored(rho.new_zeros(len(rho)), [state["start"]])
        self._generator.set_state(state["generator"])
        self.posterior = _restored(self.posterior, state["posterior"])
        if self.epochs > 1:
            self.evidence = _restored(self.evidence, state["evidence"])

    def assembled(self) -> ByStage:
        """The prior times the aggregated messages of all batches."""
        total = self.prior
        for message in self.evidence:
            total = {index: multiply(total[index], message[index]) for index in total}
        return total

    def visit(self, place: int, epoch: int) -> None:
        """Work on one batch, and put its new message in the place of the old one.

        Raises:
            PosthocUQError: messages diverge, with any damping.
        """
        interrupts.check()
        old = self.evidence[place]
        cavity = {index: divide(self.posterior[index], old[index]) for index in old}
        inputs, targets = self.data[place]
        order = torch.randperm(len(targets), generator=self._generator, device="cpu").to(inputs.device)
        iterations = ceil(epoch / 2) if self.iterations is None else self.iterations
        new = self._batch_message(inputs[order], targets[order], cavity, iterations)
        share = batch_damping(epoch)
        message = {index: damp(old[index], new[index], share) for index in old}
        if self.epochs > 1:
            self.evidence[place] = message
        self.posterior = {index: multiply(cavity[index], message[index]) for index in old}

    def _batch_message(self, inputs: Tensor, targets: Tensor, prior: ByStage, iterations: int) -> ByStage:
        if self.stages is None:
            message = group_message(inputs, targets, prior[0], self.signal, iterations)
            if not bool(message.finite.all()):
                raise NonFiniteError(
                    "The messages to the weights are not finite; bring the inputs to about unit size."
                )
            return {0: message}
        why: Exception = Diverged("no visit was made")
        for _ in range(_MAX_RETRIES + 1):
            try:
                return self._one_by_one(self.stages, inputs, targets, prior, iterations)
            except Diverged as reason:
                why = reason
                self.share, self.restarts = self.share / 2, self.restarts + 1
        raise PosthocUQError(
            f"The messages diverge: {why}, with {2 * self.share:.3g} as the share of a new message. Standardise the "
            f"inputs, or take layers='last'."
        )

    def _one_by_one(
        self, stages: Stages, inputs: Tensor, targets: Tensor, prior: ByStage, iterations: int
    ) -> ByStage:
        """The message of a batch to all weights, under the cavity without it.

        Raises:
            Diverged: numbers are not finite, a precision vanishes or the error grows tenfold.
        """
        networks = len(prior[0].rho)
        examples = [
            (x.expand(networks, *x.shape), y, [StageMemory() for _ in stages])
            for x, y in zip(inputs.split(1), targets.split(1), strict=True)
        ]
        if self._start is None:
            outputs = [
                (pass_messages(stages, prior, [StageMemory() for _ in stages], x)[0], y)
                for x, y, _ in examples
            ]
            self._start = torch.stack([self.signal.error(*each) for each in outputs]).sum(0) / len(targets)
        marginals, message = prior, {index: uniform_like(like.rho) for index, like in prior.items()}
        for _ in range(iterations):
            seen: list[tuple[Tensor, Tensor]] = []
            for x, y, memory in examples:
                marginals, error, least = self._example(stages, x, y, memory, marginals)
                seen.append((error, least))
            self._check(seen, targets)
            message = {index: uniform_like(part.rho) for index, part in prior.items()}
            for _, _, memory in examples:
                for index, so_far in message.items():
                    sent = memory[index].to_weights
                    assert sent is not None
                    message[index] = multiply(so_far, sent)
            marginals = {index: multiply(prior[index], message[index]) for index in prior}
        return message

    def _example(
        self, stages: Stages, x: Tensor, target: Tensor, memory: Sequence[StageMemory], marginals: ByStage
    ) -> tuple[ByStage, Tensor, Tensor]:
        """One example forward and back: the new marginals, its error, and the least precision of a cavity."""
        outputs, ways_back = pass_messages(stages, marginals, memory, x)
        error, back = self.signal.error(outputs, target), self.signal.message(outputs, target)
        new, least = dict(marginals), list[Tensor]()
        for index in reversed(range(len(stages))):
            before, to_weights = ways_back[index](back)
            if to_weights is not None:
                kept = memory[index]
                old = kept.to_weights
                if old is None:
                    change = kept.to_weights = _scaled(to_weights, self.share)
                else:
                    kept.to_weights = damp(old, to_weights, self.share)
                    change = divide(kept.to_weights, old)
                new[index] = multiply(new[index], change)
                assert kept.least_precision is not None
                least.append(kept.least_precision)
            if before is not None:
                back = before
        return new, error, torch.stack(least).min()

    def _check(self, seen: list[tuple[Tensor, Tensor]], targets: Tensor) -> None:
        """Compare the error with that under the prior, and the least precision of a cavity with 1e-8."""
        error = torch.stack([each for each, _ in seen]).sum(0) / len(targets)
        if not bool(torch.isfinite(error).all()):
            raise Diverged("outputs are not finite")
        assert self._start is not None
        start = self._start.clamp(min=self.signal.uninformed_error(targets))
        if bool((error > _MAX_GROWTH * start).any()):
            raise Diverged(f"the error grew from {float(start.max()):.3g} to {float(error.max()):.3g}")
        least = float(torch.stack([each for _, each in seen]).min())
        if not least >= MIN_PRECISION:
            raise Diverged(f"a cavity has the precision {least:.3g}")


def _scaled(message: Message, share: float) -> Message:
    return message if share == 1 else Message(*(share * part for part in message))


def _restored(like: Any, saved: list[Tensor]) -> Any:
    """Saved tensors in the form of `like`, in the order in memory that they had."""
    present, form = tree_flatten(like)
    if [(t.shape, t.dtype) for t in present] != [(t.shape, t.dtype) for t in saved]:
        raise ValueError("it has messages of other shapes")
    if not all(all_finite(tensor) for tensor in saved):
        raise ValueError("its messages are not finite")
    return tree_unflatten([t.to(like.device) for t, like in zip(saved, present, strict=True)], form)


# One linear layer over constant rows, whose outputs are jointly Gaussian: expectation propagation with scalar sites.
#
# With one full Gaussian an output, ``N(m_j, S_j)``, ``S_j^-1 = P_j + sum_n rho_nj f_n f_n^T``; the messages of the
# targets to the logits, ``(tau_nj, rho_nj)``, are its sites. A regression has sites that do not depend on the
# posterior, so that it is exact. Such a Gaussian is a `Message` too: its ``tau`` is ``(J, I)`` and its ``rho``
# ``(J, I, I)``.

SWEEPS = 200
TOLERANCE = 1e-6  # change of a site, relative to the largest one, at which expectation propagation ends
_MAX_LAST_CHANGE = 1e-2  # change of the sites in the last sweep from which on it is an error
_MIN_SHARE = 0.05
_STALLED = 20  # sweeps, after as many at the beginning, in which the change ...
_LEAST_FALL = 0.9  # ... must fall to this share
_MAX_RISES = 3  # of the change, after which sites are damped more
_MAX_NUMBERS = 2**22  # in a temporary
_MAX_ROWS = 4096  # at once


def joint_moments(message: Message) -> tuple[Tensor, Tensor]:
    """Means ``(J, I)`` and covariances ``(J, I, I)``.

    Raises:
        NonFiniteError: a precision is not positive definite.
    """
    root = cholesky(message.rho)
    mean = torch.cholesky_solve(message.tau.unsqueeze(-1), root).squeeze(-1)
    return mean, torch.cholesky_inverse(root)


def marginals(features: Tensor, posterior: Message) -> Message:
    """The marginals of the logits ``(N, J)`` of features ``(N, I)``."""
    mean, covariance = joint_moments(posterior)
    step = max(1, _MAX_NUMBERS // features.shape[1])
    variance = [
        torch.stack([((part @ matrix) * part).sum(-1) for matrix in covariance], -1)
        for part in features.split(step)
    ]
    return from_moments(features @ mean.T, torch.cat(variance))


def site_to_weight_messages(features: Tensor, sites: Message) -> Message:
    """The messages of sites ``(N, J)`` to the weights, multiplied."""
    size, outputs = features.shape[1], sites.rho.shape[1]
    step = max(1, _MAX_NUMBERS // size)
    precision = features.new_zeros(outputs, size, size)
    for part, rho in zip(features.split(step), sites.rho.split(step), strict=True):
        for index in range(outputs):
            precision[index].addmm_((part * rho[:, index : index + 1]).T, part)
    return Message(sites.tau.T @ features, precision)


def fit_sites(features: Tensor, targets: Tensor, signal: Signal, prior: Message) -> tuple[Message, Message]:
    """The sites of all targets, and their messages to the weights; covariances are refreshed once a sweep.

    Args:
        features: ``(N, I)`` in float64, a 1 for the bias included.
        targets: as `signal` takes them.
        signal: of the targets.
        prior: of the weights, without these targets.

    Raises:
        PosthocUQError: the sites do not settle.
        NonFiniteError: numbers are not finite.
    """

    def marginals_for(sites: Message) -> Message:
        return marginals(features, multiply(prior, site_to_weight_messages(features, sites)))

    start = uniform_like(features.new_zeros(len(features), prior.tau.shape[0]))
    sites = expectation_propagation(marginals_for, start, targets, signal, SWEEPS)
    return sites, site_to_weight_messages(features, sites)


def sites_within(features: Tensor, targets: Tensor, signal: Signal, posterior: Message) -> Message:
    """The sites ``(N, J)`` of targets that `posterior` already holds: those with which it is in balance.

    Args:
        features: ``(N, I)`` in float64, a 1 for the bias included.
        targets: as `signal` takes them.
        signal: of the targets.
        posterior: of all data.

    Raises:
        PosthocUQError: the sites do not settle, or carry more information than the posterior.
    """
    marginal = marginals(features, posterior)
    return expectation_propagation(
        lambda _: marginal, uniform_like(marginal.tau), targets, signal, 5 * SWEEPS
    )


def expectation_propagation(
    marginals_for: Callable[[Message], Message],
    sites: Message,
    targets: Tensor,
    signal: Signal,
    sweeps: int,
) -> Message:
    """The sites that are the targets' messages under their own cavities, where `marginals_for` gives the marginals of
    the logits for sites.

    Raises:
        PosthocUQError: they still change in the last sweep, or have long stopped to settle.
    """
    share, last, rises = 1.0, torch.inf, 0
    changes: list[float] = []
    for _ in range(sweeps):
        new = _renewed(marginals_for(sites), sites, targets, signal)
        change = _change(sites, new)
        changes.append(change)
        rises += change > last
        if rises == _MAX_RISES:
            share, rises = max(share / 2, _MIN_SHARE), 0
        sites, last = damp(sites, new, share), change
        if change <= TOLERANCE:
            return sites
        if len(changes) >= 2 * _STALLED and change > max(
            _MAX_LAST_CHANGE, _LEAST_FALL * changes[-1 - _STALLED]
        ):
            break
    if last > _MAX_LAST_CHANGE:
        # without it nothing bounds the outputs of misclassified samples, and they drift away
        check_bounds = (
            "give regularize=True, take signal='softargmax'"
            if isinstance(signal, Argmax)
            else "bring the features to about unit size"
        )
        raise PosthocUQError(
            f"The messages of the targets do not settle: sweep {len(changes)} still changed them by {last:.2g}; "
            f"{check_bounds}, raise the prior precision, or take posterior='diagonal'."
        )
    return sites


def _renewed(marginal: Message, sites: Message, targets: Tensor, signal: Signal) -> Message:
    """The messages of the targets under the cavities, ``(N, J)``."""
    cavity = divide(marginal, sites)
    if not bool((cavity.rho >= MIN_PRECISION).all()) or not bool(cavity.finite.all()):
        least = float(cavity.rho.min())
        raise PosthocUQError(
            f"Without the target of one of these samples, an output of the layer would have the precision "
            f"{least:.3g}, which must be positive. Either data go out that never came in, or the layer's inputs are "
            f"too large: bring them to about unit size."
        )
    message = signal.message(Message(*(part.unsqueeze(0) for part in cavity)), targets)
    return Message(*(part.squeeze(0) for part in message))


def _change(old: Message, new: Message) -> float:
    """The largest difference of a site, relative to the largest site."""
    parts = [(b - a).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(old, new, strict=True)]
    change = float(torch.stack(parts).max())
    if not change < torch.inf:
        raise NonFiniteError(
            "The messages of the targets are not finite; bring the features to about unit size."
        )
    return change


# Independent weights: messages of a group of examples together. The logits of a group are jointly Gaussian under the
# cavity, ``N(X m, X diag(v) X^T)``. Their sites are found by expectation propagation, and the message to a weight is
# its exact marginal under cavity and sites, divided by the cavity. A group of one example sends the messages of the
# paper. Larger groups need no damping, since the correlations of their logits are in the covariance.


def group_message(rows: Tensor, targets: Tensor, before: Message, signal: Signal, iterations: int) -> Message:
    """The messages of a group to the weights, ``(J, I)``.

    Args:
        rows: ``(N, I)`` in float64, with the bias's 1.
        targets: as `signal` takes them.
        before: the cavity, ``(J, I)``.
        signal: of the targets.
        iterations: in which the sites of the group settle.
    """
    mean, variance = before.mean, before.variance
    weighted = rows * variance.unsqueeze(1)  # (J, N, I)
    prior = weighted @ rows.T
    start = mean @ rows.T
    sites = uniform_like(start)
    logits = from_moments(start, prior.diagonal(dim1=-2, dim2=-1))
    root = torch.eye(len(rows), dtype=rows.dtype, device=rows.device).expand_as(prior)
    for _ in range(iterations):
        cavities = clamp(divide(logits, sites))
        message = signal.message(Message(*(part.T.unsqueeze(0) for part in cavities)), targets)
        sites = Message(*(part.squeeze(0).T for part in message))
        root, logits = _group_posterior(prior, start, sites)
    half = sites.rho.sqrt()
    reduction = half.unsqueeze(2) * torch.cholesky_inverse(root) * half.unsqueeze(1)
    lost = variance.square() * ((reduction @ rows) * rows).sum(1)
    after = from_moments(
        mean + variance * ((sites.tau - sites.rho * logits.mean) @ rows),
        torch.maximum(variance - lost, 1e-12 * variance),
    )
    message = divide(after, before)
    return Message(message.tau, message.rho.clamp(min=0))


def _group_posterior(prior: Tensor, start: Tensor, sites: Message) -> tuple[Tensor, Message]:
    """The Cholesky factor of ``1 + S K S`` with ``S^2`` the sites' precisions, ``(J, N, N)``, and the marginals of the
    logits, ``(J, N)``.
    """
    half = sites.rho.sqrt()
    scaled = half.unsqueeze(2) * prior
    system = scaled * half.unsqueeze(1)
    system.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root = cholesky(system)
    solved = torch.linalg.solve_triangular(root, scaled, upper=False)
    variance = prior.diagonal(dim1=-2, dim2=-1) - solved.square().sum(1)
    pull = (sites.tau - sites.rho * start).unsqueeze(2)
    change = prior @ pull - solved.transpose(1, 2) @ (solved @ pull)
    floor = 1e-12 * prior.diagonal(dim1=-2, dim2=-1)
    return root, from_moments(start + change.squeeze(2), torch.maximum(variance, floor))


def with_exact_means(
    rows: Tensor,
    targets: Tensor,
    prior: tuple[Tensor, Tensor],
    message: Message,
    signal: Regression,
) -> Message:
    """The messages of a regression to independent weights, with the means to which they converge: those of the exact
    posterior, ``(diag P + X^T X / s^2)^-1 (P mu + X^T y / s^2)``, which takes many epochs where inputs correlate. Where
    ``X^T X`` would take more than 2 GiB, they stay as they are.

    Args:
        rows: ``X``, ``(N, n)`` in float64, with the bias's 1.
        targets: ``(N, J)``.
        prior: means and precisions ``(J, n)``.
        message: the messages, ``(J, n)``.
        signal: of the targets.
    """
    size = rows.shape[1]
    if 8 * size**2 > LARGEST_BYTES // 2:
        return message
    gram = rows.new_zeros(size, size)
    for part in rows.split(_MAX_ROWS):
        gram.addmm_(part.T, part)
    gram = (gram + gram.T) / 2
    noise = as_double(torch.as_tensor(signal.noise_variance, device=rows.device)).expand(targets.shape[1])
    means: list[Tensor] = []
    for mean, precision, variance, pull in zip(*prior, noise, targets.T @ rows, strict=True):
        system = torch.diag(precision) + gram / variance
        field = (precision * mean + pull / variance).unsqueeze(1)
        means.append(torch.cholesky_solve(field, cholesky(system)).squeeze(1))
    return Message(torch.stack(means) * (prior[1] + message.rho) - prior[1] * prior[0], message.rho)
