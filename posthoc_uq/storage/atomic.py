"""Putting a file in place, whole or not at all."""

from __future__ import annotations

import os
import secrets
from io import BytesIO
from pathlib import Path

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.storage import userblock


def seal(image: BytesIO) -> BytesIO:
    """Fill the user block of a file in memory."""
    with image.getbuffer() as view:
        view[: userblock.SIZE] = userblock.header(view[userblock.SIZE :])
    return image


def checked_target(path: str | os.PathLike[str]) -> Path:
    """The file that a path names, links followed.

    Raises:
        PosthocUQError: it is a folder, or its folder does not exist.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise PosthocUQError(f"'{path}' is a folder; give the name of a file in it.")
    if not target.parent.is_dir():
        raise PosthocUQError(f"The folder '{target.parent}' does not exist; make it first.")
    return target


def write(target: Path, image: BytesIO) -> None:
    """Put a file in place: temporary file in the same folder, flush, fsync, rename, fsync of the folder.

    Raises:
        PosthocUQError: it could not be written.
    """
    temporary = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")
    try:
        try:
            with temporary.open("xb") as file, image.getbuffer() as view:
                file.write(view)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if os.name == "posix":
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error


def remove_leftovers(target: Path) -> None:
    """Delete the temporary files that a killed process left beside a file."""
    for path in target.parent.iterdir():
        if path.name.startswith(_prefix(target)) and path.name.endswith(".tmp"):
            path.unlink(missing_ok=True)


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}."
