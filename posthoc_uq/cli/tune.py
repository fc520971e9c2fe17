"""``posthoc-uq tune``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import Command, print_json, progress, say
from posthoc_uq.cli.options import data_options, head_options, model_options, referral_score_option


@click.command("tune", cls=Command, short_help="Choose hyperparameters and the threshold for referral.")
@click.argument("file")
@model_options
@click.option("--data", metavar="DATA", help="Held-out data with labels; without, the evidence decides.")
@click.option("--output", "-o", metavar="FILE", help="Write here instead of in the file's place.")
@click.option(
    "--temperature", is_flag=True, help="Tune a temperature on the held-out data, and leave the prior."
)
@click.option("--noise", is_flag=True, help="Of a regression, tune the noise too.")
@click.option("--per-layer", is_flag=True, help="One prior precision for each layer (by evidence).")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    type=click.Choice(["prior_precision", "residual_weight", "scale", "noise"]),
    help="Search these alone on held-out data.",
)
@click.option("--search-draws", type=click.IntRange(1), default=10, show_default=True, help="Per evaluation.")
@click.option(
    "--max-evaluations", type=click.IntRange(1), default=12, show_default=True, help="Per hyperparameter."
)
@click.option("--no-search", is_flag=True, help="Leave the hyperparameters as they are.")
@click.option(
    "--referral-rate",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="SHARE",
    help="Set the threshold above which this share of the held-out data lies; predict flags by it.",
)
@referral_score_option
@click.option("--calibrate", is_flag=True, help="Mend the scale of the moments head by Monte Carlo.")
@head_options("that of the file's threshold, else sampling")
@data_options
def command(file: str, as_json: bool, **given: Any) -> None:
    """Choose the hyperparameters of the posterior in FILE, set its threshold for referral, and rewrite it.

    With --data the negative log-likelihood of held-out data decides, without it the log marginal likelihood.

    \b
    Examples:
      posthoc-uq tune model.h5 --model timm:resnet18 --weights w.pt --data val/
      posthoc-uq tune model.h5 --model nets.py:cnn --weights w.pt                    (by evidence)
      posthoc-uq tune model.h5 --model nets.py:cnn --weights w.pt --data val/ --no-search
          --referral-rate 0.05 --head linearized --link mc --referral-score entropy,mutual_information
    """
    if given["data"] is None and (
        given["referral_rate"] is not None or given["calibrate"] or given["temperature"]
    ):
        raise click.UsageError(
            "--temperature, --referral-rate and --calibrate need held-out data: --data DATA."
        )
    if given["no_search"] and given["referral_rate"] is None and not given["calibrate"]:
        raise click.UsageError("--no-search leaves nothing to do without --referral-rate or --calibrate.")
    if given["referral_score"] is not None and given["referral_rate"] is None:
        raise click.UsageError("--referral-score belongs to --referral-rate.")
    from posthoc_uq.cli import tuning

    summary = tuning.run(file, given, progress())
    if as_json:
        print_json(summary)
    else:
        for name, value in summary["hyperparameters"].items():
            say(f"{name}: {value:.5g}" if isinstance(value, float) else f"{name}: {value}")
        if summary["validation NLL"] is not None:
            alone = summary["model alone"]
            beside = "" if alone is None else f" (the model alone {alone:.4g})"
            say(f"validation NLL: {summary['validation NLL']:.4g}{beside}")
        if summary["threshold"] is not None:
            say(f"referral: {summary['rule']}, for {summary['rate']:g} of the data")
        say(f"Written to {summary['output']}.")
