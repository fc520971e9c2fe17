"""A hook of the documentation site (mkdocs.yml): references that are made from the package when the site is built, so
that they are written once. The page `command_line.md` gets the commands with their options, as `--help` has them, and
`format.md` the records and tensors of a file.
"""

from __future__ import annotations

import ast
import re
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOPICS = {
    "How options are written": "parser",
    "Models": "models",
    "Data": "data",
    "Images and masks": "images",
    "Tables": "tables",
    "Classes": "labels",
    "What is written": "outputs",
    "The posterior's file": "posterior_file",
    "What is printed": "main",
}
"""Headings of the command line's page, and the module whose docstring says it."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Add what is generated to its pages."""
    parts = {"command_line.md": command_line}.get(page.file.src_uri)
    return "\n\n".join([markdown, *parts()]) if parts else markdown


def command_line() -> Iterator[str]:
    """What the modules of the command line say, then each command with its options."""
    for title, module in TOPICS.items():
        source = (ROOT / f"posthoc_uq/app/cli/{module}.py").read_text(encoding="utf-8")
        text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[2]
        yield f"## {title}\n\n{text.replace('``', '`')}"
    from posthoc_uq.app.cli import commands
    from posthoc_uq.app.cli.help import summary
    from posthoc_uq.app.cli.main import COMMANDS
    from posthoc_uq.app.cli.options import Console, Data, ModelSource, Referred
    from posthoc_uq.app.cli.parser import Command

    of_several = {"heads", *(summary(kind.__doc__) for kind in (ModelSource, Data, Referred, Console))}
    shared: dict[str, str] = {}
    for name in COMMANDS:
        parser = Command(getattr(commands, name), []).parser
        yield f"## posthoc-uq {name}\n\n{parser.description}"
        yield f"```bash\n{dedent(parser.epilog.partition(chr(10))[2])}\n```"
        for group in parser._action_groups:
            if options := [row for action in group._group_actions if (row := _option(action))[1]]:
                title = str(group.title)
                table = _table(["option" if "-" in options[0][0] else "argument", title], options)
                if title in of_several:
                    shared[title] = table
                else:
                    yield table
    yield "## Options of several commands"
    yield from shared.values()


def _option(action: Any) -> tuple[str, str]:
    names = sorted((name for name in action.option_strings if not name.endswith("+")), key=len)
    usual = action.default
    text = re.sub(r"\s+", " ", action.help or "").rstrip(".")
    if usual not in (None, False, [], SUPPRESS) and str(usual) not in text:
        text += f" ({usual} by default)"
    shown = [f"`{name.replace('_', '-')}`" for name in names] or [f"`{action.metavar or action.dest}`"]
    return ", ".join(shown), "" if text == SUPPRESS else text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
