"""Activations that moments pass through: any function of an entry, and the inverse of a prior's distribution function.

Under the moments head, and in a training by moments, a function given to `elementwise` is taken at three points of
every entry's Gaussian, and one given to `jointly` at ``2 d + 1`` points of the joint one of its d arguments; anywhere
else both just call it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Positive, check_option

PROBIT_SCALE = 1 / 1.702
"""At this scale the inverse of a normal distribution function after a sigmoid is almost the identity."""


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, for a function of one entry at a time which the moments of its input are to pass through as a
    whole, by the unscented transform, rather than through each of its operations.
    """
    if has_torch_function((x,)):
        return handle_torch_function(elementwise, (x,), function, x)
    return function(x)


def jointly(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, for a function of several entries at the same place, whose moments pass through it by one
    unscented transform of as many dimensions; the inputs count as independent of each other.
    """
    if has_torch_function(inputs):
        return handle_torch_function(jointly, inputs, function, *inputs)
    return function(*inputs)


def normal_quantile_of_sigmoid(t: Tensor) -> Tensor:
    """``Phi^-1(sigmoid(t))``, accurate for large t too, where the sigmoid itself is 1.

    Its derivative, ``sigmoid(t) sigmoid(-t) / phi(y)``, is taken as a whole: of its factors one leaves the range of
    float32 where the other vanishes, and autograd would multiply what comes to it by one after the other.
    """
    with torch.no_grad():
        fixed = t.detach()
        value = _quantile_of_sigmoid(fixed)
        slope = F.logsigmoid(fixed) + F.logsigmoid(-fixed) + 0.5 * value.square() + 0.5 * log(2 * pi)
    return value + slope.exp() * (t - fixed)


def _quantile_of_sigmoid(t: Tensor) -> Tensor:
    """By the smaller side; where that nears the smallest number of the format, by the expansion of the normal tail,
    ``Q(y) = phi(y) / y (1 - 1 / y^2 + 3 / y^4 - 15 / y^6)``, solved for y.
    """
    size, border = t.abs(), -0.7 * log(torch.finfo(t.dtype).tiny)
    near = -torch.special.ndtri(torch.sigmoid(-size.clamp(max=border)))
    twice = 2 * F.softplus(size.clamp(min=border))  # -2 log of the smaller side
    far = twice.sqrt()
    for _ in range(6):
        inverse = 1 / far.square()
        tail = inverse * (2 - inverse * (5 - inverse * (74 / 3)))
        far = (twice - log(2 * pi) - 2 * far.log() - tail).sqrt()
    return torch.where(size > border, far, near) * torch.sign(t)


class _Scaled(nn.Module):
    """A module that divides its input by a learned scale ``a = exp(log_scale)``, which starts at `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._start = log(check_option("scale", scale, Positive))
        self.log_scale = nn.Parameter(torch.tensor(self._start, device=torch.get_default_device()))

    def reset_parameters(self) -> None:
        """Put the scale back to where it starts."""
        nn.init.constant_(self.log_scale, self._start)


class InverseCDF(_Scaled):
    """An output whose distribution is pushed towards a prior's: ``y = F^-1(sigmoid(x / a))`` (Schodt 2024, section
    4.3.2), as in inverse transform sampling.

    The normal prior, the default, is ``y = mean + deviation Phi^-1(sigmoid(x / a))``. The scale ``a`` is learned, and
    starts where a standard normal prior makes the activation almost the identity. Element by element, so that under
    the moments head three points carry mean and variance through.

    Args:
        mean: of the normal prior, in units of the outputs.
        deviation: of it, a standard deviation.
        quantile: ``F^-1`` of any other prior, from probabilities in (0, 1), a tensor, to values of the same shape; mean
            and deviation are left out then.
        scale: where ``a`` starts.

    Attributes:
        log_scale: ``log a``, the parameter.

    Raises:
        PosthocUQError: a scale or a deviation is not positive, or `quantile` is no function.
    """

    def __init__(
        self,
        mean: float = 0.0,
        deviation: float = 1.0,
        *,
        quantile: Callable[[Tensor], Tensor] | None = None,
        scale: float = PROBIT_SCALE,
    ) -> None:
        super().__init__(scale)
        check_option("quantile", quantile, Callable[..., Any] | None)
        if quantile is not None and (mean, deviation) != (0.0, 1.0):
            raise PosthocUQError(
                "mean and deviation are those of the normal prior; leave them out with quantile=."
            )
        self.mean, self.quantile = float(mean), quantile
        self.deviation = check_option("deviation", deviation, Positive)

    def forward(self, x: Tensor) -> Tensor:
        """Values of the prior's units, shaped like the input."""
        return elementwise(self._values, x * (-self.log_scale).exp())

    def _values(self, t: Tensor) -> Tensor:
        if self.quantile is not None:
            return self.quantile(torch.sigmoid(t))
        return self.mean + self.deviation * normal_quantile_of_sigmoid(t)

    def extra_repr(self) -> str:
        """The prior."""
        return "quantile" if self.quantile is not None else f"mean={self.mean}, deviation={self.deviation}"


class ConditionalInverseCDF(_Scaled):
    """An output with a normal prior that depends on other outputs: ``y = m(c) + s(c) Phi^-1(sigmoid(x / a))`` (Schodt
    2024, section 4.3.2: a number of photons, given the position).

    Under the moments head the outputs ``c`` are uncertain too. One unscented transform of x and all of c carries this
    through, by ``2 (1 + d) + 1`` points.

    Args:
        prior: of d tensors ``(batch,)``, the other outputs, to the prior's mean and standard deviation, ``(batch,)``
            each.
        scale: where ``a`` starts.

    Attributes:
        log_scale: ``log a``, the parameter.

    Raises:
        PosthocUQError: `prior` is no function, or a scale is not positive.
    """

    def __init__(self, prior: Callable[..., tuple[Tensor, Tensor]], *, scale: float = PROBIT_SCALE) -> None:
        super().__init__(scale)
        if not callable(cast(Any, prior)):
            raise PosthocUQError(
                "prior must be a function of the other outputs that gives a mean and a deviation."
            )
        self.prior = prior

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        """Values ``(batch,)``.

        Args:
            x: ``(batch,)``, the network's output for this one.
            others: ``(batch, d)``, the outputs that its prior depends on.
        """
        return jointly(self._values, x * (-self.log_scale).exp(), *others.unbind(1))

    def _values(self, t: Tensor, *others: Tensor) -> Tensor:
        mean, deviation = self.prior(*others)
        return mean + deviation * normal_quantile_of_sigmoid(t)
