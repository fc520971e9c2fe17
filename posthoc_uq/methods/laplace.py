"""`Laplace`, the base of the methods that sum over the data, and its diagonal, Kronecker and dense forms.

Laplace's approximation is ``N(theta, (scale I + prior_precision)^-1)`` around the trained weights, with the Fisher
information ``I`` of the data as the precision (MacKay 1992, "A practical Bayesian framework for backpropagation
networks"). The methods differ in the form of ``I`` that they keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from posthoc_uq.core.batches import check_reusable
from posthoc_uq.core.devices import as_double, on_device
from posthoc_uq.core.distributed import gather, world
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.numerics import eigh_descending, nystrom
from posthoc_uq.core.options import Count
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.labels import FisherChoice
from posthoc_uq.curvature.statistics import (
    GradientFactors,
    GradientGram,
    InputGram,
    JointFisher,
    RotatedColumns,
    SketchedGradientFactors,
    SketchedGradientGram,
    SquaredGradients,
)
from posthoc_uq.curvature.sweep import SweepTotals
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Fisher, Likelihood
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task, Tensors, checked_finite, wrong_length
from posthoc_uq.posteriors.block import Block, NotContainedError, Weights, check_resolved, largest_of
from posthoc_uq.posteriors.history import NO_CHANGES
from posthoc_uq.posteriors.laplace import (
    LARGEST_BYTES,
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    FactorsOf,
    KroneckerBlock,
    WideEigenvalueCorrectedBlock,
    WideKroneckerBlock,
)
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence

Basis = tuple[Tensor, Tensor]
"""Orthonormal directions of a layer's inputs ``(G, n, a)`` and of its outputs ``(G, m, g)``."""

JOINT = "joint"
"""The name of the block that holds all layers."""


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """A Laplace posterior from sweeps over the data.

    A subclass gives what sums up the gradients of a layer (`accumulators`), and the block that comes of the sums
    (`block`). The fit, several processes, resuming, weights of samples and updates are written once, here and in
    `Task`.

    Attributes:
        fisher: labels ``"mc"`` drawn from the model's predictive, ``"exact"`` expectation over them, ``"empirical"``
            targets, or ``"auto"``: exact where outputs and samples are few, else drawn, up to three a sample;
            targets for a likelihood of your own that has neither. The report says what was used.
        n_samples: labels drawn per sample with ``fisher="mc"``; more than 1 with ``"auto"`` draws as many.
    """

    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "prior_precision", "noise_scale", "temperature"})
    weighs_samples: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    """Whether one block holds all layers."""
    description: ClassVar[str] = "curvature"
    """What the sweep is for, in progress bars, reports and errors; a method with several sweeps names each."""

    fisher: FisherChoice = "auto"
    n_samples: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_samples > 1 and self.fisher not in ("auto", "mc"):
            raise PosthocUQError(
                f"n_samples is the number of labels drawn with fisher='mc', and with fisher={self.fisher!r} none are; "
                f"leave it out."
            )

    def passes(self) -> int:
        return 1

    def find_bases(self, task: Task) -> dict[str, Basis]:
        """The basis in which each layer's sums are taken, by an earlier pass over the data; or empty."""
        return {}

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        """What sums up a layer's activations and output gradients in the sweep over all data; see `Accumulator`.

        Args:
            layer: its names and shapes.
            task: the fit.
            basis: from `find_bases`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs accumulators and block, or blocks.")

    def block(self, layer: Layer, sums: Sequence[Any], samples: float, basis: Basis | None) -> Block:
        """A layer's block.

        Args:
            layer: its names and shapes.
            sums: its accumulators after the sweep.
            samples: the sum of the weights of all samples, by which sums are divided.
            basis: from `find_bases`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs accumulators and block, or blocks.")

    def blocks(self, task: Task) -> dict[str, Block]:
        """The form of the Fisher's mean over the samples that is kept: one block a layer, by the layer's name. A method
        with one block for all layers overrides it.
        """
        bases, factored = self.find_bases(task), task.factored
        sums, samples = self.sweep(task, bases)
        blocks, bar = dict[str, Block](), Progress("blocks", "layers", task.plan.progress, len(task.layers))
        with task.timed("blocks"), bar:
            for name, layer in task.layers.items():
                blocks[name] = (
                    self.block(layer, sums.pop(name), samples, bases.pop(name, None))
                    if name in factored
                    else DiagonalBlock(sums.pop(name)[0].diagonal(samples))
                )
                bar.advance()
        return blocks

    def sweep(self, task: Task, bases: Mapping[str, Basis]) -> tuple[dict[str, Sequence[Any]], float]:
        """The accumulators of every layer after a sweep over the data, and the sum of the samples' weights."""
        sums = {
            name: self.accumulators(layer, task, bases.get(name))
            if name in task.factored
            else [squares_of(layer, task)]
            for name, layer in task.layers.items()
        }
        return sums, task.sweep(sums, self.description)

    def describe_fit(self) -> dict[str, Any]:
        """Lines of the report on how the posterior was fitted, as plain values."""
        return {}

    def fit(self, task: Task) -> Posterior:
        task.take_labels(self.fisher, self.n_samples, self.joint)
        claimed = task.samples_in_all if self.fisher == "auto" else None
        blocks, summary = self.blocks(task), task.summary
        labels: tuple[Fisher, int] = task.fisher, task.n_samples
        if claimed is not None and task.length_was_wrong(summary.seen):
            task.samples_in_all = summary.seen
            task.take_labels(self.fisher, self.n_samples, self.joint)
            fisher, number = task.fisher, task.n_samples
            (task.fisher, task.n_samples), task.samples_in_all = labels, claimed
            if (fisher, number) != labels:
                wrong_length(
                    claimed,
                    summary.seen,
                    f"The labels of the Fisher were chosen by that; pass fisher={fisher!r}"
                    f"{f', n_samples={number}' if fisher == 'mc' else ''} for those of so many.",
                )
        checked_finite({name: block.tensors() for name, block in blocks.items()}, self.name)
        tracked = task.prepared.capture.tracked.values()
        served = sum(t.engine == "backpack" for t in tracked)
        weight = None if summary.weight == summary.samples else summary.weight  # each counted once
        facts: dict[str, Any] = {
            "fisher": task.fisher,
            "seed": task.plan.seed,
            "samples": summary.samples,
            **({} if weight is None else {"sum of the weights": weight}),
            "layers caught by BackPACK": served,
            "layers caught by call interception": len(tracked) - served,
            **{f"seconds, {what}": value for what, value in task.seconds.items()},
        }
        facts |= {"labels drawn per sample": task.n_samples} if task.fisher == "mc" else {}
        facts |= self.describe_fit()
        facts |= {"processes": world()} if world() > 1 else {}
        facts |= {"fisher chosen": "auto"} if self.fisher == "auto" else {}
        squared_residuals, targets = 0.0, 0
        if summary.log_likelihood is not None:
            squared_residuals, has_targets = task.likelihood.residual_sums(
                summary.log_likelihood, summary.targets or summary.weight, summary.outputs
            )
            targets = summary.samples * summary.outputs if has_targets else 0
        evidence = Evidence(
            summary.samples,
            summary.log_likelihood,
            squared_residuals,
            targets,
            noise_power=2 if task.fisher == "empirical" else 1,
            weight=weight,
            present=None if summary.targets is None else _present(summary.targets, summary),
        )
        members = {JOINT: list(task.layers)} if self.joint else None
        return task.posterior(self.name, blocks, evidence, facts, members=members)

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        """Means over the samples of a task, by block and name of the tensor, in the form and in the bases of the
        posterior's blocks, as `Block.combined` takes them. A method that defines it can `update`.

        Args:
            posterior: whose blocks they are to be added to.
            task: of the data that come in or go out, with the labels of the fit.
        """
        raise self.not_a_sum()

    def check_update(self, posterior: Posterior) -> None:
        if type(self).added is Laplace.added:
            raise self.not_a_sum()
        if posterior.history.fit.get("fisher") not in get_args(Fisher):
            raise PosthocUQError(
                "This posterior does not say which labels its Fisher was taken with (history.fit['fisher']), so that "
                "data cannot come in or go out; fit again."
            )

    def update(self, posterior: Posterior, task: Task, remove: bool) -> Posterior:
        """Only the scale follows the number of samples; where it was tuned, it keeps its ratio to that number."""
        facts, sign = posterior.history.fit, -1 if remove else 1
        task.fisher, task.n_samples = facts["fisher"], int(facts.get("labels drawn per sample", 1))
        part = self.added(posterior, task)
        before, summary = posterior.evidence.total, task.summary
        evidence = _combined_evidence(posterior.evidence, summary, posterior.likelihood, sign)
        weights = Weights.of(before, sign * summary.weight, _gradient_precision(posterior))
        blocks: dict[str, Block] = {}
        for name, block in posterior.blocks.items():
            device = next(iter(block.tensors().values())).device
            means = {key: on_device(tensor, device) for key, tensor in part[name].items()}
            if not remove:
                _check_resolved(posterior, name, means, weights)
            try:
                blocks[name] = block.combined(means, weights)
            except NotContainedError as error:
                raise NotContainedError(f"{error} of the Fisher of '{name}'") from None
        history = posterior.history
        if not remove:
            shares = _shares_outside(posterior.blocks, part)
            history = history.noted(changes=(history.changes or NO_CHANGES).changed(**shares))
        settings, after = posterior.settings, evidence.total
        scale = after if settings.scale == before else settings.scale * after / before
        return posterior.with_blocks(
            blocks, evidence=evidence, history=history, settings=replace(settings, scale=scale)
        )


def squares_of(
    layer: Layer, task: Task, bases: Basis | None = None, *, diagonal: bool = True
) -> SquaredGradients:
    """An accumulator of a layer's squared gradients, in the two bases if given."""
    return SquaredGradients(
        layer.matrix_shape,
        task.plan.dtype,
        task.device,
        task.plan.memory_budget,
        diagonal=diagonal,
        bases=bases,
    )


def kept_bases(posterior: Posterior, task: Task) -> dict[str, Basis]:
    """The bases that a posterior keeps of every layer, for a sweep of the task."""
    device, dtype = task.device, task.plan.dtype
    kept = {
        name: block.tensors()
        for name, block in posterior.blocks.items()
        if not isinstance(block, DiagonalBlock)
    }
    return {
        name: (tensors["input_basis"].to(device, dtype), tensors["output_basis"].to(device, dtype))
        for name, tensors in kept.items()
    }


# Updates

_GRAMS = ("input_gram", "output_gram")  # of KFAC, whose product is a Fisher
_SMALLEST_REST = 1e-9  # of the weight before: what is less is rounding


def _check_resolved(
    posterior: Posterior, name: str, means: Mapping[str, torch.Tensor], weights: Weights
) -> None:
    """See `check_resolved`. A Fisher is compared as a part of the precision, which has the prior's, too."""
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
        check_resolved(kept + prior, part, weights, precision, f"'{name}'")


def _gradient_precision(posterior: Posterior) -> float:
    """The relative precision of the model's gradients, in mixed precision if that is on."""
    formats = {parameter.dtype for parameter in posterior.original.values()}
    device = next(iter(posterior.original.values())).device.type
    formats |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max(torch.finfo(number_format).eps for number_format in formats)


def _combined_evidence(
    evidence: Evidence, summary: SweepTotals, likelihood: Likelihood, sign: int
) -> Evidence:
    """What the fit and a later sweep saw of the data, together (`sign` 1), or what is left of it (-1). Without labels
    on either side the log likelihood is unknown.

    Raises:
        NotContainedError: the sum of the squared residuals would be negative.
        PosthocUQError: no sample would be left.
    """
    samples, total = evidence.samples + sign * summary.samples, evidence.total + sign * summary.weight
    weight = None
    if evidence.weight is not None or summary.weight != summary.samples:
        # with weights a sample can go out in part, so that its number may be less than those that are left
        weight, samples = total, max(1, samples)
    if samples < 1 or total < _SMALLEST_REST * evidence.total:
        raise PosthocUQError(
            f"The posterior has {evidence.samples} samples and {summary.samples} are to go out, which leaves none."
        )
    if evidence.log_likelihood is None or summary.log_likelihood is None:
        return replace(
            evidence, samples=samples, log_likelihood=None, squared_residuals=0.0, targets=0, weight=weight
        )
    counts = summary.targets or summary.weight
    residuals, targets = likelihood.residual_sums(summary.log_likelihood, counts, summary.outputs)
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
        present=_combined_present(evidence, summary, sign),
    )


def _present(targets: Sequence[float], summary: SweepTotals) -> float | None:
    """The weighted number of targets that are there, of these by output; None where none is missing."""
    total = sum(targets)
    return None if total == summary.weight * summary.outputs else total


def _combined_present(evidence: Evidence, summary: SweepTotals, sign: int) -> float | None:
    """The same of what the fit and a later sweep saw together, or of what is left."""
    part = None if summary.targets is None else _present(summary.targets, summary)
    if evidence.present is None and part is None:
        return None
    return evidence.total_targets + sign * (summary.weight * summary.outputs if part is None else part)


def _shares_outside(blocks: Mapping[str, Block], part: Tensors) -> dict[str, float]:
    """The shares of two Fishers that are outside of the kept bases, of all layers together: of the new data, and of
    what was kept before, as far as it is known; nothing for blocks that keep all of it.
    """
    shares: dict[str, float] = {}
    for name, statistics in (
        ("outside", part),
        ("outside_before", {name: block.tensors() for name, block in blocks.items()}),
    ):
        covered = [blocks[block].trace_in_basis(statistics[block]) for block in blocks]
        known = [of_block for of_block in covered if of_block is not None]
        whole = sum(total for _, total in known)
        if known and whole > 0:
            shares[name] = min(1.0, max(0.0, 1 - sum(inside for inside, _ in known) / whole))
    return shares


# The methods


@dataclass(frozen=True, kw_only=True)
class Diagonal(Laplace):
    """The diagonal of the Fisher: independent weights.

    ``I ~ diag(E[g^2])``, with ``g`` a sample's gradient of its negative log-likelihood (Becker, LeCun 1988, "Improving
    the convergence of back-propagation learning with second order methods").

    The smallest posterior, one number a weight, in one sweep. It ignores how weights compensate each other, so take it
    where memory decides and the last layer alone would be too little.

    Example:
        ```python
        posterior = uq.fit(model, train_loader, uq.Diagonal())
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.probs, prediction.epistemic_variance)
        ```
    """

    name: ClassVar[str] = "diag"
    block_kinds: ClassVar[tuple[str, ...]] = ("diagonal",)
    description: ClassVar[str] = "diagonal"

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        return [squares_of(layer, task)]

    def block(self, layer: Layer, sums: Sequence[Any], samples: float, basis: Basis | None) -> Block:
        return DiagonalBlock(sums[0].diagonal(samples))

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        sums, samples = self.sweep(task, {})
        return {name: {"diagonal": squares.diagonal(samples)} for name, (squares,) in sums.items()}


@dataclass(frozen=True, kw_only=True)
class KFAC(Laplace):
    """Kronecker factors of every layer.

    ``I ~ E[a a^T] (x) E[g g^T]`` of inputs ``a`` and output gradients ``g``
    (Martens, Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate curvature"; as a posterior:
    Ritter, Botev, Barber 2018, "A scalable Laplace approximation for neural networks"). Where a sample gives a layer
    several inputs (pixels, tokens, steps), ``I ~ E[G^T G] (x) E[G G^T] / tr`` of its whole gradient ``G``, with the
    Fisher's own trace (Gupta, Koren, Singer 2018, "Shampoo").

    One sweep; keeps the eigenvectors and eigenvalues of both factors of every layer. The most common choice elsewhere,
    so the one to take for a comparison.

    Attributes:
        keep_grams: keep both Grams of every layer as well, in the file too, so that data can come in and go out later
            (`posthoc_uq.update`); it doubles the size.

    Example:
        ```python
        posterior = uq.fit(model, train_loader, uq.KFAC())
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.probs, prediction.epistemic_variance)
        ```
    """

    name: ClassVar[str] = "kfac"
    block_kinds: ClassVar[tuple[str, ...]] = ("kfac", "kfac_wide", "diagonal")

    keep_grams: bool = False

    def blocks(self, task: Task) -> dict[str, Block]:
        forms = _forms(task)
        sums, diagonals, samples = _sweep_for_factors(task, forms, wide=not self.keep_grams)
        _with_later_positions(task, forms, sums, samples, wide=not self.keep_grams)
        factors = _decomposed(task, sums, samples, self.keep_grams)

        def block(name: str) -> Block:
            if name not in factors:
                return DiagonalBlock(**diagonals[name])
            if "output_rest" in factors[name]:
                return WideKroneckerBlock(**factors[name])
            return KroneckerBlock(**factors[name], factors_of=forms[name])

        return {name: block(name) for name in task.layers}

    def check_update(self, posterior: Posterior) -> None:
        super().check_update(posterior)
        if any(
            isinstance(block, WideKroneckerBlock)
            or (isinstance(block, KroneckerBlock) and block.input_gram is None)
            for block in posterior.blocks.values()
        ):
            raise PosthocUQError(
                "This posterior keeps the eigenvectors of its Grams alone, so that data cannot come in or go out; fit "
                "with uq.KFAC(keep_grams=True), or by another method."
            )

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        forms: dict[str, FactorsOf] = {}
        for name, layer in task.factored.items():
            block = posterior.blocks[name]
            kept = block.factors_of if isinstance(block, KroneckerBlock) else "rows"
            # older files do not say it of these layers
            forms[name] = "gradients" if layer.rule.by_gradients else kept
        sums, diagonals, samples = _sweep_for_factors(task, forms)
        means = {name: _means(of_layer, samples) for name, of_layer in sums.items()}
        for name in (name for name, form in forms.items() if form == "gradients"):
            means[name]["of_gradients"] = torch.ones((), device="cpu")
        return means | diagonals


Factors = (
    tuple[InputGram, GradientGram | SketchedGradientGram]
    | tuple[GradientFactors]
    | tuple[SketchedGradientFactors]
)

WIDE = 1024
"""Outputs of a layer above which the leading `_KEPT` directions of them are kept, and no Gram is formed."""
_WIDE_AT_POSITIONS = (
    4096  # the same of layers with positions: gradients of tokens have ranks enough to fill a Gram
)
_KEPT, _OVERSAMPLING = 256, 16  # where samples have no more ranks than these, nothing is left out


def _forms(task: Task) -> dict[str, FactorsOf]:
    """What the factors of each layer are of, the same in all processes.

    Where a sample gives a layer one row, ``G = g a^T``, and both forms are near the Fisher. Where it gives several,
    products of single rows know nothing of how they add up: their trace was 0.05 of the Fisher's before an average over
    positions, 1.3 times it before a flattened map.
    """
    tracked = task.prepared.capture.tracked
    several = {
        name for name, layer in task.factored.items() if layer.rule.by_gradients or tracked[name].several
    }
    several = set[str]().union(*gather(several, "looking for layers with positions"))
    return {name: "gradients" if name in several else "rows" for name in task.factored}


def _sweep_for_factors(
    task: Task, forms: Mapping[str, FactorsOf], wide: bool = False
) -> tuple[dict[str, Factors], Tensors, float]:
    """After one sweep the factors of every layer that can have some, the diagonal of the others, and the sum of the
    samples' weights; with `wide`, of layers of very many outputs by a sketch.
    """
    sums = _factors_of(task, forms, wide)
    squares = {name: squares_of(layer, task) for name, layer in task.layers.items() if name not in sums}
    samples = task.sweep({**sums, **{name: [one] for name, one in squares.items()}}, "Kronecker factors")
    return sums, {name: {"diagonal": one.diagonal(samples)} for name, one in squares.items()}, samples


def _with_later_positions(
    task: Task, forms: dict[str, FactorsOf], sums: dict[str, Factors], samples: float, wide: bool
) -> None:
    """Sum the factors of layers again that had one row a sample in the first batch, by which their form was chosen, and
    several in a later one, as sequences of other lengths give them. Changes `forms` and `sums`.
    """
    gradients = {name: of_layer[-1] for name, of_layer in sums.items()}
    later = {
        name
        for name, gram in gradients.items()
        if isinstance(gram, GradientGram | SketchedGradientGram) and float(gram.positions(samples)) > 1 + 1e-9
    }
    if later:
        check_reusable(task.loader, 2)
        forms |= dict.fromkeys(later, "gradients")
        sums |= {name: factors for name, factors in _factors_of(task, forms, wide).items() if name in later}
        task.sweep({name: sums[name] for name in later}, "Kronecker factors, again")


def _factors_of(task: Task, forms: Mapping[str, FactorsOf], wide: bool = False) -> dict[str, Factors]:
    """Accumulators of the factors of these layers."""
    found: dict[str, Factors] = {}
    dtype, device, budget = task.plan.dtype, task.device, task.plan.memory_budget
    for number, (name, layer) in enumerate(task.factored.items()):
        if name not in forms:
            continue
        groups, outputs, inputs = layer.matrix_shape
        of_gradients, normals = forms[name] == "gradients", None
        if wide and outputs > (_WIDE_AT_POSITIONS if of_gradients else WIDE):
            generator = torch.Generator().manual_seed(mixed_seed(task.plan.seed, number))
            width = _KEPT + _OVERSAMPLING
            normals = torch.randn(groups, outputs, width, generator=generator, dtype=dtype, device="cpu")
            normals = normals.to(device)
        if of_gradients and normals is not None:
            found[name] = (SketchedGradientFactors(inputs, normals, budget),)
        elif of_gradients:
            found[name] = (GradientFactors(layer.matrix_shape, dtype, device, budget),)
        else:
            of_outputs = (
                GradientGram(groups, outputs, dtype, device, budget)
                if normals is None
                else SketchedGradientGram(normals, budget)
            )
            found[name] = InputGram(groups, inputs, dtype, device, budget), of_outputs
    return found


def _means(factors: Factors, samples: float) -> dict[str, Tensor]:
    """Both Grams of a layer, and by how many the second was divided for each sample."""
    inputs, outputs = factors[0], factors[-1]
    if isinstance(outputs, GradientFactors):
        means = outputs.means(samples)
        return {**means, "positions": means["positions"].to(means["input_gram"])}
    # what is added up later is whole
    assert isinstance(inputs, InputGram) and isinstance(outputs, GradientGram)
    grams = {"input_gram": inputs.mean(samples), "output_gram": outputs.mean(samples)}
    return {**grams, "positions": outputs.positions(samples).to(grams["input_gram"])}


def _decomposed(task: Task, sums: dict[str, Factors], samples: float, keep_grams: bool = False) -> Tensors:
    """Eigenvectors and eigenvalues of both Grams; the Grams as well if they are to be kept. Empties `sums`."""

    def decompose(name: str) -> dict[str, Tensor]:
        factors = sums.pop(name)
        inputs, outputs = factors[0], factors[-1]
        if isinstance(outputs, SketchedGradientFactors):
            gram, sketch, trace = outputs.means(samples)
            return _of_wide(gram, outputs.rank, sketch, outputs.test_matrix, trace)
        if isinstance(outputs, SketchedGradientGram):
            assert isinstance(inputs, InputGram)
            sketch, trace = outputs.mean(samples), outputs.trace(samples)
            return _of_wide(inputs.mean(samples), inputs.rows, sketch, outputs.test_matrix, trace)
        means = _means(factors, samples)
        if isinstance(outputs, GradientFactors):
            input_rows = output_rows = outputs.rank
        else:
            assert isinstance(inputs, InputGram)
            input_rows, output_rows = inputs.rows, outputs.rows
        input_values, input_basis = eigh_descending(means["input_gram"], input_rows)
        output_values, output_basis = eigh_descending(means["output_gram"], output_rows)
        return {
            **(means if keep_grams else {}),
            "input_basis": input_basis,
            "output_basis": output_basis,
            "input_eigenvalues": input_values,
            "output_eigenvalues": output_values,
        }

    return task.distribute({name: partial(decompose, name) for name in list(sums)}, "eigenbases")


def _of_wide(
    gram: Tensor, rows: int, sketch: Tensor, test_matrix: Tensor, trace: Tensor
) -> dict[str, Tensor]:
    """The same of a layer with very many outputs, see `WideKroneckerBlock`, from the Gram of its inputs, a sum over so
    many rows, and the sketch and the trace of the other one.
    """
    input_values, input_basis = eigh_descending(gram, rows)
    values, basis = (found[..., :_KEPT] for found in nystrom(sketch, test_matrix))
    rounding = torch.finfo(values.dtype).eps * values.shape[-1] ** 0.5
    values = values.masked_fill(values < rounding * values[..., :1], 0.0)
    left = trace - values.to(trace).sum(-1)
    left = left.masked_fill(left < rounding * trace, 0.0) / (basis.shape[-2] - basis.shape[-1])
    return {
        "input_basis": input_basis,
        "output_basis": basis.contiguous(),
        "input_eigenvalues": input_values,
        "output_eigenvalues": values,
        "output_rest": left.to(values),
    }


@dataclass(frozen=True, kw_only=True)
class EFB(Laplace):
    """The eigenvectors of the Kronecker factors with corrected eigenvalues.

    ``I ~ (U_A (x) U_G) Lambda (U_A (x) U_G)^T``, with ``Lambda`` the second moments of the gradients in that basis
    (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis").

    Two sweeps; nearer to the Fisher than `KFAC`, for one more number a weight.

    Example:
        ```python
        posterior = uq.fit(model, train_loader, uq.EFB())
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.probs, prediction.epistemic_variance)
        ```
    """

    name: ClassVar[str] = "efb"
    block_kinds: ClassVar[tuple[str, ...]] = ("efb", "efb_wide", "diagonal")
    description: ClassVar[str] = "eigenvalues"

    def passes(self) -> int:
        return 2

    def find_bases(self, task: Task) -> dict[str, Basis]:
        forms = _forms(task)
        sums = _factors_of(task, forms, wide=True)
        samples = task.sweep(sums, "Kronecker factors")
        _with_later_positions(task, forms, sums, samples, wide=True)
        factors = _decomposed(task, sums, samples)
        return {name: (sides["input_basis"], sides["output_basis"]) for name, sides in factors.items()}

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        assert basis is not None
        inputs, outputs = basis
        squares = squares_of(layer, task, basis, diagonal=False)
        whole = outputs.shape[-1] == outputs.shape[-2]
        return [squares] if whole else [squares, RotatedColumns(inputs, task.plan.memory_budget)]

    def block(self, layer: Layer, sums: Sequence[Any], samples: float, basis: Basis | None) -> Block:
        assert basis is not None
        if len(sums) == 1:
            return EigenvalueCorrectedBlock(*basis, sums[0].eigenvalues(samples))
        return WideEigenvalueCorrectedBlock(*basis, **_with_rest(sums, samples, basis[1]))

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        bases, forms = kept_bases(posterior, task), _forms(task)
        for name in list(forms):
            if isinstance(posterior.blocks[name], WideEigenvalueCorrectedBlock):
                del forms[name]  # it says itself what is outside of its basis
        factors = _factors_of(task, forms)
        sums: dict[str, list[Any]] = {
            name: [*self.accumulators(layer, task, bases[name]), *factors.get(name, ())]
            for name, layer in task.factored.items()
        }
        diagonals = {name: squares_of(layer, task) for name, layer in task.layers.items() if name not in sums}
        samples = task.sweep({**sums, **{name: [one] for name, one in diagonals.items()}}, self.description)
        found: Tensors = {name: {"diagonal": one.diagonal(samples)} for name, one in diagonals.items()}
        for name, of_layer in sums.items():
            if name not in factors:
                found[name] = _with_rest(of_layer, samples, bases[name][1])
                continue
            means, (inputs, outputs) = _means(factors[name], samples), bases[name]
            inside = _on_diagonal(means["input_gram"], inputs) * _on_diagonal(means["output_gram"], outputs)
            found[name] = {"eigenvalues": of_layer[0].eigenvalues(samples), "inside": inside}
        return found


_LEAST_REST = 1e-5  # of all second moments of an input direction: what is less is rounding in float32


def _with_rest(sums: Sequence[Any], samples: float, output_basis: Tensor) -> dict[str, Tensor]:
    """What `WideEigenvalueCorrectedBlock` keeps beside its bases."""
    squares, columns = sums
    eigenvalues, whole = squares.eigenvalues(samples), columns.mean(samples)
    left = whole - eigenvalues.sum(1)
    left = left.masked_fill(left < _LEAST_REST * whole, 0.0)
    _, outputs, kept = output_basis.shape
    return {"eigenvalues": eigenvalues, "rest": left / (outputs - kept)}


def _on_diagonal(gram: Tensor, basis: Tensor) -> Tensor:
    """The share of a Gram's squared Frobenius norm that is on its diagonal in an orthonormal basis; a scalar."""
    wide = as_double(basis)
    rotated = wide.transpose(-1, -2) @ as_double(gram) @ wide
    whole = rotated.square().sum()
    inside = rotated.diagonal(dim1=-2, dim2=-1).square().sum()
    return (inside / whole.clamp(min=1e-300)).clamp(max=1) if bool(whole > 0) else whole + 1


@dataclass(frozen=True, kw_only=True)
class Dense(Laplace):
    """The full Fisher of all chosen weights together.

    ``I = E[g g^T]``, with nothing left out (MacKay 1992).

    One sweep, and a number for every pair of weights: for small models and last layers, and as a reference for other
    methods.

    Example:
        ```python
        method = uq.Dense()
        posterior = uq.fit(model, train_loader, method, layers="last")
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.probs, prediction.epistemic_variance)
        ```
    """

    name: ClassVar[str] = "full"
    joint: ClassVar[bool] = True
    block_kinds: ClassVar[tuple[str, ...]] = ("dense",)

    def blocks(self, task: Task) -> dict[str, Block]:
        weights = sum(layer.parameters for layer in task.layers.values())
        if 8 * weights**2 > LARGEST_BYTES:
            raise PosthocUQError(
                f"method='full' needs a dense {weights} x {weights} matrix ({8 * weights**2 / 2**30:.0f} GiB); use "
                f"method='inf', or layers='last'."
            )
        return {JOINT: DenseBlock(_fisher(task)[JOINT]["fisher"])}

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        return _fisher(task)


def _fisher(task: Task) -> Tensors:
    """The Fisher of all layers together, in one sweep."""
    joint = JointFisher(sum(layer.parameters for layer in task.layers.values()), task.device)
    return {JOINT: {"fisher": joint.mean(task.sweep({}, "Fisher", joint=joint))}}
