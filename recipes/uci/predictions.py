"""Test log-likelihood and RMSE on UCI sets, 20 splits as in Hernández-Lobato and Adams (2015).

A ninth of every training part (a tenth of all rows) is held out to choose prior precision and noise: for each head by
its own likelihood there, from the same joint grid. Network and posterior see the rest and are not fitted again. Figures
are in the units of the data; splits are shared, so whatever is compared is compared split by split.

    python -m recipes.uci.predictions            every set that can be found, 20 splits
    python -m recipes.uci.predictions --smoke    Boston, one split; seconds
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import posthoc_uq as uq
from posthoc_uq import RegressionPrediction
from recipes.common import in_order, markdown, parsed, parser, report, spread
from recipes.uci.data import SOURCES, Split, Table, add_options, split, tables
from recipes.uci.network import trained_on_each

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
    batches = in_order(train.inputs, train.targets.unsqueeze(1), 2000)
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
    noise_variance = float(posterior.noise_variance)
    values: dict[tuple[float, float], float] = {}
    for prior in priors:
        tried = posterior.with_settings(prior_precision=prior)
        with torch.no_grad():
            moments = unscaled(model, tried, head, held_out.inputs, draws)
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
        as_fitted = fitted(model, fit, noise, options)
        for head in HEADS:
            choice = chosen(model, as_fitted, head, held_out, draws, priors)
            posterior = as_fitted.with_settings(
                prior_precision=choice.prior_precision, noise_scale=choice.noise_scale
            )
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
    models = trained_on_each(fits, SOURCES[name].hidden, steps=steps)
    return [measure(*one, draws, priors) for one in zip(models, fits, others, parts, strict=True)]


def paired(found: Sequence[Mapping[str, Any]], one: str, other: str) -> str:
    """Log-likelihood of `one` less that of `other` on the same split: mean and standard error over splits."""
    differences = [split[one]["log-likelihood"] - split[other]["log-likelihood"] for split in found]
    return spread(differences, error=True)


def lines(name: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One line a method: both heads' figures, and what each gains over the network alone."""
    parts = ("RMSE", "log-likelihood")
    nothing = {f"{head} {part}": "" for head in HEADS for part in (*parts, "gain")}
    first = {
        f"{HEADS[0]} {part}": spread([one["network alone"][part] for one in found], error=True)
        for part in parts
    }
    result = [{"set": name, "method": "network alone"} | nothing | first]
    for method in METHODS:
        line = {"set": name, "method": method}
        for head in HEADS:
            own = [one[f"{method}, {head}"] for one in found]
            line |= {f"{head} {part}": spread([o[part] for o in own], error=True) for part in parts}
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "uci", "Boston, one split, few steps: seconds")
    add_options(command)
    command.add_argument("--draws", type=int, default=100, help="of the weights, for the sampling head")
    options = parsed(command, arguments, sets=["boston"], splits=1, steps=100, draws=20)
    priors = PRIORS[::7] if options.smoke else PRIORS
    torch.set_num_threads(1)
    scored: list[dict[str, str]] = []
    compared: list[dict[str, str]] = []
    everything: dict[str, Any] = {}
    for name, table in tables(options).items():
        begun = time.perf_counter()
        found = run(name, table, options.splits, options.steps, options.draws, priors)
        everything[name] = found
        scored += lines(name, found)
        compared += differences(name, found)
        print(f"{name}: {options.splits} splits in {time.perf_counter() - begun:.0f} s")
        for head in HEADS:
            print(f"  {edges(found, head)}")
    page = f"{markdown(scored)}\n\nPaired differences of the log-likelihood:\n\n{markdown(compared)}"
    report(options, "predictions", page, everything)


if __name__ == "__main__":
    main()
