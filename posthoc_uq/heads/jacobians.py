"""Output covariances of a linearised model: backward passes whose catch is contracted layer by layer.

``Cov = sum_l J_l Sigma_l J_l^T`` over the posterior's blocks, with J of any functions of the outputs: one backward pass
pulls one function of every sample back, and what it hands over of a layer is its activations and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import Operand
from posthoc_uq.devices import as_double
from posthoc_uq.heads import own_outputs
from posthoc_uq.heads.cancellation import LEFT, Checked, settled
from posthoc_uq.heads.contraction import contract, with_norms
from posthoc_uq.heads.layer_covariance import LayerCovariance
from posthoc_uq.heads.products import Mode, gram
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Factor
from posthoc_uq.posteriors.dense import DenseFactor

Gradient = Callable[[int], Tensor]


@dataclass
class Pulled:
    """One layer's activations and the gradients at its outputs, of several functions of the model's outputs.

    Attributes:
        layer: the layer.
        activations: of the batch.
        gradients: by the place of the function, each ``(samples, G, T, m)``.
    """

    layer: Layer
    activations: Operand
    gradients: dict[int, Tensor] = field(default_factory=lambda: dict[int, Tensor]())

    def stacked(self, functions: int) -> Tensor:
        """All gradients, ``(samples, G, functions, m, T)``; zero where none came back."""
        like = next(iter(self.gradients.values()))
        if functions == 1:
            return like.transpose(2, 3).unsqueeze(2)
        found = [self.gradients.get(index, torch.zeros_like(like)) for index in range(functions)]
        if like.stride(3) == 1:  # a linear layer's: copied in the order in which they lie
            return torch.stack(found, dim=3).permute(0, 1, 3, 4, 2)
        return torch.stack([gradient.transpose(2, 3) for gradient in found], dim=2)

    def part(self, samples: Tensor) -> Pulled:
        """Of some samples, by their indices."""
        gradients = {place: gradient[samples] for place, gradient in self.gradients.items()}
        return Pulled(self.layer, self.activations.part(samples), gradients)


def pull(
    recording: Recording, gradient: Gradient, numbers: range, dtype: torch.dtype, last: bool
) -> list[Pulled]:
    """Pull functions of the outputs back.

    Args:
        gradient: gives a function's gradient by the outputs, shaped like them, by the function's number.
        numbers: of the functions.
        last: nothing else is pulled back through this recording.
    """
    found: dict[str, Pulled] = {}
    for place, number in enumerate(numbers):

        def keep(caught: LayerGradients, place: int = place) -> None:
            name = caught.layer.name
            activations, gradients = caught.operands(dtype)
            if name not in found:
                found[name] = Pulled(caught.layer, activations)
            found[name].gradients[place] = gradients

        recording.pull_back(gradient(number), keep, last=last and place == len(numbers) - 1)
    return list(found.values())


class WeightCovariance:
    """A posterior's covariance at its present settings, made ready once for Jacobians of many batches.

    Args:
        posterior: the posterior.
        dtype: of activations and output gradients.
        device: likewise.
        limit: bytes that one temporary may take.
    """

    def __init__(self, posterior: Posterior, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self.layers: dict[str, LayerCovariance] = {}
        self._dense: list[tuple[list[Layer], Factor]] = []
        self._own: dict[str, Tensor] = {}
        self._limit, self._dtype = limit, dtype
        for name, members in posterior.members.items():
            factor = posterior.factor(name)
            form = factor.form()
            if form is not None:
                self.layers[name] = LayerCovariance(form, dtype, device, limit)
            else:
                self._dense.append(([posterior.layers[member] for member in members], factor))

    def contract(self, pulled: list[Pulled], samples: int, functions: int, mode: Mode) -> Tensor:
        """``J Sigma J^T`` in the shapes of `gram`, in float64. What was pulled is given up."""
        size = samples * functions
        shape = {
            "variance": (samples, functions),
            "covariance": (samples, functions, functions),
            "joint": (size, size),
        }
        parts: list[Checked] = []
        kept: dict[str, Pulled] = {}
        while pulled:
            layer = pulled.pop()
            if layer.layer.name in self.layers:
                covariance = self.layers[layer.layer.name]
                parts.append(contract(covariance, layer.activations, layer.stacked(functions), mode))
            else:
                kept[layer.layer.name] = layer
        sums = settled(parts)
        for layers, factor in self._dense:
            if any(layer.name in kept for layer in layers):
                sums.append(self._contract_dense(layers, factor, kept, samples, functions, mode))
        if not sums:
            return torch.zeros(shape[mode], dtype=torch.float64, device="cpu")
        total = sums[0]
        for part in sums[1:]:
            total = total.to(part.device) + part
        return total

    def with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """``J_c Sigma J_c^T`` and, under independent weights with variance ``prior[layer]``, ``J_c Sigma_0 J_c^T``,
        ``sum_l prior_l |J_cl|^2``: summed over the functions c, ``(samples,)`` each in float64.

        J is formed once for both. Where less than a hundredth of the prior is left, too much has cancelled for the
        activations' precision, and those samples are done again in float64.
        """
        found = self._with_prior(pulled, samples, functions, prior, False)
        if self._dtype == torch.float64 or not any(layer.cancels for layer in self.layers.values()):
            return found
        left, given = (tensor.to(found[0].device) for tensor in found)
        poor = (left < LEFT * given).nonzero().flatten()
        if poor.numel() == 0:
            return left, given
        if poor.numel() < samples:
            pulled = [layer.part(poor) for layer in pulled]
        precise = self._with_prior(pulled, poor.numel(), functions, prior, True)
        for total, better in zip((left, given), precise, strict=True):
            total[poor] = better.to(total)
        return left, given

    def _with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        left, given = torch.zeros(2, samples, dtype=torch.float64, device="cpu")
        kept: dict[str, Pulled] = {}
        for layer in pulled:
            name = layer.layer.name
            if name not in self.layers:
                kept[name] = layer
                continue
            gradients = layer.stacked(functions)
            variances, norms = with_norms(self.layers[name], layer.activations, gradients, double)
            left = left.to(variances.device) + variances.sum(1)
            given = given.to(norms.device) + norms.sum(1) * prior.get(name, 0.0)
        for layers, factor in self._dense:
            if not any(layer.name in kept for layer in layers):
                continue
            priors = [
                torch.full((layer.parameters,), prior.get(layer.name, 0.0), device="cpu") for layer in layers
            ]
            for part, rows, white in self._dense_parts(layers, factor, kept, samples, functions):
                weights = torch.cat(priors).to(rows)
                left, given = left.to(rows.device), given.to(rows.device)
                left[part] += white.square().sum((1, 2))
                given[part] += (rows.square() @ weights).sum(1)
        return left, given

    def own_variance(self, layer: str, activations: Tensor) -> Tensor:
        """Variance of a layer's own outputs, ``(samples, m)``, for activations ``(samples, n)``; one group."""
        if layer in self.layers:
            return own_outputs.variance(self.layers[layer], activations)
        rows = as_double(activations)
        own = self._dense_rows(layer)
        if own is None:
            return self._own_forms(layer, rows, False).diagonal(dim1=1, dim2=2)
        return torch.einsum("ijo,si,sj->so", own.diagonal(dim1=0, dim2=2).to(rows.device), rows, rows)

    def own_covariance(self, layer: str, activations: Tensor, joint: bool) -> Tensor:
        """Covariance of a layer's own outputs, ``(samples, m, m)``, or ``(samples * m, samples * m)`` with `joint`."""
        if layer in self.layers:
            return own_outputs.covariance(self.layers[layer], activations, joint)
        rows = as_double(activations)
        own = self._dense_rows(layer)
        if own is None:
            return self._own_forms(layer, rows, joint)
        own = own.to(rows.device)
        if joint:
            size = rows.shape[0] * own.shape[0]
            return torch.einsum("oipj,si,tj->sotp", own, rows, rows).reshape(size, size)
        return torch.einsum("oipj,si,sj->sop", own, rows, rows)

    def own_product(self, layer: str, activations: Tensor) -> Callable[[Tensor], Tensor]:
        """Multiplication of ``(samples, m, k)`` by the covariance of a layer's own outputs, for activations
        ``(samples, n)``.
        """
        if layer in self.layers:
            return own_outputs.product(self.layers[layer], activations)
        covariance = self.own_covariance(layer, activations, False).to(activations)
        return lambda x: covariance @ x

    def _block_of(self, layer: str) -> tuple[list[Layer], Factor, slice]:
        """The block without a form that a layer is in, and where the layer stands in it."""
        for layers, factor in self._dense:
            start = 0
            for spec in layers:
                if spec.name == layer:
                    return layers, factor, slice(start, start + spec.parameters)
                start += spec.parameters
        raise AssertionError(f"layer '{layer}' is in no block")

    def _dense_rows(self, layer: str) -> Tensor | None:
        """Covariance of one layer's weights in a block of several, ``(m, n, m, n)``; None where it is known by its
        quadratic forms alone.
        """
        if layer not in self._own:
            layers, factor, part = self._block_of(layer)
            if not isinstance(factor, DenseFactor):
                return None
            shape = next(spec.matrix_shape[1:] for spec in layers if spec.name == layer)
            self._own[layer] = factor.covariance()[part, part].reshape(*shape, *shape)
        return self._own[layer]

    def _own_forms(self, layer: str, rows: Tensor, joint: bool) -> Tensor:
        """`own_covariance` by quadratic forms, for activations ``(samples, n)`` in float64."""
        layers, factor, part = self._block_of(layer)
        outputs = next(spec.outputs for spec in layers if spec.name == layer)
        size = sum(spec.parameters for spec in layers)
        eye = torch.eye(outputs, dtype=rows.dtype, device=rows.device)

        def form(few: Tensor) -> Tensor:
            jacobians = rows.new_zeros(few.shape[0] * outputs, size)
            jacobians[:, part] = torch.einsum("op,si->sopi", eye, few).reshape(jacobians.shape[0], -1)
            return as_double(factor.quadratic(_as_block(layers, jacobians))).to(rows.device)

        return form(rows) if joint else torch.stack([form(row) for row in rows.split(1)])

    def _contract_dense(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        mode: Mode,
    ) -> Tensor:
        """Of a block whose layers are correlated: its Jacobian is formed, a few samples at a time."""
        parts = self._dense_parts(layers, factor, pulled, samples, functions, mode == "joint")
        found = [gram(white, mode) for _, _, white in parts]
        return found[0] if mode == "joint" else torch.cat(found)

    def _dense_parts(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        whole: bool = False,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Samples, their Jacobian, and it whitened: ``(few samples, functions, parameters)``; at once if `whole`."""
        size = sum(layer.parameters for layer in layers)
        known = isinstance(factor, DenseFactor)  # others whiten by the forms of all pairs of rows
        few = max(1, self._limit // (8 * functions * size)) if known else 1
        step = samples if whole else few
        for start in range(0, samples, step):
            part = slice(start, min(samples, start + step))
            rows = self._rows(layers, pulled, part, functions)
            white = factor.whiten(_as_block(layers, rows.flatten(0, 1)))
            yield part, rows, white.reshape(*rows.shape[:2], -1)

    def _rows(self, layers: list[Layer], pulled: dict[str, Pulled], part: slice, functions: int) -> Tensor:
        """The layers' Jacobians side by side, ``(samples, functions, parameters)``; unused layers count as zero."""
        columns: list[Tensor] = []
        like = next(iter(pulled.values())).stacked(functions)[part]
        for layer in layers:
            own = pulled.get(layer.name)
            if own is None:
                columns.append(like.new_zeros(like.shape[0], functions, layer.parameters))
                continue
            gradients = own.stacked(functions)[part].flatten(2, 3).transpose(2, 3)
            jacobian = own.activations.part(part).gradients(gradients, self._limit)
            jacobian = jacobian.reshape(like.shape[0], layer.groups, functions, layer.outputs, layer.inputs)
            columns.append(jacobian.transpose(1, 2).flatten(2))
        return as_double(torch.cat(columns, dim=2))


def _as_block(layers: list[Layer], jacobians: Tensor) -> Tensor:
    """Jacobians ``(q, parameters)`` in the shape of a block of these layers."""
    shape = layers[0].matrix_shape if len(layers) == 1 else (1, 1, jacobians.shape[1])
    return jacobians.reshape(-1, *shape)


def one_output(outputs: Tensor, indices: Tensor | None) -> Gradient:
    """Gradients of single outputs: of the i-th of all, or of every sample's own ``indices[:, i]``; of the number after
    the last of these, the mean of all outputs.
    """
    samples, size = outputs.shape[0], outputs[0].numel()
    count = size if indices is None else indices.shape[1]

    def gradient(number: int) -> Tensor:
        found = torch.zeros(samples, size, dtype=outputs.dtype, device=outputs.device)
        if number == count:
            found.fill_(1 / size)
        elif indices is None:
            found[:, number] = 1
        else:
            found.scatter_(1, indices[:, number : number + 1], 1)
        return found.reshape(outputs.shape)

    return gradient


def random_signs(outputs: Tensor, numbers: int, generator: torch.Generator) -> Gradient:
    """Gradients of sums of all outputs with random signs, the same for every sample (Rademacher vectors)."""
    shape = (numbers, *outputs.shape[1:])
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu").to(outputs) * 2 - 1

    def gradient(number: int) -> Tensor:
        return signs[number].expand(outputs.shape)

    return gradient
