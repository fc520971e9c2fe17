"""The posterior over a model's weights: blocks, hyperparameters, what it remembers.

The files of blocks are imported here, so that every kind is registered before a posterior is read or made.
"""

from posthoc_uq.posteriors import information, laplace, messages, variational

__all__ = ["information", "laplace", "messages", "variational"]
