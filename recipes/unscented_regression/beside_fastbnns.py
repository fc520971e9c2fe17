"""The same regression by fastbnns, the package of the paper's author: NLL, and the time of a training and of a batch.

It needs fastbnns, in an environment of its own (`requirements.txt`):

python -m recipes.unscented_regression.beside_fastbnns            five seeds; two minutes on one core
python -m recipes.unscented_regression.beside_fastbnns --smoke    one seed, few steps
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

try:
    from fastbnns.bnn.base import BNN
    from fastbnns.bnn.losses import ELBO
    from fastbnns.bnn.types import MuVar
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install -r recipes/unscented_regression/requirements.txt") from error

from recipes.common import markdown, parsed, parser, report
from recipes.unscented_regression.compare import (
    SMOKE,
    TIMED,
    UTVI,
    Settings,
    add_options,
    moments,
    nll,
    spread_of,
    train,
)
from recipes.unscented_regression.problem import FreshData, network, sample

OURS, THEIRS, STARTED_ALIKE = "posthoc_uq", "fastbnns", "fastbnns, rho starts at -5"
SMALLEST = 1e-10
"""A variance below which a density is not taken, as in posthoc_uq's training without noise."""


def predicted(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a fastbnns network's outputs."""
    outputs = model(MuVar(x))
    return outputs.mu, outputs.var.clamp(min=SMALLEST)


def density(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Mean negative log density of held-out targets, in nats."""
    with torch.no_grad():
        mean, variance = predicted(model, data[0])
    return -float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(data[1]).mean())


def train_theirs(seed: int, settings: Settings, alike: bool) -> tuple[BNN, float]:
    """A fastbnns network trained as `compare.method` says, and the seconds it took."""
    torch.manual_seed(seed)
    model = BNN(nn=network(seed).train())
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # constants are broadcast, which no optimiser can write to
    if alike:
        for _, rho in model.named_parameters_tagged("_rho"):
            nn.init.constant_(rho, -5.0)
    loss_of = ELBO(nn.GaussianNLLLoss(full=True, reduction="mean"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    held_out = sample(settings.validation, torch.Generator().manual_seed(1_000_000))
    data, samples = FreshData(settings.batches, settings.size), settings.batches * settings.size
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    begun = time.perf_counter()
    for epoch in range(settings.epochs):
        loss_of._beta = 2.0**-epoch / samples
        for x, y in data:
            optimiser.zero_grad()
            mean, variance = predicted(model, x)
            loss_of(model=model, input=mean, target=y, var=variance).backward()
            optimiser.step()
        score = density(model, held_out)
        if score < best:
            best, kept = score, copy.deepcopy(model.state_dict())
    seconds = time.perf_counter() - begun
    model.load_state_dict(kept)
    return model, seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """All trainings in turns, then batches in turns."""
    command = parser(__doc__, "unscented_regression", "one seed, few steps")
    add_options(command)
    command.add_argument("--rounds", type=int, default=50, help="batches that are timed")
    options = parsed(command, arguments, **SMOKE)
    torch.set_num_threads(1)
    settings = Settings(options.epochs, options.batches)
    test = sample(8192, torch.Generator().manual_seed(2_000_000))
    scores: dict[str, list[float]] = {OURS: [], THEIRS: [], STARTED_ALIKE: []}
    lasting: dict[str, list[float]] = {name: [] for name in scores}
    for seed in range(options.seeds):
        ours = train(UTVI, seed, settings)
        scores[OURS].append(nll(ours.predictor, test))
        lasting[OURS].append(ours.seconds)
        for name in (THEIRS, STARTED_ALIKE):
            theirs, seconds = train_theirs(seed, settings, name == STARTED_ALIKE)
            scores[name].append(density(theirs, test))
            lasting[name].append(seconds)
    x, times = sample(TIMED)[0], {OURS: list[float](), THEIRS: list[float]()}
    for turn in range(options.rounds + 1):
        for name, taken in times.items():
            begun = time.perf_counter()
            with torch.no_grad():
                _ = moments(ours.predictor, x) if name == OURS else theirs(MuVar(x))
            if turn:
                taken.append(time.perf_counter() - begun)
    batch = {name: min(taken) for name, taken in times.items()}
    lines = [["package", "NLL", "spread over seeds", "training, s", "batch of 1024, ms"]]
    for name, own in scores.items():
        mean, spread = spread_of(own)
        milliseconds = f"{1000 * batch[name]:.2f}" if name in batch else ""
        lines.append([name, f"{mean:.4f}", f"{spread:.4f}", f"{min(lasting[name]):.1f}", milliseconds])
    content = {"NLL": scores, "seconds of training": lasting, "seconds a batch": batch}
    report(options, "beside_fastbnns", markdown(lines), content)


if __name__ == "__main__":
    main()
