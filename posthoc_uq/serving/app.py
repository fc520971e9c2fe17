"""The endpoints: ``/predict``, ``/predict/image``, ``/predict/batch``, ``/health``, ``/metrics``, and the live page."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from posthoc_uq.serving.metrics import CONTENT_TYPE
from posthoc_uq.serving.refusals import Refused
from posthoc_uq.serving.requests import BUSY, IMAGE_TYPES, Bodies, files_of
from posthoc_uq.serving.service import Service, log

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SAME_SITE = (
    "same-origin",
    "same-site",
    "none",
)  # what Sec-Fetch-Site says of a page of this site, or of no page
_FORM = "multipart/form-data"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
Endpoint = Callable[[Request], Awaitable[Response]]


def application(service: Service, hosts: Sequence[str] | None = LOOPBACK) -> Starlette:
    """An ASGI application, for any server of such; `posthoc-uq serve` runs it by uvicorn.

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
            404: "There is nothing here; see /, /health, /metrics, /predict, /predict/image and /predict/batch.",
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
    limits = service.settings.limits
    bodies = Bodies(limits, service.settings.queue)

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
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def page(_: Request) -> Response:
        # in other threads than predictions, which need not wait for it
        return HTMLResponse(await run_in_threadpool(service.page), headers=_PAGE_HEADERS)

    return {
        "/predict": one,
        "/predict/image": image,
        "/predict/batch": batch,
        "/health": health,
        "/metrics": metrics,
        "/": page,
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
    if service.under_way >= service.settings.queue:
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
