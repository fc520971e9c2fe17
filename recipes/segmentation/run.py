"""Segmentation with uncertainty: which pixels belong to something that the network never saw?

python -m recipes.segmentation.run            a U-Net on 400 scenes of 64 x 64; minutes
python -m recipes.segmentation.run --smoke    a few small scenes; seconds
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.evaluation import title_of
from posthoc_uq.evaluation.metrics import ood_auroc
from posthoc_uq.likelihoods import PositionPrediction
from recipes.common import in_order, parsed, parser, predicted, report, save_figure, table
from recipes.segmentation.network import UNet, trained
from recipes.segmentation.scenes import CLASSES, FOREIGN, SIZE, Scenes, scenes

HEADS: dict[str, dict[str, Any]] = {
    "sampling": {"n_samples": 30, "novelty": True},
    "linearized": {"n_probes": 32},
    "moments": {},
}
LAYERS = {"last": "last layer", "all": "all layers"}
SCORES = ("entropy", "mutual_information", "novelty")
COSTS, FEW = ("n_samples", "n_probes"), 3  # what makes a head dear; in a smoke run
PICTURED = "INF last layer, linearized"
SHOWN = 2  # scenes of each kind of foreign figure in the figure
Predict = Callable[[Tensor], PositionPrediction]
Numbers = dict[str, float]


def alone(model: UNet) -> Predict:
    """The network without a posterior."""

    def predict(images: Tensor) -> PositionPrediction:
        with torch.no_grad():
            outputs = model(images).unsqueeze(0)
        found: Any = uq.Categorical().from_draws(outputs)
        return found.of_one_network()

    return predict


def predictors(model: UNet, few: Scenes, options: argparse.Namespace) -> Iterator[tuple[str, Predict]]:
    """Every posterior with every head, at the prior that is faithful through it, by its name in the table."""
    yield "network alone", alone(model)
    batches = in_order(few.images, few.classes, 8)
    for layers, words in LAYERS.items():
        start = time.process_time()
        posterior = uq.fit(
            model, batches, layers=layers, rank=options.rank, prior_precision=1.0, progress=False
        )
        said(f"INF, {words}: fitted", start)
        for head, own in HEADS.items():
            settings = own | ({name: FEW for name in own if name in COSTS} if options.smoke else {})
            start = time.process_time()
            searched = {name: value for name, value in settings.items() if name in COSTS}
            tuned = uq.tune(
                posterior, batches[:1], criterion="faithful", head=head, progress=False, **searched
            )
            said(f"INF, {words}, {head}: prior precision {tuned.prior_precision:.3g} found", start)
            yield f"INF {words}, {head}", uq.wrap(model, tuned, head=head, **settings)


def said(what: str, start: float) -> None:
    """A line on stderr with the seconds since `start`."""
    print(f"{what} in {time.process_time() - start:.1f} s", file=sys.stderr, flush=True)


def measured(predict: Predict, test: Scenes, foreign: Mapping[str, Scenes]) -> Numbers:
    """How good the classes of familiar scenes are, and how well foreign pixels are told from others of their scenes."""
    predict(test.images[:1])  # the first call settles what is kept
    start = time.process_time()
    prediction = predicted(predict, test.images, 8)
    numbers = {"seconds an image": (time.process_time() - start) / len(test.images)}
    quality = prediction.quality(test.classes)
    numbers |= {title_of(name): quality[name] for name in ("accuracy", "nll", "ece")}
    for kind, of in foreign.items():
        known = predicted(predict, of.images, 8).scores_by_position()
        for score in SCORES:
            if score in known:
                values = known[score]
                numbers[f"{kind}: {score}"] = ood_auroc(values[~of.foreign], values[of.foreign])
    return numbers


def figure(predict: Predict, foreign: Mapping[str, Scenes]) -> Figure:
    """Scenes with foreign figures: the image, the predicted classes, and a map of each score."""
    columns = ("image", "predicted class", *(score.replace("_", " ") for score in SCORES))
    rows = [(kind, of, number) for kind, of in foreign.items() for number in range(SHOWN)]
    page = Figure(figsize=(2 * len(columns), 2 * len(rows)), layout="constrained")
    panels = page.subplots(len(rows), len(columns), squeeze=False)
    for axes, (kind, of, number) in zip(panels, rows, strict=True):
        prediction = predict(of.images[number : number + 1])
        known = prediction.scores_by_position()
        axes[0].imshow(of.images[number].permute(1, 2, 0).numpy())
        axes[0].set_ylabel(kind)
        axes[1].imshow(prediction.predicted()[0].numpy(), vmin=0, vmax=len(CLASSES) - 1, cmap="viridis")
        for panel, score in zip(axes[2:], SCORES, strict=True):
            panel.imshow(known[score][0].numpy(), cmap="magma", vmin=0)
        for panel in axes:
            panel.set(xticks=[], yticks=[])
    for panel, title in zip(panels[0], columns, strict=True):
        panel.set_title(title)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, fit, measure, print the table, write it with the figure."""
    command = parser(__doc__, "segmentation", "a few small scenes")
    add = command.add_argument
    add("--scenes", type=int, default=400, help="for training")
    add("--fit", type=int, default=64, help="of these, for the posterior")
    add("--test", type=int, default=24, help="familiar, and of each foreign kind")
    add("--epochs", type=int, default=10)
    add("--width", type=int, default=16, help="channels of the finest scale")
    add("--rank", type=int, default=100, help="of INF")
    add("--size", type=int, default=SIZE)
    add("--seed", type=int, default=0)
    options = parsed(command, arguments, scenes=16, fit=4, test=2, epochs=1, width=4, rank=5, size=16)
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    train = scenes(options.scenes, options.seed, size=options.size)
    test = scenes(options.test, options.seed + 1, size=options.size)
    foreign = {kind: scenes(options.test, options.seed + 2, kind, options.size) for kind in FOREIGN}
    model = trained(train, options.epochs, options.seed, options.width)
    found: dict[str, Numbers] = {}
    few = Scenes(*(part[: options.fit] for part in train))
    for name, predict in predictors(model, few, options):
        start = time.process_time()
        found[name] = measured(predict, test, foreign)
        said(f"{name}: measured", start)
        if name == PICTURED:
            save_figure(figure(predict, foreign), options.output / "segmentation.png", options.smoke)
    report(options, "segmentation", table(found), found)


if __name__ == "__main__":
    main()
