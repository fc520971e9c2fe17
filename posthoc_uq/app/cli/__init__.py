"""The command line, ``posthoc-uq``; ``docs/command_line.md`` is its reference.

A command is a function of `commands`. What its options are follows from its signature (`parser`, `options`), and what
it reads and writes from `models`, `data` and `outputs`.
"""

from posthoc_uq.app.cli.main import main

__all__ = ["main"]
