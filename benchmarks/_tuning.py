"""`defaults.py --tuning`: what held-out tuning gains and loses with few labels, on networks that choose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from statistics import mean
from typing import Any

import torch
from _cache import Rows
from _harm import markdown
from _scored import plain_scores, predicted, prediction_scores
from _sets import Labelled
from _zoo import CLASSIFIERS, Pair, loader, trained

import posthoc_uq as uq

tune = import_module("posthoc_uq.fitting.tune")

NAMES = (
    "iris, mlp relu 32 32",
    "digits, mlp relu",
    "digits, mlp gelu layer 64 64",
    "fashion 1000, mlp relu 128 128",
)
SAMPLES = (30, 100, 300)
TEST = 500
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no prior on the temperature": {"spread": 1e6},
    "spread 0.5": {"spread": 0.5},
    "no temperature": {"temperature": False},
    "no share of the best NLL": {"share": float("inf")},
    "from 0.003 nats": {"divergence": 0.003},
    "from 0.03 nats": {"divergence": 0.03},
}


def measured(pair: Pair, seed: int) -> dict[str, Any]:
    """Scores of network, fit and every variant of tuning, by the number of held-out samples."""
    model, split = trained(pair, seed), pair.split(seed)
    posterior = uq.fit(model, loader(split.train), progress=False, **pair.options)
    kept = {name: getattr(posterior, name) for name in ("prior_precision", "temperature", "scale")}
    records = {name: dict(getattr(posterior.history, name)) for name in ("tuning", "head", "faithful")}
    order = torch.randperm(len(split.test.targets), generator=torch.Generator().manual_seed(seed))
    half = len(order) // 2
    test = _part(split.test, order[half:][:TEST])

    def scores() -> dict[str, float]:
        return prediction_scores(predicted(uq.wrap(model, posterior), test.inputs), test)

    found: dict[str, Any] = {"network": plain_scores(model, split.train, test), "fit": scores()}
    for samples in (n for n in SAMPLES if n <= half):
        for name, options in VARIANTS.items():
            for attribute, value in kept.items():
                setattr(posterior, attribute, value)
            for attribute, record in records.items():
                setattr(posterior.history, attribute, dict(record))
            _tune(posterior, _part(split.test, order[:samples]), **options)
            found[f"{name}, {samples}"] = scores() | {"temperature": posterior.temperature}
    return found


def _part(data: Labelled, rows: torch.Tensor) -> Labelled:
    return Labelled(data.inputs[rows], data.targets[rows])


def _tune(
    posterior: uq.Posterior,
    data: Labelled,
    spread: float | None = None,
    share: float | None = None,
    **options: Any,
) -> None:
    before = tune.SPREAD, tune.SHARE
    tune.SPREAD = before[0] if spread is None else spread
    tune.SHARE = before[1] if share is None else share
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            uq.tune(posterior, loader(data), progress=False, **options)
    finally:
        tune.SPREAD, tune.SHARE = before


def rows_of(rows: Rows, seeds: Sequence[int], names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """One row for each network."""
    for pair in (p for name in NAMES for p in CLASSIFIERS if p.name.startswith(name)):
        if names is not None and not any(name in pair.name for name in names):
            continue
        for seed in seeds:
            key = {"study": "tuning", "pair": pair.name, "seed": seed}
            row = rows.row(key, partial(measured, pair, seed))
            if row is not None:
                yield key | row


def tables(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each variant and number of samples."""
    pairs = list(dict.fromkeys(row["pair"] for row in found if "error" not in row))
    header = ["labels", "tuning", *(f"{pair}: NLL, ECE, temperature" for pair in pairs)]
    lines: list[list[str]] = []
    for samples in SAMPLES:
        for name in VARIANTS:
            line = [str(samples), name]
            for pair in pairs:
                rows = [row for row in found if row["pair"] == pair and f"{name}, {samples}" in row]
                line.append(_cell(rows, f"{name}, {samples}") if rows else "-")
            lines.append(line)
    return markdown(header, lines)


def _cell(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    losses = [mean(row[name][measure] - row["fit"][measure] for row in rows) for measure in ("NLL", "ECE")]
    return f"{losses[0]:+.3f}, {losses[1]:+.3f}, {mean(row[name]['temperature'] for row in rows):.2f}"
