"""Batches in every accepted form, read as inputs and targets on the model's device.

A loader is anything that can be iterated: a `DataLoader`, a list of batches, an iterable dataset's loader. A batch
is a tensor of inputs, ``(inputs, targets)``, a mapping (targets under one of `TARGET_NAMES`, beside one tensor or the
model's named arguments), or any form that `batch_to_inputs` and `batch_to_targets` take apart. NumPy arrays and pandas
frames become tensors: inputs of floating-point numbers of the model's number type, all others of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from operator import length_hint
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from posthoc_uq import interrupts
from posthoc_uq.arrays import is_array, tensor_of, with_tensors
from posthoc_uq.devices import sent
from posthoc_uq.distributed import rank, sampler_of
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.outputs import output_tensor
from posthoc_uq.progress import Progress
from posthoc_uq.replica import model_device, model_dtype, unwrap
from posthoc_uq.values import check_function

BatchFunction = Callable[[Any], Any]
TARGET_NAMES = ("labels", "label", "targets", "target", "y")


@dataclass
class Batch:
    """One batch on the device: arguments of the model, and targets where the loader gave them.

    Attributes:
        args: of the model, by place.
        targets: of the samples.
        kwargs: of the model, by name.
        weights: of the samples, or of their positions; float64 on the CPU, finite and not negative.
    """

    args: tuple[Any, ...]
    targets: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    weights: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor among the inputs."""
        values = (*self.args, *(self.kwargs[name] for name in sorted(self.kwargs)))
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def empty(self) -> bool:
        """Whether its inputs are tensors of no samples."""
        counted = [tensor for tensor in self.tensors() if tensor.ndim > 0]
        return bool(counted) and all(tensor.shape[0] == 0 for tensor in counted)

    def call(self, model: nn.Module) -> Tensor:
        """The model's output tensor ``(samples, ...)``.

        Raises:
            PosthocUQError: the model gives something that holds no tensor of outputs.
        """
        return output_tensor(self.call_any(model))

    def call_any(self, model: Callable[..., Any]) -> Any:
        """The model's return value as it is."""
        return model(*self.args, **self.kwargs)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its inputs on `device`; targets and weights stay where they are."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        kwargs = {k: move(v) for k, v in self.kwargs.items()}
        return Batch(tuple(map(move, self.args)), self.targets, kwargs, self.weights)

    def copied(self) -> Batch:
        """A copy outside of any graph, for one run, since a model may change its inputs in place."""

        def copy(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else value

        args, kwargs = tree_map(copy, (self.args, self.kwargs))
        return Batch(args, self.targets, kwargs, self.weights)

    def narrow(self, start: int, length: int, samples: int) -> Batch:
        """The samples ``start`` to ``start + length`` of a batch of `samples`."""

        def cut(value: Any) -> Any:
            counted = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == samples
            return value[start : start + length] if counted else value

        return self._mapped(cut)

    def select(self, picked: Tensor, samples: int) -> Batch:
        """The samples where `picked` ``(samples,)`` is true."""

        def pick(value: Any) -> Any:
            counted = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == samples
            return value[picked.to(value.device)] if counted else value

        return self._mapped(pick)

    def doubled(self) -> Batch:
        """A batch of one sample as a batch of that sample twice."""

        def twice(value: Any) -> Any:
            counted = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1
            return torch.cat([value, value]) if counted else value

        return self._mapped(twice)

    def _mapped(self, change: Callable[[Any], Any]) -> Batch:
        """All that belongs to the samples, changed."""
        kwargs = {k: change(v) for k, v in self.kwargs.items()}
        return Batch(tuple(map(change, self.args)), change(self.targets), kwargs, change(self.weights))


@dataclass(frozen=True)
class BatchReader:
    """Takes batches apart and moves them to a device.

    Attributes:
        device: of the model.
        batch_to_inputs: from a batch to the model's inputs.
        batch_to_targets: from a batch to its targets.
        batch_to_weights: from a batch to the weights of its samples.
        dtype: of the model, which arrays of floating-point numbers among the inputs become; tensors keep theirs.
        names: of the model's arguments; None where it takes any, or they are not known.
    """

    device: torch.device
    batch_to_inputs: BatchFunction | None = None
    batch_to_targets: BatchFunction | None = None
    batch_to_weights: BatchFunction | None = None
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch_to_inputs: BatchFunction | None = None,
        batch_to_targets: BatchFunction | None = None,
        batch_to_weights: BatchFunction | None = None,
    ) -> BatchReader:
        """A reader for a model: with its device and its number type."""
        functions = batch_to_inputs, batch_to_targets, batch_to_weights
        return cls(model_device(model), *functions, model_dtype(model), argument_names(model))

    def __post_init__(self) -> None:
        check_function("batch_to_inputs", self.batch_to_inputs, "from a batch to the model's inputs")
        check_function("batch_to_targets", self.batch_to_targets, "from a batch to its targets")
        check_function(
            "batch_to_weights", self.batch_to_weights, "from a batch to the weights of its samples"
        )

    def read(self, batch: Any) -> Batch:
        """A `Batch` on the device.

        Raises:
            PosthocUQError: the batch has a form that needs `batch_to_inputs`, or its weights are none.
        """
        inputs, targets = self._split(batch)
        if self.batch_to_inputs is None:
            inputs = with_tensors(inputs, self.dtype)
        if self.batch_to_targets is not None:
            targets = self.batch_to_targets(batch)
        targets = None if targets is None else _target_tensor(targets)
        weights = None if self.batch_to_weights is None else checked_weights(self.batch_to_weights(batch))
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            kwargs = {str(k): self._move(v) for k, v in cast(Mapping[str, Any], inputs).items()}
        elif isinstance(inputs, tuple):
            args = tuple(self._move(v) for v in cast(tuple[Any, ...], inputs))
        else:
            args = (self._move(inputs),)
        return Batch(args, None if targets is None else self._move(targets), kwargs, weights)

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if self.batch_to_inputs is not None:
            inputs = self.batch_to_inputs(batch)
            pair = isinstance(batch, (tuple, list)) and len(cast(Sequence[Any], batch)) == 2
            return inputs, (batch[1] if pair and self.batch_to_targets is None else None)
        if isinstance(batch, Tensor) or is_array(batch):
            return batch, None
        if isinstance(batch, Mapping):
            named = dict(cast(Mapping[str, Any], batch))
            targets = next((named.pop(name) for name in TARGET_NAMES if name in named), None)
            return self._inputs_of(named), targets
        if isinstance(batch, (tuple, list)):
            parts = cast(Sequence[Any], batch)
            if len(parts) == 1:
                return parts[0], None
            if len(parts) == 2 or (len(parts) == 3 and self.batch_to_weights is not None):
                return parts[0], parts[1]  # of three the last is what batch_to_weights takes
            raise PosthocUQError(
                f"The loader yields batches of {len(parts)} parts; say which are inputs with "
                f"batch_to_inputs=lambda batch: ... "
                f"(and batch_to_targets=...)."
            )
        raise PosthocUQError(
            f"The loader yields batches of type {type(batch).__name__}; pass batch_to_inputs=lambda batch: "
            f"... to take them apart."
        )

    def _inputs_of(self, named: dict[str, Any]) -> Any:
        """The inputs in a mapping without its targets: the model's named arguments, or else its only tensor. What is no
        tensor and has no place in the model, such as the paths of files, is left out.
        """
        strays = {} if self.names is None else {k: v for k, v in named.items() if k not in self.names}
        tensors = [value for value in strays.values() if isinstance(value, Tensor) or is_array(value)]
        own = {name: value for name, value in named.items() if name not in strays}
        if len(tensors) == 1 and not own:
            return tensors[0]
        return named if tensors or not own else own

    def _move(self, value: Any) -> Any:
        return sent(value, self.device) if isinstance(value, Tensor) else value


def argument_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the arguments of a model's forward pass; None where it takes any, or they are not known."""
    try:
        parameters = signature(unwrap(model).forward).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(parameters)


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
            " Boxes of a detector have no likelihood here: see 'Detectors' in docs/methods/likelihoods.md."
            if items == "dict"
            else ""
        )
        raise PosthocUQError(
            f"The targets are a {type(targets).__name__}{items and f' of {items}'} that is no tensor of numbers "
            f"({error}); pass batch_to_targets=lambda batch: ... that makes one of them.{detection}"
        ) from error


def checked_weights(weights: Any) -> Tensor:
    """Weights of the samples of one batch as float64 on the CPU.

    Args:
        weights: a tensor, an array or a list of numbers or bools.

    Raises:
        PosthocUQError: they are no numbers, negative, or not finite.
    """
    try:
        own = tensor_of(weights) if is_array(weights) else torch.as_tensor(weights, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"batch_to_weights must give a tensor of numbers, one a sample, not a {type(weights).__name__}."
        ) from None
    if own.is_complex():
        raise PosthocUQError(f"Sample weights must be real numbers, not {own.dtype}.")
    own = own.detach().to("cpu", torch.float64)
    if own.numel() and not bool((torch.isfinite(own) & (own >= 0)).all()):
        raise PosthocUQError(
            f"Sample weights must be finite and not negative; this batch's run from {float(own.min()):g} to "
            f"{float(own.max()):g}. A weight of 0 leaves a sample out."
        )
    return own


def batches(loader: Iterable[Any], reader: BatchReader) -> Iterator[Batch]:
    """Read a loader from start to end; skips batches without samples.

    Raises:
        PosthocUQError: the loader yields no batch with samples.
    """
    items = items_of(loader)
    read = _read_ahead(items, reader) if reader.device.type == "cuda" else map(reader.read, items)
    count = 0
    for batch in read:
        if not batch.empty:
            count += 1
            yield batch
    if count == 0:
        raise no_sample()


def items_of(loader: Iterable[Any]) -> Iterator[Any]:
    """What a loader yields; an interrupt ends the wait for it."""
    iterator, end = interrupts.at_once(iter, loader), object()
    while (item := interrupts.at_once(next, iterator, end)) is not end:
        yield item


def no_sample() -> PosthocUQError:
    """The error of a loader without data."""
    return PosthocUQError("The loader yields no batch of samples; it needs at least one.")


def _read_ahead(items: Iterable[Any], reader: BatchReader) -> Iterator[Batch]:
    """Batches whose transfer to the device overlaps with the work on the previous batch."""
    stream = torch.cuda.Stream(reader.device)
    current: Batch | None = None
    for raw in items:
        # The loader's own work on the device must be done before its batch is read.
        stream.wait_stream(torch.cuda.current_stream(reader.device))
        with torch.cuda.stream(stream):
            following = reader.read(raw)
        if current is not None:
            yield current
        main = torch.cuda.current_stream(reader.device)
        main.wait_stream(stream)
        for tensor in (*following.tensors(), following.targets):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(main)  # so that its memory is not reused before the work on it is done
        current = following
    if current is not None:
        yield current


def known_length(sized: Any) -> int:
    """How many items there are, or 0 if that is unknown."""
    try:
        return length_hint(sized)
    except Exception:  # no length after all; the author's error may be of any kind
        return 0


class Bar:
    """A progress bar in samples, with their rate and the time left; hidden if not `visible`, and on all ranks but the
    first.

    Args:
        loader: its numbers of samples or batches, if known, give the total.
        description: of the work, in words.
        visible: whether to show it.
    """

    def __init__(self, loader: Iterable[Any], description: str, visible: bool) -> None:
        visible = visible and rank() == 0
        sampler = sampler_of(loader) if visible else None
        total = 0 if sampler is None else known_length(sampler)
        self._batches = known_length(loader) if visible and not total else 0
        self._bar = Progress(description, "samples", visible, total or None)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, samples: int) -> None:
        """Add to the samples done."""
        if self._batches:  # assume that all batches are as large as the first
            self._bar.expect(self._batches * samples)
            self._batches = 0
        self._bar.advance(samples)


def check_loader(loader: Any, name: str = "loader") -> None:
    """Refuse data that are no loader.

    Args:
        loader: the value that was passed.
        name: of the parameter that it was passed as.

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
        raise PosthocUQError(f"The {name} must be an iterable of batches, not a {type(loader).__name__}.")


def check_reusable(loader: Iterable[Any], sweeps: int) -> None:
    """Refuse an iterator, which is used up after one sweep, where several are needed.

    Raises:
        PosthocUQError: the loader can be read only once.
    """
    # A DataLoader's iter() would draw from the global generator and start its workers.
    if sweeps > 1 and isinstance(loader, Iterator) and iter(loader) is loader:
        raise PosthocUQError(
            "The loader is an iterator that can be read only once, and this fit reads the data "
            f"{sweeps} times; pass a DataLoader or a list of batches."
        )
