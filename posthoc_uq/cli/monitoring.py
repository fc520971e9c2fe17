"""A CSV of predictions beside held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from posthoc_uq.deployment import drift_figure, drift_table, drifts, newest, read_scores
from posthoc_uq.files.atomic import checked_target, remove_leftovers, replacing


def compare(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Test for drift, and draw it where a figure is asked for; the facts as plain values, and ``text``.

    Raises:
        PosthocUQError: a file cannot be read or written, or the two have no score in common.
    """
    incoming, reference = read_scores(path, options["last"]), read_scores(options["reference"])
    found = drifts(incoming, reference, options["window"])
    if options["output"] is not None:
        target = checked_target(options["output"])
        remove_leftovers(target)
        with replacing(target) as file:
            figure = drift_figure(incoming, reference, options["window"])
            figure.savefig(file, format=target.suffix.lstrip(".") or "png")
    return {
        "text": drift_table(found),
        "output": options["output"],
        "inputs": len(incoming),
        "held_out": len(reference),
        "left_out": incoming.left_out,
        "share_referred": incoming.share_referred,
        "share_referred_held_out": reference.share_referred,
        "drifts": [asdict(test) for test in found],
        "newest": [asdict(test) for test in newest(found)],
    }
