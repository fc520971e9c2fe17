"""The outputs of a linearised network with their covariance, whatever that is computed by, and the closed form that it
has where the layer with a posterior gives the outputs: the inputs of this layer are all that it takes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double, without_autocast
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import owners
from posthoc_uq.curvature.features import grid_of
from posthoc_uq.heads.jacobians import Pulled, WeightCovariance, check_shape
from posthoc_uq.layers.capture import Capture, WatchedLayer, is_plain
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import Rows
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.draws import LogitCovariance, OutputCovariance, OutputGaussian, of_product
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.prediction import at_least_float32
from posthoc_uq.posteriors.covariance import Covariance, Mode

ALL_OUTPUTS = 20  # up to which `outputs="auto"` takes all of them
TOP = 10  # classes that "topk" takes
ONE_POSITION = Layout(class_dim=-1)
"""The layout of outputs ``(samples, outputs)``."""
_COVARIANCE_CLASSES = 50  # up to which the link gets a covariance of all
_COVARIANCE_HEADS = 256  # the same of several heads, which have no other form
_MAX_SPREAD = 2**18  # logits whose covariance is reduced to its leading directions at once
_MAX_ROW_BYTES = 2**24  # of the temporaries of rows that are computed at once
_COMPARED_POSITIONS = 256  # positions at which a layer's outputs are compared with the model's
_OPENED = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RNNBase
"""Modules that a watched pass opens up, and that round otherwise in a plain one."""


@dataclass(frozen=True)
class ChosenOutputs:
    """The outputs that are used.

    Attributes:
        likelihood: which says whether they are logits of several classes, and where they have positions.
        link: the name of the link from Gaussian logits to probabilities.
        top: ``"all"``, ``"auto"``, or a number of classes.
        positions: those that are used, from `checked_positions`.
    """

    likelihood: Likelihood
    link: str
    top: int | str
    positions: Tensor | None = None

    def layout(self, outputs: Tensor, samples: int) -> Layout:
        """Where a model's outputs have their classes and positions.

        Raises:
            PosthocUQError: the outputs do not fit the likelihood's layout, or have more dimensions than one without
                takes; or positions were asked for, and there are none.
        """
        layout = self.likelihood.positions_of(outputs)
        if layout is not None:
            layout.check(outputs)
            return layout
        check_shape(outputs, samples)
        if self.positions is not None:
            raise PosthocUQError(
                f"positions= picks positions of outputs that have some, such as pixels or tokens, and these outputs "
                f"are of shape {tuple(outputs.shape)}; leave it out."
            )
        return ONE_POSITION

    def number(self, size: int) -> int | None:
        """How many of `size` outputs are used, or None for all."""
        if self.top == "all":
            return None
        if isinstance(self.top, int):
            return None if self.top >= size else self.top
        return TOP if size > ALL_OUTPUTS and self.likelihood.softmax else None

    def indices(self, rows: Tensor) -> Tensor | None:
        """The outputs used of each row, ``(rows, k)``, the largest first; or None for all."""
        used = self.number(rows.shape[1])
        return None if used is None else rows.topk(used).indices

    def wants_covariance(self, size: int, many_rows: bool) -> bool:
        """Whether the link gets the full covariance of `size` outputs. Of many rows, such as an image's pixels, it
        would be large, and only the bridge cannot do without.
        """
        most = _COVARIANCE_HEADS if self.likelihood.head_likelihoods else _COVARIANCE_CLASSES
        fits = self.likelihood.joint and size <= most and self.number(size) is None
        return fits and (not many_rows or self.link == "bridge")

    @property
    def wants_spread(self) -> bool:
        """Whether the link can use a `LogitCovariance`: an approximate covariance of many classes."""
        return self.likelihood.softmax and self.link != "bridge"


def checked_outputs(outputs: str | int) -> int | str:
    """``"all"``, ``"auto"``, or a number of classes.

    Raises:
        PosthocUQError: `outputs` is none of these.
    """
    if outputs in ("all", "auto"):
        return str(outputs)
    number: Any = TOP if outputs == "topk" else outputs
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PosthocUQError(
            f"outputs must be 'auto', 'all', 'topk' or a positive number of classes, not {outputs!r}."
        )
    return number


Positions = int | Sequence[int] | Tensor | None


def checked_positions(positions: Any) -> Tensor | None:
    """Positions as a tensor: booleans ``(*positions)``, or whole numbers ``(k,)`` or ``(k, dimensions)``.

    Raises:
        PosthocUQError: they are none of these.
    """
    if positions is None:
        return None
    try:
        tensor = torch.as_tensor(positions, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros((), device="cpu")
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        raise PosthocUQError(
            f"positions must be a whole number, several of them, a tensor of indices (k, dimensions) or a mask of "
            f"booleans, and not empty; not {positions!r:.100}."
        )
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bool else torch.atleast_1d(tensor.long())


def picked_positions(chosen: Tensor, positions: tuple[int, ...]) -> Tensor:
    """The chosen positions as indices into a sample's rows, ``(k,)``.

    Args:
        chosen: from `checked_positions`.
        positions: the sizes of the dimensions that count positions.

    Raises:
        PosthocUQError: there are no such positions.
    """
    numbers = torch.arange(prod(positions), device="cpu")
    if chosen.dtype == torch.bool:
        if tuple(chosen.shape) != positions:
            raise PosthocUQError(
                f"positions is a mask of shape {tuple(chosen.shape)}, and the outputs have the positions {positions}."
            )
        if not bool(chosen.any()):
            raise PosthocUQError("positions is a mask of no position; make at least one true.")
        return numbers[chosen.flatten()]
    if chosen.ndim > 1 and chosen.shape[1:] != (len(positions),):
        raise PosthocUQError(
            f"positions has {chosen.shape[-1]} numbers each, and the outputs have the positions {positions}."
        )
    try:
        return numbers[chosen] if chosen.ndim == 1 else numbers.reshape(positions)[tuple(chosen.T)]
    except IndexError as error:
        raise PosthocUQError(
            f"positions go beyond the outputs, which have the positions {positions}: {error}."
        ) from error


class LinearizedOutputs(ABC):
    """The outputs of a batch as rows, one for each sample and position, and the covariance of every row. Outputs
    without positions (pixels, tokens) are those of one position.

    Attributes:
        mean: the outputs used, in the shape of the model's, the positions that were picked as one dimension.
        sizes: of the dimensions that count the model's positions.
        picked: the positions used, ``(k,)``, or None for all.
        watched: the calls of the layers by whose inputs novelty is measured, where the pass recorded them.
        features: these inputs as rows, ``(samples, n)``, where they are known so.
    """

    features: Tensor | None = None
    rows_may_be_many: ClassVar[bool] = True
    """Whether there may be too many rows for a matrix each."""

    def __init__(
        self,
        chosen: ChosenOutputs,
        layout: Layout,
        outputs: Tensor,
        samples: int,
        watched: Sequence[Call] = (),
    ) -> None:
        """
        Args:
            chosen: the outputs that are used.
            layout: of the outputs.
            outputs: of the model.
            samples: in the batch.
            watched: see above.
        """
        self.watched, self._single = watched, outputs.ndim == 1
        outputs = outputs.unsqueeze(1) if self._single else outputs
        self._chosen, self._samples, self._layout = chosen, samples, layout
        self.sizes, self.picked = layout.positions(outputs), None
        if chosen.positions is not None:
            self.picked = picked_positions(chosen.positions, self.sizes)
        self._by_position = bool(self.sizes) or self.picked is not None
        self._rows = self._used(layout.rows(outputs)) if self._by_position else outputs
        self.mean = self._whole(self._rows)

    @cached_property
    def _places(self) -> Tensor:
        """The positions used, as indices into a sample's rows."""
        return torch.arange(prod(self.sizes), device="cpu") if self.picked is None else self.picked

    def _used(self, rows: Tensor) -> Tensor:
        """Of rows of all positions, ``(samples * positions, ...)``, those of the positions that are used."""
        if self.picked is None:
            return rows
        chosen = rows.reshape(self._samples, -1, rows.shape[-1])[:, self.picked.to(rows.device)]
        return chosen.flatten(0, 1)

    def _whole(self, rows: Tensor) -> Tensor:
        """Rows in the shape of `mean`."""
        if self._by_position:
            return self._layout.whole(rows, self.sizes if self.picked is None else (len(self.picked),))
        return rows.squeeze(1) if self._single else rows

    # What an engine gives, at all rows

    @abstractmethod
    def row_variances(self) -> Tensor:
        """Of every output, ``(rows, classes)``."""

    @abstractmethod
    def _covariances(self, indices: Tensor | None) -> Tensor:
        """``(rows, k, k)``, of all classes or of those at `indices`, ``(rows, k)``."""

    @abstractmethod
    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        """``(rows * k, rows * k)``."""

    @abstractmethod
    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        """Variances, and what a link can use of a covariance of many classes."""

    # What follows from it. Only the model itself runs under the caller's autocast.

    def gaussian(self) -> OutputGaussian:
        """Mean, variance, and as much of the covariance as the link can use."""
        with without_autocast(self.mean.device.type):
            covariance: Tensor | LogitCovariance | None = None
            many_rows = bool(self.sizes) and self.rows_may_be_many
            if self._chosen.wants_covariance(self._rows.shape[1], many_rows):
                covariance = self._covariances(None)
                variance = covariance.diagonal(dim1=1, dim2=2)
            elif self._chosen.wants_spread:
                variance, covariance = self._spread()
            else:
                variance = self.row_variances()
            return OutputGaussian(self.mean, self._whole(variance), covariance)

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        with without_autocast(self.mean.device.type):
            return self._whole(self.row_variances())

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        with without_autocast(self.mean.device.type):
            indices = self._chosen.indices(self._rows)
            if joint:
                return self._joint_covariance(indices)
            found = self._covariances(indices)
            return found.unflatten(0, (self._samples, len(self._places))) if self.sizes else found


def spread_of(
    mean: Tensor, variance: Tensor, covariance: Callable[[slice], OutputCovariance]
) -> LogitCovariance:
    """`of_product` for a few rows at a time: products with a covariance of many classes are large.

    Args:
        mean: ``(rows, classes)``.
        variance: of the same shape.
        covariance: of some rows.
    """
    if torch.compiler.is_compiling():
        return of_product(mean.to(variance), variance, covariance(slice(None)))
    step = max(1, _MAX_SPREAD // mean.shape[1])
    slices = [slice(start, start + step) for start in range(0, len(mean), step)]
    parts = [of_product(mean[part].to(variance), variance[part], covariance(part)) for part in slices]
    return LogitCovariance.cat(parts)


class CaughtCall(NamedTuple):
    """A call of the last layer.

    Attributes:
        call: with its input.
        output: what it returned.
        writes: how often output and input were written then, which torch counts; None where it does not, or where other
            hooks saw the call.
    """

    call: Call
    output: Tensor
    writes: tuple[int, int] | None

    def returned(self, outputs: Tensor) -> bool:
        """Whether these are the very tensor that it returned, and neither this nor its input were written since."""
        now = self.output, self.call.input
        return outputs is self.output and self.writes == tuple(tensor._version for tensor in now)


class LastLayer:
    """The layer whose outputs may be the model's, as the dry run found it.

    Where it is a plain module, its input is caught by a hook on this module of a copy of the network, in a pass that
    nothing else watches; several threads can run it at once. Elsewhere it is in what a `Capture` records. The hook
    catches the output, too: once numbers have shown that a model returns it, the very tensor is looked for.

    Attributes:
        layer: the layer.
        hooked: whether its input is caught so.
    """

    def __init__(self, capture: Capture, name: str) -> None:
        """
        Args:
            capture: of the network; passes run its copy.
            name: of the layer.
        """
        tracked, network, watched = capture.tracked[name], capture.twin, capture.watched
        self.layer, self._rule, self._network = tracked.layer, tracked.layer.rule, network
        self._batch_axis, self._geometry = tracked.batch_axis, tracked.geometry
        self._changed_later = tracked.keep_input
        self._of_novelty = any(watch.layer == tracked.layer for watch in watched)
        self._weight = network.get_parameter(self.layer.weight)
        self._matrix = self._rule.to_matrix(self._weight, self.layer.groups)[0]
        self._bias = None if self.layer.bias is None else network.get_parameter(self.layer.bias)
        self._local, self._compared = threading.local(), False
        module = network.get_submodule(tracked.holders[0][0]) if len(tracked.holders) == 1 else None
        others = [
            (self._alone(watch.layer), watch) for watch in watched if watch.layer.weight != self.layer.weight
        ]
        self.hooked = (
            module is not None
            and tracked.uses == 1
            and len(others) == max(0, len(watched) - 1)
            and self._is_plain(module)
            and all(other is not None for other, _ in others)
        )
        if self.hooked and module is not None:
            module.register_forward_hook(self._catch)
            for other, watch in others:
                cast(nn.Module, other).register_forward_pre_hook(
                    partial(self._watch, watch), with_kwargs=True
                )

    @staticmethod
    def of(capture: Capture) -> LastLayer | None:
        """Of the layers of a capture the last one whose outputs may be the model's, as far as gradients say."""
        ends = [name for name, tracked in capture.tracked.items() if tracked.ends]
        return LastLayer(capture, ends[-1]) if ends else None

    def _alone(self, layer: Layer) -> nn.Module | None:
        """The plain module that alone holds a layer's weight, and whose calls are all its uses; None elsewhere."""
        weight = self._network.get_parameter(layer.weight)
        holders = owners(self._network)[id(weight)]
        module = holders[0][2]
        own = dict(module.named_parameters(recurse=False)).get("weight")
        return module if len(holders) == 1 and own is weight and is_plain(module) else None

    def _watch(
        self, watch: WatchedLayer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        calls: list[Call] | None = getattr(self._local, "watched", None)
        if calls is not None:
            given = (*args, *kwargs.values())
            calls.extend(watch.call(x, self._geometry, self._local.mask) for x in given)

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether calls of the module are all uses of the layer, and a pass that is not watched gives the same."""
        own = dict(module.named_parameters(recurse=False))
        if not is_plain(module) or own.get("weight") is not self._weight or own.get("bias") is not self._bias:
            return False
        return not any(isinstance(m, _OPENED) for m in self._network.modules())

    def _catch(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        caught: list[CaughtCall] | None = getattr(self._local, "caught", None)
        if caught is not None:
            hooks: Any = nn.modules.module
            alone = len(vars(module)["_forward_hooks"]) == 1 and not hooks._global_forward_hooks
            for value in args:
                kept = value.detach().clone() if self._changed_later else value.detach()
                counted = alone and not (output.is_inference() or kept.is_inference())
                writes = (output._version, kept._version) if counted else None
                caught.append(CaughtCall(Call(self.layer, kept, self._geometry), output, writes))

    def run(self, batch: Batch) -> tuple[Tensor, list[Call], list[Call], bool]:
        """The network's outputs for a batch; the calls of the layer, where it is `hooked`, and those of the stages that
        are watched; and whether the outputs are what one of the first returned, which nothing wrote to afterwards.
        """
        local = self._local
        local.caught, local.watched, local.mask = list[CaughtCall](), list[Call](), batch.attention_mask
        caught, watched = local.caught, local.watched
        try:
            with torch.enable_grad():  # a model may differentiate on its way
                outputs = batch.copied().call(self._network)
        finally:
            local.caught = local.watched = local.mask = None
        own = any(call.writes is not None and call.returned(outputs) for call in caught)
        return outputs.detach(), [call.call for call in caught], watched, own

    def outputs(
        self,
        chosen: ChosenOutputs,
        outputs: Tensor,
        calls: Sequence[Call],
        samples: int,
        weights: WeightCovariance,
        watched: Sequence[Call],
        own: bool = False,
    ) -> LastLayerOutputs | None:
        """The outputs of a pass with their covariance, if they are those of the layer; else None. Where they are not
        known to be, numbers decide, as they do the first time: ``W a`` is recomputed from the layer's input and
        compared.

        With positions it is a linear layer, or a pointwise convolution, on the grid of the outputs.

        Args:
            chosen: the outputs that are used.
            outputs: of the network.
            calls: of the layer.
            samples: in the batch.
            weights: the covariance of all weights.
            watched: see `LinearizedOutputs`.
            own: whether they are the tensor that the layer returned.
        """
        layer, layout = self.layer, chosen.layout(outputs, samples)
        whole = outputs.unsqueeze(1) if outputs.ndim == 1 else outputs
        positions = layout.positions(whole)
        compared = layout.rows(whole) if positions else whole
        if len(calls) != 1 or layer.groups != 1 or layer.outputs != compared.shape[1]:
            return None
        if self._batch_axis != 0 or calls[0].input.shape[:1] != (samples,):
            return None
        if positions and not (layer.pointwise and grid_of(calls[0]) == positions):
            return None
        x = calls[0].input
        if not self._rule.convolutional:
            x = self._rule.features(x)
            x = x.reshape(samples, -1, x.shape[-1])
        activations = self._rule.activations(x.to(weights.dtype), layer, calls[0].geometry)
        if activations.positions != prod(positions):
            return None
        rows = activations.rows().flatten(0, 2)
        if not (own and self._compared):
            step = max(1, len(rows) // max(samples, _COMPARED_POSITIONS))
            with without_autocast(rows.device.type):
                if not self._gives(rows[::step], compared[::step]):
                    return None
            self._compared = own
        found = LastLayerOutputs(chosen, layout, outputs, samples, layer, rows, weights, watched=watched)
        if self._of_novelty and not positions and at_least_float32(x).dtype == rows.dtype:
            found.features = rows
        return found

    def _gives(self, rows: Tensor, outputs: Tensor) -> bool:
        """Whether the layer makes these outputs ``(rows, m)`` of activations ``(rows, n)``."""
        matrix, bias = self._matrix.to(rows), None if self._bias is None else self._bias.to(rows)
        recomputed = F.linear(rows if bias is None else rows[:, :-1], matrix, bias)
        narrow = torch.finfo(outputs.dtype).eps > 1e-5  # half precision rounds what it multiplies
        scale = recomputed.abs().amax().clamp(min=torch.finfo(rows.dtype).tiny)
        difference = (recomputed - outputs.to(rows.dtype)).abs().amax()
        return bool(difference <= (2e-2 if narrow else 1e-5) * scale)


class LastLayerOutputs(LinearizedOutputs):
    """The outputs of one batch by the closed form of the last layer alone, in functions that a tracer follows."""

    def __init__(
        self,
        chosen: ChosenOutputs,
        layout: Layout,
        outputs: Tensor,
        samples: int,
        layer: Layer,
        rows: Tensor,
        weights: WeightCovariance,
        *,
        covariance: Covariance | None = None,
        watched: Sequence[Call] = (),
    ) -> None:
        """
        Args:
            chosen: see `LinearizedOutputs`, as what follows.
            layout: of the outputs.
            outputs: of the model.
            samples: in the batch.
            layer: the last one.
            rows: its activations at all positions, ``(rows, n)``.
            weights: the covariance of all weights.
            covariance: of the layer's weights; by default what `weights` has.
            watched: calls.
        """
        super().__init__(chosen, layout, outputs, samples, watched)
        self._layer, self._activations = layer, self._used(rows) if self._by_position else rows
        self._weights = weights
        self._covariance = weights.of_layer(layer.name) if covariance is None else covariance

    def _result(self, computed: Tensor) -> Tensor:
        """On the device and in the number format of results."""
        return computed.to(self.mean.device, self._activations.dtype)

    def _parts(self) -> Sequence[Tensor]:
        """The activations, a few rows at a time."""
        rows, classes = self._activations, self._rows.shape[1]
        if torch.compiler.is_compiling():  # the number of rows is a symbol
            return (rows,)
        step = max(1, min(_MAX_ROW_BYTES, self._weights.limit) // (8 * classes * (4 + rows.shape[1])))
        return rows.split(step) if step < len(rows) else (rows,)

    def row_variances(self) -> Tensor:
        """Of the outputs by the layer's own weights, ``(rows, classes)``."""
        if torch.compiler.is_compiling():
            found = self._covariance.output_variance(as_double(self._activations).unsqueeze(1)).squeeze(1)
        else:
            found = self._covariance.variances_of(self._activations)
        return self._result(found.clamp(min=0))

    def centred_variances(self, variance: Tensor) -> Tensor:
        """Of the outputs less their mean, for outputs of these variances."""
        classes = variance.shape[1]
        sums: list[Tensor] = []
        for part in self._parts():
            like = part.new_empty(part.shape[0], classes)
            sums.append(self._covariance.output_products(part).with_sum(like))
        means = self._result(torch.cat(sums)) / classes
        return (variance - 2 * means + means.mean(1, keepdim=True)).clamp(min=0)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        if indices is not None:
            return self._of_classes(indices, "covariance")
        found = list[Tensor]()
        for part in self._parts():
            found.append(self._result(self._covariance.output_covariance(part)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        if indices is not None:
            return self._of_classes(indices, "joint")
        return self._result(self._covariance.output_covariance(self._activations, joint=True))

    def _of_classes(self, indices: Tensor, mode: Mode) -> Tensor:
        """Of the classes at `indices` alone: a class's gradient at the layer's outputs is a unit vector."""
        units = F.one_hot(indices, self._rows.shape[1]).to(self._activations)
        gradients = units[:, None, :, :, None]
        pulled = Pulled(self._layer, Rows(self._activations[:, None, None]), lambda: gradients)
        return self._result(self._weights.contract([pulled], len(indices), indices.shape[1], mode))

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        variance = self.row_variances()
        classes = variance.shape[1]
        if self._chosen.link == "probit":  # which takes the variances of the centred logits alone
            centred = self.centred_variances(variance)
            # as of independent logits; two classes go by their difference
            factor = 4.0 if classes == 2 else classes / (classes - 1)
            return variance, LogitCovariance(centred.new_zeros(*centred.shape, 0), centred * factor)
        products = self._covariance.output_products
        return variance, spread_of(self._rows, variance, lambda part: products(self._activations[part]))
