"""Several networks as one predictor: a deep ensemble, whose networks may have posteriors of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import (
    Bar,
    Batch,
    BatchFunction,
    BatchReader,
    batches,
    batches_of_call,
    check_loader,
)
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.model import check_usable, model_device, replicate, unwrap
from posthoc_uq.core.outputs import OutputChoice, chosen_in, output_tensor, with_choice
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.registry import shown_names
from posthoc_uq.core.steady import steady
from posthoc_uq.files.ensembles import StoredEnsemble
from posthoc_uq.heads.predictor import Predictor, check_finite, promise_keys
from posthoc_uq.heads.weight_watch import WeightWatch
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import mean_of
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.likelihoods.mixture import mixture
from posthoc_uq.likelihoods.prediction import Prediction, cat
from posthoc_uq.likelihoods.weights import attending
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.history import recordable


class PlainNetwork:
    """A network without a posterior as a member of an ensemble: its outputs are those of the only set of weights.

    Args:
        model: the user's; never written.
        likelihood: of the targets given its outputs.
        choice: which part of what it returns its outputs are, where it returns no tensor.
    """

    posterior: Posterior | None = None

    def __init__(self, model: nn.Module, likelihood: Likelihood, choice: OutputChoice | None) -> None:
        check_usable(unwrap(model))
        self.model, self.observation, self.temperature = model, likelihood, 1.0
        twin = replicate(model)
        self._network = twin if choice is None or chosen_in(twin) is not None else with_choice(twin, choice)
        self._watch = WeightWatch(model)

    @property
    def output_choice(self) -> OutputChoice | None:
        """Which part of what the model returns its outputs are; None where it returns a tensor."""
        return chosen_in(self._network)

    @property
    def device(self) -> torch.device:
        """Where it predicts."""
        return model_device(self._network)

    def __call__(self, batch: Batch) -> Prediction:
        """The prediction for a batch, of one draw of the weights.

        Raises:
            NonFiniteError: an input's prediction is not finite.
            PosteriorMismatchError: the model's weights changed after the predictor was made.
        """
        outputs = self.distribution(batch)
        prediction = self.prediction_of(outputs)
        check_finite(prediction.numbers(), "prediction", "ensemble", lambda: outputs)
        return attending(prediction, batch)

    def distribution(self, batch: Batch) -> Tensor:
        """The outputs, ``(batch, ...)``."""
        marks = self._watch.check()
        with torch.no_grad(), isolated_random_state():
            outputs = batch.outputs_of(output_tensor(batch.copied().call_any(self._network)))
        self._watch.check_since(marks)
        return outputs

    def prediction_of(self, outputs: Tensor, factor: float = 1.0) -> Prediction:
        """The prediction of these outputs, at a factor times the temperature."""
        if self.observation.logits:
            outputs = outputs / (self.temperature * factor)
        return self.observation.from_draws(outputs.unsqueeze(0))

    def _apply(self, fn: Any) -> None:
        """Move, or change the precision of, what predicts."""
        self._network = self._network._apply(fn)  # pyright: ignore[reportPrivateUsage]


class EnsemblePredictor(nn.Module):
    """Several networks, with or without posteriors, as one predictor: the mixture of their predictions, each with the
    same weight. `posthoc_uq.wrap` makes it of a list of models.

    Of classes and labels probabilities are means, the mutual information has what networks disagree about beside what
    their weights leave open, and so has the epistemic variance of values, whose density is the mixture's. Novelty is
    the mean over the networks that know theirs. Like a `Predictor` it is a module without parameters, always in eval
    mode, and a value: `posthoc_uq.calibrate` returns another one, which `posthoc_uq.save` writes to one file.

    Args:
        members: predictors, or networks without a posterior.
        asked: the head and its options, as they were given to `wrap`.
        temperature: divides the logits of every network, beside its own.
        promises: the held-out scores of the mixture.
    """

    head: ClassVar[str] = "ensemble"
    _hidden: ClassVar[tuple[str, ...]] = (
        *("at_temperature", "distribution", "fast_predictions", "stored", "with_promises"),
        "forward",
        "identity",
        "observation",
        "output_choice",
        "training",
    )

    def __init__(
        self,
        members: Sequence[Predictor | PlainNetwork],
        asked: tuple[str | None, Mapping[str, Any]] = (None, {}),
        temperature: float = 1.0,
        promises: ConformalScores | None = None,
    ) -> None:
        super().__init__()
        # tuples hide them from `nn.Module`
        self._given, self._asked, self._promises = tuple(members), asked, promises
        self.temperature = temperature
        self._members = tuple(_tempered(member, temperature) for member in self._given)

    def with_promises(self, promises: ConformalScores | None) -> EnsemblePredictor:
        """The same predictor with other held-out scores."""
        other = copy.copy(self)
        other._promises = promises
        return other

    def stored(self) -> StoredEnsemble:
        """What `posthoc_uq.save` writes.

        Raises:
            PosthocUQError: an option of its heads is no plain value.
        """
        head, options = self._asked
        if lost := sorted(options.keys() - recordable(options).keys()):
            raise PosthocUQError(
                f"The option {lost[0]} of this predictor's heads is no plain value, which files hold."
            )
        plain = [member.observation for member in self._given if isinstance(member, PlainNetwork)]
        likelihood = plain[0] if plain else self.observation
        return StoredEnsemble(
            self.models, self.posteriors, likelihood, self.temperature, head, options, self._promises
        )

    def __dir__(self) -> list[str]:
        return [*shown_names(self, EnsemblePredictor), "to"]

    def __len__(self) -> int:
        """Number of networks."""
        return len(self._members)

    def __repr__(self) -> str:
        plain = self.posteriors.count(None)
        tempered = "" if self.temperature == 1.0 else f", temperature {self.temperature:.4g}"
        without = f", {plain} of them without a posterior" if plain else ""
        promised = (
            "" if self._promises is None else f"; promises from {self._promises.samples:,} held-out samples"
        )
        kinds = sorted({type(unwrap(model)).__name__ for model in self.models})
        return (
            f"EnsemblePredictor: {len(self)} networks ({', '.join(kinds)}){without}, likelihood "
            f"{self.observation.name!r}{tempered}{promised}"
        )

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks."""
        return tuple(member.model for member in self._given)

    @property
    def posteriors(self) -> tuple[Posterior | None, ...]:
        """Of each network; None where it has none."""
        return tuple(member.posterior for member in self._given)

    @property
    def predictors(self) -> tuple[Predictor | PlainNetwork, ...]:
        """Of each network by itself, at its own temperature."""
        return self._given

    @property
    def promises(self) -> ConformalScores | None:
        """The held-out scores by which its predictions promise; None where `posthoc_uq.calibrate` stored none."""
        return self._promises

    @property
    def model(self) -> nn.Module:
        """The first network, which says what batches hold."""
        return self._members[0].model

    @property
    def observation(self) -> Likelihood:
        """The likelihood of the targets for the first network."""
        return self._members[0].observation

    @property
    def output_choice(self) -> OutputChoice | None:
        """Which part of what the first network returns its outputs are."""
        return self._members[0].output_choice

    @property
    def device(self) -> torch.device:
        """Where the mixture is."""
        return self._members[0].device

    def identity(self) -> dict[str, Any]:
        """What its scores depend on beside the networks and their posteriors, as plain values."""
        members = [each.identity() if isinstance(each, Predictor) else {} for each in self._members]
        return {"head": self.head, "networks": members}

    @defer_interrupts
    def forward(self, *args: Any, **kwargs: Any) -> Prediction:
        """The prediction for a batch. The arguments are the models', or one batch as a loader gives it.

        Raises:
            NonFiniteError: an input's prediction is not finite.
            PosteriorMismatchError: a model's weights changed after the predictor was made.
            PosthocUQError: the outputs of the networks do not fit each other, or a head cannot serve its model.
        """
        first = self._members[0]._network  # pyright: ignore[reportPrivateUsage]
        found = batches_of_call(args, kwargs, self.model, first)
        return cat([self._answer(batch) for batch in found]) if len(found) > 1 else self._answer(found[0])

    def _answer(self, batch: Batch, *, on_cpu: bool = False) -> Prediction:
        device = torch.device("cpu") if on_cpu else self.device
        found = mixture([member(_on(batch, member.device)).to(device) for member in self._members])
        if self._promises is None:
            return found
        keys = None
        if self._promises.randomised:
            keys = promise_keys(batch, len(found), self._promises.seed).to(device)
        return found.changed(promises=self._promises, sample_keys=keys)

    def distribution(self, batch: Batch) -> list[Any]:
        """The distributions of each network's outputs for a batch."""
        return [member.distribution(_on(batch, member.device)) for member in self._members]

    def fast_predictions(
        self, distribution: list[Any], temperatures: Sequence[float]
    ) -> Iterator[tuple[int, Prediction]]:
        """See `Predictor`, with few draws: the mixtures of these distributions, each network's temperature times a
        factor.
        """
        for factor in temperatures:
            parts = list[Prediction]()
            for member, own in zip(self._members, distribution, strict=True):
                if isinstance(member, PlainNetwork):
                    parts.append(member.prediction_of(own, factor))
                else:
                    temperature = factor * member.posterior.temperature
                    parts += [part for _, part in member.fast_predictions(own, [temperature])]
            yield 1, mixture([part.to("cpu") for part in parts])

    def at_temperature(self, temperature: float) -> EnsemblePredictor:
        """The same predictor at a temperature of the mixture, and without promises."""
        return EnsemblePredictor(self._given, self._asked, temperature)

    def novelty(self, *args: Any, **options: Any) -> Tensor:
        """How unlike the training data each input is, ``(samples,)`` in (0, 1]: the mean of `Predictor.novelty`, whose
        arguments it takes, over the networks with a posterior.

        Raises:
            PosthocUQError: no network has one, or as for `Predictor.novelty`.
        """
        known = [member for member in self._members if isinstance(member, Predictor)]
        if not known:
            raise PosthocUQError("Novelty goes by a posterior, and no network of this ensemble has one.")
        return mean_of([member.novelty(*args, **options).to(self.device) for member in known])

    @defer_interrupts
    def predict(
        self,
        loader: Iterable[Any],
        *,
        batch_to_inputs: BatchFunction | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predict every batch of a loader; results lie on the CPU, in the loader's order. See `Predictor.predict`.

        Raises:
            NonFiniteError: an input's prediction is not finite.
            PosteriorMismatchError: a model's weights changed meanwhile.
            PosthocUQError: the loader is none, yields no batch, or batches of an unknown form.
        """
        check_loader(loader)
        reader = BatchReader.of(self.model, batch_to_inputs, device=self.device, output=self.output_choice)
        predictions = list[Prediction]()
        with (
            steady(*self.models, call="predict"),
            torch.no_grad(),
            isolated_random_state(),
            Bar(loader, "predict", bars_shown(progress)) as bar,
        ):
            for batch in batches(loader, reader):
                predictions.append(self._answer(batch, on_cpu=True).completed())
                bar.advance(len(predictions[-1]))
        return cat(predictions)

    def _apply(self, fn: Any, recurse: bool = True) -> EnsemblePredictor:
        """Move, or change the precision of, what predicts."""
        for member in self._given:
            member._apply(fn)  # pyright: ignore[reportPrivateUsage]
        self._members = tuple(_tempered(member, self.temperature) for member in self._given)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, but for a module around this one, to whose state it adds nothing."""
        if kwargs.get("destination") is None:
            raise PosthocUQError(
                "An ensemble's predictor has no state dict: uq.save(predictor, path) keeps posteriors and promises, "
                "model.state_dict() each model's weights."
            )
        return super().state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> EnsemblePredictor:
        """Does nothing: predictors stay in eval mode."""
        return super().train(False)


def _tempered(member: Predictor | PlainNetwork, factor: float) -> Predictor | PlainNetwork:
    """A network's predictor at a factor times its temperature."""
    if factor == 1.0:
        return member
    if isinstance(member, PlainNetwork):
        other = copy.copy(member)
        other.temperature = factor
        return other
    posterior = member.posterior
    settings = replace(posterior.settings, temperature=factor * posterior.temperature)
    return member.with_posterior(posterior.at(settings))


def _on(batch: Batch, device: torch.device) -> Batch:
    return batch if all(tensor.device == device for tensor in batch.tensors) else batch.to(device)
