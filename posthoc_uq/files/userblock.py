"""The first 512 bytes of a file: magic word, format version, length and SHA-256 of all that follows, and its kind.

libhdf5 hangs or crashes on some damaged files, so nothing reaches it before this digest has been checked. And the rest
of a file is read only if its length is the one that these bytes announce, and a file of its kind may have that length.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from hashlib import sha256
from typing import BinaryIO, NamedTuple

from posthoc_uq.core.errors import CorruptPosteriorError, PosteriorMismatchError, PosthocUQError
from posthoc_uq.files.schema import SNAPSHOT_MAGIC
from posthoc_uq.posteriors.block import FAMILIES

FORMAT_VERSION = 8
OLDEST_VERSION = 1  # the oldest that is still read
SIZE = 512  # the smallest user block that HDF5 allows
MAGIC = b"\x89POSTHOC_UQ\r\n\x1a\n\x00"
_FIELDS = struct.Struct("<16sIQ32s16s")  # magic, version, length, digest, kind; zeros up to SIZE
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_KINDS_FROM = 4  # the first version that names its kind


class Header(NamedTuple):
    """What a user block says.

    Attributes:
        version: of the format.
        length: bytes that follow.
        digest: SHA-256 of these.
        kind: the method of a posterior; None in files of earlier versions.
    """

    version: int
    length: int
    digest: bytes
    kind: str | None


def header(body: bytes | memoryview, kind: str | None, version: int = FORMAT_VERSION) -> bytes:
    """The user block of a file whose HDF5 part is `body`."""
    packed = _FIELDS.pack(MAGIC, version, len(body), sha256(body).digest(), (kind or "").encode())
    return packed.ljust(SIZE, b"\0")


def parse(block: bytes, size: int, path: str) -> Header:
    """What the first bytes of a file of `size` bytes say.

    Raises:
        CorruptPosteriorError: it is no file of this package, is damaged, or of a format that is not read.
    """
    if block.startswith(SNAPSHOT_MAGIC):
        raise CorruptPosteriorError(
            f"'{path}' is the checkpoint of an unfinished fit; pass it to fit as checkpoint=..."
        )
    if len(block) >= len(MAGIC) and not block.startswith(MAGIC):
        foreign = block.startswith(_HDF5_SIGNATURE)
        kind = "an HDF5 file that posthoc_uq did not write" if foreign else "not a posterior file"
        raise CorruptPosteriorError(
            f"'{path}' is {kind}: it does not begin with a posterior file's magic word."
        )
    if len(block) < SIZE:
        raise CorruptPosteriorError(
            f"'{path}' is no posterior file or was cut short: it has {len(block)} bytes."
        )
    _, version, length, digest, name = _FIELDS.unpack_from(block)
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
    if length != size - SIZE:
        raise CorruptPosteriorError(
            f"'{path}' is damaged: {size - SIZE} bytes follow its header, which announces {length}; copy or "
            f"save it again."
        )
    kind = name.rstrip(b"\0").decode(errors="replace")
    known = kind in FAMILIES if version >= _KINDS_FROM else kind == ""
    if version >= _KINDS_FROM and kind.isascii() and kind.isidentifier() and not known:
        raise CorruptPosteriorError(
            f"'{path}' is damaged, or by a method that is not known here: its header names {kind!r}. If a module of "
            f"yours defines that method, import it first."
        )
    if not known or any(block[_FIELDS.size : SIZE]):
        raise CorruptPosteriorError(f"'{path}' is damaged: its header is none that posthoc_uq writes.")
    return Header(version, length, digest, kind or None)


def read(
    path: str | os.PathLike[str], limit: Callable[[str | None], int] | None = None
) -> tuple[bytes, Header]:
    """All bytes of a file, read once and verified, and what its user block says.

    Args:
        path: the file.
        limit: most bytes that a file may have, by the kind that its user block names.

    Raises:
        PosthocUQError: the file is missing or cannot be read.
        PosteriorMismatchError: it is larger than `limit`.
        CorruptPosteriorError: it is no posterior file, or a damaged one.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            block = file.read(SIZE)
            parsed = parse(block, size, str(path))
            most = None if limit is None else limit(parsed.kind)
            if most is not None and size > most:
                raise PosteriorMismatchError(
                    f"'{path}' has {size} bytes, and a {_described(parsed.kind)} of this model takes at most "
                    f"{most}; was it fitted on another model?"
                )
            file.seek(0)
            data = file.read(size + 1)  # at once, so that no second copy of it is made
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except MemoryError:
        raise PosthocUQError(f"'{path}' does not fit into memory.") from None
    body = memoryview(data)[SIZE:]
    if data[:SIZE] != block or len(body) != parsed.length or sha256(body).digest() != parsed.digest:
        raise CorruptPosteriorError(
            f"'{path}' is damaged: its SHA-256 is not the one in its header; copy or save it again."
        )
    if body[: len(_HDF5_SIGNATURE)] != _HDF5_SIGNATURE:
        raise CorruptPosteriorError(f"'{path}' is damaged: its header is not followed by an HDF5 file.")
    return data, parsed


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, and nothing else: a pipe would wait for a writer, some devices act when opened.

    Raises:
        PosthocUQError: there is none, or it is something else.
        OSError: it cannot be opened.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            descriptor = os.open(
                path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            )
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
    except FileNotFoundError:
        raise PosthocUQError(f"There is no file '{path}'.") from None
    except (TypeError, ValueError) as error:
        raise PosthocUQError(f"{path!r} is no path to a file: {error}.") from None
    if os.path.isdir(path):
        raise PosthocUQError(f"'{path}' is a folder, not a posterior file.")
    raise PosthocUQError(f"'{path}' is not a file.")


def _described(kind: str | None) -> str:
    return "posterior" if kind is None else f"posterior by method={kind!r}"
