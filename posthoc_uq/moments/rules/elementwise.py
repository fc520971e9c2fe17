"""Element-wise functions: the unscented transform, or a closed form where that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.tensor import RULES, MomentTensor, Pass, Rule, named, rule, variance_dtype
from posthoc_uq.moments.unscented import (
    Function,
    Moments,
    blockwise,
    blockwise_scaled,
    is_recorded,
    rectified,
    slope,
    unscented,
    unscented_positive,
)

_SMOOTH = (
    "relu relu6 leaky_relu elu celu selu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign "
    "tanhshrink softshrink hardshrink logsigmoid threshold sigmoid tanh exp expm1 erf sin cos atan arctan "
    "sinh asinh clamp clip clamp_min clamp_max abs absolute square nan_to_num"
).split()
_ONE_SIDED = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]


_EDGES = {"log1p": -1.0}

Run = Callable[[Tensor, Tensor, "Moments | None"], Moments]


def apply(
    state: Pass,
    function: Function,
    x: MomentTensor,
    positive: bool = False,
    blocks: bool = True,
    edge: float = 0.0,
) -> MomentTensor:
    """An element-wise function of a moment tensor, by three points; its covariance by the slopes between them.

    Args:
        positive: the function exists above an edge only.
        blocks: the function may be called on parts of the tensor.
        edge: that edge.
    """

    def run(a: Tensor, b: Tensor, out: Moments | None) -> Moments:
        if not positive:
            return unscented(function, a, b, out)
        moments = unscented_positive(function, a, b, edge)
        return moments if out is None else (out[0].copy_(moments[0]), out[1].copy_(moments[1]))

    return _by_blocks(x, run, function) if blocks else _at_once(x, run, function)


def _at_once(x: MomentTensor, run: Run, function: Function) -> MomentTensor:
    m, v = x.moment_mean, x.moment_variance
    mean, variance = run(m.to(v.dtype), v, None)
    return _with_covariance(x, function, mean.to(m.dtype), variance)


def _by_blocks(x: MomentTensor, run: Run, function: Function) -> MomentTensor:
    (m, v), scaling = x.moment_parts, x.moment_scaling
    dense = m.is_contiguous() and v.is_contiguous() and m.dtype == v.dtype and not is_recorded(m, v)
    if scaling is not None and dense and x.moment_covariance is None and not is_recorded(*scaling):
        mean, variance = blockwise_scaled(run, m, v, *scaling)
        return MomentTensor(mean, variance)
    m, v = x.moment_mean, x.moment_variance
    mean, variance = blockwise(run, m.to(v.dtype), v)
    return _with_covariance(x, function, mean.to(m.dtype), variance)


def _with_covariance(x: MomentTensor, function: Function, mean: Tensor, variance: Tensor) -> MomentTensor:
    if x.moment_covariance is None:
        return MomentTensor(mean, variance)
    slopes = slope(function, x.moment_mean.to(x.moment_variance.dtype), x.moment_variance)
    covariance = x.moment_covariance * slopes.unsqueeze(2) * slopes.unsqueeze(1)
    eye = torch.eye(variance.shape[1], dtype=torch.bool, device=variance.device)
    return MomentTensor(mean, variance, torch.where(eye, torch.diag_embed(variance), covariance))


def _register(name: str, positive: bool) -> None:
    for function in named(name, places=(torch, F, Tensor, torch.special)):

        def run(state: Pass, input: Any, *args: Any, _call: Any = function, **kwargs: Any) -> Any:
            inplace = kwargs.pop("inplace", False)
            others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not isinstance(input, MomentTensor) or any(
                isinstance(other, MomentTensor) for other in others
            ):
                return state.unknown(_call, (input, *args), kwargs)
            result = apply(
                state, lambda x: _call(x, *args, **kwargs), input, positive, not others, _EDGES.get(name, 0.0)
            )
            return state.replace(input, result) if inplace else result

        RULES[function] = run
    in_place = getattr(Tensor, name + "_", None)
    operation = getattr(Tensor, name, None) or getattr(torch, name, None) or getattr(F, name)
    for variant in {in_place, getattr(torch, name + "_", None), getattr(F, name + "_", None)} - {None}:

        def change(state: Pass, input: Any, *args: Any, _call: Any = operation, **kwargs: Any) -> Any:
            return state.replace(input, RULES[_call](state, input, *args, **kwargs))

        RULES[variant] = change


for _name in _SMOOTH:
    _register(_name, False)
for _name in _ONE_SIDED:
    _register(_name, True)


def _rectified(x: MomentTensor, negative: float) -> MomentTensor:
    def run(a: Tensor, b: Tensor, out: Moments | None) -> Moments:
        moments = rectified(a, b, negative)
        return moments if out is None else (out[0].copy_(moments[0]), out[1].copy_(moments[1]))

    return _by_blocks(x, run, lambda y: torch.nn.functional.leaky_relu(y, negative))


def _rectifier(original: Rule) -> Rule:
    def run(state: Pass, input: Any, inplace: bool = False) -> Any:
        if state.rules.relu != "exact" or input.moment_covariance is not None:
            return original(state, input, inplace=inplace)
        result = _rectified(input, 0.0)
        return state.replace(input, result) if inplace else result

    return run


for _function in named("relu"):
    RULES[_function] = _rectifier(RULES[_function])


@rule(F.leaky_relu)
def leaky_relu(state: Pass, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    if state.rules.relu == "exact" and input.moment_covariance is None:
        result = _rectified(input, negative_slope)
    else:
        result = apply(state, lambda x: F.leaky_relu(x, negative_slope), input)
    return state.replace(input, result) if inplace else result


@rule(*named("prelu"))
def prelu(state: Pass, input: Any, weight: Any) -> Any:
    m, v = input.moment_mean, input.moment_variance
    mean, variance = unscented(lambda x: F.prelu(x, weight.to(x)), m.to(v.dtype), v)
    return MomentTensor(mean.to(m.dtype), variance)


@rule(
    *named(
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        places=(F,),
    )
)
def dropout(state: Pass, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p > 0:
        raise state.refusal(
            "dropout is active", "call it with training=self.training, which is off in prediction"
        )
    return input


def _conversion(function: Any) -> Rule:
    def run(state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(a.moment_mean if isinstance(a, MomentTensor) else a for a in args)
        kwargs = {k: a.moment_mean if isinstance(a, MomentTensor) else a for k, a in kwargs.items()}
        if not isinstance(input, MomentTensor):
            return function(input, *args, **kwargs)
        mean = function(input.moment_mean, *args, **kwargs)
        if not mean.is_floating_point():
            raise state.refusal(f"activations are converted to {mean.dtype}", "which has no variance")
        variance = input.moment_variance.to(device=mean.device, dtype=variance_dtype(mean.dtype))
        covariance = input.moment_covariance
        result = MomentTensor(mean, variance, None if covariance is None else covariance.to(variance))
        result.moment_note = input.moment_note
        return result

    return run


for _function in named(
    "to", "type", "float", "double", "half", "bfloat16", "type_as", "cpu", "cuda", places=(Tensor,)
):
    RULES[_function] = _conversion(_function)
