"""Inner products of Jacobian rows: of each function with itself, with all others, or also between samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["variance", "covariance", "joint"]


def gram(rows: Tensor, mode: Mode) -> Tensor:
    """Inner products of rows ``(samples, functions, numbers)``: ``(samples, functions)`` for ``"variance"``, of all
    pairs of functions ``(samples, functions, functions)`` for ``"covariance"``, and of all pairs of samples and
    functions ``(samples * functions, samples * functions)`` for ``"joint"``.
    """
    if mode == "variance":
        return torch.linalg.vector_norm(rows, dim=-1).square()
    flat = rows.flatten(0, 1).unsqueeze(0) if mode == "joint" else rows
    products = torch.matmul(flat, flat.transpose(-1, -2))
    return products[0] if mode == "joint" else products


def marginal(products: Tensor, samples: int, mode: Mode) -> Tensor:
    """The variances ``(samples, functions)`` in a result of `gram`."""
    if mode == "variance":
        return products
    return products.diagonal(dim1=-2, dim2=-1).reshape(samples, -1)


def weighted_gram(activations: Tensor, gradients: Tensor, weights: Tensor, mode: Mode, limit: int) -> Tensor:
    """``sum_oi J_oi w_oi J'_oi`` of ``J = sum_t g_t a_t^T``, in the shapes of `gram`.

    Args:
        activations: ``(samples, G, T, n)``.
        gradients: ``(samples, G, functions, T, m)``.
        weights: ``w``, ``(G, m, n)``.
        mode: ``"joint"`` is for one position only.
        limit: bytes for the products of pairs of activations.
    """
    if mode == "joint":
        return _weighted_jointly(activations[:, :, 0], gradients[:, :, :, 0], weights, limit)
    if activations.shape[2] == 1:
        spread = torch.einsum("sgti,goi->sgto", activations.square(), weights).unsqueeze(2)
        weighted = gradients * spread
    else:
        positions = activations.shape[2]
        numbers = positions * activations[0].numel() * activations.element_size()
        step = max(1, limit // max(1, numbers))
        parts: list[Tensor] = []
        for part_activations, part_gradients in zip(
            activations.split(step), gradients.split(step), strict=True
        ):
            pairs = (part_activations.unsqueeze(2) * part_activations.unsqueeze(3)).flatten(2, 3)
            spread = torch.matmul(pairs, weights.transpose(-1, -2))
            spread = spread.reshape(*part_activations.shape[:2], positions, positions, -1)
            parts.append(torch.einsum("sgkto,sgtuo->sgkuo", part_gradients, spread))
        weighted = torch.cat(parts) if len(parts) > 1 else parts[0]
    if mode == "variance":
        return (gradients * weighted).sum((1, 3, 4))
    return torch.matmul(weighted.flatten(3), gradients.flatten(3).transpose(-1, -2)).sum(1)


def _weighted_jointly(activations: Tensor, gradients: Tensor, weights: Tensor, limit: int) -> Tensor:
    """`weighted_gram` of all samples: activations ``(samples, G, n)``, gradients ``(samples, G, functions, m)``."""
    samples, _, functions, _ = gradients.shape
    products = gradients.new_zeros(samples, functions, samples, functions)
    step = max(1, limit // max(1, samples * weights[:, 0].numel() * weights.element_size()))
    for start in range(0, samples, step):
        pairs = activations[start : start + step].unsqueeze(1) * activations
        spread = torch.einsum("stgi,goi->stgo", pairs, weights)
        for offset in range(spread.shape[0]):
            weighted = gradients * spread[offset].unsqueeze(2)  # (other samples, G, functions, m)
            sample_gradients = gradients[start + offset]
            products[start + offset] = torch.einsum("gko,tglo->ktl", sample_gradients, weighted)
    return products.reshape(samples * functions, samples * functions)
