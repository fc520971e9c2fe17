"""Data by path, by name or by import path, as loaders.

DATA is one of

* a folder with a folder for each class: labelled images, in any depth;
* a folder of images, or one image, without labels;
* a folder with the folders ``images`` and ``masks`` and no other: images with the class of every pixel;
* ``table.csv`` or ``table.tsv``: rows of numbers (extra ``tables``);
* ``torchvision:NAME``, a data set of torchvision under ``--data-root``; ``--download`` fetches it;
* ``package.module:function`` or ``file.py:function``, which returns a `Dataset` or a `DataLoader`, and is called with
  ``split=`` if it has that parameter. No transform is applied to its items.

``--split`` names a part of named data, or a range as in Python: ``train[:55000]``, ``[:1000]`` of a table. Without it
`fit` takes ``train``, `tune` and `calibrate` ``val``, `predict` and `evaluate` ``test``. ``fit --unlabelled`` leaves
class folders aside; `predict` and ``--ood`` never look at labels.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from posthoc_uq.app.cli.images import ImageLoader, MaskedImages, Trouble, WrappedImages, read_folder
from posthoc_uq.app.cli.models import TrainedModel, function_at, is_import_path
from posthoc_uq.app.cli.options import Data
from posthoc_uq.app.cli.posterior_file import COLUMNS, NAMES, DatasetInfo
from posthoc_uq.app.cli.tables import is_table, read_table
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import PosthocUQError, out_of_memory
from posthoc_uq.core.options import did_you_mean

_SPLIT = re.compile(r"^([A-Za-z_]\w*)?(?:\[(-?\d+)?:(-?\d+)?\])?$")
_MIN_ITEMS_FOR_WORKERS = 256  # items that are read faster than worker processes start


@dataclass(frozen=True)
class LoadedData:
    """What a command reads.

    Attributes:
        loader: batches ``(inputs, targets)`` or inputs; of images by number ``(inputs, numbers)``.
        spec: how it was named.
        files: name of every item, by its number, or None where items have none.
        names: of the outputs, where folders or a table name them all.
        numbered: whether the loader gives the items' numbers in the place of targets.
        rows: number of each item that the loader gives, in its order, where it is a part of a data set.
        kept: facts of the data that a fit keeps in the posterior's file.
    """

    loader: Iterable[Any]
    spec: str
    files: Sequence[str] | None = None
    names: Sequence[str] | None = None
    numbered: bool = False
    rows: Sequence[int] | None = None
    kept: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def skipped(self) -> list[Trouble]:
        """Images that could not be read and were left out."""
        return self.loader.skipped if isinstance(self.loader, ImageLoader) else []


def load_data(
    spec: str,
    model: TrainedModel,
    reading: Data,
    info: DatasetInfo,
    *,
    labels: bool,
    split: str,
    needs: str | None = None,
    numbered: bool = False,
    skip: bool = False,
    divided: bool = False,
) -> LoadedData:
    """The data that the options name.

    Args:
        spec: a folder of images, a table, ``torchvision:NAME``, or the import path of a function that returns a data
            set or loader.
        model: whose transform images go through.
        reading: the options.
        info: of the outputs, and what the posterior's file keeps of its data.
        labels: whether labels are wanted where the data have them.
        split: which part to take where the options do not say.
        needs: what cannot do without labels, if anything.
        numbered: give the items' numbers in the place of labels.
        skip: leave unreadable images out.
        divided: give each process of a group its part.

    Raises:
        PosthocUQError: there are no such data, or they do not fit the model.
    """
    name, cut = _parsed_split(reading.split or split)
    given = next((f"--{name}" for name in ("target", "columns") if getattr(reading, name)), None)
    if given and not is_table(spec):
        raise PosthocUQError(f"{given} is of tables, and '{spec}' is none (.csv, .tsv).")
    if reading.ignore_index is not None and not os.path.isdir(spec):
        raise PosthocUQError(f"--ignore-index is of folders with images and masks, and '{spec}' is none.")
    if is_table(spec):
        if reading.split is not None and not reading.split.startswith("["):
            raise PosthocUQError(
                f"--split {reading.split}: the part of a table is a range of its rows, such as [:1000]."
            )
        table = read_table(spec, model, labels, reading, info)
        taken = _taken(len(table.rows), cut, reading, split, spec)
        rows: Any = Subset(table.rows, taken)
        # the rows of a batch are cut out at once, and need no collating
        loader: Any = DataLoader(
            rows, reading.batch_size, sampler=_sampler(rows, divided), collate_fn=lambda batch: batch
        )
        return LoadedData(loader, spec, None, table.names, rows=taken, kept=table.kept)
    if COLUMNS in info.kept and not is_import_path(spec):
        raise PosthocUQError(f"The posterior was fitted on a table, and '{spec}' is none (.csv, .tsv).")
    if os.path.exists(spec) and not spec.startswith("torchvision:"):
        if reading.split is not None and name:
            raise PosthocUQError(
                f"--split {name} is for named data sets; give the folder '{spec}/{name}' itself."
            )
        folder, kept = read_folder(spec, model, labels, reading, name or split, info)
        labelled = folder.labels is not None or isinstance(folder, MaskedImages)
        if needs is not None and not labelled:
            raise PosthocUQError(f"For {needs} data need labels, and '{spec}' has no class folders.")
        loaded = LoadedData([], spec, folder.files, kept.get(NAMES), numbered, None, kept)
        images: Any = folder
    elif spec.startswith("torchvision:"):
        images = WrappedImages(_torchvision(spec, name, reading), labels, model.transform)
        loaded = LoadedData([], spec, numbered=numbered)
    elif is_import_path(spec):
        return _of_function(spec, name, cut, reading, divided)
    else:
        raise PosthocUQError(
            f"There is no folder '{spec}'; data are a folder of images, a table.csv, torchvision:NAME, or "
            f"package.module:function."
        )
    taken = _taken(len(images), cut, reading, split, spec)
    images = Subset(images, taken)
    workers = _workers(reading.workers, len(taken), model.device)
    sampler = _sampler(images, divided)
    loader = ImageLoader(images, reading.batch_size, workers, sampler, indexed=numbered, skip=skip)
    return replace(loaded, loader=loader)


def _torchvision(spec: str, split: str | None, reading: Data) -> Any:
    """One of torchvision's data sets, by the name of its class."""
    import torchvision

    name, library = spec.partition(":")[2], cast(Any, torchvision.datasets)
    if name not in library.__all__ or not isinstance(getattr(library, name, None), type):
        raise PosthocUQError(
            f"torchvision has no data set '{name}'.{did_you_mean(name, list(library.__all__))}"
        )
    kind: Any = getattr(library, name)
    parameters = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"root": reading.data_root} if "root" in parameters else {}
    if "train" in parameters:
        if split not in ("train", "test"):
            raise PosthocUQError(
                f"'{spec}' has the splits train and test, not {split!r}; a part is train[50000:]."
            )
        arguments["train"] = split == "train"
    elif "split" in parameters and split:
        arguments["split"] = split
    if "download" in parameters:
        arguments["download"] = reading.download
    try:
        return kind(**arguments)
    except (
        Exception
    ) as error:  # of the files, the network or the arguments, each library class in its own way
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split()).split("You can use download=True")[0].strip()
        raise PosthocUQError(
            f"'{spec}' cannot be read from '{reading.data_root}' ({reason.rstrip('.')}); see --data-root, --split and "
            f"--download."
        ) from error


def _of_function(spec: str, split: str | None, cut: slice, reading: Data, divided: bool) -> LoadedData:
    """What the user's function returns. Its items are model inputs already, so no transform is applied."""
    function = function_at(spec)
    takes_split = "split" in inspect.signature(function).parameters
    returned: Any = function(split=split) if takes_split else function()
    if isinstance(returned, (str, torch.Tensor, nn.Module)) or not isinstance(returned, (Dataset, Iterable)):
        raise PosthocUQError(
            f"'{spec}' returned a {type(returned).__name__}; it must return a torch Dataset or DataLoader."
        )
    dataset = isinstance(returned, Dataset) and not isinstance(returned, IterableDataset)
    if not dataset or not hasattr(returned, "__len__"):
        if cut != slice(None) or reading.limit is not None:
            what = "a stream" if isinstance(returned, Dataset) else "a loader"
            raise PosthocUQError(
                f"'{spec}' returns {what}; --limit and parts of a split need a Dataset with a length."
            )
        stream: Any = DataLoader(returned, reading.batch_size) if isinstance(returned, Dataset) else returned
        return LoadedData(stream, spec)
    taken = _taken(len(cast(Any, returned)), cut, reading, split or "", spec)
    picked = Subset(cast(Dataset[Any], returned), taken)
    # items in memory, as most are, gain nothing by a process of their own
    sampler, workers = _sampler(picked, divided), reading.workers or 0
    loader: Any = DataLoader(picked, reading.batch_size, sampler=sampler, num_workers=workers)
    return LoadedData(loader, spec, rows=list(taken))


def _parsed_split(text: str) -> tuple[str | None, slice]:
    matched = _SPLIT.match(text)
    if matched is None:
        raise PosthocUQError(f"--split {text} is not of the form train, train[:50000] or train[50000:].")
    start, stop = (None if edge is None else int(edge) for edge in matched.group(2, 3))
    return matched.group(1), slice(start, stop)


def _taken(size: int, cut: slice, reading: Data, split: str, spec: str) -> Sequence[int]:
    """Numbers of the items that are read; at least one."""
    taken = range(size)[cut]
    if not taken:
        raise PosthocUQError(
            f"--split {reading.split or split} leaves nothing of the {size} items of '{spec}'."
        )
    if reading.limit is None or reading.limit >= len(taken):
        return taken
    # Evenly spaced: the files of a folder are sorted by class.
    return [taken[i * len(taken) // reading.limit] for i in range(reading.limit)]


def _sampler(dataset: Any, divided: bool) -> Any:
    return DistributedSampler(dataset, shuffle=False) if divided and world() > 1 else None


def _workers(workers: int | None, items: int, device: torch.device) -> int:
    """Processes that read images while the model runs; on a CPU they share the cores with it."""
    if workers is not None:
        return workers
    if items <= _MIN_ITEMS_FOR_WORKERS:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(8, cores) if device.type != "cpu" else min(4, max(1, cores // 2))
