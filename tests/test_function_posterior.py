"""`fit(method="function_space")`: what comes out, with every head, through a file, and what is refused."""

from __future__ import annotations

import copy
import random
import warnings
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.heads import function_space_kl
from posthoc_uq.methods.contexts import UniformBox
from posthoc_uq.methods.trained import initialised
from posthoc_uq.methods.training import best_epoch
from posthoc_uq.posteriors.block import Settings
from posthoc_uq.posteriors.variational import MeanFieldBlock


def net(outputs: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten()]
        found = nn.Sequential(
            *layers, nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs)
        ).to(dtype)
        found.train()
        found(torch.randn(30, 1, 6, 6, dtype=dtype))  # running statistics
    return found.eval()


def batches(targets: str = "classes", samples: int = 32, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=dtype)
    y = {
        "classes": torch.randint(0, 3, (samples,), generator=generator),
        "binary": torch.randint(0, 2, (samples,), generator=generator),
        "numbers": torch.randn(samples, 2, generator=generator, dtype=dtype),
    }[targets]
    return list(zip(x.split(8), y.split(8), strict=True))


def fitted(model: nn.Module, **given: Any) -> uq.Posterior:
    settings: dict[str, Any] = {"epochs": 2, "n_context": 6, "lr": 1e-2, "log_variance_lr": 0.1}
    settings |= {"initial_body_log_variance": -6.0, "progress": False}
    data = given.pop("loader", None) or batches()
    return uq.fit(model, data, method="function_space", **(settings | given))


def probe(samples: int = 5) -> Tensor:
    return torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(9))


def test_variances_stay_as_they_were_trained_where_no_faithful_posterior_is_asked_for() -> None:
    model = net()
    trained, narrowed = fitted(model, divergence=None), fitted(model, divergence=1e-6)
    assert (trained.scale, trained.temperature) == (32, 1.0)
    assert narrowed.scale > 10 * trained.scale
    ours = {name: variance * (narrowed.scale / 32) for name, variance in narrowed.variance().items()}
    for name, variance in trained.variance().items():
        torch.testing.assert_close(variance, ours[name])
    assert trained.history.head["name"] == "sampling" and not trained.history.faithful
    with pytest.raises(PosthocUQError, match="prior_precision='evidence' or a number"):
        uq.fit(model, batches(), divergence=None)


# What a training leaves alone


def test_frozen_mean_leaves_predictions_at_the_mean_untouched() -> None:
    model = net()
    posterior = fitted(model, train_mean=False)
    assert not posterior.trained_mean and posterior.report().summary["mean"] == "frozen"
    own = dict(model.named_parameters())
    assert all(mean.data_ptr() == own[name].data_ptr() for name, mean in posterior.mean.items())
    head = uq.wrap(model, posterior, "linearized")
    assert torch.equal(head.functional_mean(probe()), model(probe()))
    start = {f"{layer}.weight": value for layer, value in (("0", -6.0), ("5", -6.0), ("8", -5.0))}
    moved = posterior.variance()
    assert all(float((moved[n].log() - s).abs().max()) > 0.1 for n, s in start.items())


@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_moments_at_hand_are_those_of_a_pass_of_its_own(prior_mean: str) -> None:
    """With a frozen mean the prior's features are taken from the posterior's pass; the result is the same."""
    model = net(dtype=torch.float64)
    settings = {"loader": batches(dtype=torch.float64), "train_mean": False, "prior_mean": prior_mean}
    first = fitted(model, **settings)
    second = fitted(model, body="linearized", prior_body_variance=1e-30, **settings)  # a pass of its own
    for name, block in first.blocks.items():
        torch.testing.assert_close(block.variances, second.blocks[name].variances, rtol=1e-6, atol=0)


@pytest.mark.parametrize("after", [None, 1, 9, 16])
def test_user_s_model_and_random_state_stay(after: int | None) -> None:
    model = net()
    model.train()
    model[1].eval()
    state = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    if after is None:
        fitted(
            model,
            loader=DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), 8, shuffle=True),
        )
    else:
        calls = 0

        def context(n: int, generator: torch.Generator) -> Tensor:
            nonlocal calls
            calls += 1
            torch.rand(3), random.random(), np.random.rand()
            if calls == after:
                raise KeyError("a context of the user's")
            return torch.randn(n, 1, 6, 6, generator=generator)

        if after <= 8:
            with pytest.raises(KeyError):
                fitted(model, context=context)
        else:
            fitted(model, context=context)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    after_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after_state[:2] and torch.equal(before[2], after_state[2])


def test_a_seed_settles_the_result_and_another_does_not() -> None:
    first, second, third = (fitted(net(), seed=seed) for seed in (3, 3, 4))
    for name, block in first.blocks.items():
        assert torch.equal(block.variances, second.blocks[name].variances)
        assert not torch.equal(block.variances, third.blocks[name].variances)


# Through a file and with every head


@pytest.mark.parametrize("head", ["sampling", "linearized", "moments"])
@pytest.mark.parametrize("train_mean", [True, False])
def test_round_trip_with_every_head(head: str, train_mean: bool, tmp_path: Path) -> None:
    model = net()
    posterior = fitted(model, train_mean=train_mean)
    uq.save(posterior, tmp_path / "p.h5")
    for untrusted in (False, True):
        loaded = uq.load(tmp_path / "p.h5", model, untrusted=untrusted)
        for name, mean in posterior.mean.items():
            assert torch.equal(loaded.mean[name], mean)
            assert torch.equal(loaded.variance()[name], posterior.variance()[name])
        assert loaded.history == posterior.history and loaded.prior_precision == posterior.prior_precision
        first, second = (uq.wrap(model, p, head)(probe()) for p in (posterior, loaded))
        assert torch.equal(first.probs, second.probs)
    uq.save(loaded, tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "p.h5").read_bytes()
    found = uq.inspect(tmp_path / "p.h5")
    assert found["method"] == "function_space" and found["format_version"] == 1
    assert found["trained_mean"] == (list(posterior.mean) if train_mean else [])
    assert {block["kind"] for block in found["blocks"].values()} == {"mean_field"}


def test_every_head_predicts_around_the_trained_mean() -> None:
    """Means and variances of the heads against the trained parameters put into the model by hand."""
    model = net(dtype=torch.float64)
    x = probe().double()
    posterior = fitted(model, loader=batches(dtype=torch.float64))
    assert any(not torch.equal(mean, posterior.original[name]) for name, mean in posterior.mean.items())
    moved = functional_call(copy.deepcopy(model), posterior.mean, (x,)).detach()
    assert float((moved - model(x).detach()).abs().max()) > 1e-3
    linearized = uq.wrap(model, posterior, "linearized")
    torch.testing.assert_close(linearized.functional_mean(x), moved)
    jacobians = jacrev(lambda w: functional_call(model, w, (x,)))(posterior.mean)
    variances = posterior.variance()
    expected = sum((j.square() * variances[n]).flatten(2).sum(2) for n, j in jacobians.items())
    torch.testing.assert_close(linearized.functional_variance(x), expected.detach())
    probes = uq.wrap(model, posterior, "linearized", engine="jvp", n_probes=4)
    torch.testing.assert_close(probes.functional_mean(x), moved)
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    sampling = uq.wrap(model, posterior, n_samples=3)
    by_hand = torch.stack(
        [functional_call(model, {n: d[i] for n, d in draws.items()}, (x,)) for i in range(3)]
    )
    torch.testing.assert_close(sampling.outputs(x), by_hand)
    quiet = copy.deepcopy(posterior)
    for block in quiet.blocks.values():
        block.variances.zero_()
    torch.testing.assert_close(uq.wrap(model, quiet, "moments").functional_mean(x), moved)
    torch.testing.assert_close(uq.wrap(model, quiet).outputs(x)[0], moved)


def test_a_model_that_was_changed_is_refused(tmp_path: Path) -> None:
    """The file and the posterior belong to the original weights, not to those that were trained on."""
    model = net()
    posterior = fitted(model)
    uq.save(posterior, tmp_path / "p.h5")
    trained = copy.deepcopy(model)
    trained.load_state_dict(posterior.mean, strict=False)
    with pytest.raises(PosteriorMismatchError, match="are not those"):
        uq.load(tmp_path / "p.h5", trained)
    with pytest.raises(PosteriorMismatchError, match="are not those"):
        uq.wrap(trained, posterior)
    assert uq.wrap(copy.deepcopy(model), posterior) is not None
    with torch.no_grad():
        model[8].bias.add_(1e-3)
    for call in (lambda: uq.wrap(model, posterior), lambda: uq.save(posterior, tmp_path / "q.h5")):
        with pytest.raises(PosteriorMismatchError, match="changed after"):
            call()


def test_half_formats_keep_the_mean(tmp_path: Path) -> None:
    model = net()
    posterior = fitted(model)
    uq.save(posterior, tmp_path / "p.h5", dtype=torch.bfloat16)
    loaded = uq.load(tmp_path / "p.h5", model)
    for name, mean in posterior.mean.items():
        assert torch.equal(loaded.mean[name], mean)
        rounded = posterior.variance()[name].to(torch.bfloat16).float()
        assert torch.equal(loaded.variance()[name], rounded)


# The posterior's settings


def test_scale_is_a_temperature_of_the_whole_posterior() -> None:
    posterior = fitted(net())
    assert posterior.scale == 32.0
    before = posterior.variance()
    determinant = float(posterior.log_determinant())
    expected = -sum(float(v.double().log().sum()) for v in before.values())
    assert determinant == pytest.approx(expected, rel=1e-6)
    posterior.scale = 128.0
    for name, variance in posterior.variance().items():
        torch.testing.assert_close(variance, before[name] / 4)
    posterior.scale = 32.0
    assert all(torch.equal(v, before[n]) for n, v in posterior.variance().items())


def test_what_does_not_apply_says_so() -> None:
    posterior = fitted(net(), prior_precision=2.0)
    assert posterior.prior_precision == 2.0
    posterior.prior_precision = 2.0  # what it is already
    with pytest.raises(
        PosthocUQError, match=r"part of what method='function_space' optimised, and is 2.0; fit again"
    ):
        posterior.prior_precision = 3.0
    for call in (
        posterior.log_marginal_likelihood,
        lambda: uq.tune(posterior),
        lambda: uq.tune(posterior, per_layer=True),
    ):
        with pytest.raises(PosthocUQError, match=r"no log marginal likelihood.*val_loader"):
            call()
    with pytest.raises(PosthocUQError, match=r"parameters must be among \['scale'\]"):
        uq.tune(posterior, batches(), parameters=("prior_precision",), progress=False)
    with pytest.raises(PosthocUQError, match="no Fisher information"):
        next(iter(posterior.blocks.values())).dense()


@pytest.mark.filterwarnings("ignore:The best validation NLL", "ignore:The search ended at the edge")
def test_held_out_data_tune_scale_and_temperature() -> None:
    posterior = fitted(net())
    trials = uq.tune(posterior, batches(), progress=False, max_evaluations=4)
    assert len(trials.trials) >= 3 and "given up" in posterior.history.tuning["scale"]
    assert {trial.settings.prior_precision for trial in trials.trials} == {1.0}
    uq.tune(posterior, batches(), temperature=True, progress=False)
    assert posterior.history.tuning["temperature"].startswith("validation NLL")


def test_report_says_how_it_came_about() -> None:
    report = fitted(net(), val_loader=batches(), context="monochrome").report()
    text = str(report)
    for words in (
        "function_space",
        "monochrome",
        "KL mean part",
        "validation NLL",
        "prior precision: 1, the default",
    ):
        assert words in text
    assert len(report.summary["loss"]) == 2 and report.summary["epochs"] == 2
    assert {row["layer"] for row in report.rows} == {"0", "5", "8"}
    assert report.deterministic["1.weight"] == "BatchNorm2d is kept deterministic"


# Options


@pytest.mark.parametrize("layers", ["last", ["5", "8"]])
def test_chosen_layers_alone_are_variational(layers: Any) -> None:
    model = net()
    posterior = fitted(model, layers=layers)
    chosen = ["8"] if layers == "last" else layers
    assert list(posterior.layers) == chosen
    assert set(posterior.trained_mean) == {f"{name}.{part}" for name in chosen for part in ("weight", "bias")}
    head = uq.wrap(model, posterior, "linearized", engine="last_layer" if layers == "last" else "exact")
    assert bool((head.functional_variance(probe()) > 0).all())


@pytest.mark.filterwarnings("ignore:At the prior precision")
@pytest.mark.parametrize("initial", ["diag", "inf", "kfac", "posterior", "trained"])
def test_initial_variances_of_a_fitted_posterior(initial: str) -> None:
    """Without a step that matters, the variances are those that the training began from."""
    model = net()
    if initial == "posterior":
        start = uq.fit(model, batches(), method="kfac", prior_precision=3.0, progress=False)
    elif initial == "trained":
        start = fitted(model, divergence=None)
    else:
        start = uq.fit(model, batches(), method=initial, prior_precision="evidence", progress=False)
    given = start if initial in ("posterior", "trained") else initial
    found = fitted(model, initial=given, epochs=1, lr=1e-9, log_variance_lr=1e-9, divergence=None)
    for name, variance in found.variance().items():
        torch.testing.assert_close(variance, start.variance()[name], rtol=1e-4, atol=0)
        torch.testing.assert_close(found.mean[name], start.mean[name], rtol=0, atol=1e-6)


def test_initial_variances_of_another_model_are_refused() -> None:
    model, other = net(), net()
    with torch.no_grad():
        other[0].weight.mul_(2)
    start = uq.fit(other, batches(), method="diag", prior_precision=1.0, progress=False)
    with pytest.raises(PosteriorMismatchError, match=r"another model: '0.weight'"):
        fitted(model, initial=start)
    start = uq.fit(model, batches(), method="diag", layers="last", prior_precision=1.0, progress=False)
    with pytest.raises(PosteriorMismatchError, match="the same layers"):
        fitted(model, initial=start)
    with pytest.raises(PosthocUQError, match="train_mean=False"):
        fitted(model, initial=fitted(model), train_mean=False)


@pytest.mark.filterwarnings("ignore:At the prior precision")
@pytest.mark.parametrize("curvature", [None, "diag", "kfac", "inf"])
def test_without_epochs_the_curvature_s_own(curvature: str | None) -> None:
    model = net()
    options: dict[str, Any] = {"epochs": 0, "initial": curvature, "n_context": 6, "progress": False}
    posterior = uq.fit(model, batches(), method="function_space", fisher="exact", **options)
    expected = uq.fit(model, batches(), method=curvature or "inf", fisher="exact", progress=False)
    assert posterior.method == "function_space" and posterior.prior_precision == expected.prior_precision
    assert posterior.history.fit["curvature"] == (curvature or "inf")
    first, second = (
        uq.wrap(model, p, "linearized").functional_covariance(probe(), joint=True)
        for p in (posterior, expected)
    )
    assert torch.equal(first, second) and first.shape == (15, 15)
    found = function_space_kl(posterior, probe())
    assert float(found.covariance_part) > 0 and float(found.mean_part) > 0


@pytest.mark.parametrize("prior_mean", ["zero", "pretrained", "random_init"])
@pytest.mark.parametrize("body", ["linearized", "sample"])
def test_priors_and_bodies_train(prior_mean: str, body: str) -> None:
    posterior = fitted(net(), prior_mean=prior_mean, body=body, prior_body_variance=1e-4, n_sets=2, n_draws=2)
    assert all(bool((v > 0).all()) for v in posterior.variance().values())


def test_a_random_prior_depends_on_the_seed_alone() -> None:
    first, second = (fitted(net(), prior_mean="random_init", seed=2) for _ in range(2))
    for name, block in first.blocks.items():
        assert torch.equal(block.variances, second.blocks[name].variances)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another's option": ({"rank": 10}, r"does not take \['rank'\].*'context'"),
    "a typo": ({"n_contexts": 10}, r"does not take \['n_contexts'\]"),
    "epochs": ({"epochs": -1}, "epochs must be a whole number"),
    "lr": ({"lr": 0.0}, "lr must be"),
    "context": ({"context": "grey"}, "context must be one of"),
    "vectors": ({"context": lambda n, g: torch.zeros(n - 1, 1, 6, 6)}, "gave 5 inputs in place of 6"),
    "no tensor": ({"context": lambda n, g: None}, "must give a tensor"),
    "n_context": ({"n_context": 0}, "n_context must be a whole number"),
    "prior mean": ({"prior_mean": "one"}, "prior_mean must be one of"),
    "body": ({"body": "exact"}, "body must be one of"),
    "initial": ({"initial": "full"}, "initial must be one of"),
    "initial, no epochs": ({"initial": "constant", "epochs": 0}, "initial must be one of"),
    "log variance": ({"initial_log_variance": 100.0}, "initial_log_variance must be"),
    "function noise": ({"function_noise": 0.0}, "function_noise must be"),
    "evidence": ({"prior_precision": "evidence"}, "give prior_precision a number"),
    "noise": ({"learn_noise": True}, "can be learned"),
    "patience": ({"patience": 0}, "patience must be a whole number"),
    "one argument": (
        {"context": lambda n: torch.zeros(n, 1, 6, 6)},
        r"takes two arguments, \(n, generator\)",
    ),
    "no shares": ({"context": ["batch", "monochrome"]}, r"list of pairs \(share, context\)"),
    "an empty tensor": ({"context": torch.zeros(0, 1, 6, 6)}, "holds inputs"),
    "other images": (
        {"context": torch.zeros(9, 2, 6, 6)},
        r"of shapes \[\(2, 6, 6\)\] .* have \[\(1, 6, 6\)\]",
    ),
    "another's hyperparameter": ({"residual_weight": 0.5}, "does not take .*residual_weight"),
    "a curvature's labels": ({"fisher": "exact"}, "begin with a curvature's variances: initial='inf'"),
    "not the last layer": ({"layers": ["0", "5"]}, "have that layer among"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options(case: str) -> None:
    given, words = WRONG[case]
    with pytest.raises(PosthocUQError, match=words) as caught:
        fitted(net(), **given)
    assert len(str(caught.value)) < 600


def test_options_of_function_space_belong_to_it_alone() -> None:
    with pytest.raises(PosthocUQError, match=r"method='inf' does not take \['epochs'\].*'basis'"):
        uq.fit(net(), batches(), epochs=3, progress=False)


def test_an_iterator_is_refused() -> None:
    with pytest.raises(PosthocUQError, match="can be read only once"):
        fitted(net(), loader=iter(batches()))


def test_more_points_than_dimensions_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"n_context=10 is more than the 9 dimensions"):
        fitted(net(), n_context=10, epochs=1)


def test_context_points_are_no_more_than_dimensions_by_default() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="n_context")
        posterior = fitted(net(), n_context=None, epochs=1)
    assert posterior.history.fit["n_context"] == 9  # 8 features and a bias, where 32 is the default otherwise


def test_a_training_of_too_few_steps_says_so() -> None:
    with pytest.warns(
        UserWarning, match=r"8 steps at log_variance_lr=0.001 move a log variance by 0.0042 at most"
    ):
        fitted(net(), log_variance_lr=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*steps at log_variance_lr")
        fitted(net(), log_variance_lr=0.1)


def test_a_schedule_of_ones_moves_twice_as_far() -> None:
    with pytest.warns(UserWarning, match="move a log variance by 0.008 at most"):
        fitted(net(), log_variance_lr=1e-3, schedule=lambda progress: 1.0)


def test_more_noise_than_was_asked_for_is_said_once() -> None:
    alike = torch.ones(5, 1, 6, 6)
    with pytest.warns(UserWarning, match="no Cholesky factor at function_noise=3e-17") as caught:
        fitted(
            net(dtype=torch.float64),
            loader=batches(dtype=torch.float64),
            context=alike,
            function_noise=3e-17,
            n_context=5,
        )
    assert sum("no Cholesky factor" in str(one.message) for one in caught) == 1


def test_a_new_initialisation_is_one_of_the_statistics_too() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.full((1, 4, 6), 5.0))
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.norm = nn.BatchNorm1d(4)

    model = Positioned()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
        model.norm.running_mean.fill_(3.0)
    with torch.random.fork_rng(), pytest.warns(UserWarning, match=r"keeps 1 trained parameters.*'position'"):
        trained = {name: p.detach() for name, p in model.named_parameters()}
        found = initialised(model, trained, 0, "prior_mean='random_init'")
    assert (
        float(model.norm.running_mean.mean()) == 3.0 and float(found["norm.running_mean"].abs().max()) == 0.0
    )
    assert all(float(p.detach().mean()) == 5.0 for p in model.parameters())
    assert all(
        not bool((found[name] == 5).any()) for name, _ in model.named_parameters() if name != "position"
    )


@pytest.mark.parametrize(
    ("losses", "place"), [([3.0, 1.0, 2.0], 1), ([nan, 3.0, nan, 2.0], 3), ([nan, nan], 0), ([inf, 4.0], 1)]
)
def test_the_epoch_taken_is_the_one_that_the_training_keeps(losses: list[float], place: int) -> None:
    history = [{"validation NLL": loss} for loss in losses]
    assert best_epoch(history) == place + 1
    assert best_epoch([{"loss": 1.0}] * 3) == 3  # without validation data the last one is kept


def test_a_tensor_of_inputs_is_a_context() -> None:
    given = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    first, second = (fitted(net(), context=context, epochs=1) for context in (given, [given]))
    for name, block in first.blocks.items():
        assert torch.equal(block.variances, second.blocks[name].variances)


def test_the_report_has_the_ends_of_a_trainings_record() -> None:
    report = fitted(net(), epochs=3).report()
    values = report.summary["loss"]
    assert f"loss: {values[0]:.4g} ... {values[2]:.4g} (3 values)" in str(report).splitlines()


def test_advice_for_a_mean_that_predicts_worse() -> None:
    model = net(2)
    right = [(x, model(x).detach()) for x, _ in batches()]
    wrong = [(x, y + 3) for x, y in right]
    settings: dict[str, Any] = {"likelihood": "regression", "noise_variance": 0.05}
    posterior = fitted(model, loader=wrong, lr=0.05, epochs=20, **settings)
    with pytest.warns(UserWarning, match=r"worse than the model's own.*train_mean=False"):
        uq.tune(posterior, right, parameters=("scale",), progress=False)


# Likelihoods and models


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_likelihoods(likelihood: str, tmp_path: Path) -> None:
    outputs, targets = {
        "classification": (3, "classes"),
        "binary": (1, "binary"),
        "regression": (2, "numbers"),
    }[likelihood]
    model = net(outputs)
    posterior = fitted(model, likelihood=likelihood, loader=batches(targets), val_loader=batches(targets))
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    for head in ("sampling", "linearized", "moments"):
        first, second = (uq.wrap(model, p, head)(probe()) for p in (posterior, loaded))
        if likelihood == "regression":
            assert torch.equal(first.variance, second.variance) and bool((first.variance > 0).all())
        else:
            assert torch.equal(first.probs, second.probs)


def regression_data(samples: int = 200) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 2, generator=generator)
    y = torch.stack([x[:, 0], x[:, 1]], 1) + torch.tensor([0.1, 0.5]) * torch.randn(
        samples, 2, generator=generator
    )
    return list(zip(x.split(20), y.split(20), strict=True))


def test_noise_is_given_estimated_or_learned() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    data = regression_data()
    settings: dict[str, Any] = {"loader": data, "likelihood": "regression", "n_context": 3}
    residuals = torch.cat([model(x) - y for x, y in data]).square().mean(0)
    given = fitted(model, noise_variance=0.7, **settings)
    assert given.noise_variance.tolist() == [0.7]
    estimated = fitted(model, **settings)
    torch.testing.assert_close(estimated.noise_variance.float(), residuals.detach())
    assert "mean squared residual" in estimated.history.tuning["noise variance"]
    # From ten times too much, learning comes close to the residuals' variance, output by output.
    learned = fitted(
        model, noise_variance=residuals * 10, learn_noise=True, epochs=20, layers="last", **settings
    )
    torch.testing.assert_close(learned.noise_variance.float(), residuals.detach(), rtol=0.3, atol=0)
    assert learned.history.tuning["noise variance"] == "learned with the posterior"
    before = learned.variance()
    learned.noise_scale = 4.0  # of the predictive alone
    assert all(torch.equal(v, before[n]) for n, v in learned.variance().items())


def test_uncertainty_grows_where_the_context_is() -> None:
    """Two clouds of points, and a box far around them: entropy rises there, and decisions on the data stay."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 2
    x = torch.randn(160, 2, generator=generator) * 0.5 + torch.stack([2.0 * y - 1, 0.0 * y], 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        optimiser = torch.optim.Adam(model.parameters(), 2e-2)
        for _ in range(200):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    posterior = uq.fit(
        model.eval(),
        list(zip(x.split(40), y.split(40), strict=True)),
        method="function_space",
        context=UniformBox(-8.0, 8.0),
        n_context=16,
        epochs=60,
        lr=1e-2,
        log_variance_lr=3e-2,
        progress=False,
    )
    far = torch.tensor([[6, 6], [-6, 6], [-6, -6], [6, -6], [0, 8], [0, -8.0]])
    head = uq.wrap(model, posterior)

    def entropy(probs: Tensor) -> float:
        return float(torch.distributions.Categorical(probs=probs).entropy().mean().detach())

    assert entropy(head(far).probs) > 5 * entropy(model(far).softmax(1))
    assert entropy(head(far).probs) > 2 * entropy(head(x).probs)
    assert torch.equal(head(x).probs.argmax(1), model(x).argmax(1))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny"])
def test_real_architectures(name: str) -> None:
    torch.manual_seed(0)
    if name == "resnet18":
        import torchvision

        model = torchvision.models.resnet18(num_classes=5)
    else:
        import timm

        model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)
    model.eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 32, 32, generator=generator)
    data = [(x[:2], torch.tensor([0, 1])), (x[2:], torch.tensor([2, 3]))]
    posterior = fitted(
        model, loader=data, epochs=1, n_context=4, divergence=None
    )  # the search takes a minute
    assert all(bool(torch.isfinite(v).all()) for v in posterior.variance().values())
    moved = [n for n, m in posterior.mean.items() if not torch.equal(m, posterior.original[n])]
    assert len(moved) == len(posterior.mean)
    assert bool(torch.isfinite(uq.wrap(model, posterior, n_samples=2)(x).probs).all())


def test_inputs_of_several_parts_by_a_callable() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(2, 8), nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.out((self.first(a) + self.second(b)).tanh())

    torch.manual_seed(0)
    model = Two().eval()
    data = [
        {"a": torch.randn(6, 2), "b": torch.randn(6, 3), "labels": torch.randint(0, 2, (6,))}
        for _ in range(3)
    ]
    with pytest.raises(PosthocUQError, match="one floating-point input"):
        fitted(model, loader=data)

    def context(n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"a": torch.randn(n, 2, generator=generator), "b": torch.randn(n, 3, generator=generator)}

    posterior = fitted(model, loader=data, context=context, n_sets=2)
    assert list(posterior.layers) == ["first", "second", "out"]


def test_a_block_draws_and_measures_as_its_variances_say() -> None:
    variances = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    covariance = MeanFieldBlock(variances, 10).covariance(Settings(10.0, 1.0))
    noise = torch.randn(5000, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(covariance.transform(noise).var(0), variances, rtol=0.1, atol=0)
    rows = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(
        covariance.quadratic(rows), rows.flatten(1) @ variances.flatten().diag() @ rows.flatten(1).T
    )
    mean = torch.randn(6, 2, 4, dtype=torch.float64)
    expected = torch.einsum("goi,rgi->rgo", variances, mean.square())
    ready = covariance.prepared(torch.float64, mean.device, 2**20)
    torch.testing.assert_close(ready.output_variance(mean), expected)


def test_weights_that_are_certain_have_a_fit_without_a_faithful_prior() -> None:
    """Their precision is infinite, which is no fault of the data."""
    model, method = net(), uq.FunctionSpace(body="certain", epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = uq.fit(model, batches(), method, divergence=None, progress=False)
    assert bool((posterior.variance()["0.weight"] == 0).all())
    assert bool(uq.wrap(model, posterior)(batches()[0][0]).probs.isfinite().all())
