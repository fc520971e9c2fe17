"""`calibrate_outputs`: what `calibrate` does, for outputs that are already there and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, known_arguments
from posthoc_uq.fitting.calibrate import calibrate
from posthoc_uq.fitting.class_scaling import Scaling
from posthoc_uq.heads.outputs import GivenForm, GivenOutputs, OutputsPredictor
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.likelihoods.gaussian import Gaussian, Heteroscedastic
from posthoc_uq.posteriors.block import OUTPUTS_ALONE
from posthoc_uq.posteriors.history import HeadRecord, History
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence

_ROWS = 2**14  # of a batch
_WITH_PROBABILITIES = ("classification", "binary", "multilabel")
_LEAST_NOISE = 1e-12  # variance, of outputs that hit every target


@known_arguments
def calibrate_outputs(
    outputs: Any,
    targets: Any,
    *,
    likelihood: str | Likelihood = "classification",
    probabilities: bool = False,
    share: float | None = 0.5,
    scaling: Scaling | None = None,
    class_rates: Sequence[float] | Tensor | None = None,
    sets: Literal["lac", "aps", "raps"] = "lac",
    by_class: bool = False,
    jointly: bool = False,
    seed: int = 0,
) -> OutputsPredictor:
    """Calibrate outputs that are already there, without the model: the temperature of logits, a shift of each class,
    and held-out scores by which sets, intervals and p-values keep what they promise (split conformal prediction).

    It is `calibrate` of a network whose weights are certain, and so are all numbers that it finds. Of means, and of
    means with standard deviations, all samples promise: intervals go by ``|y - m| / s``, and the only thing that is
    tuned is a factor on s, on which they do not depend. So do those of quantiles.

    Args:
        outputs: of held-out samples, a tensor or NumPy array ``(samples, ...)`` as `likelihood` has them: logits of
            classes ``(samples, classes)``, one logit, means, quantiles, also with positions. Of a regression also a
            pair of means and standard deviations of the same shape.
        targets: of the same samples, which chose nothing else.
        likelihood: says what the outputs mean, as in `fit`.
        probabilities: the outputs are probabilities of classes or labels, and no logits.
        share: as in `calibrate`, with all that follows.
        scaling: as there.
        class_rates: as there.
        sets: as there.
        by_class: as there.
        jointly: as there; of several means it needs standard deviations.
        seed: of the split and of randomised sets.

    Returns:
        What predicts from new arrays: ``calibrated(new_outputs)`` is a `Prediction`, with ``set(0.9)``,
        ``interval(0.9)`` and ``familiarity("entropy")``. `save` writes it to a file and ``load(path)`` reads it;
        `evaluate` takes it with batches of arrays and targets.

    Raises:
        PosthocUQError: arrays do not fit each other or the likelihood, or there are too few samples.
        NonFiniteError: an output is not finite.

    Example:
        ```python
        with torch.no_grad():
            logits = torch.cat([model(x) for x, y in val_loader])
            targets = torch.cat([y for x, y in val_loader])
            calibrated = uq.calibrate_outputs(logits, targets)
            print(calibrated(model(images)).set(0.9))
        ```
    """
    if isinstance(likelihood, Likelihood) and likelihood.head_likelihoods:
        raise PosthocUQError("calibrate_outputs takes the outputs of one head; call it for each of them.")
    arrays, values = _tensors(outputs), as_targets(_tensor(targets, "targets")).detach()
    if values.ndim == 0 or len(values) != len(arrays[0]):
        raise PosthocUQError(
            f"outputs and targets must be of the same samples; these are of shape {tuple(arrays[0].shape)} and "
            f"{tuple(values.shape)}."
        )
    form, meaning = _form_of(arrays, likelihood, check_option("probabilities", probabilities, bool))
    network = GivenOutputs(form, meaning)
    given = network(*arrays)
    meaning.check(given, values)
    _check_no_probabilities(given, form, meaning)
    if isinstance(meaning, Gaussian) and meaning.finds_noise:
        meaning = _with_noise_of(meaning, given, values)
        if jointly and meaning.noise_variance.numel() > 1:
            raise PosthocUQError(
                "jointly=True compares the errors of several values, which needs their standard deviations; give "
                "outputs=(means, deviations)."
            )
    columns = arrays[0][0].numel() if arrays[0].ndim <= 2 else 0
    head = HeadRecord(name="outputs", options={"form": form, "columns": columns}, criterion="given")
    posterior = Posterior(
        OUTPUTS_ALONE,
        *({}, {}, {}, {}),
        meaning,
        Evidence(len(values)),
        History(head=head),
        model=network,
    )
    parts = [array.split(_ROWS) for array in arrays]
    inputs = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
    found = calibrate(
        posterior,
        list(zip(inputs, values.split(_ROWS), strict=True)),
        share=share,
        scaling=scaling,
        class_rates=class_rates,
        sets=sets,
        by_class=by_class,
        jointly=jointly,
        seed=seed,
        progress=False,
    )
    return predictor_of(found)


def predictor_of(posterior: Posterior) -> OutputsPredictor:
    """What predicts by a posterior over no weights, as `calibrate_outputs` made it.

    Raises:
        PosthocUQError: it does not say what is given.
    """
    head = posterior.history.head
    if head is None or head.name != OutputsPredictor.head:
        raise PosthocUQError("It does not say what outputs were calibrated.")
    options: dict[str, Any] = head.options
    network = GivenOutputs(options.get("form", "outputs"), posterior.likelihood)
    return OutputsPredictor(network, posterior.replaced(model=network), **options)


def _tensor(value: Any, name: str) -> Tensor:
    """An array as a tensor.

    Raises:
        PosthocUQError: it is none.
    """
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"{name} must be a tensor or NumPy array of numbers, not a {type(value).__name__}."
        ) from None
    return found.detach()


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    """The outputs, or means and standard deviations, in floating-point numbers.

    Raises:
        PosthocUQError: they are no arrays of samples.
    """
    pair = cast("tuple[Any, ...]", outputs) if isinstance(outputs, tuple) else (outputs,)
    found = tuple(_tensor(each, "outputs") for each in pair)
    if len(found) > 2 or any(each.ndim == 0 or len(each) == 0 or each.is_complex() for each in found):
        raise PosthocUQError(
            "outputs must be one array (samples, ...) of real numbers, or a pair of means and standard deviations."
        )
    return tuple(each if each.is_floating_point() else each.to(torch.get_default_dtype()) for each in found)


def _form_of(
    arrays: tuple[Tensor, ...], likelihood: str | Likelihood, probabilities: bool
) -> tuple[GivenForm, Likelihood]:
    """What is given, and its likelihood.

    Raises:
        PosthocUQError: the likelihood has no such outputs.
    """
    found = resolve_likelihood(likelihood)
    if getattr(found, "scale_from_data", ()):
        raise PosthocUQError("mean='data' and std='data' are found by a fit; give uq.Gaussian their numbers.")
    if len(arrays) == 2:
        if found.name != Gaussian.name:
            raise PosthocUQError(
                f"A pair of means and standard deviations is of likelihood='regression', and this is {found.name!r}."
            )
        assert isinstance(found, Gaussian)
        return "deviations", Heteroscedastic(
            mean=found.target_mean,
            std=found.target_std,
            support=found.support,
            channel_dim=found.channel_dim,
            missing=found.missing,
        )
    if probabilities and found.name not in _WITH_PROBABILITIES:
        raise PosthocUQError(
            f"probabilities=True is for the likelihoods {', '.join(_WITH_PROBABILITIES)}, not {found.name!r}."
        )
    return "probabilities" if probabilities else "outputs", found


def _check_no_probabilities(outputs: Tensor, form: GivenForm, likelihood: Likelihood) -> None:
    """Refuse probabilities of classes that are given as logits."""
    if form != "outputs" or not likelihood.softmax or outputs.ndim != 2:
        return
    if bool(((outputs >= 0) & (outputs <= 1)).all()) and bool(((outputs.sum(1) - 1).abs() < 1e-3).all()):
        raise PosthocUQError(
            "All outputs are between 0 and 1 and sum to 1: they look like probabilities; pass probabilities=True."
        )


def _with_noise_of(likelihood: Gaussian, outputs: Tensor, targets: Tensor) -> Gaussian:
    """With the mean squared residual of each output, or channel, as its noise variance. Intervals do not depend on it:
    they are ``m -+ q s`` with the held-out ``|y - m| / s``, for each output by itself.
    """
    squares, there = as_double(likelihood.residuals(outputs, targets)).square(), likelihood.there(targets)
    counts = torch.ones_like(squares) if there is None else as_double(there).reshape(squares.shape)
    axis = likelihood.channel_axis(outputs) if outputs.ndim > 1 else 0
    size = outputs.shape[axis] if outputs.ndim > 1 else 1
    sums, numbers = (each.movedim(axis, -1).reshape(-1, size).sum(0) for each in (squares, counts))
    return likelihood.with_noise((sums / numbers.clamp(min=1)).clamp(min=_LEAST_NOISE).cpu())
