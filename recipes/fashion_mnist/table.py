"""The results of several seeds as one table in Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked

ORDER = (
    "plain",
    "temperature",
    "diag",
    "KFAC",
    "EFB",
    "INF",
    "trained on",
    "function space",
    "message passing",
    "latent binary",
    "UTVI",
    "deep ensemble",
)
SCORES = ("entropy", "mutual_information", "functional_variance", "novelty", "both")


def write_table(results: list[dict[str, dict[str, Any]]], path: Path, smoke: bool = False) -> str:
    """Mean ± standard deviation over seeds, one row a method; also written to `path`."""
    header = ["method", "accuracy", "NLL", "ECE", *(f"AUROC, {s.replace('_', ' ')}" for s in SCORES)]
    lines = [[*header, "time", "MB", "seeds"]]
    names = sorted(dict.fromkeys(name for result in results for name in result), key=place)
    for name in names:
        found = [result[name] for result in results if name in result]
        cells = [spread([one["accuracy"] * 100 for one in found], 2)]
        cells += [spread([one[column] for one in found], 4) for column in ("NLL", "ECE")]
        cells += [
            spread([one["AUROC"][score] for one in found if score in one["AUROC"]], 4) for score in SCORES
        ]
        cells += [
            f"{mean(one['time'] for one in found):.1f}",
            f"{mean(one['bytes'] for one in found) / 1e6:.1f}",
            str(len(found)),
        ]
        lines.append([name, *cells])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    rows.insert(1, "| " + " | ".join(["---"] * len(lines[0])) + " |")
    text = marked("\n".join(rows) + "\n", smoke)
    path.write_text(text)
    return text


def place(name: str) -> int:
    """Of a row in the table; those of one posterior stay as they were measured."""
    return next((i for i, start in enumerate(ORDER) if name.startswith(start)), len(ORDER))


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"
