"""A command's parser, made from its signature: names, types, defaults and docstrings of the function, of the
dataclasses that it takes, and of the method, likelihood or head that is chosen.

What may be typed; jsonargparse reads values and configuration files, completes, and prints help:

* Dashes and underscores are the same: ``--batch-size 5``, ``--batch_size=5``. A flag needs no value, and has an
  opposite: ``--compress``, ``--no-temperature``. ``none`` and ``null`` are Python's None.
* Several values have commas between them, or are given several times: ``--mean 0.5,0.5,0.5``, ``--target price
  --target rent``. Names with commas: ``--columns '["a,b", "c"]'``, or alone ``--target 'y, EUR'``.
* ``--method``, ``--likelihood`` and ``--head`` name a class of the library (``inf`` or ``INF``), whose fields are
  options: ``--method.rank 50``, or ``--rank 50`` where no other option has that name. ``fit --method utvi --help``
  lists them. An option that only one head takes selects that head. What is no text (an optimiser) can be given from
  Python only.
* ``--config FILE`` reads options by the same names from YAML; those on the command line win, and a value in a file is
  never split at commas. ``--print-config`` prints all options of a call in this form.

A method of your own is known once it is registered: import it, then call `posthoc_uq.app.cli.main`.
"""

from __future__ import annotations

import inspect
import re
import types
from argparse import ArgumentError
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import zip_longest
from json import loads
from typing import Annotated, Any, Literal, Optional, Union, cast, get_args, get_origin, get_type_hints

import torch
import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from posthoc_uq.app.cli.help import Help, dashed, summary, unmarked
from posthoc_uq.app.cli.options import SHARED, Choice, WrongUsage
from posthoc_uq.app.paths import check_regular
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, did_you_mean
from posthoc_uq.fitting.wrap import HEADS, head_class
from posthoc_uq.likelihoods import LIKELIHOODS
from posthoc_uq.methods import METHODS

_SHORT = {"output": "-o", "quiet": "-q", "help": "-h"}
_DEFAULTS: dict[str, str | None] = {"method": "inf", "likelihood": "classification", "head": None}
_WHOLE = ("target", "columns")  # names that may have commas, and are split where a header is known
_TRUTHS = {"true": "true", "yes": "true", "false": "false", "no": "false"}
_IN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    torch.dtype: "a number format",
}


def kinds_of(word: str) -> Mapping[str, type]:
    """The methods, likelihoods or heads by name, those that others registered among them."""
    heads: dict[str, type] = {name: head_class(name) for name in HEADS}
    return {"method": METHODS, "likelihood": LIKELIHOODS, "head": heads}[word]


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
register_type(
    torch.dtype,
    lambda dtype: str(dtype).removeprefix("torch."),
    lambda name: _DTYPES[name.removeprefix("torch.")],
    deserializer_exceptions=(KeyError,),
)


@dataclass(frozen=True)
class Option:
    """An argument of a function, or a field of a dataclass, whose values can be written as text.

    Attributes:
        name: in Python.
        hint: its type, with what is said beside it (`typing.Annotated`).
        kind: the part of the type that can be written.
        default: its value where none is given; `inspect.Parameter.empty` where one is needed.
        text: what the docstring says of it.
        positional: whether it is given without its name.
    """

    name: str
    hint: Any
    kind: Any
    default: Any
    text: str
    positional: bool = False


@cache
def options_of(owner: Callable[..., Any]) -> tuple[Option, ...]:
    """The options of a function or a class; read once, since a command asks for them to parse and to check its files.

    Raises:
        PosthocUQError: the type of one cannot be found when the program runs.
    """
    written: Any = owner.__init__ if isinstance(owner, type) and not is_dataclass(owner) else owner
    try:
        hints = get_type_hints(written, include_extras=True)
    except NameError as error:
        raise PosthocUQError(
            f"The options of '{owner.__qualname__}' cannot be read: {error}. Import the type when the program runs."
        ) from None
    lists = {f.name: f.default_factory for f in fields(owner)} if is_dataclass(owner) else {}
    texts = _texts(owner)
    shared = {} if isinstance(owner, type) else SHARED
    found: list[Option] = []
    for name, parameter in inspect.signature(cast(Any, owner)).parameters.items():
        hint = hints.get(name)
        kind = hint if hint is Choice or is_dataclass(hint) else _textual(hint)
        factory: Any = lists.get(name, MISSING)
        default = parameter.default if factory is MISSING else factory()
        if kind is not None:
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            found.append(Option(name, hint, kind, default, texts.get(name, shared.get(name, "")), positional))
    return tuple(found)


def _texts(owner: Any) -> dict[str, str]:
    """What docstrings say of each argument or field; of a class, those of its bases too."""
    owners = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    found = [
        parse(vars(one).get("__doc__") or "" if isinstance(one, type) else one.__doc__) for one in owners
    ]
    return {p.arg_name: unmarked(p.description or "") for docstring in found for p in docstring.params}


def _textual(hint: Any) -> Any:
    """The part of a type whose values can be written as text; None where there is none."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _textual(parts[0])
    if origin in (Union, types.UnionType):
        kinds = [kind for part in parts if (kind := _textual(part)) is not None]
        # the strictest first: 3 is a whole number, else a number, else text
        order: list[Any] = [bool, int, float, torch.dtype]
        kinds.sort(key=lambda kind: order.index(kind) if kind in order else 9 if kind is str else 0)
        return cast(Any, Union)[(*kinds, *(part for part in parts if part is type(None)))] if kinds else None
    if origin in (list, Sequence):
        item = _textual(parts[0])
        return None if item is None else list[item]
    if hint is Any:
        return str
    simple = isinstance(hint, type) and origin is None and issubclass(hint, (int, float, str, torch.dtype))
    return hint if simple or origin is Literal else None


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Union else (kind,)


def _is_list(kind: Any) -> bool:
    return any(get_origin(part) is list for part in _parts(kind))


def _is_flag(kind: Any) -> bool:
    return {*_parts(kind)} <= {bool, type(None)}


def _in_words(kind: Any) -> str:
    """A type as an error names it."""
    words: list[str] = []
    for part in _parts(kind):
        if part is int and float in _parts(kind):
            continue  # a number all the same
        if get_origin(part) is Literal:
            words += map(str, get_args(part))
        elif get_origin(part) is list:
            words.append(f"{_in_words(get_args(part)[0])}, or several with commas")
        elif part is not type(None):
            words.append(next(name for known, name in _IN_WORDS.items() if issubclass(part, known)))
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _choices(kind: Any) -> list[str]:
    """The words that a value can be."""
    return [str(name) for part in _parts(kind) if get_origin(part) is Literal for name in get_args(part)]


def _metavar(option: Option) -> str:
    """What stands for an option's value in the help; nothing for a flag."""
    choices = _choices(option.kind)
    if choices:
        numbers = ["N"] if {int, float} & {*_parts(option.kind)} else []
        return f"{{{','.join(choices + numbers)}}}"
    return "" if _is_flag(option.kind) else option.name.rpartition("_")[2].upper()


class Command:
    """A command with the options of this call.

    Args:
        function: what it does. Its arguments are options, those before ``/`` come without a name; an argument whose
            type is a dataclass stands for the fields of that; one of the type `Choice` for a method, likelihood or
            head, which has the argument's name, and for the options of the chosen one.
        words: of the call, without the command's own name.

    Attributes:
        kinds: the type of every option by its full name, such as ``"method.rank"``.
        parser: of jsonargparse.
        configurations: the files of options that were read.

    Raises:
        WrongUsage: there is no method, likelihood or head of the given name, or a configuration file cannot be read.
    """

    def __init__(self, function: Callable[..., Any], words: Sequence[str]) -> None:
        self.function, self.name = function, function.__name__
        self.options = options_of(function)
        self.kinds: dict[str, Any] = {"config": str, "print_config": bool, "help": bool}
        self.configurations = _values(words, "--config")
        self._files = {path: _configured(path) for path in self.configurations}
        self._bounds: dict[str, Any] = {}  # types with the bounds that jsonargparse does not know
        self._chosen: dict[str, str | None] = {}
        text = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
        description, _, examples = text.partition("\n\nExamples:\n")
        places = [option.name.upper() for option in self.options if option.positional]
        self.parser: Any = ArgumentParser(
            prog=f"posthoc-uq {self.name}",
            usage=" ".join([f"posthoc-uq {self.name}", *places, "[options]"]),
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=Help,
            exit_on_error=False,
        )
        for option in self.options:
            if option.positional:
                self._add(self.parser, "", option)
        self.parser.add_argument(
            "--config", action="config", help="a YAML file with options by their names", metavar="FILE"
        )
        for option in self.options:
            if not option.positional and option.kind is not Choice and not is_dataclass(option.kind):
                self._add(self.parser, "", option)
        for option in self.options:
            if option.kind is Choice:
                self._add_choice(option, words)
            elif is_dataclass(option.kind):
                group = self.parser.add_argument_group(summary(option.kind.__doc__))
                for own in options_of(cast(Any, option.kind)):
                    self._add(group, "", own)

    def _add(self, group: Any, prefix: str, option: Option) -> None:
        key = prefix + option.name
        self.kinds[key] = option.kind
        if not prefix:  # methods, likelihoods and heads check their own
            self._bounds[key] = option.hint
        needed = option.default is inspect.Parameter.empty  # which `parse` looks for
        flags = [f"--{key}", *([_SHORT[key]] if key in _SHORT else [])]
        group.add_argument(
            *([key] if option.positional else flags),
            type=Optional[option.kind],  # noqa: UP045
            help=option.text.rstrip(".") + (" (needed)" if needed and not option.positional else ""),
            metavar=option.name.upper() if option.positional else _metavar(option),
            default=None if needed else option.default,
            **({"nargs": "?"} if option.positional else {}),
        )

    def _add_choice(self, option: Option, words: Sequence[str]) -> None:
        """The option that names a method, likelihood or head, and the options of the chosen one; of all heads where
        none is named, since the posterior's file may name one.
        """
        word, kinds = option.name, kinds_of(option.name)
        named = [content.get(word, content.get(f"{word}.name")) for content in self._files.values()]
        named += [*_values(words, f"--{word}"), *_values(words, f"--{word}.name")]
        name = self._chosen[word] = _chosen(word, kinds, [_DEFAULTS[word], *named])
        group = self.parser.add_argument_group(
            f"{word} {name}: {summary(kinds[name].__doc__)}" if name else f"{word}s"
        )
        self.kinds[f"{word}.name"] = self.kinds[word] = str
        text = f"(or --{word}) {option.text.rstrip('.')}: {', '.join(kinds)}"
        group.add_argument(f"--{word}.name", type=str, default=_DEFAULTS[word], help=text, metavar="NAME")
        for kind in kinds.values() if name is None else [kinds[name]]:
            for own in options_of(kind):
                if f"{word}.{own.name}" in self.kinds or (word, own.name) == ("head", "seed"):
                    continue
                # what is not given of a likelihood or head is found from the data, or as in the posterior's file
                if word != "method":
                    usual = "" if own.default in (None, False) else f" ({own.default} by default)"
                    own = replace(own, default=None, text=own.text.rstrip(".") + usual)
                self._add(group, f"{word}.", own)

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The arguments of the function.

        Raises:
            WrongUsage: the words name something that there is not, or a value of another type.
            SystemExit: help or the configuration was asked for, and is printed.
        """
        flat: dict[str, Any] = {}
        places: dict[str, str] = {}
        for path, content in self._files.items():
            for written, value in content.items():
                key, _ = self._key(written, f" in '{path}'")
                flat[key], places[key] = self._value(key, value), f" (in '{path}')"
        typed = self._typed(words)
        flat |= typed
        places = {key: place for key, place in places.items() if key not in typed}
        shown, _ = flat.pop("print_config", False), flat.pop("config", None)
        names = {f"{word}.name": name for word, name in self._chosen.items() if name is not None}
        named = {word for word in self._chosen if {word, f"{word}.name"} & flat.keys()}
        flat = {
            key: value for key, value in flat.items() if key.removesuffix(".name") not in self._chosen
        } | names
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            *word, name = key.split(".")
            (nested.setdefault(word[0], {}) if word else nested)[name] = value
        try:
            if shown:
                flags = {f"skip_{flag}": f"skip_{flag}" in str(shown) for flag in ("default", "unset")}
                print(self.parser.dump(self.parser.parse_object(nested), **flags), end="")
                raise SystemExit(0)
            given: dict[str, Any] = self.parser.parse_object(nested, defaults=False).as_dict()
        except ArgumentError as error:
            raise WrongUsage(self._in_a_line(str(error.message), places)) from None
        for key, value in given.items():
            try:
                if key in self._bounds and value is not None:
                    check_option(dashed(f"--{key}"), value, self._bounds[key])
            except PosthocUQError as error:
                raise WrongUsage(f"{str(error).rstrip('.')}{places.get(key, '')}.") from None
        call: dict[str, Any] = {}
        for option in self.options:
            if option.kind is Choice:
                word, name = option.name, self._chosen[option.name]
                own: dict[str, Any] = {k: v for k, v in given.get(word, {}).items() if k != "name"}
                if word != "method":
                    own = {key: value for key, value in own.items() if value is not None}
                call[word] = Choice(word, name, own, word in named)
            elif is_dataclass(option.kind):
                own = {field.name: given[field.name] for field in fields(option.kind) if field.name in given}
                call[option.name] = cast(Any, option.kind)(**own)
            else:
                call[option.name] = given.get(option.name, option.default)
        needed = [option for option in self.options if call[option.name] is inspect.Parameter.empty]
        if needed:
            names_ = [option.name if option.positional else dashed(f"--{option.name}") for option in needed]
            raise WrongUsage(f"{' and '.join(names_)} must be given.")
        return call

    def _typed(self, words: Sequence[str]) -> dict[str, Any]:
        """What is typed, by full names: values as text, several in a list, True for ``--print-config``."""
        waiting, places = deque(words), [option.name for option in self.options if option.positional]
        short = {mark: f"--{name}" for name, mark in _SHORT.items()}
        typed: dict[str, Any] = {}
        while waiting:
            word = waiting.popleft()
            word = short.get(word, word)
            if not word.startswith("--"):
                if word.startswith("-") and word[1:2].isalpha():
                    raise WrongUsage(f"There is no option {word}.")
                if not places:
                    raise WrongUsage(f"'{word}' is one argument too many.")
                typed[places.pop(0)] = word
                continue
            written, equals, value = word[2:].partition("=")
            key, opposite = self._key(written)
            kind = self.kinds[key]
            if key == "help":
                self.parser.print_help()
                raise SystemExit(0)
            if opposite:
                value = "false"
            elif _is_flag(kind):
                if not equals:
                    value = waiting.popleft() if waiting and waiting[0].lower() in _TRUTHS else "true"
            elif not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise WrongUsage(f"--{written} needs a value: {_in_words(kind)}.")
                value = waiting.popleft()
            if _is_list(kind):
                typed[key] = [*typed.get(key, []), *_several(value, kind, split=key not in _WHOLE)]
            else:
                typed[key] = self._value(key, value)
        return {
            key: self._value(key, value) if isinstance(value, list) else value for key, value in typed.items()
        }

    def _value(self, key: str, value: Any) -> Any:
        """A value as jsonargparse takes it, of one that may be written in other ways."""
        kind = self.kinds[key]
        parts = _parts(kind)
        if _is_list(kind):
            several = [] if value is None else value if isinstance(value, list) else [value]
            if len(several) == 1 and several[0] in _choices(kind):
                return several[0]
            return several or value
        if _is_flag(kind) and isinstance(value, str):
            return _TRUTHS.get(value.lower(), value)
        return None if value == "none" and type(None) in parts and str not in parts else value

    def _key(self, written: str, place: str = "") -> tuple[str, bool]:
        """The full name of an option, and whether its opposite is meant: ``no-train-mean``."""
        name = written.replace("-", "_")
        if name in self.kinds:
            return name, False
        nested = [key for word in self._chosen if (key := f"{word}.{name}") in self.kinds]
        if len(nested) == 1:
            return nested[0], False
        if nested:
            raise WrongUsage(
                f"--{written} may be {' or '.join(dashed(f'--{key}') for key in nested)}; write one of them."
            )
        *prefix, last = name.split(".")
        if last.startswith("no_"):
            key, _ = self._key(".".join([*prefix, last.removeprefix("no_")]), place)
            if _is_flag(self.kinds[key]):
                return key, True
        raise WrongUsage(self._unknown(written, place))

    def _unknown(self, written: str, place: str) -> str:
        """What to say of an option that there is not."""
        last = written.replace("-", "_").rpartition(".")[2].removeprefix("no_")
        for word, name in self._chosen.items():
            owners = [n for n, kind in kinds_of(word).items() if last in (o.name for o in options_of(kind))]
            if owners and name is not None:
                whose = f"the {word}{'s' if len(owners) > 1 else ''} {' and '.join(owners)}"
                return f"--{written} is for {whose} (--{word} {owners[0]}), and this is {name}."
        names = {dashed(f"--{name}") for key in self.kinds for name in (key, key.rpartition(".")[2])}
        meant = dashed(f"--{written}")
        close = get_close_matches(meant, names, cutoff=0.75)
        return f"There is no option --{written}{place}.{did_you_mean(meant, close)}"

    def _in_a_line(self, message: str, places: Mapping[str, str]) -> str:
        """An error of jsonargparse in one line, with the option as it is typed, and the file that it stands in."""
        key = re.search(r'Parser key "([^"]+)"', message)
        if key is None:
            return " ".join(message.split())
        value = re.search(r"(?:Given value|Got value): (.*)", message)
        place = places.get(key[1], "")
        given = repr(value[1]) if value else "the value"
        return f"--{dashed(key[1])}: {given} is not {_in_words(self.kinds[key[1]])}{place}."


def _several(value: str, kind: Any, split: bool) -> list[str]:
    """The values in a text: a list of texts as in JSON, else with commas between them if they are `split`. Brackets
    without quotes stay, since they may be a shell pattern, as in ``--layers '[02]'``; but not around numbers.
    """
    with suppress(ValueError):
        items: Any = loads(value)
        if isinstance(items, list) and all(isinstance(item, str) for item in cast("list[Any]", items)):
            return cast("list[str]", items)
    text = any(get_args(part)[0] is str for part in _parts(kind) if get_origin(part) is list)
    return [part.strip() for part in (value if text else value.strip("[]")).split(",")] if split else [value]


def _chosen(word: str, kinds: Mapping[str, type], given: Sequence[Any]) -> str | None:
    """The name of a method, likelihood or head that is given last.

    Raises:
        WrongUsage: there is none of that name.
    """
    last = next((name for name in reversed(given) if name is not None), None)
    known = {kind.__name__.lower(): name for name, kind in kinds.items()} | {name: name for name in kinds}
    if last is not None and str(last).lower() not in known:
        raise WrongUsage(
            f"There is no {word} '{last}': it is one of {', '.join(kinds)}.{did_you_mean(last, kinds)}"
        )
    return None if last is None else known[str(last).lower()]


def _values(words: Sequence[str], flag: str) -> list[str]:
    """What is given with an option, before it is known which options there are."""
    pairs = [(*word.partition("="), following) for word, following in zip_longest(words, words[1:])]
    given = (value if equals else following for name, equals, value, following in pairs if name == flag)
    return [value for value in given if value is not None]


def _configured(path: str) -> dict[str, Any]:
    """The options in a YAML file; those of the method as ``method.rank``.

    Raises:
        WrongUsage: the file cannot be read, or holds something else.
    """
    check_regular(path, "The configuration file")
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = yaml.safe_load(file)
    except OSError as error:
        raise WrongUsage(
            f"The configuration file '{path}' cannot be read: {error.strerror or error}."
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongUsage(f"The configuration file '{path}' is no YAML: {error}.") from None
    if not isinstance(content, dict):
        raise WrongUsage(
            f"The configuration file '{path}' has no options by their names, such as 'batch_size: 64'."
        )
    options: dict[str, Any] = {}
    for name, value in cast("dict[Any, Any]", content).items():
        inner = cast("dict[Any, Any]", value).items() if isinstance(value, dict) else None
        options |= {str(name): value} if inner is None else {f"{name}.{own}": item for own, item in inner}
    return options
