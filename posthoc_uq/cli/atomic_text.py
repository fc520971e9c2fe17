"""A text file that is written row by row and appears under its name when it is complete."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TextIO

from posthoc_uq.files.atomic import checked_target, remove_leftovers, replacing


@contextmanager
def atomic_text_file(path: str) -> Generator[TextIO]:
    """Write to a temporary file in the same folder, which takes the name at the end of the block; where the block
    fails it is deleted, and a file that stood there before stays.

    Raises:
        PosthocUQError: it cannot be written.
    """
    target = checked_target(path)
    remove_leftovers(target)
    with replacing(target) as file:
        text = TextIOWrapper(file, newline="", encoding="utf-8", errors="surrogateescape")
        yield text
        text.detach()
