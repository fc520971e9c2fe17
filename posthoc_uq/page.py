"""The frame and the style of a page that is one HTML file and needs neither network nor scripts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light; --text: #1a1a1a; --back: #fff; --dim: #555; --line: #e3e3e3; --strong: #999;
        --panel: #f2f2f2; --wrong: #b03a00; --known: #0072B2; --new: #D55E00; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { max-width: 46rem; } .note { color: var(--dim); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid var(--strong); font-weight: 600; } td.n, th.n { text-align: right; }
td.best { font-weight: 700; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .9rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem; font-size: .82rem; line-height: 1.35;
        overflow-wrap: anywhere; }
.card img { width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--panel); display: block;
            margin-bottom: .35rem; }
.card .small { image-rendering: pixelated; } .wrong { color: var(--wrong); } .dim { color: var(--dim); }
"""

DARK = """
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --text: #e6e6e6; --back: #16181b; --dim: #a3a7ad; --line: #33373d; --strong: #6d737b;
          --panel: #24272c; --wrong: #ff8f5a; --known: #5db3e6; --new: #ff9a4d; }
}
"""
"""Style of a page that follows a dark system; for pages without pictures on white ground."""


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


def png_source(png: bytes) -> str:
    """A picture as the source of an image element."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
