"""Where weights enter a pass, by autograd's graph: which of them come last, and which multiply what others gave.

A layer's call shows its weight. A weight that the model's code computes from a parameter (normalised, standardised, as
prototypes that inputs are compared with) shows in the graph alone: it is where what depends on the parameter and not on
the inputs meets what does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import check_refused, out_of_memory
from posthoc_uq.core.model import parameter_names, replicate
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.layer import RULES
from posthoc_uq.layers.rules import AffineCall, Lookup
from posthoc_uq.layers.sample_gradients import is_matrix

# Operations of two tensors that sum over products, or over distances, of their numbers.
_PRODUCTS = frozenset(
    "Mm Bmm Addmm Baddbmm Addbmm Mv Addmv Dot Linear Convolution Trilinear Cdist EuclideanDist".split()
)
_PLUS = frozenset("Add Cat Stack Where".split())
_SUMS = _PLUS | {"Sub", "Rsub"}


@dataclass(frozen=True)
class Uses:
    """What a pass shows of the weights that are matrices.

    Attributes:
        last: those whose use no use of another one follows on the way to the outputs, by name: of several heads all.
        factors: those that are used in no layer's call, and multiply what depends on the inputs, as the weight of a
            layer does; the others of `last` that are used in no such call are among them.
    """

    last: frozenset[str] = frozenset()
    factors: frozenset[str] = frozenset()


def uses_of(model: nn.Module, batch: Batch) -> Uses:
    """The uses of a model's weights in one pass.

    Args:
        model: a copy of it is run.
        batch: its inputs.
    """

    def found() -> Uses:
        return _Pass(model, batch.differentiable()).uses()

    def plainly() -> Uses:
        return _Pass(model, batch.copied()).uses()

    try:
        return found()
    except Exception as error:  # the model's code may take no inputs that are part of a graph
        check_refused(error, found, plainly)
        return plainly()


class _Pass:
    """One pass with its graph.

    Attributes:
        outputs: of the model.
        calls: by the node of a layer's outputs, its weight.
        lookups: nodes of rows of embeddings.
        matrices: by identity, the names of parameters that are matrices.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        twin = replicate(model).requires_grad_(True)
        names = parameter_names(twin)
        self.matrices = {id(p): names[id(p)] for p in twin.parameters() if p.ndim >= 2 and p.numel()}
        self.parameters = {names[id(p)]: p for p in twin.parameters()}
        self.calls: dict[Any, str] = {}
        self.lookups: set[Any] = set()

        def note(use: AffineCall, output: Tensor) -> None:
            if use.kind == Lookup.kind:
                self.lookups.add(output.grad_fn)
            elif RULES[use.kind].matrices:
                self.calls[output.grad_fn] = self.matrices[id(use.parameter)]

        with torch.enable_grad(), CallWatcher(set(self.matrices), note):
            self.outputs = batch.call(twin)

    def uses(self) -> Uses:
        """What the graph says."""
        root = self.outputs.grad_fn
        if root is None:
            return Uses()
        order = list(_leaves_first(root))
        for node in self._products_of_weights(order):
            del self.calls[node]
        reached = set(order)
        called = {name for node, name in self.calls.items() if node in reached}
        joins = self._joins(order, root, called)
        for node in [node for node in joins if _operation(node) in _SUMS]:
            joins[node] = {name for name in joins[node] if not self._is_offset(name, _operation(node))}
        factors = {
            name
            for node, several in joins.items()
            for name in several
            if _operation(node) in _PRODUCTS or node is root
        }
        last = set[str]()
        for node in self._last_uses(order, root, joins):
            last |= {self.calls[node]} if node in self.calls else joins[node]
        factors |= {name for name in last - called if is_matrix(self.parameters[name])}
        return Uses(frozenset(last & (called | factors)), frozenset(factors))

    def _products_of_weights(self, order: Iterable[Any]) -> list[Any]:
        """The nodes of calls that apply a weight to what is computed from other weights alone."""
        found: list[Any] = []
        certain: dict[Any, bool] = {}  # nothing that it is computed from can be an input
        for node in order:
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                certain[node] = isinstance(variable, nn.Parameter)
                continue
            several = [child for child, _ in node.next_functions]
            alone = all(child is not None and certain[child] for child in several)
            certain[node] = alone and bool(several) and node not in self.lookups
            if node in self.calls and certain[node]:
                found.append(node)
        return found

    def _joins(self, order: Iterable[Any], root: Any, called: Collection[str]) -> dict[Any, set[str]]:
        """Where weights that are used in no layer's call meet what depends on the inputs; the end, where nothing in the
        graph does.
        """
        depends: dict[Any, bool] = {}  # on the inputs
        weights: dict[Any, set[str]] = {}
        joins: dict[Any, set[str]] = {}
        for node in order:
            before, variable = _before(node), getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                name = self.matrices.get(id(variable), "")
                depends[node] = not isinstance(variable, nn.Parameter)
                weights[node] = {name}.difference(called, [""])
                continue
            own = {name for child in before if not depends[child] for name in weights[child]}
            of_layer = node in self.calls or node in self.lookups
            depends[node] = of_layer or any(depends[child] for child in before)
            weights[node] = set() if depends[node] else own
            if own and depends[node] and not of_layer:
                joins[node] = own
        if weights[root]:
            joins[root] = weights[root]
        return joins

    def _last_uses(self, order: Sequence[Any], root: Any, joins: Mapping[Any, set[str]]) -> list[Any]:
        """The nodes of uses from which no way to the outputs leads through another use."""
        directly, after = (
            {root},
            set[Any](),
        )  # nodes that reach the outputs without another use, or through one
        found: list[Any] = []
        for node in reversed(order):
            used = node in self.calls or bool(joins.get(node))
            if used and node in directly and node not in after:
                found.append(node)
            # what is added changes nothing of what it is added to
            through = used and (node in self.calls or _operation(node) not in _PLUS)
            for child in _before(node):
                if node in directly and not through:
                    directly.add(child)
                if node in after or through:
                    after.add(child)
        return found

    def _is_offset(self, name: str, operation: str) -> bool:
        """Whether what is added of a parameter is the same for every sample: no weight of inputs."""
        return self._same_gradients.get(name, operation in _PLUS)

    @cached_property
    def _same_gradients(self) -> dict[str, bool]:
        """Whether the outputs' derivative by a parameter is that of the last sample for all samples."""
        outputs = self.outputs
        samples, names = len(outputs), list(self.matrices.values())
        if samples < 2 or torch.allclose(outputs[0], outputs[-1]):
            return {}
        pull = torch.zeros_like(outputs)
        pull[-1] = torch.cos(1.0 + torch.arange(pull[-1].numel(), device=pull.device)).reshape(pull[-1].shape)
        parameters = [self.parameters[name] for name in names]

        def gradients(of: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(outputs, parameters, of, retain_graph=True, allow_unused=True)

        try:
            one, all_of_them = gradients(pull), gradients(pull[-1:].expand_as(pull))
        except RuntimeError as error:  # a model may change in place what a gradient needs
            if out_of_memory(error):
                raise
            return {}
        return {
            name: a is None
            or b is None
            or bool(torch.allclose(a * samples, b, 1e-3, 1e-6 * float(b.abs().max())))
            for name, a, b in zip(names, one, all_of_them, strict=True)
        }


def _before(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _operation(node: Any) -> str:
    """A node's operation, as ``Mm`` of ``MmBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name())


def _leaves_first(root: Any) -> Iterable[Any]:
    """All nodes of a graph, each after those that it depends on."""
    done, left = set[Any](), [(root, False)]
    while left:
        node, opened = left.pop()
        if opened:
            yield node
        elif node not in done:
            done.add(node)
            left.append((node, True))
            left += [(child, False) for child in _before(node)]
