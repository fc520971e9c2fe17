"""`defaults.py --choose`: one setting after the other in place of the default, on the networks that choose and on the
others.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from _cache import Rows
from _foreign import far_rows, foreign_pictures
from _harm import markdown
from _novelty import BOTH, aurocs, own_scores
from _scored import outputs, plain_scores, predicted, prediction_scores, timed
from _zoo import CLASSIFIERS, Pair, loader, trained
from torch import Tensor, nn

import posthoc_uq as uq

TEST, FOREIGN = 600, 100
"""Test inputs, and foreign ones of every kind."""
CHOOSING = (
    "digits, mlp relu",
    "wine, mlp gelu",
    "cancer, mlp relu",
    "iris, mlp relu",
    "digits 28, lenet",
    "fashion 1000, cnn",
    "fashion 3000, resnet",
    "fashion 3000, vit",
)
REPORTED = (
    "digits, mlp tanh",
    "cells, mlp relu",
    "moons, mlp relu",
    "mixture, mlp gelu",
    "fashion 300, strided",
    "digits 28, mlp tanh",
    "digits 28, resnet",
    "fashion 1000, recipe cnn",
)


@dataclass(frozen=True)
class Setting:
    """What differs from the defaults.

    Attributes:
        fit: options of `uq.fit`.
        residual: residual weight; None for the default.
        tune: options of ``uq.tune(..., criterion="faithful")``; None to leave what the fit found.
        smoothing: of the novelty.
    """

    fit: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    residual: float | None = None
    tune: dict[str, Any] | None = None
    smoothing: float | None = None


SETTINGS: dict[str, Setting] = {
    "default": Setting(),
    **{
        f"budget {b:g}": Setting(tune={"divergence": b})
        for b in (0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1)
    },
    **{
        f"budget {b:g}, matched temperature": Setting(tune={"divergence": b, "temperature": True})
        for b in (0.003, 0.01, 0.03)
    },
    "drawn weights": Setting(tune={"head": "sampling"}),
    "moments": Setting(tune={"head": "moments"}),
    **{
        f"{correction}, residual weight {weight:g}": Setting({"correction": correction}, weight, {})
        for correction in ("rescale", "clamp", "none")
        for weight in ((0.0, 0.1, 1.0) if correction != "none" else (0.0,))
    },
    **{f"rank {rank}": Setting({"rank": rank}) for rank in (20, 300)},
    "last layer": Setting({"layers": "last"}),
    "one drawn label": Setting({"fisher": "mc"}),
    "exact Fisher": Setting({"fisher": "exact"}),
    **{method.upper(): Setting({"method": method}) for method in ("efb", "kfac", "diag")},
    **{f"smoothing {s:g}": Setting(smoothing=s) for s in (1e-4, 1e-3, 1e-2, 1e-1)},
}


def chosen_pairs(chooses: bool) -> list[Pair]:
    """The pairs of one of the two tables."""
    names = CHOOSING if chooses else REPORTED
    return [next(pair for pair in CLASSIFIERS if pair.name.startswith(name)) for name in names]


class Fits:
    """The last posterior, for settings that share their fit."""

    def __init__(self) -> None:
        self._key: Any = None
        self._found: tuple[float, uq.Posterior, dict[str, Any]] | None = None

    def posterior(
        self, name: str, seed: int, network: Callable[[], nn.Module], data: Any, options: dict[str, Any]
    ) -> tuple[float, uq.Posterior]:
        """Seconds of the fit and the posterior with the settings that the fit found.

        Args:
            name: of the network, which with the seed and the options tells one fit from another.
            seed: see above.
            network: gives it.
            data: a loader of what it is fitted on.
            options: of `uq.fit`.
        """
        key = (name, seed, repr(sorted(options.items())))
        if self._found is None or self._key != key:
            model = network()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds, posterior = timed(lambda: uq.fit(model, data, progress=False, **options))
            kept = {
                name: getattr(posterior, name)
                for name in ("prior_precision", "temperature", "scale", "residual_weight")
            }
            self._key, self._found = key, (seconds, posterior, kept | {"head": dict(posterior.history.head)})
        seconds, posterior, kept = self._found
        for name, value in kept.items():
            if name == "head":
                posterior.history.head = dict(value)
            else:
                setattr(posterior, name, value)
        return seconds, posterior


FITS = Fits()


def set_up(posterior: uq.Posterior, setting: Setting, data: Any) -> uq.Predictor:
    """The predictor of a posterior whose residual weight and prior precision are those of a setting.

    Args:
        posterior: as its fit left it.
        setting: see above.
        data: a loader of training inputs.
    """
    assert posterior.model is not None
    if setting.residual is not None:
        posterior.residual_weight = setting.residual
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting.tune is not None:
            posterior.temperature = 1.0
            options = {"head": "linearized", **setting.tune}
            uq.tune(posterior, data, criterion="faithful", progress=False, **options)
        return uq.wrap(posterior.model, posterior)


def setting_aurocs(
    predictor: uq.Predictor, setting: Setting, test: Tensor, foreign: Mapping[str, Tensor]
) -> dict[str, float]:
    """AUROC by score, the mean over the kinds of foreign inputs."""

    def scores(inputs: Tensor) -> dict[str, Tensor]:
        found = own_scores(predictor.model, predictor, inputs, ())
        parts = [predictor.novelty(batch, smoothing=setting.smoothing) for batch in inputs.split(100)]
        return found | {"novelty": torch.cat(parts)}

    found = aurocs(scores, test, foreign, [("entropy", "novelty")])
    return {name: mean(kinds.values()) for name, kinds in found.items()}


def measured(pair: Pair, seed: int, setting: Setting) -> dict[str, Any]:
    """A row: quality, its losses against the network alone, AUROCs, bytes and times."""
    split = pair.split(seed)
    test = split.test.first(TEST)
    options = {**setting.fit, **pair.options}
    fitting, posterior = FITS.posterior(
        pair.name, seed, lambda: trained(pair, seed), loader(split.train), options
    )
    predictor = set_up(posterior, setting, loader(split.train))
    predicting, prediction = timed(lambda: predicted(predictor, test.inputs))
    plain, _ = timed(lambda: outputs(predictor.model, test.inputs))
    row = prediction_scores(prediction, test)
    alone = plain_scores(predictor.model, split.train, test)
    pictures = split.train.inputs.ndim == 4
    foreign = foreign_pictures(pair.data, FOREIGN) if pictures else far_rows(split.train.inputs, FOREIGN)
    return {
        "NLL": row["NLL"] - alone["NLL"],
        "accuracy": row["accuracy"] - alone["accuracy"],
        "ECE": row["ECE"] - alone["ECE"],
        "AUROC": setting_aurocs(predictor, setting, test.inputs, foreign),
        "bytes": file_bytes(posterior),
        "fit, s": fitting,
        "passes": predicting / plain,
    }


def file_bytes(posterior: uq.Posterior) -> int:
    """Size of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.h5"
        uq.save(posterior, path)
        return path.stat().st_size


def rows_of(
    rows: Rows, seeds: Sequence[int], only: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """All rows, as they are there: the choosing networks first."""
    for chooses in (True, False):
        for pair in chosen_pairs(chooses):
            if names is not None and not any(name in pair.name for name in names):
                continue
            for seed in seeds:
                for name, setting in SETTINGS.items():
                    if only is not None and name not in only:
                        continue
                    key = {"study": "choose", "pair": pair.name, "seed": seed, "row": name}
                    key |= {"setting": asdict(setting), "test": TEST, "foreign": FOREIGN}
                    row = rows.row(key, partial(measured, pair, seed, setting))
                    if row is not None:
                        yield key | row


AUROCS = ("entropy", "mutual information", "novelty", BOTH)


def tables(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: medians over the choosing networks, then over the others."""
    parts: list[str] = []
    for chooses, title in ((True, "Networks that choose"), (False, "Networks that are only reported")):
        names = [pair.name for pair in chosen_pairs(chooses)]
        own = [row for row in found if row["pair"] in names and "error" not in row]
        if own:
            parts += [f"\n### {title}\n", _table(own)]
    parts += [f"{row['pair']}, {row['row']}: {row['error']}" for row in found if "error" in row]
    return "\n".join(parts)


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the networks, and the greatest loss of each measure, which is what the rule is about."""
    header = ["setting", "networks", "NLL", "most", "ECE", "most", "accuracy", "least"]
    header += [f"AUROC, {name}" for name in AUROCS] + ["kB", "fit, s", "passes"]
    lines: list[list[str]] = []
    for name in SETTINGS:
        rows = [row for row in found if row["row"] == name]
        if not rows:
            continue
        line = [name, str(len({row["pair"] for row in rows}))]
        for measure, worst in (("NLL", max), ("ECE", max), ("accuracy", min)):
            values = _by_pair(rows, measure)
            line += [f"{median(values):+.3f}", f"{worst(values):+.3f}"]
        line += auroc_cells(rows)
        line.append(f"{median(row['bytes'] for row in rows) / 1000:.0f}")
        line.append(f"{median(row['fit, s'] for row in rows):.1f}")
        line.append(f"{median(row['passes'] for row in rows):.0f}")
        lines.append(line)
    return markdown(header, lines)


def auroc_cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The median AUROC of every score over some rows."""
    cells: list[str] = []
    for score in AUROCS:
        values = [row["AUROC"][score] for row in rows if score in row["AUROC"]]
        cells.append(f"{median(values):.3f}" if values else "-")
    return cells


def _by_pair(rows: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """Means over the seeds."""
    collected: dict[str, list[float]] = {}
    for row in rows:
        collected.setdefault(row["pair"], []).append(row[measure])
    return [mean(values) for values in collected.values()]
