"""``layers="everything"``: scales and offsets of normalisations, products with a vector, sums, and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from posterior_helpers import blocks_of, dense_covariance
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.layers import OneHotRows, Rows, operands
from posthoc_uq.methods import task


class Net(nn.Module):
    """An embedding with a row without a gradient and one of positions, two normalisations, a vector of scales, one of
    offsets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm(6)
        self.middle, self.batch, self.scale = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Parameter(torch.ones(5))
        self.last, self.places, self.bias = (
            nn.Linear(5, 3),
            nn.Parameter(torch.zeros(1, 4, 6)),
            nn.Parameter(torch.zeros(3)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.middle(self.norm(self.words(ids) + self.places).tanh())
        hidden = self.batch(hidden.transpose(1, 2)).transpose(1, 2)
        return self.bias + self.last((hidden.tanh() * self.scale).mean(1))


def network() -> Net:
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(7, (40, 4))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        net(ids)  # statistics of the batch
    return net.eval().double()


IDS = torch.randint(7, (40, 4), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(2))
NEW = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(3))
GIVEN: dict[str, Any] = {
    "layers": "everything",
    "prior_precision": 2.0,
    "fisher": "exact",
    "progress": False,
}


def jacobians(net: nn.Module, ids: Tensor, names: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """By all parameters or those of these names, ``(samples, outputs, parameters)``, and the outputs."""
    outputs = net(ids)
    parameters = [p for name, p in net.named_parameters() if names is None or name in names]
    rows = [
        torch.cat([g.to_dense().flatten() for g in torch.autograd.grad(out, parameters, retain_graph=True)])
        for row in outputs
        for out in row
    ]
    return torch.stack(rows).reshape(*outputs.shape, -1), outputs.detach()


def fisher_of(j: Tensor, outputs: Tensor) -> Tensor:
    p = outputs.softmax(1)
    inner = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("scp,scd,sdq->pq", j, inner, j)


def test_the_dense_and_the_diagonal_posterior_and_the_linearised_head(tmp_path: Path) -> None:
    net = network()
    fisher, (new, _) = fisher_of(*jacobians(net, IDS)), jacobians(net, NEW)
    inverse = torch.linalg.inv(fisher + 2 * torch.eye(len(fisher)))
    expected = {
        "full": torch.einsum("scp,pq,scq->sc", new, inverse, new),
        "diag": (new.square() / (fisher.diagonal() + 2)).sum(2),
    }
    for method, variance in expected.items():
        posterior = uq.fit(net, [(IDS[:25], LABELS[:25]), (IDS[25:], LABELS[25:])], method, **GIVEN)
        assert {layer.kind for layer in posterior.layers.values()} == {
            "linear",
            "scale",
            "embedding",
            "offset1d",
            "offset3d",
        }
        assert sum(p.numel() for p in posterior.mean.values()) == sum(p.numel() for p in net.parameters())
        found = uq.wrap(net, posterior).functional_variance(NEW)
        torch.testing.assert_close(found, variance, rtol=1e-9, atol=1e-12)
        uq.save(posterior, tmp_path / "p.h5")
        again = uq.wrap(net, uq.load(tmp_path / "p.h5", net)).functional_variance(NEW)
        assert torch.equal(again, found)


class Pairs(nn.Module):
    """Bags of words, one with a word that does not count, a vector for all samples, and a bilinear layer of both."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.one, self.two = (
            nn.EmbeddingBag(7, 4, mode=mode, padding_idx=0),
            nn.EmbeddingBag(7, 3, mode="sum"),
        )
        self.pair, self.last = nn.Bilinear(4, 3, 5), nn.Linear(5, 3)
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1.5, ids.shape[1], dtype=self.last.weight.dtype).expand(ids.shape)
        words = torch.cat([self.start.expand(len(ids), -1, -1), self.one(ids).unsqueeze(1)], 1).tanh().sum(1)
        return self.last(self.pair(words, self.two(ids, per_sample_weights=weights)).tanh())


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bilinear_layers_and_bags_of_embeddings(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Pairs(mode).eval().double()
    fisher, (new, _) = fisher_of(*jacobians(net, IDS)), jacobians(net, NEW)
    inverse = torch.linalg.inv(fisher + 2 * torch.eye(len(fisher)))
    posterior = uq.fit(net, [(IDS[:25], LABELS[:25]), (IDS[25:], LABELS[25:])], "full", **GIVEN)
    assert {name: layer.kind for name, layer in posterior.layers.items()} == {
        "one": "embedding",
        "two": "embedding",
        "start": "offset3d",
        "pair": "bilinear",
        "last": "linear",
    }
    expected = torch.einsum("scp,pq,scq->sc", new, inverse, new)
    torch.testing.assert_close(
        uq.wrap(net, posterior).functional_variance(NEW), expected, rtol=1e-9, atol=1e-12
    )
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.wrap(net, uq.load(tmp_path / "p.h5", net))
    torch.testing.assert_close(loaded.functional_variance(NEW), expected, rtol=1e-9, atol=1e-12)
    assert set(uq.fit(net, [(IDS, LABELS)], "inf", **GIVEN | {"layers": "all"}).layers) == {"pair", "last"}


class Rowwise(nn.Module):
    """Words in the way that a function looks them up."""

    def __init__(self, words: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.last, self.words = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3), words

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids, self.table).tanh())


def _by_offsets(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids.flatten(), table, torch.arange(0, ids.numel(), ids.shape[1]), mode="sum")


@pytest.mark.parametrize(
    "words",
    [
        lambda ids, table: F.embedding(ids, table, padding_idx=-1).sum(1),
        lambda ids, table: F.embedding(ids, table, sparse=True).sum(1),
        lambda ids, table: F.embedding_bag(ids, table, mode="sum", sparse=True),
        _by_offsets,
    ],
    ids=["a row from the end", "sparse", "sparse bags", "offsets"],
)
@pytest.mark.filterwarnings("ignore:Weights without a posterior")
def test_embeddings_by_their_arguments(words: Any) -> None:
    """Two samples without a row from the end come first: the proof does not see it."""
    torch.manual_seed(0)
    net, ids = Rowwise(words).eval().double(), torch.cat([IDS[(IDS != 6).all(1)], IDS])
    names = ["table", "last.weight", "last.bias"]
    fisher, (new, outputs) = fisher_of(*jacobians(net, ids, names)), jacobians(net, NEW, names)
    posterior = uq.fit(net, [(ids, torch.zeros(len(ids)).long())], "full", **GIVEN)
    assert set(posterior.mean) == set(names)
    expected = torch.einsum("scp,pq,scq->sc", new, torch.linalg.inv(fisher + 2 * torch.eye(len(fisher))), new)
    torch.testing.assert_close(
        uq.wrap(net, posterior).functional_variance(NEW), expected, rtol=1e-9, atol=1e-12
    )
    assert torch.equal(net(NEW), outputs)


def test_an_embedding_whose_gradients_depend_on_the_batch_stays_certain() -> None:
    torch.manual_seed(0)
    words = nn.EmbeddingBag(7, 4, mode="sum", scale_grad_by_freq=True)
    net = nn.Sequential(words, nn.Linear(4, 3)).eval()
    with pytest.warns(UserWarning, match="Weights without a posterior"):
        assert set(uq.fit(net, [(IDS, LABELS)], **GIVEN).layers) == {"1"}


@pytest.mark.parametrize("method", ["diag", "inf", "utvi"])
def test_every_method_and_head_with_bilinear_layers(method: str) -> None:
    torch.manual_seed(0)
    net = Pairs("mean").eval().double()
    given = (
        {"layers": "all", "epochs": 2, "progress": False} if method == "utvi" else GIVEN | {"layers": "all"}
    )
    posterior = uq.fit(net, [(IDS, LABELS)], method, **given | {"prior_precision": 1e4})
    linearised = uq.wrap(net, posterior, "linearized").functional_variance(NEW)
    drawn = uq.wrap(net, posterior, "sampling", n_samples=500).outputs(NEW).var(0)
    assert float((drawn / linearised - 1).abs().max()) < 0.3
    moments = uq.wrap(net, posterior, "moments").functional_variance(NEW)
    assert float((moments / linearised - 1).abs().max()) < 0.6


@pytest.mark.parametrize("method", ["kfac", "efb", "inf", "subnetwork"])
def test_every_method_and_head(method: str) -> None:
    """Draws of a narrow posterior have the variance of the linearised head; moments leave out what they do not know."""
    net = network()
    posterior = uq.fit(net, [(IDS, LABELS)], method, **GIVEN | {"prior_precision": 1e4})
    linearised = uq.wrap(net, posterior).functional_variance(NEW)
    drawn = uq.wrap(net, posterior, "sampling", n_samples=500).outputs(NEW).var(0)
    assert float((drawn / linearised - 1).abs().max()) < 0.3
    moments = uq.wrap(net, posterior, "moments").functional_variance(NEW)
    assert float((moments / linearised - 1).abs().max()) < 0.6


def test_what_is_chosen() -> None:
    net = network()
    fitted = {
        str(layers): list(uq.fit(net, [(IDS, LABELS)], **GIVEN | {"layers": layers}).layers)
        for layers in ("all", "last", ["norm"], ["words", "last"], ["scale"], ["places"])
    }
    assert fitted == {
        "all": ["middle", "last"],
        "last": ["last"],
        "['norm']": ["norm"],
        "['words', 'last']": ["words", "last"],
        "['scale']": ["scale"],
        "['places']": ["places"],
    }
    before = {name: value.clone() for name, value in net.state_dict().items()}
    uq.fit(net, [(IDS, LABELS)], **GIVEN)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_an_embedding_that_shares_its_weight_and_a_large_one() -> None:
    class Tied(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
            if rows < 100:
                self.out.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).tanh().mean(1))[:, :3]

    for rows in (7, 5000):  # each use as a weight of its own
        torch.manual_seed(0)
        posterior = uq.fit(Tied(rows).eval(), [(IDS, LABELS)], "diag", **GIVEN)
        assert list(posterior.layers) == ["words", "out"]
        assert "words.weight" not in posterior.history.deterministic


@pytest.mark.parametrize("method", ["inf", "kfac", "efb"])
def test_a_large_embedding_has_a_diagonal_beside_the_others_factors(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "LARGE_EMBEDDING", 5)
    monkeypatch.setattr(operands, "_USED_AT_ONCE", 12)
    net = network()
    options: dict[str, Any] = {"keep_grams": True} if method == "kfac" else {}
    posterior = uq.fit(net, [(IDS[:25], LABELS[:25]), (IDS[25:], LABELS[25:])], method, **GIVEN | options)
    kinds = {name: block.kind for name, block in posterior.blocks.items()}
    assert kinds.pop("words") == "diagonal" and set(kinds.values()) == {method}
    diagonal = uq.fit(net, [(IDS, LABELS)], "diag", **GIVEN).variance()["words.weight"]
    torch.testing.assert_close(posterior.variance()["words.weight"], diagonal, rtol=1e-9, atol=0)
    predictor, expected = uq.wrap(net, posterior), dense_covariance(net, posterior, NEW)
    torch.testing.assert_close(
        predictor.functional_covariance(NEW, joint=True), expected, rtol=1e-8, atol=1e-12
    )
    of_samples = predictor.functional_covariance(NEW)
    torch.testing.assert_close(of_samples, blocks_of(expected, len(NEW)), rtol=1e-8, atol=1e-12)
    uq.save(posterior, tmp_path / "p.h5")
    again = uq.wrap(net, uq.load(tmp_path / "p.h5", net)).functional_covariance(NEW)
    assert torch.equal(again, of_samples)
    half = uq.fit(net, [(IDS[:25], LABELS[:25])], method, **GIVEN | options)
    whole = uq.update(half, [(IDS[25:], LABELS[25:])], progress=False)
    torch.testing.assert_close(whole.variance()["words.weight"], diagonal, rtol=1e-9, atol=0)
    if method == "inf":
        given = {name: value for name, value in GIVEN.items() if name != "fisher"}
        other = uq.fit(net, [(IDS, LABELS)], uq.INF(bases=posterior, fisher="exact"), **given)
        assert other.blocks["words"].kind == "diagonal"


def test_rows_of_a_large_embedding_that_never_occur_keep_the_prior() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(30_000, 16, padding_idx=0), nn.Linear(16, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).tanh().mean(1))

    torch.manual_seed(0)
    net, ids = Words().eval().double(), 4_000 * IDS
    posterior = uq.fit(net, [(ids, LABELS)], **GIVEN)
    variance = posterior.variance()["words.weight"]
    occur = torch.zeros(30_000, dtype=torch.bool)
    occur[ids.unique()] = True
    occur[0] = False  # padding has no gradient
    assert bool((variance[~occur] == 0.5).all()) and bool((variance[occur] < 0.5).all())
    new, j = 4_000 * NEW, jacobians(net, 4_000 * NEW, ["words.weight"])[0]
    of_words = torch.einsum("scp,p->sc", j.square(), variance.flatten())
    both = uq.wrap(net, posterior).functional_variance(new)
    alone = uq.fit(net, [(ids, LABELS)], **GIVEN | {"layers": ["words"]})
    torch.testing.assert_close(uq.wrap(net, alone).functional_variance(new), of_words, rtol=1e-9, atol=1e-12)
    assert bool((both > of_words).all())


def test_rows_by_their_numbers_are_those_of_ones_and_zeros() -> None:
    places = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(0))
    dense = F.one_hot(places, 5).double().masked_fill((places == 2).unsqueeze(-1), 0).unsqueeze(1)
    chosen, rows = OneHotRows(places, 5, 2, torch.float64), Rows(dense)
    basis, gradients = torch.randn(1, 5, 4).double(), torch.randn(6, 1, 3, 2).double()
    weights = torch.rand(6).double()
    assert torch.equal(chosen.rows(), dense)
    torch.testing.assert_close(chosen.project(basis), rows.project(basis))
    torch.testing.assert_close(chosen.gradients(gradients, 1 << 20), rows.gradients(gradients, 1 << 20))
    part = torch.tensor([0, 3])
    assert torch.equal(chosen.part(part).rows(), dense[part])
    for name, arguments in (("add_gram", ()), ("add_sketch", (basis,))):
        sums = []
        for operand in (chosen, rows):
            total = torch.zeros(1, 5, 5 if name == "add_gram" else 4).double()
            getattr(operand, name)(total, *arguments, 1 << 20, weights)
            sums.append(total)
        torch.testing.assert_close(sums[0], sums[1])
