"""Blocks of Laplace posteriors: diagonal, Kronecker factors, dense, subnetwork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, host_double
from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError
from posthoc_uq.core.numerics import cholesky, constant, eigh_descending, positive_part
from posthoc_uq.core.options import Count
from posthoc_uq.posteriors.block import (
    BITS,
    GROUPS,
    INPUTS,
    OUTPUTS,
    WEIGHTS,
    Block,
    MatrixShape,
    PrecisionSettings,
    Size,
    TensorField,
    TensorSpec,
    Weights,
    combined,
    combined_matrices,
    largest_of,
    unpacked,
)
from posthoc_uq.posteriors.covariance import (
    Covariance,
    DenseRows,
    DiagonalPrecision,
    Kronecker,
    Variances,
    WideKronecker,
    log_sum,
)


@dataclass(eq=False, repr=False)
class DiagonalBlock(Block):
    """Keeps ``d``, the mean square of the per-sample gradients, ``(G, m, n)``: the exact diagonal of the Fisher. ``P =
    scale * d + prior_precision``.
    """

    kind = "diagonal"
    makes = DiagonalPrecision
    per_weight_prior = True
    factorises = False

    diagonal: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, mean_of="diagonal", non_negative=True)]

    def covariance(self, settings: PrecisionSettings) -> DiagonalPrecision:
        return DiagonalPrecision(settings.precision(self.diagonal), self.diagonal)

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        return scale * torch.diag_embed(self.diagonal.flatten(1))


_LEADING = 32  # directions of each side that `leading` gives; the bases are in descending order


@dataclass(eq=False, repr=False)
class _EigenbasisBlock(Block):
    """Full eigenbases of both Grams, in which the precision is diagonal: ``P = (U_G x U_A) diag(scale * lambda +
    prior_precision) (U_G x U_A)^T``. KFAC (Martens, Grosse 2015; Ritter, Botev, Barber 2018) takes ``lambda = s_G
    s_A^T`` from the eigenvalues of the two Grams; EFB (George et al. 2018) takes the exact second moments in that
    basis.
    """

    makes = Kronecker
    factorises = False

    input_basis: Annotated[Tensor, TensorField(GROUPS, INPUTS, INPUTS, orthonormal=True)]
    output_basis: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, OUTPUTS, orthonormal=True)]

    def eigenvalues_matrix(self) -> Tensor:
        """Eigenvalues of the Fisher approximation, ``(G, m, n)``."""
        raise AssertionError("each family defines its own eigenvalues")

    def leading(self) -> tuple[Tensor, Tensor, Tensor]:
        kept = slice(_LEADING)
        values = self.eigenvalues_matrix()[:, kept, kept]
        return self.input_basis[..., kept], self.output_basis[..., kept], values

    def covariance(self, settings: PrecisionSettings) -> Kronecker:
        return Kronecker(self.input_basis, self.output_basis, settings.precision(self.eigenvalues_matrix()))

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        vectors = torch.einsum("gop,giq->goipq", self.output_basis, self.input_basis)
        vectors = vectors.flatten(3).flatten(1, 2)
        return (
            scale * (vectors * self.eigenvalues_matrix().flatten(1).unsqueeze(1)) @ vectors.transpose(-1, -2)
        )


FactorsOf = Literal["rows", "gradients"]
"""What Kronecker factors are the Grams of: a layer's inputs and output gradients, or the gradients of samples."""


@dataclass(eq=False, repr=False)
class KroneckerBlock(_EigenbasisBlock):
    """KFAC: eigenvectors and eigenvalues of two Grams. ``A = E[a a^T]`` of inputs and ``G = E[g g^T]`` of output
    gradients, or, of the gradients ``J`` of samples, ``A = n E[J^T J] / tr`` and ``G = E[J J^T] / n`` with n inputs.

    With both Grams, which doubles its size, data can come in and go out.

    Attributes:
        input_basis: ``U_A``, ``(groups, inputs, inputs)``; inputs include the bias's column.
        output_basis: ``U_G``, ``(groups, outputs, outputs)``.
        input_eigenvalues: ``s_A``, ``(groups, inputs)``.
        output_eigenvalues: ``s_G``, ``(groups, outputs)``.
        input_gram: ``A``, as `input_basis`, or None.
        output_gram: ``G``, as `output_basis`, or None; a mean over positions as well as samples.
        positions: how many positions a sample has on average, or n of factors of gradients; a scalar, or None.
        factors_of: what the Grams are of.
    """

    kind = "kfac"

    input_eigenvalues: Annotated[Tensor, TensorField(GROUPS, INPUTS, non_negative=True)]
    output_eigenvalues: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, non_negative=True)]
    input_gram: Annotated[
        Tensor | None, TensorField(GROUPS, INPUTS, INPUTS, optional="grams", symmetric=True, exact=True)
    ] = None
    output_gram: Annotated[
        Tensor | None, TensorField(GROUPS, OUTPUTS, OUTPUTS, optional="grams", symmetric=True, exact=True)
    ] = None
    positions: Annotated[Tensor | None, TensorField(optional="grams", non_negative=True, exact=True)] = None
    factors_of: FactorsOf = field(default="rows", metadata={"absent": "rows"})

    def eigenvalues_matrix(self) -> Tensor:
        return self.output_eigenvalues.unsqueeze(-1) * self.input_eigenvalues.unsqueeze(-2)

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> KroneckerBlock:
        if self.input_gram is None or self.output_gram is None or self.positions is None:
            return super().combined(part, weights)  # type: ignore[return-value]
        positions = combined(self.positions, part["positions"], weights, "number of positions")
        whole = as_double(positions).clamp(min=torch.finfo(torch.float64).tiny)
        by_positions = Weights(  # the second Gram is a mean over positions
            weights.kept * float(as_double(self.positions) / whole),
            weights.part * float(as_double(part["positions"]) / whole),
            weights.precision,
        )
        if "of_gradients" in part:
            # a sum of J^T J, with the trace of that of J J^T, was scaled to the trace n
            kept = self.input_gram * _traces(self.output_gram)
            other = part["input_gram"] * _traces(part["output_gram"])
            input_gram = combined_matrices(kept, other, by_positions, "Gram of the inputs")
            trace = _traces(input_gram).clamp(min=torch.finfo(input_gram.dtype).tiny)
            input_gram = input_gram * (input_gram.shape[-1] / trace)
        else:
            input_gram = combined_matrices(self.input_gram, part["input_gram"], weights, "Gram of the inputs")
        output_gram = combined_matrices(
            self.output_gram, part["output_gram"], by_positions, "Gram of the output gradients"
        )
        input_values, input_basis = eigh_descending(input_gram)
        output_values, output_basis = eigh_descending(output_gram)
        return KroneckerBlock(
            input_basis,
            output_basis,
            input_values,
            output_values,
            input_gram,
            output_gram,
            positions,
            self.factors_of,
        )

    def largest_value(self, settings: PrecisionSettings) -> float:
        largest = largest_of(self.input_eigenvalues) * largest_of(self.output_eigenvalues)
        return settings.largest_precision(largest)


def _traces(grams: Tensor) -> Tensor:
    """Of every matrix, ``(..., 1, 1)``."""
    return grams.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


_KEPT = Size("kept_outputs", 1, OUTPUTS)


@dataclass(eq=False, repr=False)
class _WideEigenbasisBlock(Block):
    """Of a layer with very many outputs: an eigenbasis of the inputs, the leading directions ``U`` of the outputs, and
    one eigenvalue for each input direction that all other directions of the outputs share.
    """

    makes = WideKronecker
    factorises = False

    input_basis: Annotated[Tensor, TensorField(GROUPS, INPUTS, INPUTS, orthonormal=True)]
    output_basis: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, _KEPT, orthonormal=True)]

    def _eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Of the Fisher, in the directions ``(G, k, n)`` and outside of them ``(G, 1, n)``."""
        raise AssertionError("each family defines its own eigenvalues")

    def leading(self) -> tuple[Tensor, Tensor, Tensor]:
        kept = slice(_LEADING)
        return (
            self.input_basis[..., kept],
            self.output_basis[..., kept],
            self._eigenvalues()[0][:, kept, kept],
        )

    def covariance(self, settings: PrecisionSettings) -> WideKronecker:
        inside, others = (settings.precision(values) for values in self._eigenvalues())
        return WideKronecker(self.input_basis, self.output_basis, inside, others)

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        basis, (inside, others) = self.output_basis, self._eigenvalues()
        of_inputs = self.input_basis.unsqueeze(-3) * torch.cat([inside, others], 1).unsqueeze(-2)
        of_inputs = of_inputs @ self.input_basis.transpose(-1, -2).unsqueeze(-3)  # (G, k + 1, n, n)
        unit = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
        outside = unit - basis @ basis.transpose(-1, -2)
        of_outputs = torch.cat([torch.einsum("gok,gpk->gkop", basis, basis), outside.unsqueeze(1)], 1)
        found = torch.einsum("gkop,gkij->goipj", of_outputs, of_inputs)
        return scale * found.flatten(3).flatten(1, 2)


@dataclass(eq=False, repr=False)
class WideKroneckerBlock(_WideEigenbasisBlock):
    """KFAC of a layer with very many outputs: `KroneckerBlock` with the leading directions of the outputs alone.

    ``G ~ U diag(s_G) U^T + s (1 - U U^T)``, where ``s`` keeps the trace. With as many directions as ``G`` has ranks it
    is exact, with ``s = 0``.

    Attributes:
        input_basis: ``U_A``, ``(groups, inputs, inputs)``; inputs include the bias's column.
        output_basis: ``U``, ``(groups, outputs, kept)``.
        input_eigenvalues: ``s_A``, ``(groups, inputs)``.
        output_eigenvalues: ``s_G``, ``(groups, kept)``.
        output_rest: ``s``, ``(groups,)``.
    """

    kind = "kfac_wide"

    input_eigenvalues: Annotated[Tensor, TensorField(GROUPS, INPUTS, non_negative=True)]
    output_eigenvalues: Annotated[Tensor, TensorField(GROUPS, _KEPT, non_negative=True)]
    output_rest: Annotated[Tensor, TensorField(GROUPS, non_negative=True)]

    def _eigenvalues(self) -> tuple[Tensor, Tensor]:
        inputs = self.input_eigenvalues.unsqueeze(-2)
        return self.output_eigenvalues.unsqueeze(-1) * inputs, self.output_rest[:, None, None] * inputs

    def largest_value(self, settings: PrecisionSettings) -> float:
        largest = largest_of(self.input_eigenvalues) * largest_of(self.output_eigenvalues)
        return settings.largest_precision(largest)


@dataclass(eq=False, repr=False)
class WideEigenvalueCorrectedBlock(_WideEigenbasisBlock):
    """EFB of a layer with very many outputs: exact second moments in the leading directions of the outputs, and of each
    input direction their mean over all others, so that the trace is exact.

    Attributes:
        eigenvalues: ``(groups, kept, inputs)``.
        rest: ``(groups, inputs)``.
    """

    kind = "efb_wide"

    eigenvalues: Annotated[
        Tensor, TensorField(GROUPS, _KEPT, INPUTS, mean_of="eigenvalues", non_negative=True)
    ]
    rest: Annotated[Tensor, TensorField(GROUPS, INPUTS, mean_of="rest", non_negative=True)]

    def _eigenvalues(self) -> tuple[Tensor, Tensor]:
        return self.eigenvalues, self.rest.unsqueeze(-2)

    def trace_in_basis(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
        inside, outside = (float(as_double(part[name]).sum()) for name in ("eigenvalues", "rest"))
        _, outputs, kept = self.output_basis.shape
        return inside, inside + outside * (outputs - kept)


@dataclass(eq=False, repr=False)
class EigenvalueCorrectedBlock(_EigenbasisBlock):
    """EFB: the Kronecker-factored eigenbasis with exact second moments ``(G, m, n)``."""

    kind = "efb"

    eigenvalues: Annotated[
        Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, mean_of="eigenvalues", non_negative=True)
    ]

    def eigenvalues_matrix(self) -> Tensor:
        return self.eigenvalues

    def trace_in_basis(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
        if "inside" not in part:
            return None
        whole = float(as_double(part["eigenvalues"]).sum())
        return whole * float(part["inside"]), whole


LARGEST_BYTES = 4 * 2**30  # the most that the Fisher may take in float64


def _dense(fisher: Tensor, scale: float | Tensor, prior: Tensor) -> DenseRows:
    """The covariance for a Fisher ``(weights, weights)`` and prior precisions ``(weights,)``."""
    wide = as_double(fisher)
    own = prior.to(wide.device).diag()
    try:
        root = cholesky(scale * wide + own)
    except NonFiniteError:  # rounding of the summed Fisher left an eigenvalue below -prior_precision
        root = cholesky(scale * positive_part(wide) + own)
    return DenseRows(root[None, None], fisher)


@dataclass(eq=False, repr=False)
class DenseBlock(Block):
    """Keeps the Fisher ``(parameters, parameters)`` of all layers together, with the correlations between them."""

    kind = "dense"
    makes = DenseRows
    per_weight_prior = True
    joint = True

    fisher: Annotated[
        Tensor,
        TensorField(WEIGHTS, WEIGHTS, mean_of="matrix", max_numbers=LARGEST_BYTES // 8, symmetric=True),
    ]

    def covariance(self, settings: PrecisionSettings) -> DenseRows:
        prior = host_double(settings.prior_precision).expand(1, 1, len(self.fisher)).flatten()
        return _dense(self.fisher, settings.scale, prior)

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        return scale * self.fisher.unsqueeze(0)


class SubnetworkCovariance(Covariance):
    """``N(0, P^-1)`` over the chosen weights, and zero for the others; tensors are ``(..., 1, 1, weights)``."""

    def __init__(self, chosen: DenseRows, index: Tensor, weights: int) -> None:
        self._chosen, self._index, self._weights = chosen, index, weights

    def _of_chosen(self, matrix: Tensor) -> Tensor:
        """The chosen columns of ``(q, 1, 1, weights)``, or of one layer's ``(q, G, m, n)``, ``(q, 1, 1, chosen)``."""
        return matrix.flatten(1)[:, self._index.to(matrix.device)].reshape(len(matrix), 1, 1, -1)

    def _spread(self, values: Tensor) -> Tensor:
        """Numbers of the chosen weights ``(..., 1, 1, chosen)`` among zeros."""
        whole = values.new_zeros(*values.shape[:-1], self._weights)
        return whole.index_copy(-1, self._index.to(values.device), values)

    def transform(self, normals: Tensor) -> Tensor:
        return self._spread(self._chosen.transform(self._of_chosen(normals))).reshape(normals.shape)

    def times_precision(self, matrices: Tensor) -> Tensor:
        return self._spread(self._chosen.times_precision(self._of_chosen(matrices))).reshape(matrices.shape)

    def whiten(self, jacobians: Tensor) -> Tensor:
        return self._chosen.whiten(self._of_chosen(jacobians))

    def variance(self) -> Tensor:
        return self._spread(self._chosen.variance())

    def log_determinant(self) -> Tensor:
        """Over the chosen weights."""
        return self._chosen.log_determinant()


_CHOSEN = Size("chosen", 1, WEIGHTS)


@dataclass(eq=False, repr=False)
class SubnetworkBlock(Block):
    """Keeps the Fisher ``(chosen, chosen)`` of the chosen weights of all layers together, and which they are; all
    others are certain (Daxberger et al. 2021).

    Attributes:
        fisher: ``(chosen, chosen)``.
        kept: one bit for each weight of the layers, packed eight to a byte, the first the highest.
        weights: of the layers, chosen or not.
    """

    kind = "subnetwork"
    makes = SubnetworkCovariance
    per_weight_prior = True
    joint = True
    heads_note = "head='moments' takes the chosen weights as independent, with their exact variances"

    fisher: Annotated[
        Tensor,
        TensorField(_CHOSEN, _CHOSEN, mean_of="matrix", max_numbers=LARGEST_BYTES // 8, symmetric=True),
    ]
    kept: Annotated[Tensor, TensorField(BITS, bits=True, largest=255.0)]
    weights: Count

    @constant
    def index(self) -> Tensor:
        """The places of the chosen weights, ascending, ``(chosen,)``."""
        return unpacked(self.kept, self.weights).nonzero().flatten()

    def covariance(self, settings: PrecisionSettings) -> SubnetworkCovariance:
        prior = host_double(settings.prior_precision).expand(1, 1, self.weights).flatten()
        chosen = _dense(self.fisher, settings.scale, prior[self.index.cpu()])
        return SubnetworkCovariance(chosen, self.index, self.weights)

    @classmethod
    def specs(cls, shape: MatrixShape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        if attributes.get("weights") != shape[-1]:
            raise CorruptPosteriorError(
                f"A subnetwork of {shape[-1]} weights is described by another number."
            )
        return super().specs(shape, attributes)

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        whole = self.fisher.new_zeros(self.weights, self.weights)
        whole[self.index.unsqueeze(1), self.index] = scale * self.fisher
        return whole.unsqueeze(0)

    def uncertain(self) -> Tensor:
        return unpacked(self.kept, self.weights).reshape(1, 1, -1)

    def fault(self) -> str | None:
        counted = int(unpacked(self.kept, 8 * len(self.kept)).sum())
        return (
            None if counted == len(self.index) == len(self.fisher) else "has another number of chosen weights"
        )

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SubnetworkBlock:
        block = super().restore(attributes, tensors)
        fault = block.fault()
        if fault is not None:
            raise CorruptPosteriorError(f"A subnetwork {fault}.")
        return block


class ChosenPrecision(DiagonalPrecision):
    """A diagonal precision ``(G, m, n)`` of the chosen weights; the others are certain."""

    def __init__(self, precision: Tensor, chosen: Tensor, like: Tensor) -> None:
        self.weights = torch.where(chosen, precision.reciprocal(), 0.0).to(like)
        self._log_determinant = log_sum(precision[chosen])


@dataclass(eq=False, repr=False)
class ChosenDiagonalBlock(Block):
    """`DiagonalBlock` of the chosen weights of a layer; the others are certain.

    Attributes:
        diagonal: 0 for the others.
        kept: one bit for each weight, packed eight to a byte, the first the highest.
    """

    kind = "subnetwork_diag"
    makes = ChosenPrecision
    per_weight_prior = True
    factorises = False
    columns: ClassVar[Mapping[str, str]] = {"chosen": "weights that are uncertain"}

    diagonal: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, mean_of="diagonal", non_negative=True)]
    kept: Annotated[Tensor, TensorField(BITS, bits=True, largest=255.0)]

    def uncertain(self) -> Tensor:
        return unpacked(self.kept, self.diagonal.numel()).reshape(self.diagonal.shape)

    def covariance(self, settings: PrecisionSettings) -> ChosenPrecision:
        return ChosenPrecision(settings.precision(self.diagonal), self.uncertain(), self.diagonal)

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        return scale * torch.diag_embed(self.diagonal.flatten(1))

    def summary(self) -> dict[str, Any]:
        return {"chosen": int(self.uncertain().sum())}


@dataclass(eq=False, repr=False)
class MeanFieldBlock(Block):
    """Keeps the variances ``(G, m, n)`` of a variational posterior as they were found.

    There is no prior to add: it was a part of the objective. The one setting that enters is ``scale``, which begins at
    the number of samples N: variances are multiplied with ``N / scale``, so that a larger one gives a colder posterior
    (Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?").

    Attributes:
        variances: at ``scale = samples``.
        samples: N, the number of training samples.
    """

    kind = "mean_field"
    makes = Variances
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset({"scale"})
    fixed_by_training: ClassVar[frozenset[str]] = frozenset({"prior_precision"})
    columns: ClassVar[Mapping[str, str]] = {
        "median sd, largest sd": "standard deviations of the layer's weights"
    }

    variances: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    samples: Count

    def covariance(self, settings: PrecisionSettings) -> Variances:
        if settings.scale == self.samples:
            return Variances(self.variances)
        scaled = as_double(self.variances) * (self.samples / settings.scale)
        return Variances(scaled.to(self.variances))

    def largest_value(self, settings: PrecisionSettings) -> float:
        return largest_of(self.variances) * self.samples / float(settings.scale)

    def summary(self) -> dict[str, Any]:
        deviations = self.variances.detach().sqrt().flatten()
        return {"median sd": float(torch.median(deviations)), "largest sd": float(deviations.max())}
