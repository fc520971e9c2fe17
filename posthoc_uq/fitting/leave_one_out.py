"""Calibration without held-out data: leave-one-out predictions by the tangent kernel of the untrained network.

A network knows its training labels, so that its residuals and its confidence on the training inputs say little of new
ones. The untrained network of the same architecture has seen no label. Kernel ridge regression with its tangent kernel
stands for training it (Jacot, Gabriel, Hongler 2018), and its leave-one-out predictions have a closed form: they
estimate the accuracy of a classifier, and the noise variance of a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, log10
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from posthoc_uq.core.batches import (
    LOADER,
    WITH_TARGETS,
    Batch,
    BatchReader,
    batches,
    check_loader,
    count_samples,
    explained,
)
from posthoc_uq.core.devices import host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import replicate
from posthoc_uq.core.numerics import check_rows_finite
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed, sample_keys
from posthoc_uq.curvature.kept_inputs import joined
from posthoc_uq.curvature.tangent_kernel import tangent_kernel, untrained, with_state
from posthoc_uq.fitting.faithful import backward_dominates, model_of
from posthoc_uq.layers.proof import prepare
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.posteriors.history import LeaveOneOut, LeftOutRecord
from posthoc_uq.posteriors.posterior import Posterior

Initial = nn.Module | Mapping[str, Tensor]
"""The network before its training: a model, or a state dict."""
Groups = Sequence[Any] | Tensor | Callable[[Any], Any]
"""Of every sample the group that is left out together: in the order of the loader, or from a batch."""

RIDGES = tuple(10.0 ** (0.25 * step) for step in range(-24, 9))  # 1e-6 to 1e2
MAX_TEMPERATURE = 1e4
MAX_ROWS = 2048  # of the kernel, which has a number for every pair; its eigenvectors take some five seconds

_SOLVED_AT_ONCE = 256  # columns
# float32, which halves the time, moves eigenvalues of more rows than these by some 1e-4 of the diagonal's mean; it is
# taken where the smallest is larger than this, and changes squared errors by 1e-4 of them
_MAX_FLOAT64, _MIN_FLOAT32_EIGENVALUE = 512, 1e-3

INITIALISATIONS = 3  # untrained networks that are averaged
_PARTS = 4  # of the rows, each of which is left out by itself, to see how the error falls with their number

_OF_PERCEPTRONS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.PReLU)


@dataclass(frozen=True)
class LeftOut:
    """Predictions of every sample by all others.

    Attributes:
        predictions: ``(samples, columns)``, float64.
        fitted: of the regression on all samples, of the same shape.
        targets: of the same shape.
        units: how many were left out one after the other: samples, or groups of them.
        ridge: the one of `RIDGES` with the least mean squared error.
        absent: how many columns were left out whose targets are all 0, and so their predictions.
    """

    predictions: Tensor
    fitted: Tensor
    targets: Tensor
    units: int
    ridge: float
    absent: int = 0

    @property
    def accuracy(self) -> float:
        """The share of samples whose largest prediction is their class; of one column, that is on the side of 1/2 of
        their target.
        """
        if self.targets.shape[1] == 1:
            return float(((self.predictions > 0.5) == (self.targets > 0.5)).double().mean())
        return float((self.predictions.argmax(1) == self.targets.argmax(1)).double().mean())

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
    values, vectors = _eigenpairs(kernel / kernel.diagonal().mean())
    rotated = vectors.T @ (targets - targets.mean(0)).to(vectors)
    units = samples if members is None else len(members)
    all_inverse_values = 1 / (values.unsqueeze(1) + values.new_tensor(RIDGES))
    diagonals = vectors.square() @ all_inverse_values  # of A^-1, for every ridge
    ridges = RIDGES
    if (
        members is None and 2 * rotated.shape[1] > samples
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
        found = LeftOut(targets - residuals, targets - ridge * solved, targets, units, ridge)
        if best is None or float(found.squared_error.sum()) < float(best.squared_error.sum()):
            best = found
    return cast(LeftOut, best)


def _eigenpairs(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, none below 0, and eigenvectors, in float32 where that changes nothing that matters."""
    if len(kernel) > _MAX_FLOAT64:
        less = kernel - _MIN_FLOAT32_EIGENVALUE * torch.eye(len(kernel), dtype=kernel.dtype, device="cpu")
        if not int(torch.linalg.cholesky_ex(less).info):  # all eigenvalues are positive
            return tuple(torch.linalg.eigh(kernel.float()))
    # torch's own takes a third longer on a CPU in float64
    values, vectors = map(torch.from_numpy, np.linalg.eigh(kernel.numpy()))
    return values.clamp(min=0), vectors


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
    if confidence(wide) <= wanted:
        return 1.0
    highest = log10(MAX_TEMPERATURE)
    if confidence(wide / 10.0**highest) >= wanted:  # no better than chance, where all probabilities are equal
        return MAX_TEMPERATURE
    from scipy.optimize import brentq

    found: Any = brentq(lambda decade: confidence(wide / 10.0**decade) - wanted, 0.0, highest, xtol=1e-6)
    return 10.0 ** float(found)


def likeliest_temperature(logits: Tensor, left_out: LeftOut) -> float:
    """The temperature, from 1 to 10,000, at which left-out predictions make the labels most likely as logits.

    The kernel regression shows how much smaller margins are on new inputs: its left-out predictions are taken as logits
    in units in which its fitted ones have the network's mean margin on the training inputs.

    Args:
        logits: of the network, ``(samples, classes)``, or ``(samples,)`` of two classes.
        left_out: of the same samples.
    """
    fitted, predictions, labels = map(_of_columns, (left_out.fitted, left_out.predictions, left_out.targets))
    margin = float(_margins(fitted).mean())
    if margin <= 0:
        return 1.0
    as_logits = predictions * (float(_margins(_of_classes(logits)).mean()) / margin)
    of_labels = (as_logits * labels).sum(1)

    def slope(decade: float) -> float:
        """Of the mean log likelihood along the inverse temperature, in which it is concave."""
        scaled = as_logits / 10.0**decade
        if left_out.absent:  # which have the logit 0
            scaled = torch.cat([scaled, torch.full_like(scaled[:, :1], log(left_out.absent))], 1)
        expected = (scaled.softmax(1)[:, : as_logits.shape[1]] * as_logits).sum(1)
        return float((of_labels - expected).mean())

    if slope(0.0) >= 0:
        return 1.0
    highest = log10(MAX_TEMPERATURE)
    if slope(highest) <= 0:
        return MAX_TEMPERATURE
    from scipy.optimize import brentq

    return 10.0 ** float(cast(float, brentq(slope, 0.0, highest, xtol=1e-4)))


def _without_absent(targets: Tensor) -> tuple[Tensor, int]:
    """The columns that are not all 0, and two of those that are, which stand for the others in comparisons of the
    largest values; and how many others there are: of many classes few rows have only some.
    """
    absent = (~targets.bool().any(0)).nonzero().flatten()[2:]
    if not len(absent):
        return targets, 0
    kept = torch.ones(targets.shape[1], dtype=torch.bool, device="cpu")
    kept[absent] = False
    return targets[:, kept], len(absent)


def _of_columns(values: Tensor) -> Tensor:
    """Predictions of both classes where there is one column."""
    return values if values.shape[1] > 1 else torch.cat((1 - values, values), 1)


def _margins(values: Tensor) -> Tensor:
    """By how much the largest value of each row exceeds the second."""
    largest = values.topk(2, dim=1).values
    return largest[:, 0] - largest[:, 1]


def new_temperature(logits: Tensor, accuracy: float, units: int, likeliest: float) -> float:
    """The geometric mean of two estimates of the temperature that predictions of new inputs need: that at which the
    network's mean confidence is the accuracy and two of its standard errors, and `likeliest_temperature`.

    The first takes confidence on new inputs for that on training inputs and is too high, the second trusts the kernel's
    margins and is too low where it predicts poorly (docs/defaults.md).

    Args:
        logits: as `temperature_for` takes them.
        accuracy: that is estimated on new inputs.
        units: how many were left out one after the other to estimate it.
        likeliest: the other estimate.
    """
    wanted = accuracy + 2 * (accuracy * (1 - accuracy) / units) ** 0.5
    return ((temperature_for(logits, wanted) if wanted < 1 else 1.0) * likeliest) ** 0.5


@dataclass(frozen=True)
class _Growth:
    """How measures of left-out predictions fall as the samples grow from a part of the rows to all, and are taken to
    fall on, by the same power, to the number of all samples.

    Attributes:
        whole: all rows, and the network's outputs for them.
        parts: equal parts of the rows, each left out by itself; none where the rows are all samples.
        power: that of the fall from a part to all rows which is the one from all rows to all samples.
    """

    whole: tuple[LeftOut, Tensor]
    parts: list[tuple[LeftOut, Tensor]]
    power: float

    def of_all(self, measure: Callable[[LeftOut, Tensor], float]) -> float:
        """The measure, at least 0, as it would be of all samples."""
        now = measure(*self.whole)
        if not self.parts:
            return now
        before = sum(measure(*part) for part in self.parts) / len(self.parts)
        return now * (now / before) ** self.power if now < before else now


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
) -> Posterior:
    """The posterior with the temperature of classes, or the noise of a regression, that follows from the training data
    alone; its history says what was found.

    The temperature is `new_temperature`, never below 1. The noise scale is the mean over outputs of the larger of the
    training residuals' mean square and the leave-one-out error, over the noise variance of the fit: one factor for all
    outputs, whose noise variances keep their ratios. A faithful prior is to be found again then.

    Of more than `MAX_ROWS` samples those with the smallest hashes are left out one after the other. By four parts of
    them, each by itself, it is seen how errors fall with the number of samples, and they are taken to fall on by that
    power of it: rather too far than not far enough, since what noise there is in the labels stays.

    Args:
        posterior: of a network that was trained from scratch on these data, or else with `initial`.
        loader: the training data, read once.
        reader: of its batches.
        initial: the network before its training, or several. Without it the modules are initialised anew.
        groups: samples that belong together, such as those of one patient, are left out together.
        initialisations: how many untrained networks are averaged, where `initial` is not given.
        seed: of the initial weights and the directions.
        progress: whether to show a bar.

    Raises:
        PosthocUQError: the likelihood is none of classes or of a regression with one noise variance an output, the data
            have no targets, or the untrained network is not known.
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
    data, order, members, samples = _read(loader, reader, seed, groups)
    network = replicate(model, posterior.trained_mean)
    found_targets, outputs = list[Tensor](), list[Tensor]()
    with torch.no_grad(), isolated_random_state(seed):
        for batch in data:
            with explained(lambda: network, batch, "a batch of the loader", LOADER):
                given = batch.copied().call(network)
            likelihood.check(given, batch.targets)
            assert batch.targets is not None
            found = likelihood.regression_targets(given, batch.targets)
            if found is None:
                raise PosthocUQError(
                    f"criterion='leave_one_out' is for classes and for regressions with one noise variance an output, "
                    f"without positions, and not for likelihood={likelihood.name!r}; pass held-out data."
                )
            found_targets.append(host_double(found))
            outputs.append(host_double(given))
    check_rows_finite(outputs)
    targets, given = torch.cat(found_targets), torch.cat(outputs)
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
    if samples > len(targets):
        kernel, targets, given = kernel[order][:, order], targets[order], given[order]
    if likelihood.logits and targets.shape[1] == 1:
        given = given.reshape(len(given))
    power = log(samples / len(targets)) / log(_PARTS)
    many = likelihood.softmax and targets.shape[1] > len(targets)
    targets, absent = _without_absent(targets) if many else (targets, 0)
    missing = targets.isnan()
    growths = list[tuple[list[int], _Growth]]()  # of columns whose targets are there in the same rows
    for columns_alike in _alike(missing) if bool(missing.any()) else [list(range(targets.shape[1]))]:
        own = (~missing[:, columns_alike[0]]).nonzero().flatten()
        if len(own) == len(targets):
            whole = kernel, targets[:, columns_alike], given, members
            growths.append((columns_alike, _growth(*whole, power, absent)))
        else:
            named = None if members is None else members[own]
            parts = kernel[own][:, own], targets[own][:, columns_alike], given[own], named
            growths.append((columns_alike, _growth(*parts, power)))
    growth = growths[0][1]
    left_out = growth.whole[0]
    facts: dict[str, Any] = {
        "samples": samples,
        "rows": len(targets),
        "initialisations": len(starts),
        "ridge": left_out.ridge,
        "initial": initial is not None,
    }
    if likelihood.logits:
        accuracy = 1 - growth.of_all(lambda found, _: 1 - found.accuracy)
        decades = growth.of_all(lambda found, logits: log10(likeliest_temperature(logits, found)))
        temperature = new_temperature(given, accuracy, left_out.units, 10.0**decades)
        return _with(posterior, LeaveOneOut(accuracy=accuracy, temperature=temperature, **facts))
    residuals = (given.reshape(targets.shape) - targets).square().nanmean(0)
    error = torch.zeros_like(residuals)
    for columns_alike, growth in growths:
        for place, column in enumerate(columns_alike):
            error[column] = growth.of_all(lambda found, _, n=place: float(found.squared_error[n]))
    assert likelihood.noise_variance is not None
    if isinstance(likelihood, Gaussian):  # in the targets' units
        error, residuals = likelihood.times_std(error, 2), likelihood.times_std(residuals, 2)
    scale = float((torch.maximum(error, residuals) / likelihood.noise_variance.cpu()).mean())
    return _with(posterior, LeaveOneOut(noise_variance=error, noise_scale=scale, **facts))


def _alike(missing: Tensor) -> list[list[int]]:
    """The columns of a mask ``(rows, columns)`` in groups of those that are the same."""
    found = dict[bytes, list[int]]()
    for column, own in enumerate(missing.T.contiguous()):
        found.setdefault(own.numpy().tobytes(), []).append(column)
    return list(found.values())


def _growth(
    kernel: Tensor, targets: Tensor, given: Tensor, members: Tensor | None, power: float, absent: int = 0
) -> _Growth:
    """Left-out predictions of all rows, and of their parts where there are more samples than rows."""
    left_out = replace(leave_one_out(kernel, targets, members), absent=absent)
    parts = list[tuple[LeftOut, Tensor]]()
    if power > 0 and members is None:
        for rows in torch.arange(len(targets), device="cpu").chunk(_PARTS):
            part = leave_one_out(kernel[rows][:, rows], targets[rows])
            parts.append((replace(part, absent=absent), given[rows]))
    return _Growth((left_out, given), parts, power)


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
) -> tuple[list[Batch], Tensor, Tensor | None, int]:
    """Batches of all samples, or of the `MAX_ROWS` with the smallest hashes of inputs and targets; an order of some
    that is not the loader's, the group of each in this order as a number, and how many samples there are.
    """
    named = list[Any]()
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

    data, keys, places, samples = list[Batch](), list[Tensor](), list[Tensor](), 0
    with isolated_random_state(seed):
        for batch in batches(noted(loader), reader):
            if batch.targets is None:
                raise PosthocUQError(
                    f"Leave-one-out needs the training targets, and the loader yields inputs alone; {WITH_TARGETS}"
                )
            count = count_samples(batch)
            data.append(batch.kept())
            keys.append(sample_keys((*batch.tensors, batch.targets), count, mixed_seed(seed, 3)).cpu())
            places.append(torch.arange(samples, samples + count, device="cpu"))
            samples += count
            if sum(map(len, keys)) > 2 * MAX_ROWS:
                data, keys, places = _smallest(data, keys, places)
    if samples > MAX_ROWS:
        data, keys, places = _smallest(data, keys, places)
        data = list(joined(data))
    some = samples > MAX_ROWS
    order = torch.cat(keys).argsort(stable=True) if some else torch.arange(samples, device="cpu")
    if groups is None:
        return data, order, None, samples
    if not callable(groups):
        named = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(named) != samples:
        raise PosthocUQError(f"groups= has {len(named)} entries for {samples} samples.")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named))}
    members = torch.tensor([numbers[name] for name in named], device="cpu")
    return data, order, members[torch.cat(places)[order]] if samples else members, samples


def _smallest(
    data: Sequence[Batch], keys: Sequence[Tensor], places: Sequence[Tensor]
) -> tuple[list[Batch], list[Tensor], list[Tensor]]:
    """The `MAX_ROWS` samples with the smallest keys, of batches, their keys and their places."""
    counts = [len(part) for part in keys]
    taken = torch.zeros(sum(counts), dtype=torch.bool, device="cpu")
    taken[torch.cat(list(keys)).argsort(stable=True)[:MAX_ROWS]] = True
    picked = [
        part for part in zip(data, keys, places, taken.split(counts), strict=True) if bool(part[3].any())
    ]
    cut = [batch if bool(p.all()) else batch.select(p, len(p)) for batch, _, _, p in picked]
    return cut, [own[p] for _, own, _, p in picked], [own[p] for _, _, own, p in picked]


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
