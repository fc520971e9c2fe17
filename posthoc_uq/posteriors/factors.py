"""What was computed from blocks at certain settings, and is kept for the next use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

FACTOR_BYTES = 16 * 2**20  # the most that all kept factors of a posterior take


def factor_bytes() -> int:
    """The most that kept factors take."""
    return FACTOR_BYTES


class Cache(Generic[Value]):
    """The last value of each name, while memory allows; safe for several threads. A copy of it begins empty.

    Args:
        most: gives the bytes that all values may take.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._entries: dict[str, tuple[Any, Value, int]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._most,)

    def get(self, name: str, key: Any) -> Value | None:
        """The value of the name, if the last one was made for this key."""
        with self._lock:
            entry = self._entries.get(name)
        return entry[1] if entry is not None and entry[0] == key else None

    def put(self, name: str, key: Any, value: Value, size: int) -> None:
        """Keep a value of so many bytes in place of the name's last one, where there is room."""
        with self._lock:
            self._entries.pop(name, None)
            if size + sum(other for _, _, other in self._entries.values()) <= self._most():
                self._entries[name] = key, value, size
