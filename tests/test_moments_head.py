"""The moments head: published numbers, dense covariances, Monte Carlo, real architectures, calibration."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from math import cos, sin
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from networks import without_training
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import Posterior
from posthoc_uq.core import Batch
from posthoc_uq.heads import MomentsPredictor
from posthoc_uq.layers import prepare
from posthoc_uq.likelihoods import resolve_likelihood
from posthoc_uq.moments import propagate
from posthoc_uq.posteriors import (
    Block,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    Evidence,
    InformationBlock,
    LowRankDiagonal,
)

METHODS = without_training()


def posterior_of(
    model: nn.Module, x: Tensor, block: Callable[[tuple[int, int, int]], Block], scale: float, prior: float
) -> Posterior:
    """A posterior of given blocks on every weighted layer that the model uses."""
    layers = {t.layer.name: t.layer for t in prepare(model, Batch((x,))).found if t.layer.rule.matrices}
    blocks = {name: block(layer.matrix_shape) for name, layer in layers.items()}
    members = {name: [name] for name in layers}
    likelihood = resolve_likelihood("classification")
    found = Posterior(
        "diag", layers, blocks, members, dict(model.named_parameters()), likelihood, Evidence(10)
    )
    return found.with_settings(scale=scale, prior_precision=prior)


def ones(shape: tuple[int, int, int]) -> DiagonalBlock:
    return DiagonalBlock(torch.ones(shape))


def fitted(
    net: nn.Module, method: str, prior: float, shape: tuple[int, ...], classes: int, **options: Any
) -> Posterior:
    generator = torch.Generator().manual_seed(3)
    kind = next(net.parameters()).dtype
    x = torch.randn(40, *shape, generator=generator, dtype=kind)
    y = torch.randint(0, classes, (40,), generator=generator)
    rank = {"rank": 20} if method == "inf" else {}
    return uq.fit(net, [(x, y)], method=method, prior_precision=prior, progress=False, **rank, **options)


def test_information_form_of_the_published_case() -> None:
    net = nn.Linear(3, 2, bias=False).double()
    block = InformationBlock(
        torch.tensor([[[0.6], [0.8], [0.0]]]).double(),
        torch.tensor([[[0.8], [0.6]]]).double(),
        torch.tensor([[[0.5]]]).double(),
        # the case gives the residual D; the block keeps the diagonal, of which the low-rank part is taken off
        torch.tensor([[[0.1, 0.2, 0.3], [0.2, 0.1, 0.4]]]).double()
        + 0.5 * torch.tensor([[0.64], [0.36]]).double() * torch.tensor([[0.36, 0.64, 0.0]]).double(),
        "clamp",
    )
    x = torch.tensor([[1.0, 2.0, -1.0]]).double()
    own = posterior_of(net, x, lambda _: block, 10.0, 1.0)
    expected = torch.tensor([[0.405594, 0.258741, 0.25], [0.309732, 0.405594, 0.2]])
    torch.testing.assert_close(own.variance()["weight"].float(), expected, atol=1e-6, rtol=0)
    row = MomentsPredictor(net, own).propagate(x)[1]
    assert row[0].tolist() == pytest.approx([1.354895, 1.943298], abs=1e-6)
    marginal = MomentsPredictor(net, own, weights="marginal").propagate(x)[1]
    assert marginal[0].tolist() == pytest.approx([1.690559, 2.132110], abs=1e-6)
    covariance = MomentsPredictor(net, own, cov="full").propagate(x)[2]
    assert covariance is not None and covariance[0, 0, 1].item() == pytest.approx(-0.655594, abs=1e-6)
    assert covariance[0].diagonal().tolist() == pytest.approx([1.354895, 1.943298], abs=1e-6)


def test_kronecker_form_of_the_published_case() -> None:
    c, s, d, t = cos(0.5), sin(0.5), cos(0.3), sin(0.3)
    block = EigenvalueCorrectedBlock(
        torch.tensor([[[c, -s, 0], [s, c, 0], [0, 0, 1]]]).double(),
        torch.tensor([[[d, -t], [t, d]]]).double(),
        torch.tensor([[[0.5, 0.2, 0.1], [0.3, 0.1, 0.05]]]).double(),
    )
    net = nn.Linear(3, 2, bias=False).double()
    x = torch.tensor([[1.0, 2.0, -1.0]]).double()
    own = posterior_of(net, x, lambda _: block, 10.0, 1.0)
    assert MomentsPredictor(net, own).propagate(x)[1][0].tolist() == pytest.approx(
        [1.667374, 2.260756], abs=1e-6
    )
    covariance = own.of_layer(next(iter(own.layers))).prepared(torch.float64, x.device, 2**20)
    spread = torch.tensor([[[0.1, 0.2, 0.3]]]).double()
    trace = covariance.output_variance(0 * spread, spread)
    assert trace[0, 0].tolist() == pytest.approx([0.237341, 0.311416], abs=1e-6)


def test_chain_of_the_published_case() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    values = {
        "0.weight": [[0.5, -1.0], [1.5, 0.25]],
        "0.bias": [0.1, -0.2],
        "2.weight": [[1.0, -0.5]],
        "2.bias": [0.3],
    }
    net.load_state_dict({name: torch.tensor(value).double() for name, value in values.items()})
    variances = {
        (1, 2, 3): [[[0.04, 0.01, 0.01], [0.02, 0.03, 0.02]]],
        (1, 1, 3): [[[0.05, 0.02, 0.01]]],
    }
    x = torch.tensor([[1.0, 2.0]]).double()
    own = posterior_of(
        net, x, lambda shape: DiagonalBlock(1 / torch.tensor(variances[shape]).double() - 1e-9), 1.0, 1e-9
    )
    mean, variance, _ = MomentsPredictor(net, own).propagate(x)
    assert [mean.item(), variance.item()] == pytest.approx([-0.6, 0.118], abs=1e-6)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"subnetwork"}))
def test_weight_variance_of_every_posterior_against_its_dense_covariance(method: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    own = fitted(net, method, 3.0, (3, 4), 5)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    size = 5 * 13
    units = torch.eye(size, dtype=torch.float64).reshape(size, 1, 5, 13)
    dense = own.quadratic({"1": units})
    inputs = torch.cat([x.flatten(1), torch.ones(6, 1)], dim=1).double()
    blocks = dense.reshape(5, 13, 5, 13)
    expected = torch.einsum("ri,oipj,rj->rop", inputs, blocks, inputs)
    covariance = MomentsPredictor(net, own, cov="full").propagate(x)[2]
    assert covariance is not None
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        MomentsPredictor(net, own).propagate(x)[1], expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-11
    )
    marginal = torch.einsum("ri,oi->ro", inputs.square(), dense.diagonal().reshape(5, 13))
    torch.testing.assert_close(
        MomentsPredictor(net, own, weights="marginal").propagate(x)[1], marginal, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"subnetwork"}))
def test_uncertain_inputs_meet_the_covariance_of_the_weights(method: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    own = fitted(net, method, 30.0, (4,), 3)
    x = torch.randn(3, 4, dtype=torch.float64)
    _, _, covariance = MomentsPredictor(net, own, cov="full").propagate(x)
    assert covariance is not None

    # tr(S_oo' (m m^T + C)) + W C W^T, from dense matrices
    def dense(layer: str, shape: tuple[int, int]) -> Tensor:
        units = torch.eye(shape[0] * shape[1], dtype=torch.float64).reshape(-1, 1, *shape)
        return own.quadratic({layer: units}).reshape(*shape, *shape)

    one = torch.ones(3, 1, dtype=torch.float64)
    first = torch.cat([x, one], 1)
    hidden = torch.einsum("ri,oipj,rj->rop", first, dense("0", (6, 5)), first)
    mean = torch.cat([net[0](x), one], 1).detach()
    moment = mean.unsqueeze(2) * mean.unsqueeze(1)
    moment[:, :6, :6] += hidden
    weight = net[1].weight.detach()
    expected = torch.einsum("oipj,rij->rop", dense("1", (3, 7)), moment) + weight @ hidden @ weight.T
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["diag", "kfac", "inf"])
def test_convolutions_use_marginal_variances(method: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 9, 3)
    ).double()
    own = fitted(net, method, 10.0, (2, 5, 5), 3, layers=["0", "1"])
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    mean, variance, _ = MomentsPredictor(net, own).propagate(x)
    torch.testing.assert_close(mean, net(x))
    s = own.variance()
    f, square = torch.nn.functional, {name: p.detach().square() for name, p in net.named_parameters()}
    first = f.conv2d(x.square(), s["0.weight"], s["0.bias"], padding=1)
    m = net[0](x)
    second = f.conv2d(first, square["1.weight"], groups=2) + f.conv2d(
        m.square() + first, s["1.weight"], s["1.bias"], groups=2
    )
    torch.testing.assert_close(variance, second.flatten(1) @ square["3.weight"].T, rtol=1e-9, atol=1e-12)


def trained(net: nn.Module) -> nn.Module:
    """A network after some steps on labels that another network gives."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(200):
        x = torch.randn(256, 20)
        loss = nn.functional.cross_entropy(net(x), teacher(x).argmax(1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def mlp(hidden: int, activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    sizes = [20, *[128] * hidden, 10]
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        parts += [nn.Linear(a, b), activation]
    return nn.Sequential(*parts[:-1])


def agreement(net: nn.Module, own: Posterior, draws: int, **options: Any) -> dict[str, float]:
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(9))
    mean, variance, _ = MomentsPredictor(net, own, **options).propagate(x)
    drawn = uq.wrap(net, own, n_samples=draws, seed=1).outputs(x)  # type: ignore[attr-defined]
    sd, sd_mc = variance.detach().sqrt().flatten(), drawn.std(0).flatten()
    return {
        "correlation": torch.corrcoef(torch.stack([sd, sd_mc]))[0, 1].item(),
        "error": (sd / sd_mc - 1).abs().mean().item(),
        "ratio": (sd / sd_mc).median().item(),
        "mean": ((mean - drawn.mean(0)).abs().flatten() / sd_mc).mean().item(),
    }


def relative(model: nn.Module, x: Tensor, rel: float) -> Posterior:
    """A diagonal posterior whose standard deviations are `rel` times those of each layer's weights."""
    found = posterior_of(model, x, ones, 1e-12, 1.0)
    parameters = dict(model.named_parameters())
    precisions = {
        name: float(1 / (rel * parameters[layer.weight].detach().std()) ** 2)
        for name, layer in found.layers.items()
    }
    return found.with_settings(prior_precision=precisions)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Tanh()])
def test_one_hidden_layer_agrees_with_monte_carlo(activation: nn.Module) -> None:
    net = mlp(1, activation)
    own = relative(net, torch.randn(2, 20), 0.1)
    found = agreement(net, own, 1000)
    assert found["correlation"] > 0.97 and found["error"] < 0.03 and found["mean"] < 0.06


@pytest.mark.parametrize("hidden", [2, 4])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
@pytest.mark.covering(1)
def test_full_covariance_agrees_with_monte_carlo(hidden: int, activation: nn.Module) -> None:
    net = mlp(hidden, activation)
    own = relative(net, torch.randn(2, 20), 0.1)
    found = agreement(net, own, 1000, cov="full")
    assert found["correlation"] > 0.95 and found["error"] < 0.03


def test_the_bias_of_independent_activations_is_the_documented_one() -> None:
    net = trained(mlp(2, nn.ReLU()))
    found = agreement(net, relative(net, torch.randn(2, 20), 0.1), 1000)
    assert 0.6 < found["ratio"] < 0.9 and found["correlation"] > 0.9


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "densenet121": (torchvision.models.densenet121, 64),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, 64),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64), 64),
    "convnext_atto": (lambda: timm.create_model("convnext_atto"), 64),
    "deeplabv3_mobilenet_v3": (
        lambda: Outputs(
            torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
        ),
        64,
    ),
    "mobilevit": (lambda: timm.create_model("mobilevit_xs"), 64),
    "timm swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=56), 56),
    "resnet18d": (lambda: timm.create_model("resnet18d"), 64),
}


class Outputs(nn.Module):
    """A segmentation network's main output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs: Mapping[str, Tensor] = self.network(x)
        return outputs["out"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            each,
            marks=[pytest.mark.study]
            * (
                each
                in (
                    "timm swin",
                    "densenet121",
                    "resnet18d",
                )
            ),
        )
        for each in ARCHITECTURES
    ],
)
def test_without_variance_the_plain_network_is_left(name: str) -> None:
    build, size = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():  # some heads start at zero
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        plain = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # every fitted layer is used
            mean, variance, _ = MomentsPredictor(model, posterior_of(model, x, ones, 1e-30, 1e30)).propagate(
                x
            )
            uncertain = MomentsPredictor(model, posterior_of(model, x, ones, 1.0, 1e6)).propagate(x)
    assert float((mean - plain).abs().max() / plain.abs().max()) < 1e-5
    assert float(variance.max()) < 1e-20
    assert bool((uncertain[1] > 0).all()) and bool(torch.isfinite(uncertain[1]).all())


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 4),
    ).eval()


def test_gradients_by_the_posteriors_variances() -> None:
    net = small_net().double()
    predictor = MomentsPredictor(net, fitted(net, "diag", 50.0, (2, 8, 8), 4), weights="marginal")
    layer = predictor.noises[1]
    weight = net.get_submodule(layer.layer).weight.detach()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    start = layer.variances.detach().clone()

    def loss(variances: Tensor) -> Tensor:
        layer.variances, layer.summed = variances, torch.cat([weight.square() + variances, variances], dim=1)
        mean, variance, _ = predictor.propagate(x)
        return mean.sum() + variance.log().sum()

    variances = start.clone().requires_grad_()
    loss(variances).backward()
    gradient = variances.grad
    assert gradient is not None
    for index in ((0, 0, 0, 0), (3, 2, 1, 2), (5, 5, 2, 2)):
        step = torch.zeros_like(start)
        step[index] = 1e-6
        difference = (loss(start + step) - loss(start - step)) / 2e-6
        assert gradient[index].item() == pytest.approx(difference.item(), rel=1e-4)


def test_inputs_get_gradients() -> None:
    net = small_net()
    predictor = uq.wrap(net, fitted(net, "inf", 50.0, (2, 8, 8), 4), head="moments")
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    predictor(x).logits_variance.sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None and bool(torch.isfinite(x.grad).all()) and bool(x.grad.any())


def test_calibration_mends_the_scale_and_travels_with_the_posterior(tmp_path: Path) -> None:
    net = trained(mlp(3, nn.ReLU()))
    own = fitted(net, "diag", 2000.0, (20,), 10)
    predictor = MomentsPredictor(net, own)
    assert "not calibrated" in repr(predictor)
    x = torch.randn(200, 20)
    raw = predictor.functional_variance(x[:5])
    scaled = predictor.fit_scale([x[:100], x[100:]], n_mc=200, progress=False)
    found = scaled.scale_correction
    assert found is not None and predictor.scale_correction is None and not own.history.calibration
    assert found.alpha > 0.1 and found.residual < 0.5 * found.before
    torch.testing.assert_close(scaled.functional_variance(x[:5]), found.apply(raw))
    assert "error left" in repr(scaled)
    uq.save(scaled.posterior, tmp_path / "p.h5")
    again = uq.load(tmp_path / "p.h5", net)
    kept = uq.wrap(net, again, head="moments")
    torch.testing.assert_close(kept.functional_variance(x[:5]), found.apply(raw))  # type: ignore[operator]
    assert uq.wrap(net, again, head="moments", relu="exact").scale_correction is None
    assert "error left" in str(again.report())
    again = again.with_settings(prior_precision=3000.0)
    with pytest.warns(UserWarning, match="Fit it again"):
        assert uq.wrap(net, again, head="moments").scale_correction is None
    sloped = predictor.fit_scale([x], n_mc=200, slope=True, progress=False).scale_correction
    assert sloped is not None and sloped.beta != 1.0 and sloped.residual < 0.6 * sloped.before


def test_layers_that_the_pass_does_not_see_are_named() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.nn.functional.linear(x, self.first.weight * 1.0, self.first.bias))

    net = Normed()
    own = posterior_of(_plain(net), torch.randn(2, 4), ones, 1.0, 1e3)
    predictor = MomentsPredictor(net, own)
    with pytest.warns(UserWarning, match="first"):
        predictor(torch.randn(2, 4))


def _plain(net: Any) -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net.first, net.second

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    return Plain()


def test_covariances_reach_probabilities_and_linear_maps() -> None:
    net = mlp(2, nn.ReLU())
    own = fitted(net, "kfac", 2000.0, (20,), 10)
    x = torch.randn(30, 20)
    full = MomentsPredictor(net, own, cov="full", link="mc", n_draws=2000)
    outputs = uq.wrap(net, own, n_samples=2000).outputs(x)  # type: ignore[attr-defined]
    found = full(x)
    torch.testing.assert_close(found.probs, outputs.softmax(2).mean(0), atol=0.03, rtol=0)  # type: ignore[union-attr]
    assert bool((found.mutual_information() >= 0).all())  # type: ignore[union-attr]
    logits, _, covariance = full.propagate(x)
    assert covariance is not None
    map_of = torch.eye(10)[:3] - torch.eye(10)[3:6]
    mean, variance = logits @ map_of.T, (map_of @ covariance @ map_of.T).diagonal(dim1=1, dim2=2)
    difference = outputs[:, :, :3] - outputs[:, :, 3:6]
    torch.testing.assert_close(mean, difference.mean(0), atol=0.02, rtol=0.05)
    assert (variance / difference.var(0)).mean().item() == pytest.approx(1, abs=0.05)


def test_batch_norm_keeps_covariances() -> None:
    net = trained(
        nn.Sequential(
            nn.Linear(20, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.Tanh(),
            nn.Linear(64, 10),
        )
    ).eval()
    own = relative(net, torch.randn(2, 20), 0.1)
    assert agreement(net, own, 1000, cov="full")["error"] < 0.04 < agreement(net, own, 1000)["error"]


def test_full_covariance_of_the_connected_end_of_a_cnn() -> None:
    torch.manual_seed(0)
    end = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), end
    ).eval()
    own = fitted(net, "diag", 200.0, (1, 9, 9), 5, layers=["4.0"])
    x = torch.randn(32, 1, 9, 9)
    drawn = uq.wrap(net, own, n_samples=1000, seed=1).outputs(x).std(0)  # type: ignore[attr-defined]

    def error(cov: str) -> float:
        return (MomentsPredictor(net, own, cov=cov).propagate(x)[1].sqrt() / drawn - 1).abs().mean().item()

    assert error("full") < 0.04 < error("diag")


def test_a_budget_cuts_batches_of_covariances(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp(2, nn.ReLU())
    own = fitted(net, "diag", 2000.0, (20,), 10)
    x = torch.randn(7, 20)
    expected = MomentsPredictor(net, own, cov="full")(x)
    monkeypatch.setattr("posthoc_uq.heads.moments.TEMPORARY_BYTES", 3 * 8 * 4 * 128**2)
    passes: list[Any] = []

    def counted(*args: Any) -> Any:
        passes.append(propagate(*args))
        return passes[-1]

    monkeypatch.setattr("posthoc_uq.heads.moments.propagate", counted)
    found = MomentsPredictor(net, own, cov="full")(x)
    assert [len(part.mean) for part in passes] == [3, 3, 1]
    torch.testing.assert_close(found.probs, expected.probs)  # type: ignore[union-attr]


def test_attention_modules_and_encoders() -> None:
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(1))

    net = Encoder().eval()
    own = fitted(net, "diag", 2000.0, (5, 16), 3)
    x = torch.randn(8, 5, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, variance, _ = MomentsPredictor(net, own).propagate(x)
    torch.testing.assert_close(mean, net(x), atol=0.05, rtol=0.05)
    drawn = uq.wrap(net, own, n_samples=500).outputs(x)  # type: ignore[attr-defined]
    assert 0.4 < (variance.sqrt() / drawn.std(0)).median().item() < 1.4


def test_a_predictor_of_other_settings() -> None:
    net = trained(mlp(2, nn.ReLU()))
    own = fitted(net, "diag", 100.0, (20,), 10)
    x = torch.randn(20, 20)
    predictor = MomentsPredictor(net, own)
    before = predictor.functional_variance(x)
    own = own.with_settings(prior_precision=5000.0)
    other = predictor.with_posterior(own)
    after = other.functional_variance(x)
    assert (after < before).all() and torch.equal(predictor.functional_variance(x), before)
    torch.testing.assert_close(after, MomentsPredictor(net, own).functional_variance(x))
    scaled = other.fit_scale([x], n_mc=50, progress=False)
    found = scaled.scale_correction
    assert found is not None
    torch.testing.assert_close(scaled.functional_variance(x), found.apply(after))


def test_calibration_of_outputs_without_a_dimension() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(1)

    net, x = Flat(), torch.randn(30, 4)
    own = uq.fit(
        net, [(x, x[:, 0])], likelihood="regression", noise_variance=0.1, prior_precision=5.0, progress=False
    )
    found = uq.wrap(net, own, head="moments").fit_scale([x], n_mc=400, progress=False).scale_correction
    assert found is not None and found.residual < 0.1 and abs(found.alpha) < 0.1


def test_padding_does_not_move_the_calibration() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(12, 4, 3), torch.randint(3, (12, 4))
    likelihood = uq.Categorical(class_dim=-1)
    own = uq.fit(net, [(x, y)], "diag", likelihood=likelihood, prior_precision=1.0, progress=False)
    predictor = uq.wrap(net, own, head="moments")

    def fitted_scale(batch: Any) -> Any:
        return predictor.fit_scale([batch], n_mc=20, progress=False).scale_correction

    found = fitted_scale((x, y))
    longer = torch.cat([x, torch.full((12, 5, 3), 30.0)], 1), torch.cat([y, torch.full((12, 5), -100)], 1)
    padded = fitted_scale(longer)
    assert (padded.alpha, padded.residual) == pytest.approx((found.alpha, found.residual), rel=1e-5)
    counted = fitted_scale(longer[0])  # nothing says what is padding
    assert abs(counted.alpha - found.alpha) > 0.01


# What a wrap computes, and what it keeps


def counted_roots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every computation of the roots of an INF layer's rows appends."""
    calls: list[int] = []
    own = LowRankDiagonal._inverse_columns

    def counted(self: LowRankDiagonal, *args: Any) -> Tensor:
        calls.append(1)
        return own(self, *args)

    monkeypatch.setattr(LowRankDiagonal, "_inverse_columns", counted)
    return calls


def inf_of_three_layers(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, uq.Posterior, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 5)
    ).to(dtype)
    x = torch.randn(60, 2, 4, 4, dtype=dtype)
    y = torch.randint(0, 5, (60,))
    posterior = uq.fit(model, [(x, y)], uq.INF(rank=12, dtype=dtype), prior_precision=2.0, progress=False)
    return model, posterior, x


def test_a_wrap_computes_the_rows_of_a_layer_once_and_a_second_wrap_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, posterior, x = inf_of_three_layers()
    calls = counted_roots(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = uq.wrap(model, posterior, head="moments")(x).probs
        assert len(calls) == len(posterior.layers) == 3
        second = uq.wrap(model, posterior, head="moments")(x).probs
        assert len(calls) == 3 and torch.equal(first, second)
        posterior = posterior.with_settings(prior_precision=3.0)
        other = uq.wrap(model, posterior, head="moments")(x).probs
        assert len(calls) == 6 and not torch.equal(first, other)
        posterior = posterior.with_settings(prior_precision=2.0)
        assert torch.equal(uq.wrap(model, posterior, head="moments")(x).probs, first)


def test_what_a_wrap_keeps_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("KEPT_BYTES", "COVARIANCE_BYTES"):
        monkeypatch.setattr(f"posthoc_uq.posteriors.posterior.{limit}", 0)
    model, posterior, _ = inf_of_three_layers()
    calls = counted_roots(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            uq.wrap(model, posterior, head="moments")
    assert len(calls) > 2 * len(posterior.layers)


@pytest.mark.parametrize("cov", ["diag", "full"])
@pytest.mark.parametrize("method", ["inf", "kfac", "full"])
def test_gradients_after_a_first_call_in_inference_mode(method: str, cov: str) -> None:
    """What a head keeps for all calls is made outside of the first one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval(), torch.randn(12, 4)
    posterior = uq.fit(model, [(x, torch.arange(12) % 3)], method, prior_precision=2.0, progress=False)
    predictor = MomentsPredictor(model, posterior, cov=cov, novelty=False)
    with torch.inference_mode():
        expected = predictor.functional_variance(x)
    inputs = x.clone().requires_grad_()
    found = predictor.functional_variance(inputs)
    torch.testing.assert_close(found.detach(), expected.clone())
    (gradient,) = torch.autograd.grad(found.sum(), inputs)
    assert bool(gradient.isfinite().all()) and bool(gradient.abs().sum() > 0)


def test_what_is_kept_is_the_callers_to_change() -> None:
    _, posterior, _ = inf_of_three_layers()
    before = {name: variance.clone() for name, variance in posterior.variance().items()}
    for variance in posterior.variance().values():
        variance.zero_()
    torch.testing.assert_close(posterior.variance(), before)
