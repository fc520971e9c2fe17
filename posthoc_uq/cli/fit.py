"""``posthoc-uq fit``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.console import print_json, progress, say
from posthoc_uq.cli.fields import OneOf, Spelling, argument_options, fields_of, literal
from posthoc_uq.cli.options import (
    data_options,
    divergence_option,
    force_option,
    model_options,
    several_options,
    unlabelled_option,
)
from posthoc_uq.cli.registry import Choices, RegistryCommand

_PASSED_BY_THE_COMMAND = ("progress", "divergence", "noise_variance")  # arguments that no option is made for


def _methods() -> Choices:
    """Every method with its fields, and the arguments of `posthoc_uq.fit`."""
    from posthoc_uq.cli.docstrings import summary
    from posthoc_uq.fitting.fit import fit
    from posthoc_uq.fitting.wrap import HEADS
    from posthoc_uq.likelihoods import LIKELIHOODS
    from posthoc_uq.methods import METHODS

    spellings = {
        "method": Spelling(type=click.Choice(list(METHODS)), text="How the posterior is fitted."),
        "likelihood": Spelling(type=click.Choice(list(LIKELIHOODS)), text="What the model's outputs mean."),
        "layers": Spelling(
            text="All, last, or names, prefixes and shell patterns with commas between; by default those that the "
            "method is for."
        ),
        "prior_precision": Spelling(
            type=OneOf([int, float, *literal("faithful", "evidence")]),
            text="A number; faithful (the default), for the widest posterior whose predictions stay near the model's "
            "own; or evidence, for the maximum of the log marginal likelihood. For a training a number is the method's "
            "own prior precision.",
        ),
        "head": Spelling(type=click.Choice(HEADS)),
        "checkpoint": Spelling(metavar="FILE"),
        "output": Spelling(
            ("--model-output",),
            "model_output",
            OneOf([int, str]),
            "Where the outputs are in what the model returns, if that is no tensor: a key, an attribute's name or an "
            "index; by default found by itself.",
            metavar="KEY",
        ),
    }
    arguments = argument_options(fit, spellings, _PASSED_BY_THE_COMMAND)
    names = {option.name for option in arguments}
    return Choices(
        word="method",
        summaries={name: summary(kind) for name, kind in METHODS.items()},
        fields={
            name: [field for field in fields_of(kind) if field.name not in names]
            for name, kind in METHODS.items()
        },
        title="Options of the fit",
        options=arguments,
        spellings={"n_samples": Spelling(("--n-samples", "--mc-labels"))},
    )


_fit_options = several_options(
    [
        unlabelled_option,
        click.option(
            "--val-data",
            metavar="DATA",
            help="Held-out data with labels: the fit ends with tuning on them, a training with its best epoch.",
        ),
        click.option("--val-split", metavar="NAME", help="Part of the held-out data, such as train[50000:]."),
        divergence_option,
        click.option(
            "--likelihood-option",
            multiple=True,
            metavar="NAME=VALUE",
            help="Of the likelihood's class, such as dispersion=0.5, thresholds=-1,0.5,2 or label_smoothing=0.1; "
            "several times for several.",
        ),
        click.option(
            "--noise-variance", type=float, help="Of a regression; else from the training residuals."
        ),
        click.option(
            "--save-dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Numbers in the file."
        ),
        click.option("--compress", is_flag=True, help="Compress the file (gzip)."),
    ]
)


@click.command(
    "fit",
    cls=RegistryCommand,
    choices=_methods,
    short_help="Fit a posterior and write it to a file.",
    epilog="See docs/command_line.md for what DATA and MODEL may be.",
)
@click.argument("data")
@model_options
@click.option("--output", "-o", required=True, metavar="FILE", help="The posterior's file.")
@force_option
@_fit_options
@data_options
def command(data: str, output: str, as_json: bool, **options: Any) -> None:
    """Fit a posterior over a model's weights on DATA, and write it to a file.

    DATA is a folder of images (with a folder for each class, without classes, or images/ and masks/ with the classes
    of pixels), a table.csv with --target COLUMN, torchvision:NAME, or package.module:function. Under torchrun every
    process takes its part of the data and the first one writes the file.

    The options of a method are the fields of its class in Python; those of another method than the chosen one are an
    error.

    \b
    Examples:
      posthoc-uq fit imagenet/train --model timm:resnet18.a1_in1k --pretrained -o resnet18.h5
      posthoc-uq fit photos/ --model torchvision:resnet18 --weights my.safetensors --num-classes 5 -o my.h5
      posthoc-uq fit torchvision:FashionMNIST --split 'train[:55000]' --val-data torchvision:FashionMNIST
          --val-split 'train[55000:]' --model nets.py:cnn --rank 100 -o cnn.h5
      posthoc-uq fit photos/ --model nets.py:cnn --weights w.pt --method function_space --epochs 20 -o functions.h5
      posthoc-uq fit houses.csv --target price --likelihood regression --model nets.py:mlp --weights w.pt -o mlp.h5
      torchrun --nproc-per-node 4 -m posthoc_uq fit imagenet/train --model ... -o model.h5
    """
    from posthoc_uq.cli import fitting
    from posthoc_uq.core.distributed import run_on_all_ranks

    with fitting.process_group(options):
        summary = run_on_all_ranks(
            lambda: fitting.fit_and_save(data, output, options, progress()), "the command"
        )
    if as_json:
        print_json({key: value for key, value in summary.items() if key != "text"})
    else:
        say(summary["text"])
        say(f"Written to {output} ({summary['bytes']:,} bytes).")
