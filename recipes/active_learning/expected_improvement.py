"""Expected improvement: the lowest value of an expensive function by few evaluations, with a small network in between.

After every evaluation a network is trained on all points, a fit makes it uncertain, and the next point is the one that
is expected to fall most below the best so far: low, or unknown.

    python -m recipes.active_learning.expected_improvement            fifteen evaluations, under a minute
    python -m recipes.active_learning.expected_improvement --smoke    two
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Normal

import posthoc_uq as uq
from recipes.active_learning.parts import forrester, save_picture, search_picture, trained_regressor
from recipes.common import parsed, parser

START = 4  # evaluations at first


def expected_improvement(prediction: uq.RegressionPrediction, best: float) -> Tensor:
    """``E max(0, best - f(x))`` of every candidate, (candidates,): ``(best - m) Phi(z) + s phi(z)``,
    ``z = (best - m) / s``, with the deviation s of the function and not of its noise.
    """
    mean, deviation = prediction.mean[:, 0], prediction.epistemic_variance[:, 0].clamp(min=1e-12).sqrt()
    normal = Normal(torch.zeros_like(mean), 1.0)
    z = (best - mean) / deviation
    return (best - mean) * normal.cdf(z) + deviation * normal.log_prob(z).exp()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parsed(parser(__doc__, "expected_improvement", "two evaluations"), arguments)
    x = torch.linspace(0, 1, 500).unsqueeze(1)
    values, known, pictures = forrester(x), [20, 150, 250, 480], list[Figure]()
    for _ in range(2 if options.smoke else 15):
        y = (values[known] - values[known].mean()) / values[known].std()
        model = trained_regressor(4 * x[known] - 2, y)
        posterior = uq.fit(model, [(4 * x[known] - 2, y)], likelihood="regression", progress=False)
        prediction: Any = uq.wrap(model, posterior).predict([4 * x - 2], progress=False)
        gain = expected_improvement(prediction, best=float(y.min()))
        gain[known] = 0
        chosen = int(gain.argmax())
        print(f"evaluate at {float(x[chosen]):.3f}: {float(values[chosen]):.3f}")
        pictures.append(search_picture(x, values, known, prediction, gain))
        known.append(chosen)
    print(f"lowest: {float(values[known].min()):.3f} (of all {float(values.min()):.3f})")
    save_picture(pictures[-1], options)


if __name__ == "__main__":
    main()
