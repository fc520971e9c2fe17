"""Calls of a running model that are watched or replaced; attention, recurrent layers, normalisations, bilinear layers,
bags of embeddings and sums with a matrix are opened up for it.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from posthoc_uq.layers.opened import WITH_WEIGHTS, decomposed_calls
from posthoc_uq.layers.recurrence import RECURRENT, decomposed_recurrence
from posthoc_uq.layers.rules import AffineCall, affine_call


def _opened() -> Callable[..., Any]:
    """`F.multi_head_attention_forward` with visible inner calls.

    Torch's own function would show itself to a function mode as one opaque call, again and again.
    """
    function = F.multi_head_attention_forward
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


open_attention: Callable[..., Any] = _opened()


_SUM = re.compile(r"(\.{3})?(\w+),(\.{3})?(\w+)->(\.{3})?(\w+)")


def _opened_einsum(func: Any, args: Any) -> Callable[[], Tensor] | None:
    """A sum over one dimension of a tensor and of a matrix as their product: ``"bti,io->bto"`` is ``x @ w``, and
    ``"...i,oi->...o"`` is ``linear(x, w)``. None for other functions and sums.
    """
    found = None
    if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
        found = _SUM.fullmatch(args[0].replace(" ", ""))
    if found is None:
        return None
    one, other = (args[1], *found.group(1, 2)), (args[2], *found.group(3, 4))
    dots, out = found.group(5, 6)
    pairs = [(one, other), (other, one)]
    for (x, x_dots, dims), (matrix, matrix_dots, names) in sorted(pairs, key=_without_parameter):
        shared = set(names) & set(dims)
        repeated = len({*dims}) < len(dims) or len({*names}) < len(names)
        if matrix_dots or x_dots != dots or len(names) != 2 or len(shared) != 1 or repeated:
            continue
        (summed,) = shared
        kept = dims.replace(summed, "") + names.replace(summed, "")
        if sorted(out) == sorted(kept):
            places = [kept.index(name) - len(kept) for name in out]
            return partial(_product, x, matrix, dims.index(summed) - len(dims), places, names[1] == summed)
    return None


def _without_parameter(pair: tuple[Any, tuple[Any, ...]]) -> bool:
    """Whether the second of two operands, which would be the matrix, is no parameter."""
    return not isinstance(pair[1][0], nn.Parameter)


def _product(x: Tensor, matrix: Tensor, summed: int, places: list[int], turned: bool) -> Tensor:
    """The product over the dimension `summed` of x, whose dimensions come from these places."""
    x = x.movedim(summed, -1)
    found = F.linear(x, matrix) if turned else x @ matrix
    return found.movedim(places, list(range(-len(places), 0)))


_OPENED = {F.multi_head_attention_forward, torch.einsum, *RECURRENT, *WITH_WEIGHTS}


class CallMode(TorchFunctionMode):
    """Shows torch's functions to `handle_call` while a model runs; attention, recurrent layers, sums with a matrix, and
    what has a weight that it `follows` in `decomposed_calls`, as the functions that they consist of.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OPENED:  # as hardly any is
            return self.handle_call(func, types, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        opened = (
            decomposed_recurrence(func, args, kwargs)
            or _opened_einsum(func, args)
            or decomposed_calls(func, args, kwargs, self.follows)
        )
        if opened is not None:
            with self:
                return opened()
        return self.handle_call(func, types, args, kwargs)

    def follows(self, weight: Tensor) -> bool:
        """Whether the calls of a weight matter here."""
        return False

    def handle_call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the model gets from a call."""
        raise NotImplementedError


class CallWatcher(CallMode):
    """Reports calls while they run, and changes none.

    Args:
        tracked: identities of weights; None for all.
        handler: called with every ``linear``, ``conv`` or product of a tracked weight, and its output.
        every: called with each of torch's functions, its arguments and its result.
        watched: identities of weights whose calls `handler` sees, too, but whose outputs stay as they are.
        anchored: whether a backward pass will follow: then `handler` sees calls with gradients enabled only, and their
            outputs are made part of the graph.
    """

    def __init__(
        self,
        tracked: Collection[int] | None = (),
        handler: Callable[[AffineCall, Tensor], None] | None = None,
        *,
        every: Callable[[Any, Any, dict[str, Any], Any], None] | None = None,
        watched: Collection[int] = (),
        anchored: bool = True,
    ) -> None:
        super().__init__()
        self._tracked, self._watched, self._handler = tracked, watched, handler
        self._every, self._anchored = every, anchored

    def follows(self, weight: Tensor) -> bool:
        return self._handler is not None and (self._tracks(weight) or id(weight) in self._watched)

    def _tracks(self, weight: Tensor) -> bool:
        return self._tracked is None or id(weight) in self._tracked

    def handle_call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if self._every is not None:
            self._every(func, args, kwargs, output)
        followed = not self._anchored or torch.is_grad_enabled()
        if self._handler is None or not (followed or self._watched):
            return output
        call = affine_call(func, args, kwargs)
        if call is not None and _within_vmap(output):
            return output  # within torch.vmap: its samples are not to be told apart here
        if call is not None and followed and self._tracks(call.parameter):
            if self._anchored and not output.requires_grad:
                # the first layer: nothing before it needs a gradient
                output = _Anchor.apply(output, torch.empty((), device=output.device, requires_grad=True))
            self._handler(call, output)
        elif call is not None and id(call.parameter) in self._watched:
            self._handler(call, output)
        return output


def _within_vmap(tensor: Tensor) -> bool:
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


class _Anchor(torch.autograd.Function):
    """Makes a tensor part of the graph, but no leaf, since the model could not change a leaf in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, needs_gradient: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class CallReplacer(CallMode):
    """Replaces the calls of layers, wherever a weight is used, and of chosen torch functions.

    Args:
        outputs: by the identity of the weight that the running network holds; from a call to its outputs.
        functions: what runs in place of a torch function.

    Attributes:
        used: the identities of the weights that were used, once for each use.
    """

    def __init__(
        self,
        outputs: Mapping[int, Callable[[AffineCall], Any]],
        functions: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self._outputs, self._functions = outputs, functions or {}
        self.used: list[int] = []

    def follows(self, weight: Tensor) -> bool:
        return id(weight) in self._outputs

    def handle_call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in self._functions:
            return self._functions[func](*args, **kwargs)
        call = affine_call(func, args, kwargs) if self._outputs else None
        if call is None or id(call.parameter) not in self._outputs:
            return func(*args, **kwargs)
        self.used.append(id(call.parameter))
        return self._outputs[id(call.parameter)](call)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` without dropout, from operations that have forward derivatives."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


class PlainAttention(CallReplacer):
    """Replaces fused attention, which does not support `vmap` and forward differentiation, by plain operations."""

    def __init__(self) -> None:
        super().__init__({}, {F.scaled_dot_product_attention: _attend})


MIN_VARIANCE = 1e-16
"""Below it the variance of an output is not taken to its root, whose gradient is infinite at 0."""


@dataclass(frozen=True)
class WeightMoments:
    """Means and variances of a layer's independent weights, in the shapes of its parameters.

    Attributes:
        mean: of the weights.
        variance: likewise.
        bias_mean: None for the bias of the call.
        bias_variance: None for a certain bias.
    """

    mean: Tensor
    variance: Tensor
    bias_mean: Tensor | None = None
    bias_variance: Tensor | None = None


def drawn_outputs(call: AffineCall, weights: WeightMoments, generator: torch.Generator) -> Tensor:
    """A draw of a layer's outputs by local reparametrisation (Kingma, Salimans, Welling 2015, "Variational dropout and
    the local reparameterization trick").

    For independent weights with means M and variances V the outputs of an affine map are drawn from ``N(M o + E[b],
    V o^2 + Var[b])``, independently for every sample, output and position. Mean and variance are exact.
    """
    bias = call.bias if weights.bias_mean is None else weights.bias_mean
    mean = call.applied(call.input, weights.mean, bias)
    with torch.autocast(mean.device.type, enabled=False):  # squares leave the range of half precision
        squares = call.squared_input(weights.variance)
        variance = call.applied(squares, weights.variance, weights.bias_variance).clamp(min=MIN_VARIANCE)
    return mean + (variance.sqrt_() * normal(variance, generator)).to(mean)


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normals in the shape and the number format of a tensor, on its device."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
