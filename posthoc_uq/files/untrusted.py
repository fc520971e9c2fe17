"""A stranger's file is parsed by a child process with limits on time and memory, so that no file can hang or crash the
caller. It is no sandbox: the child is a process of the same user.

The parent sends the bytes through a pipe and gets JSON and plain numbers back, of sizes known beforehand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from math import prod
from threading import Timer
from typing import IO, Any

import numpy as np

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.files import hdf5
from posthoc_uq.files.hdf5 import FormatError, Stored, Structure

SECONDS = 30.0  # for a small file; large ones get more
_BYTES_PER_SECOND = 20e6
_MEMORY = 2**30  # for the interpreter and its libraries
_MAX_OUTLINE_BYTES = 64 * 2**20
_SCRIPT = hdf5.__file__

# The child is isolated (-I -S: no PYTHON* variables, current folder or site); it gets the folders where h5py is.
_LAUNCH = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class ChildReader:
    """`hdf5.ImageReader` in a child process, as a context manager; arrays come in the order of the structure.

    The first limits are enough for the structure alone. For the arrays they grow with the sizes that the structure
    names, which the caller has compared with the model by then.

    Raises:
        PosthocUQError: no process could be started, or it ended before it was given the file.
        FormatError: from every method: the child refused the file, crashed, hung or needed too much memory.
    """

    def __init__(self, data: bytes) -> None:
        if getattr(sys, "frozen", False) or not sys.executable:
            raise _not_started(
                "this program is a frozen or embedded Python, which has no interpreter to start"
            )
        self._data = data
        self._arrays: dict[str, int] = {}  # still to come, and their bytes
        self._started = self._late = False
        folders = json.dumps([os.path.abspath(folder) for folder in sys.path if folder])
        # no second thread for BLAS, and no filter plug-ins
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "HDF5_PLUGIN_PRELOAD": "::",
        }
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, _SCRIPT, folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _not_started(f"'{sys.executable}': {reason}") from error
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input: IO[bytes] = self._child.stdin
        self._output: IO[bytes] = self._child.stdout
        self._watchdog: Timer | None = None

    def _limits(self) -> bytes:
        """The limits of the child, whose clock is started, as JSON."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        expected = len(self._data) + sum(self._arrays.values())
        self._seconds = SECONDS + expected / _BYTES_PER_SECOND
        self._watchdog = Timer(self._seconds, self._stop)
        self._watchdog.daemon = True
        try:
            self._watchdog.start()
        except RuntimeError as error:  # no more threads
            raise _not_started(f"its time cannot be watched: {error}") from error
        memory = _MEMORY + 3 * len(self._data) + 3 * max(self._arrays.values(), default=0)
        limits = {"bytes": len(self._data), "seconds": 2 * int(self._seconds) + 1, "memory": memory}
        return json.dumps(limits).encode()

    def _stop(self) -> None:
        self._late = True
        self._child.kill()

    def __enter__(self) -> ChildReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._child.kill()
        for stream in (self._input, self._output):
            try:
                stream.close()
            except OSError:
                continue
        self._child.wait()

    def _send(self, kind: bytes, data: bytes) -> None:
        try:
            hdf5.write_frame(self._input, kind, data)
        except OSError:  # the child has ended; the error comes from `_receive`
            return

    def _receive(self, kind: bytes, limit: int) -> bytearray:
        try:
            return hdf5.read_frame(self._output, kind, limit)
        except EOFError:
            pass
        ended = self._ended()
        if self._late:
            raise FormatError(f"parsing it took longer than {self._seconds:.0f} seconds")
        raise FormatError(f"it crashed the process that parsed it, which {ended}")

    def _ended(self) -> str:
        """How the child ended, in words."""
        code = self._child.wait()
        if self._late:
            return f"did nothing for {self._seconds:.0f} seconds"
        if code >= 0:
            return f"ended with code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"

    def structure(self) -> Structure:
        """Every group and dataset."""
        self._send(b"L", self._limits())
        try:
            hdf5.read_frame(self._output, b"R", 0)
        except EOFError:
            raise _not_started(f"'{sys.executable}' {self._ended()} before it was given the file") from None
        except FormatError:
            raise _not_started(f"'{sys.executable}' does not answer as Python does") from None
        self._send(b"D", self._data)
        outline: dict[str, Any] = json.loads(self._receive(b"S", _MAX_OUTLINE_BYTES))
        state = bytes(self._receive(b"J", hdf5.MAX_STATE_BYTES))
        datasets = {
            path: Stored(tuple(map(int, stored["shape"])), str(stored["dtype"]))
            for path, stored in outline["datasets"].items()
        }
        self._arrays = {
            path: prod(stored.shape) * np.dtype(stored.dtype).itemsize for path, stored in datasets.items()
        }
        groups, attributes = ([str(name) for name in outline[key]] for key in ("groups", "attributes"))
        return Structure(state, groups, datasets, attributes)

    def array(self, path: str, stored: Stored) -> np.ndarray[Any, Any]:
        """The numbers of the next dataset."""
        if not self._started:
            self._send(b"G", self._limits())
            self._started = True
        size = self._arrays.pop(path)
        data = self._receive(b"A", size)
        if len(data) != size:
            raise FormatError("the process that parsed it gave no valid answer")
        return np.frombuffer(data, stored.dtype).reshape(stored.shape)


def _not_started(reason: str) -> PosthocUQError:
    """The error where no process can be had; the file is not to blame."""
    return PosthocUQError(
        f"Files of strangers are parsed in a process of their own, and none could be started here: {reason}. Do it "
        f"where Python can start processes, or, if you trust the file, load it without untrusted=True."
    )
