"""An evaluation from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.models import source_of
from posthoc_uq.cli.posterior_files import (
    check_output,
    check_posterior_file,
    output_names,
    posterior_of,
    rewrite,
)
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.evaluation import evaluate
from posthoc_uq.posteriors.referral import rule_of


def evaluate_file(path: str, spec: str, given: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Evaluate, write what was asked for, set the threshold; all numbers as plain values."""
    check_posterior_file(path)
    outputs = [given[name] for name in ("report", "csv_path", "json_file") if given[name] is not None]
    for output in outputs:
        check_output(output)
    source = source_of(given)
    posterior = posterior_of(path, source)
    data = data_of(spec, source, given, labels=True, split="test")
    if not data.labelled:
        raise PosthocUQError(f"An evaluation needs labels, and '{spec}' has no class folders.")
    foreign = {
        name: data_of(str(data_spec), source, {**given, "split": None}, labels=False, split="test").loader
        for name, data_spec in given["ood"]
    }
    predictor = predictor_of(source, posterior, given)
    score = given["referral_score"]
    several = isinstance(score, tuple)
    evaluation = evaluate(
        {"model alone": source.model, f"{posterior.method}, {predictor.head}": predictor},
        data.loader,
        ood_loaders=foreign,
        score=None if several else score,
        joint=[score] if several else (),
        class_names=output_names(source, data, given["class_names"]),
        display=None if data.files is None else source.transform.display,
        progress=progress,
    )
    threshold = None
    if given["referral_rate"] is not None:
        threshold = evaluation.set_referral(given["referral_rate"], score)
    if given["csv_path"] is not None:
        evaluation.to_csv(given["csv_path"])
    if given["json_file"] is not None:
        evaluation.to_json(given["json_file"])
    if given["report"] is not None:
        evaluation.report(given["report"], title=f"How far to trust {source.spec}")
    if threshold is not None:
        rewrite(posterior, path, None)
    return {
        **evaluation.to_dict(),
        "threshold": threshold,
        "score": (score or evaluation.default_score) if threshold is not None else None,
        "rule": rule_of(posterior.history.referral) if threshold is not None else None,
        "head": predictor.identity(),
        "written": outputs,
        "text": str(evaluation),
    }
