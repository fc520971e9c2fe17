"""The HDF5 part of a file, written and read with checks; the only module that imports h5py.

``untrusted`` runs it as a script in a child process, so it imports neither torch nor anything of this package.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from math import prod
from typing import IO, Any
from urllib.parse import quote

import h5py
import numpy as np

STATE = "state"
MAX_STATE_BYTES = 16 * 2**20  # of the JSON description
_MAX_VALUES = 500_000  # keys and values of the description; a layer takes about twenty
_MAX_OBJECTS = 200_000  # groups and datasets of a file
_MAX_CHUNK_BYTES = 4 * 2**20  # of a compressed chunk, inflated; h5py chooses at most 1 MiB
_MAX_ATTRIBUTES = 100  # of the root; nothing else has any
_DTYPES = ("<f8", "<f4", "<f2", "<u2", "|u1")
_NAME_CHARACTERS = " !\"#$&'()*+,-.:;<=>?@[\\]^_`{|}~"
_FRAME = struct.Struct("<cQ")


class FormatError(ValueError):
    """An HDF5 image does not follow the schema."""


@dataclass(frozen=True)
class Stored:
    """One dataset: shape, numpy dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Structure:
    """What an image holds besides its numbers: the JSON description, the groups, the datasets by path, and the names of
    the root's attributes, whose values are for people and are not read.
    """

    state: bytes
    groups: list[str]
    datasets: dict[str, Stored]
    attributes: list[str]


def link_name(name: str) -> str:
    """The name of a group: percent-encoded where HDF5 would nest or refuse it."""
    encoded = quote(name, safe=_NAME_CHARACTERS)
    if not encoded.strip("."):
        encoded = encoded.replace(".", "%2E")
    return encoded or "%"


def state_text(values: Mapping[str, Any]) -> bytes:
    """A description as JSON.

    Raises:
        FormatError: it is too long, or has too many values, to be read again.
        TypeError, ValueError: JSON cannot hold it.
    """
    text = json.dumps(values, ensure_ascii=True).encode()
    if len(text) > MAX_STATE_BYTES or _count_values(text) > _MAX_VALUES:
        raise FormatError(
            f"its description takes {len(text)} bytes and {_count_values(text)} values, and a file holds at most "
            f"{MAX_STATE_BYTES} and {_MAX_VALUES}"
        )
    return text


def state_values(text: bytes) -> dict[str, Any]:
    """The object that a description holds.

    Raises:
        FormatError: it is no JSON object, has too many values, or a key twice.
    """
    if _count_values(text) > _MAX_VALUES:
        raise FormatError(f"its description has more than {_MAX_VALUES} values")
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
    except FormatError:
        raise
    except (ValueError, RecursionError):
        raise FormatError("its description is not valid JSON") from None
    if not isinstance(values, dict):
        raise FormatError("its description is no JSON object")
    return values  # pyright: ignore[reportUnknownVariableType]


def _count_values(text: bytes) -> int:
    """An upper bound on the number of keys and values, by their separators, without parsing."""
    return sum(text.count(mark) for mark in (b",", b":", b"[", b"{")) + 1


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise FormatError("its description has a key twice")
    return values


def build_image(
    text: bytes,
    attributes: Mapping[str, str | int],
    arrays: Mapping[str, Callable[[], np.ndarray[Any, Any]]],
    user_block: int,
    compression: str | None,
) -> BytesIO:
    """The file, its user block still empty.

    Args:
        text: the JSON description; what `load` reads.
        attributes: of the root, for people and other programs.
        arrays: dataset path to a function that gives its numbers.
        user_block: bytes to leave free at the beginning.
        compression: ``"gzip"`` or None.
    """
    buffer = BytesIO()
    with h5py.File(buffer, "w", userblock_size=user_block, track_order=False) as file:
        file.attrs.update(attributes)
        file.create_dataset(STATE, data=np.bytes_(text))
        for path, make in arrays.items():
            array = make()
            options: dict[str, Any] = {"track_times": False}
            if compression is not None and array.size:
                options |= {"compression": compression, "shuffle": True, "chunks": True}
            file.create_dataset(path, data=array, **options)
    return buffer


class ImageReader:
    """Reads a verified image in this process.

    Raises:
        FormatError: from every method, where the image does not follow the schema.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._file = h5py.File(BytesIO(data), "r")
        except MemoryError:
            raise
        except Exception as error:  # h5py raises many types for the errors of libhdf5
            raise FormatError(f"libhdf5 cannot open it ({error})") from None

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def structure(self) -> Structure:
        """Every group and dataset, after checks that need no numbers to be read."""
        try:
            if _attribute_count(self._file) > _MAX_ATTRIBUTES:
                raise FormatError(f"it has more than {_MAX_ATTRIBUTES} attributes")
            groups, datasets = list[str](), dict[str, Stored]()
            self._walk(self._file, "", groups, datasets)
            return Structure(self._state(), groups, datasets, sorted(self._file.attrs))
        except (FormatError, MemoryError):
            raise
        except Exception as error:
            raise FormatError(f"libhdf5 cannot read its structure ({error})") from None

    def _walk(self, group: Any, prefix: str, groups: list[str], datasets: dict[str, Stored]) -> None:
        if len(group) + len(groups) + len(datasets) > _MAX_OBJECTS:
            raise FormatError(f"it holds more than {_MAX_OBJECTS} objects")
        for name in sorted(group):
            path = prefix + name
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise FormatError(f"'{path}' is a link to elsewhere, which a posterior file never has")
            item = group[name]
            if isinstance(item, (h5py.Group, h5py.Dataset)) and _attribute_count(item):
                raise FormatError(f"'{path}' has attributes, which only the file as a whole has")
            if path == STATE:
                continue
            if isinstance(item, h5py.Group):
                if path.count("/") >= 2:
                    raise FormatError(f"'{path}' is nested too deeply")
                groups.append(path)
                self._walk(item, path + "/", groups, datasets)
            elif isinstance(item, h5py.Dataset):
                datasets[path] = _stored(path, item)
            else:
                raise FormatError(f"'{path}' is neither a group nor a dataset")

    def _state(self) -> bytes:
        dataset: Any = self._file.get(STATE)  # no link to elsewhere, as `_walk` has seen
        if not isinstance(dataset, h5py.Dataset):
            raise FormatError(f"it has no dataset '{STATE}'")
        kind, plist = dataset.id.get_type(), dataset.id.get_create_plist()
        _check_layout(STATE, plist)
        size = kind.get_size()
        text = kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str()
        if not text or dataset.shape != () or not 0 < size <= MAX_STATE_BYTES:
            raise FormatError(f"'{STATE}' is not one string of at most {MAX_STATE_BYTES} bytes")
        if plist.get_layout() != h5py.h5d.CONTIGUOUS or dataset.id.get_storage_size() != size:
            raise FormatError(f"'{STATE}' is incomplete")
        return bytes(dataset[()])

    def array(self, path: str, stored: Stored) -> np.ndarray[Any, Any]:
        """The numbers of one dataset that `structure` described as `stored`."""
        try:
            array = np.empty(stored.shape, stored.dtype)
            if array.size:
                dataset: Any = self._file[path]
                dataset.read_direct(array)
            return array
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(f"libhdf5 cannot read '{path}' ({error})") from None


def _attribute_count(item: Any) -> int:
    return h5py.h5a.get_num_attrs(item.id)


def _check_layout(path: str, plist: Any) -> None:
    if plist.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        raise FormatError(
            f"'{path}' is a virtual dataset or of another layout that a posterior file never has"
        )
    if plist.get_external_count():
        raise FormatError(f"'{path}' keeps its numbers in another file")


def _stored(path: str, dataset: Any) -> Stored:
    kind, plist = dataset.id.get_type(), dataset.id.get_create_plist()
    _check_layout(path, plist)
    if kind.get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT) or (dtype := kind.dtype.str) not in _DTYPES:
        raise FormatError(f"'{path}' is of a type that a posterior file never has")
    if not kind.equal(h5py.h5t.py_create(np.dtype(dtype))):
        raise FormatError(f"'{path}' is of a type that a posterior file never has")
    shape = dataset.shape
    if shape is None or dataset.maxshape != shape:
        raise FormatError(f"'{path}' has no fixed shape")
    size, item = prod(shape), kind.get_size()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if plist.get_layout() == h5py.h5d.CONTIGUOUS:
        complete = not filters and dataset.id.get_storage_size() == size * item
    else:
        if filters not in ([], [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]):
            raise FormatError(f"'{path}' is compressed with something other than shuffle and gzip")
        chunk = plist.get_chunk()
        fits = bool(shape) and all(0 < c <= s for c, s in zip(chunk, shape, strict=True))
        if not fits or prod(chunk) * item > _MAX_CHUNK_BYTES:
            raise FormatError(f"'{path}' has chunks of the shape {chunk}, which a posterior file never has")
        complete = dataset.id.get_num_chunks() == prod(-(-s // c) for c, s in zip(chunk, shape, strict=True))
    if not complete:
        raise FormatError(f"'{path}' of shape {shape} is incomplete")
    return Stored(tuple(int(s) for s in shape), dtype)


def read_frame(stream: IO[bytes], kind: bytes, limit: int) -> bytearray:
    """One frame of the pipe between the two processes.

    Raises:
        EOFError: the stream ended.
        FormatError: the frame is an error message, or not of the kind or size expected.
    """
    return read_exactly(stream, _frame_size(stream, kind, limit))


def _frame_size(stream: IO[bytes], kind: bytes, limit: int) -> int:
    received, size = _FRAME.unpack(read_exactly(stream, _FRAME.size))
    if received == b"E" and size <= 4096:
        raise FormatError(read_exactly(stream, size).decode(errors="replace"))
    if received != kind or size > limit:
        raise FormatError("the process that parsed it gave no valid answer")
    return size


def read_exactly(stream: IO[bytes], size: int) -> bytearray:
    """The next `size` bytes.

    Raises:
        EOFError: the stream ended before that.
    """
    data = bytearray(size)
    if stream.readinto(data) < size:  # pyright: ignore[reportAttributeAccessIssue]
        raise EOFError
    return data


def write_frame(stream: IO[bytes], kind: bytes, data: bytes | bytearray | memoryview) -> None:
    """Send one frame."""
    stream.write(_FRAME.pack(kind, len(data)))
    stream.write(data)
    stream.flush()


def limit_resources(seconds: int, memory: int) -> None:
    """Limit this process's processor time and memory, and forbid it to open files, where the platform can.

    The first two may be raised later; the last is for good.
    """
    try:
        import resource
    except ImportError:
        return
    limits = {"RLIMIT_CPU": seconds, "RLIMIT_AS": memory}
    limits |= {"RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(kind, (value, hard if value else 0))
        except (AttributeError, ValueError, OSError):
            continue


def _warm_up() -> None:
    """Make Python and h5py open now all files that they open on first use."""
    image = build_image(b"{}", {}, {"x": lambda: np.zeros(9)}, 512, "gzip").getvalue()
    with ImageReader(image) as reader:
        for path, stored in reader.structure().datasets.items():
            reader.array(path, stored)
    try:
        ImageReader(b"")
    except FormatError:
        return


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """What the child process does: read the image, send its structure and, when asked, all arrays."""
    settings = json.loads(read_frame(stdin, b"L", 1024))
    _warm_up()
    size = int(settings["bytes"])
    limit_resources(int(settings["seconds"]), int(settings["memory"]))
    write_frame(stdout, b"R", b"")  # ready: what goes wrong from here on is the file's doing
    try:
        # `BytesIO` shares these bytes, so that a large file is in memory only once
        reader = ImageReader(stdin.read(_frame_size(stdin, b"D", size)))
        structure = reader.structure()
        datasets = {path: asdict(stored) for path, stored in structure.datasets.items()}
        outline = {
            "groups": structure.groups,
            "datasets": datasets,
            "attributes": structure.attributes,
        }
        write_frame(stdout, b"S", json.dumps(outline).encode())
        write_frame(stdout, b"J", structure.state)
        settings = json.loads(read_frame(stdin, b"G", 1024))
        limit_resources(int(settings["seconds"]), int(settings["memory"]))
        for path, stored in structure.datasets.items():
            write_frame(stdout, b"A", reader.array(path, stored).reshape(-1).view(np.uint8).data)
    except EOFError:
        return
    except MemoryError:
        write_frame(stdout, b"E", b"it asks for more memory than a file of its size may")
    except FormatError as error:
        write_frame(stdout, b"E", str(error).encode(errors="replace")[:4096])


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
