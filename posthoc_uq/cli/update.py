"""``posthoc-uq update``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import Command, print_json, progress, say
from posthoc_uq.cli.options import data_options, force_option, named_model_options, unlabelled_option


@click.command("update", cls=Command, short_help="Add data to a posterior, or take some out.")
@click.argument("file")
@click.argument("data")
@click.option("--remove", is_flag=True, help="Take DATA out, which must have been in, unchanged.")
@named_model_options
@click.option("--output", "-o", metavar="FILE", help="Write here instead of over the file.")
@force_option
@unlabelled_option
@data_options
def command(file: str, data: str, remove: bool, as_json: bool, **options: Any) -> None:
    """Add DATA to the posterior in FILE, without the data that it was fitted on, and rewrite it.

    The result is that of a fit on all data for the methods diag, full, and kfac with --keep-grams. efb and inf keep
    their bases, and it is said how much of the new data's Fisher is outside of them. Prior precision and temperature
    stay; a threshold for referral is cleared. FILE is replaced when all is done, and stays as it was if anything fails.

    \b
    Examples:
      posthoc-uq update model.h5 new/ --model timm:resnet18 --weights w.pt
      posthoc-uq update model.h5 withdrawn/ --remove --model timm:resnet18 --weights w.pt
    """
    from posthoc_uq.cli import updating

    summary = updating.change_file(file, data, options, remove, progress())
    if as_json:
        print_json(summary)
        return
    verb = "Took out" if remove else "Added"
    say(f"{verb} {summary['changed']:,} samples; the posterior has {summary['samples']:,} now.")
    say(f"data since the fit: {summary['described']}")
    say(f"Written to {summary['output']}.")
