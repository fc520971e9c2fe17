"""Several networks as one file: the whole files of their posteriors, and what belongs to the mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, model_validator
from torch import nn

from posthoc_uq.core.errors import CorruptPosteriorError, PosteriorMismatchError, PosthocUQError
from posthoc_uq.core.interrupts import check
from posthoc_uq.core.model import unwrap, with_plain_weights
from posthoc_uq.core.options import Temperature
from posthoc_uq.core.records import Digest, Name, Record, Simple, among, validate_record
from posthoc_uq.files import header
from posthoc_uq.files.hdf5 import ImageReader, Structure, build_image, state_text, state_values
from posthoc_uq.files.match import buffers_fingerprint, fingerprint, parameters_of
from posthoc_uq.files.records import LikelihoodRecord, check_amounts
from posthoc_uq.files.untrusted import ChildReader
from posthoc_uq.likelihoods import Likelihood, likelihood_to_attributes
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import HEADS

_GROUP = "posteriors"
MAX_NETWORKS = 100
SPARE = 2**25  # bytes that the record may take, with all held-out scores
_ATTRIBUTES = ("format", "format_version", "library_version", "method")


class NetworkRecord(Record):
    """A network of an ensemble: whether it has a posterior, and the fingerprints of its weights where it has none."""

    posterior: bool
    fingerprint: Digest | None = None
    buffers_fingerprint: Digest | None = None

    @model_validator(mode="after")
    def _check_fingerprint(self) -> NetworkRecord:
        if self.posterior == (self.fingerprint is not None):
            raise ValueError("must have a fingerprint where it has no posterior, and only there")
        return self


def _check_promises(promises: ConformalScores) -> ConformalScores:
    if promises.head.get("head") != header.ENSEMBLE or promises.posterior or promises.retuned:
        raise ValueError("is not of an ensemble")
    return promises


class EnsembleRecord(Record):
    """What a file of several networks holds beside their posteriors.

    Attributes:
        networks: in order.
        likelihood: of those without a posterior.
        temperature: of the mixture.
        head: that was asked for; None for each posterior's own.
        options: of the heads, as they were given.
        promises: the held-out scores of the mixture.
    """

    networks: Annotated[list[NetworkRecord], Field(min_length=1, max_length=MAX_NETWORKS)]
    likelihood: LikelihoodRecord
    temperature: Temperature
    head: Annotated[str, among(HEADS)] | None = None
    options: Annotated[dict[Name, Simple], AfterValidator(check_amounts)]
    promises: Annotated[ConformalScores, AfterValidator(_check_promises)] | None = None

    @property
    def paths(self) -> list[str | None]:
        """Of each network the dataset of its posterior."""
        return [f"{_GROUP}/{i}" if network.posterior else None for i, network in enumerate(self.networks)]


@dataclass(frozen=True)
class StoredEnsemble:
    """What is saved and loaded of an ensemble's predictor; see `EnsembleRecord`."""

    models: Sequence[nn.Module]
    posteriors: Sequence[Posterior | None]
    likelihood: Likelihood
    temperature: float
    head: str | None
    options: Mapping[str, Any]
    promises: ConformalScores | None

    def record(self) -> EnsembleRecord:
        """As plain values.

        Raises:
            CorruptPosteriorError: a value is out of range.
        """
        values: dict[str, Any] = {
            "networks": [
                {"posterior": True} if posterior is not None else _fingerprints(model)
                for model, posterior in zip(self.models, self.posteriors, strict=True)
            ],
            "likelihood": likelihood_to_attributes(self.likelihood),
            "temperature": self.temperature,
            "options": dict(self.options),
        }
        values |= {} if self.head is None else {"head": self.head}
        values |= {} if self.promises is None else {"promises": self.promises.plain()}
        return parsed(state_text(values))


def _fingerprints(model: nn.Module) -> dict[str, Any]:
    plain = with_plain_weights(unwrap(model))
    buffers = buffers_fingerprint(plain)
    found: dict[str, Any] = {"posterior": False, "fingerprint": fingerprint(parameters_of(plain))}
    return found | ({} if buffers is None else {"buffers_fingerprint": buffers})


def check_plain_network(number: int, network: NetworkRecord, model: nn.Module, path: str) -> None:
    """Refuse a network without a posterior whose weights are not those of the file.

    Raises:
        PosteriorMismatchError: they are not.
    """
    if network.plain() != _fingerprints(model):
        raise PosteriorMismatchError(
            f"Network {number} has no posterior in '{path}', and its weights or buffers are not those that it had when "
            f"it was saved; load its state dict, and give the models in the order of the ensemble."
        )


def parsed(text: bytes) -> EnsembleRecord:
    """The record that a file holds.

    Raises:
        CorruptPosteriorError: a field is missing, unknown, of another type or out of range, or contradicts another.
    """
    return validate_record(EnsembleRecord, state_values(text), "its description")


def image(stored: StoredEnsemble, images: Sequence[bytes | None], release: str) -> bytes:
    """The whole file.

    Args:
        stored: what it holds.
        images: the whole file of each posterior; None where a network has none.
        release: of the library.
    """
    record = stored.record()
    arrays = {
        path: partial(np.frombuffer, data, np.uint8)
        for path, data in zip(record.paths, images, strict=True)
        if path is not None and data is not None
    }
    values = ("posthoc_uq ensemble", header.FORMAT, release, header.ENSEMBLE)
    attributes: dict[str, str | int] = dict(zip(_ATTRIBUTES, values, strict=True))
    built = build_image(state_text(record.plain()), attributes, arrays, header.SIZE, None)
    return header.write_header(built, header.ENSEMBLE).getvalue()


def opened(data: bytes, untrusted: bool) -> tuple[EnsembleRecord, list[bytes | None]]:
    """The record of a verified file, and the whole file of each posterior, which is not verified yet.

    Raises:
        CorruptPosteriorError: it does not hold what its record says.
    """
    with ChildReader(data) if untrusted else ImageReader(data) as reader:
        structure = reader.structure()
        record = _described(structure, len(data))
        found: dict[str, bytes] = {}
        for path, stored in structure.datasets.items():
            check()
            found[path] = reader.array(path, stored).tobytes()
    return record, [None if path is None else found[path] for path in record.paths]


def _described(structure: Structure, size: int) -> EnsembleRecord:
    record = parsed(structure.state)
    wanted = [path for path in record.paths if path is not None]
    if sorted(structure.datasets) != sorted(wanted) or structure.groups != ([_GROUP] if wanted else []):
        raise CorruptPosteriorError("its datasets are not the posteriors of its networks")
    if any(stored.dtype != "|u1" or len(stored.shape) != 1 for stored in structure.datasets.values()):
        raise CorruptPosteriorError("a posterior in it is no row of bytes")
    if sum(stored.shape[0] for stored in structure.datasets.values()) > size:
        raise CorruptPosteriorError(
            "its posteriors have more bytes than it has itself"
        )  # not compressed once more
    if set(structure.attributes) - set(_ATTRIBUTES):
        raise CorruptPosteriorError("it has attributes that no ensemble has")
    return record


def several_error(path: str) -> PosthocUQError:
    """The error of one model given for the file of several networks."""
    return PosthocUQError(
        f"'{path}' holds the predictor of several networks; give all of them, in their order: predictor = "
        f"uq.load(path, [first, second, ...])."
    )
