"""The first 512 bytes of a file: magic word, format, length and SHA-256 of what follows, its kind, who wrote it.

libhdf5 hangs or crashes on some damaged files, so nothing reaches it before the digest has been checked. And the rest
of a file is read only if it has the length that these bytes announce, and a file of its kind may have that length.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from typing import BinaryIO, NamedTuple

from posthoc_uq.core.errors import CorruptPosteriorError, PosteriorMismatchError, PosthocUQError
from posthoc_uq.posteriors.block import FAMILIES
from posthoc_uq.version import __version__

FORMAT = 1
SIZE = 512  # the smallest user block that HDF5 allows
MAGIC = b"\x89POSTHOC_UQ\r\n\x1a\n\x00"
SNAPSHOT_MAGIC = b"\x89POSTHOC_UQ snapshot 1\r\n\x1a\n"  # the first bytes of an unfinished fit's checkpoint
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
ENSEMBLE = "ensemble"  # the kind of a file of several networks
_FIELDS = struct.Struct("<16sIQ32s64s32s")  # magic, format, length, digest, kind, release; zeros up to SIZE
_MAX_KIND_BYTES = 64
_DIGESTED = 60  # the digest is of all bytes from here on: what follows the digest itself


class Header(NamedTuple):
    """The facts in the first bytes of a file.

    Attributes:
        kind: the method of the posterior; `ENSEMBLE` of several networks.
        release: the version of this package that wrote the file.
    """

    kind: str
    release: str


def write_header(image: BytesIO, kind: str) -> BytesIO:
    """Fill the user block of a file in memory.

    Raises:
        ValueError: the name of the method is too long.
    """
    if len(kind.encode()) > _MAX_KIND_BYTES:
        raise ValueError(f"a method's name has at most {_MAX_KIND_BYTES} bytes, and {kind!r} has more")
    with image.getbuffer() as view:
        length = len(view) - SIZE
        packed = _FIELDS.pack(MAGIC, FORMAT, length, bytes(32), kind.encode(), __version__.encode())
        view[:SIZE] = packed.ljust(SIZE, b"\0")
        view[28:_DIGESTED] = sha256(view[_DIGESTED:]).digest()
    return image


def read(path: str | os.PathLike[str], limit: Callable[[str], int]) -> tuple[bytes, Header]:
    """All bytes of a file, read once and verified, and its header; `limit` gives the most for a method's file.

    Raises:
        PosthocUQError: the file is missing or cannot be read.
        PosteriorMismatchError: it is larger than `limit`.
        CorruptPosteriorError: it is no posterior file, of another format, or damaged.
    """
    # Methods register themselves, and stand above this room: they are there too where it was imported alone.
    import_module("posthoc_uq.methods")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            block = file.read(SIZE)
            header, digest = _parse(block, size, path)
            max_size = limit(header.kind)
            if size > max_size:
                raise PosteriorMismatchError(
                    f"'{path}' has {size} bytes, and a {header.kind} file of this model takes at most {max_size}; was "
                    f"it fitted on another model?"
                )
            file.seek(0)
            data = file.read(size + 1)  # at once, so that no second copy of it is made
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except MemoryError:
        raise PosthocUQError(f"'{path}' does not fit into memory.") from None
    whole = len(data) == size and data[:SIZE] == block
    _check_whole(data if whole else b"", digest, path)
    return data, header


def verified(data: bytes, path: str) -> Header:
    """The header of a posterior's whole file that another file holds.

    Raises:
        CorruptPosteriorError: as `read`.
    """
    header, digest = _parse(data[:SIZE], len(data), path)
    if header.kind == ENSEMBLE:
        raise CorruptPosteriorError(f"'{path}' is an ensemble within an ensemble, which no file holds.")
    _check_whole(data, digest, path)
    return header


def _check_whole(data: bytes, digest: bytes, path: str | os.PathLike[str]) -> None:
    if sha256(memoryview(data)[_DIGESTED:]).digest() != digest:
        raise CorruptPosteriorError(
            f"'{path}' is damaged: its SHA-256 is not the one in its header; copy or save it again."
        )
    if data[SIZE : SIZE + len(HDF5_SIGNATURE)] != HDF5_SIGNATURE:
        raise CorruptPosteriorError(f"'{path}' is damaged: its header is not followed by an HDF5 file.")


def _parse(block: bytes, size: int, path: str | os.PathLike[str]) -> tuple[Header, bytes]:
    """The header of a file of `size` bytes, and its digest."""
    if block.startswith(SNAPSHOT_MAGIC):
        raise CorruptPosteriorError(
            f"'{path}' is the checkpoint of an unfinished fit; pass it to fit as checkpoint=..."
        )
    if len(block) >= len(MAGIC) and not block.startswith(MAGIC):
        foreign = block.startswith(HDF5_SIGNATURE)
        what = "an HDF5 file that posthoc_uq did not write" if foreign else "not a posterior file"
        raise CorruptPosteriorError(f"'{path}' is {what}: it does not begin with the magic word.")
    if len(block) < SIZE:
        raise CorruptPosteriorError(
            f"'{path}' is no posterior file or was cut short: it has {len(block)} bytes."
        )
    _, number, length, digest, kind, release = _FIELDS.unpack_from(block)
    kind, release = (text.rstrip(b"\0").decode(errors="replace") for text in (kind, release))
    if number != FORMAT or not release:  # files before the first released format name no release
        named = release.isascii() and release.isprintable() and release
        writer = f"posthoc_uq {release}" if named else "posthoc_uq 0.2 or earlier"
        raise CorruptPosteriorError(
            f"'{path}' is of file format {number}, written by {writer}, and posthoc_uq {__version__} reads format "
            f"{FORMAT} alone; load it with the release that wrote it, or fit and save again."
        )
    if length != size - SIZE:
        raise CorruptPosteriorError(
            f"'{path}' is damaged: {size - SIZE} bytes follow its header, which announces {length}; copy or save it "
            f"again."
        )
    if kind != ENSEMBLE and kind not in FAMILIES:
        raise CorruptPosteriorError(
            f"'{path}' is damaged, or by a method that is not registered: its header names {kind!r}. If a module of "
            f"yours defines that method, import it first."
        )
    return Header(kind, release), digest


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, and nothing else: a pipe would wait for a writer, some devices act when opened.

    Raises:
        PosthocUQError: there is none, or it is something else.
        OSError: it cannot be opened.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
    except FileNotFoundError:
        raise PosthocUQError(f"There is no file '{path}'.") from None
    except (TypeError, ValueError) as error:
        raise PosthocUQError(f"{path!r} is no path to a file: {error}.") from None
    what = "a folder, not a posterior file" if os.path.isdir(path) else "not a file"
    raise PosthocUQError(f"'{path}' is {what}.")
