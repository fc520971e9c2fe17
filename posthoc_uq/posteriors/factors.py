"""Factorised blocks that are kept for the next use."""

from __future__ import annotations

import threading
from typing import Any

from posthoc_uq.posteriors.blocks import Factor

_BYTES = 16 * 2**20  # the most that all kept factors take


class FactorCache:
    """The last factor of each block, while memory allows; safe for several threads. A copy of it begins empty."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, object, Factor]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return FactorCache, ()

    def get(self, block: str, key: Any, prior: object) -> Factor | None:
        """The block's factor, if the last one was made for this key and this very prior of single weights, which is
        held: another one could have the identity of one that is gone.
        """
        with self._lock:
            entry = self._entries.get(block)
        return entry[2] if entry is not None and entry[0] == key and entry[1] is prior else None

    def put(self, block: str, key: Any, prior: object, factor: Factor) -> None:
        """Keep a factor in place of the block's last one, where there is room."""
        with self._lock:
            self._entries.pop(block, None)
            if factor.bytes() + sum(other.bytes() for *_, other in self._entries.values()) <= _BYTES:
                self._entries[block] = key, prior, factor
