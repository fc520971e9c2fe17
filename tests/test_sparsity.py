"""What a latent binary posterior says of the weights that a network needs: by hand, and by brute force."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from figure_checks import check_texts_apart, check_written_and_pyplot_left_alone
from matplotlib.figure import Figure
from networks import batches, cnn, inputs_of, mlp, short, targets_of
from storage_helpers import edit, layers_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import plots
from posthoc_uq.posteriors.flows import Flow
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.latent_binary import LatentBinaryBlock
from posthoc_uq.posteriors.median_model import MedianBlock
from posthoc_uq.posteriors.random_scale import RandomScale
from posthoc_uq.posteriors.settings import Hyperparameters
from posthoc_uq.sparsity.models import SparseLinear
from posthoc_uq.storage.schema import fingerprint


def posterior_of(
    model: nn.Module, chances: dict[str, Tensor], *, flow: bool = False, seed: int = 0
) -> uq.Posterior:
    """A posterior around a model's weights with these inclusions, by layer name and in the weights' shapes."""
    generator = torch.Generator().manual_seed(seed)
    parameters, blocks = {n: p.detach() for n, p in model.named_parameters()}, {}
    layers = layers_of(model)
    for name, layer in layers.items():
        weight, bias = parameters[layer.weight], None if layer.bias is None else parameters[layer.bias]
        inclusion = layer.to_matrix(chances[name].to(weight), None if bias is None else torch.ones_like(bias))
        means = layer.to_matrix(weight, bias)
        scale = None
        if flow:
            size = layer.groups * layer.outputs if layer.convolutional else weight.shape[1]
            form = Flow(size, 3)
            tensors = {"start_mean": torch.rand(size, generator=generator).to(weight) + 0.5}
            tensors["start_log_variance"] = torch.full_like(tensors["start_mean"], -1.0)
            tensors |= {f"flow_{n}": t for n, t in form.initial(generator, weight).items()}
            along = "outputs" if layer.convolutional else "inputs"
            scale = RandomScale.of(along, bias is not None, form, tensors, seed)
        variances = torch.full_like(means, 0.01)
        blocks[name] = LatentBinaryBlock(means, variances, inclusion, bias is not None, scale)
    posterior = uq.Posterior(
        "latent_binary",
        layers,
        blocks,
        {name: [name] for name in layers},
        parameters,
        uq.Categorical(),
        Evidence(50, noise_power=0),
        History({"samples": 50, "seed": 0}),
        settings=Hyperparameters(50.0),
    )
    posterior.model, posterior.fingerprint = model, fingerprint(posterior.original)
    return posterior


def random_chances(model: nn.Module, share: float = 0.4, seed: int = 3) -> dict[str, Tensor]:
    """Inclusions of which that share is above one half."""
    generator = torch.Generator().manual_seed(seed)
    chances: dict[str, Tensor] = {}
    for name, layer in layers_of(model).items():
        on = torch.rand(layer.weight_shape, generator=generator) < share
        size = torch.rand(layer.weight_shape, generator=generator)
        chances[name] = torch.where(on, 0.55 + 0.4 * size, 0.05 + 0.4 * size)
    return chances


def means_by_hand(posterior: uq.Posterior) -> dict[str, Tensor]:
    """Kept weights times the mean of ``z``, from the definition."""
    means: dict[str, Tensor] = {}
    for name, layer in posterior.layers.items():
        block = posterior.blocks[name]
        assert isinstance(block, LatentBinaryBlock)
        original = posterior.original[layer.weight]
        kept = layer.to_parameters(block.inclusion)[layer.weight] > 0.5
        weight = torch.where(kept, original, torch.zeros_like(original))
        if block.scale is not None:
            z = block.scale.tensors["z_mean"]
            weight = weight * (z.reshape(-1, 1, 1, 1) if layer.convolutional else z)
        means[layer.weight] = weight
    return means


def conv_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).eval()


# Density


def test_density_is_what_one_counts() -> None:
    model = mlp(2, inputs=3)
    chances = {"0": torch.full((5, 3), 0.05), "2": torch.full((2, 5), 0.95)}
    chances["0"][0] = torch.tensor([0.6, 0.5, 0.9])  # 0.5 is not above one half
    chances["2"][1, :4] = 0.3
    table = uq.density(posterior_of(model, chances))
    first, last = table.layers["0"], table.layers["2"]
    assert (first.weights, first.kept, last.weights, last.kept) == (15, 2, 10, 6)
    assert (first.density, last.density, table.total.density) == (2 / 15, 0.6, 8 / 25)
    assert first.expected == pytest.approx((12 * 0.05 + 2.0) / 15, rel=1e-6)
    assert (first.undecided, last.undecided) == (2 / 15, 0.4)
    assert table.total.weights == 25
    assert table.total.active is None
    assert "inputs=" in table.without_paths
    assert "expected density" in str(table)
    assert "active" not in str(table).splitlines()[0]
    json.dumps(table.to_dict())


def test_active_paths_of_a_network_with_dead_units() -> None:
    model = mlp(2, inputs=3)
    first, last = torch.zeros(5, 3), torch.zeros(2, 5)
    first[0, 0] = first[0, 1] = first[1, 2] = first[3, 0] = 1  # units 2 and 4 are constants
    last[0, 0] = last[1, 0] = last[1, 2] = last[0, 1] = 1  # nothing leaves 3 and 4
    table = uq.density(posterior_of(model, {"0": first, "2": last}), inputs_of(3))
    # the edge into 3 and the one out of 2 are on no path
    assert (table.layers["0"].kept, table.layers["0"].active) == (4, 3)
    assert (table.layers["2"].kept, table.layers["2"].active) == (4, 3)
    assert table.total.active_density == 6 / 25
    assert table.without_paths == ""
    assert "active density" in str(table)


def test_active_paths_through_flattened_channels_of_a_grouped_convolution() -> None:
    model = conv_net()
    first, last = torch.zeros(4, 1, 3, 3), torch.zeros(3, 16)
    first[0, 0, 0, 0] = first[0, 0, 1, 1] = first[3, 0, 2, 2] = first[1, 0, 0, 1] = 1
    # channel c of 4 is flattened to units 4c to 4c + 3
    last[0, 3] = last[2, 0] = last[1, 9] = last[1, 12] = 1
    table = uq.density(posterior_of(model, {"0": first, "4": last}), inputs_of(2, 4, 4))
    # channel 1 goes nowhere, channel 2 has nothing to say
    assert (table.layers["0"].kept, table.layers["0"].active) == (4, 3)
    assert (table.layers["4"].kept, table.layers["4"].active) == (4, 3)


def brute_force_active(masks: list[Tensor]) -> list[int]:
    """Weights on a path, by going along every path of a network of linear layers."""
    active = [torch.zeros_like(mask) for mask in masks]
    sizes = [masks[0].shape[1], *(mask.shape[0] for mask in masks)]
    for path in itertools.product(*map(range, sizes)):
        if all(bool(mask[path[k + 1], path[k]]) for k, mask in enumerate(masks)):
            for k in range(len(masks)):
                active[k][path[k + 1], path[k]] = True
    return [int(mask.sum()) for mask in active]


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_active_paths_are_those_of_brute_force(share: float) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    posterior = posterior_of(model, random_chances(model, share))
    masks = [uq.inclusion(posterior).layers[name].weights > 0.5 for name in ("0", "2", "4")]
    table = uq.density(posterior, inputs_of(4))
    assert [row.active for row in table.layers.values()] == brute_force_active(masks)


class Between(nn.Module):
    """Two linear layers with something between or past them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "past the last":
            return self.b(torch.relu(self.a(x))) + x
        hidden = torch.relu(self.a(x))
        if self.kind == "skip":
            hidden = hidden + x
        elif self.kind == "norm":
            hidden = self.norm(hidden)
        elif self.kind == "order":
            hidden = hidden.flip(-1)
        elif self.kind == "noise":
            hidden = hidden * torch.rand(1) if self.training else F.dropout(hidden, 0.5)
        elif self.kind == "twice":
            return self.b(self.b(hidden))
        return self.b(hidden)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("skip", "what enters 'b' depends on the inputs past 'a'"),
        ("past the last", "the network's output depends on the inputs past 'b'"),
        ("norm", "'a' are mixed or reordered before 'b'"),
        ("order", "'a' are mixed or reordered before 'b'"),
        ("twice", "'b' was seen 2 times"),
    ],
)
def test_a_network_that_is_no_chain_has_no_active_density(kind: str, reason: str) -> None:
    model = Between(kind).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = uq.density(posterior_of(model, random_chances(model)), inputs_of(4))
    assert table.total.active is None
    assert reason in table.without_paths
    assert reason in str(table)


def test_a_skip_over_a_whole_layer_is_seen() -> None:
    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            first = torch.relu(self.a(x))
            return self.c(first + torch.relu(self.b(first)))

    model = Over().eval()
    table = uq.density(posterior_of(model, random_chances(model)), inputs_of(4))
    assert "what enters 'c' depends on other layers than 'b'" in table.without_paths


def test_a_convolution_with_batch_normalisation_is_a_chain() -> None:
    model = cnn()
    table = uq.density(posterior_of(model, random_chances(model, 1.0)), inputs_of(1, 4, 4))
    assert table.total.active == table.total.kept == table.total.weights
    assert (
        uq.density(posterior_of(model, random_chances(model)), (inputs_of(1, 4, 4),)).total.active is not None
    )


# Inclusion


def at_least_one(chances: Tensor) -> float:
    """By summing up the probabilities of all cases."""
    total = 0.0
    for case in itertools.product((0, 1), repeat=len(chances)):
        if any(case):
            total += float(
                np.prod([p if on else 1 - p for p, on in zip(chances.tolist(), case, strict=True)])
            )
    return total


def test_inclusion_of_units_by_brute_force() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 4, (1, 2), groups=2), nn.Flatten(), nn.Linear(12, 2, bias=False)
    ).double()
    generator = torch.Generator().manual_seed(5)
    chances = {
        "0": torch.rand(4, 2, 1, 2, generator=generator, dtype=torch.float64),
        "2": torch.rand(2, 12, generator=generator, dtype=torch.float64),
    }
    known = uq.inclusion(posterior_of(model, chances))
    conv, linear = known.layers["0"], known.layers["2"]
    assert known.first is conv
    torch.testing.assert_close(known.weights, {"0.weight": chances["0"], "2.weight": chances["2"]})
    for channel in range(4):
        group, inner = divmod(channel, 2)
        seen = chances["0"][2 * group : 2 * group + 2, inner]
        assert float(conv.inputs[channel]) == pytest.approx(at_least_one(seen.flatten()), abs=1e-12)
        for place in range(2):
            expected = at_least_one(seen[:, 0, place])
            assert float(conv.positions[channel, 0, place]) == pytest.approx(expected, abs=1e-12)
        assert float(conv.outputs[channel]) == pytest.approx(at_least_one(chances["0"][channel].flatten()))
    for unit in range(12):
        assert float(linear.inputs[unit]) == pytest.approx(at_least_one(chances["2"][:, unit]), abs=1e-12)
    assert torch.equal(linear.selected, linear.inputs > 0.5)
    assert torch.equal(linear.kept_inputs, (chances["2"] > 0.5).any(0))
    assert "selected inputs" in str(known)
    json.dumps(known.to_dict())


def test_inclusion_of_units_keeps_its_digits_at_both_ends() -> None:
    model = nn.Linear(3, 4).double()
    chances = torch.full((4, 3), 1e-14, dtype=torch.float64)
    chances[1, 1], chances[2, 2] = 1.0, 0.3
    posterior = posterior_of(nn.Sequential(model), {"0": chances})
    inputs = uq.inclusion(posterior).first.inputs
    assert float(inputs[0]) == pytest.approx(4e-14, rel=1e-9)
    assert (float(inputs[1]), float(inputs[2])) == (1.0, pytest.approx(0.3))


# The median model, as a posterior


@pytest.mark.parametrize("flow", [False, True])
def test_the_median_model_draws_the_kept_weights_alone(flow: bool) -> None:
    model = conv_net()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    posterior.temperature = 1.7
    median, sparse = uq.median_model(posterior), uq.median_model(posterior, certain=True)
    assert median.temperature == sparse.temperature == 1.7
    draws, known = median.sample(400, torch.Generator().manual_seed(0)), uq.inclusion(posterior).weights
    for name, chances in known.items():
        assert torch.equal((draws[name] != 0).any(0), chances > 0.5)
        assert torch.equal((draws[name] != 0).all(0), chances > 0.5)
    expected = means_by_hand(posterior)
    for name, mean in expected.items():
        torch.testing.assert_close(median.mean[name], mean)
        torch.testing.assert_close(sparse.mean[name], mean)
        assert bool((draws[name].mean(0) - mean).abs().max() < (0.6 if flow else 0.05))
        assert torch.equal(sparse.sample(2)[name][1], sparse.mean[name])
    assert torch.equal(sparse.mean["4.bias"], model[4].bias)
    again = uq.median_model(uq.median_model(median), certain=True)
    assert all(torch.equal(again.mean[name], sparse.mean[name]) for name in sparse.mean)
    assert "weights of inclusion above 0.5, certain" in str(sparse.report())
    assert posterior.history.fit == {"samples": 50, "seed": 0}  # the source stays as it was


def test_the_certain_median_model_predicts_in_one_pass() -> None:
    model = mlp()
    posterior = posterior_of(model, random_chances(model))
    predictor = uq.wrap(model, uq.median_model(posterior, certain=True))
    assert predictor.n_samples == 1
    x = inputs_of(4)
    by_state = mlp()
    by_state.load_state_dict(uq.sparse_state_dict(posterior))
    with torch.no_grad():
        torch.testing.assert_close(predictor(x).probs, by_state(x).softmax(-1))


def test_what_was_measured_on_the_full_posterior_does_not_come_along() -> None:
    model = mlp()
    x = inputs_of(4)
    y = targets_of(model, x, "classification")
    posterior = uq.fit(model, batches(x, y), method=short("latent_binary"))
    uq.wrap(model, posterior, head="moments").calibrate(batches(x, y))
    predictor = uq.wrap(model, posterior)
    uq.set_referral(predictor, predictor(x), 0.1)
    assert posterior.history.calibration
    assert posterior.history.referral
    median = uq.median_model(posterior)
    assert not median.history.calibration
    assert not median.history.referral
    assert median.features is posterior.features is not None
    uq.tune(median, batches(x, y), parameters=())
    assert median.temperature != posterior.temperature
    assert float(uq.wrap(model, median)(x).novelty().max()) <= 1


@pytest.mark.parametrize("certain", [False, True])
def test_a_file_of_the_median_model_holds_the_kept_weights(tmp_path: Path, certain: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10)).eval()
    chances = random_chances(model, 0.1)
    posterior = posterior_of(model, chances)
    median = uq.median_model(posterior, certain=certain)
    uq.save(posterior, tmp_path / "all.h5")
    uq.save(median, tmp_path / "kept.h5")
    weights, kept = 62_000, sum(int((c > 0.5).sum()) for c in chances.values())
    full, small = (tmp_path / "all.h5").stat().st_size, (tmp_path / "kept.h5").stat().st_size
    expected = 4 * (1 if certain else 2) * (kept + 210) + (weights + 210) / 8
    assert expected < small < expected + 20_000  # the description, and what HDF5 takes for each tensor
    assert full > 12 * weights
    back = uq.load(tmp_path / "kept.h5", model)
    guarded = uq.load(tmp_path / "kept.h5", model, untrusted=True)
    for loaded in (back, guarded):
        assert isinstance(loaded.blocks["0"], MedianBlock)
        assert all(torch.equal(loaded.mean[name], median.mean[name]) for name in median.mean)
        assert loaded.history.fit == median.history.fit
    x = inputs_of(300)
    with torch.no_grad():
        expected_probs = uq.wrap(model, median, head="sampling", n_samples=3)(x).probs
        assert torch.equal(uq.wrap(model, back, head="sampling", n_samples=3)(x).probs, expected_probs)


@pytest.mark.parametrize("flow", [False, True])
def test_a_median_model_in_half_precision(tmp_path: Path, flow: bool) -> None:
    model = conv_net()
    median = uq.median_model(posterior_of(model, random_chances(model), flow=flow))
    uq.save(median, tmp_path / "half.h5", dtype=torch.bfloat16)
    back = uq.load(tmp_path / "half.h5", model, untrusted=flow)
    for name, mean in median.mean.items():
        torch.testing.assert_close(back.mean[name], mean, rtol=0.02, atol=0)
        assert torch.equal(back.mean[name] == 0, mean == 0)


def test_a_layer_of_which_nothing_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)).eval()
    posterior = posterior_of(model, {"0": torch.full((5, 4), 0.1), "2": torch.full((3, 5), 0.9)})
    uq.save(uq.median_model(posterior), tmp_path / "none.h5")
    back = uq.load(tmp_path / "none.h5", model, untrusted=True)
    assert not back.mean["0.weight"].any()
    assert uq.density(back, inputs_of(4)).total.active == 0
    for layout in ("masked", "csr"):
        with torch.no_grad():
            outputs = uq.sparse_model(model, posterior, layout)(inputs_of(4))
        torch.testing.assert_close(outputs, model[2].bias.detach().expand(24, 3))


@pytest.mark.parametrize("flip", ["a weight more", "a bias for a weight", "beyond the matrix"])
def test_kept_weights_that_do_not_fit_are_refused(tmp_path: Path, flip: str) -> None:
    model = mlp()  # 5 x 5 with biases in layer 0: 25 bits in 4 bytes
    chances = random_chances(model)
    chances["0"][0, 0] = 0.1
    path = tmp_path / "kept.h5"
    uq.save(uq.median_model(posterior_of(model, chances)), path)

    def change(file: h5py.File) -> None:
        kept = file["blocks/0/kept"]
        assert kept.shape == (4,)
        assert kept.dtype == np.uint8
        bits = np.unpackbits(kept[...])
        assert bits[0] == 0
        assert bits[4] == 1
        if flip == "beyond the matrix":
            bits[31] = 1
        else:
            bits[0] = 1
            bits[4] = flip == "a weight more"
        kept[...] = np.packbits(bits)

    edit(path, change)
    with pytest.raises(uq.CorruptPosteriorError, match=r"another number of weights|leaves out biases"):
        uq.load(path, model)


# The median model, as a plain module


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.parametrize("layout", ["masked", "csr", "auto"])
def test_a_sparse_model_is_the_median_model_at_its_means(layout: str, flow: bool) -> None:
    model = conv_net().double()
    posterior = posterior_of(model, random_chances(model, 0.08), flow=flow)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sparse = uq.sparse_model(model, posterior, layout)
    x, hand = inputs_of(2, 4, 4, dtype=torch.float64), means_by_hand(posterior)
    with torch.no_grad():
        expected = F.linear(
            F.max_pool2d(F.conv2d(x, hand["0.weight"], model[0].bias, padding=1, groups=2).relu(), 2).flatten(
                1
            ),
            hand["4.weight"],
            model[4].bias,
        )
        torch.testing.assert_close(sparse(x), expected)
        certain = uq.wrap(model, uq.median_model(posterior, certain=True))
        torch.testing.assert_close(certain(x).probs, expected.softmax(-1))
        assert sparse(x[:0]).shape == (0, 3)
    few = float((hand["4.weight"] != 0).double().mean()) <= 0.1
    assert isinstance(sparse[4], SparseLinear) == (layout == "csr" or (layout == "auto" and few))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(model[4]) is nn.Linear
    for value in sparse.state_dict().values():  # nothing of it is the model's memory
        value.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_auto_compresses_layers_of_few_weights_alone() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    chances = random_chances(model, 0.05) | {"2": torch.full((20, 20), 0.9)}
    model[4].register_forward_hook(lambda *_: None)
    sparse = uq.sparse_model(model, posterior_of(model, chances))
    assert [type(module) is SparseLinear for module in sparse] == [True, False, False, False, False]
    compressed = sparse[0]
    assert isinstance(compressed, SparseLinear)
    masked = uq.sparse_model(model, posterior_of(model, chances), "masked")
    torch.testing.assert_close(compressed.weight, masked[0].weight)
    x = inputs_of(3, 20).requires_grad_()
    sparse(x).sum().backward()  # inputs still have gradients
    slope = x.grad
    x.grad = None
    masked(x).sum().backward()
    torch.testing.assert_close(slope, x.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(sparse(x).float(), masked(x).float(), rtol=0.1, atol=0.1)


def test_a_layer_by_itself_and_one_in_two_places() -> None:
    single = nn.Linear(6, 2)
    posterior = posterior_of(nn.Sequential(single), {"0": torch.full((2, 6), 0.9)})
    assert uq.sparse_state_dict(posterior).keys() == {"0.weight", "0.bias"}
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    layers = random_chances(nn.Sequential(shared))
    sparse = uq.sparse_model(twice, posterior_of(twice, layers), "csr")
    assert sparse[0] is sparse[2]
    state = uq.sparse_state_dict(posterior_of(twice, layers))
    assert state.keys() == twice.state_dict().keys()
    assert torch.equal(state["0.weight"], state["2.weight"])


@pytest.mark.parametrize("flow", [False, True])
def test_the_state_dict_is_the_original_models(flow: bool) -> None:
    model = cnn()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    state, fresh = uq.sparse_state_dict(posterior), cnn()
    assert list(state) == list(model.state_dict())
    fresh.load_state_dict(state)
    for name, value in means_by_hand(posterior).items():
        torch.testing.assert_close(fresh.state_dict()[name], value)
    assert torch.equal(state["body.1.running_mean"], model.state_dict()["body.1.running_mean"])
    x = inputs_of(1, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), uq.sparse_model(model, posterior)(x))


def test_export_of_both_forms(tmp_path: Path) -> None:
    model = mlp()
    posterior = posterior_of(model, random_chances(model))
    x = inputs_of(4)
    masked = uq.sparse_model(model, posterior, "masked")
    program = torch.export.export(masked, (x,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), masked(x))
    predictor = uq.wrap(model, uq.median_model(posterior, certain=True), n_samples=1)
    exported = uq.export(predictor, x)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x[:7]).probs, masked(x[:7]).softmax(-1))


# Heads and devices


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("flow", [False, True])
def test_every_head_serves_the_median_model(flow: bool, certain: bool) -> None:
    model = mlp().double()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    median, x = uq.median_model(posterior, certain=certain), inputs_of(4, dtype=torch.float64)
    masked = uq.sparse_model(model, posterior, "masked")
    for head in ("sampling", "moments", "linearized"):
        prediction = uq.wrap(model, median, head=head)(x)
        expected = masked(x).softmax(-1)
        difference = float((prediction.probs - expected).detach().abs().max())
        assert difference < (1e-6 if certain else 0.35)
        assert bool((prediction.mutual_information() > 1e-8).all()) != certain


@pytest.mark.device
def test_all_of_it_on_a_device(device: torch.device) -> None:
    model = conv_net().to(device)
    posterior, x = posterior_of(model, random_chances(conv_net()), flow=True), inputs_of(2, 4, 4).to(device)
    here = posterior_of(conv_net(), random_chances(conv_net()), flow=True)
    table, known = uq.density(posterior, x), uq.inclusion(posterior)
    assert table.to_dict() == uq.density(here, x.cpu()).to_dict()
    torch.testing.assert_close(known.first.inputs.cpu(), uq.inclusion(here).first.inputs)
    plots.inclusion(posterior)
    with torch.no_grad():
        expected = uq.sparse_model(conv_net(), here, "masked")(x.cpu())
        for layout in ("masked", "auto", *(["csr"] if device.type == "cuda" else [])):
            outputs = uq.sparse_model(model, posterior, layout)(x)
            torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-3, atol=1e-3)
        predictor = uq.wrap(model, uq.median_model(posterior, certain=True))
        torch.testing.assert_close(predictor(x).probs.cpu(), expected.softmax(-1), rtol=1e-3, atol=1e-3)


# Other posteriors, and the report


def test_other_posteriors_are_refused_in_one_sentence() -> None:
    model = mlp()
    x = inputs_of(4)
    posterior = uq.fit(model, batches(x, targets_of(model, x, "classification")), method="diag")
    calls = [uq.median_model, uq.sparse_state_dict, uq.density, uq.inclusion]
    for call in (*calls, lambda p: uq.sparse_model(model, p)):
        with pytest.raises(
            uq.PosthocUQError, match=r"method='diag' are on; fit one with method=uq\.LatentBinary"
        ):
            call(posterior)
    with pytest.raises(uq.PosthocUQError, match=r"takes a posterior from .*, not a Sequential"):
        uq.density(model)  # type: ignore[arg-type]
    latent = posterior_of(model, random_chances(model))
    with pytest.raises(uq.PosthocUQError, match="layout"):
        uq.sparse_model(model, latent, "coo")  # type: ignore[arg-type]
    with pytest.raises(uq.PosteriorMismatchError):
        uq.sparse_model(mlp(4), latent)
    with pytest.raises(uq.PosthocUQError, match="tuple of tensors"):
        uq.density(latent, [1, 2])


def test_figure_of_inclusions(tmp_path: Path) -> None:
    model = mlp(inputs=12)
    chances = random_chances(model)
    posterior = posterior_of(model, chances)

    def draw() -> Figure:
        return plots.inclusion(posterior, shape=(2, 2, 3))

    check_written_and_pyplot_left_alone(draw, tmp_path / "figure.png", most_ink=0.7)
    figure = draw()
    check_texts_apart(figure)
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes[:2]] == ["0", "2"]
    probability, mean = (axes.images[0].get_array() for axes in figure.axes if axes.images)
    by_pixel = chances["0"].double().reshape(5, 2, 2, 3)
    np.testing.assert_allclose(probability, 1 - (1 - by_pixel).prod(0).prod(0), rtol=1e-6)
    np.testing.assert_allclose(mean, by_pixel.mean((0, 1)), rtol=1e-6)
    heights = figure.axes[0].patches[0].get_data().values
    expected = np.histogram(chances["0"].numpy(), np.linspace(0, 1, 21))[0] / 60
    np.testing.assert_allclose(heights, expected)
    assert not any(axes.images for axes in plots.inclusion(posterior, layers=["2"]).axes)
    for wrong in ({"shape": (3, 3)}, {"layers": ["1"]}, {"layers": []}):
        with pytest.raises(uq.PosthocUQError):
            plots.inclusion(posterior, **wrong)


def test_figure_of_a_convolution_has_its_kernel() -> None:
    model = conv_net()
    chances = random_chances(model)
    posterior = posterior_of(model, chances)
    figure = plots.inclusion(posterior)
    check_texts_apart(figure)
    probability, mean = (axes.images[0].get_array() for axes in figure.axes if axes.images)
    np.testing.assert_allclose(probability, 1 - (1 - chances["0"].double()).prod(0).prod(0), rtol=1e-6)
    np.testing.assert_allclose(mean, chances["0"].double().mean((0, 1)), rtol=1e-6)
    with pytest.raises(uq.PosthocUQError, match="linear first layer"):
        plots.inclusion(posterior, shape=(3, 3))


def test_the_report_says_what_columns_and_heads_mean() -> None:
    model = mlp()
    posterior = posterior_of(model, random_chances(model))
    text = str(posterior.report())
    assert "density, mean inclusion: share of the weights that are more likely on than off" in text
    assert "match the mean and the variance of every weight" in text
    assert "heads" in posterior.report().to_dict()["summary"]
    assert "median sd" not in text
