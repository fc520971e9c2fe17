"""Messages of a group of examples to the independent weights of a linear layer over constant features, made together.

The logits of a group are jointly Gaussian under the cavity, ``N(X m, X diag(v) X^T)``. Their sites are found by
expectation propagation, and the message to a weight is its exact marginal under cavity and sites, divided by the
cavity. A group of one example sends the messages of the paper. Larger groups need no damping, since the correlations of
their logits are in the covariance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.core.numerics import cholesky
from posthoc_uq.methods.message_passing.gaussian import Message, clamped, divided, from_moments, nothing
from posthoc_uq.methods.message_passing.network import Belief
from posthoc_uq.methods.message_passing.targets import Signal


def group_message(inputs: Tensor, targets: Tensor, cavity: Belief, signal: Signal, iterations: int) -> Belief:
    """What a group says of the weights.

    Args:
        inputs: ``(N, I)`` in float64.
        targets: as `signal` takes them.
        cavity: of one network's layer, ``(1, I, J)`` and ``(1, J)``; without a bias, its tensors have no element.
        signal: of the targets.
        iterations: in which the sites of the group settle.
    """
    bias = cavity.bias.rho.numel() > 0
    rows = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1) if bias else inputs
    before = _matrix(cavity, bias)
    mean, variance = before.mean, before.variance  # (J, n)
    weighted = rows * variance.unsqueeze(1)  # (J, N, n)
    prior = weighted @ rows.T
    start = mean @ rows.T
    sites = nothing(start)
    logits = from_moments(start, prior.diagonal(dim1=-2, dim2=-1))
    root = torch.eye(len(rows), dtype=rows.dtype, device=rows.device).expand_as(prior)
    for _ in range(iterations):
        cavities = clamped(divided(logits, sites))
        message = signal.message(Message(*(part.T.unsqueeze(0) for part in cavities)), targets)
        sites = Message(*(part.squeeze(0).T for part in message))
        root, logits = _posterior(prior, start, sites)
    half = sites.rho.sqrt()
    known = half.unsqueeze(2) * torch.cholesky_inverse(root) * half.unsqueeze(1)
    lost = variance.square() * ((known @ rows) * rows).sum(1)
    after = from_moments(
        mean + variance * ((sites.tau - sites.rho * logits.mean) @ rows),
        torch.maximum(variance - lost, 1e-12 * variance),
    )
    told = divided(after, before)
    return _belief(Message(told.tau, told.rho.clamp(min=0)), bias)


def _posterior(prior: Tensor, start: Tensor, sites: Message) -> tuple[Tensor, Message]:
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


def _matrix(belief: Belief, bias: bool) -> Message:
    """``(J, n)``, with the bias as the last column."""
    parts = (
        torch.cat([w[0].T, b[0].unsqueeze(1)], 1) if bias else w[0].T
        for w, b in zip(belief.weights, belief.bias, strict=True)
    )
    return Message(*parts)


def _belief(message: Message, bias: bool) -> Belief:
    size = message.rho.shape[1] - bias
    weights = Message(*(part[:, :size].T.unsqueeze(0) for part in message))
    return Belief(weights, Message(*(part[:, size:].T.reshape(1, -1) for part in message)))
