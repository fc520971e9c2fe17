"""The pages of the documents, and their code."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("recipes/*/README.md"),
    )
)


class Block(NamedTuple):
    """A block of code. Its content has as many empty lines before it as the page has lines."""

    place: Path
    language: str
    words: tuple[str, ...]
    content: str

    @property
    def line(self) -> int:
        return len(self.content) - len(self.content.lstrip("\n")) + 1


@functools.cache
def fences(page: str) -> tuple[Block, ...]:
    """Every block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^ *```(\w*)([ \w]*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return tuple(
        Block(
            ROOT / page,
            match[1],
            tuple(match[2].split()),
            "\n" * text[: match.start(3)].count("\n") + textwrap.dedent(match[3]),
        )
        for match in found
    )


def blocks(page: str) -> list[Block]:
    """The Python code of a page."""
    return [block for block in fences(page) if block.language == "python"]


def without_blocks(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
