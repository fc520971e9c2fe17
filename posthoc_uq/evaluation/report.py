"""An evaluation as one HTML file, which needs neither network nor scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.evaluation.gallery import Example
from posthoc_uq.evaluation.listings import Table
from posthoc_uq.evaluation.measurements import Measurements
from posthoc_uq.evaluation.measures import better
from posthoc_uq.page import document, png_source
from posthoc_uq.tables import cell_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RIGHT = ' class="n"'

_EXPLAINED = {
    "Quality": "Bold: the best of its column. ECE: gap between confidence and accuracy. NLL and Brier score: lower is "
    "better, and they punish confident mistakes.",
    "Telling": "AUROC: how often a foreign input scores higher than a familiar one (0.5 is chance). AUPR: average "
    "precision of finding the foreign ones. FPR95: familiar inputs flagged when 95 % of the foreign ones are.",
    "Leaving": "AURC: area under the risk-coverage curve, lower is better; the other columns: what is left after "
    "referring that share of the inputs.",
    "Referred": "Shares of the inputs that are handed to a person, and by which score; several may refer one input.",
}


def html(
    evaluation: Measurements, title: str, tables: Mapping[str, Table], figures: Mapping[str, Figure]
) -> str:
    """The whole page.

    Args:
        evaluation: for the names, the sizes and the images worth a look.
        title: its heading.
        tables: by their headings.
        figures: by their headings.
    """
    sizes = ", ".join(
        f"{len(prediction)} of {escape(name)}"
        for name, prediction in next(iter(evaluation.predictions.values())).items()
    )
    compared = ", ".join(map(escape, evaluation.names))
    parts = [
        f'<p class="note">Compared: {compared}. Inputs: {sizes}.</p>',
    ]
    for heading, (header, rows) in tables.items():
        parts += [f"<h2>{escape(heading)}</h2>", _note(heading), _table(header, rows)]
    for name, figure in figures.items():
        parts += [f"<h2>{escape(name)}</h2>", _picture(figure, name)]
    for name, examples in evaluation.galleries.items():
        parts += [f"<h2>{escape(name[:1].upper() + name[1:])}</h2>", _gallery(evaluation, examples)]
    return document(title, parts)


def _note(heading: str) -> str:
    text = next((note for start, note in _EXPLAINED.items() if heading.startswith(start)), "")
    return f'<p class="note">{escape(text)}</p>'


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    numeric = [any(isinstance(row[i], float) for row in rows) for i in range(len(header))]
    best = [_best(name, [row[i] for row in rows]) for i, name in enumerate(header)]

    def cell(row: int, column: int) -> str:
        value = rows[row][column]
        classes = ["n"] if numeric[column] else []
        classes += ["best"] if row in best[column] else []
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        return f"<td{attribute}>{escape(cell_text(value, 4))}</td>"

    head = "".join(
        f"<th{_RIGHT if right else ''}>{escape(name)}</th>"
        for name, right in zip(header, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(cell(row, column) for column in range(len(header))) + "</tr>\n"
        for row in range(len(rows))
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _best(measure: str, column: Sequence[Any]) -> set[int]:
    """The rows with the best value, where there is something to choose."""
    sign = better(measure)
    values = [value if isinstance(value, float) and value == value else None for value in column]
    known = [value for value in values if value is not None]
    if sign == 0 or len(known) < 2 or len(set(known)) < 2:
        return set()
    top = max(sign * value for value in known)
    return {row for row, value in enumerate(values) if value is not None and sign * value == top}


def _picture(figure: Figure, name: str) -> str:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return f'<figure><img alt="{escape(name)}" src="{png_source(buffer.getvalue())}"></figure>'


class _Shown(NamedTuple):
    source: str
    small: bool


def _gallery(evaluation: Measurements, examples: Sequence[Example]) -> str:
    reasons = evaluation.referral_reasons()
    cards = [_card(evaluation, example, reasons.get(example.data, {})) for example in examples]
    return f'<div class="gallery">{"".join(cards)}</div>'


def _card(evaluation: Measurements, example: Example, reasons: Mapping[str, Tensor]) -> str:
    def named(index: int) -> str:
        names = evaluation.class_names
        return escape(names[index] if names is not None and index < len(names) else f"class {index}")

    shown = _image(evaluation, example.image)
    style = ' class="small"' if shown.small else ""
    lines = [f"<b>{named(example.predicted)}</b> {example.probability:.2f}"]
    if example.label is not None and example.label != example.predicted:
        lines.append(f'<span class="wrong">is {named(example.label)}</span>')
    score = evaluation.default_score.replace("_", " ")
    lines.append(f'<span class="dim">{escape(score)} {example.score:.3g}, input {example.index}</span>')
    referring = [name.replace("_", " ") for name, flags in reasons.items() if bool(flags[example.index])]
    if referring:
        lines.append(f"referred by {escape(' and '.join(referring))}")
    picture = f'<img{style} alt="input {example.index}" src="{shown.source}">'
    return f'<div class="card">{picture}{"<br>".join(lines)}</div>'


def _image(evaluation: Measurements, image: Tensor) -> _Shown:
    if evaluation.display is not None:
        colours = evaluation.display(image).detach().cpu().float()
    else:
        finite = torch.nan_to_num(image)
        colours = (finite - finite.min()) / (finite.max() - finite.min()).clamp(min=1e-12)
    pixels = (colours.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if pixels.shape[0] == 1 else pixels[:3].permute(1, 2, 0).numpy()
    buffer = BytesIO()
    Image.fromarray(array).save(buffer, format="png", optimize=True)
    return _Shown(png_source(buffer.getvalue()), max(array.shape[:2]) < 100)
