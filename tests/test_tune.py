"""Hyperparameters by evidence and by held-out data, against grids computed independently."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from networks import without_training
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, PosthocUQError
from posthoc_uq.fitting import held_out as held_out_module
from posthoc_uq.fitting.tune import _SEARCHES
from posthoc_uq.heads import LinearizedPredictor
from posthoc_uq.posteriors import CRITERIA, Criterion, LeftOutRecord, search_decades

Data = tuple[Tensor, Tensor]


def trained(model: nn.Module, data: Data, steps: int, rate: float, loss: Any) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimiser.step()
    return model


@cache
def regression() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.rand(80, 1, dtype=torch.float64) * 4 - 2
        y = torch.sin(2 * x) + 0.1 * torch.randn(80, 1, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        return trained(model, (x, y), 400, 0.03, nn.functional.mse_loss), x, y


@cache
def classifier() -> tuple[nn.Module, list[Data], list[Data]]:
    """A network of three classes, its training data and held-out ones."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x = torch.randn(300, 4)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
        y = torch.where(torch.rand(300) < 0.15, torch.randint(0, 3, (300,)), y)
        model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))
        trained(model, (x[:150], y[:150]), 300, 0.02, nn.functional.cross_entropy)
    return model, [(x[:150], y[:150])], [(x[150:220], y[150:220]), (x[220:], y[220:])]


def fit(**options: Any) -> uq.Posterior:
    model, train, _ = classifier()
    return uq.fit(model, train, progress=False, **options)


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of these small networks leave temperature and noise as they are, so that searches begin at 1."""
    monkeypatch.setattr("posthoc_uq.fitting.fit._leaves_out_unasked", lambda *_: False)


def fit_regression(**options: Any) -> uq.Posterior:
    model, x, y = regression()
    return uq.fit(model, [(x, y)], likelihood="regression", progress=False, **options)


def tune(posterior: uq.Posterior, *data: Any, **options: Any) -> uq.Posterior:
    return uq.tune(posterior, *data, progress=False, **options)


def tuned(posterior: uq.Posterior, *data: Any, **options: Any) -> tuple[uq.Posterior, Any]:
    """The posterior, and all trials of the search."""
    found = tune(posterior, *data, **options)
    assert found.history.trials is not None
    return found, found.history.trials


def loss_of(posterior: uq.Posterior, data: list[Data], **options: Any) -> float:
    x, y = (torch.cat([batch[i] for batch in data]) for i in (0, 1))
    with torch.no_grad():
        return -uq.wrap(posterior.model, posterior, **options)(x).log_prob(y).double().mean().item()


def test_every_criterion_has_a_row_and_a_search() -> None:
    assert {*get_args(Criterion)} == CRITERIA.keys() == _SEARCHES.keys()


# By the log marginal likelihood


@pytest.mark.filterwarnings("ignore:At the prior precision")
@pytest.mark.parametrize("method", without_training())
def test_evidence_finds_the_best_of_a_grid(method: str) -> None:
    posterior = fit_regression(method=method, prior_precision="evidence")
    best = posterior.log_marginal_likelihood().item()
    for tau in np.logspace(-4, 5, 91):
        assert best >= posterior.log_marginal_likelihood(prior_precision=float(tau)).item() - 1e-3
    tau = torch.tensor(posterior.prior_precision, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(prior_precision=tau), tau)
    assert abs(slope.item() * posterior.prior_precision) < 0.3  # flat in log tau


@pytest.mark.filterwarnings("ignore:At the prior precision")
@pytest.mark.parametrize("method", ["inf", "full"])  # a search for each layer, and one for all together
def test_one_prior_precision_per_layer(method: str) -> None:
    posterior = fit_regression(method=method, prior_precision="evidence")
    common = posterior.log_marginal_likelihood().item()
    posterior, trials = tuned(posterior, per_layer=True)
    assert trials.best is None and trials.chosen is None and repr(trials).endswith("one a search)")
    assert set(posterior.prior_precision) == set(posterior.layers)
    best = posterior.log_marginal_likelihood().item()
    assert best >= common - 1e-3
    for name in posterior.layers:
        for factor in (0.5, 2.0):
            moved = {k: v * (factor if k == name else 1.0) for k, v in posterior.prior_precision.items()}
            assert posterior.log_marginal_likelihood(prior_precision=moved).item() < best + 1e-3


def test_noise_by_evidence() -> None:
    posterior = fit_regression()
    assert posterior.noise_scale == 1.0
    before = posterior.log_marginal_likelihood().item()
    posterior, trials = tuned(posterior, noise=True)
    assert posterior.log_marginal_likelihood().item() >= before - 1e-3
    assert len({trial.settings.noise_scale for trial in trials.trials}) > 3
    factor = torch.tensor(posterior.noise_scale, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(noise_scale=factor), factor)
    assert abs(slope.item() * posterior.noise_scale) < 1.0


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_noise_scale_is_a_refit_at_another_noise(fisher: str) -> None:
    """Multiplying the noise after the fit gives the precision, and the evidence, of a fit at that noise."""
    options: dict[str, Any] = {"fisher": fisher, "method": "full", "prior_precision": 0.7}
    moved = fit_regression(noise_variance=0.5, **options).with_settings(noise_scale=4.0)
    refitted = fit_regression(noise_variance=2.0, **options)
    for name in ("log_determinant", "log_marginal_likelihood"):
        found, expected = (getattr(posterior, name)() for posterior in (moved, refitted))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-7)


def test_a_search_that_ends_at_an_edge_warns() -> None:
    model = copy.deepcopy(regression()[0])
    with torch.no_grad():  # weights of zero make the evidence grow with the prior precision without end
        for parameter in model.parameters():
            parameter.zero_()
    options: dict[str, Any] = {"likelihood": "regression", "noise_variance": 1.0, "progress": False}
    with pytest.warns(UserWarning, match="edge"):
        posterior = uq.fit(model, [regression()[1:]], prior_precision="evidence", **options)
    assert posterior.prior_precision > 1e10
    with torch.random.fork_rng():  # behind a head of zeros the evidence of a layer is monotone
        torch.manual_seed(0)
        x, model = torch.randn(50, 3), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[2].weight.zero_(), model[2].bias.zero_()
    posterior = uq.fit(model, [(x, torch.arange(50) % 2)], prior_precision=1.0, progress=False)
    with pytest.warns(UserWarning, match=r"'2'"):
        _, trials = tuned(posterior, per_layer=True)
    assert any("'2'" in name for name in trials.at_edge)


def test_search_widens_its_interval() -> None:
    best, edge = search_decades(lambda x: (np.log10(x) - 7.3) ** 2, (-2.0, 2.0), (-12.0, 12.0))
    assert np.log10(best) == pytest.approx(7.3, abs=0.03) and not edge
    _, edge = search_decades(lambda x: -np.log10(x), (-2.0, 2.0), (-3.0, 3.0))
    assert edge


@pytest.mark.filterwarnings("ignore")  # the optimum may lie at the edge of the search
def test_extreme_units_do_not_lose_the_fit() -> None:
    """Targets of 1e-8 make some probes of the evidence impossible to factorise; the search goes on without them."""
    model, x, y = copy.deepcopy(regression())
    with torch.no_grad():
        model[2].weight *= 1e-8
        model[2].bias *= 1e-8
    for method in ("inf", "full"):
        posterior = uq.fit(model, [(x, y * 1e-8)], method=method, likelihood="regression", progress=False)
        assert np.isfinite(posterior.log_marginal_likelihood().item())


# By held-out labels


def losses_of(posterior: uq.Posterior, settings: Any, data: list[Data], **options: Any) -> Tensor:
    """Of every sample at these settings."""
    with torch.no_grad():
        predictor = uq.wrap(posterior.model, posterior.at(settings), **options)
        return torch.cat([-predictor(x).log_prob(y).double() for x, y in data])


def refused(posterior: uq.Posterior, trial: Any, trials: Any, data: list[Data]) -> bool:
    """Whether labels speak against a trial, by the definition: against the best one with the priors of temperatures, or
    against the fit, the first trial at a temperature of 1.
    """
    labels = sum(len(y) for _, y in data)
    goals = [t.objective + reluctance(t.settings.temperature) / labels for t in trials.trials]
    untuned = dataclasses.replace(trials.trials[0].settings, temperature=1.0)
    harm = losses_of(posterior, trial.settings, data) - losses_of(posterior, untuned, data)
    costs = goals[trials.trials.index(trial)] - min(goals)
    return bool(costs > 0.003 or float(harm.mean() + 2 * harm.std() / labels**0.5) > 0.01)


@pytest.mark.parametrize("head", ["linearized", "sampling"])
def test_the_widest_that_held_out_labels_do_not_speak_against(head: str) -> None:
    posterior, held_out = fit(head=head), classifier()[2]
    start = posterior.prior_precision
    posterior, trials = tuned(posterior, held_out)
    assert trials.trials[0].settings.prior_precision == start
    assert posterior.history.faithful.budget == 0.002  # the record is the fit's
    chosen, best = loss_of(posterior, held_out), trials.best.objective
    assert posterior.prior_precision < start
    assert trials.nll_given_up_for_width == pytest.approx(chosen - best, abs=1e-5)
    assert not refused(posterior, trials.chosen, trials, held_out)
    for trial in trials.trials:
        wider = trial.settings.prior_precision < posterior.prior_precision * (1 - 1e-9)
        assert not wider or refused(posterior, trial, trials, held_out)
    assert "above the best" in posterior.history.tuning["prior precision"]
    alone = nn.functional.cross_entropy(
        posterior.model(torch.cat([x for x, _ in held_out])), torch.cat([y for _, y in held_out])
    )
    assert trials.model_alone == pytest.approx(alone.item(), rel=1e-5)


def test_trials_print_what_was_chosen_and_then_the_best() -> None:
    posterior, held_out = fit(method="diag"), classifier()[2]
    posterior, trials = tuned(posterior, held_out, parameters=("prior_precision",))
    losses = [trial.objective for trial in trials.trials]
    assert trials.best is trials.trials[losses.index(min(losses))] is not trials.chosen
    assert trials.chosen.settings == posterior.settings
    lines = str(trials).splitlines()
    chosen = f"chosen: prior precision={posterior.prior_precision:.5g}  temperature="
    assert lines[0].startswith(chosen) and lines[1].startswith("given up against the best")
    assert lines[2].startswith(f"best: prior precision={trials.best.settings.prior_precision:.5g}  ")
    assert len(lines) == 5 + len(losses), "the network alone, a heading, and every evaluation"
    assert repr(trials).startswith(f"Trials({len(losses)} evaluations; {chosen}")
    _, trials = tuned(posterior)
    assert trials.chosen is trials.best is max(trials.trials, key=lambda trial: trial.objective)
    assert "best" not in str(trials) and "given up" not in repr(trials)


def test_held_out_data_that_ask_for_certainty_narrow_the_posterior() -> None:
    """Labels that the network itself gives leave no room for doubt: NLL falls with the width."""
    posterior = fit(divergence=0.3)
    faithful, x = posterior.prior_precision, torch.cat([batch[0] for batch in classifier()[2]])
    certain = [(x, posterior.model(x).argmax(1))]
    posterior = tune(posterior, certain, divergence=0.3, temperature=False)
    assert posterior.history.faithful.value == faithful  # the one on record, of the same budget
    assert posterior.prior_precision > 1.5 * faithful


def test_what_is_asked_for_is_searched() -> None:
    posterior, held_out = fit(), classifier()[2]
    before = loss_of(posterior, held_out)
    names = ("residual_weight", "scale")
    posterior, trials = tuned(posterior, held_out, parameters=names, temperature=False)
    assert loss_of(posterior, held_out) <= before + 1e-6
    assert loss_of(posterior, held_out) == pytest.approx(trials.best.objective, abs=1e-5)
    tried = {
        name: {getattr(trial.settings, name) for trial in trials.trials} for name in vars(posterior.settings)
    }
    assert len(tried["residual_weight"]) > 3 < len(tried["scale"])
    assert len(tried["prior_precision"]) == len(tried["temperature"]) == 1


@cache
def good_network() -> tuple[nn.Module, Data, Data]:
    """A network with an NLL of a few hundredths, and what it was trained on and was not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    y = (x[:, 0] + 0.03 * torch.randn(400, generator=generator) > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        trained(model, (x[:200], y[:200]), 300, 0.03, nn.functional.cross_entropy)
    return model, (x[:200], y[:200]), (x[200:], y[200:])


def test_a_good_network_is_made_no_narrower_and_loses_next_to_nothing() -> None:
    """With an NLL of .02 narrower posteriors gain a little, which held-out data cannot tell from chance."""
    model, train, held_out = good_network()
    posterior = uq.fit(model, [train], progress=False)
    own = posterior.prior_precision
    posterior, trials = tuned(posterior, [held_out])
    best, chosen = trials.best.objective, trials.chosen.objective
    assert 0.0 < best < 0.08 and best <= chosen <= best + 0.003
    assert max(trial.settings.prior_precision for trial in trials.trials) == own
    assert 0.8 < posterior.temperature < 1.02


@pytest.mark.parametrize("found", ["by the fit", "by held-out inputs"])
def test_a_few_labels_without_a_mistake_make_nothing_narrower_than_the_fit(found: str) -> None:
    """Their NLL goes to zero with the width, which would leave no posterior at all."""
    model, train, (x, _) = good_network()
    far = x[model(x).detach().diff(dim=1).abs().squeeze() > 4][:30]
    few = (far, model(far).argmax(1))
    posterior = uq.fit(model, [train], progress=False)
    own = posterior.prior_precision
    if found == "by held-out inputs":  # of the fit's budget: its own prior is no longer on record
        posterior = tune(posterior, [few], criterion="faithful")
        assert abs(posterior.prior_precision / own - 1) > 0.1
        own = posterior.prior_precision
        posterior = posterior.with_settings(prior_precision=1.0)
    _, trials = tuned(posterior, [few], temperature=False)
    by_width = sorted(trials.trials, key=lambda trial: trial.settings.prior_precision)
    objectives = [trial.objective for trial in by_width]
    assert objectives == sorted(objectives, reverse=True)  # the narrower, the better
    assert by_width[-1].settings.prior_precision == pytest.approx(own, rel=1e-6)


def test_one_label_makes_nothing_wider() -> None:
    """No standard error says that a wider one is as good, even where it is better."""
    model, train, (x, _) = good_network()
    posterior, one = uq.fit(model, [train], progress=False), x[:1]
    mistaken = [(one, 1 - model(one).argmax(1))]
    found, trials = tuned(posterior, mistaken, temperature=False)
    assert trials.chosen is trials.trials[0] is not trials.best
    assert found.prior_precision == posterior.prior_precision > trials.best.settings.prior_precision


@cache
def overfitted_network() -> tuple[nn.Module, Data, Data]:
    """A network that knows its 20 inputs by heart, these, and others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=generator) > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        trained(model, (x[:20], y[:20]), 300, 0.03, nn.functional.cross_entropy)
    return model, (x[:20], y[:20]), (x[20:], y[20:])


def test_the_search_begins_at_the_budget_that_is_given() -> None:
    model, train, held_out = overfitted_network()
    posterior = uq.fit(model, [train], progress=False)
    own = posterior.prior_precision
    again, trials = tuned(posterior, [held_out])
    assert trials.trials[0].settings.prior_precision == own
    _, trials = tuned(again, [held_out], divergence=1e-4)
    assert trials.trials[0].settings.prior_precision > 2 * own


def test_labels_that_only_the_network_predicts_well_narrow_the_posterior() -> None:
    """As little as they ask for: a quarter of a decade wider is refused."""
    model, train, (x, _) = overfitted_network()
    posterior = uq.fit(model, [train], divergence=1.0, progress=False)
    own, allowed = posterior.prior_precision, 3 / 380
    posterior, trials = tuned(posterior, [(x, model(x).argmax(1))], temperature=False)
    assert posterior.prior_precision > 3 * own
    limit = min(trials.model_alone, trials.best.objective) + allowed
    assert trials.chosen.objective <= limit + 1e-6
    wider = [t for t in trials.trials if t.settings.prior_precision < posterior.prior_precision * (1 - 1e-9)]
    assert all(trial.objective > limit for trial in wider)
    nearest = max(trial.settings.prior_precision for trial in wider)
    assert nearest > 0.55 * posterior.prior_precision


@pytest.mark.parametrize("prior", [None, pytest.param(5.0, marks=pytest.mark.study)])
def test_a_second_call_finds_the_same_as_the_first(tmp_path: Path, prior: float | None) -> None:
    """Also after the file was read; the record of the fit's own prior stays."""
    model, train, held_out = overfitted_network()
    posterior = uq.fit(model, [train], prior_precision=prior, progress=False)
    fitted = posterior.history.faithful
    posterior = tune(posterior, [held_out])
    first = posterior.settings.plain()
    assert posterior.history.faithful == fitted
    uq.save(posterior, tmp_path / "tuned.h5")
    for again in (posterior, uq.load(tmp_path / "tuned.h5", model)):
        assert tune(again, [held_out]).settings.plain() == pytest.approx(first, rel=1e-6)


# The temperature and its prior: Cauchy above 1, around what was left out, and normal, then exponential below


def reluctance(temperature: float, centre: float = 1.0) -> float:
    x, shift = np.log(temperature) / 0.1, np.log(centre) / 0.1
    if x > 0:
        return np.log1p((x - shift) ** 2)
    return np.log1p(shift**2) + (-x - 0.5 if x < -1 else x**2 / 2)


def having_left_out(posterior: uq.Posterior, temperature: float) -> uq.Posterior:
    """As if leave-one-out had found this temperature."""
    return posterior.noted(left_out=LeftOutRecord(temperature=temperature, noise_scale=1.0))


@pytest.mark.parametrize("centre", [1.0, 3.0])
def test_the_temperature_alone_is_the_best_of_a_grid(centre: float) -> None:
    posterior, held_out = having_left_out(fit(), centre), classifier()[2]
    prior = posterior.prior_precision
    posterior = tune(posterior, held_out, parameters=())
    assert posterior.prior_precision == prior and posterior.temperature != 1.0

    def goal(temperature: float) -> float:
        at = dataclasses.replace(posterior.settings, temperature=temperature)
        return loss_of(posterior.at(at), held_out) + reluctance(temperature, centre) / 150

    best = goal(posterior.temperature)
    assert all(goal(float(temperature)) >= best - 1e-4 for temperature in np.logspace(-1, 1, 21))


@pytest.mark.parametrize("labels", [30, 380])
def test_the_width_of_an_overfitted_network(labels: int) -> None:
    model, train, (x, y) = overfitted_network()
    posterior, few = uq.fit(model, [train], progress=False), [(x[:labels], y[:labels])]
    own = posterior.prior_precision
    posterior, trials = tuned(posterior, few)
    assert posterior.temperature > 3 and posterior.prior_precision <= own
    for trial in trials.trials:
        wider = trial.settings.prior_precision < posterior.prior_precision * (1 - 1e-9)
        assert not wider or refused(posterior, trial, trials, few)


def test_thirty_labels_find_a_large_temperature_and_many_a_small_one() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(4000, 2)
        labels = torch.distributions.Categorical(logits=x @ torch.tensor([[0.7, -0.7], [0.0, 0.0]])).sample()
    model = nn.Linear(2, 2)

    def temperature_of(factor: float, samples: int) -> float:
        """The temperature of a network whose logits are `factor` times too large."""
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.7, 0.0], [-0.7, 0.0]]) * factor), model.bias.zero_()
        posterior = uq.fit(model, [(x[:200], labels[:200])], prior_precision=1e6, progress=False)
        held_out = slice(1000, 1000 + samples)
        return tune(posterior, [(x[held_out], labels[held_out])], parameters=()).temperature

    assert 5 < temperature_of(10.0, 30) < 20
    assert temperature_of(0.5, 30) > 0.7  # a few labels sharpen little
    assert temperature_of(0.5, 3000) == pytest.approx(0.5, rel=0.1)


def test_what_was_left_out_and_taken_back_centres_no_search() -> None:
    posterior, held_out = fit(), classifier()[2]
    plain = tune(posterior, held_out, parameters=()).temperature
    left_out = having_left_out(fit().with_settings(temperature=3.0), 3.0)
    again = left_out.with_settings(temperature=1.0)
    assert left_out.history.left_out
    assert not again.history.left_out and again.history.tuning["temperature"] == "given"
    assert tune(again, held_out, parameters=()).temperature == plain


def test_a_wider_posterior_keeps_the_temperature_of_the_fit() -> None:
    """One of its own would take back its doubts, or leave a temperature above 1 to its width."""
    posterior, held_out = fit(), classifier()[2]
    posterior, trials = tuned(posterior, held_out)
    assert len(trials.trials) > 2
    assert {trial.settings.temperature for trial in trials.trials} == {posterior.temperature}


# The observation noise


@pytest.mark.filterwarnings("ignore:The network has about")
def test_a_density_gives_up_as_much_whatever_the_unit_of_its_targets() -> None:
    """Its NLL falls by a constant with the unit, so a share of it means nothing."""
    model, x, y = regression()
    best = list[float]()
    for unit in (0.05, 20.0):
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            scaled[2].weight *= unit
            scaled[2].bias *= unit
        posterior = uq.fit(scaled, [(x[::2], unit * y[::2])], likelihood="regression", progress=False)
        _, trials = tuned(posterior, [(x[1::2], unit * y[1::2])])
        best.append(trials.best.objective)
        assert 0 <= trials.nll_given_up_for_width <= 0.003
        assert len({trial.settings.prior_precision for trial in trials.trials}) > 1
    assert best[0] < 0 < best[1]


@pytest.mark.filterwarnings("ignore:The network has about")
def test_held_out_labels_tune_the_noise_variance_unless_it_is_kept() -> None:
    """Least squares on few samples, whose training residuals are too small."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(60, 1, generator=generator)
    model, train, held_out = least_squares(x[:12], y[:12]), [(x[:12], y[:12])], [(x[12:], y[12:])]
    residual = float((model(x[12:]) - y[12:]).detach().square().mean())
    options: dict[str, Any] = {"method": "full", "likelihood": "regression", "progress": False}
    posterior = uq.fit(model, train, **options)
    fitted = float(posterior.noise_variance)
    assert residual > 5 * fitted
    for choice in ({"noise": False}, {"parameters": ("prior_precision",)}):
        assert float(tune(posterior, held_out, **choice).noise_variance) == fitted
    posterior = tune(posterior, held_out)
    found = posterior.settings
    assert 0.2 * residual < float(posterior.noise_variance) <= 1.1 * residual
    assert posterior.history.tuning["noise variance"] == "validation NLL"
    low, high = uq.wrap(model, posterior)(held_out[0][0]).interval(0.9)
    assert 0.8 < float(((low <= held_out[0][1]) & (held_out[0][1] <= high)).float().mean()) < 0.98
    again = tune(posterior, held_out, noise=True, parameters=("prior_precision",))
    assert again.settings == found  # alike at every call
    at_once = uq.fit(model, train, val_loader=held_out, **options)
    later = uq.calibrate(uq.fit(model, train, **options), held_out, progress=False)
    assert float(at_once.noise_variance) == pytest.approx(float(later.noise_variance), rel=1e-6)


def least_squares(x: Tensor, y: Tensor) -> nn.Linear:
    model = nn.Linear(x.shape[1], y.shape[1])
    solved = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y).solution
    with torch.no_grad():
        model.weight.copy_(solved[:-1].T), model.bias.copy_(solved[-1])
    return model


def with_dispersion(name: str) -> tuple[uq.Likelihood, Tensor, Tensor, Tensor]:
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
def test_held_out_labels_tune_the_dispersion_of_other_regressions(name: str) -> None:
    with torch.random.fork_rng():
        likelihood, x, outputs, targets = with_dispersion(name)
    model, data = least_squares(x, outputs), (x[40:200], targets[40:200])
    posterior = uq.fit(
        model, [(x[:40], targets[:40])], likelihood=likelihood, prior_precision=10.0, progress=False
    )
    before, variances = uq.wrap(model, posterior)(x[200:]), posterior.variance()
    assert tune(posterior, [data], noise=False).noise_scale == 1.0
    posterior = tune(posterior, [data], parameters=("noise",))
    assert posterior.noise_scale == pytest.approx(20, rel=0.5)
    predicted = uq.wrap(model, posterior)(x[200:])
    gain = predicted.log_prob(targets[200:]) - before.log_prob(targets[200:])
    assert float(gain.mean()) > 0.5
    low, high = predicted.interval(0.9)
    assert 0.85 <= float(((low <= targets[200:]) & (targets[200:] <= high)).float().mean()) <= 0.98
    for (
        key,
        value,
    ) in posterior.variance().items():  # a factor on predictions: the weights keep their variances
        assert torch.allclose(value, variances[key])


# Heads, failures and mistakes


@pytest.mark.parametrize("options", [{"head": "linearized", "link": "mc"}, {"head": "moments"}])
def test_what_was_tried_is_the_heads_own_loss(options: dict[str, Any]) -> None:
    posterior, held_out = fit(prior_precision=1.0), classifier()[2]
    posterior, trials = tuned(posterior, held_out, parameters=("prior_precision",), **options)
    best = min(trial.objective for trial in trials.trials)
    assert loss_of(posterior, held_out, **options) == pytest.approx(
        best + trials.nll_given_up_for_width, rel=1e-6
    )
    assert loss_of(posterior, held_out) == loss_of(posterior, held_out, **options)  # both are on record
    for trial in trials.trials:
        at = posterior.at(trial.settings)
        exact = options["head"] == "moments" or trial in (trials.trials[0], trials.chosen)
        tolerance = {"rel": 1e-6} if exact else {"abs": 5e-4}
        assert loss_of(at, held_out, **options) == pytest.approx(trial.objective, **tolerance)


@pytest.mark.parametrize("doubt", [held_out_module._DOUBT, 1.0])
def test_a_width_is_found_by_one_set_of_backward_passes(
    monkeypatch: pytest.MonkeyPatch, doubt: float
) -> None:
    """As by exact trials, which decide where there is a doubt."""
    model, train, held_out = overfitted_network()
    posterior = uq.fit(model, [train], progress=False)
    passes, original = list[int](), LinearizedPredictor.at_every_prior
    monkeypatch.setattr(held_out_module, "_DOUBT", doubt)
    monkeypatch.setattr(
        LinearizedPredictor,
        "at_every_prior",
        lambda *args: passes.append(len(args[1].targets)) or original(*args),
    )
    nearly, trials = tuned(posterior, [held_out])
    assert passes == [len(held_out[0])]
    monkeypatch.setattr(LinearizedPredictor, "at_every_prior", lambda *_: None)
    exact, by_exact = tuned(posterior, [held_out])
    assert len(trials.trials) == len(by_exact.trials) > 1
    assert nearly.settings.plain() == exact.settings.plain()
    for mine, theirs in zip(trials.trials, by_exact.trials, strict=True):
        own = doubt == 1.0 or mine in (trials.trials[0], trials.chosen)
        assert mine.objective == pytest.approx(theirs.objective, abs=1e-9 if own else 1e-3)


def test_a_calibration_is_left_out_of_the_search() -> None:
    posterior, held_out = fit(prior_precision=1.0), classifier()[2]
    predictor = uq.wrap(posterior.model, posterior, "moments")
    posterior = predictor.fit_scale([held_out[0][0]], progress=False).posterior
    assert posterior.history.calibration and not predictor.posterior.history.calibration
    with pytest.warns(UserWarning, match="fit it again"):
        found = tune(posterior, held_out, parameters=(), head="moments")
    assert found.history.calibration is None


SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"layers": "last"}, {}),
    ({}, {"criterion": "faithful"}),
    ({}, {"head": "sampling", "n_samples": 3}),
    ({}, {"parameters": ()}),
    ({"method": "inf"}, {"parameters": ("residual_weight",)}),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_search_takes_a_score_of_data_that_are_not_finite(value: float) -> None:
    """The row is named, and the posterior stays as it was."""
    held_out = [(x.clone(), y) for x, y in classifier()[2]]
    held_out[1][0][27, 2] = value
    named = rf"Batch 1: .*1 of {len(held_out[1][0])} inputs \(number 27 first\)"
    for of_fit, of_search in SEARCHES if value != value else SEARCHES[:1]:
        posterior = fit(prior_precision=1.0, **of_fit)
        before = copy.deepcopy((posterior.settings, posterior.history))
        with pytest.raises(NonFiniteError, match=named):
            tune(posterior, held_out, **of_search)
        assert (posterior.settings, posterior.history) == before
    with pytest.raises(NonFiniteError, match=named):
        tune(fit(prior_precision=1.0), held_out, criterion="leave_one_out")
    with pytest.raises(NonFiniteError, match=named):  # the epoch, by held-out data
        fit(method="utvi", epochs=1, val_loader=held_out)
    _, x, y = regression()
    wrong = x.clone()
    wrong[27] = value
    posterior = fit_regression(prior_precision=1.0)
    before = copy.deepcopy((posterior.settings, posterior.history))
    with pytest.raises(NonFiniteError, match=r"Batch 0: .*number 27 first"):  # the noise comes first here
        tune(posterior, [(wrong, y)])
    wrong = y.clone()
    wrong[27] = value
    for search in (uq.tune, uq.calibrate):
        with pytest.raises(PosthocUQError, match="targets are not finite"):
            search(posterior, [(x, wrong)], progress=False)
    assert (posterior.settings, posterior.history) == before
