"""`Subnetwork`: the Fisher of single weights that are chosen, full or its diagonal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, did_you_mean
from posthoc_uq.curvature.statistics import ChosenFisher
from posthoc_uq.files.tensors import parameter_shapes
from posthoc_uq.methods.laplace import JOINT, Laplace, squares_of
from posthoc_uq.methods.task import Task, Tensors
from posthoc_uq.posteriors.block import Block, packed
from posthoc_uq.posteriors.laplace import LARGEST_BYTES, ChosenDiagonalBlock, SubnetworkBlock
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import layer_matrix


@dataclass(frozen=True, kw_only=True)
class Subnetwork(Laplace):
    """The full Fisher of a few single weights, or its diagonal, with all others certain.

    ``I_S = E[g_S g_S^T]`` over the chosen weights S of the chosen layers (Daxberger, Nalisnick, Allingham, Antoran,
    Hernandez-Lobato 2021, "Bayesian deep learning via subnetwork inference").

    One sweep, one more to choose by variance, and a number for every pair of chosen weights; of the diagonal one sweep
    and a number for every weight. The prior and the log marginal likelihood are those of the chosen weights alone.
    The moments head takes the chosen ones as independent.
    Kronecker factors belong to whole parameters: ``uq.KFAC()`` with ``layers="trainable"``, or with their names.

    Attributes:
        n: how many weights are chosen; all, where there are fewer.
        by: ``"magnitude"`` for those furthest from zero; ``"variance"`` for those of the largest variance under the
            diagonal posterior, the smallest diagonal of the Fisher. Of equal ones the first.
        mask: the weights to choose instead: tensors of bool by the name of the parameter, of its shape; parameters
            without one are certain.
        structure: of the Fisher: ``"full"``, or ``"diag"`` for independent weights.

    Example:
        ```python
        method = uq.Subnetwork(n=50)  # the 50 largest weights
        posterior = uq.fit(model, train_loader, method)
        prediction = uq.wrap(model, posterior)(images)
        ```
    """

    name: ClassVar[str] = "subnetwork"
    block_kinds: ClassVar[tuple[str, ...]] = ("subnetwork", "subnetwork_diag")

    n: Count = 1000
    by: Literal["magnitude", "variance"] = "magnitude"
    mask: Mapping[str, Tensor] | None = None
    structure: Literal["full", "diag"] = "full"

    @property
    def joint(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether one block holds all layers."""
        return self.structure == "full"

    def passes(self) -> int:
        return 2 if self.by == "variance" and self.mask is None and self.joint else 1

    def describe_fit(self) -> dict[str, Any]:
        return {"weights chosen": "by a mask" if self.mask is not None else f"at most {self.n}, by {self.by}"}

    def blocks(self, task: Task) -> dict[str, Block]:
        if not self.joint:
            return self._diagonal_blocks(task)
        chosen = self._chosen(task, None)
        count = int(chosen.sum())
        if 8 * count**2 > LARGEST_BYTES:
            raise PosthocUQError(
                f"method='subnetwork' needs a dense matrix over the {count} chosen weights "
                f"({8 * count**2 / 2**30:.0f} GiB); choose fewer."
            )
        fisher = _fisher(task, chosen)[JOINT]["fisher"]
        return {JOINT: SubnetworkBlock(fisher, packed(chosen).to(fisher.device), len(chosen))}

    def _diagonal_blocks(self, task: Task) -> dict[str, Block]:
        diagonals, blocks, start = _diagonals(task), dict[str, Block](), 0
        chosen = self._chosen(task, diagonals)
        for name, diagonal in diagonals.items():
            mask = chosen[start : start + diagonal.numel()].to(diagonal.device)
            start += diagonal.numel()
            kept = diagonal * mask.reshape(diagonal.shape)
            blocks[name] = ChosenDiagonalBlock(kept, packed(mask))
        return blocks

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        block = posterior.blocks.get(JOINT)
        if not isinstance(block, SubnetworkBlock):
            masks = {name: part.uncertain() for name, part in posterior.blocks.items()}
            found = _diagonals(task)
            return {
                name: {"diagonal": own * cast(Tensor, masks[name]).to(own.device)}
                for name, own in found.items()
            }
        chosen = torch.zeros(block.weights, dtype=torch.bool, device="cpu")
        chosen[block.index.cpu()] = True
        return _fisher(task, chosen)

    def _chosen(self, task: Task, diagonals: Mapping[str, Tensor] | None) -> Tensor:
        """Which weights of the layers are chosen, ``(weights,)`` on the CPU; by `_diagonals` where they are known."""
        if self.mask is not None:
            return _masked(self.mask, task)
        if self.by == "magnitude":
            parameters = dict(task.model.named_parameters())
            parts = [layer_matrix(layer, parameters) for layer in task.layers.values()]
            scores = torch.cat([part.abs().flatten().cpu() for part in parts])
        else:
            known = diagonals or _diagonals(task)
            scores = -torch.cat([diagonal.flatten().cpu() for diagonal in known.values()])
        first = torch.argsort(as_double(scores), descending=True, stable=True)[: self.n]
        return torch.zeros(len(scores), dtype=torch.bool, device="cpu").index_fill(0, first, True)


def _diagonals(task: Task) -> dict[str, Tensor]:
    """The diagonal of the Fisher by layer, in one sweep."""
    squares = {name: [squares_of(layer, task)] for name, layer in task.layers.items()}
    samples = task.sweep(squares, "diagonal")
    return {name: sums.diagonal(samples) for name, (sums,) in squares.items()}


def _masked(mask: Mapping[str, Tensor], task: Task) -> Tensor:
    """The user's mask in the order of the layers' weights."""
    shapes = parameter_shapes(task.layers.values())
    for name, part in mask.items():
        if name not in shapes:
            raise PosthocUQError(
                f"The mask names '{name}', no parameter of the layers; those are {list(shapes)[:6]}."
                f"{did_you_mean(name, shapes)}"
            )
        if not isinstance(part, Tensor) or part.dtype != torch.bool or tuple(part.shape) != shapes[name]:
            raise PosthocUQError(f"The mask of '{name}' must be a bool tensor of shape {shapes[name]}.")
    whole = {
        name: mask[name].cpu() if name in mask else torch.zeros(shape, dtype=torch.bool, device="cpu")
        for name, shape in shapes.items()
    }
    chosen = torch.cat([layer_matrix(layer, whole).flatten() for layer in task.layers.values()])
    if not bool(chosen.any()):
        raise PosthocUQError("The mask chooses no weight; make some of it True.")
    return chosen


def _fisher(task: Task, chosen: Tensor) -> Tensors:
    """The Fisher of the chosen weights of all layers together, in one sweep."""
    joint = ChosenFisher(chosen.nonzero().flatten(), task.device)
    return {JOINT: {"fisher": joint.mean(task.sweep({}, "chosen Fisher", joint=joint))}}
