"""Hyperparameters by evidence and by held-out data, against grids computed independently."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import without_training
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.posteriors.evidence import search_decades


def _regression(outputs: int = 1):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.rand(80, 1, dtype=torch.float64) * 4 - 2
        y = torch.sin(2 * x) @ torch.ones(1, outputs, dtype=torch.float64) + 0.1 * torch.randn(
            80, outputs, dtype=torch.float64
        )
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, outputs)).double()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(400):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
    return model, x, y


@pytest.fixture(scope="module")
def regression():
    return _regression()


@pytest.fixture(scope="module")
def classifier():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x = torch.randn(300, 4)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
        y = torch.where(torch.rand(300) < 0.15, torch.randint(0, 3, (300,)), y)
        model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[:150]), y[:150]).backward()
            optimiser.step()
    return model, [(x[:150], y[:150])], [(x[150:220], y[150:220]), (x[220:], y[220:])]


@pytest.mark.parametrize("method", without_training())
def test_evidence_finds_the_best_of_a_grid(regression, method):
    model, x, y = regression
    posterior = uq.fit(
        model, [(x, y)], method=method, likelihood="regression", prior_precision="evidence", progress=False
    )
    best = posterior.log_marginal_likelihood().item()
    grid = [
        posterior.log_marginal_likelihood(prior_precision=float(tau)).item() for tau in np.logspace(-4, 5, 91)
    ]
    assert best >= max(grid) - 1e-3
    assert "log marginal likelihood" in str(posterior.report())
    slope_at = torch.tensor(posterior.prior_precision, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(prior_precision=slope_at), slope_at)
    assert abs(slope.item() * posterior.prior_precision) < 0.3  # flat in log tau


@pytest.mark.parametrize("method", ["inf", "full"])
def test_one_prior_precision_per_layer(regression, method):
    model, x, y = regression
    posterior = uq.fit(
        model, [(x, y)], method=method, likelihood="regression", prior_precision="evidence", progress=False
    )
    common = posterior.log_marginal_likelihood().item()
    uq.tune(posterior, per_layer=True)
    assert set(posterior.prior_precision) == set(posterior.layers)
    best = posterior.log_marginal_likelihood().item()
    assert best >= common - 1e-3
    for name in posterior.layers:
        for factor in (0.5, 2.0):
            moved = {k: v * (factor if k == name else 1.0) for k, v in posterior.prior_precision.items()}
            assert posterior.log_marginal_likelihood(prior_precision=moved).item() < best + 1e-3


def test_noise_by_evidence_and_by_default(regression):
    model, x, y = regression
    posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
    assert posterior.noise_scale == 1.0
    assert posterior.history.tuning["noise variance"].startswith("mean squared residual")
    before = posterior.log_marginal_likelihood().item()
    trials = uq.tune(posterior, noise=True)
    assert posterior.noise_scale != 1.0
    assert posterior.log_marginal_likelihood().item() >= before - 1e-3
    assert len({trial.settings.noise_scale for trial in trials.trials}) > 3
    factor = torch.tensor(posterior.noise_scale, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(noise_scale=factor), factor)
    assert abs(slope.item() * posterior.noise_scale) < 1.0


def test_log_likelihood_under_another_noise(regression):
    """The evidence's fit term at noise s^2 k is the Gaussian log density of the residuals, from the
    definition.
    """
    model, x, y = regression
    posterior = uq.fit(model, [(x, y)], likelihood="regression", noise_variance=0.02, progress=False)
    residual = (model(x) - y).detach()
    for factor in (0.5, 1.0, 3.0):
        expected = (
            torch.distributions.Normal(torch.zeros((), dtype=torch.float64), (0.02 * factor) ** 0.5)
            .log_prob(residual)
            .sum()
        )
        assert posterior.evidence.at_noise(factor) == pytest.approx(expected.item(), rel=1e-9)


def test_a_regression_without_targets_says_that_its_noise_is_one(regression):
    model, x, y = regression
    with pytest.warns(UserWarning, match=r"noise variance .* taken as 1.*noise_variance=\.\.\.") as said:
        posterior = uq.fit(model, [x], likelihood="regression", progress=False)
    assert [w.filename for w in said if "taken as 1" in str(w.message)] == [__file__]
    assert posterior.noise_variance.tolist() == [1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(model, [x], likelihood="regression", noise_variance=0.02, progress=False)
        uq.fit(model, [(x, y)], likelihood="regression", progress=False)


def _loss(model, posterior, held_out, **options) -> float:
    x, y = (torch.cat([batch[i] for batch in held_out]) for i in (0, 1))
    with torch.no_grad():
        return -uq.wrap(model, posterior, **options)(x).log_prob(y).double().mean().item()


@pytest.mark.parametrize("head", ["linearized", "sampling"])
def test_the_widest_that_held_out_data_hardly_mind(classifier, head):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, head=head, progress=False)
    trials = uq.tune(posterior, held_out, progress=False)
    faithful = trials.trials[0].settings.prior_precision  # of a budget of its own, on held-out inputs
    assert posterior.history.faithful["budget"] == 0.002  # the record is the fit's
    chosen, best = _loss(model, posterior, held_out), trials.best.objective
    assert posterior.prior_precision >= faithful * (1 - 1e-9)
    assert chosen <= best + 0.01 + 1e-6
    assert trials.given_up == pytest.approx(chosen - best, abs=1e-5)
    for trial in trials.trials:  # none that is wider was within reach
        if trial.settings.prior_precision < posterior.prior_precision * (1 - 1e-9):
            assert trial.objective > best + 0.01
    assert "given up" in posterior.history.tuning["prior precision"] and "given up" in str(trials)
    assert posterior.history.head["criterion"] == "likelihood"


def test_held_out_data_that_ask_for_certainty_narrow_the_posterior(classifier):
    """Labels that the network itself gives leave no room for doubt: NLL falls with the width."""
    model, train, held_out = classifier
    posterior = uq.fit(model, train, divergence=0.3, progress=False)
    faithful = posterior.prior_precision
    x = torch.cat([batch[0] for batch in held_out])
    own = [(x, model(x).argmax(1))]
    uq.tune(posterior, own, divergence=0.3, temperature=False, progress=False)
    assert posterior.history.faithful["value"] == faithful  # the one on record, of the same budget
    assert posterior.prior_precision > 1.5 * faithful


def test_a_faithful_prior_without_settings_is_found_anew(classifier):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, divergence=0.3, progress=False)
    posterior.history.faithful |= {"settings": {}, "value": 1e-3}  # as `load` gives it of a file without them
    trials = uq.tune(posterior, held_out, divergence=0.3, temperature=False, progress=False)
    assert min(trial.settings.prior_precision for trial in trials.trials) > 1e-2


def test_what_is_asked_for_is_searched(classifier):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, progress=False)
    before = _loss(model, posterior, held_out)
    trials = uq.tune(
        posterior, held_out, parameters=("residual_weight", "scale"), temperature=False, progress=False
    )
    assert _loss(model, posterior, held_out) <= before + 1e-6
    assert _loss(model, posterior, held_out) == pytest.approx(trials.best.objective, abs=1e-5)
    assert len({trial.settings.residual_weight for trial in trials.trials}) > 3
    assert len({trial.settings.scale for trial in trials.trials}) > 3
    assert len({trial.settings.prior_precision for trial in trials.trials}) == 1


def test_trials_name_what_was_chosen_and_then_the_best(classifier):
    model, loader, val_loader = classifier
    posterior = uq.fit(model, loader, method="diag", progress=False)
    trials = uq.tune(posterior, val_loader, parameters=("prior_precision",), progress=False)
    losses = [trial.objective for trial in trials.trials]
    assert trials.best is trials.trials[losses.index(min(losses))] and len(losses) >= 3
    assert trials.chosen is not trials.best and trials.chosen.settings.temperature == posterior.temperature
    lines = str(trials).splitlines()
    assert lines[0].startswith(f"chosen: prior precision={posterior.prior_precision:.5g}  ")
    given_up = _loss(model, posterior, val_loader) - min(losses)
    assert lines[1] == f"given up against the best, for a wider posterior: {given_up:.2g} nats"
    assert lines[2].startswith(f"best: prior precision={trials.best.settings.prior_precision:.5g}  ")
    assert len(lines) == 5 + len(losses), "the network alone, a heading, and every evaluation"
    chosen = f"chosen: prior precision={posterior.prior_precision:.5g}  "
    assert repr(trials).startswith(f"Trials({len(losses)} evaluations; {chosen}")
    assert repr(trials).endswith(f"{given_up:.2g} nats given up against the best)")
    trials = uq.tune(posterior)
    values = [trial.objective for trial in trials.trials]
    assert trials.chosen is trials.best is trials.trials[values.index(max(values))]
    assert "best" not in str(trials) and "given up" not in repr(trials)
    trials = uq.tune(posterior, loader, criterion="faithful", progress=False)
    assert trials.chosen.settings.prior_precision == posterior.prior_precision and trials.best is None
    assert str(trials).startswith(f"chosen: prior precision={posterior.prior_precision:.5g}  ")
    trials = uq.tune(posterior, per_layer=True)
    assert trials.best is None and trials.chosen is None  # one a layer
    assert repr(trials).endswith("chosen: one a search)")


@pytest.fixture(scope="module")
def good_network():
    """A network with an NLL of a few hundredths, and what it was trained on and was not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    y = (x[:, 0] + 0.03 * torch.randn(400, generator=generator) > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
            optimiser.step()
    return model, (x[:200], y[:200]), (x[200:], y[200:])


def test_a_good_network_keeps_its_fit_where_no_other_width_predicts_better(good_network):
    """With an NLL of .02 the narrower posteriors gain next to nothing, and the wider ones lose some."""
    model, train, held_out = good_network
    for options in ({"temperature": False}, {}):
        posterior = uq.fit(model, [train], progress=False)
        own = posterior.prior_precision
        trials = uq.tune(posterior, [held_out], progress=False, **options)
        best, chosen = trials.best.objective, trials.chosen.objective
        assert 0.0 < best < 0.08 and best <= chosen <= best + 3 / 200
        assert posterior.prior_precision == pytest.approx(own, rel=1e-6)
        assert trials.chosen.settings.temperature == posterior.temperature == pytest.approx(1.0, abs=0.02)
        assert min(trial.settings.prior_precision for trial in trials.trials) < own
        prediction = uq.wrap(model, posterior)(held_out[0])
        assert chosen == pytest.approx(-float(prediction.log_prob(held_out[1]).double().mean()), rel=1e-5)


@pytest.mark.parametrize("found", ["by the fit", "by held-out inputs", "in a grid"])
def test_a_few_labels_without_a_mistake_make_nothing_narrower_than_the_fit(good_network, found):
    """Their NLL goes to zero with the width, and a tenth of nothing would leave no posterior at all."""
    model, train, (x, _) = good_network
    far = x[model(x).detach().diff(dim=1).abs().squeeze() > 4][:30]
    few = (far, model(far).argmax(1))
    posterior = uq.fit(model, [train], progress=False)
    own, grid = posterior.prior_precision, None
    if found == "by held-out inputs":  # of the fit's budget: its own prior is no longer on record
        uq.tune(posterior, [few], criterion="faithful", progress=False)
        assert abs(posterior.prior_precision / own - 1) > 0.1
        own = posterior.prior_precision
        uq.tune(posterior, [few], temperature=False, prior_precisions=[1.0], progress=False)
    elif found == "in a grid":
        grid = [0.1, 1.0, 10.0, 100.0, 1e3, 1e5]
    trials = uq.tune(posterior, [few], temperature=False, prior_precisions=grid, progress=False)
    best, chosen = trials.best.objective, trials.chosen.objective
    assert 1.1 * best < chosen <= best + 0.01
    wanted = own if grid is None else min(value for value in grid if value > own)
    assert posterior.prior_precision == pytest.approx(wanted, rel=1e-6)
    assert "at most 0.01 above the best" in posterior.history.tuning["prior precision"]


@pytest.fixture(scope="module")
def overfitted_network():
    """A network that knows its 20 inputs by heart, these, and others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=generator) > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[:20]), y[:20]).backward()
            optimiser.step()
    return model, (x[:20], y[:20]), (x[20:], y[20:])


def test_the_fit_is_kept_also_where_the_search_begins_narrower(overfitted_network):
    """Far inputs diverge more than those of the training, so the budget on them leaves a narrower posterior."""
    model, train, (x, _) = overfitted_network
    far = 4 * x[:60]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.distributions.Categorical(logits=model(far)).sample()
    posterior = uq.fit(model, [train], progress=False)
    own = posterior.prior_precision
    trials = uq.tune(posterior, [(far, labels)], progress=False)
    assert trials.trials[0].settings.prior_precision > 1.2 * own
    assert posterior.prior_precision == pytest.approx(own, rel=1e-6)
    # a budget below that of the fit is kept
    trials = uq.tune(posterior, [(far, labels)], divergence=1e-4, progress=False)
    assert min(trial.settings.prior_precision for trial in trials.trials) > 2 * own
    assert posterior.prior_precision > 2 * own


@pytest.mark.parametrize("prior", [None, 5.0])
def test_a_second_call_finds_the_same_as_the_first(overfitted_network, tmp_path, prior):
    """Also after the file was read; the record of the fit's own prior stays."""
    model, train, held_out = overfitted_network[:3]
    posterior = uq.fit(model, [train], prior_precision=prior, progress=False)
    fitted = dict(posterior.history.faithful)
    uq.tune(posterior, [held_out], progress=False)
    first = posterior.settings.plain()
    assert posterior.history.faithful == fitted
    uq.save(posterior, tmp_path / "tuned.h5")
    for again in (posterior, uq.load(tmp_path / "tuned.h5", model)):
        uq.tune(again, [held_out], progress=False)
        assert again.settings.plain() == pytest.approx(first, rel=1e-6)


def test_the_prior_of_the_temperature_counts_for_the_width(overfitted_network):
    """Two modes of the temperature, near 1 and near 4, are about as probable: the width must not decide by the
    likelihood alone, for which the second is always better.
    """
    model, train, (x, y) = overfitted_network
    posterior = uq.fit(model, [train], progress=False)
    trials = uq.tune(posterior, [(x[:30], y[:30])], progress=False)

    def objective(trial: dict[str, Any]) -> float:
        return trial.objective + np.log1p((np.log(max(1.0, trial.settings.temperature)) / 0.1) ** 2) / 30

    best = min(map(objective, trials.trials))
    assert {trial.settings.temperature > 3 for trial in trials.trials} == {True, False}
    assert objective(trials.chosen) <= best + 0.01
    for trial in trials.trials:  # none that is wider was within reach
        if trial.settings.prior_precision < posterior.prior_precision * (1 - 1e-9):
            assert objective(trial) > best + 0.01


def test_a_density_gives_up_a_hundredth_whatever_the_unit_of_its_targets(regression):
    """Its NLL falls by a constant with the unit, so a share of it says nothing."""
    model, x, y = regression
    trials, units = {}, {"small": 0.05, "large": 20.0}
    for name, unit in units.items():
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            scaled[2].weight *= unit
            scaled[2].bias *= unit
        posterior = uq.fit(scaled, [(x[::2], unit * y[::2])], likelihood="regression", progress=False)
        trials[name] = uq.tune(posterior, [(x[1::2], unit * y[1::2])], progress=False)
        assert "at most 0.01 above the best" in posterior.history.tuning["prior precision"]
    assert trials["small"].best.objective < 0 < trials["large"].best.objective


def test_fit_tunes_at_once(classifier):
    model, train, held_out = classifier
    one = uq.fit(model, train, val_loader=held_out, progress=False)
    two = uq.fit(model, train, progress=False)
    uq.tune(two, held_out, progress=False)
    assert (one.prior_precision, one.scale, one.temperature) == (
        two.prior_precision,
        two.scale,
        two.temperature,
    )
    assert one.history.tuning == two.history.tuning


def test_a_temperature_beside_the_prior_or_alone(classifier):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, progress=False)
    prior = posterior.prior_precision
    uq.tune(posterior, held_out, parameters=(), progress=False)
    assert posterior.prior_precision == prior
    samples = sum(len(labels) for _, labels in held_out)

    def goal() -> (
        float
    ):  # the likelihood of a temperature, and its prior: Cauchy above 1, and normal, then exponential
        x = np.log(posterior.temperature) / 0.1
        prior = np.log1p(x**2) if x > 0 else -x - 0.5 if x < -1 else x**2 / 2
        return _loss(model, posterior, held_out) + prior / samples

    best, found = goal(), posterior.temperature
    assert found != 1.0 and posterior.history.tuning["temperature"].startswith("validation NLL")
    for temperature in np.logspace(-1, 1, 21):
        posterior.temperature = float(temperature)
        assert goal() >= best - 1e-4
    trials = uq.tune(posterior, held_out, progress=False)
    assert len({trial.settings.temperature for trial in trials.trials}) == len(trials.trials)  # one for each prior


def test_a_few_samples_hardly_move_the_temperature():
    torch.manual_seed(0)
    model = nn.Linear(2, 2).requires_grad_()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 0.0], [-2.0, 0.0]])), model.bias.zero_()
    x = torch.randn(4000, 2)
    labels = torch.distributions.Categorical(logits=model(x) / 2.5).sample()  # too sure of itself
    posterior = uq.fit(model, [(x[:200], labels[:200])], prior_precision=1e4, progress=False)
    right = model(x).argmax(1) == labels
    few, many = (x[right][:30], labels[right][:30]), (x[1000:], labels[1000:])
    uq.tune(posterior, [few], parameters=(), progress=False)
    assert (
        0.9 < posterior.temperature <= 1
    )  # all of them right: the likelihood alone asks for a temperature of zero
    uq.tune(posterior, [many], parameters=(), progress=False)
    assert posterior.temperature == pytest.approx(2.5, rel=0.1)


def test_thirty_labels_find_a_large_temperature_and_many_a_small_one():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(4000, 2)
        logits = x @ torch.tensor([[0.7, -0.7], [0.0, 0.0]])
        labels = torch.distributions.Categorical(logits=logits).sample()
    model = nn.Linear(2, 2)

    def tuned(factor: float, samples: int) -> float:
        """The temperature of a network whose logits are `factor` times too large."""
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.7, 0.0], [-0.7, 0.0]]) * factor), model.bias.zero_()
        posterior = uq.fit(model, [(x[:200], labels[:200])], prior_precision=1e6, progress=False)
        held_out = [(x[1000 : 1000 + samples], labels[1000 : 1000 + samples])]
        uq.tune(posterior, held_out, parameters=(), progress=False)
        return posterior.temperature

    assert 5 < tuned(10.0, 30) < 20
    assert tuned(0.5, 30) > 0.7  # a few labels sharpen little
    assert tuned(0.5, 3000) == pytest.approx(0.5, rel=0.1)


def test_regression_on_held_out_data(regression):
    model, x, y = regression
    posterior = uq.fit(model, [(x[:50], y[:50])], likelihood="regression", progress=False)
    uq.tune(posterior, [(x[50:], y[50:])], noise=True, progress=False)
    assert "given up" in posterior.history.tuning["prior precision"]
    assert posterior.history.tuning["noise variance"] == "validation NLL"
    lines = [line for line in str(posterior.report()).splitlines() if line.startswith("noise")]
    assert len(lines) == 1 and lines[0].endswith(", validation NLL")  # nothing of the residuals is left
    assert torch.isfinite(uq.wrap(model, posterior)(x).variance).all()


def test_an_edge_is_said_aloud(regression):
    """Weights of zero make the evidence grow with the prior precision without end."""
    model, x, y = _regression()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.warns(UserWarning, match="edge"):
        posterior = uq.fit(
            model,
            [(x, y)],
            likelihood="regression",
            prior_precision="evidence",
            noise_variance=1.0,
            progress=False,
        )
    assert posterior.prior_precision > 1e10


def test_search_widens_its_interval():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best, edge = search_decades(lambda x: (np.log10(x) - 7.3) ** 2, (-2.0, 2.0), (-12.0, 12.0))
    assert np.log10(best) == pytest.approx(7.3, abs=0.03) and not edge
    _, edge = search_decades(lambda x: -np.log10(x), (-2.0, 2.0), (-3.0, 3.0))
    assert edge


def test_a_failed_search_changes_nothing(classifier):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, progress=False)
    before = (posterior.prior_precision, posterior.scale, posterior.residual_weight)
    calls = 0

    class Breaks(list):
        def __iter__(self):
            nonlocal calls
            calls += 1
            if calls > 2:
                raise RuntimeError("the disk is gone")
            return super().__iter__()

    with pytest.raises(RuntimeError, match="disk"):
        uq.tune(posterior, Breaks(held_out), progress=False)
    assert (posterior.prior_precision, posterior.scale, posterior.residual_weight) == before


def test_mistakes_are_named(classifier, regression):
    model, train, held_out = classifier
    posterior = uq.fit(model, train, progress=False)
    with pytest.raises(PosthocUQError, match="needs no data"):
        uq.tune(posterior, temperature=True)
    with pytest.raises(PosthocUQError, match="per_layer"):
        uq.tune(posterior, held_out, per_layer=True)
    with pytest.raises(PosthocUQError, match="inputs alone"):
        uq.tune(posterior, [held_out[0][0]], progress=False)
    with pytest.raises(PosthocUQError, match="regression"):
        uq.tune(posterior, noise=True)
    with pytest.raises(PosthocUQError, match=r"noise=True tunes .* 'classification' has none"):
        uq.tune(posterior, held_out, noise=True, progress=False)
    with pytest.raises(PosthocUQError, match="among"):
        uq.tune(posterior, held_out, parameters=("colour",))
    unlabelled = uq.fit(model, [train[0][0]], progress=False)
    with pytest.raises(PosthocUQError, match="no labels"):
        unlabelled.log_marginal_likelihood()
    other, x, y = regression
    gaussian = uq.fit(other, [(x, y)], likelihood="regression", progress=False)
    with pytest.raises(PosthocUQError, match="logits"):
        uq.tune(gaussian, [(x, y)], temperature=True, progress=False)


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_binary_labels_of_every_form(shape, dtype):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).to(dtype).reshape(shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = uq.fit(model, [(x, y)], val_loader=[(x, y)], likelihood="binary", progress=False)
    assert posterior.history.head["criterion"] == "likelihood"
    uq.tune(posterior, [(x, y)], temperature=True, progress=False)
    assert posterior.temperature > 0


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_noise_scale_is_a_refit_at_another_noise(regression, fisher):
    """Multiplying the noise after the fit gives the precision, and the evidence, of a fit at that noise."""
    model, x, y = regression
    options = {
        "likelihood": "regression",
        "fisher": fisher,
        "method": "full",
        "prior_precision": 0.7,
        "progress": False,
    }
    moved = uq.fit(model, [(x, y)], noise_variance=0.5, **options)
    moved.noise_scale = 4.0
    refitted = uq.fit(model, [(x, y)], noise_variance=2.0, **options)
    torch.testing.assert_close(moved.log_determinant(), refitted.log_determinant(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        moved.log_marginal_likelihood(), refitted.log_marginal_likelihood(), rtol=1e-9, atol=1e-7
    )


def test_extreme_units_do_not_lose_the_fit():
    """Targets of 1e-8 make some probes of the evidence impossible to factorise; the search goes on without them."""
    model, x, y = _regression()
    with torch.no_grad():
        model[2].weight *= 1e-8
        model[2].bias *= 1e-8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimum may lie at the edge of the search
        for method in ("inf", "full"):
            posterior = uq.fit(model, [(x, y * 1e-8)], method=method, likelihood="regression", progress=False)
            assert np.isfinite(posterior.log_marginal_likelihood().item())


def test_a_layer_without_evidence_is_said_to_be_at_an_edge():
    """Behind a head of zeros the evidence of a layer is monotone: no value may pass for an optimum."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        x = torch.randn(50, 3)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    posterior = uq.fit(model, [(x, torch.arange(50) % 2)], prior_precision=1.0, progress=False)
    with pytest.warns(UserWarning, match=r"'2'"):
        trials = uq.tune(posterior, per_layer=True)
    assert any("'2'" in name for name in trials.at_edge)


def test_no_search_stays_in_noise(classifier, tmp_path):
    """From a prior precision at which drawn weights are noise, the search must still find the good region."""
    model, train, held_out = classifier
    posterior = uq.fit(model, train, prior_precision=1e-3, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)  # a loaded posterior can be tuned as well
    x, y = (torch.cat([batch[i] for batch in held_out]) for i in (0, 1))
    lost = -uq.wrap(model, loaded, n_samples=10)(x).log_prob(y).mean().item()
    trials = uq.tune(loaded, held_out, head="sampling", n_samples=10, progress=False)
    found = -uq.wrap(model, loaded, n_samples=10)(x).log_prob(y).mean().item()
    alone = nn.functional.cross_entropy(model(x), y).item()
    assert trials.model_alone == pytest.approx(alone, rel=1e-5)
    assert found < lost
    assert found < alone + 0.02


def test_evidence_that_gives_noise_is_said_aloud():
    """Thirty inputs for a thousand weights: models drawn at the evidence forget what the network learnt."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(30, 10)
        y = (x[:, 0] > 0).long()
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(200):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    with pytest.warns(UserWarning, match="few data for its weights"):
        uq.fit(model, [(x, y)], prior_precision="evidence", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(model, [(x, y)], prior_precision=1e4, progress=False)


class TestHeads:
    """Held-out data are predicted through the head that is asked for."""

    def setup_method(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(230, 4, generator=generator)
        y = (x[:, 0] + 0.7 * torch.randn(230, generator=generator) > 0).long()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimiser = torch.optim.Adam(self.model.parameters(), 0.03)
        for _ in range(150):  # over-confident on its 30 samples
            optimiser.zero_grad()
            nn.functional.cross_entropy(self.model(x[:30]), y[:30]).backward()
            optimiser.step()
        self.posterior = uq.fit(
            self.model, [(x[:30], y[:30])], method="full", prior_precision=1.0, progress=False
        )
        self.held_out = (x[30:], y[30:])

    def loss(self, **options) -> float:
        with torch.no_grad():
            prediction = uq.wrap(self.model, self.posterior, **options)(self.held_out[0])
        return -float(prediction.log_prob(self.held_out[1]).double().mean())

    @pytest.mark.parametrize("options", [{"head": "linearized", "link": "mc"}, {"head": "moments"}])
    def test_what_was_tried_is_the_heads_own_loss(self, options):
        trials = uq.tune(
            self.posterior, [self.held_out], parameters=("prior_precision",), progress=False, **options
        )
        best = min(trial.objective for trial in trials.trials)
        assert self.loss(**options) == pytest.approx(best + trials.given_up, rel=1e-6)
        assert self.loss() == self.loss(**options)  # the head and its options are on record
        for trial in trials.trials:
            self.posterior.prior_precision = trial.settings.prior_precision
            self.posterior.temperature = trial.settings.temperature
            assert self.loss(**options) == pytest.approx(trial.objective, rel=1e-6)

    def test_temperature_through_the_linearised_head(self):
        uq.tune(self.posterior, [self.held_out], parameters=(), head="linearized", progress=False)

        def goal() -> float:
            x = np.log(self.posterior.temperature) / 0.1
            return self.loss(head="linearized") + (np.log1p(x**2) if x > 0 else -x - 0.5) / 200

        found, best = self.posterior.temperature, goal()
        assert found != 1.0
        for factor in (0.8, 1.25):
            self.posterior.temperature = found * factor
            assert goal() > best

    def test_a_head_needs_held_out_data(self):
        with pytest.raises(uq.PosthocUQError, match="The evidence needs no head"):
            uq.tune(self.posterior, head="linearized")
        with pytest.raises(uq.PosthocUQError, match="head must be one of"):
            uq.tune(self.posterior, [self.held_out], head="best")

    def test_given_prior_precisions_are_the_only_ones_tried(self):
        grid = (0.3, 3.0, 30.0)
        trials = uq.tune(
            self.posterior,
            [self.held_out],
            parameters=("prior_precision",),
            prior_precisions=grid,
            head="linearized",
            progress=False,
        )
        assert [trial.settings.prior_precision for trial in trials.trials] == pytest.approx(list(grid))
        losses = [trial.objective for trial in trials.trials]
        widest = next(p for p, loss in zip(grid, losses, strict=True) if loss <= min(losses) + 0.01)
        assert self.posterior.prior_precision == pytest.approx(widest)

    def test_a_grid_that_is_none(self):
        with pytest.raises(uq.PosthocUQError, match="positive and finite"):
            uq.tune(self.posterior, [self.held_out], prior_precisions=[1.0, -1.0], progress=False)
        with pytest.raises(uq.PosthocUQError, match="leave them alone"):
            uq.tune(
                self.posterior, [self.held_out], parameters=("scale",), prior_precisions=[1.0], progress=False
            )
        with pytest.raises(uq.PosthocUQError, match="needs no data"):
            uq.tune(self.posterior, prior_precisions=[1.0])

    def test_criteria_and_what_they_need(self):
        with pytest.raises(uq.PosthocUQError, match="criterion must be one of"):
            uq.tune(self.posterior, criterion="best")
        with pytest.raises(uq.PosthocUQError, match="needs data"):
            uq.tune(self.posterior, criterion="faithful")
        with pytest.raises(uq.PosthocUQError, match="needs none of them"):
            uq.tune(self.posterior, [self.held_out], criterion="faithful", parameters=("scale",))
        with pytest.raises(uq.PosthocUQError, match="needs no data"):
            uq.tune(self.posterior, [self.held_out], criterion="evidence")

    def test_a_failure_gives_the_record_back(self):
        before = dict(self.posterior.history.tuning)

        class Failing(list):
            passes = 0

            def __iter__(self):
                self.passes += 1
                if self.passes > 3:
                    raise OSError("gone")
                return super().__iter__()

        with pytest.raises(OSError, match="gone"):
            uq.tune(self.posterior, Failing([self.held_out]), progress=False)
        assert self.posterior.history.tuning == before and self.posterior.prior_precision == 1.0

    def test_a_calibration_is_left_out_of_the_search(self):
        predictor = uq.wrap(self.model, self.posterior, "moments")
        predictor.calibrate([self.held_out[0]], progress=False)
        with pytest.warns(UserWarning, match="calibrate again"):
            trials = uq.tune(
                self.posterior,
                [self.held_out],
                parameters=("prior_precision",),
                prior_precisions=[1.0],
                head="moments",
                progress=False,
            )
        assert len(trials.trials) == 1 and self.posterior.history.calibration == {}

    def test_an_option_of_another_head(self):
        with pytest.raises(uq.PosthocUQError, match="takes no option"):
            uq.tune(self.posterior, [self.held_out], head="moments", n_probes=3, progress=False)


def _overfitted_line() -> tuple[nn.Module, list[Any], list[Any], float]:
    """Least squares on few samples, whose training residuals are too small; and the held-out mean squared residual."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(60, 1, generator=generator)
    model = nn.Linear(8, 1)
    with torch.no_grad():
        solved = torch.linalg.lstsq(torch.cat([x[:12], torch.ones(12, 1)], 1), y[:12]).solution
        model.weight.copy_(solved[:8].T)
        model.bias.copy_(solved[8])
    residual = float((model(x[12:]) - y[12:]).detach().square().mean())
    return model, [(x[:12], y[:12])], [(x[12:], y[12:])], residual


def test_held_out_labels_tune_the_noise_variance_unless_it_is_kept() -> None:
    model, train, held_out, residual = _overfitted_line()
    options: dict[str, Any] = {"method": "full", "likelihood": "regression", "progress": False}
    posterior = uq.fit(model, train, **options)
    fitted = float(posterior.noise_variance)
    assert residual > 5 * fitted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ({"noise": False}, {"parameters": ("prior_precision",)}):
            uq.tune(posterior, held_out, progress=False, **choice)
            assert float(posterior.noise_variance) == fitted
        uq.tune(posterior, held_out, progress=False)
        found = posterior.settings
        assert 0.2 * residual < float(posterior.noise_variance) <= 1.1 * residual
        assert posterior.history.tuning["noise variance"] == "validation NLL"
        low, high = uq.wrap(model, posterior)(held_out[0][0]).interval(0.9)
        assert 0.8 < float(((low <= held_out[0][1]) & (held_out[0][1] <= high)).float().mean()) < 0.98
        uq.tune(posterior, held_out, progress=False)  # alike at every call
        assert posterior.settings == found
        uq.tune(posterior, held_out, noise=True, parameters=("prior_precision",), progress=False)
        assert posterior.settings == found
        at_once = uq.fit(model, train, val_loader=held_out, **options)
    assert float(at_once.noise_variance) == pytest.approx(float(posterior.noise_variance), rel=0.1)
    with pytest.raises(PosthocUQError, match="noise=False keeps it"):
        uq.tune(posterior, held_out, noise=False, parameters=("noise",), progress=False)


def _with_dispersion(name: str) -> tuple[uq.Likelihood, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A likelihood of too little dispersion, inputs, outputs, and targets of 20 times as much."""
    torch.manual_seed(0)
    x = torch.randn(320, 2)
    mean = x @ torch.tensor([[0.5], [0.3]]) + 2
    if name == "heteroscedastic":
        logs = x[:, :1] - 1
        targets = mean + (20 * logs.exp()).sqrt() * torch.randn(320, 1)
        return uq.Heteroscedastic(), x, torch.cat([mean, logs], 1), targets
    rates = torch.distributions.Gamma(1.0, 1.0).sample((320, 1)) * mean.exp()
    if name == "gamma":
        return uq.Gamma(shape=20.0), x, mean, rates.clamp(min=1e-3)
    return uq.NegativeBinomial(dispersion=0.05), x, mean, torch.poisson(rates)


@pytest.mark.parametrize("name", ["heteroscedastic", "gamma", "negative_binomial"])
def test_held_out_labels_tune_the_dispersion_of_other_regressions(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        likelihood, x, outputs, targets = _with_dispersion(name)
    model = nn.Linear(2, outputs.shape[1])
    solved = torch.linalg.lstsq(torch.cat([x, torch.ones(320, 1)], 1), outputs).solution
    with torch.no_grad():
        model.weight.copy_(solved[:2].T)
        model.bias.copy_(solved[2])
    posterior = uq.fit(
        model, [(x[:40], targets[:40])], likelihood=likelihood, prior_precision=10.0, progress=False
    )
    before = uq.wrap(model, posterior)(x[40:])
    variances = posterior.variance()
    uq.tune(posterior, [(x[40:200], targets[40:200])], prior_precisions=[10.0], noise=False, progress=False)
    assert posterior.noise_scale == 1.0
    uq.tune(posterior, [(x[40:200], targets[40:200])], prior_precisions=[10.0], progress=False)
    assert posterior.noise_scale == pytest.approx(20, rel=0.5)
    assert posterior.history.tuning["noise scale"] == "validation NLL"
    assert "noise scale" in str(posterior.report())
    predicted = uq.wrap(model, posterior)(x[40:])
    held_out = slice(160, 280)
    gain = predicted.log_prob(targets[40:]) - before.log_prob(targets[40:])
    assert float(gain.flatten()[held_out].mean()) > 0.5
    low, high = predicted.interval(0.9)
    inside = ((low <= targets[40:]) & (targets[40:] <= high)).float()
    assert 0.85 <= float(inside[held_out].mean()) <= 0.98
    uq.save(posterior, tmp_path / "file.h5")
    loaded = uq.load(tmp_path / "file.h5", model)
    assert loaded.noise_scale == pytest.approx(posterior.noise_scale)
    again = uq.wrap(model, loaded)(x[40:])
    assert torch.allclose(again.log_prob(targets[40:]), predicted.log_prob(targets[40:]), atol=1e-4)
    for (
        key,
        value,
    ) in posterior.variance().items():  # a factor on predictions: the weights keep their variances
        assert torch.allclose(value, variances[key])


def _line_of(samples: int) -> tuple[nn.Module, list[Any]]:
    """Least squares of 8 inputs on so many samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(samples, 1, generator=generator)
    model = nn.Linear(8, 1)
    solved = torch.linalg.lstsq(torch.cat([x, torch.ones(samples, 1)], 1), y).solution
    with torch.no_grad():
        model.weight.copy_(solved[:8].T)
        model.bias.copy_(solved[8])
    return model, [(x, y)]


@pytest.mark.parametrize("method", ["full", "inf", "kfac", "diag", "subnetwork"])
def test_a_regression_says_when_its_training_residuals_say_nothing(method: str) -> None:
    """Nine parameters and ten rows, and nine and three hundred."""
    options: dict[str, Any] = {"method": method, "likelihood": "regression", "progress": False}
    memorised, few = _line_of(10)
    honest, many = _line_of(300)
    settings = {"subnetwork": {"n": 9}}.get(method, {})
    if method != "diag":  # whose limit is as many parameters as targets
        with pytest.warns(
            UserWarning, match=r"about [89] effective parameters for 10 training targets.*uq\.tune"
        ):
            uq.fit(memorised, few, **options, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(honest, many, **options, **settings)
        uq.fit(memorised, few, noise_variance=0.25, **options, **settings)
        uq.fit(memorised, few, val_loader=many, **options, **settings)


def test_a_network_that_reproduces_its_targets_is_warned_of() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(30, 4)
        y = torch.sin(x.sum(1, keepdim=True)) + 0.5 * torch.randn(30, 1)
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(600):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
    for options in ({}, {"method": "diag"}, {"layers": "last"}):
        with pytest.warns(UserWarning, match="effective parameters for 30 training targets"):
            uq.fit(model, [(x, y)], likelihood="regression", progress=False, **options)
