"""NumPy arrays, and frames and series of pandas, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, or a pandas frame or series."""
    return isinstance(value, np.ndarray) or (hasattr(value, "to_numpy") and hasattr(value, "shape"))


def with_tensors(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with arrays turned into tensors, those of floating-point numbers of type `dtype`, also inside of a
    tuple or a mapping.
    """
    if isinstance(inputs, Mapping):
        return {name: with_tensors(value, dtype) for name, value in cast(Mapping[str, Any], inputs).items()}
    if isinstance(inputs, tuple):
        return tuple(with_tensors(value, dtype) for value in cast(tuple[Any, ...], inputs))
    if not is_array(inputs):
        return inputs
    tensor = tensor_of(inputs)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tensor_of(array: Any) -> Tensor:
    """The array as a tensor; a copy, since torch can only share memory that it may write to."""
    numbers = np.asarray(array)
    try:
        return torch.tensor(numbers, device="cpu").contiguous()
    except (TypeError, ValueError) as error:
        raise PosthocUQError(
            f"The loader yields a {type(array).__name__} of {numbers.dtype} {numbers.shape}, which torch has no type "
            f"for; make all of it numbers, such as array.astype('float32')."
        ) from error
