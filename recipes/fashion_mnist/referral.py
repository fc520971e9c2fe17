"""Referral of one input in twenty on FashionMNIST: the mistakes and the foreign images that a person gets to see.

    python -m recipes.fashion_mnist.referral --seeds 0 1 2      # as the README shows it
    python -m recipes.fashion_mnist.referral --smoke            # some seconds, for checking that it runs

The border of every score is set on held-out images alone, so that at most the given share of images like them is
referred. Writes ``referral.md`` and ``referral.json``; networks are kept and shared with ``run``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import Row, by_row, looked_at, parsed, parser, predicted, report, table
from recipes.fashion_mnist.data import Data, add_options, load, normalised, pixels
from recipes.fashion_mnist.methods import loader
from recipes.fashion_mnist.network import check_kept, trained
from recipes.function_space.foreign import letters, photos

SCORES = ("joint", "entropy", "novelty")


def foreign(data: Data, number: int) -> dict[str, Tensor]:
    """Images that are not of the ten kinds of clothing, or not as they were photographed, by what they are."""
    generator = torch.Generator().manual_seed(0)
    test = data.test.images[:number]
    noise = torch.randint(256, (number, 28, 28), generator=generator)
    grey = torch.linspace(0, 255, number).reshape(-1, 1, 1).expand(-1, 28, 28)
    return {
        "digits": data.digits[:number],
        "letters": normalised(letters(number)),
        "photos": normalised(photos(number)),
        "noise": normalised(noise),
        "one grey": normalised(grey),
        "negatives": normalised(255 - pixels(test)),
        "on its side": test.rot90(1, (2, 3)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Every seed, then the table of means."""
    command = parser(__doc__, "fashion_mnist", "few images, a smaller network, one epoch")
    add_options(command)
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one network each")
    add("--epochs", type=int, default=15, help="of the networks")
    add("--learning-rate", type=float, default=0.01)
    add("--held-out", type=int, default=2000, help="images to calibrate on")
    add("--rate", type=float, default=0.05, help="the share of familiar images to refer")
    add("--foreign", type=int, default=2000, help="images of each foreign kind")
    options = parsed(command, arguments, seeds=[0], epochs=1, held_out=120, foreign=20)
    filters = 16 if options.smoke else 32
    with looked_at():
        data = load(options.data, download=options.download)
        if options.smoke:
            data = data.first(140, 120, 60, 20)
        options.output /= f"{len(data.train.labels)}-{options.epochs}-{options.learning_rate:g}"
        check_kept(options.output, options.seeds, filters)
        others = foreign(data, options.foreign)
    results: list[dict[str, Row]] = []
    for seed in options.seeds:
        model = trained(data.train, seed, options.output, options.epochs, options.learning_rate, filters)
        results.append(one_seed(model, data, others, options.held_out, options.rate, seed))
        page = table(by_row(results), ".1f", corner="score, all in %")
        report(options, "referral", page, results)


def one_seed(
    model: nn.Module, data: Data, others: Mapping[str, Tensor], held_out: int, rate: float, seed: int
) -> dict[str, Row]:
    """What every score refers, in percent."""
    known = data.validation.first(held_out)
    posterior = uq.fit(model, loader(data.train, 500), "inf", val_loader=loader(known), seed=seed)
    predictor = uq.wrap(model, posterior)
    wrong = torch.ones(len(data.test.labels), dtype=torch.bool)
    referred: dict[str, dict[str, Tensor]] = {score: {} for score in ("largest probability", *SCORES)}
    border = probability_border(model, known.images, rate)
    kinds = {"familiar": data.test.images, **others}
    for kind, images in kinds.items():
        prediction = predicted(predictor, images, 500)
        for score in SCORES:
            referred[score][kind] = uq.Referral(rate=rate, score=score)(prediction)
        referred["largest probability"][kind] = largest_probability(model, images) <= border
        if kind == "familiar":
            wrong = prediction.predicted() != data.test.labels
    return {score: percentages(by_kind, wrong) for score, by_kind in referred.items()}


@torch.no_grad()
def largest_probability(model: nn.Module, images: Tensor) -> Tensor:
    """Of the network alone, (images,)."""
    return predicted(model, images, 500).double().softmax(1).amax(1)


def probability_border(model: nn.Module, known: Tensor, rate: float) -> float:
    """The largest probability up to which at most `rate` of images like the held-out ones are referred, as conformal
    p-values have it: the ``floor(rate * (n + 1))``-th smallest.
    """
    return float(largest_probability(model, known).sort().values[int(rate * (len(known) + 1)) - 1])


def percentages(referred: Mapping[str, Tensor], wrong: Tensor) -> Row:
    """Of familiar images, the share that is referred, the accuracy before and after, and the share of the mistakes that
    are among the referred; then the share of each foreign kind that is referred.
    """
    familiar = referred["familiar"]
    found = {
        "accuracy": (~wrong).double().mean(),
        "of the rest": (~wrong[~familiar]).double().mean(),
        "mistakes referred": familiar[wrong].double().mean(),
        **{kind: chosen.double().mean() for kind, chosen in referred.items()},
    }
    return {name: 100 * float(share) for name, share in found.items()}


if __name__ == "__main__":
    main()
