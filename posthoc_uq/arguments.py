"""What a model was called with, in words, for the error of a model that cannot be run on it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.loaders import Batch, is_array
from posthoc_uq.randomness import isolated_random_state

CALL = "Pass what model(...) itself takes, with the samples along the first dimension."
LOADER = (
    "A batch is a tensor of inputs, (inputs, targets) or a mapping of the model's named arguments; batch_to_inputs= "
    "takes any other apart."
)


@contextmanager
def explained(
    network: Callable[[], nn.Module], batch: Batch, what: str = "these inputs", way_out: str = CALL
) -> Generator[None]:
    """Say what the model was called with where the body fails because the model cannot be run on it.

    That is found out by one plain run of the model, after the body has failed. Where the model itself runs, the body's
    error is passed on as it is.

    Args:
        network: gives the model, or a copy of it, to be run without gradients.
        batch: the arguments.
        what: the batch, in words.
        way_out: what to do where types and kinds of the arguments are right.

    Raises:
        PosthocUQError: the model cannot be run on the batch, or its outputs do not count the samples; says the shapes,
            the types and the way out.
    """
    try:
        yield
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if not isinstance(error, PosthocUQError) or isinstance(error, UnsupportedLayerError):
            _check_run(network(), batch, what, way_out)
        raise


def _check_run(network: nn.Module, batch: Batch, what: str, way_out: str) -> None:
    try:
        with torch.inference_mode(False), torch.no_grad(), isolated_random_state():
            outputs = batch.copied().call_any(network)
    except (MemoryError, torch.cuda.OutOfMemoryError):
        return
    except Exception as error:  # a model may raise anything
        own = next(iter(str(error).splitlines()), "").rstrip(".")
        raise PosthocUQError(
            f"The model cannot be run on {what}, {described(batch)}. {_advice(network, batch) or way_out} "
            f"The model's own error is {type(error).__name__}: {own}."
        ) from error
    samples = next((tensor.shape[0] for tensor in batch.tensors() if tensor.ndim > 0), None)
    if isinstance(outputs, Tensor) and samples is not None and outputs.shape[:1] != (samples,):
        raise PosthocUQError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for {what}, {described(batch)}; the first "
            f"dimension of both must count the samples. Of one sample, pass x.unsqueeze(0)."
        )


def described(batch: Batch) -> str:
    """Type and shape of every argument of a model, such as ``float32 (8, 3, 32, 32)``."""
    named = [f"{name}={_kind(value)}" for name, value in batch.kwargs.items()]
    return ", ".join([*map(_kind, batch.args), *named]) or "no argument"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)} {tuple(value.shape)}"
    if is_array(value):
        return f"{type(value).__name__} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _advice(network: nn.Module, batch: Batch) -> str:
    """What to do where the kind of the arguments, or their type, is not that of the model's weights."""
    own = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    given = [value.dtype for value in batch.tensors()]
    if any(is_array(value) for value in (*batch.args, *batch.kwargs.values())):
        return f"Pass tensors: torch.as_tensor(x, dtype={own})."
    if any(dtype.is_floating_point and dtype != own for dtype in given):
        return f"Its weights are {_short(own)}: pass x.to({own})."
    if given and not any(dtype.is_floating_point for dtype in given):
        return f"Its weights are {_short(own)}: pass x.to({own}), unless the model takes integers."
    return ""
