"""Graphs of torch_geometric, which no slice along the first dimension parts: each is a sample as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from typing import Any

from torch import Tensor


def is_graph(value: Any) -> bool:
    """Whether a value is a graph of torch_geometric, or several as one."""
    return (
        hasattr(value, "edge_index") and callable(getattr(value, "apply", None)) and hasattr(value, "to_dict")
    )


def single_graphs(graphs: Any) -> Iterator[Any]:
    """The graphs of a batch, each as a batch of its own; a graph that is no batch as it is."""
    if not hasattr(graphs, "to_data_list"):
        yield graphs
        return
    batch: Any = import_module("torch_geometric.data").Batch
    for graph in graphs.to_data_list():
        yield batch.from_data_list([graph])


def tensors_of_graph(graph: Any) -> list[Tensor]:
    """All tensors of a graph, in the order of their names."""
    found = graph.to_dict()
    return [found[name] for name in sorted(found) if isinstance(found[name], Tensor)]


def changed_graph(graph: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same graph with all of its tensors changed."""
    return copy.copy(graph).apply(change)


def arguments_of_graph(graph: Any, names: Collection[str] | None) -> Any:
    """The inputs in a graph: the model's named arguments, or else the graph itself, which a model takes whole.

    Args:
        graph: one.
        names: of the model's arguments, the first one first; None where it takes any.
    """
    known = set(graph.keys())
    if not names or next(iter(names)) not in known:
        return graph
    return {name: graph[name] for name in names if name in known}
