"""What does not depend on the weights that have a posterior runs once for a batch, and the numbers stay the same."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch, replicate
from posthoc_uq.heads import FeatureCache
from posthoc_uq.layers import FrozenPart


class Block(nn.Module):
    """A residual block whose activation writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found = self.two(self.act(self.norm(self.one(x))))
        found += x
        return self.act(found)


class Residual(nn.Module):
    """As torchvision's networks: a flattening between the pooling and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(1, 4, 3), Block(4), Block(4)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        return self.head(torch.flatten(self.pool(self.second(self.first(x))), 1))


class Rewriting(nn.Module):
    """The last layer's input is written after it was made, and the outputs lose a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        doubled = hidden * 2
        hidden.tanh_()
        return self.head(hidden.add_(doubled)).squeeze(-1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, other: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(x) * scale + self.right(other))
        return {"logits": self.head(hidden), "hidden": hidden}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder, self.pool = nn.TransformerEncoder(layer, 2), nn.Linear(8, 8)
        self.end = nn.Sequential(nn.Tanh(), nn.Linear(8, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.pool(self.encoder(self.embed(tokens))[:, 0]))


def _images() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(12, 1, 7, 7),), {}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], list[str]]] = {
    "last layer": (Residual, _images, ["head"]),
    "last block": (Residual, _images, ["second.one", "second.two", "head"]),
    "changes in place": (Rewriting, lambda: ((torch.randn(12, 6),), {}), ["head"]),
    "two inputs": (
        TwoInputs,
        lambda: ((torch.randn(12, 4),), {"other": torch.randn(12, 2), "scale": 0.5}),
        ["head"],
    ),
    "end of a sequence": (Transformer, lambda: ((torch.randint(0, 11, (12, 5)),), {}), ["end.1", "end.3"]),
}


def _setting(name: str) -> tuple[nn.Module, uq.Posterior, tuple[Any, ...], dict[str, Any]]:
    build, inputs, layers = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(), module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
        args, kwargs = inputs()
    args = tuple(x.double() if x.is_floating_point() else x for x in args)
    kwargs = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    regression = name == "changes in place"
    posterior = uq.fit(
        model,
        [torch.arange(12.0).double() if regression else torch.arange(12) % 3],
        method="kfac",
        likelihood="regression" if regression else "classification",
        layers=layers,
        prior_precision=2.0,
        batch_to_inputs=lambda batch: args if not kwargs else {"x": args[0], **kwargs},
        batch_to_targets=lambda batch: batch,
        progress=False,
    )
    return model, posterior, args, kwargs


def _members(model: nn.Module, posterior: uq.Posterior, count: int, args: Any, kwargs: Any) -> Tensor:
    """Outputs of whole models with drawn weights in place, one after the other."""
    draws = posterior.sample(count, torch.Generator().manual_seed(0))
    found = []
    for index in range(count):
        member = copy.deepcopy(model)
        member.load_state_dict({k: d[index] for k, d in draws.items()}, strict=False)
        with torch.no_grad():
            output = member(*copy.deepcopy(args), **kwargs)
        found.append(output["logits"] if isinstance(output, dict) else output)
    return torch.stack(found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.covering(1)
def test_draws_are_those_of_whole_models(name: str, batched: bool) -> None:
    model, posterior, args, kwargs = _setting(name)
    before = copy.deepcopy(model.state_dict())
    expected = _members(model, posterior, 5, args, kwargs)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=5, batched=batched)
    for _ in range(2):
        torch.testing.assert_close(predictor.outputs(*args, **kwargs), expected, rtol=1e-9, atol=1e-9)
    assert predictor.ensemble.frozen.refused is None and predictor.ensemble.refused is None
    features = predictor.features(*args, **kwargs)
    assert features is not None
    few = predictor.outputs(*(x[:3] for x in args), **{k: _first(v, 3) for k, v in kwargs.items()})
    torch.testing.assert_close(few, expected[:, :3], rtol=1e-9, atol=1e-9)
    predictor = predictor.with_posterior(posterior, 0)
    for _ in range(2):  # what follows may write into features
        found = predictor.distribution_from(features)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all("forward" not in module.__dict__ and not module._forward_hooks for module in model.modules())


def _first(value: Any, count: int) -> Any:
    return value[:count] if isinstance(value, Tensor) else value


HEADS = [
    (name, "linearized", options) for name in CASES for options in ({}, {"engine": "jvp", "n_probes": 4})
]
HEADS += [(name, "moments", {}) for name in ("last layer", "two inputs")]  # whose functions have rules


@pytest.mark.parametrize(("name", "head", "options"), HEADS, ids=str)
def test_heads_predict_the_same_from_features(name: str, head: str, options: dict[str, Any]) -> None:
    model, posterior, args, kwargs = _setting(name)
    predictor = uq.wrap(model, posterior, head, **options)
    features = predictor.features(*args, **kwargs)
    assert features is not None
    for precision in (2.0, 20.0):
        posterior = posterior.with_settings(prior_precision=precision)
        expected = uq.wrap(model, posterior, head, **options).distribution(*args, **kwargs)
        found = predictor.with_posterior(posterior).distribution_from(features)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)


class Counting(nn.Module):
    """Counts samples by runs of a backbone, whoever copies it."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += len(x)
        return self.body(x)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, uq.Posterior, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Sequential(Counting(), nn.Linear(128, 3)).eval(), torch.randn(200, 6)
    posterior = uq.fit(model, [x], layers="last", method="diag", prior_precision=1.0, progress=False)
    monkeypatch.setattr(Counting, "seen", 0)
    return model, posterior, x


@pytest.mark.parametrize("options", [{"n_samples": 30}, {"n_samples": 30, "batched": False}], ids=str)
def test_thirty_draws_and_their_novelty_run_the_backbone_once(
    counting: tuple[nn.Module, uq.Posterior, Tensor], options: dict[str, Any]
) -> None:
    model, posterior, x = counting
    predictor = uq.wrap(model, posterior, "sampling", **options)
    predictor(x)
    Counting.seen = 0
    assert predictor(x).novelty() is not None
    assert Counting.seen == len(x)


@pytest.mark.parametrize("head", ["sampling", "linearized", "moments"])
def test_tuning_runs_the_backbone_once(counting: tuple[nn.Module, uq.Posterior, Tensor], head: str) -> None:
    model, posterior, x = counting
    labels = model(x).argmax(1)
    Counting.seen = 0
    held_out = [(x[:100], labels[:100]), (x[100:], labels[100:])]
    trials = uq.tune(posterior, held_out, head=head, progress=False).history.trials
    assert trials is not None and len(trials.trials) > 2
    # the held-out labels, and up to 256 of their inputs for the posterior that a fit would make
    assert Counting.seen <= 2.5 * len(x)


def test_a_budget_too_small_reads_the_rest_anew(counting: tuple[nn.Module, uq.Posterior, Tensor]) -> None:
    model, posterior, x = counting
    predictor = uq.wrap(model, posterior, "linearized")
    batches = [(Batch((part,)), index) for index, part in enumerate(x.split(50))]
    one = predictor.features(x[:50])
    assert one is not None
    cache = FeatureCache(predictor, lambda: iter(batches), budget=int(2.5 * one.nbytes))
    list(cache.distributions(predictor))
    assert cache.nbytes == 2 * one.nbytes
    posterior = posterior.with_settings(prior_precision=7.0)
    for found, index in cache.distributions(predictor.with_posterior(posterior)):
        expected = uq.wrap(model, posterior, "linearized").distribution(x.split(50)[index])
        torch.testing.assert_close(found.variance, expected.variance)
    plain = replicate(model)
    for outputs, index in cache.outputs(lambda batch: batch.call(plain)):
        torch.testing.assert_close(outputs, model(x.split(50)[index]))


class Odd(nn.Module):
    """A model whose last modules do not run alone, or not alike, in one of several ways."""

    handed: Tensor | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept = kind, None
        self.body, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.kind == "random":
            hidden = hidden + 1e-6 * torch.randn(1)
        if self.kind == "kept":
            self.kept = hidden if self.kept is None else self.kept + hidden
            hidden = self.kept
        if self.kind == "weight used before":
            hidden = hidden + F.linear(hidden, self.middle.weight)
        found = self.middle(hidden)
        if self.kind == "branch":
            found = found if found.sum() > 0 else found + hidden
        if self.kind == "function":
            found = torch.tanh(found)
        if self.kind == "in place":
            found.tanh_()
        if self.kind == "residual":
            found = found + hidden
        outputs = self.head(found)
        return outputs * 2 if self.kind == "scaled" else outputs


REASONS = {
    "random": "random numbers",
    "kept": "keeps something",
    "weight used before": "other outputs",
    **dict.fromkeys(["branch", "function", "in place", "residual", "scaled"], "not all that follows"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_other_models_run_as_a_whole(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, x = Odd("none").double().eval(), torch.randn(6, 4).double()
        layers = ["middle", "head"]
        posterior = uq.fit(plain, [x], layers=layers, method="diag", prior_precision=0.5, progress=False)
        model = Odd(kind).double().eval()
        model.load_state_dict(plain.state_dict())
        frozen = FrozenPart(model, list(posterior.mean))
        assert frozen.features(Batch((x,))) is None and REASONS[kind] in (frozen.refused or "")
        if kind in ("random", "kept"):
            return
        predictor = uq.wrap(model, posterior, "sampling", n_samples=20, batched=False)
        expected = _members(model, posterior, 20, (x,), {})
        torch.testing.assert_close(predictor.outputs(x), expected, rtol=1e-9, atol=1e-9)
        assert f"whole passes ({frozen.refused})" in repr(predictor)


def test_gradients_with_respect_to_inputs_are_those_of_whole_models() -> None:
    model, posterior, (x,), _ = _setting("last block")
    x = x.clone().requires_grad_()
    predictor = uq.wrap(model, posterior, "sampling", n_samples=4, batched=False)
    predictor(x).probs[:, 0].sum().backward()
    assert predictor.ensemble.frozen.refused is None
    draws, twin = posterior.sample(4, torch.Generator().manual_seed(0)), replicate(model)
    y = x.detach().clone().requires_grad_()
    whole = [
        torch.func.functional_call(twin, {k: d[i] for k, d in draws.items()}, (y,)).softmax(1)
        for i in range(4)
    ]
    torch.stack(whole).mean(0)[:, 0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_threads_and_copies() -> None:
    model, posterior, args, _ = _setting("last block")
    predictor = uq.wrap(model, posterior, "sampling", n_samples=4)
    expected = predictor(*args).probs
    for twin in (predictor, pickle.loads(pickle.dumps(predictor)), copy.deepcopy(predictor)):
        wrong: list[int] = []

        def work(twin: Any = twin, wrong: list[int] = wrong) -> None:
            for size in (12, 7, 12, 3):
                found = twin(args[0][:size]).probs
                if not torch.allclose(found, expected[:size], rtol=1e-9, atol=1e-9):
                    wrong.append(size)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_precisions_and_modes_are_settled_one_by_one() -> None:
    model, _, (x,), _ = _setting("last layer")
    model, x = model.float(), x.float()
    posterior = uq.fit(model, [x], layers="last", method="diag", prior_precision=2.0, progress=False)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=3, batched=False)
    plain = predictor.outputs(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = predictor.outputs(x)
    assert not torch.equal(cast, plain)
    assert torch.equal(predictor.outputs(x), plain)
    with torch.inference_mode():
        assert torch.equal(predictor.outputs(x), plain)
        assert torch.equal(predictor.outputs(x.clone()), plain)
    assert predictor.ensemble.frozen.refused is None
