"""Promises by split conformal prediction: what the ranks of held-out scores say about new inputs.

A score says how badly a target fits a prediction, or how strange an input is. If n held-out samples are exchangeable
with a new one, and chose nothing else, the new score is at most the k-th smallest of theirs with a probability of at
least ``k / (n + 1)``, whatever the model (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005;
Angelopoulos and Bates, "A gentle introduction to conformal prediction", 2021). Sets, intervals and p-values follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import one_of
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.likelihoods.selective import Tail, joint_surprise

MAX_KEPT = 4096
"""Scores that are kept at most, so that every level is met within 1/4096."""

SetScore = Literal["lac", "aps", "raps"]
TargetScore = Literal["lac", "aps", "raps", "label", "positions", "deviation", "cdf"]
"""What a record of targets holds: the score of a class (`class_scores`), ``1 - p`` of the labels that apply, quantiles
of ``1 - p_y`` over the positions of an input (`scores_of_positions`), the distance from the mean in predictive standard
deviations, or the distance of the distribution function from 1/2."""
SET_KINDS = (*get_args(SetScore), "label")
"""Those of the scores by which inputs have sets, of classes or of labels."""
SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Of the positions of an input, whose quantiles of the scores are kept; a level is met by the next larger one."""
JOINT = "joint"
"""The name of the score of an input that joins all others (`posthoc_uq.likelihoods.selective.joint_surprise`)."""


class TargetScores(NamedTuple):
    """Scores of the targets of some samples.

    Attributes:
        kind: of them.
        scores: (samples, columns), float64: by output, by label, or by share of positions.
        groups: (samples, columns), int64: the class; of a label whether it applies; of shares of positions whether any
            position counts; else 0.
    """

    kind: TargetScore
    scores: Tensor
    groups: Tensor

    @classmethod
    def of_values(cls, kind: TargetScore, scores: Tensor) -> TargetScores:
        """Of values, from scores ``(samples, ...)`` of their outputs."""
        flat = scores.reshape(scores.shape[0], -1)
        return cls(kind, flat, torch.zeros_like(flat, dtype=torch.int64))


SET_SIZE, INTERVAL_WIDTH = "set size", "interval width"


class Coverage(NamedTuple):
    """What predictions keep of the promises of one level.

    Attributes:
        covered: (entries,), float64: whether the target, or a label that applies, is in its set; of positions whether
            at least the share `level` of an input's labels are in theirs; of values whether the target has a score that
            belongs to the interval (bounds of counts, which are whole, may hold more), mean over outputs, or whether
            all have where they are promised jointly.
        sizes: float64: (entries,), the number of classes in the set; or the widths of intervals, of some inputs where
            they take long.
        classes: (entries,), int64: the class or label; None of values and of positions.
        unit: of the sizes: `SET_SIZE` or `INTERVAL_WIDTH`.
    """

    covered: Tensor
    sizes: Tensor
    classes: Tensor | None
    unit: str


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """The scores of held-out samples in ascending order, thinned to `MAX_KEPT`.

    Attributes:
        values: (kept,), float64, ascending; the last is the largest of all.
        ranks: (kept,), int64: how many of all scores come at most at this place, ascending; the last is `count`.
        count: of all samples.
    """

    values: Tensor
    ranks: Tensor
    count: int

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> HeldOutScores:
        """From the plain values that a posterior stores."""
        count = int(record["count"])
        values = torch.tensor(record["values"], dtype=torch.float64, device="cpu")
        return cls(values, _ranks(count), count)

    def record(self) -> dict[str, Any]:
        """The plain values that a posterior stores."""
        return {"values": self.values.tolist(), "count": self.count}

    @property
    def lowest_rate(self) -> float:
        """The smallest p-value: ``1 / (n + 1)``."""
        return 1 / (self.count + 1)

    @property
    def highest_level(self) -> float:
        """The highest level that can be promised: ``n / (n + 1)``."""
        return self.count / (self.count + 1)


def held_out_scores(scores: Tensor) -> HeldOutScores:
    """The scores of held-out samples ``(samples,)``, in the form that is kept.

    Raises:
        NonFiniteError: a score is not finite.
        PosthocUQError: there are none.
    """
    values = as_double(scores.detach()).cpu().flatten().sort().values
    count = len(values)
    if count == 0:
        raise PosthocUQError("A promise needs held-out samples, and there are none.")
    if not bool(values.isfinite().all()):
        raise NonFiniteError("A held-out score is not finite; a promise needs predictions that are finite.")
    ranks = _ranks(count)
    return HeldOutScores(values[ranks - 1], ranks, count)


def wrong_up_to(scores: HeldOutScores, samples: Tensor, wrong: Tensor) -> Tensor:
    """For every score that is kept, how many samples with at most this score are wrong, ``(kept,)``, int64.

    Args:
        scores: that are kept of the samples'.
        samples: their scores, (samples,).
        wrong: (samples,), bool.
    """
    ordered, order = as_double(samples.detach()).cpu().sort()
    counts = wrong.cpu().long()[order].cumsum(0)
    return counts[torch.searchsorted(ordered, scores.values, right=True) - 1]


def _ranks(count: int) -> Tensor:
    """The ranks of those of `count` ordered scores that are kept."""
    kept = min(count, MAX_KEPT)
    return (torch.arange(1, kept + 1, dtype=torch.int64, device="cpu") * count + kept - 1) // kept


def scarcest_of(kind: TargetScore | None, counts: Sequence[int]) -> tuple[int, str]:
    """Which of several records of targets has the fewest samples, and in words what it is of; no words where they are
    of the same samples.

    Args:
        kind: of the scores.
        counts: of the records, at least one.
    """
    scarcest = min(range(len(counts)), key=lambda each: counts[each])
    of = "label" if kind == "label" else "class" if kind in get_args(SetScore) else ""
    return scarcest, f"{of} {scarcest}" if of and len(counts) > 1 else ""


def rounded_down(share: float) -> float:
    """A largest possible share as an error names it: rounded up it would be refused, too."""
    return floor(1e4 * share) / 1e4


def quantile(scores: HeldOutScores, level: float, of: str = "") -> float:
    """The ``ceil((n + 1) level)``-th smallest score, or of thinned scores the next larger one that was kept.

    Args:
        scores: of held-out samples.
        level: of the promise.
        of: which samples they are, for the error: ``"class 2"``; nothing for all.

    Raises:
        PosthocUQError: the level is not in (0, 1), or more samples are needed for it.
    """
    if not 0 < level < 1:
        raise PosthocUQError(f"The level of a promise must be strictly between 0 and 1, not {level}.")
    rank = ceil((scores.count + 1) * level - 1e-9)
    if rank > scores.count:
        needed = ceil(level / (1 - level) - 1e-9)
        kind = of.rpartition(" ")[0]  # without its number
        every, one = (f" of every {kind}", f" of {of}") if of else ("", "")
        raise PosthocUQError(
            f"A level of {level:g} needs {needed:,} held-out samples{every}, and {scores.count:,}{one} were kept for "
            f"promises; ask for at most {rounded_down(scores.highest_level):g}, or calibrate with more{one}"
            f"{', or without by_class' if kind == 'class' else ''}."
        )
    place = int(torch.searchsorted(scores.ranks, torch.tensor(rank, device="cpu")))
    return float(scores.values[place])


def p_values(scores: HeldOutScores, new: Tensor) -> Tensor:
    """``(1 + #{held-out scores >= s}) / (n + 1)`` of every new score s, float64 on the CPU; NaN where it is NaN.

    Of new inputs like the held-out ones at most a share a has a p-value of at most a. Of thinned scores the number is
    an upper bound, so that this holds.
    """
    wanted = as_double(new.detach()).cpu()
    if torch.compiler.is_compiling():  # for an exported program: ONNX has no search
        below = (scores.values < wanted.unsqueeze(-1)).sum(-1)
    else:
        below = torch.searchsorted(scores.values, wanted.contiguous())  # kept scores that are smaller
    ranks = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), scores.ranks))
    at_least = scores.count - ranks[below]
    return torch.where(wanted.isnan(), torch.nan, (1 + at_least).double() / (scores.count + 1))


def joint_score(tails: Mapping[str, Tail], scores: Mapping[str, Tensor]) -> Tensor:
    """The score that joins others, ``(batch,)``: `joint_surprise`, with a number that a file can hold for infinity, to
    which all inputs rise that are beyond a score that was the same for all tuning samples.
    """
    return joint_surprise(tails, scores).clamp(max=1e300)


class Regularisation(NamedTuple):
    """Of the sets by ``"raps"``.

    Attributes:
        penalty: for every rank above `free_classes`.
        free_classes: how many classes a set may hold without it.
    """

    penalty: float = 0.01
    free_classes: int = 5


UNTUNED = Regularisation()
_PENALTIES = 0.001, 0.01, 0.1, 0.2, 0.5
_TUNED_LEVEL = 0.9  # of the sets whose size chooses among them


def tuned_regularisation(probs: Tensor, labels: Tensor, uniform: Tensor) -> Regularisation:
    """The one with the smallest sets at level .9, by samples that make no promise: `free_classes` is the smallest
    number of most probable classes that hold so many of the labels, and the penalty one of five (Angelopoulos et al.
    2021, appendix E).

    Args:
        probs: ``(samples, classes)``, float64.
        labels: ``(samples,)``, int64.
        uniform: ``(samples,)``, as of `class_scores`.
    """
    order = probs.argsort(dim=-1, descending=True, stable=True)
    ranks = 1 + (order == labels.unsqueeze(-1)).to(torch.uint8).argmax(-1)
    place = min(len(ranks), ceil(_TUNED_LEVEL * (len(ranks) + 1))) - 1
    free = int(ranks.sort().values[place])

    def size(penalty: float) -> float:
        scores = class_scores(probs, "raps", uniform, Regularisation(penalty, free))
        own = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1).sort().values
        return float(set_of(probs, scores, float(own[place])).sum(-1).double().mean())

    return Regularisation(min(_PENALTIES, key=size), free)


def class_scores(
    probs: Tensor,
    kind: SetScore = "lac",
    uniform: Tensor | None = None,
    regularisation: Regularisation = UNTUNED,
) -> Tensor:
    """The score of every class as the label, ``(batch, classes)``; larger fits worse.

    * ``"lac"``: ``1 - p_y``, which gives the smallest sets (Sadinle, Lei, Wasserman, "Least ambiguous set-valued
      classifiers with bounded error levels", 2019).
    * ``"aps"``: the probability of all classes at least as probable, less ``u p_y``, which adapts the size to the input
      (Romano, Sesia, Candes, "Classification with valid and adaptive coverage", 2020).
    * ``"raps"``: the same and a penalty for every rank above some (Angelopoulos, Bates, Malik, Jordan, "Uncertainty
      sets for image classifiers using conformal prediction", 2021).

    Args:
        probs: ``(batch, classes)``.
        kind: see above.
        uniform: ``(batch,)``, u in [0, 1) of each sample; without it u is 0, and sets are larger than promised.
        regularisation: of ``"raps"``.
    """
    if kind == "lac":
        return 1 - probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    total = ordered.cumsum(-1)
    if uniform is not None:
        total = total - uniform.to(probs).unsqueeze(-1) * ordered
    if kind == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device)
        total = total + regularisation.penalty * (ranks - regularisation.free_classes).clamp(min=0)
    return torch.empty_like(total).scatter_(-1, order, total)


def set_of(probs: Tensor, scores: Tensor, thresholds: Tensor | float, allow_empty: bool = False) -> Tensor:
    """The classes whose score is at most the threshold, ``(batch, classes)`` of booleans; every class where the scores
    are NaN, since nothing speaks against one.

    Args:
        probs: ``(batch, classes)``.
        scores: `class_scores` of them.
        thresholds: one, or one a class.
        allow_empty: whether a set may be empty; otherwise it then holds the most probable class.
    """
    chosen = ~(scores > thresholds)
    if not allow_empty:
        empty = ~chosen.any(-1, keepdim=True)
        chosen = chosen | (
            empty & torch.zeros_like(chosen).scatter_(-1, probs.argmax(-1, keepdim=True), True)
        )
    return chosen


def scores_of_positions(scores: Tensor, counted: Tensor) -> Tensor:
    """By share of `SHARES` the smallest score that so large a share of an input's positions do not exceed,
    ``(inputs, shares)``; infinity where no position counts.

    Args:
        scores: ``(inputs, positions)``.
        counted: ``(inputs, positions)``, bool.
    """
    ordered = scores.masked_fill(~counted, torch.inf).sort(1).values
    shares = torch.tensor(SHARES, dtype=torch.float64, device="cpu")
    ranks = (as_double(counted.sum(1, keepdim=True)).cpu() * shares - 1e-9).ceil().long().to(scores.device)
    return ordered.gather(1, (ranks - 1).clamp(min=0))


class InputScores(NamedTuple):
    """The scores of held-out inputs.

    Attributes:
        inputs: by name, and ``"joint"``.
        tails: of the single scores, by which the joint one is measured.
    """

    inputs: Mapping[str, HeldOutScores]
    tails: Mapping[str, Tail]

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> InputScores:
        """From the plain values that a posterior stores."""
        tails = {
            name: Tail(
                *(torch.tensor(tail[part], dtype=torch.float64, device="cpu") for part in Tail._fields)
            )
            for name, tail in record["tails"].items()
        }
        return cls({name: HeldOutScores.restored(each) for name, each in record["inputs"].items()}, tails)


@dataclass(frozen=True)
class ConformalScores:
    """The held-out scores that a posterior stores, by which its predictions make promises.

    Attributes:
        kind: of the scores of targets; None where the likelihood has none.
        targets: the scores of targets: one record, or one a class, a label, an output or a share of positions.
        inputs: the scores of inputs by name, and ``"joint"``.
        tails: of the single scores of inputs, by which the joint one is measured.
        seed: of the random numbers of ``"aps"`` and ``"raps"``.
        wrong: of classes, by the name of a score of inputs ``(kept,)``, int64: the held-out samples with at most this
            score whose predicted class is wrong. Empty where none were counted.
        regularisation: of sets by ``"raps"``.
        shares: of positions, ascending, in the order of `targets`; empty where targets have none.
        counted: of outputs with positions, `inputs` and `tails` by the positions that labels and weights left in.
    """

    kind: TargetScore | None
    targets: tuple[HeldOutScores, ...]
    inputs: Mapping[str, HeldOutScores]
    tails: Mapping[str, Tail]
    seed: int
    wrong: Mapping[str, Tensor]
    regularisation: Regularisation = UNTUNED
    shares: tuple[float, ...] = ()
    counted: InputScores | None = None

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> ConformalScores:
        """From the record that a posterior stores (`posthoc_uq.files.records.PromisesRecord`)."""
        targets: Mapping[str, Any] = record.get("targets", {})
        return cls(
            targets.get("kind"),
            tuple(HeldOutScores.restored(each) for each in targets.get("scores", ())),
            *InputScores.restored(record),
            record["seed"],
            {
                name: torch.tensor(counts, dtype=torch.int64, device="cpu")
                for name, counts in record.get("wrong", {}).items()
            },
            Regularisation(**targets.get("regularisation", {})),
            tuple(targets.get("shares", ())),
            InputScores.restored(record["counted"]) if "counted" in record else None,
        )

    def of_counted(self) -> ConformalScores:
        """The same for inputs of which only the positions count that `counted` is about."""
        return self if self.counted is None else replace(self, **self.counted._asdict(), counted=None)

    @property
    def randomised(self) -> bool:
        """Whether sets depend on a random number of each input."""
        return self.kind in ("aps", "raps")

    def sets(self, probs: Tensor, level: float, allow_empty: bool, keys: Tensor | None) -> Tensor:
        """The classes, or labels, that belong to the set of each input, ``(batch, classes)`` of booleans.

        Args:
            probs: ``(batch, classes)``.
            level: of the promise.
            allow_empty: as in `set_of`; a set of labels may always be empty.
            keys: ``(batch,)``, the hashes of the inputs, where sets are randomised.
        """
        wide = as_double(probs)
        thresholds = self._thresholds(SET_KINDS, level, probs.shape[1]).to(wide.device)
        if self.kind == "label":
            return set_of(wide, 1 - wide, thresholds, allow_empty=True).to(probs.device)
        kind: SetScore = self.kind  # pyright: ignore[reportAssignmentType]  # checked above
        uniform = uniforms(keys, 1).squeeze(1) if keys is not None and self.randomised else None
        scores = class_scores(wide, kind, uniform, self.regularisation)
        return set_of(wide, scores, thresholds, allow_empty).to(probs.device)

    def sets_at_positions(self, probs: Tensor, level: float, allow_empty: bool) -> Tensor:
        """The classes that belong to the set of each position, ``(positions, classes)`` of booleans.

        Args:
            probs: ``(positions, classes)``, of all inputs.
            level: of the promise.
            allow_empty: as in `set_of`.
        """
        wide = as_double(probs)
        return set_of(wide, 1 - wide, self.threshold_of_positions(level), allow_empty).to(probs.device)

    def threshold_of_positions(self, level: float) -> float:
        """The largest score of a class that belongs to the set of a position."""
        thresholds = self._thresholds(("positions",), level, len(self.shares))
        # the last share is 1, and levels are below it
        share = next(place for place, share in enumerate(self.shares) if share >= level - 1e-12)
        return float(thresholds[share])

    def bounds(self, kind: TargetScore, level: float, outputs: int) -> Tensor:
        """The largest score of each output's target that belongs to an interval, ``(outputs,)``, float64."""
        return self._thresholds((kind,), level, outputs).expand(outputs)

    def _thresholds(self, kinds: tuple[str, ...], level: float, columns: int) -> Tensor:
        if self.kind not in kinds or len(self.targets) not in (1, columns):
            raise PosthocUQError(
                f"The held-out scores that are stored are no scores of such predictions ({self.kind}, "
                f"{len(self.targets)}); calibrate again: uq.calibrate(posterior, val_loader)."
            )
        return self.thresholds(level)

    def thresholds(self, level: float) -> Tensor:
        """The largest score of a target that a promise of this level takes: one, or one a class, a label, an output
        or a share of positions, float64.
        """
        scarcest, of = scarcest_of(self.kind, [scores.count for scores in self.targets])
        quantile(self.targets[scarcest], level, of)  # an error names that one
        found = [quantile(scores, level) for scores in self.targets]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def p_values(self, scores: Mapping[str, Tensor], name: str) -> Tensor:
        """`p_values` of one of the scores of inputs, ``(batch,)``.

        Args:
            scores: of the inputs, by name.
            name: of the score.

        Raises:
            PosthocUQError: it is none of those that are stored, or the prediction does not have it.
        """
        if name == "novelty" and name not in self.inputs:
            raise PosthocUQError(
                f"There are no held-out scores of novelty: predictions did not know it when they were measured. There "
                f"are those of {' and '.join(map(repr, self.inputs))}, such as prediction.familiarity('{JOINT}')."
            )
        name = one_of("score", name, tuple(self.inputs))
        needed = tuple(self.tails) if name == JOINT else (name,)
        missing = [each for each in needed if each not in scores]
        if missing:
            raise PosthocUQError(
                f"This prediction does not know its {missing[0]}; wrap without novelty=False."
            )
        if name == JOINT:
            return p_values(self.inputs[name], joint_score(self.tails, scores))
        return p_values(self.inputs[name], scores[name])

    def single_p_values(self, scores: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """By score the p-values, ``(batch,)``, whose smallest are the `p_values`: of the joint score those of each that
        it joins, at the rates that they share; of another its own.
        """
        joined = {name: self.p_values(scores, name)}
        if name == JOINT:
            joined = {
                each: p_values(self.inputs[name], joint_score({each: tail}, scores))
                for each, tail in self.tails.items()
            }
        return joined

    def rate_for(self, accuracy: float, name: str) -> float:
        """The smallest p-value at which an input is kept, less one rank, so that those that are kept are right with
        this accuracy.

        Of the held-out samples in ascending order of the score the largest number k is kept for which ``(errors among
        them + 1) / (k + 1) <= 1 - accuracy``; samples of the same score are kept together.

        Args:
            accuracy: in (0, 1).
            name: of the score of inputs.

        Returns:
            ``(n - k + 1) / (n + 1)``: inputs with a p-value of at most this are beyond the k-th.

        Raises:
            PosthocUQError: no k has this accuracy, or the record has no counts of errors.
        """
        if not self.wrong:
            raise PosthocUQError(
                "An aimed accuracy needs held-out predictions of classes that were counted right or wrong, and there "
                "are none: give a rate, or of classes calibrate again: uq.calibrate(posterior, val_loader)."
            )
        scores = self.inputs[name]
        reached = 1 - (self.wrong[name] + 1).double() / (scores.ranks + 1).double()
        enough = (reached >= accuracy - 1e-12).nonzero().flatten()
        if len(enough) == 0:
            raise PosthocUQError(
                f"No share of the {scores.count:,} held-out inputs can be kept with an accuracy of {accuracy:g} by "
                f"{name}; the best that is reached is {rounded_down(float(reached.max())):g}."
            )
        return float(scores.count - scores.ranks[enough[-1]] + 1) / (scores.count + 1)


def applying(promises: ConformalScores | str | None) -> ConformalScores:
    """The held-out scores themselves.

    Args:
        promises: as `posthoc_uq.likelihoods.prediction.Prediction.promises`.

    Raises:
        PosthocUQError: there are none that apply.
    """
    if isinstance(promises, ConformalScores):
        return promises
    raise PosthocUQError(
        promises
        or "A promise needs held-out scores; store them by uq.calibrate(posterior, val_loader), and predict again."
    )
