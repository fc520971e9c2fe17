"""Weights whose uses cannot be caught: what a model's own code computes from its parameters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from posterior_helpers import dense_covariance, dense_jacobian
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch
from posthoc_uq.curvature import sweep
from posthoc_uq.layers import IdentityRows, Layer, Rows, prepare, proof


class Standardised(nn.Conv2d):
    """Weight standardisation, as in BiT: the kernel that is used has mean 0 and a given deviation."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        mean, variance = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), keepdim=True)
        return F.conv2d(input, 0.3 * (weight - mean) / (variance + 1e-5).sqrt(), self.bias, padding=1)


class Own(nn.Module):
    """A kernel that is standardised, a parameter that is indexed, one that is summed over two of its dimensions, and a
    matrix that is used as it is and transposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Standardised(1, 3, 3)
        self.table = nn.Parameter(torch.randn(5, 3))
        self.mixing = nn.Parameter(0.5 * torch.randn(2, 2, 6))
        self.tied = nn.Parameter(0.5 * torch.randn(6, 6))
        self.gain = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.adaptive_avg_pool2d(torch.tanh(self.kernel(x)), 2)
        places = torch.tensor([0, 2, 2, 4], device=x.device)
        hidden = hidden + self.table[places].T.reshape(3, 2, 2)
        hidden = torch.einsum("schw,hwk->sk", hidden, self.mixing)
        hidden = torch.tanh(hidden @ self.tied) @ self.tied.T
        return self.gain * self.last(hidden)


def sample(count: int = 20, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def network(build: Callable[[], nn.Module] = Own) -> nn.Module:
    torch.manual_seed(0)
    return build().double().eval()


def fitted(model: nn.Module, method: str = "full", size: int = 20, **options: Any) -> uq.Posterior:
    x, y = sample()
    given: dict[str, Any] = {"layers": "everything", "prior_precision": 2.0, "fisher": "exact"} | options
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return uq.fit(model, batches, method=method, progress=False, **given)


def fishers(model: nn.Module, posterior: uq.Posterior) -> dict[str, Tensor]:
    """Every layer's Fisher, a mean over the samples, from autograd's Jacobians: ``(parameters, parameters)``."""
    x, _ = sample()
    with torch.no_grad():
        p = model(x).softmax(1)
    inner = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    jacobian = {name: j.reshape(*p.shape, -1) for name, j in dense_jacobian(model, posterior, x).items()}
    return {
        name: torch.einsum("scp,scd,sdq->pq", j, inner, j) / len(x)
        for name, j in (jacobian | {"": torch.cat(list(jacobian.values()), 2)}).items()
    }


def test_the_dense_posterior_of_all_weights_is_autograds(tmp_path: Path) -> None:
    model, new = network(), sample(4, 2)[0]
    posterior = fitted(model)
    kinds = {name: layer.kind for name, layer in posterior.layers.items()}
    assert kinds == {
        "kernel": "parameter4d",
        "table": "parameter2d",
        "mixing": "parameter3d",
        "tied": "parameter2d",
        "gain": "parameter0d",
        "last": "linear",
    }
    assert posterior.layers["kernel"].bias == "kernel.bias"
    j = torch.cat(list(dense_jacobian(model, posterior, new).values()), 1)
    precision = 20 * fishers(model, posterior)[""]
    precision += 2.0 * torch.eye(len(precision), dtype=torch.float64)
    expected = j @ torch.linalg.solve(precision, j.T)
    found = uq.wrap(model, posterior, "linearized").functional_covariance(new, joint=True)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    uq.save(posterior, tmp_path / "own.h5")
    loaded = uq.load(tmp_path / "own.h5", model)
    again = uq.wrap(model, loaded, "linearized").functional_covariance(new, joint=True)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["diag", "kfac", "efb", "inf"])
def test_the_linearised_head_is_the_dense_computation(method: str) -> None:
    model, new = network(), sample(4, 2)[0]
    options = {"rank": 3} if method == "inf" else {}
    posterior = fitted(model, method, **options)
    found = uq.wrap(model, posterior, "linearized").functional_covariance(new, joint=True)
    torch.testing.assert_close(found, dense_covariance(model, posterior, new), rtol=1e-8, atol=1e-12)


def test_diagonals_bases_and_eigenvalues_are_those_of_the_gradients() -> None:
    """By the definition: bases from the sums of J J^T and of J^T J, and the exact Fisher's diagonal in them."""
    model, (x, _) = network(), sample()
    inf, efb, kfac = (fitted(model, method) for method in ("inf", "efb", "kfac"))
    fisher = fishers(model, inf)
    with torch.no_grad():
        p = model(x).softmax(1)
    root = p.sqrt()  # the factors of the exact Fisher: sqrt(p_c) (e_c - p)
    factors = root.diag_embed() - p.unsqueeze(1) * root.unsqueeze(2)
    jacobian, variance = dense_jacobian(model, inf, x), fitted(model, "diag").variance()
    for name, layer in inf.layers.items():
        if not layer.rule.by_gradients or layer.groups > 1:
            continue
        own = layer.to_matrix(1 / variance[layer.weight] - 2.0, None)[0] / 20
        truth = fisher[name].diagonal().reshape(layer.outputs, layer.inputs)
        torch.testing.assert_close(own, truth[:, : own.shape[1]], rtol=1e-8, atol=1e-12)
        j = torch.einsum("scp,sdc->sdp", jacobian[name].reshape(*p.shape, -1), factors)
        j = j.reshape(-1, layer.outputs, layer.inputs)
        left, right = (j @ j.mT).sum(0), (j.mT @ j).sum(0)
        tensors = efb.blocks[name].tensors()
        for gram, basis in ((left, tensors["output_basis"][0]), (right, tensors["input_basis"][0])):
            turned = basis.T @ gram @ basis
            torch.testing.assert_close(
                turned, turned.diagonal().diag(), rtol=0, atol=1e-9 * float(gram.trace())
            )
        rotated = tensors["output_basis"][0].T @ j @ tensors["input_basis"][0]
        values = rotated.square().sum(0) / len(x)
        torch.testing.assert_close(tensors["eigenvalues"][0], values, rtol=1e-8, atol=1e-12)
        block = kfac.blocks[name].tensors()
        trace = block["input_eigenvalues"].sum() * block["output_eigenvalues"].sum()
        torch.testing.assert_close(trace, fisher[name].trace(), rtol=1e-8, atol=0)


class Plain(nn.Module):
    """A convolution and a linear layer, whose weights may come through a product with 1 that hides them."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden, self.conv, self.last = hidden, nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        conv, last, one = self.conv, self.last, torch.ones((), dtype=x.dtype)
        if not self.hidden:
            return last(torch.tanh(conv(x)).flatten(1))
        hidden = torch.tanh(F.conv2d(x, conv.weight * one, conv.bias * one)).flatten(1)
        return F.linear(hidden, last.weight * one, last.bias * one)


@pytest.mark.parametrize("method", ["diag", "full", "efb", "inf", "kfac"])
def test_both_routes_agree_where_both_apply(method: str) -> None:
    """Diagonals and dense posteriors are the same; bases differ, since J J^T weighs a sample's output gradients by its
    inputs. They span the same, and at full rank an INF posterior says the same of the diagonal.
    """
    caught, hidden, new = network(lambda: Plain(False)), network(lambda: Plain(True)), sample(4, 2)[0]
    posteriors = [fitted(model, method, layers="all") for model in (caught, hidden)]
    assert [layer.kind for layer in posteriors[0].layers.values()] == ["conv2d", "linear"]
    assert [layer.kind for layer in posteriors[1].layers.values()] == ["parameter4d", "parameter2d"]
    if method in ("diag", "full"):
        one, other = (
            uq.wrap(model, posterior, "linearized").functional_covariance(new, joint=True)
            for model, posterior in zip((caught, hidden), posteriors, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)
        return
    for name in ("conv", "last"):
        for side in ("input", "output"):
            spans = list[Tensor]()
            for posterior in posteriors:
                tensors = posterior.blocks[name].tensors()
                basis = tensors[f"{side}_basis"][0]
                if method == "kfac":
                    basis = basis[:, tensors[f"{side}_eigenvalues"][0] > 0]
                spans.append(basis @ basis.T)
            torch.testing.assert_close(spans[0], spans[1], rtol=0, atol=1e-8)


class Looped(Own):
    """What vmap cannot run: a branch by a number of the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > -1e9 else -x)


def test_one_backward_pass_a_sample_where_vmap_does_not_run() -> None:
    one, other = (fitted(network(build)) for build in (Own, Looped))
    for name, variance in one.variance().items():
        torch.testing.assert_close(other.variance()[name], variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["inf", "kfac"])
def test_batches_and_memory_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    whole = fitted(model, method).variance()
    monkeypatch.setattr(sweep, "TEMPORARY_BYTES", 4 * 3 * 150)  # three samples at a time
    for variance in (fitted(model, method, size=7).variance(), fitted(model, method).variance()):
        for name, expected in whole.items():
            torch.testing.assert_close(variance[name], expected, rtol=1e-6, atol=0)


def test_a_sample_that_counts_twice_is_one_that_occurs_twice() -> None:
    model, (x, y) = network(), sample(6)
    options: dict[str, Any] = {"layers": "everything", "prior_precision": 2.0, "progress": False}
    for method in ("kfac", "inf"):
        weighted = uq.fit(
            model,
            [(x, y, torch.full((6,), 2.0))],
            method=method,
            fisher="exact",
            batch_to_inputs=lambda batch: batch[0],
            batch_to_targets=lambda batch: batch[1],
            batch_to_weights=lambda batch: batch[2],
            **options,
        )
        doubled = uq.fit(model, [(x, y), (x, y)], method=method, fisher="exact", **options)
        for name, expected in doubled.variance().items():
            torch.testing.assert_close(weighted.variance()[name], expected, rtol=1e-6, atol=0)


def test_what_is_covered_by_default_and_by_name() -> None:
    model = network()
    with pytest.warns(UserWarning) as said:
        assert set(fitted(model, layers="all").layers) == {"kernel", "mixing", "last"}
    messages = [str(warning.message) for warning in said]
    assert any("Weights without a posterior" in message and "'table'" in message for message in messages)
    assert any("formed for each sample" in message and "'kernel'" in message for message in messages)
    assert set(fitted(model, layers=["table", "last"]).layers) == {"table", "last"}
    assert set(fitted(model, layers=["gain", "last"]).layers) == {"gain", "last"}
    assert set(fitted(model, layers="last").layers) == {"last"}
    assert set(fitted(model, layers=lambda name, _: name == "kernel").layers) == {"kernel"}


def test_other_heads_and_the_model_afterwards() -> None:
    model, (x, _) = network(), sample(5, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    posterior = fitted(model, "inf", prior_precision=200.0)
    drawn = uq.wrap(model, posterior, "sampling", n_samples=200, seed=0)(x)
    linearised = uq.wrap(model, posterior, "linearized")(x)
    ratio = drawn.logits_variance / linearised.logits_variance
    assert 0.6 < float(ratio.median()) < 1.6
    with pytest.warns(UserWarning, match="did not use the posterior of"):
        moments = uq.wrap(model, posterior, "moments")(x)
    of_last = uq.wrap(model, fitted(model, "inf", layers=["last"], prior_precision=200.0), "moments")(x)
    torch.testing.assert_close(moments.logits_variance, of_last.logits_variance)
    jvp = uq.wrap(model, posterior, "linearized", engine="jvp", n_probes=400)(x)
    torch.testing.assert_close(jvp.logits_variance, linearised.logits_variance, rtol=0.35, atol=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_methods_that_need_the_calls_leave_such_weights_certain() -> None:
    model = network()
    with pytest.warns(UserWarning, match="Weights without a posterior"):
        posterior = uq.fit(model, [sample()], method="latent_binary", epochs=1, progress=False)
    assert set(posterior.layers) == {"last"}


def test_what_cannot_be_proved_gets_no_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        proof,
        "_agrees",
        lambda layer, *others, agrees=proof._agrees: layer.name != "kernel" and agrees(layer, *others),
    )
    with pytest.warns(UserWarning, match="Not caught: 'kernel'"):
        posterior = fitted(network(), layers="all")
    assert set(posterior.layers) == {"mixing", "last"}


def test_unit_rows_are_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    units = IdentityRows(3, 2, 4, torch.empty(0, dtype=torch.float64))
    rows = Rows(units.rows())
    basis = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, generator=generator, dtype=torch.float64)
    for one, other in ((units, rows), (units.part(slice(1, 3)), rows.part(slice(1, 3)))):
        assert (one.samples, one.positions) == (other.samples, other.positions)
        torch.testing.assert_close(one.project(basis), other.project(basis))
        part = gradients[: one.samples]
        torch.testing.assert_close(one.gradients(part, 100), other.gradients(part, 100))
        for weight in (None, weights[: one.samples]):
            grams = [torch.zeros(2, 4, 4, dtype=torch.float64) for _ in range(2)]
            one.add_gram(grams[0], 100, weight)
            other.add_gram(grams[1], 100, weight)
            torch.testing.assert_close(*grams)
            sketches = [torch.zeros(2, 4, 3, dtype=torch.float64) for _ in range(2)]
            one.add_sketch(sketches[0], basis, 100, weight)
            other.add_sketch(sketches[1], basis, 100, weight)
            torch.testing.assert_close(*sketches)
    assert units.part(torch.tensor([2])).samples == 1


def test_grams_add_up_to_those_of_all_data() -> None:
    model, (x, y), new = network(), sample(), sample(4, 2)[0]
    options: dict[str, Any] = {"layers": "everything", "prior_precision": 2.0}
    kfac, (first, second) = uq.KFAC(keep_grams=True, fisher="exact"), ((x[:12], y[:12]), (x[12:], y[12:]))
    half, whole = (
        uq.fit(model, batches, kfac, progress=False, **options) for batches in ([first], [first, second])
    )
    found = (
        uq.update(half, [second], progress=False),
        uq.update(whole, [second], remove=True, progress=False),
    )
    for posterior, expected in zip(found, (whole, half), strict=True):
        one, other = (uq.wrap(model, p, "linearized").functional_variance(new) for p in (posterior, expected))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)


class Given(nn.Module):
    """A parameter of any shape and number format."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(weight), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x.flatten(1) * (1.5 * self.weight).sum().real))


@pytest.mark.parametrize(
    "weight",
    [torch.ones((2,) * 7), torch.ones(0, 4), torch.full((3, 2), 0.1 + 0.1j)],
    ids=["seven dimensions", "nothing", "complex"],
)
def test_parameters_that_can_have_no_posterior_stay_certain(weight: Tensor) -> None:
    torch.manual_seed(0)
    model = Given(weight).eval()
    model.last.double()
    assert set(fitted(model).layers) == {"last"}
    with pytest.raises(uq.PosthocUQError, match="'weight'"):
        fitted(model, layers=["weight", "last"])


class Two(nn.Module):
    """Two kernels that are standardised, after a layer that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 9), Standardised(1, 3, 3), Standardised(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x.flatten(1))).reshape(-1, 1, 3, 3))).mean((2, 3))


def test_the_last_layer_is_one_and_a_weights_name_is_not_its_layers() -> None:
    assert set(fitted(network(Two), layers="last").layers) == {"third"}
    model = network()
    with pytest.raises(uq.PosthocUQError, match=r"no weighted layer 'last\.scale'"):
        fitted(model, layers=["table", "last.scale"])
    for name in ("last.bias", "last.weight"):
        assert list(fitted(model, layers=[name]).mean) == [name]


@pytest.mark.parametrize("build", [Own, Looped])
def test_predictions_in_several_threads(build: Callable[[], nn.Module]) -> None:
    model = network(build)
    predictor = uq.wrap(model, fitted(model, "diag"), "linearized")
    inputs = [sample(6, seed)[0] for seed in range(12)]
    expected = [predictor.functional_variance(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for found, one in zip(threads.map(predictor.functional_variance, inputs), expected, strict=True):
            torch.testing.assert_close(found, one)


class Shared(nn.Module):
    """An argument that belongs to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(5, 16)), nn.Linear(5, 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.last(torch.tanh(x.flatten(1) @ (1.0 * self.weight).T) * table.mean(0))


def test_as_many_samples_as_rows_of_an_argument_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network(Shared), sample()
    table = torch.rand(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def variance() -> dict[str, Tensor]:
        return uq.fit(
            model,
            [(x, table, y)],
            "diag",
            layers="everything",
            prior_precision=2.0,
            batch_to_inputs=lambda batch: batch[:2],
            batch_to_targets=lambda batch: batch[2],
            progress=False,
        ).variance()

    whole = variance()
    monkeypatch.setattr(sweep, "TEMPORARY_BYTES", 4 * 7 * 5 * 16)
    for name, found in variance().items():
        torch.testing.assert_close(found, whole[name], rtol=1e-9, atol=0)


def test_large_gradients_are_proved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, whose rounding the proof allows."""

    class Steep(Standardised):
        def forward(self, input: Tensor) -> Tensor:
            return 1e6 * super().forward(input).mean((2, 3))

    model, (x, _) = nn.Sequential(nn.Conv2d(1, 3, 1), Steep(3, 3, 3)).eval(), sample()
    assert set(prepare(model, Batch((x.float(),))).layers) == {"0", "1"}
    agrees = proof._agrees

    def of_other_gradients(layer: Layer, found: Tensor, *others: Any) -> bool:
        return agrees(layer, 1.5 * found if layer.name == "1" else found, *others)

    monkeypatch.setattr(proof, "_agrees", of_other_gradients)
    with pytest.raises(uq.UnsupportedLayerError, match="'1'"):
        prepare(model, Batch((x.float(),)))
