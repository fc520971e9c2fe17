"""One number an input that says how far to trust a prediction: the scores by name, higher meaning less certain."""

from __future__ import annotations

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.values import meant

CLASS_SCORES = (
    "entropy",
    "mutual_information",
    "max_probability",
    "functional_variance",
    "variation_ratio",
    "novelty",
)
VALUE_SCORES = ("standard_deviation", "epistemic_variance", "novelty")
SCORES = tuple(dict.fromkeys((*CLASS_SCORES, *VALUE_SCORES)))
"""Every score. Of classes: the entropy of the mean probabilities, mutual information (both in nats), 1 - the largest
probability, the mean over classes of the logits' variance, the share of draws that vote otherwise. Of values: the
total standard deviation (mean over outputs, in the outputs' units) and the variance that the weights contribute. Of
both: the novelty, the share of the prior's uncertainty that the data left (`Predictor.novelty`). Of a likelihood of
the user's: those of values, and the mean over outputs of the outputs' variance (``"functional_variance"``)."""


def score_of(prediction: Prediction, name: str) -> Tensor:
    """One score ``(batch,)`` of a prediction.

    Raises:
        PosthocUQError: there is no such score, or this prediction does not know it.
    """
    known = prediction.scores()
    if name in known:
        return known[name]
    if name not in SCORES:
        raise PosthocUQError(f"A score is one of {SCORES}, not {name!r}.{meant(name, SCORES)}")
    raise PosthocUQError(
        f"This prediction does not know the score {name!r}; it knows {tuple(known)}. Mutual information and the "
        f"variation ratio need head='sampling' or link='mc', novelty a posterior that keeps what it takes, and a head "
        f"without novelty=False."
    )
