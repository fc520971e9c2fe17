"""What a posterior remembers besides its blocks: what the fit saw of the data, and how it came to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import Any

from torch import Tensor

from posthoc_uq.errors import PosthocUQError

HEADS = ("sampling", "moments", "linearized")  # by name, as `wrap` has them
NOVELTIES = ("", "posterior")
HEAD_CRITERIA = ("faithful", "likelihood", "evidence", "given")  # by which hyperparameters are found


@dataclass
class Evidence:
    """What the fit saw of the data, for the log marginal likelihood.

    Attributes:
        samples: training samples.
        log_likelihood: sum of ``log p(y | x)`` at the trained weights, at the noise of the fit; None without
            labels.
        squared_residuals: sum of squared residuals over their noise variance (regression), else 0.
        targets: number of target values (regression), else 0.
        noise_power: the Fisher goes as this power of the noise precision: 1, but 2 for the empirical Fisher,
            whose residuals are data and do not shrink with the noise.
    """

    samples: int
    log_likelihood: float | None = None
    squared_residuals: float = 0.0
    targets: int = 0
    noise_power: int = 1

    def at_noise(self, noise_scale: float | Tensor) -> float | Tensor:
        """The log likelihood with every noise variance multiplied by `noise_scale`."""
        if self.log_likelihood is None:
            raise PosthocUQError(
                "The log marginal likelihood needs the log likelihood of the training data, and the fit saw "
                "no labels; "
                "fit with a loader that yields (inputs, targets)."
            )
        if self.targets == 0:
            return self.log_likelihood
        logarithm = noise_scale.log() if isinstance(noise_scale, Tensor) else log(noise_scale)
        return (
            self.log_likelihood
            + 0.5 * self.squared_residuals * (1 - 1 / noise_scale)
            - 0.5 * self.targets * logarithm
        )


@dataclass
class History:
    """What a posterior remembers of how it came to be; `report` prints it.

    Attributes:
        fit: plain values: method options, seed, timings in seconds.
        deterministic: parameters without a posterior, each with the reason.
        tuning: how each hyperparameter was chosen, in words.
        head: ``name`` and ``options`` of the head that predicts, and the ``criterion`` (``"faithful"``,
            ``"likelihood"``, ``"evidence"``, ``"given"``) by which the hyperparameters were found; or nothing.
        faithful: the faithful prior precision (or scale) as ``value`` and the ``temperature`` that were found, with
            that of the network they were compared with, ``divergence``, ``budget``, ``head``, the other ``settings``;
            or nothing.
        calibration: the moments head's correction as plain values, with the settings it was made for; or nothing.
        referral: the thresholds from which inputs are handed to a person, with what they were set for
            (`posthoc_uq.posteriors.referral`); or nothing.
        novelty: ``"posterior"`` where the fit looked for a layer to tell novelty by and found none, so that the
            posterior itself tells it; or empty.
    """

    fit: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    deterministic: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    tuning: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    head: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    faithful: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    calibration: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    referral: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    novelty: str = ""
