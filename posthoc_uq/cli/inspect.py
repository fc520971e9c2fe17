"""``posthoc-uq inspect``."""

from __future__ import annotations

import click

from posthoc_uq.cli.console import Command, print_json, say


@click.command("inspect", cls=Command, short_help="Show a posterior's file without its model.")
@click.argument("file")
def command(file: str, as_json: bool) -> None:
    """Show what the posterior in FILE is: method, hyperparameters, how it was fitted and tuned, and its layers.

    No model is needed, and the file is parsed in a process of its own with limits on time and memory.

    \b
    Examples:
      posthoc-uq inspect model.h5
      posthoc-uq inspect model.h5 --json
    """
    from posthoc_uq.files import inspect

    contents = inspect(file)
    if as_json:
        print_json(contents)
    else:
        say(str(contents))
