"""The base of the methods that train: optimisers and schedules, resuming to the bit, early stopping, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp, targets_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, PosthocUQError
from posthoc_uq.core import Batch, BatchReader, DeferredChecks
from posthoc_uq.methods import Checkpoint, read_snapshot, write_snapshot
from posthoc_uq.trained import Group, Objective, Step, Training
from posthoc_uq.trained.training import Loop, best_epoch, cosine, initialised

READER = BatchReader(torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Plain(Training["Quadratic"]):
    """Options of a training, by plain gradient descent unless they say more."""

    name = "plain"

    def begin(self, task: Any) -> Quadratic:
        raise NotImplementedError

    def blocks(self, task: Any, trained: Quadratic) -> dict[str, Any]:
        raise NotImplementedError


class Quadratic(Objective):
    """``(w - mean of the targets)^2 / 2``: its gradient is known, and so is every step of SGD."""

    def __init__(self, start: float = 1.0, losses: list[float] | None = None) -> None:
        super().__init__(nn.Identity(), uq.Gaussian(1.0), 1)
        self.w = torch.tensor([start], requires_grad=True)
        self.losses = list(losses or [])
        self.seeds: list[int] = []
        self.broken: int | None = None

    def groups(self) -> list[Group]:
        return [{"params": {"w": self.w}, "lr": 0.1, "name": "w"}]

    def loss(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        self.seeds.append(step.seed)
        loss = 0.5 * (self.w - batch.targets.float().mean()).square().sum()
        return {"loss": loss * float("nan") if len(self.seeds) - 1 == self.broken else loss}

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        return torch.full((len(batch.targets),), -self.losses.pop(0))


def loader_of(targets: list[float], batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    values = torch.tensor(targets)
    return [(torch.zeros(len(part), 1), part) for part in values.split(batch)]


def options(**given: Any) -> Plain:
    def sgd(groups: list[Group]) -> Optimizer:
        return torch.optim.SGD(groups)

    return Plain(**({"optimizer": sgd, "clip": None, "schedule": lambda progress: 1.0} | given))


def trained(
    objective: Quadratic, loader: Any, val_loader: Any = None, checkpoint: Any = None, **given: Any
) -> Any:
    """The history of a training."""
    more = {"seed": 0, "val_loader": val_loader, "checkpoint": checkpoint}
    return Loop(objective, options(**given), loader, READER, **more).run(progress=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"progress": {"history": [{"loss": 1.0}]}}, "no validation NLL"),
        ({"best": {}}, "epoch 0 is the best, and its tensors are not there"),
        ({"progress": {"best": -1}}, "epoch -1 is the best"),
    ],
)
def test_states_that_cannot_be_are_not_gone_on_from(change: dict[str, Any], named: str) -> None:
    def loop() -> Loop:
        held_out = loader_of([0.0])
        return Loop(Quadratic(losses=[1.0]), options(epochs=1), held_out, READER, seed=0, val_loader=held_out)

    first = loop()
    first.run(progress=False)
    state = first.state_dict()
    loop().load_state_dict(state)
    changed = {
        name: state[name] | new if isinstance(new, dict) and new else new for name, new in change.items()
    }
    with pytest.raises(ValueError, match=named):
        loop().load_state_dict(state | changed)


def test_weights_of_the_training_data_are_not_asked_of_held_out_data() -> None:
    """Nor where a row of these is looked for that is not finite."""

    def weights(batch: Any) -> Tensor:
        if batch[0].isnan().any():
            raise KeyError("weights")
        return torch.ones(len(batch[0]))

    reader, held_out = replace(READER, batch_to_weights=weights), [(torch.full((1, 1), nan), torch.zeros(1))]
    loop = Loop(
        Quadratic(losses=[nan]), options(epochs=1), loader_of([0.0]), reader, seed=0, val_loader=held_out
    )
    with pytest.raises(NonFiniteError, match="Batch 0: "):
        loop.run(progress=False)


def test_steps_are_those_of_the_optimiser_and_the_schedule() -> None:
    seen: list[float] = []

    def schedule(progress: float) -> float:
        seen.append(progress)
        return 1 - progress

    objective = Quadratic()
    history = trained(objective, loader_of([0.0, 2.0]), epochs=3, schedule=schedule)
    w, losses = 1.0, []
    for step, target in enumerate([0.0, 2.0] * 3):
        losses.append(0.5 * (w - target) ** 2)
        w -= 0.1 * (1 - step / 6) * (w - target)
    assert float(objective.w.detach()) == pytest.approx(w, rel=1e-6)
    assert seen == pytest.approx([step / 6 for step in range(6)])
    assert [entry["loss"] for entry in history] == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-5
    )
    assert len(set(objective.seeds)) == 6  # every step draws anew


def test_a_loader_of_unknown_length_is_counted() -> None:
    class Unknown:
        def __iter__(self) -> Iterator[Any]:
            return iter(loader_of([0.0, 1.0, 2.0, 3.0]))

    seen: list[float] = []

    def schedule(progress: float) -> float:
        seen.append(progress)
        return 1.0

    trained(Quadratic(), Unknown(), epochs=2, schedule=schedule)
    assert seen == pytest.approx([0.0] * 4 + [0.5, 0.625, 0.75, 0.875])


@pytest.mark.parametrize(
    ("samples", "batches", "epochs"),
    [
        (1200, 19, 211),
        (106, 2, 2000),
        (5000, 4000, 10),
        (49_999, 200, 11),  # no more passes of samples than 50,000 take
        (50_000, 200, 10),
        (60_000, 60, 10),
    ],
)
def test_small_data_take_more_epochs_and_large_ones_the_usual(
    samples: int, batches: int, epochs: int
) -> None:
    assert Plain().epochs_over(samples, batches) == epochs
    assert Plain(epochs=3).epochs_over(samples, batches) == 3


@pytest.mark.parametrize("method", ["function_space", "latent_binary", "utvi"])
def test_a_fit_without_epochs_takes_the_least_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posthoc_uq.trained.training.MIN_STEPS", 28)
    model, x = mlp(), inputs_of(4, samples=20)
    data = batches(x, targets_of(model, x, "classification"))
    plain: dict[str, Any] = (
        {"progress": False, "divergence": None} if method != "latent_binary" else {"progress": False}
    )
    fitted = uq.fit(model, data, method, **plain)
    assert fitted.history.fit["epochs"] == 10  # as 28 / 3, rounded up
    monkeypatch.setattr("posthoc_uq.trained.training.MIN_STEPS", 37)
    # the batches of a loader without a length are reckoned from the first one
    fitted = uq.fit(model, WithoutLength(data), method, **plain)
    assert fitted.history.fit["epochs"] == 13
    assert uq.fit(model, data, method, epochs=2, **plain).history.fit["epochs"] == 2


class WithoutLength:
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def test_default_schedule() -> None:
    assert cosine(0.0) == 1.0 and cosine(1.0) == pytest.approx(0.05) and cosine(0.5) == pytest.approx(0.525)


def test_entries_of_a_gradient_are_clipped() -> None:
    objective = Quadratic(start=100.0)
    trained(objective, loader_of([0.0]), epochs=1, clip=0.5)
    assert float(objective.w.detach()) == pytest.approx(100 - 0.1 * 0.5)


@pytest.mark.parametrize(("patience", "epochs"), [(None, 5), (2, 4), (1, 3)])
def test_the_best_epoch_is_kept(patience: int | None, epochs: int) -> None:
    """Held-out losses 3, 1, 2, 2, 2: the weights are those after the second epoch, and patience ends the training."""
    objective = Quadratic(losses=[3.0, 1.0, 2.0, 2.0, 2.0])
    data = loader_of([0.0])
    history = trained(objective, data, data, epochs=5, patience=patience)
    assert len(history) == epochs and best_epoch(history) == 2
    assert [entry["validation NLL"] for entry in history] == [3.0, 1.0, 2.0, 2.0, 2.0][:epochs]
    assert float(objective.w.detach()) == pytest.approx(0.9**2)


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    objective, data = Quadratic(losses=[float("nan"), 3.0, float("nan"), 2.0, 2.5]), loader_of([0.0])
    history = trained(objective, data, data, epochs=5)
    assert float(objective.w.detach()) == pytest.approx(0.9**4) and best_epoch(history) == 4
    assert best_epoch([{"loss": 1.0}] * 3) == 3  # without held-out data the last one is kept


def test_what_is_not_finite_names_its_step() -> None:
    objective = Quadratic()
    objective.broken = 5
    with pytest.raises(NonFiniteError, match=r"Step 5 \(epoch 2, batch 1\): the loss is not finite"):
        trained(objective, loader_of([0.0] * 4), epochs=3)
    assert bool(torch.isfinite(objective.w).all())  # stopped before the step was taken


# Interruptions

OPTIMISERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "AMSGrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),  # whose state has precisions of its own
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.covering(1)
def test_a_training_goes_on_with_any_optimiser(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def result(loader: Any) -> Tensor:
        objective = Quadratic()
        objective.w = torch.ones(3, dtype=dtype).requires_grad_()
        objective.losses = [3.0, 1.0, 2.0]
        checkpoint = Checkpoint(tmp_path / "c", 1, {})
        trained(objective, loader, loader_of([0.0]), checkpoint, epochs=3, optimizer=OPTIMISERS[name])
        checkpoint.remove()
        return objective.w.detach()

    class Stops:
        left = 7

        def __iter__(self) -> Iterator[Any]:
            for batch in loader_of([0.0, 1.0, 2.0]):
                if self.left == 0:
                    raise RuntimeError("the power went out")
                self.left -= 1
                yield batch

    whole = result(loader_of([0.0, 1.0, 2.0]))
    with pytest.raises(RuntimeError, match="the power"):
        result(Stops())
    assert torch.equal(result(loader_of([0.0, 1.0, 2.0])), whole)


def test_another_optimiser_cannot_go_on(tmp_path: Path) -> None:
    """Nor one whose state has other names."""
    path, loader = tmp_path / "c", loader_of([0.0, 1.0])

    def run(**given: Any) -> None:
        trained(Quadratic(), loader, None, Checkpoint(path, 1, {}), **given)

    run(epochs=1)
    with pytest.raises(uq.CorruptPosteriorError, match="its optimiser is SGD, and that of this fit Adam"):
        run(epochs=1, optimizer=None)
    path.unlink()
    run(epochs=1, optimizer=None)
    state = read_snapshot(path)
    state["running"][1]["optimiser"][1]["state"] = {0: {"step": torch.ones(()), "evil": torch.zeros(3)}}
    write_snapshot(path, state)
    with pytest.raises(uq.CorruptPosteriorError, match=r"the state of its optimiser.*no .exp_avg.*Delete it"):
        run(epochs=2, optimizer=None)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).eval()


def data(samples: int = 40, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


class Fragile:
    """A shuffling loader that fails with a batch of a given number over all passes."""

    def __init__(self, after: int | None) -> None:
        self._loader = DataLoader(data(), batch_size=8, shuffle=True)
        self._after, self._count = after, 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._count == self._after:
                raise RuntimeError("the power went out")
            self._count += 1
            yield batch


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "held-out data": {"val_loader": DataLoader(data(12, 2), batch_size=5), "patience": 3},
    "independent prior": {"prior": "independent", "context": "corrupted"},
    "momentum": {
        "optimizer": lambda groups: torch.optim.SGD(groups, momentum=0.9),
        "n_sets": 2,
        "body": "sample",
    },
}


def fitted(scenario: str, path: Path | None, loader: Any, **more: Any) -> uq.Posterior:
    return uq.fit(
        net(),
        loader,
        method="function_space",
        epochs=4,
        lr=1e-2,
        n_context=8,
        initial_body_log_variance=-6.0,
        checkpoint=path,
        checkpoint_every=2,
        progress=False,
        **SCENARIOS[scenario],
        **more,
    )


def same(first: uq.Posterior, second: uq.Posterior) -> bool:
    return all(
        torch.equal(block.variances, second.blocks[name].variances) for name, block in first.blocks.items()
    ) and all(torch.equal(first.mean[name], second.mean[name]) for name in first.mean)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_interrupted_training_ends_as_if_it_had_not_been(scenario: str, tmp_path: Path) -> None:
    """Failures in the pass for the context, in the first epoch, at an epoch's end, in a later one."""
    whole, path = fitted(scenario, None, Fragile(None)), tmp_path / "c.h5"
    for after in (3, 5 + 3, 5 + 4, 5 + 5, 5 + 8):  # training begins after a pass of 5 batches
        with pytest.raises(RuntimeError, match="the power went out"):
            fitted(scenario, path, Fragile(after))
    found = fitted(scenario, path, Fragile(None))
    assert same(whole, found) and not path.exists()
    assert found.history.fit["epochs"] == whole.history.fit["epochs"]
    assert found.history.fit["loss"] == whole.history.fit["loss"]


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    with pytest.raises(RuntimeError, match="the power"):
        fitted("held-out data", path, Fragile(13))
    other = {"val_loader": [data(12, 3)[:]], "patience": 3}
    for word, scenario, loader, more in (
        ("patience|held-out data", "plain", Fragile(None), {}),
        ("prior_precision|prior", "held-out data", Fragile(None), {"prior_precision": 100.0}),
        ("divergence", "held-out data", Fragile(None), {"divergence": 0.1}),
        ("first batch", "held-out data", DataLoader(data(40, 5), batch_size=8), {}),
        ("held-out data", "plain", Fragile(None), other),
    ):
        with pytest.raises(PosthocUQError, match=f"the checkpoint of another fit: its ({word})"):
            fitted(scenario, path, loader, **more)


def test_another_order_in_an_epoch_is_refused(tmp_path: Path) -> None:
    """The same first batch, but others after it."""
    path = tmp_path / "c.h5"
    own = DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))

    class Stopping:
        count = 0

        def __iter__(self) -> Iterator[Any]:
            yield next(iter(DataLoader(data(), batch_size=8)))
            for batch in own:
                type(self).count += 1
                if type(self).count == 13:
                    raise RuntimeError("the power went out")
                yield batch

    with pytest.raises(RuntimeError, match="the power"):
        fitted("plain", path, Stopping())
    with pytest.raises(PosthocUQError, match="does not begin with the batches"):
        fitted("plain", path, Stopping())


class Augmented(TensorDataset):
    """Its inputs are other ones whenever they are read."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


def test_epochs_that_draw_their_data_go_on(tmp_path: Path) -> None:
    """A shuffling loader leaves other samples out in every epoch, and inputs are drawn anew: not a change of data."""
    path, drawn = tmp_path / "c.h5", Augmented(*data(38).tensors)

    class Drawn:
        def __init__(self, after: int = -1) -> None:
            self.left = after

        def __iter__(self) -> Iterator[Any]:
            for batch in DataLoader(drawn, batch_size=8, shuffle=True, drop_last=True):
                if self.left == 0:
                    raise RuntimeError("the power went out")
                self.left -= 1
                yield batch

    with pytest.raises(RuntimeError, match="the power"):
        fitted("plain", path, Drawn(1 + 4 + 8 + 2))
    assert path.exists()
    assert same(fitted("plain", None, Drawn()), fitted("plain", path, Drawn()))


# A new start


def test_a_new_initialisation_is_one_of_the_statistics_too() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.full((1, 4, 6), 5.0))
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.norm = nn.BatchNorm1d(4)

    model = Positioned()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
        model.norm.running_mean.fill_(3.0)
    with torch.random.fork_rng(), pytest.warns(UserWarning, match=r"keeps 1 trained parameters.*'position'"):
        trained = {name: p.detach() for name, p in model.named_parameters()}
        found = initialised(model, trained, 0, "prior_mean='random_init'")
    assert (
        float(model.norm.running_mean.mean()) == 3.0 and float(found["norm.running_mean"].abs().max()) == 0.0
    )
    assert all(float(p.detach().mean()) == 5.0 for p in model.parameters())
    assert all(
        not bool((found[name] == 5).any()) for name, _ in model.named_parameters() if name != "position"
    )
