"""The options that several commands share, each said once: the model, the data, and how a command talks.

A plain dataclass holds them: its fields are the options, its docstring is their help, and `posthoc_uq.app.cli.parser`
makes one from the other. A command takes a dataclass by having a parameter of its type. A type such as `Written` also
says what the option's file is for, so that nothing is written over by mistake (`posthoc_uq.app.cli.outputs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from posthoc_uq.app.cli.help import dashed
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, Natural

Share = Annotated[float, Gt(0), Lt(1)]
ImageSize = Annotated[int, Ge(1), Le(2**14)]
Port = Annotated[int, Ge(0), Le(65535)]

Read = Annotated[str, "read"]
"""A file or folder that is read."""
DataName = Annotated[str, "data"]
"""Data by path or by name, or the code that makes them."""
Code = Annotated[str, "code"]
"""The import path of something of the user's."""
Written = Annotated[str, "written"]
"""A file that is written, and written over with ``--force`` alone."""
Kept = Annotated[str, "kept"]
"""A file that a fit goes on from, or that a server adds to: it may be there, and is checked where it is opened."""

SHARED = {
    "file": "the posterior's file.",
    "head": "how to predict; by default the one that FILE names.",
    "force": "write over files that are there already, but never over an input.",
    "unlabelled": "leave class folders aside: the model's own labels suffice.",
    "level": "of the interval, for a regression.",
    "class_names": "names of the outputs: one a line, or JSON; or a folder with a folder for each class.",
    "seed": "of all random numbers.",
}
"""The words of options that several commands have, where their docstrings say nothing else."""

Kind = TypeVar("Kind")


class WrongUsage(PosthocUQError):
    """A command was called in a way that it does not understand."""


def check_extra(name: str, *modules: str) -> None:
    """Refuse what needs an extra that is not installed."""
    if any(find_spec(module) is None for module in modules):
        raise PosthocUQError(f"This needs the extra {name}: pip install 'posthoc-uq[{name}]'.")


@dataclass(frozen=True)
class Choice:
    """A method, likelihood or head that was chosen by its name, with the options of it that were given.

    Attributes:
        word: what is chosen, such as ``"method"``.
        name: of the chosen one; None where nothing was said.
        options: by name.
        named: whether it was said; else the name is the default.
    """

    word: str
    name: str | None
    options: dict[str, Any]
    named: bool = field(default=True, compare=False)

    def make(self, kind: type[Kind]) -> Kind:
        """An object of the class, with these options.

        Raises:
            WrongUsage: the class refuses a value.
        """
        try:
            return kind(**self.options)
        except PosthocUQError as error:
            text = str(error)
            named = next((name for name in self.options if text.startswith(f"{name} ")), None)
            if named is not None:
                text = f"--{self.word}.{dashed(named)}{text.removeprefix(named)}"
            raise WrongUsage(text) from error


@dataclass(frozen=True, kw_only=True)
class Console:
    """What a command prints.

    Attributes:
        json: print one JSON object on stdout, and nothing else there.
        quiet: no progress bars.
        debug: show the traceback of an error.
    """

    json: bool = False
    quiet: bool = False
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class Referred:
    """Which inputs are referred to a person, by the held-out scores that calibrate keeps in FILE.

    Attributes:
        referral_rate: share of familiar inputs to refer to a person (0.05 by default).
        referral_accuracy: in place of a rate, of classes: refer as few as leave the rest right with this accuracy.
        referral_confidence: that the accuracy is reached, such as 0.9; without it on average.
        referral_exactly: refer just the rate of all inputs, by rank, and not at most that.
        referral_score: entropy (of values standard_deviation) or novelty alone; by default joint, the more surprising.
    """

    referral_rate: Share | None = None
    referral_accuracy: Share | None = None
    referral_confidence: Share | None = None
    referral_exactly: bool = False
    referral_score: str = "joint"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model, its weights, and how an image becomes its input.

    Attributes:
        model: timm:NAME, torchvision:NAME, package.module:function or file.py:function (called without arguments). A
            command on a posterior's FILE takes the model of timm or torchvision that FILE names, with its weights.
        weights: a state dict: .safetensors, or what torch.save wrote.
        weights_prefix: before the model's names in the weights, where several fit.
        pretrained: use the weights that timm or torchvision offers.
        num_classes: outputs of a model of timm or torchvision.
        device: cpu, cuda, cuda:1 ...; by default a GPU if there is one.
        transform: image to tensor: package.module:name or file.py:name of a callable, or of a function without
            arguments that returns one.
        image_size: in pixels, instead of the fit's, or of the model's own.
        mean: of the channels, instead of the model's own.
        std: of the channels, instead of the model's own.
    """

    model: Code | None = None
    weights: Read | None = None
    weights_prefix: str | None = None
    pretrained: bool = False
    num_classes: Count | None = None
    device: str | None = None
    transform: Code | None = None
    image_size: ImageSize | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


_IN_THE_FILE = ("device", "image_size", "mean", "std")  # or another one for each command


def naming_options(source: ModelSource) -> list[str]:
    """The words of a command line that name this model to a command on the posterior's file."""
    words = list[str]()
    for option in fields(source):
        value = getattr(source, option.name)
        if option.name not in _IN_THE_FILE and value != option.default:
            words += [dashed(f"--{option.name}"), *([] if value is True else [str(value)])]
    return words


@dataclass(frozen=True, kw_only=True)
class Data:
    """How data are read: which part, which classes, how much at once.

    Attributes:
        split: part of the data, such as train, or train[:50000].
        data_root: where torchvision's data sets lie.
        download: let torchvision fetch a data set that is not there.
        class_map: which output a class folder, or a label of a table, is: a file with one name a line, or JSON.
        target: of a table: the column with the target, or several.
        columns: of a table: those that the model takes, in its order; by default all that are no target.
        ignore_index: of masks: the value of pixels that count for nothing (255).
        limit: take so many samples, evenly spaced.
        batch_size: samples at once.
        workers: processes that read images; by default by the number of cores, 0 for none.
    """

    split: str | None = None
    data_root: str = "data"
    download: bool = False
    class_map: Read | None = None
    target: list[str] = field(default_factory=list[str])
    columns: list[str] = field(default_factory=list[str])
    ignore_index: int | None = None
    limit: Count | None = None
    batch_size: Count = 32
    workers: Natural | None = None
