"""Posteriors of every family against dense matrices in float64: variances, quadratic forms, evidence, draws."""

import copy
import math
import pickle

import pytest
import torch
from networks import batches, inputs_of, mlp, short
from posterior_helpers import (
    GROUPS,
    INPUTS,
    OUTPUTS,
    SCALE,
    TAU,
    build,
    dense_fisher,
    posterior_of,
    random_gradients,
    statistics,
)

import posthoc_uq as uq
from posthoc_uq import Posterior
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import DenseBlock, Evidence, InformationBlock, LowRankDiagonal, PrecisionSettings

CASES = [
    ("diagonal", "", 0, 1.0),
    ("kfac", "", 0, 1.0),
    ("efb", "", 0, 1.0),
    ("dense", "", 0, 1.0),
    *[("inf", c, r, w) for c in ("rescale", "clamp", "none") for r in (1, 12, 126) for w in (1.0, 0.3)],
    ("inf", "rescale", 0.05, 0.0),
]
STATISTICS = statistics(random_gradients())
SIZE = OUTPUTS * INPUTS


def _case(kind: str, correction: str, rank: float, omega: float) -> tuple[Posterior, torch.Tensor]:
    """A posterior and its dense covariance ``(groups, size, size)``."""
    block = build(kind, STATISTICS, rank, correction)
    posterior = posterior_of(block)
    if "residual_weight" in posterior.tunable:
        posterior = posterior.with_settings(residual_weight=omega)
    fisher = dense_fisher(kind, block, STATISTICS, omega)
    precision = SCALE * fisher + TAU * torch.eye(SIZE, dtype=torch.float64)
    return posterior, torch.linalg.inv(precision)


@pytest.mark.parametrize(("kind", "correction", "rank", "omega"), CASES)
class TestAgainstDense:
    def test_variance(self, kind, correction, rank, omega):
        posterior, covariance = _case(kind, correction, rank, omega)
        expected = covariance.diagonal(dim1=1, dim2=2).reshape(GROUPS * OUTPUTS, INPUTS, 1, 1)
        torch.testing.assert_close(posterior.variance()["layer.weight"], expected, atol=1e-12, rtol=1e-8)

    def test_log_determinant_and_evidence(self, kind, correction, rank, omega):
        posterior, covariance = _case(kind, correction, rank, omega)
        expected = -torch.linalg.slogdet(covariance).logabsdet.sum()
        torch.testing.assert_close(posterior.log_determinant(), expected, atol=1e-9, rtol=1e-10)
        theta = posterior.mean["layer.weight"]
        evidence = -30.0 - 0.5 * (expected - GROUPS * SIZE * math.log(TAU) + TAU * (theta**2).sum())
        torch.testing.assert_close(posterior.log_marginal_likelihood(), evidence, atol=1e-8, rtol=1e-10)

    def test_evidence_is_differentiable(self, kind, correction, rank, omega):
        posterior, _ = _case(kind, correction, rank, omega)
        tau = torch.tensor(TAU, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(prior_precision=tau), tau)
        step = 1e-4
        high, low = (posterior.log_marginal_likelihood(prior_precision=TAU + sign * step) for sign in (1, -1))
        torch.testing.assert_close(slope, (high - low) / (2 * step), atol=1e-5, rtol=1e-5)

    def test_dense_view(self, kind, correction, rank, omega):
        block = build(kind, STATISTICS, rank, correction)
        found = block.dense(2.0, omega)
        expected = 2.0 * dense_fisher(kind, block, STATISTICS, omega)
        if kind == "dense":
            expected = torch.block_diag(*expected).unsqueeze(0)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.study
def test_forty_thousand_samples():
    """The empirical covariance of draws; its entries have a standard error of at most sqrt(2 / n) of the
    variances.
    """
    posterior, covariance = _case("inf", "rescale", 12, 1.0)
    n = 40_000
    draws = (
        posterior.sample(n, torch.Generator().manual_seed(0))["layer.weight"] - posterior.mean["layer.weight"]
    )
    for group in range(GROUPS):
        rows = draws.reshape(n, GROUPS, SIZE)[:, group]
        found = rows.T @ rows / n
        scale = covariance[group].diagonal().sqrt()
        error = (found - covariance[group]).abs() / torch.outer(scale, scale)
        assert error.max() < 5.5 * (2 / n) ** 0.5
        assert (rows.mean(0).abs() / scale).max() < 5 / n**0.5


@pytest.mark.parametrize("seed", range(4))
def test_same_law_as_equation_six(seed: int):
    """The paper's sampler, on a layer where its Cholesky factors exist, has the same covariance as ours.

    With ``W = I + Vs C Vs^T`` the paper's factor is ``D^-1/2 W^-1``, whose covariance is right if ``W^T W = I
    + Vs Vs^T``; that asks for ``B^T B = I + A^T A``, where the text prints ``B B^T = I + Vs^T Vs``. As
    printed the law is another one, off by 0.2 to 0.7 % of the largest entry in these four layers.
    """
    generator = torch.Generator().manual_seed(seed)
    m, n, a, g = 3, 4, 2, 2
    ua = torch.linalg.qr(torch.randn(n, a, generator=generator, dtype=torch.float64)).Q
    ug = torch.linalg.qr(torch.randn(m, g, generator=generator, dtype=torch.float64)).Q
    lam = torch.rand(g, a, generator=generator, dtype=torch.float64) + 0.5
    residual = torch.rand(m, n, generator=generator, dtype=torch.float64) + 0.5
    v = torch.kron(ug, ua)
    # eq. (6): F = D^-1/2 (I - D^-1/2 V l^1/2 (C^-1 + Vs^T Vs)^-1 l^1/2 V^T D^-1/2), C = A^-T (B - I) A^-1
    d_half = residual.flatten().rsqrt().diag()
    vs = d_half @ v @ lam.flatten().sqrt().diag()
    gram = vs.T @ vs
    ac = torch.linalg.cholesky(gram)
    inverse, eye = torch.linalg.inv(ac), torch.eye(a * g, dtype=torch.float64)

    def paper(bc: torch.Tensor) -> torch.Tensor:
        c = inverse.T @ (bc - eye) @ inverse
        f = d_half @ (
            torch.eye(m * n, dtype=torch.float64) - vs @ torch.linalg.inv(torch.linalg.inv(c) + gram) @ vs.T
        )
        return f @ f.T

    factor = LowRankDiagonal(
        ua.unsqueeze(0), ug.unsqueeze(0), lam.sqrt().unsqueeze(0), None, residual.unsqueeze(0)
    )
    unit = torch.eye(m * n, dtype=torch.float64).reshape(-1, 1, m, n)
    ours = factor.transform(unit).reshape(m * n, m * n).T
    torch.testing.assert_close(
        ours @ ours.T, paper(torch.linalg.cholesky(ac.T @ ac + eye).T), atol=1e-12, rtol=1e-8
    )
    off = (ours @ ours.T - paper(torch.linalg.cholesky(gram + eye))).abs().max()
    assert 0.002 < off / (ours @ ours.T).max() < 0.008
    precision = v @ lam.flatten().diag() @ v.T + residual.flatten().diag()
    torch.testing.assert_close(ours @ ours.T, torch.linalg.inv(precision), atol=1e-12, rtol=1e-8)


def test_numbers_of_the_moment_study():
    """INF with one direction, six published digits: variances of the weights and of the outputs."""
    block = InformationBlock(
        torch.tensor([[[0.6], [0.8], [0.0]]], dtype=torch.float64),
        torch.tensor([[[0.8], [0.6]]], dtype=torch.float64),
        torch.tensor([[[0.5]]], dtype=torch.float64),
        torch.zeros(1, 2, 3, dtype=torch.float64),
        "clamp",
    )
    residual = torch.tensor([[[0.1, 0.2, 0.3], [0.2, 0.1, 0.4]]], dtype=torch.float64)
    block.diagonal = block.low_rank_diagonal() + residual
    posterior = posterior_of(block, 1, 2, 3)
    posterior = posterior.with_settings(scale=10.0, prior_precision=1.0)
    variance = torch.tensor([[0.405594, 0.258741, 0.25], [0.309732, 0.405594, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(posterior.variance()["layer.weight"], variance, atol=6e-7, rtol=0)
    x = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    ready = posterior.of_layer("layer").prepared(torch.float64, x.device, 2**20)
    found = ready.output_variance(x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(
        found, torch.tensor([[1.354895, 1.943298]], dtype=torch.float64), atol=6e-7, rtol=0
    )
    jacobians = torch.zeros(2, 1, 2, 3, dtype=torch.float64)
    jacobians[0, 0, 0], jacobians[1, 0, 1] = x[0], x[0]
    covariance = posterior.quadratic({"layer": jacobians})
    assert covariance[0, 1].item() == pytest.approx(-0.655594, abs=6e-7)


def test_padded_groups_do_not_matter():
    """Groups that keep fewer directions are padded with zeros; each equals its own block."""
    block = build("inf", STATISTICS, 3)
    assert isinstance(block, InformationBlock)
    covariance = block.covariance(PrecisionSettings(SCALE, TAU))
    for group in range(GROUPS):
        one = slice(group, group + 1)
        width_a = int((block.eigenvalues[group].sum(0) > 0).sum())
        width_g = int((block.eigenvalues[group].sum(1) > 0).sum())
        alone = InformationBlock(
            block.input_basis[one, :, :width_a],
            block.output_basis[one, :, :width_g],
            block.eigenvalues[one, :width_g, :width_a],
            block.diagonal[one],
            "rescale",
        )
        torch.testing.assert_close(
            covariance.variance()[one],
            alone.covariance(PrecisionSettings(SCALE, TAU)).variance(),
            atol=1e-12,
            rtol=1e-9,
        )


def test_nothing_kept():
    """A layer without any gradient keeps no direction, and its posterior is the prior."""
    stats = {
        key: torch.zeros_like(value) if key in ("lam", "d") else value for key, value in STATISTICS.items()
    }
    posterior = posterior_of(build("inf", stats, 10))
    expected = torch.full_like(posterior.mean["layer.weight"], 1 / TAU)
    torch.testing.assert_close(posterior.variance()["layer.weight"], expected)
    assert posterior.sample(2)["layer.weight"].shape == (2, *expected.shape)


def _two_layers() -> tuple[Posterior, torch.Tensor]:
    """A dense posterior over a linear layer with bias and one without, and its Fisher."""
    layers = {
        "a": Layer("a", "linear", "a.weight", "a.bias", 1, 2, 4, (2, 3)),
        "b": Layer("b", "linear", "b.weight", None, 1, 2, 2, (2, 2)),
    }
    rows = torch.randn(30, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    fisher = rows.T @ rows / 30
    mean = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "b.weight": torch.ones(2, 2)}
    mean = {name: value.double() for name, value in mean.items()}
    posterior = Posterior(
        "full",
        layers,
        {"joint": DenseBlock(fisher)},
        {"joint": ["a", "b"]},
        mean,
        Categorical(),
        Evidence(9, -3.0),
    )
    return posterior, fisher


def test_dense_posterior_over_two_layers():
    posterior, fisher = _two_layers()
    posterior = posterior.with_settings(prior_precision={"a": 2.0, "b": 5.0})
    prior = torch.tensor([2.0] * 8 + [5.0] * 4, dtype=torch.float64)
    covariance = torch.linalg.inv(9 * fisher + prior.diag())
    variance = posterior.variance()
    # the matrix view of layer a is (2, 4): three weights and the bias in each row
    rows = covariance.diagonal()[:8].reshape(2, 4)
    torch.testing.assert_close(variance["a.weight"], rows[:, :3], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(variance["a.bias"], rows[:, 3], atol=1e-12, rtol=1e-9)
    jacobian = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    found = posterior.quadratic(
        {"a": jacobian[:, :8].reshape(3, 1, 2, 4), "b": jacobian[:, 8:].reshape(3, 1, 2, 2)}
    )
    torch.testing.assert_close(found, jacobian @ covariance @ jacobian.T, atol=1e-12, rtol=1e-9)
    only_b = posterior.quadratic({"b": jacobian[:, 8:].reshape(3, 1, 2, 2)})
    torch.testing.assert_close(
        only_b, jacobian[:, 8:] @ covariance[8:, 8:] @ jacobian[:, 8:].T, atol=1e-12, rtol=1e-9
    )
    x = torch.tensor([[0.3, -2.0]], dtype=torch.float64)
    row = covariance[8:10, 8:10]
    ready = posterior.of_layer("b").prepared(torch.float64, x.device, 2**20)
    assert ready.output_variance(x.unsqueeze(1))[0, 0, 0].item() == pytest.approx(
        (x[0] @ row @ x[0]).item(), rel=1e-9
    )
    n_theta = 8 * math.log(2.0) + 4 * math.log(5.0)
    expected = -3.0 - 0.5 * (-torch.linalg.slogdet(covariance).logabsdet - n_theta + 2.0 * 8 + 5.0 * 4)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, atol=1e-9, rtol=1e-10)


def test_other_hyperparameters_factor_anew():
    posterior, _ = _case("inf", "rescale", 12, 1.0)
    before = posterior.variance()["layer.weight"]
    posterior = posterior.with_settings(prior_precision=2 * TAU)
    assert (posterior.variance()["layer.weight"] < before).all()
    posterior = posterior.with_settings(prior_precision=TAU)
    assert torch.equal(posterior.variance()["layer.weight"], before)


@pytest.mark.parametrize(("scale", "error"), [(1e4, 1e-4), (1e7, 1e-4), (1e10, 2e-2)])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_float32_survives_stiff_directions(scale, error, weight):
    """With scale * lambda / tau up to 1e12 a float32 posterior keeps its covariance: variances, forms and draws.

    The truth is the dense inverse in float64 of the same float32 numbers, scaled to be well conditioned. Draws keep
    their relative accuracy; marginal variances are differences from the prior's and keep 1e-9 of that.
    """
    block = build("inf", STATISTICS, 30)
    assert isinstance(block, InformationBlock)
    narrow = InformationBlock(*(t.float() for t in block.tensors().values()), "rescale")
    wide = InformationBlock(*(t.double() for t in narrow.tensors().values()), "rescale")
    found = narrow.covariance(PrecisionSettings(scale, 1e-2, residual_weight=weight))
    precision = wide.dense(scale, weight) + 1e-2 * torch.eye(SIZE, dtype=torch.float64)
    spread = precision.diagonal(dim1=1, dim2=2).rsqrt()
    whitened = precision * spread.unsqueeze(-1) * spread.unsqueeze(-2)
    covariance = torch.linalg.inv(whitened) * spread.unsqueeze(-1) * spread.unsqueeze(-2)
    expected = covariance.diagonal(dim1=1, dim2=2).reshape(GROUPS, OUTPUTS, INPUTS)
    assert (found.variance() > 0).all()
    torch.testing.assert_close(found.variance().double(), expected, atol=1e-9 / 1e-2, rtol=error)
    unit = torch.eye(GROUPS * SIZE).reshape(-1, GROUPS, OUTPUTS, INPUTS)
    drawn = found.transform(unit).double().square().sum(0)  # the variances of the draws
    torch.testing.assert_close(drawn, expected, atol=0, rtol=error)
    x = torch.randn(4, GROUPS, INPUTS, generator=torch.Generator().manual_seed(0))
    ready = found.prepared(torch.float32, x.device, 2**20)
    outputs = ready.output_variance(x, torch.zeros_like(x)).double()
    rows = covariance.reshape(GROUPS, OUTPUTS, INPUTS, OUTPUTS, INPUTS).diagonal(
        dim1=1, dim2=3
    )  # (G, n, n, m)
    truth = torch.einsum("rgi,gijo,rgj->rgo", x.double(), rows, x.double())
    torch.testing.assert_close(outputs, truth, atol=1e-9 / 1e-2 * float(x.square().sum(-1).max()), rtol=error)


@pytest.mark.filterwarnings("ignore:1 steps at log_variance_lr")
@pytest.mark.parametrize("method", METHODS)
def test_the_report_says_everything_once_and_explains_its_columns(method):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    posterior = uq.fit(model, [(x, torch.arange(12) % 2)], short(method), progress=False)
    report = posterior.report()
    lines = report.splitlines()
    assert repr(report) == str(report) == report[:] and "layers: " in report + "" and len(report) > 300
    for again in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert (again, again.summary, again.rows, again.columns) == (
            report,
            report.summary,
            report.rows,
            report.columns,
        )
    table = next(i for i, line in enumerate(lines) if line.startswith("layer  "))
    names = [line.split(": ")[0] for line in lines[:table]]
    assert len(set(names)) == len(names)
    assert sum(line.startswith("seconds") for line in lines) == 1
    assert any(line.startswith("prior precision: ") and ", " in line for line in lines)
    explained = {
        part
        for line in lines[table:]
        if line.startswith("  ")
        for part in line.strip().split(": ")[0].split(", ")
    }
    columns = {column for column in lines[table].split("  ") if column}
    assert {column.strip() for column in columns} - {"layer", "kind"} == explained
    assert ("prior precision" in explained) == isinstance(posterior.prior_precision, dict)
    if posterior.has_free_prior_precision:
        posterior = posterior.with_settings(prior_precision={"0": 1.0, "2": 2.0})
        assert "  prior precision: of the layer's weights" in str(posterior.report()).splitlines()


@pytest.mark.parametrize("precision", [1e-3, 1e-6, 1e-9, 1e-12])
def test_the_evidence_of_a_float32_fit_at_a_small_prior_precision(precision: float) -> None:
    """Against the definition in float64: in directions without a gradient the prior alone decides."""
    model, x, y = mlp(), inputs_of(4), torch.arange(24) % 3
    wide, inputs = mlp().double(), x.double()
    weights = {name: p.detach() for name, p in wide.named_parameters()}
    by_name = torch.func.jacrev(lambda w: torch.func.functional_call(wide, w, inputs))(weights)
    jacobian = torch.cat([by_name[name].flatten(2) for name in weights], 2)
    logits = wide(inputs).detach()
    probs = logits.softmax(1)
    hessians = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    fisher = torch.einsum("ncp,ncd,ndq->pq", jacobian, hessians, jacobian)
    size, squares = len(fisher), sum(float(p.square().sum()) for p in weights.values())
    determinant = torch.logdet(fisher + precision * torch.eye(size, dtype=torch.float64))
    occam = determinant - size * math.log(precision) + precision * squares
    expected = -torch.nn.functional.cross_entropy(logits, y, reduction="sum") - 0.5 * occam
    found = uq.fit(model, batches(x, y), uq.Dense(fisher="exact"), prior_precision=precision, progress=False)
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(expected), abs=0.02)
    everything = uq.Subnetwork(fisher="exact", n=size)
    found = uq.fit(model, batches(x, y), everything, prior_precision=precision, progress=False)
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(expected), abs=0.02)


@pytest.mark.parametrize("name", ["diag", "kfac", "efb", "inf"])
def test_the_evidence_at_a_small_prior_precision_is_that_of_a_float64_fit(name: str) -> None:
    x, y = inputs_of(4), torch.arange(24) % 3
    for precision in (1e-6, 1e-9, 1e-12):
        evidences = [
            float(
                uq.fit(
                    mlp(dtype=dtype),
                    batches(x.to(dtype), y),
                    name,
                    fisher="exact",
                    prior_precision=precision,
                    progress=False,
                ).log_marginal_likelihood()
            )
            for dtype in (torch.float32, torch.float64)
        ]
        assert evidences[0] == pytest.approx(evidences[1], abs=0.02)
