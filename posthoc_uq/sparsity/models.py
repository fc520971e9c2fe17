"""The median probability model as a plain module, with zeros or in compressed rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.replica import replicate, unwrap
from posthoc_uq.sparsity.median import median_means
from posthoc_uq.values import one_of
from posthoc_uq.wrapping import check_match

Layout = Literal["auto", "masked", "csr"]

SPARSE = 0.1
"""The largest density at which ``"auto"`` stores a layer in compressed rows."""


class SparseLinear(nn.Module):
    """A linear layer whose weight is kept in compressed rows, for inference.

    Args:
        weight: ``(outputs, inputs)``; its zeros are not stored.
        bias: ``(outputs,)`` or None.
    """

    crow_indices: Tensor
    col_indices: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with warnings.catch_warnings():  # torch says once that these tensors are new
            warnings.simplefilter("ignore")
            rows = weight.detach().to_sparse_csr()
        self.register_buffer("crow_indices", rows.crow_indices())
        self.register_buffer("col_indices", rows.col_indices())
        self.register_buffer("values", rows.values())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def matrix(self) -> Tensor:
        """The weight as a ``torch.sparse_csr`` tensor."""
        size = (self.out_features, self.in_features)
        return torch.sparse_csr_tensor(
            self.crow_indices, self.col_indices, self.values, size, check_invariants=False
        )

    @property
    def weight(self) -> Tensor:
        """The weight with its zeros, for code that reads it."""
        return self.matrix.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """``(*, inputs)`` to ``(*, outputs)``."""
        with torch.autocast(input.device.type, enabled=False):  # torch has no such product in half precision
            rows = input.reshape(-1, self.in_features).to(self.values)
            outputs = (self.matrix @ rows.t()).t() if len(rows) else rows.new_zeros(0, self.out_features)
            outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kept = self.values.numel()
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={kept}"


def sparse_model(model: nn.Module, posterior: Posterior, layout: Layout = "auto") -> nn.Module:
    """A copy of `model` with the means of the median probability model (see `sparse_state_dict`), in eval mode.

    It has no uncertainty and needs nothing of this package's heads; its outputs are those of
    ``wrap(model, median_model(posterior, certain=True))`` before the link. Convolutions always keep their zeros, and so
    do linear layers of a class of their own or with hooks.

    Args:
        model: the model that the posterior was fitted on.
        posterior: by ``method="latent_binary"``.
        layout: ``"masked"`` keeps every layer as it is, with zeros, for `torch.export` and training tools. ``"csr"``
            computes all `torch.nn.Linear` layers with ``torch.sparse_csr`` tensors. ``"auto"`` does so for those where
            at most a tenth of the weights is kept.

    Raises:
        PosthocUQError: the posterior is of another method, or the layout is unknown.
        PosteriorMismatchError: the model is not the one that the posterior was fitted on.
    """
    means = median_means(posterior, "sparse_model")
    one_of("layout", layout, get_args(Layout))
    check_match(model, posterior)
    parameters = dict(unwrap(model).named_parameters())
    values = {name: means.get(name, parameter).detach().clone() for name, parameter in parameters.items()}
    twin = replicate(model, values)
    if layout == "masked":
        return twin
    held = dict(twin.named_parameters())
    linear = [layer.weight for layer in posterior.layers.values() if layer.kind == "linear"]
    chosen = {id(held[name]) for name in linear if layout == "csr" or _is_sparse(values[name])}
    if _replaceable(twin, chosen):
        return _compressed(cast(nn.Linear, twin)).eval()
    replaced: dict[int, SparseLinear] = {}  # a module in two places stays one
    for parent, name, child in list(_children(twin)):
        if _replaceable(child, chosen):
            parent.register_module(
                name, replaced.setdefault(id(child), _compressed(cast(nn.Linear, child)).eval())
            )
    return twin


def _is_sparse(weight: Tensor) -> bool:
    """Whether compressed rows are worth it, on a device that has them."""
    return weight.device.type in ("cpu", "cuda") and float((weight != 0).float().mean()) <= SPARSE


def _compressed(linear: nn.Linear) -> SparseLinear:
    return SparseLinear(linear.weight, linear.bias)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():  # pyright: ignore[reportPrivateUsage]
            # named_children() would name a shared one once
            if child is not None:
                yield parent, name, child


def _replaceable(module: nn.Module, weights: set[int]) -> bool:
    """Whether a module is a linear layer with one of these weights, and nothing beside."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    plain = type(module) is nn.Linear and not any(getattr(module, name) for name in hooks)
    return plain and id(cast(nn.Linear, module).weight) in weights
