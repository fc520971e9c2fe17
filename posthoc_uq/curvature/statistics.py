"""Accumulators of the Fisher's statistics (Lee et al. 2020, section 2; George et al. 2018).

Each sums over the batches of one layer's activations and output gradients ``(samples, groups, positions, outputs)``;
`mean` divides the sums by the number of samples (the sum of their weights) or of positions. Squares are those of exact
per-sample gradients ``G_s = sum_t g_st a_st^T``. Where samples have weights, output gradients come times their roots,
so that every square counts w times; activations come as they are, and `SampleWeights` says how often they count.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from posthoc_uq.curvature.operands import Operand, Rows, temporary_limit
from posthoc_uq.curvature.squares import add_squares
from posthoc_uq.devices import widest
from posthoc_uq.likelihoods.weights import SampleWeights


class Accumulator(Protocol):
    """Takes the backward passes of a sweep."""

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        """Take one backward pass. Passes over the same batch have the same activations; `first_pass` marks the first of
        them. The gradients have the roots of the samples' `weights` in them already.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """The sums themselves, by name. Those over two parts of the data can be added."""
        ...


class _Sums:
    """Sums kept as named tensors."""

    def __init__(self, sums: dict[str, Tensor], budget: int = 0) -> None:
        self._sums = sums
        self._budget = budget

    def state(self) -> dict[str, Tensor]:
        return self._sums

    def _limit(self, tensor: Tensor) -> int:
        return temporary_limit(self._budget, tensor.device)


class _Gram(_Sums):
    """Sums with a Gram, and with the number of rows in it."""

    @property
    def rows(self) -> int:
        """How many rows were added: no more eigenvalues are positive."""
        return int(self._sums["rows"])


class InputGram(_Gram):
    """``A = 1/N sum_{s,t} a a^T``, ``(groups, inputs, inputs)``."""

    def __init__(
        self, groups: int, inputs: int, dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        gram = torch.zeros(groups, inputs, inputs, dtype=dtype, device=device)
        super().__init__({"gram": gram, "rows": _count()}, budget)

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        if first_pass:
            activations.add_gram(self._sums["gram"], self._limit(gradients), _on_device(weights, gradients))
            self._sums["rows"] += activations.samples * activations.positions

    def mean(self, samples: float) -> Tensor:
        """The Gram over `samples`."""
        return self._sums["gram"] / samples


class GradientGram(_Gram):
    """``G = 1/(N T) sum_{s,t} g g^T``, ``(groups, outputs, outputs)``, with T positions a sample."""

    def __init__(
        self, groups: int, outputs: int, dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        gram = torch.zeros(groups, outputs, outputs, dtype=dtype, device=device)
        super().__init__({"gram": gram, "rows": _count(), "positions": _count()}, budget)

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        Rows(gradients).add_gram(self._sums["gram"], self._limit(gradients))
        self._sums["rows"] += gradients.shape[0] * gradients.shape[2]
        if first_pass:
            self._sums["positions"] += _total(gradients, weights) * gradients.shape[2]

    def mean(self, samples: float) -> Tensor:
        """The Gram over all positions."""
        return self._sums["gram"] / (self._sums["positions"].item() or 1.0)

    def positions(self, samples: float) -> Tensor:
        """The mean number of positions of a sample, a float64 scalar on the CPU."""
        return self._sums["positions"] / samples


class RangeSketch(_Sums):
    """``Y = sum a (a^T Omega)``, ``(groups, size, width)``: the range of a Gram that is never formed.

    `side` is what is sketched: ``"inputs"``, or ``"outputs"`` for output gradients. See Halko, Martinsson, Tropp 2011.
    """

    def __init__(self, side: str, test_matrix: Tensor, budget: int) -> None:
        super().__init__({"sketch": torch.zeros_like(test_matrix), "positions": _count()}, budget)
        self.test_matrix = test_matrix
        self._side = side

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        if self._side == "inputs" and not first_pass:
            return
        sums, limit = self._sums["sketch"], self._limit(gradients)
        if self._side == "inputs":
            activations.add_sketch(sums, self.test_matrix, limit, _on_device(weights, gradients))
        else:
            Rows(gradients).add_sketch(sums, self.test_matrix, limit)
        if first_pass:
            self._sums["positions"] += _total(gradients, weights) * gradients.shape[2]

    def mean(self, samples: float) -> Tensor:
        """The sketch of ``A`` (over samples) or of ``G`` (over positions)."""
        count = samples if self._side == "inputs" else self._sums["positions"].item() or 1.0
        return self._sums["sketch"] / count


class SquaredGradients(_Sums):
    """The exact diagonal of the Fisher, the eigenvalues in a Kronecker-factored basis, or both.

    ``d_ij = 1/N sum_s (G_s)_ij^2``, ``(groups, outputs, inputs)``; with bases ``(groups, inputs, a)`` and
    ``(groups, outputs, g)``, ``Lambda = 1/N sum_s (U_g^T G_s U_a)^2``, ``(groups, g, a)``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        *,
        diagonal: bool = True,
        bases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        sums: dict[str, Tensor] = {}
        if diagonal:
            sums["diagonal"] = torch.zeros(shape, dtype=dtype, device=device)
        if bases is not None:
            widths = bases[1].shape[-1], bases[0].shape[-1]
            sums["eigenvalues"] = torch.zeros(shape[0], *widths, dtype=dtype, device=device)
        super().__init__(sums, budget)
        self._bases = bases

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        sums = self._sums.get("diagonal"), self._sums.get("eigenvalues")
        add_squares(activations, gradients, self._budget, *sums, self._bases)

    def diagonal(self, samples: float) -> Tensor:
        """The mean over `samples`. It can be taken only once, since it reuses the memory of the sum."""
        return _mean_squares(self._sums.pop("diagonal"), samples)

    def eigenvalues(self, samples: float) -> Tensor:
        """The mean over `samples`. It can be taken only once, since it reuses the memory of the sum."""
        return _mean_squares(self._sums.pop("eigenvalues"), samples)


def _count() -> Tensor:
    """A number that counts, kept as a sum like the others."""
    return torch.zeros((), dtype=torch.float64, device="cpu")


def _total(gradients: Tensor, weights: SampleWeights | None) -> float:
    """The sum of the weights of a batch: the number of its samples where they have none."""
    return gradients.shape[0] if weights is None else weights.total


def _on_device(weights: SampleWeights | None, like: Tensor) -> Tensor | None:
    return None if weights is None else weights.samples.to(like)


def _mean_squares(total: Tensor, samples: float) -> Tensor:
    # Cancellation between pairs of positions can leave a rounding error below zero.
    return total.div_(samples).clamp_(min=0)


class JointFisher(_Sums):
    """The dense Fisher over all parameters of several layers, ``(parameters, parameters)``; for small nets.

    Fed once per backward pass with the per-sample gradients of all layers side by side. Summed in float64 where the
    device has it: a small prior precision decides in the directions that no gradient has, and rounding errors of the
    products in float32 are larger than many.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        fisher = torch.zeros(parameters, parameters, dtype=widest(device), device=device)
        super().__init__({"fisher": fisher})

    def add_rows(self, gradients: Tensor) -> None:
        """Take ``(samples, parameters)`` per-sample gradients."""
        wide = gradients.to(self._sums["fisher"])
        self._sums["fisher"] += wide.T @ wide

    def mean(self, samples: float) -> Tensor:
        """The Fisher over `samples`."""
        return self._sums["fisher"] / samples


class ChosenFisher(JointFisher):
    """The dense Fisher of some of these parameters, ``(chosen, chosen)``.

    Args:
        index: places of the chosen among all parameters, ``(chosen,)``.
        device: of the sums.
    """

    def __init__(self, index: Tensor, device: torch.device) -> None:
        super().__init__(len(index), device)
        self._index = index.to(device)

    def add_rows(self, gradients: Tensor) -> None:
        super().add_rows(gradients[:, self._index])
