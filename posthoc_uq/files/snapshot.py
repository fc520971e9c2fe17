"""Snapshots of a running fit: nested plain values and tensors, by `torch.save`, in a file with a digest."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError, out_of_memory
from posthoc_uq.files import atomic
from posthoc_uq.files.header import SNAPSHOT_MAGIC, open_regular

_DIGEST = hashlib.sha256().digest_size


class _HashingWriter:
    """Hands on what is written to a file, and hashes it, so that no copy of a snapshot is made in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_snapshot(target: Path, state: Any) -> None:
    """Put a snapshot in place, whole or not at all: magic word, SHA-256 of what follows, and what `torch.save` writes.

    Raises:
        PosthocUQError: the file could not be written.
    """
    try:
        with atomic.replacing(target) as file:
            file.write(SNAPSHOT_MAGIC + bytes(_DIGEST))
            writer = _HashingWriter(file)
            torch.save(state, writer)  # pyright: ignore[reportArgumentType]
            file.seek(len(SNAPSHOT_MAGIC))
            file.write(writer.digest.digest())
    except OSError as error:
        raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error


def read_snapshot(path: Path) -> Any:
    """What `write_snapshot` wrote, on the CPU.

    No code of the file is run (``weights_only``), and the tensors take no more memory than the file has bytes.

    Raises:
        PosthocUQError: it cannot be read, or does not fit into memory.
        CorruptPosteriorError: it is no snapshot, or a damaged one.
    """
    try:
        with open_regular(path) as file:
            if file.read(len(SNAPSHOT_MAGIC)) != SNAPSHOT_MAGIC:
                raise CorruptPosteriorError(f"'{path}' is no checkpoint of a fit; give another path.")
            expected = file.read(_DIGEST)
            start = file.tell()
            if _digest_of_rest(file) != expected:
                raise CorruptPosteriorError(f"The checkpoint '{path}' is damaged; delete it to begin anew.")
            file.seek(start)
            return _load(file)
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # whatever torch raises for a file that somebody made
        if isinstance(error, PosthocUQError):
            raise
        if out_of_memory(error):
            raise PosthocUQError(f"'{path}' does not fit into memory.") from None
        raise CorruptPosteriorError(
            f"'{path}' holds what no checkpoint holds ({type(error).__name__}); delete it to begin anew."
        ) from None


def _digest_of_rest(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while data := file.read(2**20):
        digest.update(data)
    return digest.digest()


def _load(file: BinaryIO) -> Any:
    start = file.tell()
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    # torch compresses nothing; a compressed entry may be a thousand times as large in memory
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError
    if sum(entry.file_size for entry in entries) > file.seek(0, 2) - start:
        raise ValueError
    file.seek(start)
    return torch.load(file, map_location="cpu", weights_only=True)
