"""How near the approximate posteriors come to the exact one, layer by layer, on three small trained networks.

For every layer the exact Fisher block ``I`` (expectation over the labels, float64) is computed by
`torch.func`, independently of the library, and compared with the blocks that the library fits: by the
relative Frobenius error ``|I - I_x| / |I|``, and by the Kullback-Leibler divergence from the exact block
posterior, ``KL(N(0, P0^-1) || N(0, P^-1))`` in nats per weight, with ``P = N I_x + tau``.

    python benchmarks/posterior_quality.py            the whole table, and docs/images/posterior_quality.png
    python benchmarks/posterior_quality.py --smoke    the first network, few ranks, no picture; seconds

``--peers`` has networks that pool over pixels instead, and the Kronecker factors of laplace-torch and curvlinops beside
KFAC, EFB and INF: traces, linearised predictions and log evidence, each from the posterior's dense blocks alone. The
other libraries come from the environment that ``peers.py --install`` makes; any other interpreter leaves their rows out
and says so.

    .venv-peers/bin/python benchmarks/posterior_quality.py --peers     about a minute
    python benchmarks/posterior_quality.py --peers --smoke             one network of few images; seconds
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _harness import geometric_mean, output_file, single_threaded, table, write_json
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from peers import described
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import posthoc_uq as uq
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.information import Correction, InformationBlock

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "posterior_quality.png"
REFERENCES = ("prior", "diag", "kfac", "efb")
"""What INF is compared with; "prior" takes nothing from the data."""
MEASURES = ("frobenius", "kl", "reverse kl", "mean kl")
"""Error, divergence from the exact posterior to the approximation, the other way round, and the mean of both."""
CORRECTIONS: tuple[Correction, ...] = ("rescale", "clamp", "none")
RANKS = (5, 20, 50, 100, 300, 100_000)
PRIOR = 10.0
"""Prior precision of the divergences."""
WEIGHTS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Residual weights: the grid on which it is tuned; 1, 0.3 and 0.1 are in it."""
SHOWN_WEIGHTS = (1.0, 0.3, 0.1)


class Net(NamedTuple):
    """A trained network in float64 and the data it was trained on.

    Attributes:
        noise: noise variance of a regressor; None for a classifier.
        layers: names of its weighted layers.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    noise: float | None
    layers: list[str]


@dataclass
class Exact:
    """The exact block posterior of one layer at one prior precision: what the divergences need of it."""

    fisher: Tensor
    scale: int
    prior: float

    def __post_init__(self) -> None:
        factor = torch.linalg.cholesky(self.precision(self.fisher))
        self.covariance = torch.cholesky_inverse(factor)
        self.log_determinant = _log_determinant(factor)
        self.own = self.precision(self.fisher)

    def precision(self, fisher: Tensor) -> Tensor:
        """``N I + tau``."""
        return self.scale * fisher + self.prior * torch.eye(len(fisher), dtype=fisher.dtype)

    def divergences(self, fisher: Tensor) -> tuple[float, float]:
        """``KL(exact || approximate)`` and ``KL(approximate || exact)``, in nats per weight."""
        precision = self.precision(fisher)
        factor, info = torch.linalg.cholesky_ex(precision)
        if int(info) != 0:
            return float("inf"), float("inf")
        trace = float((precision * self.covariance).sum())
        ratio = float(_log_determinant(factor) - self.log_determinant)
        size = len(fisher)
        back = float((self.own * torch.cholesky_inverse(factor)).sum())
        # Rounding may make the divergence of an exact approximation negative.
        forward, reverse = (
            max(0.0, value / (2 * size)) for value in (trace - size - ratio, back - size + ratio)
        )
        return forward, reverse


def _log_determinant(factor: Tensor) -> Tensor:
    return 2 * factor.diagonal().log().sum()


def digits_mlp(seed: int = 0) -> Net:
    """64-12-10 ReLU classifier of scikit-learn's digits.

    Pixels / 16, all 1,797 images, 200 full-batch steps of Adam at learning rate 0.01.
    """
    pixels, labels = _digits()
    model = _seeded(seed, lambda: nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)))
    _train(model, pixels, labels, nn.functional.cross_entropy, steps=200, rate=0.01)
    return Net("digits MLP 64-12-10", model, pixels, labels, None, ["0", "2"])


def digits_cnn(seed: int = 0) -> Net:
    """Two 3x3 convolutions (8 and 20 channels), each with ReLU and 2x2 pooling, and a linear layer.

    Trained as the MLP is, but for 80 steps.
    """
    pixels, labels = _digits()
    images = pixels.reshape(-1, 1, 8, 8)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 20, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(80, 10),
        )

    model = _seeded(seed, build)
    _train(model, images, labels, nn.functional.cross_entropy, steps=80, rate=0.01)
    return Net("digits CNN", model, images, labels, None, ["0", "3", "7"])


def boston_regressor(seed: int = 0) -> Net:
    """13-50-1 ReLU regressor of the Boston housing prices: 506 rows, inputs and prices standardised.

    Trained by 400 full-batch steps of Adam at learning rate 0.01.
    """
    from mlxtend.data import boston_housing_data

    inputs, targets = (torch.tensor(part, dtype=torch.float64) for part in boston_housing_data())
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    targets = ((targets - targets.mean()) / targets.std()).unsqueeze(1)
    model = _seeded(seed, lambda: nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1)))
    _train(model, inputs, targets, nn.functional.mse_loss, steps=400, rate=0.01)
    with torch.no_grad():
        noise = float((model(inputs) - targets).square().mean())
    return Net("Boston 13-50-1", model, inputs, targets, noise, ["0", "2"])


NETS: dict[str, Callable[[int], Net]] = {"mlp": digits_mlp, "cnn": digits_cnn, "boston": boston_regressor}


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float64) / 16, torch.tensor(labels, dtype=torch.int64)


def _seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def _train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    rate: float,
) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(inputs), targets).backward()
        optimiser.step()
    model.eval()


def exact_blocks(net: Net, chunk: int = 100) -> dict[str, Tensor]:
    """The exact Fisher of every layer, ``1/N sum_s E_y[grad grad^T]``, from Jacobians of single samples; no
    library code.

    Rows and columns run over the layer's matrix with the bias as its last column, as in `Block.dense`.
    """
    blocks: dict[str, Tensor] = {}
    for x in net.inputs.split(chunk):
        roots = _loss_roots(net, x)
        for layer, jacobian in layer_jacobians(net, x).items():
            rows = torch.einsum("sko,sop->skp", roots, jacobian).flatten(0, 1)
            fisher = rows.T @ rows
            blocks[layer] = blocks[layer] + fisher if layer in blocks else fisher
    return {layer: fisher / len(net.inputs) for layer, fisher in blocks.items()}


def layer_jacobians(net: Net, x: Tensor) -> dict[str, Tensor]:
    """Jacobians of every layer, ``(samples, outputs, weights)``; weights in the order of `exact_blocks`."""
    parameters = {name: p.detach() for name, p in net.model.named_parameters()}

    def outputs(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net.model, values, (x.unsqueeze(0),)).squeeze(0)

    per_sample = vmap(jacrev(outputs), in_dims=(None, 0))
    jacobians = per_sample(parameters, x)
    found: dict[str, Tensor] = {}
    for layer in net.layers:
        weight, bias = jacobians[f"{layer}.weight"], jacobians[f"{layer}.bias"]
        found[layer] = torch.cat([weight.flatten(3), bias.unsqueeze(3)], dim=3).flatten(2)
    return found


def _loss_roots(net: Net, x: Tensor) -> Tensor:
    """Gradients of ``-log p(y | x)`` for every y, times ``p(y | x)^1/2``: ``(samples, k, outputs)``."""
    with torch.no_grad():
        outputs = net.model(x)
    if net.noise is not None:
        return torch.full((len(x), 1, 1), net.noise**-0.5, dtype=torch.float64)
    probs = outputs.softmax(dim=1)
    gradients = probs.unsqueeze(1) - torch.eye(probs.shape[1], dtype=probs.dtype)
    return probs.sqrt().unsqueeze(2) * gradients


def fitted_blocks(net: Net, method: str, rank: int | None = None) -> Mapping[str, Block]:
    """The library's blocks of one method: exact expectation over labels, float64, exact bases of all samples."""
    batches = list(zip(net.inputs.split(256), net.targets.split(256), strict=True))
    options: dict[str, Any] = {} if rank is None else {"rank": rank, "basis": "exact", "basis_fraction": 1.0}
    if net.noise is not None:
        options |= {"likelihood": "regression", "noise_variance": net.noise}
    return uq.fit(
        net.model,
        batches,
        method=method,
        fisher="exact",
        dtype=torch.float64,
        prior_precision=1.0,
        progress=False,
        **options,
    ).blocks


def measure(net: Net, ranks: Sequence[int], weights: Sequence[float]) -> list[dict[str, Any]]:
    """One row per layer, method, rank, correction and residual weight, with ``frobenius`` and ``kl``."""
    exact = exact_blocks(net)
    posteriors = {layer: Exact(fisher, len(net.inputs), PRIOR) for layer, fisher in exact.items()}

    def row(layer: str, approximation: Tensor, **columns: Any) -> dict[str, Any]:
        error = torch.linalg.matrix_norm(exact[layer] - approximation) / torch.linalg.matrix_norm(
            exact[layer]
        )
        found = {"net": net.name, "layer": layer, **columns, "frobenius": float(error)}
        forward, reverse = posteriors[layer].divergences(approximation)
        found |= {"kl": forward, "reverse kl": reverse, "mean kl": (forward + reverse) / 2}
        return found

    rows: list[dict[str, Any]] = []
    for layer, fisher in exact.items():
        rows.append(row(layer, torch.zeros_like(fisher), method="prior", weights=len(fisher)))
    for method in ("diag", "kfac", "efb"):
        for layer, block in fitted_blocks(net, method).items():
            rows.append(row(layer, block.dense()[0], method=method, weights=len(exact[layer])))
    seen: set[tuple[str, int]] = set()
    for rank in ranks:
        for layer, block in fitted_blocks(net, "inf", rank).items():
            assert isinstance(block, InformationBlock)
            size = len(exact[layer])
            if (layer, min(rank, size)) in seen:
                continue
            seen.add((layer, min(rank, size)))
            shared = {
                "method": "inf",
                "weights": size,
                "rank": min(rank, size),
                "full rank": rank >= size,
                "kept": block.eigenvalues.numel(),
            }
            for correction, weight, dense in _variants(block, weights):
                rows.append(row(layer, dense, **shared, correction=correction, **{"residual weight": weight}))
    return rows


def _variants(block: InformationBlock, weights: Sequence[float]) -> Iterator[tuple[str, float, Tensor]]:
    """Every correction and residual weight of one layer; the statistics are the same."""
    for correction in CORRECTIONS:
        corrected = InformationBlock(
            block.input_basis, block.output_basis, block.eigenvalues, block.diagonal, correction
        )
        low_rank, whole = corrected.dense(residual_weight=0.0)[0], corrected.dense()[0]
        for weight in weights if correction != "none" else [1.0]:
            yield correction, weight, low_rank + weight * (whole - low_rank)


Key = tuple[str, str]


class Summary(NamedTuple):
    """The rows by layer (net, layer), in their order: one dense reference per method, and INF by rank."""

    references: dict[Key, dict[str, dict[str, Any]]]
    inf: dict[tuple[str, str, int], list[dict[str, Any]]]


def summarise(rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Sort the rows of `measure` by layer and rank."""
    references: dict[Key, dict[str, dict[str, Any]]] = {}
    inf: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] == "inf":
            inf.setdefault((row["net"], row["layer"], row["rank"]), []).append(dict(row))
        else:
            references.setdefault((row["net"], row["layer"]), {})[row["method"]] = dict(row)
    return Summary(references, inf)


def _pick(group: Sequence[dict[str, Any]], correction: str, weight: float = 1.0) -> dict[str, Any]:
    return next(row for row in group if row["correction"] == correction and row["residual weight"] == weight)


def frobenius_table(summary: Summary) -> list[dict[str, Any]]:
    """Relative Frobenius errors, one line per layer and rank."""
    lines: list[dict[str, Any]] = []
    for (net, layer, _), group in summary.inf.items():
        reference = summary.references[net, layer]
        lines.append(
            {
                "network": net,
                "layer": layer,
                "weights": group[0]["weights"],
                "rank": _rank(group[0]),
                "kept": group[0]["kept"],
                **{method: reference[method]["frobenius"] for method in ("diag", "kfac", "efb")},
                **{f"inf {correction}": _pick(group, correction)["frobenius"] for correction in CORRECTIONS},
            }
        )
    return lines


def _rank(row: Mapping[str, Any]) -> str:
    return "full" if row["full rank"] else str(row["rank"])


def means(summary: Summary) -> list[dict[str, Any]]:
    """Geometric means over layers and ranks of every family and of every correction and residual weight of INF, one
    line each.

    Layers on which EFB is exact (one output under Gaussian noise: the block is a Kronecker product) have no
    place in such a mean.
    """
    groups = [(key, group) for key, group in summary.inf.items() if not is_exact(summary, key[:2])]

    def line(name: str, rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Of the best row of each group by each measure."""
        least = {measure: [min(row[measure] for row in own) for own in rows] for measure in MEASURES}
        return {"posterior": name} | {measure: geometric_mean(found) for measure, found in least.items()}

    found = [
        line(method, [[summary.references[net, layer][method]] for (net, layer, _), _ in groups])
        for method in REFERENCES
    ]
    variants = dict.fromkeys((row["correction"], row["residual weight"]) for _, own in groups for row in own)
    for correction, weight in variants:
        name = f"inf {correction}" + ("" if correction == "none" else f" {weight:g}")
        found.append(line(name, [[_pick(group, correction, weight)] for _, group in groups]))
    for correction in ("clamp", "rescale"):
        every = [[row for row in group if row["correction"] == correction] for _, group in groups]
        found.append(line(f"inf {correction} tuned", every))
    return found


def is_exact(summary: Summary, key: Key) -> bool:
    """Whether EFB gives the block to rounding."""
    return summary.references[key]["efb"]["frobenius"] < 1e-6


COLOURS = {
    "diag": "#595959",
    "kfac": "#CC79A7",
    "efb": "#009E73",
    "rescale": "#0072B2",
    "clamp": "#D55E00",
    "none": "#E69F00",
}
MARKERS = {"rescale": "o", "clamp": "s", "none": "^"}


def picture(summary: Summary, rank: int = 100) -> Figure:
    """Above: Frobenius error over rank; below: divergence over residual weight; a column for each network."""
    nets = list(dict.fromkeys(net for net, _ in summary.references))
    figure = Figure(figsize=(4.2 * len(nets), 7), layout="constrained")
    panels = figure.subplots(2, len(nets), squeeze=False)
    for index, net in enumerate(nets):
        upper, lower = panels[0, index], panels[1, index]
        layers = [key[1] for key in summary.references if key[0] == net and not is_exact(summary, key)]
        largest = max(r for name, _, r in summary.inf if name == net)
        ranks = sorted({r for _, _, r in summary.inf if r in RANKS and r < largest} | {largest})
        for method, style in (("kfac", ":"), ("efb", "--")):
            values = [summary.references[net, layer][method]["frobenius"] for layer in layers]
            upper.axhline(
                geometric_mean(values), color=COLOURS[method], linestyle=style, label=method.upper()
            )
        for correction in CORRECTIONS:
            means = [
                geometric_mean(
                    [_pick(_nearest(summary, net, layer, r), correction)["frobenius"] for layer in layers]
                )
                for r in ranks
            ]
            upper.plot(
                ranks, means, color=COLOURS[correction], marker=MARKERS[correction], label=f"INF {correction}"
            )
        upper.set(xscale="log", title=net, xlabel="rank (layers with fewer weights at full rank)")
        plain_ticks(upper.xaxis)
        for method, style in (("diag", "-."), ("kfac", ":"), ("efb", "--")):
            values = [summary.references[net, layer][method]["kl"] for layer in layers]
            label = "diagonal" if method == "diag" else method.upper()
            lower.axhline(geometric_mean(values), color=COLOURS[method], linestyle=style, label=label)
        for correction in ("rescale", "clamp"):
            groups = [_nearest(summary, net, layer, rank) for layer in layers]
            weights = sorted(
                {row["residual weight"] for row in groups[0] if row["correction"] == correction} - {0.0}
            )
            means = [geometric_mean([_pick(group, correction, w)["kl"] for group in groups]) for w in weights]
            lower.plot(
                weights,
                means,
                color=COLOURS[correction],
                marker=MARKERS[correction],
                label=f"INF {correction}",
            )
        lower.set(xscale="log", yscale="log", xlabel=f"residual weight (rank {rank})")
        plain_ticks(lower.xaxis)
        plain_ticks(lower.yaxis)
    panels[0, 0].set_ylabel("relative Frobenius error\n(geometric mean over layers)")
    panels[1, 0].set_ylabel(
        f"KL from the exact posterior, nats per weight\n(prior precision {PRIOR:g}; mean over layers)"
    )
    panels[0, 0].legend(fontsize=8)
    panels[1, 0].legend(fontsize=8)
    return figure


def plain_ticks(axis: Axis) -> None:
    """Numbers as people write them, and only at the decades and, for short axes, at 2 and 5 times these."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _nearest(summary: Summary, net: str, layer: str, rank: int) -> list[dict[str, Any]]:
    """INF's rows of a layer at the largest measured rank that does not exceed `rank`."""
    ranks = [r for name, own, r in summary.inf if (name, own) == (net, layer)]
    return summary.inf[net, layer, max([r for r in ranks if r <= rank], default=min(ranks))]


# Beside other libraries


class Held(NamedTuple):
    """A network on some of the digits, and others to predict for."""

    net: Net
    inputs: Tensor
    targets: Tensor


def averaged_features() -> nn.Module:
    """Two convolutions, the average over pixels, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


def averaged_outputs() -> nn.Module:
    """Three convolutions, the last of them to the classes, and then the average over pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(),
        nn.Conv2d(12, 10, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


POOLED: dict[str, Callable[[], nn.Module]] = {
    "features averaged": averaged_features,
    "outputs averaged": averaged_outputs,
}
DRAWS = 200
"""Of the outputs' noise, the same for every posterior."""


def pooled(name: str, seed: int, samples: int = 400, steps: int = 300) -> Held:
    """A network that pools, trained on the first of the digits in an order by the seed; the rest is held out."""
    pixels, labels = _digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = pixels[order].reshape(-1, 1, 8, 8), labels[order]
    model = _seeded(seed, POOLED[name])
    _train(model, images[:samples], labels[:samples], nn.functional.cross_entropy, steps, rate=0.01)
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    net = Net(name, model, images[:samples], labels[:samples], None, layers)
    held = slice(samples, 2 * samples)
    return Held(net, images[held], labels[held])


Blocks = Mapping[str, Tensor]


def by_layer(net: Net, matrix: Tensor) -> Blocks:
    """The layers' blocks of a matrix over all parameters, in the order of `exact_blocks`."""
    places: dict[str, Tensor] = {}
    start = 0
    for name, parameter in net.model.named_parameters():
        places[name] = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
        start += parameter.numel()
    found: dict[str, Tensor] = {}
    for layer in net.layers:
        weight, bias = places[f"{layer}.weight"].flatten(1), places[f"{layer}.bias"].unsqueeze(1)
        rows = torch.cat([weight, bias], dim=1).flatten()
        found[layer] = matrix[rows][:, rows]
    return found


def of_laplace_torch(net: Net, backend: str) -> Blocks:
    """Blocks of laplace-torch's Kronecker factors, by a class of ``laplace.curvature``."""
    from laplace import Laplace, curvature

    model = copy.deepcopy(net.model)  # some back ends leave their hooks on it
    posterior = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=getattr(curvature, backend),
    )
    data = torch.utils.data.TensorDataset(net.inputs, net.targets)
    posterior.fit(torch.utils.data.DataLoader(data, batch_size=100))
    return by_layer(net, posterior.H.to_matrix().detach() / len(net.inputs))


def of_curvlinops(net: Net, form: str) -> Blocks:
    """Blocks of curvlinops' KFAC, in the form ``"EXPAND"`` or ``"REDUCE"``; a bias belongs to its weight's factor."""
    from curvlinops import FisherType, KFACLinearOperator, KFACType

    operator = KFACLinearOperator(
        net.model,
        nn.CrossEntropyLoss(),
        [*net.model.parameters()],
        [*zip(net.inputs.split(100), net.targets.split(100), strict=True)],
        fisher_type=FisherType.TYPE2,
        kfac_approx=KFACType[form],
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    size = sum(parameter.numel() for parameter in net.model.parameters())
    return by_layer(net, (operator @ torch.eye(size, dtype=torch.float64)).detach())


def of_ours(net: Net, method: str) -> Blocks:
    """Blocks of a method of the library; INF at its own rank."""
    rank = 100 if method == "inf" else None
    return {layer: block.dense()[0] for layer, block in fitted_blocks(net, method, rank).items()}


RIVALS: dict[str, Callable[[Net], Blocks]] = {
    "exact blocks": exact_blocks,
    "KFAC": partial(of_ours, method="kfac"),
    "EFB": partial(of_ours, method="efb"),
    "INF": partial(of_ours, method="inf"),
    "laplace-torch, curvlinops": partial(of_laplace_torch, backend="CurvlinopsGGN"),
    "laplace-torch, ASDL": partial(of_laplace_torch, backend="AsdlGGN"),
    "curvlinops, expand": partial(of_curvlinops, form="EXPAND"),
    "curvlinops, reduce": partial(of_curvlinops, form="REDUCE"),
}


class Predicted(NamedTuple):
    """What follows from the blocks, for inputs held out: class probabilities, covariances of outputs, log evidence."""

    probs: Tensor
    covariance: Tensor
    evidence: float

    def deviations(self) -> Tensor:
        """Of the outputs about their mean, which is all that a softmax sees."""
        count = self.covariance.shape[1]
        centre = torch.eye(count, dtype=self.covariance.dtype) - 1 / count
        return (centre @ self.covariance @ centre).diagonal(dim1=1, dim2=2).sqrt()


def predicted(held: Held, blocks: Blocks, prior: float) -> Predicted:
    """Linearised predictions and the log evidence of a posterior with these blocks."""
    net = held.net
    with torch.no_grad():
        outputs = net.model(held.inputs)
        evidence = -float(nn.functional.cross_entropy(net.model(net.inputs), net.targets, reduction="sum"))
    covariance = outputs.new_zeros(*outputs.shape, outputs.shape[1])
    for layer, jacobian in layer_jacobians(net, held.inputs).items():
        precision = len(net.inputs) * blocks[layer]
        precision.diagonal().add_(prior)
        factor = torch.linalg.cholesky(precision)
        rows = torch.linalg.solve_triangular(factor, jacobian.flatten(0, 1).T, upper=False)
        rows = rows.T.reshape(jacobian.shape)
        covariance += rows @ rows.mT
        own = net.model.get_submodule(layer).parameters()
        norm = sum(float(parameter.detach().square().sum()) for parameter in own)
        evidence -= (float(_log_determinant(factor)) - len(factor) * log(prior) + prior * norm) / 2
    noise = torch.randn(
        DRAWS, 1, outputs.shape[1], 1, dtype=outputs.dtype, generator=torch.Generator().manual_seed(0)
    )
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(outputs.shape[1], dtype=outputs.dtype))
    probs = (outputs + (root @ noise).squeeze(3)).softmax(2).mean(0)
    return Predicted(probs, covariance, evidence)


def beside_peers(held: Held, prior: float = PRIOR) -> list[dict[str, Any]]:
    """One line per posterior, of this library and of others; a note where one is missing or fails."""
    exact = exact_blocks(held.net)
    reference = predicted(held, exact, prior)
    rows: list[dict[str, Any]] = []
    for name, blocks_of in RIVALS.items():
        row: dict[str, Any] = {"network": held.net.name, "posterior": name}
        rows.append(row)
        try:
            blocks = blocks_of(held.net)
        except ModuleNotFoundError as error:
            row["note"] = f"{error.name} is not installed"
            continue
        except Exception as error:  # another library's
            if not name.startswith(("laplace", "curvlinops")):
                raise
            row["note"] = described(error)
            continue
        found = predicted(held, blocks, prior)
        for index, layer in enumerate(held.net.layers, 1):
            row[f"trace {index}"] = float(blocks[layer].trace() / exact[layer].trace())
        apart = reference.probs * (reference.probs / found.probs).log()
        row["divergence"] = float(apart.sum(1).mean())
        row["deviation"] = float((found.deviations() / reference.deviations()).log().mean().exp())
        row["NLL"] = float(nn.functional.nll_loss(found.probs.log(), held.targets))
        row["log evidence - exact"] = found.evidence - reference.evidence
    return rows


def mean_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The means over seeds of a network's rows by posterior."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["posterior"]), []).append(row)
    means: list[dict[str, Any]] = []
    for own in groups.values():
        first = next((row for row in own if "note" in row), own[0])  # which has no numbers
        means.append(
            {
                key: value if isinstance(value, str) else sum(row[key] for row in own) / len(own)
                for key, value in first.items()
            }
        )
    return means


def peers_table(smoke: bool, seeds: int) -> list[dict[str, Any]]:
    """Means over seeds, printed."""
    rows: list[dict[str, Any]] = []
    with single_threaded():
        for name in list(POOLED)[: 1 if smoke else None]:
            for seed in range(1 if smoke else seeds):
                held = pooled(name, seed, *((40, 30) if smoke else ()))
                with torch.no_grad():
                    right = (held.net.model(held.inputs).argmax(1) == held.targets).double().mean()
                print(
                    f"{name}, seed {seed}: accuracy {float(right):.3f} on {len(held.targets)} held-out images"
                )
                rows += beside_peers(held)
    means = mean_rows(rows)
    print(
        f"\nTraces over the exact ones, layer by layer; predictions and evidence at prior precision {PRIOR:g}\n"
    )
    print(table(means))
    return means


def run(
    nets: Sequence[str] = tuple(NETS),
    ranks: Sequence[int] = RANKS,
    weights: Sequence[float] = WEIGHTS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Train the networks and measure every posterior; one row per layer, method and setting."""
    rows: list[dict[str, Any]] = []
    for name in nets:
        start = time.perf_counter()
        with single_threaded():
            net = NETS[name](seed)
            rows += measure(net, ranks, weights)
        print(
            f"{net.name}: {len(net.inputs)} samples, {fit_quality(net)} ({time.perf_counter() - start:.0f} s)"
        )
    return rows


def fit_quality(net: Net) -> str:
    """How well the network fits its training data, in words."""
    with torch.no_grad():
        outputs = net.model(net.inputs)
    if net.noise is not None:
        return f"noise variance {net.noise:.4f}, the mean squared residual in standardised units"
    accuracy = float((outputs.argmax(1) == net.targets).double().mean())
    loss = float(nn.functional.cross_entropy(outputs, net.targets))
    return f"training accuracy {accuracy:.3f}, NLL {loss:.4f}"


def smoke() -> list[dict[str, Any]]:
    """A few seconds' worth: the digits MLP at two ranks."""
    return run(nets=("mlp",), ranks=(50, 100_000), weights=SHOWN_WEIGHTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the first network at few settings, without the picture"
    )
    parser.add_argument(
        "--peers", action="store_true", help="pooled networks beside other libraries' Kronecker factors"
    )
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--seed", type=int, default=0, help="of the networks' initial weights")
    parser.add_argument("--json", type=output_file, help="write every row and the means to this file")
    parser.add_argument(
        "--picture", type=output_file, help=f"where the picture goes; default {PICTURE.name} in docs/images"
    )
    options = parser.parse_args(arguments)
    if options.peers:
        means_beside = peers_table(options.smoke, seeds=3)
        if options.json:
            write_json(options.json, {"rows": means_beside})
        return
    rows = smoke() if options.smoke else run(options.nets, seed=options.seed)
    summary = summarise(rows)
    print("\nRelative Frobenius error |I - I_x| / |I| (residual weight 1)\n")
    print(table(frobenius_table(summary)))
    print(
        f"\nGeometric means over layers and ranks; divergences in nats per weight at prior precision {PRIOR:g}\n"
    )
    print(table(means(summary)))
    if options.json:
        write_json(options.json, {"rows": rows, "means": means(summary)})
    target = options.picture or (None if options.smoke or list(options.nets) != list(NETS) else PICTURE)
    if target is not None:
        picture(summary).savefig(target, dpi=110)
        print(f"Picture: {target}")


if __name__ == "__main__":
    main()
