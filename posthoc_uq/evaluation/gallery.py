"""The few images worth a look, kept while the batches pass, so that no data set is kept in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.positions import PositionPrediction
from posthoc_uq.predictions.scores import score_of


@dataclass(frozen=True)
class Example:
    """One image and what was predicted for it.

    Attributes:
        image: (channels, height, width), the model's input.
        data: the name of its data set.
        index: its place in the loader's order.
        score: its value of the gallery's uncertainty score.
        predicted: the most probable class.
        probability: of that class.
        label: the right class, where there is one.
    """

    image: Tensor
    data: str
    index: int
    score: float
    predicted: int
    probability: float
    label: int | None


@dataclass
class Gallery:
    """The `size` offered images of a data set with the largest (or smallest) score."""

    size: int
    score: str
    data: str
    largest: bool = True
    mistakes_only: bool = False
    examples: list[Example] = field(default_factory=lambda: list[Example]())

    def offer(
        self, images: Tensor | None, prediction: Prediction, targets: Tensor | None, start: int
    ) -> None:
        """Look at one batch, whose first input is number `start`; of predictions with one class an input."""
        one_class = prediction.classes is not None and not isinstance(prediction, PositionPrediction)
        if images is None or not one_class or self.size < 1:
            return
        prediction = cast(ClassPrediction, prediction)
        if self.mistakes_only and targets is None:
            return
        scores = score_of(prediction, self.score).cpu()
        order = torch.nan_to_num(scores, nan=torch.inf) * (1.0 if self.largest else -1.0)
        if self.mistakes_only and targets is not None:
            order = order.masked_fill(prediction.predicted().cpu() == targets.cpu(), -torch.inf)
        probability, predicted = prediction.probs.max(dim=-1)
        picked: list[tuple[float, Example]] = []
        for index in order.topk(min(self.size, len(order))).indices.tolist():
            if order[index] == -torch.inf:
                continue
            example = Example(
                images[index],
                self.data,
                start + index,
                float(scores[index]),
                int(predicted[index]),
                float(probability[index]),
                None if targets is None else int(targets[index]),
            )
            picked.append((float(order[index]), example))
        sign = 1.0 if self.largest else -1.0
        picked += [(sign * example.score, example) for example in self.examples]
        self.examples = [example for _, example in sorted(picked, key=lambda pair: -pair[0])[: self.size]]
        new = [place for place, example in enumerate(self.examples) if example.index >= start]
        if new:
            copies = torch.stack([self.examples[place].image.detach().float() for place in new]).cpu()
            for place, image in zip(new, copies, strict=True):
                self.examples[place] = replace(self.examples[place], image=image.clone())


def images_of(inputs: list[Tensor]) -> Tensor | None:
    """The images among a batch's inputs: the first tensor, if it has one, three or four channels in four dimensions."""
    if inputs and inputs[0].ndim == 4 and inputs[0].shape[1] in (1, 3, 4):
        return inputs[0]
    return None
