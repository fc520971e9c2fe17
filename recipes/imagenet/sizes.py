"""Table 3 of Lee et al. (2020): how many numbers the posteriors of large networks keep.

python -m recipes.imagenet.sizes            by shapes, and INF by fits of all five networks; ten minutes of a core
python -m recipes.imagenet.sizes --smoke    by shapes alone; seconds

Diagonal, KFAC and EFB follow from the layers' shapes alone. INF keeps the directions that the data select, so it is
fitted, at 224 pixels on crops of photographs and, for comparison, on noise. ImageNet weights of these networks come in
no package: they are random, with the statistics of BatchNorm taken from the images. What that does to the directions is
shown by EfficientNet-Lite0, with its trained weights and with random ones. A second table has the directions by kind of
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.posteriors import InformationBlock
from recipes.common import parsed, parser, report, table
from recipes.photos import pictures
from recipes.photos.efficientnet import efficientnet_lite0

PAPER: dict[str, dict[str, int]] = {
    "resnet18": {"diag": 11_679_912, "kfac": 95_013_546, "efb": 106_693_458, "inf": 12_317_373},
    "resnet50": {"diag": 25_503_912, "kfac": 153_851_562, "efb": 179_355_474, "inf": 27_614_896},
    "resnet152": {"diag": 60_041_384, "kfac": 389_519_018, "efb": 449_560_402, "inf": 65_558_402},
    "densenet121": {"diag": 7_895_208, "kfac": 103_094_954, "efb": 110_990_162, "inf": 9_711_081},
    "densenet161": {"diag": 28_461_064, "kfac": 379_105_514, "efb": 407_566_578, "inf": 32_329_191},
}
"""INF at rank 100."""
TRAINED = "efficientnet_lite0"


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
    """EfficientNet-Lite0 or a torchvision network with random weights; on "meta" without memory for them."""
    import torchvision

    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        if name == TRAINED:
            import timm

            return timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
        return torchvision.models.get_model(name, weights=None).eval()


def information(model: nn.Module, images: Tensor) -> uq.Posterior:
    """INF at rank 100 around a network with random weights, fitted on these images."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # a plain mean over the batches
    with torch.no_grad():
        for part in images.split(8):
            model(part)
    return fitted(model.eval(), images)


def fitted(model: nn.Module, images: Tensor) -> uq.Posterior:
    """INF at rank 100."""
    return uq.fit(model, images.split(8), "inf", fisher="mc", rank=100, prior_precision=1.0, progress=False)


def kind_of(module: nn.Module) -> str:
    """The kind of a layer as the second table has it."""
    if not isinstance(module, nn.Conv2d):
        return "linear"
    if module.groups > 1:
        return "depthwise"
    if module.kernel_size != (1, 1):
        return "larger convolutions"
    return "1 x 1, more outputs" if module.out_channels > module.in_channels else "1 x 1, others"


def directions(model: nn.Module, posterior: uq.Posterior) -> dict[str, dict[str, float]]:
    """By kind of layer how many there are, their numbers without the diagonal, and the medians of the directions of the
    inputs and of the outputs that are kept.
    """
    blocks: dict[str, list[InformationBlock]] = {}
    for name, block in posterior.blocks.items():
        assert isinstance(block, InformationBlock)
        blocks.setdefault(kind_of(model.get_submodule(name)), []).append(block)
    return {
        kind: {
            "layers": len(own),
            "numbers without the diagonal": sum(b.numbers() - b.diagonal.numel() for b in own),
            "directions of inputs, median": median(b.input_basis.shape[-1] for b in own),
            "directions of outputs, median": median(b.output_basis.shape[-1] for b in own),
        }
        for kind, own in sorted(blocks.items())
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "imagenet", "counts by shapes alone")
    command.add_argument("--models", nargs="*", choices=list(PAPER), default=list(PAPER), help="to be fitted")
    command.add_argument("--images", type=int, default=16, help="that INF is fitted on")
    options = parsed(command, arguments, models=[])
    rows: dict[str, dict[str, Any]] = {}
    layers: dict[str, dict[str, Any]] = {}

    def add(what: str, model: nn.Module, posterior: uq.Posterior, published: int | None) -> None:
        rows[what] = {
            "numbers": sum(block.numbers() for block in posterior.blocks.values()),
            "paper": published,
        }
        layers.update({f"{what}: {kind}": row for kind, row in directions(model, posterior).items()})
        print(what, rows[what], flush=True)

    for name, published in PAPER.items():
        for method, count in counts(network(name, "meta")).items():
            rows[f"{name}, {method}"] = {"numbers": count, "paper": published[method]}
    photos = [pictures.photo(name) for name in pictures.FIT_PHOTOS]
    crops = pictures.random_crops(photos, options.images, 0)
    # before the long fits, so that a missing package is known at once
    with_weights = efficientnet_lite0() if options.models else None
    noise = torch.randn(options.images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for name in options.models:
        for what, images in (("photos", crops), ("noise", noise)):
            model = network(name)
            add(f"{name}, inf on {what}", model, information(model, images), PAPER[name]["inf"])
    if with_weights is not None:
        model = network(TRAINED)
        add(f"{TRAINED}, random weights", model, information(model, crops), None)
        add(f"{TRAINED}, trained", with_weights, fitted(with_weights, crops), None)
    page = "\n\n".join(table(part, ",") for part in (rows, layers) if part)
    report(options, "sizes", page, {"sizes": rows, "layers": layers})


if __name__ == "__main__":
    main()
