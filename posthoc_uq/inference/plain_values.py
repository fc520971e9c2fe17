"""Any value as plain values, which are the same in another process and after a round trip through JSON."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.state import posterior_state
from posthoc_uq.storage.schema import fingerprint

_DEPTH = 16  # levels of nested values that are looked at: a function may close over itself


def as_plain(value: Any, depth: int = _DEPTH) -> Any:
    """Numbers, strings, lists and dictionaries of these.

    A tensor or an array becomes a digest of its numbers; a function its name, its code, the globals it uses and the
    variables it closed over; any other object its class and attributes.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return ["array", str(array.dtype), list(array.shape), sha256(array.tobytes()).hexdigest()]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Tensor):
        return f"Tensor {fingerprint({'': value})}"
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner, depth - 1) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner, depth - 1) for inner in cast(list[Any], value)]
    if callable(value) and not isinstance(value, nn.Module):
        return _callable(value, depth - 1)
    return [_name(type(value)), as_plain(_state_of(value), depth - 1)]


def _state_of(value: Any) -> Any:
    """The values in which an object differs from others of its class, as far as they are known."""
    if isinstance(value, nn.Module):
        return dict(chain(value.named_parameters(), value.named_buffers()))
    if callable(getattr(value, "identity", None)):  # a likelihood, a context
        return value.identity()
    if isinstance(value, Posterior):
        return {"blocks": posterior_state(value)["blocks"], "mean": value.mean, **value.settings.plain()}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: inner for name, inner in getattr(value, "__dict__", {}).items() if _may_differ(inner)}


def _may_differ(value: Any) -> bool:
    """Whether a value may distinguish two objects or functions: no module, and nothing that is running."""
    return not isinstance(value, (types.ModuleType, types.GeneratorType, torch.Generator))


def _callable(value: Callable[..., Any], depth: int) -> Any:
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return as_plain([partial.func, partial.args, partial.keywords], depth)
    if isinstance(value, types.MethodType):
        return as_plain([value.__self__, value.__func__], depth)
    if isinstance(value, types.FunctionType):
        closure = inspect.getclosurevars(value)
        read = {
            name: inner
            for name, inner in closure.globals.items()
            if _may_differ(inner) and not callable(inner)
        }
        variables = [dict(closure.nonlocals), read]
        return [
            _name(value),
            code_digest(value.__code__),
            as_plain([value.__defaults__, value.__kwdefaults__, variables], depth),
        ]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return _name(value)
    return [_name(type(value)), as_plain(_state_of(value), depth)]


def code_digest(code: types.CodeType) -> str:
    """Equal for the same code in another process of the same version of Python."""
    return sha256(_code(code).encode()).hexdigest()


def _code(code: types.CodeType) -> str:
    constants = [_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, constants))


def _constant(value: Any) -> str:
    # a set's order changes from process to process
    return (
        repr(sorted(map(repr, cast("frozenset[Any]", value))))
        if isinstance(value, frozenset)
        else repr(value)
    )


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
