"""`defaults.py --choose` for a network with real weights: EfficientNet-Lite0, by the AUROC of foreign pictures alone,
since there are no labelled ImageNet pictures to score predictions on.

Only its last layer has a posterior: with all layers and a thousand classes one core takes more than six minutes for
the cheapest fit with its faithful prior (``"diag"``, 64 crops), and that search is repeated for every budget. What
enters that layer is then the same in every setting, so it is computed once for each picture, and the last layer on
these features is the network that is fitted and predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from _cache import Rows
from _choices import AUROCS, FITS, SETTINGS, Setting, auroc_cells, file_bytes, set_up, setting_aurocs
from _harm import markdown
from _novelty import CROPS, CROPS_A_KIND, IMAGENET, photograph_crops
from _recipes import recipe
from torch import Tensor, nn

SMALL, SMALL_SETTINGS = (12, 6), ("default", "KFAC")
"""Crops for the fit, foreign crops of every kind, and settings, for the tests."""
SETTINGS_HERE = {name: setting for name, setting in SETTINGS.items() if "layers" not in setting.fit}
"""All but those that choose the layers, which is always the last one here."""


@cache
def features(crops: int, number: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """The last layer, and what enters it: of the crops for the fit, of the familiar and of the foreign ones by kind."""
    model: Any = recipe("photos", "efficientnet").efficientnet_lite0()
    training, familiar, foreign = photograph_crops(crops, number)

    @torch.no_grad()
    def entering(images: Tensor) -> Tensor:
        parts = [model.forward_head(model.forward_features(x), pre_logits=True) for x in images.split(16)]
        return torch.cat(parts)

    others = {kind: entering(images) for kind, images in foreign.items()}
    return model.get_classifier(), entering(training), entering(familiar), others


def measured(setting: Setting, crops: int, number: int) -> dict[str, Any]:
    """A row: AUROCs, and the bytes of the file."""
    layer, training, familiar, foreign = features(crops, number)
    data = training.split(16)
    _, posterior = FITS.posterior(f"{IMAGENET} {crops}", 0, lambda: layer, data, setting.fit)
    predictor = set_up(posterior, setting, data)
    return {
        "AUROC": setting_aurocs(predictor, setting, familiar, foreign),
        "bytes": file_bytes(posterior),
    }


def rows_of(
    rows: Rows, only: Sequence[str] | None = None, names: Sequence[str] | None = None, small: bool = False
) -> Iterator[dict[str, Any]]:
    """All rows, as they are there: one for each setting.

    Args:
        rows: where they are kept.
        only: names of the settings; None for all.
        names: texts, of which the network's name must hold one; None for no such choice.
        small: few crops and settings, for the tests.
    """
    if names is not None and not any(name in IMAGENET for name in names):
        return
    crops, number = SMALL if small else (CROPS, CROPS_A_KIND)
    for name, setting in SETTINGS_HERE.items():
        if (only is not None and name not in only) or (small and name not in SMALL_SETTINGS):
            continue
        key = {"study": "choose", "pair": IMAGENET, "seed": 0, "row": name}
        key |= {"setting": asdict(setting), "crops": crops, "foreign": number}
        row = rows.row(key, partial(measured, setting, crops, number))
        if row is not None:
            yield key | row


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each setting; errors below. Empty where the network was not run."""
    own = [row for row in found if row["pair"] == IMAGENET]
    if not own:
        return ""
    lines = [
        [row["row"], *auroc_cells([row]), f"{row['bytes'] / 1000:.0f}"] for row in own if "error" not in row
    ]
    header = ["setting", *(f"AUROC, {name}" for name in AUROCS), "kB"]
    errors = [f"{IMAGENET}, {row['row']}: {row['error']}" for row in own if "error" in row]
    return "\n".join([f"\n### {IMAGENET}, last layer\n", markdown(header, lines), *errors])
