"""What all heads share: loaders, threads, processes, memory, and a model that is left as it was."""

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from networks import HEADS, batches, cnn, inputs_of, mlp, targets_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.likelihoods import cat

OPTIONS = [{}, {"batched": False}]


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(64, 3)
        )


def _images() -> torch.Tensor:
    return torch.randn(33, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def setting():
    model, x = _model(), _images()
    return model, uq.fit(model, [x], layers="all", progress=False, prior_precision=5.0), x


def _same(one, two) -> bool:
    first, second = one.to_dict(), two.to_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_loader_of_any_form(setting, capsys):
    model, posterior, x = setting
    predictor = uq.wrap(model, posterior, n_samples=4)
    labels = torch.zeros(33).long()
    expected = cat([predictor(part) for part in x.split(8)])
    loaders = {
        "pairs": DataLoader(TensorDataset(x, labels), batch_size=8),
        "inputs": DataLoader(TensorDataset(x), batch_size=8),
        "list": list(x.split(8)),
        "iterator": iter([(part, None) for part in x.split(8)]),
    }
    for name, loader in loaders.items():
        found = predictor.predict(loader, progress=False)
        assert len(found) == 33 and _same(found, expected), name
    assert capsys.readouterr().err == ""
    triples = [(part, labels, "name") for part in x.split(8)]
    found = predictor.predict(triples, batch_to_inputs=lambda batch: batch[0], progress=True)
    assert _same(found, expected)
    assert "predict" in capsys.readouterr().err
    for tensor in found.to_dict().values():
        assert tensor.device.type == "cpu" and not tensor.requires_grad


def test_named_inputs_and_regression():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a, b):
            return {"logits": self.layer(a + b)}

    model, a, b = Pair(), torch.randn(20, 3), torch.randn(20, 3)
    batches = [{"a": a[i::2], "b": b[i::2], "labels": torch.randn(10, 2)} for i in range(2)]
    posterior = uq.fit(model, batches, likelihood="regression", progress=False)
    for options in OPTIONS:
        predictor = uq.wrap(model, posterior, n_samples=4, **options)
        found = predictor.predict(batches, progress=False)
        whole = predictor(a=torch.cat([a[::2], a[1::2]]), b=torch.cat([b[::2], b[1::2]]))
        torch.testing.assert_close(found.mean, whole.mean)
        torch.testing.assert_close(found.variance, whole.variance)


def test_a_predictor_prints_what_it_is(setting):
    model, _, x = setting
    posterior = uq.fit(model, [x], layers="all", progress=False, prior_precision=5.0)
    covered = 4 * 9 + 4 + 64 * 3 + 3
    heads = {
        "linearized": ("LinearizedPredictor", "link='mc', n_draws=256, outputs='auto', engine='auto'"),
        "sampling": ("SamplingPredictor", "n_samples=30, antithetic=False, batched='auto'"),
        "moments": ("MomentsPredictor", "not calibrated"),
    }
    for head, (name, own) in heads.items():
        predictor = uq.wrap(model, posterior, head)
        first, second, third = repr(predictor).splitlines()
        assert first == f"{name}: Sequential, method 'inf', head '{head}', likelihood 'classification'", (
            "the model's class, not what the head is built of"
        )
        assert second == (
            f"  posterior over {covered} of {covered + 8} weights, 2 layers; prior precision 5, temperature 1"
        )
        assert own in third
    posterior = posterior.with_settings(prior_precision={"0": 2.0, "5": 3.0}, temperature=1.25)
    assert (
        repr(uq.wrap(model, posterior))
        .splitlines()[1]
        .endswith("prior precision per layer, temperature 1.25")
    )
    narrow = nn.Linear(3, 5)
    values = uq.fit(
        narrow,
        [torch.randn(9, 3)],
        likelihood="regression",
        noise_variance=torch.arange(1, 6) / 8,
        prior_precision=2.0,
        progress=False,
    )
    shown = str(uq.wrap(narrow, values)).splitlines()
    assert "Linear, method 'inf'" in shown[0] and "likelihood 'regression'" in shown[0]
    assert shown[1] == (
        "  posterior over 20 of 20 weights, 1 layer; prior precision 2, noise variance 0.125, 0.25, 0.375, ..."
    )


def _state(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [(p.requires_grad, p.grad, p.data_ptr()) for p in model.parameters()],
        [(m.training, len(m._forward_hooks), getattr(m, "inplace", None)) for m in model.modules()],
        torch.get_rng_state(),
    )


def _unchanged(before, after) -> bool:
    same = all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    return same and before[1:3] == after[1:3] and torch.equal(before[3], after[3])


WAYS = [
    *({"head": "sampling", **options} for options in ({}, {"batched": False}, {"antithetic": True})),
    {"head": "linearized", "outputs": "all"},
    {"head": "linearized", "engine": "jvp", "n_probes": 3},
    {"head": "moments"},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_model_is_left_as_it_was(setting, options):
    _, posterior, x = setting
    model = _model().train()
    model[5].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda *_: None)
    before = _state(model)
    predictor = uq.wrap(model, posterior, **options)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    predictor.predict(loader, progress=False)
    predictor(x)
    predictor.train()
    predictor.with_posterior(posterior, 3)(x)
    with pytest.raises(uq.PosthocUQError, match="cannot be run on these inputs"):
        predictor(x[:, :, :4, :4])
    with pytest.raises(ZeroDivisionError):
        predictor.predict((part if len(part) == 8 else 1 / 0 for part in x.split(8)), progress=False)
    assert _unchanged(before, _state(model))
    assert not predictor.training and not any(m.training for m in predictor.modules())


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.covering(1)
def test_two_threads_are_as_good_as_one(options, layers):
    model, x = _model(), _images()
    posterior = uq.fit(model, [x], layers=layers, progress=False, prior_precision=5.0)
    expected = uq.wrap(model, posterior, **options).predict(list(x.split(8)), progress=False)
    predictor = uq.wrap(
        model, posterior, **options
    )  # new: what a head prepares is prepared in the threads too
    start = threading.Barrier(4)

    def work(_: int) -> list[bool]:
        start.wait()
        return [_same(predictor.predict(list(x.split(8)), progress=False), expected) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(found) for found in pool.map(work, range(4)))


def _of(predictor, x):
    return {name: tensor.numpy() for name, tensor in predictor(x).to_dict().items()}


def _from_file(path, queue):
    torch.set_num_threads(1)
    model = _model()
    queue.put(_of(uq.wrap(model, uq.load(path, model), n_samples=4, seed=2), _images()))


def _from_pickle(predictor, queue):
    torch.set_num_threads(1)
    queue.put(_of(predictor, _images()))


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.study), "fork"])
def test_two_processes_are_as_good_as_one(setting, tmp_path, start):
    """From a saved posterior, and with the predictors themselves handed over; new processes, and forked ones."""
    model, posterior, x = setting
    path = tmp_path / "posterior.h5"
    uq.save(posterior, path)
    predictor = uq.wrap(model, posterior, n_samples=4, seed=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = predictor(x).to_dict()
        context = multiprocessing.get_context(start)
        queue = context.Queue()
        jobs = [
            context.Process(target=_from_file, args=(path, queue)),
            context.Process(target=_from_pickle, args=(predictor, queue)),
        ]
        for job in jobs:
            job.start()
        found = [queue.get(timeout=120) for _ in jobs]
        for job in jobs:
            job.join()
        for values in found:
            for name, tensor in expected.items():
                assert torch.equal(torch.from_numpy(values[name]), tensor), name
    finally:
        torch.set_num_threads(threads)


_MEMORY = """
import gc, json, sys, psutil, torch
from torch import nn
import posthoc_uq as uq
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 50)), torch.randn(64, 8)
posterior = uq.fit(model, [x], progress=False, prior_precision=1.0)
process = psutil.Process()
def run(predictor, count):
    with torch.no_grad():
        for _ in range(count):
            predictor(x)
    gc.collect()
    return process.memory_info().rss
for batched, count in json.loads(sys.argv[1]):
    predictor = uq.wrap(model, posterior, n_samples=5, batched=batched)
    run(predictor, count // 10)
    objects, before = len(gc.get_objects()), run(predictor, 10)
    after = run(predictor, count)
    print(after - before, len(gc.get_objects()) - objects)
"""


@pytest.mark.study
def test_thousands_of_predictions_do_not_grow_memory():
    settings = [("auto", 1_500), (False, 1_500)]
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for setting, line in zip(settings, done.stdout.splitlines(), strict=True):
        grown, objects = map(int, line.split())
        # A prediction takes some 70 kB: of 1,500 that stayed, one in 25 would be noticed, of objects one in ten.
        assert grown < 4 * 2**20, setting
        assert objects < setting[-1] / 10 + 50, setting


def test_a_model_that_was_trained_on_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(20, 4)
    own = uq.fit(net, [(x, torch.arange(20) % 3)], prior_precision=1.0, progress=False)
    uq.wrap(net, own)
    before = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.mul_(1.5)
    with pytest.raises(uq.PosteriorMismatchError, match="changed after"):
        uq.wrap(net, own)
    with pytest.raises(uq.PosteriorMismatchError, match="changed after"):
        uq.save(own, tmp_path / "p.h5")
    net[0].weight.data.copy_(before)
    uq.save(own, tmp_path / "p.h5")
    uq.wrap(net, uq.load(tmp_path / "p.h5", net))


def _changes(net: nn.Module) -> dict[str, Callable[[], object]]:
    """Ways in which weights or statistics change, by name."""
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    other = {name: v + 1 if v.is_floating_point() else v for name, v in saved.items()}

    def trained() -> None:
        net.train()
        net(torch.randn(16, 1, 4, 4))
        net.eval()

    return {
        "in place": lambda: net.last.weight.detach().add_(1),
        "through data": lambda: net.last.weight.data.mul_(2),
        "one number through data": lambda: net.last.bias.data[1].add_(1),
        "other memory": lambda: setattr(net.last.weight, "data", saved["last.weight"] + 1),
        "another parameter": lambda: setattr(net.last, "weight", nn.Parameter(saved["last.weight"] + 1)),
        "a state dict": lambda: net.load_state_dict(other),
        "an assigned state dict": lambda: net.load_state_dict(other, assign=True),
        "NaN": lambda: net.last.weight.data.fill_(float("nan")),
        "statistics": lambda: net.body[1].running_var.mul_(2),
        "statistics through data": lambda: net.body[1].running_mean.data.add_(1),
        "a pass in train mode": trained,
    }


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.covering(1)
def test_weights_that_change_afterwards_are_noticed(head: str, layers: str) -> None:
    net, x = cnn(), inputs_of(1, 4, 4)
    data = batches(x, targets_of(net, x, "classification"))
    own = uq.fit(net, data, "kfac", layers=layers, head=head, prior_precision=1.0, progress=False)
    predictor = uq.wrap(net, own)
    expected, saved = predictor(x).probs, {name: v.clone() for name, v in net.state_dict().items()}
    for way, change in _changes(net).items():
        change()
        for ask in (predictor, lambda b: predictor.predict([b], progress=False), predictor.novelty):
            with pytest.raises(uq.PosteriorMismatchError, match=r"changed after uq\.wrap"):
                ask(x)
                raise AssertionError(f"{way} was not noticed")
        net.load_state_dict(saved)
        assert torch.equal(predictor(x).probs, expected), way


@pytest.mark.parametrize("head", HEADS)
def test_a_model_that_moves_is_none_that_changed(head: str) -> None:
    net, x = cnn(), inputs_of(1, 4, 4)
    data = batches(x, targets_of(net, x, "classification"))
    own = uq.fit(net, data, "kfac", head=head, prior_precision=1.0, progress=False)
    predictor, saved = uq.wrap(net, own), {name: v.clone() for name, v in net.state_dict().items()}
    expected = predictor(x).probs
    net.double()
    assert torch.equal(predictor(x).probs, expected)
    net.float().to(memory_format=torch.channels_last)
    assert torch.equal(predictor(x).probs, expected)
    net.body[0].weight.data[1, 0, 2, 2] += 1
    with pytest.raises(uq.PosteriorMismatchError, match=r"'body\.0\.weight'"):
        predictor(x)
    net.load_state_dict(saved)
    for other in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        assert torch.equal(other(x).probs, expected)
        other.model.last.bias.data += 1
        with pytest.raises(uq.PosteriorMismatchError):
            other(x)
    # the memory that a predictor shares changes, and the model gets the right weights in other memory
    predictor = uq.wrap(net, own)
    net.last.weight.detach().add_(1)
    net.load_state_dict(saved, assign=True)
    with pytest.raises(uq.PosteriorMismatchError, match="wrap again"):
        predictor(x)
    assert torch.equal(uq.wrap(net, own)(x).probs, expected)


def test_a_last_layer_by_messages_with_a_weight_that_is_nan() -> None:
    net, x = mlp(), inputs_of(4)
    own = uq.fit(net, batches(x, targets_of(net, x, "classification")), "message_passing", progress=False)
    predictor = uq.wrap(net, own)
    predictor(x)
    net[0].weight.data[0, 0] = float("nan")
    with pytest.raises(uq.PosteriorMismatchError, match="changed after"):
        predictor(x)
    with pytest.raises(uq.PosthocUQError):
        uq.fit(net, batches(x, torch.arange(24) % 3), "message_passing", progress=False)


def test_other_buffers_are_another_model(tmp_path: Path) -> None:
    net, other, x = cnn(), cnn(), inputs_of(1, 4, 4)
    own = uq.fit(net, batches(x, targets_of(net, x, "classification")), "diag", progress=False)
    uq.save(own, tmp_path / "p.h5")
    other.body[1].running_mean += 0.5
    with pytest.raises(uq.PosteriorMismatchError, match="running statistics"):
        uq.load(tmp_path / "p.h5", other)
    with pytest.raises(uq.PosteriorMismatchError, match="running statistics"):
        uq.wrap(other, own)
    other.load_state_dict(net.state_dict())
    other.body[1].num_batches_tracked += 7  # a counter, which predicts nothing
    predicted = uq.wrap(other, uq.load(tmp_path / "p.h5", other))(x).probs
    assert torch.equal(predicted, uq.wrap(net, own)(x).probs)
    net.body[1].running_var *= 2  # as training goes on
    for refused in (lambda: uq.wrap(net, own), lambda: uq.save(own, tmp_path / "p.h5")):
        with pytest.raises(uq.PosteriorMismatchError, match="running statistics"):
            refused()
