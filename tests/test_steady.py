"""Weights that change while a call reads them are noticed, also where the old numbers are back at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import short
from torch import Tensor, nn
from written_weights import WRITES, Writing, in_place

import posthoc_uq as uq
from posthoc_uq.methods import METHODS

X = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3
BATCHES = list(zip(X.split(8), Y.split(8), strict=True))


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    for _ in range(3):
        net(X)
    return net.eval()


def _fit(model: nn.Module, loader: Any = BATCHES, method: str = "diag", **options: Any) -> uq.Posterior:
    if not METHODS[method].trains:
        options["prior_precision"] = 1.0
    return uq.fit(model, loader, short(method), progress=False, **options)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_notices_weights_that_are_given_back(method: str) -> None:
    model = _network()
    with pytest.raises(
        uq.PosteriorMismatchError, match=r"'0\.weight' of the model changed while the fit read it"
    ):
        _fit(model, Writing(model, BATCHES, "in place"), method)


@pytest.mark.parametrize("given_back", [False, True])
@pytest.mark.parametrize("write", list(WRITES))
def test_every_way_of_writing_is_noticed(write: str, given_back: bool) -> None:
    model = _network()
    with pytest.raises(uq.PosteriorMismatchError, match=WRITES[write][0].replace(".", r"\.")):
        _fit(model, Writing(model, BATCHES, write, given_back=given_back))


CALLS: dict[str, Callable[[nn.Module, uq.Posterior, Any], Any]] = {
    "tune": lambda m, p, d: uq.tune(p, d, criterion="faithful", progress=False),
    "tune by labels": lambda m, p, d: uq.tune(p, d, head="linearized", progress=False),
    "calibrate": lambda m, p, d: uq.calibrate(p, d, head="linearized", progress=False),
    "leave-one-out": lambda m, p, d: uq.tune(p, d, criterion="leave_one_out", progress=False),
    "update": lambda m, p, d: uq.update(p, d, progress=False),
    "evaluate": lambda m, p, d: uq.evaluate(uq.wrap(m, p), d, progress=False),
    "evaluate the model": lambda m, p, d: uq.evaluate(m, d, progress=False),
    "predict": lambda m, p, d: uq.wrap(m, p).predict(d, progress=False),
    "moments": lambda m, p, d: uq.wrap(m, p, "moments").fit_scale(d, progress=False),
}


@pytest.mark.parametrize("write", ["in place", "through .data"])
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.filterwarnings("ignore:The posterior's prior precision was found")
def test_every_call_notices_it_and_leaves_the_posterior_alone(call: str, write: str) -> None:
    model = _network()
    posterior = _fit(model)
    before = repr((posterior.settings.plain(), posterior.history))
    with pytest.raises(uq.PosteriorMismatchError, match="of the model changed while"):
        CALLS[call](model, posterior, Writing(model, BATCHES, write))
    assert repr((posterior.settings.plain(), posterior.history)) == before


def test_the_evidence_is_of_the_weights_of_the_fit() -> None:
    model = _network()
    posterior = _fit(model)
    in_place(model[0].weight)
    with pytest.raises(uq.PosteriorMismatchError):
        uq.tune(posterior, progress=False)


class Aloud(nn.Module):
    """A model whose passes do something else, too."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for work in DURING:
            work()
        return self.layers(x)


DURING: list[Callable[[], None]] = []


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
@pytest.mark.filterwarnings("ignore:The posterior's prior precision was found")
def test_a_prediction_notices_it(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Aloud(_network())
    weight: Tensor = model.layers[0].weight  # type: ignore[index]
    old = weight.detach().clone()
    predictor = uq.wrap(model, _fit(model), head)
    expected = predictor(X).probs

    def swap() -> None:
        in_place(weight)
        with torch.no_grad():
            weight.copy_(old)

    monkeypatch.setattr("test_steady.DURING", [swap])
    with pytest.raises(uq.PosteriorMismatchError, match="while a prediction was made"):
        predictor(X)
    monkeypatch.undo()
    assert torch.equal(predictor(X).probs, expected)


def test_what_only_reads_is_no_change() -> None:
    model = _network()
    expected = _fit(model).variance()
    ended = threading.Event()

    def others() -> None:  # a thread that predicts, and that sets what no number depends on
        while not ended.is_set():
            with torch.no_grad():
                model(X)
            model.requires_grad_(False).requires_grad_(True)
            model[0].train().eval()

    def loader() -> Iterator[Any]:
        model.share_memory()  # as a loader's workers may do it: other memory, the same numbers
        yield from BATCHES

    thread = threading.Thread(target=others)
    thread.start()
    try:
        found = _fit(model, loader()).variance()
    finally:
        ended.set()
        thread.join()
    assert all(torch.equal(found[name], variance) for name, variance in expected.items())


def test_an_embedding_of_bounded_norm_writes_to_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3)).eval()
    ids = torch.arange(64).reshape(32, 2) % 9
    model(ids)
    loader = list(zip(ids.split(8), Y.split(8), strict=True))
    posterior = _fit(model, loader, layers=["2"])
    assert len(uq.wrap(model, posterior).predict(loader, progress=False)) == 32


def test_a_checkpoint_holds_no_sums_of_two_sets_of_weights(tmp_path: Path) -> None:
    model, path = _network(), tmp_path / "fit.checkpoint"
    expected = uq.fit(model, BATCHES, uq.Diagonal(), prior_precision=1.0, progress=False).variance()
    method = uq.Diagonal(checkpoint_every=1)
    with pytest.raises(uq.PosteriorMismatchError):
        uq.fit(
            model,
            Writing(model, BATCHES, "in place"),
            method,
            prior_precision=1.0,
            checkpoint=path,
            progress=False,
        )
    model.load_state_dict(_network().state_dict())
    found = uq.fit(model, BATCHES, method, prior_precision=1.0, checkpoint=path, progress=False).variance()
    assert all(torch.equal(found[name], variance) for name, variance in expected.items())
