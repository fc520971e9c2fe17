"""`evaluate`: predictors on familiar and on foreign data, in one pass over each loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.evaluation.gallery import Gallery, images_of
from posthoc_uq.evaluation.result import FAMILIAR, Evaluation
from posthoc_uq.evaluation.rows import Row, rows_of
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Bar, BatchFunction, BatchReader, batches, check_loader
from posthoc_uq.predictions.base import Prediction, cat
from posthoc_uq.predictions.scores import SCORES
from posthoc_uq.randomness import isolated_random_state

Compared = Predictor | nn.Module | Callable[..., Any]


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
    """Measure how good predictions are, how honest, and how well their uncertainty tells foreign inputs.

    All that is compared sees the same batches, in one pass over each loader, so that a loader may shuffle or augment.
    Models, posteriors and the global random state stay as they are.

    Args:
        predictor: from `wrap`; or a plain model, or a function of a batch that returns logits, means or a prediction;
            or several of these by name, each a row of the tables (the model alone beside its posterior, say).
        loader: data like those of the training, with targets.
        ood_loaders: foreign data by name (targets, if any, are left aside), or one loader.
        likelihood: of what has no posterior; by default that of the first predictor that has one, or classification.
            The noise of a regression named so is that of the first predictor; without one, no density is measured.
        score: the uncertainty by which the examples are picked, one of `posthoc_uq.predictions.scores.SCORES`; by
            default the entropy.
        joint: groups of scores, ``[("entropy", "mutual_information")]``, by which foreign data are told too: by the
            smallest tail probability among the test data, `posthoc_uq.metrics.joint_tail`. Rows that do not know all
            scores of a group have no such number.
        referral_rates: shares of the inputs to refer, for selective prediction.
        bins: of the calibration errors.
        n_examples: images to keep of each kind, for the report.
        class_names: by class index, for the report.
        display: takes one input image (channels, height, width) to colours in [0, 1], for the report; by default each
            image is stretched to that range.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar for each loader.

    Returns:
        An `Evaluation`: print it, or write it with `to_csv`, `to_json` or `report`.

    Raises:
        PosthocUQError: nothing to compare, a loader without targets, or targets that do not fit the predictions.
        NonFiniteError: predictions that are NaN.
    """
    rows = rows_of(predictor, likelihood)
    foreign = _named_loaders(ood_loaders)
    check_loader(loader)
    for one in foreign.values():
        check_loader(one, "loader of foreign inputs")
    if any(not 0 <= rate < 1 for rate in referral_rates):
        raise PosthocUQError(f"referral_rates are shares in [0, 1), not {list(referral_rates)}.")
    if score is not None and score not in SCORES:
        raise PosthocUQError(f"score must be one of {SCORES}, not {score!r}.")
    unknown = [name for names in joint for name in names if name not in SCORES]
    if unknown or any(isinstance(names, str) or not names for names in joint):
        raise PosthocUQError(f"joint holds groups of scores, each of {SCORES}, not {list(joint)!r}.")
    reading = (batch_to_inputs, batch_to_targets, progress)
    chosen = score or "entropy"
    galleries = {
        "most uncertain": Gallery(n_examples, chosen, FAMILIAR),
        "surest mistakes": Gallery(n_examples, chosen, FAMILIAR, largest=False, mistakes_only=True),
    }
    predictions: dict[str, dict[str, Prediction]] = {row.name: {} for row in rows}
    found, targets = _pass(rows, loader, FAMILIAR, list(galleries.values()), *reading)
    if targets is None:
        raise PosthocUQError("evaluate needs targets, and the loader yields inputs alone.")
    for name, prediction in found.items():
        predictions[name][FAMILIAR] = prediction
    for name, one in foreign.items():
        galleries[f"{name}: least uncertain"] = Gallery(n_examples, chosen, name, largest=False)
        own = [galleries[f"{name}: least uncertain"]]
        for row, prediction in _pass(rows, one, name, own, *reading)[0].items():
            predictions[row][name] = prediction
    return Evaluation(
        predictions,
        next(iter(predictions.values()))[FAMILIAR].fitting(targets),
        {row.name: row.predictor for row in rows},
        galleries={name: gallery.examples for name, gallery in galleries.items() if gallery.examples},
        hyperparameters={
            row.name: row.predictor.hyperparameters() for row in rows if row.predictor is not None
        },
        score=score,
        joint=tuple(tuple(names) for names in joint),
        referral_rates=tuple(referral_rates),
        bins=bins,
        class_names=None if class_names is None else list(class_names),
        display=display,
    )


def _named_loaders(loaders: Any) -> dict[str, Iterable[Any]]:
    if loaders is None:
        return {}
    named = cast(
        dict[str, Iterable[Any]], dict(loaders) if isinstance(loaders, Mapping) else {"foreign": loaders}
    )
    if FAMILIAR in named:
        raise PosthocUQError(f"ood_loaders may not be named {FAMILIAR!r}; that is the first loader's name.")
    return {str(name): loader for name, loader in named.items()}


def _pass(
    rows: list[Row],
    loader: Iterable[Any],
    name: str,
    galleries: list[Gallery],
    batch_to_inputs: BatchFunction | None,
    batch_to_targets: BatchFunction | None,
    progress: bool,
) -> tuple[dict[str, Prediction], Tensor | None]:
    """Every row's prediction of a loader, and the targets; the last row picks the examples."""
    reader = BatchReader(rows[0].device, batch_to_inputs, batch_to_targets)
    found: dict[str, list[Prediction]] = {row.name: [] for row in rows}
    targets: list[Tensor] = []
    seen = 0
    with torch.no_grad(), isolated_random_state(), Bar(loader, f"evaluate {name}", progress) as bar:
        for batch in batches(loader, reader):
            for row in rows:
                own = batch if row.device == reader.device else batch.to(row.device)
                found[row.name].append(row.call(own).to("cpu"))
            last = found[rows[-1].name][-1]
            if batch.targets is not None:
                targets.append(batch.targets.cpu())
            labels = targets[-1].flatten() if batch.targets is not None and name == FAMILIAR else None
            for gallery in galleries:
                gallery.offer(images_of(batch.tensors()), last, labels, seen)
            seen += len(last)
            bar.advance(len(last))
    joined = torch.cat(targets) if targets and sum(map(len, targets)) == seen else None
    return {name: cat(parts) for name, parts in found.items()}, joined
