"""Drift of the scores of what comes in: a sequential test with a stated rate of false alarms, that may be looked at
after every input.

An input's rank among the held-out scores and those that came before is all that the test sees. As long as nothing
changed, the distribution of the next rank is known, so that bets on it do not gain on average: a bet multiplies its
stake by a number whose mean is 1. `Monitor` starts a bet at every input, and its evidence is the sum of all stakes
(Shiryaev 1963; Roberts, "A comparison of some control chart procedures", 1966), whose mean after T inputs is T. Ranks
among all that came, and bets on them, are those of Vovk, Nouretdinov, Gammerman, "Testing exchangeability on-line",
2003; sums of such e-values are those of Shin, Ramdas, Rinaldo, "E-detectors", 2022 (arXiv 2203.03532).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from posthoc_uq.app.paths import check_regular
from posthoc_uq.app.scores import SCORES, Scores, finite_entries
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, Natural, check_option
from posthoc_uq.core.randomness import mix, uniforms
from posthoc_uq.core.records import Record, among, validate_record
from posthoc_uq.core.tables import text_table
from posthoc_uq.likelihoods.conformal import JOINT, HeldOutScores, held_out_scores

FALSE_ALARM_EVERY = 100_000
"""Inputs in which there is at most one false alarm on average."""
NEWEST = 200
"""Inputs whose scores the figure compares with the held-out ones."""

Numbers = NDArray[np.float64]

_FOREIGN, _SHARP, _BROAD = 0.1, 0.3, 0.7
_EDGES = np.array([0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995, 1])
_WIDTHS = np.diff(_EDGES)
_KEPT = 0.998  # of the histogram's counts from one input to the next: it remembers some 500
_BETS = 3
_BLOCK = 256  # inputs that are ranked at once


@dataclass(frozen=True)
class Alarm:
    """The evidence of a score reached its limit.

    Attributes:
        input: the number of the input at which it did, from 0 on.
        score: that drifts.
    """

    input: int
    score: str


@dataclass(frozen=True)
class Watched:
    """What a monitor saw in some inputs.

    Attributes:
        first: number of the first of them, from 0 on.
        evidence: by score, (inputs,): after each input, as a share of what raises an alarm.
        alarms: in the order of the inputs.
    """

    first: int
    evidence: Mapping[str, Numbers]
    alarms: Sequence[Alarm]

    @property
    def verdict(self) -> str:
        """In a sentence, with the input at which each score raised its first alarm."""
        first = {alarm.score: alarm.input + 1 for alarm in reversed(self.alarms)}
        found = ", ".join(
            f"{score.replace('_', ' ')} (since input {place:,})" for score, place in first.items()
        )
        count = len(next(iter(self.evidence.values())))
        return f"{count:,} inputs; {f'drift in {found}' if found else 'no sign of drift'}."

    def table(self) -> str:
        """A line a score as text: its evidence, and its alarms."""
        rows: list[list[Any]] = []
        for score, evidence in self.evidence.items():
            own = [alarm.input for alarm in self.alarms if alarm.score == score]
            numbers = (f"{value:.2g}" for value in (evidence[-1:].sum(), evidence.max(initial=0.0)))
            places = [own[0] + 1, own[-1] + 1] if own else [None, None]
            rows.append([score, *numbers, len(own), *places])
        return text_table(["score", "evidence", "largest", "alarms", "first at input", "last at input"], rows)


class Monitor:
    """Whether the scores of what comes in still are as those of held-out inputs.

    While nothing changed there are on average at most ``T / false_alarm_every`` false alarms in T inputs, all scores
    together, so that the probability of any is at most that, too. This holds exactly, for any number of held-out
    inputs, on average over these and over what comes in, as long as all of them are exchangeable: frames of one film
    are not. An alarm begins the evidence of its score anew.

    The ranks are among the held-out inputs and all that came before, so that a change is found against what came
    before, and what goes on for long after an alarm becomes the new normal.

    Args:
        reference: by name, the scores of held-out inputs that are like those of the training: numbers, or records such
            as ``predictor.promises.inputs``, whose joint score, made of the others, is not watched. Scores that are
            not finite are left out, here and later.
        false_alarm_every: inputs in which there is at most one false alarm on average.

    Raises:
        PosthocUQError: there is no score, or one without finite numbers.
    """

    def __init__(
        self,
        reference: Mapping[str, HeldOutScores | ArrayLike],
        false_alarm_every: Annotated[int, Ge(1)] = FALSE_ALARM_EVERY,
    ) -> None:
        check_option("false_alarm_every", false_alarm_every, Count)
        self._ranked = {name: _Ranked.of(scores) for name, scores in reference.items() if name != JOINT}
        if not self._ranked:
            raise PosthocUQError("A monitor needs held-out scores, and there are none.")
        self._every, self._inputs = false_alarm_every, 0

    @property
    def inputs(self) -> int:
        """How many it has seen."""
        return self._inputs

    @property
    def false_alarm_every(self) -> int:
        """Inputs in which there is at most one false alarm on average."""
        return self._every

    @property
    def reference(self) -> dict[str, Numbers]:
        """By score, the held-out ones that are kept, ascending."""
        return {name: ranked.reference.values.numpy() for name, ranked in self._ranked.items()}

    @property
    def evidence(self) -> dict[str, float]:
        """By score, after the last input, as a share of what raises an alarm."""
        return {name: float(ranked.sums.mean()) / self._limit for name, ranked in self._ranked.items()}

    @property
    def _limit(self) -> float:
        """Of the mean sum of a score; every score has its share of the false alarms."""
        return float(self._every * len(self._ranked))

    def add(self, values: Mapping[str, ArrayLike]) -> Watched:
        """See more inputs.

        Args:
            values: by name, their scores (inputs,) in the order of coming. An input without a finite score tells
                nothing about it; scores that are not watched are passed over.

        Raises:
            PosthocUQError: none of the scores is watched, or they have different lengths.
        """
        known = {name: np.asarray(values[name], np.float64) for name in self._ranked if name in values}
        shapes = {each.shape for each in known.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise PosthocUQError(
                f"The monitor watches {', '.join(self._ranked)}; it needs one of them, or all, of the same inputs, and "
                f"got {', '.join(f'{name} {np.shape(each)}' for name, each in values.items()) or 'nothing'}."
            )
        first, count = self._inputs, len(next(iter(known.values())))
        ties = uniforms(mix(torch.arange(first + 1, first + count + 1, device="cpu")), 1).squeeze(1).numpy()
        self._inputs += count
        evidence: dict[str, Numbers] = {}
        alarms: list[Alarm] = []
        for name, ranked in self._ranked.items():
            evidence[name], found = ranked.add(known.get(name, np.full(count, np.nan)), ties, self._limit)
            alarms += [Alarm(first + place, name) for place in found]
        return Watched(first, evidence, sorted(alarms, key=lambda alarm: alarm.input))

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain values for JSON, for `resume`."""
        return MonitorState(
            false_alarm_every=self._every,
            inputs=self._inputs,
            scores={name: ranked.state() for name, ranked in self._ranked.items()},
        ).plain()

    @staticmethod
    def resume(state: Any) -> Monitor:
        """The monitor that had this state, which goes on as if it had never stopped.

        Raises:
            PosthocUQError: it is no state of a monitor.
        """
        record = validate_record(MonitorState, state, "the monitor's state")
        monitor = Monitor(
            {name: each.reference for name, each in record.scores.items()}, record.false_alarm_every
        )
        monitor._inputs = record.inputs
        for name, each in record.scores.items():
            ranked = monitor._ranked[name]
            ranked.came[:] = each.came
            ranked.histogram[:], ranked.sums[:] = each.histogram, each.sums
        return monitor


class ScoreState(Record):
    """What a monitor knows of one score.

    Attributes:
        reference: the held-out scores.
        came: how many inputs came between any two of them, below the first and above the last.
        histogram: of the newest inputs' p-values.
        sums: of the stakes of each bet.
    """

    reference: HeldOutScores
    came: list[Natural]
    histogram: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=14, max_length=14)]
    sums: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=_BETS, max_length=_BETS)]

    @model_validator(mode="after")
    def _check_counts(self) -> ScoreState:
        if len(self.came) != len(self.reference.values) + 1:
            raise ValueError("must have one count more than held-out scores")
        return self


class MonitorState(Record):
    """What a monitor knows."""

    false_alarm_every: Count
    inputs: Natural
    scores: Annotated[dict[Annotated[str, among(SCORES)], ScoreState], Field(min_length=1)]


class _Ranked:
    """One score of a monitor. Its held-out values cut the line into cells. The chances of these are unknown, yet before
    anything came they have the Dirichlet distribution of spacings, whatever the score's own; so an input falls into a
    cell with the probability that Polya's urn says: one for the cell, one for each that fell into it before, over all.
    That is exact, and what is kept does not grow.

    Equal scores are ordered by random numbers of their own.
    """

    def __init__(self, reference: HeldOutScores) -> None:
        self.reference = reference
        values = reference.values.numpy()
        ranks = reference.ranks.numpy()
        # of scores that were thinned a cell stands for more than one
        self._begun = np.diff(ranks, prepend=0, append=reference.count + 1).astype(np.float64)
        self.came = np.zeros(len(values) + 1)
        self.histogram, self.sums = np.zeros(len(_WIDTHS)), np.zeros(_BETS)
        self._values, group = np.unique(values, return_inverse=True)
        self._places = np.flatnonzero(np.diff(group, prepend=-1))  # where the cell below each value is
        self._order = group + _orders(group, self._begun)

    @classmethod
    def of(cls, scores: HeldOutScores | ArrayLike) -> _Ranked:
        """Of a record, or of numbers."""
        if isinstance(scores, HeldOutScores):
            return cls(scores)
        return cls(held_out_scores(torch.from_numpy(finite_entries(np.asarray(scores, np.float64)))))

    def state(self) -> ScoreState:
        """What it knows."""
        return ScoreState(
            reference=self.reference,
            came=[int(count) for count in self.came],
            histogram=self.histogram.tolist(),
            sums=self.sums.tolist(),
        )

    def add(self, values: Numbers, ties: Numbers, limit: float) -> tuple[Numbers, list[int]]:
        """The evidence after each of some inputs, as a share of the limit, and the places of alarms."""
        evidence, alarms = np.empty(len(values)), list[int]()
        for start in range(0, len(values), _BLOCK):
            block = slice(start, start + _BLOCK)
            known = np.isfinite(values[block])
            gains = np.zeros((len(known), _BETS))  # logarithms
            if known.any():
                gains[known] = np.log(self._bets(*self._p_values(values[block][known], ties[block][known])))
            evidence[block], found = self._sum(gains, limit)
            alarms += [start + place for place in found]
        return evidence, alarms

    def _p_values(self, values: Numbers, ties: Numbers) -> tuple[Numbers, Numbers]:
        """The ends of each input's range of p-values: the chances of a cell above its own, and of that too. The next
        input counts those before.
        """
        place = np.searchsorted(self._values, values)
        equal = place < len(self._values)
        equal[equal] = self._values[place[equal]] == values[equal]
        cells = np.append(self._places, len(self._order))[place]
        cells[equal] = np.searchsorted(self._order, place[equal] + ties[equal])

        weights = self._begun + self.came
        above = np.append(weights[::-1].cumsum()[::-1][1:], 0.0)[cells]
        own, before = weights[cells], np.tri(len(cells), k=-1)
        above += ((cells > cells[:, None]) * before).sum(1)
        own += ((cells == cells[:, None]) * before).sum(1)
        total = weights.sum() + np.arange(len(cells))
        np.add.at(self.came, cells, 1.0)
        return above / total, (above + own) / total

    def _bets(self, low: Numbers, high: Numbers) -> Numbers:
        """What each bet makes of its stake at each input, (inputs, bets): the means of densities over the range.

        * A tenth of the inputs is foreign, with p-values near 0.
        * All p-values are somewhat smaller.
        * p-values are distributed as in a histogram of the newest ones: any change at all.
        """
        width = high - low

        def power(exponent: float) -> Numbers:
            return (high**exponent - low**exponent) / width

        inside = np.minimum(high[:, None], _EDGES[1:]) - np.maximum(low[:, None], _EDGES[:-1])
        shares = inside.clip(min=0.0) / width[:, None]
        age = np.arange(len(low))[:, None] - 1 - np.arange(len(low))
        kept = np.where(age >= 0, _KEPT ** age.clip(min=0), 0.0) @ shares
        kept += _KEPT ** np.arange(len(low))[:, None] * self.histogram
        self.histogram = _KEPT * kept[-1] + shares[-1]
        chances = kept + _WIDTHS * len(_WIDTHS)
        chances /= chances.sum(1, keepdims=True)
        newest = (shares * chances / _WIDTHS).sum(1)
        return np.stack([1 - _FOREIGN + _FOREIGN * power(_SHARP), power(_BROAD), newest], axis=1)

    def _sum(self, gains: Numbers, limit: float) -> tuple[Numbers, list[int]]:
        """``(1 + sum) * gain``, input by input, of every bet, from logarithms; anew after an alarm."""
        evidence, alarms, start = np.empty(len(gains)), list[int](), 0
        while start < len(gains):
            grown = gains[start:].cumsum(0)
            begun = np.vstack([np.zeros(_BETS), -grown[:-1]])  # what each new stake is divided by
            with np.errstate(divide="ignore"):
                stakes = np.vstack([np.log(self.sums), begun])
            sums = grown + np.logaddexp.accumulate(stakes, axis=0)[1:]
            shares = np.exp(np.logaddexp.reduce(sums, axis=1) - np.log(_BETS * limit))
            reached = np.flatnonzero(shares >= 1)
            end = int(reached[0]) + 1 if len(reached) else len(shares)
            evidence[start : start + end] = shares[:end]
            start += end
            self.sums = np.zeros(_BETS) if len(reached) else np.exp(sums[-1])
            alarms += [start - 1] if len(reached) else []
        return evidence, alarms


def _orders(group: NDArray[np.intp], begun: Numbers) -> Numbers:
    """A random number in (0, 1) for each held-out value; they ascend within a group of equal values."""
    counts = begun[:-1].astype(np.int64)
    drawn = -np.log(
        uniforms(torch.zeros(1, dtype=torch.int64, device="cpu"), int(counts.sum())).squeeze(0).numpy()
    )
    spacings = np.add.reduceat(drawn, np.cumsum(counts) - counts)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    total = spacings.cumsum()
    before = (total - spacings)[first]
    last = np.append(first[1:], len(group)) - 1
    rest = -np.log(uniforms(torch.ones(1, dtype=torch.int64, device="cpu"), len(first)).squeeze(0).numpy())
    return (total - before[group]) / (total[last] - before + rest)[group]


def monitor_for(incoming: Scores, reference: Scores, false_alarm_every: int = FALSE_ALARM_EVERY) -> Monitor:
    """A monitor of those scores that both sides have.

    Raises:
        PosthocUQError: there are none.
    """
    shared = {score: reference.values[score] for score in incoming.values if score in reference.values}
    if not shared:
        raise PosthocUQError(
            f"What came in has {', '.join(incoming.values)} and the held-out data have {', '.join(reference.values)}; "
            f"they need a score in common."
        )
    return Monitor(shared, false_alarm_every)


def read_state(path: str) -> Monitor | None:
    """The monitor whose state a JSON file holds; None where there is no file.

    Raises:
        PosthocUQError: it holds something else.
    """
    if not os.path.lexists(path):
        return None
    check_regular(path, "The state")
    try:
        with open(path, encoding="utf-8") as file:
            return Monitor.resume(json.load(file))
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror}.") from error
    except PosthocUQError:
        raise
    except (ValueError, RecursionError):
        raise PosthocUQError(
            f"'{path}' is no JSON file of a monitor's state; give the state another name."
        ) from None


def drift_figure(
    monitor: Monitor, incoming: Scores, watched: Watched, share_referred: float | None = None
) -> Any:
    """A matplotlib figure: for each score that is watched the shares of held-out inputs (filled) and of the newest ones
    (outlined); the evidence over the inputs, with every alarm; and the share of inputs referred, of `NEWEST` each.

    Args:
        monitor: that watched.
        incoming: the scores of the inputs.
        watched: what the monitor saw in them.
        share_referred: of held-out inputs, drawn dashed.
    """
    from posthoc_uq.app.plots import clean, histogram_panel, legend_above, line_style, new_figure

    count, limit = len(incoming), {"color": "gray", "linestyle": "--"}
    figure = new_figure(4.2 * (len(watched.evidence) + 2), 3.6)
    panels = figure.subplots(1, len(watched.evidence) + 2, squeeze=False)[0]
    for axes, (score, held_out) in zip(panels, monitor.reference.items(), strict=False):
        newest = finite_entries(incoming.values.get(score, np.empty(0))[-NEWEST:])
        sets = {"held out": held_out, f"newest {NEWEST}": newest}
        pooled = np.concatenate([held_out, newest])
        positive = pooled[pooled > 0]
        wide = 2 * len(positive) > len(pooled) and bool(positive.max() > 100 * positive.min())
        known = {side: torch.from_numpy(each) for side, each in sets.items() if len(each)}
        histogram_panel(axes, score.replace("_", " "), known, bins=24, logarithmic=wide)
        axes.set_ylabel("share of inputs")

    over_time, shares = panels[-2:]
    for index, (score, evidence) in enumerate(watched.evidence.items()):
        style = line_style(index)
        places = watched.first + 1 + np.arange(len(evidence))
        over_time.plot(places, evidence, label=score.replace("_", " "), **style)
        found = [alarm.input + 1 for alarm in watched.alarms if alarm.score == score]
        over_time.plot(found, np.ones(len(found)), "v", color=style["color"], markersize=7)
    over_time.axhline(1, label="alarm", **limit)
    over_time.set(xlabel="inputs so far", ylabel="evidence of drift", yscale="log", ylim=(1e-6, 4))

    ends = sorted(range(count, 0, -NEWEST))
    referred = [Scores({}, incoming.referred[max(0, end - NEWEST) : end]).share_referred for end in ends]
    decided = [np.nan if share is None else share for share in referred]
    shares.plot([watched.first + end for end in ends], decided, "o-", label="came in")
    if share_referred is not None:
        shares.axhline(share_referred, label="held out", **limit)
    shares.set(xlabel="inputs so far", ylabel="share referred", ylim=(0, None))
    for axes in (over_time, shares):
        clean(axes)
        legend_above(axes)
    return figure
