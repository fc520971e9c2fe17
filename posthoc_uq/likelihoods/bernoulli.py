"""Labels 0 and 1 of one logit each: one a sample (binary), or several that a sample may have together (multilabel).
Floats between 0 and 1 are probabilities of the label 1 (soft labels), as for `torch.nn.BCEWithLogitsLoss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import pi
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double, at_least_float32
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.class_prediction import (
    ClassPrediction,
    LogitsPrediction,
    classes_of_draws,
    classes_of_gaussian,
    divergence_of_classes,
    entropy_of,
)
from posthoc_uq.likelihoods.conformal import SET_SIZE, Coverage, SetScore, TargetScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, LINKS, OutputGaussian
from posthoc_uq.likelihoods.labels import NOT_SHARES, BinaryLayout, are_whole, refuse_soft, soft_log_prob
from posthoc_uq.likelihoods.likelihood import Faults, Likelihood, last_function
from posthoc_uq.likelihoods.positions import AtPositions, ChannelFields, Channelled, PositionPrediction
from posthoc_uq.likelihoods.prediction import Missing, OnDemand


class _Labels(Channelled, ABC):
    """Independent labels 0 and 1, each of one logit. With positions, such as pixels, outputs and labels are ``(samples,
    labels, *positions)``, or ``(samples, *positions, labels)`` with ``channel_dim=-1``.
    """

    fields: ClassVar[type[Record]] = ChannelFields
    logits: ClassVar[bool] = True
    class_logits: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    links: ClassVar[tuple[str, ...]] = LINKS

    def __init__(self, *, channel_dim: int = 1, missing: Missing = "error") -> None:
        self._set_channel_dim(channel_dim)
        self._take_missing(missing)

    def distribution(self, outputs: Tensor) -> Distribution:
        return torch.distributions.Bernoulli(logits=outputs, validate_args=False)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw, outputs[0].numel()).reshape(outputs.shape)
        return (u < at_least_float32(outputs).sigmoid()).long()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.reshape_targets(outputs, targets)
        return self.where_there(at_least_float32(outputs).sigmoid() - targets, targets)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        # E_y (p - y)^2 = p (1 - p)
        logits = at_least_float32(outputs)
        return (logits.sigmoid() * (-logits).sigmoid()).sqrt()

    @abstractmethod
    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        """Labels that are neither 0 nor 1 nor probabilities; a subclass checks the shapes first."""
        if targets is not None:
            known = self.in_support(targets)
            wrong = ~((known >= 0) & (known <= 1)).all()
            yield wrong, lambda: NOT_SHARES.format(self.name) + self._hint_of_missing(targets)

    def looks_like_probabilities(self, outputs: Tensor) -> bool:
        """The outputs come out of a sigmoid."""
        return last_function(outputs).startswith("Sigmoid")

    def entropy(self, outputs: Tensor) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is None:
            return super().entropy(outputs)
        return super().entropy(layout.rows(outputs)).reshape(len(outputs), -1).mean(1)

    def divergence_of_rows(self, outputs: Tensor, prediction: Any) -> Tensor:
        """In closed form; the mean over labels, so that a budget does not depend on their number."""
        logits = at_least_float32(outputs)
        logits = logits.flatten(1) if logits.ndim > 1 else logits.unsqueeze(1)
        logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)
        return divergence_of_classes(logs, prediction.log_probs.reshape(logs.shape)).mean(1)


class Bernoulli(_Labels):
    """One logit a sample: outputs ``(samples,)`` or ``(samples, 1)``, targets 0 or 1 of either shape, or
    probabilities of 1; of each pixel or token both are ``(samples, 1, *positions)``. Predictions have the two classes.

    Args:
        channel_dim: the dimension of 1 where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out labels that are NaN.

    Example:
        ```python
        net, x = nn.Linear(2, 1), torch.randn(30, 2)
        data = [(x, (x[:, 0] > 0).float())]
        posterior = uq.fit(net, data, likelihood=uq.Bernoulli())
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.probs[:, 1], prediction.entropy())
        ```
    """

    name = "binary"
    _at_nodes = Likelihood._at_draws  # quasi-random draws, as for several classes

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        if outputs.ndim > 1 and outputs.shape[self.channel_axis(outputs)] != 1:
            raise PosthocUQError(
                f"likelihood='binary' needs outputs of shape (samples,), (samples, 1) or (samples, 1, *positions), and "
                f"the model gives {tuple(outputs.shape)}. Several labels a sample are likelihood='multilabel'; one "
                f"logit of each position gets its dimension of 1, as its labels do, by output=lambda z: "
                f"z.unsqueeze({self.channel_dim})."
            )
        self.check_positions(outputs, targets)
        if targets is not None and targets.numel() != outputs.numel():
            raise PosthocUQError(
                f"{outputs.shape[0]} samples need as many labels, not {tuple(targets.shape)}."
            )
        yield from super().faults(outputs, targets)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        if outputs.ndim > 2:
            return super().draw(outputs, keys, draw)
        u = self.uniforms(outputs, keys, draw).squeeze(1)
        return (u < at_least_float32(outputs).sigmoid().flatten()).long()

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """By the probit approximation, ``sigmoid(m / sqrt(1 + pi v / 8))``; see `classes_of_gaussian`."""
        return self.log_prob(
            at_least_float32(mean) * (1 + pi / 8 * at_least_float32(variance)).rsqrt(), targets
        )

    def regression_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return None if outputs.ndim > 2 else targets.reshape(len(outputs), 1)

    def classes(self, outputs: int) -> int:
        return 2

    def predicted_class(self, outputs: Tensor) -> Tensor:
        """The class of every sample, or of every position, ``(samples * positions,)``."""
        return (outputs.flatten() > 0).long()

    def top_probability(self, outputs: Tensor) -> Tensor | None:
        return at_least_float32(outputs).reshape(-1).abs().sigmoid() if outputs.ndim < 3 else None

    def rows_from_blocks(self, blocks: Iterable[Tensor]) -> ClassPrediction:
        return classes_of_draws(blocks, binary=True)

    def rows_from_gaussian(self, outputs: OutputGaussian) -> ClassPrediction:
        return classes_of_gaussian(outputs, binary=True)

    def at_positions(self, rows: Any, positions: tuple[int, ...]) -> PositionPrediction:
        return PositionPrediction(rows, positions, BinaryLayout(self.channel_dim), missing=self.missing)


class Multilabel(_Labels):
    """Independent labels: outputs ``(samples, labels)`` are logits, targets 0 or 1 of the same shape, or
    probabilities of 1.

    Args:
        channel_dim: the dimension of the labels where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out labels that are NaN, each by itself.

    Example:
        ```python
        net, x = nn.Linear(2, 3), torch.randn(30, 2)
        data = [(x, (x @ torch.randn(2, 3) > 0).float())]
        posterior = uq.fit(net, data, likelihood=uq.Multilabel())
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.probs, prediction.predicted())
        ```
    """

    name = "multilabel"

    def at_positions(self, rows: Any, positions: tuple[int, ...]) -> AtPositions:
        from posthoc_uq.likelihoods.maps import LabelMapPrediction

        return LabelMapPrediction(rows, positions, self.layout, missing=self.missing)

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        if outputs.ndim < 2:
            raise PosthocUQError(
                f"likelihood='multilabel' needs outputs of shape (samples, labels), and the model gives "
                f"{tuple(outputs.shape)}."
            )
        self.check_positions(outputs, targets)
        if targets is not None and targets.shape != outputs.shape:
            raise PosthocUQError(
                f"Labels must be 0 or 1 for each of {outputs.shape[1]} labels, shaped {tuple(outputs.shape)} like the "
                f"outputs, not {tuple(targets.shape)}; one class an input is likelihood='classification'."
            )
        yield from super().faults(outputs, targets)

    def rows_from_blocks(self, blocks: Iterable[Tensor]) -> MultilabelPrediction:
        labels = 1

        def rows() -> Iterator[Tensor]:
            nonlocal labels
            for block in blocks:
                if block.ndim != 3:
                    raise PosthocUQError(f"logits must be (draws, batch, labels), not {tuple(block.shape)}.")
                labels = block.shape[2]
                yield block.flatten(1)

        return MultilabelPrediction.of_pairs(classes_of_draws(rows(), binary=True), labels, self.missing)

    def rows_from_gaussian(self, outputs: OutputGaussian) -> MultilabelPrediction:
        """Every label by itself."""
        flat = outputs._replace(mean=outputs.mean.reshape(-1), variance=outputs.variance.reshape(-1))
        binary, labels = classes_of_gaussian(flat, binary=True), outputs.mean.shape[1]
        return MultilabelPrediction.of_pairs(binary, labels, self.missing)


@dataclass(frozen=True, eq=False, repr=False)
class MultilabelPrediction(LogitsPrediction):
    """The probability of every label, and how far the weights disagree about it.

    Labels count as independent: what concerns all labels of an input together (`entropy`, `log_prob`) is the sum over
    labels, without what the weights make them have in common.

    Attributes:
        probs: (batch, labels), the predictive probabilities of having the label: means over the weights of
            sigmoid(logit).
        logits_mean: (batch, labels), mean of the logits over the weights.
        logits_variance: same shape, their variance.
        sample_entropy: (batch, labels), mean over the weights of the label's entropy in nats; None without draws.
        log_probs: (batch, labels, 2), logarithms of the probabilities of not having and of having the label.
        probs_variance: (batch, labels), variance over draws of sigmoid(logit); None without draws.
        novelty_ratio: (batch,), see `Prediction`.

    Raises:
        PosthocUQError: the shapes do not fit each other.
    """

    kind: ClassVar[str] = "labels"
    loss_name: ClassVar[str] = "hamming_loss"
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {
        **LogitsPrediction._computed,
        "label_entropy": (),
        "label_mutual_information": ("sample_entropy",),
    }

    probs: Annotated[Tensor, "batch labels"]
    logits_mean: Annotated[Tensor, "batch labels"]
    logits_variance: Annotated[Tensor, "batch labels"]
    sample_entropy: Annotated[Tensor | None, "batch labels"] = OnDemand()  # type: ignore[assignment]  # noqa: RUF009
    log_probs: Annotated[Tensor, "batch labels pair"] = None  # type: ignore[assignment]  # of `probs`
    probs_variance: Annotated[Tensor | None, "batch labels"] = OnDemand()  # type: ignore[assignment]  # noqa: RUF009

    def __post_init__(self) -> None:
        if self.log_probs is None:
            pairs = torch.stack([1 - self.probs, self.probs], dim=-1)
            object.__setattr__(self, "log_probs", at_least_float32(pairs).log())
        super().__post_init__()

    @classmethod
    def of_pairs(
        cls, binary: ClassPrediction, labels: int, missing: Missing = "error"
    ) -> MultilabelPrediction:
        """From the prediction of every label by itself.

        Args:
            binary: of ``batch * labels`` single logits, the labels of one input side by side.
            labels: how many an input has.
            missing: of the likelihood.
        """
        logits = binary.logits
        # else they are computed when they are read
        entropy = binary.sample_entropy if logits is None else None
        variance = binary.probs_variance if logits is None else None
        return cls(
            binary.probs[:, 1].reshape(-1, labels),
            binary.logits_mean.reshape(-1, labels),
            binary.logits_variance.reshape(-1, labels),
            None if entropy is None else entropy.reshape(-1, labels),
            binary.log_probs.reshape(-1, labels, 2),
            None if variance is None else variance[:, 1].reshape(-1, labels),
            logits=None if logits is None else logits.mapped(lambda t: t.unflatten(0, (-1, labels))),
            missing=missing,
        )

    def _computed_later(self, name: str) -> dict[str, Tensor]:
        found = super()._computed_later(name)
        variance = found.get("probs_variance")
        if variance is not None and variance.ndim > self.probs.ndim:  # of both classes of each label
            found |= {"probs_variance": variance[..., 1]}
        return found

    @property
    def categories(self) -> int:
        """How many labels an input may have."""
        return self.probs.shape[1]

    def _decided(self, label: Callable[[int], str], tops: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        likely = (self.probs >= 0.5).tolist()
        return [{"prediction": [label(i) for i, has in enumerate(row) if has]} for row in likely]

    def label_entropy(self) -> Tensor:
        """(batch, labels), in nats: the entropy of every label's mean probability."""
        return entropy_of(self.log_probs)

    def entropy(self) -> Tensor:
        """(batch,), in nats: the sum of the labels' entropies."""
        return self.label_entropy().sum(-1)

    def label_mutual_information(self) -> Tensor:
        """(batch, labels), in nats: the information that the weights hold about each label; never below 0.

        Raises:
            PosthocUQError: the prediction was made without draws.
        """
        return (self.label_entropy() - self._known_sample_entropy()).clamp(min=0)

    def mutual_information(self) -> Tensor:
        """(batch,), in nats: the sum over labels of `label_mutual_information`."""
        return self.label_mutual_information().sum(-1)

    def max_probability(self) -> Tensor:
        """(batch,): the probability that all decisions of `predicted` are right, the product over labels."""
        return self.log_probs.amax(-1).sum(-1).exp()

    def predicted(self, threshold: float = 0.5) -> Tensor:
        """(batch, labels), boolean: the labels whose probability is above the threshold."""
        return self.probs > threshold

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: the sum over labels of the log of the mean probability; of soft labels the mean over them,
        of missing ones nothing.

        Args:
            targets: (batch, labels), 0 or 1, or probabilities of 1.

        Raises:
            PosthocUQError: wrong shape, or other values.
        """
        targets = self.fitting(targets).to(self.probs.device)
        if targets.is_floating_point():
            return soft_log_prob(torch.stack([1 - targets, targets], -1), self.log_probs).sum(-1)
        return self.log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).sum(-1)

    def fitting(self, targets: Tensor) -> Tensor:
        """The labels as int64; soft labels as they are.

        Raises:
            PosthocUQError: wrong shape, or values below 0 or above 1.
        """
        targets = as_targets(targets)
        if targets.shape != self.probs.shape:
            raise PosthocUQError(
                f"Labels must be shaped like the probabilities, {tuple(self.probs.shape)}, not {tuple(targets.shape)}."
            )
        fits = (targets >= 0) & (targets <= 1)
        if not bool((fits if self.missing == "error" else fits | targets.isnan()).all()):
            raise PosthocUQError(NOT_SHARES.format("multilabel"))
        return targets.long() if are_whole(targets) else targets

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: the score of every label.

        Raises:
            PosthocUQError: labels are soft.
        """
        known = targets if self.missing == "error" else targets.nan_to_num(0.0)
        refuse_soft(known)
        return TargetScores("label", 1 - as_double(self.probs), known.long())

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`: an entry for every label that applies."""
        chosen = self.set(level)
        inputs, labels = (targets > 0.5).nonzero(as_tuple=True)
        covered, sizes = as_double(chosen[inputs, labels]), as_double(chosen.sum(1))[inputs]
        return Coverage(covered, sizes, inputs, labels, SET_SIZE)

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Mean average precision, F1, Hamming loss, NLL (sum over labels), Brier score, ECE, mean entropy. The first
        three take soft labels above 0.5 as 1, the others as they are. Over all labels that are there.
        """
        labels, there = (targets > 0.5).long(), self.there(targets)
        known = torch.ones_like(labels).bool() if there is None else there
        squares = (as_double(self.probs) - as_double(targets.to(self.probs.device))).square()
        wrong = self.predicted() != labels.to(self.probs.device)
        return {
            "mean_average_precision": metrics.mean_average_precision(self.probs, labels, there),
            "f1_macro": metrics.f1_score(self.probs, labels, "macro", there),
            "f1_micro": metrics.f1_score(self.probs, labels, "micro", there),
            "hamming_loss": float(as_double(wrong[known]).mean()),
            "nll": -float(as_double(self.log_prob(targets)).mean()),
            "brier": float(squares[known].mean()),
            "ece": metrics.multilabel_calibration_error(self.probs, targets, bins, there),
            "mean_entropy": float(as_double(self.entropy()).mean()),
        }

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the share of the labels that are decided wrongly; soft ones above 0.5 count as 1."""
        wrong = as_double(self.predicted() != (targets > 0.5).to(self.probs.device))
        return self.mean_of_there(wrong, targets)
