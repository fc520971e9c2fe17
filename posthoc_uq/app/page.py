"""The figures of an evaluation, and its page: one HTML file, light and dark, that needs neither network nor scripts."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from io import BytesIO, StringIO
from string import Template
from typing import Any, cast
from zlib import crc32

import matplotlib
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from posthoc_uq.app import plots
from posthoc_uq.core.tables import cell_text
from posthoc_uq.evaluation.measurements import (
    FAMILIAR,
    Example,
    Measurements,
    ReportTable,
    at_one_level,
    column_decimals,
    meanings,
    measure_of,
    title_of,
)
from posthoc_uq.evaluation.promised import possible_level, promised_curve
from posthoc_uq.likelihoods.maps import MapPrediction

# Figures.

CALIBRATION, COVERAGE, PROMISES = "Reliability", "Coverage of intervals", "Coverage of promises"
MAPS = "Maps of the largest errors"
_MAPS = 3  # inputs
GROUPS = "Coverage of promises by group"
FOREIGN, RISK = "Familiar and foreign inputs", "Risk over coverage"


def figures(evaluation: Measurements) -> dict[str, Figure]:
    """Figures by title: those that the data allow."""
    panels = _panels(evaluation)
    foreign = {FOREIGN: _histograms(panels)} if panels else {}
    return _quality(evaluation) | _promises(evaluation) | foreign | _risk(evaluation)


def _promises(evaluation: Measurements) -> dict[str, Figure]:
    """Coverage over level, of the rows with held-out scores."""
    found = {name: by_set[FAMILIAR] for name, by_set in evaluation.predictions.items()}
    curves = {name: promised_curve(prediction, evaluation.targets) for name, prediction in found.items()}
    known = {name: curve for name, curve in curves.items() if curve is not None}
    if not known:
        return {}
    labels = "level of the promise", "share of right answers inside"
    by_level = plots.coverage_lines(known, len(evaluation.targets), *labels)
    groups = evaluation.coverage_by_group
    return {PROMISES: by_level} | ({GROUPS: plots.group_panels(groups)} if groups else {})


def _quality(evaluation: Measurements) -> dict[str, Figure]:
    """Reliability of classes, coverage of values."""
    test = {name: by_set[FAMILIAR] for name, by_set in evaluation.predictions.items()}
    if evaluation.classification:
        return {CALIBRATION: _reliability(evaluation, evaluation.names)}
    maps = {name: p for name, p in test.items() if isinstance(p, MapPrediction)}
    with_noise = {
        name: (p, evaluation.targets)
        for name, p in test.items()
        if (p.kind == "values" or name in maps) and bool((cast(Any, p).variance > 0).all())
    }
    found = {COVERAGE: plots.coverage_plot(with_noise)} if with_noise else {}
    for name, prediction in maps.items():
        if len(prediction.positions) < 3:
            worst = evaluation.losses(name).topk(min(_MAPS, len(prediction))).indices.sort().values
            level = possible_level(prediction, 0.9)
            found[MAPS] = plots.prediction_maps(
                prediction.picked(worst), evaluation.targets[worst], level=level
            )
    return found


def _reliability(evaluation: Measurements, names: Sequence[str]) -> Figure:
    pairs = {name: (evaluation.predictions[name][FAMILIAR], evaluation.targets) for name in names}
    return plots.reliability_diagram(pairs, bins=evaluation.bins)


def _risk(evaluation: Measurements) -> dict[str, Figure]:
    """The risk by the default score, of the rows where that varies."""
    score = evaluation.default_score
    referred = {
        f"{name}, {title_of(score)}": (by_set[FAMILIAR], evaluation.targets)
        for name, by_set in evaluation.predictions.items()
        if score in evaluation.selective[name]
    }
    return {RISK: plots.risk_coverage_plot(referred, score=score)} if referred else {}


def _panels(evaluation: Measurements) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """One panel for each row and score that varies: the score on each data set, and if its axis is logarithmic."""
    panels: dict[str, tuple[dict[str, Tensor], bool]] = {}
    for name, by_set in evaluation.predictions.items() if evaluation.foreign_names else ():
        for score in plots.histogram_scores(by_set[FAMILIAR]):
            sets = {data: prediction.scores()[score] for data, prediction in by_set.items()}
            panels[f"{title_of(score)}, {name}"] = sets, plots.is_logarithmic(score)
    return panels


def _histograms(panels: Mapping[str, tuple[Mapping[str, Tensor], bool]]) -> Figure:
    log = [title for title, (_, logarithmic) in panels.items() if logarithmic]
    return plots.histogram_panels({title: sets for title, (sets, _) in panels.items()}, log=log)


# The page.

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #fff; --dim: #555; --line: #e3e3e3; --strong: #999;
        --panel: #f2f2f2; --wrong: #b03a00; --known: #0072B2; --new: #D55E00; --shade: #0003; $light }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #16181b; --dim: #a3a7ad; --line: #33373d; --strong: #6d737b;
          --panel: #24272c; --wrong: #ff8f5a; --known: #5db3e6; --new: #ff9a4d; --shade: #000c; $dark }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { max-width: 46rem; } .note { color: var(--dim); } a { color: var(--known); }
nav ul { columns: 19rem; column-gap: 2.5rem; max-width: 60rem; padding-left: 1.2rem; } nav li { break-inside: avoid; }
summary { cursor: pointer; color: var(--known); margin: .5rem 0; width: fit-content; }
dl { max-width: 46rem; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; color: var(--dim); }
.scroll { overflow-x: auto; background:  /* a shadow on the side where there is more */
  linear-gradient(to right, var(--back) 40%, transparent) left / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--back) 40%, transparent) right / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / .8rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid var(--strong); font-weight: 600; vertical-align: bottom; }
td.n, th.n { text-align: right; } th.n { white-space: normal; } td.best { font-weight: 700; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--back); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 1rem 1.6rem; }
figure { margin: 1rem 0; } .charts figure { margin: 0; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .9rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem; font-size: .82rem; line-height: 1.35;
        overflow-wrap: anywhere; }
.card img { width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--panel); display: block;
            margin-bottom: .35rem; }
.card .small { image-rendering: pixelated; } .wrong { color: var(--wrong); } .dim { color: var(--dim); }
@media (max-width: 30rem) {
  body { margin: 1rem auto; } h1 { font-size: 1.4rem; } table { font-size: .85rem; line-height: 1.35; }
  th, td { padding: .3rem .33rem; } td.t { white-space: normal; min-width: 4rem; }
}
figure svg { max-width: 100%; height: auto; fill: var(--text); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
"""

_TABLES = {
    "Quality": "Each row is one way to predict, judged on inputs whose right answer is known. Bold: the best of its "
    "column.",
    "Promised sets and": "Sets of classes, or intervals, that contain the right answer with at least the promised "
    "probability: by held-out scores, on average over new inputs like the held-out ones. Whether inputs still are like "
    "these in use, posthoc-uq monitor tells.",
    "Promised sets by": "The same for inputs of one class, which is promised where the scores were kept by class.",
    "Coverage of promises by": "A promise is an average over all inputs and may fail for some. These groups were found "
    "among the test inputs: fifths of a score, sizes, classes; first those whose coverage is surest to be too small. "
    "It is where \u201cat most\u201d is below the level; of many groups some are by chance.",
    "Telling": "These inputs are unlike those of the training. A score of uncertainty should be larger on them than on "
    "the test inputs; novelty is made for that, and \u201clarge where\u201d says what the others tell. Bold: the best "
    "of its column.",
    "Leaving": "The inputs with the largest scores are handed to a person. The columns say how good the predictions "
    "are on those that remain. Bold: the best of its column.",
    "Referred": "Shares of the inputs that are handed to a person, whose scores are extreme among held-out ones, "
    "and by which score; several may refer one input.",
}
"""Notes on tables, by how their headings start, in the order of the page."""

_FIGURES = {
    CALIBRATION: "How often predictions are right, over how sure they are. On the dashed diagonal the two agree; below "
    "it, predictions are too sure. Each point stands for 20 inputs or more; its bar says where it may lie, given so "
    "few (95 %). Below: how many inputs there are.",
    COVERAGE: "How many targets lie inside the predicted intervals, over how many should. On the dashed diagonal the "
    "two agree; below it, the intervals are too narrow.",
    MAPS: "Targets, predicted means and deviations, and novelty, of the inputs with the largest errors.",
    PROMISES: "How many right answers lie inside the promised sets or intervals, over the promised level. Lines should "
    "follow the dashed diagonal, up to chance (grey). Sets may be empty here.",
    GROUPS: "How many right answers lie inside, by group of inputs. Below the dashed line a group is covered less "
    "often than promised. Vertical bars: where the coverage may lie, given so few inputs (95 %).",
    FOREIGN: "How the scores are spread over the test inputs (filled) and over foreign ones (lines). The less the two "
    "overlap, the better the score tells them apart.",
    RISK: "The mean loss on the inputs that remain when the least certain ones are handed to a person, over the share "
    "that remains. The sooner a line falls from right to left, the better the score knows where the mistakes are.",
}
_FIGURES_AFTER = {
    "Quality": (CALIBRATION, COVERAGE, MAPS),
    "Promised sets and": (PROMISES,),
    "Coverage of promises by": (GROUPS,),
    "Telling": (FOREIGN,),
    "Leaving": (RISK,),
}

_SERIES = {colour.lower(): f"--series-{place}" for place, colour in enumerate(plots.COLOURS[:-1])}
"""By colour of a line in the figures but black, its CSS variable."""
_SERIES_IN_THE_DARK = ("#4a9be0", "#ff8a3d", "#2fc79a", "#e29cc4", "#f0b429", "#8fd0f7")
_INKS = {
    "#000000": "--text",
    plots.GREY: "--dim",
    "#e5e5e5": "--line",
    "#dddddd": "--line",
    "#ffffff": "--back",
}
_MAX_SHOWN = 6  # images of a gallery; the others are folded


def html(evaluation: Measurements, title: str) -> str:
    """The whole page, under a title given as text."""
    drawn = {
        name: {name: figure}
        for name, figure in (_quality(evaluation) | _promises(evaluation) | _risk(evaluation)).items()
    }
    # a figure for each panel: the page is as wide as its reader's screen
    if CALIBRATION in drawn:
        drawn[CALIBRATION] = {name: _reliability(evaluation, [name]) for name in evaluation.names}
    if GROUPS in drawn:
        drawn[GROUPS] = {
            f"coverage by {by}, {name}": plots.group_panels(
                {name: replace(found, groups=[own for own in found.groups if own.by == by])}
            )
            for name, found in evaluation.coverage_by_group.items()
            for by in dict.fromkeys(own.by for own in found.groups)
        }
    panels = {name: _histograms({name: panel}) for name, panel in _panels(evaluation).items()}
    drawn |= {FOREIGN: panels} if panels else {}
    parts: dict[str, str] = {}
    for start, note in _TABLES.items():
        for heading, table in evaluation.tables().items():
            if heading.startswith(start):
                parts[heading] = _note(note) + _tables(evaluation, table)
        for heading in _FIGURES_AFTER.get(start, ()):
            if heading in drawn:
                parts[heading] = _note(_FIGURES[heading]) + _pictures(evaluation, drawn[heading])
    for name, examples in evaluation.galleries.items():
        parts[name[:1].upper() + name[1:]] = _gallery(evaluation, name, examples)
    links = "".join(f'<li><a href="#part-{i}">{escape(name)}</a></li>' for i, name in enumerate(parts, 1))
    light, dark = (
        " ".join(f"{variable}: {colour};" for variable, colour in zip(_SERIES.values(), colours, strict=True))
        for colours in (_SERIES, _SERIES_IN_THE_DARK)
    )
    style = Template(_STYLE).substitute(light=light, dark=dark)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            _introduction(evaluation),
            f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
            *(
                f'<h2 id="part-{i}">{escape(name)}</h2>\n{part}'
                for i, (name, part) in enumerate(parts.items(), 1)
            ),
            "</body></html>\n",
        ]
    )


def _introduction(evaluation: Measurements) -> str:
    sizes = {data: len(p) for data, p in next(iter(evaluation.predictions.values())).items()}
    foreign = ", ".join(f"{sizes[name]:,} of {name}" for name in evaluation.foreign_names)
    text = f"Compared: {'; '.join(evaluation.names)}. Inputs: {sizes[FAMILIAR]:,} test inputs"
    return _note(f"{text}, and foreign ones: {foreign}." if foreign else f"{text}.")


def _note(text: str) -> str:
    whole = text.replace(" %", "\u00a0%")
    return f'<p class="note">{escape(whole)}</p>'


def _folded(summary: str, part: str) -> str:
    """HTML that shows when its one line of text is opened."""
    return f"<details><summary>{escape(summary)}</summary>{part}</details>"


def _headline(evaluation: Measurements) -> set[str]:
    """The scores that are shown at once; the others are folded."""
    joint = {"_and_".join(names) for names in evaluation.joint}
    of_values = () if evaluation.classification else ("epistemic_variance",)
    return {evaluation.default_score, "novelty", *of_values, *joint}


def _tables(evaluation: Measurements, table: ReportTable) -> str:
    """The rows of the headline's scores and one level of promises, all folded, and folded what the words mean."""
    header, rows = table
    place = header.index("score") if "score" in header else None
    scores = [] if place is None else list(dict.fromkeys(row[place] for row in rows))
    parts: list[str] = []
    first = [row for row in rows if place is None or row[place] in _headline(evaluation)]
    if first and len(first) < len(rows):
        parts += [_table(header, first), _folded(f"All {len(scores)} scores", _table(header, rows))]
    elif len((of_one := at_one_level(table))[0]) < len(table[0]):
        parts += [_table(*of_one), _folded("All levels", _table(header, rows))]
    else:
        parts.append(_table(header, rows))
    explained = meanings([*header, *scores])
    if explained:
        terms = (f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in explained.items())
        parts.append(_folded("What the words mean", f"<dl>{''.join(terms)}</dl>"))
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    digits = column_decimals(header, rows)
    numeric = [any(isinstance(row[i], float) for row in rows) for i in range(len(header))]
    columns = [[cell_text(row[i], digits[i]) for row in rows] for i in range(len(header))]
    best = [
        _best(name, column) if right else set[int]()
        for name, column, right in zip(header, columns, numeric, strict=True)
    ]
    scores = header.index("score") if "score" in header else None

    def cell(row: int, column: int) -> str:
        text = columns[column][row]
        classes = ["n" if numeric[column] else "t", *(["best"] if row in best[column] else [])]
        return f'<td class="{" ".join(classes)}">{escape(title_of(text) if column == scores else text)}</td>'

    right_aligned = ' class="n"'
    head = "".join(
        f"<th{right_aligned if right else ''}>{escape(title_of(name))}</th>"
        for name, right in zip(header, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(cell(row, column) for column in range(len(header))) + "</tr>\n"
        for row in range(len(rows))
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _best(name: str, column: Sequence[str]) -> set[int]:
    """The rows with the best value as it is shown, where there is something to choose."""
    measure = measure_of(name)
    if measure is None or measure.larger_is_better is None:
        return set()
    values = {row: float(text) for row, text in enumerate(column) if text}
    if len(set(values.values())) < 2:
        return set()
    best = max(values.values()) if measure.larger_is_better else min(values.values())
    return {row for row, value in values.items() if value == best}


def _pictures(evaluation: Measurements, figures: Mapping[str, Figure]) -> str:
    """One figure as it is; of several those of the headline's scores, the others folded."""
    drawn = {name: _picture(figure, name) for name, figure in figures.items()}
    if len(drawn) == 1:
        return "".join(drawn.values())
    starts = tuple(f"{title_of(score)}, " for score in _headline(evaluation))
    first = {name: picture for name, picture in drawn.items() if name.startswith(starts)} or drawn
    others = [picture for name, picture in drawn.items() if name not in first]
    charts = f'<div class="charts">{"".join(first.values())}</div>'
    return charts + (
        _folded("Other scores", f'<div class="charts">{"".join(others)}</div>') if others else ""
    )


def _picture(figure: Figure, name: str) -> str:
    """A figure as SVG in the colours of the page, whose ids no other figure has."""
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
    for colour, variable in (_INKS | _SERIES).items():
        text = text.replace(colour, f"var({variable})")
    labelled = f'<svg role="img" aria-label="{escape(name)}"'
    return f"<figure>{text.replace('<svg', labelled, 1)}</figure>"


def _gallery(evaluation: Measurements, name: str, examples: Sequence[Example]) -> str:
    reasons = evaluation.referral_reasons()
    cards = [_card(evaluation, example, reasons.get(example.data, {})) for example in examples]
    first, others = (
        f'<div class="gallery">{"".join(part)}</div>' for part in (cards[:_MAX_SHOWN], cards[_MAX_SHOWN:])
    )
    score, row = title_of(evaluation.default_score), evaluation.names[-1]
    which = {
        "most uncertain": f"Test inputs with the largest {score}",
        "surest mistakes": f"Wrong predictions on test inputs, those with the smallest {score} first",
    }.get(name, f"Foreign inputs with the smallest {score}, which are the first to be missed")
    note = _note(f"{which}. Below each: the class that \u201c{row}\u201d predicts, and its probability.")
    return (
        note + first + (_folded(f"{len(cards) - _MAX_SHOWN} more", others) if len(cards) > _MAX_SHOWN else "")
    )


def _card(evaluation: Measurements, example: Example, reasons: Mapping[str, Tensor]) -> str:
    def named(index: int) -> str:
        return escape(evaluation.class_name(index))

    lines = [f"<b>{named(example.predicted)}</b> {example.probability:.2f}"]
    if example.label is not None and example.label != example.predicted:
        lines.append(f'<span class="wrong">is {named(example.label)}</span>')
    score = title_of(evaluation.default_score)
    lines.append(f'<span class="dim">{escape(score)} {example.score:.3g}, input {example.index}</span>')
    referring = [title_of(name) for name, flags in reasons.items() if bool(flags[example.index])]
    if referring:
        lines.append(f"referred by {escape(' and '.join(referring))}")
    picture = _image(evaluation, example)
    return f'<div class="card">{picture}{"<br>".join(lines)}</div>'


def _image(evaluation: Measurements, example: Example) -> str:
    if evaluation.display is not None:
        colours = evaluation.display(example.image).detach().cpu().float()
    else:
        finite = torch.nan_to_num(example.image)
        colours = (finite - finite.min()) / (finite.max() - finite.min()).clamp(min=1e-12)
    pixels = (colours.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if pixels.shape[0] == 1 else pixels[:3].permute(1, 2, 0).numpy()
    buffer = BytesIO()
    Image.fromarray(array).save(buffer, format="png", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    style = ' class="small"' if max(array.shape[:2]) < 100 else ""
    return f'<img{style} alt="input {example.index}" src="{source}">'
