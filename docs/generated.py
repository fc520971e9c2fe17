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
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel
from torch import Tensor

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
    parts = {"command_line.md": command_line, "format.md": file_format}.get(page.file.src_uri)
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


def file_format() -> Iterator[str]:
    """The records in a file, the likelihoods, and the tensors of each kind of block."""
    from posthoc_uq.files import ensembles
    from posthoc_uq.files.records import Description, FitFacts, OwnLikelihoodRecord
    from posthoc_uq.likelihoods import LIKELIHOODS
    from posthoc_uq.likelihoods.registry import IN_FILES, class_of
    from posthoc_uq.posteriors.block import BLOCKS

    yield "## Records"
    waiting = [Description, FitFacts, OwnLikelihoodRecord, ensembles.EnsembleRecord]
    seen: dict[str, Any] = {}
    while waiting:
        kind = waiting.pop(0)
        if kind.__name__ not in seen:
            seen[kind.__name__] = kind
            yield f"### {kind.__name__}\n\n{_first_paragraph(kind)}"
            yield _fields(kind)
            waiting += [each for field in kind.model_fields.values() for each in _named_in(field.annotation)]
    yield "## Likelihoods"
    yield "Fields beside `name`; what is the default, or does not apply, is left out."
    for name in (*LIKELIHOODS, *IN_FILES):
        fields = class_of(name).fields
        yield f"`{name}`" + (f"\n\n{_fields(fields)}" if fields.model_fields else ": none.")
    yield "## Tensors of blocks"
    yield "Sizes are those of the layer. Bits are packed eight to a byte, the first the highest."
    for name, block in BLOCKS.items():
        rows = []
        for own, hint in get_type_hints(block, include_extras=True).items():
            for field in getattr(hint, "__metadata__", ()):
                if hasattr(field, "sizes"):
                    sizes = ", ".join(str(getattr(size, "name", size)) for size in field.sizes)
                    facts = [
                        key.replace("_", " ") for key, value in field.properties.items() if value is True
                    ]
                    facts += [f"where `{field.optional}`"] if field.optional else []
                    rows.append([f"`{own}`", f"({sizes})", ", ".join(facts)])
        attributes = block.record().model_fields
        text = f"Attributes: {', '.join(f'`{own}`' for own in attributes)}." if attributes else ""
        yield f"### `{name}`\n\n{_first_paragraph(block)} {text}\n\n{_table(['tensor', 'sizes', ''], rows)}"


def _fields(kind: Any) -> str:
    texts = {
        each.arg_name: each.description
        for base in reversed(kind.__mro__)
        for each in docstring_parser.parse(vars(base).get("__doc__") or "").params
    }
    rows = []
    for name, field in kind.model_fields.items():
        text = re.sub(r"\s+", " ", texts.get(name) or "").replace("``", "`")
        rows.append([f"`{field.alias or name}`", _type(field.annotation), text])
    return _table(["field", "type", ""], rows)


def _type(hint: Any) -> str:
    """A field's type in words."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    parts = [part for part in get_args(hint) if part is not type(None)]
    origin = get_origin(hint)
    if origin is Annotated:
        return "list" if parts[0] is Tensor else _type(parts[0])
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (list, dict):
        return f"{'list' if origin is list else 'object'} of {_type(parts[-1])}"
    if origin in (Union, UnionType):
        return " or ".join(map(_type, parts))
    return {float: "number", int: "whole number", str: "text", bool: "true or false", Any: "value"}.get(
        hint, "value"
    )


def _named_in(hint: Any) -> Iterator[Any]:
    """The records that a type names."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _named_in(part)


def _first_paragraph(kind: Any) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")


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
