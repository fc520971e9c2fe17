"""Predictions as plain values: what a client gets, and the row that monitoring keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.errors import NotAnsweredError, PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import referral_reasons, referral_tail
from posthoc_uq.monitoring.records import SCORES
from posthoc_uq.posteriors.referral import thresholds_of
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.multilabel import MultilabelPrediction
from posthoc_uq.predictions.positions import PositionPrediction


@dataclass(frozen=True)
class Form:
    """How predictions are put into words.

    Attributes:
        names: of the classes or labels, or None for their numbers.
        top_k: how many of them are named.
        level: of intervals.
        refers: whether the posterior's thresholds apply.
    """

    names: Sequence[str] | None
    top_k: int
    level: float
    refers: bool


@dataclass(frozen=True)
class Answer:
    """One input's.

    Attributes:
        plain: for the client.
        row: for monitoring, by `posthoc_uq.monitoring.records.COLUMNS`.
    """

    plain: dict[str, Any]
    row: dict[str, Any]


def answers_of(predictor: Predictor, prediction: Prediction, form: Form) -> list[Answer]:
    """One answer for each input of a prediction.

    Args:
        predictor: made it.
        prediction: on the CPU.
        form: see there.

    Raises:
        PosthocUQError: there are other names than classes.
    """
    outputs = (
        prediction.probs.shape[1] if isinstance(prediction, MultilabelPrediction) else prediction.classes
    )
    if form.names is not None and outputs is not None and len(form.names) != outputs:
        raise PosthocUQError(f"There are {len(form.names)} class names, and the model has {outputs} outputs.")
    said = _said(prediction, form)
    shown = (*SCORES[:3], *thresholds_of(predictor.posterior.history.referral))
    known = {name: values.tolist() for name, values in prediction.scores().items()}
    reasons: Mapping[str, list[bool]] = {}
    tails: list[float] | None = None
    if form.refers:
        reasons = {name: flags.tolist() for name, flags in referral_reasons(predictor, prediction).items()}
        if "scores" in predictor.posterior.history.referral:
            tails = referral_tail(predictor, prediction).tolist()
    answers: list[Answer] = []
    for index, words in enumerate(said):
        scores = {name: _finite(known[name][index]) for name in dict.fromkeys(shown) if name in known}
        referring = [name for name, flags in reasons.items() if flags[index]]
        judged: dict[str, Any] = {"referred": bool(referring) if form.refers else None, "reasons": referring}
        if tails is not None:
            judged["tail"] = _finite(tails[index])
        watched = {name: _finite(known[name][index]) for name in SCORES if name in known}
        row = {
            **_first(words),
            **watched,
            "flag": judged["referred"],
            "reason": "+".join(referring),
            "tail": judged.get("tail"),
        }
        answers.append(Answer({**words, **scores, **judged}, row))
    return answers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _first(words: Mapping[str, Any]) -> dict[str, Any]:
    """The first label, or the mean, as the row has it."""
    if words.get("top"):
        first = words["top"][0]
        return {"label_1": first["label"], "probability_1": first["probability"]}
    if words.get("shares"):
        return {"label_1": words["shares"][0]["label"]}
    mean = words.get("mean")
    return {"mean": " ".join(f"{v:.6g}" for v in mean) if isinstance(mean, list) else mean}


def _said(prediction: Prediction, form: Form) -> list[dict[str, Any]]:
    """For each input what was predicted."""
    if isinstance(prediction, PositionPrediction):
        return _positions(prediction, form)
    if isinstance(prediction, ClassPrediction):
        tops = _tops(prediction.top_k(min(form.top_k, prediction.probs.shape[1])), form)
        return [{"prediction": top[0]["label"], "index": top[0]["index"], "top": top} for top in tops]
    if isinstance(prediction, MultilabelPrediction):
        tops = _tops(prediction.top_k(min(form.top_k, prediction.probs.shape[1])), form)
        had = [[_name(i, form) for i, p in enumerate(row) if p >= 0.5] for row in prediction.probs.tolist()]
        return [{"prediction": labels, "top": top} for labels, top in zip(had, tops, strict=True)]
    return _values(prediction, form)


def _name(index: int, form: Form) -> str:
    return str(index) if form.names is None else str(form.names[index])


def _tops(found: Any, form: Form) -> list[list[dict[str, Any]]]:
    return [
        [
            {"label": _name(index, form), "index": index, "probability": probability}
            for index, probability in zip(indices, probabilities, strict=True)
        ]
        for indices, probabilities in zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    ]


def _positions(prediction: PositionPrediction, form: Form) -> list[dict[str, Any]]:
    """The classes with the largest share of an input's positions."""
    said: list[dict[str, Any]] = []
    for classes in prediction.predicted().flatten(1):
        shares = torch.bincount(classes, minlength=prediction.classes) / max(1, len(classes))
        order = shares.argsort(descending=True, stable=True)[: form.top_k].tolist()
        said.append(
            {"shares": [{"label": _name(i, form), "index": i, "share": float(shares[i])} for i in order]}
        )
    return said


def _values(prediction: Prediction, form: Form) -> list[dict[str, Any]]:
    values = cast(Any, prediction)
    columns: dict[str, Tensor | None] = {
        "mean": _known(lambda: values.mean),
        "standard_deviation": _known(lambda: values.standard_deviation),
        "epistemic_sd": _known(lambda: values.epistemic_variance.sqrt()),
    }
    interval: Any = _known(lambda: values.interval(form.level))
    if interval is not None:
        columns["lower"], columns["upper"] = interval
    lists = {name: column.tolist() for name, column in columns.items() if column is not None}
    level = {"level": form.level} if interval is not None else {}
    return [
        {**{name: column[index] for name, column in lists.items()}, **level}
        for index in range(len(prediction))
    ]


def _known(get: Callable[[], Any]) -> Any:
    """None where a likelihood of the user's does not tell."""
    try:
        return get()
    except (NotAnsweredError, AttributeError):
        return None
