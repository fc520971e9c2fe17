"""Figure 5 of Lee et al. (2020): active learning with INF at three ranks, against random selection.

Twenty points, a network of 10 hidden units, one point more at every iteration: the one of most information (MacKay
1992) or a random one. Test RMSE after every iteration, averaged over splits.

    python recipes/active_learning/compare.py            every set that can be found, 20 splits
    python recipes/active_learning/compare.py --smoke    Boston, two splits, two iterations; seconds
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from acquisition import RANKS, STRATEGIES, Pool, information_gain, pool
from data import MODELDATA, Table, load
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from network import trained
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked, stamped

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "active_learning"
SETS = ("boston", "wine", "energy", "concrete")
"""The paper's three, and concrete, which a package carries."""
COLOURS = {"random": "#595959", "INF 20%": "#E69F00", "INF 50%": "#009E73", "INF 100%": "#0072B2"}
HIDDEN = 10


def run(table: Table, options: argparse.Namespace) -> dict[str, Tensor]:
    """Test RMSE in the data's units, (splits, 1 + iterations), of every strategy.

    All strategies start from the same points, and a split's network from the same initial weights.
    """
    pools = [pool(table, seed, options.start, options.test) for seed in range(options.splits)]
    found: dict[str, Tensor] = {}
    for strategy in STRATEGIES:
        known = [list(range(options.start)) for _ in pools]
        draws = [torch.Generator().manual_seed(seed) for seed in range(options.splits)]
        history: list[list[float]] = []
        for iteration in range(options.iterations + 1):
            tables = [part_of(part.rows, rows) for part, rows in zip(pools, known, strict=True)]
            models = networks(tables, options)
            history.append([rmse(model, part) for model, part in zip(models, pools, strict=True)])
            if iteration < options.iterations:
                for index, (model, part) in enumerate(zip(models, pools, strict=True)):
                    free = sorted(set(range(len(part.rows.targets))) - set(known[index]))
                    if strategy == "random":
                        place = int(torch.randint(len(free), (), generator=draws[index]))
                    else:
                        gain = information_gain(
                            model,
                            tables[index],
                            part.rows.inputs[free],
                            RANKS[strategy],
                            options.noise,
                            options.prior_precision,
                        )
                        place = int(gain.argmax())
                    known[index].append(free[place])
        found[strategy] = torch.tensor(history, dtype=torch.float64).T
    return found


def part_of(table: Table, rows: Sequence[int]) -> Table:
    """These rows."""
    return Table(table.inputs[list(rows)], table.targets[list(rows)])


def networks(tables: Sequence[Table], options: argparse.Namespace) -> list[nn.Sequential]:
    """One network a split, at the maximum of its posterior."""
    return trained(
        torch.stack([table.inputs for table in tables]),
        torch.stack([table.targets for table in tables]),
        HIDDEN,
        steps=options.steps,
        noise=options.noise,
        prior_precision=options.prior_precision,
    )


def rmse(model: nn.Sequential, part: Pool) -> float:
    """On the test rows, in the data's units."""
    with torch.no_grad():
        residuals = model(part.test.inputs).squeeze(1) - part.test.targets
    return float(residuals.square().mean().sqrt()) * part.scale


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Over splits, the first dimension: mean and standard error."""
    return values.mean(0), values.std(0) / len(values) ** 0.5


def lines(name: str, found: Mapping[str, Tensor]) -> list[dict[str, str]]:
    """One line a strategy: RMSE averaged over the iterations, at the start and at the end, and paired with random."""
    result: list[dict[str, str]] = []
    for strategy, values in found.items():
        line = {"set": name, "strategy": strategy}
        columns = {
            "average RMSE": values[:, 1:].mean(1),
            "start": values[:, 0],
            "end": values[:, -1],
            "average less random's": (values - found["random"])[:, 1:].mean(1),
        }
        for title, numbers in columns.items():
            mean, error = mean_and_error(numbers)
            line[title] = f"{float(mean):.3f}±{float(error):.3f}"
        if strategy == "random":
            line["average less random's"] = ""
        result.append(line)
    return result


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a Markdown table."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def picture(everything: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """A panel a set: mean test RMSE over iterations with standard errors, the average in brackets."""
    figure = Figure(figsize=(4.6 * len(everything), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(everything), squeeze=False)[0]
    for panel, (name, found) in zip(panels, everything.items(), strict=True):
        for strategy, values in found.items():
            mean, error = mean_and_error(values)
            label = f"{strategy} ({float(values[:, 1:].mean()):.3f})"
            steps = range(values.shape[1])
            panel.plot(steps, mean, color=COLOURS[strategy], label=label)
            panel.fill_between(
                steps, mean - error, mean + error, color=COLOURS[strategy], alpha=0.15, linewidth=0
            )
        panel.set(title=name, xlabel="points added", ylabel="test RMSE")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.legend(fontsize=8, frameon=False)
    return figure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="Boston, two splits, two iterations: seconds")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="by default all that can be found")
    parser.add_argument("--data", type=Path, help="folder with UCI's files, see recipes/uci/README.md")
    parser.add_argument("--modeldata", type=Path, default=MODELDATA, help="R package modeldata's data folder")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--start", type=int, default=20, help="points known at the start")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--test", type=int, default=100, help="rows to test on")
    parser.add_argument("--steps", type=int, default=1000, help="of Adam at every iteration")
    parser.add_argument("--noise", type=float, default=0.1, help="variance, in standardised units")
    parser.add_argument("--prior-precision", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if options.smoke:
        options.sets, options.splits, options.iterations, options.steps = ["boston"], 2, 2, 50
    torch.set_num_threads(1)
    everything: dict[str, dict[str, Tensor]] = {}
    for name in options.sets or SETS:
        begun = time.perf_counter()
        try:
            table = load(name, options.data, options.modeldata)
        except FileNotFoundError as error:
            if options.sets:
                raise
            print(f"{name} left out. {error}")
            continue
        everything[name] = run(table, options)
        print(f"{name}: {options.splits} splits in {time.perf_counter() - begun:.0f} s")
    table = markdown([line for name, found in everything.items() for line in lines(name, found)])
    print(f"\n{marked(table, options.smoke)}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "active_learning.png"
    stamped(picture(everything), options.smoke).savefig(path, dpi=110)
    content: dict[str, Any] = {
        name: {strategy: values.tolist() for strategy, values in found.items()}
        for name, found in everything.items()
    }
    (options.output / "active_learning.json").write_text(json.dumps(content) + "\n")
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
