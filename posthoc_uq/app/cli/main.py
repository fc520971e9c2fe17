"""The program ``posthoc-uq``: which command is called, what it prints, and how it ends.

Results go to stdout; progress (on a terminal), what was taken from the posterior's file, warnings and errors go to
stderr, an error in one line. With ``--json`` stdout is one JSON object, in which numbers that are not finite are null.
Exit codes: 0 done; 1 an error; 2 wrong usage; 3 where `predict` left images out; 130 after Ctrl-C. For completion in
your shell ``posthoc-uq --print_completion=shtab-bash`` prints a script.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, cast

from jsonargparse import ArgumentParser, set_parsing_settings

from posthoc_uq.app.cli.help import Help, dashed, documents, summary
from posthoc_uq.app.cli.options import Console, WrongUsage
from posthoc_uq.core.errors import PosthocUQError, printable
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.version import __version__

if TYPE_CHECKING:  # imported where a command runs, since they bring torch, which takes seconds
    from posthoc_uq.app.cli.commands import Done
    from posthoc_uq.app.cli.parser import Command

ERROR, USAGE, INTERRUPTED = 1, 2, 130
COMMANDS = (
    "fit",
    "tune",
    "calibrate",
    "predict",
    "evaluate",
    "update",
    "serve",
    "monitor",
    "inspect",
    "demo",
)
_MAX_CHARACTERS = 600  # characters of an error that is not the library's own
_FAITHFUL = re.compile(r"uq\.tune\(posterior, \w+, criterion='faithful', head='(\w+)'\)")
_LIKELIHOOD = re.compile(r"likelihood=uq\.(\w+)\(([^()]*)\)")
_SETTING = re.compile(r"\b([a-z][a-z_]*)=(?:'([^']*)'|\"([^\"]*)\"|(-?[\w.+-]*\w)\b(?![\w(.]))")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``posthoc-uq`` with the given arguments, or the process's own; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    program = f"posthoc-uq {words[0]}" if words and words[0] in COMMANDS else "posthoc-uq"
    command: list[Command] = []
    with _streams(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _warn(str(message), command)
        try:
            return _run(words, command)
        except WrongUsage as error:
            _tell(f"Error: {_rank()}{_one_line(str(error)).rstrip('.')} (see {program} --help).")
            return USAGE
        except SystemExit as end:  # of help, which is printed
            return end.code if isinstance(end.code, int) else 0
        except KeyboardInterrupt:
            if debug:
                raise
            _tell("Interrupted.")
            return INTERRUPTED
        except Exception as error:
            if debug:
                raise
            if isinstance(error, BrokenPipeError):
                _to_nowhere(sys.stdout)
            _tell(f"Error: {_rank()}{_in_options(sentence(error), command)}")
            return ERROR


def _run(words: Sequence[str], running: list[Command]) -> int:
    """Run what the words say; the command is added to `running` for what is said meanwhile."""
    name = words[0] if words else "--help"
    if name == "--version":
        print(f"posthoc-uq {__version__}")
        return 0
    if name.startswith("-"):
        program(complete=name.startswith("--print_completion")).parse_args(words or ["--help"])
    if name not in COMMANDS:
        raise WrongUsage(f"There is no command '{name}'.{did_you_mean(name, COMMANDS)}")
    from posthoc_uq.app.cli import commands
    from posthoc_uq.app.cli.outputs import Outputs
    from posthoc_uq.app.cli.parser import Command
    from posthoc_uq.app.cli.posterior_file import taken_from

    command = Command(getattr(commands, name), words[1:])
    running.append(command)
    call = command.parse(words[1:])
    console = next(value for value in call.values() if isinstance(value, Console))
    taken = None
    if "file" in call and "source" in call:
        call["source"], taken = taken_from(call["file"], call["source"])
    outputs = Outputs(command.options, call, command.configurations)
    outputs.check()
    if taken is not None and not console.quiet and not _rank():
        _tell(printable(taken))
    places = [call.pop(option.name) for option in command.options if option.positional]
    if "outputs" in inspect.signature(command.function).parameters:
        call["outputs"] = outputs
    done: Done | None = command.function(*places, **call)
    if done is None:
        return 0
    if not _rank() and (console.json or done.text):
        _show(json.dumps(plain(done.facts), indent=1) if console.json else printable(done.text, keep="\n\t"))
    for line in done.complaints:
        _tell(printable(line))
    return done.code


def program(complete: bool) -> Any:
    """The parser of the program: with the names of the commands alone, or with all options of all of them."""
    set_parsing_settings(add_print_completion_argument=True)

    class CommandParser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> Any:
            raise WrongUsage(_one_line(message))

    texts = documents()
    parser: Any = CommandParser(prog="posthoc-uq", description=texts[""], formatter_class=Help)
    parser.add_argument("--version", action="store_true", help="Show the version.")
    subcommands = parser.add_subcommands(required=False)
    for name in COMMANDS:
        one = _complete(name) if complete else ArgumentParser()
        subcommands.add_subcommand(name, one, help=summary(texts[name]))
    return parser


def _complete(name: str) -> Any:
    from posthoc_uq.app.cli import commands
    from posthoc_uq.app.cli.parser import Command

    return Command(getattr(commands, name), []).parser


@contextmanager
def _streams() -> Generator[None]:
    """Standard streams that can be written to: what was closed leads nowhere, also for the descriptors, which the next
    file would get otherwise, and every library's messages with them; characters that the encoding of stdout does not
    have are escaped.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    with ExitStack() as given_back:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if cast(Any, stream) is None:
                given_back.enter_context(redirect(given_back.enter_context(open(os.devnull, "w"))))
        reconfigure, errors = getattr(sys.stdout, "reconfigure", None), getattr(sys.stdout, "errors", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
            given_back.callback(reconfigure, errors=errors)
        try:
            yield
        finally:
            try:
                sys.stdout.flush()
            except (OSError, ValueError):
                _to_nowhere(sys.stdout)


def _to_nowhere(stream: Any) -> None:
    """Lead a stream that cannot be written to nowhere, so that nothing more is said of it when Python ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _show(text: str) -> None:
    """Print a result; nobody may be reading any more."""
    try:
        print(text, flush=True)
    except OSError as error:
        _to_nowhere(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise PosthocUQError(
                f"The command is done, but stdout could not be written: {error.strerror or error}."
            ) from error


def _tell(line: str) -> None:
    """Say something on stderr; a command goes on where that cannot be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _to_nowhere(sys.stderr)


def _warn(message: str, running: Sequence[Command]) -> None:
    if _rank():  # every process gives the same warnings; only the first shows them
        return
    line = f"Warning: {_in_options(_one_line(message), running)}"
    # Where no bar was ever shown, the module of bars need not be there; the command line starts faster without it.
    bars: Any = sys.modules.get("posthoc_uq.core.progress")
    if bars is None or not sys.stderr.isatty() or not bars.print_above(line, sys.stderr):
        _tell(line)


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


def _in_options(text: str, running: Sequence[Command]) -> str:
    """A message of the library, which speaks Python, with the options of the running command in place of arguments:
    ``--likelihood binary`` for ``likelihood='binary'``.
    """
    kinds = running[0].kinds if running else {}
    names = {key.rpartition(".")[2] for key in kinds}

    def as_option(found: re.Match[str]) -> str:
        value = next((part for part in found.groups()[1:] if part is not None), "")
        return f"{dashed(f'--{found[1]}')} {value}" if found[1] in names else found[0]

    def as_likelihood(found: re.Match[str]) -> str:
        from posthoc_uq.app.cli.parser import kinds_of

        name = next(
            (name for name, kind in kinds_of("likelihood").items() if kind.__name__ == found[1]), None
        )
        if name is None or "likelihood" not in kinds:
            return found[0]
        settings = [part.strip().partition("=") for part in found[2].split(",") if "=" in part]
        written = (f"--likelihood.{dashed(setting)} {value}" for setting, _, value in settings)
        return " ".join([f"--likelihood {name}", *written])

    text = _FAITHFUL.sub(r"posthoc-uq tune FILE --data DATA --criterion faithful --head \1", text)
    return _SETTING.sub(as_option, _LIKELIHOOD.sub(as_likelihood, text))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
