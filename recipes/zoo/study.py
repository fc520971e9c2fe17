"""What the zoo's recipes share: a fit as a user types it, its file, and scores by kind of input."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

import posthoc_uq as uq
from recipes.common import parsed, parser, report, table

Loader = Sequence[tuple[Any, Tensor]]


class Kind(NamedTuple):
    """Inputs of one kind."""

    batches: Loader
    targets: Tensor | None
    """Of all batches; None where no answer is right."""


class Measured(NamedTuple):
    """What predictions of one kind give."""

    scores: dict[str, Tensor]
    """A number a sample or position, more of it where there is more doubt."""
    facts: dict[str, float]


Measure = Callable[[Any, Tensor | None], Measured]


def auroc(familiar: Tensor, foreign: Tensor) -> float:
    """How often a foreign score is above a familiar one."""
    labels = torch.cat([torch.zeros(familiar.numel()), torch.ones(foreign.numel())]).long()
    return float(binary_auroc(torch.cat([familiar.flatten(), foreign.flatten()]), labels))


def classes(within: int = 0, fact: str = "right") -> Measure:
    """Entropy and novelty, the share of right classes and, where at least five are wrong, whether entropy tells them.

    Args:
        within: classes this far from the target are right, too.
        fact: name of their share.
    """

    def measure(found: Any, targets: Tensor | None) -> Measured:
        entropy, facts = found.entropy(), dict[str, float]()
        if targets is not None:
            known = targets >= 0  # -100 is no target
            right = ((found.predicted() - targets).abs() <= within)[known]
            facts[fact] = float(right.float().mean())
            if 5 <= int((~right).sum()) < right.numel():
                facts["errors told by entropy"] = auroc(entropy[known][right], entropy[known][~right])
            return Measured({"entropy": entropy[known], "novelty": _as(found.novelty(), known)}, facts)
        return Measured({"entropy": entropy.flatten(), "novelty": found.novelty().flatten()}, facts)

    return measure


def _as(novelty: Tensor, known: Tensor) -> Tensor:
    """Novelty where there is a target; that of a sample where positions have none of their own."""
    return novelty[known] if novelty.shape == known.shape else novelty


def values(found: Any, targets: Tensor | None) -> Measured:
    """Standard deviation and novelty, the root mean squared error, and the share of targets in intervals of 90 %."""
    scores = {"deviation": found.variance.sqrt().mean(1), "novelty": found.novelty()}
    facts = dict[str, float]()
    if targets is not None:
        low, high = found.interval(0.9)
        facts["RMSE"] = float((found.mean - targets).square().mean().sqrt())
        facts["within 90 %"] = float(((low <= targets) & (targets <= high)).float().mean())
    return Measured(scores, facts)


def options_of(
    description: str | None, arguments: Sequence[str] | None, samples: int, few: int
) -> argparse.Namespace:
    """The options of a recipe of the zoo: ``--samples``, of which a smoke run takes a few."""
    command = parser(description, "zoo", "most samples")
    command.add_argument(
        "--samples", type=int, default=samples, help="of the fit, and of every kind of input"
    )
    return parsed(command, arguments, samples=few)


def study(
    options: argparse.Namespace,
    name: str,
    model: nn.Module,
    loader: Loader,
    kinds: Mapping[str, Kind],
    measure: Measure,
    **fit: Any,
) -> None:
    """Fit, save, load, predict every kind and print a table.

    Args:
        options: see `options_of`.
        name: of all files that are written.
        model: with its weights, in eval mode.
        loader: of the fit.
        kinds: by name; the first is familiar, and the AUROC of a score is of another kind against it.
        measure: `classes` or `values`.
        **fit: arguments of `uq.fit` other than the defaults.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    posterior = uq.fit(model, loader, progress=False, **fit)
    minutes = {"fit": (time.perf_counter() - began) / 60}
    path = options.output / f"{name}.h5"
    uq.save(posterior, path)
    predictor = uq.wrap(model, uq.load(path, model))
    first = next(iter(kinds.values())).batches[:1]
    fitted, loaded = (one.predict(first, progress=False) for one in (uq.wrap(model, posterior), predictor))
    if not all(torch.equal(value, loaded.to_dict()[key]) for key, value in fitted.to_dict().items()):
        raise RuntimeError("The posterior of the file does not predict what the fitted one does.")
    began, rows, familiar = time.perf_counter(), dict[str, dict[str, float]](), dict[str, Tensor]()
    for kind, (batches, targets) in kinds.items():
        scores, facts = measure(predictor.predict(batches, progress=False), targets)
        row = rows.setdefault(kind, facts)
        for score, numbers in scores.items():
            row[score] = float(numbers.mean())
            if familiar:
                row[f"AUROC, {score}"] = auroc(familiar[score], numbers)
        familiar = familiar or scores
    minutes["prediction"] = (time.perf_counter() - began) / 60
    spent = ", ".join(f"{part} {value:.2f}" for part, value in minutes.items())
    page = f"{table(rows, '.2f', corner='kind')}\n\nMinutes on one core: {spent}."
    report(options, name, page, {"rows": rows, "minutes": minutes})
