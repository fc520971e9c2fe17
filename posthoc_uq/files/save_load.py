"""`save`, `load` and `inspect`: a posterior as one file, checked as a whole before any of its numbers is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from io import BytesIO
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, cast, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.devices import has_double, usable_device
from posthoc_uq.core.distributed import rank
from posthoc_uq.core.errors import (
    CorruptPosteriorError,
    NonFiniteError,
    PosteriorMismatchError,
    PosthocUQError,
    out_of_memory,
)
from posthoc_uq.core.interrupts import check, defer_interrupts
from posthoc_uq.core.model import (
    check_usable,
    model_device,
    unwrap,
    with_plain_weights,
    with_separate_embedding_weight,
)
from posthoc_uq.core.options import check_option, known_arguments
from posthoc_uq.core.outputs import Output, checked_output, choice_of, with_choice
from posthoc_uq.files import atomic, ensembles, hdf5, header
from posthoc_uq.files.check import check_together
from posthoc_uq.files.ensembles import StoredEnsemble
from posthoc_uq.files.hdf5 import ImageReader, Stored, Structure
from posthoc_uq.files.match import (
    check_buffers,
    check_shapes,
    check_unchanged,
    fingerprint,
    others_fingerprint,
    parameters_of,
)
from posthoc_uq.files.records import (
    Description,
    described_slots,
    description_of,
    parsed,
)
from posthoc_uq.files.summary import EnsembleInspection, Inspection
from posthoc_uq.files.tensors import (
    BLOCKS_GROUP,
    FEATURES,
    FORMATS,
    MEAN,
    PRIOR_MEAN,
    PRIOR_PRECISION,
    STORED,
    TensorSlot,
    as_array,
    block_group,
    find_fault,
    parameter_shapes,
    size_limit,
    tensors_of,
)
from posthoc_uq.files.untrusted import ChildReader
from posthoc_uq.likelihoods import Likelihood, likelihood_from_attributes
from posthoc_uq.posteriors.block import BLOCKS, FAMILIES, OUTPUTS_ALONE
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence, WeightPrior
from posthoc_uq.version import __version__


@runtime_checkable
class Storable(Protocol):
    """The predictor of several networks, as far as this room knows it."""

    def stored(self) -> StoredEnsemble: ...


class OutputsAlone(Protocol):
    """What predicts by a posterior over no weights, as far as this room knows it."""

    @property
    def posterior(self) -> Posterior: ...


_WIDER_DTYPE = "save with dtype=torch.bfloat16 or torch.float32"
_MAX_LOST_SHARE = 0.01  # of a tensor's absolute sum, by a narrower number format


@defer_interrupts
@known_arguments
def save(
    posterior: Posterior | Storable | OutputsAlone,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    compression: Literal["gzip"] | None = None,
) -> None:
    """Write a posterior to one HDF5 file (``docs/format.md``), without the model.

    The file appears under its name only when it is complete; an older file of that name stays if anything fails. The
    same posterior gives the same bytes. In a process group of `torch.distributed` only rank 0 writes, and the others
    return at once.

    Args:
        posterior: what `fit` or `load` gave; or the predictor of several networks, with all of their posteriors, or of
            calibrated outputs.
        path: the file; its folder must exist.
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`; that of the posterior if None. Half
            formats are read back as float32. A trained mean keeps its precision.
        compression: ``"gzip"`` (with HDF5's byte shuffle) or None.

    Raises:
        PosthocUQError: the numbers do not fit the format, or the file cannot be written.
        NonFiniteError: the posterior holds NaN or infinity.

    Example:
        ```python
        uq.save(posterior, "digits.inf.h5")
        uq.save(posterior, "half.h5", dtype=torch.bfloat16)
        posterior = uq.load("digits.inf.h5", model)
        ```
    """
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise PosthocUQError(
            f"dtype must be torch.float32, torch.float16, torch.bfloat16 or None, not {dtype}."
        )
    check_option("compression", compression, Literal["gzip"] | None)
    if getattr(posterior, "head", None) == OUTPUTS_ALONE:
        posterior = cast(OutputsAlone, posterior).posterior
    several = posterior.stored() if isinstance(posterior, Storable) else None
    if several is None and not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"save takes the posterior first and the path second; the first is a {type(posterior).__name__}."
        )
    given = [posterior] if several is None else [each for each in several.posteriors if each is not None]
    for each in cast("list[Posterior]", given):
        check_unchanged(each)
    if rank() == 0:
        atomic.checked_target(path)  # before the work
        one = cast(Posterior, posterior)
        several_or_one = partial(_image, one) if several is None else partial(_image_of_several, several)
        atomic.write(path, several_or_one(dtype, compression))


def _image_of_several(stored: StoredEnsemble, dtype: torch.dtype | None, compression: str | None) -> BytesIO:
    images = [
        None if each is None else _image(each, dtype, compression).getvalue() for each in stored.posteriors
    ]
    try:
        return BytesIO(ensembles.image(stored, images, __version__))
    except (CorruptPosteriorError, TypeError, ValueError, KeyError) as error:
        raise PosthocUQError(f"The predictor holds a value that no file can keep: {error}.") from error


def _image(posterior: Posterior, dtype: torch.dtype | None, compression: str | None) -> BytesIO:
    """The whole file in memory."""
    try:
        description = description_of(posterior)
        arrays: dict[str, Callable[[], np.ndarray[Any, Any]]] = {}
        for slot, tensor in tensors_of(posterior):
            wanted = tensor.dtype if slot.keeps_format else dtype or tensor.dtype
            _check_storable(slot, tensor, wanted)
            arrays[slot.path] = partial(as_array, tensor, wanted)
        check_together(posterior)
        text, attributes = hdf5.state_text(description.plain()), _attributes(description, __version__)
        image = hdf5.build_image(text, attributes, arrays, header.SIZE, compression)
        return header.write_header(image, posterior.method)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, PosthocUQError) and not isinstance(error, CorruptPosteriorError):
            raise
        raise PosthocUQError(f"The posterior holds a value that no file can keep: {error}.") from error


def _check_storable(slot: TensorSlot, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor that cannot be stored and read back."""
    check()
    which = f"Tensor '{slot.name}' of {slot.owner}"
    if tensor.dtype not in STORED:
        raise PosthocUQError(f"{which} is of {tensor.dtype}, which a file does not hold.")
    if slot.spec.shape != tensor.shape:
        raise PosthocUQError(f"{which} has shape {tuple(tensor.shape)}, and should have {slot.spec.shape}.")
    fault = find_fault(slot.spec, tensor)
    if fault is not None:
        kind = NonFiniteError if "NaN" in fault else PosthocUQError
        raise kind(f"{which} {fault}; fit again before saving.")
    if dtype == tensor.dtype:
        return
    stored = tensor.detach().to(dtype)
    limit, largest = torch.finfo(dtype).max, float(tensor.abs().max()) if tensor.numel() else 0.0
    if not bool(torch.isfinite(stored).all()):
        raise PosthocUQError(
            f"{which} reaches {largest:.3g}, more than {dtype} holds ({limit:.3g}); {_WIDER_DTYPE}."
        )
    # the features are scaled to fit any number format; numbers that become zero are below the smoothing
    total = 0.0 if slot.group == FEATURES else float(tensor.abs().sum())
    lost = float((tensor - stored.to(tensor.dtype)).abs().sum())
    if lost > _MAX_LOST_SHARE * total > 0:
        raise PosthocUQError(
            f"{which} (at most {largest:.3g}) would lose {lost / total:.0%} of its sum to {dtype}, whose smallest "
            f"number is {torch.finfo(dtype).smallest_normal:.3g}; {_WIDER_DTYPE}."
        )


def _attributes(description: Description, release: str) -> dict[str, str | int]:
    """What any HDF5 tool shows of the file as a whole."""
    return {
        "format": "posthoc_uq posterior",
        "format_version": header.FORMAT,
        "library_version": release,
        "method": description.method,
        "fingerprint": description.fingerprint,
    }


@overload
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    prefix: str | None = None,
    untrusted: bool = False,
    device: torch.device | str | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Posterior: ...


@overload
def load(
    path: str | os.PathLike[str],
    model: Sequence[nn.Module] | None = None,
    *,
    untrusted: bool = False,
    device: torch.device | str | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Any: ...


@defer_interrupts
@known_arguments
def load(
    path: str | os.PathLike[str],
    model: Any = None,
    *,
    prefix: str | None = None,
    untrusted: bool = False,
    device: torch.device | str | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Any:
    """Read a posterior for the model it was fitted on; it is centred on that model's parameters, or on those that the
    method trained. Of a list of models read the predictor of several networks.

    Args:
        path: a file that `save` wrote.
        model: the model, with the weights it had when the posterior was fitted; or a list of all networks, in their
            order, for the file of an ensemble's predictor; none for that of calibrated outputs.
        prefix: of a posterior that was fitted on a part of the model, such as the last layer on stored features, the
            part's name in the model, ``"fc"``. Its weights are compared; that the model gives it the features of the
            fit is yours to know.
        untrusted: parse the file in a child process with a time and memory limit. The digest in a file detects
            damage, but anybody can write a file with a correct digest; set this for a stranger's file.
        device: where the posterior shall live; the model's device if None.
        likelihood: of a posterior that was fitted with a likelihood of your own: an object of the same class with the
            same attributes. Nothing is imported because a file names it.
        output: of a posterior that was fitted with a function as ``output=``: the same function. A key or an index is
            in the file. With `prefix`, where the outputs are in what the whole model returns, if that is no tensor.

    Returns:
        The posterior; of a list of models a `posthoc_uq.heads.EnsemblePredictor`, and without a model a
            `posthoc_uq.heads.OutputsPredictor` (`calibrate_outputs`).

    Raises:
        PosthocUQError: the file is missing or cannot be read, there is no such device, the model's weights have no
            numbers, or the likelihood or the output's function is missing or another one.
        CorruptPosteriorError: it is damaged, incomplete, foreign, or of a format that is not read.
        PosteriorMismatchError: it belongs to another model, to other values of the weights that have a posterior, or to
            other buffers, such as the running statistics of batch normalisation.

    Example:
        ```python
        uq.save(posterior, "digits.inf.h5")
        posterior = uq.load("digits.inf.h5", model)  # no data, no new fit
        prediction = uq.wrap(model, posterior)(images)
        ```
    """
    options = _LoadOptions(untrusted, device, likelihood, output)
    if model is None:
        return _load_outputs(path, options)
    if isinstance(model, (list, tuple, nn.ModuleList)):
        if prefix is not None:
            raise PosthocUQError(
                "prefix= is for the posterior of one model; load that one by itself, and wrap the list."
            )
        return _load_several(path, list(cast(Iterable[nn.Module], model)), options)
    check_usable(unwrap(model))
    if prefix is not None:
        from posthoc_uq.files.part import of_whole, part_of

        whole = with_plain_weights(unwrap(model))
        part = part_of(whole, prefix)
        found = load(path, part, untrusted=untrusted, device=device, likelihood=likelihood)
        return of_whole(found, whole, prefix, checked_output(output))

    def limit(kind: str) -> int:
        if kind == header.ENSEMBLE:
            raise ensembles.several_error(os.fsdecode(path))
        if kind == OUTPUTS_ALONE:
            raise PosthocUQError(
                f"'{os.fsdecode(path)}' holds calibrated outputs, which need no model: uq.load(path)."
            )
        return size_limit(kind, with_plain_weights(unwrap(model)))

    data, head = header.read(path, limit)
    return _load(data, head, os.fsdecode(path), model, options)


class _LoadOptions(NamedTuple):
    """The options of `load`; see there."""

    untrusted: bool
    device: torch.device | str | None
    likelihood: Likelihood | None
    output: Output | None


def _load_several(path: str | os.PathLike[str], models: list[nn.Module], options: _LoadOptions) -> Any:
    """The predictor of several networks from its file."""
    name = os.fsdecode(path)
    for model in models:
        check_usable(unwrap(model))

    def limit(kind: str) -> int:
        if kind != header.ENSEMBLE:
            raise PosthocUQError(
                f"'{name}' holds the posterior of one network, and {len(models)} models were given; give that one: "
                f"uq.load(path, model)."
            )
        plain = [with_plain_weights(unwrap(model)) for model in models]
        return ensembles.SPARE + sum(max(size_limit(each, model) for each in FAMILIES) for model in plain)

    data, _ = header.read(path, limit)
    with _translated(name):
        record, images = ensembles.opened(data, options.untrusted)
    if len(images) != len(models):
        raise PosteriorMismatchError(
            f"'{name}' holds {len(images)} networks, and {len(models)} models were given; give all of them, in their "
            f"order."
        )
    posteriors = list[Posterior | None]()
    for number, (model, own) in enumerate(zip(models, images, strict=True)):
        if own is None:
            ensembles.check_plain_network(number, record.networks[number], model, name)
            posteriors.append(None)
        else:
            within = f"{name}', network '{number}"
            posteriors.append(_load(own, header.verified(own, within), within, model, options))
    try:
        likelihood = likelihood_from_attributes(record.likelihood, options.likelihood)
    except PosthocUQError as error:
        raise PosthocUQError(f"'{name}' cannot be loaded: {error}") from None
    stored = StoredEnsemble(
        models, posteriors, likelihood, record.temperature, record.head, record.options, record.promises
    )
    return import_module("posthoc_uq.fitting.wrap").ensemble_of(stored)  # predictors stand above this room


class _NoModel(nn.Module):
    """In place of the model that calibrated outputs do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros((), device="cpu"), requires_grad=False)


def _load_outputs(path: str | os.PathLike[str], options: _LoadOptions) -> Any:
    """What predicts from outputs, from its file."""
    name, model = os.fsdecode(path), _NoModel()

    def limit(kind: str) -> int:
        if kind != OUTPUTS_ALONE:
            raise PosthocUQError(
                f"'{name}' holds a posterior; give the model that it was fitted on: uq.load(path, model)."
            )
        return size_limit(kind, model)

    data, head = header.read(path, limit)
    posterior = _load(data, head, name, model, options)
    made = import_module("posthoc_uq.fitting.outputs").predictor_of  # predictors stand above this room
    with _translated(name):
        try:
            return made(posterior).to(options.device or "cpu")
        except (PosthocUQError, TypeError) as error:
            raise CorruptPosteriorError(str(error)) from error


def _load(data: bytes, head: header.Header, path: str, model: nn.Module, options: _LoadOptions) -> Posterior:
    """The posterior of a verified file."""
    model = with_plain_weights(unwrap(model))
    untrusted, device, likelihood, output = options
    place = model_device(model)
    if device is not None:
        way_out = "leave device out for the model's own, or use 'cpu'"
        place = usable_device(device, f"device={str(device)!r}", way_out)
    parameters = parameters_of(model)
    with _translated(path):
        with ChildReader(data) if untrusted else ImageReader(data) as reader:
            structure = reader.structure()
            description, slots = _described(structure, head)
            _check_model(description, model, parameters, path)
            likelihood = _likelihood(description, likelihood, path)
            tensors: dict[str, Tensor] = {}
            for dataset, stored in structure.datasets.items():
                check()
                tensors[dataset] = torch.from_numpy(reader.array(dataset, stored))
        for slot in slots:
            parameter = parameters[slot.name] if slot.group == MEAN else None
            tensors[slot.path] = _restored(
                slot, tensors[slot.path], structure.datasets[slot.path], parameter, place
            )
        posterior = _posterior(description, slots, tensors, parameters, likelihood)
        choice = choice_of(posterior.history.output, checked_output(output))
        network = with_choice(with_separate_embedding_weight(model, posterior.original), choice)
        return posterior.replaced(model=network)


def _restored(
    slot: TensorSlot, tensor: Tensor, stored: Stored, parameter: Tensor | None, place: torch.device
) -> Tensor:
    """A dataset's numbers, checked, as the tensor that was saved: half formats as float32, the mean in the number type
    and on the device of the model's parameter.
    """
    if FORMATS[stored.dtype] == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    if parameter is not None:
        tensor, place = tensor.to(parameter.dtype), parameter.device
    fault = find_fault(slot.spec, tensor)
    if fault is not None:
        raise CorruptPosteriorError(f"'{slot.name}' of {slot.owner} {fault}")
    if tensor.dtype == torch.float64 and not has_double(place):
        tensor = tensor.float()
    return tensor.to(place)


def _posterior(
    description: Description,
    slots: list[TensorSlot],
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    likelihood: Likelihood,
) -> Posterior:
    """The posterior of a description and its tensors, which are given by the path of the dataset.

    Raises:
        CorruptPosteriorError: tensors do not fit each other, or reach numbers that float32 does not hold.
    """
    by_group: dict[str, dict[str, Tensor]] = {}
    for slot in slots:
        by_group.setdefault(slot.group, {})[slot.name] = tensors[slot.path]
    blocks = {
        name: BLOCKS[block.kind].restore(block.attributes, by_group[block_group(name)])
        for name, block in description.blocks.items()
    }
    posterior = Posterior(
        description.method,
        description.layers_by_name(),
        blocks,
        {name: list(block.members) for name, block in description.blocks.items()},
        parameters,
        likelihood,
        Evidence(**description.evidence.model_dump()),
        description.history.history(),
        trained_mean=by_group.get(MEAN, {}),
        settings=description.settings.hyperparameters(),
        features=None
        if description.features is None
        else FeatureGrams.restore(description.features.plain(), by_group[FEATURES]),
        weight_prior=WeightPrior(
            by_group.get(PRIOR_PRECISION, {}), by_group.get(PRIOR_MEAN, description.prior.mean)
        ),
        fingerprint=description.fingerprint,
        buffers_fingerprint=description.buffers_fingerprint,
        others_fingerprint=description.others_fingerprint,
    )
    check_together(posterior)
    return posterior


def _described(structure: Structure, head: header.Header) -> tuple[Description, list[TensorSlot]]:
    """A file's description, and the tensors that it must have.

    Raises:
        CorruptPosteriorError: the description is not admissible, contradicts itself, or is not what the file holds.
    """
    description = parsed(structure.state)
    if description.method != head.kind:
        raise CorruptPosteriorError(
            f"its header says method={head.kind!r}, and its description {description.method!r}"
        )
    slots = described_slots(description)
    wanted = {slot.path: slot for slot in slots}
    groups = {slot.group for slot in slots} | ({BLOCKS_GROUP} if slots else set[str]())
    stray = sorted(groups ^ set(structure.groups))
    if stray:
        raise CorruptPosteriorError(f"its groups are not those described: {stray[:3]}")
    for dataset, slot in wanted.items():
        stored = structure.datasets.get(dataset)
        if stored is None:
            raise CorruptPosteriorError(f"{slot.owner} lacks the dataset '{dataset}'")
        if stored.shape != slot.spec.shape or (FORMATS[stored.dtype] == torch.uint8) != slot.spec.bits:
            raise CorruptPosteriorError(
                f"dataset '{dataset}' of {slot.owner} has shape {stored.shape} and type {stored.dtype}, and should "
                f"have shape {slot.spec.shape}"
            )
    stray = sorted(structure.datasets.keys() - wanted.keys())
    if stray:
        raise CorruptPosteriorError(f"it holds datasets that no posterior has: {stray[:3]}")
    stray = sorted(set(structure.attributes) - _attributes(description, head.release).keys())
    if stray:
        raise CorruptPosteriorError(f"it has attributes that no posterior has: {stray[:3]}")
    return description, slots


def _check_model(
    description: Description,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    path: str | os.PathLike[str],
) -> None:
    """Refuse a model that the file does not belong to."""
    shapes = parameter_shapes(description.layers_by_name().values())
    shapes |= {name: tuple(shape) for name, shape in description.certain.items()}
    if not shapes.keys() <= parameters.keys():
        from posthoc_uq.files.part import part_with

        part = part_with(model, shapes, description.fingerprint)
        if part is not None:
            raise PosteriorMismatchError(
                f"The posterior in '{path}' was fitted on a part of this model, '{part}'; give its name: "
                f"uq.load(path, model, prefix='{part}')."
            )
    check_shapes(shapes, parameters, f"'{os.fsdecode(path)}'")
    if fingerprint({name: parameters[name] for name in shapes}) != description.fingerprint:
        raise PosteriorMismatchError(
            f"The model's parameters are not those that the posterior in '{path}' was fitted on: in its layers, names "
            f"and shapes agree, the numbers or their dtype do not. Load those weights into the model first, or fit "
            f"again."
        )
    check_buffers(description.buffers_fingerprint, model)
    if description.others_fingerprint not in (None, others_fingerprint(parameters, shapes)):
        raise PosteriorMismatchError(
            f"The model's parameters without a posterior are not those that the posterior in '{path}' was fitted on. "
            f"Load those weights into the model first, in the same dtype, or fit again."
        )


def _likelihood(
    description: Description, given: Likelihood | None, path: str | os.PathLike[str]
) -> Likelihood:
    """The likelihood of a file; for a user's own class, the object that was passed, if it matches the file."""
    try:
        return likelihood_from_attributes(description.likelihood, given)
    except PosthocUQError as error:
        raise PosthocUQError(f"'{path}' cannot be loaded: {error}") from None


@contextmanager
def _translated(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Turn every error that a malformed file causes in Python into a `CorruptPosteriorError`."""
    try:
        yield
    except CorruptPosteriorError as error:
        raise CorruptPosteriorError(f"'{path}' cannot be loaded: {str(error).rstrip('.')}.") from None
    except PosthocUQError:
        raise
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if out_of_memory(error):
            raise PosthocUQError(f"'{path}' does not fit into memory.") from None
        raise CorruptPosteriorError(f"'{path}' cannot be loaded: {error or type(error).__name__}.") from error


def inspect(path: str | os.PathLike[str]) -> Inspection | EnsembleInspection:
    """What a file holds, without a model and without its numbers; always parsed in a child process.

    Returns:
        A dictionary of plain values, which prints as a summary: ``format_version``, ``library_version``, ``bytes``,
        ``fingerprint``, ``buffers_fingerprint`` and ``others_fingerprint`` (None where the model has no buffers, or no
        parameters without a posterior), ``method``, ``likelihood``, ``scale``, ``prior_precision``,
        ``residual_weight``, ``noise_scale``, ``temperature``, ``evidence``, ``fit``, ``tuning``, ``deterministic``,
        ``head``, ``faithful``, ``left_out``, ``leave_one_out``, ``calibration``, ``promises`` (held-out scores),
        ``changes`` (of the data since the fit), ``output`` (the part of what the model returns), ``parameters``,
        ``trained_mean`` (names of the parameters that it has), ``features`` (what is kept of the last layer's inputs,
        or None), ``layers`` (name to kind and shapes) and ``blocks`` (name to kind, members, attributes such as ranks
        and correction, tensors with shape and dtype, and bytes). Of the file of several networks ``method`` is
        ``"ensemble"``, and beside ``likelihood``, ``temperature``, ``head``, ``options`` and ``promises`` it has
        ``networks``, such a dictionary for each, or its fingerprints where it has no posterior.

    Raises:
        PosthocUQError: the file is missing or cannot be read.
        CorruptPosteriorError: it is damaged, incomplete, foreign, or of a format that is not read.

    Example:
        ```python
        uq.save(posterior, "digits.inf.h5")
        found = uq.inspect("digits.inf.h5")
        print(found)  # method, layers, hyperparameters, promises
        print(found["method"], found["scale"])
        ```
    """
    data, head = header.read(path, lambda _: sys.maxsize)
    name = os.fsdecode(path)
    if head.kind != header.ENSEMBLE:
        return _inspected(data, head, name)
    with _translated(name):
        record, images = ensembles.opened(data, untrusted=True)
    found = list[Any]()
    for number, (network, own) in enumerate(zip(record.networks, images, strict=True)):
        within = f"{name}', network '{number}"
        found.append(
            network.plain() if own is None else _inspected(own, header.verified(own, within), within)
        )
    contents = {
        "format_version": header.FORMAT,
        "library_version": head.release,
        "bytes": len(data),
        "method": head.kind,
        **{"head": None, "promises": None},
        **record.plain(),
        "networks": found,
    }
    return EnsembleInspection(name, contents)


def _inspected(data: bytes, head: header.Header, path: str) -> Inspection:
    """The contents of a verified file."""
    with _translated(path):
        with ChildReader(data) as reader:
            structure = reader.structure()
        description, slots = _described(structure, head)
    plain = description.plain()
    history: dict[str, Any] = plain["history"]
    optional = ("head", "faithful", "left_out", "leave_one_out", "calibration", "promises", "changes")
    contents = {
        "format_version": header.FORMAT,
        "library_version": head.release,
        "bytes": len(data),
        "fingerprint": description.fingerprint,
        "buffers_fingerprint": description.buffers_fingerprint,
        "others_fingerprint": description.others_fingerprint,
        "method": description.method,
        **plain["settings"],
        "likelihood": description.likelihood,
        "evidence": plain["evidence"],
        **{name: history[name] for name in ("fit", "tuning", "deterministic")},
        **{name: history.get(name, {}) for name in (*optional, "output", "inputs")},
        "parameters": sum(layer.parameters for layer in description.layers_by_name().values()),
        "trained_mean": description.trained_mean,
        "features": plain.get("features"),
        "layers": plain["layers"],
        "blocks": {
            name: block | _stored(block_group(name), slots, structure)
            for name, block in plain["blocks"].items()
        },
    }
    return Inspection(path, contents, description.history)


def _stored(group: str, slots: list[TensorSlot], structure: Structure) -> dict[str, Any]:
    """The tensors of a block, and the bytes that they take."""
    stored = {slot.name: structure.datasets[slot.path] for slot in slots if slot.group == group}
    tensors = {
        name: {"shape": list(each.shape), "dtype": str(FORMATS[each.dtype]).removeprefix("torch.")}
        for name, each in stored.items()
    }
    size = sum(prod(each.shape) * np.dtype(each.dtype).itemsize for each in stored.values())
    return {"tensors": tensors, "bytes": size}
