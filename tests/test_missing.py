"""Targets that are not there (`missing="ignore"`), against sums over what is there, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import log, nan, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import NETS, failure, run, run_json
from networks import inputs_of, mlp
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import posthoc_uq as uq

NOISE, TAU, TARGETS, ROWS = 0.3, 2.0, 2, 30
X = inputs_of(4, samples=ROWS, dtype=torch.float64)
NEW = inputs_of(4, samples=7, seed=5, dtype=torch.float64)


def holes(seed: int = 0) -> Tensor:
    """Which targets are there: rows with both, one, and, the last five, none."""
    there = torch.rand(ROWS, TARGETS, generator=torch.Generator().manual_seed(seed)) < 0.6
    there[:-5, 0] |= ~there[:-5].any(1)
    there[-5:] = False
    return there


THERE = holes()


def with_holes(targets: Tensor, there: Tensor = THERE) -> Tensor:
    return torch.where(there, targets.double(), nan)


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """Of the outputs by all weights, ``(rows, outputs, weights)``."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(jacrev(lambda w, row: functional_call(model, w, (row[None],))[0]), (None, 0))(weights, x)
    return torch.cat([each.flatten(2) for each in found.values()], 2)


def normal(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The Fisher's diagonal and the log density of each target."""
    logs = -0.5 * ((outputs - targets).square() / NOISE + log(2 * pi * NOISE))
    return torch.full_like(outputs, 1 / NOISE), logs


def own_noise(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    means, logs = outputs.chunk(2, 1)
    densities = -0.5 * ((means - targets).square() * (-logs).exp() + logs + log(2 * pi))
    return torch.cat([(-logs).exp(), torch.full_like(logs, 0.5)], 1), densities


def poisson(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.exp(), targets * outputs - outputs.exp() - torch.lgamma(targets + 1)


def labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    probs = outputs.sigmoid()
    return probs * (1 - probs), targets * probs.log() + (1 - targets) * (1 - probs).log()


def gamma(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    law = torch.distributions.Gamma(2.0, 2.0 * (-outputs).exp(), validate_args=False)
    return torch.full_like(outputs, 2.0), law.log_prob(targets)


VALUES = torch.randn(ROWS, TARGETS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
COUNTS = (VALUES.abs() * 2).floor()
CASES: dict[str, tuple[uq.Likelihood, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]] = {
    "regression": (uq.Gaussian(NOISE, missing="ignore"), normal, VALUES),
    "heteroscedastic": (uq.Heteroscedastic(missing="ignore"), own_noise, VALUES),
    "poisson": (uq.Poisson(missing="ignore"), poisson, COUNTS),
    "gamma": (uq.Gamma(2.0, missing="ignore"), gamma, VALUES.abs() + 0.1),
    "multilabel": (uq.Multilabel(missing="ignore"), labels, (VALUES > 0).double()),
}
CASE = pytest.mark.parametrize("case", CASES)


def model_of(case: str) -> nn.Module:
    return mlp(2 * TARGETS if case == "heteroscedastic" else TARGETS, dtype=torch.float64)


def in_batches(targets: Tensor, x: Tensor = X, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), targets.split(size), strict=True))


def fitted(model: nn.Module, data: Any, likelihood: Any, **options: Any) -> uq.Posterior:
    options = {"method": "full", "fisher": "exact", "prior_precision": TAU, "progress": False} | options
    return uq.fit(model, data, likelihood=likelihood, **options)


def variance(model: nn.Module, posterior: uq.Posterior) -> Tensor:
    return uq.wrap(model, posterior).functional_variance(NEW)


@CASE
def test_exact_fisher_and_log_likelihood(case: str) -> None:
    likelihood, written, targets = CASES[case]
    model = model_of(case)
    posterior = fitted(model, in_batches(with_holes(targets)), likelihood)
    fisher, logs = written(model(X).detach(), targets)
    kept = torch.cat([THERE, THERE], 1) if case == "heteroscedastic" else THERE
    jac, new = jacobians(model, X)[kept], jacobians(model, NEW)
    precision = (jac.T * fisher[kept]) @ jac + TAU * torch.eye(jac.shape[1], dtype=torch.float64)
    expected = torch.einsum("nkp,pq,nkq->nk", new, torch.linalg.inv(precision), new)
    torch.testing.assert_close(variance(model, posterior), expected)
    assert posterior.evidence.samples == ROWS - 5
    assert posterior.evidence.log_likelihood == pytest.approx(float(logs[THERE].sum()), rel=1e-10)


@CASE
def test_scores_and_drawn_labels(case: str) -> None:
    likelihood, written, targets = CASES[case]
    model = model_of(case)
    outputs = model(X[:-5]).detach().requires_grad_()
    gone = with_holes(targets)[:-5]
    written(outputs, targets[:-5])[1][THERE[:-5]].sum().backward()
    torch.testing.assert_close(likelihood.score(outputs.detach(), gone), -outputs.grad)
    keys = torch.arange(len(gone))
    for fisher in ("mc", "empirical"):
        (drawn,) = likelihood.gradients(outputs, gone, keys, fisher)
        kept = likelihood.by_output(THERE[:-5], outputs)
        assert bool((drawn[~kept] == 0).all()) and bool((drawn[kept] != 0).all())


@CASE
def test_expected_and_predictive_densities(case: str) -> None:
    """What is there counts as it does alone."""
    likelihood, _, targets = CASES[case]
    outputs = model_of(case)(X).detach()
    variances = 0.1 + outputs.square()
    for rule in (likelihood.expected_log_prob, likelihood.predictive_log_prob):
        gone = rule(outputs, variances, with_holes(targets))
        each = [rule(outputs, variances, with_holes(targets, torch.eye(2).bool()[[k]])) for k in range(2)]
        torch.testing.assert_close(gone, (torch.stack(each, 1) * THERE).sum(1))
        torch.testing.assert_close(sum(each), rule(outputs, variances, targets))


@pytest.mark.parametrize("method", ["diag", "kfac", "inf"])
def test_a_row_without_targets_is_no_sample(method: str) -> None:
    model, likelihood = model_of("regression"), CASES["regression"][0]
    targets = with_holes(VALUES)
    options: dict[str, Any] = {"method": method, "fisher": "exact"}
    whole = fitted(model, in_batches(targets), likelihood, **options)
    part = fitted(model, in_batches(targets[:-5], X[:-5]), likelihood, **options)
    torch.testing.assert_close(variance(model, whole), variance(model, part))
    assert whole.scale == part.scale == ROWS - 5 and whole.evidence == part.evidence


def test_two_outputs_without_a_row_in_common_are_two_fits() -> None:
    """By an update: the first rows have the first output, the others the second."""
    model, likelihood = model_of("regression"), CASES["regression"][0]
    first = torch.arange(ROWS)[:, None] < 18
    targets = torch.where(torch.cat([first, ~first], 1), VALUES, nan)
    both = fitted(model, in_batches(targets, size=6), likelihood)
    one = fitted(model, in_batches(targets[:18], X[:18]), likelihood)
    joined = uq.update(one, in_batches(targets[18:], X[18:]), progress=False)
    torch.testing.assert_close(variance(model, joined), variance(model, both))
    assert joined.evidence.present == both.evidence.present == ROWS
    assert joined.log_marginal_likelihood() == pytest.approx(float(both.log_marginal_likelihood()), rel=1e-10)


def test_noise_and_evidence_are_by_output() -> None:
    model, likelihood = model_of("regression"), uq.Gaussian(missing="ignore")
    targets = with_holes(VALUES)
    posterior = fitted(model, in_batches(targets), likelihood)
    squares = (model(X).detach() - targets).square()
    torch.testing.assert_close(posterior.noise_variance, squares.nanmean(0))
    found = posterior.evidence
    assert found.present == THERE.sum() and found.squared_residuals == pytest.approx(float(THERE.sum()))
    twice = posterior.with_settings(noise_scale=2.0)
    law = torch.distributions.Normal(model(X).detach(), (2 * squares.nanmean(0)).sqrt())
    expected = law.log_prob(targets.nan_to_num())[THERE].sum()
    assert twice.evidence.at_noise(2.0) == pytest.approx(float(expected))


def test_without_the_option_nan_is_an_error_that_names_it() -> None:
    for case, name in (("regression", "Gaussian"), ("multilabel", "Multilabel"), ("poisson", "Poisson")):
        with pytest.raises(uq.PosthocUQError, match=rf"likelihood=uq.{name}\(missing='ignore'\)"):
            fitted(model_of(case), in_batches(with_holes(CASES[case][2])), case)
    with pytest.raises(uq.PosthocUQError, match="not finite"):
        fitted(model_of("regression"), in_batches(VALUES / 0), uq.Gaussian(1.0, missing="ignore"))
    with pytest.raises(uq.PosthocUQError, match=r"a mask of targets is NaN .* missing='ignore'"):
        masked = [(x, y, torch.ones_like(y)) for x, y in in_batches(VALUES)]
        fitted(model_of("regression"), masked, "regression", batch_to_weights=lambda batch: batch[2])
    with pytest.raises(uq.PosthocUQError, match="All targets of output 1"):
        alone = with_holes(VALUES, torch.tensor([[True, False]]))
        fitted(model_of("regression"), in_batches(alone), uq.Gaussian(missing="ignore"))


# What is measured of predictions


def filled(model: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy values of what the model predicts, and which of them are there: of the second output fewer."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(x), TARGETS, generator=generator, dtype=torch.float64)
    there = torch.rand(len(x), TARGETS, generator=generator) < torch.tensor([0.7, 0.5])
    there[:, 0] |= ~there.any(1)
    there[:4] = False
    return model(x).detach() + NOISE**0.5 * noise, there


HELD_OUT = inputs_of(4, samples=90, seed=9, dtype=torch.float64)


def test_measures_are_those_of_what_is_there() -> None:
    model = model_of("regression")
    posterior = fitted(model, in_batches(with_holes(VALUES)), uq.Gaussian(NOISE, missing="ignore"))
    targets, there = filled(model, HELD_OUT, 2)
    found = uq.evaluate(
        uq.wrap(model, posterior), in_batches(with_holes(targets, there), HELD_OUT, 40), progress=False
    )
    law = uq.wrap(model, posterior)(HELD_OUT)
    mean, variance, known = law.mean[there], law.variance[there], targets[there]
    logs = (
        torch.distributions.Normal(law.mean, law.variance.sqrt()).log_prob(targets).masked_fill(~there, 0.0)
    )
    inside = (known - mean).abs() <= 1.6448536269514722 * variance.sqrt()
    measures = found.metrics[found.names[0]]
    assert measures["rmse"] == pytest.approx(float((mean - known).square().mean().sqrt()))
    assert measures["log_density"] == pytest.approx(float(logs[4:].sum(1).mean()))
    assert measures["crps"] == pytest.approx(uq.evaluation.metrics.crps_gaussian(mean, variance, known))
    assert measures["coverage_90"] == pytest.approx(float(inside.double().mean()))
    twice = uq.evaluate(
        uq.wrap([model, model], [posterior, posterior]),
        in_batches(with_holes(targets, there), HELD_OUT, 40),
        progress=False,
    )
    (mixed,) = twice.metrics.values()
    assert mixed == pytest.approx({name: measures[name] for name in mixed}, rel=1e-5)
    losses = torch.where(there, (law.mean - targets).square(), 0.0).sum(1)[4:] / there.sum(1)[4:]
    torch.testing.assert_close(found.losses(), losses)
    assert len(found.targets) == 86 and found.figures()


def test_promises_are_by_what_is_there_of_each_output() -> None:
    model = model_of("regression")
    fit = fitted(model, in_batches(with_holes(VALUES)), uq.Gaussian(NOISE, missing="ignore"))
    targets, there = filled(model, HELD_OUT, 2)
    loader = in_batches(with_holes(targets, there), HELD_OUT, 40)
    posterior = uq.calibrate(fit, loader, share=None, progress=False)
    law = uq.wrap(model, posterior)(HELD_OUT)
    scores = ((targets - law.mean).abs() / law.variance.sqrt()).double()
    kept = posterior.history.promises.targets.scores
    for output in range(TARGETS):
        expected = scores[there[:, output], output].sort().values
        torch.testing.assert_close(kept[output].values, expected)
    found = uq.evaluate(uq.wrap(model, posterior), loader, progress=False)
    low, high = law.interval(0.8)
    inside = ((targets >= low) & (targets <= high))[there].double().mean()
    name = found.names[0]
    assert found.promised[name]["observed_coverage_80"] == pytest.approx(float(inside))
    assert found.promised[name]["interval_width_80"] == pytest.approx(float((high - low)[there].mean()))

    together = uq.calibrate(fit, loader, share=None, jointly=True, progress=False)
    (joint,) = together.history.promises.targets.scores
    law = uq.wrap(model, together)(HELD_OUT)
    scores = ((targets - law.mean).abs() / law.variance.sqrt()).masked_fill(~there, 0.0)[4:]
    torch.testing.assert_close(joint.values, scores.amax(1).sort().values)


def test_labels_that_are_missing() -> None:
    model = model_of("multilabel")
    posterior = fitted(model, in_batches(with_holes(VALUES > 0)), uq.Multilabel(missing="ignore"))
    targets, there = filled(model, HELD_OUT, 2)
    targets = (targets > 0.2).double()
    loader = in_batches(with_holes(targets, there), HELD_OUT, 40)
    found = uq.evaluate(uq.wrap(model, posterior), loader, progress=False)
    law = uq.wrap(model, posterior)(HELD_OUT)
    probs, known, measures = law.probs[there], targets[there], found.metrics[found.names[0]]
    of_labels = torch.where(targets == 1, law.probs, 1 - law.probs).log().masked_fill(~there, 0.0)
    assert measures["nll"] == pytest.approx(-float(of_labels[4:].sum(1).mean()))
    assert measures["brier"] == pytest.approx(float((probs - known).square().mean()))
    assert measures["hamming_loss"] == pytest.approx(float(((probs > 0.5) != known.bool()).double().mean()))
    precision, f1 = 0.0, 0.0
    for label, rows in enumerate(there.T):
        own, right = law.probs[rows, label], targets[rows, label].long()
        precision += uq.evaluation.metrics.mean_average_precision(own[:, None], right[:, None]) / TARGETS
        hits = int(((own > 0.5) & (right == 1)).sum())
        f1 += 2 * hits / int((own > 0.5).sum() + right.sum()) / TARGETS
    assert measures["mean_average_precision"] == pytest.approx(precision, rel=1e-6)
    assert measures["f1_macro"] == pytest.approx(f1, rel=1e-6)
    calibrated = uq.calibrate(posterior, loader, share=None, progress=False)
    before = calibrated.history.promises.targets.scores
    applies = there & (targets == 1)
    assert [scores.count for scores in before] == applies.sum(0).tolist()


def test_tuning_shifts_labels_by_what_is_there() -> None:
    """As with the rows of each label alone, copied where both labels are there."""
    model = model_of("multilabel")
    posterior = fitted(model, in_batches(with_holes(VALUES > 0)), uq.Multilabel(missing="ignore"))
    targets, there = filled(model, HELD_OUT, 2)
    targets = (targets > -0.5).double()
    options: dict[str, Any] = {"scaling": "bias", "progress": False}
    found = uq.tune(posterior, in_batches(with_holes(targets, there), HELD_OUT, 40), **options)
    apart = torch.cat([with_holes(targets, there & torch.eye(2).bool()[k]) for k in range(2)])
    twice = uq.tune(posterior, in_batches(apart, torch.cat([HELD_OUT, HELD_OUT]), 40), **options)
    assert found.class_shift == pytest.approx(twice.class_shift, rel=1e-3)
    assert found.temperature == pytest.approx(twice.temperature, rel=1e-3)


def test_leave_one_out_of_each_output_takes_its_own_rows() -> None:
    model, likelihood = mlp(2), uq.Gaussian(NOISE, missing="ignore")
    x, targets = X.float(), with_holes(VALUES).float()
    posterior = fitted(model, [(x, targets)], likelihood, method="diag")
    options: dict[str, Any] = {"criterion": "leave_one_out", "initialisations": 1, "progress": False}
    found = uq.tune(posterior, [(x, targets)], **options)
    errors = found.history.leave_one_out.noise_variance
    for output in range(TARGETS):
        rows = THERE[:, output]
        alone = with_holes(VALUES, THERE & rows[:, None]).float()
        own = uq.tune(posterior, [(x[rows], alone[rows])], **options)
        expected = own.history.leave_one_out.noise_variance[output]
        assert float(errors[output]) == pytest.approx(float(expected), rel=1e-6)


def test_empty_cells_of_target_columns(tmp_path: Path) -> None:
    """A fit, an evaluation and predictions of a table, and the network's scale by the training data."""
    (tmp_path / "nets.py").write_text(NETS)
    targets = with_holes(VALUES * torch.tensor([5.0, 0.1]) + 3)
    cells = [["" if value != value else str(value) for value in row] for row in targets.tolist()]
    rows = [[*map(str, x[:3]), *own] for x, own in zip(X.tolist(), cells, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(map(",".join, [list("abcyz"), *rows])) + "\n")
    words = [tmp_path / "t.csv", "--model", f"{tmp_path / 'nets.py'}:two"]
    said = failure("fit", *words, "-o", tmp_path / "p.h5", "--target y,z --likelihood regression")
    assert "--missing ignore" in said
    scale = "--likelihood.mean data --likelihood.std 5,0.1 --missing ignore --prior-precision 2"
    run("fit", *words, "-o", tmp_path / "p.h5", "--target y,z --likelihood regression --method diag", scale)
    made: dict[str, Any] = {}
    exec(NETS, made)
    posterior = uq.load(tmp_path / "p.h5", made["two"]())
    torch.testing.assert_close(posterior.likelihood.target_mean, targets.float().double().nanmean(0))
    assert (
        posterior.likelihood.target_std.tolist() == [5.0, 0.1] and posterior.evidence.present == THERE.sum()
    )
    said = run_json("evaluate", tmp_path / "p.h5", *words)
    errors = uq.wrap(made["two"](), posterior)(X[:, :3].float()).mean - targets
    assert said["quality"]["diag, linearized"]["rmse"] == pytest.approx(
        float(errors[THERE].square().mean().sqrt()), rel=1e-4
    )


class Together(uq.Likelihood):
    """Two values whose noise is correlated."""

    missing = "ignore"
    _covariance = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = []
        for output, target in zip(outputs, targets, strict=True):
            kept = ~target.isnan()
            law = torch.distributions.MultivariateNormal(output[kept], self._covariance[kept][:, kept])
            found.append(law.log_prob(target[kept]))
        return torch.stack(found)

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Any:
        precision = torch.zeros(len(outputs), 2, 2, dtype=outputs.dtype)
        for row, own in enumerate(torch.ones_like(outputs).bool() if there is None else there):
            kept = own.nonzero()
            precision[row, kept, kept.T] = torch.linalg.inv(self._covariance[kept, kept.T])
        return iter(torch.linalg.cholesky(precision + 1e-300 * torch.eye(2, dtype=outputs.dtype)).unbind(2))


def test_an_own_likelihood_is_told_what_is_there() -> None:
    model, there = model_of("regression"), THERE[:-5]
    likelihood, targets = Together(), with_holes(VALUES)
    jac, new = jacobians(model, X[:-5]), jacobians(model, NEW)
    precision = TAU * torch.eye(jac.shape[2], dtype=torch.float64)
    for own, rows in zip(there, jac, strict=True):
        kept = own.nonzero()
        precision += rows[own].T @ torch.linalg.inv(likelihood._covariance[kept, kept.T]) @ rows[own]
    expected = torch.einsum("nkp,pq,nkq->nk", new, torch.linalg.inv(precision), new)
    posterior = fitted(model, in_batches(targets), likelihood)
    torch.testing.assert_close(variance(model, posterior), expected)

    class NotTold(Together):
        def exact_factors(self, outputs: Tensor) -> Any:  # type: ignore[override]
            return super().exact_factors(outputs)

    with pytest.raises(uq.PosthocUQError, match=r"give it exact_factors\(outputs, there\)"):
        fitted(model, in_batches(targets), NotTold())
