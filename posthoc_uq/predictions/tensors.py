"""Predictions at the boundary of an exported program: named tuples of tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree


class ClassTensors(NamedTuple):
    """A classification at the boundary of an exported program; see `ClassPrediction`.

    Attributes:
        probs: (batch, classes).
        logits_mean: (batch, classes), or (batch, 1) for one logit.
        logits_variance: of the same shape.
        entropy: (batch,), in nats.
        mutual_information: (batch,), in nats; NaN with ``link="probit"`` or ``"bridge"``, which do not know it.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor


class ValueTensors(NamedTuple):
    """A regression at the boundary of an exported program; see `RegressionPrediction`.

    Attributes:
        mean: (batch,) or (batch, outputs).
        variance: of the same shape: total, by weights and observation noise.
        epistemic_variance: of the same shape: the weights' part.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor


for _kind in (ClassTensors, ValueTensors):  # so that an exported program can name its outputs in a file
    pytree._register_namedtuple(  # pyright: ignore[reportPrivateUsage]
        _kind, serialized_type_name=f"posthoc_uq.{_kind.__name__}"
    )
