"""Scores of whole sequences, from those of their tokens."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.positions import PositionPrediction


def sequence_scores(
    prediction: PositionPrediction, labels: Tensor | None = None, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """One number a sequence of everything that is known of its tokens, each ``(batch,)``.

    With labels: ``"log_probability"``, the sum over tokens of the log of each one's mean probability, in nats;
    ``"perplexity"``, ``exp(-log_probability / tokens)``; ``"tokens"``, how many count. Always, for every score of
    `PositionPrediction.scores_by_position` (``"entropy"``, ``"mutual_information"``, ``"novelty"`` ...), its mean over
    the tokens by its name, and the largest as ``"largest_entropy"`` and so on.

    Args:
        prediction: of outputs ``(batch, tokens, words)``.
        labels: (batch, tokens), as the loader gives them; tokens whose label is ignored do not count, and with
            ``next_token=True`` the outputs at a token belong to the label after it.
        mask: (batch, tokens), true where a token counts, such as the attention mask; in place of labels.

    Raises:
        PosthocUQError: the prediction has no positions, both are given, or shapes do not fit.
    """
    if not isinstance(cast(Any, prediction), PositionPrediction):
        raise PosthocUQError(
            f"sequence_scores needs a PositionPrediction, which likelihood=uq.Categorical(class_dim=-1) gives for "
            f"outputs (batch, tokens, words), not a {type(prediction).__name__}."
        )
    if labels is not None and mask is not None:
        raise PosthocUQError("Labels say which tokens count; give labels or mask, not both.")
    found: dict[str, Tensor] = {}
    if labels is not None:
        mask = prediction.labelled(labels)
        found["log_probability"] = prediction.log_prob(labels)
        found["perplexity"] = prediction.perplexity(labels)
        found["tokens"] = mask.flatten(1).sum(1)
    for name, score in prediction.scores_by_position().items():
        found[name] = prediction.per_input(score, mask=mask)
        found[f"largest_{name}"] = prediction.per_input(score, "largest", mask=mask)
    return found
