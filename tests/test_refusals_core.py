"""What the core refuses: data that are no loader, batches and models that do not fit, and what a model returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from networks import short
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import posthoc_uq as uq
from posthoc_uq import PosteriorMismatchError, UnsupportedLayerError


def changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    return model


class Returns(nn.Module):
    """A network that returns its outputs in a form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.net, self.form = net(), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.net(x))


def with_generator() -> nn.Module:
    model: Any = net()
    model.generator = (i for i in range(3))
    return model


X, Y = inputs(), labels()
POSTERIOR = fit()
PREDICTOR = cast(Any, uq.wrap(net(), POSTERIOR))
FRAME = pd.DataFrame({"size": [1.0] * 12, "colour": ["red"] * 12})
WORDS = pd.Series(["red", "blue"] * 6)
MAPPING = Returns(lambda outputs: OrderedDict(out=outputs, aux=-outputs))
FIRST = r"cannot be run on the first batch of the loader, {} \({}\).*{}"
LATER = r"cannot be run on batch 1 of the loader, float32 \(12, 3\).*cannot be multiplied"
TRAINING: dict[str, Any] = {"method": "function_space", "epochs": 1}
OTHERS = [(X[:, :3], Y)]
OF_ANOTHER: dict[str, Callable[[], Any]] = {
    "call": lambda: PREDICTOR(X[:, :3]),
    "predict": lambda: PREDICTOR.predict(OTHERS, progress=False),
    "novelty": lambda: PREDICTOR.novelty(X[:, :3]),
    "calibrate": lambda: uq.calibrate(POSTERIOR, OTHERS, share=None, progress=False),
    "tune": lambda: uq.tune(POSTERIOR, OTHERS, progress=False),
    "faithful": lambda: uq.tune(POSTERIOR, OTHERS, criterion="faithful", progress=False),
    "leave-one-out": lambda: uq.tune(POSTERIOR, OTHERS, criterion="leave_one_out", progress=False),
    "update": lambda: uq.update(POSTERIOR, OTHERS, progress=False),
    "evaluate": lambda: uq.evaluate({"posterior": PREDICTOR}, OTHERS, progress=False),
    "evaluate a model": lambda: uq.evaluate({"model": net()}, OTHERS, progress=False),
    "export": lambda: uq.export(PREDICTOR, X[:, :3], path="no.pt2"),
}


def later(targets: Tensor = Y, **options: Any) -> None:
    """A fit whose second batch lacks a column."""
    fit(net(), [(X, targets), (X[:, :3], targets)], **options)


def with_output(output: Any, model: nn.Module = MAPPING) -> None:
    fit(model, output=output)


def of_functions() -> None:
    """Message passing through a whole network, which has a function after its last layer."""
    method, options = short("message_passing", layers="all"), {"likelihood": "regression", "progress": False}
    uq.fit(net(), [(X, X[:, :3])], method, output=lambda z: z * 2, **options)


ROWS = {
    # loaders
    "a tensor": Row(lambda: fit(loader=X), "DataLoader"),
    "an array": Row(lambda: fit(loader=X.numpy()), "DataLoader"),
    "a dataset": Row(lambda: fit(loader=TensorDataset(X, Y)), "DataLoader"),
    "a batch": Row(lambda: fit(loader={"x": X}), "DataLoader"),
    "a pair of tensors": Row(lambda: fit(loader=(X, Y)), "DataLoader"),
    "a number": Row(lambda: fit(loader=3), "iterable"),
    "a list of two tensors": Row(lambda: fit(loader=[X, Y]), "^The loader is one pair"),
    "a pair of arrays": Row(
        lambda: fit(loader=(X.numpy(), Y.numpy())), "^The loader is one pair of inputs and targets"),
    "a frame and a series": Row(
        lambda: fit(loader=(pd.DataFrame(X.numpy()), pd.Series(Y.numpy()))), "^The loader is one pair"),
    # batches
    "three parts": Row(lambda: fit(loader=[(X, X, X, Y)]), r"4 parts, and the model takes \['input'\].*batch\[3\]"),
    "a text as a batch": Row(lambda: fit(loader=["text"]), "batch_to_inputs"),
    "a number as a batch": Row(lambda: fit(loader=[3]), "batch_to_inputs"),
    "an object as a batch": Row(lambda: fit(loader=[SimpleNamespace(x=X)]), "batch_to_inputs"),
    "inputs and labels twice": Row(lambda: fit(loader=[(X, Y, Y)]), "batch_to_inputs"),
    "nothing as a batch": Row(lambda: fit(loader=[()]), "batch_to_inputs"),
    "other names": Row(
        lambda: fit(loader=[{"pixels": X, "index": Y}]), r"pixels=float32 \(12, 4\), index=.*batch_to_inputs="),
    "a frame with text": Row(lambda: fit(loader=[(FRAME, Y)]), r"DataFrame of object \(12, 2\).*astype\('float32'\)"),
    "targets in a list": Row(lambda: fit(loader=[(X, ["red"] * 12)]), "targets are a list .*batch_to_targets"),
    "a series of text": Row(
        lambda: fit(loader=[(X, WORDS)]), r"targets are text.*astype\('category'\)\.cat\.codes"),
    "an array of text": Row(lambda: fit(loader=[(X, WORDS.to_numpy())]), "targets are text"),
    "categories": Row(lambda: fit(loader=[(X, WORDS.astype("category"))]), "targets are text"),
    "images in a list": Row(lambda: fit(loader=[([X, X], Y)]), "list of 2 tensors.*torch.stack"),
    "boxes": Row(lambda: fit(loader=[([X, X], [{"b": X}] * 2)]), "list of dict.*detector"),
    "targets too large": Row(
        lambda: fit(loader=[(X[:1], torch.tensor(np.array([2**63], dtype=np.uint64)))]), "too large for int64"),
    "too few columns": Row(
        lambda: fit(loader=[(X[:, :3], Y)]),
        FIRST.format("float32", "12, 3", "cannot be multiplied"),
        cause=RuntimeError),
    "float64": Row(
        lambda: fit(loader=[(X.double(), Y)]),
        FIRST.format("float64", "12, 4", r"pass x\.to\(torch\.float32\)"),
        cause=RuntimeError),
    "pictures of bytes": Row(
        lambda: fit(loader=[(X.to(torch.uint8), Y)]),
        FIRST.format("uint8", "12, 4", r"x\.float\(\) / 255"),
        cause=RuntimeError),
    "outputs of bytes": Row(
        lambda: uq.Categorical().from_draws(X.to(torch.uint8)[None]), r"got torch.uint8: .*x\.float\(\) / 255"),
    **{
        f"data of another model, {name}": Row(
            call, "The model cannot be run on .*Model and (data|inputs) do not belong together", cause=RuntimeError)
        for name, call in OF_ANOTHER.items()
    },
    "integers": Row(
        lambda: fit(loader=[(X.long(), Y)]),
        FIRST.format("int64", "12, 4", "unless the model takes integers"),
        cause=RuntimeError),
    "a later batch, curvature": Row(lambda: later(), LATER, cause=RuntimeError),
    "a later batch, noise": Row(lambda: later(X[:, :3], likelihood="regression"), LATER, cause=RuntimeError),
    "a later batch, training": Row(
        lambda: later(context=lambda n, _: torch.zeros(n, 4), **TRAINING), LATER, cause=RuntimeError),
    "a later batch, its own context": Row(lambda: later(context="batch", **TRAINING), LATER, cause=RuntimeError),
    # models
    "a traced model": Row(lambda: fit(torch.jit.trace(net(), X)), "TorchScript"),
    "a lazy layer": Row(lambda: fit(nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))), "'0.weight' is not initialised"),
    "a generator": Row(lambda: fit(with_generator()), "cannot be copied.*generator"),
    "another shape": Row(lambda: uq.wrap(nn.Sequential(nn.Linear(4, 6)), POSTERIOR), "shape", PosteriorMismatchError),
    "a missing layer": Row(lambda: uq.wrap(nn.Sequential(net()[0]), POSTERIOR), "'2.weight'", PosteriorMismatchError),
    "other values": Row(lambda: uq.wrap(changed(net()), POSTERIOR), "values .*'2.weight'", PosteriorMismatchError),
    "other precision": Row(lambda: uq.wrap(net().half(), POSTERIOR), "the model as it was", PosteriorMismatchError),
    # what a model returns
    "no part of the name": Row(
        lambda: with_output("c"), "output='c' names no part .*OrderedDict of 'out'.*'aux'.*name one of these"),
    "no part of the number": Row(lambda: with_output(5), "output=5 names no part"),
    "a part of a tensor": Row(lambda: with_output("c", net()), "names no part.*leave output out"),
    "a part of the number of a tensor": Row(lambda: with_output(5, net()), "names no part.*leave output out"),
    "output=True": Row(lambda: with_output(True), "output must be a key.*not True"),
    "output=1.5": Row(lambda: with_output(1.5), "output must be a key"),
    "a function of nothing": Row(lambda: with_output(lambda returned: returned), "lambda> gives a OrderedDict"),
    "a function of decisions": Row(
        lambda: with_output(lambda returned: returned["out"].argmax(1)), r"gives a torch\.int64 tensor"),
    "a function after messages": Row(of_functions, "cannot pass output=", UnsupportedLayerError),
    "two tensors": Row(
        lambda: fit(Returns(lambda outputs: (outputs, outputs))),
        r"tuple of 0: float32 \(\d+, 3\), 1: float32 \(\d+, 3\), .*output=0 or"),
    "boxes returned": Row(
        lambda: fit(Returns(lambda outputs: [{"boxes": outputs, "scores": outputs}])),
        "list of 0: a dict; .*detector.*box head.*proposals"),
    "a part of other samples": Row(
        lambda: fit(Returns(lambda outputs: {"a": outputs[:1]})),
        r"returned dict of 'a': float32 \(1, 3\); one part must .* 2 samples"),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace:FutureWarning", "ignore:.*torch.jit.trace:DeprecationWarning"
)
@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
