"""``posthoc-uq evaluate``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import print_json, progress, say
from posthoc_uq.cli.head_options import prediction_heads, prediction_options
from posthoc_uq.cli.options import (
    Setting,
    data_options,
    force_option,
    named_model_options,
    names_option,
    referral_score_option,
)
from posthoc_uq.cli.registry import RegistryCommand


@click.command(
    "evaluate",
    cls=RegistryCommand,
    choices=prediction_heads,
    short_help="Measure a posterior beside the model alone.",
)
@click.argument("file")
@click.argument("data")
@named_model_options
@click.option(
    "--ood",
    metavar="NAME=DATA",
    multiple=True,
    type=Setting(),
    help="Foreign data to tell apart; may be given several times.",
)
@click.option("--report", metavar="HTML", help="Write one self-contained page: tables, figures, images.")
@click.option("--csv", "csv_path", metavar="CSV", help="Write all numbers as a table.")
@click.option("--json-file", metavar="FILE", help="Write all numbers as JSON.")
@force_option
@click.option(
    "--referral-rate",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="SHARE",
    help="Set thresholds above which this share of DATA lies, in FILE; predict flags by them.",
)
@referral_score_option
@names_option
@prediction_options
@data_options
def command(file: str, data: str, as_json: bool, **options: Any) -> None:
    """Measure on labelled DATA how good predictions are, and their uncertainties, with the posterior in FILE and by the
    model alone.

    \b
    Examples:
      posthoc-uq evaluate model.h5 test/ --model timm:resnet18 --weights w.pt --ood textures=dtd/
      posthoc-uq evaluate model.h5 test/ --model nets.py:cnn --weights w.pt --report report.html --referral-rate 0.05
      posthoc-uq evaluate model.h5 torchvision:FashionMNIST --model nets.py:cnn --weights w.pt --json
    """
    if options["referral_score"] is not None and options["referral_rate"] is None:
        raise click.UsageError("--referral-score belongs to --referral-rate.")
    names = [name for name, _ in options["ood"]]
    if len(set(names)) < len(names):
        raise click.UsageError("--ood: every set of foreign data needs a name of its own.")
    from posthoc_uq.cli import evaluating

    summary = evaluating.evaluate_file(file, data, options, progress())
    if as_json:
        print_json({key: value for key, value in summary.items() if key != "text"})
        return
    say(summary["text"])
    if summary["threshold"] is not None:
        say(f"\nreferral: {summary['rule']}; kept in {file}")
    for path in summary["written"]:
        say(f"Written to {path}.")
