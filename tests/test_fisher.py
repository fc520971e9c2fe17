"""Labels of the Fisher (drawn, exact, given), the likelihoods, and the accumulators against loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from brute_force import class_losses, class_probabilities, one_hot, per_sample, watch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import nystrom
from posthoc_uq.curvature import (
    Accumulator,
    GradientFactors,
    GradientGram,
    InputGram,
    RangeSketch,
    RotatedColumns,
    SketchedGradientFactors,
    SketchedGradientGram,
    SquaredGradients,
)
from posthoc_uq.curvature.statistics import add_factors
from posthoc_uq.layers import OneHotRows, Operand, Rows
from posthoc_uq.layers.operands import ConcatenatedRows
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SAMPLES = 20


def _net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double().eval()


def _inputs(samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def _fit(model: nn.Module, data: object, method: str = "diag", **options: object) -> uq.Posterior:
    options = {"dtype": torch.float64, "prior_precision": 1.0, "progress": False} | options
    return uq.fit(model, data, method=method, **options)


class _Noted(Categorical):
    """Keeps what it drew, in the order of the sweep."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        labels = super().draw(outputs, keys, draw)
        self.drawn.append(labels)
        return labels


def test_one_drawn_label_equals_brute_force_with_that_label() -> None:
    model, x = _net(3), _inputs()
    likelihood = _Noted()
    posterior = _fit(model, x.split(7), "diag", likelihood=likelihood, fisher="mc", seed=3)
    labels = torch.cat(likelihood.drawn)
    assert len(set(labels.tolist())) == 3
    truth = per_sample(model, watch(model[0]), x, class_losses)
    torch.testing.assert_close(posterior.blocks["0"].diagonal, truth.diagonal(one_hot(labels, 3)), **TIGHT)


def test_both_sweeps_draw_the_same_labels_and_another_seed_others() -> None:
    model, x = _net(3), _inputs()
    drawn = {}
    for seed in (3, 4):
        likelihood = _Noted()
        _fit(model, x.split(7), "efb", likelihood=likelihood, fisher="mc", seed=seed)
        first, second = torch.cat(likelihood.drawn[:3]), torch.cat(likelihood.drawn[3:])
        assert torch.equal(first, second)
        drawn[seed] = first
    assert not torch.equal(drawn[3], drawn[4])


def test_many_drawn_labels_approach_the_exact_fisher() -> None:
    """Within five standard errors of the mean over `draws` labels, entry by entry."""
    model, x, draws = _net(3), _inputs(), 600
    truth = per_sample(model, watch(model[0]), x, class_losses)
    probs = class_probabilities(model, x)
    squares = truth.gradients**2
    mean = torch.einsum("sk,skgmn->sgmn", probs, squares)
    variance = torch.einsum("sk,skgmn->sgmn", probs, squares**2) - mean**2
    error = (variance.sum(0) / draws).sqrt() / SAMPLES
    found = _fit(model, [x], fisher="mc", n_samples=draws).blocks["0"].diagonal
    assert bool(((found - mean.mean(0)).abs() <= 5 * error).all())
    assert bool(((found - mean.mean(0)).abs() >= 0.05 * error).any())  # drawn, not the exact sum


def _regression_terms(noise: list[float]):
    def losses(outputs: Tensor, _: int) -> list[Tensor]:
        return [outputs[0, k] / noise[k] ** 0.5 for k in range(len(noise))]

    return losses


@pytest.mark.parametrize("method", ["diag", "efb"])
def test_exact_regression_is_gauss_newton_with_the_noise(method: str) -> None:
    model, x, noise = _net(2), _inputs(), [0.5, 3.0]
    data = _batches(x, torch.zeros(SAMPLES, 2, dtype=torch.float64), 7)
    options = {"likelihood": "regression", "fisher": "exact", "noise_variance": torch.tensor(noise)}
    block = _fit(model, data, method, **options).blocks["0"]
    truth = per_sample(model, watch(model[0]), x, _regression_terms(noise))
    ones = torch.ones(SAMPLES, 2, dtype=torch.float64)
    if method == "diag":
        torch.testing.assert_close(block.diagonal, truth.diagonal(ones), **TIGHT)
    else:
        expected = truth.eigenvalues(ones, block.input_basis, block.output_basis)
        torch.testing.assert_close(block.eigenvalues, expected, **TIGHT)


def test_empirical_regression_uses_the_residuals_over_the_noise_of_the_training_data() -> None:
    model, x = _net(2), _inputs()
    y = torch.randn(
        SAMPLES, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ) * torch.tensor([1.0, 4.0])
    noise = [float(((model(x) - y).detach() ** 2)[:, k].sum() / SAMPLES) for k in range(2)]

    def losses(outputs: Tensor, s: int) -> list[Tensor]:
        return [sum((outputs[0, k] - y[s, k]) ** 2 / (2 * noise[k]) for k in range(2))]

    truth = per_sample(model, watch(model[0]), x, losses)
    posterior = _fit(model, _batches(x, y, 7), likelihood="regression", fisher="empirical")
    torch.testing.assert_close(posterior.noise_variance, torch.tensor(noise, dtype=torch.float64), **TIGHT)
    ones = torch.ones(SAMPLES, 1, dtype=torch.float64)
    torch.testing.assert_close(posterior.blocks["0"].diagonal, truth.diagonal(ones), **TIGHT)


def test_drawn_regression_targets_approach_gauss_newton() -> None:
    model, x, noise, draws = _net(2), _inputs(), [0.5, 3.0], 600
    ones = torch.ones(SAMPLES, 2, dtype=torch.float64)
    expected = per_sample(model, watch(model[0]), x, _regression_terms(noise)).diagonal(ones)
    options = {"likelihood": "regression", "noise_variance": torch.tensor(noise), "n_samples": draws}
    found = _fit(model, [x], fisher="mc", **options).blocks["0"].diagonal
    # The square of a zero-mean Gaussian has twice its variance squared as variance; the mean over samples has less.
    assert bool(((found - expected).abs() <= 5 * (2 / draws) ** 0.5 * expected).all())


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_binary(shape: tuple[int, ...], fisher: str) -> None:
    model, x = _net(1), _inputs()
    y = torch.randint(0, 2, (SAMPLES,), generator=torch.Generator().manual_seed(2))

    def losses(outputs: Tensor, _: int) -> list[Tensor]:
        p = 1 / (1 + torch.exp(-outputs[0, 0]))
        return [-torch.log(1 - p), -torch.log(p)]

    truth = per_sample(model, watch(model[0]), x, losses)
    p = 1 / (1 + torch.exp(-model(x).detach()))
    weights = torch.cat([1 - p, p], dim=1) if fisher == "exact" else one_hot(y, 2)
    data = _batches(x, y.reshape(shape), 7)
    found = _fit(model, data, likelihood="binary", fisher=fisher).blocks["0"].diagonal
    torch.testing.assert_close(found, truth.diagonal(weights), **TIGHT)


def test_squares_are_of_samples_and_not_of_batches() -> None:
    model, x = _net(3), _inputs(32)
    y = torch.zeros(32, dtype=torch.long)
    truth = per_sample(model, watch(model[0]), x, class_losses).gradients[:, 0]
    mean_of_squares = float(truth.square().sum() / 32)
    square_of_mean = float(truth.mean(0).square().sum())
    assert square_of_mean < 0.7 * mean_of_squares  # the mistake would show
    for size in (1, 32):
        eigenvalues = _fit(model, _batches(x, y, size), "efb", fisher="empirical").blocks["0"].eigenvalues
        assert float(eigenvalues.sum()) == pytest.approx(mean_of_squares, rel=1e-10)


def test_float32_statistics_are_close_to_float64() -> None:
    model, x = _net(3), _inputs()
    wide = _fit(model, [x], fisher="exact").blocks["0"].diagonal
    narrow = _fit(model.float(), [x.float()], fisher="exact", dtype=None).blocks["0"].diagonal
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-7)


def _random(samples: int, groups: int, positions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    a = torch.randn(samples, groups, positions, 4, generator=generator, dtype=torch.float64)
    return a, torch.randn(samples, groups, positions, 3, generator=generator, dtype=torch.float64)


def _accumulators(groups: int = 2, budget: int = 2**20) -> Iterator[Accumulator]:
    kind = (torch.float64, torch.device("cpu"), budget)
    omega, of_outputs = (
        torch.randn(groups, size, 2, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        for size in (4, 3)
    )
    yield InputGram(groups, 4, *kind)
    yield GradientGram(groups, 3, *kind)
    yield GradientFactors((groups, 3, 4), *kind)
    yield RangeSketch("inputs", omega, budget)
    yield SketchedGradientFactors(4, of_outputs, budget)
    yield SketchedGradientGram(of_outputs, budget)
    yield RotatedColumns(torch.eye(4, dtype=torch.float64).expand(groups, -1, -1).flip(1), budget)
    yield SquaredGradients((groups, 3, 4), *kind)
    yield SquaredGradients((groups, 3, 4), *kind, bases=(omega, of_outputs))


def test_sums_over_two_parts_merge_into_the_whole() -> None:
    (a, g), (b, h) = _random(5, 2, 3), _random(4, 2, 6)
    for whole, part, other in zip(_accumulators(), _accumulators(), _accumulators(), strict=True):
        for accumulator in (whole, part):
            accumulator.add(Rows(a), g, True)
        for accumulator in (whole, other):
            accumulator.add(Rows(b), h, True)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(part.state_dict()[name] + other.state_dict()[name], value, **TIGHT)


def test_later_passes_over_a_batch_count_its_activations_once() -> None:
    a, g = _random(5, 2, 3)
    for accumulator in _accumulators():
        accumulator.add(Rows(a), g, True)
        once = {name: value.clone() for name, value in accumulator.state_dict().items()}
        accumulator.add(Rows(a), g, False)
        of_inputs = type(accumulator) in (InputGram, RangeSketch)
        for name, value in accumulator.state_dict().items():
            torch.testing.assert_close(value, once[name] * (1 if of_inputs or name == "positions" else 2))


@pytest.mark.parametrize("positions", [1, 3, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_labels_side_by_side_count_as_one_by_one(groups: int, positions: int) -> None:
    """By each route to the sums, also where memory is short, and in either order of memory."""
    generator = torch.Generator().manual_seed(positions)
    kind = {"generator": generator, "dtype": torch.float64}
    a = torch.randn(5, groups, positions, 4, **kind)
    labels = [torch.randn(5, groups, positions, 3, **kind) for _ in range(4)]
    together = torch.cat(labels, 3)
    other_order = together.transpose(2, 3).contiguous().transpose(2, 3)
    for budget in (1, 2**20):
        for of_one, of_all, again in zip(*(_accumulators(groups, budget) for _ in range(3)), strict=True):
            for number, gradients in enumerate(labels):
                of_one.add(Rows(a), gradients, number == 0)
            of_all.add(Rows(a), together, True)
            again.add(Rows(a), other_order, True)
            for name, value in of_one.state_dict().items():
                torch.testing.assert_close(of_all.state_dict()[name], value, **TIGHT)
                torch.testing.assert_close(again.state_dict()[name], value, **TIGHT)


@pytest.mark.parametrize(
    ("groups", "positions", "m", "n"), [(1, 2, 20, 30), (2, 2, 20, 30), (1, 40, 3, 5), (2, 40, 3, 5)]
)
@pytest.mark.parametrize("limit", [1, 2**20])
def test_factors_of_gradients_by_pairs_and_by_gradients(
    groups: int, positions: int, m: int, n: int, limit: int
) -> None:
    """Few positions of a wide layer are summed by pairs of them, many of a narrow one by the gradients."""
    generator = torch.Generator().manual_seed(0)
    kind = {"generator": generator, "dtype": torch.float64}
    a, g = torch.randn(5, groups, positions, n, **kind), torch.randn(5, groups, positions, m, **kind)
    places = torch.randint(0, n, (5, positions), generator=generator)
    operands: list[tuple[Operand, Tensor]] = [(Rows(a), a)]
    if groups == 1:
        hot = nn.functional.one_hot(places, n).double() * (places != 2).unsqueeze(-1)
        operands += [(OneHotRows(places, n, 2, torch.float64), hot.unsqueeze(1))]
        operands += [(ConcatenatedRows([Rows(a[:, :, :1]), Rows(a[:, :, 1:])]), a)]
    for operand, rows in operands:
        gradients = torch.einsum("sgtm,sgtn->sgmn", g, rows)
        of_inputs, of_outputs = (torch.ones(groups, size, size, dtype=torch.float64) for size in (n, m))
        add_factors(operand, g, limit, of_inputs, of_outputs)
        torch.testing.assert_close(
            of_inputs, 1 + torch.einsum("sgmn,sgmp->gnp", gradients, gradients), **TIGHT
        )
        torch.testing.assert_close(
            of_outputs, 1 + torch.einsum("sgmn,sgpn->gmp", gradients, gradients), **TIGHT
        )


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_the_sketch_finds_the_leading_eigenpairs_of_a_decaying_spectrum(side: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size, width, wanted, rows = 60, 20, 8, 400
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    roots = 0.5 ** torch.arange(size, dtype=torch.float64)
    data = torch.randn(rows, size, generator=generator, dtype=torch.float64) * roots @ basis.T
    values, vectors = torch.linalg.eigh(data.T @ data / rows)
    values, vectors = values.flip(0)[:wanted], vectors.flip(1)[:, :wanted]
    sketch = RangeSketch(side, torch.randn(1, size, width, generator=generator, dtype=torch.float64), 2**20)
    for part in data.split(30):
        rest = torch.zeros(part.shape[0], 1, 1, 2, dtype=torch.float64)
        tensor = part.reshape(-1, 1, 1, size)
        pair = (Rows(tensor), rest) if side == "inputs" else (Rows(rest), tensor)
        sketch.add(*pair, True)
    found_values, found = nystrom(sketch.mean(rows), sketch.test_matrix)
    torch.testing.assert_close(found_values[0, :wanted], values, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        (found[0, :, :wanted].T @ vectors).abs(), torch.eye(wanted, dtype=torch.float64), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Categorical(), torch.tensor([[0.3, -1.0, 2.0], [5.0, 5.0, -5.0]]), torch.tensor([2, 0])),
        (Bernoulli(), torch.tensor([0.7, -3.0]), torch.tensor([1, 0])),
        (
            Gaussian(torch.tensor([0.5, 2.0])),
            torch.tensor([[0.3, -1.0], [2.0, 1.0]]),
            torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        ),
    ],
)
def test_the_score_is_the_gradient_of_the_log_probability(
    likelihood, outputs: Tensor, targets: Tensor
) -> None:
    outputs = outputs.double().requires_grad_(True)
    logs = likelihood.log_prob(outputs, targets)
    assert logs.shape == (2,)
    (gradient,) = torch.autograd.grad(-logs.sum(), outputs)
    torch.testing.assert_close(likelihood.score(outputs, targets).detach(), gradient, **TIGHT)
