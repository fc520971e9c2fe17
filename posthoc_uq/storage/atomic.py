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

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.storage import userblock

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted anyway
    fcntl = None

_LONGEST = 200  # bytes of a name that its temporary files repeat; file systems allow 255 in all


def seal(image: BytesIO, kind: str) -> BytesIO:
    """Fill the user block of a file in memory; `kind` is the method of a posterior, or a checkpoint's."""
    with image.getbuffer() as view:
        view[: userblock.SIZE] = userblock.header(view[userblock.SIZE :], kind)
    return image


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


def write(target: Path, image: BytesIO) -> None:
    """Put a file in place, whole; see `replacing`.

    Raises:
        PosthocUQError: it could not be written.
    """
    try:
        with replacing(target) as file, image.getbuffer() as view:
            file.write(view)
    except OSError as error:
        raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error


@contextmanager
def replacing(target: Path) -> Generator[BinaryIO]:
    """A temporary file in the same folder that takes the target's place at the end of the block: flush, fsync, rename,
    fsync of the folder. Where the block fails it is deleted, and what stood there before stays; else that gives the new
    file its permissions.

    Raises:
        PosthocUQError: no file can be made there.
        OSError: it cannot be finished.
    """
    try:
        before = _status(target)
        opened, temporary = _temporary(target, 0o666 if before is None else 0o600)
    except OSError as error:
        raise PosthocUQError(f"'{target}' cannot be written: {error.strerror or error}.") from error
    try:
        with os.fdopen(opened, "wb") as file:
            yield file
            file.flush()
            if before is not None:
                _permit(file.fileno(), before)
            os.fsync(file.fileno())
            if fcntl is not None:  # in place before the lock is given up
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
    """A new file beside the target, locked for as long as it is open: that tells it from what a killed process left."""
    while True:
        path = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        _lock(opened, wait=True)
        if os.fstat(opened).st_nlink:
            return opened, path
        os.close(opened)  # another process took it for a leftover before it was locked


def remove_leftovers(target: Path) -> None:
    """Delete the temporary files that killed processes left beside a file, and no others: not those of other files,
    nor one that is being written.
    """
    own = re.compile(re.escape(f".{_stem(target)}.") + r"[0-9a-f]{16}\.tmp")
    with suppress(OSError):
        for path in target.parent.iterdir():
            if own.fullmatch(path.name) is not None:
                _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):
        if fcntl is None:
            path.unlink()
            return
        opened = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if _lock(opened, wait=False):
                path.unlink()
        finally:
            os.close(opened)


def _lock(opened: int, *, wait: bool) -> bool:
    """Whether a file could be locked; where the file system knows no locks, it cannot."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _stem(target: Path) -> str:
    """The name of a file, or of a long one its digest."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST else sha256(name).hexdigest()


def _status(target: Path) -> os.stat_result | None:
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def _permit(opened: int, before: os.stat_result) -> None:
    """Give an open file the owner and the permissions of another, as far as this process may."""
    if hasattr(os, "fchown"):
        with suppress(OSError):
            os.fchown(opened, before.st_uid, before.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(opened, stat.S_IMODE(before.st_mode))
