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
@click.option("--output", "-o", required=True, metavar="HTML", help="Where the page goes.")
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
@click.option("--images", metavar="DIR", help="Where the files that the CSV names lie; by default beside it.")
@click.option(
    "--pictures", type=click.IntRange(0), default=12, show_default=True, help="Most novel inputs to show."
)
@click.option("--title", default="What comes in", show_default=True, help="Of the page.")
def command(file: str, as_json: bool, **options: Any) -> None:
    """Compare the inputs in CSV, of serve --log or of predict, with held-out data, in one HTML page.

    The page has histograms of entropy and novelty, the share referred over time, a Kolmogorov-Smirnov test of every
    window of N inputs, and the most novel inputs where their images exist. It needs no network and no scripts.

    \b
    Examples:
      posthoc-uq monitor predictions.csv --reference held_out.csv -o page.html
      posthoc-uq monitor inbox.csv --reference held_out.csv -o page.html --images inbox/ --window 100 --json
    """
    from posthoc_uq.cli import monitoring

    summary = monitoring.monitor_to_page(file, options)
    if as_json:
        print_json(summary)
        return
    alarms = [test for test in summary["newest"] if test["alarm"]]
    named = ", ".join(
        f"{test['score']} (D = {test['statistic']:.2f}, p = {test['p_value']:.2g})" for test in alarms
    )
    verdict = (
        f"drift in {named}" if alarms else "no sign of drift" if summary["newest"] else "too few for a test"
    )
    say(f"{summary['inputs']:,} inputs; in the newest window {verdict}. Written to {options['output']}.")
