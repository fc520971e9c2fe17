"""Sums, products and matrix products of tensors that are taken to be independent of each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posthoc_uq.moments.rules.elementwise import apply
from posthoc_uq.moments.tensor import RULES, MomentTensor, Pass, full_precision, moments_of, named, rule


def _sum(first: Any, second: Any, alpha: float, sign: float) -> MomentTensor:
    (m1, v1), (m2, v2) = moments_of(first), moments_of(second)
    factor = sign * alpha
    mean = _typed(torch.add(m1, m2, alpha=factor) if factor != 1 else m1 + m2, first, second)
    if first is second:  # x + x, x - x
        return MomentTensor(mean, v1 * (1 + factor) ** 2)
    covariance: Tensor | None = None
    if not isinstance(second, MomentTensor):
        variance, covariance = v1.expand(mean.shape), _covariance_of(first, mean)
    elif not isinstance(first, MomentTensor):
        variance = (v2 if factor**2 == 1 else v2 * factor**2).expand(mean.shape)
        second_covariance = _covariance_of(second, mean)
        covariance = None if second_covariance is None else second_covariance * factor**2
    else:
        variance = v1 + (v2 if factor**2 == 1 else v2 * factor**2)
    return MomentTensor(mean, variance, covariance)


def _typed(mean: Tensor, first: Any, second: Any) -> Tensor:
    """The mean in the dtype of the moment tensor, where the other operand is a plain number."""
    for number, other in ((first, second), (second, first)):
        if not isinstance(number, Tensor) and isinstance(other, MomentTensor):
            return mean.to(other.moment_mean.dtype)
    return mean


def _covariance_of(x: MomentTensor, result: Tensor) -> Tensor | None:
    """The covariance, unless the result was broadcast to another shape."""
    return (
        x.moment_covariance
        if x.moment_covariance is not None and x.moment_mean.shape == result.shape
        else None
    )


@rule(*named("add"), Tensor.__add__, Tensor.__radd__)
def add(state: Pass, input: Any, other: Any, *, alpha: float = 1) -> Any:
    return _sum(input, other, alpha, 1.0)


@rule(*named("sub", "subtract"), Tensor.__sub__)
def sub(state: Pass, input: Any, other: Any, *, alpha: float = 1) -> Any:
    return _sum(input, other, alpha, -1.0)


@rule(*named("rsub"), Tensor.__rsub__)
def rsub(state: Pass, input: Any, other: Any) -> Any:
    return _sum(other, input, 1.0, -1.0)


def _product(state: Pass, first: Any, second: Any) -> MomentTensor:
    if first is second:
        return apply(state, torch.square, first)
    (m1, v1), (m2, v2) = moments_of(first), moments_of(second)
    mean = _typed(m1 * m2, first, second)
    if not isinstance(second, MomentTensor):
        return _scaled(first, m2, mean)
    if not isinstance(first, MomentTensor):
        return _scaled(second, m1, mean)
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


@rule(*named("mul", "multiply"), Tensor.__mul__, Tensor.__rmul__)
def mul(state: Pass, input: Any, other: Any) -> Any:
    return _product(state, input, other)


@rule(*named("div", "divide", "true_divide"), Tensor.__truediv__)
def div(state: Pass, input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        return state.unknown(torch.div, (input, other), {"rounding_mode": rounding_mode})
    if isinstance(other, MomentTensor):
        return _product(state, input, apply(state, torch.reciprocal, other, positive=True))
    divisor = torch.as_tensor(other, dtype=input.moment_variance.dtype, device=input.moment_variance.device)
    return _scaled(input, divisor.reciprocal(), input.moment_mean / other)


@rule(Tensor.__rtruediv__, Tensor.__rdiv__)
def rdiv(state: Pass, input: Any, other: Any) -> Any:
    return _product(state, other, apply(state, torch.reciprocal, input, positive=True))


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
    return apply(state, lambda x: x.pow(exponent), input, positive=not polynomial)


@rule(*named("addcmul"))
def addcmul(state: Pass, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    certain = not isinstance(tensor1, MomentTensor) and not isinstance(tensor2, MomentTensor)
    product = tensor1 * tensor2 if certain else _product(state, tensor1, tensor2)
    return _sum(input, product, value, 1.0)


@rule(*named("lerp"))
def lerp(state: Pass, input: Any, end: Any, weight: Any) -> Any:
    if isinstance(weight, MomentTensor):
        return state.unknown(torch.lerp, (input, end, weight), {})
    return _both(_certain_or(state, input, 1 - weight), _certain_or(state, end, weight))


def _certain_or(state: Pass, x: Any, factor: Any) -> Any:
    return _product(state, x, factor) if isinstance(x, MomentTensor) else x * factor


def _both(first: Any, second: Any) -> Any:
    return _sum(first, second, 1.0, 1.0)


def _in_place(name: str, operation: Any) -> None:
    def run(state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, MomentTensor):
            raise state.refusal(
                "an uncertain activation is added in place into a plain tensor",
                "make the operation out of place",
            )
        return state.replace(input, operation(state, input, *args, **kwargs))

    RULES[getattr(Tensor, name)] = run


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
    _in_place(_name, _operation)


def products(state: Pass, function: Any, first: Any, second: Any) -> MomentTensor:
    """A bilinear function, such as a matrix product: ``v = v_A (m_B^2) + (m_A^2 + v_A) v_B``."""
    (m1, v1), (m2, v2) = moments_of(first), moments_of(second)
    mean = function(m1, m2)
    with full_precision(mean):
        kind = v1.dtype if isinstance(first, MomentTensor) else v2.dtype
        s1, s2 = m1.to(kind).square(), m2.to(kind).square()
        if not isinstance(second, MomentTensor):
            variance = function(v1, s2)
        elif not isinstance(first, MomentTensor):
            variance = function(s1, v2)
        else:
            variance = function(v1, s2) + function(s1 + v1, v2)
    return MomentTensor(mean, variance)


@rule(torch.einsum)
def einsum(state: Pass, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])  # type: ignore[assignment]
    if len(operands) != 2:
        return state.unknown(torch.einsum, (equation, *operands), {})
    return products(state, lambda a, b: torch.einsum(equation, a, b), operands[0], operands[1])


def _bilinear(function: Any) -> Any:
    def run(state: Pass, *args: Any, **kwargs: Any) -> Any:
        first, second = (*args, *kwargs.values())
        return products(state, function, first, second)

    return run


for _function in named("mm", "mv", "dot", "inner", "outer"):
    RULES[_function] = _bilinear(_function)


@rule(*named("baddbmm", "addmm"))
def added_product(
    state: Pass, input: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    uncertain = isinstance(first, MomentTensor) or isinstance(second, MomentTensor)
    product = products(state, torch.matmul, first, second) if uncertain else torch.matmul(first, second)
    scaled = _certain_or(state, product, torch.tensor(float(alpha), device="cpu"))
    return _sum(scaled, _certain_or(state, input, torch.tensor(float(beta), device="cpu")), 1.0, 1.0)
