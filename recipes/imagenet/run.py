"""A trained ImageNet classifier with its posteriors: fit, search for hyperparameters, evaluate, plot.

    python -m recipes.imagenet.run --model timm:resnet18 --weights resnet18.safetensors \\
        --train imagenet/train --val imagenet/val --ood paintings=wikiart --output runs/resnet18
    torchrun --nproc-per-node 8 -m recipes.imagenet.run ...          # the same, shared by 8 processes
    python -m recipes.imagenet.run --smoke                           # a small generated folder, a minute

Folders are ImageNet's (train/<wnid>/*.JPEG, val/<wnid>/*.JPEG), or of any other classes. Every stage keeps what it has
finished in the output folder, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posthoc_uq.cli.commands import process_group
from posthoc_uq.cli.models import TrainedModel, trained_model
from posthoc_uq.cli.options import ModelSource
from posthoc_uq.core.distributed import raise_on_any_error, rank, run_on_all_ranks
from posthoc_uq.core.errors import PosthocUQError
from recipes import common
from recipes.imagenet import evaluating, example, figures, fitting, folders, search

STAGES = ("fit", "search", "evaluate", "plot")
SMOKE: dict[str, Any] = {
    "model": "timm:tf_efficientnet_lite0",
    "output": common.OUTPUT / "imagenet" / "smoke",
    "layers": "last",
    "image_size": 64,
    "budget": 2,
    "search_images": 8,
    "search_samples": 2,
    "samples": 3,
    "batch_size": 8,
    "workers": 0,
}
"""What ``--smoke`` puts in the place of defaults."""
SMOKE_IMAGES = (2, 3, 12)
"""Of each class in train and in val, and foreign ones."""
FIXED = (
    *("model", "weights", "pretrained", "num_classes", "image_size", "train", "val", "class_map", "layers"),
    *("rank", "train_images", "search_images", "search_samples", "scales", "priors", "bins", "seed"),
)
"""Options that one output folder has one value of."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = common.parser(__doc__, "imagenet", "generate a small folder, last layer, 2 trials")
    found.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    group = found.add_argument_group("model")
    add = group.add_argument
    add("--model", help="timm:NAME, torchvision:NAME, package.module:function or file.py:function")
    add("--weights", help="state dict: .safetensors, or what torch.save wrote")
    add("--pretrained", action="store_true", help="use the weights that timm or torchvision offers")
    add("--num-classes", type=int, help="outputs of a timm or torchvision model")
    add("--image-size", type=int, help="instead of the model's own")
    add("--device", help="cpu, cuda ...; by default a GPU if there is one")
    group = found.add_argument_group("data")
    add = group.add_argument
    add("--train", type=Path, help="folder with a folder for each class")
    add("--val", type=Path, help="likewise; its images are divided between search and evaluation")
    add("--ood", action="append", metavar="NAME=FOLDER", help="foreign images; may be given several times")
    add("--class-map", type=Path, help="which output a folder is; wnids of 1,000 classes need none")
    add("--train-images", type=int, help="fit on so many, drawn at random; by default on all")
    add("--search-images", type=int, default=2000, help="validation images for the search, no others")
    add("--eval-images", type=int, help="of the remaining ones; by default all")
    add("--batch-size", type=int, default=32)
    add("--workers", type=int, default=4, help="processes that read images, for each process of torchrun")
    group = found.add_argument_group("posteriors")
    add = group.add_argument
    add("--methods", nargs="+", choices=list(fitting.METHODS), default=list(fitting.METHODS))
    add("--layers", default="all", help="all, last, or names with commas between")
    add("--rank", type=int, default=100, help="of INF")
    add("--checkpoint-every", type=int, default=200, help="batches between checkpoints of a fit")
    add("--seed", type=int, default=0, help="of drawn labels, weights, images and trials")
    group = found.add_argument_group("search")
    add = group.add_argument
    add("--budget", type=int, default=100, help="trials of each method; 100 in the paper's section 4.4")
    add("--scales", type=float, nargs=2, default=[1e3, 1e8], metavar=("LOW", "HIGH"), help="range of N")
    add("--priors", type=float, nargs=2, default=[1e2, 1e8], metavar=("LOW", "HIGH"), help="range of tau")
    add("--select", choices=["NLL", "ECE"], default="NLL", help="the lowest one on the search images wins")
    add("--search-samples", type=int, default=10, help="drawn models in a trial")
    group = found.add_argument_group("evaluation")
    add = group.add_argument
    add("--samples", type=int, default=30, help="drawn models")
    add("--bins", type=int, default=15, help="of the ECE")
    add("--no-progress", dest="progress", action="store_false", help="no bars")
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, ``--smoke`` standing behind those that are given."""
    command = parser()
    options = command.parse_args(arguments)
    if options.smoke:
        command.set_defaults(**SMOKE)
        options = command.parse_args(arguments)
        data = options.output / "data"
        options.train, options.val = options.train or data / "train", options.val or data / "val"
        options.ood = options.ood or [f"ood={data / 'ood'}"]
        options.weights = options.weights or str(data / example.WEIGHTS)
    if None in (options.model, options.train, options.val):
        command.error("--model, --train and --val are needed (or --smoke).")
    for name in ("scales", "priors"):
        low, high = getattr(options, name)
        if not 0 < low < high:
            command.error(f"--{name} must be two positive numbers, the lower one first.")
    foreign: dict[str, Path] = {}
    for text in options.ood or ():
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder or name in foreign or name == "test":
            command.error(f"--ood {text} must be NAME=FOLDER, each with a name of its own (not 'test').")
        foreign[name] = Path(folder)
    options.ood = foreign
    options.posteriors, options.trials = options.output / "posteriors", options.output / "trials"
    options.evaluations = options.output / "evaluations"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The stages asked for; the exit code."""
    options = parsed(arguments)
    try:
        with process_group(options.device) as options.device:
            run_on_all_ranks(lambda: work(options), "the recipe")
    except PosthocUQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def work(options: argparse.Namespace) -> None:
    """Everything that processes do together."""
    prepare(options)
    run(options)


def prepare(options: argparse.Namespace) -> None:
    """The output folder, its example data, and a record of its settings, made by the first process."""
    error: Exception | None = None
    try:
        if rank() == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            if options.smoke and not (options.output / "data" / example.WEIGHTS).exists():
                example.make(options.output / "data", *SMOKE_IMAGES, seed=options.seed)
            check_settings(options)
    except (PosthocUQError, OSError) as caught:
        error = PosthocUQError(str(caught))
    raise_on_any_error(error, "preparing the output folder")


def check_settings(options: argparse.Namespace) -> None:
    """Write down what an output folder was made with; later runs must agree.

    Raises:
        PosthocUQError: it was made with other settings.
    """
    path = options.output / "settings.json"
    wanted = json.loads(json.dumps({name: getattr(options, name) for name in FIXED}, default=str))
    if path.exists():
        known = json.loads(path.read_text())
        for name in FIXED:
            if known.get(name) != wanted[name]:
                raise PosthocUQError(
                    f"'{options.output}' was made with --{name.replace('_', '-')} {known.get(name)}, not "
                    f"{wanted[name]}; choose another --output."
                )
    path.write_text(json.dumps(wanted, indent=1) + "\n")


def run(options: argparse.Namespace) -> None:
    """Every stage asked for, in order."""
    if options.stages == ["plot"]:
        figures.plot_all(options)
        return
    named = ("model", "weights", "pretrained", "num_classes", "device", "image_size")
    source = trained_model(ModelSource(**{name: getattr(options, name) for name in named}))
    reading = (options.batch_size, options.workers)
    if "fit" in options.stages:
        train = folders.labelled(options.train, source, class_map(options, source, options.train))
        chosen = folders.some(len(train.dataset), options.train_images, options.seed)
        layers = options.layers if options.layers in ("all", "last") else options.layers.split(",")
        options.layers = layers
        fitting.fit_all(source, train.loader(chosen, *reading, divided=True), options)
    if {"search", "evaluate"} & set(options.stages):
        val = folders.labelled(options.val, source, class_map(options, source, options.val))
        assert val.labels is not None
        searched, rest = folders.parted(
            len(val.dataset), options.search_images, options.eval_images, options.seed
        )
        if "search" in options.stages:
            labels = torch.tensor([val.labels[index] for index in searched])
            search.search_all(source, val.loader(searched, *reading), labels, options)
        if "evaluate" in options.stages:
            foreign = {name: folders.unlabelled(folder, source) for name, folder in options.ood.items()}
            evaluating.evaluate_all(source, val, rest, foreign, options)
    if "plot" in options.stages:
        figures.plot_all(options)


def class_map(options: argparse.Namespace, source: TrainedModel, folder: Path) -> Path | None:
    """The map that is given, or that of ImageNet's wnids for folders that are some of them."""
    if options.class_map is not None:
        return options.class_map
    found = folders.imagenet_map(folder, options.output / "class_map.txt")
    raise_on_any_error(None, "writing the class map")
    return found


if __name__ == "__main__":
    sys.exit(main())
