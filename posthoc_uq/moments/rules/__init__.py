"""The table of rules: importing this package fills it. One file a kind of function."""

from posthoc_uq.moments.rules import elementwise, layers, norms, pooling, scatter, shape

__all__ = ["elementwise", "layers", "norms", "pooling", "scatter", "shape"]
