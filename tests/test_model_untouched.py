"""Whatever happens, the user's model and the global random state are as they were, to the bit.

Every method is in the conformance suite; here are the ways in which a run can end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from watching import Watch

import posthoc_uq as uq


class Model(nn.Module):
    """In-place activations, BatchNorm, dropout, a frozen layer, a shared layer; raises from its n-th call on
    where asked to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.shared, self.drop, self.readout = nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 3)
        self.shared.requires_grad_(False)
        self.fuse: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "calls" in self.fuse:
            _Trip.count += 1
            if _Trip.count >= self.fuse["calls"]:
                raise self.fuse["error"]
        hidden = self.relu(self.bn(self.conv(x))).flatten(1)
        hidden = self.relu(self.shared(self.relu(self.shared(hidden))))
        return self.readout(self.drop(hidden))


class _Trip:
    """Calls of the model and of its copies."""

    count = 0


def _model() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(torch.randn(8, 1, 4, 4)).sum().backward()  # running statistics and gradients to keep
    model.train()
    model.bn.eval()  # flags that differ between modules
    model.conv.register_forward_hook(_user_hook)
    model.readout.register_full_backward_hook(_user_backward_hook)
    return model


def _user_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    pass


def _user_backward_hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    pass


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(20, 1, 4, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    )


def _fit(model: nn.Module, loader: Any, method: str = "inf", **options: Any) -> uq.Posterior:
    return uq.fit(model, loader, method=method, progress=False, **({"prior_precision": 1.0} | options))


def test_the_watch_sees_what_it_should() -> None:
    changes: list[Any] = [
        lambda m: m.readout.weight.data.mul_(1.001),
        lambda m: m.bn.running_mean.add_(1e-6),
        lambda m: m.eval(),
        lambda m: setattr(m.relu, "inplace", False),
        lambda m: setattr(m.conv, "input0", 1),
        lambda m: m.shared.requires_grad_(True),
        lambda m: m.conv.register_forward_hook(_user_hook),
        lambda m: m.zero_grad(),
        lambda m: torch.rand(1),
        lambda m: random.random(),
        lambda m: np.random.rand(),
    ]
    for change in changes:
        model = _model()
        with pytest.raises(AssertionError), Watch(model):
            change(model)


def test_sample_wrap_predict_tune_and_variance_leave_no_trace() -> None:
    model, loader = _model(), DataLoader(_dataset(), batch_size=7, shuffle=True)
    posterior = _fit(model, loader)
    with Watch(model):
        posterior.sample(3)
        posterior.sample(3, torch.Generator().manual_seed(0))
        posterior.variance()
    with Watch(model):
        uq.tune(posterior)
        uq.tune(posterior, loader, progress=False, max_evaluations=3, n_samples=2)
    with Watch(model):
        predictor = uq.wrap(model, posterior, n_samples=3)
        with torch.no_grad():
            predictor(_dataset().tensors[0])
        predictor.redraw(5)
        predictor.train()
        predictor.double()


@pytest.mark.filterwarnings("ignore:The search ended at the edge")
def test_a_fit_that_tunes_leaves_no_trace() -> None:
    model, loader = _model(), DataLoader(_dataset(), batch_size=10, shuffle=True)
    with Watch(model):
        _fit(model, loader, "diag", val_loader=loader)


class _Breaks:
    """A loader that gives `good` batches and raises."""

    def __init__(self, good: int, error: BaseException) -> None:
        self.good, self.error = good, error

    def __iter__(self) -> Iterator[Any]:
        x, y = _dataset().tensors
        for index in range(self.good):
            random.random(), np.random.rand(), torch.rand(1)  # as an augmentation does
            yield x[5 * index : 5 * index + 5], y[5 * index : 5 * index + 5]
        raise self.error


@pytest.mark.parametrize("error", [ValueError("disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_loader_that_raises(good: int, error: BaseException) -> None:
    model = _model()
    with Watch(model), pytest.raises(type(error)):
        _fit(model, _Breaks(good, error))


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("error", [ValueError("odd input"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_model_that_raises(calls: int, error: BaseException) -> None:
    """During the dry run as well as during both sweeps; the model is copied by every fit, so the count is
    kept outside.
    """
    model, loader = _model(), list(DataLoader(_dataset(), batch_size=10))
    model.fuse = {"calls": calls, "error": error}
    _Trip.count = 0
    with Watch(model), pytest.raises((type(error), uq.PosthocUQError)):
        _fit(model, loader)
    assert _Trip.count >= calls


def test_not_a_number_in_a_later_batch() -> None:
    model = _model()
    x, y = (t.clone() for t in _dataset().tensors)
    x[12, 0, 0, 0] = float("nan")
    with Watch(model), pytest.raises(uq.NonFiniteError, match="Batch 2"):
        _fit(model, DataLoader(TensorDataset(x, y), batch_size=5))


def test_augmentations_that_use_the_global_generators_are_the_same_in_every_sweep_and_every_fit() -> None:
    class Noisy:
        def __iter__(self) -> Iterator[Any]:
            for x, y in DataLoader(_dataset(), batch_size=10):
                yield x + 0.1 * torch.randn_like(x) + 0.1 * np.random.rand() + 0.1 * random.random(), y

    model = _model()
    with Watch(model):
        first = _fit(model, Noisy(), "efb")
    torch.manual_seed(99), random.seed(98), np.random.seed(97)
    second = _fit(model, Noisy(), "efb")
    for name, block in first.blocks.items():
        for key, tensor in block.tensors().items():
            assert torch.equal(tensor, second.blocks[name].tensors()[key])


def test_a_fit_is_repeatable_to_the_bit_and_its_mean_is_the_models_own_memory() -> None:
    model, loader = _model(), DataLoader(_dataset(), batch_size=7)
    first, second = _fit(model, loader, seed=4), _fit(model, loader, seed=4)
    for name, block in first.blocks.items():
        for key, tensor in block.tensors().items():
            assert torch.equal(tensor, second.blocks[name].tensors()[key])
    assert all(mean.data_ptr() == model.get_parameter(name).data_ptr() for name, mean in first.mean.items())
