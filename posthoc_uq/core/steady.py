"""Weights that have to stay as they are while a call reads them.

A training in another thread, or an average of weights that is swapped in for a while, may write to the model during a
fit. Its sums would then belong to no one set of weights, also where the old numbers are back at the end. So a call that
reads a model for long holds it `steady`: it looks after every batch, and compares all numbers at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError
from posthoc_uq.core.model import statistics_of, unwrap

COMPARED_NUMBERS = 64  # of a tensor that are compared every time, evenly spaced; of a smaller one all
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """Where a module holds a tensor.

    Attributes:
        name: of the tensor in the model.
        home: the module's table that it is in, under `key`.
        rewritten: whether every pass of the model writes it, mostly with the same numbers: rows of an embedding of
            bounded norm.
    """

    name: str
    home: dict[str, Tensor | None]
    key: str
    rewritten: bool = False

    def tensor(self) -> Tensor | None:
        """The tensor that is there now."""
        return self.home.get(self.key)


def places_of(model: nn.Module) -> list[Place]:
    """Where the parameters are and the buffers that predictions depend on, those with numbers in memory."""
    buffers, found = set(map(id, statistics_of(model).values())), list[Place]()
    for name, module in model.named_modules():
        parameters: dict[str, Tensor | None] = {}
        others: dict[str, Tensor | None] = {}
        if isinstance(
            module, torch.jit.ScriptModule
        ):  # its tables are no dictionaries, and keep their tensors
            parameters |= dict(module.named_parameters(recurse=False))
            others |= dict(module.named_buffers(recurse=False))
        else:
            parameters, others = vars(module)["_parameters"], vars(module)["_buffers"]
        kept = [(parameters, key) for key in parameters]
        kept += [(others, key) for key, buffer in others.items() if id(buffer) in buffers]
        rewritten = getattr(module, "max_norm", None) is not None
        found += [Place(f"{name}.{key}" if name else key, home, key, rewritten) for home, key in kept]
    return [
        place
        for place in found
        if (tensor := place.tensor()) is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    ]


class Mark(NamedTuple):
    """Where a tensor is, and how often it was written, which torch counts; writes through ``.data`` are not counted."""

    address: int
    writes: int


def marks_of(places: Sequence[Place]) -> list[Mark | None]:
    """The marks of the tensors that are there now. No device is waited for."""
    marks = list[Mark | None]()
    for _, home, key, rewritten in places:
        tensor = home.get(key)
        if tensor is None:
            marks.append(None)
        else:
            uncounted = rewritten or tensor.is_inference()
            marks.append(Mark(tensor.data_ptr(), -1 if uncounted else tensor._version))
    return marks


class Glance:
    """What a quick look at tensors sees: their marks, and a few numbers of each.

    Attributes:
        marks: of each.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.marks, by_device = marks_of(places), dict[torch.device, list[Any]]()
        for place in places:
            tensor = place.tensor()
            if tensor is not None and tensor.numel():
                sample = _sample(tensor)
                if sample is not None:
                    by_device.setdefault(tensor.device, []).append(sample)
        self._views = list(by_device.values())
        self._numbers = list(map(_read, self._views))

    def numbers_stand(self) -> bool:
        """Whether the few numbers are in memory as they were. Makes a GPU wait."""
        return self._numbers == list(map(_read, self._views))


def _sample(tensor: Tensor) -> Any:
    """A few numbers of a tensor as integers, a view of its memory: an array of a tensor on the CPU, which is read
    faster. None for a tensor with gaps in its memory.
    """
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(order)  # as it lies in memory
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None or not dense.is_contiguous():
        return None
    every = max(1, tensor.numel() // COMPARED_NUMBERS)
    sample = dense.view(-1).view(integers)[::every]
    return np.from_dlpack(sample) if sample.device.type == "cpu" else sample


def _read(samples: list[Any]) -> Any:
    """The numbers of samples on one device, in one read."""
    if isinstance(samples[0], Tensor):
        return torch.cat(samples).tolist()
    return np.concatenate(samples).tobytes()


def _sums(places: Sequence[Place]) -> list[int | None]:
    """The sum of the numbers of each tensor, taken for integers: all are read, and next to nothing is computed."""
    sums: list[int | None] = [None] * len(places)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for index, place in enumerate(places):
            tensor = place.tensor()
            if tensor is not None and tensor.numel():
                plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
                total = plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)
                by_device.setdefault(tensor.device, []).append((index, total))
        for found in by_device.values():
            for (index, _), total in zip(found, torch.stack([t for _, t in found]).tolist(), strict=True):
                sums[index] = total
    return sums


class _WeightsAtStart:
    """The weights of models at the moment when a call began to read them.

    Args:
        models: the user's.
        call: what reads them, in words.
    """

    def __init__(self, models: Sequence[nn.Module], call: str) -> None:
        self._places = [place for model in models for place in places_of(unwrap(model))]
        self._call = call
        self._glance, self._sums = Glance(self._places), _sums(self._places)

    def look(self, thorough: bool = False) -> PosteriorMismatchError | None:
        """The error for weights that were written since the beginning; None where none was seen to be.

        Args:
            thorough: compare all numbers.
        """
        seen, found = self._glance.marks, marks_of(self._places)
        written = [
            place.name
            for place, then, now in zip(self._places, seen, found, strict=True)
            if then is None or now is None or then.writes != now.writes
        ]
        moved = found != seen  # to other memory, as it is to share it: the old may be gone
        stands = not moved and self._glance.numbers_stand()
        if not written and (thorough or not stands):
            pairs = zip(self._places, self._sums, _sums(self._places), strict=True)
            written = [place.name for place, then, now in pairs if then != now]
            if moved and not written:
                self._glance = Glance(self._places)
                stands = True
        if not written and stands:
            return None
        which = f"'{written[0]}'" if written else "A weight"  # that was given back between the last two lines
        if len(written) > 1:
            which += f" and {len(written) - 1} more"
        return PosteriorMismatchError(
            f"{which} of the model changed while {self._call} read it, so that the result would belong to no one set "
            f"of weights, and nothing was kept. Stop what writes to the model meanwhile, as a training or an average "
            f"of weights that is swapped in, or give this call a model of its own: copy.deepcopy(model)."
        )


_local = threading.local()


@contextmanager
def steady(*models: nn.Module, call: str) -> Generator[None]:
    """A context in which a call reads models whose weights, and buffers that predictions depend on, must not change;
    inside another one it does nothing. It costs two reads of all weights.

    Not seen is a write that torch does not count, through ``.data``, NumPy or a fused optimizer, if it misses the
    `COMPARED_NUMBERS` of every tensor and is taken back before the end.

    Args:
        models: the user's.
        call: what reads them, in words: ``"the fit"``.

    Raises:
        PosteriorMismatchError: they changed; in place of other errors, which may come of it.
    """
    if getattr(_local, "reading", None) is not None:
        yield
        return
    _local.reading = reading = _WeightsAtStart(models, call)
    try:
        try:
            yield
        except Exception as error:
            if (changed := reading.look()) is not None and changed is not error:
                raise changed from error
            raise
        if (changed := reading.look(thorough=True)) is not None:
            raise changed
    finally:
        _local.reading = None


def look() -> None:
    """Refuse weights that changed since this thread began to hold them `steady`; nothing where it holds none.

    Raises:
        PosteriorMismatchError: they did.
    """
    reading: _WeightsAtStart | None = getattr(_local, "reading", None)
    if reading is not None and (changed := reading.look()) is not None:
        raise changed
