"""Settings of a posterior: what is computed is computed under those of one moment, whatever is set meanwhile."""

import copy
import pickle
import threading
from collections.abc import Callable
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
    "sampling": {"head": "sampling", "n_samples": 3},
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


def _meddle(posterior: uq.Posterior) -> None:
    posterior.prior_precision = 50.0
    posterior.scale = 3.0
    if "temperature" in posterior.tunable:
        posterior.temperature = 4.0
    else:
        posterior.noise_scale = 5.0


@pytest.fixture
def meddling() -> Any:
    yield WHILE_RUNNING.append
    WHILE_RUNNING.clear()


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("head", HEADS)
def test_a_prediction_is_of_one_moment(head: str, likelihood: str, meddling: Any) -> None:
    """Set while the model runs, and while the first of the factors is made: the old settings alone, or the new ones."""
    model, posterior, x = _fitted(likelihood)
    first = posterior.settings
    predictor = uq.wrap(model, posterior, **HEADS[head])
    posterior.prior_precision = 2.0
    predictor.refresh(0)
    second = predictor(x)
    posterior.settings = first
    predictor.refresh(0)
    expected = predictor(x)
    meddling(lambda: _meddle(posterior))
    assert _same(predictor(x), expected)
    WHILE_RUNNING.clear()
    predictor.refresh(0)
    changed = predictor(x)
    assert not _same(changed, expected)
    # again, with nothing kept: the change comes between the factors of two blocks
    posterior.settings = first
    own = copy.deepcopy(posterior)
    block = next(iter(own.blocks.values()))
    made = block.covariance

    def covariance(settings: Any) -> Any:
        _meddle(own)
        return made(settings)

    fresh = uq.wrap(model, own, **HEADS[head])
    own.prior_precision = 2.0  # a change, so that factors are made
    block.covariance = covariance  # type: ignore[method-assign]
    fresh.refresh(0)
    own.adjust(temperature=first.temperature, noise_scale=first.noise_scale)
    assert _same(fresh(x), second)


def test_no_factor_ends_under_the_settings_of_another() -> None:
    _, posterior, _ = _fitted()
    expected = {}
    for value in (1.0, 50.0):
        posterior.prior_precision = value
        expected[value] = posterior.variance()
    posterior.prior_precision = 1.0
    own = copy.deepcopy(posterior)
    for block in own.blocks.values():
        made = block.covariance

        def covariance(settings: Any, made: Any = made) -> Any:
            own.prior_precision = 50.0  # between the reading of the settings and the end
            return made(settings)

        block.covariance = covariance  # type: ignore[method-assign]
    for value in (1.0, 50.0, 1.0):
        own.prior_precision = value
        for name, variance in own.variance().items():
            assert torch.equal(variance, expected[value][name]), (value, name)
    own.prior_precision = 1.0
    evidence = float(own.log_marginal_likelihood())
    posterior.prior_precision = 1.0
    assert evidence == float(posterior.log_marginal_likelihood())


def test_threads_that_set_and_threads_that_read() -> None:
    model, posterior, x = _fitted()
    predictor = uq.wrap(model, posterior, head="linearized", link="probit")
    values = (1.0, 50.0)
    variances, predictions = {}, {}
    for value in values:
        posterior.prior_precision = value
        variances[value], predictions[value] = posterior.variance(), predictor(x)
    stop = threading.Event()

    def setting() -> None:
        while not stop.is_set():
            for value in values:
                posterior.prior_precision = value

    def reading(_: int) -> bool:
        good = True
        for _ in range(15):
            found, prediction = posterior.variance(), predictor(x)
            good &= any(all(torch.equal(found[n], v) for n, v in variances[t].items()) for t in values)
            good &= any(_same(prediction, predictions[t]) for t in values)
        return good

    setter = threading.Thread(target=setting)
    setter.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(reading, range(4)))
    finally:
        stop.set()
        setter.join()


LACKING: list[tuple[str, str, str, str]] = [
    ("kfac", "classification", "residual_weight", "only the low rank of method='inf' leaves a residual"),
    ("kfac", "classification", "noise_scale", "its likelihood has no noise"),
    ("kfac", "regression", "temperature", "this likelihood's outputs are none"),
]


@pytest.mark.parametrize(("method", "likelihood", "name", "why"), LACKING)
def test_what_a_posterior_lacks_cannot_be_set(method: str, likelihood: str, name: str, why: str) -> None:
    _, posterior, _ = _fitted(likelihood, method)
    assert name not in posterior.tunable | posterior.fixed_by_training
    before = posterior.settings
    setattr(posterior, name, getattr(posterior, name))  # what it is already
    words = rf"method='{method}' has no {name.replace('_', ' ')}: .*{why}. Leave {name} at 1.0"
    with pytest.raises(PosthocUQError, match=words):
        setattr(posterior, name, 0.5)
    with pytest.raises(PosthocUQError, match=words):
        posterior.settings = replace(before, scale=3.0, **{name: 0.5})
    with pytest.raises(PosthocUQError, match=words):
        posterior.snapshot(replace(before, **{name: 0.5}))
    with pytest.raises(PosthocUQError, match=f"{name} must"):
        setattr(posterior, name, -1.0)
    assert posterior.settings == before


def test_a_file_keeps_what_its_posterior_lacks(tmp_path: Path) -> None:
    """As one from a release that let it be set."""
    model, posterior, _ = _fitted()
    posterior._settings = replace(posterior.settings, residual_weight=0.5, noise_scale=2.0)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    assert loaded.settings == posterior.settings
    loaded.residual_weight = 0.5
    with pytest.raises(PosthocUQError, match=r"Leave residual_weight at 0.5"):
        loaded.residual_weight = 1.0


def test_what_is_known_of_hyperparameters_is_in_one_place() -> None:
    assert list(HYPERPARAMETERS) == [own.name for own in fields(Hyperparameters)]
    _, posterior, _ = _fitted(method="inf")
    assert posterior.tunable == {"scale", "prior_precision", "residual_weight", "temperature"}
    assert posterior.width_parameter == "prior_precision" and not posterior.fixed_by_training
    shown = posterior.report().summary
    assert posterior.reported().items() <= shown.items() and "noise scale" not in shown


def test_settings_are_one_value() -> None:
    _, posterior, _ = _fitted()
    before, snapshot = posterior.settings, posterior.snapshot()
    posterior.settings = replace(before, scale=2.0, temperature=3.0)
    assert (posterior.scale, posterior.temperature, snapshot.scale) == (2.0, 3.0, before.scale)
    with pytest.raises(PosthocUQError, match="scale must be"):
        posterior.settings = replace(before, scale=0.0)
    posterior.prior_precision = dict.fromkeys(posterior.layers, 2.0)
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
        twin.prior_precision = 7.0
        assert posterior.prior_precision == {"0": 2.0, "3": 2.0} == {**prior}


@pytest.mark.parametrize("how", ["likelihood", "faithful", "fails"])
def test_a_search_changes_nothing_before_its_end(how: str, meddling: Any, tmp_path: Path) -> None:
    """Predictions and files made while trials are evaluated are those of before."""
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
    if how == "fails":
        with pytest.raises(OSError, match="disk"):
            uq.tune(posterior, batch, progress=False)
    else:
        uq.tune(posterior, batch, criterion=how, progress=False)
    WHILE_RUNNING.clear()
    assert calls > 5
    loaded = uq.load(tmp_path / "meanwhile.h5", model)
    assert loaded.settings == settings and loaded.history.head == history.head
    assert (posterior.settings == settings) == (how == "fails")
    assert (posterior.history == history) == (how == "fails")
    assert _same(predictor(x), before) == (how == "fails")
    uq.tune(posterior, progress=False)  # nothing is kept from the search
