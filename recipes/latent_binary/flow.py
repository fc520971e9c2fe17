"""What the flow's factor z does for the full average and for the median model, beside networks without a flow.

    python -m recipes.latent_binary.flow            10,000 images of FashionMNIST; ten minutes
    python -m recipes.latent_binary.flow --smoke    seconds

784-400-600-10, trained, then latent binary networks around it: without a flow (LRT), with the default flow, and around
the first network also with larger flows and other rates. Every posterior predicts by its full average and its median
model, with z drawn anew for every draw of the weights, and with z at its mean. "z" is the median over a network's
factors of deviation / mean; "left out" is what the median model leaves out of the sum of all squared mean weights times
their inclusion. Differences are of the same test images, less the first row's (LRT), with their standard error.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.trained.variational import LatentBinaryBlock
from recipes.common import by_row, looked_at, parsed, parser, predicted, report, table
from recipes.fashion_mnist.data import Labelled, add_options, load
from recipes.latent_binary.images import drawn
from recipes.latent_binary.networks import Batches, new, train

ROWS: dict[str, dict[str, Any]] = {
    "LRT": {"flow": False},
    "flow": {},
    "LRT, three times the rate": {"flow": False, "lr": 3e-3},
    "flow of 4 steps": {"flow_steps": 4},
    "flow of 200 units": {"flow_units": 200},
    "flow of couplings": {"flow_form": "coupling"},
    "flow, ten times the rate": {"flow_lr": 1e-2},
}


def without_flow(posterior: uq.Posterior) -> uq.Posterior:
    """The same with the mean of z in its place."""
    blocks: dict[str, Any] = {}
    for name, block in posterior.blocks.items():
        found: Any = block
        if found.scale is not None:
            means = found.means * found.scale.matrix(found.scale.tensors["z_mean"], found.means.shape, 1.0)
            found = dataclasses.replace(found, means=means, scale=None)
        blocks[name] = found
    return posterior.with_blocks(blocks)


def blocks_of(posterior: uq.Posterior) -> list[LatentBinaryBlock]:
    """Those with inclusion probabilities, which all are."""
    return [block for block in posterior.blocks.values() if isinstance(block, LatentBinaryBlock)]


def of_weights(posterior: uq.Posterior) -> dict[str, float]:
    """Density, spread of z, and what the median model leaves out."""
    scales = [block.scale.tensors for block in blocks_of(posterior) if block.scale is not None]
    found = {"density": uq.sparse.summary(posterior).density}
    if scales:
        found["z"] = float(torch.cat([t["z_variance"].sqrt() / t["z_mean"].abs() for t in scales]).median())
    all_of = left = 0.0
    for block in blocks_of(without_flow(posterior)):
        inclusion, size = block.inclusion, block.inclusion * block.means.square()
        all_of, left = all_of + float(size.sum()), left + float(size[inclusion <= 0.5].sum())
    return found | {"left out": left / all_of}


def right(model: torch.nn.Module, posterior: uq.Posterior, part: Labelled) -> Tensor:
    """Which images are told, 0 or 100."""
    probabilities = predicted(drawn(model, posterior), part.images, 1000)
    return 100 * (probabilities.argmax(-1) == part.labels).double()


def told(model: torch.nn.Module, posterior: uq.Posterior, part: Labelled) -> dict[str, Tensor]:
    """The same by each prediction."""
    found = {"full average": posterior, "median model": uq.sparse.median(posterior)}
    if any(block.scale is not None for block in blocks_of(posterior)):
        fixed = without_flow(posterior)
        found |= {"full average, fixed z": fixed, "median model, fixed z": uq.sparse.median(fixed)}
    return {name: right(model, each, part) for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Every network, then the table."""
    command = parser(__doc__, "latent_binary", "few images, one epoch")
    add_options(command)
    add = command.add_argument
    add("--seeds", type=int, default=2, help="networks; larger flows and other rates with the first")
    add("--network-epochs", type=int, default=10, help="of the plain training")
    add("--epochs", type=int, default=6, help="of a latent binary network")
    add("--inclusion-lr", type=float, default=0.1, help="large, since there are few steps")
    add("--images", type=int, default=10_000, help="to train on")
    add("--rows", nargs="+", choices=list(ROWS), help="by default all; differences are from the first")
    options = parsed(command, arguments, seeds=1, network_epochs=1, epochs=1)
    with looked_at():
        data = load(options.data, download=options.download)
    data = data._replace(train=data.train.first(options.images))
    if options.smoke:
        data = data.first(200, 50, 60, None)
    results: list[dict[str, dict[str, float]]] = []
    for seed in range(options.seeds):
        model = new("dense", seed)
        train(model, data.train, options.network_epochs, 1e-3, seed)
        rows: dict[str, dict[str, float]] = {}
        beside: dict[str, Tensor] = {}
        default = ROWS if seed == 0 and not options.smoke else ("LRT", "flow")
        for name in options.rows or default:
            given: dict[str, Any] = {"flow": True, "inclusion_lr": options.inclusion_lr} | ROWS[name]
            method = uq.LatentBinary(epochs=options.epochs, **given)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                batches = Batches(data.train, seed=seed)
                posterior = uq.fit(model, batches, method, seed=seed, progress=False)
            found = told(model, posterior, data.test)
            beside = beside or found
            rows[name] = {key: float(values.mean()) for key, values in found.items()} | of_weights(posterior)
            for key in beside if len(rows) > 1 else ():
                difference = found[key] - beside[key]
                rows[name][f"{key}, less LRT"] = float(difference.mean())
                rows[name][f"{key}, error"] = float(difference.std()) / len(difference) ** 0.5
            print(seed, name, rows[name], flush=True)
        results.append(rows)
    kept = by_row(results)
    report(options, "flow", table(kept, corner="network"), kept)


if __name__ == "__main__":
    main()
