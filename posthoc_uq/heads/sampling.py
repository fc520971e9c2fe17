"""The sampling head: drawn weights, or drawn outputs of layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core import interrupts
from posthoc_uq.core.batches import Batch, Inputs
from posthoc_uq.core.errors import PosthocUQError, check_refused
from posthoc_uq.core.model import model_device, model_dtype, replicate
from posthoc_uq.core.options import Count, Seed, check_option, shown
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.progress import tell
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.heads.frozen import (
    Features,
    FixedPart,
    ReplayError,
    Saving,
    agree,
    check_refused_replay,
    cost_of,
    described,
)
from posthoc_uq.heads.functions import PlainAttention
from posthoc_uq.heads.predictor import Predictor, divisor_of, summarise
from posthoc_uq.layers.calls import AffineCalls, WeightMoments, drawn_outputs
from posthoc_uq.layers.layer import Call
from posthoc_uq.likelihoods.prediction import Prediction, at_least_float32
from posthoc_uq.posteriors.block import INDEPENDENT, SYMMETRY
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ABOUT

# Draws of a model's weights as an ensemble that runs: one draw after another, or many in one pass.
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
# shape, never timed.  **What does not depend on the draws** runs once for a batch, where the drawn weights enter the
# model late (`posthoc_uq.heads.fixed_part`): thirty draws of a last layer cost one forward pass and thirty products.
# Both routes then run only the part that follows. A model that vmap refuses (control flow by values, randomness,
# in-place changes of captured tensors), or for which its outputs differ from the loop's, runs in the loop;
# `Ensemble.refused` then says why.

BATCHED_FLOPS = 500_000  # per operation of one draw's forward pass: up to here "auto" batches over draws
RECORDED_FLOPS = 30_000_000  # where draws can be batched, recording a pass must save these over all draws
CHUNK_BYTES = 64 * 2**20  # weights and activations of the draws that run in one pass
_DRAWN = 2**20  # weights that are drawn at once where none are kept
_FEW = 8  # draws that must fit into CHUNK_BYTES for "auto": fewer do not pay for vmap
_LIVE = 3  # tensors of the largest size that are alive at once
_SHAPES = 256  # input shapes whose route is remembered

Keep = Literal["weights", "seeds"]
Batched = Literal["auto"] | bool


class Ensemble(nn.Module):
    """Models with drawn weights.

    Args:
        model: the model the posterior was fitted on; never written.
        posterior: what is drawn from.
        seeds: one per draw, from `Posterior.draw_seeds`.
        signs: of the draws' deviations from the mean, or None.
        keep: ``"weights"`` or ``"seeds"``.
        dtype: of drawn and all other weights, and of the inputs; the model's own if None.
        batched: True, False or ``"auto"``.

    Attributes:
        refused: why the batched route is not taken although it was wanted, or None.
        fixed_part: the part of the model that the drawn weights do not influence.
    """

    fixed_part: FixedPart

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        seeds: Sequence[int],
        *,
        signs: Sequence[int] | None = None,
        keep: Keep = "weights",
        dtype: torch.dtype | None = None,
        batched: Batched = "auto",
    ) -> None:
        super().__init__()
        self._posterior, self._seeds, self._signs = posterior, list(seeds), signs
        self._dtype, self._batched = dtype, batched
        self.refused: str | None = None
        self._draws: dict[str, Tensor] | None = None
        self._factors = posterior.factors() if keep == "seeds" else None
        with isolated_random_state():  # copying a module may run its code
            self.template = replicate(model, posterior.trained_mean)
            if dtype is not None:
                self.template.to(dtype)
            self._clear()
            if keep == "weights":
                self._draws = self._drawn(0, len(seeds))
                if batched is not True and not self.fixed_part.possible:
                    self._fill()
        self.eval()

    def __len__(self) -> int:
        """Number of draws."""
        return len(self._seeds)

    def _clear(self) -> None:
        self._members: list[nn.Module] = []
        self._twins: deque[nn.Module] = deque()
        self._chunks: dict[Any, int] = {}
        self._served: dict[Any, bool] = {}
        self.fixed_part = FixedPart(self.template, self._posterior.mean)

    def _apply(self, fn: Any, recurse: bool = True) -> Ensemble:
        super()._apply(fn, recurse)
        if self._draws is not None:
            self._draws = {name: fn(draws) for name, draws in self._draws.items()}
        rebuild = bool(self._members)
        self._clear()
        if rebuild:
            self._fill()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Members are views of the draws, which pickle would write once for each.
        return {**self.__dict__, "_members": [], "_twins": deque()}

    def _drawn(self, start: int, stop: int) -> dict[str, Tensor]:
        """Draws `start` to `stop` of every parameter, ``(stop - start, *shape)``."""
        signs = None if self._signs is None else self._signs[start:stop]
        draws_by_name = self._posterior.sample_from(
            self._seeds[start:stop], signs=signs, factors=self._factors, dtype=self._dtype
        )
        parameters = dict(self.template.named_parameters())
        return {name: draws.to(parameters[name]) for name, draws in draws_by_name.items()}

    def _weights(self, start: int, stop: int) -> dict[str, Tensor]:
        if self._draws is None:
            return self._drawn(start, stop)
        return {name: draws[start:stop] for name, draws in self._draws.items()}

    def _each(self, start: int, at_once: int = 1) -> Iterator[dict[str, Tensor]]:
        """The weights of each draw from `start` on, where they are not kept: drawn several at a time if they are so
        few together, and always both of an antithetic pair.
        """
        pair = 1 if self._signs is None else 2
        numbers = sum(layer.parameters for layer in self._posterior.layers.values())
        step = pair * max(1, at_once // max(1, pair * numbers))
        for first in range(start - start % step, len(self), step):
            weights = self._weights(first, min(first + step, len(self)))
            for index in range(max(0, start - first), min(step, len(self) - first)):
                interrupts.check()
                yield _draw_of(weights, index)

    def _member(self, weights: dict[str, Tensor]) -> nn.Module:
        """The model with the weights of one draw; parameters that are not drawn are the template's own."""
        shared = {name: p for name, p in self.template.named_parameters() if name not in weights}
        return replicate(self.template, {**shared, **weights})

    def _fill(self) -> None:
        weights = self._weights(0, len(self))
        self._members = [self._member(_draw_of(weights, index)) for index in range(len(self))]

    def members(self, start: int = 0) -> Iterator[nn.Module]:
        """The model of each draw; with ``keep="seeds"`` only one is alive at a time (for antithetic draws, both sets of
        weights of a pair).
        """
        if self._draws is not None:
            if not self._members:
                self._fill()
            yield from self._members[start:]
            return
        for weights in self._each(start):
            yield self._member(weights)

    def blocks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(draws, batch, ...)``."""
        yield from self.blocks_after(self.recorded(*args, **kwargs), args, kwargs)

    def recorded(self, *args: Any, **kwargs: Any) -> Features | None:
        """What enters the part of the model that the draws change, where recording it makes them faster; else None."""
        inputs = Inputs(args, kwargs, self._input_dtype())
        return self.fixed_part.features(*inputs.arguments, self._wants)

    def blocks_after(
        self, features: Features | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Tensor]:
        """The `blocks`, from what was `recorded` of these arguments."""
        inputs = Inputs(args, kwargs, self._input_dtype())
        start = 0
        if features is not None:
            try:
                for block in self.from_features(features):
                    yield block
                    start += len(block)
                    tell(start / len(self))
                return
            except ReplayError as error:
                check_refused_replay(error, lambda: deque(self.from_features(features), maxlen=0))
                self.fixed_part.refuse(str(error))
        for block in self._whole_passes(inputs, start):
            yield block
            start += len(block)
            tell(start / len(self))

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """What enters the part of the model that the draws change; None where that is most of the model."""
        return self.fixed_part.features(*Inputs(args, kwargs, self._input_dtype()).arguments)

    def _wants(self, saving: Saving) -> bool:
        """Whether recording and replaying is faster; for small models, many whole draws in one pass are."""
        if not saving.worth or 1 + len(self) * saving.share >= len(self):
            return False
        loop_only = self._batched is False or self.refused is not None
        return loop_only or len(self) * saving.flops >= RECORDED_FLOPS

    def from_features(self, features: Features) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(draws, batch, ...)``, from `features` of an ensemble of the
        same model.

        Raises:
            ReplayError: the model took another route than when the features were made.
        """
        start = 0
        for block in self._batches(features, features.shapes):
            yield block
            start += len(block)
        for weights in self._each(start):
            yield self.fixed_part.run(features, weights).unsqueeze(0)

    def _whole_passes(self, inputs: Inputs, start: int) -> Iterator[Tensor]:
        """The outputs of the draws from `start` on, by whole passes."""
        if start == 0:
            for block in self._batches(inputs, inputs.shapes):
                yield block
                start += len(block)
        if start == len(self):
            return
        if self._draws is not None or not self._serves(inputs):
            for member in self.members(start):
                try:
                    outputs = inputs.run(member)
                except BaseException:
                    self._members = []  # the error may have left this one half written; the draws are kept
                    raise
                yield outputs.unsqueeze(0)
            return
        with self._borrowed() as twin:
            for weights in self._each(start, _DRAWN):
                yield _called(twin, weights, inputs).unsqueeze(0)

    def _serves(self, inputs: Inputs) -> bool:
        """Whether one copy of the model serves one draw after another, which saves a copy for each: with the second
        draw, after the first, it gives what a copy of its own gives. Models that keep something from a pass, or hold
        their weights in other places too, do not.
        """
        served = self._served.get(inputs.shapes)
        if served is None:
            if len(self._served) >= _SHAPES:
                self._served.clear()
            trial, draws = inputs.anew(), self._weights(0, min(2, len(self)))
            with torch.inference_mode(False), torch.no_grad(), isolated_random_state():
                served = len(self) > 1 and self._repeats(trial, draws)
            self._served[inputs.shapes] = served
        return served

    def _repeats(self, trial: Inputs, draws: dict[str, Tensor]) -> bool:
        expected = trial.run(self._member(_draw_of(draws, 1)))  # raises where the input is to blame

        def twice() -> Tensor:
            with self._borrowed() as twin:  # which an error leaves half written, so it is not kept then
                return [_called(twin, _draw_of(draws, index), trial) for index in range(2)][1]

        try:
            found = twice()
        except (
            Exception
        ) as error:  # a functional call or a model that runs twice: the loop has its own copies
            check_refused(error, twice, lambda: trial.run(self._member(_draw_of(draws, 0))))
            return False
        return agree(found, expected)

    @contextmanager
    def _borrowed(self) -> Generator[nn.Module]:
        """A copy of the model for functional calls, which write to it: each thread has its own."""
        try:
            twin = self._twins.pop()
        except IndexError:
            twin = replicate(self.template)
        yield twin
        self._twins.append(twin)  # not after an error, which may leave it half written

    def _batches(self, work: Inputs | Features, key: Any) -> Iterator[Tensor]:
        """The outputs of as many draws as the batched route serves, from the first on."""
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._settle(work, key)
        start = 0
        while chunk > 1 and start < len(self):
            stop = min(start + chunk, len(self))

            def together(start: int = start, stop: int = stop) -> Tensor:
                return self._in_one_pass(work, start, stop)

            try:
                block = together()
            except Exception as error:  # vmap raises many kinds, and a model anything
                check_refused(error, together, lambda start=start: self._alone(work, start))
                self._refuse(described(error))
                return
            yield block
            start = stop

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._chunks = {}

    def _input_dtype(self) -> torch.dtype | None:
        if self._dtype is None:
            return None
        return next((p.dtype for p in self.template.parameters() if p.is_floating_point()), self._dtype)

    def _in_one_pass(self, work: Inputs | Features, start: int, stop: int) -> Tensor:
        """Outputs ``(draws, batch, ...)`` of several draws in one pass."""
        if isinstance(work, Features):
            with PlainAttention():
                return torch.func.vmap(lambda weights: self.fixed_part.run(work, weights))(
                    self._weights(start, stop)
                )
        with self._borrowed() as twin, PlainAttention():
            return torch.func.vmap(lambda weights: _called(twin, weights, work))(self._weights(start, stop))

    def _alone(self, work: Inputs | Features, index: int) -> Tensor:
        """Outputs of one draw."""
        weights = _draw_of(self._weights(index, index + 1), 0)
        if isinstance(work, Features):
            return self.fixed_part.run(work, weights)
        return work.run(self._member(weights))

    def _settle(self, work: Inputs | Features, key: Any) -> int:
        """How many draws run in one pass for inputs of these shapes; 1 means the loop."""
        chunk = 1
        if self._batched is not False and self.refused is None and len(self) > 1:
            chunk = self._wanted(work.anew() if isinstance(work, Inputs) else work)
        if len(self._chunks) >= _SHAPES:
            self._chunks.clear()
        self._chunks[key] = chunk
        return chunk

    def _wanted(self, work: Inputs | Features) -> int:
        """The number of draws in one pass that should be fastest, once its outputs agree with the loop's."""
        cost = cost_of(lambda: self._alone(work, 0))
        if cost is None:
            return 1
        parameters = (
            self._weights(0, 1) if isinstance(work, Features) else dict(self.template.named_parameters())
        )
        weight_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        chunk = min(len(self), max(2, CHUNK_BYTES // (weight_bytes + _LIVE * cost.largest)))
        too_dear = cost.flops > BATCHED_FLOPS * cost.operations or chunk < min(len(self), _FEW)
        if self._batched == "auto" and too_dear:
            return 1
        with torch.inference_mode(False), torch.no_grad():
            expected = self._alone(work, 0)
            try:
                batched_outputs = self._in_one_pass(work, 0, chunk)[0]
            except Exception as error:
                check_refused(error, lambda: self._in_one_pass(work, 0, chunk), lambda: self._alone(work, 0))
                self._refuse(described(error))
                return 1
            if not agree(batched_outputs, expected):
                self._refuse("its outputs differ from those of the loop")
                return 1
        return chunk


def _called(twin: nn.Module, weights: dict[str, Tensor], work: Inputs) -> Tensor:
    """The outputs of a copy of the model with these weights."""
    args, kwargs = work.fresh()
    return output_tensor(torch.func.functional_call(twin, weights, args, kwargs))


def _draw_of(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: draws[index] for name, draws in weights.items()}


# Draws of a model's outputs by local reparametrisation: every layer's outputs are drawn, in place of its
# weights.

_OUTPUTS = 401  # stream of a draw's seed


class OutputDraws(nn.Module):
    """Passes of one model, in each of which the outputs of all layers with a posterior are drawn by local
    reparametrisation; see `posthoc_uq.layers.layer.calls`.

    A draw depends on its seed and on the shapes of the batch alone. What a layer's weights have in common, like the
    factor of a flow, is drawn once for each draw; the rest is drawn anew for every sample and position.

    Args:
        model: the model that the posterior was fitted on; never written.
        posterior: its blocks know moments of independent weights.
        seeds: one for each draw.

    Attributes:
        refused: why draws do not run in one pass; always None, since that was not asked for.
        fixed_part: the part of the model before the first layer with a posterior, which runs once for a batch.
    """

    refused: str | None = None

    def __init__(self, model: nn.Module, posterior: Posterior, seeds: Sequence[int]) -> None:
        super().__init__()
        self._posterior, self._seeds = posterior, list(seeds)
        self._factors = posterior.factors()
        with isolated_random_state():  # copying a module may run its code
            self.template = replicate(model, posterior.trained_mean)
        self._kept: dict[str, WeightMoments] = {}
        self._set_up()
        self.eval()

    def __len__(self) -> int:
        """Number of draws."""
        return len(self._seeds)

    def _set_up(self) -> None:
        """The moments that are the same in all draws, on the model's device; and no features of another one."""
        self._kept = {}
        self._kept = {name: m for name, m in self._moments(0).items() if not self._factors[name].shared}
        self.fixed_part = FixedPart(self.template, self._posterior.mean)

    def _apply(self, fn: Any, recurse: bool = True) -> OutputDraws:
        super()._apply(fn, recurse)
        self._set_up()
        return self

    def _moments(self, seed: int) -> dict[str, WeightMoments]:
        """Means and variances of all layers' weights in one draw."""
        held = dict(self.template.named_parameters())
        moments: dict[str, WeightMoments] = {}
        for index, (name, layer) in enumerate(self._posterior.layers.items()):
            if name in self._kept:
                moments[name] = self._kept[name]
                continue
            factor, like = self._factors[name], held[layer.weight]
            mean, variance = factor.independent(torch.Generator().manual_seed(mixed_seed(seed, index)))
            variances = layer.to_parameters(variance.to(like))
            means = {n: held[n].detach() for n in layer.parameter_names}
            if mean is not None:
                drawn = layer.to_parameters(mean.to(like))
                means = {n: means[n] + drawn[n] if factor.centred else drawn[n] for n in means}
            biases = () if layer.bias is None else (means[layer.bias], variances[layer.bias])
            moments[name] = WeightMoments(means[layer.weight], variances[layer.weight], *biases)
        return moments

    def members(self, start: int = 0) -> Iterator[nn.Module]:
        """Refused: there are no models with drawn weights."""
        raise PosthocUQError(
            "drawn='outputs' draws numbers in every pass, which an exported program cannot; export a predictor with "
            "drawn='weights', or with head='moments'."
        )

    def blocks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(1, batch, ...)``."""
        inputs, start = Inputs(args, kwargs, None), 0
        features = self.fixed_part.features(*inputs.arguments) if len(self) > 1 else None
        if features is not None:
            try:
                for block in self.from_features(features):
                    yield block
                    start += 1
                    tell(start / len(self))
                return
            except ReplayError as error:
                check_refused_replay(error, lambda: deque(self.from_features(features), maxlen=0))
                self.fixed_part.refuse(str(error))
        for place, seed in enumerate(self._seeds[start:], start + 1):
            with self._drawing(seed):
                outputs = inputs.run(self.template)
            yield outputs.unsqueeze(0)
            tell(place / len(self))

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """What enters the part of the model that the draws change; None where that is most of the model."""
        return self.fixed_part.features(args, kwargs)

    def from_features(self, features: Features) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(1, batch, ...)``, from `features` of the same model.

        Raises:
            ReplayError: the model took another route than when the features were made.
        """
        held = {name: p for name, p in self.template.named_parameters() if name in self._posterior.mean}
        for seed in self._seeds:
            with self._drawing(seed):
                outputs = self.fixed_part.run(features, held)
            yield outputs.unsqueeze(0)

    @contextmanager
    def _drawing(self, seed: int) -> Generator[None]:
        """A context for one draw's pass.

        Raises:
            PosthocUQError: it did not use every layer once.
        """
        held, moments = dict(self.template.named_parameters()), self._moments(seed)
        generator = torch.Generator(model_device(self.template)).manual_seed(mixed_seed(seed, _OUTPUTS))
        names = {id(held[layer.weight]): name for name, layer in self._posterior.layers.items()}
        outputs_of = {
            key: partial(drawn_outputs, weights=moments[name], generator=generator)
            for key, name in names.items()
        }
        with AffineCalls(outputs_of) as calls:
            yield
        uses = {name: calls.used.count(key) for key, name in names.items()}
        wrong = next((name for name, count in uses.items() if count != 1), None)
        if wrong is not None:
            raise PosthocUQError(
                f"drawn='outputs' draws the outputs of every layer once in a pass, and '{wrong}' was used "
                f"{uses[wrong]} times by functions that it knows; take drawn='weights'."
            )


# The sampling head: the Monte Carlo estimate ``p(y | x) = 1/S sum_s p(y | x, w_s)`` with draws of the
# weights.

Drawn = Literal["weights", "outputs"]

DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


class SamplingPredictor(Predictor):
    """Predicts with `n_samples` draws of the weights.

    The draws are those of `Posterior.sample`, made at construction with the posterior's settings of that moment;
    later changes of its prior precision have no effect until `redraw`. Temperature and noise variance are read
    at every prediction. Where the posterior's weights enter the model late, as those of a last layer do, the part
    before them runs once for a batch. A prediction is summed up while the draws run, and takes the memory of a few
    draws' outputs, however many draws there are.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        n_samples: draws of the weights.
        seed: of the draws; the same seed gives the same ensemble. None draws anew each time.
        generator: in place of a seed.
        keep: ``"weights"`` keeps every draw: `n_samples` times the memory of the weights that have a posterior.
            ``"seeds"`` draws them again at every prediction, into one model (a few small ones are drawn together): the
            same numbers, bit for bit, and the memory of the posterior's factors (about one set of weights) and one
            model, for the time of
            drawing: some 10 ns per weight and draw on a CPU, ten times that with ``method="kfac"`` or ``"efb"``,
            whose draws are products with the full eigenbases. Under autograd the graph holds all draws either way.
        antithetic: draw in pairs ``mean + d, mean - d`` with the same deviation; of an odd number the last draw has
            no partner. Halves the drawing, and terms odd in the deviation cancel in the predictive mean; the
            variance over the draws is that of half as many independent ones, and for a nearly linear model
            ``S / (S - 1)`` times too large on average.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``: what all weights of the ensemble are
            rounded to, and the inputs cast to; outputs come back in float32. None runs in the model's own.
        batched: run many draws in one pass with `torch.func.vmap`: True, False, or ``"auto"`` where that is
            expected to be faster (small models on small batches; the rule is in `posthoc_uq.heads.sampling`). A model
            that cannot be run like that is run draw by draw; `repr` says so, and why.
        novelty: whether predictions know their novelty, if the posterior does: one forward pass beside those of the
            draws, or next to nothing where the part before the weights with a posterior runs once anyway.
        drawn: ``"weights"``, or ``"outputs"`` for those of every layer with a posterior, from the mean and the variance
            that independent weights give them, by two products in place of one: local reparametrisation (Kingma,
            Salimans, Welling 2015), as trainings of latent binary networks draw. Every sample and position then has
            noise of its own, in place of weights that all have in common. Mean and variance of a layer's outputs are
            exact; that they are Gaussian, and that positions of a convolution are independent, is not. The options of
            drawn weights (`keep`, `antithetic`, `dtype`, `batched`) do not go with it.

    Raises:
        PosthocUQError: no draws, or an option with another value than those listed.
    """

    ensemble: Ensemble | OutputDraws

    head = "sampling"

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        n_samples: Count = 30,
        seed: Seed | None = 0,
        generator: torch.Generator | None = None,
        *,
        keep: Keep = "weights",
        antithetic: bool = False,
        dtype: torch.dtype | None = None,
        batched: Batched = "auto",
        novelty: bool = True,
        drawn: Drawn = "weights",
    ) -> None:
        super().__init__(model, posterior)
        self._tells_novelty = check_option("novelty", novelty, bool)
        if antithetic:
            posterior.require([SYMMETRY], "antithetic=True", "leave it out")
        check_option("keep", keep, Keep)
        if not (dtype is None or isinstance(cast(Any, dtype), torch.dtype)) or dtype not in DTYPES:
            raise PosthocUQError(f"dtype must be one of {DTYPES}, not {shown(dtype)}.")
        if not isinstance(batched, (bool, str)) or batched not in (True, False, "auto"):
            raise PosthocUQError(f"batched must be True, False or 'auto', not {shown(batched)}.")
        if check_option("drawn", drawn, Drawn) == "outputs":
            posterior.require([INDEPENDENT], "drawn='outputs'", "take drawn='weights'")
            _check_outputs(keep, antithetic, dtype, batched)
        self._drawn_outputs = drawn == "outputs"
        self.n_samples: int = check_option("n_samples", n_samples, Count)
        self._keep: Keep = keep
        self._antithetic = check_option("antithetic", antithetic, bool)
        self._dtype = dtype
        self._batched: Batched = batched
        self.redraw(seed, generator)

    def redraw(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        """Draw the ensemble anew, with the posterior's present settings; predictions already under way in other
        threads end with the old one.

        Args:
            seed: of the draws; None draws differently every time.
            generator: in place of a seed.
        """
        if generator is None and seed is not None:
            generator = torch.Generator().manual_seed(check_option("seed", seed, Seed))
        pairs = (self.n_samples + 1) // 2 if self._antithetic else self.n_samples
        posterior = self._snapshot()
        seeds, signs = posterior.draw_seeds(pairs, generator), None
        if self._antithetic:
            seeds = [seed for seed in seeds for _ in range(2)][: self.n_samples]
            signs = [1, -1] * pairs
        self._drawn_with = posterior.settings.plain()
        if self._drawn_outputs:
            self.ensemble = OutputDraws(self._model[0], posterior, seeds)
            return
        self.ensemble = Ensemble(
            self._model[0],
            posterior,
            seeds,
            signs=None if signs is None else signs[: self.n_samples],
            keep=self._keep,
            dtype=self._dtype,
            batched=self._batched,
        )

    def _network_dtype(self) -> torch.dtype:
        """That of the drawn models, which may have been moved, but for draws in a type of their own."""
        return super()._network_dtype() if self._dtype is not None else model_dtype(self.ensemble.template)

    def identity(self) -> dict[str, Any]:
        """See `Predictor`; without the seed."""
        dtype = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        identity: dict[str, Any] = {
            "head": self.head,
            "n_samples": self.n_samples,
            "antithetic": self._antithetic,
            "dtype": dtype or "own",
        }
        return identity | ({"drawn": "outputs"} if self._drawn_outputs else {})

    def hyperparameters(self) -> dict[str, Any]:
        """See `Predictor`: those of the draws; temperature and noise variance are the posterior's present ones."""
        present = super().hyperparameters()
        return self._drawn_with | {name: present[name] for name, about in ABOUT.items() if about.of_outputs}

    def extra_repr(self) -> str:
        """How it samples, and why draws are not batched, or run the whole model, if the model refused the other."""
        refused = self.ensemble.fixed_part.refused
        whole = "" if refused is None else f", whole passes ({refused})"
        if self._drawn_outputs:
            return f"n_samples={self.n_samples}, drawn='outputs'{whole}"
        text = f"n_samples={self.n_samples}, keep={self._keep!r}, antithetic={self._antithetic}, batched="
        refused = self.ensemble.refused
        return text + (repr(self._batched) if refused is None else f"False ({refused})") + whole

    def _blocks(
        self,
        posterior: Posterior,
        batch: Batch,
        ensemble: Ensemble | OutputDraws,
        features: Features | None = None,
    ) -> Iterator[Tensor]:
        divisor = divisor_of(posterior)
        if features is not None and isinstance(ensemble, Ensemble):
            blocks = ensemble.blocks_after(features, batch.args, batch.kwargs)
        else:
            blocks = ensemble.blocks(*batch.args, **batch.kwargs)
        for block in blocks:
            block = at_least_float32(block)
            yield block if divisor == 1.0 else block / divisor

    def refresh(self, seed: int) -> None:
        """See `Predictor`."""
        self.redraw(seed)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of every draw, ``(n_samples, batch, ...)``, in float32 at least; logits are divided by the
        temperature.
        """
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            return torch.cat(list(self._blocks(self._snapshot(), batch, self.ensemble)))

    def _functions(self, posterior: Posterior, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `DrawnFunctions`: other draws than those of its predictions."""
        seeds = posterior.draw_seeds(n, generator)
        if self._drawn_outputs:
            ensemble: Ensemble | OutputDraws = OutputDraws(self._model[0], posterior, seeds)
        else:
            ensemble = Ensemble(
                self._model[0], posterior, seeds, keep="seeds", dtype=self._dtype, batched=self._batched
            )
        ensemble.to(self.device)
        return torch.cat([at_least_float32(block) for block in ensemble.blocks(*batch.args, **batch.kwargs)])

    def _predict(self, posterior: Posterior, batch: Batch) -> Prediction:
        ensemble = self.ensemble
        recorded, calls = None, None
        if isinstance(ensemble, Ensemble):
            recorded = ensemble.recorded(*batch.args, **batch.kwargs)
            if recorded is not None:
                calls = self._last_calls(posterior, ensemble.fixed_part, recorded)
        # before the draws: a model may change its inputs in place
        ratio = self._known_novelty(posterior, batch, calls)
        return summarise(self._blocks(posterior, batch, ensemble, recorded), posterior).with_novelty(ratio)

    def _last_calls(self, posterior: Posterior, fixed: FixedPart, recorded: Features) -> list[Call] | None:
        """The calls of the last layer at the posterior's mean by what was recorded for the draws, which saves a pass
        through the part before the weights with a posterior; None where a pass of its own is needed.
        """
        grams = posterior.features
        if grams is None or not self._tells_novelty:
            return None
        if self._dtype is not None:
            return None  # other numbers than in the fit
        try:
            with torch.inference_mode(False), torch.no_grad():
                return fixed.calls_of(grams.layer, recorded)
        except ReplayError:
            return None

    def _distribution(self, posterior: Posterior, batch: Batch) -> Tensor:
        return torch.cat([at_least_float32(b) for b in self.ensemble.blocks(*batch.args, **batch.kwargs)])

    def _prediction_of(self, posterior: Posterior, distribution: Tensor) -> Prediction:
        return summarise(iter([distribution / divisor_of(posterior)]), posterior)

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`; features do not change when the weights are drawn anew."""
        features = self.ensemble.features(*args, **kwargs)
        if features is not None and self._dtype is not None:
            features.outputs = None
        return features

    def distribution_from(self, features: Features) -> Tensor:
        """See `Predictor`."""
        return torch.cat([at_least_float32(block) for block in self.ensemble.from_features(features)])


def _check_outputs(keep: str, antithetic: bool, dtype: torch.dtype | None, batched: Batched) -> None:
    """Refuse options of drawn weights where outputs are drawn."""
    given = {"keep": keep != "weights", "antithetic": antithetic, "dtype": dtype, "batched": batched is True}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise PosthocUQError(
            f"drawn='outputs' draws no weights, so that {wrong[0]}= says nothing; leave it out."
        )
