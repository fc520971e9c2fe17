"""Posteriors over single weights, against dense computations from the definition in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import mlp
from torch import Tensor, nn
from torch.func import functional_call, jacrev  # pyright: ignore[reportPrivateImportUsage]
from watching import Watch

import posthoc_uq as uq
from posthoc_uq.heads import LinearizedPredictor
from posthoc_uq.posteriors import SubnetworkBlock

TAU = 2.0
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def _data(n: int = 30) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(n) % 3


def _fit(model: nn.Module, **options: Any) -> uq.Posterior:
    settings: dict[str, Any] = {"fisher": "exact"}
    return uq.fit(model, [_data()], uq.Subnetwork(**settings | options), prior_precision=TAU, progress=False)


def _flat(named: dict[str, Tensor], lead: int = 0) -> Tensor:
    """Parameters of the network side by side, as `NAMES`."""
    return torch.cat([named[name].flatten(lead) for name in NAMES], dim=lead)


def _defined(model: nn.Module, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The covariance of all weights by the definition, zero where they are not chosen; Jacobians; the Fisher."""
    x, _ = _data()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = _flat(jacrev(lambda w: functional_call(model, w, (x,)))(weights), 2)
    probs = model(x).softmax(1).detach()
    noise = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    fisher = torch.einsum("sop,sok,skq->pq", jacobian, noise, jacobian)
    index = chosen.nonzero().flatten()
    inside = fisher[index][:, index] + TAU * torch.eye(len(index)).double()
    covariance = torch.zeros_like(fisher)
    covariance[index.unsqueeze(1), index] = torch.linalg.inv(inside)
    return covariance, jacobian, fisher


def _mask() -> dict[str, Tensor]:
    return {
        "0.weight": torch.arange(20).reshape(5, 4) % 3 == 0,
        "2.weight": torch.arange(15).reshape(3, 5) % 4 == 1,
        "2.bias": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("kind", ["magnitude", "variance", "mask", "all"])
def test_the_covariance_is_that_of_the_definition(kind: str, tmp_path: Path) -> None:
    model = mlp(3, dtype=torch.float64)
    flat = _flat({name: p.detach() for name, p in model.named_parameters()})
    options: dict[str, Any] = {"n": 12, "by": kind}
    if kind == "magnitude":
        chosen = flat.abs() >= flat.abs().sort(descending=True).values[11]
    elif kind == "variance":
        diagonal = _defined(model, flat.abs() >= 0)[2].diagonal()
        chosen = diagonal <= diagonal.sort().values[11]
    elif kind == "mask":
        mask = _mask()
        whole = {name: mask.get(name, torch.zeros_like(p).bool()) for name, p in model.named_parameters()}
        options, chosen = {"mask": mask}, _flat(whole)
    else:
        options, chosen = {"n": 10**6}, torch.ones_like(flat).bool()
    with Watch(model):
        posterior = _fit(model, **options)
        predictor = uq.wrap(model, posterior, "linearized")
        uq.save(posterior, tmp_path / "s.h5")
        again = uq.load(tmp_path / "s.h5", model)
    covariance, jacobian, _ = _defined(model, chosen)
    assert isinstance(predictor, LinearizedPredictor)
    expected = jacobian @ covariance @ jacobian.transpose(1, 2)
    torch.testing.assert_close(predictor.functional_covariance(_data()[0]), expected)
    torch.testing.assert_close(_flat(dict(posterior.variance())), covariance.diagonal())
    drawn = _flat(posterior.sample(4000, torch.Generator().manual_seed(0)), 1) - flat
    assert bool((drawn[:, ~chosen] == 0).all())
    torch.testing.assert_close(drawn.T @ drawn / 4000, covariance, rtol=0, atol=0.1 * float(covariance.max()))
    assert torch.equal(_flat(dict(again.variance())), _flat(dict(posterior.variance())))


def test_all_weights_are_the_full_posterior() -> None:
    model = mlp(3, dtype=torch.float64)
    full = uq.fit(model, [_data()], "full", fisher="exact", prior_precision=TAU, progress=False)
    for head in ("linearized", "sampling"):
        torch.testing.assert_close(
            uq.wrap(model, _fit(model), head)(_data()[0]).probs, uq.wrap(model, full, head)(_data()[0]).probs
        )


def test_data_in_and_out_and_a_prior_by_layer() -> None:
    model, (x, y) = mlp(3, dtype=torch.float64), _data()
    for options in ({"n": 9}, {"n": 9, "by": "variance"}):
        whole = _fit(model, **options)
        block: Any = whole.blocks["joint"]
        part = uq.fit(
            model,
            [(x[:18], y[:18])],
            uq.Subnetwork(mask=_as_mask(model, block), fisher="exact"),
            prior_precision=TAU,
            progress=False,
        )
        before: Any = part.blocks["joint"]
        part = uq.update(part, [(x[18:], y[18:])], progress=False)
        torch.testing.assert_close(_fisher(part), block.fisher)
        part = uq.update(part, [(x[18:], y[18:])], remove=True, progress=False)
        torch.testing.assert_close(_fisher(part), before.fisher)
    whole = whole.with_settings(prior_precision={"0": 1.0, "2": 5.0})
    inside = 30 * block.fisher + torch.where(block.index < 25, 1.0, 5.0).double().diag()
    weights = whole.variance()
    found = torch.cat(
        [torch.cat([weights[f"{n}.weight"], weights[f"{n}.bias"][:, None]], 1).flatten() for n in ("0", "2")]
    )
    torch.testing.assert_close(found[block.index], torch.linalg.inv(inside).diagonal())


def _fisher(posterior: uq.Posterior) -> Tensor:
    block = posterior.blocks["joint"]
    assert isinstance(block, SubnetworkBlock)
    return block.fisher


def _as_mask(model: nn.Module, block: SubnetworkBlock) -> dict[str, Tensor]:
    """The block's choice as the mask of a user: its columns end with the bias."""
    chosen = torch.zeros(43, dtype=torch.bool)
    chosen[block.index] = True
    first, second = chosen[:25].reshape(5, 5), chosen[25:].reshape(3, 6)
    return {
        "0.weight": first[:, :4],
        "0.bias": first[:, 4],
        "2.weight": second[:, :5],
        "2.bias": second[:, 5],
    }


def test_gradients_and_draws_of_functions() -> None:
    model = mlp(3, dtype=torch.float64)
    posterior = _fit(model, n=8)
    predictor = uq.wrap(model, posterior, "linearized", backpropagate=True)
    x = _data()[0][:2].requires_grad_()
    (gradient,) = torch.autograd.grad(predictor(x).entropy().sum(), x)
    step = torch.zeros_like(x)
    step[1, 2] = 1e-5
    ahead, behind = (predictor((x + sign * step).detach()).entropy().sum() for sign in (1, -1))
    torch.testing.assert_close(gradient[1, 2], ((ahead - behind) / 2e-5).detach(), rtol=1e-5, atol=1e-9)
    assert predictor.functional_samples(x.detach(), n_samples=3).shape == (3, 2, 3)


def test_the_evidence_is_that_of_the_chosen_weights() -> None:
    """``log p(D | theta) - (log det P - n log tau + tau |theta_S|^2) / 2``, and its derivative by tau."""
    model, (x, y) = mlp(3, dtype=torch.float64), _data()
    flat = _flat({name: p.detach() for name, p in model.named_parameters()})
    chosen = flat.abs() >= flat.abs().sort(descending=True).values[11]
    posterior, index = _fit(model, n=12), chosen.nonzero().flatten()
    fisher = _defined(model, chosen)[2][index][:, index]
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    determinant = torch.logdet(fisher + tau * torch.eye(12).double())
    occam = determinant - 12 * tau.log() + tau * flat[chosen].square().sum()
    expected = -nn.functional.cross_entropy(model(x), y, reduction="sum").detach() - occam / 2
    found = posterior.log_marginal_likelihood(tau)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, tau), torch.autograd.grad(expected, tau))
    assert uq.fit(
        model, [(x, y)], "subnetwork", n=5, prior_precision="evidence", progress=False
    ).prior_precision


@pytest.mark.parametrize("kind", ["magnitude", "variance", "mask"])
def test_independent_weights_of_a_subnetwork(kind: str, tmp_path: Path) -> None:
    """``1 / (N d_i + tau)`` for the chosen weights, and nothing for the others, by every head."""
    model, (x, y) = mlp(3, dtype=torch.float64), _data()
    mask = {name: _mask().get(name, torch.zeros_like(p).bool()) for name, p in model.named_parameters()}
    options: dict[str, Any] = {"mask": _mask()} if kind == "mask" else {"n": 12, "by": kind}
    with Watch(model):
        posterior = _fit(model, structure="diag", **options)
    flat = _flat({name: p.detach() for name, p in model.named_parameters()})
    _, jacobian, fisher = _defined(model, flat.abs() >= 0)
    diagonal = fisher.diagonal()
    chosen = {
        "magnitude": flat.abs() >= flat.abs().sort(descending=True).values[11],
        "variance": diagonal <= diagonal.sort().values[11],
        "mask": _flat(mask),
    }[kind]
    variance = torch.where(chosen, 1 / (diagonal + TAU), 0.0)
    torch.testing.assert_close(_flat(dict(posterior.variance())), variance)
    uq.save(posterior, tmp_path / "s.h5")
    again = uq.load(tmp_path / "s.h5", model)
    found = uq.wrap(model, again, "linearized").functional_covariance(x)
    expected = torch.einsum("sop,p,skp->sok", jacobian, variance, jacobian)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    drawn = _flat(again.sample(4000, torch.Generator().manual_seed(0)), 1) - flat
    torch.testing.assert_close(drawn.var(0), variance.float().double(), rtol=0.15, atol=0)
    assert bool((drawn[:, ~chosen] == 0).all())
    draws = uq.wrap(model, again, "sampling", n_samples=1000, seed=0)(x).probs
    torch.testing.assert_close(uq.wrap(model, again, "moments")(x).probs, draws, rtol=0, atol=0.05)
    part = uq.fit(
        model, [(x[:18], y[:18])], uq.Subnetwork(mask=_chosen_mask(posterior), structure="diag", fisher="exact"),
        prior_precision=TAU, progress=False,
    )  # fmt: skip
    part = uq.update(part, [(x[18:], y[18:])], progress=False)
    torch.testing.assert_close(_flat(dict(part.variance())), variance)


def _chosen_mask(posterior: uq.Posterior) -> dict[str, Tensor]:
    return {name: variance > 0 for name, variance in posterior.variance().items()}


def test_a_subnetwork_of_what_requires_gradients() -> None:
    model = mlp(3, dtype=torch.float64)
    model[0].requires_grad_(False)
    for structure in ("full", "diag"):
        options: dict[str, Any] = {"layers": "trainable", "prior_precision": TAU, "progress": False}
        posterior = uq.fit(model, [_data()], uq.Subnetwork(n=7, structure=structure), **options)  # type: ignore[arg-type]
        variance = posterior.variance()
        assert [*variance] == ["2.weight", "2.bias"]
        assert sum(int((v > 0).sum()) for v in variance.values()) == 7
