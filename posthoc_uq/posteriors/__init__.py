"""The posterior over a model's weights: blocks, hyperparameters, what it remembers, its state as plain values.

The files of blocks are imported here, so that every kind is registered before a posterior is read or made.
"""

from posthoc_uq.posteriors import (
    dense,
    diagonal,
    information,
    kronecker,
    latent_binary,
    mean_field,
    median_model,
    messages,
    subnetwork,
)

__all__ = [
    "dense",
    "diagonal",
    "information",
    "kronecker",
    "latent_binary",
    "mean_field",
    "median_model",
    "messages",
    "subnetwork",
]
