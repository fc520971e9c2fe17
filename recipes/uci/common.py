"""What the scripts of this recipe share: options, means with standard errors, tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from data import MODELDATA, SOURCES, Table, available, load

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "uci"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--smoke", action="store_true", help="Boston, one or two splits, few steps: seconds")
    found.add_argument(
        "--sets", nargs="+", choices=list(SOURCES), help="by default all that can be found, see README.md"
    )
    found.add_argument("--data", type=Path, help="folder with the files that UCI distributes")
    found.add_argument(
        "--modeldata", type=Path, default=MODELDATA, help="data folder of the R package modeldata (concrete)"
    )
    found.add_argument("--splits", type=int, default=20)
    found.add_argument("--steps", type=int, default=1000, help="of Adam")
    found.add_argument("--output", type=Path, default=OUTPUT, help="folder for the figures as JSON")
    return found


def tables(options: argparse.Namespace) -> dict[str, Table]:
    """The sets that the options ask for."""
    names = ["boston"] if options.smoke else options.sets or available(options.data, options.modeldata)
    return {name: load(name, options.data, options.modeldata) for name in names}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over splits and its standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    error = float(numbers.std() / len(numbers) ** 0.5) if len(numbers) > 1 else 0.0
    return float(numbers.mean()), error


def shown(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± standard error``."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}±{error:.{digits}f}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with the columns of the first."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(row[c]) for c in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, content: Any) -> None:
    """JSON, the folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {path}")
