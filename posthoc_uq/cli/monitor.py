"""``posthoc-uq monitor``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import Command, print_json, say
from posthoc_uq.cli.options import force_option


@click.command("monitor", cls=Command, short_help="A page of what came in, beside held-out data.")
@click.argument("file", metavar="CSV")
@click.option(
    "--reference", required=True, metavar="CSV", help="Scores of held-out data: a CSV of posthoc-uq predict."
)
@click.option("--output", "-o", metavar="IMAGE", help="Where the figure goes: .png, .svg or .pdf.")
@force_option
@click.option(
    "--window", type=click.IntRange(20), default=200, show_default=True, metavar="N", help="Inputs of a test."
)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Newest rows of the CSV to look at.",
)
def command(file: str, as_json: bool, **options: Any) -> None:
    """Compare the inputs in CSV, of serve --log or of predict, with held-out data: a Kolmogorov-Smirnov test of every
    window of N inputs, as a table, and one figure.

    \b
    Examples:
      posthoc-uq monitor scores.csv --reference held_out.csv
      posthoc-uq monitor inbox.csv --reference held_out.csv -o drift.png --window 100 --json
    """
    from posthoc_uq.cli.monitoring import compare

    summary = compare(file, options)
    if as_json:
        print_json({key: value for key, value in summary.items() if key != "text"})
        return
    say(summary["text"])
    alarms = [test["score"] for test in summary["newest"] if test["alarm"]]
    verdict = (
        f"drift in {', '.join(alarms)}"
        if alarms
        else "no sign of drift"
        if summary["newest"]
        else "too few for a test"
    )
    say(f"{summary['inputs']:,} inputs; in the newest window {verdict}.")
