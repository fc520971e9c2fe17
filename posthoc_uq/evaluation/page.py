"""The page of an evaluation: one HTML file, light and dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from zlib import crc32

import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.core.tables import cell_text
from posthoc_uq.evaluation import plots
from posthoc_uq.evaluation.measurements import FAMILIAR, Example, Measurements, Table, better, column_decimals
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.value_prediction import RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What scores and measures mean, in a sentence each, for pages whose readers have not seen the library.

_SCORES = {
    "entropy": "How undecided the predicted probabilities are, in nats; 0 is certain.",
    "mutual_information": "The part of the entropy that comes from not knowing the weights, in nats.",
    "max_probability": "1 minus the largest probability.",
    "functional_variance": "How far the outputs vary because the weights are not known. Of classifiers it also grows "
    "with the size of the features, and may rank foreign inputs below familiar ones: compare it with novelty.",
    "variation_ratio": "The share of the drawn networks that vote for another class.",
    "novelty": "How unlike the training data an input is: the share of the prior's uncertainty that the data left "
    "there. Between 0 and 1; compare it with held-out inputs, not with a fixed number.",
    "standard_deviation": "How far the target may be from the prediction, noise included, in the target's units.",
    "epistemic_variance": "The part of the variance that comes from not knowing the weights.",
}
_MEASURES = {
    "accuracy": "Share of predictions that are right.",
    "top-5 accuracy": "Share of inputs whose right class is among the five most probable.",
    "NLL": "Mean of the negative log probability (or density) of the right answer. Smaller is better; it punishes "
    "confident mistakes.",
    "Brier": "Squared distance between the probabilities and the right answer. Smaller is better.",
    "ECE": "Expected calibration error: mean gap between how sure the predictions are and how often they are right. "
    "Smaller is better.",
    "ECE (equal mass)": "The same, in groups of equally many predictions.",
    "classwise ECE": "The same for the probability of each class, and then their mean.",
    "mean entropy": "How undecided the predictions are on average, in nats. Neither large nor small is better.",
    "RMSE": "Root of the mean squared error, in the target's units. Smaller is better.",
    "log density": "Mean log density that the prediction gives to the target. Larger is better.",
    "CRPS": "Mean distance of the predicted distribution from the target, in its units. Smaller is better.",
    "coverage": "Share of targets inside the central intervals of a level. Best where it is the level itself.",
    "sharpness": "Mean width of those intervals, in the target's units.",
    "mean deviance": "Mean deviance of a target from its predicted mean. Smaller is better; 0 is perfect.",
    "mAP": "Average precision of finding a label's inputs, mean over labels. Larger is better.",
    "F1 (macro)": "Balance of precision and recall, mean over labels. Larger is better.",
    "F1 (micro)": "The same over all labels together.",
    "Hamming loss": "Share of labels that are decided wrongly.",
    "RPS": "Squared distance between the cumulative probabilities of ordered classes and the right answer. Smaller is "
    "better.",
    "MAE": "Mean distance of the median class from the right one, in classes. Smaller is better.",
    "quadratic kappa": "Agreement with the right classes beyond chance; far misses count more. 1 is perfect.",
    "AUROC": "How often a foreign input has a larger score than a familiar one: 1 is perfect, 0.5 is chance.",
    "AUPR": "Mean precision of finding the foreign inputs by the score. Larger is better.",
    "FPR95": "Share of the familiar inputs that are flagged when 95 % of the foreign ones are. Smaller is better.",
    "AURC": "Mean loss over all shares of inputs that could be kept (area under the risk-coverage curve). Smaller is "
    "better.",
    "AUC": "Area under the ROC curve of the two classes. Larger is better.",
}
_MEANINGS = _SCORES | _MEASURES
_LEVEL = re.compile(r" of \d+ %$")
_REFERRED = re.compile(r"^(.+) at ([\d.e-]+)$")


def words(name: str) -> str:
    """A score's or measure's name as it is written for people: ``"RMSE at 0.05"`` is the RMSE with 5 % referred."""
    found = _REFERRED.match(name)
    if found:
        return f"{found[1]}, {100 * float(found[2]):.4g} % referred"
    return name.replace("_", " ")


def meanings(names: Iterable[str]) -> dict[str, str]:
    """By name as it is written, without levels and shares, what it means; names that are not known are left out."""
    found: dict[str, str] = {}
    for name in names:
        referred = _REFERRED.match(name)
        plain = _LEVEL.sub("", referred[1] if referred else name)
        if plain in _MEANINGS:
            found[words(plain)] = _MEANINGS[plain]
    return found


# The figures of an evaluation.

_WIDE = ("functional_variance", "epistemic_variance", "mutual_information")  # spread over orders of magnitude


CALIBRATION, COVERAGE = "Reliability", "Coverage of intervals"
FOREIGN, RISK = "Familiar and foreign inputs", "Risk over coverage"


def figures(evaluation: Measurements) -> dict[str, Figure]:
    """Figures by title: those that the data allow."""
    panels = _panels(evaluation)
    foreign = {FOREIGN: plots.score_histograms(panels, log=_logarithmic(panels))} if panels else {}
    return _quality(evaluation) | foreign | _risk(evaluation)


def single_figures(evaluation: Measurements) -> dict[str, dict[str, Figure]]:
    """The same by title and name, with a figure for each panel, for a page that is as wide as its reader's screen."""
    by_title = {
        title: {title: figure} for title, figure in (_quality(evaluation) | _risk(evaluation)).items()
    }
    panels = {title: {title: sets} for title, sets in _panels(evaluation).items()}
    histograms = {
        title: plots.score_histograms(panel, log=_logarithmic(panel)) for title, panel in panels.items()
    }
    return by_title | ({FOREIGN: histograms} if histograms else {})


def _quality(evaluation: Measurements) -> dict[str, Figure]:
    """Reliability of classes, coverage of values."""
    test = {name: by_set[FAMILIAR] for name, by_set in evaluation.predictions.items()}
    if evaluation.classification:
        calibration = {name: _calibration(p, evaluation.targets) for name, p in test.items()}
        return {CALIBRATION: plots.reliability_diagram(calibration, bins=evaluation.bins)}
    values = {name: p for name, p in test.items() if p.kind == "values"}
    with_noise = {
        name: (p.mean, p.variance, evaluation.targets)
        for name, p in cast(Mapping[str, RegressionPrediction], values).items()
        if bool((p.variance > 0).all())
    }
    return {COVERAGE: plots.coverage_plot(with_noise)} if with_noise else {}


def _risk(evaluation: Measurements) -> dict[str, Figure]:
    referred = {
        f"{name}, {words(score)}": (
            evaluation.predictions[name][FAMILIAR].scores()[score],
            evaluation.losses(name),
        )
        for name, score in _selected(evaluation)
    }
    return {RISK: plots.risk_coverage_plot(referred)} if referred else {}


def _calibration(prediction: Prediction, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and labels, of inputs or of all their positions."""
    if isinstance(prediction, PositionPrediction):
        rows, labels = prediction.counted(targets)
        return rows.probs, labels
    classes = cast(ClassPrediction, prediction)
    return classes.probs, classes.labels(targets)


def _panels(evaluation: Measurements) -> dict[str, dict[str, Tensor]]:
    """One panel for each row and score: that score on each data set."""
    panels: dict[str, dict[str, Tensor]] = {}
    for name, by_set in evaluation.predictions.items() if evaluation.foreign_names else ():
        for score in evaluation.shown_scores(name):
            if score in ("max_probability", "variation_ratio", "standard_deviation"):
                continue  # nearly the same picture as the entropy's
            panels[f"{words(score)}, {name}"] = {
                data: prediction.scores()[score] for data, prediction in by_set.items()
            }
    return panels


def _logarithmic(panels: Iterable[str]) -> list[str]:
    return [title for title in panels if any(title.startswith(words(score)) for score in _WIDE)]


def _selected(evaluation: Measurements) -> list[tuple[str, str]]:
    """Each row with the default score, where that varies."""
    return [
        (name, evaluation.default_score)
        for name in evaluation.names
        if evaluation.default_score in evaluation.selective[name]
    ]


# The frame and the style of a page that is one HTML file and needs neither network nor scripts.

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #fff; --dim: #555; --line: #e3e3e3; --strong: #999;
        --panel: #f2f2f2; --wrong: #b03a00; --known: #0072B2; --new: #D55E00; --shade: #0003; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #16181b; --dim: #a3a7ad; --line: #33373d; --strong: #6d737b;
          --panel: #24272c; --wrong: #ff8f5a; --known: #5db3e6; --new: #ff9a4d; --shade: #000c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { max-width: 46rem; } .note { color: var(--dim); } a { color: var(--known); }
nav ul { columns: 19rem; max-width: 60rem; padding-left: 1.2rem; } nav li { break-inside: avoid; }
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
"""


def document(title: str, parts: Sequence[str], *, style: str = "", head: str = "") -> str:
    """The whole page.

    Args:
        title: its name and first heading, as text.
        parts: what stands below, as HTML.
        style: CSS beside the shared one.
        head: further elements of the head, as HTML.
    """
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"{head}<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    )


def sections(parts: Mapping[str, str]) -> list[str]:
    """A list of links, and below it the parts (HTML) under their headings (text)."""
    links = "".join(f'<li><a href="#part-{i}">{escape(name)}</a></li>' for i, name in enumerate(parts, 1))
    headed = [
        f'<h2 id="part-{i}">{escape(name)}</h2>\n{part}' for i, (name, part) in enumerate(parts.items(), 1)
    ]
    return [f'<nav aria-label="Contents"><ul>{links}</ul></nav>', *headed]


def folded(summary: str, part: str) -> str:
    """HTML that shows when its one line of text is opened."""
    return f"<details><summary>{escape(summary)}</summary>{part}</details>"


def definitions(meanings: Mapping[str, str]) -> str:
    """What words mean, both as text."""
    return f"<dl>{''.join(f'<dt>{escape(w)}</dt><dd>{escape(m)}</dd>' for w, m in meanings.items())}</dl>"


def png_source(png: bytes) -> str:
    """A picture as the source of an image element."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


# An evaluation as one HTML file, which needs neither network nor scripts.

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
    from posthoc_uq.evaluation.plots.style import COLOURS

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

    from posthoc_uq.evaluation.plots.style import GREY

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
