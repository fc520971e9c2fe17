"""Which weights make the outputs: ``layers="last"``, the default, and novelty, against dense float64 computations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import UnsupportedLayerError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NEW = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
OPTIONS: dict[str, Any] = {"fisher": "exact", "prior_precision": 1.0, "progress": False}


class Net(nn.Module):
    """Layers and parameters, of which `run` uses some."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.points = nn.Parameter(torch.randn(3, 6))
        self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 3))
        self.scale, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(2, 3))
        self.steps = nn.LSTM(6, 3, batch_first=True)
        self.run = run
        self.double().eval()

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def cosine(m: Net, x: Tensor) -> Tensor:
    return 5 * F.linear(F.normalize(m.features(x)), F.normalize(m.points))


def cosine_alone(m: Net, x: Tensor) -> Tensor:
    return F.linear(F.normalize(x), F.normalize(m.points[:, :5]))


def distances(m: Net, x: Tensor) -> Tensor:
    return -torch.cdist(m.features(x), m.points)


def prototypes(m: Net, x: Tensor) -> Tensor:
    return -(m.features(x)[:, None] - m.points).square().sum(-1)


def similarities(m: Net, x: Tensor) -> Tensor:
    return F.cosine_similarity(m.features(x)[:, None], m.points[None], dim=-1)


def product(m: Net, x: Tensor) -> Tensor:
    return m.features(x) @ (m.left @ m.right)


def two_heads(m: Net, x: Tensor) -> Tensor:
    h = m.features(x)
    return torch.cat([m.two(h), m.one(h)], 1)


def auxiliary(m: Net, x: Tensor) -> Tensor:
    h = m.features(x)
    outputs = m.one(h)
    m.two(h)
    return outputs


def scaled(m: Net, x: Tensor) -> Tensor:
    return m.scale.exp() * m.one(m.features(x)) + m.offset


def shifted(m: Net, x: Tensor) -> Tensor:
    return (m.one(m.features(x)) - m.shift.sum(0)).unsqueeze(1).add(m.shift).flatten(1)


def both_sides(m: Net, x: Tensor) -> Tensor:
    return F.normalize(m.one(m.features(x))) * F.normalize(m.two(m.features(x))) * m.scale


def wide(m: Net, x: Tensor) -> Tensor:
    return m.one(m.features(x)) + F.linear(x, 1.0 * m.points[:, :5])


def residual(m: Net, x: Tensor) -> Tensor:
    h = m.body(x)
    return h + torch.tanh(F.linear(h, m.points)) @ m.points


def recurrent(m: Net, x: Tensor) -> Tensor:
    return m.one(m.features(x)) * m.steps(m.features(x)[:, None].expand(-1, 3, -1))[0][:, -1].mean(
        1, keepdim=True
    )


def dense(model: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    """Variances of the outputs by the GGN over these parameters with the prior precision 1."""
    chosen = [model.get_parameter(name) for name in names]

    def jacobian(inputs: Tensor) -> Tensor:
        rows = [
            torch.autograd.grad(o, chosen, retain_graph=True) for one in inputs for o in model(one[None])[0]
        ]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(
            0, (len(inputs), -1)
        )

    with torch.no_grad():
        p = model(X).softmax(1)
    j = jacobian(X)
    ggn = torch.einsum("sck,scd,sdl->kl", j, p.diag_embed() - p[:, :, None] * p[:, None], j)
    new = jacobian(NEW)
    return torch.einsum(
        "sck,kl,scl->sc", new, torch.linalg.inv(ggn + torch.eye(len(ggn), dtype=p.dtype)), new
    )


def fitted(model: nn.Module, method: str = "full", **options: Any) -> uq.Posterior:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that nothing catches
        return uq.fit(model, [X], method, **(OPTIONS | options))


ONE, BODY = ["one.weight", "one.bias"], ["body.weight", "body.bias"]
KINDS: dict[Callable[[Net, Tensor], Tensor], tuple[list[str], list[str]]] = {
    # the last weights, and those that the default has besides
    cosine: (["points"], BODY),
    cosine_alone: (["points"], []),
    distances: (["points"], BODY),
    prototypes: (["points"], BODY),
    similarities: (["points"], BODY),
    product: (["left", "right"], BODY),
    two_heads: ([*ONE, "two.weight", "two.bias"], BODY),
    auxiliary: (ONE, BODY),
    scaled: (ONE, BODY),
    shifted: (ONE, BODY),
    both_sides: ([*ONE, "two.weight", "two.bias"], BODY),
    wide: ([*ONE, "points"], BODY),
}


@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.__name__)
def test_the_last_weights_are_those_that_make_the_outputs(run: Any) -> None:
    model, (last, others) = Net(run), KINDS[run]
    for layers, names in (("last", last), ("all", [*last, *others])):
        posterior = fitted(model, layers=layers)
        assert set(posterior.mean) == set(names)
        found = uq.wrap(model, posterior, "linearized").functional_variance(NEW)
        torch.testing.assert_close(found, dense(model, names, NEW), rtol=1e-7, atol=1e-10)


def test_what_goes_on_into_another_use_is_not_last() -> None:
    assert set(fitted(Net(residual), "diag", layers="last").mean) == {"points"}
    with_steps = set(fitted(Net(recurrent), "diag", layers="last").mean)
    assert with_steps == {*ONE, "steps.weight_hh_l0", "steps.bias_hh_l0"}


@pytest.mark.parametrize("run", [cosine, distances, prototypes])
def test_a_first_batch_of_one_sample_and_inputs_of_whole_numbers(run: Any) -> None:
    model = Net(run)
    loader = [(X[:1], torch.zeros(1).long()), (X[1:], torch.zeros(23).long())]
    assert set(uq.fit(model, loader, "diag", layers="last", **OPTIONS).mean) == {"points"}

    def of_numbers(m: Net, ids: Tensor) -> Tensor:
        return run(m, F.one_hot(ids, 5).double())

    ids = [torch.arange(24) % 5]
    assert set(uq.fit(Net(of_numbers), ids, "diag", layers="last", **OPTIONS).mean) == {"points"}


def test_novelty_goes_by_what_enters_the_layer_that_makes_the_outputs() -> None:
    for run in (cosine, distances, prototypes, wide):  # not by the inputs of the layer before
        posterior = fitted(Net(run), "diag")
        assert posterior.features is None
        assert "by the posterior itself" in str(posterior.report())
        assert bool(torch.isfinite(uq.wrap(Net(run), posterior, "linearized").novelty(NEW)).all())
    for run, layer in ((auxiliary, "one"), (two_heads, "one"), (scaled, "one")):
        assert f"inputs of '{layer}'" in str(fitted(Net(run), "diag").report())


@pytest.mark.parametrize("method", ["utvi", "message_passing", "function_space", "latent_binary"])
def test_a_method_that_needs_the_calls_names_the_weight_that_has_none(method: str) -> None:
    data = [(X, torch.arange(24) % 3)]
    options: dict[str, Any] = {} if method == "message_passing" else {"epochs": 1}
    with pytest.raises(UnsupportedLayerError, match="'points'"):
        uq.fit(Net(cosine), data, method, layers="last", progress=False, **options)


def test_the_warning_says_what_another_choice_would_cover() -> None:
    def looked_up(m: Net, x: Tensor) -> Tensor:
        return m.one(torch.tanh(m.body(x) + m.points[(x[:, 0] > 0).long()]))

    with pytest.warns(UserWarning, match=r"'points' .*layers='everything' covers .* all other parameters"):
        uq.fit(Net(looked_up), [X], "diag", **OPTIONS)
    assert "points" in fitted(Net(looked_up), "diag", layers="everything").mean
    with pytest.warns(UserWarning, match=r"'points' .*This method follows weights that go as they are"):
        uq.fit(Net(cosine), [(X, torch.arange(24) % 3)], "utvi", epochs=1, progress=False)


def half_frozen() -> Net:
    """A frozen weight with a trained bias, a trained weight with a frozen bias, and a trained scale."""
    model = Net(lambda m, x: m.scale * m.one(m.features(x)) + m.offset)
    model.requires_grad_(False)
    for name in ("body.bias", "one.weight", "scale"):
        model.get_parameter(name).requires_grad_(True)
    return model


def test_what_requires_gradients_and_nothing_else(tmp_path: Path) -> None:
    model, names = half_frozen(), ["body.bias", "one.weight", "scale"]
    posterior = fitted(model, layers="trainable")
    assert set(posterior.mean) == set(names)
    assert "frozen" not in posterior.report().summary
    assert posterior.history.deterministic["one.bias"] == "frozen (requires_grad=False)"
    found = uq.wrap(model, posterior, "linearized").functional_variance(NEW)
    torch.testing.assert_close(found, dense(model, names, NEW), rtol=1e-7, atol=1e-10)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    again = uq.wrap(model, loaded, "linearized").functional_variance(NEW)
    torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-6)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in half_frozen().parameters()
    ]
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(4, 5, bias=False))
    tied[2].weight = tied[0].weight
    of_layer = uq.fit(tied, [torch.arange(5)[:, None]], "diag", layers="trainable", **OPTIONS)
    assert set(of_layer.mean) >= {"2.weight"}


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (["body.weight"], ["body.weight"]),
        (["one.bias", "body.weight"], ["body.weight", "one.bias"]),
        ("*.bias", ["body.bias", "one.bias"]),
        (["one", "body.bias"], ["body.bias", "one.weight", "one.bias"]),
        (["one.weight", "one.bias", "scale"], ["one.weight", "one.bias", "scale"]),
        (["one", "one.weight"], ["one.weight", "one.bias"]),
    ],
)
def test_parameters_by_their_names(asked: Any, names: list[str], tmp_path: Path) -> None:
    model = half_frozen()
    posterior = fitted(model, layers=asked)
    assert set(posterior.mean) == set(names)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    found = uq.wrap(model, loaded, "linearized").functional_variance(NEW)
    expected = dense(model.requires_grad_(True), names, NEW)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", ["trainable", "names"])
def test_kfac_of_a_weight_without_its_bias(choice: str) -> None:
    """``kron(G, A)`` of inputs without the column of ones, and the diagonal of the same Fisher, by autograd."""
    model = Net(lambda m, x: m.one(m.features(x)))
    model.requires_grad_(False)
    model.body.weight.requires_grad_(True)
    layers: Any = "trainable" if choice == "trainable" else ["body.weight"]
    hidden = model.body(X).detach().requires_grad_()
    logits = model.one(torch.tanh(hidden))
    probs = logits.softmax(1).detach()
    pulled = torch.stack([torch.autograd.grad(o.sum(), hidden, retain_graph=True)[0] for o in logits.T], 1)
    spread = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    of_outputs = torch.einsum("sko,skl,slp->op", pulled, spread, pulled) / len(X)
    of_inputs = X.T @ X / len(X)
    wanted = torch.linalg.inv(
        len(X) * torch.kron(of_outputs.contiguous(), of_inputs) + torch.eye(30).double()
    )
    posterior = fitted(model, "kfac", layers=layers)
    torch.testing.assert_close(
        posterior.variance()["body.weight"].flatten(), wanted.diagonal(), rtol=1e-6, atol=0
    )
    squares = torch.einsum("sko,skl,slo,si->oi", pulled, spread, pulled, X.square())
    torch.testing.assert_close(
        fitted(model, "diag", layers=layers).variance()["body.weight"], 1 / (squares + 1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("method", ["inf", "kfac", "diag"])
def test_a_posterior_of_what_requires_gradients_by_every_head(method: str) -> None:
    model = half_frozen()
    posterior = fitted(model, method, layers="trainable", prior_precision=300.0)
    exact = uq.wrap(model, posterior, "linearized")(NEW).logits_variance
    drawn = uq.wrap(model, posterior, "sampling", n_samples=2000, seed=0)(NEW).logits_variance
    torch.testing.assert_close(drawn, exact, rtol=0.15, atol=0)


def test_a_fit_says_how_many_of_its_weights_are_frozen() -> None:
    model = half_frozen()
    with pytest.warns(UserWarning, match=r"33 of the 57 .* frozen .*layers='trainable' takes") as said:
        posterior = uq.fit(model, [X], "diag", **OPTIONS)
    assert sum("frozen" in str(each.message) for each in said) == 1
    assert posterior.report().summary["frozen"].startswith("33 of 57 weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(Net(scaled), [X], "diag", layers="last", **OPTIONS)


def test_a_method_that_trains_takes_a_layer_whole() -> None:
    with pytest.warns(UserWarning, match="3 of the 21 weights with a posterior are frozen"):
        posterior = uq.fit(
            half_frozen(), [(X, torch.arange(24) % 3)], "utvi", layers="trainable", epochs=1, progress=False
        )
    assert posterior.layers["one"].parameter_names == ONE
