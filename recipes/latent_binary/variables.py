"""Which inputs does a logistic regression need? Twenty correlated ones, of which nine matter.

    python -m recipes.latent_binary.variables --covariates sim3-X.txt --responses sim3-Y.txt    # as in the README
    python -m recipes.latent_binary.variables
    python -m recipes.latent_binary.variables --smoke

The study of the latent binary paper, after the third example of Hubin and Storvik (2018), appendix B, beside the exact
posterior of the same model. The covariates are a public file; without it they are drawn anew from a summary of that
file, see `simulated`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import existing, in_random_order, looked_at, parsed, parser, report, table
from recipes.latent_binary.ascent import ascended
from recipes.latent_binary.exact import inclusions

BETA = np.array([-4, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1.2, 0, 37.1, 0, 0, 50, -0.00005, 10, 3, 0])
"""The coefficients as the paper prints them."""
INTERCEPT, REVERSED = 99.0, 12
"""What the stored responses agree with: an intercept that the paper does not print, and the other sign of the 13th."""
BATCH, LRT_RUNS = 400, 100
INCLUSION = 0.25
"""Prior probability of every input to be on; slabs and bias are N(0, 1)."""
PAPER = {
    f"{name}, the paper's": {"true positive rate": true, "false positive rate": false}
    for name, true, false in (
        ("LRT", 0.838, 0.084),
        ("flow", 0.972, 0.074),
        ("coordinate ascent", 0.681, 0.125),
    )
}
FACTORS = np.array([[129, 107, 5], [106, 550, 249], [7, 199, 648]])
"""How often the levels of the two factors meet."""
FIRST = np.array([[1.72, -0.08, 3.52], [-0.08, 1.00, 1.12], [3.52, 1.12, 9.95]])
SECOND = np.array(
    [
        [0.209, -0.001, -0.112, 0.048],
        [-0.001, 0.166, -0.036, -0.231],
        [-0.112, -0.036, 0.101, 0.048],
        [0.048, -0.231, 0.048, 0.359],
    ]
)


class Study(NamedTuple):
    """Standardised covariates (samples, 20) and responses (samples, 1)."""

    x: Tensor
    y: Tensor


def simulated(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Covariates (2000, 20) with the structure of the public file: two factors, skewed and Gaussian columns with the
    file's moments, and the exact products and functions among them.
    """
    pairs = generator.permutation(np.repeat(np.arange(9), FACTORS.flatten()))
    one, two = pairs // 3, pairs % 3
    x = np.zeros((len(pairs), 20))
    x[np.arange(len(x)), one] = x[np.arange(len(x)), 3 + two] = 1
    x[:, 6], x[:, 7] = generator.gamma(0.41, 13.5, len(x)), generator.gamma(0.61, 7.5, len(x))
    x[:, 8:11] = _gaussian(generator, np.array([-4.49, -4.52, -4.48]), FIRST, len(x))
    x[:, 11:15] = _gaussian(generator, np.zeros(4), SECOND, len(x))
    time = np.arange(1, len(x) + 1)
    x[:, 15], x[:, 16] = np.sin(3.14 * time / 360), time**2
    factor = np.array([1, -4, 2])[one]
    x[:, 17], x[:, 18], x[:, 19] = x[:, 1] * x[:, 9], x[:, 14] * factor, x[:, 10] * factor
    return x


def _gaussian(
    generator: np.random.Generator, mean: np.ndarray[Any, Any], covariance: np.ndarray[Any, Any], count: int
) -> np.ndarray[Any, Any]:
    values, vectors = np.linalg.eigh(covariance)  # rounded to three digits, it may have a negative eigenvalue
    root = vectors * np.sqrt(np.clip(values, 0, None))
    return mean + generator.standard_normal((count, len(mean))) @ root.T


def study(
    covariates: np.ndarray[Any, Any],
    responses: np.ndarray[Any, Any] | None,
    kind: str,
    mixed: bool,
    generator: np.random.Generator,
) -> Study:
    """Covariates and responses as the posteriors see them.

    Args:
        covariates: (samples, 20).
        responses: stored ones; None to draw them.
        kind: of drawn ones: ``"corrected"``, by what the stored ones agree with, or ``"printed"``, from standardised
            covariates by the coefficients as printed.
        mixed: whether columns 2 and 5 become ``(x10 + x14) x9`` and ``(x11 + x15) x12``, as in the study's scripts.
        generator: of the responses.
    """
    x = covariates.copy()
    if kind == "printed":
        eta = _standardised(_mixed(x) if mixed else x) @ BETA
    else:
        eta = INTERCEPT + x @ np.where(np.arange(20) == REVERSED, -BETA, BETA)
    if responses is None:
        eta = eta + 0.5**0.5 * generator.standard_normal(len(x))
        responses = generator.random(len(x)) < 1 / (1 + np.exp(-np.clip(eta, -700, 700)))
    x = _standardised(_mixed(x) if mixed else x)
    return Study(torch.tensor(x).float(), torch.tensor(responses).float().reshape(-1, 1))


def _mixed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    mixed = x.copy()
    mixed[:, 1], mixed[:, 4] = (x[:, 9] + x[:, 13]) * x[:, 8], (x[:, 10] + x[:, 14]) * x[:, 11]
    return mixed


def _standardised(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (x - x.mean(0)) / x.std(0)


def read(path: Path, columns: int) -> np.ndarray[Any, Any]:
    """Rows of so many numbers with commas or blanks between them, ``(rows, columns)``.

    Raises:
        ValueError: the file has others.
    """
    try:
        lines = [line.replace(",", " ") for line in path.read_text().splitlines()]
        numbers = np.loadtxt(lines, ndmin=2)
    except ValueError as error:
        raise ValueError(f"'{path}' is no table of numbers: {error}.") from None
    if numbers.shape[1] != columns or not np.isfinite(numbers).all():
        raise ValueError(f"'{path}' must have {columns} finite numbers a row, and has {numbers.shape[1]}.")
    return numbers


def responses_of(path: Path, rows: int) -> np.ndarray[Any, Any]:
    """So many stored responses, each 0 or 1.

    Raises:
        ValueError: the file has others.
    """
    found = read(path, 1)[:, 0]
    if len(found) != rows or not np.isin(found, (0, 1)).all():
        raise ValueError(f"'{path}' must have 0 or 1 for each of {rows} rows of covariates.")
    return found


class Batches:
    """400 rows each, in another order every time; the responses once for every run."""

    def __init__(self, data: Study, runs: int, seed: int) -> None:
        self._data = data.x, data.y.expand(-1, runs)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self._data[0]) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return in_random_order(*self._data, BATCH, self._generator)


def fitted(data: Study, flow: bool, runs: int, seed: int, epochs: int) -> Tensor:
    """The probability of every input to be on, (runs, 20), by posteriors from random weights.

    Several runs are the outputs of one layer: their losses add up, and without a flow they have nothing in common but
    the order of the batches. With one they would have `z` in common.
    """
    method = uq.LatentBinary(
        start="random",
        flow=flow,
        epochs=epochs,
        prior_inclusion=INCLUSION,
        lr=0.01,
        log_variance_lr=0.02,
        inclusion_lr=0.05,
        flow_lr=0.003,
        kl_weight=1.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        posterior = uq.fit(
            nn.Linear(20, runs),
            Batches(data, runs, seed),
            method,
            likelihood="multilabel",
            prior_precision=1.0,
            seed=seed,
            progress=False,
        )
    return uq.sparse.summary(posterior).first.weights.double()


def rates(chances: Tensor) -> tuple[float, float]:
    """The shares of the inputs that matter, and of the others, that are more likely on than off."""
    matters, chosen = torch.tensor(BETA != 0), (chances > 0.5).double()
    return float(chosen[matters].mean()), float(chosen[~matters].mean())


def summarised(chances: Tensor, truth: Tensor | None) -> dict[str, float]:
    """Means over some runs.

    Args:
        chances: of every run, (runs, 20).
        truth: exact ones, (20,).
    """
    true, false = np.mean([rates(one) for one in chances], 0)
    found = {"true positive rate": float(true), "false positive rate": float(false)}
    return found if truth is None else found | {"distance": float((chances - truth).abs().mean())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Every run, then the table."""
    command = parser(__doc__, "latent_binary", "two runs of the flow, five epochs, twenty sweeps")
    add = command.add_argument
    add(
        "--covariates",
        type=existing,
        help="the public file, 2000 rows of 20 columns; by default they are drawn",
    )
    add("--responses", type=existing, help="its responses; otherwise they are drawn")
    add("--response", choices=("corrected", "printed"), default="corrected")
    add("--unmixed", action="store_true", help="leave columns 2 and 5 as they are")
    add("--seed", type=int, default=0, help="of what is drawn")
    add(
        "--runs",
        type=int,
        default=20,
        help="of the flow, from other initial weights; LRT has 100, in one fit",
    )
    add("--epochs", type=int, default=500)
    add("--sweeps", type=int, default=4000, help="of the Gibbs sampler's eight chains")
    command.set_defaults(ascents=100)
    options = parsed(command, arguments, runs=2, epochs=5, sweeps=20, ascents=2)
    generator = np.random.default_rng(options.seed)
    with looked_at():
        covariates = simulated(generator) if options.covariates is None else read(options.covariates, 20)
        responses = None if options.responses is None else responses_of(options.responses, len(covariates))
    data = study(covariates, responses, options.response, not options.unmixed, generator)
    rows: dict[str, dict[str, float]] = {}
    chances: dict[str, Any] = {}
    truth = None
    if find_spec("polyagamma") is None:
        print("There is no exact row: it needs the package polyagamma (pip install polyagamma).")
    else:
        exact = inclusions(data.x.double().numpy(), data.y.flatten().numpy(), INCLUSION, options.sweeps)
        truth = torch.from_numpy(exact.mean)
        rows["exact"] = summarised(truth.unsqueeze(0), None)
        chances["exact"], chances["standard errors"] = exact.mean.tolist(), exact.error.tolist()
        print(f"exact: {exact.mean.round(3)}, standard errors up to {exact.error.max():.3f}", flush=True)
    for name in ("coordinate ascent", "LRT", "flow"):
        if name == "coordinate ascent":
            x, y = data.x.double().numpy(), data.y.flatten().double().numpy()
            runs = torch.from_numpy(ascended(x, y, INCLUSION, options.ascents).chance)
        elif name == "LRT":
            runs = fitted(data, False, LRT_RUNS, 0, options.epochs)
        else:
            runs = torch.cat([fitted(data, True, 1, seed, options.epochs) for seed in range(options.runs)])
        rows[name] = summarised(runs, truth)
        rows[f"{name}, mean of the runs' probabilities"] = summarised(runs.mean(0, keepdim=True), truth)
        chances[name] = runs.tolist()
        print(f"{name}: {rows[name]}", flush=True)
    about = {"responses": options.response if responses is None else "stored", "epochs": options.epochs}
    content = {"about": about, "results": rows, "probabilities": chances}
    report(options, "variables", table(rows | PAPER, corner="method"), content)


if __name__ == "__main__":
    main()
