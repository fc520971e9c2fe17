"""Data that come into a posterior after its fit, and go out again: against fits on all data, and on those left.

What is computed in kept bases is checked against the dense Fisher of all data.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp
from torch import Tensor, nn
from watching import Watch

import posthoc_uq as uq
from posthoc_uq.posteriors import NotContainedError, Weights
from posthoc_uq.posteriors.block import combined, combined_matrices

METHODS_THAT_CAN: dict[str, Any] = {
    "diag": uq.Diagonal,
    "full": uq.Dense,
    "kfac": lambda **options: uq.KFAC(keep_grams=True, **options),
    "efb": uq.EFB,
    "inf": uq.INF,
}
EXACT = {"diag": 1e-6, "full": 1e-6, "kfac": 1e-5}
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A convolution over images of any size, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.hidden, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(self.body(x))))


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().eval()


def data(samples: int, seed: int, size: int = 6, batch: int = 16) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, size, size, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return list(zip(x.split(batch), y.split(batch), strict=True))


OLD, NEW = data(60, 1), data(30, 2)
OTHERS = [(x * 3, y) for x, y in data(500, 7)]


def fit(model: nn.Module, loader: Batches, method: Any = "diag", **options: Any) -> uq.Posterior:
    method = METHODS_THAT_CAN[method](dtype=torch.float64) if isinstance(method, str) else method
    return uq.fit(model, loader, method, prior_precision=1.0, progress=False, **options)


def update(posterior: uq.Posterior, loader: Any, **options: Any) -> uq.Posterior:
    return uq.update(posterior, loader, progress=False, **options)


def remove(posterior: uq.Posterior, loader: Any) -> uq.Posterior:
    return update(posterior, loader, remove=True)


def difference(found: uq.Posterior, wanted: uq.Posterior) -> float:
    """The largest relative difference of two posteriors' precisions, in the Frobenius norm, over the blocks."""
    assert found.blocks.keys() == wanted.blocks.keys()
    pairs = [(found.blocks[n].dense(found.scale), b.dense(wanted.scale)) for n, b in wanted.blocks.items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def distance(found: uq.Posterior, wanted: uq.Posterior) -> float:
    """The same of two posteriors of as many samples."""
    assert found.scale == wanted.scale and found.evidence.samples == wanted.evidence.samples
    return difference(found, wanted)


def assert_same(found: uq.Posterior, wanted: uq.Posterior) -> None:
    """Bit for bit."""
    for name, block in wanted.blocks.items():
        tensors = found.blocks[name].tensors()
        assert tensors.keys() == block.tensors().keys()
        assert all(torch.equal(tensors[key], tensor) for key, tensor in block.tensors().items())
    assert found.settings == wanted.settings and found.history == wanted.history
    assert found.evidence == wanted.evidence


# Against a fit on all data


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.covering(1)
def test_an_update_is_a_fit_on_all_data(method: str, fisher: str) -> None:
    """With labels by other options and another seed than the defaults, by which `update` makes the method anew."""
    labels = {"fisher": fisher} | ({"n_samples": 3} if fisher == "mc" else {})
    model, kind = make_net(), METHODS_THAT_CAN[method](dtype=torch.float64, **labels)
    old, wanted = fit(model, OLD, kind, seed=5), fit(model, [*OLD, *NEW], kind, seed=5)
    before = copy.deepcopy(old)
    with Watch(model):
        posterior = update(old, NEW)
    assert_same(old, before)
    assert difference(posterior, old) > 0.05 and distance(posterior, wanted) < EXACT[method]
    assert posterior.scale == 90 and posterior.prior_precision == 1.0
    torch.testing.assert_close(posterior.log_marginal_likelihood(), wanted.log_marginal_likelihood())
    for head in ("linearized", "moments"):
        found, expected = (uq.wrap(model, p, head=head)(OTHERS[0][0]) for p in (posterior, wanted))
        torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-5)
    assert distance(remove(wanted, OLD), fit(model, NEW, kind, seed=5)) < 1e-5


@pytest.mark.parametrize("method", METHODS_THAT_CAN)
@pytest.mark.parametrize("fisher", ["exact", "mc"])
@pytest.mark.covering(1)
def test_removing_gives_the_posterior_before(method: str, fisher: str) -> None:
    model, kind = make_net(), METHODS_THAT_CAN[method](dtype=torch.float64, fisher=fisher)
    before = fit(model, OLD, kind)
    posterior = update(before, NEW)
    assert difference(posterior, before) > 0.05
    in_other_batches = [(x.flip(0), y.flip(0)) for x, y in data(30, 2, batch=7)]
    posterior = remove(posterior, in_other_batches)
    assert distance(posterior, before) < 1e-6
    changes = posterior.history.changes
    assert changes.balance == 0 and (changes.added, changes.removed) == (30, 30)


def test_samples_with_other_numbers_of_positions() -> None:
    model, larger = make_net(), data(30, 3, size=9)
    old = fit(model, OLD, "kfac")
    posterior = update(old, larger)
    assert distance(posterior, fit(model, [*OLD, *larger], "kfac")) < 1e-5
    assert distance(remove(posterior, larger), old) < 1e-5


def test_in_float32() -> None:
    model = make_net()
    for method in EXACT:
        kind = METHODS_THAT_CAN[method]()
        posterior = update(fit(model, OLD, kind), NEW)
        # a dense Fisher is kept in float64, whose evidence is right at small prior precisions
        assert posterior.dtype == (torch.float64 if method == "full" else torch.float32)
        assert distance(posterior, fit(model, [*OLD, *NEW], kind)) < 1e-4
        assert distance(remove(posterior, NEW), fit(model, OLD, kind)) < 1e-4


def test_a_regression_keeps_its_noise() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).eval()

    def points(samples: int, seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 2, generator=generator)
        return list(zip(x.split(8), torch.randn(samples, 2, generator=generator).split(8), strict=True))

    old, new = points(40, 0), points(24, 1)
    posterior = fit(model, old, "full", likelihood="regression", layers=["0", "2"])
    noise = posterior.likelihood.noise_variance
    assert noise is not None
    wanted = fit(model, [*old, *new], "full", likelihood="regression", noise_variance=noise.tolist())
    posterior = update(posterior, new)
    assert torch.equal(posterior.likelihood.noise_variance, noise)  # type: ignore[arg-type]
    assert distance(posterior, wanted) < 1e-6
    assert posterior.evidence.targets == wanted.evidence.targets == 128
    assert posterior.evidence.squared_residuals == pytest.approx(wanted.evidence.squared_residuals)


class Regression:
    """A network whose last layer is at the maximum of its posterior, and the closed form of that."""

    noise, prior = torch.tensor([0.1, 0.3], dtype=torch.float64), 2.5

    def __init__(self) -> None:
        self.old, self.new = self.points(40, 0), self.points(30, 1)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
        best, last = self.best([self.old]), self.model[2]
        with torch.no_grad():
            last.weight.copy_(best[:, :-1])  # type: ignore[operator, union-attr]
            last.bias.copy_(best[:, -1])  # type: ignore[operator, union-attr]

    @staticmethod
    def points(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
        clean = torch.stack([x[:, 0].sin() + x[:, 1], x[:, 2]], 1)
        return x, clean + 0.3 * torch.randn(samples, 2, generator=generator, dtype=torch.float64)

    def rows(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.model[:2](x), x.new_ones(len(x), 1)], 1)

    def best(self, data: Batches) -> Tensor:
        """Weights and bias, ``(outputs, 7)``."""
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        rows, eye = self.rows(x), torch.eye(7, dtype=torch.float64)
        solved = [
            torch.linalg.solve(rows.T @ rows / noise + self.prior * eye, rows.T @ column / noise)
            for column, noise in zip(y.T, self.noise, strict=True)
        ]
        return torch.stack(solved)

    def fitted(self, method: Any, **options: Any) -> uq.Posterior:
        settings = {"layers": "last", "likelihood": "regression", "noise_variance": self.noise.tolist()}
        return uq.fit(
            self.model, [self.old], method, prior_precision=self.prior, progress=False, **settings, **options
        )


def matrix_of(posterior: uq.Posterior) -> Tensor:
    return torch.cat([posterior.mean["2.weight"], posterior.mean["2.bias"].unsqueeze(1)], 1).detach()


@pytest.mark.parametrize("method", ["full", "kfac"])
def test_the_mean_of_a_last_layer_is_that_of_all_data(method: str, tmp_path: Path) -> None:
    case = Regression()
    posterior = case.fitted(METHODS_THAT_CAN[method](dtype=torch.float64))
    stays = update(posterior, [case.new])
    assert torch.equal(matrix_of(stays), matrix_of(posterior)) and not stays.trained_mean
    assert "the mean is still the network's weights" in str(stays.report())
    with Watch(case.model):
        moved = update(posterior, [case.new], mean=True)
    wanted = case.best([case.old, case.new])
    torch.testing.assert_close(matrix_of(moved), wanted, rtol=0, atol=1e-12)
    assert (wanted - matrix_of(posterior)).abs().max() > 0.02
    assert "the mean moved with them" in str(moved.report())
    uq.save(moved, tmp_path / "moved.h5")
    x = case.new[0][:5]
    for each in (moved, uq.load(tmp_path / "moved.h5", case.model)):
        found = uq.wrap(case.model, each)(x)
        torch.testing.assert_close(found.mean, case.rows(x) @ wanted.T)
        torch.testing.assert_close(found.variance, uq.wrap(case.model, stays)(x).variance)
        drawn = uq.wrap(case.model, each, "sampling", n_samples=2000)(x).mean
        torch.testing.assert_close(drawn, found.mean, rtol=0, atol=0.03)
    back = update(moved, [case.new], mean=True, remove=True)
    torch.testing.assert_close(matrix_of(back), matrix_of(posterior), rtol=0, atol=1e-12)
    assert back.history.changes.moved == 2
    with pytest.raises(uq.PosthocUQError, match="an update moved the mean"):
        back.log_marginal_likelihood()


def test_a_mean_moves_by_bayes_rule_whatever_it_was() -> None:
    """From natural parameters: of weighted samples, at another noise and scale, after an update that left it."""
    case, counts = Regression(), torch.arange(30.0, dtype=torch.float64) % 3
    posterior = case.fitted("full").with_settings(noise_scale=2.0, scale=20.0)
    posterior = update(posterior, [case.points(10, 3)])

    def precision(of: uq.Posterior) -> Tensor:
        units = torch.eye(14, dtype=torch.float64).reshape(14, 1, 2, 7)
        return torch.linalg.inv(of.quadratic({"2": units}))

    moved = update(posterior, [case.new], mean=True, batch_to_weights=lambda _: counts)
    x, y = case.new
    each = counts.unsqueeze(1) * posterior.scale / posterior.evidence.total
    field = (y * each / (2 * case.noise)).T @ case.rows(x)
    natural = precision(posterior) @ matrix_of(posterior).flatten() + field.flatten()
    wanted = torch.linalg.solve(precision(moved), natural).reshape(2, 7)
    torch.testing.assert_close(matrix_of(moved), wanted, rtol=0, atol=1e-10)
    assert "the mean moved in 1 of them" in str(moved.report())


def test_without_labels() -> None:
    model = make_net()
    posterior = update(fit(model, OLD, "diag"), [x for x, _ in NEW])
    assert posterior.evidence.log_likelihood is None
    assert distance(posterior, fit(model, [*OLD, *NEW], "diag")) < 1e-6
    with pytest.raises(uq.PosthocUQError, match="labels"):
        posterior.log_marginal_likelihood()


# Kept bases


def dense_of(model: nn.Module, loader: Batches, name: str) -> Tensor:
    """The layer's Fisher, every entry of it."""
    return fit(model, loader, "full", layers=[name]).blocks["joint"].dense()[0]


@pytest.mark.parametrize("method", ["efb", "inf"])
def test_what_kept_bases_hold_is_exact(method: str) -> None:
    model = make_net()
    kind = uq.INF(rank=9, dtype=torch.float64) if method == "inf" else uq.EFB(dtype=torch.float64)
    old = fit(model, OLD, kind)
    posterior = update(old, NEW)
    inside, whole, before, whole_before = 0.0, 0.0, 0.0, 0.0
    for name, block in posterior.blocks.items():
        tensors, earlier = block.tensors(), old.blocks[name].tensors()
        assert all(torch.equal(tensors[key], earlier[key]) for key in ("input_basis", "output_basis"))
        fisher = dense_of(model, [*OLD, *NEW], name)
        vectors = torch.kron(tensors["output_basis"][0], tensors["input_basis"][0])
        wanted = (vectors.T @ fisher @ vectors).diagonal().reshape(tensors["eigenvalues"][0].shape)
        torch.testing.assert_close(tensors["eigenvalues"][0], wanted, rtol=1e-6, atol=1e-9)
        if method == "inf":
            torch.testing.assert_close(tensors["diagonal"].flatten(), fisher.diagonal(), rtol=1e-6, atol=1e-9)
            new, kept = dense_of(model, NEW, name), dense_of(model, OLD, name)
            inside, whole = inside + float((vectors.T @ new @ vectors).trace()), whole + float(new.trace())
            before += float((vectors.T @ kept @ vectors).trace())
            whole_before += float(kept.trace())
    changes = posterior.history.changes
    if method == "inf":
        assert changes.outside == pytest.approx(1 - inside / whole, rel=1e-5)
        assert changes.outside_before == pytest.approx(1 - before / whole_before, rel=1e-5)
    assert "outside of the kept bases" in str(posterior.report())


def test_what_efb_says_of_other_bases() -> None:
    """Of a linear layer: 1 - |diag|^2 / |.|^2 of the Kronecker product of the new data's Grams, in the kept bases."""
    model = nn.Linear(3, 3).double().eval()
    posterior = fit(model, [(x.flatten(1)[:, :3].double(), y) for x, y in OLD], "efb")
    new = [(x.flatten(1)[:, :3].double() * torch.tensor([1.0, 3.0, 0.2]), y) for x, y in NEW]
    bases = next(iter(posterior.blocks.values())).tensors()
    x = torch.cat([x for x, _ in new])
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    probs = model(x[:, :3]).softmax(1).detach()
    a_gram = x.T @ x / len(x)
    g_gram = (torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)).mean(0)
    turned = torch.kron(bases["output_basis"][0], bases["input_basis"][0])
    turned = turned.T @ torch.kron(g_gram, a_gram) @ turned
    share = 1 - float(turned.diagonal().square().sum() / turned.square().sum())
    outside = update(posterior, new).history.changes.outside
    assert outside == pytest.approx(share, rel=1e-6) and share > 0.05
    of_the_fit = update(posterior, [(x.flatten(1)[:, :3].double(), y) for x, y in OLD])
    assert of_the_fit.history.changes.outside < 1e-9


# What belongs to the posterior as it was


def test_what_was_found_for_the_old_data_stays_with_the_old_posterior() -> None:
    model, x = make_net(), OTHERS[0][0]
    posterior = fit(model, OLD, "full")
    posterior = uq.calibrate(posterior, OTHERS, share=None, progress=False)
    posterior = uq.wrap(model, posterior, head="moments").fit_scale(OLD, n_mc=20, progress=False).posterior
    linearized = uq.wrap(model, posterior, head="linearized")
    old = linearized(x)
    with pytest.warns(UserWarning) as caught:
        new = update(posterior, OTHERS)
    texts = [str(warning.message) for warning in caught]
    assert (
        sum("held-out" in text for text in texts)
        == sum("scale of the moments head" in text for text in texts)
        == 1
    )
    assert not new.history.promises and not new.history.calibration
    assert posterior.history.promises and posterior.history.calibration
    predictor = uq.wrap(model, new, head="linearized")
    with pytest.raises(uq.PosthocUQError, match="held-out scores"):
        uq.Referral(0.5)(predictor(x))
    assert torch.equal(linearized(x).probs, old.probs) and torch.equal(linearized(x).novelty(), old.novelty())
    assert (predictor(x).probs - old.probs).abs().max() > 1e-4


def test_novelty_by_class_is_no_sum() -> None:
    model, x = make_net(), OTHERS[0][0]
    posterior = update(fit(model, OLD, "full"), NEW)
    for again in (posterior, update(posterior, OTHERS[:1])):
        predictor = uq.wrap(model, again)
        for ask in (lambda of=predictor: of.novelty(x), predictor(x).novelty):
            with pytest.raises(uq.PosthocUQError, match="it again"):
                ask()
    found, wanted = (
        uq.wrap(model, p).novelty(x, of="top") for p in (posterior, fit(model, [*OLD, *NEW], "full"))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_hyperparameters_stay() -> None:
    model = make_net()
    posterior = uq.fit(model, OLD, uq.INF(dtype=torch.float64), progress=False)
    prior = posterior.prior_precision
    posterior = posterior.with_settings(scale=30.0, temperature=1.5)  # half of the samples
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="These are the data of the last update")
            posterior = update(posterior, NEW)
        assert "before the data changed" in posterior.history.tuning["prior precision"]
    assert (posterior.prior_precision, posterior.temperature) == (prior, 1.5)
    assert posterior.scale == pytest.approx(60.0) and posterior.evidence.samples == 120
    assert not posterior.history.faithful


def test_the_same_data_twice() -> None:
    model = make_net()
    posterior = update(fit(model, OLD, "diag"), NEW)
    with pytest.warns(UserWarning, match="twice"):
        posterior = update(posterior, data(30, 2, batch=5))
    posterior = remove(posterior, NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(posterior, NEW)


# Refusals


@pytest.mark.parametrize("method", METHODS_THAT_CAN)
def test_too_much_cannot_go_out(method: str) -> None:
    posterior = fit(make_net(), OLD, method)
    with pytest.raises(uq.PosthocUQError, match="leaves none"):
        remove(posterior, OLD)
    with pytest.raises(uq.PosthocUQError, match="cannot all be among those"):
        remove(posterior, OTHERS[:3])


def test_statistics_that_would_be_negative() -> None:
    weights = Weights.of(10, -5, 1e-7)
    kept, part = torch.tensor([2.0, 1.0]), torch.tensor([4.0, 2.0 + 1e-6])
    assert combined(kept, part, weights, "diagonal").tolist() == [0.0, 0.0]
    with pytest.raises(NotContainedError, match="diagonal"):
        combined(kept, torch.tensor([4.0, 2.1]), weights, "diagonal")
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    torch.testing.assert_close(combined_matrices(matrix, matrix, weights, ""), matrix)
    other = torch.tensor([[2.0, -1.5], [-1.5, 2.0]])  # both diagonals fit, the matrices do not
    with pytest.raises(NotContainedError, match="Gram"):
        combined_matrices(matrix, other, weights, "Gram")


class Unread:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read")


class Broken:
    """Batches, and then an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield from NEW
        raise self.error


def test_an_error_leaves_model_and_posterior_as_they_were() -> None:
    model = make_net()
    posterior = fit(model, OLD, "inf")
    before = copy.deepcopy(posterior)
    with Watch(model):
        for error in (KeyboardInterrupt(), OSError("unplugged")):
            with pytest.raises(type(error)):
                update(posterior, Broken(error))
    assert_same(posterior, before)


# Files and records


def test_grams_stay_exact_in_a_half_file(tmp_path: Path) -> None:
    model = make_net()
    uq.save(fit(model, OLD, "kfac"), tmp_path / "half.h5", dtype=torch.bfloat16)
    loaded = update(uq.load(tmp_path / "half.h5", model), NEW)
    assert distance(loaded, fit(model, [*OLD, *NEW], "kfac")) < 1e-5


def test_the_digest_tells_what_came_and_went() -> None:
    posterior = fit(make_net(), OLD, "diag")

    def digest(*steps: tuple[Any, Batches]) -> str:
        found = posterior
        for change, loader in steps:
            found = change(found, loader)
        return found.history.changes.digest

    once = digest((update, NEW))
    assert once == digest((update, data(30, 2, batch=4)))  # whatever the batches
    others = [
        digest((update, NEW[:-1])),
        digest((update, [(x, 2 - y) for x, y in NEW])),
        digest((remove, OLD[:1])),
        digest((update, NEW), (remove, NEW)),
    ]
    assert len({once, *others}) == 5


def test_many_updates(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    kind = uq.KFAC(keep_grams=True, dtype=torch.float64)
    posterior = fit(model, [x[:100]], kind)  # type: ignore[list-item]
    sizes: list[int] = []
    for part in x.split(5):
        posterior = update(posterior, [part])
        uq.save(posterior, tmp_path / "p.h5")
        sizes.append((tmp_path / "p.h5").stat().st_size)
    assert max(sizes) - min(sizes) <= 64 and len(json.dumps(posterior.history.changes.plain())) < 400
    assert distance(posterior, fit(model, [x[:100], x], kind)) < 1e-5  # type: ignore[list-item]


def test_data_come_in_beside_a_network_that_was_certain_of_all_before() -> None:
    """Its output Gram is about zero; what is compared with the new data's is the precision, which has the prior's."""
    model, x = mlp(dtype=torch.float64), inputs_of(4, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.mul_(200.0)  # type: ignore[union-attr]
        best = model(x).topk(2).values
        x = x[best[:, 0] - best[:, 1] > 30]
        y = model(x).argmax(1)
    posterior = fit(model, batches(x, y), uq.KFAC(keep_grams=True, fisher="empirical"))
    other = batches(x + 0.5, (y + 1) % 3)
    found = remove(update(posterior, other), other)
    torch.testing.assert_close(found.variance(), posterior.variance(), rtol=1e-5, atol=0)
