"""One number an input that says how far to trust a prediction: the scores by name, higher meaning less certain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.prediction import ClassPrediction, Prediction

_CLASS_SCORES: Mapping[str, Callable[[ClassPrediction], Tensor | None]] = {
    "entropy": lambda p: p.entropy(),
    "mutual_information": lambda p: None if p.sample_entropy is None else p.mutual_information(),
    "max_probability": lambda p: 1 - p.max_probability(),
    "functional_variance": lambda p: p.epistemic(),
    "variation_ratio": lambda p: None if p.votes is None else p.variation_ratio(),
}
CLASS_SCORES = tuple(_CLASS_SCORES)
VALUE_SCORES = ("standard_deviation", "epistemic_variance")
SCORES = (*CLASS_SCORES, *VALUE_SCORES)
"""Every score. Of classes: the entropy of the mean probabilities, mutual information (both in nats), 1 - the largest
probability, the mean over classes of the logits' variance, the share of draws that vote otherwise. Of values: the
total standard deviation (mean over outputs, in the outputs' units) and the variance that the weights contribute."""


def uncertainty_scores(prediction: Prediction) -> dict[str, Tensor]:
    """All scores that a prediction knows, by name, each ``(batch,)``; see `SCORES`."""
    if isinstance(prediction, ClassPrediction):
        found = {name: score(prediction) for name, score in _CLASS_SCORES.items()}
        return {name: score for name, score in found.items() if score is not None}
    deviation = prediction.standard_deviation
    return {
        "standard_deviation": deviation if deviation.ndim == 1 else deviation.mean(dim=-1),
        "epistemic_variance": prediction.epistemic(),
    }


def score_of(prediction: Prediction, name: str) -> Tensor:
    """One score ``(batch,)`` of a prediction.

    Raises:
        PosthocUQError: there is no such score, or this prediction does not know it.
    """
    known = uncertainty_scores(prediction)
    if name in known:
        return known[name]
    if name not in SCORES:
        raise PosthocUQError(f"A score is one of {SCORES}, not {name!r}.")
    raise PosthocUQError(
        f"This prediction does not know the score {name!r}; it knows {tuple(known)}. Mutual information "
        f"and the variation ratio need head='sampling' or link='mc'."
    )
