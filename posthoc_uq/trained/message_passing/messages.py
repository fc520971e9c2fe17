"""Gaussian messages, and the factors that send them: sums, linear layers, LeakyReLUs and targets, on plain tensors.

A message of mean ``mu`` and variance ``v`` is kept in natural parameters, ``tau = mu / v`` and the precision
``rho = 1 / v``, without its scale. With ``rho = 0`` and ``tau = 0`` it is uniform: it carries no information, and its
mean is defined as 0. Tensors hold one message an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import ceil, log, pi, sqrt
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError

_MAX_NUMBERS = 2**17  # in a temporary of the largest computations: what a processor's cache holds
MIN_PRECISION = 1e-8
"""The least precision of a message that is passed on."""
NOISE_VARIANCE = 0.3
"""Of the noise in the comparison of two outputs (argmax) or in that of one with zero."""


class Message(NamedTuple):
    """Gaussian messages of one shape.

    Attributes:
        tau: mean times precision.
        rho: precision.
    """

    tau: Tensor
    rho: Tensor

    @property
    def mean(self) -> Tensor:
        """``tau / rho``; 0 where the precision is 0."""
        return torch.where(self.rho == 0, 0.0, self.tau / self.rho)

    @property
    def variance(self) -> Tensor:
        return self.rho.reciprocal()

    @property
    def finite(self) -> Tensor:
        """Where both numbers are finite."""
        return torch.isfinite(self.tau) & torch.isfinite(self.rho)


def from_moments(mean: Tensor, variance: Tensor) -> Message:
    return Message(mean / variance, variance.reciprocal())


def uniform_like(tensor: Tensor) -> Message:
    """Messages without information, in the shape of a tensor."""
    return Message(torch.zeros_like(tensor), torch.zeros_like(tensor))


def multiply(a: Message, b: Message) -> Message:
    """The product of densities."""
    return Message(a.tau + b.tau, a.rho + b.rho)


def divide(a: Message, b: Message) -> Message:
    """The quotient of densities; a Gaussian where the precision of `a` is at least that of `b`."""
    return Message(a.tau - b.tau, a.rho - b.rho)


def clamp(message: Message) -> Message:
    """Precisions below `MIN_PRECISION` raised to it, with the same means."""
    low = message.rho < MIN_PRECISION
    return Message(
        torch.where(low, message.mean * MIN_PRECISION, message.tau), message.rho.clamp(min=MIN_PRECISION)
    )


def damp(old: Message, new: Message, share: float) -> Message:
    """``(1 - share) old + share new`` in natural parameters."""
    if share == 1:
        return new
    return Message(old.tau.lerp(new.tau, share), old.rho.lerp(new.rho, share))


def select(condition: Tensor, a: Message, b: Message) -> Message:
    """`a` where the condition holds, else `b`."""
    return Message(torch.where(condition, a.tau, b.tau), torch.where(condition, a.rho, b.rho))


def log_density(x: Tensor, mean: Tensor | float, variance: Tensor) -> Tensor:
    """The log density of ``N(mean, variance)``."""
    return -0.5 * ((x - mean).square() / variance + variance.log() + log(2 * pi))


def log_overlap(a: Message, b: Message) -> Tensor:
    """The logarithm of the integral of the product of two densities, ``N(mu_a; mu_b, v_a + v_b)``."""
    return log_density(a.mean, b.mean, a.variance + b.variance)


# Gaussians cut at zero, in a form that is exact far out in the tails, and mixtures of two of them.

_TAIL = -40.0  # below it the variance by the closed form loses digits, and a series has all of them


class Branch(NamedTuple):
    """One part of a mixture.

    Attributes:
        mean: of the part.
        variance: of the part.
        log_weight: the logarithm of its mass.
    """

    mean: Tensor
    variance: Tensor
    log_weight: Tensor


def hazard(x: Tensor) -> Tensor:
    """``phi(x) / Phi(x)``, the density over the distribution function of a standard normal variable."""
    return sqrt(2 / pi) / torch.special.erfcx(-x / sqrt(2))


def truncated_moments(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``N(mean, deviation^2)`` restricted to ``(0, inf)``."""
    x = mean / deviation
    ratio = hazard(x)
    far = x < _TAIL
    inverse = (-x.clamp(max=_TAIL)).reciprocal()
    square = inverse.square()
    first = torch.where(far, inverse * (1 - 2 * square + 10 * square.square()), x + ratio)
    second = torch.where(far, square * (1 - 6 * square + 50 * square.square()), 1 - ratio * (ratio + x))
    return deviation * first, deviation.square() * second


def above_zero(mean: Tensor, variance: Tensor, log_prefactor: Tensor | float = 0.0) -> Branch:
    """``N(mean, variance)`` restricted to ``(0, inf)``, with the log of its mass on top of `log_prefactor`."""
    deviation = variance.sqrt()
    log_mass = torch.special.log_ndtr(mean / deviation)
    return Branch(*truncated_moments(mean, deviation), log_mass + log_prefactor)


def below_zero(
    mean: Tensor, variance: Tensor, log_prefactor: Tensor | float = 0.0, slope: float = 1.0
) -> Branch:
    """The same for ``(-inf, 0)``, of `slope` times the variable; with the slope 0 all mass is at 0."""
    if slope == 0:
        log_weight = torch.special.log_ndtr(-mean / variance.sqrt()) + log_prefactor
        zero = torch.zeros_like(log_weight)
        return Branch(zero, zero, log_weight)
    mirrored = above_zero(-mean, variance, log_prefactor)
    return Branch(-slope * mirrored.mean, slope**2 * mirrored.variance, mirrored.log_weight)


def mix(a: Branch, b: Branch) -> Branch:
    """Mean, variance and log mass of two parts together."""
    total = torch.logaddexp(a.log_weight, b.log_weight)
    share_a, share_b = (a.log_weight - total).exp(), (b.log_weight - total).exp()
    mean = share_a * a.mean + share_b * b.mean
    variance = share_a * (a.variance + (a.mean - mean).square())
    variance = variance + share_b * (b.variance + (b.mean - mean).square())
    return Branch(mean, variance, total)


# LeakyReLU, ``a = z`` for positive ``z`` and ``a = slope z`` for negative; a ReLU has the slope 0. ``before`` is the
# message to the input ``z``, of positive precision; ``after`` is the one to the output ``a`` from the layers behind.

MIN_MASS = 1e-8
"""The integral below which the paper takes the direct forward message; it is a density, so it depends on the scale of
the data."""
_MIN_VARIANCE = (
    1e-12  # of a match, as a share of the input's: where all mass is at an atom the variance vanishes
)
_TINY = 1e-300  # in place of a precision of 0, whose results are not used


def moments_of_output(mean: Tensor, variance: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output for an input ``N(mean, variance)``."""
    match = mix(above_zero(mean, variance), below_zero(mean, variance, slope=slope))
    return match.mean, torch.maximum(match.variance, _MIN_VARIANCE * variance)


def direct_forward(before: Message, slope: float) -> Message:
    """The message to the output that matches the moments of the output itself."""
    return from_moments(*moments_of_output(before.mean, before.variance, slope))


def match_of(before: Message, after: Message, slope: float, *, output: bool) -> Branch:
    """Mean, variance and log mass of the marginal of the output, or of the input; the mass of both is the same."""
    above, below = (
        multiply(before, after),
        multiply(before, Message(slope * after.tau, slope**2 * after.rho)),
    )
    upper = above_zero(above.mean, above.variance, log_overlap(before, after))
    overlap = log_density(slope * before.mean, after.mean, slope**2 * before.variance + after.variance)
    return mix(upper, below_zero(below.mean, below.variance, overlap, slope if output else 1.0))


def activation_forward(before: Message, after: Message, slope: float) -> Message:
    """The message to the output: the marginal divided by `after`, or the direct one where that is not safe."""
    partner = Message(after.tau, after.rho.clamp(min=_TINY))
    match = match_of(before, partner, slope, output=True)
    # a match that is almost an atom keeps a variance of its own
    variance = torch.maximum(match.variance, _MIN_VARIANCE * before.variance)
    message = divide(from_moments(match.mean, variance), after)
    unsafe = (after.rho <= 0) | ~message.finite | (message.rho < before.rho)
    unsafe = unsafe | ~(match.log_weight >= log(MIN_MASS))
    return select(unsafe, direct_forward(before, slope), _without_nan(message))


def activation_backward(before: Message, after: Message, slope: float) -> Message:
    """The message to the input, with a precision of 1e-8 at least."""
    partner = Message(after.tau, after.rho.clamp(min=_TINY))
    match = match_of(before, partner, slope, output=False)
    rho = torch.maximum(before.rho + MIN_PRECISION, match.variance.reciprocal())
    message = divide(Message(match.mean * rho, rho), before)
    uniform = (after.rho <= 0) | ((after.tau < 0) & (after.rho < 2 * MIN_PRECISION)) | ~message.finite
    return clamp(select(uniform, uniform_like(before.tau), _without_nan(message)))


def _without_nan(message: Message) -> Message:
    """Numbers that are not finite replaced, so that they cannot spoil what is select in their place."""
    return Message(*(torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in message))


# Sums and layers with weights. A layer multiplies rows ``(K, N, G, P, I)`` by matrices ``(K, 1, G, J, I)``: K networks,
# N examples, G groups of a convolution, P positions of an example (1 but for convolutions), I inputs, J outputs. The
# bias is the last column of a matrix, and its input the constant 1. All weights are independent.


def sum_forward(coefficients: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``sum_i c_i v_i`` over the last dimension."""
    return (coefficients * mean).sum(-1), (coefficients.square() * variance).sum(-1)


def sum_backward(coefficients: Tensor, mean: Tensor, variance: Tensor, back: Message) -> Message:
    """Messages from a sum to its parts, ``(..., parts)``; `back`, ``(...)``, is the message to the sum."""
    whole_mean, whole_variance = sum_forward(coefficients, mean, variance)
    others = whole_mean.unsqueeze(-1) - coefficients * mean
    spread = whole_variance.unsqueeze(-1) - coefficients.square() * variance
    part = sum_to_part(Message(back.tau.unsqueeze(-1), back.rho.unsqueeze(-1)), others, spread)
    return Message(coefficients * part.tau, coefficients.square() * part.rho)


def sum_to_part(back: Message, others: Tensor, spread: Tensor) -> Message:
    """The message from a sum to a part with the coefficient 1, where `others` and `spread` are the mean and the
    variance of all other parts. The inverse of the precision of `back` is not formed, so that it may be 0.
    """
    scale = 1 + back.rho * spread
    return Message((back.tau - back.rho * others) / scale, back.rho / scale)


class Products(NamedTuple):
    """Inputs of a layer, and its weights.

    Attributes:
        input_mean: of the inputs' marginals as rows ``(K, N, G, P, I)``; constants have no variance.
        input_variance: likewise; None where all inputs are constants.
        weight_mean: ``(K, 1, G, J, I)``, or ``(K, N, ...)``: of the marginals of weights whose inputs are uncertain, of
            the cavities of those whose inputs are constants, as a bias.
        weight_variance: likewise.
    """

    input_mean: Tensor
    input_variance: Tensor | None
    weight_mean: Tensor
    weight_variance: Tensor

    def forward(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs, ``(K, N, G, P, J)``."""
        mean = self.input_mean @ self.weight_mean.mT
        variance = self.input_mean.square() @ self.weight_variance.mT
        if self.input_variance is None:
            return mean, variance
        second = self.weight_variance + self.weight_mean.square()
        return mean, variance + self.input_variance @ second.mT

    def backward(self, mean: Tensor, variance: Tensor, back: Message) -> tuple[Message | None, Message]:
        """Messages to the rows of uncertain inputs ``(K, N, G, P, I)``, not clamped, and to the weights
        ``(K, N, G, J, I)``, summed over positions.

        Args:
            mean: of the outputs, from `forward`.
            variance: likewise.
            back: the messages to the outputs, ``(K, N, G, P, J)``.
        """
        outputs, numbers = mean.shape[-1], self.input_mean.numel()
        block = max(1, _MAX_NUMBERS // numbers) if mean.device.type == "cpu" else outputs
        parts = [
            self._block_backward(slice(start, start + block), mean, variance, back)
            for start in range(0, outputs, block)
        ]
        to_weights = Message(
            *(torch.cat(each, -2) for each in zip(*(told for _, told in parts), strict=True))
        )
        to_rows = [told for told, _ in parts if told is not None]
        return (reduce(multiply, to_rows) if to_rows else None), to_weights

    def _block_backward(
        self, block: slice, mean: Tensor, variance: Tensor, back: Message
    ) -> tuple[Message | None, Message]:
        """The same for a block of the outputs, whose share of the message to the rows it gives."""
        x = self.input_mean.unsqueeze(-2)
        w, w_variance = (part[..., block, :].unsqueeze(-3) for part in self[2:])
        x_second = x.square()
        product_variance = x_second * w_variance
        w_second = None
        if self.input_variance is not None:
            x_variance, w_second = self.input_variance.unsqueeze(-2), w_variance + w.square()
            product_variance = product_variance + x_variance * w_second
            x_second = x_second + x_variance
        field, precision = sum_to_part(
            Message(*(part[..., block].unsqueeze(-1) for part in back)),
            mean[..., block].unsqueeze(-1) - x * w,
            variance[..., block].unsqueeze(-1) - product_variance,
        )
        to_weights = Message((x * field).sum(-3), (x_second * precision).sum(-3))
        if w_second is None:
            return None, to_weights
        return Message((w * field).sum(-2), (w_second * precision).sum(-2)), to_weights


# Targets: the messages that a batch of them sends to the outputs ``(K, N, J)`` of K networks. Targets are ``(N, J)``
# for a regression and labels ``(N,)`` otherwise.

_WIDTH = 8.0  # standard deviations to each side of the match that the quadrature covers
_MAX_SHIFT = 7.0  # standard deviations that a match whose integral counts is moved at most
_SPACING = 0.4  # of the nodes, in deviations of the output and in units of it; closer ones change nothing
_MAX_DEVIATION = 1e4  # deviation of an output, from which on its nodes are farther apart
_MIN_INTEGRAL = 1e-12  # of a label's likelihood; below it the message is uniform
_NEGATIVE_BY_ROUNDING = -0.1  # of a label's message: rounding


class Signal(Protocol):
    """What a kind of targets says of the outputs."""

    def message(self, before: Message, targets: Tensor) -> Message:
        """To the outputs, for the messages `before` to them."""
        ...

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """A sum over the examples that tells how wrong the means of the outputs are, ``(K,)``."""
        ...

    def uninformed_error(self, targets: Tensor) -> float:
        """The error of an example, on average, where nothing is known of the outputs."""
        ...


@dataclass(frozen=True)
class Regression:
    """``N(target, noise_variance)``.

    Attributes:
        noise_variance: a number, or a tensor ``(J,)``.
    """

    noise_variance: float | Tensor

    def message(self, before: Message, targets: Tensor) -> Message:
        values = targets.expand(before.tau.shape)
        rho = torch.ones_like(values) / self.noise_variance
        return Message(values * rho, rho)

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """Absolute errors."""
        return (before.mean - targets).abs().mean(-1).sum(-1)

    def uninformed_error(self, targets: Tensor) -> float:
        """The mean size of the targets and of the noise."""
        noise = torch.as_tensor(self.noise_variance, device=targets.device)
        return float(targets.abs().mean()) + float(noise.sqrt().mean())


class _LabelSignal:
    """The error of outputs as logits."""

    def error(self, before: Message, targets: Tensor) -> Tensor:
        """Negative log likelihoods of the means, as if by the softmax."""
        means = before.mean
        if means.shape[-1] == 1:
            sign = 2.0 * targets.to(means) - 1
            return F.softplus(-sign * means[..., 0]).sum(-1)
        index = targets.expand(means.shape[:-1]).unsqueeze(-1)
        return -means.log_softmax(-1).gather(-1, index)[..., 0].sum(-1)

    def uninformed_error(self, targets: Tensor) -> float:
        """That of one of many classes."""
        return log(10)


@dataclass(frozen=True)
class Argmax(_LabelSignal):
    """The label's output, with noise of variance 0.3, is the largest; a single one is above or below zero (probit).

    The message to another output than the label's is multiplied by the probability that the label already wins.

    Attributes:
        regularize: draw the label's output to 1 and the others to -1 as well, with a precision of 10.
    """

    regularize: bool = False

    def message(self, before: Message, targets: Tensor) -> Message:
        mean, variance = before.mean, before.variance
        if mean.shape[-1] == 1:
            sign = 2.0 * targets.to(mean).unsqueeze(-1) - 1
            back = truncation_message(from_moments(sign * mean, variance + NOISE_VARIANCE))
            message = sum_to_part(back, torch.zeros_like(mean), torch.full_like(mean, NOISE_VARIANCE))
            return Message(sign * message.tau, message.rho)
        target = F.one_hot(targets, mean.shape[-1]).bool().expand(mean.shape)
        index = targets.unsqueeze(-1).expand(*mean.shape[:-1], 1)
        top_mean, top_variance = mean.gather(-1, index), variance.gather(-1, index)
        gap, spread = top_mean - mean, top_variance + variance + NOISE_VARIANCE
        back = truncation_message(from_moments(gap, spread))
        to_top = sum_to_part(back, gap - top_mean, spread - top_variance)
        winner = Message(*(part.masked_fill(target, 0.0).sum(-1, keepdim=True) for part in to_top))
        to_other = sum_to_part(back, gap + mean, spread - variance)
        share = torch.special.ndtr(gap / spread.sqrt())
        message = select(target, winner, Message(-to_other.tau * share, to_other.rho * share))
        if self.regularize:
            drawn = torch.where(target, 1.0, -1.0).to(mean)
            message = multiply(message, from_moments(drawn, torch.full_like(drawn, 0.1)))
        return message


@dataclass(frozen=True)
class Softargmax(_LabelSignal):
    """A label drawn by the softmax of the outputs, with the other outputs fixed at `softened`; by the sigmoid of a
    single one.
    """

    def message(self, before: Message, targets: Tensor) -> Message:
        mean = before.mean
        if mean.shape[-1] == 1:
            zero, positive = torch.zeros_like(mean), targets.bool().unsqueeze(-1).expand(mean.shape)
            return _by_quadrature(before, zero, zero, positive)
        soft = soften(mean, before.variance)
        target = F.one_hot(targets, mean.shape[-1]).bool().expand(mean.shape)
        diagonal = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
        spread = soft.unsqueeze(-2).expand(*soft.shape, soft.shape[-1])
        rest = spread.masked_fill(diagonal, -torch.inf).logsumexp(-1)  # of all but each
        top = soft.gather(-1, targets.unsqueeze(-1).expand(*mean.shape[:-1], 1))
        return _by_quadrature(before, rest, torch.where(target, torch.zeros_like(soft), top), target)


def soften(mean: Tensor, variance: Tensor) -> Tensor:
    """``mean / sqrt(1 + pi / 8 variance)``, whose softmax approximates the mean of the softmax."""
    return mean / (1 + pi / 8 * variance).sqrt()


def winning_shares(mean: Tensor, variance: Tensor) -> Tensor:
    """Soft selection over the last dimension: the normalised products of the pairwise probabilities of being larger."""
    gap = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2) + NOISE_VARIANCE
    logs = torch.special.log_ndtr(gap / spread.sqrt())
    diagonal = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    return logs.masked_fill(diagonal, 0.0).sum(-1).softmax(-1)


def truncation_message(before: Message) -> Message:
    """The message of ``d > 0`` to ``d``: the match of the cut Gaussian, divided by the message from ``d``."""
    root = before.rho.sqrt()
    t = before.tau / root
    ratio, (mean, left) = hazard(t), truncated_moments(t, torch.ones_like(t))
    lost = torch.where(t < 0, 1 - left, ratio * (ratio + t))
    # mean / left - t; for positive t, where both are large, without their difference
    field = torch.where(t < 0, mean / left - t, (t * lost + ratio) / left)
    return Message(root * field, before.rho * lost / left)


def _by_quadrature(before: Message, rest: Tensor, top: Tensor, target: Tensor) -> Message:
    """The marginal message of ``L(z) = e^z / (e^z + e^rest)`` where `target` holds, and elsewhere of ``e^top / (e^z +
    e^rest)``, by the trapezoid rule.

    Raises:
        PosthocUQError: a message has a clearly negative precision.
    """
    mean, deviation = before.mean, before.variance.sqrt()
    # both are e^gain sigmoid(sign (z - rest)); where the sigmoid underflows the integral is below what counts
    sign = torch.where(target, 1.0, -1.0).to(mean)
    gain = torch.where(target, torch.zeros_like(mean), top - rest).exp()
    mass, shift, width = _sigmoid_moments(sign * (mean - rest), sign * deviation)
    message = divide(from_moments(mean + deviation * shift, deviation.square() * width), before)
    counts = (gain * mass >= _MIN_INTEGRAL) & message.finite
    message = select(counts, message, uniform_like(mean))
    if bool((message.rho < _NEGATIVE_BY_ROUNDING).any()):
        raise PosthocUQError(
            f"A label gives an output a message of precision {float(message.rho.min()):.3g}, which must not be "
            f"negative; bring the features to about unit size, or use signal='argmax'."
        )
    return Message(message.tau, message.rho.clamp(min=0))


def _sigmoid_moments(center: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The integral of ``sigmoid(center + slope x) N(x; 0, 1)``, and mean and variance of x under it."""
    flat = [part.reshape(-1) for part in (center, slope)]
    step = max(1, _MAX_NUMBERS // _grid(slope)[1])
    pieces = zip(*(part.split(step) for part in flat), strict=True)
    found = [_moments_of_piece(*piece) for piece in pieces] or [(flat[0],) * 3]
    mass, mean, variance = (torch.cat(parts).reshape(center.shape) for parts in zip(*found, strict=True))
    return mass, mean, variance


def _moments_of_piece(center: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width, nodes = _grid(slope)
    x = torch.linspace(-width, width, nodes, dtype=center.dtype, device=center.device)
    weights = (slope.unsqueeze(1) * x).add_(center.unsqueeze(1)).sigmoid_().mul_((-0.5 * x.square()).exp())
    total, first = (weights @ torch.stack([torch.ones_like(x), x], 1)).unbind(1)
    mean = first / total
    variance = (x - mean.unsqueeze(1)).square_().mul_(weights).sum(1) / total
    return total * (x[1] - x[0]) / (2 * pi) ** 0.5, mean, variance


def _grid(slope: Tensor) -> tuple[float, int]:
    """Half the length of the trapezoid rule and its nodes, an odd number, for the widest output: a sigmoid moves the
    mean by its deviation at most.
    """
    widest = float(slope.abs().max()) if slope.numel() else 1.0
    widest = min(widest, _MAX_DEVIATION) if widest == widest else 1.0
    width = _WIDTH + min(widest, _MAX_SHIFT)
    return width, 2 * ceil(width * max(widest, 1.0) / _SPACING) + 1
