"""Weights of samples and of positions: against repeated samples, and against dense float64 sums by the definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import short
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.core import BatchReader
from posthoc_uq.methods import METHODS

WEIGHED = [name for name, kind in METHODS.items() if kind.weighs_samples]
CURVATURE: dict[str, Callable[..., Any]] = {
    "diag": uq.Diagonal,
    "full": uq.Dense,
    "kfac": lambda **options: uq.KFAC(keep_grams=True, **options),
    "efb": uq.EFB,
    "inf": lambda **options: uq.INF(rank=30, basis="exact", **options),
    "inf, sketch": lambda **options: uq.INF(rank=4, basis="sketch", **options),
    "subnetwork": lambda **options: uq.Subnetwork(n=9, by="variance", **options),
}
Batches = list[tuple[Tensor, ...]]


def net(outputs: int = 3) -> nn.Sequential:
    """A convolution with padding, and two linear layers; float64."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def images(samples: int = 14, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Images, classes, and weights 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 4, (samples,), generator=generator)
    weights[:4] = torch.arange(4)
    return x, torch.randint(0, 3, (samples,), generator=generator), weights


def weighted(x: Tensor, y: Tensor, weights: Tensor, size: int = 5) -> Batches:
    """Batches of inputs, targets and weights."""
    return list(zip(x.split(size), y.split(size), weights.split(size), strict=True))


def repeated(x: Tensor, y: Tensor, weights: Tensor, size: int = 5) -> Batches:
    """Batches of the same data, each sample as often as its weight says."""
    return list(zip(*(t.repeat_interleave(weights, 0).split(size) for t in (x, y)), strict=True))


READ: dict[str, Any] = {
    "batch_to_inputs": lambda batch: batch[0],
    "batch_to_targets": lambda batch: batch[1],
    "batch_to_weights": lambda batch: batch[2],
}


def fit(model: nn.Module, loader: Any, method: Any, **options: Any) -> uq.Posterior:
    return uq.fit(model, loader, method, prior_precision=2.0, progress=False, **options)


def precision(posterior: uq.Posterior) -> dict[str, Tensor]:
    """The Fisher of each block over all data, dense."""
    return {name: posterior.scale * block.dense() for name, block in posterior.blocks.items()}


def assert_same(found: uq.Posterior, wanted: uq.Posterior, rtol: float = 1e-9) -> None:
    """One posterior of the same data as another, to rounding."""
    assert found.scale == pytest.approx(wanted.scale, rel=1e-12)
    for name, matrix in precision(wanted).items():
        error = torch.linalg.vector_norm(precision(found)[name] - matrix)
        assert float(error) <= rtol * float(torch.linalg.vector_norm(matrix)), name
    for name, variance in wanted.variance().items():
        torch.testing.assert_close(found.variance()[name], variance, rtol=1e-6, atol=0)
    if wanted.noise_variance is not None:
        torch.testing.assert_close(found.noise_variance, wanted.noise_variance, rtol=1e-10, atol=0)
    if wanted.evidence.log_likelihood is not None and "full" in found.method:
        for noise in (1.0, 2.5):
            expected = wanted.log_marginal_likelihood(0.3, noise)
            torch.testing.assert_close(found.log_marginal_likelihood(0.3, noise), expected, rtol=1e-9, atol=0)
    expected = wanted.evidence.log_likelihood
    assert found.evidence.log_likelihood == pytest.approx(expected, rel=1e-10)
    assert found.evidence.at_noise(1.7) == pytest.approx(wanted.evidence.at_noise(1.7), rel=1e-10)
    if wanted.features is not None:
        assert found.features is not None and found.features.samples == wanted.features.samples
        rows = torch.randn(6, wanted.features.basis.shape[0], generator=torch.Generator().manual_seed(0))
        novelty = wanted.features.novelty(rows)
        torch.testing.assert_close(found.features.novelty(rows), novelty, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("method", CURVATURE)
@pytest.mark.covering(1)
def test_whole_weights_are_repeated_samples(method: str, fisher: str) -> None:
    model, (x, y, w) = net(), images()
    options = {"n_samples": 2} if fisher == "mc" else {}
    made = CURVATURE[method](fisher=fisher, dtype=torch.float64, **options)
    wanted = fit(model, repeated(x, y, w), made)
    found = fit(model, weighted(x, y, w), made, **READ)
    assert_same(found, wanted)
    assert found.evidence.samples == len(x) and found.evidence.total == int(w.sum())
    assert found.history.fit["sum of the weights"] == int(w.sum())


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "binary": lambda u: (u[:, :1] > 0.4).long().squeeze(1),
    "multilabel": lambda u: (u > 0.4).long(),
    "ordinal": lambda u: (3 * u[:, 0]).long(),
    "regression": lambda u: 4 * u - 2,
    "heteroscedastic": lambda u: 4 * u[:, :2] - 2,
    "poisson": lambda u: (5 * u).floor(),
    "negative_binomial": lambda u: (5 * u).floor(),
    "gamma": lambda u: 3 * u + 0.1,
}
OUTPUTS = {"binary": 1, "multilabel": 2, "heteroscedastic": 4, "ordinal": 1}


@pytest.mark.parametrize("likelihood", TARGETS)
@pytest.mark.parametrize("method", ["full", "kfac"])
@pytest.mark.covering(1)
def test_every_likelihood(likelihood: str, method: str) -> None:
    x, _, w = images()
    u = torch.rand(len(x), OUTPUTS.get(likelihood, 2), generator=torch.Generator().manual_seed(3)).double()
    u = u if likelihood != "heteroscedastic" else torch.cat([u, u], 1)
    y = TARGETS[likelihood](u)
    model: nn.Module = net(OUTPUTS.get(likelihood, 2))
    kind: Any = likelihood
    if likelihood == "ordinal":
        kind = uq.Ordinal([-0.5, 0.5])
    made = CURVATURE[method](dtype=torch.float64)
    found = fit(model, weighted(x, y, w), made, likelihood=kind, **READ)
    assert_same(found, fit(model, repeated(x, y, w), made, likelihood=kind))


def dense(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, empirical: bool = False) -> Tensor:
    """``sum_n w_n J_n^T F_n J_n`` or ``sum_n w_n g_n g_n^T`` of a classification, over all weights in order."""
    parameters = dict(model.named_parameters())
    total = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64)
    total = torch.outer(total, total)
    for n in range(len(x)):
        outputs = model(x[n : n + 1])[0]
        rows = [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(o, list(parameters.values()), retain_graph=True)]
            )
            for o in outputs
        ]
        jacobian, probs = torch.stack(rows), outputs.softmax(0).detach()
        if empirical:
            gradient = jacobian.T @ (probs - nn.functional.one_hot(y[n], len(probs)))
            total += weights[n] * torch.outer(gradient, gradient)
        else:
            total += weights[n] * jacobian.T @ (probs.diag() - torch.outer(probs, probs)) @ jacobian
    return total


def in_order(posterior: uq.Posterior, model: nn.Module) -> Tensor:
    """Where each parameter is in the dense block of a posterior: of each layer, its rows with the bias last."""
    numbers, start = {}, 0
    for name, parameter in model.named_parameters():
        numbers[name] = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
        start += parameter.numel()
    parts = [
        layer.to_matrix(numbers[layer.weight], numbers[layer.bias]) for layer in posterior.layers.values()
    ]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_any_weights_by_the_definition(fisher: str) -> None:
    model, (x, y, _) = net(), images()
    w = torch.rand(len(x), generator=torch.Generator().manual_seed(5)) * 0.2
    posterior = fit(model, weighted(x, y, w), uq.Dense(fisher=fisher, dtype=torch.float64), **READ)
    order = in_order(posterior, model)
    wanted = dense(model, x, y, w.double(), fisher == "empirical")[order][:, order]
    torch.testing.assert_close(precision(posterior)["joint"][0], wanted, rtol=1e-9, atol=1e-12)
    assert posterior.scale == pytest.approx(float(w.double().sum()))
    theta = torch.cat([p.flatten() for p in model.parameters()])
    log_likelihood = (w * model(x).log_softmax(1)[torch.arange(len(x)), y]).sum()
    for tau in (0.5, 3.0):
        matrix = wanted + tau * torch.eye(len(wanted), dtype=torch.float64)
        occam = torch.logdet(matrix) - len(theta) * torch.tensor(tau).double().log() + tau * theta @ theta
        evidence = posterior.log_marginal_likelihood(tau)
        torch.testing.assert_close(evidence, (log_likelihood - 0.5 * occam).detach(), rtol=1e-8, atol=0)


def test_the_noise_is_the_weighted_mean_square() -> None:
    model, (x, _, w) = net(2), images()
    y = torch.randn(len(x), 2, generator=torch.Generator().manual_seed(2)).double()
    posterior = fit(model, weighted(x, y, w), "diag", likelihood="regression", **READ)
    squares = (model(x) - y).square().detach()
    torch.testing.assert_close(posterior.noise_variance, (w[:, None] * squares).sum(0) / w.sum())


def test_weights_make_no_difference_where_all_are_one() -> None:
    model, (x, y, w) = net(), images()
    for mask in (torch.ones_like(w), torch.ones_like(w).bool()):
        found = fit(model, weighted(x, y, mask), uq.INF(rank=20), **READ)
        plain = fit(model, [(a, b) for a, b, _ in weighted(x, y, mask)], uq.INF(rank=20))
        assert found.evidence.weight is None and "sum of the weights" not in found.history.fit
        for name, variance in plain.variance().items():
            torch.testing.assert_close(found.variance()[name], variance)


@pytest.mark.parametrize("method", ["diag", "full", "kfac", "efb", "inf"])
def test_update(method: str) -> None:
    model, (x, y, w) = net(), images(24)
    made = CURVATURE[method](dtype=torch.float64, fisher="exact")
    first, second = (x[:14], y[:14], w[:14]), (x[14:], y[14:], w[14:])
    found = fit(model, weighted(*first), made, **READ)
    wanted = fit(model, repeated(*first), made)
    found = uq.update(found, weighted(*second), progress=False, **READ)
    wanted = uq.update(wanted, repeated(*second), progress=False)
    assert_same(found, wanted, 1e-8)
    half = second[2] // 2
    out: dict[str, Any] = {"remove": True, "progress": False}
    found = uq.update(found, weighted(*second[:2], half), **out, **READ)  # samples go out in part
    wanted = uq.update(wanted, repeated(*second[:2], half), **out)
    assert_same(found, wanted, 1e-7)
    if method in ("diag", "full", "kfac"):
        left = torch.cat([first[2], second[2] - half])
        whole = fit(model, weighted(x, y, left), made, **READ)
        for name, matrix in precision(whole).items():
            torch.testing.assert_close(precision(found)[name], matrix, rtol=1e-6, atol=1e-9)
    with pytest.raises(PosthocUQError, match="which leaves none"):
        uq.update(found, weighted(x, y, torch.cat([first[2], second[2] - half])), **out, **READ)


# Positions


def token_net() -> nn.Sequential:
    """Tokens (4, 3) of three classes each, with attention between none of them; float64."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def tokens(samples: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, and weights of positions."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(samples, 4, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (samples, 4), generator=generator)
    return x, y, torch.rand(samples, 4, generator=generator).double() * 2


def tokens_likelihood(next_token: bool) -> uq.Categorical:
    return uq.Categorical(class_dim=-1, next_token=next_token)


@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("method", CURVATURE)
@pytest.mark.covering(1)
def test_the_weight_zero_of_a_position_is_an_ignored_label(method: str, next_token: bool) -> None:
    model, (x, y, _), kind = token_net(), tokens(), tokens_likelihood(next_token)
    mask = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[2] = False  # a sample without any label
    made = CURVATURE[method](dtype=torch.float64)
    garbage = y.masked_fill(~mask, -7)  # what labels stand there does not matter
    found = fit(model, weighted(x, garbage, mask), made, likelihood=kind, **READ)
    ignored = y.masked_fill(~mask, -100)
    wanted = fit(model, [(a, b) for a, b, _ in weighted(x, ignored, mask)], made, likelihood=kind)
    assert_same(found, wanted)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("method", CURVATURE)
@pytest.mark.covering(1)
def test_samples_with_positions(method: str, by_position: bool) -> None:
    model, (x, y, _), kind = token_net(), tokens(), tokens_likelihood(False)
    w = torch.tensor([1, 3, 2, 1, 1, 2, 3, 1])
    weights = w[:, None].expand(8, 4) if by_position else w
    made = CURVATURE[method](dtype=torch.float64)
    found = fit(model, weighted(x, y, weights), made, likelihood=kind, **READ)
    assert_same(found, fit(model, repeated(x, y, w), made, likelihood=kind))


@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.covering(1)
def test_weights_of_positions_by_the_definition(fisher: str, next_token: bool) -> None:
    model, (x, y, w), kind = token_net(), tokens(), tokens_likelihood(next_token)
    made = uq.Dense(fisher=fisher, dtype=torch.float64, n_samples=2000 if fisher == "mc" else 1)
    posterior = fit(model, weighted(x, y, w, 8), made, likelihood=kind, **READ)
    order, total, log_likelihood = in_order(posterior, model), 0, 0.0
    shift = int(next_token)
    for n in range(len(x)):
        gradient = 0
        for t in range(4 - shift):
            weight, label = w[n, t + shift], y[n, t + shift]
            one = x[n, t : t + 1]
            if fisher == "empirical":
                loss = -model(one).log_softmax(1)[0, label]
                parts = torch.autograd.grad(loss, list(model.parameters()))
                gradient = gradient + weight.sqrt() * torch.cat([part.flatten() for part in parts])
            else:
                total = total + dense(model, one, label[None], weight[None])
            log_likelihood += float((weight * model(one).log_softmax(1)[0, label]).detach())
        if fisher == "empirical":
            total = total + torch.outer(gradient, gradient)
    wanted = total[order][:, order]
    found = precision(posterior)["joint"][0]
    error = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
    assert float(error) < (0.06 if fisher == "mc" else 1e-9)
    assert posterior.evidence.log_likelihood == pytest.approx(log_likelihood, rel=1e-9)


# Trainings


@pytest.mark.filterwarnings("ignore:1 steps at")
@pytest.mark.parametrize("method", [name for name in WEIGHED if short(name).trains])
def test_a_training_weighs_its_log_likelihood(method: str) -> None:
    (x, y, _), model = images(), net()

    def first(weights: Tensor) -> dict[str, list[float]]:
        made = short(method)
        posterior = uq.fit(model.float(), weighted(x.float(), y, weights, 14), made, progress=False, **READ)
        return posterior.history.fit

    once, twice, none = (
        first(torch.ones(14)),
        first(torch.full((14,), 2.0)),
        first(torch.ones(14, dtype=torch.bool)),
    )
    assert twice["log likelihood"][0] == pytest.approx(2 * once["log likelihood"][0], rel=1e-5)
    assert none["log likelihood"] == once["log likelihood"]
    with pytest.raises(PosthocUQError, match="The weights of all samples are 0"):
        first(torch.zeros(14))


def test_a_training_with_whole_weights_takes_the_steps_of_repeated_samples() -> None:
    x, y, w = images()
    model = net().float()

    def means(loader: Any, rate: float, **read: Any) -> dict[str, Tensor]:
        made = uq.UTVI(
            epochs=3,
            lr=rate,
            log_variance_lr=rate,
            clip=None,
            weight_decay=0.0,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=rate),
            schedule=lambda progress: 1.0,
        )
        return uq.fit(model, loader, made, divergence=None, progress=False, **read).mean

    # both losses are shares of a sample, and there are fewer samples than copies
    found = means(weighted(x.float(), y, w, 14), 0.01, **READ)
    wanted = means(repeated(x.float(), y, w, 100), 0.01 * int(w.sum()) / 14)
    for name, mean in wanted.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-4, atol=1e-5)


# Checkpoints, files, errors


class Broken:
    """A loader that fails after some batches."""

    def __init__(self, loader: Batches, after: int) -> None:
        self.loader, self.after = loader, after

    def __iter__(self) -> Any:
        yield from self.loader[: self.after]
        raise RuntimeError("the disk is gone")


def test_a_resumed_fit_knows_the_weights(tmp_path: Path) -> None:
    model, (x, y, w) = net(), images(30)
    made = CURVATURE["inf"](dtype=torch.float64, checkpoint_every=1)
    path = tmp_path / "fit.h5"
    loader = weighted(x, y, w)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        fit(model, Broken(loader, 3), made, checkpoint=path, **READ)
    assert path.exists()
    kept = path.read_bytes()
    other = w.clone()
    other[7] += 1
    with pytest.raises(PosthocUQError, match="does not begin with the batches"):
        fit(model, weighted(x, y, other), made, checkpoint=path, **READ)
    path.write_bytes(kept)
    found = fit(model, loader, made, checkpoint=path, **READ)
    wanted = fit(model, loader, made, **READ)
    for name, block in wanted.blocks.items():
        for inner, tensor in block.tensors().items():
            assert torch.equal(found.blocks[name].tensors()[inner], tensor)
    assert found.evidence == wanted.evidence


def test_files_keep_the_weight(tmp_path: Path) -> None:
    model, (x, y, w) = net(), images()
    posterior = fit(model, weighted(x, y, 0.1 * w), "diag", **READ)
    uq.save(posterior, tmp_path / "posterior.h5")
    again = uq.load(tmp_path / "posterior.h5", model)
    assert again.evidence == posterior.evidence and again.evidence.weight == pytest.approx(0.1 * int(w.sum()))
    assert again.scale == posterior.scale
    torch.testing.assert_close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())


def test_the_first_batch_may_count_nothing() -> None:
    model, (x, y, w) = net(), images()
    weights = w.clone()
    weights[:5] = 0
    found = fit(model, weighted(x, y, weights), "full", **READ)
    wanted = fit(model, [(a, b) for a, b, _ in weighted(x[5:], y[5:], w[5:])], "full")
    assert found.evidence.total == int(weights.sum())
    assert wanted.evidence.total == len(x) - 5


def test_batches_are_cut_with_their_weights() -> None:
    reader = BatchReader(torch.device("cpu"), **READ)
    batch = reader.read((torch.randn(4, 2), torch.arange(4), [1, 0, 2, 3]))
    assert batch.weights is not None and batch.weights.tolist() == [1, 0, 2, 3]
    cut, picked = batch.narrow(1, 2, 4), batch.select(torch.tensor([True, False, False, True]), 4)
    assert cut.weights is not None and cut.weights.tolist() == [0, 2]
    assert picked.weights is not None and picked.weights.tolist() == [1, 3]
    assert batch.copied().weights is batch.weights


def test_a_file_keeps_the_largest_weights_that_a_fit_takes(tmp_path: Path) -> None:
    model, (x, y, _) = net().float(), images()
    huge = torch.full((len(x),), 1e12, dtype=torch.float64)
    uq.save(fit(model, weighted(x.float(), y, huge), "diag", **READ), tmp_path / "largest.h5")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_held_out_data_of_a_training_have_no_weights(checkpoint: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, labels, path = torch.randn(8, 4), torch.arange(8) % 3, tmp_path / "fit"
    data: Any = {"loader": [(x, labels, torch.ones(8))], "val_loader": [(x, labels)]}
    options: dict[str, Any] = {"epochs": 1, "checkpoint": path if checkpoint else None, "progress": False}
    posterior = uq.fit(
        nn.Linear(4, 3), method="utvi", batch_to_weights=lambda batch: batch[2], **data, **options
    )
    assert len(posterior.history.fit["validation NLL"]) == 1


def test_batches_of_three_parts_and_what_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1).eval()
    x, labels = torch.randn(4, 2, 3, 3), torch.zeros(4, 3, 3, dtype=torch.long)
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0])
    options: dict[str, Any] = {"method": "diag", "prior_precision": 1.0, "progress": False, "fisher": "exact"}
    three = uq.fit(model, [(x, labels, weights)], batch_to_weights=lambda batch: batch[2], **options)
    chosen = torch.tensor([0, 1, 1, 3, 3, 3])
    copies = uq.fit(model, [(x[chosen], labels[chosen])], **options)
    torch.testing.assert_close(three.variance()["weight"], copies.variance()["weight"])
    for loader, function in (
        ([(x, torch.full_like(labels, -100))], None),
        ([(x, labels)], lambda _: torch.zeros(4, 3, 3)),
    ):
        with pytest.raises(uq.PosthocUQError, match=r"No sample or position counts|all samples are 0"):
            uq.fit(model, loader, batch_to_weights=function, **options)
    with pytest.warns(UserWarning, match="have weights, and those of this call count once each"):
        uq.update(three, [(x, labels)], progress=False)
