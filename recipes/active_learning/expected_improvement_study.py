"""Expected improvement by several priors, over seeds; `recipes.active_learning.expected_improvement` is the recipe.

python -m recipes.active_learning.expected_improvement_study            two functions, several priors; minutes
python -m recipes.active_learning.expected_improvement_study --smoke    one seed, two evaluations; seconds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import posthoc_uq as uq
from recipes.active_learning.expected_improvement import START, expected_improvement
from recipes.active_learning.parts import NOISE, forrester, trained_regressor
from recipes.common import parsed, parser, report, save_figure, table

PRIORS: dict[str, dict[str, Any]] = {
    "fit, as it is": {},
    "evidence": {"method": "full", "prior_precision": "evidence", "noise_variance": NOISE},
    "prior precision 1": {"method": "full", "prior_precision": 1.0, "noise_variance": NOISE},
}
STRATEGIES = ("random", "network alone", *PRIORS)
COLOURS = dict(zip(STRATEGIES, ("#595959", "#CC79A7", "#0072B2", "#009E73", "#E69F00"), strict=True))


class Problem(NamedTuple):
    """What is to be made small, over the unit interval or square.

    Attributes:
        dimensions: of the inputs.
        value: ``(points, dimensions)`` to ``(points, 1)``.
    """

    dimensions: int
    value: Callable[[Tensor], Tensor]


def branin(x: Tensor) -> Tensor:
    """Branin's function on its usual square: three valleys as deep as each other."""
    a, b = 15 * x[:, :1] - 5, 15 * x[:, 1:]
    valley = b - 5.1 / (4 * torch.pi**2) * a**2 + 5 / torch.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * torch.pi)) * a.cos() + 10


PROBLEMS = {"Forrester": Problem(1, forrester), "Branin": Problem(2, branin)}


class Step(NamedTuple):
    """What led to one evaluation, in units of the standardised values.

    Attributes:
        known: which candidates were evaluated before.
        prediction: of all candidates.
        gain: their expected improvement.
        chosen: the next one.
    """

    known: list[int]
    prediction: uq.RegressionPrediction
    gain: Tensor
    chosen: int


def candidates_of(problem: Problem, seed: int) -> Tensor:
    """500 points: a grid in one dimension, random in more."""
    if problem.dimensions == 1:
        return torch.linspace(0, 1, 500).unsqueeze(1)
    return torch.rand(500, problem.dimensions, generator=torch.Generator().manual_seed(seed))


def run(problem: Problem, strategy: str, seed: int, evaluations: int) -> tuple[list[float], list[Step]]:
    """The regret after every evaluation, and the steps of a strategy that predicts."""
    candidates = candidates_of(problem, seed)
    values, generator = problem.value(candidates), torch.Generator().manual_seed(seed)
    known = torch.randperm(len(candidates), generator=generator)[:START].tolist()
    regrets, steps = list[float](), list[Step]()
    for _ in range(evaluations):
        x, y = 4 * candidates[known] - 2, values[known]
        y = (y - y.mean()) / y.std()
        gain = torch.rand(len(candidates), generator=generator)
        if strategy != "random":
            model = trained_regressor(x, y, seed)
            with torch.no_grad():
                gain = -model(4 * candidates - 2)[:, 0]
            if strategy in PRIORS:
                posterior = uq.fit(
                    model, [(x, y)], likelihood="regression", progress=False, **PRIORS[strategy]
                )
                prediction: Any = uq.wrap(model, posterior).predict([4 * candidates - 2], progress=False)
                gain = expected_improvement(prediction, float(y.min()))
                steps.append(Step(list(known), prediction, gain.clone(), 0))
        gain[known] = -torch.inf
        known.append(int(gain.argmax()))
        if strategy in PRIORS:
            steps[-1] = steps[-1]._replace(chosen=known[-1])
        regrets.append(float(values[known].min() - values.min()))
    return regrets, steps


def picture(steps: Sequence[Step], regrets: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Figure:
    """Three steps on Forrester's function, the expected improvement below; and mean regrets by evaluation."""
    shown = [steps[place] for place in sorted({0, len(steps) // 2, len(steps) - 1})][:3]
    x = candidates_of(PROBLEMS["Forrester"], 0)
    values = PROBLEMS["Forrester"].value(x)
    figure = Figure(figsize=(3.4 * (len(shown) + len(regrets)), 4.2), layout="constrained")
    panels = figure.subplots(
        2, len(shown) + len(regrets), squeeze=False, gridspec_kw={"height_ratios": [3, 1]}
    )
    for column, step in enumerate(shown):
        own, below = panels[0, column], panels[1, column]
        centre, spread = values[step.known].mean(), values[step.known].std()
        mean = step.prediction.mean[:, 0] * spread + centre
        deviation = step.prediction.epistemic_variance[:, 0].sqrt() * spread
        own.fill_between(
            x[:, 0], mean - 2 * deviation, mean + 2 * deviation, color="#0072B2", alpha=0.2, linewidth=0
        )
        own.plot(x, mean, color="#0072B2", label="network, 2 sd")
        own.plot(x, values, color="#595959", linestyle="--", linewidth=1, label="function")
        own.scatter(x[step.known], values[step.known], color="black", s=14, label="evaluated")
        own.set(title=f"{len(step.known)} evaluations", ylim=(-12, 18))
        below.plot(x, step.gain, color="#D55E00")
        below.axvline(float(x[step.chosen]), color="#D55E00", linestyle=":")
        below.set(xlabel="x", yticks=[], ylabel="expected improvement" if column == 0 else "")
    panels[0, 0].legend(fontsize=7, frameon=False)
    for column, (name, found) in enumerate(regrets.items(), len(shown)):
        panels[1, column].axis("off")
        own = panels[0, column]
        for strategy, runs in found.items():
            mean = torch.tensor(runs).mean(0)
            own.plot(range(START + 1, START + 1 + len(mean)), mean, color=COLOURS[strategy], label=strategy)
        own.set(title=f"{name}, regret", xlabel="evaluations", yscale="symlog")
        own.legend(fontsize=7, frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "expected_improvement", "one seed, two evaluations: seconds")
    command.add_argument("--seeds", type=int, default=4)
    command.add_argument("--evaluations", type=int, default=15, help=f"after the first {START}")
    options = parsed(command, arguments, seeds=1, evaluations=2)
    torch.set_num_threads(1)
    regrets: dict[str, dict[str, list[list[float]]]] = {}
    shown = list[Step]()
    for name, problem in PROBLEMS.items():
        regrets[name] = {}
        for strategy in STRATEGIES:
            runs = [run(problem, strategy, seed, options.evaluations) for seed in range(options.seeds)]
            regrets[name][strategy] = [found for found, _ in runs]
            print(f"{name}, {strategy}: regret {torch.tensor(regrets[name][strategy])[:, -1].mean():.3g}")
            if name == "Forrester" and strategy == next(iter(PRIORS)):
                shown = runs[0][1]
    places = sorted({min(options.evaluations, number) for number in (5, 10, 15)})
    rows = {
        f"{name}, {strategy}": [{f"after {place}": one[place - 1] for place in places} for one in runs]
        for name, found in regrets.items()
        for strategy, runs in found.items()
    }
    save_figure(picture(shown, regrets), options.output / "expected_improvement.png", options.smoke)
    page = table(rows, ".3g", corner="regret", error=True)
    report(options, "expected_improvement", page, regrets)


if __name__ == "__main__":
    main()
