"""Honest uncertainty for a trained PyTorch model.

`fit` a posterior over the weights and write it to a file, `tune` it on held-out data, `predict` a folder of images into
a CSV with their uncertainty, `evaluate` how good that is, `update` it with new data or without some, `serve`
predictions over HTTP, `monitor` what comes in, `inspect` a file without its model.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 predicted but for some unreadable images, 130 interrupted.
"""

# Each command is a function; `posthoc_uq.app.cli.parser` makes its options from its signature and docstring.

from __future__ import annotations

import csv as csv_files
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.app.cli.data import LoadedData, load_data
from posthoc_uq.app.cli.help import dashed
from posthoc_uq.app.cli.models import TrainedModel, device_named, trained_model, with_weights
from posthoc_uq.app.cli.options import (
    Choice,
    Console,
    Data,
    DataName,
    Kept,
    ModelSource,
    Port,
    Read,
    Referred,
    Share,
    Written,
    WrongUsage,
    check_extra,
    naming_options,
)
from posthoc_uq.app.cli.outputs import Maps, Outputs, PredictionTable, text_file
from posthoc_uq.app.cli.posterior_file import (
    DatasetInfo,
    changing,
    dataset_info,
    facts_of,
    image_facts,
    opened,
    output_names,
    stored_dtype,
)
from posthoc_uq.app.cli.tables import is_table
from posthoc_uq.app.monitor import FALSE_ALARM_EVERY, drift_figure, monitor_for, read_state
from posthoc_uq.app.scores import Scores, read_scores
from posthoc_uq.core.batches import Bar, BatchReader, batches
from posthoc_uq.core.distributed import on_all_ranks, rank, world
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, Positive, check_option
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.files.atomic import write
from posthoc_uq.fitting.class_scaling import Scaling
from posthoc_uq.fitting.fit import has_option
from posthoc_uq.fitting.rare_classes import RARE_CLASSES
from posthoc_uq.fitting.wrap import HEADS, head_class, options_of, recorded_head
from posthoc_uq.layers.proof import LAYER_WORDS
from posthoc_uq.likelihoods import LIKELIHOODS
from posthoc_uq.likelihoods.conformal import SET_KINDS, applying
from posthoc_uq.methods import METHODS
from posthoc_uq.methods.checkpoint import kept_until_the_end
from posthoc_uq.posteriors.history import CRITERIA, Criterion
from posthoc_uq.posteriors.report import described_by_class, described_changes, described_promises

INCOMPLETE = 3
if TYPE_CHECKING:
    HeadName = str
else:
    HeadName = Literal[tuple(HEADS)]  # those that others registered among them


@dataclass(frozen=True)
class Done:
    """What a command has to say.

    Attributes:
        text: for people.
        facts: for ``--json``.
        complaints: lines for stderr.
        code: the exit code.
    """

    text: str
    facts: Mapping[str, Any]
    complaints: Sequence[str] = ()
    code: int = 0


def fit(
    data: DataName,
    /,
    *,
    output: Written,
    method: Choice,
    likelihood: Choice,
    source: ModelSource,
    reading: Data,
    console: Console,
    force: bool = False,
    unlabelled: bool = False,
    val_data: DataName | None = None,
    val_split: str | None = None,
    layers: list[str] | None = None,
    prior_precision: Positive | Literal["faithful", "evidence"] | None = None,
    prior_mean: float | None = None,
    divergence: Positive | None = None,
    head: HeadName | None = None,
    seed: int = 0,
    checkpoint: Kept | None = None,
    model_output: int | str | None = None,
    save_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    compress: bool = False,
) -> Done:
    """Fit a posterior over a model's weights on DATA, and write it to a file.

    DATA is a folder of images (with a folder for each class, without classes, or images/ and masks/ with the classes
    of pixels), a table.csv with --target COLUMN, torchvision:NAME, or package.module:function. Under torchrun every
    process takes its part of the data and the first one writes the file.

    Examples:
      posthoc-uq fit imagenet/train --model timm:resnet18.a1_in1k --pretrained -o resnet18.h5
      posthoc-uq fit photos/ --model torchvision:resnet18 --weights my.safetensors --num-classes 5 -o my.h5
      posthoc-uq fit torchvision:FashionMNIST --split 'train[:55000]' --val-data torchvision:FashionMNIST
          --val-split 'train[55000:]' --model nets.py:cnn --rank 100 -o cnn.h5
      posthoc-uq fit photos/ --model nets.py:cnn --weights w.pt --method function_space --epochs 20 -o functions.h5
      posthoc-uq fit houses.csv --target price --likelihood regression --model nets.py:mlp --weights w.pt -o mlp.h5
      posthoc-uq fit --config fit.yaml
      torchrun --nproc-per-node 4 -m posthoc_uq fit imagenet/train --model ... -o model.h5

    Args:
        data: what the posterior is fitted on.
        output: the posterior's file.
        method: how the posterior is fitted.
        likelihood: what the model's outputs mean.
        val_data: held-out data with labels; the fit calibrates by them, a training ends at its best.
        val_split: part of the held-out data, such as train[50000:].
        layers: all, everything, last, trainable, names or patterns; by default, see the report.
        prior_precision: a number; faithful (the default), for the widest posterior whose predictions stay near the
            model's own; or evidence, for the maximum of the log marginal likelihood. For a training a number is the
            method's own prior precision.
        prior_mean: of the weights, for the log marginal likelihood.
        divergence: how far the predictions of a faithful posterior may be from the model's own, in nats (0.002).
        head: by which the faithful prior is found and later commands predict; by default the method's.
        checkpoint: a file from which the same command goes on after an interruption.
        model_output: where the outputs are in what the model returns, if that is no tensor: a key, an attribute's name
            or an index; by default found by itself.
        save_dtype: of the numbers in the file.
        compress: compress the file (gzip).
    """
    if val_data is None and val_split is not None:
        raise WrongUsage("--val-split is a part of --val-data; give that too.")
    arguments: dict[str, Any] = {
        "layers": layers[0] if layers in [[word] for word in LAYER_WORDS] else layers,
        "prior_precision": prior_precision,
        "prior_mean": prior_mean,
        "head": head,
        "seed": seed,
        "checkpoint": checkpoint,
        "output": model_output,
        **({} if divergence is None else {"divergence": divergence}),
    }

    def work(source: ModelSource) -> Done:

        name, how = str(likelihood.name), method
        if has_option(str(method.name), "layers") and arguments["layers"] in ("all", "last"):
            how = replace(method, options={"layers": arguments["layers"]} | method.options)
        chosen = likelihood.make(LIKELIHOODS[name])
        fitting, info = how.make(METHODS[str(method.name)]), DatasetInfo(chosen)
        if not info.labels and os.path.isdir(data):
            kind = "regression" if name == "regression" else repr(name)
            raise PosthocUQError(
                f"A {kind} needs targets that are numbers, and the folder '{data}' has images alone; give the data as "
                f"package.module:function."
            )
        start, model = time.perf_counter(), trained_model(source)
        loaded = load_data(data, model, reading, info, labels=not unlabelled, split="train", divided=True)
        val_loader: Iterable[Any] | None = None
        if val_data is not None:
            part, info = replace(reading, split=val_split, limit=None), replace(info, kept=loaded.kept)
            val_loader = load_data(
                val_data, model, part, info, labels=True, split="val", needs="calibration"
            ).loader
            _look_at(val_loader, f"--val-data: '{val_data}'", model, chosen)
        posterior = uq.fit(
            model.model,
            loaded.loader,
            fitting if method.named else None,
            val_loader=val_loader,
            # by its name the library finds a regression's noise, and refuses what it would only warn of
            likelihood=chosen if likelihood.options else name,
            progress=_progress(console),
            **arguments,
            **({} if method.named else method.options),
        )
        facts = {**facts_of(source, output), "data": loaded.spec, **loaded.kept}
        if loaded.files is not None or data.startswith("torchvision:"):
            facts |= image_facts(source, model)
        posterior = posterior.noted(fit=facts)
        dtype = None if save_dtype is None else getattr(torch, save_dtype)
        packed: Any = "gzip" if compress else None
        try:
            uq.save(posterior, output, dtype=dtype, compression=packed)
        except PosthocUQError as error:
            if dtype is None:
                raise
            # the fit may have taken hours
            uq.save(posterior, output, compression=packed)
            warnings.warn(f"Written in full precision, since: {error}", stacklevel=2)
        report, size = posterior.report(), os.path.getsize(output) if rank() == 0 else 0
        lines = [report.brief(), f"seconds: {time.perf_counter() - start:.1f}"]
        if source.weights is None and not source.pretrained:
            lines.append(f"No --weights were given: '{source.model}' itself must return the trained model.")
        lines.append(f"Written to {output} ({size:,} bytes); posthoc-uq inspect {output} shows all of it.")
        lines.append(_next_command(data, output, source, calibrated=val_data is not None))
        facts = {"output": output, "bytes": size, "report": report.to_dict(), "processes": world()}
        return Done("\n".join(lines), facts)

    # the checkpoint is kept until the file is written
    with process_group(source.device) as device, kept_until_the_end(), on_all_ranks("the command"):
        return work(replace(source, device=device))


def _next_command(data: str, output: str, source: ModelSource, *, calibrated: bool) -> str:
    """What to run after a fit, with this model and a name in place of data that the fit has not seen."""
    command, kind = ("evaluate", "test") if calibrated else ("calibrate", "held-out")
    place = kind.upper().replace("-", "_") + (os.path.splitext(data)[1] if is_table(data) else "")
    words = [command, output, place, *naming_options(source)]
    return f"Next, with {kind} data as {place}: posthoc-uq {shlex.join(words)}"


def _look_at(
    loader: Iterable[Any], data: str, model: TrainedModel, likelihood: uq.Likelihood | None = None
) -> None:
    """Refuse data whose first batch does not fit the model, which long work would find at its end.

    Args:
        loader: a stream is not looked at.
        data: option and name of them.
        model: is run on them.
        likelihood: of their labels, which they then must have.
    """
    if isinstance(loader, Iterator):
        return
    with isolated_random_state(), torch.no_grad():
        batch = next(batches(loader, BatchReader(model.device)), None)
        if batch is None:
            raise PosthocUQError(f"{data} has no data.")
        if likelihood is not None and batch.targets is None:
            raise PosthocUQError(f"{data} has no labels.")
        try:
            outputs = batch.call(model.model)
            if isinstance(outputs, torch.Tensor) and likelihood is not None and batch.targets is not None:
                likelihood.check(outputs, batch.targets)
        except (PosthocUQError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise PosthocUQError(f"{data} does not fit the model: {reason}.") from error


@contextmanager
def process_group(device: str | None) -> Generator[str | None]:
    """Join the group of processes that torchrun started, if it did; gives the device, on GPUs each process its own."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield device
        return

    # Functions of this module have the group that there is when it is imported as a default argument. A model's library
    # that imports it later would keep the group, and its threads, until Python ends, which can abort the process.
    import torch.distributed.nn  # pyright: ignore[reportUnusedImport]

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device_named(device))
    try:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    except RuntimeError as error:
        raise PosthocUQError(
            f"The processes that torchrun started could not meet at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]}); give torchrun another address or port if "
            f"they cannot reach it, or it is taken (on one machine, --standalone --local-addr 127.0.0.1)."
        ) from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


def tune(
    file: Read,
    /,
    *,
    head: Choice,
    source: ModelSource,
    reading: Data,
    console: Console,
    data: DataName | None = None,
    output: Written | None = None,
    force: bool = False,
    criterion: Criterion | None = None,
    divergence: Positive | None = None,
    temperature: bool | None = None,
    scaling: Scaling | None = None,
    per_layer: bool = False,
    noise: bool | None = None,
    parameters: list[str] | None = None,
    initial: Read | None = None,
    initialisations: Count = 3,
    search_draws: Count = 30,
    max_evaluations: Count = 12,
    seed: int = 0,
) -> Done:
    """Choose the hyperparameters of the posterior in FILE, and rewrite it.

    With --data the posterior is made as wide as held-out labels allow: its predictions are at most 0.003 nats worse
    than the best that was tried, and with two standard errors at most 0.01 nats worse than the fit's own. Without
    --data the log marginal likelihood decides; --criterion names another way: with leave_one_out DATA are the training
    data, from which temperature or noise is estimated, of a network that was trained from scratch on them. The head
    that was searched through is written into FILE with its options, and predict and evaluate take it from there.

    Examples:
      posthoc-uq tune model.h5 --model timm:resnet18 --weights w.pt --data val/
      posthoc-uq tune model.h5 --model timm:resnet18 --weights w.pt --data train/ --criterion faithful --head sampling
      posthoc-uq tune model.h5 --model nets.py:cnn --weights w.pt                    (by evidence)
      posthoc-uq tune model.h5 --model nets.py:mlp --weights w.pt --data houses.csv --criterion leave_one_out

    Args:
        data: held-out data with labels; without, the evidence decides.
        output: write here instead of over FILE.
        criterion: what decides: closeness to the model's own predictions (needs --data, without labels), the likelihood
            of held-out data, leave-one-out predictions of the training data, or the log marginal likelihood; by default
            likelihood with --data, else evidence.
        divergence: the budget of the faithful prior, in nats, by default 0.002; for likelihood of the first one tried.
        temperature: whether a temperature on the logits is searched; by default with likelihood, for classes.
        scaling: of logits, by held-out labels: a temperature alone, a shift of each class with it, a scale of each
            class, too; by default the shift where labels clearly speak for it.
        per_layer: one prior precision a layer (evidence only).
        noise: whether the observation noise is searched; by default on held-out data.
        parameters: search these alone on held-out data: prior_precision, residual_weight, scale, noise; none for the
            temperature alone.
        initial: a state dict of the network before its training, of leave_one_out; without it the modules are
            initialised anew.
        initialisations: untrained networks to average, of leave_one_out.
        search_draws: weight draws of an evaluation, with the sampling head.
        max_evaluations: evaluations of each hyperparameter other than the prior precision.
    """
    if criterion != "leave_one_out" and (initial is not None or initialisations != 3):
        raise WrongUsage("--initial and --initialisations are of --criterion leave_one_out.")
    if criterion == "leave_one_out" and (head.name or head.options):
        raise WrongUsage("--criterion leave_one_out needs no head; leave --head and its options out.")
    if data is None and temperature:
        raise WrongUsage("--temperature needs held-out data: --data DATA.")
    criterion = criterion or ("likelihood" if data is not None else "evidence")
    of_criterion = CRITERIA[criterion]
    if data is None and of_criterion.data:
        raise WrongUsage(f"--criterion {criterion} needs {of_criterion.data}: --data DATA.")
    if data is not None and not of_criterion.data:
        raise WrongUsage(f"--criterion {criterion} needs no data; leave --data out.")
    if divergence is not None and not of_criterion.by_predictions:
        raise WrongUsage("--divergence is of the criteria faithful and likelihood, which need --data DATA.")
    with changing(file, output) as rewrite:
        model, posterior = opened(file, source)
        name, options = _head(posterior, head, seed)
        loaded = None
        if data is not None:
            labels = of_criterion.labels
            needs = f"tuning by {criterion}" if labels else None
            info, split = dataset_info(posterior), "train" if criterion == "leave_one_out" else "val"
            loaded = load_data(data, model, reading, info, labels=labels, split=split, needs=needs)
        named = ("criterion", "validation_nll", "given_up", "model_alone", "divergence", "budget")
        facts: dict[str, Any] = dict.fromkeys(named)
        through: dict[str, Any] = {
            key: value for key, value in options.items() if key not in ("seed", "n_samples")
        }
        through |= {"n_samples": search_draws} if name == "sampling" else {}
        of_criterion_alone: dict[str, Any] = {}
        if of_criterion.by_predictions:
            of_criterion_alone = {"head": name, **through}
        if criterion == "leave_one_out":
            start = None if initial is None else with_weights(model.model, initial)
            of_criterion_alone = {"initial": start, "initialisations": initialisations}
        posterior = uq.tune(
            posterior,
            None if loaded is None else loaded.loader,
            criterion=criterion,
            divergence=divergence,
            temperature=temperature,
            scaling=scaling,
            per_layer=per_layer,
            noise=noise,
            parameters=None if parameters is None else tuple(one for one in parameters if one != "none"),
            max_evaluations=max_evaluations,
            seed=seed,
            progress=_progress(console),
            **of_criterion_alone,
        )
        trials, facts["criterion"] = posterior.history.trials, criterion
        if trials is not None:
            facts |= {"given_up": trials.nll_given_up_for_width, "model_alone": trials.model_alone}
        if criterion == "likelihood" and trials is not None and trials.chosen is not None:
            facts["validation_nll"] = trials.chosen.objective
        if criterion == "faithful":
            faithful = posterior.history.faithful
            assert faithful is not None
            facts |= {"divergence": faithful.divergence, "budget": faithful.budget}
        if of_criterion.by_predictions and "n_samples" in options:
            # the draws of predictions, not of the search
            record = posterior.history.head
            assert record is not None  # of a search through a head
            drawn = record.options | {"n_samples": options["n_samples"]}
            posterior = posterior.noted(head={"options": drawn})
        rewrite(posterior, source, stored_dtype(file))
    prior = posterior.prior_precision
    facts = {
        "output": output or file,
        "hyperparameters": _hyperparameters(posterior),
        "prior_precision_by_layer": dict(prior) if isinstance(prior, dict) else None,
        **facts,
        "searched_through": None if posterior.history.head is None else posterior.history.head.plain(),
    }
    return Done(_tuning_in_words(facts, posterior.likelihood.name), facts)


def _tuning_in_words(facts: Mapping[str, Any], likelihood: str) -> str:
    lines = _settings_in_words(facts["hyperparameters"], likelihood)
    if facts["criterion"] == "evidence":
        lines.append(
            "by the evidence, whose predictions may be too cautious: evaluate them, or tune with --data"
        )
    if facts["validation_nll"] is not None:
        alone = facts["model_alone"]
        beside = "" if alone is None else f" (the model alone {alone:.4g})"
        lines.append(f"validation NLL: {facts['validation_nll']:.4g}{beside}")
    if facts["given_up"] is not None:
        lines.append(f"given up for a wider posterior: {facts['given_up']:.2g} nats")
    if facts["divergence"] is not None:
        lines.append(f"divergence: {facts['divergence']:.3g} of at most {facts['budget']:g} nats")
    return "\n".join([*lines, f"Written to {facts['output']}."])


def _settings_in_words(hyperparameters: Mapping[str, Any], likelihood: str) -> list[str]:
    by_class, lines = described_by_class(hyperparameters, likelihood), list[str]()
    for name, value in hyperparameters.items():
        values = value if isinstance(value, list) else [value]
        shown = ", ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in values)
        lines.append(f"{name}: {by_class.get(name, shown)}")
    return lines


def _hyperparameters(posterior: uq.Posterior) -> dict[str, Any]:
    """By name, the prior precision first, if there is one: it is what most searches are about."""
    shown = dict(sorted(posterior.reported().items(), key=lambda item: item[0] != "prior precision"))
    noise = posterior.noise_variance
    return shown if noise is None else shown | {"noise variance": noise.tolist()}


def calibrate(
    file: Read,
    data: DataName,
    /,
    *,
    head: Choice,
    source: ModelSource,
    reading: Data,
    console: Console,
    output: Written | None = None,
    force: bool = False,
    share: Share = 0.5,
    scaling: Scaling | None = None,
    class_rates: list[float] | None = None,
    sets: Literal["lac", "aps", "raps"] = "lac",
    by_class: bool = False,
    jointly: bool = False,
    seed: int = 0,
) -> Done:
    """Calibrate the posterior in FILE by DATA, held-out data with labels, and rewrite it.

    One part of DATA tunes, as tune does; the scores of the other part are kept in FILE, so that sets of classes,
    intervals and familiarity in Python hold with a promised probability, and predict, evaluate and serve refer a share
    of the inputs to a person. These hold for the head and the hyperparameters that they were measured with, and for
    rates of referral from 1 / (n + 1) on; otherwise predict warns and leaves the columns empty. What is printed names
    classes that sets cover too little, and rare ones. Without held-out data see tune --criterion leave_one_out.

    Examples:
      posthoc-uq calibrate model.h5 photos/val --model timm:resnet18 --weights w.pt

    Args:
        output: write here instead of over FILE.
        share: of DATA that tunes.
        scaling: of logits, as of tune.
        class_rates: of the inputs to be predicted, a number for each class, where they are others than those of DATA.
        sets: the score of sets of classes.
        by_class: promise for every class by itself.
        jointly: of several values promise all intervals at once.
    """
    with changing(file, output) as rewrite:
        model, posterior = opened(file, source)
        info = dataset_info(posterior)
        loaded = load_data(data, model, reading, info, labels=True, split="val", needs="calibrate")
        name, options = _head(posterior, head, seed)
        posterior = uq.calibrate(
            posterior,
            loaded.loader,
            head=name,
            share=share,
            scaling=scaling,
            class_rates=class_rates,
            sets=sets,
            by_class=by_class,
            jointly=jointly,
            seed=seed,
            progress=_progress(console),
            **{key: value for key, value in options.items() if key != "seed"},
        )
        rewrite(posterior, source, stored_dtype(file))
    promises = posterior.history.promises
    assert promises is not None  # by this call
    facts: dict[str, Any] = {
        "output": output or file,
        "samples": promises.samples,
        "hyperparameters": _hyperparameters(posterior),
        "promises": described_promises(promises, posterior.settings.plain()),
        RARE_CLASSES: posterior.history.tuning.get(RARE_CLASSES),
    }
    lines = _settings_in_words(facts["hyperparameters"], posterior.likelihood.name)
    lines.append(f"promised: {facts['promises']}")
    if facts[RARE_CLASSES] is not None:
        lines.append(f"{RARE_CLASSES}: {facts[RARE_CLASSES]}")
    return Done("\n".join([*lines, f"Written to {facts['output']}."]), facts)


def predict(
    file: Read,
    data: DataName,
    /,
    *,
    output: Written,
    head: Choice,
    source: ModelSource,
    reading: Data,
    referred: Referred,
    console: Console,
    outputs: Outputs,
    force: bool = False,
    top_k: Count = 3,
    level: Share = 0.95,
    skip_unreadable: bool = False,
    maps: str | None = None,
    class_names: Read | None = None,
    seed: int = 0,
) -> Done:
    """Predict DATA with the posterior in FILE, into a CSV with one row for each image, or row of a table.

    Of classes: file, label_1, probability_1, ... of the K most probable, entropy, mutual_information (empty where the
    head does not know it), novelty and familiarity, set, the classes that hold the right one with the probability
    --level. Of values: file, mean, standard_deviation, epistemic_variance, lower, upper, novelty and familiarity. Of
    pixels: file, label_1, share_1, ... of the classes that cover most of the image, means of the scores over its
    pixels, the largest of each; of values at pixels means over these; --maps writes them pixel by pixel. At the end
    flag, 1 for an image to hand to a person and 0 for others, reason, the scores that refer it, and tail, the share of
    familiar inputs that are at least as extreme. Familiarity (the p-value of novelty), set, flag, reason and tail are
    by the held-out scores that calibrate keeps in FILE, and empty without. The CSV appears under its name when
    complete.

    Examples:
      posthoc-uq predict model.h5 photos/ --model timm:resnet18 --weights w.pt -o photos.csv
      posthoc-uq predict model.h5 houses.csv --model nets.py:mlp --weights w.pt -o prices.csv
      posthoc-uq predict model.h5 streets/ --model torchvision:fcn_resnet50 --weights w.pt --num-classes 5
          -o streets.csv --maps streets_maps
      posthoc-uq predict model.h5 photos/ --model torchvision:resnet18 --pretrained -o photos.csv
          --head linearized --link mc --class-names names.txt --skip-unreadable

    Args:
        data: what is predicted.
        output: the CSV.
        top_k: classes to name.
        skip_unreadable: leave unreadable images out, name them, and end with exit code 3.
        maps: of pixels: a folder for PNG maps of class, entropy, mutual information and novelty, or of values for
            NumPy files of mean, standard deviations, bounds and novelty.
    """
    wanted = _wanted(referred)
    model, posterior = opened(file, source)
    info = dataset_info(posterior)
    loaded = load_data(
        data, model, reading, info, labels=False, split="test", numbered=True, skip=skip_unreadable
    )
    drawn = None if maps is None else Maps(maps, level)
    if drawn is not None:
        drawn.prepare(loaded.files, outputs)
    predictor = _predictor(model, posterior, head, seed)
    names = output_names(model, posterior, class_names, loaded.names)
    start = time.perf_counter()
    rows = flagged = 0
    promises = posterior.history.promises
    applies = promises is not None
    referral = _allowed(wanted, predictor, "The column flag stays empty.") if applies else None
    sets = promises is not None and promises.kind in SET_KINDS
    table = PredictionTable(referral, names, top_k, level, sets and _promised(predictor, level))
    with (
        text_file(output) as opened_file,
        torch.no_grad(),
        isolated_random_state(),
        Bar(loaded.loader, "predict", _progress(console)) as bar,
    ):
        writer = csv_files.writer(opened_file)
        waiting = list[tuple[dict[str, Sequence[str]], dict[str, Tensor]]]()  # for the ranks of all rows

        def put(columns: dict[str, Sequence[str]]) -> None:
            nonlocal flagged
            writer.writerows(zip(*columns.values(), strict=True))
            flagged += columns["flag"].count("1")

        for batch in batches(loaded.loader, BatchReader(model.device)):
            prediction = predictor(*batch.args, **batch.kwargs).to("cpu")
            items = _items(loaded, batch.targets, rows, len(prediction))
            columns = table.columns(prediction, items)
            if not rows:
                writer.writerow(columns)
            if referral is not None and referral.exactly:
                waiting.append((columns, referral.ranked(prediction)))
            else:
                put(columns)
            if drawn is not None:
                drawn.write(items, prediction)
            rows += len(prediction)
            bar.advance(len(prediction))
        for columns in table.ranked(waiting):
            put(columns)
    seconds = time.perf_counter() - start
    facts = {
        "output": output,
        "maps": maps,
        "rows": rows,
        "flagged": None if referral is None else flagged,
        "skipped": [trouble.name for trouble in loaded.skipped],
        "seconds": seconds,
        "head": predictor.identity(),
    }
    text = f"{rows:,} predictions{'' if referral is None else f', {flagged:,} of them flagged'}, in {seconds:.1f} s "
    text += f"({rows / seconds:.3g} per second), written to {output}."
    text += "" if maps is None else f"\nMaps written to {maps}."
    left_out = [f"Left out, unreadable: {trouble.name}" for trouble in loaded.skipped]
    return Done(text, facts, left_out, INCOMPLETE if left_out else 0)


def _wanted(referred: Referred) -> uq.Referral:
    """What refers inputs as the options say.

    Raises:
        WrongUsage: they do not go together.
    """
    try:
        return uq.Referral(
            referred.referral_rate,
            accuracy=referred.referral_accuracy,
            score=referred.referral_score,
            exactly=referred.referral_exactly,
            confidence=referred.referral_confidence,
        )
    except PosthocUQError as error:
        raise WrongUsage(f"--referral-rate and others: {error}") from error


def _allowed(referral: uq.Referral, predictor: uq.Predictor, without: str) -> uq.Referral | None:
    """The referral; None where the file's held-out scores do not allow it, with a warning that begins with the sentence
    `without`.
    """
    try:
        referral.check(predictor.promises)
    except PosthocUQError as error:
        warnings.warn(f"{without} {error}", stacklevel=3)
        return None
    return referral


def _promised(predictor: uq.Predictor, level: float) -> bool:
    """Whether the file's held-out scores promise sets of this level; warns where they are too few or do not apply."""
    try:
        applying(predictor.promises).thresholds(level)
    except PosthocUQError as error:
        warnings.warn(f"The column set stays empty. {error}", stacklevel=3)
        return False
    return True


def _items(loaded: LoadedData, numbers: Any, start: int, count: int) -> list[str]:
    """What the rows of a batch are called: their files, or their numbers."""
    found: Sequence[int] = range(start, start + count)
    if loaded.numbered:
        found = numbers.tolist()
    elif loaded.rows is not None:
        found = loaded.rows[start : start + count]
    return [str(number) if loaded.files is None else loaded.files[number] for number in found]


def evaluate(
    file: Read,
    data: DataName,
    /,
    *,
    head: Choice,
    source: ModelSource,
    reading: Data,
    referred: Referred,
    console: Console,
    ood: Annotated[list[str], "data"] | None = None,
    report: Written | None = None,
    csv: Written | None = None,
    json_file: Written | None = None,
    force: bool = False,
    class_names: Read | None = None,
    seed: int = 0,
) -> Done:
    """Measure on labelled DATA how good predictions are, and their uncertainties, with the posterior in FILE and by the
    model alone.

    Examples:
      posthoc-uq evaluate model.h5 test/ --model timm:resnet18 --weights w.pt --ood textures=dtd/
      posthoc-uq evaluate model.h5 test/ --model nets.py:cnn --weights w.pt --report report.html
      posthoc-uq evaluate model.h5 torchvision:FashionMNIST --model nets.py:cnn --weights w.pt --json

    Args:
        data: with labels.
        ood: foreign data to tell apart, as NAME=DATA; several times for several.
        report: write one self-contained page: tables, figures, images.
        csv: write all numbers as a table.
        json_file: write all numbers as JSON.
    """
    foreign, wanted = _named_data(ood or []), _wanted(referred)
    model, posterior = opened(file, source)
    info = dataset_info(posterior)
    loaded = load_data(data, model, reading, info, labels=True, split="test", needs="an evaluation")
    info = replace(info, kept={**info.kept, **loaded.kept})
    plain = replace(reading, split=None, target=[], columns=[], ignore_index=None)
    ood_loaders = {
        name: load_data(spec, model, plain, info, labels=False, split="test").loader
        for name, spec in foreign.items()
    }
    for name, loader in ood_loaders.items():
        _look_at(loader, f"--ood {name}: '{foreign[name]}'", model)
    predictor = _predictor(model, posterior, head, seed)
    referral = None
    if posterior.history.promises is not None:
        referral = _allowed(wanted, predictor, "Referral is left out.")
    evaluation = uq.evaluate(
        {"model alone": model.model, f"{posterior.method}, {predictor.head}": predictor},
        loaded.loader,
        ood_loaders=ood_loaders,
        referral=referral,
        class_names=output_names(model, posterior, class_names, loaded.names),
        display=None if loaded.files is None else model.transform.display,
        progress=_progress(console),
    )
    if csv is not None:
        evaluation.to_csv(csv)
    if json_file is not None:
        evaluation.to_json(json_file)
    if report is not None:
        evaluation.report(report, title=f"How far to trust {model.spec}")
    paths = [path for path in (report, csv, json_file) if path is not None]
    facts = {**evaluation.to_dict(), "head": predictor.identity(), "written": paths}
    return Done("\n".join([str(evaluation), *(f"Written to {path}." for path in paths)]), facts)


def _named_data(texts: Sequence[str]) -> dict[str, str]:
    """Data by the names before their ``=``."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        if not name or not equals:
            raise WrongUsage(f"--ood: {text!r} is not of the form NAME=DATA.")
        if name in named:
            raise WrongUsage("--ood: every set of foreign data needs a name of its own.")
        named[name] = spec
    return named


def update(
    file: Read,
    data: DataName,
    /,
    *,
    source: ModelSource,
    reading: Data,
    console: Console,
    remove: bool = False,
    output: Written | None = None,
    force: bool = False,
    unlabelled: bool = False,
) -> Done:
    """Add DATA to the posterior in FILE, without the data that it was fitted on, or take them out; and rewrite it.

    The result is that of a fit on all data for the methods diag, full, and kfac with --keep-grams. efb and inf keep
    their bases, and it is said how much of the new data's Fisher is outside of them. Prior precision and temperature
    stay; a file in a half format becomes one of float32. What calibrate promised is dropped, of sets, intervals and
    referral: calibrate FILE again. FILE is replaced when all is done, and stays as it was if anything fails.

    With --remove, DATA must be the same samples, unchanged: prepare images as they were prepared then. Data that cannot
    all have been in are refused, as far as the statistics show it.

    Examples:
      posthoc-uq update model.h5 new/ --model timm:resnet18 --weights w.pt
      posthoc-uq update model.h5 new/ --model nets.py:cnn --weights w.pt -o newer.h5
      posthoc-uq update model.h5 withdrawn/ --model timm:resnet18 --weights w.pt --remove

    Args:
        data: what comes in, or goes out.
        remove: take DATA out, to which fit or update gave them.
        output: write here instead of over FILE.
    """
    with changing(file, output) as rewrite:
        model, posterior = opened(file, source)
        loaded = load_data(
            data, model, reading, dataset_info(posterior), labels=not unlabelled, split="train"
        )
        before = posterior.evidence.samples
        posterior = uq.update(posterior, loaded.loader, remove=remove, progress=_progress(console))
        # in full precision: a few samples among many are less than a half format resolves
        rewrite(posterior, source)
    changes, samples = posterior.history.changes, posterior.evidence.samples
    assert changes is not None  # this one
    described, place = described_changes(changes), output or file
    text = f"{'Took out' if remove else 'Added'} {abs(samples - before):,} samples; the posterior has {samples:,} now."
    facts = {
        "output": place,
        "changed": abs(samples - before),
        "samples": samples,
        "changes": changes.plain(),
        "described": described,
    }
    return Done(f"{text}\ndata since the fit: {described}\nWritten to {place}.", facts)


def serve(
    file: Read,
    /,
    *,
    head: Choice,
    source: ModelSource,
    referred: Referred,
    console: Console,
    host: str = "127.0.0.1",
    port: Port = 8000,
    allow_host: list[str] | None = None,
    top_k: Count = 3,
    level: Share = 0.95,
    integers: bool = False,
    max_bytes: Count = 16 * 2**20,
    max_batch: Count = 64,
    max_pixels: Count = 40_000_000,
    log: Kept | None = None,
    class_names: Read | None = None,
    seed: int = 0,
) -> Done | None:
    """Answer requests for predictions with the posterior in FILE, on this machine only unless --host says otherwise.

    POST /predict takes JSON {"input": nested lists of numbers, or these by the names of inputs}, /predict/image a PNG
    or JPEG file, /predict/batch {"inputs": [...]} or a form of several images. Every answer has the prediction, its
    uncertainty, and whether to refer it to a person.
    GET /metrics is for Prometheus, /health says that it runs. Nothing of the inputs is stored but scores, by --log.

    Examples:
      posthoc-uq serve model.h5 --model timm:resnet18 --weights w.pt --class-names names.txt
      posthoc-uq serve model.h5 --model nets.py:cnn --weights w.pt --port 9000 --log scores.csv
      curl -F image=@photo.jpg http://127.0.0.1:8000/predict/image

    Args:
        host: address to listen on.
        port: to listen on, 0 for any free one.
        allow_host: further names by which clients may call the server, such as that of a proxy.
        top_k: classes of an answer.
        integers: inputs of JSON are whole numbers, such as tokens, where FILE does not say so.
        max_bytes: of a request.
        max_batch: inputs of a request.
        max_pixels: of an image, width times height, before it is decoded.
        log: add the scores of every input to this CSV.
    """
    check_extra("serve", "starlette", "uvicorn", "python_multipart", "prometheus_client")
    wanted = _wanted(referred)
    if wanted.exactly:
        raise WrongUsage(
            "--referral-exactly: a server answers inputs one by one, and has no ranks of all; leave it out."
        )

    from posthoc_uq.app.requests import Limits
    from posthoc_uq.app.serve import Service
    from posthoc_uq.app.serve import serve as serve_service

    model, posterior = opened(file, source)
    predictor = _predictor(model, posterior, head, seed)
    referral = _allowed(wanted, predictor, f"'referred' stays null for '{file}' (posthoc-uq calibrate).")
    service = Service(
        predictor,
        model.transform,
        names=output_names(model, posterior, class_names),
        top_k=top_k,
        level=level,
        referral=referral,
        limits=Limits(max_bytes, max_batch, max_pixels, shorter=model.transform.shorter),
        integers=integers,
        log=log,
    )

    def started(url: str) -> None:
        text = json.dumps({"url": url}) if console.json else f"Serving on {url}; Ctrl-C ends it."
        print(text, flush=True)

    serve_service(service, host, port, allow_host or (), started=started)
    return None


def monitor(
    file: Read,
    /,
    *,
    console: Console,
    reference: Read | None = None,
    output: Written | None = None,
    force: bool = False,
    state: Kept | None = None,
    false_alarm_every: Count = FALSE_ALARM_EVERY,
) -> Done:
    """Watch the scores in a CSV, of serve --log or of predict, for drift from held-out ones: a sequential test, which
    may be looked at after every input, as a table, and one figure.

    Examples:
      posthoc-uq monitor scores.csv --reference held_out.csv
      posthoc-uq monitor inbox.csv --reference held_out.csv -o drift.png --json
      posthoc-uq monitor monday.csv --reference held_out.csv --state monitor.json
      posthoc-uq monitor tuesday.csv --state monitor.json

    Args:
        file: the CSV, from the first input that came.
        reference: scores of held-out data: a CSV of posthoc-uq predict.
        output: where the figure goes: .png, .svg or .pdf.
        state: a JSON file from which the test goes on, all rows of the CSV being new; begun where there is none.
        false_alarm_every: inputs in which there is at most one false alarm on average.
    """
    kind = "png" if output is None else os.path.splitext(output)[1].lstrip(".").lower() or "png"
    if kind not in ("png", "svg", "pdf"):
        raise WrongUsage(f"--output: a figure is .png, .svg or .pdf, and '{output}' is none of them.")
    watching = None if state is None else read_state(state)
    if watching is None and reference is None:
        raise WrongUsage("--reference: a CSV with the scores of held-out data is needed to begin.")
    if watching is not None and false_alarm_every not in (FALSE_ALARM_EVERY, watching.false_alarm_every):
        raise WrongUsage(
            f"--false-alarm-every: '{state}' was begun with {watching.false_alarm_every}; begin another state."
        )
    incoming, held_out = read_scores(file), None if reference is None else read_scores(reference)
    if watching is None:
        watching = monitor_for(incoming, cast(Scores, held_out), false_alarm_every)
    watched = watching.add(incoming.values)
    share_referred = None if held_out is None else held_out.share_referred
    if output is not None:
        image = BytesIO()
        drift_figure(watching, incoming, watched, share_referred).savefig(image, format=kind)
        write(output, image)
    if state is not None:
        write(state, BytesIO(f"{json.dumps(watching.state())}\n".encode()))
    facts = {
        "output": output,
        "inputs": watching.inputs,
        "left_out": incoming.left_out,
        "share_referred": incoming.share_referred,
        "share_referred_held_out": share_referred,
        "evidence": watching.evidence,
        "alarms": [asdict(alarm) for alarm in watched.alarms],
    }
    return Done(f"{watched.table()}\n{watched.verdict}", facts)


def inspect(file: Read, /, *, console: Console) -> Done:
    """Show what the posterior in FILE is: method, hyperparameters, how it was fitted and tuned, and its layers.

    No model is needed, and the file is parsed in a process of its own with limits on time and memory.

    Examples:
      posthoc-uq inspect model.h5
      posthoc-uq inspect model.h5 --json
    """
    contents = uq.inspect(file)
    return Done(str(contents), contents)


def demo(
    *,
    console: Console,
    output: str = "demo_output",
    force: bool = False,
    seed: int = 0,
) -> Done | None:
    """Run the library on handwritten digits: train a small network, fit a posterior, save, load, predict, evaluate.

    Prints tables, and leaves a page, figures and a posterior's file in the output folder. Needs the extra demo.

    Examples:
      posthoc-uq demo
      posthoc-uq demo --output /tmp/demo

    Args:
        output: a new or empty folder.
    """
    check_extra("demo", "sklearn")
    from posthoc_uq.app.cli.demo import run

    if not force and os.path.isdir(output) and os.listdir(output):
        raise PosthocUQError(
            f"The folder '{output}' is not empty; give another one with --output, or --force to write over its files."
        )
    with redirect_stdout(sys.stderr) if console.json else redirect_stdout(sys.stdout):
        identical = run(Path(output), seed).identical
    files = sorted(os.path.join(place, name) for place, _, names in os.walk(output) for name in names)
    return Done("", {"output": output, "succeeded": identical, "files": files}, code=0 if identical else 1)


def _progress(console: Console) -> bool:
    """Whether to show progress bars: on a terminal, unless ``--quiet`` was given."""
    return sys.stderr.isatty() and not console.quiet


def _predictor(model: TrainedModel, posterior: uq.Posterior, head: Choice, seed: int) -> uq.Predictor:
    """The model with its posterior, by the head that `_head` finds."""
    name, options = _head(posterior, head, seed)
    return uq.wrap(model.model, posterior, head=name, **options)


def _head(posterior: uq.Posterior, head: Choice, seed: int) -> tuple[str, dict[str, Any]]:
    """The head to predict through, and its options. What the user does not choose is taken from the head that the
    hyperparameters were found for. If the user names no head, but options that only one head has, it is that head.
    """
    file_head, of_file = recorded_head(posterior)
    takers = [name for name in HEADS if set(head.options) <= set(options_of(head_class(name)))]
    name = head.name or (takers[0] if len(takers) == 1 else file_head)
    if name not in takers:
        stray = next(own for own in head.options if own not in options_of(head_class(name)))
        owners = [other for other in HEADS if stray in options_of(head_class(other))]
        raise WrongUsage(
            f"--{dashed(stray)} is for {' and '.join(owners)} (--head {owners[-1]}), and this is {name}."
        )
    kinds = get_type_hints(head_class(name).__init__, include_extras=True)
    # now, since a search keeps them in the file, and has draws of its own
    for own, value in head.options.items():
        try:
            check_option(own, value, kinds[own])
        except PosthocUQError as error:
            raise WrongUsage(f"--head.{error}") from None
    options = dict(of_file) if name == file_head else {}
    return name, ({"seed": seed} if name == "sampling" else {}) | options | head.options
