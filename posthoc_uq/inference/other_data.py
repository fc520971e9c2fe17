"""A Laplace posterior with the statistics of other data added up, or taken out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from posthoc_uq.curvature.sweep import Summary
from posthoc_uq.devices import placed
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block, largest_of
from posthoc_uq.posteriors.combining import NotContainedError, Weights, check_forgettable
from posthoc_uq.posteriors.history import Evidence

_GRAMS = ("input_gram", "output_gram")  # of KFAC, whose product is a Fisher
_LEAST = 1e-9  # of the weight before: what is less, is rounding


def combined_posterior(posterior: Posterior, part: Tensors, summary: Summary, sign: int) -> Posterior:
    """A posterior of the same layers and hyperparameters with other data. Only the scale follows the number of samples;
    where it was tuned, it keeps its ratio to that number.

    Args:
        posterior: stays as it is.
        part: means over the other data, by block and name.
        summary: of the sweep over these data.
        sign: 1 where they come in, -1 where they go out.

    Raises:
        NotContainedError: the data cannot all be among those of the posterior; names the layer.
        PosthocUQError: no sample would be left, or what is known would be lost beside the new data.
    """
    before, change = posterior.evidence.total, sign * summary.weight
    evidence = combined_evidence(posterior.evidence, summary, posterior.likelihood, sign)
    weights = Weights.of(before, change, _precision(posterior))
    blocks: dict[str, Block] = {}
    for name, block in posterior.blocks.items():
        device = next(iter(block.tensors().values())).device
        means = {key: placed(tensor, device) for key, tensor in part[name].items()}
        if sign > 0:
            _check_forgettable(posterior, name, means, weights)
        try:
            blocks[name] = block.combined(means, weights)
        except NotContainedError as error:
            raise NotContainedError(f"{error} of the Fisher of '{name}'") from None
    history = replace(posterior.history, changes=dict(posterior.history.changes))
    history.changes |= _outside(posterior.blocks, part) if sign > 0 else {}
    settings, after = posterior.settings, evidence.total
    scale = after if settings.scale == before else settings.scale * after / before
    return Posterior(
        posterior.method,
        posterior.layers,
        blocks,
        posterior.members,
        posterior.original,
        posterior.likelihood,
        evidence,
        history,
        centre=posterior.centre,
        settings=replace(settings, scale=scale),
    )


def _check_forgettable(
    posterior: Posterior, name: str, means: Mapping[str, torch.Tensor], weights: Weights
) -> None:
    """See `check_forgettable`. A Fisher is compared as a part of the precision, which has the prior's, too."""
    settings, tensors = posterior.settings, posterior.blocks[name].tensors()
    prior = min(settings.layer_prior(layer) for layer in posterior.members[name]) / settings.scale
    sizes = {
        key: (largest_of(tensors[key]), largest_of(part), torch.finfo(tensors[key].dtype).eps)
        for key, part in means.items()
        if key in tensors and tensors[key].numel()
    }
    grams = [sizes.pop(key) for key in _GRAMS if key in sizes]
    if grams:  # the Fisher is their product
        kept, part, precision = zip(*grams, strict=True)
        sizes["Fisher"] = prod(kept), prod(part), max(precision)
    for kept, part, precision in sizes.values():
        check_forgettable(kept + prior, part, weights, precision, f"'{name}'")


def _precision(posterior: Posterior) -> float:
    """The relative precision of the model's gradients, in mixed precision if that is on."""
    formats = {parameter.dtype for parameter in posterior.original.values()}
    device = next(iter(posterior.original.values())).device.type
    formats |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max(torch.finfo(number_format).eps for number_format in formats)


def weight_of(summary: Summary) -> float | None:
    """The sum of the weights of a sweep's samples; None where each counted once."""
    return None if summary.weight == summary.samples else summary.weight


def combined_evidence(evidence: Evidence, summary: Summary, likelihood: Likelihood, sign: int) -> Evidence:
    """What the fit and a later sweep saw of the data, together, or what is left of it. Without labels on either side
    the log likelihood is unknown.

    Raises:
        NotContainedError: the sum of the squared residuals would be negative.
        PosthocUQError: no sample would be left.
    """
    samples, total = evidence.samples + sign * summary.samples, evidence.total + sign * summary.weight
    weight = None
    if evidence.weight is not None or weight_of(summary) is not None:
        # with weights a sample can go out in part, so that its number may be less than those that are left
        weight, samples = total, max(1, samples)
    if samples < 1 or total < _LEAST * evidence.total:
        raise PosthocUQError(
            f"The posterior has {evidence.samples} samples and {summary.samples} are to go out, which leaves none; the "
            f"posterior stays as it is."
        )
    if evidence.log_likelihood is None or summary.log_likelihood is None:
        return replace(
            evidence, samples=samples, log_likelihood=None, squared_residuals=0.0, targets=0, weight=weight
        )
    residuals, targets = likelihood.residual_sums(summary.log_likelihood, summary.weight, summary.outputs)
    squared = evidence.squared_residuals + sign * residuals
    if squared < -1e-4 * evidence.squared_residuals:
        raise NotContainedError("sum of the squared residuals")
    return replace(
        evidence,
        samples=samples,
        log_likelihood=evidence.log_likelihood + sign * summary.log_likelihood,
        squared_residuals=max(0.0, squared),
        targets=samples * summary.outputs if targets else 0,
        weight=weight,
    )


def _outside(blocks: Mapping[str, Block], part: Tensors) -> dict[str, float]:
    """The shares of two Fishers that are outside of the kept bases, of all layers together: of the new data, and of
    what was kept before, as far as it is known; nothing for blocks that keep all of it.
    """
    shares: dict[str, float] = {}
    for name, statistics in (
        ("outside", part),
        ("outside before", {name: block.tensors() for name, block in blocks.items()}),
    ):
        covered = [blocks[block].covered(statistics[block]) for block in blocks]
        known = [of_block for of_block in covered if of_block is not None]
        whole = sum(total for _, total in known)
        if known and whole > 0:
            shares[name] = min(1.0, max(0.0, 1 - sum(inside for inside, _ in known) / whole))
    return shares
