"""Networks that were trained on standardised targets, and targets that are never below 0: predictions in the targets'
own units, against a fit on standardised targets whose predictions are moved and stretched by hand.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import inputs_of, mlp
from torch import Tensor, nn

import posthoc_uq as uq

X = inputs_of(4, samples=48, dtype=torch.float64)
NEW = inputs_of(4, samples=6, seed=5, dtype=torch.float64)
STANDARD = torch.randn(48, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MEAN, STD = torch.tensor([30.0, -2.0], dtype=torch.float64), torch.tensor([12.0, 0.05], dtype=torch.float64)


def in_batches(targets: Tensor, x: Tensor = X) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(16), targets.split(16), strict=True))


def own_units(values: Tensor) -> Tensor:
    return values * STD + MEAN


def pair(kind: str, **options: Any) -> tuple[nn.Module, uq.Posterior, uq.Posterior]:
    """A fit on standardised targets, and one on those in their own units."""
    model = mlp(4 if kind == "heteroscedastic" else 2, dtype=torch.float64)
    scaled = uq.Heteroscedastic if kind == "heteroscedastic" else uq.Gaussian
    likelihoods = (kind, scaled(mean=MEAN, std=STD.tolist()))
    fits = [
        uq.fit(model, in_batches(targets), likelihood=likelihood, progress=False, **options)
        for targets, likelihood in zip((STANDARD, own_units(STANDARD)), likelihoods, strict=True)
    ]
    return model, fits[0], fits[1]


@pytest.mark.parametrize("kind", ["regression", "heteroscedastic"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "full", "prior_precision": "evidence", "fisher": "exact"},
        {"method": "kfac", "layers": "last", "prior_precision": 2.0},
        {"method": "inf", "fisher": "empirical", "prior_precision": 2.0},
        {"method": "diag", "head": "sampling", "prior_precision": 2.0},
        {},
    ],
    ids=["dense", "kfac", "inf", "sampling", "default"],
)
def test_predictions_are_those_of_standardised_targets_moved_and_stretched(
    kind: str, options: dict[str, Any]
) -> None:
    model, standard, posterior = pair(kind, **options)
    one, other = uq.wrap(model, standard)(NEW), uq.wrap(model, posterior)(NEW)
    torch.testing.assert_close(other.mean, own_units(one.mean))
    for name in ("epistemic_variance", "noise_variance", "variance"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name) * STD.square())
    for bound, expected in zip(other.interval(0.8), one.interval(0.8), strict=True):
        torch.testing.assert_close(bound, own_units(expected))
    torch.testing.assert_close(other.log_prob(other.mean), one.log_prob(one.mean) - STD.log().sum())
    if kind == "regression":
        torch.testing.assert_close(posterior.noise_variance, standard.noise_variance * STD.square())
    both = [found.evidence.log_likelihood for found in (standard, posterior)]
    assert both[1] == pytest.approx(both[0] - 48 * float(STD.log().sum()))
    assert posterior.prior_precision == pytest.approx(standard.prior_precision, rel=1e-6)


def test_what_follows_a_fit_is_in_the_targets_units(tmp_path: Path) -> None:
    """Calibration, tuning, leave-one-out, moved means, evaluation, files."""
    model, standard, posterior = pair(
        "regression", method="full", layers="last", prior_precision=2.0, fisher="exact"
    )
    x = inputs_of(4, samples=60, seed=7, dtype=torch.float64)
    targets = torch.randn(60, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    calls: list[Any] = [
        lambda p, data: uq.calibrate(p, data, share=None, progress=False),
        lambda p, data: uq.tune(p, data, progress=False),
        lambda p, data: uq.tune(p, data, criterion="leave_one_out", progress=False),
        lambda p, data: uq.update(p, data, mean=True, progress=False),
    ]
    for number, call in enumerate(calls):
        one, other = (
            call(standard, in_batches(targets, x)),
            call(posterior, in_batches(own_units(targets), x)),
        )
        if number == 0:
            uq.save(other, tmp_path / "p.h5")
            other = uq.load(tmp_path / "p.h5", model)
        made = [uq.wrap(model, each) for each in (one, other)]
        torch.testing.assert_close(made[1](NEW).mean, own_units(made[0](NEW).mean))
        for bound, expected in zip(made[1](NEW).interval(0.5), made[0](NEW).interval(0.5), strict=True):
            torch.testing.assert_close(bound, own_units(expected))
    found = uq.evaluate(made[1], in_batches(own_units(targets), x), progress=False)
    error = (made[1](x).mean - own_units(targets)).square().mean().sqrt()
    assert found.metrics[found.names[0]]["rmse"] == pytest.approx(float(error))


def test_mean_and_deviation_of_the_training_data() -> None:
    model = mlp(2, dtype=torch.float64)
    targets = own_units(STANDARD)
    targets[::5, 1] = torch.nan
    likelihood = uq.Gaussian(mean="data", std="data", missing="ignore")
    options: dict[str, Any] = {"method": "diag", "prior_precision": 2.0, "progress": False}
    posterior = uq.fit(model, in_batches(targets), likelihood=likelihood, **options)
    found = posterior.likelihood
    deviations = (targets - targets.nanmean(0)).square().nanmean(0).sqrt()
    torch.testing.assert_close(found.target_mean, targets.nanmean(0))
    torch.testing.assert_close(found.target_std, deviations)
    given = uq.Gaussian(mean=targets.nanmean(0), std=deviations, missing="ignore")
    expected = uq.wrap(model, uq.fit(model, in_batches(targets), likelihood=given, **options))(NEW)
    torch.testing.assert_close(uq.wrap(model, posterior)(NEW).variance, expected.variance)
    part = uq.fit(
        model, in_batches(targets), likelihood=uq.Gaussian(mean="data", missing="ignore"), **options
    )
    assert part.likelihood.target_std.tolist() == [1.0]


def test_targets_that_are_never_below_zero() -> None:
    model = nn.Sequential(mlp(2, dtype=torch.float64), nn.Softplus())
    targets = STANDARD.abs()
    options: dict[str, Any] = {"method": "full", "prior_precision": 2.0, "progress": False}
    real = uq.fit(model, in_batches(targets), likelihood="regression", **options)
    posterior = uq.fit(model, in_batches(targets), likelihood=uq.Gaussian(support="positive"), **options)
    for made in (lambda p: p, lambda p: uq.calibrate(p, in_batches(targets), share=None, progress=False)):
        one, other = (uq.wrap(model, made(each))(X) for each in (real, posterior))
        for bound, expected in zip(other.interval(0.9), one.interval(0.9), strict=True):
            torch.testing.assert_close(bound, expected.clamp(min=0))
        assert bool((one.interval(0.9)[0] < 0).any())
    torch.testing.assert_close(other.quantile(0.05), one.quantile(0.05).clamp(min=0))
    assert float(other.sample(200, torch.Generator().manual_seed(0)).min()) == 0.0
    mixed = uq.wrap([model, model], [posterior, posterior])(X)
    assert bool((mixed.quantile(0.01) >= 0).all()) and bool((mixed.interval(0.99)[0] >= 0).all())


def test_maps_have_a_scale_of_each_channel() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Conv2d(1, 2, 3, padding=1).double()
    x = inputs_of(1, 4, 4, samples=6, dtype=torch.float64)
    standard = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    std, mean = STD[:, None, None], MEAN[:, None, None]
    targets = standard * std + mean
    options: dict[str, Any] = {"method": "kfac", "prior_precision": 2.0, "progress": False}
    one = uq.fit(model, [(x, standard)], likelihood="regression", **options)
    other = uq.fit(model, [(x, targets)], likelihood=uq.Gaussian(mean=MEAN, std=STD), **options)
    expected, found = uq.wrap(model, one)(x), uq.wrap(model, other)(x)
    torch.testing.assert_close(found.mean, expected.mean * std + mean)
    torch.testing.assert_close(found.variance, expected.variance * std.square())
    data = uq.fit(
        model, [(x[:2], targets[:2]), (x[2:], targets[2:])], likelihood=uq.Gaussian(std="data"), **options
    )
    deviation = targets.movedim(1, -1).reshape(-1, 2).std(0, unbiased=False)
    torch.testing.assert_close(data.likelihood.target_std, deviation)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mean": "train"}, "mean must be a number, one a target, or 'data'"),
        ({"std": 0.0}, "std must be above 0"),
        ({"std": [1.0, float("nan")]}, "std must be above 0"),
        ({"mean": []}, "mean must be finite"),
        ({"support": "positiv"}, "support must be .*Did you mean 'positive'"),
        ({"mean": [1.0, 2.0, 3.0]}, "mean has 3 entries, but there are 2 targets"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    for kind in (uq.Gaussian, uq.Heteroscedastic):
        with pytest.raises(uq.PosthocUQError, match=text):
            kind(**options).check(torch.zeros(3, 4 if kind is uq.Heteroscedastic else 2), None)


def test_constant_or_unknown_targets_have_no_scale() -> None:
    model, likelihood = mlp(2, dtype=torch.float64), uq.Gaussian(std="data")
    with pytest.raises(uq.PosthocUQError, match="All training targets of output 1 are the same"):
        uq.fit(model, in_batches(STANDARD * torch.tensor([1.0, 0.0])), likelihood=likelihood, progress=False)
    with pytest.raises(uq.PosthocUQError, match="need training targets of every output"):
        uq.fit(model, [X], likelihood=likelihood, progress=False)
    with pytest.raises(uq.PosthocUQError, match="method='message_passing' learns"):
        uq.fit(
            model, in_batches(STANDARD), "message_passing", likelihood=uq.Gaussian(std=2.0), progress=False
        )


def test_the_scale_of_weights_changes_no_warning_of_other_units() -> None:
    model, targets = mlp(2, dtype=torch.float64), own_units(STANDARD)
    read: dict[str, Any] = {"batch_to_weights": lambda batch: batch[2]}
    spread = torch.linspace(0.5, 1.5, len(X), dtype=torch.float64)
    for scale in (0.01, 100.0):
        with pytest.warns(UserWarning, match="Output 0 of the network lies"):
            data = [(X, targets, scale * spread)]
            uq.fit(model, data, "diag", likelihood="regression", progress=False, **read)
    with warnings.catch_warnings():  # two samples are few, whatever they weigh
        warnings.simplefilter("error")
        data = [(X[:2], targets[:2], torch.full((2,), 50.0))]
        uq.fit(model, data, "diag", likelihood="regression", prior_precision=1.0, progress=False, **read)


def test_targets_in_other_units_than_the_networks_are_warned_of() -> None:
    model = mlp(2, dtype=torch.float64)
    with pytest.warns(
        UserWarning, match=r"Output 0 of the network lies 3\d.* below its targets.*mean=\.\.\."
    ):
        uq.fit(model, in_batches(own_units(STANDARD)), likelihood="regression", progress=False)
    with warnings.catch_warnings():  # neither noisy targets nor few of them are
        warnings.simplefilter("error")
        uq.fit(model, in_batches(9 * STANDARD), likelihood="regression", progress=False)
        uq.fit(model, in_batches(own_units(STANDARD)[:16], X[:16]), likelihood="regression", progress=False)
