"""A fit from the command line, in one process or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.models import Source, device_named, source_of
from posthoc_uq.cli.posterior_files import check_output
from posthoc_uq.distributed import agree, rank, world
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fitting import fit
from posthoc_uq.methods import Method, method_of
from posthoc_uq.storage import save


@contextmanager
def process_group(given: dict[str, Any]) -> Generator[None]:
    """Join the group of processes that torchrun started, if it did; on GPUs, each takes its own."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield
        return
    wanted = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda"):
        given["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device_named(given["device"]))
    dist.init_process_group("nccl" if wanted.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def fit_and_save(spec: str, output: str, given: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Fit and save; what there is to say about it, as plain values."""
    arguments: dict[str, Any] = dict(given["arguments"])
    arguments["method"] = _method(arguments["method"], given["method_options"])
    arguments["layers"] = _layers(arguments["layers"])
    others = {n: given[n] for n in ("divergence", "noise_variance") if given[n] is not None}
    check_output(output)
    if arguments["likelihood"] == "regression" and os.path.isdir(spec):
        raise PosthocUQError(
            f"A regression needs targets that are numbers, and the folder '{spec}' has images alone; give the data as "
            f"package.module:function."
        )
    source = source_of(given)
    data = data_of(spec, source, given, labels=not given["unlabelled"], split="train", divided=True)
    held_out = _held_out(source, given)
    posterior = fit(source.model, data.loader, val_loader=held_out, progress=progress, **arguments, **others)
    posterior.history.fit |= {"model": source.spec, "data": data.spec}
    if data.files is not None or spec.startswith("torchvision:"):
        posterior.history.fit["images"] = source.transform.text
    dtype = None if given["save_dtype"] is None else getattr(torch, given["save_dtype"])
    compression: Literal["gzip"] | None = "gzip" if given["compress"] else None
    _saved(lambda: save(posterior, output, dtype=dtype, compression=compression))
    report = posterior.report()
    return {
        "output": output,
        "bytes": os.path.getsize(output) if rank() == 0 else 0,
        "report": report.to_dict(),
        "processes": world(),
        "text": str(report),
    }


def _method(name: str, options: Mapping[str, Any]) -> Method:
    """A method with its options, of which one that is None was given as ``none``."""
    method = method_of(name, options)
    return replace(method, **{option: None for option, value in options.items() if value is None})


def _held_out(source: Source, given: Mapping[str, Any]) -> Iterable[Any] | None:
    """The loader of the held-out data, if there are any."""
    if given["val_data"] is None:
        if given["val_split"] is not None:
            raise PosthocUQError("--val-split is a part of --val-data; give that too.")
        return None
    data = data_of(
        given["val_data"],
        source,
        {**given, "split": given["val_split"], "limit": None},
        labels=True,
        split="val",
    )
    if not data.labelled:
        raise PosthocUQError(f"Held-out data need labels, and '{given['val_data']}' has no class folders.")
    return data.loader


def _saved(work: Any) -> None:
    """Every process learns whether the first one could write."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    agree(error, "writing the posterior")


def _layers(text: str) -> Any:
    if text in ("all", "last"):
        return text
    return [name.strip() for name in text.split(",") if name.strip()]
