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
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.model import replicate
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.frozen import FixedPart, ReplayError, _state


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
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(1, 4, 3), Block(4), Block(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        return self.head(self.second(self.first(x)).mean((2, 3)))


class Shared(nn.Module):
    """One module is called before and after the weights with a posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh()
        self.late, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.mix(self.act(self.mix(self.enter(x)))))
        return self.head(self.act(self.mix(self.late(hidden))) + hidden)


class Neighbours(nn.Module):
    """Functions write into what modules returned, before and after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        doubled = hidden * 2
        hidden.tanh_()
        rest = self.body(hidden)
        rest = F.relu(rest, inplace=True)
        return self.head(torch.cat([rest.add_(doubled), hidden], 1))


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
        self.encoder, self.pool, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pool(self.encoder(self.embed(tokens))[:, 0])))


def _images() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(12, 1, 7, 7),), {}


def _rows() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(12, 6),), {}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], list[str]]] = {
    "residual, last": (Residual, _images, ["head"]),
    "residual, a convolution inside": (Residual, _images, ["second.two", "head"]),
    "shared modules": (Shared, _rows, ["late", "head"]),
    "changes in place": (Neighbours, _rows, ["head"]),
    "two inputs": (
        TwoInputs,
        lambda: ((torch.randn(12, 4),), {"other": torch.randn(12, 2), "scale": 0.5}),
        ["head"],
    ),
    "transformer": (Transformer, lambda: ((torch.randint(0, 11, (12, 5)),), {}), ["pool", "head"]),
}


def _setting(
    name: str, method: str = "kfac"
) -> tuple[nn.Module, uq.Posterior, tuple[Any, ...], dict[str, Any]]:
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
    posterior = uq.fit(
        model,
        [{"args": args, "kwargs": kwargs}],
        method=method,
        layers=layers,
        prior_precision=2.0,
        batch_to_inputs=lambda batch: batch["args"] if not kwargs else {"x": args[0], **kwargs},
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
@pytest.mark.parametrize("options", [{"batched": False}, {"batched": True}, {"keep": "seeds"}], ids=str)
def test_draws_are_those_of_whole_models(name: str, options: dict[str, Any]) -> None:
    model, posterior, args, kwargs = _setting(name)
    before = copy.deepcopy(model.state_dict())
    expected = _members(model, posterior, 5, args, kwargs)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=5, **options)
    for _ in range(2):
        torch.testing.assert_close(predictor.outputs(*args, **kwargs), expected, rtol=1e-9, atol=1e-9)
    assert predictor.ensemble.fixed_part.refused is None
    features = predictor.features(*args, **kwargs)
    assert features is not None
    few = predictor.outputs(*(x[:3] for x in args), **{k: _first(v, 3) for k, v in kwargs.items()})
    torch.testing.assert_close(few, expected[:, :3], rtol=1e-9, atol=1e-9)
    for _ in range(2):  # a tail that writes in place must not reach what is kept
        found = predictor.distribution_from(features)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())


def _first(value: Any, count: int) -> Any:
    return value[:count] if isinstance(value, Tensor) else value


LINEARIZED = [{}, {"engine": "exact"}, {"engine": "jvp", "n_probes": 4}]
MOMENTS = ["residual, last", "shared modules", "two inputs"]  # the rules of moments know their operations
HEADS = [(name, "linearized", options) for name in CASES for options in LINEARIZED]
HEADS += [(name, "moments", {}) for name in MOMENTS]


@pytest.mark.parametrize(("name", "head", "options"), HEADS, ids=str)
def test_heads_say_the_same_from_features(name: str, head: str, options: dict[str, Any]) -> None:
    model, posterior, args, kwargs = _setting(name)
    predictor = uq.wrap(model, posterior, head, **options)
    features = predictor.features(*args, **kwargs)
    assert features is not None
    for precision in (2.0, 20.0):
        posterior.prior_precision = precision
        expected = uq.wrap(model, posterior, head, **options).distribution(*args, **kwargs)
        found = predictor.distribution_from(features)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        predictor.from_features(features).probs, predictor(*args, **kwargs).probs, rtol=1e-9, atol=1e-9
    )


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


def test_thirty_draws_run_the_backbone_once(counting: tuple[nn.Module, uq.Posterior, Tensor]) -> None:
    model, posterior, x = counting
    predictor = uq.wrap(model, posterior, "sampling", n_samples=30, novelty=False)
    predictor(x)
    Counting.seen = 0
    predictor(x)
    assert Counting.seen == len(x)


@pytest.mark.parametrize("head", ["sampling", "linearized", "moments"])
def test_tuning_runs_the_backbone_once(counting: tuple[nn.Module, uq.Posterior, Tensor], head: str) -> None:
    model, posterior, x = counting
    labels = model(x).argmax(1)
    Counting.seen = 0
    held_out = [(x[:100], labels[:100]), (x[100:], labels[100:])]
    precisions = [0.1, 1.0, 10.0, 100.0, 1000.0]
    trials = uq.tune(posterior, held_out, head=head, prior_precisions=precisions, progress=False)
    assert len(trials.trials) == len(precisions)
    # the held-out labels, and up to 256 of their inputs for the posterior that a fit would make
    assert Counting.seen <= 2.5 * len(x)


def test_a_budget_too_small_reads_the_rest_anew(counting: tuple[nn.Module, uq.Posterior, Tensor]) -> None:
    model, posterior, x = counting
    predictor = uq.wrap(model, posterior, "linearized")
    batches = [(Batch((part,)), index) for index, part in enumerate(x.split(50))]
    one = predictor.features(x[:50])
    assert one is not None
    cache = FeatureCache(predictor, lambda: iter(batches), budget=int(2.5 * one.nbytes))
    list(cache.distributions())
    assert cache.nbytes == 2 * one.nbytes
    posterior.prior_precision = 7.0
    Counting.seen = 0
    for found, index in cache.distributions():
        expected = uq.wrap(model, posterior, "linearized").distribution(x.split(50)[index])
        torch.testing.assert_close(found.variance, expected.variance)
    plain = replicate(model)
    for outputs, index in cache.outputs(lambda batch: batch.call(plain)):
        torch.testing.assert_close(outputs, model(x.split(50)[index]))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.one)), self.two)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + 1e-6 * torch.randn(1))


class Remembering(nn.Module):
    """Hands an activation over by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.body.register_forward_hook(self._keep)
        self.head, self.kept = nn.Linear(8, 3), None

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        module.kept = output  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.body.kept)


class Branching(nn.Module):
    """Goes another way where the drawn weights say so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gate = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.one(x), self.two(x)
        hidden = self.gate(left)
        return self.head(hidden if hidden.sum() > 0 else hidden + right)


@pytest.mark.parametrize(
    ("build", "covered", "reason"),
    [
        (Functional, ["two"], None),
        (Noisy, ["head.weight", "head.bias"], "random numbers"),
        (Remembering, ["head.weight", "head.bias"], "keeps something of a pass"),
    ],
)
def test_no_fixed_part_where_it_is_not_certain(build: Any, covered: list[str], reason: str | None) -> None:
    fixed_part = FixedPart(build().eval(), covered)
    assert fixed_part.features((torch.randn(3, 4),), {}) is None
    assert fixed_part.refused is None if reason is None else reason in (fixed_part.refused or "")


def test_another_way_than_the_recorded_one_runs_whole_models() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Branching().double().eval(), torch.randn(6, 4).double()
    posterior = uq.fit(
        model, [x], layers=["gate", "head"], method="diag", prior_precision=0.5, progress=False
    )
    predictor = uq.wrap(model, posterior, "sampling", n_samples=20, batched=False)
    expected = _members(model, posterior, 20, (x,), {})
    for _ in range(2):
        torch.testing.assert_close(predictor.outputs(x), expected, rtol=1e-9, atol=1e-9)


def test_gradients_with_respect_to_inputs_are_those_of_whole_models() -> None:
    model, posterior, (x,), _ = _setting("residual, last")
    x = x.clone().requires_grad_()
    predictor = uq.wrap(model, posterior, "sampling", n_samples=4, batched=False)
    predictor(x).probs[:, 0].sum().backward()
    assert predictor.ensemble.fixed_part.refused is None
    draws, twin = posterior.sample(4, torch.Generator().manual_seed(0)), replicate(model)
    y = x.detach().clone().requires_grad_()
    whole = [
        torch.func.functional_call(twin, {k: d[i] for k, d in draws.items()}, (y,)).softmax(1)
        for i in range(4)
    ]
    torch.stack(whole).mean(0)[:, 0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_threads_copies_and_files() -> None:
    model, posterior, args, _ = _setting("residual, last")
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
    linear = uq.wrap(model, posterior, "linearized")
    features = linear.features(*args)
    assert features is not None
    linear.from_features(features)
    again = pickle.loads(pickle.dumps(uq.wrap(model, posterior, "moments")))
    torch.testing.assert_close(again(*args).probs, uq.wrap(model, posterior, "moments")(*args).probs)


def test_situations_are_settled_one_by_one() -> None:
    model, posterior, (x,), _ = _setting("residual, last")
    model, posterior = (
        model.float(),
        uq.fit(model.float(), [x.float()], layers="last", method="diag", prior_precision=2.0, progress=False),
    )
    predictor = uq.wrap(model, posterior, "sampling", n_samples=3, batched=False)
    x = x.float()
    plain = predictor.outputs(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = predictor.outputs(x)
    assert not torch.equal(cast, plain)
    assert torch.equal(predictor.outputs(x), plain)
    with torch.inference_mode():
        assert torch.equal(predictor.outputs(x), plain)
        assert torch.equal(predictor.outputs(x.clone()), plain)
    assert predictor.ensemble.fixed_part.refused is None


def test_features_of_another_shape_of_model_are_refused() -> None:
    model, posterior, args, _ = _setting("residual, last")
    other, others, _, _ = _setting("shared modules")
    features = uq.wrap(model, posterior, "sampling", n_samples=2).features(*args)
    assert features is not None
    with pytest.raises(ReplayError):
        uq.wrap(other, others, "sampling", n_samples=2, batched=False).from_features(features)


def test_a_tensor_that_was_replaced_is_seen_wherever_it_lies_in_memory() -> None:
    model = nn.Linear(2, 2)
    for number in range(50):
        model.kept = torch.zeros(3)  # type: ignore[assignment]
        before = _state(model)
        assert before == _state(model)
        del model.kept
        model.kept = torch.zeros(3)  # type: ignore[assignment]
        assert before != _state(model), number
