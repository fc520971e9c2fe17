"""An evaluation from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.meaning import meaning_of
from posthoc_uq.cli.posterior_files import (
    check_posterior_file,
    model_and_posterior,
    output_names,
    rewrite,
    stored_dtype,
)
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation import evaluate
from posthoc_uq.posteriors.referral import rule_of


def evaluate_file(path: str, spec: str, options: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Evaluate, write what was asked for, set the threshold; all numbers as plain values."""
    check_posterior_file(path)
    outputs = [options[name] for name in ("report", "csv_path", "json_file") if options[name] is not None]
    source, posterior = model_and_posterior(path, options)
    meaning = meaning_of(posterior)
    data = data_of(spec, source, options, meaning, labels=True, split="test")
    if not data.labelled:
        raise PosthocUQError(f"An evaluation needs labels, and '{spec}' has no class folders.")
    others = {**options, "split": None, "target": (), "columns": (), "ignore_index": None}
    meaning = replace(meaning, kept={**meaning.kept, **data.kept})
    foreign = {
        name: data_of(str(data_spec), source, others, meaning, labels=False, split="test").loader
        for name, data_spec in options["ood"]
    }
    predictor = predictor_of(source, posterior, options)
    score = options["referral_score"]
    several = isinstance(score, tuple)
    evaluation = evaluate(
        {"model alone": source.model, f"{posterior.method}, {predictor.head}": predictor},
        data.loader,
        ood_loaders=foreign,
        score=None if several else score,
        joint=[score] if several else (),
        class_names=output_names(source, posterior, options["class_names"], data),
        display=None if data.files is None else source.transform.display,
        progress=progress,
    )
    threshold = None
    if options["referral_rate"] is not None:
        threshold = evaluation.set_referral(options["referral_rate"], score).thresholds
    if options["csv_path"] is not None:
        evaluation.to_csv(options["csv_path"])
    if options["json_file"] is not None:
        evaluation.to_json(options["json_file"])
    if options["report"] is not None:
        evaluation.report(options["report"], title=f"How far to trust {source.spec}")
    if threshold is not None:
        rewrite(posterior, path, options, stored_dtype(path))
    return {
        **evaluation.to_dict(),
        "threshold": threshold,
        "score": score or (None if threshold is None else list(threshold)),
        "rule": rule_of(posterior.history.referral) if threshold is not None else None,
        "head": predictor.identity(),
        "written": outputs,
        "text": str(evaluation),
    }
