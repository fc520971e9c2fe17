"""Running statistics of batch normalisation, estimated anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from networks import batches, cnn, inputs_of, mlp, targets_of
from torch import Tensor, nn

import posthoc_uq as uq

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().train()


def by_hand(model: nn.Sequential, weights: dict[str, Tensor], data: list[Tensor]) -> dict[str, Tensor]:
    """The statistics of the two normalisations, from the definition: every batch is normalised by its own, and means
    and unbiased variances are those of all numbers together.
    """
    entering: list[list[Tensor]] = [[], []]
    for x in data:
        hidden = torch.nn.functional.conv2d(x, weights["0.weight"], weights["0.bias"])
        entering[0].append(hidden.transpose(0, 1).flatten(1))
        centred = hidden - hidden.mean((0, 2, 3), keepdim=True)
        hidden = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
        hidden = hidden * weights["1.weight"][:, None, None] + weights["1.bias"][:, None, None]
        entering[1].append((hidden.relu().flatten(1) @ weights["5.weight"].T + weights["5.bias"]).T)
    rows = [torch.cat(parts, 1) for parts in entering]
    names = ("1", "6")
    means = {f"{n}.running_mean": r.mean(1) for n, r in zip(names, rows, strict=True)}
    return means | {f"{n}.running_var": r.var(1) for n, r in zip(names, rows, strict=True)}


def test_statistics_are_those_of_a_pass_by_hand() -> None:
    """For batches of unequal sizes; all else is as it was, in the copy and in the model."""
    model, x = network(), inputs_of(1, 4, 4, samples=22, dtype=torch.float64)
    nn.init.uniform_(model[1].weight, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    data = [x[:8], x[8:13], x[13:]]
    twin: Any = uq.recalibrated(model, data, progress=False)
    expected = by_hand(model, dict(model.named_parameters()), data)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(tensor, expected.get(name, before[name]), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not twin.training and all(module.training for module in model.modules())
    assert twin[0].weight.data_ptr() == model[0].weight.data_ptr()


def test_one_batch_gives_what_torch_estimates() -> None:
    """`torch.optim.swa_utils.update_bn` averages over batches; of one batch that is the same."""
    model, x = network(), inputs_of(1, 4, 4, samples=22, dtype=torch.float64)
    model[3].p = 0.0  # it drops in torch's pass
    twin = uq.recalibrated(model, [(x, torch.zeros(22))], progress=False)
    torch.optim.swa_utils.update_bn([x], model)
    for name, tensor in model.named_buffers():
        if "num_batches" not in name:
            torch.testing.assert_close(twin.get_buffer(name), tensor)


def test_with_a_posterior_the_pass_is_by_its_median_model() -> None:
    """The copy has the model's own weights, so that the posterior wraps it, and the sparse model's statistics."""
    model, x = network().float().eval(), inputs_of(1, 4, 4)
    data = batches(x, targets_of(model, x, "classification"))
    method = uq.LatentBinary(epochs=1, initial_inclusion="balanced")
    posterior = uq.fit(model, data, method, progress=False)
    median = uq.median_model(posterior, certain=True)
    twin = uq.recalibrated(model, data, posterior, progress=False)
    sparse = uq.recalibrated(uq.sparse_model(model, posterior, "masked"), data, progress=False)
    moved = 0.0
    for name, tensor in sparse.named_buffers():
        assert torch.equal(twin.get_buffer(name), tensor)
        moved = max(moved, float((tensor - model.get_buffer(name)).abs().max()))
    assert moved > 0.01
    weights = dict(model.named_parameters()) | median.centre
    inputs = [batch[0] for batch in data]
    expected = by_hand(
        model.double(), {n: w.detach().double() for n, w in weights.items()}, [i.double() for i in inputs]
    )
    model.float()
    for name, tensor in expected.items():
        torch.testing.assert_close(twin.get_buffer(name).double(), tensor, rtol=1e-5, atol=1e-6)
    for other in (median, uq.median_model(posterior), posterior):
        assert bool(torch.isfinite(uq.wrap(twin, other)(x).probs).all())
    torch.testing.assert_close(uq.wrap(twin, median)(x).probs, sparse(x).softmax(1))


def test_what_it_refuses() -> None:
    model, x = network().float(), inputs_of(1, 4, 4)
    cases: list[tuple[Any, str]] = [
        (
            lambda: uq.recalibrated(mlp(), [inputs_of(4)], progress=False),
            "no batch normalisation with running",
        ),
        (lambda: uq.recalibrated(model, [], progress=False), "no batch of samples"),
        (lambda: uq.recalibrated(model, [x[:1]], progress=False), "'6' saw one number a channel"),
        (lambda: uq.recalibrated(model, [x / 0], progress=False), "enters the batch normalisation '1'"),
    ]
    for call, words in cases:
        with pytest.raises(uq.PosthocUQError, match=words):
            call()
    other = cnn()
    fitted = uq.fit(other, [(x, torch.arange(24) % 3)], "diag", progress=False)
    with pytest.raises(uq.PosthocUQError, match="recalibrated is about weights that may be off"):
        uq.recalibrated(other, [x], fitted, progress=False)
