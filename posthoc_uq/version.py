"""The version of this package: the one place that says it."""

__version__ = "0.3.0.dev0"
