"""`evaluate`: measures predictors on familiar and on foreign data, in one pass over each loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.evaluation.compared import ComparedModel, compared_models
from posthoc_uq.evaluation.gallery import Example, Gallery, images_of
from posthoc_uq.evaluation.measurements import FAMILIAR
from posthoc_uq.evaluation.result import Evaluation
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.interrupts import orderly
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.counted import counted_positions
from posthoc_uq.loaders import Bar, Batch, BatchFunction, BatchReader, batches, check_loader
from posthoc_uq.predictions.base import Prediction, cat
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.positions import PositionPrediction
from posthoc_uq.predictions.scores import SCORES
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.values import COUNT, NATURAL, Number, check_function, one_of, shown

_RATE = Number("a share in [0, 1)", least=0, most=1 - 2**-53)

Compared = Predictor | nn.Module | Callable[..., Any]


@orderly
def evaluate(
    predictor: Compared | Mapping[str, Compared],
    loader: Iterable[Any],
    *,
    ood_loaders: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    likelihood: str | Likelihood | None = None,
    score: str | None = None,
    joint: Sequence[Sequence[str]] = (),
    referral_rates: Sequence[float] = (0.05, 0.1, 0.2, 0.5),
    bins: int = 15,
    n_examples: int = 12,
    class_names: Sequence[str] | None = None,
    display: Callable[[Tensor], Tensor] | None = None,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure how good and how well calibrated predictions are, and how well their uncertainty detects foreign inputs.

    Of outputs with positions only those count whose label is not ignored and that the model's attention mask attends
    to, in the scores of an input and in its referral, too. All compared models see the same batches, in one pass over
    each loader, so that a loader may shuffle or augment.
    Models, posteriors and the global random state stay as they are.

    Args:
        predictor: from `wrap`, a plain model, or a function of a batch that returns logits, means or a prediction; or
            several of these by name, each a row of the tables (the model alone beside its posterior, say).
        loader: data like those of the training, with targets.
        ood_loaders: foreign data by name (targets, if any, are ignored), or one loader.
        likelihood: of models without a posterior; by default that of the first predictor, or classification. If it is
            a name, a regression's noise variance is that of the first predictor; without one, no density is measured.
        score: by which the examples are chosen, one of `posthoc_uq.predictions.scores.SCORES`; by default the entropy.
        joint: groups of scores, ``[("entropy", "mutual_information")]``, that detect foreign data together, by
            `posthoc_uq.metrics.joint_tail`. Rows without one of a group's scores have no such number.
        referral_rates: shares of the inputs to refer, for selective prediction.
        bins: of the calibration errors.
        n_examples: images to keep of each kind, for the report.
        class_names: by class index, for the report.
        display: one input image (channels, height, width) to colours in [0, 1]; by default its values are stretched.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar for each loader.

    Returns:
        An `Evaluation`: print it, or write it with `to_csv`, `to_json` or `report`.

    Raises:
        PosthocUQError: nothing to compare, a loader without targets, or targets that do not fit the predictions.
        NonFiniteError: predictions that are NaN.
    """
    rows, foreign = compared_models(predictor, likelihood), _named_loaders(ood_loaders)
    _check(loader, foreign, score)
    rates = [_RATE("Each of referral_rates", rate) for rate in _listed("referral_rates", referral_rates)]
    groups, bins, n_examples = _groups(joint), COUNT("bins", bins), NATURAL("n_examples", n_examples)
    names = None if class_names is None else _listed("class_names", class_names)
    check_function("display", display, "from an image to its colours")
    reading = _Reading(batch_to_inputs, batch_to_targets, progress)
    predictions, targets, galleries = _predict(rows, loader, foreign, reading, score, n_examples)
    predictors = {row.name: row.predictor for row in rows}
    settings = {
        name: row_predictor.hyperparameters()
        for name, row_predictor in predictors.items()
        if row_predictor is not None
    }
    measured = predictions, targets, predictors, galleries
    return Evaluation(*measured, score, tuple(rates), bins, names, display, settings, groups)


class _Reading(NamedTuple):
    """How batches are read, and whether a bar is shown."""

    batch_to_inputs: BatchFunction | None
    batch_to_targets: BatchFunction | None
    progress: bool


def _check(
    loader: Iterable[Any],
    foreign: Mapping[str, Iterable[Any]],
    score: str | None,
) -> None:
    check_loader(loader)
    for foreign_loader in foreign.values():
        check_loader(foreign_loader, "loader of foreign inputs")
    if score is not None:
        one_of("score", score, SCORES)


def _groups(joint: Any) -> tuple[tuple[str, ...], ...]:
    """The groups of scores that are used together."""
    groups = [
        group if isinstance(group, str) else _listed("Each group of joint", group)
        for group in _listed("joint", joint)
    ]
    if any(isinstance(group, str) or not group or any(n not in SCORES for n in group) for group in groups):
        raise PosthocUQError(f"joint holds groups of scores, each of {SCORES}, not {groups!r}.")
    return tuple(map(tuple, groups))


def _listed(name: str, value: Any) -> list[Any]:
    """A list, tuple or array as a list."""
    if (
        isinstance(value, (str, bytes, Mapping))
        or not isinstance(value, Iterable)
        or getattr(value, "ndim", 1) == 0
    ):
        raise PosthocUQError(f"{name} must be a list, not {shown(value)}.")
    return list(cast(Iterable[Any], value))


def _named_loaders(loaders: Any) -> dict[str, Iterable[Any]]:
    if loaders is None:
        return {}
    named = cast(
        dict[str, Iterable[Any]], dict(loaders) if isinstance(loaders, Mapping) else {"foreign": loaders}
    )
    if FAMILIAR in named:
        raise PosthocUQError(f"ood_loaders may not be named {FAMILIAR!r}; that is the first loader's name.")
    return {str(name): loader for name, loader in named.items()}


def _predict(
    rows: list[ComparedModel],
    loader: Iterable[Any],
    foreign: Mapping[str, Iterable[Any]],
    reading: _Reading,
    score: str | None,
    n_examples: int,
) -> tuple[dict[str, dict[str, Prediction]], Tensor, dict[str, list[Example]]]:
    """Predictions by row and data set, the targets of the test data, and the examples by title."""
    score = score or "entropy"
    galleries = {
        "most uncertain": Gallery(n_examples, score, FAMILIAR),
        "surest mistakes": Gallery(n_examples, score, FAMILIAR, largest=False, mistakes_only=True),
    }
    familiar, targets = _pass(rows, loader, FAMILIAR, list(galleries.values()), reading)
    if targets is None:
        raise PosthocUQError("evaluate needs targets, and the loader yields inputs alone.")
    predictions = {row.name: {FAMILIAR: familiar[row.name]} for row in rows}
    for name, foreign_loader in foreign.items():
        gallery = galleries[f"{name}: least uncertain"] = Gallery(n_examples, score, name, largest=False)
        for row, prediction in _pass(rows, foreign_loader, name, [gallery], reading)[0].items():
            predictions[row][name] = prediction
    examples = {title: gallery.examples for title, gallery in galleries.items() if gallery.examples}
    return predictions, familiar[rows[0].name].fitting(targets), examples


def _pass(
    rows: list[ComparedModel], loader: Iterable[Any], name: str, galleries: list[Gallery], reading: _Reading
) -> tuple[dict[str, Prediction], Tensor | None]:
    """Every row's prediction of a loader, and the targets; examples are chosen by the last row."""
    reader = BatchReader(
        rows[0].device,
        reading.batch_to_inputs,
        reading.batch_to_targets,
        dtype=rows[0].dtype,
        names=rows[0].argument_names,
    )
    parts: dict[str, list[Prediction]] = {row.name: [] for row in rows}
    targets: list[Tensor] = []
    seen = 0
    with torch.no_grad(), isolated_random_state(), Bar(loader, f"evaluate {name}", reading.progress) as bar:
        for batch in batches(loader, reader):
            for row in rows:
                moved = batch if row.device == reader.device else batch.to(row.device)
                parts[row.name].append(_counting(row.call(moved).to("cpu"), batch))
            last = parts[rows[-1].name][-1]
            if batch.targets is not None:
                targets.append(batch.targets.cpu())
            labels = _labels(last, targets[-1]) if batch.targets is not None and name == FAMILIAR else None
            for gallery in galleries:
                gallery.offer(images_of(batch.tensors()), last, labels, seen)
            seen += len(last)
            bar.advance(len(last))
    joined = torch.cat(targets) if targets and sum(map(len, targets)) == seen else None
    return {row: cat(predictions) for row, predictions in parts.items()}, joined


def _counting(prediction: Prediction, batch: Batch) -> Prediction:
    """The prediction, in whose numbers of an input only positions count that labels or the attention mask leave in; of
    an input without any, all of them.
    """
    if not isinstance(prediction, PositionPrediction) or prediction.mask is not None:
        return prediction
    counted = counted_positions(prediction.layout, prediction.outputs_mean, batch)
    counted = counted | ~counted.any(1, keepdim=True)
    if bool(counted.all()):
        return prediction
    return prediction.masked(counted.reshape(len(prediction), *prediction.positions))


def _labels(prediction: Prediction, targets: Tensor) -> Tensor:
    """The labels ``(inputs,)`` of a batch, for the images worth a look."""
    return (prediction.labels(targets) if isinstance(prediction, ClassPrediction) else targets).flatten()
