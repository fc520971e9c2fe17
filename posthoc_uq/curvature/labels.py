"""Which labels the expectation of the Fisher takes with ``fisher="auto"``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader

from posthoc_uq.core.batches import Batch, BatchReader, Readings, count_samples, known_length
from posthoc_uq.core.distributed import gather, own_samples, sampler_of
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods import Fisher, Likelihood

FisherChoice = Literal["auto", "mc", "exact", "empirical"]

# The measurements behind these numbers are in docs/methods/hyperparameters.md, "What the labels cost, and buy".
EXACT_OUTPUTS = 10
"""Up to so many outputs the expectation is exact: as many drawn labels cost the same and are worse."""

LABELS_IN_ALL = 50_000
"""Drawn labels of a whole data set; more of them gain less than 0.01 nats."""

FAITHFUL_OUTPUTS = 3
"""Up to so many outputs the expectation is exact where the prior is found by predictions. These lose nothing by one
drawn label, which costs less than the exact expectation over more outputs."""

FEWEST_DRAWS = 32
"""Drawn labels of a single sample, such as one graph with labelled nodes, of which one gradient would be all there is:
the squares of so many have a relative error of a quarter."""

MAX_LABELS = 3
"""Drawn labels a sample at most: they make a fit half as long again and gain nearly half of what exact ones gain."""


def resolve_fisher(
    fisher: FisherChoice,
    n_samples: int,
    outputs: int,
    samples: int | None,
    likelihood: Likelihood | None = None,
    has_targets: bool = False,
    positions: int = 1,
    for_evidence: bool = True,
) -> tuple[Fisher, int]:
    """The kind of labels that the expectation is over, and how many are drawn for each sample.

    ``"auto"`` with ``n_samples=1`` is exact for up to `EXACT_OUTPUTS` outputs and fewer than `LABELS_IN_ALL`
    samples, and for one or two outputs in any case. Elsewhere it draws as many labels a sample as make `LABELS_IN_ALL`
    over the data, from 1 to `MAX_LABELS`. A fit that does not ask for the evidence is exact for up to
    `FAITHFUL_OUTPUTS`, and elsewhere draws one label a sample. Of a single sample `FEWEST_DRAWS` are drawn. With
    ``n_samples`` above one it draws so many. Where a likelihood defines only one of the two kinds, it takes that one;
    where it defines neither, the targets (``"empirical"``).

    Args:
        fisher: the kind of labels, or ``"auto"``.
        n_samples: labels drawn per sample.
        outputs: of the model for one sample.
        samples: in all processes, or None where that is unknown; they then count as few.
        likelihood: of the targets; None for one that defines both kinds.
        has_targets: whether the loader yields targets.
        positions: of a sample that have a label each and count as samples of their own.
        for_evidence: whether the evidence will be asked for, which many labels make better.

    Raises:
        PosthocUQError: the likelihood does not define the labels that are asked for.
    """
    exact, drawn = (likelihood is None or likelihood.defines(method) for method in ("exact_factors", "draw"))
    possible = {"exact": exact, "mc": drawn, "empirical": True, "auto": exact or drawn or has_targets}
    if likelihood is not None and not possible[fisher]:
        raise _undefined_labels(fisher, likelihood, drawn if fisher == "exact" else exact)
    if fisher != "auto":
        return fisher, n_samples
    if not exact and not drawn:
        return "empirical", 1
    if not drawn:
        return "exact", 1
    if n_samples > 1:
        return "mc", n_samples
    few = samples is None or samples < LABELS_IN_ALL
    most = EXACT_OUTPUTS if for_evidence else FAITHFUL_OUTPUTS
    if exact and (outputs <= 2 or (few and outputs <= most)):
        return "exact", 1
    known = 1 if samples is None else max(1, samples)
    least = FEWEST_DRAWS if samples == 1 else 1
    if not for_evidence:
        return "mc", least
    return "mc", max(least, min(ceil(MAX_LABELS / positions), ceil(LABELS_IN_ALL / (known * positions))))


def _undefined_labels(fisher: str, likelihood: Likelihood, has_other: bool) -> PosthocUQError:
    """The error for labels that a likelihood does not define."""
    if fisher == "auto":
        return PosthocUQError(
            f"Likelihood {likelihood.name!r} gives no labels for the Fisher, and the loader yields no targets; pass a "
            f"loader of (inputs, targets), which fisher='empirical' takes, or give it a method draw(outputs, keys, "
            f"draw)."
        )
    other = {"exact": "mc", "mc": "exact"}[fisher]
    method = {"exact": "exact_factors(outputs)", "mc": "draw(outputs, keys, draw)"}[fisher]
    return PosthocUQError(
        f"Likelihood {likelihood.name!r} has no method {method}, which fisher={fisher!r} needs; give it one, or take "
        f"{f'fisher={other!r} or ' if has_other else ''}fisher='empirical', which needs targets."
    )


def samples_in_all(samples: int | None) -> int | None:
    """The sum of a number of samples over the processes; None where one of them is unknown."""
    counts = cast("list[int | None]", gather(samples, "counting the samples"))
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def own_samples_of(loader: Iterable[Any], reader: BatchReader, first: Batch) -> int | None:
    """How many samples the loader of this process holds, before it is read; None where that is unknown.

    A sampler has a length, the batches of a list are counted, and every batch of other loaders with a length counts as
    large as the first.
    """
    loader = loader.loader if isinstance(loader, Readings) else loader
    from_sampler = own_samples(loader)
    if from_sampler is not None:
        return from_sampler
    if isinstance(loader, (list, tuple)):
        shapes = replace(reader, device=torch.device("meta"))  # nothing is copied
        read = (batch for raw in cast("list[Any]", loader) for batch in shapes.read_all(raw))
        return sum(count_samples(batch) for batch in read if batch.rows != 0)
    already_batched = isinstance(loader, DataLoader) and loader.batch_sampler is None
    items = 0 if already_batched else known_length(sampler_of(loader))
    if items:
        return items
    batches = known_length(loader)
    return batches * count_samples(first) if batches and not first.whole else None
