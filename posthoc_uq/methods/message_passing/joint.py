"""A linear layer over constant features with one full Gaussian an output: expectation propagation with scalar sites.

The posterior of output j is ``N(m_j, S_j)`` with ``S_j^-1 = P_j + sum_n rho_nj f_n f_n^T``; the messages of the targets
to the logits, ``(tau_nj, rho_nj)``, are its sites. Regression has sites that do not depend on the posterior, so that it
is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import cholesky
from posthoc_uq.methods.message_passing.gaussian import FLOOR, Message, damped, divided, from_moments, nothing
from posthoc_uq.methods.message_passing.targets import Signal

SWEEPS = 200
TOLERANCE = 1e-6
_UNSETTLED = 1e-2  # change of the sites in the last sweep from which on it is an error
_LEAST_SHARE = 0.05
_RISES = 3  # of the change, after which sites are damped more


class Joint(NamedTuple):
    """Gaussians in natural parameters, one an output.

    Attributes:
        field: precision times mean, ``(J, I)``.
        precision: ``(J, I, I)``.
    """

    field: Tensor
    precision: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means ``(J, I)`` and covariances ``(J, I, I)``.

        Raises:
            NonFiniteError: a precision is not positive definite.
        """
        root = cholesky(self.precision)
        mean = torch.cholesky_solve(self.field.unsqueeze(-1), root).squeeze(-1)
        return mean, torch.cholesky_inverse(root)


def plus(a: Joint, b: Joint) -> Joint:
    """The product of densities."""
    return Joint(a.field + b.field, a.precision + b.precision)


def independent(mean: Tensor, precision: Tensor) -> Joint:
    """Of independent weights, ``(J, I)``."""
    return Joint(mean * precision, torch.diag_embed(precision))


def marginals(features: Tensor, posterior: Joint, numbers: int = 2**22) -> Message:
    """The marginals of the logits ``(N, J)`` of features ``(N, I)``."""
    mean, covariance = posterior.moments()
    step = max(1, numbers // features.shape[1])
    variance = [
        torch.stack([((part @ own) * part).sum(-1) for own in covariance], -1)
        for part in features.split(step)
    ]
    return from_moments(features @ mean.T, torch.cat(variance))


def evidence_of(features: Tensor, sites: Message, numbers: int = 2**22) -> Joint:
    """What sites ``(N, J)`` say of the weights."""
    size, outputs = features.shape[1], sites.rho.shape[1]
    step = max(1, numbers // size)
    precision = features.new_zeros(outputs, size, size)
    for part, rho in zip(features.split(step), sites.rho.split(step), strict=True):
        for index in range(outputs):
            precision[index].addmm_((part * rho[:, index : index + 1]).T, part)
    return Joint(sites.tau.T @ features, precision)


def fit_sites(
    features: Tensor,
    targets: Tensor,
    signal: Signal,
    prior: Joint,
    *,
    sweeps: int = SWEEPS,
    tolerance: float = TOLERANCE,
) -> tuple[Message, Joint]:
    """The sites of all targets, and what they say of the weights.

    Args:
        features: ``(N, I)`` in float64, a 1 for the bias included.
        targets: as `signal` takes them.
        signal: of the targets.
        prior: of the weights, without these targets.
        sweeps: at most; covariances are refreshed once a sweep.
        tolerance: change of a site, relative to the largest one, at which they are settled.

    Raises:
        PosthocUQError: the sites do not settle.
        NonFiniteError: numbers are not finite.
    """

    def known(sites: Message) -> Message:
        return marginals(features, plus(prior, evidence_of(features, sites)))

    start = nothing(features.new_zeros(len(features), prior.field.shape[0]))
    sites = _settled(known, start, targets, signal, sweeps, tolerance)
    return sites, evidence_of(features, sites)


def sites_within(
    features: Tensor,
    targets: Tensor,
    signal: Signal,
    posterior: Joint,
    *,
    sweeps: int = 5 * SWEEPS,
    tolerance: float = TOLERANCE,
) -> Message:
    """The sites ``(N, J)`` of targets that `posterior` already holds: those for which it is settled.

    Args:
        features: ``(N, I)`` in float64, a 1 for the bias included.
        targets: as `signal` takes them.
        signal: of the targets.
        posterior: of all data.
        sweeps: at most.
        tolerance: as in `fit_sites`.

    Raises:
        PosthocUQError: the sites do not settle, or they say more than the posterior knows.
    """
    marginal = marginals(features, posterior)
    start = nothing(marginal.tau)
    return _settled(lambda _: marginal, start, targets, signal, sweeps, tolerance)


def _settled(
    known: Callable[[Message], Message],
    sites: Message,
    targets: Tensor,
    signal: Signal,
    sweeps: int,
    tolerance: float,
) -> Message:
    """The sites that are the messages under their own cavities, where `known` gives the marginals for sites."""
    share, last, rises = 1.0, torch.inf, 0
    for _ in range(sweeps):
        new = _renewed(known(sites), sites, targets, signal)
        change = _change(sites, new)
        rises += change > last
        if rises == _RISES:
            share, rises = max(share / 2, _LEAST_SHARE), 0
        sites, last = damped(sites, new, share), change
        if change <= tolerance:
            return sites
    if last > _UNSETTLED:
        raise PosthocUQError(
            f"The messages of the targets did not settle in {sweeps} sweeps (the last changed them by {last:.2g}); "
            f"bring the features to about unit size, raise the prior precision, or take posterior='diagonal'."
        )
    return sites


def _renewed(known: Message, sites: Message, targets: Tensor, signal: Signal) -> Message:
    """The messages of the targets under the cavities, ``(N, J)``."""
    cavity = divided(known, sites)
    if not bool((cavity.rho >= FLOOR).all()) or not bool(cavity.finite.all()):
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
