"""Classes that sets cover too little: what `calibrate` says where a promise for all on average is none for some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from torch import Tensor

from posthoc_uq.core.errors import warn_user
from posthoc_uq.fitting.class_scaling import listed
from posthoc_uq.likelihoods.conformal import held_out_scores, quantile
from posthoc_uq.likelihoods.selective import binomial_p_value
from posthoc_uq.posteriors.posterior import Posterior

_LEVEL = 0.9
_NEEDED = ceil(_LEVEL / (1 - _LEVEL) - 1e-9)  # samples for a promise of this level
_RISK = 0.01  # that any class is named by chance
_RARE = 1 / 3  # of the mean number of samples of a class
RARE_CLASSES = "rare classes"
"""What the sentence is called in a report."""


@dataclass(frozen=True)
class RareClasses:
    """The classes that a promise for all on average is none for.

    Attributes:
        text: a sentence that names them.
        matters: whether one is covered too little for sure, or much rarer than others.
    """

    text: str
    matters: bool

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor, classes: int) -> RareClasses | None:
        """Those that sets of 90 % cover too little, and those with too few samples for a promise of their own.

        Args:
            scores: of the samples that promise, (samples,), larger fits worse.
            labels: of them, (samples,), int64.
            classes: their number.
        """
        counts, samples, missed = labels.bincount(minlength=classes).tolist(), len(labels), list[int]()
        held = counts
        if samples >= _NEEDED:
            inside = scores <= quantile(held_out_scores(scores), _LEVEL)
            held = labels[inside].bincount(minlength=classes).tolist()
            risk = _RISK / classes
            missed = [
                own for own in range(classes) if binomial_p_value(held[own], counts[own], _LEVEL) < risk
            ]
        few = sorted((own for own in range(classes) if counts[own] < _NEEDED), key=lambda own: counts[own])
        missed.sort(key=lambda own: held[own] / counts[own])
        parts: list[str] = []
        if missed:
            named = [f"class {own} in {held[own] / counts[own]:.0%} of {counts[own]}" for own in missed]
            parts.append(f"sets of 90 % hold {listed(named)} held-out samples")
        if few:
            parts.append(
                f"{listed([f'class {own} has {counts[own]}' for own in few])} of the {samples:,} that promise"
            )
        if not parts:
            return None
        each = "by_class=True promises for each by itself"
        if few:  # then it would fail
            scarce = listed([f"class {own}" for own in few])
            each += f", once {_NEEDED} samples of each promise: give more of {scarce}"
        text = f"{', and '.join(parts)}. A promise is an average over all classes; {each}."
        usual = samples / classes
        rare = usual >= _NEEDED and any(counts[own] < _RARE * usual for own in few)
        return cls(text[0].upper() + text[1:], bool(missed) or rare)


def rare_in_heads(of_heads: Mapping[str, RareClasses | None]) -> RareClasses | None:
    """Those of several heads as one, by the names of the heads."""
    known = {name: rare for name, rare in of_heads.items() if rare is not None}
    if not known:
        return None
    text = " ".join(f"Head {name!r}: {rare.text}" for name, rare in known.items())
    return RareClasses(text, any(rare.matters for rare in known.values()))


def with_rare_classes(posterior: Posterior, rare: RareClasses | None) -> Posterior:
    """The posterior whose report has the sentence, in place of an earlier one; a warning says it where it matters."""
    tuning = {name: how for name, how in posterior.history.tuning.items() if name != RARE_CLASSES}
    if rare is not None:
        tuning[RARE_CLASSES] = rare.text
        if rare.matters:
            warn_user(rare.text)
    return posterior.replaced(history=replace(posterior.history, tuning=tuning))
