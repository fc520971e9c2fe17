"""From Gaussian logits to probabilities: numbers of the literature's formulas, quadrature, limits."""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.heads.predictor import from_gaussian
from posthoc_uq.likelihoods import OutputCovariance, cat, of_covariance, of_product
from posthoc_uq.likelihoods.draws import normals
from posthoc_uq.likelihoods.logits import log_logistic_normal


def posterior(likelihood: str, temperature: float = 1.0, **options: Any) -> uq.Posterior:
    """A posterior that only lends its likelihood."""
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0]))]
    if likelihood == "regression":
        data = [(data[0][0], data[0][1].double().unsqueeze(1))]
    if likelihood != "classification":
        data = [(data[0][0], data[0][1].reshape(4, 1).float())]
    net = torch.nn.Linear(3, 2 if likelihood == "classification" else 1)
    found = uq.fit(
        net, data, method="diag", likelihood=likelihood, prior_precision=1.0, progress=False, **options
    )
    return found if temperature == 1.0 else found.with_settings(temperature=temperature)


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_probit_bridge_and_draws_of_three_classes() -> None:
    mean, variance = numbers(1, 0, -1), numbers(1, 0.5, 2)
    own = posterior("classification")

    def probs(link: str, **more: Any) -> list[float]:
        return from_gaussian(mean, variance, own, link=link, **more).probs[0].tolist()

    assert probs("probit") == pytest.approx([0.613010, 0.262700, 0.124290], abs=2e-6)
    assert probs("bridge") == pytest.approx([0.475470, 0.398050, 0.126479], abs=2e-6)
    assert probs("mc", n_draws=100_000) == pytest.approx([0.5902, 0.2608, 0.1490], abs=2e-3)


def test_one_logit_against_quadrature() -> None:
    own = posterior("binary")
    for mean, variance, expected in ((1.0, 2.0, 0.678829), (-2.0, 0.5, 0.138414)):
        found = from_gaussian(numbers(mean), numbers(variance), own, link="probit")
        assert found.probs[0, 1].item() == pytest.approx(expected, abs=1e-6)
        exact, _ = quad(lambda z, m=mean, v=variance: norm.pdf(z, m, sqrt(v)) * expit(z), -30, 30)
        drawn = from_gaussian(numbers(mean), numbers(variance), own, link="mc", n_draws=50_000)
        assert drawn.probs[0, 1].item() == pytest.approx(exact, abs=3e-3)


def test_two_classes_use_the_variance_of_their_difference() -> None:
    mean = numbers(-1.058755, 0.580374)
    covariance = torch.tensor([[[2.280005, 0.667668], [0.667668, 2.149537]]], dtype=torch.float64)
    own = posterior("classification")
    variance = covariance.diagonal(dim1=1, dim2=2)
    with_covariance = from_gaussian(mean, variance, own, covariance=covariance, link="probit")
    assert with_covariance.probs[0, 0].item() == pytest.approx(0.249491, abs=2e-6)
    alone = from_gaussian(mean, variance, own, link="probit")
    assert alone.probs[0, 0].item() == pytest.approx(0.232112, abs=2e-6)
    # One logit with the difference's moments is the same prediction.
    difference = from_gaussian(numbers(1.639129), numbers(3.094205), posterior("binary"), link="probit")
    assert difference.probs[0, 0].item() == pytest.approx(0.249491, abs=2e-6)


def test_draws_follow_the_covariance() -> None:
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)  # of lower rank than classes
    covariance = root @ root.transpose(1, 2)
    mean = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    variance = covariance.diagonal(dim1=1, dim2=2)
    own = posterior("classification")
    found = from_gaussian(mean, variance, own, covariance=covariance, link="mc", n_draws=40_000)
    normals = torch.randn(40_000, 4, 2, generator=generator, dtype=torch.float64)
    reference = (mean + torch.einsum("bci,sbi->sbc", root, normals)).softmax(-1)
    torch.testing.assert_close(found.probs, reference.mean(0), atol=0.01, rtol=0)
    expected = -(reference * reference.log()).sum(-1).mean(0)
    torch.testing.assert_close(found.expected_entropy(), expected, atol=0.01, rtol=0)
    assert (found.mutual_information() >= 0).all()


@pytest.mark.parametrize("link", uq.Categorical.links)
def test_extreme_logits_stay_finite_and_certain_ones_are_softmax(link: str) -> None:
    own = posterior("classification")
    mean = torch.tensor([[200.0, 0.0, -200.0], [1.0, 0.0, -1.0]])
    for variance in (torch.zeros(2, 3), torch.full((2, 3), 1e8)):
        found = from_gaussian(mean, variance, own, link=link)
        assert torch.isfinite(found.probs).all()
        torch.testing.assert_close(found.probs.sum(1), torch.ones(2))
    if link != "bridge":
        torch.testing.assert_close(
            from_gaussian(mean, torch.zeros(2, 3), own, link=link).probs, mean.softmax(1)
        )
        many = torch.cat([mean, torch.linspace(-20, 20, 40).reshape(2, 20)], 1)
        torch.testing.assert_close(
            from_gaussian(many, torch.zeros_like(many), own, link=link).probs,
            many.softmax(1),
            atol=2e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize("link", uq.Categorical.links)
def test_a_prediction_does_not_depend_on_its_batch(link: str) -> None:
    own = posterior("classification", temperature=1.7)
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(6, 4, generator=generator)
    variance = torch.rand(6, 4, generator=generator)
    whole = from_gaussian(mean, variance, own, link=link)
    parts = cat(
        [from_gaussian(m, v, own, link=link) for m, v in zip(mean.split(2), variance.split(2), strict=True)]
    )
    torch.testing.assert_close(whole.probs, parts.probs)
    torch.testing.assert_close(whole.logits_mean, mean / 1.7)
    torch.testing.assert_close(whole.logits_variance, variance / 1.7**2)


def test_likely_classes_of_a_row_are_its_own() -> None:
    """Rows of many classes, decided, undecided, wide, masked and not a number, are the same beside others and alone."""
    own, generator = posterior("classification"), torch.Generator().manual_seed(5)
    mean = torch.randn(6, 200, generator=generator) * torch.tensor([4.0, 4.0, 0.1, 4.0, 4.0, 4.0]).unsqueeze(
        1
    )
    mean[0, 0], mean[4, 1:], mean[5, 7] = 40.0, -torch.inf, torch.nan
    few = torch.randn(6, 200, 3, generator=generator) * torch.tensor([0.2, 0.2, 0.2, 4, 0.2, 0.2]).reshape(
        -1, 1, 1
    )
    covariance = few @ few.transpose(1, 2) + 0.1 * torch.eye(200)
    variance = covariance.diagonal(dim1=1, dim2=2)
    whole = from_gaussian(mean, variance, own, covariance=covariance)
    for row in range(6):
        part = slice(row, row + 1)
        alone = from_gaussian(mean[part], variance[part], own, covariance=covariance[part])
        torch.testing.assert_close(alone.probs, whole.probs[part], rtol=1e-4, atol=1e-7, equal_nan=True)
    assert bool(whole.probs[5].isnan().all()) and bool(torch.isfinite(whole.probs[:5]).all())
    torch.testing.assert_close(whole.probs[:5].sum(1), torch.ones(5))
    assert float(whole.probs[4, 0]) == 1.0
    # certain logits have their softmax, whichever of them count as likely
    certain = from_gaussian(mean[:4], torch.zeros(4, 200), own, covariance=torch.zeros(4, 200, 200))
    torch.testing.assert_close(certain.probs, mean[:4].softmax(1), rtol=1e-5, atol=1e-7)


def test_a_regression_adds_the_noise() -> None:
    own = posterior("regression", noise_variance=0.25)
    found = from_gaussian(numbers(1.0), numbers(2.0), own)
    assert found.variance.item() == pytest.approx(2.25)


# The battery: covariances of C classes, for confident and undecided means.
SIZES = (2, 3, 10, 50, 100, 1000)
KINDS = ("independent", "common", "correlated", "singular", "decaying", "pair")


def battery(kind: str, classes: int, confident: bool) -> tuple[Tensor, Tensor]:
    """Mean ``(1, classes)`` and a root of the covariance ``(classes, k)``; variances of centred logits are about 1."""
    generator = torch.Generator().manual_seed(classes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mean, scales = normal(1, classes), torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5
    if confident:
        mean[:, 0] += log(classes) + 5
    own = torch.diag(scales.sqrt())
    if kind == "independent":
        return mean, own
    if kind == "common":
        return mean, torch.cat([own, torch.full((classes, 1), 10.0, dtype=torch.float64)], 1)
    if kind == "correlated":
        few = max(1, classes // 5)
        return mean, torch.cat([normal(classes, few) * sqrt(0.9 / few), own * sqrt(0.1)], 1)
    if kind == "singular":
        return mean, torch.cat([normal(classes, 3) / sqrt(3), own * 1e-3], 1)
    if kind == "decaying":
        values = 1 / torch.arange(1, classes + 1, dtype=torch.float64)
        basis = torch.linalg.qr(normal(classes, classes)).Q
        return mean, basis * (values * classes / values.sum()).sqrt()
    own[1, 0], own[1, 1] = 0.99 * own[0, 0], sqrt(1 - 0.99**2) * own[0, 0]  # the two likeliest move together
    mean[:, 1] = mean[:, 0] - 1
    return mean, own


def many_draws(mean: Tensor, root: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Probabilities and expected entropy of ``N(mean, root root^T)``, by plain draws of the logits, ``(classes,)``."""
    generator = torch.Generator().manual_seed(1)
    probs, entropy, left = torch.zeros_like(mean[0]), torch.zeros((), dtype=torch.float64), number
    while left > 0:
        few = min(left, 2_000_000 // len(root))
        normals = torch.randn(few, root.shape[1], generator=generator)
        drawn = (mean + (normals @ root.float().T).double()).softmax(-1)
        probs += drawn.sum(0)
        entropy -= torch.special.xlogy(drawn, drawn).sum()
        left -= few
    return probs / number, entropy / number


def divergence(probs: Tensor, log_probs: Tensor) -> float:
    """KL in nats. Its negative derivative by the labels' shares is what the mean NLL differs by."""
    return float((torch.special.xlogy(probs, probs) - probs * log_probs.double()).sum())


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("classes", SIZES[:-1])
@pytest.mark.covering(1)
def test_default_draws_agree_with_many(classes: int, confident: bool) -> None:
    """To .01 nats, for standard deviations of .3 to 3 of the centred logits."""
    own = posterior("classification")
    number = 100_000 if classes <= 10 else 20_000 if classes <= 100 else 10_000
    for kind in KINDS[:1] + KINDS[3:4] if classes == 2 else KINDS:
        mean, unit = battery(kind, classes, confident)
        for variance in (0.1, 10.0) if classes < 1000 else (10.0,):
            root = unit * sqrt(variance)
            covariance = (root @ root.T).unsqueeze(0)
            found = from_gaussian(
                mean.float(), covariance.diagonal(dim1=1, dim2=2).float(), own, covariance=covariance.float()
            )
            assert isinstance(found, uq.ClassPrediction)
            probs, entropy = many_draws(mean, root, number)
            assert found.log_probs is not None
            assert divergence(probs, found.log_probs[0]) < 0.01, (kind, variance)
            assert found.expected_entropy().item() == pytest.approx(float(entropy), abs=0.1), (kind, variance)


def test_probit_does_not_count_a_common_variance() -> None:
    own = posterior("classification")
    mean, variance = numbers(1, 0, -1), torch.tensor([[0.7, 0.7, 0.7]], dtype=torch.float64)
    plain = from_gaussian(mean, variance, own, link="probit")
    for common in (0.0, 1e4):
        covariance = torch.diag_embed(variance) + common
        found = from_gaussian(mean, variance + common, own, covariance=covariance, link="probit")
        torch.testing.assert_close(found.probs, plain.probs, rtol=1e-6, atol=0)
    assert from_gaussian(mean, variance + 1e4, own, link="probit").probs.max() < 0.4


@pytest.mark.parametrize("options", [{"method": "kfac"}, {"method": "inf", "rank": 8}, {"method": "diag"}])
@pytest.mark.parametrize("classes", [4, 70])
@pytest.mark.covering(1)
def test_heads_agree_on_a_last_layer(options: dict[str, Any], classes: int) -> None:
    """A last layer's logits are exactly Gaussian: drawn weights and draws of the logits are the same prediction."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, classes))
        x, y = torch.randn(40, 5), torch.randint(0, classes, (40,))
    own = uq.fit(net, [(x, y)], layers="last", fisher="exact", prior_precision=1.0, progress=False, **options)
    assert isinstance(own, uq.Posterior)
    x = x[:6]
    weights = own.sample(8000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = torch.einsum("ri,soi->sro", net[:2](x), weights["2.weight"]) + weights["2.bias"].unsqueeze(1)
    drawn = uq.ClassPrediction.from_logits(logits)
    torch.testing.assert_close(
        uq.wrap(net, own, "sampling", n_samples=50)(x).probs, drawn.probs, atol=0.1, rtol=0
    )
    heads: dict[str, dict[str, Any]] = {
        "closed form": {"head": "linearized"},
        "backward passes": {"head": "linearized", "engine": "exact", "outputs": "all"},
        "moments": {"head": "moments", "cov": "full"},
    }
    if classes > 50:
        del heads["backward passes"]
    for name, head in heads.items():
        found = uq.wrap(net, own, **head)(x)
        assert isinstance(found, uq.ClassPrediction)
        assert found.log_probs is not None
        for sample in range(len(x)):
            assert divergence(drawn.probs[sample].double(), found.log_probs[sample]) < 0.01, name
        labels = y[:6]
        assert float((drawn.log_prob(labels) - found.log_prob(labels)).mean()) == pytest.approx(0, abs=0.01)
        torch.testing.assert_close(found.mutual_information(), drawn.mutual_information(), atol=0.05, rtol=0)
        torch.testing.assert_close(found.variation_ratio(), drawn.variation_ratio(), atol=0.08, rtol=0)
        deviations, expected = found.top_k(3).standard_deviations, drawn.top_k(3).standard_deviations
        assert deviations is not None and expected is not None
        torch.testing.assert_close(deviations, expected, atol=0.02, rtol=0.2)


def test_directions_and_rest_are_a_covariance() -> None:
    """Where the covariance has few directions beside an independent part they are found, and variances are kept."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    few = torch.randn(3, 40, 4, generator=generator, dtype=torch.float64)
    covariance = few @ few.transpose(1, 2) + 7.0  # 7 is common to all
    centring = torch.eye(40, dtype=torch.float64) - 1 / 40
    centred = centring @ covariance @ centring
    found = of_covariance(mean, covariance)
    torch.testing.assert_close(found.root @ found.root.transpose(1, 2), centred)
    assert float(found.rest.abs().max()) < 1e-9
    # eigenvalues of any covariance bound what is left of it
    whole = torch.randn(3, 40, 40, generator=generator, dtype=torch.float64)
    whole = whole @ whole.transpose(1, 2) / 40
    found = of_covariance(mean, whole)
    centred = centring @ whole @ centring
    left = centred - found.root @ found.root.transpose(1, 2)
    assert float(torch.linalg.eigvalsh(left).min()) > -1e-9
    torch.testing.assert_close(found.rest * 39 / 40, left.diagonal(dim1=1, dim2=2))
    # up to ten classes they are exact: the same distribution of differences
    small = whole[:, :6, :6]
    found = of_covariance(mean[:, :6], small)
    centring = torch.eye(6, dtype=torch.float64) - 1 / 6
    torch.testing.assert_close(found.root @ found.root.transpose(1, 2), centring @ small @ centring)
    # what a logit has by itself: its variance given the differences of the others
    contrasts = torch.eye(6, dtype=torch.float64)[2:] - torch.eye(6, dtype=torch.float64)[1]
    across = (torch.eye(6, dtype=torch.float64)[0] - torch.eye(6, dtype=torch.float64)[1]) @ small
    cross, inner = across @ contrasts.T, contrasts @ small @ contrasts.T
    alone = across[:, 0] - across[:, 1] - (cross * torch.linalg.solve(inner, cross)).sum(1)
    torch.testing.assert_close(found.rest[:, 0], alone)
    # fewer classes than directions, of which only products are known
    again = of_product(mean[:, :6], small.diagonal(dim1=1, dim2=2), OutputCovariance(lambda x: x @ small))
    torch.testing.assert_close(again.root, found.root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [11, 12, 40, 100])
def test_fewer_directions_than_are_looked_for(classes: int, dtype: torch.dtype) -> None:
    """As behind a narrow layer: what rounding leaves of the other directions is no variance."""
    generator = torch.Generator().manual_seed(classes)
    mean = torch.randn(8, classes, generator=generator, dtype=torch.float64)
    centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
    for rank in (0, 1, 2, 4):
        for common in (0.0, 30.0):
            few = torch.randn(8, classes, rank, generator=generator, dtype=torch.float64)
            covariance = few @ few.transpose(1, 2) + common
            given = covariance.to(dtype)
            products = OutputCovariance(lambda x, k=given: x @ k)
            found = of_product(mean.to(dtype), given.diagonal(dim1=1, dim2=2), products)
            whole = found.root @ found.root.transpose(1, 2) + torch.diag_embed(found.rest)
            limit = 1e-4 if dtype == torch.float32 else 1e-9
            error = (whole.double() - centring @ covariance @ centring).abs().max()
            assert float(error) < limit * (1 + covariance.abs().max()), (rank, common)


def test_a_covariance_that_rounding_made_indefinite() -> None:
    """Its row stays finite and near the covariance without that error, and no other row changes."""
    few = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = few @ few.transpose(1, 2)
    mean = torch.zeros(3, 5, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(covariance[1])
    for error in (1e-9, 1e-5):
        spoilt = covariance.clone()
        spoilt[1] -= error * values[-1] * torch.outer(vectors[:, 0], vectors[:, 0])
        found, expected = of_covariance(mean, spoilt), of_covariance(mean, covariance)
        torch.testing.assert_close(found.root[::2], expected.root[::2], rtol=0, atol=0)
        gram = [each.root @ each.root.transpose(1, 2) for each in (found, expected)]
        assert float((gram[0] - gram[1]).abs().max()) < 2e-3 * values[-1]


def test_inputs_that_are_not_finite_disturb_no_other() -> None:
    own = posterior("classification")
    for classes in (4, 30):
        mean = torch.randn(3, classes, generator=torch.Generator().manual_seed(0))
        covariance = torch.eye(classes).repeat(3, 1, 1)
        clean = from_gaussian(mean, torch.ones(3, classes), own, covariance=covariance)
        for broken in (mean, covariance):
            broken[1, 0] = float("nan")
            found = from_gaussian(mean, torch.ones(3, classes), own, covariance=covariance)
            assert isinstance(found, uq.ClassPrediction) and isinstance(clean, uq.ClassPrediction)
            torch.testing.assert_close(found.probs[::2], clean.probs[::2])
            assert bool(found.entropy()[1].isnan())
        masked = mean[::2].clone()
        masked[:, 2] = float("-inf")
        found = from_gaussian(masked, torch.ones(2, classes), own, covariance=covariance[::2])
        assert bool((found.probs[:, 2] == 0).all()) and bool(torch.isfinite(found.entropy()).all())


def test_points_are_kept_and_serve_any_mode() -> None:
    state = torch.get_rng_state()
    normals.cache_clear()
    with torch.inference_mode():
        first = normals(256, 12)
    assert torch.equal(torch.get_rng_state(), state) and not first.is_inference()
    assert normals(256, 12) is first
    torch.testing.assert_close(first.mean(0), torch.zeros(12).double(), atol=0.01, rtol=0)
    torch.testing.assert_close(first.T @ first / 256, torch.eye(12).double(), atol=0.2, rtol=0)
    wide = normals(2, 21_300)  # more than the sequence has dimensions
    assert wide.shape == (2, 21_300) and bool(torch.isfinite(wide).all())


def test_the_mean_of_a_sigmoid() -> None:
    for variance in (0.0, 0.0099, 0.01, 0.3, 1.0, 5.0, 30.0, 300.0):
        deviation = sqrt(variance)
        for mean in (-0.9 * variance - 8, -variance / 2, -1.0, 0.0, 2.0, 10.0):
            low, high = mean - 12 * deviation, mean + variance + 12 * deviation
            tilted = mean + variance  # where the integrand has its mass when both tails meet
            exact = float(expit(mean))
            if variance > 0:
                exact, _ = quad(
                    lambda z, m=mean, d=deviation: norm.pdf(z, m, d) * expit(z),
                    low,
                    high,
                    points=sorted({0.0, mean, tilted} & {p for p in (0.0, mean, tilted) if low < p < high}),
                    epsabs=0,
                    limit=400,
                )
            found = log_logistic_normal(numbers(mean), numbers(variance)).item()
            assert found == pytest.approx(log(exact), abs=2e-3), (mean, variance)
            assert exp(found) == pytest.approx(exact, abs=6e-6 if variance else 1e-12), (mean, variance)


def on_a_grid(mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of ``softmax(mean + root z)``, and its mean entropy, by a dense grid of ``z``; `root` (classes,
    1 or 2).
    """
    line = torch.arange(-6, 6, 0.05 if root.shape[1] > 1 else 0.005, dtype=torch.float64)
    points = torch.cartesian_prod(*[line] * root.shape[1]).reshape(-1, root.shape[1])
    weights = (-points.square().sum(1) / 2).softmax(0)
    drawn = (mean + points @ root.T).softmax(-1)
    probs = weights @ drawn
    return probs, weights @ (drawn - probs).square(), -(weights @ torch.special.xlogy(drawn, drawn).sum(-1))


@pytest.mark.parametrize(
    ("classes", "deviation", "of_probs", "of_rest"),
    [
        *((2, deviation, 5e-6, 1e-3) for deviation in (0.01, 0.1, 1.0, 5.0)),
        (2, 20.0, 5e-6, 0.1),
        *((3, deviation, 2e-4, 5e-3) for deviation in (0.01, 0.1, 1.0, 4.0)),
    ],
)
def test_two_and_three_classes_against_a_grid(
    classes: int, deviation: float, of_probs: float, of_rest: float
) -> None:
    """Deviations are of the differences between logits, about."""
    generator, own = torch.Generator().manual_seed(5), posterior("classification")
    for _ in range(3):
        root = torch.randn(classes, classes - 1, generator=generator, dtype=torch.float64)
        root = root / root.square().sum(1).mean().sqrt() * deviation / sqrt(2)
        mean = 2 * torch.randn(1, classes, generator=generator, dtype=torch.float64)
        covariance = (root @ root.T + 3.0).unsqueeze(0)  # 3 is common to all
        found = from_gaussian(mean, covariance.diagonal(dim1=1, dim2=2), own, covariance=covariance)
        assert isinstance(found, uq.ClassPrediction) and found.probs_variance is not None
        probs, variance, entropy = on_a_grid(mean, root)
        torch.testing.assert_close(found.probs[0], probs, atol=of_probs, rtol=0)
        torch.testing.assert_close(found.probs_variance[0].sqrt(), variance.sqrt(), atol=of_rest, rtol=0)
        assert found.expected_entropy().item() == pytest.approx(float(entropy), abs=of_rest)
        information = float(-torch.special.xlogy(probs, probs).sum() - entropy)
        if deviation <= 1:
            assert found.mutual_information().item() == pytest.approx(information, rel=0.01, abs=3e-6)


def test_what_needs_draws_is_computed_when_it_is_read() -> None:
    own, generator = posterior("classification"), torch.Generator().manual_seed(6)
    for classes in (2, 3, 4, 12):
        mean = torch.randn(6, classes, generator=generator)
        whole = from_gaussian(mean, torch.ones_like(mean), own)
        halves = [from_gaussian(part, torch.ones_like(part), own) for part in mean.split(3)]
        assert isinstance(whole, uq.ClassPrediction)
        assert whole.expected_entropy().shape == (6,)
        parts = cat([half.to("cpu") for half in halves])
        for same in (parts, cat([whole, whole]).picked(slice(6, None)), whole.changed(novelty_ratio=None)):
            assert isinstance(same, uq.ClassPrediction)
            if same is parts:
                assert vars(same)["votes"] is None and vars(same)["sample_entropy"] is None
            torch.testing.assert_close(same.expected_entropy(), whole.expected_entropy())
            assert same.votes is not None and whole.votes is not None
            assert same.votes.tolist() == whole.votes.tolist()
            torch.testing.assert_close(same.probs_variance, whole.probs_variance)
        assert parts.of_one_network().votes is None  # type: ignore[attr-defined]
        done = halves[0].completed()
        assert vars(done)["votes"] is not None and vars(done)["logits"] is None
        torch.testing.assert_close(done.expected_entropy(), whole.expected_entropy()[:3])
        # with a prediction that has no Gaussian logits, everything is computed
        drawn = uq.ClassPrediction.from_logits(torch.randn(256, 2, classes, generator=generator))
        mixed = cat([halves[0], drawn])
        assert isinstance(mixed, uq.ClassPrediction) and mixed.logits is None
        torch.testing.assert_close(mixed.expected_entropy()[:3], whole.expected_entropy()[:3])


def test_derivatives_of_a_link_are_finite() -> None:
    own = posterior("classification")
    for classes in (2, 3, 5):
        mean = torch.linspace(-1, 1, classes, dtype=torch.float64).repeat(2, 1).requires_grad_()
        root = torch.eye(classes, dtype=torch.float64).repeat(2, 1, 1)
        root[1] = 0.0  # a certain input
        covariance = (root @ root.transpose(1, 2)).requires_grad_()
        variance = covariance.diagonal(dim1=1, dim2=2)
        found = from_gaussian(mean, variance, own, covariance=covariance)
        gradients = torch.autograd.grad(found.log_prob(torch.tensor([0, 0])).sum(), (mean, covariance))
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        # of the first input's own probability: 1 less the mean of sigmoid's derivative, between 0 and 1
        assert 0 < float(gradients[0][0, 0]) < 1 and float(gradients[1][0].abs().max()) > 0.01
