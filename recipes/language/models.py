"""A small GPT-2, its training on text, and its fine-tuning by LoRA."""

from __future__ import annotations

import math
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.language.text import ALPHABET


def gpt2(length: int, width: int, layers: int) -> nn.Module:
    """GPT-2's architecture, with random weights; embedding and projection share theirs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(ALPHABET), n_positions=length, n_embd=width, n_layer=layers, n_head=4,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters of this rank in every attention; only they are trained."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=["c_attn"], fan_in_fan_out=True
        )
        return peft.get_peft_model(model, config)


def train(model: nn.Module, ids: Tensor, length: int, steps: int, rate: float, batch: int = 32) -> nn.Module:
    """AdamW on random pieces of a text, with a rate that falls along a cosine.

    Args:
        model: its parameters that need gradients are trained.
        ids: the text, ``(characters,)``.
        length: characters of a piece.
        steps: how many.
        rate: the largest.
        batch: pieces a step.
    """
    optimiser = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01
    )
    generator = torch.Generator().manual_seed(1)
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = (
                rate * min(1.0, 20 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        starts = torch.randint(0, len(ids) - length, (batch,), generator=generator)
        piece = torch.stack([ids[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=piece, labels=piece).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a character", flush=True)
    return model.eval()
