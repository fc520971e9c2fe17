"""Small blocks with known statistics, and their precisions as dense matrices written from the definitions."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from posthoc_uq import Posterior
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.methods.inf import sparsify
from posthoc_uq.posteriors import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    Evidence,
    InformationBlock,
    KroneckerBlock,
)

GROUPS, OUTPUTS, INPUTS = 2, 7, 9
SCALE, TAU = 50.0, 1.3


def random_gradients(
    groups: int = GROUPS, m: int = OUTPUTS, n: int = INPUTS, samples: int = 40, seed: int = 0
) -> torch.Tensor:
    """Per-sample gradients ``(samples, groups, m, n)`` of rank two each, so that no Kronecker form is exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, g = draw(samples, groups, 2, n), draw(samples, groups, 2, m)
    a = a * torch.linspace(2, 0.2, n, dtype=torch.float64)
    g[..., -1] = 0  # an output without gradient: zero eigenvalues
    return torch.einsum("sgtm,sgtn->sgmn", g, a)


def statistics(gradients: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fisher blocks, Grams (any positive definite ones do), bases, eigenvalues and diagonal, by loops."""
    samples, groups, m, n = gradients.shape
    out: dict[str, list[torch.Tensor]] = {k: [] for k in ("fisher", "ua", "ug", "sa", "sg", "lam", "d")}
    for group in range(groups):
        rows = gradients[:, group].reshape(samples, -1)
        fisher = sum(torch.outer(r, r) for r in rows) / samples
        a_gram = sum(g.T @ g for g in gradients[:, group]) / samples
        g_gram = sum(g @ g.T for g in gradients[:, group]) / samples
        sa, ua = torch.linalg.eigh(a_gram)
        sg, ug = torch.linalg.eigh(g_gram)
        sa, ua, sg, ug = sa.flip(0).clamp(min=0), ua.flip(1), sg.flip(0).clamp(min=0), ug.flip(1)
        lam = torch.zeros(m, n, dtype=torch.float64)
        for i in range(m):
            for j in range(n):
                vector = torch.outer(ug[:, i], ua[:, j]).flatten()
                lam[i, j] = vector @ fisher @ vector
        for key, value in zip(
            out, (fisher, ua, ug, sa, sg, lam.clamp(min=0), fisher.diagonal().reshape(m, n)), strict=True
        ):
            out[key].append(value)
    return {key: torch.stack(values) for key, values in out.items()}


def build(kind: str, stats: dict[str, torch.Tensor], rank: float = 12, correction: str = "rescale") -> Block:
    """A block of that kind from the statistics."""
    if kind == "diagonal":
        return DiagonalBlock(stats["d"])
    if kind == "kfac":
        return KroneckerBlock(stats["ua"], stats["ug"], stats["sa"], stats["sg"])
    if kind == "efb":
        return EigenvalueCorrectedBlock(stats["ua"], stats["ug"], stats["lam"])
    if kind == "dense":
        return DenseBlock(torch.block_diag(*stats["fisher"]))
    return sparsify(stats["ua"], stats["ug"], stats["lam"], stats["d"], rank, correction)


def dense_fisher(kind: str, block: Block, stats: dict[str, torch.Tensor], omega: float) -> torch.Tensor:
    """The block's Fisher approximation, ``(groups, m n, m n)`` row-major, entry by entry from the definition."""
    groups, m, n = stats["d"].shape
    size = m * n
    fisher = torch.zeros(groups, size, size, dtype=torch.float64)
    for b in range(groups):
        if kind == "diagonal":
            fisher[b] = stats["d"][b].flatten().diag()
        elif kind == "kfac":
            a_gram = stats["ua"][b] @ stats["sa"][b].diag() @ stats["ua"][b].T
            g_gram = stats["ug"][b] @ stats["sg"][b].diag() @ stats["ug"][b].T
            fisher[b] = torch.kron(g_gram, a_gram)
        elif kind == "efb":
            vectors = torch.kron(stats["ug"][b], stats["ua"][b])
            fisher[b] = vectors @ stats["lam"][b].flatten().diag() @ vectors.T
        elif kind == "dense":
            fisher[b] = stats["fisher"][b]
        else:
            assert isinstance(block, InformationBlock)
            vectors = torch.kron(block.output_basis[b], block.input_basis[b])
            low_rank = vectors @ block.eigenvalues[b].flatten().diag() @ vectors.T
            d, diagonal = low_rank.diagonal(), stats["d"][b].flatten()
            if block.correction == "rescale":
                s = torch.stack(
                    [
                        (x / y).sqrt().clamp(max=1.0) if y > 0 else torch.ones_like(x)
                        for x, y in zip(diagonal, d, strict=True)
                    ]
                )
                low_rank = s.diag() @ low_rank @ s.diag()
                residual = diagonal - s**2 * d
            elif block.correction == "clamp":
                residual = (diagonal - d).clamp(min=0)
            else:
                residual = torch.zeros_like(d)
            fisher[b] = low_rank + omega * residual.diag()
    return fisher


def posterior_of(
    block: Block, groups: int = GROUPS, m: int = OUTPUTS, n: int = INPUTS, seed: int = 1
) -> Posterior:
    """A posterior with one layer, a grouped 1x1 convolution without bias (or a linear layer for one group)."""
    shape = (groups * m, n, 1, 1) if groups > 1 else (m, n)
    layer = Layer("layer", "conv2d" if groups > 1 else "linear", "layer.weight", None, groups, m, n, shape)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    name = "joint" if isinstance(block, DenseBlock) else "layer"
    posterior = Posterior(
        "inf",
        {"layer": layer},
        {name: block},
        {name: ["layer"]},
        {"layer.weight": weight},
        Categorical(),
        Evidence(50, -30.0),
    )
    return posterior.with_settings(scale=SCALE, prior_precision=TAU)


def dense_jacobian(model: nn.Module, posterior: Posterior, x: Tensor) -> dict[str, Tensor]:
    """Layer name to ``(samples * outputs, G m n)``, by reverse-mode differentiation through autograd."""
    twin = {name: p.detach() for name, p in model.named_parameters()}
    names = [name for layer in posterior.layers.values() for name in layer.parameter_names]

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, twin | parameters, (x,)).flatten()

    found = jacrev(run)({name: twin[name] for name in names})
    rows: dict[str, Tensor] = {}
    for name, layer in posterior.layers.items():
        weight = found[layer.weight]
        bias = found[layer.bias] if layer.bias is not None else None
        rows[name] = layer.to_matrix(weight, bias).flatten(1)
    return rows


def dense_covariance(model: nn.Module, posterior: Posterior, x: Tensor) -> Tensor:
    """``J Sigma J^T``, ``(samples * outputs, samples * outputs)``, with every precision inverted as a dense matrix."""
    jacobian = dense_jacobian(model, posterior, x)
    total = torch.zeros(())
    for name, block in posterior.blocks.items():
        members = posterior.members[name]
        rows = torch.cat([jacobian[member] for member in members], dim=1)
        prior = torch.cat(
            [
                torch.full((posterior.layers[m].parameters,), posterior.layer_prior(m), dtype=torch.float64)
                for m in members
            ]
        )
        tensors = {key: t.double() if t.is_floating_point() else t for key, t in block.tensors().items()}
        wide = block.restore(block.attributes(), tensors)
        fisher = wide.dense(posterior.scale, posterior.residual_weight)
        precision = torch.block_diag(*fisher) + prior.diag()
        covariance, uncertain = torch.linalg.inv(precision), block.uncertain()
        if uncertain is not None:
            covariance = covariance * (uncertain.flatten() & uncertain.flatten().unsqueeze(1))
        total = total + rows.double() @ covariance @ rows.double().T
    return total


def blocks_of(joint: Tensor, samples: int) -> Tensor:
    """The samples' own blocks ``(samples, outputs, outputs)`` of a joint covariance."""
    outputs = joint.shape[0] // samples
    square = joint.reshape(samples, outputs, samples, outputs)
    return torch.stack([square[i, :, i] for i in range(samples)])
