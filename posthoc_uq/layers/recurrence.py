"""Recurrent layers of torch opened up: their steps as calls of `linear`, which can be watched and replaced.

Packed sequences are put back into rows of samples first. Steps after a sequence's end change nothing, and no gradient
reaches them. Packing and its inverse are opened, too, since torch's own functions have no forward derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.model import places_of_samples

State = tuple[Tensor, ...]
CellStep = Callable[[Tensor, State, Sequence[Tensor | None]], State]
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


def _plain(activation: Callable[[Tensor], Tensor]) -> CellStep:
    def step(mapped: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        (hidden,), (matrix, bias, _) = state, weights
        assert matrix is not None
        return (activation(mapped + F.linear(hidden, matrix, bias)),)

    return step


_STEPS: dict[str, CellStep] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _plain(torch.tanh),
    "rnn_relu": _plain(torch.relu),
}
_LAYERS: dict[Any, str] = {getattr(torch, name): name for name in _STEPS}
_CELLS: dict[Any, str] = {getattr(torch, f"{name}_cell"): name for name in _STEPS}


def decomposed_recurrence(func: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The same as a call of a recurrent layer or cell, from calls of `linear`, or of one that packs sequences or undoes
    it; None for other functions, for unbatched
    sequences, in which no dimension is that of the samples, and for packed ones whose samples are not known.
    """
    if kwargs or func not in RECURRENT:
        return None
    if func in _PACKING:
        return lambda: _PACKING[func](*args)
    if func in _CELLS:
        return (lambda: _cell(_CELLS[func], *args)) if args[0].ndim == 2 else None
    if isinstance(args[3], (tuple, list)):
        places = places_of_samples(args[1])
        return None if places is None else lambda: _packed(_LAYERS[func], places, *args)
    return (lambda: _sequence(_LAYERS[func], *args)) if args[0].ndim == 3 else None


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


def _pack(inputs: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`torch._pack_padded_sequence`: the rows of all samples, sorted by falling length, step by step; and how many
    samples each step has.
    """
    x = inputs if batch_first else inputs.transpose(0, 1)
    runs = torch.arange(int(lengths[0]), device="cpu").unsqueeze(1) < lengths.cpu()  # (steps, samples)
    steps, samples = runs.nonzero(as_tuple=True)
    rows = (samples * x.shape[1] + steps).to(x.device)
    return x.flatten(0, 1).index_select(0, rows), runs.sum(1)


def _pad(data: Tensor, sizes: Tensor, batch_first: bool, value: float, length: int) -> tuple[Tensor, Tensor]:
    """`torch._pad_packed_sequence`: the inverse of `_pack`, ``(samples, steps, ...)`` with a value after the ends, and
    the lengths.
    """
    rows, runs = _rows_of(torch.arange(int(sizes[0]), device="cpu"), sizes, max(length, len(sizes)))
    padded = _unpacked(data, rows, runs, value)
    return padded if batch_first else padded.transpose(0, 1), runs.sum(1)


def _rows_of(places: Tensor, sizes: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The row of packed sequences that is a sample's step, and whether there is one, ``(samples, steps)`` each.

    Args:
        places: of every sample among those sorted by their lengths, ``(samples,)``.
        sizes: how many samples have not ended, by step.
        steps: of the longest sample, or more.
    """
    sizes = F.pad(sizes, (0, steps - len(sizes)))
    runs = places.unsqueeze(1) < sizes
    return torch.where(runs, (sizes.cumsum(0) - sizes) + places.unsqueeze(1), 0), runs


def _unpacked(data: Tensor, rows: Tensor, runs: Tensor, value: float = 0) -> Tensor:
    found = data.index_select(0, rows.flatten().to(data.device)).unflatten(0, rows.shape)
    ended = runs.logical_not().to(data.device)
    return found.masked_fill(ended.reshape(*ended.shape, *[1] * (data.ndim - 1)), value)


_PACKING: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): run
    for name, run in (("_pack_padded_sequence", _pack), ("_pad_packed_sequence", _pad))
}
RECURRENT = frozenset({*_LAYERS, *_CELLS, *_PACKING})
"""The functions that `decomposed_recurrence` opens up."""


def _packed(
    name: str,
    places: Tensor,
    data: Tensor,
    sizes: Tensor,
    initial: Any,
    weights: Sequence[Tensor],
    *options: Any,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like on packed sequences, whose samples have these `places` among those sorted by length;
    options as in `_sequence`, from biases to both directions.
    """
    rows, runs = _rows_of(places.cpu(), sizes, len(sizes))
    back = torch.empty(len(data), dtype=torch.int64, device="cpu")
    back[rows[runs]] = runs.flatten().nonzero().flatten()
    back, places, order = (index.to(data.device) for index in (back, places, places.argsort()))
    states = tuple(initial) if name == "lstm" else (initial,)
    states = tuple(state.index_select(1, places) for state in states)
    states = states if name == "lstm" else states[0]
    padded = _unpacked(data, rows, runs)
    own = {"batch_first": True, "runs": runs.to(data.device)}
    outputs, *last = _sequence(name, padded, states, weights, *options, **own)
    return (outputs.flatten(0, 1).index_select(0, back), *(state.index_select(1, order) for state in last))


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
    runs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like: outputs, and the last states of all layers and directions. Where sequences end
    earlier, `runs` says at which steps a sample's goes on, ``(samples, steps)``.
    """
    ended = None if runs is None else runs.logical_not().unsqueeze(-1).unbind(1)
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
            for step in range(len(steps)) if direction == 0 else reversed(range(len(steps))):
                after = _STEPS[name](steps[step], state, recurrent)
                if ended is not None:
                    pairs = zip(state, after, strict=True)
                    after = tuple(torch.where(ended[step], old, new) for old, new in pairs)
                state = after
                outputs.append(state[0])
            found.append(torch.stack(outputs if direction == 0 else outputs[::-1], 1))
            last.append(state)
        x = found[0] if directions == 1 else torch.cat(found, 2)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, True)
    whole = x if batch_first else x.transpose(0, 1)
    return (whole, *(torch.stack(parts) for parts in zip(*last, strict=True)))
