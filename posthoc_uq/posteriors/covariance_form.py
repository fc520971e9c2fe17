"""The covariance of one layer's weights as a diagonal minus a low-rank part, with which Jacobians are contracted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """The part that is subtracted: ``diag(s w) U D B^-1 D U^T diag(s w)`` with ``U = U_g x U_a``, ``D = diag(roots)``
    and ``B = R R^T``.

    Attributes:
        input_basis: ``U_a``, ``(G, n, a)``.
        output_basis: ``U_g``, ``(G, m, g)``.
        roots: ``(G, g, a)``.
        shrink: ``s``, ``(G, m, n)``, or None for 1.
        root: ``R``, lower triangular, ``(G, g a, g a)`` in float64.
        row_roots: computes ``T``, ``(G, m, a, a)``: the part subtracted for the weights of output ``o`` is
            ``diag(s w)_o U_a T_o^T T_o U_a^T diag(s w)_o``.
    """

    input_basis: Tensor
    output_basis: Tensor
    roots: Tensor
    shrink: Tensor | None
    root: Tensor
    row_roots: Callable[[], Tensor]


@dataclass(frozen=True)
class CovarianceForm:
    """``Sigma = (Q_G x Q_A) (diag w - low rank) (Q_G x Q_A)^T`` of one layer.

    Attributes:
        weights: ``w``, ``(G, m, n)``.
        bases: orthogonal ``Q_A`` ``(G, n, n)`` and ``Q_G`` ``(G, m, m)``, or None for the identity.
        low_rank: or None; a form has either this or bases.
    """

    weights: Tensor
    bases: tuple[Tensor, Tensor] | None = None
    low_rank: LowRank | None = None
