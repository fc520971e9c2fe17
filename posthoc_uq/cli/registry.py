"""A command whose options are the fields of all registered methods, or of all heads.

They are made when the command is called, so that what was registered in the meantime is included, and nothing is
imported that the call does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from posthoc_uq.cli.console import Command
from posthoc_uq.cli.fields import NONE, Field, Spelling, make_option, shown


@dataclass(frozen=True)
class Choices:
    """The methods or heads that a command offers, each with options of its own.

    Attributes:
        word: what one of them is called, such as ``"method"``; also the option that names it.
        summaries: a line of help for each, by name.
        fields: the fields of each, by name.
        title: heading of `options` in the help.
        options: options of the command itself that come from the library.
        spellings: by field, how its option differs from it.
    """

    word: str
    summaries: Mapping[str, str]
    fields: Mapping[str, Sequence[Field]]
    title: str
    options: Sequence[click.Option]
    spellings: Mapping[str, Spelling]


@dataclass(frozen=True)
class _FieldOption:
    """An option with the field that it is made of, and which of the choices have that field."""

    option: click.Option
    field: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Made:
    """The choices of one call, and the options that are made of their fields."""

    choices: Choices
    options: list[_FieldOption]


class RegistryCommand(Command):
    """A command with an option for every field of every choice.

    Its function gets two more arguments: ``method_options`` or ``head_options``, the values of the fields that were
    given, and ``arguments``, the values of `Choices.options`.

    Args:
        choices: makes the choices.
    """

    def __init__(self, *args: Any, choices: Callable[[], Choices], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._choices = choices

    def _made(self, ctx: click.Context) -> _Made:
        """The options of this call, which click asks for several times."""
        key = f"posthoc_uq.options of {self.name}"
        if key not in ctx.meta:
            choices = self._choices()
            options = [*self.params, *choices.options, *filter(None, [self.get_help_option(ctx)])]
            taken = {str(option.name) for option in options}
            taken |= {name.lstrip("-").replace("-", "_") for option in options for name in option.opts}
            ctx.meta[key] = _Made(choices, _field_options(choices, taken))
        return ctx.meta[key]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        made = self._made(ctx)
        return [*super().get_params(ctx), *made.choices.options, *(entry.option for entry in made.options)]

    def invoke(self, ctx: click.Context) -> Any:
        made = self._made(ctx)
        self._refuse_options_of_others(ctx, made)
        values = {entry.field: ctx.params.pop(str(entry.option.name)) for entry in made.options}
        chosen = {n: None if value is NONE else value for n, value in values.items() if value is not None}
        ctx.params[f"{made.choices.word}_options"] = chosen
        ctx.params["arguments"] = {str(o.name): ctx.params[str(o.name)] for o in made.choices.options}
        return super().invoke(ctx)

    @staticmethod
    def _refuse_options_of_others(ctx: click.Context, made: _Made) -> None:
        """Where a method or head is named, an option that it does not have is wrong usage."""
        word = made.choices.word
        name = ctx.params.get(word)
        for entry in made.options:
            if name is None or name in entry.names or ctx.params[str(entry.option.name)] is None:
                continue
            owners = (
                f"{word} {entry.names[0]}"
                if len(entry.names) == 1
                else f"{word}s {' and '.join(entry.names)}"
            )
            raise click.UsageError(
                f"{entry.option.opts[0]} is for the {owners} (--{word} {entry.names[-1]}), and this is {name}.",
                ctx,
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        made = self._made(ctx)
        word, everyone = made.choices.word, tuple(made.choices.fields)
        static = [param for param in super().get_params(ctx) if isinstance(param, click.Option)]
        _write(formatter, "Options", [option.get_help_record(ctx) for option in static])
        _write(
            formatter, made.choices.title, [option.get_help_record(ctx) for option in made.choices.options]
        )
        _write(formatter, f"{word.capitalize()}s", list(made.choices.summaries.items()))

        def records(wanted: Callable[[tuple[str, ...]], bool]) -> list[tuple[str, str] | None]:
            return [entry.option.get_help_record(ctx) for entry in made.options if wanted(entry.names)]

        _write(formatter, f"Options of every {word}", records(lambda names: names == everyone))
        several = records(lambda names: 1 < len(names) < len(everyone))
        _write(formatter, f"Options of several {word}s", several)
        for name in everyone:
            alone = (name,) if len(everyone) > 1 else ()
            _write(
                formatter, f"Options of --{word} {name}", records(lambda names, alone=alone: names == alone)
            )


def _write(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str] | None]) -> None:
    shown_rows = [row for row in rows if row is not None]
    if shown_rows:
        with formatter.section(title):
            formatter.write_dl(shown_rows)


def _field_options(choices: Choices, taken: Collection[str]) -> list[_FieldOption]:
    """An option for every field: one for all choices that have a field of this name."""
    owners: dict[str, dict[str, Field]] = {}
    for name, fields in choices.fields.items():
        for field in fields:
            owners.setdefault(field.name, {})[name] = field
    made: list[_FieldOption] = []
    for field_name, by_name in owners.items():
        # A name that the command itself needs is prefixed: --weights is a file of the model, so a head's weights are
        # --head-weights.
        free = field_name not in taken
        option = make_option(
            _merged(by_name, everyone=len(by_name) == len(choices.fields)),
            choices.spellings.get(field_name),
            destination=field_name if free else f"{choices.word}_{field_name}",
            annotations=[field.annotation for field in by_name.values()],
            defaults=_defaults(by_name),
        )
        made.append(_FieldOption(option, field_name, tuple(by_name)))
    return made


def _merged(by_name: Mapping[str, Field], everyone: bool) -> Field:
    """A field that several choices have, with what each of them says of it, and their names."""
    first = next(iter(by_name.values()))
    if everyone or len(by_name) == 1:
        return first
    owners: dict[str, list[str]] = {}
    for name, field in by_name.items():
        owners.setdefault(field.text.rstrip("."), []).append(name)
    texts = [f"{text} (of {', '.join(names)})." for text, names in owners.items()]
    return Field(first.name, first.annotation, first.default, " ".join(texts))


def _defaults(by_name: Mapping[str, Field]) -> str | None:
    """The defaults in words where they differ; None where they do not."""
    owners: dict[str, list[str]] = {}
    for name, field in by_name.items():
        owners.setdefault(shown(field.default) or "none", []).append(name)
    if len(owners) == 1:
        return None
    return ", ".join(f"{value} of {' and '.join(names)}" for value, names in owners.items())
