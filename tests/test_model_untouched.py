"""The user's model and the global random state are as they were, to the bit.

Every method, with all that may fail in its fit, is in the conformance suite; here is what tells of a change, and what
that suite does not call.
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
    """In-place activations, BatchNorm, dropout, a frozen layer, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.shared, self.drop, self.readout = nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 3)
        self.shared.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.bn(self.conv(x))).flatten(1)
        hidden = self.relu(self.shared(self.relu(self.shared(hidden))))
        return self.readout(self.drop(hidden))


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


@pytest.mark.filterwarnings("ignore:The search ended at the edge")
def test_a_search_and_a_predictor_that_is_changed_leave_no_trace() -> None:
    model, loader = _model(), DataLoader(_dataset(), batch_size=10, shuffle=True)
    with Watch(model):
        posterior = _fit(model, loader, val_loader=loader)
        posterior = uq.tune(posterior, progress=False)
        posterior = uq.tune(posterior, loader, progress=False, max_evaluations=3, n_samples=2)
        predictor = uq.wrap(model, posterior, n_samples=3)
        predictor(_dataset().tensors[0])
        predictor.with_posterior(posterior, 5)
        predictor.train()
        predictor.double()


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
