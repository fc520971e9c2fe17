"""Gaussian logits: mean probabilities by few points, and what is an expectation over draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.devices import program_constant, without_autocast
from posthoc_uq.likelihoods.draws import LogitCovariance, normals, normals_like

_MAX_NUMBERS = 2**16  # logits at points that are computed at once, so that they stay in the cache
_MANY = 16  # with fewer points to a direction, moments are right at the cost of all else
_BEST = 16  # numbers of a point whose moments are right all the same: the first ones, the most evenly spread
_LEAST = 32  # points of very many classes
_SHARED = 4  # directions of many classes; with more, less of a class is its own, over which it is integrated
_MANY_CLASSES = 64  # from which on classes of little probability are told apart
_LIKELY = 8  # the least number of the others; then four times as many, and so on
_FINE = 32  # such classes up to which all points are taken
_TAIL = 0.03  # bound of what the approximation of all classes of little probability may be off by
_BEND = 0.1  # share of the cube of a deviation, by which the third moment of a class's logit counts
# Points of one and of two directions: their distance from each other, and the largest from zero.
_LINE = 0.25, 4.0
_PLANE = 0.5, 3.5
_SMALL = 0.01  # a variance below which a Taylor series is nearer than the mixture
# The logistic distribution as a mixture of normal ones: weights and standard deviations, fitted to it for this file.
_MIXTURE = (
    (0.10683569973, 0.97779614943),
    (0.45856983666, 1.43169858651),
    (0.37376506622, 2.10542661935),
    (0.06082939738, 3.11532590840),
)
# The mean of a sigmoid as a sigmoid, for means of at least minus half the variance: fitted to quadrature for this file.
_SCALE = 0.39420865, 0.22704663, 2.62849082
_CUBIC = 0.01870954, 1.61791042
_QUINTIC = -5.5422752e-05, 0.12066785
_FLAT = 14.0  # a sigmoid's argument from which on it is 0 or 1
_BITS = 1 / math.log(2)  # of a nat: powers of 2 take a third of the time of exponentials


def log_logistic_normal(mean: Tensor, variance: Tensor) -> Tensor:
    """``log E[sigmoid(x)]`` for ``x ~ N(mean, variance)``; see `logistic_normal`."""
    exponent, factor = logistic_normal(mean, variance)
    return exponent + factor.clamp(min=torch.finfo(mean.dtype).tiny).log()


def logistic_normal(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """``E[sigmoid(x)]`` for ``x ~ N(mean, variance)``, as ``a`` and ``b`` with ``E = exp(a) b`` and ``a <= 0``.

    ``sigmoid(x) = sum_k w_k Phi(x / s_k)``, to 5e-6 with four terms, and then ``E = sum_k w_k Phi(m / sqrt(v +
    s_k^2))`` (Monahan, Stefanski 1992). Its tail falls faster than that of a sigmoid. But ``E[sigmoid(x)] = exp(m + v /
    2) E[sigmoid(y)]`` with ``y ~ N(-m - v, v)`` is exact, and leaves means of at least ``-v / 2``, so that the
    logarithm is accurate for any mean. Below a variance of `_SMALL` it is ``sigmoid(m) + v / 2 sigmoid''(m)``, to 2e-6
    and without an error at 0: certain logits have their softmax.

    Args:
        mean: of any shape.
        variance: not negative, of a shape that fits.
    """
    inner = torch.maximum(mean, -mean - variance)
    exponent = (mean + variance / 2).clamp(max=0)
    scaled, factor = inner * -(0.5**0.5), torch.zeros_like(inner)
    for weight, deviation in _MIXTURE:
        below = torch.erfc(scaled * (variance + deviation**2).rsqrt())
        factor = torch.add(factor, below, alpha=weight / 2)
    small = variance < _SMALL
    # of many points a sixth of the time; a device would have to be waited for
    if torch.compiler.is_compiling() or small.device.type != "cpu" or bool(small.any()):
        share = inner.sigmoid()
        near = share + variance / 2 * share * (1 - share) * (1 - 2 * share)
        factor = torch.where(small, near, factor)
    return exponent, factor


class SigmoidMean:
    """``E[sigmoid(x)]`` for ``x ~ N(mean, variance)`` as in `logistic_normal`, for many means and few variances: by one
    sigmoid, ``sigmoid(y + b y^3 + c y^5)`` with ``y = a mean`` and numbers ``a``, ``b``, ``c`` of the variance, to 8e-4
    at worst, and exactly at a variance of 0.
    """

    def __init__(self, variance: Tensor) -> None:
        """
        Args:
            variance: of a shape to which that of the means is broadcast.
        """
        rest = variance / (variance + _SCALE[2])
        # of means in bits
        square = torch.add(variance * (_SCALE[0] * _BITS**2), rest, alpha=_SCALE[1] * _BITS**2)
        self._scale = square.add(_BITS**2).rsqrt()
        self._cubic = variance / (variance + _CUBIC[1]) * _CUBIC[0]
        self._quintic = variance / (variance + _QUINTIC[1]) * _QUINTIC[0]
        self.half = variance * (_BITS / 2)

    def at(self, raised: Tensor) -> tuple[Tensor, Tensor]:
        """``a`` and ``b`` with ``E = 2^a b``, as in `logistic_normal`.

        Args:
            raised: the mean in bits plus `half`.
        """
        inner = raised.abs().sub_(self.half).mul_(self._scale).clamp_(-_FLAT, _FLAT)
        square = inner.square()
        bend = (square * self._quintic).add_(self._cubic).mul_(square)
        return raised.clamp(max=0), torch.addcmul(inner, bend, inner).sigmoid_()


class GaussianLogits(NamedTuple):
    """Gaussian logits, and what a prediction of classes holds of them.

    Attributes:
        mean: ``(batch, ..., classes)``.
        spread: of the same batch.
        n_draws: for four and more classes.
    """

    mean: Tensor
    spread: LogitCovariance
    n_draws: int

    @property
    def kind(self) -> tuple[int, ...]:
        """What batches that are joined have in common: classes, directions, draws."""
        return (*self.spread.root.shape[1:], self.n_draws)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> GaussianLogits:
        """The same with every tensor changed."""
        return GaussianLogits(change(self.mean), self.spread.mapped(change), self.n_draws)

    @staticmethod
    def cat(parts: Sequence[GaussianLogits]) -> GaussianLogits:
        """Several batches of one `kind`."""
        mean, spread = (
            torch.cat([part.mean for part in parts]),
            LogitCovariance.cat([part.spread for part in parts]),
        )
        return GaussianLogits(mean, spread, parts[0].n_draws)

    def log_probs(self) -> Tensor:
        """``log E[softmax(f)]``, ``(batch, ..., classes)``.

        Softmax is averaged over points of ``z`` and ``e`` (see `LogitCovariance`). At each the probability of class c
        is integrated over what its logit varies by itself, given how the other logits differ (Rao-Blackwell):

        ``E[softmax(f)_c | f_d - f_e for d, e != c] = E[sigmoid(N(m_c - log sum_(d != c) exp f_d, rest_c))]``

        Of two classes nothing else varies, and three need one line of points for each class; see `_by_lines`. Four and
        more take `points_of`: up to ten `n_draws` points of a scrambled Sobol sequence (Owen 1998), and more classes
        half of them, or a power of two fewer, down to `_LEAST`, that keep a row within `_MAX_NUMBERS`.

        From `_MANY_CLASSES` on, classes of little probability are told apart in each row, and need no points; see
        `_faults_as_tail` and `_with_tail`.
        """
        classes, exact = self.mean.shape[-1], self.spread.given is not None
        if exact and classes == 2:
            with without_autocast(self.mean.device.type):
                logs = log_logistic_normal(self.mean - self.mean.flip(-1), self.spread.rest)
                return logs.clamp(min=torch.finfo(logs.dtype).min).log_softmax(-1)
        if exact and classes == 3:
            return self._by_rows(_by_lines, self._points(1))[0]
        if exact:
            return self._by_rows(_by_points, self._points(self.spread.width))[0]
        mean, spread = self._flat()
        with without_autocast(mean.device.type):
            logs = self._of_many(mean, spread.of_first(_SHARED))
        return logs.reshape(self.mean.shape)

    def _of_many(self, mean: Tensor, spread: LogitCovariance) -> Tensor:
        """`log_probs` of rows of many classes. How many classes count as likely is settled for each row by itself."""
        classes = mean.shape[1]
        sizes = [classes]
        if classes >= _MANY_CLASSES and not torch.compiler.is_compiling():
            sizes = [_LIKELY]
            while 7 * sizes[-1] <= classes:
                sizes.append(4 * sizes[-1])
            sizes.append(classes)
        if len(sizes) == 1:
            return self._of_all(mean, spread)
        with torch.no_grad():
            faults = _faults_as_tail(mean, spread)
        likely = (faults > _TAIL / classes).sum(1, keepdim=True)
        found = (likely > torch.tensor(sizes[:-1], device=mean.device)).sum(1).tolist()
        parts, order = list[Tensor](), list[int]()
        for place in sorted(set(found)):
            rows, own = [row for row, size in enumerate(found) if size == place], (mean, spread, faults)
            if len(rows) < len(found):
                chosen = torch.tensor(rows, device=mean.device)
                own = mean[chosen], spread.mapped(lambda part, at=chosen: part[at]), faults[chosen]
            order += rows
            if sizes[place] == classes:
                parts.append(self._of_all(*own[:2]))
            else:
                parts.append(self._of_likely(*own[:2], own[2].topk(sizes[place]).indices))
        if len(parts) <= 1:
            return parts[0] if parts else mean
        return torch.cat(parts)[torch.tensor(order, device=mean.device).argsort()]

    def _of_all(self, mean: Tensor, spread: LogitCovariance) -> Tensor:
        """`log_probs` of rows whose classes are all likely."""
        classes = mean.shape[1]
        # the first numbers of a point are the most evenly spread, and the likeliest classes take them
        order = _by_probit(mean, spread).topk(classes).indices
        ordered = GaussianLogits(*_taken(mean, spread, order), self.n_draws)
        points = self._points(spread.width, self._number(classes))
        logs = ordered._by_rows(_by_points, points)[0]
        return torch.zeros_like(logs).scatter(-1, order, logs)

    def _of_likely(self, mean: Tensor, spread: LogitCovariance, likely: Tensor) -> Tensor:
        """`log_probs` of rows whose likely classes are at `likely`, ``(rows, k)``."""
        number = likely.shape[1]
        drawn = self.n_draws if number <= _FINE else self._number(number)
        points = self._points(spread.root.shape[2] + number, drawn)
        step = max(1, _MAX_NUMBERS // (len(points[0]) * number + 8 * mean.shape[1]))
        rows = zip(mean.split(step), spread.split(step), likely.split(step), strict=True)
        found = [_with_tail(*part, *points) for part in rows]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _number(self, classes: int) -> int:
        """Points of so many classes."""
        number = (self.n_draws + 1) // 2
        while number * classes > _MAX_NUMBERS and number >= 2 * _LEAST:
            number //= 2
        return number

    def entropy_and_variance(self) -> tuple[Tensor, Tensor]:
        """Mean entropy of ``softmax(f)`` in nats, ``(batch, ...)``, and the variances of the probabilities, ``(batch,
        ..., classes)``, over 33 points for two classes, 187 for three and `n_draws` for more.
        """
        entropy, variance = self._by_rows(_entropy_and_variance, self._points(self.spread.width))
        return entropy, variance

    def entropy(self) -> Tensor:
        """The first of `entropy_and_variance`, alone."""
        return self._by_rows(_entropy, self._points(self.spread.width))[0]

    def votes(self) -> Tensor:
        """How many of `n_draws` quasi-random draws put each class first, ``(batch, ..., classes)``."""
        flat = self._flat()[0]
        points = normals_like(self.n_draws, self.spread.width, flat)

        def counts(mean: Tensor, spread: LogitCovariance, points: Tensor, weights: Tensor) -> tuple[Tensor]:
            return (votes(spread.at(mean, points).argmax(-1), mean.shape[1]),)

        return self._by_rows(counts, (points, points[:, 0]))[0]

    def _flat(self) -> tuple[Tensor, LogitCovariance]:
        """As rows of classes."""
        if self.mean.ndim == 2:
            return self.mean, self.spread
        root, rest, given = self.spread
        rows = root.flatten(0, -3), rest.flatten(0, -2), None if given is None else given.flatten(0, -3)
        return self.mean.flatten(0, -2), LogitCovariance(*rows)

    def _points(self, width: int, number: int | None = None) -> tuple[Tensor, Tensor]:
        """`points_of` this width, in the precision and on the device of these logits; by default `n_draws` of them."""
        number = self.n_draws if number is None else number
        if torch.compiler.is_compiling():
            points, weights = points_of(width, number)
            return points.to(self.mean), weights.to(self.mean)
        return _placed_points(width, number, self.mean.dtype, self.mean.device)

    def _by_rows(
        self, compute: Callable[..., tuple[Tensor, ...]], points: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """What `compute` makes of mean, spread, points and weights, a few rows at a time."""
        mean, spread = self._flat()
        rows = [(mean, spread)]
        if not torch.compiler.is_compiling():  # under a tracer the number of rows is a symbol
            step = max(1, _MAX_NUMBERS // (len(points[0]) * mean.shape[1]))
            if step < len(mean):
                rows = list(zip(mean.split(step), spread.split(step), strict=True))
        with without_autocast(mean.device.type):
            if len(rows) == 1:
                columns = list(compute(*rows[0], *points))
            else:
                columns = _joined((compute(*part, *points) for part in rows), len(mean))
        leading = self.mean.shape[:-1]
        return columns if len(leading) == 1 else [column.unflatten(0, leading) for column in columns]


def _joined(parts: Iterable[tuple[Tensor, ...]], rows: int) -> list[Tensor]:
    """The columns of several parts of `rows` in all, each written to its place at once: small results that were kept
    between the large temporaries of the parts would stop their memory from being used again.
    """
    columns, start = list[Tensor](), 0
    for part in parts:
        columns = columns or [column.new_empty(rows, *column.shape[1:]) for column in part]
        for column, values in zip(columns, part, strict=True):
            column[start : start + len(values)] = values
        start += len(part[0])
    return columns


def _by_lines(mean: Tensor, spread: LogitCovariance, points: Tensor, weights: Tensor) -> tuple[Tensor]:
    """See `GaussianLogits.log_probs`, for three classes; points ``(points, 1)``.

    The difference of the two other logits varies along one direction, orthogonal to that in which a logit varies by
    itself, ``root - given``.
    """
    root, rest, given = spread
    assert given is not None
    means = mean.T.unsqueeze(1)
    alone = (root - given) * rest.rsqrt().unsqueeze(-1)
    across = torch.stack([-alone[..., 1], alone[..., 0]], -1)

    def along(shift: int) -> Tensor:
        """The logits of other classes along each class's line, ``(classes, points, batch)``."""
        slopes = (across * root.roll(-shift, 1)).sum(-1).T.unsqueeze(1)
        return means.roll(-shift, 0) + points * slopes

    return (_averaged(along(0) - torch.logaddexp(along(1), along(2)), rest, weights),)


def _by_points(mean: Tensor, spread: LogitCovariance, points: Tensor, weights: Tensor) -> tuple[Tensor]:
    """See `GaussianLogits.log_probs`; ``(batch, classes)``. In place where autograd has no need of what is overwritten:
    it is memory that so many numbers cost.
    """
    own, logits = _own_and_all(mean, spread, points.T)
    return (_integrated(own, logits, spread.rest, None, weights).logs.log_softmax(1),)


def _own_and_all(mean: Tensor, spread: LogitCovariance, points: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each logit given the differences of the others, and the logits, in bits, at points ``(numbers,
    points)``.
    """
    if spread.given is None:
        own = _along(mean, spread.root, points[: spread.root.shape[2]], _BITS)
        return own, _with_own(own, spread, points, _BITS)
    return _along(mean, spread.given, points, _BITS), _along(mean, spread.root, points, _BITS)


class _Integrated(NamedTuple):
    """See `_integrated`.

    Attributes:
        logs: of the mean probabilities, ``(batch, classes)``, not normalised.
        top: the largest logit at each point, ``(batch, 1, points)``, in bits.
        total: the sum of all exponentials over that of the largest, of the same shape.
    """

    logs: Tensor
    top: Tensor
    total: Tensor


def _integrated(
    own: Tensor, logits: Tensor, rest: Tensor, tail: Tensor | None, weights: Tensor
) -> _Integrated:
    """Mean probabilities; the first two tensors are overwritten.

    Args:
        own: see `_own_and_all`, ``(batch, classes, points)``.
        logits: of the same shape.
        rest: what a logit varies by itself, ``(batch, classes)``.
        tail: the logarithm of the sum of the exponentials of further classes, ``(batch, 1, points)``, in bits.
        weights: of the points.
    """
    number = torch.finfo(own.dtype)
    top = logits.detach().amax(1, keepdim=True)
    less = -logits.sub_(top).exp2_()
    below, total = -F.threshold(less, -1.0, 0.0).sum(1, keepdim=True), -less.sum(1, keepdim=True)
    if tail is not None:
        others = (tail - top).exp2()
        below, total = below + others, total + others
    # The sum over all others: without cancellation where one class has nearly all, of which `below` is the larger one.
    # Of two classes that are both first it is not.
    others = torch.maximum(torch.add(less, total, alpha=1 - 4 * number.eps), below).log2_()
    mean_of = SigmoidMean(rest.unsqueeze(2))
    exponent, factor = mean_of.at(own.sub_(others).sub_(top).add_(mean_of.half))
    # relative to the largest, so that none is too small to be a number; and not -inf, of which -inf is no number
    largest = exponent.detach().amax(2, keepdim=True).clamp(min=number.min)
    mean = (exponent.sub_(largest).exp2_() * factor) @ weights
    logs = torch.add(mean.clamp(min=number.tiny).log(), largest.squeeze(2), alpha=1 / _BITS)
    return _Integrated(logs, top, total)


def _by_probit(mean: Tensor, spread: LogitCovariance) -> Tensor:
    """Logits of MacKay's approximation, ``(batch, classes)``."""
    variance = spread.rest + spread.root.square().sum(-1)
    return mean * (1 + math.pi / 8 * variance).rsqrt()


def _taken(mean: Tensor, spread: LogitCovariance, classes: Tensor) -> tuple[Tensor, LogitCovariance]:
    """Of the classes at these indices, ``(batch, k)``."""
    of_root = classes.unsqueeze(-1).expand(-1, -1, spread.root.shape[-1])
    return mean.gather(1, classes), LogitCovariance(
        spread.root.gather(1, of_root), spread.rest.gather(1, classes)
    )


def _faults_as_tail(mean: Tensor, spread: LogitCovariance) -> Tensor:
    """How far the probability of each class may be off in `_with_tail`, if it counts as tail, ``(batch, classes)``.

    For any probabilities ``q`` the logarithm of all exponentials is at least ``g = sum_d q_d f_d`` plus the entropy of
    ``q``, here of MacKay's probabilities. So ``E[sigmoid(x)]`` with ``x = f_c - g - entropy`` is no less than the
    probability of class c. It is ``exp(m + v / 2)``, which is taken in its place, less a share of ``E[sigmoid(y)]``
    with ``y ~ N(m + v, v)``. And a third moment is left out.
    """
    logs = _by_probit(mean, spread).log_softmax(1)
    probs, (root, rest, _) = logs.exp(), spread
    known = torch.where(probs > 0, mean - logs, 0.0)  # a class whose logit is -inf has no share
    apart = mean - (probs * known).sum(1, keepdim=True)
    across = (root - probs.unsqueeze(1) @ root).square().sum(2)
    variance = across + (rest * (1 - 2 * probs)).clamp(min=0) + (probs.square() * rest).sum(1, keepdim=True)
    mean_of, apart = SigmoidMean(variance), apart * _BITS
    exponent, factor = mean_of.at(torch.stack([apart + mean_of.half, apart + 3 * mean_of.half]))
    bound, saturated = exponent.exp2_().mul_(factor)
    return bound * torch.addcmul(saturated, across, across.sqrt(), value=_BEND)


def _with_tail(
    mean: Tensor, spread: LogitCovariance, likely: Tensor, points: Tensor, weights: Tensor
) -> Tensor:
    """See `GaussianLogits.log_probs`, ``(batch, classes)``: of likely classes as in `_by_points`, of all others, the
    tail, in closed form.

    The exponential of a logit of the tail is replaced by its mean over what it varies by itself. The logarithm of
    their sum is then a cumulant generating function of ``z``, and the mean of ``exp(f_c) / sum_d exp(f_d)`` over the
    points is one of ``root_c``; both are taken to the second order, so that nothing is computed for each class at each
    point.

    Args:
        mean: ``(batch, classes)``.
        spread: of the same batch, of many classes.
        likely: indices of classes, ``(batch, k)``.
        points: ``(points, directions + k)``.
        weights: of the points.
    """
    root, columns = spread.root, points.T
    along = columns[: root.shape[2]]
    below = (mean + spread.rest / 2).scatter(1, likely, -math.inf)
    whole = below.logsumexp(1, keepdim=True).clamp(min=torch.finfo(mean.dtype).min)
    shares = (below - whole).exp()
    centre = shares.unsqueeze(1) @ root
    apart = root - centre
    bend = (apart * shares.unsqueeze(2)).transpose(1, 2) @ apart
    tail = whole.unsqueeze(2) + centre @ along + ((bend @ along) * along).sum(1, keepdim=True) / 2
    chosen, of_chosen = _taken(mean, spread, likely)
    own, logits = _own_and_all(chosen, of_chosen, columns)
    logs, top, total = _integrated(own, logits, of_chosen.rest, tail * _BITS, weights)
    inverse = weights.log() - (total.log2() + top).squeeze(1) / _BITS
    level = inverse.logsumexp(1, keepdim=True)
    shares = (inverse - level).exp()
    centre = (shares @ along.T).unsqueeze(2)
    apart = along - centre
    bend = (apart * shares.unsqueeze(1)) @ apart.transpose(1, 2)
    exponent = (root @ centre).squeeze(2) + ((root @ bend) * root).sum(2) / 2
    return (below + level + exponent).scatter(1, likely, logs).log_softmax(1)


def _averaged(apart: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
    """Logarithms of probabilities ``(batch, classes)``, from how far each logit is from the others at each point,
    ``(classes, points, batch)``, and its variance.
    """
    exponent, factor = logistic_normal(apart, variance.T.unsqueeze(1))
    # relative to the largest, so that none is too small to be a number; and not -inf, of which -inf is no number
    top = exponent.amax(1, keepdim=True).clamp(min=torch.finfo(apart.dtype).min)
    shares = (exponent - top).exp() * factor
    total = torch.einsum("csb,s->cb", shares, weights)
    logs = top.squeeze(1) + total.clamp(min=torch.finfo(apart.dtype).tiny).log()
    return logs.log_softmax(0).T.contiguous()


def _entropy_and_variance(
    mean: Tensor, spread: LogitCovariance, points: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """See `GaussianLogits.entropy_and_variance`."""
    logs = _at(mean, spread, points.T).log_softmax(1)
    probs = logs.exp()
    average = probs @ weights
    variance = (probs - average.unsqueeze(2)).square() @ weights
    return _entropy_of(logs, probs, weights), variance


def _entropy(mean: Tensor, spread: LogitCovariance, points: Tensor, weights: Tensor) -> tuple[Tensor]:
    """See `GaussianLogits.entropy`."""
    logs = _at(mean, spread, points.T).log_softmax(1)
    return (_entropy_of(logs, logs.exp(), weights),)


def _entropy_of(logs: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    # 0 * -inf would be NaN
    return -((probs * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(1) @ weights)


def _at(mean: Tensor, spread: LogitCovariance, points: Tensor) -> Tensor:
    """Logits ``(batch, classes, points)`` at points ``(numbers, points)``; operations then run along many points."""
    logits = _along(mean, spread.root, points[: spread.root.shape[2]])
    return logits if spread.given is not None else _with_own(logits, spread, points)


def _with_own(logits: Tensor, spread: LogitCovariance, points: Tensor, factor: float = 1.0) -> Tensor:
    """Logits of many classes with what each varies by itself, times a factor."""
    deviations = spread.rest.clamp(min=torch.finfo(spread.rest.dtype).tiny).sqrt().unsqueeze(2)
    return torch.addcmul(logits, deviations, points[spread.root.shape[2] :], value=factor)


def _along(mean: Tensor, root: Tensor, points: Tensor, factor: float = 1.0) -> Tensor:
    """Logits ``(batch, classes, points)`` along directions, at points ``(directions, points)``, times a factor."""
    means, rows = mean.reshape(-1, 1), root.flatten(0, 1)
    return torch.addmm(means, rows, points, beta=factor, alpha=factor).unflatten(0, mean.shape)


def votes(winners: Tensor, classes: int) -> Tensor:
    """How often each class wins, ``(batch, classes)``, from the winners ``(draws, batch)``; in the smallest integer
    type that fits, since predictions are kept for whole data sets.
    """
    draws, inputs = winners.shape
    rows = torch.arange(inputs, device=winners.device).expand(draws, inputs)
    # by `index_put`, whose sums have a deterministic form on every device
    counts = torch.zeros(inputs, classes, dtype=torch.int64, device=winners.device)
    counts = counts.index_put((rows, winners), torch.ones_like(winners), accumulate=True)
    return smallest(counts, draws)


def smallest(counts: Tensor, draws: int) -> Tensor:
    """Counts of so many draws in the smallest integer type that fits."""
    return counts.to(next(k for k in (torch.int16, torch.int32, torch.int64) if draws <= torch.iinfo(k).max))


# The points


@lru_cache(maxsize=32)
@program_constant
def points_of(width: int, n_draws: int) -> tuple[Tensor, Tensor]:
    """Points ``(points, width)`` and their weights, float64, whose first two moments are those of standard normals
    where there are `_MANY` times as many points as numbers in one; else those of the first `_BEST` numbers are.

    One number: 33 points of the trapezoidal rule. Two: 187 of a hexagonal grid, whose weights are the normal density.
    The error of both falls exponentially with the distance of points. More: `normals`, with equal weights.
    """
    with torch.inference_mode(False):
        if width > 2:
            points = normals(n_draws, width)
            weights = torch.full_like(points[:, 0], 1 / n_draws)
        else:
            points = _grid(*_LINE, plane=False) if width == 1 else _grid(*_PLANE, plane=True)
            weights = (-points.square().sum(1) / 2).softmax(0)
        best = width if len(points) >= _MANY * width else _BEST
        if best > min(width, len(points) // 4):
            return points, weights
        first, other = points[:, :best] - weights @ points[:, :best], points[:, best:]
        values, vectors = torch.linalg.eigh(first.T @ (first * weights.unsqueeze(1)))
        return torch.cat([first @ ((vectors * values.rsqrt()) @ vectors.T), other], 1), weights


def _grid(step: float, radius: float, *, plane: bool) -> Tensor:
    """Points on a line, or of a plane's hexagonal grid, up to this distance from zero: ``(points, 1 or 2)``."""
    numbers = int(2 * radius / step)
    line = torch.arange(-numbers, numbers + 1, dtype=torch.float64, device="cpu")
    points = torch.cartesian_prod(line, line) if plane else line.unsqueeze(1)
    if plane:
        points = torch.stack([points[:, 0] + points[:, 1] / 2, points[:, 1] * 0.75**0.5], 1)
    points = points * step
    return points[points.square().sum(1) <= (radius * (1 + 1e-9)) ** 2]


@lru_cache(maxsize=32)
def _placed_points(
    width: int, n_draws: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        points, weights = points_of(width, n_draws)
        # operations run along many points
        return points.T.to(device, dtype).contiguous().T, weights.to(device, dtype)
