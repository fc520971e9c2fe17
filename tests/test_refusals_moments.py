"""What moments refuse to be carried through: wherever a variance would be lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import Row, hold
from torch import Tensor

from posthoc_uq.moments import ConditionalInverseCDF, InverseCDF, MomentTensor, Pass, Rules

PLAIN = torch.ones(2, 3).double()


def through(function: Callable[[Tensor], Any], **rules: Any) -> Callable[[], Any]:
    """A call of the function with two rows of three uncertain activations."""

    def call() -> Any:
        with Pass(Rules(**rules), {}):
            return function(MomentTensor(PLAIN.clone(), PLAIN.clone()))

    return call


def view_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :2].relu_()
    return y


def view_of_a_view(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :2].t().add_(5.0)
    return y


def second_view(x: Tensor) -> Tensor:
    y = x * 1.0
    first = y.view(-1)
    del first
    second = y.view(-1)
    y.add_(5.0)
    return second


def view_of_what_was_written(x: Tensor) -> Tensor:
    total = torch.zeros(4, 3).double()
    row = total[0]
    total.index_add_(0, torch.tensor([0, 2]), x)
    return row * 1.0


NO_RULE = r"No rule carries .* through torch\.{}; pass unknown='unscented' .*head='sampling'"
VIEW = "in place changes a view of a tensor that is still in use; make it out of place"
INTO = r"is written into, or into a plain tensor; build it with torch\.cat or torch\.where"
INTO_A_VIEW = "is written in place into a view of a plain tensor; make the operation out of place"
FALLBACK: dict[str, Any] = {"unknown": "unscented"}
ROWS = {
    "sort": Row(through(torch.sort), NO_RULE.format("sort")),
    "item": Row(through(lambda x: x.sum().item()), NO_RULE.format(r"Tensor\.item")),
    "bool": Row(through(lambda x: bool(x.sum())), NO_RULE.format(r"Tensor\.__bool__")),
    "numpy": Row(through(lambda x: x.numpy()), NO_RULE.format(r"Tensor\.numpy")),
    "write": Row(through(lambda x: x.__setitem__(0, 0.0)), INTO),
    "write into plain": Row(through(lambda x: PLAIN.clone().__setitem__(0, x[0])), INTO),
    "add into a view of plain": Row(through(lambda x: PLAIN.clone()[:].add_(x)), INTO_A_VIEW),
    "integers": Row(through(lambda x: x.to(torch.int64)), r"converted to torch\.int64, which has no variance"),
    "batch statistics": Row(
        through(lambda x: F.batch_norm(x, None, None, training=True)), "mixes the samples of a batch"),
    "dropout": Row(through(lambda x: F.dropout(x, 0.5, training=True)), r"call it with training=self\.training"),
    "view in place": Row(through(view_in_place), VIEW),
    "view of a view in place": Row(through(view_of_a_view), VIEW),
    "second view": Row(through(second_view), VIEW),
    "view of what was written": Row(
        through(view_of_what_was_written), "view of a plain tensor is used after"),
    "out": Row(through(lambda x: torch.add(x, 1.0, out=PLAIN.clone())), "torch.add writes into out=; use its result"),
    "an activation as a number": Row(
        through(lambda x: torch.full_like(x, x[0, 0])), r"torch\.full_like takes an activation as a certain number"),
    "fill plain": Row(
        through(lambda x: PLAIN.clone().masked_fill_(x > 0, x[0, 0])), r"filled with an activation; use torch\.where"),
    "index": Row(through(lambda x: PLAIN[x]), "indexed by an activation; index by something that is certain"),
    "computed weight": Row(
        through(lambda x: F.linear(torch.ones(1, 3).double(), x)), r"weight is itself uncertain.*layers=\.\.\."),
    "losses": Row(
        through(lambda x: F.cross_entropy(x, torch.tensor([0, 2]), reduction="none")), "cross_entropy"),
    "item, fallback": Row(through(lambda x: x.sum().item(), **FALLBACK), "makes a float of an uncertain activation"),
    "top k, fallback": Row(through(lambda x: torch.topk(x, 2), **FALLBACK), r"makes torch\.int64 of an uncertain"),
    "add into a view of plain, fallback": Row(
        through(lambda x: torch.zeros(3, 3).double()[:].index_add_(0, torch.tensor([0, 2]), x), **FALLBACK),
        INTO_A_VIEW),
    "in place, fallback": Row(
        through(lambda x: x.round_(), **FALLBACK), "works in place and has no rule.*returns a new tensor"),
    "after the pass": Row(lambda: torch.relu(MomentTensor(PLAIN, PLAIN)), "outside the pass"),
    "no deviation": Row(lambda: InverseCDF(deviation=0.0), "deviation must be"),
    "a deviation twice": Row(lambda: InverseCDF(1.0, quantile=torch.logit), "leave them out"),
    "a number as prior": Row(lambda: ConditionalInverseCDF(3.0), "prior must be a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
