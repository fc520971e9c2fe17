"""`Prediction`, the base class: tensors of a batch, declared once, and how good and how certain the prediction is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from posthoc_uq.core.devices import as_double, at_least_float32, to_device
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.registry import shown_names
from posthoc_uq.likelihoods import metrics, selective
from posthoc_uq.likelihoods.conformal import (
    INTERVAL_WIDTH,
    ConformalScores,
    Coverage,
    SetScore,
    TargetScores,
    applying,
    without_by_class,
)
from posthoc_uq.likelihoods.selective import SCORES

Missing = Literal["error", "ignore"]
"""What a NaN among the targets is: an error, or a target that is not there, which every sum leaves out."""
Support = Literal["real", "positive"]
"""Which values targets can have: any, or none below 0."""
_MAX_WIDTHS = 200  # of intervals that take long

AnyPrediction = TypeVar("AnyPrediction", bound="Prediction")


@dataclass(frozen=True)
class Unread:
    """What a field of a `Prediction` holds whose numbers are computed when they are first read.

    Attributes:
        compute: from `inputs` to the numbers ``(batch, ...)``, finite where these are.
        inputs: ``(batch, ...)``.
    """

    compute: Callable[[Tensor], Tensor]
    inputs: Tensor


class ScoresWhenRead(Mapping[str, Tensor]):
    """Uncertainty scores by name, each computed when it is first read: those over draws of many classes take longer
    than the prediction.
    """

    def __init__(self, compute: Mapping[str, Callable[[], Tensor]]) -> None:
        self._compute, self._found = compute, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._found:
            self._found[name] = self._compute[name]()
        return self._found[name]

    def __contains__(self, name: object) -> bool:  # a Mapping's own would compute the score
        return name in self._compute

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute)

    def __len__(self) -> int:
        return len(self._compute)

    def __repr__(self) -> str:
        return f"scores {tuple(self)}"


class Remade:
    """Another prediction of the same inputs, made when it is first read.

    Args:
        make: it.
    """

    def __init__(self, make: Callable[[], Prediction]) -> None:
        self._make: Callable[[], Prediction] | None = make
        self._made: Prediction | None = None

    def made(self) -> Prediction:
        """It; what it is made of is not kept."""
        if self._made is None:
            assert self._make is not None
            self._made, self._make = self._make(), None
        return self._made

    def then(self, change: Callable[[Prediction], Prediction]) -> Remade:
        """What a function makes of it."""
        return Remade(lambda: change(self.made()))


class OnDemand:
    """The default of a field of a `Prediction` that is computed when it is first read, and kept: from an `Unread`, or
    by `Prediction._computed_later` where the field is None.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, prediction: Any, owner: type | None = None) -> Any:
        if prediction is None:  # a dataclass asks for the default
            return None
        stored = vars(prediction)
        value = stored[self._name]
        if value is None:
            stored.update(prediction._computed_later(self._name))
        elif isinstance(value, Unread):
            stored[self._name] = value.compute(value.inputs)
        return stored[self._name]

    def __set__(self, prediction: Any, value: Any) -> None:
        vars(prediction)[self._name] = value


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prediction(ABC):
    """The predictive distribution of a batch's targets.

    A subclass is a frozen dataclass whose tensors are declared with the names of their dimensions, the inputs first:
    ``Annotated[Tensor | None, "batch classes"]``, where ``*name`` stands for any number of dimensions, and ``int``
    after the text says that the numbers are whole. Checks of shapes, `to`, `cat`, `picked`, `numbers` and ``repr``
    follow from that. Numbers are kept in float32 at least, whatever the model ran in. A NaN from the model stays a NaN
    in its row, and does not affect other rows.

    Attributes:
        kind: ``"classes"``, ``"labels"``, ``"positions"``, ``"values"`` or ``"draws"``.
        default_score: the name of the score used where none is named.
        loss_name: what the mean of `losses` is called; of ``"rmse"`` its root is shown, of ``"accuracy"`` 1 less it.
        novelty_ratio: (batch,), in (0, 1], the share of the prior's uncertainty that the data left; with positions also
            (batch, *positions). None where it was not asked for, or the posterior has nothing to compute it from. Of a
            predictor's call it is computed when it is first read: until then the prediction holds the inputs of the
            last layer, up to 1 MiB of them (`posthoc_uq.heads.novelty`), and the posterior's Grams. Copies to another
            device, joined ones, pickles and `Predictor.predict` have it computed.
        promises: the held-out scores by which sets, intervals and p-values keep their promise; a text where they do not
            apply, which says why; None where `posthoc_uq.calibrate` stored none.
        sample_keys: (batch,), hashes of the inputs, where sets are randomised.
        before_retuning: this prediction at the hyperparameters by which held-out scores were measured, where all
            held-out labels have since chosen others; else None. `at_promises` gives it.
        missing: of the likelihood: with ``"ignore"`` targets that are NaN are left out of all that is computed of
            targets.

    Raises:
        PosthocUQError: the shapes do not fit each other, or numbers are of the wrong type.

    Example:
        ```python
        print(prediction.scores().keys())  # of each, larger is less sure
        print(prediction.quality(labels)["nll"])
        first = prediction.picked(slice(3)).to("cpu")
        ```
    """

    kind: ClassVar[str]
    default_score: ClassVar[str]
    loss_name: ClassVar[str]
    _dims: ClassVar[dict[str, tuple[list[str], bool]]]
    _tuples: ClassVar[tuple[str, ...]] = ()  # fields with several tensors, each with one row an input
    _over_draws: ClassVar[tuple[str, ...]] = ()  # fields that one network alone does not have
    _not_shown: ClassVar[tuple[str, ...]] = ()  # fields that `to_dict` leaves out
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {}  # what it has besides, by the fields that each needs
    _hidden: ClassVar[tuple[str, ...]] = (  # from `dir`: what the package alone calls
        *(
            "at_promises",
            "before_retuning",
            "categories",
            "changed",
            "completed",
            "coverage",
            "default_score",
            "fitting",
            "known_promises",
        ),
        *("losses", "loss_name", "mean_of_there", "missing", "mistakes", "mixed", "naming", "novelty_ratio"),
        *(
            "numbers",
            "of_one_network",
            "retained_quality",
            "sample_keys",
            "shown_loss",
            "support",
            "target_scores",
        ),
        *("tensors", "there", "unshifted", "value_columns", "with_novelty", "within"),
    )

    novelty_ratio: Annotated[Tensor | None, "batch *novelty"] = OnDemand()  # type: ignore[assignment]
    promises: ConformalScores | str | None = None
    sample_keys: Annotated[Tensor | None, "batch", int] = None
    before_retuning: Remade | None = None
    missing: Missing = "error"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True)
        for name in ("novelty_ratio", "sample_keys"):  # last
            hints[name] = hints.pop(name)
        declared = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
        cls._dims = {name: (found[0].split(), int in found) for name, found in declared.items() if found}

    def __post_init__(self) -> None:
        sizes: dict[str, tuple[int, ...]] = {}
        for name, value in self._stored().items():
            dims, whole = self._dims[name]
            found = _named_sizes(dims, value)
            if found is None or any(sizes.setdefault(dim, size) != size for dim, size in found.items()):
                known = ", ".join(f"{dim}: {size}" for dim, size in sizes.items())
                raise PosthocUQError(
                    f"{name} must be ({', '.join(dims)}) with {known}, not {tuple(value.shape)}."
                )
            if whole and (value.is_floating_point() or value.is_complex()):
                raise PosthocUQError(f"{name} must be integers, not {value.dtype}.")
            vars(self)[name] = value if whole else at_least_float32(value)

    def __dir__(self) -> list[str]:
        values = type(self).set is Prediction.set  # which have no sets
        return [name for name in shown_names(self, Prediction) if name != "set" or not values]

    def __len__(self) -> int:
        """Number of inputs."""
        return next(iter(self._stored().values())).shape[0]

    def __repr__(self) -> str:
        """The class, the number of inputs and the other sizes of the first tensor."""
        name, (dims, _) = next(iter(self._dims.items()))
        sizes = (_named_sizes(dims, getattr(self, name)) or {}) | {"batch": ()}
        words = [f"{dim.strip('*')}={s[0] if len(s) == 1 else s}" for dim, s in sizes.items() if s]
        return f"{type(self).__name__}({', '.join([f'inputs={len(self)}', *words])})"

    def _stored(self) -> dict[str, Tensor]:
        """The tensors of the fields that are there already."""
        known = vars(self)
        return {name: known[name] for name in self._dims if isinstance(known[name], Tensor)}

    def _computed_later(self, name: str) -> dict[str, Tensor]:
        """A field that is `OnDemand`, and others that come with it; nothing where it is not known."""
        return {}

    def changed(self: AnyPrediction, **changes: Any) -> AnyPrediction:
        """The same with other fields; nothing is computed for it that is computed when it is read, unlike by
        `dataclasses.replace`.
        """
        known = vars(self)
        return type(self)(**{each.name: known[each.name] for each in fields(self)} | changes)

    def numbers(self) -> dict[str, Tensor]:
        """All tensors that are there already, by the names of their fields, (batch, ...) each; of an `Unread` field
        what its numbers are computed from.
        """
        known = {name: value for name in self._dims if (value := vars(self)[name]) is not None}
        return {name: value.inputs if isinstance(value, Unread) else value for name, value in known.items()}

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without anything `Unread`, which holds numbers of a posterior."""
        values = {
            name: getattr(self, name) for name, value in vars(self).items() if isinstance(value, Unread)
        }
        return vars(self) | values | {"before_retuning": self._remade(lambda other: other.completed())}

    def _remade(self, change: Callable[[Any], Any]) -> Remade | None:
        """What a function makes of `before_retuning`, made at once."""
        if self.before_retuning is None:
            return None
        other = self.before_retuning.then(change)
        other.made()
        return other

    def at_promises(self: AnyPrediction) -> AnyPrediction:
        """This prediction as held-out scores judge it, at the hyperparameters that no promising sample chose."""
        if self.before_retuning is None:
            return self
        known = vars(self)
        kept = {name: known[name] for name in ("novelty_ratio", "promises", "sample_keys")}
        return cast(AnyPrediction, self.before_retuning.made().changed(**kept))

    def completed(self: AnyPrediction) -> AnyPrediction:
        """The same with everything computed that otherwise is when it is first read, and without what that takes."""
        return self.changed(
            **{name: getattr(self, name) for name in self._dims},
            **dict.fromkeys(self._tuples),
            before_retuning=self._remade(lambda other: other.completed()),
        )

    def to(self: AnyPrediction, device: torch.device | str) -> AnyPrediction:
        """The same prediction with its tensors on `device`; it is completed first where that is another one."""
        moves = any(tensor.device != torch.device(device) for tensor in self._stored().values())
        whole = self.completed() if moves else self
        known = whole._stored()
        other = whole.before_retuning
        return whole.changed(
            **dict(zip(known, to_device(known.values(), device), strict=True)),
            before_retuning=None if other is None else other.then(lambda each: each.to(device)),
        )

    def picked(self: AnyPrediction, chosen: Tensor | slice) -> AnyPrediction:
        """The inputs where `chosen` (batch,) is true, or those of a slice."""
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Unread):
                changes[name] = replace(value, inputs=value.inputs[chosen])
            elif name in self._dims and value is not None:
                changes[name] = value[chosen]
            elif name in self._tuples and value is not None:
                changes[name] = value.mapped(lambda tensor: tensor[chosen])
            elif isinstance(value, Remade):
                changes[name] = value.then(lambda other: other.picked(chosen))
        return self.changed(**changes)

    @staticmethod
    def cat(predictions: Sequence[Any]) -> Any:
        """Predictions of several batches as one, in order; a field that one of them lacks is None in the result.

        Raises:
            PosthocUQError: nothing to join, or tensors of different shapes.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        joined: dict[str, Any] = {}
        for name in predictions[0]._tuples:
            values = [vars(prediction)[name] for prediction in predictions]
            alike = None not in values and len({value.kind for value in values}) == 1
            joined[name] = type(values[0]).cat(values) if alike else None
        later = any(value is not None for value in joined.values())
        for name in predictions[0]._dims:
            waits = later and name in predictions[0]._over_draws
            parts: list[Tensor] = [vars(p)[name] if waits else getattr(p, name) for p in predictions]
            whole = all(part is not None for part in parts)
            shapes = {tuple(part.shape[1:]) for part in parts if whole}
            if len(shapes) > 1:
                raise PosthocUQError(
                    f"cat got predictions whose {name} have different shapes: {sorted(shapes)}."
                )
            joined[name] = torch.cat(parts) if whole else None
        others = [prediction.before_retuning for prediction in predictions]
        known = [other for other in others if other is not None]
        whole = len(known) == len(predictions)
        joined["before_retuning"] = Remade(lambda: cat([other.made() for other in known])) if whole else None
        return predictions[0].changed(**joined)

    @property
    def classes(self) -> int | None:
        """How many classes have a probability; None where no classes are predicted."""
        return None

    @property
    def categories(self) -> int | None:
        """How many classes or labels have a probability, and so a name; None of values."""
        return self.classes

    def naming(self, names: Sequence[str] | None) -> Callable[[int], str]:
        """From the index of a class or label to its name, or to the index as a text without names.

        Raises:
            PosthocUQError: there are more or fewer names than classes.
        """
        if names is None:
            return str
        if self.categories not in (None, len(names)):
            raise PosthocUQError(
                f"There are {len(names)} class names, and the model has {self.categories} outputs."
            )
        return lambda index: str(names[index])

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """For each input what is predicted, as plain values that JSON can hold, on the CPU.

        Of one class an input ``prediction``, its ``index``, and ``top``, the most probable ones with their
        probabilities; of several labels those with a probability of at least one half; of positions ``shares`` of
        classes; of values, as far as they are known, ``mean``, ``standard_deviation``, ``epistemic_variance``, and
        ``lower`` and ``upper`` of the level. Where the posterior has held-out scores, classes and labels have a
        ``set``.

        Args:
            top_k: classes to name, the most probable or the most frequent.
            level: of intervals and sets.
            names: of classes or labels, by index.

        Raises:
            PosthocUQError: there are other names than classes, or too few held-out scores for the level.
        """
        lists = {name: column.tolist() for name, column in self.value_columns(level).items()}
        more = {"level": level} if "lower" in lists else {}
        return [{**{name: c[index] for name, c in lists.items()}, **more} for index in range(len(self))]

    def value_columns(self, level: float) -> dict[str, Tensor]:
        """What is known of predicted values by the name of its column, shaped like the target; see `answers`."""
        values, columns = cast(Any, self), dict[str, Tensor | None]()
        for name in ("mean", "standard_deviation", "epistemic_variance"):
            columns[name] = getattr(values, name, None)
        if hasattr(values, "interval"):
            columns["lower"], columns["upper"] = values.interval(level)
        return {name: column for name, column in columns.items() if column is not None}

    @property
    @abstractmethod
    def outputs_mean(self) -> Tensor:
        """(batch, ...), mean of the model's outputs over the weights, in the units and the shape of the outputs."""

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
    def scores(self) -> Mapping[str, Tensor]:
        """All known uncertainty scores by name (`SCORES`), each (batch,), larger where it is less certain. Those of
        classes are computed when they are read.
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

    def there(self, targets: Tensor) -> Tensor | None:
        """Which targets are there, booleans in their shape; None for all of them."""
        return None if self.missing == "error" else ~targets.isnan()

    def mean_of_there(self, values: Tensor, targets: Tensor) -> Tensor:
        """(batch,): the mean of the values of an input's targets, of those that are there."""
        if (there := self.there(targets)) is None:
            return by_input(values)
        shown = there.to(values.device).reshape(len(values), -1)
        return values.reshape(shown.shape).masked_fill(~shown, 0.0).sum(1) / shown.sum(1).clamp(min=1)

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """The mean loss on the remaining inputs when those with the largest scores are referred, by name.

        Args:
            scores: (batch,).
            targets: of all inputs.
            rates: shares of the inputs that are referred.
        """
        risk, measures = selective.risk_coverage(scores, self.losses(targets)).risk, dict[str, float]()
        for rate, count in zip(rates, selective.retained(rates, len(risk)), strict=True):
            measures[with_percent(f"{self.loss_name}_referred", rate)] = self.shown_loss(
                float(risk[count - 1])
            )
        return measures

    def shown_loss(self, mean: float) -> float:
        """A mean of `losses` as it is shown under the name `loss_name`."""
        return mean**0.5 if self.loss_name == "rmse" else 1 - mean if self.loss_name == "accuracy" else mean

    @abstractmethod
    def tensors(self) -> NamedTuple:
        """The main tensors as a named tuple, the form in which an exported program gives them."""

    def _novelty_like(self, scores: Tensor) -> Tensor:
        """The novelty, or NaN in the shape of `scores` where it is not known."""
        ratio = self.novelty_ratio
        return torch.full_like(scores, float("nan")) if ratio is None else ratio

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors by name, and what is computed from them; unknown ones are left out."""
        known = {name: getattr(self, name) for name in self._dims if name not in self._not_shown}
        values = {name: value for name, value in known.items() if value is not None}
        values.pop("sample_keys", None)
        if "novelty_ratio" in values:
            values["novelty"] = values.pop("novelty_ratio")
        for name, needed in self._computed.items():
            if all(getattr(self, each) is not None for each in needed):
                found: Any = getattr(self, name)
                values[name] = cast(Tensor, found() if callable(found) else found)
        return values

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
            PosthocUQError: it is not known.
        """
        if self.novelty_ratio is None:
            raise PosthocUQError(
                "This prediction has no novelty: the predictor was made with novelty=False, or the posterior has no "
                "statistics of the last layer's inputs, as after an update, or where a weight that the model's own "
                "code computes comes last. Fit again for these, or ask for predictor.novelty(x, of='top'), which goes "
                "by the posterior itself."
            )
        return self.novelty_ratio

    def with_novelty(self: AnyPrediction, ratio: Tensor | Unread | None) -> AnyPrediction:
        """The same prediction with its novelty (batch,), or itself where that is None."""
        if ratio is None or isinstance(ratio, Tensor):  # whose shape is checked
            return self if ratio is None else self.changed(novelty_ratio=ratio)
        other = object.__new__(type(self))
        vars(other).update(vars(self), novelty_ratio=ratio)
        return other

    def familiarity(self, score: str = "novelty") -> Tensor:
        """How usual an input is among the held-out ones, as a p-value: of new inputs like them at most a share a has
        one of at most a, whatever the model. ``(1 + #{held-out scores >= its score}) / (n + 1)`` (Vovk, Gammerman,
        Shafer 2005); see `posthoc_uq.calibrate`.

        Args:
            score: ``"novelty"``, the score by which predictions are uncertain (``"entropy"``, or of values
                ``"standard_deviation"``), or ``"joint"``: the most surprising of the two.

        Returns:
            (batch,), float64 in (0, 1], on the CPU; NaN where a score is.

        Raises:
            PosthocUQError: there are no held-out scores that apply, or the score is none of them.
        """
        return self.known_promises().p_values(self.at_promises().scores(), score)

    @without_by_class
    def set(self, level: float = 0.9, *, allow_empty: bool = False) -> Tensor:
        """Of predictions of classes: those that hold the right one with a promised probability."""
        raise PosthocUQError("Values have no sets of classes; prediction.interval(level) has their bounds.")

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores | None:
        """How badly targets fit, by which sets and intervals promise; by default None: nothing is promised of targets.

        Args:
            targets: as `fitting` gives them.
            sets: the score of classes.
            keys: (batch,), hashes of the inputs, where sets are randomised.

        Raises:
            PosthocUQError: the targets do not fit, or such predictions have no scores of this name.
        """
        return None

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """What a prediction with promises of targets keeps of them; by default of values, by `target_scores` and
        `interval`.

        Args:
            targets: as `fitting` gives them.
            level: that can be promised.
            allow_empty: whether sets of classes may be empty.
            widths: whether the widths of intervals are wanted.
        """
        keys = torch.zeros(len(self), dtype=torch.int64, device="cpu")
        found = self.at_promises().target_scores(targets, "lac", keys)
        assert found is not None  # there are promises of targets
        promises = self.known_promises()
        within = as_double(found.scores <= promises.bounds(found.kind, level, found.scores.shape[1]))
        assert promises.targets is not None  # `bounds` found them
        there, inputs = found.groups > 0, torch.arange(len(self), device=within.device)
        if len(promises.targets.scores) == 1:
            covered = within.masked_fill(~there, 1.0).amin(1)
        elif bool(there.all()):
            covered = within.mean(1)
        else:  # an entry for every target that is there
            covered, inputs = within[there], there.nonzero()[:, 0]
        if not widths:
            return Coverage(covered, covered.new_empty(0), inputs, None, INTERVAL_WIDTH)
        # bounds by a distribution function are found by bisection
        step = 1 if found.kind == "deviation" else -(-len(self) // _MAX_WIDTHS)
        some: Any = self.picked(slice(None, None, step))
        low, high = map(as_double, some.interval(level))
        each = (high - low).reshape(len(some), -1)
        sizes = each.mean(1) if len(covered) == len(self) else each[there[::step]]
        return Coverage(covered, sizes, inputs, None, INTERVAL_WIDTH)

    def mistakes(self, targets: Tensor) -> Tensor | None:
        """(batch,), bool: which predicted classes are wrong; None where not each input has one class."""
        return None

    @classmethod
    def mixed(cls, predictions: Sequence[Any]) -> Any:
        """The mixture of predictions of the same inputs by several networks, each with the same weight, of which the
        first is of this class; without novelty and promises.

        Raises:
            PosthocUQError: such predictions have no mixture.
        """
        raise PosthocUQError(
            f"A {cls.__name__} has no mixture with those of other networks; wrap each network by itself."
        )

    def unshifted(self: AnyPrediction) -> AnyPrediction:
        """The same for single positions: labels are then those that belong to each, whatever `next_token` says."""
        return self

    def known_promises(self) -> ConformalScores:
        """The held-out scores by which promises are made.

        Raises:
            PosthocUQError: there are none that apply.
        """
        return applying(self.promises)

    def of_one_network(self: AnyPrediction) -> AnyPrediction:
        """The same without the parts that need several sets of weights."""
        return self.changed(**dict.fromkeys(self._over_draws))


def _named_sizes(dims: Sequence[str], tensor: Tensor) -> dict[str, tuple[int, ...]] | None:
    """The sizes of a tensor by the names of its dimensions, ``*name`` for all others; None if they do not fit."""
    shape, single = tuple(tensor.shape), len(dims) - dims[-1].startswith("*")
    if len(shape) < single or (len(shape) > single == len(dims)):
        return None
    return dict(zip(dims, (*zip(shape[:single]), shape[single:]), strict=False))


def cat(predictions: Sequence[Prediction]) -> Prediction:
    """Predictions of several batches as one, in order.

    Raises:
        PosthocUQError: nothing to join, or predictions that do not belong together.
    """
    kinds = sorted({prediction.kind for prediction in predictions})
    if len(kinds) > 1:
        raise PosthocUQError(
            f"cat got predictions of {' and of '.join(kinds)}; they cannot be one prediction."
        )
    return (type(predictions[0]) if predictions else Prediction).cat(predictions)


# Scores


def score_of(prediction: Prediction, name: str) -> Tensor:
    """One score ``(batch,)`` of a prediction.

    Raises:
        PosthocUQError: there is no such score, or this prediction does not have it.
    """
    known = prediction.scores()
    if name in known:
        return known[name]
    if name not in SCORES:
        raise PosthocUQError(f"A score is one of {SCORES}, not {name!r}.{did_you_mean(name, SCORES)}")
    raise PosthocUQError(
        f"This prediction does not know the score {name!r}; it knows {tuple(known)}. Mutual information and the "
        f"variation ratio need head='sampling' or link='mc', novelty a posterior that keeps what it takes, and a head "
        f"without novelty=False."
    )


# What several kinds of predictions compute


def with_percent(name: str, share: float) -> str:
    """The name of a measure at a level, or at a share of referred inputs: ``"coverage_90"`` at 0.9."""
    return f"{name}_{100 * share:g}".replace(".", "_")


def by_input(values: Tensor) -> Tensor:
    """One number an input, ``(batch,)``: the mean over all other dimensions."""
    return values if values.ndim == 1 else values.flatten(1).mean(dim=-1)


def sampling_generator(n: int, generator: torch.Generator | None) -> torch.Generator:
    """The generator of `n` observations: the given one, or one that differs from call to call.

    Raises:
        PosthocUQError: `n` is below 1.
    """
    if n < 1:
        raise PosthocUQError(f"sample needs n of at least 1, not {n}.")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator


LEVELS = (0.5, 0.9, 0.95)
"""Of the intervals whose coverage is measured."""


def interval_quality(interval: Callable[[float], tuple[Tensor, Tensor]], targets: Tensor) -> dict[str, float]:
    """How often prediction intervals contain the target, and how wide they are.

    Args:
        interval: from a level, one of `LEVELS`, to lower and upper bounds.
        targets: of the shape of the bounds.
    """
    bounds = {level: interval(level) for level in LEVELS}
    coverages = {
        with_percent("coverage", level): metrics.interval_coverage(*pair, targets)
        for level, pair in bounds.items()
    }
    return coverages | {
        with_percent("sharpness", LEVELS[-1]): metrics.interval_sharpness(*bounds[LEVELS[-1]])
    }


# Predictions at the boundary of an exported program


class ClassTensors(NamedTuple):
    """A classification at the boundary of an exported program; see `ClassPrediction`.

    Attributes:
        probs: (batch, classes).
        logits_mean: (batch, classes), or (batch, 1) for one logit.
        logits_variance: of the same shape.
        entropy: (batch,), in nats.
        mutual_information: (batch,), in nats; NaN with ``link="probit"`` or ``"bridge"``, which do not know it.
        novelty: (batch,); NaN where it is not known.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor
    novelty: Tensor


class ValueTensors(NamedTuple):
    """A regression at the boundary of an exported program; see `RegressionPrediction`.

    Attributes:
        mean: (batch,) or (batch, outputs).
        variance: of the same shape: total, by weights and observation noise.
        epistemic_variance: of the same shape: the weights' part.
        novelty: (batch,); NaN where it is not known.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor
    novelty: Tensor


class RankedClassTensors(NamedTuple):
    """`ClassTensors` and p-values among held-out scores (`posthoc_uq.calibrate`), float64; see
    `Prediction.familiarity`.

    Attributes:
        p_entropy: (batch,), of the entropy.
        p_novelty: (batch,), of the novelty; NaN where there are no held-out scores of it, as `p_joint`.
        p_joint: (batch,), of the more surprising of the two, by which `Referral` goes.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor
    novelty: Tensor
    p_entropy: Tensor
    p_novelty: Tensor
    p_joint: Tensor


class RankedValueTensors(NamedTuple):
    """`ValueTensors` and p-values among held-out scores (`posthoc_uq.calibrate`), float64; see
    `Prediction.familiarity`.

    Attributes:
        p_standard_deviation: (batch,), of the standard deviation.
        p_novelty: as in `RankedClassTensors`.
        p_joint: as there.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor
    novelty: Tensor
    p_standard_deviation: Tensor
    p_novelty: Tensor
    p_joint: Tensor


class PromisedClassTensors(NamedTuple):
    """`RankedClassTensors` and sets.

    Attributes:
        set: in the shape of `probs`, bool: see `ClassPrediction.set`; of the level that `export` was given.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor
    novelty: Tensor
    p_entropy: Tensor
    p_novelty: Tensor
    p_joint: Tensor
    set: Tensor


class PromisedValueTensors(NamedTuple):
    """`RankedValueTensors` and intervals.

    Attributes:
        lower: of the shape of `mean`: the interval's, see `RegressionPrediction.interval`; of the level that `export`
            was given.
        upper: of the same shape.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor
    novelty: Tensor
    p_standard_deviation: Tensor
    p_novelty: Tensor
    p_joint: Tensor
    lower: Tensor
    upper: Tensor


# so that an exported program can name its outputs in a file
for _kind in (
    *(ClassTensors, RankedClassTensors, PromisedClassTensors),
    *(ValueTensors, RankedValueTensors, PromisedValueTensors),
):
    pytree._register_namedtuple(  # pyright: ignore[reportPrivateUsage]
        _kind, serialized_type_name=f"posthoc_uq.{_kind.__name__}"
    )


# A check of a user's `log_prob`

_MAX_SAMPLES = 32  # of a batch that are looked at
_TOLERANCE = 1e-3  # relative above 1, absolute below


def check_rows(
    log_prob: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, name: str
) -> None:
    """Compare the log probability of a sample alone with its row among others, for the first and the last of a few.

    Targets ``(samples,)`` and outputs ``(samples, 1)`` broadcast to ``(samples, samples)``, and a sum over the second
    dimension then has the right shape and adds up the other samples' targets.

    Args:
        log_prob: of the likelihood.
        outputs: ``(samples, ...)``.
        targets: ``(samples, ...)``.
        name: of the likelihood.

    Raises:
        PosthocUQError: the result has another shape than ``(samples,)``, or depends on the other samples.
    """
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
    outputs, targets = outputs.detach()[:_MAX_SAMPLES], targets[:_MAX_SAMPLES]
    samples = len(outputs)
    way_out = (
        "give targets the shape of the outputs, in the data or by targets.reshape(outputs.shape) in log_prob, and sum "
        "over every dimension but the first"
    )
    with torch.no_grad():
        together = log_prob(outputs, targets)
        if tuple(together.shape) != (samples,):
            raise PosthocUQError(
                f"log_prob of likelihood {name!r} gives {samples} samples the shape {tuple(together.shape)} and not "
                f"({samples},), for {shapes}; {way_out}."
            )
        for row in {0, samples - 1} if samples > 1 else ():
            alone = as_double(log_prob(outputs[row : row + 1], targets[row : row + 1]))
            if alone.numel() != 1 or not torch.isclose(
                alone.reshape(()), as_double(together[row]), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
            ):
                raise PosthocUQError(
                    f"log_prob of likelihood {name!r} gives a sample another value alone than among others, for "
                    f"{shapes}, which seem to broadcast against each other; {way_out}."
                )
