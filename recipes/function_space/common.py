"""What the recipes of this folder share: where output goes, tables, plain training, the other recipe's modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "function_space"
CURVATURE = {
    "method": "inf",
    "fisher": "exact",
    "correction": "rescale",
    "prior_precision": "evidence",
}
"""INF of the figures in one and two dimensions: options of `uq.fit`."""

FASHION_MNIST = Path(__file__).resolve().parents[1] / "fashion_mnist"

sys.path.append(str(FASHION_MNIST))  # its files, network and rows are used here


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first one its header."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *map(list, rows[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(results: Sequence[dict[str, dict[str, float]]], columns: Sequence[str], form: str = ".3g") -> str:
    """A table of mean ± standard deviation over results, each by row and column; what a row lacks is a dash."""
    lines = [["", *columns]]
    for name in results[0]:
        cells: list[str] = []
        for column in columns:
            values = [result[name][column] for result in results if column in result[name]]
            error = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{mean(values):{form}}{error}" if values else "-")
        lines.append([name, *cells])
    return markdown(lines)


def trained(model: nn.Module, inputs: Tensor, targets: Tensor, loss: nn.Module, steps: int) -> nn.Module:
    """Plain training on all data at once, by Adam at 1e-3."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(inputs), targets).backward()
        optimiser.step()
    optimiser.zero_grad()
    return model.eval()
