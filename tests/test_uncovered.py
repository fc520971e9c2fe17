"""Weights that get no posterior are named: in a warning with their share, or in an error that says the way out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import posthoc_uq as uq
from posthoc_uq import PosteriorMismatchError, UnsupportedLayerError
from posthoc_uq.core import with_plain_weights

OPTIONS: dict[str, Any] = {"method": "diag", "prior_precision": 1.0, "progress": False, "fisher": "exact"}
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(1))


def _fit(model: nn.Module, inputs: Tensor = INPUTS, **options: Any) -> uq.Posterior:
    return uq.fit(model, [inputs], **(OPTIONS | options))


def _train(model: nn.Module, **options: Any) -> uq.Posterior:
    """By a method that needs the calls of every layer."""
    with torch.no_grad():
        labels = torch.arange(len(INPUTS)) % model(INPUTS).shape[1]
    return uq.fit(model, [(INPUTS, labels)], method="utvi", epochs=1, progress=False, **options)


def _shares(model: nn.Module, **options: Any) -> list[str]:
    """The warnings on weights without a posterior."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _fit(model, **options)
    return [str(w.message) for w in seen if "without a posterior" in str(w.message)]


class Mixed(nn.Module):
    """A product of two weights, a sum by elements, a scale and a shift by numbers, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.turn, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(1, 4))
        self.readout = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = ((x + x @ (self.down @ self.up)).unsqueeze(2) * self.turn).sum(1)
        return self.readout(torch.tanh(mixed * self.scale))


def test_matrices_without_a_posterior_are_one_warning_with_their_share_of_all_weights() -> None:
    found = _shares(Mixed())
    assert len(found) == 1
    # of 16 + 8 + 8 + 4 + 20 weights; the product of 'down' and 'up' is a weight that is computed
    assert found[0].startswith("Weights without a posterior, 29% of all weights: 'turn' (Mixed, 29%). ")
    assert all(f"'{name}'" not in found[0] for name in ("scale", "down", "up", "readout"))


def test_what_was_not_asked_for_is_no_warning() -> None:
    assert _shares(Mixed(), layers="last") == []
    assert _shares(Mixed(), layers=["readout"]) == []
    assert _shares(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))) == []


def test_a_product_that_cannot_be_followed_is_an_error_where_it_is_asked_for_by_name() -> None:
    with pytest.raises(UnsupportedLayerError, match="'up': what was caught does not rebuild its gradient"):
        _train(Mixed(), layers=["up", "readout"])
    assert set(_fit(Mixed(), layers=["up", "readout"]).layers) == {"up", "readout"}


def _old(function: str) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: getattr(nn.utils, function)(layer)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("put", "take"),
    [
        (parametrizations.weight_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
        (parametrizations.spectral_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
        (_old("weight_norm"), nn.utils.remove_weight_norm),
        (_old("spectral_norm"), nn.utils.remove_spectral_norm),
    ],
    ids=["weight_norm", "spectral_norm", "weight_norm by hooks", "spectral_norm by hooks"],
)
@pytest.mark.parametrize("layers", ["all", "last", ["2"]])
@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
@pytest.mark.covering(2)
def test_a_weight_that_is_computed_from_others_has_the_posterior_of_a_plain_one(
    put: Any, take: Any, layers: Any, head: str, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), put(nn.Linear(4, 3)))
    model(INPUTS).sum().backward()  # leaves a weight by hooks that belongs to a graph
    model.eval()
    state, kinds = copy.deepcopy(model.state_dict()), list(map(type, model.modules()))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), put(nn.Linear(4, 3))).eval()
    plain.load_state_dict(state)
    with torch.no_grad():
        plain(INPUTS)
    take(plain.get_submodule("2"))
    posterior, expected = (_fit(each, layers=layers) for each in (model, plain))
    torch.testing.assert_close(posterior.variance(), expected.variance())
    uq.save(posterior, tmp_path / "p.h5")
    truth = uq.wrap(plain, expected, head)(INPUTS).probs
    for other in (posterior, uq.load(tmp_path / "p.h5", model), uq.load(tmp_path / "p.h5", plain)):
        torch.testing.assert_close(uq.wrap(model, other, head)(INPUTS).probs, truth)
    assert list(map(type, model.modules())) == kinds
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_recurrent_layer_with_computed_weights_after_a_pass_with_gradients() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.steps(x.unflatten(1, (2, 2)))[0][:, -1])

    found = []
    for put in (parametrizations.weight_norm, torch.nn.utils.weight_norm):
        torch.manual_seed(0)
        model = Steps()
        for name in ("weight_ih_l0", "weight_hh_l0"):
            put(model.steps, name)
        model(INPUTS).sum().backward()
        posterior = _fit(model.eval())
        assert {"steps.weight_ih_l0", "steps.weight_hh_l0"} <= set(posterior.mean)
        found.append(uq.wrap(model, posterior)(INPUTS).probs)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_computed_weights_keep_whether_they_are_trained_also_in_a_wrapper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), _old("weight_norm")(nn.Linear(4, 3)))
    model.get_submodule("0.parametrizations").requires_grad_(False)
    model.get_parameter("1.bias").requires_grad_(False)
    wrapped = nn.DataParallel(model, device_ids=[])
    for each in (model, wrapped):
        trained = {name for name, p in with_plain_weights(each).named_parameters() if p.requires_grad}
        assert trained == {"0.bias", "1.weight"}
    posterior = _fit(wrapped)
    torch.testing.assert_close(
        uq.wrap(wrapped, posterior)(INPUTS).probs, uq.wrap(model, posterior)(INPUTS).probs
    )


class Mask(nn.Module):
    """Half of a weight, for good."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tril()


def test_what_a_parametrization_fixes_stays_certain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    parametrize.register_parametrization(model.get_submodule("0"), "weight", Mask())
    masked = "0.parametrizations.weight.original"
    posterior = _fit(model)
    assert set(posterior.mean) == {masked, "0.bias", "2.weight", "2.bias"}
    # no gradient reaches what the mask sets to zero, and no prediction does
    without = torch.ones(4, 4).triu(1).bool()
    assert bool((posterior.variance()[masked][without] == 1).all())
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    plain.load_state_dict(
        {n.replace("parametrizations.weight.original", "weight"): v for n, v in model.state_dict().items()}
    )
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight)
    expected = _fit(plain, layers=lambda name, _: True).variance()["0.weight"]
    torch.testing.assert_close(posterior.variance()[masked][~without], expected[~without])
    assert set(_train(model).mean) == {"2.weight", "2.bias"}
    with pytest.raises(UnsupportedLayerError, match=r"'0': its weight is computed .*remove_parametrizations"):
        _train(model, unsupported="raise")


def test_a_computed_weight_is_wrapped_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 3))).eval()
    posterior = _fit(model)
    expected = uq.wrap(model, posterior)(INPUTS).probs
    with torch.inference_mode():
        torch.testing.assert_close(uq.wrap(model, posterior)(INPUTS).probs, expected)


def test_a_computed_weight_that_changes_is_noticed(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 3))).eval()
    posterior = _fit(model)
    uq.save(posterior, tmp_path / "p.h5")
    predictor = uq.wrap(model, posterior)
    predictor(INPUTS)
    with torch.no_grad():
        model.get_parameter("1.parametrizations.weight.original0").mul_(2)
    with pytest.raises(PosteriorMismatchError, match="original0"):
        predictor(INPUTS)
    for use in (lambda: uq.wrap(model, posterior), lambda: uq.load(tmp_path / "p.h5", model)):
        with pytest.raises(PosteriorMismatchError, match=r"1\.weight|weights"):
            use()


class Tied(nn.Module):
    """A language model in small: its last layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens).mean(1))))


class TiedFirst(Tied):
    """The same, with the last layer registered before the embedding, so that the weight is named after it."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {name: self._modules[name] for name in ("head", "embedding", "body")}


@pytest.mark.parametrize("kind", [Tied, TiedFirst])
@pytest.mark.parametrize("layers", ["last", "all", "head"])
@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
@pytest.mark.covering(2)
def test_a_weight_tied_to_an_embedding_is_fitted_where_it_is_a_layer(
    kind: type[Tied], layers: str, head: str, tmp_path: Any
) -> None:
    model = kind()
    before = copy.deepcopy(model.state_dict())
    apart = kind()
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers="all", about the embedding
        posterior, expected = (_fit(net, TOKENS, layers=layers, method="diag") for net in (model, apart))
    assert set(posterior.variance()) == set(expected.variance())
    torch.testing.assert_close(posterior.variance(), expected.variance())
    assert "'head' shares its weight" in posterior.history.deterministic["embedding.weight"]
    uq.save(posterior, tmp_path / "p.h5")
    truth = uq.wrap(apart, expected, head)(TOKENS).probs
    loaded = uq.load(tmp_path / "p.h5", model)
    for other in (posterior, loaded):
        found = uq.wrap(model, other, head)(TOKENS).probs
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)
    more = uq.update(loaded, [(TOKENS, torch.zeros(len(TOKENS), dtype=torch.int64))], progress=False)
    assert set(more.variance()) == set(expected.variance())
    assert model.head.weight is model.embedding.weight
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["utvi", "message_passing"])
def test_trainings_leave_a_tied_embedding_certain(method: str) -> None:
    data = [(TOKENS, TOKENS[:, 0])]
    model, apart = Tied(), Tied()
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    options: dict[str, Any] = {"layers": "last", "progress": False, "prior_precision": 1.0, "epochs": 3}
    found, expected = (uq.fit(net, data, method, **options).mean["head.weight"] for net in (model, apart))
    torch.testing.assert_close(found, expected)
    assert model.head.weight is model.embedding.weight


def test_an_untied_copy_is_still_served(tmp_path: Any) -> None:
    model = Tied()
    own = uq.untied(model, "head")
    assert own.get_submodule("head").weight.data_ptr() == model.head.weight.data_ptr()
    posterior = _fit(own, TOKENS, layers="last", method="full")
    uq.save(posterior, tmp_path / "p.h5")
    truth = uq.wrap(own, posterior)(TOKENS).probs
    for net in (own, model):
        torch.testing.assert_close(uq.wrap(net, uq.load(tmp_path / "p.h5", net))(TOKENS).probs, truth)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("function", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
def test_a_weight_by_hooks_in_a_layer_without_a_posterior(function: str, head: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_old(function)(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    model(INPUTS).sum().backward()
    kept, state = model.get_submodule("0").weight, copy.deepcopy(model.state_dict())
    posterior = _fit(model, layers="last")
    prediction = uq.wrap(model, posterior, head)(INPUTS)
    assert model.get_submodule("0").weight is kept and kept.grad_fn is not None
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    getattr(nn.utils, f"remove_{function}")(model.eval().get_submodule("0"))
    expected = _fit(model, layers="last")
    torch.testing.assert_close(posterior.variance()["2.weight"], expected.variance()["2.weight"])
    torch.testing.assert_close(prediction.probs, uq.wrap(model, expected, head)(INPUTS).probs)


class Keeping(nn.Module):
    """Keeps its features of the last pass, with their graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.readout = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.body(x))
        return self.readout(self.features)


def test_features_that_a_model_keeps_with_their_graph() -> None:
    model, fresh = Keeping(), Keeping()
    model(INPUTS)
    kept = model.features
    found, expected = _fit(model).variance(), _fit(fresh).variance()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.features is kept


class Turned(nn.Module):
    """An autoencoder whose decoder is its encoder transposed."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 3, bias=False) if linear else None
        self.weight = None if linear else nn.Parameter(torch.randn(4, 3))
        self.readout = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.encoder is not None:
            h = torch.nn.functional.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T)
        else:
            h = torch.tanh(x @ self.weight) @ self.weight.T
        return self.readout(torch.tanh(h))


@pytest.mark.parametrize(("linear", "layer"), [(True, "encoder"), (False, "weight")])
def test_a_weight_used_plain_and_transposed_is_refused_with_both_uses(linear: bool, layer: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=r"both as it is and transposed.*a parameter of its own"):
        _train(Turned(linear), layers=[layer])
    (served,) = _fit(Turned(linear), layers=[layer]).layers.values()
    assert (served.name, served.kind) == (layer, "parameter2d")  # by the samples' gradients
    assert list(_fit(Turned(linear), layers=["readout"]).layers) == ["readout"]


class Siblings(nn.Module):
    """Two layers of one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.readout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("layers", ["all", ["first"], ["second"]])
def test_one_weight_with_two_biases_is_refused_with_the_way_out(layers: Any) -> None:
    model = Siblings()
    with pytest.raises(
        UnsupportedLayerError, match=r"'first' \(Linear\) and 'second' .*posthoc_uq\.untied\(model, 'first'\)"
    ):
        _train(model, layers=layers, unsupported="raise")
    assert "first" in _fit(model, layers=layers).layers
    found = _fit(uq.untied(model, "first"), layers=layers)
    assert set(found.layers) == ({"first", "second", "readout"} if layers == "all" else set(layers))
