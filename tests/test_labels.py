"""Which labels the Fisher takes by itself, and that they are the ones that could have been asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import posthoc_uq as uq
from posthoc_uq.core import BatchReader
from posthoc_uq.curvature import own_samples_of, resolve_fisher
from posthoc_uq.likelihoods import Categorical

MANY = 11
"""Outputs of which labels are drawn: 3 a sample, 50,000 in all."""


RULE: list[tuple[tuple[Any, ...], tuple[str, int]]] = [  # fisher, n_samples, outputs, samples
    (("auto", 1, 2, 10**9), ("exact", 1)),
    (("auto", 1, 3, 49_999), ("exact", 1)),
    (("auto", 1, 3, 50_000), ("mc", 1)),
    (("auto", 1, 10, None), ("exact", 1)),
    (("auto", 1, MANY, None), ("mc", 3)),
    (("auto", 1, 1000, 24_999), ("mc", 3)),
    (("auto", 1, 1000, 25_000), ("mc", 2)),
    (("auto", 1, 1000, 50_000), ("mc", 1)),
    (("auto", 5, 2, 50), ("mc", 5)),
    (("mc", 1, 2, 50), ("mc", 1)),
    (("exact", 1, 1000, 10**7), ("exact", 1)),
    (("empirical", 1, 2, 50), ("empirical", 1)),
]


def test_the_rule() -> None:
    for given, expected in RULE:
        assert resolve_fisher(*given) == expected, given
    for positions, samples, labels in ((128, 32, 1), (2, 50, 2), (128, None, 1), (1, 50, 3)):
        found = resolve_fisher("auto", 1, 1000, samples, positions=positions)
        assert found == ("mc", labels)  # positions that count as samples have a label each
    for outputs, expected in ((3, "exact"), (4, "mc"), (1000, "mc")):
        assert resolve_fisher("auto", 1, outputs, 50, for_evidence=False) == (expected, 1)


def _data(samples: int = 23) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.zeros(samples, dtype=torch.long))


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*_data().tensors, strict=True))


class _Sized:
    """A loader of one's own that says how many batches it has."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(_data(), batch_size=8))


LOADERS: dict[str, tuple[Any, int | None]] = {
    "DataLoader": (DataLoader(_data(), batch_size=5), 23),
    "one batch": (DataLoader(_data(), batch_size=50, shuffle=True), 23),
    "batches by themselves": (DataLoader(_data().tensors[0].split(5), batch_size=None), 25),
    "list": (list(zip(*[t.split(5) for t in _data().tensors], strict=True)), 23),
    "list of inputs": (_data().tensors[0].split(7), 23),
    "part of two": (DataLoader(_data(), 5, sampler=DistributedSampler(_data(), 2, 1)), 11),
    "stream": (DataLoader(_Stream(), batch_size=5), None),
    "generator": ((batch for batch in DataLoader(_data(), batch_size=5)), None),
    "own": (_Sized(), 24),
}


@pytest.mark.parametrize("name", LOADERS)
def test_samples_are_counted_before_they_are_read(name: str) -> None:
    loader, expected = LOADERS[name]
    reader = BatchReader(torch.device("cpu"))
    first = reader.read(next(iter(loader)))
    assert own_samples_of(loader, reader, first) == expected


def _net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


def _fit(outputs: int, loader: Any = None, **options: Any) -> uq.Posterior:
    loader = DataLoader(_data(), batch_size=5) if loader is None else loader
    options = {"method": "efb", "prior_precision": 1.0, "progress": False} | options
    return uq.fit(_net(outputs), loader, **options)


def _assert_same(found: uq.Posterior, expected: uq.Posterior) -> None:
    for name, block in expected.blocks.items():
        for tensor, value in block.tensors().items():
            assert torch.equal(found.blocks[name].tensors()[tensor], value)


@pytest.mark.parametrize("method", ["efb", "full"])
@pytest.mark.parametrize(
    ("outputs", "explicit"), [(3, {"fisher": "exact"}), (MANY, {"fisher": "mc", "n_samples": 3})]
)
def test_what_it_chooses_is_what_one_would_get_by_asking(
    method: str, outputs: int, explicit: dict[str, Any]
) -> None:
    found, expected = _fit(outputs, method=method), _fit(outputs, method=method, **explicit)
    _assert_same(found, expected)
    assert found.history.fit["fisher"] == expected.history.fit["fisher"] == explicit["fisher"]
    assert found.history.fit.get("labels drawn per sample") == explicit.get("n_samples")
    assert found.history.fit["fisher chosen"] == "auto" and "fisher chosen" not in expected.history.fit
    assert f"fisher: {explicit['fisher']}, chosen by 'auto'" in str(found.report()).splitlines()


def test_the_number_of_samples_decides_and_not_how_they_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posthoc_uq.curvature.labels.LABELS_IN_ALL", 40)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    for samples, labels in ((40, 1), (39, 2)):
        for batch in (6, 40):
            found = _fit(MANY, list(x[:samples].split(batch)), method="diag")
            assert found.history.fit["fisher"] == "mc"
            assert found.history.fit["labels drawn per sample"] == labels
    assert _fit(3, list(x.split(6))).history.fit["fisher"] == "mc"
    assert _fit(3, list(x[1:].split(6))).history.fit["fisher"] == "exact"


def test_copies_are_only_warned_of_where_labels_are_drawn() -> None:
    copies = [_data(4).tensors[0].repeat(50, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fit(3, copies)
    with pytest.warns(UserWarning, match="copies of others"):
        _fit(MANY, copies)


@pytest.mark.parametrize(("classes", "spread"), [(2, 30.0), (3, 1.0), (12, 1000.0)])
def test_the_exact_fisher_of_classes_takes_one_pass_less_than_classes(classes: int, spread: float) -> None:
    logits = spread * torch.randn(
        40, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    factors = list(Categorical().exact_factors(logits))
    assert len(factors) == classes - 1
    probs = logits.softmax(1)
    expected = torch.diag_embed(probs) - probs.unsqueeze(1) * probs.unsqueeze(2)
    found = torch.stack([factor.unsqueeze(1) * factor.unsqueeze(2) for factor in factors]).sum(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    single = torch.stack(list(Categorical().exact_factors(logits.float())))
    assert bool(torch.isfinite(single).all())
    torch.testing.assert_close(single.double().square().sum(0), probs - probs**2, rtol=1e-3, atol=1e-5)
