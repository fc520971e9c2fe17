"""Whether promises are kept: coverage of sets and intervals, and shares of p-values, over random splits.

    python benchmarks/promises.py                     four tables of classes, eight of values; 200 splits
    python benchmarks/promises.py --tables digits     one of them
    python benchmarks/promises.py --smoke             three small tables, three splits, for the tests

A perceptron is trained and fitted on 60 % of a table, once. In every split half of the other rows go to
`uq.calibrate`, which tunes by one half of them and keeps the scores of the other (of values whose noise
leave-one-out found, of all); the rest are predicted. The band is what a promise of level 1 - a from n scores says of
the mean coverage: from 1 - a to 1 - a + 1 / (n + 1); for sets the upper bound is left out where the most probable class
was added to empty ones. "error" is the standard error over the splits of the mean coverage that the band is of.

Four of the tables have networks that predict the noise of every row beside its mean (`likelihood="heteroscedastic"`).

Beside it stands what the same held-out rows give without a posterior: sets by the network's softmax, and intervals of
constant width. Where `torchcp` or `mapie` is installed, the sets are compared with theirs, class by class, on the same
probabilities.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import torch
from _harness import machine, output_folder, single_threaded, table, write_json
from _sets import Split, split_of
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.likelihoods.conformal import SetScore, class_scores, held_out_scores, quantile, set_of

CLASSES = ("digits", "cancer", "mixture", "moons")
VALUES = ("diabetes", "friedman", "impedance", "linear")
VARYING = ("waves", "boston", "ames", "concrete")
"""Values whose noise the network predicts, too."""
TABLES = (*CLASSES, *VALUES, *VARYING)
LEVELS = (0.8, 0.9, 0.95)
SHARES = (0.05, 0.2)
"""Levels of p-values whose shares are counted."""
SHIFT = 0.7
"""Standard deviation of the noise that shifted inputs have, in standard deviations of the inputs."""
OUTPUT = Path(__file__).resolve().parent / "output"


def trained(split: Split, varying: bool = False, seed: int = 0) -> nn.Module:
    """A perceptron with two hidden layers, trained until it fits its data well; with `varying` noise of means and
    logarithms of variances, and a fifth as long, since it memorises residuals, and with them variances, sooner.
    """
    torch.manual_seed(seed)
    x, y = split.train
    values = y.is_floating_point()
    model = nn.Sequential(
        nn.Linear(x.shape[1], 50),
        nn.ReLU(),
        nn.Linear(50, 50),
        nn.ReLU(),
        nn.Linear(50, 2 if varying else split.classes),
    )
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(30 if varying else 150):
        for rows in torch.randperm(len(x)).split(100):
            outputs = model(x[rows])
            if varying:
                mean, log_variance = outputs.chunk(2, 1)
                loss = nn.functional.gaussian_nll_loss(mean, y[rows], log_variance.exp())
            elif values:
                loss = nn.functional.mse_loss(outputs, y[rows])
            else:
                loss = nn.functional.cross_entropy(outputs, y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def run(name: str, splits: int, rows: int | None = None) -> list[dict[str, Any]]:
    """What came out on one table, with so many held-out rows: a row a level."""
    split, varying = split_of(name, 0), name in VARYING
    model, values = trained(split, varying), split.train.targets.is_floating_point()
    likelihood = "heteroscedastic" if varying else "regression" if values else "classification"
    fitted = uq.fit(model, [split.train], likelihood=likelihood, progress=False)
    x, y = split.test
    found: dict[float, list[dict[str, float]]] = {level: [] for level in LEVELS}
    for seed in range(splits):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held_out, new = order[: len(x) // 2][:rows], order[len(x) // 2 :]
        posterior = uq.calibrate(fitted, [(x[held_out], y[held_out])], seed=seed, progress=False)
        predictor = uq.wrap(model, posterior)
        shifted = x[new] + SHIFT * torch.randn(
            x[new].shape, generator=torch.Generator().manual_seed(1000 + seed)
        )
        predictions = {"familiar": predictor(x[new]), "shifted": predictor(shifted)}
        case, measure = Case(model, predictions, (x, y), held_out, new), _values if values else _classes
        for level in LEVELS:
            found[level].append(measure(case, level))
    return [{"table": name, "level": level, **_summary(rows, level)} for level, rows in found.items()]


def _common(prediction: Any) -> dict[str, float]:
    p = prediction.familiarity()
    return {f"p <= {share}": float((p <= share).double().mean()) for share in SHARES}


class Case(NamedTuple):
    """One split: the network, predictions of familiar and shifted new rows, all data, and the places of both parts."""

    model: nn.Module
    predictions: dict[str, Any]
    data: tuple[Tensor, Tensor]
    held_out: Tensor
    new: Tensor


def _classes(case: Case, level: float) -> dict[str, float]:
    model, predictions, (x, y), held_out, new = case
    row = _common(predictions["familiar"])
    for kind, prediction in predictions.items():
        sets = prediction.set(level)
        row[f"coverage, {kind}"] = float(sets.gather(1, y[new, None]).double().mean())
        row[f"size, {kind}"] = float(sets.sum(1).double().mean())
    (scores,) = predictions["familiar"].promises.targets.scores
    row["n"] = scores.count
    row["coverage with empty sets"] = float(
        predictions["familiar"].set(level, allow_empty=True).gather(1, y[new, None]).double().mean()
    )
    with torch.no_grad():
        softmax = {
            part: model(x[rows]).double().softmax(1) for part, rows in (("held out", held_out), ("new", new))
        }
    for kind in ("lac", "aps", "raps"):
        own = class_scores(softmax["held out"], kind).gather(1, y[held_out, None]).squeeze(1)
        bound = quantile(held_out_scores(own), level)
        sets = set_of(softmax["new"], class_scores(softmax["new"], kind), bound, allow_empty=True)
        row[f"size, softmax {kind}"] = float(sets.sum(1).double().mean())
        for peer, theirs in _others(kind, softmax, y[held_out], level).items():
            row[f"unlike {peer} {kind}"] = float((theirs != sets).double().mean())
    return row


class _Probabilities(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its probabilities."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes

    def fit(self, x: Any, y: Any) -> _Probabilities:
        """There is nothing to be learned."""
        self.classes_ = np.arange(self.classes)
        return self

    def predict_proba(self, x: Any) -> Any:
        """The inputs."""
        return x

    def predict(self, x: Any) -> Any:
        """The most probable class."""
        return x.argmax(1)


def _others(kind: SetScore, softmax: dict[str, Tensor], labels: Tensor, level: float) -> dict[str, Tensor]:
    """The sets of other libraries, of those that are installed, without random numbers."""
    found: dict[str, Tensor] = {}
    if find_spec("torchcp") is not None:
        sys.modules.setdefault("torchsort", Mock())  # of a loss alone, and to be compiled
        from torchcp.classification import score
        from torchcp.classification.predictor import SplitPredictor

        scores = {
            "lac": lambda: score.LAC(score_type="identity"),
            "aps": lambda: score.APS(score_type="identity", randomized=False),
            "raps": lambda: score.RAPS(score_type="identity", randomized=False, penalty=0.01, kreg=5),
        }
        predictor = SplitPredictor(scores[kind]())
        predictor.calculate_threshold(softmax["held out"], labels, 1 - level)
        found["torchcp"] = predictor.predict_with_logits(softmax["new"]).bool()
    if find_spec("mapie") is not None and kind == "lac":
        from mapie.classification import SplitConformalClassifier

        held_out, new = (softmax[part].numpy() for part in ("held out", "new"))
        classifier = _Probabilities(new.shape[1]).fit(None, None)
        conformal = SplitConformalClassifier(classifier, confidence_level=level, prefit=True)
        conformal.conformalize(held_out, labels.numpy())
        found["mapie"] = torch.from_numpy(conformal.predict_set(new)[1][..., 0])
    return found


def _values(case: Case, level: float) -> dict[str, float]:
    model, predictions, (x, y), held_out, new = case
    row = _common(predictions["familiar"])
    for kind, prediction in predictions.items():
        low, high = prediction.interval(level)
        row[f"coverage, {kind}"] = float(((low <= y[new]) & (y[new] <= high)).double().mean())
        row[f"width, {kind}"] = float((high - low).double().mean())
    (scores,) = predictions["familiar"].promises.targets.scores
    row["n"] = scores.count
    with torch.no_grad():
        residuals = (model(x[held_out])[:, :1] - y[held_out]).abs().flatten()
    row["width, constant"] = 2 * quantile(held_out_scores(residuals), level)
    return row


def _summary(rows: Sequence[dict[str, float]], level: float) -> dict[str, Any]:
    count = len(rows)
    values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    means = {key: float(value.mean()) for key, value in values.items()}
    n = means.pop("n")
    judged = values.get("coverage with empty sets", values["coverage, familiar"])  # what the band is of
    error = float(judged.std() / count**0.5) if count > 1 else float("nan")
    return {"n": round(n), "band": f"{level:.3f} to {level + 1 / (n + 1):.3f}", "error": error, **means}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--rows", type=int, help="that are held out; by default half of those that can be")
    parser.add_argument("--output", type=output_folder, default=OUTPUT)
    parser.add_argument(
        "--smoke", action="store_true", help="three small tables, three splits, for the tests"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        options.tables, options.splits = ["moons", "diabetes", "waves"], 3
    options.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with single_threaded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of residuals that networks have memorised
        for name in options.tables:
            results += run(name, options.splits, options.rows)
            write_json(options.output / "promises.json", {"rows": results, "machine": machine()})
    for kind in (CLASSES, VALUES, VARYING):
        if rows := [row for row in results if row["table"] in kind]:
            print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
