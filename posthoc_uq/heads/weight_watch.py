"""Whether a model still has the weights that a predictor was made for: cheap enough to ask before every batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError
from posthoc_uq.core.model import unwrap
from posthoc_uq.core.steady import Glance, Mark, marks_of, places_of
from posthoc_uq.files import fingerprint


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
        self._seen: Glance | None = Glance(self._places)

    def __getstate__(self) -> dict[str, Any]:
        # copies have other memory: they look for it, and compare all numbers once
        return {name: self.__dict__[name] for name in ("_model", "_hashes", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._find()
        self._seen = None
        self._held = [None] * len(self._places)

    def _find(self) -> None:
        self._lock = threading.Lock()
        self._places = places_of(self._model)
        self._names = [place.name for place in self._places]

    def check(self) -> list[Mark | None]:
        """Refuse a model whose weights changed. Costs next to nothing where nothing was written since the last time,
        and on a GPU one wait for it.

        Returns:
            Where the tensors were before that, and how often they had been written, for `check_since`.

        Raises:
            PosteriorMismatchError: they did; names the first of them.
        """
        marks, seen = marks_of(self._places), self._seen
        if seen is not None and seen.marks == marks and seen.numbers_stand():
            return marks
        with self._lock:
            marks, seen = marks_of(self._places), self._seen
            if seen is None or seen.marks != marks or not seen.numbers_stand():
                self._compare()
                self._seen = Glance(self._places)  # all of which is as it should be
        return marks

    def check_since(self, marks: list[Mark | None]) -> None:
        """Refuse weights that were written since marks were taken, as while a prediction was made.

        Raises:
            PosteriorMismatchError: they were; names the first of them.
        """
        found = marks_of(self._places)
        if found == marks and None not in marks:
            return
        for name, then, now in zip(self._names, marks, found, strict=True):
            if then is None or now is None or then.writes != now.writes:
                raise PosteriorMismatchError(
                    f"'{name}' of the model changed while a prediction was made with it, which would belong to no one "
                    f"set of weights. Stop what writes to the model meanwhile, or wrap a copy: copy.deepcopy(model)."
                )

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
