"""Multiple choice: a causal language model as a classifier of a few answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.outputs import output_tensor


class AnswerLogits(nn.Module):
    """A language model whose outputs are its logits of a few tokens at the last position, ``(batch, answers)``.

    Multiple choice as in Yang, Robeyns, Wang and Aitchison 2024, "Bayesian low-rank adaptation for large language
    models": the prompt ends before the answer, and the logits of the tokens "A", "B", "C" ... are the classes. Fit and
    wrap this module with ``likelihood="classification"``; labels are the numbers of the right answers.

    The last position is the last one that the attention mask does not hide, so that prompts may be padded on either
    side; without a mask it is the last of all. Of a model with an encoder and a decoder (T5) it is the decoder's:
    the prompt goes to the encoder, and the decoder begins with its start token unless ``decoder_input_ids`` are given.

    Args:
        model: takes ``input_ids`` and gives logits ``(batch, tokens, words)``, itself or as a part called ``logits``.
            It stays what it is: this module holds it, its parameters are the same.
        tokens: the answers' tokens, by their numbers in the vocabulary.
    """

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        super().__init__()
        self.tokens = [int(token) for token in tokens]
        if len(set(self.tokens)) < 2 or len(set(self.tokens)) < len(self.tokens) or min(self.tokens) < 0:
            raise PosthocUQError(
                f"The answers must be at least two different tokens, by their numbers in the vocabulary, not "
                f"{list(tokens)!r:.100}."
            )
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Logits of the answers, ``(batch, answers)``.

        Args:
            input_ids: (batch, tokens).
            attention_mask: (batch, tokens), 0 where padding is.
            **inputs: what else the model takes.

        Raises:
            PosthocUQError: the model gives no such logits, or does not say what its decoder begins with.
        """
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        config: Any = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            if not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
                inputs["decoder_input_ids"] = _start(config, input_ids)
            attention_mask = inputs.get("decoder_attention_mask")
        logits = output_tensor(self.model(input_ids=input_ids, **inputs))
        if logits.ndim != 3 or max(self.tokens) >= logits.shape[2]:
            raise PosthocUQError(
                f"The model gives outputs of shape {tuple(logits.shape)} where logits (batch, tokens, words) are "
                f"needed, with the answers {self.tokens} among the words."
            )
        answers = logits[:, :, self.tokens]
        if attention_mask is None:
            return answers[:, -1]
        places = torch.arange(logits.shape[1], device=logits.device)
        last = (places * (attention_mask != 0)).argmax(1)
        return answers.take_along_dim(last[:, None, None], 1).squeeze(1)


def _start(config: Any, input_ids: Tensor) -> Tensor:
    """The token that a decoder begins with, ``(batch, 1)``."""
    token = getattr(config, "decoder_start_token_id", None)
    if token is None:
        raise PosthocUQError(
            "The model's config names no decoder_start_token_id; pass decoder_input_ids with the prompts, or set it."
        )
    return torch.full((len(input_ids), 1), token, dtype=input_ids.dtype, device=input_ids.device)
