"""Table 1 of Lee et al. (2020): errors of KFAC, EFB and INF against the exact Fisher information.

python -m recipes.uci.information_errors            every set that can be found, 20 splits
python -m recipes.uci.information_errors --smoke    Boston, two splits; seconds
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import posthoc_uq as uq
from recipes.common import in_order, markdown, parsed, parser, report, spread
from recipes.uci.data import SOURCES, Table, add_options, split, tables
from recipes.uci.network import trained_on_each

SHARE = 0.05
"""Of the eigenvalues, that the low-rank INF keeps."""
METHODS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "kfac": {"method": "kfac"},
    "efb": {"method": "efb"},
    "inf": {"method": "inf", "rank": 10**9, "basis_fraction": 1.0},
    "inf 5%": {"method": "inf", "rank": SHARE, "basis_fraction": 1.0},
}
CORRECTIONS = ("clamp", "rescale")


class Errors(NamedTuple):
    """Normalised Frobenius errors, ``|I - J|_F / |I|_F``, of the diagonals and of what lies beside them."""

    diagonal: float
    off_diagonal: float


def exact_blocks(model: nn.Sequential, inputs: Tensor, noise: float, chunk: int = 2000) -> dict[str, Tensor]:
    """``I = 1/N sum_s J_s J_s^T / noise`` of every layer, with ``J_s`` the gradient of the output at sample s.

    For a Gaussian likelihood of fixed noise that is the Fisher information, the expectation over y in closed form.
    Rows and columns run over the layer's matrix (outputs x inputs, the bias as its last column), row after row.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, (x.unsqueeze(0),)).squeeze()

    per_sample = vmap(grad(output), in_dims=(None, 0))
    layers = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    sums: dict[str, Tensor] = {}
    for part in inputs.split(chunk):
        gradients = per_sample(parameters, part)
        for layer in layers:
            weight, bias = gradients[f"{layer}.weight"], gradients[f"{layer}.bias"]
            rows = torch.cat([weight, bias.unsqueeze(2)], dim=2).flatten(1)
            sums[layer] = sums[layer] + rows.T @ rows if layer in sums else rows.T @ rows
    return {layer: total / (len(inputs) * noise) for layer, total in sums.items()}


def errors(exact: Sequence[Tensor], approximations: Sequence[Tensor]) -> Errors:
    """Over the whole block-diagonal matrix, all layers together."""
    diagonal, off = [0.0, 0.0], [0.0, 0.0]
    for truth, other in zip(exact, approximations, strict=True):
        for index, matrix in enumerate((truth - other, truth)):
            on = float(matrix.diagonal().square().sum())
            diagonal[index] += on
            off[index] += float(matrix.square().sum()) - on
    return Errors((diagonal[0] / diagonal[1]) ** 0.5, (max(off[0], 0.0) / off[1]) ** 0.5)


def measure(
    model: nn.Sequential,
    train: Table,
    hidden_only: bool = False,
    methods: Mapping[str, Mapping[str, Any]] = METHODS,
) -> dict[str, Any]:
    """Errors of every method on one trained network, in float64.

    Args:
        model: the network.
        train: what it was trained on.
        hidden_only: count the hidden layer's block alone; the output layer's is a Kronecker product, on which KFAC and
            EFB are exact.
        methods: options of `uq.fit` by name.

    Returns:
        Name to `Errors`, INF with its correction; with ``unclamped`` what becomes of the diagonal's entries that
        clamping leaves alone.
    """
    model, inputs, targets = model.double(), train.inputs.double(), train.targets.double().unsqueeze(1)
    with torch.no_grad():
        noise = float((model(inputs) - targets).square().mean())
    exact = exact_blocks(model, inputs, noise)
    if hidden_only:
        exact = dict(list(exact.items())[:1])
    batches = in_order(inputs, targets, 2000)
    found: dict[str, Any] = {}
    for name, options in methods.items():
        for correction in CORRECTIONS if options["method"] == "inf" else (None,):
            own = dict(options)
            if correction is not None:
                own |= {"correction": correction, "basis": "exact"}
            posterior = uq.fit(
                model,
                batches,
                likelihood="regression",
                noise_variance=noise,
                fisher="exact",
                prior_precision=1.0,
                dtype=torch.float64,
                progress=False,
                **own,
            )
            dense = {layer: posterior.blocks[layer].dense()[0] for layer in exact}
            label = name if correction is None else f"{name}, {correction}"
            found[label] = errors(list(exact.values()), list(dense.values()))
            if correction == "clamp":
                bare = {layer: posterior.blocks[layer].dense(residual_weight=0.0)[0] for layer in exact}
                found[f"unclamped, {name}"] = unclamped(exact, dense, bare)
    return found


def unclamped(
    exact: Mapping[str, Tensor], dense: Mapping[str, Tensor], bare: Mapping[str, Tensor]
) -> dict[str, float]:
    """What becomes of the diagonal's entries that the low-rank part `bare` does not overshoot.

    Returns:
        Their share of all, and their largest error relative to the largest entry of the layer's diagonal.
    """
    kept, total, worst = 0, 0, 0.0
    for layer, truth in exact.items():
        diagonal = truth.diagonal()
        below = bare[layer].diagonal() <= diagonal
        kept, total = kept + int(below.sum()), total + len(diagonal)
        difference = (dense[layer].diagonal() - diagonal).abs()[below]
        worst = max(worst, float(difference.max() / diagonal.max()) if len(difference) else 0.0)
    return {"share": kept / total, "worst": worst}


def lines(name: str, rows: int, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The set's lines of the table, one for each correction of INF, columns in the paper's order after Diag."""
    result: list[dict[str, str]] = []
    for correction in CORRECTIONS:
        line = {"set": name, "Nr": str(rows), "INF's correction": correction}
        for part in Errors._fields:
            for method in METHODS:
                label = f"{method}, {correction}" if method.startswith("inf") else method
                if (part, method) != ("off_diagonal", "diag"):  # 1 by definition
                    numbers = [getattr(one[label], part) for one in found]
                    line[f"{part.replace('_', '-')} {method.upper()}"] = spread(numbers, error=True)
        result.append(line)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "uci", "Boston, two splits, few steps: seconds")
    add_options(command)
    command.add_argument(
        "--hidden-layer", action="store_true", help="count the hidden layer's block alone, not all layers"
    )
    options = parsed(command, arguments, sets=["boston"], splits=2, steps=100)
    torch.set_num_threads(1)
    table_lines: list[dict[str, str]] = []
    everything: dict[str, Any] = {}
    for name, table in tables(options).items():
        begun = time.perf_counter()
        parts = [split(table, seed).train for seed in range(options.splits)]
        models = trained_on_each(parts, SOURCES[name].hidden, steps=options.steps)
        found = [
            measure(model, part, options.hidden_layer) for model, part in zip(models, parts, strict=True)
        ]
        everything[name] = [
            {label: value._asdict() if isinstance(value, Errors) else value for label, value in one.items()}
            for one in found
        ]
        table_lines += lines(name, len(table.targets), found)
        for method in ("inf", "inf 5%"):
            kept = [one[f"unclamped, {method}"] for one in found]
            print(
                f"{name}, {method}: {spread([one['share'] for one in kept], error=True)} of the diagonal is not "
                f"clamped, its largest error there {max(one['worst'] for one in kept):.1e}"
            )
        gap = max(abs(one["inf, clamp"].off_diagonal - one["efb"].off_diagonal) for one in found)
        print(f"{name}: off-diagonal errors of INF (clamp) and EFB differ by at most {gap:.1e}")
        print(f"{name}: {options.splits} splits in {time.perf_counter() - begun:.0f} s")
    report(
        options,
        f"information_errors{'_hidden_layer' * options.hidden_layer}",
        markdown(table_lines),
        everything,
    )


if __name__ == "__main__":
    main()
