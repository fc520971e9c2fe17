"""One pass over a loader, feeding accumulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Capture, Caught
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import Fisher, Gaussian, Likelihood
from posthoc_uq.loaders import Batch, BatchReader, batches
from posthoc_uq.posteriors.numerics import as_double
from posthoc_uq.randomness import sample_keys

KEYS_KEPT = 65536  # inputs whose hashes are remembered, to tell a data set of copies


@dataclass(frozen=True)
class SweepSettings:
    """What every sweep of a fit has in common."""

    reader: BatchReader
    likelihood: Likelihood
    fisher: Fisher = "mc"
    n_samples: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    progress: bool = False


@dataclass
class Summary:
    """What a sweep saw besides the statistics.

    Attributes:
        samples: samples swept over.
        log_likelihood: sum of ``log p(y | x)`` at the trained weights, or None where labels were missing.
        outputs: outputs of one sample.
        keys: hashes of the first inputs.
    """

    samples: int = 0
    log_likelihood: float | None = 0.0
    outputs: int = 0
    keys: set[int] = field(default_factory=lambda: set[int]())

    @property
    def repetitive(self) -> bool:
        """Whether most of the first inputs are copies of others, as far as they were looked at."""
        looked_at = min(self.samples, KEYS_KEPT)
        return looked_at >= 100 and 2 * len(self.keys) < looked_at


def sweep(
    capture: Capture,
    loader: Iterable[Any],
    settings: SweepSettings,
    accumulators: Mapping[str, Sequence[Accumulator]],
    *,
    joint: JointFisher | None = None,
    description: str = "",
) -> Summary:
    """Feed every accumulator of every layer with the whole loader.

    Args:
        accumulators: by layer name.
        joint: takes the per-sample gradients of all layers together.

    Raises:
        NonFiniteError: outputs or gradients are not finite; names the batch and the layer.
        PosthocUQError: labels do not fit the likelihood, or the loader is empty.
    """
    summary = Summary()
    for index, batch in enumerate(
        batches(loader, settings.reader, progress=settings.progress, description=description)
    ):
        _sweep_batch(capture, batch, index, settings, accumulators, joint, summary)
    return summary


def _sweep_batch(
    capture: Capture,
    batch: Batch,
    index: int,
    settings: SweepSettings,
    accumulators: Mapping[str, Sequence[Accumulator]],
    joint: JointFisher | None,
    summary: Summary,
) -> None:
    likelihood, samples = settings.likelihood, count_samples(batch)
    recording = capture.run(batch, samples)
    outputs = recording.outputs.detach()
    _require_finite(outputs, f"Batch {index}: the model's outputs are not finite.")
    if outputs.shape[0] != samples:
        raise PosthocUQError(f"Batch {index}: {samples} inputs gave {outputs.shape[0]} outputs.")
    try:
        likelihood.check(outputs, batch.targets)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch {index}: {error}") from None
    keys = sample_keys(batch.tensors(), samples, settings.seed)
    if summary.samples < KEYS_KEPT:
        summary.keys.update(keys[: KEYS_KEPT - summary.samples].tolist())
    gradients = list(likelihood.gradients(outputs, batch.targets, keys, settings.fisher, settings.n_samples))
    for number, gradient in enumerate(gradients):
        rows: dict[str, Tensor] = {}
        sink = _feed(accumulators, settings.dtype, index, number == 0, rows if joint is not None else None)
        recording.pull_back(gradient, sink, last=number == len(gradients) - 1)
        if joint is not None:
            joint.add_rows(_side_by_side(capture, rows, samples))
    summary.samples += samples
    summary.outputs = outputs[0].numel()
    if batch.targets is None or summary.log_likelihood is None:
        summary.log_likelihood = None
    else:
        summary.log_likelihood += float(as_double(likelihood.log_prob(outputs, batch.targets)).sum())


def _feed(
    accumulators: Mapping[str, Sequence[Accumulator]],
    dtype: torch.dtype,
    index: int,
    first_pass: bool,
    rows: dict[str, Tensor] | None,
) -> Callable[[Caught], None]:
    def sink(caught: Caught) -> None:
        name = caught.layer.name
        activations, gradients = caught.matrices(dtype)
        _require_finite(
            activations.sum() + gradients.sum(),
            f"Batch {index}: layer '{name}' has non-finite activations or gradients.",
        )
        for accumulator in accumulators.get(name, ()):
            accumulator.add(activations, gradients, first_pass)
        if rows is not None:
            rows[name] = torch.einsum("sgto,sgti->sgoi", gradients, activations).flatten(1)

    return sink


def _side_by_side(capture: Capture, rows: dict[str, Tensor], samples: int) -> Tensor:
    columns: list[Tensor] = []
    reference = next(iter(rows.values()))
    for name, tracked in capture.tracked.items():
        columns.append(rows[name] if name in rows else reference.new_zeros(samples, tracked.layer.parameters))
    return torch.cat(columns, dim=1)


def _require_finite(values: Tensor, message: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError(message + " Check the input data and the model's weights for NaN or infinity.")


def residual_variance(capture: Capture, loader: Iterable[Any], settings: SweepSettings) -> Tensor | None:
    """Mean squared residual of each output, ``(outputs,)``, from a forward pass over the data; None without
    labels.

    Raises:
        PosthocUQError: the targets do not fit the outputs, or the model fits them without any error.
    """
    total: Tensor | None = None
    samples = 0
    unit = Gaussian(1.0)
    reader = settings.reader
    with torch.no_grad():
        for batch in batches(loader, reader, progress=settings.progress, description="noise"):
            if batch.targets is None:
                return None
            outputs = batch.call(capture.twin)
            unit.check(outputs, batch.targets)
            residuals = as_double(unit.residuals(outputs, batch.targets))
            squares = residuals.square().reshape(outputs.shape[0], -1).sum(0).cpu()
            total = squares if total is None else total + squares
            samples += outputs.shape[0]
    if total is None:
        return None
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError(
            "The residuals of the training data are not finite; check the data and the model's weights."
        )
    if not bool((total > 0).all()):
        raise PosthocUQError(
            "The model reproduces its training targets without error; give noise_variance=... yourself."
        )
    return total / samples
