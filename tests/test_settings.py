"""A posterior is a value: calls return another one, and what is computed of one is of its settings alone."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.posteriors import HYPERPARAMETERS, Hyperparameters

HEADS: dict[str, dict[str, Any]] = {
    "sampling": {"head": "sampling", "n_samples": 3, "seed": 0},
    "exact": {"head": "linearized", "engine": "exact"},
    "jvp": {"head": "linearized", "engine": "jvp", "n_probes": 3},
    "moments": {"head": "moments"},
    "full covariance": {"head": "moments", "cov": "full"},
}
WHILE_RUNNING: list[Callable[[], None]] = []


class Meddling(nn.Module):
    """Something else happens while the model runs."""

    def forward(self, x: Tensor) -> Tensor:
        for work in WHILE_RUNNING:
            work()
        return x


def _fitted(
    likelihood: str = "classification", method: str = "kfac"
) -> tuple[nn.Module, uq.Posterior, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Meddling(), nn.Linear(5, 3))
        x = torch.randn(10, 4)
    targets = torch.randn(10, 3) if likelihood == "regression" else torch.arange(10) % 3
    options = {"noise_variance": 0.5} if likelihood == "regression" else {}
    posterior = uq.fit(
        model,
        [(x, targets)],
        method=method,
        likelihood=likelihood,
        prior_precision=1.0,
        progress=False,
        **options,
    )
    return model, posterior, x


def _same(first: Any, second: Any) -> bool:
    one, two = first.to_dict(), second.to_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _others(posterior: uq.Posterior) -> list[dict[str, float]]:
    """Other settings of a posterior: each alone, and all."""
    each = [{"prior_precision": 50.0}, {"scale": 3.0}]
    each.append({"temperature": 4.0} if "temperature" in posterior.tunable else {"noise_scale": 5.0})
    return [*each, {name: value for one in each for name, value in one.items()}]


@pytest.fixture
def meddling() -> Any:
    yield WHILE_RUNNING.append
    WHILE_RUNNING.clear()


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("head", HEADS)
def test_a_predictor_is_of_one_posterior(head: str, likelihood: str, meddling: Any) -> None:
    """Whatever is made of the posterior meanwhile: while the model runs, and while the first of the factors is made."""
    model, posterior, x = _fitted(likelihood)
    predictor, others = uq.wrap(model, posterior, **HEADS[head]), _others(posterior)
    expected = predictor(x)
    for settings in others:  # what is shared with a predictor of another posterior changes neither
        other = posterior.with_settings(**settings)
        of_other = predictor.with_posterior(other)
        assert _same(of_other(x), uq.wrap(model, other, **HEADS[head])(x)), settings
        assert not _same(of_other(x), expected) and of_other.posterior is other
        assert _same(of_other.with_posterior(posterior)(x), expected)
        assert _same(predictor(x), expected) and predictor.posterior is posterior
    meddling(lambda: posterior.with_settings(**others[-1]))
    assert _same(predictor(x), expected)
    WHILE_RUNNING.clear()
    # again, with nothing kept: others come between the factors of two blocks
    own = copy.deepcopy(posterior)
    block = next(iter(own.blocks.values()))
    made, between = block.covariance, list[bool]()

    def covariance(settings: Any) -> Any:
        if not between:
            between.append(True)
            own.with_settings(**others[-1]).variance()
        return made(settings)

    block.covariance = covariance  # type: ignore[method-assign]
    assert _same(uq.wrap(model, own, **HEADS[head])(x), expected) and between


def test_no_factor_ends_under_the_settings_of_another() -> None:
    _, posterior, _ = _fitted()
    expected = {value: posterior.with_settings(prior_precision=value).variance() for value in (1.0, 50.0)}
    evidence, own, busy = float(posterior.log_marginal_likelihood()), copy.deepcopy(posterior), False
    for block in own.blocks.values():
        made = block.covariance

        def covariance(settings: Any, made: Any = made) -> Any:
            nonlocal busy
            if not busy:  # which the others call, too
                busy = True
                own.with_settings(prior_precision=7.0).variance()
                busy = False
            return made(settings)

        block.covariance = covariance  # type: ignore[method-assign]
    for value in (1.0, 50.0, 1.0):
        own = own.with_settings(prior_precision=value)
        for name, variance in own.variance().items():
            assert torch.equal(variance, expected[value][name]), (value, name)
    assert evidence == float(own.log_marginal_likelihood())


def test_threads_that_make_others_and_threads_that_read() -> None:
    model, posterior, x = _fitted()
    options: dict[str, Any] = {"head": "linearized", "link": "probit"}
    values, predictor = (1.0, 50.0), uq.wrap(model, posterior, **options)
    variances, predictions = {}, {}
    for value in values:
        own = copy.deepcopy(posterior).with_settings(prior_precision=value)
        variances[value], predictions[value] = own.variance(), uq.wrap(model, own, **options)(x)

    def reading(number: int) -> bool:
        good = True
        for turn in range(15):
            value = values[(number + turn) % 2]
            own = posterior.with_settings(prior_precision=value)
            good &= _same(predictor.with_posterior(own)(x), predictions[value])
            good &= _same(predictor(x), predictions[1.0])
            for made, tau in ((own, value), (posterior, 1.0)):
                found = made.variance()
                good &= all(torch.equal(found[name], of_tau) for name, of_tau in variances[tau].items())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(reading, range(4)))


@pytest.mark.parametrize("name", [*HYPERPARAMETERS, "settings", "history", "model", "new"])
def test_nothing_of_a_posterior_can_be_set(name: str, tmp_path: Path) -> None:
    """Neither of one that was made of another, copied or read from a file."""
    model, posterior, _ = _fitted()
    uq.save(posterior, tmp_path / "p.h5")
    made = [
        posterior,
        posterior.with_settings(scale=2.0),
        copy.copy(posterior),
        copy.deepcopy(posterior),
        pickle.loads(pickle.dumps(posterior)),
        uq.load(tmp_path / "p.h5", model),
    ]
    way_out = (
        rf"posterior = posterior\.with_settings\({name}=3\.0\)"
        if name in HYPERPARAMETERS
        else "with_settings"
    )
    for each in made:
        before = (each.settings, each.history, each.model)
        with pytest.raises(AttributeError, match=rf"a value, whose {name} cannot be set: {way_out}"):
            setattr(each, name, 3.0)
        with pytest.raises(AttributeError, match=f"whose {name} cannot be deleted"):
            delattr(each, name)
        assert (each.settings, each.history, each.model) == before


def _labels(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(5), (torch.arange(len(x)) % 3).split(5), strict=True))


CALLS: dict[str, Callable[[uq.Posterior, Any], uq.Posterior]] = {
    "likelihood": lambda posterior, data: uq.tune(posterior, data, progress=False),
    "faithful": lambda posterior, data: uq.tune(posterior, data, criterion="faithful", progress=False),
    "leave-one-out": lambda posterior, data: uq.tune(
        posterior, data, criterion="leave_one_out", progress=False
    ),
    "evidence": lambda posterior, data: uq.tune(posterior, progress=False),
    "by layer": lambda posterior, data: uq.tune(posterior, per_layer=True, progress=False),
    "calibrate": lambda posterior, data: uq.calibrate(posterior, data, progress=False),
    "update": lambda posterior, data: uq.update(posterior, data, progress=False),
    "moments": lambda posterior, data: (
        uq.wrap(posterior.model, posterior, "moments").fit_scale(data, progress=False).posterior
    ),
    "settings": lambda posterior, data: posterior.with_settings(prior_precision=9.0, temperature=2.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
def test_every_call_returns_another_posterior_and_leaves_the_given_one(call: str) -> None:
    """Also a call that fails; a predictor that was made before predicts as before."""
    model, posterior, x = _fitted(method="diag")
    data = _labels(x)
    posterior = uq.calibrate(posterior, data, seed=1, progress=False)  # with promises
    predictor = uq.wrap(model, posterior)
    expected, shares = predictor(x), predictor(x).familiarity()
    before = copy.deepcopy(
        (posterior.settings, posterior.history, posterior.history.trials, posterior.variance())
    )

    def unchanged() -> None:
        settings, history, trials, variance = before
        assert (posterior.settings, posterior.history) == (settings, history)
        assert repr(posterior.history.trials) == repr(trials) and not posterior.history.leave_one_out
        assert all(torch.equal(variance[name], now) for name, now in posterior.variance().items())
        assert _same(predictor(x), expected) and torch.equal(predictor(x).familiarity(), shares)
        assert predictor.posterior is posterior

    found = CALLS[call](posterior, data)
    assert found is not posterior and (found.settings, found.history) != before[:2]
    unchanged()
    if call not in ("evidence", "by layer", "settings"):

        def broken() -> Iterator[tuple[Tensor, Tensor]]:
            yield data[0]
            raise OSError("the disk is gone")

        class Breaks(list[Any]):
            def __iter__(self) -> Any:
                return broken()

        with pytest.raises(OSError, match="disk"):
            CALLS[call](posterior, Breaks(data))
        unchanged()


LACKING = [
    ("kfac", "classification", "residual_weight"),
    ("kfac", "classification", "noise_scale"),
    ("kfac", "regression", "temperature"),
]


@pytest.mark.parametrize(("method", "likelihood", "name"), LACKING)
def test_what_a_posterior_lacks_may_be_set_to_what_it_is(method: str, likelihood: str, name: str) -> None:
    _, posterior, _ = _fitted(likelihood, method)
    assert name not in posterior.tunable | posterior.fixed_by_training
    same = posterior.with_settings(**{name: getattr(posterior, name)})
    assert same.settings == posterior.settings


def test_a_file_keeps_what_its_posterior_lacks(tmp_path: Path) -> None:
    """As one from a release that let it be set."""
    model, posterior, _ = _fitted()
    posterior = posterior.replaced(settings=replace(posterior.settings, residual_weight=0.5, noise_scale=2.0))
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.settings == posterior.settings
    assert loaded.with_settings(residual_weight=0.5).settings == posterior.settings
    with pytest.raises(PosthocUQError, match=r"Leave residual_weight at 0.5"):
        loaded.with_settings(residual_weight=1.0)


def test_what_is_known_of_hyperparameters_is_in_one_place() -> None:
    assert list(HYPERPARAMETERS) == [own.name for own in fields(Hyperparameters)]
    _, posterior, _ = _fitted(method="inf")
    of_weights = {"scale", "prior_precision", "residual_weight"}
    assert posterior.tunable == of_weights | {"temperature", "class_shift", "class_scale"}
    assert posterior.width_parameter == "prior_precision" and not posterior.fixed_by_training
    shown = posterior.report().summary
    assert posterior.reported().items() <= shown.items() and "noise scale" not in shown


def test_a_report_says_what_was_given_and_what_is_void() -> None:
    x, held_out = torch.randn(40, 4), torch.randn(40, 4)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    posterior = uq.fit(model, [(x, (x[:, 0] > 0).long())], "diag", progress=False)
    posterior = uq.calibrate(posterior, [(held_out, (held_out[:, 0] > 0).long())], progress=False)
    assert posterior.keeps_promises and "sets by 'lac'" in str(posterior.report())
    with pytest.warns(UserWarning, match="no longer hold"):
        other = posterior.with_settings(prior_precision=2 * posterior.prior_precision)
    assert (
        "prior precision" in posterior.history.tuning and other.history.tuning["prior precision"] == "given"
    )
    assert (
        not other.keeps_promises and "promises: void" in str(other.report()) and other.history.trials is None
    )
    with pytest.raises(AttributeError, match=r"posterior = uq\.tune\(posterior, val_loader\)"):
        posterior.tune()
    with pytest.raises(uq.PosthocUQError, match="history cannot be changed"):
        posterior.history.fit["seed"] = 4
    with pytest.raises(AttributeError, match="with_settings"):
        uq.wrap(model, posterior).temperature = 2.0


def test_settings_are_one_value() -> None:
    _, posterior, _ = _fitted()
    before, given = posterior.settings, posterior
    posterior = given.with_settings(scale=2.0, temperature=3.0)
    assert (posterior.scale, posterior.temperature, given.settings) == (2.0, 3.0, before)
    assert posterior.settings == replace(before, scale=2.0, temperature=3.0)
    posterior = posterior.with_settings(prior_precision=dict.fromkeys(posterior.layers, 2.0))
    prior = posterior.prior_precision
    for change in (
        lambda: prior.update({"0": 3.0}),
        lambda: prior.__setitem__("0", 3.0),
        lambda: prior.pop("0"),
        lambda: prior.clear(),
    ):
        with pytest.raises(PosthocUQError, match="cannot be changed in place"):
            change()
    for twin in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert twin.settings == posterior.settings
        assert twin.with_settings(prior_precision=7.0).prior_precision == 7.0
        assert twin.prior_precision == posterior.prior_precision == {"0": 2.0, "3": 2.0} == {**prior}


@pytest.mark.parametrize("how", ["likelihood", "faithful", "fails"])
def test_a_search_changes_nothing(how: str, meddling: Any, tmp_path: Path) -> None:
    """Predictions and files made while trials are evaluated, and after it, are those of before."""
    model, posterior, x = _fitted()
    predictor, batch = uq.wrap(model, posterior), [(x, torch.arange(10) % 3)]
    before, settings, history = predictor(x), posterior.settings, copy.deepcopy(posterior.history)
    calls, busy = 0, False

    def meanwhile() -> None:
        nonlocal calls, busy
        if busy:  # this function predicts too
            return
        busy, calls = True, calls + 1
        assert _same(predictor(x), before) and posterior.settings == settings
        assert posterior.history == history
        if calls == 5:
            uq.save(posterior, tmp_path / "meanwhile.h5")
        if calls == 6 and how == "fails":
            raise OSError("the disk is gone")
        busy = False

    meddling(meanwhile)
    found = None
    if how == "fails":
        with pytest.raises(OSError, match="disk"):
            uq.tune(posterior, batch, progress=False)
    else:
        for _ in range(2):  # rounding decides whether one search runs the model five times or six
            found = uq.tune(posterior, batch, criterion=how, progress=False)
    WHILE_RUNNING.clear()
    assert calls > 5
    loaded = uq.load(tmp_path / "meanwhile.h5", model)
    assert loaded.settings == settings and loaded.history.head == history.head
    assert posterior.settings == settings and posterior.history == history
    assert _same(predictor(x), before)
    assert found is None or (found.settings != settings and found.history != history)
    uq.tune(posterior, progress=False)  # nothing is kept from the search
