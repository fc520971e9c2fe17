"""All layers or the last one: what each predicts, and what it costs.

    OMP_NUM_THREADS=1 python benchmarks/which_layers.py             every network, three seeds; an hour of one core
    OMP_NUM_THREADS=1 python benchmarks/which_layers.py --show      tables of what is there
    OMP_NUM_THREADS=1 python benchmarks/which_layers.py --smoke     one small network of each kind, for the tests

Classifiers of ``benchmarks/_zoo.py`` (but for LSTMs, of which a head alone can have a posterior): NLL and calibration
error on test inputs, NLL on the same with noise of 0.7 deviations, AUROC of foreign inputs (of pictures, all kinds of
``defaults.py --novelty``; of tables, the test inputs with noise of three deviations), and NLL after `uq.calibrate`
with 20 to 200 held-out labels, the mean of four draws (of one, where predictions over all layers take long).
Regressions inside and outside of their data, as fitted and calibrated by 100 values: functions of one dimension with
gaps and ends, the zoo's tables without the 15 % of rows farthest along their first principal component, and CNNs that
tell by how much a picture is turned, by further angles outside.
Costs are processor times in plain forward passes: a fit's over its training data, a prediction's over a hundred inputs;
the file's bytes are a share of the network's own. Networks that choose are apart from those that are only reported.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from _cache import Rows
from _harness import output_folder, write_csv
from _kinds import built
from _novelty import aurocs, unfamiliar
from _scored import averaged, harm, outputs, plain_scores, predicted, prediction_scores
from _sets import Labelled, split_of
from _zoo import CLASSIFIERS, OUTPUT, REGRESSORS, SEEDS, Pair, Shelf, loader, train, trained
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

import posthoc_uq as uq
from recipes.common import markdown

CHOICES: dict[str, dict[str, Any]] = {"all layers": {"layers": "all"}, "last layer": {"layers": "last"}}
NETWORK = "network"
NOISE, FAR = 0.7, 3.0
"""Deviations of the noise on inputs that are shifted, and on rows that count as foreign to a table."""
FAMILIAR, FOREIGN = 200, 100
LABELS, REST = (20, 40, 100, 200), 300
HELD_OUT = 100
"""Values by which regressions are calibrated."""
PICTURES = ("digits 28", "fashion")
SMOKE = ("iris, mlp relu 32 32", "diabetes, mlp tanh 32")


def size_of(pair: Pair) -> tuple[int, int]:
    """At most so many test inputs, and draws of few labels; fewer where predictions over all layers take long."""
    return (1000, 4) if group_of(pair) == "perceptrons" else (600, 1)


def group_of(pair: Pair) -> str:
    """What kind of network a classifier is."""
    if pair.kind.startswith("mlp"):
        return "perceptrons"
    return "text" if pair.data == "reviews" else "picture networks"


# Classifiers


def noisy(inputs: Tensor, train: Tensor, deviations: float, seed: int) -> Tensor:
    """Inputs with noise in multiples of the deviation of all training numbers."""
    drawn = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(seed))
    return inputs + deviations * train.std() * drawn


def foreign_scores(predictor: uq.Predictor, inputs: Tensor) -> dict[str, Tensor]:
    """Scores that are larger for foreign inputs."""
    prediction = predicted(predictor, inputs)
    found = {"entropy": prediction.entropy(), "epistemic variance": prediction.scores()["epistemic_variance"]}
    if prediction.sample_entropy is not None:
        found["mutual information"] = prediction.mutual_information()
    return found | {"novelty": torch.cat([predictor.novelty(part) for part in inputs.split(100)])}


def classifier_row(pair: Pair, seed: int, choice: str) -> dict[str, Any]:
    """Scores and costs of one classifier by one choice; the network's own scores by `NETWORK`."""
    model, split = trained(pair, seed), pair.split(seed)
    tested, draws = size_of(pair)
    test, numbers = split.test.first(tested), split.test.inputs.is_floating_point()
    shifted = test
    if numbers:
        shifted = test._replace(inputs=noisy(test.inputs, split.train.inputs, NOISE, seed))
    if choice == NETWORK:
        found: dict[str, Any] = plain_scores(model, split.train, test)
        return found | {"NLL, noise": plain_scores(model, split.train, shifted)["NLL"] if numbers else None}
    posterior, costs = fit_with_costs(model, split.train, test.inputs[:100], CHOICES[choice])
    predictor = uq.wrap(model, posterior)
    found = prediction_scores(predicted(predictor, test.inputs), test)
    if numbers:
        found["NLL, noise"] = prediction_scores(predicted(predictor, shifted.inputs), shifted)["NLL"]
        kinds = unfamiliar(pair.data) if pair.data in PICTURES else None
        if kinds is None:
            kinds = {"far": noisy(test.inputs[-FOREIGN:], split.train.inputs, FAR, seed)}
        score = partial(foreign_scores, predictor)
        kinds = {name: inputs[:FOREIGN] for name, inputs in kinds.items()}
        by_kind = aurocs(score, test.inputs[: 2 * FAMILIAR], kinds)
        found |= {f"AUROC, {name}": mean(values.values()) for name, values in by_kind.items()}
        found |= few_labels(model, posterior, test, seed, draws)
    return found | costs


def few_labels(
    model: nn.Module, posterior: uq.Posterior, test: Labelled, seed: int, draws: int
) -> dict[str, float]:
    """NLL less the network's own after `uq.calibrate` with some of the test inputs, on at most `REST` others: the mean
    over the draws, and the worst.
    """
    found: dict[str, float] = {}
    plain = outputs(model, test.inputs)
    for count in LABELS:
        if len(test.targets) < count + REST // 6:
            continue
        generator, changes = torch.Generator().manual_seed(seed), list[float]()
        for _ in range(draws):
            order = torch.randperm(len(test.targets), generator=generator)
            held, rest = order[:count], order[count : count + REST]
            labelled = [(test.inputs[held], test.targets[held])]
            predictor = uq.wrap(model, uq.calibrate(posterior, labelled, progress=False))
            others = Labelled(test.inputs[rest], test.targets[rest])
            own = float(nn.functional.cross_entropy(plain[rest], others.targets))
            changes.append(prediction_scores(predicted(predictor, others.inputs), others)["NLL"] - own)
        found |= {f"{count} labels": mean(changes), f"{count} labels, worst": max(changes)}
    return found


# Regressions


class Values(NamedTuple):
    """A regression: how its network is trained, and values inside and outside of the training data."""

    group: str
    name: str
    chooses: bool
    kind: str
    steps: int
    train: Labelled
    inside: Labelled
    outside: Labelled


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sine": torch.sin,
    "cubic": lambda x: (x / 3) ** 3 - x / 3,
    "chirp": lambda x: torch.sin(x**2 / 4),
    "step": lambda x: torch.tanh(4 * x),
    "bumps": lambda x: torch.exp(-((x - 1) ** 2) * 2) + torch.exp(-((x + 2) ** 2)),
    "saw": lambda x: (x / 2 - torch.floor(x / 2 + 0.5)) * 2,
    "line and sine": lambda x: 0.5 * x + torch.sin(2 * x),
    "corner": lambda x: x.abs() - 1.5,
    "cosine": lambda x: torch.cos(1.5 * x),
    "damped": lambda x: torch.exp(-x.abs() / 2) * torch.sin(3 * x),
}
KINDS = ("mlp tanh 50", "mlp tanh 20 20", "mlp relu 20 20", "mlp gelu layer 32 32", "mlp relu 64 64")
SIZES = (30, 60, 120, 200)


def one_dimension(seed: int) -> Iterator[Values]:
    """Each function twice: on [-4, -1] and [1, 4], and on [-3, 3]; outside is what lies between and beyond."""
    for number, (name, function) in enumerate(FUNCTIONS.items()):
        for gap in (True, False):
            place = 2 * number + gap + 7 * seed
            kind, size = KINDS[place % 5], SIZES[place % 4]
            generator = torch.Generator().manual_seed(100 * place)

            def uniform(low: float, high: float, count: int, of: torch.Generator = generator) -> Tensor:
                return low + (high - low) * torch.rand(count, generator=of)

            def inner(count: int, gap: bool = gap, draw: Callable[..., Tensor] = uniform) -> Tensor:
                x = draw(-3, 3, count)
                return x + torch.sign(x) if gap else x

            end = 4.0 if gap else 3.0
            beyond = [uniform(end, end + 2, 150), uniform(-end - 2, -end, 150)]
            inputs = inner(size), inner(500), torch.cat([*beyond, uniform(-1, 1, 300)] if gap else beyond)
            noise = (0.1, 0.3)[place % 2]
            parts = [
                Labelled(
                    x[:, None], (function(x) + noise * torch.randn(len(x), generator=generator))[:, None]
                )
                for x in inputs
            ]
            full = f"{name}, {'gap' if gap else 'ends'}, {kind}, {size} rows"
            yield Values("one dimension", full, number % 2 == 0, kind, 1500, *standardised(parts))


def tables(seed: int, wanted: Callable[[str], bool]) -> Iterator[Values]:
    """The zoo's tables of values, with the rows farthest along the first principal component as the outside."""
    for pair in REGRESSORS:
        if not wanted(pair.name):
            continue
        split = pair.split(seed)
        x, y = (
            torch.cat([split.train.inputs, split.test.inputs]),
            torch.cat([split.train.targets, split.test.targets]),
        )
        centred = x - x.mean(0)
        along = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[0]
        distance = (along - along.median()).abs()
        far = distance > distance.quantile(0.85)
        training = torch.arange(len(x)) < len(split.train.inputs)
        parts = [Labelled(x[rows], y[rows]) for rows in (training & ~far, ~training & ~far, far)]
        yield Values("tables", pair.name, pair.chooses, pair.kind, pair.steps, *standardised(parts))


TURNED = (("strided", "digits 28"), ("resnet", "digits 28"), ("cnn", "fashion"), ("resnet", "fashion"))


def turned_pictures(seed: int, wanted: Callable[[str], bool]) -> Iterator[Values]:
    """Pictures turned by up to 45 degrees, to tell the angle; outside by 45 to 90 degrees."""
    for kind, data in TURNED:
        name = f"{data}, angle by {kind}"
        if not wanted(name):
            continue
        split, generator = split_of(data, 0), torch.Generator().manual_seed(seed)

        def turned(pictures: Tensor, least: float, of: torch.Generator = generator) -> Labelled:
            angles = least + 45 * torch.rand(len(pictures), generator=of)
            angles *= torch.where(torch.rand(len(pictures), generator=of) < 0.5, -1.0, 1.0)
            background = float(pictures.min())
            x = [
                rotate(p, float(a), InterpolationMode.BILINEAR, fill=[background])
                for p, a in zip(pictures, angles, strict=True)
            ]
            return Labelled(torch.stack(x), angles[:, None] / 26)

        parts = [turned(split.train.inputs[:1000], 0), turned(split.test.inputs[:500], 0)]
        parts.append(turned(split.test.inputs[500:], 45))
        yield Values("picture regressions", name, data == "digits 28", kind, 500, *parts)


def standardised(parts: Sequence[Labelled]) -> list[Labelled]:
    """Parts in units of the first one's deviations."""
    x, y = parts[0]
    deviation = x.std(0)
    deviation = torch.where(deviation > 1e-6, deviation, 1.0)
    return [Labelled((p.inputs - x.mean(0)) / deviation, (p.targets - y.mean(0)) / y.std(0)) for p in parts]


def values_row(values: Values, seed: int, choice: str) -> dict[str, Any]:
    """Scores and costs of one regression by one choice. All layers are as by default: of few weights, together."""
    model = trained_on(values, seed)
    options = CHOICES[choice] if choice == "last layer" else {}
    costs: dict[str, Any] = {}
    if choice != NETWORK:
        posterior, costs = fit_with_costs(
            model, values.train, values.inside.inputs[:100], options | {"likelihood": "regression"}
        )
        predictor = uq.wrap(model, posterior)
    for name, part in (("inside", values.inside), ("outside", values.outside)):
        if choice == NETWORK:
            scores = plain_scores(model, values.train, part)
        else:
            prediction = predicted(predictor, part.inputs)
            scores = prediction_scores(prediction, part)
            costs[f"deviation, {name}"] = float(
                prediction.scores()["epistemic_variance"].double().sqrt().mean()
            )
        costs |= {f"{measure}, {name}": scores[measure] for measure in ("NLL", "coverage", "RMSE")}
    if choice != NETWORK:
        held, inside = values.inside.first(HELD_OUT), Labelled(*(part[HELD_OUT:] for part in values.inside))
        if len(inside.targets) > HELD_OUT:
            predictor = uq.wrap(model, uq.calibrate(posterior, [tuple(held)], progress=False))
            for name, part in (("inside", inside), ("outside", values.outside)):
                scores = prediction_scores(predicted(predictor, part.inputs), part)
                costs |= {f"{m}, calibrated, {name}": scores[m] for m in ("NLL", "coverage")}
    return costs


_NETWORKS: dict[tuple[str, int], nn.Module] = {}


def trained_on(values: Values, seed: int) -> nn.Module:
    """The network of a regression; only the newest is kept."""
    if (values.name, seed) not in _NETWORKS:
        _NETWORKS.clear()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = built(values.kind, values.train.inputs.shape[1], 1)
            if values.train.inputs.ndim > 2:
                model[-1] = nn.Linear(model[-1].in_features, 1)
            train(model, values.train, Pair(values.kind, "", True, values.steps))
        _NETWORKS[values.name, seed] = model
    return _NETWORKS[values.name, seed]


# Costs


def fit_with_costs(
    model: nn.Module, data: Labelled, inputs: Tensor, options: dict[str, Any]
) -> tuple[uq.Posterior, dict[str, float]]:
    """A fit, and what it cost."""

    def plain(x: Tensor, batch: int) -> float:
        with torch.no_grad():
            return least(lambda: [model(part) for part in x.split(batch)])

    one_pass = plain(data.inputs, 256)
    began = time.process_time()
    posterior = uq.fit(model, loader(data), progress=False, **options)
    seconds = time.process_time() - began
    predictor = uq.wrap(model, posterior)
    predictor(inputs)
    multiples = [least(lambda: predictor(inputs), 1) / plain(inputs, len(inputs)) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.h5"
        uq.save(posterior, path)
        size = path.stat().st_size
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return posterior, {
        "fit, s": seconds,
        "fit, passes": seconds / one_pass,
        "prediction, passes": median(multiples),
        "file, networks": size / weights,
        "weights": sum(p.numel() for p in model.parameters()),
    }


def least(work: Callable[[], Any], repeats: int = 3) -> float:
    """The least processor seconds of some work, which is done until they can be told."""
    found: list[float] = []
    for _ in range(repeats):
        began, count = time.process_time(), 0
        while (spent := time.process_time() - began) < 2e-3 or not count:
            work()
            count += 1
        found.append(spent / count)
    return min(found)


# What is measured, and tables


def rows_of(rows: Rows, seeds: Sequence[int], names: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """All rows, as they are there."""

    def row(about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        key = {"study": "which layers", **about}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = rows.row(key, measure, about["choice"] != NETWORK)
        if found is not None:
            yield about | found

    def wanted(name: str) -> bool:
        return names is None or any(text in name for text in names)

    choices = [NETWORK, *CHOICES]
    for seed in seeds:
        for values in (*one_dimension(seed), *tables(seed, wanted), *turned_pictures(seed, wanted)):
            if not wanted(values.name):
                continue
            about = {"group": values.group, "network": values.name, "chooses": values.chooses, "seed": seed}
            for choice in choices:
                yield from row(about | {"choice": choice}, partial(values_row, values, seed, choice))
        for pair in CLASSIFIERS:
            if pair.options or not wanted(pair.name):
                continue
            about = {"group": group_of(pair), "network": pair.name, "chooses": pair.chooses, "seed": seed}
            for choice in choices:
                yield from row(about | {"choice": choice}, partial(classifier_row, pair, seed, choice))


LOSSES = ("NLL", "ECE", "NLL, noise")
SCORES = tuple(
    f"AUROC, {name}" for name in ("entropy", "mutual information", "epistemic variance", "novelty")
)
FEW = tuple(f"{count} labels{what}" for count in LABELS for what in ("", ", worst"))
OF_VALUES = tuple(
    f"{measure}, {where}"
    for where in ("inside", "outside", "calibrated, inside", "calibrated, outside")
    for measure in ("NLL", "coverage", "deviation")
    if measure != "deviation" or "calibrated" not in where
)
COSTS = ("fit, s", "fit, passes", "prediction, passes", "file, networks")
CLASSES = ("perceptrons", "picture networks", "text")
COLUMNS = (*LOSSES, *SCORES, *FEW, *OF_VALUES, *COSTS)


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A line a group of networks and choice: means over the networks of means over the seeds, medians of costs."""
    lines: list[dict[str, str]] = []
    groups = dict.fromkeys((row["group"], row["chooses"]) for row in found)
    for group, chooses in sorted(groups, key=lambda each: (each[0], not each[1])):
        for choice in (NETWORK, *CHOICES):
            own = [r for r in found if (r["group"], r["chooses"], r["choice"]) == (group, chooses, choice)]
            names = dict.fromkeys(row["network"] for row in own)
            networks = [averaged([row for row in own if row["network"] == name]) for name in names]
            line = {"networks": group, "": "choosing" if chooses else "reported", "choice": choice}
            line["pairs"] = str(len(networks))
            if group in CLASSES and choice != NETWORK:
                line["harmed"] = str(sum(harmed(found, name, choice) for name in names))
            for column in COLUMNS:
                values = [row[column] for row in networks if column in row]
                worst, cost = column.endswith("worst"), column in COSTS
                middle = max if worst else median if cost else mean
                line[column] = f"{middle(values):.{2 if cost else 4}f}" if values else ""
            lines.append(line)
    return lines


def harmed(found: Sequence[dict[str, Any]], name: str, choice: str) -> bool:
    """Whether a classifier is harmed by a choice, as ``defaults.py --harm`` judges it."""
    own, other = (
        averaged([row for row in found if row["network"] == name and row["choice"] == each])
        for each in (NETWORK, choice)
    )
    pair = next(pair for pair in CLASSIFIERS if pair.name == name)
    return bool(harm(own, other, min(size_of(pair)[0], len(pair.split(0).test.targets))))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the networks")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--keep", action="store_true", help="take rows of earlier versions of the library")
    parser.add_argument("--show", action="store_true", help="measure nothing; tables of what is there")
    parser.add_argument("--output", type=output_folder, default=OUTPUT, help="folder for networks and tables")
    parser.add_argument("--smoke", action="store_true", help="small networks, for the tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Shelf.folder = options.output / "networks"
    if options.smoke:
        options.pairs, options.seeds = SMOKE, [0]
    rows = Rows(options.output / "rows", options.keep or options.show, not options.show)
    found: list[dict[str, Any]] = []
    for row in rows_of(rows, options.seeds, options.pairs):
        if "error" in row:
            print(f"{row['network']}, seed {row['seed']}, {row['choice']}: {row['error']}")
            continue
        found.append(row)
        if not options.show:
            told = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
            print(row["network"], row["seed"], row["choice"], told, flush=True)
    lines = summary(found)
    write_csv(options.output / "which_layers.csv", lines)
    each = [
        {key: _cell(row.get(key)) for key in ("group", "network", "chooses", "seed", "choice", *COLUMNS)}
        for row in found
    ]
    write_csv(options.output / "which_layers_networks.csv", each)
    for columns in ((*LOSSES, *SCORES), FEW, OF_VALUES, COSTS):
        shown = ["networks", "", "choice", "pairs", "harmed", *columns]
        wanted = [line for line in lines if any(line[column] for column in columns)]
        print(f"\n{markdown([shown, *([line.get(key, '') for key in shown] for line in wanted)])}")
    print(f"Written: {options.output / 'which_layers.csv'} and which_layers_networks.csv")


def _cell(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float) and math.isfinite(value)
        else str("" if value is None else value)
    )


if __name__ == "__main__":
    main()
