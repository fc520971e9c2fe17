"""The page of what comes in: one HTML file, without scripts and outside resources, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from posthoc_uq.glossary import meanings, words
from posthoc_uq.monitoring.charts import STYLE as CHART_STYLE
from posthoc_uq.monitoring.charts import histograms, share_over_time
from posthoc_uq.monitoring.drift import FEWEST, LEVEL, Drift, drifts, newest, shared_scores, windows
from posthoc_uq.monitoring.pictures import Picture
from posthoc_uq.monitoring.records import Records
from posthoc_uq.page import definitions, document, folded, png_source

_UNITS = {
    "entropy": "nats",
    "mutual_information": "nats",
    "novelty": "share of the prior's uncertainty that is left",
    "standard_deviation": "units of the output",
}
_SHOWN = 12  # newest windows in the table
_DRAWN = 60  # and in the chart

_STYLE = (
    CHART_STYLE
    + """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .55rem .8rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--dim); font-size: .82rem; display: block; }
.charts h3 { font-size: 1rem; margin: .2rem 0; font-weight: 600; }
.key { font-size: .85rem; color: var(--dim); margin: .2rem 0 .6rem; }
.key i { display: inline-block; width: 1.1em; height: .75em; margin-right: .35em; vertical-align: baseline; }
.key .known { background: var(--known); opacity: .5; }
.key .new { border: 2px solid var(--new); box-sizing: border-box; }
.key span { margin-right: 1.1em; white-space: nowrap; }
.verdict { border-left: 4px solid var(--known); padding: .3rem .8rem; background: var(--panel); }
.verdict.alarm { border-color: var(--wrong); }
@media (max-width: 30rem) { .when { display: none; } }
"""
)


def monitor_page(
    incoming: Records,
    reference: Records | None,
    pictures: Sequence[Picture] = (),
    *,
    window: int = 200,
    title: str = "What comes in",
    note: str = "",
    refresh: int | None = None,
) -> str:
    """The whole page, as HTML.

    Args:
        incoming: in their order of coming.
        reference: held-out inputs; without them there are no tests.
        pictures: of the most novel inputs.
        window: inputs of a test and of a point of the chart over time.
        title: its heading.
        note: a line below it, as text.
        refresh: seconds after which a browser loads the page again.

    Raises:
        PosthocUQError: the window is too small for a test.
    """
    found = [] if reference is None else drifts(incoming, reference, window)
    parts = [f'<p class="note">{escape(note)}</p>' if note else "", _tiles(incoming, reference)]
    if not len(incoming):
        parts.append('<p class="verdict">Nothing has come in yet.</p>')
    else:
        parts += [_verdict(incoming, reference, found), *_charts(incoming, reference, window)]
        parts += [*_table(incoming, found), *_gallery(incoming, pictures)]
    head = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    return document(title, parts, style=_STYLE, head=head)


def _p_value(value: float) -> str:
    """A probability of which nobody needs more than four decimals."""
    return f"=\u00a0{value:.2g}" if value >= 1e-4 else "<\u00a00.0001"


def _tiles(incoming: Records, reference: Records | None) -> str:
    tiles = [(f"{len(incoming):,}", "inputs", "" if reference is None else f"{len(reference):,} held out")]
    share = incoming.share_referred
    if share is not None:
        known = None if reference is None else reference.share_referred
        tiles.append(
            (f"{100 * share:.3g} %", "referred", "" if known is None else f"{100 * known:.3g} % held out")
        )
    for score, values in incoming.scores.items():
        known_values = None if reference is None else reference.scores.get(score)
        held_out = "" if known_values is None else f"{np.nanmedian(known_values):.3g} held out"
        tiles.append((f"{np.nanmedian(values):.3g}", f"median {words(score)}", held_out))
    cells = [
        f'<div class="tile"><b>{escape(value)}</b>{escape(name)}<span>{escape(other)}</span></div>'
        for value, name, other in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _verdict(incoming: Records, reference: Records | None, found: Sequence[Drift]) -> str:
    if reference is None:
        return '<p class="verdict">No held-out data were given (--reference), so nothing is compared.</p>'
    last = newest(found)
    if not last:
        return (
            f'<p class="verdict">No test yet: {FEWEST} inputs with a score that the held-out data have too are '
            f"needed, of either.</p>"
        )
    count = last[0].last - last[0].first
    alarms = [test for test in last if test.alarm]
    if not alarms:
        return f'<p class="verdict">The newest {count:,} inputs show no sign of drift.</p>'
    named = ", ".join(
        f"{words(t.score)} (D\u00a0=\u00a0{t.statistic:.2f}, p\u00a0{_p_value(t.p_value)})" for t in alarms
    )
    return (
        f'<p class="verdict alarm"><b>Drift.</b> The newest {count:,} inputs differ from the held-out data in '
        f"{escape(named)}.</p>"
    )


def _charts(incoming: Records, reference: Records | None, window: int) -> list[str]:
    key = [f'<span><i class="new"></i>came in ({len(incoming):,})</span>']
    if reference is not None:
        key.insert(0, f'<span><i class="known"></i>held out ({len(reference):,})</span>')
    parts = ["<h2>Scores</h2>", f'<p class="key">{"".join(key)}</p>', '<div class="charts">']
    none = np.empty(0)
    names = list(incoming.scores) if reference is None else shared_scores(incoming, reference)
    for score in names:
        known = none if reference is None else reference.scores[score]
        chart = histograms(_UNITS.get(score, words(score)), known, incoming.scores[score])
        parts.append(f"<div><h3>{escape(words(score).capitalize())}</h3>{chart}</div>")
    parts += ["</div>", folded("What the scores mean", definitions(meanings(names)))]
    spans = [
        span for span in windows(len(incoming), window) if not np.isnan(incoming.referred[slice(*span)]).all()
    ][-_DRAWN:]
    if spans:
        shares = [float(np.nanmean(incoming.referred[slice(*span)])) for span in spans]
        labels = [_when(incoming, span) for span in spans]
        known_share = None if reference is None else reference.share_referred
        text = f"Each point: {spans[-1][1] - spans[-1][0]:,} inputs"
        text += "; dashed: the held-out data." if known_share is not None else "."
        parts += ["<h2>Referred over time</h2>", f'<p class="note">{text}</p>', '<div class="charts"><div>']
        parts += [share_over_time(shares, labels, known_share), "</div></div>"]
    return parts


def _when(incoming: Records, span: tuple[int, int]) -> str:
    time = incoming.times[span[1] - 1]
    return time[:16].replace("T", " ") if time else f"input {span[1]:,}"


def _table(incoming: Records, found: Sequence[Drift]) -> list[str]:
    if not found:
        return []
    ends = sorted({test.last for test in found}, reverse=True)[:_SHOWN]
    scores = list(dict.fromkeys(test.score for test in found))
    by_place = {(test.last, test.score): test for test in found}
    head = "".join(f'<th class="n">{escape(words(s))}: D</th><th class="n">p</th>' for s in scores)
    rows: list[str] = []
    for end in ends:
        cells: list[str] = []
        for score in scores:
            test = by_place.get((end, score))
            mark = " wrong best" if test is not None and test.alarm else ""
            numbers = (
                ("", "")
                if test is None
                else (f"{test.statistic:.3f}", _p_value(test.p_value).removeprefix("=\u00a0"))
            )
            cells += [f'<td class="n{mark}">{number}</td>' for number in numbers]
        first = next(test.first for test in found if test.last == end)
        time = incoming.times[end - 1][:16].replace("T", " ")
        when = f'<td class="when">{escape(time)}</td>' if any(incoming.times) else ""
        rows.append(f"<tr><td>{first + 1:,} to {end:,}</td>{when}{''.join(cells)}</tr>")
    zone = " (UTC)" if incoming.times[-1].endswith("+00:00") else ""
    until = f'<th class="when">until{zone}</th>' if any(incoming.times) else ""
    return [
        "<h2>Drift, window by window</h2>",
        f'<p class="note">Two-sample Kolmogorov-Smirnov tests against the held-out data, newest window first: D is the '
        "largest distance between the two distribution functions, p how probable such a distance is by chance. "
        f"Marked: p below {LEVEL:g} divided by the {len(found)} tests of this page. Inputs are taken as "
        "independent.</p>",
        f'<div class="scroll"><table><thead><tr><th>inputs</th>{until}{head}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div>",
    ]


def _gallery(incoming: Records, pictures: Sequence[Picture]) -> list[str]:
    if not pictures:
        return []
    score = words(incoming.novelty_score or "score")
    cards: list[str] = []
    for picture in pictures:
        small = ' class="small"' if picture.small else ""
        label = f"<b>{escape(picture.label)}</b><br>" if picture.label else ""
        cards.append(
            f'<div class="card"><img{small} alt="" src="{png_source(picture.png)}">{label}'
            f'<span class="dim">{escape(score)} {picture.score:.3g}</span></div>'
        )
    return ["<h2>Most novel inputs</h2>", f'<div class="gallery">{"".join(cards)}</div>']
