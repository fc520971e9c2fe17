"""Tuning from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.cli.data import Data, data_of
from posthoc_uq.cli.models import Source, source_of
from posthoc_uq.cli.posterior_files import (
    check_output,
    check_posterior_file,
    likelihood_name,
    posterior_of,
    rewrite,
)
from posthoc_uq.cli.predictors import head_of, predictor_of
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.referral import set_referral
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.tuning import tune


def tune_file(path: str, given: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Tune, set the threshold, rewrite the file; what was found, as plain values."""
    check_posterior_file(path)
    check_output(given["output"])
    source = source_of(given)
    posterior = posterior_of(path, source)
    data = None
    if given["data"] is not None:
        data = data_of(given["data"], source, given, labels=_needs_labels(given), split="val")
    threshold = None
    with posterior.searching("set it again with --referral-rate"):
        searched = _search(posterior, data, given, progress)
        if data is not None and (given["calibrate"] or given["referral_rate"] is not None):
            threshold = _threshold(source, posterior, data, given, progress)
    rewrite(posterior, path, given["output"])
    prior = posterior.prior_precision
    # the prior precision first, if there is one: it is what most searches are about
    found = dict(sorted(posterior.reported().items(), key=lambda shown: shown[0] != "prior precision"))
    if posterior.noise_variance is not None:
        found["noise variance"] = posterior.noise_variance.tolist()
    referral = posterior.history.referral if threshold is not None else {}
    return {
        "output": given["output"] or path,
        "hyperparameters": found,
        "prior precision by layer": dict(prior) if isinstance(prior, dict) else None,
        **searched,
        "searched through": posterior.history.head or None,
        "threshold": threshold,
        "score": referral.get("score", list(referral.get("scores", {})) or None),
        "rule": rule_of(referral) or None,
        "rate": referral.get("rate"),
        "head": referral.get("head"),
    }


def _criterion(given: Mapping[str, Any]) -> str:
    """What decides in this search."""
    return given["criterion"] or ("evidence" if given["data"] is None else "likelihood")


def _needs_labels(given: Mapping[str, Any]) -> bool:
    return not given["no_search"] and _criterion(given) == "likelihood"


def _search(
    posterior: Posterior, data: Data | None, given: Mapping[str, Any], progress: bool
) -> dict[str, Any]:
    """Search, and say what was reached: None for what this criterion does not know."""
    found: dict[str, Any] = dict.fromkeys(
        ("criterion", "validation NLL", "given up", "model alone", "divergence", "budget")
    )
    if given["no_search"]:
        return found
    if data is not None and _needs_labels(given) and not data.labelled:
        raise PosthocUQError(
            f"Tuning needs labels, and '{data.spec}' has no class folders; or give --no-search, or --criterion "
            f"faithful."
        )
    criterion = _criterion(given)
    head, options = head_of(posterior, given, of_threshold=False)
    arguments: dict[str, Any] = {**given["arguments"], "criterion": criterion}
    draws, named = arguments.pop("search_draws"), arguments.pop("parameters")
    arguments["parameters"] = tuple(name for name in named if name != "none") if named else None
    arguments |= {"head": None} if criterion == "evidence" else _searched_through(head, options, draws)
    loader = None if data is None or criterion == "evidence" else data.loader
    trials = tune(posterior, loader, progress=progress, **arguments)
    found |= {"criterion": criterion, "given up": trials.given_up, "model alone": trials.model_alone}
    found["validation NLL"] = (trials.chosen or {}).get("validation NLL")
    if criterion == "faithful":
        found |= {name: posterior.history.faithful[name] for name in ("divergence", "budget")}
    if (
        criterion != "evidence" and "n_samples" in options
    ):  # of predictions, which need not be those of the search
        posterior.history.head["options"]["n_samples"] = options["n_samples"]
    return found


def _searched_through(head: str, options: Mapping[str, Any], draws: int) -> dict[str, Any]:
    """The head of the search, which is the one that will predict, and its options as `tune` takes them."""
    own = {name: value for name, value in options.items() if name not in ("seed", "n_samples")}
    return {"head": head, **own} | ({"n_samples": draws} if head == "sampling" else {})


def _threshold(
    source: Source, posterior: Posterior, data: Data, given: Mapping[str, Any], progress: bool
) -> float | dict[str, float] | None:
    predictor = predictor_of(source, posterior, given, of_threshold=given["no_search"])
    if given["calibrate"]:
        if not isinstance(predictor, MomentsPredictor):
            raise PosthocUQError("--calibrate is for the moments head; give --head moments too.")
        predictor.calibrate(data.loader, progress=progress)
    if given["referral_rate"] is None:
        return None
    default = "entropy" if likelihood_name(posterior) == "classes" else "standard_deviation"
    prediction = predictor.predict(data.loader, progress=progress)
    return set_referral(predictor, prediction, given["referral_rate"], given["referral_score"] or default)
