"""The sampling head: drawn weights, or drawn outputs of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posthoc_uq.core import interrupts
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import TEMPORARY_BYTES, at_least_float32
from posthoc_uq.core.errors import PosthocUQError, check_refused, in_one_line
from posthoc_uq.core.model import model_device, replicate
from posthoc_uq.core.options import Count, Seed, check_option, shown
from posthoc_uq.core.progress import report_progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.heads.predictor import Predictor, reading, scaled_logits
from posthoc_uq.layers.calls import CallReplacer, PlainAttention, WeightMoments, drawn_outputs
from posthoc_uq.layers.capture import WatchedLayer
from posthoc_uq.layers.frozen import (
    MAX_SHAPES,
    Features,
    FrozenPart,
    ReplicaPool,
    agree,
    called,
)
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors import INDEPENDENT, SYMMETRY, Posterior

# An ensemble runs one draw after another, or many in one pass.
#
# **The loop** has one replica of the model per draw. Replicas share all parameters without a posterior; nothing is
# written, so they run in any number of threads and under autograd, and a weight that a module holds in several places
# is the drawn one in all of them.
#
# **The batched route** maps the forward pass over the stacked draws with `torch.func.vmap`: a convolution becomes a
# grouped one, a linear layer a batch of matrix products. It saves the time between kernels, and is slower where the
# kernels themselves take the time. Measured on a CPU (one thread, 30 draws, in multiples of 30 plain passes; loop
# against batched; thousand FLOP per operation in brackets): LeNet at batch 1 [56] 1.14 / 0.40, at batch 8 [440] 1.16
# / 0.94, at batch 32 [1,800] 1.01 / 1.52; MLP of width 64 at batch 64 [96] 1.21 / 0.81; mobilenet_v3_small at 32 px
# and batch 8 [270] 1.02 / 0.76, at 224 px and batch 1 [590] 1.01 / 1.12; resnet18 at 32 px and batch 1 [830] 1.00 /
# 3.40. So ``"auto"`` takes it up to `BATCHED_FLOPS` per operation, where enough draws fit into `CHUNK_BYTES`; on
# every device, though it was measured on a CPU only. FLOP and operations are counted on the first input of each
# shape, never timed.
#
# **What does not depend on the draws** runs once for a batch, where the drawn weights are those of the last modules
# (`posthoc_uq.layers.frozen`): thirty draws of a last layer cost one forward pass and thirty products. Both routes then
# run only these modules. A model that vmap refuses (control flow by values, randomness, in-place changes of captured
# tensors), or for which its outputs differ from the loop's, runs in the loop; `Ensemble.refused` then says why.

BATCHED_FLOPS = 500_000  # per operation of one draw's forward pass: up to here "auto" batches over draws
CHUNK_BYTES = 64 * 2**20  # weights and activations of the draws that run in one pass
MIN_CHUNK = 8  # draws that must fit into CHUNK_BYTES for "auto": fewer do not pay for vmap
LIVE_TENSORS = 3  # tensors of the largest size that are alive at once

Batched = Literal["auto"] | bool


@dataclass(frozen=True)
class _Work:
    """What every draw runs.

    Attributes:
        batch: arguments of the whole model, or of the rest of it.
        twins: copies of that model.
        whole: whether it is the whole model.
    """

    batch: Batch
    twins: ReplicaPool
    whole: bool

    @property
    def key(self) -> Any:
        """What the fastest route depends on."""
        return self.whole, tuple((tuple(t.shape), t.dtype, t.device) for t in self.batch.tensors)


class Draws(nn.Module, ABC):
    """Passes of a model in which something is drawn from a posterior.

    Args:
        model: the model the posterior was fitted on; never written.
        posterior: what is drawn from.
        seeds: one per draw, from `Posterior.draw_seeds`.

    Attributes:
        template: the model at the posterior's mean.
        refused: why draws do not run in one pass although that was wanted, or None.
        frozen: the part of the model that the draws do not influence, which runs once for a batch.
    """

    template: nn.Module
    refused: str | None = None

    def __init__(self, model: nn.Module, posterior: Posterior, seeds: Sequence[int]) -> None:
        super().__init__()
        self._changing, self._seeds = tuple(posterior.mean), list(seeds)
        with isolated_random_state():  # copying a module may run its code
            self.template = replicate(model, posterior.trained_mean)
        self.eval()

    def __len__(self) -> int:
        """Number of draws."""
        return len(self._seeds)

    def _set_up(self) -> None:
        """Prepare for the model where it is now."""
        self.frozen = FrozenPart(self.template, self._changing)

    def _apply(self, fn: Any, recurse: bool = True) -> Draws:
        super()._apply(fn, recurse)
        self._set_up()
        return self

    def features(self, batch: Batch, watched: Sequence[WatchedLayer] = ()) -> Features | None:
        """What enters the part of the model that the draws change, and the calls of watched layers; None where whole
        models are to run.
        """
        return None if len(self) == 1 else self.frozen.features(batch, watched)

    @abstractmethod
    def members(self) -> list[nn.Module]:
        """The models of all draws."""

    @abstractmethod
    def blocks(self, batch: Batch, features: Features | None = None) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(draws, batch, ...)``, by whole models or from features."""

    def outputs(self, batch: Batch, features: Features | None = None) -> Tensor:
        """The outputs of all draws, ``(draws, batch, ...)``, in float32 at least."""
        return torch.cat([at_least_float32(block) for block in self.blocks(batch, features)])


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Torch's, loaded with the first count: they bring a compiler with them."""
    from torch.utils.flop_counter import flop_registry

    return cast("dict[Any, Callable[..., int]]", flop_registry)


class Cost(TorchDispatchMode):
    """Counts the operations inside of ``with Cost() as cost``, in this thread only.

    Attributes:
        operations: calls of torch's kernels, views included.
        flops: floating-point operations of products (matrices, convolutions, attention); a multiply-add counts two.
        largest: bytes of the largest tensor that an operation made; views do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.flops = 0
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        formula = _formulas().get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for output, declared in zip(outputs, func._schema.returns, strict=False):
            if isinstance(output, Tensor) and declared.alias_info is None:
                self.largest = max(self.largest, output.numel() * output.element_size())
        return out


def cost_of(run: Callable[[], Any]) -> Cost | None:
    """The cost of `run` without gradients, or None where it cannot be counted; an error of `run` itself is raised.

    Inference mode is switched off meanwhile: in it, operations reach the counter undivided.
    """

    def counted() -> Cost:
        with Cost() as cost:
            run()
        return cost

    with torch.inference_mode(False), torch.no_grad():
        try:
            return counted()
        except Exception as error:
            check_refused(error, counted, run)  # returns where it was the counting that failed
            return None


class Ensemble(Draws):
    """Models with drawn weights.

    Args:
        model: see `Draws`.
        posterior: see `Draws`.
        seeds: see `Draws`.
        signs: of the draws' deviations from the mean, or None.
        batched: True, False or ``"auto"``.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        seeds: Sequence[int],
        *,
        signs: Sequence[int] | None = None,
        batched: Batched = "auto",
    ) -> None:
        super().__init__(model, posterior, seeds)
        self._batched: Batched = batched
        held = dict(self.template.named_parameters())
        drawn = posterior.sample_from(seeds, signs=signs)
        self._draws = {name: draws.to(held[name]) for name, draws in drawn.items()}
        self._set_up()

    def _set_up(self) -> None:
        super()._set_up()
        self._members: dict[int, nn.Module] = {}
        self._chunks: dict[Any, int] = {}

    def _apply(self, fn: Any, recurse: bool = True) -> Draws:
        self._draws = {name: fn(draws) for name, draws in self._draws.items()}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # members are views of the draws, which pickle would write once for each
        return {**self.__dict__, "_members": {}}

    def _weights(self, index: int) -> dict[str, Tensor]:
        return {name: draws[index] for name, draws in self._draws.items()}

    def _member(self, index: int) -> nn.Module:
        """The model of one draw; parameters that are not drawn are the template's own."""
        if index not in self._members:
            shared = {n: p for n, p in self.template.named_parameters() if n not in self._draws}
            with isolated_random_state():  # copying a module may run its code
                self._members[index] = replicate(self.template, {**shared, **self._weights(index)})
        return self._members[index]

    def members(self) -> list[nn.Module]:
        return [self._member(index) for index in range(len(self))]

    def blocks(self, batch: Batch, features: Features | None = None) -> Iterator[Tensor]:
        twins = self.frozen.twins(features)
        work = _Work(batch if features is None else features.batch, twins, whole=features is None)
        start = 0
        for block in self._batches(work):
            yield block
            start += len(block)
            report_progress(start / len(self))
        for index in range(start, len(self)):
            interrupts.check()
            yield self._alone(work, index).unsqueeze(0)
            report_progress((index + 1) / len(self))

    def _alone(self, work: _Work, index: int) -> Tensor:
        """Outputs of one draw."""
        if not work.whole:
            return work.twins.call(self._weights(index), work.batch)
        try:
            return work.batch.fresh().call(self._member(index))
        except BaseException:
            self._members.pop(index, None)  # the error may have left it half written; the draws are kept
            raise

    def _together(self, work: _Work, start: int, stop: int) -> Tensor:
        """Outputs ``(draws, batch, ...)`` of several draws in one pass."""
        weights = {name: draws[start:stop] for name, draws in self._draws.items()}
        with work.twins.borrow() as twin, PlainAttention():
            return torch.func.vmap(lambda drawn: called(twin, drawn, work.batch))(weights)

    def _batches(self, work: _Work) -> Iterator[Tensor]:
        """The outputs of as many draws as the batched route serves, from the first on."""
        chunk, start = self._chunks.get(work.key), 0
        if chunk is None:
            if len(self._chunks) >= MAX_SHAPES:
                self._chunks.clear()
            chunk = self._chunks[work.key] = self._chunk(work)
        while chunk > 1 and start < len(self):
            stop = min(start + chunk, len(self))
            attempt = partial(self._together, work, start, stop)
            try:
                block = attempt()
            except Exception as error:  # vmap raises many kinds, and a model anything
                check_refused(error, attempt, partial(self._alone, work, start))
                self._refuse(in_one_line(error))
                return
            yield block
            start = stop

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._chunks = {}

    def _chunk(self, work: _Work) -> int:
        """The number of draws in one pass that should be fastest, once its outputs agree with the loop's; 1 means the
        loop.
        """
        if self._batched is False or self.refused is not None or len(self) == 1:
            return 1
        alone = partial(self._alone, work, 0)
        with torch.inference_mode(False), torch.no_grad():
            expected = alone()
        cost = cost_of(alone)
        if cost is None:
            return 1
        held = dict(self.template.named_parameters()) if work.whole else self._weights(0)
        weight_bytes = sum(p.numel() * p.element_size() for p in held.values())
        chunk = min(len(self), max(2, CHUNK_BYTES // (weight_bytes + LIVE_TENSORS * cost.largest)))
        too_dear = cost.flops > BATCHED_FLOPS * cost.operations or chunk < min(len(self), MIN_CHUNK)
        if self._batched == "auto" and too_dear:
            return 1
        with torch.inference_mode(False), torch.no_grad():
            attempt = partial(self._together, work, 0, chunk)
            try:
                same = agree(attempt()[0], expected)
            except Exception as error:
                check_refused(error, attempt, alone)
                self._refuse(in_one_line(error))
                return 1
        if not same:
            self._refuse("its outputs differ from those of the loop")
        return chunk if same else 1


_OUTPUTS_STREAM = 401  # stream of a draw's seed


class OutputDraws(Draws):
    """Passes of one model, in each of which the outputs of all layers with a posterior are drawn by local
    reparametrisation; see `posthoc_uq.layers.calls`.

    A draw depends on its seed and on the shapes of the batch alone. What a layer's weights have in common, like the
    factor of a flow, is drawn once for each draw; the rest is drawn anew for every sample and position.

    Args:
        model: see `Draws`.
        posterior: its blocks know moments of independent weights.
        seeds: see `Draws`.
    """

    def __init__(self, model: nn.Module, posterior: Posterior, seeds: Sequence[int]) -> None:
        super().__init__(model, posterior, seeds)
        self._posterior, self._covariances = posterior, posterior.covariances()
        self._set_up()

    def _set_up(self) -> None:
        """Prepare the moments that are the same in all draws."""
        super()._set_up()
        self._kept: dict[str, WeightMoments] = {}
        self._kept = {name: m for name, m in self._moments(0).items() if not self._covariances[name].shared}

    def _moments(self, seed: int) -> dict[str, WeightMoments]:
        """Means and variances of all layers' weights in one draw."""
        held = dict(self.template.named_parameters())
        moments: dict[str, WeightMoments] = {}
        for index, (name, layer) in enumerate(self._posterior.layers.items()):
            if name in self._kept:
                moments[name] = self._kept[name]
                continue
            covariance, like = self._covariances[name], held[layer.weight]
            mean, variance = covariance.independent(torch.Generator().manual_seed(mixed_seed(seed, index)))
            variances = layer.to_parameters(variance.to(like))
            means = {n: held[n].detach() for n in layer.parameter_names}
            if mean is not None:
                drawn = layer.to_parameters(mean.to(like))
                means = {n: means[n] + drawn[n] if covariance.centred else drawn[n] for n in means}
            biases = () if layer.bias is None else (means[layer.bias], variances[layer.bias])
            moments[name] = WeightMoments(means[layer.weight], variances[layer.weight], *biases)
        return moments

    def members(self) -> list[nn.Module]:
        """Refused: there are no models with drawn weights."""
        raise PosthocUQError(
            "drawn='outputs' draws numbers in every pass, which an exported program cannot. Export a predictor with "
            "drawn='weights', or with head='moments'."
        )

    def blocks(self, batch: Batch, features: Features | None = None) -> Iterator[Tensor]:
        """See `Draws.blocks`; of one draw each."""
        model = self.template if features is None else self.frozen.rest(features)
        for place, seed in enumerate(self._seeds, 1):
            with self._drawing(model, seed):
                outputs = (batch if features is None else features.batch).fresh().call(model)
            yield outputs.unsqueeze(0)
            report_progress(place / len(self))

    @contextmanager
    def _drawing(self, model: nn.Module, seed: int) -> Generator[None]:
        """A context for one draw's pass.

        Raises:
            PosthocUQError: it did not use every layer once.
        """
        held, moments = dict(model.named_parameters()), self._moments(seed)
        generator = torch.Generator(model_device(model)).manual_seed(mixed_seed(seed, _OUTPUTS_STREAM))
        names = {id(held[layer.weight]): name for name, layer in self._posterior.layers.items()}
        outputs_of = {
            key: partial(drawn_outputs, weights=moments[name], generator=generator)
            for key, name in names.items()
        }
        with CallReplacer(outputs_of) as calls:
            yield
        uses = {name: calls.used.count(key) for key, name in names.items()}
        wrong = next((name for name, count in uses.items() if count != 1), None)
        if wrong is not None:
            raise PosthocUQError(
                f"drawn='outputs' draws the outputs of every layer once in a pass, and '{wrong}' was used "
                f"{uses[wrong]} times by functions that it knows; take drawn='weights'."
            )


Drawn = Literal["weights", "outputs"]


class SamplingPredictor(Predictor):
    """Predicts with `n_samples` draws of the weights: ``p(y | x) = 1/S sum_s p(y | x, w_s)``.

    The draws are those of `Posterior.sample`, made at construction. Where the layers with a posterior are the last
    modules of the model, as a last layer is, the part before them runs once for a batch. All draws are kept:
    `n_samples` times the memory of the weights that have a posterior. A prediction is summed up while the draws run,
    and takes the memory of a few draws' outputs.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        n_samples: draws of the weights.
        seed: of the draws; the same seed gives the same ensemble. None draws differently each time.
        antithetic: draw in pairs ``mean + d, mean - d`` with the same deviation; of an odd number the last draw has
            no partner. Halves the drawing, and terms odd in the deviation cancel in the predictive mean; the
            variance over the draws is that of half as many independent ones, and for a nearly linear model
            ``S / (S - 1)`` times too large on average.
        batched: run many draws in one pass with `torch.func.vmap`: True, False, or ``"auto"`` where that is
            expected to be faster (small models on small batches; the rule is in `posthoc_uq.heads.sampling`, and was
            measured on a CPU). A model that cannot be run like that is run draw by draw; `repr` says so, and why.
        novelty: whether predictions know their novelty, if the posterior does: one forward pass beside those of the
            draws, or next to nothing where the part before the weights with a posterior runs once anyway.
        drawn: ``"weights"``, or ``"outputs"`` for those of every layer with a posterior, from the mean and the variance
            that independent weights give them, by two products in place of one: local reparametrisation (Kingma,
            Salimans, Welling 2015), as trainings of latent binary networks draw. Every sample and position then has
            noise of its own, in place of weights that all have in common. Mean and variance of a layer's outputs are
            exact; that they are Gaussian, and that positions of a convolution are independent, is not. `antithetic` and
            `batched` do not go with it.

    Raises:
        PosthocUQError: no draws, or an option with another value than those listed.
    """

    head = "sampling"

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        n_samples: Count = 30,
        seed: Seed | None = 0,
        *,
        antithetic: bool = False,
        batched: Batched = "auto",
        novelty: bool = True,
        drawn: Drawn = "weights",
    ) -> None:
        super().__init__(model, posterior, novelty)
        if antithetic:
            posterior.require([SYMMETRY], "antithetic=True", "leave it out")
        if not isinstance(batched, (bool, str)) or batched not in (True, False, "auto"):
            raise PosthocUQError(f"batched must be True, False or 'auto', not {shown(batched)}.")
        self._drawn_outputs = check_option("drawn", drawn, Drawn) == "outputs"
        if self._drawn_outputs:
            posterior.require([INDEPENDENT], "drawn='outputs'", "take drawn='weights'")
            if antithetic or batched is True:
                raise PosthocUQError(
                    f"drawn='outputs' draws no weights, so that {'antithetic' if antithetic else 'batched'}= has no "
                    f"meaning. Leave it out."
                )
        self.n_samples: int = check_option("n_samples", n_samples, Count)
        self._antithetic = check_option("antithetic", antithetic, bool)
        self._batched: Batched = batched
        self._seed = check_option("seed", seed, Seed | None)
        self._draw()

    def with_posterior(self, posterior: Posterior, seed: int | None = None) -> SamplingPredictor:
        """See `Predictor`; the weights are drawn anew where their distribution or the seed is another one."""
        other = super().with_posterior(posterior)
        of_weights = posterior.settings.of_weights() == self._posterior.settings.of_weights()
        if not of_weights or seed not in (None, self._seed):
            other._seed = self._seed if seed is None else seed
            other._draw()
        return other

    def _draw(self) -> None:
        """Draw the ensemble."""
        posterior, generator, marks = self._posterior, None, self.weight_watch.check()
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
        pairs = (self.n_samples + 1) // 2 if self._antithetic else self.n_samples
        seeds, signs = posterior.draw_seeds(pairs, generator), None
        if self._antithetic:
            seeds = [seed for seed in seeds for _ in range(2)][: self.n_samples]
            signs = ([1, -1] * pairs)[: self.n_samples]
        self._ensemble = (self._drawn(seeds, signs),)  # a tuple hides it from `nn.Module`
        self.weight_watch.check_since(marks)

    @property
    def ensemble(self) -> Draws:
        """The draws that it predicts with."""
        return self._ensemble[0]

    def _apply(self, fn: Any, recurse: bool = True) -> SamplingPredictor:
        super()._apply(fn, recurse)
        self.ensemble._apply(fn)  # pyright: ignore[reportPrivateUsage]
        return self

    def _drawn(self, seeds: Sequence[int], signs: Sequence[int] | None = None) -> Draws:
        if self._drawn_outputs:
            return OutputDraws(self._model[0], self._posterior, seeds)
        return Ensemble(self._model[0], self._posterior, seeds, signs=signs, batched=self._batched)

    @property
    def _network(self) -> nn.Module:
        return self.ensemble.template

    def identity(self) -> dict[str, Any]:
        """See `Predictor`; without the seed."""
        identity = {"head": self.head, "n_samples": self.n_samples, "antithetic": self._antithetic}
        return identity | ({"drawn": "outputs"} if self._drawn_outputs else {})

    def extra_repr(self) -> str:
        """How it samples, and why draws are not batched, or run the whole model, if the model refused the other."""
        refused = self.ensemble.frozen.refused
        whole = "" if refused is None else f", whole passes ({refused})"
        if self._drawn_outputs:
            return f"n_samples={self.n_samples}, drawn='outputs'{whole}"
        refused = self.ensemble.refused
        batched = repr(self._batched) if refused is None else f"False ({refused})"
        return f"n_samples={self.n_samples}, antithetic={self._antithetic}, batched={batched}{whole}"

    @reading
    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of every draw, ``(n_samples, batch, ...)``, in float32 at least; logits are divided by the
        temperature, and have the scale and the shift of each class.
        """
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            outputs = self._distribution(batch)
        return scaled_logits(outputs, self._posterior, draws=True)

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `Predictor`: other draws than those of its predictions, as many at once as memory allows."""
        posterior = self._posterior
        numbers = sum(layer.parameters for layer in posterior.layers.values())
        at_once = max(1, TEMPORARY_BYTES // (4 * numbers))
        seeds, found = posterior.draw_seeds(n, generator), list[Tensor]()
        for start in range(0, n, at_once):
            ensemble = self._drawn(seeds[start : start + at_once]).to(self.device)
            found.append(ensemble.outputs(batch, ensemble.features(batch)))
        return torch.cat(found)

    def _predict(self, batch: Batch) -> Prediction:
        ensemble, posterior = self.ensemble, self._posterior
        grams = posterior.features if self._tells_novelty else None
        features = ensemble.features(batch, () if grams is None else grams.watched)
        calls = None if features is None else features.watched
        # before the draws: a model may change its inputs in place
        ratio = self._known_novelty(batch, calls)
        blocks: Iterable[Tensor] = (at_least_float32(block) for block in ensemble.blocks(batch, features))
        promises = self.promises
        if isinstance(promises, ConformalScores) and promises.retuned:  # which take the draws a second time
            outputs = torch.cat(list(blocks))
            prediction = self.promising(self.prediction_of(outputs), outputs)
            prediction.at_promises()  # made now, so that the draws are not kept
            return prediction.with_novelty(ratio)
        blocks = (scaled_logits(block, posterior, draws=True) for block in blocks)
        return posterior.observation.from_blocks(blocks).with_novelty(ratio)

    def _distribution(self, batch: Batch) -> Tensor:
        ensemble = self.ensemble
        return ensemble.outputs(batch, ensemble.features(batch))

    def prediction_of(self, distribution: Tensor) -> Prediction:
        """See `Predictor`."""
        scaled = scaled_logits(distribution, self._posterior, draws=True)
        return self._posterior.observation.from_blocks(iter([scaled]))

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`; features do not change when the weights are drawn anew."""
        return self.ensemble.frozen.features(self._batch(args, kwargs))

    def distribution_from(self, features: Features) -> Tensor:
        """See `Predictor`."""
        return self.ensemble.outputs(features.batch, features)
