"""Recurrent layers of torch opened up: their steps as calls of `linear`, which can be watched and replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor | None]], State]
"""From ``W_ih x + b_ih`` of one step, the state before it, and ``W_hh, b_hh, W_hr`` to the next state, whose first part
is the output."""


def _lstm(mapped: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """``c' = f c + i g`` and ``h' = o tanh c'``, projected by ``W_hr`` where there is one."""
    hidden, cell = state
    matrix, bias, projection = weights
    assert matrix is not None
    i, f, g, o = (mapped + F.linear(hidden, matrix, bias)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return hidden if projection is None else F.linear(hidden, projection), cell


def _gru(mapped: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """``h' = (1 - z) n + z h`` with ``n = tanh(n_x + r n_h)``."""
    (hidden,), (matrix, bias, _) = state, weights
    assert matrix is not None
    r_x, z_x, n_x = mapped.chunk(3, 1)
    r_h, z_h, n_h = F.linear(hidden, matrix, bias).chunk(3, 1)
    new = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (new + (z_x + z_h).sigmoid() * (hidden - new),)


def _plain(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(mapped: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        (hidden,), (matrix, bias, _) = state, weights
        assert matrix is not None
        return (activation(mapped + F.linear(hidden, matrix, bias)),)

    return step


_STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _plain(torch.tanh),
    "rnn_relu": _plain(torch.relu),
}
_LAYERS: dict[Any, str] = {getattr(torch, name): name for name in _STEPS}
_CELLS: dict[Any, str] = {getattr(torch, f"{name}_cell"): name for name in _STEPS}


def opened_recurrence(func: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The same as a call of a recurrent layer or cell, from calls of `linear`; None for other functions, and for packed
    or unbatched sequences, in which no dimension is that of the samples.
    """
    if kwargs or (func not in _LAYERS and func not in _CELLS):
        return None
    if func in _CELLS:
        return (lambda: _cell(_CELLS[func], *args)) if args[0].ndim == 2 else None
    if isinstance(args[3], (tuple, list)) or args[0].ndim != 3:
        return None
    return lambda: _sequence(_LAYERS[func], *args)


def _cell(
    name: str,
    inputs: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """`torch.lstm_cell` and its like: the next state."""
    before = tuple(state) if name == "lstm" else (state,)
    after = _STEPS[name](F.linear(inputs, w_ih, b_ih), before, (w_hh, b_hh, None))
    return after if name == "lstm" else after[0]


def _sequence(
    name: str,
    inputs: Tensor,
    initial: Any,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like: outputs, and the last states of all layers and directions."""
    states = tuple(initial) if name == "lstm" else (initial,)
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    projected = each > (4 if biases else 2)
    x = inputs if batch_first else inputs.transpose(0, 1)
    last: list[State] = []
    for layer in range(layers):
        found: list[Tensor] = []
        for direction in range(directions):
            place = layer * directions + direction
            own: list[Tensor | None] = list(weights[place * each : (place + 1) * each])
            w_ih, w_hh = own[:2]
            b_ih, b_hh = own[2:4] if biases else (None, None)
            recurrent = (w_hh, b_hh, own[-1] if projected else None)
            assert w_ih is not None
            # all steps at once, a sample first
            steps = F.linear(x, w_ih, b_ih).unbind(1)
            state, outputs = tuple(part[place] for part in states), list[Tensor]()
            for mapped in steps if direction == 0 else reversed(steps):
                state = _STEPS[name](mapped, state, recurrent)
                outputs.append(state[0])
            found.append(torch.stack(outputs if direction == 0 else outputs[::-1], 1))
            last.append(state)
        x = found[0] if directions == 1 else torch.cat(found, 2)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, True)
    whole = x if batch_first else x.transpose(0, 1)
    return (whole, *(torch.stack(parts) for parts in zip(*last, strict=True)))
