"""A fit that is killed and started again gives what an uninterrupted one gives, to the last bit."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import hostile_files
import numpy as np
import pytest
import torch
from networks import Stops
from resume_worker import BATCH, SAMPLES, data, fit, model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq import CorruptPosteriorError, PosthocUQError
from posthoc_uq.core import Batch, count_samples, sample_keys
from posthoc_uq.curvature import DataHash, batch_hash
from posthoc_uq.files import SNAPSHOT_MAGIC
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.methods import Checkpoint, identified, read_snapshot, write_snapshot
from posthoc_uq.trained import contexts

BATCHES = -(-SAMPLES // BATCH)

# Where the process is killed, attempt by attempt: with a batch of that number, or in a checkpoint's write.
SCENARIOS: list[dict[str, Any]] = [
    {
        "name": "inf",
        "options": {"layers": "all", "rank": 20},
        "kills": [3, "write 4", BATCHES + 4, BATCHES - 1],
    },
    {
        "name": "inf-share",
        "options": {"layers": "all", "basis_fraction": 0.5, "basis": "sketch", "rank": 5},
        "kills": [8, BATCHES + 8],
        "every": 5,
    },
    {
        "name": "regression",
        "options": {"method": "diag", "likelihood": "regression", "dtype": None},
        "kills": [3, "write 2"],
    },
    {
        "name": "function_space",
        "options": {"method": "function_space", "epochs": 3, "n_context": 8, "lr": 1e-2, "divergence": None},
        "kills": [3 * BATCHES, "write 5"],
    },
    {
        "name": "message_passing",
        "options": {"method": "message_passing"},
        "kills": ["write 5", "write 3"],
    },
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
        assert f"{name}.checkpoint" in line["left"]
    assert line["after"] == [f"{name}.h5"]  # neither the checkpoint nor what a killed write left
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = fit(scenario, None, None)
    finally:
        torch.set_num_threads(threads)
    resumed = uq.load(folder / f"{name}.h5", model())
    assert resumed.scale == whole.scale
    assert resumed.history.fit["samples"] == SAMPLES
    assert resumed.evidence.log_likelihood == whole.evidence.log_likelihood
    for block, expected in whole.blocks.items():
        for tensor, value in expected.tensors().items():
            assert torch.equal(resumed.blocks[block].tensors()[tensor], value), (block, tensor)
    for name, mean in whole.mean.items():
        assert torch.equal(resumed.mean[name], mean)


def _loader(**options: Any) -> DataLoader:
    return DataLoader(data(), batch_size=BATCH, **options)


class Broken:
    """A loader that fails after some batches."""

    def __init__(self, loader: Any, after: int) -> None:
        self.loader, self.after = loader, after

    def __iter__(self) -> Any:
        yield from islice(self.loader, self.after)
        raise RuntimeError("the disk is gone")


def _interrupted(path: Path, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(model(), Broken(_loader(), 4), checkpoint=path, checkpoint_every=2, progress=False, **options)
    assert path.exists()


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=[pytest.mark.study] * (each in ("kfac",))) for each in ["inf", "kfac"]],
)
def test_a_fit_that_failed_after_its_sweeps_reads_the_data_once_more(method: str, tmp_path: Path) -> None:
    """For the inputs of the faithful prior and the statistics of the last layer's, which no checkpoint holds."""
    path, own = tmp_path / "fit", {"method": method, "progress": False}
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(model(), _loader(), val_loader=Broken(_loader(), 1), checkpoint=path, **own)
    found = uq.fit(model(), _loader(), val_loader=_loader(), checkpoint=path, **own)
    whole = uq.fit(model(), _loader(), val_loader=_loader(), **own)
    assert found.settings == whole.settings and found.evidence == whole.evidence
    assert found.features is not None and whole.features is not None
    for name, block in {**whole.blocks, "features": whole.features}.items():
        other = found.features if name == "features" else found.blocks[name]
        for key, tensor in block.tensors().items():
            assert torch.equal(other.tensors()[key], tensor), (name, key)


class _BrokenOnce:
    """A loader that fails in one pass of those over it."""

    def __init__(self, number: int) -> None:
        self.number, self.passes = number, 0

    def __iter__(self) -> Any:
        self.passes += 1
        yield from Broken(_loader(), 2) if self.passes == self.number else _loader()


@pytest.mark.parametrize("within", [True, pytest.param(False, marks=pytest.mark.study)])
def test_other_data_behind_the_first_batches_are_noticed(within: bool, tmp_path: Path) -> None:
    """Whether the fit stopped within its second sweep, or after it, so that the data are only looked at once more."""
    own: dict[str, Any] = {
        "method": "efb",
        "progress": False,
        "checkpoint": tmp_path / "fit",
        "checkpoint_every": 1,
    }
    stopping, val_loader = (_BrokenOnce(2), _loader()) if within else (_loader(), Broken(_loader(), 1))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(model(), stopping, val_loader=val_loader, **own)
    images, labels = (tensor.clone() for tensor in data().tensors)
    images[30:60] = 0
    other = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
    with pytest.raises(PosthocUQError, match="not those that the checkpoint was made from"):
        uq.fit(model(), other, val_loader=_loader(), **own)
    uq.fit(model(), _loader(), val_loader=_loader(), **own)


# What a checkpoint belongs to


def _changed(change: Callable[[Any], Any]) -> torch.nn.Module:
    other = model()
    with torch.no_grad():
        change(other)
    return other


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("method was .diag., and is .kfac.", {"method": "kfac"}),
    ("seed", {"seed": 1}),
    ("fisher", {"fisher": "mc"}),
    ("layers", {"layers": "last"}),
    ("dtype", {"dtype": torch.float64}),
    ("head", {"head": "sampling"}),
    ("model", {"model": _changed(lambda net: net[0].weight[0, 0, 0, 0].add_(1))}),
    ("begin with the batches|first batch", {"loader": _loader(shuffle=True)}),
    ("first batch", {"loader": [(x, 2 - y) for x, y in _loader()]}),
]


def test_a_checkpoint_is_of_one_fit_alone(tmp_path: Path) -> None:
    path = tmp_path / "fit"
    own: dict[str, Any] = {"model": model(), "loader": _loader(), "method": "diag", "progress": False}
    _interrupted(path, method="diag")
    before = path.read_bytes()
    for word, options in OTHERS:
        with pytest.raises(PosthocUQError, match=word):
            uq.fit(**own | options, checkpoint=path)
    assert path.read_bytes() == before  # nothing that was computed is lost
    uq.fit(**own, checkpoint=path)
    assert not path.exists()


def test_two_fits_at_the_same_time_do_not_share_a_checkpoint(tmp_path: Path) -> None:
    """The one that writes second is refused, and neither deletes the other's."""
    path = tmp_path / "fit"
    own: dict[str, Any] = {"method": "diag", "checkpoint": path, "checkpoint_every": 2, "progress": False}

    class Beside:
        """Batches; another fit writes its checkpoint before ours does."""

        def __len__(self) -> int:
            return len(_loader())

        def __iter__(self) -> Any:
            for number, batch in enumerate(_loader()):
                if number == 1 and not path.exists():
                    _interrupted(path, method="diag")
                yield batch

    with pytest.raises(PosthocUQError, match="give each of them a path of its own"):
        uq.fit(model(), Beside(), **own)
    read_snapshot(path)  # is whole, and the other fit goes on from it
    uq.fit(model(), _loader(), **own)
    assert not path.exists()
    first = Checkpoint(path, 1, {})
    first.finish("a", {}, {})
    write_snapshot(path, {"identity": {}, "finished": {}, "running": None})
    first.remove()
    assert path.exists()


class _Stopping:
    """Batches that end in an error, and say how many they are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        yield from list(_loader())[:4]
        raise RuntimeError("the disk is gone")


def test_a_checkpoint_is_of_one_number_of_samples(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"checkpoint": tmp_path / "fit", "checkpoint_every": 2, "progress": False}
    for count, error in ((12, "the disk is gone"), (11, "its number of samples was 96, and is 88")):
        with pytest.raises((RuntimeError, PosthocUQError), match=error):
            uq.fit(model(), _Stopping(count), **kept)


def test_buffers_and_the_library_belong_to_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit"

    def norm() -> torch.nn.Module:
        return torch.nn.Sequential(*model(), torch.nn.BatchNorm1d(3)).eval()

    with pytest.raises(RuntimeError, match="the disk is gone"):
        uq.fit(norm(), Broken(_loader(), 4), checkpoint=path, checkpoint_every=1, progress=False)
    other = norm()
    other[-1].running_var *= 100
    with pytest.raises(PosthocUQError, match="model"):
        uq.fit(other, _loader(), checkpoint=path, progress=False)
    monkeypatch.setattr("posthoc_uq.methods.checkpoint.__version__", "99.0")
    with pytest.raises(PosthocUQError, match="library version"):
        uq.fit(norm(), _loader(), checkpoint=path, progress=False)


def test_a_hash_of_the_data_tells_what_belongs_together() -> None:
    x, y = torch.randn(6, 2, 3), torch.arange(6)

    def total(*batches: Batch) -> int:
        content = DataHash()
        for batch in batches:
            content.see(batch, sample_keys(batch.tensors, count_samples(batch), 0))
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


# Files that are none, or damaged, or somebody else's


class _Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of a file was run')",)


def _sealed(path: Path, body: bytes) -> None:
    path.write_bytes(SNAPSHOT_MAGIC + hashlib.sha256(body).digest() + body)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path, posterior = tmp_path / "fit", tmp_path / "posterior.h5"
    _interrupted(path)
    for read in (lambda: uq.load(path, model()), lambda: uq.inspect(path)):
        with pytest.raises(CorruptPosteriorError, match="unfinished fit"):
            read()
    uq.save(uq.fit(model(), _loader(), prior_precision=1.0, progress=False), posterior)
    before = posterior.read_bytes()
    with pytest.raises(CorruptPosteriorError, match="no checkpoint"):
        uq.fit(model(), _loader(), checkpoint=posterior, progress=False)
    assert posterior.read_bytes() == before
    whole = path.read_bytes()
    torn, flipped = whole[: len(whole) // 2], bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    for damaged in (torn, bytes(flipped), whole + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptPosteriorError, match="damaged; delete it"):
            uq.fit(model(), _loader(), checkpoint=path, progress=False)
    with pytest.raises(PosthocUQError, match="does not exist"):
        uq.fit(model(), _loader(), checkpoint=tmp_path / "nowhere" / "fit.h5", progress=False)
    with pytest.raises(PosthocUQError, match="checkpoint_every"):
        uq.fit(model(), _loader(), checkpoint=path, checkpoint_every=0, progress=False)


def test_a_strangers_file_runs_no_code_and_takes_no_more_memory_than_its_size(tmp_path: Path) -> None:
    """Somebody can give a file of his own a digest that fits."""
    path, plain = tmp_path / "fit", tmp_path / "plain"
    for body in (pickle.dumps(_Runs()), b"", b"PK\x03\x04" + bytes(100)):
        _sealed(path, body)
        with pytest.raises(CorruptPosteriorError, match="no checkpoint holds"):
            read_snapshot(path)
    torch.save({"x": _Runs()}, plain)
    _sealed(path, plain.read_bytes())
    with pytest.raises(CorruptPosteriorError, match="no checkpoint holds"):
        read_snapshot(path)
    torch.save({"x": torch.zeros(10**6)}, plain)
    with zipfile.ZipFile(plain) as stored, zipfile.ZipFile(tmp_path / "bomb", "w") as bomb:
        for entry in stored.infolist():
            bomb.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    _sealed(path, (tmp_path / "bomb").read_bytes())
    with pytest.raises(CorruptPosteriorError, match="no checkpoint holds"):
        read_snapshot(path)


def test_changed_bytes_under_a_digest_that_fits_are_refused_or_read(tmp_path: Path) -> None:
    path, changes = tmp_path / "fit", random.Random(0)
    _interrupted(path, method="diag")
    body = path.read_bytes()[len(SNAPSHOT_MAGIC) + 32 :]
    refused = 0
    for _ in range(200):
        changed = bytearray(body[: changes.randrange(len(body))] if changes.random() < 0.2 else body)
        for _ in range(changes.choice([1, 2, 20])):
            changed[changes.randrange(len(changed))] = changes.randrange(256)
        _sealed(path, bytes(changed))
        try:
            read_snapshot(path)
        except PosthocUQError:
            refused += 1
    assert refused > 20


def _put(*place: Any, value: Any) -> Callable[[Any], None]:
    """A change of a nested state; ``...`` stands for the first of what there is."""

    def change(state: Any) -> None:
        for key in place[:-1]:
            state = state[next(iter(state)) if key is ... else key]
        state[next(iter(state)) if place[-1] is ... else place[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _put("identity", value=3),
        _put("finished", value=5),
        _put("finished", value={"diagonal": 5}),
        _put("running", value=("diagonal", 5)),
        _put("running", value=("diagonal",)),
        _put("running", 1, "sums", value={}),
        _put("running", 1, "sums", ..., ..., value=torch.zeros(1).expand(10**12)),
        _put("running", 1, "sums", ..., ..., value=[1.0]),
        _put("running", 1, "summary", value={"keys": []} | {"evil": 1}),
        _put("running", 1, "summary", "seen", value=10**9),
        _put("running", 1, "summary", "keys", value=[{}]),
        _put("running", 1, "summary", "keys", value=["x"]),
        _put("running", 1, "summary", "keys", value=7),
        _put("running", 1, "summary", "weight", value=1e18),
        _put("running", 1, "summary", "samples", value=1),
        _put("running", 1, "summary", "log_likelihood", value="x"),
        _put("running", 1, "sums", ..., ..., value=-torch.ones(6, 1, 10)),
    ],
)
def test_states_that_are_not_of_this_fit(change: Callable[[Any], None], tmp_path: Path) -> None:
    path = tmp_path / "fit"
    _interrupted(path, method="diag")
    state = read_snapshot(path)
    state["running"] = list(state["running"])
    change(state)
    write_snapshot(path, state)
    with pytest.raises(PosthocUQError, match=r"no checkpoint that this fit|begin with the batches"):
        uq.fit(model(), _loader(), method="diag", checkpoint=path, progress=False)


@pytest.mark.parametrize("value", [1.0, {}, torch.tensor([float("nan")]), torch.ones(2)])
def test_a_noise_variance_that_is_not_of_this_fit(value: Any, tmp_path: Path) -> None:
    path, net, x = (
        tmp_path / "fit",
        nn.Linear(3, 1),
        torch.randn(40, 3, generator=torch.Generator().manual_seed(0)),
    )
    data = [(part, part.sum(1, keepdim=True)) for part in x.split(10)]
    options: dict[str, Any] = {"likelihood": "regression", "checkpoint": path, "progress": False}
    with pytest.raises(RuntimeError, match="stop"):
        uq.fit(net, Stops(data, after=6), "diag", checkpoint_every=1, **options)
    state = read_snapshot(path)
    state["finished"]["noise"][0]["noise"]["variance"] = value
    write_snapshot(path, state)
    with pytest.raises(PosthocUQError, match=r"no checkpoint that this fit|not finite"):
        uq.fit(net, data, "diag", checkpoint_every=1, **options)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("kfac", _put("running", 1, "sums", "0/0", "rank", value=torch.tensor(-80.0).double())),
        ("kfac", _put("running", 1, "sums", "0/0", "output_gram", value=-torch.eye(2).expand(2, 2, 2))),
        ("kfac", _put("running", 1, "sums", "0/0", "output_gram", value=torch.ones(2, 2, 2).triu())),
        ("message_passing", _put("running", 1, "start", value=torch.ones(7))),
        ("utvi", _put("running", 1, "progress", "epoch", value="x")),
        ("utvi", _put("running", 1, "progress", "history", value=[{}])),
        ("utvi", _put("running", 1, "optimiser", 1, "param_groups", 0, "initial_lr", value=1e9)),
        ("utvi", _put("running", 1, "optimiser", 1, "param_groups", 0, "weight_decay", value=[1.0])),
    ],
)
def test_sums_and_trainings_that_cannot_be(
    method: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    path = tmp_path / "fit"
    state, _ = hostile_files.unfinished(method, path)
    state["running"] = list(state["running"])
    change(state)
    write_snapshot(path, state)
    with pytest.raises(CorruptPosteriorError, match="no checkpoint that this fit"):
        hostile_files.fit(method, checkpoint=path)


def test_changed_checkpoints_are_refused_or_gone_on_from(tmp_path: Path) -> None:
    """Some of what the script tries by the hundred; raises where a fit ends in an error that is not the project's."""
    found = hostile_files.run_checkpoints(15, 0, tmp_path, ["kfac", "utvi", "message_passing"])
    assert sum(found.values()) > 10
    assert sum(count for (_, what), count in found.items() if what == "refused") > 6


def test_a_snapshot_keeps_what_it_is_given(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    state = {
        "a": {"half": values.bfloat16(), "turned": values.T, "count": torch.tensor(3)},
        "b": [None, 1.5, 2**64 - 1],
    }
    checkpoint = Checkpoint(tmp_path / "c", 1, {"x": "1"})
    checkpoint.save("part", state | {"view": torch.zeros(1000)[:1]})
    assert (tmp_path / "c").stat().st_size < 3000  # of a view only its own numbers
    with pytest.raises(PosthocUQError, match="its x was 1, and is 2 now"):
        Checkpoint(tmp_path / "c", 1, {"x": "2"})
    found = Checkpoint(tmp_path / "c", 1, {"x": "1"}).take_running("part")
    assert found is not None and found["b"] == state["b"]
    for name, tensor in state["a"].items():
        assert torch.equal(found["a"][name], tensor) and found["a"][name].stride() == tensor.stride()


def test_a_share_of_the_data_for_the_bases() -> None:
    options: dict[str, Any] = {"rank": 20, "prior_precision": 1.0, "progress": False}
    whole = uq.fit(model(), _loader(), layers="all", **options)
    half = uq.fit(model(), _loader(), layers="all", basis_fraction=0.5, **options)
    shuffled = uq.fit(model(), _loader(shuffle=True), layers="all", basis_fraction=0.5, **options)
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
        uq.fit(model(), _loader(), layers="all", basis_fraction=1e-9, **options)


# The identity of a fit


def test_every_argument_of_a_fit_is_a_part_of_its_identity(tmp_path: Path) -> None:
    """What is no part of it is listed here too: an argument that is new must be put on one side or the other."""
    without = {"progress", "checkpoint", "checkpoint_every"}  # the result is the same
    by_content = {"model", "loader", "val_loader", "batch_to_inputs", "batch_to_targets", "batch_to_weights"}
    by_content |= {"options"}
    otherwise = {"prior_precision", "noise_variance"}  # under other names
    path = tmp_path / "fit"
    _interrupted(path, method="inf")
    found = read_snapshot(path)["identity"]
    named = set(inspect.signature(uq.fit).parameters) | {field.name for field in fields(uq.INF)}
    assert found.keys() == (named - without - by_content - otherwise) | {
        "held-out data", "noise", "prior of the weights", "divergence", "model", "library version",
        "autocast", "processes", "first batch",
    }  # fmt: skip


def test_values_that_change_a_result_are_told_apart() -> None:
    x = torch.randn(4, 3)

    def told_apart(first: Any, second: Any) -> bool:
        return identified({"x": first}) != identified({"x": second})

    def rate(lr: float) -> Any:
        return lambda groups: torch.optim.SGD(groups, lr=lr)

    apart: list[tuple[Any, Any]] = [
        (1.0, 2.0),
        ([("a", x)], [("a", 2 * x)]),
        (rate, told_apart),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (contexts.UniformBox(0.0, 1.0), contexts.UniformBox(0.0, 2.0)),
        (contexts.Mixture([(1, "batch"), (1, "uniform")]), contexts.Mixture([(2, "batch"), (1, "uniform")])),
        (Gaussian(1.0), Gaussian(2.0)),
        (np.float32(0.1), np.float32(0.2)),
        (np.zeros(2), np.ones(2)),
        (model(), _changed(lambda net: net[0].weight.mul_(2))),
    ]
    for first, second in apart:
        assert told_apart(first, second), first
    for first, second in [(rate(0.1), rate(0.1)), (x, x.clone()), (rate, rate), (model(), model())]:
        assert not told_apart(first, second), first
