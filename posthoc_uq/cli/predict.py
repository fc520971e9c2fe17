"""``posthoc-uq predict``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import INCOMPLETE, print_json, progress, say
from posthoc_uq.cli.head_options import prediction_heads, prediction_options
from posthoc_uq.cli.options import data_options, force_option, named_model_options, names_option
from posthoc_uq.cli.registry import RegistryCommand
from posthoc_uq.core.errors import printable


@click.command(
    "predict",
    cls=RegistryCommand,
    choices=prediction_heads,
    short_help="Predict a folder of images into a CSV.",
)
@click.argument("file")
@click.argument("data")
@named_model_options
@click.option("--output", "-o", required=True, metavar="CSV", help="Where the predictions go.")
@force_option
@click.option(
    "--top-k", type=click.IntRange(1), default=3, show_default=True, metavar="K", help="Classes to name."
)
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Of the interval, for a regression.",
)
@click.option(
    "--skip-unreadable",
    is_flag=True,
    help="Leave unreadable images out, name them, and end with exit code 3.",
)
@click.option(
    "--maps",
    metavar="DIR",
    help="Of pixels: write PNG maps of class, entropy, mutual information and novelty here.",
)
@names_option
@prediction_options
@data_options
@click.pass_context
def command(ctx: click.Context, file: str, data: str, output: str, as_json: bool, **options: Any) -> None:
    """Predict DATA with the posterior in FILE, into a CSV with one row for each image, or row of a table.

    Of classes: file, label_1, probability_1, ... of the K most probable, entropy, mutual_information (empty where the
    head does not know it), and flag: 1 for an image to hand to a person, by the threshold that tune or evaluate set,
    0 for others, empty without a threshold. Of values: file, mean, standard_deviation, epistemic_sd, lower, upper,
    flag. Of pixels: file, label_1, share_1, ... of the classes that cover most of the image, means of the scores over
    its pixels, the largest of each, flag; --maps writes them pixel by pixel. With thresholds on several scores also
    reason, the scores that refer the image, and tail, the share of familiar inputs that are at least as extreme. The
    CSV appears under its name when it is complete.

    \b
    Examples:
      posthoc-uq predict model.h5 photos/ --model timm:resnet18 --weights w.pt -o photos.csv
      posthoc-uq predict model.h5 houses.csv --model nets.py:mlp --weights w.pt -o prices.csv
      posthoc-uq predict model.h5 streets/ --model torchvision:fcn_resnet50 --weights w.pt --num-classes 5
          -o streets.csv --maps streets_maps
      posthoc-uq predict model.h5 photos/ --model torchvision:resnet18 --pretrained -o photos.csv
          --head linearized --link mc --class-names names.txt --skip-unreadable
    """
    from posthoc_uq.cli import predicting

    summary = predicting.predict_to_csv(file, data, output, options, progress())
    if as_json:
        print_json(summary)
    else:
        flagged = "" if summary["flagged"] is None else f", {summary['flagged']:,} of them flagged"
        say(
            f"{summary['rows']:,} predictions{flagged}, in {summary['seconds']:.1f} s "
            f"({summary['rows'] / summary['seconds']:.3g} per second), written to {output}."
        )
        if summary["maps"] is not None:
            say(f"Maps written to {summary['maps']}.")
    if summary["skipped"]:
        for path in summary["skipped"]:
            click.echo(printable(f"Left out, unreadable: {path}"), err=True)
        ctx.exit(INCOMPLETE)
