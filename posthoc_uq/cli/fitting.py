"""A fit from the command line, in one process or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

import click
import torch
import torch.distributed as dist

from posthoc_uq.cli.data import data_of
from posthoc_uq.cli.likelihoods import likelihood_of
from posthoc_uq.cli.meaning import Meaning, meaning_of_likelihood
from posthoc_uq.cli.models import Source, device_named, source_of
from posthoc_uq.cli.naming import names_of
from posthoc_uq.cli.posterior_files import image_facts
from posthoc_uq.core.distributed import raise_on_any_error, rank, world
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.files import save
from posthoc_uq.fitting.fit import fit, takes_layers
from posthoc_uq.methods import Method, method_of


@contextmanager
def process_group(options: dict[str, Any]) -> Generator[None]:
    """Join the group of processes that torchrun started, if it did; on GPUs, each takes its own."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield
        return
    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device_named(options["device"]))
    # Functions of this module have the group that there is when it is imported as a default argument. A model's library
    # that imports it later would keep the group, and its threads, until Python ends, which can abort the process.
    import_module("torch.distributed.nn")

    try:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    except RuntimeError as error:
        raise PosthocUQError(
            f"The processes that torchrun started could not meet at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]}); give torchrun another address or port if "
            f"they cannot reach it, or it is taken (on one machine, --standalone --local-addr 127.0.0.1)."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def fit_and_save(spec: str, output: str, options: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    """Fit and save; the facts that the command prints, as plain values."""
    arguments: dict[str, Any] = dict(options["arguments"])
    method_options = dict(options["method_options"])
    if arguments["layers"] in ("all", "last") and takes_layers(arguments["method"]):
        method_options["layers"] = arguments["layers"]
    arguments["method"] = _method_as_used(arguments["method"], method_options)
    arguments["layers"] = None if arguments["layers"] is None else _layers(arguments["layers"])
    arguments["output"] = arguments.pop("model_output")
    likelihood_options = {n: options[n] for n in ("divergence", "noise_variance") if options[n] is not None}
    name = arguments["likelihood"]
    arguments["likelihood"] = likelihood_of(name, options["likelihood_option"])
    meaning = meaning_of_likelihood(arguments["likelihood"])
    if not meaning.labels and os.path.isdir(spec):
        kind = "regression" if name == "regression" else repr(name)
        raise PosthocUQError(
            f"A {kind} needs targets that are numbers, and the folder '{spec}' has images alone; give the data as "
            f"package.module:function."
        )
    source = source_of(options)
    labels = not options["unlabelled"]
    data = data_of(spec, source, options, meaning, labels=labels, split="train", divided=True)
    held_out = _held_out(source, options, replace(meaning, kept=data.kept))
    posterior = fit(
        source.model, data.loader, val_loader=held_out, progress=progress, **arguments, **likelihood_options
    )
    posterior.history.fit |= {**names_of(options, output), "data": data.spec, **data.kept}
    if data.files is not None or spec.startswith("torchvision:"):
        posterior.history.fit |= {"images": source.transform.text, **image_facts(options)}
    dtype = None if options["save_dtype"] is None else getattr(torch, options["save_dtype"])
    compression: Literal["gzip"] | None = "gzip" if options["compress"] else None
    _save_in_agreement(lambda: save(posterior, output, dtype=dtype, compression=compression))
    report = posterior.report()
    return {
        "output": output,
        "bytes": os.path.getsize(output) if rank() == 0 else 0,
        "report": report.to_dict(),
        "processes": world(),
        "text": str(report),
    }


def _method_as_used(name: str, options: Mapping[str, Any]) -> Method:
    """`method_of`, where a value that the method refuses is wrong usage, told with the option in place of the field."""
    try:
        return method_of(name, options)
    except PosthocUQError as error:
        text = str(error)
        field = next((field for field in options if text.startswith(f"{field} ")), None)
        said = text if field is None else f"--{field.replace('_', '-')}{text.removeprefix(field)}"
        raise click.UsageError(said, click.get_current_context(silent=True)) from error


def _held_out(source: Source, options: Mapping[str, Any], meaning: Meaning) -> Iterable[Any] | None:
    """The loader of the held-out data, if there are any."""
    if options["val_data"] is None:
        if options["val_split"] is not None:
            raise PosthocUQError("--val-split is a part of --val-data; give that too.")
        return None
    data = data_of(
        options["val_data"],
        source,
        {**options, "split": options["val_split"], "limit": None},
        meaning,
        labels=True,
        split="val",
    )
    if not data.labelled:
        raise PosthocUQError(f"Held-out data need labels, and '{options['val_data']}' has no class folders.")
    return data.loader


def _save_in_agreement(write: Any) -> None:
    """Write, and raise in every process if the first one could not."""
    error: Exception | None = None
    try:
        write()
    except Exception as caught:
        error = caught
    raise_on_any_error(error, "writing the posterior")


def _layers(text: str) -> Any:
    if text in ("all", "last"):
        return text
    return [name.strip() for name in text.split(",") if name.strip()]
