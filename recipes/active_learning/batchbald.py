"""BatchBALD (Kirsch, van Amersfoort, Gal, 2019): which batch of inputs to label next.

A batch is good where its labels tell most of the function together: inputs that would tell the same count once.

    python -m recipes.active_learning.batchbald            eight batches of six labels, seconds
    python -m recipes.active_learning.batchbald --smoke    two batches
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import posthoc_uq as uq
from recipes.active_learning.parts import batch_picture, save_picture, spirals, trained_classifier
from recipes.common import parsed, parser

MOST = 500  # combinations of labels that are kept; of more a sample is drawn
START, SIZE = 12, 6  # labels at first, and of a batch


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parsed(parser(__doc__, "batchbald", "two batches"), arguments)
    inputs, labels = spirals(600, seed=0)
    test, truth = spirals(2000, seed=1000)
    known, batch = list(range(START)), list[int]()
    for _ in range(2 if options.smoke else 8):
        model = trained_classifier(inputs[known], labels[known])
        posterior = uq.fit(model, [(inputs[known], labels[known])], progress=False)
        free = [each for each in range(len(labels)) if each not in known]
        probs = uq.wrap(model, posterior).predictive_samples(inputs[free], n_samples=100)
        batch = [free[place] for place in batchbald(probs, SIZE)]
        accuracy = (model(test).argmax(1) == truth).double().mean()
        print(f"{len(known)} labels: accuracy {accuracy:.3f}; label next {batch}")
        known += batch
    save_picture(batch_picture(inputs, labels, known, batch), options)


if __name__ == "__main__":
    main()
