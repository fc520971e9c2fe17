"""A posterior's file as a server."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from posthoc_uq.cli.console import print_json, say
from posthoc_uq.cli.posterior_files import check_posterior_file, model_and_posterior, output_names
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.core.errors import PosthocUQError

_NEEDED = ("starlette", "uvicorn", "python_multipart", "prometheus_client")


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
    from posthoc_uq.deployment.serve import serve

    check_posterior_file(path)
    serve(
        _service(path, options),
        options["host"],
        options["port"],
        options["allow_hosts"],
        started=lambda url: (
            print_json({"url": url}) if as_json else say(f"Serving on {url}; Ctrl-C ends it.")
        ),
    )


def _service(path: str, options: Mapping[str, Any]) -> Any:
    from posthoc_uq.deployment.requests import Limits
    from posthoc_uq.deployment.serve import Service
    from posthoc_uq.heads.referral import referral_applies

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
    return Service(
        predictor,
        source.transform,
        names=output_names(source, posterior, options["class_names"]),
        limits=Limits(
            options["max_bytes"],
            options["max_batch"],
            options["max_pixels"],
            shorter=source.transform.shorter,
        ),
        **{name: options[name] for name in ("top_k", "level", "integers", "log")},
    )
