"""``posthoc-uq forget``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import Command
from posthoc_uq.cli.update import change, change_options


@click.command("forget", cls=Command, short_help="Take data out of a posterior again.")
@change_options
def command(file: str, data: str, as_json: bool, **options: Any) -> None:
    """Take DATA out of the posterior in FILE, to which fit or update gave them, and rewrite it.

    DATA must be the same samples, unchanged: prepare images as they were prepared then. Data that cannot all have been
    in are refused, as far as the statistics show it. FILE is replaced when all is done, and stays as it was if anything
    fails.

    \b
    Examples:
      posthoc-uq forget model.h5 withdrawn/ --model timm:resnet18 --weights w.pt
    """
    change(file, data, options, as_json, "forget")
