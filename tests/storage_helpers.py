"""Models and posteriors with hand-made blocks of every kind, and changes of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq import Posterior
from posthoc_uq.files import header
from posthoc_uq.files.records import description_of
from posthoc_uq.layers import Layer, describe
from posthoc_uq.likelihoods import Categorical, Gaussian, Likelihood
from posthoc_uq.posteriors import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    Evidence,
    History,
    InformationBlock,
    KroneckerBlock,
)

# Records of a history

FAITHFUL: dict[str, Any] = {
    "head": "linearized",
    "value": 3.5,
    "temperature": 0.8,
    "network_temperature": 1.1,
    "divergence": 0.009,
    "budget": 0.01,
    "settings": {"residual_weight": 1.0, "noise_scale": 1.0, "scale": 40.0},
}
HELD_OUT: dict[str, Any] = {"values": [0.1, 0.5, 2.0], "count": 3}
PROMISES: dict[str, Any] = {
    "samples": 3,
    "seed": 0,
    "share": 0.5,
    "head": {"head": "sampling"},
    "posterior": {"scale": 1.0},
    "inputs": {"entropy": HELD_OUT, "joint": HELD_OUT},
    "tails": {"entropy": {"values": [2.0, 0.5, 0.1], "shares": [1 / 3, 2 / 3, 1.0]}},
    "wrong": {"entropy": [0, 1, 1], "joint": [0, 0, 1]},
}
_OF_ROWS: dict[str, Any] = {"samples": 20, "rows": 18, "initialisations": 3, "ridge": 0.1}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "classification": {"accuracy": 0.9, "temperature": 1.5, **_OF_ROWS},
    "regression": {"noise_variance": [0.5, 1.0, 2.0], "noise_scale": 1.2, **_OF_ROWS},
}
CALIBRATION: dict[str, Any] = {
    **{"alpha": 0.1, "beta": 1.0, "residual": 0.1, "before": 0.2, "n_mc": 10},
    "head": {"weights": "row"},
    "posterior": {"scale": 20.0},
}

KINDS = ["diag", "kfac", "efb", "inf", "full"]


def make_model(dtype: torch.dtype = torch.float32, width: int = 3, seed: int = 0) -> nn.Module:
    """Names with a dot, slash, percent sign, letters beyond ASCII; a grouped convolution; a bias missing."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Module()
        model.body = nn.ModuleDict(
            {
                "a/b": nn.Conv2d(2, 4, 2, groups=2),
                "50%2F": nn.Linear(4, width),
                "größe": nn.Linear(width, 2, bias=False),
            }
        )
    return model.to(dtype)


def layers_of(model: nn.Module) -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            prefix = f"{name}." if name else ""
            kind = "linear" if isinstance(module, nn.Linear) else "conv2d"
            bias = None if module.bias is None else (f"{prefix}bias", module.bias)
            weight = (f"{prefix}weight", module.weight)
            found[name] = describe(name, kind, weight, bias, getattr(module, "groups", 1))
    return found


def make_block(
    kind: str, shape: tuple[int, int, int], generator: torch.Generator, dtype: torch.dtype
) -> Block:
    groups, outputs, inputs = shape

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64).to(dtype)

    def basis(size: int, width: int) -> Tensor:
        normal = torch.randn(groups, size, width, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal).Q.to(dtype)

    if kind == "diag":
        return DiagonalBlock(rand(*shape))
    if kind == "kfac":
        values = rand(groups, inputs), rand(groups, outputs)
        return KroneckerBlock(basis(inputs, inputs), basis(outputs, outputs), *values)
    if kind == "efb":
        return EigenvalueCorrectedBlock(basis(inputs, inputs), basis(outputs, outputs), rand(*shape))
    width_a, width_g = min(2, inputs), min(2, outputs)
    eigenvalues = rand(groups, width_g, width_a)
    return InformationBlock(
        basis(inputs, width_a), basis(outputs, width_g), eigenvalues, rand(*shape), "rescale"
    )


def make(
    kind: str,
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    likelihood: Likelihood | None = None,
    fit: dict[str, object] | None = None,
) -> Posterior:
    generator = torch.Generator().manual_seed(1)
    layers = layers_of(model)
    if kind == "full":
        size = sum(layer.parameters for layer in layers.values())
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        blocks: dict[str, Block] = {"all": DenseBlock((root @ root.T / size).to(dtype))}
        members = {"all": list(layers)}
    else:
        blocks = {
            name: make_block(kind, layer.matrix_shape, generator, dtype) for name, layer in layers.items()
        }
        members = {name: [name] for name in layers}
    mean = {name: p.detach() for name, p in model.named_parameters()}
    history = History(
        fit or {"seed": 7, "rank": 2, "seconds": {"sweep": 0.25, "basis": 1.5}},
        {"norm.weight": "BatchNorm"},
        {"prior_precision": "by the log marginal likelihood"},
    )
    residuals = (
        (3.3, 100 * likelihood.noise_variance.numel()) if isinstance(likelihood, Gaussian) else (0.0, 0)
    )
    evidence = Evidence(100, -12.345678901234567, *residuals)
    posterior = Posterior(kind, layers, blocks, members, mean, likelihood or Categorical(), evidence, history)
    values = {"scale": 123.1, "residual_weight": 0.7, "noise_scale": 1.2, "temperature": 1.1}
    known: dict[str, Any] = {name: value for name, value in values.items() if name in posterior.tunable}
    by_layer = {name: 0.1 * (i + 1) for i, name in enumerate(layers)}
    return posterior.with_settings(prior_precision=by_layer, **known)


def tensors_of(posterior: Posterior) -> dict[str, Tensor]:
    return {f"{b}|{t}": x for b, block in posterior.blocks.items() for t, x in block.tensors().items()}


def plain(posterior: Posterior) -> dict[str, object]:
    return description_of(posterior).plain()


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def draw(posterior: Posterior) -> dict[str, Tensor]:
    return posterior.sample(3, torch.Generator().manual_seed(5))


def sealed(image: bytes, kind: str = "inf", number: int = header.FORMAT) -> bytes:
    """An image with a header that fits, as a stranger would make it."""
    sealed = bytearray(header.write_header(BytesIO(image), kind).getvalue())
    sealed[16:20] = number.to_bytes(4, "little")
    return bytes(sealed)


def kind_of(image: bytes) -> str:
    """The kind that a file's header names."""
    return image[60:124].rstrip(b"\0").decode()


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a file through h5py and make its header fit again."""
    with h5py.File(path, "r+") as file:
        change(file)
    data = path.read_bytes()
    path.write_bytes(sealed(data, kind_of(data)))


def edit_state(path: Path, change: Callable[[dict], None]) -> None:
    def apply(file: h5py.File) -> None:
        state = json.loads(file["state"][()])
        change(state)
        del file["state"]
        file.create_dataset("state", data=np.bytes_(json.dumps(state).encode()))

    edit(path, apply)


def mutations(data: bytes, count: int, first: int, generator: np.random.Generator) -> list[bytes]:
    """Files with 1 to 32 bytes changed from `first` on, or the tail cut."""
    found: list[bytes] = []
    while len(found) < count:
        changed = bytearray(data)
        if generator.random() < 0.2:
            changed = changed[: int(generator.integers(first, len(data)))]
        else:
            for place in generator.integers(first, len(data), int(generator.integers(1, 33))):
                changed[place] = int(generator.integers(256))
        if bytes(changed) != data:
            found.append(bytes(changed))
    return found
