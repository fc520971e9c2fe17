"""A likelihood of the user's: a Poisson regression, all of it in the 22 lines of `Poisson` here, through all that the
library does.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm, poisson
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.curvature import resolve_fisher
from posthoc_uq.likelihoods import DrawnPrediction, OutputGaussian, cat
from posthoc_uq.methods.checkpoint import as_plain

SAMPLES = 60


class Poisson(uq.Likelihood):
    """Counts with the mean ``exposure * exp(outputs)``; outputs and targets are (samples, outputs)."""

    def __init__(self, exposure: float = 1.0) -> None:
        self.exposure = exposure

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        if targets is not None and (targets.shape != outputs.shape or bool((targets < 0).any())):
            raise uq.PosthocUQError("Counts must be shaped like the outputs, and none of them negative.")

    def distribution(self, outputs: Tensor) -> torch.distributions.Poisson:
        return torch.distributions.Poisson(self.exposure * outputs.exp(), validate_args=False)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        return self.mean(outputs).sqrt()

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw, outputs.shape[1])
        return torch.from_numpy(np.asarray(poisson.ppf(u.cpu(), self.mean(outputs).cpu()))).to(outputs)

    def divergence(self, outputs: Tensor, prediction: uq.Prediction) -> Tensor:
        return self.drawn_divergence(outputs, prediction)


class Bare(uq.Likelihood):
    """As little as there can be: a Laplace distribution of the residuals."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets.reshape(outputs.shape)).abs().sum(1) - math.log(2)


class Probit(uq.Likelihood):
    """Labels 0 and 1 with ``p(1 | f) = Phi(f)``, and the link that is exact then."""

    links = ("mc", "closed form")

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        signs = 2 * self.reshape_targets(outputs, targets) - 1
        return torch.special.log_ndtr(signs * outputs).flatten(1).sum(1)

    def from_gaussian(self, outputs: OutputGaussian) -> uq.Prediction:
        if outputs.link == "mc":
            return super().from_gaussian(outputs)
        probs = torch.special.ndtr(outputs.mean * (1 + outputs.variance).rsqrt())
        return uq.ClassPrediction(torch.cat([1 - probs, probs], 1), outputs.mean, outputs.variance)


class Broadcasting(Poisson):
    """A `log_prob` that takes targets of one shape only, and does not look."""

    check = uq.Likelihood.check

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * outputs - outputs.exp() - torch.lgamma(targets + 1)).sum(1)


class Unsummed(Broadcasting):
    """The same, for one output a sample."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1)


def data(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator)
    return x, torch.poisson((x[:, :1] - 0.5 * x[:, 1:2]).exp(), generator=generator)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    net, (x, y) = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), data()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        (-Poisson().log_prob(net(x), y).mean()).backward()
        optimiser.step()
    net.zero_grad()
    return net


def fit(
    network: nn.Module, method: str = "full", likelihood: uq.Likelihood | None = None, **options
) -> uq.Posterior:
    options = {"prior_precision": 5.0, "progress": False} | options
    return uq.fit(network, [data()], method=method, likelihood=likelihood or Poisson(), **options)


@pytest.fixture(scope="module")
def posterior(network: nn.Module) -> uq.Posterior:
    return fit(network)


class TestFit:
    @pytest.mark.parametrize(
        ("method", "fisher"), [("full", "exact"), ("diag", "mc"), ("kfac", "empirical"), ("inf", "exact")]
    )
    def test_it_is_the_one_of_the_package(self, network, method, fisher):
        """Fits, evidence and predictions of `uq.Poisson`, which `test_likelihoods` compares with definitions."""
        found, wanted = (fit(network, method, own, fisher=fisher) for own in (Poisson(), uq.Poisson()))
        for name, block in wanted.blocks.items():
            for part, tensor in block.tensors().items():
                if not part.endswith("basis"):  # whose signs are free
                    torch.testing.assert_close(
                        found.blocks[name].tensors()[part], tensor, rtol=1e-3, atol=1e-6
                    )
        evidence = wanted.log_marginal_likelihood(0.7)
        torch.testing.assert_close(found.log_marginal_likelihood(0.7), evidence, rtol=1e-5, atol=0)
        x, y = data(9, seed=2)
        for head in ("linearized", "sampling"):
            one, other = (uq.wrap(network, posterior, head)(x) for posterior in (found, wanted))
            assert isinstance(one, DrawnPrediction)
            torch.testing.assert_close(one.log_prob(y), other.log_prob(y), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(one.mean, other.mean, rtol=0.02, atol=0.0)

    def test_function_space(self, network):
        found = fit(
            network,
            "function_space",
            epochs=3,
            context="batch",
            lr=1e-3,
            log_variance_lr=0.1,
            prior_precision=1.0,
            n_context=6,
        )
        losses = found.history.fit["loss"]
        assert found.history.head.criterion == "faithful" and losses[-1] < losses[0]
        assert torch.isfinite(uq.wrap(network, found)(data()[0]).mean).all()

    def test_score_by_autograd(self):
        outputs, counts = torch.randn(5, 2), torch.tensor([[0.0, 1.0]]).expand(5, 2)
        found = Poisson(2.0).score(outputs, counts)
        torch.testing.assert_close(found, 2 * outputs.exp() - counts)
        assert not found.requires_grad

    def test_labels_by_what_the_likelihood_gives(self, network):
        class Drawn(Poisson):
            fisher_root = uq.Likelihood.fisher_root

        class Exact(Poisson):
            draw = uq.Likelihood.draw

        assert resolve_fisher("auto", 1, 1, 60, Poisson()) == ("exact", 1)
        assert resolve_fisher("auto", 1, 1, 60, Drawn()) == ("mc", 3)
        assert resolve_fisher("auto", 1, 100, 10**6, Exact()) == ("exact", 1)
        assert fit(network, "diag", Drawn()).history.fit["fisher"] == "mc"
        with pytest.raises(uq.PosthocUQError, match=r"take fisher=.mc."):
            fit(network, "diag", Drawn(), fisher="exact")
        with pytest.raises(uq.PosthocUQError, match="no method draw"):
            fit(network, "diag", Exact(), fisher="mc")
        with pytest.raises(uq.PosthocUQError, match=r"exact_factors.*take fisher=.empirical., which"):
            fit(network, "diag", Bare(), fisher="exact")

    def test_log_prob_alone_is_enough(self, network):
        """Without drawn or exact labels the Fisher is that of the targets, and says so once."""
        with pytest.warns(UserWarning, match="neither draw nor exact_factors") as warned:
            bare = uq.fit(network, [data()], likelihood=Bare(), progress=False)
        assert len(warned) == 1 and "fisher: empirical, chosen by 'auto'" in str(bare.report())
        asked = uq.fit(network, [data()], likelihood=Bare(), fisher="empirical", progress=False)
        for name, block in bare.blocks.items():
            for part, tensor in block.tensors().items():
                assert torch.equal(tensor, asked.blocks[name].tensors()[part])
        with pytest.raises(uq.PosthocUQError, match=r"gives no labels.*no targets.*fisher='empirical'"):
            uq.fit(network, [data()[0]], likelihood=Bare(), progress=False)

    @pytest.mark.parametrize("method", ["diag", "function_space"])
    def test_targets_that_broadcast_are_refused(self, network, method):
        x, y = data()
        words = r"Batch 0: log_prob of likelihood 'Poisson'.*\(60, 1\) and targets of shape \(60,\).*reshape"
        with pytest.raises(uq.PosthocUQError, match=words):
            uq.fit(network, [(x, y.flatten())], method, likelihood=Broadcasting(), progress=False)
        with pytest.raises(uq.PosthocUQError, match=r"gives 32 samples the shape \(32, 32\) and not \(32,\)"):
            uq.fit(network, [(x, y.flatten())], method, likelihood=Unsummed(), progress=False)
        fitted = uq.fit(
            network, [(x, y)], "diag", likelihood=Broadcasting(), prior_precision=1.0, progress=False
        )
        with pytest.raises(uq.PosthocUQError, match="alone than among others"):
            uq.wrap(network, fitted)(x).log_prob(y.flatten())
        with pytest.raises(uq.PosthocUQError, match="alone than among others"):
            uq.tune(fitted, [(x, y.flatten())], progress=False)
        with pytest.raises(uq.PosthocUQError, match="alone than among others"):
            str(uq.evaluate(uq.wrap(network, fitted), [(x, y.flatten())], progress=False))

    def test_flat_targets_of_the_document(self, network):
        """The likelihood that the guide shows takes targets of either shape."""
        text = (Path(__file__).parents[1] / "docs" / "guides" / "new_likelihood.md").read_text(
            encoding="utf-8"
        )
        shown = text.split("```python fixture\n")[1].split("```")[0]
        names = {"__name__": __name__}
        exec(shown, names)
        x, y = data()
        options = {
            "method": "diag",
            "likelihood": names["Poisson"](),
            "prior_precision": 2.0,
            "progress": False,
        }
        fits = [uq.fit(network, [(x, targets)], **options) for targets in (y, y.flatten())]
        assert fits[0].evidence.log_likelihood == pytest.approx(fits[1].evidence.log_likelihood, rel=1e-6)
        logs = [uq.wrap(network, fits[1])(x).log_prob(targets) for targets in (y, y.flatten())]
        assert torch.equal(*logs)
        assert "NLL" in str(uq.evaluate(uq.wrap(network, fits[1]), [(x, y.flatten())], progress=False))

    def test_targets_that_its_check_refuses(self, network):
        x, y = data()
        with pytest.raises(uq.PosthocUQError, match=r"^Batch 0: Counts must be"):
            uq.fit(network, [(x, -1 - y)], likelihood=Poisson(), prior_precision=1.0, progress=False)
        with pytest.raises(uq.PosthocUQError, match="do not fit outputs"):
            fit(network, "diag", Bare(), fisher="empirical").likelihood.check(x, y[1:])

    def test_another_exposure_is_another_fit(self):
        assert as_plain(Poisson(2.0)) == as_plain(Poisson(2.0)) != as_plain(Poisson(1.0))


class TestTune:
    def test_the_default_is_faithful(self, network):
        found = fit(network, prior_precision=None, divergence=0.01)
        assert found.history.head.criterion == "faithful"
        x, prediction = data()[0], uq.wrap(network, found)(data()[0])
        assert found.history.faithful.divergence <= 0.01
        # KL(Poisson || mixture) in full: sum over counts
        outputs = network(x).detach()
        logs = [Poisson().log_prob(outputs, torch.full_like(outputs, k)) for k in range(60)]
        other = [prediction.log_prob(torch.full_like(outputs, k)) for k in range(60)]
        terms = [a.exp() * (a - b) for a, b in zip(logs, other, strict=True)]
        truth = float(torch.stack(terms).sum(0).mean())
        assert found.history.faithful.divergence == pytest.approx(truth, rel=0.2)

    def test_held_out_data(self, network):
        found = uq.tune(fit(network), [data(40, seed=3)], progress=False)
        trials = found.history.trials
        assert found.history.head.criterion == "likelihood" and found.temperature == 1.0
        x, y = data(40, seed=3)
        own = -float(uq.wrap(network, found)(x).log_prob(y).mean())
        assert own == pytest.approx(trials.chosen.objective, abs=1e-5)
        best = min(trial.objective for trial in trials.trials)
        kept = (
            trials.chosen.settings == trials.trials[0].settings
        )  # the fit, if labels do not clearly ask for another
        assert kept or own <= best + 0.01
        alone = -float(Poisson().log_prob(network(x).detach(), y).mean())
        assert trials.model_alone == pytest.approx(alone, abs=1e-5)
        with pytest.raises(uq.PosthocUQError, match="A temperature divides logits"):
            uq.tune(found, [(x, y)], temperature=True, progress=False)
        with pytest.raises(uq.PosthocUQError, match="noise can be tuned"):
            uq.tune(found, noise=True)

    def test_without_a_divergence_there_is_the_evidence(self, network):
        class Plain(Poisson):
            divergence = uq.Likelihood.divergence

        fitted = fit(network, "kfac", Plain(), prior_precision=None)
        assert fitted.history.head.criterion == "evidence"
        by_evidence, held_out = fitted.prior_precision, [data(40, seed=3)]
        fitted = uq.tune(fitted, held_out, progress=False)
        trials = fitted.history.trials
        best = min(trial.objective for trial in trials.trials)
        assert trials.trials[0].settings.prior_precision == pytest.approx(by_evidence)
        assert fitted.prior_precision >= by_evidence and trials.chosen.objective <= best + 0.01
        assert fitted.history.head.criterion == "likelihood" and not fitted.history.faithful
        with pytest.raises(uq.PosthocUQError, match="leave divergence out"):
            uq.tune(fitted, held_out, divergence=0.1, progress=False)
        with pytest.raises(uq.PosthocUQError, match="by the evidence or by the likelihood of held-out data"):
            uq.tune(fitted, held_out, criterion="faithful", progress=False)


def gaussian_truth(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and total variance of a count, and log probability of `y`, by a million pseudo-random draws an input."""
    draws = mean + variance.sqrt() * torch.randn(
        10**6, *mean.shape, generator=torch.Generator().manual_seed(5)
    )
    rates = draws.exp()
    logs = y * draws - rates - torch.lgamma(y + 1)
    return rates.mean(0), rates.mean(0) + rates.var(0), torch.logsumexp(logs, 0) - math.log(10**6)


class TestPredict:
    @pytest.mark.parametrize("head", ["linearized", "moments"])
    def test_gaussian_outputs_agree_with_brute_force(self, network, posterior, head):
        predictor, (x, y) = uq.wrap(network, posterior, head, n_draws=4096), data(8, seed=2)
        found = predictor(x)
        mean, variance = predictor.functional_mean(x), predictor.functional_variance(x)
        torch.testing.assert_close(
            found.epistemic_variance, (2 * mean + variance).exp() * variance.expm1(), rtol=3e-2, atol=0
        )
        logs = found.log_prob(y)
        for i in range(len(x)):
            truth = gaussian_truth(mean[i], variance[i], y[i])
            torch.testing.assert_close(found.mean[i], truth[0], rtol=5e-3, atol=0)
            torch.testing.assert_close(found.variance[i], truth[1], rtol=3e-2, atol=0)
            torch.testing.assert_close(logs[i : i + 1], truth[2], rtol=0, atol=5e-3)
        torch.testing.assert_close(found.mean, (mean + variance / 2).exp(), rtol=5e-3, atol=0)

    def test_drawn_targets_have_the_moments(self, network, posterior):
        prediction = uq.wrap(network, posterior)(data(4, seed=2)[0])
        drawn = prediction.sample(20000, torch.Generator().manual_seed(3))
        assert drawn.shape == (20000, 4, 1)
        torch.testing.assert_close(drawn.mean(0), prediction.mean, rtol=0.05, atol=0.02)
        torch.testing.assert_close(drawn.var(0), prediction.variance, rtol=0.1, atol=0.02)
        assert torch.equal(drawn[:5], prediction.sample(20000, torch.Generator().manual_seed(3))[:5])

    def test_correlated_outputs_are_drawn_together(self):
        class Product(Bare):
            def mean(self, outputs: Tensor) -> Tensor:
                return outputs[:, 0] * outputs[:, 1]

        torch.manual_seed(1)
        net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(5, 2)
        y = torch.randn(5, 2)
        own = uq.fit(
            net, [(x, y)], likelihood=Product(), fisher="empirical", prior_precision=3.0, progress=False
        )
        predictor = uq.wrap(net, own)
        covariance = predictor.functional_covariance(x)
        assert float(covariance[:, 0, 1].abs().min()) > 0.01
        found, f = predictor(x), predictor.functional_mean(x)
        truth = f[:, 0] * f[:, 1] + covariance[:, 0, 1]
        torch.testing.assert_close(found.mean, truth, rtol=0.02, atol=0.02)
        assert found.scores().keys() == {"epistemic_variance", "novelty"}
        with pytest.raises(uq.PosthocUQError, match=r"give it the methods mean\(outputs\) and variance"):
            _ = found.variance

    def test_batches_and_places(self, network, posterior):
        predictor, (x, y) = uq.wrap(network, posterior), data(9, seed=2)
        whole = predictor.predict([x[:4], x[4:]], progress=False)
        assert isinstance(whole, DrawnPrediction) and len(whole) == 9 and "draws=256" in repr(whole)
        torch.testing.assert_close(whole.log_prob(y), predictor(x).log_prob(y))
        torch.testing.assert_close(whole.interval(0.5), predictor(x).interval(0.5))
        assert {"mean", "variance", "epistemic_variance", "novelty"} <= whole.to_dict().keys()
        with pytest.raises(uq.PosthocUQError, match="different shapes"):
            cat([whole, uq.wrap(network, posterior, "sampling", n_samples=3)(x)])
        with pytest.raises(uq.PosthocUQError, match="Counts must be"):
            whole.log_prob(y[:3])
        with pytest.raises(uq.PosthocUQError, match="has no entropy"):
            whole.entropy()

    def test_exported(self, network):
        predictor, x = uq.wrap(network, fit(network, "kfac"), "moments", n_draws=64), data()[0]
        found, expected = uq.export(predictor, x[:4]).module()(x[:9]), predictor(x[:9])
        for name in ("mean", "variance", "epistemic_variance"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-6)

    def test_links_of_classes_are_refused(self, network, posterior):
        with pytest.raises(uq.PosthocUQError, match="link must be 'mc'"):
            uq.wrap(network, posterior, link="probit")

    @pytest.mark.parametrize("head", ["linearized", "moments"])
    def test_a_link_of_its_own(self, head):
        """The closed form against adaptive quadrature of the expectation, and against draws of the same outputs."""
        torch.manual_seed(2)
        net, x = (
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
            torch.randn(20, 2).double(),
        )
        labels = (x[:, 0] > 0).double()
        options = {"fisher": "empirical", "prior_precision": 1.0, "progress": False}
        own = uq.fit(net, [(x, labels)], likelihood=Probit(), **options)
        exact, drawn = (uq.wrap(net, own, head, link=link, n_draws=4096) for link in ("closed form", "mc"))
        assert "closed form" in str(exact.identity())
        mean, variance = exact.functional_mean(x), exact.functional_variance(x)
        truth = [
            quad(lambda f, m=m, v=v: norm.pdf(f, m, v**0.5) * norm.cdf(f), -20, 20, points=[m])[0]
            for m, v in zip(mean.flatten().tolist(), variance.flatten().tolist(), strict=True)
        ]
        prediction = exact(x)
        assert isinstance(prediction, uq.ClassPrediction) and min(variance) > 0.01
        assert prediction.probs[:, 1].tolist() == pytest.approx(truth, abs=1e-6)
        torch.testing.assert_close(prediction.log_prob(labels), drawn(x).log_prob(labels), rtol=0, atol=2e-3)
        found = uq.evaluate(exact, [(x, labels)], progress=False)
        assert next(iter(found.metrics.values()))["nll"] == pytest.approx(
            -float(prediction.log_prob(labels).mean())
        )

    def test_a_distribution_of_all_outputs_together(self):
        covariance = torch.tensor([[1.0, 0.8], [0.8, 2.0]])

        class Correlated(uq.Likelihood):
            def distribution(self, outputs: Tensor) -> torch.distributions.MultivariateNormal:
                return torch.distributions.MultivariateNormal(outputs, covariance, validate_args=False)

        mean, variance, y = torch.randn(6, 2), torch.rand(6, 2), torch.randn(6, 2)
        logs = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)
        torch.testing.assert_close(Correlated().log_prob(mean, y), logs)
        truth = logs - 0.5 * (variance * covariance.inverse().diagonal()).sum(1)
        found = Correlated().expected_log_prob(mean, variance, y, n_draws=4096)
        torch.testing.assert_close(found, truth, rtol=1e-2, atol=1e-2)

    def test_expected_log_probability(self):
        mean, variance, counts = torch.randn(6, 1), torch.rand(6, 1), torch.arange(6.0).unsqueeze(1)
        found = Poisson().expected_log_prob(mean, variance, counts, n_draws=4096)
        truth = counts * mean - (mean + variance / 2).exp() - torch.lgamma(counts + 1)
        torch.testing.assert_close(found, truth.squeeze(1), rtol=1e-2, atol=1e-2)
        values, own = torch.randn(6, 2), uq.Gaussian(torch.tensor([0.3, 2.0]))
        mean, variance = torch.randn(6, 2), torch.rand(6, 2)
        draws = mean + variance.sqrt() * torch.randn(200000, 6, 2, generator=torch.Generator().manual_seed(0))
        truth = -0.5 * (
            (draws - values).square() / own.noise_variance + (2 * math.pi * own.noise_variance).log()
        )
        found = own.expected_log_prob(mean, variance, values)
        torch.testing.assert_close(found.double(), truth.sum(2).mean(0).double(), rtol=1e-2, atol=2e-2)


class TestEvaluate:
    def test_tables(self, network, posterior):
        x, y = data(50, seed=4)
        predictor = uq.wrap(network, posterior)
        found = uq.evaluate(
            {"network": network, "posterior": predictor},
            [(x[:20], y[:20]), (x[20:], y[20:])],
            ood_loaders=[5 * data(50, seed=6)[0]],
            progress=False,
        )
        rates = predictor(x).mean
        own, alone = found.metrics["posterior"], found.metrics["network"]
        assert own["rmse"] == pytest.approx(float((rates - y).square().mean().sqrt()), rel=1e-5)
        assert own["nll"] == pytest.approx(-float(predictor(x).log_prob(y).mean()), rel=1e-5)
        assert alone["nll"] == pytest.approx(
            -float(Poisson().log_prob(network(x).detach(), y).mean()), rel=1e-5
        )
        assert own["coverage_50"] < own["coverage_90"] <= own["coverage_95"]
        assert own["coverage_95"] > 0.85 and own["sharpness_95"] > 0
        assert found.foreign["posterior"]["foreign"]["epistemic_variance"]["auroc"] > 0.7
        assert found.default_score == "standard_deviation"
        selective = found.selective["posterior"]["standard_deviation"]
        assert selective["rmse_referred_50"] < own["rmse"]
        assert "coverage of 95 %" in str(found) and "RMSE" in str(found)


class TestFile:
    @pytest.fixture
    def saved(self, network, tmp_path):
        path = tmp_path / "p.h5"
        own = fit(network, likelihood=Poisson(2.0))
        uq.save(own, path)
        return path, own

    def test_the_file_says_what_it_was(self, saved):
        described = uq.inspect(saved[0])
        assert described["likelihood"] == {
            "name": "Poisson",
            "class": f"{__name__}:Poisson",
            "attributes": {"name": "Poisson", "exposure": 2.0},
        }
        assert f"Poisson, {__name__}:Poisson" in str(described)

    def test_loaded_with_the_object(self, network, saved):
        path, own = saved
        loaded, (x, y) = uq.load(path, network, likelihood=Poisson(2.0)), data(8, seed=2)
        found, before = uq.wrap(network, loaded)(x), uq.wrap(network, own)(x)
        assert torch.equal(found.mean, before.mean) and torch.equal(found.log_prob(y), before.log_prob(y))

    def test_a_likelihood_of_the_package_may_be_given_too(self, network, tmp_path):
        x, y = data()
        own = uq.fit(
            network, [(x, y)], likelihood="regression", method="diag", noise_variance=0.5, progress=False
        )
        uq.save(own, tmp_path / "r.h5")
        assert uq.load(tmp_path / "r.h5", network, likelihood=uq.Gaussian(0.5)).noise_variance == 0.5

    @pytest.mark.study
    def test_a_process_without_the_class(self, network, saved, tmp_path):
        """Neither imported nor guessed; a class of the same name there, given as an object, predicts the same."""
        path, own = saved
        x = data(4, seed=2)[0]
        torch.save((network.state_dict(), x, uq.wrap(network, own)(x).mean), tmp_path / "known.pt")
        script = tmp_path / "elsewhere.py"
        script.write_text(
            "import sys\nimport numpy as np\nimport torch\n"
            "from scipy.stats import poisson\nfrom torch import Tensor, nn\nimport posthoc_uq as uq\n"
            f"weights, x, mean = torch.load({str(tmp_path / 'known.pt')!r})\n"
            "net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))\nnet.load_state_dict(weights)\n"
            f"try:\n    uq.load({str(path)!r}, net)\nexcept uq.PosthocUQError as error:\n    print(error)\n"
            f"assert {__name__!r} not in sys.modules\n" + inspect.getsource(Poisson) + "\n"
            f"posterior = uq.load({str(path)!r}, net, likelihood=Poisson(2.0))\n"
            "torch.testing.assert_close(uq.wrap(net, posterior)(x).mean, mean)\nprint('same')\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300
        )
        assert done.returncode == 0, done.stderr
        first, last = done.stdout.strip().splitlines()
        assert "which is not this package's, and nothing is imported because a file names it" in first
        assert last == "same"
