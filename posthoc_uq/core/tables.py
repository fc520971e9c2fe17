"""Tables of text with aligned columns; texts in the cells of a CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from posthoc_uq.core.errors import printable

_FORMULA = re.compile(r"'*[=+@\-\t\r\n\uff1d\uff0b\uff20\uff0d]")
_NEGATIVE = re.compile(r"-\d+(\.\d*)?([eE][+-]?\d+)?")


def csv_text(text: str) -> str:
    """A text as the cell of a CSV that a spreadsheet shows and does not compute: one that begins like a formula (with
    ``= + @``, their wide forms, a tab or the end of a line, or with ``-`` if it is no number) gets an apostrophe in
    front, as spreadsheets have it. One that begins like that behind apostrophes gets one more, so that taking one off
    gives every such text back.
    """
    return f"'{text}" if _FORMULA.match(text) and not _NEGATIVE.fullmatch(text) else text


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    digits: int | Sequence[int] | None = None,
    indent: str = "",
) -> str:
    """Rows under a header and a rule; numbers are aligned to the right, text to the left.

    Args:
        header: names of the columns.
        rows: cells; None and missing numbers (NaN) are left empty.
        digits: decimals of floats, of all columns or of each; None gives four significant digits.
        indent: text before every line.
    """
    places = digits if isinstance(digits, Sequence) else [digits] * len(header)
    cells = [[cell_text(cell, d) for cell, d in zip(row, places, strict=True)] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [_numeric([row[i] for row in rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return (indent + "  ".join(aligned)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def cell_text(value: Any, digits: int | None = None) -> str:
    """One cell: floats with `digits` decimals or four significant digits, nothing for None and NaN, texts with control
    characters escaped.
    """
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if not isinstance(value, float):
        return printable(str(value))
    return f"{value:.4g}" if digits is None else f"{value:.{digits}f}"


def decimals(column: Sequence[Any]) -> int:
    """As many as a column of numbers needs: four, fewer where numbers are large (five digits in all), more where the
    largest would have fewer than three digits.
    """
    sizes = [abs(value) for value in column if isinstance(value, float) and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    power = math.floor(math.log10(largest)) if largest > 0 else 0
    return max(0, 4 - power) if power > 0 else max(4, 2 - power)


def _numeric(column: Sequence[Any]) -> bool:
    present = [value for value in column if value is not None]
    return bool(present) and all(isinstance(value, (int, float)) for value in present)
