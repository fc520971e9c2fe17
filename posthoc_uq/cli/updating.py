"""Data that come into a posterior's file or go out of it, from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.meaning import meaning_of
from posthoc_uq.cli.posterior_files import check_posterior_file, model_and_posterior, rewrite
from posthoc_uq.fitting.update import update
from posthoc_uq.posteriors.report import described_changes


def change_file(
    path: str, spec: str, options: Mapping[str, Any], remove: bool, progress: bool
) -> dict[str, Any]:
    """Update, and rewrite the file; the facts that the command prints, as plain values."""
    check_posterior_file(path)
    source, posterior = model_and_posterior(path, options)
    labels = not options["unlabelled"]
    data = data_of(spec, source, options, meaning_of(posterior), labels=labels, split="train")
    before = posterior.evidence.samples
    posterior = update(posterior, data.loader, remove=remove, progress=progress)
    # in full precision: a few samples among many are less than a half format resolves
    rewrite(posterior, path, options)
    changes = posterior.history.changes
    return {
        "output": options["output"] or path,
        "changed": abs(posterior.evidence.samples - before),
        "samples": posterior.evidence.samples,
        "changes": changes,
        "described": described_changes(changes),
    }
