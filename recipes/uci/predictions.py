"""Test log-likelihood and RMSE on UCI sets, 20 splits as in Hernández-Lobato and Adams (2015).

A ninth of every training part (a tenth of all rows) is held out to choose prior precision and noise, for each head by
its own likelihood there; network and posterior see the rest and are not fitted again. Figures are in the units of the
data.

    python recipes/uci/predictions.py            every set that can be found, 20 splits
    python recipes/uci/predictions.py --smoke    Boston, one split; seconds
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common import markdown, parser, shown, tables, write
from data import SOURCES, Split, Table, split
from network import trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads.regression import RegressionPrediction

METHODS: dict[str, dict[str, Any]] = {
    "Diag": {"method": "diag"},
    "KFAC": {"method": "kfac"},
    "EFB": {"method": "efb"},
    "INF": {"method": "inf", "rank": 10**9},
    "INF 5%": {"method": "inf", "rank": 0.05},
}
HEADS = ("linearized", "sampling")
PRIORS = [10.0 ** (exponent / 2) for exponent in range(-4, 11)]
NOISES = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Grid for the linearised head; noises are parts of the held-out mean squared error, which the weights share in."""


def fitted(model: nn.Sequential, train: Table, noise: float, options: Mapping[str, Any]) -> Any:
    """The posterior on the training rows, exact Fisher; its prior precision is still to be chosen."""
    batches = list(zip(train.inputs.split(2000), train.targets.unsqueeze(1).split(2000), strict=True))
    return uq.fit(
        model,
        batches,
        likelihood="regression",
        noise_variance=noise,
        fisher="exact",
        prior_precision=1.0,
        progress=False,
        **options,
    )


def predicted(
    model: nn.Sequential, posterior: Any, head: str, inputs: Tensor, draws: int
) -> RegressionPrediction:
    """Of one head; `draws` is for the sampling one."""
    options = {"n_samples": draws} if head == "sampling" else {}
    with torch.no_grad():
        return uq.wrap(model, posterior, head=head, **options)(inputs)


def tune_linearized(model: nn.Sequential, posterior: Any, held_out: Table, priors: Sequence[float]) -> None:
    """Prior precision and noise with the best likelihood of held-out rows under the linearised head, from a grid."""
    predictor = uq.wrap(model, posterior, head="linearized")
    targets = held_out.targets.unsqueeze(1)

    def value(setting: tuple[float, float]) -> float:
        posterior.prior_precision, posterior.noise_scale = setting
        with torch.no_grad():
            return float(predictor(held_out.inputs).log_prob(targets).mean())

    best = max(((prior, noise) for prior in priors for noise in NOISES), key=value)
    posterior.prior_precision, posterior.noise_scale = best


def scores(prediction: RegressionPrediction, part: Split) -> dict[str, float]:
    """RMSE and mean log density of the test rows, in the units of the data."""
    targets = part.test.targets.unsqueeze(1)
    error = float((prediction.mean - targets).square().mean().sqrt())
    density = float(prediction.log_prob(targets).mean())
    return {"RMSE": error * part.scale, "log-likelihood": density - math.log(part.scale)}


def measure(
    model: nn.Sequential, fit: Table, held_out: Table, part: Split, draws: int, priors: Sequence[float]
) -> dict[str, Any]:
    """Scores of the network alone and of every method under both heads, for one split."""
    with torch.no_grad():
        # Residuals of rows that were trained on are too small: the held-out ones are the noise.
        noise = float((model(held_out.inputs).squeeze(1) - held_out.targets).square().mean())
        mean = model(part.test.inputs)
    alone = RegressionPrediction(mean, torch.zeros_like(mean), noise)
    found: dict[str, Any] = {"network alone": scores(alone, part)}
    for name, options in METHODS.items():
        posterior = fitted(model, fit, noise, options)
        for head in HEADS:
            posterior.prior_precision, posterior.noise_scale, edges = 1.0, 1.0, []
            if head == "linearized":
                tune_linearized(model, posterior, held_out, priors)
            else:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    trials = uq.tune(
                        posterior,
                        [(held_out.inputs, held_out.targets.unsqueeze(1))],
                        parameters=("prior_precision", "noise"),
                        progress=False,
                    )
                edges = trials.at_edge + [str(w.message) for w in caught]
            prediction = predicted(model, posterior, head, part.test.inputs, draws)
            found[f"{name}, {head}"] = scores(prediction, part) | {
                "prior precision": posterior.prior_precision,
                "noise variance": float(posterior.noise_variance),
                "epistemic share": float((prediction.epistemic_variance / prediction.variance).mean()),
                "warnings": edges,
            }
    return found


def run(
    name: str, table: Table, splits: int, steps: int, draws: int, priors: Sequence[float]
) -> list[dict[str, Any]]:
    """`measure` on every split of one set."""
    parts = [split(table, seed) for seed in range(splits)]
    held = len(parts[0].train.targets) // 9
    fits = [Table(part.train.inputs[held:], part.train.targets[held:]) for part in parts]
    others = [Table(part.train.inputs[:held], part.train.targets[:held]) for part in parts]
    found: list[dict[str, Any]] = []
    group = max(1, 4_000_000 // len(fits[0].targets) // SOURCES[name].hidden)
    for start in range(0, splits, group):
        chunk = slice(start, start + group)
        models = trained(
            torch.stack([fit.inputs for fit in fits[chunk]]),
            torch.stack([fit.targets for fit in fits[chunk]]),
            SOURCES[name].hidden,
            seed=start,
            steps=steps,
        )
        for model, fit, other, part in zip(models, fits[chunk], others[chunk], parts[chunk], strict=True):
            found.append(measure(model, fit, other, part, draws, priors))
    return found


def lines(name: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One line a method, with both heads' figures."""
    alone = [one["network alone"] for one in found]
    nothing = {f"{head} {part}": "" for head in HEADS for part in ("RMSE", "log-likelihood")}
    first = {f"linearized {part}": shown([one[part] for one in alone]) for part in ("RMSE", "log-likelihood")}
    result = [{"set": name, "method": "network alone"} | nothing | first]
    for method in METHODS:
        line = {"set": name, "method": method}
        for head in HEADS:
            own = [one[f"{method}, {head}"] for one in found]
            line |= {f"{head} {part}": shown([o[part] for o in own]) for part in ("RMSE", "log-likelihood")}
        result.append(line)
    return result


def main() -> None:
    """The command line."""
    arguments = parser(__doc__)
    arguments.add_argument("--draws", type=int, default=100, help="of the weights, for the sampling head")
    options = arguments.parse_args()
    splits, steps, draws = (1, 100, 20) if options.smoke else (options.splits, options.steps, options.draws)
    priors = PRIORS[::7] if options.smoke else PRIORS
    torch.set_num_threads(1)
    table_lines: list[dict[str, str]] = []
    everything: dict[str, Any] = {}
    for name, table in tables(options).items():
        begun = time.perf_counter()
        everything[name] = run(name, table, splits, steps, draws, priors)
        table_lines += lines(name, everything[name])
        tuned = [one[f"{m}, sampling"]["warnings"] for one in everything[name] for m in METHODS]
        print(
            f"{name}: {splits} splits in {time.perf_counter() - begun:.0f} s; {sum(map(bool, tuned))} of {len(tuned)} "
            f"searches for the sampling head ended with a warning"
        )
    print(f"\n{markdown(table_lines)}\n")
    write(options.output / "predictions.json", everything)


if __name__ == "__main__":
    main()
