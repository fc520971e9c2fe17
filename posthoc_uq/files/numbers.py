"""Whether the numbers of a tensor are what its `TensorSpec` allows, in a posterior and in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.core.numerics import as_double
from posthoc_uq.posteriors.block import Block, Settings, TensorSpec, largest_of

ORTHONORMAL = 0.05
"""How far the rows of ``U^T U`` may lie from those of the identity, in the Euclidean norm. Rounding a basis to bfloat16
moves them by less than 0.01."""
SYMMETRIC = 0.01  # how far a matrix and its transpose may be apart, as a share of the largest entry
PRECISE = 1e36  # the largest precision and variance that float32 computes with

_WHOLE = 512  # columns up to which all products of a basis are formed; of more, some random combinations
_PROBES = 32


def complaint(spec: TensorSpec, tensor: Tensor) -> str | None:
    """What is wrong with the numbers of a tensor, in words, or None."""
    if spec.bits != (tensor.dtype == torch.uint8):
        return "does not hold packed bits" if spec.bits else "holds packed bits in place of numbers"
    if not bool(torch.isfinite(tensor).all()):
        return "holds NaN or infinity"
    if not tensor.numel():
        return None
    if float(tensor.abs().max()) > spec.largest:
        return f"holds numbers beyond {spec.largest:g}"
    checked = tensor.diagonal(dim1=-2, dim2=-1) if spec.symmetric else tensor
    if (spec.non_negative or spec.symmetric) and bool((checked < 0).any()):
        return "holds negative numbers where a variance must stand"
    if spec.symmetric and _asymmetry(tensor) > SYMMETRIC:
        return "is not symmetric"
    if spec.orthonormal and _skew(tensor, spec.padded) > ORTHONORMAL:
        return f"does not have orthonormal columns, to {ORTHONORMAL:g}"
    return None


def _asymmetry(matrices: Tensor) -> float:
    difference = (matrices - matrices.transpose(-1, -2)).abs().max()
    return float(difference / matrices.abs().max().clamp(min=torch.finfo(matrices.dtype).tiny))


def _skew(basis: Tensor, padded: bool) -> float:
    """The largest norm of a row of ``U^T U - 1``; with many columns, its estimate from random combinations."""
    width = basis.shape[-1]
    if width > basis.shape[-2]:
        return float("inf")
    wide = basis if basis.dtype == torch.float64 else basis.float()
    if width <= _WHOLE:
        probes = torch.eye(width, dtype=wide.dtype, device=wide.device)
    else:  # drawn anew each time, so that no file can be made to pass
        source = torch.Generator()
        source.seed()
        probes = torch.randn(width, _PROBES, generator=source, dtype=wide.dtype, device="cpu").to(wide.device)
        probes = probes / _PROBES**0.5
    identity = probes * (wide != 0).any(-2).unsqueeze(-1) if padded else probes
    rows = wide.transpose(-1, -2) @ (wide @ probes) - identity
    return float(rows.square().sum(-1).max().sqrt())


def check_blocks(
    attributes: Mapping[str, Any], blocks: Mapping[str, Block], prior: Mapping[str, Tensor] | None = None
) -> None:
    """Refuse blocks whose precisions or variances float32 does not hold, or whose tensors do not fit each other.

    Args:
        attributes: of a description that the table admits.
        blocks: by name.
        prior: factors on the prior precisions of single weights, by the name of the parameter.

    Raises:
        CorruptPosteriorError: names the block.
    """
    precision, noise_scale = attributes["prior_precision"], attributes["noise_scale"]
    precisions: list[float] = list(precision.values()) if isinstance(precision, dict) else [precision]
    factors = [1.0] + [float(end) for tensor in (prior or {}).values() for end in torch.aminmax(tensor)]
    if not min(precisions) * min(factors) >= 1 / PRECISE:
        raise CorruptPosteriorError(
            "its prior precisions of single weights must be positive, and not so small"
        )
    # the noise is a part of the weights' precision where the likelihood has a noise variance
    noisy = "noise_variance" in attributes.get("likelihood", {"noise_variance": None})
    power = attributes["evidence"]["noise_power"] if noisy else 0
    scale = attributes["scale"] / noise_scale**power
    settings = Settings(scale, max(precisions) * max(factors), attributes["residual_weight"])
    for name, block in blocks.items():
        size = block.reach(settings)
        if not size <= PRECISE:
            raise CorruptPosteriorError(
                f"block '{name}' reaches {size:.3g} at this scale and prior precision, more than {PRECISE:g}"
            )
        fault = block.fault()
        if fault is not None:
            raise CorruptPosteriorError(f"block '{name}' {fault}")


def check_features(tensors: Mapping[str, Tensor]) -> None:
    """Refuse Grams of features that are too large to be scaled to a mean eigenvalue of 1.

    Raises:
        CorruptPosteriorError: they are.
    """
    most = 1.5 * tensors["basis"].shape[0]
    traces = as_double(tensors["diagonal"]).sum(1) + as_double(tensors["factors"]).square().sum((1, 2))
    if float(traces.max()) > most or largest_of(tensors["residual"]) > most:
        raise CorruptPosteriorError("its features are not scaled to a mean eigenvalue of 1")
