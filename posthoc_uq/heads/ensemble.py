"""Draws of a model's weights as an ensemble that runs: one draw after another, or many in one pass.

**The loop** has one replica of the model per draw. Replicas share all parameters without a posterior; nothing is
written, so they run in any number of threads and under autograd, and a weight that a module holds in several places
is the drawn one in all of them.

**The batched route** maps the forward pass over the stacked draws with `torch.func.vmap`: a convolution becomes a
grouped one, a linear layer a batch of matrix products. It saves the time between kernels, and is slower where the
kernels themselves take the time. Measured on a CPU (one thread, 30 draws, in multiples of 30 plain passes; loop against
batched; thousand FLOP per operation in brackets): LeNet at batch 1 [56] 1.14 / 0.40, at batch 8 [440] 1.16 / 0.94,
at batch 32 [1,800] 1.01 / 1.52; MLP of width 64 at batch 64 [96] 1.21 / 0.81; mobilenet_v3_small at 32 px and batch
8 [270] 1.02 / 0.76, at 224 px and batch 1 [590] 1.01 / 1.12; resnet18 at 32 px and batch 1 [830] 1.00 / 3.40. So
``"auto"`` takes it up to `BATCHED_FLOPS` per operation, where enough draws fit into `CHUNK_BYTES`; on every device,
though it was measured on a CPU only. FLOP and operations are counted on the first input of each shape, never timed.

**What does not depend on the draws** runs once for a batch, where the drawn weights enter the model late
(`posthoc_uq.heads.fixed_part`): thirty draws of a last layer cost one forward pass and thirty products. Both routes
then run only the part that follows.

A model that vmap refuses (control flow by values, randomness, in-place changes of captured tensors), or for which its
outputs differ from the loop's, runs in the loop; `Ensemble.refused` then says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc_uq import interrupts
from posthoc_uq.attempts import check_refused
from posthoc_uq.heads.cost import cost_of
from posthoc_uq.heads.fixed_part import FixedPart, Saving, agree, described
from posthoc_uq.heads.function_draws import PlainAttention
from posthoc_uq.heads.inputs import Inputs
from posthoc_uq.heads.interception import ReplayError
from posthoc_uq.heads.replay import Features, check_refused_replay
from posthoc_uq.outputs import output_tensor
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.progress import tell
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate

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
            self.template = replicate(model, posterior.centre)
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
