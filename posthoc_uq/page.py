"""The frame and the style of a page that is one HTML file and needs neither network nor scripts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

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
