"""A last layer's independent weights, with the correlations of their inputs: for means, for new data, and for data that
go out.

Independent variances do not know what the old data say of combinations of weights: by them alone, later data would
move the means too far in some directions, and too little in others. The Gram ``G`` of the layer's inputs, which the
posterior keeps, knows. For output j the old data count as a Gaussian of the precision ``c_j G`` around
the mean ``m_j`` of the posterior, beside the prior ``P_0``. For a regression ``c_j`` is the noise precision, so that
means are exact. For classes the sites of the old targets are gone, and ``c_j`` is `SHARPER` times what the messages say
of a feature, relative to its Gram, on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.numerics import cholesky
from posthoc_uq.methods.message_passing.data import Units
from posthoc_uq.methods.message_passing.gaussian import Message
from posthoc_uq.methods.message_passing.targets import Regression
from posthoc_uq.posteriors.laplace import LARGEST_BYTES

SHARPER = 3.0
"""Messages to single weights say less than the sites of all targets do. Of 1, 2 and 4, both 2 and 4 predicted best
after updates and forgetting, on four networks of digits with two sizes of data each."""

_ROWS = 4096  # at once
_LARGEST_GRAM = LARGEST_BYTES // 2  # with a larger one, `kept_gram` refuses any number of outputs
_TOLERANCE = 1e-4  # of the sites of new targets, which the approximation does not need better


def gram_of(inputs: Tensor, shift: Tensor, bias: bool) -> Tensor | None:
    """The Gram ``(n, n)`` in float64 of a last layer's inputs ``(N, I)``, with `shift` ``(I,)`` taken from them where
    the layer has a bias, whose 1 is the last; None where it would be larger than 2 GiB.
    """
    size = inputs.shape[1] + bias
    if 8 * size**2 > _LARGEST_GRAM:
        return None
    gram = shift.new_zeros(size, size)
    for part in inputs.split(_ROWS):
        rows = as_double(part) - shift if bias else as_double(part)
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if bias else rows
        gram.addmm_(rows.T, rows)
    return (gram + gram.T) / 2


def in_units(gram: Tensor, units: Units) -> Tensor:
    """A Gram by `gram_of` as that of inputs in these units, which have the same shift."""
    spread = torch.ones_like(gram[0])
    spread[: len(units.spread)] = units.spread
    return gram / torch.outer(spread, spread)


def settled_means(
    prior: tuple[Tensor, Tensor],
    gram: Tensor,
    rows: Tensor,
    targets: Tensor,
    told: Message,
    signal: Regression,
) -> Message:
    """The messages of a regression to independent weights, with the means to which they converge: those of the exact
    posterior, ``(diag P + X^T X / s^2)^-1 (P mu + X^T y / s^2)``, which takes many epochs where inputs correlate.

    Args:
        prior: means and precisions ``(J, n)``.
        gram: ``X^T X``, ``(n, n)``.
        rows: ``X``, ``(N, n)``, with the bias's 1.
        targets: ``(N, J)``.
        told: the messages, ``(J, n)``.
        signal: of the targets.
    """
    noise = torch.as_tensor(signal.noise_variance, dtype=rows.dtype, device=rows.device).expand(
        targets.shape[1]
    )
    pulls, means = targets.T @ rows, list[Tensor]()
    for mean, precision, variance, pull in zip(*prior, noise, pulls, strict=True):
        system = torch.diag(precision) + gram / variance
        field = (precision * mean + pull / variance).unsqueeze(1)
        means.append(torch.cholesky_solve(field, cholesky(system)).squeeze(1))
    return Message(torch.stack(means) * (prior[1] + told.rho) - prior[1] * prior[0], told.rho)
