"""Factorised blocks that are kept for the next use."""

from __future__ import annotations

import threading
from typing import Any

from posthoc_uq.posteriors.blocks import Factor

_BYTES = 16 * 2**20  # of all that are kept


class FactorCache:
    """The last factor of each block, while memory allows; for several threads at once. A copy of it begins empty."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Factor]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return FactorCache, ()

    def get(self, block: str, key: Any) -> Factor | None:
        """The block's factor, if the last one was made for this key."""
        with self._lock:
            kept = self._kept.get(block)
        return kept[1] if kept is not None and kept[0] == key else None

    def put(self, block: str, key: Any, factor: Factor) -> None:
        """Keep a factor in place of the block's last one, where there is room."""
        with self._lock:
            self._kept.pop(block, None)
            if factor.bytes() + sum(kept.bytes() for _, kept in self._kept.values()) <= _BYTES:
                self._kept[block] = key, factor
