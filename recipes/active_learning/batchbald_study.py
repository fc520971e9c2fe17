"""BatchBALD beside BALD and points at random, over seeds; `recipes.active_learning.batchbald` is the recipe.

BALD takes the inputs of most mutual information one by one, and with them others that would tell the same; the joint
information of a batch counts what they share once.

    python -m recipes.active_learning.batchbald_study            three arms of a spiral, six seeds; a minute or two
    python -m recipes.active_learning.batchbald_study --smoke    one seed, two batches; seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.active_learning.batchbald import START, batchbald
from recipes.active_learning.parts import spirals, trained_classifier
from recipes.common import Batch, parsed, parser, report, save_figure, table

COLOURS = {"random": "#595959", "BALD": "#E69F00", "BatchBALD": "#0072B2"}


def bald(probs: Tensor, size: int, generator: torch.Generator | None = None) -> list[int]:
    """The candidates of most mutual information, each by itself."""
    information = torch.special.entr(probs.mean(0)).sum(1) - torch.special.entr(probs).sum(2).mean(0)
    return information.topk(size).indices.tolist()


def at_random(probs: Tensor, size: int, generator: torch.Generator | None = None) -> list[int]:
    """Any candidates."""
    return torch.randperm(probs.shape[1], generator=generator)[:size].tolist()


STRATEGIES: dict[str, Callable[..., list[int]]] = {"random": at_random, "BALD": bald, "BatchBALD": batchbald}


def drawn(
    model: nn.Module, pool: Batch, known: list[int], inputs: Tensor, options: argparse.Namespace
) -> Tensor:
    """Probabilities ``(draws, candidates, classes)`` under joint draws of the function."""
    data = [(pool[0][known], pool[1][known])]
    posterior = uq.fit(model, data, progress=False)
    generator = torch.Generator().manual_seed(0)
    return uq.wrap(model, posterior).predictive_samples(inputs, n_samples=options.draws, generator=generator)


def run(strategy: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Test accuracy with the first labels, and after each batch."""
    inputs, labels = pool = spirals(options.pool, seed)
    test, truth = spirals(2000, seed + 1000)
    known, accuracies = list(range(START)), list[float]()
    generator = torch.Generator().manual_seed(seed)
    for batch in range(options.batches + 1):
        model = trained_classifier(inputs[known], labels[known], seed, options.steps)
        accuracies.append(float((model(test).argmax(1) == truth).double().mean()))
        if batch == options.batches:
            break
        free = sorted(set(range(len(labels))) - set(known))
        probs = drawn(model, pool, known, inputs[free], options)
        known += [free[place] for place in STRATEGIES[strategy](probs, options.size, generator)]
    return accuracies


def first_batches(
    seed: int, options: argparse.Namespace
) -> tuple[Batch, list[int], Tensor, dict[str, list[int]]]:
    """The pool, what is known, the information of each point by itself, and the first batch of every strategy."""
    inputs, labels = spirals(options.pool, seed)
    known = list(range(START))
    probs = drawn(
        trained_classifier(inputs[known], labels[known], seed, options.steps),
        (inputs, labels),
        known,
        inputs,
        options,
    )
    information = torch.special.entr(probs.mean(0)).sum(1) - torch.special.entr(probs).sum(2).mean(0)
    chosen = {
        name: choose(probs, options.size, torch.Generator().manual_seed(seed))
        for name, choose in STRATEGIES.items()
    }
    return (inputs, labels), known, information, chosen


def picture(seed: int, found: Mapping[str, Sequence[Sequence[float]]], options: argparse.Namespace) -> Figure:
    """The first batch of BALD and of BatchBALD over the information of each point, and accuracy by labels."""
    (inputs, labels), known, information, chosen = first_batches(seed, options)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    *maps, curve = figure.subplots(1, 3)
    for panel, name in zip(maps, ("BALD", "BatchBALD"), strict=True):
        panel.scatter(*inputs.T, c=information, s=8, cmap="Blues")
        panel.scatter(
            *inputs[known].T, c=labels[known], s=30, cmap="Set1", edgecolor="black", label="labelled"
        )
        panel.scatter(*inputs[chosen[name]].T, s=90, facecolor="none", edgecolor=COLOURS[name], linewidth=2)
        panel.set(title=f"{name}: its first {options.size}", xticks=[], yticks=[])
    for name, runs in found.items():
        mean = torch.tensor(runs).mean(0)
        counts = [START + options.size * batch for batch in range(len(mean))]
        curve.plot(counts, mean, color=COLOURS[name], label=name)
    curve.set(xlabel="labels", ylabel="test accuracy")
    curve.legend(frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "batchbald", "one seed, two batches: seconds")
    add = command.add_argument
    add("--seeds", type=int, default=6)
    add("--batches", type=int, default=8)
    add("--size", type=int, default=6, help="labels of a batch")
    add("--pool", type=int, default=600)
    add("--draws", type=int, default=100, help="of the function")
    add("--steps", type=int, default=300, help="of each training")
    options = parsed(command, arguments, seeds=1, batches=2, size=3, pool=100, draws=20, steps=50)
    torch.set_num_threads(1)
    found = dict[str, list[list[float]]]()
    for name in STRATEGIES:
        found[name] = [run(name, seed, options) for seed in range(options.seeds)]
        print(f"{name}: accuracy {torch.tensor(found[name])[:, -1].mean():.3f}")
    save_figure(picture(0, found, options), options.output / "batchbald.png", options.smoke)
    places = sorted({options.batches // 4, options.batches // 2, options.batches} - {0})
    rows = {
        name: [{f"{START + options.size * place} labels": one[place] for place in places} for one in runs]
        for name, runs in found.items()
    }
    report(options, "batchbald", table(rows, corner="strategy", error=True), found)


if __name__ == "__main__":
    main()
