"""The temperature and the width at which a last layer's posterior by message passing predicts as the network does.

The means are not the trained ones: the prior draws them to its own, and the variances of the logits are those of
independent messages. So at temperature 1 a posterior is far less sure than the network, although its order of classes
is as good. A temperature sharpens means and variances alike: where the variances are too large for the means, no
temperature gives the network's predictions, but a narrower posterior at another one does. No labels are needed for
either, only the network's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, log10
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.inference.message_data import Examples
from posthoc_uq.inference.message_network import folded_parameters
from posthoc_uq.inference.message_shared import TEMPERATURE
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing.joint import Joint, marginals
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock, moved
from posthoc_uq.randomness import mixed_seed

_DRAWS = 128  # of the logits
_SAMPLES = 512  # of the data, at most
_NUMBERS = 2**23  # logits drawn at most, but for one sample
_LOWEST = -1.5  # decade
_COARSE, _FINE = 0.25, 0.025
_WIDER = 0.005  # nats above the least divergence that a wider posterior may be
_FEW = 128  # of the samples, by which the width is found
_NARROW = (-0.5, -1.0, -2.0)  # decades of the variances among which the least divergence is looked for
_HALVINGS = 4  # of the interval in which the widest posterior lies


class Matched(NamedTuple):
    """What was found.

    Attributes:
        temperature: of the logits.
        share: of the posterior's own variances.
    """

    temperature: float
    share: float


def matched(task: Task, layer: Layer, block: MessagesBlock, examples: Examples, highest: float) -> Matched:
    """The temperature of the least mean divergence ``KL(p_network || p_posterior)`` over up to 512 samples of a fit,
    for the largest share of the variances at which it is within 0.005 nats of the least of all.

    A network that knows less than the posterior, as one whose last layer is not trained, is no measure: then it is
    `highest`, and all of the variances.

    Args:
        task: the fit.
        layer: the model's last.
        block: its posterior.
        examples: the data.
        highest: the temperature of the posterior's own.
    """
    samples, outputs = len(examples.inputs), layer.outputs
    wanted = max(1, min(samples, _SAMPLES, _NUMBERS // (_DRAWS * outputs)))
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, TEMPERATURE) % 2**63)
    picked = torch.randperm(samples, generator=generator, device="cpu")[:wanted]
    rows = as_double(examples.inputs[picked.to(examples.inputs.device)])
    network = _with_zero(_network_outputs(task, layer, rows)).log_softmax(-1)
    mean, variance = _logits(block, layer, rows)
    normals = torch.randn(_DRAWS, 1, outputs, generator=generator, dtype=torch.float64, device="cpu")
    deviation = variance.sqrt() * normals.to(mean)
    top = log10(highest)

    def divergence(decade: float, width: float, few: int | None = None) -> float:
        drawn = _with_zero(mean[:few] + 10 ** (width / 2) * deviation[:, :few])
        posterior = (drawn / 10**decade).log_softmax(-1).logsumexp(0) - log(_DRAWS)
        return float((network[:few].exp() * (network[:few] - posterior)).sum(-1).mean())

    def least(width: float) -> float:
        """The least divergence at any temperature."""
        search = {"bounds": (_LOWEST, top), "method": "bounded", "options": {"xatol": _FINE}}
        found: Any = minimize_scalar(divergence, args=(width, _FEW), **search)
        return min(float(found.fun), divergence(top, width, _FEW))

    width = _widest(least)

    def at_width(decade: float) -> float:
        return divergence(decade, width)

    best = _least(at_width, _LOWEST, top, _COARSE)
    decade = _least(at_width, max(_LOWEST, best - _COARSE), min(top, best + _COARSE), _FINE)
    return Matched(10**decade, 10**width)


def _widest(least: Callable[[float], float]) -> float:
    """The largest decade of the variances at which the divergence is nearly the least; 0 is all of them."""
    divergences = {decade: least(decade) for decade in (0.0, *_NARROW)}
    narrow = min(divergences, key=divergences.__getitem__)
    budget, wide = divergences[narrow] + _WIDER, 0.0
    if divergences[wide] <= budget:
        return wide
    for _ in range(_HALVINGS):
        middle = (narrow + wide) / 2
        if least(middle) <= budget:
            narrow = middle
        else:
            wide = middle
    return narrow


def _least(score: Callable[[float], float], start: float, end: float, step: float) -> float:
    places = [end - step * index for index in range(int((end - start) / step + 1e-9) + 1)]
    return min(places, key=score)


def _with_zero(logits: Tensor) -> Tensor:
    """Of a single logit, whose probability is its sigmoid, the two of a softmax."""
    return logits if logits.shape[-1] > 1 else F.pad(logits, (1, 0))


def _network_outputs(task: Task, layer: Layer, rows: Tensor) -> Tensor:
    weights, bias = folded_parameters(layer, None, dict(task.model.named_parameters()))
    outputs = rows @ weights[0]
    return outputs if bias is None else outputs + bias[0]


def _logits(block: MessagesBlock, layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of the logits, ``(N, J)``."""
    if layer.bias is not None:
        rows = moved(torch.cat([rows, torch.ones_like(rows[:, :1])], 1), as_double(block.shift))
    mean, total = block.moved_mean()[0].to(rows), block.total()[0].to(rows)
    if not isinstance(block, JointMessagesBlock):
        return rows @ mean.T, rows.square() @ total.reciprocal().T
    known = marginals(rows, Joint((total @ mean.unsqueeze(2)).squeeze(2), total))
    return known.mean, known.variance
