"""`calibrate`: what held-out data are for, tuning and promises; or without them, leave-one-out on the training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from posthoc_uq.core.batches import (
    Bar,
    Batch,
    BatchFunction,
    BatchReader,
    batches,
    check_loader,
    check_reusable,
)
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.interrupts import orderly
from posthoc_uq.core.options import Count, Seed, check_option, one_of
from posthoc_uq.core.randomness import isolated_random_state, sample_keys
from posthoc_uq.fitting.faithful import model_of
from posthoc_uq.fitting.leave_one_out import Groups, Initial, LeaveOneOut, calibrate_by_leave_one_out
from posthoc_uq.fitting.tune import has_something_to_tune, tune
from posthoc_uq.fitting.wrap import wrap
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods.conformal import held_out_scores
from posthoc_uq.likelihoods.prediction import Prediction, cat
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import Trials

Share = Annotated[float, Gt(0), Lt(1)]
BY = ("likelihood", "leave_one_out")


@dataclass(frozen=True)
class Calibration:
    """What held-out data were used for; prints itself.

    Attributes:
        trials: of the tuning; None where there was nothing to tune.
        tuned: samples that tuned.
        promised: samples whose scores are kept, which tuned nothing unless `shared`.
        shared: whether the same samples did both, so that promises hold approximately.
    """

    trials: Trials | None
    tuned: int
    promised: int
    shared: bool

    def __str__(self) -> str:
        found = "nothing to tune" if self.trials is None or self.trials.chosen is None else str(self.trials)
        word = "approximate promises" if self.shared else "promises"
        level = self.promised / (self.promised + 1)
        return f"{word} up to a level of {level:.4g}, from {self.promised:,} samples; {self.tuned:,} tuned\n{found}"


@orderly
def calibrate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    criterion: Literal["likelihood", "leave_one_out"] = "likelihood",
    share: float | None = 0.5,
    head: str | None = None,
    initial: Initial | Sequence[Initial] | None = None,
    groups: Groups | None = None,
    initialisations: int = 3,
    seed: int = 0,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Calibration | LeaveOneOut:
    """Calibrate the predictions of a posterior: by held-out data, or by its training data alone.

    ``criterion="likelihood"`` takes held-out data. The seed divides them at random: one part tunes (see `tune`), and
    the scores of the other part are kept with the posterior, so that predictions can promise by split conformal
    prediction, for new data like the held-out ones:

    * ``prediction.set(0.9)``: sets of classes that contain the label with a probability of at least 0.9;
    * ``prediction.interval(0.9)``: intervals of a regression that cover with at least that probability;
    * ``prediction.familiarity()``: p-values of the novelty: at most a share a of inputs like these has one of at most
      a.

    A promise holds on average over held-out and new data, not for every input. Save the posterior afterwards. A change
    of its hyperparameters, data or head makes the promises void.

    ``criterion="leave_one_out"`` takes the training data, where none are held out: the temperature of classes, or the
    noise of a regression, then follows from leave-one-out predictions by the tangent kernel of the untrained network.
    It is for networks that were trained from scratch on these data (of a fine-tuned one pass `initial`), and was found
    right for perceptrons; convolutional networks learn features that this kernel lacks.

    Args:
        posterior: from `fit` or `load`.
        loader: batches with targets, read several times (once for leave-one-out): held-out data, or the training data.
        criterion: see above.
        share: of the held-out samples that tune; None for all of them to tune and to promise, approximately.
        head: that predicts, as in `tune`.
        initial: of leave-one-out: the network before its training as a model or a state dict, or several. Without it
            every module is initialised anew by its `reset_parameters`.
        groups: of leave-one-out: which samples are left out together, in the order of the loader, or a function of a
            batch.
        initialisations: of leave-one-out: untrained networks to average.
        seed: of the division, the draws, the initial weights.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: whether to show bars.
        **options: of `tune`, such as ``noise`` and ``temperature``, and of the head.

    Returns:
        What was found. Printed, it says what was tuned and what can be promised.

    Raises:
        PosthocUQError: no targets, too few or (for leave-one-out) too many data, an untrained network that is not
            known, or options that do not fit.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"calibrate takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    check_loader(loader)
    seed, progress = check_option("seed", seed, Seed), check_option("progress", progress, bool)
    share = check_option("share", share, Share | None)
    reader = BatchReader.of(model_of(posterior), batch_to_inputs, batch_to_targets)
    trial = posterior.trial()
    if one_of("criterion", criterion, BY) == "leave_one_out":
        if head is not None or options:
            names = ["head"] * (head is not None) + list(options)
            raise PosthocUQError(f"Leave-one-out needs no head and no search; leave {', '.join(names)} out.")
        found = calibrate_by_leave_one_out(
            trial,
            loader,
            reader,
            initial=initial,
            groups=groups,
            initialisations=check_option("initialisations", initialisations, Count),
            seed=seed,
            progress=progress,
        )
        posterior.adopt(trial)
        return found
    if initial is not None or groups is not None:
        raise PosthocUQError(
            "initial and groups are for criterion='leave_one_out'; held-out data need neither."
        )
    check_reusable(loader, 4)
    border, tuned, kept = _division(loader, reader, share, seed)
    trials = None
    if has_something_to_tune(trial):
        part = loader if border is None else _Part(loader, reader, border, seed, tunes=True)
        functions = {"batch_to_inputs": batch_to_inputs, "batch_to_targets": batch_to_targets}
        trials = tune(trial, part, head=head, seed=seed, progress=progress, **functions, **options)
    # a search records the head and its options
    predictor = (
        wrap(model_of(trial), trial, head, **options) if trials is None else wrap(model_of(trial), trial)
    )
    others = _Part(loader, reader, border, seed, tunes=False)
    trial.history.promises = _promises(predictor, others, share is None, progress)
    posterior.adopt(trial)
    posterior.warned_heads |= trial.warned_heads
    return Calibration(trials, tuned, kept, share is None)


def _keyed(loader: Iterable[Any], reader: BatchReader, seed: int) -> Iterator[tuple[Batch, Tensor]]:
    """Batches with a hash of each sample's inputs."""
    with isolated_random_state(seed):
        for batch in batches(loader, reader):
            if batch.targets is None:
                raise PosthocUQError("Held-out data need targets, and the loader yields inputs alone.")
            yield batch, sample_keys(batch.tensors(), count_samples(batch), seed).cpu()


def _division(
    loader: Iterable[Any], reader: BatchReader, share: float | None, seed: int
) -> tuple[int | None, int, int]:
    """The largest hash of the samples that tune, their number, and the number of the others. Copies of a sample have
    one hash, so that they are on one side.
    """
    keys = torch.cat([keys for _, keys in _keyed(loader, reader, seed)]).sort().values
    if share is None:
        return None, len(keys), len(keys)
    border = int(keys[max(0, round(share * len(keys)) - 1)])
    tuned = int((keys <= border).sum())
    if tuned == len(keys):
        raise PosthocUQError(
            f"Of {len(keys)} held-out samples none is left to promise by; pass more, or share=None to use all of them "
            f"twice."
        )
    return border, tuned, len(keys) - tuned


class _Part:
    """The samples of a loader that tune, or the others; all of them without a border."""

    def __init__(
        self, loader: Iterable[Any], reader: BatchReader, border: int | None, seed: int, *, tunes: bool
    ) -> None:
        self._loader, self._reader, self._border = loader, reader, border
        self._seed, self._tunes = seed, tunes

    def __iter__(self) -> Iterator[Batch]:
        for batch, keys in _keyed(self._loader, self._reader, self._seed):
            if self._border is None:
                yield batch
                continue
            chosen = (keys <= self._border) == self._tunes
            if bool(chosen.any()):
                yield batch.select(chosen, len(keys))


def _promises(predictor: Predictor, data: _Part, shared: bool, progress: bool) -> dict[str, Any]:
    """The record of the scores of held-out samples."""
    likelihood = predictor.posterior.likelihood
    predictions, targets = list[Prediction](), list[Tensor]()
    with torch.no_grad(), Bar(data, "held-out scores", progress) as bar:
        for batch in data:
            prediction = predictor(*batch.args, **batch.kwargs).to("cpu")
            assert batch.targets is not None
            likelihood.check(prediction.outputs_mean, batch.targets.cpu())
            predictions.append(prediction)
            targets.append(prediction.fitting(batch.targets.cpu()))
            bar.advance(len(prediction))
    prediction = cat(predictions)
    scores = {name: held_out_scores(s) for name, s in prediction.target_scores(torch.cat(targets)).items()}
    if "novelty" in prediction.scores():
        scores["novelty"] = held_out_scores(prediction.novelty())
    return {
        "samples": len(prediction),
        "shared": shared,
        "scores": {name: found.values.tolist() for name, found in scores.items()},
        "head": dict(predictor.identity()),
        "posterior": predictor.hyperparameters(),
    }
