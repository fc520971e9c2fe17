"""Promises by split conformal prediction: what the ranks of held-out scores say about new inputs.

A score says how badly a target fits a prediction, or how strange an input is. If n held-out samples are exchangeable
with a new one, and chose nothing else, the new score is at most the k-th smallest of theirs with a probability of at
least ``k / (n + 1)``, whatever the model (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005;
Angelopoulos and Bates, "A gentle introduction to conformal prediction", 2021). Sets, intervals and p-values follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from math import ceil, floor, log
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import Count, Natural, Seed, Unit, check_probability, one_of
from posthoc_uq.core.outputs import MAX_HEADS
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.core.records import Listed, Name, Plain, Record, Sum, among
from posthoc_uq.likelihoods.selective import FORMER_SCORES, SCORES, Tail, binomial_p_value, joint_surprise

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MAX_KEPT = 4096
"""Scores that are kept at most, so that every level is met within 1/4096."""

SetScore = Literal["lac", "aps", "raps"]
TargetScore = Literal["lac", "aps", "raps", "label", "positions", "deviation", "cdf", "quantiles"]
"""What a record of targets holds: the score of a class (`class_scores`), ``1 - p`` of the labels that apply, quantiles
of ``1 - p_y`` over the positions of an input (`scores_of_positions`), the distance from the mean in predictive standard
deviations, the distance of the distribution function from 1/2, or how far a target is outside of the quantiles between
which a share of targets is predicted."""
SET_KINDS = (*get_args(SetScore), "label")
"""Those of the scores by which inputs have sets, of classes or of labels."""
INTERVAL_KINDS = ("deviation", "cdf", "quantiles")
"""Those by which they have intervals."""
SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Of the positions of an input, whose quantiles of the scores are kept; a level is met by the next larger one."""
FINE_SHARES = tuple(k / 400 for k in range(1, 401))
"""Of the values of an input at positions, whose quantiles stand for all; those of `SHARES` are among them."""
JOINT = "joint"
"""The name of the score of an input that joins all others (`posthoc_uq.likelihoods.selective.joint_surprise`)."""


class TargetScores(NamedTuple):
    """Scores of the targets of some samples.

    Attributes:
        kind: of them.
        scores: (samples, columns), float64: by output, by label, or by share.
        groups: (samples, columns), int64: the class; of a label whether it applies; of shares of positions whether any
            position counts; of values whether it is there; else 0.
        shares: of positions, or of targets between two quantiles, ascending; None of others.
        channels: of values at positions, how many a position has: columns are then by channel, and by share of
            `FINE_SHARES`; else None.
    """

    kind: TargetScore
    scores: Tensor
    groups: Tensor
    shares: Sequence[float] | None = None
    channels: int | None = None

    @classmethod
    def of_values(cls, kind: TargetScore, scores: Tensor, there: Tensor | None = None) -> TargetScores:
        """Of values, from scores ``(samples, ...)`` of their outputs, of which those count that are `there`."""
        flat = scores.reshape(scores.shape[0], -1)
        if there is None:
            return cls(kind, flat, torch.ones_like(flat, dtype=torch.int64))
        known = there.to(flat.device).reshape(flat.shape)
        return cls(kind, flat.masked_fill(~known, 0.0), known.long())


def without_by_class(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a method that reads promises answer ``by_class=`` with the call that makes them."""

    @wraps(call)
    def reads(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "by_class" in kwargs:
            raise PosthocUQError(
                f"{call.__name__} reads what was promised, for all classes or for each: that is chosen before, by "
                f"uq.calibrate(posterior, val_loader, by_class=True)."
            )
        return call(*args, **kwargs)

    return reads


SET_SIZE, INTERVAL_WIDTH = "set_size", "interval_width"


class Coverage(NamedTuple):
    """What predictions keep of the promises of one level.

    Attributes:
        covered: (entries,), float64: whether the target, or a label that applies, is in its set; of positions whether
            at least the share `level` of an input's labels are in theirs; of values whether the target has a score that
            belongs to the interval (bounds of counts, which are whole, may hold more), mean over outputs, or whether
            all have where they are promised jointly; where some are missing, an entry for each that is there.
        sizes: float64: (entries,), the number of classes in the set; or the widths of intervals, of some inputs where
            they take long.
        inputs: (entries,), int64: the input of each.
        classes: (entries,), int64: the class or label; None of values and of positions.
        unit: of the sizes: `SET_SIZE` or `INTERVAL_WIDTH`.
    """

    covered: Tensor
    sizes: Tensor
    inputs: Tensor
    classes: Tensor | None
    unit: str


class HeldOutScores(Record):
    """The scores of held-out samples in ascending order, thinned to `MAX_KEPT`.

    Attributes:
        values: (kept,), float64, ascending; the last is the largest of all.
        count: of all scores.
        each: how many scores a sample has; of values at positions more than one.
    """

    values: Annotated[
        Tensor, Listed(Annotated[list[Sum], Field(min_length=1, max_length=MAX_KEPT)], torch.float64)
    ]
    count: Count
    each: Count = 1
    _known_ranks: Tensor = PrivateAttr()

    def __repr__(self) -> str:
        return f"HeldOutScores({self.samples:,} samples)"

    __str__ = __repr__

    def model_post_init(self, context: Any, /) -> None:
        """Make what is computed of the fields; not later, when an export may trace."""
        self._known_ranks = _ranks(self.count)

    @model_validator(mode="after")
    def _check_values(self) -> HeldOutScores:
        if self.count % self.each:
            raise ValueError(f"must have a multiple of {self.each} scores, not {self.count}")
        if len(self.values) != min(self.count, MAX_KEPT):
            raise ValueError(f"must have {min(self.count, MAX_KEPT)} values, not {len(self.values)}")
        if bool((self.values.diff() < 0).any()):
            raise ValueError("has values that do not ascend")
        return self

    @property
    def samples(self) -> int:
        """n: how many samples the scores are of."""
        return self.count // self.each

    @property
    def ranks(self) -> Tensor:
        """(kept,), int64: how many of all scores come at most at each place, ascending; the last is `count`."""
        return self._known_ranks

    @property
    def lowest_rate(self) -> float:
        """The smallest p-value: ``1 / (n + 1)``."""
        return 1 / (self.samples + 1)

    @property
    def highest_level(self) -> float:
        """The highest level that can be promised: ``n / (n + 1)``."""
        return self.samples / (self.samples + 1)


def held_out_scores(scores: Tensor, each: int = 1) -> HeldOutScores:
    """The scores of held-out samples ``(samples,)``, in the form that is kept; of each sample several side by side
    where `each` says so.

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
    return HeldOutScores(values=values[_ranks(count) - 1], count=count, each=each)


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
    """The ``ceil((n + 1) level)``-th smallest score, or of thinned scores the next larger one that was kept. Of K
    scores a sample the ``ceil(K (n + 1) level)``-th smallest of all: the smallest that a mean share of ``(n + 1) level
    / n`` of a sample's scores do not exceed.

    Args:
        scores: of held-out samples.
        level: of the promise.
        of: which samples they are, for the error: ``"class 2"``; nothing for all.

    Raises:
        PosthocUQError: the level is not in (0, 1), or more samples are needed for it.
    """
    rank = ceil((scores.count + scores.each) * check_probability("level", level) - 1e-9)
    if rank > scores.count:
        needed = ceil(level / (1 - level) - 1e-9)
        kind = of.rpartition(" ")[0]  # without its number
        every, one = (f" of every {kind}", f" of {of}") if of else ("", "")
        raise PosthocUQError(
            f"A level of {level:g} needs {needed:,} held-out samples{every}, and {scores.samples:,}{one} were kept for "
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


class Regularisation(Record):
    """Of the sets by ``"raps"``.

    Attributes:
        penalty: for every rank above `free_classes`.
        free_classes: how many classes a set may hold without it.
    """

    penalty: Annotated[float, Field(ge=0, le=1)]
    free_classes: Count


_STARTS, _STEPS = 4, 100  # of the tests of an accuracy with a confidence
UNTUNED = Regularisation(penalty=0.01, free_classes=5)
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
        scores = class_scores(probs, "raps", uniform, Regularisation(penalty=penalty, free_classes=free))
        own = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1).sort().values
        return float(set_of(probs, scores, float(own[place])).sum(-1).double().mean())

    return Regularisation(penalty=min(_PENALTIES, key=size), free_classes=free)


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


def scores_of_positions(scores: Tensor, counted: Tensor, of_shares: Sequence[float] = SHARES) -> Tensor:
    """By share the smallest score that so large a share of an input's positions do not exceed,
    ``(inputs, shares)``; infinity where no position counts.

    Args:
        scores: ``(inputs, positions)``.
        counted: ``(inputs, positions)``, bool.
        of_shares: in (0, 1], ascending.
    """
    ordered = scores.masked_fill(~counted, torch.inf).sort(1).values
    shares = torch.tensor(of_shares, dtype=torch.float64, device="cpu")
    ranks = (as_double(counted.sum(1, keepdim=True)).cpu() * shares - 1e-9).ceil().long().to(scores.device)
    return ordered.gather(1, (ranks - 1).clamp(min=0))


class HeldOutTargets(Record):
    """How badly held-out targets fit.

    Attributes:
        kind: of the scores.
        scores: of all targets, or those of each class, label, output or share.
        regularisation: of sets by ``"raps"``.
        shares: of positions, or of targets between two quantiles, ascending, in the order of `scores` or `by_input`.
        by_input: of values at positions: of each output, by share, the scores that so large a share of an input's
            values do not exceed.
    """

    kind: TargetScore
    scores: Annotated[list[HeldOutScores], Field(min_length=1, max_length=2**20)]
    regularisation: Regularisation | None = None
    shares: Annotated[list[Unit], Field(min_length=1, max_length=64)] | None = None
    by_input: Annotated[list[HeldOutScores], Field(min_length=1, max_length=2**20)] | None = None

    @classmethod
    def of_maps(cls, kind: TargetScore, by_channel: Sequence[Tensor]) -> HeldOutTargets:
        """Of values at positions, from the scores of each channel, ``(inputs, FINE_SHARES)``, of inputs with positions
        that count.
        """
        places = torch.tensor([FINE_SHARES.index(share) for share in SHARES], device="cpu")
        return cls(
            kind=kind,
            scores=[held_out_scores(each.flatten(), each.shape[1]) for each in by_channel],
            shares=list(SHARES),
            by_input=[held_out_scores(own) for each in by_channel for own in each[:, places].unbind(1)],
        )

    @model_validator(mode="after")
    def _check_shares(self) -> HeldOutTargets:
        shares, by_input = self.shares, self.by_input
        if (shares is not None) != (self.kind in ("positions", "quantiles") or by_input is not None):
            raise ValueError("must have shares if its scores are of positions or quantiles, and only then")
        if by_input is not None and self.kind not in ("deviation", "cdf", "label"):
            raise ValueError("must have scores by input of values or labels alone")
        if shares is None:
            return self
        found = len(self.scores) if by_input is None else len(by_input) / len(self.scores)
        if len(shares) != found or any(a >= b for a, b in pairwise(shares)):
            raise ValueError("must have as many ascending shares as scores")
        if self.kind != "quantiles" and shares[-1] != 1:
            raise ValueError("must have 1 as the last share of positions")
        if self.kind == "quantiles" and not 0 < shares[0] <= shares[-1] < 1:
            raise ValueError("must have shares between 0 and 1 of targets between quantiles")
        return self


class InputScores(Record):
    """The scores of held-out inputs.

    Attributes:
        inputs: by name, and ``"joint"``.
        tails: of the single scores, by which the joint one is measured.
    """

    inputs: Annotated[dict[Annotated[str, among((*SCORES, JOINT))], HeldOutScores], Field(max_length=8)]
    tails: Annotated[dict[Annotated[str, among(SCORES)], Tail], Field(max_length=8)]

    @field_validator("inputs", "tails", "wrong", mode="before", check_fields=False)
    @classmethod
    def _take_former_names(cls, by_score: Any) -> Any:
        """Files of earlier versions have other names for some scores."""
        if not isinstance(by_score, dict):
            return by_score
        known = cast(dict[Any, Any], by_score)
        return {FORMER_SCORES.get(name, name): values for name, values in known.items()}

    @model_validator(mode="after")
    def _check_tails(self) -> InputScores:
        if {*self.inputs} != {*self.tails, JOINT} or not self.tails:
            raise ValueError(f"must have scores of inputs of the names of its tails, and {JOINT!r}")
        return self


class ConformalScores(InputScores):
    """The held-out scores that a posterior stores, by which its predictions make promises, with what they were measured
    with.

    Attributes:
        samples: that were held out.
        share: of all samples, which tuned before; None where all did both, so that promises hold approximately.
        seed: of the split, and of the random numbers of ``"aps"`` and ``"raps"``.
        head: the identity of the predictor.
        posterior: its hyperparameters. No sample that promises chose any of them.
        class_rates: those of the inputs that it promises for, where they were given; samples were left out so that the
            rest has them.
        retuned: those that all samples chose afterwards, for what is predicted; scores stay those of `posterior`.
        targets: how badly targets fit; None where the likelihood has no score of them.
        wrong: of classes, by the name of a score of inputs ``(kept,)``, int64: the held-out samples with at most this
            score whose predicted class is wrong.
        counted: of outputs with positions, `inputs` and `tails` by the positions that labels and weights left in.
        heads: of several heads, the scores of each by its name.
    """

    samples: Count
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: Seed
    head: dict[Name, Plain]
    posterior: dict[Name, Plain]
    retuned: dict[Name, Plain] | None = None
    class_rates: list[Annotated[float, Field(gt=0, lt=1)]] | None = None
    targets: HeldOutTargets | None = None
    wrong: dict[Name, Annotated[Tensor, Listed(list[Natural], torch.int64)]] | None = None
    counted: InputScores | None = None
    heads: Annotated[dict[Name, ConformalScores], Field(max_length=MAX_HEADS)] | None = None

    @model_validator(mode="after")
    def _check_wrong(self) -> ConformalScores:
        wrong = self.wrong
        if wrong is not None:
            if {*wrong} != {*self.inputs} or any(len(wrong[n]) != len(self.inputs[n].values) for n in wrong):
                raise ValueError("must count wrong predictions at every score of inputs")
            if any(bool((each.diff() < 0).any()) or each[-1] > self.samples for each in wrong.values()):
                raise ValueError("has counts of wrong predictions that do not ascend to its samples at most")
        if self.counted is not None and {*self.counted.inputs} != {*self.inputs}:
            raise ValueError("must have the same scores of inputs by the positions that counted")
        for scores in (self.heads or {}).values():
            if scores.heads is not None or (scores.head, scores.posterior) != (self.head, self.posterior):
                raise ValueError("must have scores of heads that were measured like its own")
        return self

    def __repr__(self) -> str:
        kind = "" if self.kind is None else f"targets by {self.kind!r}, "
        return f"ConformalScores({kind}{self.samples:,} held-out samples, head {self.head.get('head')!r})"

    __str__ = __repr__

    @property
    def valid_at(self) -> dict[str, Any]:
        """The hyperparameters of the predictions that it promises for."""
        return self.posterior | (self.retuned or {})

    @property
    def kind(self) -> TargetScore | None:
        """Of the scores of targets."""
        return None if self.targets is None else self.targets.kind

    def of_counted(self) -> ConformalScores:
        """The same for inputs of which only the positions count that `counted` is about."""
        counted = self.counted
        if counted is None:
            return self
        return self.changed(inputs=counted.inputs, tails=counted.tails, counted=None)

    @property
    def randomised(self) -> bool:
        """Whether sets depend on a random number of each input."""
        if self.heads is not None:
            return any(scores.kind in ("aps", "raps") for scores in self.heads.values())
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
        regularisation = UNTUNED if self.targets is None else self.targets.regularisation or UNTUNED
        scores = class_scores(wide, kind, uniform, regularisation)
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
        shares = [] if self.targets is None else self.targets.shares or []
        thresholds = self._thresholds(("positions",), level, len(shares))
        return float(thresholds[_share_of(shares, level)])

    def quantile_bound(self, level: float) -> tuple[float, float]:
        """Which share of targets the quantiles have between them that an interval is made of, the nearest one to the
        level, and the largest score of a target that belongs to it.
        """
        shares = [] if self.targets is None else self.targets.shares or []
        thresholds = self._thresholds(("quantiles",), level, len(shares))
        nearest = min(range(len(shares)), key=lambda place: abs(shares[place] - level))
        return shares[nearest], float(thresholds[nearest])

    def bounds_by_input(self, kind: TargetScore | None, level: float, outputs: int) -> Tensor:
        """Of values at positions the largest score of each output's value that belongs to an interval, so that so large
        a share of inputs has so large a share of values within, ``(outputs,)``, float64.
        """
        self._thresholds((kind,), level, outputs)  # refuses what does not fit
        assert self.targets is not None
        by_input, shares = self.targets.by_input, self.targets.shares
        if by_input is None or shares is None:
            raise PosthocUQError("by='image' is for values at positions, and these have none; leave it out.")
        share = _share_of(shares, level)
        found = [quantile(each, level) for each in by_input[share :: len(shares)]]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def bounds(self, kind: TargetScore | None, level: float, outputs: int) -> Tensor:
        """The largest score of each output's target that belongs to an interval, ``(outputs,)``, float64."""
        return self._thresholds((kind,), level, outputs).expand(outputs)

    def _thresholds(self, kinds: tuple[str | None, ...], level: float, columns: int) -> Tensor:
        count = 0 if self.targets is None else len(self.targets.scores)
        if self.kind not in kinds or count not in (1, columns):
            raise PosthocUQError(
                f"The held-out scores that are stored are no scores of such predictions ({self.kind}, {count}); "
                f"calibrate again: uq.calibrate(posterior, val_loader)."
            )
        return self.thresholds(level)

    def thresholds(self, level: float) -> Tensor:
        """The largest score of a target that a promise of this level takes: one, or one a class, a label, an output
        or a share of positions, float64.
        """
        assert self.targets is not None
        targets = self.targets.scores
        scarcest, of = scarcest_of(self.kind, [scores.samples for scores in targets])
        quantile(targets[scarcest], level, of)  # an error names that one
        found = [quantile(scores, level) for scores in targets]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def check_level(self, level: float) -> None:
        """Refuse a level that cannot be promised of targets, of those of any head.

        Raises:
            PosthocUQError: there are too few samples for it.
        """
        for scores in [self] if self.heads is None else self.heads.values():
            if scores.targets is not None:
                scores.thresholds(level)

    def p_values(self, scores: Mapping[str, Tensor], name: str) -> Tensor:
        """`p_values` of one of the scores of inputs, ``(batch,)``.

        Args:
            scores: of the inputs, by name.
            name: of the score.

        Raises:
            PosthocUQError: it is none of those that are stored, or the prediction does not have it.
        """
        self._check_known(scores, name)
        if name == JOINT:
            return p_values(self.inputs[name], joint_score(self.tails, scores))
        return p_values(self.inputs[name], scores[name])

    def _check_known(self, scores: Mapping[str, Tensor], name: str) -> None:
        if name == "novelty" and name not in self.inputs:
            raise PosthocUQError(
                f"There are no held-out scores of novelty: predictions did not know it when they were measured. There "
                f"are those of {' and '.join(map(repr, self.inputs))}, such as prediction.familiarity('{JOINT}')."
            )
        one_of("score", name, tuple(self.inputs))
        needed = tuple(self.tails) if name == JOINT else (name,)
        missing = [each for each in needed if each not in scores]
        if missing:
            raise PosthocUQError(
                f"This prediction does not know its {missing[0]}; wrap without novelty=False."
            )

    def single_p_values(self, scores: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """By score the p-values, ``(batch,)``, whose smallest are the `p_values`: of the joint score those of each that
        it joins, at the rates that they share; of another its own.
        """
        found = self.input_scores(scores, name)
        return {each: p_values(self.inputs[name], values) for each, values in found.items()}

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
        scores = self.inputs[name]
        reached = 1 - (self._wrong_by(name) + 1).double() / (scores.ranks + 1).double()
        enough = (reached >= accuracy - 1e-12).nonzero().flatten()
        if len(enough) == 0:
            raise PosthocUQError(
                f"No share of the {scores.count:,} held-out inputs can be kept with an accuracy of {accuracy:g} by "
                f"{name}; the best that is reached is {rounded_down(float(reached.max())):g}."
            )
        return float(scores.count - scores.ranks[enough[-1]] + 1) / (scores.count + 1)

    def surest_rate_for(self, accuracy: float, confidence: float, name: str) -> float:
        """`rate_for`, but the accuracy is reached with this confidence over draws of the held-out samples: Learn then
        Test (Angelopoulos, Bates, Candes, Jordan, Lei, "Learn then test: calibrating predictive algorithms to achieve
        risk control", 2021), by binomial p-values and fixed sequences of thresholds.

        A hundred held-out scores are the thresholds. Given the one at the border, those below it are independent draws
        below it, so that a test leaves out the one at the border. Four sequences begin at evenly spaced thresholds and
        go on to larger ones until a test fails; each has a quarter of the risk.

        Args:
            accuracy: in (0, 1).
            confidence: in (0, 1).
            name: of the score of inputs.

        Raises:
            PosthocUQError: no threshold passes, or the record has no counts of errors.
        """
        scores, wrong, risk = self.inputs[name], self._wrong_by(name), (1 - confidence) / _STARTS
        needed = ceil(log(risk) / log(accuracy))  # samples without an error that pass
        first = int(torch.searchsorted(scores.ranks, torch.tensor(needed + 1, device="cpu")))
        last, passed, place = len(scores.ranks) - 1, False, -1
        starts = {first + (last - first) * each // _STARTS for each in range(_STARTS)}
        every = max(1, (last - first) // _STEPS)
        for step in sorted({*starts, *range(first, last + 1, every), last} if first <= last else ()):
            if step in starts or passed:
                trials, errors = int(scores.ranks[step]) - 1, int(wrong[step])
                passed = binomial_p_value(errors, trials, 1 - accuracy) <= risk
                place = step if passed else place
        if place < 0:
            raise PosthocUQError(
                f"No share of the {scores.count:,} held-out inputs is right with an accuracy of {accuracy:g} at a "
                f"confidence of {confidence:g} by {name}, which takes at least {needed + 1:,} of them without an "
                f"error; calibrate with more, or give a lower accuracy or confidence."
            )
        return float(scores.count - scores.ranks[place] + 1) / (scores.count + 1)

    def _wrong_by(self, name: str) -> Tensor:
        if self.wrong is None:
            raise PosthocUQError(
                "An aimed accuracy needs held-out predictions of classes that were counted right or wrong, and there "
                "are none: give a rate, or of classes calibrate again: uq.calibrate(posterior, val_loader)."
            )
        return self.wrong[name]

    def input_scores(self, scores: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """By score the numbers, ``(batch,)``, float64 on the CPU, whose largest ranks inputs: of the joint score those
        of each that it joins, on the scale that they share; of another its own.
        """
        self._check_known(scores, name)
        if name != JOINT:
            return {name: as_double(scores[name].detach()).cpu()}
        return {each: joint_score({each: tail}, scores) for each, tail in self.tails.items()}


def _share_of(shares: Sequence[float], level: float) -> int:
    """The place of the share by which a level is met; the last one is 1, and levels are below it."""
    return next(place for place, share in enumerate(shares) if share >= level - 1e-12)


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
        or "The posterior has no held-out scores, which guaranteed sets, familiarity and referral need: posterior = "
        "uq.calibrate(posterior, val_loader), then wrap the model with that one."
    )
