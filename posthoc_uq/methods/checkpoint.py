"""The checkpoint of a fit: one file, from which a killed fit goes on to the same result, to the last bit.

A fit is a sequence of *parts* by name: the pass for the noise variance, each sweep, a training. A checkpoint holds the
state of each, as nested dicts of plain values and tensors: the sums of finished sweeps, and how far the running part
is. What is computed between parts, as an eigendecomposition, is computed again from their sums. A method declares
nothing for this: sweeps and trainings save themselves.

Here is also what two fits are compared by (`fit_identity`, `data_identity`), and how the file is written and read
(`write_snapshot`, `read_snapshot`).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from posthoc_uq.core import steady
from posthoc_uq.core.batches import Batch, BatchReader, Readings
from posthoc_uq.core.distributed import gather, rank, world
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError, out_of_memory
from posthoc_uq.core.model import model_device
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.labels import own_samples_of
from posthoc_uq.curvature.sweep import batch_hash
from posthoc_uq.files import atomic, fingerprint
from posthoc_uq.files.header import SNAPSHOT_MAGIC, open_regular
from posthoc_uq.files.tensors import tensors_of
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.version import __version__

WITHOUT_EFFECT = {"without effect": True}
"""Metadata of a method's field that does not change the result, and so is no part of a fit's identity."""

_DIGEST = hashlib.sha256().digest_size

State = dict[str, Any]
"""Of a part of a fit: nested dicts of plain values and tensors."""


class Checkpoint:
    """The file of one fit, or of one process's part of it.

    Args:
        path: the file; in a process group each rank has its own beside it (``fit.rank0of2.checkpoint``).
        every: batches between two writes.
        identity: what a fit must have in common with the one that wrote the file, as `identified` gives it.

    Raises:
        PosthocUQError: the file belongs to another fit.
        CorruptPosteriorError: it is damaged, or no checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, identity: Mapping[str, str]) -> None:
        target = atomic.checked_target(path)
        if world() > 1:
            target = target.with_name(f"{target.stem}.rank{rank()}of{world()}{target.suffix}")
        self._target, self._every, self._batches = target, every, 0
        self._identity = dict(identity)
        self._finished: dict[str, tuple[State, State]] = {}
        self._running: tuple[str, State] | None = None
        self._written = b""  # what tells the file that is ours from another fit's
        atomic.remove_leftovers(target)
        if target.exists():
            self._written = _digest_in(target)
            self._take(read_snapshot(target))

    def _take(self, snapshot: Any) -> None:
        with self.reading("its description is none of a fit"):
            identity = {name: str(value) for name, value in snapshot["identity"].items()}
            self._finished, running = dict(snapshot["finished"]), snapshot["running"]
            if running is not None:
                name, state = running
                self._running = str(name), dict(state)
        for name, now in self._identity.items():
            # what one of the two does not know, as the number of samples of an iterator, is not compared
            was = identity.get(name, now)
            if was != now:
                raise PosthocUQError(
                    f"'{self._target}' is the checkpoint of another fit: its {name} was {was:.200}, and is {now:.200} "
                    f"now. Delete it to begin anew, or give another path."
                )

    @contextmanager
    def reading(self, what: str) -> Generator[None]:
        """Errors of a state that is not what this fit would have written become one that names the file."""
        try:
            yield
        except (
            *(
                ArithmeticError,
                AssertionError,
                AttributeError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ),
            PosthocUQError,
        ) as error:
            if out_of_memory(error):
                raise
            reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
            raise CorruptPosteriorError(
                f"'{self._target}' is no checkpoint that this fit could go on from: {what} ({reason}). Delete it to "
                f"begin anew."
            ) from None

    def finished(self, part: str) -> tuple[State, State] | None:
        """The tensors and the plain values at the end of a part; None where it is not finished."""
        if part not in self._finished:
            return None
        with self.reading(f"its state of {part} is of another kind"):
            tensors, values = self._finished[part]
            return dict(tensors), dict(values)

    def take_running(self, part: str) -> State | None:
        """Hand over the state of an unfinished part, which is then no longer in memory here; None without one."""
        if self._running is None or self._running[0] != part:
            return None
        state, self._running = self._running[1], None
        return state

    def after_batch(self, part: str, state: Callable[[], State]) -> None:
        """Write the state of the running part, once in so many batches."""
        self._batches += 1
        if self._batches >= self._every:
            self.save(part, state())

    def save(self, part: str, state: State) -> None:
        """Write the state of the running part now."""
        self._write((part, state))

    def finish(self, part: str, tensors: State, values: State) -> None:
        """Write the state at the end of a part, whose tensors the caller may then change."""
        self._finished[part] = _on_cpu((tensors, values), copy=True)
        self._write(None)

    def drop_running(self) -> None:
        """Write the finished parts alone."""
        self._write(None)

    def remove(self) -> None:
        """Delete the file: the fit is done. Within `kept_until_the_end` that is when the block ends."""
        kept = _kept.get()
        if kept is not None:
            kept.append(self)
        elif self._written and _digest_in(self._target) == self._written:
            self._target.unlink(missing_ok=True)

    def _write(self, running: tuple[str, State] | None) -> None:
        steady.look()  # sums of several sets of weights are not to be gone on from
        self._batches = 0
        if _digest_in(self._target) not in (b"", self._written):
            raise PosthocUQError(
                f"The checkpoint '{self._target}' was written by another fit that runs at the same time, and is left "
                f"as it is; give each of them a path of its own."
            )
        snapshot = {"identity": self._identity, "finished": self._finished, "running": running}
        self._written = write_snapshot(self._target, _on_cpu(snapshot))


_kept: ContextVar[list[Checkpoint] | None] = ContextVar("kept", default=None)


@contextmanager
def kept_until_the_end() -> Generator[None]:
    """Checkpoints of fits within the block are deleted at its end, and not at all if it fails: for a program that keeps
    a fit's result in a file alone.
    """
    kept: list[Checkpoint] = []
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
    for checkpoint in kept:
        checkpoint.remove()


def _on_cpu(state: Any, *, copy: bool = False) -> Any:
    """A state whose tensors are on the CPU, each with memory for its own numbers alone."""

    def placed(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        return tensor.cpu().clone() if copy or part else tensor.cpu()

    return tree_map_only(Tensor, placed, state)


# What a fit is compared by


def fit_identity(
    arguments: Mapping[str, Any], method: Any, model: nn.Module, layers: Mapping[str, Layer]
) -> dict[str, str]:
    """All that can change the result of a fit but its training data, as texts by name; a fit goes on from the
    checkpoint of another only where all of them are the same.

    Args:
        arguments: of the fit, by name, as far as they change its result; but for the model and the training data.
        method: whose fields count, but for those that are `WITHOUT_EFFECT`.
        model: the user's.
        layers: those that get a posterior.
    """
    kind = model_device(model).type
    values = dict(arguments) | {"method": method.name}
    values |= {f.name: getattr(method, f.name) for f in fields(method) if f.metadata != WITHOUT_EFFECT}
    values |= {
        "library version": __version__,
        "layers": {name: list(layer.matrix_shape) for name, layer in layers.items()},
        "model": model,
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }
    return identified(values)


def data_identity(
    loader: Iterable[Any], reader: BatchReader, seed: int, first: Batch | None = None
) -> dict[str, Any]:
    """A hash of the first batch of a loader, and the number of its samples, where it has a length.

    Args:
        loader: the data.
        reader: of their batches.
        seed: of the random numbers that reading the first batch may draw.
        first: that batch, where it is at hand.
    """
    if first is None:
        with isolated_random_state(seed):
            first = Readings.of(loader).first(reader)
    samples = own_samples_of(loader, reader, first)
    return {"first batch": batch_hash(first)} | ({} if samples is None else {"number of samples": samples})


def check_common(identity: Mapping[str, Any]) -> None:
    """Check that all processes do the same fit.

    Raises:
        PosthocUQError: they do not; names what differs.
    """
    first, *others = gather(dict(identity), "comparing the fits")
    for number, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise PosthocUQError(
                    f"Rank {number} has another {name} than rank 0 ({other[name]!r:.200}, and {value!r:.200}); all "
                    f"processes must hold the same model and ask for the same fit."
                )


def identified(values: Mapping[str, Any]) -> dict[str, str]:
    """The values of a fit's options, each as a text that is the same in another process."""
    return {name: json.dumps(as_plain(value)) for name, value in values.items()}


def as_plain(value: Any) -> Any:
    """Numbers, strings, lists and dicts of these. Tensors become digests, and functions and other objects their names:
    two functions of one name count as the same.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return ["array", str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Tensor):
        return f"tensor {fingerprint({'': value})}"
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return as_plain([partial.func, partial.args, partial.keywords])
    if isinstance(value, nn.Module):
        return [_name(type(value)), fingerprint(dict(chain(value.named_parameters(), value.named_buffers())))]
    if isinstance(value, Posterior):
        tensors = {slot.path: tensor for slot, tensor in tensors_of(value)}
        state = {"tensors": tensors, "mean": value.mean, **value.settings.plain()}
        return [_name(Posterior), as_plain(state)]
    if hasattr(type(value), "identity"):  # a likelihood, a context
        return [_name(type(value)), as_plain(value.identity())]
    if is_dataclass(value) and not isinstance(value, type):
        return [_name(type(value)), {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}]
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


# The file


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


def _digest_in(path: Path) -> bytes:
    """The digest at the beginning of a snapshot; nothing where there is no such file."""
    try:
        with path.open("rb") as file:
            return file.read(len(SNAPSHOT_MAGIC) + _DIGEST)[len(SNAPSHOT_MAGIC) :]
    except OSError:
        return b""


def write_snapshot(target: Path, state: Any) -> bytes:
    """Put a snapshot in place, whole or not at all: magic word, SHA-256 of what follows, and what `torch.save` writes.
    Gives the SHA-256.

    Raises:
        PosthocUQError: the file could not be written.
    """
    with atomic.replacing(target) as file:
        file.write(SNAPSHOT_MAGIC + bytes(_DIGEST))
        writer = _HashingWriter(file)
        torch.save(state, writer)  # pyright: ignore[reportArgumentType]
        file.seek(len(SNAPSHOT_MAGIC))
        file.write(writer.digest.digest())
    return writer.digest.digest()


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
            start, digest = file.tell(), hashlib.sha256()
            while data := file.read(2**20):
                digest.update(data)
            if digest.digest() != expected:
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


class _Behind(io.RawIOBase):
    """What stands behind the place where a file is now, as a file of its own: torch 2.5 reads an archive from the
    first byte on only.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + (self._start if whence == os.SEEK_SET else 0), whence) - self._start

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _load(file: BinaryIO) -> Any:
    archive = _Behind(file)
    with zipfile.ZipFile(cast(BinaryIO, archive)) as entries:
        listed = entries.infolist()
    # torch compresses nothing; a compressed entry may be a thousand times as large in memory
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in listed):
        raise ValueError
    if sum(entry.file_size for entry in listed) > archive.seek(0, os.SEEK_END):
        raise ValueError
    archive.seek(0)
    return torch.load(cast(BinaryIO, archive), map_location="cpu", weights_only=True)
