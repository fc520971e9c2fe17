"""The sparse information form as an approximation of the Fisher: the order of the family, exact diagonals, the sketch,
regression; bases from a share of the samples, and from an earlier posterior.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import batches, heads_of, inputs_of, mlp
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.core import Batch, eigh_descending, sample_keys, share_of
from posthoc_uq.curvature.kept_inputs import Picked
from posthoc_uq.methods.inf import basis_share, kept_entries, sparsify
from posthoc_uq.posteriors import InformationBlock, maximise_evidence


def _digits(width: int = 16) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small trained classifier of the scikit-learn digits, pooled to 4 x 4, in float64."""
    data = load_digits()
    x = torch.tensor(data.images / 16.0).unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2)).flatten(1)[:600]
    y = torch.tensor(data.target)[:600]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10)).double()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model, x, y


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return _digits()


def exact_blocks(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer blocks of the Fisher, from autograd's gradient of every sample and class; rows are (weights,
    bias) of an output.
    """
    blocks: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        total = 0
        for sample in x:
            log_probs = model(sample.unsqueeze(0)).log_softmax(1)[0]
            for log_prob in log_probs:
                w, b = torch.autograd.grad(log_prob, [layer.weight, layer.bias], retain_graph=True)
                row = torch.cat([w, b.unsqueeze(1)], dim=1).flatten()
                total = total + log_prob.exp().detach() * torch.outer(row, row)
        blocks[name] = total / len(x)
    return blocks


@pytest.fixture(scope="module")
def fishers(trained) -> dict[str, torch.Tensor]:
    model, x, _ = trained
    return exact_blocks(model, x[:60])


def _fit(trained, method: str, **options):
    model, x, _ = trained
    return uq.fit(
        model,
        [x[:32], x[32:60]],
        method=method,
        fisher="exact",
        prior_precision=1.0,
        progress=False,
        **options,
    )


def test_order_of_the_family(trained, fishers):
    """Lemma 1 and corollary 1: unclamped INF at full rank is no worse than EFB, and EFB than KFAC, in
    Frobenius norm.
    """
    efb, kfac, inf = _fit(trained, "efb"), _fit(trained, "kfac"), _fit(trained, "inf", rank=10**9)
    for name, exact in fishers.items():
        basis, diagonal = efb.blocks[name].dense()[0], exact.diagonal()
        unclamped = basis + torch.diag(diagonal - basis.diagonal())
        errors = [
            torch.linalg.matrix_norm(exact - m).item()
            for m in (unclamped, basis, kfac.blocks[name].dense()[0])
        ]
        assert errors[0] <= errors[1] <= errors[2]
        assert errors[0] < errors[2]
        # At full rank INF keeps the whole basis: its low-rank part before the correction is EFB's.
        block = inf.blocks[name]
        low_rank = InformationBlock(
            block.input_basis, block.output_basis, block.eigenvalues, block.diagonal, "none"
        )
        torch.testing.assert_close(low_rank.dense()[0], basis, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("rank", [1, 5, 40, 0.05, 0.5, 10**9])
def test_rescaling_keeps_the_diagonal_and_stays_positive(trained, fishers, rank):
    posterior = _fit(trained, "inf", rank=rank)
    for name, exact in fishers.items():
        dense = posterior.blocks[name].dense()[0]
        torch.testing.assert_close(dense.diagonal(), exact.diagonal(), atol=1e-10, rtol=1e-9)
        assert torch.linalg.eigvalsh(dense).min() > -1e-12 * dense.diagonal().max()


@pytest.mark.parametrize("rank", [5, 40, 10**9])
def test_clamping_is_exact_where_nothing_is_clamped(trained, fishers, rank):
    posterior = _fit(trained, "inf", rank=rank, correction="clamp")
    shares = []
    for name, exact in fishers.items():
        block = posterior.blocks[name]
        clamped = (block.low_rank_diagonal() > block.diagonal).flatten()
        found, expected = block.dense()[0].diagonal(), exact.diagonal()
        torch.testing.assert_close(found[~clamped], expected[~clamped], atol=1e-10, rtol=1e-9)
        assert (found[clamped] > expected[clamped]).all()
        assert posterior.report().rows[len(shares)]["corrected"] == pytest.approx(
            clamped.double().mean().item()
        )
        shares.append(clamped.double().mean())
    assert max(shares) > 0


def test_rank_selects_the_largest_eigenvalues(trained):
    efb, inf = _fit(trained, "efb"), _fit(trained, "inf", rank=12)
    for name, block in inf.blocks.items():
        values = efb.blocks[name].eigenvalues[0]
        threshold = values.flatten().sort(descending=True).values[11]
        top = values >= threshold
        rows, columns = top.any(1), top.any(0)
        assert block.eigenvalues.shape[1:] == (rows.sum(), columns.sum())
        torch.testing.assert_close(block.eigenvalues[0], values[rows][:, columns], atol=1e-12, rtol=1e-8)


def test_share_of_the_rank():
    assert kept_entries(0.05, (1, 10, 20)) == 10
    assert kept_entries(1e9, (1, 10, 20)) == 200


def test_groups_share_the_rank():
    """Of two groups, only the one with the large eigenvalues keeps directions; the other is left its
    diagonal.
    """
    eye = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    values = torch.stack([torch.full((3, 3), 5.0), torch.full((3, 3), 0.1)]).double()
    block = sparsify(eye, eye, values, values, 4)
    assert (block.eigenvalues[0] > 0).sum() >= 4
    assert (block.eigenvalues[1] == 0).all()
    torch.testing.assert_close(block.dense().diagonal(dim1=1, dim2=2), values.flatten(1))


def test_sketch_against_exact_basis():
    """On a trained net the sketched bases span the exact leading directions, and INF's error barely grows."""
    trained = _digits(width=48)
    model, x, _ = trained
    fishers = exact_blocks(model, x[:40])
    exact = uq.fit(
        model, [x[:40]], fisher="exact", rank=10, basis="exact", prior_precision=1.0, progress=False
    )
    sketch = uq.fit(
        model, [x[:40]], fisher="exact", rank=10, basis="sketch", prior_precision=1.0, progress=False
    )
    for name, truth in fishers.items():
        # The leading input direction: cosine of the angle between the two spans.
        first, second = exact.blocks[name].input_basis[0], sketch.blocks[name].input_basis[0]
        width = min(first.shape[1], second.shape[1], 3)
        cosines = torch.linalg.svdvals(first[:, :width].T @ second[:, :width])
        assert cosines.min() > 0.98
        errors = [torch.linalg.matrix_norm(truth - p.blocks[name].dense()[0]).item() for p in (exact, sketch)]
        assert errors[1] <= 1.02 * errors[0]
    wide = uq.fit(model, [x[:40]], fisher="exact", rank=1, basis="auto", prior_precision=1.0, progress=False)
    assert all(block.input_basis.shape[-1] == 1 for block in wide.blocks.values())


@pytest.mark.parametrize("method", ["kfac", "efb", "inf", "full"])
def test_closed_form_linear_regression(method):
    """One layer, one output: the Fisher is exactly Kronecker, so the posterior is that of Bayesian linear
    regression.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64, generator=generator)
    y = (
        x @ torch.tensor([1.0, -2.0, 0.5, 0.0]).double()
        + 0.3
        + 0.2 * torch.randn(50, dtype=torch.float64, generator=generator)
    )
    tau, noise = 0.7, 0.04
    design = torch.cat([x, torch.ones(50, 1, dtype=torch.float64)], dim=1)
    covariance = torch.linalg.inv(design.T @ design / noise + tau * torch.eye(5, dtype=torch.float64))
    theta = covariance @ design.T @ y / noise
    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.copy_(theta[:4].unsqueeze(0))
        model.bias.copy_(theta[4:])
    options = {"rank": 10**9} if method == "inf" else {}
    loader = [(x[:20], y[:20]), (x[20:], y[20:])]
    posterior = uq.fit(
        model,
        loader,
        method=method,
        likelihood="regression",
        fisher="exact",
        noise_variance=noise,
        prior_precision=tau,
        progress=False,
        **options,
    )
    (layer,) = posterior.layers
    unit = torch.eye(5, dtype=torch.float64).reshape(5, 1, 1, 5)
    torch.testing.assert_close(posterior.quadratic({layer: unit}), covariance, atol=1e-10, rtol=1e-8)
    # log p(y) of the Gaussian model, exactly; Laplace is exact here.
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(50, dtype=torch.float64),
        design @ design.T / tau + noise * torch.eye(50, dtype=torch.float64),
    ).log_prob(y)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), marginal, atol=1e-6, rtol=1e-8)


def test_diagonal_posterior_is_the_diagonal_of_the_closed_form_precision():
    x = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(3, 1, bias=False).double()
    posterior = uq.fit(
        model,
        [(x, x.sum(1))],
        method="diag",
        likelihood="regression",
        fisher="exact",
        noise_variance=0.5,
        prior_precision=2.0,
        progress=False,
    )
    expected = 1 / ((x**2).sum(0) / 0.5 + 2.0)
    torch.testing.assert_close(posterior.variance()["weight"][0], expected, atol=1e-12, rtol=1e-9)


def test_eigenvectors_when_torch_does_not_converge(monkeypatch):
    """A solver that fails on a finite Gram must not cost the fit; another one takes over."""
    rows = torch.randn(12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = (rows.T @ rows).unsqueeze(0)
    expected, _ = eigh_descending(gram)

    def fails(*_: object) -> None:
        raise torch.linalg.LinAlgError("The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = eigh_descending(gram)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close((vectors * values.unsqueeze(1)) @ vectors.mT, gram, atol=1e-10, rtol=1e-10)


def test_eigenvectors_of_a_gram_with_dead_inputs():
    """Inputs that are always zero are unit eigenvectors; the basis stays orthonormal and complete."""
    rows = torch.randn(40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[:, [0, 3, 4, 11]] = 0
    gram = (rows.T @ rows).unsqueeze(0)
    values, vectors = eigh_descending(gram)
    torch.testing.assert_close(
        values[0], torch.linalg.eigvalsh(gram[0]).flip(0).clamp(min=0), atol=1e-10, rtol=1e-10
    )
    torch.testing.assert_close(
        vectors[0].T @ vectors[0], torch.eye(12, dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close((vectors * values.unsqueeze(1)) @ vectors.mT, gram, atol=1e-10, rtol=1e-10)
    assert (values[0, -4:] == 0).all()


def test_a_grid_too_large_is_halved_and_said(trained, monkeypatch):
    """Nothing computed is lost: the rank is halved until the small system fits, and the layer is named."""
    monkeypatch.setattr("posthoc_uq.methods.inf._GRID_LIMIT", 8 * 60**2)
    with pytest.warns(UserWarning, match=r"Layer '0': rank 100 .* is kept instead"):
        posterior = _fit(trained, "inf", rank=100)
    for block in posterior.blocks.values():
        assert block.eigenvalues.numel() <= 60


def test_copies_of_inputs_are_said_to_share_labels(trained):
    model, x, _ = trained
    copies = x[:4].repeat(50, 1)
    with pytest.warns(UserWarning, match="copies of others"):
        uq.fit(model, [copies], fisher="mc", prior_precision=1.0, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gram_of_few_rows_is_decomposed_in_its_range(dtype):
    """The same eigenpairs, with an orthonormal and complete basis, without an eigenproblem of the whole size."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 60, 520, dtype=dtype, generator=generator) * (torch.arange(520) + 1.0) ** -0.5
    rows[:, :, 7] = 0  # a dead input
    rows[1, 30:] = 0  # fewer rows than are said
    gram = rows.mT @ rows
    values, vectors = eigh_descending(gram, 60)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = torch.linalg.eigvalsh(gram.double()).flip(-1).clamp(min=0)
    torch.testing.assert_close(values.double(), expected, atol=tolerance * float(expected.max()), rtol=0)
    assert values.dtype == vectors.dtype == dtype and bool((values[:, 71:] == 0).all())
    identity = torch.eye(520, dtype=dtype).expand(2, -1, -1)
    torch.testing.assert_close(vectors.mT @ vectors, identity, atol=tolerance, rtol=0)
    rebuilt = (vectors * values.unsqueeze(1)) @ vectors.mT
    torch.testing.assert_close(rebuilt, gram, atol=tolerance * float(expected.max()), rtol=0)
    whole = eigh_descending(gram, 400)  # too many rows for that
    torch.testing.assert_close(whole[0], values, atol=tolerance * float(expected.max()), rtol=0)


def test_few_samples_of_a_wide_layer_leave_kronecker_factors_exact():
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(600, 2, dtype=torch.float64)
    x = torch.randn(40, 600, dtype=torch.float64, generator=generator)
    posterior = uq.fit(model, list(x.split(16)), method="kfac", prior_precision=1.0, progress=False)
    (block,) = posterior.blocks.values()
    wide = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], dim=1)
    rebuilt = (block.input_basis * block.input_eigenvalues.unsqueeze(1)) @ block.input_basis.mT
    torch.testing.assert_close(rebuilt[0], wide.T @ wide / 40, atol=1e-12, rtol=1e-9)


def test_a_search_by_the_evidence_computes_what_no_prior_changes_once(trained, monkeypatch):
    """Once for each block where memory allows, and at every trial where not; the result is the same."""
    called, found = list[InformationBlock](), list[float]()
    own = InformationBlock.low_rank_diagonal
    monkeypatch.setattr(
        InformationBlock, "low_rank_diagonal", lambda block: called.append(block) or own(block)
    )
    for budget in (2**28, 0):
        posterior = _fit(trained, "inf", rank=6)
        monkeypatch.setattr("posthoc_uq.posteriors.search.TEMPORARY_BYTES", budget)
        called.clear()
        posterior = maximise_evidence(posterior)
        trials = posterior.history.trials
        assert trials is not None
        assert len(called) == len(posterior.blocks) * (1 if budget else len(trials.trials))
        assert all(block._kept is None for block in posterior.blocks.values())  # let go
        found.append(posterior.prior_precision)
    assert found[0] == found[1] and len(trials.trials) > 3


def test_a_layer_that_keeps_no_direction_serves_every_head() -> None:
    model, x = mlp(), inputs_of(4)
    with torch.no_grad():
        model[2].weight.zero_()  # no gradient reaches the first layer
    posterior = uq.fit(model, batches(x, torch.arange(24) % 3), "inf", prior_precision=2.0, progress=False)
    assert posterior.blocks["0"].tensors()["eigenvalues"].numel() == 0
    for head in heads_of(posterior):
        predictor = uq.wrap(model, posterior, head)
        assert (
            predictor(x).probs.isfinite().all()
            and predictor.functional_samples(x, n_samples=2).isfinite().all()
        )
        assert predictor.novelty(x).isfinite().all()
    inputs = torch.cat([x, torch.ones(24, 1)], 1).double()
    of_prior = inputs.square().sum(1, keepdim=True).expand(24, 5) / 2  # weights as the prior has them
    covariance = posterior.of_layer("0").prepared(torch.float64, inputs.device, 2**20)
    torch.testing.assert_close(covariance.output_variance(inputs.unsqueeze(1)).squeeze(1), of_prior)
    torch.testing.assert_close(covariance.variances_of(inputs), of_prior)
    torch.testing.assert_close(covariance.output_covariance(inputs), torch.diag_embed(of_prior))


# Bases from a share of the samples, and from an earlier posterior

OPTIONS: dict[str, Any] = {"prior_precision": 1.0, "rank": 12, "dtype": torch.float64, "progress": False}


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return torch.randn(90, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()


class _Counting:
    """A loader that counts how often it is read."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.reads = batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_picked_samples_come_in_batches_no_larger_than_the_loaders(inputs: Tensor) -> None:
    mask = torch.ones(4)

    def handed_out(size: int, share: float) -> list[tuple[Batch, Tensor, str]]:
        picked, parts = Picked(share), []
        for index, part in enumerate(inputs.split(size)):
            batch = Batch((part,), part[:, 0], {"mask": mask}, part[:, 1].abs())
            parts += picked.add(batch, sample_keys([part], len(part), 0), index)
        waiting = bool(picked.waiting)
        rest = list(picked.rest())
        assert waiting == bool(rest) and not picked.waiting
        return parts + rest

    wanted = inputs[share_of(sample_keys([inputs], 90, 0), 0.3)]
    for size in (1, 7, 30, 90):
        parts = handed_out(size, 0.3)
        assert torch.equal(torch.cat([batch.args[0] for batch, _, _ in parts]), wanted)
        assert max(len(keys) for _, keys, _ in parts) <= size
        for batch, keys, _ in parts:
            assert torch.equal(keys, sample_keys([batch.args[0]], len(keys), 0))
            assert batch.targets is not None and batch.weights is not None
            assert torch.equal(batch.targets, batch.args[0][:, 0])
            assert torch.equal(batch.weights, batch.args[0][:, 1].abs())
            assert torch.equal(batch.kwargs["mask"], mask)
    assert len(handed_out(7, 0.3)) < 10 and "to" in handed_out(7, 0.3)[0][2]
    assert [place for _, _, place in handed_out(30, 1.0)] == ["0", "1", "2"]


def test_batches_that_differ_beside_their_samples_are_not_joined() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(4) * 2**40

    def parts(*batches: Batch) -> int:
        picked = Picked(0.9)
        found = [part for n, batch in enumerate(batches) for part in picked.add(batch, keys[:2], n)]
        return len(found + list(picked.rest()))

    assert bool(share_of(keys[:2], 0.9).all())
    first = Batch((x[:2],), kwargs={"mask": torch.ones(4), "scale": 2})
    assert parts(first) == 1
    for other in (
        Batch((x[:2, :3],), kwargs=first.kwargs),
        Batch((x[:2],), kwargs={"mask": torch.zeros(4), "scale": 2}),
        Batch((x[:2],), kwargs={"mask": torch.ones(4), "scale": 3}),
        Batch((x[:2].double(),), kwargs=first.kwargs),
    ):
        assert parts(first, other) == 2


def test_the_size_of_batches_does_not_change_bases_from_a_share(
    inputs: Tensor, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posthoc_uq.methods.inf.FEWEST_BASIS_SAMPLES", 36)
    small, large = (
        uq.fit(network, list(inputs.split(size)), basis_fraction=fraction, **OPTIONS)
        for size, fraction in ((7, 0.4), (45, "auto"))
    )
    assert small.history.fit["basis fraction"] == large.history.fit["basis fraction"] == 0.4
    for name, block in small.blocks.items():
        torch.testing.assert_close(block.dense(), large.blocks[name].dense(), rtol=1e-9, atol=1e-12)


def test_auto_takes_all_samples_of_small_data_and_of_loaders_that_do_not_say_how_many(
    inputs: Tensor, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list(inputs.split(30))
    whole = uq.fit(network, parts, basis_fraction=1.0, **OPTIONS)
    few = uq.fit(network, parts, **OPTIONS)
    monkeypatch.setattr("posthoc_uq.methods.inf.FEWEST_BASIS_SAMPLES", 10)

    class Unsized:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(parts)

    unsized = uq.fit(network, Unsized(), **OPTIONS, fisher="exact")
    for found in (few, unsized):
        assert "basis fraction" not in found.history.fit
        for name, block in found.blocks.items():
            assert torch.equal(block.dense(), whole.blocks[name].dense())


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        (None, 1.0),
        (48, 1.0),
        (300, 1.0),
        (600, 0.5),
        (3000, 0.1),
        (20_000, 0.1),
        (50_000, 0.1),
        (500_000, 0.01),
    ],
)
def test_auto_takes_a_tenth_but_neither_few_nor_many(samples: int | None, share: float) -> None:
    assert basis_share(samples) == pytest.approx(share)


def test_an_error_in_joined_batches_names_them(inputs: Tensor, network: nn.Module) -> None:
    spoilt = inputs.clone()
    spoilt[share_of(sample_keys([inputs], 90, 0), 0.4)] *= float("inf")
    with pytest.raises(PosthocUQError, match=r"Batch \d+ to \d+: the model's outputs are not finite"):
        uq.fit(network, list(_nan_after(spoilt, inputs)), basis_fraction=0.4, seed=0, **OPTIONS)


def _nan_after(spoilt: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """The first batch as it was, since the dry run looks at it."""
    yield inputs[:7]
    yield from spoilt[7:].split(7)


def test_bases_of_an_earlier_posterior_make_a_fit_of_one_sweep(inputs: Tensor, network: nn.Module) -> None:
    parts = list(inputs.split(30))
    first = uq.fit(network, parts, **OPTIONS)
    loader = _Counting(parts)
    again = uq.fit(network, loader, bases=first, **OPTIONS)
    two = _Counting(parts)
    uq.fit(network, two, **OPTIONS)
    assert two.reads == loader.reads + 1
    for name, block in again.blocks.items():  # the same data in the same directions
        torch.testing.assert_close(block.dense(), first.blocks[name].dense(), rtol=1e-9, atol=1e-12)
    by_efb = uq.fit(network, parts, method="efb", **{k: v for k, v in OPTIONS.items() if k != "rank"})
    full = uq.fit(network, parts, bases=by_efb, **OPTIONS | {"rank": 48})
    for name, block in full.blocks.items():  # the diagonal is that of the data, in any bases
        diagonals = (b.dense().diagonal(dim1=-2, dim2=-1) for b in (block, first.blocks[name]))
        torch.testing.assert_close(*diagonals, rtol=1e-9, atol=1e-12)
