"""The linearised head: the mean is the trained network's output, the covariance that of its linearisation."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.operands import temporary_limit
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.cut import Cut
from posthoc_uq.heads.function_draws import function_draws
from posthoc_uq.heads.jacobians import Gradient, WeightCovariance, one_output, pull, random_signs
from posthoc_uq.heads.links import DRAWS, check_link, from_gaussian
from posthoc_uq.heads.prediction import Prediction, with_novelty
from posthoc_uq.heads.predictor import GaussianOutputs, Predictor
from posthoc_uq.heads.products import Mode
from posthoc_uq.heads.replay import Features, ReplayError, Rest, intercept
from posthoc_uq.heads.spread import Spread, of_product
from posthoc_uq.heads.tracking import Tracked, output_layer, track_layers
from posthoc_uq.layers import Call
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import model_device, replicate, statistics_dtype, unwrap

Engine = Literal["auto", "exact", "jvp", "last_layer"]

ALL_OUTPUTS = 20  # up to which `outputs="auto"` takes all of them
TOP = 10  # classes that "topk" takes
_COVARIANCE_CLASSES = 50  # up to which the link gets a covariance of all
_AT_ONCE = 2**16  # logits whose covariance is put into its directions at once
_STORED = 4  # memory budgets that output gradients may take before the batch is cut
_PREPARING = threading.RLock()


class LinearizedPredictor(Predictor):
    """Predicts with the network linearised in its weights: outputs ``N(f(x; theta), J(x) Sigma J(x)^T)``.

    For a Laplace posterior this is the predictive that the Gauss-Newton approximation stands for (Khan, Immer, Abedi,
    Korzepa 2019, "Approximate inference turns deep networks into Gaussian processes"; Immer, Korzepa, Bauer 2021,
    "Improving predictions of Bayesian neural nets via local linearization"). There is no sampling noise, and the mean
    is the trained network's own output.

    Engines:

    * ``"exact"``: one forward pass, and one backward pass for every output used. ``J`` is contracted layer by layer as
      it comes: no tensor of (batch, outputs, parameters) exists.
    * ``"last_layer"``: where the posterior covers one layer and that layer's outputs are the model's. A closed form
      without a backward pass, for all outputs whatever `outputs` says.
    * ``"jvp"``: `n_probes` draws of the weights, kept, and one forward-mode pass for each: all outputs at once,
      unbiased, with a relative standard deviation of ``sqrt(2 / n_probes)`` of every variance.
    * ``"auto"``: the closed form where it holds, found by numbers on every batch, and ``"exact"`` elsewhere.

    With many classes ``outputs="topk"`` pulls only those with the largest logits of each input back. All other classes
    get the variance that the last layer's weights alone give them, which is too small. Where the posterior does not
    cover the last layer (or the model changes its outputs), nothing is known of them, and they get the mean variance of
    the classes that were looked at, so that they count neither as more nor as less certain.

    The posterior's settings are looked at on every call, and a change of them makes the head prepare itself anew.

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
        engine: see above.
        n_probes: draws of ``"jvp"``, and random vectors of `functional_trace`.
        novelty: whether predictions know their novelty, if the posterior does.
        memory_budget: bytes that one temporary may take; by default a share of what is free, at most 256 MiB.

    Raises:
        PosthocUQError: an option is none of the above.
    """

    head = "linearized"

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        link: str = "mc",
        n_draws: int = DRAWS,
        outputs: str | int = "auto",
        engine: str = "auto",
        n_probes: int = 32,
        memory_budget: int | None = None,
        novelty: bool = True,
    ) -> None:
        super().__init__(model, posterior)
        self._tells_novelty = novelty
        check_link(link, n_draws)
        if engine not in get_args(Engine):
            raise PosthocUQError(f"engine must be one of {get_args(Engine)}, not {engine!r}.")
        if n_probes < 1:
            raise PosthocUQError(f"n_probes must be at least 1, not {n_probes}.")
        if memory_budget is not None and memory_budget < 1:
            raise PosthocUQError(f"memory_budget must be a positive number of bytes, not {memory_budget}.")
        self._link, self._n_draws = link, n_draws
        self._top = _top_of(outputs)
        if isinstance(self._top, int) and not isinstance(posterior.likelihood, Categorical):
            raise PosthocUQError(
                f"outputs={outputs!r} picks classes by their logits; use outputs='all' for likelihood "
                f"{posterior.likelihood.name!r}."
            )
        self._engine, self._n_probes, self._budget = engine, n_probes, memory_budget
        self._dtype = statistics_dtype(unwrap(model), None)
        with isolated_random_state():  # copying a module may run its code
            self._twin: tuple[nn.Module] = (replicate(model, posterior.centre),)
            # one whose weights are swapped while it runs, so that no other thread may use it for its mean
            self._swapped = (replicate(model, posterior.centre),) if engine == "jvp" else self._twin
        self._cut = Cut(self._twin[0], posterior.mean)
        self._ready: Tracked | None = None
        self._weights: tuple[Any, WeightCovariance] | None = None
        self._drawn: tuple[Any, dict[str, Tensor]] | None = None

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        own: dict[str, Any] = {"head": self.head, "link": self._link}
        own |= {"n_draws": self._n_draws} if self._link == "mc" else {}
        own |= {"n_probes": self._n_probes} if self._engine == "jvp" else {}
        return own | {"outputs": str(self._top), "engine": self._engine}

    def forward(self, *args: Any, **kwargs: Any) -> Prediction:
        """The prediction for a batch: `ClassPrediction` or `RegressionPrediction` by the likelihood.

        Raises:
            PosthocUQError: the engine cannot serve this model, or the likelihood is one that no prediction is defined
                for.
        """
        batch = Batch(args, None, kwargs)
        with self.explaining(batch):
            found, calls = self._distribution(args, kwargs)
            ratio = self._known_novelty(batch, calls)
        return with_novelty(self.prediction_of(found), ratio)

    def distribution(self, *args: Any, **kwargs: Any) -> GaussianOutputs:
        """See `Predictor`."""
        return self._distribution(args, kwargs)[0]

    def _distribution(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GaussianOutputs, list[Call]]:
        """The outputs, and the calls of the layer by which novelty goes, as far as they were seen in this pass."""
        with _own_modes():
            calls: list[Call] = []
            mean, variance, covariance = self._gaussian(*_batch(args, kwargs), calls)
            return GaussianOutputs(mean, variance.reshape(mean.shape), covariance), calls

    def prediction_of(self, distribution: GaussianOutputs) -> Prediction:
        """See `Predictor`."""
        with _own_modes():
            return from_gaussian(
                distribution.mean,
                distribution.variance,
                self._posterior,
                covariance=distribution.covariance,
                link=self._link,
                n_draws=self._n_draws,
            )

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`."""
        with _own_modes():
            found = self._cut.features(args, kwargs)
            if found is not None and self._engine != "jvp":
                self._prepared(_batch(args, kwargs)[0])
            return found

    def distribution_from(self, features: Features) -> GaussianOutputs:
        """See `Predictor`."""
        if self._engine != "jvp" and self._ready is None:
            raise PosthocUQError("The features are those of another predictor.")
        intercept(self._swapped[0] if self._ready is None else self._ready.capture.twin)
        return self.distribution(Rest(features))

    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """``f(x; theta)``, the trained network's outputs as it gives them."""
        with _own_modes(), self.explaining(Batch(args, None, kwargs)):
            return _batch(args, kwargs)[0].copied().call(self._twin[0])

    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance of every output by the weights, shaped like the outputs; logits are not divided by the temperature.

        Raises:
            PosthocUQError: the engine cannot serve this model.
        """
        with _own_modes(), self.explaining(Batch(args, None, kwargs)):
            batch, samples = _batch(args, kwargs)
            if self._engine == "jvp":
                mean, deviations = self._draw(batch, samples)
                return deviations.square().mean(0).reshape(mean.shape)
            recording = self._run(batch, samples)
            return self._variance(recording, samples).reshape(recording.outputs.shape)

    def functional_covariance(self, *args: Any, joint: bool = False, **kwargs: Any) -> Tensor:
        """Covariance of the outputs by the weights.

        Args:
            joint: also between the inputs of the batch.

        Returns:
            ``(batch, outputs, outputs)``, or with `joint` ``(batch * outputs, batch * outputs)`` with the outputs of
            one input side by side. Where only the top classes are used, `outputs` are these, the largest logit first,
            as in ``functional_mean(...).topk(K).indices``.

        Raises:
            PosthocUQError: the engine cannot serve this model.
        """
        with _own_modes(), self.explaining(Batch(args, None, kwargs)):
            batch, samples = _batch(args, kwargs)
            if self._engine == "jvp":
                mean, deviations = self._draw(batch, samples)
                indices = self._indices(mean)
                if indices is not None:
                    deviations = deviations.gather(2, indices.expand(len(deviations), -1, -1))
                if joint:
                    flat = deviations.flatten(1)
                    return flat.T @ flat / len(flat)
                return torch.einsum("rsc,rsd->scd", deviations, deviations) / len(deviations)
            recording = self._run(batch, samples)
            indices = self._indices(recording.outputs.detach())
            return self._covariance(recording, batch, samples, indices, joint)

    def functional_trace(self, *args: Any, n_probes: int | None = None, **kwargs: Any) -> Tensor:
        """The sum of all outputs' variances for every input, ``(batch,)``: one number of uncertainty a sample.

        With more outputs than `n_probes`, the exact engine estimates it by the mean of ``u^T J Sigma J^T u`` over
        random signs ``u``, the same for all inputs and calls (Hutchinson 1990): one backward pass each, whatever the
        number of outputs.

        Args:
            n_probes: random vectors; by default the predictor's.

        Raises:
            PosthocUQError: the engine cannot serve this model, or there is no probe.
        """
        probes = self._n_probes if n_probes is None else n_probes
        if probes < 1:
            raise PosthocUQError(f"n_probes must be at least 1, not {probes}.")
        with _own_modes(), self.explaining(Batch(args, None, kwargs)):
            batch, samples = _batch(args, kwargs)
            if self._engine == "jvp":
                return self._draw(batch, samples)[1].square().mean(0).sum(1)
            recording = self._run(batch, samples)
            outputs = recording.outputs.detach()
            size = outputs[0].numel()
            with torch.autocast(outputs.device.type, enabled=False):
                closed = self._closed_form(recording)
                if closed is not None:
                    found = self._covariances(outputs.device).own_variance(*closed)
                elif size <= probes:
                    found = self._variances(recording, one_output(outputs, None), size, samples)
                else:
                    signs = random_signs(outputs, probes, torch.Generator().manual_seed(0))
                    found = self._variances(recording, signs, probes, samples) / probes
                return found.sum(1).to(outputs.device, self._dtype)

    def _gaussian(
        self, batch: Batch, samples: int, seen: list[Call]
    ) -> tuple[Tensor, Tensor, Tensor | Spread | None]:
        """Mean, variance and, for the link, what is known of the covariance of the outputs; `seen` gets the calls of
        the watched layer.
        """
        if self._engine == "jvp":
            mean, deviations = self._draw(batch, samples)
            variance = deviations.square().mean(0)
            if self._wants_covariance(mean):
                return mean, variance, torch.einsum("rsc,rsd->scd", deviations, deviations) / len(deviations)
            if not self._wants_spread(mean):
                return mean, variance, None
            root = deviations.permute(1, 2, 0) / len(deviations) ** 0.5
            return mean, variance, of_product(mean, variance, lambda x: root @ (root.transpose(1, 2) @ x))
        recording = self._run(batch, samples)
        mean = recording.outputs.detach()
        seen += recording.watched
        if self._wants_covariance(mean):
            covariance = self._covariance(recording, batch, samples, None, joint=False)
            return mean, covariance.diagonal(dim1=1, dim2=2), covariance
        if not self._wants_spread(mean):
            return mean, self._variance(recording, samples), None
        with torch.autocast(mean.device.type, enabled=False):
            closed, weights = self._closed_form(recording), self._covariances(mean.device)
            if closed is not None:
                variance = self._variance(recording, samples)
                return mean, variance, _own_spread(weights, *closed, mean, variance)
        indices = self._indices(mean)
        if indices is None:
            return mean, self._variance(recording, samples), None
        # with the mean of all logits, for the covariance of the centred ones
        return mean, *self._top_spread(mean, indices, recording, batch, samples)

    def _top_spread(
        self, mean: Tensor, indices: Tensor, recording: Recording, batch: Batch, samples: int
    ) -> tuple[Tensor, Spread]:
        """Variances of all logits, and their covariance: of the centred logits at `indices` as it is, of the others as
        if they were independent.
        """
        last = self._last_layer(recording)
        top = self._covariance(recording, batch, samples, indices, joint=False, centre=True)
        number = indices.shape[1]
        variance, centred = _others(self._covariances(mean.device), last, mean, top)
        own = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
        variance = variance.to(own).scatter(1, indices, own)
        differences = top[:, :number] - top[:, number:]
        block = differences[:, :, :number] - differences[:, :, number:]
        centred = centred.to(own).scatter(1, indices, block.diagonal(dim1=1, dim2=2).clamp(min=0))

        def multiply(x: Tensor) -> Tensor:
            rows = indices.unsqueeze(-1).expand(-1, -1, x.shape[2])
            return (centred.unsqueeze(-1) * x).scatter(1, rows, block.to(x) @ x.gather(1, rows))

        return variance, of_product(mean.to(self._dtype), centred, multiply)

    def _wants_covariance(self, mean: Tensor) -> bool:
        """Whether the link gets all of it."""
        if not isinstance(self._posterior.likelihood, Categorical) or mean[0].numel() > _COVARIANCE_CLASSES:
            return False
        return self._number_used(mean) is None

    def _wants_spread(self, mean: Tensor) -> bool:
        """Whether the link can do with what is known of the covariance of many classes."""
        return isinstance(self._posterior.likelihood, Categorical) and self._link != "bridge"

    def _number_used(self, outputs: Tensor) -> int | None:
        """How many of a sample's outputs are used, or None for all."""
        size = outputs[0].numel()
        if self._top == "all":
            return None
        if isinstance(self._top, int):
            return None if self._top >= size else self._top
        many = size > ALL_OUTPUTS and isinstance(self._posterior.likelihood, Categorical)
        return TOP if many else None

    def _indices(self, outputs: Tensor) -> Tensor | None:
        """The outputs used, ``(samples, k)``, or None for all."""
        used = self._number_used(outputs)
        return None if used is None else outputs.flatten(1).topk(used).indices

    def _run(self, batch: Batch, samples: int) -> Recording:
        recording = self._prepared(batch).capture.run(batch, samples)
        _check_outputs(recording.outputs, samples)
        return recording

    def _variance(self, recording: Recording, samples: int) -> Tensor:
        """Of every output, ``(samples, outputs)``."""
        outputs = recording.outputs.detach()
        with torch.autocast(outputs.device.type, enabled=False):
            closed = self._closed_form(recording)
            if closed is not None:
                found = self._covariances(outputs.device).own_variance(*closed)
                return found.clamp(min=0).to(outputs.device, self._dtype)
            indices, size = self._indices(outputs), outputs[0].numel()
            number = size if indices is None else indices.shape[1]
            last = None if indices is None else self._last_layer(recording)
            found = self._variances(recording, one_output(outputs, indices), number, samples)
            found = found.clamp(min=0).to(outputs.device, self._dtype)
            if indices is None:
                return found
            if last is None:
                others = found.mean(1, keepdim=True).expand(samples, size)
            else:
                others = self._covariances(outputs.device).own_variance(*last).clamp(min=0)
            return others.to(found).scatter(1, indices, found)

    def _variances(self, recording: Recording, gradient: Gradient, number: int, samples: int) -> Tensor:
        """Of some functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        weights = self._covariances(recording.outputs.device)
        step = max(1, self._stored(recording) // max(1, self._size(recording)))
        found: list[Tensor] = []
        for start in range(0, number, step):
            numbers = range(start, min(number, start + step))
            pulled = pull(recording, gradient, numbers, self._dtype, last=numbers.stop == number)
            found.append(weights.contract(pulled, samples, len(numbers), "variance"))
        return torch.cat(found, dim=1)

    def _covariance(
        self,
        recording: Recording,
        batch: Batch,
        samples: int,
        indices: Tensor | None,
        joint: bool,
        centre: bool = False,
    ) -> Tensor:
        """Of all outputs, or of those at `indices`, with `centre` and of the mean of all outputs after them; a batch
        whose output gradients are too many is cut in two.
        """
        outputs = recording.outputs.detach()
        weights = self._covariances(outputs.device)
        number = (outputs[0].numel() if indices is None else indices.shape[1]) + centre
        with torch.autocast(outputs.device.type, enabled=False):
            closed = self._closed_form(recording)
            if closed is not None and indices is None:
                found = weights.own_covariance(*closed, joint)
                return found.to(outputs.device, self._dtype)
        if not joint and samples > 1 and self._size(recording) * number > self._stored(recording):
            del recording
            parts: list[Tensor] = []
            for start, stop in ((0, samples // 2), (samples // 2, samples)):
                half, size = batch.narrow(start, stop - start, samples), stop - start
                own = None if indices is None else indices[start:stop]
                parts.append(self._covariance(self._run(half, size), half, size, own, joint, centre))
            return torch.cat(parts)
        mode: Mode = "joint" if joint else "covariance"
        with torch.autocast(outputs.device.type, enabled=False):
            pulled = pull(recording, one_output(outputs, indices), range(number), self._dtype, last=True)
            found = weights.contract(pulled, samples, number, mode)
        return found.to(outputs.device, self._dtype)

    def _closed_form(self, recording: Recording) -> tuple[str, Tensor] | None:
        """Name and activations of the last layer, if the posterior covers no other and the engine may use it."""
        if self._engine == "exact":
            return None
        found = self._last_layer(recording) if len(self._posterior.layers) == 1 else None
        if found is None and self._engine == "last_layer":
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer whose outputs are the model's; this one has "
                f"{len(self._posterior.layers)} layers ({list(self._posterior.layers)[-3:]}). Fit with layers='last', "
                f"or use engine='exact'."
            )
        return found

    def _last_layer(self, recording: Recording) -> tuple[str, Tensor] | None:
        """Name and activations of the layer whose outputs are the model's, if the posterior covers it."""
        ready = self._ready
        assert ready is not None
        if ready.last is None:
            return None
        with torch.autocast(recording.outputs.device.type, enabled=False):
            rows = output_layer(recording, ready.capture, ready.last, self._dtype)
        return None if rows is None else (ready.last, rows)

    def _draw(self, batch: Batch, samples: int) -> tuple[Tensor, Tensor]:
        """Outputs ``(samples, ...)``, and draws of their deviation ``(n_probes, samples, outputs)``."""
        features = None if isinstance(batch, Rest) else self._cut.features(batch.args, batch.kwargs)
        if features is not None:
            try:
                intercept(self._swapped[0])
                return self._draw(Rest(features), samples)
            except ReplayError as error:
                self._cut.refuse(str(error))
        outputs, deviations = function_draws(self._swapped[0], batch, self._deviations())
        _check_outputs(outputs, samples)
        return outputs, deviations.to(self._dtype).flatten(2) if outputs.ndim > 1 else deviations.unsqueeze(2)

    def _size(self, recording: Recording) -> int:
        """Bytes of output gradients that one backward pass hands over."""
        return recording.numbers * torch.finfo(self._dtype).bits // 8

    def _stored(self, recording: Recording) -> int:
        device = recording.outputs.device
        return _STORED * (default_budget(device) if self._budget is None else self._budget)

    def _settings(self) -> Any:
        posterior = self._posterior
        priors = tuple(posterior.layer_prior(name) for name in posterior.layers)
        return posterior.scale, posterior.noise_scale, posterior.residual_weight, priors

    def _covariances(self, device: torch.device) -> WeightCovariance:
        """The posterior's covariance at its present settings."""
        settings, found = self._settings(), self._weights
        if found is None or found[0] != settings:
            with _PREPARING:
                found = self._weights
                if found is None or found[0] != settings:
                    budget = default_budget(device) if self._budget is None else self._budget
                    limit = temporary_limit(budget, device)
                    made = WeightCovariance(self._posterior, self._dtype, device, limit)
                    self._weights = found = (settings, made)
        return found[1]

    def _deviations(self) -> dict[str, Tensor]:
        """Draws of the weights' deviation from the trained ones, by parameter, the same until settings change."""
        settings, found = self._settings(), self._drawn
        if found is None or found[0] != settings:
            with _PREPARING:
                found = self._drawn
                if found is None or found[0] != settings:
                    draws = self._posterior.sample(self._n_probes, torch.Generator().manual_seed(0))
                    device = model_device(self._twin[0])
                    made = {name: (d - self._posterior.mean[name]).to(device) for name, d in draws.items()}
                    self._drawn = found = (settings, made)
        return found[1]

    def _prepared(self, batch: Batch) -> Tracked:
        if self._ready is None:
            with _PREPARING, isolated_random_state():
                if self._ready is None:
                    ready = track_layers(self._twin[0], self._posterior, batch.copied(), self._dtype)
                    if self._tells_novelty and self._posterior.features is not None:
                        ready.capture.watched = self._posterior.features.layer
                    self._ready = ready
        return self._ready


def _own_spread(
    weights: WeightCovariance, layer: str, rows: Tensor, mean: Tensor, variance: Tensor
) -> Spread:
    """Of the outputs of the last layer alone, a few samples at a time: products with a covariance of many classes are
    large.
    """
    step = max(1, _AT_ONCE // max(1, mean[0].numel()))
    parts = [
        of_product(m.to(v.dtype), v, weights.own_product(layer, a))
        for a, m, v in zip(rows.split(step), mean.split(step), variance.split(step), strict=True)
    ]
    return Spread(torch.cat([part.root for part in parts]), torch.cat([part.rest for part in parts]))


def _others(
    weights: WeightCovariance, last: tuple[str, Tensor] | None, mean: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """Variances of the logits that were not pulled back, and of the same logits centred, each ``(samples, outputs)``:
    by the last layer's weights, or the mean over those that were.

    Args:
        top: covariance of the logits that were, and of the mean of all after them.
    """
    size = mean[0].numel()
    if last is not None:
        variance = weights.own_variance(*last).clamp(min=0)
        ones = torch.ones(*variance.shape, 1, dtype=last[1].dtype, device=last[1].device)
        sums = weights.own_product(*last)(ones)[:, :, 0].to(variance) / size
        return variance, (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    own = top.diagonal(dim1=1, dim2=2)
    centred = own[:, :-1] - 2 * top[:, :-1, -1] + own[:, -1:]
    return tuple(v.clamp(min=0).mean(1, keepdim=True).expand(-1, size) for v in (own[:, :-1], centred))  # type: ignore[return-value]


@contextmanager
def _own_modes() -> Generator[None]:
    """Whatever mode the caller is in: autograd is used inside, and needs no gradient to come out."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Batch, int]:
    """The model's arguments, and how many samples they are; features stand for those that they were made of."""
    if args and isinstance(args[0], Rest):
        return args[0], args[0].features.samples
    batch = Batch(args, None, kwargs)
    return batch, count_samples(batch)


def _check_outputs(outputs: Tensor, samples: int) -> None:
    if outputs.ndim not in (1, 2) or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"The linearised head needs outputs of shape (batch,) or (batch, outputs), and {samples} inputs gave "
            f"{tuple(outputs.shape)}."
        )


def _top_of(outputs: str | int) -> int | str:
    """``"all"``, ``"auto"``, or a number of classes.

    Raises:
        PosthocUQError: it is nothing of these.
    """
    if outputs in ("all", "auto"):
        return str(outputs)
    number: Any = outputs
    if outputs == "topk":
        number = TOP
    elif isinstance(outputs, str) and outputs.startswith("topk:") and outputs[5:].isdecimal():
        number = int(outputs[5:])
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PosthocUQError(
            f"outputs must be 'auto', 'all', 'topk', 'topk:K' or a positive number of classes, not {outputs!r}."
        )
    return number
