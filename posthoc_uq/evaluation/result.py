"""`Evaluation`: the results of `evaluate`, as tables, files, figures and a page."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posthoc_uq.evaluation.figures import figures, single_figures
from posthoc_uq.evaluation.listings import Table, column_decimals, tables
from posthoc_uq.evaluation.measurements import FAMILIAR, Measurements
from posthoc_uq.evaluation.report import html
from posthoc_uq.storage.atomic import checked_target, write
from posthoc_uq.tables import csv_text, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Measurements):
    """Predictions of several data sets by several predictors, and the numbers measured on them; `str` gives tables.

    Attributes:
        predictions: by row (a compared model), by data set: ``"test"`` and the foreign ones.
        targets: of the test data: labels (inputs,), or values shaped like the mean.
        predictors: by row, those that have a posterior.
        galleries: images worth a look, by title.
        score: the uncertainty that `threshold` and the figures use if none is named.
        joint: groups of scores by which foreign data are detected, beside each score alone.
        referral_rates: shares of referred inputs.
        bins: of calibration errors.
        class_names: by index, or None.
        display: input image to colours, or None.
        hyperparameters: by row, those of its posterior when it predicted; without them no threshold can be kept.
    """

    def rows(self) -> list[dict[str, Any]]:
        """Every number, one dictionary each: ``model, data, score, measure, value``; score is empty for quality."""
        numbers: list[dict[str, Any]] = []

        def add(model: str, data: str, score: str, values: Mapping[str, float]) -> None:
            for measure, value in values.items():
                numbers.append(
                    {"model": model, "data": data, "score": score, "measure": measure, "value": value}
                )

        for model in self.names:
            add(model, FAMILIAR, "", self.metrics[model])
            for score, values in self.selective[model].items():
                add(model, FAMILIAR, score, values)
            for data, by_score in self.foreign[model].items():
                for score, values in by_score.items():
                    add(model, data, score, values)
        return numbers

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `rows` as a table of five columns. A name that a spreadsheet would compute as a formula gets an
        apostrophe in front.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        text = StringIO(newline="")
        writer = csv.DictWriter(text, ["model", "data", "score", "measure", "value"])
        writer.writeheader()
        writer.writerows(
            {column: csv_text(cell) if isinstance(cell, str) else cell for column, cell in row.items()}
            for row in self.rows()
        )
        _put(path, text.getvalue())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON; numbers that are not finite are None."""
        sizes = {data: len(p) for data, p in next(iter(self.predictions.values())).items()}
        return cast(
            dict[str, Any],
            _finite(
                {
                    "inputs": sizes,
                    "quality": self.metrics,
                    "selective": self.selective,
                    "foreign": self.foreign,
                    "thresholds": {
                        name: {
                            score: {
                                f"{rate:g}": self.threshold(rate, score, name) for rate in self.referral_rates
                            }
                            for score in self.selective[name]
                        }
                        for name in self.names
                    },
                }
            ),
        )

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        _put(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def tables(self) -> dict[str, Table]:
        """By title, a header and rows of cells: quality, foreign data, selective prediction, referred shares."""
        return tables(self)

    def __str__(self) -> str:
        parts = [
            f"{title}\n\n{text_table(header, rows, digits=column_decimals(header, rows), indent='  ')}"
            for title, (header, rows) in self.tables().items()
        ]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"Evaluation(models={self.names}, foreign={self.foreign_names}, inputs={len(self.targets)})"

    def figures(self) -> dict[str, Figure]:
        """Figures by name: reliability or coverage, scores on familiar and foreign data, risk over coverage."""
        return figures(self)

    def report(self, path: str | os.PathLike[str], *, title: str = "How far to trust this model") -> Path:
        """Write one HTML file that needs nothing else: contents, tables, figures, and the images worth a look; details
        are folded, and it follows the browser's light or dark scheme.

        Args:
            path: of the file.
            title: its heading.

        Returns:
            The path.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        _put(path, html(self, title, self.tables(), single_figures(self)))
        return Path(path)


def _put(path: str | os.PathLike[str], text: str) -> None:
    write(checked_target(path), BytesIO(text.encode()))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in cast(Mapping[Any, Any], value).items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
