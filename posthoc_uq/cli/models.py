"""Models by name or by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from posthoc_uq.cli.importing import call_imported, is_import_path
from posthoc_uq.cli.transforms import ImageTransform, resolve_transform
from posthoc_uq.cli.weights import load_weights, read_state
from posthoc_uq.core.devices import usable_device
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import bare_name
from posthoc_uq.core.options import did_you_mean


@dataclass(frozen=True)
class Source:
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
    categories: Sequence[str] | None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def source_of(options: Mapping[str, Any]) -> Source:
    """The model that the options name.

    Raises:
        PosthocUQError: there is none of this name, no weights for it, or weights of another one.
    """
    device = device_named(options["device"])
    spec: str = options["model"]
    kind, _, name = spec.partition(":")
    categories: Sequence[str] | None = None
    if kind in ("timm", "torchvision") and name:
        if options["weights"] is None and not options["pretrained"]:
            raise PosthocUQError(f"'{spec}' alone has random weights; give --weights FILE, or --pretrained.")
        model, categories = (_timm if kind == "timm" else _torchvision)(spec, name, options)
    elif is_import_path(spec):
        if options["num_classes"] is not None or options["pretrained"]:
            raise PosthocUQError(
                "--num-classes and --pretrained are for timm: and torchvision: models; a function makes its own model."
            )
        returned = call_imported(spec)
        if not isinstance(returned, nn.Module):
            raise PosthocUQError(
                f"'{spec}' returned a {type(returned).__name__}; it must return a torch.nn.Module."
            )
        model = returned
    else:
        raise PosthocUQError(
            f"'{spec}' names no model; use timm:NAME, torchvision:NAME, package.module:function or file.py:function."
        )
    if options["weights"] is not None:
        load_weights(model, options["weights"])
    if kind == "torchvision" and hasattr(model, "aux_classifier"):
        cast(Any, model).aux_classifier = None  # of the training alone
    model = model.eval().to(device)
    transform = resolve_transform(
        model, spec, options["transform"], options["image_size"], options["mean"], options["std"]
    )
    return Source(model, spec, transform, categories)


def _timm(spec: str, name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Sequence[str] | None]:
    import timm

    library = cast(Any, timm)
    if ":" not in name and not library.is_model(name):  # timm itself resolves hf-hub:... and the like
        close = did_you_mean(name.split(".")[0], library.list_models())
        raise PosthocUQError(f"timm has no model '{name}'.{close}")
    arguments = {} if options["num_classes"] is None else {"num_classes": options["num_classes"]}
    with _fetching(spec, options):
        return library.create_model(name, pretrained=options["pretrained"], **arguments), None


def _torchvision(spec: str, name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Sequence[str] | None]:
    import torchvision

    library = cast(Any, torchvision.models)
    maps = library.list_models(module=library.segmentation)
    names = [*library.list_models(module=torchvision.models), *maps]
    if name not in names:
        raise PosthocUQError(
            f"torchvision has no classification or segmentation model '{name}'.{did_you_mean(name, names)}"
        )
    arguments: dict[str, Any] = (
        {} if options["num_classes"] is None else {"num_classes": options["num_classes"]}
    )
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False  # slow, and these weights are replaced anyway
    if name in maps:
        arguments["weights_backbone"] = None  # else they are fetched, and replaced anyway
        arguments["aux_loss"] = _has_auxiliary(options["weights"])
    if not options["pretrained"]:
        return library.get_model(name, weights=None, **arguments), None
    weights = library.get_model_weights(name).DEFAULT
    if options["num_classes"] not in (None, len(weights.meta["categories"])):
        raise PosthocUQError(
            f"The pretrained weights of '{spec}' have {len(weights.meta['categories'])} outputs, not "
            f"{options['num_classes']}; leave --num-classes out."
        )
    arguments = {name: arguments[name] for name in arguments if name == "num_classes"}
    with _fetching(spec, options):
        return library.get_model(name, weights=weights), weights.meta["categories"]


def _has_auxiliary(weights: str | None) -> bool | None:
    """Whether the weights have those of a second classifier that only the training uses; None for the default."""
    if weights is None:
        return None
    return any(name.split(".")[0] == "aux_classifier" for name in map(bare_name, read_state(weights)))


class _fetching:
    """Says in a sentence that weights could not be fetched."""

    def __init__(self, spec: str, options: Mapping[str, Any]) -> None:
        self._spec, self._fetches = spec, bool(options["pretrained"])

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if self._fetches and isinstance(error, Exception):
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise PosthocUQError(
                f"The pretrained weights of '{self._spec}' could not be fetched: {reason[0]}"
            ) from error


def device_named(name: str | None) -> torch.device:
    """A device by its name; without a name, a GPU if there is one.

    Raises:
        PosthocUQError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(name, f"--device {name}", "leave --device out, or use cpu")


_IMAGE = ("an image", "see --image-size and --transform")


def count_outputs(model: nn.Module, sample: torch.Tensor) -> int:
    """How many outputs the model has for one input; see `outputs_for`."""
    return int(outputs_for(model, sample).shape[-1])


def outputs_for(model: nn.Module, sample: torch.Tensor) -> torch.Tensor:
    """The model's outputs for one input; see `run_on`."""
    from posthoc_uq.core.outputs import output_tensor

    return output_tensor(run_on(model, sample, *_IMAGE))


def run_on(model: nn.Module, sample: torch.Tensor, kind: str, advice: str) -> Any:
    """What the model returns for one input.

    Args:
        model: in eval mode.
        sample: an input without the dimension of samples, such as (channels, height, width).
        kind: what it is, for the message.
        advice: what to do if the model cannot take it.

    Raises:
        PosthocUQError: it cannot take such an input.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            return model(sample.unsqueeze(0).to(device))
    except PosthocUQError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise PosthocUQError(
            f"The model does not take {kind} of shape {tuple(sample.shape)} ({reason}); {advice}."
        ) from error
