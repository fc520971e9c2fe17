"""Calibration without held-out data: leave-one-out predictions by the tangent kernel of the untrained network.

A network knows its training labels, so that its residuals and its confidence on the training inputs say little of new
ones. The untrained network of the same architecture has seen no label. Kernel ridge regression with its tangent kernel
stands for training it (Jacot, Gabriel, Hongler 2018), and its leave-one-out predictions have a closed form: they
estimate the accuracy of a classifier, and the noise variance of a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log10
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from posthoc_uq.core.batches import WITH_TARGETS, Batch, BatchReader, batches, check_loader, count_samples
from posthoc_uq.core.devices import host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import replicate
from posthoc_uq.core.numerics import check_rows_finite
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.curvature.kept_inputs import joined
from posthoc_uq.curvature.tangent_kernel import tangent_kernel, untrained, with_state
from posthoc_uq.fitting.faithful import backward_dominates, model_of
from posthoc_uq.layers.proof import prepare
from posthoc_uq.posteriors.history import LeaveOneOut, LeftOutRecord
from posthoc_uq.posteriors.posterior import Posterior

Initial = nn.Module | Mapping[str, Tensor]
"""The network before its training: a model, or a state dict."""
Groups = Sequence[Any] | Tensor | Callable[[Any], Any]
"""Of every sample the group that is left out together: in the order of the loader, or from a batch."""

RIDGES = tuple(10.0 ** (0.25 * step) for step in range(-24, 9))  # 1e-6 to 1e2
MAX_TEMPERATURE = 1e4
MAX_SAMPLES = 4096  # the kernel has a number for every pair, and its eigenvectors take some seconds at 4,000

_SOLVED_AT_ONCE = 256  # columns

INITIALISATIONS = 3  # untrained networks that are averaged
FEW_SAMPLES = 2048  # up to which a fit does this unasked, in some five seconds; half a second for 1,000
UNASKED_GAP = 0.1  # of confidence over the wanted one, beyond which a fit changes the temperature unasked

_OF_PERCEPTRONS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.PReLU)


@dataclass(frozen=True)
class LeftOut:
    """Predictions of every sample by all others.

    Attributes:
        predictions: ``(samples, columns)``, float64.
        targets: of the same shape.
        units: how many were left out one after the other: samples, or groups of them.
        ridge: the one of `RIDGES` with the least mean squared error.
    """

    predictions: Tensor
    targets: Tensor
    units: int
    ridge: float

    @property
    def accuracy(self) -> float:
        """The share of samples whose largest prediction is their class; of one column, that is on the side of 1/2 of
        their target.
        """
        if self.targets.shape[1] == 1:
            return float(((self.predictions > 0.5) == (self.targets > 0.5)).double().mean())
        return float((self.predictions.argmax(1) == self.targets.argmax(1)).double().mean())

    @property
    def largest_accuracy(self) -> float:
        """The accuracy and two of its standard errors, as if those of a group were right or wrong together."""
        accuracy = self.accuracy
        return min(1.0, accuracy + 2 * (accuracy * (1 - accuracy) / self.units) ** 0.5)

    @property
    def squared_error(self) -> Tensor:
        """The mean squared error of each column, ``(columns,)``."""
        return (self.predictions - self.targets).square().mean(0)


def leave_one_out(kernel: Tensor, targets: Tensor, groups: Tensor | None = None) -> LeftOut:
    """The predictions of kernel ridge regression for every sample by all others.

    With ``A = K / mean(diag K) + ridge I`` and centred targets, the prediction of sample n is
    ``Y_n - [A^-1 (Y - mean Y)]_n / [A^-1]_nn`` (of a group G, ``Y_G - ([A^-1]_GG)^-1 [A^-1 (Y - mean Y)]_G``): what a
    regression fitted without it predicts there. One eigendecomposition serves every ridge.

    Args:
        kernel: ``(samples, samples)``, float64.
        targets: ``(samples, columns)``.
        groups: ``(samples,)`` integers; samples with the same one are left out together.

    Raises:
        PosthocUQError: fewer than three samples or than two groups.
    """
    samples = len(targets)
    if samples < 3:
        raise PosthocUQError(f"Leave-one-out needs at least 3 samples, not {samples}.")
    members = None
    if groups is not None:
        members = [(groups == each).nonzero().flatten() for each in groups.unique()]
        if len(members) < 2:
            raise PosthocUQError(
                "groups= puts all samples into one group, which leaves none to predict it by."
            )
    targets = targets.double()
    values, vectors = torch.linalg.eigh(kernel / kernel.diagonal().mean())
    values = values.clamp(min=0)
    rotated = vectors.T @ (targets - targets.mean(0))
    units = samples if members is None else len(members)
    all_inverse_values = 1 / (values.unsqueeze(1) + values.new_tensor(RIDGES))
    diagonals = vectors.square() @ all_inverse_values  # of A^-1, for every ridge
    ridges = RIDGES
    if (
        members is None and rotated.shape[1] > samples
    ):  # many classes: the best ridge's predictions alone are made
        products = rotated @ rotated.T
        rows = [vectors * inverse for inverse in all_inverse_values.T]
        errors = torch.stack([((row @ products) * row).sum(1) for row in rows], 1) / diagonals.square()
        least = int(errors.sum(0).argmin())
        ridges, part = RIDGES[least : least + 1], slice(least, least + 1)
        all_inverse_values, diagonals = all_inverse_values[:, part], diagonals[:, part]
    # of all ridges by few products, which read the eigenvectors once
    scaled, columns = all_inverse_values.T.unsqueeze(2) * rotated, rotated.shape[1]
    all_solved = (
        each
        for part in scaled.split(max(1, _SOLVED_AT_ONCE // columns))
        for each in (vectors @ part.transpose(0, 1).flatten(1)).split(columns, dim=1)
    )
    best: LeftOut | None = None
    for ridge, inverse_values, diagonal, solved in zip(
        ridges, all_inverse_values.T, diagonals.T, all_solved, strict=True
    ):
        if members is None:
            residuals = solved / diagonal.unsqueeze(1)
        else:
            residuals = torch.empty_like(solved)
            for member in members:
                part = vectors[member]
                residuals[member] = torch.linalg.solve((part * inverse_values) @ part.T, solved[member])
        found = LeftOut(targets - residuals, targets, units, ridge)
        if best is None or float(found.squared_error.sum()) < float(best.squared_error.sum()):
            best = found
    return cast(LeftOut, best)


def confidence(logits: Tensor) -> float:
    """The mean of the largest probability, for logits as `temperature_for` takes them."""
    return float(_of_classes(logits).softmax(-1).amax(-1).mean())


def _of_classes(logits: Tensor) -> Tensor:
    wide = logits.detach().double()
    return wide if wide.ndim > 1 else torch.stack((torch.zeros_like(wide), wide), -1)


def temperature_for(logits: Tensor, wanted: float) -> float:
    """The temperature, from 1 to 10,000, at which the mean of the largest probability is `wanted`.

    Args:
        logits: ``(samples, classes)``, or ``(samples,)`` of two classes.
        wanted: in (0, 1).
    """
    wide = _of_classes(logits)

    def excess(decade: float) -> float:
        return confidence(wide / 10.0**decade) - wanted

    if excess(0.0) <= 0:
        return 1.0
    highest = log10(MAX_TEMPERATURE)
    if excess(highest) >= 0:  # no better than chance, where all probabilities are equal
        return MAX_TEMPERATURE
    from scipy.optimize import brentq

    return 10.0 ** float(cast(float, brentq(excess, 0.0, highest, xtol=1e-6)))


def is_perceptron(model: nn.Module, batch: Batch, seed: int) -> bool:
    """Whether a network has hidden layers, and no other weights than those of linear layers on single rows and of their
    normalisation, all of them trained or none: it was then most likely trained from scratch, and its tangent kernel
    before the training estimates well what it has learned. Networks of convolutions learn features that the kernel
    lacks.
    """
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    if not owners or not all(type(module) in _OF_PERCEPTRONS for module in owners):
        return False
    if len({parameter.requires_grad for parameter in model.parameters()}) > 1:
        return False
    twin, single, samples = replicate(model), list[bool](), count_samples(batch)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())))
        single.append(x.ndim == 2 and len(x) == samples)

    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad(), isolated_random_state(seed):
        batch.copied().call(twin)
    return len(single) > 1 and all(single)


def set_by_leave_one_out(
    posterior: Posterior,
    loader: Iterable[Any],
    reader: BatchReader,
    *,
    initial: Initial | Sequence[Initial] | None = None,
    groups: Groups | None = None,
    initialisations: int = INITIALISATIONS,
    seed: int = 0,
    progress: bool = True,
    least_gap: float = 0.0,
) -> Posterior:
    """The posterior with the temperature of classes, or the noise of a regression, that follows from the training data
    alone; its history says what was found.

    The temperature is that at which the network's mean confidence on its training inputs is the accuracy that
    leave-one-out estimates, and two standard errors: the posterior doubts new inputs, too, and few samples know little;
    with the accuracy itself predictions are worse (docs/defaults.md). It is never below 1. The noise scale is the mean
    over outputs of the larger of the training residuals' mean square and the leave-one-out error, over the noise
    variance of the fit. A faithful prior is to be found again then.

    Args:
        posterior: of a network that was trained from scratch on these data, or else with `initial`.
        loader: the training data, at most `MAX_SAMPLES` samples, read once.
        reader: of its batches.
        initial: the network before its training, or several. Without it the modules are initialised anew.
        groups: samples that belong together, such as those of one patient, are left out together.
        initialisations: how many untrained networks are averaged, where `initial` is not given.
        seed: of the initial weights and the directions.
        progress: whether to show a bar.
        least_gap: leave the temperature at 1 where the network's mean confidence exceeds the wanted one by no more than
            this.

    Raises:
        PosthocUQError: the likelihood is none of classes or of a regression with one noise variance an output, the data
            are too many or have no targets, or the untrained network is not known.
    """
    check_loader(loader)
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "Leave-one-out needs gradients, which torch.inference_mode() does not allow; call this outside of it."
        )
    if posterior.evidence.weight is not None:
        raise PosthocUQError(
            "Leave-one-out counts every sample once, and the fit had weights; use held-out data."
        )
    model, likelihood = model_of(posterior), posterior.likelihood
    data, members = _read(loader, reader, seed, groups)
    network = replicate(model, posterior.trained_mean)
    columns, outputs = list[Tensor](), list[Tensor]()
    with torch.no_grad(), isolated_random_state(seed):
        for batch in data:
            given = batch.copied().call(network)
            likelihood.check(given, batch.targets)
            assert batch.targets is not None
            found = likelihood.regression_targets(given, batch.targets)
            if found is None:
                raise PosthocUQError(
                    f"criterion='leave_one_out' is for classes and for regressions with one noise variance an output, "
                    f"without positions, and not for likelihood={likelihood.name!r}; pass held-out data."
                )
            columns.append(host_double(found))
            outputs.append(host_double(given))
    check_rows_finite(outputs)
    targets, given = torch.cat(columns), torch.cat(outputs)
    proof = posterior.proof
    if proof is None or not (proof.complete and proof.holds(network, data[0])):
        proof = prepare(network, data[0], unsupported="skip", independent=True).proof
    starts = _starts(model, data, initial, initialisations, seed)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kernel = torch.zeros(len(targets), len(targets), dtype=torch.float64, device="cpu")
    few = data if backward_dominates(posterior) else list(joined(data))
    with Progress("untrained networks", "networks", progress, len(starts)) as bar:
        for number, start in enumerate(starts):
            part = tangent_kernel(
                start(), few, mixed_seed(seed, number), proof.tracked.values(), trained or None
            )
            kernel.add_(part, alpha=1 / float(part.diagonal().mean()))
            bar.advance()
    left_out = leave_one_out(kernel, targets, members)
    facts = (len(targets), len(starts), left_out.ridge, initial is not None)
    if likelihood.logits:
        logits = given.reshape(len(given)) if targets.shape[1] == 1 else given
        wanted = left_out.largest_accuracy
        flattened = confidence(logits) - wanted > least_gap
        temperature = temperature_for(logits, wanted) if flattened else 1.0
        found = LeaveOneOut(left_out.accuracy, None, temperature, None, *facts)
        return _with(posterior, found)
    residuals = (given.reshape(targets.shape) - targets).square().mean(0)
    error = left_out.squared_error
    assert likelihood.noise_variance is not None
    scale = float((torch.maximum(error, residuals) / likelihood.noise_variance.cpu()).mean())
    return _with(posterior, LeaveOneOut(None, error, None, scale, *facts))


def _with(posterior: Posterior, found: LeaveOneOut) -> Posterior:
    """The posterior with what leave-one-out found."""
    temperature, noise_scale = found.temperature, found.noise_scale
    if temperature is not None:
        label, settings = "temperature", replace(posterior.settings, temperature=temperature)
    else:
        assert noise_scale is not None
        label, settings = "noise variance", replace(posterior.settings, noise_scale=noise_scale)
    new = posterior.at(settings).noted(tuning={label: str(found)})
    left_out = LeftOutRecord(
        temperature=1.0 if temperature is None else temperature,
        noise_scale=1.0 if noise_scale is None else noise_scale,
    )
    return new.replaced(history=replace(new.history, left_out=left_out, leave_one_out=found))


def _read(
    loader: Iterable[Any], reader: BatchReader, seed: int, groups: Groups | None
) -> tuple[list[Batch], Tensor | None]:
    """All batches, and the group of every sample as a number."""
    data, samples, named = list[Batch](), 0, list[Any]()
    if (
        groups is not None
        and not callable(groups)
        and isinstance(getattr(loader, "sampler", None), RandomSampler)
    ):
        raise PosthocUQError(
            "groups= lists the samples in the order of the loader, which shuffles; take shuffle=False, or pass a "
            "function from a batch to the groups of its samples."
        )

    def noted(items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            if callable(groups):
                named.extend(torch.as_tensor(groups(item), device="cpu").tolist())
            yield item

    with isolated_random_state(seed):
        for batch in batches(noted(loader), reader):
            if batch.targets is None:
                raise PosthocUQError(
                    f"Leave-one-out needs the training targets, and the loader yields inputs alone; {WITH_TARGETS}"
                )
            samples += count_samples(batch)
            if samples > MAX_SAMPLES:
                raise PosthocUQError(
                    f"Leave-one-out takes a number for every pair of samples, so that there may be at most "
                    f"{MAX_SAMPLES:,}. Pass a loader of some of them, whose estimate is pessimistic, or use held-out "
                    f"data."
                )
            data.append(batch.kept())
    if groups is None:
        return data, None
    if not callable(groups):
        named = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(named) != samples:
        raise PosthocUQError(f"groups= has {len(named)} entries for {samples} samples.")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named))}
    return data, torch.tensor([numbers[name] for name in named], device="cpu")


def _starts(
    model: nn.Module,
    data: Sequence[Batch],
    initial: Initial | Sequence[Initial] | None,
    initialisations: int,
    seed: int,
) -> list[Callable[[], nn.Module]]:
    """What makes each network before its training, one at a time."""
    if initial is None:
        return [lambda n=n: untrained(model, data, mixed_seed(seed, n, 1)) for n in range(initialisations)]
    several = (initial,) if isinstance(initial, (nn.Module, Mapping)) else tuple(initial)
    if not several:
        raise PosthocUQError("initial= is empty; pass the network before its training, or leave it out.")
    return [lambda each=each: with_state(model, each) for each in several]
