"""What a posterior over the last layer of a causal language model costs: 10 million weights, 50,000 words, 128 tokens.

    OMP_NUM_THREADS=1 python benchmarks/language_cost.py             64 sequences; two minutes
    OMP_NUM_THREADS=1 python benchmarks/language_cost.py --smoke     a small vocabulary; seconds

GPT-2's architecture with random weights, which have no influence on time or memory; embedding and projection share
their weight. The time of a fit is in multiples of one pass over the same sequences, forward and backward as in
training, and of a forward pass alone. Memory is the peak above what the process held before, in multiples of one
batch's logits in float32.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _harness import (
    Row,
    forget_peak,
    held_memory,
    machine,
    output_file,
    peak_memory,
    single_threaded,
    table,
    write_json,
)

import posthoc_uq as uq

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BATCH = 4
METHODS = ("diag", "inf")
LIKELIHOOD = uq.Categorical(class_dim=-1, next_token=True)


def language_model(words: int, tokens: int, width: int, layers: int) -> torch.nn.Module:
    """GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=words,
            n_positions=tokens,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config).eval()


def measured(work: Callable[[], Any], unit: float) -> tuple[float, float]:
    """Seconds of processor time of some work, and its peak of memory in units of so many bytes."""
    forget_peak()
    held, start = held_memory(), time.process_time()
    work()
    return time.process_time() - start, (peak_memory() - held) / unit


def rows(words: int, tokens: int, width: int, layers: int, sequences: int) -> list[Row]:
    """One line a method, after those of plain passes."""
    model = language_model(words, tokens, width, layers)
    ids = torch.randint(1, words, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    loader = [{"input_ids": part, "labels": part} for part in ids.split(BATCH)]
    unit = 4.0 * BATCH * tokens * words
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights, {sequences} sequences")

    def forward() -> None:
        with torch.no_grad():
            for batch in loader:
                model(batch["input_ids"])

    def both() -> None:
        for batch in loader:
            logits = model(batch["input_ids"]).logits
            (-LIKELIHOOD.log_prob(logits, batch["labels"]).sum()).backward()
            model.zero_grad()

    measured(forward, unit)
    one, memory = measured(forward, unit)
    found: list[Row] = [
        {"what": "forward", "seconds": one, "forward passes": 1.0, "passes": None, "memory": memory}
    ]
    whole, memory = measured(both, unit)
    found.append(_row("forward and backward", whole, one, whole, memory))
    for method in METHODS:
        options: dict[str, Any] = {"layers": "last", "likelihood": LIKELIHOOD, "progress": False}
        taken, memory = measured(
            lambda m=method, o=options: uq.fit(model, loader, m, prior_precision=100.0, **o), unit
        )
        found.append(_row(f"fit, {method}", taken, one, whole, memory))
        print(found[-1], flush=True)
    return found


def _row(what: str, seconds: float, forward: float, whole: float, memory: float) -> Row:
    return {
        "what": what,
        "seconds": seconds,
        "forward passes": seconds / forward,
        "passes": seconds / whole,
        "memory": memory,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="a small vocabulary")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args(arguments)
    sizes = (
        (200, 16, 16, 2, 8) if options.smoke else (options.words, options.tokens, 160, 6, options.sequences)
    )
    with single_threaded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rows(*sizes)
    print(table(found))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "rows": found})


if __name__ == "__main__":
    main()
