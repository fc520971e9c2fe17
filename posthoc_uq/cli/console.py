"""What the commands say: one-line errors and warnings on stderr, results on stdout, exit codes.

Exit codes: 0, 1 for an error, 2 for wrong usage, 3 where `predict` left images out, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, cast

import click

from posthoc_uq.cli.wording import in_options
from posthoc_uq.core.errors import PosthocUQError, printable

ERROR, INCOMPLETE, INTERRUPTED = 1, 3, 130
_QUIET, _DEBUG = "posthoc_uq.quiet", "posthoc_uq.debug"
_LONGEST = 600  # characters of an error that is not the library's own


class Command(click.Command):
    """A command with ``--json``, ``--quiet`` and ``--debug``, whose errors and warnings are single lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                help="Print one JSON object on stdout, and nothing else there.",
            ),
            click.Option(
                ["--quiet", "-q"],
                is_flag=True,
                expose_value=False,
                callback=_remember(_QUIET),
                help="No progress bars.",
            ),
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                callback=_remember(_DEBUG),
                help="Show the traceback of an error.",
            ),
        ]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read its arguments."""
        path = " ".join(name for name in (parent and parent.command_path, info_name) if name)
        with usage_in_one_line(path):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it with the model that its posterior's file names, if it destroys nothing."""
        from posthoc_uq.cli.naming import fill_in
        from posthoc_uq.cli.overwriting import check_outputs  # torch comes along

        with _errors_as_lines(ctx):
            taken = fill_in(ctx.params)
            check_outputs(ctx.params)
            if taken is not None and not ctx.meta.get(_QUIET, False) and not _rank():
                click.echo(printable(taken), err=True)
            return super().invoke(ctx)


class WrongUsage(click.UsageError):
    """Wrong usage of the command at `path`, told in one line."""

    def __init__(self, message: str, ctx: click.Context | None, path: str) -> None:
        super().__init__(message, ctx)
        self._path = path

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it."""
        text = f"Error: {_rank()}{_one_line(self.message).rstrip('.')} (see {self._path} --help)."
        click.echo(text, file=file, err=file is None)


@contextmanager
def usage_in_one_line(path: str) -> Generator[None]:
    """Turn click's four-line usage errors into `WrongUsage`; errors by which click shows help stay. `path` names the
    command, for errors without a context.
    """
    try:
        yield
    except click.UsageError as error:
        if type(error).show is not click.UsageError.show:
            raise
        known = path if error.ctx is None else error.ctx.command_path
        raise WrongUsage(error.format_message(), error.ctx, known) from error


def _remember(key: str) -> Any:
    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[key] = value

    return keep


def progress() -> bool:
    """Whether to show progress bars: on a terminal, unless ``--quiet`` was given."""
    return sys.stderr.isatty() and not click.get_current_context().meta.get(_QUIET, False)


@contextmanager
def _errors_as_lines(ctx: click.Context) -> Generator[None]:
    """Turn what goes wrong into one line and an exit code."""
    debug = ctx.meta.get(_DEBUG, False)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort):
            if debug:
                raise
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if debug:
                raise
            raise click.ClickException(_rank() + in_options(sentence(error), ctx)) from error


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if _rank():  # every process gives the same warnings; only the first shows them
        return
    line = f"Warning: {in_options(_one_line(str(message)), click.get_current_context(silent=True))}"
    # Where no bar was ever shown, the module of bars need not be there; the command line starts faster without it.
    bars: Any = sys.modules.get("posthoc_uq.core.progress")
    if bars is None or not sys.stderr.isatty() or not bars.print_above(line, sys.stderr):
        click.echo(line, err=True)


def _rank() -> str:
    """A prefix that names the process, in every process but the first."""
    number = os.environ.get("RANK", "0")
    return "" if number == "0" or os.environ.get("WORLD_SIZE", "1") == "1" else f"[rank {number}] "


def sentence(error: BaseException) -> str:
    """One line that says what went wrong."""
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:  # from a loader's worker process
        return _cut(_one_line(text.strip().splitlines()[-1]))
    if isinstance(error, PosthocUQError):
        return _one_line(text)
    if isinstance(error, OSError) and error.strerror:
        return f"'{error.filename}': {error.strerror}." if error.filename else f"{error.strerror}."
    return _cut(_one_line(f"{type(error).__name__}: {text}")) + " (--debug shows where.)"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def say(text: str, as_json: bool = False) -> None:
    """Print a line for people on stdout: only in the first process, and not where a JSON object is wanted there."""
    if not as_json and not _rank():
        click.echo(printable(text, keep="\n\t"))


def print_json(value: Mapping[str, Any]) -> None:
    """Print the one JSON object."""
    if not _rank():
        click.echo(json.dumps(plain(value), indent=1))


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
