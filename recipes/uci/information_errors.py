"""Table 1 of Lee et al. (2020): errors of KFAC, EFB and INF against the exact Fisher information.

python recipes/uci/information_errors.py            every set that can be found, 20 splits
python recipes/uci/information_errors.py --smoke    Boston, two splits; seconds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import markdown, parser, shown, tables, write
from data import SOURCES, Table, split
from fisher import Errors, errors, exact_blocks
from network import trained
from torch import Tensor, nn

import posthoc_uq as uq

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked

SHARE = 0.05
"""Of the eigenvalues, that the low-rank INF keeps."""
METHODS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "kfac": {"method": "kfac"},
    "efb": {"method": "efb"},
    "inf": {"method": "inf", "rank": 10**9},
    "inf 5%": {"method": "inf", "rank": SHARE},
}
CORRECTIONS = ("clamp", "rescale")


def measure(model: nn.Sequential, train: Table, hidden_only: bool = False) -> dict[str, Any]:
    """Errors of every method on one trained network, in float64.

    Args:
        model: the network.
        train: what it was trained on.
        hidden_only: count the hidden layer's block alone; the output layer's is a Kronecker product, on which KFAC and
            EFB are exact.

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
    batches = list(zip(inputs.split(2000), targets.split(2000), strict=True))
    found: dict[str, Any] = {}
    for name, options in METHODS.items():
        for correction in CORRECTIONS if options["method"] == "inf" else (None,):
            own = options if correction is None else options | {"correction": correction, "basis": "exact"}
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


def run(name: str, table: Table, splits: int, steps: int, hidden_only: bool = False) -> list[dict[str, Any]]:
    """`measure` on every split of one set."""
    parts = [split(table, seed).train for seed in range(splits)]
    found: list[dict[str, Any]] = []
    group = max(1, 4_000_000 // len(parts[0].targets) // SOURCES[name].hidden)
    for start in range(0, splits, group):
        chunk = parts[start : start + group]
        models = trained(
            torch.stack([part.inputs for part in chunk]),
            torch.stack([part.targets for part in chunk]),
            SOURCES[name].hidden,
            seed=start,
            steps=steps,
        )
        found += [measure(model, part, hidden_only) for model, part in zip(models, chunk, strict=True)]
    return found


def lines(name: str, rows: int, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The set's lines of the table, one for each correction of INF, columns in the paper's order after Diag."""
    result: list[dict[str, str]] = []
    for correction in CORRECTIONS:
        line = {"set": name, "Nr": str(rows), "INF's correction": correction}
        for part in Errors._fields:
            for method in METHODS:
                label = f"{method}, {correction}" if method.startswith("inf") else method
                if (part, method) != ("off_diagonal", "diag"):  # 1 by definition
                    title = f"{'diagonal' if part == 'diagonal' else 'off-diagonal'} {method.upper()}"
                    line[title] = shown([getattr(one[label], part) for one in found])
        result.append(line)
    return result


def main() -> None:
    """The command line."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--hidden-layer", action="store_true", help="count the hidden layer's block alone, not all layers"
    )
    options = arguments.parse_args()
    splits, steps = (2, 100) if options.smoke else (options.splits, options.steps)
    torch.set_num_threads(1)
    table_lines: list[dict[str, str]] = []
    everything: dict[str, Any] = {}
    for name, table in tables(options).items():
        begun = time.perf_counter()
        found = run(name, table, splits, steps, options.hidden_layer)
        everything[name] = [
            {label: value._asdict() if isinstance(value, Errors) else value for label, value in one.items()}
            for one in found
        ]
        table_lines += lines(name, len(table.targets), found)
        for method in ("inf", "inf 5%"):
            own = [one[f"unclamped, {method}"] for one in found]
            print(
                f"{name}, {method}: {shown([one['share'] for one in own])} of the diagonal is not clamped, its "
                f"largest error there {max(one['worst'] for one in own):.1e}"
            )
        gap = max(abs(one["inf, clamp"].off_diagonal - one["efb"].off_diagonal) for one in found)
        print(f"{name}: off-diagonal errors of INF (clamp) and EFB differ by at most {gap:.1e}")
        print(f"{name}: {splits} splits in {time.perf_counter() - begun:.0f} s")
    print(f"\n{marked(markdown(table_lines), options.smoke)}\n")
    file = "information_errors_hidden_layer.json" if options.hidden_layer else "information_errors.json"
    write(options.output / file, everything)


if __name__ == "__main__":
    main()
