"""`calibrate`: one part of held-out data tunes a posterior, the other gives the scores by which predictions promise.

Of a regression whose noise leave-one-out found all of them do both, and promises stay exact: the only thing that is
tuned is a factor on all variances, and with distances in predictive deviations as scores it cancels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from math import log
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from posthoc_uq.core.batches import (
    WITH_TARGETS,
    Bar,
    Batch,
    BatchFunction,
    BatchReader,
    Readings,
    batches,
    check_loader,
    check_reusable,
    count_samples,
)
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.options import Seed, check_names, check_option, one_of
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed, number_keys, sample_keys, uniforms
from posthoc_uq.core.steady import steady
from posthoc_uq.curvature.kept_inputs import joined
from posthoc_uq.curvature.sweep import WORD
from posthoc_uq.fitting.class_scaling import ClassRows, Scaling, class_scaled
from posthoc_uq.fitting.faithful import backward_dominates, model_of, rows_named, scaled_variances
from posthoc_uq.fitting.held_out import (
    Evaluated,
    TemperatureLosses,
    centre_of,
    class_scaling_noted,
    doubt_of,
    is_at_edge,
    most_probable_factor,
    temperature_penalty,
    warn_of_doubt,
)
from posthoc_uq.fitting.prior import knows_noise
from posthoc_uq.fitting.rare_classes import RareClasses, rare_in_heads, with_rare_classes
from posthoc_uq.fitting.seen_rows import warn_of_few_errors, warn_of_little_noise
from posthoc_uq.fitting.tune import checked_scaling, has_something_to_tune, tell_returned, tuned_by_labels
from posthoc_uq.fitting.wrap import head_class, options_of, recorded_head, wrap
from posthoc_uq.heads.ensemble import EnsemblePredictor
from posthoc_uq.heads.predictor import Predictor, promise_keys
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.conformal import (
    INTERVAL_KINDS,
    JOINT,
    ConformalScores,
    HeldOutTargets,
    InputScores,
    SetScore,
    TargetScore,
    TargetScores,
    class_scores,
    held_out_scores,
    joint_score,
    rounded_down,
    tuned_regularisation,
    wrong_up_to,
)
from posthoc_uq.likelihoods.draws import OutputGaussian
from posthoc_uq.likelihoods.gaussian import Gaussian, Heteroscedastic, RegressionPrediction
from posthoc_uq.likelihoods.labels import are_whole
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.selective import QUANTILES, tail_of
from posthoc_uq.likelihoods.weights import counted_alone, nothing_counts
from posthoc_uq.posteriors.history import HeadRecord, Trial, Trials, recordable
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import BY_CLASS, HEADS

if TYPE_CHECKING:
    from posthoc_uq.likelihoods.joint import JointPrediction

Share = Annotated[float, Gt(0), Lt(1)]
Calibrated = TypeVar("Calibrated", Posterior, EnsemblePredictor)
_FEW = 30  # samples that promise after others were left out for class rates; of less it is said


@defer_interrupts
def calibrate(
    posterior: Calibrated,
    loader: Iterable[Any],
    *,
    share: float | None = 0.5,
    scaling: Scaling | None = None,
    class_rates: Sequence[float] | Tensor | None = None,
    sets: Literal["lac", "aps", "raps"] = "lac",
    by_class: bool = False,
    jointly: bool = False,
    head: str | None = None,
    seed: int = 0,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Calibrated:
    """The posterior tuned on one part of held-out data, with the scores of the other, by which predictions promise; the
    given one stays as it is.

    Of a regression whose noise leave-one-out found, through the linearised head, all samples promise: they tune one
    factor on all variances, which their scores and the intervals do not depend on. Its width in proportion to the noise
    stays that of the posterior, which was chosen at this noise; ``tune(posterior, loader)`` searches it by labels, and
    needs others than these. A fit that left nothing out has a width that is too small beside the noise of new data, so
    that the first part tunes both.

    ``prediction.set(0.9)``, ``prediction.interval(0.9)`` and ``prediction.familiarity()`` then hold on average over new
    inputs like the held-out ones, whatever the model, by split conformal prediction (Vovk, Gammerman, Shafer,
    "Algorithmic learning in a random world", 2005; Angelopoulos and Bates, "A gentle introduction to conformal
    prediction", 2021): coverage is at least the level and, without ties, at most ``1 / (n + 1)`` more, with n samples
    in the second part. They hold for the head and the hyperparameters that this call chose; another choice makes them
    void, and warns of it. Without held-out data see ``tune(posterior, loader, criterion="leave_one_out")``, which
    promises nothing.

    Where outputs are logits without positions, all samples choose the temperature of the probabilities afterwards. Sets
    and p-values keep the temperature of the first part: by one that depended on the promising labels nothing would be
    promised.

    The scores, all of one prediction of each sample:

    * Of targets that are classes, `sets` (`posthoc_uq.likelihoods.conformal.class_scores`); of several labels
      ``1 - p`` of those that apply, with one threshold a label; of a regression ``|y - m| / s`` with the predictive
      deviation s, by output; of other likelihoods with a distribution function ``|F(y) - 1/2|``. Of outputs with
      positions, which are not exchangeable, quantiles of ``1 - p`` over the positions of an input: a promise of 0.9 is
      that of nine in ten inputs nine tenths of the labels are in the sets of their positions.
    * Of inputs novelty, the default score (entropy, or the standard deviation), and the larger surprise of the two,
      measured by their tails on the first part and calibrated by its own values on the second; for
      `posthoc_uq.Referral` and `Prediction.familiarity`. Of classes it is counted how many predictions up to each score
      are wrong. Of outputs with positions they are means, and kept twice: over the positions that the model's attention
      mask attends to, or all of them, for predictions as they are; and over those of them that count here, by labels
      and `batch_to_weights`, for predictions that are `PositionPrediction.masked` likewise.

    Of several networks as one predictor (`wrap` of lists) the scores are the mixture's. The first part chooses one
    factor on the temperatures of all networks, where outputs are logits: a mixture is less sure than its networks. What
    belongs to one network, `scaling`, `class_rates`, `head` and options, is not taken.

    Args:
        posterior: from `fit` or `load`; or the predictor of several networks, from `wrap`.
        loader: batches with targets that chose nothing else: neither weights nor the time to stop. Read several times,
            and every time with the same inputs.
        share: of the samples that tune, and that measure the tails of scores of inputs; which, depends on their inputs
            and targets and the seed, not on their order. None: all samples do both, and promises hold approximately,
            but for those intervals of which all samples promise in any case.
        scaling: of logits, as in `tune`: by default ``"auto"``, a temperature, and a shift of each class where labels
            clearly speak for it, but for classes that no sample has. Where none does, but a class's mean probability is
            far from its frequency, a warning names it.
        class_rates: those of the inputs to be predicted, a number for each class (two for a single logit), where they
            are known to be others than those of the loader, and inputs of each class the same. Each class's logit gets
            ``log(rate / rate in the loader)``. Promises go by the samples that are left when each class has lost so
            many at random that the rest has these rates; with `by_class` sets go by all samples of each class. Every
            class needs some; a warning says how many are left, where they are few.
        sets: ``"lac"`` gives the smallest sets, and is the only score of positions; ``"aps"`` and ``"raps"`` give sets
            whose size adapts to the input, with random numbers that depend on the input alone.
        by_class: promise coverage for every class by itself, which needs samples of each. Without it the report names
            classes that sets of 90 % cover too little, and those with too few samples for a promise of their own; a
            warning says so where it is sure, or a class is much rarer than others.
        jointly: of several values promise that the intervals of all of them hold at once, by the largest of their
            scores; by default each interval by itself.
        head: that predicts, as in `tune`.
        seed: of the split, the draws and the randomised sets.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        batch_to_weights: takes a batch to a mask of its samples, ``(samples,)``, or of their positions, ``(samples,
            *positions)``: those where it is 0 do not count, like positions with an ignored label. All others count
            once: their weight must be 1.
        progress: show a bar; by default on a terminal.
        **options: of the head, as in `wrap`, which takes them by default from then on.

    Returns:
        A new posterior, or a new predictor of several networks. A posterior's ``history.promises`` has the scores, and
        ``history.trials`` what tuning tried; `report` says in words what is promised.

    Raises:
        PosthocUQError: no targets, too few samples, or a loader of other inputs each time.
        NonFiniteError: a score is not finite.
        PosteriorMismatchError: the model's weights changed after the fit, or during this call.

    Example:
        ```python
        posterior = uq.calibrate(posterior, val_loader)
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.set(0.9))  # of 10 such sets 9 hold the right class
        print(prediction.familiarity())  # p-values; small ones are foreign
        ```
    """
    several = isinstance(posterior, EnsemblePredictor)
    if not several and not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"calibrate takes a posterior from uq.fit or uq.load(path, model), or the predictor of several networks, "
            f"not a {type(posterior).__name__}."
        )
    share = check_option("share", share, Share | None)
    likelihood = posterior.observation if several else posterior.likelihood
    checked_scaling(likelihood, check_option("scaling", scaling, Scaling | None))
    sets = cast(SetScore, one_of("sets", sets, get_args(SetScore)))
    by_class, jointly = check_option("by_class", by_class, bool), check_option("jointly", jointly, bool)
    seed = check_option("seed", seed, Seed)
    if "criterion" in options:
        raise PosthocUQError(
            "calibrate promises, by held-out data. Without them: posterior = uq.tune(posterior, train_loader, "
            "criterion='leave_one_out')."
        )
    of_heads = {option for name in HEADS for option in options_of(head_class(name))}
    check_names("calibrate", options, sorted(of_heads), signature(calibrate).parameters)
    check_loader(loader)
    progress = bars_shown(progress)
    check_reusable(loader, 3)
    reader = BatchReader.of(
        posterior.model if several else model_of(posterior),
        batch_to_inputs,
        batch_to_targets,
        batch_to_weights,
        device=posterior.device if several else None,
        output=posterior.output_choice if several else None,
        skips_missing=likelihood.missing == "ignore",
    )
    if several:
        own = {"scaling": scaling, "class_rates": class_rates, "head": head} | options
        if given := [name for name, value in own.items() if value is not None]:
            raise PosthocUQError(
                f"{given[0]} belongs to one network, and calibrate was given the predictor of several; calibrate each "
                f"network's posterior with it, and wrap them together again."
            )
        return _calibrated_ensemble(
            posterior, Readings(loader), reader, share, sets, by_class, jointly, seed, progress
        )
    rates = None if class_rates is None else _checked_rates(likelihood, class_rates)
    new = calibrated(
        posterior,
        Readings(loader),
        reader,
        share=share,
        scaling=scaling,
        class_rates=rates,
        sets=sets,
        by_class=by_class,
        jointly=jointly,
        head=head,
        seed=seed,
        progress=progress,
        options=options,
    )
    tell_returned(new, progress)
    return new


def calibrated(
    posterior: Posterior,
    loader: Iterable[Any],
    reader: BatchReader,
    *,
    share: float | None = 0.5,
    scaling: Scaling | None = None,
    class_rates: list[float] | None = None,
    sets: SetScore = "lac",
    by_class: bool = False,
    jointly: bool = False,
    head: str | None = None,
    seed: int,
    progress: bool,
    options: dict[str, Any],
) -> Posterior:
    """`calibrate`, once its arguments are checked."""
    likelihood = posterior.likelihood
    # values of weight 0 are NaN from here on
    if reader.batch_to_weights is not None and likelihood.missing == "error":
        posterior = posterior.replaced(likelihood=likelihood.ignoring_missing())
    data = _HeldOut(loader, reader, posterior.likelihood, seed, joins=not backward_dominates(posterior))
    through = recorded_head(posterior)[0] if head is None else head
    head_class(through)  # refuses another name
    scale = posterior.history.calibration
    if through == "moments":  # it belongs to the settings that it was fitted at, and is fitted anew below
        posterior = posterior.noted(calibration=None)
    with steady(model_of(posterior), call="calibrate"), rows_named(posterior, seed, data.of_loader):
        if share is not None:
            data.split(share)
        weights = None if class_rates is None else data.weights(class_rates)
        # the width is then that of leave-one-out's noise, and all variances are proportional to the noise's
        evaluated: Evaluated | None = None
        by_factor = through == "linearized" and knows_noise(posterior) and posterior.evidence.noise_power == 1
        alone = through == "outputs"  # without a network: all variances are the noise's
        by_factor = by_factor or (alone and isinstance(posterior.likelihood, (Gaussian, Heteroscedastic)))
        if by_factor:
            tuned = _with_head(posterior, head, "likelihood")
        elif has_something_to_tune(posterior):
            tuned, evaluated = tuned_by_labels(
                posterior,
                data,
                reader,
                scaling=scaling,
                head=head,
                seed=seed,
                retuned=share is not None,
                progress=progress,
                options=options,
            )
        else:
            tuned = _with_head(posterior, head, "given")
        assert tuned.history.head is not None
        recorded = tuned.history.head.options
        tuned = tuned.noted(head={"options": recorded | recordable(options)})
        # without promises, so that predictions are made without those that are replaced
        tuned = tuned.noted(promises=None)
        tuned = _at_rates(tuned, weights)
        known: _Known | None = None
        if through == "linearized" and evaluated is not None and recorded == recorded | recordable(options):
            predictor = evaluated.predictor.with_posterior(tuned)  # which has all that the search prepared
            known = _Known.of(evaluated, tuned)
        else:
            predictor = wrap(model_of(tuned), tuned, **options)
        if by_factor:
            tuned = _with_variance_factor(predictor, data, progress)
            predictor = predictor.with_posterior(tuned)
        if scale is not None and through == "moments":
            moments: Any = predictor
            predictor = moments.fit_scale(data, scale.n_mc, slope=scale.beta != 1.0, progress=progress)
            tuned = predictor.posterior
        retuning = _Retuning(predictor) if share is not None and tuned.likelihood.logits else None
        measured, rare = _measured(
            predictor,
            data,
            known,
            sets,
            by_class,
            jointly,
            share,
            progress,
            all_promise=by_factor or (alone and not has_something_to_tune(posterior)),
            settings=tuned.settings.plain(),
            retuning=retuning,
            weights=weights,
        )
        if weights is None:  # rows thinned to other class rates have another share of errors
            warn_of_few_errors(tuned, measured)
        measured = measured.changed(class_rates=class_rates)
        if weights is not None and class_rates is not None and measured.samples < _FEW:
            _warn_of_few(measured, weights, class_rates, by_class)
        promising = with_rare_classes(tuned.noted(promises=measured), rare)
        if promising.likelihood is not likelihood:
            promising = promising.replaced(likelihood=likelihood)
        if retuning is None or measured.counted is not None:  # outputs with positions
            return promising
        return _retuned(promising, measured, retuning, scaling or "auto", weights)


def _calibrated_ensemble(
    predictor: EnsemblePredictor,
    loader: Iterable[Any],
    reader: BatchReader,
    share: float | None,
    sets: SetScore,
    by_class: bool,
    jointly: bool,
    seed: int,
    progress: bool,
) -> EnsemblePredictor:
    """`calibrate` of several networks, once its arguments are checked."""
    data = _HeldOut(loader, reader, predictor.observation, seed, joins=False)
    with steady(*predictor.models, call="calibrate"):
        if share is not None:
            data.split(share)
        predictor = predictor.with_promises(None)
        if predictor.observation.logits:
            losses = TemperatureLosses()
            with torch.no_grad(), isolated_random_state(seed):
                for batch in data:
                    losses.add(predictor, predictor.distribution(batch), cast(Tensor, batch.targets).clone())
            temperature = losses.most_probable(1.0)
            if is_at_edge(temperature):
                warn_user(
                    f"The temperature of the mixture, {temperature:.3g}, is at the edge of the search, which is a "
                    f"bound and not an optimum: wrap networks whose logits are divided by about this number."
                )
            predictor = predictor.at_temperature(temperature)
        measured, rare = _measured(
            predictor, data, None, sets, by_class, jointly, share, progress, all_promise=False, settings={}
        )
    if rare is not None and rare.matters:
        warn_user(rare.text)
    return predictor.with_promises(measured)


def _with_head(
    posterior: Posterior, head: str | None, criterion: Literal["likelihood", "given"]
) -> Posterior:
    """The posterior with the head that is recorded, or another one, as the one that predicts."""
    name, recorded = recorded_head(posterior)
    kept = recorded if head in (None, name) else {}
    return posterior.noted(head=HeadRecord(name=head or name, options=kept, criterion=criterion))


def _with_variance_factor(predictor: Predictor, data: _HeldOut, progress: bool) -> Posterior:
    """The predictor's posterior with all variances times the factor that is most probable by all held-out labels."""
    posterior = predictor.posterior
    squares, logs = list[Tensor](), list[Tensor]()
    with torch.no_grad(), isolated_random_state(data.seed), Bar(data.loader, "tuning", progress) as bar:
        if data.samples or data.joins:
            bar.total, bar.batches = data.samples or bar.total, 0
        for batch, _ in data.batches():
            prediction = cast(RegressionPrediction, predictor(batch).to("cpu"))
            given = cast(Tensor, batch.targets).cpu().clone()
            posterior.likelihood.check(prediction.outputs_mean, given)
            targets, variance = prediction.fitting(given), as_double(prediction.variance)
            ratios = (targets - as_double(prediction.mean)).square() / variance
            there = prediction.there(targets)
            squares.append(ratios.flatten() if there is None else ratios[there])
            logs.append(prediction.log_prob(targets.to(prediction.mean)).flatten())
            bar.advance(len(prediction))
    ratios, labels = torch.cat(squares), len(torch.cat(logs))
    found, settings = posterior.history.left_out, posterior.settings
    centre = 1.0 if found is None else found.noise_scale
    factor = most_probable_factor(float(ratios.mean()), len(ratios), settings.noise_scale, centre)
    loss = -float(as_double(torch.cat(logs)).mean())
    gained = 0.5 * (log(factor) + float(ratios.mean()) * (1 / factor - 1)) * len(ratios) / labels
    weighted = posterior.has_free_prior_precision
    changed = (
        scaled_variances(settings, factor)
        if weighted
        else replace(settings, noise_scale=settings.noise_scale * factor)
    )
    trials = [Trial(settings, loss), Trial(changed, loss + gained)]
    searched = Trials("likelihood", ("prior_precision", "noise_scale"), trials, chosen=trials[1])
    also = ", as are the weights' variances" if weighted else ""
    how = f"{factor:.4g} times that before, by the likelihood of {labels:,} held-out labels{also}"
    new = posterior.at(trials[1].settings).noted(tuning={"noise variance": how})
    warn_of_little_noise(new, labels)
    return new.replaced(history=replace(new.history, trials=searched))


class _Retuning:
    """What all held-out labels say of how logits are scaled.

    Attributes:
        losses: at every temperature, without shifts or scales of classes.
        rows: predictions as they are, where outputs are logits of classes.
    """

    def __init__(self, predictor: Predictor) -> None:
        """
        Args:
            predictor: makes the predictions.
        """
        self.losses, self.rows, posterior = TemperatureLosses(), ClassRows(), predictor.posterior
        plain = replace(posterior.settings, class_shift=(), class_scale=())
        self._plain = predictor.with_posterior(posterior.at(plain))
        self._by_class = posterior.likelihood.class_logits

    def add(self, distribution: Any, given: Tensor, prediction: Prediction, targets: Tensor) -> None:
        """Add a batch: the distribution of its outputs with the targets as given, and what was made of both."""
        self.losses.add(self._plain, distribution, given.clone())
        if self._by_class:
            self.rows.add(prediction, targets)


def _retuned(
    posterior: Posterior,
    measured: ConformalScores,
    retuning: _Retuning,
    scaling: Scaling,
    weights: _ClassWeights | None,
) -> Posterior:
    """The posterior at the temperature, and the shift of each class, that all held-out labels find most probable. Its
    promises still go by the scores at those that the tuning part found: by all labels, each score would depend on the
    labels that promise.

    Labels of positions are many, so that half of them are enough.
    """
    settings, table = posterior.settings, retuning.rows.table()
    temperature = retuning.losses.most_probable(centre_of(posterior, "temperature"))
    own = start = replace(settings, temperature=temperature, class_shift=(), class_scale=())
    if table is not None:
        scaled = table.before(settings).at(temperature)
        if scaling != "temperature":
            own = class_scaled(scaled, start, scaling, partial(temperature_penalty, posterior))
        warn_of_doubt(doubt_of(scaled, scaling, moved=own is not start))
    new = _at_rates(class_scaling_noted(posterior.at(own), scaling), weights)
    if new.settings == settings:
        return posterior
    if (trials := new.history.trials) is not None:
        trials = replace(trials, temperature=new.temperature)
        new = new.replaced(history=replace(new.history, trials=trials))
    found, before = new.settings.plain(), posterior.settings.plain()
    names = ("temperature", *BY_CLASS)
    retuned = {name: found.get(name, []) for name in names if found.get(name) != before.get(name)}
    promises = measured.changed(retuned=retuned)
    how = {"temperature": "NLL of all held-out labels, and a prior around 1 with a heavy tail above it"}
    return new.noted(promises=promises, tuning=how)


def _checked_rates(likelihood: Likelihood, class_rates: Sequence[float] | Tensor) -> list[float]:
    """The rates of classes, which sum to 1.

    Raises:
        PosthocUQError: they are no such rates, or an input has more than one class.
    """
    if not likelihood.class_logits or likelihood.name == "multilabel":
        raise PosthocUQError(
            f"class_rates are of classes of which an input has one, and likelihood {likelihood.name!r} has none such; "
            f"shift its logits by posterior.with_settings(class_shift=...)."
        )
    given: Any = class_rates
    if not isinstance(given, (str, dict)):
        given = given.tolist() if hasattr(given, "tolist") else list(given)
    rates = check_option("class_rates", given, list[float])
    if len(rates) < 2 or min(rates) <= 0 or abs(sum(rates) - 1) > 1e-3:
        raise PosthocUQError(
            f"class_rates must be a number above 0 for each class, with a sum of 1; these are {len(rates)} with a sum "
            f"of {sum(rates):.4g}. Divide each by their sum; a class that will not come gets a small one."
        )
    return rates


def _at_rates(posterior: Posterior, weights: _ClassWeights | None) -> Posterior:
    """A posterior whose class shifts also have the logarithms of weights of classes."""
    if weights is None:
        return posterior
    logs = weights.odds.log()
    one_logit = posterior.likelihood.name == "binary"
    added = (logs[1:] - logs[:1]) if one_logit else logs - logs.mean()
    present = posterior.class_shift or (0.0,) * len(added)
    shift = tuple(own + more for own, more in zip(present, added.tolist(), strict=True))
    how = posterior.history.tuning.get("class shift")
    told = "moves predictions to the class rates that were given"
    how = told if how is None else f"{how}, and {told}"
    return posterior.at(replace(posterior.settings, class_shift=shift)).noted(tuning={"class shift": how})


def _warn_of_few(
    measured: ConformalScores, weights: _ClassWeights, class_rates: list[float], by_class: bool
) -> None:
    """Warn that class rates leave few samples, and of which class there are too few."""
    scarcest = int(weights.shares.argmax())
    own = round(class_rates[scarcest] / float(weights.shares[scarcest]))
    highest = rounded_down(measured.samples / (measured.samples + 1))
    what = "p-values and referral rest" if by_class else f"promises rest, up to a level of {highest:g},"
    warn_user(
        f"These class_rates leave {measured.samples} samples on which {what}: held-out data have {own} of class "
        f"{scarcest}, and the others were thinned out to match; give more of class {scarcest}."
    )


class _ClassWeights(NamedTuple):
    """By how much each class is more frequent than in held-out data.

    Attributes:
        odds: for its probabilities, ``(classes,)``; half a label is added to each class.
        shares: in proportion to the shares of its samples that stay, ``(classes,)``, by the labels as they are.
    """

    odds: Tensor
    shares: Tensor


class _HeldOut:
    """Held-out data in two parts; iterated over, the batches of those that tune.

    Args:
        loader: of all.
        reader: takes batches apart.
        likelihood: says which positions labels are of.
        seed: of the split.
        joins: whether small batches are joined.

    Attributes:
        joins: as given.
        samples: how many there are, once they were split.
        tuning: how many of them tune.
    """

    def __init__(
        self, loader: Iterable[Any], reader: BatchReader, likelihood: Likelihood, seed: int, *, joins: bool
    ) -> None:
        self.loader, self._reader, self._likelihood, self.joins = loader, reader, likelihood, joins
        self.seed, self._split_seed = seed, mixed_seed(seed, 1)  # not the labels or sets of this seed
        self._bound: int | None = None
        # all batches and their hashes, where they are few
        self._kept: list[tuple[Batch, Tensor]] | None = None
        self._content = 0  # the sum of all hashes, by which every pass is compared with the first
        self.samples = self.tuning = 0

    @property
    def all_in_both(self) -> bool:
        """Whether all samples tune and are measured."""
        return self._bound is None

    def __len__(self) -> int:
        return len(cast(Any, self.loader))  # batches; a bar shows it

    def __iter__(self) -> Iterator[Batch]:
        bound = self._bound
        if self._kept is None or bound is None:
            for batch, tunes in self.batches():
                yield batch if self.all_in_both else batch.select(tunes, len(tunes))
        else:
            for batch, keys in self._kept:
                yield batch.select(keys < bound, len(keys))

    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """All batches, each with which of its samples ``(samples,)`` tune."""
        content = 0
        for batch, keys in self._keyed():
            content += int(keys.sum())
            yield batch, torch.ones_like(keys).bool() if self._bound is None else keys < self._bound
        if self._bound is not None and (content - self._content) % WORD:
            raise PosthocUQError(
                "The loader gave other inputs than in the pass before, so that no two parts of them exist; leave "
                "random changes of inputs out."
            )

    def of_loader(self) -> Iterator[Batch]:
        """All batches."""
        return (batch for batch, _ in self._keyed(as_loaded=True))

    def _keyed(self, as_loaded: bool = False) -> Iterator[tuple[Batch, Tensor]]:
        """All batches, each with the hashes of its samples ``(samples,)``: of inputs and target, and of copies by the
        number of each. So the parts are exchangeable, and do not depend on the order.
        """
        seen, read = Counter[int](), batches(self.loader, self._reader)
        for given in joined(read) if self.joins and not as_loaded else read:
            batch = self._of_weight_one(given)
            if batch.targets is None:
                raise PosthocUQError(
                    f"Calibration needs targets, and the loader yields inputs alone; {WITH_TARGETS}"
                )
            if batch.rows == 0:
                continue
            tensors = (*batch.tensors, batch.targets)
            keys = sample_keys(tensors, count_samples(batch), self._split_seed).cpu()
            numbers = list[int]()
            for key in keys.tolist():
                numbers.append(seen[key])
                seen[key] += 1
            yield batch, number_keys(keys, torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        if not seen:
            raise nothing_counts()

    def _of_weight_one(self, batch: Batch) -> Batch:
        """The batch without samples of weight 0, or with the labels of positions of weight 0 ignored.

        Raises:
            PosthocUQError: weights of another shape, or others than 0 and 1.
        """
        weights, targets = batch.weights, batch.targets
        if weights is None or targets is None:
            return batch
        if not bool(((weights == 0) | (weights == 1)).all()):
            raise PosthocUQError(
                "The weights of held-out data must be 0 or 1, since a promise counts every sample alike: "
                "batch_to_weights=lambda batch: ... > 0."
            )
        samples, layout = count_samples(batch), self._likelihood.layout_of_targets(targets)
        if tuple(weights.shape) == (samples,):
            return replace(batch, weights=None).select(weights > 0, samples)
        shape = None if layout is None else tuple(layout.counted(targets).shape)
        if layout is None or tuple(weights.shape) != shape:
            positions = "" if layout is None else f", or {shape}, one a position"
            raise PosthocUQError(
                f"The weights of a batch of {samples} held-out samples must have the shape ({samples},){positions}, "
                f"not {tuple(weights.shape)}; look at what batch_to_weights gives."
            )
        return replace(batch, weights=None, targets=layout.ignoring(targets, weights == 0))

    def weights(self, class_rates: list[float]) -> _ClassWeights:
        """By how much each class is more frequent at these rates than in the data.

        Raises:
            PosthocUQError: labels are no classes, or others, or a class has none.
        """
        classes = len(class_rates)
        counts = torch.zeros(classes, dtype=torch.float64, device="cpu")
        with isolated_random_state(self.seed):
            for batch, _ in self._keyed():
                labels = _class_labels(batch, classes)
                counts += torch.bincount(labels, minlength=classes)
        if missing := (counts == 0).nonzero().flatten().tolist():
            raise PosthocUQError(
                f"class_rates say how frequent class {missing[0]} will be, and no held-out sample has it, by which "
                f"anything could be promised of it; give some of each class."
            )
        rates = torch.tensor(class_rates, dtype=torch.float64, device="cpu")
        return _ClassWeights(rates / (counts + 0.5) * (counts + 0.5).sum(), rates / counts)

    def split(self, share: float) -> None:
        """Let those samples tune whose hashes are the smallest, the share of them.

        Raises:
            PosthocUQError: there are too few samples for two parts.
        """
        parts, nbytes, kept = list[Tensor](), 0, list[tuple[Batch, Tensor]]()
        with isolated_random_state(self.seed):
            for batch, keys in self._keyed():
                parts.append(keys)
                nbytes += sum(tensor.nbytes for tensor in batch.tensors)
                if nbytes <= TEMPORARY_BYTES:
                    kept.append((batch.kept(), keys))
        keys = torch.cat(parts)
        self.samples = len(keys)
        if self.samples < 2:
            raise PosthocUQError(
                f"share={share:g} leaves one of the two parts of {self.samples} held-out samples empty; give more "
                f"samples, or share=None for all in both."
            )
        self.tuning = min(max(1, round(share * self.samples)), self.samples - 1)
        self._bound, self._content = int(keys.sort().values[self.tuning]), int(keys.sum())
        self._kept = kept if nbytes <= TEMPORARY_BYTES else None


def _class_labels(batch: Batch, classes: int) -> Tensor:
    """One class a sample, ``(samples,)`` on the CPU.

    Raises:
        PosthocUQError: there are none, or others than these classes.
    """
    targets = cast(Tensor, batch.targets).detach().cpu()
    one_each = targets.numel() == count_samples(batch) and are_whole(targets)
    if not one_each or bool(((targets < 0) | (targets >= classes)).any()):
        raise PosthocUQError(
            f"class_rates need one whole number a sample as its label, of 0 to {classes - 1}; give a rate for each "
            f"class, and leave them out where targets are soft or have positions."
        )
    return targets.reshape(-1).long()


class _Known:
    """Distributions of outputs that were computed before, by the contents of their samples.

    Args:
        evaluated: has them.
    """

    def __init__(self, evaluated: Evaluated) -> None:
        keys = torch.cat([_contents(batch) for batch, _ in evaluated.data])
        self._keys, order = keys.sort()
        self._outputs = OutputGaussian.cat(evaluated.distributions).picked(order)

    @staticmethod
    def of(evaluated: Evaluated, posterior: Posterior) -> _Known | None:
        """Those under this posterior, if they are of outputs without positions."""
        of_weights = evaluated.predictor.posterior.settings.of_weights()
        first = evaluated.distributions[0] if evaluated.distributions else None
        if first is None or first.mean.ndim > 2 or of_weights != posterior.settings.of_weights():
            return None
        return None if any(batch.whole for batch, _ in evaluated.data) else _Known(evaluated)

    def distribution(self, predictor: Predictor, batch: Batch) -> OutputGaussian:
        """That of a batch; the predictor computes what is not known."""
        keys, samples = _contents(batch), count_samples(batch)
        places = torch.searchsorted(self._keys, keys).clamp(max=len(self._keys) - 1)
        known = self._keys[places] == keys
        outputs = self._outputs.picked(places[known])
        if bool(known.all()):
            return outputs
        with predictor.explaining(batch):
            others: Any = predictor.distribution(batch.select(~known, samples))
        order = torch.cat([known.nonzero(), (~known).nonzero()]).flatten().argsort()
        return OutputGaussian.cat([outputs, others]).picked(order)


def _contents(batch: Batch) -> Tensor:
    """Hashes of the inputs of a batch, ``(samples,)``."""
    return sample_keys(batch.tensors, count_samples(batch), 0).cpu()


def _measured(
    predictor: Predictor | EnsemblePredictor,
    data: _HeldOut,
    known: _Known | None,
    sets: SetScore,
    by_class: bool,
    jointly: bool,
    share: float | None,
    progress: bool,
    *,
    all_promise: bool,
    settings: dict[str, Any],
    retuning: _Retuning | None = None,
    weights: _ClassWeights | None = None,
) -> tuple[ConformalScores, RareClasses | None]:
    """The scores, and what they were measured with; one pass over all data. With `all_promise` those of targets are of
    all samples; with `weights` of classes each sample stays with the share of its class's weight of the largest one.
    `retuning` gets what all labels say of how logits are scaled, if outputs have no positions. And the classes that
    these promise too little for.

    Raises:
        PosthocUQError: the samples are others than those that were split, or a class or label has none.
    """
    scores, tuning, staying = _Measuring(sets, by_class, jointly), list[Tensor](), list[Tensor]()
    of_heads = dict[str, _Measuring]()
    with torch.no_grad(), isolated_random_state(data.seed), Bar(data.loader, "calibrate", progress) as bar:
        if data.samples or data.joins:  # else as many batches as the loader has, all as large as the first
            bar.total, bar.batches = data.samples or bar.total, 0
        for batch, tunes in data.batches():
            distribution, prediction = _predicted(predictor, batch, known, retuning is not None)
            several = cast("JointPrediction", prediction) if prediction.kind == "heads" else None
            if several is not None and not of_heads:
                scores, of_heads = (
                    _Measuring("lac", False, False),
                    _scores_of_heads(several, sets, by_class, jointly),
                )
            tuning.append(tunes)
            kept = torch.ones_like(tunes) if all_promise or data.all_in_both else ~tunes
            if weights is not None:
                staying.append(_staying(batch, weights.shares, data.seed))
                kept = kept if by_class else kept & staying[-1]
            given = cast(Tensor, batch.targets)
            predictor.observation.check(prediction.outputs_mean, given.cpu())
            targets = prediction.fitting(given.cpu().clone())
            if prediction.kind == "positions":
                retuning = None
            if retuning is not None:
                retuning.add(distribution, given, prediction, targets)
            keys = promise_keys(batch, len(prediction), data.seed).cpu()
            scores.add(prediction, targets, batch, kept, keys)
            if several is not None:
                own = several.split_targets(targets)
                for name, of_head in of_heads.items():
                    of_head.add(several[name], own[name], several.batch_of(name, batch), kept, keys)
            bar.advance(len(prediction))
    first = torch.cat(tuning)
    of_sets = second = first if data.all_in_both else ~first
    if staying:
        first, second = _left(first, second, torch.cat(staying))
        of_sets = of_sets if by_class else second
    common: dict[str, Any] = {
        "samples": len(second) if all_promise else int(second.sum()),
        "share": share,
        "seed": data.seed,
        "head": dict(predictor.identity()),
        "posterior": settings,
    }
    found, rare = scores.result(first, second, of_sets, common)
    if of_heads:
        results = {name: each.result(first, second, of_sets, common) for name, each in of_heads.items()}
        found = found.changed(heads={name: result for name, (result, _) in results.items()})
        rare = rare_in_heads({name: of_head for name, (_, of_head) in results.items()})
    return found, rare


class _Measuring:
    """The scores of one prediction of every sample, batch by batch.

    Args:
        sets: the score of classes.
        by_class: whether sets are promised for each class.
        jointly: whether several values are promised together.
    """

    def __init__(self, sets: SetScore, by_class: bool, jointly: bool) -> None:
        self._sets: SetScore = sets
        self._by_class, self._jointly = by_class, jointly
        self._of_inputs: dict[str, list[Tensor]] = {}
        self._of_counted: dict[str, list[Tensor]] = {}  # of outputs with positions, by those that count
        self._counting = list[Tensor]()  # which inputs have any
        self._of_targets, self._wrong = list[TargetScores](), list[Tensor]()
        # for "raps": probabilities, labels and random numbers
        self._of_classes = list[tuple[Tensor, Tensor, Tensor]]()
        self._kind: TargetScore | None = None
        self._channels: int | None = None  # of values at positions
        self._classes: int | None = None

    def add(self, prediction: Prediction, targets: Tensor, batch: Batch, kept: Tensor, keys: Tensor) -> None:
        """Add a batch.

        Args:
            prediction: of it.
            targets: as the prediction takes them.
            batch: the same.
            kept: which samples promise of their targets, ``(samples,)``.
            keys: hashes of the inputs, ``(samples,)``.
        """
        classes = self._classes = prediction.classes
        if self._by_class and (classes is None or prediction.kind != "classes"):
            raise PosthocUQError(
                "by_class=True promises coverage for each class, and no classes are predicted."
            )
        _add_scores(self._of_inputs, prediction)
        if (alone := counted_alone(prediction, batch)) is not None:
            _add_scores(self._of_counted, alone[0])
            self._counting.append(alone[1])
        if (mistakes := prediction.mistakes(targets)) is not None:
            self._wrong.append(mistakes)
        found = prediction.target_scores(targets, self._sets, keys)
        if found is not None and found.kind == "raps":
            probs = as_double(cast(ClassPrediction, prediction).probs)
            self._of_classes.append((probs, found.groups, uniforms(keys, 1).squeeze(1)))
        _check_joint(found, self._jointly)
        if found is not None:
            self._kind, self._channels = found.kind, found.channels
            self._of_targets.append(found._replace(scores=found.scores[kept], groups=found.groups[kept]))

    def result(
        self, first: Tensor, second: Tensor, of_sets: Tensor, common: dict[str, Any]
    ) -> tuple[ConformalScores, RareClasses | None]:
        """The scores that are kept, and the classes that these promise too little for.

        Args:
            first: which samples measure the tails of scores of inputs, ``(samples,)``.
            second: which promise.
            of_sets: which promise sets.
            common: the other fields of the scores.
        """
        scores, of_inputs_kept = _input_scores(self._of_inputs, first, second)
        of_counted_kept = mistaken = of_targets_kept = rare = None
        if self._counting:
            some = torch.cat(self._counting)
            if not bool((first & some).any() and (second & some).any()):
                raise nothing_counts()
            of_counted_kept = _input_scores(self._of_counted, first & some, second & some)[1]
        if self._wrong:
            errors = torch.cat(self._wrong)[second]
            mistaken = {
                name: wrong_up_to(kept, scores[name][second], errors)
                for name, kept in of_inputs_kept.inputs.items()
            }
        kind, classes = self._kind, self._classes
        if kind is not None and self._channels is not None:
            of_targets_kept = _of_maps(kind, self._of_targets, self._channels)
        elif kind is not None:
            all_scores = torch.cat([found.scores for found in self._of_targets])
            groups = torch.cat([found.groups for found in self._of_targets])
            regularisation = None
            if self._of_classes:
                probs, labels, uniform = (torch.cat(parts) for parts in zip(*self._of_classes, strict=True))
                regularisation = tuned_regularisation(probs[first], labels[first].squeeze(1), uniform[first])
                scores_of_all = class_scores(probs[of_sets], "raps", uniform[of_sets], regularisation)
                all_scores = scores_of_all.gather(-1, labels[of_sets])
            if classes is not None and kind in get_args(SetScore) and not self._by_class:
                rare = RareClasses.of(all_scores[:, 0], groups[:, 0], classes)
            of_classes = classes if self._by_class else None
            columns = _split_scores(kind, all_scores, groups, of_classes, self._jointly)
            of_targets_kept = HeldOutTargets(
                kind=kind,
                scores=[held_out_scores(each) for each in columns],
                regularisation=regularisation,
                shares=None if self._of_targets[0].shares is None else list(self._of_targets[0].shares),
            )
        found_scores = ConformalScores(
            inputs=of_inputs_kept.inputs,
            tails=of_inputs_kept.tails,
            targets=of_targets_kept,
            wrong=mistaken,
            counted=of_counted_kept,
            **common,
        )
        return found_scores, rare


def _scores_of_heads(
    prediction: JointPrediction, sets: SetScore, by_class: bool, jointly: bool
) -> dict[str, _Measuring]:
    """Those of every head; what is asked for holds for the heads that have it.

    Raises:
        PosthocUQError: no head has it.
    """
    kinds = {name: prediction[name].kind for name in prediction.keys()}  # noqa: SIM118
    for asked, fitting, what in (
        (
            by_class,
            ("classes",),
            "by_class=True promises coverage for each class, and no head predicts classes.",
        ),
        (
            jointly,
            ("values", "draws"),
            "jointly=True promises intervals of several values, and no head has values.",
        ),
    ):
        if asked and not {*fitting} & {*kinds.values()}:
            raise PosthocUQError(what)
    return {
        name: _Measuring(
            "lac" if kind == "positions" else sets,
            by_class and kind == "classes",
            jointly and kind in ("values", "draws"),
        )
        for name, kind in kinds.items()
    }


def _check_joint(found: TargetScores | None, jointly: bool) -> None:
    """Refuse a promise of several values together where there are none.

    Raises:
        PosthocUQError: no values are predicted, or values at positions.
    """
    if not jointly:
        return
    if found is None or found.kind not in INTERVAL_KINDS:
        raise PosthocUQError(
            "jointly=True promises intervals of several values, and no values are predicted."
        )
    if found.channels is not None:
        raise PosthocUQError(
            "jointly=True is for values without positions; leave it out, and ask for the bounds of whole inputs: "
            "prediction.interval(level, by='image')."
        )


def _of_maps(kind: TargetScore, of_targets: Sequence[TargetScores], channels: int) -> HeldOutTargets:
    """The scores of values at positions.

    Raises:
        PosthocUQError: no position counts.
    """
    scores, groups = (
        torch.cat(parts) for parts in zip(*[(f.scores, f.groups) for f in of_targets], strict=True)
    )
    there = groups.reshape(len(groups), channels, -1)[:, :, 0] == 1
    if not bool(there.any(0).all()):
        raise nothing_counts()
    by_channel = scores.reshape(len(scores), channels, -1)
    return HeldOutTargets.of_maps(kind, [by_channel[there[:, each], each] for each in range(channels)])


def _predicted(
    predictor: Predictor | EnsemblePredictor, batch: Batch, known: _Known | None, wanted: bool
) -> tuple[Any, Prediction]:
    """The prediction of a batch on the CPU, and the distribution of its outputs where that is `wanted`."""
    if not wanted or not isinstance(predictor, Predictor):
        return None, predictor(batch).to("cpu")
    distribution: Any = None
    if known is None:
        with predictor.explaining(batch):
            distribution = predictor.distribution(batch)
    else:
        distribution = known.distribution(predictor, batch)
    return distribution, predictor.prediction_for(batch, distribution).to("cpu")


def _staying(batch: Batch, shares: Tensor, seed: int) -> Tensor:
    """Which samples ``(samples,)`` stay, so that classes have the rates that their weights lead to: a function of the
    samples and the seed alone.
    """
    targets = cast(Tensor, batch.targets)
    keys = sample_keys((*batch.tensors, targets), count_samples(batch), mixed_seed(seed, 3)).cpu()
    return uniforms(keys, 1).squeeze(1) < (shares / shares.max())[_class_labels(batch, len(shares))]


def _left(first: Tensor, second: Tensor, staying: Tensor) -> tuple[Tensor, Tensor]:
    """What stays of both parts.

    Raises:
        PosthocUQError: nothing does.
    """
    first, second = first & staying, second & staying
    if not bool(first.any() and second.any()):
        raise PosthocUQError(
            "No held-out sample is left when each class has lost so many that the rest has these class_rates; give "
            "more samples, above all of the classes that are more frequent there."
        )
    return first, second


def _add_scores(found: dict[str, list[Tensor]], prediction: Prediction) -> None:
    """Add the scores of a batch's inputs that are kept, by name."""
    known = prediction.scores()
    for name in {prediction.default_score: None, "novelty": None}:
        if name in known:
            found.setdefault(name, []).append(as_double(known[name]))


def _input_scores(
    found: dict[str, list[Tensor]], first: Tensor, second: Tensor
) -> tuple[dict[str, Tensor], InputScores]:
    """The scores of all inputs, with the joint one by the tails of the `first`; and what is kept: those of the
    `second`, and the tails.
    """
    scores = {name: torch.cat(parts) for name, parts in found.items()}
    tails = {name: tail_of(values[first], QUANTILES) for name, values in scores.items()}
    scores[JOINT] = joint_score(tails, scores)
    kept = {name: held_out_scores(values[second]) for name, values in scores.items()}
    return scores, InputScores(inputs=kept, tails=tails)


def _split_scores(
    kind: TargetScore, scores: Tensor, groups: Tensor, classes: int | None, jointly: bool
) -> list[Tensor]:
    """The scores apart: by class, by label, where it applies, by share of positions, where any counts, or by output,
    where it is there.

    Args:
        kind: of the scores.
        scores: (samples, columns).
        groups: as in `TargetScores`.
        classes: their number, where scores are to be kept by class.
        jointly: whether the largest of a sample's scores, of those that are there, is the one that counts.
    """
    if jointly and kind != "quantiles":  # of which there is one value, and a column for each share
        scores, groups = scores.amax(1, keepdim=True), groups.amax(1, keepdim=True)
    if kind in ("label", "positions", "deviation", "cdf"):
        found = [scores[groups[:, each] == 1, each] for each in range(scores.shape[1])]
    elif classes is None:
        return list(scores.unbind(1))
    else:
        found = [scores[groups == each] for each in range(classes)]
    empty = [str(each) for each, part in enumerate(found) if len(part) == 0]
    if empty:
        name = {"label": "label", "deviation": "output", "cdf": "output"}.get(kind, "class")
        way_out = ", or leave by_class out" if name == "class" else ""
        more = f" and {len(empty) - 8} more" if len(empty) > 8 else ""
        raise PosthocUQError(
            f"A promise for every {name} needs some of each among the samples that promise, and there are none of "
            f"{name} {', '.join(empty[:8])}{more}; give more{way_out}."
        )
    return found
