"""The covariance of a block's weights as an operator: draws, determinant, and what it gives to a model's outputs.

Outputs that are linear in the weights have the covariance ``J Sigma J^T``. A layer's part of J is known by its
activations ``a`` and the gradients ``g`` at its outputs, ``J_c = sum_t g_ct a_t^T`` over its positions, and only the
general case forms it. The layer's own outputs ``y = W a`` are the special case in which no gradient is needed.

The first dimensions of a layer's tensors are its groups, outputs and inputs, ``(G, m, n)``; groups are independent, and
inputs include the bias's column.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, on_device, on_host
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.numerics import constant
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.operands import (
    TOUCH_COST,
    OneHotRows,
    Operand,
    Rows,
    chunks,
    rotate_output_gradients,
)
from posthoc_uq.likelihoods.draws import OutputCovariance, TurnedOutputCovariance

# Inner products of Jacobian rows: of each function with itself, with all others, or also between samples.

Mode = Literal["variance", "covariance", "joint"]


def gram(rows: Tensor, mode: Mode) -> Tensor:
    """Inner products of rows ``(samples, functions, numbers)``: ``(samples, functions)`` for ``"variance"``, of all
    pairs of functions ``(samples, functions, functions)`` for ``"covariance"``, and of all pairs of samples and
    functions ``(samples * functions, samples * functions)`` for ``"joint"``.
    """
    if mode == "variance":
        return torch.linalg.vector_norm(rows, dim=-1).square()
    if mode == "joint":
        flat = rows.flatten(0, 1)
        return flat @ flat.T
    return torch.bmm(rows, rows.transpose(1, 2))


def _weighted_jointly(activations: Tensor, gradients: Tensor, weights: Tensor, limit: int) -> Tensor:
    """``sum_oi J_oi w_oi J'_oi`` of ``J = g a^T`` between all samples and functions, for activations
    ``(samples, G, n)``, gradients ``(samples, G, functions, m)`` and weights ``(G, m, n)``; `limit` is bytes for the
    products of pairs.
    """
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


# Contractions in float32 whose samples are computed again in float64 where two large numbers cancelled.

MIN_SHARE = 1e-2
"""Share of the diagonal's part that must be left: below it float32 has lost too many digits."""


class Contracted(NamedTuple):
    """One layer's contraction, in the shapes of `gram` and in float64.

    Attributes:
        value: ``J Sigma J^T``.
        diagonal: what the diagonal part of Sigma gives alone.
        norms: ``|J_c|^2``, ``(samples, functions)``, or None.
    """

    value: Tensor
    diagonal: Tensor
    norms: Tensor | None = None


class Checked(NamedTuple):
    """One layer's contraction, of which some samples may have to be computed again in float64.

    Attributes:
        value: in the shapes of `gram`, in float64.
        diagonal: the variances that the diagonal part of Sigma gives alone, ``(samples, functions)``, from which others
            were subtracted; None where nothing was.
        repeat: computes some samples again, in float64: a slice, or their indices.
    """

    value: Tensor
    diagonal: Tensor | None
    repeat: Callable[[slice | Tensor], Tensor]


def variances_in(value: Tensor) -> Tensor:
    """The variances in a value in the shapes of `gram`, but ``"joint"``."""
    return value if value.ndim == 2 else value.diagonal(dim1=1, dim2=2)


def precise_values(layers: Sequence[Checked]) -> Tensor:
    """The values of several layers whose sum is asked for, one below the other, with imprecise samples computed again;
    the device is waited for once. A sample is imprecise in a layer where less is left of the sum than `MIN_SHARE` of
    what the layer's diagonal part gave.
    """
    device = layers[0].value.device
    values = torch.stack([on_device(layer.value, device) for layer in layers])
    parts = [on_device(layer.diagonal, device) for layer in layers if layer.diagonal is not None]
    if not parts:
        return values
    (short,) = on_host((variances_in(values.sum(0)) < MIN_SHARE * torch.stack(parts)).any(dim=2))
    if not bool(short.any()):
        return values
    doubtful = [number for number, layer in enumerate(layers) if layer.diagonal is not None]
    for number, samples in zip(doubtful, short, strict=True):
        which = samples.nonzero().flatten()
        if len(which) == len(samples):
            values[number] = on_device(layers[number].repeat(slice(0, len(samples))), device)
        elif len(which):
            repeated = layers[number].repeat(on_device(which, layers[number].value.device))
            values[number, on_device(which, device)] = on_device(repeated, device)
    return values


def precise(value: Tensor) -> Checked:
    """A value of which no sample is imprecise."""
    return Checked(value, None, lambda part: value[part])


def joined(parts: list[Contracted]) -> Contracted:
    """Contractions of successive parts of the samples as one."""
    if len(parts) == 1:
        return parts[0]
    norms = [part.norms for part in parts if part.norms is not None]
    return Contracted(
        torch.cat([part.value for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(norms) if norms else None,
    )


class LayerRows(NamedTuple):
    """One layer's part of the Jacobian of several functions of each sample's outputs.

    Attributes:
        activations: of the batch.
        gradients: at the layer's outputs, ``(samples, G, functions, m, T)``.
    """

    activations: Operand
    gradients: Tensor


DRAW_GROUP = 64
"""Consecutive seeds, from a multiple of it on, of draws that may be made together."""
_GROUP_NUMBERS = 2**16  # of the draws that are made together


def draws_together(numbers: int) -> int:
    """How many draws of so many numbers are made together, a power of two."""
    return 1 << min(DRAW_GROUP, max(1, _GROUP_NUMBERS // max(1, numbers))).bit_length() - 1


Self = TypeVar("Self", bound="Covariance")


class Covariance:
    """A block at given settings, ready for use: the covariance ``Sigma`` of its weights.

    The methods that a subclass overrides are what its posteriors can do (`Block.capabilities`). A distribution that is
    not Gaussian overrides `draw`. A Gaussian overrides `transform`, from which its draws follow; the other methods are
    about deviations from the posterior's mean. With `quadratic` alone it serves every head: then Jacobians are formed,
    a few samples at a time.
    """

    centred: ClassVar[bool] = True
    """Whether a draw is a deviation from the posterior's mean; otherwise it is the weights themselves."""
    correlated: ClassVar[bool] = True
    """Whether the weights of a row are correlated, so that variances do not say all of it."""
    cancels: ClassVar[bool] = False
    """Whether variances of outputs are differences of large numbers, which need float64."""
    shared: bool = False
    """Whether weights have something random in common, so that `independent` differs from draw to draw."""
    dtype: torch.dtype
    device: torch.device
    limit: int

    @property
    def computed_bytes(self) -> int:
        """Bytes of what is computed when it is needed, and kept."""
        return 0

    # Draws

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        """One draw of the block's weights, ``(G, m, n)``, where draws are not transformed normals.

        Args:
            generator: on the CPU, so that every device gets the same random numbers.
            like: a tensor with the draw's shape, number format and device.
        """
        raise self._cannot("draws")

    def draws(self, seeds: Sequence[int], like: Tensor, wide: bool = True) -> Tensor:
        """One draw for each seed, ``(draws, G, m, n)``, each the same bit for bit whatever others are made with it.

        Products of several draws round otherwise than that of one. So a draw that `transform` makes is always made
        with all draws of its group, whose seeds begin at a multiple of their number; of many weights it is alone.

        Args:
            seeds: those of a group side by side; of the generators where `draw` makes them.
            like: see `draw`.
            wide: whether the weights have float64, which normals of 24 random bits would show.
        """
        drawn, generator, start = like.new_empty(len(seeds), *like.shape), torch.Generator(), 0
        if type(self).draw is not Covariance.draw:
            for own, seed in zip(drawn, seeds, strict=True):
                own.copy_(self.draw(generator.manual_seed(seed), like))
            return drawn
        together = draws_together(like.numel())
        dtype = like.dtype if wide else torch.float32
        normals = like.new_empty(together, *like.shape, dtype=dtype, device="cpu")
        while start < len(seeds):
            group, places = seeds[start] // together, slice(None)
            stop = start + together
            if list(seeds[start:stop]) != [*range(group * together, (group + 1) * together)]:
                same = [seed // together == group for seed in seeds[start:stop]]
                stop = start + (same.index(False) if False in same else len(same))
                places = [seed % together for seed in seeds[start:stop]]
            made = self.transform(normals.normal_(generator=generator.manual_seed(group)).to(like))
            drawn[start:stop] = made[places]
            start = stop
        return drawn

    def transform(self, normals: Tensor) -> Tensor:
        """Turn standard normals ``(draws, G, m, n)`` into draws from ``N(0, Sigma)``, by a linear map."""
        raise self._cannot("draws from normals")

    def independent(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor]:
        """Mean and variance of the weights, ``(G, m, n)`` each, that are independent of each other once what they have
        in common is drawn; the mean of deviations, which is zero, as None.

        Args:
            generator: as in `draw`, of what they have in common.
        """
        raise self._cannot("moments of independent weights")

    # Numbers of the weights

    def variance(self) -> Tensor:
        """The variances of the weights, ``(G, m, n)``: the diagonal of Sigma."""
        raise self._cannot("variances")

    def log_determinant(self) -> Tensor:
        """``log det`` of the precision, a scalar."""
        raise self._cannot("log-determinant")

    def times_precision(self, matrices: Tensor) -> Tensor:
        """``Sigma^-1 x`` of weights ``(q, G, m, n)`` in float64, differentiable in them; 0 where they are certain."""
        raise self._cannot("products with the precision")

    def quadratic(self, jacobians: Tensor) -> Tensor:
        """``J Sigma J^T``, ``(q, q)``, of Jacobians ``(q, G, m, n)`` in any number format. A subclass overrides this or
        `whiten`.
        """
        rows = self.whiten(jacobians)
        return (rows @ rows.T).to(jacobians)

    def whiten(self, jacobians: Tensor) -> Tensor:
        """Rows ``r``, ``(q, any)``, with ``r r^T = J Sigma J^T`` of Jacobians ``(q, G, m, n)``; of wider numbers where
        that is needed.
        """
        values, vectors = torch.linalg.eigh(as_double(self.quadratic(jacobians)))
        return vectors * values.clamp(min=0).sqrt()

    # Outputs

    def prepared(self: Self, dtype: torch.dtype, device: torch.device, limit: int) -> Self:
        """Ready for the methods below: what they need is computed at the first use and kept.

        Args:
            dtype: of activations and output gradients.
            device: of activations and output gradients.
            limit: bytes that one temporary may take.
        """
        ready = copy.copy(self)
        for name, value in dict(vars(self)).items():  # a copy, since other threads keep values meanwhile
            if isinstance(value, Tensor):
                setattr(ready, name, on_device(value, device))
            elif isinstance(value, Covariance):
                setattr(ready, name, value.prepared(dtype, device, limit))
        ready.dtype, ready.device, ready.limit = dtype, device, limit
        return ready

    def contract(self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], mode: Mode) -> Checked:
        """``J Sigma J^T`` in the shapes of `gram`, in float64.

        Args:
            layers: of the block.
            rows: those of the Jacobian by layer; of layers that are not there they are zero.
            mode: see `gram`.
        """
        grams = [gram(whitened, mode) for _, _, whitened in self._jacobians(layers, rows, mode == "joint")]
        return precise(grams[0] if mode == "joint" else torch.cat(grams))

    def against_prior(
        self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        """``sum_c J_c Sigma J_c^T``, and the same under independent weights with variance ``prior[layer]``, both
        ``(samples,)`` in float64 and from the same J.

        Nothing is computed again where much cancels: what is left of one block may not matter in the sum over all. The
        caller judges that, and asks for float64 by `double`.
        """
        variances = torch.cat(
            [torch.full((layer.parameters,), prior.get(layer.name, 0.0), device="cpu") for layer in layers]
        )
        parts = [
            (whitened.square().sum((1, 2)), (jacobian.square() @ variances.to(jacobian)).sum(1))
            for _, jacobian, whitened in self._jacobians(layers, rows, False)
        ]
        posterior, of_prior = zip(*parts, strict=True)
        return torch.cat(posterior), torch.cat(of_prior)

    def _jacobians(
        self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], in_one: bool
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the samples, each with its Jacobian ``(samples, functions, parameters)`` and the whitened Jacobian,
        in float64; with `in_one`, one slice of all samples.
        """
        samples, _, functions, _, _ = next(iter(rows.values())).gradients.shape
        size = sum(layer.parameters for layer in layers)
        # the general `whiten` goes by the quadratic forms of all pairs of rows
        by_pairs = type(self).whiten is Covariance.whiten
        most = 1 if by_pairs else max(1, self.limit // (8 * functions * size))
        step = samples if in_one else most
        shape = layers[0].matrix_shape if len(layers) == 1 else (1, 1, size)
        for start in range(0, samples, step):
            part = slice(start, min(samples, start + step))
            jacobian = self._jacobian_of(layers, rows, part)
            whitened = self.whiten(jacobian.flatten(0, 1).reshape(-1, *shape))
            yield part, jacobian, whitened.reshape(*jacobian.shape[:2], -1)

    def _jacobian_of(self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], part: slice) -> Tensor:
        """The layers' Jacobians side by side, ``(samples, functions, parameters)``."""
        columns: list[Tensor] = []
        like = next(iter(rows.values())).gradients[part]
        for layer in layers:
            if layer.name not in rows:
                columns.append(like.new_zeros(like.shape[0], like.shape[2], layer.parameters))
                continue
            activations, gradients = rows[layer.name]
            jacobian = _jacobian(activations.part(part), gradients[part], self.limit)
            columns.append(jacobian.transpose(1, 2).flatten(2))
        return as_double(torch.cat(columns, dim=2))

    def of_layer(self, start: int, shape: tuple[int, int, int], whole: tuple[int, int, int]) -> Covariance:
        """The covariance of one layer's weights, for its own outputs.

        A class that overrides this has `output_variance` and `output_covariance` for random inputs too.

        Args:
            start: where the layer's weights begin in the block.
            shape: ``(G, m, n)`` of the layer.
            whole: that of the block.
        """
        return _LayerOfBlock(self, start, shape, whole)

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        """Variance that the layer's weights give to its outputs ``y = W x``, for random inputs: ``Var(y_o) = m^T S_oo m
        + sum_k v_k [S_oo]_kk`` where row ``o`` of W has the covariance ``S_oo``. Differentiable.

        Args:
            mean: ``m``, ``(rows, G, n)``.
            variance: ``v``, likewise; None for certain inputs.

        Returns:
            ``(rows, G, m)``.
        """
        raise self._cannot("row covariances")

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        """Covariance that the layer's weights give to its outputs, for random inputs: ``Cov(y_o, y_o') =
        tr(S_oo' (m m^T + C))``; of a layer of one group, in float64.

        Args:
            mean: ``m``, ``(rows, n)``.
            covariance: ``C``, ``(rows, n, n)``; None for certain inputs.
            joint: of certain inputs also between rows.

        Returns:
            ``(rows, m, m)``, or with `joint` ``(rows * m, rows * m)``.
        """
        raise self._cannot("row covariances")

    def traceable(self, shape: tuple[int, int, int], covariances: bool) -> Covariance:
        """The covariance of a layer of one group, of which `output_variance`, `output_products` and, with
        `covariances`, `output_covariance` can be traced for certain inputs: what they compute once is there.

        Args:
            shape: ``(1, m, n)`` of the layer.
            covariances: whether those of all pairs of outputs are asked for.

        Raises:
            PosthocUQError: it would have to be formed, and is too large.
        """
        _, outputs, inputs = shape
        with torch.inference_mode(False), torch.no_grad():
            zeros = torch.zeros(1, inputs, dtype=self.dtype, device=self.device)
            self.output_variance(as_double(zeros).unsqueeze(1))
            if covariances:
                self.output_covariance(zeros)
            self.output_products(zeros).with_sum(zeros.new_zeros(1, outputs))
        return self

    def variances_of(self, activations: Tensor) -> Tensor:
        """Variances of the outputs ``(rows, m)`` of a layer of one group, for certain inputs ``(rows, n)``."""
        return self.output_variance(as_double(activations).unsqueeze(1)).squeeze(1)

    def output_products(self, activations: Tensor) -> OutputCovariance:
        """The covariance of the outputs of a layer of one group by its products, for certain inputs ``(rows, n)``."""
        covariance = self.output_covariance(activations).to(activations)
        return OutputCovariance(lambda vectors: vectors @ covariance)

    def _cannot(self, what: str) -> PosthocUQError:
        return PosthocUQError(f"A {type(self).__name__} has no {what}.")


def _jacobian(activations: Operand, gradients: Tensor, limit: int) -> Tensor:
    """Rows of J, ``(samples, G, functions, rows, n)``; functions are treated as further outputs of the layer."""
    samples, groups, functions, rows, _ = gradients.shape
    stacked = gradients.flatten(2, 3).transpose(2, 3)
    return activations.gradients(stacked, limit).reshape(samples, groups, functions, rows, -1)


def jacobian_gram(activations: Operand, gradients: Tensor, inputs: int, limit: int) -> Tensor:
    """``J J^T`` of each sample, ``(samples, functions, functions)``, by whichever is cheaper: pairs of positions, or
    J; for gradients ``(samples, G, functions, m, T)`` and activations of `inputs` numbers.
    """
    samples, groups, functions, outputs, positions = gradients.shape
    by_jacobian = functions * outputs * inputs * (positions + TOUCH_COST)
    pairs = positions**2 * (inputs + functions * outputs)
    pairs += TOUCH_COST * positions * (positions + 2 * functions * outputs)
    by_pairs = pairs <= by_jacobian
    numbers = groups * (
        positions * (positions + functions * outputs) if by_pairs else functions * outputs * inputs
    )
    parts: list[Tensor] = []
    for part in chunks(samples, numbers, gradients.element_size(), limit):
        if by_pairs:
            rows, columns = activations.part(part).rows(), gradients[part]
            # one product for all functions, which does not copy the pairs for each
            weighted = torch.matmul(columns.flatten(2, 3), torch.matmul(rows, rows.transpose(-1, -2)))
            weighted = weighted.unflatten(2, (functions, outputs))
            weighted, columns = (each.transpose(1, 2).flatten(2) for each in (weighted, columns))
            parts.append(torch.matmul(weighted, columns.transpose(1, 2)))
        else:
            jacobian = _jacobian(activations.part(part), gradients[part], limit)
            parts.append(gram(jacobian.transpose(1, 2).flatten(2), "covariance"))
    return torch.cat(parts)


def is_all(part: slice, size: int) -> bool:
    """Whether a slice leaves nothing out, so that a view of it would be a call for nothing."""
    return not part.start and part.stop in (None, size) and part.step is None


_MAX_FORMED = 2**12  # weights whose covariance is formed for a program


class _LayerOfBlock(Covariance):
    """A layer's part of a block that is known by its quadratic forms."""

    def __init__(
        self, block: Covariance, start: int, shape: tuple[int, int, int], whole: tuple[int, int, int]
    ) -> None:
        self._block, self._start, self._shape, self._whole = block, start, shape, whole

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        rows, (_, outputs, inputs) = as_double(mean), self._shape
        size = self._whole[0] * self._whole[1] * self._whole[2]
        eye = torch.eye(outputs, dtype=rows.dtype, device=rows.device)

        def covariance_of(activations: Tensor) -> Tensor:
            jacobians = rows.new_zeros(len(activations) * outputs, size)
            of_layer = torch.einsum("op,si->sopi", eye, activations).reshape(len(jacobians), -1)
            jacobians[:, self._start : self._start + outputs * inputs] = of_layer
            found = self._block.quadratic(jacobians.reshape(-1, *self._whole))
            return as_double(found).to(rows.device)

        return covariance_of(rows) if joint else torch.stack([covariance_of(row) for row in rows.split(1)])

    def variances_of(self, activations: Tensor) -> Tensor:
        return self.output_covariance(activations).diagonal(dim1=1, dim2=2)

    def traceable(self, shape: tuple[int, int, int], covariances: bool) -> Covariance:
        """The whole matrix, by the quadratic forms of all pairs of weights."""
        _, outputs, inputs = shape
        size = outputs * inputs
        if size > _MAX_FORMED:
            raise self._cannot(
                f"covariance of {size:,} weights, at most {_MAX_FORMED:,}, that could be formed"
            )
        whole = self._whole[0] * self._whole[1] * self._whole[2]
        units = as_double(torch.zeros(size, whole, device=self.device))
        units[:, self._start : self._start + size].fill_diagonal_(1.0)
        found = as_double(self._block.quadratic(units.reshape(-1, *self._whole)))
        pairs = found.reshape(outputs, inputs, outputs, inputs).permute(0, 2, 1, 3).contiguous()
        rows = pairs.diagonal(dim1=0, dim2=1).permute(2, 0, 1).unsqueeze(0)
        return DenseLayer(rows, pairs).prepared(self.dtype, self.device, self.limit)


# Independent weights, perhaps in other bases (`Kronecker`) or less a low rank (`posthoc_uq.posteriors.information`).
#
# With ``Sigma = diag w - low rank`` and ``J_c = sum_t g_ct a_t^T``:
#
# * one position: ``J_c = g_c a^T`` is never formed. The diagonal gives ``sum_o g_co g_do (sum_i w_oi a_i^2)``;
# * a few positions: the same with pairs of positions, ``sum_tu g_ct g_du (sum_i w_oi a_ti a_ui)``; where ``w`` is a sum
#   of few products, ``w_oi = sum_k p_ok q_ki``, what is in brackets follows from as many Grams of the positions;
# * more positions (weight sharing): ``J`` is formed for a few rows of a few samples at a time and summed away. Bases
#   turn the activations and output gradients beforehand, not ``J``.

_FEWEST_ROWS = 256  # of a product with all weights, if memory allows
_PART_BYTES = 2**23  # of a temporary on a CPU: 4 MiB take as long in more calls, 16 MiB more memory
_FEW_OUTPUTS = 16  # of a layer, below which pairs of positions are formed in both orders
_MAX_TERMS = 24  # products whose sum stands for a table of weights
_TERMS_ERROR = 2e-6  # of such a sum, relative to every entry
_GRID = 64  # rows and columns of a table, by which the terms are chosen


class _Ways(NamedTuple):
    """How a contraction goes.

    Attributes:
        by_pairs: the diagonal's part from pairs of positions; otherwise from J.
        by_positions: the low rank's part from every position; otherwise from J.
        terms: from `terms_of`, where pairs of positions are known by Grams.
        of_sample: numbers of the largest temporary of a sample that has no outputs.
        of_outputs: the same that has.
    """

    by_pairs: bool
    by_positions: bool
    terms: tuple[Tensor, Tensor] | None
    of_sample: int
    of_outputs: int


_CACHE_BYTES = (
    2**20
)  # of the products of many rows that are computed at once: they stay in a processor's cache


class Independent(Covariance):
    """Independent weights of one layer; in subclasses a part of what their covariance is made of.

    Args:
        precision: ``1 / w``, ``(G, m, n)``, in float64.
        like: has the number format of the block.
    """

    correlated = False
    width = 0
    """How many input directions a low rank has that is subtracted."""

    def __init__(self, precision: Tensor, like: Tensor) -> None:
        self.weights = precision.reciprocal().to(like)
        self._log_determinant = log_sum(precision)

    @constant
    def weights(self) -> Tensor:
        """``w``, ``(G, m, n)``: the variances."""
        raise AssertionError("set, or computed by a subclass")

    def variance(self) -> Tensor:
        return self.weights

    def log_determinant(self) -> Tensor:
        return self._log_determinant

    def whiten(self, jacobians: Tensor) -> Tensor:
        return (jacobians * self.weights.sqrt().to(jacobians)).flatten(1)

    def of_layer(self, start: int, shape: tuple[int, int, int], whole: tuple[int, int, int]) -> Covariance:
        return self

    # What is prepared once

    @constant
    def narrow_weights(self) -> Tensor:
        """``w`` in the activations' precision."""
        return self.weights.to(self.dtype)

    @constant
    def wide_columns(self) -> Tensor:
        """``w`` of a layer of one group in float64, ``(n, m)``."""
        return as_double(self.weights[0]).T

    @constant
    def root_weights(self) -> Tensor:
        """``sqrt w``, which turns J into the rows of its diagonal part."""
        return self.weights.sqrt().to(self.dtype)

    @constant
    def marginal(self) -> Tensor:
        """The weights' variances in the activations' precision, where `w` are not these."""
        return self.variance().to(self.dtype)

    @constant
    def square_weights(self) -> Tensor:
        """The weights of squared activations that give the diagonal's part of each output's variance, ``(G, m, n)``."""
        return self.narrow_weights

    @constant
    def equal_weight(self) -> float | None:
        """``w`` where it is the same for all weights, as in INF without a residual; the diagonal's part is then ``w``
        times the squared norm of J.
        """
        least, most = (float(extreme) for extreme in self.weights.aminmax())
        return most if least == most else None

    @constant
    def terms(self) -> tuple[Tensor, Tensor] | None:
        """``w`` of a layer of one group as few products, see `terms_of`; None where these are not looked for."""
        return None

    def core_width(self, double: bool) -> int:
        """How many input directions a contraction takes of the low rank."""
        return 0

    def weight_rows(self, rows: slice, double: bool) -> Tensor:
        """``w`` of some rows, ``(G, rows, n)``."""
        weights = self.weights if double else self.narrow_weights
        weights = weights if is_all(rows, weights.shape[1]) else weights[:, rows]
        return as_double(weights) if double else weights

    def root_weight_rows(self, rows: slice, double: bool) -> Tensor:
        """``sqrt w`` of some rows, ``(G, rows, n)``; in float64 of the numbers that a low rank was computed with."""
        if double:
            return self.weight_rows(rows, True).sqrt()
        whole = is_all(rows, self.root_weights.shape[1])
        return self.root_weights if whole else self.root_weights[:, rows]

    # Jacobians

    def contract(self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], mode: Mode) -> Checked:
        ((activations, gradients),) = rows.values()

        def work(part: slice | Tensor, double: bool) -> Contracted:
            if isinstance(part, slice) and is_all(part, len(gradients)):
                once = copy.copy(activations)  # what it keeps for its products is freed with it
                return self._contracted(once, gradients, mode, double, False)
            return self._contracted(activations.part(part), gradients[part], mode, double, False)

        return self._checked(work, gradients.shape[0], mode)

    def against_prior(
        self, layers: Sequence[Layer], rows: Mapping[str, LayerRows], prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        ((name, (activations, gradients)),) = rows.items()
        found = self._contracted(activations, gradients, "variance", double, True)
        assert found.norms is not None
        return found.value.sum(1), as_double(found.norms).sum(1) * prior.get(name, 0.0)

    def _checked(
        self, work: Callable[[slice | Tensor, bool], Contracted], samples: int, mode: Mode
    ) -> Checked:
        """All samples' contraction; `work` contracts a slice of them, in float64 if its second argument is true."""
        return precise(work(slice(0, samples), False).value)

    def _contracted(
        self, activations: Operand, gradients: Tensor, mode: Mode, double: bool, norms: bool
    ) -> Contracted:
        """In shapes of `gram`, with the squared norms of J if `norms`."""
        if isinstance(activations, OneHotRows) and type(self) is DiagonalPrecision:
            return self._of_places(activations, gradients, mode, double, norms)
        return self._in_parts(activations, gradients, mode, double, norms)

    def _of_places(
        self, activations: OneHotRows, gradients: Tensor, mode: Mode, double: bool, norms: bool
    ) -> Contracted:
        """The same of rows with a 1 at one place each: J is zero at all places that do not occur."""
        found: list[Contracted] = []
        for part in activations.parts_by_use(together=mode == "joint"):
            places, rows = activations.part(part).used()
            own = Independent.__new__(Independent)
            own.weights, own.dtype, own.device, own.limit = (
                self.weights[..., places.to(self.weights.device)],
                self.dtype,
                self.device,
                self.limit,
            )
            found.append(own._contracted(rows, gradients[part], mode, double, norms))
        return joined(found)

    def _ways(self, shape: Sequence[int], mode: Mode, double: bool) -> _Ways:
        """The cheaper way to each of both terms, in multiply-adds per weight and sample.

        Args:
            shape: of the gradients, ``(samples, G, functions, m, T)``.
            mode: see `gram`.
            double: whether in float64.
        """
        _, groups, functions, outputs, positions = shape
        inputs, width = self.weights.shape[2], self.core_width(double)
        if positions == 1 or mode == "joint":
            one = positions == 1
            of_output = functions * (max(1, width) if one else inputs)
            return _Ways(one, one, None, groups * width * inputs, groups * outputs * of_output)
        formed = functions * (positions + TOUCH_COST)
        squares, cores = functions * TOUCH_COST, functions * (TOUCH_COST + width) * (width > 0)
        # two numbers are touched for each pair of positions, of the products of activations and of those with w
        pairs = positions * (positions + 1) / 2 * (1 + TOUCH_COST / 2 * (1 / outputs + 1 / inputs))
        terms, of_pairs = None if double else self.terms, positions**2 * inputs
        if terms is not None:
            rank = len(terms[1])
            grams = rank * positions**2 * (1 / outputs + 1 / inputs)
            grams += TOUCH_COST * positions * (rank / outputs + positions / inputs)
            terms = terms if grams < pairs else None
            if terms is not None:
                pairs, of_pairs = grams, rank * positions * (positions + inputs)
        placed = positions * width * (1 + TOUCH_COST / 4 * (1 / outputs + 1 / inputs))
        costs = {
            (True, True): pairs + placed,
            (True, False): pairs + formed + cores,
            (False, True): formed + squares + placed,
            (False, False): formed + squares + cores,
        }
        by_pairs, by_positions = min(costs, key=lambda each: costs[each])
        if not width:
            by_positions = by_pairs
        fixed = max(of_pairs * by_pairs, positions * width * inputs * by_positions)
        columns = [positions**2 * by_pairs, positions * width * by_positions]
        columns.append(functions * inputs * (not (by_pairs and by_positions)))
        terms = terms if by_pairs else None
        return _Ways(by_pairs, by_positions, terms, groups * fixed, groups * outputs * max(columns))

    def _row_chunks(self, numbers: int, item: int) -> Iterator[slice]:
        """Slices of the layer's rows, so small that `numbers` numbers of `item` bytes a row stay within the limit."""
        outputs = self.weights.shape[1]
        step = max(1, min(outputs, self.limit // max(1, numbers * item)))
        for start in range(0, outputs, step):
            yield slice(start, min(outputs, start + step))

    def _in_parts(
        self, activations: Operand, gradients: Tensor, mode: Mode, double: bool, norms: bool
    ) -> Contracted:
        """A few samples at a time; all at once for ``"joint"``."""
        samples, positions = len(gradients), gradients.shape[-1]
        ways = self._ways(gradients.shape, mode, double)
        item = 8 if double else gradients.element_size()
        step = samples
        if mode != "joint":
            limit = min(self.limit, _PART_BYTES) if gradients.device.type == "cpu" else self.limit
            step = max(1, limit // max(1, max(ways.of_sample, ways.of_outputs) * item))
            # of few rows most of a product's time goes to reading the weights
            fewest = -(-_FEWEST_ROWS * self.weights.shape[2] // max(1, ways.of_sample))
            step = max(step, min(fewest, self.limit // max(1, ways.of_sample * item)))
            if positions > 1:
                # products with rows of 32 bytes: others take up to twice as long
                step = step // 8 * 8 or step // 4 * 4 or step
        weights: Tensor | None = None
        if ways.by_positions and self.weights.numel() * item <= self.limit:
            weights = self._core_weights(slice(None), double)  # once for all parts
        parts: list[Contracted] = []
        for start in range(0, samples, step):
            own, of_own = activations, gradients
            if step < samples:
                part = slice(start, min(samples, start + step))
                own, of_own = activations.part(part), gradients[part]
            parts.append(self._of_part(own, of_own, mode, double, norms, ways, weights))
        return joined(parts)

    def _of_part(
        self,
        activations: Operand,
        gradients: Tensor,
        mode: Mode,
        double: bool,
        norms: bool,
        ways: _Ways,
        core_weights: Tensor | None,
    ) -> Contracted:
        """Both terms of some samples; each row of J is formed, where it is, once for both."""
        _, groups, _, _, positions = gradients.shape
        if groups == positions == 1 and mode != "joint":
            inputs, own = activations.rows()[:, 0, 0], gradients[:, 0, :, :, 0]
            if double:
                inputs, own = as_double(inputs), as_double(own)
            return self._of_products(inputs, own, mode, double, norms, ways, core_weights)
        inputs: Tensor | None = None
        if ways.by_pairs or ways.by_positions:
            inputs = activations.rows().transpose(0, 1).contiguous()  # (G, samples, T, n)
            if not (ways.by_pairs and ways.by_positions):
                activations = Rows(inputs.transpose(0, 1))
            inputs = as_double(inputs) if double else inputs
        wide = as_double(gradients) if double else gradients
        lengths: Tensor | None = None
        if norms and inputs is not None:
            lengths = _squared_norms(inputs.transpose(0, 1), wide)
        pairs: Tensor | None = None
        if inputs is not None and ways.by_pairs and mode != "joint":
            pairs = (
                _pair_products(inputs, wide.shape[3]) if ways.terms is None else _grams(inputs, ways.terms[1])
            )
        diagonal: Tensor | None = None
        cores: Tensor | None = None
        item, outputs = wide.element_size(), gradients.shape[3]
        for rows in self._row_chunks(len(gradients) * ways.of_outputs // outputs, item):
            own = wide if is_all(rows, outputs) else wide[:, :, :, rows]
            by_output = own.permute(1, 3, 0, 2, 4).contiguous()  # (G, rows, samples, functions, T)
            jacobian: Tensor | None = None
            row_lengths: Tensor | None = None
            if not (ways.by_pairs and ways.by_positions):
                jacobian = _jacobian(activations, gradients[:, :, :, rows], self.limit)
                jacobian = as_double(jacobian) if double else jacobian
                if norms and inputs is None:
                    row_lengths = gram(jacobian.transpose(1, 2).flatten(2), "variance")
                    lengths = row_lengths if lengths is None else lengths + row_lengths
            scaled = False
            if norms and self.equal_weight is not None:
                squares = None  # from the norms, below
            elif not ways.by_pairs:
                assert jacobian is not None
                jacobian.mul_(self.root_weight_rows(rows, double).unsqueeze(1))
                squares, scaled = gram(jacobian.transpose(1, 2).flatten(2), mode), True
            elif mode == "joint":
                assert inputs is not None
                weights = self.weight_rows(rows, double)
                squares = _weighted_jointly(
                    inputs[:, :, 0].transpose(0, 1), own.transpose(3, 4)[:, :, :, 0], weights, self.limit
                )
            else:
                assert pairs is not None
                of_pairs = self.weight_rows(rows, double) if ways.terms is None else ways.terms[0][:, rows]
                squares = _by_pairs(pairs, by_output, of_pairs, mode)
            if squares is not None:
                diagonal = squares if diagonal is None else diagonal + squares
            if ways.by_positions:
                assert inputs is not None
                own_weights = core_weights
                if own_weights is None:
                    own_weights = self._core_weights(rows, double)
                elif not is_all(rows, outputs):
                    own_weights = own_weights[:, rows]
                core = self._core_of_positions(inputs, by_output, own_weights, rows, double)
            else:
                assert jacobian is not None
                core = self._core_of_jacobian(jacobian, rows, double, scaled)
            cores = core if cores is None or core is None else cores + core
        if norms and self.equal_weight is not None:
            assert lengths is not None
            diagonal = lengths * self.equal_weight
        assert diagonal is not None
        return self._less_low_rank(diagonal, cores, mode, double, lengths)

    def _of_products(
        self,
        inputs: Tensor,
        gradients: Tensor,
        mode: Mode,
        double: bool,
        norms: bool,
        ways: _Ways,
        core_weights: Tensor | None,
    ) -> Contracted:
        """The same where J is one product ``g a^T`` a function: of activations ``(samples, n)`` and gradients
        ``(samples, functions, m)`` of a layer of one group. Everything stays in this order, and nothing is copied.
        """
        squares, diagonal, cores = inputs.square(), None, None
        samples, _, outputs = gradients.shape
        of_output = samples * ways.of_outputs // outputs
        for rows in self._row_chunks(of_output, gradients.element_size()):
            weights, own, of_core = self.weight_rows(rows, double), gradients, core_weights
            if not is_all(rows, outputs):
                own = gradients[..., rows]
                of_core = None if core_weights is None else core_weights[:, rows]
            weighted = own * torch.mm(squares, weights[0].T).unsqueeze(1)
            if mode == "variance":
                found = (weighted * own).sum(2)
            else:
                found = torch.bmm(weighted, own.transpose(1, 2))
            diagonal = found if diagonal is None else diagonal + found
            if of_core is None:
                of_core = self._core_weights(rows, double)
            core = self._core_of_products(inputs, own, of_core[0], rows, double)
            cores = core if cores is None or core is None else cores + core
        assert diagonal is not None
        lengths = squares.sum(1, keepdim=True) * gradients.square().sum(2) if norms else None
        return self._less_low_rank(diagonal, cores, mode, double, lengths)

    # A low rank that is subtracted, if there is one

    def _core_of_products(
        self, inputs: Tensor, gradients: Tensor, weights: Tensor, rows: slice, double: bool
    ) -> Tensor | None:
        """The low rank's part of `_of_products`, with `weights` from `_core_weights`."""
        return None

    def _core_of_jacobian(self, jacobian: Tensor, rows: slice, double: bool, scaled: bool) -> Tensor | None:
        """The low rank's part of some rows of J, which is overwritten; J is multiplied by ``sqrt w`` if `scaled`."""
        return None

    def _core_weights(self, rows: slice, double: bool) -> Tensor:
        """What the rows of J are multiplied with, number by number, for the low rank's part, ``(G, rows, n)``."""
        return self.weight_rows(rows, double)

    def _core_of_positions(
        self, activations: Tensor, gradients: Tensor, weights: Tensor, rows: slice, double: bool
    ) -> Tensor | None:
        """The same of activations ``(G, samples, T, n)`` and gradients ``(G, rows, samples, functions, T)``, with
        `weights` from `_core_weights`.
        """
        return None

    def _less_low_rank(
        self, diagonal: Tensor, cores: Tensor | None, mode: Mode, double: bool, norms: Tensor | None
    ) -> Contracted:
        """The diagonal's part, in shapes of `gram`, less that of the low rank; `norms` become part of the result."""
        wide = as_double(diagonal)
        return Contracted(wide, wide, norms)

    # Outputs

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        second = mean.square() if variance is None else mean.square() + variance
        return torch.einsum("goi,rgi->rgo", self.square_weights.to(mean), second)

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        second = self._second_moments(as_double(mean), covariance, joint)
        diagonal = second @ self.wide_columns  # (rows, m), or (rows, rows, m)
        return joined_rows(torch.diag_embed(diagonal), joint)

    def _second_moments(self, mean: Tensor, covariance: Tensor | None, joint: bool) -> Tensor:
        """Of each input, ``(rows, n)``; with `joint` products of two rows, ``(rows, rows, n)``."""
        if joint:
            return mean.unsqueeze(1) * mean
        second = mean.square()
        return second if covariance is None else second + as_double(covariance.diagonal(dim1=1, dim2=2))

    def variances_of(self, activations: Tensor) -> Tensor:
        """Many rows pass a few at a time."""
        columns = activations.T
        result = columns.new_empty(self.square_weights.shape[1], columns.shape[1])
        for part in self._column_parts(columns, columns.shape[0]):
            torch.mm(self.square_weights[0], self._squares(columns[:, part]), out=result[:, part])
        return result.T

    def _squares(self, columns: Tensor) -> Tensor:
        """Squares of activations ``(n, rows)``."""
        return columns.square()

    def _column_parts(self, columns: Tensor, numbers: int) -> Iterator[slice]:
        """Slices of the columns, with so many numbers for each."""
        limit = min(self.limit, _CACHE_BYTES) if columns.device.type == "cpu" else self.limit
        return chunks(columns.shape[1], numbers, columns.element_size(), limit)

    def output_products(self, activations: Tensor) -> OutputCovariance:
        diagonal = (activations.square() @ self.narrow_weights[0].T).unsqueeze(1)
        return OutputCovariance(lambda vectors: diagonal * vectors)


def _pair_products(inputs: Tensor, outputs: int) -> Tensor:
    """Products of the activations ``(G, samples, T, n)`` at two positions, ``(G, samples, pairs, n)``: of all
    ``T (T + 1) / 2`` pairs, or, of a layer of few outputs, whose products with them cost less than to choose, of both
    orders.
    """
    positions = inputs.shape[2]
    if positions == 1:
        return inputs.square()
    if outputs < _FEW_OUTPUTS:
        return (inputs.unsqueeze(2) * inputs.unsqueeze(3)).flatten(2, 3)
    first, second, _ = pairs_of(positions, inputs.device)
    return inputs.index_select(2, first).mul_(inputs.index_select(2, second))


def _grams(inputs: Tensor, scales: Tensor) -> Tensor:
    """Products of activations ``(1, samples, T, n)`` at two positions, summed with each of the scales ``(r, n)``,
    ``(1, samples, T^2, r)``.
    """
    _, samples, positions, _ = inputs.shape
    scaled = (inputs[0].unsqueeze(1) * scales.unsqueeze(1)).flatten(1, 2)
    grams = torch.bmm(scaled, inputs[0].transpose(1, 2))
    return grams.view(1, samples, -1, positions**2).transpose(2, 3)


def terms_of(table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """A table ``(m, n)`` of positive numbers as a sum of few products, ``P Q`` with `P` ``(1, m, r)`` and `Q`
    ``(r, n)``; None where that takes more than `_MAX_TERMS` or is not exact to `_TERMS_ERROR` of every entry.

    Each term is a row of what is left, times a column of it (cross approximation). So the variances
    ``1 / (x_i y_j + 1)`` of a Kronecker product with a prior take some 5 to 15 terms in float32.
    """
    wide = as_double(table)
    rows, columns = (
        torch.linspace(0, size - 1, min(size, _GRID), device=wide.device).round().long()
        for size in wide.shape
    )
    grid = wide[rows][:, columns]
    # From the row of the smallest numbers, at its largest: the first term is then below the table everywhere, so that
    # terms do not cancel.
    row = int(grid.sum(1).argmin())
    column = int(grid[row].argmax())
    left, right = wide.new_empty(len(wide), 0), wide.new_empty(0, wide.shape[1])
    for _ in range(_MAX_TERMS):
        own_row, own_column = rows[row], columns[column]
        across = wide[own_row] - left[own_row] @ right
        down = (wide[:, own_column] - left @ right[:, own_column]) / across[own_column]
        left, right = torch.cat([left, down.unsqueeze(1)], 1), torch.cat([right, across.unsqueeze(0)])
        shares = (1 - left[rows] @ right[:, columns] / grid).abs()
        worst = int(shares.argmax())
        if float(shares.flatten()[worst]) <= _TERMS_ERROR / 4:
            break
        row, column = divmod(worst, len(columns))
    left, right = left.to(table.device, dtype), right.to(table.device, dtype)
    off = (as_double(left) @ as_double(right)).div_(wide).sub_(1).abs_()
    return (left.unsqueeze(0), right) if float(off.amax()) <= _TERMS_ERROR else None


@lru_cache(maxsize=8)
def pairs_of(positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the second of all pairs of positions, and the place among them of every pair in both orders,
    ``(positions**2,)``.
    """
    with torch.inference_mode(False):  # later gradients may need them
        first, second = torch.triu_indices(positions, positions, device=device)
        places = torch.empty(positions, positions, dtype=torch.long, device=device)
        numbers = torch.arange(len(first), device=device)
        places[first, second], places[second, first] = numbers, numbers
        return first, second, places.flatten()


def _by_pairs(pairs: Tensor, gradients: Tensor, weights: Tensor, mode: Mode) -> Tensor:
    """``sum_o sum_tu g_cto g_duo (sum_i w_oi a_ti a_ui)``, in the shapes of `gram`.

    Args:
        pairs: from `_pair_products`.
        gradients: ``(G, m, samples, functions, T)``.
        weights: ``w``, ``(G, m, n)``.
        mode: ``"variance"`` or ``"covariance"``.
    """
    groups, outputs, samples, functions, positions = gradients.shape
    spread = torch.bmm(weights, pairs.flatten(1, 2).transpose(1, 2))  # (G, m, samples * pairs)
    if positions == 1:
        weighted = gradients * spread.view(groups, outputs, samples, 1, 1)
    else:
        spread = spread.view(groups * outputs * samples, -1)
        if spread.shape[1] < positions**2:
            spread = spread.index_select(1, pairs_of(positions, spread.device)[2])
        flat = gradients.view(-1, functions, positions)
        weighted = torch.bmm(flat, spread.view(-1, positions, positions)).view(gradients.shape)
    if mode == "variance":
        return (gradients * weighted).sum((0, 1, 4))
    left, right = (
        each.permute(2, 3, 0, 1, 4).reshape(samples, functions, -1) for each in (weighted, gradients)
    )
    return torch.bmm(left, right.transpose(1, 2))


def _squared_norms(activations: Tensor, gradients: Tensor) -> Tensor:
    """``|sum_t g_ct a_t^T|^2``, ``(samples, functions)``, by the Grams of positions: of activations
    ``(samples, G, T, n)`` and gradients ``(samples, G, functions, m, T)``.
    """
    if activations.shape[2] == 1:
        lengths = activations.square().sum((2, 3)).unsqueeze(2) * gradients.square().sum((3, 4))
        return lengths.sum(1)
    pairs = torch.matmul(activations, activations.transpose(-1, -2)).unsqueeze(2)
    return (torch.matmul(gradients.transpose(-1, -2), gradients) * pairs).sum((1, 3, 4))


def joined_rows(covariances: Tensor, joint: bool) -> Tensor:
    """Covariances of the outputs of pairs of rows ``(rows, rows, m, m)`` as one matrix, if `joint`."""
    if not joint:
        return covariances
    size = covariances.shape[0] * covariances.shape[2]
    return covariances.transpose(1, 2).reshape(size, size)


class DiagonalPrecision(Independent):
    """A diagonal precision ``(G, m, n)``."""

    def transform(self, normals: Tensor) -> Tensor:
        return normals * self.weights.sqrt()

    def independent(self, generator: torch.Generator) -> tuple[None, Tensor]:
        return None, self.weights

    def times_precision(self, matrices: Tensor) -> Tensor:
        weights = as_double(self.weights)
        return matrices * torch.where(weights > 0, weights.reciprocal(), 0.0)


class Variances(DiagonalPrecision):
    """Independent weights of variances ``(G, m, n)``; a weight whose variance is zero is certain."""

    def __init__(self, variances: Tensor) -> None:
        self.weights = variances

    def log_determinant(self) -> Tensor:
        return -log_sum(self.weights)


_ROTATED_LIMITS = 8  # rotated activations may take this many times the memory limit of one temporary


class Kronecker(Independent):
    """``(U_G x U_A) diag(1 / P) (U_G x U_A)^T`` with orthogonal bases of the outputs and inputs: KFAC and EFB.

    Args:
        input_basis: ``U_A``, ``(G, n, n)``.
        output_basis: ``U_G``, ``(G, m, m)``.
        precision: ``P``, ``(G, m, n)``, in float64.
    """

    correlated = True

    def __init__(self, input_basis: Tensor, output_basis: Tensor, precision: Tensor) -> None:
        super().__init__(precision, input_basis)
        self._input_basis, self._output_basis = input_basis, output_basis

    def transform(self, normals: Tensor) -> Tensor:
        return self._output_basis @ (normals * self.weights.sqrt()) @ self._input_basis.transpose(-1, -2)

    def times_precision(self, matrices: Tensor) -> Tensor:
        inputs, outputs = as_double(self._input_basis), as_double(self._output_basis)
        turned = outputs.transpose(-1, -2) @ matrices @ inputs
        return outputs @ (turned / as_double(self.weights)) @ inputs.transpose(-1, -2)

    def variance(self) -> Tensor:
        return self._variances

    @constant
    def _variances(self) -> Tensor:
        inner = self._output_basis.square() @ self.weights
        return inner @ self._input_basis.square().transpose(-1, -2)

    def whiten(self, jacobians: Tensor) -> Tensor:
        bases = self._output_basis.to(jacobians), self._input_basis.to(jacobians)
        return super().whiten(bases[0].transpose(-1, -2) @ jacobians @ bases[1])

    @constant
    def bases(self) -> tuple[Tensor, Tensor]:
        """``U_A`` and ``U_G`` in the activations' precision."""
        return self._input_basis.to(self.dtype), self._output_basis.to(self.dtype)

    @constant
    def wide_bases(self) -> tuple[Tensor, Tensor]:
        """``U_A`` and ``U_G`` of a layer of one group in float64."""
        return as_double(self._input_basis[0]), as_double(self._output_basis[0])

    @constant
    def square_weights(self) -> Tensor:
        """See `Independent`; of activations that are turned by ``U_A``."""
        return self.bases[1].square() @ self.narrow_weights

    @constant
    def equal_weight(self) -> float | None:
        return None

    @constant
    def terms(self) -> tuple[Tensor, Tensor] | None:
        if len(self.weights) > 1 or self.dtype == torch.float64:
            return None
        return terms_of(self.weights[0], self.dtype)

    def _contracted(
        self, activations: Operand, gradients: Tensor, mode: Mode, double: bool, norms: bool
    ) -> Contracted:
        """Activations and gradients are rotated, many samples at once, since the bases are large and every product
        reads them.
        """
        samples = gradients.shape[0]
        numbers = activations.positions * self.bases[0][..., 0].numel() * gradients.element_size()
        step = samples if mode == "joint" else max(1, _ROTATED_LIMITS * self.limit // numbers)
        parts: list[Contracted] = []
        for start in range(0, samples, step):
            part = slice(start, start + step)
            rotated = Rows(activations.part(part).project(self.bases[0]))
            parts.append(
                super()._contracted(rotated, self._rotated_outputs(gradients[part]), mode, double, norms)
            )
        return joined(parts)

    def _rotated_outputs(self, gradients: Tensor) -> Tensor:
        """Output gradients ``(samples, G, functions, m, T)`` in the basis that the weights are independent in."""
        return rotate_output_gradients(gradients, self.bases[1])

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        squares = torch.einsum("rgi,gia->rga", mean, self.bases[0].to(mean)).square()
        result = torch.einsum("goa,rga->rgo", self.square_weights.to(mean), squares)
        if variance is None:
            return result
        return result + torch.einsum("goi,rgi->rgo", self.marginal.to(mean), variance)

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        inputs, outputs = self.wide_bases
        second = self._second_moments(as_double(mean) @ inputs, None, joint)
        if covariance is not None:
            second = second + torch.einsum("ia,rij,ja->ra", inputs, as_double(covariance), inputs)
        directions = second @ self.wide_columns
        return joined_rows((outputs * directions.unsqueeze(-2)) @ outputs.T, joint)

    def _squares(self, columns: Tensor) -> Tensor:
        return (self.bases[0][0].T @ columns).square_()

    @constant
    def _basis_sums(self) -> Tensor:
        """``U_G^T 1`` of a layer of one group, in the activations' precision."""
        return as_double(self._output_basis[0]).sum(0).to(self.device, self.dtype)

    def output_products(self, activations: Tensor) -> OutputCovariance:
        input_basis, output_basis = (basis[0] for basis in self.bases)
        variances = (activations @ input_basis).square() @ self.narrow_weights[0].T
        return TurnedOutputCovariance(output_basis, self._basis_sums, variances)


class WideKronecker(Kronecker):
    """``(U U_A) diag(1 / P) (U U_A)^T + ((1 - U U^T) U_A) diag(1 / p) (...)^T``, with few orthonormal columns ``U`` of
    the outputs' space: `Kronecker` where all other directions of the outputs have the same precision.

    Args:
        input_basis: ``U_A``, ``(G, n, n)``.
        output_basis: ``U``, ``(G, m, k)``.
        precision: ``P``, ``(G, k, n)``, in float64.
        others: ``p``, of a direction of the outputs orthogonal to ``U``, ``(G, 1, n)``, in float64.
    """

    def __init__(self, input_basis: Tensor, output_basis: Tensor, precision: Tensor, others: Tensor) -> None:
        outputs, kept = output_basis.shape[-2:]
        # output gradients are contracted by their parts along U, and then by what is left of them
        both = torch.cat([precision, others.expand(-1, outputs, -1)], 1)
        super().__init__(input_basis, output_basis, both)
        self._log_determinant = self._log_determinant - kept * log_sum(others)
        self._inside, self._others = (each.reciprocal().to(input_basis) for each in (precision, others))

    draws = Covariance.draws  # its map is no scaling and two products

    def _with_both(self, columns: Tensor, inside: Tensor, others: Tensor) -> Tensor:
        """``U diag(inside) U^T x + diag(others) (x - U U^T x)`` of columns ``(..., G, m, any)``, entry by entry."""
        basis = self._output_basis.to(columns)
        turned = basis.transpose(-1, -2) @ columns
        return others * columns + basis @ ((inside - others) * turned)

    def transform(self, normals: Tensor) -> Tensor:
        scaled = self._with_both(normals, self._inside.sqrt().to(normals), self._others.sqrt().to(normals))
        return scaled @ self._input_basis.transpose(-1, -2).to(normals)

    def times_precision(self, matrices: Tensor) -> Tensor:
        inputs, inside, others = (as_double(t) for t in (self._input_basis, self._inside, self._others))
        turned = self._with_both(matrices @ inputs, inside.reciprocal(), others.reciprocal())
        return turned @ inputs.transpose(-1, -2)

    def whiten(self, jacobians: Tensor) -> Tensor:
        rotated = jacobians @ self._input_basis.to(jacobians)
        roots = self._inside.sqrt().to(jacobians), self._others.sqrt().to(jacobians)
        return self._with_both(rotated, *roots).flatten(1)

    @constant
    def _variances(self) -> Tensor:
        return self._by_outputs(self._inside) @ self._input_basis.square().transpose(-1, -2)

    def _by_outputs(self, weights: Tensor) -> Tensor:
        """Of each output and direction of the inputs, ``(G, m, n)``."""
        shares = self._output_basis.to(weights).square()
        outside = (1 - shares.sum(-1, keepdim=True)).clamp(min=0)
        return shares @ weights + outside * self._others.to(weights)

    @constant
    def square_weights(self) -> Tensor:
        return self._by_outputs(self._inside.to(self.dtype))

    def _rotated_outputs(self, gradients: Tensor) -> Tensor:
        basis = self.bases[1]
        inside = rotate_output_gradients(gradients, basis)
        return torch.cat([inside, gradients - rotate_output_gradients(inside, basis.transpose(-1, -2))], 3)

    # Outputs

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        inputs = as_double(self._input_basis[0])
        second = self._second_moments(as_double(mean) @ inputs, None, joint)
        if covariance is not None:
            second = second + torch.einsum("ia,rij,ja->ra", inputs, as_double(covariance), inputs)
        inside, others = (as_double(each[0]) @ second.unsqueeze(-1) for each in (self._inside, self._others))
        unit = torch.eye(self._output_basis.shape[-2], dtype=second.dtype, device=second.device)
        basis = as_double(self._output_basis[0])
        found = others * unit + (basis * (inside - others).transpose(-1, -2)) @ basis.T
        return joined_rows(found, joint)

    def output_products(self, activations: Tensor) -> OutputCovariance:
        input_basis, output_basis = (basis[0] for basis in self.bases)
        squares = (activations @ input_basis).square()
        inside, others = (squares @ each[0].T.to(squares) for each in (self._inside, self._others))
        return TurnedOutputCovariance(output_basis, self._basis_sums, inside - others, others)


class DenseRows(Covariance):
    """``P = R R^T`` of independent rows, each of one Gaussian: ``R`` is ``(G, m, n, n)``, in float64. Of a block of
    several layers there is one row, ``(1, 1, weights)``.

    Args:
        root: lower triangular.
        like: has the number format of the block.
    """

    def __init__(self, root: Tensor, like: Tensor) -> None:
        self.root, self._like = root, like

    def _as_columns(self, rows: Tensor) -> Tensor:
        """Rows ``(q, G, m, n)``, or of the shape of one layer, as columns ``(G, m, n, q)``."""
        return rows.to(self.root).reshape(len(rows), *self.root.shape[:3]).permute(1, 2, 3, 0)

    def whiten(self, jacobians: Tensor) -> Tensor:
        columns = self._as_columns(jacobians)
        return torch.linalg.solve_triangular(self.root, columns, upper=False).flatten(0, 2).T

    def transform(self, normals: Tensor) -> Tensor:
        roots, columns = self.root.transpose(-1, -2), self._as_columns(normals)
        drawn = torch.linalg.solve_triangular(roots, columns, upper=True)
        return drawn.permute(3, 0, 1, 2).to(normals).reshape(normals.shape)

    def times_precision(self, matrices: Tensor) -> Tensor:
        product = self.root @ (self.root.transpose(-1, -2) @ self._as_columns(matrices))
        return product.permute(3, 0, 1, 2).reshape(matrices.shape)

    def matrices(self) -> Tensor:
        """The covariance of each row, ``(G, m, n, n)``."""
        return torch.cholesky_inverse(self.root)

    def variance(self) -> Tensor:
        return self.matrices().diagonal(dim1=-2, dim2=-1).to(self._like)

    def log_determinant(self) -> Tensor:
        return 2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum()

    def of_layer(self, start: int, shape: tuple[int, int, int], whole: tuple[int, int, int]) -> Covariance:
        matrices = self.matrices()
        if tuple(matrices.shape[:3]) == shape and shape[0] * shape[1] > 1:
            return DenseLayer(matrices)
        groups, outputs, inputs = shape
        stop = start + groups * outputs * inputs
        pairs = matrices[0, 0, start:stop, start:stop]
        pairs = pairs.reshape(groups * outputs, inputs, groups * outputs, inputs).permute(0, 2, 1, 3)
        rows = pairs.diagonal(dim1=0, dim2=1).permute(2, 0, 1).reshape(*shape, inputs)
        return DenseLayer(rows, pairs.contiguous())


def _bilinear(matrices: Tensor, rows: Tensor) -> Tensor:
    """``a^T M a`` of rows ``(r, n)`` and matrices ``(..., n, n)``, ``(r, ...)``; a tracer follows no larger einsum."""
    size = matrices.shape[-1]
    products = (rows @ matrices.movedim(-2, 0).reshape(size, -1)).unflatten(1, (*matrices.shape[:-2], size))
    return (products * rows.reshape(-1, *[1] * (matrices.ndim - 2), size)).sum(-1)


class DenseLayer(Covariance):
    """Explicit covariances of the rows of one layer's weights.

    Args:
        rows: of each row, ``(G, m, n, n)``, in float64.
        pairs: also between rows, ``(G m, G m, n, n)``; None where rows are independent.
    """

    def __init__(self, rows: Tensor, pairs: Tensor | None = None) -> None:
        self.rows, self.pairs = rows, pairs

    def variance(self) -> Tensor:
        return self.rows.diagonal(dim1=-2, dim2=-1)

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        rows = self.rows.to(mean)
        groups = [_bilinear(own, mean[:, group]) for group, own in enumerate(rows)]
        result = torch.stack(groups, 1)
        if variance is None:
            return result
        return result + torch.einsum("goii,rgi->rgo", rows, variance)

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        inputs, pairs = as_double(mean), self.pairs
        if pairs is None:
            rows = self.rows[0]
            if joint:
                diagonal = torch.einsum("oij,si,tj->sto", rows, inputs, inputs)
            else:
                diagonal = _bilinear(rows, inputs)
            if covariance is not None:
                diagonal = diagonal + torch.einsum("oij,rij->ro", rows, as_double(covariance))
            return joined_rows(torch.diag_embed(diagonal), joint)
        if joint:
            return joined_rows(torch.einsum("opij,si,tj->stop", pairs, inputs, inputs), joint)
        found = _bilinear(pairs, inputs)
        if covariance is None:
            return found
        return found + torch.einsum("opij,rij->rop", pairs, as_double(covariance))


def log_sum(values: Tensor) -> Tensor:
    """The sum of logarithms, in float64: the evidence is a small difference of such sums over millions of weights."""
    return as_double(values).log().sum()
