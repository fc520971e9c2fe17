"""``posthoc-uq fit``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import Command, print_json, progress, say
from posthoc_uq.cli.options import HEADS, NumberOr, data_options, divergence_option, model_options, together

_fit_options = together(
    [
        click.option(
            "--unlabelled", is_flag=True, help="Leave class folders aside: the model's own labels suffice."
        ),
        click.option(
            "--val-data", metavar="DATA", help="Held-out data with labels: the fit ends with tuning on them."
        ),
        click.option("--val-split", metavar="NAME", help="Part of the held-out data, such as train[50000:]."),
        click.option(
            "--method",
            type=click.Choice(["inf", "efb", "kfac", "diag", "full"]),
            default="inf",
            show_default=True,
            help="What is kept of the curvature.",
        ),
        click.option(
            "--likelihood",
            type=click.Choice(["classification", "binary", "regression"]),
            default="classification",
            show_default=True,
            help="What the outputs are.",
        ),
        click.option(
            "--layers",
            default="all",
            show_default=True,
            help="all, last, or names and patterns with commas between.",
        ),
        click.option(
            "--rank", type=NumberOr(), help="With inf: eigenvalues kept of a layer, or their share [100]."
        ),
        click.option(
            "--fisher",
            type=click.Choice(["auto", "mc", "exact", "empirical"]),
            default="auto",
            show_default=True,
            help="Labels drawn from the model, expected under it, or the data's own; auto: by outputs and samples.",
        ),
        click.option(
            "--mc-labels",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Drawn per sample; more than 1 draws them with auto too.",
        ),
        click.option(
            "--basis", type=click.Choice(["auto", "exact", "sketch"]), help="With inf: how bases are found."
        ),
        click.option("--basis-fraction", type=float, help="With inf: share of the data for the bases [1]."),
        click.option(
            "--correction", type=click.Choice(["rescale", "clamp", "none"]), help="With inf [rescale]."
        ),
        click.option(
            "--prior-precision",
            type=NumberOr("faithful", "evidence"),
            default="faithful",
            show_default=True,
            help="The smallest that keeps to what the model says, a number, or by the log marginal likelihood.",
        ),
        divergence_option,
        click.option(
            "--head",
            type=click.Choice(HEADS),
            help="How to predict, which the file remembers [linearized].",
        ),
        click.option("--residual-weight", type=float, help="Omega of inf [1]."),
        click.option(
            "--noise-variance", type=float, help="Of a regression; else from the training residuals."
        ),
        click.option(
            "--unsupported",
            type=click.Choice(["raise", "skip"]),
            default="raise",
            show_default=True,
            help="Layers that cannot be followed: an error, or left deterministic.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Of drawn labels and sketches."),
        click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Of the statistics."),
        click.option(
            "--memory-budget", type=click.IntRange(1), metavar="MIB", help="Most for one temporary."
        ),
        click.option("--checkpoint", metavar="FILE", help="Go on from here after an interruption."),
        click.option(
            "--checkpoint-every",
            type=click.IntRange(1),
            default=100,
            show_default=True,
            help="Batches between.",
        ),
        click.option(
            "--save-dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Numbers in the file."
        ),
        click.option("--compress", is_flag=True, help="Compress the file (gzip)."),
    ]
)


@click.command(
    "fit",
    cls=Command,
    short_help="Fit a posterior and write it to a file.",
    epilog="See docs/command_line.md for what DATA and MODEL may be.",
)
@click.argument("data")
@model_options
@click.option("--output", "-o", required=True, metavar="FILE", help="The posterior's file.")
@_fit_options
@data_options
def command(data: str, output: str, as_json: bool, **given: Any) -> None:
    """Fit a posterior over a model's weights on DATA, and write it to a file.

    DATA is a folder of images (with a folder for each class, or without classes), torchvision:NAME, or
    package.module:function. Under torchrun every process takes its part of the data and the first one writes the file.

    \b
    Examples:
      posthoc-uq fit imagenet/train --model timm:resnet18.a1_in1k --pretrained -o resnet18.h5
      posthoc-uq fit photos/ --model torchvision:resnet18 --weights my.safetensors --num-classes 5 -o my.h5
      posthoc-uq fit torchvision:FashionMNIST --split 'train[:55000]' --val-data torchvision:FashionMNIST
          --val-split 'train[55000:]' --model nets.py:cnn --rank 100 -o cnn.h5
      torchrun --nproc-per-node 4 -m posthoc_uq fit imagenet/train --model ... -o model.h5
    """
    from posthoc_uq.cli import fitting

    with fitting.processes(given):
        summary = fitting.run(data, output, given, progress())
    if as_json:
        print_json({key: value for key, value in summary.items() if key != "text"})
    else:
        say(summary["text"])
        say(f"Written to {output} ({summary['bytes']:,} bytes).")
