"""Times until an event, of which some are only known to lie in a range (censored): Weibull and log-normal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log, pi
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, at_least_float32, host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, check_probability
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.draws import OutputGaussian
from posthoc_uq.likelihoods.likelihood import DrawnPrediction, Faults, Fisher, Likelihood

Family = Literal["weibull", "log_normal"]
Censoring = Literal["right", "interval"]
Information = tuple[Tensor, Tensor, Tensor]

_EULER = 0.5772156649015329
_NODES = 96  # of the integral over the time at risk
_START = -9.0  # of it: the hazard of a normal is below 1e-18 there
_LOOKS = 64  # before a range, at most; more of them are nearly a watch without a gap
_HALVINGS = 60  # of the range in which a quantile is searched


def _normal_density(z: Tensor) -> Tensor:
    return -0.5 * (z.square() + log(2 * pi))


def _normal_at_risk(z: Tensor) -> Information:
    """By Gauss-Legendre quadrature; the hazard r of a normal has the derivative ``r (r - z)``."""
    nodes, weights = (each.to(z).reshape(-1, *[1] * z.ndim) for each in _rule())
    half = (z - _START).clamp(min=0) / 2
    points = _START + half * (1 + nodes)
    hazard = (_normal_density(points) - torch.special.log_ndtr(-points)).exp()
    change = hazard - points
    scale, mass = 1 + points * change, weights * half * hazard
    return (
        (mass * change.square()).sum(0),
        (mass * change * scale).sum(0),
        (mass * scale.square()).sum(0),
    )


@lru_cache(maxsize=1)
def _rule() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    with torch.inference_mode(False):
        return host_double(nodes.tolist()), host_double(weights.tolist())


class _Standard(NamedTuple):
    """The distribution of ``z = (log T - location) * rate``, and what the second output is.

    Attributes:
        sign: the logarithm of the rate is so many times the second output.
        log_density: of z.
        log_survival: ``log P(Z > z)``.
        quantile: of a probability, (0, 1).
        mean: of z.
        variance: of z.
        at_risk: ``int q^2 r``, ``int q (1 + v q) r`` and ``int (1 + v q)^2 r`` over v from minus infinity to z, with
            the hazard r and its relative derivative q.
        whole: their expectations where nothing is censored.
    """

    sign: float
    log_density: Callable[[Tensor], Tensor]
    log_survival: Callable[[Tensor], Tensor]
    quantile: Callable[[Tensor], Tensor]
    mean: float
    variance: float
    at_risk: Callable[[Tensor], Information]
    whole: tuple[float, float, float]


_STANDARDS = {
    "weibull": _Standard(
        1.0,
        lambda z: z - z.exp(),
        lambda z: -z.exp(),
        lambda u: (-torch.log1p(-u)).log(),
        -_EULER,
        pi**2 / 6,
        lambda z: (z.exp(), z.exp() * z, z.exp() * (1 + z.square())),
        (1.0, 1 - _EULER, 1 + _EULER**2 - 2 * _EULER + pi**2 / 6),
    ),
    "log_normal": _Standard(
        -1.0,
        _normal_density,
        lambda z: torch.special.log_ndtr(-z),
        torch.special.ndtri,
        0.0,
        1.0,
        _normal_at_risk,
        (1.0, 0.0, 2.0),
    ),
}


class SurvivalFields(Record):
    """The distribution, and what the targets are."""

    family: Family = "weibull"
    censoring: Censoring = "right"


class Survival(Likelihood):
    """Times until an event, some of them censored: outputs ``(samples, 2)``, an accelerated failure time model in the
    parameters of lifelines' `WeibullAFTFitter` and `LogNormalAFTFitter`, both of which the input may change.

    * ``"weibull"``: ``log lambda`` and ``log rho``, ``P(T > t) = exp(-(t / lambda)^rho)``.
    * ``"log_normal"``: ``mu`` and ``log sigma``, ``log T ~ N(mu, sigma^2)``.

    Targets are ``(samples, 2)``:

    * ``censoring="right"``: a time, and 1 where the event was seen then, 0 where it had not happened until then.
    * ``censoring="interval"``: two times between which the event happened: equal ones where it was seen; the second is
      infinity where it had not happened until the first; the first is 0 where it had happened before the second.

    Which censoring a sample whose event was seen would have had is not known, so the exact Fisher is the expectation
    given what the data say was watched. Of a time that was seen or is censored from the right that is the predictable
    variation of the score over the time at risk, ``int_0^t h (d log h)(d log h)^T``, with the hazard h (Andersen,
    Borgan, Gill, Keiding, "Statistical Models Based on Counting Processes", 1993, chapter VI): its mean over the data
    is that of the score's outer products under any censoring that is independent of the time. Of a range it is the same
    sum over looks: whether the event was there, at its end and at even distances of its width before, up to 64 of them,
    as where all samples are looked at in turn. Both are positive semi-definite, which minus the Hessian of the
    log-likelihood is not. Drawn labels are replaced by random signs of the factors, whose outer products have the same
    mean. Without targets nothing is censored.

    Args:
        family: of the distribution of times.
        censoring: says what the two columns of targets are.

    Raises:
        PosthocUQError: another family or censoring.

    Example:
        ```python
        net, x = nn.Linear(2, 2), torch.randn(30, 2)
        seen = (torch.rand(30) > 0.3).float()  # 1 where the event was seen
        data = [(x, torch.stack([torch.rand(30) + 0.1, seen], 1))]
        posterior = uq.fit(net, data, "diag", likelihood=uq.Survival())
        print(uq.wrap(net, posterior)(x[:3]).survival(0.5))
        ```
    """

    name = "survival"
    fields: ClassVar[type[Record]] = SurvivalFields

    def __init__(self, family: Family = "weibull", censoring: Censoring = "right") -> None:
        self.family: Family = check_option("family", family, Family)
        self.censoring: Censoring = check_option("censoring", censoring, Censoring)

    @property
    def _standard(self) -> _Standard:
        return _STANDARDS[self.family]

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        if outputs.ndim != 2 or outputs.shape[1] != 2:
            parameters = "log lambda and log rho" if self.family == "weibull" else "mu and log sigma"
            raise PosthocUQError(
                f"likelihood='survival' needs outputs of shape (samples, 2), {parameters} of a {self.family} "
                f"distribution, and the model gives {tuple(outputs.shape)}."
            )
        if targets is None:
            return
        right = self.censoring == "right"
        if targets.shape != outputs.shape:
            columns = (
                "a time, and whether the event was seen then" if right else "two times, the earlier one first"
            )
            raise PosthocUQError(
                f"Targets for likelihood='survival' with censoring={self.censoring!r} are of shape (samples, 2), "
                f"{columns}, not {tuple(targets.shape)}."
            )
        first, second = targets.unbind(1)
        if right:
            yield (
                ~((first > 0) & (first < inf)).all(),
                lambda: "Times must be finite and above 0; some are not.",
            )
            yield (
                ~((second == 0) | (second == 1)).all(),
                lambda: (
                    "The second column says whether the event was seen, 1 or 0; some are neither. For two times pass "
                    "uq.Survival(censoring='interval')."
                ),
            )
            return
        fits = (first >= 0) & (first < inf) & (second > 0) & (second >= first)
        yield (
            ~(fits & ~((first == 0) & (second == inf))).all(),
            lambda: (
                "Two times must not descend, the first finite and not negative, the second above 0 or infinity, and "
                "from 0 to infinity says nothing; some do not fit. For times and events pass "
                "uq.Survival(censoring='right')."
            ),
        )

    # The density

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Location and logarithm of the rate, ``(...)`` each."""
        location, second = at_least_float32(outputs).unbind(-1)
        return location, self._standard.sign * second

    def bounds(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The two times of ``censoring="interval"``, ``(samples,)`` each."""
        first, second = targets.unbind(1)
        return first, torch.where(second > 0, first, inf) if self.censoring == "right" else second

    def log_survival(self, outputs: Tensor, log_times: Tensor) -> Tensor:
        """``log P(T > t | outputs)`` for outputs ``(..., 2)`` and logarithms of times ``(...)``."""
        location, log_rate = self._parts(outputs)
        return self._standard.log_survival((log_times - location) * log_rate.exp())

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(t)`` of a time that was seen, ``log P(T > t)``, ``log P(T <= t)`` or ``log P(l < T <= u)``. In
        float64: narrow ranges cancel, and those far from what is predicted have no probability in float32.
        """
        wide, standard = as_double(outputs), self._standard
        location, log_rate = self._parts(wide)
        lower, upper = self.bounds(self.reshape_targets(wide, targets))
        seen, within = lower == upper, (lower < upper) & (upper < inf)

        def log_survival(times: Tensor, where: Tensor) -> Tensor:  # 1 elsewhere: no gradient is NaN
            logs = torch.where(where, times, 1.0).log()
            z = torch.where(where, (logs - location) * log_rate.exp(), 0.0)
            return torch.where(where, standard.log_survival(z), 0.0)

        before = log_survival(lower, (lower > 0) & ~seen)
        change = torch.where(within, log_survival(upper, within) - before, -1.0)
        least = torch.finfo(change.dtype).tiny
        ranges = before + torch.where(within, (-torch.expm1(change.clamp(max=-least))).log(), 0.0)
        log_times = torch.where(seen, lower, 1.0).log()
        z = torch.where(seen, (log_times - location) * log_rate.exp(), 0.0)
        logs = torch.where(seen, standard.log_density(z) + log_rate - log_times, ranges)
        return logs.to(at_least_float32(outputs))

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """By the inverse of the distribution function; nothing is censored."""
        times = self.log_quantile(outputs, self.uniforms(outputs, keys, draw).squeeze(1)).exp()
        return torch.stack([times, torch.ones_like(times) if self.censoring == "right" else times], 1)

    def log_quantile(self, outputs: Tensor, u: Tensor) -> Tensor:
        """The logarithm of the time before which the event happens with probability u, for outputs ``(..., 2)``."""
        location, log_rate = self._parts(outputs)
        return location + self._standard.quantile(as_double(u)).to(location) * (-log_rate).exp()

    # The Fisher

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        """Two, where nothing is censored."""
        whole = (torch.full_like(as_double(outputs[:, 0]), number) for number in self._standard.whole)
        return self._factors(outputs, *whole)

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """See `Likelihood`, and `Survival` for what targets have to do with exact and drawn labels."""
        outputs = outputs.detach()
        if targets is None or fisher == "empirical":
            yield from super().gradients(outputs, targets, keys, fisher, n_samples)
            return
        factors = list(self._factors(outputs, *self._information(outputs, targets)))
        if fisher == "exact":
            yield from factors
            return
        for draw in range(n_samples):
            signs = (self.uniforms(outputs, keys, draw, 2) - 0.5).sign().to(factors[0])
            yield (factors[0] * signs[:, :1] + factors[1] * signs[:, 1:]) * n_samples**-0.5

    def _information(self, outputs: Tensor, targets: Tensor) -> Information:
        """Of location and log rate, in units of the rate, ``(samples,)`` each; see `_Standard.at_risk`."""
        wide, standard = as_double(outputs), self._standard
        location, log_rate = self._parts(wide)
        lower, upper = self.bounds(as_double(targets).to(wide))
        watched, least = (lower == upper) | (upper == inf), torch.finfo(wide.dtype).tiny

        def standardised(times: Tensor) -> Tensor:
            return (times.clamp(min=least).log() - location) * log_rate.exp()

        at_risk = standard.at_risk(torch.where(watched, standardised(lower), 0.0))
        # looks at (looks, samples) times, the first at 0
        end = torch.where(watched, lower, upper)
        looks = torch.where(watched, 1.0, lower / (end - lower).clamp(min=least)).round().clamp(1, _LOOKS)
        numbers = torch.arange(_LOOKS + 1, dtype=wide.dtype, device=wide.device).unsqueeze(1)
        times = torch.cat([lower * (torch.minimum(numbers, looks) / looks), end.unsqueeze(0)])
        z = standardised(times)
        log_survival = torch.where(times > 0, standard.log_survival(z), 0.0)
        change = torch.where(times > 0, (standard.log_density(z) - log_survival).exp(), 0.0)
        passed = -log_survival.diff(dim=0)  # of the cumulative hazard from one look to the next
        mass = torch.where(passed > 0, 1 / torch.expm1(passed).clamp(min=least), 0.0)
        first, second = change.diff(dim=0), (change * z).diff(dim=0)
        of_range = ((mass * first.square()), (mass * first * second), (mass * second.square()))
        found = (torch.where(watched, x, y.sum(0)) for x, y in zip(at_risk, of_range, strict=True))
        return next(found), next(found), next(found)

    def _factors(self, outputs: Tensor, first: Tensor, mixed: Tensor, second: Tensor) -> Iterator[Tensor]:
        """The columns of the Cholesky factor of the outputs' information."""
        rate, sign = self._parts(as_double(outputs))[1].exp(), self._standard.sign
        root = first.clamp(min=torch.finfo(first.dtype).tiny).sqrt()
        rest = (second - (mixed / root).square()).clamp(min=0).sqrt()
        yield torch.stack([-rate * root, sign * mixed / root], 1).to(at_least_float32(outputs))
        yield torch.stack([torch.zeros_like(rest), rest], 1).to(at_least_float32(outputs))

    # The target

    def mean(self, outputs: Tensor) -> Tensor:
        """Of the logarithm of the time, ``(samples,)``."""
        location, log_rate = self._parts(outputs)
        return location + self._standard.mean * (-log_rate).exp()

    def variance(self, outputs: Tensor) -> Tensor:
        """Of the logarithm of the time, ``(samples,)``."""
        return self._standard.variance * (-2 * self._parts(outputs)[1]).exp()

    def divergence(self, outputs: Tensor, prediction: DrawnPrediction) -> Tensor:
        """By drawn times."""
        return self.drawn_divergence(outputs, prediction)

    def from_blocks(self, blocks: Iterable[Tensor]) -> SurvivalPrediction:
        return SurvivalPrediction.from_draws(torch.cat(list(blocks)), self)

    def from_gaussian(self, outputs: OutputGaussian) -> SurvivalPrediction:
        """By quasi-random draws of the outputs."""
        return SurvivalPrediction.from_draws(outputs.draws(), self, (outputs.mean, outputs.variance))


@dataclass(frozen=True, eq=False, repr=False)
class SurvivalPrediction(DrawnPrediction):
    """A `DrawnPrediction` of times until an event. `mean`, `epistemic_variance`, `noise_variance` and the scores are of
    the logarithm of the time, which has no heavy tail; quantiles and intervals are times. Nothing is promised of times,
    which censoring hides.
    """

    likelihood: Survival
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {**DrawnPrediction._computed, "median": ()}

    @classmethod
    def from_draws(
        cls, outputs: Tensor, likelihood: Any, functional: tuple[Tensor, Tensor] | None = None
    ) -> SurvivalPrediction:
        """See `DrawnPrediction`."""
        found = super().from_draws(outputs, likelihood, functional)
        assert isinstance(found, SurvivalPrediction)
        return found

    def survival(self, times: Tensor | float) -> Tensor:
        """The probability that the event has not happened until a time, (batch,); of several times (batch, times).

        Args:
            times: one above 0, or several, (times,).

        Raises:
            PosthocUQError: they have more dimensions, or are not above 0.
        """
        return self._curves(times).mean(0)

    def survival_interval(self, times: Tensor | float, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds shaped like `survival`, between which the probability lies with probability `level` under the
        posterior: quantiles over the draws.

        Raises:
            PosthocUQError: as `survival`, or `level` is not strictly between 0 and 1.
        """
        low = (1 - check_probability("level", level)) / 2
        curves = self._curves(times)
        return curves.quantile(low, dim=0), curves.quantile(1 - low, dim=0)

    def _curves(self, times: Tensor | float) -> Tensor:
        """Of every draw, (draws, batch) or (draws, batch, times)."""
        outputs = self.outputs.transpose(0, 1)
        points = torch.as_tensor(times, device=outputs.device).to(outputs.dtype)
        if points.ndim > 1 or not bool((points > 0).all()):
            raise PosthocUQError(
                f"survival takes a time above 0, or several of shape (times,), not {tuple(points.shape)} from "
                f"{float(points.min()):g} on."
            )
        outputs = outputs.unsqueeze(2) if points.ndim else outputs
        return self.likelihood.log_survival(outputs, points.log()).exp()

    def quantile(self, q: float) -> Tensor:
        """(batch,): the time before which the event happens with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        outputs, share = self.outputs.transpose(0, 1), 1 - check_probability("q", q)
        each = self.likelihood.log_quantile(outputs, torch.full_like(self.functional_mean[:, 0], q))
        low, high = each.amin(0), each.amax(0)  # that of the mixture lies between those of its draws
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            later = self.likelihood.log_survival(outputs, middle).exp().mean(0) > share
            low, high = torch.where(later, middle, low), torch.where(later, high, middle)
        return ((low + high) / 2).exp()

    def median(self) -> Tensor:
        """(batch,): the time before which the event happens with probability 1/2."""
        return self.quantile(0.5)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Times (batch,) between which the event happens with probability `level`, as often before as after.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1.
        """
        low = (1 - check_probability("level", level)) / 2
        return self.quantile(low), self.quantile(1 - low)

    def value_columns(self, level: float) -> dict[str, Tensor]:
        lower, upper = self.interval(level)
        return {"median": self.median(), "lower": lower, "upper": upper}

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """NLL, and the concordance of predicted medians."""
        return {
            "concordance": metrics.concordance(self.median(), *self.likelihood.bounds(as_double(targets))),
            "nll": -float(as_double(self.log_prob(targets)).mean()),
        }

    @property
    def loss_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `losses` are: there is no error of a time that is not known."""
        return "nll"
