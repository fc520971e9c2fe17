"""Classes that have an order: thresholds on one output, or a logit for each step from a class to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from posthoc_uq.core.devices import as_double, at_least_float32, host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import LARGEST, check_option, check_probability
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, divergence_of_classes, entropy_of
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import OutputGaussian, moments_of
from posthoc_uq.likelihoods.labels import from_one, in_whole_numbers, outside
from posthoc_uq.likelihoods.likelihood import Faults, Likelihood, at_nodes

_MIN_DISTANCE = (
    1e-4  # of neighbouring cumulative logits; nearer ones of a draw, or crossing ones, are moved to it
)


class OrdinalFields(Record):
    """The thresholds, none where each step has a logit, and whether these are cumulative."""

    thresholds: Annotated[list[Annotated[float, Field(ge=-LARGEST, le=LARGEST)]], Field(max_length=2**20)]
    cumulative: bool


class Ordinal(Likelihood):
    """Classes 0, 1, ..., C - 1 that have an order; targets ``(samples,)`` are class indices. Three forms:

    * ``Ordinal(thresholds=[...])``: outputs ``(samples,)`` or ``(samples, 1)`` are one latent number f, and
      ``P(y <= k) = sigmoid(thresholds[k] - f)`` for C - 1 increasing thresholds (McCullagh 1980), the proportional odds
      of statsmodels' `OrderedModel`, spacecutter and mord. The thresholds are the trained ones; they stay as they are.
    * ``Ordinal()``, the form of the name ``"ordinal"``: outputs ``(samples, C - 1)`` are conditional logits,
      ``P(y > k | y >= k) = sigmoid(f_k)`` (the continuation ratio; CORN of coral-pytorch, Shi, Cao, Raschka 2021). Any
      outputs give a distribution, so that any weights do that a posterior draws.
    * ``Ordinal(cumulative=True)``: outputs ``(samples, C - 1)`` are cumulative logits that do not increase,
      ``P(y > k) = sigmoid(f_k)`` (CORAL of coral-pytorch). Under drawn weights neighbours may cross; they are then
      moved to 1e-4 below the one before. A network whose own logits increase is refused: those of CORN are for
      ``Ordinal()``.

    Attributes:
        thresholds: as a tuple, empty without.
        cumulative: whether logits without thresholds are cumulative.

    Example:
        ```python
        net, x = nn.Linear(2, 1), torch.randn(30, 2)
        data = [(x, (x[:, 0] > 0).long() + (x[:, 0] > 1))]
        posterior = uq.fit(net, data, likelihood=uq.Ordinal([-0.5, 0.5]))
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.probs, prediction.quantile(0.5))
        ```
    """

    name = "ordinal"
    fields: ClassVar[type[Record]] = OrdinalFields

    def __init__(self, thresholds: Sequence[float] | Tensor | None = None, cumulative: bool = False) -> None:
        self.cumulative = check_option("cumulative", cumulative, bool)
        self.thresholds = () if thresholds is None else _increasing(thresholds)
        if self.thresholds and self.cumulative:
            raise PosthocUQError(
                "cumulative=True is for a logit of each step; thresholds are those of one output. Pass one of the two."
            )

    @property
    def logits(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a temperature divides the outputs: not where thresholds are subtracted, which it would leave."""
        return not self.thresholds

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> Ordinal:
        return cls(attributes["thresholds"] or None, attributes["cumulative"])

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        if self.thresholds and outputs.numel() != outputs.shape[0]:
            raise PosthocUQError(
                f"likelihood='ordinal' with thresholds needs outputs of shape (samples,) or (samples, 1), and the "
                f"model gives {tuple(outputs.shape)}; leave the thresholds out for a logit of each step."
            )
        if not self.thresholds and (outputs.ndim != 2 or outputs.shape[1] < 1):
            raise PosthocUQError(
                f"likelihood='ordinal' needs outputs of shape (samples, classes - 1), and the model gives "
                f"{tuple(outputs.shape)}."
            )
        if self.cumulative and outputs.shape[1] > 1:
            yield (
                (outputs.diff(dim=1) > 0).any(),
                lambda: (
                    "likelihood=Ordinal(cumulative=True) takes logits of P(y > k) that do not increase from one step "
                    "to the next, and the model's do; logits of P(y > k | y >= k), as of CORN, are those of Ordinal()."
                ),
            )
        if targets is None:
            return
        if targets.shape != outputs.shape[:1] or targets.is_floating_point():
            raise PosthocUQError(
                f"Labels must be integers of shape ({outputs.shape[0]},), not {targets.dtype} of shape "
                f"{tuple(targets.shape)}.{in_whole_numbers(targets)}"
            )
        classes = self.classes(outputs[0].numel())
        yield (
            outside(targets, classes).any().to(outputs.device),
            lambda: (
                f"Labels run from {int(targets.min())} to {int(targets.max())}, but there are {classes} ordered "
                f"classes; labels must lie in 0..{classes - 1}.{from_one(targets, classes)}"
            ),
        )

    def log_probs(self, outputs: Tensor) -> Tensor:
        """``log P(y = k | outputs)`` of every class, ``(samples, classes)``."""
        if not self.thresholds and not self.cumulative:
            logits = at_least_float32(outputs)
            zero = logits.new_zeros(logits.shape[0], 1)
            passed = torch.cat([zero, F.logsigmoid(logits).cumsum(1)], 1)
            return passed + torch.cat([F.logsigmoid(-logits), zero], 1)
        logits = self._cumulative(outputs)
        steps = -logits.diff(dim=1)
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a))
        between = F.logsigmoid(logits[:, :-1]) + F.logsigmoid(-logits[:, 1:]) + (-torch.expm1(-steps)).log()
        return torch.cat([F.logsigmoid(-logits[:, :1]), between, F.logsigmoid(logits[:, -1:])], 1)

    def _cumulative(self, outputs: Tensor) -> Tensor:
        """Logits of ``P(y > k)``, decreasing, ``(samples, classes - 1)``."""
        outputs = at_least_float32(outputs)
        if self.thresholds:
            return outputs.reshape(-1, 1) - host_double(self.thresholds).to(outputs)
        places = _MIN_DISTANCE * torch.arange(outputs.shape[1], device=outputs.device)
        return (outputs + places).cummin(dim=1).values - places

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_probs = self.log_probs(outputs)
        # clamped: `validation_error` may not have been read yet
        labels = targets.long().to(log_probs.device).clamp(0, log_probs.shape[1] - 1)
        return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw)
        cumulative = self.log_probs(outputs).exp().to(u.dtype).cumsum(1)
        return torch.searchsorted(cumulative[:, :-1].contiguous(), u.contiguous()).squeeze(1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Of one latent output, or of conditional logits, whose Fisher is diagonal."""
        if self.thresholds:
            scores = torch.stack([self._score_of(outputs, label) for label in range(self.classes(1))], dim=1)
            probs = self.log_probs(outputs).exp()
            return (probs * scores.reshape(probs.shape).square()).sum(1).sqrt().reshape(outputs.shape)
        logits = at_least_float32(outputs)
        passed = F.logsigmoid(logits).cumsum(1) - F.logsigmoid(logits)  # of P(y >= k)
        return (0.5 * (passed + F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        """One an output; of cumulative logits one a class."""
        if not self.cumulative:
            yield from super().exact_factors(outputs)
            return
        probs = self.log_probs(outputs).exp()
        for label in range(probs.shape[1]):
            yield probs[:, label : label + 1].sqrt() * self._score_of(outputs, label)

    def _score_of(self, outputs: Tensor, label: int) -> Tensor:
        return self.score(outputs, torch.full((len(outputs),), label, device=outputs.device))

    def _at_nodes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int
    ) -> tuple[Tensor, Tensor]:
        """By Gauss-Hermite quadrature for one output, by quasi-random draws for several."""
        if mean[0].numel() > 1:
            return self._at_draws(mean, variance, targets, n_draws)

        def at(outputs: Tensor) -> Tensor:  # (nodes, samples)
            labels = targets.flatten().expand(outputs.shape).flatten()
            return self.log_prob(outputs.reshape(-1, 1), labels).reshape(outputs.shape)

        return at_nodes(at, mean.flatten(), variance.flatten())

    def entropy(self, outputs: Tensor) -> Tensor:
        return entropy_of(self.log_probs(as_double(outputs)))

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        return divergence_of_classes(self.log_probs(outputs), prediction.log_probs)

    def classes(self, outputs: int) -> int:
        return len(self.thresholds) + 1 if self.thresholds else outputs + 1

    def predicted_class(self, outputs: Tensor) -> Tensor:
        return self.log_probs(outputs).argmax(1)

    def from_blocks(self, blocks: Iterable[Tensor]) -> OrdinalPrediction:
        outputs = at_least_float32(torch.cat(list(blocks)))
        outputs = outputs.unsqueeze(-1) if outputs.ndim == 2 else outputs
        return self._averaged(outputs, *moments_of([outputs]))

    def from_gaussian(self, outputs: OutputGaussian) -> OrdinalPrediction:
        """By quasi-random draws of the outputs, with their covariance where it is known."""
        mean = outputs.mean.reshape(outputs.mean.shape[0], -1)
        variance = outputs.variance.reshape(mean.shape)
        return self._averaged(outputs._replace(mean=mean, variance=variance).draws(), mean, variance)

    def _averaged(self, draws: Tensor, mean: Tensor, variance: Tensor) -> OrdinalPrediction:
        """The prediction from draws ``(draws, batch, outputs)``, and mean and variance of the outputs."""
        log_probs = self.log_probs(draws.flatten(0, 1)).unflatten(0, draws.shape[:2])
        drawn = ClassPrediction.from_logits(log_probs)  # whose softmax they are themselves
        fields: dict[str, Any] = vars(drawn) | {"logits_mean": mean, "logits_variance": variance}
        return OrdinalPrediction(**fields)


def _increasing(thresholds: Sequence[float] | Tensor) -> tuple[float, ...]:
    """The thresholds as plain numbers.

    Raises:
        PosthocUQError: they are no numbers, or do not increase.
    """
    try:
        numbers = host_double(thresholds).detach().flatten()
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"thresholds must be a list of increasing numbers, not a {type(thresholds).__name__}."
        ) from None
    finite = bool(torch.isfinite(numbers).all())
    if numbers.numel() == 0 or not finite or bool((numbers.diff() <= 0).any()):
        raise PosthocUQError(f"thresholds must be finite and increase, not {numbers.tolist()}.")
    return tuple(numbers.tolist())


@dataclass(frozen=True, eq=False, repr=False)
class OrdinalPrediction(ClassPrediction):
    """A `ClassPrediction` of classes 0, 1, ... that have an order. `logits_mean` and `logits_variance` are of the
    model's own outputs: (batch, classes - 1), or (batch, 1) with thresholds.
    """

    _computed: ClassVar[dict[str, tuple[str, ...]]] = {**ClassPrediction._computed, "mean": ()}

    def _fits(self, logits: int, classes: int) -> bool:
        return logits in (1, classes - 1)

    def cdf(self) -> Tensor:
        """(batch, classes): the probability that the class is at most each of them."""
        return self.probs.cumsum(-1).clamp(max=1)

    @property
    def mean(self) -> Tensor:
        """(batch,): the mean class, with classes counted 0, 1, ..."""
        ranks = torch.arange(self.probs.shape[1], device=self.probs.device)
        return (self.probs * ranks).sum(-1)

    @property
    def variance(self) -> Tensor:
        """(batch,): the variance of the class, with classes counted 0, 1, ..."""
        ranks = torch.arange(self.probs.shape[1], device=self.probs.device)
        return (self.probs * (ranks - self.mean.unsqueeze(-1)).square()).sum(-1)

    def quantile(self, q: float) -> Tensor:
        """(batch,), int64: the first class at which `cdf` reaches `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        return (self.cdf()[:, :-1] < check_probability("q", q)).sum(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Classes (batch,) between which, both included, the class falls with probability `level` or more; where the
        posterior has held-out scores that apply, the lowest and the highest class of the `set`, which promise it.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, or there are too few held-out scores for it.
        """
        if isinstance(self.promises, ConformalScores):
            chosen = self.set(level).long()
            return chosen.argmax(-1), chosen.shape[-1] - 1 - chosen.flip(-1).argmax(-1)
        check_probability("level", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """The measures of classes; the ranked probability score, the mean absolute error of the median class, and
        Cohen's kappa with quadratic weights.
        """
        return super().quality(targets, bins) | {
            "rps": metrics.ranked_probability_score(self.probs, targets),
            "mae": float(as_double((self.quantile(0.5) - targets.to(self.probs.device)).abs()).mean()),
            "quadratic_kappa": metrics.quadratic_kappa(self.predicted(), targets, self.probs.shape[1]),
        }
