"""Test log-likelihood and RMSE on UCI sets, 20 splits as in Hernández-Lobato and Adams (2015).

A ninth of every training part (a tenth of all rows) is held out to choose prior precision and noise: for each head by
its own likelihood there, from the same joint grid. Network and posterior see the rest and are not fitted again. Figures
are in the units of the data; splits are shared, so whatever is compared is compared split by split.

    python recipes/uci/predictions.py            every set that can be found, 20 splits
    python recipes/uci/predictions.py --smoke    Boston, one split; seconds
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import markdown, parser, shown, tables, write
from data import SOURCES, Split, Table, split
from network import trained
from torch import Tensor, nn
from torch.func import functional_call, vmap

import posthoc_uq as uq
from posthoc_uq.likelihoods.gaussian import RegressionPrediction

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked

METHODS: dict[str, dict[str, Any]] = {
    "Diag": {"method": "diag"},
    "KFAC": {"method": "kfac"},
    "EFB": {"method": "efb"},
    "INF": {"method": "inf", "rank": 10**9, "correction": "rescale"},
    "INF 5%": {"method": "inf", "rank": 0.05, "correction": "rescale"},
}
HEADS = ("linearized", "sampling")
PRIORS = [10.0 ** (exponent / 2) for exponent in range(-4, 11)]
"""Grid of the prior precision times the noise's factor, which together are what the information is weighed against."""
NOISES = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Grid of the noise's factor: parts of the held-out mean squared error, which the weights share in."""


class Choice(NamedTuple):
    """A point of the grid."""

    prior_precision: float
    noise_scale: float
    edges: list[str]


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


def unscaled(
    model: nn.Sequential, posterior: Any, head: str, inputs: Tensor, draws: int
) -> Callable[[float], tuple[Tensor, Tensor]]:
    """Mean and epistemic variance as functions of the noise's factor, at a fixed product of prior precision and factor.

    The precision of the weights is ``n I / s + tau = (n I + s tau) / s``: at a fixed ``s tau`` the deviations of the
    weights from their mean go with the root of `s`, so one set of draws is enough for all noises.
    """
    if head == "linearized":
        one = predicted(model, posterior, head, inputs, draws)
        return lambda noise: (one.mean, noise * one.epistemic_variance)
    # The draws with which `predicted` predicts: those of seed 0.
    sampled = posterior.sample(draws, torch.Generator().manual_seed(0))
    centre = {name: weights.detach() for name, weights in posterior.mean.items()}

    def summary(noise: float) -> tuple[Tensor, Tensor]:
        weights = {
            name: centre[name] + noise**0.5 * (drawn - centre[name]) for name, drawn in sampled.items()
        }
        outputs = vmap(lambda own: functional_call(model, own, (inputs,)))(weights)
        return outputs.mean(0), outputs.var(0)

    return summary


def chosen(
    model: nn.Sequential, posterior: Any, head: str, held_out: Table, draws: int, priors: Sequence[float]
) -> Choice:
    """The point of the grid, the same for both heads, with the best likelihood of held-out rows under `head`."""
    targets = held_out.targets.unsqueeze(1)
    posterior.noise_scale = 1.0
    noise_variance = float(posterior.noise_variance)
    values: dict[tuple[float, float], float] = {}
    for prior in priors:
        posterior.prior_precision = prior
        with torch.no_grad():
            moments = unscaled(model, posterior, head, held_out.inputs, draws)
            for noise in NOISES:
                prediction = RegressionPrediction(*moments(noise), noise * noise_variance)
                values[prior, noise] = float(prediction.log_prob(targets).mean())
    prior, noise = max(values, key=values.__getitem__)
    ends = {"lowest prior": prior == priors[0], "highest prior": prior == priors[-1]}
    ends |= {"lowest noise": noise == NOISES[0], "highest noise": noise == NOISES[-1]}
    return Choice(prior / noise, noise, [end for end, reached in ends.items() if reached])


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
            choice = chosen(model, posterior, head, held_out, draws, priors)
            posterior.prior_precision, posterior.noise_scale = choice.prior_precision, choice.noise_scale
            prediction = predicted(model, posterior, head, part.test.inputs, draws)
            found[f"{name}, {head}"] = scores(prediction, part) | {
                "prior precision": posterior.prior_precision,
                "noise variance": float(posterior.noise_variance),
                "epistemic share": float((prediction.epistemic_variance / prediction.variance).mean()),
                "edges": choice.edges,
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


def paired(found: Sequence[Mapping[str, Any]], one: str, other: str) -> str:
    """Log-likelihood of `one` less that of `other` on the same split: mean and standard error over splits."""
    return shown([split[one]["log-likelihood"] - split[other]["log-likelihood"] for split in found])


def lines(name: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One line a method: both heads' figures, and what each gains over the network alone."""
    parts = ("RMSE", "log-likelihood")
    nothing = {f"{head} {part}": "" for head in HEADS for part in (*parts, "gain")}
    first = {f"{HEADS[0]} {part}": shown([one["network alone"][part] for one in found]) for part in parts}
    result = [{"set": name, "method": "network alone"} | nothing | first]
    for method in METHODS:
        line = {"set": name, "method": method}
        for head in HEADS:
            own = [one[f"{method}, {head}"] for one in found]
            line |= {f"{head} {part}": shown([o[part] for o in own]) for part in parts}
            line[f"{head} gain"] = paired(found, f"{method}, {head}", "network alone")
        result.append(line)
    return result


def differences(name: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One line a method: its log-likelihood less KFAC's under each head, and the sampling head's less the other's."""
    result: list[dict[str, str]] = []
    for method in METHODS:
        line = {"set": name, "method": method}
        for head in HEADS:
            own = paired(found, f"{method}, {head}", f"KFAC, {head}")
            line[f"{head} less KFAC's"] = "" if method == "KFAC" else own
        line["sampling less linearized"] = paired(found, f"{method}, sampling", f"{method}, linearized")
        result.append(line)
    return result


def edges(found: Sequence[Mapping[str, Any]], head: str) -> str:
    """How often the choice for a head lay at an end of the grid, at which, and where nothing is left of the weights."""
    reached = [one[f"{method}, {head}"]["edges"] for one in found for method in METHODS]
    counts = Counter(end for ends in reached for end in ends)
    detail = ", ".join(f"{end} {count}" for end, count in sorted(counts.items()))
    away = sum({"highest prior", "highest noise"} <= set(ends) for ends in reached)
    return (
        f"{head}: {sum(map(bool, reached))} of {len(reached)} choices at an end of the grid ({detail or 'none'}), "
        f"{away} with the highest prior and the highest noise"
    )


def main() -> None:
    """The command line."""
    arguments = parser(__doc__)
    arguments.add_argument("--draws", type=int, default=100, help="of the weights, for the sampling head")
    options = arguments.parse_args()
    splits, steps, draws = (1, 100, 20) if options.smoke else (options.splits, options.steps, options.draws)
    priors = PRIORS[::7] if options.smoke else PRIORS
    torch.set_num_threads(1)
    table_lines: list[dict[str, str]] = []
    difference_lines: list[dict[str, str]] = []
    everything: dict[str, Any] = {}
    for name, table in tables(options).items():
        begun = time.perf_counter()
        everything[name] = run(name, table, splits, steps, draws, priors)
        table_lines += lines(name, everything[name])
        difference_lines += differences(name, everything[name])
        print(f"{name}: {splits} splits in {time.perf_counter() - begun:.0f} s")
        for head in HEADS:
            print(f"  {edges(everything[name], head)}")
    for title, found in (
        ("", table_lines),
        ("Paired differences of the log-likelihood:\n\n", difference_lines),
    ):
        print(f"\n{title}{marked(markdown(found), options.smoke)}")
    print()
    write(options.output / "predictions.json", everything)


if __name__ == "__main__":
    main()
