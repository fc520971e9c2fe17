"""The default optimiser and its schedule; the state of any torch optimiser as plain tensors and values, no pickle."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.randomness import isolated_random_state

Tensors = dict[str, dict[str, Tensor]]

_INTEGERS = {
    str(kind): kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
_FLOATS = {str(kind): kind for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
_PLAIN = (bool, int, float, str, type(None))


def cosine(progress: float, floor: float = 0.05) -> float:
    """From 1 down to `floor` as `progress` goes from 0 to 1: the default schedule of learning rates."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def adam(groups: list[dict[str, Any]]) -> Optimizer:
    """The default optimiser: Adam with betas (0.9, 0.99), fused where the device has that."""
    device = groups[0]["params"][0].device.type
    return torch.optim.Adam(
        groups, betas=(0.9, 0.99), eps=1e-8, fused=True if device in ("cpu", "cuda") else None
    )


def optimiser_state(optimiser: Optimizer) -> tuple[dict[str, Any], Tensors]:
    """The part of an optimiser's state that JSON can hold, and its tensors by the number of their parameter.

    Raises:
        PosthocUQError: the optimiser keeps something other than numbers and tensors for a parameter.
    """
    state = optimiser.state_dict()
    plain: dict[str, Any] = {}
    tensors: Tensors = {}
    for index, of_parameter in state["state"].items():
        entries: dict[str, Any] = {}
        for name, value in of_parameter.items():
            if isinstance(value, Tensor) and str(value.dtype) in _FLOATS:
                wide = value.double() if value.dtype == torch.float64 else value.float()
                tensors.setdefault(str(index), {})[name] = wide.detach()
                entries[name] = {"dtype": str(value.dtype)}
            elif isinstance(value, Tensor) and str(value.dtype) in _INTEGERS:
                entries[name] = {"dtype": str(value.dtype), "numbers": value.tolist()}
            elif isinstance(value, _PLAIN):
                entries[name] = {"value": value}
            else:
                raise PosthocUQError(
                    f"{type(optimiser).__name__} keeps a {type(value).__name__} as '{name}', which no checkpoint "
                    f"holds; use another optimiser, or leave checkpoint out."
                )
        plain[str(index)] = entries
    groups = [
        {name: value for name, value in group.items() if isinstance(value, _PLAIN) and name != "params"}
        for group in state["param_groups"]
    ]
    return {"kind": type(optimiser).__name__, "state": plain, "groups": groups}, tensors


def restore_optimiser(optimiser: Optimizer, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Give an optimiser over the same parameters the state that `optimiser_state` took.

    Raises:
        PosthocUQError: the state is that of another kind of optimiser.
        CorruptPosteriorError: an optimiser of this kind over these parameters could not have the state.
    """
    if plain["kind"] != type(optimiser).__name__:
        raise PosthocUQError(
            f"The checkpoint was made with the optimiser {plain['kind']}, and this is {type(optimiser).__name__}; "
            f"delete the checkpoint to begin anew."
        )
    values = [t for group in optimiser.param_groups for t in group["params"]]
    described = {(index, name) for index, entries in plain["state"].items() for name in entries}
    stray = {(index, name) for index, entries in tensors.items() for name in entries} - described
    if stray or not plain["state"].keys() <= {str(index) for index in range(len(values))}:
        raise CorruptPosteriorError("its optimiser has a state for parameters that are not trained")
    state, likes = optimiser.state_dict(), _after_a_step(optimiser)
    for index, entries in plain["state"].items():
        known = likes.get(int(index), {})
        if entries and not known.keys() <= entries.keys():
            raise CorruptPosteriorError("its optimiser lacks a part of its state")
        state["state"][int(index)] = {
            name: _value(name, entry, tensors.get(index, {}).get(name), known.get(name))
            for name, entry in entries.items()
        }
    if len(state["param_groups"]) != len(plain["groups"]):
        raise CorruptPosteriorError("its optimiser has another number of parameter groups")
    for group, saved in zip(state["param_groups"], plain["groups"], strict=True):
        _check_group(group, saved)
        group.update(saved)
    optimiser.load_state_dict(state)
    # torch casts the state of a parameter to the parameter's precision, but not all of the state has that precision.
    for index, value in enumerate(values):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimiser.state[value][name]
            if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimiser.state[value][name] = saved.to(loaded.device)


def _check_group(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse saved settings that differ in more than numbers, which an optimiser may change, the rate among them."""
    for name, value in saved.items():
        current = group.get(name)
        numbers = type(current) in (int, float) and type(value) in (int, float) and name != "initial_lr"
        same = type(value) is type(current) and value == current
        if name not in group or not (same or (numbers and isfinite(value))):
            raise CorruptPosteriorError(f"its optimiser was set up in another way: '{name}' is {value!r:.60}")


def _after_a_step(optimiser: Optimizer) -> dict[int, dict[str, Any]]:
    """The state that an optimiser keeps for each parameter, by name, from a copy after a step with zero gradients."""
    with isolated_random_state():
        twin = copy.deepcopy(optimiser)
        for group in twin.param_groups:
            for tensor in group["params"]:
                tensor.grad = torch.zeros_like(tensor)
        twin.step()
        return twin.state_dict()["state"]


def _value(name: str, entry: Mapping[str, Any], tensor: Tensor | None, like: Any) -> Any:
    """One value of the state; `like` is the optimiser's own value of that name after a step, None if it has none."""
    restored, kind = entry.get("value"), entry.get("dtype")
    if "numbers" in entry and kind in _INTEGERS:
        with suppress(ValueError, TypeError, RuntimeError, OverflowError):
            restored = torch.tensor(entry["numbers"], dtype=_INTEGERS[kind], device="cpu")
    elif tensor is not None and kind in _FLOATS:
        restored = tensor.to(_FLOATS[kind])
    fits = isinstance(restored, Tensor) != ("value" in entry)
    if isinstance(like, Tensor):
        fits = (
            fits
            and isinstance(restored, Tensor)
            and (restored.shape, restored.dtype) == (like.shape, like.dtype)
        )
    elif like is not None:
        fits = fits and type(restored) is type(like)
    if not fits:
        raise CorruptPosteriorError(f"its optimiser's '{name}' is none that this optimiser keeps")
    return restored
