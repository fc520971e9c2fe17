"""Context points: inputs at which variational inference over functions is to stay uncertain.

A context is a distribution over inputs. All its randomness comes from the generator that it is given, so a draw depends
on the seed and the step alone, and nothing is remembered between steps.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.core.batches import Batch, BatchReader, batches, check_loader
from posthoc_uq.core.devices import host_double, to_device_async
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed

__all__ = [
    "Callback",
    "Context",
    "Corrupted",
    "Mixture",
    "Monochrome",
    "Pool",
    "TrainingBatch",
    "UniformBox",
]

_MAX_KEPT = 100_000  # inputs, or colours, of which a context keeps a random choice
_MAX_KEPT_BYTES = 256 * 2**20
_MAX_PIXELS = 1024  # of an image that are looked at
_BOX_GROWTH = 2.0  # of the box of the training inputs, about its middle


class Context(ABC):
    """A distribution over inputs.

    Attributes:
        needs_data: whether `observe` must see the training inputs once before the first draw.
        points: how many inputs a step it is made for; None for any number.
    """

    needs_data: bool = False
    points: int | None = None

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        """Look at one batch of the training inputs, ``(samples, ...)``; called if the context needs the data."""
        raise NotImplementedError

    def fresh(self) -> Context:
        """A copy for one fit. Fits show data to copies alone, so that one context may serve many fits."""
        return copy.copy(self)

    def identity(self) -> dict[str, Any]:
        """The settings that its draws depend on: its attributes before it has seen data."""
        return dict(vars(self))

    @abstractmethod
    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        """`n` inputs on the device of the batch: a tensor ``(n, ...)``, or any form of inputs that a loader may yield.

        Args:
            n: number of inputs.
            batch: the present minibatch of training data.
            generator: on the CPU, the source of all randomness.
        """


def single_input(batch: Batch) -> Tensor:
    """The input of a batch, where it is a single floating-point tensor.

    Raises:
        PosthocUQError: the model takes several arguments, named ones, or integers.
    """
    argument = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        raise PosthocUQError(
            "This context is for models of one floating-point input; give context=... a callable (n, generator) that "
            "returns the model's inputs."
        )
    return argument


def _check_images(context: str, inputs: Tensor) -> None:
    if inputs.ndim != 4:
        raise PosthocUQError(
            f"context={context!r} is for images (samples, channels, height, width), not for inputs of shape "
            f"{tuple(inputs.shape)}; use context='uniform', a loader of inputs, or a callable (n, generator)."
        )


class TrainingBatch(Context):
    """Inputs of the present minibatch, without repetition as long as there are enough."""

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        inputs = single_input(batch)
        rounds = range(-(-n // len(inputs)))
        order = torch.cat([torch.randperm(len(inputs), generator=generator, device="cpu") for _ in rounds])
        return inputs[to_device_async(order[:n], inputs.device)]


class _Reservoir:
    """A uniform random choice of the rows that it is shown, on the CPU (algorithm R, Vitter 1985)."""

    def __init__(self) -> None:
        self._seen, self._kept = 0, torch.empty(0, device="cpu")

    @property
    def rows(self) -> Tensor:
        return self._kept[: self._seen]

    def add(self, rows: Tensor, generator: torch.Generator) -> None:
        """Show it rows, ``(rows, ...)``. The i-th row ever replaces a kept one with probability (number kept) / i."""
        if not self._seen:
            fitting = _MAX_KEPT_BYTES // max(1, rows[0].numel() * rows.element_size())
            self._kept = rows.new_empty(max(1, min(_MAX_KEPT, fitting)), *rows.shape[1:])
        kept = len(self._kept)
        first = rows[: max(0, kept - self._seen)]
        self._kept[self._seen : self._seen + len(first)] = first
        further = rows[len(first) :]
        self._seen += len(rows)
        if not len(further):
            return
        ranks = torch.arange(self._seen - len(further) + 1, self._seen + 1, dtype=torch.float64, device="cpu")
        places = torch.rand(len(ranks), generator=generator, dtype=torch.float64, device="cpu") * ranks
        chosen = (places < kept).nonzero().flatten()
        # of several rows for one place the last one stays, which plain indexing does not guarantee
        last = torch.full((kept,), -1, device="cpu")
        last.scatter_reduce_(0, places.long()[chosen], chosen, "amax")
        replaced = last >= 0
        self._kept[replaced] = further[last[replaced]]


class Monochrome(Context):
    """Images of one colour: one value for every channel, drawn from all training pixels of that channel, independently
    of the other channels (Rudner et al. 2022, appendix D.8).

    Values are those of the loader, after its normalisation. One pass over the data fills a reservoir of them.
    """

    needs_data = True
    _colours: _Reservoir | None = None

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        _check_images("monochrome", inputs)
        pixels = inputs.detach().flatten(2)
        size = pixels.shape[2]
        if size > _MAX_PIXELS:
            picked = torch.randint(size, (_MAX_PIXELS,), generator=generator, device="cpu")
            pixels = pixels[:, :, picked.to(pixels.device)]
        self._colours = self._colours or _Reservoir()
        self._colours.add(pixels.transpose(1, 2).flatten(0, 1).cpu(), generator)

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        if self._colours is None:
            raise PosthocUQError("A monochrome context draws from training pixels, and has seen none yet.")
        values = self._colours.rows
        size, channels = values.shape
        chosen = torch.randint(size, (channels, n), generator=generator, device="cpu")
        colours = to_device_async(values.T.gather(1, chosen).T.to(like.dtype), like.device)
        # in the present batch's image size: a convolutional network may be trained on images of several sizes
        return colours[:, :, None, None].expand(n, channels, *like.shape[2:]).contiguous()


class Pool(Context):
    """Inputs of a loader of unlabelled data. It is read once a fit, and a uniform random choice is kept on the CPU.

    Args:
        loader: yields inputs, or pairs whose targets are ignored.
    """

    _inputs: _Reservoir | None = None

    def __init__(self, loader: Iterable[Any]) -> None:
        check_loader(loader)
        self._loader = loader

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        if self._inputs is None:
            self._inputs, choice = _Reservoir(), torch.Generator().manual_seed(0)
            with isolated_random_state(0):
                for unlabelled in batches(self._loader, BatchReader(torch.device("cpu"))):
                    self._inputs.add(single_input(unlabelled), choice)
        like, pool = single_input(batch), self._inputs.rows
        drawn = pool[torch.randint(len(pool), (n,), generator=generator, device="cpu")]
        return to_device_async(drawn.to(like.dtype), like.device)


class Corrupted(Context):
    """Images of the present minibatch that are no longer of the data, as in the published configurations of Rudner et
    al. (2022) for FashionMNIST. Each is, in turn and by chance of its own:

    * shifted by at most `padding` pixels in either direction; what comes in is as dark as can be;
    * mirrored left to right, with probability 1/2;
    * solarised with probability `solarised`: values from half of the range on are inverted, so that black stays;
    * given another brightness, a factor in ``1 +- brightness`` (then cut off at the ends of the range);
    * given another contrast: differences from the image's mean by a factor in ``1 +- contrast``, cut off likewise.

    The range of each channel is that of the training images as the loader gives them, so they may be normalised. (The
    configurations also blur, with a deviation of a tenth of a pixel, which changes nothing.)

    Attributes:
        padding: of the crop, in pixels.
        solarised: share of the images that are.
        brightness: largest relative change.
        contrast: likewise.
    """

    needs_data = True
    padding, solarised, brightness, contrast = 4, 0.5, 0.5, 0.5
    _range: tuple[Tensor, Tensor] | None = None

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        _check_images("corrupted", inputs)
        low, high = (extreme(inputs.detach(), dim=(0, 2, 3)).cpu() for extreme in (torch.amin, torch.amax))
        self._range = _covering(self._range, low, high)

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        if self._range is None:
            raise PosthocUQError(
                "A corrupted context takes the range of the training images, and has seen none."
            )
        images = TrainingBatch().draw(n, batch, generator)
        low, high = (
            to_device_async(bound.to(images.dtype), images.device)[:, None, None] for bound in self._range
        )
        width = torch.where(high > low, high - low, torch.ones_like(high))
        unit = ((images - low) / width).clamp(0, 1)
        corrupted = self._tones(self._shifted(unit, generator), generator)
        return low + (high - low) * corrupted

    def _shifted(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crops of the padded images, some of them mirrored."""
        n, channels, height, width = images.shape
        offsets = torch.randint(2 * self.padding + 1, (2, n, 1), generator=generator, device="cpu")
        mirrored = torch.rand(n, 1, generator=generator, device="cpu") < 0.5
        rows, columns = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
        columns = torch.where(mirrored, columns.flip(0), columns)
        down, across = (
            to_device_async(offset, images.device) for offset in (rows + offsets[0], columns + offsets[1])
        )
        padded = torch.nn.functional.pad(images, [self.padding] * 4)
        sample = torch.arange(n, device=images.device)[:, None, None, None]
        channel = torch.arange(channels, device=images.device)[:, None, None]
        return padded[sample, channel, down[:, None, :, None], across[:, None, None, :]]

    def _tones(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Some solarised, all of another brightness and contrast; values from 0 to 1."""
        chances = torch.rand(3, len(images), 1, 1, 1, generator=generator, dtype=torch.float64, device="cpu")
        inverted = to_device_async(chances[0] < self.solarised, images.device)
        brightness, contrast = (
            to_device_async((1 + change * (2 * chance - 1)).to(images.dtype), images.device)
            for change, chance in ((self.brightness, chances[1]), (self.contrast, chances[2]))
        )
        images = torch.where(inverted & (images >= 0.5), 1 - images, images)
        images = (images * brightness).clamp(0, 1)
        middle = images.mean(dim=(1, 2, 3), keepdim=True)
        return (middle + contrast * (images - middle)).clamp(0, 1)


def _covering(bounds: tuple[Tensor, Tensor] | None, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds that cover the given ones, if there are any, and others."""
    return (low, high) if bounds is None else (torch.minimum(low, bounds[0]), torch.maximum(high, bounds[1]))


class UniformBox(Context):
    """Uniform in a box, one interval a dimension of the input.

    Args:
        low: lower bounds, a number or a tensor that broadcasts to one input; by default the box is that of the training
            inputs, twice as large about its middle.
        high: upper bounds, likewise.
    """

    def __init__(self, low: float | Tensor | None = None, high: float | Tensor | None = None) -> None:
        if (low is None) != (high is None):
            raise PosthocUQError("A uniform context needs both bounds, or none: low=... and high=....")
        self.needs_data = low is None
        self._bounds: tuple[Tensor, Tensor] | None = None
        if low is not None and high is not None:
            smallest, largest = self._bounds = host_double(low), host_double(high)
            if not bool((torch.isfinite(largest - smallest) & (smallest < largest)).all()):
                raise PosthocUQError(
                    f"A uniform context needs finite bounds low < high, not {low} and {high}."
                )

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        inputs = host_double(inputs.detach())
        if self._bounds is not None and self._bounds[0].shape != inputs.shape[1:]:
            raise PosthocUQError(
                f"context='uniform' takes its box from training inputs of one shape, and after inputs of shape "
                f"{tuple(self._bounds[0].shape)} the loader gave one of {tuple(inputs.shape[1:])}; give the bounds, "
                f"UniformBox(low, high), or another context."
            )
        self._bounds = _covering(self._bounds, inputs.amin(0), inputs.amax(0))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The lower and upper bounds of the box, in float64."""
        if self._bounds is None:
            raise PosthocUQError(
                "A uniform context without bounds takes those of the training inputs, and saw none."
            )
        low, high = self._bounds
        if not self.needs_data:
            return low, high
        middle, half = (low + high) / 2, (high - low) / 2 * _BOX_GROWTH
        return middle - half, middle + half

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        low, high = self.bounds()
        numbers = torch.rand(n, *like.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
        return to_device_async((low + (high - low) * numbers).to(like.dtype), like.device)


class Callback(Context):
    """The inputs that a function ``(n, generator)`` gives: a tensor ``(n, ...)``, a tuple of the model's arguments, or
    a mapping of named ones.
    """

    def __init__(self, function: Callable[[int, torch.Generator], Any]) -> None:
        self._function = function

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        return self._function(n, generator)


class Mixture(Context):
    """Fixed shares of several contexts; Rudner et al. take half training inputs, half monochrome images.

    Args:
        parts: pairs of a share and any form of context that `resolve_context` takes; shares need not add up to 1.
            Where all are whole numbers they are counts, whose sum is the number of context points unless another is
            asked for.
    """

    def __init__(self, parts: Sequence[tuple[float, Any]]) -> None:
        if not parts or any(not 0 < float(share) < float("inf") for share, _ in parts):
            raise PosthocUQError(
                "A mixture of contexts is a list of pairs (share, context) with positive shares."
            )
        if all(isinstance(share, Integral) for share, _ in parts):
            self.points = sum(int(share) for share, _ in parts)
        total = sum(float(share) for share, _ in parts)
        self._shares = [float(share) / total for share, _ in parts]
        self._contexts = [resolve_context(context) for _, context in parts]
        self.needs_data = any(context.needs_data for context in self._contexts)

    def fresh(self) -> Context:
        fresh = copy.copy(self)
        fresh._contexts = [context.fresh() for context in self._contexts]
        return fresh

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        for context in self._contexts:
            if context.needs_data:
                context.observe(inputs, generator)

    def counts(self, n: int) -> list[int]:
        """How many of `n` inputs each part gives, by the method of largest remainders."""
        exact = [share * n for share in self._shares]
        counts = [int(number) for number in exact]
        order = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
        for index in order[: n - sum(counts)]:
            counts[index] += 1
        return counts

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        parts = [
            context.draw(count, batch, generator)
            for context, count in zip(self._contexts, self.counts(n), strict=True)
            if count
        ]
        like = next((part for part in parts if isinstance(part, Tensor)), None)
        if like is None or not all(
            isinstance(part, Tensor) and part.shape[1:] == like.shape[1:] for part in parts
        ):
            raise PosthocUQError(
                "The parts of a mixture of contexts must all give one tensor of equal input shapes."
            )
        device = single_input(batch).device
        return torch.cat([part.to(device) for part in parts])


_BY_NAME: dict[str, type[Context]] = {
    "monochrome": Monochrome,
    "uniform": UniformBox,
    "batch": TrainingBatch,
    "corrupted": Corrupted,
}


def default_context(batch: Batch, corrupted: bool = False) -> Context:
    """The context of Rudner et al.: half training inputs and half monochrome images, or a uniform box for vectors. With
    `corrupted` two training images beside fourteen corrupted ones.
    """
    if single_input(batch).ndim != 4:
        return UniformBox()
    if corrupted:
        return Mixture([(2, TrainingBatch()), (14, Corrupted())])
    return Mixture([(0.5, TrainingBatch()), (0.5, Monochrome())])


def resolve_context(context: Any) -> Context:
    """A `Context` from any form that a user may give: a `Context`, ``"monochrome"``, ``"uniform"``, ``"batch"``,
    ``"corrupted"``, a list of pairs ``(share, context)`` or ``(count, context)``, a callable ``(n, generator)``, a
    tensor of inputs, or a loader.

    Raises:
        PosthocUQError: it is none of these.
    """
    if isinstance(context, Context):
        return context.fresh()
    if isinstance(context, str):
        if context not in _BY_NAME:
            raise PosthocUQError(
                f"context must be one of {sorted(_BY_NAME)}, a loader or tensor of inputs, a callable (n, generator), "
                f"a list of pairs (share, context), or a Context, not {context!r}."
                f"{did_you_mean(context, _BY_NAME)}"
            )
        return _BY_NAME[context]()
    if callable(context):
        if not _takes_two(context):
            raise PosthocUQError(
                "A callable context takes two arguments, (n, generator): how many inputs to give, and a "
                "torch.Generator."
            )
        return Callback(cast(Any, context))
    if isinstance(context, Tensor):
        if context.ndim == 0 or not len(context):
            raise PosthocUQError(
                f"A tensor as context holds inputs (inputs, ...), not {tuple(context.shape)}."
            )
        return Pool([context])
    if isinstance(context, (list, tuple)) and context:
        parts = cast(Sequence[Any], context)
        if all(_is_share(part) for part in parts):
            return Mixture(parts)
        if any(isinstance(part, str) for part in parts):
            raise PosthocUQError(
                f"A mixture of contexts is a list of pairs (share, context), for instance [(0.5, 'batch'), (0.5, "
                f"'monochrome')], not {context!r}."
            )
    return Pool(context)


def _is_share(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and len(cast(Any, part)) == 2 and isinstance(part[0], (int, float))


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments; True where its signature is unknown."""
    try:
        inspect.signature(function).bind(1, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def shows(context: Context, seed: int) -> Callable[[int, Batch], None] | None:
    """What shows a context the inputs of a batch of training data, by its number; None for one that needs none.

    Raises:
        NonFiniteError: inputs are not finite.
        PosthocUQError: the context does not work for this kind of inputs.
    """
    if not context.needs_data:
        return None
    generator = torch.Generator().manual_seed(mixed_seed(seed, 1))

    def show(index: int, batch: Batch) -> None:
        shown = single_input(batch)
        if not bool(torch.isfinite(shown).all()):
            raise NonFiniteError(
                f"Batch {index}: the inputs are not finite. Check the input data for NaN or infinity."
            )
        context.observe(shown, generator)

    return show
