"""Gaussian outputs and how they are drawn from: quasi-random normals, covariances of many logits, sums over draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import pi
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.quasirandom import SobolEngine

from posthoc_uq.core.devices import as_double, program_constant, widest_dtype
from posthoc_uq.core.errors import PosthocUQError

LINKS: tuple[str, ...] = ("mc", "probit", "bridge")
"""From Gaussian logits to class probabilities; see `posthoc_uq.likelihoods.class_prediction.classes_of_gaussian`."""
LINK_DRAWS = 256  # default number of draws of the outputs

DIRECTIONS = 5  # common directions, for more than `EXACT` classes
EXACT = 10  # classes up to which a covariance is kept whole
_FLOOR = 1.0  # weight shared equally by all classes, beside a weight of 1 by how undecided each class is
_PIVOTS = 10  # columns that they are chosen from
_ROUNDS = 3  # of that choice
_NEARLY_CERTAIN = 2.0  # a variance of the logits below which `DIRECTIONS` columns are enough
_TOGETHER = 0.01  # share of all variance that a column explains of other classes than its pivot, at least
_LOW = 30.0  # a variance of the logits below which that share is less: then few points are enough for all directions
_RANK = 1e-12  # share by which the diagonal of a matrix that may be singular is raised, in float64
_INDEFINITE = (1e-6, 1e-3)  # the same where rounding made a covariance indefinite, one after the other
_TINY = 1e-12  # the least variance of a logit, whose inverse is still a number in float32


class LogitCovariance(NamedTuple):
    """The covariance of logits, as what varies together and what each class has by itself.

    Softmax does not change when all logits move by the same number. So this is the covariance of the centred logits
    ``f_c - mean_d f_d``: a variance that all classes share is removed before anything is approximated.

    * Of many classes, logits are ``mean + root z + sqrt(rest) e`` with standard normal ``z`` and ``e``: few directions
      that classes share, and an independent rest.
    * Of at most `EXACT` classes they are ``mean + root z``. Given how the other logits differ from each other, logit c
      is Gaussian with the mean ``mean_c + (given z)_c`` and the variance ``rest_c``.

    Attributes:
        root: ``(batch, ..., classes, directions)``; there may be no direction.
        rest: variances ``(batch, ..., classes)`` of what a class has by itself.
        given: of the shape of `root`; None for many classes.
    """

    root: Tensor
    rest: Tensor
    given: Tensor | None = None

    @property
    def width(self) -> int:
        """How many normal numbers make a draw."""
        return self.root.shape[-1] + (self.rest.shape[-1] if self.given is None else 0)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> LogitCovariance:
        """The same with every tensor changed."""
        given = None if self.given is None else change(self.given)
        return LogitCovariance(change(self.root), change(self.rest), given)

    def at(self, mean: Tensor, points: Tensor) -> Tensor:
        """The logits ``(points, batch, classes)`` at points ``(points, width)`` of ``z`` and ``e``."""
        directions = self.root.shape[2]
        logits = mean.unsqueeze(0)
        if directions:
            logits = logits + torch.einsum("bcr,sr->sbc", self.root, points[:, :directions])
        if self.given is None:
            # the root of a variance of 0 has an infinite derivative
            deviations = self.rest.clamp(min=torch.finfo(self.rest.dtype).tiny).sqrt()
            logits = logits + deviations * points[:, directions:].unsqueeze(1)
        return logits

    def of_first(self, directions: int) -> LogitCovariance:
        """Of many classes, the same with so many directions at most: what classes vary along others is their own."""
        root, others = self.root[..., :directions], self.root[..., directions:]
        return LogitCovariance(root, self.rest + others.square().sum(-1))

    def split(self, step: int) -> list[LogitCovariance]:
        """In parts of so many inputs."""
        root, rest = self.root.split(step), self.rest.split(step)
        given = [None] * len(rest) if self.given is None else self.given.split(step)
        return [LogitCovariance(*part) for part in zip(root, rest, given, strict=True)]

    @staticmethod
    def cat(parts: Sequence[LogitCovariance]) -> LogitCovariance:
        """Those of several batches as one."""
        root, rest, given = zip(*parts, strict=True)
        return LogitCovariance(
            torch.cat(root), torch.cat(rest), None if given[0] is None else torch.cat(given)
        )

    def over(self, temperature: float) -> LogitCovariance:
        """The same for logits divided by a temperature."""
        given = None if self.given is None else self.given / temperature
        return LogitCovariance(self.root / temperature, self.rest / temperature**2, given)


class OutputGaussian(NamedTuple):
    """Gaussian outputs of a batch, and how a prediction is made of them. Those of a head are before temperature and
    observation noise, and `Predictor.prediction_of` sets the link.

    Attributes:
        mean: ``(batch, ...)``; of a prediction in float32 at least.
        variance: of the same shape.
        covariance: ``(batch, outputs, outputs)`` where it is known and a link can use it, or the `LogitCovariance` of
            many classes; None for independent outputs.
        link: one of the likelihood's `links`.
        n_draws: of the outputs, for ``"mc"``.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | LogitCovariance | None = None
    link: str = "mc"
    n_draws: int = LINK_DRAWS

    @property
    def numbers(self) -> int:
        """How many there are in all tensors."""
        several = [self.mean, self.variance]
        if isinstance(self.covariance, LogitCovariance):
            several += [each for each in self.covariance if each is not None]
        elif self.covariance is not None:
            several.append(self.covariance)
        return sum(tensor.numel() for tensor in several)

    def over(self, temperature: float) -> OutputGaussian:
        """The same for outputs divided by a temperature."""
        if temperature == 1.0:
            return self
        covariance = self.covariance
        if isinstance(covariance, LogitCovariance):
            covariance = covariance.over(temperature)
        elif covariance is not None:
            covariance = covariance / temperature**2
        mean, variance = self.mean / temperature, self.variance / temperature**2
        return self._replace(mean=mean, variance=variance, covariance=covariance)

    def by_class(self, factors: Tensor, of_rows: Tensor) -> OutputGaussian:
        """The same for outputs multiplied by a factor of each class. Of a `LogitCovariance` that is approximate: what
        all logits have in common is no part of it.

        Args:
            factors: of a shape that is broadcast to the mean.
            of_rows: the same, ``(classes,)``.
        """
        covariance = self.covariance
        if isinstance(covariance, LogitCovariance):
            own = of_rows.to(covariance.rest)
            root = covariance.root * own.unsqueeze(-1)
            if covariance.given is None:
                covariance = LogitCovariance(root, covariance.rest * own.square())
            else:  # how a logit varies given all others is another question then
                rows = root.flatten(0, -3)
                found = of_covariance(rows[..., 0], rows @ rows.transpose(1, 2))
                covariance = found.mapped(lambda part: part.unflatten(0, root.shape[:-2]))
        elif covariance is not None:
            own = of_rows.to(covariance)
            covariance = covariance * own * own.unsqueeze(-1)
        mean, variance = self.mean * factors, self.variance * factors.square()
        return self._replace(mean=mean, variance=variance, covariance=covariance)

    @staticmethod
    def cat(parts: Sequence[OutputGaussian]) -> OutputGaussian:
        """Several of one kind, one batch after the other."""
        if len(parts) == 1:
            return parts[0]
        covariances, covariance = [part.covariance for part in parts], parts[0].covariance
        if isinstance(covariance, LogitCovariance):
            covariance = LogitCovariance.cat(
                [each for each in covariances if isinstance(each, LogitCovariance)]
            )
        elif covariance is not None:
            covariance = torch.cat([each for each in covariances if isinstance(each, Tensor)])
        mean, variance = (
            torch.cat([part.mean for part in parts]),
            torch.cat([part.variance for part in parts]),
        )
        return parts[0]._replace(mean=mean, variance=variance, covariance=covariance)

    def picked(self, rows: Tensor) -> OutputGaussian:
        """Those of some inputs, of outputs without positions; `rows` are indices or a mask."""
        index, covariance = rows.to(self.mean.device), self.covariance
        if isinstance(covariance, LogitCovariance):
            covariance = covariance.mapped(lambda part: part[index])
        elif covariance is not None:
            covariance = covariance[index]
        return self._replace(mean=self.mean[index], variance=self.variance[index], covariance=covariance)

    def times(self, factor: float) -> OutputGaussian:
        """With all variances and covariances multiplied by a factor."""
        covariance = self.covariance
        if isinstance(covariance, LogitCovariance):
            covariance = covariance.over(factor**-0.5)
        elif covariance is not None:
            covariance = covariance * factor
        return self._replace(variance=self.variance * factor, covariance=covariance)

    def draws(self) -> Tensor:
        """Quasi-random draws ``(n_draws, batch, ...)``, the same points for every input and call."""
        mean, variance, covariance = self.mean, self.variance, self.covariance
        flat = mean.reshape(mean.shape[0], -1)  # not `len`, which would be a constant in an exported program
        if covariance is None:
            spread = independent(variance.reshape(flat.shape))
        elif isinstance(covariance, LogitCovariance):
            spread = covariance
        else:
            spread = LogitCovariance(symmetric_root(covariance).to(flat), torch.zeros_like(flat))
        points = normals_like(self.n_draws, spread.width, flat)
        return spread.at(flat, points).reshape(self.n_draws, *mean.shape)


class OutputCovariance:
    """The covariance of many outputs of some inputs, by its products."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            product: of vectors ``(batch, vectors, classes)`` with it, to the same shape.
        """
        self._product = product

    def times(self, vectors: Tensor) -> Tensor:
        """Its products with vectors ``(batch, vectors, classes)``, in the same shape."""
        return self._product(vectors)

    def with_sum(self, like: Tensor) -> Tensor:
        """The covariance of each output with the sum of all, in the shape of `like`, ``(batch, classes)``."""
        return self.times(torch.ones_like(like).unsqueeze(1))[:, 0]

    def with_centred(self, chosen: Tensor, like: Tensor) -> Tensor:
        """The covariance of each output with the outputs `chosen`, ``(batch, k)``, less the mean of all outputs, for
        `like` of shape ``(batch, classes)``: ``(batch, k, classes)``.
        """
        units = F.one_hot(chosen, like.shape[1]).to(like)
        return self.times(units - 1 / like.shape[1])


class TurnedOutputCovariance(OutputCovariance):
    """``U diag(s) U^T + t`` with columns ``U`` that all inputs have in common.

    Args:
        basis: ``U``, ``(classes, k)``.
        sums: ``U^T 1``, ``(k,)``.
        variances: ``s``, ``(batch, k)``.
        others: ``t``, ``(batch, 1)``; None for none.
    """

    def __init__(self, basis: Tensor, sums: Tensor, variances: Tensor, others: Tensor | None = None) -> None:
        self._basis, self._sums, self._variances, self._others = basis, sums, variances, others

    def times(self, vectors: Tensor) -> Tensor:
        return self._turned_back(
            (vectors.flatten(0, 1) @ self._basis).unflatten(0, vectors.shape[:2]), vectors
        )

    def with_sum(self, like: Tensor) -> Tensor:
        return self._turned_back(self._sums.expand(like.shape[0], 1, -1), torch.ones_like(like).unsqueeze(1))[
            :, 0
        ]

    def with_centred(self, chosen: Tensor, like: Tensor) -> Tensor:
        classes = like.shape[1]
        turned = self._basis[chosen] - self._sums / classes
        units = None if self._others is None else F.one_hot(chosen, classes).to(like) - 1 / classes
        return self._turned_back(turned, units)

    def _turned_back(self, turned: Tensor, vectors: Tensor | None) -> Tensor:
        """Products of vectors that were turned by ``U^T`` to ``(batch, vectors, k)``."""
        scaled = turned * self._variances.unsqueeze(1)
        found = (scaled.flatten(0, 1) @ self._basis.T).unflatten(0, scaled.shape[:2])
        if self._others is None or vectors is None:
            return found
        return torch.addcmul(found, self._others.unsqueeze(1), vectors)


def independent(variance: Tensor) -> LogitCovariance:
    """Logits ``(batch, classes)`` without correlations."""
    return LogitCovariance(variance.new_zeros(*variance.shape, 0), variance)


def of_covariance(mean: Tensor, covariance: Tensor) -> LogitCovariance:
    """From a covariance ``(batch, classes, classes)``: exact up to `EXACT` classes; see `of_product`.

    With orthonormal contrasts ``B`` (classes, classes - 1) and the Cholesky factor ``B^T Sigma B = L L^T``, `root` is
    ``B L``. The rows of ``D = B L^(-T)`` are the directions in which a single logit moves against all others, so that
    ``rest_c = 1 / sum_k D_ck^2`` and ``given = root - rest D``. Rounding may have made a covariance indefinite; the
    diagonal of ``B^T Sigma B`` is raised by as much.
    """
    classes = mean.shape[1]
    if classes == 2:  # L^2 is half the variance of the difference, and float64 would add nothing
        contrasts, of_pairs, _ = _contrasts(2, covariance.dtype, covariance.device)
        largest = covariance.diagonal(dim1=1, dim2=2).amax(1, keepdim=True).clamp(min=_TINY)
        floor = largest * (10 * torch.finfo(covariance.dtype).eps)
        half = (covariance.flatten(1) @ of_pairs).clamp(min=0) + floor
        root = half.sqrt().unsqueeze(1) * contrasts
        return _spread(root, (2 * half).expand(-1, 2), None, mean, -root)
    wide = as_double(covariance)
    if classes > EXACT:
        products = OutputCovariance(lambda vectors: as_double(vectors) @ wide)
        return of_product(mean, covariance.diagonal(dim1=1, dim2=2), products)
    # a NaN stays in its input
    contrasts, of_pairs, unit = _contrasts(classes, wide.dtype, wide.device)
    largest = wide.diagonal(dim1=1, dim2=2).amax(1).clamp(min=_TINY).reshape(-1, 1, 1)
    inner = (wide.flatten(1) @ of_pairs).reshape(-1, classes - 1, classes - 1)
    inner = torch.addcmul(inner, largest, unit, value=10 * torch.finfo(covariance.dtype).eps)
    factor, failed = torch.linalg.cholesky_ex(inner)
    for share in _INDEFINITE:
        # a look takes less than the factors again, but makes a device wait, and a tracer has nothing to look at
        if failed.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(failed.any()):
            break
        raised = failed.bool().to(inner).reshape(-1, 1, 1) * largest
        inner = torch.addcmul(inner, raised, unit, value=share)
        factor, failed = torch.linalg.cholesky_ex(inner)
        factor = factor.masked_fill(failed.bool().reshape(-1, 1, 1), math.nan)
    batch = factor.shape[0]
    root = torch.bmm(contrasts.expand(batch, -1, -1), factor)
    dual = torch.linalg.solve_triangular(factor, contrasts.T.expand(batch, -1, -1), upper=False)
    rest = dual.square().sum(1).reciprocal()
    given = torch.addcmul(root, rest.unsqueeze(2), dual.transpose(1, 2), value=-1)
    return _spread(root, rest, None, mean, given)


@lru_cache(maxsize=32)
@program_constant
def _contrasts(classes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Helmert's contrasts ``B`` (classes, classes - 1), each class against those before it; ``kron(B, B)``; and the
    identity (classes - 1, classes - 1).
    """
    with torch.inference_mode(False):
        steps = torch.arange(1, classes, dtype=torch.float64, device="cpu")
        whole = torch.ones(classes, classes - 1, dtype=torch.float64, device="cpu").triu()
        whole[1:].diagonal().sub_(steps)
        whole = (whole / (steps * (steps + 1)).sqrt()).to(device, dtype)
        unit = torch.eye(classes - 1, dtype=dtype, device=device)
        return whole, torch.kron(whole, whole), unit


def of_product(mean: Tensor, variance: Tensor, covariance: OutputCovariance) -> LogitCovariance:
    """From the products of a covariance whose diagonal is `variance`: `DIRECTIONS` directions ``L`` of
    ``S = H Sigma H`` with ``H = 1 - 1/C``, and the rest of its diagonal as independent. `of_covariance` is used where
    it is exact, for few classes.

    The directions are the first columns of a pivoted Cholesky factor (Harbrecht, Peters, Schneider 2012), or, where
    logits are uncertain, the leading directions of `_PIVOTS` of them, so that ``S - L L^T`` is a covariance again. Each
    column is how all logits move with that of one class, the pivot: the one of which most is left. Classes are weighted
    by how much a change of their logit moves the probabilities, ``p (1 - p)``, plus an equal share: the covariance is
    most accurate for the classes between which the prediction is undecided.

    A column along which hardly a class but its pivot moves is left out: over what a class has by itself probabilities
    are integrated, and over directions they are summed at few points.

    Args:
        mean: ``(batch, classes)``.
        variance: of the same shape.
        covariance: of the logits, not centred.
    """
    classes = mean.shape[1]
    if classes <= EXACT:
        units = torch.eye(classes, dtype=mean.dtype, device=mean.device).expand(mean.shape[0], -1, -1)
        return of_covariance(mean, covariance.times(units))
    sums = as_double(covariance.with_sum(mean)) / classes
    wide = as_double(variance)
    left = diagonal = (wide - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    weights, not_finite = _zero_non_finite_rows(_weights(as_double(mean), diagonal))
    # what rounding of the products leaves, also of what all logits share and centring removed, is no variance
    rounding = max(_RANK, 10 * torch.finfo(mean.dtype).eps)
    total = (weights * diagonal).sum(1, keepdim=True)
    level = total / weights.sum(1, keepdim=True)
    certain = level < _NEARLY_CERTAIN
    columns, shares = list[Tensor](), list[Tensor]()
    for number in range(min(_PIVOTS, classes)):
        # a look takes less than further columns, but makes a device wait, and a tracer has nothing to look at
        host = level.device.type == "cpu" and not torch.compiler.is_compiling()
        if number == DIRECTIONS and host and bool(certain.all()):
            break
        pivot = (weights * left).argmax(1, keepdim=True)
        column = as_double(covariance.with_centred(pivot, mean)[:, 0])
        column = column - column.mean(1, keepdim=True)
        for earlier in columns:
            column = torch.addcmul(column, earlier, earlier.gather(1, pivot), value=-1)
        own, least = column.gather(1, pivot), (rounding * wide.gather(1, pivot)).clamp(min=_TINY)
        column = column * (torch.maximum(own, least).rsqrt() * (own > least))
        squares = column.square()
        left = (left - squares).clamp(min=0)
        columns.append(column)
        shares.append((weights * squares).scatter(1, pivot, 0.0).sum(1, keepdim=True))
    shared = torch.cat(shares, 1) > _TOGETHER * level / (level + _LOW) * total
    root = torch.stack(columns, 2) * shared.unsqueeze(1)
    if len(columns) > DIRECTIONS:
        # by subspace iteration, for which programs have all functions
        gram = (root.transpose(1, 2) @ (root * weights.unsqueeze(2))).detach()
        gram = gram.masked_fill(not_finite.unsqueeze(2), 0.0)
        leading = gram[:, :, :DIRECTIONS]
        for power in range(_ROUNDS):
            leading = _orthonormal(gram @ leading if power else leading)
        few = root[:, :, :DIRECTIONS]
        root = torch.where(certain.unsqueeze(2), few, root @ leading)
    left = (diagonal - root.square().sum(2)).clamp(min=0)
    # centring removed 1 / C of the independent part
    return _spread(root, left * (classes / (classes - 1)), not_finite, mean)


def _orthonormal(columns: Tensor) -> Tensor:
    """Columns ``(batch, n, k)`` as orthonormal ones; shorter where rounding hides them behind those before them."""
    squares = columns.transpose(1, 2) @ columns
    unit = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    largest = squares.diagonal(dim1=1, dim2=2).amax(1).reshape(-1, 1, 1)
    raised = (_RANK * largest).clamp(min=torch.finfo(squares.dtype).tiny)
    root, failed = torch.linalg.cholesky_ex(squares + raised * unit)
    failed = failed.bool().reshape(-1, 1, 1)
    root = torch.where(failed, unit, root)
    inverse = torch.linalg.solve_triangular(root, unit.expand_as(root), upper=False)
    return (columns @ inverse.transpose(1, 2)).masked_fill(failed, 0.0)


def _weights(mean: Tensor, variance: Tensor) -> Tensor:
    """Weights of classes, ``(batch, classes)``."""
    probs = (mean / (1 + pi * variance / 8).sqrt()).softmax(1)
    undecided = probs * (1 - probs)
    total = undecided.sum(1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)
    return undecided / total + _FLOOR / mean.shape[1]


def _zero_non_finite_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor with zeros for inputs that are not finite (eigensolvers refuse them), and which these are."""
    not_finite = ~torch.isfinite(tensor).flatten(1).all(1)
    return tensor.masked_fill(not_finite.reshape(-1, *[1] * (tensor.ndim - 1)), 0.0), not_finite.unsqueeze(1)


def _spread(
    root: Tensor, rest: Tensor, not_finite: Tensor | None, like: Tensor, given: Tensor | None = None
) -> LogitCovariance:
    """A `LogitCovariance` in the precision and on the device of `like`, NaN where the covariance is not finite."""
    if not_finite is not None:
        root, rest = (
            root.masked_fill(not_finite.unsqueeze(-1), math.nan),
            rest.masked_fill(not_finite, math.nan),
        )
    place = like.device, like.dtype
    return LogitCovariance(root.to(*place), rest.to(*place), None if given is None else given.to(*place))


@lru_cache(maxsize=32)
@program_constant
def normals(n_draws: int, width: int) -> Tensor:
    """Standard normals ``(n_draws, width)``. Columns beyond the dimensions of the sequence are pseudo-random."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):  # cached tensors must work with autograd too
        engine = SobolEngine(min(width, SobolEngine.MAXDIM), scramble=True, seed=0)
        uniform = engine.draw(n_draws, dtype=torch.float64)
        edge = 0.5 / 2**30  # the engine's points are multiples of 2^-30, zero among them
        quasi_random = torch.special.ndtri(uniform.clamp(edge, 1 - edge))
        more = width - quasi_random.shape[1]
        return torch.cat(
            [
                quasi_random,
                torch.randn(n_draws, more, generator=generator, dtype=torch.float64, device="cpu"),
            ],
            1,
        )


@lru_cache(maxsize=8)
def _placed_normals(n_draws: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return normals(n_draws, width).to(device, dtype)


def normals_like(n_draws: int, width: int, like: Tensor) -> Tensor:
    """`normals` in the precision and on the device of `like`."""
    if torch.compiler.is_compiling():
        return normals(n_draws, width).to(like)
    return _placed_normals(n_draws, width, like.dtype, like.device)


def symmetric_root(covariance: Tensor) -> Tensor:
    """The symmetric root of each matrix, which changes little when the matrix does; NaN where that is not finite."""
    wide = as_double(covariance)
    not_finite = ~torch.isfinite(wide).flatten(1).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(wide.masked_fill(not_finite, 0.0))
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.transpose(1, 2)
    return root.masked_fill(not_finite, float("nan"))


_MAX_BLOCK_BYTES = 2**17  # of outputs summed at once, so that they stay in the cache (one draw may be larger)


class Moments:
    """Mean and unbiased variance over draws, from blocks ``(draws, ...)`` that come one after another.

    Sums are in float64 (float32 on MPS, which has none), so that the order and the grouping of the draws make no
    difference beyond the rounding of the result. They are sums of ``x - c`` and of its square with the first draw as
    ``c``, which avoids the cancellation of ``sum x^2 - (sum x)^2 / S`` (Chan, Golub, LeVeque 1983, "Algorithms for
    computing the sample variance"). Minus infinity in any draw makes the mean minus infinity and the variance 0: a
    masked class is certain. A NaN stays in its element.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, block: Tensor) -> None:
        """Add a block ``(draws, ...)``."""
        if block.shape[0] == 0:
            return
        masked = torch.isneginf(block)
        values = block.to(widest_dtype(block.device)).masked_fill(masked, 0.0)
        if self._parts is None:
            zeros = torch.zeros_like(values[0])
            # a copy: a view would keep the whole block alive
            self._parts = values[0].clone(), zeros, zeros, torch.zeros_like(masked[0])
        shift, total, squares, was_masked = self._parts
        centred = values - shift
        self._parts = (
            shift,
            total + centred.sum(dim=0),
            squares + centred.square().sum(dim=0),
            was_masked | masked.any(dim=0),
        )
        self.count += block.shape[0]

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, in the precision of the sums; variance 0 for a single draw.

        Raises:
            PosthocUQError: no draw was added.
        """
        if self._parts is None or self.count == 0:
            raise PosthocUQError("A prediction needs at least one weight sample.")
        shift, total, squares, masked = self._parts
        mean = shift + total / self.count
        variance = torch.zeros_like(mean)
        if self.count > 1:
            variance = ((squares - total.square() / self.count) / (self.count - 1)).clamp(min=0)
        masked = masked & ~mean.isnan()
        return mean.masked_fill(masked, -math.inf), variance.masked_fill(masked, 0.0)


def gathered(blocks: Iterable[Tensor], limit: int = _MAX_BLOCK_BYTES) -> Iterator[Tensor]:
    """Small blocks ``(draws, ...)`` joined up to `limit` bytes, so that fewer, larger operations sum them."""
    waiting: list[Tensor] = []
    waiting_bytes = 0
    for block in blocks:
        size = block.numel() * block.element_size()
        if waiting and waiting_bytes + size > limit:
            yield torch.cat(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(block)
        waiting_bytes += size
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]


def moments_of(blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over draws in blocks ``(draws, ...)``, in their precision; variance 0 for one draw.

    Raises:
        PosthocUQError: there is no draw.
    """
    moments, dtype = Moments(), torch.float32
    for block in gathered(blocks):
        dtype = torch.promote_types(block.dtype, torch.float32)
        moments.add(block)
    mean, variance = moments.result()
    return mean.to(dtype), variance.to(dtype)


def moments_of_mixture(means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture by the law of total variance: the mean of the variances, and the variance of the
    means. A mean of minus infinity, of a masked class, is certain.

    Args:
        means: of each part, of one shape.
        variances: of each part.
    """
    each = torch.stack([as_double(mean) for mean in means])
    mean = each.mean(0)
    between = (each - mean).square().mean(0)
    variance = torch.stack([as_double(variance) for variance in variances]).mean(0) + between
    masked = torch.isneginf(mean)
    return mean.to(means[0]), variance.masked_fill(masked, 0.0).to(means[0])


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of one shape."""
    return torch.stack(list(tensors)).mean(0)
