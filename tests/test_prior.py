"""The faithful prior, against the divergence computed from its definition; and the inputs it is measured on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from networks import without_training
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch, sample_keys
from posthoc_uq.curvature import KeptInputs
from posthoc_uq.fitting.faithful import TOLERANCE, FaithfulSearch, smallest_prior_within_budget
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian

HEADS = ("linearized", "sampling", "moments")


@cache
def classifier(inputs: int = 120) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of three classes, and what it was trained on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(inputs, 4)
        y = (x[:, 0] + 0.7 * torch.randn(inputs) > 0).long() + (x[:, 1] > 0.5).long()
        model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model, x, y


def fit(*data: Any, **options: Any) -> uq.Posterior:
    model, x, y = data or classifier()
    return uq.fit(model, [(x, y)], progress=False, **options)


def tuned(posterior: uq.Posterior, x: Tensor, **options: Any) -> Any:
    return uq.tune(posterior, [x], criterion="faithful", progress=False, **options)


def own_divergence(posterior: uq.Posterior, x: Tensor, temperature: float = 1.0) -> tuple[float, float]:
    """``mean KL(p_net || p_post)`` of a dense posterior, from autograd's Jacobians, a dense inverse and plain Monte
    Carlo over Gaussian logits; and the excess of entropy over the network's.
    """
    model = copy.deepcopy(posterior.model).double()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, x.double())

    jacobians = torch.func.jacrev(outputs)(parameters)
    columns = [
        torch.cat([jacobians[layer.weight], jacobians[layer.bias].unsqueeze(-1)], dim=-1).flatten(2)
        for layer in posterior.layers.values()
    ]
    jacobian, mean = torch.cat(columns, dim=2), outputs(parameters)
    fisher = posterior.blocks["joint"].tensors()["fisher"].double()
    precision = posterior.scale * fisher + posterior.prior_precision * torch.eye(len(fisher)).double()
    covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.transpose(1, 2)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(3).double())
    normals = torch.randn(20_000, 3, 1, generator=torch.Generator().manual_seed(0)).double()
    logits = mean + (root @ normals.unsqueeze(1)).squeeze(-1)
    probs, own = (logits / temperature).softmax(-1).mean(0), mean.softmax(1)
    excess = (own * own.log()).sum(1).mean() - (probs * probs.log()).sum(1).mean()
    return float((own * (own.log() - probs.log())).sum(1).mean()), float(excess)


DENSE: dict[str, Any] = {"method": "full", "prior_precision": 1.0, "dtype": torch.float64}
EXACT: dict[str, Any] = {"link": "mc", "n_draws": 4000, "head": "linearized"}


def test_the_widest_within_the_budget_by_its_definition() -> None:
    posterior, x, budget = fit(**DENSE), classifier()[1], 0.01
    posterior = tuned(posterior, x, divergence=budget, **EXACT)
    trials = posterior.history.trials
    found = posterior.prior_precision
    assert budget * 0.85 < own_divergence(posterior, x)[0] < budget * 1.03  # Monte Carlo's own error
    posterior = posterior.with_settings(prior_precision=found / 10 ** (2 * TOLERANCE))
    assert own_divergence(posterior, x)[0] > budget * 0.97
    assert trials.chosen.settings.prior_precision == found and trials.best is None
    assert all(t.objective <= budget for t in trials.trials if t.settings.prior_precision >= found)


def test_the_matched_temperature_has_the_networks_entropy() -> None:
    posterior, x = fit(**DENSE), classifier()[1]
    posterior = tuned(posterior, x, divergence=0.01, temperature=True, **EXACT)
    assert 0.3 < posterior.temperature < 1.0
    divergence, excess = own_divergence(posterior, x, posterior.temperature)
    assert abs(excess) < 2e-3 and divergence == pytest.approx(0.01, rel=0.2)


def test_a_second_search_compares_with_the_network_and_not_with_the_first() -> None:
    posterior, x = fit(), classifier()[1]
    first, left_out = posterior.prior_precision, posterior.temperature
    for _ in range(2):
        posterior = tuned(posterior, x, temperature=True)
        assert posterior.temperature < 0.95 * left_out
    posterior = tuned(posterior, x)
    assert posterior.temperature == left_out and posterior.prior_precision == pytest.approx(first, rel=0.05)
    posterior = posterior.with_settings(temperature=2.0)  # the user's own, which the network is compared at
    posterior = tuned(posterior, x)
    assert posterior.history.faithful.network_temperature == 2.0


def test_a_network_that_is_less_sure_than_right_keeps_its_mean_entropy() -> None:
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    y, unsure, binary = (x[:, 0] > 0).long(), nn.Linear(2, 2), nn.Linear(2, 1)  # always right
    with torch.no_grad():
        unsure.weight.copy_(torch.tensor([[-0.5, 0.0], [0.5, 0.0]]))
        binary.weight.copy_(torch.tensor([[1.0, 0.0]]))
        unsure.bias.zero_(), binary.bias.zero_()
        gap = float(1 - unsure(x).softmax(1).amax(1).mean())
        own = float(torch.distributions.Categorical(logits=unsure(x)).entropy().mean())
    found = fit(unsure, x, y)
    assert found.temperature < 0.99 and found.history.faithful.network_temperature == 1
    assert float(uq.wrap(unsure, found)(x).entropy().mean()) == pytest.approx(own, abs=2e-3)
    assert f"its confidence is {gap:.2f} below its accuracy" in str(found.report())
    of_one_logit = fit(binary, x, y, likelihood="binary")
    assert of_one_logit.temperature < 0.99 and f"{gap:.2f} below" in str(of_one_logit.report())
    in_batches = uq.fit(unsure, [(x[:70], y[:70]), (x[70:], y[70:])], progress=False)
    assert in_batches.temperature == pytest.approx(found.temperature, rel=1e-3)
    assert tuned(found, x).temperature == 1  # whoever asks for another search says what it keeps
    # where nothing speaks for it: labels at which the network is as sure as it is right, weights, soft labels, none
    wrong = torch.rand(200, generator=torch.Generator().manual_seed(1)) < gap
    for other, options in (
        ((x, torch.where(wrong, 1 - y, y)), {}),
        ((x, y, torch.ones(200)), {"batch_to_weights": lambda batch: batch[2]}),
        ((x, nn.functional.one_hot(y, 2).float()), {}),
        (x, {}),
    ):
        assert uq.fit(unsure, [other], progress=False, **options).temperature == 1


def test_divergences_of_the_likelihoods() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    kl, of = torch.distributions.kl_divergence, torch.distributions
    prediction = uq.ClassPrediction(other.softmax(1), other, torch.zeros_like(other))
    torch.testing.assert_close(
        Categorical().divergence(logits, prediction),
        kl(of.Categorical(logits=logits), of.Categorical(logits=other)),
    )
    both = torch.stack([torch.zeros(5).double(), other[:, 0]], dim=1)
    prediction = uq.ClassPrediction(both.softmax(1), other[:, :1], torch.zeros(5, 1).double())
    torch.testing.assert_close(
        Bernoulli().divergence(logits[:, :1], prediction),
        kl(of.Bernoulli(logits=logits[:, 0]), of.Bernoulli(logits=other[:, 0])),
    )
    variance, noise = other.square(), torch.tensor([0.5, 1.0, 2.0, 3.0]).double()
    normals = of.Normal(logits, noise.sqrt()), of.Normal(other, (noise + variance).sqrt())
    found = Gaussian(noise).divergence(logits, uq.RegressionPrediction(other, variance, noise))
    torch.testing.assert_close(found, kl(*normals).mean(1))
    ruled_out = torch.tensor([[0.0, float("-inf")]])  # a class that counts for nothing
    prediction = uq.ClassPrediction(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2), torch.zeros(1, 2))
    assert float(Categorical().divergence(ruled_out, prediction)) == 0.0


@pytest.mark.parametrize(
    ("method", "head"),
    [*((m, "linearized") for m in without_training()), ("inf", "sampling"), ("inf", "moments")],
)
def test_a_fit_stays_within_the_budget(method: str, head: str) -> None:
    model, x, y = classifier(60)
    posterior = fit(model, x, y, method=method, head=head)
    # at the temperature of leave-one-out, at which both are compared
    own = (model(x) / posterior.history.left_out.temperature).softmax(1).detach()
    probs = uq.wrap(model, posterior)(x).probs.detach()
    divergence = float((own * (own.log() - probs.log())).sum(1).mean())
    assert divergence == pytest.approx(posterior.history.faithful.divergence, abs=1e-5)
    assert 0.0007 < divergence <= posterior.history.faithful.budget == 0.002
    assert f"faithful through head='{head}'" in str(posterior.report())


def test_a_prior_that_nothing_bounds_ends_at_an_edge_that_is_recorded() -> None:
    """A regression's data may bound every variance of its outputs, however wide the prior."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, model = torch.randn(400, 2), nn.Linear(2, 1)
        y = x.sum(1, keepdim=True) + torch.randn(400, 1)
    posterior = fit(model, x, y, likelihood="regression")
    own = 1 / torch.cat([p.flatten() for p in model.parameters()]).square().mean().item()
    assert posterior.prior_precision >= own / 101
    assert "the widest prior that is looked at" in posterior.history.tuning["prior precision"]


def test_a_network_whose_outputs_hardly_depend_on_its_inputs_gets_weights_of_their_own_size() -> None:
    """Nothing bounds its prior; the widest that is looked at would break all heads but the linearised one."""
    torch.manual_seed(0)
    parts = [part for _ in range(12) for part in (nn.Linear(6, 6), nn.ReLU())]
    model, x, y = nn.Sequential(*parts, nn.Linear(6, 3)), torch.randn(16, 6), torch.randint(0, 3, (16,))
    for parameter in model[-1].parameters():
        parameter.data *= 1e-3
    with pytest.warns(UserWarning, match="hardly depend"):
        posterior = fit(model, x, y)
    mean_square = float(torch.cat([p.detach().flatten() for p in model.parameters()]).square().mean())
    assert 1 <= posterior.prior_precision * mean_square <= 10
    model[-1].weight.data *= 3e4  # the same network with a say
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hardly depend")
        fit(model, x, y)
    zeros = nn.Linear(6, 2)
    with torch.no_grad():
        zeros.weight.zero_(), zeros.bias.zero_()
    with pytest.warns(UserWarning, match="hardly depend"):
        assert 1e-2 <= fit(zeros, x, y % 2).prior_precision <= 1e4


@pytest.mark.parametrize("head", HEADS)
def test_inputs_that_a_model_changes_in_place_are_left_alone(head: str) -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.clamp_(-0.1, 0.1))

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    before, y = x.clone(), torch.arange(40) % 2
    posterior = fit(Clamps(), x, y, head=head)
    posterior = uq.tune(posterior, [(x, y)], progress=False)
    assert torch.equal(x, before)


def test_priors_by_layer_move_together() -> None:
    posterior, x = fit(prior_precision=1.0), classifier()[1]
    first, second = posterior.layers
    posterior = posterior.with_settings(prior_precision={first: 1.0, second: 100.0})
    posterior = tuned(posterior, x, head="linearized")
    prior = posterior.prior_precision
    assert prior[second] / prior[first] == pytest.approx(100.0)
    assert posterior.history.faithful.value == prior


def test_what_cannot_be_reached_is_warned_of() -> None:
    """A model that any change of its weights breaks, without a gradient that tells."""

    class Brittle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("trained", self.linear.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            change = (self.linear.weight - self.trained).detach()
            return self.linear(x) + 10 * torch.sin(1e20 * x @ change.T)

    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="narrowest"):
        posterior = uq.fit(Brittle(), [x], method="diag", head="sampling", progress=False)
    assert posterior.history.faithful.divergence > 0.002


class TestKeptInputs:
    """The inputs with the smallest hashes, whatever the batches."""

    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))

    def kept(
        self, parts: Sequence[Tensor], wanted: int = 8, budget: int = 2**20, shared: Sequence[Any] = ()
    ) -> list[Batch]:
        kept = KeptInputs(budget, uq.Categorical(), wanted)
        for index, part in enumerate(parts):
            others = (shared[index],) if shared else ()
            batch = Batch((part, *others), None, {"scale": 2.0})
            kept.see(batch, sample_keys([part], len(part), 0))
        return kept.batches(torch.device("cpu"))

    @pytest.mark.parametrize("size", [50, 7, 1])
    def test_by_hash(self, size: int) -> None:
        (batch,) = self.kept(self.x.split(size))
        order = sample_keys([self.x], 50, 0).argsort()[:8]
        assert torch.equal(batch.args[0], self.x[order]) and batch.kwargs == {"scale": 2.0}

    def test_copies_are_kept_once_and_large_ones_within_the_memory_budget(self) -> None:
        (batch,) = self.kept([self.x[:1].expand(50, 3).contiguous()])
        assert len(batch.args[0]) == 1
        (batch,) = self.kept(self.x.split(25), budget=5 * 12)
        assert len(batch.args[0]) == 5

    def test_what_is_kept_within_a_budget_does_not_depend_on_the_order(self) -> None:
        wide = torch.randn(10, 30, generator=torch.Generator().manual_seed(1))
        parts, found = [*self.x.split(5), *wide.split(1)], set()
        for seed in range(5):
            order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
            kept = self.kept([parts[index] for index in order], 40, 40 * 12)
            found.add(tuple(sorted(tuple(batch.args[0].shape) for batch in kept)))
        assert len(found) == 1

    def test_samples_that_do_not_fit_into_one_batch(self) -> None:
        shared = self.kept([self.x[:4], self.x[4:9]], 50, shared=[torch.ones(1, 3), torch.zeros(1, 3)])
        assert sorted((len(b.args[0]), float(b.args[1].sum())) for b in shared) == [(4, 3.0), (5, 0.0)]
        wide = torch.cat([self.x[4:6], self.x[4:6]], dim=1)
        assert sorted(len(b.args[0]) for b in self.kept([self.x[:4], wide], 50)) == [2, 4]


class Law:
    """A divergence that is a given function of the decade, and remembers its values."""

    def __init__(self, law: Callable[[float], float]) -> None:
        self._law, self.values = law, dict[float, float]()

    def __call__(self, decade: float) -> float:
        if decade not in self.values:
            self.values[decade] = self._law(decade)
        return self.values[decade]

    def widest(self, budget: float = 0.002) -> float:
        return smallest_prior_within_budget(self, budget, start=3.0, low=-2.0, high=12.0)[0]


def test_few_predictions_find_the_widest_posterior_within_the_budget() -> None:
    budget, tried = 0.002, list[int]()
    for edge in (-1.7, -0.313, 0.0, 0.49, 1.62, 2.94, 4.51):
        for growth in (0.5, 1.0, 1.9):
            for most in (0.004, 1.0, float("inf")):

                def law(
                    decade: float, edge: float = edge, growth: float = growth, most: float = most
                ) -> float:
                    exact = budget * 10 ** (growth * (edge - decade))
                    if most == float("inf"):  # draws that break the model
                        return exact if decade > edge - 0.5 else most
                    return exact / (1 + (exact - budget) / most) if exact > budget else exact

                search = Law(law)
                assert edge <= search.widest(budget) <= edge + TOLERANCE
                tried.append(len(search.values))
    assert max(tried) <= 9 and sum(tried) / len(tried) < 4  # Brent's root finder takes seven or eight
    assert Law(lambda decade: 0.0).widest() == -2  # the widest prior that is looked at
    assert Law(lambda decade: 1.0).widest() == 12  # the narrowest
    for share in (0.0, 0.01, 0.5, 0.99):  # a divergence that stops growing within the budget
        search = Law(lambda decade, share=share: budget * share / (1 + 10 ** (decade - 1)))
        assert search.widest() == -2 and len(search.values) <= 8
    for edge in (-1.2, 0.33, 2.99, 3.4):  # draws that break the model at once, without a sign before
        search = Law(lambda decade, edge=edge: 1e-7 if decade > edge else float("inf"))
        assert edge <= search.widest() <= edge + TOLERANCE
    # a start just within the budget is not the end by itself
    assert Law(lambda decade: 0.00197 / (1 + 10 ** (2 * (decade - 6.95)))).widest() == -2
    assert 5 <= Law(lambda decade: 10 ** (-2 * decade)).widest(1e-10) <= 5 + TOLERANCE


@pytest.mark.parametrize("wrong", [-0.6, -0.2, 0.0, 0.02, 0.3, 1.1])
def test_a_good_start_with_its_slope_saves_evaluations(wrong: float) -> None:
    """As on all inputs, once a few of them were searched."""
    search = Law(lambda decade: 0.002 * 10 ** (1.7 * (0.4 - decade)))
    found, slope = smallest_prior_within_budget(
        search, 0.002, 0.4 + wrong, -2.0, 12.0, slope=1.8, upwards=TOLERANCE
    )
    assert 0.4 <= found <= 0.4 + TOLERANCE and slope == pytest.approx(1.7, abs=0.11)
    assert len(search.values) <= (1 if wrong == 0.02 else 3 if wrong > -0.5 else 4)


def test_what_saves_evaluations_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of backward passes, checked on 64 of 200 inputs; a look at 8 inputs; or every evaluation on all."""
    model, x, _ = classifier()
    posterior, found = fit(prior_precision=1.0), list[Any]()
    for way in ("one set of passes", "few inputs", "all"):
        predictor = uq.wrap(model, posterior, head="linearized")
        if way != "one set of passes":
            monkeypatch.setattr(predictor, "at_every_prior", lambda *_, **__: None)
        search = FaithfulSearch([Batch((x[:100],)), Batch((x[100:],))], predictor)
        if way == "all":
            monkeypatch.setattr(type(search._all), "runs_the_model", False)
        trials = search.run(0.003)
        chosen = trials.chosen
        found.append((chosen.objective, chosen.settings.prior_precision, len(trials.trials)))
    for divergence, prior, evaluations in found:
        assert prior == pytest.approx(found[-1][1], rel=10**TOLERANCE - 1)
        assert 0.75 * 0.003 <= divergence <= 0.003 and evaluations <= found[-1][2]
