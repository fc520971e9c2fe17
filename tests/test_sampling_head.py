"""The sampling head: an ensemble drawn once, repeatable, thread-safe, and the user's model never written."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from networks import without_training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.core import replicate
from posthoc_uq.posteriors import Covariance


@pytest.fixture(scope="module")
def setting():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(64, 3),
        )
        x, y = torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))
    posterior = uq.fit(
        model, [(x[:20], y[:20]), (x[20:], y[20:])], layers="all", progress=False, prior_precision=5.0
    )
    return model, posterior, x


def _by_hand(model, draws, index, x):
    """The model's output with one draw's weights, by the plain functional call."""
    weights = {name: draw[index] for name, draw in draws.items()}
    return torch.func.functional_call(replicate(model), weights, (x,))


def test_members_are_the_draws(setting):
    model, posterior, x = setting
    predictor = uq.wrap(model, posterior, n_samples=4, seed=7)
    draws = posterior.sample(4, torch.Generator().manual_seed(7))
    expected = torch.stack([_by_hand(model, draws, index, x) for index in range(4)])
    torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-6, rtol=1e-5)
    prediction = predictor(x)
    torch.testing.assert_close(prediction.probs, expected.softmax(-1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(prediction.logits_mean, expected.mean(0), atol=1e-6, rtol=1e-5)


def test_repeatable_and_redrawn(setting):
    model, posterior, x = setting
    one, two = (uq.wrap(model, posterior, n_samples=3, seed=1) for _ in range(2))
    assert torch.equal(one(x).probs, two(x).probs)
    assert torch.equal(one(x).probs, one(x).probs)  # the ensemble is kept
    assert not torch.equal(one.with_posterior(posterior, 2)(x).probs, two(x).probs)
    assert torch.equal(one(x).probs, two(x).probs)
    assert not torch.equal(uq.wrap(model, posterior, n_samples=3, seed=None)(x).probs, two(x).probs)


def test_deterministic_parameters_are_shared(setting):
    """Thirty members must not hold thirty copies of what has no posterior."""
    model, posterior, _ = setting
    members = list(uq.wrap(model, posterior, n_samples=30).ensemble.members())
    assert len(members) == 30
    assert len({id(member[1].weight) for member in members}) == 1
    assert members[0][1].weight.data_ptr() == model[1].weight.data_ptr()


def test_one_wild_temperature(setting):
    model, posterior, x = setting
    hot = uq.wrap(model, posterior.with_settings(temperature=2.0), n_samples=3).outputs(x)
    torch.testing.assert_close(2 * hot, uq.wrap(model, posterior, n_samples=3).outputs(x))


def test_a_temperature_divides_logits_alone():
    model = nn.Linear(2, 1)
    x, y = torch.randn(30, 2), torch.randn(30, 1)
    posterior = uq.fit(model, [(x, y)], likelihood="regression", prior_precision=1.0, progress=False)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=5)
    before = predictor(x), predictor.outputs(x)
    with pytest.raises(PosthocUQError, match="no temperature: it divides logits"):
        posterior.with_settings(temperature=2.0)
    old = posterior.replaced(
        settings=replace(posterior.settings, temperature=2.0)
    )  # as an old file may hold it
    predictor = uq.wrap(model, old, "sampling", n_samples=5)
    assert torch.equal(predictor(x).mean, before[0].mean) and torch.equal(predictor.outputs(x), before[1])
    found = predictor.prediction_of(predictor.distribution(x))
    assert torch.equal(found.epistemic_variance, before[0].epistemic_variance)


ROUTES = [{"batched": True}, {"batched": False}]


@pytest.mark.parametrize("options", ROUTES, ids=str)
def test_every_route_gives_the_draws_of_the_posterior(setting, options):
    model, posterior, x = setting
    draws = posterior.sample(5, torch.Generator().manual_seed(3))
    expected = torch.stack([_by_hand(model, draws, index, x) for index in range(5)])
    predictor = uq.wrap(model, posterior, n_samples=5, seed=3, **options)
    for _ in range(2):  # the first call of a shape settles the route
        torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-5, rtol=1e-5)
    assert predictor.ensemble.refused is None
    assert predictor.outputs(x[:7]).shape == (5, 7, 3)
    with torch.inference_mode():
        torch.testing.assert_close(predictor.outputs(x[:9]), expected[:, :9], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(predictor.outputs(x.clone()), expected, atol=1e-5, rtol=1e-5)


class _Rounding(Covariance):
    """A covariance whose draws depend a little on how many are made at once, as those of some devices and sizes do."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def transform(self, noise: torch.Tensor) -> torch.Tensor:
        return self.inner.transform(noise) * (1 + 1e-6 * len(noise))


@pytest.mark.parametrize("method", without_training())
def test_a_draw_is_the_same_whatever_else_is_drawn(method):
    """To the bit; a triangular system of this size is solved otherwise for one column than for several."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        size = 20 if method == "full" else 150
        model, x = (
            nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 10)),
            torch.randn(300, size),
        )
    posterior = uq.fit(model, [x], method=method, prior_precision=0.01, progress=False)
    many = posterior.sample(7, torch.Generator().manual_seed(1))
    seeds = posterior.draw_seeds(7, torch.Generator().manual_seed(1))
    alone = posterior.sample_from([seeds[4]])
    for name, draws in many.items():
        assert torch.equal(alone[name][0], draws[4])
    rounding = {name: _Rounding(own) for name, own in posterior.covariances().items()}
    posterior = posterior.replaced(covariance=rounding.__getitem__)
    many, alone = (posterior.sample_from(some) for some in (seeds, [seeds[4]]))
    for name, draws in many.items():
        assert torch.equal(alone[name][0], draws[4])
    with pytest.raises(PosthocUQError, match="number of draws must be"):
        posterior.draw_seeds(0)


@pytest.mark.parametrize("batched", [False, True])
def test_antithetic_draws_come_in_pairs_around_the_mean(setting, batched):
    model, posterior, x = setting
    predictor = uq.wrap(model, posterior, n_samples=5, seed=4, antithetic=True, batched=batched)
    weights = [member[5].weight for member in predictor.ensemble.members()]
    mean, single = model[5].weight, posterior.sample(3, torch.Generator().manual_seed(4))["5.weight"]
    for pair in range(3):
        torch.testing.assert_close(weights[2 * pair], single[pair], atol=0, rtol=0)
    for pair in range(2):
        torch.testing.assert_close(weights[2 * pair] - mean, mean - weights[2 * pair + 1])
    assert len(weights) == 5
    reference = [
        torch.func.functional_call(replicate(member), {}, (x,)) for member in predictor.ensemble.members()
    ]
    torch.testing.assert_close(predictor.outputs(x), torch.stack(reference), atol=1e-5, rtol=1e-5)


class _Odd(nn.Module):
    """A model that vmap refuses, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))
        self.aliases = [self.second.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.kind == "control flow" and hidden.sum() > 1e6:
            return hidden
        if self.kind == "captured":
            scratch = torch.zeros(5)
            scratch += hidden.mean(0)
            hidden = hidden + 0 * scratch
        if self.kind == "alias":
            return torch.nn.functional.linear(hidden, self.aliases[0], self.second.bias)
        if self.kind == "item":
            hidden = hidden * (1 + 0 * hidden.detach().mean().item())
        return self.second(hidden)


@pytest.mark.parametrize("kind", ["control flow", "captured", "item", "alias"])
def test_what_cannot_be_batched_runs_in_the_loop(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, x = _Odd("none"), torch.randn(12, 4)
    posterior = uq.fit(plain, [x], layers="all", prior_precision=1.0, progress=False)
    odd = _Odd(kind)
    odd.load_state_dict(plain.state_dict())
    expected = uq.wrap(plain, posterior, n_samples=4, batched=False).outputs(x)
    predictor = uq.wrap(odd, posterior, n_samples=4, batched=True)
    assert "batched=True" in repr(predictor)
    for _ in range(2):
        torch.testing.assert_close(predictor.outputs(x), expected)
    assert predictor.ensemble.refused and predictor.ensemble.refused in repr(predictor)
    assert "batched=False" in repr(predictor)
    assert torch.equal(uq.wrap(odd, posterior, n_samples=4)(x).probs, predictor(x).probs)


class _Moody(nn.Sequential):
    """Can be batched, until an input has a value above 100."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * (1 + 0 * out.mean().item()) if x.max() > 100 else out


def test_a_refusal_after_the_first_input_goes_on_in_the_loop():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = _Moody(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(12, 4)
    posterior = uq.fit(model, [x], layers="all", prior_precision=1.0, progress=False)
    predictor, loop = (uq.wrap(model, posterior, n_samples=4, batched=b) for b in (True, False))
    predictor(x)
    with pytest.raises(uq.PosthocUQError, match="cannot be run on these inputs"):
        predictor(x[:, :3] + 1000)  # the user's mistake is no refusal
    assert predictor.ensemble.refused is None
    torch.testing.assert_close(predictor.outputs(x + 1000), loop.outputs(x + 1000))
    assert predictor.ensemble.refused is not None
    assert torch.equal(predictor.outputs(x), loop.outputs(x))


@pytest.mark.parametrize("options", ROUTES, ids=str)
def test_gradients_by_the_input(setting, options):
    model, posterior, x = setting
    x = x[:3]
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    reference, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.stack([_by_hand(model, draws, i, reference) for i in range(3)]).square().sum().backward()
    predictor = uq.wrap(model, posterior, n_samples=3, **options)
    for _ in range(2):  # settling the route must not cut the graph
        own.grad = None
        predictor.outputs(own).square().sum().backward()
        torch.testing.assert_close(own.grad, reference.grad, atol=1e-4, rtol=1e-4)
    own.grad = None
    predictor(own).entropy().sum().backward()
    assert own.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("antithetic", [False, True])
def test_a_refusal_half_way_goes_on_with_the_draws_that_are_left(setting, monkeypatch, antithetic):
    model, posterior, x = setting
    options = {"n_samples": 7, "antithetic": antithetic}
    monkeypatch.setattr("posthoc_uq.heads.sampling.CHUNK_BYTES", 1)  # chunks of two
    predictor = uq.wrap(model, posterior, batched=True, **options)
    predictor(x)
    left, vmap = [True, False], torch.func.vmap

    def refuses_the_second(*args, **kwargs):
        if not left.pop(0):
            raise RuntimeError("no memory\nfor this")
        return vmap(*args, **kwargs)

    monkeypatch.setattr(torch.func, "vmap", refuses_the_second)
    expected = uq.wrap(model, posterior, batched=False, **options).outputs(x)
    torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-5, rtol=1e-5)
    assert not left and predictor.ensemble.refused == "RuntimeError: no memory"
    assert torch.equal(predictor.outputs(x), expected)


class _Greedy(nn.Sequential):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(1.0))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("options", ROUTES, ids=str)
def test_every_draw_gets_the_input_as_it_was(options, inference):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = _Greedy(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(12, 4)
    posterior = uq.fit(nn.Sequential(*model), [x], layers="all", prior_precision=1.0, progress=False)
    before = x.clone()
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    expected = torch.stack([_by_hand(model, draws, i, x.clone()) for i in range(3)])
    predictor = uq.wrap(model, posterior, n_samples=3, **options)
    with torch.inference_mode(inference):
        for _ in range(2):
            torch.testing.assert_close(predictor.outputs(x), expected)
    assert torch.equal(x, before)


SMALL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), torch.randn(2, 1, 4, 4)
LARGE = nn.Sequential(nn.Conv2d(1, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("model", "x", "together"),
    [
        (nn.Linear(4, 3), torch.randn(2, 4), True),
        (nn.Linear(1200, 1200), torch.randn(2, 1200), False),
        (*SMALL, True),
        (LARGE, torch.randn(300, 1, 5, 5), False),
    ],
    ids=["small linear", "large linear", "small convolutions", "large convolutions"],
)
def test_auto_batches_small_passes_only(model, x, together, monkeypatch):
    posterior = uq.fit(model, [x], method="diag", prior_precision=1.0, progress=False)
    auto, loop = (uq.wrap(model, posterior, n_samples=10, batched=b) for b in ("auto", False))
    maps, vmap = [], torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda *a, **k: maps.append(1) or vmap(*a, **k))
    torch.testing.assert_close(auto.outputs(x), loop.outputs(x), atol=1e-4, rtol=1e-4)
    assert bool(maps) == together


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_a_thousand_classes_are_summed_up_as_they_come():
    classes, batch, samples = 1000, 200, 40
    model, x = nn.Linear(3, classes), torch.randn(batch, 3)
    posterior = uq.fit(model, [x], method="diag", prior_precision=1.0, progress=False)
    predictor = uq.wrap(model, posterior, n_samples=samples, batched=False, novelty=False)
    with torch.no_grad(), _Largest() as largest:
        prediction = predictor(x)
    assert largest.numbers < 3 * batch * classes  # stacked draws would be forty times that
    whole = uq.ClassPrediction.from_logits(predictor.outputs(x))
    for name, tensor in prediction.to_dict().items():
        torch.testing.assert_close(tensor, whole.to_dict()[name], atol=2e-5, rtol=1e-4)


def test_a_predictor_can_be_moved(setting):
    model, posterior, x = setting
    for options in ROUTES:
        predictor = uq.wrap(model, posterior, n_samples=3, **options)
        expected = predictor(x).probs
        wide = predictor.double()
        torch.testing.assert_close(wide(x.double()).probs.float(), expected, atol=1e-5, rtol=1e-5)
        assert all(p.dtype == torch.float32 for p in model.parameters())


class Attending(nn.Module):
    """Attention by torch's fused function, or by its module, whose fast path is one opaque call."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused, self.out = fused, nn.Linear(8, 3)
        self.inner = nn.Linear(8, 24) if fused else nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return self.out(self.inner(x).mean(1))
        query, key, value = self.inner(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_runs_batched_over_draws(fused: bool, layers: str) -> None:
    model, x = Attending(fused), torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))
    fitted = uq.fit(
        model, [(x, torch.arange(6) % 3)], method="diag", layers=layers, prior_precision=10.0, progress=False
    )
    together = uq.wrap(model, fitted, "sampling", n_samples=4, batched=True)
    alone = uq.wrap(model, fitted, "sampling", n_samples=4, batched=False)
    torch.testing.assert_close(together.outputs(x), alone.outputs(x), rtol=1e-5, atol=1e-6)
    assert together.ensemble.refused is None
