"""Checks of the inputs of metrics, and their conversion to float64 on the CPU."""

from __future__ import annotations

from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError


def plain(tensor: Tensor) -> Tensor:
    """The values in float64 on the CPU, without a graph."""
    return tensor.detach().cpu().double()


def classified(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`probs` (inputs, classes) in float64 and `labels` (inputs,) in int64.

    Raises:
        PosthocUQError: shapes that do not fit, values that are no probabilities, labels that are no classes.
        NonFiniteError: a probability is NaN.
    """
    if probs.ndim != 2 or probs.shape[0] == 0 or probs.shape[1] == 0:
        raise PosthocUQError(
            f"probs must be (inputs, classes) with at least one input, not {tuple(probs.shape)}."
        )
    if labels.shape != probs.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise PosthocUQError(
            f"labels must be {probs.shape[0]} integers of shape ({probs.shape[0]},), "
            f"not {labels.dtype} of shape {tuple(labels.shape)}."
        )
    labels = labels.detach().cpu().long()
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise PosthocUQError(
            f"labels must lie between 0 and {probs.shape[1] - 1}, "
            f"but range from {int(labels.min())} to {int(labels.max())}."
        )
    probs = plain(probs)
    refuse_nan(probs=probs)
    # half precision rounds by less than 0.01
    if float(probs.min()) < -0.01 or float(probs.max()) > 1.01:
        raise PosthocUQError(
            f"probs must lie between 0 and 1, but range from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}; of logits, take softmax(dim=-1) first."
        )
    return probs, labels


def row(name: str, tensor: Tensor, inputs: int | None = None) -> Tensor:
    """One number per input, in float64.

    Raises:
        PosthocUQError: not one-dimensional, empty, or not of `inputs` entries.
        NonFiniteError: an entry is NaN.
    """
    if tensor.ndim != 1 or tensor.numel() == 0:
        raise PosthocUQError(f"{name} must be (inputs,) with at least one input, not {tuple(tensor.shape)}.")
    if inputs is not None and len(tensor) != inputs:
        raise PosthocUQError(f"{name} must hold one number for each of {inputs} inputs, not {len(tensor)}.")
    values = plain(tensor)
    refuse_nan(**{name: values})
    return values


def same_shape(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64, after making sure that nothing would broadcast.

    Raises:
        PosthocUQError: shapes that differ, or nothing in them.
        NonFiniteError: an entry is NaN.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise PosthocUQError(f"The shapes must be the same: {listed}.")
    if 0 in next(iter(shapes.values())):
        raise PosthocUQError("A metric needs at least one target.")
    values = {name: plain(tensor) for name, tensor in tensors.items()}
    refuse_nan(**values)
    return tuple(values.values())


def refuse_nan(**tensors: Tensor) -> None:
    """Refuse NaN.

    Raises:
        NonFiniteError: one of the tensors holds a NaN.
    """
    for name, tensor in tensors.items():
        wrong = int(tensor.isnan().sum())
        if wrong:
            raise NonFiniteError(f"{name} holds {wrong} NaN among {tensor.numel()} numbers; leave them out.")
