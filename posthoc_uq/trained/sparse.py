"""Sparse networks from a posterior by ``method="latent_binary"``: which weights are on, and the network that they make.

The median probability model keeps the weights whose inclusion is above one half. Where inclusions are independent and
the model is linear with orthogonal inputs, it is the single best model for prediction (Barbieri, Berger 2004, "Optimal
predictive model selection").
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard, cast, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import parameter_names, replicate, unwrap, with_plain_weights
from posthoc_uq.core.options import check_option, one_of
from posthoc_uq.core.tables import text_table
from posthoc_uq.files import check_match
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.history import HeadRecord
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.trained.variational import LatentBlock, median_of

__all__ = ["LayerSummary", "SparseLinear", "Summary", "median", "model", "state_dict", "summary"]

SparseLayout = Literal["auto", "masked", "csr"]
MEDIAN, CERTAIN = "median model", "median model, certain"  # in the history of a posterior
_COMPRESSED = 0.1  # the largest density at which "auto" stores a layer in compressed rows
_UNDECIDED = (0.1, 0.9)


def _latent_blocks(posterior: Any, what: str) -> dict[str, LatentBlock]:
    """The blocks by the names of their layers.

    Raises:
        PosthocUQError: all weights of the posterior are on.
    """
    if not isinstance(posterior, Posterior):
        raise PosthocUQError(
            f"{what} takes a posterior from uq.fit or uq.load, not a {type(posterior).__name__}."
        )
    blocks = {name: block for name, block in posterior.blocks.items() if isinstance(block, LatentBlock)}
    if len(blocks) < len(posterior.blocks) or not blocks:
        raise PosthocUQError(
            f"{what} is about weights that may be off, and all weights of a posterior by method={posterior.method!r} "
            f"are on; fit one with method=uq.LatentBinary()."
        )
    return blocks


# Which weights are on


@dataclass(frozen=True)
class LayerSummary:
    """The inclusion probabilities of one layer's weights; biases have none.

    Inputs and outputs are units: numbers of a linear layer, channels of a convolution. A unit is on if at least one of
    its weights is, ``1 - prod(1 - a)``. That grows with the number of weights: of 400 weights that are on with
    probability 0.01 each, one is with 0.98. So it selects inputs where a layer has few outputs, as a regression has;
    of a wide layer, see `kept_inputs` too.

    Attributes:
        parameter: the name of its weight.
        weights: the probability of every weight, in its shape.
        inputs: of every input unit, ``(inputs,)``, float64.
        outputs: of every output unit, ``(outputs,)``, float64.
        kept_inputs: which input units have a weight in the median model, ``(inputs,)``.
        kept: the number of weights with an inclusion above 0.5, which the median model keeps.
        expected: the mean inclusion.
        undecided: the share of the inclusions between 0.1 and 0.9.
    """

    parameter: str
    weights: Tensor
    inputs: Tensor
    outputs: Tensor
    kept_inputs: Tensor
    kept: int
    expected: float
    undecided: float

    @property
    def density(self) -> float:
        """The share of the weights that the median model keeps."""
        return self.kept / self.weights.numel()

    @property
    def selected(self) -> Tensor:
        """Which input units are more likely on than off, ``(inputs,)``."""
        return self.inputs > 0.5


@dataclass(frozen=True)
class Summary:
    """How many weights and inputs are on, by layer; prints as a table.

    Attributes:
        layers: by name, in the model's order.
    """

    layers: dict[str, LayerSummary]

    @property
    def first(self) -> LayerSummary:
        """The first layer; its `selected` inputs are those that the network needs."""
        return next(iter(self.layers.values()))

    @property
    def kept(self) -> int:
        """The number of weights in the median model."""
        return sum(layer.kept for layer in self.layers.values())

    @property
    def density(self) -> float:
        """The share of all weights that the median model keeps."""
        return self.kept / sum(layer.weights.numel() for layer in self.layers.values())

    def __str__(self) -> str:
        rows = [
            {
                "layer": name,
                "weights": layer.weights.numel(),
                "kept": layer.kept,
                "density": layer.density,
                "expected": layer.expected,
                "undecided": layer.undecided,
                "inputs": len(layer.inputs),
                "selected": int(layer.selected.sum()),
                "kept inputs": int(layer.kept_inputs.sum()),
            }
            for name, layer in self.layers.items()
        ]
        notes = (
            f"{self.kept} weights kept, a share of {self.density:.4g}; biases are not counted",
            "  density: share of the weights with an inclusion above 0.5, which the median model keeps",
            "  expected: mean inclusion; undecided: share of the inclusions between 0.1 and 0.9",
            "  selected: inputs of which at least one weight is on with probability above 0.5",
        )
        return "\n".join([text_table([*rows[0]], [[*row.values()] for row in rows]), *notes])


def summary(posterior: Posterior) -> Summary:
    """How many weights are on, layer by layer, and with which probability weights, inputs and filters are.

    Args:
        posterior: by ``method="latent_binary"``; of a median model all probabilities are 0 or 1.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    blocks = _latent_blocks(posterior, "summary")
    return Summary({name: _of_layer(layer, blocks[name]) for name, layer in posterior.layers.items()})


def _of_layer(layer: Layer, block: LatentBlock) -> LayerSummary:
    matrix = block.probabilities()  # (groups, outputs, inputs), without the bias column
    units = layer.channels
    chances = matrix.reshape(*matrix.shape[:2], units, -1)  # the last: positions of the kernel
    low, high = _UNDECIDED
    return LayerSummary(
        layer.weight,
        layer.to_parameters(block.inclusions())[layer.weight].clone(),
        _any_of(chances, (1, 3)).flatten(),
        _any_of(chances, (2, 3)).flatten(),
        (chances > 0.5).any(3).any(1).flatten(),
        int((matrix > 0.5).sum()),
        float(as_double(matrix).mean()),
        float(((matrix > low) & (matrix < high)).float().mean()),
    )


def _any_of(chances: Tensor, sides: tuple[int, ...]) -> Tensor:
    """The probability that at least one of several independent events happens, ``1 - prod(1 - a)``, float64."""
    return -torch.expm1(torch.log1p(-as_double(chances)).sum(sides))


# The median model


def median(posterior: Posterior, certain: bool = False) -> Posterior:
    """The median probability model: the weights whose inclusion is above one half, on for certain; all others are zero.

    It is a posterior like any other, with the hyperparameters of the full one; tune a temperature again on held-out
    data. What was measured on predictions of the full posterior is cleared: the calibration of the moments head, and
    promises.

    Args:
        posterior: by ``method="latent_binary"``, or such a median model.
        certain: leave out the variances, and put the mean of the flow's ``z`` in its place: one sparse network, which
            predicts in one pass.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    blocks, certain = _latent_blocks(posterior, "median"), check_option("certain", certain, bool)
    history = replace(posterior.history, calibration=None, promises=None, faithful=None, trials=None)
    history = history.noted(fit={MEDIAN: "weights of inclusion above 0.5"})
    if certain or history.fit.get(CERTAIN):  # all draws are the same
        head = HeadRecord(name="sampling", options={"n_samples": 1}, criterion="given")
        history = replace(history.noted(fit={CERTAIN: True}), head=head)
    medians = {name: median_of(block, certain=certain) for name, block in blocks.items()}
    return posterior.with_blocks(medians, history=history).replaced(features=posterior.features)


def state_dict(posterior: Posterior) -> dict[str, Any]:
    """The state dict of the median model's means, for the original model's ``load_state_dict``; where torch computes
    its weights, as weight norm does, for that of the same model without.

    A kept weight is the mean of its slab, times that of ``z`` with a flow; all other weights of the layers with a
    posterior are 0, biases are their means, and what has no posterior is the model's own. All tensors are copies.

    Args:
        posterior: by ``method="latent_binary"``.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    means = median(posterior, certain=True).trained_mean
    original = unwrap(cast(nn.Module, posterior.model))
    names = parameter_names(original)  # a tied parameter has one name, and several keys

    def value(key: str, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        return means.get(names.get(id(given), key), given).detach().clone()

    return {key: value(key, given) for key, given in original.state_dict(keep_vars=True).items()}


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


def model(model: nn.Module, posterior: Posterior, layout: SparseLayout = "auto") -> nn.Module:
    """A copy of `model` with the means of the median probability model (see `state_dict`), in eval mode.

    It has no uncertainty and needs nothing of this package's heads; its outputs are those of
    ``wrap(model, median(posterior, certain=True))`` before the link. Convolutions always keep their zeros, and so do
    linear layers of a class of their own or with hooks. Batch normalisation keeps the statistics of the full network;
    ``torch.optim.swa_utils.update_bn(loader, sparse)`` estimates them anew, which after a training of few epochs can be
    far worse.

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
    means = median(posterior, certain=True).trained_mean
    one_of("layout", layout, get_args(SparseLayout))
    check_match(model, posterior)
    plain = with_plain_weights(unwrap(model))
    parameters = dict(plain.named_parameters())
    values = {name: means.get(name, parameter).detach().clone() for name, parameter in parameters.items()}
    twin = replicate(plain, values)
    if layout == "masked":
        return twin
    held = dict(twin.named_parameters())
    linear = [layer.weight for layer in posterior.layers.values() if layer.kind == "linear"]
    chosen = {id(held[name]) for name in linear if layout == "csr" or _is_sparse(values[name])}
    if _replaceable(twin, chosen):
        return SparseLinear(twin.weight, twin.bias).eval()
    replaced: dict[nn.Module, SparseLinear] = {}  # a module in two places stays one
    for parent in list(twin.modules()):
        # named_children() would name a shared one once
        for name, child in parent._modules.items():  # pyright: ignore[reportPrivateUsage]
            if child is not None and _replaceable(child, chosen):
                if child not in replaced:
                    replaced[child] = SparseLinear(child.weight, child.bias).eval()
                parent.register_module(name, replaced[child])
    return twin


def _is_sparse(weight: Tensor) -> bool:
    """Whether compressed rows are worth it, on a device that has them."""
    return weight.device.type in ("cpu", "cuda") and float((weight != 0).float().mean()) <= _COMPRESSED


def _replaceable(module: nn.Module, weights: set[int]) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer with one of these weights, and nothing beside."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    plain = type(module) is nn.Linear and not any(getattr(module, name) for name in hooks)
    return plain and id(cast(nn.Linear, module).weight) in weights
