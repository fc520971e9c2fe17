"""Hyperparameters of a fitted posterior: by the log marginal likelihood, or by the likelihood of held-out
data.

Changing them re-factors small systems and never needs the training data again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.held_out import HeldOutSearch, device_of, model_of, restored_on_error
from posthoc_uq.inference.evidence import Trials, maximise_evidence
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.loaders import BatchFunction, BatchReader
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.information import InformationBlock
from posthoc_uq.wrapping import wrap

PARAMETERS = ("prior_precision", "residual_weight", "scale", "noise")


def tune(
    posterior: Posterior,
    val_loader: Iterable[Any] | None = None,
    *,
    per_layer: bool = False,
    noise: bool = False,
    temperature: bool = False,
    parameters: tuple[str, ...] | None = None,
    prior_precisions: Sequence[float] | None = None,
    head: str = "sampling",
    n_samples: int = 10,
    max_evaluations: int = 12,
    seed: int = 0,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Trials:
    """Choose the hyperparameters of `posterior`, in place.

    Without `val_loader` the log marginal likelihood is maximised over the prior precision: usable as it is,
    good at telling foreign inputs, and known to be under-confident. With it, the negative log-likelihood of
    held-out data under a head (tune with the one that will predict) is minimised, one hyperparameter after the
    other, with the same random numbers throughout; the best of all that was tried is kept. Held-out data of the
    training distribution cannot judge epistemic uncertainty: with `temperature`, which would displace the weight
    posterior altogether, the prior precision is therefore put where the evidence puts it, and only the temperature
    is tuned on the held-out data.

    A posterior whose variances were optimised (``method="function_space"``) has no marginal likelihood, and its prior
    is settled: held-out data can tune its `scale`, the noise and the temperature.

    Args:
        posterior: from `fit` or `load`.
        val_loader: held-out batches with targets, read several times.
        per_layer: one prior precision per layer (evidence only).
        noise: for regression, tune the noise too; without it the noise stays at the training residuals'
            variance.
        temperature: tune a temperature on the logits (needs `val_loader`).
        parameters: what to search on held-out data, out of ``"prior_precision"``, ``"residual_weight"``,
            ``"scale"``, ``"noise"``.
        prior_precisions: the values to try on held-out data beside the present one (of per-layer prior precisions: as
            their geometric mean), in place of the search; cheaper where the range is known.
        head: through which held-out data are predicted: ``"sampling"``, ``"linearized"`` or ``"moments"``.
        n_samples: weight draws per evaluation on held-out data, of the sampling head.
        max_evaluations: evaluations per hyperparameter on held-out data.
        seed: of the draws.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar.
        **options: of the head, as in `wrap` (``link="mc"``, say).

    Returns:
        What was tried, and what ended at the edge of its interval (which is also a warning).

    Raises:
        PosthocUQError: options that do not fit together, no targets, or a posterior without its model.
    """
    if val_loader is None:
        if temperature or parameters is not None or prior_precisions is not None:
            raise PosthocUQError(
                "temperature, parameters and prior_precisions are tuned on held-out data; pass val_loader=...."
            )
        if head != "sampling" or options:
            raise PosthocUQError(
                "The evidence needs no head; head and its options are for held-out data, val_loader=...."
            )
        return maximise_evidence(posterior, per_layer=per_layer, noise=noise)
    if per_layer:
        raise PosthocUQError(
            "per_layer=True is chosen by the log marginal likelihood; call tune without val_loader."
        )
    if temperature and (prior_precisions is not None or parameters is not None):
        raise PosthocUQError(
            "temperature=True tunes the temperature alone; leave prior_precisions and parameters out."
        )
    with restored_on_error(posterior):
        search = HeldOutSearch(
            posterior,
            val_loader,
            _maker(posterior, head, n_samples, seed, options),
            seed,
            BatchReader(device_of(posterior), batch_to_inputs, batch_to_targets),
            progress,
        )
        if head == "moments" and posterior.record.calibration:
            posterior.record.calibration = {}  # it belongs to other hyperparameters than those that are tried
            warnings.warn("tune leaves the moments head's calibration out; calibrate again.", stacklevel=2)
        if temperature:
            return search.temperature()
        names = _chosen(posterior, parameters, noise)
        if prior_precisions is not None:
            search.check_grid(names, prior_precisions)
        return search.coordinates(names, max_evaluations, prior_precisions)


def _maker(
    posterior: Posterior, head: str, n_samples: int, seed: int, options: dict[str, Any]
) -> Callable[[], Predictor]:
    """What makes the predictor of an evaluation, with the posterior's settings of that moment."""
    if head == "sampling":
        options = {"n_samples": n_samples, "seed": seed, **options}
    return lambda: wrap(model_of(posterior), posterior, head, **options)


def _chosen(posterior: Posterior, parameters: tuple[str, ...] | None, noise: bool) -> list[str]:
    regression = isinstance(posterior.likelihood, Gaussian)
    available = [
        p
        for p in PARAMETERS
        if (p != "residual_weight" or _has_residual(posterior))
        and (p != "noise" or regression)
        and (p != "prior_precision" or posterior.takes_prior)
    ]
    if parameters is None:
        return [p for p in available if p != "noise" or noise]
    unknown = [p for p in parameters if p not in available]
    if unknown or not parameters:
        raise PosthocUQError(
            f"parameters must be among {available} for this posterior; not {list(parameters)}."
        )
    return list(parameters)


def _has_residual(posterior: Posterior) -> bool:
    return any(isinstance(block, InformationBlock) for block in posterior.blocks.values())
