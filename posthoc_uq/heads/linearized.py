"""The linearised head: the mean is the trained network's output, the covariance that of its linearisation."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.chosen_outputs import ChosenOutputs, check_shape, checked_outputs
from posthoc_uq.heads.chosen_positions import Positions, checked_positions
from posthoc_uq.heads.differentiable import differentiable_outputs
from posthoc_uq.heads.finite import check_finite
from posthoc_uq.heads.function_draws import function_draws
from posthoc_uq.heads.interception import intercept
from posthoc_uq.heads.linearizing import Linearizing, without_gradients
from posthoc_uq.heads.position_linearization import (
    PositionLinearization,
    PositionProbes,
)
from posthoc_uq.heads.prediction import from_gaussian
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.replay import FeatureBatch, Features
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import QUADRATIC
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.layout import novelty_at
from posthoc_uq.predictions.links import DRAWS, checked_link
from posthoc_uq.predictions.positions import PositionPrediction
from posthoc_uq.predictions.samples import at_least_float32
from posthoc_uq.replica import model_device, replicate
from posthoc_uq.values import COUNT, Number, flag, one_of

EngineName = Literal["auto", "exact", "jvp", "last_layer"]

_BYTES = Number("at least 1 byte", least=1)


class LinearizedPredictor(Linearizing):
    """Predicts with the network linearised in its weights: outputs ``N(f(x; theta), J(x) Sigma J(x)^T)``.

    For a Laplace posterior this is the predictive that the Gauss-Newton approximation stands for (Khan, Immer, Abedi,
    Korzepa 2019, "Approximate inference turns deep networks into Gaussian processes"; Immer, Korzepa, Bauer 2021,
    "Improving predictions of Bayesian neural nets via local linearization"). There is no Monte Carlo error, and the
    mean is the trained network's own output.

    Engines:

    * ``"exact"``: one forward pass, and one backward pass for every output used. ``J`` is contracted layer by layer;
      no tensor of (batch, outputs, parameters) exists.
    * ``"last_layer"``: where the posterior covers one layer and that layer's outputs are the model's. A closed form
      without a backward pass, for all outputs whatever `outputs` says.
    * ``"jvp"``: `n_probes` draws of the weights, kept, and one forward-mode pass for each: all outputs at once,
      unbiased, with a relative standard deviation of ``sqrt(2 / n_probes)`` of every variance.
    * ``"auto"``: the closed form where it holds, found by numbers on every batch, and ``"exact"`` elsewhere. Of outputs
      with positions, where ``"exact"`` would take more than 256 backward passes, it is ``"jvp"``.

    Outputs with positions (pixels, tokens) are predicted position by position, and `positions` restricts them. The
    closed form is that of a last linear layer or pointwise convolution.

    With many classes ``outputs="topk"`` takes backward passes only for the classes with the largest logits of each
    input. All other classes get the variance that the last layer's weights alone give them, which is too small. Where
    the posterior does not cover the last layer (or the model changes its outputs), their variance is unknown, and they
    get the mean variance of the top classes, so that they count neither as more nor as less certain.

    The posterior's settings are read on every call, and when they change the head prepares itself anew.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        link: from Gaussian logits to probabilities; see `from_gaussian`. It gets the covariance of all classes where
            all are used and there are at most 50. With more, ``"mc"`` and ``"probit"`` get that of a posterior of the
            last layer by its leading directions, or that of the top classes, with the others as independent;
            ``"bridge"``, and ``outputs="all"`` of several layers, the variances alone.
        n_draws: of the logits, for ``"mc"``.
        outputs: ``"all"``, ``"topk"`` (10 classes), ``"topk:K"``, K, or ``"auto"``: all up to 20 outputs and all of a
            regression, otherwise ``"topk"``.
        engine: ``"auto"``, ``"exact"``, ``"jvp"`` or ``"last_layer"``; see above.
        n_probes: draws of ``"jvp"``, and random vectors of `functional_trace`.
        novelty: whether predictions know their novelty, if the posterior does.
        positions: of outputs with positions, those that are predicted: a number, or several, that count a sample's
            positions as rows (-1 is the last); indices ``(k, dimensions)``; or a mask ``(*positions)``. Outputs and
            predictions then have one dimension of k positions. See also `at`.
        memory_budget: bytes that one temporary may take; by default a share of what is free, at most 256 MiB.
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
        n_draws: int = DRAWS,
        outputs: str | int = "auto",
        engine: EngineName = "auto",
        n_probes: int = 32,
        memory_budget: int | None = None,
        novelty: bool = True,
        backpropagate: bool = False,
        positions: Positions = None,
    ) -> None:
        super().__init__(model, posterior)
        self._tells_novelty = flag("novelty", novelty)
        self._link, self._n_draws = checked_link(link, n_draws)
        self._engine = one_of("engine", engine, get_args(EngineName))
        self._n_probes = COUNT("n_probes", n_probes)
        self._positions = checked_positions(positions)
        self._budget = None if memory_budget is None else int(_BYTES("memory_budget", memory_budget))
        likelihood = posterior.likelihood
        self._chosen = ChosenOutputs(checked_outputs(outputs), likelihood.softmax, likelihood.joint, link)
        if isinstance(self._chosen.top, int) and not likelihood.softmax:
            raise PosthocUQError(
                f"outputs={outputs!r} picks classes by their logits; use outputs='all' for likelihood "
                f"{likelihood.name!r}."
            )
        self._backpropagate = flag("backpropagate", backpropagate)
        if backpropagate and (engine not in ("auto", "exact") or isinstance(self._chosen.top, int)):
            raise PosthocUQError(
                f"backpropagate=True forms the Jacobian of all outputs, and engine={engine!r}, outputs={outputs!r} "
                f"forms less; leave these out."
            )
        self._copy_network(model)

    def extra_repr(self) -> str:
        """The choices that change its predictions, and the engine."""
        draws = f", n_draws={self._n_draws}" if self._link == "mc" else ""
        return f"link={self._link!r}{draws}, outputs={self._chosen.top!r}, engine={self._engine!r}"

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        options: dict[str, Any] = {"head": self.head, "link": self._link}
        options |= {"n_draws": self._n_draws} if self._link == "mc" else {}
        options |= {"n_probes": self._n_probes} if self._engine == "jvp" else {}
        return options | {"outputs": str(self._chosen.top), "engine": self._engine}

    def _functions(self, posterior: Posterior, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `DrawnFunctions`."""
        with without_gradients():
            drawn = posterior.sample(n, generator)
            network = replicate(self._networks_of(posterior).twin)
            place = model_device(network)
            deviations = {name: (d - posterior.mean[name]).to(place) for name, d in drawn.items()}
            outputs, derivatives = function_draws(network, batch, deviations)
            return at_least_float32(outputs) + derivatives.to(at_least_float32(outputs))

    @property
    def _differentiated(self) -> bool:
        """Whether this call keeps the graph back to its inputs."""
        return self._backpropagate and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _with_graph(self, posterior: Posterior, batch: Batch, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs and their covariance, differentiable in the inputs."""
        samples = count_samples(batch)
        mean, covariance = differentiable_outputs(
            replicate(self._networks_of(posterior).twin), posterior, batch, samples, joint
        )
        check_shape(mean, samples)
        return mean, covariance

    def _predict(self, posterior: Posterior, batch: Batch) -> Prediction:
        if self._differentiated:
            ratio = self._known_novelty(posterior, batch)
            return self._prediction_of(posterior, self._distribution(posterior, batch)).with_novelty(ratio)
        with without_gradients():
            linearization = self._linearized(posterior, batch)
            outputs, calls = _shaped(linearization.gaussian()), linearization.watched
        ratio = self._known_novelty(posterior, batch, calls)
        if isinstance(linearization, (PositionLinearization, PositionProbes)):
            ratio = novelty_at(ratio, linearization.sizes, linearization.picked)
        return self._prediction_of(posterior, outputs).with_novelty(ratio)

    def _distribution(self, posterior: Posterior, batch: Batch) -> GaussianOutputs:
        if self._differentiated and not isinstance(batch, FeatureBatch):
            mean, covariance = self._with_graph(posterior, batch)
            variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
            return GaussianOutputs(
                mean, variance, covariance if self._chosen.wants_covariance(mean) else None
            )
        with without_gradients():
            return _shaped(self._linearized(posterior, batch).gaussian())

    def _prediction_of(self, posterior: Posterior, distribution: GaussianOutputs) -> Prediction:
        with nullcontext() if self._differentiated else without_gradients():
            prediction = from_gaussian(
                distribution.mean,
                distribution.variance,
                posterior,
                covariance=distribution.covariance,
                link=self._link,
                n_draws=self._n_draws,
            )
        if self._positions is not None and isinstance(prediction, PositionPrediction):
            return prediction.unshifted()
        return prediction

    def at(self, positions: Positions) -> LinearizedPredictor:
        """The same predictor for these positions of the outputs, as with the option `positions`; it shares all that was
        prepared.

        Raises:
            PosthocUQError: they are no positions.
        """
        other = copy.copy(self)
        other._positions = checked_positions(positions)
        return other

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`."""
        with without_gradients():
            networks = self._networks_of(self._snapshot())
            features = networks.fixed_part.features(args, kwargs)
            if features is not None and self._engine != "jvp":
                self._prepared(networks, Batch(args, None, kwargs))
            return features

    def distribution_from(self, features: Features) -> GaussianOutputs:
        """See `Predictor`."""
        posterior = self._snapshot()
        networks = self._networks_of(posterior)
        if self._engine != "jvp" and networks.ready is None:
            raise PosthocUQError("The features are those of another predictor.")
        intercept(
            (networks.swapped or networks.twin) if networks.ready is None else networks.ready.capture.twin
        )
        return self._distribution(posterior, FeatureBatch(features))

    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """``f(x; theta)``, the trained network's own outputs, at all positions."""
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            if self._differentiated:
                return self._with_graph(self._snapshot(), batch)[0]
            networks = self._networks_of(self._snapshot())
            with without_gradients():
                return batch.copied().call(networks.twin)

    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance of every output by the weights, shaped like the outputs; logits are not divided by the temperature.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        batch = self._batch(args, kwargs)
        if self._differentiated:
            with self.explaining(batch):
                return self._distribution(self._snapshot(), batch).variance
        with without_gradients(), self.explaining(batch):
            linearization = self._linearized(self._snapshot(), batch)
            variance = linearization.variance().reshape(linearization.mean.shape)
            check_finite({"variance": variance}, "functional variance", self.head)
            return variance

    def functional_covariance(self, *args: Any, joint: bool = False, **kwargs: Any) -> Tensor:
        """Covariance of the outputs by the weights.

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
        batch = self._batch(args, kwargs)
        if self._differentiated:
            with self.explaining(batch):
                return self._with_graph(self._snapshot(), batch, joint)[1]
        with without_gradients(), self.explaining(batch):
            covariance = self._linearized(self._snapshot(), batch).covariance(joint)
            check_finite({"covariance": covariance}, "functional covariance", self.head)
            return covariance

    def functional_trace(self, *args: Any, n_probes: int | None = None, **kwargs: Any) -> Tensor:
        """The sum of all outputs' variances for every input, ``(batch,)``: one number for the uncertainty of a sample.

        With more outputs than `n_probes`, the exact engine estimates it by the mean of ``u^T J Sigma J^T u`` over
        random signs ``u``, the same for all inputs and calls (Hutchinson 1990): one backward pass each, whatever the
        number of outputs.

        Args:
            n_probes: random vectors; by default the predictor's.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model, or there is no probe.
        """
        probes = self._n_probes if n_probes is None else n_probes
        if probes < 1:
            raise PosthocUQError(f"n_probes must be at least 1, not {probes}.")
        batch = self._batch(args, kwargs)
        with without_gradients(), self.explaining(batch):
            trace = self._linearized(self._snapshot(), batch).trace(probes)
            check_finite({"trace": trace}, "functional trace", self.head)
            return trace


def _shaped(outputs: GaussianOutputs) -> GaussianOutputs:
    return outputs._replace(variance=outputs.variance.reshape(outputs.mean.shape))
