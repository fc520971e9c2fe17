"""Batches of every accepted form as inputs and targets on the device.

A loader is anything that can be iterated: a `DataLoader`, a list of batches, an iterable dataset's loader. A batch is a
tensor of inputs, ``(inputs, targets)``, all arguments that the model needs and then the targets, a mapping (targets
under one of `TARGET_NAMES`, beside one tensor or the model's named arguments), or any form that `batch_to_inputs` and
`batch_to_targets` take apart. NumPy arrays and pandas
frames become tensors: inputs of floating-point numbers get the model's number type, all others keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter, signature
from itertools import chain
from operator import length_hint
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from posthoc_uq.core import interrupts, steady
from posthoc_uq.core.devices import to_device_async
from posthoc_uq.core.distributed import rank, sampler_of
from posthoc_uq.core.errors import PosthocUQError, UnsupportedLayerError, out_of_memory, warn_user
from posthoc_uq.core.graphs import (
    arguments_of_graph,
    changed_graph,
    is_graph,
    single_graphs,
    tensors_of_graph,
)
from posthoc_uq.core.model import model_device, model_dtype, unwrap
from posthoc_uq.core.options import Natural, Options, laplace_names
from posthoc_uq.core.outputs import (
    Output,
    OutputChoice,
    chosen_in,
    form_of,
    joined_targets,
    output_tensor,
    parts_by_name,
)
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, present_state, sample_keys
from posthoc_uq.core.records import Record, among


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, or a pandas frame or series."""
    return isinstance(value, np.ndarray) or (hasattr(value, "to_numpy") and hasattr(value, "shape"))


def with_tensors(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with arrays turned into tensors, those of floating-point numbers of type `dtype`, also inside of a
    tuple or a mapping.
    """
    if isinstance(inputs, Mapping):
        return {name: with_tensors(value, dtype) for name, value in cast(Mapping[str, Any], inputs).items()}
    if isinstance(inputs, tuple):
        return tuple(with_tensors(value, dtype) for value in cast(tuple[Any, ...], inputs))
    if not is_array(inputs):
        return inputs
    tensor = tensor_of(inputs)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tensor_of(array: Any) -> Tensor:
    """The array as a tensor; a copy, since torch can only share memory that it may write to."""
    numbers = np.asarray(array)
    try:
        return torch.tensor(numbers, device="cpu").contiguous()
    except (TypeError, ValueError) as error:
        raise PosthocUQError(
            f"The loader yields a {type(array).__name__} of {numbers.dtype} {numbers.shape}, which torch has no type "
            f"for; make all of it numbers, such as array.astype('float32')."
        ) from error


BatchFunction = Callable[[Any], Any]
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
WITH_TARGETS = (
    f"yield (inputs, targets), or a mapping with the targets under one of {list(TARGET_NAMES)}; batch_to_targets= "
    f"takes them out of any other batch."
)


@dataclass
class Batch:
    """One batch on the device: arguments of the model, and targets where the loader gave them.

    Attributes:
        args: of the model, by place.
        targets: of the samples.
        kwargs: of the model, by name.
        weights: of the samples, or of their positions; float64 on the CPU, finite and not negative.
        whole: whether the inputs are one sample in a form that is not cut: a graph, or a list of one tensor.
    """

    args: tuple[Any, ...]
    targets: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    weights: Tensor | None = None
    whole: bool = False

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the inputs; of a whole sample those inside of other values, too, each as one row."""
        values = [*self.args, *map(self.kwargs.__getitem__, sorted(self.kwargs))]
        if not self.whole:
            return [value for value in values if isinstance(value, Tensor)]
        parts = [tensors_of_graph(leaf) if is_graph(leaf) else [leaf] for leaf in tree_leaves(values)]
        return [tensor.unsqueeze(0) for part in parts for tensor in part if isinstance(tensor, Tensor)]

    @property
    def rows(self) -> int | None:
        """Of the first tensor among the inputs that has any: its samples. 0 where none has any, None without a tensor
        that could.
        """
        sizes = [tensor.shape[0] for tensor in self.tensors if tensor.ndim > 0]
        return next(filter(None, sizes), 0 if sizes else None)

    @property
    def attention_mask(self) -> Tensor | None:
        """The mask of tokens that the model is called with, of its decoder where it has one; None without."""
        if not self.kwargs:
            return None
        decodes = any(name.startswith("decoder_") for name in self.kwargs)
        mask = self.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
        return mask if isinstance(mask, Tensor) else None

    def call(self, model: nn.Module) -> Tensor:
        """The model's output tensor ``(samples, ...)``.

        Raises:
            PosthocUQError: the model gives something that holds no tensor of outputs.
        """
        return self.outputs_of(model(*self.args, **self.kwargs))

    def outputs_of(self, returned: Any) -> Tensor:
        """The output tensor ``(samples, ...)`` in what a model returned; the rows of a whole sample, such as the nodes
        of a graph, are its positions.
        """
        plain = isinstance(returned, Tensor) and returned.is_floating_point()
        outputs = returned if plain else output_tensor(returned)
        return _of_whole(outputs) if self.whole else outputs

    def call_any(self, model: Callable[..., Any]) -> Any:
        """The model's return value as it is."""
        return model(*self.args, **self.kwargs)

    def form(self) -> Any:
        """All that a model's way may depend on beside the numbers in its inputs and its own: their shapes, types and
        devices, plain values, and autocast. A dictionary's key.
        """
        values, kinds = list[Any](), set[str]()
        for place, leaf in enumerate(tree_leaves((self.args, self.kwargs))):
            if isinstance(leaf, Tensor):
                values.append((place, tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))
                kinds.add(leaf.device.type)
            elif isinstance(leaf, (bool, int, float, str)):
                values.append((place, leaf))
        for kind in sorted(kinds or {"cpu"}):
            values.append((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None))
        return tuple(values)

    def _with_inputs(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with all tensors of its inputs changed; targets and weights stay as they are."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if self.whole and is_graph(value):
                return changed_graph(value, change)
            return value

        def within(argument: Any) -> Any:
            return change(argument) if isinstance(argument, Tensor) else tree_map(changed, argument)

        kwargs = {name: within(argument) for name, argument in self.kwargs.items()}
        return Batch(tuple(map(within, self.args)), self.targets, kwargs, self.weights, self.whole)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its inputs on `device`."""
        return self._with_inputs(lambda tensor: tensor.to(device))

    def fresh(self) -> Batch:
        """A copy for one run, with its graph, since a model may change its inputs in place."""
        return self._with_inputs(torch.clone)

    def copied(self) -> Batch:
        """`fresh`, outside of any graph."""
        return self._with_inputs(lambda tensor: tensor.detach().clone())

    def differentiable(self) -> Batch:
        """`copied`, with inputs of floating-point numbers that are part of a new graph and no leaves of it, since a
        model may change them in place.
        """

        def begun(tensor: Tensor) -> Tensor:
            own = tensor.detach().clone()
            return own.requires_grad_().clone() if own.is_floating_point() else own

        return self._with_inputs(begun)

    def kept(self) -> Batch:
        """A copy of all that it holds, for whoever looks at it after the next batch was read: a loader may fill the
        same tensors, or arrays, again.
        """
        targets = None if self.targets is None else self.targets.clone()
        weights = None if self.weights is None else self.weights.clone()
        return replace(self.copied(), targets=targets, weights=weights)

    def narrow(self, start: int, length: int, samples: int) -> Batch:
        """The samples ``start`` to ``start + length`` of a batch of `samples`."""
        return self._rows(slice(start, start + length), samples)

    def select(self, picked: Tensor, samples: int) -> Batch:
        """The samples where `picked` ``(samples,)`` is true."""
        return self._rows(picked, samples)

    def repeated(self, times: int) -> Batch:
        """A batch of one sample as a batch of that sample so many times."""
        return self._rows(torch.zeros(times, dtype=torch.long, device="cpu"), 1)

    def _rows(self, index: slice | Tensor, samples: int) -> Batch:
        if self.whole:
            return self if bool(torch.ones(1, device="cpu")[index].any()) else _NOTHING

        def cut(value: Any) -> Any:
            if not holds_samples(value, samples):
                return value
            return value[index.to(value.device) if isinstance(index, Tensor) else index]

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return Batch(tuple(map(cut, self.args)), cut(self.targets), kwargs, cut(self.weights))


INPUT_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}
"""The number types of inputs that a file names."""


class InputRecord(Record):
    """One input of the model.

    Attributes:
        type: of its numbers.
        place: where it is given by that, and not by its name.
    """

    type: Annotated[str, among(INPUT_TYPES)]
    place: Natural | None = None


def described_inputs(batch: Batch, names: Sequence[str] | None) -> dict[str, InputRecord]:
    """What a model's inputs are, by the names of its arguments (`names`, where they are known), or else by their
    places. Inputs without a row a sample are left out, and all of a sample that is not cut.
    """
    described: dict[str, InputRecord] = {}
    for key, value in [] if batch.whole else [*enumerate(batch.args), *batch.kwargs.items()]:
        kind = str(value.dtype).removeprefix("torch.") if holds_samples(value, batch.rows or 0) else ""
        if kind in INPUT_TYPES:
            place = key if isinstance(key, int) else None
            name = names[key] if isinstance(key, int) and names and key < len(names) else str(key)
            described[name] = InputRecord(type=kind, place=place)
    return described


_NOTHING = Batch((torch.empty(0, device="cpu"),))


def _of_whole(rows: Tensor) -> Tensor:
    """What belongs to one whole sample, ``(1, ...)``: several rows are those of its positions."""
    return rows if rows.ndim > 0 and rows.shape[0] == 1 else rows.unsqueeze(0)


def check_dense(inputs: Any) -> None:
    """Refuse inputs that cannot be cut into samples.

    Raises:
        PosthocUQError: a tensor is sparse or nested.
    """
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            kind, way_out = "sparse", "x.to_dense(), and let the model make it sparse"
            if value.is_nested:
                kind, way_out = "nested", "torch.nested.to_padded_tensor(x, 0.0), with a mask of what counts"
            raise PosthocUQError(
                f"An input is a {kind} tensor ({value.layout}), which is not cut into samples here; pass a dense one, "
                f"{way_out}."
            )


def holds_samples(value: Any, samples: int) -> bool:
    """Whether a value is a tensor with a row a sample, and not one that all samples share."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == samples


@dataclass(frozen=True)
class BatchReader(Options):
    """Takes batches apart and moves them to a device.

    Attributes:
        device: of the model.
        batch_to_inputs: from a batch to the model's inputs.
        batch_to_targets: from a batch to its targets.
        batch_to_weights: from a batch to the weights of its samples.
        dtype: of the model, which arrays of floating-point numbers among the inputs become; tensors keep theirs.
        names: of the model's arguments; None where it takes any, or they are not known.
        needed: of them, those without a default.
        output: the name of the part of what the model returns that its outputs are, by which targets are found, too.
        heads: the names of several heads, each with targets of its own.
        decoder_inputs: from labels to the inputs of the model's decoder; None where it has none.
        skips_missing: whether samples whose targets are all NaN are left out.
    """

    device: torch.device
    batch_to_inputs: BatchFunction | None = None
    batch_to_targets: BatchFunction | None = None
    batch_to_weights: BatchFunction | None = None
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] | None = None
    needed: tuple[str, ...] = ()
    output: str | None = None
    decoder_inputs: BatchFunction | None = None
    skips_missing: bool = False
    heads: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch_to_inputs: BatchFunction | None = None,
        batch_to_targets: BatchFunction | None = None,
        batch_to_weights: BatchFunction | None = None,
        *,
        device: torch.device | None = None,
        output: Output | OutputChoice | None = None,
        skips_missing: bool = False,
    ) -> BatchReader:
        """A reader for a model: with its device, unless another is given, its number type, its arguments, and the
        choice of its outputs, unless another is given.
        """
        functions = batch_to_inputs, batch_to_targets, batch_to_weights
        place = model_device(model) if device is None else device
        decoder_inputs = None
        if getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False):
            decoder_inputs = getattr(unwrap(model), "prepare_decoder_input_ids_from_labels", None)
        choice = chosen_in(model) or (output if isinstance(output, OutputChoice) else None)
        part = output if choice is None else choice.part
        arguments, needed = arguments_of(model), list[str]()
        for name, argument in (arguments or {}).items():
            if argument.default is Parameter.empty and argument.kind is not Parameter.VAR_POSITIONAL:
                needed.append(name)
        return cls(
            place,
            *functions,
            model_dtype(model),
            None if arguments is None else tuple(arguments),
            tuple(needed),
            part if isinstance(part, str) else None,
            decoder_inputs,
            skips_missing,
            () if choice is None else tuple(choice.heads or ()),
        )

    def read_all(self, batch: Any) -> list[Batch]:
        """What a loader yields as batches on the device: one, or as many as there are samples in a form that is not
        cut, graphs or a list of tensors. A `Batch` stays as it is.

        Raises:
            PosthocUQError: the batch has a form that needs `batch_to_inputs`, or its weights are none.
        """
        if isinstance(batch, Batch):
            return [batch]
        pair = type(batch) in (tuple, list) and len(batch) == 2
        taken_apart = self.batch_to_inputs or self.batch_to_targets or self.batch_to_weights
        if pair and not taken_apart and _is_plain(batch[0]) and _is_plain(batch[1]):
            inputs, targets = to_device_async(batch[0], self.device), to_device_async(batch[1], self.device)
            return [Batch((inputs,), targets)]  # as nearly every loader gives it
        graphs: Any = batch[0] if pair else batch
        if not is_graph(graphs):
            return _of_list(self.read(batch))
        singles = list(single_graphs(graphs))
        if pair and len(batch[1]) != len(singles):
            raise PosthocUQError(
                f"The loader yields {len(singles)} graphs with targets of {len(batch[1])} rows; give one row a graph, "
                f"or put the targets into the graphs, as y."
            )
        parts = [(one, batch[1][i : i + 1]) for i, one in enumerate(singles)] if pair else singles
        return [self.read(part, whole=True) for part in parts]

    def read(self, batch: Any, whole: bool = False) -> Batch:
        """A `Batch` on the device.

        Args:
            batch: what a loader yields.
            whole: as in `Batch`.

        Raises:
            PosthocUQError: the batch has a form that needs `batch_to_inputs`, or its weights are none.
        """
        inputs, targets = self._split(batch)
        _check_not_packed(inputs)
        if self.batch_to_inputs is None and whole:
            inputs = arguments_of_graph(inputs, self.names)
        elif self.batch_to_inputs is None:
            inputs = with_tensors(inputs, self.dtype)
        if self.batch_to_targets is not None:
            targets = self.batch_to_targets(batch)
        if self.heads:
            targets = self._targets_of_heads(targets)
        elif isinstance(targets, Mapping):
            targets = self._target_of(cast(Mapping[str, Any], targets))
        targets = None if targets is None else as_targets(targets)
        weights = None if self.batch_to_weights is None else checked_weights(self.batch_to_weights(batch))
        lacking = isinstance(inputs, Mapping) and not _DECODER_NAMES & set(cast(Mapping[str, Any], inputs))
        if lacking and self.decoder_inputs is not None and targets is not None:
            inputs = {**inputs, "decoder_input_ids": self.decoder_inputs(targets)}
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            kwargs = {str(k): self._move(v) for k, v in cast(Mapping[str, Any], inputs).items()}
        elif isinstance(inputs, tuple):
            args = tuple(self._move(v) for v in cast(tuple[Any, ...], inputs))
        else:
            args = (self._move(inputs),)
        targets = None if targets is None else self._move(targets)
        if whole:
            targets = None if targets is None else _of_whole(targets)
            weights = None if weights is None else _of_whole(weights)
        if not whole:
            check_dense((args, kwargs))
        return Batch(args, targets, kwargs, weights, whole)

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if self.batch_to_inputs is not None:
            inputs = self.batch_to_inputs(batch)
            pair = isinstance(batch, (tuple, list)) and len(cast(Sequence[Any], batch)) == 2
            return inputs, (batch[1] if pair and self.batch_to_targets is None else None)
        if isinstance(batch, Tensor) or is_array(batch):
            return batch, None
        if is_graph(batch):
            return batch, next((batch[name] for name in TARGET_NAMES if name in batch.keys()), None)  # noqa: SIM118
        if isinstance(batch, Mapping):
            named = dict(cast(Mapping[str, Any], batch))
            if self.heads and set(self.heads) <= set(named):
                targets = {name: named.pop(name) for name in self.heads}
                return self._inputs_of(named), targets
            targets = next((named.pop(name) for name in TARGET_NAMES if name in named), None)
            return self._inputs_of(named), targets
        if isinstance(batch, (tuple, list)):
            parts = cast(Sequence[Any], batch)
            if len(parts) > 2:  # without what is no argument of a model, such as the paths of files
                parts = [part for part in parts if not _is_text(part)]
            if len(parts) == 1:
                return parts[0], None
            weighted, needed = self.batch_to_weights is not None, max(1, len(self.needed))
            if self.heads and len(parts) in (needed + len(self.heads), needed + len(self.heads) + weighted):
                of_heads = parts[needed : needed + len(self.heads)]
                return (parts[0] if needed == 1 else tuple(parts[:needed])), tuple(of_heads)
            if len(parts) - 1 in (needed, needed + weighted):  # what batch_to_weights takes may be the last
                return (parts[0] if needed == 1 else tuple(parts[:needed])), parts[needed]
            if len(parts) == 2 or (len(parts) == 3 and weighted):
                return parts[0], parts[1]
            takes = "" if self.names is None else f", and the model takes {list(self.names)}"
            raise PosthocUQError(
                f"The loader yields batches of {len(parts)} parts{takes}; say which are inputs and which are targets: "
                f"batch_to_inputs=lambda batch: batch[0], batch_to_targets=lambda batch: batch[{len(parts) - 1}]."
            )
        raise PosthocUQError(
            f"The loader yields batches of type {type(batch).__name__}; pass batch_to_inputs=lambda batch: "
            f"... to take them apart."
        )

    def _inputs_of(self, named: dict[str, Any]) -> Any:
        """The inputs in a mapping without its targets: the model's named arguments, or else its only tensor. What has
        no place in the model, such as the paths of files, is left out; a tensor only beside all arguments that the
        model needs.
        """
        strays = {} if self.names is None else {k: v for k, v in named.items() if k not in self.names}
        tensors = [value for value in strays.values() if _is_tensor(value)]
        arguments = {name: value for name, value in named.items() if name not in strays}
        if len(tensors) == 1 and not arguments:
            return tensors[0]
        if tensors and arguments and set(self.needed) <= set(arguments):
            unused = [name for name in self.names or () if name not in arguments]
            if unused:  # one of which may be meant by another name
                warn_user(
                    f"The batch's {', '.join(map(repr, strays))} is none of the model's arguments and is left out. The "
                    f"model could also take {', '.join(map(repr, unused))}; batch_to_inputs=lambda batch: dict(...) "
                    f"gives it other names."
                )
            return arguments
        return named if tensors or not arguments else arguments

    def warn_of_labels(self, raw: Any, batch: Batch) -> None:
        """Warn of a mapping whose targets may stand under a name that is not looked for.

        Args:
            raw: what the loader yielded.
            batch: the same, once it is read.
        """
        taken_apart = self.batch_to_inputs is not None or self.batch_to_targets is not None
        if batch.targets is not None or taken_apart or not isinstance(raw, Mapping):
            return
        named = cast(Mapping[str, Any], raw)
        taken = batch.kwargs or {name for name, value in named.items() if _is_tensor(value)}  # there is one
        unread = [name for name, value in named.items() if name not in taken and _holds_numbers(value)]
        if unread:
            warn_user(
                f"The batches have no targets under any of {list(TARGET_NAMES)}, and {', '.join(map(repr, unread))} is "
                f"none of the model's arguments and is left out, so this fit sees no targets. If they are there: "
                f"batch_to_targets=lambda batch: batch[{unread[0]!r}]."
            )

    def _target_of(self, targets: Mapping[str, Any]) -> Any:
        """The one of several targets that belongs to the model's outputs: that of the name of `output`, or the only
        one.

        Raises:
            PosthocUQError: there is none.
        """
        if self.output is not None and self.output in targets:
            return targets[self.output]
        if len(targets) == 1:
            return next(iter(targets.values()))
        known = "" if self.output is None else f", and none is output={self.output!r}"
        raise PosthocUQError(
            f"The targets are a mapping of {list(targets)}{known}; give them the name of the model's output "
            f"(output=...), or choose one with batch_to_targets=lambda batch: ...."
        )

    def _targets_of_heads(self, targets: Any) -> Tensor | None:
        """The targets of all heads as one tensor, see `joined_targets`; a tensor stays as it is, to be refused where
        targets count.

        Raises:
            PosthocUQError: they are not those of the heads, or not of as many samples.
        """
        if targets is None or isinstance(targets, Tensor):
            return targets
        found = parts_by_name(targets, self.heads)
        if found is None:
            kind = (
                list(cast(Mapping[Any, Any], targets)) if isinstance(targets, Mapping) else form_of(targets)
            )
            raise PosthocUQError(
                f"The targets are {kind}, and there are the heads {list(self.heads)}: give a mapping with these names, "
                f"or a tuple in this order; batch_to_targets=lambda batch: ... makes one of any other batch."
            )
        parts = [as_targets(part) for part in found.values()]
        if len({part.shape[:1] for part in parts}) > 1 or parts[0].ndim == 0:
            shapes = {name: tuple(part.shape) for name, part in zip(found, parts, strict=True)}
            raise PosthocUQError(
                f"The targets of every head must have one row a sample; they are of {shapes}."
            )
        return joined_targets(parts, self.device)

    def _move(self, value: Any) -> Any:
        if is_graph(value):
            return changed_graph(value, self._move)
        if type(value) is list:
            return [self._move(part) for part in cast(list[Any], value)]
        return to_device_async(value, self.device) if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that may be inputs or targets as it is."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.dtype in _COMPUTED
        and not (value.is_nested or value.is_meta)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _holds_numbers(value: Any) -> bool:
    """Whether a part of a batch may be targets."""
    numbers = isinstance(value, (list, tuple)) and all(
        isinstance(v, (int, float)) for v in cast(list[Any], value)
    )
    return _is_tensor(value) or (numbers and bool(value))


def _check_not_packed(inputs: Any) -> None:
    """Refuse packed sequences among the inputs, whose rows are no samples."""
    leaves = tree_leaves(inputs, is_leaf=lambda value: isinstance(value, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise PosthocUQError(
            "The inputs are a PackedSequence, whose rows are no samples; let the loader yield ((padded, lengths), "
            "targets), and the model pack them by torch.nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), "
            "batch_first=True, enforce_sorted=False)."
        )


def _of_list(batch: Batch) -> list[Batch]:
    """A batch whose only input is a list of tensors, one a sample, as a batch of each; any other as it is."""
    items: Any = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    if not _is_list_of_tensors(items):
        return [batch]
    rows = [value for value in (batch.targets, batch.weights) if value is not None]
    if any(value.ndim == 0 or len(value) != len(items) for value in rows):
        return [batch]

    def row(value: Tensor | None, place: int) -> Tensor | None:
        return None if value is None else value[place : place + 1]

    return [
        Batch(([item],), row(batch.targets, i), {}, row(batch.weights, i), True)
        for i, item in enumerate(items)
    ]


def _is_list_of_tensors(value: Any) -> bool:
    return (
        type(value) is list
        and bool(value)
        and all(isinstance(item, Tensor) for item in cast(list[Any], value))
    )


def _is_text(part: Any) -> bool:
    """Whether a part of a batch is a word a sample."""
    return (
        isinstance(part, (list, tuple))
        and bool(part)
        and all(isinstance(p, str) for p in cast(list[Any], part))
    )


def arguments_of(model: nn.Module) -> Mapping[str, Parameter] | None:
    """The arguments of a model's forward pass by name; None where it takes any, or they are not known."""
    try:
        arguments = signature(unwrap(model).forward).parameters
    except (TypeError, ValueError):
        return None
    kinds = [argument.kind for argument in arguments.values()]
    return None if Parameter.VAR_KEYWORD in kinds else arguments


def as_targets(targets: Any) -> Tensor:
    """Targets as a dense tensor of a type that torch computes with.

    Raises:
        PosthocUQError: they are no real numbers, or have no values.
    """
    tensor = _target_tensor(targets)
    dtype, name = tensor.dtype, str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        raise PosthocUQError(
            f"The targets are on the meta device, {form_of(tensor)} without values; give those of the data."
        )
    if tensor.is_nested:
        raise PosthocUQError(
            "The targets are a nested tensor; make one tensor of them: pad, and mark the padding by ignore_index."
        )
    if tensor.layout != torch.strided:
        return as_targets(tensor.to_dense())
    if dtype in _COMPUTED:
        return tensor
    if dtype in _UNSIGNED:  # for which torch has hardly any function
        whole = tensor.to(torch.int64)
        if bool((whole < 0).any()):
            raise PosthocUQError(f"The targets are {name}, and some are too large for int64.")
        return whole
    if dtype.is_floating_point:  # of eight bits
        return tensor.to(torch.float32)
    raise PosthocUQError(
        f"The targets are {name}, and a likelihood takes real numbers: pass y.real, or y.abs()."
        if dtype.is_complex
        else f"The targets are {name}, which torch does not compute with: pass y.dequantize(), or whole numbers."
    )


_COMPUTED = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


def _target_tensor(targets: Any) -> Tensor:
    if is_array(targets):
        if any(isinstance(value, str) for value in np.asarray(targets).flat):
            raise PosthocUQError(
                "The targets are text, and class labels must be indices: series.astype('category').cat.codes, or "
                "np.unique(labels, return_inverse=True)[1] of an array."
            )
        return tensor_of(targets)
    try:
        return targets if isinstance(targets, Tensor) else torch.as_tensor(targets, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        items = type(next(iter(targets), None)).__name__ if isinstance(targets, Sequence) else ""
        detection = (
            " Boxes of a detector have no likelihood here: see 'Lists of boxes' in docs/guides/several_heads.md."
            if items == "dict"
            else ""
        )
        raise PosthocUQError(
            f"The targets are a {type(targets).__name__}{items and f' of {items}'} that is no tensor of numbers "
            f"({error}); pass batch_to_targets=lambda batch: ... that makes one of them.{detection}"
        ) from error


LARGEST_WEIGHT = 1e12
"""Of a sample. Sums over millions of such samples can still be kept."""


def checked_weights(weights: Any) -> Tensor:
    """Weights of the samples of one batch as float64 on the CPU.

    Args:
        weights: a tensor, an array or a list of numbers or bools.

    Raises:
        PosthocUQError: they are no numbers, negative, not finite, or too large.
    """
    try:
        found = tensor_of(weights) if is_array(weights) else torch.as_tensor(weights, device="cpu")
    except PosthocUQError:
        raise
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"batch_to_weights must give a tensor of numbers, one a sample, not a {type(weights).__name__}."
        ) from None
    if found.is_complex():
        raise PosthocUQError(f"Sample weights must be real numbers, not {found.dtype}.")
    found = found.detach().to("cpu", torch.float64)
    if found.numel() and not bool((torch.isfinite(found) & (found >= 0)).all()):
        raise PosthocUQError(
            f"Sample weights must be finite and not negative; this batch's run from {float(found.min()):g} to "
            f"{float(found.max()):g}. A weight of 0 leaves a sample out."
        )
    if found.numel() and float(found.max()) > LARGEST_WEIGHT:
        raise PosthocUQError(
            f"A sample weight of {float(found.max()):g} is too large: a weight of w counts as w copies of the sample, "
            f"and may be at most {LARGEST_WEIGHT:g}. Divide all weights by their mean."
        )
    return found


def batches(loader: Iterable[Any], reader: BatchReader) -> Iterator[Batch]:
    """Read a loader from start to end; skips batches without samples.

    Raises:
        PosteriorMismatchError: weights that the caller holds `steady` changed.
        PosthocUQError: the loader yields no batch with samples, or others than when it was read before (`Readings`).
    """
    items, reading = items_of(loader), _Reading()
    ahead = reader.device.type == "cuda"
    read = _read_ahead(items, reader) if ahead else (one for raw in items for one in reader.read_all(raw))
    count, readings = 0, loader if isinstance(loader, Readings) else None
    for batch in read:
        if reader.skips_missing:
            batch = with_targets(batch)
        if batch.rows != 0:
            count += 1
            if readings is not None:
                reading.samples += batch.rows or 0
                if readings.contents:
                    reading.note(batch)
            yield batch
            steady.look()
    if readings is not None:
        readings.compare(reading)
    if count == 0:
        raise no_sample_error()


def with_targets(batch: Batch) -> Batch:
    """The samples of a batch with a target that is no NaN."""
    targets = batch.targets
    if targets is None or not targets.is_floating_point() or not targets.numel():
        return batch
    some = ~targets.isnan().reshape(len(targets), -1).all(1).cpu()
    return batch if bool(some.all()) else batch.select(some, len(some))


_MAX_HASHES = 65536  # of inputs, by which two readings are compared


class _Reading:
    """What is remembered of one reading of a loader: its number of samples and, where wanted, hashes of its inputs and
    targets.
    """

    def __init__(self) -> None:
        self.samples, self.hashed = 0, 0
        self.inputs = list[Tensor]()
        self.targets: Tensor | None = None  # the sum over the samples, whatever their order

    def note(self, batch: Batch) -> None:
        """Hash a batch."""
        samples = batch.rows or 0
        if self.hashed < _MAX_HASHES:
            self.inputs.append(sample_keys(batch.tensors, samples, 0))
            self.hashed += samples
        if batch.targets is not None and holds_samples(batch.targets, samples):
            total = sample_keys([batch.targets], samples, 0).sum()
            self.targets = total if self.targets is None else self.targets + total

    def agrees(self, first: _Reading) -> bool:
        """Whether these may be the data of the first reading: they share an input, or all of their targets."""
        if self.targets is not None and first.targets is not None and bool(self.targets == first.targets):
            return True  # random changes of the inputs are usual
        return not self.inputs or bool(torch.isin(torch.cat(self.inputs), torch.cat(first.inputs)).any())


class Readings(Iterable[Any]):
    """A loader that is read several times. Each reading is compared with the first one; what was taken out of a stream
    to look at it comes first in the first one.

    A stream gives nothing, or other data, when it is read again. The number of samples must be the same. Where nothing
    says that the loader begins anew, which a list does and a `DataLoader` over data with indices, a reading must also
    share an input with the first one, or the targets of all samples. So a loader may shuffle, leave out the last batch,
    draw its samples with replacement, or change its inputs at random.

    Args:
        loader: the user's.
        contents: whether more than the number of samples is compared.
    """

    def __init__(self, loader: Iterable[Any], contents: bool = True) -> None:
        self.loader = loader
        indexed = isinstance(loader, DataLoader) and not isinstance(
            cast(Any, loader).dataset, IterableDataset
        )
        self._begins_anew = indexed or isinstance(loader, Sequence)
        self.contents = contents and not self._begins_anew
        self._first: _Reading | None = None
        self._begun: tuple[Any, Iterator[Any], Callable[[], None]] | None = None

    @staticmethod
    def of(loader: Iterable[Any]) -> Readings:
        """A loader as one of these, if it is none."""
        return loader if isinstance(loader, Readings) else Readings(loader)

    def first(self, reader: BatchReader) -> Batch:
        """The first batch with samples.

        Raises:
            PosthocUQError: there is none.
        """
        iterator = interrupts.interruptible(iter, self.loader)
        for item in items_of(iterator):
            read = reader.read_all(item)
            read = [with_targets(batch) for batch in read] if reader.skips_missing else read
            batch = next((batch for batch in read if batch.rows != 0), None)
            if batch is not None:
                reader.warn_of_labels(item, batch)
                if not self._begins_anew:
                    self._begun = item, iterator, present_state()
                return batch
        raise no_sample_error()

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            return iter(self.loader)
        (item, iterator, restore), self._begun = self._begun, None
        restore()  # random changes go on where they were, as in a reading from the start
        return chain([item], iterator)

    def __length_hint__(self) -> int:
        return length_hint(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)  # its sampler, the size of its batches

    def compare(self, reading: _Reading) -> None:
        """Compare a reading that came to its end with the first one.

        Raises:
            PosthocUQError: it gave other data.
        """
        first = self._first
        if first is None:
            self._first = reading
            return
        way_out = (
            "This call reads its data several times, and must get the same ones every time: pass a list of batches or "
            "a DataLoader over data with indices (__getitem__). Of the methods 'kfac', 'diag' and 'full' read them "
            "once, but for a regression whose noise_variance is not given."
        )
        if reading.samples != first.samples:
            raise PosthocUQError(
                f"The loader gave {first.samples} samples when it was read first, and {reading.samples} when it was "
                f"read again, as a stream does that goes on where it was. {way_out}"
            )
        if self.contents and not reading.agrees(first):
            raise PosthocUQError(
                f"The loader gave {first.samples} samples when it was read first, and none of these when it was read "
                f"again, as a stream does that goes on where it was. {way_out}"
            )


def items_of(loader: Iterable[Any]) -> Iterator[Any]:
    """What a loader yields; an interrupt ends the wait for it."""
    iterator, end = interrupts.interruptible(iter, loader), object()
    while (item := interrupts.interruptible(next, iterator, end)) is not end:
        yield item


def no_sample_error() -> PosthocUQError:
    """The error of a loader without data."""
    return PosthocUQError("The loader yields no batch of samples; it needs at least one.")


def _read_ahead(items: Iterable[Any], reader: BatchReader) -> Iterator[Batch]:
    """Batches whose transfer to the device overlaps with the work on the previous batch."""
    stream = torch.cuda.Stream(reader.device)
    current: list[Batch] = []
    for raw in items:
        # The loader's own work on the device must be done before its batch is read.
        stream.wait_stream(torch.cuda.current_stream(reader.device))
        with torch.cuda.stream(stream):
            following = reader.read_all(raw)
            # a loader may fill its tensors on the device again while this batch waits for its turn
            following = [batch.kept() for batch in following] if _on_device(raw) else following
        yield from current
        main = torch.cuda.current_stream(reader.device)
        main.wait_stream(stream)
        for batch in following:
            for tensor in (*batch.tensors, batch.targets):
                if tensor is not None and tensor.is_cuda:
                    # so that its memory is not reused before the work on it is done
                    tensor.record_stream(main)
        current = following
        stream.synchronize()  # so that the loader may fill its pinned tensors again; it is done since long
    yield from current


def _on_device(raw: Any) -> bool:
    """Whether a batch of a loader holds tensors that are not on the CPU."""
    leaves = [
        part for leaf in tree_leaves(raw) for part in (tensors_of_graph(leaf) if is_graph(leaf) else [leaf])
    ]
    return any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)


def known_length(sized: Any) -> int:
    """How many items there are, or 0 if that is unknown."""
    try:
        return length_hint(sized)
    except Exception as error:  # no length after all; the author's error may be of any kind
        if out_of_memory(error):
            raise
        return 0


class Bar(Progress):
    """A progress bar in samples, of which there are as many as the loader says, or as its number of batches does."""

    def __init__(self, loader: Iterable[Any], description: str, visible: bool) -> None:
        visible = visible and rank() == 0
        sampler = sampler_of(loader) if visible else None
        total = 0 if sampler is None else known_length(sampler)
        super().__init__(description, "samples", visible, total or None)
        self.batches = known_length(loader) if visible and not total else 0


def check_loader(loader: Any, name: str = "loader") -> None:
    """Refuse data that are no loader; `name` is that of the parameter.

    Raises:
        PosthocUQError: a tensor, an array, a data set, or one pair of inputs and targets.
    """
    pair = isinstance(loader, (tuple, list)) and len(cast(Sequence[Any], loader)) == 2
    pair = pair and all(isinstance(part, Tensor) or is_array(part) for part in loader)
    pair = pair and len(loader[0].shape) != len(loader[1].shape)
    bare_data = isinstance(loader, (Tensor, Dataset, Mapping, str)) or hasattr(loader, "__array__")
    if pair or bare_data:
        kind = "one pair of inputs and targets" if pair else f"a {type(loader).__name__}"
        raise PosthocUQError(
            f"The {name} is {kind}, not an iterable of batches; wrap the data in torch.utils.data.DataLoader, "
            f"or pass a list of batches such as [(x, y)]."
        )
    if not isinstance(loader, Iterable):
        hint = "; give one of its loaders, .train_dataloader()" if hasattr(loader, "train_dataloader") else ""
        raise PosthocUQError(
            f"The {name} must be an iterable of batches, not a {type(loader).__name__}{hint}."
        )


def check_reusable(loader: Iterable[Any], sweeps: int) -> None:
    """Refuse an iterator, which is used up after one sweep, where several are needed.

    Raises:
        PosthocUQError: the loader can be read only once.
    """
    loader = loader.loader if isinstance(loader, Readings) else loader
    # A DataLoader's iter() would draw from the global generator and start its workers.
    if sweeps > 1 and isinstance(loader, Iterator) and iter(loader) is loader:
        raise PosthocUQError(
            "The loader is an iterator that can be read only once, and this call reads the data "
            f"{sweeps} times; pass a DataLoader or a list of batches."
        )


CALL = (
    "Model and inputs do not belong together: pass what model(...) itself takes, with the samples along the first "
    "dimension, or the posterior or predictor of another model."
)
LOADER = (
    "Model and data do not belong together: a batch is a tensor of inputs, (inputs, targets) or a mapping of the "
    "model's named arguments; batch_to_inputs= takes any other apart."
)

_DECODER_NAMES = {"decoder_input_ids", "decoder_inputs_embeds"}
DECODER_INPUTS = (
    "put decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels) into every batch, here and for "
    "predictions."
)

NAMED = (
    "The entries of a mapping are named arguments here, predictor(**mapping); put a model that takes a whole mapping "
    "into a module whose forward(self, **inputs) returns self.model(inputs), and fit that."
)


def batches_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, network: nn.Module
) -> list[Batch]:
    """The arguments of one call of a model; where there are arrays among them, all on the device of the network that
    predicts, as in a loader. They are one batch, or several of one sample each; see `BatchReader.read_all`.

    A single argument may be a `Batch`, or a batch as the loader gave it, with targets, which are ignored: no model that
    has a posterior takes a whole mapping, list or tuple of others as its only argument (`count_samples`).
    """
    if len(args) == 1 and not kwargs:
        if isinstance(args[0], Tensor) and args[0].layout == torch.strided and not args[0].is_nested:
            return [Batch(args)]
        if isinstance(args[0], Batch):
            return [args[0]]
        if _of_a_loader(args[0]):
            read = BatchReader.of(model, device=model_device(network)).read_all(args[0])
            return [replace(batch, targets=None, weights=None) for batch in read]
    check_dense((args, kwargs))
    if not any(is_array(value) for value in (*args, *kwargs.values())):
        return _of_list(Batch(args, None, kwargs))
    dtype = model_dtype(model)
    return [Batch(with_tensors(args, dtype), None, with_tensors(kwargs, dtype)).to(model_device(network))]


def _of_a_loader(value: Any) -> bool:
    """Whether a value is a batch of a loader: a mapping, graphs, ``[inputs]`` or ``(inputs, targets)``; not two
    samples.
    """
    if isinstance(value, Mapping) or is_graph(value):
        return True
    if type(value) not in (tuple, list) or len(value) not in (1, 2):
        return False
    inputs, targets = value[0], value[-1]
    if is_graph(inputs) or _is_list_of_tensors(inputs):
        return True
    if not (isinstance(inputs, (Tensor, Mapping, tuple)) or is_array(inputs)):
        return False
    shape = getattr(inputs, "shape", None)
    samples = len(value) == 2 and shape is not None and len(shape) in (1, 3)
    return not (samples and shape == getattr(targets, "shape", None))


@contextmanager
def explained(
    network: Callable[[], nn.Module], batch: Batch, what: str = "these inputs", way_out: str = CALL
) -> Generator[None]:
    """Where the body fails because the model cannot be run on the batch, raise an error that shows the batch.

    To find out, the model is run once by itself after the body has failed. If it runs, the body's error is passed on
    unchanged.

    Args:
        network: gives the model, or a copy of it, to run without gradients.
        batch: the arguments.
        what: the batch, in words.
        way_out: advice for arguments of the right types.

    Raises:
        PosthocUQError: the model cannot be run on the batch, or its outputs do not count the samples; with the shapes,
            the types and the way out.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        if not isinstance(error, PosthocUQError) or isinstance(error, UnsupportedLayerError):
            _check_run(network(), batch, what, way_out)
        raise


def _check_run(network: nn.Module, batch: Batch, what: str, way_out: str) -> None:
    ids = _Ids(network)
    try:
        with torch.inference_mode(False), torch.no_grad(), isolated_random_state(), ids:
            outputs = batch.copied().call_any(network)
    except Exception as error:  # a model may raise anything
        if out_of_memory(error):
            return
        message = next(iter(str(error).splitlines()), "").rstrip(".")
        raise PosthocUQError(
            f"The model cannot be run on {what}, {describe_batch(batch)} ({type(error).__name__}: {message}). "
            f"{ids.fault or _advice(network, batch, ids.taken) or way_out}"
        ) from error
    samples = batch.rows
    if batch.whole or samples is None or not isinstance(outputs, Tensor):
        return
    if outputs.shape[:1] != (samples,):
        raise PosthocUQError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for {what}, {describe_batch(batch)}; the first "
            f"dimension of both must count the samples. Of one sample, pass x.unsqueeze(0)."
        )


class _Ids(TorchFunctionMode):
    """Checks that embeddings are given ids that they have, and that no tensor is indexed by a name, as a mapping is.

    Attributes:
        fault: the first that was not so, in words; empty if there is none.
        taken: whether an embedding took whole numbers that it has.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._names = {id(p): name.removesuffix(".weight") for name, p in network.named_parameters()}
        self.fault, self.taken = "", False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.embedding, F.embedding_bag) and not self.fault:
            self._look(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[1], str) and not self.fault:
            self.fault = f"It looks up {args[1]!r} in a tensor. {NAMED}"
        return func(*args, **(kwargs or {}))

    def _look(self, input: Any, weight: Any, *_: Any, **__: Any) -> None:
        if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
            return
        name = f"Embedding '{self._names[id(weight)]}'" if id(weight) in self._names else "An embedding"
        if input.is_floating_point():
            self.fault = f"{name} takes whole numbers, and was given {form_of(input)}: pass x.long()."
        elif input.numel() and not 0 <= int(input.min()) <= int(input.max()) < len(weight):
            self.fault = (
                f"{name} has rows 0 to {len(weight) - 1}, and was given ids from {int(input.min())} to "
                f"{int(input.max())}; is the tokenizer another one's?"
            )
        else:
            self.taken = True


def count_samples(batch: Batch) -> int:
    """Samples in a batch: the first dimension of its first input tensor.

    Raises:
        PosthocUQError: there is no such tensor, or it is empty.
    """
    if samples := batch.rows:
        return samples
    makes = (
        "torch.as_tensor(x) makes a tensor of an array or a list, torch.stack(x) one of tensors of one shape"
    )
    if whole_mapping(batch):
        raise PosthocUQError(f"The model was given a mapping as its argument. {NAMED}")
    advice = "" if batch.tensors else f"; {makes}"
    raise PosthocUQError(
        f"A batch needs an input tensor with at least one sample along its first dimension, and holds "
        f"{describe_batch(batch)}{advice}."
    )


def describe_batch(batch: Batch) -> str:
    """Type and shape of every argument of a model, such as ``float32 (8, 3, 32, 32)``."""
    named = [f"{name}={form_of(value)}" for name, value in batch.kwargs.items()]
    return ", ".join([*map(form_of, batch.args), *named]) or "no argument"


def _advice(network: nn.Module, batch: Batch, takes_ids: bool) -> str:
    """Advice for arguments whose kind or number type does not fit the model, whose embeddings may have taken them as
    ids; empty without any.
    """
    if whole_mapping(batch):
        return NAMED
    if lacks_decoder_inputs(network, batch):
        return f"Its decoder needs inputs too, and the labels were taken out of the batch as targets: {DECODER_INPUTS}"
    if advice := _other_names(network, batch):
        return advice
    if advice := _too_many(network, batch):
        return advice
    if takes_ids and not any(tensor.is_floating_point() for tensor in batch.tensors):
        masked = batch.attention_mask is not None
        return "Is a text longer than the model takes, or the mask of another length?" if masked else ""
    weights_dtype = model_dtype(network)
    input_dtypes = [value.dtype for value in batch.tensors]
    if any(is_array(value) for value in (*batch.args, *batch.kwargs.values())):
        return f"Pass tensors: torch.as_tensor(x, dtype={weights_dtype})."
    if any(dtype.is_floating_point and dtype != weights_dtype for dtype in input_dtypes):
        return f"Its weights are {weights_dtype}: pass x.to({weights_dtype})."
    if torch.uint8 in input_dtypes and not any(dtype.is_floating_point for dtype in input_dtypes):
        return (
            f"Its weights are {weights_dtype}: convert pictures as for the training, x.float() / 255, say, unless the "
            f"model takes integers."
        )
    if input_dtypes and not any(dtype.is_floating_point for dtype in input_dtypes):
        return (
            f"Its weights are {weights_dtype}: pass x.to({weights_dtype}), unless the model takes integers."
        )
    return ""


def whole_mapping(batch: Batch) -> bool:
    """Whether an argument is a mapping that holds the tensors."""
    return not batch.tensors and any(isinstance(value, Mapping) for value in batch.args)


def lacks_decoder_inputs(network: nn.Module, batch: Batch) -> bool:
    """Whether a model of transformers with an encoder and a decoder is called without inputs of the decoder."""
    if not getattr(getattr(network, "config", None), "is_encoder_decoder", False):
        return False
    return len(batch.args) < 2 and not _DECODER_NAMES & set(batch.kwargs)


def _too_many(network: nn.Module, batch: Batch) -> str:
    """Advice for a batch with more arguments than the model has; empty if it has them."""
    parameters = arguments_of(network)
    if parameters is None or len(batch.args) <= len(parameters):
        return ""
    if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters.values()):
        return ""
    return (
        f"The model takes {list(parameters)}: choose by batch_to_inputs=...; if it takes the whole tuple, put it into "
        f"a module with forward(self, *inputs) that calls model(inputs)."
    )


def _other_names(network: nn.Module, batch: Batch) -> str:
    """Advice for a batch that names arguments which the model does not have; empty if it has them."""
    parameters = arguments_of(network)
    stray = [name for name in batch.kwargs if name not in (parameters or batch.kwargs)]
    if parameters is None or not stray:
        return ""
    if all(isinstance(batch.kwargs[name], (str, bool, int, float)) for name in stray):
        return f"The model takes {list(parameters)}; options of the prediction go to uq.wrap.{laplace_names(stray)}"
    if len(parameters) == 1:
        (only,) = parameters
        chosen = only if only in batch.kwargs else stray[0]
        others = [name for name in batch.kwargs if name != chosen]
        return (
            f"The model takes one argument, '{only}': pass batch_to_inputs=lambda batch: batch[{chosen!r}]"
            f"{f', or another of {others}' if others and chosen != only else ''}; if it takes the whole mapping, put "
            f"it into a module whose forward(self, **inputs) returns self.model(inputs), and fit that."
        )
    return (
        f"The model takes {list(parameters)}, and the batch names {list(batch.kwargs)}: give it those names with "
        f"batch_to_inputs=lambda batch: dict(...)."
    )
