"""Graphs of torch_geometric, and lists of tensors: samples that no slice parts, each run by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch as Graphs
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, GINConv, global_mean_pool

import posthoc_uq as uq


def graph(seed: int, label: bool = True) -> Data:
    generator = torch.Generator().manual_seed(seed)
    nodes, kind = int(torch.randint(4, 10, (1,), generator=generator)), seed % 2
    edges = torch.randint(nodes, (2, (2 + kind) * nodes), generator=generator)
    x = torch.randn(nodes, 4, generator=generator) + kind
    return Data(x=x, edge_index=edges, **({"y": torch.tensor([kind])} if label else {}))


class Pooled(nn.Module):
    """Two rounds of messages, and a class for each graph; takes named arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.last = _layer(kind, 4), _layer(kind, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        hidden = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return self.last(global_mean_pool(hidden, batch))


class Whole(Pooled):
    """The same, which takes the graphs themselves."""

    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.batch)


def _layer(kind: str, inputs: int) -> nn.Module:
    if kind == "gin":
        return GINConv(nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 8)))
    return {"gcn": GCNConv, "gat": GATConv}[kind](inputs, 8)


def _network(kind: str, whole: bool = False) -> Pooled:
    torch.manual_seed(0)
    return (Whole if whole else Pooled)(kind).eval()


@pytest.mark.parametrize(("kind", "whole"), [("gcn", False), ("gin", True), ("gat", True)])
def test_a_class_for_each_graph(kind: str, whole: bool, tmp_path: Path) -> None:
    """The dense posterior and the linearised head against per-graph gradients in float64."""
    model = _network(kind, whole).double()
    graphs = [graph(seed) for seed in range(12)]
    for one in graphs:
        one.x = one.x.double()
    loader = DataLoader(graphs, batch_size=5)
    posterior = uq.fit(model, loader, "full", prior_precision=2.0, fisher="exact", progress=False)
    names = [name for layer in posterior.layers.values() for name in layer.parameter_names]
    parameters = [dict(model.named_parameters())[name] for name in names]

    def jacobian(one: Data) -> tuple[Tensor, Tensor]:
        single = Graphs.from_data_list([one])
        outputs = model(single) if whole else model(single.x, single.edge_index, single.batch)
        rows = [torch.autograd.grad(out, parameters, retain_graph=True) for out in outputs[0]]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]), outputs[0].detach()

    fisher = torch.zeros(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters)).double()
    for one in graphs:
        j, outputs = jacobian(one)
        p = outputs.softmax(0)
        fisher += j.T @ (p.diag() - p.outer(p)) @ j
    covariance = torch.linalg.inv(fisher + 2.0 * torch.eye(len(fisher)))
    new = [graph(seed, label=False) for seed in (20, 21, 22)]
    for one in new:
        one.x = one.x.double()
    predictor = uq.wrap(model, posterior)
    variances = predictor(Graphs.from_data_list(new)).logits_variance
    expected = torch.stack([(jacobian(one)[0] @ covariance * jacobian(one)[0]).sum(1) for one in new])
    torch.testing.assert_close(variances, expected, rtol=1e-6, atol=1e-9)
    assert torch.allclose(predictor.functional_variance(Graphs.from_data_list(new[:1])), expected[:1])
    with pytest.raises(uq.PosthocUQError, match="one graph"):
        predictor.functional_variance(Graphs.from_data_list(new))
    uq.save(posterior, tmp_path / "p.h5")
    again = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    assert torch.equal(again(Graphs.from_data_list(new)).probs, predictor(Graphs.from_data_list(new)).probs)


def test_the_first_minute_with_graphs() -> None:
    """Fit, predict and calibrate by default; batches do not matter, and the graphs stay as they were."""
    model, graphs = _network("gcn"), [graph(seed) for seed in range(36)]
    before = [one.clone() for one in graphs]
    posterior = uq.fit(model, DataLoader(graphs[:12], batch_size=5), progress=False)
    other = uq.fit(model, [(Graphs.from_data_list(graphs[:12]), torch.arange(12) % 2)], progress=False)
    assert posterior.settings.prior_precision == pytest.approx(other.settings.prior_precision, rel=1e-3)
    posterior = uq.calibrate(posterior, DataLoader(graphs[12:], batch_size=8), progress=False)
    predictor = uq.wrap(model, posterior)
    loader = DataLoader(graphs[12:], batch_size=24)
    prediction = predictor.predict(DataLoader(graphs[12:], batch_size=7), progress=False)
    (batch,) = loader
    assert torch.allclose(prediction.probs, predictor(batch).probs, atol=1e-6)
    assert torch.allclose(prediction.probs, predictor((batch, batch.y)).probs, atol=1e-6)
    assert prediction.set(0.9).shape == (24, 2) and prediction.familiarity().shape == (24,)
    sampled = uq.wrap(model, posterior, "sampling", n_samples=4)(batch)
    assert torch.equal(sampled.logits_mean.isfinite(), torch.ones(24, 2).bool())
    measured = uq.evaluate(predictor, loader, progress=False).metrics
    right = (prediction.predicted() == batch.y).double().mean()
    assert measured["linearized"]["accuracy"] == pytest.approx(float(right))
    for one, old in zip(graphs, before, strict=True):
        assert torch.equal(one.x, old.x) and torch.equal(one.y, old.y)
    with pytest.raises(uq.PosthocUQError, match="12 graphs with targets of 5 rows"):
        uq.fit(model, [(Graphs.from_data_list(graphs[:12]), torch.arange(5))], progress=False)


def test_a_class_for_each_node() -> None:
    """One graph, whose labelled nodes count: the diagonal is that of many draws of their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (40,), generator=generator)
    edges = torch.randint(40, (2, 160), generator=generator)
    x = F.one_hot(labels, 4) + 0.5 * torch.randn(40, 4, generator=generator)
    known = torch.rand(40, generator=generator) < 0.5
    data = Data(x=x, edge_index=edges, y=labels, known=known)
    torch.manual_seed(0)
    model = GCNConv(4, 4, bias=False).eval()

    def masked(data: Data) -> Tensor:
        return data.y.masked_fill(~data.known, -100)

    posterior = uq.fit(model, [data], "diag", batch_to_targets=masked, prior_precision=1.0, progress=False)
    report = str(posterior.report())
    assert "labels drawn per sample: 32" in report and "samples: 1" in report
    exact = uq.fit(
        model, [data], "diag", batch_to_targets=masked, prior_precision=1.0, fisher="exact", progress=False
    )
    weight = model.lin.weight
    outputs, fisher = model(x, edges), torch.zeros_like(weight)
    for node in known.nonzero().flatten():
        gradients = [torch.autograd.grad(out, weight, retain_graph=True)[0] for out in outputs[node]]
        j, p = torch.stack([g.flatten() for g in gradients]), outputs[node].detach().softmax(0)
        fisher += (j.T @ (p.diag() - p.outer(p)) @ j).diagonal().reshape(weight.shape)
    (found,), (drawn,) = ([*p.variance().values()] for p in (exact, posterior))
    torch.testing.assert_close(found.reshape(weight.shape), 1 / (fisher + 1), rtol=1e-4, atol=1e-6)
    assert float((drawn - found).abs().mean() / found.mean()) < 0.3
    prediction = uq.wrap(model, posterior)(data)
    assert prediction.predicted().shape == (1, 40) and prediction.log_prob(masked(data)[None]).shape == (1,)


def test_models_that_take_lists() -> None:
    """Each item is a sample: the same as bags of one size as a tensor."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, bags: Any) -> Tensor:
            return torch.stack([self.last(self.first(bag).tanh().mean(0)) for bag in bags])

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 5, 3, generator=generator), torch.arange(24) % 2
    torch.manual_seed(0)
    model = Bags().eval()
    options: dict[str, Any] = {"layers": "all", "prior_precision": 3.0, "progress": False}
    posterior = uq.fit(model, [(list(x[:10]), y[:10]), (list(x[10:]), y[10:])], "kfac", **options)

    class Padded(Bags):
        def forward(self, bags: Tensor) -> Tensor:
            return self.last(self.first(bags).tanh().mean(1))

    padded = Padded().eval()
    padded.load_state_dict(model.state_dict())
    same = uq.fit(padded, [(x, y)], "kfac", **options)
    ragged = [x[0], x[1][:2], x[2][:4]]
    of_list, of_tensor = uq.wrap(model, posterior), uq.wrap(padded, same)
    torch.testing.assert_close(of_list(list(x[:3])).probs, of_tensor(x[:3]).probs, rtol=1e-4, atol=1e-6)
    alone = torch.cat([of_tensor(bag[None]).probs for bag in ragged])
    torch.testing.assert_close(of_list((ragged, y[:3])).probs, alone, rtol=1e-4, atol=1e-6)
