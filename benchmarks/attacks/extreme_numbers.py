"""Attacks with data whose numbers are extreme: fits, updates, and what can be done with the posterior afterwards.

    python benchmarks/attacks/extreme_numbers.py            every method, all data; minutes
    python benchmarks/attacks/extreme_numbers.py --smoke    two methods, some data; seconds

A call may refuse such data, with an error of the package that is one or two sentences. What it accepts must be of use:

* fits: the posterior can be saved, loaded and read back, predicts finite numbers for ordinary inputs, and has a finite
  log marginal likelihood where it has one.
* updates: one batch of otherwise ordinary data is scaled. Where `uq.update` takes it, the posterior can be saved, and
  taking the same batch out again gives the predictions from before.

It prints what was tried and how often the outcome was bad, and ends with 1 if any was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.methods import METHODS

INPUTS, OUTPUTS, SAMPLES = 5, 3, 24
UPDATED = ("diag", "full", "subnetwork", "kfac", "kfac with Grams", "efb", "inf")
SCALES = (1e-20, 1e1, 1e2, 1e3, 1e6, 1e9, 1e12, 1e15, 1e18, 1e25, 1e36)
_CLOSE = 1e-2  # how near predictions must come again after data came in and went out, in probabilities

Batches = list[tuple[Tensor, Tensor]]


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, OUTPUTS)).eval()


def rectified() -> nn.Sequential:
    """A network whose features grow with its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, OUTPUTS)).eval()


def method_of(name: str) -> Any:
    """A method with settings that are quick."""
    if name == "kfac with Grams":
        return uq.KFAC(keep_grams=True)
    kind = METHODS[name]
    quick = {"epochs": 1, "val_draws": 2, "n_context": 4}
    own = getattr(kind, "__dataclass_fields__", {})
    return kind(**{option: value for option, value in quick.items() if option in own})


def inputs(samples: int = SAMPLES, seed: int = 1) -> Tensor:
    return torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(seed))


def labels(samples: int = SAMPLES, seed: int = 2) -> Tensor:
    return torch.randint(OUTPUTS, (samples,), generator=torch.Generator().manual_seed(seed))


def targets(samples: int = SAMPLES, seed: int = 3) -> Tensor:
    return torch.randn(samples, OUTPUTS, generator=torch.Generator().manual_seed(seed))


def in_batches(x: Tensor, y: Tensor, size: int = 8) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


def fits() -> dict[str, tuple[Callable[[], nn.Module], Batches, str]]:
    """Networks, data and likelihoods by what is extreme about them."""
    x, y, z = inputs(), labels(), targets()
    few, one = x.clone(), x.clone()
    few[:8] *= 1e18
    one[3, 2] = 1e30

    def dead() -> nn.Module:
        net = rectified()
        nn.init.zeros_(net[2].weight)
        return net

    def huge() -> nn.Module:
        net = rectified()
        with torch.no_grad():
            net[0].weight.mul_(1e12)
        return net

    def tiny() -> nn.Module:
        net = rectified()
        with torch.no_grad():
            net[0].weight.mul_(1e-25)
            net[2].weight.mul_(1e-25)
        return net

    kinds: dict[str, tuple[Callable[[], nn.Module], Batches, str]] = {
        "one sample": (network, [(x[:1], y[:1])], "classification"),
        "one sample, regression": (network, [(x[:1], z[:1])], "regression"),
        "zero inputs": (rectified, in_batches(0 * x, y), "classification"),
        "zero inputs, regression": (rectified, in_batches(0 * x, 0 * z), "regression"),
        "one batch times 1e18": (rectified, in_batches(few, y), "classification"),
        "one number of 1e30": (rectified, in_batches(one, y), "classification"),
        "targets that the network gives": (rectified, in_batches(x, rectified()(x).detach()), "regression"),
        "no weights in the last layer": (dead, in_batches(x, y), "classification"),
        "weights of 1e12": (huge, in_batches(x, y), "classification"),
        "weights of 1e-25": (tiny, in_batches(x, y), "classification"),
        "one class": (network, in_batches(x, 0 * y), "classification"),
    }
    for size in (1e9, 1e15, 1e18, 1e25, 1e31, 1e37):
        kinds[f"inputs times {size:g}"] = (rectified, in_batches(size * x, y), "classification")
        kinds[f"inputs times {size:g}, regression"] = (rectified, in_batches(size * x, z), "regression")
    for size in (1e-20, 1e-38):
        kinds[f"inputs times {size:g}"] = (rectified, in_batches(size * x, y), "classification")
    for size in (1e10, 1e16, 1e20, 1e30, 1e38):
        kinds[f"targets times {size:g}"] = (network, in_batches(x, size * z), "regression")
    return kinds


def finite(prediction: Any) -> bool:
    return all(
        bool(value.isfinite().all()) for value in prediction.numbers().values() if value.is_floating_point()
    )


def proper(error: Exception) -> bool:
    """Whether an error is one of the package's, and not a report of its own mistakes."""
    return isinstance(error, uq.PosthocUQError)


def of_use(net: nn.Module, posterior: uq.Posterior, folder: Path) -> str:
    """What cannot be done with a posterior, or nothing."""
    for task, attempt in {
        "saved": lambda: uq.save(posterior, folder / "p.h5"),
        "loaded": lambda: uq.load(folder / "p.h5", net),
    }.items():
        try:
            attempt()
        except Exception as error:
            return f"cannot be {task}: {type(error).__name__}: {error}"
    try:
        if not finite(uq.wrap(net, posterior)(inputs(4, seed=9))):
            return "predicts numbers that are not finite"
    except Exception as error:
        return f"cannot predict: {type(error).__name__}: {error}"
    try:
        if not bool(posterior.log_marginal_likelihood().isfinite()):
            return "has no finite log marginal likelihood"
    except uq.PosthocUQError as error:
        if isinstance(error, uq.NonFiniteError):
            return f"has no log marginal likelihood: {error}"
    return ""


def attack_fit(
    name: str,
    make: Callable[[], nn.Module],
    data: Batches,
    likelihood: str,
    options: dict[str, Any],
    folder: Path,
) -> str:
    """How a fit goes: ``"refused"``, ``"of use"``, or what is bad about it."""
    net = make()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    try:
        posterior = uq.fit(net, data, method_of(name), likelihood=likelihood, progress=False, **options)
    except Exception as error:
        outcome = "refused" if proper(error) else f"raw {type(error).__name__}: {error}"
    else:
        outcome = of_use(net, posterior, folder) or "of use"
    same = all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    return outcome if same else "the model was changed"


def attack_update(name: str, size: float, folder: Path) -> str:
    """How an update with a scaled batch goes."""
    net = rectified()
    data = in_batches(inputs(), labels())
    posterior = uq.fit(net, data, method_of(name), progress=False, prior_precision=1.0)
    x, scaled = inputs(4, seed=9), [(size * inputs(8, seed=5), labels(8, seed=6))]
    first = uq.wrap(net, posterior, "linearized")(x).probs
    try:
        posterior = uq.update(posterior, scaled, progress=False)
    except Exception as error:
        return "refused" if proper(error) else f"raw {type(error).__name__}: {error}"
    fault = of_use(net, posterior, folder)
    if fault:
        return f"taken, and {fault}"
    try:
        posterior = uq.update(posterior, scaled, remove=True, progress=False)
    except Exception as error:
        return f"taken, and cannot go out: {type(error).__name__}: {error}"
    fault = of_use(net, posterior, folder)
    if fault:
        return f"taken out, and {fault}"
    distance = float((uq.wrap(net, posterior, "linearized")(x).probs - first).abs().max())
    return "of use" if distance < _CLOSE else f"taken out, and predictions are off by {distance:.2g}"


def main() -> None:
    """Attack, and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="*", help="by name; all by default")
    parser.add_argument("--smoke", action="store_true", help="seconds")
    parser.add_argument("--show", action="store_true", help="every bad outcome in words")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = arguments.methods or (["diag", "kfac"] if arguments.smoke else [*METHODS, "kfac with Grams"])
    kinds, sizes = fits(), SCALES
    if arguments.smoke:
        kinds, sizes = {key: kinds[key] for key in list(kinds)[:4]}, (1e6, 1e18)
    rows: list[tuple[str, Counter[str]]] = []

    def count(attack: str, outcomes: dict[str, str]) -> None:
        counted = Counter(value if value in ("refused", "of use") else "bad" for value in outcomes.values())
        rows.append((attack, counted))
        for what, outcome in outcomes.items():
            if arguments.show and outcome not in ("refused", "of use"):
                print(f"{attack}, {what}: {outcome:.200}", flush=True)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in names:
            outcomes = dict[str, str]()
            trains = method_of(name).trains or name == "message_passing"
            for what, (make, data, likelihood) in kinds.items():
                known = getattr(method_of(name), "likelihoods", None)
                if known is not None and likelihood not in known:
                    continue
                for prior in (None,) if trains else (None, 1.0):
                    options: dict[str, Any] = {} if prior is None else {"prior_precision": prior}
                    outcomes[f"{what}, {'default' if prior is None else 'given'} prior"] = attack_fit(
                        name, make, data, likelihood, options, folder
                    )
            count(f"fits, {name}", outcomes)
            if name in UPDATED:
                count(
                    f"updates, {name}",
                    {f"times {size:g}": attack_update(name, size, folder) for size in sizes}
                    if name not in ("kfac",)
                    else {},
                )
    print(f"{'attack':<32} {'tries':>6} {'refused':>8} {'of use':>7} {'bad outcomes':>13}")
    for attack, counted in rows:
        if counted.total():
            print(
                f"{attack:<32} {counted.total():>6} {counted['refused']:>8} {counted['of use']:>7} {counted['bad']:>13}"
            )
    sys.exit(1 if any(counted["bad"] for _, counted in rows) else 0)


if __name__ == "__main__":
    main()
