"""What recurrent layers, embeddings, normalisations and weights by a model's own code cost in a fit, beside
laplace-torch's diagonal where that runs.

    OMP_NUM_THREADS=1 python benchmarks/covering_cost.py            five minutes
    OMP_NUM_THREADS=1 python benchmarks/covering_cost.py --only LSTM
    OMP_NUM_THREADS=1 python benchmarks/covering_cost.py --smoke    a few sequences

Two fits and a plain pass, forth and back over all data, take turns; each row is the median, and the least and the
largest, of a fit's time as a multiple of the plain pass's, and the bytes of its posterior. The prior precision is
given, so that nothing is searched.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from _harness import single_threaded
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq

WORDS, CLASSES = 1000, 5


class Tagger(nn.Module):
    """An LSTM over words, and a class for each sequence; sequences may be packed."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 64), nn.LSTM(64, 64, batch_first=True)
        self.head, self.packed = nn.Linear(64, CLASSES), packed

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        words: Any = self.words(ids)
        if self.packed:
            words = nn.utils.rnn.pack_padded_sequence(
                words, torch.full((len(ids),), ids.shape[1]), batch_first=True
            )
        return self.head(self.inner(words)[1][0][-1])


class Standardised(nn.Conv2d):
    """Weight standardisation, as in BiT."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with a kernel of mean 0 and variance 1."""
        spread, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (spread + 1e-6).rsqrt()
        return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding)


class Images(nn.Sequential):
    """Five convolutions, of plain or of standardised weights."""

    def __init__(self, kind: type[nn.Conv2d]) -> None:
        widths = 3, 16, 32, 32, 64, 64
        parts: list[nn.Module] = []
        for index, (one, other) in enumerate(pairwise(widths)):
            parts += [
                kind(one, other, 3, stride=1 + index % 2, padding=1),
                nn.GroupNorm(4, other),
                nn.ReLU(),
            ]
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


class Bert(nn.Module):
    """A BERT of two layers from its configuration."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=words, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=CLASSES,
            intermediate_size=256, max_position_embeddings=64,
        )  # fmt: skip
        self.inner: Any = transformers.BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.inner(input_ids=ids).logits


def _texts(words: int = WORDS) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, words, (32, 24))


def _pictures() -> Tensor:
    return torch.randn(32, 3, 32, 32)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "LSTM": (Tagger, _texts()),
    "LSTM, packed": (lambda: Tagger(packed=True), _texts()),
    "BERT": (Bert, _texts()),
    "BERT, 30,000 words": (lambda: Bert(30_000), _texts(30_000)),
    "CNN": (lambda: Images(nn.Conv2d), _pictures),
    "CNN, standardised weights": (lambda: Images(Standardised), _pictures),
}


def fits(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    given: dict[str, Any] = {"prior_precision": 1.0, "progress": False}
    found: dict[str, Callable[[], Any]] = {
        f"{method}, {layers}": lambda method=method, layers=layers: uq.fit(
            model, data, method, layers=layers, **given
        )
        for method in ("diag", "inf")
        for layers in ("all", "everything")
    }
    try:
        from laplace import Laplace
    except ImportError:
        return found

    class Inner(nn.Module):  # laplace-torch takes the last layer's name from it
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.network(ids)

    def diagonal() -> Any:
        laplace = Laplace(Inner(), "classification", subset_of_weights="all", hessian_structure="diag")
        rows = TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True)))
        laplace.fit(DataLoader(rows, batch_size=32))
        return laplace

    return found | {"laplace-torch, diagonal": diagonal}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few sequences, once")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args(arguments)
    batches, rounds = (1, 1) if options.smoke else (8, 5)
    print("| network | fit | passes: median (least to largest) | bytes |\n| --- | --- | --- | --- |")
    for name in options.only:
        make, inputs = NETWORKS[name]
        torch.manual_seed(0)
        model = make().eval()
        data = [(inputs(), torch.randint(CLASSES, (32,))) for _ in range(batches)]

        def plain(model: nn.Module = model, data: list[tuple[Tensor, Tensor]] = data) -> None:
            for x, y in data:
                nn.functional.cross_entropy(model(x), y).backward()
                model.zero_grad()

        shares: dict[str, list[float]] = {}
        sizes: dict[str, str] = {}
        with single_threaded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain()
            for _ in range(rounds):
                seconds, _ = timed(plain)
                for fit, run in fits(model, data).items():
                    if fit in sizes and not sizes[fit].isdigit():
                        continue
                    try:
                        own, posterior = timed(run)
                    except Exception as error:  # of another library
                        if not fit.startswith("laplace"):
                            raise
                        sizes[fit] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                        continue
                    shares.setdefault(fit, []).append(own / seconds)
                    stored = getattr(posterior, "blocks", None)
                    sizes[fit] = str(
                        posterior.H.nbytes if stored is None else sum(b.bytes() for b in stored.values())
                    )
        for fit, size in sizes.items():
            own_shares = shares.get(fit)
            cell = (
                f"{median(own_shares):.1f} ({min(own_shares):.1f} to {max(own_shares):.1f})"
                if own_shares
                else "-"
            )
            print(f"| {name} | {fit} | {cell} | {size} |", flush=True)


if __name__ == "__main__":
    main()
