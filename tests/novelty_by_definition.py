"""Novelty over layers from its definition, in float64 numpy: training rows are left out by forming their Grams anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

Array = np.ndarray
SMOOTHING = 3e-4


def with_one(rows: Tensor | Array) -> Array:
    """Features with a 1 for the bias."""
    rows = np.asarray(rows, dtype=np.float64)
    return np.concatenate([rows, np.ones((len(rows), 1))], 1)


def _ratios(grams: dict[int, Array], ridges: dict[int, float], phi: Array) -> Array:
    """The least ratio over the classes, for one row."""
    found = []
    for label, gram in grams.items():
        ridge = ridges[label]
        inverse = np.linalg.inv(gram + ridge * np.eye(len(gram)))
        found.append(phi @ inverse @ phi * ridge / (phi @ phi))
    return np.min(found)


def ratios(train: Array, classes: Array, test: Array, smoothing: float = SMOOTHING) -> tuple[Array, Array]:
    """Of other rows, and of the training rows, each without itself in its class's Gram."""
    grams = {int(label): train[classes == label].T @ train[classes == label] for label in np.unique(classes)}
    ridges = {label: smoothing * np.trace(gram) / len(gram) for label, gram in grams.items()}
    of_test = np.array([_ratios(grams, ridges, phi) for phi in test])
    left_out = []
    for phi, label in zip(train, classes, strict=True):
        own = {**grams, int(label): grams[int(label)] - np.outer(phi, phi)}
        left_out.append(_ratios(own, ridges, phi))
    return of_test, np.array(left_out)


def log_odds(values: Array) -> Array:
    return np.log(values) - np.log1p(-np.minimum(values, 1 - 1e-16))


def surprise_scale(left_out: Array) -> tuple[Array, float]:
    values = log_odds(left_out)
    quantiles = np.quantile(values, np.arange(19) / 20)
    above = values[values > quantiles[-1]] - quantiles[-1]
    return quantiles, max(0.05, float(above.mean()) if len(above) else 0.0)


def over_layers(
    train: Sequence[Array], classes: Array, test: Sequence[Array], by_class: Sequence[bool] | None = None
) -> Array:
    """Novelty by the rows of several layers, the last layer first."""
    found = []
    for place, (own, other) in enumerate(zip(train, test, strict=True)):
        labels = classes if by_class is None or by_class[place] else np.zeros_like(classes)
        of_test, left_out = ratios(own, labels, other)
        found.append((of_test, surprise_scale(left_out)))
    total = np.zeros(len(test[0]))
    for place, (of_test, scale) in enumerate(found):
        own = surprise(log_odds(of_test), *scale)
        total += np.square(np.where((own > 4) & (place > 0), 4 + np.log1p(np.maximum(own - 4, 0)), own))
    last, (quantiles, excess) = found[0]
    total = np.sqrt(total)
    at_last = np.interp(1 - np.exp(-total), np.arange(19) / 20, quantiles)
    at_last += np.maximum(total - np.log(10), 0) * excess
    return np.maximum(last, 1 / (1 + np.exp(-at_last)))


def surprise(values: Array, quantiles: Array, excess: float) -> Array:
    """The negative logarithm of the share of training rows that are at least as novel."""
    shares = 1 - np.interp(values, quantiles, np.arange(19) / 20)
    return -np.log(shares) + np.maximum(values - quantiles[-1], 0) / excess


def pooled(x: Array, channel: int, counted: Array | None = None, rough: bool = False) -> Array:
    """Mean and deviation of each channel over the positions that count, and the roughness of all, with a 1."""
    x = np.moveaxis(np.asarray(x, dtype=np.float64), channel, 1)
    parts = []
    for number, sample in enumerate(x):
        positions = sample.reshape(len(sample), -1)
        own = positions if counted is None else positions[:, counted[number] > 0]
        found = [own.mean(1), own.std(1)]
        if rough:
            directions = [np.diff(sample, axis=d).reshape(len(sample), -1) for d in range(1, sample.ndim)]
            found.append(np.sqrt(np.mean([np.square(each).mean(1) for each in directions], 0)))
        parts.append(np.concatenate(found))
    return with_one(np.stack(parts))
