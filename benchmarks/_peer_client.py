"""The other end of `peers.py --serve`: a worker process that can be given up on."""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

import torch

PEERS_SCRIPT = Path(__file__).with_name("peers.py")
STARTING = 300.0
"""Seconds that a worker may take to import its libraries, or to build a network and make its first pass."""


class PeerWorker:
    """Peers' fits and predictions in a process of another environment.

    Started when first asked and again whenever it is gone; a request that takes too long ends it.

    Args:
        python: the environment's interpreter.
        memory: bytes that a fit may allocate; None for no limit.
    """

    def __init__(self, python: Path, memory: int | None = None) -> None:
        self._python = python
        self._memory = memory
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._log: IO[str] | None = None
        self._answers: Queue[str | None] = Queue()
        self._case: dict[str, str] | None = None
        self._prepared = False
        self.versions: dict[str, str] = {}

    def prepare(self, case: str, data: Path) -> None:
        """Name the case that the next fits are of."""
        self._case, self._prepared = {"case": case, "data": str(data)}, False

    def prepare_trained(self, network: str, data: Path) -> None:
        """Name the trained network that the next predictions are of."""
        self._case, self._prepared = {"network": network, "trained": str(data)}, False

    def predict(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """What a peer answers to a request for a prediction; ``error`` where it does not, or not within `limit`."""
        problem = self._ready()
        if problem is not None:
            return {"error": problem}
        found = self._ask(request, limit)
        return found if found is not None else {"error": f"over {limit:g} s"}

    def fit(self, peer: str, limit: float, plain: float) -> dict[str, Any]:
        """Fit one peer between two plain passes.

        Args:
            limit: seconds that the fit may take.
            plain: seconds of a plain pass, which are granted besides.

        Returns:
            ``seconds``, ``plain``, ``note`` and ``error`` (None, or one line of text).
        """
        problem = self._ready()
        if problem is not None:
            return {"error": problem}
        found = self._ask({"peer": peer}, limit + 4 * plain)
        return found if found is not None else {"error": f"over {limit:g} s"}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._reader is not None and self._log is not None:
            process.kill()
            process.wait()
            self._reader.join()
            for stream in (process.stdin, process.stdout, self._log):
                if stream is not None:
                    with suppress(OSError):  # what was not yet sent goes nowhere
                        stream.close()

    def _flags(self) -> list[str]:
        memory = [] if self._memory is None else ["--memory", str(self._memory)]
        return ["--threads", str(torch.get_num_threads()), *memory]

    def _ready(self) -> str | None:
        """Start and prepare where that is not done; what went wrong, in words."""
        if self._process is None:
            self._start()
            hello = self._receive(STARTING)
            if hello is None or "error" in hello:
                return hello["error"] if hello else f"no start within {STARTING:g} s"
            self.versions, self._prepared = hello["versions"], False
        if not self._prepared and self._case is not None:
            built = self._ask(self._case, STARTING)
            if built is None or "error" in built:
                return built["error"] if built else f"no plain pass within {STARTING:g} s"
            self._prepared = True
        return None

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        command = [str(self._python), str(PEERS_SCRIPT), "--serve", *self._flags()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answers = Queue()
        self._reader = Thread(target=_forward, args=(self._process, self._answers), daemon=True)
        self._reader.start()

    def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            return self._died()
        return self._receive(limit)

    def _receive(self, limit: float) -> dict[str, Any] | None:
        """The next answer, an error if the process has died, or None (and no process) if it took too long."""
        try:
            line = self._answers.get(timeout=limit)
        except Empty:
            self.close()
            return None
        return self._died() if line is None else json.loads(line)

    def _died(self) -> dict[str, Any]:
        assert self._process is not None and self._log is not None
        code = self._process.wait()
        self._log.seek(0)
        last = (self._log.read().strip().splitlines() or [""])[-1]
        self.close()
        cause = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return {"error": f"process {cause}: {last}"[:200].rstrip(": ")}


def _forward(process: subprocess.Popen[str], answers: Queue[str | None]) -> None:
    """Pass lines on as they come, so that they can be waited for with a time limit; None is the end."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(None)
