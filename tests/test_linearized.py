"""The linearised head against dense Jacobians and dense covariances, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from posterior_helpers import blocks_of, dense_covariance, dense_jacobian
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posthoc_uq as uq
from posthoc_uq import Posterior
from posthoc_uq.core import Batch
from posthoc_uq.heads import LinearizedPredictor
from posthoc_uq.heads.jacobians import WeightCovariance
from posthoc_uq.heads.linearization import function_draws
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Bernoulli, Categorical
from posthoc_uq.posteriors import DenseBlock, DiagonalBlock, Evidence

FAMILIES: list[dict[str, Any]] = [
    {"method": "diag"},
    {"method": "kfac"},
    {"method": "inf", "rank": 6},
    {"method": "inf", "rank": 0.9},
    {"method": "full"},
]


def family_name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


class Shared(nn.Module):
    """One layer used twice, and a weight used in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.shared(hidden)))


class SharedConvolution(nn.Module):
    """A convolution on maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.first(x))))
        hidden = torch.tanh(self.shared(nn.functional.avg_pool2d(hidden, 2)))
        return self.last(hidden.mean((2, 3)))


class Attention(nn.Module):
    """Tokens through multi-head attention, the samples in the first or second dimension."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.batch_first else x.transpose(0, 1)
        return self.last(self.block(tokens).mean(1 if self.batch_first else 0))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)
    )


def cnn() -> nn.Module:
    """Stride, dilation, groups, depthwise, pointwise, string padding."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2, padding=2, dilation=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, groups=6, padding="same"),
        nn.Tanh(),
        nn.Conv2d(6, 4, 1, stride=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def cnn1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Conv1d(3, 4, 1), nn.Flatten()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (2, 7, 7)),
    "cnn1d": (cnn1d, (2, 6)),
    "shared": (Shared, (4,)),
    "shared convolution": (SharedConvolution, (1, 4, 4)),
    "attention": (lambda: Attention(True), (3, 4)),
    "attention, tokens first": (lambda: Attention(False), (3, 4)),
}


def build(name: str, samples: int = 5, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().to(dtype).eval()
        return model, torch.randn(samples, *shape, dtype=dtype)


def fitted(model: nn.Module, x: Tensor, **options: Any) -> Posterior:
    likelihood = options.pop("likelihood", "classification")
    return uq.fit(
        model, [x], likelihood=likelihood, prior_precision=1.3, progress=False, fisher="exact", **options
    )


def setting(name: str, options: dict[str, Any], samples: int = 5) -> tuple[nn.Module, Posterior, Tensor]:
    """A model, a posterior with a prior precision for every layer, and inputs that it was not fitted on."""
    model, x = build(name, samples + 8)
    posterior = fitted(model, x[samples:], **options)
    by_layer = {layer: 0.5 + 0.4 * i for i, layer in enumerate(posterior.layers)}
    posterior = posterior.with_settings(scale=40.0, prior_precision=by_layer)
    if "residual_weight" in posterior.tunable:
        posterior = posterior.with_settings(residual_weight=0.7)
    return model, posterior, x[:samples]


def variances_of(joint: Tensor, samples: int) -> Tensor:
    return joint.diagonal().reshape(samples, -1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", FAMILIES, ids=family_name)
def test_equals_dense_jacobians_and_covariances(name: str, options: dict[str, Any]) -> None:
    model, posterior, x = setting(name, options)
    expected = dense_covariance(model, posterior, x)
    predictor = LinearizedPredictor(model, posterior)
    size = {"atol": 1e-8 * float(expected.abs().max()), "rtol": 1e-8}
    torch.testing.assert_close(predictor.functional_covariance(x, joint=True), expected, **size)
    torch.testing.assert_close(predictor.functional_covariance(x), blocks_of(expected, len(x)), **size)
    torch.testing.assert_close(predictor.functional_variance(x), variances_of(expected, len(x)), **size)
    torch.testing.assert_close(predictor.functional_mean(x), model(x).detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp", "cnn1d", "shared", "attention, tokens first"])
@pytest.mark.parametrize("options", FAMILIES, ids=family_name)
@pytest.mark.covering(1)
def test_the_closed_form_of_the_last_layer(name: str, options: dict[str, Any]) -> None:
    model, posterior, x = setting(name, options | {"layers": "last"})
    expected = dense_covariance(model, posterior, x)
    size = {"atol": 1e-10 * float(expected.abs().max()), "rtol": 1e-9}
    for engine in ("auto", "exact"):
        predictor = LinearizedPredictor(model, posterior, engine=engine)
        assert (predictor.closed_form(x) is not None) == (engine == "auto")
        torch.testing.assert_close(predictor.functional_covariance(x, joint=True), expected, **size)
        torch.testing.assert_close(predictor.functional_covariance(x), blocks_of(expected, len(x)), **size)
        torch.testing.assert_close(predictor.functional_variance(x), variances_of(expected, len(x)), **size)


@pytest.mark.parametrize(
    ("scale", "rank"), [(1.0, 4), (1e6, 4), (1e6, 1000)], ids=["subtracted", "cancelling", "roots"]
)
def test_variances_of_many_rows(scale: float, rank: int) -> None:
    """What a last layer's low rank takes is subtracted, and by triangular roots where most cancels or the rank is
    large.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
        data, x = (torch.randn(40, 4), torch.randn(40, 3)), torch.randn(300, 4)
    options: dict[str, Any] = {"layers": "last", "likelihood": "regression", "noise_variance": 1.0}
    posterior = uq.fit(model, [data], "inf", rank=rank, prior_precision=1.0, progress=False, **options)
    posterior = posterior.with_settings(scale=scale)
    rows = nn.functional.pad(model[:2](x).detach(), (0, 1), value=1.0)
    layer: Any = WeightCovariance(posterior, torch.float32, x.device, 2**12).of_layer("2")
    assert (2 * layer.width > 13) == (rank == 1000)
    if scale > 1:  # some rows along the direction that the data settled best, for the first output
        deviations = layer.weights[0, 0].sqrt()
        share = layer.subtracted_rows.reshape(3, -1, 13)[0] / deviations
        rows[::3] = torch.linalg.svd(share).Vh[0] / deviations
    exact = WeightCovariance(posterior, torch.float64, x.device, 2**20).of_layer("2")
    truth = exact.output_variance(rows.double().unsqueeze(1)).squeeze(1)
    left = truth / (rows.double().square() @ layer.weights[0].double().T)
    assert bool((left < 0.01).any()) == (scale > 1)
    torch.testing.assert_close(layer.variances_of(rows).double(), truth, rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", FAMILIES, ids=family_name)
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
@pytest.mark.covering(1)
def test_small_budgets_change_nothing(name: str, options: dict[str, Any]) -> None:
    """Batches cut in two, outputs one by one, Jacobians row by row."""
    model, posterior, x = setting(name, options)
    expected = dense_covariance(model, posterior, x)
    likely = LinearizedPredictor(model, posterior, outputs=2)(x)
    for budget in (1, 3000):
        of_two = LinearizedPredictor(model, posterior, outputs=2, memory_budget=budget)(x)
        torch.testing.assert_close(of_two.probs, likely.probs)
        torch.testing.assert_close(of_two.epistemic_variance, likely.epistemic_variance)
        small = LinearizedPredictor(model, posterior, memory_budget=budget)
        torch.testing.assert_close(small.functional_covariance(x), blocks_of(expected, len(x)))
        torch.testing.assert_close(small.functional_variance(x), variances_of(expected, len(x)))
        torch.testing.assert_close(small.functional_covariance(x, joint=True), expected)


class _Largest(TorchDispatchMode):
    """The most numbers that any operation gave back."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, min(tensor.numel(), storage))
        return result


@pytest.mark.parametrize("wanted", ["variance", "covariance"])
def test_jacobians_of_a_batch_never_exist(wanted: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.Tanh(),
            nn.Conv2d(16, 16, 3),
            nn.Flatten(),
            nn.Linear(16 * 16, 64),
            nn.Tanh(),
            nn.Linear(64, 10),
        )
        x = torch.randn(16, 1, 8, 8)
    posterior = uq.fit(model, [x], "inf", prior_precision=1.0, rank=5, progress=False)
    predictor = LinearizedPredictor(model, posterior, memory_budget=2**18)
    predictor(x)
    jacobian = 16 * 10 * posterior.layers["2"].parameters
    with _Largest() as largest:
        if wanted == "variance":
            predictor.functional_variance(x)
        else:
            predictor.functional_covariance(x)
    # what is largest are the gradients of all outputs at the first layer
    assert largest.numbers <= 16 * 10 * 16 * 36 < jacobian / 4


def net_of_the_table() -> tuple[nn.Module, Tensor]:
    """The 2-2-2 tanh network of the specification."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.5, -1.0], [1.5, 0.25]]))
        model[0].bias.copy_(torch.tensor([0.1, -0.2]))
        model[2].weight.copy_(torch.tensor([[1.0, -0.5], [0.2, 0.8]]))
        model[2].bias.copy_(torch.tensor([0.3, 0.0]))
    return model, torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, -1.0]], dtype=torch.float64)


def layers_of(model: nn.Module, names: list[str]) -> dict[str, Layer]:
    modules = dict(model.named_modules())
    found: dict[str, Layer] = {}
    for name in names:
        outputs, inputs = modules[name].weight.shape
        found[name] = Layer(
            name, "linear", f"{name}.weight", f"{name}.bias", 1, outputs, inputs + 1, (outputs, inputs)
        )
    return found


def isotropic(model: nn.Module, names: list[str], variance: float) -> Posterior:
    layers = layers_of(model, names)
    blocks = {
        name: DiagonalBlock(torch.zeros(layer.matrix_shape, dtype=torch.float64))
        for name, layer in layers.items()
    }
    mean = {name: p.detach() for name, p in model.named_parameters()}
    posterior = Posterior(
        "diag", layers, blocks, {name: [name] for name in names}, mean, Categorical(), Evidence(3)
    )
    return posterior.with_settings(prior_precision=1 / variance)


def parts(covariance: Tensor) -> Tensor:
    """``v0, c01, v1`` of every sample."""
    return torch.stack([covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]], dim=1)


def near(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1.1e-6)


def test_the_table_of_the_specification() -> None:
    model, x = net_of_the_table()
    near(model(x).detach(), [[-1.058755, 0.580374], [0.042611, -0.877514], [1.311449, -0.177419]])
    everywhere = LinearizedPredictor(model, isotropic(model, ["0", "2"], 0.1))
    near(
        parts(everywhere.functional_covariance(x)),
        [[0.297671, 0.003033, 0.273268], [0.290289, 0.008433, 0.241258], [0.241469, -0.048894, 0.269400]],
    )
    for engine in ("exact", "auto"):
        last = LinearizedPredictor(model, isotropic(model, ["2"], 0.1), engine=engine)
        near(
            parts(last.functional_covariance(x)),
            [[0.268029, 0.0, 0.268029], [0.235547, 0.0, 0.235547], [0.181880, 0.0, 0.181880]],
        )


def test_the_laplace_posterior_of_the_table() -> None:
    """Full Gauss-Newton on the three points: covariances, and the probabilities that follow by probit."""
    model, x = net_of_the_table()
    posterior = uq.fit(
        model, [x], method="full", fisher="exact", prior_precision=1.0, dtype=torch.float64, progress=False
    )
    fisher = next(iter(posterior.blocks.values()))
    assert isinstance(fisher, DenseBlock)
    precision = 3 * fisher.fisher + torch.eye(12, dtype=torch.float64)
    assert float(torch.linalg.inv(precision).trace()) == pytest.approx(10.628330, abs=1e-6)
    predictor = LinearizedPredictor(model, posterior, link="probit")
    covariance = predictor.functional_covariance(x)
    near(
        parts(covariance),
        [[2.280005, 0.667668, 2.149537], [2.083934, 0.766363, 1.843489], [1.721979, 0.261070, 1.879238]],
    )
    # two classes: by the variance of the difference of their logits
    found = predictor(x)
    near(found.probs[:, :1], [[0.249491], [0.659382], [0.731395]])
    torch.testing.assert_close(found.logits_variance, covariance.diagonal(dim1=1, dim2=2))
    difference = found.logits_mean[:, 0] - found.logits_mean[:, 1]
    near(difference.unsqueeze(1), [[-1.639129], [0.920124], [1.488868]])


def test_a_linear_model_has_the_analytic_variance() -> None:
    """Bayesian linear regression: ``x^T (X^T X / noise + tau)^-1 x``, bias included."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        x, new = torch.randn(30, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    posterior = uq.fit(
        model,
        [(x, torch.zeros(30, 1, dtype=torch.float64))],
        method="full",
        likelihood="regression",
        fisher="exact",
        noise_variance=0.3,
        prior_precision=2.0,
        dtype=torch.float64,
        progress=False,
    )
    rows, wanted = nn.functional.pad(x, (0, 1), value=1.0), nn.functional.pad(new, (0, 1), value=1.0)
    sigma = torch.linalg.inv(rows.T @ rows / 0.3 + 2 * torch.eye(4, dtype=torch.float64))
    predictor = LinearizedPredictor(model, posterior)
    expected = wanted @ sigma @ wanted.T
    torch.testing.assert_close(predictor.functional_covariance(new, joint=True), expected)
    prediction = predictor(new)
    torch.testing.assert_close(prediction.epistemic_variance, expected.diagonal().unsqueeze(1))
    torch.testing.assert_close(prediction.noise_variance, torch.full((4, 1), 0.3, dtype=torch.float64))
    # and equals what sampling says: the model is its own linearisation
    draws = uq.wrap(model, posterior, n_samples=2000).outputs(new)
    torch.testing.assert_close(draws.var(0), expected.diagonal().unsqueeze(1), rtol=0.2, atol=0)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_without_uncertainty_it_is_the_plain_network(link: str) -> None:
    model, posterior, x = setting("cnn", {"method": "inf", "rank": 6})
    posterior = posterior.with_settings(prior_precision=1e12)
    prediction = LinearizedPredictor(model, posterior, link=link)(x)
    torch.testing.assert_close(prediction.probs, model(x).detach().softmax(1), atol=1e-5, rtol=0)


def many_classes(**options: Any) -> tuple[nn.Module, Posterior, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 30)).double()
        x = torch.randn(12, 1, 4, 4, dtype=torch.float64)
    return model, fitted(model, x[4:], rank=8, **{"method": "inf"} | options), x[:4]


@pytest.mark.parametrize("outputs, number", [("auto", 10), ("topk", 10), (3, 3), (5, 5), (99, 30)])
def test_the_classes_with_the_largest_logits(outputs: str | int, number: int) -> None:
    model, posterior, x = many_classes()
    whole = LinearizedPredictor(model, posterior, outputs="all")
    some = LinearizedPredictor(model, posterior, outputs=outputs)
    full, found = whole.functional_variance(x), some.functional_variance(x)
    top = model(x).topk(number).indices
    torch.testing.assert_close(found.gather(1, top), full.gather(1, top))
    last = LinearizedPredictor(model, fitted_last(posterior))
    rest = torch.ones_like(full, dtype=torch.bool).scatter(1, top, False)
    torch.testing.assert_close(found[rest], last.functional_variance(x)[rest])
    assert bool((found[rest] < full[rest]).all())
    covariance = whole.functional_covariance(x)
    picked = covariance.gather(1, top.unsqueeze(2).expand(-1, -1, 30))
    picked = picked.gather(2, top.unsqueeze(1).expand(-1, number, -1))
    if number < 30:
        torch.testing.assert_close(some.functional_covariance(x), picked)
        joint = blocks_of(some.functional_covariance(x, joint=True), len(x))
        torch.testing.assert_close(joint, picked)
    else:
        torch.testing.assert_close(some.functional_covariance(x), covariance)


def fitted_last(posterior: Posterior) -> Posterior:
    """The same posterior of the last layer alone."""
    name = list(posterior.layers)[-1]
    last = Posterior(
        posterior.method,
        {name: posterior.layers[name]},
        {name: posterior.blocks[name]},
        {name: [name]},
        posterior.mean,
        posterior.likelihood,
        posterior.evidence,
    )
    return last.with_settings(prior_precision=posterior.layer_prior(name))


def test_classes_of_which_nothing_is_known() -> None:
    """Without the last layer in the posterior, the others get the mean of those that were looked at."""
    model, posterior, x = many_classes(layers=["0"])
    full = LinearizedPredictor(model, posterior, outputs="all").functional_variance(x)
    found = LinearizedPredictor(model, posterior, outputs=4).functional_variance(x)
    top = model(x).topk(4).indices
    expected = full.gather(1, top).mean(1, keepdim=True).expand(-1, 30).scatter(1, top, full.gather(1, top))
    torch.testing.assert_close(found, expected)


def divergence(probs: Tensor, log_probs: Tensor) -> Tensor:
    return (torch.special.xlogy(probs, probs) - probs * log_probs).sum(1)


def drawn_probs(mean: Tensor, covariance: Tensor) -> Tensor:
    """By many draws of the logits."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    normals = torch.randn(20_000, mean.shape[1], generator=torch.Generator().manual_seed(5)).double()
    return (mean + torch.einsum("bij,sj->sbi", root, normals)).softmax(-1).mean(0)


@pytest.mark.parametrize("layers", ["all", ["0"]])
def test_probabilities_from_the_top_classes(layers: Any) -> None:
    """Draws follow the covariance of the centred logits at the top, and the centred variances of the others."""
    model, posterior, x = many_classes(layers=layers)
    posterior = posterior.with_settings(prior_precision=0.2)
    mean, number = model(x).detach(), 5
    predictor = LinearizedPredictor(model, posterior, outputs=number)
    found = predictor(x)
    torch.testing.assert_close(found.logits_variance, predictor.functional_variance(x))
    centring = torch.eye(30, dtype=torch.float64) - 1 / 30

    def centred(own: Posterior) -> Tensor:
        whole = LinearizedPredictor(model, own, outputs="all").functional_covariance(x)
        return centring @ whole @ centring

    covariance, top = centred(posterior), mean.topk(number).indices
    variance = covariance.diagonal(dim1=1, dim2=2)
    if layers == "all":
        variance = centred(fitted_last(posterior)).diagonal(dim1=1, dim2=2)
    else:
        variance = variance.gather(1, top).mean(1, keepdim=True).expand(-1, 30)
    expected = torch.diag_embed(variance)
    for sample, rows in enumerate(top):
        expected[sample, rows.unsqueeze(1), rows] = covariance[sample, rows.unsqueeze(1), rows]
    assert found.log_probs is not None
    assert float(divergence(drawn_probs(mean, expected), found.log_probs).max()) < 0.01
    one = torch.cat([predictor(x[i : i + 1]).probs for i in range(len(x))])
    torch.testing.assert_close(one, found.probs)


def test_many_classes_by_forward_derivatives() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 60)).double()
        x = torch.randn(10, 3, dtype=torch.float64)
    posterior = fitted(model, x, method="kfac")
    predictor = LinearizedPredictor(model, posterior, engine="jvp", n_probes=40)
    found = predictor(x[:3])
    expected = drawn_probs(model(x[:3]).detach(), predictor_covariance(predictor, x[:3]))
    assert found.log_probs is not None
    assert float(divergence(expected, found.log_probs).max()) < 0.01


def predictor_covariance(predictor: LinearizedPredictor, x: Tensor) -> Tensor:
    """Of all outputs, from draws of the function that it keeps."""
    drawn = predictor.functional_samples(x, n_samples=40, generator=torch.Generator().manual_seed(0))
    deviations = drawn - predictor.functional_mean(x)
    return torch.einsum("rsc,rsd->scd", deviations, deviations) / len(deviations)


def test_classes_under_a_full_posterior() -> None:
    """The last layer's own share of a covariance that correlates layers."""
    model, x = build("mlp", 9)
    posterior = fitted(model, x, method="full")
    predictor = LinearizedPredictor(model, posterior, outputs=1)
    covariance = next(iter(posterior.blocks.values())).dense(posterior.scale)[0]
    covariance = torch.linalg.inv(covariance + 1.3 * torch.eye(len(covariance), dtype=torch.float64))
    own = covariance[-18:, -18:].reshape(3, 6, 3, 6)
    rows = nn.functional.pad(model[:4](x).detach(), (0, 1), value=1.0)
    expected = torch.stack([torch.stack([r @ own[o, :, o] @ r for o in range(3)]) for r in rows])
    full = variances_of(dense_covariance(model, posterior, x), 9)
    top = model(x).argmax(1, keepdim=True)
    torch.testing.assert_close(
        predictor.functional_variance(x), expected.scatter(1, top, full.gather(1, top))
    )


@pytest.mark.parametrize("name", ["cnn", "shared", "attention"])
def test_forward_derivatives(name: str) -> None:
    """``J delta`` against the dense Jacobian; fused attention has no forward derivative of its own."""
    model, posterior, x = setting(name, {"method": "diag"})
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    deviations = {key: draw - posterior.mean[key] for key, draw in draws.items()}
    outputs, found = function_draws(model, Batch((x,)), deviations)
    torch.testing.assert_close(outputs, model(x).detach(), rtol=0, atol=1e-13)
    jacobian = dense_jacobian(model, posterior, x)
    expected = torch.zeros(3, outputs.numel(), dtype=torch.float64)
    for layer_name, layer in posterior.layers.items():
        bias = deviations[layer.bias] if layer.bias is not None else None
        expected += layer.to_matrix(deviations[layer.weight], bias).flatten(1) @ jacobian[layer_name].T
    torch.testing.assert_close(found.flatten(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [FAMILIES[2], pytest.param(FAMILIES[3], marks=pytest.mark.study)], ids=family_name
)
def test_sampling_in_function_space_agrees(options: dict[str, Any]) -> None:
    model, posterior, x = setting("shared", options)
    exact = LinearizedPredictor(model, posterior)
    drawn = LinearizedPredictor(model, posterior, engine="jvp", n_probes=700)
    size = exact.functional_variance(x).sqrt()
    error = drawn.functional_covariance(x) - exact.functional_covariance(x)
    assert float((error / (size.unsqueeze(2) * size.unsqueeze(1))).abs().max()) < 5 * sqrt(2 / 1500)
    few = LinearizedPredictor(model, posterior, engine="jvp", n_probes=40)
    covariance, variance = few.functional_covariance(x), few.functional_variance(x)
    torch.testing.assert_close(covariance.diagonal(dim1=1, dim2=2), variance)
    torch.testing.assert_close(blocks_of(few.functional_covariance(x, joint=True), len(x)), covariance)


def test_probabilities_by_sampling_in_function_space() -> None:
    model, posterior, x = setting("shared", FAMILIES[-1])
    exact = LinearizedPredictor(model, posterior)
    drawn = LinearizedPredictor(model, posterior, engine="jvp", n_probes=600)
    assert float((drawn(x).probs - exact(x).probs).abs().max()) < 0.02


def test_what_comes_after_the_last_layer() -> None:
    """A layer feeds the outputs directly only if its outputs are the model's, on every batch."""

    class Ending(nn.Module):
        def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.inner, self.end = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), end

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.inner(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(12, 4, dtype=torch.float64)
        for end, direct in (
            (lambda out: out.unsqueeze(-1).flatten(1), True),
            (lambda out: torch.log_softmax(out, 1), False),
            (lambda out: 1e-9 * out, False),
            (lambda out: out.relu_() + 0.0, False),
            (lambda out: out + 1e-3 * out.sin(), False),
        ):
            model = Ending(end).double()
            posterior = fitted(model, x, method="kfac", layers="last")
            auto = LinearizedPredictor(model, posterior)
            expected = dense_covariance(model, posterior, x)
            torch.testing.assert_close(auto.functional_covariance(x), blocks_of(expected, 12))
            torch.testing.assert_close(auto.functional_variance(x), variances_of(expected, 12))
            assert (auto.closed_form(x) is not None) == direct


def test_outputs_that_are_direct_for_some_inputs() -> None:
    """Clamped outputs are the layer's own as long as nothing is clamped."""
    model, x = build("mlp", 8)
    largest = model(x).detach().abs().amax(1)
    bound = float(largest.median()) + 1e-3
    model, inside = nn.Sequential(*model, nn.Hardtanh(-bound, bound)), largest < bound
    posterior = fitted(model, x, method="kfac", layers="last")
    assert bool(inside.any()) and not bool(inside.all())
    predictor = LinearizedPredictor(model, posterior)
    for part in (x[inside], x):
        expected = variances_of(dense_covariance(model, posterior, part), len(part))
        torch.testing.assert_close(predictor.functional_variance(part), expected)


def test_a_last_layer_that_later_inputs_use_otherwise() -> None:
    """Called twice, with an input that is overwritten afterwards, or by its name, it is what it was in the first pass
    as long as numbers say so.
    """

    class Otherwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, way: str = "plain") -> Tensor:
            h = self.first(x).tanh()
            if way == "twice":
                h = self.last(h)
            if way == "by name":
                return self.last(input=h)
            outputs = self.last(h)
            if way == "tripled":
                outputs.mul_(3)
            if way == "overwritten, without a graph":
                h.detach().zero_()
            return outputs + 0 * h.zero_() if way == "overwritten" else outputs

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Otherwise().double(), torch.randn(9, 4, dtype=torch.float64)
    posterior = fitted(model, x, method="kfac", layers="last")
    predictor = LinearizedPredictor(model, posterior)
    expected = predictor.functional_variance(x)
    torch.testing.assert_close(expected, variances_of(dense_covariance(model, posterior, x), len(x)))
    exact = LinearizedPredictor(model, posterior, engine="exact").functional_variance(x, "twice")
    torch.testing.assert_close(predictor.functional_variance(x, "twice"), exact)
    assert float((exact / expected - 1).abs().max()) > 0.1
    torch.testing.assert_close(predictor.functional_variance(x, way="by name"), expected)
    for way in ("overwritten", "overwritten, without a graph"):
        with pytest.raises(uq.PosthocUQError, match="was changed in place after the layer used it"):
            predictor.functional_variance(x, way)
    torch.testing.assert_close(predictor.functional_variance(x, "tripled"), 9 * expected)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, outputs: 3 * outputs if getattr(module, "in_features", 0) == 3 else None
    )
    torch.testing.assert_close(predictor.functional_variance(x), 9 * expected)
    hook.remove()
    torch.testing.assert_close(predictor.functional_variance(x), expected)


@pytest.mark.parametrize("shape", ["(batch,)", "(batch, 1)", "(batch, 25)"])
@pytest.mark.parametrize("engine", ["auto", "jvp"])
@pytest.mark.covering(1)
def test_regression(shape: str, engine: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = 25 if "25" in shape else 1
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, size)]
        model = nn.Sequential(*layers, *([nn.Flatten(0)] if shape == "(batch,)" else [])).double()
        x = torch.randn(10, 3, dtype=torch.float64)
    y = model(x).detach() + 0.1
    posterior = uq.fit(
        model, [(x, y)], likelihood="regression", fisher="exact", prior_precision=1.0, progress=False
    )
    predictor = LinearizedPredictor(model, posterior, engine=engine, n_probes=250)
    expected = variances_of(dense_covariance(model, posterior, x), 10).reshape(y.shape)
    prediction = predictor(x)
    tolerance = {"rtol": 0.35, "atol": 0.0} if engine == "jvp" else {"rtol": 1e-9, "atol": 1e-14}
    torch.testing.assert_close(prediction.epistemic_variance, expected, **tolerance)
    torch.testing.assert_close(predictor.functional_variance(x), expected, **tolerance)
    torch.testing.assert_close(prediction.mean, model(x).detach())
    assert prediction.noise_variance.shape == y.shape and float(prediction.noise_variance.min()) > 0
    assert predictor.functional_covariance(x).shape == (10, size, size)
    posterior = posterior.with_settings(
        noise_scale=4.0
    )  # less is known of the weights where the data are noisier
    again = predictor.with_posterior(posterior)(x)
    torch.testing.assert_close(again.noise_variance, 4 * prediction.noise_variance)
    assert bool((again.epistemic_variance > prediction.epistemic_variance).all())
    with pytest.raises(uq.PosthocUQError, match="logits"):
        LinearizedPredictor(model, posterior, outputs="topk")


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_one_logit(link: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        x = torch.randn(10, 3, dtype=torch.float64)
    posterior = uq.fit(model, [x], likelihood="binary", fisher="exact", prior_precision=1.0, progress=False)
    assert isinstance(posterior.likelihood, Bernoulli)
    prediction = LinearizedPredictor(model, posterior, link=link)(x)
    expected = variances_of(dense_covariance(model, posterior, x), 10)
    torch.testing.assert_close(prediction.logits_variance, expected)
    assert prediction.probs.shape == (10, 2)
    if link == "probit":
        scaled = model(x).detach() / (1 + torch.pi * expected / 8).sqrt()
        torch.testing.assert_close(prediction.probs[:, 1:], scaled.sigmoid())


def test_links_get_the_covariance() -> None:
    """Monte Carlo with correlated logits: against draws made here."""
    model, posterior, x = setting("mlp", {"method": "inf", "rank": 6})
    prediction = LinearizedPredictor(model, posterior, link="mc", n_draws=4000)(x)
    covariance = blocks_of(dense_covariance(model, posterior, x), len(x))
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(3, dtype=torch.float64))
    normals = torch.randn(
        20_000, len(x), 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    logits = model(x).detach() + (root @ normals).squeeze(-1)
    torch.testing.assert_close(prediction.probs, logits.softmax(-1).mean(0), rtol=0, atol=0.012)
    assert prediction.sample_entropy is not None


def test_temperature() -> None:
    model, posterior, x = setting("mlp", {"method": "diag"})
    predictor = LinearizedPredictor(model, posterior)
    variance = predictor.functional_variance(x)
    posterior = posterior.with_settings(temperature=2.0)
    hot = predictor.with_posterior(posterior)(x)
    torch.testing.assert_close(hot.logits_variance, variance / 4)
    torch.testing.assert_close(hot.logits_mean, model(x).detach() / 2)
    torch.testing.assert_close(predictor.functional_variance(x), variance)


@pytest.mark.parametrize("engine", ["auto", "jvp"])
def test_a_predictor_of_other_settings_shares_what_is_prepared(engine: str) -> None:
    model, posterior, x = setting("mlp", {"method": "inf", "rank": 6})
    predictor = LinearizedPredictor(model, posterior, engine=engine)
    before = predictor.functional_variance(x)
    for name, value in (("scale", 3.0), ("prior_precision", 30.0), ("residual_weight", 0.1)):
        posterior = posterior.with_settings(**{name: value})
        fresh = LinearizedPredictor(model, posterior, engine=engine).functional_variance(x)
        same = predictor.with_posterior(posterior).functional_variance(x)
        torch.testing.assert_close(same, fresh, rtol=0, atol=0)
        assert not torch.allclose(fresh, before)
        before = fresh


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("scale", [1e3, 1e8])
@pytest.mark.covering(2)
def test_stiff_posteriors_in_float32(name: str, layers: str, scale: float) -> None:
    """Nearly all of a variance may cancel along directions that the data settled."""
    model, x = build(name, 20, torch.float32)
    posterior = uq.fit(model, [x], rank=1000, layers=layers, prior_precision=1e-2, progress=False)
    posterior = posterior.with_settings(scale=scale)
    expected = dense_covariance(model.double(), posterior, x.double())
    predictor = LinearizedPredictor(model.float(), posterior)
    found = predictor.functional_variance(x)
    assert found.dtype == torch.float32
    # The float32 Jacobian itself is known to rounding of its own size, which the prior alone does not damp.
    torch.testing.assert_close(found.double(), variances_of(expected, 20), rtol=2e-3, atol=0)
    whole = LinearizedPredictor(model, posterior).functional_covariance(x).double()
    size = variances_of(expected, 20).sqrt()
    error = (whole - blocks_of(expected, 20)).abs() / (size.unsqueeze(1) * size.unsqueeze(2))
    assert float(error.max()) < 2e-3


@pytest.mark.parametrize("engine", ["exact", "jvp"])
def test_whatever_mode_the_caller_is_in(engine: str) -> None:
    model, posterior, x = setting("cnn", {"method": "inf", "rank": 6})
    expected = LinearizedPredictor(model, posterior, engine=engine)(x).probs
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            mine = x.clone()  # in inference mode, one that autograd cannot save
            predictor = LinearizedPredictor(model, posterior, engine=engine)
            torch.testing.assert_close(predictor(mine).probs, expected)
    torch.testing.assert_close(predictor(x).probs, expected)


def test_models_that_change_their_input() -> None:
    """The caller's tensor stays as it was, and every run of the model sees it so."""
    model, posterior, x = setting("mlp", {"method": "diag"})
    expected = LinearizedPredictor(model, posterior, engine="jvp").functional_variance(x - 0.5)
    shifted = nn.Sequential(*model)
    shifted.register_forward_pre_hook(lambda _, args: (args[0].sub_(0.5),))
    predictor = LinearizedPredictor(shifted, posterior, engine="jvp")
    kept = x.clone()
    for _ in range(2):
        torch.testing.assert_close(predictor.functional_variance(x), expected)
        covariance = predictor.functional_covariance(x)
        torch.testing.assert_close(covariance.diagonal(dim1=1, dim2=2), expected)
    torch.testing.assert_close(predictor.functional_mean(x), model(x - 0.5).detach())
    assert torch.equal(x, kept)


def test_autocast() -> None:
    model, posterior, x = setting("mlp", {"method": "inf", "rank": 6})
    model, x = model.float(), x.float()
    posterior = fitted(model, x, rank=6)
    plain = LinearizedPredictor(model, posterior)
    exact = plain.functional_variance(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for predictor in (plain, LinearizedPredictor(model, posterior)):
            found = predictor.functional_variance(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, exact, rtol=0.1, atol=0)
            assert predictor(x).probs.dtype == torch.float32
    torch.testing.assert_close(plain.functional_variance(x), exact)


class Branches(nn.Module):
    """Uses one layer or the other, by a flag among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, *, side: str = "both") -> dict[str, Tensor]:
        left = 0 if side == "right" else self.left(x)
        right = 0 if side == "left" else self.right(x)
        return {"logits": self.last(torch.tanh(left + right))}


def test_layers_that_a_pass_does_not_use_are_named() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Branches().double(), torch.randn(6, 4, dtype=torch.float64)
    posterior = fitted(model, x, method="kfac")
    predictor = LinearizedPredictor(model, posterior)
    with pytest.warns(UserWarning, match=r"\['right'\]"):
        found = predictor(x, side="left")
    assert found.probs.shape == (6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LinearizedPredictor(model, posterior)(x)


def test_outputs_of_one_position() -> None:
    model, posterior, x = setting("mlp", {"method": "diag"})
    images = nn.Sequential(*model, nn.Unflatten(1, (3, 1)))
    assert LinearizedPredictor(images, posterior)(x).entropy().shape == (len(x), 1)


def test_an_operation_without_forward_derivative() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(x)  # type: ignore[no-any-return]

    inner, x = build("mlp")
    model = nn.Sequential(inner, Custom())
    posterior = fitted(model, x, method="diag")
    assert LinearizedPredictor(model, posterior)(x).probs.shape == (5, 3)
    with pytest.raises(uq.PosthocUQError, match="engine='exact'"):
        LinearizedPredictor(model, posterior, engine="jvp")(x)


@pytest.mark.parametrize(("size", "passes"), [(8, 1), (160, 4)])
def test_one_small_sample_has_one_backward_pass_of_copies(size: int, passes: int) -> None:
    class Backward(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += "convolution_backward" in str(function)
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.GELU(),
        nn.Conv2d(3, 4, 3),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    model = model.double().eval()
    x = torch.randn(5, 1, size, size, dtype=torch.float64)
    posterior = uq.fit(
        model, [(x, torch.arange(5) % 4)], "inf", layers="all", prior_precision=1.0, progress=False
    )
    predictor = uq.wrap(model, posterior, "linearized")
    several = predictor(x)
    with Backward() as counted:
        one = predictor(x[:1].clone())
        torch.testing.assert_close(one.logits_variance, several.logits_variance[:1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.probs, several.probs[:1], rtol=1e-9, atol=1e-12)
    assert counted.calls == passes


def test_one_sample_beside_an_argument_that_all_samples_share() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.second(self.first(x).tanh() * scale)

    torch.manual_seed(0)
    model, scale, x = Scaled().eval(), torch.tensor([0.7]), torch.randn(8, 5)
    posterior = uq.fit(
        model,
        [(x, scale, torch.arange(8) % 3)],
        "diag",
        layers="all",
        prior_precision=1.0,
        progress=False,
        batch_to_inputs=lambda batch: batch[:-1],
        batch_to_targets=lambda batch: batch[-1],
    )
    predictor = uq.wrap(model, posterior, "linearized")
    torch.testing.assert_close(predictor(x[:1], scale).probs, predictor(x, scale).probs[:1])
