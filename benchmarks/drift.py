"""How often `posthoc_uq.app.Monitor` is wrong, and how soon it sees that something changed.

    OMP_NUM_THREADS=1 python benchmarks/drift.py             ten picture networks; a quarter of an hour of one core
    OMP_NUM_THREADS=1 python benchmarks/drift.py --smoke     one small network, for the tests

Streams are drawn from the scores (entropy, mutual information, novelty) of the test inputs of the picture networks
of ``benchmarks/_zoo.py``, so that "no change" holds exactly. False alarms: streams of 1,500 inputs without a change.
Found: from input 500 on a tenth of the inputs is foreign, of one kind, for 1,500 inputs. The monitor's bets were chosen
on five networks by four kinds (`CHOSEN_BY`, `CHOSEN_KINDS`); the others are only reported. Beside it stands what it
replaced: a two-sample Kolmogorov-Smirnov test of the newest 200 inputs at a level of 0.01, every 100 inputs.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from _harness import output_folder, write_csv
from _novelty import FOREIGN_KINDS, PICTURES, unfamiliar
from _scored import predicted
from _zoo import CLASSIFIERS, OUTPUT, Pair, Shelf, loader, trained
from numpy.typing import NDArray
from scipy.stats import ks_2samp

import posthoc_uq as uq
from posthoc_uq.app import Monitor
from posthoc_uq.evaluation.metrics import ood_auroc
from recipes.common import markdown

Numbers = NDArray[np.float64]
Scores = dict[str, dict[str, Numbers]]
"""By kind of input, and by score."""

CHOSEN_BY = (
    *("digits 28, lenet", "digits 28, resnet", "digits 28, vit"),
    *("fashion 3000, cnn", "fashion 3000, resnet"),
)
CHOSEN_KINDS = ("inverted", "other", "noise", "turned")
WATCHED = ("entropy", "mutual_information", "novelty")
TEST = "test"
ROWS = (100, 200, 1000)
QUIET, CHANGED = 300, 20
"""Streams without a change for each number of rows, and with one for each kind and network."""
CHANGE, AFTER, SHARE = 500, 1500, 0.1
WINDOW, EVERY, LEVEL = 200, 100, 0.01
NEVER = float("inf")


def scores_of(pair: Pair, folder: Path) -> Scores:
    """The scores of a network's test inputs and of foreign ones by kind, kept in a folder."""
    path = folder / f"{pair.name.replace(' ', '-').replace(',', '')}.npz"
    if not path.exists():
        model, split = trained(pair, 0), pair.split(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = uq.fit(model, loader(split.train), progress=False, **pair.options)
        predictor, test = uq.wrap(model, posterior), split.test.inputs
        inputs = {TEST: test, "inverted": test.amin() + test.amax() - test[:200]}
        inputs |= {kind: unfamiliar(pair.data)[kind] for kind in FOREIGN_KINDS} if pair in PICTURES else {}
        found = {
            f"{kind}|{score}": values.double().numpy()
            for kind, each in inputs.items()
            for score, values in predicted(predictor, each).scores().items()
            if score in WATCHED
        }
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, **found)
    known: Scores = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            kind, score = name.split("|")
            known.setdefault(kind, {})[score] = arrays[name]
    return known


def stream(
    scores: Scores, kind: str | None, rows: int, generator: np.random.Generator
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Scores of held-out rows and of a stream, both drawn from the test inputs with a little noise, so that few are
    equal; with a tenth of a foreign kind from the change on.
    """
    test, length = scores[TEST], AFTER if kind is None else CHANGE + AFTER
    count = len(test["entropy"])
    held, came = generator.integers(0, count, rows), generator.integers(0, count, length)
    jitter = 1 + 1e-6 * generator.standard_normal(rows), 1 + 1e-6 * generator.standard_normal(length)
    foreign = (generator.random(length) < SHARE) & (np.arange(length) >= CHANGE) & (kind is not None)
    which = generator.random(int(foreign.sum()))
    reference, incoming = dict[str, Numbers](), dict[str, Numbers]()
    for score, values in test.items():
        reference[score], incoming[score] = values[held] * jitter[0], values[came] * jitter[1]
        if kind is not None:
            others = scores[kind][score]
            incoming[score][foreign] = others[(which * len(others)).astype(int)]
    return reference, incoming


def first_alarm(reference: Mapping[str, Numbers], incoming: Mapping[str, Numbers]) -> float:
    """The number of the input at which the monitor raised its first alarm; infinite for none."""
    alarms = Monitor(reference).add(incoming).alarms
    return alarms[0].input if alarms else NEVER


def first_by_windows(reference: Mapping[str, Numbers], incoming: Mapping[str, Numbers]) -> float:
    """The same of a two-sample test, at its level over the scores and the windows that it has seen."""
    length = len(next(iter(incoming.values())))
    for end in range(WINDOW, length + 1, EVERY):
        tests = len(incoming) * (end // WINDOW)
        for score, values in incoming.items():
            window = values[end - WINDOW : end]
            if ks_2samp(window, reference[score], method="asymp").pvalue < LEVEL / tests:
                return end - 1
    return NEVER


def quiet_rows(every: Mapping[str, Scores], streams: int) -> Iterator[dict[str, Any]]:
    """How many streams without a change had an alarm, by number of held-out rows; the networks take turns."""
    generator, networks = np.random.default_rng(0), list(every.values())
    for rows in ROWS:
        counts = {"monitor": 0, "windows": 0}
        for number in range(streams):
            reference, incoming = stream(networks[number % len(networks)], None, rows, generator)
            counts["monitor"] += first_alarm(reference, incoming) < NEVER
            counts["windows"] += first_by_windows(reference, incoming) < NEVER
        yield {"held-out rows": rows, "streams": streams, **counts, "bound": streams * AFTER / 100_000}


def changed_rows(every: Mapping[str, Scores], streams: int) -> Iterator[dict[str, Any]]:
    """What was found after a change, by network, kind and number of held-out rows."""
    generator = np.random.default_rng(1)
    for name, scores in every.items():
        for kind in scores:
            if kind == TEST:
                continue
            best = max(
                ood_auroc(torch.from_numpy(scores[TEST][s]), torch.from_numpy(scores[kind][s]))
                for s in WATCHED
            )
            for rows in ROWS:
                drawn = [stream(scores, kind, rows, generator) for _ in range(streams)]
                found = np.array([first_alarm(*each) for each in drawn])
                windows = np.array([first_by_windows(*each) for each in drawn])
                chose = name in CHOSEN_BY and kind in CHOSEN_KINDS
                yield {
                    "network": name,
                    "chooses": chose,
                    "kind": kind,
                    "held-out rows": rows,
                    "best AUROC": best,
                    "streams": streams,
                    **_counts("", found),
                    **_counts("windows: ", windows),
                    "delays": np.where(found >= CHANGE, found - CHANGE, NEVER).tolist(),
                }


def _counts(name: str, found: Numbers) -> dict[str, Any]:
    """Alarms before the change, and after it, of one way."""
    delays = np.where(found >= CHANGE, found - CHANGE, NEVER)
    median = float(np.median(delays))
    return {
        f"{name}early": int((found < CHANGE).sum()),
        f"{name}found": int(np.isfinite(delays).sum()),
        f"{name}median delay": "never" if median == NEVER else median,
    }


def summary(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """By whether network and kind chose the bets, kind and number of rows."""
    lines: list[dict[str, str]] = []
    keys = dict.fromkeys((row["held-out rows"], not row["chooses"], row["kind"]) for row in found)
    for rows, reported, kind in sorted(keys):
        own = [
            row
            for row in found
            if (row["held-out rows"], not row["chooses"], row["kind"]) == (rows, reported, kind)
        ]
        delays = [delay for row in own for delay in row["delays"]]
        median = float(np.median(delays))
        streams = sum(row["streams"] for row in own)
        lines.append(
            {
                "held-out rows": str(rows),
                "bets": "reported" if reported else "choosing",
                "a tenth of": kind,
                "networks": str(len(own)),
                "best AUROC": f"{mean(row['best AUROC'] for row in own):.3f}",
                "found": f"{sum(row['found'] for row in own) / streams:.2f}",
                "median delay": "never" if median == NEVER else f"{median:.0f}",
                "windows: found": f"{sum(row['windows: found'] for row in own) / streams:.2f}",
            }
        )
    return lines


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows as texts, without the single delays."""
    return [
        {key: f"{v:.4g}" if isinstance(v, float) else str(v) for key, v in row.items() if key != "delays"}
        for row in rows
    ]


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
    pairs, quiet, changed = PICTURES, QUIET, CHANGED
    if options.smoke:
        pairs, quiet, changed = [p for p in CLASSIFIERS if p.name == "digits, mlp relu"], 3, 2
    every = {pair.name: scores_of(pair, options.output / "scores") for pair in pairs}
    alarms = list(quiet_rows(every, quiet))
    print(f"Streams without a change in which there was an alarm:\n{markdown(_texts(alarms))}", flush=True)
    found = list(changed_rows(every, changed))
    print(f"\nA tenth of the inputs changed:\n{markdown(summary(found))}")
    write_csv(options.output / "drift_false_alarms.csv", _texts(alarms))
    write_csv(options.output / "drift_found.csv", _texts(found))
    print(f"Written: {options.output / 'drift_false_alarms.csv'} and drift_found.csv")


if __name__ == "__main__":
    main()
