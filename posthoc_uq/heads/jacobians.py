"""Output covariances of a linearised model, from backward passes whose gradients are contracted layer by layer.

``Cov = sum_l J_l Sigma_l J_l^T`` over the posterior's blocks, with J of any functions of the outputs. One backward pass
gives the gradient of one function for every sample, as each layer's activations and output gradients.
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
from posthoc_uq.heads import closed_form
from posthoc_uq.heads.cancellation import LEAST_SHARE, Checked, precise_values
from posthoc_uq.heads.contraction import contract, with_norms
from posthoc_uq.heads.layer_covariance import LayerCovariance
from posthoc_uq.heads.products import Mode, gram
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Factor
from posthoc_uq.posteriors.dense import DenseFactor
from posthoc_uq.progress import in_parts, tell

Gradient = Callable[[int], Tensor]


@dataclass
class Pulled:
    """One layer's activations, and gradients at its outputs of several functions of the model's outputs.

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
        gradients = [self.gradients.get(index, torch.zeros_like(like)) for index in range(functions)]
        if like.stride(3) == 1:  # a linear layer's: copied in the order of memory
            return torch.stack(gradients, dim=3).permute(0, 1, 3, 4, 2)
        return torch.stack([gradient.transpose(2, 3) for gradient in gradients], dim=2)

    def part(self, samples: Tensor) -> Pulled:
        """The same for some samples, by their indices."""
        gradients = {place: gradient[samples] for place, gradient in self.gradients.items()}
        return Pulled(self.layer, self.activations.part(samples), gradients)


def pull(
    recording: Recording, gradient: Gradient, numbers: range, dtype: torch.dtype, last: bool
) -> list[Pulled]:
    """Backward passes of functions of the outputs: one entry for every layer that they reach.

    Args:
        recording: the forward pass.
        gradient: gives, by a function's number, its gradient by the outputs, shaped like them.
        numbers: of the functions.
        dtype: of activations and output gradients.
        last: whether these are the last backward passes through this recording.
    """
    layers: dict[str, Pulled] = {}
    for place, number in enumerate(in_parts(numbers)):

        def collect(layer_gradients: LayerGradients, place: int = place) -> None:
            name = layer_gradients.layer.name
            if name in layers:  # the activations are those of the first function
                gradients = layer_gradients.gradients(dtype)
            else:
                activations, gradients = layer_gradients.operands(dtype)
                layers[name] = Pulled(layer_gradients.layer, activations)
            layers[name].gradients[place] = gradients

        recording.pull_back(gradient(number), collect, last=last and place == len(numbers) - 1)
    return list(layers.values())


class WeightCovariance:
    """A posterior's covariance at its present settings, prepared once for Jacobians of many batches.

    Args:
        posterior: the posterior.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.
    """

    def __init__(self, posterior: Posterior, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self.layers: dict[str, LayerCovariance] = {}
        self._dense: list[tuple[list[Layer], Factor]] = []
        self._dense_covariances: dict[str, Tensor] = {}
        self._limit, self._dtype = limit, dtype
        for name, members in posterior.members.items():
            factor = posterior.factor(name)
            form = factor.form()
            if form is not None:
                self.layers[name] = LayerCovariance(form, dtype, device, limit)
            else:
                self._dense.append(([posterior.layers[member] for member in members], factor))

    def contract(self, pulled: list[Pulled], samples: int, functions: int, mode: Mode) -> Tensor:
        """``J Sigma J^T`` in the shapes of `gram`, in float64. `pulled` is emptied, to free memory."""
        size = samples * functions
        shape = {
            "variance": (samples, functions),
            "covariance": (samples, functions, functions),
            "joint": (size, size),
        }
        parts: list[Checked] = []
        dense_layers: dict[str, Pulled] = {}
        number = len(pulled)
        while pulled:
            layer = pulled.pop()
            if layer.layer.name in self.layers:
                covariance = self.layers[layer.layer.name]
                parts.append(contract(covariance, layer.activations, layer.stacked(functions), mode))
            else:
                dense_layers[layer.layer.name] = layer
            tell(1 - len(pulled) / number)
        sums = precise_values(parts)
        for layers, factor in self._dense:
            if any(layer.name in dense_layers for layer in layers):
                sums.append(self._contract_dense(layers, factor, dense_layers, samples, functions, mode))
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

        J is formed once for both. Where the posterior's variance is less than a hundredth of the prior's, too much has
        cancelled for the activations' precision, and those samples are computed again in float64.
        """
        sums = self._with_prior(pulled, samples, functions, prior, False)
        if self._dtype == torch.float64 or not any(layer.cancels for layer in self.layers.values()):
            return sums
        posterior_sums, prior_sums = (tensor.to(sums[0].device) for tensor in sums)
        imprecise = (posterior_sums < LEAST_SHARE * prior_sums).nonzero().flatten()
        if imprecise.numel() == 0:
            return posterior_sums, prior_sums
        if imprecise.numel() < samples:
            pulled = [layer.part(imprecise) for layer in pulled]
        precise_pair = self._with_prior(pulled, imprecise.numel(), functions, prior, True)
        for total, precise_sums in zip((posterior_sums, prior_sums), precise_pair, strict=True):
            total[imprecise] = precise_sums.to(total)
        return posterior_sums, prior_sums

    def _with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        posterior_sums, prior_sums = torch.zeros(2, samples, dtype=torch.float64, device="cpu")
        dense_layers: dict[str, Pulled] = {}
        for layer in pulled:
            name = layer.layer.name
            if name not in self.layers:
                dense_layers[name] = layer
                continue
            gradients = layer.stacked(functions)
            variances, norms = with_norms(self.layers[name], layer.activations, gradients, double)
            posterior_sums = posterior_sums.to(variances.device) + variances.sum(1)
            prior_sums = prior_sums.to(norms.device) + norms.sum(1) * prior.get(name, 0.0)
        for layers, factor in self._dense:
            if not any(layer.name in dense_layers for layer in layers):
                continue
            priors = [
                torch.full((layer.parameters,), prior.get(layer.name, 0.0), device="cpu") for layer in layers
            ]
            for part, rows, whitened in self._dense_parts(layers, factor, dense_layers, samples, functions):
                weights = torch.cat(priors).to(rows)
                posterior_sums, prior_sums = posterior_sums.to(rows.device), prior_sums.to(rows.device)
                posterior_sums[part] += whitened.square().sum((1, 2))
                prior_sums[part] += (rows.square() @ weights).sum(1)
        return posterior_sums, prior_sums

    def output_variance(self, layer: str, activations: Tensor) -> Tensor:
        """Variance of the outputs of a layer of one group, ``(samples, m)``, for activations ``(samples, n)``."""
        if layer in self.layers:
            return closed_form.variance(self.layers[layer], activations)
        rows = as_double(activations)
        weight_covariance = self._dense_covariance(layer)
        if weight_covariance is None:
            return self._by_quadratic_forms(layer, rows, False).diagonal(dim1=1, dim2=2)
        return torch.einsum(
            "ijo,si,sj->so", weight_covariance.diagonal(dim1=0, dim2=2).to(rows.device), rows, rows
        )

    def output_covariance(self, layer: str, activations: Tensor, joint: bool) -> Tensor:
        """Covariance of a layer's outputs, ``(samples, m, m)``, or ``(samples * m, samples * m)`` with `joint`."""
        if layer in self.layers:
            return closed_form.covariance(self.layers[layer], activations, joint)
        rows = as_double(activations)
        weight_covariance = self._dense_covariance(layer)
        if weight_covariance is None:
            return self._by_quadratic_forms(layer, rows, joint)
        weight_covariance = weight_covariance.to(rows.device)
        if joint:
            size = rows.shape[0] * weight_covariance.shape[0]
            return torch.einsum("oipj,si,tj->sotp", weight_covariance, rows, rows).reshape(size, size)
        return torch.einsum("oipj,si,sj->sop", weight_covariance, rows, rows)

    def output_product(self, layer: str, activations: Tensor) -> Callable[[Tensor], Tensor]:
        """Multiplication of ``(samples, m, k)`` by the covariance of a layer's outputs, for activations
        ``(samples, n)``.
        """
        if layer in self.layers:
            return closed_form.product(self.layers[layer], activations)
        covariance = self.output_covariance(layer, activations, False).to(activations)
        return lambda x: covariance @ x

    def _block_of(self, layer: str) -> tuple[list[Layer], Factor, slice]:
        """The block without a `CovarianceForm` that holds a layer, and the layer's place in it."""
        for layers, factor in self._dense:
            start = 0
            for spec in layers:
                if spec.name == layer:
                    return layers, factor, slice(start, start + spec.parameters)
                start += spec.parameters
        raise AssertionError(f"layer '{layer}' is in no block")

    def _dense_covariance(self, layer: str) -> Tensor | None:
        """Covariance of one layer's weights in a block of several, ``(m, n, m, n)``; None where the block gives only
        quadratic forms.
        """
        if layer not in self._dense_covariances:
            layers, factor, part = self._block_of(layer)
            if not isinstance(factor, DenseFactor):
                return None
            shape = next(spec.matrix_shape[1:] for spec in layers if spec.name == layer)
            self._dense_covariances[layer] = factor.covariance()[part, part].reshape(*shape, *shape)
        return self._dense_covariances[layer]

    def _by_quadratic_forms(self, layer: str, rows: Tensor, joint: bool) -> Tensor:
        """`output_covariance` by quadratic forms, for activations ``(samples, n)`` in float64."""
        layers, factor, part = self._block_of(layer)
        outputs = next(spec.outputs for spec in layers if spec.name == layer)
        size = sum(spec.parameters for spec in layers)
        eye = torch.eye(outputs, dtype=rows.dtype, device=rows.device)

        def covariance_of(activations: Tensor) -> Tensor:
            jacobians = rows.new_zeros(activations.shape[0] * outputs, size)
            jacobians[:, part] = torch.einsum("op,si->sopi", eye, activations).reshape(jacobians.shape[0], -1)
            return as_double(factor.quadratic(_as_block(layers, jacobians))).to(rows.device)

        return covariance_of(rows) if joint else torch.stack([covariance_of(row) for row in rows.split(1)])

    def _contract_dense(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        mode: Mode,
    ) -> Tensor:
        """``J Sigma J^T`` of a block whose layers are correlated; its Jacobian is formed, a few samples at a time."""
        parts = self._dense_parts(layers, factor, pulled, samples, functions, mode == "joint")
        grams = [gram(whitened, mode) for _, _, whitened in parts]
        return grams[0] if mode == "joint" else torch.cat(grams)

    def _dense_parts(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        in_one: bool = False,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the samples, each with its Jacobian ``(samples, functions, parameters)`` and the whitened Jacobian;
        with `in_one`, one slice of all samples.
        """
        size = sum(layer.parameters for layer in layers)
        # other factors whiten by the quadratic forms of all pairs of rows
        is_dense = isinstance(factor, DenseFactor)
        most = max(1, self._limit // (8 * functions * size)) if is_dense else 1
        step = samples if in_one else most
        for start in range(0, samples, step):
            part = slice(start, min(samples, start + step))
            rows = self._rows(layers, pulled, part, functions)
            whitened = factor.whiten(_as_block(layers, rows.flatten(0, 1)))
            yield part, rows, whitened.reshape(*rows.shape[:2], -1)

    def _rows(self, layers: list[Layer], pulled: dict[str, Pulled], part: slice, functions: int) -> Tensor:
        """The layers' Jacobians side by side, ``(samples, functions, parameters)``; zero for unused layers."""
        columns: list[Tensor] = []
        like = next(iter(pulled.values())).stacked(functions)[part]
        for layer in layers:
            layer_pulled = pulled.get(layer.name)
            if layer_pulled is None:
                columns.append(like.new_zeros(like.shape[0], functions, layer.parameters))
                continue
            gradients = layer_pulled.stacked(functions)[part].flatten(2, 3).transpose(2, 3)
            jacobian = layer_pulled.activations.part(part).gradients(gradients, self._limit)
            jacobian = jacobian.reshape(like.shape[0], layer.groups, functions, layer.outputs, layer.inputs)
            columns.append(jacobian.transpose(1, 2).flatten(2))
        return as_double(torch.cat(columns, dim=2))


def _as_block(layers: list[Layer], jacobians: Tensor) -> Tensor:
    """Jacobians ``(q, parameters)`` in the shape of a block of these layers."""
    shape = layers[0].matrix_shape if len(layers) == 1 else (1, 1, jacobians.shape[1])
    return jacobians.reshape(-1, *shape)


def one_output(outputs: Tensor, indices: Tensor | None) -> Gradient:
    """Gradients of single outputs: number i is the i-th output, or with `indices` each sample's ``indices[:, i]``. The
    number after the last is the mean of all outputs.
    """
    samples, size = outputs.shape[0], outputs[0].numel()
    count = size if indices is None else indices.shape[1]

    def gradient(number: int) -> Tensor:
        unit = torch.zeros(samples, size, dtype=outputs.dtype, device=outputs.device)
        if number == count:
            unit.fill_(1 / size)
        elif indices is None:
            unit[:, number] = 1
        else:
            unit.scatter_(1, indices[:, number : number + 1], 1)
        return unit.reshape(outputs.shape)

    return gradient


def random_signs(outputs: Tensor, numbers: int, generator: torch.Generator) -> Gradient:
    """Gradients of sums of all outputs with random signs, the same for every sample (Rademacher vectors)."""
    shape = (numbers, *outputs.shape[1:])
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu").to(outputs) * 2 - 1

    def gradient(number: int) -> Tensor:
        return signs[number].expand(outputs.shape)

    return gradient
