"""Table 3 of Lee et al. (2020): how many numbers the posteriors of large networks keep.

python -m recipes.imagenet.sizes            by shapes, and INF by fits of ResNet-18, ResNet-50 and DenseNet-121; minutes
python -m recipes.imagenet.sizes --smoke    by shapes alone; seconds

Diagonal, KFAC and EFB follow from the layers' shapes alone. INF keeps the directions that the data select, so it is
fitted, at 224 pixels on crops of photographs and, for comparison, on noise. ImageNet weights of these networks come in
no package: they are random, with the statistics of BatchNorm taken from the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import parsed, parser, report, table
from recipes.photos import pictures

PAPER: dict[str, dict[str, int]] = {
    "resnet18": {"diag": 11_679_912, "kfac": 95_013_546, "efb": 106_693_458, "inf": 12_317_373},
    "resnet50": {"diag": 25_503_912, "kfac": 153_851_562, "efb": 179_355_474, "inf": 27_614_896},
    "resnet152": {"diag": 60_041_384, "kfac": 389_519_018, "efb": 449_560_402, "inf": 65_558_402},
    "densenet121": {"diag": 7_895_208, "kfac": 103_094_954, "efb": 110_990_162, "inf": 9_711_081},
    "densenet161": {"diag": 28_461_064, "kfac": 379_105_514, "efb": 407_566_578, "inf": 32_329_191},
}
"""INF at rank 100."""
FITTED = ("resnet18", "resnet50", "densenet121")


def counts(model: nn.Module) -> dict[str, int]:
    """The numbers of a posterior over all convolutions and linear layers, ``m`` outputs by ``n`` inputs (the bias
    among them) and as many times as there are groups: ``mn`` of the diagonal, ``m^2 + n^2`` of two bases and ``m + n``
    of their eigenvalues for KFAC, bases and diagonal for EFB.
    """
    found = {"diag": 0, "kfac": 0, "efb": 0}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            groups = getattr(module, "groups", 1)
            m, n = module.weight.shape[0] // groups, prod(module.weight.shape[1:]) + (module.bias is not None)
            found["diag"] += groups * m * n
            found["kfac"] += groups * (m * m + n * n + m + n)
            found["efb"] += groups * (m * m + n * n + m * n)
    return found


def network(name: str, device: str = "cpu") -> nn.Module:
    """A torchvision network with random weights; on the device "meta" without memory for them."""
    import torchvision

    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return torchvision.models.get_model(name, weights=None).eval()


def information(name: str, images: Tensor) -> int:
    """The numbers of INF at rank 100, fitted on these images."""
    model = network(name).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # a plain mean over the batches
    with torch.no_grad():
        for part in images.split(8):
            model(part)
    posterior = uq.fit(
        model.eval(), images.split(8), fisher="mc", rank=100, prior_precision=1.0, progress=False
    )
    return sum(block.numbers() for block in posterior.blocks.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "imagenet", "counts by shapes alone")
    command.add_argument(
        "--models", nargs="*", choices=list(PAPER), default=list(FITTED), help="to be fitted"
    )
    command.add_argument("--images", type=int, default=16, help="that INF is fitted on")
    options = parsed(command, arguments, models=[])
    rows: dict[str, dict[str, Any]] = {}
    for name, published in PAPER.items():
        for method, count in counts(network(name, "meta")).items():
            rows[f"{name}, {method}"] = {"numbers": count, "paper": published[method]}
    photos = [pictures.photo(name) for name in pictures.FIT_PHOTOS]
    for name in options.models:
        noise = torch.randn(options.images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        for what, images in (("photos", pictures.random_crops(photos, options.images, 0)), ("noise", noise)):
            count = information(name, images)
            rows[f"{name}, inf on {what}"] = {"numbers": count, "paper": PAPER[name]["inf"]}
    report(options, "sizes", table(rows, ","), rows)


if __name__ == "__main__":
    main()
