"""Options that several commands share."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Option = Callable[[Any], Any]


def several_options(options: Iterable[Option]) -> Callable[[Decorated], Decorated]:
    """Several decorators as one, first option first in the help."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(list(options)):
            function = option(function)
        return function

    return decorate


class Numbers(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """Numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [float(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not numbers with commas between them, such as 0.5,0.5,0.5.", param, ctx)


class Setting(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """``NAME=VALUE``; the value is a Python literal, or else text. An option's metavar may name the two otherwise."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name:
            form = (None if param is None else param.metavar) or "NAME=VALUE"
            self.fail(f"{value!r} is not of the form {form}.", param, ctx)
        try:
            return name.replace("-", "_"), ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return name.replace("-", "_"), text


class Scores(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """The name of a score, or the names of several with commas between them, as a tuple."""

    name = "scores"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",")]
        if not all(names) or len(set(names)) < len(names):
            self.fail(f"{value!r} is not a score, nor different scores with commas between them.", param, ctx)
        return tuple(names) if len(names) > 1 else names[0]


NATS = click.FloatRange(0, min_open=True)

force_option = click.option(
    "--force", is_flag=True, help="Write over files that are there already, but never over an input."
)

divergence_option = click.option(
    "--divergence",
    type=NATS,
    metavar="NATS",
    help="How far the predictions of a faithful posterior may be from the model's own [0.002].",
)


def _model_options(model: Option) -> Callable[[Decorated], Decorated]:
    return several_options(
        [
            model,
            click.option(
                "--weights", metavar="FILE", help="State dict: .safetensors, or what torch.save wrote."
            ),
            click.option(
                "--pretrained", is_flag=True, help="Use the weights that timm or torchvision offers."
            ),
            click.option(
                "--num-classes",
                type=click.IntRange(1),
                metavar="N",
                help="Outputs of a timm or torchvision model.",
            ),
            click.option(
                "--device", metavar="DEVICE", help="cpu, cuda, cuda:1 ...; by default a GPU if there is one."
            ),
        ]
    )


_FORMS = "timm:NAME, torchvision:NAME, package.module:function or file.py:function (called without arguments)"

model_options = _model_options(click.option("--model", required=True, metavar="MODEL", help=f"{_FORMS}."))

named_model_options = _model_options(
    click.option(
        "--model",
        metavar="MODEL",
        help=f"{_FORMS}; by default, with its weights, the one of timm or torchvision that FILE names.",
    )
)
"""Those of commands on a posterior's file, which may name its model."""

transform_options = several_options(
    [
        click.option(
            "--transform",
            metavar="MODULE:NAME",
            help="Image to tensor: a callable, or a function without arguments that returns one.",
        ),
        click.option(
            "--image-size",
            type=click.IntRange(1, 2**14),
            metavar="PIXELS",
            help="Instead of the fit's, or of the model's own.",
        ),
        click.option("--mean", type=Numbers(), help="Of the channels, instead of the model's own."),
        click.option("--std", type=Numbers(), help="Of the channels, instead of the model's own."),
    ]
)

data_options = several_options(
    [
        click.option("--split", metavar="NAME", help="Part of the data, such as train, or train[:50000]."),
        click.option(
            "--data-root",
            metavar="DIR",
            default="data",
            show_default=True,
            help="Where torchvision's data sets lie.",
        ),
        click.option("--download", is_flag=True, help="Let torchvision fetch a data set that is not there."),
        transform_options,
        click.option(
            "--class-map",
            metavar="FILE",
            help="Which output a class folder, or a label of a table, is: one name per line, or JSON.",
        ),
        click.option(
            "--target",
            multiple=True,
            metavar="COLUMN",
            help="Of a table: the column with the target; several times for several.",
        ),
        click.option(
            "--columns",
            multiple=True,
            metavar="NAME[,NAME]",
            help="Of a table: the columns that the model takes, in its order; by default all that are no target.",
        ),
        click.option(
            "--ignore-index",
            type=click.IntRange(-(2**31), 2**31 - 1),
            metavar="VALUE",
            help="Of masks: the value of pixels that count for nothing [255].",
        ),
        click.option("--limit", type=click.IntRange(1), metavar="N", help="Take N samples, evenly spaced."),
        click.option(
            "--batch-size",
            type=click.IntRange(1),
            default=32,
            show_default=True,
            metavar="N",
            help="Samples at once.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(0),
            metavar="N",
            help="Processes that read images; by default by the number of cores, 0 for none.",
        ),
    ]
)

referral_score_option = click.option(
    "--referral-score",
    type=Scores(),
    metavar="SCORE[,SCORE]",
    help="Which uncertainty; by default entropy, or standard_deviation of values, and novelty if the file knows it. "
    "Of several, any may refer an input.",
)

unlabelled_option = click.option(
    "--unlabelled", is_flag=True, help="Leave class folders aside: the model's own labels suffice."
)

names_option = click.option(
    "--class-names",
    metavar="PATH",
    help="Names of the outputs: one per line, or JSON; or a folder with a folder for each class.",
)
