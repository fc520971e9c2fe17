"""What the numbers of a tensor may be, by its name: in a posterior, and in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.posteriors.numerics import as_double
from posthoc_uq.storage.schema import LARGEST

ORTHONORMAL = 0.05
"""How far the rows of ``U^T U`` may lie from those of the identity, in the Euclidean norm. Rounding a basis to bfloat16
moves them by less than 0.01."""
SYMMETRIC = 0.01  # how far a matrix and its transpose may be apart, as a share of the largest entry
PRECISE = 1e36  # the largest precision and variance that float32 computes with

_NON_NEGATIVE = frozenset(
    """diagonal residual eigenvalues input_eigenvalues output_eigenvalues input_values output_values variances
    variance positions""".split()
)
_BASES = frozenset(("input_basis", "output_basis", "basis", "inputs", "outputs"))
_SYMMETRIC = frozenset(("fisher", "gram"))

_WHOLE = 512  # columns up to which all products of a basis are formed; of more, some random combinations
_PROBES = 32


def complaint(name: str, tensor: Tensor, *, padded: bool = False) -> str | None:
    """What is wrong with the numbers of a tensor, in words, or None.

    Args:
        name: what they are; a name that is not known has to be finite alone.
        tensor: of floating point.
        padded: whether a basis may have columns of zeros.
    """
    if not bool(torch.isfinite(tensor).all()):
        return "holds NaN or infinity"
    if not tensor.numel():
        return None
    if float(tensor.abs().max()) > LARGEST:
        return f"holds numbers beyond {LARGEST:g}"
    checked = tensor.diagonal(dim1=-2, dim2=-1) if name in _SYMMETRIC else tensor
    if name in (*_NON_NEGATIVE, *_SYMMETRIC) and bool((checked < 0).any()):
        return "holds negative numbers where a variance must stand"
    if name in _SYMMETRIC and _asymmetry(tensor) > SYMMETRIC:
        return "is not symmetric"
    if name in _BASES and _skew(tensor, padded) > ORTHONORMAL:
        return f"does not have orthonormal columns, to {ORTHONORMAL:g}"
    return None


def _asymmetry(matrices: Tensor) -> float:
    apart = (matrices - matrices.transpose(-1, -2)).abs().max()
    return float(apart / matrices.abs().max().clamp(min=torch.finfo(matrices.dtype).tiny))


def _skew(basis: Tensor, padded: bool) -> float:
    """The largest norm of a row of ``U^T U - 1``; of many columns, its estimate from random combinations."""
    width = basis.shape[-1]
    if width > basis.shape[-2]:
        return float("inf")
    wide = basis if basis.dtype == torch.float64 else basis.float()
    if width <= _WHOLE:
        probes = torch.eye(width, dtype=wide.dtype, device=wide.device)
    else:  # fresh ones, so that no file can be made to fit them
        source = torch.Generator()
        source.seed()
        probes = torch.randn(width, _PROBES, generator=source, dtype=wide.dtype, device="cpu").to(wide.device)
        probes = probes / _PROBES**0.5
    wanted = probes * (wide != 0).any(-2).unsqueeze(-1) if padded else probes
    rows = wide.transpose(-1, -2) @ (wide @ probes) - wanted
    return float(rows.square().sum(-1).max().sqrt())


def check_blocks(state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse blocks whose precisions or variances float32 does not hold, or whose columns of zeros are no padding.

    Args:
        state: a description that the table admits.
        tensors: of every block, by its name.

    Raises:
        CorruptPosteriorError: names the block.
    """
    attributes = state["attributes"]
    prior, noise = attributes["prior_precision"], attributes["noise_scale"]
    largest_prior = max(prior.values()) if isinstance(prior, dict) else prior
    scale = attributes["scale"] / noise ** attributes["evidence"]["noise_power"]
    for name, block in state["blocks"].items():
        own = tensors[name]
        if block["kind"] == "mean_field":
            size = _largest(own["variances"]) * block["attributes"]["samples"] / attributes["scale"]
        else:
            size = scale * _largest_fisher(own) + largest_prior
        if not size <= PRECISE:
            raise CorruptPosteriorError(
                f"block '{name}' reaches {size:.3g} at this scale and prior precision, more than {PRECISE:g}"
            )
        if block["kind"] == "inf":
            used = own["eigenvalues"] != 0
            for basis, seen in (("input_basis", used.any(-2)), ("output_basis", used.any(-1))):
                if bool((seen & (own[basis] == 0).all(-2)).any()):
                    raise CorruptPosteriorError(
                        f"block '{name}' has an eigenvalue along a direction of '{basis}' that is zero"
                    )


def check_features(tensors: Mapping[str, Tensor]) -> None:
    """Refuse Grams of features whose eigenvalues are larger than the mean of 1, to which they are scaled, allows.

    Raises:
        CorruptPosteriorError: they are.
    """
    most = 1.5 * tensors["basis"].shape[0]
    traces = as_double(tensors["diagonal"]).sum(1) + as_double(tensors["factors"]).square().sum((1, 2))
    if float(traces.max()) > most or _largest(tensors["residual"]) > most:
        raise CorruptPosteriorError("its features are not scaled to a mean eigenvalue of 1")


def _largest_fisher(own: Mapping[str, Tensor]) -> float:
    if "input_eigenvalues" in own:
        return _largest(own["input_eigenvalues"]) * _largest(own["output_eigenvalues"])
    return max(_largest(own[name]) for name in ("diagonal", "eigenvalues", "fisher") if name in own)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
