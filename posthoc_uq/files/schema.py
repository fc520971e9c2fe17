"""What saving and loading agree on: paths, number formats, fingerprint, admissible values."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError
from posthoc_uq.core.model import statistics_of, unwrap
from posthoc_uq.files.hdf5 import link_name
from posthoc_uq.files.state import PRIOR_MEAN, PRIOR_PRECISION
from posthoc_uq.posteriors.posterior import Posterior

CHECKPOINT = "checkpoint"  # the kind of a file that is no posterior yet

# Number formats by name: how torch holds them, and how the file does (bfloat16 as its bits).
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float64": (torch.float64, "<f8"),
    "float32": (torch.float32, "<f4"),
    "float16": (torch.float16, "<f2"),
    "bfloat16": (torch.bfloat16, "<u2"),
    "uint8": (torch.uint8, "|u1"),  # packed bits
}

TRAINED_MEAN = "trained_mean"  # the group of the trained means, which replace the model's own parameters

FEATURES = "features"  # the group of the statistics of the last layer's inputs


def layer_path(layer: str) -> str:
    """The group that describes a layer."""
    return f"layers/{link_name(layer)}"


def block_path(block: str) -> str:
    """The group of a block's tensors."""
    return f"blocks/{link_name(block)}"


def tensor_path(block: str, tensor: str) -> str:
    """The dataset of a block's tensor."""
    return f"{block_path(block)}/{link_name(tensor)}"


def trained_mean_path(parameter: str) -> str:
    """The dataset of a parameter of the trained mean."""
    return f"{TRAINED_MEAN}/{link_name(parameter)}"


PRIOR_GROUPS = (PRIOR_MEAN, PRIOR_PRECISION)  # of the priors of single weights


def prior_path(group: str, parameter: str) -> str:
    """The dataset of a parameter in one of the prior's two groups."""
    return f"{group}/{link_name(parameter)}"


def features_path(tensor: str) -> str:
    """The dataset of a tensor of the features."""
    return f"{FEATURES}/{link_name(tensor)}"


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 over the parameters in the order of their names, as hexadecimal digits.

    Each gives a line ``name dtype shape`` (``fc.weight float32 10,84``), then its numbers, row-major and
    little-endian.
    """
    digest = sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach().cpu().contiguous()
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{name} {dtype_name(tensor.dtype)} {shape}\n".encode(errors="surrogatepass"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def buffers_fingerprint(model: nn.Module) -> str | None:
    """The `fingerprint` of the buffers that a model's predictions depend on; None where it has none."""
    buffers = statistics_of(unwrap(model))
    return fingerprint(buffers) if buffers else None


def check_unchanged(posterior: Posterior) -> None:
    """Refuse a posterior whose model was trained further after the fit: ``posterior.original`` is the model's memory.

    Raises:
        PosteriorMismatchError: the parameters, or the buffers of its model, are not those of the fit.
    """
    if posterior.fingerprint is not None and fingerprint(posterior.original) != posterior.fingerprint:
        raise PosteriorMismatchError(
            "The model's parameters changed after the posterior was fitted or loaded; fit again, or give the model its "
            "parameters back."
        )
    if posterior.model is not None:
        check_buffers(posterior, posterior.model)


def check_buffers(posterior: Posterior, model: nn.Module) -> None:
    """Refuse a model with other buffers than that of the fit.

    Raises:
        PosteriorMismatchError: it has.
    """
    expected = posterior.buffers_fingerprint
    if expected is not None and buffers_fingerprint(model) != expected:
        raise PosteriorMismatchError(
            "The model's buffers, such as the running statistics of batch normalisation, are not those that the "
            "posterior was fitted on; load the whole state dict of that model (model.load_state_dict), or fit again."
        )
