"""Whether a model still has the weights that a predictor was made for: cheap enough to ask before every batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError
from posthoc_uq.core.model import statistics_of, unwrap
from posthoc_uq.files import fingerprint

COMPARED_NUMBERS = 64  # of a tensor that are compared every time, evenly spaced; of a smaller one all
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Place(NamedTuple):
    """Where a module holds a tensor."""

    name: str
    home: dict[str, Tensor | None]
    key: str

    def tensor(self) -> Tensor | None:
        """The tensor that is there now."""
        return self.home.get(self.key)


class _Seen(NamedTuple):
    """What was seen of the tensors the last time that all of their numbers were compared.

    Attributes:
        marks: for each its address and how often it was written.
        views: a few numbers of each as integers, views of its memory: one list for each device.
        numbers: what they were.
    """

    marks: list[Any]
    views: list[list[Any]]
    numbers: list[Any]


class WeightWatch:
    """Notices that parameters of a model, or buffers that its predictions depend on, are no longer those of the moment
    when the watch was made.

    Every look reads where the tensors are and how often they were written, which torch counts, and a few of their
    numbers, because writes through ``.data`` are not counted. Only where these differ are all numbers compared, by
    their hashes: weights that are given back, or moved to other memory, are in order.

    Args:
        model: the user's; never written.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self._find()
        tensors = [place.tensor() for place in self._places]
        self._hashes = _hashes(tensors)
        # predictors share this memory, also once the model has other memory
        self._held = [None if tensor is None else tensor.detach() for tensor in tensors]
        self._take()

    def __getstate__(self) -> dict[str, Any]:
        # copies have other memory: they look for it, and compare all numbers once
        return {name: self.__dict__[name] for name in ("_model", "_hashes", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._find()
        self._seen = _Seen([], [], [])
        self._held = [None] * len(self._places)

    def _find(self) -> None:
        self._lock = threading.Lock()
        self._places = [place for place in _places(self._model) if _watchable(place.tensor())]
        self._names = [place.name for place in self._places]

    def check(self) -> None:
        """Refuse a model whose weights changed. Costs next to nothing where nothing was written since the last time,
        and on a GPU one wait for it.

        Raises:
            PosteriorMismatchError: they did; names the first of them.
        """
        if not self._unchanged():
            with self._lock:
                if not self._unchanged():
                    self._compare()
                    self._take()

    def _unchanged(self) -> bool:
        seen = self._seen
        return seen.marks == [_mark(place.tensor()) for place in self._places] and seen.numbers == [
            _read(views) for views in seen.views
        ]

    def _take(self) -> None:
        """Note what there is, all of which is as it should be."""
        tensors = [place.tensor() for place in self._places]
        marks = [_mark(tensor) for tensor in tensors]
        by_device: dict[torch.device, list[Any]] = {}
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                sample = _sample(tensor)
                if sample is not None:
                    by_device.setdefault(tensor.device, []).append(sample)
        views = list(by_device.values())
        self._seen = _Seen(marks, views, [_read(of_device) for of_device in views])

    def _compare(self) -> None:
        tensors = [place.tensor() for place in self._places]
        found = _hashes(tensors)
        shared = _hashes(self._held)
        for index, name in enumerate(self._names):
            tensor, held = tensors[index], self._held[index]
            expected = self._hashes[index]
            as_before = held is None or shared[index] == expected
            if not (as_before and (found[index] == expected or _is_moved(tensor, held))):
                raise PosteriorMismatchError(
                    f"'{name}' of the model changed after uq.wrap, and the posterior belongs to the weights of the "
                    f"fit. Load these back with model.load_state_dict, or fit and wrap again."
                )


def _places(model: nn.Module) -> list[_Place]:
    """Where the parameters are and the buffers that predictions depend on."""
    buffers, found = set(map(id, statistics_of(model).values())), list[_Place]()
    for name, module in model.named_modules():
        parameters, others = vars(module)["_parameters"], vars(module)["_buffers"]
        kept = [(parameters, key) for key in parameters]
        kept += [(others, key) for key, buffer in others.items() if id(buffer) in buffers]
        found += [_Place(f"{name}.{key}" if name else key, home, key) for home, key in kept]
    return found


def _watchable(tensor: Tensor | None) -> bool:
    """Whether it is a plain tensor with numbers in memory."""
    return (
        tensor is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def _mark(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


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


def _hashes(tensors: Sequence[Tensor | None]) -> list[str | None]:
    """A hash of the numbers of each tensor."""
    with torch.inference_mode(False), torch.no_grad():
        return [None if tensor is None else fingerprint({"": tensor}) for tensor in tensors]


def _is_moved(tensor: Tensor | None, held: Tensor | None) -> bool:
    """Whether a model was given another precision or device, with the same numbers to rounding."""
    if tensor is None or held is None or tensor.shape != held.shape:
        return False
    moved = tensor.dtype != held.dtype or tensor.device != held.device
    return moved and torch.equal(held.to(tensor), tensor.detach())
