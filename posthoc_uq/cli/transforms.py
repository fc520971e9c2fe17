"""Images as a model wants them: its own preprocessing, found from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from posthoc_uq.cli.importing import import_object, needs_arguments
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import UNKNOWN

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class ImageTransform:
    """An image to a model's input.

    Attributes:
        work: from an image to a tensor (channels, height, width).
        mode: Pillow's mode that the image is brought into before, or None.
        text: in words; two transforms with the same words do the same.
        mean: what is subtracted from the channels, or None where that is not known.
        std: what they are divided by, or None.
        geometry: what it does to the places of pixels, for masks of classes: from an image to an image, without new
            values; None where that is not known.
        shorter: pixels to which it resizes the shorter side, or 0 where it keeps the size.
    """

    work: Callable[[Any], Any]
    mode: str | None
    text: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    geometry: Callable[[Any], Any] | None = None
    shorter: int = UNKNOWN

    def __call__(self, image: Any) -> Any:
        if isinstance(image, Image.Image) and self.mode is not None and image.mode != self.mode:
            image = image.convert(self.mode)
        return self.work(image)

    def display(self, image: Tensor) -> Tensor:
        """An input (channels, height, width) as colours in [0, 1]."""
        if self.mean is None or self.std is None:
            low, high = image.min(), image.max()
            return (image - low) / (high - low).clamp(min=1e-12)
        mean, std = (torch.tensor(v, device=image.device, dtype=image.dtype) for v in (self.mean, self.std))
        return (image * std[:, None, None] + mean[:, None, None]).clamp(0, 1)


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side, crop the middle, scale to [0, 1], normalise.

    Attributes:
        channels: of the model's input.
        size: (height, width) of the crop, or None for none.
        resize: shorter side before the crop; None to leave images without a crop as they are.
        interpolation: Pillow's name.
        mean, std: by channel, or empty.
    """

    channels: int
    size: tuple[int, int] | None = None
    resize: int | None = None
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def transform(self) -> ImageTransform:
        """As a transform."""
        from torchvision import transforms

        steps = [*self._geometry(self.interpolation), transforms.ToTensor()]
        if self.mean:
            steps.append(transforms.Normalize(self.mean, self.std))
        shape = "own size" if self.size is None else f"{self.size[0]} x {self.size[1]}"
        text = f"{self.channels} x {shape}"
        if self.size is not None or self.resize is not None:
            text += f" of {self._shorter()}, {self.interpolation}"
        if self.mean:
            text += f", mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        known = (self.mean, self.std) if self.mean else ((0.0,) * self.channels, (1.0,) * self.channels)
        masks = transforms.Compose(self._geometry("nearest"))
        mode, shorter = _MODES.get(self.channels), self._shorter() or 0
        return ImageTransform(transforms.Compose(steps), mode, text, *known, masks, shorter)

    def _shorter(self) -> int | None:
        return self.resize or (None if self.size is None else min(self.size))

    def _geometry(self, interpolation: str) -> list[Any]:
        """Resize and crop, as far as there is something to do."""
        from torchvision import transforms

        shorter = self._shorter()
        how = transforms.InterpolationMode(interpolation)
        steps: list[Any] = [] if shorter is None else [transforms.Resize(shorter, how)]
        return steps + ([] if self.size is None else [transforms.CenterCrop(self.size)])


def _numbers(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.4g}" for value in values)


def resolve_transform(
    model: nn.Module,
    spec: str,
    path: str | None,
    image_size: int | None,
    mean: list[float] | None,
    std: list[float] | None,
) -> ImageTransform:
    """The transform of a model: the one at `path`, else that of timm's or torchvision's configuration, else the model's
    attribute ``transform``; with the size, mean and standard deviation that are given.

    Args:
        model: with its weights.
        spec: how the model was named.
        path: the import path of a transform, or of a function that makes one.
        image_size: height and width.
        mean: by channel.
        std: by channel.

    Raises:
        PosthocUQError: options that do not fit each other or the model.
    """
    changed = image_size is not None or mean is not None or std is not None
    if (mean is None) != (std is None):
        raise PosthocUQError("--mean and --std belong together; give both or neither.")
    channels = input_channels(model)
    known = spec.startswith(("timm:", "torchvision:"))
    attribute: Any = None if known else getattr(model, "transform", None)
    if path is not None or (callable(attribute) and not changed):
        if changed:
            raise PosthocUQError("--transform does it all; leave --image-size, --mean and --std out.")
        return _users_transform(path, attribute, channels, spec)
    config = _timm_config(model) or (_torchvision_config(spec) if spec.startswith("torchvision:") else None)
    if config is None or changed or channels != len(config["mean"]) or "size" not in config:
        return _changed(config or {}, channels, image_size, mean, std).transform()
    if "preset" in config:
        preset = config["preset"]
        work: Callable[[Any], Any] = preset
        size = (preset.crop_size[0], preset.crop_size[0])
    else:
        from timm.data.transforms_factory import create_transform

        work = cast(Any, create_transform)(**config["timm"], is_training=False)
        size = config["size"]
    words = (
        f"{channels} x {size[0]} x {size[1]} of {config['resize']}, {config['interpolation']}, "
        f"mean {_numbers(config['mean'])}, std {_numbers(config['std'])}"
    )
    mode, shorter = _MODES.get(channels), config["resize"]
    return ImageTransform(work, mode, words, config["mean"], config["std"], shorter=shorter)


def _users_transform(path: str | None, attribute: Any, channels: int, spec: str) -> ImageTransform:
    work = attribute if path is None else import_object(path)
    if isinstance(work, type) or (callable(work) and not needs_arguments(work)):
        work = work()
    if not callable(work):
        raise PosthocUQError(
            f"'{path or spec}' gives no transform: a {type(work).__name__} cannot be called."
        )
    return ImageTransform(work, _MODES.get(channels), f"transform of {path or spec}")


def _timm_config(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a model that timm made, under whatever name; None for other models."""
    if not isinstance(getattr(model, "pretrained_cfg", None), Mapping):
        return None
    from timm.data.config import resolve_model_data_config

    config = cast(dict[str, Any], cast(Any, resolve_model_data_config)(model))
    _, height, width = config["input_size"]
    return {
        "timm": config,
        "size": (height, width),
        "resize": int(min(height, width) / config["crop_pct"]),
        "interpolation": config["interpolation"] if config["interpolation"] != "random" else "bilinear",
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
    }


def _torchvision_config(spec: str) -> dict[str, Any]:
    """The configuration of the model's default weights."""
    from torchvision.models import get_model_weights

    preset = cast(Any, get_model_weights(spec.partition(":")[2])).DEFAULT.transforms()
    if not hasattr(preset, "crop_size"):  # of segmentation: resized and not cut
        return {
            "resize": int(preset.resize_size[0]),
            "interpolation": preset.interpolation.value,
            "mean": tuple(preset.mean),
            "std": tuple(preset.std),
        }
    crop, resize = int(preset.crop_size[0]), int(preset.resize_size[0])
    return {
        "preset": preset,
        "size": (crop, crop),
        "resize": resize,
        "interpolation": preset.interpolation.value,
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
    }


def _changed(
    config: Mapping[str, Any],
    channels: int,
    image_size: int | None,
    mean: list[float] | None,
    std: list[float] | None,
) -> Preprocessing:
    """A configuration (or none) with the given values in place of its own."""
    size, resize = config.get("size"), config.get("resize")
    if image_size is not None:
        resize = round(resize * image_size / min(size)) if size and resize else image_size
        size = (image_size, image_size)

    def fitted(values: tuple[float, ...], name: str) -> tuple[float, ...]:
        if len(values) == channels or not values:
            return values
        if len(values) == 1:
            return values * channels
        if channels == 1:  # one grey channel in the place of several colours
            return (sum(values) / len(values),)
        raise PosthocUQError(
            f"--{name} has {len(values)} numbers, and the model's input {channels} channels."
        )

    return Preprocessing(
        channels,
        size,
        resize,
        config.get("interpolation", "bilinear"),
        fitted(tuple(mean if mean is not None else config.get("mean", ())), "mean"),
        fitted(tuple(std if std is not None else config.get("std", ())), "std"),
    )


def input_channels(model: nn.Module) -> int:
    """Input channels of the first two-dimensional convolution, else of a timm configuration, else 3."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    configuration: Any = getattr(model, "pretrained_cfg", None)
    if isinstance(configuration, Mapping):
        return int(cast(Any, configuration).get("input_size", (3,))[0])
    return 3
