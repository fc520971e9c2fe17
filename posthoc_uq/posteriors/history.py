"""What a posterior remembers besides its blocks: what the fit saw of the data, and the posterior's history."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import Any

from torch import Tensor

from posthoc_uq.errors import PosthocUQError

HEADS = ("sampling", "moments", "linearized")  # by name, as `wrap` has them
NOVELTIES = ("", "posterior")
HEAD_CRITERIA = ("faithful", "likelihood", "evidence", "given")  # how hyperparameters were found


@dataclass
class Evidence:
    """What the fit saw of the data, for the log marginal likelihood.

    Attributes:
        samples: training samples.
        log_likelihood: weighted sum of ``log p(y | x)`` at the trained weights, at the noise variance of the fit, in
            nats; None without labels.
        squared_residuals: weighted sum of squared residuals over their noise variance (regression), else 0.
        targets: number of target values (regression), else 0.
        noise_power: the Fisher is proportional to this power of the noise precision: 1, but 2 for the empirical Fisher,
            whose residuals are data and do not shrink with the noise variance.
        weight: the sum of the samples' weights; None where each counts once.
    """

    samples: int
    log_likelihood: float | None = None
    squared_residuals: float = 0.0
    targets: int = 0
    noise_power: int = 1
    weight: float | None = None

    @property
    def total(self) -> float:
        """How many samples the data are worth: the sum of their weights, or their number."""
        return float(self.samples) if self.weight is None else self.weight

    def at_noise(self, noise_scale: float | Tensor) -> float | Tensor:
        """The log likelihood with every noise variance multiplied by `noise_scale`."""
        if self.log_likelihood is None:
            raise PosthocUQError(
                "The log marginal likelihood needs the log likelihood of the training data, and the fit saw no labels; "
                "fit with a loader that yields (inputs, targets)."
            )
        if self.targets == 0:
            return self.log_likelihood
        logarithm = noise_scale.log() if isinstance(noise_scale, Tensor) else log(noise_scale)
        return (
            self.log_likelihood
            + 0.5 * self.squared_residuals * (1 - 1 / noise_scale)
            - 0.5 * self.targets * (self.total / self.samples) * logarithm
        )


@dataclass
class History:
    """How a posterior was fitted, tuned, calibrated and given thresholds; `report` prints it.

    Attributes:
        fit: plain values: method options, seed, timings in seconds.
        deterministic: parameters without a posterior, each with the reason.
        tuning: how each hyperparameter was chosen, in words.
        head: ``name`` and ``options`` of the head that predicts, and the ``criterion`` (``"faithful"``,
            ``"likelihood"``, ``"evidence"``, ``"given"``) by which the hyperparameters were found; or empty.
        faithful: the faithful prior precision (or scale) as ``value``, its ``temperature`` and the
            ``network_temperature`` it was compared with, ``divergence``, ``budget``, ``head``, and the other
            ``settings``; or empty.
        calibration: the moments head's correction as plain values, with the settings it was made for; or empty.
        referral: the thresholds above which inputs are handed to a person, with the settings they were set for
            (`posthoc_uq.posteriors.referral`); or empty.
        novelty: ``"posterior"`` where the fit found no layer to measure novelty by, so that the posterior itself is
            used; or empty.
        changes: of the data since the fit: how many ``updates`` and ``removals`` there were, and how many samples were
            ``added`` and ``removed``; a ``digest`` of all of them in their order; the ``balance``, a sum of hashes of
            the samples that came in less that of those that went out; the hash of the ``last`` ones; and for the last
            update of a posterior with fixed bases the share of the new data's Fisher ``outside`` of them, and
            ``outside before``, that of the Fisher of the data before; or empty.
        output: which part of what the model returns its outputs are: ``name``, ``index`` or (the name of) a
            ``function``, and whether it was ``guessed``; empty where it returns a tensor.
    """

    fit: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    deterministic: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    tuning: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    head: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    faithful: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    calibration: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    referral: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    novelty: str = ""
    changes: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    output: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def revision(self) -> int:
        """How often the data changed since the fit; what depends on them belongs to one revision."""
        return sum(self.changes.get(name, 0) for name in ("updates", "removals"))
