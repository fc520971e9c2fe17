"""Hooks of the documentation site (mkdocs.yml): pages that lie outside of docs/, and links between all of them.

The documents are read in the repository, too, where links are relative to the file. In the site a link to a page goes
to the page; one to any other file of the repository becomes its name. Formulas become MathML, which browsers show
without a script. A block of code that all others of a page need (its fence says ``python fixture``) is folded.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"} | {
    page.relative_to(ROOT).as_posix(): f"recipes/{page.parent.name}.md"
    for page in sorted((ROOT / "recipes").glob("*/README.md"))
}
"""Documents outside of docs/ to their place in the site."""

_FENCE = re.compile(r"^(?P<indent> *)```python (?P<mark>\w+)\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)
"""Code with a word for the tests: `fixture` stands before all other blocks, others say what a block needs."""
_FOLDED = "Model and data of the examples on this page"
_LINK = re.compile(r"(?<!`)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and the recipes' pictures."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "recipes").glob("*/*.png")):
        files.append(File.generated(config, f"recipes/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the repository's links into the site's."""
    place = page.file.src_uri
    source = next((own for own, there in PAGES.items() if there == place), f"docs/{place}")

    def turned(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match.group()
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = _place(wanted)
        if there is None or (
            match.start() and markdown[match.start() - 1] == "!" and not there.endswith(".png")
        ):
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{mark}{anchor})"

    def unmarked(match: re.Match[str]) -> str:
        indent = match["indent"]
        lines = [f"{indent}```python", *match["code"].splitlines(), f"{indent}```"]
        if match["mark"] == "fixture":
            lines = [f'{indent}??? example "{_FOLDED}"', "", *(f"    {line}" for line in lines)]
        return "\n".join(lines)

    markdown = _FENCE.sub(unmarked, markdown)
    return "".join(
        part if index % 2 else _LINK.sub(turned, part)
        for index, part in enumerate(
            re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
        )
    )


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Turn formulas, as pymdownx.arithmatex marks them, into MathML."""

    def turned(match: re.Match[str]) -> str:
        formula = html.unescape(match[3]).strip().replace(r"\log ", r"\log\,")
        if match[1] == "span":
            return convert(formula)
        return f'<div class="formula">{convert(formula, display="block")}</div>'

    return re.sub(
        r'<(span|div) class="arithmatex">\s*\\(\(|\[)(.*?)\\[)\]]\s*</\1>', turned, content, flags=re.S
    )


def _place(path: str) -> str | None:
    """Where a file of the repository is in the site."""
    for name in (path, f"{path}/README.md"):
        if name in PAGES:
            return PAGES[name]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("recipes/") and path.endswith(".png"):
        return f"recipes/{Path(path).name}"
    return None
