"""Whether the numbers of a posterior are ones to compute with: looked at when a fit ends."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from math import inf

import torch

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError
from posthoc_uq.core.options import LARGEST
from posthoc_uq.core.records import validate_record
from posthoc_uq.files.records import EvidenceRecord
from posthoc_uq.likelihoods import LIKELIHOODS
from posthoc_uq.posteriors.block import LOG_DETERMINANT, PrecisionSettings, largest_of
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.posterior import Posterior

_MAX_PRECISION = 1e36  # and the largest variance, that float32 computes with


def check_numbers(posterior: Posterior) -> None:
    """Refuse a posterior with numbers that no file may hold. What else a file cannot keep, such as a user's likelihood,
    is refused by `save`.

    Raises:
        NonFiniteError: a number is not finite, or too large.
    """
    likelihood = posterior.likelihood
    with _unusable():
        validate_record(EvidenceRecord, vars(posterior.evidence), "its evidence")
        # only its noise comes from the data
        if likelihood.noise_variance is not None and LIKELIHOODS.get(likelihood.name) is type(likelihood):
            values = {name: value for name, value in likelihood.attributes().items() if name != "name"}
            validate_record(likelihood.fields, values, "its likelihood")
        parts = {f"block '{name}'": block.tensors() for name, block in posterior.blocks.items()}
        parts["the trained mean"] = posterior.trained_mean
        parts["the features"] = {} if posterior.features is None else posterior.features.tensors()
        for owner, tensors in parts.items():
            for name, tensor in tensors.items():
                if not largest_of(tensor) <= LARGEST:
                    raise CorruptPosteriorError(
                        f"'{name}' of {owner} holds NaN, infinity or numbers beyond {LARGEST:g}"
                    )
        check_together(posterior)


def check_settings(posterior: Posterior, *, factorised: bool) -> None:
    """Refuse hyperparameters at which a posterior could not be saved, or not predict.

    Args:
        posterior: which passed `check_numbers`.
        factorised: whether to factorise its precision.

    Raises:
        NonFiniteError: a number is too large, or a precision is not positive definite.
    """
    with _unusable():
        check_together(posterior)
        known = LOG_DETERMINANT in posterior.capabilities
        factorised = factorised and any(block.factorises for block in posterior.blocks.values())
        # of weights that are certain it is infinite
        if known and factorised and not float(posterior.log_determinant()) > -inf:
            raise CorruptPosteriorError("the determinant of its precision is not a number")


def check_together(posterior: Posterior) -> None:
    """Refuse blocks whose precisions or variances float32 does not hold, or whose tensors do not fit each other, and
    Grams of features that are too large to be scaled to a mean eigenvalue of 1.

    Raises:
        CorruptPosteriorError: names the block.
    """
    if posterior.features is not None:
        _check_features(posterior.features)
    settings, prior, noise_power = posterior.settings, posterior.weight_prior, posterior.evidence.noise_power
    if posterior.likelihood.noise_variance is None:
        noise_power = 0  # the noise scale does not enter the weights' precision
    by_layer = settings.prior_precision
    precisions = list(by_layer.values()) if isinstance(by_layer, dict) else [by_layer]
    factors = [1.0] + [float(end) for tensor in prior.precision.values() for end in torch.aminmax(tensor)]
    if not min(precisions) * min(factors) >= 1 / _MAX_PRECISION:
        raise CorruptPosteriorError(
            "its prior precisions of single weights must be positive, and not so small"
        )
    scale = settings.scale / settings.noise_scale**noise_power
    strongest = PrecisionSettings(scale, max(precisions) * max(factors), settings.residual_weight)
    for name, block in posterior.blocks.items():
        size = block.largest_value(strongest)
        if not size <= _MAX_PRECISION:
            raise CorruptPosteriorError(
                f"block '{name}' reaches {size:.3g} at this scale and prior precision, more than {_MAX_PRECISION:g}"
            )
        fault = block.fault()
        if fault is not None:
            raise CorruptPosteriorError(f"block '{name}' {fault}")


def _check_features(features: FeatureGrams) -> None:
    for grams in (features, *features.stages):
        limit = 1.5 * grams.basis.shape[0]
        traces = as_double(grams.diagonal).sum(1) + as_double(grams.factors).square().sum((1, 2))
        if float(traces.max()) > limit or largest_of(grams.residual) > limit:
            raise CorruptPosteriorError("its features are not scaled to a mean eigenvalue of 1")
        scale = grams.scale
        if scale is not None and not (bool((scale[:-1].diff() >= 0).all()) and float(scale[-1]) > 0):
            raise CorruptPosteriorError("its features have quantiles that do not ascend")


@contextmanager
def _unusable() -> Generator[None]:
    """Turn what makes a posterior unusable into an error about the data that it was fitted on."""
    try:
        yield
    except (CorruptPosteriorError, NonFiniteError) as error:
        raise NonFiniteError(
            f"These data, or the weights of the model, lead to numbers that no posterior can be made of: "
            f"{str(error).rstrip('.')}. Look for inputs or targets that are out of range or constant, and scale them."
        ) from error
