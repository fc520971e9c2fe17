"""Tuning from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.cli.data import Data, data_of
from posthoc_uq.cli.meaning import meaning_of
from posthoc_uq.cli.models import Source
from posthoc_uq.cli.posterior_files import check_posterior_file, model_and_posterior, rewrite, stored_dtype
from posthoc_uq.cli.predictors import head_of, predictor_of
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.fitting.tune import tune
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.referral import set_referral
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.referral import rule_of


def tune_file(path: str, options: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Tune, set the threshold, rewrite the file; the facts that the command prints, as plain values."""
    check_posterior_file(path)
    source, posterior = model_and_posterior(path, options)
    data = None
    if options["data"] is not None:
        data = data_of(
            options["data"],
            source,
            options,
            meaning_of(posterior),
            labels=_needs_labels(options),
            split="val",
        )
    threshold = None
    with posterior.searching("set it again with --referral-rate"):
        search_facts = _search(posterior, data, options, progress)
        if data is not None and (options["calibrate"] or options["referral_rate"] is not None):
            threshold = _threshold(source, posterior, data, options, progress)
    rewrite(posterior, path, options, stored_dtype(path))
    prior = posterior.prior_precision
    # the prior precision first, if there is one: it is what most searches are about
    hyperparameters = dict(
        sorted(posterior.reported().items(), key=lambda shown: shown[0] != "prior precision")
    )
    if posterior.noise_variance is not None:
        hyperparameters["noise variance"] = posterior.noise_variance.tolist()
    referral = posterior.history.referral if threshold is not None else {}
    return {
        "output": options["output"] or path,
        "hyperparameters": hyperparameters,
        "prior precision by layer": dict(prior) if isinstance(prior, dict) else None,
        **search_facts,
        "searched through": posterior.history.head or None,
        "threshold": threshold,
        "score": referral.get("score", list(referral.get("scores", {})) or None),
        "rule": rule_of(referral) or None,
        "rate": referral.get("rate"),
        "head": referral.get("head"),
    }


def _criterion(options: Mapping[str, Any]) -> str:
    """The criterion that decides in this search."""
    return options["criterion"] or ("evidence" if options["data"] is None else "likelihood")


def _needs_labels(options: Mapping[str, Any]) -> bool:
    return not options["no_search"] and _criterion(options) == "likelihood"


def _search(
    posterior: Posterior, data: Data | None, options: Mapping[str, Any], progress: bool
) -> dict[str, Any]:
    """Search, and say what was reached; None for what this criterion does not measure."""
    facts: dict[str, Any] = dict.fromkeys(
        ("criterion", "validation NLL", "given up", "model alone", "divergence", "budget")
    )
    if options["no_search"]:
        return facts
    if data is not None and _needs_labels(options) and not data.labelled:
        raise PosthocUQError(
            f"Tuning needs labels, and '{data.spec}' has no class folders; or give --no-search, or --criterion "
            f"faithful."
        )
    criterion = _criterion(options)
    head, head_options = head_of(posterior, options, of_threshold=False)
    arguments: dict[str, Any] = {**options["arguments"], "criterion": criterion}
    draws, named = arguments.pop("search_draws"), arguments.pop("parameters")
    arguments["parameters"] = tuple(name for name in named if name != "none") if named else None
    arguments |= {"head": None} if criterion == "evidence" else _searched_through(head, head_options, draws)
    loader = None if data is None or criterion == "evidence" else data.loader
    trials = tune(posterior, loader, progress=progress, **arguments)
    facts |= {"criterion": criterion, "given up": trials.given_up, "model alone": trials.model_alone}
    facts["validation NLL"] = (
        trials.chosen.objective if trials.chosen is not None and criterion == "likelihood" else None
    )
    if criterion == "faithful":
        facts |= {name: posterior.history.faithful[name] for name in ("divergence", "budget")}
    if criterion != "evidence" and "n_samples" in head_options:  # the draws of predictions, not of the search
        posterior.history.head["options"]["n_samples"] = head_options["n_samples"]
    return facts


def _searched_through(head: str, options: Mapping[str, Any], draws: int) -> dict[str, Any]:
    """The head of the search, which is the one that will predict, and its options as `tune` takes them."""
    head_options = {name: value for name, value in options.items() if name not in ("seed", "n_samples")}
    return {"head": head, **head_options} | ({"n_samples": draws} if head == "sampling" else {})


def _threshold(
    source: Source, posterior: Posterior, data: Data, options: Mapping[str, Any], progress: bool
) -> float | dict[str, float] | None:
    predictor = predictor_of(source, posterior, options, of_threshold=options["no_search"])
    if options["calibrate"]:
        if not isinstance(predictor, MomentsPredictor):
            raise PosthocUQError("--calibrate is for the moments head; give --head moments too.")
        predictor.calibrate(data.loader, progress=progress)
    if options["referral_rate"] is None:
        return None
    prediction = predictor.predict(data.loader, progress=progress)
    return set_referral(predictor, prediction, options["referral_rate"], options["referral_score"])
