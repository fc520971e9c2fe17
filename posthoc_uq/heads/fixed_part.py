"""The fixed part of a model: what runs before the first weight with a posterior, once a batch however many weights are
drawn.

The model's structure is unknown, so the fixed part is found by running the model. On the first batch of each shape it
is checked by numbers: with other weights in place, the replay must give what the whole model gives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from posthoc_uq.attempts import check_refused, out_of_memory
from posthoc_uq.curvature.features import watching
from posthoc_uq.heads.cost import Cost, cost_of
from posthoc_uq.heads.interception import ReplayError, intercept
from posthoc_uq.heads.recording import FunctionRecorder, RewrittenError
from posthoc_uq.heads.replay import Features
from posthoc_uq.heads.stand_ins import writable_copy
from posthoc_uq.layers import Call as LayerCall
from posthoc_uq.layers import Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import output_tensor
from posthoc_uq.randomness import device_generators, isolated_random_state
from posthoc_uq.replica import replicate

WORTH = 0.9  # features are kept where the changing part costs at most this share of a whole pass
_PROBE = 8  # samples that a fixed part is checked on
_OPERATION = 100_000  # FLOP that take about as long as the overhead of one operation
_SHAPES = 256  # input shapes that are remembered
_TRIES = 8  # recordings at most, to find the outputs that later code writes into
# How far outputs of two routes may differ, relative to the largest. CUDA's float32 products may be TF32.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_TF32 = 2e-2


class Saving(NamedTuple):
    """What a replay saves of a whole pass.

    Attributes:
        share: cost of the changing part in that of a whole pass; infinite where whole passes are to run.
        flops: of the fixed part.
        modules: names of those whose calls are replayed; none of them holds a parameter that changes.
    """

    share: float
    flops: float
    modules: frozenset[str] = frozenset()

    @property
    def worth(self) -> bool:
        """Whether it saves enough to keep features."""
        return self.share <= WORTH


_NONE = Saving(float("inf"), 0.0)


class FixedPart:
    """Records the part of a model that some of its weights do not influence, and runs the other part, which changes.

    Args:
        model: in eval mode; it is copied, and never written.
        covered: names of the parameters that change.

    Attributes:
        possible: whether any weight does not change; without one there is nothing to record.
        refused: why whole passes run although a part could have been recorded, or None.
    """

    def __init__(self, model: nn.Module, covered: Collection[str]) -> None:
        self._model, self._covered = model, frozenset(covered)
        parameters = model.named_parameters()
        self.possible = any(name not in self._covered and p.ndim > 1 for name, p in parameters)
        self._twins: deque[_Twin] = deque()
        self._savings: dict[Any, Saving] = {}
        self._rewritten: set[str] = set()
        self.refused: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # the decisions stay, so that a copy takes the same route
        return {**self.__dict__, "_twins": deque()}

    def features(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wanted: Callable[[Saving], bool] = lambda saving: saving.worth,
    ) -> Features | None:
        """What enters the changing part of the model for these inputs; None where whole passes are to run.

        Where autograd is on, gradients with respect to the inputs flow through the features.

        Args:
            wanted: whether a saving is worth recording a pass.
        """
        if torch.compiler.is_compiling() or not self.possible:
            return None
        key = _situation(args, kwargs)
        saving = self._savings.get(key)
        if saving is None:
            saving = self._settle(args, kwargs)
            if len(self._savings) >= _SHAPES:
                self._savings.clear()
            self._savings[key] = saving
        if saving == _NONE or not wanted(saving):
            return None
        try:
            with _counting_versions(torch.is_grad_enabled()), self._lent() as twin:
                return self._record(twin, args, kwargs, saving.modules)
        except ReplayError as error:
            self.refuse(str(error))
            return None

    def refuse(self, reason: str) -> None:
        """Run whole passes from now on, for the shapes known so far."""
        self.refused = reason
        self._savings = dict.fromkeys(self._savings, _NONE)

    def run(self, features: Features, weights: Mapping[str, Tensor]) -> Tensor:
        """The outputs with these weights in place.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        with self._lent() as twin, twin.holding(weights):
            return output_tensor(features.call_any(twin.model))

    def calls_of(self, layer: Layer, features: Features) -> list[LayerCall]:
        """The calls of a layer in a replay with the model's own weights.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        with self._lent() as twin, watching(twin.model, layer) as calls:
            features.call_any(twin.model)
        return calls

    @contextmanager
    def _lent(self) -> Generator[_Twin]:
        """A replica that no other thread uses meanwhile."""
        try:
            twin = self._twins.pop()
        except IndexError:
            twin = None
        if twin is None or _memory(twin.model) != _memory(self._model):  # the model was moved
            twin = _Twin(self._model, self._covered)
        yield twin
        self._twins.append(twin)  # not after an error, which may leave it half written

    def _record(
        self, twin: _Twin, args: tuple[Any, ...], kwargs: dict[str, Any], known_modules: Collection[str] = ()
    ) -> Features:
        for _ in range(_TRIES):
            try:
                return FunctionRecorder(twin.changing, self._rewritten, known_modules).run(
                    twin.model, args, kwargs
                )
            except RewrittenError as error:
                self._rewritten = self._rewritten | error.names
        raise ReplayError("later code keeps writing into what modules returned")

    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saving:
        """What a replay saves on inputs of this shape."""
        batch = Batch(args, None, kwargs)
        samples = next((t.shape[0] for t in batch.tensors() if t.ndim > 0), 0)
        trials = [batch.narrow(0, _PROBE, samples)] if samples > _PROBE else []

        def saving(trial: Batch) -> Saving:
            with isolated_random_state(), _counting_versions(False):
                return self._saving(trial)

        def plainly() -> None:
            with isolated_random_state(), torch.no_grad():
                batch.copied().call_any(replicate(self._model))

        reason = None
        for trial in [*trials, batch]:
            try:
                return saving(trial)
            except ReplayError as error:
                self.refused = str(error)
                return _NONE
            except Exception as error:  # of the model: it may need the full batch, or weights like its own
                check_refused(error, lambda trial=trial: saving(trial), plainly)
                reason = described(error)
        self.refused = reason
        return _NONE

    def _saving(self, batch: Batch) -> Saving:
        weights = {name: _moved(p) for name, p in self._model.named_parameters() if name in self._covered}
        member = replicate(self._model, weights)
        outputs: list[Tensor] = []

        def whole_pass() -> None:
            args, kwargs = tree_map(writable_copy, (batch.args, batch.kwargs))
            outputs.append(output_tensor(member(*args, **kwargs)))

        whole_cost = cost_of(whole_pass)
        expected = outputs[-1]
        try:
            features = self._proved(batch)
            if not any(call.leaves is not None for call in features.calls):
                return _NONE
            replay_cost = cost_of(lambda: outputs.append(self.run(features, weights)))
        except Exception as error:  # a model may raise anything
            cause = error.__cause__ if isinstance(error, ReplayError) else error
            if isinstance(cause, Exception):
                check_refused(cause, lambda: self.run(self._proved(batch), weights), whole_pass)
            if isinstance(error, ReplayError):
                raise
            raise ReplayError(described(error)) from error
        if not agree(outputs[-1], expected):
            raise ReplayError("its outputs differ from those of the whole model")
        replayed = {call.name for call in features.calls if call.leaves is not None}
        modules = frozenset(name for name in replayed if not self._holds(name))
        if whole_cost is None or replay_cost is None:
            return Saving(0.0, float("inf"), modules)
        share = _work(replay_cost) / _work(whole_cost)
        return Saving(share, whole_cost.flops - replay_cost.flops, modules)

    def _holds(self, name: str) -> bool:
        """Whether a module of this name holds a parameter that changes."""
        covered = {id(p) for key, p in self._model.named_parameters() if key in self._covered}
        return any(id(p) in covered for p in self._model.get_submodule(name).parameters())

    def _proved(self, batch: Batch) -> Features:
        """Features, once it is certain that the model draws no random numbers and keeps nothing of a pass."""
        with self._lent() as twin:
            state_before, random_before = _state(twin.model), _random_state()
            features = self._record(twin, batch.args, batch.kwargs)
            if random_before != _random_state():
                raise ReplayError("the model draws random numbers")
            state_after = _state(twin.model)
            if state_after != state_before:  # what a first pass makes and keeps does no harm
                features = self._record(twin, batch.args, batch.kwargs)
                _check_state(state_after, _state(twin.model))
            _disturb(twin.model, batch)
        return features


class _Twin:
    """A replica whose calls can be recorded and replayed.

    Attributes:
        model: the replica.
        changing: identities of its parameters that change.
    """

    def __init__(self, model: nn.Module, covered: Collection[str]) -> None:
        with isolated_random_state():  # copying a module may run its code
            self.model = intercept(replicate(model))
        self._trained = {name: p for name, p in self.model.named_parameters() if name in covered}
        self.changing = {id(parameter) for parameter in self._trained.values()}
        self._holders: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in self._trained}
        names = {id(parameter): name for name, parameter in self._trained.items()}
        for module in self.model.modules():
            parameters: dict[str, Any] = module.__dict__["_parameters"]
            for key, parameter in parameters.items():
                if id(parameter) in names:
                    self._holders[names[id(parameter)]].append((parameters, key))

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Generator[None]:
        """Put weights in place for as long as the context lasts, wherever a module holds them."""
        self._place(weights)
        yield
        self._place(self._trained)

    def _place(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            for parameters, key in self._holders[name]:
                parameters[key] = weight


def _disturb(model: nn.Module, batch: Batch) -> None:
    """Run a model on other inputs, so that whatever it keeps of a pass out of sight is not what the following replay
    needs: a replay that depends on it then differs.
    """

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        turned = value.detach().roll(1, 0).flip(-1)
        return -turned if turned.is_floating_point() else turned

    args, kwargs = tree_map(other, (batch.args, batch.kwargs))
    try:
        model(*args, **kwargs)
    except Exception as error:  # inputs that the model refuses change nothing
        if out_of_memory(error):
            raise


def _memory(model: nn.Module) -> int:
    return next(model.parameters()).data_ptr()


def _work(cost: Cost) -> float:
    return cost.flops + _OPERATION * cost.operations


def _moved(parameter: Tensor) -> Tensor:
    """Other values of similar size for a parameter, the same in every run."""
    steps = torch.arange(parameter.numel(), device=parameter.device, dtype=torch.float32)
    wave = torch.cos(steps * steps + 1.0).reshape(parameter.shape).to(parameter.dtype)
    return parameter.detach() + 0.1 * parameter.detach().abs().mean() * wave


@contextmanager
def _counting_versions(gradients: bool) -> Generator[None]:
    """Have tensors count how often they are written, which those of inference mode do not."""
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _situation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that a model's route may depend on beside the numbers in its inputs, as a dictionary key."""
    leaves = list(enumerate(tree_leaves((args, kwargs))))
    tensors = tuple(
        (place, tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
        for place, leaf in leaves
        if isinstance(leaf, Tensor)
    )
    options = tuple((place, leaf) for place, leaf in leaves if isinstance(leaf, (bool, int, float, str)))
    kinds = {tensor[3].type for tensor in tensors} or {"cpu"}
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        for kind in sorted(kinds)
    )
    return tensors, options, casts, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _random_state() -> Any:
    states = [torch.get_rng_state()]
    states += [module.get_rng_state(*place) for module, place in device_generators()]
    numbers = cast("tuple[Any, ...]", np.random.get_state())
    return [state.tolist() for state in states], random.getstate(), [np.asarray(n).tolist() for n in numbers]


class _Held:
    """An object that is held, so that no later one has its identity; equal for the same object, not written since."""

    def __init__(self, value: Any) -> None:
        counted = isinstance(value, Tensor) and not value.is_inference()
        self.value, self.version = value, value._version if counted else -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def _state(model: nn.Module) -> dict[str, Any]:
    """A fingerprint of what the modules hold, by which a change is seen."""
    return {
        f"{name}.{key}" if name else key: _fingerprint(value, 3)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in ("forward", "_modules")
    }


def _fingerprint(value: Any, depth: int) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if depth and isinstance(value, dict):
        return [(str(k), _fingerprint(v, depth - 1)) for k, v in cast("dict[Any, Any]", value).items()]
    if depth and isinstance(value, (list, tuple, deque)):
        return [_fingerprint(v, depth - 1) for v in cast("Collection[Any]", value)]
    return _Held(value)


def _check_state(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise ReplayError(f"the model keeps something of a pass, in {changed[:3]}")


def agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are the same up to the rounding of their dtype, relative to the largest number."""
    if outputs.shape != expected.shape or outputs.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCES.get(expected.dtype, 0.0)
    if expected.is_cuda and expected.dtype == torch.float32:
        tolerance = _TF32
    size = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(outputs, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def described(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
