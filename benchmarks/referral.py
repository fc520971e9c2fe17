"""Which join of scores refers errors as early as the best single score, and foreign inputs, too?

The classifiers of the defaults (`_zoo.py`), fitted by default. Of 1,500 test inputs a third gives the tails by which
scores become surprises (m of 1 - max p, e of entropy, n of novelty over layers), a third the border at 5 %, the last
third is referred; means over 20 divisions. Foreign pictures are of eight kinds (`_novelty.py`). `ratio` is the area
under the risk-coverage curve over that of the better of entropy and 1 - max p.

    python benchmarks/referral.py           one core, ten minutes with networks that are trained
    python benchmarks/referral.py --smoke   one small network, for the tests
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import output_folder, write_csv
from _novelty import foreign_pictures
from _scored import predicted
from _zoo import CLASSIFIERS, OUTPUT, Pair, Shelf, loader, pairs_named, trained
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import joint_tail, risk_coverage
from posthoc_uq.likelihoods.conformal import held_out_scores, p_values
from recipes.common import markdown

Scores = dict[str, Tensor]
INPUTS, FOREIGN, DRAWS, RATE = 1500, 200, 20, 0.05
ALLOWED = 1.03
"""The largest ratio at which errors count as ordered as well."""


def _added(after: int, factor: float) -> Callable[[Scores], Tensor]:
    return lambda s: s["m"] + factor * (s["n"] - math.log(after)).clamp(min=0)


def _largest(single: str, after: int) -> Callable[[Scores], Tensor]:
    return lambda s: torch.where(s["n"] > math.log(after), torch.maximum(s[single], s["n"]), s[single])


SINGLE = {"entropy": "e", "1 - max p": "m", "novelty": "n"}
JOINS: dict[str, Callable[[Scores], Tensor]] = {
    "largest of e and n (default)": lambda s: torch.maximum(s["e"], s["n"]),
    "largest of m and n": lambda s: torch.maximum(s["m"], s["n"]),
    "largest of m and n - 1.5": lambda s: torch.maximum(s["m"], s["n"] - 1.5),
    "largest of m and n, if n > log 100": _largest("m", 100),
    "m + 2 max(0, n - log 20)": _added(20, 2.0),
    "m + max(0, n - log 20)": _added(20, 1.0),
    "m + max(0, n - log 50)": _added(50, 1.0),
    "m + max(0, n - log 200)": _added(200, 1.0),
    **{name: lambda s, key=key: s[key] for name, key in SINGLE.items()},
}
"""Surprises to one number, larger for inputs that are referred sooner."""


def scores_of(predictor: uq.Predictor, x: Tensor) -> tuple[Scores, Tensor]:
    """Scores by which inputs are referred, and the predicted classes."""
    found = predicted(predictor, x)
    sure, classes = found.probs.max(1)
    scores = {"m": 1 - sure, "e": found.entropy(), "n": found.novelty()}
    return {name: values.double() for name, values in scores.items()}, classes


def measured(pair: Pair) -> list[dict[str, str]]:
    """A row a join, of one network."""
    model, split = trained(pair, 0), pair.split(0)
    torch.manual_seed(0)
    predictor = uq.wrap(model, uq.fit(model, loader(split.train), progress=False, **pair.options))
    known, classes = scores_of(predictor, split.test.inputs[:INPUTS])
    wrong = (classes != split.test.targets[:INPUTS]).double()
    has_pictures = pair.data in ("digits 28", "fashion")
    pictures = foreign_pictures(pair.data, FOREIGN) if has_pictures else {}
    foreign = {kind: scores_of(predictor, x)[0] for kind, x in pictures.items()}
    areas, familiar, referred = ({join: 0.0 for join in JOINS} for _ in range(3))
    for draw in range(DRAWS):
        first, second, third = torch.randperm(
            len(wrong), generator=torch.Generator().manual_seed(draw)
        ).tensor_split(3)

        def surprises(scores: Scores, first: Tensor = first) -> Scores:
            return {n: joint_tail({n: known[n][first]}, {n: v}).clamp(max=1e300) for n, v in scores.items()}

        own, others = surprises(known), [surprises(each) for each in foreign.values()]
        for name, join in JOINS.items():
            border = held_out_scores(join(own)[second])
            areas[name] += risk_coverage(join(own)[third], wrong[third]).area / DRAWS
            familiar[name] += float((p_values(border, join(own)[third]) <= RATE).double().mean()) / DRAWS
            found = [float((p_values(border, join(each)) <= RATE).double().mean()) for each in others]
            referred[name] += sum(found) / max(1, len(found)) / DRAWS
    best = min(areas["entropy"], areas["1 - max p"])
    return [
        {
            "network": pair.name,
            "group": "choosing" if pair.chooses else "reported",
            "errors": str(int(wrong.sum())),
            "join": name,
            "AURC": f"{areas[name]:.5f}",
            "ratio": f"{areas[name] / max(best, 1e-9):.3f}",
            "familiar referred": f"{familiar[name]:.3f}",
            "foreign referred": f"{referred[name]:.3f}" if foreign else "",
        }
        for name in JOINS
    ]


def summary(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """By group of networks and join."""
    lines: list[dict[str, str]] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        for join in JOINS:
            own = [row for row in rows if (row["group"], row["join"]) == (group, join)]
            ratios = sorted(float(row["ratio"]) for row in own)
            foreign = [float(row["foreign referred"]) for row in own if row["foreign referred"]]
            lines.append(
                {
                    "networks": group,
                    "join": join,
                    "mean AURC": f"{sum(float(row['AURC']) for row in own) / len(own):.4f}",
                    "ratio, median": f"{ratios[len(ratios) // 2]:.2f}",
                    "largest": f"{ratios[-1]:.2f}",
                    f"above {ALLOWED}": f"{sum(r > ALLOWED for r in ratios)} of {len(ratios)}",
                    "familiar": f"{sum(float(row['familiar referred']) for row in own) / len(own):.3f}",
                    "foreign": f"{sum(foreign) / len(foreign):.3f}" if foreign else "",
                }
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="one small network, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    pairs = [pair for pair in CLASSIFIERS if pair.data != "reviews"]
    if options.smoke:
        pairs = pairs_named(["penguins, mlp relu"], CLASSIFIERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row for pair in pairs for row in measured(pair)]
    path: Path = options.output / "referral.csv"
    write_csv(path, rows)
    print(markdown(summary(rows)), f"\nWritten to {path}.")


if __name__ == "__main__":
    main()
