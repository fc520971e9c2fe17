"""Models by name or by import path, with trained weights from a file.

``--model`` is one of

* ``timm:NAME``, such as ``timm:resnet18.a1_in1k``, or ``torchvision:NAME``, for classification or segmentation. These
  need ``--weights``, or ``--pretrained``, which downloads;
* ``package.module:function`` or ``file.py:function``: a function of yours that is called without arguments. The
  current folder is looked in, too.

``--weights`` loads a state dict, bare or under ``state_dict``, ``model_state_dict``, ``model`` or ``weights``;
``module.`` and ``_orig_mod.`` in names are ignored. In a trainer's checkpoint (Lightning's ``.ckpt``) the model's
names may have a prefix: it is found, or given by ``--weights-prefix net``. Only tensors and plain values are
unpickled. A posterior belongs to its weights: others are an error.

Images are prepared as the model expects: by timm's configuration for its models (also those that your function
returns), by the transforms of the default weights for torchvision's, else by the model's attribute ``transform``, else
scaled to [0, 1] without resizing. ``--image-size``, ``--mean`` and ``--std`` replace single values, ``--transform``
all of it. Images become grey or RGB by the channels of the first convolution. The posterior's file keeps these
options: other commands take them, and warn if their transform differs.

A model may return more than a tensor: `fit` finds the outputs, or takes ``--model-output KEY``, and the file keeps it.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from posthoc_uq.app.cli.options import ModelSource, WrongUsage
from posthoc_uq.app.cli.transforms import ImageTransform, transform_of
from posthoc_uq.app.paths import check_regular
from posthoc_uq.core.devices import usable_device
from posthoc_uq.core.errors import PosthocUQError, out_of_memory
from posthoc_uq.core.model import bare_name
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.outputs import output_tensor

Value = TypeVar("Value")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with what belongs to it.

    Attributes:
        model: in eval mode, on its device.
        spec: how it was named.
        transform: from an image to its input.
        categories: names of its outputs that its weights bring along, or None.
    """

    model: nn.Module
    spec: str
    transform: ImageTransform
    categories: Sequence[str] | None = None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def run(
        self, sample: Tensor, kind: str = "an image", advice: str = "see --image-size and --transform"
    ) -> Any:
        """What the model returns for one input without the dimension of samples; `kind` and `advice` are for the error.

        Raises:
            PosthocUQError: it cannot take such an input.
        """
        try:
            with torch.no_grad():
                return self.model(sample.unsqueeze(0).to(self.device))
        except PosthocUQError:
            raise
        except Exception as error:  # a user's model may raise anything
            if out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise PosthocUQError(
                f"The model does not take {kind} of shape {tuple(sample.shape)} ({reason}); {advice}."
            ) from error

    def outputs(self, sample: Tensor) -> Tensor:
        """Its outputs for one input, (1, outputs) or with positions."""
        return output_tensor(self.run(sample))


def trained_model(source: ModelSource) -> TrainedModel:
    """The model that the options name.

    Raises:
        PosthocUQError: there is none of this name, no weights for it, or weights of another one.
    """
    spec = source.model
    if spec is None:
        raise WrongUsage("--model must be given.")
    device = device_named(source.device)
    kind, _, name = spec.partition(":")
    categories: Sequence[str] | None = None
    if kind in ("timm", "torchvision") and name:
        if source.weights is None and not source.pretrained:
            raise PosthocUQError(f"'{spec}' alone has random weights; give --weights FILE, or --pretrained.")
        model, categories = (_timm if kind == "timm" else _torchvision)(name, source)
    elif is_import_path(spec):
        if source.num_classes is not None or source.pretrained:
            raise PosthocUQError(
                "--num-classes and --pretrained are for models of timm and torchvision alone."
            )
        model = function_at(spec)()
        if not isinstance(model, nn.Module):
            raise PosthocUQError(
                f"'{spec}' returned a {type(model).__name__}; it must return a torch.nn.Module."
            )
    else:
        raise PosthocUQError(
            f"'{spec}' names no model; use timm:NAME, torchvision:NAME, package.module:function or file.py:function."
        )
    if source.weights is not None:
        load_weights(model, source.weights, source.weights_prefix)
    if hasattr(model, _AUXILIARY[:-1]) and kind == "torchvision":
        cast(Any, model).aux_classifier = None
    model = model.eval().to(device)
    own = None if source.transform is None else imported(source.transform)
    return TrainedModel(model, spec, transform_of(model, source, own), categories)


def _timm(name: str, source: ModelSource) -> tuple[nn.Module, None]:
    import timm

    library = cast(Any, timm)
    if ":" not in name and not library.is_model(name):  # timm itself resolves hf-hub:... and the like
        raise PosthocUQError(
            f"timm has no model '{name}'.{did_you_mean(name.split('.')[0], library.list_models())}"
        )
    arguments = {} if source.num_classes is None else {"num_classes": source.num_classes}
    with _fetching(source):
        return library.create_model(name, pretrained=source.pretrained, **arguments), None


def _torchvision(name: str, source: ModelSource) -> tuple[nn.Module, Sequence[str] | None]:
    import torchvision

    library = cast(Any, torchvision.models)
    maps = library.list_models(module=library.segmentation)
    names = [*library.list_models(module=torchvision.models), *maps]
    if name not in names:
        raise PosthocUQError(
            f"torchvision has no classification or segmentation model '{name}'.{did_you_mean(name, names)}"
        )
    if source.pretrained:
        weights = library.get_model_weights(name).DEFAULT
        categories = weights.meta["categories"]
        if source.num_classes not in (None, len(categories)):
            raise PosthocUQError(
                f"The pretrained weights of '{source.model}' have {len(categories)} outputs, not "
                f"{source.num_classes}; leave --num-classes out."
            )
        with _fetching(source):
            return library.get_model(name, weights=weights), categories
    arguments: dict[str, Any] = {} if source.num_classes is None else {"num_classes": source.num_classes}
    if name in maps:
        arguments["weights_backbone"] = None  # else they are fetched, and replaced anyway
    return library.get_model(name, weights=None, **arguments), None


@contextmanager
def _fetching(source: ModelSource) -> Generator[None]:
    """Say in a sentence that pretrained weights could not be fetched."""
    try:
        yield
    except Exception as error:  # of the network, the hub or the library
        if out_of_memory(error) or not source.pretrained:
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PosthocUQError(
            f"The pretrained weights of '{source.model}' could not be fetched: {reason[0]}"
        ) from error


def device_named(name: str | None) -> torch.device:
    """A device by its name; without a name, a GPU if there is one.

    Raises:
        PosthocUQError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(name, f"--device {name}", "leave --device out, or use cpu")


def is_import_path(text: str) -> bool:
    """Whether a text has the form of an import path."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in name.split("."))


def imported(path: str) -> Any:
    """The object that an import path names; the current folder is looked in as well.

    Raises:
        PosthocUQError: there is no such module or name, or importing it fails.
    """
    where, _, name = path.rpartition(":")
    if not is_import_path(path):
        raise PosthocUQError(f"'{path}' is not of the form package.module:name or file.py:name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # the user's code may raise anything
        if out_of_memory(error):
            raise
        raise PosthocUQError(
            f"'{where}' could not be imported: {type(error).__name__}: {error} (--debug shows where.)"
        ) from error
    try:
        return attrgetter(name)(module)
    except AttributeError:
        close = did_you_mean(name, [attribute for attribute in dir(module) if not attribute.startswith("_")])
        raise PosthocUQError(f"'{where}' has no '{name}'.{close}") from None


def function_at(path: str) -> Callable[..., Any]:
    """The function that an import path names.

    Raises:
        PosthocUQError: there is none.
    """
    function = imported(path)
    if not callable(function):
        raise PosthocUQError(f"'{path}' is a {type(function).__name__}; it must be a function.")
    return function


def _from_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if str(path.parent) not in sys.path:  # a worker process that starts afresh finds the module by its name
        sys.path.insert(0, str(path.parent))
    module = sys.modules.get(path.stem)
    if module is None or getattr(module, "__file__", None) != str(path):
        spec = cast(ModuleSpec, importlib.util.spec_from_file_location(path.stem, path))
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        cast(Loader, spec.loader).exec_module(module)
    return module


# Weights: nothing but tensors and plain values is unpickled.

_WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")
_PREFIX = "model."  # of a module that holds the model, as trainers have it
_AUXILIARY = "aux_classifier."  # torchvision's second classifier, which only the training uses
_COUNTER = "num_batches_tracked"  # of BatchNorm; old files lack it and eval mode does not read it
_MAX_NAMED = 3


def read_state(path: str) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, or of a state dict that `torch.save` wrote, bare or inside a checkpoint.

    Raises:
        PosthocUQError: there is no such file, or no state dict in it.
    """
    check_regular(path, "The weights file")
    try:
        if path.endswith(".safetensors"):
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PosthocUQError(f"There is no weights file '{path}'.") from None
    except OSError as error:
        raise PosthocUQError(
            f"The weights file '{path}' cannot be read: {error.strerror or error}."
        ) from None
    except pickle.UnpicklingError as error:
        objects = "Unsupported" in str(error) or "GLOBAL" in str(error)
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        kind = "" if named is None else f" ({named[1]}, say)"
        what = (
            f"holds Python objects{kind}, which are not loaded"
            if objects
            else "is not a file that torch.save wrote"
        )
        raise PosthocUQError(
            f"'{path}' {what}; write it with torch.save(model.state_dict(), ...)"
            + (
                ", or where you trust a trainer's checkpoint, with "
                "torch.save(torch.load(FILE, weights_only=False)['state_dict'], ...)."
                if objects
                else "."
            )
        ) from None
    except (SafetensorError, EOFError, RuntimeError, ValueError, LookupError):
        raise PosthocUQError(f"'{path}' is damaged, or no file of weights.") from None
    while isinstance(content, Mapping):
        mapping = cast(Mapping[str, Any], content)
        content = next((mapping[key] for key in _WRAPPERS if isinstance(mapping.get(key), Mapping)), None)
        if content is None:
            tensors = {str(name): value for name, value in mapping.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    raise PosthocUQError(f"'{path}' holds no state dict; write one with torch.save(model.state_dict(), ...).")


def load_weights(model: nn.Module, path: str, prefix: str | None = None) -> None:
    """Put the weights of a file into a model.

    What wrappers add to names is ignored: ``module.`` and ``_orig_mod.`` anywhere in the names of the file or the
    model. Where the file has all the model's names behind one `prefix`, as a trainer's checkpoint has
    (``model.``, ``net.``), they are these, and what else is in the file is left out.

    Raises:
        PosthocUQError: the file cannot be read, or its names or shapes are not the model's.
    """
    model_state: dict[str, Tensor] = model.state_dict()
    state = _stripped(read_state(path), model_state, path, prefix)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # of a shape
        reason = " ".join(str(error).split()).partition("state_dict for ")[2][:300]
        raise PosthocUQError(
            f"The weights in '{path}' do not fit the model ({reason}); is it the right --model, and --num-classes?"
        ) from None
    missing = [name for name in missing if not name.endswith(_COUNTER)]
    unexpected = [name for name in unexpected if not name.startswith(_AUXILIARY)]
    parts = [
        f"{verb} {len(names)} ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
        for verb, names in (("the file lacks", missing), ("the model does not have", unexpected))
        if names
    ]
    if parts:
        raise PosthocUQError(
            f"The weights in '{path}' are not this model's: of {len(model_state)} tensors {', and '.join(parts)}. If "
            f"your function puts layers around the network of the file, load the file there, and give no --weights."
        )


def _stripped(
    state: dict[str, Tensor], model_state: Mapping[str, Tensor], path: str, prefix: str | None
) -> dict[str, Tensor]:
    bare_state, model_names = _bare(state), _bare({name: name for name in model_state})
    found = _prefixes(bare_state, model_names)
    if prefix is not None:
        prefix = prefix.rstrip(".") + "." if prefix else ""
        if not any(name.startswith(prefix) for name in bare_state):
            there = sorted({name.partition(".")[0] for name in bare_state if "." in name})
            raise PosthocUQError(
                f"--weights-prefix: no name in '{path}' begins with '{prefix}'; they begin with {', '.join(there[:5])}."
            )
        found = [prefix]
    if len(found) > 1:
        raise PosthocUQError(
            f"'{path}' has the weights of this model {len(found)} times, behind {', '.join(map(repr, found[:5]))}; say "
            f"which with --weights-prefix."
        )
    if found:
        start = len(found[0])
        others = [name for name in bare_state if not name.startswith(found[0])]
        if others and prefix is None:
            warnings.warn(
                f"Of '{path}', the weights behind '{found[0]}' are taken, and {len(others)} others are left out: "
                f"{', '.join(others[:_MAX_NAMED])}{', ...' if len(others) > _MAX_NAMED else ''}.",
                stacklevel=2,
            )
        bare_state = {name[start:]: value for name, value in bare_state.items() if name.startswith(found[0])}
    while all(name.startswith(_PREFIX) for name in bare_state) and not any(
        name.startswith(_PREFIX) for name in model_names
    ):
        bare_state = {name.removeprefix(_PREFIX): value for name, value in bare_state.items()}
    return {model_names.get(name, name): value for name, value in bare_state.items()}


def _prefixes(state: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    """Behind which prefixes a file has all of a model's names; none where it has them as they are."""
    wanted = [name for name in names if not name.endswith(_COUNTER)]
    if not wanted or all(name in state for name in wanted):
        return []
    ends = [name.removesuffix(wanted[0]) for name in state if name.endswith(f".{wanted[0]}")]
    return [start for start in ends if all(start + name in state for name in wanted)]


def _bare(named: Mapping[str, Value]) -> dict[str, Value]:
    """By names without what wrappers add, unless two names would become the same."""
    bare = {bare_name(name): value for name, value in named.items()}
    return bare if len(bare) == len(named) else dict(named)


def with_weights(model: nn.Module, path: str) -> nn.Module:
    """A copy of a model with the weights of a file; see `load_weights`."""
    other = copy.deepcopy(model)
    load_weights(other, path)
    return other
