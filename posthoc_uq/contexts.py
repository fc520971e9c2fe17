"""Context points: inputs at which a method in function space says what it does *not* know.

A context is a distribution over inputs. Everything that it draws comes from the generator it is given, so that a draw
is a function of a seed and a step alone, and nothing is remembered between steps.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import host_double, sent
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch, BatchReader, batches, check_loader
from posthoc_uq.randomness import isolated_random_state, mixed_seed
from posthoc_uq.values import COUNT, POSITIVE, SEED

__all__ = [
    "Callback",
    "Context",
    "Mixture",
    "Monochrome",
    "Pool",
    "TrainingBatch",
    "UniformBox",
]

Draw = Callable[[int, torch.Generator], Any]

PIXELS = 100_000  # values a channel that `Monochrome` keeps
POOL = 10_000  # inputs that `Pool` keeps ...
POOL_BYTES = 256 * 2**20  # ... and what they may take
_PIXELS_AT_ONCE = 1024  # values of one channel of one image that are looked at
_EXPAND = 2.0


class Context(ABC):
    """A distribution over inputs.

    Attributes:
        needs_data: whether `observe` must see the training inputs once before the first draw.
    """

    needs_data: bool = False

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        """Look at one batch of the training inputs, ``(samples, ...)``; asked of those that need the data."""
        raise NotImplementedError

    def fresh(self) -> Context:
        """A context of the same settings that has seen no data: what a fit uses, so that one context may serve many."""
        return self

    def identity(self) -> dict[str, Any]:
        """What its draws depend on beside the data: its attributes before it has seen any."""
        return dict(vars(self.fresh()))

    @abstractmethod
    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        """`n` inputs, on the device of the batch: a tensor ``(n, ...)``, or whatever a loader may yield as inputs.

        Args:
            n: how many.
            batch: the present minibatch of training data.
            generator: on the CPU; all randomness comes from it.
        """


class TrainingBatch(Context):
    """Inputs of the present minibatch, without repetition as long as it has enough."""

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        inputs = single_input(batch)
        order = torch.cat(
            [
                torch.randperm(len(inputs), generator=generator, device="cpu")
                for _ in range(-(-n // len(inputs)))
            ]
        )
        return inputs[sent(order[:n], inputs.device)]


class Monochrome(Context):
    """Images of one colour: one value for every channel, drawn from all training pixels of that channel, independently
    of the other channels (Rudner et al. 2022, appendix D.8).

    Values are taken as the loader gives them, after its normalisation. A reservoir of them is kept, filled in one pass.

    Args:
        kept: values of each channel in the reservoir.
    """

    needs_data = True

    def __init__(self, kept: int = PIXELS) -> None:
        self._kept, self._seen = COUNT("kept", kept), 0
        self.values = torch.empty(0, 0, device="cpu")

    def fresh(self) -> Context:
        return Monochrome(self._kept)

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        if inputs.ndim != 4:
            raise PosthocUQError(
                f"context='monochrome' is for images (samples, channels, height, width), not for inputs of shape "
                f"{tuple(inputs.shape)}; use context='uniform', a loader of inputs, or a callable (n, generator)."
            )
        pixels = inputs.detach().flatten(2)
        size = pixels.shape[2]
        if size > _PIXELS_AT_ONCE:
            pixels = pixels[
                :,
                :,
                torch.randint(size, (_PIXELS_AT_ONCE,), generator=generator, device="cpu").to(pixels.device),
            ]
        values = pixels.transpose(0, 1).flatten(1).cpu()  # (channels, samples * positions)
        if self._seen == 0:
            self.values = values.new_empty(len(values), 0)
        # Algorithm R (Vitter 1985), many values at once: the i-th value ever seen takes the place of a kept one with
        # probability kept / i.
        room = min(self._kept - self.values.shape[1], values.shape[1])
        self.values = torch.cat([self.values, values[:, :room]], dim=1)
        rest = values[:, room:]
        self._seen += values.shape[1]
        if not rest.numel():
            return
        ranks = torch.arange(
            self._seen - rest.shape[1] + 1, self._seen + 1, dtype=torch.float64, device="cpu"
        )
        for channel, own in zip(self.values, rest, strict=True):
            places = (
                torch.rand(len(ranks), generator=generator, dtype=torch.float64, device="cpu") * ranks
            ).long()
            taken = (places < self._kept).nonzero().flatten()
            # Of several values for one place the last one stays, which indexing alone does not promise.
            final = torch.full((self._kept,), -1, device="cpu")
            final.scatter_reduce_(0, places[taken], taken, "amax")
            filled = final >= 0
            channel[filled] = own[final[filled]]

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        channels, kept = self.values.shape
        if kept == 0:
            raise PosthocUQError("A monochrome context draws from training pixels, and has seen none yet.")
        places = torch.randint(kept, (channels, n), generator=generator, device="cpu")
        colours = sent(self.values.gather(1, places).T.to(like.dtype), like.device)
        # The present batch's size: a convolutional network may be trained on images of several.
        return colours[:, :, None, None].expand(n, channels, *like.shape[2:]).contiguous()


class UniformBox(Context):
    """Uniform in a box, one interval a dimension of the input.

    Args:
        low: lower bounds, a number or a tensor that broadcasts to one input; by default the smallest training inputs,
            moved out.
        high: upper bounds, likewise.
        expand: the box of the training inputs grows about its middle by this factor; given bounds stay as they are.
    """

    def __init__(
        self,
        low: float | Tensor | None = None,
        high: float | Tensor | None = None,
        expand: float = _EXPAND,
    ) -> None:
        if (low is None) != (high is None):
            raise PosthocUQError("A uniform context needs both bounds, or none: low=... and high=....")
        self.needs_data = low is None
        self._expand: float = POSITIVE("expand", expand)
        self._bounds: tuple[Tensor, Tensor] | None = None
        if low is not None and high is not None:
            self._bounds = host_double(low), host_double(high)
            if not bool(
                (
                    torch.isfinite(self._bounds[1] - self._bounds[0]) & (self._bounds[0] < self._bounds[1])
                ).all()
            ):
                raise PosthocUQError(
                    f"A uniform context needs finite bounds low < high, not {low} and {high}."
                )

    def fresh(self) -> Context:
        return UniformBox(expand=self._expand) if self.needs_data else self

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        if not self.needs_data:
            return
        inputs = host_double(inputs.detach())
        low, high = inputs.amin(0), inputs.amax(0)
        if self._bounds is not None and self._bounds[0].shape != low.shape:
            raise PosthocUQError(
                f"context='uniform' takes its box from training inputs of one shape, and after inputs of shape "
                f"{tuple(self._bounds[0].shape)} the loader gave one of {tuple(low.shape)}; give the bounds, "
                f"UniformBox(low, high), or another context."
            )
        if self._bounds is not None:
            low, high = torch.minimum(low, self._bounds[0]), torch.maximum(high, self._bounds[1])
        self._bounds = low, high

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The box that is drawn from, in float64."""
        if self._bounds is None:
            raise PosthocUQError(
                "A uniform context without bounds takes those of the training inputs, and saw none."
            )
        low, high = self._bounds
        if not self.needs_data:
            return low, high
        middle, half = (low + high) / 2, (high - low) / 2 * self._expand
        return middle - half, middle + half

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        low, high = self.bounds()
        numbers = torch.rand(n, *like.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
        return sent((low + (high - low) * numbers).to(like.dtype), like.device)


class Pool(Context):
    """Inputs of a loader of unlabelled data: a uniform choice of them is read once and kept, on the CPU.

    Args:
        loader: yields inputs, or pairs whose targets are left aside.
        kept: inputs to keep, at most `POOL_BYTES` of them.
        batch_to_inputs: as in `fit`.
        seed: of the choice.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        kept: int = POOL,
        batch_to_inputs: Callable[[Any], Any] | None = None,
        seed: int = 0,
    ) -> None:
        check_loader(loader)
        self._loader, self._kept = loader, COUNT("kept", kept)
        self._seed: int = SEED("seed", seed)
        self._reader = BatchReader(torch.device("cpu"), batch_to_inputs)
        self._inputs: Tensor | None = None

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_inputs"}

    def _read(self) -> Tensor:
        if self._inputs is not None:
            return self._inputs
        generator = torch.Generator().manual_seed(mixed_seed(self._seed))
        keys, inputs, most = torch.empty(0, dtype=torch.float64, device="cpu"), list[Tensor](), self._kept
        with isolated_random_state(self._seed):
            for batch in batches(self._loader, self._reader):
                own = single_input(batch)
                fresh = torch.rand(len(own), generator=generator, dtype=torch.float64, device="cpu")
                most = max(1, min(self._kept, POOL_BYTES // max(1, own[0].numel() * own.element_size())))
                keys, inputs = torch.cat([keys, fresh]), [*inputs, *own.unbind()]
                if (
                    len(keys) > 2 * most
                ):  # those with the smallest keys stay: each input is as likely as any other
                    keys, inputs = _smallest(keys, inputs, most)
            keys, inputs = _smallest(keys, inputs, min(len(keys), most))
        self._inputs = torch.stack(inputs)
        return self._inputs

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        pool = self._read()
        like = single_input(batch)
        drawn = pool[torch.randint(len(pool), (n,), generator=generator, device="cpu")]
        return sent(drawn.to(like.dtype), like.device)


def _smallest(keys: Tensor, inputs: list[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    kept = keys.topk(count, largest=False).indices.sort().values
    return keys[kept], [inputs[index].clone() for index in kept.tolist()]


class Callback(Context):
    """Whatever a function ``(n, generator)`` gives: a tensor ``(n, ...)``, a tuple of the model's arguments, or a
    mapping of named ones.
    """

    def __init__(self, function: Draw) -> None:
        self._function = function

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Any:
        return self._function(n, generator)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments; where nobody can tell, it is tried."""
    try:
        inspect.signature(function).bind(1, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


class Mixture(Context):
    """Fixed shares of several contexts; the paper takes half training inputs, half monochrome images.

    Args:
        parts: pairs of a share and anything that `resolve_context` takes; shares need not add up to 1.
    """

    def __init__(self, parts: Sequence[tuple[float, Any]]) -> None:
        if not parts or any(not 0 < float(share) < float("inf") for share, _ in parts):
            raise PosthocUQError(
                "A mixture of contexts is a list of pairs (share, context) with positive shares."
            )
        total = sum(float(share) for share, _ in parts)
        self._shares = [float(share) / total for share, _ in parts]
        self._contexts = [resolve_context(context) for _, context in parts]
        self.needs_data = any(context.needs_data for context in self._contexts)

    def fresh(self) -> Context:
        return Mixture(
            [(share, part.fresh()) for share, part in zip(self._shares, self._contexts, strict=True)]
        )

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        for context in self._contexts:
            if context.needs_data:
                context.observe(inputs, generator)

    def counts(self, n: int) -> list[int]:
        """How many of `n` inputs each part gives; what rounding leaves goes to the largest remainders."""
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


def single_input(batch: Batch) -> Tensor:
    """The one floating-point tensor that is a batch's input.

    Raises:
        PosthocUQError: the model takes several arguments, named ones, or integers.
    """
    only = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    if not isinstance(only, Tensor) or not only.is_floating_point():
        raise PosthocUQError(
            "This context is for models of one floating-point input; give context=... a callable (n, generator) that "
            "returns the model's inputs."
        )
    return only


def __dir__() -> list[str]:
    return sorted(__all__)


def default_context(batch: Batch) -> Context:
    """What the paper takes: half training inputs and half monochrome images, or a uniform box for vectors."""
    inputs = single_input(batch)
    return Mixture([(0.5, TrainingBatch()), (0.5, Monochrome())]) if inputs.ndim == 4 else UniformBox()


def resolve_context(context: Any) -> Context:
    """A `Context` from what a user may give: one of these, ``"monochrome"``, ``"uniform"``, ``"batch"``, a list of
    pairs ``(share, context)``, a callable ``(n, generator)``, a tensor of inputs, or a loader.

    Raises:
        PosthocUQError: it is nothing of these.
    """
    named: dict[str, type[Context]] = {
        "monochrome": Monochrome,
        "uniform": UniformBox,
        "batch": TrainingBatch,
    }
    if isinstance(context, Context):
        return context.fresh()
    if isinstance(context, str):
        if context not in named:
            raise PosthocUQError(
                f"context must be one of {sorted(named)}, a loader or tensor of inputs, a callable (n, generator), a "
                f"list of pairs (share, context), or a Context, not {context!r}."
            )
        return named[context]()
    if isinstance(context, (list, tuple)) and context and all(_is_share(part) for part in cast(Any, context)):
        return Mixture(cast(Any, context))
    if callable(context):
        if not _takes_two(context):
            raise PosthocUQError(
                "A callable context takes two arguments, (n, generator): how many inputs to give, and a "
                "torch.Generator."
            )
        return Callback(cast(Draw, context))
    if isinstance(context, Tensor):
        if context.ndim == 0 or not len(context):
            raise PosthocUQError(
                f"A tensor as context holds inputs (inputs, ...), not {tuple(context.shape)}."
            )
        return Pool([context], kept=len(context))
    if isinstance(context, (list, tuple)) and any(isinstance(part, str) for part in cast(Any, context)):
        raise PosthocUQError(
            f"A mixture of contexts is a list of pairs (share, context), for instance [(0.5, 'batch'), (0.5, "
            f"'monochrome')], not {context!r}."
        )
    return Pool(context)


def _is_share(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and len(cast(Any, part)) == 2 and isinstance(part[0], (int, float))
