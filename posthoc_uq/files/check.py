"""Whether a file could hold a posterior: looked at when a fit ends, before anybody relies on it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from math import inf

from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError
from posthoc_uq.core.records import validate_record
from posthoc_uq.files.records import EvidenceRecord, SettingsRecord
from posthoc_uq.files.tensors import check_together, find_fault, tensors_of
from posthoc_uq.likelihoods import LIKELIHOODS
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.posterior import Posterior


def check_numbers(posterior: Posterior) -> None:
    """Refuse a posterior with numbers that no file may hold. What else a file cannot keep, such as a user's likelihood,
    is refused by `save`.

    Raises:
        NonFiniteError: a number is not finite, or too large.
    """
    likelihood = posterior.likelihood
    with _unusable():
        validate_record(EvidenceRecord, vars(posterior.evidence), "its evidence")
        if LIKELIHOODS.get(likelihood.name) is type(likelihood):
            values = {name: value for name, value in likelihood.attributes().items() if name != "name"}
            validate_record(likelihood.fields, values, "its likelihood")
        for slot, tensor in tensors_of(posterior):
            fault = find_fault(slot.spec, tensor)
            if fault is not None:
                raise CorruptPosteriorError(f"'{slot.name}' of {slot.owner} {fault}")
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
        validate_record(SettingsRecord, posterior.settings.plain(), "its settings")
        check_together(posterior)
        known = factorised and LOG_DETERMINANT in posterior.capabilities
        # of weights that are certain it is infinite
        if known and not float(posterior.log_determinant()) > -inf:
            raise CorruptPosteriorError("the determinant of its precision is not a number")


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
