"""A command's parser, made from its signature: names, types, defaults and docstrings of the function, of the
dataclasses that it takes, and of the method, likelihood or head that is chosen.

jsonargparse reads values and configuration files, completes, and prints help. Around it stands what people type:
dashes for underscores, flags without a value, ``--rank`` for ``--method.rank``, several values with commas.
"""

from __future__ import annotations

import inspect
import re
import types
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from json import dumps, loads
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import register_type

from posthoc_uq.cli.options import Choice, WrongUsage
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.paths import check_regular

_SHORT = {"output": ("-o",), "quiet": ("-q",)}
_DEFAULTS = {"method": "inf", "likelihood": "classification", "head": None}
_SHARED = {"head": ("seed",)}  # what comes from the command's own option
_WHOLE = ("target", "columns")  # names that may have commas, and are split where a header is known
_TRUTHS = {"true": "true", "yes": "true", "false": "false", "no": "false"}
_MARKS = re.compile(r"``\"?([^`\"]*)\"?``|`([^`]*)`|\*\*")
_NUMBERS = {int: "a whole number", float: "a number", bool: "true or false", torch.dtype: "a number format"}


def kinds_of(word: str) -> Mapping[str, type]:
    """The methods, likelihoods or heads by name, those that others registered among them."""
    from posthoc_uq.fitting.wrap import HEADS, head_class
    from posthoc_uq.likelihoods import LIKELIHOODS
    from posthoc_uq.methods import METHODS

    heads: dict[str, type] = {name: head_class(name) for name in HEADS}
    return {"method": METHODS, "likelihood": LIKELIHOODS, "head": heads}[word]


def dtype_named(name: str) -> torch.dtype:
    """The number format of a name, with or without ``torch.`` before it.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no number format {name!r}")
    return dtype


register_type(torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), dtype_named)


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


def options_of(owner: Callable[..., Any]) -> Iterator[Option]:
    """The options of a function or a class.

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
    for name, parameter in inspect.signature(cast(Any, owner)).parameters.items():
        hint = hints.get(name)
        kind = hint if hint is Choice or is_dataclass(hint) else _textual(hint)
        factory: Any = lists.get(name, MISSING)
        default = parameter.default if factory is MISSING else factory()
        if kind is not None:
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            yield Option(name, hint, kind, default, texts.get(name, ""), positional)


def summary(owner: Any) -> str:
    """The first sentence of a docstring, without its full stop."""
    return re.split(r"\.(?: |$)", _plain((owner.__doc__ or "").split("\n\n")[0]))[0]


def _texts(owner: Any) -> dict[str, str]:
    """What docstrings say of each argument or field; of a class, those of its bases too."""
    owners = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    found = [
        parse(vars(one).get("__doc__") or "" if isinstance(one, type) else one.__doc__) for one in owners
    ]
    return {p.arg_name: _plain(p.description or "") for docstring in found for p in docstring.params}


def _plain(text: str) -> str:
    """A text in one line, without the marks of code."""
    return " ".join(_MARKS.sub(lambda mark: mark[1] or mark[2] or "", text).split())


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


def _or_one(kind: Any) -> Any:
    """A type that also takes a single value where it takes a list."""
    lists = [part for part in _parts(kind) if get_origin(part) is list]
    return cast(Any, Union)[(*_parts(kind), *(get_args(part)[0] for part in lists))] if lists else kind


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
            words.append(_NUMBERS.get(part, "text" if part is str else part.__name__))
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Help whose descriptions keep their lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)


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
    """

    def __init__(self, function: Callable[..., Any], words: Sequence[str]) -> None:
        self.function, self.name = function, function.__name__
        self.options = list(options_of(function))
        self.kinds: dict[str, Any] = {"config": str, "print_config": bool, "help": bool}
        self._chosen: dict[str, str | None] = {}
        self.configurations: list[str] = []
        description, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")
        description, _, examples = description.partition("\n\nExamples:\n")
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
                self.parser.add_argument(option.name, type=option.kind, help=option.text)
        self.parser.add_argument("--config", action="config", help="A YAML file with options by their names.")
        for option in self.options:
            if not option.positional and option.kind is not Choice and not is_dataclass(option.kind):
                self._add(self.parser, "", option)
        for option in self.options:
            if option.kind is Choice:
                self._add_choice(option, words)
            elif is_dataclass(option.kind):
                group = self.parser.add_argument_group(summary(option.kind))
                for own in options_of(cast(Any, option.kind)):
                    self._add(group, "", own)

    def _add(self, group: Any, prefix: str, option: Option) -> None:
        key = prefix + option.name
        needed = option.default is inspect.Parameter.empty
        self.kinds[key] = option.kind
        group.add_argument(
            f"--{key}",
            *_SHORT.get(key, ()),
            type=_or_one(option.kind),
            help=option.text,
            **({"required": True} if needed else {"default": option.default}),
        )

    def _add_choice(self, option: Option, words: Sequence[str]) -> None:
        """The option that names a method, likelihood or head, and the options of the chosen one; of all heads where
        none is named, since the posterior's file may name one.
        """
        word, kinds = option.name, kinds_of(option.name)
        name = self._chosen[word] = _chosen(word, kinds, words)
        title = f"{word} {name}: {summary(kinds[name])}" if name else f"options of {word}s"
        group = self.parser.add_argument_group(title)
        listed = "; ".join(f"{known}: {summary(kind)}" for known, kind in kinds.items())
        self.kinds[f"{word}.name"] = self.kinds[word] = str
        text = f"(or --{word}) {option.text} {listed}."
        group.add_argument(f"--{word}.name", type=str, default=_DEFAULTS[word], help=text)
        for kind in kinds.values() if name is None else [kinds[name]]:
            for own in options_of(kind):
                if f"{word}.{own.name}" in self.kinds or own.name in _SHARED.get(word, ()):
                    continue
                # what is not given of a likelihood or head is found from the data, or as in the posterior's file
                if word != "method":
                    usual = "" if own.default is None else f" ({own.default} by default)"
                    own = replace(own, default=None, text=own.text.rstrip(".") + usual + ".")
                self._add(group, f"{word}.", own)

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The arguments of the function.

        Raises:
            WrongUsage: the words name something that there is not, or a value of another type.
            SystemExit: help or the configuration was asked for, and is printed.
        """
        spelled = self._spelled(words)
        try:
            if any(word.startswith("--print_config") for word in spelled):
                self.parser.parse_args(spelled)
            given: dict[str, Any] = self.parser.parse_args(spelled, defaults=False).as_dict()
        except ArgumentError as error:
            raise WrongUsage(self._in_a_line(str(error.message))) from None
        for key, kind in self.kinds.items():
            *word, name = key.split(".")
            found = given.get(word[0]) if word else given
            if _is_list(kind) and isinstance(found, dict):
                value: Any = cast("dict[str, Any]", found).get(name)
                if isinstance(value, (str, float)):  # a single value, from a configuration file
                    found[name] = [value]
        call: dict[str, Any] = {}
        for option in self.options:
            if option.kind is Choice:
                call[option.name] = self._choice(option.name, given.get(option.name))
            elif is_dataclass(option.kind):
                names = [field.name for field in fields(option.kind) if field.name in given]
                call[option.name] = cast(Any, option.kind)(**{name: given[name] for name in names})
            else:
                call[option.name] = given.get(option.name, option.default)
        return call

    def _choice(self, word: str, given: Any) -> Choice:
        name = self._chosen[word]
        options = {n: v for n, v in given.items() if n != "name"} if isinstance(given, dict) else {}
        if word != "method":
            options = {n: v for n, v in options.items() if v is not None}
        return Choice(word, name, options)

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """The words as the parser takes them: full names with ``=`` and a value; files of options first, so that the
        words win over them.
        """
        waiting, files, others = list(words), list[str](), list[str]()
        lists: dict[str, list[Any]] = {}
        long = {short: f"--{name}" for name, shorts in _SHORT.items() for short in shorts}
        while waiting:
            word = long.get(waiting[0], waiting[0])
            waiting.pop(0)
            if not word.startswith("--"):
                others.append(word)
                continue
            written, equals, value = word[2:].partition("=")
            key, opposite = self._key(written)
            kind = self.kinds[key]
            if key in ("help", "print_config"):
                others.append(f"--{key}{equals}{value}")
                continue
            if opposite:
                value = "false"
            elif _is_flag(kind):
                if not equals:
                    value = waiting.pop(0) if waiting and waiting[0].lower() in _TRUTHS else "true"
                value = _TRUTHS.get(value.lower(), value)
            elif not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise WrongUsage(f"--{written} needs a value: {_in_words(kind)}.")
                value = waiting.pop(0)
            if key.removesuffix(".name") in self._chosen:
                continue  # known already
            if _is_list(kind):
                lists.setdefault(key, []).extend(_several(value, kind, split=key not in _WHOLE))
            else:
                if value == "none" and type(None) in _parts(kind) and str not in _parts(kind):
                    value = "null"
                (files if key == "config" else others).append(f"--{key}={value}")
        self.configurations = [file.partition("=")[2] for file in files]
        others += [f"--{key}={dumps(values)}" for key, values in lists.items()]
        names = [f"--{word}.name={name}" for word, name in self._chosen.items() if name is not None]
        return [*files, *others, *names]

    def _key(self, written: str) -> tuple[str, bool]:
        """The full name of an option, and whether its opposite is meant: ``no-train-mean``."""
        name = written.replace("-", "_")
        if name in self.kinds:
            return name, False
        nested = [key for word in self._chosen if (key := f"{word}.{name}") in self.kinds]
        if len(nested) == 1:
            return nested[0], False
        if nested:
            raise WrongUsage(
                f"--{written} may be {' or '.join(f'--{key}' for key in nested)}; write one of them."
            )
        *prefix, last = name.split(".")
        if last.startswith("no_"):
            key, _ = self._key(".".join([*prefix, last.removeprefix("no_")]))
            if _is_flag(self.kinds[key]):
                return key, True
        raise WrongUsage(self._unknown(written))

    def _unknown(self, written: str) -> str:
        """What to say of an option that there is not."""
        last = written.replace("-", "_").rpartition(".")[2].removeprefix("no_")
        for word, name in self._chosen.items():
            owners = [n for n, kind in kinds_of(word).items() if last in (o.name for o in options_of(kind))]
            if owners and name is not None:
                whose = f"the {word}{'s' if len(owners) > 1 else ''} {' and '.join(owners)}"
                return f"--{written} is for {whose} (--{word} {owners[0]}), and this is {name}."
        names = {f"--{key}" for key in self.kinds} | {f"--{key.rpartition('.')[2]}" for key in self.kinds}
        meant = f"--{written}".replace("-", "_").replace("__", "--", 1)
        return f"There is no option --{written}.{did_you_mean(meant, names)}"

    def _in_a_line(self, message: str) -> str:
        """An error of the parser in one line, with the options as they are typed."""
        key = re.search(r'Parser key "([^"]+)"', message)
        value = re.search(r"(?:Given value|Got value): (.*)", message)
        unknown = re.search(r"Option '([^']+)' is not accepted", message)
        bound = re.search(r"(?:: (\S+))? does not conform to restriction (.*)", message)
        if key and bound:
            given = value[1] if value else bound[1]
            return f"--{key[1]} must be {bound[2].replace('v', '')}, not {given}."
        if key and value and key[1] in self.kinds:
            return f"--{key[1]}: {value[1]!r} is not {_in_words(self.kinds[key[1]])}."
        if unknown:
            close = did_you_mean(unknown[1], self.kinds)
            return f"A configuration file has the option '{unknown[1]}', which there is not.{close}"
        needed = re.search(r"arguments are required: (.*)", message)
        if needed:
            places = {option.name for option in self.options if option.positional}
            names = [name if name in places else f"--{name}" for name in needed[1].split(", ")]
            return f"{' and '.join(names)} must be given."
        return re.sub(r'Parser key "([^"]+)"', r"--\1", " ".join(message.split()))


def _several(value: str, kind: Any, split: bool) -> list[Any]:
    """The values in a text: with commas between them if they are `split`, or a list: of numbers as in YAML, of text as
    in JSON, since brackets without quotes may be a shell pattern, as in ``--layers '[02]'``.
    """
    text = any(get_args(part)[0] is str for part in _parts(kind) if get_origin(part) is list)
    if value.startswith("["):
        try:
            items: list[Any] = loads(value) if text else yaml.safe_load(value)
        except (ValueError, yaml.YAMLError):
            items = []
        if items and (not text or all(isinstance(item, str) for item in items)):
            return [item if isinstance(item, str) else dumps(item) for item in items]
    return [part.strip() for part in value.split(",")] if split else [value]


def _chosen(word: str, kinds: Mapping[str, type], words: Sequence[str]) -> str | None:
    """The name of the method, likelihood or head that the words or a configuration file name, else the default.

    Raises:
        WrongUsage: there is none of that name.
    """
    given: Any = _DEFAULTS[word]
    for flag, value in _pairs(words):
        if flag == "--config" and value is not None:
            found = _configured(value).get(word)
            found = cast("dict[str, Any]", found).get("name") if isinstance(found, dict) else found
            given = given if found is None else found
    for flag, value in _pairs(words):
        if flag in (f"--{word}", f"--{word}.name"):
            given = value
    if given is None:
        return None
    known = {kind.__name__.lower(): name for name, kind in kinds.items()} | {name: name for name in kinds}
    name = known.get(str(given).lower())
    if name is None:
        raise WrongUsage(
            f"There is no {word} '{given}': it is one of {', '.join(kinds)}.{did_you_mean(given, kinds)}"
        )
    return name


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Every word that may be an option, with what stands behind it."""
    for word, following in zip_longest(words, words[1:]):
        flag, equals, value = word.partition("=")
        yield flag, value if equals else following


def _configured(path: str) -> dict[str, Any]:
    """What stands in a configuration file; nothing where it cannot be read, which the parser says in its turn."""
    check_regular(path, "The configuration file")
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
