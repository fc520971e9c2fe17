"""Predictions by local reparametrisation: the outputs of layers drawn in place of their weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, cnn, inputs_of, mlp, targets_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import mixed_seed
from posthoc_uq.trained import RandomScale

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def latent(model: nn.Module, x: Tensor, **options: Any) -> uq.Posterior:
    """A short training, from inclusions of every size."""
    data = batches(x, targets_of(model, x, "classification"))
    method = uq.LatentBinary(epochs=1, initial_inclusion="balanced", flow_units=5, **options)
    return uq.fit(model, data, method, progress=False)


def spread_flows(posterior: uq.Posterior) -> None:
    """Make the factor of every layer vary much from draw to draw."""
    for block in posterior.blocks.values():
        scale: RandomScale = block.scale  # type: ignore[attr-defined]
        scale.tensors["start_log_variance"].fill_(-1.0)
        block.scale = RandomScale.of(scale.along, scale.bias, scale.flow, scale.tensors, 0)  # type: ignore[attr-defined]


def moments_by_hand(block: Any, row: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """``E h`` and ``Var h`` of a linear layer with biases for one input: section 3.1 of the specification, by a loop
    over outputs and inputs; the bias has inclusion 1.
    """
    means, variances, chances = (t[0].double() for t in (block.means, block.variances, block.inclusion))
    inputs = [*row.double().tolist(), 1.0]
    factors = [*z.double().tolist(), 1.0]
    mean, variance = [0.0] * len(means), [0.0] * len(means)
    for j in range(len(means)):
        for i, (value, factor) in enumerate(zip(inputs, factors, strict=True)):
            slab, a = float(means[j, i]) * factor, float(chances[j, i])
            mean[j] += value * a * slab
            variance[j] += value**2 * a * (float(variances[j, i]) + (1 - a) * slab**2)
    return (
        torch.tensor(mean, dtype=torch.float64, device="cpu"),
        torch.tensor(variance, dtype=torch.float64, device="cpu"),
    )


def test_outputs_of_one_layer_have_the_moments_of_the_definition() -> None:
    """Gaussian, by 5,000 draws; and independent between outputs and samples, which drawn weights are not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    x, count = inputs_of(4, samples=3), 5000
    posterior = latent(model, x)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=count, drawn="outputs")
    with torch.no_grad():
        outputs = predictor.outputs(x).double()
    for sample in range(3):
        block = next(iter(posterior.blocks.values()))
        mean, variance = moments_by_hand(block, x[sample], torch.ones(4))
        drawn = outputs[:, sample]
        assert bool(((drawn.mean(0) - mean).abs() < 5 * (variance / count).sqrt()).all())
        assert bool(((drawn.var(0) / variance - 1).abs() < 5 * (2 / count) ** 0.5).all())
        kurtosis = ((drawn - mean) ** 4).mean(0) / variance**2
        assert bool(((kurtosis - 3).abs() < 5 * (96 / count) ** 0.5).all())
    correlation = torch.corrcoef(outputs.flatten(1).T) - torch.eye(9, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / count**0.5
    weights = uq.wrap(model, posterior, "sampling", n_samples=2000).outputs(torch.stack([x[0], x[0]]))
    assert torch.equal(weights[:, 0], weights[:, 1])


def test_a_flow_gives_every_draw_one_factor_for_all_samples() -> None:
    """For the draw's own z the outputs have the moments of the definition: 2,000 copies of an input show them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    x = inputs_of(4)
    posterior = latent(model, x, flow=True)
    spread_flows(posterior)
    block: Any = next(iter(posterior.blocks.values()))
    predictor = uq.wrap(model, posterior, "sampling", n_samples=3, drawn="outputs")
    outputs = predictor.outputs(x[:1].expand(4000, 4)).double()
    factors = []
    for draw, seed in enumerate(posterior.draw_seeds(3, torch.Generator().manual_seed(0))):
        generator = torch.Generator().manual_seed(mixed_seed(seed, 0))
        z = block.scale.draws(generator, 1)[0]
        factors.append(z)
        mean, variance = moments_by_hand(block, x[0], z)
        assert bool(((outputs[draw].mean(0) - mean).abs() < 5 * (variance / 4000).sqrt()).all())
        assert bool(((outputs[draw].var(0) / variance - 1).abs() < 5 * (2 / 4000) ** 0.5).all())
    assert float((factors[0] - factors[1]).abs().max()) > 0.1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=[pytest.mark.study] * (each in ("flow",)))
        for each in ["latent", "flow", "utvi", "diag"]
    ],
)
@pytest.mark.only("latent")
def test_both_kinds_of_draws_agree_in_mean_and_variance(kind: str) -> None:
    """Of a network with a convolution, logits over 3,000 draws each: to Monte Carlo error where the layer alone has a
    posterior, so that its inputs are certain; a last layer's draws then share the part before it.
    """
    model, x = cnn(), inputs_of(1, 4, 4, samples=6)
    data = batches(x, targets_of(model, x, "classification"))
    methods = {
        "latent": uq.LatentBinary(epochs=1, initial_inclusion="balanced"),
        "flow": uq.LatentBinary(epochs=1, initial_inclusion="balanced", flow=True, flow_units=5),
        "utvi": uq.UTVI(epochs=1, initial_log_variance=-4.0),
        "diag": "diag",
    }
    posterior = uq.fit(model, data, methods[kind], layers="last", progress=False)
    count, drawn = 3000, dict[str, Tensor]()
    for kind_drawn in ("weights", "outputs"):
        predictor = uq.wrap(model, posterior, "sampling", n_samples=count, drawn=kind_drawn)
        drawn[kind_drawn] = predictor.outputs(x).double()
        assert predictor.ensemble.frozen.refused is None
    means = [value.mean(0) for value in drawn.values()]
    variances = [value.var(0) for value in drawn.values()]
    assert bool(((means[0] - means[1]).abs() < 5 * (2 * variances[0] / count).sqrt()).all())
    assert bool(((variances[0] / variances[1]).log().abs() < 0.25).all())


@pytest.mark.parametrize("flow", [False, True])
def test_draws_of_a_deep_network_follow_the_definition_layer_by_layer(flow: bool) -> None:
    """A pass by hand on the same random numbers: the generator of a draw gives each layer's normals in turn."""
    model, x = mlp(), inputs_of(4, samples=5)
    posterior = latent(model, x, flow=flow)
    outputs = uq.wrap(model, posterior, "sampling", n_samples=2, drawn="outputs").outputs(x)
    for draw, seed in enumerate(posterior.draw_seeds(2, torch.Generator().manual_seed(0))):
        generator = torch.Generator().manual_seed(mixed_seed(seed, 401))
        hidden, index = x, 0
        for module in model:
            if not isinstance(module, nn.Linear):
                hidden = module(hidden)
                continue
            block: Any = list(posterior.blocks.values())[index]
            z = torch.ones(module.in_features)
            if flow:
                z = block.scale.draws(torch.Generator().manual_seed(mixed_seed(seed, index)), 1)[0]
            rows = [moments_by_hand(block, row, z) for row in hidden]
            mean = torch.stack([row[0] for row in rows])
            variance = torch.stack([row[1] for row in rows])
            normals = torch.randn(mean.shape, generator=generator, dtype=torch.float32)
            hidden, index = (mean + variance.sqrt() * normals).float(), index + 1
        torch.testing.assert_close(outputs[draw], hidden, rtol=1e-4, atol=1e-4)


def test_a_convolution_draws_by_the_specification() -> None:
    """L13: means and variances of the first three positions, by 20,000 samples of one draw."""
    model = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten())
    x = (torch.arange(16.0) / 10).reshape(1, 1, 4, 4)
    posterior = latent(model, x.repeat(8, 1, 1, 1))
    block: Any = next(iter(posterior.blocks.values()))
    block.means.copy_(torch.tensor([[[0.2, -0.1, 0.3, 0.5, 0.0]]]) * 1.5)
    block.means[..., -1] = 0.1
    block.variances.copy_(torch.tensor([[[0.04, 0.04, 0.04, 0.04, 0.01]]]))
    block.inclusion.copy_(torch.tensor([[[0.9, 0.3, 0.6, 0.8, 1.0]]]))
    fresh = uq.wrap(model, posterior, "sampling", n_samples=1, drawn="outputs")
    outputs = fresh.outputs(x.expand(20_000, 1, 4, 4))[0]
    expected = torch.tensor([0.5035, 0.613, 0.7225]), torch.tensor([0.052283, 0.073180, 0.099185])
    assert bool(((outputs.mean(0)[:3] - expected[0]).abs() < 0.012).all())
    assert bool(((outputs.var(0)[:3] / expected[1] - 1).abs() < 0.05).all())


def test_it_repeats_copies_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model, x = mlp(), inputs_of(4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    posterior = latent(model, x, flow=True)
    predictor = uq.wrap(model, posterior, drawn="outputs", n_samples=4)
    probs = predictor(x).probs
    assert torch.equal(predictor(x).probs, probs)
    for twin in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        assert torch.equal(twin(x).probs, probs)
    assert predictor.double()(x.double()).probs.shape == probs.shape
    uq.save(posterior, tmp_path / "p.h5")
    again = uq.wrap(model, uq.load(tmp_path / "p.h5", model), "sampling", drawn="outputs", n_samples=4)
    assert torch.equal(again(x).probs, probs)
    assert not torch.equal(again.with_posterior(again.posterior, 3)(x).probs, probs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert "drawn='outputs'" in repr(again) and again.identity()["drawn"] == "outputs"
    median = uq.wrap(model, uq.sparse.median(posterior), drawn="outputs", n_samples=4)
    assert bool(torch.isfinite(median(x).probs).all())
    certain = uq.wrap(
        model, uq.sparse.median(posterior, certain=True), "sampling", n_samples=2, drawn="outputs"
    )
    torch.testing.assert_close(certain(x).probs, uq.sparse.model(model, posterior)(x).softmax(1))


def test_attention_is_drawn_too() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3)).eval()
    x = inputs_of(3, 8)
    posterior = uq.fit(model, batches(x, torch.arange(24) % 3), uq.LatentBinary(epochs=1), progress=False)
    with torch.no_grad():  # where torch would take its fast path
        outputs = uq.wrap(model, posterior, "sampling", n_samples=3, drawn="outputs").outputs(x)
    assert outputs.shape == (3, 24, 3) and not torch.equal(outputs[0], outputs[1])
