"""Loaders of every habit: those that fill the same tensors again, streams that go on where they were, wrong lengths."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.methods.inf import basis_share

SIZE, SAMPLES = 8, 32
Item = tuple[Tensor, ...]


def classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


class Gated(nn.Module):
    """Takes a tensor that all samples share beside the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.net(x * gate)


def data(outputs: int | None = None) -> list[Item]:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(SAMPLES, 5, generator=g), torch.rand(SAMPLES, generator=g, dtype=torch.float64) + 0.5
    y = torch.randint(0, 3, (SAMPLES,), generator=g)
    if outputs is not None:
        y = torch.randn(SAMPLES, outputs, generator=g, dtype=torch.float64)
    return [(x[i : i + SIZE], y[i : i + SIZE], w[i : i + SIZE]) for i in range(0, SAMPLES, SIZE)]


class Refilled:
    """A loader that yields the same tensors again and again, and writes other numbers into them as soon as it is asked
    for more.

    Args:
        items: its batches.
        arrays: fill them through NumPy, which torch does not notice.
    """

    def __init__(self, items: list[Item], arrays: bool) -> None:
        self._items, self._buffers = items, [part.numpy().copy() for part in items[0]]
        self._tensors = tuple(
            torch.from_numpy(buffer) if arrays else torch.empty_like(part)
            for part, buffer in zip(items[0], self._buffers, strict=True)
        )
        self._fill: list[Callable[[Any], Any]] = [
            (lambda value, b=buffer: np.copyto(b, value)) if arrays else tensor.copy_
            for buffer, tensor in zip(self._buffers, self._tensors, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        for item in self._items:
            for fill, part in zip(self._fill, item, strict=True):
                fill(part)
            yield self._tensors
            for fill, part in zip(self._fill, item, strict=True):
                fill(part.roll(1, 0).flip(-1))


TAKEN: dict[str, Any] = {
    "batch_to_inputs": lambda batch: (batch[0],),
    "batch_to_targets": lambda batch: batch[1],
}
WEIGHED = TAKEN | {"batch_to_weights": lambda batch: batch[2]}
FITS: list[tuple[str, dict[str, Any]]] = [
    ("message_passing", TAKEN),
    ("message_passing", TAKEN | {"layers": "all", "epochs": 1}),
    ("inf", WEIGHED | {"rank": 3, "basis_fraction": 0.5}),
    ("kfac", TAKEN | {"layers": "last"}),
    ("utvi", WEIGHED | {"epochs": 1}),
    ("function_space", TAKEN | {"epochs": 1}),
]


def same(first: Any, second: Any) -> None:
    scores = first.scores(), second.scores()
    assert torch.equal(first.probs, second.probs) and scores[0].keys() == scores[1].keys()
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[0])


def fitted(loader: Any, method: str, **options: Any) -> uq.Posterior:
    return uq.fit(classifier(), loader, method, progress=False, **options)


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(("method", "options"), FITS)
def test_a_fit_of_a_loader_that_fills_its_tensors_again(
    method: str, options: dict[str, Any], arrays: bool
) -> None:
    """It is that of tensors of their own for every batch, to the last bit."""
    items, x = data(), data()[0][0]
    own, refilled = (fitted(each, method, **options) for each in (items, Refilled(items, arrays)))
    same(*(uq.wrap(classifier(), posterior)(x) for posterior in (own, refilled)))
    assert own.history.faithful == refilled.history.faithful


@pytest.mark.parametrize("layers", ["all", "last"])
def test_held_out_data_of_a_loader_that_fills_its_tensors_again(layers: str) -> None:
    items, x = data(), data()[0][0]
    posterior = fitted(items, "kfac", layers=layers, prior_precision=1.0, keep_grams=True, **TAKEN)
    for change in CHANGES:
        made = [change(posterior, loader) for loader in (items, Refilled(items, True))]
        same(*(uq.wrap(classifier(), posterior)(x) for posterior in made))
        assert made[0].history.promises == made[1].history.promises


def _tuned(**options: Any) -> Callable[[uq.Posterior, Any], uq.Posterior]:
    def change(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
        return uq.tune(posterior, loader, progress=False, **TAKEN, **options)

    return change


def _calibrated(**options: Any) -> Callable[[uq.Posterior, Any], uq.Posterior]:
    def change(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
        return uq.calibrate(posterior, loader, progress=False, **TAKEN, **options)

    return change


def _updated(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
    return uq.update(posterior, loader, progress=False, **TAKEN)


CHANGES = [
    _tuned(),
    _tuned(criterion="faithful"),
    _calibrated(sets="raps"),
    _calibrated(share=None),
    _tuned(criterion="leave_one_out"),
    _updated,
]


def test_evaluations_and_predictions_of_a_loader_that_fills_its_tensors_again() -> None:
    model, items = classifier(), data()
    predictor = uq.wrap(model, uq.fit(model, items, "kfac", prior_precision=1.0, progress=False, **TAKEN))
    buffer = torch.empty(SIZE, 3)

    def served(x: Tensor) -> Tensor:  # a program with a buffer of its own for the outputs
        return buffer.copy_(model(x).detach())

    for compared in (predictor, model, served):
        tables = [
            uq.evaluate(compared, loader, ood_loaders={"foreign": loader}, progress=False, **TAKEN)
            for loader in (items, Refilled(items, False), Refilled(items, True))
        ]
        assert str(tables[0]) == str(tables[1]) == str(tables[2])
    only_inputs = {"batch_to_inputs": TAKEN["batch_to_inputs"], "progress": False}
    same(predictor.predict(items, **only_inputs), predictor.predict(Refilled(items, True), **only_inputs))
    values = data(outputs=1)
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
    tables = [
        uq.evaluate(network, loader, likelihood="regression", progress=False, **TAKEN)
        for loader in (values, Refilled(values, True))
    ]
    assert str(tables[0]) == str(tables[1])


def test_a_tensor_that_all_samples_share_is_copied_too() -> None:
    """With it, samples that wait for others to make a batch, and inputs that are kept for a prior."""
    model = Gated()
    items = [(x, y, torch.full((1, 5), 1.0 + i)) for i, (x, y, _) in enumerate(data())]
    form: dict[str, Any] = TAKEN | {"batch_to_inputs": lambda batch: (batch[0], batch[2])}
    posteriors = [
        uq.fit(model, loader, uq.INF(rank=3, basis_fraction=0.25), progress=False, **form)
        for loader in (items, Refilled(items, True))
    ]
    x, _, gate = items[0]
    same(*(uq.wrap(model, posterior)(x, gate) for posterior in posteriors))


def test_a_function_that_changes_its_inputs_leaves_those_of_the_others_alone() -> None:
    model, items = classifier(), data()

    def changing(x: Tensor) -> Tensor:
        return model(x.mul_(0.0))

    before = copy.deepcopy(items)
    alone = uq.evaluate({"model": model}, items, progress=False, **TAKEN)
    beside = uq.evaluate({"changing": changing, "model": model}, items, progress=False, **TAKEN)
    assert all(
        torch.equal(a, b)
        for one, other in zip(items, before, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert torch.equal(alone.predictions["model"]["test"].probs, beside.predictions["model"]["test"].probs)


# Streams, and loaders whose data differ from reading to reading.


def pairs(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(samples, 5, generator=g), torch.randint(0, 3, (samples,), generator=g)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Is its own iterator, so that every reading goes on where the last one stopped."""

    def __init__(self) -> None:
        self._left = iter(list(zip(*pairs(), strict=True)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        return next(self._left)


class GoesOn:
    """Gives as many samples in every reading, and each time others."""

    def __init__(self) -> None:
        self._parts = iter(list(zip(*(part.split(SIZE) for part in pairs(40 * SAMPLES)), strict=True)))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SAMPLES // SIZE):
            yield next(self._parts)


class Varies:
    """Shuffles; with `noise` it also changes its inputs, and with `kept` it gives only so many samples."""

    def __init__(self, noise: float = 0.0, kept: int = SAMPLES) -> None:
        self._noise, self._kept, self._generator = noise, kept, torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[Any]:
        x, y = pairs()
        for part in torch.randperm(SAMPLES, generator=self._generator)[: self._kept].split(SIZE):
            yield x[part] + self._noise * torch.randn(len(part), 5, generator=self._generator), y[part]


def stream() -> Iterable[Any]:
    return DataLoader(Stream(), batch_size=SIZE)


@pytest.mark.parametrize("method", ["kfac", "diag", "full", "message_passing"])
def test_one_reading_takes_all_of_a_stream(method: str) -> None:
    """Also what a fit does beyond its method, as the search for a prior, needs no second reading."""
    assert fitted(stream(), method).history.fit["samples"] == SAMPLES
    assert fitted(GoesOn(), method).history.fit["samples"] == SAMPLES


def test_a_regression_without_targets_takes_all_of_a_stream() -> None:
    """The noise variance cannot be found, for which nothing is read."""
    with pytest.warns(UserWarning, match="noise variance of this regression is taken as 1"):
        found = fitted(
            stream(),
            "diag",
            likelihood="regression",
            batch_to_inputs=lambda batch: batch[0],
            prior_precision=1.0,
            batch_to_targets=lambda batch: None,
        )
    assert found.history.fit["samples"] == SAMPLES


@functools.cache
def diagonal() -> uq.Posterior:
    return fitted([pairs()], "diag", prior_precision=1.0)


READINGS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "inf": lambda loader: fitted(loader, "inf"),
    "noise": lambda loader: fitted(
        loader,
        "kfac",
        likelihood="regression",
        batch_to_targets=lambda batch: nn.functional.one_hot(batch[1], 3).float(),
    ),
    "utvi": lambda loader: fitted(loader, "utvi", epochs=1),
    "epochs": lambda loader: fitted(loader, "function_space", epochs=2),
    "messages": lambda loader: fitted(loader, "message_passing", layers="all", epochs=1),
    "tune": lambda loader: uq.tune(diagonal(), loader, progress=False),
    "calibrate": lambda loader: uq.calibrate(diagonal(), loader, share=None, progress=False),
    "stopping": lambda loader: fitted([pairs()], "utvi", epochs=2, val_loader=loader),
}
TRAININGS = ("utvi", "epochs", "messages")  # which may go on with new data


@pytest.mark.parametrize("name", READINGS)
def test_a_second_reading_of_a_stream_is_refused_by_name(name: str) -> None:
    read = READINGS[name]
    with pytest.raises(PosthocUQError, match=f"gave {SAMPLES} samples when it was read first, and 0 when"):
        read(stream())
    if name in TRAININGS:
        read(GoesOn())
    else:
        with pytest.raises(PosthocUQError, match=f"gave {SAMPLES} samples .* first, and none of these when"):
            read(GoesOn())


@pytest.mark.filterwarnings("ignore:. steps at log_variance_lr")
@pytest.mark.parametrize("name", READINGS)
def test_loaders_may_shuffle_and_change_their_inputs(name: str) -> None:
    """Also where they leave some samples out, and where torch's own loader does all of this."""
    read, data_set = READINGS[name], TensorDataset(*pairs())

    def noisy(items: list[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*items, strict=True))
        return x + 0.01 * torch.randn_like(x), y

    for loader in (
        Varies(),
        Varies(noise=0.01),
        Varies(kept=SAMPLES - SIZE),
        DataLoader(data_set, batch_size=SIZE + 1, shuffle=True, drop_last=True, collate_fn=noisy),
    ):
        read(loader)


def test_random_changes_of_a_stream_are_those_of_a_reading_from_the_start() -> None:
    """Those by the global generators go on where the dry run stopped."""

    class Noisy:
        def __iter__(self) -> Iterator[Any]:
            for x, y in zip(*(part.split(SIZE) for part in pairs()), strict=True):
                yield x + torch.randn_like(x), y

    with torch.random.fork_rng():
        torch.manual_seed(7)
        whole = list(Noisy())
    options: dict[str, Any] = {"prior_precision": 1.0, "likelihood": uq.Categorical(), "seed": 7}
    one, other = (fitted(loader, "diag", **options) for loader in (whole, Noisy()))
    for name, variance in one.variance().items():
        assert torch.equal(variance, other.variance()[name])


# Lengths.


class Claims:
    """Says that it has so many batches."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*(part.split(SIZE) for part in pairs()), strict=True)))

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("method", ["inf", "utvi"])
@pytest.mark.parametrize("length", [1, 8, 10**6, 10**12])
def test_a_wrong_length_changes_no_number(
    method: str, length: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A share of the samples that goes by it is taken again, with a warning."""
    monkeypatch.setattr("posthoc_uq.methods.inf.FEWEST_BASIS_SAMPLES", 16)
    options = {"rank": 3, "likelihood": uq.Categorical()} if method == "inf" else {"epochs": 1}
    right, found = (fitted(Claims(each), method, **options) for each in (SAMPLES // SIZE, length))
    share = basis_share(SAMPLES if method == "utvi" or length > 4 else length * SIZE)
    warned = [str(each.message) for each in recwarn if "len(loader)" in str(each.message)]
    if method == "inf":
        assert found.history.fit.get("basis fraction", 1.0) == share
        assert len(warned) == (length > 4)
        assert all(f"{length * SIZE:,} samples, and it gave {SAMPLES}" in text for text in warned)
    if method == "utvi" or length > 4:
        for name, variance in right.variance().items():
            assert torch.equal(variance, found.variance()[name])


def test_labels_that_were_chosen_by_a_wrong_length_are_named() -> None:
    with pytest.warns(UserWarning, match=r"labels of the Fisher were chosen by that; pass fisher='exact'"):
        fitted(Claims(10**6), "diag", prior_precision="evidence")
