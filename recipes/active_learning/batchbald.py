"""BatchBALD (Kirsch, van Amersfoort, Gal, 2019): which batch of inputs to label next.

BALD takes the inputs of most mutual information one by one, and with them others that would tell the same; the joint
information of a batch counts what they share once.

    python -m recipes.active_learning.batchbald            three arms of a spiral, six seeds; a minute or two
    python -m recipes.active_learning.batchbald --smoke    one seed, two batches; seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import Batch, parsed, parser, report, save_figure, table

MOST = 500
"""Combinations of labels that are kept; of more a sample is drawn."""
START = 12
COLOURS = {"random": "#595959", "BALD": "#E69F00", "BatchBALD": "#0072B2"}


def batchbald(probs: Tensor, size: int, generator: torch.Generator | None = None) -> list[int]:
    """Candidates whose labels have most mutual information with the function together, each chosen after the others.

    ``I(y_1..y_b; f) = H(y_1..y_b) - sum_i E_f H(y_i | f)``, where the joint entropy is over all combinations of labels;
    of more than `MOST` combinations a sample stands for all, each weighted by how rarely it would be drawn.

    Args:
        probs: ``(draws, candidates, classes)`` of joint draws of the function, as `predictive_samples` gives them.
        size: of the batch.
        generator: of the sample.
    """
    draws, chosen = len(probs), list[int]()
    alone = torch.special.entr(probs).sum(2).mean(0)
    of_batch, weights = probs.new_ones(1, draws), probs.new_ones(1)  # p(labels so far | f), by combination
    for _ in range(size):
        joint = torch.einsum("md,dnc->nmc", of_batch, probs) / draws
        # the entropies of the labels that are chosen are the same for every candidate
        gain = (torch.special.entr(joint).sum(2) * weights).sum(1) - alone
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        of_batch = (of_batch.unsqueeze(1) * probs[:, chosen[-1]].T).flatten(0, 1)
        weights = weights.repeat_interleave(probs.shape[2])
        if len(of_batch) > MOST:
            share = weights * of_batch.mean(1)
            picked = torch.multinomial(share, MOST, replacement=True, generator=generator)
            of_batch, weights = of_batch[picked], weights[picked] * share.sum() / (MOST * share[picked])
    return chosen


def bald(probs: Tensor, size: int, generator: torch.Generator | None = None) -> list[int]:
    """The candidates of most mutual information, each by itself."""
    information = torch.special.entr(probs.mean(0)).sum(1) - torch.special.entr(probs).sum(2).mean(0)
    return information.topk(size).indices.tolist()


def at_random(probs: Tensor, size: int, generator: torch.Generator | None = None) -> list[int]:
    """Any candidates."""
    return torch.randperm(probs.shape[1], generator=generator)[:size].tolist()


STRATEGIES: dict[str, Callable[..., list[int]]] = {"random": at_random, "BALD": bald, "BatchBALD": batchbald}


def spirals(samples: int, seed: int) -> Batch:
    """Points of three arms, with the arm as label; most of them lie near the centre, where arms are close."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(samples) % 3
    turn = torch.rand(samples, generator=generator)
    angle = 4.5 * turn + 2 * torch.pi / 3 * arm + 0.15 * torch.randn(samples, generator=generator)
    radius = 0.3 + 2 * turn
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def trained(inputs: Tensor, labels: Tensor, seed: int, steps: int) -> nn.Sequential:
    """A network of two layers of 32 units."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    optimiser.zero_grad()
    return model.eval()


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
        model = trained(inputs[known], labels[known], seed, options.steps)
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
        trained(inputs[known], labels[known], seed, options.steps), (inputs, labels), known, inputs, options
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
