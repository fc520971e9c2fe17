"""Data by path, by name or by import path, as loaders."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from posthoc_uq.cli.folders import read_folder
from posthoc_uq.cli.images import ImageLoader, Trouble, WrappedImages
from posthoc_uq.cli.importing import import_object, is_import_path
from posthoc_uq.cli.meaning import Meaning
from posthoc_uq.cli.models import Source
from posthoc_uq.cli.tables import as_it_is, is_table, read_table
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean

_SPLIT = re.compile(r"^([A-Za-z_]\w*)?(?:\[(-?\d+)?:(-?\d+)?\])?$")
_SMALL = 256  # items that are read faster than worker processes start


@dataclass(frozen=True)
class Data:
    """What a command reads.

    Attributes:
        loader: batches ``(inputs, targets)`` or inputs; of images by number ``(inputs, numbers)``.
        spec: how it was named.
        files: name of every item, by its number, or None where items have none.
        labelled: whether targets come along.
        class_names: of the outputs, where folders name them all.
        numbered: whether the loader gives the items' numbers in the place of targets.
        rows: number of each item that the loader gives, in its order, where it is a part of a data set.
        kept: facts of the data that a fit keeps in the posterior's file.
    """

    loader: Iterable[Any]
    spec: str
    files: Sequence[str] | None
    labelled: bool
    class_names: Sequence[str] | None
    numbered: bool = False
    rows: Sequence[int] | None = None
    kept: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def skipped(self) -> list[Trouble]:
        """Images that could not be read and were left out."""
        return self.loader.skipped if isinstance(self.loader, ImageLoader) else []


def data_of(
    spec: str,
    source: Source,
    options: Mapping[str, Any],
    meaning: Meaning,
    *,
    labels: bool,
    split: str,
    numbered: bool = False,
    skip: bool = False,
    divided: bool = False,
) -> Data:
    """The data that the options name.

    Args:
        spec: a folder of images, a table, ``torchvision:NAME``, or the import path of a function that returns a data
            set or loader.
        source: the model, whose transform images go through.
        options: those of the command, by name.
        meaning: of the outputs, and what the posterior's file keeps of its data.
        labels: whether labels are wanted where the data have them.
        split: which part to take where ``--split`` does not say.
        numbered: give the items' numbers in the place of labels.
        skip: leave unreadable images out.
        divided: give each process of a group its part.

    Raises:
        PosthocUQError: there are no such data, or they do not fit the model.
    """
    name, cut = _parsed_split(options["split"] or split)
    _check_options(spec, options)
    if is_table(spec):
        return _table(spec, source, options, meaning, labels, cut, divided)
    if spec.startswith("torchvision:"):
        images, found = _torchvision(spec, name, source, labels, options), None
    elif os.path.exists(spec):
        if options["split"] is not None and name:
            raise PosthocUQError(
                f"--split {name} is for named data sets; give the folder '{spec}/{name}' itself."
            )
        found = read_folder(spec, source, labels, options, name or split, meaning)
        images = found.images
    elif is_import_path(spec):
        return _imported(spec, name, cut, options, divided)
    else:
        raise PosthocUQError(
            f"There is no folder '{spec}'; data are a folder of images, a table.csv, torchvision:NAME, or "
            f"package.module:function."
        )
    taken = _taken(len(images), cut, options, options["split"] or split, spec)
    picked: Any = images if len(taken) == len(images) else Subset(images, taken)
    workers, sampler = _workers(options["workers"], len(taken), source.device), _sampler(picked, divided)
    loader = ImageLoader(picked, options["batch_size"], workers, sampler, indexed=numbered, skip=skip)
    if found is None:
        return Data(loader, spec, None, labels, None, numbered)
    return Data(loader, spec, found.images.files, found.labelled, found.names, numbered, kept=found.kept)


def _check_options(spec: str, options: Mapping[str, Any]) -> None:
    """Refuse options of tables for other data, and that of masks for a table."""
    given = [f"--{name}" for name in ("target", "columns") if options[name]]
    if given and not is_table(spec):
        raise PosthocUQError(f"{given[0]} is of tables, and '{spec}' is none (.csv, .tsv).")
    if options["ignore_index"] is not None and not os.path.isdir(spec):
        raise PosthocUQError(f"--ignore-index is of folders with images and masks, and '{spec}' is none.")


def _table(
    spec: str,
    source: Source,
    options: Mapping[str, Any],
    meaning: Meaning,
    labels: bool,
    cut: slice,
    divided: bool,
) -> Data:
    """The rows of a table."""
    if options["split"] is not None and not options["split"].startswith("["):
        raise PosthocUQError(
            f"--split {options['split']}: the part of a table is a range of its rows, such as [:1000]."
        )
    table = read_table(spec, source, options, meaning, labels=labels)
    taken = _taken(len(table.rows), cut, options, options["split"], spec)
    picked = table.rows if len(taken) == len(table.rows) else table.rows.part(taken)
    loader: Any = DataLoader(
        picked, options["batch_size"], sampler=_sampler(picked, divided), collate_fn=as_it_is
    )
    return Data(loader, spec, None, labels, table.names, rows=list(taken), kept=table.kept)


def _torchvision(
    spec: str, split: str | None, source: Source, labels: bool, options: Mapping[str, Any]
) -> WrappedImages:
    """One of torchvision's data sets, by the name of its class."""
    import torchvision

    name, library = spec.partition(":")[2], cast(Any, torchvision.datasets)
    if name not in library.__all__ or not isinstance(getattr(library, name, None), type):
        raise PosthocUQError(
            f"torchvision has no data set '{name}'.{did_you_mean(name, list(library.__all__))}"
        )
    kind: Any = getattr(library, name)
    parameters = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"root": options["data_root"]} if "root" in parameters else {}
    if "train" in parameters:
        if split not in ("train", "test"):
            raise PosthocUQError(
                f"'{spec}' has the splits train and test, not {split!r}; a part is train[50000:]."
            )
        arguments["train"] = split == "train"
    elif "split" in parameters and split:
        arguments["split"] = split
    if "download" in parameters:
        arguments["download"] = options["download"]
    try:
        dataset = kind(**arguments)
    except Exception as error:
        reason = " ".join(str(error).split()).split("You can use download=True")[0].strip()
        raise PosthocUQError(
            f"'{spec}' cannot be read from '{options['data_root']}' ({reason.rstrip('.')}); see --data-root, --split "
            f"and --download."
        ) from error
    return WrappedImages(dataset, labels, source.transform)


def _imported(spec: str, split: str | None, cut: slice, options: Mapping[str, Any], divided: bool) -> Data:
    """What the user's function returns. Its items are model inputs already, so no transform is applied."""
    function = import_object(spec)
    if not callable(function):
        raise PosthocUQError(
            f"'{spec}' is a {type(function).__name__}; it must be a function that returns data."
        )
    takes_split = "split" in inspect.signature(function).parameters
    returned: Any = function(split=split) if takes_split else function()
    if isinstance(returned, DataLoader) or not isinstance(returned, Dataset):
        if isinstance(returned, (str, torch.Tensor, nn.Module)) or not isinstance(returned, Iterable):
            raise PosthocUQError(
                f"'{spec}' returned a {type(returned).__name__}; it must return a torch Dataset or DataLoader."
            )
        if cut != slice(None) or options["limit"] is not None:
            raise PosthocUQError(f"'{spec}' returns a loader; --limit and parts of a split need a Dataset.")
        return Data(cast(Iterable[Any], returned), spec, None, True, None)
    if isinstance(returned, IterableDataset) or not hasattr(returned, "__len__"):
        if cut != slice(None) or options["limit"] is not None:
            raise PosthocUQError(
                f"'{spec}' returns a stream; --limit and parts of a split need a Dataset with a length."
            )
        return Data(DataLoader(returned, options["batch_size"]), spec, None, True, None)
    size = len(cast(Any, returned))
    taken = _chosen(size, cut, options["limit"])
    if not taken:
        raise PosthocUQError(f"'{spec}' returned a data set of {size} items, of which none is taken.")
    picked: Dataset[Any] = returned if len(taken) == size else Subset(returned, taken)
    workers = options["workers"] or 0  # items in memory, as most are, gain nothing by a process of their own
    loader: Any = DataLoader(
        picked, options["batch_size"], sampler=_sampler(picked, divided), num_workers=workers
    )
    return Data(loader, spec, None, True, None, rows=list(taken))


def _parsed_split(text: str) -> tuple[str | None, slice]:
    matched = _SPLIT.match(text)
    if matched is None:
        raise PosthocUQError(f"--split {text} is not of the form train, train[:50000] or train[50000:].")
    start, stop = (None if edge is None else int(edge) for edge in matched.group(2, 3))
    return matched.group(1), slice(start, stop)


def _taken(size: int, cut: slice, options: Mapping[str, Any], split: str | None, spec: str) -> Sequence[int]:
    """Numbers of the items that are read; at least one."""
    taken = _chosen(size, cut, options["limit"])
    if not taken:
        raise PosthocUQError(f"--split {split} leaves nothing of the {size} items of '{spec}'.")
    return taken


def _chosen(size: int, cut: slice, limit: int | None) -> Sequence[int]:
    indices = range(size)[cut]
    if limit is None or limit >= len(indices):
        return indices
    # Evenly spaced: the files of a folder are sorted by class.
    return [indices[i * len(indices) // limit] for i in range(limit)]


def _sampler(dataset: Any, divided: bool) -> Any:
    return DistributedSampler(dataset, shuffle=False) if divided and world() > 1 else None


def _workers(workers: int | None, items: int, device: torch.device) -> int:
    """Processes that read images while the model runs; on a CPU they share the cores with it."""
    if workers is not None:
        return workers
    if items <= _SMALL:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(8, cores) if device.type != "cpu" else min(4, max(1, cores // 2))
