"""Functions of one entry, or of several at the same place: nonlinearities, sums and products.

A nonlinearity goes by the unscented transform, or by a closed form where that is chosen. The operands of a sum or a
product are taken to be independent of each other. A model's function that is handed over as a whole
(`moments.activations`) has its rule here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.activations import elementwise, jointly
from posthoc_uq.moments.tensor import (
    RULES,
    MomentTensor,
    Pass,
    Rule,
    mean_of,
    moments_of,
    named,
    rule,
    variance_dtype,
)
from posthoc_uq.moments.unscented import (
    Function,
    MeanAndVariance,
    blockwise,
    rectified,
    slope,
    unscented,
    unscented_joint,
    unscented_positive,
)

_SMOOTH = (
    "relu6 elu celu selu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign "
    "tanhshrink softshrink hardshrink logsigmoid threshold sigmoid tanh exp expm1 erf sin cos atan arctan "
    "sinh asinh clamp clip clamp_min clamp_max abs absolute square nan_to_num"
).split()
_EDGES = dict.fromkeys(["log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"], 0.0) | {"log1p": -1.0}
"""Functions that exist above an edge only."""


def apply(
    state: Pass, x: MomentTensor, function: Function, *, edge: float | None = None, blocks: bool = True
) -> MomentTensor:
    """An element-wise function of a moment tensor, by three points; its covariance by the slopes between them.

    Args:
        state: whose kappa the points have.
        x: what it is applied to.
        function: of a plain tensor.
        edge: above which alone the function exists; None where it exists everywhere.
        blocks: the function may be called on parts of the tensor.
    """

    kappa = state.kappa

    def run(a: Tensor, b: Tensor) -> MeanAndVariance:
        if edge is None:
            return unscented(function, a, b, kappa)
        return unscented_positive(function, a, b, edge, kappa)

    return _transformed(state, x, run, function, blocks)


def _transformed(
    state: Pass,
    x: MomentTensor,
    run: Callable[[Tensor, Tensor], MeanAndVariance],
    function: Function,
    blocks: bool = True,
) -> MomentTensor:
    """What `run` makes of mean and variance, in blocks where it may be."""
    m, v = x.moment_mean, x.moment_variance
    wide = m.to(v.dtype)
    mean, variance = blockwise(run, wide, v) if blocks else run(wide, v)
    if x.moment_covariance is None:
        return MomentTensor(mean.to(m.dtype), variance)
    slopes = slope(function, wide, v, state.kappa)
    covariance = x.moment_covariance * slopes.unsqueeze(2) * slopes.unsqueeze(1)
    eye = torch.eye(variance.shape[1], dtype=torch.bool, device=variance.device)
    covariance = torch.where(eye, torch.diag_embed(variance), covariance)
    return MomentTensor(mean.to(m.dtype), variance, covariance)


def _nonlinearity(
    function: Any, edge: float | None, state: Pass, input: Any, *args: Any, **kwargs: Any
) -> Any:
    inplace = kwargs.pop("inplace", False)
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not isinstance(input, MomentTensor) or any(isinstance(other, MomentTensor) for other in others):
        return state.unknown(function, (input, *args), kwargs)
    result = apply(state, input, lambda x: function(x, *args, **kwargs), edge=edge, blocks=not others)
    return state.replace(input, result) if inplace else result


for _name in (*_SMOOTH, *_EDGES):
    for _function in named(_name, places=(torch, F, Tensor, torch.special)):
        RULES[_function] = partial(_nonlinearity, _function, _EDGES.get(_name))


@rule(F.leaky_relu)
def leaky_relu(state: Pass, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    def function(x: Tensor) -> Tensor:
        return F.leaky_relu(x, negative_slope)

    if state.rules.relu == "exact" and input.moment_covariance is None:
        result = _transformed(state, input, lambda m, v: rectified(m, v, negative_slope), function)
    else:
        result = apply(state, input, function)
    return state.replace(input, result) if inplace else result


@rule(*named("relu"))
def relu(state: Pass, input: Any, inplace: bool = False) -> Any:
    return leaky_relu(state, input, 0.0, inplace)


def _in_place(operation: Rule, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    return state.replace(input, operation(state, input, *args, **kwargs))


for _name in (*_SMOOTH, *_EDGES, "relu", "leaky_relu"):
    _operation = getattr(Tensor, _name, None) or getattr(torch, _name, None) or getattr(F, _name)
    for _variant in {getattr(place, f"{_name}_", None) for place in (Tensor, torch, F)} - {None}:
        RULES[_variant] = partial(_in_place, RULES[_operation])


@rule(*named("prelu"))
def prelu(state: Pass, input: Any, weight: Any) -> Any:
    m, v = input.moment_mean, input.moment_variance
    mean, variance = unscented(lambda x: F.prelu(x, weight.to(x)), m.to(v.dtype), v, state.kappa)
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


def _converted(function: Any, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    mean = function(mean_of(input), *mean_of(args), **mean_of(kwargs))
    if not isinstance(input, MomentTensor):
        return mean
    if not mean.is_floating_point():
        raise state.refusal(
            f"activations are converted to {mean.dtype}, which has no variance", "keep their type"
        )
    variance = input.moment_variance.to(device=mean.device, dtype=variance_dtype(mean.dtype))
    covariance = input.moment_covariance
    result = MomentTensor(mean, variance, None if covariance is None else covariance.to(variance))
    result.moment_note = input.moment_note
    return result


for _function in named(
    "to", "type", "float", "double", "half", "bfloat16", "type_as", "cpu", "cuda", places=(Tensor,)
):
    RULES[_function] = partial(_converted, _function)


@rule(elementwise)
def of_one_entry(state: Pass, function: Callable[[Tensor], Tensor], x: MomentTensor) -> MomentTensor:
    return apply(state, x, function, blocks=False)


@rule(jointly)
def of_several_entries(state: Pass, function: Callable[..., Tensor], *inputs: Any) -> MomentTensor:
    kind = next(x.moment_mean.dtype for x in inputs if isinstance(x, MomentTensor))
    wide = next(x.moment_variance.dtype for x in inputs if isinstance(x, MomentTensor))
    means = [mean.to(wide) for mean in mean_of(list(inputs))]
    variances = [x.moment_variance if isinstance(x, MomentTensor) else None for x in inputs]
    mean, variance = unscented_joint(function, means, variances)
    return MomentTensor(mean.to(kind), variance)


@rule(*named("add"), Tensor.__add__, Tensor.__radd__)
def add(state: Pass, input: Any, other: Any, *, alpha: float = 1) -> MomentTensor:
    (m1, v1), (m2, v2) = moments_of(input), moments_of(other)
    mean = _typed(torch.add(m1, m2, alpha=alpha) if alpha != 1 else m1 + m2, input, other)
    if input is other:  # x + x, x - x
        return MomentTensor(mean, v1 * (1 + alpha) ** 2)
    covariance: Tensor | None = None
    if not isinstance(other, MomentTensor):
        variance, covariance = v1.expand(mean.shape), _covariance_of(input, mean)
    elif not isinstance(input, MomentTensor):
        variance = (v2 if alpha**2 == 1 else v2 * alpha**2).expand(mean.shape)
        covariance = _covariance_of(other, mean)
        covariance = None if covariance is None else covariance * alpha**2
    else:
        variance = v1 + (v2 if alpha**2 == 1 else v2 * alpha**2)
    return MomentTensor(mean, variance, covariance)


def _typed(mean: Tensor, first: Any, second: Any) -> Tensor:
    """The mean in the dtype of the moment tensor, where the other operand is a plain number."""
    for number, other in ((first, second), (second, first)):
        if not isinstance(number, Tensor) and isinstance(other, MomentTensor):
            return mean.to(other.moment_mean.dtype)
    return mean


def _covariance_of(x: MomentTensor, result: Tensor) -> Tensor | None:
    """The covariance, unless the result was broadcast to another shape."""
    return x.moment_covariance if x.moment_mean.shape == result.shape else None


@rule(*named("sub", "subtract"), Tensor.__sub__)
def sub(state: Pass, input: Any, other: Any, *, alpha: float = 1) -> Any:
    return add(state, input, other, alpha=-alpha)


@rule(*named("rsub"), Tensor.__rsub__)
def rsub(state: Pass, input: Any, other: Any) -> Any:
    return add(state, other, input, alpha=-1)


@rule(*named("mul", "multiply"), Tensor.__mul__, Tensor.__rmul__)
def mul(state: Pass, input: Any, other: Any) -> MomentTensor:
    if input is other:
        return apply(state, input, torch.square)
    (m1, v1), (m2, v2) = moments_of(input), moments_of(other)
    mean = _typed(m1 * m2, input, other)
    if not isinstance(other, MomentTensor):
        return _scaled(input, m2, mean)
    if not isinstance(input, MomentTensor):
        return _scaled(other, m1, mean)
    w1, w2 = m1.to(v1.dtype), m2.to(v2.dtype)
    return MomentTensor(mean, torch.addcmul(w1.square() * v2, v1, v2 + w2.square()))


def _scaled(x: MomentTensor, factor: Tensor, mean: Tensor) -> MomentTensor:
    """A moment tensor times a factor without variance."""
    wide = factor.to(x.moment_variance)
    variance = x.moment_variance * wide.square()
    covariance = _covariance_of(x, mean)
    if covariance is not None:
        rows = wide.expand(mean.shape)
        covariance = covariance * rows.unsqueeze(2) * rows.unsqueeze(1)
    return MomentTensor(mean, variance, covariance)


@rule(*named("div", "divide", "true_divide"), Tensor.__truediv__)
def div(state: Pass, input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        return state.unknown(torch.div, (input, other), {"rounding_mode": rounding_mode})
    if isinstance(other, MomentTensor):
        return mul(state, input, apply(state, other, torch.reciprocal, edge=0.0))
    divisor = torch.as_tensor(other, dtype=input.moment_variance.dtype, device=input.moment_variance.device)
    return _scaled(input, divisor.reciprocal(), input.moment_mean / other)


@rule(Tensor.__rtruediv__, Tensor.__rdiv__)
def rdiv(state: Pass, input: Any, other: Any) -> Any:
    return mul(state, other, apply(state, input, torch.reciprocal, edge=0.0))


@rule(*named("neg", "negative"), Tensor.__neg__)
def neg(state: Pass, input: Any) -> Any:
    return MomentTensor(-input.moment_mean, input.moment_variance, input.moment_covariance)


@rule(*named("positive"), Tensor.__pos__)
def positive(state: Pass, input: Any) -> Any:
    return input


@rule(*named("pow"), Tensor.__pow__)
def power(state: Pass, input: Any, exponent: Any) -> Any:
    if not isinstance(input, MomentTensor) or isinstance(exponent, Tensor):
        return state.unknown(torch.pow, (input, exponent), {})
    polynomial = float(exponent).is_integer() and exponent >= 0
    return apply(state, input, lambda x: x.pow(exponent), edge=None if polynomial else 0.0)


@rule(*named("addcmul"))
def addcmul(state: Pass, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    certain = not isinstance(tensor1, MomentTensor) and not isinstance(tensor2, MomentTensor)
    product = tensor1 * tensor2 if certain else mul(state, tensor1, tensor2)
    return add(state, input, product, alpha=value)


@rule(*named("lerp"))
def lerp(state: Pass, input: Any, end: Any, weight: Any) -> Any:
    if isinstance(weight, MomentTensor):
        return state.unknown(torch.lerp, (input, end, weight), {})
    return add(state, times(state, input, 1 - weight), times(state, end, weight))


def times(state: Pass, x: Any, factor: Any) -> Any:
    """Anything times a certain factor."""
    return mul(state, x, factor) if isinstance(x, MomentTensor) else x * factor


for _name, _operation in {
    "add_": add,
    "__iadd__": add,
    "sub_": sub,
    "__isub__": sub,
    "mul_": mul,
    "__imul__": mul,
    "div_": div,
    "__itruediv__": div,
    "__idiv__": div,
    "pow_": power,
    "__ipow__": power,
    "neg_": neg,
    "addcmul_": addcmul,
}.items():
    RULES[getattr(Tensor, _name)] = partial(_in_place, _operation)
