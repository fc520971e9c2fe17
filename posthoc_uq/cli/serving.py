"""A posterior's file as a server."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from posthoc_uq.cli.console import print_json, say
from posthoc_uq.cli.posterior_files import check_posterior_file, model_and_posterior, output_names
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.errors import PosthocUQError

_NEEDED = ("starlette", "uvicorn", "python_multipart", "prometheus_client")
_WAITING = 128  # connections that the system keeps until they are accepted
_ANY = ("0.0.0.0", "::", "")


def serve_file(path: str, options: Mapping[str, Any], as_json: bool) -> None:
    """Serve until interrupted.

    Raises:
        PosthocUQError: there is no such file, address, model or package.
    """
    missing = [name.replace("_", "-") for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise PosthocUQError(
            f"serve needs {' and '.join(missing)}; install the extra: pip install 'posthoc-uq[serve]'."
        )
    check_posterior_file(path)
    listening = _socket(options["host"], options["port"])
    try:
        application = _application(path, options)
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if as_json:
            print_json({"url": url})
        else:
            say(f"Serving on {url} (live page /, metrics /metrics); Ctrl-C ends it.")
        _run(application, listening)
    finally:
        listening.close()


def _application(path: str, options: Mapping[str, Any]) -> Any:
    from posthoc_uq.heads.referral import referral_applies
    from posthoc_uq.monitoring import Records
    from posthoc_uq.serving import Limits, Service, Settings, application
    from posthoc_uq.serving.app import LOOPBACK

    reference = None
    if options["reference"] is not None:
        reference = Records.read(options["reference"], "the scores of held-out data")
    source, posterior = model_and_posterior(path, options)
    predictor = predictor_of(source, posterior, options)
    if not referral_applies(predictor):
        what = (
            "whose threshold is of another head or tuning"
            if posterior.history.referral
            else "without a threshold"
        )
        warnings.warn(
            f"'referred' stays null: '{path}' is a file {what} (tune --referral-rate).", stacklevel=2
        )
    names = output_names(source, posterior, options["class_names"])
    settings = Settings(
        names=names,
        limits=Limits(
            options["max_bytes"],
            options["max_batch"],
            options["max_pixels"],
            shorter=source.transform.shorter,
        ),
        **{
            name: options[name]
            for name in (
                "top_k",
                "level",
                "workers",
                "queue",
                "integers",
                "remember",
                "window",
                "log",
                "keep_images",
            )
        },
    )
    hosts = (*LOOPBACK, options["host"], *options["allow_hosts"])
    anyone = options["host"] in _ANY and not options["allow_hosts"]
    service = Service(predictor, source.transform, settings, reference)
    service.warm_up()
    return application(service, None if anyone else hosts)


def _socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_WAITING)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PosthocUQError(f"--host {host} --port {port} cannot be listened on: {reason}.") from None


def _run(application: Any, listening: socket.socket) -> None:
    import uvicorn

    from posthoc_uq.serving.connections import CONNECTIONS, Connection

    config = uvicorn.Config(
        application,
        http=Connection,
        ws="none",
        backlog=_WAITING,  # so many at most come in before room is made for them
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=10,
        limit_concurrency=2 * CONNECTIONS,
    )
    uvicorn.Server(config).run(sockets=[listening])
