"""Errors and costs of the links from Gaussian logits to class probabilities, by the number of classes.

    python benchmarks/link_cost.py                     3 to 12,000 classes; some forty minutes of a processor
    python benchmarks/link_cost.py --cases digits 100  some of the networks
    python benchmarks/link_cost.py --smoke             three classes, few draws; seconds

Every network is trained here (EfficientNet-Lite0 has its ImageNet weights), and its last layer has a posterior by KFAC,
with 12,000 classes by the diagonal. Of some inputs, half of them among the least decided, the logits' covariance is
scaled so that centred logits have a deviation of .5, 2, 6 and 14 in the root mean square. Against many draws of the
logits in float64 stand the mean and the largest error in total variation ("TV"), the divergence in nats ("KL"), and the
mean error of the logarithms of all probabilities above 1e-6 ("log"). At each draw the probability of a class is the
exact mean over what its logit varies by itself, given all differences of the others; without covariances it is that
given all others. "noise" is what the draws are off by, estimated from their halves.

The cost is the processor time of a whole later prediction with its probabilities read, in microseconds a row.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _harness import Row, machine, output_file, single_threaded, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads.predictor import from_gaussian
from posthoc_uq.likelihoods.logits import logistic_normal

DEVIATIONS = 0.5, 2.0, 6.0, 14.0
DRAWS, DRAWS_OF_MANY = 100_000, 20_000
"""Of the reference; the second of more than a thousand classes."""
ROWS, ROWS_OF_MANY = 4, 2
"""Inputs whose errors are measured; the second of more than a thousand classes."""
LINKS = "mc", "probit"
TIMED = 64  # rows of a timed batch


class Trained(NamedTuple):
    """A network and its data.

    Attributes:
        model: trained.
        fit: inputs of the fit.
        shown: other inputs.
        method: of the posterior.
    """

    model: nn.Module
    fit: Tensor
    shown: Tensor
    method: str = "kfac"


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """The network after some steps of Adam."""
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        batch = torch.randint(0, len(inputs), (256,))
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimiser.step()
    return model.eval()


def digits(classes: int) -> Trained:
    """Pictures of the first so many digits, 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    found: Any = load_digits(n_class=classes)
    inputs, labels = torch.tensor(found.data / 16).float(), torch.tensor(found.target)
    inputs, labels = (part[torch.randperm(len(labels), generator=seeded(1))] for part in (inputs, labels))
    half = 2 * len(labels) // 3
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, classes))
    return Trained(trained(model, inputs[:half], labels[:half], 300), inputs[:half], inputs[half:])


def clusters(classes: int, method: str = "kfac") -> Trained:
    """Normal clusters in 32 dimensions, a class each."""
    centres = torch.randn(classes, 32, generator=seeded(0))
    labels = torch.randint(0, classes, (26_000,), generator=seeded(1))
    inputs = centres[labels] + 0.8 * torch.randn(len(labels), 32, generator=seeded(2))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, classes))
    model = trained(model, inputs[:-1000], labels[:-1000], 600 if classes <= 100 else 1200)
    return Trained(model, inputs[:5000], inputs[-1000:], method)


def pictures() -> Trained:
    """EfficientNet-Lite0 and crops of photographs; the features before its last layer as inputs."""
    from _novelty import efficientnet_lite0, photograph_crops

    model = efficientnet_lite0().eval()
    fit, familiar, foreign = photograph_crops(96, 16)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]

    def features(images: Tensor) -> Tensor:
        caught = list[Tensor]()
        hook = last.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach()))
        with torch.no_grad():
            for part in images.split(16):
                model(part)
        hook.remove()
        return torch.cat(caught)

    head = nn.Sequential(nn.Identity(), last).eval()
    return Trained(head, features(fit), features(torch.cat([familiar, foreign["texture"]])))


CASES: dict[str, Callable[[], Trained]] = {
    "digits, 3": lambda: digits(3),
    "digits, 10": lambda: digits(10),
    "clusters, 100": lambda: clusters(100),
    "clusters, 1,000": lambda: clusters(1000),
    "EfficientNet-Lite0, 1,000": pictures,
    "clusters, 12,000": lambda: clusters(12_000, "diag"),
}


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def chosen_rows(logits: Tensor, number: int) -> Tensor:
    """Indices of inputs, half of them among the quarter of the largest entropy."""
    logs = logits.log_softmax(1)
    order = (logs.exp() * logs).sum(1).argsort()
    undecided = torch.linspace(0, len(order) // 4, number // 2)
    others = torch.linspace(len(order) // 4, len(order) - 1, number - number // 2)
    return order[torch.cat([undecided, others]).long()]


def reference(
    mean: Tensor, covariance: Tensor, deviations: Sequence[float], draws: int
) -> tuple[Tensor, Tensor]:
    """Probabilities ``(deviations, classes)`` of one input, and their noise in total variation ``(deviations,)``.

    Args:
        mean: of the logits, ``(classes,)``.
        covariance: of centred logits of the deviation 1, ``(classes, classes)``, or variances ``(classes,)``.
        deviations: that it is scaled to.
        draws: in pairs with opposite signs.
    """
    classes, full = len(mean), covariance.ndim == 2
    root = given = own = covariance.sqrt()
    if full:
        scale = float(covariance.diagonal().mean())
        shared = torch.full_like(covariance, 1 / classes)
        inverse = torch.linalg.inv(covariance + scale * shared) - shared / scale
        values, vectors = torch.linalg.eigh(covariance)
        root, own = vectors * values.clamp(min=0).sqrt(), 1 / inverse.diagonal()
        given = root - own.unsqueeze(1) * (inverse @ root)
    own = own if full else covariance
    halves = torch.zeros(2, len(deviations), classes, dtype=torch.float64)
    step, generator = max(2, 4_000_000 // classes), seeded(3)
    for start in range(0, draws // 2, step):
        normals = torch.randn(
            classes, min(step, draws // 2 - start), generator=generator, dtype=torch.float64
        )
        for sign in (1, -1):
            moved = sign * (root @ normals if full else root.unsqueeze(1) * normals)
            inside = sign * (given @ normals) if full else torch.zeros_like(moved)
            for place, deviation in enumerate(deviations):
                logits = mean.unsqueeze(1) + deviation * moved
                top, where = logits.max(0, keepdim=True)
                shares = (logits - top).exp().scatter(0, where, 0.0)
                below = shares.sum(0, keepdim=True)
                others = (below + 1 - shares).scatter(0, where, below).clamp(min=1e-300)
                apart = mean.unsqueeze(1) + deviation * inside - top - others.log()
                exponent, factor = logistic_normal(apart, (deviation**2 * own).unsqueeze(1))
                probs = exponent.exp() * factor
                half = probs.shape[1] // 2
                halves[0, place] += probs[:, :half].sum(1)
                halves[1, place] += probs[:, half:].sum(1)
    halves /= halves.sum(-1, keepdim=True)
    return halves.mean(0), (halves[0] - halves[1]).abs().sum(-1) / 4


def errors(log_probs: Tensor, probs: Tensor) -> dict[str, Tensor]:
    """Of predicted logarithms against probabilities, both ``(rows, classes)``: ``(rows,)`` each."""
    logs, known = log_probs.double(), probs > 1e-6
    apart = (logs - probs.clamp(min=1e-300).log()).abs() * known
    return {
        "TV": (logs.exp() - probs).abs().sum(1) / 2,
        "KL": (torch.special.xlogy(probs, probs) - probs * logs).sum(1),
        "log": apart.sum(1) / known.sum(1),
    }


def measured(name: str, rows: int | None, draws: int | None, timed: int = TIMED) -> list[Row]:
    """Errors of each link at each deviation, and costs."""
    torch.manual_seed(0)
    model, fit, shown, method = CASES[name]()
    posterior = uq.fit(
        model,
        list(fit.split(500)),
        method,
        likelihood="classification",
        layers="last",
        prior_precision=1.0,
        progress=False,
    )
    with torch.no_grad():
        logits = model(shown)
    rows = rows or (ROWS if logits.shape[1] <= 1000 else ROWS_OF_MANY)
    shown = shown[chosen_rows(logits, rows)]
    predictor = uq.wrap(model, posterior, outputs="all")
    mean, variance = predictor.functional_mean(shown), predictor.functional_variance(shown)
    classes, full = mean.shape[1], method == "kfac"
    draws = draws or (DRAWS if classes <= 1000 else DRAWS_OF_MANY)
    centred, covariances = variance.double() * (1 - 1 / classes), None
    if full:
        covariances = torch.cat([predictor.functional_covariance(row) for row in shown.split(1)]).double()
        inside = covariances - covariances.mean(1, keepdim=True)
        inside = inside - inside.mean(2, keepdim=True)
        centred = inside.diagonal(dim1=1, dim2=2)
    scales = 1 / centred.mean(1)  # to a deviation of 1
    unit = inside * scales[:, None, None] if full else variance.double() * scales[:, None]
    references = [
        reference(row.double(), of_row, DEVIATIONS, draws) for row, of_row in zip(mean, unit, strict=True)
    ]
    probs, noise = (torch.stack(part, 1) for part in zip(*references, strict=True))
    found = list[Row]()
    for link in LINKS:
        cost = cost_of(uq.wrap(model, posterior, link=link), shown, timed)
        for place, deviation in enumerate(DEVIATIONS):
            factor = (scales * deviation**2).to(variance)
            covariance = None if covariances is None else (covariances * factor[:, None, None]).to(variance)
            predicted: Any = from_gaussian(
                mean, variance * factor[:, None], posterior, covariance=covariance, link=link
            )
            own = errors(predicted.log_probs, probs[place])
            found.append(
                {
                    "network": name,
                    "link": link,
                    "deviation": deviation,
                    **{key: float(value.mean()) for key, value in own.items()},
                    "largest TV": float(own["TV"].max()),
                    "noise": float(noise[place].mean()),
                    "microseconds a row": cost,
                }
            )
    return found


def cost_of(predictor: uq.Predictor, inputs: Tensor, rows: int, repeats: int = 7) -> float:
    """Processor time of a later prediction, the least of some, in microseconds a row."""
    batch, times = inputs.repeat(math.ceil(rows / len(inputs)), 1)[:rows], list[float]()
    for _ in range(repeats):
        start = time.process_time()
        predictor(batch).probs  # noqa: B018
        times.append(time.process_time() - start)
    return min(times[1:]) / rows * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", help="parts of names of the networks; all by default")
    parser.add_argument("--rows", type=int, help="inputs whose errors are measured")
    parser.add_argument("--draws", type=int, help="of the reference, instead of the default numbers")
    parser.add_argument("--smoke", action="store_true", help="three classes and few draws")
    parser.add_argument("--json", type=output_file, help="a file for the results")
    options = parser.parse_args(arguments)
    cases = [name for name in CASES if options.cases is None or any(case in name for case in options.cases)]
    found = list[Row]()
    with single_threaded():
        for name in cases[:1] if options.smoke else cases:
            found += (
                measured(name, 2, 2000, 4) if options.smoke else measured(name, options.rows, options.draws)
            )
            print(table([row for row in found if row["network"] == name]), flush=True)
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "rows": found})


if __name__ == "__main__":
    main()
