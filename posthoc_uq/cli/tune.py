"""``posthoc-uq tune``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from posthoc_uq.cli.console import print_json, progress, say
from posthoc_uq.cli.fields import Spelling, argument_options
from posthoc_uq.cli.head_options import head_choices, head_spelling, settings_option
from posthoc_uq.cli.options import (
    NATS,
    data_options,
    force_option,
    named_model_options,
    referral_score_option,
)
from posthoc_uq.cli.registry import Choices, RegistryCommand


def _heads() -> Choices:
    """Every head with its arguments, and the arguments of `posthoc_uq.tune`."""
    from posthoc_uq.fitting.tune import CRITERIA, PARAMETERS, tune

    spellings = {
        "criterion": Spelling(
            type=click.Choice(CRITERIA),
            text="What decides: closeness to the model's own predictions (needs --data, without labels), the "
            "likelihood of held-out data, or the log marginal likelihood; by default likelihood with --data, else "
            "evidence.",
        ),
        "divergence": Spelling(type=NATS, metavar="NATS"),
        "head": head_spelling(),
        "n_samples": Spelling(
            ("--search-draws",),
            "search_draws",
            click.IntRange(1),
            "Weight draws of an evaluation, with the sampling head.",
        ),
        "max_evaluations": Spelling(type=click.IntRange(1)),
    }
    parameters = click.Option(
        ["--parameter", "parameters"],
        multiple=True,
        type=click.Choice([*PARAMETERS, "none"]),
        help="Search these alone on held-out data; none for the temperature alone.",
    )
    arguments = argument_options(tune, spellings, ("progress",))
    return head_choices("Options of the search", [*arguments, parameters])


@click.command(
    "tune",
    cls=RegistryCommand,
    choices=_heads,
    short_help="Choose hyperparameters and the threshold for referral.",
)
@click.argument("file")
@named_model_options
@click.option("--data", metavar="DATA", help="Held-out data with labels; without, the evidence decides.")
@click.option("--output", "-o", metavar="FILE", help="Write here instead of over the file.")
@force_option
@click.option("--no-search", is_flag=True, help="Leave the hyperparameters as they are.")
@click.option(
    "--referral-rate",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="SHARE",
    help="Set thresholds above which this share of the held-out data lies; predict flags by them.",
)
@referral_score_option
@click.option("--calibrate", is_flag=True, help="Mend the scale of the moments head by Monte Carlo.")
@settings_option
@data_options
def command(file: str, as_json: bool, **options: Any) -> None:
    """Choose the hyperparameters of the posterior in FILE, set its threshold for referral, and rewrite it.

    With --data the widest posterior is kept that predicts held-out data at most 0.01 nats worse than the best (for
    classes, one wider than the fit's own must also be at most a tenth worse). Without --data the log marginal
    likelihood decides; --criterion names another way. The head that was searched through is written into FILE with its
    options, and predict and evaluate take it from there.

    \b
    Examples:
      posthoc-uq tune model.h5 --model timm:resnet18 --weights w.pt --data val/
      posthoc-uq tune model.h5 --model timm:resnet18 --weights w.pt --data train/ --criterion faithful --head sampling
      posthoc-uq tune model.h5 --model nets.py:cnn --weights w.pt                    (by evidence)
      posthoc-uq tune model.h5 --model nets.py:cnn --weights w.pt --data val/ --no-search
          --referral-rate 0.05 --head linearized --link mc --referral-score entropy,mutual_information
    """
    _check(options)
    if options["no_search"] and options["referral_rate"] is None and not options["calibrate"]:
        raise click.UsageError("--no-search leaves nothing to do without --referral-rate or --calibrate.")
    if options["referral_score"] is not None and options["referral_rate"] is None:
        raise click.UsageError("--referral-score belongs to --referral-rate.")
    from posthoc_uq.cli import tuning

    summary = tuning.tune_file(file, options, progress())
    if as_json:
        print_json(summary)
    else:
        for name, value in summary["hyperparameters"].items():
            say(f"{name}: {value:.5g}" if isinstance(value, float) else f"{name}: {value}")
        if summary["validation NLL"] is not None:
            alone = summary["model alone"]
            beside = "" if alone is None else f" (the model alone {alone:.4g})"
            say(f"validation NLL: {summary['validation NLL']:.4g}{beside}")
        if summary["given up"] is not None:
            say(f"given up for a wider posterior: {summary['given up']:.2g} nats")
        if summary["divergence"] is not None:
            say(f"divergence: {summary['divergence']:.3g} of at most {summary['budget']:g} nats")
        if summary["threshold"] is not None:
            say(f"referral: {summary['rule']}, for {summary['rate']:g} of the data")
        say(f"Written to {summary['output']}.")


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that do not fit together."""
    criterion, no_data = options["criterion"], options["data"] is None
    needs_data = options["referral_rate"] is not None or options["calibrate"]
    if no_data and (needs_data or options["temperature"]):
        raise click.UsageError(
            "--temperature, --referral-rate and --calibrate need held-out data: --data DATA."
        )
    if no_data and criterion in ("faithful", "likelihood"):
        kind = "held-out data with labels" if criterion == "likelihood" else "training images"
        raise click.UsageError(f"--criterion {criterion} needs {kind}: --data DATA.")
    if criterion == "evidence" and not no_data and not needs_data:
        raise click.UsageError("--criterion evidence needs no data; leave --data out.")
    if options["divergence"] is not None and (criterion == "evidence" or (criterion is None and no_data)):
        raise click.UsageError(
            "--divergence is of the criteria faithful and likelihood, which need --data DATA."
        )
    if "none" in options["parameters"] and len(options["parameters"]) > 1:
        raise click.UsageError("--parameter none stands alone.")
    if options["no_search"] and (criterion is not None or options["divergence"] is not None):
        raise click.UsageError(
            "--criterion and --divergence are of the search, which --no-search leaves out."
        )
