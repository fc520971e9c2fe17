"""Networks that were trained at other class rates: shifts and scales of classes, and what is promised with them."""

from __future__ import annotations

import itertools
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import run
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.likelihoods import OutputGaussian, of_covariance

RARE = 0.04
"""The rate of the last class in held-out and new data; training has all classes equally often."""
DRAWS = 200_000


def data(rows: int, seed: int, classes: int = 3, rare: float = RARE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rates = torch.full((classes,), (1 - rare) / (classes - 1))
    rates[-1] = rare
    labels = torch.multinomial(rates, rows, replacement=True, generator=generator)
    return torch.randn(rows, 4, generator=generator) + 1.2 * F.one_hot(labels, 4), labels


KINDS = ("classification", "binary", "multilabel")


def targets(labels: Tensor, kind: str) -> Tensor:
    if kind == "multilabel":
        return torch.stack([labels == 1, labels == 0], 1).long()
    return labels


@cache
def fitted(kind: str = "classification", **options: Any) -> uq.Posterior:
    classes = 3 if kind == "classification" else 2
    x, labels = data(300, 0, classes, 1 / classes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, {"binary": 1}.get(kind, classes)))
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    y = targets(labels, kind)
    for _ in range(60):
        optimiser.zero_grad()
        out = model(x)
        loss = (
            F.cross_entropy(out, y)
            if kind == "classification"
            else F.binary_cross_entropy_with_logits(out, y.to(out).reshape(out.shape))
        )
        loss.backward()
        optimiser.step()
    return uq.fit(model, [(x, y)], likelihood=kind, progress=False, **options)


def held_out(kind: str = "classification", rows: int = 300) -> list[tuple[Tensor, Tensor]]:
    x, labels = data(rows, 1, 3 if kind == "classification" else 2)
    return [(x, targets(labels, kind))]


# What is found


def penalty(log_temperature: float) -> float:
    """Minus the logarithm of the prior of a temperature: Cauchy above 1, normal with exponential tails below."""
    above, below = max(log_temperature, 0.0) / 0.3, min(log_temperature, 0.0) / 0.1
    return float(np.log1p(above**2)) + (below**2 / 2 if below > -1 else -below - 0.5)


def loss(logits: Tensor, labels: Tensor, softmax: bool) -> Tensor:
    if softmax:
        return F.cross_entropy(logits, labels, reduction="sum")
    return F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum")


def by_definition(
    logits: Tensor, labels: Tensor, softmax: bool, shift: float | None, scale: float | None
) -> tuple[NDArray[np.float64], float]:
    """The most probable log T, shifts and log scales, and the log evidence by Laplace's approximation, in float64 by
    autograd.
    """
    classes, none = logits.shape[1], torch.zeros(logits.shape[1], dtype=torch.float64)
    spreads = torch.tensor([s for s in (shift, scale) if s is not None for _ in range(classes)]).double()

    def of(x: Tensor) -> Tensor:
        b = x[1 : 1 + classes] if shift is not None else none
        a = x[-classes:] if scale is not None else none
        return loss(logits * a.exp() / x[0].exp() + b, labels, softmax)

    def objective(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        at = torch.tensor(x, requires_grad=True)
        value = of(at) + (at[1:] / spreads).square().sum() / 2
        (slope,) = torch.autograd.grad(value, at)
        slopes = slope.numpy().copy()
        slopes[0] += (penalty(x[0] + 1e-6) - penalty(x[0] - 1e-6)) / 2e-6
        return value.item() + penalty(x[0]), slopes

    start = np.zeros(1 + len(spreads))
    found: Any = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-7})
    evidence = -float(found.fun)
    hessian: Any = torch.autograd.functional.hessian(of, torch.tensor(found.x))
    inner = torch.eye(len(spreads)) + spreads[:, None] * hessian[1:, 1:] * spreads
    return found.x, evidence - 0.5 * float(torch.linalg.slogdet(inner)[1])


@cache
def certain(kind: str, classes: int) -> uq.Posterior:
    """A network whose logits are its inputs, and whose weights are certain."""
    model = nn.Linear(classes, classes, bias=False)
    nn.init.eye_(model.weight)
    y = torch.eye(classes).long() if kind == "multilabel" else torch.arange(classes)
    return uq.fit(
        model, [(torch.eye(classes), y)], "diag", prior_precision=1e8, likelihood=kind, progress=False
    )


def chosen(kind: str, logits: Tensor, labels: Tensor, scaling: Any) -> uq.Posterior:
    data = [(logits.float(), labels)]
    return uq.tune(
        certain(kind, logits.shape[1]),
        data,
        scaling=scaling,
        parameters=(),
        head="sampling",
        n_samples=1,
        progress=False,
    )


@pytest.mark.parametrize(
    ("kind", "scaling", "rows", "classes"),
    [
        ("classification", "bias", 120, 3),
        ("classification", "vector", 120, 3),
        ("classification", "bias", 9, 12),  # fewer rows than classes
        ("multilabel", "bias", 120, 3),
        ("multilabel", "vector", 120, 3),
    ],
)
def test_shifts_are_the_most_probable_ones(kind: str, scaling: str, rows: int, classes: int) -> None:
    """Averages over the spreads of their priors by the evidence of each; and the temperature at them."""
    generator, softmax = torch.Generator().manual_seed(0), kind == "classification"
    logits = 2 * torch.randn(rows, classes, generator=generator).double()
    shifted = logits / 1.4 + torch.tensor([0.0, 1.0, -1.5]).repeat(classes // 3)
    if softmax:
        labels = torch.multinomial(shifted.softmax(1), 1, generator=generator)[:, 0]
    else:
        labels = torch.bernoulli(shifted.sigmoid(), generator=generator).long()
    found = chosen(kind, logits, labels, scaling)
    scales = (0.1, 0.3) if scaling == "vector" else (None,)
    cases = itertools.product((0.1, 0.3, 1.0, 3.0), scales)
    made = [by_definition(logits, labels, softmax, shift, scale) for shift, scale in cases]
    weights = np.exp([evidence - max(each for _, each in made) for _, evidence in made])
    mean = sum(w * x for w, (x, _) in zip(weights / weights.sum(), made, strict=True))
    assert found.class_shift == pytest.approx(mean[1 : 1 + classes], abs=5e-3)
    assert found.class_scale == (
        pytest.approx(np.exp(mean[1 + classes :]), rel=5e-3) if scaling == "vector" else ()
    )
    scaled = logits * (torch.tensor(found.class_scale) if found.class_scale else 1)
    at = np.linspace(-1, 1, 4001)
    shift = torch.tensor(found.class_shift)
    losses = [float(loss(scaled / np.exp(t) + shift, labels, softmax)) + penalty(t) for t in at]
    assert found.temperature == pytest.approx(np.exp(at[np.argmin(losses)]), rel=5e-3)


def test_a_shift_is_taken_where_labels_clearly_speak_for_it() -> None:
    """Of labels that were drawn from the network's own probabilities hardly ever, of others always."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 3, generator=generator)
    taken = dict[str, int]()
    for name, shift in (("own", 0.0), ("other", -2.0)):
        probs = (logits + shift * torch.eye(3)[2]).softmax(1)
        draws = [torch.multinomial(probs, 1, generator=generator)[:, 0] for _ in range(20)]
        taken[name] = sum(bool(chosen("classification", logits, draw, "auto").class_shift) for draw in draws)
    assert taken["own"] <= 1 and taken["other"] == 20


@pytest.mark.parametrize("call", [uq.tune, uq.calibrate])
def test_classes_that_no_row_has_keep_their_logits(call: Any) -> None:
    """Also where labels speak for shifts of the others, which are 0 on the mean; and it is said."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3000, 6, generator=generator)
    shift = torch.tensor([0.0, 1.0, -1.5, 0.0, 0.0, 0.0])
    labels = torch.multinomial((logits + shift).softmax(1), 1, generator=generator)[:, 0]
    own = labels < 3
    options: dict[str, Any] = {"head": "sampling", "n_samples": 1, "progress": False}
    with pytest.warns(
        UserWarning, match="No held-out row has class 3, class 4 and class 5, .*stay as they are"
    ):
        moved = call(certain("classification", 6), [(logits[own], labels[own])], **options)
    assert moved.class_shift[3:] == (0, 0, 0) and sum(moved.class_shift) == pytest.approx(0, abs=0.02)
    assert np.subtract(moved.class_shift[:3], shift[:3] - shift[:3].mean()) == pytest.approx(0, abs=0.2)
    # labels of three classes that agree move none
    agreeing = torch.multinomial(logits[:, :3].softmax(1), 1, generator=generator)[:, 0]
    with pytest.warns(UserWarning, match="No held-out row has class 3"):
        plain = call(certain("classification", 6), [(logits[:300], agreeing[:300])], **options)
    assert not plain.class_shift
    asked = call(certain("classification", 6), [(logits[own], labels[own])], scaling="bias", **options)
    assert max(asked.class_shift[3:]) < -1


# What is predicted

SCALED = {"temperature": 1.3, "class_shift": (0.4, -0.2, -1.1), "class_scale": (1.2, 0.8, 1.1)}


def scaled(kind: str, **options: Any) -> uq.Posterior:
    count = {"classification": 3, "binary": 1, "multilabel": 2}[kind]
    own = {n: v[:count] if isinstance(v, tuple) else v for n, v in SCALED.items()}
    return fitted(kind, prior_precision=2.0, method="diag", layers="last", **options).with_settings(**own)


def probabilities(outputs: Tensor, posterior: uq.Posterior, kind: str) -> Tensor:
    """Of logits by the definition, in float64."""
    one = (
        torch.tensor(numbers, dtype=torch.float64)
        for numbers in (posterior.class_scale, posterior.class_shift)
    )
    scale, shift = one
    made = scale * outputs.double() / posterior.temperature + shift
    if kind == "classification":
        return made.softmax(-1)
    p = made.sigmoid()
    return p if kind == "multilabel" else torch.cat([1 - p, p], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_head_scales_every_draw(kind: str) -> None:
    posterior, x = scaled(kind), data(20, 3)[0]
    predictor: Any = uq.wrap(posterior.model, posterior, "sampling", n_samples=7, seed=1)
    plain: Any = predictor.with_posterior(
        posterior.with_settings(temperature=1.0, class_shift=(), class_scale=())
    )
    expected = probabilities(plain.outputs(x), posterior, kind).mean(0)
    assert torch.allclose(predictor(x).probs.double(), expected, atol=1e-6)
    assert torch.allclose(predictor.prediction_of(plain.outputs(x)).probs.double(), expected, atol=1e-6)


@pytest.mark.parametrize("head", ["linearized", "moments"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gaussian_head_predicts_the_mean_over_draws(kind: str, head: str) -> None:
    posterior, x = scaled(kind), data(6, 3)[0]
    predictor: Any = uq.wrap(posterior.model, posterior, head)
    found = predictor(x)
    mean, variance, covariance = predictor.distribution(x)[:3]
    root = (
        variance.double().sqrt().diag_embed()
        if covariance is None
        else torch.linalg.cholesky(covariance.double() + 1e-12 * torch.eye(mean.shape[1]).double())
    )
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(DRAWS, mean.shape[1], 1, dtype=torch.float64, generator=generator)
    for row in range(len(x)):
        draws = mean[row].double() + (root[row] @ normal).squeeze(-1)
        expected = probabilities(draws, posterior, kind).mean(0)
        assert torch.allclose(found.probs[row].double(), expected, atol=3e-3)


def test_the_functions_that_a_predictor_draws_are_scaled_too() -> None:
    posterior, x = scaled("classification"), data(20, 3)[0]
    predictor = uq.wrap(posterior.model, posterior, "linearized")
    draws = [
        call(x, n_samples=5, generator=torch.Generator().manual_seed(0))
        for call in (predictor.functional_samples, predictor.predictive_samples)
    ]
    assert torch.allclose(draws[1].double(), probabilities(draws[0], posterior, "classification"), atol=1e-6)


def test_many_classes_and_positions_have_a_shift_of_each_class() -> None:
    torch.manual_seed(0)
    x, shift = torch.randn(30, 5), torch.linspace(-2, 2, 20)
    wide = nn.Linear(5, 20)
    posterior = uq.fit(wide, [(x, torch.arange(30) % 20)], prior_precision=1e8, progress=False)
    found = uq.wrap(wide, posterior.with_settings(class_shift=shift))(x).probs
    assert torch.allclose(found, (wide(x) + shift).softmax(1), atol=1e-4)
    for dim in (1, -1):
        pixels = nn.Sequential(nn.Conv2d(2, 3, 1), *([] if dim == 1 else [Last()]))
        image = torch.randn(4, 2, 3, 3)
        labels = torch.arange(36).reshape(4, 3, 3) % 3
        likelihood = uq.Categorical(class_dim=dim)
        own = uq.fit(pixels, [(image, labels)], likelihood=likelihood, prior_precision=1e8, progress=False)
        own = own.with_settings(class_shift=(1.0, 0.0, -1.0), temperature=2.0)
        of_image: Any = uq.wrap(pixels, own)(image)
        along = torch.tensor([1.0, 0.0, -1.0]).reshape(*[3, 1, 1] if dim == 1 else [3])
        assert torch.allclose(of_image.probs, (pixels(image) / 2 + along).softmax(dim), atol=1e-4)


def test_a_shift_of_another_number_of_classes_is_refused() -> None:
    posterior, x = fitted().with_settings(class_shift=(1.0, 2.0)), data(5, 3)[0]
    for head in ("linearized", "sampling", "moments"):
        with pytest.raises(PosthocUQError, match=r"has 2 numbers in its class_shift .* of shape \(5, 3\)"):
            uq.wrap(posterior.model, posterior, head)(x)


def test_positions_have_a_temperature_alone() -> None:
    torch.manual_seed(0)
    pixels, image = nn.Conv2d(2, 3, 1), torch.randn(8, 2, 3, 3)
    labels = torch.randint(0, 3, (8, 3, 3))
    posterior = uq.fit(pixels, [(image, labels)], prior_precision=10.0, progress=False)
    assert not uq.tune(posterior, [(image, labels)], progress=False).class_shift
    with pytest.raises(PosthocUQError, match="for outputs without positions"):
        uq.tune(posterior, [(image, labels)], scaling="bias", progress=False)
    with pytest.raises(PosthocUQError, match="leave them out where targets are soft or have positions"):
        uq.calibrate(posterior, [(image, labels)], class_rates=[0.5, 0.3, 0.2], progress=False)


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


# What calls do


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [uq.tune, uq.calibrate])
def test_new_class_rates_are_found(call: Any, kind: str) -> None:
    """The mean probability of the rare class is its rate, where a temperature leaves it at many times that."""
    x, labels = data(4000, 2, 3 if kind == "classification" else 2)
    posterior = fitted(kind)
    means, losses = list[float](), list[float]()
    with pytest.warns(UserWarning, match=r"held-out rows have (class|label) .*scaling='bias'"):
        plain = call(posterior, held_out(kind, 1500), scaling="temperature", progress=False)
    assert not plain.class_shift
    for found in (plain, call(posterior, held_out(kind, 1500), progress=False)):
        prediction = uq.wrap(found.model, found)(x)
        rare = {"classification": 2, "binary": 1, "multilabel": 0}[kind]
        means.append(float(prediction.probs[:, rare].mean()))
        losses.append(-float(prediction.log_prob(targets(labels, kind)).mean()))
    assert means[0] > 2.5 * RARE
    assert 0.8 * RARE < means[1] < 1.25 * RARE
    assert losses[1] < losses[0] - 0.03
    assert "class shift" in found.history.tuning and "class shift" in str(found.report())


def test_a_shift_that_is_no_longer_asked_for_goes() -> None:
    posterior = uq.calibrate(fitted(), held_out(), scaling="vector", progress=False)
    assert len(posterior.class_scale) == len(posterior.class_shift) == 3
    with pytest.warns(UserWarning, match="scaling='bias'"):
        again = uq.tune(posterior.noted(promises=None), held_out(), scaling="temperature", progress=False)
    assert again.class_scale == again.class_shift == ()
    assert not {"class shift", "class scale"} & again.history.tuning.keys()
    kept = uq.tune(posterior.noted(promises=None), held_out(), temperature=False, progress=False)
    assert kept.class_scale == posterior.class_scale and kept.temperature == posterior.temperature


def test_where_rates_agree_nothing_changes() -> None:
    x, labels = data(300, 1, 3, 1 / 3)
    auto, plain = (
        uq.calibrate(fitted(), [(x, labels)], scaling=scaling, progress=False)
        for scaling in (None, "temperature")
    )
    assert auto.settings == plain.settings and not auto.class_shift


def test_promises_go_by_the_shift_of_the_first_half() -> None:
    """So that sets keep theirs, over draws of the held-out rows."""
    covered = list[float]()
    x, labels = data(2000, 7)
    for seed in range(8):
        posterior = uq.calibrate(fitted(), [data(160, 100 + seed)], seed=seed, progress=False)
        promises = posterior.history.promises
        assert promises is not None and promises.retuned and "class_shift" in promises.retuned
        prediction = uq.wrap(posterior.model, posterior)(x)
        at_promises = prediction.at_promises()
        shift = promises.posterior.get("class_shift", [])
        before = (
            posterior.with_settings
        )  # a posterior at the settings of the scores predicts as they were measured
        with pytest.warns(UserWarning, match="no longer hold"):
            there = before(class_shift=shift, temperature=promises.posterior["temperature"])
        assert torch.allclose(uq.wrap(there.model, there)(x).probs, at_promises.probs)
        sets = prediction.set(0.9, allow_empty=True)
        covered.append(float(sets.gather(1, labels[:, None]).double().mean()))
    assert abs(np.mean(covered) - 0.9) < 0.03


@pytest.mark.parametrize("kind", ["classification", pytest.param("binary", marks=pytest.mark.study)])
def test_known_rates_need_no_labels_from_there(kind: str) -> None:
    """Held-out data have the rates of the training, and new inputs others: probabilities are right, sets and p-values
    keep their promises over draws, those by class from all samples of each.
    """
    classes = 3 if kind == "classification" else 2
    rates = torch.full((classes,), (1 - RARE) / (classes - 1))
    rates[-1] = RARE
    x, labels = data(3000, 5, classes)
    covered, by_class, alarms, means = list[float](), list[float](), list[float](), list[float]()
    for seed in range(8):
        held = [data(400, 200 + seed, classes, 1 / classes)]
        posterior = uq.calibrate(fitted(kind), held, class_rates=rates, seed=seed, progress=False)
        prediction = uq.wrap(posterior.model, posterior)(x)
        means.append(float(prediction.probs[:, -1].mean()))
        sets = prediction.set(0.9, allow_empty=True)
        covered.append(float(sets.gather(1, labels[:, None]).double().mean()))
        alarms.append(float((prediction.familiarity("entropy") <= 0.1).double().mean()))
        own = uq.calibrate(fitted(kind), held, class_rates=rates, by_class=True, seed=seed, progress=False)
        promises = own.history.promises
        assert promises is not None and promises.targets is not None
        assert sum(score.count for score in promises.targets.scores) == 200 > promises.samples
        sets = uq.wrap(own.model, own)(x[labels == classes - 1]).set(0.9, allow_empty=True)
        by_class.append(float(sets[:, -1].double().mean()))
    assert 0.7 * RARE < np.mean(means) < 1.5 * RARE  # where the held-out rate is 8 to 12 times as large
    assert abs(np.mean(covered) - 0.9) < 0.03 and abs(np.mean(by_class) - 0.9) < 0.04
    assert abs(np.mean(alarms) - 0.1) < 0.03
    assert "at the given class rates" in str(posterior.report())
    assert "given" in posterior.history.tuning["class shift"]


def test_the_shift_of_known_rates_is_that_of_their_odds() -> None:
    x, labels = data(300, 1, 3, 1 / 3)
    options: dict[str, Any] = {"scaling": "temperature", "progress": False}
    plain, moved = (
        uq.calibrate(fitted(), [(x, labels)], **options, **given)
        for given in ({}, {"class_rates": (0.7, 0.2, 0.1)})
    )
    counts = torch.bincount(labels).double() + 0.5
    logs = (torch.tensor([0.7, 0.2, 0.1]).double() / counts * counts.sum()).log()
    assert moved.class_shift == pytest.approx((logs - logs.mean()).tolist(), abs=1e-6)
    assert moved.temperature == plain.temperature
    new, old = (uq.wrap(each.model, each, "sampling", n_samples=1)(x).probs for each in (moved, plain))
    expected = old.double() * logs.exp()
    assert torch.allclose(new.double(), expected / expected.sum(1, keepdim=True), atol=1e-5)


def test_rates_that_leave_few_samples_are_said() -> None:
    x, labels = data(300, 1, 3, 1 / 3)
    kept = torch.cat([(labels < 2).nonzero()[:, 0], (labels == 2).nonzero()[:5, 0]])
    with pytest.warns(UserWarning, match=r"leave \d+ samples on which promises rest, .* have 5 of class 2"):
        found = uq.calibrate(fitted(), [(x[kept], labels[kept])], class_rates=[0.3, 0.3, 0.4], progress=False)
    promises = found.history.promises
    assert promises is not None and promises.samples < 30


def test_the_classes_that_moved_most_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = uq.calibrate(fitted(), held_out(), progress=True)
    shift = dict(zip(("class 0", "class 1", "class 2"), posterior.class_shift, strict=True))
    told = f"class 2 down by {-shift['class 2']:.3g}, class 0 up by {shift['class 0']:.3g}"
    printed = capsys.readouterr().err
    assert f"predictions moved by a class shift: {told}" in printed and "class shift [" not in printed
    assert f"class shift: {told}" in str(posterior.report())
    shown = [line for line in str(posterior.history.trials).splitlines() if "temperature" in line]
    assert shown and all(f"  temperature={posterior.temperature:.5g}  " in line for line in shown)
    many = fitted().with_settings(
        class_shift=torch.linspace(-2, 2, 9), class_scale=torch.linspace(0.5, 1.5, 9)
    )
    report = str(many.report())
    assert (
        "class shift: class 0 down by 2, class 1 down by 1.5, class 8 up by 2, class 7 up by 1.5 (9 in all)"
        in report
    )
    assert "class scale: 0.5 (class 0) to 1.5 (class 8) (9 in all)" in report


def test_rates_need_held_out_samples_of_every_class() -> None:
    x, labels = data(300, 1, 3, 1 / 3)
    some = labels < 2
    with pytest.raises(PosthocUQError, match="how frequent class 2 will be, and no held-out sample has it"):
        uq.calibrate(fitted(), [(x[some], labels[some])], class_rates=(0.5, 0.45, 0.05), progress=False)


def test_the_scale_of_each_class_reaches_the_exact_covariance_of_few() -> None:
    """Also where it was taken apart before."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    root = torch.randn(6, 5, 4, dtype=torch.float64, generator=generator)
    covariance = root @ root.mT
    centred = covariance - covariance.mean(1, keepdim=True)
    centred = centred - centred.mean(2, keepdim=True)
    factors = torch.tensor([1.0, 0.5, 2.0, 1.3, 0.8]).double()
    variance = centred.diagonal(dim1=1, dim2=2)
    whole, apart = (
        fitted().likelihood.from_gaussian(OutputGaussian(mean, variance, known).by_class(factors, factors))
        for known in (centred, of_covariance(mean, covariance))
    )
    assert torch.allclose(whole.probs, apart.probs, atol=1e-6)


def test_files_keep_a_shift(tmp_path: Path) -> None:
    """Of settings and of promises, and a posterior without one is written as before there were any."""
    posterior, x = uq.calibrate(fitted(), held_out(), progress=False), data(20, 3)[0]
    uq.save(posterior, tmp_path / "shifted.h5")
    loaded = uq.load(tmp_path / "shifted.h5", posterior.model)
    assert loaded.settings == posterior.settings and loaded.keeps_promises
    first, second = (uq.wrap(each.model, each)(x) for each in (posterior, loaded))
    assert torch.equal(first.probs, second.probs) and torch.equal(first.set(0.9), second.set(0.9))
    assert uq.inspect(tmp_path / "shifted.h5")["class_shift"] == list(posterior.class_shift)
    plain = fitted()
    uq.save(plain, tmp_path / "plain.h5")
    assert "class_shift" not in uq.inspect(tmp_path / "plain.h5")
    with pytest.warns(UserWarning, match="no longer hold"):
        changed = loaded.with_settings(class_shift=())
    assert not changed.keeps_promises and "void" in str(changed.report())


@pytest.mark.parametrize(
    "head", [{}, pytest.param({"head": "sampling", "n_samples": 4}, marks=pytest.mark.study)]
)
def test_a_program_has_the_shift(head: dict[str, Any]) -> None:
    posterior, x = scaled("classification"), data(8, 3)[0]
    predictor = uq.wrap(posterior.model, posterior, **head)
    program: Any = uq.export(predictor, x)
    assert torch.allclose(program.module()(x).probs, predictor(x).probs, atol=1e-5)


NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def rows():
    return TensorDataset(*torch.load(__file__.replace("nets.py", "rows.pt")))
"""


@pytest.mark.parametrize("command", ["tune", "calibrate"])
def test_the_command_line_takes_a_scaling(command: str, tmp_path: Path) -> None:
    posterior = fitted()
    (tmp_path / "nets.py").write_text(NETS)
    torch.save(held_out()[0], tmp_path / "rows.pt")
    assert posterior.model is not None
    torch.save(posterior.model.state_dict(), tmp_path / "w.pt")
    uq.save(posterior, tmp_path / "p.h5")
    given = ["--model", f"{tmp_path / 'nets.py'}:net", "--weights", tmp_path / "w.pt", "--batch-size", 300]
    rows = f"{tmp_path / 'nets.py'}:rows"
    where = ["--data", rows] if command == "tune" else [rows]
    run(command, tmp_path / "p.h5", *where, *given, "--scaling", "bias")
    loaded = uq.load(tmp_path / "p.h5", posterior.model)
    assert len(loaded.class_shift) == 3 and not loaded.class_scale
    if command == "calibrate":
        run(command, tmp_path / "p.h5", *where, *given, "--class-rates", "0.5,0.3,0.2")
        promises = uq.load(tmp_path / "p.h5", posterior.model).history.promises
        assert promises is not None and promises.class_rates == [0.5, 0.3, 0.2]


def test_rows_thinned_to_other_rates_are_not_taken_for_training_rows() -> None:
    """Most of what is left there is of a class that is never predicted wrong."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [0.7, 0.0], [8.0, 8.0]])

    def rows(number: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 3, (number,), generator=generator)
        return centres[y] + torch.randn(number, 2, generator=generator), y

    x, y = rows(200)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    posterior = uq.fit(model.eval(), [(x, y)], "diag", progress=False)
    assert posterior.history.leave_one_out and posterior.history.leave_one_out.accuracy < 0.9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        uq.calibrate(posterior, [rows(1500)], class_rates=[0.02, 0.02, 0.96], progress=False)
    assert not any("trained on them" in str(warning.message) for warning in caught)
