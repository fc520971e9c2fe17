"""The state of any torch optimiser as plain tensors and plain values, and back: no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posthoc_uq.errors import PosthocUQError

Tensors = dict[str, dict[str, Tensor]]

_WHOLE = {
    str(kind): kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
_FLOATS = {str(kind): kind for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
_PLAIN = (bool, int, float, str, type(None))


def optimiser_state(optimiser: Optimizer) -> tuple[dict[str, Any], Tensors]:
    """What JSON can hold of an optimiser's state, and its tensors by the number of the parameter.

    Raises:
        PosthocUQError: the optimiser keeps something else than numbers and tensors for a parameter.
    """
    state = optimiser.state_dict()
    plain: dict[str, Any] = {}
    tensors: Tensors = {}
    for index, own in state["state"].items():
        entries: dict[str, Any] = {}
        for name, value in own.items():
            if isinstance(value, Tensor) and str(value.dtype) in _FLOATS:
                wide = value.double() if value.dtype == torch.float64 else value.float()
                tensors.setdefault(str(index), {})[name] = wide.detach()
                entries[name] = {"dtype": str(value.dtype)}
            elif isinstance(value, Tensor) and str(value.dtype) in _WHOLE:
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
        PosthocUQError: it is of another kind.
    """
    if plain["kind"] != type(optimiser).__name__:
        raise PosthocUQError(
            f"The checkpoint was made with the optimiser {plain['kind']}, and this is {type(optimiser).__name__}; "
            f"delete the checkpoint to begin anew."
        )
    state = optimiser.state_dict()
    state["state"] = {
        int(index): {name: _value(entry, tensors.get(index, {}).get(name)) for name, entry in own.items()}
        for index, own in plain["state"].items()
    }
    for group, kept in zip(state["param_groups"], plain["groups"], strict=True):
        group.update(kept)
    optimiser.load_state_dict(state)
    # torch casts what it keeps for a parameter to that parameter's precision, which not all of it has.
    values = (t for group in optimiser.param_groups for t in group["params"])
    for index, value in enumerate(values):
        for name, found in state["state"].get(index, {}).items():
            own = optimiser.state[value][name]
            if isinstance(own, Tensor) and own.dtype != found.dtype:
                optimiser.state[value][name] = found.to(own.device)


def _value(entry: Mapping[str, Any], tensor: Tensor | None) -> Any:
    if "value" in entry:
        return entry["value"]
    if "numbers" in entry:
        return torch.tensor(entry["numbers"], dtype=_WHOLE[entry["dtype"]], device="cpu")
    assert tensor is not None
    return tensor.to(_FLOATS[entry["dtype"]])
