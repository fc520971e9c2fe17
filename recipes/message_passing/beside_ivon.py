"""The convolutional network of `images`, trained by IVON (Shen et al., 2024) in place of messages.

It needs ivon-opt, in an environment of its own, since nothing else here does:

python -m venv ivon
ivon/bin/pip install -e . ivon-opt -r recipes/message_passing/requirements.txt
ivon/bin/python -m recipes.message_passing.beside_ivon            five minutes
ivon/bin/python -m recipes.message_passing.beside_ivon --smoke    few images

The network, its initial weights, the 1,000 images and the batches are those of `images`. The initial
Hessian and the number of epochs are what suits images held out, by the likelihood at the mean.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

try:
    from ivon import IVON
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install ivon-opt") from error

from recipes.common import in_random_order, looked_at, parsed, parser, report, table
from recipes.fashion_mnist.data import Data, add_options, load
from recipes.fashion_mnist.methods import from_logits
from recipes.message_passing.images import BATCH, network, row


def trained(
    data: Data, rate: float, hessian: float, options: argparse.Namespace
) -> tuple[float, nn.Module, dict[str, Any]]:
    """The lowest held-out NLL over the epochs, with the network and IVON's state there."""
    part = data.train.first(options.images)
    held_out = data.validation.first(options.held_out)
    model = network(options.channels, options.seed)
    optimiser = IVON(model.parameters(), lr=rate, ess=len(part.labels), hess_init=hessian)
    steps = options.epochs * math.ceil(len(part.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(options.seed)
    best = (float("inf"), model, optimiser.state_dict())
    for _ in range(options.epochs):
        for images, labels in in_random_order(*part, BATCH, generator):
            with optimiser.sampled_params(train=True):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(held_out.images), held_out.labels))
        if loss < best[0]:
            best = loss, copy.deepcopy(model), copy.deepcopy(optimiser.state_dict())
    return best


def study(data: Data, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """IVON by drawn weights, and at the mean."""
    torch.manual_seed(options.seed)
    tried: dict[tuple[float, float], Any] = {}
    for setting in itertools.product(options.rates, options.hessians):
        begun = time.perf_counter()
        tried[setting] = *trained(data, *setting, options), time.perf_counter() - begun
        print(f"rate, Hessian {setting}: held-out NLL {tried[setting][0]:.4f}", flush=True)
    rate, hessian = min(tried, key=lambda setting: tried[setting][0])
    _, model, state, seconds = tried[rate, hessian]
    optimiser = IVON(model.parameters(), lr=rate, ess=options.images, hess_init=hessian)
    optimiser.load_state_dict(state)
    drawn: list[nn.Module] = []
    for _ in range(options.draws):
        with optimiser.sampled_params():
            drawn.append(copy.deepcopy(model))
    name = f"IVON, rate {rate:g}, Hessian {hessian:g}"
    return {
        f"{name}, {options.draws} draws": row(
            lambda images: from_logits(torch.stack([one(images) for one in drawn])), data, seconds
        ),
        f"{name}, at the mean": row(lambda images: from_logits(model(images).unsqueeze(0)), data, seconds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "message_passing", "few images")
    add_options(command)
    add = command.add_argument
    add("--images", type=int, default=1000, help="to train on")
    add("--held-out", type=int, default=1000, help="images to choose by")
    add("--channels", type=int, default=8, help="of the first two convolutions; the paper's 32")
    add("--epochs", type=int, default=40, help="at most")
    add("--rates", type=float, nargs="+", default=[0.1])
    add("--hessians", type=float, nargs="+", default=[0.1, 1.0], help="where the Hessian begins")
    add("--draws", type=int, default=20, help="of weights, for every prediction; the paper's 100")
    add("--seed", type=int, default=0)
    options = parsed(command, arguments, images=20, channels=2, epochs=1, draws=3)
    with looked_at():
        data = load(options.data, download=options.download)
    if options.smoke:
        data = data.first(40, 40, 40, 40)
    rows = study(data, options)
    report(options, "beside_ivon", table(rows, ".4g", corner="trained by"), rows)


if __name__ == "__main__":
    main()
