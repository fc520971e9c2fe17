"""The methods and attributes that all predictions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from posthoc_uq.errors import NotAnsweredError, PosthocUQError
from posthoc_uq.predictions.samples import known_novelty

Self = TypeVar("Self", bound="Prediction")


class Prediction(ABC):
    """The predictive distribution of a batch's targets. Subclasses are frozen dataclasses of tensors whose first
    dimension counts the inputs.

    An attribute that only another kind of prediction has raises an error that says so.

    Attributes:
        of: the likelihoods it is for, as error messages name them.
        kind: ``"classes"``, ``"values"`` or ``"draws"``: which of the subclasses it is.
        novelty_ratio: (batch,), in (0, 1], the share of the prior's uncertainty that the data left; None where it was
            not asked for, or the posterior keeps nothing to tell it by.
    """

    of: ClassVar[str] = "a likelihood of its own"
    kind: ClassVar[str]
    novelty_ratio: Tensor | None

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            this_kind = type(self)
            kinds = sorted(Prediction.__subclasses__(), key=lambda kind: kind.kind == "draws")
            known = {kind: {*dir(kind), *getattr(kind, "__dataclass_fields__", ())} for kind in kinds}
            others = [kind for kind in kinds if kind is not this_kind and name in known[kind]]
            if name.startswith("_") or name in dir(this_kind) or not others:
                object.__getattribute__(self, name)  # raises the usual error
            raise NotAnsweredError(
                f"A {this_kind.__name__} has no {name!r}; a {others[0].__name__} has, which is what a posterior with "
                f"{others[0].of} predicts."
            )

    @abstractmethod
    def __len__(self) -> int:
        """Number of inputs."""

    @property
    def classes(self) -> int | None:
        """How many classes have a probability; None where no classes are predicted."""
        return None

    @property
    @abstractmethod
    def outputs_mean(self) -> Tensor:
        """(batch, ...), mean of the model's outputs over the weights, in the units and the shape of the outputs."""

    @property
    @abstractmethod
    def default_score(self) -> str:
        """The name of the score used where none is named."""

    @abstractmethod
    def epistemic(self) -> Tensor:
        """(batch,): the epistemic uncertainty, a variance over the weights; the mean over outputs."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the predictive probability, or density, of the given targets."""

    @abstractmethod
    def fitting(self, targets: Tensor) -> Tensor:
        """Targets as a loader gives them, in the shape and type that `log_prob` and the measures take.

        Raises:
            PosthocUQError: they do not fit this prediction.
        """

    @abstractmethod
    def scores(self) -> dict[str, Tensor]:
        """All known uncertainty scores by name, each (batch,), larger where the prediction is less certain; see
        `posthoc_uq.predictions.scores.SCORES`.
        """

    @abstractmethod
    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Measures of how good the prediction is for these targets (as `fitting` gives them), by name.

        Args:
            targets: of all inputs.
            bins: of calibration errors.
        """

    @abstractmethod
    def losses(self, targets: Tensor) -> Tensor:
        """(batch,), float64: the loss of each input's prediction, by which selective prediction is judged."""

    @abstractmethod
    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """The quality on the remaining inputs when those with the largest scores are referred, by name.

        Args:
            scores: (batch,).
            targets: of all inputs.
            rates: shares of the inputs that are referred.
        """

    @abstractmethod
    def tensors(self) -> NamedTuple:
        """The main tensors as a named tuple, the form in which an exported program gives them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Tensor]:
        """Tensors by name, and the scores computed from them; unknown ones are left out."""

    @abstractmethod
    def to(self: Self, device: torch.device | str) -> Self:
        """The same prediction with its tensors on `device`."""

    @staticmethod
    @abstractmethod
    def cat(predictions: Sequence[Any]) -> Any:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or predictions that do not belong together.
        """

    def entropy(self) -> Tensor:
        """(batch,), in nats: the entropy of the target.

        Raises:
            PosthocUQError: this kind of prediction has no entropy.
        """
        raise PosthocUQError(
            f"A {type(self).__name__} has no entropy; its scores are {tuple(self.scores())}."
        )

    def novelty(self) -> Tensor:
        """(batch,), in (0, 1]: how much of the prior's uncertainty the data left at an input; larger for inputs unlike
        those of the training. See `Predictor.novelty`.

        Raises:
            PosthocUQError: the prediction does not know it.
        """
        return known_novelty(self.novelty_ratio)

    def with_novelty(self: Self, ratio: Tensor | None) -> Self:
        """The same prediction with its novelty (batch,), or itself where that is None."""
        return self if ratio is None else replace(cast(Any, self), novelty_ratio=ratio)

    def numbers(self) -> dict[str, Tensor]:
        """The tensors that it keeps, by name, (batch, ...) each."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.ndim and len(value) == len(self)
        }

    def of_one_network(self: Self) -> Self:
        """The same without the parts that need several sets of weights."""
        return self


def cat(predictions: Sequence[Prediction]) -> Prediction:
    """Predictions of several batches as one, in order.

    Raises:
        PosthocUQError: nothing to join, or predictions that do not belong together.
    """
    if not predictions:
        raise PosthocUQError("cat needs at least one prediction.")
    kinds = {prediction.kind for prediction in predictions}
    if len(kinds) > 1:
        raise PosthocUQError(
            f"cat got predictions of {' and of '.join(sorted(kinds))}; they cannot be one prediction."
        )
    return predictions[0].cat(predictions)
