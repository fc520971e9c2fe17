"""The independent prior over functions, the divergence's weight, counts, corrupted images, certain bodies."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, jacrev
from torchvision.transforms.v2 import functional as transforms

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import replicate
from posthoc_uq.layers.layer import describe
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.methods.contexts import Corrupted, Mixture, TrainingBatch
from posthoc_uq.methods.function_objective import (
    FunctionSpaceObjective,
    FunctionSpaceOptions,
    IndependentPrior,
    last_layer_covariance,
    last_layer_variances,
    marginal_kl,
)
from posthoc_uq.methods.mean_field import FeatureNetwork, MeanField
from posthoc_uq.methods.training import Step

F64 = torch.float64
IMAGES = 0.5 * torch.rand(16, 2, 9, 8, generator=torch.Generator().manual_seed(1)).round(decimals=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def image_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(126, 6), nn.Tanh(), nn.Linear(6, 3)
        ).eval()


def batches(size: int = 4) -> list[tuple[Tensor, Tensor]]:
    labels = torch.arange(len(IMAGES)) % 3
    return list(zip(IMAGES.split(size), labels.split(size), strict=True))


def fitted(loader: Any = None, **given: Any) -> uq.Posterior:
    settings: dict[str, Any] = {"epochs": 2, "lr": 1e-2, "log_variance_lr": 0.1, "progress": False}
    data = batches() if loader is None else loader
    return uq.fit(image_net(), data, method="function_space", **(settings | given))


# The divergence from an independent prior


def test_marginal_divergence_against_torch_distributions() -> None:
    mean, prior_mean = normals(2, 4, 3, seed=1), normals(2, 4, 3, seed=2)
    variances = normals(2, 4, 3, seed=3).exp()
    found = marginal_kl(mean, variances, prior_mean, 10.0)
    each = kl_divergence(Normal(mean, variances.sqrt()), Normal(prior_mean, 10.0**0.5))
    torch.testing.assert_close(found.total, each.sum(dim=(1, 2)), rtol=1e-12, atol=1e-12)
    assert found.function_noise.tolist() == [0.0, 0.0] and found.raised == 1
    centred = marginal_kl(mean, variances, mean, 10.0)
    assert centred.mean_part.tolist() == [0.0, 0.0]
    assert torch.equal(centred.covariance_part, found.covariance_part)


@pytest.mark.parametrize("biased", [True, False])
def test_marginal_variances_are_the_covariances_diagonals(biased: bool) -> None:
    features, weights = normals(2, 4, 5), normals(3, 5, seed=1).exp()
    bias = normals(3, seed=2).exp() if biased else None
    diagonals = last_layer_covariance(features, weights, bias).diagonal(dim1=-2, dim2=-1)
    found = last_layer_variances(features, weights, bias)
    torch.testing.assert_close(found, diagonals.transpose(1, 2), rtol=1e-13, atol=1e-13)


def small_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def objective_of(
    net: nn.Sequential, points: Tensor, variance: float = 10.0, samples: int = 40, **given: Any
) -> tuple[FunctionSpaceObjective, MeanField, FeatureNetwork]:
    layers = {
        name: describe(
            name,
            "linear",
            (f"{name}.weight", net[int(name)].weight),
            (f"{name}.bias", net[int(name)].bias),
            1,
        )
        for name in ("0", "2")
    }
    network = FeatureNetwork(replicate(net), layers, Batch((points,)))
    trained = {name: p.detach().clone() for name, p in net.named_parameters()}
    options = FunctionSpaceOptions(n_context=len(points), prior="independent", **given)
    logs = {
        name: normals(*mean.shape, seed=9) * 0.3 - (3 if name in network.last.parameter_names else 6)
        for name, mean in trained.items()
        if options.body != "certain" or name in network.last.parameter_names
    }
    means = {name: mean + 0.05 * normals(*mean.shape, seed=8) for name, mean in trained.items()}
    field = MeanField(means, logs, options.train_mean)
    prior = IndependentPrior(network, trained, options.prior_mean, variance)
    context = TrainingBatch()
    context.draw = lambda n, batch, generator: points  # type: ignore[method-assign]
    objective = FunctionSpaceObjective(network, field, prior, Categorical(), context, samples, options, False)
    return objective, field, network


@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_divergence_from_an_independent_prior_by_jacobians(prior_mean: str) -> None:
    net, points = small_net(), normals(5, 2, seed=3)
    objective, field, _ = objective_of(net, points, variance=2.5, prior_mean=prior_mean)
    body = {name: 0.1 * normals(*field.means[name].shape, seed=4) for name in ("0.weight", "0.bias")}
    found, chosen = objective.divergence(Batch((points,)), body)
    weights = {name: mean.detach() for name, mean in field.means.items()}
    jacobian = jacrev(lambda w: functional_call(net, w, (points,)))(weights)
    mean = functional_call(net, weights, (points,))
    for name, deviation in body.items():
        mean = mean + jacobian[name].flatten(2) @ deviation.flatten()
    variance = torch.zeros(5, 3, dtype=F64)
    for name in ("2.weight", "2.bias"):
        variance += jacobian[name].flatten(2).square() @ field.log_variances[name].detach().exp().flatten()
    with torch.no_grad():
        trained_mean = net(points) if prior_mean == "pretrained" else torch.zeros(5, 3, dtype=F64)
    expected = kl_divergence(Normal(mean, variance.sqrt()), Normal(trained_mean, 2.5**0.5)).sum()
    assert float(found.total.detach()) == pytest.approx(float(expected), rel=1e-12) and int(chosen) == 0


@pytest.mark.parametrize("body", ["linearized", "certain"])
@pytest.mark.parametrize("weight", [None, 7.5])
def test_a_step_of_any_weight_adds_up(weight: float | None, body: str) -> None:
    """Gradients of a step are those of ``-log p + w KL / N``, by autograd through it all at once."""
    net, points = small_net(), normals(4, 2, seed=5)
    objective, field, network = objective_of(net, points, divergence_weight=weight, body=body)
    x, y = normals(6, 2, seed=6), torch.tensor([0, 1, 2, 0, 1, 2])
    terms = objective.backward(Batch((x,), y), Step(4), DeferredChecks())
    found = {name: tensor.grad.clone() for name, tensor in objective.tensors().items()}
    draws, deviations = objective._generator(4, 1), {}
    for name, value in field.log_variances.items():
        deviations[name] = torch.randn(value.shape, generator=draws, dtype=F64) * (0.5 * value).exp()
    weights = {name: mean + deviations.get(name, 0.0) for name, mean in field.means.items()}
    fit = -nn.functional.cross_entropy(functional_call(net, weights, (x,)), y)
    moving = {name: d for name, d in deviations.items() if name not in network.last.parameter_names}
    divergence = objective.divergence(Batch((points,)), moving)[0].total[0]
    loss = divergence * (weight or 1.0) / 40 - fit
    assert float(terms["loss"]) == pytest.approx(float(loss), rel=1e-12)
    expected = torch.autograd.grad(loss, list(objective.tensors().values()))
    assert len(found) == (6 if body == "certain" else 8)
    for gradient, own in zip(expected, found.values(), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-13)


# Weights


@pytest.mark.filterwarnings("ignore:A prior by features at")
@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1 / 16),
        ({"divergence_weight": 3}, 3 / 16),
        ({"divergence_weight": "minibatch"}, 1 / 4),
        ({"prior": "independent"}, 1 / 4),
        ({"prior": "independent", "divergence_weight": 0.5}, 0.5 / 16),
        ({"prior": "independent", "divergence_weight": "minibatch", "prior_variance": 2}, 1 / 4),
    ],
)
def test_the_divergence_enters_the_loss_with_its_weight(given: dict[str, Any], share: float) -> None:
    told = fitted(n_context=4, **given).history.fit
    for loss, fit, mean, covariance in zip(
        *(told[name] for name in ("loss", "log likelihood", "KL mean part", "KL covariance part")),
        strict=True,
    ):
        assert loss == pytest.approx(-fit + share * (mean + covariance), rel=1e-5)
    assert told["divergence weight"] == pytest.approx(share * 16)
    if "prior" in given:
        assert told["prior variance"] == given.get("prior_variance", 10.0) and "function noise" not in told


def test_combinations_that_are_known_to_fail_warn() -> None:
    many = batches(1)
    with pytest.warns(UserWarning, match=r"An independent prior at divergence_weight=1 says next to nothing"):
        fitted(many, prior="independent", divergence_weight=1, epochs=1)
    for weight in ("minibatch", 16.0):
        with pytest.warns(
            UserWarning, match=r"A prior by features at divergence_weight=16 and function_noise=1e-06"
        ):
            fitted(many, divergence_weight=weight, n_context=4, epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="An? (independent )?prior")
        fitted(many, prior="independent", epochs=1)
        fitted(many, n_context=4, epochs=1)
        fitted(many, n_context=4, epochs=1, divergence_weight="minibatch", function_noise=0.1)
        fitted(prior="independent", divergence_weight=1, epochs=1)  # no more than four batches


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "variance of values": ({"prior_variance": 2.0}, "prior_variance is of prior='independent'"),
    "precision": ({"prior": "independent", "prior_precision": 2.0}, "prior_precision is of prior='features'"),
    "noise": ({"prior": "independent", "function_noise": 1e-3}, "function_noise is of prior='features'"),
    "body's prior": ({"prior": "independent", "prior_body_variance": 0.1}, "prior_body_variance is of"),
    "body's start": ({"body": "certain", "initial_body_log_variance": -8.0}, "have no effect"),
    "nothing trained": ({"body": "certain", "train_mean": False}, "choose layers='last'"),
    "weight in words": ({"divergence_weight": "batch"}, "divergence_weight must be"),
    "no weight": ({"divergence_weight": 0.0}, "divergence_weight must be"),
    "prior": ({"prior": "normal"}, "prior must be one of"),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_options_without_effect_are_refused(case: str) -> None:
    given, words = WITHOUT_EFFECT[case]
    with pytest.raises(PosthocUQError, match=words) as caught:
        uq.FunctionSpace(**given)
    assert str(caught.value).count(". ") <= 1


# Bodies without variances


@pytest.mark.parametrize("prior", ["features", "independent"])
def test_a_certain_body_is_trained_and_has_no_variance(prior: str, tmp_path: Path) -> None:
    posterior = fitted(prior=prior, body="certain", n_context=4)
    variances = posterior.variance()
    assert all(bool((variances[n] > 0).all()) == n.startswith("5") for n in variances)
    assert all(not bool(v.any()) for n, v in variances.items() if not n.startswith("5"))
    original = dict(image_net().named_parameters())
    assert all(not torch.equal(mean, original[name]) for name, mean in posterior.trained_mean.items())
    uq.save(posterior, tmp_path / "certain.h5")
    loaded = uq.load(tmp_path / "certain.h5", posterior.model)
    for head in ("sampling", "linearized", "moments"):
        first, second = (uq.wrap(posterior.model, p, head)(IMAGES).probs for p in (posterior, loaded))
        assert torch.equal(first, second) and bool(torch.isfinite(first).all())


def test_a_certain_body_begins_with_the_last_layers_variances_of_a_posterior() -> None:
    start = fitted(epochs=1, n_context=4)
    posterior = fitted(body="certain", initial=start, n_context=4, lr=1e-9, log_variance_lr=1e-9)
    name = "5.weight"
    torch.testing.assert_close(posterior.variance()[name], start.variance()[name], rtol=1e-4, atol=0)


# Counts


def test_whole_numbers_are_counts_and_others_are_shares() -> None:
    mixture = Mixture([(2, "batch"), (5, torch.full((3, 2, 9, 8), 7.0))])
    assert mixture.points == 7 and mixture.fresh().points == 7 and mixture.counts(7) == [2, 5]
    drawn = mixture.draw(7, Batch((IMAGES,)), generator())
    assert (drawn == 7).flatten(1).all(1).tolist() == [False] * 2 + [True] * 5
    assert mixture.counts(14) == [4, 10]  # proportions, where another number is asked for
    assert Mixture([(0.5, "batch"), (0.5, "uniform")]).points is None
    assert Mixture([(1, "batch"), (0.5, "uniform")]).points is None


@pytest.mark.parametrize(
    ("given", "points"),
    [
        ({"context": [(1, "batch"), (4, "corrupted")]}, 5),
        ({"context": [(1, "batch"), (4, "corrupted")], "n_context": 6}, 6),
        ({"context": [(0.5, "batch"), (0.5, "corrupted")]}, 7),  # six features and a bias
    ],
)
def test_a_fit_takes_as_many_context_points_as_are_counted(given: dict[str, Any], points: int) -> None:
    assert fitted(**given).history.fit["n_context"] == points


def test_an_independent_prior_has_a_context_of_its_own() -> None:
    told = fitted(prior="independent", epochs=1).history.fit
    assert told["context"] == "batch and corrupted" and told["n_context"] == 16
    told = fitted(prior="independent", context="corrupted", epochs=1).history.fit
    assert told["context"] == "corrupted" and told["n_context"] == 16


def test_an_independent_prior_takes_more_points_than_dimensions() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="n_context")
        fitted(prior="independent", context=[(2, "batch"), (20, "corrupted")], epochs=1)


# Corrupted images


def corrupted(images: Tensor = IMAGES, n: int = 16, seed: int = 0, **given: Any) -> Tensor:
    context = Corrupted(**given)
    context.observe(images, generator())
    return context.draw(n, Batch((images,)), generator(seed))


def test_corrupted_images_are_settled_by_the_generator_and_in_range() -> None:
    found = corrupted(n=40)
    assert found.shape == (40, 2, 9, 8) and found.dtype == IMAGES.dtype
    assert torch.equal(found, corrupted(n=40)) and not torch.equal(found, corrupted(n=40, seed=1))
    for channel in range(2):
        assert float(found[:, channel].min()) >= float(IMAGES[:, channel].min())
        assert float(found[:, channel].max()) <= float(IMAGES[:, channel].max())


def test_the_range_is_that_of_all_batches_and_of_each_channel() -> None:
    """Another scale and offset of each channel are those of what is drawn, too."""
    scale, offset = torch.tensor([2.0, 5.0])[:, None, None], torch.tensor([-1.0, 3.0])[:, None, None]
    split, whole = Corrupted(contrast=0.0), Corrupted(contrast=0.0)
    for part in IMAGES.split(3):
        split.observe(part, generator())
    whole.observe(scale * IMAGES + offset, generator())
    first = split.draw(16, Batch((IMAGES,)), generator(3))
    second = whole.draw(16, Batch((scale * IMAGES + offset,)), generator(3))
    torch.testing.assert_close(scale * first + offset, second, rtol=1e-5, atol=1e-5)


def test_without_any_change_the_images_are_the_batchs_or_mirrored() -> None:
    found = corrupted(padding=0, solarised=0.0, brightness=0.0, contrast=0.0, n=16)
    both = torch.cat([IMAGES, IMAGES.flip(3)])
    same = (found.unsqueeze(1) - both).abs().flatten(2).amax(2) < 1e-6
    assert same.any(1).all() and 2 <= int(same[:, :16].any(1).sum()) <= 14
    assert same[:, :16].logical_or(same[:, 16:]).any(0).all()  # each of the batch once


def test_crops_are_shifts_with_darkness_around() -> None:
    image = torch.rand(1, 1, 6, 6, generator=generator()) + 1
    found = corrupted(image, n=60, padding=2, solarised=0.0, brightness=0.0, contrast=0.0)
    padded = torch.nn.functional.pad(image, [2] * 4, value=float(image.min()))
    shifts = [padded[0, :, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
    shifts = torch.stack([*shifts, *(shift.flip(2) for shift in shifts)])
    same = (found.unsqueeze(1) - shifts).abs().flatten(2).amax(2) < 1e-6
    assert same.any(1).all() and int(same.any(0).sum()) > 20


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_solarised_images_are_torchvisions_and_as_many_as_asked_for(share: float) -> None:
    image = torch.rand(1, 3, 8, 8, generator=generator())
    image[0, :, 0, 0], image[0, :, 0, 7] = 0, 1
    found = corrupted(image, n=400, padding=0, solarised=share, brightness=0.0, contrast=0.0)
    inverted = transforms.solarize(image, 0.5)
    both = torch.cat([inverted, inverted.flip(3)])
    same = ((found.unsqueeze(1) - both).abs().flatten(2).amax(2) < 1e-6).any(1).double().mean()
    assert float(same) == pytest.approx(share, abs=0.1 if share == 0.5 else 0.0)


def test_tones_are_torchvisions_at_some_factor() -> None:
    image = torch.rand(1, 1, 8, 8, generator=generator()) * 0.9 + 0.05
    image[0, 0, 0, 0], image[0, 0, 0, 1] = 0, 1  # the range is [0, 1]
    plain = {"padding": 0, "solarised": 0.0}
    for option, adjust in (
        ("brightness", transforms.adjust_brightness),
        ("contrast", transforms.adjust_contrast),
    ):
        rest = {"brightness": 0.0, "contrast": 0.0} | {option: 0.5}
        found = corrupted(image, n=30, **plain, **rest)
        factors = torch.linspace(0.5, 1.5, 1001)
        table = torch.cat([adjust(image, float(f)) for f in factors])
        table = torch.stack([table, table.flip(3)]).flatten(0, 1)
        nearest, index = (found.unsqueeze(1) - table).abs().flatten(2).amax(2).min(1)
        assert float(nearest.max()) < 2e-3
        assert float(factors[index % 1001].std()) > 0.15


def test_a_channel_of_one_value_stays() -> None:
    images = torch.cat([torch.rand(4, 1, 5, 5, generator=generator()), torch.full((4, 1, 5, 5), 3.0)], 1)
    found = corrupted(images, n=8)
    assert torch.equal(found[:, 1], torch.full((8, 5, 5), 3.0)) and bool(torch.isfinite(found).all())


def test_corrupted_is_for_images_and_needs_data() -> None:
    with pytest.raises(PosthocUQError, match=r"is for images.*\(8, 2\)"):
        Corrupted().observe(torch.zeros(8, 2), generator())
    with pytest.raises(PosthocUQError, match="has seen none"):
        Corrupted().draw(3, Batch((IMAGES,)), generator())
    with pytest.raises(PosthocUQError, match="solarised must be"):
        Corrupted(solarised=2.0)
    context = Corrupted(padding=3)
    context.observe(IMAGES, generator())
    assert context.fresh() is not context and context.identity() == Corrupted(padding=3).identity()


# Extremes


def test_function_values_that_no_weight_moves_have_a_finite_divergence() -> None:
    """As those of a black image in a network without biases: large, and without a gradient."""
    mean, variances = torch.zeros(1, 2, 3), torch.tensor([0.0, 4.0]).reshape(1, 2, 1).expand(1, 2, 3)
    variances = variances.clone().requires_grad_()
    divergence = marginal_kl(mean, variances, mean, 10.0).total.sum()
    divergence.backward()
    assert bool(torch.isfinite(divergence)) and float(divergence.detach()) > 30
    assert variances.grad is not None
    assert bool((variances.grad[0, 0] == 0).all()) and bool((variances.grad[0, 1] < 0).all())
