"""Figure 5 of Lee et al. (2020): active learning with INF at three ranks, against random selection.

Twenty points, a network of 10 hidden units, one point more at every iteration: the one of most information (MacKay
1992) or a random one. Test RMSE after every iteration, averaged over splits.

    python -m recipes.active_learning.compare            every set that can be found, 20 splits
    python -m recipes.active_learning.compare --smoke    Boston, two splits, two iterations; seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import markdown, parsed, parser, report, save_figure, spread
from recipes.uci.data import Split, Table, add_options, split, tables
from recipes.uci.network import trained

SETS = ("boston", "wine", "energy", "concrete")
"""The paper's three, and concrete, which a package carries."""
COLOURS = {"random": "#595959", "INF 20%": "#E69F00", "INF 50%": "#009E73", "INF 100%": "#0072B2"}
HIDDEN = 10
RANKS: dict[str, float | int] = {"INF 20%": 0.2, "INF 50%": 0.5, "INF 100%": 10**9}
STRATEGIES = ("random", *RANKS)


class Pool(NamedTuple):
    """One split: rows that may be asked for, and rows to test on; targets standardised by the first rows alone.

    Attributes:
        rows: the first of them are known at the start.
        test: held out throughout.
        scale: of the targets, in the data's units.
    """

    rows: Table
    test: Table
    scale: float


def pool(table: Table, seed: int, start: int, test: int = 100) -> Pool:
    """A random split whose targets are standardised by the `start` rows that are known at the beginning.

    Inputs are standardised by all rows that may be asked for: their inputs are known.
    """
    part: Split = split(table, seed, test)
    known = part.train.targets[:start]
    centre, spread = known.mean(), known.std()
    rows, held = (t._replace(targets=(t.targets - centre) / spread) for t in (part.train, part.test))
    return Pool(rows, held, part.scale * float(spread))


def information_gain(
    model: nn.Module,
    known: Table,
    candidates: Tensor,
    rank: float | int,
    noise: float,
    prior_precision: float,
) -> Tensor:
    """``1/2 log(1 + J P^-1 J^T / noise)`` of every candidate, (candidates,), in nats: the total information gain of
    MacKay (1992), "Information-based objective functions for active data selection".

    ``P`` is INF's precision of the weights at this rank, and ``J`` the gradient of the network's output.

    Args:
        model: trained on `known` with this noise and prior precision.
        known: inputs and targets of the posterior.
        candidates: (candidates, columns).
        rank: of INF.
        noise: variance of the targets given the network.
        prior_precision: of every weight.
    """
    posterior = uq.fit(
        model,
        [(known.inputs, known.targets.unsqueeze(1))],
        method="inf",
        rank=rank,
        correction="rescale",
        likelihood="regression",
        fisher="exact",
        noise_variance=noise,
        prior_precision=prior_precision,
        progress=False,
    )
    with torch.no_grad():
        variance = uq.wrap(model, posterior, head="linearized").functional_variance(candidates)
    return 0.5 * torch.log1p(variance.flatten() / noise)


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


def lines(name: str, found: Mapping[str, Tensor]) -> list[list[str]]:
    """One line a strategy: RMSE averaged over the iterations, at the start and at the end, and paired with random."""
    result: list[list[str]] = []
    for strategy, values in found.items():
        columns = [values[:, 1:].mean(1), values[:, 0], values[:, -1]]
        if strategy != "random":
            columns.append((values - found["random"])[:, 1:].mean(1))
        cells = [spread(numbers.tolist(), error=True) for numbers in columns]
        result.append([name, strategy, *cells, *[""] * (4 - len(cells))])
    return result


def picture(everything: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """A panel a set: mean test RMSE over iterations with standard errors, the average in brackets."""
    figure = Figure(figsize=(4.6 * len(everything), 3.8), layout="constrained")
    panels = figure.subplots(1, len(everything), squeeze=False)[0]
    for panel, (name, found) in zip(panels, everything.items(), strict=True):
        for strategy, values in found.items():
            mean, error = values.mean(0), values.std(0) / len(values) ** 0.5
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "active_learning", "Boston, two splits, two iterations: seconds")
    add_options(command, SETS)
    command.add_argument("--start", type=int, default=20, help="points known at the start")
    command.add_argument("--iterations", type=int, default=20)
    command.add_argument("--test", type=int, default=100, help="rows to test on")
    command.add_argument("--noise", type=float, default=0.1, help="variance, in standardised units")
    command.add_argument("--prior-precision", type=float, default=1.0)
    options = parsed(command, arguments, sets=["boston"], splits=2, iterations=2, steps=50)
    torch.set_num_threads(1)
    everything: dict[str, dict[str, Tensor]] = {}
    found_tables, asked = tables(options, SETS), options.start + options.iterations + options.test
    for name, table in found_tables.items():
        if len(table.targets) < asked:
            command.error(f"{name} has {len(table.targets)} rows, and {asked} are asked for or tested on.")
    for name, table in found_tables.items():
        begun = time.perf_counter()
        everything[name] = run(table, options)
        print(f"{name}: {options.splits} splits in {time.perf_counter() - begun:.0f} s")
    header = ["set", "strategy", "average RMSE", "start", "end", "average less random's"]
    page = markdown([header, *(line for name, found in everything.items() for line in lines(name, found))])
    save_figure(picture(everything), options.output / "active_learning.png", options.smoke)
    content = {
        name: {strategy: values.tolist() for strategy, values in found.items()}
        for name, found in everything.items()
    }
    report(options, "active_learning", page, content)


if __name__ == "__main__":
    main()
