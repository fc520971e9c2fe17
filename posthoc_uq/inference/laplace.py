"""Laplace posteriors: sweeps over the data give the Fisher in the form that each family keeps.

``diag`` and ``kfac`` and ``full`` take one sweep; ``efb`` and ``inf`` take two, the first for the bases, the
second for the eigenvalues and the exact diagonal in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from posthoc_uq.curvature.statistics import GradientGram, InputGram, JointFisher, SquaredGradients
from posthoc_uq.distributed import world
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.bases import sides
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.run import LaplaceOptions, Run
from posthoc_uq.inference.sparsify import kept_entries, sparsify
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.dense import LARGEST_BYTES, DenseBlock
from posthoc_uq.posteriors.diagonal import DiagonalBlock
from posthoc_uq.posteriors.information import InformationBlock
from posthoc_uq.posteriors.kronecker import EigenvalueCorrectedBlock, KroneckerBlock
from posthoc_uq.posteriors.numerics import eigh_descending
from posthoc_uq.posteriors.record import Evidence, Record

GRID_LIMIT = 2 * 2**30  # bytes that the small system of one layer may take


def fit_diagonal(run: Run) -> dict[str, Block]:
    """The exact diagonal of the Fisher, in one sweep."""

    def work() -> Tensors:
        squares = {name: _squares(layer, run) for name, layer in run.layers.items()}
        samples = run.sweep({name: [s] for name, s in squares.items()}, "diagonal")
        return {name: {"diagonal": s.diagonal(samples)} for name, s in squares.items()}

    return {name: DiagonalBlock(own["diagonal"]) for name, own in run.stage("diagonal", work).items()}


def _kronecker_factors(run: Run) -> Tensors:
    """Eigenvectors and eigenvalues of both Grams, in one sweep."""

    def work() -> Tensors:
        grams = {name: _grams(layer, run) for name, layer in run.layers.items()}
        samples = run.sweep({name: list(pair) for name, pair in grams.items()}, "Kronecker factors")

        def decompose(name: str) -> dict[str, Tensor]:
            inputs, outputs = grams.pop(name)
            input_values, input_basis = eigh_descending(inputs.mean(samples))
            output_values, output_basis = eigh_descending(outputs.mean(samples))
            return {
                "input_basis": input_basis,
                "output_basis": output_basis,
                "input_values": input_values,
                "output_values": output_values,
            }

        return run.divided({name: partial(decompose, name) for name in run.layers}, "eigenbases")

    return run.stage("Kronecker factors", work)


def fit_kfac(run: Run) -> dict[str, Block]:
    """Both Grams and their eigendecompositions, in one sweep."""
    return {name: KroneckerBlock(**own) for name, own in _kronecker_factors(run).items()}


def fit_efb(run: Run) -> dict[str, Block]:
    """The eigenvalue-corrected Kronecker basis, in two sweeps."""
    bases = {name: (own["input_basis"], own["output_basis"]) for name, own in _kronecker_factors(run).items()}

    def work() -> Tensors:
        squares = {
            name: _squares(layer, run, bases[name], diagonal=False) for name, layer in run.layers.items()
        }
        samples = run.sweep({name: [s] for name, s in squares.items()}, "eigenvalues")
        return {name: {"eigenvalues": s.eigenvalues(samples)} for name, s in squares.items()}

    moments = run.stage("eigenvalues", work)
    return {name: EigenvalueCorrectedBlock(*bases[name], own["eigenvalues"]) for name, own in moments.items()}


def fit_inf(run: Run) -> dict[str, Block]:
    """The sparse information form, in two sweeps."""

    def find_bases() -> Tensors:
        found = {name: sides(index, layer, run) for index, (name, layer) in enumerate(run.layers.items())}
        accumulators = {name: [side.accumulator for side in pair] for name, pair in found.items()}
        samples = run.sweep(accumulators, "bases", share=run.options.basis_fraction)
        del accumulators

        def basis(name: str) -> dict[str, Tensor]:
            inputs, outputs = found.pop(name)
            return {"inputs": inputs.basis(samples), "outputs": outputs.basis(samples)}

        return run.divided({name: partial(basis, name) for name in run.layers}, "eigenbases")

    bases = {name: (own["inputs"], own["outputs"]) for name, own in run.stage("bases", find_bases).items()}

    def find_moments() -> Tensors:
        squares = {name: _squares(layer, run, bases[name]) for name, layer in run.layers.items()}
        samples = run.sweep({name: [s] for name, s in squares.items()}, "eigenvalues and diagonal")
        return {
            name: {"eigenvalues": s.eigenvalues(samples), "diagonal": s.diagonal(samples)}
            for name, s in squares.items()
        }

    moments = run.stage("eigenvalues and diagonal", find_moments)

    def build() -> dict[str, Block]:
        return {
            name: _fitting_grid(name, bases.pop(name), **moments[name], options=run.options)
            for name in moments
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
    if 8 * parameters**2 > LARGEST_BYTES:
        raise PosthocUQError(
            f"method='full' needs a dense {parameters} x {parameters} matrix "
            f"({8 * parameters**2 / 2**30:.0f} GiB); "
            f"use method='inf', or layers='last'."
        )

    def work() -> Tensors:
        joint = JointFisher(parameters, run.settings.dtype, run.device)
        return {"joint": {"fisher": joint.mean(run.sweep({}, "Fisher", joint=joint))}}

    return {"joint": DenseBlock(run.stage("Fisher", work)["joint"]["fisher"])}


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
    fit |= {"labels drawn per sample": run.settings.n_samples} if run.settings.fisher == "mc" else {}
    if method == "inf":
        fit |= {"rank": run.options.rank, "basis": run.options.basis, "correction": run.options.correction}
        fit |= {"basis fraction": run.options.basis_fraction} if run.options.basis_fraction < 1 else {}
    if world() > 1:
        fit["processes"] = world()
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
    if summary.log_likelihood is not None:
        evidence.squared_residuals, evidence.targets = likelihood.residual_sums(
            summary.log_likelihood, summary.samples, summary.outputs
        )
    return evidence


def _squares(
    layer: Layer, run: Run, bases: tuple[Tensor, Tensor] | None = None, *, diagonal: bool = True
) -> SquaredGradients:
    budget = run.options.memory_budget
    return SquaredGradients(
        layer.matrix_shape, run.settings.dtype, run.device, budget, diagonal=diagonal, bases=bases
    )


def _grams(layer: Layer, run: Run) -> tuple[InputGram, GradientGram]:
    groups, outputs, inputs = layer.matrix_shape
    dtype, device, budget = run.settings.dtype, run.device, run.options.memory_budget
    return InputGram(groups, inputs, dtype, device, budget), GradientGram(
        groups, outputs, dtype, device, budget
    )
