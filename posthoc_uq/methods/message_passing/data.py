"""What message passing needs of data and model: features and targets of one pass, and a sequential model as stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double, has_double, host_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError
from posthoc_uq.core.outputs import chosen_in
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import feature_rows
from posthoc_uq.curvature.sweep import show
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods.contexts import single_input
from posthoc_uq.methods.message_passing.network import Activation, Flat, Pool, Stage, Weighted
from posthoc_uq.methods.message_passing.windows import Pair, Windows
from posthoc_uq.methods.task import Task

# The data of message passing: one pass over the loader that keeps what enters the layers, and the targets.


class Examples(NamedTuple):
    """All data.

    Attributes:
        inputs: features ``(N, I)`` without the bias's 1, or the model's inputs ``(N, ...)``.
        targets: values ``(N, J)`` in float64, or labels ``(N,)``.
        outputs: numbers that the model gives for a sample.
    """

    inputs: Tensor
    targets: Tensor
    outputs: int


class _Kept:
    """Watches a pass and keeps inputs and targets."""

    def __init__(self, likelihood: Likelihood, layer: Layer | None) -> None:
        self._likelihood, self._layer = likelihood, layer
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.outputs = 0

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Keep a batch; see `posthoc_uq.curvature.sweep.Observer`."""
        index, outputs = len(self.inputs), recording.outputs.detach()
        if batch.targets is None:
            raise PosthocUQError(
                "method='message_passing' learns from the targets, and the loader gives none; pass a loader of "
                "(inputs, targets)."
            )
        targets = batch.targets
        checks.add(torch.isfinite(outputs).all(), lambda finite: _require(finite, index))
        try:
            fault = self._likelihood.fault(outputs, targets)
        except PosthocUQError as error:
            raise PosthocUQError(f"Batch {index}: {error}") from None
        if self._likelihood.softmax and targets.is_floating_point():
            raise PosthocUQError(
                f"method='message_passing' learns from labels that are class indices, and batch {index} has soft ones "
                f"of shape {tuple(targets.shape)}; take a Laplace method for them."
            )
        if fault is not None:
            checks.add(fault, lambda faulty: self._refuse(faulty, outputs, targets, index))
        samples, layer = keys.shape[0], self._layer
        if layer is None:
            rows = single_input(batch).detach().clone()
        else:
            rows = feature_rows(recording.watched, layer, samples)
            rows = rows if layer.bias is None else rows[:, :-1]
        self.outputs = outputs[0].numel()
        self.inputs.append(rows)
        self.targets.append(targets.detach().reshape(samples, -1))

    def _refuse(self, faulty: Tensor, outputs: Tensor, targets: Tensor, index: int) -> None:
        if bool(faulty):
            try:
                self._likelihood.check(outputs, targets)
            except PosthocUQError as error:
                raise PosthocUQError(f"Batch {index}: {error}") from None


def _require(finite: Tensor, index: int) -> None:
    if not bool(finite):
        raise NonFiniteError(
            f"Batch {index}: the model's outputs are not finite. Check the input data and the model's weights for NaN "
            f"or infinity."
        )


def examples_of(task: Task, layer: Layer | None) -> Examples:
    """All data of a fit, by one pass.

    Args:
        task: the fit.
        layer: whose inputs are kept; None for those of the model.

    Raises:
        PosthocUQError: there are no targets, or they do not fit the outputs.
        NonFiniteError: outputs are not finite.
    """
    settings, kept = task.settings, _Kept(task.settings.likelihood, layer)
    capture = Capture(task.model)
    capture.watched = layer
    with isolated_random_state(settings.seed):
        show(capture, task.loader, settings, [kept])
    targets = torch.cat(kept.targets)
    if settings.likelihood.noise_variance is None:
        targets = targets[:, 0].long()
    else:
        targets = as_double(targets)
    inputs = torch.cat(kept.inputs)
    if not has_double(inputs.device):  # all messages are in float64, and where they are their data must be
        inputs = inputs.cpu()
    targets = targets.to(inputs.device)
    if layer is not None and layer.bias is None:
        speaking = inputs.ne(0).any(1)  # without a bias, the output for an input of zeros is known
        if bool(speaking.any()):
            inputs, targets = inputs[speaking], targets[speaking]
    return Examples(inputs, targets, kept.outputs)


class Units:
    """Inputs and values of mean 0 and deviation 1, and messages to weights in these units as those to the weights.

    Attributes:
        shift: ``(I,)``, subtracted from the inputs.
        spread: ``(I,)``, by which they are divided.
        value_shift: ``(J,)``, subtracted from the targets of a regression.
        value_spread: ``(J,)``, by which they are divided.
    """

    def __init__(self, shift: Tensor, spread: Tensor, value_shift: Tensor, value_spread: Tensor) -> None:
        self.shift, self.spread = shift, spread
        self.value_shift, self.value_spread = value_shift, value_spread

    @classmethod
    def of(cls, examples: Examples, bias: bool, shift: Tensor | None = None) -> Units:
        """Those of some data.

        Args:
            examples: features and targets.
            bias: whether the layer has one, so that means can be subtracted.
            shift: to subtract from the inputs; their means if None.
        """
        total = as_double(examples.inputs.new_zeros(()))
        mean = torch.stack([as_double(part).sum(0) for part in examples.inputs.split(4096)]).sum(0)
        mean = mean / len(examples.inputs) if shift is None else shift.to(total)
        mean = mean if bias else torch.zeros_like(mean)
        squares = [(as_double(part) - mean).square().sum(0) for part in examples.inputs.split(4096)]
        variance = torch.stack(squares).sum(0) / len(examples.inputs)
        usual = variance.mean().clamp(min=1e-30)
        spread = variance.clamp(
            min=1e-6 * usual
        ).sqrt()  # an input that never changes is no reason for a division by 0
        center, scale = total.new_zeros(examples.outputs), total.new_ones(examples.outputs)
        if examples.targets.is_floating_point():
            center = examples.targets.mean(0) if bias else center
            width = (examples.targets - center).square().mean(0).sqrt()
            scale = torch.where(width > 0, width, torch.ones_like(width))
        return cls(mean, spread, center, scale)

    def inputs(self, rows: Tensor) -> Tensor:
        """In these units, in float64."""
        return (as_double(rows) - self.shift) / self.spread

    def targets(self, targets: Tensor) -> Tensor:
        """In these units; labels stay."""
        return (targets - self.value_shift) / self.value_spread if targets.is_floating_point() else targets

    def factors(self, bias: bool) -> Tensor:
        """By which weights in these units are multiplied to become those of the layer, ``(J, n)``."""
        own = self.value_spread.unsqueeze(1) / self.spread
        return torch.cat([own, self.value_spread.unsqueeze(1)], 1) if bias else own

    def offset(self, bias: bool) -> Tensor:
        """What is added to them then, ``(J, n)``."""
        zero = torch.zeros_like(self.factors(False))
        return torch.cat([zero, self.value_shift.unsqueeze(1)], 1) if bias else zero


class Batches(Sequence[tuple[Tensor, Tensor]]):
    """Examples in a random order as batches, each in float64 when it is asked for.

    Args:
        examples: the data.
        units: of the batches, or None to leave them as they are.
        size: of a batch.
        seed: of the order.
    """

    def __init__(self, examples: Examples, units: Units | None, size: int, seed: int) -> None:
        self._examples, self._units = examples, units
        generator = torch.Generator().manual_seed(seed % 2**63)
        order = torch.randperm(len(examples.inputs), generator=generator, device="cpu")
        self._parts = order.to(examples.inputs.device).split(size)

    @property
    def samples(self) -> int:
        """In all batches."""
        return len(self._examples.inputs)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._parts[index]
        inputs, targets = self._examples.inputs[part], self._examples.targets[part]
        if self._units is None:
            return as_double(inputs), targets
        return self._units.inputs(inputs), self._units.targets(targets)


def noise_of(likelihood: Likelihood, units: Units | None) -> Tensor:
    """The noise variance of a regression, ``(J,)`` or one number, in these units."""
    assert likelihood.noise_variance is not None
    noise = host_double(likelihood.noise_variance)
    return noise if units is None else noise.to(units.value_spread) / units.value_spread.square()


# A sequential model as a chain of stages for message passing; BatchNorm is folded into the layer before it.

_SUPPORTED = (
    "Linear, Conv2d, ReLU, LeakyReLU, MaxPool2d (stride = kernel, no padding), AvgPool2d (no padding), "
    "AdaptiveAvgPool2d(1), Flatten, Dropout, Identity, BatchNorm after a Linear or Conv2d"
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)


@dataclass(frozen=True)
class Fold:
    """How a layer's weights become those with the BatchNorm after it: ``W' = factor W``, ``b' = factor b + offset``.

    Attributes:
        factor: ``(outputs,)`` in float64.
        offset: likewise; of a layer without a bias it is a constant of the network.
    """

    factor: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Chain:
    """A model as stages.

    Attributes:
        stages: in their order.
        layers: by stage, the layer of the model.
        folds: by stage, where a BatchNorm follows.
    """

    stages: list[Stage]
    layers: dict[int, Layer]
    folds: dict[int, Fold]


def chain_of(model: nn.Module, layers: Mapping[str, Layer]) -> Chain:
    """The stages of a model.

    Args:
        model: `torch.nn.Sequential`, which may hold others.
        layers: those with a posterior, which must be all.

    Raises:
        UnsupportedLayerError: the model is no chain, or has modules that messages cannot pass; names all of them.
        PosthocUQError: a weighted layer is to have no posterior.
    """
    if type(model) is not nn.Sequential:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' needs a torch.nn.Sequential, not a {type(model).__name__}; "
            f"write the model as one, or take layers='last'."
        )
    if chosen_in(model) is not None:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' cannot pass output={chosen_in(model)}, which is applied to what "
            f"the model returns; take layers='last'."
        )
    chain, faults = Chain([], {}, {}), list[str]()
    for path, module in _flattened(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fault = _add_layer(chain, path, module, layers)
        elif isinstance(module, _NORMS):
            fault = _fold(chain, module)
        else:
            fault = _add(chain, module)
        faults += [f"'{path}' ({type(module).__name__}{fault})"] if fault is not None else []
    if faults:
        raise UnsupportedLayerError(
            f"Messages cannot pass {', '.join(faults)}; they pass {_SUPPORTED}. Take layers='last' for a posterior of "
            f"the last layer alone."
        )
    left = sorted(set(layers) - {layer.name for layer in chain.layers.values()})
    if left or not chain.layers:
        raise PosthocUQError(
            f"layers='all' of method='message_passing' treats every weighted layer once, which leaves out {left}; use "
            f"each module once, and select none of them."
        )
    return chain


def _flattened(model: nn.Sequential, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():  # pyright: ignore[reportPrivateUsage]  # also one that is used twice
        here = f"{path}.{name}" if path else name
        if type(module) is nn.Sequential:
            yield from _flattened(module, here)
        elif module is not None:
            yield here, module


def _add_layer(
    chain: Chain, path: str, module: nn.Linear | nn.Conv2d, layers: Mapping[str, Layer]
) -> str | None:
    """Add a weighted layer; returns what is wrong with it, as a part of a sentence."""
    layer = layers.get(path)
    if type(module) not in (nn.Linear, nn.Conv2d):
        return ", a subclass of a known layer"
    if layer is None:
        return ", which gets no posterior; select all layers"
    if any(own.name == layer.name for own in chain.layers.values()):
        return ", which is used twice"
    windows = None
    if isinstance(module, nn.Conv2d):
        padding: Any = module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            return f" with padding={padding!r}, padding_mode={module.padding_mode!r}"
        windows = Windows(
            _pair(module.kernel_size),
            _pair(module.stride),
            _pair(padding),
            _pair(module.dilation),
            module.groups,
        )
    place = len(chain.stages)
    inputs = layer.inputs - (layer.bias is not None)
    chain.stages.append(Weighted(path, inputs, layer.outputs, windows, bias=layer.bias is not None))
    chain.layers[place] = layer
    return None


def _fold(chain: Chain, module: nn.BatchNorm1d | nn.BatchNorm2d) -> str | None:
    place = len(chain.stages) - 1
    stage = chain.stages[place] if chain.stages else None
    if not isinstance(stage, Weighted) or place in chain.folds:
        return ", not directly after a Linear or Conv2d"
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None:
        return " without running statistics"
    factor = (as_double(variance) + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * as_double(module.weight.detach())
    offset = -as_double(mean) * factor
    if module.bias is not None:
        offset = offset + as_double(module.bias.detach())
    if not bool((factor.abs() > 1e-12).all()):
        return " with a weight of 0"
    chain.folds[place] = Fold(factor, offset)
    if not stage.bias:
        chain.stages[place] = Weighted(
            stage.name, stage.inputs, stage.outputs, stage.windows, bias=False, offset=offset
        )
    return None


def _add(chain: Chain, module: nn.Module) -> str | None:
    """Add a stage without weights; returns what is wrong with it, as a part of a sentence."""
    stage: Stage
    if isinstance(module, (nn.Identity, *_DROPOUTS)):
        return None
    if isinstance(module, nn.Flatten):
        if (module.start_dim, module.end_dim) != (1, -1):
            return f" from {module.start_dim} to {module.end_dim}"
        chain.stages.append(Flat())
        return None
    if type(module) is nn.ReLU:
        stage = Activation(0.0)
    elif type(module) is nn.LeakyReLU:
        if not 0 <= module.negative_slope <= 1:
            return f" with the slope {module.negative_slope}"
        stage = Activation(float(module.negative_slope))
    else:
        pool = _pool(module)
        if isinstance(pool, str):
            return pool
        stage = pool
    if not chain.layers:
        return ", before the first weighted layer"
    chain.stages.append(stage)
    return None


def _pool(module: nn.Module) -> Pool | str:
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Pool("average") if _pair(module.output_size) == (1, 1) else f" of size {module.output_size}"
    if not isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
        return ""
    kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
    if padding != (0, 0) or module.ceil_mode:
        return " with padding or ceil_mode"
    if isinstance(module, nn.AvgPool2d):
        if module.divisor_override is not None:
            return " with divisor_override"
        return Pool("average", Windows(kernel, stride))
    if stride != kernel or _pair(module.dilation) != (1, 1):
        return " whose windows overlap or are dilated"
    return Pool("max", Windows(kernel, stride))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def output_counts(stages: list[Stage], shape: tuple[int, ...]) -> dict[int, int]:
    """Outputs of every weighted stage with all their positions, for inputs ``(...)`` of this shape.

    Raises:
        PosthocUQError: a layer gets inputs that it cannot take.
    """
    counts: dict[int, int] = {}
    for index, stage in enumerate(stages):
        if isinstance(stage, Weighted):
            spatial = stage.windows is not None
            if len(shape) != (3 if spatial else 1):
                raise PosthocUQError(
                    f"Layer '{stage.name}' gets inputs of shape {shape} in message passing; a Linear takes one row a "
                    f"sample (put a Flatten before it), a Conv2d images of channels, height and width."
                )
            sides = () if stage.windows is None else stage.windows.size(shape[1], shape[2])
            shape = (stage.groups * stage.outputs, *sides)
            counts[index] = prod(shape) // stage.groups
        elif isinstance(stage, Pool):
            shape = (shape[0], *stage.over(shape).size(shape[1], shape[2]))
        elif isinstance(stage, Flat):
            shape = tuple([prod(shape)])
    if len(shape) != 1:
        raise PosthocUQError(
            f"The model gives outputs of shape {shape} for a sample; message passing needs one row, so end it with a "
            f"Flatten or a Linear."
        )
    return counts


def folded_parameters(
    layer: Layer, fold: Fold | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """A layer's trained weights ``(G, I, J)`` and biases ``(G, J)`` with what is folded into them, in float64."""
    weight = as_double(parameters[layer.weight].detach())
    bias = None if layer.bias is None else as_double(parameters[layer.bias].detach())
    matrix = layer.to_matrix(weight, None).transpose(1, 2)
    own = None if bias is None else bias.reshape(layer.groups, layer.outputs)
    if fold is not None:
        factor, offset = (part.reshape(layer.groups, layer.outputs) for part in (fold.factor, fold.offset))
        matrix = matrix * factor.unsqueeze(1)
        own = None if own is None else own * factor + offset
    return matrix, own


def unfolding(layer: Layer, fold: Fold | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """By what folded weights are multiplied to become the layer's, and what is added to them then, ``(G, J, 1)`` and
    ``(G, J)`` (the latter to biases alone).
    """
    shape = layer.groups, layer.outputs
    if fold is None:
        one = as_double(torch.ones(shape, device=device))
        return one.unsqueeze(2), torch.zeros_like(one)
    factor = fold.factor.reciprocal()
    return factor.reshape(*shape, 1), (-fold.offset * factor).reshape(shape)
