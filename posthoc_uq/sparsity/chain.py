"""Whether a network's layers form a chain, proved by numbers, and which weights lie on a path through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posthoc_uq.affine import affine_call
from posthoc_uq.attempts import out_of_memory
from posthoc_uq.layers import Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import output_tensor
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate
from posthoc_uq.sparsity.inclusion import unit_matrix

_SAMPLES = 4  # of the example that the network runs on
_EQUAL = 1e-5  # relative difference of two passes that counts as none
_SEED = 0


class BrokenChainError(Exception):
    """Why the layers are no chain, in words."""


class _Calls(TorchFunctionMode):
    """Keeps what enters every layer, and puts given numbers in the place of what leaves it.

    Args:
        names: of the layers, by the identity of the weight.
        outputs: numbers by layer; the layer's own outputs without.
    """

    def __init__(self, names: Mapping[int, str], outputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names, self._outputs = names, outputs
        self.order: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = affine_call(func, args, kwargs or {})
        name = None if call is None else self._names.get(id(call.parameter))
        if call is None or name is None:
            return func(*args, **(kwargs or {}))
        self.order.append(name)
        self.inputs[name] = call.input.detach().clone()
        if name in self._outputs:
            return self._outputs[name].clone()  # later code may write into it
        result = func(*args, **(kwargs or {}))
        self.given[name] = result.detach().clone()
        return result


@dataclass(frozen=True)
class Chain:
    """Layers in the order in which they run, each of which sees the one before it and nothing else.

    Attributes:
        layers: in that order.
        spans: how many input units of a layer each output unit of the one before it makes: 1, or the positions of a
            channel that was flattened; of the first layer 1.
    """

    layers: tuple[Layer, ...]
    spans: tuple[int, ...]


def find_chain(model: nn.Module, layers: Mapping[str, Layer], batch: Batch) -> Chain:
    """The chain of a model's layers.

    With the outputs of all layers replaced by fixed numbers, what enters a layer must not change with the sample; with
    the outputs of one layer changed, nothing but what enters the next one may change, nor the network's output but for
    the last; and with one channel or unit changed, only the units that it is flattened to. Layers and units are changed
    by the bits of their numbers, half of them at a time, so that every pair is told apart in some pass.

    Args:
        model: with all of its weights.
        layers: by name.
        batch: an example of the model's inputs.

    Raises:
        BrokenChainError: they are none; says why.
    """
    probe = _Probe(model, layers, batch)
    probe.check_samples()
    probe.check_layers()
    spans = probe.spans()
    probe.check_units(spans)
    return Chain(tuple(layers[name] for name in probe.order), (1, *spans))


class _Probe:
    def __init__(self, model: nn.Module, layers: Mapping[str, Layer], batch: Batch) -> None:
        self._layers, self._twin = layers, replicate(model)
        tensors = [tensor for tensor in batch.tensors() if tensor.ndim]
        if not tensors:
            raise BrokenChainError("the example holds no tensor of samples")
        self._batch = batch.narrow(0, _SAMPLES, len(tensors[0]))
        held = dict(self._twin.named_parameters())
        self._names = {id(held[layer.weight]): name for name, layer in layers.items()}
        first, _ = self._run(self._batch, {})
        for name in layers:
            uses = first.order.count(name)
            if uses != 1 or not first.given[name].is_floating_point():
                raise BrokenChainError(f"layer '{name}' was seen {uses} times in one pass, not once")
        self.order = first.order
        self._shapes = {name: output.shape for name, output in first.given.items()}
        generator = torch.Generator().manual_seed(_SEED)

        def normals(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like)

        self._plain = {name: normals(output) for name, output in first.given.items()}
        self._other = {name: normals(output) for name, output in first.given.items()}
        self._base = self._seen(self._plain)
        if any(not _same(*pair) for pair in zip(self._base, self._seen(self._plain), strict=True)):
            raise BrokenChainError("two passes on the same inputs differ")
        self._generator = generator

    def _run(self, batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[_Calls, Tensor]:
        copied = batch.copied()
        try:
            with torch.no_grad(), isolated_random_state(_SEED), _Calls(self._names, outputs) as calls:
                result = output_tensor(self._twin(*copied.args, **copied.kwargs))
        except Exception as error:  # of the user's model, on numbers that it did not make
            if out_of_memory(error):
                raise
            raise BrokenChainError(
                f"the network could not be run ({type(error).__name__}: {error})"
            ) from error
        return calls, result

    def _seen(self, outputs: Mapping[str, Tensor], batch: Batch | None = None) -> list[Tensor]:
        """What enters each layer but the first, and the network's output."""
        calls, result = self._run(self._batch if batch is None else batch, outputs)
        if calls.order != self.order:
            raise BrokenChainError("its layers run in another order for other values")
        return [*(calls.inputs[name] for name in self.order[1:]), result]

    def check_samples(self) -> None:
        """Nothing but the first layer may see the samples."""
        for index, seen in enumerate(self._seen(self._plain, self._other_samples())):
            if not _same(seen, self._base[index]):
                raise BrokenChainError(
                    f"{self._target(index)} depends on the inputs past '{self.order[index]}'"
                )

    def _other_samples(self) -> Batch:
        def other(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim:
                return value
            if not value.is_floating_point():
                return value.flatten().roll(1).reshape(value.shape)
            noise = torch.randn(value.shape, generator=self._generator, dtype=value.dtype, device="cpu")
            return value + noise.to(value) * (value.std(correction=0) + 1e-3)

        batch = self._batch
        return Batch(tuple(map(other, batch.args)), None, {k: other(v) for k, v in batch.kwargs.items()})

    def check_layers(self) -> None:
        """What enters a layer may change with the outputs of the one before it alone."""
        for chosen in _halves(len(self.order)):
            outputs = {
                name: (self._other if index in chosen else self._plain)[name]
                for index, name in enumerate(self.order)
            }
            for index, seen in enumerate(self._seen(outputs)):
                if index not in chosen and not _same(seen, self._base[index]):
                    raise BrokenChainError(
                        f"{self._target(index)} depends on other layers than '{self.order[index]}'"
                    )

    def _target(self, index: int) -> str:
        """What comes after a layer, in words."""
        last = index == len(self.order) - 1
        return "the network's output" if last else f"what enters '{self.order[index + 1]}'"

    def spans(self) -> tuple[int, ...]:
        """How many input units of a layer each output unit of the one before it makes."""
        spans: list[int] = []
        for index, name in enumerate(self.order[1:]):
            before = self.order[index]
            outputs = self._shapes[before][_axis(self._layers[before])]
            inputs = self._base[index].shape[_axis(self._layers[name])]
            if inputs % outputs:
                raise BrokenChainError(
                    f"'{before}' has {outputs} output units, and '{name}' {inputs} input units"
                )
            spans.append(inputs // outputs)
        return tuple(spans)

    def check_units(self, spans: Sequence[int]) -> None:
        """An input unit may change with its own output unit of the layer before it alone."""
        sizes = {name: self._shapes[name][_axis(self._layers[name])] for name in self.order[:-1]}
        for chosen in _halves(max(sizes.values(), default=1)):
            picked = torch.tensor(sorted(chosen), device="cpu")
            outputs = dict(self._plain)
            for name, size in sizes.items():
                mask = torch.isin(torch.arange(size, device="cpu"), picked).to(self._plain[name].device)
                sides = _along(mask, self._plain[name].ndim, _axis(self._layers[name]))
                outputs[name] = torch.where(sides, self._other[name], self._plain[name])
            for index, seen in enumerate(self._seen(outputs)[:-1]):
                self._check_still(index, seen, spans[index], chosen)

    def _check_still(self, index: int, seen: Tensor, span: int, chosen: frozenset[int]) -> None:
        before, name = self.order[index], self.order[index + 1]
        axis, base = _axis(self._layers[name]), self._base[index]
        still = [unit for unit in range(seen.shape[axis]) if unit // span not in chosen]
        places = torch.tensor(still, device=seen.device, dtype=torch.long)
        if still and not _same(seen.index_select(axis, places), base.index_select(axis, places)):
            raise BrokenChainError(f"the outputs of '{before}' are mixed or reordered before '{name}'")


def _axis(layer: Layer) -> int:
    """The dimension of units, in a layer's input and in its output."""
    return 1 - len(layer.weight_shape) if layer.convolutional else -1


def _along(mask: Tensor, dimensions: int, axis: int) -> Tensor:
    sides = [1] * dimensions
    sides[axis] = -1
    return mask.reshape(sides)


def _halves(count: int) -> list[frozenset[int]]:
    """For every bit of the numbers below `count`, those that have it and those that do not."""
    bits = range(max(count - 1, 1).bit_length())
    return [
        frozenset(number for number in range(count) if (number >> bit) % 2 == value)
        for bit in bits
        for value in (0, 1)
    ]


def _same(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    scale = float(second.abs().max()) if second.numel() else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=_EQUAL * scale, equal_nan=True)


def active_weights(chain: Chain, kept: Callable[[Layer], Tensor]) -> dict[str, int]:
    """How many weights of each layer lie on a path of kept weights from an input to an output, by layer name.

    Args:
        chain: the layers.
        kept: the mask of a layer's weights, ``(G, m, n)`` without the bias column.
    """
    masks = [unit_matrix(layer, kept(layer)) for layer in chain.layers]
    reached, live = [], None
    for mask, span in zip(masks, chain.spans, strict=True):
        groups, outputs, inputs, _ = mask.shape
        units = mask.new_ones(groups * inputs) if live is None else live.repeat_interleave(span)
        reached.append(units.reshape(groups, 1, inputs, 1))
        live = (mask.any(3) & reached[-1].squeeze(3)).any(2).reshape(groups * outputs)
    counts: dict[str, int] = {}
    needed: Tensor | None = None
    for layer, mask, from_inputs, span in reversed(
        list(zip(chain.layers, masks, reached, chain.spans, strict=True))
    ):
        groups, outputs, inputs, _ = mask.shape
        units = mask.new_ones(groups * outputs) if needed is None else needed
        active = mask & from_inputs & units.reshape(groups, outputs, 1, 1)
        counts[layer.name] = int(active.sum())
        needed = (mask & units.reshape(groups, outputs, 1, 1)).any(3).any(1).reshape(-1, span).any(1)
    return counts
