"""`defaults.py --novelty`: which score tells foreign pictures from familiar ones?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from _cache import Rows
from _harm import cell
from _rivals import distances
from _scored import outputs, predicted
from _sets import split_of
from _zoo import CLASSIFIERS, REGRESSORS, SEEDS, Pair, loader, trained
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import ood_auroc
from recipes.common import markdown
from recipes.fashion_mnist import data as files
from recipes.function_space import foreign as drawn
from recipes.photos import pictures
from recipes.photos.efficientnet import efficientnet_lite0

NAMED = (
    "digits 28, lenet",
    "fashion 3000, cnn",
    "fashion 3000, resnet",
    "digits 28, strided",
    "digits 28, mlp tanh batch 128 64",
    "digits 28, resnet",
    "digits 28, vit",
    "fashion 3000, lenet",
    "fashion 3000, vit",
    "fashion 10000, recipe cnn",
)
"""Networks of pictures; a perceptron has no stage of 784 columns."""
FOUND_WITH = (*NAMED[:4], "fashion 3000, vit")
"""On these the stages, what is told of them, and how they are joined were chosen; on no others."""
PICTURES = [pair for name in NAMED for pair in CLASSIFIERS if pair.name == name]
FAMILIAR, FOREIGN = 500, 200
"""Test inputs by which scores become tail probabilities; as many others are told from foreign ones of every kind."""
CROPS, CROPS_A_KIND = 64, 40
"""For the network with ImageNet weights: crops that it is fitted on, and foreign ones of every kind."""
FORMS = ("layers", "class", "top", "all")
IMAGENET = "EfficientNet-Lite0"
BOTH = "entropy and novelty"
NETWORK = "network's entropy"

CORRUPTED_KINDS = {
    "noise of 0.3": ("noise", 0.3),
    "noise of 1": ("noise", 1.0),
    "blur of 0.7": ("blur", 0.7),
    "blur of 1": ("blur", 1.0),
    "blur of 2": ("blur", 2.0),
    "contrast 0.2": ("contrast", 0.2),
    "contrast 0.5": ("contrast", 0.5),
}
"""Familiar pictures that are corrupted, and by how much: noise in deviations of all pixels, blur in pixels."""

FOREIGN_KINDS = ("other", "turned", "noise", "blur", "dark", "letters", "photos", "textures")
TEXTURES = ("brick", "grass", "gravel")
OTHER = {"digits 28": "fashion", "fashion": "digits 28"}


@cache
def foreign_pictures(data: str, number: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs by kind, each (number, 1, 28, 28): pictures of the other data set, test pictures turned by 90 degrees,
    blurred (Gaussian, deviation 2) and at a fifth of their contrast, uniform noise, letters in many typefaces, crops of
    photographs and of textures.

    Args:
        data: that the network was trained on, ``"digits 28"`` or ``"fashion"``.
        number: of every kind.
        seed: of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    test = files.pixels(split_of(data, 0).test.inputs[:number])
    photos = tuple(name for name in drawn.PHOTOS if name not in TEXTURES)
    raw = {
        "other": files.pixels(split_of(OTHER[data], 0).test.inputs[:number]),
        "turned": test.rot90(1, (1, 2)),
        "noise": torch.randint(256, test.shape, generator=generator),
        "blur": gaussian_blur(test.unsqueeze(1).float(), [9, 9], [2.0, 2.0]).squeeze(1),
        "dark": test.float() / 5,
        "letters": drawn.letters(number, seed),
        "photos": drawn.photos(number, seed, photos),
        "textures": drawn.photos(number, seed, TEXTURES),
    }
    return {kind: files.normalised(raw[kind]) for kind in FOREIGN_KINDS}


def corrupted(inputs: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Pictures (samples, channels, height, width) by kind of corruption; `seed` draws the noise."""
    generator, darkest = torch.Generator().manual_seed(seed), inputs.amin()
    found: dict[str, Tensor] = {}
    for name, (kind, size) in CORRUPTED_KINDS.items():
        if kind == "noise":
            drawn = torch.randn(inputs.shape, generator=generator)
            found[name] = inputs + size * inputs.std() * drawn
        elif kind == "blur":
            width = 2 * math.ceil(2 * size) + 1
            found[name] = gaussian_blur(inputs, [width, width], [size, size])
        else:
            found[name] = darkest + size * (inputs - darkest)
    return found


@cache
def unfamiliar(data: str) -> dict[str, Tensor]:
    """Foreign pictures, and test pictures that are corrupted, by kind."""
    test = split_of(data, 0).test.inputs[:FOREIGN]
    return foreign_pictures(data, FOREIGN) | corrupted(test)


Scores = dict[str, Tensor]


def tail(scores: Tensor, familiar: Tensor) -> Tensor:
    """The share of familiar inputs whose score is at least as large, for every score."""
    ordered = familiar.sort().values
    return (1 + len(ordered) - torch.searchsorted(ordered, scores.contiguous())) / (len(ordered) + 1)


def own_scores(model: nn.Module, predictor: uq.Predictor, inputs: Tensor, forms: Sequence[str]) -> Scores:
    """Every score of this library, and the network's own entropy; larger for foreign inputs."""
    prediction = predicted(predictor, inputs)
    logs = outputs(model, inputs).log_softmax(1)
    found: Scores = {NETWORK: -(logs.exp() * logs).sum(1), "entropy": prediction.entropy()}
    if prediction.sample_entropy is not None:
        found["mutual information"] = prediction.mutual_information()
    found["epistemic variance"] = prediction.epistemic_variance.mean(-1)
    for form in forms:
        parts = [predictor.novelty(batch, of=form) for batch in inputs.split(100)]
        found[f"novelty, {form}"] = torch.cat(parts)
    return found


def aurocs(
    score: Callable[[Tensor], Scores],
    test: Tensor,
    foreign: Mapping[str, Tensor],
    pairs: Sequence[Sequence[str]] = (),
) -> dict[str, dict[str, float]]:
    """By score and kind of foreign inputs, the AUROC against the second half of the test inputs.

    Args:
        score: of inputs.
        test: familiar inputs; the first half turns scores into tail probabilities.
        foreign: inputs by kind.
        pairs: scores of which the smaller tail probability is one more score, named by ``" and "``.
    """
    half = len(test) // 2
    known, familiar = score(test[:half]), score(test[half:])
    found: dict[str, dict[str, float]] = {}
    for kind, inputs in foreign.items():
        others = score(inputs)
        for names in pairs:
            if all(name in others for name in names):
                combined = [
                    -torch.stack([tail(part[name], known[name]) for name in names]).min(0).values
                    for part in (familiar, others)
                ]
                label = " and ".join(name.partition(",")[0] for name in names)
                found.setdefault(label, {})[kind] = ood_auroc(*combined)
        for name, values in others.items():
            found.setdefault(name, {})[kind] = ood_auroc(familiar[name].float(), values.float())
    return found


def ours(pair: Pair, seed: int) -> dict[str, Any]:
    """The library's scores with nothing chosen."""
    model, split = trained(pair, seed), pair.split(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = uq.fit(model, loader(split.train), progress=False, **pair.options)
    predictor = uq.wrap(model, posterior)
    test = split.test.inputs[: 2 * FAMILIAR]
    found = aurocs(
        lambda inputs: own_scores(model, predictor, inputs, FORMS),
        test,
        unfamiliar(pair.data),
        [("entropy", "novelty, layers")],
    )
    return {"AUROC": found}


def of_distances(pair: Pair, seed: int) -> dict[str, Any]:
    """The scores of `_rivals.distances`, on the same inputs."""
    model, split = trained(pair, seed), pair.split(seed)
    scores = distances(model, split.train)
    return {
        "AUROC": aurocs(
            lambda inputs: {name: score(inputs) for name, score in scores.items()},
            split.test.inputs[: 2 * FAMILIAR],
            unfamiliar(pair.data),
        )
    }


def of_ensemble(pair: Pair) -> dict[str, Any]:
    """Entropy and mutual information of a deep ensemble (Lakshminarayanan et al. 2017) of the three seeds."""
    models = [trained(pair, seed) for seed in SEEDS]

    def scores(inputs: Tensor) -> Scores:
        logits = torch.stack([outputs(model, inputs) for model in models])
        prediction = uq.ClassPrediction.from_logits(logits)
        return {
            "ensemble of 3, entropy": prediction.entropy(),
            "ensemble of 3, mutual information": prediction.mutual_information(),
        }

    test = pair.split(0).test.inputs[: 2 * FAMILIAR]
    return {"AUROC": aurocs(scores, test, unfamiliar(pair.data))}


def photograph_crops(crops: int, number: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Pictures for the network with ImageNet weights, each (pictures, 3, 224, 224).

    Args:
        crops: of photographs, for the fit.
        number: of foreign crops of every kind; there are twice as many familiar ones.

    Returns:
        Crops for the fit, other crops of the same photographs, and crops of textures, noise and drawings.
    """
    photographs = [pictures.photo(name) for name in pictures.FIT_PHOTOS]
    shown = pictures.pictures(0)
    foreign = {
        kind: pictures.random_crops([p.image for p in shown if p.kind == kind], number, 2)
        for kind in ("texture", "noise", "drawing")
    }
    return (
        pictures.random_crops(photographs, crops, 0),
        pictures.random_crops(photographs, 2 * number, 1),
        foreign,
    )


def efficientnet(layers: str, crops: int = CROPS, number: int = CROPS_A_KIND) -> dict[str, Any]:
    """EfficientNet-Lite0 with its ImageNet weights, fitted on crops of photographs: AUROC of textures, noise and
    drawings, and of corrupted crops, against other crops of the same photographs.
    """
    model = efficientnet_lite0()
    training, familiar, foreign = photograph_crops(crops, number)
    posterior = uq.fit(model, training.split(16), layers=layers, progress=False)
    predictor = uq.wrap(model, posterior)
    found = aurocs(
        lambda inputs: own_scores(model, predictor, inputs, ("layers", "class", "top")),
        familiar,
        foreign | corrupted(familiar[:number]),
        [("entropy", "novelty, layers")],
    )
    return {"AUROC": found}


def foreign_rows(train: Tensor, inputs: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Rows of a table (rows, columns) by how they are made foreign; deviations are those of the training rows."""
    generator = torch.Generator().manual_seed(seed)
    deviation, centre, (count, columns) = train.std(0).clamp(min=1e-6), train.mean(0), inputs.shape
    found: dict[str, Tensor] = {}
    for size in (3, 10):
        column = torch.randint(columns, (count,), generator=generator)
        sign = torch.randint(2, (count,), generator=generator) * 2 - 1
        moved = inputs.clone()
        moved[torch.arange(count), column] += size * sign * deviation[column]
        found[f"a column moved by {size}"] = moved
    for size in (1, 3):
        found[f"noise of {size}"] = inputs + size * deviation * torch.randn(inputs.shape, generator=generator)
    found["scaled by 3"] = centre + 3 * (inputs - centre)
    orders = [torch.randperm(count, generator=generator) for _ in range(columns)]
    found["columns of other rows"] = torch.stack([inputs[own, c] for c, own in enumerate(orders)], 1)
    found["drawn"] = centre + deviation * torch.randn(inputs.shape, generator=generator)
    found["30 % missing"] = inputs.masked_fill(torch.rand(inputs.shape, generator=generator) < 0.3, 0.0)
    return found


def of_table(pair: Pair, seed: int) -> dict[str, Any]:
    """Novelty over layers, and by the last layer alone, of a perceptron on a table; fitted by the diagonal of the last
    layer, on which neither depends.
    """
    model, split = trained(pair, seed), pair.split(seed)
    options: dict[str, Any] = {"layers": "last", "prior_precision": 1.0, "progress": False} | pair.options
    if pair in REGRESSORS:
        options["likelihood"] = "regression"
    predictor = uq.wrap(model, uq.fit(model, loader(split.train), "diag", **options))

    def scores(inputs: Tensor) -> Scores:
        return {f"novelty, {form}": predictor.novelty(inputs, of=form) for form in ("layers", "class")}

    test = split.test.inputs[: 2 * FAMILIAR]
    return {"AUROC": aurocs(scores, test, foreign_rows(split.train.inputs, test))}


def rows_of(
    rows: Rows, pairs: Sequence[Pair], seeds: Sequence[int] = SEEDS, only: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """All rows, as they are there; of tables one seed, and pairs with neither pictures nor tables are left out."""
    for pair in pairs:
        if pair not in PICTURES:
            inputs = pair.split(0).train.inputs
            if (only is None or "table" in only) and _is_table(inputs):
                key = {"study": "novelty", "pair": pair.name, "seed": 0, "row": "table"}
                row = rows.row(key, partial(of_table, pair, 0))
                if row is not None:
                    yield key | {"chooses": pair.chooses} | row
            continue
        for seed in seeds:
            for name, measure, library in (("ours", ours, True), ("distances", of_distances, False)):
                if only is not None and name not in only:
                    continue
                key = {"study": "novelty", "pair": pair.name, "seed": seed, "row": name}
                row = rows.row(key, partial(measure, pair, seed), library)
                if row is not None:
                    yield key | row
        if only is None or "ensemble" in only:
            key = {"study": "novelty", "pair": pair.name, "seed": -1, "row": "ensemble"}
            row = rows.row(key, partial(of_ensemble, pair), library=False)
            if row is not None:
                yield key | row


def _is_table(inputs: Tensor) -> bool:
    return inputs.ndim == 2 and inputs.is_floating_point() and 3 <= inputs.shape[1] <= 512


def imagenet_rows(rows: Rows, only: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of the network with ImageNet weights."""
    if only is not None and IMAGENET not in only:
        return
    key = {"study": "novelty", "pair": IMAGENET, "seed": 0, "row": "ours"}
    row = rows.row(key, partial(efficientnet, "last"))
    if row is not None:
        yield key | row


def tables(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table a network, means over the seeds, then the means over the networks."""
    parts: list[str] = []
    of_tables = [row for row in found if row["row"] == "table"]
    found = [row for row in found if row["row"] != "table"]
    names = dict.fromkeys(row["pair"] for row in found)
    foreign, corrupt = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for name in names:
        scores = _by_score([row for row in found if row["pair"] == name])
        parts += [f"\n### {name}\n", _table(scores)]
        for means, wanted in ((foreign, False), (corrupt, True)):
            means[name] = {
                score: mean(value for kind, value in kinds.items() if (kind in CORRUPTED_KINDS) == wanted)
                for score, kinds in scores.items()
                if any((kind in CORRUPTED_KINDS) == wanted for kind in kinds)
            }
    parts += ["\n### Means over the foreign kinds\n", _means_table(foreign)]
    parts += ["\n### Means over the corrupted kinds\n", _means_table(corrupt)]
    errors = [
        f"{row['pair']}, {row['row']}, seed {row['seed']}: {row['error']}" for row in found if "error" in row
    ]
    if of_tables:
        parts += ["\n### Tables, means over the kinds of rows\n", _table_of_tables(of_tables)]
    return "\n".join([*parts, *errors])


def _table_of_tables(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [["network", "chooses", "over layers", "last layer"]]
    for row in found:
        scores = row.get("AUROC", {})
        means = [
            mean(scores[f"novelty, {form}"].values()) if scores else None for form in ("layers", "class")
        ]
        lines.append([row["pair"], "yes" if row["chooses"] else "", *map(cell, means)])
    return markdown(lines)


def _by_score(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean AUROC over the seeds, by score and kind."""
    collected: dict[str, dict[str, list[float]]] = {}
    for row in found:
        for score, kinds in row.get("AUROC", {}).items():
            for kind, value in kinds.items():
                collected.setdefault(score, {}).setdefault(kind, []).append(value)
    return {s: {kind: mean(values) for kind, values in kinds.items()} for s, kinds in collected.items()}


def _table(scores: Mapping[str, Mapping[str, float]]) -> str:
    kinds = list(dict.fromkeys(kind for row in scores.values() for kind in row))
    lines = [
        [score, *(cell(row.get(kind)) for kind in kinds), cell(mean(row.values()))]
        for score, row in scores.items()
    ]
    return markdown([["score", *kinds, "mean"], *lines])


def _means_table(means: Mapping[str, Mapping[str, float]]) -> str:
    """A line a score, a column a network; the last two are means over the networks that chose what novelty is, and
    over the others, of those that have it.
    """
    networks = [name for name in means if name != IMAGENET]
    scores = dict.fromkeys(score for name in networks for score in means[name])
    lines: list[list[str]] = []
    for score in scores:
        values = {name: means[name].get(score) for name in networks}
        line = [score, *(cell(value) for value in values.values())]
        for group in (FOUND_WITH, [name for name in NAMED if name not in FOUND_WITH]):
            known = [values[name] for name in networks if name in group and values[name] is not None]
            line.append(cell(mean(v for v in known if v is not None)) if known else "-")
        lines.append(line)
    return markdown([["score", *networks, "choosing", "reported"], *lines])
