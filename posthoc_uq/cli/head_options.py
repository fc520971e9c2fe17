"""Options of the commands that predict: the head, and whatever the heads take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from posthoc_uq.cli.fields import Spelling
from posthoc_uq.cli.options import Setting, several_options
from posthoc_uq.cli.registry import Choices

SHARED = ("seed",)
"""Options of a head that the command has itself: one seed for all draws."""

settings_option = click.option(
    "--head-option",
    "head_settings",
    type=Setting(),
    multiple=True,
    help="An option of the head as NAME=VALUE, where VALUE is written as in Python: outputs=5.",
)

prediction_options = several_options(
    [click.option("--seed", type=int, default=0, show_default=True, help="Of the draws."), settings_option]
)


def prediction_heads() -> Choices:
    """Every head with its arguments, for commands that predict."""
    head = click.Option(
        ["--head"], type=_head_names(), help="How to predict; by default the one that the file names."
    )
    return head_choices("Options of the prediction", [head])


def head_choices(title: str, options: Sequence[click.Option]) -> Choices:
    """Every head with its arguments, and other options that the command takes from the library."""
    from posthoc_uq.cli.docstrings import summary
    from posthoc_uq.cli.fields import arguments_of
    from posthoc_uq.fitting.wrap import HEADS, head_class

    return Choices(
        word="head",
        summaries={name: summary(head_class(name)) for name in HEADS},
        fields={
            name: [field for field in arguments_of(head_class(name)) if field.name not in SHARED]
            for name in HEADS
        },
        title=title,
        options=options,
        spellings={},
    )


def head_spelling() -> Spelling:
    """How a command takes the name of a head."""
    return Spelling(type=_head_names())


def _head_names() -> Any:
    from posthoc_uq.fitting.wrap import HEADS

    return click.Choice(HEADS)
