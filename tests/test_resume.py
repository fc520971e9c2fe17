"""A fit that is killed and started again gives what an uninterrupted one gives, to the last bit."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_worker import BATCH, SAMPLES, data, fit, model
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError, PosthocUQError
from posthoc_uq.core.randomness import sample_keys
from posthoc_uq.curvature.sweep import Content, batch_hash
from posthoc_uq.files.snapshot import read_snapshot
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.methods import contexts
from posthoc_uq.methods.resume import as_plain

BATCHES = -(-SAMPLES // BATCH)

# Where the process is killed, attempt by attempt: with a batch of that number, or in a checkpoint's write.
SCENARIOS: list[dict[str, Any]] = [
    {"name": "inf", "options": {"rank": 20}, "kills": [0, 3, BATCHES + 4, BATCHES - 1]},
    {"name": "inf-writing", "options": {"rank": 20}, "kills": ["write 1", "write 4", "write 9", "write 12"]},
    {"name": "inf-seldom", "options": {"rank": 20}, "kills": [8, BATCHES + 8], "every": 5},
    {"name": "inf-share", "options": {"basis_fraction": 0.5, "basis": "sketch", "rank": 5}, "kills": [6, 17]},
    {
        "name": "regression",
        "options": {"method": "diag", "likelihood": "regression", "dtype": None},
        "kills": [3, BATCHES + 3, "write 2"],
    },
    {"name": "inf-any-moment", "options": {"rank": 20}, "random": 1},
    {"name": "kfac-any-moment", "options": {"method": "kfac"}, "random": 2},
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the worker's processes left, scenario by scenario."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("resume_worker.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(SCENARIOS)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return folder, {line["name"]: line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_a_killed_fit_goes_on_to_the_same_bits(
    scenario: dict[str, Any], killed: tuple[Path, dict[str, Any]]
) -> None:
    folder, lines = killed
    line, name = lines[scenario["name"]], scenario["name"]
    assert line["finished"][-1]
    if "kills" in scenario:
        assert not any(line["finished"][:-1])  # every kill hit
        assert f"{name}.checkpoint.h5" in line["left"]
    assert line["after"] == [f"{name}.h5"]  # neither the checkpoint nor what a killed write left
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = fit(scenario, None, None)
    finally:
        torch.set_num_threads(threads)
    resumed = uq.load(folder / f"{name}.h5", model())
    assert resumed.scale == whole.scale == SAMPLES
    assert resumed.history.fit["samples"] == SAMPLES
    assert resumed.evidence.log_likelihood == whole.evidence.log_likelihood
    for block, expected in whole.blocks.items():
        for tensor, value in expected.tensors().items():
            assert torch.equal(resumed.blocks[block].tensors()[tensor], value), (block, tensor)


def _loader(**options: Any) -> DataLoader:
    return DataLoader(data(), batch_size=BATCH, **options)


class Broken:
    """A loader that fails after some batches."""

    def __init__(self, loader: Any, after: int, value: float | None = None) -> None:
        self.loader, self.after, self.value = loader, after, value

    def __iter__(self) -> Any:
        for index, (x, y) in enumerate(self.loader):
            if index == self.after:
                if self.value is None:
                    raise RuntimeError("the disk is gone")
                x = torch.full_like(x, self.value)
            yield x, y


def _interrupted(path: Path, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(model(), Broken(_loader(), 4), checkpoint=path, checkpoint_every=2, progress=False, **options)
    assert path.exists()


def test_a_checkpoint_is_of_one_fit_alone(tmp_path: Path) -> None:
    path = tmp_path / "fit.h5"
    _interrupted(path, method="diag")
    before = path.read_bytes()
    other = model()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1
    for changed, options, word in [
        (model(), {"method": "kfac"}, "method was 'diag', and is 'kfac'"),
        (model(), {"method": "diag", "seed": 1}, "seed"),
        (model(), {"method": "diag", "fisher": "mc"}, "fisher"),
        (model(), {"method": "diag", "layers": "last"}, "layers"),
        (model(), {"method": "diag", "dtype": torch.float64}, "dtype"),
        (other, {"method": "diag"}, "model"),
    ]:
        with pytest.raises(PosthocUQError, match=word):
            uq.fit(changed, _loader(), checkpoint=path, progress=False, **options)
    for loader in (_loader(shuffle=True), [(torch.randn(8, 1, 9, 9), torch.zeros(8, dtype=torch.long))]):
        with pytest.raises(PosthocUQError, match=r"does not begin with the batches|its first batch was"):
            uq.fit(model(), loader, method="diag", checkpoint=path, progress=False)
    assert path.read_bytes() == before  # nothing that was computed is lost
    uq.fit(model(), _loader(), method="diag", checkpoint=path, progress=False)
    assert not path.exists()


def test_noise_buffers_and_labels_belong_to_a_fit(tmp_path: Path) -> None:
    path = tmp_path / "fit.h5"
    x, y = data().tensors
    batches = list(zip(x.split(BATCH), torch.nn.functional.one_hot(y, 3).float().split(BATCH), strict=True))

    def norm() -> torch.nn.Module:
        return torch.nn.Sequential(*model(), torch.nn.BatchNorm1d(3)).eval()

    options: dict[str, Any] = {
        "method": "diag",
        "likelihood": "regression",
        "progress": False,
        "checkpoint": path,
    }
    with pytest.raises(NonFiniteError):
        bad = [*batches[:4], (torch.full_like(x[:BATCH], float("nan")), batches[4][1])]
        uq.fit(norm(), bad, checkpoint_every=1, noise_variance=1.0, **options)
    other = norm()
    other[-1].running_var *= 100
    changed = [(x, 1 - y) for x, y in batches]
    for net, loader, extra, word in [
        (norm(), batches, {}, "noise"),
        (other, batches, {"noise_variance": 1.0}, "model"),
        (norm(), changed, {"noise_variance": 1.0}, "first batch"),
        (norm(), [batches[0], *changed[1:]], {"noise_variance": 1.0}, "does not begin with"),
    ]:
        with pytest.raises(PosthocUQError, match=word):
            uq.fit(net, loader, **extra, **options)


def test_what_was_swept_over_before_a_bad_batch_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "fit.h5"
    options: dict[str, Any] = {"method": "diag", "prior_precision": 1.0, "progress": False}
    with pytest.raises(NonFiniteError, match="Batch 5"):
        bad = Broken(_loader(), 5, float("nan"))
        uq.fit(model(), bad, checkpoint=path, checkpoint_every=1, **options)
    mended = uq.fit(model(), _loader(), checkpoint=path, **options)
    whole = uq.fit(model(), _loader(), **options)
    for name, block in whole.blocks.items():
        assert torch.equal(block.tensors()["diagonal"], mended.blocks[name].tensors()["diagonal"])


def _changed(batches: list[Any], number: int, what: str) -> list[Any]:
    """The same data but for one batch."""
    x, y = batches[number]
    other = {"inputs": (-x, y), "targets": (x, y.roll(1, 0))}[what]
    assert not all(torch.equal(new, old) for new, old in zip(other, (x, y), strict=True))
    return [*batches[:number], other, *batches[number + 1 :]]


def _stops(path: Path, loader: Any, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(model(), loader, checkpoint=path, progress=False, **options)
    assert path.exists()


class _Stops:
    """A loader that fails with a batch of some number, counted over the passes after the look at the first batch."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.left = batches, after + 1

    def __iter__(self) -> Any:
        for batch in self.batches:
            if self.left == 0:
                raise RuntimeError("the disk is gone")
            self.left -= 1
            yield batch


@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize("every", [2, 100], ids=["in the sweep", "before the sweep's first write"])
def test_data_that_changed_after_a_finished_sweep_are_refused(what: str, every: int, tmp_path: Path) -> None:
    path, own = tmp_path / "fit.h5", list(_loader())
    options: dict[str, Any] = {"rank": 20, "fisher": "empirical", "prior_precision": 1.0}
    _stops(path, _Stops(own, BATCHES + 5), checkpoint_every=every, **options)
    with pytest.raises(PosthocUQError, match="not those that the checkpoint was made from"):
        uq.fit(model(), _changed(own, 9, what), checkpoint=path, progress=False, **options)


def test_another_order_after_a_finished_sweep_is_taken(tmp_path: Path) -> None:
    path, own = tmp_path / "fit.h5", list(_loader())
    options: dict[str, Any] = {"rank": 20, "prior_precision": 1.0}
    _stops(path, _Stops(own, BATCHES + 5), **options)
    x, y = (torch.cat(parts) for parts in zip(*own[:0:-1], strict=True))  # and in other batches
    turned = [own[0], *zip(x.split(5), y.split(5), strict=True)]
    found = uq.fit(model(), turned, checkpoint=path, progress=False, **options)
    whole = uq.fit(model(), own, progress=False, **options)
    for name, block in whole.blocks.items():
        torch.testing.assert_close(found.blocks[name].dense(), block.dense(), rtol=1e-3, atol=1e-6)


def test_data_that_changed_after_the_noise_was_found_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.h5"
    own = [(x, torch.nn.functional.one_hot(y, 3).float()) for x, y in _loader()]
    options: dict[str, Any] = {"method": "diag", "likelihood": "regression"}
    _stops(path, _Stops(own, BATCHES + 3), checkpoint_every=2, **options)
    with pytest.raises(PosthocUQError, match="not those that the checkpoint was made from"):
        uq.fit(model(), _changed(own, 9, "targets"), checkpoint=path, progress=False, **options)


def test_data_that_changed_after_all_sweeps_are_refused(tmp_path: Path) -> None:
    """The faithful prior and the novelty are of inputs that a resumed fit reads once more."""
    path, own = tmp_path / "fit.h5", list(_loader())
    _stops(path, own, method="diag", val_loader=Broken(own, 1))
    with pytest.raises(PosthocUQError, match="not those that the checkpoint was made from"):
        uq.fit(model(), _changed(own, 9, "inputs"), method="diag", checkpoint=path, val_loader=own)
    uq.fit(model(), own, method="diag", checkpoint=path, val_loader=own, progress=False)


def test_a_hash_of_the_data_tells_what_belongs_together() -> None:
    x, y = torch.randn(6, 2, 3), torch.arange(6)

    def total(*batches: Batch) -> int:
        content = Content()
        for batch in batches:
            content.see(batch, sample_keys(batch.tensors(), count_samples(batch), 0))
        assert content.batches == len(batches)
        return content.total

    whole = total(Batch((x,), y))
    assert (
        whole
        == total(Batch((x[3:],), y[3:]), Batch((x[:3],), y[:3]))
        == total(Batch((x.flip(0),), y.flip(0)))
    )
    assert len({whole, total(Batch((x,), y.flip(0))), total(Batch((x,))), total(Batch((x[:5],), y[:5]))}) == 4
    assert total(Batch((x,))) == total(Batch((x[4:],)), Batch((x[:4],)))
    inside = [Batch(({"x": part},), kwargs={"y": of}) for part, of in ((x, y), (-x, y))]
    assert total(inside[0]) != total(inside[1])
    batches = [
        Batch((x,), y),
        Batch((x.reshape(6, 3, 2),), y),
        Batch((x.view(torch.int32),), y),
        *(
            Batch((x, shared), y)
            for shared in (2.0, 3.0, torch.tensor(2.0), torch.tensor(3.0), torch.ones(4))
        ),
        *(Batch((x,), y, {name: True}) for name in ("causal", "other")),
    ]
    assert len({batch_hash(batch) for batch in batches}) == len(batches)
    assert batch_hash(batches[0]) == batch_hash(Batch((x.clone(),), y.clone()))


def test_a_fit_that_goes_on_with_less_memory_keeps_the_inputs_that_it_would_have_kept(tmp_path: Path) -> None:
    path, generator = tmp_path / "fit.h5", torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.AvgPool1d(256), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    own = [
        (16 * torch.randn(20, 1, 4096, generator=generator), torch.arange(20) % 3) for _ in range(5)
    ]  # 1.6 MB
    options: dict[str, Any] = {"method": "diag", "progress": False}
    whole = uq.fit(net, own, memory_budget=2**26, **options)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(net, Broken(own, 4), memory_budget=2**26, checkpoint=path, checkpoint_every=1, **options)
    resumed = uq.fit(net, own, memory_budget=2**20, checkpoint=path, **options)
    assert resumed.prior_precision == whole.prior_precision


class _Own(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Doubled(_Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(2 * x)


def test_a_model_that_computes_something_else_with_the_same_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = tmp_path / "fit.h5", list(_loader())

    def net(activation: torch.nn.Module, outer: type[_Own] = _Own) -> torch.nn.Module:
        return outer(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(81, 3), activation))

    with pytest.raises(RuntimeError, match="the disk is gone"):
        torch.manual_seed(0)
        start = net(torch.nn.LeakyReLU(0.1))
        uq.fit(start, Broken(own, 4), checkpoint=path, checkpoint_every=2, progress=False)
    _Doubled.__qualname__ = _Own.__qualname__  # as if the class itself had been rewritten
    for other in (
        net(torch.nn.LeakyReLU(0.2)),
        net(torch.nn.Tanh()),
        net(torch.nn.LeakyReLU(0.1), _Doubled),
    ):
        other.load_state_dict(start.state_dict())
        with pytest.raises(PosthocUQError, match="its architecture was"):
            uq.fit(other, own, checkpoint=path, progress=False)
    with monkeypatch.context() as patch, pytest.raises(PosthocUQError, match="its library version was"):
        patch.setattr("posthoc_uq.fitting.resume.__version__", "99.0")
        uq.fit(start, own, checkpoint=path, progress=False)
    again = net(torch.nn.LeakyReLU(0.1)).train()
    again.load_state_dict(start.state_dict())
    uq.fit(again, own, checkpoint=path, progress=False)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path, posterior = tmp_path / "fit.h5", tmp_path / "posterior.h5"
    _interrupted(path)
    with pytest.raises(CorruptPosteriorError, match="unfinished fit"):
        uq.load(path, model())
    with pytest.raises(CorruptPosteriorError, match="unfinished fit"):
        uq.inspect(path)
    uq.save(uq.fit(model(), _loader(), prior_precision=1.0, progress=False), posterior)
    before = posterior.read_bytes()
    with pytest.raises(CorruptPosteriorError, match="no checkpoint"):
        uq.fit(model(), _loader(), checkpoint=posterior, progress=False)
    assert posterior.read_bytes() == before
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptPosteriorError, match="damaged"):
        uq.fit(model(), _loader(), checkpoint=path, progress=False)
    with pytest.raises(PosthocUQError, match="does not exist"):
        uq.fit(model(), _loader(), checkpoint=tmp_path / "nowhere" / "fit.h5", progress=False)
    with pytest.raises(PosthocUQError, match="checkpoint_every"):
        uq.fit(model(), _loader(), checkpoint=path, checkpoint_every=0, progress=False)


def test_a_share_of_the_data_for_the_bases() -> None:
    options: dict[str, Any] = {"rank": 20, "prior_precision": 1.0, "progress": False}
    whole = uq.fit(model(), _loader(), **options)
    half = uq.fit(model(), _loader(), basis_fraction=0.5, **options)
    shuffled = uq.fit(model(), _loader(shuffle=True), basis_fraction=0.5, **options)
    for name, block in whole.blocks.items():
        # The exact diagonal comes from all samples; the bases do not, but from the same ones in any order.
        torch.testing.assert_close(half.blocks[name].diagonal, block.diagonal)
        assert not torch.equal(half.blocks[name].input_basis, block.input_basis)
        torch.testing.assert_close(
            half.blocks[name].dense(), shuffled.blocks[name].dense(), rtol=1e-3, atol=1e-6
        )
        error = torch.linalg.matrix_norm(half.blocks[name].dense() - block.dense())
        assert bool((error < 0.5 * torch.linalg.matrix_norm(block.dense())).all())
    assert half.scale == SAMPLES and half.history.fit["basis fraction"] == 0.5
    with pytest.raises(PosthocUQError, match="picks none of the 90 samples"):
        uq.fit(model(), _loader(), basis_fraction=1e-9, **options)
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(PosthocUQError, match="basis_fraction must be"):
            uq.fit(model(), _loader(), basis_fraction=wrong, **options)
    with pytest.raises(PosthocUQError, match="does not take"):
        uq.fit(model(), _loader(), method="diag", basis_fraction=0.5, progress=False)


def test_every_argument_of_a_fit_is_a_part_of_its_identity(tmp_path: Path) -> None:
    """What is no part of it is listed here too: an argument that is new must be put on one side or the other."""
    without = {"progress", "checkpoint", "checkpoint_every", "memory_budget"}  # the result is the same
    by_content = {"model", "loader", "val_loader", "batch_to_inputs", "batch_to_targets", "batch_to_weights"}
    by_content |= {"options"}
    otherwise = {"prior_precision"}  # under two names
    path = tmp_path / "fit.h5"
    _interrupted(path, method="inf")
    found = read_snapshot(path, 10**9)[0]["identity"]
    named = set(inspect.signature(uq.fit).parameters) | {field.name for field in fields(uq.INF)}
    assert found.keys() == (named - without - by_content - otherwise) | {
        "held-out data", "noise", "prior of the weights", "divergence", "model", "architecture", "library version",
        "autocast", "processes", "first batch",
    }  # fmt: skip


def _told_apart(first: Any, second: Any) -> bool:
    return json.dumps(as_plain(first)) != json.dumps(as_plain(second))


class _Rate:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor / step


def test_values_that_change_a_result_are_told_apart() -> None:
    x = torch.randn(4, 3)

    def rate(lr: float) -> Any:
        return lambda groups: torch.optim.SGD(groups, lr=lr)

    def itself() -> Any:
        return itself

    apart: list[tuple[Any, Any]] = [
        (1.0, 2.0),
        (x, x + 1),
        ([("a", x)], [("a", 2 * x)]),
        (rate(0.1), rate(0.2)),
        (lambda p: p, lambda p: 1 - p),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (contexts.UniformBox(0.0, 1.0), contexts.UniformBox(0.0, 2.0)),
        (contexts.Mixture([(1, "batch"), (1, "uniform")]), contexts.Mixture([(2, "batch"), (1, "uniform")])),
        (Gaussian(1.0), Gaussian(2.0)),
        (torch.optim.SGD, torch.optim.Adam),
        (np.float32(0.1), np.float32(0.2)),
        (np.zeros(2), np.ones(2)),
        (DataLoader(TensorDataset(x)), DataLoader(TensorDataset(x + 1))),
        (_Rate(0.1), _Rate(0.2)),
        (eval("lambda: factor", {"factor": 1.0}), eval("lambda: factor", {"factor": 2.0})),
    ]
    for first, second in apart:
        assert _told_apart(first, second)
    box = contexts.UniformBox()
    seen = copy.copy(box)
    seen.observe(x, torch.Generator())
    same = [(rate(0.1), rate(0.1)), (x, x.clone()), (itself, itself), (box, seen), (_Rate(0.1), _Rate(0.1))]
    for first, second in [*same, (DataLoader(TensorDataset(x)), DataLoader(TensorDataset(x.clone())))]:
        assert not _told_apart(first, second)
