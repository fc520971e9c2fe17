"""Uncertainty of a small language model on Python's own texts, with a posterior of the last layer and one of LoRA.

python -m recipes.language.run            some fifteen minutes of one core
python -m recipes.language.run --smoke    few steps; seconds
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from posthoc_uq.likelihoods import PositionPrediction
from recipes.common import markdown, parsed, parser, report, save_figure
from recipes.language.models import gpt2, train, with_lora
from recipes.language.text import ALPHABET, decoded, encoded, read, sequences

LIKELIHOOD = uq.Categorical(class_dim=-1, next_token=True)
SCORES = ("entropy", "mutual_information", "novelty")

Pieces = Mapping[str, Tensor]


def loader(ids: Tensor, size: int = 16) -> list[dict[str, Tensor]]:
    """Batches as a collator makes them: the labels are the inputs."""
    return [{"input_ids": part, "labels": part} for part in ids.split(size)]


def predicted(predictor: Any, ids: Tensor) -> PositionPrediction:
    """The prediction of all sequences."""
    return predictor.predict(loader(ids), progress=False)


def alone(model: nn.Module, ids: Tensor) -> PositionPrediction:
    """What the network says without a posterior: a prediction of one draw."""
    with torch.no_grad():
        logits = torch.cat([model(input_ids=batch["input_ids"]).logits for batch in loader(ids)])
    return LIKELIHOOD.from_blocks(iter([logits[None]])).of_one_network()


def row(
    of: Mapping[str, PositionPrediction], texts: Pieces, familiar: str, foreign: list[str]
) -> dict[str, float]:
    """NLL and ECE on the familiar text, and how well scores of tokens and of sequences tell foreign ones from it."""
    quality = of[familiar].quality(texts[familiar])
    found = {"NLL": quality["nll"], "ECE": quality["ece"]}
    for name in foreign:
        for score in SCORES:
            if score not in of[familiar].scores_by_position():
                continue
            tokens, whole = (
                [values(of[text], texts[text], score) for text in (familiar, name)]
                for values in (_tokens, _whole)
            )
            found[f"{name}, {score}, token"] = metrics.ood_auroc(*tokens)
            found[f"{name}, {score}, sequence"] = metrics.ood_auroc(*whole)
    return found


def _tokens(prediction: PositionPrediction, labels: Tensor, score: str) -> Tensor:
    return prediction.scores_by_position()[score][prediction.labelled(labels)]


def _whole(prediction: PositionPrediction, labels: Tensor, score: str) -> Tensor:
    return uq.sequence_scores(prediction, labels)[score]


def compared(
    model: nn.Module, rows: Mapping[str, tuple[str, str, dict[str, Any]]], fitted: Tensor, held: Tensor, texts: Pieces,
    familiar: str, foreign: list[str],
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:  # fmt: skip
    """The table of one model, and the predictors by name.

    Args:
        model: trained.
        rows: name to method, layers and options of the head, its name among them.
        fitted: training sequences for the posteriors.
        held: sequences on which the temperature of "tuned" rows is found.
        texts: held-out sequences by name.
        familiar: the name of the text that the model is for.
        foreign: the names of the others.
    """
    network = {name: alone(model, ids) for name, ids in texts.items()}
    table = {"network alone": row(network, texts, familiar, foreign)}
    predictors: dict[str, Any] = {}
    posteriors: dict[tuple[str, str], uq.Posterior] = {}
    for name, (method, layers, options) in rows.items():
        start = time.perf_counter()
        if (method, layers) not in posteriors:
            posteriors[method, layers] = uq.fit(
                model, loader(fitted), method, layers=layers, likelihood=LIKELIHOOD, progress=False
            )
        posterior, head = posteriors[method, layers], dict(options)
        if head.pop("tuned", False):
            posterior = uq.tune(posterior, loader(held), progress=False)
        elif head["head"] != posterior.history.head.name:
            posterior = uq.tune(
                posterior, loader(fitted), criterion="faithful", head=head["head"], progress=False
            )
        fit_seconds = time.perf_counter() - start
        predictors[name] = uq.wrap(model, posterior, **head)
        of = {text: predicted(predictors[name], ids) for text, ids in texts.items()}
        table[name] = row(of, texts, familiar, foreign) | {
            "prior precision": float(posterior.prior_precision),
            "fit seconds": fit_seconds,
            "prediction seconds": time.perf_counter() - start - fit_seconds,
        }
        print(name, {key: round(value, 3) for key, value in table[name].items()}, flush=True)
    return table, predictors


def shown(table: Mapping[str, Mapping[str, float]], foreign: list[str]) -> str:
    """AUROCs are ``token / sequence``."""
    columns = [(name, score) for name in foreign for score in SCORES]
    lines = [["", "NLL", "ECE", *(f"{name}: {score.replace('_', ' ')}" for name, score in columns)]]
    for name, of in table.items():
        pairs = [[of.get(f"{n}, {s}, {unit}") for unit in ("token", "sequence")] for n, s in columns]
        cells = ["-" if None in pair else " / ".join(f"{value:.3f}" for value in pair) for pair in pairs]
        lines.append([name, f"{of['NLL']:.4f}", f"{of['ECE']:.4f}", *cells])
    return markdown(lines)


def coloured_text(lines: Mapping[str, tuple[str, Tensor]]) -> Figure:
    """A picture of some lines of text.

    Args:
        lines: name to a text and a positive number a character; the number at a character belongs to the prediction of
            the next one, and colours that one.
    """
    longest = max(len(text) for text, _ in lines.values())
    figure = Figure(figsize=(0.16 * longest + 1.8, 0.45 * len(lines) + 0.7), layout="constrained")
    axes = figure.subplots()
    values = [value for _, numbers in lines.values() for value in numbers.tolist()]
    norm, colours = LogNorm(min(values), max(values)), matplotlib.colormaps["Oranges"]
    for line, (name, (text, numbers)) in enumerate(lines.items()):
        axes.text(-1, -line, name, ha="right", va="center", fontsize=9)
        for place, letter in enumerate(text):
            colour = colours(norm(numbers[place - 1].item())) if place else (1.0, 1.0, 1.0, 1.0)
            axes.text(
                place, -line, letter if letter != "\n" else " ", family="monospace", ha="center", va="center",
                fontsize=10, bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.6},
            )  # fmt: skip
    axes.set(xlim=(-9, longest), ylim=(-len(lines) + 0.4, 0.6))
    axes.axis("off")
    figure.colorbar(
        matplotlib.cm.ScalarMappable(norm, colours), ax=axes, label="novelty", fraction=0.03, pad=0.01
    )
    return figure


LAST = {
    "last layer, INF, linearised": ("inf", "last", {"head": "linearized"}),
    "last layer, INF, tuned": ("inf", "last", {"head": "linearized", "tuned": True}),
    "last layer, diagonal, moments": ("diag", "last", {"head": "moments"}),
}
LORA = {
    "LoRA, KFAC, linearised": ("kfac", "*lora_*", {"head": "linearized"}),
    "LoRA, INF, sampling": ("inf", "*lora_*", {"head": "sampling", "n_samples": 20, "novelty": True}),
    "last layer, INF, linearised": ("inf", "last", {"head": "linearized"}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    command = parser(__doc__, "language", "few steps")
    command.add_argument("--steps", type=int, default=600, help="of training; a fifth as many of fine-tuning")
    options = parsed(command, arguments, steps=8)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The posterior's prior precision was found for")
    length, width, layers = (16, 16, 2) if options.smoke else (64, 96, 3)
    steps, (count, fitted) = options.steps, (6, 12) if options.smoke else (60, 200)
    texts = read(30_000 if options.smoke else 2_000_000)
    print(
        f"{len(texts.prose):,} characters of prose, {len(texts.code):,} of code, {len(ALPHABET)} different ones"
    )
    pieces = {name: sequences(text, length, count) for name, text in texts.strange().items()}
    pieces["prose"] = sequences(texts.held_prose[20_000:], length, count)
    pieces["code"] = sequences(texts.held_code, length, count)
    model = train(gpt2(length, width, layers), encoded(texts.prose), length, steps, 2e-3)
    held = sequences(texts.held_prose[:20_000], length, count)
    last, lora = (dict(list(rows.items())[: 1 if options.smoke else None]) for rows in (LAST, LORA))
    foreign = ["code", "other letters", "shuffled"]
    first, predictors = compared(
        model, last, sequences(texts.prose, length, fitted), held, pieces, "prose", foreign
    )
    lines = {name: pieces[name][3] for name in ("prose", *foreign)}
    head = predictors["last layer, INF, linearised"]
    shown_lines = {n: (decoded(ids), predicted(head, ids[None]).novelty()[0]) for n, ids in lines.items()}
    save_figure(coloured_text(shown_lines), options.output / "novelty.png", options.smoke)

    few = texts.code[: 2_000 if options.smoke else 60_000]
    tuned = train(with_lora(model, 4), encoded(few), length, max(2, steps // 5), 3e-3)
    held = sequences(texts.code[-20_000:], length, count)
    foreign = ["prose", "other letters", "shuffled"]
    second, _ = compared(tuned, lora, sequences(few, length, fitted), held, pieces, "code", foreign)
    page = (
        f"## Trained on prose\n\n{shown(first, ['code', *foreign[1:]])}\n\n"
        f"## Fine-tuned on code\n\n{shown(second, foreign)}\n"
    )
    report(options, "language", page, {"prose": first, "code": second})


if __name__ == "__main__":
    main()
