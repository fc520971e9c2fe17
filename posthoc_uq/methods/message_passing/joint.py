"""A linear layer over constant features, whose outputs are jointly Gaussian: expectation propagation with scalar sites.

With one full Gaussian an output, ``N(m_j, S_j)``, ``S_j^-1 = P_j + sum_n rho_nj f_n f_n^T``; the messages of the
targets to the logits, ``(tau_nj, rho_nj)``, are its sites. A regression has sites that do not depend on the posterior,
so that it is exact. Independent weights get the messages of a group of examples, whose logits are jointly Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import cholesky
from posthoc_uq.methods.message_passing.messages import (
    MIN_PRECISION,
    Message,
    Regression,
    Signal,
    clamped,
    damped,
    divided,
    from_moments,
    uniform_like,
)
from posthoc_uq.methods.message_passing.network import LayerMessage
from posthoc_uq.posteriors.laplace import LARGEST_BYTES

SWEEPS = 200
TOLERANCE = 1e-6  # change of a site, relative to the largest one, at which expectation propagation ends
_MAX_LAST_CHANGE = 1e-2  # change of the sites in the last sweep from which on it is an error
_MIN_SHARE = 0.05
_MAX_RISES = 3  # of the change, after which sites are damped more
_MAX_NUMBERS = 2**22  # in a temporary
_MAX_ROWS = 4096  # at once


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


def marginals(features: Tensor, posterior: Joint) -> Message:
    """The marginals of the logits ``(N, J)`` of features ``(N, I)``."""
    mean, covariance = posterior.moments()
    step = max(1, _MAX_NUMBERS // features.shape[1])
    variance = [
        torch.stack([((part @ matrix) * part).sum(-1) for matrix in covariance], -1)
        for part in features.split(step)
    ]
    return from_moments(features @ mean.T, torch.cat(variance))


def site_to_weight_messages(features: Tensor, sites: Message) -> Joint:
    """The messages of sites ``(N, J)`` to the weights, multiplied."""
    size, outputs = features.shape[1], sites.rho.shape[1]
    step = max(1, _MAX_NUMBERS // size)
    precision = features.new_zeros(outputs, size, size)
    for part, rho in zip(features.split(step), sites.rho.split(step), strict=True):
        for index in range(outputs):
            precision[index].addmm_((part * rho[:, index : index + 1]).T, part)
    return Joint(sites.tau.T @ features, precision)


def fit_sites(features: Tensor, targets: Tensor, signal: Signal, prior: Joint) -> tuple[Message, Joint]:
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
        return marginals(features, plus(prior, site_to_weight_messages(features, sites)))

    start = uniform_like(features.new_zeros(len(features), prior.field.shape[0]))
    sites = expectation_propagation(marginals_for, start, targets, signal, SWEEPS)
    return sites, site_to_weight_messages(features, sites)


def sites_within(features: Tensor, targets: Tensor, signal: Signal, posterior: Joint) -> Message:
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
        PosthocUQError: they still change in the last sweep.
    """
    share, last, rises = 1.0, torch.inf, 0
    for _ in range(sweeps):
        new = _renewed(marginals_for(sites), sites, targets, signal)
        change = _change(sites, new)
        rises += change > last
        if rises == _MAX_RISES:
            share, rises = max(share / 2, _MIN_SHARE), 0
        sites, last = damped(sites, new, share), change
        if change <= TOLERANCE:
            return sites
    if last > _MAX_LAST_CHANGE:
        raise PosthocUQError(
            f"The messages of the targets did not settle in {sweeps} sweeps (the last changed them by {last:.2g}); "
            f"bring the features to about unit size, raise the prior precision, or take posterior='diagonal'."
        )
    return sites


def _renewed(marginal: Message, sites: Message, targets: Tensor, signal: Signal) -> Message:
    """The messages of the targets under the cavities, ``(N, J)``."""
    cavity = divided(marginal, sites)
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


def group_message(
    inputs: Tensor, targets: Tensor, cavity: LayerMessage, signal: Signal, iterations: int
) -> LayerMessage:
    """The messages of a group to the weights.

    Args:
        inputs: ``(N, I)`` in float64.
        targets: as `signal` takes them.
        cavity: of one network's layer, ``(1, I, J)`` and ``(1, J)``; without a bias, its tensors have no element.
        signal: of the targets.
        iterations: in which the sites of the group settle.
    """
    bias = cavity.bias.rho.numel() > 0
    rows = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1) if bias else inputs
    before = as_matrix(cavity, bias)
    mean, variance = before.mean, before.variance  # (J, n)
    weighted = rows * variance.unsqueeze(1)  # (J, N, n)
    prior = weighted @ rows.T
    start = mean @ rows.T
    sites = uniform_like(start)
    logits = from_moments(start, prior.diagonal(dim1=-2, dim2=-1))
    root = torch.eye(len(rows), dtype=rows.dtype, device=rows.device).expand_as(prior)
    for _ in range(iterations):
        cavities = clamped(divided(logits, sites))
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
    message = divided(after, before)
    return as_layer_message(Message(message.tau, message.rho.clamp(min=0)), bias)


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


def as_matrix(message: LayerMessage, bias: bool) -> Message:
    """Messages ``(1, I, J)`` and ``(1, J)`` as ``(J, n)``, with the bias as the last column."""
    parts = (
        torch.cat([w[0].T, b[0].unsqueeze(1)], 1) if bias else w[0].T
        for w, b in zip(message.weights, message.bias, strict=True)
    )
    return Message(*parts)


def as_layer_message(message: Message, bias: bool) -> LayerMessage:
    """The inverse of `as_matrix`."""
    size = message.rho.shape[1] - bias
    weights = Message(*(part[:, :size].T.unsqueeze(0).contiguous() for part in message))
    return LayerMessage(weights, Message(*(part[:, size:].T.reshape(1, -1).contiguous() for part in message)))


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
