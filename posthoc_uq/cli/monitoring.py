"""A CSV of predictions beside held-out data, as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posthoc_uq.cli.atomic_text import atomic_text_file
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.monitoring import Records, drifts, monitor_page
from posthoc_uq.monitoring.drift import newest, shared_scores
from posthoc_uq.monitoring.pictures import pictures_of


def monitor_to_page(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write the page; its facts as plain values.

    Raises:
        PosthocUQError: a file cannot be read or written, or the two have no score in common.
    """
    incoming = Records.read(path, "predictions", options["last"])
    reference = Records.read(options["reference"], "the scores of held-out data")
    if not shared_scores(incoming, reference):
        raise PosthocUQError(
            f"'{path}' has {', '.join(incoming.scores)} and '{options['reference']}' {', '.join(reference.scores)}; "
            f"they need a score in common."
        )
    folders = [Path(options["images"])] if options["images"] else []
    folders.append(Path(path).parent)
    pictures = pictures_of(incoming, folders, options["pictures"])
    page = monitor_page(
        incoming,
        reference,
        pictures,
        window=options["window"],
        title=options["title"],
        note=f"{Path(path).name}, compared with the held-out data in {Path(options['reference']).name}."
        + _left_out(incoming),
    )
    with atomic_text_file(options["output"]) as file:
        file.write(page)
    found = drifts(incoming, reference, options["window"])
    return {
        "output": options["output"],
        "inputs": len(incoming),
        "held_out": len(reference),
        "left_out": incoming.left_out,
        "share_referred": incoming.share_referred,
        "share_referred_held_out": reference.share_referred,
        "drifts": [asdict(test) for test in found],
        "newest": [asdict(test) for test in newest(found)],
        "pictures": len(pictures),
    }


def _left_out(records: Records) -> str:
    """What the page says of rows that could not be read."""
    return (
        f" Rows that were torn or garbled, and are left out: {records.left_out:,}."
        if records.left_out
        else ""
    )
