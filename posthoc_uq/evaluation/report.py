"""An evaluation as one HTML file, which needs neither network nor scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.evaluation.figures import CALIBRATION, COVERAGE, FOREIGN, RISK
from posthoc_uq.evaluation.gallery import Example
from posthoc_uq.evaluation.listings import Table, column_decimals
from posthoc_uq.evaluation.measurements import FAMILIAR, Measurements
from posthoc_uq.evaluation.measures import better
from posthoc_uq.glossary import meanings, words
from posthoc_uq.page import definitions, document, folded, png_source, sections
from posthoc_uq.tables import cell_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLES = {
    "Quality": "Each row is one way to predict, judged on inputs whose right answer is known. Bold: the best of its "
    "column.",
    "Telling": "These inputs are unlike those of the training. A score of uncertainty should be larger on them than on "
    "the test inputs. Bold: the best of its column.",
    "Leaving": "The inputs with the largest scores are handed to a person. The columns say how good the predictions "
    "are on those that remain. Bold: the best of its column.",
    "Referred": "Shares of the inputs that are handed to a person, and by which score; several may refer one input.",
}
"""Notes on tables, by how their headings start, in the order of the page."""

_FIGURES = {
    CALIBRATION: "How often predictions are right, over how sure they are. On the dashed diagonal the two agree; below "
    "it, predictions are too sure. Vertical bars: where the line may lie, given so few inputs (95 %). Lower panel: how "
    "many inputs there are.",
    COVERAGE: "How many targets lie inside the predicted intervals, over how many should. On the dashed diagonal the "
    "two agree; below it, the intervals are too narrow.",
    FOREIGN: "How the scores are spread over the test inputs (filled) and over foreign ones (lines). The less the two "
    "overlap, the better the score tells them apart.",
    RISK: "The mean loss on the inputs that remain when the least certain ones are handed to a person, over the share "
    "that remains. The sooner a line falls from right to left, the better the score knows where the mistakes are.",
}
_FIGURES_AFTER = {"Quality": (CALIBRATION, COVERAGE), "Telling": (FOREIGN,), "Leaving": (RISK,)}

_SERIES_IN_THE_DARK = ("#4a9be0", "#ff8a3d", "#2fc79a", "#e29cc4", "#f0b429", "#8fd0f7")
_RIGHT = ' class="n"'
_AT_ONCE = 6  # images of a gallery; the others are folded


def html(
    evaluation: Measurements,
    title: str,
    tables: Mapping[str, Table],
    figures: Mapping[str, Mapping[str, Figure]],
) -> str:
    """The whole page.

    Args:
        evaluation: for the names, the sizes and the images worth a look.
        title: its heading.
        tables: by their headings.
        figures: by their headings and names.
    """
    parts: dict[str, str] = {}
    for start, note in _TABLES.items():
        for heading, table in tables.items():
            if heading.startswith(start):
                parts[heading] = _note(note) + _tables(evaluation, *table)
        for heading in _FIGURES_AFTER.get(start, ()):
            if heading in figures:
                parts[heading] = _note(_FIGURES[heading]) + _pictures(evaluation, figures[heading])
    for name, examples in evaluation.galleries.items():
        parts[name[:1].upper() + name[1:]] = _gallery(evaluation, name, examples)
    return document(title, [_introduction(evaluation), *sections(parts)], style=_style())


def _series() -> dict[str, str]:
    """By colour of a line in the figures but black, its CSS variable."""
    from posthoc_uq.plots.style import COLOURS

    return {colour.lower(): f"--series-{place}" for place, colour in enumerate(COLOURS[:-1])}


def _style() -> str:
    series = _series()
    light, dark = (
        " ".join(f"{variable}: {colour};" for variable, colour in zip(series.values(), colours, strict=True))
        for colours in (series, _SERIES_IN_THE_DARK)
    )
    return f"""
:root {{ {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
figure svg {{ max-width: 100%; height: auto; fill: var(--text); }}
figure svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
"""


def _introduction(evaluation: Measurements) -> str:
    sizes = {data: len(p) for data, p in next(iter(evaluation.predictions.values())).items()}
    foreign = ", ".join(f"{sizes[name]:,} of {name}" for name in evaluation.foreign_names)
    text = f"Compared: {'; '.join(evaluation.names)}. Inputs: {sizes[FAMILIAR]:,} test inputs"
    return _note(f"{text}, and foreign ones: {foreign}." if foreign else f"{text}.")


def _note(text: str) -> str:
    whole = text.replace(" %", "\u00a0%")
    return f'<p class="note">{escape(whole)}</p>'


def _headline(evaluation: Measurements) -> set[str]:
    """The scores that are shown at once; the others are folded."""
    joint = {" and ".join(names) for names in evaluation.joint}
    return {evaluation.default_score, "novelty", "epistemic_variance", *joint}


def _tables(evaluation: Measurements, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The rows of the headline's scores, all rows folded, and folded what the words mean."""
    place = header.index("score") if "score" in header else None
    scores = [] if place is None else list(dict.fromkeys(row[place] for row in rows))
    parts: list[str] = []
    first = [row for row in rows if place is None or row[place] in _headline(evaluation)]
    if first and len(first) < len(rows):
        parts += [_table(header, first), folded(f"All {len(scores)} scores", _table(header, rows))]
    else:
        parts.append(_table(header, rows))
    explained = meanings([*header, *scores])
    if explained:
        parts.append(folded("What the words mean", definitions(explained)))
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    digits = column_decimals(header, rows)
    numeric = [any(isinstance(row[i], float) for row in rows) for i in range(len(header))]
    columns = [[cell_text(row[i], digits[i]) for row in rows] for i in range(len(header))]
    best = [
        _best(name, column) if right else set()
        for name, column, right in zip(header, columns, numeric, strict=True)
    ]
    scores = header.index("score") if "score" in header else None

    def cell(row: int, column: int) -> str:
        text = columns[column][row]
        classes = ["n" if numeric[column] else "t", *(["best"] if row in best[column] else [])]
        return f'<td class="{" ".join(classes)}">{escape(words(text) if column == scores else text)}</td>'

    head = "".join(
        f"<th{_RIGHT if right else ''}>{escape(words(name))}</th>"
        for name, right in zip(header, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(cell(row, column) for column in range(len(header))) + "</tr>\n"
        for row in range(len(rows))
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _best(measure: str, column: Sequence[str]) -> set[int]:
    """The rows with the best value as it is shown, where there is something to choose."""
    sign = better(measure)
    values = {row: sign * float(text) for row, text in enumerate(column) if text}
    if sign == 0 or len(set(values.values())) < 2:
        return set()
    return {row for row, value in values.items() if value == max(values.values())}


def _pictures(evaluation: Measurements, figures: Mapping[str, Figure]) -> str:
    """One figure as it is; of several those of the headline's scores, the others folded."""
    drawn = {name: _picture(figure, name) for name, figure in figures.items()}
    if len(drawn) == 1:
        return "".join(drawn.values())
    starts = tuple(f"{words(score)}, " for score in _headline(evaluation))
    first = {name: picture for name, picture in drawn.items() if name.startswith(starts)} or drawn
    others = [picture for name, picture in drawn.items() if name not in first]
    charts = f'<div class="charts">{"".join(first.values())}</div>'
    return charts + (folded("Other scores", f'<div class="charts">{"".join(others)}</div>') if others else "")


def _picture(figure: Figure, name: str) -> str:
    """A figure as SVG in the colours of the page, whose ids no other figure has."""
    import matplotlib

    from posthoc_uq.plots.style import GREY

    buffer = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.S
    )
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    prefix = f"plot-{crc32(name.encode()):x}"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    inks = {"#000000": "--text", GREY: "--dim", "#E5E5E5": "--line", "#DDDDDD": "--line", "#FFFFFF": "--back"}
    for colour, variable in (inks | _series()).items():
        text = text.replace(colour.lower(), f"var({variable})")
    labelled = f'<svg role="img" aria-label="{escape(name)}"'
    return f"<figure>{text.replace('<svg', labelled, 1)}</figure>"


class _Shown(NamedTuple):
    source: str
    small: bool


def _gallery(evaluation: Measurements, name: str, examples: Sequence[Example]) -> str:
    reasons = evaluation.referral_reasons()
    cards = [_card(evaluation, example, reasons.get(example.data, {})) for example in examples]
    first, others = (
        f'<div class="gallery">{"".join(part)}</div>' for part in (cards[:_AT_ONCE], cards[_AT_ONCE:])
    )
    score, row = words(evaluation.default_score), evaluation.names[-1]
    which = {
        "most uncertain": f"Test inputs with the largest {score}",
        "surest mistakes": f"Wrong predictions on test inputs, those with the smallest {score} first",
    }.get(name, f"Foreign inputs with the smallest {score}, which are the first to be missed")
    note = _note(f"{which}. Below each: the class that \u201c{row}\u201d predicts, and its probability.")
    return note + first + (folded(f"{len(cards) - _AT_ONCE} more", others) if len(cards) > _AT_ONCE else "")


def _card(evaluation: Measurements, example: Example, reasons: Mapping[str, Tensor]) -> str:
    def named(index: int) -> str:
        names = evaluation.class_names
        return escape(names[index] if names is not None and index < len(names) else f"class {index}")

    shown = _image(evaluation, example.image)
    style = ' class="small"' if shown.small else ""
    lines = [f"<b>{named(example.predicted)}</b> {example.probability:.2f}"]
    if example.label is not None and example.label != example.predicted:
        lines.append(f'<span class="wrong">is {named(example.label)}</span>')
    score = words(evaluation.default_score)
    lines.append(f'<span class="dim">{escape(score)} {example.score:.3g}, input {example.index}</span>')
    referring = [words(name) for name, flags in reasons.items() if bool(flags[example.index])]
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
