"""Batches of every accepted form, taken apart."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm.auto import tqdm

import posthoc_uq as uq
from posthoc_uq.core.batches import Bar, Batch, BatchReader, batches, check_loader, check_reusable
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.progress import _bars

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
CPU = torch.device("cpu")


def _same(
    batch: Batch, args: tuple[Any, ...], targets: Tensor | None, kwargs: dict[str, Any] | None = None
) -> None:
    assert len(batch.args) == len(args) and batch.kwargs.keys() == (kwargs or {}).keys()
    assert all(a is b or torch.equal(a, b) for a, b in zip(batch.args, args, strict=True))
    assert all(
        batch.kwargs[name] is value or torch.equal(batch.kwargs[name], value)
        for name, value in (kwargs or {}).items()
    )
    assert (batch.targets is None) == (targets is None)
    assert targets is None or torch.equal(batch.targets, targets)


def test_forms_that_need_no_help() -> None:
    reader = BatchReader(CPU)
    _same(reader.read(X), (X,), None)
    _same(reader.read((X, Y)), (X,), Y)
    _same(reader.read([X, Y]), (X,), Y)
    _same(reader.read([X]), (X,), None)
    _same(reader.read((X, [0, 1, 2, 3, 4, 5])), (X,), Y)
    _same(reader.read(((X, Y), Y)), (X, Y), Y)
    _same(reader.read(({"a": X, "n": 3}, Y)), (), Y, {"a": X, "n": 3})


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_mappings_hold_their_targets_under_a_usual_name(name: str) -> None:
    given = {"a": X, name: Y, "flag": True}
    _same(BatchReader(CPU).read(given), (), Y, {"a": X, "flag": True})
    assert set(given) == {"a", name, "flag"}
    _same(BatchReader(CPU).read({"a": X}), (), None, {"a": X})


def test_mappings_whose_names_are_not_the_models() -> None:
    def read(batch: dict[str, Any], *names: str) -> Batch:
        return BatchReader(CPU, names=names).read(batch)

    paths = ["a", "b"]
    _same(read({"image": X, "label": Y}, "x"), (X,), Y)
    _same(read({"image": X}, "x", "mask"), (X,), None)
    _same(read({"image": X, "label": Y, "path": paths}, "x"), (X,), Y)
    _same(read({"x": X, "label": Y, "path": paths}, "x"), (), Y, {"x": X})
    _same(read({"x": X, "mask": X, "y": Y}, "x", "mask"), (), Y, {"x": X, "mask": X})
    _same(read({"image": X, "index": Y}, "x"), (), None, {"image": X, "index": Y})
    _same(read({"x": X, "index": Y}, "x"), (), None, {"x": X, "index": Y})
    assert BatchReader.of(nn.Linear(2, 3)).names == ("input",)


def test_functions_take_the_rest_apart() -> None:
    three = (X, "path", Y)
    both = BatchReader(CPU, lambda b: b[0], lambda b: b[2])
    _same(both.read(three), (X,), Y)
    _same(BatchReader(CPU, lambda b: (b[0], b[2])).read(three), (X, Y), None)
    _same(BatchReader(CPU, lambda b: {"a": b[0]}).read(three), (), None, {"a": X})
    _same(BatchReader(CPU, lambda b: b[0] + 1).read((X, Y)), (X + 1,), Y)  # a pair still has its targets
    _same(BatchReader(CPU, None, lambda b: b[1] * 2).read((X, Y)), (X,), 2 * Y)
    _same(BatchReader(CPU, lambda b: b.x, lambda b: b.y).read(SimpleNamespace(x=X, y=Y)), (X,), Y)


def test_forms_that_are_refused() -> None:
    for batch in ((X, Y, Y), "text", 3, SimpleNamespace(x=X), ()):
        with pytest.raises(PosthocUQError, match="batch_to_inputs"):
            BatchReader(CPU).read(batch)


def test_tensors_go_to_the_device_and_other_values_stay() -> None:
    batch = BatchReader(torch.device("meta")).read(({"a": X, "n": 3}, Y))
    assert batch.kwargs["a"].device.type == "meta" and batch.targets is not None
    assert batch.targets.device.type == "meta" and batch.kwargs["n"] == 3


def test_narrow_cuts_what_counts_the_samples() -> None:
    mask, scalar = torch.ones(4, 4), torch.tensor(2.0)
    part = Batch((X, mask, scalar, "name"), Y, {"a": X}).narrow(1, 2, 6)
    assert torch.equal(part.args[0], X[1:3]) and part.args[1] is mask and part.args[2] is scalar
    assert part.args[3] == "name" and torch.equal(part.kwargs["a"], X[1:3])
    assert part.targets is not None and part.targets.tolist() == [1, 2]
    assert Batch((X,)).narrow(0, 2, 6).targets is None


def test_loaders_of_every_kind() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    dataset = TensorDataset(X, Y)
    for loader in (
        DataLoader(dataset, 4),
        DataLoader(Stream(), 4),
        [(X[:4], Y[:4]), (X[4:], Y[4:])],
        iter(DataLoader(dataset, 4)),
    ):
        read = list(batches(loader, BatchReader(CPU)))
        assert [len(b.args[0]) for b in read] == [4, 2]
        assert torch.equal(torch.cat([b.args[0] for b in read]), X)
        assert torch.equal(torch.cat([b.targets for b in read if b.targets is not None]), Y)
    with pytest.raises(PosthocUQError, match="yields no batch"):
        list(batches([], BatchReader(CPU)))


class Counted:
    """A loader of two batches that counts how often it is started."""

    def __init__(self) -> None:
        self.starts = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        self.starts += 1
        return iter([X, X])


def test_a_sweep_starts_its_loader_once() -> None:
    loader = Counted()
    assert len(list(batches(loader, BatchReader(CPU)))) == 2
    assert loader.starts == 1


@pytest.mark.parametrize(
    ("loader", "total"),
    [
        (Counted(), 8),  # so many batches, all as large as the first
        (DataLoader(TensorDataset(X, Y), batch_size=4), len(X)),  # the last batch is smaller
        ((x for x in [X]), None),
    ],
)
def test_a_sweep_shows_how_many_samples_are_done(
    loader: Any, total: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for visible in (True, False):
        with Bar(loader, "bases, 3 layers", visible) as bar:
            time.sleep(0.15)  # tqdm draws ten times a second at most
            bar.advance(4)
        shown = capsys.readouterr().err
        if not visible:
            assert shown == ""
            continue
        assert "bases, 3 layers" in shown and "samples/s" in shown
        assert (f"4/{total} [" in shown and "<" in shown) if total else "4 samples [" in shown


def test_a_fit_shows_one_bar_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    for progress in (True, False):
        uq.fit(model, [(X.float(), Y)], prior_precision=1.0, progress=progress)
        shown = capsys.readouterr().err
        for expected in ("bases, 2 layers", "eigenvalues and diagonal, 2 layers"):
            assert (expected in shown) == progress


def test_an_iterator_can_be_read_once() -> None:
    for loader in (iter([X]), (x for x in [X]), map(abs, [X])):
        check_reusable(loader, 1)
        with pytest.raises(PosthocUQError, match="2 times"):
            check_reusable(loader, 2)
    state = torch.get_rng_state()
    for loader in ([X], DataLoader(TensorDataset(X, Y), shuffle=True)):
        check_reusable(loader, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_where_the_outputs_are() -> None:
    for output in (
        X,
        {"logits": X, "loss": Y},
        SimpleNamespace(logits=X),
        (X, Y),
        [X],
        {"out": X, "aux": -X},
    ):
        assert output_tensor(output) is X
    for output in (None, "text", Y, {"p": X}, (), ("text", X), SimpleNamespace(p=X)):
        with pytest.raises(PosthocUQError, match=f"returned {type(output).__name__}[; ].*'logits'"):
            output_tensor(output)


def test_a_batch_calls_the_model_with_its_arguments() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, factor: int) -> tuple[Tensor, str]:
            return x * factor, "rest"

    batch = Batch((X,), None, {"factor": 3})
    assert torch.equal(batch.call(Model()), 3 * X)
    assert len(batch.tensors()) == 1


def test_data_that_is_no_loader_is_named() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    for wrong in (x, x.numpy(), (x, y), torch.utils.data.TensorDataset(x, y), {"x": x}):
        with pytest.raises(PosthocUQError, match="DataLoader"):
            check_loader(wrong)
    with pytest.raises(PosthocUQError, match="iterable"):
        check_loader(3)
    for right in (
        [(x, y)],
        x.split(2),
        iter([x]),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y)),
    ):
        check_loader(right)


def test_no_bar_waits_for_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Held:
        """tqdm's own lock, as after the death of a process that held it."""

        def acquire(self, *_: Any) -> None:
            tried.append("acquire")
            raise AssertionError("this would wait for ever")

        __enter__ = acquire

        def __exit__(self, *_: object) -> None: ...

    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    loader = [(X.float(), Y)]
    with tqdm(total=2, disable=False, leave=False) as own:
        monkeypatch.setattr(tqdm, "_lock", Held())
        for progress in (False, True):
            posterior = uq.fit(model, loader, method="utvi", epochs=1, progress=progress)
            uq.fit(model, loader, method="diag", progress=progress)
            uq.tune(posterior, loader, parameters=["scale"], criterion="likelihood", progress=progress)
        monkeypatch.undo()
        assert own.pos == 0 and tqdm.get_lock() is not None
    assert not tried


def test_bars_stand_below_those_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=2, leave=False), Bar([X], "inner", True) as bar:
        bar.advance(6)
    assert "\n" in capsys.readouterr().err.partition("inner")[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only a forked process inherits a lock")
def test_a_forked_process_has_a_lock_of_its_own() -> None:
    with Bar([X], "made", True):
        pass
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _bars().get_lock():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if _bars().get_lock().acquire(blocking=False) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
