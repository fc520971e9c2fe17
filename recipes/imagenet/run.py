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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from posthoc_uq import PosthocUQError
from posthoc_uq.app import ModelSource, process_group, trained_model
from posthoc_uq.core import gather, on_all_ranks, rank
from posthoc_uq.files import checked_target
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
    *("model", "weights", "pretrained", "num_classes", "image_size", "train", "class_map", "layers"),
    *("rank", "train_images", "seed"),
)
"""Options that one output folder has one value of."""
MEASURED = ("val", "val_labels", "search_images", "search_samples", "scales", "priors", "bins")
"""Likewise, once there are trials or evaluations."""


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
    add("--val-labels", type=Path, help="of a flat --val: ImageNet's official list, or a wnid for each image")
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
        with process_group(options.device) as options.device, on_all_ranks("the recipe"):
            work(options)
    except PosthocUQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def work(options: argparse.Namespace) -> None:
    """Everything that processes do together."""
    shared(lambda: prepare(options), "preparing the output folder")
    if options.stages == ["plot"]:
        figures.plot_all(options)
        return
    opened = Opened(options)
    shared(lambda: keep_settings(options), "writing the settings")
    run(options, opened)


def shared(step: Callable[[], None], doing: str) -> None:
    """What the first process does while the others wait."""
    with on_all_ranks(doing):
        if rank() == 0:
            try:
                step()
            except OSError as error:
                raise PosthocUQError(str(error)) from None


def prepare(options: argparse.Namespace) -> None:
    """The output folder and its example data; it must not be that of another run.

    Raises:
        PosthocUQError: it was made with other settings.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    checked_target(options.output / SETTINGS)
    if options.smoke and not (options.output / "data" / example.WEIGHTS).exists():
        example.make(options.output / "data", *SMOKE_IMAGES, seed=options.seed)
    path, wanted = options.output / SETTINGS, settings(options)
    if not path.exists():
        return
    known = json.loads(path.read_text())
    made = any(folder.is_dir() and any(folder.iterdir()) for folder in (options.trials, options.evaluations))
    for name in (*FIXED, *(MEASURED if made else ())):
        if known.get(name) != wanted[name]:
            raise PosthocUQError(
                f"'{options.output}' was made with --{name.replace('_', '-')} {known.get(name)}, not {wanted[name]}; "
                f"choose another --output."
            )


SETTINGS = "settings.json"


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What an output folder is made with."""
    return json.loads(json.dumps({name: getattr(options, name) for name in FIXED + MEASURED}, default=str))


def keep_settings(options: argparse.Namespace) -> None:
    """Write down what the output folder is made with, once all that a run needs was found."""
    common.put(options.output / SETTINGS, json.dumps(settings(options), indent=1) + "\n")


class Opened:
    """All that the stages read, opened and looked at before the first of them begins, since they take hours.

    Raises:
        PosthocUQError: a folder, a list of labels or a class map is missing, or does not fit the model.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        named = ("model", "weights", "pretrained", "num_classes", "device", "image_size")
        self.source = trained_model(ModelSource(**{name: getattr(options, name) for name in named}))
        self.train = self._labelled(options, options.train, None) if "fit" in options.stages else None
        self.val = self._labelled(options, options.val, options.val_labels)
        self.searched, self.rest = folders.parted(
            len(self.val.dataset), options.search_images, options.eval_images, options.seed
        )
        self.foreign = {name: folders.unlabelled(folder, self.source) for name, folder in options.ood.items()}

    def _labelled(self, options: argparse.Namespace, folder: Path, listed: Path | None) -> folders.Images:
        """With the map that is given, or that of ImageNet's wnids for classes that are some of them."""
        found = options.class_map
        if found is None:
            names = set(folders.classes_of(folder, folders.existing(folder), listed))
            found = folders.imagenet_map(names, options.output / "class_map.txt")
            gather(None, "writing the class map")
        return folders.labelled(folder, self.source, found, listed)


def run(options: argparse.Namespace, opened: Opened) -> None:
    """Every stage asked for, in order."""
    reading, source, val = (options.batch_size, options.workers), opened.source, opened.val
    if opened.train is not None:
        train = opened.train
        chosen = folders.some(len(train.dataset), options.train_images, options.seed)
        options.layers = options.layers if options.layers in ("all", "last") else options.layers.split(",")
        fitting.fit_all(source, train.loader(chosen, *reading, divided=True), options)
    if "search" in options.stages:
        assert val.labels is not None
        labels = torch.tensor([val.labels[index] for index in opened.searched])
        search.search_all(source, val.loader(opened.searched, *reading), labels, options)
    if "evaluate" in options.stages:
        evaluating.evaluate_all(source, val, opened.rest, opened.foreign, options)
    if "plot" in options.stages:
        figures.plot_all(options)


if __name__ == "__main__":
    sys.exit(main())
