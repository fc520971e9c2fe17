"""The command line, ``posthoc-uq``; ``docs/command_line.md`` is its reference.

`entry`, `options`, `console` and the module of each command import click alone; what a command does stands in other
modules, which it imports when it runs. Options that the library decides (`registry`, `fields`) are made when a command
is called: methods, heads, their options and the help come from the classes and their docstrings.
"""

from posthoc_uq.cli.entry import main

__all__ = ["main"]
