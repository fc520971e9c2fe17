"""`Predictor`, the base class of the heads: a model, a posterior, and predictions from the two."""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast

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
    explained,
)
from posthoc_uq.core.devices import at_least_float32
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, out_of_memory
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.model import (
    model_device,
    model_dtype,
    unwrap,
    with_plain_weights,
    with_separate_embedding_weight,
)
from posthoc_uq.core.options import Count, check_option, one_of
from posthoc_uq.core.outputs import OutputChoice, choice_of, chosen_in, with_choice
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed, sample_keys
from posthoc_uq.core.registry import shown_names
from posthoc_uq.core.steady import steady
from posthoc_uq.heads.novelty import (
    PosteriorRatio,
    caught_calls,
    checked_of,
    class_novelty,
    novelty_of_calls,
    novelty_when_read,
    rows_of,
)
from posthoc_uq.heads.novelty import (
    novelty as novelty_over_layers,
)
from posthoc_uq.heads.weight_watch import WeightWatch
from posthoc_uq.layers.layer import Call
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, LogitCovariance, OutputGaussian, of_covariance
from posthoc_uq.likelihoods.prediction import Prediction, Remade, Unread, cat
from posthoc_uq.likelihoods.weights import attending
from posthoc_uq.posteriors import DRAWS, HYPERPARAMETERS, QUADRATIC, Posterior
from posthoc_uq.posteriors.settings import SettingsRecord

if TYPE_CHECKING:
    from posthoc_uq.layers.frozen import Features
    from posthoc_uq.likelihoods.joint import Joint
    from posthoc_uq.likelihoods.likelihood import Likelihood


def scaled_logits(
    outputs: Tensor, posterior: Posterior, *, draws: bool = False, temperature: float | None = None
) -> Tensor:
    """What probabilities are made of: of logits ``scale * z / temperature + shift``, with a scale and a shift of each
    class where the posterior has them; other outputs as they are.

    Args:
        outputs: ``(batch, ...)``; with `draws` those of several draws, ``(draws, batch, ...)``.
        posterior: gives temperature, scales and shifts.
        draws: see above.
        temperature: in place of the posterior's.
    """
    if not posterior.likelihood.logits:
        return outputs
    if posterior.class_scale:
        outputs = outputs * _by_class(posterior.class_scale, outputs, posterior, draws)
    divisor = posterior.temperature if temperature is None else temperature
    if divisor != 1.0 and posterior.likelihood.head_likelihoods:
        outputs = outputs / cast("Joint", posterior.likelihood).divisors(divisor, outputs)
    elif divisor != 1.0:
        outputs = outputs / divisor
    if posterior.class_shift:
        outputs = outputs + _by_class(posterior.class_shift, outputs, posterior, draws)
    return outputs


def scaled_gaussian(
    outputs: OutputGaussian, posterior: Posterior, temperature: float | None = None
) -> OutputGaussian:
    """The same of Gaussian outputs."""
    if not posterior.likelihood.logits:
        return outputs
    divisor = posterior.temperature if temperature is None else temperature
    if divisor != 1.0 and posterior.likelihood.head_likelihoods:
        factors = cast("Joint", posterior.likelihood).divisors(divisor, outputs.mean).reciprocal()
        return outputs.by_class(factors, factors)
    outputs = outputs if divisor == 1.0 else outputs.over(divisor)
    if posterior.class_scale:
        factors = _by_class(posterior.class_scale, outputs.mean, posterior)
        outputs = outputs.by_class(factors, torch.tensor(posterior.class_scale, device="cpu"))
    if posterior.class_shift:
        shift = _by_class(posterior.class_shift, outputs.mean, posterior)
        outputs = outputs._replace(mean=outputs.mean + shift)
    return outputs


def _by_class(
    numbers: tuple[float, ...], outputs: Tensor, posterior: Posterior, draws: bool = False
) -> Tensor:
    """The numbers of classes as a tensor that is broadcast to outputs.

    Raises:
        PosthocUQError: the outputs are those of another number of classes.
    """
    batch = outputs[0] if draws else outputs
    layout = posterior.likelihood.positions_of(batch)
    axis = batch.ndim - 1 if layout is None else layout.class_dim % batch.ndim
    # one logit a sample may have no dimension of its own
    if len(numbers) != (batch.shape[axis] if batch.ndim > 1 else 1):
        raise PosthocUQError(
            f"The posterior has {len(numbers)} numbers in its class_shift or class_scale, and the model's outputs are "
            f"of shape {tuple(batch.shape)}; give one for each class: posterior.with_settings(class_shift=[...])."
        )
    return outputs.new_tensor(numbers).reshape(-1, *[1] * (batch.ndim - 1 - axis))


def from_gaussian(
    mean: Tensor,
    variance: Tensor,
    posterior: Posterior,
    *,
    covariance: Tensor | LogitCovariance | None = None,
    link: str = "mc",
    n_draws: int = LINK_DRAWS,
) -> Prediction:
    """The prediction of Gaussian outputs ``N(mean, variance)``; see `Likelihood.from_gaussian`.

    The posterior's temperature divides logits, which may have a scale and a shift of each class; its noise variance is
    added to a regression's.

    Args:
        mean: outputs ``(batch, outputs)``, or ``(batch,)`` for one.
        variance: of the same shape, in squared units.
        posterior: gives likelihood, temperature and noise variance.
        covariance: ``(batch, outputs, outputs)`` where the head knows it, or the `LogitCovariance` of many classes.
        Without it
            outputs count as independent.
        link: one of the likelihood's `links`.
        n_draws: of the outputs, for ``"mc"``.
    """
    mean, variance = at_least_float32(mean), at_least_float32(variance).clamp(min=0)
    outputs = OutputGaussian(mean, variance, covariance, link, n_draws)
    return posterior.observation.from_gaussian(scaled_gaussian(outputs, posterior))


_MASKED = ("logits_mean", "log_probs")  # minus infinity marks a class that is masked out


def check_finite(
    answers: Mapping[str, Tensor], what: str, head: str, own: Callable[[], Tensor | None] = lambda: None
) -> None:
    """Check tensors ``(samples, ...)`` of a head, all with one wait for the device: nobody is to rank or refer inputs
    by a NaN.

    Args:
        answers: by name; whole numbers are not looked at.
        what: they are, in the error.
        head: its name.
        own: gives the network's own outputs for the inputs, from which an error tells what is the matter.

    Raises:
        NonFiniteError: a number in them is not finite, except for classes that the model masks; the message counts the
            samples.
    """
    if torch.compiler.is_compiling():  # sizes are symbols there, and tensors have no numbers
        return
    # both ends of numbers among which one is NaN are NaN
    least, most = list[Tensor](), list[Tensor]()
    for name, tensor in answers.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()
            most.append(high)
            if name.rpartition(".")[2] not in _MASKED:
                least.append(low)
    ends: list[float] = torch.stack([*most, *least]).tolist() if most else []
    if all(end < math.inf for end in ends) and all(end > -math.inf for end in ends[len(most) :]):
        return
    rows = torch.stack([_valid_rows(name, tensor) for name, tensor in answers.items()]).all(0)
    bad = (~rows).nonzero().flatten().tolist()
    outputs, linearized = own(), head == "linearized"
    way_out = "layers='last'" if linearized else "the linearized head or layers='last'"
    if outputs is not None and len(outputs) == len(rows):
        sound = ~(outputs.isnan() | outputs.isposinf()).reshape(len(rows), -1).any(1)
        if bool(sound.to(rows.device)[~rows].all()):
            raise NonFiniteError(
                f"The {what} of {len(bad)} of {len(rows)} inputs (number {bad[0]} first) is not finite: the posterior "
                f"is too wide for head={head!r}. Narrow it by uq.tune(posterior, loader, criterion='faithful', "
                f"head={head!r}), or take {way_out}."
            )
    others = " or layers='last'" if linearized else ", layers='last' or head='linearized'"
    dtype = str(next(iter(answers.values())).dtype).removeprefix("torch.")
    raise NonFiniteError(
        f"The {what} of {len(bad)} of {len(rows)} inputs (number {bad[0]} first) is not finite: they, or the model's "
        f"outputs for them, are not finite or too large for {dtype}. Check the inputs, or take a larger "
        f"prior_precision or scale{others}."
    )


def promise_keys(batch: Batch, samples: int, seed: int) -> Tensor:
    """The hashes of inputs, ``(samples,)``, that randomised sets depend on; they are none of a fit's or a split's."""
    return sample_keys(batch.tensors, samples, mixed_seed(seed, 2))


def _valid_rows(name: str, tensor: Tensor) -> Tensor:
    """``(samples,)``: whether all numbers of a sample are finite, or may be minus infinity."""
    rows = tensor.reshape(len(tensor), -1)
    masked = name.rpartition(".")[2] in _MASKED  # of several heads it begins with that of the head
    return (~(rows.isnan() | rows.isposinf()) if masked else torch.isfinite(rows)).all(1)


def _or_new(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or a new one that nobody else has."""
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator


def _format_identity(identity: Mapping[str, Any]) -> str:
    """The identity of a predictor in words: the head and its options."""
    return ", ".join(f"{name}={value!r}" for name, value in identity.items())


_EXPORTED = "uq.export(predictor, x) makes a program of it."


def _not_traced() -> PosthocUQError:
    return PosthocUQError(f"A predictor cannot be traced: {_EXPORTED}")


FUNCTION_DRAWS = 100  # by default
_DRAFT_DRAWS = 32  # of the outputs in `Predictor.fast_predictions`
_DRAFT_NUMBERS = 2**22  # that its outputs at several temperatures may have
Made = TypeVar("Made")


def _view(model: nn.Module, posterior: Posterior) -> nn.Module:
    """The model as the posterior's fit took its outputs and its layers."""
    model = with_separate_embedding_weight(with_plain_weights(model), posterior.original)
    known = None if posterior.model is None else chosen_in(posterior.model)
    choice = known or choice_of(posterior.history.output)
    return model if choice is None else with_choice(unwrap(model), choice)


class KeyedCache(Generic[Made]):
    """What was made last, kept while its key stays the same. One thread makes it, others wait; copies and pickles make
    it anew.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: tuple[Any, Made] | None = None

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """What was made for this key, or now by `make`; the global random state is left alone."""
        made = self._made
        if made is None or made[0] != key:
            with self._lock, isolated_random_state():
                made = self._made
                if made is None or made[0] != key:
                    self._made = made = key, make()
        return made[1]

    def __reduce__(self) -> tuple[type[KeyedCache[Any]], tuple[()]]:
        return KeyedCache, ()


Own = TypeVar("Own", bound="Predictor")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def reading(
    call: Callable[Concatenate[Own, Parameters], Result],
) -> Callable[Concatenate[Own, Parameters], Result]:
    """A method of a predictor that reads the model: what signals raise waits until nothing is half done, and weights
    that changed since the predictor was made, or are written meanwhile, are refused. `torch.compile` leaves it as it
    is.
    """

    @defer_interrupts
    @wraps(call)
    def held(self: Own, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():  # tensors have no numbers there
            return call(self, *args, **kwargs)
        marks = self.weight_watch.check()
        result = call(self, *args, **kwargs)
        self.weight_watch.check_since(marks)
        return result

    @wraps(call)
    def reads(self: Own, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]
            dynamo.graph_break()  # a predictor is not to be compiled: compile its model, and wrap that
            plainly: Any = torch.compiler.disable(held)
            return plainly(self, *args, **kwargs)
        if isinstance(cast(Any, args), torch.fx.Proxy):
            raise _not_traced()
        return held(self, *args, **kwargs)

    return reads


class Predictor(nn.Module, ABC):
    """A model with the uncertainty of its posterior; each head is one subclass, whose `forward` takes what the model
    takes and returns a `ClassPrediction`, a `RegressionPrediction`, or what else the likelihood predicts.

    It holds the value of the posterior that it was made with, so nothing changes under it; `with_posterior` gives one
    of another value. Always in eval mode. To torch it is a module without parameters, buffers and submodules, so that
    what walks over these, such as ``apply``, ``requires_grad_``, an optimizer or ``state_dict`` of a module around it,
    reaches neither the model nor the posterior. ``to`` and its kind move the predictor alone. Weights are never
    written: one predictor may serve several threads.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        novelty: whether predictions know their novelty, if the posterior does.

    Example:
        ```python
        predictor = uq.wrap(model, posterior)
        print(predictor.head, predictor(images).probs)
        prediction = predictor.predict(val_loader)  # all batches as one
        narrow = posterior.with_settings(prior_precision=10.0)
        narrower = predictor.with_posterior(narrow)
        ```
    """

    head: ClassVar[str]
    """Its name in `wrap`."""
    needs: ClassVar[frozenset[str]] = frozenset({DRAWS})
    """What a posterior's blocks must be able to do, by the names in `posthoc_uq.posteriors.block`."""
    _hidden: ClassVar[tuple[str, ...]] = (  # from `dir`: what the package or torch alone calls
        *("at_every_prior", "check_weights", "closed_form", "distribution", "distribution_from", "ensemble"),
        *("explaining", "extra_repr", "fast_predictions", "features", "forward", "hyperparameters"),
        *("identity", "in_program", "load_state_dict", "needs", "network", "network_of_novelty", "noises"),
        *(
            "observation",
            "output_choice",
            "prediction_for",
            "prediction_of",
            "promising",
            "refresh",
            "state_dict",
            "to_empty",
            "train",
            "training",
            "weight_watch",
        ),
    )

    def __init__(self, model: nn.Module, posterior: Posterior, novelty: bool = False) -> None:
        super().__init__()
        posterior.require(self.needs, f"head={self.head!r}")
        # tuples hide them from `nn.Module`
        self._given: tuple[nn.Module] = (model,)
        self._model: tuple[nn.Module] = (_view(model, posterior),)
        self._posterior = posterior
        self._tells_novelty = check_option("novelty", novelty, bool)
        self._ratio, self.weight_watch = KeyedCache[PosteriorRatio](), WeightWatch(model)
        self._promises = KeyedCache[ConformalScores | str | None]()

    def with_posterior(self: Own, posterior: Posterior, seed: int | None = None) -> Own:
        """The same predictor of another value of its posterior, with other hyperparameters or another history: what
        does not depend on these is shared.

        Args:
            posterior: with the same blocks and weights.
            seed: of the draws of the weights, for a head that makes some; by default they are drawn as before.
        """
        other = copy.copy(self)
        other._posterior = posterior
        other._ratio, other._promises = KeyedCache(), KeyedCache()
        return other

    def __dir__(self) -> list[str]:
        return [*shown_names(self, Predictor), "to"]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HYPERPARAMETERS:
            raise AttributeError(
                f"A predictor has the {name} of its posterior: take posterior.with_settings({name}=...), and wrap "
                f"again."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        posterior, settings = self._posterior, self._posterior.settings.plain()
        covered = sum(layer.parameters for layer in posterior.layers.values())
        total = sum(parameter.numel() for parameter in self.model.parameters())
        prior = settings["prior_precision"]
        shown = [f"prior precision {'per layer' if isinstance(prior, dict) else f'{prior:.4g}'}"]
        if not posterior.has_free_prior_precision:
            shown.append(f"scale {settings['scale']:.4g}")
        noise_variance = posterior.noise_variance
        if noise_variance is None:
            shown.append(f"temperature {settings['temperature']:.4g}")
        else:
            values = ", ".join(f"{value:.4g}" for value in noise_variance[:3].tolist())
            shown.append(f"noise variance {values}{', ...' if len(noise_variance) > 3 else ''}")
        lines = [
            f"{type(self).__name__}: {type(unwrap(self.model)).__name__}, method {posterior.method!r}, "
            f"head {self.head!r}, likelihood {posterior.likelihood.name!r}",
            f"  posterior over {covered:,} of {total:,} weights, {len(posterior.layers)} "
            f"{'layer' if len(posterior.layers) == 1 else 'layers'}; {', '.join(shown)}",
        ]
        return "\n".join([*lines, f"  {self.extra_repr()}"])

    @property
    def posterior(self) -> Posterior:
        """The posterior whose uncertainty this is."""
        return self._posterior

    @property
    def observation(self) -> Likelihood:
        """The likelihood of the targets, with the posterior's noise."""
        return self._posterior.observation

    @property
    def promises(self) -> ConformalScores | str | None:
        """The held-out scores by which its predictions promise; a text where they do not apply, which says why; None
        where `posthoc_uq.calibrate` stored none.
        """
        return self._promises.get(None, self._promises_here)

    @property
    def model(self) -> nn.Module:
        """The model that it was made for."""
        return self._given[0]

    @property
    def output_choice(self) -> OutputChoice | None:
        """Which part of what the model returns its outputs are; None where it returns a tensor."""
        return chosen_in(self._model[0])

    @property
    def device(self) -> torch.device:
        """Where it predicts."""
        return model_device(self._network)

    @reading
    def forward(self, *args: Any, **kwargs: Any) -> Prediction:
        """The prediction for a batch: a `ClassPrediction` or a `RegressionPrediction` by the likelihood. The arguments
        are the model's, or one batch as a loader gives it, ``(inputs, targets)``, a mapping or graphs, whose targets
        are ignored.

        Raises:
            NonFiniteError: an input's prediction is not finite.
            PosteriorMismatchError: the model's weights, or its buffers such as the statistics of batch normalisation,
                changed after the predictor was made.
            PosthocUQError: the head cannot serve this model, or the outputs do not fit the likelihood.
        """
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # pyright: ignore[reportPrivateImportUsage]
            raise _not_traced()
        found = self._batches(args, kwargs)
        return self._answer(found[0]) if len(found) == 1 else cat([self._answer(batch) for batch in found])

    def in_program(self, *args: Any) -> Prediction:
        """`forward` where `posthoc_uq.export` traces it; nothing is checked there."""
        return self._predict(Batch(args))

    @reading
    def distribution(self, *args: Any, **kwargs: Any) -> OutputGaussian | Tensor:
        """The distribution of a batch's outputs under the posterior, before temperature and observation noise: a
        Gaussian, or the outputs of every draw, ``(draws, batch, ...)``.
        """
        return self._distribution(self._batch(args, kwargs))

    def promising(self, prediction: Prediction, distribution: Any) -> Prediction:
        """A prediction of this distribution that knows what it was at the hyperparameters of the held-out scores, where
        all held-out labels have since chosen others.
        """
        promises = self.promises
        if not isinstance(promises, ConformalScores) or not promises.retuned:
            return prediction
        at = SettingsRecord.model_validate(promises.posterior).hyperparameters()

        def made() -> Prediction:
            return self.with_posterior(self._posterior.at(at)).prediction_of(distribution)

        return prediction.changed(before_retuning=Remade(made))

    @abstractmethod
    def prediction_of(self, distribution: Any) -> Prediction:
        """The prediction from a `distribution` of this head, at the posterior's temperature and noise variance. Other
        values of these need no further run of the model.
        """

    def fast_predictions(
        self, distribution: Any, temperatures: Sequence[float]
    ) -> Iterator[tuple[int, Prediction]]:
        """`prediction_of` a distribution for searches that want it at many temperatures, and do with less precision:
        predictions that hold the batch several times, each with the number of its temperatures, in their order.
        """
        for temperature in temperatures:
            settings = replace(self._posterior.settings, temperature=temperature)
            yield 1, self.with_posterior(self._posterior.at(settings)).prediction_of(distribution)

    def at_every_prior(self, *args: Any, **kwargs: Any) -> Any:
        """What gives the `distribution` of a batch ``at`` any prior precision, nearly: only the linearised head has it,
        for several layers with a low rank and outputs without positions. Otherwise None.
        """
        return None

    def check_weights(self) -> None:
        """Refuse a model whose weights, or buffers that predictions depend on, changed after the predictor was made.
        Nothing is checked while a program is traced.

        Raises:
            PosteriorMismatchError: they did.
        """
        if not torch.compiler.is_compiling():
            self.weight_watch.check()

    def _batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Batch]:
        """The arguments of a call; arrays become tensors, as in a loader, and several graphs a batch each."""
        return batches_of_call(args, kwargs, self._model[0], self._network)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The arguments of a call that are one batch.

        Raises:
            PosthocUQError: they are several graphs, or a list.
        """
        found = self._batches(args, kwargs)
        if len(found) > 1:
            raise PosthocUQError(
                f"This takes one graph, or one item of a list, at a time, and was given {len(found)}; predictor(...) "
                f"and predictor.predict(loader) take several."
            )
        return found[0]

    @reading
    def prediction_for(self, batch: Batch, distribution: Any) -> Prediction:
        """The prediction for a batch whose `distribution` is known, as `forward` gives it; novelty takes a plain pass.

        Raises:
            NonFiniteError: an input's prediction is not finite.
        """
        return self._answer(batch, distribution=distribution)

    def _answer(self, batch: Batch, *, on_cpu: bool = False, distribution: Any = None) -> Prediction:
        with self.explaining(batch):
            if distribution is None:
                prediction = self._predict(batch)
            else:
                novelty = self._known_novelty(batch)
                prediction = self.promising(self.prediction_of(distribution), distribution)
                prediction = prediction.with_novelty(novelty)
        if on_cpu:
            # the check waits for no device there; kept for a whole data set, without what novelty takes
            prediction = prediction.to("cpu")
            prediction = prediction.with_novelty(prediction.novelty_ratio)
        check_finite(prediction.numbers(), "prediction", self.head, lambda: self._own_outputs(batch))
        if batch.attention_mask is not None:
            prediction = attending(prediction, batch)
        promises = self.promises
        if promises is None:
            return prediction
        keys = None
        if isinstance(promises, ConformalScores) and promises.randomised:
            keys = promise_keys(batch, len(prediction), promises.seed).to(prediction.outputs_mean.device)
        return prediction.changed(promises=promises, sample_keys=keys)

    def _promises_here(self) -> ConformalScores | str | None:
        """The posterior's held-out scores where they are of this head and of its hyperparameters; see `promises`."""
        promises = self._posterior.history.promises
        if promises is None:
            return None
        made, present = promises.head, self.identity()
        if made != present:
            return (
                f"The held-out scores are of {_format_identity(made)}, and this predictor is "
                f"{_format_identity(present)}; calibrate for this one, posterior = "
                f"uq.calibrate(posterior, val_loader, head=...), and wrap again."
            )
        if not self._posterior.keeps_promises:
            return (
                "The posterior's hyperparameters changed after the held-out scores were measured; calibrate again, "
                "posterior = uq.calibrate(posterior, val_loader), and wrap again."
            )
        return promises

    def _own_outputs(self, batch: Batch) -> Tensor | None:
        """What the network gives for a batch at the posterior's mean, for the message of an error; None where it gives
        no tensor, or fails by itself, as torch's encoders do where a mask leaves out all tokens.
        """
        try:
            with torch.no_grad(), isolated_random_state():
                outputs = batch.copied().call(self._network)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            return None
        return outputs if isinstance(outputs, Tensor) else None

    @abstractmethod
    def _predict(self, batch: Batch) -> Prediction:
        """See `forward`."""

    @abstractmethod
    def _distribution(self, batch: Batch) -> OutputGaussian | Tensor:
        """See `distribution`."""

    @abstractmethod
    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `functional_samples`."""

    def identity(self) -> dict[str, Any]:
        """What its scores depend on beside the posterior, as plain values: the head and its options."""
        return {"head": self.head}

    def explaining(self, batch: Batch) -> AbstractContextManager[None]:
        """A context in which an error of the model itself on `batch` becomes one that says what the model got."""
        return explained(lambda: self._network, batch)

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """What enters the part of the model that has a posterior, for a batch. It does not depend on the posterior's
        settings, so many of them can be tried without running the part before it again.

        Returns:
            None where it would save next to nothing, or where the layers with a posterior are not the last ones.
        """
        return None

    def distribution_from(self, features: Features) -> OutputGaussian | Tensor:
        """The `distribution` that the batch itself would give."""
        raise PosthocUQError(f"The head {self.head!r} makes no features.")

    @reading
    def functional_samples(
        self,
        *args: Any,
        n_samples: int = FUNCTION_DRAWS,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draws of the outputs ``f(x)``, ``(n_samples, batch, ...)``, in float32 at least, in units of the outputs;
        logits are not divided by the temperature.

        * ``head="sampling"``: ``f(x; theta_s)`` for draws of the weights.
        * ``head="linearized"``: ``f(x; theta) + J(x) (theta_s - theta)`` for the same draws, by forward-mode
          differentiation: all outputs, whatever `outputs` says.
        * ``head="moments"``: of the Gaussian of each input, by itself.

        Under the first two heads the s-th draw is one function at all inputs of the batch, and at those of another call
        with a generator of the same seed: a joint draw over any number of candidates, at one pass a draw of what has a
        posterior and one of what comes before it. No covariance of the candidates is formed;
        ``functional_covariance(x, joint=True)`` forms it.

        Args:
            *args: what the model takes.
            n_samples: how many.
            generator: of the draws; without one they differ from call to call. The global random state is left alone.
            **kwargs: of the model.

        Raises:
            NonFiniteError: a draw is not finite.
            PosthocUQError: no draw is asked for, or an operation of the model has no forward derivative.
        """
        count, generator = check_option("n_samples", n_samples, Count), _or_new(generator)
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            functions = at_least_float32(self._functions(batch, count, generator))
        check_finite({"samples": functions.transpose(0, 1)}, "functional samples", self.head)
        return functions

    @reading
    def predictive_samples(
        self,
        *args: Any,
        n_samples: int = FUNCTION_DRAWS,
        generator: torch.Generator | None = None,
        targets: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """What each of the `functional_samples` predicts, at the posterior's temperature and noise variance.

        Args:
            *args: what the model takes.
            n_samples: how many.
            generator: as in `functional_samples`.
            targets: draw targets too: one label or value from ``p(y | f_s(x))`` for every draw and input.
            **kwargs: of the model.

        Returns:
            By default the mean of the target under each draw: probabilities ``(n_samples, batch, classes)``, or values
            ``(n_samples, batch, ...)`` without observation noise. With `targets` labels ``(n_samples, batch)``, or
            values with noise.

        Raises:
            NonFiniteError: a draw is not finite.
            PosthocUQError: as for `functional_samples`; or the likelihood does not say what it predicts.
        """
        generator, posterior = _or_new(generator), self.posterior
        functions = self.functional_samples(*args, n_samples=n_samples, generator=generator, **kwargs)
        functions, likelihood = scaled_logits(functions, posterior, draws=True), posterior.observation
        if likelihood.head_likelihoods and not targets:
            raise PosthocUQError(
                "Means of several heads are no one tensor: take predictor.functional_samples(x), whose outputs have "
                "those of all heads side by side, or predictive_samples(x, targets=True)."
            )
        if not targets:
            predictions: list[Any] = [likelihood.from_draws(f[None]) for f in functions]
            return torch.stack([p.probs if hasattr(p, "probs") else p.mean for p in predictions])
        shape, limit = functions.shape[:2], 2**63 - 1
        keys = torch.randint(-limit, limit, shape, generator=generator, device=generator.device)
        return torch.stack(
            [likelihood.draw(f, own.to(f.device), 0) for f, own in zip(functions, keys, strict=True)]
        )

    @reading
    def novelty(
        self,
        *args: Any,
        of: str = "layers",
        smoothing: float | None = None,
        prior_precision: float = 1.0,
        residual_weight: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        """How much of the prior's uncertainty the data left at each input, ``(samples,)`` in (0, 1]: larger for inputs
        unlike those of the training, to be compared with familiar inputs. No units, and the same for every head.

        * ``of="layers"``: by what enters the last layer and, pooled over positions, the first, the middle and the last
          layer that see positions; of a network without positions, also by the row that enters it. It is the ratio of
          ``"class"``, or, where another layer is more surprised, the one that is as surprising there, among training
          inputs that are left out of their own Grams. See `posthoc_uq.posteriors.stages`. One forward pass.
        * ``of="class"``: by the inputs ``phi`` of the last layer alone (with a 1 for the bias), in one forward pass
          without labels: ``min_c phi^T (G_c + t_c)^-1 phi / (phi^T phi / t_c)``, where ``G_c`` sums ``phi phi^T`` over
          the training inputs that the network puts in class c, and ``t_c`` is `smoothing` times the mean eigenvalue of
          ``G_c``: the variance that a Bayesian linear model of class c has left of its prior. A regression has one
          Gram. See `posthoc_uq.posteriors.features.FeatureGrams`. Where the fit found no layer with one row a sample,
          it is ``"top"``.
        * ``of="top"``: through the posterior itself, ``v^T J Sigma J^T v / v^T J Sigma_0 J^T v`` for the centred
          direction v of the predicted class, in one forward and one backward pass; see `PosteriorRatio`.
        * ``of="all"``: the same with traces over all centred outputs, one backward pass each.

        Args:
            *args: what the model takes.
            of: see above.
            smoothing: of ``"class"``; by default that of the posterior's `features`.
            prior_precision: tau of ``"top"`` and ``"all"``, which is not the one that predicts. A trained posterior
                has its training's.
            residual_weight: omega of ``method="inf"`` for ``"top"`` and ``"all"``; the residual fills directions that
                the data never excited.
            **kwargs: of the model.

        Raises:
            PosthocUQError: the posterior keeps nothing for ``"class"``, or has no quadratic forms for the others; a
                setting is out of range, or the outputs are not of shape ``(batch,)`` or ``(batch, outputs)``.
        """
        posterior, batch = self._posterior, self._batch(args, kwargs)
        form = checked_of(of, posterior)
        if smoothing is not None and form == "layers":
            raise PosthocUQError(
                "smoothing= is for novelty by the last layer alone: ask for predictor.novelty(..., of='class', "
                "smoothing=...)."
            )
        if form not in ("layers", "class"):
            remedy = "ask for of='layers'" if posterior.features is not None else ""
            posterior.require([QUADRATIC], f"Novelty of={form!r}", remedy)
        network = self._network
        if form in ("layers", "class"):
            with self.explaining(batch):
                if form == "class":
                    novelty = class_novelty(network, posterior, batch, smoothing)
                else:
                    novelty = novelty_over_layers(network, posterior, batch)
            check_finite({"novelty": novelty}, "novelty", self.head)
            return novelty
        if not 0 < prior_precision < float("inf") or not 0 <= residual_weight <= 1:
            raise PosthocUQError(
                f"prior_precision must be positive and residual_weight in [0, 1], not {prior_precision} and "
                f"{residual_weight}."
            )
        ratio = self._ratio.get(
            (form, prior_precision, residual_weight, model_device(network)),
            lambda: PosteriorRatio(network, posterior, form, prior_precision, residual_weight, batch),
        )
        novelty = ratio(batch)
        check_finite({"novelty": novelty}, "novelty", self.head)
        return novelty

    def _known_novelty(
        self, batch: Batch, calls: Sequence[Call] | None = None, rows: Tensor | None = None
    ) -> Tensor | Unread | None:
        """The novelty of a batch, for this head's predictions, of which most compute it when it is first read: None
        where it is not asked for, the posterior does not know it, or a program is being exported.

        Args:
            batch: the model's arguments.
            calls: of the layers it goes by, where the head's own pass recorded them; else one more pass is run.
            rows: the last layer's inputs, one a sample, where the head knows them so.
        """
        features = self._posterior.features
        if not self._tells_novelty or features is None or torch.compiler.is_compiling():
            return None
        if calls is None or len(calls) < len(features.watched):
            calls = caught_calls(self._network, features.watched, batch)
        if features.source == "positions":
            return novelty_of_calls(features, calls, batch)
        return novelty_when_read(features, rows_of(features, calls, batch, rows))

    @property
    def network_of_novelty(self) -> nn.Module | None:
        """The model at the posterior's mean, where predictions tell their novelty by its features; else None."""
        return self._network if self._tells_novelty and self._posterior.features is not None else None

    @property
    @abstractmethod
    def _network(self) -> nn.Module:
        """The model at the posterior's mean, which moves with the predictor."""

    def _apply(self, fn: Any, recurse: bool = True) -> Predictor:
        """Move, or change the precision of, what predicts: a subclass applies `fn` to its network.

        Raises:
            PosthocUQError: the numbers would be too narrow, or none.
        """
        own = model_dtype(self._network)
        made = fn(torch.ones(1, dtype=own, device=self.device)).detach()
        if made.dtype not in (own, torch.float32, torch.float64) or made.is_meta:
            asked = "the meta device" if made.is_meta else made.dtype
            raise PosthocUQError(
                f"A predictor computes in float32 or float64, or as its model does in {own}, and cannot be moved to "
                f"{asked}; predict under torch.autocast, or fit and wrap a model in that precision."
            )
        super()._apply(fn, recurse)
        return self

    def to_empty(self, **_: Any) -> Predictor:
        """Refused: it would leave no numbers."""
        raise PosthocUQError("A predictor cannot be emptied; move it by predictor.to(device).")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, but for a module around this one, to whose state it adds nothing."""
        if kwargs.get("destination") is None:
            raise PosthocUQError(
                "A predictor has no state dict, and cannot be traced: uq.export(predictor, x) makes a program, "
                "uq.save(predictor.posterior, path) keeps the posterior, and model.state_dict() the model's weights."
            )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Refused."""
        raise PosthocUQError(
            "A predictor has no state to load: load the model's weights by model.load_state_dict, the posterior by "
            "uq.load(path, model), and wrap the two."
        )

    def __prepare_scriptable__(self) -> Any:
        raise PosthocUQError(f"torch.jit.script cannot take a predictor: {_EXPORTED}")

    def train(self, mode: bool = True) -> Predictor:
        """Does nothing: predictors stay in eval mode."""
        return super().train(False)

    @reading
    def predict(
        self,
        loader: Iterable[Any],
        *,
        batch_to_inputs: BatchFunction | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predict every batch of a loader, on the predictor's device; results lie on the CPU, in the loader's order.

        No gradients are kept, and the global random state is afterwards as it was, whatever the loader draws.

        Args:
            loader: of inputs, or of pairs or mappings whose targets are ignored.
            batch_to_inputs: takes the model's inputs out of a batch of any other form.
            progress: whether to show a bar; by default on a terminal.

        Returns:
            One prediction for all samples.

        Raises:
            NonFiniteError: an input's prediction is not finite.
            PosteriorMismatchError: the model's weights changed meanwhile.
            PosthocUQError: the loader is none, yields no batch, or batches of an unknown form.
        """
        check_loader(loader)
        model = self._model[0]
        reader = BatchReader.of(model, batch_to_inputs, device=self.device)
        predictions = list[Prediction]()
        with (
            steady(self.model, call="predict"),
            torch.no_grad(),
            isolated_random_state(),
            Bar(loader, "predict", bars_shown(progress)) as bar,
        ):
            for batch in batches(loader, reader):
                predictions.append(self._answer(batch, on_cpu=True))
                bar.advance(len(predictions[-1]))
        return cat(predictions)


class GaussianPredictor(Predictor):
    """A head whose outputs are Gaussian.

    Args:
        model: see `Predictor`, as `posterior` and `novelty`.
        posterior: of any method.
        novelty: whether predictions know theirs.
        link: from logits to probabilities; see `from_gaussian`.
        n_draws: of the logits, for ``link="mc"``.
    """

    def __init__(
        self, model: nn.Module, posterior: Posterior, novelty: bool, link: str, n_draws: int
    ) -> None:
        super().__init__(model, posterior, novelty)
        self._link = one_of("link", link, posterior.likelihood.links)
        self._n_draws = check_option("n_draws", n_draws, Count)

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        draws = {"n_draws": self._n_draws} if self._link == "mc" else {}
        return {**super().identity(), "link": self._link, **draws}

    def fast_predictions(
        self, distribution: OutputGaussian, temperatures: Sequence[float]
    ) -> Iterator[tuple[int, Prediction]]:
        """With few draws of the outputs, the covariance taken apart once, and one call for several temperatures."""
        posterior, one_scale = self._posterior, not self._posterior.class_scale
        mean, variance, covariance = distribution[:3]
        if (
            one_scale
            and self._link == "mc"
            and posterior.likelihood.softmax
            and isinstance(covariance, Tensor)
        ):
            rows = posterior.likelihood.positions_of(mean)
            mean_rows = at_least_float32(mean if rows is None else rows.rows(mean))
            covariance = of_covariance(mean_rows, covariance)
        given = OutputGaussian(
            at_least_float32(mean),
            at_least_float32(variance).clamp(min=0),
            covariance,
            self._link,
            min(self._n_draws, _DRAFT_DRAWS),
        )
        step = max(1, _DRAFT_NUMBERS // max(1, given.numbers))
        for start in range(0, len(temperatures), step):
            part = temperatures[start : start + step]
            outputs = OutputGaussian.cat([scaled_gaussian(given, posterior, t) for t in part])
            yield len(part), posterior.observation.from_gaussian(outputs)

    def prediction_of(self, distribution: OutputGaussian) -> Prediction:
        """See `Predictor`."""
        mean, variance, covariance = distribution[:3]
        return from_gaussian(
            mean, variance, self._posterior, covariance=covariance, link=self._link, n_draws=self._n_draws
        )
