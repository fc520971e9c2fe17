"""Several heads in one model: a likelihood of each, one posterior over all weights, and a prediction of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Annotated, Any, ClassVar, NoReturn

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posthoc_uq.core.batches import Batch, as_targets
from posthoc_uq.core.devices import as_double, at_least_float32
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, Positive, check_option
from posthoc_uq.core.outputs import MAX_HEADS, joined_targets, parts_by_name, side_by_side
from posthoc_uq.core.randomness import mix
from posthoc_uq.core.records import Name, Record
from posthoc_uq.likelihoods.classes import Categorical
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, LINKS, LogitCovariance, OutputGaussian
from posthoc_uq.likelihoods.gaussian import Gaussian
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.likelihood import Faults, Fisher, Likelihood, last_function
from posthoc_uq.likelihoods.mixture import mixture
from posthoc_uq.likelihoods.prediction import Prediction, by_input, cat
from posthoc_uq.likelihoods.registry import (
    likelihood_from_attributes,
    likelihood_to_attributes,
    resolve_likelihood,
)

_MAX_NUMBERS = 2**31  # of a head, in a file
_APPLIED = ("Softmax", "Sigmoid")  # autograd nodes after which outputs are no logits


class JointFields(Record):
    """The likelihood of every head and the shape of its outputs for one sample."""

    heads: Annotated[dict[Name, dict[Name, Any]], Field(min_length=2, max_length=MAX_HEADS)]
    shapes: dict[Name, Annotated[list[Count], Field(max_length=8)]]
    loss_weights: dict[Name, Annotated[float, Field(ge=1e-12, le=1e12)]] = Field(
        default_factory=dict[str, float]
    )

    @model_validator(mode="after")
    def _check_names(self) -> JointFields:
        if {*self.shapes} != {*self.heads} or not {*self.loss_weights} <= {*self.heads}:
            raise ValueError("must have a shape of every head, and weights of heads alone")
        if any(prod(shape) > _MAX_NUMBERS for shape in self.shapes.values()):
            raise ValueError(f"has a head of more than {_MAX_NUMBERS} outputs")
        if any(not name.isidentifier() or name in RESERVED for name in self.heads):
            raise ValueError(f"has a head of a name that is none: {[*self.heads]}")
        return self


class Joint(Likelihood):
    """Several heads, independent given the weights: ``log p(y | outputs)`` is the sum over heads.

    A model returns a mapping or an object with the names of the heads, or a tuple in their order; targets are a mapping
    or a tuple likewise. Behind it, the outputs of a sample are the numbers of all heads, side by side: ``(samples,
    numbers)``. One posterior belongs to all heads, so that weights they share learn from the data of each: the Fisher
    is the sum over heads. Predictions are a `JointPrediction`.

    ``Joint(label="classification", boxes=uq.Gaussian(noise_variance=0.1))``

    Args:
        **heads: by name, the likelihood, or its name in `posthoc_uq.fit`. A regression by its name gets the noise
            variance of its training residuals.
        loss_weights: of heads, by which the losses were weighed when the network was trained; 1 for those without one.
            The log-likelihood of a head, and with it its part of the Fisher, counts so often. Predictions and what is
            measured of them have none.

    Raises:
        PosthocUQError: fewer than two heads, a name that predictions have for something else, or no likelihood.

    Example:
        ```python
        class Two(nn.Linear):  # a mapping with the outputs of two heads
            def forward(self, x):
                outputs = super().forward(x)
                return {"label": outputs[:, :3], "value": outputs[:, 3:]}

        net, x = Two(2, 4), torch.randn(30, 2)
        targets = {"label": torch.arange(30) % 3, "value": x[:, :1]}
        heads = uq.Joint(label="classification", value="regression")
        posterior = uq.fit(net, [(x, targets)], likelihood=heads)
        print(uq.wrap(net, posterior)(x).value.mean)
        ```
    """

    name = "joint"
    links: ClassVar[tuple[str, ...]] = LINKS
    fields: ClassVar[type[Record]] = JointFields

    def __init__(self, *, loss_weights: Mapping[str, float] | None = None, **heads: str | Likelihood) -> None:
        if not 2 <= len(heads) <= MAX_HEADS:
            raise PosthocUQError(
                f"uq.Joint takes the likelihoods of 2 to {MAX_HEADS} heads by name, as in uq.Joint(label="
                f"'classification', value='regression'), not of {len(heads)}."
            )
        if taken := sorted(RESERVED & {*heads}):
            raise PosthocUQError(
                f"A head cannot be named {taken[0]!r}, which is taken in predictions: give it another name; "
                f"output=lambda returned: dict(...) takes it from what the model returns."
            )
        found = {name: _resolved(name, likelihood) for name, likelihood in heads.items()}
        weights = {} if loss_weights is None else dict(loss_weights)
        if stray := sorted({*weights} - {*heads}):
            raise PosthocUQError(f"loss_weights has {stray[0]!r}, and the heads are {[*heads]}.")
        self.head_likelihoods = found
        self.loss_weights = {
            name: check_option(f"The loss weight of head {name!r}", float(weight), Positive)
            for name, weight in weights.items()
        }
        self._by_name = frozenset(name for name, given in heads.items() if isinstance(given, str))
        self._shapes: dict[str, tuple[int, ...]] = {}

    # What heads have in common

    @property
    def logits(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the outputs of any head are logits, which the temperature divides."""
        return any(head.logits for head in self.head_likelihoods.values())

    @property
    def has_divergence(self) -> bool:
        return all(head.has_divergence for head in self.head_likelihoods.values())

    @property
    def has_noise(self) -> bool:
        return any(head.has_noise for head in self.head_likelihoods.values())

    @property
    def finds_noise(self) -> tuple[str, ...]:
        """The heads whose noise variance is to be that of the training residuals."""
        return tuple(self._finding_noise())

    def _finding_noise(self) -> dict[str, Gaussian]:
        heads = self.head_likelihoods.items()
        return {name: head for name, head in heads if isinstance(head, Gaussian) and head.finds_noise}

    def defines(self, method: str) -> bool:
        """Whether all heads do, of what is the sum of theirs."""
        if method in ("distribution", "log_terms", "cdf", "mean", "variance", "fisher_root"):
            return False
        return all(head.defines(method) for head in self.head_likelihoods.values())

    def _changed(self, change: Callable[[str, Likelihood], Likelihood]) -> Joint:
        """The same with other likelihoods of the heads."""
        other = copy.copy(self)
        other.head_likelihoods = {n: change(n, head) for n, head in self.head_likelihoods.items()}
        return other

    def for_scoring(self) -> Joint:
        """Without the weights of losses."""
        other = self._changed(lambda _, head: head.for_scoring())
        other.loss_weights = {}
        return other

    # The outputs of a model

    def of_outputs(self, outputs: Mapping[str, Tensor], targets: Tensor | None) -> Joint:
        """The same once it is known which outputs each head has; classes are in the dimension that the labels fit.

        Args:
            outputs: by head, with their autograd graph.
            targets: as `joined_targets` gives them.

        Raises:
            PosthocUQError: the outputs of a head do not fit its likelihood, or are no logits.
        """
        for name, head in self.head_likelihoods.items():
            made_by = last_function(outputs[name])
            if name in self._by_name and head.logits and made_by.startswith(_APPLIED):
                raise PosthocUQError(
                    f"The outputs of head {name!r} are probabilities, and likelihood={head.name!r} takes logits: let "
                    f"the model return them without its last softmax or sigmoid. If it was trained with these as "
                    f"logits, pass {name}=uq.{type(head).__name__}()."
                )
        variants = [self._variants(name, tuple(outputs[name].shape[1:])) for name in self.head_likelihoods]
        found = [self._of(dict(zip(self.head_likelihoods, each, strict=True))) for each in product(*variants)]
        columns = None if targets is None or targets.ndim != 2 else targets.shape[1]
        return next((each for each in found if columns is not None and each._fitting(columns)), found[0])

    def _variants(self, name: str, shape: tuple[int, ...]) -> list[tuple[Likelihood, tuple[int, ...]]]:
        """What a head may be by the shape of its outputs: also with classes in the other dimension, where nobody
        said.
        """
        head = self.head_likelihoods[name]
        if name in self._by_name and type(head) is Categorical and len(shape) > 1:
            return [(Categorical(class_dim), shape) for class_dim in (1, -1)]
        return [(head, shape)]

    def _of(self, heads: Mapping[str, tuple[Likelihood, tuple[int, ...]]]) -> Joint:
        other = self._changed(lambda name, _: heads[name][0])
        other._shapes = {name: shape for name, (_, shape) in heads.items()}
        return other

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By head, the shape of its outputs for one sample.

        Raises:
            PosthocUQError: it was never fitted.
        """
        if not self._shapes:
            raise PosthocUQError(
                "uq.Joint knows the outputs of its heads once it was fitted: use posterior.likelihood."
            )
        return self._shapes

    @property
    def slices(self) -> dict[str, slice]:
        """By head, where its outputs are among those of all."""
        found, start = dict[str, slice](), 0
        for name, shape in self.shapes.items():
            found[name] = slice(start, start + prod(shape))
            start += prod(shape)
        return found

    def split(self, outputs: Tensor) -> dict[str, Tensor]:
        """By head, its outputs ``(..., *shape)`` out of those of all, ``(..., numbers)``."""
        return {name: self._of_head(name, outputs) for name in self.head_likelihoods}

    def _of_head(self, name: str, outputs: Tensor) -> Tensor:
        shape = self.shapes[name]
        return outputs[..., self.slices[name]].reshape(*outputs.shape[:-1], *shape)

    def split_targets(self, targets: Tensor) -> dict[str, Tensor]:
        """By head, its targets as the loader gave them, out of `joined_targets`.

        Raises:
            PosthocUQError: there are other numbers of them.
        """
        forms = self._fitting(targets.shape[1]) if targets.ndim == 2 else None
        if forms is None:
            wanted = {name: _in_words(self._forms(name)) for name in self.head_likelihoods}
            raise PosthocUQError(
                f"Targets of several heads are a mapping with their names, or a tuple in their order, of the shapes "
                f"{wanted} a sample; these do not fit, {tuple(targets.shape)}."
            )
        found, start = dict[str, Tensor](), len(forms)
        for name, (shape, dtype) in zip(self.head_likelihoods, forms, strict=True):
            numbers = targets[:, start : start + prod(shape)].reshape(len(targets), *shape)
            found[name] = numbers if dtype.is_floating_point else numbers.to(dtype)
            start += prod(shape)
        return found

    def takes_targets(self, columns: int) -> bool:
        """Whether targets of all heads may have so many numbers, see `joined_targets`."""
        return self._fitting(columns) is not None

    def _fitting(self, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Shape and type of every head's targets, where all have so many columns together."""
        wanted = columns - len(self.head_likelihoods)
        forms = product(*map(self._forms, self.head_likelihoods))
        return next((list(each) for each in forms if sum(prod(s) for s, _ in each) == wanted), None)

    def _forms(self, name: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types that a head's targets for one sample may have: one number, those of its outputs, or of these
        without a dimension or with half of it.
        """
        head, shape = self.head_likelihoods[name], self.shapes[name]
        shapes = [(), shape, *(shape[:i] + shape[i + 1 :] for i in range(len(shape)))]
        shapes += [shape[:i] + (n // 2,) + shape[i + 1 :] for i, n in enumerate(shape) if n % 2 == 0]
        types = (torch.float64, torch.int64)
        given = [(s, t) for s in dict.fromkeys(shapes) for t in types if _accepts(head, shape, (s, t))]
        by_number = {prod(form): (form, dtype) for form, dtype in reversed(given)}
        return list(by_number.values())[::-1]

    def accepts_output_count(self, outputs: int) -> bool:
        return outputs == sum(map(prod, self.shapes.values()))

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        if outputs.ndim != 2 or not self.accepts_output_count(outputs.shape[1]):
            raise PosthocUQError(
                f"The heads have outputs of the shapes {self.shapes} a sample, and the model gives "
                f"{tuple(outputs.shape)} in all."
            )
        of_heads: Mapping[str, Tensor | None] = dict.fromkeys(self.head_likelihoods)
        if targets is not None:
            if len(targets) != len(outputs):
                raise PosthocUQError(f"There are {len(outputs)} samples, and targets of {len(targets)}.")
            of_heads = self.split_targets(targets)
            numbers = [0 if part is None else part[0].numel() for part in of_heads.values() if len(targets)]
            given = targets[:, : len(of_heads)]
            yield (
                (given != given.new_tensor(numbers)).any() if numbers else given.any(),
                lambda: (
                    f"The targets of the heads {[*of_heads]} have {given[0].long().tolist()} numbers a sample, and "
                    f"{numbers} are needed."
                ),
            )
            start = len(of_heads)
            for name, part in of_heads.items():
                assert part is not None
                if not part.is_floating_point():
                    raw = targets[:, start : start + part[0].numel()]
                    yield (
                        (raw != raw.round()).any(),
                        partial(str, f"Head {name!r}: labels must be integers, and some are not."),
                    )
                start += part[0].numel()
        for name, part in self.split(outputs).items():
            yield from _named_faults(name, self.head_likelihoods[name], part, of_heads[name])

    # Sums over heads

    def _weight(self, name: str) -> float:
        return self.loss_weights.get(name, 1.0)

    def _sum(
        self, of: Callable[[str, Likelihood, Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
    ) -> Tensor:
        """The weighted sum over heads of what is computed of a head, its outputs and its targets."""
        of_heads, parts = self.split_targets(targets), self.split(outputs)
        terms = [
            self._weight(name) * of(name, head, parts[name], of_heads[name])
            for name, head in self.head_likelihoods.items()
        ]
        return sum(terms[1:], terms[0])

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._sum(lambda _, head, part, own: head.log_prob(part, own), outputs, targets)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        spread = self.split(variance)
        return self._sum(
            lambda name, head, part, own: head.expected_log_prob(part, spread[name], own, n_draws),
            mean,
            targets,
        )

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        spread = self.split(variance)
        return self._sum(
            lambda name, head, part, own: head.predictive_log_prob(part, spread[name], own, n_draws),
            mean,
            targets,
        )

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        of_heads, parts = self.split_targets(targets), self.split(outputs)
        return side_by_side(
            [
                self._weight(name) * head.score(parts[name], of_heads[name])
                for name, head in self.head_likelihoods.items()
            ]
        )

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        parts = self.split(outputs)
        drawn = [
            head.draw(parts[name], _keys_of(keys, place), draw)
            for place, (name, head) in enumerate(self.head_likelihoods.items())
        ]
        return joined_targets(drawn)

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        keys = torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        return self.gradients(outputs, None, keys, "exact")

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """Exact factors of one head after the other. Drawn labels of all heads are pulled back together, since scores
        of two heads are independent, and the mean of their product is 0.
        """
        parts = self.split(outputs.detach())
        of_heads: Mapping[str, Tensor | None] = dict.fromkeys(parts)
        if targets is not None:
            of_heads = self.split_targets(targets)
        pulled = {
            name: head.gradients(parts[name], of_heads[name], _keys_of(keys, place), fisher, n_samples)
            for place, (name, head) in enumerate(self.head_likelihoods.items())
        }
        roots = {name: self._weight(name) ** 0.5 for name in pulled}
        if fisher != "exact":
            for together in zip(*pulled.values(), strict=True):
                yield side_by_side([roots[n] * each for n, each in zip(pulled, together, strict=True)])
            return
        for name, factors in pulled.items():
            for factor in factors:
                whole = at_least_float32(torch.zeros_like(outputs))
                whole[:, self.slices[name]] = roots[name] * factor.reshape(len(whole), -1).to(whole)
                yield whole

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """The sum over heads."""
        found = [
            self.head_likelihoods[name].divergence(part, prediction.parts[name])
            for name, part in self.split(outputs).items()
        ]
        return torch.stack(found).sum(0)

    def entropy(self, outputs: Tensor) -> Tensor:
        """The sum over the heads of logits."""
        parts, heads = self.split(outputs), self.head_likelihoods
        return torch.stack([heads[n].entropy(part) for n, part in parts.items() if heads[n].logits]).sum(0)

    def decisions_agree(self, outputs: Tensor, draws: Tensor) -> bool:
        parts, drawn = self.split(outputs), self.split(draws)
        return all(h.decisions_agree(parts[n], drawn[n]) for n, h in self.head_likelihoods.items())

    # Classes, for the novelty of inputs: those of the first head that has some

    def _head_of_classes(self) -> str | None:
        for name, head in self.head_likelihoods.items():
            outputs = torch.empty(1, *self.shapes[name], device="cpu")
            if head.positions_of(outputs) is None and head.classes(prod(self.shapes[name])) > 1:
                return name
        return None

    def classes(self, outputs: int) -> int:
        name = self._head_of_classes()
        return 1 if name is None else self.head_likelihoods[name].classes(prod(self.shapes[name]))

    def predicted_class(self, outputs: Tensor) -> Tensor:
        name = self._head_of_classes()
        if name is None:
            return super().predicted_class(outputs)
        return self.head_likelihoods[name].predicted_class(self._of_head(name, outputs))

    # Predictions

    def divisors(self, temperature: float, like: Tensor) -> Tensor:
        """By what a temperature divides each of the outputs, ``(numbers,)``: those that are no logits by 1."""
        found = like.new_ones(sum(map(prod, self.shapes.values())))
        for name, where in self.slices.items():
            if self.head_likelihoods[name].logits:
                found[where] = temperature
        return found

    def from_blocks(self, blocks: Iterable[Tensor]) -> JointPrediction:
        kept = list(blocks)
        found = {
            name: head.from_blocks(self._of_head(name, block) for block in kept)
            for name, head in self.head_likelihoods.items()
        }
        return JointPrediction(found, self)

    def from_gaussian(self, outputs: OutputGaussian) -> JointPrediction:
        means, variances = self.split(outputs.mean), self.split(outputs.variance)
        found = dict[str, Prediction]()
        for name, head in self.head_likelihoods.items():
            covariance = outputs.covariance
            assert not isinstance(covariance, LogitCovariance)  # which is that of one softmax
            if covariance is not None:
                where = self.slices[name]
                covariance = self._by_position(name, covariance[:, where, where])
            link = outputs.link if outputs.link in head.links else head.links[0]
            own = OutputGaussian(
                means[name], variances[name], covariance if head.joint else None, link, outputs.n_draws
            )
            found[name] = head.from_gaussian(own)
        return JointPrediction(found, self)

    def _by_position(self, name: str, covariance: Tensor) -> Tensor:
        """The covariance of a head's outputs; where these have positions, that of each, ``(samples * positions,
        classes, classes)``.
        """
        shape = self.shapes[name]
        numbers = torch.arange(prod(shape), device=covariance.device).reshape(1, *shape)
        layout = self.head_likelihoods[name].positions_of(numbers)
        if layout is None:
            return covariance
        rows = layout.rows(numbers)
        return covariance[:, rows.unsqueeze(2), rows.unsqueeze(1)].flatten(0, 1)

    # Noise

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``outputs - targets`` of the heads in `finds_noise`, in the shape of the outputs; 1 for others. Those
        of a channel that outputs have at several positions are its root mean square, at each.
        """
        found = torch.ones_like(at_least_float32(outputs))
        of_heads, parts = self.split_targets(targets), self.split(outputs)
        for name, head in self._finding_noise().items():
            own, layout = head.residuals(parts[name], of_heads[name]), head.positions_of(parts[name])
            if layout is not None:
                own = _mean_at_positions(layout, layout.rows(own).square(), parts[name]).sqrt()
            found[:, self.slices[name]] = own.reshape(len(found), -1)
        return found

    def target_counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many targets there are for each of the `residuals`."""
        found = as_double(torch.ones_like(outputs))
        of_heads, parts = self.split_targets(targets), self.split(outputs)
        for name, head in self._finding_noise().items():
            counts, layout = head.target_counts(parts[name], of_heads[name]), head.positions_of(parts[name])
            if counts is not None and layout is not None:
                counts = _mean_at_positions(layout, counts, parts[name])
            if counts is not None:
                found[:, self.slices[name]] = counts.reshape(len(found), -1)
        return found

    def with_noise(self, noise_variance: Tensor) -> Joint:
        """With the noise variance ``(numbers,)`` of the heads in `finds_noise`, one a channel."""
        wanted = self._finding_noise()

        def changed(name: str, head: Likelihood) -> Likelihood:
            if name not in wanted:
                return head
            own = noise_variance[self.slices[name]].reshape(1, *self.shapes[name])
            layout = head.positions_of(own)
            return head.with_noise(own.flatten() if layout is None else layout.rows(own)[0])

        return self._changed(changed)

    def at_noise_scale(self, factor: float) -> Joint:
        """With the noise of every head that has one `factor` times as large."""
        return self if factor == 1.0 else self._changed(lambda _, head: head.at_noise_scale(factor))

    # Files

    def attributes(self) -> dict[str, Any]:
        heads = {name: likelihood_to_attributes(head) for name, head in self.head_likelihoods.items()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        weights = {"loss_weights": self.loss_weights} if self.loss_weights else {}
        return {"name": self.name, "heads": heads, "shapes": shapes, **weights}

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], given: Joint | None = None) -> Joint:
        """See `Likelihood`.

        Args:
            attributes: of a fitted one.
            given: has the heads whose likelihoods are the user's own.

        Raises:
            PosthocUQError: `given` has other heads or weights.
        """
        described, weights = attributes["heads"], dict(attributes.get("loss_weights", {}))
        own: Mapping[str, Likelihood] = {} if given is None else given.head_likelihoods
        if given is not None and (list(own) != list(described) or given.loss_weights != weights):
            raise PosthocUQError(
                f"it was fitted with the heads {list(described)} and the loss weights {weights}, and likelihood= has "
                f"{list(own)} and {given.loss_weights}."
            )
        heads = {
            name: likelihood_from_attributes(values, own.get(name) if "class" in values else None)
            for name, values in described.items()
        }
        found = cls(loss_weights=weights, **heads)
        found._shapes = {name: tuple(shape) for name, shape in attributes["shapes"].items()}
        if list(found._shapes) != list(heads):
            found._shapes = {name: found._shapes[name] for name in heads}
        return found

    def identity(self) -> dict[str, Any]:
        heads = {name: head.identity() for name, head in self.head_likelihoods.items()}
        return {"name": self.name, "heads": heads, "shapes": self._shapes, "loss_weights": self.loss_weights}


def _resolved(name: str, likelihood: Any) -> Likelihood:
    try:
        found = resolve_likelihood(likelihood)
    except PosthocUQError as error:
        raise PosthocUQError(f"Head {name!r}: {error}") from None
    if isinstance(found, Joint):
        raise PosthocUQError(f"Head {name!r} is a uq.Joint; name its heads beside the others.")
    if found.scale_from_data:
        raise PosthocUQError(
            f"Head {name!r}: mean='data' and std='data' are for the only likelihood of a model; give numbers."
        )
    return found


def _mean_at_positions(layout: Layout, rows: Tensor, like: Tensor) -> Tensor:
    """The mean over a sample's positions of rows ``(samples * positions, channels)``, at each of them, in the shape of
    the outputs `like`.
    """
    by_sample = rows.reshape(len(like), -1, rows.shape[1])
    means = by_sample.mean(1, keepdim=True).expand_as(by_sample)
    return layout.whole(means.flatten(0, 1), layout.positions(like))


def _keys_of(keys: Tensor, place: int) -> Tensor:
    """Keys of random numbers for a head, which are independent of those of the others."""
    return mix(keys * 31 + place)


def _accepts(
    likelihood: Likelihood, shape: tuple[int, ...], targets: tuple[tuple[int, ...], torch.dtype] | None
) -> bool:
    """Whether a likelihood takes outputs, and targets, of these shapes for one sample."""
    outputs = torch.zeros(2, *shape, device="cpu")
    own = None if targets is None else torch.zeros(2, *targets[0], dtype=targets[1], device="cpu")
    try:
        if type(likelihood).check is Likelihood.check:
            for _ in likelihood.faults(outputs, own):
                pass
        else:
            likelihood.check(outputs, own)
    except PosthocUQError:
        return False
    return True


def _in_words(forms: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return " or ".join(f"{'values' if t.is_floating_point else 'labels'} {s}" for s, t in forms)


def _named_faults(name: str, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None) -> Faults:
    """The faults of a head, which name it."""

    def named(error: str) -> str:
        return f"Head {name!r}: {error}"

    try:
        if type(likelihood).check is not Likelihood.check:
            likelihood.check(outputs, targets)
            return
        for wrong, text in likelihood.faults(outputs, targets):
            yield wrong, lambda text=text: named(text())
    except PosthocUQError as error:
        raise PosthocUQError(named(str(error))) from None


@dataclass(frozen=True, eq=False, repr=False)
class JointPrediction(Prediction):
    """The predictions of several heads, each under the name of its head: ``prediction.label``, or
    ``prediction["label"]``.

    Heads count as independent in the prediction, as their targets are given the weights; what they have in common
    through the weights is in `posthoc_uq.heads.LinearizedPredictor.functional_covariance`.

    Attributes:
        parts: by head, without novelty and promises.
        likelihood: of all heads.
    """

    kind: ClassVar[str] = "heads"
    default_score: ClassVar[str] = "epistemic_variance"
    loss_name: ClassVar[str] = "nll"
    _hidden: ClassVar[tuple[str, ...]] = ("batch_of", "likelihood", "parts", "split_targets")

    parts: dict[str, Any]
    likelihood: Joint

    def __len__(self) -> int:
        """Number of inputs."""
        return len(next(iter(self.parts.values())))

    def __repr__(self) -> str:
        return f"JointPrediction({', '.join(f'{name}={part!r}' for name, part in self.parts.items())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.parts]

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("parts", {}):
            return self[name]
        raise AttributeError(
            f"A prediction of the heads {list(vars(self).get('parts', {}))} has no {name!r}; ask that of a head."
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.parts:
            raise PosthocUQError(f"There is no head {name!r}; there are {list(self.parts)}.")
        known = vars(self)
        promises, before = known["promises"], self.before_retuning
        if isinstance(promises, ConformalScores):
            promises = (promises.heads or {}).get(name)
        part: Prediction = self.parts[name].changed(
            promises=promises,
            sample_keys=known["sample_keys"],
            before_retuning=None if before is None else before.then(lambda other: _part_of(other, name)),
        )
        return part.with_novelty(known["novelty_ratio"])

    def keys(self) -> list[str]:
        """The names of the heads."""
        return list(self.parts)

    def _mapped(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: change(part) for name, part in self.parts.items()}

    def numbers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{of}": values
            for name, part in self.parts.items()
            for of, values in part.numbers().items()
        } | super().numbers()

    def completed(self) -> JointPrediction:
        return super().completed().changed(parts=self._mapped(lambda part: part.completed()))

    def to(self, device: torch.device | str) -> JointPrediction:
        """The same prediction with its tensors on `device`."""
        return super().to(device).changed(parts=self._mapped(lambda part: part.to(device)))

    def picked(self, chosen: Tensor | slice) -> JointPrediction:
        """The inputs where `chosen` (batch,) is true, or those of a slice."""
        return super().picked(chosen).changed(parts=self._mapped(lambda part: part.picked(chosen)))

    @staticmethod
    def cat(predictions: Sequence[Any]) -> Any:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or parts that do not fit.
        """
        joined: JointPrediction = Prediction.cat(predictions)
        return joined.changed(
            parts={name: cat([p.parts[name] for p in predictions]) for name in joined.parts}
        )

    @classmethod
    def mixed(cls, predictions: Sequence[Any]) -> JointPrediction:
        """The mixture of every head."""
        first: JointPrediction = predictions[0]
        of_heads = {name: mixture([each.parts[name] for each in predictions]) for name in first.parts}
        return first.changed(parts=of_heads)

    def of_one_network(self) -> JointPrediction:
        return self.changed(parts=self._mapped(lambda part: part.of_one_network()))

    def unshifted(self) -> JointPrediction:
        return self.changed(parts=self._mapped(lambda part: part.unshifted()))

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """For each input the `answers` of every head, by its name."""
        if names is not None:
            raise PosthocUQError("Names of classes belong to one head: prediction[head].answers(names=...).")
        of_heads = {name: self[name].answers(top_k=top_k, level=level) for name in self.parts}
        return [{name: found[index] for name, found in of_heads.items()} for index in range(len(self))]

    @property
    def outputs_mean(self) -> Tensor:
        """(batch, numbers): the means of all heads' outputs, side by side."""
        return side_by_side([part.outputs_mean for part in self.parts.values()])

    @property
    def epistemic_variance(self) -> Tensor:
        """(batch, numbers): the epistemic variances of all heads, side by side."""
        return side_by_side([part.epistemic_variance for part in self.parts.values()])

    def entropy(self) -> Tensor:
        """(batch,), in nats: the sum over the heads of logits."""
        heads = self.likelihood.head_likelihoods
        found = [part.entropy() for name, part in self.parts.items() if heads[name].logits]
        if not found:
            return super().entropy()
        return torch.stack([each.reshape(len(each), -1).mean(1) for each in found]).sum(0)

    def batch_of(self, name: str, batch: Batch) -> Batch:
        """A batch with the targets of one head alone; without any where they are not those of the heads."""
        targets = batch.targets
        fit = targets is not None and targets.ndim == 2 and self.likelihood.takes_targets(targets.shape[1])
        own = self.likelihood.split_targets(targets)[name] if targets is not None and fit else None
        return replace(batch, targets=own)

    def split_targets(self, targets: Any) -> dict[str, Tensor]:
        """By head, targets as its prediction takes them; see `Prediction.fitting`."""
        own = self.likelihood.split_targets(self.fitting(targets))
        return {name: part.fitting(own[name]) for name, part in self.parts.items()}

    def fitting(self, targets: Any) -> Tensor:
        """Targets of all heads, a mapping or a tuple, as one tensor.

        Raises:
            PosthocUQError: they do not fit.
        """
        names = list(self.parts)
        if not isinstance(targets, Tensor):
            found = parts_by_name(targets, names)
            if found is None:
                raise PosthocUQError(
                    f"Targets are a mapping with the heads {names}, or a tuple in this order."
                )
            targets = joined_targets([as_targets(part) for part in found.values()])
        self.likelihood.check(self.outputs_mean, targets.to(self.outputs_mean.device))
        return targets

    def log_prob(self, targets: Any) -> Tensor:
        """(batch,), in nats: the sum over heads."""
        own = self.split_targets(targets)
        return torch.stack([part.log_prob(own[name]) for name, part in self.parts.items()]).sum(0)

    def scores(self) -> dict[str, Tensor]:
        """The mean over heads of each one's mean epistemic variance, and the novelty; a head's own scores are those of
        its part.
        """
        novelty = {} if self.novelty_ratio is None else {"novelty": self.novelty_ratio}
        of_heads = [by_input(part.epistemic_variance) for part in self.parts.values()]
        return {"epistemic_variance": torch.stack(of_heads).mean(0)} | novelty

    def quality(self, targets: Any, bins: int = 15) -> dict[str, float]:
        own = self.split_targets(targets)
        return {
            f"{name}_{measure}": value
            for name, part in self.parts.items()
            for measure, value in part.quality(own[name], bins).items()
        }

    def losses(self, targets: Any) -> Tensor:
        """(batch,): the negative log-likelihood of all heads."""
        return -as_double(self.log_prob(targets))

    def set(self, level: float = 0.9, *, allow_empty: bool = False) -> NoReturn:
        """Of a head: ``prediction[head].set(level)``."""
        raise PosthocUQError(f"Sets belong to one of the heads {self.keys()}: prediction[head].set(level).")

    def interval(self, level: float = 0.95) -> NoReturn:
        """Of a head: ``prediction[head].interval(level)``."""
        raise PosthocUQError(
            f"Intervals belong to one of the heads {self.keys()}: prediction[head].interval(level)."
        )

    def to_dict(self) -> dict[str, Tensor]:
        """The `to_dict` of every head, under the name of the head and a dot."""
        found = {f"{name}.{key}": v for name in self.parts for key, v in self[name].to_dict().items()}
        novelty = {} if self.novelty_ratio is None else {"novelty": self.novelty_ratio}
        return {key: v for key, v in found.items() if not key.endswith(".novelty")} | novelty

    def tensors(self) -> NoReturn:
        raise PosthocUQError(
            f"There is no one tuple of the tensors of the heads {self.keys()}: prediction[head].tensors()."
        )


def _part_of(prediction: Any, name: str) -> Prediction:
    return prediction.parts[name]


RESERVED = frozenset(name for name in dir(JointPrediction) if not name.startswith("_")) | {
    *("parts", "likelihood", "promises", "sample_keys", "before_retuning", "novelty_ratio", "loss_weights")
}
"""What heads cannot be named."""
