"""Continual learning: one network learns digits at one angle after another, and is asked for all of them at the end.

The loss of a later task has a penalty for leaving what the earlier ones settled: ``-log p(theta)`` under the posterior
that was fitted after each (elastic weight consolidation with the diagonal, Kirkpatrick et al. 2017; with Kronecker
factors Ritter, Botev, Barber 2018). Beside it: no penalty, and the squared distance from the old weights. The strength
of every penalty is chosen by held-out rows of the tasks.

    python -m recipes.continual_learning.run            two seeds; minutes on one core
    python -m recipes.continual_learning.run --smoke    two tasks, one strength, seconds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import by_row, in_order, in_random_order, parsed, parser, report, table

ANGLES = (0, 30, 60, 90, 120)
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # of posteriors, for which 1 is Bayes' rule
OF_DISTANCE = (1e1, 1e2, 1e3, 1e4)
TRAINED, HELD_OUT = 1000, 300  # rows
METHODS: Mapping[str, uq.Method] = {
    "diagonal": uq.Diagonal(fisher="exact"),
    "KFAC": uq.KFAC(fisher="exact"),
    "INF": uq.INF(fisher="exact"),
}
Penalty = Callable[[nn.Module], Tensor]
Task = tuple[Tensor, Tensor]


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images ``(samples, 8, 8)`` turned, as rows ``(samples, 64)``."""
    angle = torch.deg2rad(torch.tensor(degrees))
    turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0])
    grid = F.affine_grid(turn.reshape(1, 2, 3).expand(len(images), -1, -1), (len(images), 1, 8, 8), False)
    return F.grid_sample(images.unsqueeze(1), grid, align_corners=False).flatten(1)


def tasks(seed: int, angles: Sequence[float]) -> list[dict[str, Task]]:
    """For each angle the rows to train on, to choose by and to test on; they are the same digits at all angles."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float().reshape(-1, 8, 8) / 16, torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = dict(
        zip(("train", "held out", "test"), order.tensor_split([TRAINED, TRAINED + HELD_OUT]), strict=True)
    )
    turned = [rotated(images, angle) for angle in angles]
    return [{name: (x[rows], labels[rows]) for name, rows in parts.items()} for x in turned]


def accuracies(model: nn.Module, of: Sequence[Task]) -> list[float]:
    with torch.no_grad():
        return [float((model(x).argmax(1) == y).float().mean()) for x, y in of]


def learn(
    model: nn.Module, task: Task, penalties: Sequence[Penalty], strength: float, seed: int, epochs: int
) -> None:
    """Train a network on a task: its mean loss, and the penalties of the earlier ones in the same units."""
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for x, y in chain.from_iterable(in_random_order(*task, 50, generator) for _ in range(epochs)):
        loss = F.cross_entropy(model(x), y)
        for penalty in penalties:
            loss = loss + strength * penalty(model) / len(task[1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def of_posterior(model: nn.Module, task: Task, method: uq.Method) -> Penalty:
    posterior = uq.fit(model, in_order(*task, 200), method, prior_precision=1.0, progress=False)
    _ = posterior.log_prob(model)  # from now on the model may be trained further
    return lambda changed: -posterior.log_prob(changed)


def of_distance(model: nn.Module) -> Penalty:
    old = deepcopy(model)
    return lambda changed: sum(
        (
            (new - then.detach()).square().sum()
            for new, then in zip(changed.parameters(), old.parameters(), strict=True)
        ),
        torch.zeros(()),
    )


def run(kind: str, given: Sequence[Mapping[str, Task]], strength: float, seed: int, epochs: int) -> nn.Module:
    """The network after all tasks, each of which it saw once."""
    torch.manual_seed(seed)
    model, penalties = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), list[Penalty]()
    for number, task in enumerate(given):
        learn(model, task["train"], penalties, strength, seed, epochs)
        if number == len(given) - 1 or kind == "fine-tuning":
            continue
        if kind == "squared distance":
            penalties = [of_distance(model)]
        else:
            penalties.append(of_posterior(model, task["train"], METHODS[kind]))
    return model


def of_seed(
    seed: int, angles: Sequence[float], strengths: Sequence[float], epochs: int
) -> dict[str, dict[str, float]]:
    """Of every kind of penalty the accuracies at its best strength."""
    given, rows = tasks(seed, angles), dict[str, dict[str, float]]()
    for kind in ("fine-tuning", "squared distance", *METHODS):
        found = list[tuple[float, float, nn.Module]]()
        own = {"fine-tuning": strengths[:1], "squared distance": OF_DISTANCE[: len(strengths)]}
        for strength in own.get(kind, strengths):
            model = run(kind, given, strength, seed, epochs)
            held_out = accuracies(model, [task["held out"] for task in given])
            found.append((sum(held_out) / len(held_out), strength, model))
        _, strength, model = max(found, key=lambda each: each[0])
        tested = accuracies(model, [task["test"] for task in given])
        rows[kind] = {"mean": sum(tested) / len(tested)}
        rows[kind] |= {f"{angle}°": value for angle, value in zip(angles, tested, strict=True)}
        rows[kind] |= {} if kind == "fine-tuning" else {"strength": strength}
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "continual_learning", "two tasks, one strength")
    command.add_argument("--seeds", type=int, default=2)
    options = parsed(command, arguments, seeds=1)
    angles, strengths, epochs = (ANGLES[:2], (1.0,), 2) if options.smoke else (ANGLES, STRENGTHS, 15)
    results = [of_seed(seed, angles, strengths, epochs) for seed in range(options.seeds)]
    report(options, "continual_learning", table(by_row(results), ".3g", corner="penalty"), results)


if __name__ == "__main__":
    main()
