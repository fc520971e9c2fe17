"""Outputs with positions (pixels, tokens), against dense computations in float64 written from the definitions."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from pathlib import Path

import posterior_helpers
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import posthoc_uq as uq
from posthoc_uq.core import sample_keys
from posthoc_uq.likelihoods import LabelLayout, PositionPrediction
from posthoc_uq.likelihoods.positions import positions_of_draws

SAMPLES, CLASSES, TAU = 6, 3, 2.0


def image_net() -> nn.Sequential:
    """Images (2, 3, 3) to 2 x 2 positions of three classes, class_dim=1; 31 weights."""
    return nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Conv2d(2, CLASSES, 1))


def token_net() -> nn.Sequential:
    """Four tokens (4, 3) of three classes each, class_dim=-1; 27 weights."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES))


@dataclass
class Case:
    """A network, its data, and the same outputs as rows.

    Attributes:
        labels: of the positions in order, ``(samples, positions)``, where `counted`.
    """

    model: nn.Sequential
    likelihood: uq.Categorical
    x: Tensor
    y: Tensor
    labels: Tensor
    counted: Tensor

    def rows(self, outputs: Tensor) -> Tensor:
        last = outputs if self.likelihood.layout.class_dim == -1 else outputs.permute(0, 2, 3, 1)
        return last.reshape(len(outputs), -1, CLASSES)

    def loader(self, size: int = 2) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    def weights(self, last: bool = False) -> list[Tensor]:
        return list(self.model[-1 if last else 0 :].parameters()) if last else list(self.model.parameters())

    def jacobian(self, last: bool = False) -> Tensor:
        """``(samples, positions, classes, weights)``, each layer's bias as its last column."""
        rows = self.rows(self.model(self.x)).flatten()
        layers = [self.model[2]] if last else [self.model[0], self.model[2]]
        own = []
        for value in rows:
            parts = []
            for layer in layers:
                weight, bias = torch.autograd.grad(value, [layer.weight, layer.bias], retain_graph=True)
                parts.append(torch.cat([weight.flatten(1), bias[:, None]], 1).flatten())
            own.append(torch.cat(parts))
        return torch.stack(own).reshape(SAMPLES, -1, CLASSES, len(own[0]))

    def probs(self) -> Tensor:
        return self.rows(self.model(self.x)).softmax(-1).detach()

    def fisher(self, last: bool = False) -> Tensor:
        """``1/N sum_n sum_(t counted) J_nt^T (diag p - p p^T) J_nt``."""
        p = self.probs()
        middle = (torch.diag_embed(p) - p[..., :, None] * p[..., None, :]) * self.counted[..., None, None]
        own = self.jacobian(last)
        return torch.einsum("ntcw,ntcd,ntdv->wv", own, middle, own) / SAMPLES


def case(kind: str) -> Case:
    torch.manual_seed(3)
    shape = (2, 3, 3) if kind == "image" else (4, 3)
    model = (image_net() if kind == "image" else token_net()).double().eval()
    x = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (SAMPLES, 2, 2) if kind == "image" else (SAMPLES, 4))
    y.view(SAMPLES, 4)[0, 1:3] = -100
    y.view(SAMPLES, 4)[3] = -100
    labels, counted = y.reshape(SAMPLES, 4), y.reshape(SAMPLES, 4) != -100
    if kind == "causal":  # by loops, as a language model shifts its labels
        labels, counted = torch.zeros_like(labels), torch.zeros_like(counted)
        for n in range(SAMPLES):
            for t in range(3):
                labels[n, t], counted[n, t] = y[n, t + 1], y[n, t + 1] != -100
    likelihood = {
        "image": uq.Categorical(),
        "tokens": uq.Categorical(class_dim=-1),
        "causal": uq.Categorical(class_dim=-1, next_token=True),
    }[kind]
    return Case(model, likelihood, x, y, labels, counted)


KINDS = ("image", "tokens", "causal")
EVERY = pytest.mark.parametrize("kind", KINDS)


def fit(of: Case, method: str = "full", size: int = 2, **options) -> uq.Posterior:
    options = {"prior_precision": TAU, "progress": False, "dtype": torch.float64} | options
    return uq.fit(of.model, of.loader(size), method, likelihood=of.likelihood, **options)


def found_fisher(posterior: uq.Posterior) -> Tensor:
    return next(iter(posterior.blocks.values())).fisher


# The Fisher and the evidence


@EVERY
def test_exact_fisher(kind: str) -> None:
    own = case(kind)
    truth = own.fisher()
    torch.testing.assert_close(found_fisher(fit(own, fisher="exact")), truth, rtol=1e-9, atol=1e-12)
    blocks = fit(own, "diag", fisher="exact").blocks
    diagonal = torch.cat([blocks[name].diagonal.flatten() for name in ("0", "2")])
    torch.testing.assert_close(diagonal, truth.diagonal(), rtol=1e-9, atol=1e-12)


@EVERY
def test_drawn_labels_estimate_it_in_one_backward_pass(kind: str) -> None:
    own = case(kind)
    truth = own.fisher()
    drawn = found_fisher(fit(own, fisher="mc", n_samples=200))
    assert float((drawn - truth).norm() / truth.norm()) < 0.13
    keys = sample_keys([own.x], SAMPLES, 0)
    passes = list(own.likelihood.gradients(own.model(own.x), own.y, keys, "mc", 2))
    assert len(passes) == 2 and passes[0].shape == own.model(own.x).shape
    ignored = ~own.counted[..., None].expand(-1, -1, CLASSES)
    assert bool((own.rows(passes[0])[ignored] == 0).all()) and bool(
        (own.rows(passes[0])[~ignored] != 0).all()
    )


@EVERY
def test_empirical_fisher(kind: str) -> None:
    own = case(kind)
    scores = own.probs() - torch.nn.functional.one_hot(own.labels.clamp(min=0), CLASSES)
    rows = torch.einsum("ntc,ntcw->nw", scores * own.counted[..., None], own.jacobian())
    torch.testing.assert_close(found_fisher(fit(own, fisher="empirical")), rows.T @ rows / SAMPLES)


@EVERY
@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_batches_do_not_matter(kind: str, fisher: str) -> None:
    own = case(kind)
    first, second = (fit(own, "diag", size, fisher=fisher) for size in (1, 6))
    for name, block in first.blocks.items():
        torch.testing.assert_close(block.diagonal, second.blocks[name].diagonal, rtol=1e-10, atol=1e-13)
    features, other = first.features, second.features
    assert features is not None and other is not None and features.source == "positions"
    assert features.samples == other.samples == int(own.counted.sum())


@EVERY
@pytest.mark.parametrize("method", ["diag", "efb"])
def test_positions_of_a_last_layer_count_as_samples(kind: str, method: str) -> None:
    """Squares of the scores of one drawn label a position, without products of two positions."""
    own = case(kind)
    found = fit(own, method, fisher="mc", n_samples=2, layers="last")
    keys = sample_keys([own.x], SAMPLES, 0)
    with torch.no_grad():
        hidden = own.model[:2](own.x)
        passes = [own.rows(p) for p in own.likelihood.gradients(own.model(own.x), own.y, keys, "mc", 2)]
    rows = hidden if kind != "image" else hidden.permute(0, 2, 3, 1)
    phi = torch.cat([rows.reshape(SAMPLES, 4, -1), torch.ones(SAMPLES, 4, 1, dtype=torch.float64)], -1)
    tensors = found.blocks["2"].tensors()
    left, right = (tensors.get(f"{side}_basis") for side in ("output", "input"))
    if method == "diag":
        left, right, values = torch.eye(CLASSES)[None], torch.eye(phi.shape[-1])[None], tensors["diagonal"]
    else:
        values = tensors["eigenvalues"]
    truth = sum(
        (torch.einsum("ntc,cg->ntg", p, left[0].double()).square().flatten(0, 1)).T
        @ torch.einsum("nti,ia->nta", phi, right[0].double()).square().flatten(0, 1)
        for p in passes
    )
    torch.testing.assert_close(values[0], truth / SAMPLES, rtol=1e-9, atol=1e-12)


@EVERY
def test_evidence(kind: str) -> None:
    own = case(kind)
    found = fit(own, fisher="exact")
    logs = own.probs().log().gather(-1, own.labels.clamp(min=0)[..., None])[..., 0]
    log_likelihood = float((logs * own.counted).sum())
    assert found.evidence.log_likelihood == pytest.approx(log_likelihood, rel=1e-10)
    size = own.fisher().shape[0]
    precision = SAMPLES * own.fisher() + TAU * torch.eye(size, dtype=torch.float64)
    squares = sum(float(p.detach().square().sum()) for p in own.model.parameters())
    truth = log_likelihood - 0.5 * (float(precision.logdet()) - size * math.log(TAU) + TAU * squares)
    assert float(found.log_marginal_likelihood()) == pytest.approx(truth, rel=1e-9)


@EVERY
def test_drawn_scores_are_those_of_drawn_labels(kind: str) -> None:
    own = case(kind)
    outputs, keys = own.model(own.x).detach(), sample_keys([own.x], SAMPLES, 0)
    passes = list(own.likelihood.gradients(outputs, own.y, keys, "mc", 3))
    for draw, found in enumerate(passes):
        labels = own.likelihood.draw(outputs, keys, draw).masked_fill(own.y == -100, -100)
        torch.testing.assert_close(found, own.likelihood.score(outputs, labels) * 3**-0.5)


def test_drawn_labels_follow_the_probabilities() -> None:
    own = case("causal")
    outputs, keys = own.model(own.x).detach(), sample_keys([own.x], SAMPLES, 0)
    draws = torch.stack([own.likelihood.draw(outputs, keys, draw) for draw in range(1500)])
    shares = torch.nn.functional.one_hot(draws, CLASSES).double().mean(0)
    # the label at t + 1 is drawn from the outputs at t
    assert float((shares[:, 1:] - own.probs()[:, :-1]).abs().max()) < 0.06


# Predictions


def dense_covariance(own: Case, last: bool, posterior_fisher: Tensor) -> Tensor:
    """``(samples, positions, classes, classes)`` of the linearised model."""
    precision = SAMPLES * posterior_fisher + TAU * torch.eye(len(posterior_fisher), dtype=torch.float64)
    rows = own.jacobian(last)
    return torch.einsum("ntcw,wv,ntdv->ntcd", rows, precision.inverse(), rows)


@EVERY
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.covering(1)
def test_functional_covariance(kind: str, layers: str) -> None:
    own = case(kind)
    posterior = fit(own, fisher="exact", layers=layers)
    truth = dense_covariance(own, layers == "last", own.fisher(layers == "last"))
    for engine in ("exact", "auto"):
        head = uq.wrap(own.model, posterior, head="linearized", engine=engine)
        torch.testing.assert_close(head.functional_covariance(own.x), truth, rtol=1e-8, atol=1e-12)
        variance = head.functional_variance(own.x)
        assert variance.shape == own.model(own.x).shape
        diagonal = truth.diagonal(dim1=2, dim2=3)
        torch.testing.assert_close(own.rows(variance), diagonal, rtol=1e-8, atol=1e-12)
        picked = head.at([2, -1])
        torch.testing.assert_close(
            picked.functional_covariance(own.x), truth[:, [2, 3]], rtol=1e-8, atol=1e-12
        )
        joint = head.functional_covariance(own.x, joint=True).reshape(SAMPLES, 4, 3, SAMPLES, 4, 3)
        for n, t in ((0, 1), (4, 3)):
            torch.testing.assert_close(joint[n, t, :, n, t], truth[n, t], rtol=1e-8, atol=1e-12)
    drawn = uq.wrap(own.model, posterior, head="linearized", engine="jvp", n_probes=250)
    found = own.rows(drawn.functional_variance(own.x))
    assert float((found / truth.diagonal(dim1=2, dim2=3) - 1).abs().mean()) < 0.1


@pytest.mark.parametrize("method", ["inf", "kfac", "efb", "diag"])
def test_closed_form_is_that_of_backward_passes(method: str) -> None:
    own = case("image")
    posterior = fit(own, method, layers="last")
    closed, exact = (
        uq.wrap(own.model, posterior, head="linearized", engine=engine, memory_budget=budget)
        for engine, budget in (("auto", 1), ("exact", None))
    )
    truth = exact.functional_variance(own.x)
    torch.testing.assert_close(closed.functional_variance(own.x), truth, rtol=1e-6, atol=1e-12)
    for link in ("mc", "probit", "bridge"):
        predictions = [
            uq.wrap(own.model, posterior, head="linearized", engine=engine, link=link)(own.x)
            for engine in ("auto", "exact")
        ]
        torch.testing.assert_close(predictions[0].probs, predictions[1].probs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["inf", "kfac", "efb"])
def test_a_layer_without_gradients_has_the_prior(method: str) -> None:
    """Its Grams are zero, and so is their trace, by which a Kronecker product divides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).eval()
    nn.init.constant_(model[0].bias, -100.0)  # every unit is off
    data = [(torch.randn(8, 1, 6, 6), torch.arange(8) % 3)]
    posterior = uq.fit(model, data, method, layers="all", prior_precision=4.0, progress=False)
    torch.testing.assert_close(posterior.variance()["0.weight"], torch.full((2, 1, 3, 3), 0.25))


@EVERY
def test_linearised_prediction_against_draws(kind: str) -> None:
    own = case(kind)
    posterior = fit(own, fisher="exact", layers="last")
    covariance = dense_covariance(own, True, own.fisher(True))
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(CLASSES, dtype=torch.float64))
    normals = torch.randn(100_000, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = own.rows(own.model(own.x)).detach()
    prediction = uq.wrap(own.model, posterior, head="linearized", n_draws=1024)(own.x)
    assert isinstance(prediction, PositionPrediction)
    for n, t in ((0, 0), (2, 1), (5, 3)):
        draws = (mean[n, t] + normals @ root[n, t].T).softmax(-1)
        found = own.rows(prediction.probs)[n, t]
        assert float((found - draws.mean(0)).abs().max()) < 4e-3
        entropy = -(draws * draws.log()).sum(-1).mean()
        own_map = prediction.expected_entropy().reshape(SAMPLES, 4)
        assert float((own_map[n, t] - entropy).abs()) < 8e-3


@EVERY
def test_sampled_prediction(kind: str) -> None:
    own = case(kind)
    posterior = fit(own, fisher="exact")
    head = uq.wrap(own.model, posterior, head="sampling", n_samples=20)
    prediction, outputs = head(own.x), head.outputs(own.x)
    probs = torch.stack([own.rows(draw) for draw in outputs]).softmax(-1)
    torch.testing.assert_close(own.rows(prediction.probs), probs.mean(0))
    total = -(probs.mean(0) * probs.mean(0).log()).sum(-1)
    expected = -(probs * probs.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.entropy().reshape(SAMPLES, 4), total)
    torch.testing.assert_close(prediction.mutual_information().reshape(SAMPLES, 4), total - expected)
    torch.testing.assert_close(own.rows(prediction.logits_variance), own.rows(outputs.var(0)))
    positions = (2, 2) if kind == "image" else (4,)
    assert prediction.predicted().shape == (SAMPLES, *positions)
    logs = (probs.mean(0).log().gather(-1, own.labels.clamp(min=0)[..., None])[..., 0] * own.counted).sum(1)
    torch.testing.assert_close(prediction.log_prob(own.y), logs)
    quality = prediction.quality(own.y)
    assert quality["nll"] == pytest.approx(-float(logs.sum() / own.counted.sum()))
    right = (probs.mean(0).argmax(-1) == own.labels) & own.counted
    assert quality["accuracy"] == pytest.approx(float(right.sum() / own.counted.sum()))


@EVERY
def test_moments_head_gives_maps(kind: str) -> None:
    own = case(kind)
    posterior = fit(own, "diag", fisher="exact", layers="last")
    head = uq.wrap(own.model, posterior, head="moments")
    truth = uq.wrap(own.model, posterior, head="linearized").functional_variance(own.x)
    torch.testing.assert_close(head.functional_variance(own.x), truth, rtol=1e-9, atol=1e-12)
    prediction = head(own.x)
    assert prediction.entropy().shape == prediction.novelty().shape == own.y.shape


def test_reductions() -> None:
    own = case("image")
    prediction = uq.wrap(own.model, fit(own), head="sampling", n_samples=8)(own.x)
    entropy, mask = prediction.entropy(), own.y != -100
    torch.testing.assert_close(prediction.per_input(), entropy.mean((1, 2)))
    torch.testing.assert_close(prediction.per_input("entropy", "largest"), entropy.amax((1, 2)))
    cut = float(entropy.median())
    torch.testing.assert_close(prediction.per_input(above=cut), (entropy > cut).double().mean((1, 2)))
    masked = prediction.per_input("entropy", mask=mask)
    assert bool(masked[3].isnan()) and masked[0] == pytest.approx(float(entropy[0][mask[0]].mean()))
    assert prediction.per_input(entropy, "largest", mask=mask)[0] == entropy[0][mask[0]].max()
    torch.testing.assert_close(prediction.scores()["entropy"], entropy.mean((1, 2)))
    again = PositionPrediction.cat([prediction, prediction])
    assert len(again) == 12 and torch.equal(again.probs[6:], prediction.probs)
    assert torch.equal(again.picked(torch.arange(12) == 7).probs[0], prediction.probs[1])
    assert torch.equal(again.picked(slice(6, 12)).logits_mean, prediction.logits_mean)
    assert torch.equal(prediction.to("cpu").to_dict()["entropy"], entropy)


@EVERY
def test_novelty_of_positions(kind: str) -> None:
    """By the inputs of the last layer at a position, and the Grams of the positions that count."""
    own = case(kind)
    with torch.no_grad():
        hidden = own.model[:2](own.x)
    rows = hidden if kind != "image" else hidden.permute(0, 2, 3, 1)
    phi = torch.cat([rows.reshape(SAMPLES, 4, -1), torch.ones(SAMPLES, 4, 1, dtype=torch.float64)], -1)
    top = own.probs().argmax(-1)
    posterior = fit(own)
    shares = []
    counts = [int(((top == c) & own.counted).sum()) for c in range(CLASSES)]
    groups = [[c] for c in range(CLASSES) if counts[c] >= 10]
    rare = [c for c in range(CLASSES) if 0 < counts[c] < 10]
    for group in groups + ([rare] if rare else []):
        chosen = sum((top == c) for c in group).bool() & own.counted
        gram = phi[chosen].T @ phi[chosen]
        ridge = 3e-4 * float(gram.trace()) / len(gram)
        inverse = (gram + ridge * torch.eye(len(gram), dtype=torch.float64)).inverse()
        shares.append(ridge * torch.einsum("nti,ij,ntj->nt", phi, inverse, phi) / phi.square().sum(-1))
    truth = torch.stack(shares).amin(0)
    head = uq.wrap(own.model, posterior, head="linearized")
    found = head.novelty(own.x)
    assert found.shape == own.y.shape
    torch.testing.assert_close(found.reshape(SAMPLES, 4), truth, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(head(own.x).novelty(), found)
    torch.testing.assert_close(head.at([1])(own.x).novelty(), found.reshape(SAMPLES, 4)[:, 1:2])


class Upsampled(nn.Module):
    """A pointwise convolution on a coarse grid, enlarged, as torchvision's segmentation models end."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(2, 4, 2, stride=2), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.last(torch.relu(self.body(x)))
        return nn.functional.interpolate(coarse, size=x.shape[2:], mode="bilinear")


def segmentation(samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 2, 8, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    y[0, :2] = -100
    return x, y


@pytest.mark.parametrize("said_by", ["nothing", "labels", "weights"])
def test_novelty_on_a_coarser_grid(said_by: str) -> None:
    """Each pixel has the features of its feature position, which counts by the share of its pixels that count; in loops
    over pixels, of sizes that are no multiples of the grid.
    """
    torch.manual_seed(1)
    model = Upsampled().double()
    x, y = torch.randn(6, 2, 9, 7, dtype=torch.float64), torch.randint(0, CLASSES, (6, 9, 7))
    weights = torch.ones(6, 9, 7, dtype=torch.float64)
    if said_by == "labels":
        y[0, 1:], y[1:4, :1], y[4] = -100, -100, -100
    elif said_by == "weights":
        weights = torch.rand(6, 9, 7).double() * (torch.rand(6, 9, 7) < 0.6)
    options = {"prior_precision": 1.0, "layers": "last", "dtype": torch.float64, "progress": False}
    if said_by == "weights":
        options["batch_to_weights"] = lambda batch: batch[2]
    data = [
        tuple(part[rows] for part in ((x, y, weights) if said_by == "weights" else (x, y)))
        for rows in (slice(0, 4), slice(4, 6))
    ]
    posterior = uq.fit(model, data, "diag", **options)
    with torch.no_grad():
        phi = nn.functional.pad(torch.relu(model.body(x)).movedim(1, -1), (0, 1), value=1.0)
        top = model(x).argmax(1)
    near = [[math.floor(place * small / size) for place in range(size)] for small, size in ((4, 9), (3, 7))]
    area = [[own.count(place) for place in range(max(own) + 1)] for own in near]
    grams, counts = torch.zeros(CLASSES, 5, 5, dtype=torch.float64), [0.0] * CLASSES
    for n in range(6):
        for i, row in enumerate(near[0]):
            for j, column in enumerate(near[1]):
                often = float(weights[n, i, j]) * (y[n, i, j] >= 0) / (area[0][row] * area[1][column])
                grams[top[n, i, j]] += often * torch.outer(phi[n, row, column], phi[n, row, column])
                counts[int(top[n, i, j])] += float(often)
    rare = [c for c in range(CLASSES) if counts[c] < 10]
    of_classes = [grams[c] for c in range(CLASSES) if c not in rare] + [grams[rare].sum(0)] * any(
        counts[c] > 0 for c in rare
    )
    shares = []
    for gram in of_classes:
        ridge = 3e-4 * float(gram.trace()) / 5
        inverse = (gram + ridge * torch.eye(5, dtype=torch.float64)).inverse()
        shares.append(ridge * torch.einsum("nhwi,ij,nhwj->nhw", phi, inverse, phi) / phi.square().sum(-1))
    truth = torch.stack(shares).amin(0)
    assert posterior.features.source == "positions" and posterior.features.samples == round(sum(counts))
    found = uq.wrap(model, posterior, head="linearized")(x).novelty()
    torch.testing.assert_close(found, truth[:, near[0]][:, :, near[1]], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("head", ["sampling", "linearized", "moments"])
@pytest.mark.parametrize("kind", [Upsampled, image_net])
@pytest.mark.covering(1)
def test_defaults_files_and_evaluation(head: str, kind, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    x, y = segmentation() if kind is Upsampled else (case("image").x.float(), case("image").y)
    loader = list(zip(x.split(3), y.split(3), strict=True))
    posterior = uq.fit(model, loader, head=head, progress=False)
    assert posterior.history.head.criterion == "faithful"
    assert posterior.history.faithful.divergence <= 0.002 and posterior.features.source == "positions"
    predictor = uq.wrap(model, posterior)
    prediction = predictor(x)
    assert prediction.entropy().shape == y.shape
    outputs = model(x).detach()
    own = outputs.log_softmax(1)
    divergence = (own.exp() * (own - prediction.probs.log())).sum(1)[y != -100].mean()
    assert float(divergence) <= 0.0021
    path = tmp_path / "posterior.h5"
    uq.save(posterior, path)
    again = uq.wrap(model, uq.load(path, model))
    torch.testing.assert_close(again(x).probs, prediction.probs)
    if head != "sampling":
        assert prediction.novelty().shape == y.shape
    whole = predictor.predict(loader, progress=False)
    torch.testing.assert_close(whole.probs, prediction.probs)
    text = str(uq.evaluate(predictor, loader, progress=False))
    assert "NLL" in text and "ECE" in text


def test_the_faithful_prior_looks_at_some_thousand_positions() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 1).eval()
    x = torch.randn(40, 1, 16, 16)  # 256 positions each
    posterior = uq.fit(model, list(x.split(10)), progress=False)
    assert "on 16 training inputs" in posterior.history.tuning["prior precision"]
    large = uq.fit(model, list(torch.randn(20, 1, 32, 32).split(5)), progress=False)  # 1,024 positions each
    assert "on 16 training inputs" in large.history.tuning["prior precision"]


def test_held_out_data_tune_it() -> None:
    own = case("tokens")
    posterior = fit(own)
    posterior = uq.tune(posterior, own.loader(), progress=False)
    assert posterior.history.head.criterion == "likelihood"
    posterior = uq.tune(posterior, own.loader(), temperature=True, progress=False)
    assert 0.1 < posterior.temperature < 30


def test_files_keep_the_layout(tmp_path: Path) -> None:
    own = case("causal")
    posterior = fit(own, "diag")
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", own.model)
    assert loaded.likelihood.layout == LabelLayout(-1, -100, True)
    assert uq.Categorical().attributes() == {"name": "classification"}
    assert uq.Categorical.restore({"name": "classification"}).layout == LabelLayout()
    torch.testing.assert_close(
        uq.wrap(own.model, loaded)(own.x).probs, uq.wrap(own.model, posterior)(own.x).probs
    )


# Which positions


def test_positions_that_are_asked_for() -> None:
    own = case("image")
    posterior = fit(own, layers="last")
    whole = uq.wrap(own.model, posterior, head="linearized")(own.x)
    mask = torch.tensor([[False, True], [True, False]])
    for positions, flat in ((mask, [1, 2]), ([1, 2], [1, 2]), ([[0, 1], [-1, 0]], [1, 2]), (-1, [3])):
        part = uq.wrap(own.model, posterior, head="linearized", positions=positions)(own.x)
        assert part.positions == (len(flat),)
        torch.testing.assert_close(part.probs, whole.probs.flatten(2)[:, :, flat])
    head = uq.wrap(own.model, posterior, head="linearized")
    for positions, words in (
        (9, "go beyond the outputs"),
        (torch.ones(3, 3, dtype=torch.bool), "mask of shape"),
        (torch.zeros(2, 2, dtype=torch.bool), "mask of no position"),
        (0.5, "must be a whole number"),
        ([[0, 1, 1]], "3 numbers each"),
    ):
        with pytest.raises(uq.PosthocUQError, match=words):
            head.at(positions)(own.x)
    plain = nn.Sequential(nn.Linear(3, 2))
    flat = uq.fit(plain, [torch.randn(8, 3)], prior_precision=1.0, progress=False)
    with pytest.raises(uq.PosthocUQError, match="positions= picks positions of outputs that have some"):
        uq.wrap(plain, flat, head="linearized", positions=0)(torch.randn(2, 3))


def test_single_tokens_have_labels_of_their_own() -> None:
    own = case("causal")
    head = uq.wrap(own.model, fit(own), head="linearized")
    whole, last = head(own.x), head.at(1)(own.x)
    label = own.y[4:5, 2:3]  # that of position 1
    torch.testing.assert_close(
        last.log_prob_by_position(own.y[:, 2:3].clamp(min=0))[4, 0], whole.log_prob_by_position(own.y)[4, 1]
    )
    assert label.numel() == 1


def test_top_classes_by_backward_passes() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)).double()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    likelihood = uq.Categorical(class_dim=-1)
    exact = uq.KFAC(fisher="exact")  # the error below must not hang on which labels were drawn
    posterior = uq.fit(model, [x], exact, likelihood=likelihood, prior_precision=1.0, progress=False)
    full, top = (
        uq.wrap(model, posterior, head="linearized", positions=[1, 3], outputs=outputs, engine="exact")
        for outputs in ("all", 3)
    )
    truth, found = full.functional_variance(x), top.functional_variance(x)
    chosen = model(x)[:, [1, 3]].topk(3, -1).indices
    torch.testing.assert_close(found.gather(-1, chosen), truth.gather(-1, chosen))
    assert float((top(x).probs - full(x).probs).abs().max()) < 0.05


# Errors


# Memory


class Allocated(TorchDispatchMode):
    """The bytes of all tensors that are alive and were made inside, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self._seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._seen:
                    self._seen.add(key)
                    self.alive += size
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def test_streaming_takes_the_memory_that_it_states() -> None:
    generator = torch.Generator().manual_seed(0)
    shape, layout = (1, 1, 21, 128, 128), LabelLayout()

    def blocks(draws: int):
        for _ in range(draws):
            yield torch.randn(shape, generator=generator)

    one = 4 * math.prod(shape)
    peaks = []
    for draws in (3, 9):
        with Allocated() as memory:
            positions_of_draws(blocks(draws), layout)
        peaks.append(memory.peak / one)

    assert peaks[1] < 1.05 * peaks[0] and peaks[1] < 24


def test_masked_positions_do_not_count_in_the_numbers_of_an_input() -> None:
    own = case("tokens")
    predictor = uq.wrap(own.model, fit(own, "diag", fisher="exact", layers="last"))
    prediction = predictor(own.x)
    mask = torch.ones(len(prediction), *prediction.positions)
    mask[1, 1:] = 0
    masked = prediction.masked(mask)
    for name, values in prediction.scores_by_position().items():
        found = masked.scores()[name]
        torch.testing.assert_close(found[1], values[1, 0])
        torch.testing.assert_close(found[0], values[0].mean())
    parts = PositionPrediction.cat([masked, prediction])
    torch.testing.assert_close(parts.scores()["entropy"][: len(masked)], masked.scores()["entropy"])
    torch.testing.assert_close(parts.scores()["entropy"][len(masked) :], prediction.scores()["entropy"])


@pytest.mark.parametrize(
    "link", [*(pytest.param(link, marks=pytest.mark.study) for link in ("mc", "probit")), "bridge"]
)
def test_both_engines_give_one_prediction_at_positions(link: str) -> None:
    """By backward passes and by probes, whose error is Monte Carlo's: 0.03 at 1,200 probes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    x, labels = torch.randn(12, 2, 4, 4), torch.randint(0, 3, (12, 4, 4))
    posterior = uq.fit(model, [(x, labels)], "kfac", prior_precision=0.2, progress=False)
    exact, probed = (
        uq.wrap(model, posterior, link=link, engine=engine, **more)(x[:2]).probs
        for engine, more in (("exact", {}), ("jvp", {"n_probes": 1200}))
    )
    torch.testing.assert_close(probed, exact, rtol=0, atol=0.04)


def test_the_bridge_at_positions_is_that_of_the_dense_covariance() -> None:
    """Logits of one position with the covariance J Sigma J^T, given that their sum is zero, and the Laplace bridge
    (Hobbhahn, Kristiadi, Hennig 2022, equation 9) written out.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double().eval()
    x, labels = torch.randn(8, 2, 3, 4, dtype=torch.float64), torch.randint(0, 3, (8, 3, 4))
    posterior = uq.fit(model, [(x, labels)], "kfac", prior_precision=0.2, progress=False)
    found = uq.wrap(model, posterior, link="bridge", engine="exact")(x[:2]).probs.flatten(2)
    logits = model(x[:2]).detach().flatten(2)
    joint = posterior_helpers.dense_covariance(model, posterior, x[:2]).reshape(2, 3, 12, 2, 3, 12)
    for sample in range(2):
        for place in range(12):
            mean, covariance = logits[sample, :, place], joint[sample, :, place, sample, :, place]
            along, total = covariance.sum(1), covariance.sum()
            mean = mean - along * mean.sum() / total
            spread = (covariance - torch.outer(along, along) / total).diagonal()
            alpha = (1 - 2 / 3 + mean.exp() / 9 * (-mean).exp().sum()) / spread
            torch.testing.assert_close(found[sample, :, place], alpha / alpha.sum(), rtol=1e-8, atol=1e-10)
