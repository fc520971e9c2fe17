"""The faithful prior, against the divergence computed from its definition."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from networks import without_training
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.randomness import sample_keys
from posthoc_uq.curvature.kept_inputs import KeptInputs
from posthoc_uq.fitting.prior import TOLERANCE, FaithfulSearch, widest_within
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian


def _classifier(inputs: int = 120, classes: int = 3, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.randn(inputs, 4)
        y = (x[:, 0] + 0.7 * torch.randn(inputs) > 0).long() + (classes - 2) * (x[:, 1] > 0.5).long()
        model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, classes))
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model, x, y


@pytest.fixture(scope="module")
def classifier():
    return _classifier()


def _moments(model, posterior, x):
    """Mean and covariance of the logits of a dense posterior, from autograd's Jacobians and a dense inverse."""
    parameters = {n: p.detach().double() for n, p in model.named_parameters()}

    def outputs(values):
        return torch.func.functional_call(model, values, x.double())

    jacobians = torch.func.jacrev(outputs)(parameters)
    columns = []
    for layer in posterior.layers.values():
        weight, bias = jacobians[layer.weight], jacobians[layer.bias]
        columns.append(torch.cat([weight, bias.unsqueeze(-1)], dim=-1).flatten(2))
    jacobian = torch.cat(columns, dim=2)
    fisher = posterior.blocks["joint"].tensors()["fisher"].double()
    precision = posterior.scale * fisher + posterior.prior_precision * torch.eye(len(fisher)).double()
    covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.transpose(1, 2)
    return outputs(parameters), covariance


def _divergence(model, posterior, x, temperature: float = 1.0, draws: int = 20_000) -> float:
    """``mean KL(p_net || p_post)`` by plain Monte Carlo over Gaussian logits, and the excess of entropy."""
    mean, covariance = _moments(model, posterior, x)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(mean.shape[1]).double())
    normals = torch.randn(draws, mean.shape[1], 1, generator=torch.Generator().manual_seed(0)).double()
    logits = mean + (root @ normals.unsqueeze(1)).squeeze(-1)
    probs = (logits / temperature).softmax(-1).mean(0)
    own = mean.softmax(1)
    divergence = (own * (own.log() - probs.log())).sum(1).mean()
    entropies = -(probs * probs.log()).sum(1).mean(), -(own * own.log()).sum(1).mean()
    return float(divergence), float(entropies[0] - entropies[1])


@pytest.mark.parametrize("budget", [0.003, 0.03])
def test_the_widest_within_the_budget_by_its_definition(classifier, budget):
    model, x, y = classifier
    posterior = uq.fit(
        model, [(x, y)], method="full", prior_precision=1.0, dtype=torch.float64, progress=False
    )
    options = {"link": "mc", "n_draws": 4000, "head": "linearized"}
    trials = uq.tune(
        posterior, [x], criterion="faithful", divergence=budget, temperature=False, progress=False, **options
    )
    found = posterior.prior_precision
    double = copy.deepcopy(model).double()
    assert _divergence(double, posterior, x)[0] == pytest.approx(budget, rel=0.15)
    assert _divergence(double, posterior, x)[0] < budget * 1.03  # Monte Carlo's own error
    posterior.prior_precision = found / 10 ** (2 * TOLERANCE)
    assert _divergence(double, posterior, x)[0] > budget * 0.97
    assert all(t.objective <= budget for t in trials.trials if t.settings.prior_precision >= found)


def test_the_matched_temperature_has_the_networks_entropy(classifier):
    model, x, y = classifier
    posterior = uq.fit(
        model, [(x, y)], method="full", prior_precision=1.0, dtype=torch.float64, progress=False
    )
    options = {"link": "mc", "n_draws": 4000, "head": "linearized"}
    uq.tune(
        posterior, [x], criterion="faithful", divergence=0.01, temperature=True, progress=False, **options
    )
    assert 0.3 < posterior.temperature < 1.0
    double = copy.deepcopy(model).double()
    divergence, excess = _divergence(double, posterior, x, posterior.temperature)
    assert abs(excess) < 2e-3
    assert divergence == pytest.approx(0.01, rel=0.2)


def test_a_second_search_compares_with_the_network_and_not_with_the_first(classifier):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], progress=False)
    first = posterior.prior_precision
    for _ in range(2):
        uq.tune(posterior, [x], criterion="faithful", temperature=True, progress=False)
        assert posterior.temperature < 0.95
    uq.tune(posterior, [x], criterion="faithful", progress=False)
    assert posterior.temperature == 1.0
    assert posterior.prior_precision == pytest.approx(first, rel=0.05)
    posterior.temperature = 2.0  # the user's own, which the network is compared at
    uq.tune(posterior, [x], criterion="faithful", progress=False)
    assert posterior.history.faithful["network_temperature"] == 2.0


def test_divergences_of_the_likelihoods():
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    prediction = uq.ClassPrediction(other.softmax(1), other, torch.zeros_like(other))
    p, q = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=other)
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(Categorical().divergence(logits, prediction), expected)

    both = torch.stack([torch.zeros(5).double(), other[:, 0]], dim=1)
    prediction = uq.ClassPrediction(both.softmax(1), other[:, :1], torch.zeros(5, 1).double())
    p, q = (torch.distributions.Bernoulli(logits=v[:, 0]) for v in (logits, other))
    torch.testing.assert_close(
        Bernoulli().divergence(logits[:, :1], prediction), torch.distributions.kl_divergence(p, q)
    )

    variance, noise = other.square(), torch.tensor([0.5, 1.0, 2.0, 3.0]).double()
    prediction = uq.RegressionPrediction(other, variance, noise)
    p = torch.distributions.Normal(logits, noise.sqrt())
    q = torch.distributions.Normal(other, (noise + variance).sqrt())
    torch.testing.assert_close(
        Gaussian(noise).divergence(logits, prediction), torch.distributions.kl_divergence(p, q).mean(1)
    )


def test_a_class_that_the_network_rules_out_counts_for_nothing():
    logits = torch.tensor([[0.0, float("-inf")]])
    prediction = uq.ClassPrediction(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2), torch.zeros(1, 2))
    assert float(Categorical().divergence(logits, prediction)) == 0.0


def test_the_default_keeps_the_networks_predictions(classifier):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], progress=False)
    predictor = uq.wrap(model, posterior)
    assert predictor.head == "linearized"
    own = model(x).softmax(1)
    probs = predictor(x).probs
    assert (probs.argmax(1) == own.argmax(1)).float().mean() >= 0.97  # a tie may fall to the other side
    assert float((own * (own.log() - probs.log())).sum(1).mean().detach()) <= 0.0021
    assert float(predictor.functional_variance(x).mean()) > 1e-4  # and is no point estimate
    kept = posterior.history.faithful
    assert 0 < kept["divergence"] <= kept["budget"] == 0.002
    assert "faithful through head='linearized'" in str(posterior.report())


@pytest.mark.parametrize("method", without_training())
@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
def test_every_method_and_head_stays_within_the_budget(method, head):
    model, x, y = _classifier(60)
    posterior = uq.fit(model, [(x, y)], method=method, head=head, progress=False)
    own = model(x).softmax(1).detach()
    probs = uq.wrap(model, posterior)(x).probs.detach()
    divergence = float((own * (own.log() - probs.log())).sum(1).mean())
    assert divergence == pytest.approx(posterior.history.faithful["divergence"], abs=1e-5)
    assert 0.0007 < divergence <= 0.002


def test_batch_size_and_order_do_not_matter(classifier):
    model, x, y = classifier
    one = uq.fit(model, [(x, y)], progress=False)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    parts = [(x[i], y[i]) for i in order.split(7)]
    two = uq.fit(model, parts, progress=False)
    assert two.prior_precision == pytest.approx(one.prior_precision, rel=1e-3)
    assert two.temperature == pytest.approx(one.temperature, rel=1e-3)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_regression(shape):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(80, 3)
        y = x[:, :1].expand(-1, *shape or (1,)).reshape(80, *shape) + 0.3 * torch.randn(80, *shape)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, *shape or (1,)))
        model = model if shape else nn.Sequential(*model, nn.Flatten(0))
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(150):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
    posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
    prediction = uq.wrap(model, posterior)(x)
    noise = posterior.noise_variance.float().expand(len(x), -1).reshape(prediction.mean.shape)
    p = torch.distributions.Normal(model(x).detach(), noise.sqrt())
    q = torch.distributions.Normal(prediction.mean, prediction.standard_deviation)
    divergence = float(torch.distributions.kl_divergence(p, q).mean())
    assert 0.001 < divergence <= 0.002 + 1e-5
    assert posterior.temperature == 1.0


def test_a_prior_that_nothing_bounds_ends_at_an_edge_that_is_said():
    """A regression's data may bound every variance of its outputs, however wide the prior."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(400, 2)
        y = x.sum(1, keepdim=True) + torch.randn(400, 1)
        model = nn.Linear(2, 1)
    posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
    own = 1 / torch.cat([p.flatten() for p in model.parameters()]).square().mean().item()
    assert posterior.prior_precision >= own / 101
    assert "the widest prior that is looked at" in posterior.history.tuning["prior precision"]


def test_a_network_whose_outputs_hardly_depend_on_its_inputs_gets_weights_of_their_own_size():
    """Nothing bounds its prior; the widest that is looked at would break all heads but the linearised one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(12) for part in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 3)
    )
    for parameter in model[-1].parameters():
        parameter.data *= 1e-3
    x = torch.randn(16, 6)
    with pytest.warns(
        UserWarning, match="outputs hardly depend on its inputs.*Check that the weights are the trained"
    ):
        posterior = uq.fit(model, [(x, torch.randint(0, 3, (16,)))], progress=False)
    mean_square = float(torch.cat([p.detach().flatten() for p in model.parameters()]).square().mean())
    assert 1 <= posterior.prior_precision * mean_square <= 10
    assert "widest prior that is looked at" not in posterior.history.tuning["prior precision"]
    for head in ("linearized", "sampling", "moments"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bool(torch.isfinite(uq.wrap(model, posterior, head=head)(x).probs).all())
    model[-1].weight.data *= 3e4  # the same network with a say
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hardly depend")
        uq.fit(model, [(x, torch.randint(0, 3, (16,)))], progress=False)


def test_weights_of_nothing():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    posterior = uq.fit(model, [(x, torch.arange(40) % 2)], progress=False)
    assert 1e-2 <= posterior.prior_precision <= 1e4


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
def test_inputs_that_a_model_changes_in_place_are_left_alone(head):
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x.clamp_(-0.1, 0.1))

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    before, model = x.clone(), Clamps()
    posterior = uq.fit(model, [(x, torch.arange(40) % 2)], head=head, progress=False)
    assert torch.equal(x, before)
    uq.tune(posterior, [(x, torch.arange(40) % 2)], progress=False)
    assert torch.equal(x, before)
    if head != "sampling":  # whose draws run the model as it is
        uq.wrap(model, posterior)(x)
        assert torch.equal(x, before)


def test_per_layer_priors_move_together(classifier):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], prior_precision=1.0, progress=False)
    names = list(posterior.layers)
    posterior.prior_precision = {names[0]: 1.0, names[1]: 100.0}
    uq.tune(posterior, [x], criterion="faithful", head="linearized", progress=False)
    prior = posterior.prior_precision
    assert prior[names[1]] / prior[names[0]] == pytest.approx(100.0)
    assert posterior.history.faithful["value"] == prior


def test_what_cannot_be_reached_is_said_aloud():
    """A model that any change of its weights breaks, without a gradient that tells."""

    class Brittle(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("trained", self.linear.weight.detach().clone())

        def forward(self, x):
            change = (self.linear.weight - self.trained).detach()
            return self.linear(x) + 10 * torch.sin(1e20 * x @ change.T)

    model, x = Brittle(), torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="narrowest posterior"):
        posterior = uq.fit(model, [x], method="diag", head="sampling", progress=False)
    assert posterior.history.faithful["divergence"] > 0.002


def test_the_head_is_recorded_and_another_one_is_met_with_a_warning(classifier, tmp_path):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], head="moments", progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.history.head == {"name": "moments", "options": {}, "criterion": "faithful"}
    assert loaded.history.faithful == posterior.history.faithful
    assert loaded.settings == posterior.settings
    assert torch.equal(uq.wrap(model, loaded)(x).probs, uq.wrap(model, posterior)(x).probs)
    with pytest.warns(UserWarning, match=r"found for head='moments'.*criterion='faithful', head='sampling'"):
        uq.wrap(model, loaded, "sampling")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.wrap(model, loaded, "sampling")  # once is enough
        uq.wrap(model, loaded)
    uq.tune(loaded, [x], criterion="faithful", head="sampling", antithetic=True, progress=False)
    predictor = uq.wrap(model, loaded)
    assert predictor.head == "sampling" and predictor.identity()["antithetic"]


def test_options_choose_the_head_that_takes_them(classifier):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], prior_precision=10.0, progress=False)
    assert uq.wrap(model, posterior).head == "linearized"
    assert uq.wrap(model, posterior, n_samples=3).head == "sampling"
    assert uq.wrap(model, posterior, cov="full").head == "moments"


def test_a_likelihood_of_the_users_without_a_divergence_takes_the_evidence(classifier):
    class Own(Categorical):
        name = "own"
        divergence = uq.Likelihood.divergence

    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], likelihood=Own(), head="sampling", progress=False)
    assert posterior.history.head["criterion"] == "evidence"
    with pytest.raises(uq.PosthocUQError, match="no prediction that could be faithful"):
        uq.fit(model, [(x, y)], likelihood=Own(), prior_precision="faithful", progress=False)
    with pytest.raises(uq.PosthocUQError, match="divergence"):
        uq.tune(posterior, [x], criterion="faithful", progress=False)


@pytest.mark.parametrize("divergence", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_budget_that_is_none(classifier, divergence):
    model, x, y = classifier
    with pytest.raises(uq.PosthocUQError, match="budget in nats"):
        uq.fit(model, [(x, y)], divergence=divergence, progress=False)


class TestKeptInputs:
    """The inputs with the smallest hashes, whatever the batches."""

    def setup_method(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(50, 3, generator=generator)
        self.keys = sample_keys([self.x], 50, 0)

    def kept(self, sizes, wanted=8, budget=2**20):
        kept, start = KeptInputs(budget, uq.Categorical(), wanted), 0
        for size in sizes:
            part = slice(start, start + size)
            kept.see(Batch((self.x[part],), None, {"scale": 2.0}), self.keys[part])
            start += size
        return kept.batches(torch.device("cpu"))

    @pytest.mark.parametrize("sizes", [[50], [7] * 7 + [1], [1] * 50])
    def test_by_hash(self, sizes):
        (batch,) = self.kept(sizes)
        order = sorted(range(50), key=lambda i: int(self.keys[i]))[:8]
        assert torch.equal(batch.args[0], self.x[order])
        assert batch.kwargs == {"scale": 2.0}

    def test_copies_are_kept_once(self):
        self.x = self.x[:1].expand(50, 3).contiguous()
        self.keys = sample_keys([self.x], 50, 0)
        (batch,) = self.kept([50])
        assert len(batch.args[0]) == 1

    def test_within_the_memory_budget(self):
        (batch,) = self.kept([25, 25], budget=5 * 12)
        assert len(batch.args[0]) == 5

    def test_what_is_kept_within_a_budget_does_not_depend_on_the_order(self):
        wide = torch.randn(10, 30, generator=torch.Generator().manual_seed(1))
        parts = [*self.x.split(5), *wide.split(1)]
        found = set()
        for seed in range(5):
            kept = KeptInputs(40 * 12, uq.Categorical(), 40)
            order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
            for index in order.tolist():
                kept.see(Batch((parts[index],)), sample_keys([parts[index]], len(parts[index]), 0))
            found.add(
                tuple(sorted(tuple(batch.args[0].shape) for batch in kept.batches(torch.device("cpu"))))
            )
        assert len(found) == 1

    def test_what_all_samples_share_stays_shared(self):
        one, two = torch.ones(1, 3), torch.zeros(1, 3)
        kept = KeptInputs(2**20, uq.Categorical(), 50)
        kept.see(Batch((self.x[:4], one)), self.keys[:4])
        kept.see(Batch((self.x[4:9], two)), self.keys[4:9])
        found = kept.batches(torch.device("cpu"))
        assert sorted((len(batch.args[0]), float(batch.args[1].sum())) for batch in found) == [
            (4, 3.0),
            (5, 0.0),
        ]
        assert all(batch.args[1].shape == (1, 3) for batch in found)

    def test_inputs_of_several_shapes(self):
        kept = KeptInputs(2**20, uq.Categorical(), 50)
        kept.see(Batch((self.x[:4],)), self.keys[:4])
        wide = torch.cat([self.x[4:6], self.x[4:6]], dim=1)
        kept.see(Batch((wide,)), sample_keys([wide], 2, 0))
        assert sorted(len(batch.args[0]) for batch in kept.batches(torch.device("cpu"))) == [2, 4]


class _Law:
    """A divergence that is a given function of the decade, and remembers its values."""

    def __init__(self, law: Callable[[float], float]) -> None:
        self._law, self.values = law, dict[float, float]()

    def __call__(self, decade: float) -> float:
        if decade not in self.values:
            self.values[decade] = self._law(decade)
        return self.values[decade]

    def widest(self, budget: float) -> float:
        return widest_within(self, budget, start=3.0, low=-2.0, high=12.0)[0]


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

                search = _Law(law)
                found = search.widest(budget)
                assert edge <= found <= edge + TOLERANCE
                tried.append(len(search.values))
    assert max(tried) <= 9 and sum(tried) / len(tried) < 4.5  # bisection would take ten on average
    assert _Law(lambda decade: 0.0).widest(budget) == -2  # the widest prior that is looked at
    assert _Law(lambda decade: 1.0).widest(budget) == 12  # the narrowest


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_divergence_that_stops_growing_within_the_budget_is_followed_to_the_widest(share: float) -> None:
    search = _Law(lambda decade: 0.002 * share / (1 + 10 ** (decade - 1)))
    assert search.widest(0.002) == -2
    assert len(search.values) <= 8


def test_a_start_just_within_the_budget_is_not_the_end_by_itself():
    search = _Law(lambda decade: 0.00197 / (1 + 10 ** (2 * (decade - 6.95))))
    assert search.widest(0.002) == -2
    search = _Law(lambda decade: 10 ** (-2 * decade))
    assert 5 <= search.widest(1e-10) <= 5 + TOLERANCE


@pytest.mark.parametrize("wrong", [-0.6, -0.2, 0.0, 0.02, 0.3, 1.1])
def test_a_good_start_with_its_slope_saves_evaluations(wrong: float) -> None:
    """As on all inputs, once a few of them were searched."""
    search = _Law(lambda decade: 0.002 * 10 ** (1.7 * (0.4 - decade)))
    found, slope = widest_within(search, 0.002, 0.4 + wrong, -2.0, 12.0, slope=1.8, upwards=TOLERANCE)
    assert 0.4 <= found <= 0.4 + TOLERANCE
    assert slope == pytest.approx(1.7, abs=0.11)
    assert len(search.values) <= (1 if wrong == 0.02 else 3 if wrong > -0.5 else 4)


def test_the_search_on_few_inputs_changes_nothing_but_its_cost(classifier):
    model, x, y = classifier
    posterior = uq.fit(model, [(x, y)], prior_precision=1.0, progress=False)
    batches, found = [Batch((x[:100],)), Batch((x[100:],))], []
    for few in (True, False):
        predictor = uq.wrap(model, posterior, head="linearized")
        search = FaithfulSearch(posterior, batches, predictor)
        assert search._few is not None and search._few.samples == 8
        if not few:
            search._few = None
        found.append((search.run(0.003), posterior.prior_precision))
    (after_few, some), (on_all, all_only) = found
    assert some == pytest.approx(all_only, rel=10**TOLERANCE - 1)
    divergence = after_few.chosen.objective
    assert divergence == pytest.approx(0.003, rel=0.25) and divergence <= 0.003
    assert len(after_few.trials) <= len(on_all.trials)


def test_the_search_shows_a_bar_where_the_fit_shows_bars(classifier, capsys):
    model, x, y = classifier
    for progress in (False, True):
        uq.fit(model, [(x, y)], progress=progress)
        assert ("faithful prior" in capsys.readouterr().err) == progress


def test_a_cliff_is_found_from_both_sides() -> None:
    """Draws that break the model at once, without a warning by what came before."""
    for edge in (-1.2, 0.33, 2.99, 3.4):
        search = _Law(lambda decade, edge=edge: 1e-7 if decade > edge else float("inf"))
        assert edge <= search.widest(0.002) <= edge + TOLERANCE
