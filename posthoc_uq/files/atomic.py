"""Putting a file in place, whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from posthoc_uq.core import interrupts
from posthoc_uq.core.errors import PosthocUQError, warn_user

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted anyway
    fcntl = None

_MAX_STEM_BYTES = 200  # of a name that its temporary files repeat; file systems allow 255 in all


def checked_target(path: str | os.PathLike[str]) -> Path:
    """The file that a path names, links followed.

    Raises:
        PosthocUQError: it is a folder or no file at all, its folder does not exist or may not be written to, or no file
            can have such a name.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise PosthocUQError(f"'{path}' is a folder; give the name of a file in it.")
        if not target.parent.is_dir():
            raise PosthocUQError(f"The folder '{target.parent}' does not exist; make it first.")
        if target.exists() and not target.is_file():
            raise PosthocUQError(f"'{path}' is not a file, and cannot be replaced by one.")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise PosthocUQError(f"'{path}' cannot be written: no files may be made in '{target.parent}'.")
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    except PosthocUQError:
        raise
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
    with replacing(target) as file, image.getbuffer() as view:
        file.write(view)


class _Noting(io.FileIO):
    """A file that remembers why it could not be written: libraries may raise an error of their own in its place."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        """See `io.FileIO`."""
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


@contextmanager
def replacing(target: Path) -> Generator[BinaryIO]:
    """A temporary file in the same folder that takes the target's place at the end of the block: flush, fsync, rename,
    fsync of the folder. If the block fails, the temporary file is deleted and the old file stays. Otherwise the new
    file gets the owner and the permissions of the old one.

    Warns where the file system refuses the permissions or an fsync: the new file is in place all the same.

    Raises:
        PosthocUQError: no file can be made there, or it cannot be finished.
    """
    try:
        replaced = os.stat(target) if target.exists() else None
        descriptor, temporary = _temporary(target, 0o666 if replaced is None else 0o600)
    except OSError as error:
        raise PosthocUQError(f"'{target}' cannot be written: {error.strerror or error}.") from error
    raw = _Noting(descriptor, "wb")
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            interrupts.check()
            try:
                file.flush()
                refused = _permit(descriptor, replaced)
                lost = _synchronise(descriptor)
                if fcntl is not None:  # renamed before the lock is released
                    os.replace(temporary, target)
            except OSError as error:
                raw.refused = error
                raise
        if fcntl is None:
            os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if raw.refused is None or not isinstance(error, Exception):
            raise
        kept = "" if replaced is None else " The file that was there before is unchanged."
        reason = raw.refused.strerror or raw.refused
        raise PosthocUQError(f"'{target}' could not be written: {reason}.{kept}") from raw.refused
    if refused is not None:
        warn_user(f"'{target}' is written, but not with the permissions that it had: {refused}.")
    lost = lost or _synchronise_folder(target.parent)
    if lost is not None:
        warn_user(
            f"'{target}' is written, but this file system does not say when it is on the disk ({lost}): after a power "
            f"cut an older file may be there, or none."
        )


_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # a file system that has no such call


def _synchronise(descriptor: int) -> str | None:
    """Wait until a file is on the disk; the reason where its file system cannot say so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:  # its numbers are lost
            raise
        return error.strerror
    return None


def _synchronise_folder(folder: Path) -> str | None:
    """Wait until the name of a file is on the disk; the reason where that cannot be done."""
    if os.name != "posix":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror
    return None


@contextmanager
def changing(path: str | os.PathLike[str], wait: Callable[[], Any]) -> Generator[Callable[[], None]]:
    """Read a file and write it again, as the only one who does so: a second block waits for the end of the first, in
    whatever process. The lock is the operating system's, on the file itself; a process that dies gives it back.

    Gives a function to be called before the file is written, which raises where it is no longer the one that was read:
    not all file systems have locks, and not all writers ask for one. Warns where there are none.

    Args:
        path: the file, which is there.
        wait: called before waiting for somebody else.
    """
    target = Path(os.path.realpath(path))
    descriptor = _held(target, wait)
    try:
        read = _version(target)

        def check() -> None:
            if _version(target) != read:
                raise PosthocUQError(
                    f"'{path}' was written, moved or deleted by somebody else since it was read, and is left as it is "
                    f"now; run the command again."
                )

        yield check
    finally:
        if descriptor is not None and fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked workers share it
            os.close(descriptor)


def _held(target: Path, wait: Callable[[], Any]) -> int | None:
    """A descriptor that locks the file of this name; None where there are no locks."""
    if fcntl is None:
        return None
    while True:
        try:
            descriptor = os.open(
                target, os.O_RDWR | os.O_NONBLOCK
            )  # NFS locks no file that is open for reading alone
        except OSError:
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _identity(os.fstat(descriptor)) == _identity(os.stat(target)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(descriptor)
            warn_user(
                f"'{target}' cannot be locked here ({error.strerror}): where two commands change it at the same "
                f"moment, the work of one may be lost."
            )
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another file has the name now: what the first one wrote


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _version(target: Path) -> tuple[int, ...] | None:
    """What tells a file from the one that takes its place; None without one."""
    try:
        status = os.stat(target)
    except OSError:
        return None
    return *_identity(status), status.st_size, status.st_mtime_ns


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


def _permit(descriptor: int, replaced: os.stat_result | None) -> str | None:
    """Give an open file the owner and the permissions of another, as far as this process may; why it has others."""
    if replaced is None:
        return None
    wanted = stat.S_IMODE(replaced.st_mode)
    if hasattr(os, "fchown"):
        with suppress(OSError):
            os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    if hasattr(os, "fchmod"):
        try:
            os.fchmod(descriptor, wanted)
        except OSError as error:
            own = stat.S_IMODE(os.fstat(descriptor).st_mode)
            return None if own == wanted else f"{own:o} in place of {wanted:o} ({error.strerror})"
    return None
