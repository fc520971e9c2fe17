"""The first 512 bytes of a file: magic word, format version, length and SHA-256 of all that follows.

libhdf5 hangs or crashes on some damaged files, so nothing reaches it before this digest has been checked.
"""

from __future__ import annotations

import os
import stat
import struct
from hashlib import sha256
from pathlib import Path

from posthoc_uq.errors import CorruptPosteriorError, PosteriorMismatchError, PosthocUQError

FORMAT_VERSION = 3
OLDEST_VERSION = 1  # that is still read
SIZE = 512  # the smallest user block that HDF5 allows
MAGIC = b"\x89POSTHOC_UQ\r\n\x1a\n\x00"
_FIELDS = struct.Struct("<16sIQ32s")  # magic, version, length, digest; zeros up to SIZE
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def header(body: bytes | memoryview, version: int = FORMAT_VERSION) -> bytes:
    """The user block of a file whose HDF5 part is `body`."""
    return _FIELDS.pack(MAGIC, version, len(body), sha256(body).digest()).ljust(SIZE, b"\0")


def version_of(data: bytes) -> int:
    """The format version of a verified file."""
    return int(_FIELDS.unpack_from(data)[1])


def verify(data: bytes, path: str) -> None:
    """Check that `data`, read from `path`, is what was once written.

    Raises:
        CorruptPosteriorError: it is not, or is of a format that this release does not read.
    """
    if len(data) >= len(MAGIC) and not data.startswith(MAGIC):
        foreign = data.startswith(_HDF5_SIGNATURE)
        kind = "an HDF5 file that posthoc_uq did not write" if foreign else "not a posterior file"
        raise CorruptPosteriorError(
            f"'{path}' is {kind}: it does not begin with a posterior file's magic word."
        )
    if len(data) < SIZE:
        raise CorruptPosteriorError(
            f"'{path}' is no posterior file or was cut short: it has {len(data)} bytes."
        )
    _, version, length, digest = _FIELDS.unpack_from(data)
    if version > FORMAT_VERSION:
        raise CorruptPosteriorError(
            f"'{path}' is of format version {version}, and this release of posthoc_uq reads versions "
            f"{OLDEST_VERSION} to {FORMAT_VERSION}; upgrade posthoc_uq, or save the posterior again with this release."
        )
    if version < OLDEST_VERSION:
        raise CorruptPosteriorError(
            f"'{path}' is of format version {version}, which this release of posthoc_uq does not read (it "
            f"reads versions {OLDEST_VERSION} to {FORMAT_VERSION}); fit and save again, or load it with the release "
            f"that wrote it."
        )
    body = memoryview(data)[SIZE:]
    if length != len(body):
        raise CorruptPosteriorError(
            f"'{path}' is damaged: {len(body)} bytes follow its header, which announces {length}; copy or "
            f"save it again."
        )
    if sha256(body).digest() != digest:
        raise CorruptPosteriorError(
            f"'{path}' is damaged: its SHA-256 is not the one in its header; copy or save it again."
        )
    if any(data[_FIELDS.size : SIZE]) or body[: len(_HDF5_SIGNATURE)] != _HDF5_SIGNATURE:
        raise CorruptPosteriorError(f"'{path}' is damaged: its header is not followed by an HDF5 file.")


def read(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """All bytes of a file, read once and verified.

    Args:
        path: the file.
        limit: most bytes that it may have.

    Raises:
        PosthocUQError: the file is missing or cannot be read.
        PosteriorMismatchError: it is larger than `limit`.
        CorruptPosteriorError: it is no posterior file, or a damaged one.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PosthocUQError(f"'{path}' is not a file.")
            if limit is not None and status.st_size > limit:
                raise PosteriorMismatchError(
                    f"'{path}' has {status.st_size} bytes, and a posterior of this model takes at most "
                    f"{limit}; was it fitted on another model?"
                )
            data = file.read(status.st_size + 1)
    except FileNotFoundError:
        raise PosthocUQError(f"There is no file '{path}'.") from None
    except IsADirectoryError:
        raise PosthocUQError(f"'{path}' is a folder, not a posterior file.") from None
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except MemoryError:
        raise PosthocUQError(f"'{path}' does not fit into memory.") from None
    verify(data, str(path))
    return data
