"""What the smoke modes of all recipes put on their tables and figures."""

from __future__ import annotations

from matplotlib.figure import Figure

NOTE = "Smoke run: it shows that the recipe runs. These numbers are not results."


def marked(text: str, smoke: bool) -> str:
    """A page of text, which says first if it is from a smoke run."""
    return f"{NOTE}\n\n{text}" if smoke else text


def stamped(figure: Figure, smoke: bool) -> Figure:
    """A figure, which says across itself if it is from a smoke run."""
    if smoke:
        style = {"rotation": 20, "ha": "center", "va": "center", "fontsize": 26}
        figure.text(0.5, 0.5, "smoke run, not results", color="#CC3311", alpha=0.5, **style)
    return figure
