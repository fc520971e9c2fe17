"""A face detector's second network as it is installed: facenet-pytorch's RNet (MTCNN, Zhang et al. 2016), on crops.

python -m recipes.zoo.faces            six kinds of crops; a minute on one core
python -m recipes.zoo.faces --smoke    a fifth of the crops; seconds
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from skimage import data
from torch import Tensor, nn
from torch.nn.functional import interpolate

from recipes.common import in_order
from recipes.zoo.packages import module_of, weights_of
from recipes.zoo.study import Kind, classes, options_of, study

BATCH = 50


def detector() -> nn.Module:
    """The network with its weights; from ``(samples, 3, 24, 24)`` in [-1, 1] to corrections of a box and logits."""
    network: nn.Module = module_of("facenet_pytorch.models.mtcnn", {"facenet_pytorch": {}}).RNet(
        pretrained=False
    )
    network.load_state_dict(weights_of("facenet_pytorch", "data", "rnet.pt"))
    network.softmax5_1 = nn.Identity()
    return network.eval()


def labelled(samples: int, held_out: bool) -> tuple[Tensor, Tensor]:
    """Crops ``(samples, 1, 25, 25)`` in [0, 1] of photographs, and 1 for a face: half of scikit-image's 200."""
    crops = torch.as_tensor(data.lfw_subset()).float()
    labels = torch.cat([torch.ones(100), torch.zeros(100)]).long()
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    rows = rows[100:] if held_out else rows[:100]
    return crops[rows[:samples], None], labels[rows[:samples]]


def as_inputs(crops: Tensor) -> Tensor:
    """Grey crops as the network takes them."""
    pixels = interpolate(crops, size=24, mode="bilinear").expand(-1, 3, -1, -1)
    return (255 * pixels - 127.5) / 128


def textures(samples: int) -> Tensor:
    """Crops of bricks, grass and gravel."""
    generator = torch.Generator().manual_seed(8)
    images = [torch.as_tensor(image).float() / 255 for image in (data.brick(), data.grass(), data.gravel())]
    crops: list[Tensor] = []
    for index in range(samples):
        top, left = torch.randint(0, 412, (2,), generator=generator).tolist()
        crops.append(images[index % 3][top : top + 100 : 4, left : left + 100 : 4])
    return torch.stack(crops).unsqueeze(1)


def crops(samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Grey crops by their kind, with the right class where there is one; familiar ones first."""
    generator = torch.Generator().manual_seed(9)
    seen, labels = labelled(samples, held_out=True)
    noise = torch.randn(seen.shape, generator=generator)
    upper = seen.clone()
    upper[:, :, 12:] = 0.5
    return {
        "held out": (seen, labels),
        "upside down": (seen.flip(2), labels),
        "in noise": ((seen + 0.3 * noise).clamp(0, 1), labels),
        "the upper half": (upper, labels),
        "textures": (textures(samples), torch.zeros(samples).long()),
        "noise alone": ((0.5 + 0.3 * noise).clamp(0, 1), torch.zeros(len(seen)).long()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of crop."""
    options = options_of(__doc__, arguments, 100, 20)
    kinds = {
        kind: Kind(
            in_order(as_inputs(pixels), torch.zeros(len(pixels)) if labels is None else labels, BATCH), labels
        )
        for kind, (pixels, labels) in crops(options.samples).items()
    }
    pixels, labels = labelled(options.samples, held_out=False)
    # of what the network returns, the corrections of the box and the logits, the second part
    study(
        options, "faces", detector(), in_order(as_inputs(pixels), labels, BATCH), kinds, classes(), output=1
    )


if __name__ == "__main__":
    main()
