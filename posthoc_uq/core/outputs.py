"""Which part of what a model returns its outputs are: the tensor of logits or means, one row a sample; or which parts,
of several heads, whose numbers are then side by side.

A model may return a tuple, a dictionary, a dataclass or an object with attributes. An `OutputChoice` says which part.
`with_choice` makes a view of the model, on the same parameters, buffers and modules, whose calls return that part
alone; copies of a view are views. So everything behind it sees a model that returns a tensor, and the model itself is
not changed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, cast

import torch
from pydantic import AfterValidator, Field, PlainSerializer, model_validator
from torch import Tensor, nn

from posthoc_uq.core.devices import has_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import shown
from posthoc_uq.core.records import Name, Record

Output = str | int | Callable[[Any], Tensor]
"""A key or the name of an attribute, an index, or a function of what the model returns."""

NAMES = ("logits", "out", "sample")
"""Names that a part is recognised by: those of Hugging Face transformers, torchvision's segmentation, diffusers."""

MAX_HEADS = 64  # of a model, each with outputs and targets of its own
_MAX_NAME = 200  # characters of a function's name
_MISSING = object()

_DETECTOR = (
    "A posterior needs one tensor with a row a sample, which a detector's lists of boxes are not; fit the class logits "
    "of its box head for given proposals ('Lists of boxes' in docs/guides/several_heads.md has the code)."
)


def _check_function(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and len(value) <= _MAX_NAME):
        return value
    raise ValueError(f"must be a text of at most {_MAX_NAME} characters, not {shown(value)}")


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", type(function).__qualname__))[:_MAX_NAME]


class OutputChoice(Record):
    """Which part of what a model returns is its outputs: that of a name, of an index, or a function of it; and of
    several heads, which parts of that.

    Attributes:
        name: a key or an attribute's name.
        index: in a sequence.
        function: of what the model returns. A file keeps only its name; see `choice_of`.
        guessed: whether the part was found without being asked for.
        heads: the names of several heads, whose outputs are put side by side; see `parts_by_name`.
    """

    name: Name | None = None
    index: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    function: Annotated[Any, AfterValidator(_check_function), PlainSerializer(_name_of)] = None
    guessed: bool
    heads: Annotated[list[Name], Field(min_length=1, max_length=MAX_HEADS)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> OutputChoice:
        missing = [self.name, self.index, self.function].count(None)
        if missing != 2 and not (missing == 3 and self.heads):
            raise ValueError("must have one of name, index and function, or heads")
        return self

    @classmethod
    def of_part(
        cls, part: Output | None, guessed: bool = False, heads: Sequence[str] | None = None
    ) -> OutputChoice:
        """The choice of a part, as `checked_output` gives it, and of the heads in it."""
        kind = "function" if callable(part) else "index" if isinstance(part, int) else "name"
        values: dict[str, Any] = {kind: part, "guessed": guessed}
        if heads is not None:
            values["heads"] = [*heads]
        return cls.model_construct(**values)

    @property
    def part(self) -> Output | None:
        """The key or an attribute's name, the index, or the function; None for all that the model returns."""
        return next((part for part in (self.name, self.index, self.function) if part is not None), None)

    def _chosen(self, value: Any) -> Any:
        part = self.part
        if part is None:
            return value
        return part(value) if callable(part) else _part(value, part)

    def by_head(self, value: Any) -> dict[str, Tensor]:
        """The outputs of every head in what a model returned.

        Raises:
            PosthocUQError: there are none of these names, nor as many as heads; or one is no tensor of numbers that can
                be differentiated with a row a sample.
        """
        heads, chosen = self.heads or [], self._chosen(value)
        found = parts_by_name(chosen, heads)
        if found is None:
            raise PosthocUQError(
                f"The model returns {described_value(chosen)}, and the likelihood has the heads {heads}: it must be a "
                f"mapping or an object with these names, or a tuple of them in this order; say how to get there with "
                f"output=lambda returned: dict(...)."
            )
        for name, part in found.items():
            if not _is_candidate(part, None):
                raise PosthocUQError(
                    f"Head {name!r} of what the model returns is {form_of(part)}, and outputs are a tensor of "
                    f"floating-point numbers with a row a sample; say how it is made with output=lambda returned: "
                    f"dict(...)."
                )
        if len({len(part) for part in found.values()}) > 1:
            shapes = {name: tuple(part.shape) for name, part in found.items()}
            raise PosthocUQError(f"Every head must have one row a sample; they are of the shapes {shapes}.")
        return found

    def of(self, value: Any) -> Tensor:
        """The outputs in what a model returned; those of several heads side by side, ``(samples, numbers)``.

        Raises:
            PosthocUQError: there is no such part, or it is no tensor of numbers that can be differentiated.
        """
        if self.heads:
            return side_by_side([*self.by_head(value).values()])
        chosen = self._chosen(value)
        if not isinstance(chosen, Tensor) or not chosen.is_floating_point():
            what = (
                f"a {type(chosen).__name__}" if not isinstance(chosen, Tensor) else f"a {chosen.dtype} tensor"
            )
            raise PosthocUQError(
                f"output={self} gives {what}; the outputs must be one tensor of floating-point numbers, the logits or "
                f"means, and the model returns {described_value(value)}."
            )
        return chosen

    def __str__(self) -> str:
        heads = f"the heads {', '.join(self.heads)}" if self.heads else ""
        if self.part is None:
            return heads
        part = repr(self.part) if self.function is None else _name_of(self.function)
        return f"{heads} of {part}" if heads else part


def checked_output(output: Any) -> Any:
    """The argument ``output=`` of a user.

    Raises:
        PosthocUQError: it is no key, index or function.
    """
    if (
        output is None
        or (isinstance(output, (str, int)) and not isinstance(output, bool))
        or callable(output)
    ):
        return output
    raise PosthocUQError(
        f"output must be a key or an attribute's name (output='logits'), an index (output=0) or a function of what the "
        f"model returns (output=lambda returned: returned['out'].mean((2, 3))), not {output!r:.100}."
    )


def choice_of(kept: OutputChoice | None, given: Output | None = None) -> OutputChoice | None:
    """The choice that a posterior keeps, with the function that a file does not.

    Args:
        kept: in the history of a posterior.
        given: the user's, where the file keeps only the name of a function.

    Raises:
        PosthocUQError: a function is needed and not given, or given where the file says something else.
    """
    if kept is not None and kept.function is not None:
        function = given if callable(given) else kept.function
        if not callable(function):
            raise PosthocUQError(
                f"The posterior was fitted with a function of what the model returns, output={kept}, and a file keeps "
                f"no functions: pass the same one, uq.load(path, model, output=function)."
            )
        return kept.changed(function=function)
    part = None if kept is None else kept.part
    if given is not None and given != part:
        raise PosthocUQError(
            f"The posterior was fitted with output={part!r}, and this is another one, {OutputChoice.of_part(given)}; "
            f"leave output out."
        )
    return kept


def guessed_choice(value: Any, samples: int) -> OutputChoice | None:
    """The one part of what a model returned that can be its outputs; None where it returned a tensor.

    A part is a candidate if it is a tensor of floating-point numbers whose first dimension counts the samples. Of
    several, the one of a known name is taken (`NAMES`).

    Raises:
        PosthocUQError: there is no candidate, or there are several.
    """
    if isinstance(value, Tensor):
        return None
    parts = parts_of(value)
    candidates = [name for name, part in parts.items() if _is_candidate(part, samples)]
    known = [name for name in candidates if name in NAMES]
    best = known or candidates
    if len(best) == 1:
        return OutputChoice.of_part(best[0], guessed=True)
    if not best:
        detector = any(isinstance(part, Mapping) and "boxes" in part for part in parts.values())
        remedy = (
            _DETECTOR
            if detector
            else (
                f"one part must be a tensor of floating-point numbers whose first dimension counts the {samples} "
                f"samples; say how it is made with output=lambda returned: ..."
            )
        )
        raise PosthocUQError(f"The model returned {described_value(value)}; {remedy}")
    raise PosthocUQError(
        f"The model returned {described_value(value)}, and several parts can be its outputs: say which with "
        f"output={best[0]!r} or another of {best}."
    )


def output_tensor(output: Any) -> Tensor:
    """The tensor of outputs in a model's return value, where no choice was made: the value itself, a part with one of
    the `NAMES`, or the first entry of a sequence.

    Raises:
        PosthocUQError: there is none.
    """
    tensor = output
    if not isinstance(output, Tensor):
        parts = parts_of(output)
        found = [name for name in NAMES if _is_candidate(parts.get(name), None)]
        tensor = parts.get(found[0] if found else 0)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise PosthocUQError(
            f"The model returned {described_value(output)}; it must return a tensor of logits or means, "
            f"or something with that tensor as 'logits' or 'out', or else fit it with output=."
        )
    return tensor


def with_choice(model: nn.Module, choice: OutputChoice | None) -> nn.Module:
    """A view of `model` whose calls return the chosen part; without a choice, and of a view, the model itself."""
    if choice is None or chosen_in(model) is not None:
        return model
    view = copy.copy(model)  # its dictionaries of parameters, buffers and modules are the model's own
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        if name in vars(view):
            vars(view)[name] = OrderedDict(vars(view)[name])
    view.register_forward_hook(_Chooser(choice))
    return view


def chosen_in(model: nn.Module) -> OutputChoice | None:
    """The choice of a view, or of a copy of one; None for other models."""
    hooks = vars(model).get("_forward_hooks", {}).values()
    return next((hook.choice for hook in hooks if isinstance(hook, _Chooser)), None)


class _Chooser:
    """The hook of a view. Copies of the view share it, with the user's function in it."""

    def __init__(self, choice: OutputChoice) -> None:
        self.choice = choice

    def __call__(self, module: nn.Module, args: Any, returned: Any) -> Tensor:
        return self.choice.of(returned)

    def __deepcopy__(self, memo: Any) -> _Chooser:
        return self


def parts_of(value: Any) -> dict[str | int, Any]:
    """The parts of what a model returned by key, attribute or index; empty where it has none."""
    if isinstance(value, Mapping):
        return {
            key: part for key, part in cast(Mapping[Any, Any], value).items() if isinstance(key, (str, int))
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(cast(Any, value)._fields, cast("tuple[Any, ...]", value), strict=True))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return dict(enumerate(cast(Sequence[Any], value)))
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return dict(cast("dict[str | int, Any]", getattr(value, "__dict__", {})))


def described_value(value: Any) -> str:
    """What a model returned, in words: its type and its parts."""
    if isinstance(value, Tensor):
        return f"Tensor of {form_of(value)}"
    parts = parts_of(value)
    if not parts:
        return type(value).__name__
    listed = [f"{name!r}: {form_of(part)}" for name, part in list(parts.items())[:8]]
    more = ", ..." if len(parts) > 8 else ""
    return f"{type(value).__name__} of {', '.join(listed)}{more}"


def _part(value: Any, name: str | int) -> Any:
    """A part by key, attribute or index."""
    if not isinstance(value, Tensor):
        parts = parts_of(value)
        if name in parts:
            return parts[name]
        entries: Any = value.to_tuple() if hasattr(value, "to_tuple") else value
        if (
            isinstance(name, int)
            and isinstance(entries, (tuple, list))
            and -len(entries) <= name < len(entries)
        ):
            return entries[name]
        if isinstance(name, str) and hasattr(value, name):
            return getattr(value, name)
    raise PosthocUQError(
        f"output={name!r} names no part of what the model returned, {described_value(value)}; "
        + ("leave output out." if isinstance(value, Tensor) else "name one of these.")
    )


def _is_candidate(part: Any, samples: int | None) -> bool:
    if not isinstance(part, Tensor) or not part.is_floating_point() or part.ndim == 0:
        return False
    return samples is None or part.shape[0] == samples


def form_of(value: Any) -> str:
    """Type and shape of a value in words, such as ``float32 (8, 3, 32, 32)`` or ``a list of 3 tensors``."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value is None:
        return "None"
    if hasattr(value, "shape"):
        return f"{type(value).__name__} {tuple(value.shape)}"
    parts = cast("list[Any]", value) if isinstance(value, (list, tuple)) else []
    tensors = bool(parts) and all(isinstance(part, Tensor) for part in parts)
    return f"a {type(value).__name__}" + (f" of {len(parts)} tensors" if tensors else "")


# Several heads: what belongs to each. All that comes after sees one tensor with a row a sample.


def parts_by_name(value: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """The parts of these names: entries of a mapping, attributes of an object, or those of a tuple or a list of as many
    parts, in order. None where there are others.
    """
    if isinstance(value, Tensor) or value is None:
        return None
    if isinstance(value, Mapping):
        found = [cast(Mapping[Any, Any], value).get(name, _MISSING) for name in names]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and not _has_names(value, names):
        found = (
            list(cast(Sequence[Any], value)) if len(cast(Sequence[Any], value)) == len(names) else [_MISSING]
        )
    else:
        found = [getattr(value, name, _MISSING) for name in names]
    return None if any(part is _MISSING for part in found) else dict(zip(names, found, strict=True))


def _has_names(value: Any, names: Sequence[str]) -> bool:
    """Whether a tuple has all of these attributes, as a named one."""
    return all(hasattr(value, name) for name in names)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Tensors ``(samples, ...)`` as one, ``(samples, numbers)``."""
    return torch.cat([part.flatten(1) if part.ndim > 1 else part.unsqueeze(1) for part in parts], 1)


def joined_targets(parts: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Targets of all heads as one tensor, ``(samples, heads + numbers)``: at first how many numbers each head has.

    Labels and values alike are float64, or float32 where a device has no float64.

    Args:
        parts: by head, ``(samples, ...)``.
        device: to which they go afterwards, if they do.
    """
    places = {part.device for part in parts} | (set() if device is None else {device})
    dtype = torch.float64 if all(map(has_double, places)) else torch.float32
    rows = side_by_side([part.to(dtype) for part in parts])
    widths = rows.new_tensor([part[0].numel() if len(part) else 0 for part in parts])
    return torch.cat([widths.expand(len(rows), -1), rows], 1)
