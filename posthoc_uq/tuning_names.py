"""What a call of `posthoc_uq.tune` searches on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.held_out import HYPERPARAMETER
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.values import POSITIVE, meant, shown

PARAMETERS = ("prior_precision", "residual_weight", "scale", "noise")


def tunes_temperature(posterior: Posterior, temperature: bool | None) -> bool:
    """Whether the temperature is searched, by default where outputs are logits."""
    logits = posterior.likelihood.logits
    if temperature and not logits:
        raise PosthocUQError(
            f"A temperature divides logits; likelihood {posterior.likelihood.name!r} has none."
        )
    return logits if temperature is None else temperature


def has_something_to_tune(posterior: Posterior) -> bool:
    """Whether a search on held-out data, with nothing named, has something to search."""
    return posterior.widening is not None or posterior.likelihood.logits or posterior.likelihood.has_noise


def nothing_to_tune(posterior: Posterior) -> PosthocUQError:
    """The error for a search on held-out data that has nothing to search."""
    name, available = posterior.widening, _available(posterior)
    if name is None:
        reason = f"a posterior by method={posterior.method!r} has neither a prior precision nor a scale"
    else:
        reason = f"parameters=() leaves the {ABOUT[name].label} as it is"
    logits = posterior.likelihood.logits
    temperature = (
        "temperature=False leaves the temperature"
        if logits
        else f"likelihood {posterior.likelihood.name!r} has no temperature"
    )
    named = f"; what can be searched is named in parameters, out of {available}" if available else ""
    return PosthocUQError(f"There is nothing to tune: {reason}, and {temperature}{named}.")


def _available(posterior: Posterior) -> list[str]:
    """The names in `PARAMETERS` of what this posterior has."""
    return [name for name in PARAMETERS if HYPERPARAMETER.get(name, name) in posterior.tunable]


def checked_grid(names: list[str], grid: Sequence[float]) -> list[float]:
    """The prior precisions to try, as numbers."""
    if "prior_precision" not in names:
        raise PosthocUQError(f"prior_precisions are given, and parameters={names} leave them alone.")
    if (
        isinstance(cast(Any, grid), (str, Mapping))
        or not isinstance(cast(Any, grid), Iterable)
        or getattr(grid, "ndim", 1) != 1
        or len(grid) == 0
    ):
        raise PosthocUQError(f"prior_precisions must be a list of numbers, not {shown(grid)}.")
    return [POSITIVE("Each of prior_precisions", value) for value in grid]


def names_to_tune(posterior: Posterior, parameters: tuple[str, ...] | None, noise: bool | None) -> list[str]:
    """The names of what is searched one after the other, which may be none."""
    has_noise = posterior.likelihood.has_noise
    available = _available(posterior)
    if noise and not has_noise:
        raise PosthocUQError(
            f"noise=True tunes the noise variance, or dispersion, of a regression, and likelihood "
            f"{posterior.likelihood.name!r} has none; leave it out."
        )
    if parameters is None:
        first = [] if posterior.widening is None else [posterior.widening]
        return [*first, "noise"] if has_noise and noise is not False else first
    if isinstance(cast(Any, parameters), str) or not isinstance(cast(Any, parameters), (list, tuple, set)):
        raise PosthocUQError(f"parameters must be a tuple out of {available}, not {shown(parameters)}.")
    unknown = [p for p in parameters if p not in available]
    if unknown:
        allowed = f"among {available}" if available else "left out"
        close = meant(unknown, available)
        raise PosthocUQError(
            f"parameters must be {allowed} for this posterior; not {list(parameters)}.{close}"
        )
    if noise is False and "noise" in parameters:
        raise PosthocUQError("parameters name the noise, and noise=False keeps it; leave one of them out.")
    return [*parameters, "noise"] if noise and "noise" not in parameters else list(parameters)
