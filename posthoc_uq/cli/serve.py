"""``posthoc-uq serve``."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli.head_options import prediction_heads, prediction_options
from posthoc_uq.cli.options import named_model_options, names_option, several_options, transform_options
from posthoc_uq.cli.registry import RegistryCommand

_MANY = click.IntRange(1)

_limit_options = several_options(
    [
        click.option("--max-bytes", type=_MANY, default=16 * 2**20, show_default=True, help="Of a request."),
        click.option("--max-batch", type=_MANY, default=64, show_default=True, help="Inputs of a request."),
        click.option(
            "--max-pixels",
            type=_MANY,
            default=40_000_000,
            show_default=True,
            help="Of an image, width times height, before it is decoded.",
        ),
    ]
)


@click.command(
    "serve",
    cls=RegistryCommand,
    choices=prediction_heads,
    short_help="Answer requests for predictions over HTTP (extra 'serve').",
)
@click.argument("file")
@named_model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free one."
)
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A further name by which clients may call the server, such as that of a proxy.",
)
@click.option("--top-k", type=_MANY, default=3, show_default=True, metavar="K", help="Classes of an answer.")
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Of the interval, for a regression.",
)
@click.option("--integers", is_flag=True, help="Inputs of JSON are whole numbers, such as tokens.")
@_limit_options
@click.option("--log", metavar="CSV", help="Add the scores of every input to this file.")
@names_option
@prediction_options
@transform_options
def command(file: str, as_json: bool, **options: Any) -> None:
    """Answer requests for predictions with the posterior in FILE, on this machine only unless --host says otherwise.

    POST /predict takes JSON {"input": nested lists of numbers}, /predict/image a PNG or JPEG file, /predict/batch
    {"inputs": [...]} or a form of several images. Every answer has the prediction, its uncertainty, and whether to
    refer it to a person.
    GET /metrics is for Prometheus, /health says that it runs. Nothing of the inputs is stored but scores, by --log.

    \b
    Examples:
      posthoc-uq serve model.h5 --model timm:resnet18 --weights w.pt --class-names names.txt
      posthoc-uq serve model.h5 --model nets.py:cnn --weights w.pt --port 9000 --log scores.csv
      curl -F image=@photo.jpg http://127.0.0.1:8000/predict/image
    """
    from posthoc_uq.cli import serving

    serving.serve_file(file, options, as_json)
