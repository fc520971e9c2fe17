"""Context points from data: the present minibatch, colours of the training images, or a pool of other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.contexts.base import Context, single_input
from posthoc_uq.devices import sent
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch, BatchReader, batches, check_loader
from posthoc_uq.randomness import isolated_random_state, mixed_seed
from posthoc_uq.values import COUNT, SEED

PIXELS = 100_000  # values of each channel that `Monochrome` keeps
POOL = 10_000  # inputs that `Pool` keeps
POOL_BYTES = 256 * 2**20  # bytes that these may take
_PIXELS_AT_ONCE = 1024  # values of each channel of an image that are looked at


class TrainingBatch(Context):
    """Inputs of the present minibatch, without repetition as long as there are enough."""

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

    Values are those of the loader, after its normalisation. One pass over the data fills a reservoir of them.

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
        # Algorithm R (Vitter 1985), for many values at once: the i-th value seen replaces one of those kept, with
        # probability (number kept) / i.
        room = min(self._kept - self.values.shape[1], values.shape[1])
        self.values = torch.cat([self.values, values[:, :room]], dim=1)
        further = values[:, room:]
        self._seen += values.shape[1]
        if not further.numel():
            return
        ranks = torch.arange(
            self._seen - further.shape[1] + 1, self._seen + 1, dtype=torch.float64, device="cpu"
        )
        for reservoir, candidates in zip(self.values, further, strict=True):
            slots = (
                torch.rand(len(ranks), generator=generator, dtype=torch.float64, device="cpu") * ranks
            ).long()
            accepted = (slots < self._kept).nonzero().flatten()
            # Of several values for one place the last one stays, which plain indexing does not guarantee.
            final = torch.full((self._kept,), -1, device="cpu")
            final.scatter_reduce_(0, slots[accepted], accepted, "amax")
            replaced = final >= 0
            reservoir[replaced] = candidates[final[replaced]]

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        like = single_input(batch)
        channels, size = self.values.shape
        if size == 0:
            raise PosthocUQError("A monochrome context draws from training pixels, and has seen none yet.")
        chosen = torch.randint(size, (channels, n), generator=generator, device="cpu")
        colours = sent(self.values.gather(1, chosen).T.to(like.dtype), like.device)
        # In the present batch's image size: a convolutional network may be trained on images of several sizes.
        return colours[:, :, None, None].expand(n, channels, *like.shape[2:]).contiguous()


class Pool(Context):
    """Inputs of a loader of unlabelled data. It is read once, and a uniform random choice is kept on the CPU.

    Args:
        loader: yields inputs, or pairs whose targets are ignored.
        kept: number of inputs to keep, within `POOL_BYTES`.
        batch_to_inputs: as in `fit`.
        seed: of the random choice.
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
                new = single_input(batch)
                new_keys = torch.rand(len(new), generator=generator, dtype=torch.float64, device="cpu")
                most = max(1, min(self._kept, POOL_BYTES // max(1, new[0].numel() * new.element_size())))
                keys, inputs = torch.cat([keys, new_keys]), [*inputs, *new.unbind()]
                # the inputs with the smallest random keys stay, so that all are equally likely
                if len(keys) > 2 * most:
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
    indices = keys.topk(count, largest=False).indices.sort().values
    return keys[indices], [inputs[index].clone() for index in indices.tolist()]
