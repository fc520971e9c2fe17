"""The command line, ``posthoc-uq``; ``docs/command_line.md`` is its reference.

`entry`, `options`, `console` and the module of each command import click alone, so that ``--help`` costs nothing of
theirs; what a command does stands in other modules, which it imports when it runs.
"""

from posthoc_uq.cli.entry import main

__all__ = ["main"]
