"""Laplace posteriors: sweeps over the data give the Fisher in the form that each family keeps.

``diag`` and ``kfac`` and ``full`` take one sweep; ``efb`` and ``inf`` take two, the first for the bases, the
second for the eigenvalues and the exact diagonal in them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import Prepared
from posthoc_uq.curvature.statistics import (
    DEFAULT_BUDGET,
    Accumulator,
    GradientGram,
    InputGram,
    JointFisher,
    RangeSketch,
    SquaredGradients,
)
from posthoc_uq.curvature.sweep import Summary, SweepSettings, sweep
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.sparsify import kept_entries, sparsify
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.dense import DenseBlock
from posthoc_uq.posteriors.diagonal import DiagonalBlock
from posthoc_uq.posteriors.information import Correction, InformationBlock
from posthoc_uq.posteriors.kronecker import EigenvalueCorrectedBlock, KroneckerBlock
from posthoc_uq.posteriors.numerics import eigh_descending, nystrom
from posthoc_uq.posteriors.record import Evidence, Record
from posthoc_uq.randomness import isolated_random_state, mixed_seed

OVERSAMPLING = 10  # directions beyond those wanted (Halko, Martinsson, Tropp 2011)
SKETCH_FACTOR = 4  # with basis="auto", a side is sketched from this many times the sketch's width on
FULL_LIMIT = 4 * 2**30  # bytes that a dense posterior's float64 Fisher may take
GRID_LIMIT = 2 * 2**30  # bytes that the small system of one layer may take


@dataclass
class LaplaceOptions:
    """Options of the Laplace family; see `posthoc_uq.fit`."""

    rank: int | float = 100
    basis: str = "auto"
    correction: Correction = "rescale"
    memory_budget: int = DEFAULT_BUDGET


@dataclass
class Run:
    """One fit under way: how to sweep, and what the sweeps gave besides the statistics."""

    prepared: Prepared
    loader: Iterable[Any]
    settings: SweepSettings
    options: LaplaceOptions
    device: torch.device
    summary: Summary = field(default_factory=Summary)
    seconds: dict[str, float] = field(default_factory=lambda: dict[str, float]())

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers to fit."""
        return self.prepared.layers

    def sweep(
        self,
        accumulators: Mapping[str, list[Accumulator]],
        description: str,
        joint: JointFisher | None = None,
    ) -> int:
        """Sweep once; returns the number of samples.

        Raises:
            PosthocUQError: the loader gave another number of samples than in the sweep before.
        """
        start = time.perf_counter()
        with isolated_random_state(self.settings.seed):
            summary = sweep(
                self.prepared.capture,
                self.loader,
                self.settings,
                accumulators,
                joint=joint,
                description=description,
            )
        if self.summary.samples and summary.samples != self.summary.samples:
            raise PosthocUQError(
                f"The loader gave {self.summary.samples} samples in the first sweep and {summary.samples} in "
                f"the next; "
                f"it must give the same data every time."
            )
        if self.settings.fisher == "mc" and summary.repetitive and not self.summary.samples:
            warnings.warn(
                "Most inputs are copies of others. A label drawn with fisher='mc' belongs to its input, so that copies "
                "share one and the Fisher is noisier than the number of samples suggests; use fisher='exact'.",
                UserWarning,
                stacklevel=2,
            )
        self.summary = summary
        self.seconds[description] = time.perf_counter() - start
        return summary.samples

    def timed(self, description: str, work: Callable[[], dict[str, Block]]) -> dict[str, Block]:
        """Do the work and note how long it took."""
        start = time.perf_counter()
        result = work()
        self.seconds[description] = time.perf_counter() - start
        return result


def fit_diagonal(run: Run) -> dict[str, Block]:
    """The exact diagonal of the Fisher, in one sweep."""
    squares = {name: _squares(layer, run) for name, layer in run.layers.items()}
    samples = run.sweep({name: [s] for name, s in squares.items()}, "diagonal")
    return {name: DiagonalBlock(s.mean(samples)) for name, s in squares.items()}


def fit_kfac(run: Run) -> dict[str, Block]:
    """Both Grams and their eigendecompositions, in one sweep."""
    grams = {name: _grams(layer, run) for name, layer in run.layers.items()}
    samples = run.sweep({name: list(pair) for name, pair in grams.items()}, "Kronecker factors")

    def decompose() -> dict[str, Block]:
        blocks: dict[str, Block] = {}
        for name in list(grams):
            a_gram, g_gram = grams.pop(name)
            input_values, input_basis = eigh_descending(a_gram.mean(samples))
            output_values, output_basis = eigh_descending(g_gram.mean())
            blocks[name] = KroneckerBlock(input_basis, output_basis, input_values, output_values)
        return blocks

    return run.timed("eigenbases", decompose)


def fit_efb(run: Run) -> dict[str, Block]:
    """The eigenvalue-corrected Kronecker basis, in two sweeps."""
    bases = {
        name: (b.input_basis, b.output_basis)
        for name, b in fit_kfac(run).items()
        if isinstance(b, KroneckerBlock)
    }
    rotated = {name: _squares(layer, run, bases[name]) for name, layer in run.layers.items()}
    samples = run.sweep({name: [r] for name, r in rotated.items()}, "eigenvalues")
    return {name: EigenvalueCorrectedBlock(*bases[name], r.mean(samples)) for name, r in rotated.items()}


def fit_inf(run: Run) -> dict[str, Block]:
    """The sparse information form, in two sweeps."""
    sides = {name: _sides(index, layer, run) for index, (name, layer) in enumerate(run.layers.items())}
    samples = run.sweep({name: [s.accumulator for s in pair] for name, pair in sides.items()}, "bases")
    start = time.perf_counter()
    bases: dict[str, tuple[Tensor, Tensor]] = {}
    for name in list(sides):
        inputs, outputs = sides.pop(name)
        bases[name] = (inputs.basis(samples), outputs.basis(samples))
    run.seconds["eigenbases"] = time.perf_counter() - start
    rotated = {name: _squares(layer, run, bases[name]) for name, layer in run.layers.items()}
    squares = {name: _squares(layer, run) for name, layer in run.layers.items()}
    run.sweep({name: [rotated[name], squares[name]] for name in run.layers}, "eigenvalues and diagonal")

    def build() -> dict[str, Block]:
        return {
            name: _fitting_grid(
                name,
                bases.pop(name),
                rotated[name].mean(samples),
                squares.pop(name).mean(samples),
                run.options,
            )
            for name in run.layers
        }

    return run.timed("sparsification", build)


def _fitting_grid(
    name: str, bases: tuple[Tensor, Tensor], eigenvalues: Tensor, diagonal: Tensor, options: LaplaceOptions
) -> InformationBlock:
    """The sparsified layer, at half the rank as often as it takes for its small system to fit in memory."""
    rank = kept_entries(options.rank, (diagonal.shape[0], diagonal.shape[1], diagonal.shape[2]))
    asked = rank
    while True:
        block = sparsify(*bases, eigenvalues, diagonal, rank, options.correction)
        groups, width_g, width_a = block.eigenvalues.shape
        if 8 * groups * (width_g * width_a) ** 2 <= GRID_LIMIT:
            break
        rank = rank // 2
    if rank < asked:
        warnings.warn(
            f"Layer '{name}': rank {asked} selects a grid whose small system would take more than "
            f"{GRID_LIMIT / 2**30:.0f} GiB; rank {rank} is kept instead. Fit with a smaller rank.",
            UserWarning,
            stacklevel=2,
        )
    return block


def fit_full(run: Run) -> dict[str, Block]:
    """The dense Fisher over all layers, in one sweep.

    Raises:
        PosthocUQError: it would not fit in memory.
    """
    parameters = sum(layer.parameters for layer in run.layers.values())
    if 8 * parameters**2 > FULL_LIMIT:
        raise PosthocUQError(
            f"method='full' needs a dense {parameters} x {parameters} matrix "
            f"({8 * parameters**2 / 2**30:.0f} GiB); "
            f"use method='inf', or layers='last'."
        )
    joint = JointFisher(parameters, run.settings.dtype, run.device)
    samples = run.sweep({}, "Fisher", joint)
    return {"joint": DenseBlock(joint.mean(samples))}


FAMILIES: dict[str, tuple[Callable[[Run], dict[str, Block]], int]] = {
    "diag": (fit_diagonal, 1),
    "kfac": (fit_kfac, 1),
    "efb": (fit_efb, 2),
    "inf": (fit_inf, 2),
    "full": (fit_full, 1),
}


def laplace(method: str, run: Run, model: nn.Module) -> Posterior:
    """Run the sweeps of a method and return its posterior, with the prior precision still at 1."""
    family, _ = FAMILIES[method]
    blocks = family(run)
    members = {name: [name] for name in blocks} if method != "full" else {"joint": list(run.layers)}
    tracked = run.prepared.capture.tracked.values()
    served = sum(t.engine == "backpack" for t in tracked)
    fit: dict[str, Any] = {
        "fisher": run.settings.fisher,
        "seed": run.settings.seed,
        "samples": run.summary.samples,
        "layers caught by BackPACK": served,
        "layers caught by call interception": len(tracked) - served,
        **{f"seconds, {what}": value for what, value in run.seconds.items()},
    }
    if method == "inf":
        fit |= {"rank": run.options.rank, "basis": run.options.basis, "correction": run.options.correction}
    posterior = Posterior(
        method,
        run.layers,
        blocks,
        members,
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        run.settings.likelihood,
        _evidence(run),
        Record(fit=fit, deterministic=dict(run.prepared.deterministic)),
    )
    posterior.model = model
    return posterior


def _evidence(run: Run) -> Evidence:
    summary, likelihood = run.summary, run.settings.likelihood
    evidence = Evidence(summary.samples, summary.log_likelihood)
    evidence.noise_power = 2 if run.settings.fisher == "empirical" else 1
    if isinstance(likelihood, Gaussian) and summary.log_likelihood is not None:
        noise = likelihood.noise_variance.expand(summary.outputs)
        constant = float((noise.log() + log(2 * pi)).sum()) * summary.samples
        evidence.targets = summary.samples * summary.outputs
        # What is left of the log likelihood; rounding can leave a little less than nothing.
        evidence.squared_residuals = max(0.0, -2 * summary.log_likelihood - constant)
    return evidence


def _squares(layer: Layer, run: Run, bases: tuple[Tensor, Tensor] | None = None) -> SquaredGradients:
    return SquaredGradients(
        layer.matrix_shape, run.settings.dtype, run.device, bases, run.options.memory_budget
    )


def _grams(layer: Layer, run: Run) -> tuple[InputGram, GradientGram]:
    groups, outputs, inputs = layer.matrix_shape
    dtype, device = run.settings.dtype, run.device
    return InputGram(groups, inputs, dtype, device), GradientGram(groups, outputs, dtype, device)


@dataclass
class _Side:
    """One side of a layer: how its basis is found."""

    accumulator: InputGram | GradientGram | RangeSketch

    def basis(self, samples: int) -> Tensor:
        """Orthonormal leading directions ``(groups, size, width)``, and nothing more kept of the statistics."""
        if isinstance(self.accumulator, RangeSketch):
            return nystrom(self.accumulator.mean(samples), self.accumulator.test_matrix)[1]
        gram = (
            self.accumulator.mean()
            if isinstance(self.accumulator, GradientGram)
            else self.accumulator.mean(samples)
        )
        return eigh_descending(gram)[1]


def _sides(index: int, layer: Layer, run: Run) -> tuple[_Side, _Side]:
    """The input side and the output side of a layer; each exact or sketched by its own size."""
    groups, outputs, inputs = layer.matrix_shape
    wanted = kept_entries(run.options.rank, layer.matrix_shape) + OVERSAMPLING
    dtype, device = run.settings.dtype, run.device

    def sketch(side: str, size: int, word: int) -> _Side | None:
        width = min(size, wanted)
        if run.options.basis == "exact" or (run.options.basis == "auto" and size < SKETCH_FACTOR * width):
            return None
        generator = torch.Generator().manual_seed(mixed_seed(run.settings.seed, index, word))
        test_matrix = torch.randn(groups, size, width, generator=generator, dtype=dtype).to(device)
        return _Side(RangeSketch(side, test_matrix))

    a_gram, g_gram = (
        sketch("inputs", inputs, 0) or _Side(InputGram(groups, inputs, dtype, device)),
        sketch("outputs", outputs, 1) or _Side(GradientGram(groups, outputs, dtype, device)),
    )
    return a_gram, g_gram
