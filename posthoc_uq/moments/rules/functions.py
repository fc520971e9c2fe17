"""Functions that a model hands over as a whole (`moments.activations`): of one entry, or of several at a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from posthoc_uq.moments.activations import at_mean, elementwise, jointly
from posthoc_uq.moments.rules.elementwise import apply
from posthoc_uq.moments.tensor import MomentTensor, Pass, mean_of, rule
from posthoc_uq.moments.unscented import unscented_joint


@rule(elementwise)
def of_one_entry(state: Pass, function: Callable[[Tensor], Tensor], x: MomentTensor) -> MomentTensor:
    return apply(state, function, x, blocks=False)


@rule(jointly)
def of_several_entries(state: Pass, function: Callable[..., Tensor], *inputs: Any) -> MomentTensor:
    kind = next(x.moment_mean.dtype for x in inputs if isinstance(x, MomentTensor))
    wide = next(x.moment_variance.dtype for x in inputs if isinstance(x, MomentTensor))
    means = [mean.to(wide) for mean in mean_of(list(inputs))]
    variances = [x.moment_variance if isinstance(x, MomentTensor) else None for x in inputs]
    mean, variance = unscented_joint(function, means, variances)
    return MomentTensor(mean.to(kind), variance)


@rule(at_mean)
def certain(state: Pass, x: MomentTensor) -> Tensor:
    return x.moment_mean
