"""Linear algebra, and in which precision it runs: small systems and eigenproblems are solved in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from math import isfinite
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core import interrupts
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError

# Above this size a float32 Gram is decomposed in float32, which halves the time, and in float64 if that fails.
_MAX_FLOAT64_EIGH = 1024

# A Gram of few rows is decomposed in its range where it has at least this size, and the rows are at most this share.
_MIN_RANGE_SIZE, _MAX_RANGE_SHARE = 512, 0.3
_OVERSAMPLING = 10  # directions beyond the rows, so that the range is met by all of its directions

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""The convolution over so many dimensions."""


Kept = TypeVar("Kept")


class constant(cached_property[Kept]):
    """A property that is computed once, and outside of a caller's inference mode: later calls with gradients may use
    it, too.
    """

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if not torch.is_inference_mode_enabled():
            return super().__get__(instance, owner)
        with torch.inference_mode(False), torch.no_grad():
            return super().__get__(instance, owner)


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is infinite or NaN. A sum that is finite says so in one pass; only another is looked into."""
    return isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def eigh_descending(gram: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``(groups, n)``, largest first and not negative, and eigenvectors ``(groups, n, n)`` of
    symmetric matrices.

    An eigenvalue below the rounding of the largest is zero: what such a direction shows is the rounding of the sum,
    which a small prior precision would take for data.

    Args:
        gram: ``(groups, n, n)``.
        rows: of the vectors whose products it sums, where that is known: no more of its eigenvalues are positive.

    Raises:
        NonFiniteError: the matrices are not finite.
    """
    interrupts.check()
    if not all_finite(gram):
        raise NonFiniteError(
            "A Gram matrix is not finite, so it has no eigenbasis; check the data and the model's weights."
        )
    symmetric = (gram + gram.transpose(-1, -2)) / 2
    # Inputs that are always zero (padding in every window) have unit eigenvectors, and make eigensolvers fail.
    live = symmetric.diagonal(dim1=-2, dim2=-1)[0] > 0
    if symmetric.shape[0] > 1 or bool(live.all()):
        values, vectors = _eigenpairs(symmetric, rows)
    else:
        order = torch.cat([(~live).nonzero().flatten(), live.nonzero().flatten()])
        dead = symmetric.shape[-1] - int(live.sum())
        values, vectors = torch.zeros_like(symmetric[..., 0]), torch.zeros_like(symmetric)
        vectors.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        inner_values, inner_vectors = _eigenpairs(symmetric[:, order[dead:]][:, :, order[dead:]], rows)
        values[:, dead:] = inner_values.to(values)
        vectors[:, dead:, dead:] = inner_vectors.to(vectors)
        vectors = vectors[:, torch.argsort(order)]
    values = values.flip(-1)
    rounding = torch.finfo(gram.dtype).eps * values[..., :1].clamp(min=0)
    return values.masked_fill(values < rounding, 0).to(gram), vectors.flip(-1).to(gram)


def _eigenpairs(symmetric: Tensor, rows: int | None) -> tuple[Tensor, Tensor]:
    """Eigenpairs, the smallest first, of Grams of so many rows."""
    if rows is None or symmetric.shape[-1] < _MIN_RANGE_SIZE or rows > _MAX_RANGE_SHARE * symmetric.shape[-1]:
        return _eigh(symmetric)
    return _eigh_in_range(symmetric, rows + _OVERSAMPLING)


def _eigh_in_range(symmetric: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Eigenpairs of positive semidefinite matrices of a rank below `width`: of their restriction to the range, which
    products with random vectors span (Halko, Martinsson, Tropp 2011), completed by any basis of the rest.
    """
    groups, size, _ = symmetric.shape
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(groups, size, width, generator=generator, dtype=symmetric.dtype, device="cpu")
    spanned = torch.linalg.qr(as_double(symmetric @ directions.to(symmetric.device))).Q
    restricted = spanned.transpose(-1, -2) @ as_double(symmetric @ spanned.to(symmetric))
    inner_values, inner_vectors = _eigh((restricted + restricted.transpose(-1, -2)) / 2)
    values = torch.zeros_like(symmetric[..., 0])
    values[:, -width:] = inner_values.to(values)
    leading = (spanned @ inner_vectors).to(symmetric)
    complete = torch.linalg.qr(leading, mode="complete").Q
    return values, torch.cat([complete[..., width:], leading], dim=-1)


def _eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs by the first solver that converges; some fail on finite, rank-deficient Grams, as of a ResNet."""
    if symmetric.dtype == torch.float32 and symmetric.shape[-1] > _MAX_FLOAT64_EIGH:
        with suppress(torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            return torch.linalg.eigh(symmetric)
    wide = as_double(symmetric)
    with suppress(torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
        return torch.linalg.eigh(wide)
    # Torch's algorithm (divide and conquer) has failed; scipy's "evr" (relatively robust representations) differs.
    from scipy.linalg import eigh

    found = [eigh(matrix.cpu().numpy(), driver="evr") for matrix in wide]
    values = torch.stack([torch.from_numpy(value) for value, _ in found])
    return values.to(wide), torch.stack([torch.from_numpy(vector) for _, vector in found]).to(wide)


def nystrom(sketch: Tensor, test_matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Leading eigenpairs of a positive semidefinite ``A`` known by ``Y = A Omega`` alone.

    The stabilised single-pass Nystrom approximation of Tropp, Yurtsever, Udell, Cevher 2017 (algorithm 3):
    ``Y_nu = Y + nu Omega``, ``Omega^T Y_nu = C^T C``, and the left singular vectors of ``B = Y_nu C^{-1}``. These
    come from the eigenvectors of the small ``B^T B`` and one QR decomposition, in float64, where squaring ``B`` loses
    less than the sketch's own rounding; it is several times as fast as a singular value decomposition.

    Args:
        sketch: ``(groups, n, width)``.
        test_matrix: ``(groups, n, width)``.

    Returns:
        Eigenvalues ``(groups, width)``, largest first, and orthonormal eigenvectors ``(groups, n, width)``.

    Raises:
        NonFiniteError: the sketch is not finite.
    """
    if not all_finite(sketch):
        raise NonFiniteError(
            "The sketch of a Gram matrix is not finite, so it has no eigenbasis; check the data and the weights."
        )
    y, omega = as_double(sketch), as_double(test_matrix)
    epsilon = float(torch.finfo(sketch.dtype).eps)
    norm = torch.linalg.matrix_norm(y, dim=(-2, -1), keepdim=True)
    shift = epsilon * norm + torch.finfo(torch.float64).tiny ** 0.5
    shifted = y + shift * omega
    core = omega.transpose(-1, -2) @ shifted
    core = (core + core.transpose(-1, -2)) / 2
    factor, info = torch.linalg.cholesky_ex(core)
    if not bool(info.any()):
        root = torch.linalg.solve_triangular(factor.transpose(-1, -2), shifted, upper=True, left=False)
    else:  # rounding of the sketch is larger than the shift: leave out directions that are not positive
        inner, turn = _eigh(core)
        floor = epsilon * inner[..., -1:].clamp(min=torch.finfo(torch.float64).tiny)
        scales = torch.where(inner > floor, inner.clamp(min=floor).rsqrt(), torch.zeros_like(inner))
        root = shifted @ (turn * scales.unsqueeze(-2))
    squares, turn = _eigh(root.transpose(-1, -2) @ root)
    # The columns of root @ turn are orthogonal up to rounding. QR makes them orthonormal, even columns that are only
    # rounding.
    vectors = torch.linalg.qr(root @ turn.flip(-1)).Q
    values = (squares.flip(-1) - shift.squeeze(-1)).clamp(min=0)
    return values.to(sketch), vectors.to(sketch)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor of positive definite matrices.

    Raises:
        NonFiniteError: they are not positive definite in float64.
    """
    interrupts.check()
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise NonFiniteError(
            "A precision matrix is not positive definite to rounding; raise the prior precision or fit with "
            "dtype=torch.float64."
        )
    return factor


def positive_part(matrix: Tensor) -> Tensor:
    """The nearest positive semidefinite matrix to a symmetric one, in the Frobenius norm."""
    values, vectors = torch.linalg.eigh((matrix + matrix.transpose(-1, -2)) / 2)
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.transpose(-1, -2)


def not_finite(outputs: Tensor) -> list[int]:
    """The places of the samples whose numbers ``(samples, ...)`` are not finite; minus infinity marks a class that is
    masked out.
    """
    bad = (outputs.isnan() | outputs.isposinf()).reshape(len(outputs), -1).any(1)
    return bad.nonzero().flatten().tolist()


def check_rows_finite(of_batches: Iterable[Tensor], what: str = "the model's own outputs") -> None:
    """Refuse tensors ``(samples, ...)``, one a batch, that are not finite: the outputs of a network, or what it takes.

    Raises:
        NonFiniteError: names the batch and the row.
    """
    for index, rows in enumerate(of_batches):
        if bad := not_finite(rows):
            raise NonFiniteError(
                f"Batch {index}: {what} for {len(bad)} of {len(rows)} inputs (number {bad[0]} first) are not finite. "
                f"Check the inputs for NaN or infinity, or leave them out."
            )


def load_tensors(wanted: Mapping[str, Any], saved: Any) -> None:
    """Copy the tensors of a saved state into those of `wanted`, which has the same nested names.

    Raises:
        ValueError: the saved ones have other names, shapes or number formats; names one.
    """
    if not isinstance(saved, dict) or saved.keys() != wanted.keys():
        raise ValueError("it has other tensors")
    found = cast(dict[str, Any], saved)
    for name, tensor in wanted.items():
        if isinstance(tensor, Mapping):
            load_tensors(cast(Mapping[str, Any], tensor), found[name])
            continue
        value: Any = found[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"'{name}' is of another shape or number format")
        tensor.detach().copy_(value)
