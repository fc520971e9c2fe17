"""How help looks, and what it takes from docstrings: apart from `parser`, so that an overview of all commands needs
neither torch nor a command's signature.
"""

from __future__ import annotations

import ast
import re
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from pathlib import Path

from jsonargparse import DefaultHelpFormatter

_MARKS = re.compile(r"``\"?([^`\"]*)\"?``|`([^`]*)`|\*\*")


def documents() -> dict[str, str | None]:
    """The docstrings of the commands by their names, and that of all commands as ``""``: read from the source, since an
    import would bring torch, which takes seconds.
    """
    module = ast.parse(Path(__file__).with_name("commands.py").read_text(encoding="utf-8"))
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef))
    return {"": ast.get_docstring(module), **{one.name: ast.get_docstring(one) for one in functions}}


def summary(text: str | None) -> str:
    """The first sentence of a docstring, without its full stop."""
    return re.split(r"\.(?: |$)", unmarked((text or "").split("\n\n")[0]))[0]


def unmarked(text: str) -> str:
    """A text in one line, without the marks of code."""
    return " ".join(_MARKS.sub(lambda mark: mark[1] or mark[2] or "", text).split())


def dashed(option: str) -> str:
    """An option as it is shown; underscores may be typed, too."""
    return option.replace("_", "-")


class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Help whose descriptions keep their lines, and that says of an option what its docstring says."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)

    def _get_help_string(self, action: Action) -> str:
        usual = "" if action.default in (None, False, [], SUPPRESS) else f" ({action.default} by default)"
        text = (action.help or "").rstrip(".")
        return text + ("" if usual and str(action.default) in text else usual)

    def _format_action_invocation(self, action: Action) -> str:
        strings = (name for name in action.option_strings if not name.endswith("+"))
        names = sorted(map(dashed, strings), key=len)
        return " ".join([", ".join(names), *([str(action.metavar)] if action.metavar else [])]).strip()
