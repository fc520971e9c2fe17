"""Putting a file in place, whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from posthoc_uq.core import interrupts
from posthoc_uq.core.errors import PosthocUQError

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted anyway
    fcntl = None

_MAX_STEM_BYTES = 200  # of a name that its temporary files repeat; file systems allow 255 in all


def checked_target(path: str | os.PathLike[str]) -> Path:
    """The file that a path names, links followed.

    Raises:
        PosthocUQError: it is a folder or no file at all, its folder does not exist, or no file can have such a name.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise PosthocUQError(f"'{path}' is a folder; give the name of a file in it.")
        if not target.parent.is_dir():
            raise PosthocUQError(f"The folder '{target.parent}' does not exist; make it first.")
        if target.exists() and not target.is_file():
            raise PosthocUQError(f"'{path}' is not a file, and cannot be replaced by one.")
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    except (TypeError, ValueError) as error:
        raise PosthocUQError(f"{path!r} is no path to a file: {error}.") from None
    return target


def write(path: str | os.PathLike[str], image: BytesIO) -> None:
    """Put a file in place, whole, and delete what killed processes left beside it; see `replacing`.

    Raises:
        PosthocUQError: it could not be written; see `checked_target`.
    """
    target = checked_target(path)
    remove_leftovers(target)
    try:
        with replacing(target) as file, image.getbuffer() as view:
            file.write(view)
    except OSError as error:
        raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error


@contextmanager
def replacing(target: Path) -> Generator[BinaryIO]:
    """A temporary file in the same folder that takes the target's place at the end of the block: flush, fsync, rename,
    fsync of the folder. If the block fails, the temporary file is deleted and the old file stays. Otherwise the new
    file gets the owner and the permissions of the old one.

    Raises:
        PosthocUQError: no file can be made there.
        OSError: it cannot be finished.
    """
    try:
        replaced = os.stat(target) if target.exists() else None
        descriptor, temporary = _temporary(target, 0o666 if replaced is None else 0o600)
    except OSError as error:
        raise PosthocUQError(f"'{target}' cannot be written: {error.strerror or error}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            interrupts.check()
            file.flush()
            if replaced is not None:
                _permit(file.fileno(), replaced)
            os.fsync(file.fileno())
            if fcntl is not None:  # renamed before the lock is released
                os.replace(temporary, target)
        if fcntl is None:
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


def _temporary(target: Path, mode: int) -> tuple[int, Path]:
    """A new file beside the target. It is locked while it is open; a file that a killed process left is not."""
    while True:
        path = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        _lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another process took it for a leftover before it was locked


def remove_leftovers(target: Path) -> None:
    """Delete the temporary files that killed processes left beside a file, but not those of other files, nor one that
    is being written.
    """
    temporary_name = re.compile(re.escape(f".{_stem(target)}.") + r"[0-9a-f]{16}\.tmp")
    with suppress(OSError):
        for path in target.parent.iterdir():
            if temporary_name.fullmatch(path.name) is not None:
                _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):
        if fcntl is None:
            path.unlink()
            return
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if _lock(descriptor, wait=False):
                path.unlink()
        finally:
            os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file. False where it could not be locked, for example on a file system without locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _stem(target: Path) -> str:
    """The name of a file, or the digest of a long name."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _MAX_STEM_BYTES else sha256(name).hexdigest()


def _permit(descriptor: int, replaced: os.stat_result) -> None:
    """Give an open file the owner and the permissions of another, as far as this process may."""
    if hasattr(os, "fchown"):
        with suppress(OSError):
            os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
