"""A posterior's report: a table of layers and a few lines about how it was found."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Any, cast

from posthoc_uq.core.errors import printable
from posthoc_uq.core.outputs import OutputChoice
from posthoc_uq.core.tables import cell_text, text_table
from posthoc_uq.likelihoods.conformal import (
    INTERVAL_KINDS,
    ConformalScores,
    HeldOutTargets,
    rounded_down,
    scarcest_of,
)
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.history import ChangesRecord, History
from posthoc_uq.posteriors.settings import HYPERPARAMETERS, same_settings

_SECONDS = "seconds, "  # begins the names of timings
_MAX_NAMES = 8  # that a line lists
_MOVED = 2  # classes that are named of those with the largest shifts, up and down
# The names of the values that are read after a fit, in a few lines.
_BRIEF = ("method", "likelihood", "layers", "samples", "prior precision", "noise variance")
# What columns of the table mean that every posterior has; blocks explain their own.
COLUMNS = {
    "shape": "groups x outputs x inputs of the layer's weights; a bias counts as one more input",
    "prior precision": "of the layer's weights",
    "numbers, bytes": "what the posterior stores of the layer",
}


def timings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """How long each part of a fit took, by its name, of what is recorded of the fit."""
    return {name[len(_SECONDS) :]: facts[name] for name in facts if name.startswith(_SECONDS)}


class Report(str):
    """What `Posterior.report` gives: a text, which explains its columns, and the values that it was made of.

    Some of the lines above the table:

    * ``scale``: how many samples the statistics count as, the number of training samples unless tuned. ``prior
      precision``: of every weight, or per layer, with how it was chosen. ``residual weight``, of ``"inf"`` alone: of
      the part of the exact diagonal that its low rank leaves. ``temperature``: logits are divided by it;
      the ``class shift`` is added after that, a number for each class.
    * ``fisher``: which labels the statistics were taken with, as the option of `fit`.
    * ``layers caught by``: which of two ways gave a layer's gradients. Both give the same.

    Attributes:
        summary: plain values: method, numbers, bytes, hyperparameters, timings.
        rows: one dictionary per layer.
        deterministic: parameters without a posterior, each with the reason.
        tuning: how each hyperparameter was chosen.
        columns: what the columns mean that the kinds of blocks add.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    deterministic: dict[str, str]
    tuning: dict[str, str]
    columns: dict[str, str]

    def __new__(
        cls,
        summary: dict[str, Any],
        rows: list[dict[str, Any]],
        deterministic: dict[str, str],
        tuning: dict[str, str],
        columns: dict[str, str],
    ) -> Report:
        """The text of these values."""
        lines = [printable(f"{name}: {text}") for name, text in _lines(summary, tuning).items()]
        shown = list(dict.fromkeys(key for row in rows for key in row))
        if summary.get("prior precision") != "per layer":
            shown = [column for column in shown if column != "prior precision"]
        lines.append(text_table(shown, [[row.get(column) for column in shown] for row in rows]))
        explained = COLUMNS | columns
        lines += [f"  {name}: {text}" for name, text in explained.items() if name.split(", ")[0] in shown]
        report = super().__new__(cls, "\n".join(lines + _without_posterior(deterministic)))
        report.summary, report.rows, report.deterministic = summary, rows, deterministic
        report.tuning, report.columns = tuning, columns
        return report

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies and pickles
        return self.summary, self.rows, self.deterministic, self.tuning, self.columns

    def __repr__(self) -> str:
        return str(self)

    def brief(self) -> str:
        """A few lines: what was fitted, the prior, the noise, and what has no posterior."""
        known = _lines(self.summary, self.tuning)
        lines = [printable(f"{name}: {known[name]}") for name in _BRIEF if name in known]
        return "\n".join(lines + _without_posterior(self.deterministic))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, fit for JSON."""
        return {
            "summary": self.summary,
            "layers": self.rows,
            "deterministic": self.deterministic,
            "tuning": self.tuning,
        }


def _without_posterior(deterministic: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in deterministic.items():
        reasons.setdefault(reason, []).append(name)
    lines: list[str] = []
    for reason, names in reasons.items():
        shown = ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
        lines.append(printable(f"deterministic ({reason}): {shown}"))
    return lines


def _lines(summary: Mapping[str, Any], tuning: Mapping[str, str]) -> dict[str, str]:
    """Name to value in words, with how it was chosen, and all timings as one."""
    seconds = timings(summary)
    hidden = {*(_SECONDS + name for name in seconds), "fisher chosen"}
    lines = {name: _shown(value) for name, value in summary.items() if name not in hidden}
    lines |= described_by_class(summary, cast(str, summary.get("likelihood")))
    if "fisher chosen" in summary and "fisher" in lines:
        lines["fisher"] += f", chosen by {summary['fisher chosen']!r}"
    if seconds:
        lines["seconds"] = ", ".join(f"{name} {_shown(value)}" for name, value in seconds.items())
    for name, how in tuning.items():
        lines[name] = f"{lines[name]}, {how}" if name in lines else how
    return lines


def described_by_class(shown: Mapping[str, Any], likelihood: str) -> dict[str, str]:
    """Label to text of the hyperparameters with a number for each class, of those that are shown: the largest shifts
    down and up, the smallest scale and the largest.

    Args:
        shown: as `Posterior.reported` gives them.
        likelihood: its name.
    """
    noun, texts = "label" if likelihood == "multilabel" else "class", dict[str, str]()
    for about in HYPERPARAMETERS.values():
        values: list[float] = shown.get(about.label, []) if about.by_class else []
        if values:
            one = len(values) == 1  # a single logit, of class 1
            names = [f"{noun} {1 if one else place}" for place in range(len(values))]
            order = sorted(range(len(values)), key=values.__getitem__)
            if about.label == HYPERPARAMETERS["class_scale"].label:
                ends = (order[0], order[-1])[: len(values)]
                told = " to ".join(f"{cell_text(values[end])} ({names[end]})" for end in ends)
            else:
                down = [each for each in order[:_MOVED] if values[each] < 0]
                up = [each for each in order[: -_MOVED - 1 : -1] if values[each] > 0]
                sides = [(names[e], "up" if values[e] > 0 else "down", abs(values[e])) for e in [*down, *up]]
                told = ", ".join(f"{name} {side} by {size:.3g}" for name, side, size in sides) or "0"
            hides = len(values) > 2 * _MOVED
            texts[about.label] = f"{told} ({len(values)} in all)" if hides else told
    return texts


def _shown(value: Any) -> str:
    """A value in words; of several numbers, such as one per epoch, only the first and the last; of names the first."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in cast(list[Any], value)):
        names = cast(list[str], value)
        shown = ", ".join(names[:_MAX_NAMES])
        return shown + (f", ... ({len(names)} in all)" if len(names) > _MAX_NAMES else "")
    if isinstance(value, list) and value and all(isinstance(v, float) for v in cast(list[Any], value)):
        first, *others = (cell_text(v) for v in cast(list[Any], value))
        return f"{first} ... {others[-1]} ({len(others) + 1} values)" if others else first
    return cell_text(value)


def described_changes(changes: ChangesRecord) -> str:
    """What came in and went out since the fit, in words."""
    parts: list[str] = []
    for count, samples, word, verb in (
        (changes.updates, changes.added, "update", "added"),
        (changes.removals, changes.removed, "removal", "took out"),
    ):
        if count:
            parts.append(f"{count} {word}{'' if count == 1 else 's'} {verb} {samples} samples")
    if not changes.moved:
        parts.append("the mean is still the network's weights")
    elif changes.moved < changes.updates + changes.removals:
        parts.append(f"the mean moved in {changes.moved} of them")
    else:
        parts.append("the mean moved with them")
    if changes.outside is not None:
        before = "" if changes.outside_before is None else f" ({changes.outside_before:.1%} of that before)"
        parts.append(
            f"{changes.outside:.1%} of the last update's Fisher is outside of the kept bases{before}"
        )
    return ", ".join([*parts, f"digest {changes.digest[:12]}"])


def described_promises(promises: ConformalScores, settings: Mapping[str, Any]) -> str:
    """What the predictions of a posterior with these settings promise by held-out scores, in words."""
    if not same_settings(promises.valid_at, settings):
        return f"void: those of {promises.samples:,} held-out samples are of other hyperparameters; calibrate again"
    parts = [_described_targets(promises.targets)] if promises.targets is not None else []
    for name, of_head in (promises.heads or {}).items():
        if of_head.targets is not None:
            parts.append(f"of {name} {_described_targets(of_head.targets)}")
    parts.append(f"p-values of {', '.join(promises.inputs)}")
    approximately = ", approximately: they tuned it too" if promises.share is None else ""
    at_rates = " at the given class rates" if promises.class_rates is not None else ""
    head = promises.head["head"]
    return f"{'; '.join(parts)}; by {promises.samples:,} held-out samples{at_rates}{approximately}, head {head!r}"


def _described_targets(targets: HeldOutTargets) -> str:
    """What is promised of targets, in words."""
    kind, scores = targets.kind, targets.scores
    what = "intervals" if kind in INTERVAL_KINDS else "sets"
    counts = [score.samples for score in scores]
    scarcest, of = scarcest_of(kind, counts)
    fewest = counts[scarcest]
    level = f"{rounded_down(fewest / (fewest + 1)):g}"
    each = "" if len(scores) == 1 or kind == "quantiles" else f" for each of {len(scores)}"
    if of:
        each += f" ({of} has {fewest:,} sample{'s' * (fewest != 1)}, the fewest)"
    if kind == "positions":
        each = ", which hold at least that share of an input's labels"
    elif targets.by_input is not None:
        each += ", by position and by image"
    return f"{what} by {kind!r} up to a level of {level}{each}"


def described_output(output: OutputChoice) -> str:
    """Which part of what the model returns its outputs are, in words."""
    if output.heads:
        return f"{output} of what the model returns"
    if output.function is not None:
        return f"{output}(...) of what the model returns"
    part = f"[{output}]" if output.name is None else str(output)
    return f"{part} of what the model returns{', found by itself' if output.guessed else ''}"


_TOLD = {
    "row": "the row",
    "mean": "mean over positions",
    "deviation": "mean and deviation over positions",
    "roughness": "mean, deviation and roughness over positions",
    "pixels": "each pixel",
}


def described_novelty(features: FeatureGrams) -> str:
    """How novelty is measured, in words."""
    what = {"outputs": "inputs", "positions": "the inputs of each position"}.get(
        features.source, "pooled inputs"
    )
    grams = "1 Gram" if features.classes == 1 else f"{features.classes} Grams"
    stages = "".join(f", '{stage.layer.name}' ({_TOLD[stage.source]})" for stage in features.stages)
    stages = f"; also by what enters {stages[2:]}" if stages else ""
    return (
        f"by {what} of '{features.layer.name}', {grams} of {features.basis.shape[0]} features, "
        f"{features.factors.shape[2]} directions each, {features.bytes()} bytes, "
        f"smoothing {features.smoothing:g}{stages}"
    )


def described_history(history: History, settings: Mapping[str, Any]) -> dict[str, str]:
    """Label to text of what was tuned, calibrated and changed since the fit, of a posterior with these settings."""
    lines, calibration = dict(history.tuning), history.calibration
    if calibration is not None:
        lines["moments head"] = (
            f"standard deviations times {exp(calibration.alpha):.3g} (power {calibration.beta:.3g}), error left "
            f"{calibration.residual:.0%}, by {calibration.n_mc} draws"
        )
    if history.promises is not None:
        lines["promises"] = described_promises(history.promises, settings)
    if history.changes is not None:
        lines["data since the fit"] = described_changes(history.changes)
    return lines
