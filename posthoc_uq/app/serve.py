"""A predictor behind HTTP: ``/predict``, ``/predict/image``, ``/predict/batch``, ``/health`` and ``/metrics``.

`Service` has the predictor, two threads that decode, a queue and one thread that predicts what waits in it;
`application` makes an ASGI application of it, for any server of such; `serve` runs that by uvicorn. Needs the extra
``serve``: ``pip install 'posthoc-uq[serve]'``.

Requests:

* ``POST /predict``: one input as JSON, ``{"input": nested lists of numbers}`` without the batch dimension. Several
  inputs of a model go by the names of its arguments, the numbers of a table's row also by those of its columns:
  ``{"input": {"age": 3, "income": 2.5}}``, or these alone. All must be there, and no others; `/health` lists them.
* ``POST /predict/image``: a PNG or JPEG file, as the body or as the one file of a form.
* ``POST /predict/batch``: ``{"inputs": [one, another]}``, all of one length, or a form of several images. The answer is
  ``{"predictions": [...]}``.
* ``GET /health``: the head, the rate of referral, the limits and the inputs. ``GET /metrics``: counters for Prometheus.

An answer has, where the head and the posterior's file know them:

* `prediction`, `index`, `top` (labels with probabilities), `entropy` and `mutual_information` in nats, `novelty`;
* of values `mean`, `lower`, `upper`, `standard_deviation`, `epistemic_variance`, as lists where there are several
  outputs; of several labels those with a probability of one half or more;
* of pixels and tokens `shares` of each class, scores that are means over the positions that count, `set_size`, and up
  to 16,384 classes in all as nested lists `prediction` and `set`, whose sizes are `positions`; a position that does not
  count is null;
* by held-out scores (`posthoc_uq.calibrate`) `set` or bounds that hold the truth with the probability `level`,
  `familiarity` (the p-value of novelty), and `referred` with its `reasons` and its p-value `tail`; `referred` is null
  without held-out scores of this head and tuning.

A wrong request gets a status of 4xx and ``{"error": "one sentence"}``, a fault of the server 500 and a line in its log.
Requests that wait while the model runs are predicted together where their inputs have the same shape: at most
`Limits.batch` inputs and 16.8 million numbers. Where such a batch fails it is halved until the request that the model
does not take is alone. A model that mixes the inputs of a batch needs a batch of 1. A posterior's file that was tuned
or updated is read when the server starts again. Limits of connections are those of `serve`; another server has its own.

Metrics: ``posthoc_uq_requests_total{endpoint,status}``, ``posthoc_uq_errors_total{kind}``, ``posthoc_uq_inputs_total``,
``posthoc_uq_referred_total``, ``posthoc_uq_requests_under_way``, the histograms ``posthoc_uq_entropy_nats``,
``posthoc_uq_novelty``, ``posthoc_uq_request_seconds{endpoint}`` and ``posthoc_uq_model_seconds``; with held-out scores
``posthoc_uq_drift{score}`` and ``posthoc_uq_drift_alarms_total{score}``, which begin anew with the process. Rules for
an alert: ``increase(posthoc_uq_drift_alarms_total[1d]) > 0``, and the share referred, at a rate of 5 %
``rate(posthoc_uq_referred_total[1h]) / rate(posthoc_uq_inputs_total[1h]) > 0.1``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime, timezone
from itertools import islice
from threading import Condition, current_thread, main_thread
from typing import Any, ClassVar, cast

import torch
from PIL import Image
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from posthoc_uq.app.monitor import Monitor
from posthoc_uq.app.requests import (
    Form,
    Inputs,
    Limits,
    Refused,
    body_of,
    files_of,
    inputs_of,
    prepared,
    prepared_image,
    shortened,
)
from posthoc_uq.app.scores import SCORES, ScoreLog
from posthoc_uq.core.batches import INPUT_TYPES
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.ensemble import EnsemblePredictor
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import Referral
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors.history import History

log = logging.getLogger("posthoc_uq.serve")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECTIONS = 400
"""At once. One more ends the one that has been without a whole request for longest."""
RECEIVED_BYTES = 2**30
"""Of all requests that are not answered yet; more end the one that has been without a whole request for longest."""
_ANY_ADDRESS = ("0.0.0.0", "::", "")
_BACKLOG = 128  # connections accepted at once, before room is made for them
_GRACE = 0.25  # seconds in which a new connection is not ended for another one
_MAX_WAITING = 64  # requests with their whole bodies
_THREADS = 2  # that decode; one more predicts
_AT_ONCE = 2**14  # bytes of numbers that are decoded in the event loop: a fraction of a millisecond
_JOINED_NUMBERS = 2**24  # in the inputs of requests that are predicted together, and that wait decoded
_JSON, _FORM = "application/json", "multipart/form-data"
_TAKES = {
    "/predict": (_JSON,),
    "/predict/image": ("image/png", "image/jpeg", _FORM),
    "/predict/batch": (_JSON, _FORM),
}
_SAME_SITE = (
    "same-origin",
    "same-site",
    "none",
)  # what Sec-Fetch-Site says of a page of this site, or of no page
_NOT_FOUND = "There is nothing here; see /health, /metrics, /predict, /predict/image and /predict/batch."
_NOT_ALLOWED = "This address takes another method: POST for predictions, GET for all else."
_ENTROPIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_NOVELTIES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def serve(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_hosts: Sequence[str] = (),
    *,
    started: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until the process is interrupted.

    Args:
        service: what answers.
        host: address to listen on; of this machine alone by default.
        port: to listen on; 0 for any free one.
        allow_hosts: further names by which clients may call the server, such as that of a proxy.
        started: called with the server's URL when it listens.

    Raises:
        PosthocUQError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PosthocUQError(f"Host {host}, port {port} cannot be listened on: {reason}.") from None
    # asyncio sets this on sockets that name their protocol only; without it the end of an answer waits 40 ms for the
    # client's delayed acknowledgement of its beginning
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listening:
        address, port = listening.getsockname()[:2]
        if started is not None:
            started(f"http://{f'[{address}]' if ':' in address else address}:{port}")
        service.warm_up()
        anyone = host in _ANY_ADDRESS and not allow_hosts
        config = Config(
            application(service, None if anyone else (*LOOPBACK, host, *allow_hosts)),
            http=Connection,
            ws="none",
            backlog=_BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=10,
            lifespan="off",  # the service is closed here, also where the server does not end in order
        )
        server = _Server(config)
        with _on_hangup(service.reopen_log):
            try:
                server.run(sockets=[listening])
            finally:
                service.close()
        if server.ended_by is not None:
            signal.raise_signal(server.ended_by)


@contextmanager
def _on_hangup(reopen: Callable[[], bool]) -> Generator[None]:
    """SIGHUP opens the log anew, by which programs that move logs ask for it; without a log it ends the process."""
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or current_thread() is not main_thread() or not reopen():
        yield
        return
    before = signal.signal(hangup, lambda *_: reopen())
    try:
        yield
    finally:
        signal.signal(hangup, before)


class _Server(Server):
    """uvicorn's server, which raises the signal that ended it when all is over: uvicorn does so within asyncio, which
    answers a second one with tracebacks.
    """

    ended_by: int | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take a signal; the second Ctrl-C does not wait for answers."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit, self.ended_by = True, self.ended_by or sig


class _Joining:
    """A transport whose writes during one step of the event loop go out together. uvicorn writes the head and the body
    of an answer one after the other, and around every system call the thread of the model gets hold of Python.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._parts = transport, loop, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write this at the end of the step."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Close it after all that was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Connection(H11Protocol):
    """uvicorn's connection, of which `CONNECTIONS` may be open, and hold `RECEIVED_BYTES`: beyond that the one ends
    which has been without a whole request, or has not taken its answer, for longest.
    """

    _held: ClassVar[int] = 0  # bytes, of the connections of all servers of the process

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it."""
        self._since, self._received = self.loop.time(), 0  # since it was made, or got its last answer
        super().connection_made(cast(asyncio.Transport, _Joining(transport, self.loop)))
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """What it held is free."""
        self._receive(-self._received)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Make room for it."""
        self._receive(len(data))
        super().data_received(data)
        self._make_room()

    def on_response_complete(self) -> None:
        """The next request has its time from now on."""
        self._since = self.loop.time()
        self._receive(-self._received)
        super().on_response_complete()

    def _receive(self, count: int) -> None:
        self._received += count
        Connection._held += count

    def _make_room(self) -> None:
        if len(self.connections) <= CONNECTIONS and Connection._held <= RECEIVED_BYTES:
            return  # mostly: no look at each connection
        there = [
            one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()
        ]
        count, received = len(there), sum(one._received for one in there)
        if count <= CONNECTIONS and received <= RECEIVED_BYTES:
            return
        begun = self.loop.time() - _GRACE
        idle = [one for one in there if one._since < begun and not one._predicting]
        for one in sorted(idle, key=lambda one: one._since):
            if count <= CONNECTIONS and received <= RECEIVED_BYTES:
                return
            one.transport.abort()
            count, received = count - 1, received - one._received

    @property
    def _predicting(self) -> bool:
        """Whether a whole request for a prediction is under way, and the answers before it were taken. What else can be
        asked for is answered at once, and protects nobody who asks for it without end.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused:
            return False
        return cycle.scope["method"] == "POST"


Answers = list[dict[str, Any]]
"""Of one request, one for each input."""


class _Waiting:
    """The inputs of a request, and its answers to come.

    Args:
        inputs: of the request.
        answers: settled in the thread of its loop once they are predicted.

    Attributes:
        rows: how many inputs there are.
        numbers: in all of them.
        form: what requests that are predicted together have in common.
    """

    def __init__(self, inputs: Inputs, answers: asyncio.Future[Answers]) -> None:
        self.inputs, self.answers = inputs, answers
        self.rows = len(next(iter(inputs.values())))
        self.numbers = sum(tensor.numel() for tensor in inputs.values())
        self.form = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in inputs.items()}


def _settle(found: Sequence[tuple[asyncio.Future[Answers], Answers | BaseException]]) -> None:
    """Give requests their answers, or errors, by one call of their event loop: every call wakes its thread."""
    with suppress(RuntimeError):  # of a loop that was closed: nobody waits
        found[0][0].get_loop().call_soon_threadsafe(_settle_here, found)


def _settle_here(found: Sequence[tuple[asyncio.Future[Answers], Answers | BaseException]]) -> None:
    for answers, value in found:
        if answers.done():  # cancelled
            continue
        if isinstance(value, BaseException):
            answers.set_exception(value)
        else:
            answers.set_result(value)


class Service:
    """A predictor with what belongs to serving it.

    Args:
        predictor: from ``uq.wrap``.
        transform: from a Pillow image to an input; without one, images are refused.
        names: of classes or labels, or None for their numbers.
        top_k: classes in an answer.
        level: of intervals and sets.
        referral: refers inputs; without one, or where the posterior's held-out scores do not apply, none are.
        limits: of one request.
        integers: the one input of JSON is whole numbers, such as tokens, where the posterior's file does not say so.
        log: a CSV file to which every input's scores are added, or None.

    Raises:
        PosthocUQError: the log cannot be written, the posterior's held-out scores are too few for the level or do not
            allow the referral, or that refers exactly, by rank.
    """

    def __init__(
        self,
        predictor: Predictor | EnsemblePredictor,
        transform: Callable[[Any], Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        top_k: int = 3,
        level: float = 0.95,
        referral: Referral | None = None,
        limits: Limits | None = None,
        integers: bool = False,
        log: str | None = None,
    ) -> None:
        if isinstance(predictor.promises, ConformalScores):
            predictor.promises.check_level(level)
        self._border: tuple[ConformalScores, float] | None = None
        if referral is not None:
            if referral.exactly:
                raise PosthocUQError(
                    "exactly=True ranks the inputs of a call, and a server answers inputs one by one; give the Service "
                    "a referral by a rate, Referral(rate=0.05), or by an accuracy."
                )
            self.border_of(referral, predictor.promises)
        self.predictor, self.transform, self.limits = predictor, transform, limits or Limits()
        self.names, self.top_k, self.level = names, top_k, level
        self.referral = referral
        self.metrics = Metrics()
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="predict")
        self.places = asyncio.Semaphore(_MAX_WAITING)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: list[_Waiting] = []
        self._numbers, self._working = 0, False  # in what waits; whether the worker is at it
        self._room = Condition()  # guards these; tells when less waits
        self._log = None if log is None else ScoreLog(log)
        self._monitor = _monitor_of(predictor)
        self._started = time.monotonic()
        history = _history_of(predictor)
        self._inputs_at = history.inputs
        self._form = _form_of(predictor, history, integers)

    def border_of(self, referral: Referral, promises: ConformalScores | str | None) -> float | None:
        """The p-value up to which inputs are referred; None where held-out scores do not apply. Computed once for those
        of the predictor: with a confidence it takes many tests.
        """
        if not isinstance(promises, ConformalScores):
            return None
        if self._border is None or self._border[0] is not promises:
            self._border = promises, referral.border(promises)
        return self._border[1]

    def warm_up(self) -> None:
        """Predict a grey image once, so that the first client need not wait for what is made on first use. A model that
        takes no images is left alone.

        Raises:
            PosthocUQError: there are other names than classes.
        """
        if self.transform is not None and self._image is not None:
            with suppress(Refused):
                grey = prepared_image(Image.new("RGB", (256, 256), (128, 128, 128)), self.transform)
                _answers(self, self._predicted({self._image: grey.unsqueeze(0)}))

    @property
    def _image(self) -> str | None:
        """The name of the input that an image can be; None where the model takes more, or a table's columns."""
        return None if self._form.columns else self._form.only

    async def predict(self, body: bytes, headers: Headers, many: bool) -> Answers:
        """Answers to the inputs in a body, JSON, an image, or a form of images, once they are predicted: together with
        what else waits by then, so that many small requests share the cost of a call. Numbers of few bytes are decoded
        at once, all else in another thread, which waits where too much is decoded.

        Raises:
            Refused: the body is wrong, or the model does not take such inputs.
        """
        answers: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        at_once = len(body) <= _AT_ONCE and _content_type(headers) == _JSON
        if at_once and self._numbers < _JOINED_NUMBERS:
            self._add(_Waiting(self._inputs(body, headers, many), answers))
        else:
            self.pool.submit(self._decode, body, headers, many, answers)
        return await answers

    def _decode(self, body: bytes, headers: Headers, many: bool, answers: asyncio.Future[Answers]) -> None:
        try:
            with self._room:
                self._room.wait_for(lambda: self._numbers < _JOINED_NUMBERS)
            self._add(_Waiting(self._inputs(body, headers, many), answers))
        except BaseException as error:
            _settle([(answers, error)])

    def _add(self, request: _Waiting) -> None:
        with self._room:
            self._waiting.append(request)
            self._numbers += request.numbers
            begun, self._working = self._working, True
        if not begun:
            self.worker.submit(self._answer_waiting)

    def _inputs(self, body: bytes, headers: Headers, many: bool) -> Inputs:
        kind = _content_type(headers)
        if kind == _JSON:
            return inputs_of(body, many, self.limits, self._form)
        if self.transform is None:
            raise Refused(415, "image", "This server has no transform of images; send numbers as JSON.")
        only = self._image
        if only is None:
            what = "no images" if self._form.columns else "more than images"
            raise Refused(415, "image", f"The model takes {what}: send JSON, {self._form.shown()}.")
        files = files_of(body, headers, self.limits) if kind == _FORM else [body]
        if len(files) != 1 and not many:
            raise Refused(400, "form", f"The form has {len(files)} files; send several to /predict/batch.")
        return {only: prepared(files, self.transform, self.limits)}

    def _answer_waiting(self) -> None:
        """Answer what waits, until nothing does."""
        while taken := self._taken():
            self._answer(taken)

    def _taken(self) -> list[_Waiting]:
        """The request that has waited for longest, and later ones with inputs of the same shape, which are answered in
        the same batch: no more inputs than one request may have.
        """
        taken, left = list[_Waiting](), list[_Waiting]()
        rows = numbers = 0
        with self._room:
            for request in self._waiting:
                fits = not taken or (
                    request.form == taken[0].form
                    and rows + request.rows <= self.limits.batch
                    and numbers + request.numbers <= _JOINED_NUMBERS
                )
                (taken if fits else left).append(request)
                if fits:
                    rows, numbers = rows + request.rows, numbers + request.numbers
            self._waiting, self._numbers = left, self._numbers - numbers
            self._working = bool(taken)
            self._room.notify_all()
        return taken

    def _answer(self, requests: Sequence[_Waiting]) -> None:
        """Answer requests as one batch; the answers are counted, and their scores logged."""
        counts = [request.rows for request in requests]
        try:
            names = requests[0].inputs
            together = {name: torch.cat([request.inputs[name] for request in requests]) for name in names}
            answers = _answers(self, self._predicted(together))
            if len(requests) > 1 and len(answers) != sum(counts):
                raise PosthocUQError("The model does not give one answer for each input.")
            self._count(answers)
        except BaseException as error:
            if len(requests) == 1:
                _settle([(requests[0].answers, error)])
                requests = ()  # which the error refers to by this frame, so that they would form a circle
                return
            half = len(requests) // 2  # a request that the model does not take must not spoil the others
            self._answer(requests[:half])
            self._answer(requests[half:])
            return
        found = iter([answer for answer, _ in answers])
        whole = len(requests) == 1  # whose answers may be more or fewer than its inputs
        _settle(
            [
                (request.answers, list(found if whole else islice(found, count)))
                for request, count in zip(requests, counts, strict=True)
            ]
        )

    def _count(self, answers: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Count answers, watch their scores for drift, and log them."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self.metrics.inputs.inc(len(answers))
        self.metrics.referred.inc(sum(bool(row["flag"]) for _, row in answers))
        for _, row in answers:
            row["time"] = now
            for name, histogram in (("entropy", self.metrics.entropy), ("novelty", self.metrics.novelty)):
                if row.get(name) is not None:
                    histogram.observe(row[name])
        if self._monitor is not None:
            scores = {name: [row["judged"][name] for _, row in answers] for name in self._monitor.reference}
            watched = self._monitor.add(scores)
            for alarm in watched.alarms:
                self.metrics.drift_alarms.labels(alarm.score).inc()
                log.warning("The %s of inputs drifts, since input %d.", alarm.score, alarm.input + 1)
            for name, evidence in self._monitor.evidence.items():
                self.metrics.drift.labels(name).set(evidence)
        if self._log is not None:
            try:
                self._log.add([row for _, row in answers])
            except (OSError, PosthocUQError) as error:  # a full disk costs the record, not the answer
                self.metrics.errors.labels("log").inc()
                log.error("The record of an input could not be kept: %s.", error)

    def _predicted(self, inputs: Inputs) -> Prediction:
        moved = {name: tensor.to(self.predictor.device) for name, tensor in inputs.items()}
        # by the place or the name by which the fit gave them; without a name there is one input
        places = {name: about.place for name, about in self._inputs_at.items() if about.place is not None}
        if not self._inputs_at:
            places = dict.fromkeys(moved, 0)
        args = [moved.pop(name) for name in sorted(places, key=lambda name: places[name])]
        try:
            with torch.no_grad(), self.metrics.model_seconds.time():
                return self.predictor(*args, **moved).to("cpu")
        except NonFiniteError as error:
            raise Refused(422, "finite", f"{shortened(error)}.") from None
        except PosthocUQError as error:
            raise Refused(422, "shape", f"{shortened(error, 600)}.") from None

    def reopen_log(self) -> bool:
        """Open the log's file anew, where there is a log; whether there is one."""
        if self._log is None:
            return False
        try:
            self._log.reopen()
        except PosthocUQError as error:
            log.error("The log stays the file that it was: %s", error)
        return True

    def health(self) -> dict[str, Any]:
        """That it runs, and what it runs."""
        limits = self.limits
        return {
            "status": "ok",
            "model": type(self.predictor.model).__name__,
            "head": self.predictor.head,
            "likelihood": self.predictor.observation.name,
            "referral": None if self.referral is None else repr(self.referral),
            "images": self.transform is not None and self._image is not None,
            "inputs": {
                name: str(dtype).removeprefix("torch.")
                for name, dtype in self._form.types.items()
                if self._form.named
            },
            "columns": list(self._form.columns),
            "limits": {"bytes": limits.bytes, "batch": limits.batch, "pixels": limits.pixels},
            "uptime_seconds": round(time.monotonic() - self._started, 1),
        }

    def close(self) -> None:
        """Finish what is under way; no more predictions."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.worker.shutdown(wait=True)
        if self._log is not None:
            self._log.close()


def _monitor_of(predictor: Predictor | EnsemblePredictor) -> Monitor | None:
    """Of the scores of inputs that the posterior keeps; None where it keeps none."""
    promises = predictor.promises
    return Monitor(promises.inputs) if isinstance(promises, ConformalScores) else None


def _history_of(predictor: Predictor | EnsemblePredictor) -> History:
    """What says what the inputs are: the history of the posterior, of several networks of the first that has one."""
    several = predictor.posteriors if isinstance(predictor, EnsemblePredictor) else [predictor.posterior]
    return next((posterior.history for posterior in several if posterior is not None), History())


def _form_of(predictor: Predictor | EnsemblePredictor, history: History, integers: bool) -> Form:
    """What the posterior's file says of the model's inputs. Those of floating-point numbers have the model's type."""
    floats = (p.dtype for p in predictor.model.parameters() if p.is_floating_point())
    dtype = torch.int64 if integers else next(floats, torch.float32)
    known = {name: INPUT_TYPES[about.type] for name, about in history.inputs.items()}
    types = {name: dtype if kind.is_floating_point else kind for name, kind in known.items()}
    columns = tuple(history.fit.get("table columns", ())) if len(types) < 2 else ()
    return Form(types or {"input": dtype}, columns, named=bool(types or columns))


class Metrics:
    """Counters and histograms of one server, in a registry of its own; names and meanings are in the documentation."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"namespace": "posthoc_uq", "registry": self.registry}
        self.requests = Counter("requests", "Requests.", ["endpoint", "status"], **options)
        self.errors = Counter("errors", "Requests without an answer.", ["kind"], **options)
        self.inputs = Counter("inputs", "Inputs predicted.", **options)
        self.referred = Counter("referred", "Inputs referred to a person.", **options)
        self.entropy = Histogram("entropy_nats", "Entropy of predictions.", buckets=_ENTROPIES, **options)
        self.novelty = Histogram("novelty", "Novelty of inputs.", buckets=_NOVELTIES, **options)
        self.drift = Gauge("drift", "Evidence of drift; 1 raises an alarm.", ["score"], **options)
        self.drift_alarms = Counter("drift_alarms", "Alarms of drift.", ["score"], **options)
        self.latency = Histogram(
            "request_seconds", "Time of an answered request.", ["endpoint"], buckets=_SECONDS, **options
        )
        self.model_seconds = Histogram(
            "model_seconds", "Time of one prediction.", buckets=_SECONDS, **options
        )
        self.under_way = Gauge("requests_under_way", "Requests under way.", **options)


def application(service: Service, hosts: Sequence[str] | None = LOOPBACK) -> Starlette:
    """An ASGI application, for any server of such; `serve` runs it by uvicorn.

    Args:
        service: what answers.
        hosts: names by which clients may call it (the header Host); None for any. Other names are refused, so that a
            web page that points a name of its own at this machine cannot read answers. Posts that a browser sends are
            refused unless they come from a page of the same name, or of one of these.
    """
    allowed = None if hosts is None else {host.lower() for host in hosts}
    metrics = service.metrics

    async def predict(request: Request) -> Response:
        path, kind = request.scope["path"], _content_type(request.headers)
        if kind not in _TAKES[path]:
            raise Refused(415, "type", f"{path} takes the content type {' or '.join(_TAKES[path])}.")
        body, many = await body_of(request, service.limits), path == "/predict/batch"
        if service.places.locked():
            raise Refused(503, "busy", "The server is busy; try again in a second.")
        async with service.places:
            with metrics.under_way.track_inprogress():
                answers = await service.predict(body, request.headers, many)
        return JSONResponse({"predictions": answers} if many else answers[0])

    async def health(_: Request) -> Response:
        return JSONResponse(service.health())

    async def shown_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def route(path: str, method: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        async def counted(request: Request) -> Response:
            start = time.perf_counter()
            try:
                _check_sender(request, allowed)
                response = await endpoint(request)
                metrics.latency.labels(path).observe(time.perf_counter() - start)
            except Refused as refused:
                metrics.errors.labels(refused.kind).inc()
                headers = {"Retry-After": "1"} if refused.status == 503 else None
                response = JSONResponse({"error": refused.sentence}, refused.status, headers)
            except asyncio.CancelledError:  # the server ends, and does not wait
                response = JSONResponse({"error": "The server was ended."}, 503)
            except Exception:
                metrics.errors.labels("server").inc()
                log.exception("A request to %s failed.", path)
                response = JSONResponse(
                    {"error": "The prediction failed on the server, whose log says why."}, 500
                )
            metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, counted, methods=[method])

    async def elsewhere(_: Request, error: Any) -> Response:
        metrics.requests.labels("other", str(error.status_code)).inc()
        sentence = _NOT_FOUND if error.status_code == 404 else _NOT_ALLOWED
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        yield
        service.close()

    return Starlette(
        routes=[
            *(route(path, "POST", predict) for path in _TAKES),
            route("/health", "GET", health),
            route("/metrics", "GET", shown_metrics),
        ],
        exception_handlers={HTTPException: elsewhere},
        lifespan=lifespan,
    )


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_sender(request: Request, hosts: set[str] | None) -> None:
    """Refuse what a web page of another site makes a browser on this machine send. A browser says so in the header
    Sec-Fetch-Site, or, as all of them do, by the page's Origin.
    """
    given = request.headers.getlist("host")
    host = _name(given[0]) if len(given) == 1 else None
    if host is None and (given or hosts is not None):
        raise Refused(400, "host", "The header Host must be one name, or address, with a port or without.")
    if hosts is not None and host not in hosts:
        raise Refused(421, "host", "This server does not go by that name; start it with --allow-host NAME.")
    if request.method == "POST":
        sites = request.headers.getlist("sec-fetch-site")
        origins = [_name(origin, "[a-z][a-z0-9+.-]*://") for origin in request.headers.getlist("origin")]
        known = {host, *(hosts or ())} - {None}
        if not known.issuperset(origins) or not set(sites).issubset(_SAME_SITE):
            raise Refused(403, "origin", "Requests from web pages of other sites are refused.")


def _name(header: str, before: str = "") -> str | None:
    """The name or address in a header that holds nothing else but a port, and what `before` says; else None.

    Programs for URLs read `evil.com:80@localhost` and the like in different ways, so they are not asked.
    """
    found = re.fullmatch(before + r"(?:([a-z0-9._-]+)|\[([0-9a-f:.]+)\])(?::[0-9]{1,5})?", header.lower())
    return None if found is None else found[1] or found[2]


def _answers(service: Service, prediction: Prediction) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each input of a prediction, which is on the CPU, what the client gets, and the row of the log.

    Raises:
        PosthocUQError: there are other names than classes.
    """
    known, promises = prediction.scores(), prediction.promises
    scores = {
        name: known[name].tolist() for name in SCORES if name in known
    }  # the others are computed when read
    referral, tails, familiarity = None, None, None
    judged = dict[str, list[float]]()  # as held-out scores are
    reasons: dict[str, list[bool]] = {}
    if isinstance(promises, ConformalScores):
        referral, ranked = service.referral, prediction.at_promises().scores()
        judged = {name: ranked[name].tolist() for name in promises.inputs if name in ranked}
        if referral is not None:
            border = cast(float, service.border_of(referral, promises))
            singles = promises.single_p_values(ranked, referral.score)
            reasons = {name: (~(p > border)).tolist() for name, p in singles.items()}
            tails = torch.stack(list(singles.values())).amin(0).tolist()
        if "novelty" in known:
            familiarity = promises.p_values(ranked, "novelty").tolist()
    answers: list[tuple[dict[str, Any], dict[str, Any]]] = []
    described = prediction.answers(top_k=service.top_k, level=service.level, names=service.names)
    for index, answer in enumerate(described):
        first: Mapping[str, Any] = (answer.get("top") or answer.get("shares") or [{}])[0]
        mean = answer.get("mean")
        row = {
            "label_1": first.get("label"),
            "probability_1": first.get("probability"),
            "mean": " ".join(f"{value:.6g}" for value in mean) if isinstance(mean, list) else mean,
            **{name: _finite_or_none(values[index]) for name, values in scores.items()},
            "judged": {name: values[index] for name, values in judged.items()},
        }
        answer |= {name: _finite_or_none(scores[name][index]) for name in SCORES[:3] if name in scores}
        referring = [name for name, flags in reasons.items() if flags[index]]
        answer |= {"referred": None if referral is None else bool(referring), "reasons": referring}
        if tails is not None:
            answer["tail"] = _finite_or_none(tails[index])
        if familiarity is not None:
            answer["familiarity"] = _finite_or_none(familiarity[index])
        row |= {"flag": answer["referred"], "reason": "+".join(referring), "tail": answer.get("tail")}
        answers.append((answer, row))
    return answers


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
