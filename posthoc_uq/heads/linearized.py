"""The linearised head: outputs linear in the weights, so that their covariance has a closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import at_least_float32, full_precision, temporary_bytes
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import check_differentiable, model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.core.options import Count, check_option
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.heads.jacobians import WeightCovariance, track_layers
from posthoc_uq.heads.linearized_outputs import (
    ChosenOutputs,
    LastLayer,
    LastLayerOutputs,
    LinearizedOutputs,
    Positions,
    checked_outputs,
    checked_positions,
)
from posthoc_uq.heads.predictor import GaussianPredictor, KeyedCache, check_finite, reading
from posthoc_uq.layers.capture import Capture
from posthoc_uq.layers.layer import Call
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, OutputGaussian
from posthoc_uq.likelihoods.positions import novelty_at
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors import QUADRATIC, Posterior
from posthoc_uq.posteriors.settings import get_width

if TYPE_CHECKING:
    from posthoc_uq.heads.closed_form import ClosedForm
    from posthoc_uq.heads.linearization import OutputsByPrior, Probes
    from posthoc_uq.heads.spectrum import Spectrum
    from posthoc_uq.layers.frozen import Features, FrozenPart

_MAX_BACKWARD = (
    256  # passes for positions, or several heads; `engine="auto"` draws the function where more are needed
)


class LinearizedNetwork:
    """What is made once for a network and the layers of a posterior, whatever the posterior's settings: predictors of
    its other values share it.

    Attributes:
        network: at the posterior's mean, in eval mode; never written.
        dtype: of activations and output gradients.
        budget: bytes that one temporary may take.
    """

    def __init__(
        self, network: nn.Module, posterior: Posterior, budget: int | None, tells_novelty: bool
    ) -> None:
        """
        Args:
            network: see above.
            posterior: which says what the layers are.
            budget: see above; by default what the device can hold.
            tells_novelty: whether passes keep what novelty is measured by.
        """
        self.network, self.dtype = network, statistics_dtype(network, None)
        self.device = model_device(network)
        self.budget = budget or temporary_bytes(self.device)
        self._posterior, self._tells_novelty = posterior, tells_novelty
        self._capture, self._last = KeyedCache[Capture](), KeyedCache[LastLayer | None]()
        self._rest = KeyedCache[LinearizedNetwork]()

    @cached_property
    def frozen(self) -> FrozenPart:
        """The part of the network before the weights with a posterior."""
        from posthoc_uq.layers.frozen import FrozenPart

        return FrozenPart(self.network, self._posterior.mean)

    def capture(self, batch: Batch) -> Capture:
        """Of the posterior's layers, as the fit or a first batch used them."""
        return self._capture.get(None, lambda: self._track(batch))

    def _track(self, batch: Batch) -> Capture:
        capture, features = (
            track_layers(self.network, self._posterior, batch.copied()),
            self._posterior.features,
        )
        capture.watched = features.watched if self._tells_novelty and features is not None else ()
        return capture

    def last(self, batch: Batch) -> LastLayer | None:
        """The layer whose outputs may be the network's, if the posterior has it."""
        return self._last.get(None, lambda: LastLayer.of(self.capture(batch)))

    def rest(self, features: Features) -> LinearizedNetwork:
        """The same of the rest of the network, which takes features.

        Raises:
            PosthocUQError: the features are those of another predictor.
        """
        rest = self.frozen.rest(features)

        def make() -> LinearizedNetwork:
            whole, capture = self._capture.get(None, _foreign), Capture(rest)
            capture.track(list(whole.tracked.values()))
            capture.watched = whole.watched
            found = copy.copy(self)
            found.network, found._capture, found._last = rest, KeyedCache(), KeyedCache()
            found._capture.get(None, lambda: capture)
            return found

        return self._rest.get(rest, make)


def _foreign() -> Capture:
    raise PosthocUQError("The features are those of another predictor.")


def deviations_of(posterior: Posterior, seeds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Draws of the weights' deviations from the trained ones, one a seed, by parameter, ``(draws, *shape)``."""
    drawn = posterior.sample_from(seeds)
    return {name: (weights - posterior.mean[name]).to(device) for name, weights in drawn.items()}


EngineName = Literal["auto", "exact", "jvp"]


class LinearizedPredictor(GaussianPredictor):
    """Predicts with the network linearised in its weights: outputs ``N(f(x; theta), J(x) Sigma J(x)^T)``.

    For a Laplace posterior this is the predictive that the Gauss-Newton approximation stands for (Khan, Immer, Abedi,
    Korzepa 2019, "Approximate inference turns deep networks into Gaussian processes"; Immer, Korzepa, Bauer 2021,
    "Improving predictions of Bayesian neural nets via local linearization"). There is no Monte Carlo error, and the
    mean is the trained network's own output.

    Engines:

    * ``"exact"``: one forward pass, and one backward pass for every output used. ``J`` is contracted layer by layer;
      no tensor of (batch, outputs, parameters) exists.
    * ``"jvp"``: `n_probes` draws of the weights, kept, and one forward-mode pass for each: all outputs at once,
      unbiased, with a relative standard deviation of ``sqrt(2 / n_probes)`` of every variance.
    * ``"auto"``: where the posterior covers one layer and that layer's outputs are the model's, which numbers decide on
      every batch, a closed form without a backward pass, for all outputs whatever `outputs` says. Elsewhere
      ``"exact"``; of outputs with positions, where that would take more than 256 backward passes, ``"jvp"``.

    Outputs with positions (pixels, tokens) are predicted position by position, and `positions` restricts them. The
    closed form is that of a last linear layer or pointwise convolution.

    With many classes ``outputs="topk"`` takes backward passes only for the classes with the largest logits of each
    input. All other classes get the variance that the last layer's weights alone give them, which is too small. Where
    the posterior does not cover the last layer (or the model changes its outputs), their variance is unknown, and they
    get the mean variance of the top classes, so that they count neither as more nor as less certain.


    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        link: from Gaussian outputs to a prediction: ``"mc"``, of logits ``"probit"`` or ``"bridge"``, or another of
            the likelihood's `links`. It gets the covariance of all classes where all are used and there are at most 50.
            With more, ``"mc"`` and ``"probit"`` get that of a posterior of the
            last layer by its leading directions, or that of the top classes, with the others as independent;
            ``"bridge"``, and ``outputs="all"`` of several layers, the variances alone.
        n_draws: points of the outputs, for ``"mc"``, where more than three classes need them or a likelihood draws.
        outputs: ``"all"``, ``"topk"`` (10 classes), a number of classes, or ``"auto"``: all up to 20 outputs and all
            of a regression, otherwise ``"topk"``.
        engine: ``"auto"``, ``"exact"`` or ``"jvp"``; see above.
        n_probes: draws of ``"jvp"``.
        novelty: whether predictions know their novelty, if the posterior does.
        positions: of outputs with positions, those that are predicted: a number, or several, that count a sample's
            positions as rows (-1 is the last); indices ``(k, dimensions)``; or a mask ``(*positions)``. Outputs and
            predictions then have one dimension of k positions. See also `at`.
        memory_budget: bytes that one temporary may take; by default 256 MiB, on a CPU 32 MiB.
        backpropagate: whether predictions, and the mean, the variance and the covariance of the outputs, can be
            differentiated by the inputs, where gradients are enabled: for acquisition functions. The Jacobian of a
            batch then exists as a tensor, (batch, outputs, weights), and all outputs are used. Novelty has no gradient.

    Raises:
        PosthocUQError: an option is none of the above.
    """

    head = "linearized"
    needs = frozenset({QUADRATIC})

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        link: str = "mc",
        n_draws: Count = LINK_DRAWS,
        outputs: str | int = "auto",
        engine: EngineName = "auto",
        n_probes: Count = 32,
        memory_budget: Count | None = None,
        novelty: bool = True,
        backpropagate: bool = False,
        positions: Positions = None,
    ) -> None:
        super().__init__(model, posterior, novelty, link, n_draws)
        self._engine = check_option("engine", engine, EngineName)
        self._n_probes = check_option("n_probes", n_probes, Count)
        self._memory_budget = check_option("memory_budget", memory_budget, Count | None)
        likelihood, used = posterior.likelihood, checked_outputs(outputs)
        self._chosen = ChosenOutputs(likelihood, link, used, checked_positions(positions))
        if isinstance(self._chosen.top, int) and not likelihood.softmax:
            raise PosthocUQError(
                f"outputs={outputs!r} picks classes by their logits; use outputs='all' for likelihood "
                f"{likelihood.name!r}."
            )
        self._backpropagate = check_option("backpropagate", backpropagate, bool)
        if backpropagate and (engine not in ("auto", "exact") or isinstance(self._chosen.top, int)):
            raise PosthocUQError(
                f"backpropagate=True forms the Jacobian of all outputs, and engine={engine!r}, outputs={outputs!r} "
                f"forms less; leave these out."
            )
        check_differentiable(unwrap(model))
        with isolated_random_state():  # copying a module may run its code
            self._prepare(replicate(self._model[0], posterior.trained_mean))

    def _prepare(self, network: nn.Module) -> None:
        """Make anew all that is kept of a network."""
        self._prepared = LinearizedNetwork(network, self._posterior, self._memory_budget, self._tells_novelty)
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Covariance and draws of the weights are made again when they are needed."""
        self._weights, self._deviations = KeyedCache[WeightCovariance](), KeyedCache[dict[str, Tensor]]()
        self._spectrum: KeyedCache[Spectrum] = KeyedCache()

    def with_posterior(self, posterior: Posterior, seed: int | None = None) -> LinearizedPredictor:
        """See `Predictor`."""
        other = super().with_posterior(posterior)
        same_blocks = posterior.blocks is self._posterior.blocks
        if not same_blocks or posterior.settings.of_weights() != self._posterior.settings.of_weights():
            other._forget_weights()
        return other

    def _apply(self, fn: Any, recurse: bool = True) -> LinearizedPredictor:
        """Move, or change the precision of, the network; all preparations are made anew."""
        super()._apply(fn, recurse)
        self._prepare(self._network._apply(fn))
        return self

    @property
    def _network(self) -> nn.Module:
        return self._prepared.network

    def extra_repr(self) -> str:
        """The choices that change its predictions, and the engine."""
        draws = f", n_draws={self._n_draws}" if self._link == "mc" else ""
        return f"link={self._link!r}{draws}, outputs={self._chosen.top!r}, engine={self._engine!r}"

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        probes = {"n_probes": self._n_probes} if self._engine == "jvp" else {}
        return {**super().identity(), **probes, "outputs": str(self._chosen.top), "engine": self._engine}

    def _promises_here(self) -> ConformalScores | str | None:
        """See `Predictor`; held-out scores are of whole inputs."""
        if self._posterior.history.promises is not None and self._chosen.positions is not None:
            return (
                "The held-out scores are of all positions of an input, and this predictor is asked for some of them; "
                "ask the one without positions= (or at)."
            )
        return super()._promises_here()

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `Predictor`; the weights of as many draws at once as memory allows, and what comes before them once."""
        from posthoc_uq.heads.linearization import function_draws

        prepared, posterior, found = self._prepared, self._posterior, list[Tensor]()
        weights = sum(layer.parameters for layer in posterior.layers.values())
        seeds, at_once = posterior.draw_seeds(n, generator), max(1, prepared.budget // (4 * weights))
        with self._gradients(False):
            features = prepared.frozen.features(batch)
            work = batch if features is None else features.batch
            with prepared.frozen.twins(features).borrow() as twin:
                for start in range(0, n, at_once):
                    deviations = deviations_of(posterior, seeds[start : start + at_once], prepared.device)
                    outputs, derivatives = function_draws(twin, work, deviations)
                    outputs = at_least_float32(outputs)
                    found.append(outputs + derivatives.to(outputs))
            return torch.cat(found)

    @property
    def _differentiated(self) -> bool:
        """Whether this call keeps the graph back to its inputs."""
        return self._backpropagate and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    @contextmanager
    def _gradients(self, kept: bool = True) -> Generator[None]:
        """Full precision; no inference mode and no gradients, whatever the caller's mode, since autograd is used
        inside; the caller's where this call keeps its graph.
        """
        if torch.compiler.is_compiling():  # a tracer makes a graph of its own of each mode
            yield
            return
        with full_precision(self._prepared.device):
            if kept and self._differentiated:
                yield
            else:
                with torch.inference_mode(False), torch.no_grad():
                    yield

    def _predict(self, batch: Batch) -> Prediction:
        with self._gradients():
            found = self._linearized(batch)
            gaussian = found.gaussian()
            prediction = self.promising(super().prediction_of(gaussian), gaussian)
        ratio = self._known_novelty(batch, found.watched, found.features)
        if found.picked is not None:
            prediction, ratio = prediction.unshifted(), novelty_at(ratio, found.sizes, found.picked)
        return prediction.with_novelty(ratio)

    def _distribution(self, batch: Batch) -> OutputGaussian:
        with self._gradients():
            return self._linearized(batch).gaussian()

    def prediction_of(self, distribution: OutputGaussian) -> Prediction:
        """See `Predictor`."""
        with self._gradients():
            prediction = super().prediction_of(distribution)
        return prediction if self._chosen.positions is None else prediction.unshifted()

    def at(self, positions: Positions) -> LinearizedPredictor:
        """The same predictor for these positions of the outputs, as with the option `positions`; it shares all that was
        prepared.

        Raises:
            PosthocUQError: they are no positions.
        """
        other = copy.copy(self)
        other._chosen = replace(self._chosen, positions=checked_positions(positions))
        other._promises = KeyedCache()
        return other

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`."""
        with self._gradients(False):
            batch = self._batch(args, kwargs)
            features = self._prepared.frozen.features(batch)
            if features is not None and self._engine != "jvp":
                self._prepared.capture(batch)
            return features

    def distribution_from(self, features: Features) -> OutputGaussian:
        """See `Predictor`."""
        with self._gradients(False):
            self.check_weights()
            return self._linearized(features.batch, features).gaussian()

    def closed_form(self, *args: Any) -> ClosedForm | None:
        """The closed form of the last layer that predicts such inputs, for programs; None where there is none.

        Raises:
            PosthocUQError: its covariance would have to be formed, and is too large.
        """
        self.check_weights()
        posterior, batch = self._posterior, self._batch(args, {})
        with self._gradients(False), self.explaining(batch):
            if not isinstance(self._linearized(batch), LastLayerOutputs):
                return None
            from posthoc_uq.heads.closed_form import ClosedForm

            last = self._prepared.last(batch)
            assert last is not None
            return ClosedForm(
                replicate(self._network),
                posterior,
                last.layer,
                self._chosen,
                self._weight_covariance(),
                lambda gaussian: self.promising(self.prediction_of(gaussian), gaussian),
                self.network_of_novelty is not None,
            )

    @reading
    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """``f(x; theta)``, the trained network's own outputs, at all positions."""
        batch = self._batch(args, kwargs)
        with self._gradients(), self.explaining(batch):
            if self._differentiated:
                return self._linearized(batch).mean
            return batch.copied().call(self._network)

    @reading
    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance over the weights of every raw output of the model, shaped like the outputs, under laplace-torch's
        name. A prediction's `epistemic_variance` is that of what it predicts on average: of logits divided by the
        temperature, of values in units of the target.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        return self._functional("variance", args, kwargs, lambda found: found.variance())

    @reading
    def functional_covariance(self, *args: Any, joint: bool = False, **kwargs: Any) -> Tensor:
        """Covariance of the outputs by the weights, in squared units of the network's outputs: for a likelihood with a
        `std`, these are the standardised ones.

        Args:
            joint: also between the inputs of the batch.

        Returns:
            ``(batch, outputs, outputs)``, or with `joint` ``(batch * outputs, batch * outputs)`` with the outputs of
            one input side by side. Of outputs with positions ``(batch, positions, classes, classes)``, or with `joint`
            of all outputs by input, position and class. Where only the top classes are used, `outputs` are these, the
            largest logit first, as in ``functional_mean(...).topk(K).indices``.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        return self._functional("covariance", args, kwargs, lambda found: found.covariance(joint))

    def _functional(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[LinearizedOutputs], Tensor],
    ) -> Tensor:
        """What is computed of the linearisation of a call's arguments, once its numbers are checked."""
        batch = self._batch(args, kwargs)
        with self._gradients(), self.explaining(batch):
            computed = compute(self._linearized(batch))
            check_finite({name: computed}, f"functional {name}", self.head)
            return computed

    @reading
    def at_every_prior(self, *args: Any, **kwargs: Any) -> OutputsByPrior | None:
        """See `Predictor`."""
        posterior, batch = self._posterior, self._batch(args, kwargs)
        by_backward_passes = self._engine == "exact" or (self._engine == "auto" and len(posterior.layers) > 1)
        if not by_backward_passes or self._backpropagate:
            return None
        from posthoc_uq.heads.linearization import Linearization
        from posthoc_uq.heads.spectrum import Spectrum

        if not Spectrum.supports(posterior):
            return None
        with self._gradients(False), self.explaining(batch):
            prepared, width = self._prepared, get_width(posterior.settings, "prior_precision")
            limit = temporary_limit(prepared.budget, prepared.device)
            spectrum = self._spectrum.get(
                None, lambda: Spectrum(posterior, width, prepared.dtype, prepared.device, limit)
            )
            found = Linearization(
                self._chosen,
                prepared.capture(batch),
                prepared.last(batch),
                spectrum,
                prepared.budget,
                batch,
                count_samples(batch),
            )
            several = self._engine == "auto" and posterior.likelihood.head_likelihoods
            many = several and found.backward_passes > _MAX_BACKWARD
            return None if found.sizes or many else found.at_every_prior(spectrum)

    def _weight_covariance(self) -> WeightCovariance:
        """The covariance of the weights, made once."""
        prepared = self._prepared

        def make() -> WeightCovariance:
            limit = temporary_limit(prepared.budget, prepared.device)
            return WeightCovariance(self._posterior, prepared.dtype, prepared.device, limit)

        return self._weights.get(None, make)

    def _linearized(self, batch: Batch, features: Features | None = None) -> LinearizedOutputs:
        """The linearisation of one batch, or from its features."""
        if self._differentiated and features is None:
            from posthoc_uq.heads.linearization import OutputsWithGraph

            return OutputsWithGraph(replicate(self._network), self._posterior, batch, self._chosen)
        if self._engine == "jvp":
            return self._probed(batch, features)
        if features is None:
            prepared, samples = self._prepared, count_samples(batch)
        else:
            prepared, batch, samples = self._prepared.rest(features), features.batch, features.samples
        weights, last = self._weight_covariance(), prepared.last(batch)
        alone = last if self._engine == "auto" and len(self._posterior.layers) == 1 else None
        if alone is not None and alone.hooked:
            outputs, calls, watched, own = alone.run(batch)
            closed = alone.outputs(self._chosen, outputs, calls, samples, weights, [*calls, *watched], own)
            if closed is not None:
                return closed
        from posthoc_uq.heads.linearization import Linearization

        capture = prepared.capture(batch)
        found = Linearization(self._chosen, capture, last, weights, prepared.budget, batch, samples)
        if alone is not None and found.by_last_layer is not None:
            return found.by_last_layer
        several = found.sizes or self._posterior.likelihood.head_likelihoods
        if self._engine == "auto" and several and found.backward_passes > _MAX_BACKWARD:
            return self._probed(batch, features, found.watched)
        return found

    def _probed(self, batch: Batch, features: Features | None, watched: Sequence[Call] = ()) -> Probes:
        """The linearisation by draws of the function."""
        from posthoc_uq.heads.linearization import Probes, function_draws

        prepared = self._prepared
        deviations = self._deviations.get(
            None,
            lambda: deviations_of(
                self._posterior,
                self._posterior.draw_seeds(self._n_probes, torch.Generator().manual_seed(0)),
                prepared.device,
            ),
        )
        if features is None:
            features = prepared.frozen.features(batch)
        with prepared.frozen.twins(features).borrow() as twin:
            work = batch if features is None else features.batch
            outputs, draws = function_draws(twin, work, deviations)
        return Probes(self._chosen, outputs, draws.to(prepared.dtype), watched)
