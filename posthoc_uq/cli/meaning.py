"""What a command knows of its data beside their name: what the outputs mean, and what the posterior's file keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posthoc_uq.likelihoods import LIKELIHOODS, Likelihood
from posthoc_uq.posteriors.posterior import Posterior

COLUMNS, TARGETS, CLASSES = "table columns", "table targets", "table classes"
"""Facts that a fit on a table keeps: the names of the input columns, of the target columns, and of the classes."""

IGNORED = "mask value ignored"
"""The fact that a fit on images with masks keeps: the value of a mask whose pixels count for nothing."""

NAMES = "class names"
"""The fact that a fit on class folders keeps: the names of the outputs."""

SIZE, MEAN, STD = "image size", "image mean", "image std"
"""Facts that a fit on images keeps: ``--image-size``, ``--mean`` and ``--std`` where they were given."""

_FACTS = (COLUMNS, TARGETS, CLASSES, IGNORED, NAMES)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a posterior's data.

    Attributes:
        likelihood: of the model's outputs.
        kept: facts of the data that the posterior was fitted on.
    """

    likelihood: Likelihood
    kept: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def labels(self) -> bool:
        """Whether a target is one class an input."""
        return takes_labels(self.likelihood)


def meaning_of(posterior: Posterior) -> Meaning:
    """What a posterior's file says of its data."""
    facts = posterior.history.fit
    return Meaning(posterior.likelihood, {name: facts[name] for name in _FACTS if name in facts})


def meaning_of_likelihood(likelihood: str | Likelihood) -> Meaning:
    """What is known before a fit."""
    return Meaning(LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood)


_CLASSES = 2  # a number of outputs for which likelihoods of classes have several


def takes_labels(likelihood: Likelihood) -> bool:
    """Whether a target is one class an input, as class folders and label columns give it."""
    return likelihood.classes(_CLASSES) > 1
