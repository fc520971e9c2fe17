"""A text file that grows row by row and appears under its name when it is complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.storage.atomic import checked_target


@contextmanager
def growing_file(path: str) -> Generator[TextIO]:
    """Write to a temporary file in the same folder, which takes the name at the end of the block; where the block
    fails it is deleted, and a file that stood there before stays.

    Raises:
        PosthocUQError: it cannot be written.
    """
    target = checked_target(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        file = temporary.open("x", newline="", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    try:
        with file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
