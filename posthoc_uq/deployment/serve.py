"""A predictor behind HTTP: ``/predict``, ``/predict/image``, ``/predict/batch``, ``/health`` and ``/metrics``.

`Service` has the predictor, a few threads and one lock around the model; `application` makes an ASGI application of it,
for any server of such; `serve` runs that by uvicorn. Needs the extra ``serve``: ``pip install 'posthoc-uq[serve]'``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from threading import Lock
from typing import Any, cast

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
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.deployment.monitor import SCORES, ScoreLog
from posthoc_uq.deployment.requests import (
    BUSY,
    IMAGE_TYPES,
    Bodies,
    Limits,
    Refused,
    files_of,
    numbers_of,
    prepared,
    prepared_image,
    shortened,
)
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.bernoulli import MultilabelPrediction
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors.referral import rule_of, thresholds_of

log = logging.getLogger("posthoc_uq.serve")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECTIONS = 400
"""At once. One more ends the one that has been without a whole request for longest."""
_ANY_ADDRESS = ("0.0.0.0", "::", "")
_BACKLOG = 128  # connections that the system keeps until they are accepted
_THREADS = 2  # that decode and predict; the model itself runs in one at a time
_NEW = 0.25  # seconds in which a connection is not yet ended for another one
_LOOK = 2.0  # seconds between two looks at a connection
_TO_ASK, _TO_TAKE = 10.0, 30.0  # seconds for the head of a request to arrive, and for an answer to be taken
# what Sec-Fetch-Site says of a page of this site, or of no page
_SAME_SITE = ("same-origin", "same-site", "none")
_FORM = "multipart/form-data"
_ENTROPIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_NOVELTIES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
Endpoint = Callable[[Request], Awaitable[Response]]


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
    try:
        address, port = listening.getsockname()[:2]
        if started is not None:
            started(f"http://{f'[{address}]' if ':' in address else address}:{port}")
        service.warm_up()
        anyone = host in _ANY_ADDRESS and not allow_hosts
        config = Config(
            application(service, None if anyone else (*LOOPBACK, host, *allow_hosts)),
            http=Connection,
            ws="none",
            backlog=_BACKLOG,  # so many at most come in before room is made for them
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=10,
            limit_concurrency=2 * CONNECTIONS,
        )
        Server(config).run(sockets=[listening])
    finally:
        listening.close()


class Service:
    """A predictor with what belongs to serving it.

    Args:
        predictor: from ``uq.wrap``.
        transform: from a Pillow image to an input; without one, images are refused.
        names: of classes or labels, or None for their numbers.
        top_k: classes in an answer.
        level: of intervals.
        limits: of one request, and of their number.
        integers: inputs of JSON are whole numbers, such as tokens.
        log: a CSV file to which every input's scores are added, or None.

    Raises:
        PosthocUQError: the log cannot be written.
    """

    def __init__(
        self,
        predictor: Predictor,
        transform: Callable[[Any], Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        top_k: int = 3,
        level: float = 0.95,
        limits: Limits | None = None,
        integers: bool = False,
        log: str | None = None,
    ) -> None:
        self.predictor, self.transform, self.limits = predictor, transform, limits or Limits()
        self.names, self.top_k, self.level = names, top_k, level
        self.referral = predictor.referral if predictor.referral.applies else None
        self.metrics = Metrics()
        self.under_way = 0  # requests, changed by the event loop alone
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="predict")
        self._model = Lock()
        self._log = None if log is None else ScoreLog(log)
        self._started = time.monotonic()
        floats = (p.dtype for p in predictor.model.parameters() if p.is_floating_point())
        self._dtype = torch.int64 if integers else next(floats, torch.float32)

    def warm_up(self) -> None:
        """Predict a grey image once, so that the first client need not wait for what is made on first use. A model that
        takes no images is left alone.

        Raises:
            PosthocUQError: there are other names than classes.
        """
        if self.transform is None:
            return
        try:
            grey = prepared_image(Image.new("RGB", (256, 256), (128, 128, 128)), self.transform)
            answers_of(self, self._predicted(grey.unsqueeze(0)))
        except Refused:
            return

    def predict_numbers(self, body: bytes, many: bool) -> list[dict[str, Any]]:
        """Answers to a body of JSON; see `numbers_of`.

        Raises:
            Refused: the body is wrong, or the model does not take such inputs.
        """
        return self._answered(numbers_of(body, many, self.limits, self._dtype))

    def predict_images(self, files: Sequence[bytes], kind: str | None = None) -> list[dict[str, Any]]:
        """Answers to image files; `kind` is the format that the request named.

        Raises:
            Refused: one is no image, or the model does not take it.
        """
        if self.transform is None:
            raise Refused(415, "image", "This server has no transform of images; send numbers as JSON.")
        return self._answered(prepared(files, self.transform, self.limits, kind))

    def _answered(self, inputs: Tensor) -> list[dict[str, Any]]:
        answers = answers_of(self, self._predicted(inputs))
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        for _, row in answers:
            row["time"] = now
            self.metrics.inputs.inc()
            self.metrics.referred.inc(1 if row["flag"] else 0)
            for name, histogram in (("entropy", self.metrics.entropy), ("novelty", self.metrics.novelty)):
                if row.get(name) is not None:
                    histogram.observe(row[name])
        if self._log is not None:
            try:
                self._log.add([row for _, row in answers])
            except OSError as error:  # a full disk costs the record, not the answer
                self.metrics.errors.labels("log").inc()
                log.error("The record of an input could not be kept: %s.", error)
        return [plain for plain, _ in answers]

    def _predicted(self, inputs: Tensor) -> Prediction:
        try:
            with self._model, torch.no_grad(), self.metrics.model_seconds.time():
                return self.predictor(inputs.to(self.predictor.device)).to("cpu")
        except NonFiniteError as error:
            raise Refused(422, "finite", f"{shortened(error)}.") from None
        except PosthocUQError as error:
            raise Refused(422, "shape", f"{shortened(error, 600)}.") from None

    def health(self) -> dict[str, Any]:
        """That it runs, and what it runs."""
        limits = self.limits
        return {
            "status": "ok",
            "model": type(self.predictor.model).__name__,
            "head": self.predictor.head,
            "likelihood": self.predictor.posterior.likelihood.name,
            "referral": rule_of(self.predictor.posterior.history.referral) if self.referral else None,
            "images": self.transform is not None,
            "limits": {"bytes": limits.bytes, "batch": limits.batch, "pixels": limits.pixels},
            "uptime_seconds": round(time.monotonic() - self._started, 1),
        }

    def close(self) -> None:
        """Finish what is under way; no more predictions."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self._log is not None:
            self._log.close()


def application(service: Service, hosts: Sequence[str] | None = LOOPBACK) -> Starlette:
    """An ASGI application, for any server of such; `serve` runs it by uvicorn.

    Args:
        service: what answers.
        hosts: names by which clients may call it (the header Host); None for any. Other names are refused, so that a
            web page that points a name of its own at this machine cannot read answers. Posts that a browser sends are
            refused unless they come from a page of the same name, or of one of these.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        yield
        service.close()

    def counted(name: str, endpoint: Endpoint) -> Endpoint:
        return _counted(service, name, endpoint)

    async def failed(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        sentences = {
            404: "There is nothing here; see /health, /metrics, /predict, /predict/image and /predict/batch.",
            405: "This address takes another method: POST for predictions, GET for all else.",
        }
        service.metrics.requests.labels("other", str(status)).inc()
        headers = error.headers if isinstance(error, HTTPException) else None
        return _error(status, sentences.get(status, "The request cannot be answered."), headers)

    endpoints = _endpoints(service)
    routes = [
        Route(path, counted(path, endpoint), methods=["POST" if path.startswith("/predict") else "GET"])
        for path, endpoint in endpoints.items()
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, hosts=hosts)],
        exception_handlers={HTTPException: failed},
        lifespan=lifespan,
    )


def _endpoints(service: Service) -> dict[str, Endpoint]:
    limits, bodies = service.limits, Bodies(service.limits)

    async def one(request: Request) -> Response:
        _check_json(request, "/predict")
        async with bodies.whole(request) as body:
            return JSONResponse((await _run(service, service.predict_numbers, body, False))[0])

    def of_form(body: bytes, headers: Headers, many: bool) -> list[dict[str, Any]]:
        files = files_of(body, headers, limits)
        if len(files) != 1 and not many:
            raise Refused(400, "form", f"The form has {len(files)} files; send several to /predict/batch.")
        return service.predict_images(files)

    async def image(request: Request) -> Response:
        kind = _content_type(request)
        if kind not in (_FORM, *IMAGE_TYPES):
            sentence = "/predict/image takes the content type image/png or image/jpeg, or one file of a form."
            raise Refused(415, "type", sentence)
        async with bodies.whole(request) as body:
            if kind == _FORM:
                found = await _run(service, of_form, body, request.headers, False)
            else:
                found = await _run(service, service.predict_images, [body], IMAGE_TYPES[kind])
            return JSONResponse(found[0])

    async def batch(request: Request) -> Response:
        form = _content_type(request) == _FORM
        if not form:
            _check_json(request, "/predict/batch", ", or images as files of a form")
        async with bodies.whole(request) as body:
            if form:
                found = await _run(service, of_form, body, request.headers, True)
            else:
                found = await _run(service, service.predict_numbers, body, True)
            return JSONResponse({"predictions": found})

    async def health(_: Request) -> Response:
        return JSONResponse(service.health())

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return {
        "/predict": one,
        "/predict/image": image,
        "/predict/batch": batch,
        "/health": health,
        "/metrics": metrics,
    }


async def _run(service: Service, function: Callable[..., Any], *args: Any) -> Any:
    """A request whose body is there, through the queue."""
    _check_queue(service)
    service.under_way += 1
    service.metrics.waiting.set(service.under_way)
    try:
        return await asyncio.get_running_loop().run_in_executor(service.pool, function, *args)
    finally:
        service.under_way -= 1
        service.metrics.waiting.set(service.under_way)


def _check_queue(service: Service) -> None:
    if service.under_way >= service.limits.queue:
        raise Refused(503, "busy", BUSY)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_json(request: Request, path: str, more: str = "") -> None:
    if _content_type(request) != "application/json":
        raise Refused(415, "type", f"{path} takes the content type application/json{more}.")


def _counted(service: Service, name: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint, counted and timed, with every refusal as one sentence."""
    metrics, predicts = service.metrics, name.startswith("/predict")

    async def wrapped(request: Request) -> Response:
        start = time.perf_counter()
        try:
            if predicts:
                _check_queue(service)  # before a body is sent in vain; its place is taken when it is there
            response = await endpoint(request)
            metrics.latency.labels(name).observe(time.perf_counter() - start)
        except Refused as refused:
            metrics.errors.labels(refused.kind).inc()
            response = _error(
                refused.status, refused.sentence, {"Retry-After": "1"} if refused.status == 503 else None
            )
        except Exception:
            metrics.errors.labels("server").inc()
            log.exception("A request to %s failed.", name)
            response = _error(500, "The prediction failed on the server, whose log says why.")
        metrics.requests.labels(name, str(response.status_code)).inc()
        return response

    return wrapped


def _error(status: int, sentence: str, headers: Any = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)


class _Guard:
    """Refuses what a web page of another site makes a browser on this machine send."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.getlist("host")
        host = _name(given[0]) if len(given) == 1 else None
        if host is None and (given or self._hosts is not None):
            return _error(400, "The header Host must be one name, or address, with a port or without.")
        if self._hosts is not None and host not in self._hosts:
            return _error(421, "This server does not go by that name; start it with --allow-host NAME.")
        if request.method == "POST" and self._from_elsewhere(request, host):
            return _error(403, "Requests from web pages of other sites are refused.")
        return None

    def _from_elsewhere(self, request: Request, host: str | None) -> bool:
        """Whether a browser says so: in the header Sec-Fetch-Site, or, as all of them do, by the page's Origin."""
        if any(site not in _SAME_SITE for site in request.headers.getlist("sec-fetch-site")):
            return True
        origins = [_name(origin, "[a-z][a-z0-9+.-]*://") for origin in request.headers.getlist("origin")]
        return any(
            origin is None or (origin != host and origin not in (self._hosts or ())) for origin in origins
        )


def _name(header: str, before: str = "") -> str | None:
    """The name or address in a header that holds nothing else but a port, and what `before` says; else None.

    Programs for URLs read `evil.com:80@localhost` and the like in different ways, so they are not asked.
    """
    found = re.fullmatch(before + r"(?:([a-z0-9._-]+)|\[([0-9a-f:.]+)\])(?::[0-9]{1,5})?", header.lower())
    return None if found is None else found[1] or found[2]


class Connection(H11Protocol):
    """uvicorn's. That ends a connection which sends nothing after an answer, but neither one that sends nothing at all,
    nor one that sends a part of a request, nor one that does not read.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, and begin to look at it."""
        super().connection_made(transport)
        self._since = self.loop.time()  # when it was made, or got its last answer
        self._next_look = self.loop.call_later(_LOOK, self._look)
        if len(self.connections) <= CONNECTIONS:
            return
        all_of_them = [one for one in self.connections if isinstance(one, Connection)]
        there = [one for one in all_of_them if not one.transport.is_closing()]
        old = [one for one in there if self._since - one._since > _NEW and not one._asked]
        if len(there) > CONNECTIONS and old:
            min(old, key=lambda one: one._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """No more looks."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next request has its time from now on."""
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def _asked(self) -> bool:
        """Whether a whole request is under way, and the answers before it were taken."""
        cycle = self.cycle
        return not (cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused)

    def _look(self) -> None:
        still = self.loop.time() - self._since
        waits_for_head = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size() > 0
        if still > _TO_TAKE if unread else still > _TO_ASK and waits_for_head:
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(_LOOK, self._look)


def answers_of(service: Service, prediction: Prediction) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each input of a prediction, which is on the CPU, what the client gets, and the row of the log.

    Raises:
        PosthocUQError: there are other names than classes.
    """
    outputs = (
        prediction.probs.shape[1] if isinstance(prediction, MultilabelPrediction) else prediction.classes
    )
    if service.names is not None and outputs is not None and len(service.names) != outputs:
        raise PosthocUQError(
            f"There are {len(service.names)} class names, and the model has {outputs} outputs."
        )
    said = _said(prediction, service)
    referral = service.referral
    shown = (*SCORES[:3], *thresholds_of(service.predictor.posterior.history.referral))
    known = {name: values.tolist() for name, values in prediction.scores().items()}
    reasons: Mapping[str, list[bool]] = {}
    tails: list[float] | None = None
    if referral is not None:
        reasons = {name: flags.tolist() for name, flags in referral.reasons(prediction).items()}
        tails = referral.tail(prediction).tolist()
    answers: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for index, words in enumerate(said):
        scores = {name: _finite(known[name][index]) for name in dict.fromkeys(shown) if name in known}
        referring = [name for name, flags in reasons.items() if flags[index]]
        judged: dict[str, Any] = {
            "referred": bool(referring) if referral is not None else None,
            "reasons": referring,
        }
        if tails is not None:
            judged["tail"] = _finite(tails[index])
        watched = {name: _finite(known[name][index]) for name in SCORES if name in known}
        row = {
            **_first(words),
            **watched,
            "flag": judged["referred"],
            "reason": "+".join(referring),
            "tail": judged.get("tail"),
        }
        answers.append(({**words, **scores, **judged}, row))
    return answers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _first(words: Mapping[str, Any]) -> dict[str, Any]:
    """The first label, or the mean, as the row has it."""
    if words.get("top"):
        first = words["top"][0]
        return {"label_1": first["label"], "probability_1": first["probability"]}
    if words.get("shares"):
        return {"label_1": words["shares"][0]["label"]}
    mean = words.get("mean")
    return {"mean": " ".join(f"{v:.6g}" for v in mean) if isinstance(mean, list) else mean}


def _said(prediction: Prediction, service: Service) -> list[dict[str, Any]]:
    """For each input what was predicted."""
    if isinstance(prediction, PositionPrediction):
        return _positions(prediction, service)
    if isinstance(prediction, ClassPrediction):
        tops = _tops(prediction.top_k(min(service.top_k, prediction.probs.shape[1])), service)
        return [{"prediction": top[0]["label"], "index": top[0]["index"], "top": top} for top in tops]
    if isinstance(prediction, MultilabelPrediction):
        tops = _tops(prediction.top_k(min(service.top_k, prediction.probs.shape[1])), service)
        had = [
            [_label(i, service) for i, p in enumerate(row) if p >= 0.5] for row in prediction.probs.tolist()
        ]
        return [{"prediction": labels, "top": top} for labels, top in zip(had, tops, strict=True)]
    return _values(prediction, service)


def _label(index: int, service: Service) -> str:
    return str(index) if service.names is None else str(service.names[index])


def _tops(found: Any, service: Service) -> list[list[dict[str, Any]]]:
    return [
        [
            {"label": _label(index, service), "index": index, "probability": probability}
            for index, probability in zip(indices, probabilities, strict=True)
        ]
        for indices, probabilities in zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    ]


def _positions(prediction: PositionPrediction, service: Service) -> list[dict[str, Any]]:
    """The classes with the largest share of an input's positions."""
    said: list[dict[str, Any]] = []
    for classes in prediction.predicted().flatten(1):
        shares = torch.bincount(classes, minlength=prediction.classes) / max(1, len(classes))
        order = shares.argsort(descending=True, stable=True)[: service.top_k].tolist()
        said.append(
            {"shares": [{"label": _label(i, service), "index": i, "share": float(shares[i])} for i in order]}
        )
    return said


def _values(prediction: Prediction, service: Service) -> list[dict[str, Any]]:
    values = cast(Any, prediction)
    columns: dict[str, Tensor | None] = {
        "mean": _known(lambda: values.mean),
        "standard_deviation": _known(lambda: values.standard_deviation),
        "epistemic_sd": _known(lambda: values.epistemic_variance.sqrt()),
    }
    interval: Any = _known(lambda: values.interval(service.level))
    if interval is not None:
        columns["lower"], columns["upper"] = interval
    lists = {name: column.tolist() for name, column in columns.items() if column is not None}
    level = {"level": service.level} if interval is not None else {}
    return [
        {**{name: column[index] for name, column in lists.items()}, **level}
        for index in range(len(prediction))
    ]


def _known(get: Callable[[], Any]) -> Any:
    """None where a likelihood of the user's does not tell."""
    try:
        return get()
    except AttributeError:
        return None


class Metrics:
    """Counters and histograms of one server, in a registry of its own.

    Attributes:
        requests: by endpoint and status.
        inputs: predicted.
        referred: of those.
        errors: requests without an answer, by kind.
        entropy: of predictions, in nats.
        novelty: of predictions.
        latency: seconds of a request that was answered, from its first byte to the answer, by endpoint.
        model_seconds: of one prediction of the model, a batch or a single input.
        waiting: requests under way.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def name(what: str) -> str:
            return f"posthoc_uq_{what}"

        self.requests = Counter(name("requests"), "Requests.", ["endpoint", "status"], registry=registry)
        self.inputs = Counter(name("inputs"), "Inputs predicted.", registry=registry)
        self.referred = Counter(name("referred"), "Inputs referred to a person.", registry=registry)
        self.errors = Counter(name("errors"), "Requests without an answer.", ["kind"], registry=registry)
        self.entropy = Histogram(
            name("entropy_nats"), "Entropy of predictions.", registry=registry, buckets=_ENTROPIES
        )
        self.novelty = Histogram(name("novelty"), "Novelty of inputs.", registry=registry, buckets=_NOVELTIES)
        self.latency = Histogram(
            name("request_seconds"), "Time of a request.", ["endpoint"], registry=registry, buckets=_SECONDS
        )
        self.model_seconds = Histogram(
            name("model_seconds"), "Time of one prediction.", registry=registry, buckets=_SECONDS
        )
        self.waiting = Gauge(name("requests_under_way"), "Requests under way.", registry=registry)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)
