"""`defaults.py --harm`: does a prediction with nothing chosen do any harm to the network that it is of?"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from _cache import Rows
from _rivals import LAPLACE, laplace_scores
from _scored import averaged, harm, plain_scores, predicted, prediction_scores, tempered_scores, timed
from _zoo import CLASSIFIERS, REGRESSORS, SEEDS, Pair, loader, trained

import posthoc_uq as uq
from recipes.common import markdown

OURS, LEFT_OUT = "fit and wrap", "leave-one-out"
VARIANTS: dict[str, dict[str, Any]] = {
    OURS: {},
    "all layers": {"layers": "all"},
    "last layer": {"layers": "last"},
    "EFB": {"method": "efb"},
    "KFAC": {"method": "kfac"},
    "diagonal": {"method": "diag"},
    "full": {"method": "full"},
    "function space": {"method": "function_space"},
    LEFT_OUT: {},
}
"""What is given to `uq.fit` beside model and loader, by row. `LEFT_OUT` tunes afterwards, by the same data."""

LARGE = ("digits 28, lenet", "fashion 1000, cnn", "digits 28, resnet", "fashion 3000, vit")
"""Picture networks on which all variants are run, beside all of the tables."""
TRAINED_ON = ("digits, mlp relu", "digits, mlp tanh", "digits 28, lenet")
"""Those of function space."""
FULL_LIMIT = 3000
"""Weights up to which a full covariance is fitted."""

PLAIN, TEMPERED = "network", "temperature scaling"


def wanted(pair: Pair, seed: int) -> list[str]:
    """The rows of one network."""
    values, table = pair in REGRESSORS, pair.data not in ("fashion", "digits 28", "reviews")
    found = [PLAIN] if values else [PLAIN, TEMPERED]
    found.append(OURS)
    if table and not pair.options:
        found.append(LEFT_OUT)
    found.append("laplace, last layer")
    if table or pair.name in LARGE:
        names = ["EFB", "KFAC", "diagonal"]
        found += names if pair.options else ["last layer" if table else "all layers", *names]
    if table:
        weights = sum(parameter.numel() for parameter in trained(pair, seed).parameters())
        found += ["full"] if weights <= FULL_LIMIT and not pair.options else []
        found += [] if pair.options else ["laplace, all weights"]
    if any(pair.name.startswith(name) for name in TRAINED_ON):
        found.append("function space")
    return found


def measured(pair: Pair, seed: int, name: str) -> dict[str, Any]:
    """One row: scores, and what the fit took."""
    model, split = trained(pair, seed), pair.split(seed)
    if name == PLAIN:
        return plain_scores(model, split.train, split.test)
    if name == TEMPERED:
        return tempered_scores(model, split.test)
    if name in LAPLACE:
        seconds, row = timed(partial(laplace_scores, model, split, LAPLACE[name]))
        return row | {"seconds": seconds}
    options = {**VARIANTS[name], **pair.options}
    if split.classes == 1:
        options["likelihood"] = "regression"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting, posterior = timed(lambda: uq.fit(model, loader(split.train), progress=False, **options))
        if name == LEFT_OUT:
            posterior = uq.tune(
                posterior, loader(split.train), criterion="leave_one_out", seed=seed, progress=False
            )
        predictor = uq.wrap(model, posterior)
        predicting, prediction = timed(lambda: predicted(predictor, split.test.inputs))
    return prediction_scores(prediction, split.test) | {
        "fit, s": fitting,
        "prediction, s": predicting,
        "head": predictor.head,
        "temperature": posterior.temperature,
        "scale": posterior.scale,
        "prior precision": posterior.prior_precision,
        "found": {key: str(value) for key, value in posterior.history.tuning.items()},
        "warnings": sorted({str(warning.message)[:300] for warning in caught}),
    }


def rows_of(
    rows: Rows, pairs: Sequence[Pair], seeds: Sequence[int] = SEEDS, only: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """All rows of these pairs, as they are there."""
    for pair in pairs:
        for seed in seeds:
            try:
                names = wanted(pair, seed)
            except ImportError as error:
                rows.missing[pair.name] = f"{pair.name} is left out because {error.name} is not installed"
                break
            for name in names:
                if only is not None and name not in only:
                    continue
                key = {"study": "harm", "pair": pair.name, "seed": seed, "row": name}
                library = name in VARIANTS
                row = rows.row(key, partial(measured, pair, seed, name), library)
                if row is not None:
                    yield key | row


def tests_of(pair: Pair) -> int:
    """Number of test inputs of a pair."""
    return len(pair.split(0).test.targets)


def summary(found: Iterable[Mapping[str, Any]], pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Means over the seeds by pair and row, with what is worse than allowed under ``"worse"``; a row that failed with
    one seed has failed.
    """
    collected: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in found:
        collected.setdefault(row["pair"], {}).setdefault(row["row"], []).append(row)
    result: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        if PLAIN not in collected.get(pair.name, {}):
            continue
        lines: dict[str, Any] = {}
        for name, seeds in collected[pair.name].items():
            errors = [row["error"] for row in seeds if "error" in row]
            if errors:
                lines[name] = {"error": errors[0], "worse": ["error"]}
                continue
            line = averaged(seeds)
            known = {row["seed"] for row in seeds}  # while a run is under way, some are missing
            own = averaged([row for row in collected[pair.name][PLAIN] if row["seed"] in known])
            line["worse"] = harm(own, line, tests_of(pair))
            line["seeds"] = len(seeds)
            lines[name] = line
        result[pair.name] = lines
    return result


MEASURES = ("accuracy", "NLL", "ECE")


def tables(found: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables in Markdown."""
    classifiers = [pair for pair in CLASSIFIERS if pair.name in found]
    regressors = [pair for pair in REGRESSORS if pair.name in found]
    parts = [
        "### Classifiers\n",
        _pairs_table(found, classifiers, MEASURES),
        "\n### Regression\n",
        _pairs_table(found, regressors, ("RMSE", "NLL", "coverage")),
        "\n### Every method and every peer\n",
        _methods_table(found, classifiers, regressors),
        "\n### What did harm\n",
        _harm_table(found),
    ]
    return "\n".join(parts)


def _pairs_table(found: Mapping[str, Any], pairs: Sequence[Pair], measures: Sequence[str]) -> str:
    """A line a pair: the network alone and the default, beside what others make of the NLL."""
    others = [TEMPERED, LEFT_OUT, *LAPLACE] if "ECE" in measures else [LEFT_OUT, *LAPLACE]
    header = ["pair", "", *(f"{m}, network" for m in measures), *measures, "harm"]
    header += [f"NLL, {name}" for name in others]
    lines: list[list[str]] = []
    for pair in pairs:
        row = found[pair.name]
        own = row.get(OURS, {})
        line = [pair.name, "chooses" if pair.chooses else "reported"]
        line += [cell(row[PLAIN].get(measure)) for measure in measures]
        line += [cell(own.get(measure)) for measure in measures]
        line.append(", ".join(own["worse"]) or "no" if "worse" in own else "-")
        line += [cell(row.get(name, {}).get("NLL")) for name in others]
        lines.append(line)
    return markdown([header, *lines])


def cell(value: float | None, digits: int = 3) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _methods_table(found: Mapping[str, Any], classifiers: Sequence[Pair], regressors: Sequence[Pair]) -> str:
    """A line a method: in how many pairs it does harm, and mean NLLs over the pairs that it was run on."""
    header = ["row", "pairs", "unharmed", "NLL", "NLL, network", "NLL, fit and wrap", "ECE", "ECE, network"]
    lines: list[list[str]] = []
    for pairs, kind in ((classifiers, ""), (regressors, ", regression")):
        names = dict.fromkeys(name for pair in pairs for name in found[pair.name])
        for name in names:
            rows = [found[pair.name] for pair in pairs if name in found[pair.name]]
            known = [row for row in rows if "error" not in row[name] and "NLL" in row.get(OURS, {})]
            unharmed = sum(not row[name]["worse"] for row in rows)
            line = [f"{name}{kind}", str(len(rows)), str(unharmed)]
            for one, measure in (
                (name, "NLL"),
                (PLAIN, "NLL"),
                (OURS, "NLL"),
                (name, "ECE"),
                (PLAIN, "ECE"),
            ):
                values = [row[one].get(measure) for row in known]
                line.append(cell(mean(values)) if values and None not in values else "-")
            lines.append(line)
    return markdown([header, *lines])


def _harm_table(found: Mapping[str, Any]) -> str:
    """Each pair and row of this library that is worse than allowed, with the figures."""
    lines: list[list[str]] = []
    for pair, rows in found.items():
        for name in VARIANTS:
            row = rows.get(name)
            if row is None or not row["worse"]:
                continue
            if "error" in row:
                lines.append([pair, name, row["error"][:150]])
                continue
            figures = [f"{m} {cell(row[m], 4)} (network {cell(rows[PLAIN][m], 4)})" for m in row["worse"]]
            lines.append([pair, name, ", ".join(figures)])
    return markdown([["pair", "row", "worse"], *lines]) if lines else "Nothing.\n"
