"""A shift, and a scale, of each class by held-out labels: where a network's class rates are not those of new data.

A network that was trained with class weights, or on rows that were drawn by class, predicts the class rates of that
training. No temperature mends this. A shift of each class's logit does, ``z / T + b``; vector scaling has a scale of
each class, too, ``a z / T + b`` (Guo, Pleiss, Sun, Weinberger 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.posteriors.settings import Hyperparameters

Scaling = Literal["auto", "temperature", "bias", "vector"]
"""What held-out labels choose of a posterior over logits: ``"temperature"`` alone, a shift of each class with it
(``"bias"``), a scale of each class, too (``"vector"``), or with ``"auto"`` the shift where labels clearly speak for it.
"""
Numbers = NDArray[np.float64]
Penalty = Callable[[float], float]
"""Minus the logarithm of the prior density of a temperature."""

SHIFT_SPREADS = (0.1, 0.3, 1.0, 3.0)
"""Standard deviations of the normal priors on shifts, all as likely; what is found is averaged by the evidence."""
SCALE_SPREADS = (0.1, 0.3)
"""The same of the logarithms of scales."""
MIN_WEIGHT = 0.9
"""The posterior probability of a shift, as likely as none before, from which ``"auto"`` takes it ..."""
MAX_P_VALUE = 0.05
"""... where labels would be as far from the mean probabilities by chance with this probability at most."""
_LEAST_SHOWN = 0.001  # p-value of a class, times their number, from which a disagreement is said ...
_AGREE = 0.8, 1.25  # ... unless the mean probability is so near to the frequency
_MAX_NAMES = 4  # of classes in a text
_SMALLEST = -1e4  # logit of a class that is masked out
_BOUND = 12.0
_DECADES = -1.0, 1.5
_MAX_NUMBERS = 2**20  # logits that are looked at; of more, rows at even distances


class ClassTable(NamedTuple):
    """Logits as a prediction has them, and labels.

    Attributes:
        logits: ``(rows, classes)``; ``(rows, labels)`` where each is of a label 0 or 1. Their softmax, or sigmoid, is
            what was predicted, which is a mean over weights.
        labels: shares of the classes, or 0 and 1, of the same shape.
        softmax: whether rows are of one class.
        known: how many rows have each label, where some are missing. Those have the logit -1e4 and the label 0, which
            adds nothing to any sum.
    """

    logits: Numbers
    labels: Numbers
    softmax: bool
    known: Numbers | None = None

    @property
    def rows(self) -> Numbers:
        """How many rows have each class or label."""
        return np.full(self.labels.shape[1], float(len(self.labels))) if self.known is None else self.known

    def before(self, settings: Hyperparameters) -> ClassTable:
        """The same without the temperature, shift and scale that these settings gave them."""
        logits = self.logits - (np.array(settings.class_shift) if settings.class_shift else 0.0)
        logits = logits / (np.array(settings.class_scale) if settings.class_scale else 1.0)
        return self._replace(logits=logits * settings.temperature)

    def of(self, classes: NDArray[np.bool_]) -> ClassTable:
        """Of these classes or labels alone."""
        known = None if self.known is None else self.known[classes]
        return self._replace(logits=self.logits[:, classes], labels=self.labels[:, classes], known=known)

    def at(self, temperature: float) -> ClassTable:
        """Of logits as they are those at a temperature."""
        return self._replace(logits=self.logits / temperature)

    def probabilities(self, logits: Numbers) -> Numbers:
        """Of logits of this kind."""
        from scipy.special import expit, softmax

        return softmax(logits, 1) if self.softmax else expit(logits)

    def loss_and_probabilities(self, logits: Numbers) -> tuple[float, Numbers]:
        """Minus the log-probability of all labels, and the probabilities of logits of this kind."""
        from scipy.special import log_expit, log_softmax

        if self.softmax:
            logs = log_softmax(logits, 1)
            return -float(np.vdot(self.labels, logs)), np.exp(logs)
        logs = log_expit(logits)
        return -float(logs.sum() - np.vdot(1 - self.labels, logits)), np.exp(logs)

    def information(self, probs: Numbers, left: Numbers, right: Numbers) -> Numbers:
        """``sum_rows diag(left) (diag(p) - p p^T) diag(right)``, ``(classes, classes)``; of labels diagonal."""
        if not self.softmax:
            return np.diag((left * right * probs * (1 - probs)).sum(0))
        return np.diag((left * probs * right).sum(0)) - (left * probs).T @ (right * probs)

    def shift_information(self, probs: Numbers) -> tuple[Numbers, Numbers]:
        """The information on shifts as ``diag(first) - second^T second``, which many classes leave as it is."""
        if not self.softmax:
            return (probs * (1 - probs)).sum(0), np.zeros((0, probs.shape[1]))
        return probs.sum(0), probs

    def has_both(self) -> NDArray[np.bool_]:
        """Of which classes, or labels, some rows say yes and some no, ``(classes,)``; of classes: which any row has."""
        counts = self.labels.sum(0)
        return counts > 0 if self.softmax else (counts > 0) & (counts < self.rows)

    def p_value(self) -> float:
        """How probable labels are that are, in their sums by class, as far from the mean probabilities: by a chi-square
        statistic, with half a label added to each class's variance, since few labels are not normal.
        """
        from scipy.special import gammaincc

        probs = self.probabilities(self.logits)
        off = (self.labels - probs).sum(0)
        shares, rows = self.shift_information(probs)
        _, solved = _less_gram(shares + 0.5, rows, off)
        return float(gammaincc((len(off) - self.softmax) / 2, off @ solved / 2))

    def disagreement(self) -> str | None:
        """Which class, or label, has the frequency that is clearest another than its mean probability, in words with
        both, and what mends it; None where chance may have made it so.
        """
        from scipy.special import ndtr

        probs = self.probabilities(self.logits)
        means, rates = probs.sum(0) / self.rows, self.labels.sum(0) / self.rows
        deviations = ((probs * (1 - probs)).sum(0) + 0.5) ** 0.5
        p_values = 2 * ndtr(-np.abs((self.labels - probs).sum(0)) / deviations) * len(means)
        if self.softmax and len(means) == 2:  # one says what the other does: the rarer one
            p_values[int(rates.argmax())] = 1.0
        agrees = (means >= _AGREE[0] * rates) & (means <= _AGREE[1] * rates)
        p_values[agrees] = 1.0
        worst = int(p_values.argmin())
        if p_values[worst] >= _LEAST_SHOWN:
            return None
        name = f"class {worst}" if self.softmax else "class 1" if len(means) == 1 else f"label {worst}"
        return (
            f"{rates[worst]:.1%} of the held-out rows have {name}, and its mean probability is {means[worst]:.1%}: "
            f"the network was trained at other class rates. scaling='bias' gives each class's logit a shift that mends "
            f"this."
        )

    def absence(self) -> str | None:
        """Which classes no row has, though rows were predicted to have some of them, in words with what follows; None
        where chance may have made it so.
        """
        absent = ~self.has_both()
        if not self.softmax or not absent.any():
            return None
        total = self.probabilities(self.logits)[:, absent].sum(1)
        if np.log1p(-np.minimum(total, 1 - 1e-12)).sum() > np.log(_LEAST_SHOWN):
            return None
        names = [f"class {each}" for each in absent.nonzero()[0]]
        return (
            f"No held-out row has {listed(names)}, which were predicted with {total.mean():.1%}: their logits stay as "
            f"they are. Give rows of each; if new inputs have none either, scaling='bias' moves them, too."
        )


def listed(names: Sequence[str]) -> str:
    """Names as one text: the first few, and how many more there are."""
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    *first, last = [*names[:_MAX_NAMES], *more]
    return f"{', '.join(first)} and {last}" if first else last


class ClassRows:
    """Predictions and labels as they come; of very many rows those at even distances."""

    def __init__(self) -> None:
        self._logits, self._labels, self._softmax = list[Numbers](), list[Numbers](), False
        self._step, self._next, self._numbers = 1, 0, 0

    def add(self, prediction: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            prediction: of classes or labels, by logits of each.
            targets: what it makes of them (`Prediction.fitting`).
        """
        logs = as_double(prediction.log_probs).clamp(min=_SMALLEST)
        means = as_double(prediction.logits_mean).clamp(min=_SMALLEST)
        self._softmax = prediction.kind != "labels" and means.shape[1] > 1
        if self._softmax:  # the part that all logits of a row share is that of the means
            found = logs - logs.mean(1, keepdim=True) + means.mean(1, keepdim=True)
            own = targets if targets.is_floating_point() else _one_hot(targets, found.shape[1])
        else:
            found = (logs[..., 1] - logs[..., 0]).reshape(means.shape)
            pairs = (
                prediction.kind != "labels" and targets.ndim == 2
            )  # soft labels of both classes of one logit
            own = (targets[:, 1] if pairs else targets).reshape(means.shape)
        taken = slice(self._next, None, self._step)
        self._logits.append(found[taken].cpu().numpy())
        self._labels.append(as_double(own[taken]).cpu().numpy())
        self._next += len(self._logits[-1]) * self._step - len(found)
        self._numbers += self._logits[-1].size
        if self._numbers > _MAX_NUMBERS:
            logits, labels = np.concatenate(self._logits), np.concatenate(self._labels)
            self._logits, self._labels = [logits[::2]], [labels[::2]]
            self._next += self._step * (len(logits) % 2)
            self._step, self._numbers = 2 * self._step, self._logits[0].size

    def table(self) -> ClassTable | None:
        """All of them; None of none."""
        if not self._logits:
            return None
        logits, labels = np.concatenate(self._logits), np.concatenate(self._labels)
        missing = np.isnan(labels)
        if not missing.any():
            return ClassTable(logits, labels, self._softmax)
        known = (~missing).sum(0).astype(float)
        logits, labels = np.where(missing, _SMALLEST, logits), np.where(missing, 0.0, labels)
        return ClassTable(logits, labels, self._softmax, known)


def _one_hot(targets: Tensor, classes: int) -> Tensor:
    import torch.nn.functional as F

    return F.one_hot(targets.long(), classes)


class _Found(NamedTuple):
    """What is most probable under one prior: logarithms of temperature and scales, shifts, the log evidence; and `x`,
    all that are free as one vector.
    """

    log_temperature: float
    shift: Numbers
    log_scale: Numbers
    evidence: float
    x: Numbers


def class_scaled(
    table: ClassTable,
    settings: Hyperparameters,
    scaling: Scaling,
    penalty: Penalty,
) -> Hyperparameters:
    """Settings with the temperature, shift and scale of each class that labels find most probable: an average over the
    spreads of their prior by the evidence of each (Laplace's approximation).

    With ``"auto"`` the settings as they are, where labels do not clearly speak for a shift; settings that have one have
    passed that. A class that no row has then keeps its logit, since it may be missing because of how rows were picked.
    The others get the shifts that are most probable by their labels among themselves, which are 0 on the mean.

    Args:
        table: of the predictions at these settings.
        settings: whose shift and scale are given up.
        scaling: ``"bias"``, ``"vector"`` or ``"auto"``.
        penalty: minus the logarithm of the prior density of a temperature.
    """
    whole, moved = table, table.has_both() | (scaling != "auto")
    if not moved.all():
        if moved.sum() < 1 + table.softmax:
            return settings
        table = table.of(moved)
    if scaling == "auto" and not settings.class_shift and table.p_value() > MAX_P_VALUE:
        return settings
    plain = whole.before(settings)
    plain = plain if moved.all() else plain.of(moved)
    scales = SCALE_SPREADS if scaling == "vector" else (None,)
    found = list[_Found]()
    for shift_spread, scale_spread in product(SHIFT_SPREADS, scales):
        found.append(
            _most_probable(plain, shift_spread, scale_spread, penalty, found[-1].x if found else None)
        )
    evidence = np.array([each.evidence for each in found])
    if scaling == "auto" and not settings.class_shift:
        without = _most_probable(plain, None, None, penalty).evidence
        if not _logsumexp(evidence) - np.log(len(found)) - without > np.log(MIN_WEIGHT / (1 - MIN_WEIGHT)):
            return settings
    weights = np.exp(evidence - _logsumexp(evidence))
    shift, log_scale, log_temperature = (
        cast(Any, sum(weight * part for weight, part in zip(weights, parts, strict=True)))
        for parts in zip(*((each.shift, each.log_scale, each.log_temperature) for each in found), strict=True)
    )
    shifts = np.zeros(len(moved))
    shifts[moved] = shift
    return replace(
        settings,
        temperature=float(np.exp(log_temperature)),
        class_shift=tuple(shifts.tolist()),
        class_scale=tuple(np.exp(log_scale).tolist()) if scaling == "vector" else (),
    )


def _less_gram(diagonal: Numbers, rows: Numbers, right: Numbers) -> tuple[float, Numbers]:
    """The log-determinant of ``M = diag(diagonal) - rows^T rows``, which is positive definite, and ``M^-1 right``: by
    the Woodbury identity where there are fewer rows than columns, so that many classes need no square of their number.
    """
    if len(rows) >= len(diagonal):
        whole = np.diag(diagonal) - rows.T @ rows
        return float(np.linalg.slogdet(whole)[1]), np.linalg.solve(whole, right)
    over = rows / diagonal
    inner = np.eye(len(rows)) - over @ rows.T
    log_det = float(np.log(diagonal).sum() + np.linalg.slogdet(inner)[1])
    return log_det, right / diagonal + over.T @ np.linalg.solve(inner, over @ right)


def _logsumexp(values: Numbers) -> float:
    return float(np.logaddexp.reduce(values))


def _most_probable(
    table: ClassTable,
    shifts: float | None,
    scales: float | None,
    penalty: Penalty,
    start: Numbers | None = None,
) -> _Found:
    """The most probable temperature, shifts and scales, whose priors have these spreads; None for none of them. The
    search begins at `start`.
    """
    from scipy.optimize import minimize

    logits, classes = table.logits, table.logits.shape[1]
    none = np.zeros(classes)

    def parts(x: Numbers) -> tuple[float, Numbers, Numbers]:
        shift = none if shifts is None else x[1 : 1 + classes]
        return float(x[0]), shift, none if scales is None else x[-classes:]

    def objective(x: Numbers) -> tuple[float, Numbers]:
        log_temperature, shift, log_scale = parts(x)
        scaled = logits * np.exp(log_scale - log_temperature)
        loss, probs = table.loss_and_probabilities(scaled + shift)
        off = probs - table.labels
        by_scale = (off * scaled).sum(0)
        near = [penalty(float(np.exp(log_temperature + step))) for step in (-1e-5, 0.0, 1e-5)]
        value, slopes = loss + near[1], [[(near[2] - near[0]) / 2e-5 - by_scale.sum()]]
        for spread, numbers, slope in ((shifts, shift, off.sum(0)), (scales, log_scale, by_scale)):
            if spread is not None:
                value += float(numbers @ numbers) / (2 * spread**2)
                slopes.append(slope + numbers / spread**2)
        return value, np.concatenate(slopes)

    free = classes * ((shifts is not None) + (scales is not None))
    low, high = (decade * np.log(10.0) for decade in _DECADES)
    bounds = [(low, high)] + [(-_BOUND, _BOUND)] * free
    begin = np.zeros(1 + free) if start is None else start
    found: Any = minimize(
        objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500}
    )
    log_temperature, shift, log_scale = parts(found.x)
    evidence = -float(found.fun)
    scaled = logits * np.exp(log_scale - log_temperature)
    probs = table.probabilities(scaled + shift)
    if shifts is not None and scales is None:
        shares, rows = table.shift_information(probs)
        evidence -= 0.5 * _less_gram(1 + shifts**2 * shares, shifts * rows, shift)[0]
    elif free:
        ones = np.ones_like(scaled)
        sides = [(s, side) for s, side in ((shifts, ones), (scales, scaled)) if s is not None]
        spread = np.concatenate([np.full(classes, s) for s, _ in sides])
        precision = np.block([[table.information(probs, a, b) for _, b in sides] for _, a in sides])
        evidence -= 0.5 * np.linalg.slogdet(np.eye(free) + spread[:, None] * precision * spread)[1]
    return _Found(log_temperature, shift, log_scale, evidence, found.x)
