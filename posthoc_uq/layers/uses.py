"""Where weights enter a pass, by autograd's graph: which of them come last, and which multiply what others gave.

A layer's call shows its weight. A weight that the model's code computes from a parameter (normalised, standardised, as
prototypes that inputs are compared with) shows in the graph alone: it is where what depends on the parameter and not on
the inputs meets what does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    """The uses of a model's weights in one pass whose inputs are part of the graph, so that it shows where a weight
    that is used in no layer's call meets what depends on them.

    Args:
        model: a copy of it is run.
        batch: its inputs.
    """

    def found() -> Uses:
        return WatchedPass(replicate(model), batch.differentiable()).uses()

    def plainly() -> Uses:
        return WatchedPass(replicate(model), batch.copied()).uses()

    try:
        return found()
    except Exception as error:  # the model's code may take no inputs that are part of a graph
        check_refused(error, found, plainly)
        return plainly()


@dataclass(frozen=True)
class WeightUse:
    """One call that applies a weight.

    Attributes:
        call: with the weight and what it is applied to.
        input_version: how often that had been written in place.
        output: of the call.
        output_version: likewise.
        node: of the output, in the graph.
    """

    call: AffineCall
    input_version: int
    output: Tensor
    output_version: int
    node: Any


class WatchedPass:
    """One pass with its graph, in which the calls that apply weights are seen.

    Attributes:
        twin: the copy of a model that ran; its parameters require gradients.
        names: of its parameters, by identity.
        seen: the uses of every weight, by its identity, in the order of the last ones; of a weight that a layer shares
            with an embedding those of the layer.
        outputs: of the model.
        called: the weights of layers' calls that lead to the outputs, by name, where they are matrices.
        complete: whether all matrices that lead to the outputs are used in such calls, or looked up. Then the graph
            shows all that `uses` asks for, also where the inputs are no part of it.
    """

    def __init__(self, twin: nn.Module, batch: Batch) -> None:
        """
        Args:
            twin: a copy of a model.
            batch: its inputs, for this run alone.
        """
        self.twin = twin.requires_grad_(True)
        self.names = parameter_names(self.twin)
        self.seen: dict[int, list[WeightUse]] = {}
        self._lookups: set[Any] = set()  # nodes of rows of embeddings

        def note(call: AffineCall, output: Tensor) -> None:
            key, lookup = id(call.parameter), call.kind == Lookup.kind
            if lookup:
                self._lookups.add(output.grad_fn)
            uses = self.seen.get(key, [])
            if uses and lookup != (uses[0].call.kind == Lookup.kind):
                if lookup:
                    return  # the weight of another layer, which has the posterior
                uses = []
            self.seen.pop(key, None)
            use = WeightUse(call, call.input._version, output, output._version, output.grad_fn)
            self.seen[key] = [*uses, use]

        with torch.enable_grad(), CallWatcher(set(self.names), note):
            self.outputs = batch.call(self.twin)
        self._matrices = {self.names[id(p)]: p for p in self.twin.parameters() if p.ndim >= 2 and p.numel()}
        self._order = list(_leaves_first(self.outputs.grad_fn)) if self.outputs.requires_grad else []
        reached = set(self._order)
        # by the node of a layer's outputs, its weight
        self._calls = {
            use.node: self.names[key]
            for key, uses in self.seen.items()
            for use in uses
            if use.node in reached and use.call.kind != Lookup.kind and RULES[use.call.kind].matrices
            if self.names[key] in self._matrices
        }
        for node in self._products_of_weights():
            del self._calls[node]
        self.called = set(self._calls.values())
        loose = {id(p) for name, p in self._matrices.items() if name not in self.called}
        nodes = [node for node in self._order if node not in self._calls and node not in self._lookups]
        self.complete = not any(id(leaf) in loose for node in nodes for leaf in map(_variable, _before(node)))

    def uses(self) -> Uses:
        """What the graph says."""
        if not self._order:
            return Uses()
        joins = {} if self.complete else self._joins()
        for node in [node for node in joins if _operation(node) in _SUMS]:
            joins[node] = {name for name in joins[node] if not self._is_offset(name, _operation(node))}
        factors = {
            name
            for node, several in joins.items()
            for name in several
            if _operation(node) in _PRODUCTS or node is self._order[-1]
        }
        last = set[str]()
        for node in self._last_uses(joins):
            last |= {self._calls[node]} if node in self._calls else joins[node]
        factors |= {name for name in last - self.called if is_matrix(self._matrices[name])}
        return Uses(frozenset(last & (self.called | factors)), frozenset(factors))

    def _products_of_weights(self) -> list[Any]:
        """The nodes of calls that apply a weight to what is computed from other weights alone."""
        found: list[Any] = []
        certain: dict[Any, bool] = {}  # nothing that it is computed from can be an input
        for node in self._order:
            variable = _variable(node)
            if variable is not None:
                certain[node] = isinstance(variable, nn.Parameter)
                continue
            several = [child for child, _ in node.next_functions]
            alone = all(child is not None and certain[child] for child in several)
            certain[node] = alone and bool(several) and node not in self._lookups
            if node in self._calls and certain[node]:
                found.append(node)
        return found

    def _joins(self) -> dict[Any, set[str]]:
        """Where weights that are used in no layer's call meet what depends on the inputs; the end, where nothing in the
        graph does.
        """
        depends: dict[Any, bool] = {}  # on the inputs
        weights: dict[Any, set[str]] = {}
        joins: dict[Any, set[str]] = {}
        names, root = {id(p): name for name, p in self._matrices.items()}, self._order[-1]
        for node in self._order:
            before, variable = _before(node), _variable(node)
            if variable is not None:
                name = names.get(id(variable), "")
                depends[node] = not isinstance(variable, nn.Parameter)
                weights[node] = {name}.difference(self.called, [""])
                continue
            own = {name for child in before if not depends[child] for name in weights[child]}
            of_layer = node in self._calls or node in self._lookups
            depends[node] = of_layer or any(depends[child] for child in before)
            weights[node] = set() if depends[node] else own
            if own and depends[node] and not of_layer:
                joins[node] = own
        if weights[root]:
            joins[root] = weights[root]
        return joins

    def _last_uses(self, joins: Mapping[Any, set[str]]) -> list[Any]:
        """The nodes of uses from which no way to the outputs leads through another use."""
        # nodes that reach the outputs without another use, or through one
        directly, after = {self._order[-1]}, set[Any]()
        found: list[Any] = []
        for node in reversed(self._order):
            used = node in self._calls or bool(joins.get(node))
            if used and node in directly and node not in after:
                found.append(node)
            # what is added changes nothing of what it is added to
            through = used and (node in self._calls or _operation(node) not in _PLUS)
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
        samples, names = len(outputs), list(self._matrices)
        if samples < 2 or torch.allclose(outputs[0], outputs[-1]):
            return {}
        pull = torch.zeros_like(outputs)
        pull[-1] = torch.cos(1.0 + torch.arange(pull[-1].numel(), device=pull.device)).reshape(pull[-1].shape)
        parameters = list(self._matrices.values())

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


def _variable(node: Any) -> Tensor | None:
    """The tensor that a leaf of the graph stands for."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


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
