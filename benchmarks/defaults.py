"""What the defaults do to networks that were not looked at while choosing them.

Networks of many kinds are trained on tables, pictures, sequences and text (a few minutes of one core, kept in
``benchmarks/output``), then given to the library with nothing chosen. Half of them choose the defaults, the other half
is only reported. Every measurement is a file of its own there, so an interrupted run goes on where it was.

    python benchmarks/defaults.py --harm       accuracy, NLL and ECE against the network's own, every pair, three seeds
    python benchmarks/defaults.py --novelty    AUROC of foreign and corrupted inputs by every score, beside distances
    python benchmarks/defaults.py --harm --pairs lenet "wine, mlp"     these alone
    python benchmarks/defaults.py --smoke      two small networks, for the tests

laplace-torch, `pytorch-ood` and `transformers` come from the environment that ``peers.py --install`` makes; its
interpreter runs everything, any other leaves their rows out and says so. Several processes may share the work: give
each ``--seeds`` or ``--pairs`` of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import _harm
import _novelty
import torch
from _cache import Rows
from _harness import machine, output_folder, write_json
from _zoo import CLASSIFIERS, OUTPUT, REGRESSORS, SEEDS, Shelf, pairs_named

SMOKE = ("iris, mlp relu", "diabetes, mlp relu")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harm", action="store_true", help="quality against the network's own")
    parser.add_argument("--novelty", action="store_true", help="AUROC of foreign and of corrupted inputs")
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the pairs to be run")
    parser.add_argument("--rows", nargs="+", help="names of the rows to be run")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--keep", action="store_true", help="take rows of earlier versions of the library")
    parser.add_argument("--show", action="store_true", help="measure nothing; tables of what is there")
    parser.add_argument(
        "--output", type=output_folder, default=OUTPUT, help="folder for rows, tables and JSON"
    )
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = Rows(options.output / "rows", options.keep, not options.show)
    Shelf.folder = options.output / "networks"
    if options.smoke:
        options.harm, options.pairs, options.seeds = True, SMOKE, [0]
    pairs = pairs_named(options.pairs, (*CLASSIFIERS, *REGRESSORS))
    if options.harm:
        found = collected(_harm.rows_of(rows, pairs, options.seeds, options.rows), options.show)
        results = _harm.summary(found, pairs)
        report(options.output, "harm", _harm.tables(results), {"pairs": results, "rows": found})
    if options.novelty:
        found = collected(_novelty.rows_of(rows, pairs, options.seeds, options.rows), options.show)
        if options.pairs is None:
            found += collected(_novelty.imagenet_rows(rows, options.rows), options.show)
        report(options.output, "novelty", _novelty.tables(found), {"rows": found})
    for line in rows.missing.values():
        print(line)
    if len(rows.versions) > 1:
        print(
            f"These are rows of {len(rows.versions)} versions of the library; run without --keep for the present one."
        )


def collected(found: Iterable[dict[str, Any]], silent: bool) -> list[dict[str, Any]]:
    """All rows, each told as soon as it is there."""
    rows: list[dict[str, Any]] = []
    for row in found:
        rows.append(row)
        if not silent:
            print(told(row), flush=True)
    return rows


def told(row: dict[str, Any]) -> str:
    """A row as a line for the terminal."""
    return ", ".join(
        f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in row.items()
    )


def report(folder: Path, name: str, text: str, results: dict[str, Any]) -> None:
    """Tables on the terminal and in the folder, with the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\n{text}")
    (folder / f"{name}.md").write_text(text)
    write_json(folder / f"{name}.json", {"machine": machine(), **results})
    print(f"Written: {folder / name}.md and .json")


if __name__ == "__main__":
    main()
