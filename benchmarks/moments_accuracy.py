"""Accuracy of the moments head: its means and standard deviations against Monte Carlo over the weights.

    OMP_NUM_THREADS=1 python benchmarks/moments_accuracy.py
    OMP_NUM_THREADS=1 python benchmarks/moments_accuracy.py --rel 0.02 0.1 0.3 --json accuracy.json

The posterior is diagonal; the standard deviations of a layer's weights are `rel` times those of its trained weights.
"MLP" is 20-128-...-10 with 1, 2 or 4 hidden layers, trained on labels of a random teacher. "CNN" has 5 convolutions,
global average pooling and a linear layer, with or without skip connections, trained on scikit-learn's digits; "all"
of its layers are noisy, or the "body" alone. Over inputs that nothing was fitted on, in units of Monte Carlo's own
standard deviations: "corr." of standard deviations, their median "ratio" and mean relative "error", and the error of
the means beside that of a plain forward pass, which is no news about the weights. A calibrated head was calibrated on
other inputs, with a factor alone or with a power ("slope"). Monte Carlo's error is 1 / sqrt(2 draws): 0.022 with 1,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import Row, machine, single_threaded, table, write_json
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.sampling import SamplingPredictor

ACTIVATIONS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "GELU": nn.GELU, "tanh": nn.Tanh}
DRAWS = 1000
CALIBRATION_DRAWS = 64


class Case(NamedTuple):
    """A trained network, with inputs to calibrate on and others to judge by."""

    model: nn.Module
    held_in: Tensor
    inputs: Tensor


class MonteCarlo(NamedTuple):
    """Mean and standard deviation of every output over draws of the weights."""

    mean: Tensor
    sd: Tensor


class Digits(nn.Module):
    """Five convolutions, global average pooling and a linear layer; with `skips` the last four add to their input."""

    def __init__(self, width: int, skips: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(1 if i == 0 else width, width, 3, padding=1) for i in range(5)]
        )
        self.skips = skips
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, convolution in enumerate(self.convolutions):
            y = torch.relu(convolution(x))
            x = x + y if self.skips and index > 0 else y
        return self.head(x.mean((2, 3)))


def train(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """A network after one step of Adam for every batch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def trained_mlp(hidden: int, activation: str, steps: int, samples: int) -> Case:
    """An MLP that imitates a random teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [20, *[128] * hidden, 10]
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            parts += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
        model = nn.Sequential(*parts[:-1])
        teacher = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10))
        drawn = [torch.randn(256, 20) for _ in range(steps)]
        train(model, [(x, teacher(x).argmax(1).detach()) for x in drawn])
        return Case(model, torch.randn(samples, 20), torch.randn(samples, 20))


def trained_cnn(skips: bool, width: int, steps: int, samples: int) -> Case:
    """A CNN that reads 8 x 8 digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(len(images))
        images, labels = images[order], labels[order]
        seen = len(images) - 2 * samples
        model = Digits(width, skips)
        chosen = [torch.randint(0, seen, (64,)) for _ in range(steps)]
        train(model, [(images[index], labels[index]) for index in chosen])
    return Case(model, images[seen : seen + samples], images[seen + samples :])


def relative(case: Case, rel: float, layers: str | list[str] = "all") -> uq.Posterior:
    """A diagonal posterior whose standard deviations are `rel` times those of each layer's weights."""
    posterior = uq.fit(
        case.model,
        [case.held_in[:2]],
        method="diag",
        layers=layers,
        fisher="mc",
        prior_precision=1.0,
        progress=False,
    )
    posterior.scale = 1e-12  # the prior alone is left
    parameters = dict(case.model.named_parameters())
    posterior.prior_precision = {
        name: float((rel * parameters[layer.weight].detach().std()) ** -2)
        for name, layer in posterior.layers.items()
    }
    return posterior


def monte_carlo(case: Case, posterior: uq.Posterior, draws: int) -> MonteCarlo:
    """The reference."""
    with torch.no_grad():
        outputs = SamplingPredictor(case.model, posterior, draws, seed=1).outputs(case.inputs)
    return MonteCarlo(outputs.mean(0), outputs.std(0))


def compare(case: Case, predictor: MomentsPredictor, reference: MonteCarlo) -> dict[str, float]:
    """How well a head agrees with Monte Carlo."""
    with torch.no_grad():
        mean, variance = predictor.functional_mean(case.inputs), predictor.functional_variance(case.inputs)
        plain = case.model(case.inputs)
    sd = variance.sqrt()

    def mean_error(found: Tensor) -> float:
        return float(((found - reference.mean).abs() / reference.sd).mean())

    return {
        "corr.": float(torch.corrcoef(torch.stack([sd.flatten(), reference.sd.flatten()]))[0, 1]),
        "ratio": float((sd / reference.sd).median()),
        "error": float((sd / reference.sd - 1).abs().mean()),
        "mean's error": mean_error(mean),
        "plain pass's": mean_error(plain),
    }


def mlp_rows(
    hidden: Sequence[int],
    activations: Sequence[str],
    rels: Sequence[float],
    draws: int,
    steps: int = 600,
    samples: int = 128,
) -> list[Row]:
    """Both forms of the head on MLPs."""
    rows: list[Row] = []
    for layers in hidden:
        for activation in activations:
            case = trained_mlp(layers, activation, steps, samples)
            for rel in rels:
                posterior = relative(case, rel)
                reference = monte_carlo(case, posterior, draws)
                label = {"net": f"MLP, {layers} hidden, {activation}", "noisy": "all", "rel": rel}
                for cov in ("diag", "full"):
                    predictor = MomentsPredictor(case.model, posterior, cov=cov)
                    rows.append(label | {"head": cov} | compare(case, predictor, reference))
                    _say(rows[-1])
    return rows


def cnn_rows(
    rels: Sequence[float], draws: int, width: int = 32, steps: int = 600, samples: int = 128
) -> list[Row]:
    """The head without covariances on CNNs, as it is and calibrated."""
    rows: list[Row] = []
    for skips in (False, True):
        case = trained_cnn(skips, width, steps, samples)
        for noisy in ("all", "body"):
            layers = "all" if noisy == "all" else [f"convolutions.{index}" for index in range(5)]
            for rel in rels:
                posterior = relative(case, rel, layers)
                reference = monte_carlo(case, posterior, draws)
                label = {"net": f"CNN, {'skips' if skips else 'no skips'}", "noisy": noisy, "rel": rel}
                for rho in (0.0, 1.0):
                    for calibrated in ("", ", calibrated", ", calibrated with slope"):
                        predictor = MomentsPredictor(case.model, posterior, pool_rho=rho)
                        if calibrated:
                            predictor.calibrate(
                                [case.held_in], CALIBRATION_DRAWS, slope="slope" in calibrated, progress=False
                            )
                        head = {"head": f"diag, rho {rho:g}{calibrated}"}
                        rows.append(label | head | compare(case, predictor, reference))
                        posterior.history.calibration = {}
                        _say(rows[-1])
    return rows


def _say(row: Row) -> None:
    print(", ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)


def smoke() -> list[Row]:
    """One small network of each kind; seconds."""
    rows = mlp_rows([2], ["ReLU"], [0.1], draws=200, steps=50, samples=32)
    return rows + cnn_rows([0.1], draws=50, width=8, steps=30, samples=32)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", choices=["mlp", "cnn"], default=["mlp", "cnn"])
    parser.add_argument("--hidden", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--activations", nargs="+", choices=list(ACTIVATIONS), default=list(ACTIVATIONS))
    parser.add_argument("--rel", nargs="+", type=float, default=[0.1], help="sd of weights over their spread")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of Monte Carlo")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="two small networks, for the tests")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    with single_threaded():
        if given.smoke:
            rows = smoke()
        else:
            if "mlp" in given.nets:
                rows += mlp_rows(given.hidden, given.activations, given.rel, given.draws)
            if "cnn" in given.nets:
                rows += cnn_rows(given.rel, given.draws)
        about = machine()
    print(table(rows))
    print(about)
    if given.json:
        result: dict[str, Any] = {"machine": about, "draws": given.draws, "rows": rows}
        write_json(given.json, result)


if __name__ == "__main__":
    main()
