"""What a latent binary posterior says of the weights that a network needs: by hand, and by brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import batches, cnn, inputs_of, mlp, short, targets_of
from storage_helpers import edit, layers_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import posthoc_uq as uq
from posthoc_uq.files import fingerprint
from posthoc_uq.posteriors import Evidence, History, Hyperparameters
from posthoc_uq.trained import Flow, LatentBinaryBlock, MedianBlock, RandomScale
from posthoc_uq.trained.sparse import SparseLinear


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
        blocks[name] = LatentBinaryBlock(means, variances, inclusion, bias=bias is not None, scale=scale)
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
    return posterior.replaced(model=model, fingerprint=fingerprint(posterior.original))


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
    table = uq.sparse.summary(posterior_of(model, chances))
    first, last = table.layers["0"], table.layers["2"]
    assert (first.weights.numel(), first.kept, last.weights.numel(), last.kept) == (15, 2, 10, 6)
    assert (first.density, last.density, table.density, table.kept) == (2 / 15, 0.6, 8 / 25, 8)
    assert first.expected == pytest.approx((12 * 0.05 + 2.0) / 15, rel=1e-6)
    assert (first.undecided, last.undecided) == (pytest.approx(2 / 15), pytest.approx(0.4))
    assert "8 weights kept" in str(table) and "undecided" in str(table)


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
    known = uq.sparse.summary(posterior_of(model, chances))
    conv, linear = known.layers["0"], known.layers["2"]
    assert known.first is conv
    torch.testing.assert_close({"0": conv.weights, "2": linear.weights}, chances)
    assert (conv.parameter, linear.parameter) == ("0.weight", "2.weight")
    for channel in range(4):
        group, inner = divmod(channel, 2)
        seen = chances["0"][2 * group : 2 * group + 2, inner]
        assert float(conv.inputs[channel]) == pytest.approx(at_least_one(seen.flatten()), abs=1e-12)
        assert float(conv.outputs[channel]) == pytest.approx(at_least_one(chances["0"][channel].flatten()))
    for unit in range(12):
        assert float(linear.inputs[unit]) == pytest.approx(at_least_one(chances["2"][:, unit]), abs=1e-12)
    assert torch.equal(linear.selected, linear.inputs > 0.5)
    assert torch.equal(linear.kept_inputs, (chances["2"] > 0.5).any(0))
    assert "selected" in str(known)


def test_inclusion_of_units_keeps_its_digits_at_both_ends() -> None:
    model = nn.Linear(3, 4).double()
    chances = torch.full((4, 3), 1e-14, dtype=torch.float64)
    chances[1, 1], chances[2, 2] = 1.0, 0.3
    posterior = posterior_of(nn.Sequential(model), {"0": chances})
    inputs = uq.sparse.summary(posterior).first.inputs
    assert float(inputs[0]) == pytest.approx(4e-14, rel=1e-9)
    assert (float(inputs[1]), float(inputs[2])) == (1.0, pytest.approx(0.3))


# The median model, as a posterior


@pytest.mark.parametrize("flow", [False, True])
def test_the_median_model_draws_the_kept_weights_alone(flow: bool) -> None:
    model = conv_net()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    posterior = posterior.with_settings(temperature=1.7)
    median, sparse = uq.sparse.median(posterior), uq.sparse.median(posterior, certain=True)
    assert median.temperature == sparse.temperature == 1.7
    draws, known = median.sample(400, torch.Generator().manual_seed(0)), uq.sparse.summary(posterior)
    for name, chances in {layer.parameter: layer.weights for layer in known.layers.values()}.items():
        assert torch.equal((draws[name] != 0).any(0), chances > 0.5)
        assert torch.equal((draws[name] != 0).all(0), chances > 0.5)
    expected = means_by_hand(posterior)
    for name, mean in expected.items():
        torch.testing.assert_close(median.mean[name], mean)
        torch.testing.assert_close(sparse.mean[name], mean)
        assert bool((draws[name].mean(0) - mean).abs().max() < (0.6 if flow else 0.05))
        assert torch.equal(sparse.sample(2)[name][1], sparse.mean[name])
    assert torch.equal(sparse.mean["4.bias"], model[4].bias)
    again = uq.sparse.median(uq.sparse.median(median), certain=True)
    assert all(torch.equal(again.mean[name], sparse.mean[name]) for name in sparse.mean)
    assert "median model, certain" in str(sparse.report()) and "certain" not in str(median.report())
    assert posterior.history.fit == {"samples": 50, "seed": 0}  # the source stays as it was


def test_what_was_measured_on_the_full_posterior_does_not_come_along() -> None:
    model = mlp()
    x = inputs_of(4)
    y = targets_of(model, x, "classification")
    posterior = uq.fit(model, batches(x, y), method=short("latent_binary"))
    posterior = uq.wrap(model, posterior, head="moments").fit_scale(batches(x, y)).posterior
    posterior = uq.calibrate(posterior, batches(x, y), share=None, progress=False)
    assert posterior.history.calibration
    assert posterior.history.promises
    median = uq.sparse.median(posterior)
    assert not median.history.calibration
    assert not median.history.promises
    assert median.features is posterior.features is not None
    before = posterior.temperature
    median = uq.tune(median, batches(x, y), parameters=())
    median = median.with_settings(temperature=3 * before)
    assert posterior.temperature == before
    assert float(uq.wrap(model, median)(x).novelty().max()) <= 1


@pytest.mark.parametrize("certain", [False, True])
def test_a_file_of_the_median_model_holds_the_kept_weights(tmp_path: Path, certain: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10)).eval()
    chances = random_chances(model, 0.1)
    posterior = posterior_of(model, chances)
    median = uq.sparse.median(posterior, certain=certain)
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
    median = uq.sparse.median(posterior_of(model, random_chances(model), flow=flow))
    uq.save(median, tmp_path / "half.h5", dtype=torch.bfloat16)
    back = uq.load(tmp_path / "half.h5", model, untrusted=flow)
    for name, mean in median.mean.items():
        torch.testing.assert_close(back.mean[name], mean, rtol=0.02, atol=0)
        assert torch.equal(back.mean[name] == 0, mean == 0)


def test_a_layer_of_which_nothing_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)).eval()
    posterior = posterior_of(model, {"0": torch.full((5, 4), 0.1), "2": torch.full((3, 5), 0.9)})
    uq.save(uq.sparse.median(posterior), tmp_path / "none.h5")
    back = uq.load(tmp_path / "none.h5", model, untrusted=True)
    assert not back.mean["0.weight"].any()
    assert uq.sparse.summary(back).layers["0"].kept == 0
    for layout in ("masked", "csr"):
        with torch.no_grad():
            outputs = uq.sparse.model(model, posterior, layout)(inputs_of(4))
        torch.testing.assert_close(outputs, model[2].bias.detach().expand(24, 3))


@pytest.mark.parametrize("flip", ["a weight more", "a bias for a weight", "beyond the matrix"])
def test_kept_weights_that_do_not_fit_are_refused(tmp_path: Path, flip: str) -> None:
    model = mlp()  # 5 x 5 with biases in layer 0: 25 bits in 4 bytes
    chances = random_chances(model)
    chances["0"][0, 0] = 0.1
    path = tmp_path / "kept.h5"
    uq.save(uq.sparse.median(posterior_of(model, chances)), path)

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
    sparse = uq.sparse.model(model, posterior, layout)
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
        certain = uq.wrap(model, uq.sparse.median(posterior, certain=True))
        torch.testing.assert_close(certain(x).probs, expected.softmax(-1))
        assert sparse(x[:0]).shape == (0, 3)
    few = float((hand["4.weight"] != 0).double().mean()) <= 0.1
    assert isinstance(sparse[4], SparseLinear) == (layout == "csr" or (layout == "auto" and few))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(model[4]) is nn.Linear
    for value in sparse.state_dict().values():  # nothing of it is the model's memory
        value.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_the_sparse_model_of_one_with_weight_norm() -> None:
    model, x = parametrizations.weight_norm(nn.Linear(6, 4)).eval(), torch.randn(5, 6)
    plain = nn.Linear(6, 4).eval()
    plain.load_state_dict({"weight": model.weight, "bias": model.bias})
    posterior = posterior_of(plain, random_chances(plain))
    expected = uq.sparse.model(plain, posterior)(x)
    for layout in ("auto", "masked", "csr"):
        torch.testing.assert_close(uq.sparse.model(model, posterior, layout)(x), expected)


def test_auto_compresses_layers_of_few_weights_alone() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    chances = random_chances(model, 0.05) | {"2": torch.full((20, 20), 0.9)}
    model[4].register_forward_hook(lambda *_: None)
    sparse = uq.sparse.model(model, posterior_of(model, chances))
    assert [type(module) is SparseLinear for module in sparse] == [True, False, False, False, False]
    compressed = sparse[0]
    assert isinstance(compressed, SparseLinear)
    masked = uq.sparse.model(model, posterior_of(model, chances), "masked")
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
    assert uq.sparse.state_dict(posterior).keys() == {"0.weight", "0.bias"}
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    layers = random_chances(nn.Sequential(shared))
    sparse = uq.sparse.model(twice, posterior_of(twice, layers), "csr")
    assert sparse[0] is sparse[2]
    state = uq.sparse.state_dict(posterior_of(twice, layers))
    assert state.keys() == twice.state_dict().keys()
    assert torch.equal(state["0.weight"], state["2.weight"])


@pytest.mark.parametrize("flow", [False, True])
def test_the_state_dict_is_the_original_models(flow: bool) -> None:
    model = cnn()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    state, fresh = uq.sparse.state_dict(posterior), cnn()
    assert list(state) == list(model.state_dict())
    fresh.load_state_dict(state)
    for name, value in means_by_hand(posterior).items():
        torch.testing.assert_close(fresh.state_dict()[name], value)
    assert torch.equal(state["body.1.running_mean"], model.state_dict()["body.1.running_mean"])
    x = inputs_of(1, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), uq.sparse.model(model, posterior)(x))


def test_export_of_both_forms(tmp_path: Path) -> None:
    model = mlp()
    posterior = posterior_of(model, random_chances(model))
    x = inputs_of(4)
    masked = uq.sparse.model(model, posterior, "masked")
    program = torch.export.export(masked, (x,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), masked(x))
    predictor = uq.wrap(model, uq.sparse.median(posterior, certain=True), n_samples=1)
    exported = uq.export(predictor, x)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x[:7]).probs, masked(x[:7]).softmax(-1))


# Heads and devices


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("flow", [False, True])
def test_every_head_serves_the_median_model(flow: bool, certain: bool) -> None:
    model = mlp().double()
    posterior = posterior_of(model, random_chances(model), flow=flow)
    median, x = uq.sparse.median(posterior, certain=certain), inputs_of(4, dtype=torch.float64)
    masked = uq.sparse.model(model, posterior, "masked")
    assert not certain or uq.wrap(model, median).n_samples == 1  # one pass, since all draws are the same
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
    known, expected = uq.sparse.summary(posterior), uq.sparse.summary(here)
    torch.testing.assert_close(known.first.inputs.cpu(), expected.first.inputs)
    assert known.kept == expected.kept
    with torch.no_grad():
        expected = uq.sparse.model(conv_net(), here, "masked")(x.cpu())
        for layout in ("masked", "auto", *(["csr"] if device.type == "cuda" else [])):
            outputs = uq.sparse.model(model, posterior, layout)(x)
            torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-3, atol=1e-3)
        predictor = uq.wrap(model, uq.sparse.median(posterior, certain=True))
        torch.testing.assert_close(predictor(x).probs.cpu(), expected.softmax(-1), rtol=1e-3, atol=1e-3)


# Other posteriors, and the report


def test_the_report_says_what_columns_and_heads_mean() -> None:
    model = mlp()
    posterior = posterior_of(model, random_chances(model))
    text = str(posterior.report())
    assert "density, mean inclusion: share of the weights that are more likely on than off" in text
    assert "match the mean and the variance of every weight" in text
    assert "heads" in posterior.report().to_dict()["summary"]
    assert "median sd" not in text
