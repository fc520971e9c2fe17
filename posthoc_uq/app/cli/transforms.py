"""Images as a model wants them: its own preprocessing, found by timm, torchvision or the model itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from posthoc_uq.app.cli.options import ModelSource
from posthoc_uq.app.paths import UNKNOWN
from posthoc_uq.core.errors import PosthocUQError

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
        timm: timm's configuration, since some of its models stretch images, or give them a border; or None.
    """

    channels: int
    size: tuple[int, int] | None = None
    resize: int | None = None
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    timm: dict[str, Any] | None = None

    def transform(self) -> ImageTransform:
        """As a transform, which imports torchvision when it is first applied: tables have no need of it."""
        shorter = self._shorter
        text = f"{self.channels} x " + (
            "own size" if self.size is None else f"{self.size[0]} x {self.size[1]}"
        )
        text += "" if shorter is None else f" of {shorter}, {self.interpolation}"
        if self.mean:
            text += f", mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        return ImageTransform(
            self._prepare,
            _MODES.get(self.channels),
            text,
            self.mean or (0.0,) * self.channels,
            self.std or (1.0,) * self.channels,
            self._prepare_mask if (self.timm or {}).get("crop_mode") in (None, "center") else None,
            shorter or 0,
        )

    @property
    def _shorter(self) -> int | None:
        return self.resize or (None if self.size is None else min(self.size))

    def _prepare(self, image: Any) -> Any:
        return self._of_images(image)

    def _prepare_mask(self, image: Any) -> Any:
        return self._of_masks(image)

    @cached_property
    def _of_images(self) -> Callable[[Any], Any]:
        from torchvision import transforms

        if self.timm is not None and self.size is not None:
            from timm.data.transforms_factory import create_transform

            changed = {"input_size": (self.channels, *self.size), "mean": self.mean, "std": self.std}
            return cast(Any, create_transform)(**(self.timm | changed), is_training=False)
        colours = [transforms.Normalize(self.mean, self.std)] if self.mean else []
        return transforms.Compose([*self._geometry(self.interpolation), transforms.ToTensor(), *colours])

    @cached_property
    def _of_masks(self) -> Callable[[Any], Any]:
        from torchvision import transforms

        # as Pillow takes the nearest pixel, also for images; torchvision's transforms of masks take another one
        return transforms.Compose(self._geometry("nearest"))

    def _geometry(self, interpolation: str) -> list[Any]:
        from torchvision import transforms

        how, shorter = transforms.InterpolationMode(interpolation), self._shorter
        steps: list[Any] = [] if shorter is None else [transforms.Resize(shorter, how)]
        return steps + ([] if self.size is None else [transforms.CenterCrop(self.size)])


def _numbers(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.4g}" for value in values)


def transform_of(model: nn.Module, source: ModelSource, own: Any = None) -> ImageTransform:
    """The transform of a model: the user's own, else that of timm's or torchvision's configuration, else the model's
    attribute ``transform``; with the size, mean and standard deviation that are given.

    Args:
        model: with its weights.
        source: how it was named, and what was given.
        own: a transform of the user's, or a function that makes one.

    Raises:
        PosthocUQError: options that do not fit each other or the model.
    """
    spec = source.model or ""
    changed = source.image_size is not None or source.mean is not None or source.std is not None
    if (source.mean is None) != (source.std is None):
        raise PosthocUQError("--mean and --std belong together; give both or neither.")
    known = spec.startswith(("timm:", "torchvision:"))
    attribute = None if known or changed else getattr(model, "transform", None)
    channels = input_channels(model)
    if own is not None or callable(attribute):
        if changed:
            raise PosthocUQError("--transform does it all; leave --image-size, --mean and --std out.")
        return _own_transform(attribute if own is None else own, source.transform or spec, channels)
    if isinstance(getattr(model, "pretrained_cfg", None), Mapping):
        found = _timm(model)
    elif spec.startswith("torchvision:"):
        found = _torchvision(spec.partition(":")[2])
    else:
        found = Preprocessing(channels)
    size, resize, length = found.size, found.resize, source.image_size
    if length is not None:  # the share that the crop cuts away stays
        resize = round(resize * length / min(size)) if size and resize else length
        size = (length, length)
    mean = _fitted(found.mean if source.mean is None else source.mean, channels, "mean")
    std = _fitted(found.std if source.std is None else source.std, channels, "std")
    return replace(found, channels=channels, size=size, resize=resize, mean=mean, std=std).transform()


def _own_transform(work: Any, name: str, channels: int) -> ImageTransform:
    if isinstance(work, type) or (callable(work) and _needs_nothing(work)):
        work = work()
    if not callable(work):
        raise PosthocUQError(f"'{name}' gives no transform: a {type(work).__name__} cannot be called.")
    return ImageTransform(work, _MODES.get(channels), f"transform of {name}")


def _timm(model: nn.Module) -> Preprocessing:
    """What timm says of a model that it made, under whatever name."""
    from timm.data.config import resolve_model_data_config

    config = cast(dict[str, Any], cast(Any, resolve_model_data_config)(model))
    _, height, width = config["input_size"]
    interpolation = config["interpolation"] if config["interpolation"] != "random" else "bilinear"
    resize = int(min(height, width) / config["crop_pct"])
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return Preprocessing(len(mean), (height, width), resize, interpolation, mean, std, config)


def _torchvision(name: str) -> Preprocessing:
    """The preprocessing of a model's default weights."""
    from torchvision.models import get_model_weights

    preset = cast(Any, get_model_weights(name)).DEFAULT.transforms()
    crop = getattr(preset, "crop_size", None)  # those of segmentation resize and do not cut
    size = None if crop is None else (int(crop[0]), int(crop[0]))
    mean, std = tuple(preset.mean), tuple(preset.std)
    return Preprocessing(len(mean), size, int(preset.resize_size[0]), preset.interpolation.value, mean, std)


def _fitted(values: Sequence[float], channels: int, name: str) -> tuple[float, ...]:
    """A number for each channel."""
    if len(values) in (0, channels):
        return tuple(values)
    if len(values) == 1:
        return tuple(values) * channels
    if channels == 1:  # one grey channel in the place of several colours
        return (sum(values) / len(values),)
    raise PosthocUQError(f"--{name} has {len(values)} numbers, and the model's input {channels} channels.")


def input_channels(model: nn.Module) -> int:
    """Input channels of the first two-dimensional convolution, else of a timm configuration, else 3."""
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is not None:
        return convolution.in_channels
    configuration: Any = getattr(model, "pretrained_cfg", None)
    return int(configuration.get("input_size", (3,))[0]) if isinstance(configuration, Mapping) else 3


def _needs_nothing(function: Any) -> bool:
    """Whether a callable has no parameters without a default."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
