"""How near a softmax of scaled logits is to the mean softmax of Gaussian ones: with a root of the divisor, and without.

Message passing divides the mean of a logit by ``sqrt(1 + pi v / 8)`` for its variance ``v``; its paper prints
``1 + pi v / 8``. The error is the KL divergence of the result from the mean softmax by draws: its mean over 1,000
random sets of ten logits, and the standard error of that. Means are normal with deviation 2, variances uniform.

    python benchmarks/softargmax.py            variances up to 2 and up to 8; half a minute of one core
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import pi

import torch

from posthoc_uq.trained.message_passing.messages import soften
from recipes.common import markdown

SETS, CLASSES, DEVIATION, DRAWS = 1000, 10, 2.0, 20_000


def errors(largest: float, sets: int, draws: int, seed: int = 0) -> dict[str, str]:
    """Of both divisors, with variances uniform on 0 to `largest`."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"with the root": [], "as printed": []}
    for _ in range(sets):
        mean = DEVIATION * torch.randn(CLASSES, generator=generator, dtype=torch.float64)
        variance = largest * torch.rand(CLASSES, generator=generator, dtype=torch.float64)
        normals = torch.randn(draws, CLASSES, generator=generator, dtype=torch.float64)
        truth = (mean + variance.sqrt() * normals).softmax(-1).mean(0)
        for name, scaled in (
            ("with the root", soften(mean, variance)),
            ("as printed", mean / (1 + pi / 8 * variance)),
        ):
            found[name].append(float((truth * (truth.log() - scaled.log_softmax(-1))).sum()))
    rows = {name: torch.tensor(values) for name, values in found.items()}
    return {
        name: f"{float(row.mean()):.4f} ± {float(row.std()) / sets**0.5:.4f}" for name, row in rows.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=SETS)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each set")
    options = parser.parse_args(arguments)
    rows = [
        {"variances up to": f"{largest:g}"} | errors(largest, options.sets, options.draws)
        for largest in (2.0, 8.0)
    ]
    print(markdown(rows))


if __name__ == "__main__":
    main()
