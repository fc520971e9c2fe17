"""Novelty against dense float64 computations from its definition, for every method, head and likelihood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import short, short_options, without_training
from novelty_by_definition import over_layers, with_one
from posterior_helpers import blocks_of, dense_covariance, dense_jacobian
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq import Posterior, PosthocUQError
from posthoc_uq.core import Batch
from posthoc_uq.curvature import FeatureSource, find_features
from posthoc_uq.layers import Layer, prepare
from posthoc_uq.likelihoods import Categorical, Gaussian, score_of
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import ClassGrams
from posthoc_uq.posteriors.features import room


class Net(nn.Module):
    """Two hidden layers; features are the second's, 7 of them."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 7)
        self.last = nn.Linear(7, outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


def make(outputs: int = 3, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(outputs).eval()


def inputs(samples: int = 120, seed: int = 1) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed)) * 2


def targets(model: nn.Module, x: Tensor, likelihood: str) -> Tensor:
    outputs = model(x).detach()
    if likelihood == "classification":
        return outputs.argmax(1)
    return (outputs > 0).float() if likelihood == "binary" else outputs + 0.1 * torch.cos(7 * outputs)


def fitted(
    model: nn.Module,
    x: Tensor,
    method: str = "diag",
    likelihood: str = "classification",
    batch: int = 30,
    **options: Any,
) -> Posterior:
    loader = DataLoader(TensorDataset(x, targets(model, x, likelihood)), batch_size=batch)
    options = {**short_options(method), **options}
    if not short(method).trains:
        options = {"prior_precision": 1.0, **options}
    return uq.fit(model, loader, method=method, likelihood=likelihood, progress=False, **options)


def dense(train: Tensor, classes: Tensor, test: Tensor, smoothing: float) -> Tensor:
    """The definition in float64: features with a one, a Gram a class, the least ratio over the classes."""
    train, test = (F.pad(phi.double(), (0, 1), value=1.0) for phi in (train, test))
    found: list[Tensor] = []
    for label in classes.unique():
        own = train[classes == label]
        gram = own.T @ own
        ridge = smoothing * gram.trace() / len(gram)
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=torch.float64))
        found.append(torch.einsum("si,ij,sj->s", test, inverse, test) * ridge / test.square().sum(1))
    return torch.stack(found).amin(0)


def classes_of(model: Any, x: Tensor, likelihood: str = "classification") -> Tensor:
    outputs = model(x).detach()
    return {
        "classification": outputs.argmax(1) if outputs.ndim == 2 else torch.zeros(0),
        "binary": (outputs.flatten() > 0).long(),
        "regression": torch.zeros(len(x)),
    }[likelihood]


def of_last_layer(model: Any, x: Tensor, test: Tensor, smoothing: float) -> Tensor:
    return dense(model.features(x).detach(), classes_of(model, x), model.features(test).detach(), smoothing)


def expected(model: Any, x: Tensor, test: Tensor, likelihood: str = "classification") -> Tensor:
    """By the last layer's inputs and the row that enters the network."""
    train, other = ([with_one(model.features(rows).detach()), with_one(rows)] for rows in (x, test))
    return torch.from_numpy(over_layers(train, classes_of(model, x, likelihood).numpy(), other))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_definition(method: str) -> None:
    model, x = make(), inputs()
    posterior = fitted(model, x, method)
    predictor = uq.wrap(model, posterior, head="linearized")
    # with the mean that a training found; message passing sorts by the classes of the trained network
    network = model if method == "message_passing" else predictor._network
    test = inputs(20, seed=2)
    for smoothing in (1e-4, 3e-3):
        found = predictor.novelty(test, of="class", smoothing=smoothing)
        torch.testing.assert_close(
            found.double(), of_last_layer(network, x, test, smoothing), rtol=2e-3, atol=1e-7
        )
        assert found.dtype == torch.float32 and bool((found > 0).all()) and bool((found <= 1).all())
    found, of_last = predictor.novelty(test), predictor.novelty(test, of="class")
    torch.testing.assert_close(found.double(), expected(network, x, test), rtol=3e-3, atol=1e-7)
    assert bool((found >= of_last).all()) and bool((found > of_last).any())
    assert "by inputs of 'last', 3 Grams of 8 features" in str(posterior.report())


@pytest.mark.parametrize(("likelihood", "outputs"), [("regression", 1), ("regression", 2), ("binary", 1)])
@pytest.mark.parametrize("head", ["linearized", "moments", "sampling"])
def test_other_likelihoods_and_heads(likelihood: str, outputs: int, head: str) -> None:
    model, x = make(outputs), inputs()
    posterior = fitted(model, x, likelihood=likelihood)
    assert posterior.features is not None and posterior.features.classes == (
        2 if likelihood == "binary" else 1
    )
    test = inputs(9, seed=3)
    options: dict[str, Any] = {"novelty": True, "n_samples": 2} if head == "sampling" else {}
    predictor = uq.wrap(model, posterior, head=head, **options)
    wanted = expected(model, x, test, likelihood)
    prediction = predictor(test)
    torch.testing.assert_close(prediction.novelty().double(), wanted, rtol=2e-3, atol=1e-7)
    assert torch.equal(score_of(prediction, "novelty"), prediction.novelty())
    assert torch.equal(prediction.to_dict()["novelty"], predictor.novelty(test))
    joined = predictor.predict(DataLoader(TensorDataset(test), batch_size=4), progress=False)
    torch.testing.assert_close(joined.novelty(), prediction.novelty(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("engine", ["auto", "jvp"])
@pytest.mark.parametrize("layers", ["last", "first"])
def test_also_where_the_posterior_does_not_cover_the_last_layer(layers: str, engine: str) -> None:
    model, x = make(), inputs()
    posterior = fitted(model, x, layers=layers)
    test = inputs(9, seed=3)
    prediction = uq.wrap(model, posterior, head="linearized", engine=engine)(test)
    wanted = expected(model, x, test)
    torch.testing.assert_close(prediction.novelty().double(), wanted, rtol=2e-3, atol=1e-7)


PASSES: list[
    int
] = []  # sizes of the batches that went through a `Body`; one that kept them could not be replayed


class Body(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
@pytest.mark.parametrize("layers", ["last", "all", ["first", "second"]])
@pytest.mark.covering(1)
def test_predictions_of_every_head_know_it(layers: Any, head: str) -> None:
    model, x, test = make(), inputs(), inputs(20, seed=2)
    posterior = fitted(model, x, layers=layers)
    whole = expected(model, x, test).float()
    for options in [{}] if head != "sampling" else [{}, {"batched": False}]:
        predictor = uq.wrap(model, posterior, head, **options)
        assert torch.allclose(predictor(test).novelty(), whole, rtol=1e-3)
        assert torch.allclose(predictor.predict([test], progress=False).novelty(), whole, rtol=1e-3)
        without = uq.wrap(model, posterior, head, novelty=False, **options)
        with pytest.raises(PosthocUQError, match="novelty=False"):
            without(test).novelty()


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
def test_a_prediction_computes_it_when_it_is_first_read(
    head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x, test = make(), inputs(), inputs(20, seed=2)
    posterior = fitted(model, x)
    assert posterior.features is not None
    predictor, whole = uq.wrap(model, posterior, head), expected(model, x, test)
    computed: list[int] = []

    def counted(own: Any, rows: Tensor) -> Tensor:
        computed.append(len(rows))
        return original(own, rows)

    grams = type(posterior.features)
    original = grams.over_layers
    monkeypatch.setattr(grams, "over_layers", counted)
    prediction = predictor(test)
    prediction.probs, prediction.entropy(), repr(prediction), prediction.picked(slice(3))
    assert computed == []
    assert torch.allclose(prediction.picked(slice(5, 8)).novelty(), whole[5:8].float(), rtol=1e-3)
    assert torch.allclose(prediction.novelty(), whole.float(), rtol=1e-3)
    assert prediction.novelty() is prediction.novelty() and computed == [3, 20]
    made = [predictor(part) for part in test.split(8)]
    torch.save(made[0], tmp_path / "prediction.pt")
    kept = torch.load(tmp_path / "prediction.pt", weights_only=False)
    for same in (uq.Prediction.cat(made), predictor.predict(list(test.split(8)), progress=False)):
        computed.clear()
        assert torch.allclose(same.novelty(), whole.float(), rtol=1e-3) and computed == []
    assert torch.equal(kept.novelty(), made[0].novelty()) and computed == []


class Cleaned(Net):
    """Whose outputs do not tell that its features are not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num()


def test_features_that_are_not_finite_are_refused_by_the_call_that_would_hold_them() -> None:
    model, test = Cleaned().eval(), inputs(20, seed=2)
    predictor = uq.wrap(model, fitted(model, inputs()), "sampling", n_samples=3)
    assert bool(predictor(test).novelty().isfinite().all())
    test[3, 0] = torch.nan
    with pytest.raises(uq.NonFiniteError, match=r"of 1 of 20 inputs \(number 3 first\)"):
        predictor(test)


def test_draws_of_a_last_layer_know_it_without_another_pass() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh()]
    model, x = nn.Sequential(Body(*parts), nn.Linear(7, 3)).eval(), inputs()
    passes: dict[Any, int] = {}
    for layers, novelty in [("last", False), ("last", True), ("all", False), ("all", True)]:
        posterior = fitted(model, x, layers=layers)
        predictor = uq.wrap(model, posterior, "sampling", n_samples=5, batched=False, novelty=novelty)
        predictor(inputs(20, seed=2))  # finds out which part is fixed
        PASSES.clear()
        predictor(inputs(20, seed=3))
        passes[layers, novelty] = len(PASSES)
    assert passes == {("last", False): 1, ("last", True): 1, ("all", False): 5, ("all", True): 6}


def test_neither_batches_nor_order_matter() -> None:
    model, x = make(), inputs()
    reference = fitted(model, x, "kfac").features
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    assert reference is not None
    phi = F.pad(model.features(inputs(20, seed=2)).detach(), (0, 1), value=1.0)
    for own, batch in ((x, 7), (shuffled, 120)):
        other = fitted(model, own, "kfac", batch=batch).features
        assert other is not None
        torch.testing.assert_close(other.novelty(phi), reference.novelty(phi), rtol=1e-3, atol=1e-8)
    one_by_one = torch.cat([reference.novelty(row.unsqueeze(0)) for row in phi])
    torch.testing.assert_close(one_by_one, reference.novelty(phi), rtol=1e-10, atol=0)


def test_zero_and_bad_features() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)).eval()
    posterior = fitted(model, inputs())
    features = posterior.features
    assert features is not None
    phi = torch.zeros(3, 6)
    phi[1], phi[2, 0] = 1.0, float("nan")
    found = features.novelty(phi)
    assert found[0] == 1 and 0 < found[1] < 1 and found[2].isnan()


def test_classes_with_few_samples_share_a_gram() -> None:
    layer = Layer("f", "linear", "f.weight", None, 1, 4, 5, (4, 5))
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(60, 5, generator=generator)
    labels = torch.tensor([0] * 50 + [1] * 6 + [2] * 4)
    grams = ClassGrams(FeatureSource(layer, "outputs", 4), Categorical(), torch.device("cpu"), 2**28)
    grams.add(phi, F.one_hot(labels, 4).float())
    found = grams.result(torch.float64)
    assert found.classes == 2 and found.samples == 60
    test = torch.randn(10, 5, generator=generator)
    shares: list[Tensor] = []
    for own in (phi[:50].double(), phi[50:].double()):
        gram = own.T @ own
        ridge = 3e-4 * gram.trace() / 5
        inverse = torch.linalg.inv(gram + ridge * torch.eye(5, dtype=torch.float64))
        shares.append(
            ((test.double() @ inverse) * test.double()).sum(1) * ridge / test.double().square().sum(1)
        )
    torch.testing.assert_close(found.novelty(test), torch.stack(shares).amin(0), rtol=1e-9, atol=1e-12)


def clusters(classes: int, size: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features of rectified units around one mean a class, with labels."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, size, generator=generator)
    generator.manual_seed(seed)
    labels = torch.arange(samples) % classes
    spread = torch.linspace(1.0, 0.05, size)
    return (means[labels] + spread * torch.randn(samples, size, generator=generator)).relu(), labels


@pytest.mark.parametrize("budget", [2**28, 16 * 10 * 60 * 12])
def test_compression(budget: int) -> None:
    """What is lost by keeping few directions, or by sketching Grams that do not fit: stated, and small."""
    size, classes = 60, 10
    phi, labels = clusters(classes, size, 2000, seed=1)
    test, _ = clusters(classes, size, 300, seed=2)
    foreign = torch.randn(300, size, generator=torch.Generator().manual_seed(3)).relu()
    layer = Layer("f", "linear", "f.weight", None, 1, classes, size, (classes, size))
    grams = ClassGrams(FeatureSource(layer, "outputs", classes), Categorical(), torch.device("cpu"), budget)
    assert ("sketches" in grams.sums) == (budget < 2**20)
    for start in range(0, 2000, 300):
        part = slice(start, start + 300)
        grams.add(phi[part], F.one_hot(labels[part], classes).float())
    found = grams.result(torch.float32)
    exact: list[list[Tensor]] = []
    for label in range(classes):
        own = phi[labels == label].double()
        gram = own.T @ own
        ridge = 3e-4 * gram.trace() / size
        inverse = torch.linalg.inv(gram + ridge * torch.eye(size, dtype=torch.float64))
        exact.append(
            [
                ((x.double() @ inverse) * x.double()).sum(1) * ridge / x.double().square().sum(1)
                for x in (test, foreign)
            ]
        )
    familiar, other = (torch.stack([pair[i] for pair in exact]).amin(0) for i in range(2))
    wanted = (other.unsqueeze(1) > familiar).double().mean()
    got = (found.novelty(foreign).unsqueeze(1) > found.novelty(test)).double().mean()
    assert wanted > 0.95 and abs(float(got - wanted)) < 0.02
    kept = sum(tensor.numel() for tensor in found.tensors().values())
    assert kept < classes * size**2 * 0.7


@pytest.mark.parametrize("size", [60, 600])
def test_one_gram_is_kept_exactly_and_fewer_samples_than_features_do_no_harm(size: int) -> None:
    """Of 600 features the eigenvectors are found in the range of the 40 rows alone."""
    layer = Layer("f", "linear", "f.weight", None, 1, 1, size, (1, size))
    phi, _ = clusters(5, size, 40, seed=1)
    test, _ = clusters(5, size, 9, seed=2)
    gram = phi.double().T @ phi.double()
    ridge = 3e-4 * gram.trace() / size
    inverse = torch.linalg.inv(gram + ridge * torch.eye(size, dtype=torch.float64))
    wanted = ((test.double() @ inverse) * test.double()).sum(1) * ridge / test.double().square().sum(1)
    for split in (40, 7):
        grams = ClassGrams(FeatureSource(layer, "outputs", 1), Gaussian(), torch.device("cpu"), 2**28)
        for part in phi.split(split):
            grams.add(part, part[:, :1])
        found = grams.result(torch.float64)
        assert found.factors.shape[2] < found.basis.shape[1]
        torch.testing.assert_close(found.novelty(test), wanted, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("most", [30_000, 60_000, 200_000])
def test_many_classes_stay_within_bounds(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn less than the whole shared basis, all of it with diagonals alone, and with directions of every class."""
    classes, size = 200, 130
    monkeypatch.setattr("posthoc_uq.posteriors.features._MAX_NUMBERS", most)
    layer = Layer("fc", "linear", "fc.weight", None, 1, classes, size, (classes, size))
    grams = ClassGrams(FeatureSource(layer, "outputs", classes), Categorical(), torch.device("cpu"), 2**23)
    assert "sketches" in grams.sums
    phi, labels = clusters(classes, size, 3000, seed=1)
    for start in range(0, len(phi), 1000):
        part = slice(start, start + 1000)
        grams.add(phi[part], F.one_hot(labels[part], classes).float())
    found = grams.result(torch.float32)
    width, rank = room(classes, size)
    assert sum(tensor.numel() for tensor in found.tensors().values()) <= most and found.classes == classes
    assert (found.basis.shape[1], found.factors.shape[2]) == (width, rank)
    assert (width < size) == (most == 30_000) and rank == {30_000: 0, 60_000: 0, 200_000: 6}[most]
    test, _ = clusters(classes, size, 200, seed=2)
    foreign = torch.randn(200, size, generator=torch.Generator().manual_seed(3)).relu()
    area = (found.novelty(foreign).unsqueeze(1) > found.novelty(test)).double().mean()
    assert area > 0.95


def test_a_tenth_of_inf_on_resnet18() -> None:
    """With 1,000 classes, where INF keeps 12.2 million numbers."""
    width, rank = room(1000, 513)
    assert width == 513 and 513 * width + 1000 * width * (1 + rank) + 1000 <= 1.22e6


def test_foreign_inputs_are_more_novel() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
        x = torch.cat([inputs(200, seed=s) * 0.3 + 2 * torch.eye(4)[s] for s in range(3)])
        y = torch.arange(3).repeat_interleave(200)
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(100):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    posterior = uq.fit(model.eval(), DataLoader(TensorDataset(x, y), 64), progress=False, prior_precision=1.0)
    familiar, foreign = x[::7], inputs(80, seed=9) * 0.3 - 2 * torch.eye(4)[3] - 2 * torch.eye(4)[0]
    for head in ("linearized", "moments"):
        predictor = uq.wrap(model, posterior, head=head)
        for of in ("class", "top", "all"):
            near, far = predictor.novelty(familiar, of=of), predictor.novelty(foreign, of=of)
            assert (far.unsqueeze(1) > near).float().mean() > 0.8, of
    table = uq.evaluate(
        uq.wrap(model, posterior, head="linearized"),
        DataLoader(TensorDataset(x, y), 64),
        ood_loaders={"far": DataLoader(TensorDataset(foreign), 64)},
        score="novelty",
        progress=False,
    )
    assert "novelty" in str(table) and table.default_score == "novelty"


# --- through the posterior


def jacobian(model: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """``(samples, outputs, parameters)`` in float64, one output at a time."""
    wide = make(model.last.out_features).double()  # type: ignore[union-attr, arg-type]
    wide.load_state_dict(model.state_dict())
    parameters = dict(wide.named_parameters())
    rows: list[Tensor] = []
    for row in wide(x.double()).reshape(len(x), -1):
        for output in row:
            found = torch.autograd.grad(output, [parameters[n] for n in names], retain_graph=True)
            rows.append(torch.cat([f.flatten() for f in found]))
    return torch.stack(rows).reshape(len(x), -1, len(rows[0]))


def dense_ratio(
    model: nn.Module, posterior: Posterior, x: Tensor, of: str, tau: float, omega: float
) -> Tensor:
    own = posterior.with_settings(scale=posterior.evidence.samples, prior_precision=tau)
    if "residual_weight" in own.tunable:
        own = own.with_settings(residual_weight=omega)
    wide = make(model.last.out_features).double()  # type: ignore[union-attr, arg-type]
    wide.load_state_dict(model.state_dict())
    rows = torch.cat([*dense_jacobian(wide, own, x.double()).values()], dim=1)
    rows = rows.reshape(len(x), -1, rows.shape[1])
    outputs = rows.shape[1]
    cross = blocks_of(dense_covariance(wide, own, x.double()), len(x))
    prior = rows @ rows.transpose(1, 2) / tau
    size = outputs
    logits = model(x).detach()
    if posterior.likelihood.name == "classification":
        trained_mean = torch.eye(size, dtype=torch.float64) - 1 / size
        directions = (
            trained_mean.expand(len(x), size, size)
            if of == "all"
            else trained_mean[logits.argmax(1)].unsqueeze(1)
        )
    else:
        whole = (
            torch.eye(size, dtype=torch.float64) if of == "all" else torch.ones(1, size, dtype=torch.float64)
        )
        directions = whole.expand(len(x), -1, -1)
    left, given = (
        torch.einsum("svi,sij,svj->s", directions, matrix, directions) for matrix in (cross, prior)
    )
    return left / given


@pytest.mark.parametrize("of", ["top", "all"])
@pytest.mark.parametrize("method", without_training())
def test_ratio_by_dense_jacobians(method: str, of: str) -> None:
    model, x = make(), inputs(60)
    posterior = fitted(model, x, method, **({"rank": 20} if method == "inf" else {}))
    posterior = posterior.with_settings(scale=3.0, prior_precision=77.0)  # whatever tuning made of them
    test = inputs(5, seed=4)
    predictor = uq.wrap(model, posterior, head="linearized")
    for tau, omega in ((1.0, 0.0), (5.0, 0.5)):
        found = predictor.novelty(test, of=of, prior_precision=tau, residual_weight=omega)
        wanted = dense_ratio(model, posterior, test, of, tau, omega)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-6)
    assert posterior.scale == 3.0 and posterior.prior_precision == 77.0


@pytest.mark.parametrize(("likelihood", "outputs"), [("regression", 2), ("binary", 1)])
@pytest.mark.parametrize("of", ["top", "all"])
def test_ratio_of_other_likelihoods(likelihood: str, outputs: int, of: str) -> None:
    model, x = make(outputs), inputs(60)
    posterior = fitted(model, x, likelihood=likelihood)
    test = inputs(5, seed=4)
    found = uq.wrap(model, posterior, head="moments").novelty(test, of=of)
    wanted = dense_ratio(model, posterior, test, of, 1.0, 0.0)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("body", [0.0, 0.5])
def test_ratio_of_a_training(body: float) -> None:
    model, x = make(), inputs(60)
    posterior = fitted(model, x, "function_space", train_mean=False)
    posterior = posterior.noted(fit={"prior body variance": body})  # as files of earlier versions may have it
    test = inputs(5, seed=4)
    posterior = posterior.with_settings(scale=7.0)
    found = uq.wrap(model, posterior, head="linearized").novelty(test, of="top")
    posterior = posterior.with_settings(scale=posterior.evidence.samples)
    names = [name for layer in posterior.layers.values() for name in layer.parameter_names]
    variance = posterior.variance()
    rows = jacobian(model, test, names)
    v = (torch.eye(3, dtype=torch.float64) - 1 / 3)[model(test).argmax(1)]
    rows = torch.einsum("sv,svp->sp", v, rows)
    own = torch.cat([variance[n].flatten() for n in names]).double()
    prior = torch.cat([torch.full((posterior.mean[n].numel(),), 1.0 if "last" in n else body) for n in names])
    wanted = ((rows.square() @ own) / (rows.square() @ prior.double())).clamp(max=1)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-6)


# --- which layer


class LogSoftmax(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(1)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.reshape(len(x), 2, 4)).mean(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Mixing(nn.Module):
    """Features that depend on the other samples of a batch, by a part that has no weight in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        with torch.no_grad():
            self.last.weight[:, 4:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, x.mean(0, keepdim=True).expand_as(x)], 1))


def found_features(model: nn.Module, x: Tensor) -> FeatureSource | None:
    batch = Batch((x,))
    return find_features(prepare(model, batch), batch)


def test_which_layer_is_the_last() -> None:
    x = inputs(6)
    plain = found_features(make(), x)
    assert plain is not None and (plain.layer.name, plain.source) == ("last", "outputs")
    changed = found_features(LogSoftmax().eval(), x)
    assert changed is not None and (changed.layer.name, changed.source) == ("last", "pooled")
    tokens = found_features(Tokens().eval(), torch.randn(6, 8))
    assert tokens is not None and tokens.source == "outputs"  # a mean of outputs is the output of the mean
    assert found_features(Twice().eval(), x) is None
    assert found_features(Mixing().eval(), x) is None
    convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    pooled = found_features(convolution, torch.randn(4, 1, 5, 5))
    assert pooled is not None and pooled.size == 10


def test_pooled_rows_by_definition() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.AdaptiveMaxPool2d(1), nn.Flatten()).eval()
        x = torch.randn(80, 1, 5, 5)
    posterior = fitted(model, x)
    assert posterior.features is not None and posterior.features.source == "pooled"
    assert "pooled inputs" in str(posterior.report())
    patches = F.unfold(x, 3, padding=1).mean(2)
    wanted = dense(patches, model(x).argmax(1), patches[:9], 3e-4)
    found = uq.wrap(model, posterior, head="linearized").novelty(x[:9])
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-7)


class Windows(nn.Module):
    """Tokens (samples, length, 3), whose classes go by three neighbours each."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        return self.last(x.transpose(1, 2))


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
def test_pooled_rows_leave_out_what_the_attention_mask_does(head: str) -> None:
    torch.manual_seed(0)
    model, x, y = Windows(), torch.randn(40, 6, 3), torch.randint(3, (40, 6))
    mask = (torch.arange(6) < torch.randint(1, 7, (40, 1))).long()
    data = [
        {"x": x[n : n + 20], "attention_mask": mask[n : n + 20], "labels": y[n : n + 20]} for n in (0, 20)
    ]
    posterior = uq.fit(model, data, "diag", prior_precision=1.0, progress=False)
    assert posterior.features is not None and posterior.features.source == "pooled"
    windows = F.pad((x * mask.unsqueeze(-1)).transpose(1, 2), (1, 1)).unfold(
        2, 3, 1
    )  # channels, tokens, kernel
    rows = windows.transpose(1, 2).flatten(2)
    pooled = torch.stack([own[real > 0].mean(0) for own, real in zip(rows, mask, strict=True)])
    wanted = dense(pooled, torch.zeros(40), pooled[:9], 3e-4)
    predictor = uq.wrap(model, posterior, head=head)
    found = predictor(x[:9], attention_mask=mask[:9]).novelty()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-7)
    longer = predictor(F.pad(x[:9], (0, 0, 0, 4)), attention_mask=F.pad(mask[:9], (0, 4)))
    torch.testing.assert_close(longer.novelty(), found)


def test_without_such_a_layer_the_posterior_itself_tells() -> None:
    model, x = Twice().eval(), inputs()
    posterior = fitted(model, x)
    assert posterior.features is None and "by the posterior itself" in str(posterior.report())
    predictor = uq.wrap(model, posterior, head="linearized")
    assert torch.equal(predictor.novelty(x[:5]), predictor.novelty(x[:5], of="top"))
    prediction = predictor(x[:5])
    assert "novelty" not in prediction.scores()
    with pytest.raises(PosthocUQError, match="no novelty"):
        prediction.novelty()


# --- files, resuming, the model


@pytest.mark.parametrize("untrusted", [False, True])
def test_save_and_load(tmp_path: Path, untrusted: bool) -> None:
    model, x = make(), inputs()
    posterior = fitted(model, x, "inf")
    assert posterior.features is not None
    posterior.features.smoothing = 1e-3
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model, untrusted=untrusted)
    test = inputs(9, seed=3)
    own, other = (uq.wrap(model, p, head="linearized")(test).novelty() for p in (posterior, loaded))
    assert torch.equal(own, other)
    described = uq.inspect(tmp_path / "p.h5")["features"]
    assert (
        described["smoothing"] == 1e-3 and described["layer"]["name"] == "last" and described["classes"] == 3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_it(tmp_path: Path, dtype: torch.dtype) -> None:
    model, x = make(), inputs(400) * 100
    with torch.no_grad():
        model.last.weight /= 100
    posterior = fitted(model, x)
    uq.save(posterior, tmp_path / "p.h5", dtype=dtype)
    loaded = uq.load(tmp_path / "p.h5", model)
    test = torch.cat([x[:50], inputs(50, seed=3)])
    own, other = (uq.wrap(model, p, head="linearized").novelty(test).log() for p in (posterior, loaded))
    assert (own - other).abs().max() < (0.02 if dtype == torch.float16 else 0.15)


def test_a_posterior_without_it_is_saved_too(tmp_path: Path) -> None:
    model, x = make(), inputs()
    posterior = fitted(model, x)
    posterior = posterior.replaced(features=None)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    predictor = uq.wrap(model, loaded, head="linearized")
    with pytest.raises(PosthocUQError, match="it again"):
        predictor.novelty(x[:3])
    with pytest.raises(PosthocUQError, match="it again"):
        predictor(x[:3]).novelty()
    sampled = uq.wrap(model, loaded, head="sampling")(x[:3])
    assert "novelty" not in sampled.scores()
    assert predictor.novelty(x[:3], of="top").shape == (3,)


def test_a_share_of_the_data_for_the_bases_leaves_it_alone() -> None:
    model, x = make(), inputs()
    whole, shared = fitted(model, x, "inf").features, fitted(model, x, "inf", basis_fraction=0.5).features
    assert whole is not None and shared is not None and shared.samples == 120
    assert all(torch.equal(tensor, shared.tensors()[name]) for name, tensor in whole.tensors().items())
